"""The tables of the first page about performance: a few cases of the benchmarks, and all of them together.

Figures of the newest jax come first, those of the oldest that is supported follow in brackets.
"""

import statistics
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from measure import GRADIENT, OPTIONAL, PASSES, Row
from operations import Size
from results import (
    DISPATCH_MS,
    NOTHING,
    SLOWER,
    Ratio,
    as_markdown,
    cost,
    distinct,
    environment,
    grouped,
    how_many_exceed,
    in_order_of_passes,
    jax_of,
    ratio_text,
    ratios_to_peers,
)

ALL_PACKAGES = ("masksafe", "numpy", *OPTIONAL)
MOST_LINES = 10  # of the table of what is slower


@dataclass(frozen=True)
class Headline:
    """A case of a benchmark, the peer, what its line is called, and what it is called in the picture if it is there."""

    benchmark: str
    work: str
    mask: str
    dtype: str
    size: str
    peer: str
    text: str
    in_picture: str = ""

    def is_of(self, ratio: Ratio) -> bool:
        row = ratio.row
        case = row.benchmark, row.work, row.mask, row.dtype, row.size, ratio.peer.candidate
        return case == (self.benchmark, self.work, self.mask, self.dtype, self.size, self.peer)


FLOAT32, BFLOAT16 = "float32", "bfloat16"
HEADLINES = [
    Headline(
        *("cross_entropy", "integer", "none", FLOAT32, "large", "optax"),
        "cross-entropy, integer labels",
        "cross-entropy, integer labels",
    ),
    Headline(
        *("cross_entropy", "integer", "rows", FLOAT32, "large", "optax"),
        "cross-entropy, half of the rows masked",
        "cross-entropy, half masked",
    ),
    Headline(
        *("cross_entropy", "integer", "rows", BFLOAT16, "large", "optax"),
        "cross-entropy, half masked, bfloat16",
    ),
    Headline(
        *("linear_cross_entropy", "linear", "none", FLOAT32, "large", "optax"),
        "linear layer and cross-entropy",
        "linear layer and cross-entropy",
    ),
    Headline(
        *("linear_cross_entropy", "linear", "60 % of tokens", FLOAT32, "large", "optax"),
        "linear layer and cross-entropy, 60 % masked",
    ),
    Headline(
        *("linear_log_probs", "log p, entropy", "none", FLOAT32, "large", "jax.nn"),
        "linear layer, log-probabilities and entropies",
        "linear layer and log-probabilities",
    ),
    Headline(
        *("linear_kl_divergence", "forward", "none", FLOAT32, "large", "optax"),
        "KL divergence of two linear layers",
    ),
    Headline(
        *("attention", "attention", "causal", FLOAT32, "long", "jax.nn"),
        "attention, causal, length 4096",
        "causal attention, length 4096",
    ),
    Headline(
        *("attention", "attention", "causal", FLOAT32, "long", "torch"),
        "attention, causal, length 4096",
    ),
    Headline(
        *("attention", "attention", "8 segments", FLOAT32, "long", "jax.nn"),
        "attention, 8 packed segments, length 4096",
        "attention, 8 packed segments",
    ),
    Headline(
        *("attention", "attention", "none", FLOAT32, "many short", "jax.nn"),
        "attention, 64 samples of length 64",
        "attention, 64 samples of length 64",
    ),
    Headline(
        *("normalization", "layer norm", "none", FLOAT32, "large", "flax"),
        "layer norm",
        "layer norm",
    ),
    Headline(
        *("decoder", "decoder", "none", FLOAT32, "large", "flax"),
        "decoder of 12 layers",
    ),
    Headline(
        *("decoder", "decoder", "packed", FLOAT32, "large", "flax"),
        "decoder of 12 layers, packed documents",
        "decoder, packed documents",
    ),
]


def chosen(rows: Sequence[Row]) -> list[tuple[Headline, dict[str, Ratio]]]:
    """The lines whose cases were measured, with the ratio of each pass."""
    found = ratios_to_peers(rows)
    lines = [(line, in_order_of_passes(filter(line.is_of, found))) for line in HEADLINES]
    return [(line, {ratio.row.what: ratio for ratio in passes}) for line, passes in lines if passes]


def drawn(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """The lines of the picture: the ratio of each pass."""
    return {
        f"{line.in_picture} ({line.peer})": {what: ratio.median for what, ratio in passes.items()}
        for line, passes in chosen(rows)
        if line.in_picture
    }


def with_older(newest: str, older: str) -> str:
    return f"{newest} ({older})" if older != NOTHING else newest


def measured(rows: Sequence[Row], older: Sequence[Row], packages: Sequence[str] = ("masksafe",)) -> str:
    """The environment of both versions."""
    if not rows:
        return "Nothing has been measured."
    of_both = [f"{jax_of(found)} ({python_of(found)})" for found in (rows, older) if found]
    return f"Measured with {' and, in brackets, '.join(of_both)}: {environment([*rows, *older], packages)}."


def python_of(rows: Sequence[Row]) -> str:
    return " and ".join(f"Python {version}" for version in distinct(rows, "python"))


def headlines(rows: Sequence[Row], older: Sequence[Row]) -> str:
    """A table of a few cases: ratios of the value and of it with its gradient, and the memory of the gradient."""
    newest, before = chosen(rows), dict(chosen(older))
    lines = []
    for line, passes in newest:
        of_older = before.get(line, {})
        cells = [with_older(cell_of(passes, what), cell_of(of_older, what)) for what in PASSES]
        shape = next(iter(passes.values())).row.shape
        lines.append([f"{line.text} ({shape})", line.peer, *cells, memory(passes.get(GRADIENT))])
    table = as_markdown(["work", "against", "time: value", "with gradient", "MiB: masksafe / the other"], lines)
    return "\n\n".join([measured(rows_of(newest), rows_of(before.items()), ALL_PACKAGES), table])


LONG_ATTENTION = "attention", "attention", "causal", FLOAT32, "long"
FACTS = [
    (
        Headline(*LONG_ATTENTION, "jax.nn", ""),
        "Causal attention, length 4096: {ours} MiB of temporary memory for `jax.nn`'s {theirs}, {ratio} of its time"
        " ({times}).",
    ),
    (
        Headline("attention", "attention", "8 segments", FLOAT32, "long", "jax.nn", ""),
        "Eight packed documents: {ratio} of the time ({times}).",
    ),
    (
        Headline("decoder", "decoder", "none", FLOAT32, "large", "flax", ""),
        "Decoder of 12 layers: {ours} MiB for flax's {theirs}, {ratio} of its time.",
    ),
    (
        Headline(*LONG_ATTENTION, "torch", ""),
        "torch's CPU kernels are faster: that attention takes {ratio} times as long.",
    ),
]


def facts(rows: Sequence[Row], link: str) -> str:
    """A few sentences on gradients. Times are the least ones, which a disturbed machine changes least."""
    of_gradients = [ratio for ratio in ratios_to_peers(rows) if ratio.row.what == GRADIENT]
    found = [(ratio, text) for line, text in FACTS for ratio in filter(line.is_of, of_gradients)]
    lines = [textwrap.fill(f"- {text.format(**figures(ratio))}", 120, subsequent_indent="  ") for ratio, text in found]
    of_both = [row for ratio, _ in found for row in (ratio.row, ratio.peer)]
    intro = f"[Measured]({link}) with gradients, {environment(of_both, ('jax', 'torch'))}:"
    return "\n\n".join([textwrap.fill(intro, 120, break_on_hyphens=False), "\n".join(lines)])


def figures(ratio: Ratio) -> dict[str, str]:
    """What the sentences say of a case."""
    sizes = [row.temporary_bytes for row in (ratio.row, ratio.peer)]
    ours, theirs = (NOTHING if size is None else f"{size / 2**20:.0f}" for size in sizes)
    times = " / ".join(f"{row.minimum_ms / 1e3:.2f} s" for row in (ratio.row, ratio.peer))
    return {"ours": ours, "theirs": theirs, "ratio": f"{ratio.minimum:.2f}", "times": times}


def rows_of(found: Iterable[tuple[Headline, dict[str, Ratio]]]) -> list[Row]:
    return [row for _, passes in found for ratio in passes.values() for row in (ratio.row, ratio.peer)]


def cell_of(passes: dict[str, Ratio], what: str) -> str:
    return ratio_text(passes[what].median) if what in passes else NOTHING


def memory(ratio: Ratio | None) -> str:
    sizes = [ratio.row.temporary_bytes, ratio.peer.temporary_bytes] if ratio else [None]
    return NOTHING if None in sizes else " / ".join(f"{n / 2**20:.0f}" for n in sizes)


def libraries(rows: Sequence[Row], older: Sequence[Row]) -> str:
    """For each other library and pass: how many ratios there are, their geometric mean, how many exceed the limit."""
    key = lambda ratio: (ratio.peer.candidate, ratio.row.what)  # noqa: E731
    newest, before = grouped(ratios_to_peers(rows), key), grouped(ratios_to_peers(older), key)
    lines = []
    for peer in sorted({peer for peer, _ in newest}):
        cells = []
        for what in PASSES:
            both = newest.get((peer, what), []), before.get((peer, what), [])
            cells += [with_older(*map(mean_text, both)), with_older(*map(above_text, both))]
        lines.append([peer, *cells])
    header = ["against", "time: value", f"above {SLOWER}", "with gradient", f"above {SLOWER}"]
    return "\n\n".join([measured(rows, older), as_markdown(header, lines)])


def mean_text(found: Sequence[Ratio]) -> str:
    return ratio_text(statistics.geometric_mean(ratio.median for ratio in found)) if found else NOTHING


def above_text(found: Sequence[Ratio]) -> str:
    return f"{sum(ratio.median > SLOWER for ratio in found)} of {len(found)}" if found else NOTHING


def slowest(rows: Sequence[Row], older: Sequence[Row]) -> str:
    """The kinds of work with the largest mean ratios, without calls that are short or eager."""
    newest, before = by_kind(rows), by_kind(older)
    means = {kind: statistics.geometric_mean(ratio.median for ratio in found) for kind, found in newest.items()}
    worst = sorted((kind for kind in means if means[kind] > SLOWER), key=lambda kind: -means[kind])[:MOST_LINES]
    lines = []
    for kind in worst:
        both = newest[kind], before.get(kind, [])
        largest = cost(max(newest[kind], key=lambda ratio: ratio.median))
        benchmark, work, *rest = kind
        lines.append(
            [
                f"{benchmark.replace('_', ' ')}: {work}",
                *rest,
                with_older(*map(mean_text, both)),
                with_older(*map(above_text, both)),
                largest,
            ]
        )
    header = ["work", "what", "against", "geometric mean", f"above {SLOWER}", f"the worst, {jax_of(rows)}"]
    text = how_many_exceed(ratios_to_peers(rows))
    return "\n\n".join([measured(rows, older), text, as_markdown(header, lines)])


def by_kind(rows: Sequence[Row]) -> dict[tuple[str, ...], list[Ratio]]:
    usual = [r for r in ratios_to_peers(rows) if r.row.median_ms >= DISPATCH_MS and not r.row.eager]
    return grouped(usual, lambda r: (r.row.benchmark, r.row.work, r.row.what, r.peer.candidate))


def programs(rows: Sequence[Row], older: Sequence[Row], sizes: Sequence[Size]) -> str:
    """What the gradients in the picture cost to compile: seconds, and operations where they are counted."""
    before = dict(chosen(older))
    lines = []
    for line, passes in chosen(rows):
        if line.in_picture and GRADIENT in passes:
            both = [
                seconds(found[GRADIENT]) if GRADIENT in found else NOTHING for found in (passes, before.get(line, {}))
            ]
            lines.append([line.text, line.peer, with_older(*both), operations_of(line, sizes)])
    table = as_markdown(["program", "against", "seconds: masksafe / the other", "operations"], lines)
    counted = f"Operations: {environment(sizes, ('masksafe', 'jax'))}." if sizes else ""
    return "\n\n".join(filter(None, [measured(rows, older), counted, table]))


def seconds(ratio: Ratio) -> str:
    return f"{ratio.row.compile_s:.2f} / {ratio.peer.compile_s:.2f}"


def operations_of(line: Headline, sizes: Sequence[Size]) -> str:
    """Those of the same op and mask; they hardly depend on shapes."""
    case = line.benchmark, line.work, line.mask, line.dtype, line.size, GRADIENT
    found = {s.candidate: s for s in sizes if (s.benchmark, s.work, s.mask, s.dtype, s.size, s.what) == case}
    of_both = [found.get(candidate) for candidate in ("masksafe", line.peer)]
    return NOTHING if None in of_both else " / ".join(str(size.operations) for size in of_both)
