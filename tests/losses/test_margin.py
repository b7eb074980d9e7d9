"""Hinge, perceptron, sparsemax and Fenchel-Young losses with bad labels, ties and scores of any size."""

import definitions
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import masksafe
from masksafe import losses

MULTICLASS = [losses.multiclass_hinge_loss, losses.multiclass_perceptron_loss, losses.multiclass_sparsemax_loss]
SCORES = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)
EVERY_CLASS = np.ones_like(SCORES, bool)
SECOND = np.array([False, True, False, False])


def of_all(scores, labels, where=None):
    """Of each loss the value and the gradient."""
    grad = lambda loss: jax.grad(lambda x: loss(x, labels, where=where).sum())(scores)  # noqa: E731
    return [(loss(scores, labels, where=where), grad(loss)) for loss in MULTICLASS]


values_and_gradients = jax.jit(of_all)


def test_a_label_of_any_dtype_out_of_range_is_nan_in_its_row():
    labels = [np.array([0, bad, 3, 4], bad.dtype) for bad in (np.int64(2**40), np.uint8(255))]
    # Labels are no arguments here: JAX would cut those of 64 bits.
    for each in jax.jit(lambda x: [of_all(x, y) for y in labels])(SCORES):
        for value, gradient in each:
            np.testing.assert_array_equal(np.isnan(value), SECOND)
            np.testing.assert_array_equal(np.isnan(gradient), np.broadcast_to(SECOND[:, None], (4, 5)))


def test_a_label_at_a_masked_or_forbidden_class_costs_infinity():
    labels, mask = np.array([0, 2, 3, 4]), EVERY_CLASS.copy()
    mask[1, 2] = False
    for given in ((SCORES, labels, mask), (np.where(mask, SCORES, -np.inf), labels, EVERY_CLASS)):
        for value, gradient in values_and_gradients(*given):
            np.testing.assert_array_equal(value == jnp.inf, SECOND)
            assert gradient[1, 2] == 0 or given[2] is EVERY_CLASS
            assert np.isfinite(gradient).all()


def test_sparsemax_with_forbidden_classes_and_ties():
    scores = jnp.array([[1.0, 1.0, -jnp.inf], [0.2, 0.2, 0.2], [9.0, 0.0, 0.0]])
    value, gradient = values_and_gradients(scores, jnp.array([0, 1, 0]))[2]
    np.testing.assert_allclose(value, [0.25, 1 / 3, 0.0], atol=1e-6)
    expected = [[-0.5, 0.5, 0.0], [1 / 3, -2 / 3, 1 / 3], [0.0, 0.0, 0.0]]
    np.testing.assert_allclose(gradient, expected, atol=1e-6)


def test_sparsemax_of_large_scores():
    rows = {(2e7, 0, 0): (1, 0, 0), (3e38, 1.5e38, -3e38): (1, 0, 0), (-2e7,) * 3: (1 / 3,) * 3}
    for row, p in (rows | {(3e6 + 0.25, 3e6, 3e6): (0.5, 0.25, 0.25)}).items():
        scores = np.float32([row] * 3)
        value, gradient = values_and_gradients(scores, jnp.array([1, 1, 1]))[2]
        exact = np.float64(row) - max(row)
        np.testing.assert_allclose(value[0], definitions.sparsemax_of_label(exact, 1), rtol=1e-5)
        np.testing.assert_allclose(gradient[0], p - np.array([0, 1, 0]), rtol=1e-5, atol=1e-6)


def test_a_nan_label_of_the_binary_sparsemax_shows():
    value = losses.sparsemax_loss(jnp.array([1.0, 2.0]), jnp.array([jnp.nan, 1.0]))
    np.testing.assert_array_equal(np.isnan(value), [True, False])


# Fenchel-Young losses: the function that they are given.

SOME = np.random.default_rng(1).normal(size=(2, 3, 4)).astype(np.float32)
TARGETS = np.float32(np.random.default_rng(2).dirichlet(np.ones(4), (2, 3)))
ROWS = np.array([[True, False, True], [False, True, True]])
fenchel_young = losses.make_fenchel_young_loss(masksafe.logsumexp)


def test_other_arguments_reach_the_maximum_and_masked_rows_need_nothing_of_it():
    ours = losses.make_fenchel_young_loss(lambda s, scale, *, shift: jnp.max(s) * scale + shift)
    expected = 2 * SOME.max(-1) + 5 - (SOME * TARGETS).sum(-1)
    both = jax.jit(lambda s: [ours(s, TARGETS, 2.0, shift=5.0, **w) for w in ({}, {"where": ROWS})])
    whole, masked = both(SOME)
    np.testing.assert_allclose(whole, expected, rtol=1e-6)
    np.testing.assert_allclose(masked, np.where(ROWS, expected, 0), rtol=1e-6)


def test_integers_are_computed_as_floats():
    ours = losses.make_fenchel_young_loss(jax.scipy.special.logsumexp)
    both = jax.jit(lambda s, t: (fenchel_young(s.astype(float), t), ours(s, t)))
    np.testing.assert_allclose(both(jnp.array([1, 2, 3]), jnp.array([0, 1, 0])), 1.4076059, rtol=1e-6)


def test_other_shapes_are_refused():
    with pytest.raises(ValueError, match="fenchel_young_loss: targets: got shape"):
        fenchel_young(SOME[..., :1], TARGETS)
    with pytest.raises(ValueError, match="fenchel_young_loss: where: got shape"):
        fenchel_young(SOME, TARGETS, where=np.ones(4, bool))
