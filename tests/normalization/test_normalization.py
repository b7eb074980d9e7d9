"""Norms: axes, digits, devices, peers, and what is refused of all. The table has the contract."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import assert_close, assert_same_bits, in_float64
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from tiers import pairs, parametrize

import masksafe

SHAPE = (3, 4, 5)
X = np.random.default_rng(0).normal(2.0, 3.0, SHAPE).astype(np.float32)
RNG = np.random.default_rng(1)
WHERE = RNG.random(SHAPE) < 0.7
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
    """The parameters that an op has, by name."""
    return {"layer_norm": {"scale": scale, "bias": bias}, "rms_norm": {"scale": scale}, "standardize": {}}[op]


@functools.cache
def value_and_gradients(op, axis=-1, epsilon=1e-6):
    """The op, and the gradients by x, scale and bias for a cotangent."""

    def of(x, scale, bias, where, d_y):
        norm = lambda x, *pair: getattr(masksafe, op)(x, axis=axis, where=where, epsilon=epsilon, **used(op, *pair))  # noqa: E731
        y, pull_back = jax.vjp(norm, x, scale, bias)
        return y, pull_back(d_y)

    return jax.jit(of)


NAMES = ["layer_norm", "rms_norm", "standardize"]

# The forms of a program: on a CPU in one block or several, with rows left over, or as one kernel; and that of
# accelerators, for arrays of any size.
PROGRAMS = {
    "one block": {"has_fusion_library": False},
    "blocks": {"row_block_elements": 25, "most_elements_in_one_pass": 50, "has_fusion_library": False},
    "kernel": {"row_block_elements": 1, "most_elements_in_one_pass": 2, "has_fusion_library": True},
    "accelerator": {"form": "accelerator"},
}


@pytest.fixture
def program(request, choose):
    choose(**PROGRAMS[request.param])


in_programs = parametrize(
    ("program", "masked", "axis"),
    [("one block", False, -1)],
    exhaustive=pairs(PROGRAMS, [False, True], [-1, 0]),
    indirect=["program"],
)


# Values and gradients.


@parametrize(
    ("program", "op", "axis", "where"),
    [("one block", "layer_norm", (2, 0), "some")],
    exhaustive=[
        ("blocks", "layer_norm", 1, "rows"),
        ("one block", "rms_norm", (2, 0), "columns"),
        ("blocks", "standardize", (0, 1, 2), "dead"),
        ("accelerator", "layer_norm", (2, 1), "no"),
        ("kernel", "layer_norm", (2, 0, 1), "columns"),
        ("kernel", "rms_norm", 1, "dead"),
    ],
    indirect=["program"],
    ids=str,
)
def test_any_axes_and_masks_that_broadcast_are_as_the_last_axis_and_a_whole_mask(program, op, axis, where):
    axes, where = axis if isinstance(axis, tuple) else (axis,), WHERES[where]
    rows = [n for i, n in enumerate(SHAPE) if i not in [a % 3 for a in axes]]
    by_rows = lambda a: np.moveaxis(a, axes, range(-len(axes), 0)).reshape(math.prod(rows), -1)  # noqa: E731
    (scale, bias), d_y = parameters(SHAPE, axis), weights_of(SHAPE)
    y, (d_x, *d_parameters) = jax.device_get(value_and_gradients(op, axis)(X, scale, bias, where, d_y))
    whole = np.broadcast_to(True if where is None else where, SHAPE)
    args = by_rows(X), scale.ravel(), bias.ravel(), by_rows(whole), by_rows(d_y)
    # A gradient is the difference of numbers of the size of the largest of them.
    actual = by_rows(y), (by_rows(d_x), *map(np.ravel, d_parameters))
    assert_close(actual, in_float64(value_and_gradients(op), *args), rtol=1e-5, atol=2e-5)


# Digits.


OUTLIER = np.where(np.arange(1024) == 0, 1e3, np.random.default_rng(0).normal(size=(4, 1024)))
OTHER_START = np.where(np.arange(1024) < 16, 0, np.random.default_rng(0).normal(size=(4, 1024)) + 1e4)
INPUTS = [np.random.default_rng(0).normal(size=(4, 1024)) + offset for offset in (1e4, 1e6)]
INPUTS += [OUTLIER, OUTLIER + 1e3, OTHER_START]


@in_programs
def test_no_digit_is_lost(program, masked, axis):
    along = (lambda a: a) if axis == -1 else (lambda a: np.swapaxes(a, 0, 1))

    @jax.jit
    def results(x, where, d_y):
        where = where if masked else None
        y, pull_back = jax.vjp(lambda x: masksafe.layer_norm(x, axis=axis, where=where), x)
        return y, pull_back(d_y)[0], *masksafe.var_mean(x, axis, where)

    for x in INPUTS:
        where = np.random.default_rng(1).random(x.shape) < 0.7
        args = [along(a) for a in (x.astype(np.float32), where, weights_of(x.shape))]
        (y, d_x, variance, mean), exact = results(*args), in_float64(results, *args)
        np.testing.assert_allclose(y, exact[0], rtol=3e-6, atol=3e-6)
        np.testing.assert_allclose(d_x, exact[1], rtol=1e-5, atol=1e-5 * np.abs(exact[1]).max())
        np.testing.assert_allclose(variance, exact[2], rtol=6e-6)
        # The mean is rounded, and so are the deviations from a shift, which are of the size of the spread.
        np.testing.assert_array_less(np.abs(mean - exact[3]), 1e-7 * np.abs(mean) + 4e-7 * exact[2] ** 0.5)


def test_narrow_floats_stay_what_they_are():
    def outputs_and_gradient(x):
        outputs = masksafe.layer_norm(x, where=WHERE), masksafe.rms_norm(x), *masksafe.var_mean(x, -1, WHERE)
        return *outputs, jax.grad(lambda x: masksafe.layer_norm(x).astype(jnp.float32).max())(x)

    with jax.numpy_dtype_promotion("strict"):
        results = jax.eval_shape(outputs_and_gradient, X.astype("float8_e4m3fn"))
    assert {a.dtype for a in results} == {jnp.dtype("float8_e4m3fn")}


@in_programs
def test_constant_whose_mean_is_rounded_has_no_spread_but_with_the_next_float_it_has(program, masked, axis):
    along = (lambda a: a) if axis == -1 else (lambda a: np.swapaxes(a, 0, 1))
    for n in (1000, 41):
        x = np.repeat(np.array([[0.1], [1.1], [-1e6], [3.7], [1e-20]], np.float32), n, axis=1)
        mask = np.ones(along(x).shape, bool) if masked else None
        fn = jax.jit(lambda x: (masksafe.var(x, axis, mask), masksafe.layer_norm(x, axis=axis, where=mask, epsilon=0)))  # noqa: B023
        for result in fn(along(x)):
            np.testing.assert_array_equal(result, 0)
    x[:, 7] = np.nextafter(x[:, 7], np.float32(np.inf))
    normalized, expected = (along(np.asarray(found[1]))[:3] for found in (fn(along(x)), in_float64(fn, along(x))))
    np.testing.assert_allclose(normalized, expected, rtol=1e-4)


@parametrize(("op", "epsilon", "masked"), [("layer_norm", 0, True)], exhaustive=pairs(NAMES, [0, 1e-6], [True, False]))
def test_slice_without_a_spread_is_finite_to_the_second_derivative(op, epsilon, masked):
    scale, bias = parameters((4,), -1)
    direction = weights_of(4)  # a derivative that is not finite makes its product with this one not finite

    @jax.jit
    def value_and_derivatives(x, where):
        options = {"epsilon": epsilon, "where": where if masked else None, **used(op, scale, bias)}
        fn = lambda x: getattr(masksafe, op)(x, **options)  # noqa: E731
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


@parametrize(
    ("name", "masked"),
    [("layer_norm", True)],
    exhaustive=pairs([*NAMES, "group_norm", "batch_norm", "weights"], [True, False]),
)
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
    x = np.random.default_rng(5).normal(size=(7, 3)).astype(np.float32)
    args = x, *parameters((7, 3), -1), None, weights_of((7, 3))
    expected = value_and_gradients("layer_norm")(*args)
    choose(row_block_elements=8, most_elements_in_one_pass=16)
    assert_close(value_and_gradients("layer_norm")(*args), expected, rtol=1e-5, atol=1e-5)


# What is bad, and what is not there.


def test_parameter_that_is_bad_where_one_row_masks_it_harms_only_the_others():
    scale, where = np.array([1.0, np.nan, 1.0], np.float32), np.array([[True, False, True], [True, True, True]])
    x = np.array([[1.0, 2.0, 3.0], [1.0, 2.0, 4.0]], np.float32)
    loss = lambda x: masksafe.layer_norm(x, scale, where=where)[0].sum()  # noqa: E731
    assert np.isfinite(jax.jit(jax.grad(loss))(x)[0]).all()


@parametrize(("op", "shape"), [("layer_norm", (4, 0))], exhaustive=pairs(NAMES, [(4, 0), (0, 4), (2, 0, 3)]), ids=str)
def test_arrays_without_elements(op, shape):
    nothing, scale = np.zeros(shape, np.float32), np.ones(shape[-1], np.float32)
    y, (d_x, *d_parameters) = value_and_gradients(op)(nothing, scale, scale, None, nothing)
    assert y.shape == d_x.shape == shape
    np.testing.assert_array_equal(d_parameters, 0)


# Devices.


@parametrize(
    ("program", "of_where"),
    [("one block", (64, 1))],
    exhaustive=[("one block", (1, 6)), ("blocks", (64, 6)), ("kernel", (1, 6)), ("accelerator", (64, 1))],
    indirect=["program"],
    ids=str,
)
def test_inside_shard_map(program, of_where):
    x, where = np.random.default_rng(0).normal(size=(64, 6)).astype(np.float32), RNG.random(of_where) < 0.7
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    layer_norm = lambda x, scale, bias, where: masksafe.layer_norm(x, scale, bias, where=where)  # noqa: E731
    specs = P("data"), P(), P(), P() if of_where[0] == 1 else P("data")
    mapped = jax.jit(jax.shard_map(layer_norm, mesh=mesh, in_specs=specs, out_specs=P("data")))
    (scale, bias), d_y = parameters(x.shape, -1), weights_of(x.shape)
    y, pull_back = jax.vjp(lambda *args: mapped(*args, where), x, scale, bias)
    expected = value_and_gradients("layer_norm")(x, scale, bias, where, d_y)
    assert_close((y, pull_back(d_y)), expected, rtol=1e-4, atol=1e-5)


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


@parametrize("names", [("a mean", "a variance", "both")], exhaustive=[CALLS], ids=["some", "all"])
def test_standardize_is_that_of_jax_nn(names):
    @jax.jit
    def values_and_gradients(x):
        def of(op, call):
            y, pull_back = jax.vjp(lambda x: op(x, **call), x)
            return y, pull_back(jnp.cos(x))

        return [{name: of(op, CALLS[name]) for name in names} for op in (masksafe.standardize, jax.nn.standardize)]

    chex.assert_trees_all_close(*values_and_gradients(X), rtol=1e-4, atol=1e-5)
    # In the same order; and of integers.
    for arguments in ((X, -1, MEAN, VARIANCE, 0.1, np.ones(X.shape, bool)), (np.array([[1, 2, 4], [7, 7, 9]]),)):
        ours, theirs = masksafe.standardize(*arguments), jax.nn.standardize(*arguments)
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_standardize_has_the_dtype_of_jax_nn():
    for other in ("mean", "variance", "epsilon"):
        types = X.astype(jnp.bfloat16), {other: np.ones((), np.float32)}
        ours, theirs = (
            jax.eval_shape(lambda x, o, op=op: op(x, **o), *types) for op in (masksafe.standardize, jax.nn.standardize)
        )
        assert ours.dtype == theirs.dtype == jnp.float32


def test_traced_epsilon_is_the_same_as_a_number():
    x, d_y = np.concatenate([X[:2], np.full((1, 4, 5), 3.3, np.float32)]), weights_of(SHAPE)  # with constant rows

    @jax.jit
    def standardized_with(x, epsilon):
        y, pull_back = jax.vjp(lambda x: masksafe.standardize(x, epsilon=epsilon), x)
        return y, pull_back(d_y)[0]

    for epsilon, traced in ((0.0, 0.0), (1e-5, 1e-5), (1e-5, np.float32([1e-5]))):
        actual = standardized_with(x, traced)
        y, (d_x, *_) = value_and_gradients("standardize", -1, epsilon)(x, None, None, None, d_y)
        np.testing.assert_allclose(actual[0], y, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(actual[1][:2], d_x[:2], rtol=1e-4, atol=1e-5)
        assert np.isfinite(actual[1]).all()


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
        (lambda: masksafe.layer_norm(X, weights=np.ones(4)), ValueError, "layer_norm: weights: got shape"),
        (lambda: masksafe.batch_norm(X, np.ones(4)), ValueError, "batch_norm: scale: got shape"),
        (lambda: masksafe.batch_norm(X, mean=np.ones(5)), ValueError, "batch_norm: var: got value None"),
        (lambda: masksafe.batch_norm(X, epsilon=-1), ValueError, "batch_norm: epsilon"),
        (lambda: masksafe.batch_norm(X, axis_name="data"), ValueError, "batch_norm: axis_name: got value 'data'"),
        (lambda: masksafe.group_norm(X, 4), ValueError, "group_norm: num_groups: got value 4; expected a divisor"),
        (lambda: masksafe.group_norm(X, 2.0), TypeError, "group_norm: num_groups: got type float"),
        (lambda: masksafe.l2_normalize(np.arange(3)), TypeError, "l2_normalize: x: got dtype"),
        (lambda: masksafe.layer_norm(X, epsilon=-1e-6), ValueError, "layer_norm: epsilon: got value -1e-06; expected"),
        (lambda: masksafe.layer_norm(X, epsilon=float("nan")), ValueError, "layer_norm: epsilon: got value nan"),
        (lambda: jax.jit(lambda e: masksafe.layer_norm(X, epsilon=e))(0.1), TypeError, "layer_norm: epsilon: got a t"),
        (lambda: jax.jit(lambda c: masksafe.var(X, correction=c))(1.0), TypeError, "var: correction: got a traced"),
    ],
)
def test_bad_arguments_are_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_axes_may_be_a_list():
    for norm in (masksafe.layer_norm, masksafe.rms_norm, masksafe.standardize, masksafe.l2_normalize):
        assert_same_bits(norm(X, axis=[0, -1]), norm(X, axis=(0, -1)))
