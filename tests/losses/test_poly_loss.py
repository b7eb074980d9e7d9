"""PolyLoss: one reading of the mask in both of its sums."""

import jax
import jax.numpy as jnp
import numpy as np

from masksafe.losses import poly_loss_cross_entropy, softmax_cross_entropy

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(4, 4)).astype(np.float32)
LABELS = np.asarray(jax.nn.softmax(RNG.normal(size=(4, 4)).astype(np.float32)))
ROWS = np.array([True, False, True, True])


def test_a_mask_of_rows_masks_rows_where_there_are_as_many_classes():
    actual = poly_loss_cross_entropy(LOGITS, LABELS, where=ROWS)
    np.testing.assert_allclose(actual, np.where(ROWS, poly_loss_cross_entropy(LOGITS, LABELS), 0), rtol=1e-6)


def test_both_sums_know_of_masked_classes():
    mask = np.broadcast_to([True, True, False, True], (4, 4))
    p = jax.nn.softmax(jnp.where(mask, LOGITS, -jnp.inf))
    expected = softmax_cross_entropy(LOGITS, LABELS, where=mask) + 2 * jnp.sum(jnp.where(mask, LABELS * (1 - p), 0), 1)
    np.testing.assert_allclose(poly_loss_cross_entropy(LOGITS, LABELS, where=mask), expected, rtol=1e-6)
