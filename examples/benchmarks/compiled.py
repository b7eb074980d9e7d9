"""Every op against its peer as XLA compiles them for a device that need not be there: bytes, launches, temporaries.

    python examples/benchmarks/compiled.py [--target h100] [--only NAME] [--quick] [--plot-only]

It needs what compiles for the target, but no GPU or TPU: pip install ".[examples,gpu-compile]", or
".[examples,tpu-compile]" for `--target v5e`. Nothing is run, so the figures are the same on any machine; `programs.py`
says how they are counted.

With `--target cpu`, for which nothing has to be installed, it counts how large the programs are, and how long they take
to compile; `operations.py` says how.
"""

import dataclasses
import functools
import importlib.metadata
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attention
import formulas
import jax
import linear
import losses
import normalization
import operations
import results
import segments
from command import parser_of, run
from hlo import UNKNOWN_TRIPS
from measure import GRADIENT, PASSES, Case, Row, Work, by_x, cases_of, grid_of, is_installed, row_of, with_gradient
from plots import draw_programs
from programs import TARGETS, Program, compile_for
from results import MIB, Pair, as_markdown, csv_of, environment, fill_pages, grouped, mean, pairs, ratio_text, read_csv

DTYPES = ("float32", "bfloat16")
NO_SIZE = 2**16  # bytes: what is smaller is not worth a ratio
PEERS = ("optax", "flax", "jax.nn", "JAX", segments.PEER)  # torch and tokamax have compilers of their own
SIZES_ON = "cpu"  # the target on which the sizes of programs are counted
PLACES = {"h100": "compiled", "v5e": "compiled for a TPU", SIZES_ON: "operations"}  # of tables, and their targets
# How often loops run whose length depends on values. cuDNN's results need no repair; with 40 % of 4096 tokens the first
# block is enough, which is outside of the loop.
TRIPS = {"attention": 0, "attention by cuDNN": 0, "linear": 0} | dict.fromkeys(linear.LOG_PROBS, 0)


# Cases: those of the benchmarks in sizes that are worth a GPU


def large(
    prepare: Callable[..., Work],
    shape: Any,
    works: Sequence[str],
    masks: Sequence[str],
    dtypes: Sequence[str] = DTYPES,
    **fields: Any,
) -> list[Case]:
    grid = grid_of(works, masks, dict.fromkeys(dtypes, ("large",)))
    return cases_of(prepare, {"large": shape}, grid, **fields)


def of_losses() -> list[Case]:
    found = []
    for name in losses.ARGUMENTS:
        masks = ("none", "masked")[: 1 if name in losses.WITHOUT_MASK else 2]
        dtypes = DTYPES[: 1 if name in losses.FLOAT32_ONLY else 2]
        found += large(losses.prepare, losses.shape_of(name, "large"), (name,), masks, dtypes)
    return found


def of_more() -> list[Case]:
    found = []
    for name in formulas.MORE:
        masks = ("elements",) if name in formulas.ALWAYS_MASKED else ("none", "elements")
        found += large(formulas.prepare_more, (8192, 2048), (name,), masks)
    return found


def by(implementation: str) -> Callable[..., Work]:
    """Attention by that implementation, or on a TPU by what jax.nn has there."""

    def prepare(work: str, mask: str, dtype: str, sizes: tuple[int, int, int]) -> Work:
        found = attention.prepare(work, mask, dtype, sizes)
        of = {"masksafe": implementation, "jax.nn": "xla" if implementation == "splash" else implementation}
        functions = {name: functools.partial(found.functions[name], implementation=how) for name, how in of.items()}
        return dataclasses.replace(found, functions=functions)

    return prepare


def unmasked(prepare: Callable[..., Work], position: int = 3) -> Callable[..., Work]:
    """The work, but without a mask of True where there is none to be."""

    def prepared(work: str, mask: str, *rest: Any) -> Work:
        found = prepare(work, mask, *rest)
        return found if mask != "none" else linear.without_mask(found, position)

    return prepared


def benchmarks() -> dict[str, list[Case]]:
    """The cases of every benchmark by its name."""
    text, tokens, long = {"text": lambda shape: by_x(shape[0])}, ("none", "60 % of tokens"), (2, 4096, 4096)
    of_size = lambda cases: [case for case in cases if case.size == "large"]  # noqa: E731
    norms = normalization.prepare
    found = {
        "cross_entropy": large(
            *(losses.prepare_cross_entropy, (8192, 32768), tuple(losses.CROSS_ENTROPIES), losses.MASKS)
        ),
        "linear_cross_entropy": large(unmasked(linear.prepare), (4096, 1024, 32768), ("linear",), tokens),
        "linear_log_probs": large(unmasked(linear.prepare_log_probs), (4096, 1024, 32768), linear.LOG_PROBS, tokens),
        "attention": large(by("xla"), long, ("attention",), attention.ALL),
        "normalization": [
            *large(norms, ((8192, 1024), -1), ("layer norm", "RMS norm"), normalization.MASKS, **text),
            *large(norms, ((32, 32, 32, 64), -1), ("batch norm", "group norm"), ("none", "rows"), **text),
        ],
        "softmax": large(formulas.prepare, (8192, 2048), tuple(formulas.SOFTMAX), ("none", "elements")),
        # Without those whose ids are sorted, of which XLA makes the same.
        "segments": [case for case in of_size(segments.CASES) if case.mask in ("none", "rows")],
        "routers": of_size(formulas.CASES["routers"]),
        "contrastive": of_size(formulas.CASES["contrastive"]),
        "more": of_more(),
        "losses": of_losses(),
    }
    packages = {distribution.name for distribution in importlib.metadata.distributions()}
    if "nvidia-cudnn-cu12" in packages:
        masks = ("none", "causal", "half padding")
        found["attention"] += large(by("cudnn"), long, ("attention by cuDNN",), masks, ("bfloat16",))
    if "libtpu" in packages:
        found["attention"] += large(by("splash"), long, ("attention by splash",), attention.ALL)
    return found


# Two forms of attention, many short sequences and a few long ones, whose length is no multiple of a block's.
ATTENTION_ON_CPU = {"short": (24, 96, 96), "long": (3, 1500, 1500)}
HEADS_ON_CPU = 6


def on_cpu() -> dict[str, list[Case]]:
    """The cases whose programs are counted: all of those in float32, and attention in its two forms.

    How large a program is hardly depends on the shapes, if they are large enough for work in blocks.
    """
    found = {name: [case for case in of if case.dtype == "float32"] for name, of in benchmarks().items()}
    found["attention"] = cases_of(
        functools.partial(attention.prepare, heads=HEADS_ON_CPU),
        ATTENTION_ON_CPU,
        [("attention", mask, "float32", size) for size in ATTENTION_ON_CPU for mask in attention.ALL],
        text=lambda shape: by_x((*shape, HEADS_ON_CPU)),
    )
    size = linear.SIZES_OF_DIVERGENCE["large"]
    found["linear_kl_divergence"] = [
        dataclasses.replace(case, work=f"linear {case.work} divergence")
        for (work, dtype), of in linear.DIVERGENCES.items()
        if dtype == "float32"
        for case in large(unmasked(linear.prepare_divergence, 4), size, (work,), of["large"], (dtype,))
    ]
    return found


# Compiling


def shapes_of(prepare: Callable[[], Work]) -> Work:
    """The work with the shapes of its arrays in their place."""
    found: list[Work] = []

    def arrays() -> Any:
        found.append(prepare())
        return found[0].args

    shapes = jax.eval_shape(arrays)
    return dataclasses.replace(found[0], args=shapes, torch_args=None)


def step_of(case: Case, name: str, what: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What one candidate computes, as a function that JAX has not seen before, and the shapes of its arguments."""
    work = shapes_of(case.prepare)
    fn, args = work.functions[name], work.args
    if what == GRADIENT:
        return with_gradient(fn, work.leaves), (jax.eval_shape(fn, *args), *args)
    return (lambda *args: fn(*args)), args


def compile_case(case: Case, name: str, what: str, target: str) -> Program:
    step, args = step_of(case, name, what)
    return compile_for(target, step, *args, unknown_trips=TRIPS.get(case.work, UNKNOWN_TRIPS))


def candidates(case: Case) -> list[str]:
    return compiled_candidates(shapes_of(case.prepare))


def compiled_candidates(work: Work) -> list[str]:
    return [name for name in work.functions if name == "masksafe" or (name in PEERS and is_installed(name))]


def rows_of(benchmark: str, case: Case, target: str, passes: Sequence[str] = PASSES) -> Iterator[Row]:
    for what in passes:
        for name in candidates(case):
            program = compile_case(case, name, what, target)
            figures = {
                "bytes_moved": round(program.bytes_moved),
                "launches": program.launches,
                "temporary_bytes": program.temporary_bytes,
                "cycles": program.cycles,
            }
            yield row_of(benchmark, case, what, name, **figures, target=target)


def sizes_of(benchmark: str, case: Case, passes: Sequence[str] = PASSES) -> Iterator[Row]:
    for what in passes:
        for name in candidates(case):
            step, args = step_of(case, name, what)
            yield row_of(benchmark, case, what, name, **operations.size_of(step, *args))


# Results


def mib(n: float) -> str:
    return results.number(n / MIB) if n >= NO_SIZE else "0"


HEADER = ["op", "against", "what", "bytes: mean ratio", "the worst", "of", "launches", "temporaries, MiB"]
CYCLES = ["cycles: mean ratio", "the worst"]  # in place of the launches


def header_of(found: Sequence[Pair]) -> list[str]:
    return [*HEADER[:-2], *CYCLES, HEADER[-1]] if has_cycles(found) else HEADER


def has_cycles(found: Sequence[Pair]) -> bool:
    """Whether they have the estimate of a TPU's compiler."""
    return any(getattr(pair.peer, "cycles", 0) for pair in found)


def lines_of_ops(found: Sequence[Pair]) -> list[list[str]]:
    """A line for each op and pass, the largest mean first: mean and worst ratio of bytes, and the rest of the worst.

    Cycles have ratios of their own.
    """
    groups = grouped(found, lambda pair: (pair.row.work, pair.peer.candidate, pair.row.what))
    means = {key: mean(pair.of("bytes_moved") for pair in group) for key, group in groups.items()}
    lines = []
    for key in sorted(groups, key=means.__getitem__, reverse=True):
        worst = max(groups[key], key=lambda pair: pair.of("bytes_moved"))
        case = results.listed(worst.row.mask if worst.row.mask != "none" else "", worst.row.dtype)
        further = [of_both(worst, "launches")]
        if has_cycles(found):
            cycles = [pair.of("cycles") for pair in groups[key]]
            further = [ratio_text(mean(cycles)), ratio_text(max(cycles))]
        ratios = ratio_text(means[key]), ratio_text(worst.of("bytes_moved"))
        lines.append([*key, *ratios, case, *further, of_both(worst, "temporary_bytes", mib)])
    return lines


def of_both(pair: Pair, figure: str, text: Callable[[Any], str] = str) -> str:
    return f"{text(getattr(pair.row, figure))} / {text(getattr(pair.peer, figure))}"


def summary(rows: Sequence[Row]) -> str:
    found = pairs(rows)
    above = sum(pair.of("bytes_moved") > 1.1 for pair in found)
    text = f"Of {len(found)} programs {above} move more than 1.1 times the bytes of the other library's"
    if has_cycles(found):
        text += f", and {sum(pair.of('cycles') > 1.1 for pair in found)} take more than 1.1 times the cycles"
    lines = [line for line in lines_of_ops(found) if any(cell.startswith("**") for cell in line)]
    link = f"[All figures as CSV](../benchmarks/compiled/{rows[0].target}.csv)"
    return "\n\n".join([f"{text}. These are of:", as_markdown(header_of(found), lines), link])


def publish(target: str) -> None:
    """The picture, and for a target of the page its table, from the CSV."""
    rows = read_csv(csv_of(f"compiled/{target}"))
    if target == SIZES_ON:
        return fill_pages({PLACES[target]: operations.summary(rows)})
    draw_programs(pairs(rows), results.picture_of(f"compiled_{target}"))
    if target in PLACES:
        image = f"![Ratios of bytes moved on a {target}](../{results.PICTURES}/compiled_{target}.png)"
        fill_pages({PLACES[target]: "\n\n".join([f"Compiled {environment(rows)}.", image, summary(rows)])})


def table(rows: Sequence[Row]) -> str:
    """A line for each op."""
    found = pairs(rows)
    if hasattr(rows[0], "operations"):
        return as_markdown(operations.HEADER, operations.lines_of(operations.sorted_pairs(rows)))
    return as_markdown(header_of(found), lines_of_ops(found))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of()
    parser.add_argument("--target", choices=TARGETS, default="h100", help="default: %(default)s")
    options = parser.parse_args(arguments)
    target, counts_sizes, passes = options.target, options.target == SIZES_ON, PASSES[options.quick :]
    if not options.plot_only:
        TARGETS[target].check()

    def found_of(name: str, case: Case) -> Iterator[Row]:
        return sizes_of(name, case, passes) if counts_sizes else rows_of(name, case, target, passes)

    cases = [(name, case) for name, of in (on_cpu() if counts_sizes else benchmarks()).items() for case in of]
    path, without = csv_of(f"compiled/{target}"), ["eager"] if counts_sizes else ["size", "eager", "machine", "python"]
    run(options, f"Compiling for {target}", cases, found_of, table, path, lambda: publish(target), without)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # or JAX would look for the driver of a GPU
    main()
