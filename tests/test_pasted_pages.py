"""README, the first page and Getting started, pasted into a prompt: every block works and prints what it says.

A comment at the start of a line is what the block prints.
"""

import code
import contextlib
import doctest
import io
import re
from pathlib import Path

import pytest

pytest.importorskip("flax")

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "docs/index.md", "docs/getting_started.md"]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LONGEST_SCRIPT = 40


class Prompt(code.InteractiveConsole):
    """Python's prompt as it is up to 3.12, where nothing but a blank line ends a `def`; errors are raised."""

    def write(self, data):
        raise AssertionError(data)

    def showtraceback(self):
        raise

    def paste(self, block):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            more = [self.push(line) for line in block.splitlines()]
        assert not any(more[-1:]), "the last statement needs a blank line behind it"
        return printed.getvalue()


def blocks_of(page):
    return BLOCK.findall((ROOT / page).read_text("utf8"))


def printed_by(block):
    """What a block says that it prints."""
    return "".join(f"{line[2:]}\n" for line in block.splitlines() if line.startswith("# "))


def is_printed(expected, found):
    return doctest.OutputChecker().check_output(expected, found, doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)


@pytest.mark.parametrize("page", PAGES)
def test_a_prompt_takes_every_block_and_prints_what_it_says(page):
    prompt = Prompt()
    for block in blocks_of(page):
        assert ">>>" not in block
        found = prompt.paste(block)
        assert is_printed(printed_by(block), found), f"{block}\nprinted\n{found}"


def test_a_block_is_a_script_of_a_whole_model():
    (script,) = (block for block in blocks_of("docs/getting_started.md") if "nnx.Module" in block)
    assert len(script.splitlines()) <= LONGEST_SCRIPT


def test_what_a_prompt_refuses():
    with pytest.raises(AssertionError, match="SyntaxError"):
        Prompt().paste("def f():\n    return 1\nprint(f())\n")
    with pytest.raises(AssertionError, match="blank line"):
        Prompt().paste("def f():\n    return 1\n")
    with pytest.raises(NameError):
        Prompt().paste("unknown\n")
