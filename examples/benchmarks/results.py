"""CSVs of measurements, and the tables of them that stand between markers in a page of Markdown."""

import csv
import dataclasses
import math
import re
import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from measure import GRADIENT, PASSES, Benchmark, Row

SLOWER = 1.1  # a ratio above it is bold in the tables, and listed
DISPATCH_MS = 0.1  # below it, a call is mostly dispatch
LARGE = ("large", "long", "many short")  # sizes that the tables show; the pictures and CSVs have all
NOTHING = "-"
OURS = {"masksafe", "automatic", "shard_map", "at once"}  # masksafe, and other ways to call it
T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class Ratio:
    """The time of one candidate in units of another's, in one pass of one case."""

    row: Row
    peer: Row

    @property
    def median(self) -> float:
        return self.row.median_ms / self.peer.median_ms

    @property
    def minimum(self) -> float:
        return self.row.minimum_ms / self.peer.minimum_ms

    @property
    def pair(self) -> str:
        return f"{self.row.candidate} / {self.peer.candidate}"


def kinds(of: type[Any]) -> dict[str, Any]:
    """The columns, which are the fields of a dataclass, and their types."""
    return {field.name: field.type for field in dataclasses.fields(of)}


def write_csv(path: Path, rows: Sequence[R], of: type[R] = Row) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(kinds(of)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(dataclasses.asdict(row) for row in rows)


def read_csv(path: Path, of: type[R] = Row) -> list[R]:
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    columns = {name: kind for name, kind in kinds(of).items() if lines and name in lines[0]}  # the newest may lack
    return [of(**{name: parsed(line[name], kind) for name, kind in columns.items()}) for line in lines]


def parsed(text: str, kind: Any) -> Any:
    if kind is str:
        return text
    if kind is bool:
        return text == "True"
    return (int if kind in (int, int | None) else float)(text) if text else None


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def ratios(rows: Sequence[Row], pairs: Iterable[tuple[str, str]]) -> list[Ratio]:
    """Of every case and pass, in the order of the rows, those of the pairs whose candidates took part."""
    found = []
    for case in grouped(rows, lambda r: (r.benchmark, r.work, r.mask, r.dtype, r.size, r.what)).values():
        of = {row.candidate: row for row in case}
        found += [Ratio(of[ours], of[peer]) for ours, peer in pairs if ours in of and peer in of]
    return found


def ratios_to_peers(rows: Sequence[Row]) -> list[Ratio]:
    """Masksafe's to whatever else was measured beside it."""
    return ratios(rows, [("masksafe", name) for name in sorted({row.candidate for row in rows} - OURS)])


def best_peers(rows: Sequence[Row]) -> list[Ratio]:
    """Masksafe's ratio to the fastest of what was measured beside it, the worst first."""
    cases = grouped(ratios_to_peers(rows), lambda r: (r.row.work, r.row.mask, r.row.dtype, r.row.size, r.row.what))
    found = [min(case, key=lambda ratio: ratio.peer.minimum_ms) for case in cases.values()]
    return sorted(found, key=lambda ratio: -ratio.minimum)


# Tables


def as_markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose columns are aligned in plain text as well."""
    lines = [list(header), *map(list, rows)]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return "\n".join([line(lines[0]), line(["-" * width for width in widths]), *map(line, lines[1:])])


def without_constant_columns(header: Sequence[str], rows: Sequence[Sequence[str]], of: int) -> str:
    """The table, without those of its first columns that say the same in every line."""
    kept = [i for i in range(len(header)) if i >= of or len({row[i] for row in rows}) > 1]
    return as_markdown([header[i] for i in kept], [[row[i] for i in kept] for row in rows])


def number(x: float) -> str:
    """Three digits, of which at most three behind the point."""
    if 0 < x < 0.001:
        return "<0.001"
    digits = 2 - math.floor(math.log10(x)) if x > 0 else 0
    return f"{x:.{min(max(digits, 0), 3)}f}"


def ratio_text(ratio: float) -> str:
    text = f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.0f}"
    return f"**{text}**" if ratio > SLOWER else text


def size_header(size: str, found: Iterable[Ratio]) -> str:
    shapes = {ratio.row.shape for ratio in found if ratio.row.size == size}
    return f"{size} ({shapes.pop()})" if len(shapes) == 1 else size


def in_order_of_passes(found: Iterable[Ratio]) -> list[Ratio]:
    return sorted(found, key=lambda ratio: PASSES.index(ratio.row.what))


def table(benchmark: Benchmark, rows: Sequence[Row]) -> str:
    """A line for each kind of work, a column for each large size: the ratios of the value, and with its gradient."""
    every = ratios(rows, benchmark.ratios)
    found = [ratio for ratio in every if ratio.row.size in LARGE] or every
    sizes = list(dict.fromkeys(ratio.row.size for ratio in found))
    largest = [size for size in sizes if size == "large"] or sizes[:1]
    header = ["work", "mask", "dtype", "ratio", *(size_header(size, found) for size in sizes)]
    header += [f"{size}: {unit}" for size in largest for unit in ("ms", "MiB")]
    lines = []
    for key, line in grouped(found, lambda r: (r.row.work, r.row.mask, r.row.dtype, r.pair)).items():
        of_size = grouped(in_order_of_passes(line), lambda r: r.row.size)
        cells = [", ".join(ratio_text(r.median) for r in of_size.get(size, ())) or NOTHING for size in sizes]
        lines.append([*key, *cells, *(cell for size in largest for cell in scale(of_size.get(size, ())))])
    return without_constant_columns(header, lines, of=3)


def scale(found: Sequence[Ratio]) -> tuple[str, str]:
    """The milliseconds of the first, and the temporary memory of both for the gradient."""
    times = ", ".join(number(ratio.row.median_ms) for ratio in found) or NOTHING
    of_gradient = [ratio for ratio in found if ratio.row.what == GRADIENT]
    sizes = [row.temporary_bytes for ratio in of_gradient for row in (ratio.row, ratio.peer)]
    return times, ", ".join(NOTHING if n is None else number(n / 2**20) for n in sizes) or NOTHING


def how_many_exceed(found: Sequence[Ratio]) -> str:
    above = [ratio for ratio in found if ratio.median > SLOWER]
    tiny = sum(ratio.row.median_ms < DISPATCH_MS for ratio in above)
    text = f"Of {len(found)} ratios to other libraries {len(above)} exceed {SLOWER}"
    return f"{text} ({tiny} in calls shorter than {DISPATCH_MS} ms)."


def counts(values: Sequence[float]) -> str:
    """How many ratios there are, their geometric mean, how many exceed the limit."""
    above = sum(value > SLOWER for value in values)
    return f"{len(values)} ratios, geometric mean {statistics.geometric_mean(values):.2f}, {above} above {SLOWER}"


def summary(benchmark: Benchmark, rows: Sequence[Row]) -> str:
    """The counts for each pair of candidates."""
    of_pair = grouped(ratios(rows, benchmark.ratios), lambda r: r.pair)
    return "; ".join(f"{pair}: {counts([r.median for r in found])}" for pair, found in of_pair.items()) + "."


def cost(ratio: Ratio) -> str:
    row = ratio.row
    case = [row.mask if row.mask != "none" else "", row.dtype, row.shape, "eager" if row.eager else ""]
    milliseconds = number(row.median_ms - ratio.peer.median_ms)
    return f"{ratio.median:.2f} (+{milliseconds} ms): {', '.join(filter(None, case))}"


def worst(found: Sequence[Ratio], number_of: int) -> str:
    """The first of the ratios."""
    header = ["work", "mask", "dtype", "shape", "what", "against", "minima", "medians", "ms"]
    lines = []
    for ratio in found[:number_of]:
        row, what = ratio.row, ratio.row.what + (", eager" if ratio.row.eager else "")
        values = [ratio_text(ratio.minimum), ratio_text(ratio.median), number(row.minimum_ms)]
        lines.append([row.work, row.mask, row.dtype, row.shape, what, ratio.peer.candidate, *values])
    return as_markdown(header, lines)


def by_work(found: Sequence[Ratio]) -> str:
    """For each op the geometric mean of the ratios of the minima, how many exceed the limit, and the worst."""
    header = ["work", "cases", "geometric mean", f"above {SLOWER}", "the worst"]
    lines = []
    for work, group in grouped(found, lambda r: r.row.work).items():
        mean = statistics.geometric_mean(ratio.minimum for ratio in group)
        above = sum(ratio.minimum > SLOWER for ratio in group)
        row = group[0].row
        case = ", ".join(filter(None, [row.mask, row.dtype, row.shape, row.what, "eager" if row.eager else ""]))
        lines.append((mean, [work, str(len(group)), ratio_text(mean), str(above), f"{group[0].minimum:.2f}: {case}"]))
    return as_markdown(header, [line for _, line in sorted(lines, key=lambda line: -line[0])])


def compiling(rows: Sequence[Row]) -> str:
    """The median time to trace and compile, over all cases of a benchmark."""
    known = [ratio for ratio in ratios_to_peers(rows) if None not in (ratio.row.compile_s, ratio.peer.compile_s)]
    lines = []
    for (name, what, peer), found in grouped(known, lambda r: (r.row.benchmark, r.row.what, r.peer.candidate)).items():
        seconds = [statistics.median(getattr(r, side).compile_s for r in found) for side in ("row", "peer")]
        lines.append([name.replace("_", " "), what, peer, *map(number, seconds), ratio_text(seconds[0] / seconds[1])])
    header = ["benchmark", "what", "against", "masksafe s", "the other's s", "ratio"]
    return f"Measured {environment(rows)}.\n\n{as_markdown(header, lines)}"


def environment(rows: Sequence[Any], packages: Sequence[str] = ()) -> str:
    """When, on what and with which versions the rows were measured: of each what occurs among them.

    With the names of packages it has their versions alone, without them all and Python's.
    """
    versions = {text: text.split()[0] for line in distinct(rows, "versions") for text in line.split(", ")}
    of_package = grouped(versions, versions.__getitem__)
    python = [] if packages else [f"Python {version}" for version in distinct(rows, "python")]
    dates = sorted(distinct(rows, "date"))
    parts = [" to ".join(dict.fromkeys([dates[0], dates[-1]])), *map(" and ".join, (distinct(rows, "machine"), python))]
    parts += [" and ".join(of_package[name]) for name in packages or of_package if name in of_package]
    return ", ".join(filter(None, parts))


def distinct(rows: Sequence[Any], column: str) -> list[str]:
    """The texts of a column, if the rows have it."""
    return list(dict.fromkeys(text for row in rows if (text := getattr(row, column, ""))))


def jax_of(rows: Sequence[Any]) -> str:
    """The version, such as "jax 0.12.0.1"."""
    return " and ".join(dict.fromkeys(found for row in rows for found in re.findall(r"\bjax [\d.]+", row.versions)))


# Pages


def fill(page: str, name: str, content: str) -> str:
    """The page with the content between the markers of that name."""
    pattern = rf"(<!-- table: {re.escape(name)} -->\n).*?(<!-- end -->)"
    filled, count = re.subn(pattern, lambda m: f"{m[1]}\n{content}\n\n{m[2]}", page, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"the page has {count} markers <!-- table: {name} --> ... <!-- end -->, expected one")
    return filled
