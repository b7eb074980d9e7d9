"""Every op against its peer on the GPU that is there: times, and how much of the hardware they use.

    python examples/benchmarks/gpu.py [--only NAME] [--minutes 8] [--quick]

The cases are those that `compiled.py` compiles, in bfloat16, with and without a mask. Of each the table has the time,
and its share of what is possible: for attention cuDNN's time by jax.nn in units of it, for all others the time in which
the GPU copies as many bytes as there are in the arguments and the results. For a matrix product, as in a loss of a
linear layer, that is no bound, and the ratio to the peer says more.

It takes at most `--minutes`: cases that are left over then are named. It loads nothing from a network.
"""

import argparse
import datetime
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from compiled import PEERS, benchmarks
from measure import GRADIENT, PASSES, Case, is_installed, measure, pulled_back, versions
from pages import DOCS
from results import NOTHING, grouped, number, ratio_text, write_csv
from rich.console import Console
from rich.progress import track
from rich.table import Table

DTYPES = ("bfloat16",)
COPIED_BYTES = 2**30
SECONDS = 0.02  # that the calls of one timing take, so that they hide what it costs to launch them
MOST_CALLS = 200
ROUNDS = 3
BY_CUDNN = "attention by cuDNN"


@dataclass(frozen=True)
class Timed:
    """One line of the CSV: one candidate in one pass of one case."""

    benchmark: str
    work: str
    mask: str
    dtype: str
    shape: str
    what: str
    candidate: str
    minimum_ms: float
    median_ms: float
    bytes: int  # of the arguments and the results
    copy_ms: float  # in which the device copies as many
    device: str
    date: str
    versions: str


def cases() -> list[tuple[str, Case]]:
    """Those of each op in turn, so that a run that is cut short has seen all of them."""
    found = [
        (name, case)
        for name, of_name in benchmarks().items()
        for case in of_name
        if case.dtype in DTYPES or not any(other.dtype in DTYPES for other in of_name if other.work == case.work)
    ]
    of_work = grouped(found, lambda pair: pair[1].work).values()
    return [of[i] for i in range(max(map(len, of_work))) for of in of_work if i < len(of)]


# Timing


class Queued:
    """A compiled program, called so often that launching costs nothing: the device works while the host queues."""

    def __init__(self, step: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.program, self.args = jax.jit(lambda *args: step(*args)).lower(*args).compile(), args
        out = jax.block_until_ready(self.program(*args))
        self.bytes = sum(x.nbytes for x in jax.tree.leaves((args, out)))
        start = time.perf_counter()
        jax.block_until_ready(self.program(*args))
        self.calls = max(1, min(MOST_CALLS, round(SECONDS / (time.perf_counter() - start))))

    def __call__(self) -> None:
        out = None
        for _ in range(self.calls):
            out = self.program(*self.args)
        jax.block_until_ready(out)


def times_of(candidates: dict[str, Queued]) -> dict[str, tuple[float, float]]:
    """The minimum and the median of the seconds of one call."""
    timings = measure(dict(candidates), ROUNDS)
    return {
        name: (t.minimum / candidates[name].calls, t.median / candidates[name].calls) for name, t in timings.items()
    }


def bytes_per_second(copied: int = COPIED_BYTES) -> float:
    """What the device reads and writes while it copies an array, to which it adds 1."""
    x = jnp.zeros(copied // 4, jnp.int32)
    seconds, _ = times_of({"copy": Queued(lambda x: x + 1, (x,))})["copy"]
    return 2 * copied / seconds


def rows_of(benchmark: str, case: Case, bandwidth: float, passes: Sequence[str] = PASSES) -> Iterator[Timed]:
    work = case.prepare()
    names = [name for name in work.functions if (name == "masksafe" or name in PEERS) and is_installed(name)]
    for what in passes:
        candidates = {}
        for name in names:
            fn = work.functions[name]
            candidates[name] = Queued(
                *(pulled_back(fn, work.args, work.leaves) if what == GRADIENT else (fn, work.args))
            )
        for name, (minimum, median) in times_of(candidates).items():
            yield Timed(
                benchmark=benchmark,
                work=case.work,
                mask=case.mask,
                dtype=case.dtype,
                shape=case.shape,
                what=what,
                candidate=name,
                minimum_ms=float(f"{1e3 * minimum:.4g}"),
                median_ms=float(f"{1e3 * median:.4g}"),
                bytes=candidates[name].bytes,
                copy_ms=float(f"{1e3 * candidates[name].bytes / bandwidth:.4g}"),
                device=jax.devices()[0].device_kind,
                date=datetime.date.today().isoformat(),
                versions=versions(),
            )


# Results


def possible_ms(row: Timed, rows: Sequence[Timed]) -> float | None:
    """The time of cuDNN, if it is attention and cuDNN was timed, or that of a copy."""
    if row.benchmark != "attention":
        return row.copy_ms
    case = row.mask, row.dtype, row.shape, row.what
    of_cudnn = [
        r.median_ms
        for r in rows
        if (r.work, r.candidate) == (BY_CUDNN, "jax.nn") and (r.mask, r.dtype, r.shape, r.what) == case
    ]
    return of_cudnn[0] if of_cudnn else None


HEADER = ["op", "mask", "what", "against", "ms", "ratio", "share", "peer's share"]


def share(row: Timed, rows: Sequence[Timed]) -> str:
    possible = possible_ms(row, rows)
    return NOTHING if possible is None else f"{100 * possible / row.median_ms:.0f} %"


def lines_of(rows: Sequence[Timed]) -> list[list[str]]:
    """A line for each case, pass and peer, the slowest in units of its peer first."""
    lines = []
    for case in grouped(rows, lambda r: (r.benchmark, r.work, r.mask, r.dtype, r.shape, r.what)).values():
        of = {row.candidate: row for row in case}
        if ours := of.pop("masksafe", None):
            for name, peer in of.items():
                ratio = ours.median_ms / peer.median_ms
                shares = share(ours, rows), share(peer, rows)
                times = f"{number(ours.median_ms)} / {number(peer.median_ms)}"
                lines.append((ratio, [ours.work, ours.mask, ours.what, name, times, ratio_text(ratio), *shares]))
    return [line for _, line in sorted(lines, key=lambda line: -line[0])]


def table(rows: Sequence[Timed]) -> Table:
    found = Table(*HEADER)
    for line in lines_of(rows):
        found.add_row(*(cell.replace("**", "") for cell in line))
    return found


def csv_of(docs: Path) -> Path:
    return docs / "benchmarks" / "gpu.csv"


# The command line


def time_all(
    found: Sequence[tuple[str, Case]], bandwidth: float, end: float, console: Console
) -> tuple[list[Timed], list[str]]:
    """The lines of the CSV, and the cases that failed or for which there was no time."""
    rows: list[Timed] = []
    failures = []
    for name, case in track(found, "Timing", console=console):
        text = f"{case.work}, {case.mask}, {case.dtype}"
        if time.monotonic() > end:
            failures.append(f"{text}: no time was left")
            continue
        try:
            rows += rows_of(name, case, bandwidth)
        except Exception as error:  # one case that fails must not cost the others
            failures.append(f"{text}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
        jax.clear_caches()
    return rows, failures


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="a benchmark or an op; may be given again; default: all")
    parser.add_argument("--minutes", type=float, default=8, help="at most; default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="one case of each op; writes nothing")
    parser.add_argument("--docs", type=Path, default=DOCS, help="where the CSV goes; default: docs")
    return parser.parse_args(arguments)


def chosen(options: argparse.Namespace) -> list[tuple[str, Case]]:
    found = [(name, case) for name, case in cases() if not options.only or {name, case.work} & set(options.only)]
    return list({case.work: (name, case) for name, case in reversed(found)}.values()) if options.quick else found


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    end = time.monotonic() + 60 * options.minutes
    device = jax.devices()[0]
    if device.platform not in ("gpu", "cuda", "rocm"):
        sys.exit(f"gpu.py needs a GPU, and JAX's default device is {device}: install jax[cuda12], or see compiled.py")
    console = Console(width=None if sys.stdout.isatty() else 150)
    bandwidth = bytes_per_second()
    console.print(f"{device.device_kind}: {bandwidth / 1e9:.0f} GB/s in a copy")
    rows, failures = time_all(chosen(options), bandwidth, end, console)
    console.print(table(rows))
    if failures:
        console.print("These cases were not timed:", *failures, sep="\n", markup=False)
    if rows and not options.quick and not options.only:
        write_csv(csv_of(options.docs), rows, Timed)
        console.print(f"The figures are in {os.path.relpath(csv_of(options.docs))}.")


if __name__ == "__main__":
    main()
