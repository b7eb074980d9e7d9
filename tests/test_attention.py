"""The contract of dot_product_attention, on one block and on many."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import masksafe
from masksafe.attention import _api
from masksafe.testing import assert_mask_safe

attention = masksafe.dot_product_attention


@pytest.fixture(params=["one block", "many blocks"])
def blocks(request, monkeypatch):
    """Once with one block for everything, and once with blocks of a few queries and keys, of ragged sizes."""
    if request.param == "many blocks":
        shrink_blocks(monkeypatch)
    yield request.param
    jax.clear_caches()


def shrink_blocks(monkeypatch, size=4):
    for name in ("QUERY_BLOCK", "KEY_BLOCK", "KEY_BLOCK_IF_NOTHING_IS_SKIPPED", "FEWEST_QUERIES"):
        monkeypatch.setattr(_api, name, size)
    monkeypatch.setattr("masksafe.attention._problems.IN_TURN_LOGITS", 1)
    jax.clear_caches()


def random_inputs(B=2, T=6, S=7, N=2, K=1, H=4, width=None, dtype=jnp.float32, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, width or H)
    return tuple(jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True))


def reference(query, key, value, live, bias=0.0, scale=None, soft_cap=None):
    """Float64 attention and logsumexp of one batch, pair by pair; `live` and `bias` broadcast to [B, N, T, S]."""
    q, k, v = (np.asarray(a, np.float64) for a in (query, key, value))
    groups = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, groups, 2), np.repeat(v, groups, 2)
    x = np.einsum("btnh,bsnh->bnts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if soft_cap is not None:
        x = soft_cap * np.tanh(x / soft_cap)
    live = np.broadcast_to(live, x.shape)
    x = np.where(live, x + np.asarray(bias, np.float64), -np.inf)
    largest = np.where(live.any(-1, keepdims=True), x.max(-1, keepdims=True, initial=-np.inf), 0)
    exps = np.exp(x - largest)
    total = exps.sum(-1, keepdims=True)
    probs = exps / np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        lse = largest + np.log(total)
    return np.einsum("bnts,bsnh->btnh", probs, v), np.moveaxis(lse[..., 0], 1, 2)


# Structural masks, as the pairs that they allow.


def causal(T, S, offset=0):
    return np.arange(S) <= np.arange(T)[:, None] + offset


MASKS = {
    "causal": (dict(is_causal=True), lambda T, S: causal(T, S)),
    "causal, aligned at the end": (dict(is_causal=True, causal_offset=1), lambda T, S: causal(T, S, 1)),
    "causal, dead rows": (dict(is_causal=True, causal_offset=-2), lambda T, S: causal(T, S, -2)),
    "window": (
        dict(local_window_size=(2, 1)),
        lambda T, S: (np.arange(S) >= np.arange(T)[:, None] - 2) & (np.arange(S) <= np.arange(T)[:, None] + 1),
    ),
    "key lengths": (
        dict(key_value_seq_lengths=jnp.array([5, 0])),
        lambda T, S: (np.arange(S) < np.array([5, 0])[:, None])[:, None, None, :],
    ),
    "query lengths": (
        dict(query_seq_lengths=jnp.array([2, 5])),
        lambda T, S: (np.arange(T) < np.array([2, 5])[:, None])[:, None, :, None],
    ),
    "segments": (
        dict(
            query_segment_ids=jnp.array([[0, 0, 1, 1, 1, 7], [3, 3, 3, 2, 2, 2]]),
            key_value_segment_ids=jnp.array([[0, 1, 1, 1, 2, 2, 2], [2, 2, 3, 2, 2, 2, 2]]),
        ),
        lambda T, S: (
            np.array([[0, 0, 1, 1, 1, 7], [3, 3, 3, 2, 2, 2]])[:, None, :, None]
            == np.array([[0, 1, 1, 1, 2, 2, 2], [2, 2, 3, 2, 2, 2, 2]])[:, None, None, :]
        ),
    ),
    "keys of every sample": (
        dict(mask=jnp.array([[1, 1, 0, 1, 0, 0, 0], [0] * 7], bool)[:, None, None, :]),
        lambda T, S: np.array([[1, 1, 0, 1, 0, 0, 0], [0] * 7], bool)[:, None, None, :],
    ),
    "pairs": (
        dict(mask=jnp.asarray(np.random.default_rng(0).random((2, 2, 6, 7)) < 0.4).at[0, 1, 2].set(False)),
        lambda T, S: np.asarray(
            jnp.asarray(np.random.default_rng(0).random((2, 2, 6, 7)) < 0.4).at[0, 1, 2].set(False)
        ),
    ),
    "bias of -inf": (
        dict(bias=jnp.where(causal(6, 7, -1), 0.5, -jnp.inf)),
        lambda T, S: causal(6, 7, -1),
    ),
    "causal and left padding": (
        dict(is_causal=True, mask=(jnp.arange(7) >= jnp.array([[3], [1]]))[:, None, None, :]),
        lambda T, S: causal(T, S) & (np.arange(7) >= np.array([[3], [1]]))[:, None, None, :],
    ),
}
CASES = {name: (arguments, allowed(6, 7)) for name, (arguments, allowed) in MASKS.items()}


@pytest.mark.parametrize("name", CASES)
def test_equals_float64_reference(name, blocks):
    arguments, live = CASES[name]
    query, key, value = random_inputs()
    out, lse = attention(query, key, value, return_residual=True, **arguments)
    bias = 0.5 if "bias" in arguments else 0.0
    expected, expected_lse = reference(query, key, value, live, bias)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_masked_pairs_are_gone(name, blocks):
    arguments, live = CASES[name]
    query, key, value = random_inputs()
    live = np.broadcast_to(live, (2, 2, 6, 7))
    masked_keys = ~live.any((1, 2))[..., None, None]
    masked_queries = ~live.any((1, 3))[..., None, None]
    arguments = dict(arguments)
    bias = jnp.broadcast_to(jnp.where(arguments.pop("bias", 0.0) == -jnp.inf, -jnp.inf, 0.3), (2, 2, 6, 7))
    if "bias" in name:  # a bias of -inf is the mask itself: no garbage there
        masked = {0: masked_queries, 1: masked_keys, 2: masked_keys}
        fn = lambda q, k, v: attention(q, k, v, bias, **arguments)  # noqa: E731
        assert_mask_safe(fn, query, key, value, masked=masked, transforms=("jit",))
        return
    masked = {0: masked_queries, 1: masked_keys, 2: masked_keys, 3: ~live}
    fn = lambda q, k, v, b: attention(q, k, v, b, return_residual=True, **arguments)[0]  # noqa: E731
    assert_mask_safe(fn, query, key, value, bias, masked=masked, transforms=("jit",))
