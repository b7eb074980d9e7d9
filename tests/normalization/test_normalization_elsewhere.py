"""The programs of accelerators for norms and variances, run on a CPU: values, derivatives, precision, the contract."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from test_normalization import (
    AXES,
    DEAD,
    OPS,
    SHAPE,
    WHERE,
    WHERES,
    X,
    apply,
    assert_close,
    float64_layer_norm,
    parameters,
    reference,
    slow,
    used,
    value_and_gradients,
    weighted_sum,
)

import masksafe
from masksafe.testing import assert_consistent, assert_mask_safe

ROWS = np.array([[True, True, False, True]] * 3)[..., None]


@pytest.fixture(autouse=True, params=["in registers", "in passes"])
def elsewhere(request, choose):
    """Arrays of any size take the program of accelerators, and rows fit into their registers or not."""
    most = 0 if request.param == "in passes" else 2**14
    choose(form="elsewhere", fewest_elements_of_few_passes=0, elements_of_row_in_one_kernel=most)


in_passes = pytest.mark.parametrize("elsewhere", ["in passes"], indirect=True)

CASES = [
    ("layer_norm", -1, "no"),
    ("layer_norm", (2, 1), "no"),
    ("layer_norm", (2, 1), "some"),
    ("layer_norm", -1, "rows"),
    ("layer_norm", -1, "dead"),
    ("layer_norm", 1, "dead"),
    ("rms_norm", -1, "dead"),
    ("rms_norm", 0, "no"),
    ("standardize", (2, 1), "no"),
    ("standardize", -1, "rows"),
]
OTHER_CASES = set(itertools.product(["layer_norm", "rms_norm", "standardize"], AXES, WHERES)) - set(CASES)


@pytest.mark.parametrize(
    ("op", "axis", "where"), [*CASES, *itertools.starmap(slow, sorted(OTHER_CASES, key=str))], ids=str
)
def test_value_and_gradients_are_those_of_the_definition(op, axis, where):
    scale, bias = parameters(SHAPE, axis)
    actual = value_and_gradients(op, axis)(X, scale, bias, WHERES[where])
    assert_close(actual, reference(op, X, scale, bias, axis, WHERES[where]), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("where", ["no", "rows", "dead"])
def test_second_derivatives_are_those_of_the_plain_rules(where):
    args = X, *parameters(SHAPE, -1)
    directions = tuple(np.random.default_rng(4).normal(size=a.shape).astype(np.float32) for a in args)
    fn = lambda args: weighted_sum("layer_norm", *args, -1, WHERES[where])[0]  # noqa: E731

    @jax.jit
    def products(args):
        slope = lambda args: sum(map(jnp.vdot, jax.grad(fn)(args), directions))  # noqa: E731
        reverse = jax.jvp(jax.grad(fn), (args,), (directions,))[1], jax.grad(slope)(args)
        with masksafe.forward_mode():
            return *reverse, jax.jvp(jax.grad(fn), (args,), (directions,))[1]

    over_reverse, twice_reverse, plain = products(args)
    chex.assert_trees_all_close(over_reverse, plain, rtol=1e-4, atol=1e-4)
    chex.assert_trees_all_close(twice_reverse, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("axis", "where"), [(-1, DEAD), (-1, DEAD[:, :, :1]), slow(1, DEAD)], ids=["dead", "rows", "1"]
)
def test_masked_elements_are_gone(axis, where):
    fn = lambda *args: masksafe.layer_norm(*args, axis=axis, where=where)  # noqa: E731
    masked = {0: ~np.broadcast_to(where, SHAPE)}
    assert_mask_safe(fn, X, *parameters(SHAPE, axis), masked=masked, transforms=("jit",))


@in_passes
@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("where", [DEAD, DEAD[:, :, :1], DEAD[:, :1]], ids=["some", "last", "middle"])
def test_masked_elements_are_gone_from_a_variance(axis, where):
    fn = lambda x: masksafe.var_mean(x, axis, where)  # noqa: E731
    assert_mask_safe(fn, X, masked={0: ~np.broadcast_to(where, SHAPE)}, transforms=("jit",))
    x = np.where(where, X, 0).astype(np.float64)
    n = np.broadcast_to(where, SHAPE).sum(axis, keepdims=True)
    mean = x.sum(axis, keepdims=True) / np.maximum(n, 1)
    variance = np.where(where, (x - mean) ** 2, 0).sum(axis) / np.maximum(n.squeeze(axis), 1)
    chex.assert_trees_all_close(jax.jit(fn)(X), (variance, mean.squeeze(axis)), rtol=1e-5, atol=1e-6)


@OPS
@pytest.mark.parametrize("where", [WHERE, np.ones((3, 4, 1), bool), None], ids=["some", "rows", "no"])
@pytest.mark.parametrize("bad", [np.nan, slow(np.inf), -np.inf])
def test_unmasked_bad_value_shows_in_its_slice_and_in_no_other(op, bad, where):
    x = X.copy()
    x[0, 1, 2] = bad
    if where is WHERE:
        where = WHERE.copy()
        where[0, 1, 2] = True
    y, (gradient, *_) = value_and_gradients(op)(x, *parameters(SHAPE, -1), where)
    slice_of_bad = np.zeros(SHAPE, bool)
    slice_of_bad[0, 1] = True if where is None else where[0, 1]
    for result in (y, gradient):
        assert np.isnan(result[0, 1, 2])
        assert np.isfinite(np.asarray(result)[~slice_of_bad]).all()
    if op != "rms_norm" or np.isnan(bad):
        assert np.isnan(np.asarray(y)[slice_of_bad]).all()


@in_passes
def test_bad_row_harms_the_gradient_of_the_scale_only_where_it_is_unmasked():
    x, where = X[0].copy(), WHERE[0].copy()
    where[1] = [True, True, False, False, True]
    x[1, 0] = np.nan
    loss = lambda scale: masksafe.layer_norm(x, scale, where=where).sum()  # noqa: E731
    gradient = jax.jit(jax.grad(loss))(np.ones(5, np.float32))
    np.testing.assert_array_equal(np.isnan(gradient), where[1])


# Precision.

OUTLIER = np.where(np.arange(1024) == 0, 1e3, np.random.default_rng(0).normal(size=(4, 1024)))
INPUTS = {
    "offset 1e4": np.random.default_rng(0).normal(size=(16, 512)) + 1e4,
    "offset 1e6": np.random.default_rng(0).normal(size=(16, 512)) + 1e6,
    "outlier first": OUTLIER,
    "outlier first, offset 1e3": OUTLIER + 1e3,
}


@in_passes
@pytest.mark.parametrize("x", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("axis", [-1, 0])
def test_no_digit_is_lost(x, masked, axis):
    x = x.astype(np.float32)
    where = np.random.default_rng(1).random(x.shape) < 0.7 if masked else None
    d_y = np.cos(np.arange(x.size)).reshape(x.shape).astype(np.float32)
    along = (lambda a: a) if axis == -1 else (lambda a: None if a is None else np.swapaxes(a, 0, 1))

    @jax.jit
    def results(x, where, d_y):
        y, pull_back = jax.vjp(lambda x: masksafe.layer_norm(x, axis=axis, where=where), x)
        return y, pull_back(d_y)[0], *masksafe.var_mean(x, axis, where)

    y, d_x, variance, mean = results(along(x), along(where), along(d_y))
    where = np.ones(x.shape, bool) if where is None else where
    n, wide = where.sum(-1), np.where(where, x.astype(np.float64), 0)
    expected_mean = wide.sum(-1) / n
    deviations = np.where(where, wide - expected_mean[:, None], 0)
    expected_variance = (deviations**2).sum(-1) / n
    np.testing.assert_allclose(variance, expected_variance, rtol=4e-6)
    # The mean is rounded, and so are the deviations from a shift, which are of the size of the spread.
    np.testing.assert_array_less(np.abs(mean - expected_mean), 1e-7 * np.abs(mean) + 4e-7 * expected_variance**0.5)
    std = np.sqrt(expected_variance + 1e-6)[:, None]
    normalized, d_y = deviations / std, np.where(where, d_y, 0)
    average = lambda a: a.sum(-1, keepdims=True) / n[:, None]  # noqa: E731
    d_expected = np.where(where, (d_y - average(d_y) - normalized * average(d_y * normalized)) / std, 0)
    np.testing.assert_allclose(along(np.asarray(y)), normalized, rtol=3e-6, atol=3e-6)
    np.testing.assert_allclose(along(np.asarray(d_x)), d_expected, rtol=1e-5, atol=1e-5 * np.abs(d_expected).max())


@in_passes
@pytest.mark.parametrize("where", ["no", "elements"])
@pytest.mark.parametrize("axis", [-1, 0])
def test_constant_has_no_spread_but_the_next_float_does(where, axis):
    x = np.repeat(np.array([[0.1], [1.1], [3.7], [-1e6], [1e-20]], np.float32), 41, axis=1)
    other = x.copy()
    other[:, 7] = np.nextafter(x[:, 7], np.float32(np.inf))
    along = (lambda a: a) if axis == -1 else (lambda a: np.swapaxes(a, 0, 1))
    mask = None if where == "no" else np.ones(along(x).shape, bool)
    fn = jax.jit(lambda x: (masksafe.var(x, axis, mask), masksafe.layer_norm(x, axis=axis, where=mask, epsilon=0)))
    for result in fn(along(x)):
        np.testing.assert_array_equal(result, 0)
    expected = float64_layer_norm(other[:3], epsilon=0)
    np.testing.assert_allclose(along(np.asarray(fn(along(other))[1]))[:3], expected, rtol=1e-4)


@in_passes
def test_squares_that_overflow_give_zeros():
    x = np.array([[1e30, -1e30, 3e25, 0], [1, 2, 3, 4]], np.float32)
    y, pull_back = jax.vjp(masksafe.layer_norm, x)
    np.testing.assert_array_equal(y[0], 0)
    assert np.isfinite(pull_back(np.ones_like(x))[0]).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("where", ["no", "rows", slow("some")])
def test_16_bits(dtype, where):
    x, scale, bias = X.astype(jnp.dtype(dtype)), *parameters(SHAPE, -1)
    y, (d_x, *d_parameters) = value_and_gradients("layer_norm")(x, scale, bias, WHERES[where])
    assert [a.dtype for a in (y, d_x, *d_parameters)] == [dtype, dtype, jnp.float32, jnp.float32]
    expected, (d_expected, *_) = reference("layer_norm", x, scale, bias, -1, WHERES[where])
    assert_close((y, d_x), (expected, d_expected), rtol=2e-2, atol=2e-2)


# One answer.


@in_passes
@OPS
def test_one_answer(op):
    scale, bias = used(op, *parameters(SHAPE, -1))
    fn = lambda x, scale, bias, where: apply(op, x, scale, bias, -1, where)  # noqa: E731
    assert_consistent(fn, X + 100, scale, bias, WHERE, modes=("jit", "vmap", "scan"))


@pytest.mark.parametrize("kind", [AxisType.Explicit, slow(AxisType.Auto)], ids=str)
@pytest.mark.parametrize(("axis", "of_where"), [(-1, (2, 6)), (0, (2, 6)), slow(-1, (2, 1)), (1, (1, 6))], ids=str)
def test_sharded_arrays(kind, axis, of_where):
    rng = np.random.default_rng(0)
    x, where = rng.normal(size=(16, 2, 6)).astype(np.float32), rng.random((16, *of_where)) < 0.7
    scale, bias = parameters(x.shape, axis)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        batch, whole = (NamedSharding(mesh, PartitionSpec(*names)) for names in (["data"], []))
        args = jax.device_put((x, scale, bias, where), (batch, whole, whole, batch))
        actual = value_and_gradients("layer_norm", axis)(*args)
    assert_close(actual, reference("layer_norm", x, scale, bias, axis, where), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("of_where", [(64, 6), (64, 1), (1, 6)], ids=str)
def test_inside_shard_map(of_where):
    rng = np.random.default_rng(0)
    x, where = rng.normal(size=(64, 6)).astype(np.float32), rng.random(of_where) < 0.7
    scale, bias = parameters(x.shape, -1)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    split, whole = PartitionSpec("data"), PartitionSpec()
    layer_norm = lambda x, scale, bias, where: masksafe.layer_norm(x, scale, bias, where=where)  # noqa: E731
    specs = split, whole, whole, whole if of_where[0] == 1 else split
    mapped = jax.shard_map(layer_norm, mesh=mesh, in_specs=specs, out_specs=split)

    @jax.jit
    def value_and_gradients(x, scale, bias):
        y, pull_back = jax.vjp(lambda *args: mapped(*args, where), x, scale, bias)
        return y, pull_back(np.cos(np.arange(x.size, dtype=np.float32)).reshape(x.shape))

    expected = reference("layer_norm", x, scale, bias, -1, where)
    assert_close(value_and_gradients(x, scale, bias), expected, rtol=1e-4, atol=1e-5)
