"""The README: what its table says that lines print, and calls that work as they stand there."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import masksafe

PAGE = (Path(__file__).parents[1] / "README.md").read_text("utf8")
LABELS, MASK = jnp.array([0, 2]), jnp.array([True, False])
HEADS = jnp.ones((1, 4, 2, 8))
ARGUMENTS = {
    "logits": jnp.array([[2.0, 0.0, 1.0], [jnp.nan, 0.0, 1.0]]),
    "labels": LABELS,
    "mask": MASK,
    "features": jnp.array([[1.0, -1.0, 2.0, 0.0], [jnp.nan] * 4]),
    "kernel": jnp.ones((4, 3)),
    "loss": jnp.array([0.5, jnp.nan]),
    "q": HEADS,
    "k": HEADS,
    "v": HEADS,
    "ids": jnp.array([[0, 0, 1, 1]]),
    "tokens": jnp.array([[5, 6, 7, 8]]),
    "fn": lambda loss: masksafe.mean(loss, where=MASK),
}
NAMES = {"jax": jax, "jnp": jnp, "optax": optax, "masksafe": masksafe, "losses": masksafe.losses}


def rows_of(heading):
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    return [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]


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
def test_a_call_works_and_hides_what_is_masked(row):
    if ".nnx." in row[1]:
        ARGUMENTS["rngs"] = pytest.importorskip("flax.nnx").Rngs(0)
    found = eval(row[1].strip("`"), NAMES | ARGUMENTS)
    assert not any(jnp.isnan(leaf).any() for leaf in jax.tree.leaves(found) if isinstance(leaf, jax.Array))
