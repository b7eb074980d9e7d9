"""The tables of the first page about performance: a few cases of the benchmarks, and all of them together.

Figures of the newest jax come first, those of the oldest that is supported follow in brackets.
"""

import statistics
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import results
from measure import GRADIENT, OPTIONAL, PASSES, Row
from results import NOTHING, SLOWER, Pair, as_markdown, environment, grouped, mean, number, pairs, ratio_text

ALL_PACKAGES = ("masksafe", "numpy", *OPTIONAL)
SHORTEST_OF_PICTURE = 512
SHORT_CALLS = "short or eager calls"

Point = tuple[int, float, float | None]


class Headline(NamedTuple):
    """A case of a benchmark in its largest size, the peer, and what its line is called."""

    benchmark: str
    work: str
    mask: str
    dtype: str
    size: str
    peer: str
    text: str
    is_compiled: bool = False  # it is told what the program costs to compile

    def is_of(self, pair: Pair) -> bool:
        row = pair.row
        return self[:6] == (row.benchmark, row.work, row.mask, row.dtype, row.size, pair.peer.candidate)


FLOAT32, BFLOAT16 = "float32", "bfloat16"
INTEGER, LINEAR = ("cross_entropy", "integer"), ("linear_cross_entropy", "linear")
ATTENTION, DECODER = ("attention", "attention"), ("decoder", "decoder")
LOG_PROBS, DIVERGENCE = ("linear_log_probs", "log p, entropy"), ("linear_kl_divergence", "forward")
HEADLINES = [
    Headline(*INTEGER, "none", FLOAT32, "large", "optax", "cross-entropy, integer labels", True),
    Headline(*INTEGER, "rows", FLOAT32, "large", "optax", "cross-entropy, half of the rows masked", True),
    Headline(*INTEGER, "rows", BFLOAT16, "large", "optax", "cross-entropy, half masked, bfloat16"),
    Headline(*LINEAR, "none", FLOAT32, "large", "optax", "linear layer and cross-entropy", True),
    Headline(*LINEAR, "60 % of tokens", FLOAT32, "large", "optax", "linear layer and cross-entropy, 60 % masked"),
    Headline(*LOG_PROBS, "none", FLOAT32, "large", "jax.nn", "linear layer, log-probabilities and entropies", True),
    Headline(*DIVERGENCE, "none", FLOAT32, "large", "optax", "KL divergence of two linear layers"),
    Headline(*ATTENTION, "causal", FLOAT32, "long", "jax.nn", "attention, causal, length 4096", True),
    Headline(*ATTENTION, "causal", FLOAT32, "long", "torch", "attention, causal, length 4096"),
    Headline(*ATTENTION, "8 segments", FLOAT32, "long", "jax.nn", "attention, 8 packed segments, length 4096", True),
    Headline(*ATTENTION, "none", FLOAT32, "many short", "jax.nn", "attention, 64 samples of length 64", True),
    Headline("normalization", "layer norm", "none", FLOAT32, "large", "flax", "layer norm", True),
    Headline(*DECODER, "none", FLOAT32, "large", "flax", "decoder of 12 layers"),
    Headline(*DECODER, "packed", FLOAT32, "large", "flax", "decoder of 12 layers, packed documents", True),
]
FACTS = [
    Headline(
        *(*ATTENTION, "causal", FLOAT32, "long", "jax.nn"),
        "Causal attention, length 4096: {ours} MiB of temporary memory for `jax.nn`'s {theirs}, {ratio} of its time"
        " ({times}).",
    ),
    Headline(
        *(*ATTENTION, "8 segments", FLOAT32, "long", "jax.nn"),
        "Eight packed documents: {ratio} of the time ({times}).",
    ),
    Headline(
        *(*DECODER, "none", FLOAT32, "large", "flax"),
        "Decoder of 12 layers: {ours} MiB for flax's {theirs}, {ratio} of its time.",
    ),
    Headline(
        *(*ATTENTION, "causal", FLOAT32, "long", "torch"),
        "torch's CPU kernels are faster: that attention takes {ratio} times as long.",
    ),
]
CURVES = {"causal": "causal", "8 segments": "8 packed documents"}  # masks of the picture of the landing page


def of_all(rows: Sequence[Row], older: Sequence[Row], sizes: Sequence[Row]) -> dict[str, str]:
    """What is made of all benchmarks together, and of the sizes of programs."""
    return {
        "headlines": headlines(rows, older),
        "libraries": libraries(rows, older),
        "slower": slower(rows, older),
        "compiling": compiling(rows),
        "programs": programs(rows, older, sizes),
    }


def chosen(rows: Sequence[Row]) -> list[tuple[Headline, dict[str, Pair]]]:
    """The lines whose cases were measured, with the pair of each pass."""
    found = sorted(pairs(rows), key=lambda pair: PASSES.index(pair.row.what))
    lines = [(line, {pair.row.what: pair for pair in filter(line.is_of, found)}) for line in HEADLINES]
    return [(line, passes) for line, passes in lines if passes]


def with_older(newest: str, older: str) -> str:
    return f"{newest} ({older})" if older != NOTHING else newest


def measured(rows: Sequence[Row], older: Sequence[Row], packages: Sequence[str] = ("masksafe",)) -> str:
    """The environment of both versions."""
    if not rows:
        return "Nothing has been measured."
    python = lambda found: " and ".join(f"Python {version}" for version in results.distinct(found, "python"))  # noqa: E731
    of_both = [f"{results.jax_of(found)} ({python(found)})" for found in (rows, older) if found]
    return f"Measured with {' and, in brackets, '.join(of_both)}: {environment([*rows, *older], packages)}."


def headlines(rows: Sequence[Row], older: Sequence[Row]) -> str:
    """A table of a few cases: ratios of the value and of it with its gradient, and the memory of the gradient."""
    newest, before = chosen(rows), dict(chosen(older))
    cell = lambda passes, what: ratio_text(passes[what].median) if what in passes else NOTHING  # noqa: E731
    lines = []
    for line, passes in newest:
        cells = [with_older(cell(passes, what), cell(before.get(line, {}), what)) for what in PASSES]
        shape = next(iter(passes.values())).row.shape
        memory = " / ".join(mebibytes(passes[GRADIENT])) if GRADIENT in passes else NOTHING
        lines.append([f"{line.text} ({shape})", line.peer, *cells, NOTHING if NOTHING in memory else memory])
    table = as_markdown(["work", "against", "time: value", "with gradient", "MiB: masksafe / the other"], lines)
    of_both = (
        [row for _, passes in found for pair in passes.values() for row in (pair.row, pair.peer)]
        for found in (newest, before.items())
    )
    return "\n\n".join([measured(*of_both, ALL_PACKAGES), table])


def mebibytes(pair: Pair) -> list[str]:
    sizes = pair.row.temporary_bytes, pair.peer.temporary_bytes
    return [NOTHING if size is None else f"{size / results.MIB:.0f}" for size in sizes]


def by_length(rows: Sequence[Row]) -> dict[tuple[str, str], list[Point]]:
    """Of attention with its gradient in float32: length, milliseconds and MiB of one sequence, by library and mask."""
    kind = *ATTENTION, FLOAT32, GRADIENT, False
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
    memory = None if row.temporary_bytes is None else row.temporary_bytes / results.MIB / samples
    return keys, row.minimum_ms / samples, memory


def facts(rows: Sequence[Row]) -> str:
    """A few sentences on gradients. Times are the least ones, which a disturbed machine changes least."""
    of_gradients = [pair for pair in pairs(rows) if pair.row.what == GRADIENT]
    found = [(pair, line.text) for line in FACTS for pair in filter(line.is_of, of_gradients)]
    lines = [textwrap.fill(f"- {text.format(**figures(pair))}", 120, subsequent_indent="  ") for pair, text in found]
    of_both = [row for pair, _ in found for row in (pair.row, pair.peer)]
    intro = f"[Measured](docs/performance/index.md) with gradients, {environment(of_both, ('jax', 'torch'))}:"
    return "\n\n".join([textwrap.fill(intro, 120, break_on_hyphens=False), "\n".join(lines)])


def figures(pair: Pair) -> dict[str, str]:
    """What the sentences say of a case."""
    ours, theirs = mebibytes(pair)
    times = " / ".join(f"{row.minimum_ms / 1e3:.2f} s" for row in (pair.row, pair.peer))
    return {"ours": ours, "theirs": theirs, "ratio": f"{pair.minimum:.2f}", "times": times}


def libraries(rows: Sequence[Row], older: Sequence[Row]) -> str:
    """For each other library and pass: how many ratios there are, their geometric mean, how many exceed the limit."""
    newest, before = (grouped(pairs(of), lambda pair: (pair.peer.candidate, pair.row.what)) for of in (rows, older))
    lines = [
        [peer, *(cell for what in PASSES for cell in mean_and_above(newest, before, (peer, what)))]
        for peer in sorted({peer for peer, _ in newest})
    ]
    header = ["against", "time: value", f"above {SLOWER}", "with gradient", f"above {SLOWER}"]
    return "\n\n".join([measured(rows, older), as_markdown(header, lines)])


def mean_and_above(newest: dict[tuple, list[Pair]], before: dict[tuple, list[Pair]], key: tuple[str, ...]) -> list[str]:
    """The geometric mean of a group's ratios, and how many of them exceed the limit."""
    texts: tuple[Callable[[list[float]], str], ...] = (
        lambda found: ratio_text(mean(found)),
        lambda found: f"{sum(ratio > SLOWER for ratio in found)} of {len(found)}",
    )
    both = [[pair.median for pair in of.get(key, [])] for of in (newest, before)]
    return [with_older(*(text(found) if found else NOTHING for found in both)) for text in texts]


def slower(rows: Sequence[Row], older: Sequence[Row]) -> str:
    """The kinds of work with mean ratios above the limit, the largest first; then short or eager calls, by library."""
    every = pairs(rows)
    newest, before = grouped(every, kind_of), grouped(pairs(older), kind_of)
    means = {kind: mean(pair.median for pair in found) for kind, found in newest.items()}
    worst = {kind: max(found, key=lambda pair: pair.median) for kind, found in newest.items()}
    told = [kind for kind in means if (worst[kind].median if kind[0] == SHORT_CALLS else means[kind]) > SLOWER]
    lines = [
        [*kind, *mean_and_above(newest, before, kind), cost(worst[kind])]
        for kind in sorted(told, key=lambda kind: (kind[0] == SHORT_CALLS, -means[kind]))
    ]
    above = [pair for pair in every if pair.median > SLOWER]
    tiny = sum(pair.row.median_ms < results.DISPATCH_MS for pair in above)
    text = f"Of {len(every)} ratios to other libraries {len(above)} exceed {SLOWER}"
    text += f" ({tiny} in calls shorter than {results.DISPATCH_MS} ms)."
    header = [
        "benchmark",
        "work",
        "what",
        "against",
        "geometric mean",
        f"above {SLOWER}",
        f"the worst, {results.jax_of(rows)}",
    ]
    return "\n\n".join([measured(rows, older), text, as_markdown(header, lines)])


def kind_of(pair: Pair) -> tuple[str, ...]:
    """Benchmark, work, pass and library; calls that are mostly dispatch stand together."""
    row, peer = pair.row, pair.peer.candidate
    if row.eager or row.median_ms < results.DISPATCH_MS:
        return SHORT_CALLS, "all", row.what, peer
    return row.benchmark.replace("_", " "), row.work, row.what, peer


def cost(pair: Pair) -> str:
    row = pair.row
    case = results.listed(row.mask if row.mask != "none" else "", row.dtype, row.shape, "eager" if row.eager else "")
    return f"{pair.median:.2f} (+{number(row.median_ms - pair.peer.median_ms)} ms): {case}"


def compiling(rows: Sequence[Row]) -> str:
    """The median time to trace and compile, over all cases of a benchmark."""
    known = [pair for pair in pairs(rows) if None not in (pair.row.compile_s, pair.peer.compile_s)]
    lines = []
    for (name, what, peer), found in grouped(known, lambda p: (p.row.benchmark, p.row.what, p.peer.candidate)).items():
        seconds = [statistics.median(getattr(pair, side).compile_s for pair in found) for side in ("row", "peer")]
        lines.append([name.replace("_", " "), what, peer, *map(number, seconds), ratio_text(seconds[0] / seconds[1])])
    header = ["benchmark", "what", "against", "masksafe s", "the other's s", "ratio"]
    return f"Measured {environment(rows)}.\n\n{as_markdown(header, lines)}"


def programs(rows: Sequence[Row], older: Sequence[Row], sizes: Sequence[Row]) -> str:
    """What the gradients of some cases cost to compile: seconds, and operations where they are counted."""

    def seconds(passes: dict[str, Pair]) -> str:
        pair = passes.get(GRADIENT)
        return f"{pair.row.compile_s:.2f} / {pair.peer.compile_s:.2f}" if pair else NOTHING

    before, counted = dict(chosen(older)), pairs(sizes)
    lines = []
    for line, passes in chosen(rows):
        if line.is_compiled and GRADIENT in passes:
            both = with_older(seconds(passes), seconds(before.get(line, {})))
            lines.append([line.text, line.peer, both, operations_of(line, counted)])
    table = as_markdown(["program", "against", "seconds: masksafe / the other", "operations"], lines)
    text = f"Operations: {environment(sizes, ('masksafe', 'jax'))}." if sizes else ""
    return "\n\n".join(filter(None, [measured(rows, older), text, table]))


def operations_of(line: Headline, counted: Iterable[Pair]) -> str:
    """Those of the same op and mask; they hardly depend on shapes."""
    for pair in counted:
        if line.is_of(pair) and pair.row.what == GRADIENT:
            return f"{pair.row.operations} / {pair.peer.operations}"
    return NOTHING
