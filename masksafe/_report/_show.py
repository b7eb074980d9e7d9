"""The report as text: rich tables if rich is installed, plain ones otherwise."""

import importlib.util
import sys
from collections.abc import Mapping, Sequence

from masksafe._report._case import Case
from masksafe._report._verdict import Verdict

Row = Sequence[str]

_BAD = "bold red"
_STYLES = {"right": "green", "NaN": _BAD, "leaks": _BAD, "wrong": _BAD, "refused": "yellow", "-": "dim"}


def verdicts(title: str, cases: Sequence[Case], columns: Mapping[str, Sequence[Verdict]]) -> None:
    """Prints a table with a line per op, followed by a line per case, and the columns that have any of the cases."""
    columns = {name: column for name, column in columns.items() if set(column) != {Verdict.ABSENT}}
    rows: dict[str, list[Row]] = {}
    for case, *of_case in zip(cases, *columns.values(), strict=True):
        rows.setdefault(case.op, [[case.op, *[""] * len(columns)]]).append([f"  {case.what}", *of_case])
    table(title, ["op and case", *columns], [row for of_op in rows.values() for row in of_op])


def table(title: str, header: Row, rows: Sequence[Row]) -> None:
    """Prints a table; rich colours the verdicts."""
    if importlib.util.find_spec("rich") is not None:
        _rich_table(title, header, rows)
        return
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    print(title)
    for row in (header, ["-" * width for width in widths], *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print()


def progress(line: str) -> None:
    """Prints a line at once, apart from the report."""
    print(line, file=sys.stderr, flush=True)


def _rich_table(title: str, header: Row, rows: Sequence[Row]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    rich_table = Table(*header, title=title, title_justify="left")
    for row in rows:
        rich_table.add_row(*(f"[{_STYLES[cell]}]{cell}[/]" if cell in _STYLES else escape(cell) for cell in row))
    Console().print(rich_table)
