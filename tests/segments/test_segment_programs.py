"""Segment ops as compiled programs: the memory of their gradients."""

import functools

import jax
import jax.numpy as jnp
import pytest

import masksafe

OPS = ("sum", "mean", "var", "max", "min", "logsumexp", "softmax", "log_softmax", "standardize")
ROWS, WIDTH, SEGMENTS = 100_000, 64, 10_000
MOST_COPIES = 1.5  # of the data, of which what is kept of segments is a tenth each; jraph's formulas need up to 3.6


@pytest.fixture(autouse=True)
def optimised():
    """The other tests switch XLA's optimisations off to save time; here what they save is tested."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.mark.parametrize("name", OPS)
def test_a_gradient_keeps_hardly_more_than_one_copy_of_the_data(name):
    op = functools.partial(getattr(masksafe, f"segment_{name}"), num_segments=SEGMENTS)

    def value_and_gradient(data, ids, cotangents):
        value, pull_back = jax.vjp(lambda data: op(data, ids), data)
        return value, pull_back(cotangents)

    data = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    ids = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    program = jax.jit(value_and_gradient).lower(data, ids, jax.eval_shape(op, data, ids)).compile()
    assert program.memory_analysis().temp_size_in_bytes <= MOST_COPIES * 4 * ROWS * WIDTH
