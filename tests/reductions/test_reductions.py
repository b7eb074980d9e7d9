"""sum, mean, var, var_mean, max and min: axes, dtypes, digits, peers. The table has the contract."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import with_gradients

import masksafe

# What holds for var_mean holds for var, which is its first result.
OPS = {"sum": masksafe.sum, "mean": masksafe.mean, "var_mean": masksafe.var_mean}
X = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float32)
DEAD = np.random.default_rng(1).random(X.shape) < 0.6  # with slices that have nothing left
DEAD[1] = DEAD[2, 3] = DEAD[:, 2] = False


@functools.cache
def values_and_gradients(axis=None, keepdims=False):
    """Each op, with its gradient."""
    of = lambda op: with_gradients(lambda x, where: op(x, axis, where, keepdims=keepdims))  # noqa: E731
    return jax.jit(lambda x, where=None: {name: of(op)(x, where) for name, op in OPS.items()})


@pytest.mark.parametrize(
    ("axis", "where", "keepdims"),
    [((2, 0), DEAD[:, :, :1], True), (None, DEAD[:, :, :1], False), ((0, 2), DEAD[0], False), (1, None, False)],
    ids=["rows", "rows of all", "columns", "middle"],
)
def test_any_axes_and_masks_that_broadcast_are_as_the_last_axis_and_a_whole_mask(axis, where, keepdims):
    axes = tuple(range(3)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    others = [n for i, n in enumerate(X.shape) if i not in axes]
    by_rows = lambda a: np.moveaxis(a, sorted(axes), range(-len(axes), 0)).reshape(*others, -1)  # noqa: E731
    actual = values_and_gradients(axis, keepdims)(X, where)
    whole = np.broadcast_to(True if where is None else where, X.shape)
    expected = values_and_gradients(-1)(by_rows(X), by_rows(whole))
    for name, (out, gradient) in actual.items():
        of_rows, gradient_of_rows = expected[name]
        for a, e in zip(*map(jax.tree.leaves, (out, of_rows)), strict=True):
            assert a.ndim == (3 if keepdims else len(others))
            np.testing.assert_allclose(a.reshape(e.shape), e, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(by_rows(gradient), gradient_of_rows, rtol=1e-5, atol=1e-6)


PEERS = {"sum": jnp.sum, "mean": jnp.mean, "var": jnp.var}
ON_AXES = ({}, {"axis": (1,), "keepdims": True})


@pytest.mark.parametrize("dtype", ["int8", "complex64", "bool", "bfloat16"])
def test_reductions_without_mask_are_those_of_jax(dtype):
    ops = [(getattr(masksafe, name), theirs) for name, theirs in PEERS.items()]
    both = jax.jit(lambda x: [[op(x, **options) for op in pair] for pair in ops for options in ON_AXES])
    x = (10 * np.random.default_rng(0).normal(size=(5, 7))).astype(jnp.dtype(dtype))
    for ours, theirs in both(x):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        rounding = 4 * float(jnp.finfo(ours.dtype).eps) if jnp.issubdtype(ours.dtype, jnp.inexact) else 0
        np.testing.assert_allclose(np.asarray(ours, complex), np.asarray(theirs, complex), rtol=rounding)


@pytest.mark.parametrize(
    ("of_x", "of_weights"), [("float16", "float32"), ("bfloat16", "float16"), ("float32", "bfloat16"), (int, "float16")]
)
@pytest.mark.parametrize("promotion", ["standard", "strict"])
def test_a_weighted_reduction_has_the_dtype_of_the_product(of_x, of_weights, promotion):
    x, weights = jnp.full(8192, 8, of_x), jnp.full(8192, 1.0625, of_weights)
    product = x * weights
    with jax.numpy_dtype_promotion(promotion):
        total, (var, mean) = masksafe.sum(x, weights=weights), masksafe.var_mean(x, weights=weights)
    assert total.dtype == var.dtype == mean.dtype == product.dtype
    assert (total, var, mean) == (jnp.float32(69632).astype(product.dtype), 0, 8)  # in float16 it is infinite


@pytest.mark.parametrize(("dtype", "rtol"), [("float16", 1e-3), ("bfloat16", 1e-2)])
def test_variance_of_16_bits_survives_a_large_mean(dtype, rtol):
    x = (np.random.default_rng(0).normal(size=(8, 512)) + 1e3).astype(jnp.dtype(dtype))
    expected = np.var(np.asarray(x, np.float64), axis=1)
    np.testing.assert_allclose(np.asarray(masksafe.var(x, axis=1), np.float64), expected, rtol=rtol)


def test_variance_with_correction_is_0_where_no_freedom_is_left():
    x = np.array([1.0, 2.0, 4.0, np.nan], np.float32)
    where = ~np.isnan(x)
    var = lambda x, correction: masksafe.var(x, where=where, correction=correction)  # noqa: E731
    corrections = (0, 1, 2, 3, 4)
    values, gradients = zip(*jax.jit(lambda x: [jax.value_and_grad(var)(x, c) for c in corrections])(x), strict=True)
    deviations = np.array([-4, -1, 5, 0]) / 3
    np.testing.assert_allclose(values, [14 / 9, 7 / 3, 14 / 3, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(gradients, [2 * deviations / f for f in (3, 2, 1, np.inf, np.inf)], rtol=1e-6)
    assert np.isnan(masksafe.var(np.full(1, np.nan, np.float32), correction=1))


def test_variance_of_many_long_rows_keeps_its_digits():
    # Rows that a CPU computes in one pass, unless the rounding error of the mean matters in some of them.
    def results(x):
        moments, pull_back = jax.vjp(lambda x: masksafe.var_mean(x, 1), x)
        return *moments, pull_back((jnp.ones(256), jnp.zeros(256)))[0]

    fn = jax.jit(results)
    for offset in (0.0, 1.0, 1e4):
        x = np.random.default_rng(0).normal(size=(256, 300)).astype(np.float32) + np.float32(offset)
        x[1], x[2], x[3, 5] = 0, 3.3, np.nan
        value, mean, gradient = fn(x)
        exact = x.astype(np.float64)
        np.testing.assert_allclose(value, exact.var(1), rtol=2e-6)
        np.testing.assert_allclose(mean, exact.mean(1), rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(gradient, 2 / 300 * (exact - exact.mean(1, keepdims=True)), rtol=1e-5, atol=3e-9)


@pytest.mark.parametrize(
    ("dtype", "largest", "smallest"), [("int8", -128, 127), ("uint8", 0, 255), ("bool", False, True)]
)
def test_extrema_of_no_integers(dtype, largest, smallest):
    nothing = np.zeros((0,), dtype)
    assert (masksafe.max(nothing), masksafe.min(nothing)) == (largest, smallest)
    assert masksafe.max(nothing).dtype == dtype


def test_equal_elements_share_the_gradient_but_not_with_a_masked_one():
    x, where = np.array([1, 3, 3, 3], np.float32), np.array([True, True, True, False])
    gradients = jax.jit(lambda x: (jax.grad(masksafe.max)(x, where=where), jax.grad(masksafe.min)(-x, where=where)))(x)
    np.testing.assert_array_equal(gradients, [[0, 0.5, 0.5, 0]] * 2)


@pytest.mark.parametrize("name", ["max", "min"])
def test_gradient_of_infinite_and_bad_extrema(name):
    reduce, least = getattr(masksafe, name), -jnp.inf if name == "max" else jnp.inf

    @jax.jit
    def gradients(x, where):
        of_one = lambda x, where: reduce(x, (), where, axis_name="n")  # noqa: E731
        over_samples = lambda x: jax.vmap(of_one, axis_name="n")(x, where)[0]  # noqa: E731
        return jax.grad(lambda x: reduce(x, where=where))(x), jax.grad(over_samples)(x)

    alone = np.array([False, True])
    for x, where, expected in (
        ([0.0, least], alone, [0, 1]),
        ([np.nan, least], alone, [0, 1]),
        ([1.0, np.nan], ~alone | alone, [np.nan, np.nan]),
    ):
        for gradient in gradients(np.array(x, np.float32), where):
            np.testing.assert_array_equal(gradient, expected)
