"""Every public op against its peer over a grid of shapes, dtypes and masks: the worst ratios first.

    python examples/benchmarks/sweep.py             # fifty minutes on two cores
    python examples/benchmarks/sweep.py --quick     # the tiny shapes only, two rounds

The other benchmarks choose the work that people do; this one looks for what nobody chose: few rows and wide ones,
many rows and narrow ones, arrays that stay in the cache, the mean of the results, a batch under `jax.vmap`, calls
without `jax.jit`.

In 16 bits most peers add up in 16 bits, and lose digits. So they get inputs that are widened to float32, and their
results are rounded once, as masksafe's are; attention and the linear layer are compared as they are. A ratio that is
clearly good is measured in two rounds, others in five, and those above 1.1 in twelve.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attention
import formulas
import jax
import jax.numpy as jnp
import linear
import losses
import normalization
import results
import segments
from command import main
from measure import VALUE, Benchmark, Case, Row, Work, by_x, cases_of, eager_too
from plots import draw_by_work
from results import NOTHING, SLOWER, Pair, as_markdown, csv_of, grouped, mean, ratio_text, read_csv

Shape = tuple[int, ...]
SHAPES: dict[str, Shape] = {
    "tiny": (32, 32),
    "in cache": (256, 256),
    "narrow": (65536, 32),
    "wide": (64, 16384),
    "large": (8192, 1024),
}
DTYPES = {"float32": tuple(SHAPES), "bfloat16": ("large",), "float16": ("large",)}
MASKED, VMAPPED, AVERAGED = ("in cache", "large"), "in cache", "large"
ROWS_OF_SEGMENT = 8  # on average
EXPERTS_OF_TOKEN = 2
MOST_ROWS_OF_PAIRS = 4096  # so that the plain formula's matrix of pairs fits into memory, and a call takes a second
WORST = 40

Maker = Callable[[str, str, str, Shape], Work]  # of a work, a mask, a dtype, and rows and classes


def makers() -> dict[str, tuple[str, Maker]]:
    """For each work on rows its kind of mask, and what makes it without torch."""

    def on(prepare: Callable[..., Work], sizes_of: Callable[[Shape], Any] = lambda shape: shape) -> Maker:
        return lambda work, mask, dtype, shape: prepare(work, mask, dtype, sizes_of(shape)).without("torch")

    def loss(work: str, mask: str, dtype: str, shape: Shape) -> Work:
        return losses.prepare(work, mask, dtype, losses.at_most(work, shape))

    def cross_entropy(work: str, *rest: Any) -> Work:
        return losses.prepare_cross_entropy(work.removesuffix(" cross-entropy"), *rest).without("torch")

    of: dict[str, tuple[str, Maker]] = dict.fromkeys(formulas.SOFTMAX, ("elements", on(formulas.prepare)))
    of_segments = on(segments.prepare, lambda shape: (shape, shape[0] // ROWS_OF_SEGMENT))
    of |= dict.fromkeys(segments.FORMULAS, ("rows", of_segments))
    of_router = on(formulas.prepare_router, lambda shape: (*shape, EXPERTS_OF_TOKEN))
    of |= dict.fromkeys(formulas.ROUTERS, (formulas.OF_TOKENS[-1], of_router))
    of_pairs = on(formulas.prepare_pairs, lambda shape: (min(shape[0], MOST_ROWS_OF_PAIRS), shape[1]))
    of |= dict.fromkeys(formulas.PAIRS, (formulas.OF_ROWS[-1], of_pairs))
    norm = on(normalization.prepare, lambda shape: (shape, -1))
    of |= dict.fromkeys(("layer norm", "RMS norm"), ("elements", norm))
    of |= {f"{name} cross-entropy": ("rows", cross_entropy) for name in losses.CROSS_ENTROPIES}
    of_shapes = [name for name in losses.ARGUMENTS if not name.startswith("ctc")]  # which has shapes of its own
    return of | {name: ("" if name in losses.WITHOUT_MASK else "losses", loss) for name in of_shapes}


def changed(make: Maker, change: Callable[[Work, str], Work]) -> Maker:
    """The work as one of the following changes it, of which each gets its dtype too."""
    return lambda work, mask, dtype, shape: change(make(work, mask, dtype, shape), dtype)


def widened(work: Work, dtype: str) -> Work:
    """In 16 bits with peers that compute in float32, between inputs and results of 16 bits."""

    def cast(tree: Any, present: str, dtype: str) -> Any:
        return jax.tree.map(lambda x: x.astype(dtype) if getattr(x, "dtype", None) == present else x, tree)

    if dtype == "float32":
        return work
    peers = {
        f"{peer}, widened": lambda *args, fn=fn: cast(fn(*cast(args, dtype, "float32")), "float32", dtype)
        for peer, fn in work.functions.items()
        if peer != "masksafe"
    }
    return Work({"masksafe": work.functions["masksafe"]} | peers, work.args, work.leaves)


def vmapped(work: Work, _: str) -> Work:
    """On a batch of four, of which an op under `jax.vmap` sees one."""
    batched = [bool(jnp.ndim(x)) for x in work.args]
    args = tuple(jnp.stack([x] * 4) if b else x for x, b in zip(work.args, batched, strict=True))
    in_axes = tuple(0 if b else None for b in batched)
    return Work({name: jax.vmap(fn, in_axes) for name, fn in work.functions.items()}, args, work.leaves)


def averaged(work: Work, _: str) -> Work:
    """With the mean of its results, as in a training step."""
    functions = {name: lambda *args, fn=fn: jnp.mean(fn(*args)) for name, fn in work.functions.items()}
    return Work(functions, work.args, work.leaves)


def cases_of_rows() -> list[Case]:
    cases = []
    for name, (kind, make) in makers().items():
        grid = [
            (name, mask, dtype, size)
            for dtype, sizes in DTYPES.items()
            for size in (sizes if dtype == "float32" or name not in losses.FLOAT32_ONLY else ())
            for mask in (("none", kind) if kind and size in MASKED else ("none",))
            if dtype != "float16" or mask == kind or not kind  # bfloat16 has both
        ]
        cases += cases_of(changed(make, widened), SHAPES, grid)
        for size, change, shape, text in (("mean", averaged, AVERAGED, "mean of"), ("vmap", vmapped, VMAPPED, "4 of")):
            told = f"{text} {by_x(SHAPES[shape])}"
            one = [(name, "none", "float32", size)]
            cases += cases_of(changed(make, change), {size: SHAPES[shape]}, one, lambda _, told=told: told)
    return eager_too(cases)


ATTENTION = {  # samples, queries, keys
    "many short": (64, 64, 64),
    "short": (32, 128, 128),
    "middle": (8, 512, 512),
    "decoding": (8, 1, 4096),
    "long": (1, 4096, 4096),
}
LINEAR = {"middle": (512, 256, 4096), "large": (1024, 256, 16384)}  # tokens, width, classes


def cases_of_products() -> list[Case]:
    attend = lambda *of: attention.prepare(*of).without("torch")  # noqa: E731
    loss = lambda _, *of: linear.prepare("linear", *of).without("torch")  # noqa: E731
    dtypes, found = ("float32", "bfloat16"), []
    for size in ATTENTION:
        decodes = size == "decoding"
        masks = ("none", "half padding") if decodes else ("none", "causal", "half padding")
        grid = [("attention", mask, dtype, size) for mask in masks for dtype in dtypes]
        found += cases_of(attend, ATTENTION, grid, **({"passes": (VALUE,)} if decodes else {}))
    masks = ("none", "60 % of tokens")
    return found + cases_of(
        loss, LINEAR, [("linear cross-entropy", m, d, size) for size in LINEAR for m in masks for d in dtypes]
    )


BENCHMARK = Benchmark("sweep", "The sweep", (), cases_of_rows() + cases_of_products(), clear=0.85, budget=0)


# Results: ratios of the minima to those of the fastest peer of each case, the worst first


def text_of(pair: Pair) -> str:
    row = pair.row
    return results.listed(row.mask, row.dtype, row.shape, row.what, "eager" if row.eager else "")


def worst(found: Sequence[Pair]) -> str:
    lines = []
    for pair in found[:WORST]:
        ratios = ratio_text(pair.minimum), ratio_text(pair.median)
        lines.append([pair.row.work, text_of(pair), pair.peer.candidate, *ratios, results.number(pair.row.minimum_ms)])
    return as_markdown(["work", "case", "against", "minima", "medians", "ms"], lines)


def by_work(found: Sequence[Pair]) -> str:
    """For each op the geometric mean of the ratios, how many exceed the limit, and the worst of both widths.

    Calls that are mostly dispatch are left out.
    """
    lines = []
    for work, group in grouped(longer(found), lambda pair: pair.row.work).items():
        ratios = [pair.minimum for pair in group]
        cells = [work, str(len(group)), ratio_text(mean(ratios)), str(sum(ratio > SLOWER for ratio in ratios))]
        for is_wide in (True, False):
            of_width = (pair for pair in group if (pair.row.dtype == "float32") == is_wide)
            cells.append(next((f"{ratio_text(pair.minimum)}: {text_of(pair)}" for pair in of_width), NOTHING))
        lines.append((mean(ratios), cells))
    header = ["work", "cases", "geometric mean", f"above {SLOWER}", "the worst in float32", "the worst in 16 bits"]
    return as_markdown(header, [line for _, line in sorted(lines, key=lambda line: -line[0])])


def longer(found: Sequence[Pair]) -> list[Pair]:
    return [pair for pair in found if pair.row.minimum_ms >= results.DISPATCH_MS]


def summary(_: Benchmark, versions: Mapping[str, Sequence[Row]]) -> str:
    return "\n\n".join(
        f"{name}, {results.environment(rows, ('masksafe',))}: {told(rows)}" for name, rows in versions.items()
    )


def told(rows: Sequence[Row]) -> str:
    found = results.best_peers(rows)
    ratios, short = [pair.minimum for pair in longer(found)], len(found) - len(longer(found))
    above = ", ".join(f"{sum(ratio > limit for ratio in ratios)} above {limit}" for limit in (SLOWER, 1.2, 1.6))
    shorter = f"Calls shorter than {results.DISPATCH_MS} ms ({short} more) are left out"
    return f"the geometric mean of {len(ratios)} ratios is {mean(ratios):.2f}, with {above}. {shorter}."


def section() -> str:
    return results.section(BENCHMARK, lambda _, rows: by_work(results.best_peers(rows)), summary)


def publish(_: Sequence[Benchmark] = ()) -> None:
    draw_by_work(results.best_peers(read_csv(csv_of("sweep"))), results.picture_of("sweep"))
    results.fill_pages({"sweep": section()})


def table(_: Benchmark, rows: Sequence[Row]) -> str:
    found = results.best_peers(rows)
    return f"{worst(found)}\n\n{by_work(found)}"


if __name__ == "__main__":
    main([BENCHMARK], publish=publish, table=table)
