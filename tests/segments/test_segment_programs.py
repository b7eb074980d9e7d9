"""Segment ops as compiled programs: their memory, and the digits of long sums."""

import functools

import definitions
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import parametrize

import masksafe

pytestmark = pytest.mark.optimised

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
WAYS = [(dtype, number) for dtype in ("bfloat16", "float32") for number in COPIES]


@parametrize(
    ("name", "dtype", "segments"),
    [("var", "bfloat16", 1000)],
    exhaustive=[(name, *WAYS[i % len(WAYS)]) for i, name in enumerate(OPS)],
)
def test_a_value_needs_one_copy_of_the_data(name, dtype, segments):
    copies, op = COPIES[segments], functools.partial(getattr(masksafe, f"segment_{name}"), num_segments=segments)
    assert temporary_bytes(op, *arguments(dtype)) <= copies * COPY


OF_GRADIENTS = (1000, "bfloat16", 1.1), (10_000, "float32", 1.5)


@parametrize(
    ("name", "segments", "dtype", "copies"),
    [("softmax", 1000, "bfloat16", 1.1)],
    exhaustive=[(name, *OF_GRADIENTS[i % 2]) for i, name in enumerate(OPS)],
)
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


@parametrize("name", ["one of a hundred"], exhaustive=LONG)
def test_long_segments_keep_their_digits(name):
    number, ids = LONG[name]
    x = GENERATOR.normal(size=MANY).astype(np.float32)
    w = np.abs(x)

    @jax.jit
    def results(x, w, ids):
        of = lambda name: functools.partial(getattr(masksafe, f"segment_{name}"), segment_ids=ids, num_segments=number)  # noqa: E731
        moments = of("sum")(w), of("mean")(w), of("var")(x), of("sum")(w, weights=w), of("var")(x, weights=w)
        of_segments = *moments, jnp.exp(of("logsumexp")(x)), jax.jvp(of("sum"), (x,), (w,))[1]
        # A reverse pass adds up what it brings back from segments.
        sum_of_cotangents = of("softmax")(x) * w - jax.vjp(of("softmax"), x)[1](w)[0]
        of_rows = of("softmax")(x), of("standardize")(x), jax.vjp(of("log_softmax"), x)[1](w)[0], sum_of_cotangents
        return of_segments, of_rows

    live = (ids >= 0) & (ids < number)
    back = lambda values: np.append(values, 0)[np.where(live, ids, number)]  # noqa: E731

    def exact(formula, *arrays, **options):
        columns = (np.float64(a)[:, None] for a in arrays)
        return definitions.by_segment(formula, number, **options)(live, *columns, ids)[0][:, 0]

    sums, totals = exact(np.sum, w), exact(lambda x: np.sum(np.exp(x)), x)
    moments = exact(np.mean, w), exact(np.var, x), exact(lambda x, v: x @ v, w, w)
    of_segments = sums, *moments, exact(definitions.weighted_var, x, w), totals, sums
    probs, standard = (exact(f, x, keeps_row=True) for f in (definitions.softmax, definitions.standardize))
    of_rows = probs, standard, np.where(live, w, 0) - probs * back(sums), probs * back(exact(np.sum, probs * w))
    found_of_segments, found_of_rows = results(x, w, ids)
    for found, expected in zip(found_of_segments, of_segments, strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-6)
    for found, expected in zip(found_of_rows, of_rows, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.max(np.abs(expected)))


def test_ones_are_counted():
    ones, zeros = jnp.ones(2**24 + 10), jnp.zeros(2**24 + 10, jnp.int32)
    np.testing.assert_array_equal(masksafe.segment_sum(ones, zeros, 1), 2**24 + 10)
