"""The report as text: rich tables if rich is installed, plain ones otherwise."""

import importlib.util
import sys
from collections.abc import Sequence

Row = Sequence[str]

_BAD = "bold red"
_STYLES = {"right": "green", "NaN": _BAD, "leaks": _BAD, "wrong": _BAD, "refused": "yellow", "-": "dim"}


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
