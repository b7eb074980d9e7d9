"""The programs of accelerators for norms and variances, run on a CPU: axes, masks, digits, devices.

The rows of the table run in these programs too.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from test_normalization import (
    AXES,
    DEAD,
    NAMES,
    SHAPE,
    WHERE,
    WHERES,
    X,
    apply,
    assert_close,
    cases,
    float64_layer_norm,
    forms,
    parameters,
    reference,
    used,
    value_and_gradients,
    weighted_sum,
)

import masksafe
from masksafe.testing import assert_consistent, assert_mask_safe

PASSES, REGISTERS = "in passes", "in registers"


@pytest.fixture
def elsewhere(request, choose):
    """Arrays of any size take the program of accelerators, and rows fit into their registers or not."""
    most = 0 if request.param == PASSES else 2**14
    choose(form="elsewhere", fewest_elements_of_few_passes=0, elements_of_row_in_one_kernel=most)


in_passes = pytest.mark.parametrize("elsewhere", [PASSES], indirect=True)
in_both = pytest.mark.parametrize("elsewhere", [PASSES, forms(REGISTERS)], indirect=True)


SHORT = [
    (PASSES, "layer_norm", (2, 1), "some"),
    (PASSES, "layer_norm", 1, "dead"),
    (PASSES, "rms_norm", 0, "no"),
    (PASSES, "standardize", -1, "rows"),
    (REGISTERS, "layer_norm", (2, 1), "rows"),
]


@pytest.mark.parametrize(
    ("elsewhere", "op", "axis", "where"),
    cases(SHORT, [PASSES, REGISTERS], NAMES, AXES, WHERES),
    ids=str,
    indirect=["elsewhere"],
)
def test_value_and_gradients_are_those_of_the_definition(elsewhere, op, axis, where):
    scale, bias = parameters(SHAPE, axis)
    actual = value_and_gradients(op, axis)(X, scale, bias, WHERES[where])
    assert_close(actual, reference(op, X, scale, bias, axis, WHERES[where]), rtol=1e-5, atol=2e-5)


@in_both
@pytest.mark.parametrize("where", ["rows", forms("no"), forms("dead")])
def test_second_derivatives_are_those_of_the_plain_rules(elsewhere, where):
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


@pytest.mark.forms
@in_passes
@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("where", [DEAD, DEAD[:, :, :1], DEAD[:, :1]], ids=["some", "last", "middle"])
def test_masked_elements_are_gone_from_a_variance(elsewhere, axis, where):
    fn = lambda x: masksafe.var_mean(x, axis, where)  # noqa: E731
    assert_mask_safe(fn, X, masked={0: ~np.broadcast_to(where, SHAPE)}, transforms=("jit",))


@pytest.mark.parametrize(
    ("elsewhere", "op", "masked"),
    cases([(PASSES, "layer_norm", True), (PASSES, "rms_norm", False)], [PASSES, REGISTERS], NAMES, [True, False]),
    ids=str,
    indirect=["elsewhere"],
)
def test_unmasked_bad_value_shows_in_its_slice_and_in_no_other(elsewhere, op, masked):
    x, where = X.copy(), WHERE.copy() if masked else None
    slice_of_bad = np.zeros(SHAPE, bool)
    slice_of_bad[0, 1] = True
    if masked:
        where[0, 1, 2] = True
        slice_of_bad &= where
    for bad in (np.nan, np.inf, -np.inf):
        x[0, 1, 2] = bad
        y, (gradient, *_) = map(jax.device_get, value_and_gradients(op)(x, *parameters(SHAPE, -1), where))
        for result in (y, gradient):
            assert np.isnan(result[0, 1, 2])
            assert np.isfinite(result[~slice_of_bad]).all()
        if op != "rms_norm" or np.isnan(bad):
            assert np.isnan(y[slice_of_bad]).all()


@in_passes
def test_bad_row_harms_the_gradient_of_the_scale_only_where_it_is_unmasked(elsewhere):
    x, where = X[0].copy(), WHERE[0].copy()
    where[1] = [True, True, False, False, True]
    x[1, 0] = np.nan
    loss = lambda scale: masksafe.layer_norm(x, scale, where=where).sum()  # noqa: E731
    gradient = jax.jit(jax.grad(loss))(np.ones(5, np.float32))
    np.testing.assert_array_equal(np.isnan(gradient), where[1])


# Precision.

OUTLIER = np.where(np.arange(1024) == 0, 1e3, np.random.default_rng(0).normal(size=(4, 1024)))
INPUTS = {
    "offset 1e4": np.random.default_rng(0).normal(size=(4, 1024)) + 1e4,
    "offset 1e6": np.random.default_rng(0).normal(size=(4, 1024)) + 1e6,
    "outlier first": OUTLIER,
    "outlier first, offset 1e3": OUTLIER + 1e3,
}


@in_passes
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("axis", [-1, forms(0)])
def test_no_digit_is_lost(elsewhere, masked, axis):
    along = (lambda a: a) if axis == -1 else (lambda a: None if a is None else np.swapaxes(a, 0, 1))

    @jax.jit
    def results(x, where, d_y):
        y, pull_back = jax.vjp(lambda x: masksafe.layer_norm(x, axis=axis, where=where), x)
        return y, pull_back(d_y)[0], *masksafe.var_mean(x, axis, where)

    for x in INPUTS.values():
        x, where = x.astype(np.float32), np.random.default_rng(1).random(x.shape) < (0.7 if masked else 1)
        d_y = np.cos(np.arange(x.size)).reshape(x.shape).astype(np.float32)
        y, d_x, variance, mean = results(along(x), along(where) if masked else None, along(d_y))
        n, wide = where.sum(-1), np.where(where, x.astype(np.float64), 0)
        expected_mean = wide.sum(-1) / n
        deviations = np.where(where, wide - expected_mean[:, None], 0)
        expected_variance = (deviations**2).sum(-1) / n
        np.testing.assert_allclose(variance, expected_variance, rtol=4e-6)
        # The mean is rounded, and so are the deviations from a shift, which are of the size of the spread.
        np.testing.assert_array_less(np.abs(mean - expected_mean), 1e-7 * np.abs(mean) + 4e-7 * expected_variance**0.5)
        std = np.sqrt(expected_variance + 1e-6)[:, None]
        normalized, d_y = deviations / std, np.where(where, d_y, 0)
        average = lambda a: a.sum(-1, keepdims=True) / n[:, None]  # noqa: B023, E731
        d_expected = np.where(where, (d_y - average(d_y) - normalized * average(d_y * normalized)) / std, 0)
        np.testing.assert_allclose(along(np.asarray(y)), normalized, rtol=3e-6, atol=3e-6)
        np.testing.assert_allclose(along(np.asarray(d_x)), d_expected, rtol=1e-5, atol=1e-5 * np.abs(d_expected).max())


@in_passes
@pytest.mark.parametrize("where", ["no", "elements"])
@pytest.mark.parametrize("axis", [-1, forms(0)])
def test_constant_has_no_spread_but_the_next_float_does(elsewhere, where, axis):
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
def test_squares_that_overflow_give_zeros(elsewhere):
    x = np.array([[1e30, -1e30, 3e25, 0], [1, 2, 3, 4]], np.float32)
    y, pull_back = jax.jit(lambda x: jax.vjp(masksafe.layer_norm, x))(x)
    np.testing.assert_array_equal(y[0], 0)
    assert np.isfinite(pull_back(np.ones_like(x))[0]).all()


@in_both
@pytest.mark.parametrize("dtype", ["bfloat16", forms("float16")])
@pytest.mark.parametrize("where", ["rows", forms("no"), forms("some")])
def test_16_bits(elsewhere, dtype, where):
    x, scale, bias = X.astype(jnp.dtype(dtype)), *parameters(SHAPE, -1)
    y, (d_x, *d_parameters) = value_and_gradients("layer_norm")(x, scale, bias, WHERES[where])
    assert [a.dtype for a in (y, d_x, *d_parameters)] == [dtype, dtype, jnp.float32, jnp.float32]
    expected, (d_expected, *_) = reference("layer_norm", x, scale, bias, -1, WHERES[where])
    assert_close((y, d_x), (expected, d_expected), rtol=2e-2, atol=2e-2)


# One answer.


@pytest.mark.forms
@in_passes
@pytest.mark.parametrize("op", NAMES)
def test_one_answer(elsewhere, op):
    scale, bias = used(op, *parameters(SHAPE, -1))
    fn = lambda x, scale, bias, where: apply(op, x, scale, bias, -1, where)  # noqa: E731
    assert_consistent(fn, X + 100, scale, bias, WHERE, modes=("jit", "vmap", "scan"))


@in_both
@pytest.mark.parametrize(
    ("kind", "axis", "of_where"),
    cases([("Explicit", 1, (1, 6))], ["Explicit", "Auto"], [-1, 0, 1], [(2, 6), (2, 1), (1, 6)]),
    ids=str,
)
def test_sharded_arrays(elsewhere, kind, axis, of_where):
    rng = np.random.default_rng(0)
    x, where = rng.normal(size=(16, 2, 6)).astype(np.float32), rng.random((16, *of_where)) < 0.7
    scale, bias = parameters(x.shape, axis)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType[kind],))
    with jax.set_mesh(mesh):
        batch, whole = (NamedSharding(mesh, PartitionSpec(*names)) for names in (["data"], []))
        args = jax.device_put((x, scale, bias, where), (batch, whole, whole, batch))
        actual = value_and_gradients("layer_norm", axis)(*args)
    assert_close(actual, reference("layer_norm", x, scale, bias, axis, where), rtol=1e-4, atol=1e-5)


@in_both
@pytest.mark.parametrize("of_where", [(64, 6), forms((64, 1)), forms((1, 6))], ids=str)
def test_inside_shard_map(elsewhere, of_where):
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
