"""layer_norm, rms_norm, standardize: values, precision, the contract, arguments."""

import functools

import flax.linen as nn
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import masksafe
from masksafe._core import platforms
from masksafe.testing import assert_gradients, assert_mask_safe

SHAPE = (3, 4, 5)
AXES = [-1, 0, 1, (0, 2), (2, 1), (1, -1), (0, 1, 2), (2, 0, 1)]
X = np.random.default_rng(0).normal(2.0, 3.0, SHAPE).astype(np.float32)
WHERE = np.random.default_rng(1).random(SHAPE) < 0.7
DEAD = WHERE.copy()
DEAD[1] = False
DEAD[2, 3] = False


def parameters(shape, axis, seed=2):
    axes = axis if isinstance(axis, tuple) else (axis,)
    sizes = [shape[a] for a in axes]
    rng = np.random.default_rng(seed)
    return rng.normal(1.0, 0.5, sizes).astype(np.float32), rng.normal(size=sizes).astype(np.float32)


def along(parameter, axis, ndim):
    """The parameter, laid out along the axes that it belongs to."""
    axes = [a % ndim for a in (axis if isinstance(axis, tuple) else (axis,))]
    return np.expand_dims(np.transpose(parameter, np.argsort(axes)), [a for a in range(ndim) if a not in axes])


def reference(op, x, scale, bias, axis, where=None, epsilon=1e-6):
    """In float64, by the definition, on arrays or JAX's tracers."""
    xp = np if isinstance(x, np.ndarray) else jnp
    where = np.ones(x.shape, bool) if where is None else np.broadcast_to(where, x.shape)
    x = xp.where(where, x, 0)
    n = np.maximum(where.sum(axis, keepdims=True), 1)
    if op != "rms_norm":
        x = xp.where(where, x - x.sum(axis, keepdims=True) / n, 0)
    spread = (x * x).sum(axis, keepdims=True) / n + epsilon
    y = x / xp.sqrt(spread) * (1 if scale is None else scale)
    return xp.where(where, y + (0 if bias is None else bias), 0)


def apply(op, x, scale, bias, axis, where=None, epsilon=1e-6):
    """Any of the three, with the arguments that it has."""
    if op == "standardize":
        return masksafe.standardize(x, axis, epsilon=epsilon, where=where)
    if op == "rms_norm":
        return masksafe.rms_norm(x, scale, axis=axis, where=where, epsilon=epsilon)
    return masksafe.layer_norm(x, scale, bias, axis=axis, where=where, epsilon=epsilon)


def used(op, scale, bias):
    return {"layer_norm": (scale, bias), "rms_norm": (scale, None), "standardize": (None, None)}[op]


OPS = pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "standardize"])
# One core serves all three: the others than layer_norm get the long tests in full in the slow run.
OTHER_OPS_SLOWLY = pytest.mark.parametrize(
    "op", ["layer_norm", *(pytest.param(op, marks=pytest.mark.slow) for op in ("rms_norm", "standardize"))]
)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks so small that the arrays of these tests are worked through in several."""
    monkeypatch.setattr(platforms, "ROW_BLOCK_ELEMENTS", 2)
    jax.clear_caches()
    yield
    jax.clear_caches()


# Values and gradients.


@OTHER_OPS_SLOWLY
@pytest.mark.parametrize("axis", AXES, ids=str)
@pytest.mark.parametrize(
    "where", [None, WHERE, DEAD, DEAD[:, :, :1], DEAD[0]], ids=["no", "some", "dead", "rows", "columns"]
)
def test_value_and_gradients_are_those_of_the_definition(op, axis, where):
    scale, bias = parameters(SHAPE, axis)
    weights = np.cos(np.arange(X.size)).reshape(SHAPE)

    def loss(fn, x, scale, bias):
        return (fn(op, x, *used(op, scale, bias), axis, where) * weights).sum()

    def defined(op, x, scale, bias, axis, where):
        lay = lambda p: None if p is None else along_traced(p, axis)  # noqa: E731
        return reference(op, x, lay(scale), lay(bias), axis, where)

    def along_traced(parameter, axis):
        axes = [a % 3 for a in (axis if isinstance(axis, tuple) else (axis,))]
        return jnp.expand_dims(jnp.transpose(parameter, np.argsort(axes)), [a for a in range(3) if a not in axes])

    value = apply(op, X, *used(op, scale, bias), axis, where)
    actual = jax.grad(functools.partial(loss, apply), (0, 1, 2))(jnp.asarray(X), scale, bias)
    with jax.enable_x64(True):
        wide = [jnp.asarray(a, jnp.float64) for a in (X, scale, bias)]
        expected_value = defined(op, wide[0], *used(op, *wide[1:]), axis, where)
        expected = jax.grad(functools.partial(loss, defined), (0, 1, 2))(*wide)
    np.testing.assert_allclose(value, expected_value, rtol=1e-5, atol=1e-6)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5 * (1 + np.abs(e).max()))


@OTHER_OPS_SLOWLY
@pytest.mark.parametrize("shape", [(8, 5), (7, 1), (2, 3, 4), (13, 2)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.usefixtures("small_blocks")
def test_blocks_give_what_one_pass_gives(op, shape, dtype, masked, monkeypatch):
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.normal(size=shape), dtype)
    where = rng.random(shape) < 0.7 if masked else None
    scale, bias = used(op, *parameters(shape, -1))

    def value_and_gradients():
        fn = lambda *a: apply(op, *a, -1, where).astype(jnp.float32)  # noqa: E731
        value, pull_back = jax.vjp(fn, x, scale, bias)
        return value, pull_back(jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(shape))

    in_blocks = value_and_gradients()
    assert "while" in jax.jit(value_and_gradients).lower().as_text()
    monkeypatch.setattr(platforms, "ROW_BLOCK_ELEMENTS", 2**18)
    jax.clear_caches()
    tolerance = {"float32": 1e-6, "bfloat16": 1e-2, "float16": 2e-3}[dtype]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=tolerance, atol=tolerance
        ),
        in_blocks,
        value_and_gradients(),
    )


@OTHER_OPS_SLOWLY
@pytest.mark.parametrize("axis", [-1, 1, (2, 0)], ids=str)
def test_gradients_agree_with_finite_differences_in_both_modes(op, axis):
    scale, bias = used(op, *parameters(SHAPE, axis))
    fn = lambda x, scale, bias: apply(op, x, scale, bias, axis, DEAD)  # noqa: E731
    assert_gradients(fn, X, scale, bias)


@pytest.mark.parametrize("mask", [None, WHERE], ids=["all", "masked"])
@pytest.mark.parametrize("axis", [-1, (-2, -1)], ids=str)
def test_equals_flax_on_clean_input(mask, axis):
    scale, bias = parameters(SHAPE, axis)
    params = {"params": {"scale": scale, "bias": bias}}
    linen = nn.LayerNorm(reduction_axes=axis, feature_axes=axis, use_fast_variance=False)
    where = True if mask is None else mask
    ours = masksafe.layer_norm(X, scale, bias, axis=axis, where=mask)
    np.testing.assert_allclose(ours, np.where(where, linen.apply(params, X, mask=mask), 0), rtol=1e-5, atol=1e-5)
    linen = nn.RMSNorm(reduction_axes=axis, feature_axes=axis)
    ours = masksafe.rms_norm(X, scale, axis=axis, where=mask)
    theirs = linen.apply({"params": {"scale": scale}}, X, mask=mask)
    np.testing.assert_allclose(ours, np.where(where, theirs, 0), rtol=1e-5, atol=1e-5)


def test_equals_the_standardize_of_jax_on_clean_input():
    np.testing.assert_allclose(masksafe.standardize(X, 1, epsilon=1e-5), jax.nn.standardize(X, 1), rtol=1e-4, atol=1e-5)


# Precision: the peers' cases.


def float64_layer_norm(x, epsilon=1e-6):
    return reference("layer_norm", np.asarray(x, np.float64), None, None, -1, epsilon=epsilon)


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
    theirs = [nn.LayerNorm().apply(params, x), nnx.LayerNorm(512, rngs=nnx.Rngs(0))(x), jax.nn.standardize(x)]
    assert all(np.abs(y - float64_layer_norm(x)).max() > 100 for y in theirs)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 2e-3), ("bfloat16", 1.6e-2)])
@pytest.mark.parametrize(("offset", "spread"), [(1e3, 1.0), (100.0, 1.0), (1e4, 300.0)])
def test_16_bit_inputs_are_rounded_once(dtype, tolerance, offset, spread):
    x = jnp.asarray(np.random.default_rng(0).normal(offset, spread, (8, 1000)), dtype)
    y = masksafe.layer_norm(x)
    assert y.dtype == dtype
    np.testing.assert_allclose(np.asarray(y, np.float64), float64_layer_norm(x), atol=tolerance)


def test_precision_of_16_bit_gradients_is_that_of_float32():
    x, scale = jnp.asarray(X, jnp.bfloat16), jnp.asarray(parameters(SHAPE, -1)[0])
    loss = lambda x, scale: jnp.sum(masksafe.layer_norm(x, scale).astype(jnp.float32) ** 3)  # noqa: E731
    d_x, d_scale = jax.grad(loss, (0, 1))(x, scale)
    e_x, e_scale = jax.grad(loss, (0, 1))(x.astype(jnp.float32), scale)
    assert d_x.dtype == jnp.bfloat16
    assert d_scale.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(d_x, np.float32), e_x, rtol=3e-2, atol=3e-2)
    np.testing.assert_allclose(d_scale, e_scale, rtol=3e-2)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float16", "bfloat16", "float32"])
def test_strict_promotion_and_narrow_floats(dtype):
    x = jnp.asarray(X, dtype)
    with jax.numpy_dtype_promotion("strict"):
        outputs = masksafe.layer_norm(x, where=WHERE), masksafe.rms_norm(x), *masksafe.var_mean(x, -1, WHERE)
        gradient = jax.grad(lambda x: masksafe.layer_norm(x).astype(jnp.float32).max())(x)
    assert {a.dtype for a in (*outputs, gradient)} == {jnp.dtype(dtype)}


def test_float64_stays_float64():
    with jax.enable_x64(True):
        x = np.random.default_rng(0).normal(size=(4, 6)) + 1e4
        y = masksafe.layer_norm(x)
        assert y.dtype == jnp.float64
        np.testing.assert_allclose(y, float64_layer_norm(x), atol=1e-11)


# The contract.


@OPS
@pytest.mark.parametrize("axis", [-1, 1, (2, 0)], ids=str)
def test_masked_elements_are_gone(op, axis):
    scale, bias = used(op, *parameters(SHAPE, axis))
    fn = lambda x, scale, bias: apply(op, x, scale, bias, axis, DEAD)  # noqa: E731
    assert_mask_safe(fn, X, scale, bias, masked={0: ~DEAD}, transforms=("jit",))
    assert_mask_safe(fn, X, scale, bias, masked={0: ~DEAD}, order=0)


def test_parameters_under_the_mask_are_gone():
    where = np.array([True, True, False, True, False])
    fn = lambda x, scale, bias: masksafe.layer_norm(x, scale, bias, where=where)  # noqa: E731
    masked = {0: ~where, 1: ~where, 2: ~where}
    assert_mask_safe(fn, X, *parameters(SHAPE, -1), masked=masked, transforms=("jit",))


def test_parameter_that_is_bad_where_one_row_masks_it_harms_only_the_others():
    scale, where = np.array([1.0, np.nan, 1.0], np.float32), np.array([[True, False, True], [True, True, True]])
    x = np.array([[1.0, 2.0, 3.0], [1.0, 2.0, 4.0]], np.float32)
    loss = lambda x: masksafe.layer_norm(x, scale, where=where)[0].sum()  # noqa: E731
    assert np.isfinite(jax.grad(loss)(x)[0]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_parameter_that_is_bad_under_the_mask_is_gone_from_every_way_to_differentiate(bad):
    where = np.array([True, True, False, True])
    scale = np.array([1.0, 2.0, bad, 3.0], np.float32)
    x = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    loss = lambda x, scale: (masksafe.layer_norm(x, scale, where=where) ** 2).sum()  # noqa: E731
    ways = [jax.grad, jax.hessian, lambda f: jax.jacrev(jax.grad(f)), jax.jacfwd]
    for way in ways[:3]:
        np.testing.assert_array_equal(way(loss)(x, scale), way(loss)(x, np.nan_to_num(scale, posinf=0)))
    with masksafe.forward_mode():
        for way in ways:
            np.testing.assert_array_equal(way(loss)(x, scale), way(loss)(x, np.nan_to_num(scale, posinf=0)))


@OPS
@pytest.mark.usefixtures("small_blocks")
def test_masked_elements_are_gone_in_blocks(op):
    scale, bias = used(op, *parameters(SHAPE, -1))
    fn = lambda x, scale, bias: apply(op, x, scale, bias, -1, DEAD)  # noqa: E731
    assert_mask_safe(fn, X, scale, bias, masked={0: ~DEAD}, transforms=("jit",))


@OPS
def test_slice_with_nothing_left_is_zero_with_its_derivatives(op):
    x = np.array([[np.nan, np.inf, 1.0], [1.0, 2.0, 4.0]], np.float32)
    where = np.array([[False], [True]])
    scale, bias = used(op, *parameters((3,), -1))
    fn = lambda x: apply(op, x, scale, bias, -1, where)  # noqa: E731
    assert (fn(x)[0] == 0).all()
    assert (fn(x)[1] != 0).any()
    loss = lambda x: (fn(x) ** 2).sum()  # noqa: E731
    assert (jax.grad(loss)(x)[0] == 0).all()
    assert (jax.hessian(loss)(x)[0] == 0).all()
    assert (jax.hessian(loss)(x)[:, :, 0] == 0).all()


@OPS
@pytest.mark.parametrize("epsilon", [0, pytest.param(1e-6, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("x", "where"),
    [
        ([3.5, 3.5, 3.5, 3.5], None),
        ([2.0, 7.0, 1.0, 0.0], [False, True, False, False]),
        ([0.0] * 4, None),
        ([5.0], None),
    ],
    ids=["constant", "one left", "zeros", "one element"],
)
def test_slice_without_a_spread_is_finite_to_the_second_derivative(op, epsilon, x, where):
    x, where = jnp.array(x), None if where is None else np.array(where)
    scale, bias = used(op, *parameters(x.shape, -1))
    fn = lambda x: apply(op, x, scale, bias, -1, where, epsilon)  # noqa: E731
    if op == "layer_norm":
        np.testing.assert_array_equal(fn(x), bias if where is None else np.where(where, bias, 0))
    loss = lambda x: (fn(x) ** 2).sum()  # noqa: E731
    assert np.isfinite(fn(x)).all()
    assert np.isfinite(jax.grad(loss)(x)).all()
    assert np.isfinite(jax.hessian(loss)(x)).all()
    assert np.isfinite(jax.jacrev(jax.grad(loss))(x)).all()
    with masksafe.forward_mode():
        assert np.isfinite(jax.jacfwd(jax.jacfwd(loss))(x)).all()


@pytest.mark.parametrize("n", [3, 14, 41, 63, 1000])
@pytest.mark.parametrize("value", [0.1, 1.1, 3.7, -1e6, 1e-20])
def test_constant_whose_mean_is_rounded_has_no_spread(n, value):
    x = jnp.full((2, n), value)
    assert (masksafe.var(x, -1) == 0).all()
    assert (masksafe.layer_norm(x, bias=jnp.ones(n), epsilon=0) == 1).all()
    weights = jnp.arange(n, dtype=jnp.float32)
    assert (jax.grad(lambda x: (masksafe.standardize(x, epsilon=0) ** 3 * weights).sum())(x) == 0).all()


@pytest.mark.parametrize("value", [0.1, 1.1, -1e6])
def test_constant_but_for_the_next_float_has_a_spread(value):
    x = np.full(41, value, np.float32)
    x[7] = np.nextafter(x[7], np.float32(np.inf))
    np.testing.assert_allclose(masksafe.standardize(x, epsilon=0), float64_layer_norm(x, epsilon=0), rtol=1e-4)


@OPS
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_unmasked_bad_value_shows_in_its_slice_and_in_no_other(op, bad):
    x, where = X.copy(), WHERE.copy()
    x[0, 1, 2], where[0, 1, 2] = bad, True
    y = np.asarray(apply(op, x, None, None, -1, where))
    slice_of_bad = np.zeros(SHAPE, bool)
    slice_of_bad[0, 1] = where[0, 1]
    np.testing.assert_array_equal(np.isnan(y) | (slice_of_bad & (y == 0)), slice_of_bad)
    assert np.isnan(y[0, 1, 2])
    weights = np.cos(np.arange(X.size)).reshape(SHAPE)
    gradient = jax.grad(lambda x: (apply(op, x, None, None, -1, where) * weights).sum())(x)
    assert np.isnan(gradient[0, 1, 2])
    assert np.isfinite(np.asarray(gradient)[~slice_of_bad]).all()


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(data=st.data())
@OPS
def test_masking_equals_taking_out(op, data):
    n = data.draw(st.integers(1, 8), "n")
    where = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n), "where"))
    values = st.floats(-100, 100, width=32)
    x = np.array(data.draw(st.lists(values, min_size=n, max_size=n), "x"), np.float32)
    scale, bias = used(op, *parameters((n,), 0))
    kept = [None if p is None else p[where] for p in (scale, bias)]
    masked = apply(op, x, scale, bias, 0, where)
    expected = np.asarray(apply(op, x[where], *kept, 0))
    np.testing.assert_allclose(np.asarray(masked)[where], expected, rtol=1e-4, atol=1e-4)
    assert (np.asarray(masked)[~where] == 0).all()


@OPS
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (2, 0, 3)], ids=str)
def test_arrays_without_elements(op, shape):
    x = jnp.zeros(shape)
    scale, bias = used(op, jnp.ones(shape[-1]), jnp.ones(shape[-1]))
    y, pull_back = jax.vjp(lambda x, scale: apply(op, x, scale, bias, -1), x, scale)
    assert y.shape == shape
    d_x, d_scale = pull_back(y)
    assert d_x.shape == shape
    assert d_scale is None or (d_scale == 0).all()


# What jax.nn.standardize takes beyond that.

MEAN, VARIANCE = jnp.full((3, 1, 1), 0.3), jnp.arange(1.0, 13.0).reshape(3, 4, 1)
CALLS = {
    "defaults": {},
    "all axes": {"axis": None},
    "a mean": {"mean": MEAN},
    "a mean, stable": {"mean": MEAN, "algorithm": "stable"},
    "a variance": {"variance": VARIANCE, "axis": (0, 2)},
    "both": {"mean": MEAN, "variance": VARIANCE},
    "an array for epsilon": {"epsilon": jnp.float32(0.1)},
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_standardize_is_that_of_jax_nn(call):
    def value_and_grad(op):
        return jax.jit(jax.value_and_grad(lambda x: (y := op(x, **call), jnp.sum(jnp.sin(y)))[::-1], has_aux=True))(X)

    ours, theirs = map(value_and_grad, (masksafe.standardize, jax.nn.standardize))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_standardize_takes_its_arguments_in_the_order_of_jax_nn():
    arguments = (X, -1, MEAN, VARIANCE, 0.1, jnp.ones(X.shape, bool))
    ours, theirs = masksafe.standardize(*arguments), jax.nn.standardize(*arguments)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_standardize_of_integers():
    x = jnp.array([[1, 2, 4], [7, 7, 9]])
    np.testing.assert_allclose(masksafe.standardize(x), jax.nn.standardize(x), rtol=1e-4)


@pytest.mark.parametrize("other", ["mean", "variance", "epsilon"])
def test_standardize_has_the_dtype_of_jax_nn(other):
    x, call = X.astype(jnp.bfloat16), {other: jnp.ones(())}
    assert masksafe.standardize(x, **call).dtype == jax.nn.standardize(x, **call).dtype == jnp.float32


@pytest.mark.parametrize("call", list(CALLS.values())[2:], ids=list(CALLS)[2:])
def test_standardize_with_given_statistics_is_mask_safe(call):
    where = jnp.ones(X.shape, bool).at[1].set(False).at[2, 3, 1:].set(False)
    given = {name: jnp.broadcast_to(call[name], X.shape) for name in ("mean", "variance") if name in call}
    rest = {name: value for name, value in call.items() if name not in given}

    def fn(x, given):
        return masksafe.standardize(x, where=where, **given, **rest)

    masked = {0: ~where} | ({1: dict.fromkeys(given, ~where)} if given else {})
    assert_mask_safe(fn, X, given, masked=masked, transforms=("jit",))
    assert (fn(X, given)[1] == 0).all()


@pytest.mark.parametrize("epsilon", [0.0, 1e-5])
def test_traced_epsilon_is_the_same_as_a_number(epsilon):
    x = jnp.stack([X[0], jnp.full(X.shape[1:], 3.3)])  # with constant slices
    weights = jnp.cos(x)
    value_and_grad = jax.value_and_grad(lambda x, e: jnp.sum(weights * masksafe.standardize(x, epsilon=e)))
    traced = jax.jit(value_and_grad)(x, epsilon)
    for a, b in zip(traced, value_and_grad(x, epsilon), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_variance_about_a_given_mean_keeps_its_digits():
    x = (1e4 + jax.random.normal(jax.random.key(3), (2, 512))).astype(jnp.float32)
    mean = np.float32(1e4)
    exact = np.asarray(x, np.float64) - 1e4
    exact /= np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(masksafe.standardize(x, mean=mean, algorithm="stable"), exact, atol=1e-5)


# Arguments.


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: masksafe.layer_norm(jnp.arange(3)), TypeError, "layer_norm: x: got dtype int32; expected a float"),
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
        (lambda: jax.jit(lambda e: masksafe.layer_norm(X, epsilon=e))(0.1), TypeError, "layer_norm: epsilon: got type"),
        (lambda: jax.jit(lambda c: masksafe.var(X, correction=c))(1.0), TypeError, "var: correction: got type"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()
