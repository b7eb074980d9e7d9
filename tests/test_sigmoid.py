"""Losses of binary predictions where logits are infinite or labels are bad."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import masksafe
from masksafe.losses import sigmoid_binary_cross_entropy, sigmoid_focal_loss

LOGITS = jnp.array([-jnp.inf, jnp.inf, -jnp.inf, jnp.inf, 0.0])
LABELS = jnp.array([0.0, 1.0, 1.0, 0.0, 1.0])


def test_an_infinite_logit_is_certain():
    expected = np.array([0.0, 0.0, np.inf, np.inf, np.log(2.0)], np.float32)
    np.testing.assert_allclose(sigmoid_binary_cross_entropy(LOGITS, LABELS), expected, rtol=1e-6)
    gradient = jax.grad(lambda x: sigmoid_binary_cross_entropy(x, LABELS).sum())(LOGITS)
    np.testing.assert_allclose(gradient, [0.0, 0.0, -1.0, 1.0, -0.5])


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_a_certain_and_right_prediction_has_no_focal_loss(gamma):
    value, gradient = jax.value_and_grad(lambda x: sigmoid_focal_loss(x, LABELS[:2], gamma=gamma).sum())(LOGITS[:2])
    assert value == 0
    np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize("labels", [0.0, 1.0, 0.3, 0.8])
def test_digits_are_kept(labels):
    logits = np.array([-80.0, -30.0, -5.0, -0.1, 0.0, 0.1, 5.0, 30.0, 80.0])
    log_p, log_q = -np.logaddexp(0, -logits), -np.logaddexp(0, logits)
    expected = -labels * log_p - (1 - labels) * log_q
    np.testing.assert_allclose(sigmoid_binary_cross_entropy(np.float32(logits), labels), expected, rtol=2e-6)
    missed = (1 - labels) * np.exp(log_p) + labels * np.exp(log_q)
    actual = sigmoid_focal_loss(np.float32(logits), labels, gamma=0.5)
    np.testing.assert_allclose(actual, expected * missed**0.5, rtol=1e-5, atol=1e-37)


@pytest.mark.parametrize("loss", [sigmoid_binary_cross_entropy, sigmoid_focal_loss])
def test_gradient_of_soft_labels(loss):
    logits, labels = jnp.array([0.5, -2.0, 3.0]), jnp.array([0.0, 1.0, 0.3])
    step = 1e-3
    numeric = (loss(logits, labels + step) - loss(logits, labels - step)) / (2 * step)
    if loss is sigmoid_binary_cross_entropy:  # at the ends of [0, 1] too
        np.testing.assert_allclose(jax.grad(lambda t: loss(logits, t).sum())(labels), numeric, rtol=1e-2)
    else:
        np.testing.assert_allclose(jax.grad(lambda t: loss(logits, t).sum())(labels)[2], numeric[2], rtol=1e-2)


@pytest.mark.parametrize("loss", [sigmoid_binary_cross_entropy, sigmoid_focal_loss])
def test_label_checks(loss):
    logits, labels = jnp.zeros((2, 2)), jnp.array([[0, 1], [-100, 1]])
    with masksafe.label_checks("raise"):
        loss(logits, labels, where=labels != -100)
        with pytest.raises(
            ValueError, match=rf"{loss.__name__}: 1 of 4 labels are outside \[0, 1\]; first at \(1, 0\): -100"
        ):
            loss(logits, labels)
