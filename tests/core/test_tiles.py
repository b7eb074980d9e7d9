"""A function that runs once, if a condition holds."""

import jax
import jax.numpy as jnp
import numpy as np
from tiers import parametrize

from masksafe._core.tiles import once_if


@parametrize("is_bad", [(False, True)], exhaustive=[(False, False)])
def test_under_vmap_it_runs_for_all_examples_or_for_none(is_bad):
    """With a condition for each example XLA would compute, in every call, what depends on no example."""
    fn = jax.vmap(lambda condition, x: once_if(condition, lambda x: x + 1, x))
    np.testing.assert_array_equal(fn(jnp.array(is_bad), jnp.zeros(2)), 2 * [any(is_bad)])
    (loop,) = (e for e in jax.make_jaxpr(fn)(jnp.array(is_bad), jnp.zeros(2)).eqns if e.primitive.name == "while")
    assert () in [x.aval.shape for x in loop.invars]
