"""The README: what its tables say that lines print, and calls that work with the arrays of the blocks above them."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import masksafe

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "README.md").read_text("utf8")
NAMES = {"jax": jax, "jnp": jnp, "optax": optax, "masksafe": masksafe, "losses": masksafe.losses}


def rows_of(heading):
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    return [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]


@pytest.fixture(scope="module")
def names():
    """Those of all blocks of the page."""
    pytest.importorskip("flax")
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        exec(block, names)
    return names


WRONG_TODAY, CALLS = rows_of("What goes wrong today"), rows_of("Change the import")


@pytest.mark.parametrize("column", [1, 2], ids=["without", "with"])
@pytest.mark.parametrize("row", WRONG_TODAY, ids=[row[0] for row in WRONG_TODAY])
def test_a_line_prints_what_stands_below_it(row, column):
    preamble = re.search("Lines to paste, after `(.+?)`:", PAGE)[1]
    code, printed = re.fullmatch(r"`(.+?)`<br>\[?([^,\]]+).*", row[column]).groups()
    names = dict(NAMES)
    exec(preamble, names)
    expected = [float(number) for number in printed.split()]
    np.testing.assert_allclose(np.ravel(eval(code, names)), expected, rtol=1e-4)


@pytest.mark.parametrize("row", CALLS, ids=[re.sub(r"\W+", " ", row[0]) for row in CALLS])
def test_a_call_works_and_hides_what_is_masked(row, names):
    found = eval(row[1].strip("`"), names)
    assert not any(jnp.isnan(leaf).any() for leaf in jax.tree.leaves(found) if isinstance(leaf, jax.Array))


def test_the_first_pages_say_which_version_a_clone_has():
    for page in (PAGE, (ROOT / "docs/index.md").read_text("utf8")):
        assert f"A clone is {masksafe.__version__}," in page
