"""A function that runs if a condition holds."""

import jax
import jax.numpy as jnp
import numpy as np
from tiers import parametrize

from masksafe._core.tiles import if_any, once_if


@parametrize(
    ("run", "primitive", "is_bad"),
    [(once_if, "while", (False, True)), (if_any, "cond", (False, True))],
    exhaustive=[(once_if, "while", (False, False)), (if_any, "cond", (False, False))],
)
def test_under_vmap_it_runs_for_all_examples_or_for_none(run, primitive, is_bad):
    """With a condition for each example XLA would compute, in every call, what depends on no example."""
    fn = jax.vmap(lambda condition, x: run(condition, lambda x: x + 1, x))
    np.testing.assert_array_equal(fn(jnp.array(is_bad), jnp.zeros(2)), 2 * [any(is_bad)])
    found = [e for e in jax.make_jaxpr(fn)(jnp.array(is_bad), jnp.zeros(2)).eqns if e.primitive.name == primitive]
    assert len(found) == 1
    assert () in [x.aval.shape for x in found[0].invars]
