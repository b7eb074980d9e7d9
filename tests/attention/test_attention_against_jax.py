"""Every argument that `jax.nn.dot_product_attention` has, against it, where every query sees a key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import masksafe

HEADS, WIDTH = 4, 8
ours, theirs = masksafe.dot_product_attention, jax.nn.dot_product_attention


def inputs(queries, keys, key_heads, batch=(2,), dtype=jnp.float32):
    of_query, of_key, of_value = jax.random.split(jax.random.key(queries * keys + key_heads), 3)
    shape = (*batch, keys, key_heads, WIDTH)
    query = jax.random.normal(of_query, (*batch, queries, HEADS, WIDTH), dtype)
    return query, jax.random.normal(of_key, shape, dtype), jax.random.normal(of_value, shape, dtype)


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


ALONG = {
    "nothing": {},
    "causal": dict(is_causal=True),
    "window": dict(local_window_size=3),
    "window of two sides, causal": dict(local_window_size=(2, 1), is_causal=True),
    "key lengths": dict(key_value_seq_lengths=jnp.array([5, 3])),
    "query and key lengths, causal": dict(
        query_seq_lengths=jnp.array([5, 5]), key_value_seq_lengths=jnp.array([5, 4]), is_causal=True
    ),
}


@pytest.mark.parametrize("key_heads", [1, 2, 4], ids=["multi-query", "grouped", "multi-head"])
@pytest.mark.parametrize("arguments", ALONG.values(), ids=ALONG)
def test_structural_masks(arguments, key_heads):
    assert_alike(arguments, inputs(5, 5, key_heads))


@pytest.mark.parametrize("queries_keys", [(3, 7), (7, 3), (1, 6)], ids=str)
@pytest.mark.parametrize("arguments", [{}, dict(is_causal=True)], ids=["nothing", "causal"])
def test_other_lengths_of_queries_than_of_keys(queries_keys, arguments):
    assert_alike(arguments, inputs(*queries_keys, 2))


SHAPES = [(1, 1, 4, 6), (2, 1, 4, 6), (1, HEADS, 4, 6), (2, HEADS, 4, 6), (2, 1, 1, 6), (4, 6), (HEADS, 1, 6)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_masks_and_biases_broadcast(shape):
    mask = jax.random.bernoulli(jax.random.key(2), 0.5, shape).at[..., 0].set(True)
    assert_alike(dict(mask=mask, bias=jax.random.normal(jax.random.key(3), shape)), inputs(4, 6, 2))


SCALES = [0.3, jnp.array(0.3), jnp.full((1, 1), 0.3), np.float32(0.3)]


@pytest.mark.parametrize("scale", SCALES, ids=["a number", "an array", "of one element", "NumPy's"])
def test_scales(scale):
    assert_alike(dict(scale=scale), inputs(4, 6, 4))


@pytest.mark.parametrize("bias", [jnp.arange(6) > 2, jnp.arange(6)], ids=["booleans", "integers"])
@pytest.mark.parametrize("scale", [jnp.array(1), 2], ids=["an array", "a number"])
def test_booleans_and_integers(bias, scale):
    operands = inputs(4, 6, 4)
    actual, expected = (attention(*operands, bias, scale=scale) for attention in (ours, theirs))
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)


def test_one_sample_without_a_batch():
    assert_alike(dict(is_causal=True, mask=jnp.ones((1, 5, 5), bool)), inputs(5, 5, 2, batch=()))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bit_operands(dtype):
    operands = inputs(5, 5, 2, dtype=dtype)
    out, lse = ours(*operands, is_causal=True, return_residual=True)
    expected, _ = theirs(*operands, is_causal=True, return_residual=True)
    assert (out.dtype, lse.dtype) == (dtype, jnp.float32)
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (out, expected)), atol=2e-2)


def test_complex_operands_are_refused_where_the_peer_drops_their_imaginary_parts():
    operands = [x + 1j for x in inputs(4, 4, 2)]
    with pytest.warns(DeprecationWarning, match="Casting from complex to real"):
        theirs(*operands)
    with pytest.raises(TypeError, match="dot_product_attention: query: got dtype complex64; expected a float dtype"):
        ours(*operands)
