"""README, the first page and Getting started, pasted into a prompt: every block works and prints what it says.

A comment at the start of a line is what the block prints.
"""

import code
import contextlib
import doctest
import io
import os
import pty
import re
import subprocess
import sys
import time
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


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_a_terminal_takes_the_page(page):
    """A real prompt, through a pseudoterminal, with the lines of all blocks one after another."""
    environment = os.environ | {"PYTHON_BASIC_REPL": "1", "TERM": "dumb", "JAX_PLATFORMS": "cpu"}
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-q"], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as prompt:
        os.close(theirs)
        seen = ""
        for line in [*"".join(blocks_of(page)).splitlines(), "print('the', 'end')", "exit()"]:
            before = len(re.findall(r"^(?:>>>|\.\.\.) ", seen, re.MULTILINE))
            os.write(ours, f"{line}\n".encode())
            until = time.monotonic() + 120
            while len(re.findall(r"^(?:>>>|\.\.\.) ", seen, re.MULTILINE)) <= before and time.monotonic() < until:
                try:
                    seen += os.read(ours, 65536).decode().replace("\r", "")
                except OSError:  # it has ended
                    break
        prompt.wait(60)
    os.close(ours)
    assert "Error" not in seen
    assert "\nthe end\n" in seen
