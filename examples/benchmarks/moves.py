"""The programs of `docs/moves.md` before and after their moves: time, memory, seconds to compile, and what changed.

python examples/benchmarks/moves.py               # ten minutes; writes docs/benchmarks/moves.csv, and fills the page
python examples/benchmarks/moves.py --plot-only   # the table and the changes again, without measuring
"""

import difflib
import functools
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "moves"))

import bert
import boxes
import ctc
import encoder_decoder
import evoformer
import graph
import jax
import results
import sets
from command import main
from measure import GRADIENT, Benchmark, Case, Row, Work, cases_of, grid_of
from results import MIB, Pair, as_markdown, csv_of, environment, fill_pages, number, pairs, ratio_text, read_csv

AFTER, BEFORE = "after", "before"
PROGRAMS = {
    "Evoformer block": evoformer,
    "packed encoder and decoder": encoder_decoder,
    "BERT": bert,
    "losses of DETR": boxes,
    "graph attention": graph,
    "diffusion over sets": sets,
    "CTC": ctc,
}
MOST_LINES = 18  # of a change on the page
Lines = list[str]


def prepare(work: str, mask: str, dtype: str, sizes: dict[str, int]) -> Work:
    program = PROGRAMS[work]
    functions = {AFTER: program.after, BEFORE: program.before}
    return Work(functions, jax.jit(functools.partial(program.make, **sizes))(jax.random.key(0)))


def text_of(sizes: dict[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sizes.items())


def cases() -> list[Case]:
    found = []
    for name, program in PROGRAMS.items():
        grid = grid_of([name], ["padding"], {"float32": tuple(program.SIZES)})
        found += cases_of(prepare, program.SIZES, grid, text_of, passes=(GRADIENT,))
    return found


BENCHMARK = Benchmark("moves", "Real moves", ((AFTER, BEFORE),), cases())


# What changed


def change(program: Any) -> Lines:
    """The lines that are taken out, and those that come in, with "..." for those between."""
    before, after = (inspect.getsource(fn).splitlines()[1:] for fn in (program.before, program.after))
    lines = list(difflib.unified_diff(before, after, n=0, lineterm=""))[3:]
    return ["..." if line.startswith("@@") else line for line in lines if line not in "+-"]


def changed_lines(program: Any) -> str:
    """How many are taken out, how many come in, and how many there were."""
    lines = change(program)
    out, new = (sum(line.startswith(sign) for line in lines) for sign in "-+")
    return f"-{out} +{new} of {len(inspect.getsource(program.before).splitlines())}"


def shown() -> list[str]:
    """The names of the programs whose change is short enough for the page."""
    return [name for name, program in PROGRAMS.items() if len(change(program)) <= MOST_LINES]


def name_of(program: Any) -> str:
    """The name of the change's place on the page."""
    return f"change of {program.__name__}"


# The page


def table(benchmark: Benchmark, rows: Sequence[Row]) -> str:
    """A line for each program: ratios of what the value with its gradient takes after the move, before it 1."""
    found = pairs(rows, benchmark.ratios)
    lines = [cells(pair) for pair in found if pair.row.size in results.LARGE] or [cells(pair) for pair in found]
    return as_markdown(["program", "lines", "time", "least time", "memory", "MiB", "to compile", "seconds"], lines)


def cells(pair: Pair) -> Lines:
    times = ratio_text(pair.median), ratio_text(pair.minimum)
    memory = ratio_text(pair.of("temporary_bytes")), pair.both("temporary_bytes", lambda n: number(n / MIB))
    compiling = ratio_text(pair.of("compile_s")), pair.both("compile_s", number)
    return [pair.row.work, changed_lines(PROGRAMS[pair.row.work]), *times, *memory, *compiling]


def contents() -> dict[str, str]:
    rows = read_csv(csv_of(BENCHMARK.name))
    programs = [PROGRAMS[name] for name in shown()]
    found = {name_of(program): "\n".join(["```diff", *change(program), "```"]) for program in programs}
    measured = f"Measured {environment(rows, ('masksafe', 'jax', 'optax'))}." if rows else "Nothing has been measured."
    link = f"[CSV](benchmarks/{BENCHMARK.name}.csv), with the sizes."
    return found | {BENCHMARK.name: "\n\n".join([measured, table(BENCHMARK, rows), link])}


def publish(_: Sequence[Benchmark] = ()) -> None:
    fill_pages(contents())


if __name__ == "__main__":
    main([BENCHMARK], publish=publish, table=table)
