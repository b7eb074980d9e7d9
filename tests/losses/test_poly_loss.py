"""PolyLoss: one reading of the mask in both of its sums."""

import jax
import numpy as np

from masksafe.losses import poly_loss_cross_entropy, softmax_cross_entropy

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(4, 4)).astype(np.float32)
LABELS = np.float32(RNG.dirichlet(np.ones(4), size=4))


def test_both_sums_know_of_masked_classes():
    mask = np.broadcast_to([True, True, False, True], (4, 4))
    both = jax.jit(lambda *args: [f(*args, where=mask) for f in (poly_loss_cross_entropy, softmax_cross_entropy)])
    actual, expected = both(LOGITS, LABELS)
    p = np.where(mask, np.exp(LOGITS), 0)
    missed = LABELS * (1 - p / p.sum(-1, keepdims=True))
    np.testing.assert_allclose(actual, expected + 2 * np.where(mask, missed, 0).sum(-1), rtol=1e-5)
