"""The command line of the benchmarks: measures, writes the CSVs, and has pictures and pages made from them."""

import argparse
import functools
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import results
from measure import Benchmark, Row, is_installed, measure_case
from overview import by_length, facts, of_all
from plots import draw, draw_by_length
from results import NEWEST, OLDEST, ROOT, csv_of, environment, fill_pages, picture_of, read_csv, section, write_csv
from rich.console import Console

sys.path.append(str(ROOT / "examples"))
from shared import progress

BUSY = 0.5  # processes that are running already

Cases = Sequence[tuple[str, Any]]  # with the names of their benchmarks
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


def run(
    options: argparse.Namespace,
    title: str,
    cases: Cases,
    rows_of: Callable[[str, Any], Iterable[Row]],
    table: Callable[[Sequence[Row]], str],
    path: Path,
    publish: Callable[[], None] = lambda: None,
    without: Sequence[str] = (),
) -> list[str]:
    """Tells what is found in the chosen cases; of all it writes the CSV, without some columns, and has the page made.

    It returns which cases failed: these must not cost the others of a long run.
    """
    chosen, rows, failures = choose(cases, options), read_csv(path) if options.plot_only else [], []
    with progress(title, len(chosen), console) as advance:
        for name, case in chosen:
            try:
                rows += rows_of(name, case)
            except Exception as error:
                failures.append(f"{name}: {case}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
            advance(str(case))
    console.print(table(rows).replace("**", ""), markup=False)
    is_whole = not options.quick and len(chosen) == len(cases)
    if is_whole:
        write_csv(path, rows, without)
    if is_whole or options.plot_only:
        publish()
    return failures


def choose(cases: Cases, options: argparse.Namespace) -> Cases:
    """Those of `--only`; with `--quick` the tiny ones, or where there are none one of each op."""
    if options.plot_only:
        return []
    if options.only:
        cases = [(name, case) for name, case in cases if {name, case.work} & set(options.only)]
    if options.quick:
        of_work = {case.work: (name, case) for name, case in reversed(cases)}
        cases = [(name, case) for name, case in cases if ", tiny" in str(case)] or list(of_work.values())
    return cases


def tell(failures: Sequence[str]) -> None:
    if failures:
        sys.exit("\n".join(["These cases failed:", *failures]))


# Benchmarks of times


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


def all_rows(folder: str) -> list[Row]:
    """Of all benchmarks of times on a CPU but the sweep and the moves, which have sections of their own."""
    paths = sorted((results.DOCS / "benchmarks" / folder).glob("*.csv"))
    return [row for path in paths if path.stem not in ("accuracy", "gpu", "moves", "sweep") for row in read_csv(path)]


def main(
    benchmarks: Sequence[Benchmark],
    arguments: Sequence[str] | None = None,
    publish: Callable[[Sequence[Benchmark]], None] = publish,
    table: Callable[[Benchmark, Sequence[Row]], str] = results.table,
) -> None:
    """Measures those of `--only`, and publishes them."""
    options, failures = parse(benchmarks, arguments), []
    chosen = [benchmark for benchmark in benchmarks if benchmark.name in (options.only or [benchmark.name])]
    if os.getloadavg()[0] > BUSY and not options.plot_only:
        console.print("[yellow]The machine is busy with something else: the figures will not be worth much.")
    for benchmark in [] if options.plot_only else chosen:
        for peer in sorted({name for pair in benchmark.ratios for name in pair if not is_installed(name)}):
            console.print(f"{benchmark.title}: {peer} is not installed and left out.")
        times = (2, 0) if options.quick else (options.rounds, benchmark.budget)
        timed = functools.partial(measure_case, rounds=times[0], budget=times[1], clear=benchmark.clear)
        cases, path = [(benchmark.name, case) for case in benchmark.cases], csv_of(benchmark.name, options.folder)
        failures += run(options, benchmark.title, cases, timed, functools.partial(table, benchmark), path)
        jax.clear_caches()
    if not options.folder and not options.quick:
        publish(chosen)
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
