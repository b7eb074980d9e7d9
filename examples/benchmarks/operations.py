"""How large programs are: operations that JAX gives to XLA, instructions that XLA makes of them, seconds to compile.

Operations are lines of StableHLO that define a value, those of each function counted once, however often it is called.
Their number depends on the version of JAX and on nothing else: the machine, the length of arrays within one form of an
op, and what XLA makes of them do not matter. Seconds are those of this machine.

    print(operations(jax.grad(loss), jax.ShapeDtypeStruct((8, 128), "float32")))
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from measure import GRADIENT, VALUE, Case, Row
from results import NOTHING, Pair, as_markdown, environment, number, pairs, ratio_text

TIMES = 3  # the least of so many times to compile is kept
FIGURES = ("operations", "instructions", "seconds")


def operations(fn: Callable[..., Any], *args: Any) -> int:
    """The operations of `fn` of such arguments, as lowered for a CPU, which need not be there."""
    return sum(" = " in line for line in _lowered(fn, *args).as_text().splitlines())


def _lowered(fn: Callable[..., Any], *args: Any) -> Any:
    return jax.jit(fn).trace(*args).lower(lowering_platforms=("cpu",))


def size_of(fn: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """Operations, instructions, and the seconds to trace, lower and compile, of which the least is kept."""
    seconds = []
    for _ in range(TIMES):
        jax.clear_caches()  # or parts of the program would be known
        start = time.perf_counter()
        program = _lowered(fn, *args).compile()
        seconds.append(time.perf_counter() - start)
    found = operations(fn, *args), program.as_text().count(" = "), round(min(seconds), 4)
    return dict(zip(FIGURES, found, strict=True))


# Results


def name_of(case: Case | Row) -> str:
    """The op, and the size of its arrays if it has more than one."""
    return case.work if case.size == "large" else f"{case.work}, {case.size}"


def sorted_pairs(rows: Sequence[Row]) -> list[Pair]:
    """The most operations in units of the peer's first."""
    return sorted(pairs(rows), key=lambda pair: pair.of("operations"), reverse=True)


def of_both(pair: Pair | None, figure: str) -> list[str]:
    """The figure of both programs, and its ratio."""
    if pair is None:
        return [NOTHING, NOTHING]
    both = [getattr(row, figure) for row in (pair.row, pair.peer)]
    texts = [number(x) if isinstance(x, float) else str(x) for x in both]
    return [" / ".join(texts), ratio_text(pair.of(figure))]


HEADER = ["op", "against", "mask", "operations: value", "ratio", "with gradient", "ratio"]
HEADER += ["instructions", "ratio", "seconds", "ratio"]


def lines_of(found: Sequence[Pair]) -> list[list[str]]:
    """A line for each op, of the mask under which the operations of its gradient have the largest ratio."""
    of_case = {(name_of(p.row), p.peer.candidate, p.row.mask, p.row.what): p for p in found}
    worst: dict[tuple[str, str], Pair] = {}
    for pair in found:  # the largest ratio comes first
        if pair.row.what == GRADIENT:
            worst.setdefault((name_of(pair.row), pair.peer.candidate), pair)
    lines = []
    for (name, peer), pair in worst.items():
        value = of_case.get((name, peer, pair.row.mask, VALUE))
        cells = [of_both(value, "operations"), *(of_both(pair, figure) for figure in FIGURES)]
        lines.append([name, peer, pair.row.mask, *(cell for both in cells for cell in both)])
    return lines


def summary(rows: Sequence[Row]) -> str:
    """What stands on the page: how many programs are larger, and the table."""
    found = sorted_pairs(rows)
    twice = sum(pair.of("operations") > 2 for pair in found)
    text = f"Of {len(found)} programs {twice} have more than twice the operations of the other library's."
    ratio = HEADER.index("with gradient") + 1
    of_worst = [line for line in lines_of(found) if float(line[ratio].strip("*")) > 2]
    link = "[All figures as CSV](../benchmarks/compiled/cpu.csv)"
    return "\n\n".join([f"Measured {environment(rows)}.", text, as_markdown(HEADER, of_worst), link])
