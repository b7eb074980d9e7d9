"""The user's functions of a pair: score_mod, mask_mod, and the ready-made masks."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import attention, exact, normals, random_inputs, replaced, with_gradients
from comparisons import assert_close
from jax.sharding import AxisType, PartitionSpec
from tiers import parametrize

from masksafe import attention_masks
from masksafe.attention import _attention

QUERY, KEY = np.arange(6)[:, None], np.arange(7)
COTANGENTS = normals(2, 6, 2, 4, seed=6), normals(2, 6, 2, seed=7)


# score_mod. That masked pairs never count, and that all derivatives are exact, is a row of the contract's table.


def test_a_bad_query_or_key_shows_whatever_the_function_returns(form):
    run = jax.jit(functools.partial(attention, is_causal=True, score_mod=lambda x, batch, head, q, k: 0.0 * k))
    query, key, value = random_inputs()
    sample, time, head, _ = np.indices((2, 6, 2, 4))
    out = run(replaced(query, (0, 2, 1, 0), np.nan), key, value)
    np.testing.assert_array_equal(np.isnan(out), (sample == 0) & (time == 2) & (head == 1))
    out = run(query, replaced(key, (1, 3, 0, 0), np.inf), value)
    np.testing.assert_array_equal(np.isnan(out), (sample == 1) & (time >= 3))


def test_a_function_is_traced_once_and_compiled_once():
    calls, inputs = [], random_inputs()

    def attend(slopes):
        def mod(x, batch, head, q, k):
            calls.append((x.shape, x.dtype, q.dtype))
            return x + slopes[head] * (k - q)

        return attention(*inputs, score_mod=mod)

    first = attend(jnp.array([1.0, 2.0]))
    before = _attention.attend._cache_size()
    second = attend(jnp.array([3.0, 4.0]))
    assert calls == [((), jnp.float32, jnp.int32)] * 2
    assert _attention.attend._cache_size() == before
    assert np.abs(first - second).max() > 1e-3


@parametrize("wrap", [jax.jit], exhaustive=[lambda fn: jax.checkpoint(jax.jit(fn))], ids=["jit", "remat"])
def test_functions_that_read_alike_but_hold_other_constants_are_told_apart(wrap):
    query, key, value = random_inputs()
    outs = []
    for factor in (1.0, 2.0):
        table = np.full(7, factor, np.float32)
        inner = wrap(lambda k, table=table: jnp.asarray(table)[k])
        outs.append(attention(query, key, value, score_mod=lambda x, b, h, q, k, inner=inner: x * inner(k)))
    expected = [exact(query, key, value, scale=0.5 * factor)[0] for factor in (1.0, 2.0)]
    assert_close(outs, expected)


@pytest.mark.exhaustive
def test_functions_that_differ_in_what_is_not_shown_are_told_apart():
    """A rule of derivatives."""
    query, key, value = random_inputs()

    def with_rule(factor):
        fn = jax.custom_vjp(lambda x: x)
        fn.defvjp(lambda x: (x, None), lambda _, d: (factor * d,))
        return lambda x, *_: fn(x)

    def gradient(mod):
        return jax.grad(lambda query: jnp.sum(attention(query, key, value, score_mod=mod) ** 2))(query)

    np.testing.assert_allclose(gradient(with_rule(3.0)), 3 * gradient(with_rule(1.0)), rtol=1e-5)


def test_functions_get_positions_and_the_index_of_a_sample_in_any_batch(form):
    query, key, value = (x.reshape(1, 2, *x.shape[1:]) for x in random_inputs())
    positions = np.array([[4, 0, 3, 3, -2, 9], [0, 1, 2, 3, 4, 5]])[None], np.array([3, 7, -5, 0, 0, 4, 2])
    of_sample = np.float32([1.0, -2.0])
    out = attention(
        query,
        key,
        value,
        query_positions=positions[0],
        key_positions=positions[1][None, None],
        score_mod=lambda x, b, h, q, k: x + jnp.asarray(of_sample)[b] * (q - k),
        mask_mod=attention_masks.causal,
    )
    distance = (positions[0][0][:, None, :, None] - positions[1]).astype(np.float32)
    bias = of_sample[:, None, None, None] * distance
    assert_close(out[0], exact(query[0], key[0], value[0], distance >= 0, bias)[0])


# The ready-made masks.


def behind_first(batch, head, query, key):
    return key > 1


READY_MADE = [
    (attention_masks.causal, KEY <= QUERY),
    (attention_masks.window(2, 1), (QUERY - KEY <= 2) & (KEY - QUERY <= 1)),
    (attention_masks.chunked(3), QUERY // 3 == KEY // 3),
    (attention_masks.prefix(2), np.broadcast_to(KEY < 2, (6, 7))),
    (attention_masks.prefix(np.array([1, 4])), np.array([[[1]], [[4]]]) > KEY),
    (attention_masks.causal & attention_masks.chunked(2), (KEY <= QUERY) & (QUERY // 2 == KEY // 2)),
    (attention_masks.causal | attention_masks.prefix(3), (KEY <= QUERY) | (KEY < 3)),
    (~attention_masks.causal, KEY > QUERY),
    (behind_first & attention_masks.causal, (KEY <= QUERY) & (KEY > 1)),
]


def test_ready_made_masks():
    for mask, live in READY_MADE:
        live = np.broadcast_to(live[:, None] if live.ndim == 3 else live, (2, 2, 6, 7))
        actual = mask(*map(jnp.asarray, np.indices(live.shape)))
        np.testing.assert_array_equal(np.broadcast_to(actual, live.shape), live)


# In JAX's transformations.


def in_shard_map(fn, **arguments):
    mesh = jax.make_mesh((2,), ("batch",), axis_types=(AxisType.Auto,))
    rows = PartitionSpec("batch")
    return jax.shard_map(fn, mesh=mesh, in_specs=(rows, rows, rows), out_specs=rows, **arguments)


def random_slopes(x, batch, head, q, k):
    return x + jax.random.uniform(jax.random.fold_in(jax.random.key(0), head), ()) * q


@parametrize("mod", [lambda *_: 1.0], exhaustive=[random_slopes], ids=["constant", "random"])
def test_constants_and_random_numbers_in_shard_map(mod):
    fn, inputs = functools.partial(attention, score_mod=mod), random_inputs()
    assert_close(with_gradients(in_shard_map(fn))(inputs, COTANGENTS[0]), with_gradients(fn)(inputs, COTANGENTS[0]))


ABOVE_0 = functools.partial(attention, score_mod=lambda x, *_: jax.nn.relu(x))


def test_what_shard_map_cannot_check_is_refused_with_a_way_out():
    with pytest.raises(ValueError, match=r"score_mod or mask_mod: got a function with \w+; .* check_vma=False"):
        jax.eval_shape(with_gradients(in_shard_map(ABOVE_0)), random_inputs(), COTANGENTS[0])
    jax.eval_shape(with_gradients(in_shard_map(ABOVE_0, check_vma=False)), random_inputs(), COTANGENTS[0])


BAD_MASKS = [
    (lambda: attention_masks.window(None), r"attention_masks.window: left and right: got value \(None, 0\)"),
    (lambda: attention_masks.chunked(2.5), "attention_masks.chunked: size: got dtype float32"),
    (lambda: attention_masks.prefix(2.5), "attention_masks.prefix: length: got dtype float32"),
    (lambda: attention_masks.AttentionMask(3), "AttentionMask: allows: got type int"),
    (lambda: attention_masks.window(True), "attention_masks.window: left and right: got value"),
    (lambda: attention_masks.window(-1), r"value \(-1, 0\).* -1 does not mean a window"),
    (lambda: attention_masks.chunked(np.array(0)), "attention_masks.chunked: size: got value 0"),
    (lambda: attention_masks.chunked(np.ones(2, int)), r"size: got shape \(2,\); expected one"),
    (lambda: attention_masks.prefix(np.array([2, -3])), "prefix: length: got value"),
    (lambda: attention_masks.prefix(np.ones((2, 2), int)), r"length: got shape \(2, 2\)"),
    (lambda: attention_masks.causal or attention_masks.prefix(3), r"Use \| and & and ~ in place of or, and, not"),
    (lambda: not attention_masks.causal, "AttentionMask: a mask is neither true nor false"),
    (lambda: attention_masks.causal & 3, "unsupported operand"),
]


@pytest.mark.parametrize("case", BAD_MASKS)
def test_bad_masks_are_refused(case):
    make, text = case
    with pytest.raises((TypeError, ValueError), match=text):
        make()


def test_masks_are_equal_by_what_they_hold_and_can_be_pickled():
    masks = [mask for mask, _ in READY_MADE]
    for mask in masks:
        again = pickle.loads(pickle.dumps(mask))
        assert again == mask
        assert hash(again) == hash(mask)
    assert len(set(masks)) == len(masks)
    causal, window = attention_masks.causal, attention_masks.window
    assert causal != behind_first
    for one, other in (
        (attention_masks.prefix(3), attention_masks.chunked(3)),
        (causal & window(2), causal | window(2)),
        (window(2), window(1, 1)),
        (causal, ~causal),
    ):
        assert one != other
        assert jax.tree.structure(one) != jax.tree.structure(other)
    # Arrays are arguments of one program.
    assert attention_masks.chunked(2) != attention_masks.chunked(3)
    assert attention_masks.prefix(np.array([3, 4])) != attention_masks.prefix(np.array([3, 5]))


def test_a_ready_made_mask_goes_through_jit_and_is_traced_once_whatever_its_arrays(monkeypatch):
    inputs, traced = random_inputs(), []
    mask_of = lambda *lengths: attention_masks.causal | attention_masks.prefix(jnp.array(lengths))  # noqa: E731
    attend = lambda mask: attention(*inputs, mask_mod=mask)  # noqa: E731
    assert_close(jax.jit(attend)(mask_of(1, 4)), attend(mask_of(1, 4)))
    monkeypatch.setattr(attention_masks.Prefix, "__call__", lambda *args: traced.append(args))
    live = (KEY <= QUERY) | (np.array([3, 5])[:, None, None, None] > KEY)
    assert_close(attend(mask_of(3, 5)), exact(*inputs, live)[0])
    assert not traced


def test_mask_of_a_function_that_cannot_be_hashed_is_equal_to_itself_alone():
    class Function:
        __hash__ = None

        def __call__(self, *pair):
            return True

    mask = attention_masks.AttentionMask(Function())
    assert mask == mask
    assert hash(mask) == hash(mask)
    assert mask != attention_masks.AttentionMask(Function())
