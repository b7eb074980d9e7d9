"""Inputs, masks and a float64 reference for the tests of dot_product_attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from comparisons import assert_close

import masksafe

attention = masksafe.dot_product_attention


def shrink_blocks(choose, size=4, **others):
    tiles = dict(query_tile=size, key_tile=size, key_tile_if_nothing_is_skipped=size, fewest_queries=size)
    of_rows = dict(row_tile_logits_of_derivatives=8 * size, skipping_row_tile_logits=4 * size, alignment=1)
    others = dict(most_weights_kept=0) | of_rows | others
    choose(attention=tiles | dict(in_turn_logits_of_one=1, in_turn_logits_of_all=1) | others)


def decode_always(choose):
    """All calls as decoding, in blocks of a few keys; and the reverse pass sample by sample."""
    few = dict(few_queries=2**20, fewest_keys_of_few_queries=1, key_block_elements=16, most_weights_kept=0)
    choose(attention=dict(in_turn_logits_of_all=1, reverse_at_once_logits=1) | few)


def by_rows(choose):
    """The form for an accelerator, in tiles of few queries of one sample and head."""
    choose(form="accelerator", attention=dict(row_tile_logits=21, skipping_row_tile_logits=16, alignment=2))


def assert_alike_where_finite(actual, expected, tolerance=2e-5):
    """Both have NaN in the same places."""
    jax.tree.map(lambda a, e: np.testing.assert_array_equal(np.isnan(a), np.isnan(e)), actual, expected)
    assert_close(*(jax.tree.map(lambda x: np.where(np.isnan(x), 0, x), tree) for tree in (actual, expected)), tolerance)


def normals(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def random_inputs(B=2, T=6, S=7, N=2, K=1, H=4, width=None, dtype=np.float32, seed=0):
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, width or H)
    return tuple(normals(*shape, seed=(seed, i), dtype=dtype) for i, shape in enumerate(shapes))


def with_low_logsumexps(query, key, value):
    """The inputs, with which all logits are about -120: exp(-logsumexp) overflows."""
    low = -120 * query.shape[-1] ** 0.5
    return query.at[..., 0].set(1), key.at[..., 0].set(low), value


def hidden_by(live, key_heads=1):
    """Which elements of the query, the key and the value are masked, where `live` has the pairs `[B, N, T, S]`."""
    seen = live.reshape(len(live), key_heads, -1, *live.shape[2:]).any((2, 3)).transpose(0, 2, 1)[..., None]
    return ~live.any(3).transpose(0, 2, 1)[..., None], ~seen, ~seen


def poisoned(inputs, live, garbage):
    hidden = hidden_by(live, inputs[1].shape[2])
    return tuple(np.where(h, np.asarray(garbage, x.dtype), x) for x, h in zip(inputs, hidden, strict=True))


def replaced(x, index, value):
    """A copy of an array with another value at an index."""
    x = np.array(x)
    x[index] = value
    return x


def with_gradients(fn):
    """The jitted function of arguments, cotangents of the outputs and, as a dictionary, of what has no gradient.

    It returns the outputs and the gradients with respect to all arguments.
    """

    @jax.jit
    def run(args, cotangents, rest=None):
        outputs, reverse = jax.vjp(lambda *args: fn(*args, **rest or {}), *args)
        return outputs, reverse(cotangents)

    return run


def inner_jaxprs(equation):
    """The programs within an equation, such as the body of a loop."""
    for x in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
        x = getattr(x, "jaxpr", x)
        if hasattr(x, "eqns"):
            yield x


# The reference: float64, pair by pair. `live`, `bias` and `factors` broadcast to [B, N, T, S].


def exact(query, key, value, live=True, bias=0.0, scale=None, soft_cap=None, factors=1.0, d_out=None, d_lse=0.0):
    """Output and logsumexp, and with the cotangents [B, T, N, width] and [B, T, N] a dictionary of gradients.

    `factors` are those with which dropout multiplies the weights.
    """
    q, k, v = (np.asarray(a, np.float64) for a in (query, key, value))
    groups = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, groups, 2), np.repeat(v, groups, 2)
    scale = q.shape[-1] ** -0.5 if scale is None else np.float64(scale)
    dots = np.einsum("btnh,bsnh->bnts", q, k)
    cap = 1e300 if soft_cap is None else soft_cap
    capped = scale * dots if soft_cap is None else cap * np.tanh(scale * dots / cap)
    live = np.broadcast_to(live, dots.shape)
    x = np.where(live, capped + np.asarray(bias, np.float64), -np.inf)
    largest = np.where(live.any(-1, keepdims=True), x.max(-1, keepdims=True, initial=-np.inf), 0)
    exps = np.exp(x - largest)
    total = exps.sum(-1, keepdims=True)
    p = exps / np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        lse = largest + np.log(total)
    outputs = np.einsum("bnts,bsnh->btnh", factors * p, v), np.moveaxis(lse[..., 0], 1, 2)
    if d_out is None:
        return outputs

    w = np.asarray(d_out, np.float64)
    d_p = factors * np.einsum("btnh,bsnh->bnts", w, v)
    d_lse = np.moveaxis(np.broadcast_to(np.float64(d_lse), w.shape[:3]), 2, 1)[..., None]
    d_x = p * (d_p - (p * d_p).sum(-1, keepdims=True) + d_lse)
    d_scaled = d_x * (1 - (capped / cap) ** 2)

    def by_key_head(x):
        return x.reshape(*x.shape[:2], -1, groups, x.shape[3]).sum(3)

    return outputs, {
        "query": scale * np.einsum("bnts,bsnh->btnh", d_scaled, k),
        "key": by_key_head(scale * np.einsum("bnts,btnh->bsnh", d_scaled, q)),
        "value": by_key_head(np.einsum("bnts,btnh->bsnh", factors * p, w)),
        "bias": d_x,
        "scale": (d_scaled * dots).sum(),
    }


# Structural masks, as the pairs that they allow.


def causal(T, S, offset=0):
    return np.arange(S) <= np.arange(T)[:, None] + offset


def window(T, S, left, right):
    return (np.arange(S) >= np.arange(T)[:, None] - left) & (np.arange(S) <= np.arange(T)[:, None] + right)


def below(lengths, size):
    """As booleans `[batch, size]`."""
    return np.arange(size) < np.array(lengths)[:, None]


QUERY = np.arange(6)[:, None]
OF_SAMPLES = np.int32([2, 5])


def cases_of(S):
    """Masks of six queries and up to eight keys, of two samples and heads: arguments, and the pairs they allow."""
    of_keys = np.array([[1, 1, 0, 1, 0, 0, 0, 1], [0] * 8], bool)[:, None, None, :S]
    pairs = replaced(np.random.default_rng(0).random((2, 2, 6, S)) < 0.4, (0, 1, 2), False)
    left_padded = (np.arange(S) >= np.array([[3], [1]]))[:, None, None]
    ids = np.array([[0, 0, 1, 1, 1, 7], [3, 3, 3, 2, 2, 2]])
    key_ids = np.array([[0, 1, 1, 1, 2, 2, 2, 0], [2, 2, 3, 2, 2, 2, 2, 3]])[:, :S]
    segments = dict(query_segment_ids=ids, key_value_segment_ids=key_ids)
    in_segment = ids[:, None, :, None] == key_ids[:, None, None]
    lengths = dict(query_seq_lengths=np.array([6, 3]), key_value_seq_lengths=np.array([6, 4]))
    in_lengths = below([6, 3], 6)[:, None, :, None] & below([6, 4], S)[:, None, None]
    offsets = np.stack([causal(6, S, 1), causal(6, S, -2)])[:, None]
    return over_all_pairs(
        {
            "causal": (dict(is_causal=True), causal(6, S)),
            "causal, aligned at the end": (dict(is_causal=True, causal_offset=1), causal(6, S, 1)),
            "causal, dead rows": (dict(is_causal=True, causal_offset=-2), causal(6, S, -2)),
            "window": (dict(local_window_size=(2, 1)), window(6, S, 2, 1)),
            "window, behind the keys for the last queries": (dict(local_window_size=(-3, 4)), window(6, S, -3, 4)),
            "key lengths": (dict(key_value_seq_lengths=np.array([5, 0])), below([5, 0], S)[:, None, None, :]),
            "query lengths": (dict(query_seq_lengths=np.array([2, 9])), below([2, 9], 6)[:, None, :, None]),
            "segments": (segments, in_segment),
            "keys of every sample": (dict(mask=of_keys), of_keys),
            "pairs": (dict(mask=pairs), pairs),
            "bias of -inf": (dict(bias=np.where(causal(6, S, -1), np.float32(0.5), -np.inf)), causal(6, S, -1)),
            "causal and left padding": (dict(is_causal=True, mask=left_padded), causal(6, S) & left_padded),
            "causal, lengths": (dict(is_causal=True, **lengths), causal(6, S) & in_lengths),
            "causal, segments, lengths": (
                dict(is_causal=True, **segments, **lengths),
                causal(6, S) & in_segment & in_lengths,
            ),
            "causal, offsets of samples": (dict(is_causal=True, causal_offset=np.array([1, -2])), offsets),
            "window and keys": (dict(local_window_size=(1, 0), mask=of_keys), window(6, S, 1, 0) & of_keys),
        },
        S,
    )


def positions_and_mods(S):
    """The same, which no kernel of a library takes."""
    at = np.array([[5, 0, 3, 3, -2, 9], [0, 1, 2, 3, 4, 5]])
    key_at = np.array([[3, 7, -5, 0, 0, 4, 2, 9], [7, 6, 5, 4, 3, 2, 1, 0]])[:, :S]
    positions, key = dict(query_positions=at, key_positions=key_at), np.arange(S)
    behind, behind_first = at[:, None, :, None] - key_at[:, None, None], QUERY - key_at[:1]
    return over_all_pairs(
        {
            "positions": (dict(is_causal=True, **positions), behind >= 0),
            "positions, window": (dict(local_window_size=(2, 1), **positions), (behind <= 2) & (behind >= -1)),
            "positions and lengths": (
                dict(is_causal=True, **positions, query_seq_lengths=np.array([6, 3])),
                (behind >= 0) & below([6, 3], 6)[:, None, :, None],
            ),
            "positions of queries": (dict(is_causal=True, query_positions=at), at[:, None, :, None] >= key),
            "positions of keys, the same for all samples": (
                dict(is_causal=True, local_window_size=(3, 3), key_positions=key_at[:1]),
                (behind_first >= 0) & (behind_first <= 3),
            ),
            "mod, chunked": (dict(mask_mod=lambda b, h, q, k: q // 3 == k // 3), key // 3 == QUERY // 3),
            "mod of samples and heads": (
                dict(mask_mod=lambda b, h, q, k: (k < jnp.asarray(OF_SAMPLES)[b]) & ((q + k) % 2 == h)),
                (OF_SAMPLES[:, None, None, None] > key) & (np.arange(2)[:, None, None] == (QUERY + key) % 2),
            ),
            "mod of keys": (dict(mask_mod=lambda b, h, q, k: k != 4), key != 4),
            "mod of queries": (dict(mask_mod=lambda b, h, q, k: q > 1), QUERY > 1),
            "mod of nothing": (dict(mask_mod=lambda *_: jnp.asarray(False)), False),
        },
        S,
    )


def over_all_pairs(cases, S):
    return {name: (arguments, np.broadcast_to(live, (2, 2, 6, S))) for name, (arguments, live) in cases.items()}


CASES = cases_of(7)


# Other derivatives than those of a reverse pass.


def by_formula(live, query, key, value):
    """The output of attention as JAX differentiates it to any order: with no shift, so for small logits alone."""
    groups = query.shape[2] // key.shape[2]
    key, value = jnp.repeat(key, groups, 2), jnp.repeat(value, groups, 2)
    logits = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[3] ** -0.5
    exps = jnp.where(live, jnp.exp(logits), 0)
    total = jnp.moveaxis(exps.sum(-1), 1, 2)[..., None]
    return jnp.einsum("bnts,bsnh->btnh", exps, value) / jnp.where(total == 0, 1, total)


def loss(fn, *inputs):
    return jnp.sum(jnp.sin(fn(*inputs).astype(jnp.float32)))


def other_derivatives(fn, inputs, along):
    """Forward mode, forward over reverse, and reverse over reverse."""
    slope = jax.grad(functools.partial(loss, fn), (0, 1, 2))
    with masksafe.forward_mode():
        _, forward = jax.jvp(fn, inputs, along)
    return forward, jax.jvp(slope, inputs, along)[1], jax.vjp(slope, *inputs)[1](along)
