"""softmax, log_softmax and logsumexp."""

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
from masksafe.testing import CONSISTENCY_MODES, assert_consistent, assert_gradients, assert_mask_safe


def logsumexp(x, axis=-1, where=None):
    """With the parameters of the other two."""
    return masksafe.logsumexp(x, axis, where=where)


OPS = {
    "logsumexp": (logsumexp, jax.nn.logsumexp),
    "softmax": (masksafe.softmax, jax.nn.softmax),
    "log_softmax": (masksafe.log_softmax, jax.nn.log_softmax),
}


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


AXES = [-1, (0, 2), *map(slow, (0, 1, (2, 1), (0, 1, 2), None))]
X = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float32)
WHERE = np.random.default_rng(1).random(X.shape) < 0.6
WHERE[:, :, 0] = True
DEAD = WHERE.copy()  # with slices that have nothing left, along the last axis
DEAD[1] = DEAD[2, 3] = False


def weights_of(shape):
    return np.cos(np.arange(np.prod(shape, dtype=int))).reshape(shape).astype(np.float32)


def finite_sum(x):
    """Weighted, of what is not -inf, as the log-probabilities of masked elements are; in float32 at least."""
    wide = x.astype(jnp.float32) if x.dtype.itemsize <= 2 else x
    return jnp.sum(jnp.where(wide == -jnp.inf, 0, wide) * weights_of(x.shape))


@functools.cache
def value_and_gradient(name, axis=-1):
    """The op, and the gradient of its weighted sum, compiled."""

    def total(x, where=None):
        out = OPS[name][0](x, axis, where)
        return finite_sum(out), out

    def pair(*args):
        (_, out), gradient = jax.value_and_grad(total, has_aux=True)(*args)
        return out, gradient

    return jax.jit(pair)


def reference(name, x, axis=-1, where=None):
    """The same by the definition, in float64; x is not so large that it has to be shifted."""
    x = np.asarray(x, np.float64)
    where = np.broadcast_to(True if where is None else where, x.shape)
    exps = np.where(where, np.exp(np.where(where, x, 0)), 0)
    total = exps.sum(axis, keepdims=True)
    probs = exps / np.where(total > 0, total, 1)
    if name == "softmax":
        weights = weights_of(x.shape)
        return probs, probs * (weights - (probs * weights).sum(axis, keepdims=True))
    with np.errstate(divide="ignore"):
        log_total = np.log(total)
    if name == "logsumexp":
        out = np.squeeze(log_total, axis)
        return out, probs * weights_of(out.shape).reshape(total.shape)
    weights = np.where(where, weights_of(x.shape), 0)
    return np.where(where, x - np.where(total > 0, log_total, 0), -np.inf), (
        weights - probs * weights.sum(axis, keepdims=True)
    )


# Values and derivatives.


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("axis", AXES, ids=str)
@pytest.mark.parametrize("where", [None, DEAD], ids=["unmasked", "masked"])
def test_value_and_gradient_are_those_of_the_definition(name, axis, where):
    actual = value_and_gradient(name, axis)(X, where)
    chex.assert_trees_all_close(actual, reference(name, X, axis, where), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("where", [WHERE, slow(None)], ids=["masked", "unmasked"])
def test_value_is_that_of_jax_nn(name, where):
    theirs = jax.jit(OPS[name][1], static_argnames="axis")(X, axis=-1, where=where)
    chex.assert_trees_all_close(value_and_gradient(name)(X, where)[0], theirs, rtol=1e-5, atol=1e-6)


CERTAIN = np.array([[15, 0, 0], [30, 0, 0], [40, 0, -3], [3, 3, 0], [1, 1, 1], [0, -0.1, -60], [5, 4.9, -1]])


@pytest.mark.parametrize("where", [None, np.ones((7, 3), bool)], ids=["unmasked", "masked"])
def test_log_softmax_near_certainty_keeps_its_digits_and_so_do_its_derivatives(where):
    z = CERTAIN - CERTAIN.max(-1, keepdims=True)
    others = np.exp(z)
    others[np.arange(7), z.argmax(-1)] = 0
    expected = z - np.log1p(others.sum(-1, keepdims=True))
    jacobian = np.where(np.eye(3), -np.expm1(expected)[:, None], -np.exp(expected)[:, None])
    x = CERTAIN.astype(np.float32)
    reverse = jax.jacrev(lambda x: masksafe.log_softmax(x, where=where).sum(0))
    log_probs, of_rows = jax.jit(lambda x: (masksafe.log_softmax(x, where=where), reverse(x)))(x)
    np.testing.assert_allclose(log_probs, expected, rtol=3e-7)
    np.testing.assert_allclose(np.moveaxis(of_rows, 1, 0), jacobian, rtol=3e-6)
    with masksafe.forward_mode():
        forward = [
            jax.jvp(lambda x: masksafe.log_softmax(x, where=where), (x,), (np.broadcast_to(e, x.shape),))[1]
            for e in np.eye(3, dtype=np.float32)
        ]
    np.testing.assert_allclose(np.stack(forward, -1), jacobian, rtol=1e-6)


@pytest.mark.parametrize("name", OPS)
def test_list_of_axes(name):
    assert jax.eval_shape(lambda x: OPS[name][0](x, [0, 2]), X).shape == ((4,) if name == "logsumexp" else X.shape)


@pytest.mark.parametrize("name", OPS)
def test_both_modes_of_autodiff(name):
    """First and second derivatives along a direction are those of the definition, in every order of the modes."""
    direction, step = np.random.default_rng(2).normal(size=X.shape), 1e-4
    gradients = [reference(name, X + s * direction, -1, DEAD)[1] for s in (-step, step)]
    second = (gradients[1] - gradients[0]) / (2 * step)
    first = (reference(name, X, -1, DEAD)[1] * direction).sum()
    fn = lambda x: finite_sum(OPS[name][0](x, where=DEAD))  # noqa: E731

    @jax.jit
    def derivatives(x, v):
        along = lambda f: lambda x: jax.jvp(f, (x,), (v,))[1]  # noqa: E731
        reverse = along(jax.grad(fn))(x), jax.grad(lambda x: jnp.sum(jax.grad(fn)(x) * v))(x)
        with masksafe.forward_mode():
            return reverse, (along(jax.grad(fn))(x), jax.grad(along(fn))(x)), along(fn)(x), along(along(fn))(x)

    reverse, forward, slope, curvature = derivatives(X, direction.astype(np.float32))
    for product in (*reverse, *forward):  # Hessian times direction
        np.testing.assert_allclose(product, second, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose((slope, curvature), (first, (second * direction).sum()), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("axis", [(0, 2)], ids=str)
def test_derivatives_agree_with_finite_differences(name, axis):
    assert_gradients(lambda x: finite_sum(OPS[name][0](x, axis, WHERE)), X)


# The contract.


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("axis", [-1, slow(0), slow((0, 2))], ids=str)
def test_masked_elements_are_gone(name, axis):
    def fn(x):
        out = OPS[name][0](x, axis, DEAD)
        return jnp.where(is_nothing := out == -jnp.inf, 0, out), is_nothing

    assert_mask_safe(fn, X, masked={0: ~DEAD}, transforms=("jit",))


@hypothesis.settings(max_examples=40)
@hypothesis.given(
    x=st.lists(st.floats(-80, 80, width=32), min_size=9, max_size=9),
    kept=st.lists(st.booleans(), min_size=9, max_size=9),
    garbage=st.sampled_from([np.nan, np.inf, 1e38]),
)
@hypothesis.example(x=[1.0] * 9, kept=[False] * 9, garbage=np.nan)
def test_masking_equals_removal(x, kept, garbage):
    x, kept = np.array(x, np.float32), np.array(kept)
    garbage = np.where(kept, x, garbage).astype(np.float32)
    for name in OPS:
        out, gradient = map(np.asarray, value_and_gradient(name)(garbage, kept))
        np.testing.assert_array_equal(gradient[~kept], 0)
        if kept.any():
            rest = out[kept] if out.ndim else out
            np.testing.assert_allclose(rest, reference(name, x[kept])[0], rtol=2e-5, atol=1e-6)
        else:
            np.testing.assert_array_equal(out, 0 if name == "softmax" else -np.inf)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_masked_shows_in_its_row_only(name, bad):
    x, where = X.copy(), WHERE.copy()
    x[1, 2, 3], where[1, 2, 3] = bad, True
    out, gradient = map(np.asarray, value_and_gradient(name)(x, where))
    expected = reference(name, X, -1, where)[0]
    expected[1, 2] = bad if name == "logsumexp" else np.where(where[1, 2], np.nan, expected[1, 2])
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(np.isnan(gradient).any(-1), np.arange(12).reshape(3, 4) == 6)


@pytest.mark.parametrize(
    ("name", "modes"), [*((name, ("jit", "vmap", "scan")) for name in OPS), slow("softmax", CONSISTENCY_MODES)]
)
def test_one_answer(name, modes):
    assert_consistent(lambda x, where: OPS[name][0](x, where=where), X, WHERE, modes=modes)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(
    ("axis_type", "axis"),
    [(AxisType.Explicit, 0), (AxisType.Explicit, 1), (AxisType.Auto, 0), slow(AxisType.Auto, 1)],
    ids=str,
)
def test_sharded_arrays_agree_with_one_device(name, axis_type, axis):
    rng = np.random.default_rng(0)
    x, where = rng.normal(size=(8, 4)).astype(np.float32), rng.random((8, 4)) < 0.7
    where[2] = False
    mesh = jax.make_mesh((8,), ("x",), (axis_type,))
    with jax.set_mesh(mesh):
        sharded = jax.device_put((x, where), NamedSharding(mesh, PartitionSpec("x")))
        actual = value_and_gradient(name, axis)(*sharded)
    chex.assert_trees_all_close(actual, reference(name, x, axis, where), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OPS)
def test_no_false_alarm_of_debug_nans(name):
    with jax.debug_nans(True):
        out, pull_back = jax.vjp(lambda x: OPS[name][0](x, where=DEAD), np.where(DEAD, X, np.nan))
        (gradient,) = pull_back(out)
    np.testing.assert_array_equal(np.asarray(gradient)[~DEAD], 0)


@pytest.mark.parametrize("name", OPS)
def test_empty_arrays_and_lowering_for_cuda(name):
    out = OPS[name][0](np.zeros((3, 0), np.float32))
    np.testing.assert_array_equal(out, np.full(3, -np.inf) if name == "logsumexp" else np.zeros((3, 0)))
    exported = jax.export.export(value_and_gradient(name), platforms=["cuda"])(X, WHERE)
    assert exported.platforms == ("cuda",)


# Dtypes.


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_16_bit_inputs_are_rounded_once(name, dtype):
    x = (4 * X).astype(dtype)
    actual, expected = value_and_gradient(name)(x), reference(name, x)
    assert actual[0].dtype == actual[1].dtype == dtype
    (value, gradient), eps = (np.asarray(a, np.float64) for a in actual), float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(value, expected[0], rtol=0.51 * eps, atol=1e-7)
    # The reverse rule starts from the rounded result, whose error is relative to log-probabilities of up to 16.
    np.testing.assert_allclose(gradient, expected[1], rtol=16 * eps, atol=4 * eps)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("x64", [False, True])
def test_integers_become_floats(name, x64):
    op, _ = OPS[name]
    with jax.enable_x64(x64):
        for dtype in (np.int8, np.int32, np.uint8, np.int64):
            x = np.arange(6).reshape(2, 3).astype(dtype)
            assert jax.eval_shape(op, x).dtype == jax.eval_shape(jnp.exp, x).dtype
        out = jax.jit(op)(x)
        np.testing.assert_allclose(out, reference(name, x)[0], rtol=1e-12 if x64 else 1e-6)


@pytest.mark.parametrize("name", OPS)
def test_narrow_floats_stay_what_they_are(name):
    out, gradient = jax.eval_shape(value_and_gradient(name), X.astype(jnp.float8_e4m3fn))
    assert out.dtype == gradient.dtype == jnp.float8_e4m3fn


# Arguments.


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("cat",), TypeError, ".: got type str"),
        ((X, 3), ValueError, "axis: got value 3"),
        ((X, -1, np.ones(4, bool)), ValueError, r"where: got shape \(4,\)"),
        ((X, -1, np.ones(5, np.float32)), TypeError, "where: got dtype float32"),
    ],
)
def test_bad_arguments_are_refused(name, arguments, error, text):
    with pytest.raises(error, match=f"^{name}: {text}"):
        OPS[name][0](*arguments)


@pytest.mark.parametrize("op", [masksafe.softmax, masksafe.log_softmax])
def test_complex_numbers_are_refused(op):
    with pytest.raises(TypeError, match="x: got dtype complex64; expected a float dtype"):
        op(X + np.complex64(1j))


# What jax.nn.logsumexp takes beyond that.

FACTORS = np.array([1.0, -2.0, 0.0, 3.0, -1.0], np.float32)
CALLS = {
    "all axes by default": {},
    "keepdims": {"axis": 0, "keepdims": True},
    "a sign": {"return_sign": True, "axis": (0, 2)},
    "factors": {"b": FACTORS, "axis": -1},
    "factors and a sign": {"b": FACTORS, "axis": (1, 2), "return_sign": True, "keepdims": True},
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float32") for name in CALLS),
        ("keepdims", "complex64"),
        ("factors and a sign", "complex64"),
        *(slow(name, dtype) for name in CALLS for dtype in ("bfloat16", "int32")),
        *(slow(name, "complex64") for name in ("all axes by default", "a sign", "factors")),
    ],
)
def test_logsumexp_is_that_of_jax_nn(name, dtype):
    call = CALLS[name]
    both = jax.jit(lambda a: (masksafe.logsumexp(a, **call), jax.nn.logsumexp(a, **call)))
    ours, theirs = both((3 * X).astype(jnp.dtype(dtype)))
    chex.assert_trees_all_equal_shapes_and_dtypes(ours, theirs)
    ours, theirs = jax.tree.map(lambda a: np.asarray(a, np.complex64), (ours, theirs))
    chex.assert_trees_all_close(ours, theirs, rtol=2e-2 if dtype == "bfloat16" else 1e-5, atol=1e-6)


def test_logsumexp_takes_its_arguments_in_the_order_of_jax_nn():
    ours, theirs = (
        jax.jit(lambda a, b, where, op=op: op(a, (1, 2), b, True, True, where))(X, FACTORS, WHERE)
        for op in (masksafe.logsumexp, jax.nn.logsumexp)
    )
    chex.assert_trees_all_close(ours, theirs, rtol=1e-5)


def test_gradients_of_logsumexp_with_factors_are_those_of_jax_nn():
    total = lambda f: lambda a, b: jnp.sum(jnp.sin(f(a, -1, b, return_sign=True)[0]))  # noqa: E731
    ours, theirs = (jax.jit(jax.grad(total(f), (0, 1)))(X, FACTORS) for f in (masksafe.logsumexp, jax.nn.logsumexp))
    chex.assert_trees_all_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_logsumexp_with_factors_is_mask_safe():
    def fn(a, b):
        log, sign = masksafe.logsumexp(a, (1, 2), b, return_sign=True, where=DEAD)
        return jnp.where(is_nothing := log == -jnp.inf, 0, log), sign, is_nothing

    b = np.cos(X) + 2
    assert_mask_safe(fn, X, b, masked={0: ~DEAD, 1: ~DEAD}, transforms=("jit",))
    _, sign, is_nothing = jax.jit(fn)(X, b)
    np.testing.assert_array_equal(is_nothing, [False, True, False])
    np.testing.assert_array_equal(sign, [1, 0, 1])


def test_logsumexp_of_a_negative_sum_is_nan_without_its_sign():
    assert jnp.isnan(masksafe.logsumexp(np.zeros(2, np.float32), b=-np.ones(2, np.float32)))


def test_shapes_of_logsumexp_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="logsumexp: a and b: got shapes"):
        masksafe.logsumexp(X, b=np.ones(4, np.float32))
    with pytest.raises(ValueError, match="logsumexp: where: got shape"):
        masksafe.logsumexp(X, where=np.ones(4, bool))
