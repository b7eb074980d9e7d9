"""How large programs are: operations that JAX gives to XLA, instructions that XLA makes of them, seconds to compile.

Operations are lines of StableHLO that define a value, those of each function counted once, however often it is called.
Their number depends on the version of JAX and on nothing else: the machine, the length of arrays within one form of an
op, and what XLA makes of them do not matter. Seconds are those of this machine.

    print(operations(jax.grad(loss), jax.ShapeDtypeStruct((8, 128), "float32")))
"""

import datetime
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from measure import GRADIENT, VALUE, Case, machine, versions
from results import NOTHING, as_markdown, environment, grouped, number, ratio_text
from rich.table import Table

TIMES = 3  # the least of so many times to compile is kept


@dataclass(frozen=True)
class Size:
    """One line of the CSV: the program of one candidate in one pass of one case."""

    benchmark: str
    work: str
    mask: str
    dtype: str
    size: str
    shape: str
    what: str
    candidate: str
    operations: int
    instructions: int
    seconds: float
    date: str
    versions: str
    machine: str = ""
    python: str = ""


@dataclass(frozen=True)
class SizeRatio:
    """The size of masksafe's program in units of its peer's."""

    row: Size
    peer: Size

    @property
    def operations(self) -> float:
        return self.row.operations / self.peer.operations

    @property
    def instructions(self) -> float:
        return self.row.instructions / self.peer.instructions

    @property
    def seconds(self) -> float:
        return self.row.seconds / self.peer.seconds


# Counting


def operations(fn: Callable[..., Any], *args: Any) -> int:
    """The operations of `fn` of such arguments, as lowered for a CPU, which need not be there."""
    return _operations_of(_lowered(fn, *args))


def _lowered(fn: Callable[..., Any], *args: Any) -> Any:
    return jax.jit(fn).trace(*args).lower(lowering_platforms=("cpu",))


def _operations_of(lowered: Any) -> int:
    return sum(" = " in line for line in lowered.as_text().splitlines())


def measure_size(fn: Callable[..., Any], *args: Any) -> tuple[int, int, float]:
    """Operations, instructions, and the seconds to trace, lower and compile, of which the least is kept."""
    seconds = []
    for _ in range(TIMES):
        jax.clear_caches()  # or parts of the program would be known
        start = time.perf_counter()
        lowered = _lowered(fn, *args)
        program = lowered.compile()
        seconds.append(time.perf_counter() - start)
    return _operations_of(lowered), program.as_text().count(" = "), round(min(seconds), 4)


def size_row(benchmark: str, case: Case, what: str, candidate: str, step: Callable[..., Any], args: Any) -> Size:
    count, instructions, seconds = measure_size(step, *args)
    return Size(
        benchmark=benchmark,
        **case.columns,
        what=what,
        candidate=candidate,
        operations=count,
        instructions=instructions,
        seconds=seconds,
        date=datetime.date.today().isoformat(),
        versions=versions(),
        machine=machine(),
        python=platform.python_version(),
    )


# Results


def name_of(case: Case | Size) -> str:
    """The op, and the size of its arrays if it has more than one."""
    return case.work if case.size == "large" else f"{case.work}, {case.size}"


def size_ratios(rows: Sequence[Size]) -> list[SizeRatio]:
    """Of every case and pass, the most operations in units of the peer's first."""
    found = []
    for case in grouped(rows, lambda r: (r.benchmark, r.work, r.mask, r.dtype, r.size, r.what)).values():
        ours = [row for row in case if row.candidate == "masksafe"]
        found += [SizeRatio(row, peer) for row in ours for peer in case if peer is not row]
    return sorted(found, key=lambda ratio: ratio.operations, reverse=True)


def of_both(ratio: SizeRatio | None, figure: str) -> list[str]:
    """The figure of both programs, and its ratio."""
    if ratio is None:
        return [NOTHING, NOTHING]
    both = [getattr(row, figure) for row in (ratio.row, ratio.peer)]
    texts = [number(x) if isinstance(x, float) else str(x) for x in both]
    return [" / ".join(texts), ratio_text(getattr(ratio, figure))]


ALL_HEADER = ["op", "mask", "against", "what", "operations", "ratio", "instructions", "ratio", "seconds", "ratio"]


def all_sizes(found: Sequence[SizeRatio]) -> Table:
    """A table for the terminal: every case and pass, in the order in which they are given."""
    table = Table(*ALL_HEADER)
    for ratio in found:
        cells = [cell for figure in ("operations", "instructions", "seconds") for cell in of_both(ratio, figure)]
        cells = [cell.replace("**", "") for cell in cells]
        table.add_row(name_of(ratio.row), ratio.row.mask, ratio.peer.candidate, ratio.row.what, *cells)
    return table


PAGE_HEADER = ["op", "against", "mask", "operations: value", "ratio", "with gradient", "ratio"]
PAGE_HEADER += ["instructions", "ratio", "seconds", "ratio"]
RATIO = PAGE_HEADER.index("with gradient") + 1


def lines_of_sizes(found: Sequence[SizeRatio]) -> list[list[str]]:
    """A line for each op, of the mask under which the operations of its gradient have the largest ratio."""
    of_case = {(name_of(r.row), r.peer.candidate, r.row.mask, r.row.what): r for r in found}
    worst: dict[tuple[str, str], SizeRatio] = {}
    for ratio in found:  # the largest ratio comes first
        if ratio.row.what == GRADIENT:
            worst.setdefault((name_of(ratio.row), ratio.peer.candidate), ratio)
    lines = []
    for (name, peer), ratio in worst.items():
        value = of_case.get((name, peer, ratio.row.mask, VALUE))
        cells = [of_both(value, "operations")]
        cells += [of_both(ratio, figure) for figure in ("operations", "instructions", "seconds")]
        lines.append([name, peer, ratio.row.mask, *(cell for pair in cells for cell in pair)])
    return lines


def summary_of_sizes(rows: Sequence[Size]) -> str:
    """What stands on the page: how many programs are larger, and the table."""
    found = size_ratios(rows)
    twice = sum(ratio.operations > 2 for ratio in found)
    text = f"Of {len(found)} programs {twice} have more than twice the operations of the other library's."
    of_worst = [line for line in lines_of_sizes(found) if float(line[RATIO].strip("*")) > 2]
    link = "[All figures as CSV](../benchmarks/compiled/cpu.csv)"
    table = as_markdown(PAGE_HEADER, of_worst)
    return "\n\n".join([f"Measured {environment(rows)}.", text, table, link])
