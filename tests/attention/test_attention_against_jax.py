"""Masks, biases and scales of any shape, against `jax.nn.dot_product_attention`, where every query sees a key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import normals
from tiers import few_of

import masksafe

HEADS, WIDTH = 4, 8
ours, theirs = masksafe.dot_product_attention, jax.nn.dot_product_attention


def inputs(queries, keys, key_heads, batch=(2,)):
    shape = (*batch, keys, key_heads, WIDTH)
    shapes = (*batch, queries, HEADS, WIDTH), shape, shape
    return tuple(normals(*shape, seed=(i, queries, keys)) for i, shape in enumerate(shapes))


def assert_alike(arguments, operands, tolerance=2e-5):
    """Values, logsumexps and gradients with respect to the operands and the bias."""
    floats = {name: x for name, x in arguments.items() if name in ("bias", "scale")}
    floats |= dict(zip(("query", "key", "value"), operands, strict=True))
    rest = {k: v for k, v in arguments.items() if k not in floats}

    def total(attention):
        def fn(floats):
            out, lse = attention(**floats, **rest, return_residual=True)
            return jnp.sum(jnp.sin(out.astype(jnp.float32))), (out, lse)

        return jax.jit(jax.value_and_grad(fn, has_aux=True))(floats)

    actual, expected = total(ours), total(theirs)
    assert actual[0][1][0].dtype == expected[0][1][0].dtype
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.shape == e.shape
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (a, e)), rtol=tolerance, atol=tolerance)


SHAPES = [(1, 1, 4, 6), (2, 1, 4, 6), (1, HEADS, 4, 6), (2, HEADS, 4, 6), (2, 1, 1, 6), (4, 6), (HEADS, 1, 6)]


@pytest.mark.parametrize("shape", few_of(SHAPES, (HEADS, 1, 6)), ids=str)
def test_masks_and_biases_broadcast(shape):
    mask = np.random.default_rng(2).random(shape) < 0.5
    mask[..., 0] = True
    assert_alike(dict(mask=mask, bias=normals(*shape, seed=3), scale=np.float32(0.3)), inputs(4, 6, 2))


def test_integers():
    operands, bias = inputs(4, 6, 4), np.arange(6)
    run = jax.jit(lambda *operands: [attention(*operands, bias, scale=jnp.array(1)) for attention in (ours, theirs)])
    np.testing.assert_allclose(*run(*operands), rtol=2e-5, atol=2e-5)
