"""layer_norm, rms_norm, standardize: values, precision, the contract, arguments."""

import functools
import itertools

import chex
import flax.linen as nn
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import masksafe
from masksafe.testing import assert_gradients, assert_mask_safe

SHAPE = (3, 4, 5)
X = np.random.default_rng(0).normal(2.0, 3.0, SHAPE).astype(np.float32)
WHERE = np.random.default_rng(1).random(SHAPE) < 0.7
DEAD = WHERE.copy()
DEAD[1] = False
DEAD[2, 3] = False
WHERES = {"no": None, "some": WHERE, "dead": DEAD, "rows": DEAD[:, :, :1], "columns": DEAD[0]}


def parameters(shape, axis, seed=2):
    axes = axis if isinstance(axis, tuple) else (axis,)
    sizes = [shape[a] for a in axes]
    rng = np.random.default_rng(seed)
    return rng.normal(1.0, 0.5, sizes).astype(np.float32), rng.normal(size=sizes).astype(np.float32)


def weights_of(shape):
    return np.cos(np.arange(np.prod(shape, dtype=int))).reshape(shape).astype(np.float32)


def used(op, scale, bias):
    return {"layer_norm": (scale, bias), "rms_norm": (scale, None), "standardize": (None, None)}[op]


def apply(op, x, scale, bias, axis, where=None, epsilon=1e-6):
    """Any of the three, with the arguments that it has."""
    if op == "standardize":
        return masksafe.standardize(x, axis, epsilon=epsilon, where=where)
    if op == "rms_norm":
        return masksafe.rms_norm(x, scale, axis=axis, where=where, epsilon=epsilon)
    return masksafe.layer_norm(x, scale, bias, axis=axis, where=where, epsilon=epsilon)


def weighted_sum(op, x, scale, bias, axis, where=None):
    """With the op's result, in float32 at least."""
    y = apply(op, x, *used(op, scale, bias), axis, where)
    return jnp.sum(y * weights_of(y.shape)), y


@functools.cache
def value_and_gradients(op, axis=-1):
    """The op, and the gradients of its weighted sum with respect to x, scale and bias, compiled."""

    def pair(x, scale, bias, where=None):
        total = lambda *args: weighted_sum(op, *args, axis, where)  # noqa: E731
        (_, y), gradients = jax.value_and_grad(total, (0, 1, 2), has_aux=True)(x, scale, bias)
        return y, gradients

    return jax.jit(pair)


def reference(op, x, scale=None, bias=None, axis=-1, where=None, epsilon=1e-6):
    """The same by the definition, in float64."""
    axes = tuple(a % x.ndim for a in (axis if isinstance(axis, tuple) else (axis,)))
    others = tuple(a for a in range(x.ndim) if a not in axes)
    where = np.broadcast_to(True if where is None else where, x.shape)
    n = np.maximum(where.sum(axes, keepdims=True), 1)
    average = lambda a: np.where(where, a, 0).sum(axes, keepdims=True) / n  # noqa: E731
    centred = lambda a: a - (0 if op == "rms_norm" else average(a))  # noqa: E731

    def laid_out(parameter, default):
        if parameter is None:
            return default
        return np.expand_dims(np.transpose(np.asarray(parameter, np.float64), np.argsort(axes)), others)

    def cotangent_of(parameter, is_used, d_elements):
        total = np.where(where, d_elements, 0).sum(others).transpose(np.argsort(np.argsort(axes)))
        return None if parameter is None else total if is_used else np.zeros_like(total)

    gamma, beta = map(laid_out, used(op, scale, bias), (1, 0))
    deviations = np.where(where, centred(np.where(where, np.asarray(x, np.float64), 0)), 0)
    reciprocal_std = 1 / np.sqrt(average(deviations**2) + epsilon)
    normalized = deviations * reciprocal_std
    d_y = weights_of(x.shape)
    d_normalized = np.where(where, d_y * gamma, 0)
    d_x = np.where(where, (centred(d_normalized) - normalized * average(d_normalized * normalized)) * reciprocal_std, 0)
    d_scale = cotangent_of(scale, op != "standardize", d_y * normalized)
    d_bias = cotangent_of(bias, op == "layer_norm", d_y)
    return np.where(where, normalized * gamma + beta, 0), (d_x, d_scale, d_bias)


def assert_close(actual, expected, rtol, atol):
    """Also of arrays in 16 bits."""
    actual = jax.tree.map(lambda a: np.asarray(a, np.float64), actual)
    chex.assert_trees_all_close(actual, expected, rtol=rtol, atol=atol)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


OPS = pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "standardize"])
# One core serves all three: the others than layer_norm get the long tests in full in the slow run.
OTHER_OPS_SLOWLY = pytest.mark.parametrize("op", ["layer_norm", slow("rms_norm"), slow("standardize")])


@pytest.fixture
def small_blocks(choose):
    """Blocks so small that the arrays of these tests are worked through in several."""
    choose(row_block_elements=8)


# Values and gradients.

CASES = [
    ("layer_norm", -1, "no"),
    ("layer_norm", -1, "dead"),
    ("layer_norm", (2, 0), "some"),
    ("layer_norm", 1, "rows"),
    ("rms_norm", -1, "dead"),
    ("rms_norm", (2, 0), "columns"),
    ("standardize", -1, "dead"),
    ("standardize", 1, "no"),
]
AXES = [-1, 0, (0, 2), (2, 1), (0, 1, 2), (2, 0, 1)]
OTHER_CASES = set(itertools.product(["layer_norm"], AXES, WHERES)) - set(CASES)


@pytest.mark.parametrize(
    ("op", "axis", "where"), [*CASES, *itertools.starmap(slow, sorted(OTHER_CASES, key=str))], ids=str
)
def test_value_and_gradients_are_those_of_the_definition(op, axis, where):
    scale, bias = parameters(SHAPE, axis)
    actual = value_and_gradients(op, axis)(X, scale, bias, WHERES[where])
    # A gradient is the difference of numbers of the size of the largest of them.
    assert_close(actual, reference(op, X, scale, bias, axis, WHERES[where]), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("op", "shape", "dtype", "masked"),
    [
        ("layer_norm", (8, 5), "float32", True),
        ("layer_norm", (7, 3), "bfloat16", True),  # with rows left over
        ("rms_norm", (2, 3, 4), "float32", False),
        slow("standardize", (7, 3), "float32", True),
        slow("layer_norm", (13, 2), "float16", True),
        slow("layer_norm", (7, 3), "float16", False),
        slow("rms_norm", (8, 5), "bfloat16", True),
        slow("layer_norm", (13, 2), "bfloat16", False),
    ],
)
@pytest.mark.usefixtures("small_blocks")
def test_blocks_give_what_one_pass_gives(op, shape, dtype, masked):
    rng = np.random.default_rng(3)
    x = rng.normal(size=shape).astype(jnp.dtype(dtype))
    where = rng.random(shape) < 0.7 if masked else None
    args = x, *parameters(shape, -1), where
    lowered = value_and_gradients(op).lower(*args)
    assert "while" in lowered.as_text()
    # The result is rounded, and so is the cotangent, whose sums are those of the reverse rule.
    tolerance = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}[dtype]
    assert_close(lowered.compile()(*args), reference(op, *args[:3], -1, where), rtol=tolerance, atol=tolerance)


@OPS
def test_both_modes_of_autodiff(op):
    """First and second derivatives along a direction are those of the definition, in every order of the modes."""
    args = X, *parameters(SHAPE, -1)
    directions, step = [np.random.default_rng(4).normal(size=a.shape) for a in args], 1e-4

    def gradients_at(distance):
        return reference(op, *(a + distance * d for a, d in zip(args, directions, strict=True)), -1, DEAD)[1]

    second = jax.tree.map(lambda a, b: (b - a) / (2 * step), gradients_at(-step), gradients_at(step))
    first = sum((g * d).sum() for g, d in zip(gradients_at(0), directions, strict=True))
    fn = lambda args: weighted_sum(op, *args, -1, DEAD)[0]  # noqa: E731

    @jax.jit
    def derivatives(args, directions):
        along = lambda f: lambda args: jax.jvp(f, (args,), (directions,))[1]  # noqa: E731
        slope = lambda args: sum(map(jnp.vdot, jax.grad(fn)(args), directions))  # noqa: E731
        reverse = along(jax.grad(fn))(args), jax.grad(slope)(args)
        with masksafe.forward_mode():
            return (*reverse, along(jax.grad(fn))(args)), along(fn)(args)

    products, slope = derivatives(args, tuple(d.astype(np.float32) for d in directions))
    for product in products:  # Hessian times direction
        assert_close(product, second, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(slope, first, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("axis", [(2, 0)], ids=str)
def test_gradients_agree_with_finite_differences_in_both_modes(axis):
    fn = lambda x, scale, bias: masksafe.layer_norm(x, scale, bias, axis=axis, where=DEAD)  # noqa: E731
    assert_gradients(fn, X, *parameters(SHAPE, axis))


@pytest.mark.parametrize("mask", [None, WHERE], ids=["all", "masked"])
@pytest.mark.parametrize("axis", [-1, slow((-2, -1))], ids=str)
def test_equals_flax_on_clean_input(mask, axis):
    scale, bias = parameters(SHAPE, axis)
    layer_norm = nn.LayerNorm(reduction_axes=axis, feature_axes=axis, use_fast_variance=False)
    rms_norm = nn.RMSNorm(reduction_axes=axis, feature_axes=axis)

    @jax.jit
    def both(x, scale, bias):
        ours = masksafe.layer_norm(x, scale, bias, axis=axis, where=mask)
        ours = ours, masksafe.rms_norm(x, scale, axis=axis, where=mask)
        theirs = layer_norm.apply({"params": {"scale": scale, "bias": bias}}, x, mask=mask)
        return ours, (theirs, rms_norm.apply({"params": {"scale": scale}}, x, mask=mask))

    ours, theirs = both(X, scale, bias)
    theirs = jax.tree.map(lambda y: y if mask is None else np.where(mask, y, 0), theirs)
    chex.assert_trees_all_close(ours, theirs, rtol=1e-5, atol=1e-5)


# Precision: the peers' cases.


def float64_layer_norm(x, epsilon=1e-6):
    return reference("layer_norm", x, epsilon=epsilon)[0]


@pytest.mark.parametrize("offset", [1e4, 1e6], ids=str)
def test_large_offset_costs_no_digit(offset):
    x = (np.random.default_rng(0).normal(size=(16, 512)) + offset).astype(np.float32)
    variance, mean = masksafe.var_mean(x, -1)
    np.testing.assert_allclose(variance, x.astype(np.float64).var(-1), rtol=1e-6)
    np.testing.assert_allclose(mean, x.astype(np.float64).mean(-1), rtol=1e-7)
    np.testing.assert_allclose(masksafe.layer_norm(x), float64_layer_norm(x), atol=2e-6)
    np.testing.assert_allclose(masksafe.standardize(x), float64_layer_norm(x, epsilon=1e-5), atol=2e-6)


def test_the_fast_variance_of_the_peers_fails_where_ours_does_not():
    x = (np.random.default_rng(0).normal(size=(16, 512)) + 1e4).astype(np.float32)
    params = {"params": {"scale": np.ones(512, np.float32), "bias": np.zeros(512, np.float32)}}
    module = nnx.LayerNorm(512, rngs=nnx.Rngs(0))
    theirs = jax.jit(lambda x: (nn.LayerNorm().apply(params, x), module(x), jax.nn.standardize(x)))(x)
    assert all(np.abs(y - float64_layer_norm(x)).max() > 100 for y in theirs)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 2e-3), ("bfloat16", 1.6e-2)])
@pytest.mark.parametrize(("offset", "spread"), [(1e3, 1.0), (100.0, 1.0), (1e4, 300.0)])
def test_16_bit_inputs_are_rounded_once(dtype, tolerance, offset, spread):
    x = np.random.default_rng(0).normal(offset, spread, (8, 1000)).astype(jnp.dtype(dtype))
    y = masksafe.layer_norm(x)
    assert y.dtype == dtype
    np.testing.assert_allclose(np.asarray(y, np.float64), float64_layer_norm(x), atol=tolerance)


@OPS
def test_16_bit_gradients_are_accumulated_in_float32(op):
    x, scale, bias = X.astype(jnp.bfloat16), *parameters(SHAPE, -1)
    y, gradients = value_and_gradients(op)(x, scale, bias)
    assert [a.dtype for a in (y, *gradients)] == [jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.float32]
    (d_x, *d_parameters), expected = gradients, reference(op, x, scale, bias)[1]
    # The cotangent is rounded to 8 bits, and d_x again; a float32 sum of 12 such terms is no worse than they are.
    assert_close(d_x, expected[0], rtol=2e-2, atol=2e-2)
    assert_close(d_parameters, list(expected[1:]), rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float16", "bfloat16", "float32"])
def test_strict_promotion_and_narrow_floats(dtype):
    def outputs_and_gradient(x):
        outputs = masksafe.layer_norm(x, where=WHERE), masksafe.rms_norm(x), *masksafe.var_mean(x, -1, WHERE)
        return *outputs, jax.grad(lambda x: masksafe.layer_norm(x).astype(jnp.float32).max())(x)

    with jax.numpy_dtype_promotion("strict"):
        results = jax.eval_shape(outputs_and_gradient, X.astype(jnp.dtype(dtype)))
    assert {a.dtype for a in results} == {jnp.dtype(dtype)}


def test_float64_stays_float64():
    with jax.enable_x64(True):
        x = np.random.default_rng(0).normal(size=(4, 6)) + 1e4
        y = masksafe.layer_norm(x)
        assert y.dtype == jnp.float64
        np.testing.assert_allclose(y, float64_layer_norm(x), atol=1e-11)


# The contract.


@OPS
@pytest.mark.parametrize("axis", [-1, slow(1), slow((2, 0))], ids=str)
def test_masked_elements_are_gone(op, axis):
    scale, bias = used(op, *parameters(SHAPE, axis))
    fn = lambda x, scale, bias: apply(op, x, scale, bias, axis, DEAD)  # noqa: E731
    assert_mask_safe(fn, X, scale, bias, masked={0: ~DEAD}, transforms=("jit",))


@OTHER_OPS_SLOWLY
@pytest.mark.usefixtures("small_blocks")
def test_masked_elements_are_gone_in_blocks(op):
    scale, bias = used(op, *parameters(SHAPE, -1))
    fn = lambda x, scale, bias: apply(op, x, scale, bias, -1, DEAD)  # noqa: E731
    assert_mask_safe(fn, X, scale, bias, masked={0: ~DEAD}, transforms=("jit",))


def test_parameters_under_the_mask_are_gone():
    where = np.array([True, True, False, True, False])
    fn = lambda x, scale, bias: masksafe.layer_norm(x, scale, bias, where=where)  # noqa: E731
    masked = {0: ~where, 1: ~where, 2: ~where}
    assert_mask_safe(fn, X, *parameters(SHAPE, -1), masked=masked, transforms=("jit",))


def test_parameter_that_is_bad_where_one_row_masks_it_harms_only_the_others():
    scale, where = np.array([1.0, np.nan, 1.0], np.float32), np.array([[True, False, True], [True, True, True]])
    x = np.array([[1.0, 2.0, 3.0], [1.0, 2.0, 4.0]], np.float32)
    loss = lambda x: masksafe.layer_norm(x, scale, where=where)[0].sum()  # noqa: E731
    assert np.isfinite(jax.jit(jax.grad(loss))(x)[0]).all()


def test_parameter_that_is_bad_under_the_mask_is_gone_from_forward_mode():
    where = np.array([True, True, False, True])
    x = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)

    @jax.jit
    def derivatives(scale):
        loss = lambda x: (masksafe.layer_norm(x, scale, where=where) ** 2).sum()  # noqa: E731
        with masksafe.forward_mode():
            return [way(loss)(x) for way in (jax.grad, jax.jacfwd, jax.hessian)]

    nan, inf, zero = (derivatives(np.array([1.0, 2.0, s, 3.0], np.float32)) for s in (np.nan, np.inf, 0))
    chex.assert_trees_all_equal(nan, inf, zero)


@pytest.mark.parametrize(
    ("op", "epsilon", "masked"),
    [
        ("layer_norm", 0, False),
        ("layer_norm", 0, True),
        ("rms_norm", 0, False),
        slow("layer_norm", 1e-6, False),
        slow("rms_norm", 0, True),
        slow("standardize", 0, False),
    ],
)
def test_slice_without_a_spread_is_finite_to_the_second_derivative(op, epsilon, masked):
    scale, bias = used(op, *parameters((4,), -1))
    direction = weights_of(4)  # a derivative that is not finite makes its product with this one not finite

    @jax.jit
    def value_and_derivatives(x, where=None):
        fn = lambda x: apply(op, x, scale, bias, -1, where, epsilon)  # noqa: E731
        loss = lambda x: (fn(x) ** 2).sum()  # noqa: E731
        along = lambda f: lambda x: jax.jvp(f, (x,), (direction,))[1]  # noqa: E731
        reverse = jax.grad(loss)(x), along(jax.grad(loss))(x), jax.grad(lambda x: jax.grad(loss)(x) @ direction)(x)
        with masksafe.forward_mode():
            return fn(x), reverse, along(along(loss))(x)

    constant, zeros = np.full(4, 3.5, np.float32), np.zeros(4, np.float32)
    one_left = np.array([2.0, 7.0, 1.0, 0.0], np.float32), np.array([False, True, False, False])
    for args in [one_left] if masked else [(constant,), (zeros,)]:
        value, *derivatives = value_and_derivatives(*args)
        chex.assert_tree_all_finite((value, derivatives))
        if op == "layer_norm":
            np.testing.assert_array_equal(value, np.where(args[1], bias, 0) if masked else bias)


@pytest.mark.parametrize("n", [41, 1000, slow(3), slow(14), slow(63)])
def test_constant_whose_mean_is_rounded_has_no_spread(n):
    x = np.repeat(np.array([[0.1], [1.1], [3.7], [-1e6], [1e-20]], np.float32), n, axis=1)

    @jax.jit
    def results(x):
        cubes = lambda x: jnp.sum(masksafe.standardize(x, epsilon=0) ** 3 * np.arange(n, dtype=np.float32))  # noqa: E731
        return masksafe.var(x, -1), masksafe.layer_norm(x, epsilon=0), jax.grad(cubes)(x)

    for result in results(x):
        np.testing.assert_array_equal(result, 0)


def test_constant_but_for_the_next_float_has_a_spread():
    x = np.repeat(np.array([[0.1], [1.1], [-1e6]], np.float32), 41, axis=1)
    x[:, 7] = np.nextafter(x[:, 7], np.float32(np.inf))
    np.testing.assert_allclose(masksafe.standardize(x, epsilon=0), float64_layer_norm(x, epsilon=0), rtol=1e-4)


@OPS
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_unmasked_bad_value_shows_in_its_slice_and_in_no_other(op, bad):
    x, where = X.copy(), WHERE.copy()
    x[0, 1, 2], where[0, 1, 2] = bad, True
    y, (gradient, *_) = value_and_gradients(op)(x, *parameters(SHAPE, -1), where)
    slice_of_bad = np.zeros(SHAPE, bool)
    slice_of_bad[0, 1] = where[0, 1]
    if op == "rms_norm" and np.isinf(bad):  # the others are divided by infinity
        assert (np.isnan(y[0, 1]) | (y[0, 1] == 0)).all()
    else:
        assert np.isnan(y[slice_of_bad]).all()
    for result in (y, gradient):
        assert np.isnan(result[0, 1, 2])
        assert np.isfinite(np.asarray(result)[~slice_of_bad]).all()


@OPS
@hypothesis.settings(max_examples=40)
@hypothesis.given(
    x=st.lists(st.floats(-100, 100, width=32), min_size=8, max_size=8),
    where=st.lists(st.booleans(), min_size=8, max_size=8),
    garbage=st.sampled_from([np.nan, np.inf, 1e38]),
)
@hypothesis.example(x=[1.0] * 8, where=[False] * 8, garbage=np.nan)
def test_masking_equals_taking_out(op, x, where, garbage):
    x, where = np.array(x, np.float32), np.array(where)
    garbage = np.where(where, x, garbage).astype(np.float32)
    scale, bias = parameters((8,), 0)
    masked, (gradient, *_) = jax.device_get(value_and_gradients(op, 0)(garbage, scale, bias, where))
    np.testing.assert_array_equal(masked[~where], 0)
    np.testing.assert_array_equal(gradient[~where], 0)
    if where.any():
        expected = reference(op, x[where], scale[where], bias[where], 0)[0]
        np.testing.assert_allclose(masked[where], expected, rtol=1e-4, atol=1e-4)


@OPS
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), slow((2, 0, 3))], ids=str)
def test_arrays_without_elements(op, shape):
    scale = np.ones(shape[-1], np.float32)
    y, (d_x, *d_parameters) = value_and_gradients(op)(np.zeros(shape, np.float32), scale, scale)
    assert y.shape == d_x.shape == shape
    np.testing.assert_array_equal(d_parameters, 0)


# What jax.nn.standardize takes beyond that.

MEAN = np.full((3, 1, 1), 0.3, np.float32)
VARIANCE = np.arange(1.0, 13.0, dtype=np.float32).reshape(3, 4, 1)
CALLS = {
    "all axes": {"axis": None},
    "a mean": {"mean": MEAN},
    "a mean, stable": {"mean": MEAN, "algorithm": "stable"},
    "a variance": {"variance": VARIANCE, "axis": (0, 2)},
    "both": {"mean": MEAN, "variance": VARIANCE},
    "an array for epsilon": {"epsilon": np.float32(0.1)},
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_standardize_is_that_of_jax_nn(call):
    @jax.jit
    def value_and_gradient(x):
        out, pull_back = jax.vjp(lambda x: [op(x, **call) for op in (masksafe.standardize, jax.nn.standardize)], x)
        zero = jnp.zeros_like(x)
        return tuple((y, pull_back(d)) for y, d in zip(out, ([jnp.cos(x), zero], [zero, jnp.cos(x)]), strict=True))

    chex.assert_trees_all_close(*value_and_gradient(X), rtol=1e-4, atol=1e-5)


def test_standardize_takes_its_arguments_in_the_order_of_jax_nn():
    arguments = (X, -1, MEAN, VARIANCE, 0.1, np.ones(X.shape, bool))
    ours, theirs = masksafe.standardize(*arguments), jax.nn.standardize(*arguments)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_standardize_of_integers():
    x = np.array([[1, 2, 4], [7, 7, 9]])
    np.testing.assert_allclose(masksafe.standardize(x), reference("standardize", x, epsilon=1e-5)[0], rtol=1e-5)


@pytest.mark.parametrize("other", ["mean", "variance", "epsilon"])
def test_standardize_has_the_dtype_of_jax_nn(other):
    x, one = X.astype(jnp.bfloat16), np.ones((), np.float32)
    ours, theirs = (
        jax.eval_shape(lambda x, op=op: op(x, **{other: one}), x) for op in (masksafe.standardize, jax.nn.standardize)
    )
    assert ours.dtype == theirs.dtype == jnp.float32


@pytest.mark.parametrize(
    "name", ["both", *map(slow, ["a mean", "a mean, stable", "a variance", "an array for epsilon"])]
)
def test_standardize_with_given_statistics_is_mask_safe(name):
    call, where = CALLS[name], DEAD | (np.arange(3) == 0)[:, None, None]
    given = {key: np.broadcast_to(call[key], X.shape) for key in ("mean", "variance") if key in call}
    rest = {key: value for key, value in call.items() if key not in given}

    def fn(x, given):
        return masksafe.standardize(x, where=where, **given, **rest)

    masked = {0: ~where} | ({1: dict.fromkeys(given, ~where)} if given else {})
    assert_mask_safe(fn, X, given, masked=masked, transforms=("jit",))
    np.testing.assert_array_equal(jax.jit(fn)(X, given)[1], 0)


@pytest.mark.parametrize("epsilon", [0.0, 1e-5])
def test_traced_epsilon_is_the_same_as_a_number(epsilon):
    x = np.concatenate([X[:2], np.full((1, 4, 5), 3.3, np.float32)])  # with constant slices
    y, (gradient,) = standardized_with(x, epsilon)
    expected, (expected_gradient, *_) = reference("standardize", X, epsilon=epsilon)
    np.testing.assert_allclose(y[:2], expected[:2], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradient[:2], expected_gradient[:2], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(y[2], 0)
    assert np.isfinite(gradient[2]).all()


@jax.jit
def standardized_with(x, epsilon):
    y, pull_back = jax.vjp(lambda x: masksafe.standardize(x, epsilon=epsilon), x)
    return y, pull_back(weights_of(x.shape))


def test_variance_about_a_given_mean_keeps_its_digits():
    x = (1e4 + np.random.default_rng(3).normal(size=(2, 512))).astype(np.float32)
    mean = np.float32(1e4)
    exact = np.asarray(x, np.float64) - 1e4
    exact /= np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(masksafe.standardize(x, mean=mean, algorithm="stable"), exact, atol=1e-5)


# Arguments.


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: masksafe.layer_norm(np.arange(3)), TypeError, "layer_norm: x: got dtype int32; expected a float"),
        (lambda: masksafe.layer_norm(X, jnp.ones(4)), ValueError, r"scale: got shape \(4,\); expected shape \(5,\)"),
        (lambda: masksafe.layer_norm(X, bias=jnp.ones((1, 5))), ValueError, r"layer_norm: bias: got shape \(1, 5\)"),
        (
            lambda: masksafe.rms_norm(X, jnp.ones((4, 5)), axis=(2, 1)),
            ValueError,
            r"rms_norm: scale: got shape \(4, 5\); expected shape \(5, 4\), that of the axes \(2, 1\) of x",
        ),
        (lambda: masksafe.layer_norm(X, jnp.arange(5)), TypeError, "layer_norm: scale: got dtype int32"),
        (lambda: masksafe.standardize(X, axis=3), ValueError, "standardize: axis: got value 3"),
        (lambda: masksafe.standardize(X, where=jnp.ones(4, bool)), ValueError, "standardize: where: got shape"),
        (lambda: masksafe.standardize(X, where=jnp.ones(5)), TypeError, "standardize: where: got dtype float32"),
        (lambda: masksafe.standardize(X, mean=jnp.ones(4)), ValueError, r"standardize: mean: got shape \(4,\)"),
        (lambda: masksafe.standardize(X, epsilon=jnp.ones(5)), ValueError, r"standardize: epsilon: got shape \(5,\)"),
        (lambda: masksafe.standardize(X, algorithm="slow"), ValueError, "standardize: algorithm: got value 'slow'"),
        (lambda: masksafe.layer_norm(X, epsilon=-1e-6), ValueError, "layer_norm: epsilon: got value -1e-06; expected"),
        (lambda: masksafe.layer_norm(X, epsilon=float("nan")), ValueError, "layer_norm: epsilon: got value nan"),
        (lambda: jax.jit(lambda e: masksafe.layer_norm(X, epsilon=e))(0.1), TypeError, "layer_norm: epsilon: got a t"),
        (lambda: jax.jit(lambda c: masksafe.var(X, correction=c))(1.0), TypeError, "var: correction: got a traced"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("scale", [2.0**-100, 2.0**60])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "standardize", "group_norm", "batch_norm", "weights"])
def test_without_epsilon_the_scale_of_a_row_has_no_effect(name, masked, scale):
    x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    where = np.arange(6) < 4 if masked else None

    def norm(x):
        if name == "weights":
            return masksafe.layer_norm(x, epsilon=0, where=where, weights=jnp.ones(6))
        extra = {"num_groups": 2} if name == "group_norm" else {}
        y = getattr(masksafe, name)(x, epsilon=0, where=where, **extra)
        return y[0] if name == "batch_norm" else y

    direction = np.cos(np.arange(24)).reshape(4, 6)
    value_and_gradient = jax.jit(lambda x: (norm(x), jax.grad(lambda x: jnp.sum(norm(x) * direction))(x)))
    (y, d_x), (of_scaled, d_scaled) = value_and_gradient(x), value_and_gradient(x * np.float32(scale))
    np.testing.assert_allclose(of_scaled, y, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(d_scaled * np.float32(scale), d_x, rtol=1e-5, atol=1e-5)
