"""Blocks of code on the pages fit into a page of the site, and beside another window."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)]
BLOCK = re.compile(r"^```(?:python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WIDEST = 88


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_blocks_of_code_are_not_wider_than_a_page(page):
    lines = [line for block in BLOCK.findall(page.read_text()) for line in block.splitlines()]
    assert not [line for line in lines if len(line) > WIDEST]
