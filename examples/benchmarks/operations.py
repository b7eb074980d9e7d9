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


def table(rows: Sequence[Row], least: float = 0) -> str:
    """A line for each op, of the mask under which the operations of its gradient have the largest ratio.

    The largest ratios come first, and only those above the least.
    """
    found = sorted(pairs(rows), key=lambda pair: pair.of("operations"), reverse=True)
    of_case = {(name_of(p.row), p.peer.candidate, p.row.mask, p.row.what): p for p in found}
    worst: dict[tuple[str, str], Pair] = {}
    for pair in found:
        if pair.row.what == GRADIENT and pair.of("operations") > least:
            worst.setdefault((name_of(pair.row), pair.peer.candidate), pair)
    lines = []
    for (name, peer), pair in worst.items():
        value = of_case.get((name, peer, pair.row.mask, VALUE))
        cells = [value.both("operations"), ratio_text(value.of("operations"))] if value else [NOTHING, NOTHING]
        for figure in FIGURES:
            cells += [pair.both(figure, number if figure == "seconds" else str), ratio_text(pair.of(figure))]
        lines.append([name, peer, pair.row.mask, *cells])
    header = ["op", "against", "mask", "operations: value", "ratio", "with gradient", "ratio"]
    return as_markdown([*header, "instructions", "ratio", "seconds", "ratio"], lines)


def summary(rows: Sequence[Row]) -> str:
    """What stands on the page: how many programs are larger, and the table of those."""
    found = pairs(rows)
    twice = sum(pair.of("operations") > 2 for pair in found)
    text = f"Of {len(found)} programs {twice} have more than twice the operations of the other library's."
    link = "[All figures as CSV](../benchmarks/compiled/cpu.csv)"
    return "\n\n".join([f"Measured {environment(rows)}.", text, table(rows, least=2), link])
