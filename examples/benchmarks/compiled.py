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
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from command import parser_of, run, tell
from hlo import UNKNOWN_TRIPS
from measure import GRADIENT, PASSES, Case, Row, Work, by_x, cases_of, grid_of, is_installed, row_of, with_gradient
from plots import draw_programs
from programs import TARGETS, Program, check, compile_for
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
    works: Iterable[str],
    masks: Iterable[str],
    dtypes: Iterable[str] = DTYPES,
    **fields: Any,
) -> list[Case]:
    return cases_of(prepare, {"large": shape}, grid_of(works, masks, dict.fromkeys(dtypes, ("large",))), **fields)


def of_losses() -> list[Case]:
    found = []
    for name in losses.ARGUMENTS:
        masks = ["none"] if name in losses.WITHOUT_MASK else ["none", "masked"]
        dtypes = ["float32"] if name in losses.FLOAT32_ONLY else DTYPES
        found += large(losses.prepare, losses.shape_of(name, "large"), [name], masks, dtypes)
    return found


def of_more() -> list[Case]:
    masks = dict.fromkeys(formulas.MORE, ("none", "elements")) | dict.fromkeys(formulas.ALWAYS_MASKED, ("elements",))
    return [case for name, of in masks.items() for case in large(formulas.prepare_more, (8192, 2048), [name], of)]


def by(implementation: str) -> Callable[..., Work]:
    """Attention by that implementation, or on a TPU by what jax.nn has there."""

    def prepare(work: str, mask: str, dtype: str, sizes: tuple[int, int, int]) -> Work:
        found = attention.prepare(work, mask, dtype, sizes)
        of = {"masksafe": implementation, "jax.nn": "xla" if implementation == "splash" else implementation}
        functions = {name: functools.partial(found.functions[name], implementation=how) for name, how in of.items()}
        return dataclasses.replace(found, functions=functions)

    return prepare


def unmasked(prepare: Callable[..., Work], position: int = 3) -> Callable[..., Work]:
    """The work, but without a mask of True, the argument at that position, where there is none to be."""

    def prepared(work: str, mask: str, *rest: Any) -> Work:
        found = prepare(work, mask, *rest)
        if mask != "none":
            return found
        ours = found.functions["masksafe"]
        without = lambda *args: ours(*args[:position], None, *args[position + 1 :])  # noqa: E731
        return dataclasses.replace(found, functions={**found.functions, "masksafe": without})

    return prepared


def benchmarks() -> dict[str, list[Case]]:
    """The cases of every benchmark by its name."""
    tokens, long, of_linear = ("none", "60 % of tokens"), (2, 4096, 4096), (4096, 1024, 32768)
    norms = functools.partial(large, normalization.prepare, text=lambda shape: by_x(shape[0]))
    of_size = lambda cases: [case for case in cases if case.size == "large"]  # noqa: E731
    found = {
        "cross_entropy": large(losses.prepare_cross_entropy, (8192, 32768), losses.CROSS_ENTROPIES, losses.MASKS),
        "linear_cross_entropy": large(unmasked(linear.prepare), of_linear, ["linear"], tokens),
        "linear_log_probs": large(unmasked(linear.prepare_log_probs), of_linear, linear.LOG_PROBS, tokens),
        "attention": large(by("xla"), long, ["attention"], attention.ALL),
        "normalization": [
            *norms(((8192, 1024), -1), ["layer norm", "RMS norm"], normalization.MASKS),
            *norms(((32, 32, 32, 64), -1), ["batch norm", "group norm"], ["none", "rows"]),
        ],
        "softmax": large(formulas.prepare, (8192, 2048), formulas.SOFTMAX, ["none", "elements"]),
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
        found["attention"] += large(by("cudnn"), long, ["attention by cuDNN"], masks, ["bfloat16"])
    if "libtpu" in packages:
        found["attention"] += large(by("splash"), long, ["attention by splash"], attention.ALL)
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
        for case in large(unmasked(linear.prepare_divergence, 4), size, [work], of["large"], [dtype])
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
            figures = {"bytes_moved": round(program.bytes_moved), "launches": program.launches}
            figures |= {"temporary_bytes": program.temporary_bytes, "cycles": program.cycles}
            yield row_of(benchmark, case, what, name, **figures, target=target)
    jax.clear_caches()


def sizes_of(benchmark: str, case: Case, passes: Sequence[str] = PASSES) -> Iterator[Row]:
    for what in passes:
        for name in candidates(case):
            step, args = step_of(case, name, what)
            yield row_of(benchmark, case, what, name, **operations.size_of(step, *args))


# Results


def mib(n: float) -> str:
    return results.number(n / MIB) if n >= NO_SIZE else "0"


def has_cycles(found: Sequence[Pair]) -> bool:
    """Whether they have the estimate of a TPU's compiler."""
    return any(getattr(pair.peer, "cycles", 0) for pair in found)


def table_of_ops(found: Sequence[Pair], *, of_all: bool = True) -> str:
    """A line for each op and pass, the largest mean first: mean and worst ratio of bytes, and the rest of the worst.

    Cycles, which stand in place of the launches, have ratios of their own. Unless it is of all ops, it has those lines
    in which a ratio is above the limit.
    """
    groups = grouped(found, lambda pair: (pair.row.work, pair.peer.candidate, pair.row.what))
    means = {key: mean(pair.of("bytes_moved") for pair in group) for key, group in groups.items()}
    lines = []
    for key in sorted(groups, key=means.__getitem__, reverse=True):
        worst = max(groups[key], key=lambda pair: pair.of("bytes_moved"))
        case = results.listed(worst.row.mask if worst.row.mask != "none" else "", worst.row.dtype)
        further = [worst.both("launches")]
        if has_cycles(found):
            cycles = [pair.of("cycles") for pair in groups[key]]
            further = [ratio_text(mean(cycles)), ratio_text(max(cycles))]
        ratios = ratio_text(means[key]), ratio_text(worst.of("bytes_moved"))
        lines.append([*key, *ratios, case, *further, worst.both("temporary_bytes", mib)])
    header = ["op", "against", "what", "bytes: mean ratio", "the worst", "of"]
    header += ["cycles: mean ratio", "the worst"] if has_cycles(found) else ["launches"]
    shown = [line for line in lines if of_all or any(cell.startswith("**") for cell in line)]
    return as_markdown([*header, "temporaries, MiB"], shown)


def summary(rows: Sequence[Row]) -> str:
    found = pairs(rows)
    above = lambda figure: sum(pair.of(figure) > results.SLOWER for pair in found)  # noqa: E731
    text = f"Of {len(found)} programs {above('bytes_moved')} move more than 1.1 times the bytes of the other library's"
    if has_cycles(found):
        text += f", and {above('cycles')} take more than 1.1 times the cycles"
    link = f"[All figures as CSV](../benchmarks/compiled/{rows[0].target}.csv)"
    return "\n\n".join([f"{text}. Their ops:", table_of_ops(found, of_all=False), link])


def publish(target: str) -> None:
    """The picture, and for a target of the page its table, from the CSV."""
    rows = read_csv(csv_of(f"compiled/{target}"))
    if target == SIZES_ON:
        return fill_pages({PLACES[target]: operations.summary(rows)})
    draw_programs(pairs(rows), results.picture_of(f"compiled_{target}"))
    if target in PLACES:
        image = f"![Ratios of bytes moved, compiled for {target}](../{results.PICTURES}/compiled_{target}.png)"
        fill_pages({PLACES[target]: "\n\n".join([f"Compiled {environment(rows)}.", image, summary(rows)])})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of()
    parser.add_argument("--target", choices=TARGETS, default="h100", help="default: %(default)s")
    options = parser.parse_args(arguments)
    target, passes = options.target, PASSES[options.quick :]
    if not options.plot_only:
        check(target)
    if target == SIZES_ON:
        of_name, found_of, table = on_cpu(), functools.partial(sizes_of, passes=passes), operations.table
        without = ["eager"]
    else:
        of_name, found_of = benchmarks(), functools.partial(rows_of, target=target, passes=passes)
        table, without = lambda rows: table_of_ops(pairs(rows)), ["size", "eager", "machine", "python"]
    cases = [(name, case) for name, of in of_name.items() for case in of]
    path, of_target = csv_of(f"compiled/{target}"), functools.partial(publish, target)
    tell(run(options, f"Compiling for {target}", cases, found_of, table, path, of_target, without))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # or JAX would look for the driver of a GPU
    main()
