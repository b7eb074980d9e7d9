"""Attention on the default GPU: cuDNN's kernel and XLA's, with garbage in everything that is masked."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    attention,
    below,
    causal,
    exact,
    hidden_by,
    normals,
    random_inputs,
    replaced,
    window,
    with_gradients,
    with_low_logsumexps,
)
from comparisons import assert_close, assert_same_bits

pytestmark = pytest.mark.gpu

B, T, N, K, H = 2, 128, 4, 2, 64
both_implementations = pytest.mark.parametrize("implementation", ["xla", "cudnn"])


# First what may be wrong on a GPU alone.


def assert_gradients(fn, inputs, d_out, live=True):
    """All are finite, and right but for the column of the large element, in which they are rounded."""
    out, gradients = jax.tree.map(np.float32, with_gradients(fn)(inputs, d_out))
    (expected, _), of_all = exact(*inputs, live, d_out=d_out)
    np.testing.assert_allclose(out, expected, rtol=2e-2, atol=2e-2)
    for actual, name in zip(gradients, ("query", "key", "value"), strict=True):
        assert np.isfinite(actual).all()
        right = of_all[name][..., 1:]
        np.testing.assert_allclose(actual[..., 1:], right, rtol=3e-2, atol=2e-2 * np.abs(right).max())


@both_implementations
@pytest.mark.parametrize("masks", ["mask", "bias"])
@pytest.mark.parametrize("keys", [64, 192])
def test_gradients_with_64_more_keys_than_a_multiple_of_128_and_a_low_logsumexp(keys, masks, implementation):
    inputs = with_low_logsumexps(*(jnp.asarray(x, jnp.bfloat16) for x in random_inputs(1, 64, keys, N, K, H)))
    live = np.random.default_rng(3).random((1, N, 64, keys)) < 0.7
    bias = jnp.asarray(np.where(live, 0, -np.inf), jnp.bfloat16)
    fn = functools.partial(attention, implementation=implementation, **{masks: live if masks == "mask" else bias})
    assert_gradients(fn, inputs, jnp.asarray(normals(1, 64, N, H, seed=9), jnp.bfloat16), live)


def test_gradients_of_one_query_with_a_low_logsumexp():
    inputs = with_low_logsumexps(*(jnp.asarray(x, jnp.bfloat16) for x in random_inputs(1, 1, 128, 2, 2, H)))
    assert_gradients(attention, inputs, jnp.asarray(normals(1, 1, 2, H, seed=9), jnp.bfloat16))
    with pytest.raises(ValueError, match="the number of queries or of keys is odd"):
        attention(*inputs, implementation="cudnn")


@pytest.mark.parametrize("length", [64, 256, 63, 32])
def test_a_nan_shows_in_gradients(length):
    fn = with_gradients(functools.partial(attention, implementation="xla"))
    inputs, d_out = random_inputs(1, length, length, 1, 1, 8), np.ones((1, length, 1, 8), np.float32)
    for operand, everywhere in ((0, (False, False, True, True)), (1, (True,) * 4), (2, (True,) * 4)):
        bad = replaced(inputs[operand], (0, 3, 0, 5), np.nan)
        out, gradients = fn((*inputs[:operand], bad, *inputs[operand + 1 :]), d_out)
        for array, is_all in zip((out, *gradients), everywhere, strict=True):
            rows = np.isnan(array[0, :, 0]).all(-1)
            np.testing.assert_array_equal(rows, (np.arange(length) == 3) | is_all)


# The contract.

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
each_case = pytest.mark.parametrize("case", CASES)


@functools.cache
def program_of(case, implementation):
    return with_gradients(functools.partial(attention, implementation=implementation, **CASES[case][0]))


ARGS = tuple(jnp.asarray(x, jnp.bfloat16) for x in random_inputs(B, T, T, N, K, H))
D_OUT = jnp.asarray(normals(B, T, N, H, seed=9), jnp.bfloat16)


def results(case, implementation, args=ARGS, d_out=D_OUT):
    return jax.tree.map(np.float32, program_of(case, implementation)(args, d_out))


@both_implementations
@each_case
def test_values_and_gradients_are_those_of_the_reference_whatever_is_masked(case, implementation):
    masked = hidden_by(CASES[case][1], K)
    out, gradients = results(case, implementation)
    (expected, _), derivatives = exact(*ARGS, CASES[case][1], d_out=D_OUT)
    np.testing.assert_allclose(out, expected, rtol=2e-2, atol=2e-2)
    for name, actual in zip(("query", "key", "value"), gradients, strict=True):
        largest = np.abs(derivatives[name]).max()
        np.testing.assert_allclose(actual, derivatives[name], rtol=3e-2, atol=1e-2 * largest)
    for bad in (np.nan, np.inf, -np.inf, 1e38):
        *dirty, d_out = (
            jnp.where(m, bad, x).astype(x.dtype) for m, x in zip((*masked, masked[0]), (*ARGS, D_OUT), strict=True)
        )
        new_out, new_gradients = results(case, implementation, tuple(dirty), d_out)
        assert_same_bits(new_out, out)
        for new, old, gone in zip(new_gradients, gradients, masked, strict=True):
            np.testing.assert_allclose(new, old, rtol=1e-2, atol=1e-2)  # cuDNN adds them up in any order
            assert (np.where(gone, new, 0) == 0).all()


@both_implementations
@each_case
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_what_is_bad_shows_where_it_is_seen(case, implementation, bad):
    live, (out, _) = CASES[case][1], results(case, implementation)
    for operand, place in ((0, 40), (1, 30), (2, 30)):
        dirty = list(ARGS)
        dirty[operand] = ARGS[operand].at[0, place, 0, 3].set(bad)
        sees = np.zeros((B, T, N), bool)
        if operand == 0:
            sees[0, place, 0] = live[0, 0, place].any()
        else:
            sees[0, :, : N // K] = live[0, : N // K, :, place].T
        new, _ = results(case, implementation, tuple(dirty))
        assert np.isnan(new[sees]).any(-1).all()
        assert_same_bits(new[~sees], out[~sees])


@pytest.mark.parametrize("in_axes", [(None, 2, 1), (1, None, None), (1, 0, 3)], ids=str)
def test_vmap_and_derivatives_of_cudnn(in_axes):
    """CuDNN takes a batch in front alone, and has no second derivatives."""
    attend = functools.partial(attention, is_causal=True, implementation="cudnn")
    batched = [x if axis is None else jnp.stack([x, 2 * x], axis) for x, axis in zip(ARGS, in_axes, strict=True)]
    step = lambda *args: with_gradients(attend)(args, D_OUT)  # noqa: E731
    value, together = jax.vmap(attend, in_axes)(*batched), jax.vmap(step, in_axes)(*batched)
    for n in range(2):
        each = [x if axis is None else jnp.take(x, n, axis) for x, axis in zip(batched, in_axes, strict=True)]
        assert_close(value[n], attend(*each), 2e-2)
        assert_close([x[n] for x in jax.tree.leaves(together)], step(*each), 3e-2)
    gradient = jax.grad(lambda q: jnp.sum(attend(q, *ARGS[1:]).astype(jnp.float32)))
    assert np.isfinite(np.float32(jax.jvp(gradient, ARGS[:1], ARGS[:1])[1])).all()
