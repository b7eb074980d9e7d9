"""Segment ops as compiled programs: their memory, and the digits of long sums."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import pairs

import masksafe

OPS = ("var", "sum", "mean", "max", "min", "logsumexp", "softmax", "log_softmax", "standardize")
ROWS, WIDTH = 100_000, 64
COPY = 4 * ROWS * WIDTH  # bytes of the data in float32
GENERATOR = np.random.default_rng(0)


def temporary_bytes(fn, *args):
    return jax.jit(fn).lower(*args).compile().memory_analysis().temp_size_in_bytes


def arguments(dtype):
    return jax.ShapeDtypeStruct((ROWS, WIDTH), dtype), jax.ShapeDtypeStruct((ROWS,), jnp.int32)


# In a thousand long segments sums have parts; ten thousand short ones are themselves a tenth of the data each.
COPIES = {1000: 1.1, 10_000: 1.5}


@pytest.mark.parametrize(("name", "dtype", "segments"), pairs(OPS, ["bfloat16", "float32"], COPIES))
def test_a_value_needs_one_copy_of_the_data(name, dtype, segments):
    copies, op = COPIES[segments], functools.partial(getattr(masksafe, f"segment_{name}"), num_segments=segments)
    assert temporary_bytes(op, *arguments(dtype)) <= copies * COPY


@pytest.mark.parametrize(("segments", "dtype", "copies"), [(1000, "bfloat16", 1.1), (10_000, "float32", 1.5)])
@pytest.mark.parametrize("name", ["softmax", *OPS[:6], *OPS[7:]])
def test_a_gradient_keeps_hardly_more_than_one_copy_of_the_data(name, segments, dtype, copies):
    op = functools.partial(getattr(masksafe, f"segment_{name}"), num_segments=segments)

    def value_and_gradient(data, ids, cotangents):
        value, pull_back = jax.vjp(lambda data: op(data, ids), data)
        return value, pull_back(cotangents)

    # The widened cotangents are one copy, what is kept for the gradient is another; jraph's formulas need up to 3.6.
    if dtype == "bfloat16" and name in ("log_softmax", "standardize"):
        copies = 2.1
    if jax.__version_info__ < (0, 12) and name == "log_softmax":  # the logarithms are computed twice
        copies = 2.4
    args = arguments(dtype)
    assert temporary_bytes(value_and_gradient, *args, jax.eval_shape(op, *args)) <= copies * COPY


MANY = 2**18
LONG = {
    "one of a hundred": (100, np.where(GENERATOR.random(MANY) < 0.9, 7, GENERATOR.integers(0, 100, MANY))),
    "one": (1, np.zeros(MANY, np.int32)),
    "ten in order": (10, np.sort(GENERATOR.integers(-1, 11, MANY).astype(np.int32))),
}


@pytest.mark.parametrize("name", LONG)
def test_long_segments_keep_their_digits(name):
    number, ids = LONG[name]
    x = GENERATOR.normal(size=MANY).astype(np.float32)
    w = np.abs(x)

    @jax.jit
    def results(x, w, ids):
        of = lambda name: functools.partial(getattr(masksafe, f"segment_{name}"), segment_ids=ids, num_segments=number)  # noqa: E731
        of_segments = (
            of("sum")(w),
            of("mean")(w),
            of("var")(x),
            of("sum")(w, weights=w),
            of("var")(x, weights=w),
            jnp.exp(of("logsumexp")(x)),
            jax.jvp(of("sum"), (x,), (w,))[1],
        )
        # A reverse pass adds up what it brings back from segments.
        sum_of_cotangents = of("softmax")(x) * w - jax.vjp(of("softmax"), x)[1](w)[0]
        of_rows = of("softmax")(x), of("standardize")(x), jax.vjp(of("log_softmax"), x)[1](w)[0], sum_of_cotangents
        return of_segments, of_rows

    wide, weights = np.float64(x), np.float64(w)
    live = (ids >= 0) & (ids < number)
    at = np.where(live, ids, number)
    sums = lambda x: np.bincount(at, x, number + 1)[:number]  # noqa: E731
    back = lambda values: np.append(values, 0)[at]  # noqa: E731
    var = sums((wide - back(sums(wide) / sums(live))) ** 2) / sums(live)
    weighted_var = sums(weights * (wide - back(sums(weights * wide) / sums(weights))) ** 2) / sums(weights)
    total = sums(np.exp(wide))
    probs = np.where(live, np.exp(wide) * back(1 / total), 0)
    standard = np.where(live, (wide - back(sums(wide) / sums(live))) * back(1 / np.sqrt(var + 1e-5)), 0)
    d_log_softmax = np.where(live, weights, 0) - probs * back(sums(weights))
    of_segments = sums(weights), sums(weights) / sums(live), var, sums(weights**2), weighted_var, total, sums(weights)
    of_rows = probs, standard, d_log_softmax, probs * back(sums(probs * weights))
    found_of_segments, found_of_rows = results(x, w, ids)
    for found, expected in zip(found_of_segments, of_segments, strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-6)
    for found, expected in zip(found_of_rows, of_rows, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.max(np.abs(expected)))


def test_ones_are_counted():
    ones, zeros = jnp.ones(2**24 + 10), jnp.zeros(2**24 + 10, jnp.int32)
    np.testing.assert_array_equal(masksafe.segment_sum(ones, zeros, 1), 2**24 + 10)
