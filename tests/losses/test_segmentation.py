"""Dice losses of probabilities, and of classes and samples that are masked."""

import re

import jax
import numpy as np
from tiers import parametrize

import masksafe
from masksafe.losses import binary_dice_loss, dice_loss, multiclass_generalized_dice_loss

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(2, 6, 3)).astype(np.float32)
TARGETS = np.eye(3, dtype=np.float32)[RNG.integers(3, size=(2, 6))]
PROBABILITIES = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)


def test_masking_classes_or_samples_is_taking_them_out():
    targets, samples = TARGETS.copy(), np.array([True, False])
    targets[..., 1] = 0  # so that the others are all that is left
    classes = np.broadcast_to(np.array([True, False, True]), LOGITS.shape)
    of_samples = np.array([[True, True, True], [True, False, True]])

    @jax.jit
    def all_of(x, t, removed, removed_targets):
        both = dice_loss, multiclass_generalized_dice_loss
        of_each = [(loss(x, t, where=classes), loss(removed, removed_targets)) for loss in both]
        of_classes = dice_loss(x, TARGETS, where=of_samples, reduction="none")
        return of_each, dice_loss(x, TARGETS, where=samples), dice_loss(x, TARGETS), of_classes

    of_each, masked, whole, of_classes = all_of(LOGITS, targets, LOGITS[..., ::2], targets[..., ::2])
    for actual, expected in of_each:
        np.testing.assert_allclose(actual, expected, rtol=1e-6)
    np.testing.assert_array_equal(masked, np.where(samples, whole, 0))
    assert of_classes[1, 1] == 0
    assert (of_classes > 0).sum() == 5


def test_nothing_left_is_0_without_smoothing():
    rows = np.zeros((2, 6, 1), bool)
    loss = lambda x, smooth: dice_loss(x, TARGETS, smooth=smooth, where=rows).sum()  # noqa: E731
    results = jax.jit(jax.value_and_grad(loss, (0, 1)))(LOGITS, 0.0)
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0), results)


def test_probabilities():
    @jax.jit
    def all_of(p, x, t):
        narrow = [dice_loss(p.astype(d), t, apply_softmax=False) for d in ("float16", "bfloat16")]
        binary = binary_dice_loss(jax.nn.sigmoid(x[..., 0]), t[..., 0], apply_sigmoid=False)
        given, of_logits = dice_loss(p, t, apply_softmax=False), dice_loss(x, t)
        return narrow, (binary, binary_dice_loss(x[..., 0], t[..., 0])), (given, of_logits)

    narrow, *pairs = all_of(PROBABILITIES, LOGITS, TARGETS)
    for actual, expected in pairs:
        np.testing.assert_allclose(actual, expected, rtol=1e-5)
    with masksafe.label_checks("raise"):  # which know of roundings
        jax.block_until_ready(all_of(PROBABILITIES, LOGITS, TARGETS))
    assert np.isfinite(np.float32(narrow)).all()


def test_probabilities_that_are_none_are_taken_as_they_are():
    p = np.where(np.arange(6)[:, None] == 2, np.float32([0.5, 0.1, -0.1]), PROBABILITIES)
    by_formula = 1 - ((p * TARGETS).sum(1) + 1) / ((p + TARGETS).sum(1) / 2 + 1)
    np.testing.assert_allclose(dice_loss(p, TARGETS, apply_softmax=False), by_formula.mean(-1), rtol=1e-5)
    binary = binary_dice_loss(p[..., 2], TARGETS[..., 2], apply_sigmoid=False)
    np.testing.assert_allclose(binary, by_formula[:, 2], rtol=1e-5)


@parametrize("loss", [dice_loss], exhaustive=[multiclass_generalized_dice_loss, binary_dice_loss])
def test_without_a_mask_there_is_no_constant_one(loss):
    # XLA would reduce a constant of the input's size when it compiles, which takes it many seconds.
    x = np.ones((2, 3, 4), np.float32)
    assert not re.search(r"bool\[[\d,]*3[\d,]*\] = broadcast_in_dim", str(jax.make_jaxpr(loss)(x, x)))
