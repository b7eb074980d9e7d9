"""The contract of dot_product_attention, on one block and on many."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    CASES,
    PAIRS,
    attention,
    below,
    causal,
    exact,
    few_of,
    normals,
    random_inputs,
    replaced,
    shrink_blocks,
    window,
    with_gradients,
)

import masksafe
from masksafe.testing import assert_mask_safe

# Inputs of size 1 in sums of a few products: float32 is wrong by 1e-7 each time it rounds.
close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-5)


def with_residual(**arguments):
    return functools.partial(attention, return_residual=True, **arguments)


def assert_gradients_are_exact(gradients, expected, names=("query", "key", "value")):
    for name, gradient in zip(names, gradients, strict=True):
        close(gradient, expected[name], err_msg=name)


# What is masked is gone, and what is not has the values and gradients of float64.

GARBAGE = [np.nan, np.inf, -np.inf, 3e38]  # with the last one a product of a query and a key is inf - inf


def filled(inputs, masked, garbage):
    return tuple(np.where(mask, np.float32(garbage), x) for x, mask in zip(inputs, masked, strict=True))


def masked_elements(live):
    """Of queries, keys, values and the bias, those that are in no unmasked pair."""
    of_queries, of_keys = ~live.any((1, 3))[..., None, None], ~live.any((1, 2))[..., None, None]
    return of_queries, of_keys, of_keys, ~live


def assert_masked_pairs_are_gone(run, live, rest=None, has_infinite_bias=False):
    """For a function made by `with_gradients`."""
    masked, bias = masked_elements(live), normals(*live.shape, seed=5)
    if has_infinite_bias:  # which is the mask itself: no garbage there
        masked, bias = (*masked[:3], False), np.where(live, bias, -np.inf)
    inputs = (*random_inputs(), bias)
    cotangents = normals(2, 6, 2, 4, seed=6), normals(2, 6, 2, seed=7)
    outputs, gradients = run(inputs, cotangents, rest)
    expected, expected_gradients = exact(*inputs[:3], live, bias, d_out=cotangents[0], d_lse=cotangents[1])
    for actual, value in zip(outputs, expected, strict=True):
        close(actual, value)
    assert_gradients_are_exact(gradients, expected_gradients, ("query", "key", "value", "bias"))
    dead = ~live.any(3).transpose(0, 2, 1)
    assert (np.asarray(outputs[0])[dead] == 0).all()
    assert (np.asarray(outputs[1])[dead] == -np.inf).all()
    for gradient, mask in zip(gradients, masked, strict=True):
        assert (np.asarray(gradient)[np.broadcast_to(mask, gradient.shape)] == 0).all()
    for garbage in GARBAGE:
        dirty = run(filled(inputs, masked, garbage), cotangents, rest)
        jax.tree.map(np.testing.assert_array_equal, dirty, (outputs, gradients))


# Each of these with others that mask nothing, so that one program does for all.
NO_MASKS = dict(
    causal_offset=np.array([7, 7]),
    key_value_seq_lengths=np.array([7, 7]),
    query_seq_lengths=np.array([6, 6]),
    query_segment_ids=np.zeros((2, 6), np.int32),
    key_value_segment_ids=np.zeros((2, 7), np.int32),
    mask=np.ones((2, 2, 6, 7), bool),
)
NO_PAIR = np.zeros((2, 2, 6, 7), bool)
OF_ONE_PROGRAM = {
    "causal": (dict(causal_offset=np.array([0, 0])), CASES["causal"][1]),
    "causal, samples apart": (
        dict(causal_offset=np.array([1, -2])),
        np.stack([CASES["causal, aligned at the end"][1][0], CASES["causal, dead rows"][1][0]]),
    ),
    "no keys": (dict(key_value_seq_lengths=np.array([0, 0])), NO_PAIR),
    "an empty mask": (dict(mask=NO_PAIR), NO_PAIR),
    "a bias of -inf everywhere": (dict(), NO_PAIR),
    "bias of -inf": (dict(), CASES["bias of -inf"][1]),
} | {name: CASES[name] for name in ("key lengths", "query lengths", "segments", "pairs")}


def test_masked_pairs_are_gone(many_blocks):
    run = with_gradients(functools.partial(attention, is_causal=True, return_residual=True))
    for name, (arguments, live) in OF_ONE_PROGRAM.items():
        print(name)  # shown if it fails
        assert_masked_pairs_are_gone(run, live, NO_MASKS | arguments, has_infinite_bias="bias" in name)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_masked_pairs_are_gone_with_no_other_masks(name, blocks):
    arguments, live = CASES[name]
    if has_infinite_bias := "bias" in arguments:
        arguments = {}
    run = with_gradients(functools.partial(attention, return_residual=True, **arguments))
    assert_masked_pairs_are_gone(run, live, has_infinite_bias=has_infinite_bias)


# All kinds of masks at once, and what takes no mask. Query 0 and query 5 see no key, key 6 is seen by no query.
ALL_KINDS = dict(
    mask=PAIRS | causal(6, 7),
    is_causal=True,
    local_window_size=(3, 1),
    key_value_seq_lengths=np.array([5, 4]),
    query_seq_lengths=np.array([5, 5]),
    query_segment_ids=np.array([[1, 2, 2, 2, 2, 2], [1, 2, 2, 2, 2, 3]]),
    key_value_segment_ids=np.array([[2, 2, 2, 2, 2, 2, 1], [2, 2, 2, 2, 2, 2, 1]]),
)
LIVE = (
    (PAIRS | causal(6, 7))
    & causal(6, 7)
    & window(6, 7, 3, 1)
    & below([5, 4], 7)[:, None, None, :]
    & below([5, 5], 6)[:, None, :, None]
    & (np.arange(6) > 0)[:, None]
)
STEP = 1e-4  # of central differences in float64: they are wrong by about its square


def slope(fn, at, along):
    """The derivative of a float64 function along a direction."""
    ahead, behind = (fn(*(np.float64(x) + sign * STEP * d for x, d in zip(at, along, strict=True))) for sign in (1, -1))
    return [(a - b) / (2 * STEP) for a, b in zip(ahead, behind, strict=True)]


def forward_over_reverse(fn, at, along):
    """Of the loss of which the tests of second order take the gradient."""
    return jax.jvp(jax.grad(lambda *args: jnp.sum(fn(*args) ** 2) / 2, range(len(at))), at, along)[1]


def reverse_over_reverse(fn, at, along):
    gradient = jax.grad(lambda *args: jnp.sum(fn(*args) ** 2) / 2, range(len(at)))
    return jax.vjp(gradient, *at)[1](along)


def forward(fn, at, along):
    with masksafe.forward_mode():
        return (jax.jvp(fn, at, along)[1],)


@pytest.mark.parametrize(
    ("derivative", "size"),
    [
        (forward_over_reverse, 512),
        (reverse_over_reverse, 512),
        (forward, 512),
        pytest.param(forward_over_reverse, 4, marks=pytest.mark.slow),
        pytest.param(reverse_over_reverse, 4, marks=pytest.mark.slow),
        pytest.param(forward, 4, marks=pytest.mark.slow),
    ],
)
def test_other_derivatives_are_exact_and_masked_pairs_are_gone(derivative, size, choose):
    shrink_blocks(choose, size)
    inputs = (*random_inputs(), normals(2, 2, 6, 7, seed=5))
    masked = masked_elements(LIVE)
    along = tuple(normals(*x.shape, seed=(i, 8)) for i, x in enumerate(inputs))
    # Nothing under the mask moves: for forward mode that is garbage like any other.
    along = tuple(np.where(mask, 0, x) for x, mask in zip(along, masked, strict=True))
    fn = functools.partial(attention, logit_soft_cap=4.0, **ALL_KINDS)
    run = jax.jit(functools.partial(derivative, fn))

    def values(query, key, value, bias):
        return (exact(query, key, value, LIVE, bias, soft_cap=4.0)[0],)

    def gradients(query, key, value, bias):
        (out,) = values(query, key, value, bias)
        return list(exact(query, key, value, LIVE, bias, soft_cap=4.0, d_out=out)[1].values())[:4]

    clean = run(inputs, along)
    expected = slope(values if derivative is forward else gradients, inputs, along)
    for actual, product in zip(clean, expected, strict=True):
        np.testing.assert_allclose(actual, product, rtol=1e-4, atol=1e-4)
    if derivative is not forward:
        for product, mask in zip(clean, masked, strict=True):
            assert (np.asarray(product)[np.broadcast_to(mask, product.shape)] == 0).all()
    for garbage in GARBAGE:
        jax.tree.map(np.testing.assert_array_equal, run(tuple(filled(inputs, masked, garbage)), along), clean)


@pytest.mark.slow
@pytest.mark.parametrize("transform", ["eager", "jit", "vmap"])
def test_masked_pairs_are_gone_however_it_is_run(transform):
    query, key, value = random_inputs()
    masked = dict(enumerate(masked_elements(LIVE)))
    fn = lambda q, k, v, b: attention(q, k, v, b, **ALL_KINDS)  # noqa: E731
    assert_mask_safe(fn, query, key, value, normals(2, 2, 6, 7), masked=masked, transforms=(transform,))


def test_masking_equals_removal(one_or_many_blocks):
    query, key, value = random_inputs(1)
    d_out = normals(1, 6, 2, 4, seed=6)
    run = with_gradients(attention)
    for seed in range(5):
        kept = np.random.default_rng(seed).random(7) < 0.5
        garbage = np.where(kept[:, None, None], np.float32(0), np.nan)
        out, (d_query, d_key, d_value) = run((query, key + garbage, value + garbage), d_out, dict(mask=kept))
        (expected, _), gradients = exact(query, key[:, kept], value[:, kept], d_out=d_out)
        close(out, expected)
        assert_gradients_are_exact((d_query, d_key[:, kept], d_value[:, kept]), gradients)


@pytest.mark.slow
@hypothesis.settings(max_examples=20)
@hypothesis.given(st.data())
def test_masking_equals_removal_for_all_sizes(data):
    T, S, K = (data.draw(st.integers(1, 9), label=name) for name in ("T", "S", "K"))
    N = K * data.draw(st.integers(1, 3), label="group")
    query, key, value = random_inputs(1, T, S, N, K, seed=data.draw(st.integers(0, 9), label="seed"))
    kept = np.array(data.draw(st.lists(st.booleans(), min_size=S, max_size=S), label="kept"))
    garbage = np.where(kept[:, None, None], np.float32(0), np.nan)
    out = attention(query, key + garbage, value + garbage, mask=kept)
    close(out, exact(query, key[:, kept], value[:, kept])[0])


# Queries that see no key.


def test_window_that_ends_in_front_of_the_keys(one_or_many_blocks):
    cotangents = normals(1, 6, 2, 4, seed=6), normals(1, 6, 2, seed=7)
    run = with_gradients(functools.partial(attention, local_window_size=(1, 0), return_residual=True))
    (out, lse), (d_query, d_key, _) = run(random_inputs(1, 6, 3), cotangents)
    is_dead = np.arange(6) >= 4  # query 3 sees key 2
    np.testing.assert_array_equal((out == 0).all((0, 2, 3)), is_dead)
    np.testing.assert_array_equal((lse == -np.inf).all((0, 2)), is_dead)
    np.testing.assert_array_equal((d_query == 0).all((0, 2, 3)), is_dead)
    assert np.any(d_key)


def test_infinite_cotangent_of_a_dead_query_touches_nothing():
    fn = lambda *args: jnp.sqrt(jnp.abs(attention(*args, is_causal=True, causal_offset=-2)))  # noqa: E731
    _, gradients = with_gradients(fn)(random_inputs(), np.ones((2, 6, 2, 4), np.float32))
    assert all(np.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize(("T", "S", "N"), [(0, 3, 2), (3, 0, 2), (0, 0, 2), (3, 4, 0)])
def test_empty_arrays(T, S, N):
    inputs = random_inputs(2, T, S, N, N, width=5)
    cotangents = normals(2, T, N, 5), normals(2, T, N)
    (out, lse), gradients = with_gradients(with_residual(is_causal=True))(inputs, cotangents)
    assert out.shape == (2, T, N, 5)
    assert lse.shape == (2, T, N)
    assert (out == 0).all()
    assert (lse == -jnp.inf).all()
    for gradient, x in zip(gradients, inputs, strict=True):
        assert gradient.shape == x.shape
        assert (gradient == 0).all()


# What is not masked is not hidden.


@functools.cache
def patterns_of(blocks):  # the argument is part of the key: the sizes of blocks are read when it is traced
    def fn(*args, ids, offset):
        segments = dict(query_segment_ids=ids, key_value_segment_ids=ids)
        return attention(*args, is_causal=True, causal_offset=offset, **segments) ** 2

    run = with_gradients(fn)

    def patterns(query, key, value, ids=(0,) * 6, offset=6):
        """Where output and gradients are NaN; `[6, 4]`, for one sample and head. So are then cotangents of outputs."""
        rest = dict(ids=np.array([ids]), offset=np.array(offset))
        out, gradients = run((query, key, value), normals(1, 6, 1, 4, seed=6), rest)
        return [np.isnan(x)[0, :, 0] for x in (out, *gradients)]

    return patterns


@pytest.mark.parametrize("bad", few_of([np.nan, np.inf, -np.inf], -np.inf))
def test_bad_value_shows_in_the_queries_that_see_it(bad, one_or_many_blocks):
    query, key, value = random_inputs(1, 6, 6, 1)
    value = replaced(value, (0, 3, 0, 1), bad)
    in_out, in_query, in_key, in_value = patterns_of(one_or_many_blocks)(query, key, value, offset=0)
    for pattern in (in_out, in_query):
        np.testing.assert_array_equal(pattern, np.broadcast_to((np.arange(6) >= 3)[:, None], (6, 4)))
    assert in_key.all()  # every key is seen by the last query
    assert in_value.all()
    _, lse = attention(query, key, value, is_causal=True, return_residual=True)
    np.testing.assert_array_equal(np.isnan(lse[0, :, 0]), np.arange(6) >= 3)


@pytest.mark.parametrize("bad", few_of([np.nan, np.inf, -np.inf], np.inf))
def test_bad_key_or_query_shows_in_its_segment_only(bad, one_or_many_blocks):
    query, key, value = random_inputs(1, 6, 6, 1)
    patterns = functools.partial(patterns_of(one_or_many_blocks), ids=[0, 0, 0, 1, 1, 1])
    segment, row = (np.broadcast_to(x[:, None], (6, 4)) for x in (np.arange(6) >= 3, np.arange(6) == 4))
    for pattern in patterns(query, replaced(key, (0, 4, 0, 0), bad), value):
        np.testing.assert_array_equal(pattern, segment)
    in_out, in_query, in_key, in_value = patterns(replaced(query, (0, 4, 0, 0), bad), key, value)
    for pattern in (in_out, in_query):
        np.testing.assert_array_equal(pattern, row)
    for pattern in (in_key, in_value):
        np.testing.assert_array_equal(pattern, segment)


def test_infinite_query_whose_logits_are_all_minus_infinity(one_or_many_blocks):
    query, key, value = random_inputs(1, 6, 6, 1)
    query, key = replaced(query, (0, 4, 0, 0), np.inf), -np.abs(key) * np.float32(1e10)
    run = with_gradients(functools.partial(attention, return_residual=True))
    (out, lse), gradients = run((query, key, value), (normals(1, 6, 1, 4, seed=6), np.zeros((1, 6, 1), np.float32)))
    assert np.isnan(out[0, 4]).all()
    assert np.isnan(lse[0, 4]).all()
    assert all(np.isnan(gradient).any() for gradient in gradients)


def test_nan_bias_shows_in_its_row_only():
    bias = replaced(np.zeros((6, 7), np.float32), (2, 3), np.nan)
    out = jax.jit(attention)(*random_inputs(1, 6, 7, 1), bias)
    np.testing.assert_array_equal(np.isnan(out[0, :, 0]), np.broadcast_to(np.arange(6)[:, None] == 2, (6, 4)))


def test_padded_queries_need_no_mask_if_the_loss_has_one(one_or_many_blocks):
    query, key, value = random_inputs(1, 6, 7, 2, 2)
    real = (np.arange(6) < 4)[None, :, None, None]

    @jax.jit
    def derivatives(query):
        """The gradient, and the product of the Hessian with a vector."""
        fn = lambda k, v: jnp.where(real, attention(query, k, v, is_causal=True), 0)  # noqa: E731
        return jax.jvp(jax.grad(lambda *args: jnp.sum(fn(*args) ** 2), (0, 1)), (key, value), (key, value))

    padded, clean = derivatives(np.where(real, query, np.nan)), derivatives(query)
    jax.tree.map(np.testing.assert_array_equal, padded[0], clean[0])
    jax.tree.map(close, padded[1], clean[1])


def test_padded_queries_have_no_gradient_if_the_loss_has_a_mask(one_or_many_blocks):
    query, key, value = random_inputs(1, 6, 7, 2, 2)
    real = (np.arange(6) < 4)[None, :, None, None]
    d_out = np.where(real, normals(1, 6, 2, 4, seed=6), 0)
    run = with_gradients(functools.partial(attention, is_causal=True))
    (_, gradients), (_, clean) = (run((q, key, value), d_out) for q in (np.where(real, query, np.nan), query))
    jax.tree.map(np.testing.assert_array_equal, gradients, clean)
    assert not gradients[0][:, 4:].any()


# More than jax.nn takes.


def test_bias_scale_soft_cap_and_another_width(one_or_many_blocks):
    """The soft cap is applied in front of the bias; a scale that is an array has a gradient."""
    query, key, value = random_inputs(width=3)
    bias, scale = normals(2, 1, 6, 1, seed=5), np.float32(1.5)
    d_out, d_lse = normals(2, 6, 2, 3, seed=6), normals(2, 6, 2, seed=7)
    fn = lambda *args, bias, scale: attention(*args, bias, scale=scale, logit_soft_cap=2.0, return_residual=True)  # noqa: E731
    run = with_gradients(lambda q, k, v, b, s: fn(q, k, v, bias=b, scale=s))
    outputs, gradients = run((query, key, value, bias, scale), (d_out, d_lse))
    expected, of_all = exact(query, key, value, True, bias, scale, 2.0, d_out=d_out, d_lse=d_lse)
    for actual, value in zip(outputs, expected, strict=True):
        close(actual, value)
    of_all["bias"] = of_all["bias"].sum((1, 3), keepdims=True)
    assert_gradients_are_exact(gradients, of_all, ("query", "key", "value", "bias", "scale"))


@pytest.mark.parametrize("width", few_of([1, 9]))
def test_value_may_have_another_width(width, blocks):
    inputs = random_inputs(width=width)
    close(attention(*inputs), exact(*inputs)[0])


@pytest.mark.parametrize("mask_batch", few_of([(3, 2), (1, 2), (3, 1), (1, 1), (2,), ()], (1, 2)), ids=str)
def test_extra_batch_dimensions(mask_batch):
    inputs = random_inputs(6)
    mask = np.random.default_rng(1).random((*mask_batch, 1, 6, 7)) < 0.5
    bias = normals(2, 1, 1, 7, seed=5)
    d_out, d_lse = normals(6, 6, 2, 4, seed=6), normals(6, 6, 2, seed=7)

    def apart(x):
        return x.reshape(3, 2, *x.shape[1:])

    run = with_gradients(lambda *args: with_residual()(*args, mask))
    (out, lse), gradients = run((*map(apart, inputs), bias), (apart(d_out), apart(d_lse)))
    live = np.broadcast_to(mask, (3, 2, 2, 6, 7)).reshape(6, 2, 6, 7)
    expected, of_all = exact(*inputs, live, np.tile(bias, (3, 1, 1, 1)), d_out=d_out, d_lse=d_lse)
    close(out, apart(expected[0]))
    close(lse, apart(expected[1]))
    of_all = {name: apart(of_all[name]) for name in ("query", "key", "value", "bias")}
    of_all["bias"] = of_all["bias"].sum((0, 2, 3), keepdims=True)[0]
    assert_gradients_are_exact(gradients, of_all, of_all)


@pytest.mark.slow
def test_extra_batch_dimensions_on_many_blocks(many_blocks):
    test_extra_batch_dimensions((1, 2))


def test_heads_of_width_0(one_or_many_blocks):
    """All logits are 0."""
    query, key, value = (np.zeros((2, 6, 2, 0), np.float32), np.zeros((2, 7, 1, 0), np.float32), random_inputs()[2])
    out, gradients = with_gradients(functools.partial(attention, is_causal=True))(
        (query, key, value), normals(2, 6, 2, 4, seed=6)
    )
    expected, of_all = exact(
        np.zeros((2, 6, 2, 1)), np.zeros((2, 7, 1, 1)), value, causal(6, 7), d_out=normals(2, 6, 2, 4, seed=6)
    )
    close(out, expected[0])
    close(gradients[2], of_all["value"])
    assert [x.shape for x in gradients[:2]] == [query.shape, key.shape]


# Precision.


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.bfloat16, 2**-8), (jnp.float16, 2**-11)])
def test_16_bit_inputs_are_rounded_once(dtype, tolerance, one_or_many_blocks):
    inputs = random_inputs(dtype=dtype, T=33, S=40, H=16)
    fn = functools.partial(attention, scale=0.3, return_residual=True)
    out, lse = jax.jit(fn)(*inputs)
    assert out.dtype == dtype
    assert lse.dtype == jnp.float32
    expected, expected_lse = exact(*inputs, scale=0.3)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=tolerance, atol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5)
    gradients = jax.eval_shape(lambda *args: jax.vjp(fn, *args)[1]((out, lse)), *inputs)
    assert all(gradient.dtype == dtype for gradient in gradients)


def test_16_bit_gradients_are_as_good_as_those_of_jax_nn(one_or_many_blocks):
    query, key, value = random_inputs(1, 64, 64, 1, 1, 32)
    inputs = [x.astype(jnp.bfloat16) for x in (query, key + 3, value + 30)]
    d_out = normals(1, 64, 1, 32, seed=6).astype(jnp.bfloat16)
    _, expected = exact(*inputs, d_out=d_out)

    def errors(fn):
        _, gradients = with_gradients(fn)(inputs, d_out)
        assert all(gradient.dtype == jnp.bfloat16 for gradient in gradients)
        differences = (np.asarray(g, np.float64) - expected[n] for g, n in zip(gradients, expected, strict=False))
        return np.array([np.sqrt(np.mean(difference**2)) for difference in differences])

    ours, theirs = errors(attention), errors(jax.nn.dot_product_attention)
    assert (ours <= 1.1 * theirs).all(), ours / theirs


def test_float64():
    with jax.enable_x64(True):
        inputs = random_inputs(dtype=np.float64)
        out, lse = jax.jit(with_residual())(*inputs)
        assert out.dtype == lse.dtype == jnp.float64
        expected, expected_lse = exact(*inputs)
        np.testing.assert_allclose(out, expected, rtol=1e-13, atol=1e-14)
        np.testing.assert_allclose(lse, expected_lse, rtol=1e-13)


@pytest.mark.parametrize("time", [8, 600])
def test_a_nan_in_a_cotangent_shows_in_the_gradients_on_which_it_has_an_influence(time):
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, time, 1, 64))
    out, pull_back = jax.vjp(masksafe.dot_product_attention, q, k, v)
    d_q, d_k, d_v = jax.jit(pull_back)(jnp.zeros_like(out).at[0, 3, 0, 5].set(jnp.nan))
    assert jnp.isnan(d_q[0, 3]).all()
    assert jnp.isfinite(d_q[0, 4:]).all()
    assert jnp.isnan(d_k).all()
    assert jnp.isnan(d_v).all()
