"""layer_norm, rms_norm, standardize: axes, precision, what peers compute, arguments. The table has the contract."""

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


def forms(*values):
    return pytest.param(*values, marks=pytest.mark.forms)


def cases(short, *choices):
    """Parameters: those, and under the mark `forms` all others of a product."""
    return [*short, *itertools.starmap(forms, sorted(set(itertools.product(*choices)) - set(short), key=str))]


NAMES = ["layer_norm", "rms_norm", "standardize"]
AXES = [-1, 0, 1, (0, 2), (2, 0), (2, 1), (0, 1, 2), (2, 0, 1)]


# Values and gradients.

SHORT = [("layer_norm", (2, 0), "some"), ("layer_norm", 1, "rows"), ("rms_norm", (2, 0), "columns")]


@pytest.mark.parametrize(("op", "axis", "where"), cases(SHORT, NAMES, AXES, WHERES), ids=str)
def test_value_and_gradients_are_those_of_the_definition(op, axis, where):
    scale, bias = parameters(SHAPE, axis)
    actual = value_and_gradients(op, axis)(X, scale, bias, WHERES[where])
    # A gradient is the difference of numbers of the size of the largest of them.
    assert_close(actual, reference(op, X, scale, bias, axis, WHERES[where]), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("op", "shape", "dtype", "masked"),
    cases(
        [("layer_norm", (7, 3), "bfloat16", True)],  # with rows left over
        NAMES,
        [(8, 5), (7, 3), (13, 2), (2, 3, 4)],
        ["float32", "float16", "bfloat16"],
        [True, False],
    ),
    ids=str,
)
def test_blocks_give_what_one_pass_gives(op, shape, dtype, masked, choose):
    choose(row_block_elements=8)
    rng = np.random.default_rng(3)
    x = rng.normal(size=shape).astype(jnp.dtype(dtype))
    where = rng.random(shape) < 0.7 if masked else None
    args = x, *parameters(shape, -1), where
    lowered = value_and_gradients(op).lower(*args)
    assert "while" in lowered.as_text()
    y, gradients = lowered.compile()(*args)
    assert [a.dtype for a in (y, *gradients)] == [x.dtype, x.dtype, "float32", "float32"]
    # The result is rounded, and so is the cotangent, whose sums are those of the reverse rule.
    tolerance = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}[dtype]
    assert_close((y, gradients), reference(op, *args[:3], -1, where), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("axis", "masked"), cases([(-1, True)], [-1, (-2, -1)], [True, False]), ids=str)
def test_equals_flax_on_clean_input(axis, masked):
    scale, bias = parameters(SHAPE, axis)
    layer_norm = nn.LayerNorm(reduction_axes=axis, feature_axes=axis, use_fast_variance=False)
    rms_norm, mask = nn.RMSNorm(reduction_axes=axis, feature_axes=axis), WHERE if masked else None

    @jax.jit
    def both(x, scale, bias):
        ours = masksafe.layer_norm(x, scale, bias, axis=axis, where=mask)
        ours = ours, masksafe.rms_norm(x, scale, axis=axis, where=mask)
        theirs = layer_norm.apply({"params": {"scale": scale, "bias": bias}}, x, mask=mask)
        return ours, (theirs, rms_norm.apply({"params": {"scale": scale}}, x, mask=mask))

    ours, theirs = both(X, scale, bias)
    theirs = jax.tree.map(lambda y: np.where(WHERE if masked else True, y, 0), theirs)
    chex.assert_trees_all_close(ours, theirs, rtol=1e-5, atol=1e-5)


# Precision.


def float64_layer_norm(x, epsilon=1e-6):
    return reference("layer_norm", x, epsilon=epsilon)[0]


def test_large_offset_costs_no_digit():
    fn = jax.jit(lambda x: (*masksafe.var_mean(x, -1), masksafe.layer_norm(x), masksafe.standardize(x)))
    for offset in (1e4, 1e6):
        x = (np.random.default_rng(0).normal(size=(16, 512)) + offset).astype(np.float32)
        variance, mean, normed, standardized = fn(x)
        np.testing.assert_allclose(variance, x.astype(np.float64).var(-1), rtol=1e-6)
        np.testing.assert_allclose(mean, x.astype(np.float64).mean(-1), rtol=1e-7)
        np.testing.assert_allclose(normed, float64_layer_norm(x), atol=2e-6)
        np.testing.assert_allclose(standardized, float64_layer_norm(x, epsilon=1e-5), atol=2e-6)


@pytest.mark.forms
def test_the_fast_variance_of_the_peers_fails_where_ours_does_not():
    x = (np.random.default_rng(0).normal(size=(16, 512)) + 1e4).astype(np.float32)
    params = {"params": {"scale": np.ones(512, np.float32), "bias": np.zeros(512, np.float32)}}
    module = nnx.LayerNorm(512, rngs=nnx.Rngs(0))
    theirs = jax.jit(lambda x: (nn.LayerNorm().apply(params, x), module(x), jax.nn.standardize(x)))(x)
    assert all(np.abs(y - float64_layer_norm(x)).max() > 100 for y in theirs)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 1.6e-2), forms("float16", 2e-3)])
def test_16_bits_with_an_offset_are_rounded_once(dtype, tolerance):
    fn = jax.jit(masksafe.layer_norm)
    for offset, spread in ((1e3, 1.0), (100.0, 1.0), (1e4, 300.0)):
        x = np.random.default_rng(0).normal(offset, spread, (8, 1000)).astype(jnp.dtype(dtype))
        np.testing.assert_allclose(np.asarray(fn(x), np.float64), float64_layer_norm(x), atol=tolerance)


def test_narrow_floats_stay_what_they_are():
    def outputs_and_gradient(x):
        outputs = masksafe.layer_norm(x, where=WHERE), masksafe.rms_norm(x), *masksafe.var_mean(x, -1, WHERE)
        return *outputs, jax.grad(lambda x: masksafe.layer_norm(x).astype(jnp.float32).max())(x)

    with jax.numpy_dtype_promotion("strict"):
        results = jax.eval_shape(outputs_and_gradient, X.astype("float8_e4m3fn"))
    assert {a.dtype for a in results} == {jnp.dtype("float8_e4m3fn")}


@pytest.mark.parametrize(
    ("op", "epsilon", "masked"), cases([("layer_norm", 0, True)], NAMES, [0, 1e-6], [True, False]), ids=str
)
def test_slice_without_a_spread_is_finite_to_the_second_derivative(op, epsilon, masked):
    scale, bias = used(op, *parameters((4,), -1))
    direction = weights_of(4)  # a derivative that is not finite makes its product with this one not finite

    @jax.jit
    def value_and_derivatives(x, where):
        where = where if masked else None
        fn = lambda x: apply(op, x, scale, bias, -1, where, epsilon)  # noqa: E731
        loss = lambda x: (fn(x) ** 2).sum()  # noqa: E731
        along = lambda f: lambda x: jax.jvp(f, (x,), (direction,))[1]  # noqa: E731
        reverse = jax.grad(loss)(x), along(jax.grad(loss))(x), jax.grad(lambda x: jax.grad(loss)(x) @ direction)(x)
        with masksafe.forward_mode():
            return fn(x), reverse, along(along(loss))(x)

    alone = np.array([False, True, False, False])
    one_left = [(np.array([2.0, 7.0, 1.0, 0.0], np.float32), alone)] if masked else []
    for x, where in [(np.full(4, v, np.float32), np.ones(4, bool)) for v in (3.5, 0)] + one_left:
        value, *derivatives = value_and_derivatives(x, where)
        chex.assert_tree_all_finite((value, derivatives))
        if op == "layer_norm":
            np.testing.assert_array_equal(value, np.where(where, bias, 0))


@pytest.mark.parametrize("n", [41, *map(forms, (3, 14, 63, 1000))])
def test_constant_whose_mean_is_rounded_has_no_spread_but_with_the_next_float_it_has(n):
    x = np.repeat(np.array([[0.1], [1.1], [-1e6], [3.7], [1e-20]], np.float32), n, axis=1)

    @jax.jit
    def results(x):
        cubes = lambda x: jnp.sum(masksafe.standardize(x, epsilon=0) ** 3 * np.arange(n, dtype=np.float32))  # noqa: E731
        return masksafe.var(x, -1), masksafe.layer_norm(x, epsilon=0), jax.grad(cubes)(x)

    for result in results(x):
        np.testing.assert_array_equal(result, 0)
    x[:, n // 6] = np.nextafter(x[:, n // 6], np.float32(np.inf))
    np.testing.assert_allclose(results(x)[1][:3], float64_layer_norm(x, epsilon=0)[:3], rtol=1e-4)


@pytest.mark.parametrize(
    "name", ["layer_norm", "batch_norm", *map(forms, ["rms_norm", "standardize", "group_norm", "weights"])]
)
@pytest.mark.parametrize("masked", [True, forms(False)])
def test_without_epsilon_the_scale_of_a_row_has_no_effect(name, masked):
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
    y, d_x = value_and_gradient(x)
    for scale in (2.0**-100, 2.0**60):
        of_scaled, d_scaled = value_and_gradient(x * np.float32(scale))
        np.testing.assert_allclose(of_scaled, y, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(d_scaled * np.float32(scale), d_x, rtol=1e-5, atol=1e-5)


# What is bad, and what is not there.


def test_parameter_that_is_bad_where_one_row_masks_it_harms_only_the_others():
    scale, where = np.array([1.0, np.nan, 1.0], np.float32), np.array([[True, False, True], [True, True, True]])
    x = np.array([[1.0, 2.0, 3.0], [1.0, 2.0, 4.0]], np.float32)
    loss = lambda x: masksafe.layer_norm(x, scale, where=where)[0].sum()  # noqa: E731
    assert np.isfinite(jax.jit(jax.grad(loss))(x)[0]).all()


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", forms("standardize")])
def test_infinity_shows_in_its_slice_and_in_no_other(op):
    x, where = X.copy(), WHERE.copy()
    slice_of_bad = np.zeros(SHAPE, bool)
    where[0, 1, 2] = True
    slice_of_bad[0, 1] = where[0, 1]
    for bad in (np.inf, -np.inf):
        x[0, 1, 2] = bad
        y, (gradient, *_) = map(jax.device_get, value_and_gradients(op)(x, *parameters(SHAPE, -1), where))
        # In rms_norm the others are divided by infinity.
        assert (np.isnan(y[slice_of_bad]) | ((y[slice_of_bad] == 0) & (op == "rms_norm"))).all()
        for result in (y, gradient):
            assert np.isnan(result[0, 1, 2])
            assert np.isfinite(result[~slice_of_bad]).all()


@pytest.mark.slow
@pytest.mark.parametrize("op", NAMES)
@hypothesis.settings(max_examples=40)
@hypothesis.given(
    x=st.lists(st.floats(-100, 100, width=32), min_size=8, max_size=8),
    where=st.lists(st.booleans(), min_size=8, max_size=8),
)
def test_masking_equals_taking_out(op, x, where):
    x, where = np.array(x, np.float32), np.array(where)
    garbage = np.where(where, x, np.nan).astype(np.float32)
    scale, bias = parameters((8,), 0)
    masked, (gradient, *_) = jax.device_get(value_and_gradients(op, 0)(garbage, scale, bias, where))
    np.testing.assert_array_equal(masked[~where], 0)
    np.testing.assert_array_equal(gradient[~where], 0)
    if where.any():
        expected = reference(op, x[where], scale[where], bias[where], 0)[0]
        np.testing.assert_allclose(masked[where], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("op", "shape"), cases([("layer_norm", (4, 0))], NAMES, [(0, 4), (4, 0), (2, 0, 3)]), ids=str)
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


@pytest.mark.parametrize(
    "names", [("a mean", "a variance", "an array for epsilon"), forms(("all axes", "a mean, stable", "both"))], ids=str
)
def test_standardize_is_that_of_jax_nn(names):
    @jax.jit
    def values_and_gradients(x):
        def of(op, call):
            y, pull_back = jax.vjp(lambda x: op(x, **call), x)
            return y, pull_back(jnp.cos(x))

        return [{name: of(op, CALLS[name]) for name in names} for op in (masksafe.standardize, jax.nn.standardize)]

    chex.assert_trees_all_close(*values_and_gradients(X), rtol=1e-4, atol=1e-5)
    arguments = (X, -1, MEAN, VARIANCE, 0.1, np.ones(X.shape, bool))  # in the same order
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


def test_traced_epsilon_is_the_same_as_a_number():
    x = np.concatenate([X[:2], np.full((1, 4, 5), 3.3, np.float32)])  # with constant slices

    @jax.jit
    def standardized_with(x, epsilon):
        y, pull_back = jax.vjp(lambda x: masksafe.standardize(x, epsilon=epsilon), x)
        return y, pull_back(weights_of(SHAPE))

    for epsilon in (0.0, 1e-5):
        y, (gradient,) = standardized_with(x, epsilon)
        expected, (expected_gradient, *_) = reference("standardize", X, epsilon=epsilon)
        np.testing.assert_allclose(y[:2], expected[:2], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(gradient[:2], expected_gradient[:2], rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(y[2], 0)
        assert np.isfinite(gradient[2]).all()


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
