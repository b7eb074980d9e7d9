"""The blocks of code of README and the docs, which can be pasted as they stand."""

import ast
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks_of(page: str) -> list[str]:
    """The blocks of a page; those fenced as `py` need what is not installed."""
    return _BLOCK.findall((ROOT / page).read_text("utf8"))


def names_of(page: str, runs: Callable[[ast.stmt], bool]) -> dict[str, object]:
    """The names that those statements of a page define which `runs` selects."""
    names: dict[str, object] = {}
    for block in blocks_of(page):
        chosen = [statement for statement in ast.parse(block).body if runs(statement)]
        exec(compile(ast.Module(chosen, []), page, "exec"), names)
    return names
