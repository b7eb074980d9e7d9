"""sum, mean, var and var_mean."""

import functools

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import masksafe
from masksafe.testing import CONSISTENCY_MODES, assert_consistent, assert_mask_safe

FLOATS = ("float16", "bfloat16", "float32")
# What holds for var_mean holds for var, which is its first result.
OPS = {"sum": masksafe.sum, "mean": masksafe.mean, "var_mean": masksafe.var_mean}
X = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float32)
DEAD = np.random.default_rng(1).random(X.shape) < 0.6  # with slices that have nothing left
DEAD[1] = DEAD[2, 3] = DEAD[:, 2] = False


def weights_of(shape, seed):
    return np.cos(seed + np.arange(np.prod(shape, dtype=int))).reshape(shape)


def weighted_sum(outputs):
    """In float32 at least."""
    leaves = jax.tree.leaves(outputs)
    return sum(jnp.sum(out * weights_of(out.shape, i).astype(np.float32)) for i, out in enumerate(leaves))


@functools.cache
def value_and_gradient(name, axis=None, keepdims=False):
    """The op, and the gradient of the weighted sum of its outputs, compiled."""

    def total(x, where=None):
        out = OPS[name](x, axis, where, keepdims=keepdims)
        return weighted_sum(out), out

    def pair(*args):
        (_, out), gradient = jax.value_and_grad(total, has_aux=True)(*args)
        return out, gradient

    return jax.jit(pair)


def reference(name, x, axis=None, where=None, keepdims=False):
    """The same by the definition, in float64, with 0 for the empty case."""
    where = np.broadcast_to(True if where is None else where, x.shape)
    x = np.where(where, np.asarray(x, np.float64), 0)
    axis = tuple(range(x.ndim)) if axis is None else axis
    n = np.maximum(where.sum(axis, keepdims=True), 1)
    total = x.sum(axis, keepdims=True)
    deviations = np.where(where, x - total / n, 0)
    outputs = {
        "sum": [(total, 1)],
        "mean": [(total / n, 1 / n)],
        "var_mean": [((deviations**2).sum(axis, keepdims=True) / n, 2 * deviations / n), (total / n, 1 / n)],
    }[name]
    gradient = np.where(where, sum(weights_of(out.shape, i) * slope for i, (out, slope) in enumerate(outputs)), 0)
    values = tuple(out if keepdims else np.squeeze(out, axis) for out, _ in outputs)
    return values if name == "var_mean" else values[0], gradient


# Values and derivatives.


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(
    ("axis", "where", "keepdims"),
    [(-1, DEAD, False), ((2, 0), None, True), (None, DEAD[:, :, :1], False), ((0, 2), DEAD[0], False)],
    ids=["dead slices", "no mask", "rows", "columns"],
)
def test_value_and_gradient_are_those_of_the_definition(name, axis, where, keepdims):
    actual = value_and_gradient(name, axis, keepdims)(X, where)
    chex.assert_trees_all_close(actual, reference(name, X, axis, where, keepdims), rtol=1e-5, atol=1e-6)


def test_variance_is_that_of_var_mean():
    both = jax.jit(lambda *a: (masksafe.var(*a, correction=1), masksafe.var_mean(*a, correction=1)[0]))
    np.testing.assert_array_equal(*both(X, None, DEAD))


@st.composite
def reductions(draw):
    """A shape, axes, keepdims, the shape of a mask that broadcasts to it, and how much the mask leaves."""
    shape = tuple(draw(st.lists(st.integers(0, 4), min_size=1, max_size=3)))
    axes = draw(st.lists(st.integers(0, len(shape) - 1), unique=True, max_size=len(shape)))
    dropped = draw(st.integers(0, len(shape)))
    mask_shape = tuple(draw(st.sampled_from([1, n])) for n in shape[dropped:])
    axis = draw(st.sampled_from([None, tuple(axes), tuple(a - len(shape) for a in axes)]))
    return shape, axis, draw(st.booleans()), mask_shape, draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))


@pytest.mark.slow
@pytest.mark.parametrize("name", OPS)
@hypothesis.settings(max_examples=10)
@hypothesis.given(case=reductions(), dtype=st.sampled_from(FLOATS), seed=st.integers(0, 99))
def test_any_reduction_is_that_of_the_definition(name, case, dtype, seed):
    shape, axis, keepdims, mask_shape, density = case
    rng = np.random.default_rng(seed)
    where = rng.random(mask_shape) < density
    x = np.where(where, rng.normal(size=shape), np.nan).astype(jnp.dtype(dtype))
    out, expected = OPS[name](x, axis, where, keepdims=keepdims), reference(name, x, axis, where, keepdims)[0]
    chex.assert_trees_all_equal_dtypes(out, jax.tree.map(lambda e: e.astype(x.dtype), expected))
    out = jax.tree.map(lambda a: np.asarray(a, np.float64), out)
    chex.assert_trees_all_close(out, expected, rtol=float(jnp.finfo(dtype).eps), atol=1e-6)


PEERS = {"sum": jnp.sum, "mean": jnp.mean, "var": jnp.var}
ON_AXES = ({}, {"axis": (1,), "keepdims": True})


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize(
    "dtype", ["int8", "complex64", *(pytest.param(d, marks=pytest.mark.slow) for d in ("int32", "bool", *FLOATS))]
)
def test_reduction_without_mask_is_that_of_jax(name, dtype):
    ops = getattr(masksafe, name), PEERS[name]
    both = jax.jit(lambda x: [[op(x, **kwargs) for kwargs in ON_AXES] for op in ops])
    x = (10 * np.random.default_rng(0).normal(size=(5, 7))).astype(jnp.dtype(dtype))
    ours, theirs = both(x)
    chex.assert_trees_all_equal_shapes_and_dtypes(ours, theirs)
    result = ours[0].dtype
    rounding = 4 * float(jnp.finfo(result).eps) if jnp.issubdtype(result, jnp.inexact) else 0
    ours, theirs = ([np.asarray(a, complex) for a in outputs] for outputs in (ours, theirs))
    chex.assert_trees_all_close(ours, theirs, rtol=rounding)


def test_both_modes_of_autodiff():
    """First and second derivatives along a direction are those of the definition, in every order of the modes."""
    direction, step = np.random.default_rng(2).normal(size=X.shape), 1e-3
    gradients = [reference("var_mean", X + s * direction, -1, DEAD)[1] for s in (-step, step)]
    second = (gradients[1] - gradients[0]) / (2 * step)
    first = (reference("var_mean", X, -1, DEAD)[1] * direction).sum()
    fn = lambda x: weighted_sum(masksafe.var_mean(x, -1, DEAD))  # noqa: E731

    @jax.jit
    def derivatives(x, v):
        along = lambda f: lambda x: jax.jvp(f, (x,), (v,))[1]  # noqa: E731
        reverse = along(jax.grad(fn))(x), jax.grad(lambda x: jnp.sum(jax.grad(fn)(x) * v))(x)
        with masksafe.forward_mode():
            return (*reverse, along(jax.grad(fn))(x)), along(fn)(x)

    products, slope = derivatives(X, direction.astype(np.float32))
    for product in products:  # Hessian times direction
        np.testing.assert_allclose(product, second, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(slope, first, rtol=1e-4)


# The contract.


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("transform", ["jit", *(pytest.param(t, marks=pytest.mark.slow) for t in ("eager", "vmap"))])
def test_masked_elements_are_gone(name, transform):
    fn = lambda x: [OPS[name](x, axis, DEAD) for axis in (-1, (0, 2))]  # noqa: E731
    assert_mask_safe(fn, X, masked={0: ~DEAD}, transforms=(transform,))


@pytest.mark.slow
@pytest.mark.parametrize("name", OPS)
@hypothesis.given(case=reductions(), dtype=st.sampled_from(FLOATS), seed=st.integers(0, 99))
def test_any_shape_axis_dtype_and_mask_keeps_the_contract(name, case, dtype, seed):
    shape, axis, keepdims, mask_shape, density = case
    rng = np.random.default_rng(seed)
    gone = ~np.broadcast_to(where := rng.random(mask_shape) < density, shape)
    hypothesis.assume(gone.any())
    x = rng.normal(size=shape).astype(jnp.dtype(dtype))
    reduce = functools.partial(OPS[name], axis=axis, where=where, keepdims=keepdims)
    assert_mask_safe(reduce, x, masked={0: gone}, transforms=("jit",))


@pytest.mark.parametrize("name", OPS)
def test_nothing_left_is_0_with_its_gradient(name):
    outputs_and_gradient = value_and_gradient(name, -1)(np.full_like(X, np.nan), np.zeros(X.shape, bool))
    jax.tree.map(lambda a: np.testing.assert_array_equal(a, 0), outputs_and_gradient)
    jax.tree.map(lambda a: np.testing.assert_array_equal(a, 0), OPS[name](np.zeros(0, np.float32)))


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_unmasked_bad_value_shows_in_its_own_slice_only(name, bad):
    x, where = X.copy(), DEAD.copy()
    x[0, 1, 2], where[0, 1, 2] = bad, True
    outputs, _ = value_and_gradient(name, -1)(x, where)
    for out in jax.tree.leaves(outputs):
        np.testing.assert_array_equal(np.isfinite(out), np.arange(12).reshape(3, 4) != 1)


@pytest.mark.parametrize(
    ("name", "modes"),
    [
        *((name, ("jit", "vmap", "scan")) for name in OPS),
        pytest.param("var_mean", CONSISTENCY_MODES, marks=pytest.mark.slow),
    ],
)
def test_one_answer(name, modes):
    assert_consistent(lambda x, where: OPS[name](x, -1, where), X, DEAD, modes=modes)


@pytest.mark.parametrize(
    ("name", "axis_type"), [*((name, AxisType.Explicit) for name in OPS), ("var_mean", AxisType.Auto)], ids=str
)
def test_reduction_of_a_sharded_batch_with_uneven_masks_is_that_of_the_whole(name, axis_type):
    x = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
    where = np.arange(16)[:, None] < np.array([1, 5, 0])
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(axis_type,))
    with jax.set_mesh(mesh):
        actual = value_and_gradient(name)(*jax.device_put((x, where), NamedSharding(mesh, PartitionSpec("batch"))))
    chex.assert_trees_all_close(actual, reference(name, x, None, where), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OPS)
def test_value_and_gradient_lower_for_cuda(name):
    assert jax.export.export(value_and_gradient(name, -1), platforms=["cuda"])(X, DEAD).platforms == ("cuda",)


@pytest.mark.parametrize("name", OPS)
def test_no_false_alarm_of_debug_nans(name):
    x, where = np.array([1.0, np.nan, np.inf], np.float32), np.array([True, False, False])
    with jax.debug_nans(True):
        out, pull_back = jax.vjp(lambda x: OPS[name](x, where=where), x)
        (gradient,) = pull_back(out)
    assert np.isfinite(jax.tree.leaves(out)).all()
    assert np.isfinite(gradient).all()


# Precision.


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_inputs_are_rounded_once(name, dtype):
    x = X.astype(jnp.dtype(dtype))
    actual, expected = value_and_gradient(name, -1)(x, DEAD), reference(name, x, -1, DEAD)
    assert {leaf.dtype for leaf in jax.tree.leaves(actual)} == {jnp.dtype(dtype)}
    actual = jax.tree.map(lambda a: np.asarray(a, np.float64), actual)
    eps = float(jnp.finfo(dtype).eps)
    chex.assert_trees_all_close(actual[0], expected[0], rtol=0.51 * eps, atol=1e-6)
    chex.assert_trees_all_close(actual[1], expected[1], rtol=2 * eps, atol=eps)  # the cotangent is rounded too


def test_float16_is_accumulated_in_float32():
    x = np.full(100_000, 0.25, np.float16)
    mean, total = jax.jit(lambda x: (masksafe.mean(x), masksafe.sum(x)))(x)
    assert (mean, total) == (0.25, 25_000)


@pytest.mark.parametrize(
    ("dtype", "offset", "rtol"), [("float32", 1e4, 1e-5), ("float16", 1e3, 1e-3), ("bfloat16", 1e3, 1e-2)]
)
def test_variance_survives_a_large_mean(dtype, offset, rtol):
    x = (np.random.default_rng(0).normal(size=(8, 512)) + offset).astype(jnp.dtype(dtype))
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


def test_variance_without_freedom_still_shows_an_unmasked_nan():
    assert np.isnan(masksafe.var(np.full(1, np.nan, np.float32), correction=1))


@pytest.mark.parametrize("offset", [0.0, 1.0, 1e4])
def test_variance_of_many_long_rows_keeps_its_digits(offset):
    # Rows that a CPU computes in one pass, unless the rounding error of the mean matters in some of them.
    x = np.random.default_rng(0).normal(size=(256, 300)).astype(np.float32) + np.float32(offset)
    x[1], x[2], x[3, 5] = 0, 3.3, np.nan
    (value, mean), pull_back = jax.vjp(jax.jit(lambda x: masksafe.var_mean(x, 1)), jnp.asarray(x))
    exact = x.astype(np.float64)
    np.testing.assert_allclose(value, exact.var(1), rtol=2e-6)
    np.testing.assert_allclose(mean, exact.mean(1), rtol=1e-6, atol=1e-7)
    (gradient,) = pull_back((jnp.ones(256), jnp.zeros(256)))
    np.testing.assert_allclose(gradient, 2 / 300 * (exact - exact.mean(1, keepdims=True)), rtol=1e-5, atol=3e-9)


@pytest.mark.parametrize("reduce", [masksafe.max, masksafe.min])
@pytest.mark.parametrize("axis", [-1, None])
def test_extremum_of_many_elements_shows_a_nan(reduce, axis):
    x = jnp.ones((2, 8192)).at[1, 5].set(jnp.nan)
    np.testing.assert_array_equal(reduce(x, axis), [1, jnp.nan] if axis == -1 else jnp.nan)
    assert reduce(x, where=~jnp.isnan(x)) == 1
