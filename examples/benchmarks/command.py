"""The command line of the benchmarks: measures, writes the CSVs, draws the pictures and fills page and README."""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
from measure import Benchmark, Case, Row, measure_case, missing
from plots import draw
from results import Headline, compiling, environment, fill, headlines, read_csv, slower, table, write_csv
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

ROOT = Path(__file__).resolve().parents[2]
DOCS, QUICK = ROOT / "docs", ROOT / "examples" / "output" / "benchmarks"
PAGE = "performance.md"
HEADLINES = [  # the summary in the README: the benchmark, the case, and what each line is called there
    Headline("cross_entropy", "integer", "none", "float32", "large", "optax", "cross-entropy of integer labels"),
    Headline("cross_entropy", "integer", "rows", "float32", "large", "optax", "the same, half of the rows masked"),
    Headline("cross_entropy", "integer", "rows", "bfloat16", "large", "optax", "the same in bfloat16"),
    Headline("linear_cross_entropy", "linear", "none", "float32", "large", "optax", "linear layer and its loss"),
    Headline(
        "linear_cross_entropy", "linear", "60 % of tokens", "float32", "large", "optax", "the same, 40 % unmasked"
    ),
    Headline(
        "linear_log_probs",
        "log p, entropy",
        "none",
        "float32",
        "large",
        "jax.nn",
        "log-probabilities and entropies of one",
    ),
    Headline("linear_kl_divergence", "forward", "none", "float32", "large", "optax", "divergence of two linear layers"),
    Headline("attention", "attention", "causal", "float32", "long", "jax.nn", "attention, causal, length 4096"),
    Headline("attention", "attention", "causal", "float32", "long", "torch", "the same"),
    Headline("attention", "attention", "8 segments", "float32", "long", "jax.nn", "8 packed segments, length 4096"),
    Headline("attention", "attention", "none", "float32", "many short", "jax.nn", "attention, 64 samples of length 64"),
    Headline("normalization", "layer norm", "none", "float32", "large", "flax", "layer norm"),
    Headline("decoder", "decoder", "none", "float32", "large", "flax", "a decoder of 12 layers"),
    Headline("decoder", "decoder", "packed", "float32", "large", "flax", "the same, packed documents and prompts"),
]
BUSY = 0.5  # processes that are running already


def main(benchmarks: Sequence[Benchmark], arguments: Sequence[str] | None = None) -> None:
    console = Console()
    options = parse(benchmarks, arguments)
    chosen = [benchmark for benchmark in benchmarks if benchmark.name in (options.only or [benchmark.name])]
    failures = [] if options.plot_only else measure_all(chosen, options, console)
    publish(chosen, options.docs)
    console.print(f"CSVs, pictures and {PAGE} are in {os.path.relpath(options.docs)}.")
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
    options = parser.parse_args(arguments)
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
            write_csv(csv_of(benchmark, options.docs), rows)
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


def csv_of(benchmark: Benchmark, docs: Path) -> Path:
    return docs / "benchmarks" / f"{benchmark.name}.csv"


def publish(benchmarks: Sequence[Benchmark], docs: Path) -> None:
    """Draws the pictures of those benchmarks and fills the page, all from the CSVs."""
    page = docs / PAGE
    if docs.resolve() != DOCS:
        shutil.copy(DOCS / PAGE, page)
    text = page.read_text()
    for benchmark in benchmarks:
        rows = read_csv(csv_of(benchmark, docs))
        if not rows:
            continue
        picture = Path("_static") / "benchmarks" / f"{benchmark.name}.png"
        draw(benchmark, rows, docs / picture)
        text = fill(text, benchmark.name, section(benchmark, rows, picture))
    paths = sorted(set((docs / "benchmarks").glob("*.csv")) - {docs / "benchmarks" / "sweep.csv"})  # which has its own
    rows = [row for path in paths for row in read_csv(path)]
    for name, content in (("slower", slower), ("compiling", compiling), ("environment", environment)):
        text = fill(text, name, content(rows))
    page.write_text(text)
    if docs.resolve() == DOCS:
        readme = ROOT / "README.md"
        readme.write_text(fill(readme.read_text(), "headlines", headlines(rows, HEADLINES)))


def section(benchmark: Benchmark, rows: Sequence[Row], picture: Path) -> str:
    link = f"[All figures as CSV](benchmarks/{benchmark.name}.csv)"
    return "\n\n".join([f"![{benchmark.title}: ratios of times]({picture})", table(benchmark, rows), link])
