"""The tables of the first page about performance: a few cases of the benchmarks, and all of them together.

Figures of the newest jax come first, those of the oldest that is supported follow in brackets.
"""

import statistics
import textwrap
from collections.abc import Sequence
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
CAUSAL = Headline(*ATTENTION, "causal", FLOAT32, "long", "jax.nn", "attention, causal, length 4096", True)
IN_TORCH = CAUSAL._replace(peer="torch", is_compiled=False)
PACKED = CAUSAL._replace(mask="8 segments", text="attention, 8 packed segments, length 4096")
MASKED_TOKENS = Headline(
    *LINEAR, "60 % of tokens", FLOAT32, "large", "optax", "linear layer and cross-entropy, 60 % masked"
)
OF_12_LAYERS = Headline(*DECODER, "none", FLOAT32, "large", "flax", "decoder of 12 layers")
HEADLINES = [
    Headline(*INTEGER, "none", FLOAT32, "large", "optax", "cross-entropy, integer labels", True),
    Headline(*INTEGER, "rows", FLOAT32, "large", "optax", "cross-entropy, half of the rows masked", True),
    Headline(*INTEGER, "rows", BFLOAT16, "large", "optax", "cross-entropy, half masked, bfloat16"),
    Headline(*LINEAR, "none", FLOAT32, "large", "optax", "linear layer and cross-entropy", True),
    MASKED_TOKENS,
    Headline(*LOG_PROBS, "none", FLOAT32, "large", "jax.nn", "linear layer, log-probabilities and entropies", True),
    Headline(*DIVERGENCE, "none", FLOAT32, "large", "optax", "KL divergence of two linear layers"),
    CAUSAL,
    IN_TORCH,
    PACKED,
    Headline(*ATTENTION, "none", FLOAT32, "many short", "jax.nn", "attention, 64 samples of length 64", True),
    Headline("normalization", "layer norm", "none", FLOAT32, "large", "flax", "layer norm", True),
    OF_12_LAYERS,
    Headline(*DECODER, "packed", FLOAT32, "large", "flax", "decoder of 12 layers, packed documents", True),
]
FACTS = (CAUSAL, MASKED_TOKENS, OF_12_LAYERS)  # for the README
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
    versions = " and, in brackets, ".join(results.jax_of(found) for found in (rows, older) if found)
    return f"Measured with {versions}: {environment([*rows, *older], packages)}."


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
    of_both = ([r for _, passes in of for pair in passes.values() for r in pair] for of in (newest, before.items()))
    return "\n\n".join([measured(*of_both, ALL_PACKAGES), table])


def mebibytes(pair: Pair) -> list[str]:
    sizes = (row.temporary_bytes for row in pair)
    return [NOTHING if size is None else f"{size / results.MIB:.0f}" for size in sizes]


def by_length(rows: Sequence[Row]) -> dict[tuple[str, str], list[Point]]:
    """Of attention with its gradient in float32: length, milliseconds and MiB of one sequence, by library and mask."""
    kind, curves = (*ATTENTION, FLOAT32, GRADIENT, False), {}
    for row in rows:
        if (row.benchmark, row.work, row.dtype, row.what, row.eager) == kind and row.mask in CURVES:
            samples, queries, keys = map(int, row.shape.split("x"))
            if queries == keys >= SHORTEST_OF_PICTURE:  # the time of a shorter one is that of the dispatch
                memory = None if row.temporary_bytes is None else row.temporary_bytes / results.MIB / samples
                points = curves.setdefault((row.candidate, CURVES[row.mask]), [])
                points.append((keys, row.minimum_ms / samples, memory))
    return {curve: sorted(points) for curve, points in curves.items()}


def facts(rows: Sequence[Row]) -> str:
    """A table of a few gradients, and what the first of them costs. Times are the least ones, which scatter least."""
    gradients = [pair for pair in pairs(rows) if pair.row.what == GRADIENT]
    of = {line: pair for line in (*FACTS, IN_TORCH) for pair in filter(line.is_of, gradients)}
    figures = ("minimum_ms", 1e3, "{:.2f}", "s"), ("temporary_bytes", results.MIB, "{:.0f}", "MiB")
    lines = [[line.text, *(times_less(of[line], *figure) for figure in figures)] for line in FACTS if line in of]
    told = environment([row for pair in of.values() for row in pair], ("jax", "torch"))
    text = [f"[Measured](docs/performance/index.md) on {told}."]
    if CAUSAL in of:
        text.append(
            "The attention compiles in {:.1f} s instead of {:.1f}.".format(*(row.compile_s for row in of[CAUSAL]))
        )
    if IN_TORCH in of:
        text.append(f"torch's CPU kernel runs it in {1 / of[IN_TORCH].minimum:.2f} of masksafe's time.")
    table = as_markdown(["work, with its gradient", "times faster", "times less temporary memory"], lines)
    return "\n\n".join([table, textwrap.fill(" ".join(text), 120, break_on_hyphens=False)])


def times_less(pair: Pair, figure: str, size: float, text: str, unit: str) -> str:
    """How many times less the figure is than the peer's, and both in a unit of that size."""
    times = 1 / pair.of(figure)
    ours, theirs = (text.format(getattr(row, figure) / size) for row in pair)
    return f"{times:.{int(times < 9.95)}f} ({ours} {unit} instead of {pair.peer.candidate}'s {theirs})"


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
    both = []
    for group in (newest.get(key), before.get(key)):
        ratios = [pair.median for pair in group or ()]
        above = f"{sum(ratio > SLOWER for ratio in ratios)} of {len(ratios)}"
        both.append([ratio_text(mean(ratios)), above] if ratios else [NOTHING, NOTHING])
    return list(map(with_older, *both))


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
    header = ["benchmark", "work", "what", "against", "geometric mean", f"above {SLOWER}"]
    table = as_markdown([*header, f"the worst, {results.jax_of(rows)}"], lines)
    return "\n\n".join([measured(rows, older), text, table])


def kind_of(pair: Pair) -> tuple[str, ...]:
    """Benchmark, work, pass and library; calls that are mostly dispatch stand together."""
    row, peer = pair
    if row.eager or row.median_ms < results.DISPATCH_MS:
        return SHORT_CALLS, "all", row.what, peer.candidate
    return row.benchmark.replace("_", " "), row.work, row.what, peer.candidate


def cost(pair: Pair) -> str:
    row = pair.row
    case = results.listed(row.mask if row.mask != "none" else "", row.dtype, row.shape, "eager" if row.eager else "")
    return f"{pair.median:.2f} (+{number(row.median_ms - pair.peer.median_ms)} ms): {case}"


def compiling(rows: Sequence[Row]) -> str:
    """The median time to trace and compile, over all cases of a benchmark."""
    known = [pair for pair in pairs(rows) if None not in (pair.row.compile_s, pair.peer.compile_s)]
    lines = []
    for (name, what, peer), found in grouped(known, lambda p: (p.row.benchmark, p.row.what, p.peer.candidate)).items():
        ours, theirs = (statistics.median(row.compile_s for row in side) for side in zip(*found, strict=True))
        lines.append([name.replace("_", " "), what, peer, number(ours), number(theirs), ratio_text(ours / theirs)])
    header = ["benchmark", "what", "against", "masksafe s", "the other's s", "ratio"]
    return f"Measured {environment(rows, ('masksafe', 'jax'))}.\n\n{as_markdown(header, lines)}"


def programs(rows: Sequence[Row], older: Sequence[Row], sizes: Sequence[Row]) -> str:
    """What the gradients of some cases cost to compile: seconds, and operations where they are counted.

    Operations are those of the same op and mask; they hardly depend on shapes.
    """
    before, counted = dict(chosen(older)), [pair for pair in pairs(sizes) if pair.row.what == GRADIENT]
    lines = []
    for line, passes in chosen(rows):
        if line.is_compiled and GRADIENT in passes:
            of_both = [of.get(GRADIENT) for of in (passes, before.get(line, {}))]
            seconds = [pair.both("compile_s", "{:.2f}".format) if pair else NOTHING for pair in of_both]
            operations = next((pair.both("operations") for pair in filter(line.is_of, counted)), NOTHING)
            lines.append([line.text, line.peer, with_older(*seconds), operations])
    table = as_markdown(["program", "against", "seconds: masksafe / the other", "operations"], lines)
    text = f"Operations: {environment(sizes, ('masksafe', 'jax'))}." if sizes else ""
    return "\n\n".join(filter(None, [measured(rows, older), text, table]))
