"""layer_norm, rms_norm, standardize: axes, digits, devices, peers, arguments. The table has the contract."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import assert_close, with_gradients
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from tiers import pairs

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


@functools.cache
def value_and_gradients(op, axis=-1):
    """The op, and the gradients of the sum of the results times `weights_of` by x, scale and bias."""
    of = lambda x, scale, bias, where=None: apply(op, x, *used(op, scale, bias), axis, where)  # noqa: E731
    return with_gradients(of, (0, 1, 2))


def reference(op, x, scale=1.0, bias=0.0, where=True, epsilon=1e-6, d_y=None):
    """The same by the definition, in float64, of rows `[rows, elements]`."""
    where = np.broadcast_to(where, x.shape)
    n = np.maximum(where.sum(-1, keepdims=True), 1)
    average = lambda a: np.where(where, a, 0).sum(-1, keepdims=True) / n  # noqa: E731
    centred = lambda a: np.where(where, a - (0 if op == "rms_norm" else average(a)), 0)  # noqa: E731
    is_used = op != "standardize", op == "layer_norm"
    gamma, beta = scale if is_used[0] else 1, bias if is_used[1] else 0
    deviations = centred(np.where(where, np.asarray(x, np.float64), 0))
    reciprocal_std = 1 / np.sqrt(average(deviations**2) + epsilon)
    normalized = deviations * reciprocal_std
    d_y = np.where(where, weights_of(x.shape) if d_y is None else d_y, 0)
    d_x = (centred(d_y * gamma) - normalized * average(d_y * gamma * normalized)) * reciprocal_std
    of_parameters = (used * d.sum(0) for used, d in zip(is_used, (d_y * normalized, d_y), strict=True))
    return np.where(where, normalized * gamma + beta, 0), (d_x, *of_parameters)


NAMES = ["layer_norm", "rms_norm", "standardize"]

# The forms of a program: on a CPU in one block or several, with rows left over, or as one kernel; and that of
# accelerators, for arrays of any size.
PROGRAMS = {
    "one block": {"has_kernel_library": False},
    "blocks": {"row_block_elements": 25, "most_elements_in_one_pass": 50, "has_kernel_library": False},
    "kernel": {"row_block_elements": 1, "most_elements_in_one_pass": 2, "has_kernel_library": True},
    "elsewhere": {"form": "elsewhere"},
}


@pytest.fixture
def program(request, choose):
    choose(**PROGRAMS[request.param])


IN_PROGRAMS = pairs(PROGRAMS, [False, True], [-1, 0])
in_each_program = pytest.mark.parametrize("program", PROGRAMS, indirect=True)


# Values and gradients.


@pytest.mark.parametrize(
    ("program", "op", "axis", "where"),
    [
        ("one block", "layer_norm", (2, 0), "some"),
        ("one block", "rms_norm", (2, 0), "columns"),
        ("blocks", "layer_norm", 1, "rows"),
        ("blocks", "standardize", (0, 1, 2), "dead"),
        ("elsewhere", "layer_norm", (2, 1), "some"),
        ("elsewhere", "rms_norm", 0, "no"),
        ("elsewhere", "standardize", -1, "rows"),
        ("kernel", "layer_norm", (2, 1), "rows"),
        ("kernel", "layer_norm", (2, 0, 1), "columns"),
        ("kernel", "rms_norm", 1, "dead"),
    ],
    indirect=["program"],
    ids=str,
)
def test_value_and_gradients_are_those_of_the_definition(program, op, axis, where):
    axes, where = axis if isinstance(axis, tuple) else (axis,), WHERES[where]
    rows = [n for i, n in enumerate(SHAPE) if i not in [a % 3 for a in axes]]
    by_rows = lambda a: np.moveaxis(a, axes, range(-len(axes), 0)).reshape(math.prod(rows), -1)  # noqa: E731
    scale, bias = parameters(SHAPE, axis)
    y, (d_x, *d_parameters) = jax.device_get(value_and_gradients(op, axis)(X, scale, bias, where))
    actual = by_rows(y), (by_rows(d_x), *map(np.ravel, d_parameters))
    mask = by_rows(np.broadcast_to(True if where is None else where, SHAPE))
    expected = reference(op, by_rows(X), scale.ravel(), bias.ravel(), mask, d_y=by_rows(weights_of(SHAPE)))
    # A gradient is the difference of numbers of the size of the largest of them.
    assert_close(actual, expected, rtol=1e-5, atol=2e-5)


# Digits.


def float64_layer_norm(x, epsilon=1e-6):
    return reference("layer_norm", x, epsilon=epsilon)[0]


OUTLIER = np.where(np.arange(1024) == 0, 1e3, np.random.default_rng(0).normal(size=(4, 1024)))
OTHER_START = np.where(np.arange(1024) < 16, 0, np.random.default_rng(0).normal(size=(4, 1024)) + 1e4)
INPUTS = [np.random.default_rng(0).normal(size=(4, 1024)) + offset for offset in (1e4, 1e6)]
INPUTS += [OUTLIER, OUTLIER + 1e3, OTHER_START]


@pytest.mark.parametrize(("program", "masked", "axis"), IN_PROGRAMS, indirect=["program"])
def test_no_digit_is_lost(program, masked, axis):
    along = (lambda a: a) if axis == -1 else (lambda a: None if a is None else np.swapaxes(a, 0, 1))

    @jax.jit
    def results(x, where, d_y):
        y, pull_back = jax.vjp(lambda x: masksafe.layer_norm(x, axis=axis, where=where), x)
        return y, pull_back(d_y)[0], *masksafe.var_mean(x, axis, where)

    for x in INPUTS:
        x, where = x.astype(np.float32), np.random.default_rng(1).random(x.shape) < (0.7 if masked else 1)
        d_y = weights_of(x.shape)
        y, d_x, variance, mean = results(along(x), along(where) if masked else None, along(d_y))
        n, wide = where.sum(-1), np.where(where, x.astype(np.float64), 0)
        expected_mean = wide.sum(-1) / n
        deviations = np.where(where, wide - expected_mean[:, None], 0)
        expected_variance = (deviations**2).sum(-1) / n
        np.testing.assert_allclose(variance, expected_variance, rtol=6e-6)
        # The mean is rounded, and so are the deviations from a shift, which are of the size of the spread.
        np.testing.assert_array_less(np.abs(mean - expected_mean), 1e-7 * np.abs(mean) + 4e-7 * expected_variance**0.5)
        normalized, (d_expected, *_) = reference("layer_norm", x, where=where)
        np.testing.assert_allclose(along(np.asarray(y)), normalized, rtol=3e-6, atol=3e-6)
        np.testing.assert_allclose(along(np.asarray(d_x)), d_expected, rtol=1e-5, atol=1e-5 * np.abs(d_expected).max())


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 1.6e-2), ("float16", 2e-3)])
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


@pytest.mark.parametrize(("program", "masked", "axis"), IN_PROGRAMS, indirect=["program"])
def test_constant_whose_mean_is_rounded_has_no_spread_but_with_the_next_float_it_has(program, masked, axis):
    along = (lambda a: a) if axis == -1 else (lambda a: np.swapaxes(a, 0, 1))
    for n in (1000, 41):
        x = np.repeat(np.array([[0.1], [1.1], [-1e6], [3.7], [1e-20]], np.float32), n, axis=1)
        mask = np.ones(along(x).shape, bool) if masked else None
        fn = jax.jit(lambda x: (masksafe.var(x, axis, mask), masksafe.layer_norm(x, axis=axis, where=mask, epsilon=0)))  # noqa: B023
        for result in fn(along(x)):
            np.testing.assert_array_equal(result, 0)
    x[:, 7] = np.nextafter(x[:, 7], np.float32(np.inf))
    expected = float64_layer_norm(x, epsilon=0)
    np.testing.assert_allclose(along(np.asarray(fn(along(x))[1]))[:3], expected[:3], rtol=1e-4)


@pytest.mark.parametrize(("op", "epsilon", "masked"), pairs(NAMES, [0, 1e-6], [True, False]))
def test_slice_without_a_spread_is_finite_to_the_second_derivative(op, epsilon, masked):
    scale, bias = used(op, *parameters((4,), -1))
    direction = weights_of(4)  # a derivative that is not finite makes its product with this one not finite

    @jax.jit
    def value_and_derivatives(x, where):
        where = where if masked else None
        fn = lambda x: apply(op, x, scale, bias, -1, where, epsilon)  # noqa: E731
        loss = lambda x: (fn(x) ** 2).sum()  # noqa: E731
        along = lambda f: lambda x: jax.jvp(f, (x,), (direction,))[1]  # noqa: E731
        reverse = jax.grad(loss)(x), along(jax.grad(loss))(x)
        with masksafe.forward_mode():
            return fn(x), reverse, along(along(loss))(x)

    alone = np.array([False, True, False, False])
    one_left = [(np.array([2.0, 7.0, 1.0, 0.0], np.float32), alone)] if masked else []
    for x, where in [(np.full(4, v, np.float32), np.ones(4, bool)) for v in (3.5, 0)] + one_left:
        value, *derivatives = value_and_derivatives(x, where)
        chex.assert_tree_all_finite((value, derivatives))
        if op == "layer_norm":
            np.testing.assert_array_equal(value, np.where(where, bias, 0))


@pytest.mark.parametrize(("name", "masked"), pairs([*NAMES, "group_norm", "batch_norm", "weights"], [True, False]))
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
    for scale in (2.0**-30, 2.0**30):
        of_scaled, d_scaled = value_and_gradient(x * np.float32(scale))
        np.testing.assert_allclose(of_scaled, y, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(d_scaled * np.float32(scale), d_x, rtol=1e-5, atol=1e-5)


def test_rows_that_are_left_over_from_blocks_count(choose):
    choose(row_block_elements=8, most_elements_in_one_pass=16)
    x, (scale, bias) = np.random.default_rng(5).normal(size=(7, 3)).astype(np.float32), parameters((7, 3), -1)
    expected = reference("layer_norm", x, scale, bias)
    assert_close(value_and_gradients("layer_norm")(x, scale, bias), expected, rtol=1e-5, atol=1e-5)


# What is bad, and what is not there.


def test_parameter_that_is_bad_where_one_row_masks_it_harms_only_the_others():
    scale, where = np.array([1.0, np.nan, 1.0], np.float32), np.array([[True, False, True], [True, True, True]])
    x = np.array([[1.0, 2.0, 3.0], [1.0, 2.0, 4.0]], np.float32)
    loss = lambda x: masksafe.layer_norm(x, scale, where=where)[0].sum()  # noqa: E731
    assert np.isfinite(jax.jit(jax.grad(loss))(x)[0]).all()


@in_each_program
def test_bad_row_harms_the_gradient_of_the_scale_only_where_it_is_unmasked(program):
    x, where = X[0].copy(), WHERE[0].copy()
    where[1] = [True, True, False, False, True]
    x[1, 0] = np.nan
    loss = lambda scale: masksafe.layer_norm(x, scale, where=where).sum()  # noqa: E731
    gradient = jax.jit(jax.grad(loss))(np.ones(5, np.float32))
    np.testing.assert_array_equal(np.isnan(gradient), where[1])


@pytest.mark.parametrize(("op", "shape"), pairs(NAMES, [(4, 0), (0, 4), (2, 0, 3)]), ids=str)
def test_arrays_without_elements(op, shape):
    scale = np.ones(shape[-1], np.float32)
    y, (d_x, *d_parameters) = value_and_gradients(op)(np.zeros(shape, np.float32), scale, scale)
    assert y.shape == d_x.shape == shape
    np.testing.assert_array_equal(d_parameters, 0)


# Devices.


@pytest.mark.parametrize("of_where", [(64, 1), (64, 6), (1, 6)])
@in_each_program
def test_inside_shard_map(program, of_where):
    rng = np.random.default_rng(0)
    x, where = rng.normal(size=(64, 6)).astype(np.float32), rng.random(of_where) < 0.7
    scale, bias = parameters(x.shape, -1)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    layer_norm = lambda x, scale, bias, where: masksafe.layer_norm(x, scale, bias, where=where)  # noqa: E731
    specs = P("data"), P(), P(), P() if of_where[0] == 1 else P("data")
    mapped = jax.shard_map(layer_norm, mesh=mesh, in_specs=specs, out_specs=P("data"))

    @jax.jit
    def value_and_gradients(x, scale, bias):
        y, pull_back = jax.vjp(lambda *args: mapped(*args, where), x, scale, bias)
        return y, pull_back(weights_of(x.shape))

    expected = reference("layer_norm", x, scale, bias, where)
    assert_close(value_and_gradients(x, scale, bias), expected, rtol=1e-4, atol=1e-5)


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
    "names", [("a mean", "a variance"), ("all axes", "a mean, stable", "both", "an array for epsilon")], ids=str
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

    for epsilon in (0.0, 1e-5, np.float32([1e-5])):
        y, (gradient,) = standardized_with(x, epsilon)
        rows = X.reshape(12, 5), weights_of(SHAPE).reshape(12, 5)
        expected, (expected_gradient, *_) = reference("standardize", rows[0], epsilon=epsilon, d_y=rows[1])
        np.testing.assert_allclose(y[:2], expected.reshape(SHAPE)[:2], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(gradient[:2], expected_gradient.reshape(SHAPE)[:2], rtol=1e-4, atol=1e-5)
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
