"""The contract of dot_product_attention, on one block and on many."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import masksafe
from masksafe._core import platforms
from masksafe.testing import assert_mask_safe

attention = masksafe.dot_product_attention


@pytest.fixture(params=["many blocks", pytest.param("one block", marks=pytest.mark.slow)])
def blocks(request, monkeypatch):
    """Once with one block for everything, and once with blocks of a few queries and keys, of ragged sizes."""
    if request.param == "many blocks":
        shrink_blocks(monkeypatch)
    return request.param


@pytest.fixture
def many_blocks(monkeypatch):
    shrink_blocks(monkeypatch)


def shrink_blocks(monkeypatch, size=4):
    # The sizes of blocks are in the key of the compilation cache, so that programs for others are not found.
    for name in ("QUERY_TILE", "KEY_TILE", "KEY_TILE_IF_NOTHING_IS_SKIPPED", "FEWEST_QUERIES"):
        monkeypatch.setattr(platforms, name, size)
    for name in ("IN_TURN_LOGITS_OF_ONE", "IN_TURN_LOGITS_OF_ALL"):
        monkeypatch.setattr(platforms, name, 1)


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


def few_of(values, *kept):
    """All values as parameters, those that are not kept marked as slow: each compiles programs for seconds."""
    return [v if v in kept else pytest.param(v, marks=pytest.mark.slow) for v in values]


@pytest.mark.parametrize("name", CASES)
def test_one_block_equals_float64_reference(name):
    test_equals_float64_reference(name, None)


@pytest.mark.parametrize("name", CASES)
def test_equals_float64_reference(name, blocks):
    arguments, live = CASES[name]
    query, key, value = random_inputs()
    out, lse = attention(query, key, value, return_residual=True, **arguments)
    bias = 0.5 if "bias" in arguments else 0.0
    expected, expected_lse = reference(query, key, value, live, bias)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", few_of(CASES, "causal, dead rows", "segments", "pairs"))
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
    else:
        masked = {0: masked_queries, 1: masked_keys, 2: masked_keys, 3: ~live}
        fn = lambda q, k, v, b: attention(q, k, v, b, return_residual=True, **arguments)[0]  # noqa: E731
        assert_mask_safe(fn, query, key, value, bias, masked=masked, transforms=("jit",))


@pytest.mark.parametrize("name", few_of(["causal", "keys of every sample", "segments"], "keys of every sample"))
def test_masked_pairs_are_gone_under_vmap_and_eagerly(name):
    arguments, live = CASES[name]
    query, key, value = random_inputs()
    masked_keys = ~np.broadcast_to(live, (2, 2, 6, 7)).any((1, 2))[..., None, None]
    fn = lambda q, k, v: attention(q, k, v, **arguments)  # noqa: E731
    assert_mask_safe(fn, query, key, value, masked={1: masked_keys, 2: masked_keys}, transforms=("eager", "vmap"))


@hypothesis.settings(max_examples=6)
@hypothesis.given(st.data())
def test_masking_equals_removal(data):
    T, S, K = (data.draw(st.integers(1, 9), label=name) for name in ("T", "S", "K"))
    N = K * data.draw(st.integers(1, 3), label="group")
    query, key, value = random_inputs(1, T, S, N, K, seed=data.draw(st.integers(0, 9), label="seed"))
    kept = np.array(data.draw(st.lists(st.booleans(), min_size=S, max_size=S), label="kept"))
    garbage = jnp.where(kept[:, None, None], 0, jnp.nan)
    out = attention(query, key + garbage, value + garbage, mask=jnp.asarray(kept)[None, None, None])
    expected = attention(query, key[:, kept], value[:, kept])
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_masked_large_numbers_and_a_soft_cap(blocks):
    """The product with a masked key is inf - inf, whose tanh has no derivative."""
    query = jnp.broadcast_to(jnp.array([9.0, -9, 9, 9]), (2, 6, 2, 4))
    _, key, value = random_inputs()
    masked = (jnp.arange(7) == 3)[:, None, None]
    mask = jnp.arange(7) != 3
    fn = lambda q, k, v: attention(q, k, v, mask=mask, logit_soft_cap=5.0)  # noqa: E731
    large = jnp.where(masked, jnp.array([1e38, 1e38, -1e38, 1e38]), key)
    for loss in (
        lambda *a: jnp.sum(fn(*a) ** 2),
        lambda *a: jnp.sum(jax.grad(lambda q: jnp.sum(fn(q, *a[1:]) ** 2))(a[0]) ** 2),
    ):
        for a, b in zip(
            jax.grad(loss, (0, 1, 2))(query, large, value), jax.grad(loss, (0, 1, 2))(query, key, value), strict=True
        ):
            np.testing.assert_array_equal(a, b)
    with masksafe.forward_mode():
        out = [jax.jvp(lambda q, k=k: fn(q, k, value), (query,), (query,))[1] for k in (large, key)]
    np.testing.assert_array_equal(*out)


def test_a_cotangent_of_one_column_meets_no_nan_of_another(blocks):
    query, key, value = random_inputs()
    loss = lambda q, k, v: jnp.sum(attention(q, k, v)[..., 0] ** 2)  # noqa: E731
    for gradient in jax.grad(loss, (0, 1))(query, key, value.at[0, 2, 0, 1].set(jnp.nan)):
        assert np.isfinite(gradient).all()


def test_16_bit_gradients_are_as_good_as_those_of_jax_nn(blocks):
    query, key, value = (x.astype(jnp.bfloat16) for x in random_inputs(1, 64, 64, 1, 1, 32))
    key, value = key + 3, value + 30
    weights = jax.random.normal(jax.random.key(7), query.shape)
    grad = lambda fn, dtype: jax.grad(  # noqa: E731
        lambda *args: jnp.sum(fn(*args).astype(jnp.float32) * weights), (0, 1, 2)
    )(*(x.astype(dtype) for x in (query, key, value)))
    exact = grad(jax.nn.dot_product_attention, jnp.float32)
    for ours, theirs, reference in zip(
        grad(attention, jnp.bfloat16), grad(jax.nn.dot_product_attention, jnp.bfloat16), exact, strict=True
    ):
        error = lambda x, e=reference: float(jnp.abs(x.astype(jnp.float32) - e).max())  # noqa: E731
        assert error(ours) <= 1.1 * error(theirs)


LOWEST = float(jnp.finfo(jnp.float32).min)
DEAD = {
    "a window that ends in front of the keys": dict(local_window_size=(1, 0)),
    "no keys": dict(key_value_seq_lengths=jnp.array([0])),
    "a mask": dict(mask=jnp.zeros((1, 1, 6, 3), bool)),
    "a bias of -inf": dict(bias=jnp.full((6, 3), -jnp.inf)),
    "two lowest numbers added": dict(bias=jnp.full((6, 3), LOWEST) + jnp.full((6, 3), LOWEST)),
}


@pytest.mark.parametrize("name", few_of(DEAD, *list(DEAD)[:2]))
def test_dead_queries_are_zero_with_zero_gradients(name, blocks):
    query, key, value = random_inputs(1, 6, 3)
    run = lambda *args: attention(*args, return_residual=True, **DEAD[name])  # noqa: E731
    out, lse = run(query, key, value)
    is_dead = np.arange(6) >= (4 if "window" in name else 0)  # query 4 sees the keys 3 and 4 at most
    assert (out[0, is_dead] == 0).all()
    assert (lse[0, is_dead] == -jnp.inf).all()
    d_query, *_ = jax.grad(lambda *args: jnp.sum(run(*args)[0] ** 2), (0, 1, 2))(query, key, value)
    assert (d_query[0, is_dead] == 0).all()
    second = jax.grad(lambda q: jnp.sum(jax.grad(lambda q: jnp.sum(run(q, key, value)[0] ** 2))(q) ** 2))(query)
    assert (second[0, is_dead] == 0).all()


# What is not masked is not hidden.


def patterns(fn, *args):
    """Where the outputs and the gradients of their sum of squares are NaN."""
    value = fn(*args)
    gradients = jax.grad(lambda *args: jnp.sum(fn(*args) ** 2), range(len(args)))(*args)
    return tuple(np.isnan(x) for x in (value, *gradients))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_bad_value_shows_in_its_column_of_the_queries_that_see_it(bad, blocks):
    query, key, value = random_inputs(1, 6, 6, 1)
    in_out, in_query, in_key, in_value = patterns(
        functools.partial(attention, is_causal=True), query, key, value.at[0, 3, 0, 1].set(bad)
    )
    np.testing.assert_array_equal(in_out[0, :, 0].any(1), np.arange(6) >= 3)
    assert not in_out[..., [0, 2, 3]].any()
    np.testing.assert_array_equal(in_query[0, :, 0].all(1), np.arange(6) >= 3)
    assert in_key.all()  # every key is seen by the last query
    np.testing.assert_array_equal(in_value[0, :, 0], np.broadcast_to(np.arange(4) == 1, (6, 4)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_bad_key_or_query_shows_in_its_segment_only(bad, blocks):
    query, key, value = random_inputs(1, 6, 6, 1)
    ids = jnp.array([[0, 0, 0, 1, 1, 1]])
    fn = functools.partial(attention, query_segment_ids=ids, key_value_segment_ids=ids)
    for pattern in patterns(fn, query, key.at[0, 4, 0, 0].set(bad), value):
        np.testing.assert_array_equal(pattern[0, :, 0].all(1), ids[0] == 1)
        np.testing.assert_array_equal(pattern[0, :, 0].any(1), ids[0] == 1)
    in_out, in_query, in_key, in_value = patterns(fn, query.at[0, 4, 0, 0].set(bad), key, value)
    for pattern in (in_out, in_query):
        np.testing.assert_array_equal(pattern[0, :, 0].any(1), np.arange(6) == 4)
    for pattern in (in_key, in_value):
        np.testing.assert_array_equal(pattern[0, :, 0].all(1), ids[0] == 1)
        np.testing.assert_array_equal(pattern[0, :, 0].any(1), ids[0] == 1)


def test_nan_bias_shows_in_its_row_only(blocks):
    query, key, value = random_inputs(1, 6, 7, 1)
    bias = jnp.zeros((1, 1, 6, 7)).at[0, 0, 2, 3].set(jnp.nan)
    out = attention(query, key, value, bias)
    np.testing.assert_array_equal(np.isnan(out[0, :, 0]).all(1), np.arange(6) == 2)


def test_padded_queries_need_no_mask_if_the_loss_has_one(blocks):
    query, key, value = random_inputs(1, 6, 7, 2, 2)
    real = np.arange(6) < 4

    def loss(query, key, value):
        out = attention(query, key, value, is_causal=True)
        return jnp.sum(jnp.where(real[None, :, None, None], out, 0) ** 2)

    expected = jax.grad(loss, (0, 1, 2))(query, key, value)
    gradients = jax.grad(loss, (0, 1, 2))(query.at[:, 4:].set(jnp.nan), key, value)
    for gradient, other in zip(gradients, expected, strict=True):
        np.testing.assert_array_equal(gradient, other)
    hessian = lambda q: jax.jvp(jax.grad(loss, (1, 2)), (q, key, value), (jnp.ones_like(q), key, value))[1]  # noqa: E731
    for product, other in zip(hessian(query.at[:, 4:].set(jnp.nan)), hessian(query), strict=True):
        np.testing.assert_allclose(product, other, rtol=1e-5, atol=1e-6)


def test_infinite_cotangent_of_a_dead_query_touches_nothing(blocks):
    query, key, value = random_inputs()
    loss = lambda q, k, v: jnp.sqrt(jnp.abs(attention(q, k, v, is_causal=True, causal_offset=-2))).sum()  # noqa: E731
    for gradient in jax.grad(loss, (0, 1, 2))(query, key, value):
        assert np.isfinite(gradient).all()


# More than jax.nn takes.


@pytest.mark.parametrize("width", few_of([1, 3, 9], 3))
def test_value_may_have_another_width(width, blocks):
    query, key, value = random_inputs(width=width)
    expected, _ = reference(query, key, value, True)
    np.testing.assert_allclose(attention(query, key, value), expected, rtol=1e-5, atol=1e-6)


def test_soft_cap_is_applied_in_front_of_the_bias(blocks):
    query, key, value = random_inputs()
    bias = jax.random.normal(jax.random.key(5), (6, 7))
    fn = functools.partial(attention, scale=3.0, logit_soft_cap=2.0)
    expected, _ = reference(query, key, value, True, bias, 3.0, 2.0)
    np.testing.assert_allclose(fn(query, key, value, bias), expected, rtol=1e-5, atol=1e-6)
    check_grads(fn, (query, key, value, bias), 1, ("rev",), rtol=2e-2)


@pytest.mark.parametrize("mask_batch", few_of([(3, 2), (1, 2), (3, 1), (1, 1), (2,), ()], (1, 2)), ids=str)
def test_extra_batch_dimensions(mask_batch, blocks):
    query, key, value = (x.reshape(3, 2, *x.shape[1:]) for x in random_inputs(6))
    mask = jax.random.bernoulli(jax.random.key(1), 0.5, (*mask_batch, 1, 6, 7))
    bias = jax.random.normal(jax.random.key(2), (2, 1, 1, 7))
    out, lse = attention(query, key, value, bias, mask, return_residual=True)
    assert lse.shape == (3, 2, 6, 2)
    full = jnp.broadcast_to(mask, (3, 2, 1, 6, 7)).reshape(6, 1, 6, 7), jnp.tile(bias, (3, 1, 1, 1))
    flat = [x.reshape(6, *x.shape[2:]) for x in (query, key, value)]
    expected, expected_lse = attention(*flat, full[1], full[0], return_residual=True)
    np.testing.assert_allclose(out.reshape(expected.shape), expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(lse.reshape(expected_lse.shape), expected_lse, rtol=1e-6)
    gradient = jax.grad(lambda bias: jnp.sum(attention(query, key, value, bias, mask) ** 2))(bias)
    other = jax.grad(lambda bias: jnp.sum(attention(*flat, bias, full[0]) ** 2))(full[1])
    np.testing.assert_allclose(gradient, other.reshape(3, 2, 1, 1, 7).sum(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("T", "S", "N"), [(0, 3, 2), (3, 0, 2), (0, 0, 2), (3, 4, 0)])
def test_empty_arrays(T, S, N):
    query, key, value = random_inputs(2, T, S, N, N, width=5)
    out, lse = attention(query, key, value, is_causal=True, return_residual=True)
    assert out.shape == (2, T, N, 5)
    assert lse.shape == (2, T, N)
    assert (out == 0).all()
    assert (lse == -jnp.inf).all()
    gradient = jax.grad(lambda q: attention(q, key, value).sum())(query)
    assert (gradient == 0).all()


def test_offset_may_differ_by_sample_and_be_traced(blocks):
    query, key, value = random_inputs(T=1)
    decode = jax.jit(lambda step: attention(query, key, value, is_causal=True, causal_offset=step))
    for steps in ([0, 6], [3, -1]):
        expected, _ = reference(query, key, value, (np.arange(7) <= np.array(steps)[:, None])[:, None, None])
        np.testing.assert_allclose(decode(jnp.array(steps)), expected, rtol=1e-5, atol=1e-6)


def test_gradient_of_an_array_scale(blocks):
    query, key, value = random_inputs()
    loss = lambda scale: jnp.sum(attention(query, key, value, scale=scale) ** 2)  # noqa: E731
    check_grads(loss, (jnp.float32(0.7),), 1, ("rev",), rtol=1e-2)
    np.testing.assert_allclose(attention(query, key, value, scale=jnp.float32(0.5)), attention(query, key, value))


def test_gradient_of_the_logsumexp(blocks):
    query, key, value = random_inputs()
    bias = jax.random.normal(jax.random.key(5), (2, 1, 6, 1))
    both = lambda *args: attention(*args, is_causal=True, return_residual=True)  # noqa: E731
    check_grads(both, (query, key, value, bias), 1, ("rev",), rtol=2e-2)


# Dropout.


def test_dropout_draws_the_same_weights_in_reverse(blocks):
    query, key, value = random_inputs()
    fn = functools.partial(attention, is_causal=True, dropout_rate=0.4, dropout_key=jax.random.key(3))
    check_grads(fn, (query, key, value), 1, ("rev",), rtol=2e-2)
    weights = fn(query, key[:, :, :1], jnp.broadcast_to(jnp.eye(7)[None, :, None], (2, 7, 1, 7)))
    undropped = attention(query, key, jnp.broadcast_to(jnp.eye(7)[None, :, None], (2, 7, 1, 7)), is_causal=True)
    kept = weights != 0
    np.testing.assert_allclose(weights[kept], undropped[kept] / 0.6, rtol=1e-5)


def test_dropout_keeps_the_mean():
    query, key, value = random_inputs(1, 64, 64, 4, 4)
    ones = jnp.ones_like(value)
    out = attention(query, key, ones, dropout_rate=0.25, dropout_key=jax.random.key(0))
    assert abs(float(out.mean()) - 1) < 0.02
    assert float(out.std()) > 0.02
    same = attention(query, key, ones, dropout_rate=0.25, dropout_key=jax.random.key(0))
    np.testing.assert_array_equal(out, same)
    assert (attention(query, key, ones, dropout_rate=0.25, dropout_key=jax.random.key(1)) != out).any()


# Precision.


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.bfloat16, 2**-8), (jnp.float16, 2**-11)])
def test_16_bit_inputs_are_rounded_once(dtype, tolerance, blocks):
    query, key, value = random_inputs(dtype=dtype, T=33, S=40, H=16)
    out, lse = attention(query, key, value, scale=0.3, return_residual=True)
    assert out.dtype == dtype
    assert lse.dtype == jnp.float32
    expected, expected_lse = reference(query, key, value, True, scale=0.3)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=tolerance, atol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5)
    gradient = jax.grad(lambda v: jnp.sum(attention(query, key, v).astype(jnp.float32)))(value)
    assert gradient.dtype == dtype


def test_float64(blocks):
    with jax.enable_x64(True):
        query, key, value = random_inputs(dtype=jnp.float64)
        out, lse = attention(query, key, value, return_residual=True)
        expected, expected_lse = reference(query, key, value, True)
        assert out.dtype == lse.dtype == jnp.float64
        np.testing.assert_allclose(out, expected, rtol=1e-13)
        np.testing.assert_allclose(lse, expected_lse, rtol=1e-13)
