"""Every argument that `jax.nn.dot_product_attention` has, against it, where every query sees a key."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import few_of, normals, with_gradients

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


KEY_HEADS = {"multi-query": 1, "grouped": 2, "multi-head": 4}


@pytest.mark.parametrize(
    "name_and_heads",
    few_of(itertools.product(ALONG, KEY_HEADS), ("query and key lengths, causal", "multi-query")),
    ids=str,
)
def test_structural_masks(name_and_heads):
    name, heads = name_and_heads
    assert_alike(ALONG[name], inputs(5, 5, KEY_HEADS[heads]))


@pytest.mark.forms
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("queries_keys", [(3, 7), (7, 3), (1, 6)], ids=str)
def test_other_lengths_of_queries_than_of_keys(queries_keys, is_causal):
    assert_alike(dict(is_causal=is_causal), inputs(*queries_keys, 2))


SHAPES = [(1, 1, 4, 6), (2, 1, 4, 6), (1, HEADS, 4, 6), (2, HEADS, 4, 6), (2, 1, 1, 6), (4, 6), (HEADS, 1, 6)]


@pytest.mark.parametrize("shape", few_of(SHAPES, (HEADS, 1, 6)), ids=str)
def test_masks_and_biases_broadcast(shape):
    mask = np.random.default_rng(2).random(shape) < 0.5
    mask[..., 0] = True
    assert_alike(dict(mask=mask, bias=normals(*shape, seed=3), scale=np.float32(0.3)), inputs(4, 6, 2))


@pytest.mark.forms
@pytest.mark.parametrize("scale", [0.3, jnp.array(0.3), jnp.full((1, 1), 0.3)], ids=["number", "array", "one element"])
def test_scales(scale):
    assert_alike(dict(scale=scale), inputs(4, 6, 4))


def test_integers():
    operands, bias = inputs(4, 6, 4), np.arange(6)
    run = jax.jit(lambda *operands: [attention(*operands, bias, scale=jnp.array(1)) for attention in (ours, theirs)])
    np.testing.assert_allclose(*run(*operands), rtol=2e-5, atol=2e-5)


@pytest.mark.forms
def test_a_boolean_bias_is_refused_where_jax_adds_ones():
    """The one argument of `jax.nn` that is not taken: a mask in the wrong place, which no test of `jax.nn` has."""
    operands, mask = inputs(4, 6, 4), np.arange(6) > 2
    np.testing.assert_allclose(theirs(*operands, mask), theirs(*operands, mask.astype(np.float32)))
    with pytest.raises(TypeError, match=r"bias: got dtype bool; .* A mask is passed as mask="):
        ours(*operands, mask)


@pytest.mark.forms
def test_one_sample_without_a_batch():
    assert_alike(dict(is_causal=True, mask=np.ones((1, 5, 5), bool)), inputs(5, 5, 2, batch=()))


# Combinations of arguments.

JAX_NN = list(
    itertools.product(
        [(2, 2), (4, 2), (3, 1)],  # query heads, key heads
        [None, "BNTS", "11TS", "B11S", "1NT1"],  # bias
        [None, "BNTS", "B11S"],  # mask
        [False, True],  # is_causal
        [None, (2, 1), 3],  # local_window_size
        [False, True],  # lengths
    )
)


@pytest.mark.forms
@pytest.mark.parametrize("case", JAX_NN[::29], ids=str)
def test_combinations(case, form):
    (N, K), bias, mask, is_causal, window, lengths = case
    T, S = 6, 7
    sizes = {"B": 2, "N": N, "T": T, "S": S, "1": 1}
    arguments = dict(is_causal=is_causal, local_window_size=window)
    weights = normals(2, T, N, WIDTH, seed=3)
    if mask is not None:
        drawn = np.random.default_rng(1).random([sizes[c] for c in mask]) < 0.6
        # Every query keeps its own key, or the first one where all are causal or short.
        own = np.eye(T, S, dtype=bool) if "T" in mask else np.ones(S, bool)
        arguments["mask"] = drawn | own | (np.arange(S) == 0)
    if lengths:
        query_lengths, key_lengths = np.array([[5, 6], [6, 7]], np.int32)
        arguments |= dict(query_seq_lengths=query_lengths, key_value_seq_lengths=key_lengths)
        # jax.nn's output is 0 behind the end of the queries, its gradient is not.
        weights *= (np.arange(T) < query_lengths[:, None])[..., None, None]
    operands = [normals(2, n, h, WIDTH, seed=i) for i, (n, h) in enumerate(((T, N), (S, K), (S, K)))]
    if bias is not None:
        operands.append(normals(*(sizes[c] for c in bias), seed=2))
    run = lambda attention: with_gradients(functools.partial(attention, **arguments))(operands, weights)[1]  # noqa: E731
    for actual, expected in zip(run(ours), run(theirs), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.forms
def test_complex_operands_are_refused_where_the_peer_drops_their_imaginary_parts():
    operands = [jnp.asarray(x) + 1j for x in inputs(4, 4, 2)]
    with pytest.warns(DeprecationWarning, match="Casting from complex to real"):
        theirs(*operands)
    with pytest.raises(TypeError, match="dot_product_attention: query: got dtype complex64; expected a float dtype"):
        ours(*operands)
