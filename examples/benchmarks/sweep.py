"""Every public op against its peer over a grid of shapes, dtypes and masks: the worst ratios first.

    python examples/benchmarks/sweep.py             # an hour on two cores
    python examples/benchmarks/sweep.py --quick     # the tiny shapes only, two rounds

The other benchmarks choose the work that people do; this one looks for what nobody chose: few rows and wide ones,
many rows and narrow ones, arrays that stay in the cache, the mean of the results, a batch under `jax.vmap`, calls
without `jax.jit`.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attention
import contrastive
import cross_entropy
import jax
import jax.numpy as jnp
import linear_cross_entropy
import losses
import normalization
import routers
import segments
import softmax
from command import measure_all, parse, tell
from measure import VALUE, Benchmark, Case, Row, Work, by_x, eager_too, random_bits
from pages import DOCS, both, csv_of, fill_pages, section_of
from plots import draw_by_work
from results import best_peers, by_work, counts, read_csv, worst
from rich.console import Console
from rich.markdown import Markdown

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
UNMASKED = 0.7
ROWS_OF_SEGMENT = 8  # on average
EXPERTS_OF_TOKEN = 2
MOST_ROWS_OF_PAIRS = 8192
# The losses that have no mask of the shape of the loss, or none at all.
WITHOUT_MASK = (
    *("ctc_loss", "ctc_loss_with_forward_probs", "ntxent", "smooth_labels", "ranking_softmax_loss"),
    *("binary_dice_loss", "dice_loss", "multiclass_generalized_dice_loss", "make_fenchel_young_loss"),
    "safe_softmax_cross_entropy",
)
# The losses whose masks have the rank of their inputs.
WITH_MASK_OF_ELEMENTS = (
    *("cosine_similarity", "cosine_distance", "kl_divergence", "kl_divergence_with_log_targets"),
    *("generalized_kl_divergence", "convex_kl_divergence"),
)
IN_FLOAT32_ALONE = ("multiclass_sparsemax_loss",)  # optax has no gradient of 16-bit floats
WORST = 40

Maker = Callable[[str, str, Shape], Work]  # of a mask, a dtype, and rows and classes


def loss(name: str, mask: str, dtype: str, shape: Shape) -> Work:
    """A mask has the shape of the losses: `where` for masksafe, a selection among the losses for optax."""
    ours, theirs = losses.of_masksafe(name), losses.of_optax(name)
    args = cast(losses.ARGUMENTS[name](losses.at_most(name, shape)), dtype)
    if mask == "none":
        return Work({"masksafe": ours, "optax": theirs}, args)
    where = random_bits(jax.eval_shape(ours, *args).shape, UNMASKED)
    of_rows = (..., None) if name in WITH_MASK_OF_ELEMENTS else ...
    functions = {
        "masksafe": lambda *args: ours(*args[:-1], where=args[-1][of_rows]),
        "optax": lambda *args: jnp.where(args[-1], theirs(*args[:-1]), 0),
    }
    return Work(functions, (*args, where))


def cast(args: Sequence[Any], dtype: str) -> tuple[Any, ...]:
    """The arguments, of which the arrays of floats have the dtype."""
    is_float = lambda x: isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
    return tuple(x.astype(dtype) if is_float(x) else x for x in args)


def without_torch(work: Work) -> Work:
    functions = {name: fn for name, fn in work.functions.items() if name != "torch"}
    return Work(functions, work.args, work.leaves)


def norm(name: str, mask: str, dtype: str, shape: Shape) -> Work:
    return without_torch(normalization.prepare(name, mask, dtype, shape, -1))


def softmax_or_sum(name: str, mask: str, dtype: str, shape: Shape) -> Work:
    return softmax.prepare(name, mask, dtype, shape)


def segment(name: str, mask: str, dtype: str, shape: Shape) -> Work:
    return segments.prepare(name, mask, dtype, shape, shape[0] // ROWS_OF_SEGMENT)


def router(name: str, mask: str, dtype: str, shape: Shape) -> Work:
    """Rows are tokens, and classes experts."""
    tokens, experts = shape
    return routers.prepare(name, mask, dtype, (tokens, experts, EXPERTS_OF_TOKEN))


def pairs_of_rows(name: str, mask: str, dtype: str, shape: Shape) -> Work:
    """At most so many rows that the plain formula's matrix of pairs fits into memory."""
    rows, width = shape
    return contrastive.prepare(name, mask, dtype, (min(rows, MOST_ROWS_OF_PAIRS), width))


def softmax_cross_entropy(name: str, mask: str, dtype: str, shape: Shape) -> Work:
    return without_torch(cross_entropy.prepare(name, mask, dtype, shape))


def makers() -> dict[tuple[str, str], Maker]:
    """The work on rows, by its name and its kind of mask."""
    of: dict[tuple[str, str], Maker] = {}
    for name in softmax.PEERS:
        of[name, "elements"] = functools.partial(softmax_or_sum, name)
    for name in segments.FORMULAS:
        of[name, "rows"] = functools.partial(segment, name)
    for name in routers.PEERS:
        of[name, routers.MASKS[-1]] = functools.partial(router, name)
    for name in contrastive.LOSSES:
        of[name, contrastive.MASKS[-1]] = functools.partial(pairs_of_rows, name)
    for name in ("layer norm", "RMS norm"):
        of[name, "elements"] = functools.partial(norm, name)
    for name in cross_entropy.LOSSES:
        of[f"{name} cross-entropy", "rows"] = functools.partial(softmax_cross_entropy, name)
    for name in losses.ARGUMENTS:
        if not name.startswith("ctc"):  # of other shapes: its own benchmark has them
            of[name, "" if name in WITHOUT_MASK else "losses"] = functools.partial(loss, name)
    return of


def vmapped(make: Maker, dtype: str, shape: Shape) -> Work:
    """The work on a batch of four, of which an op under `jax.vmap` sees one."""
    work = make("none", dtype, shape)
    batched = [isinstance(x, jax.Array) for x in work.args]
    args = tuple(jnp.stack([x] * 4) if b else x for x, b in zip(work.args, batched, strict=True))
    in_axes = tuple(0 if b else None for b in batched)
    return Work({name: jax.vmap(fn, in_axes) for name, fn in work.functions.items()}, args, work.leaves)


def mean_of(make: Maker, dtype: str, shape: Shape) -> Work:
    """The work and the mean of its results, as in a training step."""
    work = make("none", dtype, shape)
    functions = {name: lambda *args, fn=fn: jnp.mean(fn(*args)) for name, fn in work.functions.items()}
    return Work(functions, work.args, work.leaves)


def cases_of_rows() -> list[Case]:
    cases = []
    for (name, mask_kind), make in makers().items():
        for dtype, sizes in DTYPES.items():
            for size in sizes if dtype == "float32" or name not in IN_FLOAT32_ALONE else ():
                masks = ("none", mask_kind) if mask_kind and size in MASKED else ("none",)
                for mask in masks:
                    prepare = functools.partial(make, mask, dtype, SHAPES[size])
                    cases.append(Case(name, mask, dtype, size, by_x(SHAPES[size]), prepare))
        average = functools.partial(mean_of, make, "float32", SHAPES[AVERAGED])
        cases.append(Case(name, "none", "float32", "mean", f"mean of {by_x(SHAPES[AVERAGED])}", average))
        batch = functools.partial(vmapped, make, "float32", SHAPES[VMAPPED])
        cases.append(Case(name, "none", "float32", "vmap", f"4 of {by_x(SHAPES[VMAPPED])}", batch))
    return list(eager_too(cases))


ATTENTION = {  # samples, queries, keys
    "many short": (64, 64, 64),
    "short": (32, 128, 128),
    "middle": (8, 512, 512),
    "decoding": (8, 1, 4096),
    "long": (1, 4096, 4096),
}
LINEAR = {"middle": (512, 256, 4096), "large": (1024, 256, 16384)}  # tokens, width, classes


def attend(mask: str, dtype: str, sizes: tuple[int, int, int]) -> Work:
    return without_torch(attention.prepare(mask, dtype, sizes))


def linear(mask: str, dtype: str, sizes: tuple[int, int, int]) -> Work:
    return without_torch(linear_cross_entropy.prepare(mask, dtype, sizes))


def cases_of_products() -> list[Case]:
    cases = []
    for size, sizes in ATTENTION.items():
        masks = ("none", "half padding") if size == "decoding" else ("none", "causal", "half padding")
        for mask in masks:
            for dtype in ("float32", "bfloat16"):
                passes = (VALUE,) if size == "decoding" else Case.passes
                prepare = functools.partial(attend, mask, dtype, sizes)
                cases.append(Case("attention", mask, dtype, size, by_x(sizes), prepare, passes=passes))
    for size, sizes in LINEAR.items():
        for mask in ("none", "60 % of tokens"):
            for dtype in ("float32", "bfloat16"):
                prepare = functools.partial(linear, mask, dtype, sizes)
                cases.append(Case("linear cross-entropy", mask, dtype, size, by_x(sizes), prepare))
    return cases


BENCHMARK = Benchmark("sweep", "The sweep", (), cases_of_rows() + cases_of_products())


def section(docs: Path) -> str:
    """What stands on the page: for each kind of work the ratios of the minima to those of the fastest peer."""
    rows, older = both("sweep", docs)
    draw_by_work(best_peers(rows), docs / "_static" / "benchmarks" / "sweep.png")
    return section_of(BENCHMARK, rows, older, lambda rows: by_work(best_peers(rows)), summary)


def summary(rows: Sequence[Row]) -> str:
    found = [ratio.minimum for ratio in best_peers(rows)]
    return f"{counts(found)}, {sum(ratio > 2 for ratio in found)} above 2."


def main(arguments: Sequence[str] | None = None) -> None:
    console, options = Console(), parse([BENCHMARK], arguments)
    failures = [] if options.plot_only else measure_all([BENCHMARK], options, console)
    found = best_peers(read_csv(csv_of("sweep", options.docs, options.folder)))
    console.print(Markdown(worst(found, WORST)), Markdown(by_work(found)))
    if not options.folder and options.docs.resolve() == DOCS.resolve():
        fill_pages(DOCS, {"sweep": section(DOCS)})
    tell(failures)


if __name__ == "__main__":
    main()
