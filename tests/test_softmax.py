"""softmax, log_softmax and logsumexp."""

import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.test_util import check_grads

import masksafe
from masksafe.testing import assert_mask_safe


def logsumexp(x, axis=-1, where=None):
    """With the parameters of the other two."""
    return masksafe.logsumexp(x, axis, where=where)


OPS = {
    "logsumexp": (logsumexp, jax.nn.logsumexp),
    "softmax": (masksafe.softmax, jax.nn.softmax),
    "log_softmax": (masksafe.log_softmax, jax.nn.log_softmax),
}
AXES = [-1, 0, 1, (0, 2), (2, 1), (0, 1, 2)]
X = jax.random.normal(jax.random.key(0), (3, 4, 5))
WHERE = jax.random.bernoulli(jax.random.key(1), 0.6, X.shape).at[:, :, 0].set(True)
DEAD = jnp.ones(X.shape, bool).at[1].set(False).at[2, 3].set(False)


def finite_sum(x):
    """Of what is not -inf, as the log-probabilities of masked elements are."""
    return jnp.sum(jnp.where(x == -jnp.inf, 0, x) * jnp.cos(jnp.arange(x.size)).reshape(x.shape))


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("axis", AXES, ids=str)
@pytest.mark.parametrize("where", [None, WHERE], ids=["unmasked", "masked"])
def test_equals_jax_nn(name, axis, where):
    ours, theirs = OPS[name]
    np.testing.assert_allclose(ours(X, axis, where), theirs(X, axis=axis, where=where), rtol=1e-5, atol=1e-6)
    if where is None or name == "softmax":
        gradient, expected = (jax.grad(lambda x, f=f: finite_sum(f(x, axis=axis, where=where)))(X) for f in OPS[name])
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("axis", [-1, 0, (0, 2)], ids=str)
def test_masked_elements_are_gone(name, axis):
    op, _ = OPS[name]
    fn = lambda x: jnp.where((y := op(x, axis, DEAD)) == -jnp.inf, 0, y)  # noqa: E731
    assert_mask_safe(fn, X, masked={0: ~DEAD}, transforms=("jit",))
    assert_mask_safe(lambda x: op(x, axis, DEAD), X, masked={0: ~DEAD}, order=0)


@pytest.mark.parametrize("name", OPS)
def test_derivatives_of_a_row_with_nothing_left_are_zero(name):
    op, _ = OPS[name]
    nothing = jnp.zeros(4, bool)
    loss = lambda x: jnp.sum(op(x, where=nothing))  # noqa: E731
    x = jnp.array([1.0, jnp.nan, jnp.inf, -3.0])
    assert loss(x) == (0 if name == "softmax" else -jnp.inf)
    assert (jax.grad(loss)(x) == 0).all()
    assert (jax.hessian(loss)(x) == 0).all()
    assert (jax.jacrev(jax.grad(loss))(x) == 0).all()


@hypothesis.given(st.data())
def test_masking_equals_removal(data):
    x = np.array(data.draw(st.lists(st.floats(-80, 80, width=32), min_size=1, max_size=9)), np.float32)
    kept = np.array(data.draw(st.lists(st.booleans(), min_size=len(x), max_size=len(x))), bool)
    garbage = np.where(kept, x, data.draw(st.sampled_from([np.nan, np.inf, 1e38]))).astype(np.float32)
    for op, theirs in OPS.values():
        masked = op(garbage, where=kept)
        if kept.any():
            rest = np.asarray(masked)[kept] if masked.ndim else masked
            np.testing.assert_allclose(rest, theirs(x[kept], axis=-1), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_masked_shows_in_its_row_only(name, bad):
    op, _ = OPS[name]
    out = np.asarray(op(X.at[1, 2, 3].set(bad), where=WHERE.at[1, 2, 3].set(True))).reshape(12, -1)
    is_bad = ~np.isfinite(out) & (out != -np.inf)
    np.testing.assert_array_equal(is_bad.any(1), np.arange(12) == 6)


def test_logsumexp_of_infinity_is_infinity():
    assert masksafe.logsumexp(jnp.array([jnp.inf, 0.0])) == jnp.inf
    assert masksafe.logsumexp(jnp.array([jnp.inf, 0.0]), where=jnp.array([False, True])) == 0


def test_bad_row_is_nan_at_every_unmasked_element():
    for bad, op in itertools.product((np.nan, np.inf), (masksafe.softmax, masksafe.log_softmax)):
        out = op(jnp.array([1.0, bad, 2.0, 3.0]), where=jnp.array([True, True, True, False]))
        np.testing.assert_array_equal(np.isnan(out), [True, True, True, False])


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_16_bit_inputs_are_rounded_once(name, dtype):
    op, _ = OPS[name]
    x = (4 * X).astype(dtype)
    out = op(x)
    assert out.dtype == dtype
    with jax.enable_x64(True):
        exact = OPS[name][1](np.asarray(x, np.float64), axis=-1)
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(out, np.float64), exact, rtol=0.51 * eps, atol=1e-7)
    assert jax.grad(lambda x: op(x).astype(jnp.float32).sum())(x).dtype == dtype


@pytest.mark.parametrize("name", OPS)
def test_both_modes_of_autodiff(name):
    op, _ = OPS[name]
    fn = lambda x: finite_sum(op(x, (0, 2), WHERE))  # noqa: E731
    check_grads(fn, (X,), 2, ("rev",), rtol=2e-2, atol=1e-2)
    with masksafe.forward_mode():
        check_grads(fn, (X,), 2, ("fwd", "rev"), rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("name", OPS)
def test_vmap_debug_nans_and_scan(name):
    op, _ = OPS[name]
    np.testing.assert_allclose(jax.vmap(op)(X), op(X), rtol=1e-6)
    poisoned = jnp.where(WHERE, X, jnp.nan)
    with jax.debug_nans(True):
        jax.grad(lambda x: finite_sum(op(x, where=WHERE)))(poisoned)
    scanned = jax.lax.scan(lambda _, x: (None, op(x)), None, X)[1]
    np.testing.assert_allclose(scanned, op(X), rtol=1e-6)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_sharded_arrays_agree_with_one_device(name, axis_type, axis):
    op, _ = OPS[name]
    mesh = jax.make_mesh((8,), ("x",), (axis_type,))
    x = jax.random.normal(jax.random.key(0), (8, 16))
    where = jax.random.bernoulli(jax.random.key(1), 0.5, x.shape).at[2].set(False)
    value = jax.value_and_grad(lambda x, where: finite_sum(op(x, axis, where)))
    with jax.set_mesh(mesh):
        sharded = [jax.device_put(a, NamedSharding(mesh, PartitionSpec("x"))) for a in (x, where)]
        actual = jax.jit(value)(*sharded)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(value(x, where)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OPS)
def test_empty_arrays_and_lowering_for_cuda(name):
    op, _ = OPS[name]
    assert op(jnp.zeros((3, 0))).size in (0, 3)
    grad = jax.jit(jax.grad(lambda x, where: finite_sum(op(x, where=where))))
    jax.export.export(grad, platforms=["cuda"])(X, WHERE)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int32, jnp.uint8, jnp.int64])
@pytest.mark.parametrize("x64", [False, True])
def test_integers_become_floats(name, dtype, x64):
    ours, theirs = OPS[name]
    with jax.enable_x64(x64):
        x = np.arange(6).reshape(2, 3).astype(dtype)
        assert ours(x).dtype == jnp.exp(x).dtype
        np.testing.assert_allclose(ours(x), theirs(x.astype(float), axis=-1), rtol=1e-6)


@pytest.mark.parametrize("name", OPS)
def test_narrow_floats_stay_what_they_are(name):
    x = jnp.array([0.0, 1.0, 2.0], jnp.float8_e4m3fn)
    gradient = jax.grad(lambda x: finite_sum(OPS[name][0](x).astype(jnp.float32)))(x)
    assert OPS[name][0](x).dtype == gradient.dtype == x.dtype


@pytest.mark.parametrize("name", OPS)
def test_list_of_axes(name):
    np.testing.assert_array_equal(OPS[name][0](X, [0, 2], WHERE), OPS[name][0](X, (0, 2), WHERE))


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("cat",), TypeError, ".: got type str"),
        ((X, 3), ValueError, "axis: got value 3"),
        ((X, -1, jnp.ones(4, bool)), ValueError, r"where: got shape \(4,\)"),
        ((X, -1, jnp.ones(5)), TypeError, "where: got dtype float32"),
    ],
)
def test_bad_arguments_are_refused(name, arguments, error, text):
    with pytest.raises(error, match=f"^{name}: {text}"):
        OPS[name][0](*arguments)


@pytest.mark.parametrize("op", [masksafe.softmax, masksafe.log_softmax])
def test_complex_numbers_are_refused(op):
    with pytest.raises(TypeError, match="x: got dtype complex64; expected a float dtype"):
        op(X + 1j)


# What jax.nn.logsumexp takes beyond that.

FACTORS = jnp.array([1.0, -2.0, 0.0, 3.0, -1.0])
CALLS = {
    "all axes by default": {},
    "keepdims": {"axis": 0, "keepdims": True},
    "a sign": {"return_sign": True, "axis": (0, 2)},
    "factors": {"b": FACTORS, "axis": -1},
    "factors and a sign": {"b": FACTORS, "axis": (1, 2), "return_sign": True, "keepdims": True},
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.complex64], ids=lambda d: d.__name__)
def test_logsumexp_is_that_of_jax_nn(call, dtype):
    a = (3 * X).astype(dtype)
    actual, expected = masksafe.logsumexp(a, **call), jax.nn.logsumexp(a, **call)
    for ours, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        ours, theirs = (np.asarray(x, np.complex64) for x in (ours, theirs))
        np.testing.assert_allclose(ours, theirs, rtol=2e-2 if dtype == jnp.bfloat16 else 1e-5, atol=1e-6)


def test_logsumexp_takes_its_arguments_in_the_order_of_jax_nn():
    arguments = (X, (1, 2), FACTORS, True, True, WHERE)
    for ours, theirs in zip(masksafe.logsumexp(*arguments), jax.nn.logsumexp(*arguments), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.parametrize("argnum", [0, 1])
def test_gradients_of_logsumexp_with_factors_are_those_of_jax_nn(argnum):
    total = lambda f: lambda a, b: jnp.sum(jnp.sin(f(a, -1, b, return_sign=True)[0]))  # noqa: E731
    ours, theirs = (jax.jit(jax.grad(total(f), argnum))(X, FACTORS) for f in (masksafe.logsumexp, jax.nn.logsumexp))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_logsumexp_with_factors_is_mask_safe():
    def fn(a, b):
        log, sign = masksafe.logsumexp(a, (1, 2), b, return_sign=True, where=DEAD)
        return jnp.where(log == -jnp.inf, 0, log), sign

    b = jnp.cos(X) + 2
    assert_mask_safe(fn, X, b, masked={0: ~DEAD, 1: ~DEAD}, transforms=("jit",))
    log, sign = masksafe.logsumexp(X, (1, 2), b, return_sign=True, where=DEAD)
    assert (log[1], sign[1]) == (-jnp.inf, 0)


def test_logsumexp_of_a_negative_sum_is_nan_without_its_sign():
    assert jnp.isnan(masksafe.logsumexp(jnp.zeros(2), b=-jnp.ones(2)))


def test_shapes_of_logsumexp_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="logsumexp: a and b: got shapes"):
        masksafe.logsumexp(X, b=jnp.ones(4))
    with pytest.raises(ValueError, match="logsumexp: where: got shape"):
        masksafe.logsumexp(X, where=jnp.ones(4, bool))
