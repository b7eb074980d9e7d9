"""Positions of queries and keys, and sinks."""

import functools

import jax
import numpy as np
import pytest
from attention_cases import attention, causal, normals, random_inputs, with_gradients
from comparisons import assert_same_bits

import masksafe

with_residual = functools.partial(attention, return_residual=True)


# Positions. Which pairs they exclude is in the contract's table.


def test_a_rotating_cache_gives_what_a_long_one_gives():
    """A window of four keys, written in turn into a cache of five places."""
    query, key, value = random_inputs(B=1, T=9, S=9)
    expected = attention(query, key, value, is_causal=True, local_window_size=(3, 0))
    cache, positions = np.full((2, 1, 5, 1, 4), np.nan, np.float32), np.full((1, 5), 2**30)

    @jax.jit
    def step(query, cache, position, positions):
        masks = dict(is_causal=True, local_window_size=(3, 0), query_positions=position, key_positions=positions)
        return attention(query, *cache, **masks)

    for t in range(9):
        cache, positions = cache.copy(), positions.copy()  # the step before may still read the old ones
        cache[:, :, t % 5], positions[:, t % 5] = (key[:, t], value[:, t]), t
        out = step(query[:, t : t + 1], cache, np.array([[t]]), positions)
        np.testing.assert_allclose(out, expected[:, t : t + 1], rtol=2e-5, atol=1e-6)


# Sinks.

SINKS = np.float32([0.5, -1.0])


def test_sinks_count_only_for_queries_that_take_part():
    """By a causal mask the first two see nothing; of the last two the loss wants nothing."""
    inputs, of_queries = random_inputs(), np.arange(6)[:, None, None]
    attend = functools.partial(attention, is_causal=True, causal_offset=-2)
    run = with_gradients(lambda *args: attend(*args[:3], sinks=args[3]))
    d_out = np.where(of_queries < 4, normals(2, 6, 2, 4, seed=6), 0)
    clean = run((*inputs, SINKS), d_out)
    assert not np.asarray(clean[0])[:, :2].any()
    few, padded = (of_queries < 2), (of_queries >= 4)
    dirty = np.where(few | padded, np.float32(np.nan), inputs[0]), *inputs[1:], SINKS
    out, gradients = run(dirty, np.where(few, np.float32(np.nan), d_out))
    assert_same_bits((out[:, :4], gradients), (clean[0][:, :4], clean[1]))


@pytest.mark.forms
def test_a_sink_takes_all_weight_or_none():
    inputs, attend = random_inputs(), functools.partial(attention, is_causal=True, causal_offset=-2)
    all_or_nothing = attend(*inputs, sinks=np.float32([-np.inf, np.inf]))
    np.testing.assert_array_equal(all_or_nothing, np.asarray(attend(*inputs)) * np.float32([1, 0])[:, None])


def of_transformers(query, key, value, sinks):
    """The published code of gpt-oss, in NumPy: the sink is one more column of the softmax, and is dropped after it."""
    logits = np.einsum("btnh,bsnh->bnts", query, np.repeat(key, 2, 2)) * query.shape[-1] ** -0.5
    logits = np.where(causal(6, 6), logits, -np.inf)
    combined = np.concatenate([logits, np.broadcast_to(sinks[:, None, None], (*logits.shape[:-1], 1))], -1)
    exps = np.exp(combined - combined.max(-1, keepdims=True))
    return np.einsum("bnts,bsnh->btnh", (exps / exps.sum(-1, keepdims=True))[..., :-1], np.repeat(value, 2, 2))


def test_sinks_are_those_of_gpt_oss():
    inputs = random_inputs(S=6)
    out, lse = with_residual(*inputs, is_causal=True, sinks=SINKS)
    np.testing.assert_allclose(out, of_transformers(*inputs, SINKS), rtol=2e-5, atol=1e-6)
    np.testing.assert_array_equal(lse, with_residual(*inputs, is_causal=True)[1])


def test_sinks_after_merging():
    @jax.jit
    def both(query, key, value):
        parts = [with_residual(query, key[:, s], value[:, s]) for s in (slice(0, 3), slice(3, 7))]
        out, lse = masksafe.merge_attention(*zip(*parts, strict=True))
        return out * jax.nn.sigmoid(lse - SINKS)[..., None], attention(query, key, value, sinks=SINKS)

    np.testing.assert_allclose(*both(*random_inputs()), rtol=2e-5, atol=1e-6)
