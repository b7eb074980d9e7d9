"""The command line of the benchmarks: measures, writes the CSVs, and has pictures and pages made from them."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import results
from measure import Benchmark, Case, Row, is_installed, measure_case
from overview import by_length, facts, of_all
from plots import draw, draw_by_length
from results import NEWEST, OLDEST, ROOT, csv_of, environment, fill_pages, picture_of, read_csv, section, write_csv
from rich.console import Console

sys.path.append(str(ROOT / "examples"))
from shared import progress

BUSY = 0.5  # processes that are running already

Cases = Sequence[tuple[str, Case]]  # with the names of their benchmarks
console = Console(soft_wrap=True)


def parser_of(names: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """The options of all programs; `--only` takes those names, or any."""
    parser = argparse.ArgumentParser(
        description=sys.modules["__main__"].__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    text = "a benchmark or an op; may be given again; default: all"
    parser.add_argument("--only", action="append", choices=names, help=text)
    parser.add_argument("--quick", action="store_true", help="a smoke run of small or few cases; writes nothing")
    parser.add_argument("--plot-only", action="store_true", help="measure nothing: pictures and tables from the CSVs")
    return parser


def rows_of_all(cases: Cases, rows_of: Callable[[str, Case], Iterator[Row]], title: str) -> tuple[list[Row], list[str]]:
    """The rows of the cases, and which failed: these must not cost the others of a long run."""
    rows, failures = [], []
    with progress(title, len(cases), console) as advance:
        for name, case in cases:
            try:
                rows += rows_of(name, case)
            except Exception as error:
                failures.append(f"{name}: {case}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
            advance(str(case))
    return rows, failures


def tell(failures: Sequence[str]) -> None:
    if failures:
        sys.exit("\n".join(["These cases failed:", *failures]))


def chosen(cases: Cases, options: argparse.Namespace) -> list[tuple[str, Case]]:
    """Those of `--only`; with `--quick` one of each op."""
    if options.only:
        cases = [(name, case) for name, case in cases if {name, case.work} & set(options.only)]
    return list({case.work: (name, case) for name, case in reversed(cases)}.values()) if options.quick else list(cases)


def run(
    options: argparse.Namespace,
    title: str,
    cases: Cases,
    rows_of: Callable[[str, Case], Iterator[Row]],
    table: Callable[[Sequence[Row]], str],
    path: Path,
    publish: Callable[[], None] = lambda: None,
    without: Sequence[str] = (),
) -> None:
    """Tells what is found; of all cases it writes the CSV, without some columns, and has the page made of it."""

    def found_of(name: str, case: Case) -> Iterator[Row]:
        yield from rows_of(name, case)
        jax.clear_caches()

    cases = [] if options.plot_only else chosen(cases, options)
    rows, failures = rows_of_all(cases, found_of, title)
    rows = read_csv(path) if options.plot_only else rows
    console.print(table(rows).replace("**", ""), markup=False)
    if not options.quick and not options.only:
        if not options.plot_only:
            write_csv(path, rows, without)
        publish()
    tell(failures)


# Benchmarks of times


def main(
    benchmarks: Sequence[Benchmark],
    arguments: Sequence[str] | None = None,
    publish_all: Callable[[Sequence[Benchmark]], None] | None = None,
) -> None:
    """Measures and publishes; `publish_all` is for all of them together with `--plot-only`."""
    options = parse(benchmarks, arguments)
    measured = [benchmark for benchmark in benchmarks if benchmark.name in (options.only or [benchmark.name])]
    failures = [] if options.plot_only else measure_all(measured, options)
    if not options.folder and not options.quick:
        (publish_all if publish_all and options.plot_only and not options.only else publish)(measured)
    tell(failures)


def parse(benchmarks: Sequence[Benchmark], arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of([benchmark.name for benchmark in benchmarks])
    parser.add_argument("--rounds", type=int, default=5, help="the least number of rounds; default: %(default)s")
    text = f"measure with the oldest jax that is supported: CSVs in benchmarks/{OLDEST}, and no page is made"
    parser.add_argument("--oldest", action="store_const", dest="folder", const=OLDEST, default=NEWEST, help=text)
    options = parser.parse_args(arguments)
    if options.folder and not jax.__version__.startswith(f"{OLDEST.removeprefix('jax-')}."):
        parser.error(f"--oldest is for {OLDEST}, and this is jax {jax.__version__}")
    return options


def measure_all(benchmarks: Sequence[Benchmark], options: argparse.Namespace) -> list[str]:
    """Writes the CSV of each benchmark, or of a smoke run prints its table, and returns what failed."""
    if os.getloadavg()[0] > BUSY:
        console.print("[yellow]The machine is busy with something else: the figures will not be worth much.")
    failures = []
    for benchmark in benchmarks:
        for peer in sorted({name for pair in benchmark.ratios for name in pair if not is_installed(name)}):
            console.print(f"{benchmark.title}: {peer} is not installed and left out.")
        start, times = time.perf_counter(), (2, 0) if options.quick else (options.rounds, benchmark.budget)
        cases = [case for case in benchmark.cases if not options.quick or case.size.startswith("tiny")]
        timed = lambda name, case: measure_case(name, case, *times, benchmark.clear)  # noqa: E731, B023
        rows, failed = rows_of_all([(benchmark.name, case) for case in cases], timed, benchmark.title)
        console.print(f"{benchmark.title}: {time.perf_counter() - start:.0f} s")
        failures += failed
        jax.clear_caches()
        if options.quick:
            console.print(results.table(benchmark, rows), markup=False)
        else:
            write_csv(csv_of(benchmark.name, options.folder), rows)
    return failures


def publish(benchmarks: Sequence[Benchmark]) -> None:
    """Draws the pictures of those benchmarks and the first, and fills their places and those of all together."""
    contents = {}
    for benchmark in benchmarks:
        if rows := read_csv(csv_of(benchmark.name)):
            draw(benchmark, rows, picture_of(benchmark.name))
            contents[benchmark.name] = section(benchmark)
    rows, older = all_rows(NEWEST), all_rows(OLDEST)
    if curves := by_length(rows):
        of_attention = [row for row in rows if row.benchmark == "attention"]
        draw_by_length(curves, environment(of_attention, ("jax", "torch")), picture_of("lengths"))
    fill_pages(contents | of_all(rows, older, read_csv(csv_of("compiled/cpu"))))
    readme = ROOT / "README.md"
    readme.write_text(results.fill(readme.read_text(), "facts", facts(rows)))


def all_rows(folder: str) -> list[Any]:
    """Of all benchmarks of times but the sweep, which has a section of its own."""
    paths = sorted((results.DOCS / "benchmarks" / folder).glob("*.csv"))
    return [row for path in paths if path.stem not in ("accuracy", "sweep", "gpu") for row in read_csv(path)]
