"""The command line of the benchmarks: measures, writes the CSVs, and has pictures and pages made from them."""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from measure import Benchmark, Case, is_installed, measure_case
from overview import by_length, of_all
from overview import facts as facts_of
from plots import draw, draw_by_length
from results import (
    DOCS,
    NEWEST,
    OLDEST,
    PAGES,
    PICTURES,
    ROOT,
    csv_of,
    environment,
    fill,
    fill_pages,
    read_csv,
    section,
    write_csv,
)
from rich.console import Console

sys.path.append(str(ROOT / "examples"))
from shared import progress

QUICK = ROOT / "examples" / "output" / "benchmarks"
BUSY = 0.5  # processes that are running already


def main(
    benchmarks: Sequence[Benchmark],
    arguments: Sequence[str] | None = None,
    others: Callable[[Path], None] = lambda docs: None,
) -> None:
    """Measures and publishes; with `--plot-only` for all of them it publishes the others as well."""
    console, options = Console(), parse(benchmarks, arguments)
    chosen = [benchmark for benchmark in benchmarks if benchmark.name in (options.only or [benchmark.name])]
    failures = [] if options.plot_only else measure_all(chosen, options, console)
    if not options.folder:
        if options.docs.resolve() != DOCS.resolve():
            shutil.copytree(DOCS / PAGES, options.docs / PAGES, dirs_exist_ok=True)
        publish(chosen, options.docs)
    if options.plot_only and not options.only:
        others(options.docs)
    console.print(f"CSVs, pictures and the pages in {PAGES} are in {os.path.relpath(options.docs)}.")
    tell(failures)


def tell(failures: Sequence[str]) -> None:
    if failures:
        sys.exit("\n".join(["These cases failed:", *failures]))


def parse(benchmarks: Sequence[Benchmark], arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=sys.modules["__main__"].__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [benchmark.name for benchmark in benchmarks]
    parser.add_argument("--only", action="append", choices=names, help="a benchmark; may be given again; default: all")
    parser.add_argument("--rounds", type=int, default=5, help="the least number of rounds; default: %(default)s")
    parser.add_argument("--budget", type=float, default=0.7, help="seconds of more rounds a case; default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="a smoke run: tiny shapes and two rounds")
    parser.add_argument("--plot-only", action="store_true", help="measure nothing: pictures and tables from the CSVs")
    parser.add_argument("--docs", type=Path, help="where results go; default: docs, or examples/output if quick")
    text = f"measure with the oldest jax that is supported: CSVs in benchmarks/{OLDEST}, and no page is made"
    parser.add_argument("--oldest", action="store_const", dest="folder", const=OLDEST, default=NEWEST, help=text)
    options = parser.parse_args(arguments)
    if options.folder and not jax.__version__.startswith(f"{OLDEST.removeprefix('jax-')}."):
        parser.error(f"--oldest is for {OLDEST}, and this is jax {jax.__version__}")
    options.docs = options.docs or (QUICK if options.quick else DOCS)
    if options.quick:
        options.rounds, options.budget = 2, 0
    return options


def measure_all(benchmarks: Sequence[Benchmark], options: argparse.Namespace, console: Console) -> list[str]:
    """Writes the CSV of each benchmark, and returns what failed."""
    if os.getloadavg()[0] > BUSY:
        console.print("[yellow]The machine is busy with something else: the figures will not be worth much.")
    failures = []
    for benchmark in benchmarks:
        for peer in sorted({name for pair in benchmark.ratios for name in pair if not is_installed(name)}):
            console.print(f"{benchmark.title}: {peer} is not installed and left out.")
        start = time.perf_counter()
        cases = [case for case in benchmark.cases if not options.quick or case.size.startswith("tiny")]
        measured = lambda name, case: measure_case(name, case, options.rounds, options.budget)  # noqa: E731
        rows, failed = rows_of_all([(benchmark.name, case) for case in cases], measured, benchmark.title, console)
        console.print(f"{benchmark.title}: {time.perf_counter() - start:.0f} s")
        write_csv(csv_of(benchmark.name, options.docs, options.folder), rows)
        failures += failed
        jax.clear_caches()
    return failures


def rows_of_all(
    cases: Sequence[tuple[str, Case]], rows_of: Callable[[str, Case], Iterator[Any]], title: str, console: Console
) -> tuple[list[Any], list[str]]:
    """The rows of the cases of benchmarks, and which failed: these must not cost the others of a long run."""
    rows, failures = [], []
    with progress(title, len(cases), console) as advance:
        for name, case in cases:
            try:
                rows += rows_of(name, case)
            except Exception as error:
                failures.append(f"{name}: {case}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
            advance(str(case))
    return rows, failures


def publish(benchmarks: Sequence[Benchmark], docs: Path) -> None:
    """Draws the pictures of those benchmarks and the first, and fills their places and those of all together."""
    contents = {}
    for benchmark in benchmarks:
        if rows := read_csv(csv_of(benchmark.name, docs)):
            draw(benchmark, rows, docs / PICTURES / f"{benchmark.name}.png")
            contents[benchmark.name] = section(benchmark, docs)
    rows, older = all_rows(docs, NEWEST), all_rows(docs, OLDEST)
    if curves := by_length(rows):
        of_attention = [row for row in rows if row.benchmark == "attention"]
        draw_by_length(curves, environment(of_attention, ("jax", "torch")), docs / PICTURES / "lengths.png")
    fill_pages(docs, contents | of_all(rows, older, read_csv(csv_of("compiled/cpu", docs))))
    if docs.resolve() == DOCS.resolve():
        readme = ROOT / "README.md"
        readme.write_text(fill(readme.read_text(), "facts", facts_of(rows)))


def all_rows(docs: Path, folder: str) -> list[Any]:
    """Of all benchmarks of times but the sweep, which has a section of its own."""
    paths = sorted((docs / "benchmarks" / folder).glob("*.csv"))
    return [row for path in paths if path.stem not in ("accuracy", "sweep", "gpu") for row in read_csv(path)]
