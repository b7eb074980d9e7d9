"""Hinge, perceptron and sparsemax losses with bad labels and masked classes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import masksafe
from masksafe import losses
from masksafe.testing import assert_gradients


def of_both(loss, scores, labels, where=None):
    return loss(scores, labels, where=where), jax.grad(lambda x: loss(x, labels, where=where).sum())(scores)


value_and_gradient = jax.jit(of_both, static_argnums=0)
MULTICLASS = [losses.multiclass_hinge_loss, losses.multiclass_perceptron_loss, losses.multiclass_sparsemax_loss]
BINARY = [losses.hinge_loss, losses.perceptron_loss, losses.sparsemax_loss]
SCORES = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)


@pytest.mark.parametrize("loss", MULTICLASS)
def test_a_label_out_of_range_is_nan_in_its_row(loss):
    bad_labels = np.int32(-1), np.int32(5), np.int64(2**40), np.uint8(255)
    of_labels = [np.array([0, bad, 3, 4], bad.dtype) for bad in bad_labels]
    # Labels are no arguments here: JAX would cut those of 64 bits.
    for value, gradient in jax.jit(lambda x: [of_both(loss, x, labels) for labels in of_labels])(SCORES):
        np.testing.assert_array_equal(np.isnan(value), [False, True, False, False])
        np.testing.assert_array_equal(np.isnan(gradient).all(1), [False, True, False, False])
        np.testing.assert_array_equal(np.isnan(gradient).any(1), [False, True, False, False])
    with (
        masksafe.label_checks("raise"),
        pytest.raises(ValueError, match=rf"{loss.__name__}: 1 of 4 labels are outside"),
    ):
        loss(SCORES, of_labels[0])


@pytest.mark.parametrize("loss", MULTICLASS)
def test_a_nan_score_is_nan_in_its_row_eagerly_and_compiled(loss):
    scores, labels = SCORES[:2].copy(), np.array([1, 2])
    scores[0, 3] = np.nan
    for value, gradient in (of_both(loss, scores, labels), value_and_gradient(loss, scores, labels)):
        np.testing.assert_array_equal(np.isnan(value), [True, False])
        np.testing.assert_array_equal(np.isnan(gradient).all(1), [True, False])
        np.testing.assert_array_equal(np.isnan(gradient).any(1), [True, False])


@pytest.mark.parametrize("loss", MULTICLASS)
def test_a_label_at_a_masked_class_costs_infinity(loss):
    mask = np.ones((4, 5), bool)
    mask[1, 2] = False
    labels = np.array([0, 2, 3, 4])
    value, gradient = value_and_gradient(loss, SCORES, labels, mask)
    np.testing.assert_array_equal(value == jnp.inf, [False, True, False, False])
    assert gradient[1, 2] == 0
    assert np.isfinite(gradient).all()
    value, gradient = value_and_gradient(loss, np.where(mask, SCORES, -np.inf), labels)
    np.testing.assert_array_equal(value == jnp.inf, [False, True, False, False])
    assert np.isfinite(gradient).all()
    with masksafe.label_checks("raise"), pytest.raises(ValueError, match="1 of 4 labels are at a masked class"):
        loss(SCORES, labels, where=mask)


@pytest.mark.parametrize("loss", MULTICLASS)
def test_labels_of_masked_rows_do_not_matter(loss):
    labels = np.array([0, -100, 3, 99])
    mask = np.array([True, False, True, False])
    value, gradient = value_and_gradient(loss, SCORES, labels, mask)
    np.testing.assert_array_equal(value[~mask], 0)
    np.testing.assert_array_equal(gradient[~mask], 0)
    assert np.isfinite(gradient).all()


def test_sparsemax_with_forbidden_classes_and_ties():
    scores = jnp.array([[1.0, 1.0, -jnp.inf], [0.2, 0.2, 0.2], [9.0, 0.0, 0.0]])
    labels = jnp.array([0, 1, 0])
    value, gradient = value_and_gradient(losses.multiclass_sparsemax_loss, scores, labels)
    np.testing.assert_allclose(value, [0.25, 1 / 3, 0.0], atol=1e-6)
    expected = [[-0.5, 0.5, 0.0], [1 / 3, -2 / 3, 1 / 3], [0.0, 0.0, 0.0]]
    np.testing.assert_allclose(gradient, expected, atol=1e-6)


@pytest.mark.parametrize("row", [[2e7, 0.0, 0.0], [3e38, 1.5e38, -3e38], [-2e7] * 3, [3e6 + 0.25, 3e6, 3e6]])
def test_sparsemax_of_large_scores(row):
    scores = np.float32([row])
    value, gradient = value_and_gradient(losses.multiclass_sparsemax_loss, scores, jnp.array([1]))
    exact = np.float64(scores[0])
    exact -= exact.max()
    falling = np.sort(exact)[::-1]
    size = max(k for k in (1, 2, 3) if 1 + k * falling[k - 1] > falling[:k].sum())
    p = np.maximum(exact - (falling[:size].sum() - 1) / size, 0)
    np.testing.assert_allclose(value[0], p @ (exact - exact[1]) + (1 - p @ p) / 2, rtol=1e-5)
    np.testing.assert_allclose(gradient[0], p - [0, 1, 0], rtol=1e-5, atol=1e-6)


def test_a_nan_label_of_the_binary_sparsemax_shows():
    value = losses.sparsemax_loss(jnp.array([1.0, 2.0]), jnp.array([jnp.nan, 1.0]))
    np.testing.assert_array_equal(np.isnan(value), [True, False])


@pytest.mark.slow
def test_sparsemax_has_right_second_derivatives():
    labels = jnp.array([0, 1, 2, 3])
    assert_gradients(lambda x: losses.multiclass_sparsemax_loss(x, labels[:2]), 0.5 * SCORES[:2, :3])


def test_hessian_of_the_sparsemax():
    hessian = jax.jit(jax.hessian(lambda x: losses.multiclass_sparsemax_loss(x, 0)))(np.float32([0.5, 0.2, -3.0]))
    np.testing.assert_allclose(hessian, [[0.5, -0.5, 0.0], [-0.5, 0.5, 0.0], [0.0, 0.0, 0.0]], atol=1e-6)


@pytest.mark.parametrize("loss", BINARY)
def test_label_checks_of_binary_targets(loss):
    good, bad = ([0, 1, 1], 2) if loss is losses.sparsemax_loss else ([-1, 1, 1], 0)
    scores, targets = jnp.zeros(4), jnp.array([*good, bad])
    with masksafe.label_checks("raise"):
        loss(scores, targets, where=np.array([True, True, True, False]))
        with pytest.raises(ValueError, match=rf"{loss.__name__}: 1 of 4 labels are neither .*; first at \(3,\): {bad}"):
            loss(scores, targets)


@pytest.mark.parametrize(
    ("scores", "labels", "error", "text"),
    [
        (np.zeros((2, 0), np.float32), np.zeros(2, int), ValueError, "scores: got shape"),
        (np.zeros((2, 3), np.float32), np.zeros(2), TypeError, "labels: got dtype float"),
        (np.zeros((2, 3), np.float32), np.zeros(3, int), ValueError, "scores and labels"),
        (np.zeros((2, 3), int), np.zeros(2, int), TypeError, "scores: got dtype"),
    ],
)
@pytest.mark.parametrize("loss", MULTICLASS)
def test_bad_arguments_are_refused(loss, scores, labels, error, text):
    with pytest.raises(error, match=f"{loss.__name__}: {text}"):
        loss(scores, labels)
