"""README, Getting started and the guides: a prompt takes every block and prints what it says, and tables are true.

A comment at the start of a line is what the block prints.
"""

import code
import contextlib
import doctest
import io
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pages import ROOT, blocks_of

import masksafe

README = (ROOT / "README.md").read_text("utf8")
GUIDES = sorted(f"docs/guides/{path.name}" for path in ROOT.glob("docs/guides/*.md"))
PAGES = ["README.md", "docs/getting_started.md", *GUIDES]


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


def rows_of(text, heading):
    section = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    return [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", PAGES)
def test_a_prompt_takes_every_block_and_prints_what_it_says(page):
    pytest.importorskip("flax")
    prompt, is_printed = Prompt(), doctest.OutputChecker().check_output
    for block in blocks_of(page):
        expected = "".join(f"{line[2:]}\n" for line in block.splitlines() if line.startswith("# "))
        found = prompt.paste(block)
        assert is_printed(expected, found, doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS), f"{block}\n{found}"
    text = (ROOT / page).read_text("utf8")
    for _, call in rows_of(text, "The ops") if page == "docs/getting_started.md" else ():
        found = eval(call.strip("`"), prompt.locals)
        assert not any(jnp.isnan(leaf).any() for leaf in jax.tree.leaves(found) if isinstance(leaf, jax.Array)), call


def test_lines_print_what_stands_below_them():
    preamble = re.search("Lines to paste, after `(.+?)`:", README)[1]
    for row in rows_of(README, "What goes wrong today"):
        for column in row[1:]:
            line, printed = re.fullmatch(r"`(.+?)`<br>\[?([^,\]]+).*", column).groups()
            names = {"jax": jax, "jnp": jnp, "optax": optax, "masksafe": masksafe, "losses": masksafe.losses}
            exec(preamble, names)
            expected = [float(number) for number in printed.split()]
            np.testing.assert_allclose(np.ravel(eval(line, names)), expected, rtol=1e-4, err_msg=line)


def test_the_first_pages_say_which_version_a_clone_has():
    for page in ("README.md", "docs/index.md"):
        assert f"A clone is {masksafe.__version__}," in (ROOT / page).read_text("utf8")


def test_each_command_of_the_readme_is_complete_in_a_fresh_clone():
    commands = "".join(re.findall(r"^```sh\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)).splitlines()
    assert len(commands) == 3  # install, train, test
    assert all(command.startswith("python3 -m venv .venv && .venv/bin/pip install ") for command in commands)
    assert [command for command in README.splitlines() if '".[test]"' in command] == commands[2:]  # what .ci/run runs
