"""Attention on the default GPU: cuDNN's kernel and XLA's, with garbage in everything that is masked."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import attention, below, causal, exact, normals, random_inputs, window
from comparisons import assert_same_bits

pytestmark = pytest.mark.gpu

B, T, N, K, H = 2, 128, 4, 2, 64
KEYS = np.random.default_rng(0).random((B, 1, 1, T)) < 0.6
KEYS[1] = False
PAIRS = np.random.default_rng(1).random((B, N, T, T)) < 0.4
PAIRS[0, :, 3], PAIRS[:, :, :, 5] = False, False
IDS, LENGTHS = np.random.default_rng(2).integers(0, 4, (B, T)), np.array([90, 31])
KEY_IDS = np.where(IDS == 3, 9, IDS)  # which no query has
IN_SEGMENT = IDS[:, None, :, None] == KEY_IDS[:, None, None]
CASES = {
    "plain": ({}, True),
    "causal": (dict(is_causal=True), causal(T, T)),
    "window": (dict(local_window_size=(20, 0)), window(T, T, 20, 0)),
    "key lengths": (dict(key_value_seq_lengths=np.array([50, 0])), below([50, 0], T)[:, None, None]),
    "mask of keys": (dict(mask=KEYS), KEYS),
    "mask of pairs": (dict(mask=PAIRS), PAIRS),
    "segments": (dict(query_segment_ids=IDS, key_value_segment_ids=KEY_IDS), IN_SEGMENT),
    "causal, segments, lengths": (
        dict(is_causal=True, query_segment_ids=IDS, key_value_segment_ids=KEY_IDS, key_value_seq_lengths=LENGTHS),
        causal(T, T) & IN_SEGMENT & below(LENGTHS, T)[:, None, None],
    ),
    "causal, offset": (dict(is_causal=True, causal_offset=-7), causal(T, T, -7)),
    "two sides": (dict(local_window_size=(20, 9)), window(T, T, 20, 9)),
}
CASES = {name: (arguments, np.broadcast_to(live, (B, N, T, T))) for name, (arguments, live) in CASES.items()}
both_implementations = pytest.mark.parametrize("implementation", ["xla", "cudnn"])
each_case = pytest.mark.parametrize("case", CASES)
OPERANDS = ("query", "key", "value")


@functools.cache
def program_of(case, implementation):
    attend = functools.partial(attention, implementation=implementation, **CASES[case][0])

    @jax.jit
    def run(args, d_out):
        out, reverse = jax.vjp(attend, *args)
        return out, reverse(d_out)

    return run


def operands():
    return [jnp.asarray(x, jnp.bfloat16) for x in random_inputs(B, T, T, N, K, H)]


def as_numpy(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float32), tree)


def masked_of(live):
    """Which rows of the query, the key and the value take no part."""
    of_heads = live.reshape(B, K, N // K, T, T)
    of_keys = np.moveaxis(~of_heads.any((2, 3)), 1, 2)
    return np.moveaxis(~live.any(3), 1, 2), of_keys, of_keys


@both_implementations
@each_case
def test_values_and_gradients_are_those_of_the_reference(case, implementation):
    args, d_out = operands(), jnp.asarray(normals(B, T, N, H, seed=9), jnp.bfloat16)
    out, gradients = as_numpy(program_of(case, implementation)(args, d_out))
    (expected, _), derivatives = exact(*as_numpy(args), CASES[case][1], d_out=np.asarray(d_out, np.float32))
    np.testing.assert_allclose(out, expected, rtol=2e-2, atol=2e-2)
    for name, actual in zip(OPERANDS, gradients, strict=True):
        largest = np.abs(derivatives[name]).max()
        np.testing.assert_allclose(actual, derivatives[name], rtol=3e-2, atol=1e-2 * largest)


@both_implementations
@each_case
def test_garbage_changes_nothing(case, implementation):
    args, d_out = operands(), jnp.asarray(normals(B, T, N, H, seed=9), jnp.bfloat16)
    run, masked = program_of(case, implementation), masked_of(CASES[case][1])
    out, gradients = as_numpy(run(args, d_out))
    for bad in (np.nan, np.inf, -np.inf, 1e38):
        dirty = [jnp.where(m[..., None], bad, x).astype(x.dtype) for m, x in zip(masked, args, strict=True)]
        dirty_d_out = jnp.where(masked[0][..., None], bad, d_out).astype(d_out.dtype)
        new_out, new_gradients = as_numpy(run(dirty, dirty_d_out))
        assert_same_bits(new_out, out)
        for new, old, gone in zip(new_gradients, gradients, masked, strict=True):
            np.testing.assert_allclose(new, old, rtol=1e-2, atol=1e-2)  # cuDNN adds them up in any order
            assert (new[gone] == 0).all()


@both_implementations
@each_case
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_what_is_bad_shows_where_it_is_seen(case, implementation, bad):
    args, d_out = operands(), jnp.asarray(normals(B, T, N, H, seed=9), jnp.bfloat16)
    run, live = program_of(case, implementation), CASES[case][1]
    out = as_numpy(run(args, d_out)[0])
    for operand, place in ((0, 40), (1, 30), (2, 30)):
        dirty = list(args)
        dirty[operand] = args[operand].at[0, place, 0, 3].set(bad)
        sees = np.zeros((B, T, N), bool)
        if operand == 0:
            sees[0, place, 0] = live[0, 0, place].any()
        else:
            sees[0, :, : N // K] = live[0, : N // K, :, place].T
        new = as_numpy(run(dirty, d_out)[0])
        assert np.isnan(new[sees]).any(-1).all()
        assert_same_bits(new[~sees], out[~sees])
