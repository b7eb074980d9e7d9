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
SHORTEST_OF_PICTURE = 512
SHORT_CALLS = "short or eager calls"

Point = tuple[int, float, float | None]


@dataclass(frozen=True)
class Headline:
    """A case of a benchmark, the peer, what its line is called, and whether it is told what it costs to compile."""

    benchmark: str
    work: str
    mask: str
    dtype: str
    size: str
    peer: str
    text: str
    is_compiled: bool = False

    def is_of(self, ratio: Ratio) -> bool:
        row = ratio.row
        case = row.benchmark, row.work, row.mask, row.dtype, row.size, ratio.peer.candidate
        return case == (self.benchmark, self.work, self.mask, self.dtype, self.size, self.peer)


FLOAT32, BFLOAT16 = "float32", "bfloat16"
HEADLINES = [
    Headline(
        *("cross_entropy", "integer", "none", FLOAT32, "large", "optax"),
        "cross-entropy, integer labels",
        is_compiled=True,
    ),
    Headline(
        *("cross_entropy", "integer", "rows", FLOAT32, "large", "optax"),
        "cross-entropy, half of the rows masked",
        is_compiled=True,
    ),
    Headline(
        *("cross_entropy", "integer", "rows", BFLOAT16, "large", "optax"),
        "cross-entropy, half masked, bfloat16",
    ),
    Headline(
        *("linear_cross_entropy", "linear", "none", FLOAT32, "large", "optax"),
        "linear layer and cross-entropy",
        is_compiled=True,
    ),
    Headline(
        *("linear_cross_entropy", "linear", "60 % of tokens", FLOAT32, "large", "optax"),
        "linear layer and cross-entropy, 60 % masked",
    ),
    Headline(
        *("linear_log_probs", "log p, entropy", "none", FLOAT32, "large", "jax.nn"),
        "linear layer, log-probabilities and entropies",
        is_compiled=True,
    ),
    Headline(
        *("linear_kl_divergence", "forward", "none", FLOAT32, "large", "optax"),
        "KL divergence of two linear layers",
    ),
    Headline(
        *("attention", "attention", "causal", FLOAT32, "long", "jax.nn"),
        "attention, causal, length 4096",
        is_compiled=True,
    ),
    Headline(
        *("attention", "attention", "causal", FLOAT32, "long", "torch"),
        "attention, causal, length 4096",
    ),
    Headline(
        *("attention", "attention", "8 segments", FLOAT32, "long", "jax.nn"),
        "attention, 8 packed segments, length 4096",
        is_compiled=True,
    ),
    Headline(
        *("attention", "attention", "none", FLOAT32, "many short", "jax.nn"),
        "attention, 64 samples of length 64",
        is_compiled=True,
    ),
    Headline(
        *("normalization", "layer norm", "none", FLOAT32, "large", "flax"),
        "layer norm",
        is_compiled=True,
    ),
    Headline(
        *("decoder", "decoder", "none", FLOAT32, "large", "flax"),
        "decoder of 12 layers",
    ),
    Headline(
        *("decoder", "decoder", "packed", FLOAT32, "large", "flax"),
        "decoder of 12 layers, packed documents",
        is_compiled=True,
    ),
]


def chosen(rows: Sequence[Row]) -> list[tuple[Headline, dict[str, Ratio]]]:
    """The lines whose cases were measured, with the ratio of each pass."""
    found = ratios_to_peers(rows)
    lines = [(line, in_order_of_passes(filter(line.is_of, found))) for line in HEADLINES]
    return [(line, {ratio.row.what: ratio for ratio in passes}) for line, passes in lines if passes]


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


CURVES = {  # of the picture of the landing page: the name of a mask
    "causal": "causal",
    "8 segments": "8 packed documents",
}


def by_length(rows: Sequence[Row]) -> dict[tuple[str, str], list[Point]]:
    """Of attention with its gradient in float32: length, milliseconds and MiB of one sequence, by library and mask."""
    kind = "attention", "attention", FLOAT32, GRADIENT, False
    measured = [r for r in rows if (r.benchmark, r.work, r.dtype, r.what, r.eager) == kind and r.mask in CURVES]
    points = {
        (peer, CURVES[mask]): sorted(filter(None, map(point_of, found)))
        for (peer, mask), found in grouped(measured, lambda r: (r.candidate, r.mask)).items()
    }
    return {curve: found for curve, found in points.items() if found}


def point_of(row: Row) -> Point | None:
    """Nothing of short sequences, whose time is that of the dispatch."""
    samples, queries, keys = map(int, row.shape.split("x"))
    if queries != keys or queries < SHORTEST_OF_PICTURE:
        return None
    memory = None if row.temporary_bytes is None else row.temporary_bytes / 2**20 / samples
    return keys, row.minimum_ms / samples, memory


def facts(rows: Sequence[Row]) -> str:
    """A few sentences on gradients. Times are the least ones, which a disturbed machine changes least."""
    of_gradients = [ratio for ratio in ratios_to_peers(rows) if ratio.row.what == GRADIENT]
    found = [(ratio, text) for line, text in FACTS for ratio in filter(line.is_of, of_gradients)]
    lines = [textwrap.fill(f"- {text.format(**figures(ratio))}", 120, subsequent_indent="  ") for ratio, text in found]
    of_both = [row for ratio, _ in found for row in (ratio.row, ratio.peer)]
    intro = f"[Measured](docs/performance/index.md) with gradients, {environment(of_both, ('jax', 'torch'))}:"
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


def slower(rows: Sequence[Row], older: Sequence[Row]) -> str:
    """The kinds of work with mean ratios above the limit, the largest first; then short or eager calls, by library."""
    both = [ratios_to_peers(rows), ratios_to_peers(older)]
    newest, before = (grouped(found, kind_of) for found in both)
    means = {kind: statistics.geometric_mean(ratio.median for ratio in found) for kind, found in newest.items()}
    worst = {kind: max(found, key=lambda ratio: ratio.median) for kind, found in newest.items()}
    listed = [kind for kind in means if (worst[kind].median if kind[0] == SHORT_CALLS else means[kind]) > SLOWER]
    lines = []
    for kind in sorted(listed, key=lambda kind: (kind[0] == SHORT_CALLS, -means[kind])):
        of_both = newest[kind], before.get(kind, [])
        cells = [with_older(*map(text, of_both)) for text in (mean_text, above_text)]
        lines.append([*kind, *cells, cost(worst[kind])])
    header = ["benchmark", "work", "what", "against", "geometric mean", f"above {SLOWER}", f"the worst, {jax_of(rows)}"]
    return "\n\n".join([measured(rows, older), how_many_exceed(both[0]), as_markdown(header, lines)])


def kind_of(ratio: Ratio) -> tuple[str, ...]:
    """Benchmark, work, pass and library; calls that are mostly dispatch stand together."""
    row, peer = ratio.row, ratio.peer.candidate
    if row.eager or row.median_ms < DISPATCH_MS:
        return SHORT_CALLS, "all", row.what, peer
    return row.benchmark.replace("_", " "), row.work, row.what, peer


def programs(rows: Sequence[Row], older: Sequence[Row], sizes: Sequence[Size]) -> str:
    """What the gradients of some cases cost to compile: seconds, and operations where they are counted."""
    before = dict(chosen(older))
    lines = []
    for line, passes in chosen(rows):
        if line.is_compiled and GRADIENT in passes:
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
