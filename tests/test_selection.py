"""mask_where, apply_where and the reductions."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import masksafe
from masksafe.testing import assert_mask_safe

FLOATS = ("float16", "bfloat16", "float32")
DTYPES = (*FLOATS, "int8", "int32", "uint32", "bool", "complex64")
MASK = np.array([[True, False, True], [False, False, True]])
REDUCTIONS = {
    "sum": (masksafe.sum, jnp.sum),
    "mean": (masksafe.mean, jnp.mean),
    "var": (masksafe.var, jnp.var),
    "var_mean": (lambda *a, **k: masksafe.var_mean(*a, **k)[0], jnp.var),
}


# mask_where


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.vmap])
def test_mask_where_on_nan_replaces_the_masked_elements_and_keeps_the_others(dtype, transform):
    x = jnp.full((2, 3), jnp.nan, dtype)

    def replaced(mask, x):
        return masksafe.mask_where(mask, x, 0.0)

    out = transform(replaced)(MASK, x)
    assert out.dtype == dtype
    np.testing.assert_array_equal(np.isnan(np.asarray(out, np.float32)), ~MASK)
    gradient = transform(jax.grad(lambda x, mask: (replaced(mask, x) ** 2).sum()))(x, MASK)
    np.testing.assert_array_equal(np.isnan(np.asarray(gradient, np.float32)), ~MASK)
    assert (np.asarray(gradient, np.float32)[MASK] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_mask_where_takes_every_dtype(dtype):
    x = jnp.ones((2, 3), dtype)
    out = masksafe.mask_where(MASK, x, jnp.zeros((), dtype))
    assert out.dtype == dtype
    np.testing.assert_array_equal(out, np.where(MASK, 0, 1).astype(dtype))


@pytest.mark.parametrize(
    "shapes", [((3,), (2, 3), ()), ((2, 1), (2, 3), (3,)), ((2, 3), (1,), (2, 1)), ((), (2,), (3, 1))]
)
def test_mask_where_broadcasts(shapes):
    rng = np.random.default_rng(0)
    mask, x, y = rng.random(shapes[0]) < 0.5, rng.normal(size=shapes[1]), rng.normal(size=shapes[2])
    np.testing.assert_array_equal(masksafe.mask_where(mask, x, y), np.where(mask, y, x).astype(np.float32))


def test_mask_where_promotes_as_jax_does():
    x = jnp.ones(3, jnp.bfloat16)
    assert masksafe.mask_where(MASK[0], x, -jnp.inf).dtype == jnp.bfloat16
    assert masksafe.mask_where(MASK[0], x, jnp.zeros(3, jnp.float32)).dtype == jnp.float32


def test_mask_where_is_mask_safe():
    x = jax.random.normal(jax.random.key(0), (2, 3))
    y = jax.random.normal(jax.random.key(1), (2, 3))
    assert_mask_safe(lambda x, y: masksafe.mask_where(MASK, x, y) ** 3, x, y, masked={0: MASK, 1: ~MASK})


@st.composite
def selections(draw):
    """A mask and an array that broadcast together, and the mask where the array's elements are gone."""
    shape = tuple(draw(st.lists(st.integers(0, 4), min_size=1, max_size=3)))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    mask = rng.random(shape[draw(st.integers(0, len(shape))) :]) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    dtype = draw(st.sampled_from(FLOATS))
    return mask, jnp.asarray(rng.random(shape) + 0.5, dtype), np.broadcast_to(mask, shape)


@hypothesis.given(case=selections())
def test_any_selection_keeps_the_contract(case):
    mask, x, gone = case
    hypothesis.assume(gone.any())
    assert_mask_safe(lambda x: masksafe.mask_where(mask, x, 2.0) ** 3, x, masked={0: gone}, transforms=["jit"])
    scale = jnp.ones((), x.dtype)

    def scaled_log(x, scale):
        return masksafe.apply_where(~mask, x, lambda x: scale * jnp.log(x), fill_value=0.0)

    assert_mask_safe(scaled_log, x, scale, masked={0: gone}, transforms=["jit"])


# apply_where

UNSAFE = {
    "log": (jnp.log, lambda x: x > 0),
    "sqrt": (jnp.sqrt, lambda x: x > 0),
    "reciprocal": (lambda x: 1 / x, lambda x: x != 0),
    "log of log": (lambda x: jnp.log(jnp.log(x)), lambda x: x > 1),
}


@pytest.mark.parametrize("name", UNSAFE)
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, lambda f: lambda x: jax.vmap(f)(x[None])[0]])
def test_apply_where_has_finite_values_and_gradients_where_the_function_has_none(name, transform):
    f, defined = UNSAFE[name]
    x = jnp.array([-1.0, 0.0, 2.0, jnp.nan, 3.0])
    cond = np.asarray(defined(x)) & ~np.isnan(x)

    def fn(x):
        return masksafe.apply_where(cond, x, f, fill_value=0.0)

    np.testing.assert_allclose(transform(fn)(x), np.where(cond, f(x), 0), rtol=1e-6)
    expected = np.where(cond, jax.vmap(jax.grad(f))(x), 0)
    np.testing.assert_allclose(transform(jax.grad(lambda x: fn(x).sum()))(x), expected, rtol=1e-6)


@pytest.mark.parametrize("cond", [[False, True, True], [False, False, False]])
def test_apply_where_keeps_what_the_function_closes_over_clean(cond):
    x = jnp.array([0.0, 1.0, 2.0])

    def loss(scale):
        return masksafe.apply_where(jnp.array(cond), x, lambda x: scale * jnp.log(x), fill_value=0.0).sum()

    np.testing.assert_allclose(jax.grad(loss)(1.0), np.log(2.0) if any(cond) else 0.0, rtol=1e-6)


def test_apply_where_never_shows_the_function_a_masked_element():
    seen = []
    x, y = jnp.array([5.0, -1.0, 7.0]), jnp.array([[1.0], [2.0]])

    def ratio(x, y):
        seen.append(np.asarray(x))
        return x / y

    out = masksafe.apply_where(x > 0, (x, y), ratio, lambda x, y: x + y)
    np.testing.assert_allclose(out, np.where(x > 0, x / y, x + y))
    assert (seen[0] > 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_apply_where_takes_every_dtype(dtype):
    x = jnp.arange(3).astype(dtype)
    out = masksafe.apply_where(x != 0, x, lambda x: x, fill_value=jnp.ones((), dtype))
    assert out.dtype == dtype
    np.testing.assert_array_equal(out, np.where(x != 0, x, 1).astype(dtype))


def test_apply_where_is_mask_safe():
    x = jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    scale = jnp.array(2.0)

    def fn(x, scale):
        return masksafe.apply_where(~MASK, x, lambda x: jnp.log(x) * scale, fill_value=0.0)

    assert_mask_safe(fn, x, scale, masked={0: MASK})


# Reductions


@st.composite
def reductions(draw):
    """A shape, axes, keepdims, and the shape of a mask that broadcasts to it."""
    shape = tuple(draw(st.lists(st.integers(0, 4), min_size=1, max_size=3)))
    axes = draw(st.lists(st.integers(0, len(shape) - 1), unique=True, max_size=len(shape)))
    dropped = draw(st.integers(0, len(shape)))
    mask_shape = tuple(draw(st.sampled_from([1, n])) for n in shape[dropped:])
    axis = draw(st.sampled_from([None, tuple(axes), tuple(a - len(shape) for a in axes)]))
    return shape, axis, draw(st.booleans()), mask_shape, draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))


def reference(name, x, axis, where, keepdims):
    """In float64, with 0 for the empty case."""
    x = np.asarray(x, np.float64)
    where = np.broadcast_to(where, x.shape)
    axis = tuple(range(x.ndim)) if axis is None else axis
    count = where.sum(axis, keepdims=True)
    total = np.where(where, x, 0).sum(axis, keepdims=True)
    mean = total / np.maximum(count, 1)
    var = np.where(where, (x - mean) ** 2, 0).sum(axis, keepdims=True) / np.maximum(count, 1)
    out = {"sum": total, "mean": mean}.get(name, var)
    return out if keepdims else np.squeeze(out, axis)


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("dtype", FLOATS)
@hypothesis.given(case=reductions(), seed=st.integers(0, 99))
def test_reduction_agrees_with_float64(name, dtype, case, seed):
    shape, axis, keepdims, mask_shape, density = case
    rng = np.random.default_rng(seed)
    where = rng.random(mask_shape) < density
    x = jnp.asarray(np.where(where, rng.normal(size=shape), np.nan), dtype)
    out = REDUCTIONS[name][0](x, axis, where, keepdims=keepdims)
    expected = reference(name, x, axis, where, keepdims)
    assert out.dtype == dtype
    assert out.shape == expected.shape
    rounding = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=rounding, atol=1e-6)


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("dtype", ["int8", "int32", "bool", "complex64", *FLOATS])
def test_reduction_without_mask_is_that_of_jax(name, dtype):
    ours, theirs = REDUCTIONS[name]
    x = (10 * jax.random.normal(jax.random.key(0), (5, 7))).astype(dtype)
    for kwargs in ({}, {"axis": 0}, {"axis": (0, 1), "keepdims": True}):
        out, expected = ours(x, **kwargs), theirs(x, **kwargs)
        assert (out.dtype, out.shape) == (expected.dtype, expected.shape)
        rounding = float(jnp.finfo(out.dtype).eps) if jnp.issubdtype(out.dtype, jnp.inexact) else 0
        np.testing.assert_allclose(np.asarray(out, complex), np.asarray(expected, complex), rtol=4 * rounding)


@pytest.mark.parametrize("name", REDUCTIONS)
@hypothesis.given(case=reductions(), dtype=st.sampled_from(FLOATS), seed=st.integers(0, 99))
def test_any_shape_axis_dtype_and_mask_keeps_the_contract(name, case, dtype, seed):
    shape, axis, keepdims, mask_shape, density = case
    rng = np.random.default_rng(seed)
    gone = ~np.broadcast_to(where := rng.random(mask_shape) < density, shape)
    hypothesis.assume(gone.any())
    x = jnp.asarray(rng.normal(size=shape), dtype)
    reduce = functools.partial(REDUCTIONS[name][0], axis=axis, where=where, keepdims=keepdims)
    assert_mask_safe(reduce, x, masked={0: gone}, transforms=["jit"])


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("where", [MASK, np.zeros((2, 3), bool), np.array([[True], [False]]), MASK[0]])
def test_reduction_is_mask_safe(name, where):
    x = jax.random.normal(jax.random.key(0), (2, 3))
    for axis in (None, 0, 1):
        assert_mask_safe(
            functools.partial(REDUCTIONS[name][0], axis=axis, where=where), x, masked={0: ~where}, transforms=["jit"]
        )


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reduction_is_mask_safe_under_every_transform(name):
    x = jax.random.normal(jax.random.key(0), (2, 3))
    where = ~MASK

    def fn(x, where):
        return REDUCTIONS[name][0](x, axis=1, where=where)

    assert_mask_safe(lambda x: fn(x, where), x, masked={0: MASK}, empty=(x,))
    nothing = jnp.zeros_like(where)
    assert_mask_safe(lambda x: fn(x, nothing), x, masked={0: ~nothing}, empty=(jnp.full_like(x, jnp.nan),))


@pytest.mark.parametrize("name", REDUCTIONS)
def test_nan_in_an_unmasked_element_shows_in_its_own_slice_only(name):
    x = jnp.ones((2, 3)).at[0, 0].set(jnp.nan)
    out = REDUCTIONS[name][0](x, axis=1, where=np.ones((2, 3), bool))
    np.testing.assert_array_equal(np.isnan(out), [True, False])


@pytest.mark.parametrize(("correction", "expected"), [(0, 2 / 3), (1, 1.0), (2, 2.0), (3, 0.0), (4, 0.0)])
def test_variance_with_correction_is_0_where_no_freedom_is_left(correction, expected):
    x = jnp.array([1.0, 2.0, 3.0, jnp.nan])
    where = ~jnp.isnan(x)
    np.testing.assert_allclose(masksafe.var(x, where=where, correction=correction), expected, rtol=1e-6)
    gradient = jax.grad(lambda x: masksafe.var(x, where=where, correction=correction))(x)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize(
    ("dtype", "offset", "rtol"), [("float32", 1e4, 1e-5), ("float16", 1e3, 1e-3), ("bfloat16", 1e3, 1e-2)]
)
def test_variance_survives_a_large_mean(dtype, offset, rtol):
    x = (jax.random.normal(jax.random.key(0), (64, 512)) + offset).astype(dtype)
    expected = np.var(np.asarray(x, np.float64), axis=1)
    np.testing.assert_allclose(np.asarray(masksafe.var(x, axis=1), np.float64), expected, rtol=rtol)


def test_variance_without_freedom_still_shows_an_unmasked_nan():
    assert np.isnan(masksafe.var(jnp.array([jnp.nan]), correction=1))


def test_float16_is_accumulated_in_float32():
    x = jnp.full(100_000, 0.25, jnp.float16)
    assert masksafe.mean(x) == 0.25
    assert masksafe.sum(x) == 25_000


def test_mean_of_a_loss_replaces_the_quotient_of_sums():
    loss, nothing = jnp.array([1.0, jnp.nan]), jnp.zeros(2, bool)
    value, gradient = jax.value_and_grad(lambda loss: masksafe.mean(loss, where=nothing))(loss)
    assert value == 0
    np.testing.assert_array_equal(gradient, [0, 0])
    assert masksafe.mean(jnp.zeros((0,))) == 0


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
def test_mean_over_a_sharded_batch_with_uneven_masks_is_the_global_mean(axis_type):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(16, 3)).astype(np.float32)
    where = np.arange(16)[:, None] < np.array([1, 5, 0])
    expected = x[where].mean()
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(axis_type,))
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, P("batch"))
        x, where = jax.device_put(x, sharding), jax.device_put(where, sharding)
        mean, gradient = jax.jit(jax.value_and_grad(masksafe.mean), static_argnums=1)(x, None, where)
        logs = jax.jit(lambda x, w: masksafe.apply_where(w, x, jnp.exp, fill_value=0.0))(x, where)
    np.testing.assert_allclose(mean, expected, rtol=1e-6)
    np.testing.assert_allclose(gradient, where / 6, rtol=1e-6)
    np.testing.assert_allclose(logs, np.where(where, np.exp(x), 0), rtol=1e-6)


@pytest.mark.parametrize("name", [*REDUCTIONS, "mask_where", "apply_where"])
def test_value_and_gradient_lower_for_cuda(name):
    def fn(x, where):
        if name == "mask_where":
            return masksafe.mask_where(where, x, 0.0).sum()
        if name == "apply_where":
            return masksafe.apply_where(where, x, jnp.log, fill_value=0.0).sum()
        return REDUCTIONS[name][0](x, axis=1, where=where).sum()

    shapes = jax.ShapeDtypeStruct((4, 5), jnp.float32), jax.ShapeDtypeStruct((4, 5), jnp.bool_)
    exported = jax.export.export(jax.jit(jax.value_and_grad(fn)), platforms=["cuda"])(*shapes)
    assert exported.platforms == ("cuda",)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_no_false_alarm_of_debug_nans(name, jit):
    x, where = jnp.array([1.0, jnp.nan, jnp.inf]), jnp.array([True, False, False])
    fn = jax.value_and_grad(lambda x: REDUCTIONS[name][0](x, where=where))
    with jax.debug_nans(True):
        value, gradient = (jax.jit(fn) if jit else fn)(x)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
