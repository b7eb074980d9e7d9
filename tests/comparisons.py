"""How tests compare trees of arrays."""

import jax
import jax.numpy as jnp
import numpy as np

from masksafe.testing._trees import bits


def assert_close(actual, expected, rtol=2e-5, atol=None):
    """In float64, so that arrays of 16 bits are compared as well; as much is allowed of 0 as of 1 if `atol` is None."""
    trees = jax.device_get((actual, expected))
    for a, e in zip(*map(jax.tree.leaves, trees), strict=True):
        np.testing.assert_allclose(np.float64(a), np.float64(e), rtol=rtol, atol=rtol if atol is None else atol)


def assert_same_bits(actual, expected):
    """Of zeros the signs as well; a NaN is a NaN."""
    jax.tree.map(lambda a, e: np.testing.assert_array_equal(bits(np.asarray(a)), bits(np.asarray(e))), actual, expected)


def in_float64(fn, *args):
    """What a function gives of the same numbers in float64, of which the contract's tests know that it is right."""
    wide = lambda x: np.float64(x) if jnp.issubdtype(jnp.result_type(x), jnp.floating) else x  # noqa: E731
    with jax.enable_x64(True):
        return jax.device_get(fn(*jax.tree.map(wide, jax.device_get(args))))


def in_one_number(tree):
    """A sum that tells what is finite of the arrays apart."""
    finite = [jnp.where(jnp.isfinite(x), x, 0).ravel() for x in jax.tree.leaves(tree)]
    return sum(jnp.sum(x * jnp.cos(i + jnp.arange(x.size, dtype="float32"))) for i, x in enumerate(finite))


def with_gradients(fn, argnums=0):
    """The outputs of a function, and the gradients of `in_one_number` of them; compiled."""

    def total(*args):
        out = fn(*args)
        return in_one_number(out), out

    return jax.jit(lambda *args: jax.grad(total, argnums, has_aux=True)(*args)[::-1])
