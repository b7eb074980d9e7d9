"""CSVs of measurements, and the tables of them that stand between markers in a page of Markdown."""

import contextlib
import csv
import math
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean as mean
from typing import Any, NamedTuple, TypeVar

from measure import GRADIENT, PASSES, Benchmark, Row

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = "performance/*.md", "moves.md"
NEWEST, OLDEST = "", "jax-0.10"  # folders of CSVs: of the newest jax, and of the oldest that is supported
PICTURES = Path("_static") / "benchmarks"
PLACE = re.compile("<!-- table: (.+?) -->")

SLOWER = 1.1  # a ratio above it is bold in the tables, and listed
DISPATCH_MS = 0.1  # below it, a call is mostly dispatch
LARGE = ("large", "long", "many short")  # sizes that the tables show; the pictures and CSVs have all
NOTHING = "-"
MIB = 2**20
OURS = {"masksafe", "automatic", "shard_map", "at once"}  # masksafe, and other ways to call it
CASE = ("benchmark", "work", "mask", "dtype", "size", "what")  # what the candidates of a row have in common
T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


# CSVs


def write_csv(path: Path, rows: Sequence[Row], without: Sequence[str] = ()) -> None:
    """A column for each attribute of the rows but some."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = [name for row in rows[:1] for name in vars(row) if name not in without]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(map(vars, rows))


def read_csv(path: Path) -> list[Row]:
    """The rows of a file; none if it is not there."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [Row(**{name: parsed(name, text) for name, text in line.items()}) for line in csv.DictReader(file)]


def parsed(column: str, text: str) -> Any:
    if column == "shape":  # which may be a number
        return text
    for value in (int, float, {"": None, "True": True, "False": False}.__getitem__):
        with contextlib.suppress(ValueError, KeyError):
            return value(text)
    return text


def csv_of(name: str, folder: str = NEWEST) -> Path:
    return DOCS / "benchmarks" / folder / f"{name}.csv"


def picture_of(name: str) -> Path:
    return DOCS / PICTURES / f"{name}.png"


# Pairs


class Pair(NamedTuple):
    """One candidate beside another, in one pass of one case."""

    row: Row
    peer: Row

    def of(self, figure: str) -> float:
        """The figure of the first in units of the second's."""
        return float(getattr(self.row, figure) / getattr(self.peer, figure))

    def both(self, figure: str, text: Callable[[Any], str] = str) -> str:
        return " / ".join(text(getattr(row, figure)) for row in self)

    @property
    def median(self) -> float:
        return self.of("median_ms")

    @property
    def minimum(self) -> float:
        return self.of("minimum_ms")


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def pairs(rows: Sequence[Row], names: Iterable[tuple[str, str]] | None = None) -> list[Pair]:
    """Of every case and pass, in the order of the rows, the pairs of those names; by default masksafe's with others."""
    if names is None:
        names = [("masksafe", name) for name in sorted({row.candidate for row in rows} - OURS)]
    found = []
    for case in grouped(rows, lambda row: tuple(getattr(row, name, "") for name in CASE)).values():
        of = {row.candidate: row for row in case}
        found += [Pair(of[ours], of[peer]) for ours, peer in names if ours in of and peer in of]
    return found


def best_peers(rows: Sequence[Row]) -> list[Pair]:
    """Masksafe beside the fastest of what was measured with it, the worst ratio first."""
    cases = grouped(pairs(rows), lambda pair: tuple(getattr(pair.row, name) for name in CASE)).values()
    return sorted((min(case, key=lambda pair: pair.peer.minimum_ms) for case in cases), key=lambda pair: -pair.minimum)


# Text


def number(x: float) -> str:
    """Three digits, of which at most three behind the point."""
    if 0 < x < 0.001:
        return "<0.001"
    digits = 2 - math.floor(math.log10(x)) if x > 0 else 0
    return f"{x:.{min(max(digits, 0), 3)}f}"


def ratio_text(ratio: float) -> str:
    text = f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.0f}"
    return f"**{text}**" if ratio > SLOWER else text


def listed(*parts: str) -> str:
    """Those that say something, with commas."""
    return ", ".join(filter(None, parts))


def counts(values: Sequence[float]) -> str:
    """The geometric mean of some ratios, and how many of them exceed the limit."""
    return f"{mean(values):.2f} ({sum(value > SLOWER for value in values)} of {len(values)})"


def as_markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose columns are aligned in plain text as well."""
    lines = [list(header), *map(list, rows)]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return "\n".join([line(lines[0]), line(["-" * width for width in widths]), *map(line, lines[1:])])


def distinct(rows: Sequence[Row], column: str) -> list[str]:
    """The texts of a column, if the rows have it."""
    return list(dict.fromkeys(text for row in rows if (text := getattr(row, column, ""))))


def environment(rows: Sequence[Row], packages: Sequence[str] = ()) -> str:
    """When, on what and with which versions the rows were measured: of each what occurs among them.

    With the names of packages it has their versions alone, without them all and Python's.
    """
    versions = {text: text.split()[0] for line in distinct(rows, "versions") for text in line.split(", ")}
    of_package = grouped(versions, versions.__getitem__)
    python = [] if packages else [f"Python {version}" for version in distinct(rows, "python")]
    dates = sorted(distinct(rows, "date"))
    days = " to ".join(dict.fromkeys([dates[0], dates[-1]]))
    found = [with_versions(name, of_package[name]) for name in packages or of_package if name in of_package]
    # Some processors of one name tell their clock rate.
    machines = dict.fromkeys(re.sub(" @ [^ ,]+", "", machine) for machine in distinct(rows, "machine"))
    return listed(days, " and ".join(machines), " and ".join(python), *found)


def with_versions(name: str, packages: Sequence[str]) -> str:
    """Such as "jax 0.10.1 and 0.12.0"."""
    return f"{name} {' and '.join(package.removeprefix(f'{name} ') for package in packages)}"


def jax_of(rows: Sequence[Row]) -> str:
    """The version, such as "jax 0.12.0.1"."""
    return " and ".join(dict.fromkeys(found for row in rows for found in re.findall(r"\bjax [\d.]+", row.versions)))


# The table of a benchmark


def table(benchmark: Benchmark, rows: Sequence[Row]) -> str:
    """A line for each kind of work, a column for each large size: the ratios of the value, and with its gradient.

    Of the largest sizes it also has the milliseconds, and the temporary memory of both for the gradient.
    """
    every = pairs(rows, benchmark.ratios)
    found = [pair for pair in every if pair.row.size in LARGE] or every
    shapes = {size: {pair.row.shape for pair in of} for size, of in grouped(found, lambda pair: pair.row.size).items()}
    largest = [size for size in shapes if size == "large"] or list(shapes)[:1]
    header = ["work", "mask", "dtype", "ratio"]
    header += [f"{size} ({', '.join(of)})" if len(of) == 1 else size for size, of in shapes.items()]
    header += [f"{size}: {unit}" for size in largest for unit in ("ms", "MiB")]
    lines = []
    for key, line in grouped(
        found, lambda pair: (pair.row.work, pair.row.mask, pair.row.dtype, pair.both("candidate"))
    ).items():
        of_size = grouped(sorted(line, key=lambda pair: PASSES.index(pair.row.what)), lambda pair: pair.row.size)
        cells = [[ratio_text(pair.median) for pair in of_size.get(size, ())] for size in shapes]
        for size in largest:
            of_gradient = [row for pair in of_size.get(size, ()) if pair.row.what == GRADIENT for row in pair]
            cells.append([number(pair.row.median_ms) for pair in of_size.get(size, ())])
            memory = [row.temporary_bytes for row in of_gradient]
            cells.append([NOTHING if n is None else number(n / MIB) for n in memory])
        lines.append([*key, *(", ".join(cell) or NOTHING for cell in cells)])
    kept = [i for i in range(len(header)) if i > 2 or len({line[i] for line in lines}) > 1]
    return as_markdown([header[i] for i in kept], [[line[i] for i in kept] for line in lines])


def summary(benchmark: Benchmark, versions: Mapping[str, Sequence[Row]]) -> str:
    """A line for each pair of candidates, a column for each version of jax, and when and on what it was measured."""
    found = [grouped(pairs(rows, benchmark.ratios), lambda p: p.both("candidate")) for rows in versions.values()]
    told = lambda pairs: counts([pair.median for pair in pairs]) if pairs else NOTHING  # noqa: E731
    lines = [[names, *(told(of.get(names)) for of in found)] for names in dict.fromkeys(n for of in found for n in of)]
    lines.append(["measured", *(environment(rows, ("masksafe",)) for rows in versions.values())])
    return as_markdown([f"geometric mean (above {SLOWER})", *versions], lines)


def section(
    benchmark: Benchmark,
    describe: Callable[[Benchmark, Sequence[Row]], str] = table,
    summarize: Callable[[Benchmark, Mapping[str, Sequence[Row]]], str] = summary,
) -> str:
    """What stands on a page: picture and table of the newest jax, and what both versions come to."""
    rows, older = (read_csv(csv_of(benchmark.name, folder)) for folder in (NEWEST, OLDEST))
    picture = f"![{benchmark.title}: ratios of times](../{PICTURES.as_posix()}/{benchmark.name}.png)"
    versions = {
        f"[{jax_of(of)}](../benchmarks/{folder}{benchmark.name}.csv)": of
        for of, folder in ((rows, ""), (older, f"{OLDEST}/"))
        if of
    }
    return "\n\n".join([picture, describe(benchmark, rows), summarize(benchmark, versions)])


# Pages


def fill(page: str, name: str, content: str) -> str:
    """The page with the content between the markers of that name."""
    pattern = rf"(<!-- table: {re.escape(name)} -->\n).*?(<!-- end -->)"
    filled, count = re.subn(pattern, lambda m: f"{m[1]}\n{content}\n\n{m[2]}", page, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"the page has {count} markers <!-- table: {name} --> ... <!-- end -->, expected one")
    return filled


def pages() -> list[Path]:
    return [path for pattern in PAGES for path in sorted(DOCS.glob(pattern))]


def fill_pages(contents: Mapping[str, str]) -> None:
    """Writes each content to the page that has a place for it."""
    for path in pages():
        text = path.read_text()
        for name in PLACE.findall(text):
            if name in contents:
                text = fill(text, name, contents[name])
        path.write_text(text)
