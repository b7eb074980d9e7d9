"""Every op against its peer as XLA compiles them for a device that need not be there: bytes, launches, temporaries.

    python examples/benchmarks/compiled.py [--target h100] [--only NAME] [--quick] [--plot-only]

It needs what compiles for the target, but no GPU or TPU: pip install ".[examples,gpu-compile]", or
".[examples,tpu-compile]" for `--target v5e`. Nothing is run, so the figures are the same on any machine; `programs.py`
says how they are counted.

With `--target cpu`, for which nothing has to be installed, it counts how large the programs are, and how long they take
to compile; `operations.py` says how.
"""

import argparse
import dataclasses
import datetime
import functools
import importlib.metadata
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import attention
import contrastive
import cross_entropy
import jax
import jax.numpy as jnp
import linear_cross_entropy
import linear_kl_divergence
import linear_log_probs
import losses
import normalization
import routers
import segments
import softmax
from hlo import UNKNOWN_TRIPS
from measure import (
    GRADIENT,
    PASSES,
    Case,
    Work,
    by_x,
    is_installed,
    random_bits,
    random_normal,
    versions,
    with_gradient,
)
from operations import Size, all_sizes, size_ratios, size_row, summary_of_sizes
from pages import DOCS, PAGES, fill_pages
from plots import draw_programs
from programs import MIB, TARGETS, Program, compile_for
from results import as_markdown, environment, grouped, number, ratio_text, read_csv, write_csv
from rich.console import Console
from rich.progress import track
from rich.table import Table

import masksafe

DTYPES = ("float32", "bfloat16")
NO_SIZE = 2**16  # bytes: what is smaller is not worth a ratio
PEERS = ("optax", "flax", "jax.nn", "JAX", segments.PEER)  # torch and tokamax have compilers of their own
TARGETS_OF_PAGE = {"h100": "compiled", "v5e": "compiled for a TPU"}  # and the places of their tables
TARGET_OF_SIZES = "cpu"
# How often loops run whose length depends on values. cuDNN's results need no repair; with 40 % of 4096 tokens the first
# block is enough, which is outside of the loop.
TRIPS = {"attention": 0, "attention by cuDNN": 0, "linear": 0} | dict.fromkeys(linear_log_probs.WORKS, 0)


@dataclass(frozen=True)
class Compiled:
    """One line of the CSV: one candidate in one pass of one case."""

    benchmark: str
    work: str
    mask: str
    dtype: str
    shape: str
    what: str
    candidate: str
    bytes_moved: int
    launches: int
    temporary_bytes: int
    target: str
    date: str
    versions: str
    cycles: int = 0  # the estimate of a TPU's compiler


@dataclass(frozen=True)
class Pair:
    """Masksafe's program beside its peer's."""

    row: Compiled
    peer: Compiled

    @property
    def bytes_ratio(self) -> float:
        return self.row.bytes_moved / self.peer.bytes_moved

    @property
    def cycles_ratio(self) -> float:
        return self.row.cycles / self.peer.cycles

    @property
    def temporaries(self) -> str:
        return f"{_mib(self.row.temporary_bytes)} / {_mib(self.peer.temporary_bytes)}"


# Cases: those of the benchmarks in sizes that are worth a GPU


def prepare_loss(name: str, masked: bool, dtype: str) -> Work:
    work = losses.prepare(name, "large")
    args = jax.tree.map(
        lambda x: x.astype(dtype) if x.dtype == jnp.float32 else x, jax.tree.map(jnp.asarray, work.args)
    )
    return with_mask(Work(work.functions, args)) if masked else Work(work.functions, args)


def with_mask(work: Work) -> Work:
    """The work with a mask of what is a loss of its own: an element or a row. optax's users select among the losses."""
    ours, peers = work.functions["masksafe"], work.functions["optax"]
    shape = jax.eval_shape(ours, *work.args).shape
    dimensions = work.args[0].ndim
    rows_are_whole = len(shape) == dimensions or dimensions > 2
    where = random_bits(shape if rows_are_whole else (*shape, 1), 0.7)
    functions = {
        "masksafe": lambda *args: ours(*args[:-1], where=args[-1]),
        "optax": lambda *args: jnp.where(args[-1].reshape(shape), peers(*args[:-1]), 0),
    }
    return Work(functions, (*work.args, where))


WITHOUT_MASK = {  # no loss for each row or element, or no mask
    *("ranking_softmax_loss", "multiclass_generalized_dice_loss", "ntxent"),
    *("ctc_loss_with_forward_probs", "safe_softmax_cross_entropy"),
}
FLOAT32_ONLY = {"multiclass_sparsemax_loss"}  # optax's gradient fails in bfloat16


def of_losses() -> Iterator[Case]:
    for name in losses.ARGUMENTS:
        for masked in (False, True)[: 1 if name in WITHOUT_MASK else 2]:
            for dtype in DTYPES[: 1 if name in FLOAT32_ONLY else 2]:
                prepare = functools.partial(prepare_loss, name, masked, dtype)
                mask = "masked" if masked else "none"
                yield Case(name, mask, dtype, "large", losses.shape_of(name, "large"), prepare)


def prepare_attention(implementation: str, mask: str, dtype: str, sizes: tuple[int, int, int]) -> Work:
    work = attention.prepare(mask, dtype, sizes)
    of_peer = "xla" if implementation == "splash" else implementation  # jax.nn has nothing else on a TPU
    functions = {
        name: functools.partial(work.functions[name], implementation=of_name)
        for name, of_name in (("masksafe", implementation), ("jax.nn", of_peer))
    }
    return dataclasses.replace(work, functions=functions)


def prepare_linear(mask: str, dtype: str, sizes: tuple[int, int, int]) -> Work:
    work = linear_cross_entropy.prepare(mask, dtype, sizes)
    return work if mask != "none" else without_mask(work)


def prepare_log_probs(name: str, mask: str, dtype: str, sizes: tuple[int, int, int]) -> Work:
    work = linear_log_probs.prepare(name, mask, dtype, sizes)
    return work if mask != "none" else without_mask(work)


def prepare_divergence(case: Case) -> Work:
    work = case.prepare()
    return work if case.mask != "none" else without_mask(work, position=4)


def without_mask(work: Work, position: int = 3) -> Work:
    """As it is timed, but that masksafe is not given a mask of True, which is the argument at that position."""
    ours = work.functions["masksafe"]

    def unmasked(*args: Any) -> Any:
        return ours(*args[:position], None, *args[position + 1 :])

    return dataclasses.replace(work, functions={**work.functions, "masksafe": unmasked})


# The ops without a benchmark: what one writes without masksafe is their peer.
MORE: dict[str, dict[str, Callable[..., Any]]] = {
    "mask_where": {
        "masksafe": lambda x, y, mask: masksafe.mask_where(mask, x, y),
        "JAX": lambda x, y, mask: jnp.where(mask, y, x),
    },
    "apply_where": {
        "masksafe": lambda x, where: masksafe.apply_where(where, x, jnp.log, fill_value=0),
        "JAX": lambda x, where: jnp.where(where, jnp.log(jnp.where(where, x, 1)), 0),
    },
    "standardize": {
        "masksafe": lambda x, where: masksafe.standardize(x, where=where),
        "JAX": lambda x, where: jax.nn.standardize(x, where=where),
    },
    "var_mean": {
        "masksafe": lambda x, where: masksafe.var_mean(x, axis=-1, where=where),
        "JAX": lambda x, where: (jnp.var(x, -1, where=where), jnp.mean(x, -1, where=where)),
    },
}
ALWAYS_MASKED = ("mask_where", "apply_where")


def prepare_more(name: str, mask: str, dtype: str, shape: tuple[int, int]) -> Work:
    arrays = [random_normal(shape, dtype, seed) for seed in range(2 if name == "mask_where" else 1)]
    where = random_bits(shape, 0.7) if mask == "elements" else None
    return Work(MORE[name], (*arrays, where), leaves=len(arrays))


def in_dtypes(
    works: Sequence[str], masks: Sequence[str], sizes: tuple[int, ...], prepare: Callable[..., Work]
) -> Iterator[Case]:
    for work in works:
        for mask in masks:
            for dtype in DTYPES:
                yield Case(
                    work, mask, dtype, "large", by_x(sizes), functools.partial(prepare, work, mask, dtype, sizes)
                )


def of_more() -> Iterator[Case]:
    for name in MORE:
        masks = ("elements",) if name in ALWAYS_MASKED else ("none", "elements")
        yield from in_dtypes((name,), masks, (8192, 2048), prepare_more)


def large(cases: Sequence[Case]) -> list[Case]:
    return [case for case in cases if case.size == "large"]


def benchmarks() -> dict[str, list[Case]]:
    """The cases of every benchmark by its name."""
    norms = lambda work, mask, dtype, shape: normalization.prepare(work, mask, dtype, shape, -1)  # noqa: E731
    linear = lambda _, *rest: prepare_linear(*rest)  # noqa: E731
    attend = lambda _, *rest: prepare_attention("xla", *rest)  # noqa: E731
    cudnn = lambda _, *rest: prepare_attention("cudnn", *rest)  # noqa: E731
    splash = lambda _, *rest: prepare_attention("splash", *rest)  # noqa: E731
    long = (2, 4096, 4096)
    found = {
        "cross_entropy": list(
            in_dtypes(tuple(cross_entropy.LOSSES), cross_entropy.MASKS, (8192, 32768), cross_entropy.prepare)
        ),
        "linear_cross_entropy": list(in_dtypes(("linear",), ("none", "60 % of tokens"), (4096, 1024, 32768), linear)),
        "linear_log_probs": list(
            in_dtypes(linear_log_probs.WORKS, ("none", "60 % of tokens"), (4096, 1024, 32768), prepare_log_probs)
        ),
        "attention": list(in_dtypes(("attention",), attention.ALL, long, attend)),
        "normalization": [
            *in_dtypes(("layer norm", "RMS norm"), normalization.MASKS, (8192, 1024), norms),
            *in_dtypes(("batch norm", "group norm"), ("none", "rows"), (32, 32, 32, 64), norms),
        ],
        "softmax": list(in_dtypes(tuple(softmax.PEERS), ("none", "elements"), (8192, 2048), softmax.prepare)),
        # Without those whose ids are sorted, of which XLA makes the same.
        "segments": [case for case in large(segments.CASES) if case.mask in ("none", "rows")],
        "routers": large(routers.CASES),
        "contrastive": large(contrastive.CASES),
        "more": list(of_more()),
        "losses": list(of_losses()),
    }
    if "nvidia-cudnn-cu12" in installed():
        cases = in_dtypes(("attention by cuDNN",), ("none", "causal", "half padding"), long, cudnn)
        found["attention"] += [case for case in cases if case.dtype == "bfloat16"]
    if "libtpu" in installed():
        found["attention"] += in_dtypes(("attention by splash",), attention.ALL, long, splash)
    return found


# Two forms of attention, many short sequences and a few long ones, whose length is no multiple of a block's.
ATTENTION_ON_CPU = {"short": (24, 96, 96), "long": (3, 1500, 1500)}
HEADS_ON_CPU = 6


def on_cpu() -> dict[str, list[Case]]:
    """The cases whose programs are counted: all of those in float32, and attention in its two forms.

    How large a program is hardly depends on the shapes, if they are large enough for work in blocks.
    """
    found = {name: [case for case in of if case.dtype == "float32"] for name, of in benchmarks().items()}
    found["attention"] = [
        Case("attention", mask, "float32", size, f"{by_x(sizes)}x{HEADS_ON_CPU}", prepare)
        for size, sizes in ATTENTION_ON_CPU.items()
        for mask in attention.ALL
        for prepare in [functools.partial(attention.prepare, mask, "float32", sizes, HEADS_ON_CPU)]
    ]
    found["linear_kl_divergence"] = [
        dataclasses.replace(
            case, work=f"linear {case.work} divergence", prepare=functools.partial(prepare_divergence, case)
        )
        for case in linear_kl_divergence.CASES
        if (case.dtype, case.size) == ("float32", "large")
    ]
    return found


def installed() -> set[str]:
    return {distribution.name for distribution in importlib.metadata.distributions()}


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
    names = [name for name in shapes_of(case.prepare).functions if name == "masksafe" or name in PEERS]
    return list(filter(is_installed, names))


def rows_of(benchmark: str, case: Case, target: str, passes: Sequence[str] = PASSES) -> Iterator[Compiled]:
    for what in passes:
        for name in candidates(case):
            program = compile_case(case, name, what, target)
            yield Compiled(
                benchmark=benchmark,
                work=case.work,
                mask=case.mask,
                dtype=case.dtype,
                shape=case.shape,
                what=what,
                candidate=name,
                bytes_moved=round(program.bytes_moved),
                launches=program.launches,
                temporary_bytes=program.temporary_bytes,
                target=target,
                date=datetime.date.today().isoformat(),
                versions=versions(),
                cycles=program.cycles,
            )


def sizes_of(benchmark: str, case: Case, target: str, passes: Sequence[str] = PASSES) -> Iterator[Size]:
    for what in passes:
        for name in candidates(case):
            step, args = step_of(case, name, what)
            yield size_row(benchmark, case, what, name, step, args)


# Results


def pairs(rows: Sequence[Compiled]) -> list[Pair]:
    found = []
    for case in grouped(rows, lambda r: (r.benchmark, r.work, r.mask, r.dtype, r.what)).values():
        ours = [row for row in case if row.candidate == "masksafe"]
        found += [Pair(row, peer) for row in ours for peer in case if peer is not row]
    return found


def _mib(n: float) -> str:
    return number(n / MIB) if n >= NO_SIZE else "0"


HEADER = ["op", "against", "what", "bytes: mean ratio", "the worst", "of", "launches", "temporaries, MiB"]
CYCLES = ["cycles: mean ratio", "the worst"]  # in place of the launches


def header_of(found: Sequence[Pair]) -> list[str]:
    return [*HEADER[:-2], *CYCLES, HEADER[-1]] if _has_cycles(found) else HEADER


def _has_cycles(found: Sequence[Pair]) -> bool:
    return any(pair.peer.cycles for pair in found)


def lines_of_ops(found: Sequence[Pair]) -> list[list[str]]:
    """A line for each op and pass, the largest mean first: mean and worst ratio of bytes, and the rest of the worst.

    Cycles have ratios of their own.
    """
    groups = grouped(found, lambda pair: (pair.row.work, pair.peer.candidate, pair.row.what))
    means = {key: statistics.geometric_mean(p.bytes_ratio for p in group) for key, group in groups.items()}
    lines = []
    for key in sorted(groups, key=means.__getitem__, reverse=True):
        worst = max(groups[key], key=lambda pair: pair.bytes_ratio)
        case = f"{worst.row.mask}, {worst.row.dtype}" if worst.row.mask != "none" else worst.row.dtype
        further = [f"{worst.row.launches} / {worst.peer.launches}"]
        if _has_cycles(found):
            cycles = [pair.cycles_ratio for pair in groups[key]]
            further = [ratio_text(statistics.geometric_mean(cycles)), ratio_text(max(cycles))]
        lines.append([*key, ratio_text(means[key]), ratio_text(worst.bytes_ratio), case, *further, worst.temporaries])
    return lines


def summary(rows: Sequence[Compiled]) -> str:
    found = pairs(rows)
    above = sum(pair.bytes_ratio > 1.1 for pair in found)
    text = f"Of {len(found)} programs {above} move more than 1.1 times the bytes of the other library's"
    if _has_cycles(found):
        text += f", and {sum(pair.cycles_ratio > 1.1 for pair in found)} take more than 1.1 times the cycles"
    lines = [line for line in lines_of_ops(found) if any(cell.startswith("**") for cell in line)]
    link = f"[All figures as CSV](../benchmarks/compiled/{rows[0].target}.csv)"
    return "\n\n".join([f"{text}. These are of:", as_markdown(header_of(found), lines), link])


def all_cases(found: Sequence[Pair]) -> Table:
    """A table for the terminal: every case, the largest ratio of bytes first."""
    table = Table("op", "mask", "dtype", "against", "what", "MiB", "ratio", "launches", "temporaries, MiB")
    for pair in sorted(found, key=lambda pair: pair.bytes_ratio, reverse=True):
        row, peer = pair.row, pair.peer
        moved = f"{_mib(row.bytes_moved)} / {_mib(peer.bytes_moved)}"
        colour = "red" if pair.bytes_ratio > 1.1 else "green" if pair.bytes_ratio < 0.95 else "default"
        ratio = f"[{colour}]{pair.bytes_ratio:.2f}"
        launches = f"{row.launches} / {peer.launches}"
        table.add_row(row.work, row.mask, row.dtype, peer.candidate, row.what, moved, ratio, launches, pair.temporaries)
    return table


def short(found: Sequence[Pair]) -> Table:
    table = Table(*header_of(found))
    for line in lines_of_ops(found):
        table.add_row(*(cell.replace("**", "") for cell in line))
    return table


def csv_of(target: str, docs: Path) -> Path:
    return docs / "benchmarks" / "compiled" / f"{target}.csv"


def publish(target: str, docs: Path) -> None:
    """The picture, and for a target of the page its table, from the CSV."""
    if target == TARGET_OF_SIZES:
        sizes = read_csv(csv_of(target, docs), Size)
        return fill_pages(docs, {"operations": summary_of_sizes(sizes)})
    rows = read_csv(csv_of(target, docs), Compiled)
    picture = Path("_static") / "benchmarks" / f"compiled_{target}.png"
    draw_programs(pairs(rows), docs / picture)
    if target in TARGETS_OF_PAGE:
        image = f"![Ratios of bytes moved on a {target}](../{picture})"
        text = "\n\n".join([f"Compiled {environment(rows)}.", image, summary(rows)])
        fill_pages(docs, {TARGETS_OF_PAGE[target]: text})


# The command line


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=TARGETS, default="h100", help="default: %(default)s")
    parser.add_argument("--only", action="append", help="a benchmark or an op; may be given again; default: all")
    parser.add_argument("--quick", action="store_true", help="one gradient of each op; writes nothing")
    parser.add_argument("--plot-only", action="store_true", help="compile nothing: picture and page from the CSV")
    parser.add_argument("--docs", type=Path, default=DOCS, help="where results go; default: docs")
    return parser.parse_args(arguments)


def chosen(options: argparse.Namespace) -> list[tuple[str, Case]]:
    of_target = on_cpu() if options.target == TARGET_OF_SIZES else benchmarks()
    cases = [(name, case) for name, of_name in of_target.items() for case in of_name]
    if options.only:
        cases = [(name, case) for name, case in cases if {name, case.work} & set(options.only)]
    return list({case.work: (name, case) for name, case in reversed(cases)}.values()) if options.quick else cases


def main(arguments: Sequence[str] | None = None) -> None:
    console = Console(width=None if sys.stdout.isatty() else 150)
    options = parse(arguments)
    target = TARGETS[options.target]
    if not options.plot_only:
        if not target.is_installed:
            sys.exit(f"{target.name}: {target.module} is not installed: {target.install}")
        rows, failures = compile_all(options, console)
        console.print(table_of(rows, options))
        if failures:
            console.print("These cases failed:", *failures, sep="\n", markup=False)
        if options.quick or options.only:
            return
        write_csv(csv_of(target.name, options.docs), rows, type(rows[0]))
    publish(target.name, options.docs)
    console.print(f"What was found is in {os.path.relpath(options.docs)}: the CSV, its picture if any, and {PAGES}.")


def table_of(rows: Sequence[Any], options: argparse.Namespace) -> Table:
    """What the terminal shows."""
    if options.target == TARGET_OF_SIZES:
        return all_sizes(size_ratios(rows))
    return (short if options.quick else all_cases)(pairs(rows))


def compile_all(options: argparse.Namespace, console: Console) -> tuple[list[Any], list[str]]:
    """The lines of the CSV, those of `Compiled` or of `Size`, and what failed."""
    rows: list[Any] = []
    failures = []
    passes = (GRADIENT,) if options.quick else PASSES
    of_case = sizes_of if options.target == TARGET_OF_SIZES else rows_of
    for name, case in track(chosen(options), f"Compiling for {options.target}", console=console):
        try:
            rows += of_case(name, case, options.target, passes)
        except Exception as error:  # one case that fails must not cost the others
            text = str(error).splitlines()[0] if str(error) else ""
            failures.append(f"{case.work}, {case.mask}, {case.dtype}: {type(error).__name__}: {text}")
        jax.clear_caches()
    return rows, failures


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # or JAX would look for the driver of a GPU
    main()
