"""The command line of the benchmarks: measures, writes the CSVs, and has the pages made from them."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
from measure import Benchmark, Case, Row, measure_case, missing
from pages import DOCS, OLDEST, PAGES, ROOT, copy_pages, csv_of, publish
from results import write_csv
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

QUICK = ROOT / "examples" / "output" / "benchmarks"
BUSY = 0.5  # processes that are running already


def main(
    benchmarks: Sequence[Benchmark],
    arguments: Sequence[str] | None = None,
    others: Callable[[Path], None] = lambda docs: None,
) -> None:
    """Measures and publishes; with `--plot-only` for all of them it publishes the others as well."""
    console = Console()
    options = parse(benchmarks, arguments)
    chosen = [benchmark for benchmark in benchmarks if benchmark.name in (options.only or [benchmark.name])]
    failures = [] if options.plot_only else measure_all(chosen, options, console)
    if not options.folder:
        copy_pages(options.docs)
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
    parser.add_argument(
        "--docs", type=Path, help="where results go; default: docs, or examples/output/benchmarks if quick"
    )
    parser.add_argument(
        "--oldest",
        action="store_const",
        dest="folder",
        const=OLDEST,
        default="",
        help=f"measure with the oldest jax that is supported: CSVs in benchmarks/{OLDEST}, and no page is made",
    )
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
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for benchmark in benchmarks:
            for peer in missing(benchmark):
                console.print(f"{benchmark.title}: {peer} is not installed and left out.")
            start = time.perf_counter()
            rows, failed = measure_benchmark(benchmark, options, progress)
            console.print(f"{benchmark.title}: {time.perf_counter() - start:.0f} s")
            write_csv(csv_of(benchmark.name, options.docs, options.folder), rows)
            failures += failed
            jax.clear_caches()
    return failures


def measure_benchmark(
    benchmark: Benchmark, options: argparse.Namespace, progress: Progress
) -> tuple[list[Row], list[str]]:
    rows, failures = [], []
    task = progress.add_task(benchmark.title, total=None)
    cases = [case for case in benchmark.cases if not options.quick or case.size.startswith("tiny")]
    for case in progress.track(cases, task_id=task):
        progress.update(task, description=f"{benchmark.title}: {text_of(case)}")
        try:
            rows += measure_case(benchmark.name, case, options.rounds, options.budget)
        except Exception as error:  # one case that fails must not cost the others of a long run
            failures.append(f"{benchmark.name}: {text_of(case)}: {type(error).__name__}: {error}")
    progress.update(task, description=benchmark.title)
    return rows, failures


def text_of(case: Case) -> str:
    return f"{case.work}, {case.mask}, {case.dtype}, {case.size}"
