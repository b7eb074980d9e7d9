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
