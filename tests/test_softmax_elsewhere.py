"""The programs of the softmaxes and cross-entropies for accelerators, run on the CPU: what is infinite, and digits.

The rows of the table run in these programs too.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import masksafe
from masksafe.losses import softmax_cross_entropy as soft


@pytest.fixture(params=[4, pytest.param(2**14, marks=pytest.mark.forms)], ids=["long rows", "short rows"])
def elsewhere(request, choose):
    choose(form="elsewhere", elements_of_row_in_one_kernel=request.param)


@jax.jit
def loss_and_gradient(x, targets, where=None):
    loss, pull_back = jax.vjp(lambda x: soft(x, targets, where=where), x)
    return loss, pull_back(jnp.ones(len(x)))[0]


def test_nothing_left_and_infinite_logits(elsewhere):
    x = np.array([[np.nan, np.nan], [-np.inf, -np.inf], [np.inf, 0.0], [1.0, -np.inf]], np.float32)
    where = np.array([[False, False], [True, True], [True, True], [True, True]])
    targets = np.array([[1.0, 0.0]] * 4, np.float32)
    loss, gradient = loss_and_gradient(x, targets, where)
    np.testing.assert_array_equal(loss, [0, np.nan, np.nan, 0])
    np.testing.assert_array_equal(gradient, [[0, 0], [np.nan] * 2, [np.nan] * 2, [0, 0]])
    np.testing.assert_array_equal(masksafe.softmax(x, where=where), [[0, 0], [np.nan] * 2, [np.nan] * 2, [1, 0]])


def test_logits_of_minus_infinity_beside_masked_ones(elsewhere):
    x, where = np.array([[-np.inf, -np.inf, 3.0]], np.float32), np.array([[True, True, False]])
    loss, gradient = loss_and_gradient(x, np.array([[1.0, 0.0, 0.0]], np.float32), where)
    np.testing.assert_array_equal(loss, [np.nan])
    np.testing.assert_array_equal(gradient, [[np.nan, np.nan, 0]])
    np.testing.assert_array_equal(masksafe.softmax(x, where=where), [[np.nan, np.nan, 0]])
    np.testing.assert_array_equal(masksafe.log_softmax(x, where=where), [[np.nan, np.nan, -np.inf]])
    np.testing.assert_array_equal(masksafe.logsumexp(x, -1, where=where), [-np.inf])


def test_digits_of_classes_that_have_nearly_all_of_the_probability(elsewhere):
    x = np.array([[20.0, 0.0, -3.0], [20.0, 20.0, 0.0]], np.float32)
    targets = np.array([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]], np.float32)
    loss, gradient = map(np.asarray, loss_and_gradient(x, targets))
    z = x.astype(np.float64) - 20
    log_sum = np.log1p([np.exp(z[0, 1:]).sum(), 1 + np.exp(z[1, 2])])
    np.testing.assert_allclose(loss, log_sum, rtol=1e-6)
    expected = np.exp(z - log_sum[:, None]) - targets
    expected[0, 0] = np.expm1(-log_sum[0])
    np.testing.assert_allclose(gradient[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(gradient[1], expected[1], rtol=1e-6, atol=1e-7)
