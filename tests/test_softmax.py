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

OPS = {
    "logsumexp": (masksafe.logsumexp, jax.nn.logsumexp),
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
            np.testing.assert_allclose(rest, theirs(x[kept]), rtol=2e-5, atol=1e-6)


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
@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((jnp.ones((2, 3), int),), TypeError, "x has dtype int32"),
        ((X, 3), ValueError, "axis has value 3"),
        ((X, -1, jnp.ones(4, bool)), ValueError, r"where has shape \(4,\)"),
        ((X, -1, jnp.ones(5)), TypeError, "where has dtype float32"),
    ],
)
def test_bad_arguments_are_refused(name, arguments, error, text):
    with pytest.raises(error, match=f"^{name}: {text}"):
        OPS[name][0](*arguments)
