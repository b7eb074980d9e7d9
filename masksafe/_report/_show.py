"""The report as text."""

import sys
from collections.abc import Mapping, Sequence

from masksafe._report._cases import Case
from masksafe._report._verdict import Verdict

Row = Sequence[str]


def verdicts(title: str, cases: Sequence[Case], columns: Mapping[str, Sequence[Verdict]]) -> None:
    """Prints a table with a line per op, followed by a line per case, and the columns that have any of the cases."""
    columns = {name: column for name, column in columns.items() if set(column) != {Verdict.ABSENT}}
    rows: dict[str, list[Row]] = {}
    for case, *of_case in zip(cases, *columns.values(), strict=True):
        rows.setdefault(case.op, [[case.op, *[""] * len(columns)]]).append([f"  {case.what}", *of_case])
    table(title, ["op and case", *columns], [row for of_op in rows.values() for row in of_op])


def numbers_of_right(columns: Mapping[str, Sequence[Verdict]]) -> None:
    for name, column in columns.items():
        print(f"{name}: {column.count(Verdict.RIGHT)} of {len(column) - column.count(Verdict.ABSENT)} right")


def table(title: str, header: Row, rows: Sequence[Row]) -> None:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    print(title)
    for row in (header, ["-" * width for width in widths], *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print()


def progress(line: str) -> None:
    """Prints a line at once, apart from the report; on a terminal alone."""
    if sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)
