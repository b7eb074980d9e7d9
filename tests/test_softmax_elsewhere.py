"""The programs of the softmaxes and cross-entropies for accelerators, run on the CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import masksafe
from masksafe.losses import softmax_cross_entropy as soft

RNG = np.random.default_rng(0)
X, DIRECTION = RNG.normal(size=(2, 5, 7)) * 3
TARGETS = RNG.dirichlet(np.ones(7), 5)
WHERE = RNG.random((5, 7)) < 0.6
WHERE[1] = False
WHERE[2, :2] = True
OPS = {
    "softmax": lambda x, where: masksafe.softmax(x, where=where),
    "log_softmax": lambda x, where: masksafe.log_softmax(x, where=where),
    "cross_entropy": lambda x, where: soft(x, TARGETS.astype(x.dtype), where=where),
}


@pytest.fixture(params=[2**14, 4], ids=["short rows", "long rows"])
def elsewhere(request, choose):
    choose(form="elsewhere", elements_of_row_in_one_kernel=request.param)


def results(name):
    """The result, a gradient and the derivative of that along a direction."""

    def total(x, where):
        out = OPS[name](x, where)
        live = where if out.shape == where.shape else where.any(-1)
        weights = jnp.cos(1 + jnp.arange(out.size).reshape(out.shape))
        return jnp.sum(weights * jnp.where(live, out, 0))

    def all_orders(x, where):
        grad = jax.grad(total)
        slope = jax.grad(lambda x: jnp.vdot(grad(x, where), DIRECTION.astype(x.dtype)))
        return OPS[name](x, where), grad(x, where), slope(x)

    return jax.jit(all_orders)


def expected_row(name, row):
    """The same for the unmasked elements of one row, in float64, by `jax.nn`."""
    live = WHERE[row]
    plain = {
        "softmax": jax.nn.softmax,
        "log_softmax": jax.nn.log_softmax,
        "cross_entropy": lambda x: -jnp.sum(TARGETS[row][live] * jax.nn.log_softmax(x)),
    }[name]
    weights = np.cos(1 + np.arange(35).reshape(5, 7)[row][live]) if "softmax" in name else np.cos(1 + row)
    grad = jax.grad(lambda x: jnp.sum(weights * plain(x)))
    x, direction = (jnp.asarray(a[row][live]) for a in (X, DIRECTION))
    return plain(x), grad(x), jax.jvp(grad, (x,), (direction,))[1]


@pytest.mark.parametrize("name", OPS)
def test_values_and_derivatives(name, elsewhere):
    found = [np.asarray(a) for a in results(name)(X.astype(np.float32), WHERE)]
    for row in np.flatnonzero(WHERE.any(-1)):
        with jax.enable_x64(True):
            expected = expected_row(name, row)
        for actual, reference in zip(found, expected, strict=True):
            actual = actual[row][WHERE[row]] if actual.ndim == 2 else actual[row]
            np.testing.assert_allclose(actual, reference, rtol=2e-5, atol=2e-6)
    for derivative in found[1:]:
        np.testing.assert_array_equal(derivative[~WHERE], 0)


@pytest.mark.parametrize("name", OPS)
def test_garbage_changes_nothing(name, elsewhere):
    compiled = results(name)
    clean = compiled(X.astype(np.float32), WHERE)
    for garbage in (np.nan, np.inf, -np.inf, 1e38):
        dirty = compiled(np.where(WHERE, X, garbage).astype(np.float32), WHERE)
        jax.tree.map(np.testing.assert_array_equal, clean, dirty)


@pytest.mark.parametrize("name", OPS)
def test_vmap_agrees(name, elsewhere):
    x = np.stack([X, DIRECTION]).astype(np.float32)
    compiled = results(name)
    batched = jax.jit(jax.vmap(lambda x: compiled(x, WHERE)))(x)
    for i in range(len(x)):
        for one, many in zip(compiled(x[i], WHERE), batched, strict=True):
            np.testing.assert_allclose(one, many[i], rtol=1e-5, atol=1e-6)


def test_nothing_left_and_infinite_logits(elsewhere):
    x = np.array([[np.nan, np.nan], [-np.inf, -np.inf], [np.inf, 0.0], [1.0, -np.inf]], np.float32)
    where = np.array([[False, False], [True, True], [True, True], [True, True]])
    targets = np.array([[1.0, 0.0]] * 4, np.float32)
    loss, pull_back = jax.vjp(lambda x: soft(x, targets, where=where), x)
    np.testing.assert_array_equal(loss, [0, np.nan, np.nan, 0])
    np.testing.assert_array_equal(pull_back(jnp.ones(4))[0], [[0, 0], [np.nan] * 2, [np.nan] * 2, [0, 0]])
    np.testing.assert_array_equal(masksafe.softmax(x, where=where), [[0, 0], [np.nan] * 2, [np.nan] * 2, [1, 0]])


def test_logits_of_minus_infinity_beside_masked_ones(elsewhere):
    x, where = np.array([[-np.inf, -np.inf, 3.0]], np.float32), np.array([[True, True, False]])
    loss, pull_back = jax.vjp(lambda x: soft(x, np.array([[1.0, 0.0, 0.0]], np.float32), where=where), x)
    np.testing.assert_array_equal(loss, [np.nan])
    np.testing.assert_array_equal(pull_back(jnp.ones(1))[0], [[np.nan, np.nan, 0]])
    np.testing.assert_array_equal(masksafe.softmax(x, where=where), [[np.nan, np.nan, 0]])
    np.testing.assert_array_equal(masksafe.log_softmax(x, where=where), [[np.nan, np.nan, -np.inf]])
    np.testing.assert_array_equal(masksafe.logsumexp(x, -1, where=where), [-np.inf])


def test_digits_of_classes_that_have_nearly_all_of_the_probability(elsewhere):
    x = np.array([[20.0, 0.0, -3.0], [20.0, 20.0, 0.0]], np.float32)
    targets = np.array([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]], np.float32)
    loss, pull_back = jax.vjp(lambda x: soft(x, targets), x)
    z = x.astype(np.float64) - 20
    log_sum = np.log1p([np.exp(z[0, 1:]).sum(), 1 + np.exp(z[1, 2])])
    np.testing.assert_allclose(loss, log_sum, rtol=1e-6)
    expected = np.exp(z - log_sum[:, None]) - targets
    expected[0, 0] = np.expm1(-log_sum[0])
    gradient = np.asarray(pull_back(jnp.ones(2))[0])
    np.testing.assert_allclose(gradient[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(gradient[1], expected[1], rtol=1e-6, atol=1e-7)
