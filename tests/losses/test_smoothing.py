"""Smoothed labels stay distributions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import masksafe
from masksafe.losses import smooth_labels, softmax_cross_entropy

MASK = np.array([[True, True, False, True], [False, True, True, False], [False] * 4])
LABELS = np.eye(4, dtype=np.float32)[[0, 2, 1]]


def test_masked_classes_cost_nothing_in_the_loss():
    logits = jnp.where(MASK, 0.0, -jnp.inf)
    losses = jax.jit(lambda x, t: softmax_cross_entropy(x, smooth_labels(t, 0.2, where=MASK), where=MASK))(
        logits, LABELS
    )
    np.testing.assert_allclose(losses, [np.log(3), np.log(2), 0], rtol=1e-6)


@pytest.mark.parametrize("alpha", [-0.1, 1.5, 2, float("nan"), np.float64(1.1)])
def test_a_number_outside_of_0_to_1_is_refused(alpha):
    with pytest.raises(ValueError, match=r"^smooth_labels: alpha: got value .*; expected a number in \[0, 1\]"):
        smooth_labels(LABELS, alpha)


def test_an_array_outside_of_0_to_1_is_reported_while_label_checks_are_on():
    alpha = np.array([[0.5], [-0.1], [np.nan]])  # all is masked in the last row
    smooth_labels(LABELS, alpha, where=MASK)
    with masksafe.label_checks("raise"):
        smooth_labels(LABELS, abs(alpha), where=MASK)
        with pytest.raises(
            ValueError, match=r"smooth_labels: 2 of 5 alpha are not in \[0, 1\]; first at \(1, 1\): -0.1"
        ):
            smooth_labels(LABELS, alpha, where=MASK)


@pytest.mark.forms
def test_numbers_are_taken_without_jit_too():
    labels = jnp.eye(3)
    expected = smooth_labels(labels, 0.1)
    with jax.disable_jit():
        np.testing.assert_allclose(smooth_labels(labels, 0.1), expected)
