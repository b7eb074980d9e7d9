"""The pages about performance: what stands between their markers, made of the CSVs of both versions of jax."""

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from measure import Benchmark, Row
from operations import Size
from overview import by_length, facts, headlines, libraries, programs, slower
from plots import draw, draw_by_length
from results import compiling, environment, fill, jax_of, read_csv, summary, table

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = "performance"  # the folder of the pages
NEWEST, OLDEST = "", "jax-0.10"  # folders of CSVs: of the newest jax, and of the oldest that is supported
PICTURES = Path("_static") / "benchmarks"
PLACE = re.compile("<!-- table: (.+?) -->")


def csv_of(name: str, docs: Path, folder: str = NEWEST) -> Path:
    return docs / "benchmarks" / folder / f"{name}.csv"


def rows_in(path: Path) -> list[Row]:
    return read_csv(path) if path.exists() else []


def both(name: str, docs: Path) -> tuple[list[Row], list[Row]]:
    """What was measured with the newest jax, and with the oldest."""
    return rows_in(csv_of(name, docs)), rows_in(csv_of(name, docs, OLDEST))


def copy_pages(docs: Path) -> None:
    """To where they are filled, if that is not where they are."""
    if docs.resolve() != DOCS.resolve():
        shutil.copytree(DOCS / PAGES, docs / PAGES, dirs_exist_ok=True)


def publish(benchmarks: Sequence[Benchmark], docs: Path) -> None:
    """Draws the pictures of those benchmarks and the first, and fills their places and those of all together."""
    contents = {}
    for benchmark in benchmarks:
        rows, older = both(benchmark.name, docs)
        if rows:
            draw(benchmark, rows, docs / PICTURES / f"{benchmark.name}.png")
            contents[benchmark.name] = section_of(
                benchmark, rows, older, partial(table, benchmark), partial(summary, benchmark)
            )
    rows, older = all_rows(docs, NEWEST), all_rows(docs, OLDEST)
    if curves := by_length(rows):
        of_attention = [row for row in rows if row.benchmark == "attention"]
        draw_by_length(curves, environment(of_attention, ("jax", "torch")), docs / PICTURES / "lengths.png")
    contents |= of_all(rows, older, sizes_in(docs))
    fill_pages(docs, contents)
    if docs.resolve() == DOCS.resolve():
        readme = ROOT / "README.md"
        readme.write_text(fill(readme.read_text(), "facts", facts(rows)))


def all_rows(docs: Path, folder: str) -> list[Row]:
    """Of all benchmarks but the sweep, which has a section of its own."""
    paths = sorted((docs / "benchmarks" / folder).glob("*.csv"))
    return [row for path in paths if path.stem != "sweep" for row in read_csv(path)]


def sizes_in(docs: Path) -> list[Size]:
    path = docs / "benchmarks" / "compiled" / "cpu.csv"
    return read_csv(path, Size) if path.exists() else []


def of_all(rows: Sequence[Row], older: Sequence[Row], sizes: Sequence[Size]) -> dict[str, str]:
    """What is made of all benchmarks together."""
    return {
        "headlines": headlines(rows, older),
        "libraries": libraries(rows, older),
        "slower": slower(rows, older),
        "compiling": compiling(rows),
        "programs": programs(rows, older, sizes),
    }


def section_of(
    benchmark: Benchmark,
    rows: Sequence[Row],
    older: Sequence[Row],
    describe: Callable[[Sequence[Row]], str],
    summarize: Callable[[Sequence[Row]], str],
) -> str:
    """Environment, picture and table of the newest jax, and what both versions come to."""
    picture = f"![{benchmark.title}: ratios of times](../{PICTURES.as_posix()}/{benchmark.name}.png)"
    link = "[CSV](../benchmarks/{}.csv)"
    parts = [f"Measured {environment([*rows, *older], ('masksafe', 'jax'))}.", picture, describe(rows)]
    parts.append(f"{jax_of(rows)}: {summarize(rows)} {link.format(benchmark.name)}.")
    if older:
        parts.append(f"{jax_of(older)}: {summarize(older)} {link.format(f'{OLDEST}/{benchmark.name}')}.")
    return "\n\n".join(parts)


def fill_pages(docs: Path, contents: Mapping[str, str]) -> None:
    """Writes each content to the page that has a place for it."""
    for path in sorted((docs / PAGES).glob("*.md")):
        text = path.read_text()
        for name in PLACE.findall(text):
            if name in contents:
                text = fill(text, name, contents[name])
        path.write_text(text)
