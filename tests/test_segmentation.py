"""Dice losses of probabilities, and of pixels and classes that are masked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from masksafe.losses import binary_dice_loss, dice_loss, multiclass_generalized_dice_loss

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(2, 6, 3)).astype(np.float32)
TARGETS = np.eye(3, dtype=np.float32)[RNG.integers(3, size=(2, 6))]
PIXELS = np.array([True, True, False, True, False, True])


@pytest.mark.parametrize("loss", [dice_loss, multiclass_generalized_dice_loss])
def test_masking_pixels_is_taking_them_out(loss):
    mask = np.broadcast_to(PIXELS[:, None], (2, 6, 1))
    expected = loss(LOGITS[:, PIXELS], TARGETS[:, PIXELS])
    np.testing.assert_allclose(loss(LOGITS, TARGETS, where=mask), expected, rtol=1e-6)


@pytest.mark.parametrize("loss", [dice_loss, multiclass_generalized_dice_loss])
def test_masking_a_class_is_taking_it_out(loss):
    targets = TARGETS.copy()
    targets[..., 1] = 0  # so that the others are all that is left
    mask = np.broadcast_to(np.array([True, False, True]), LOGITS.shape)
    expected = loss(LOGITS[..., ::2], targets[..., ::2])
    np.testing.assert_allclose(loss(LOGITS, targets, where=mask), expected, rtol=1e-6)


def test_probabilities():
    p = np.asarray(jax.nn.softmax(LOGITS))
    np.testing.assert_allclose(dice_loss(p, TARGETS, apply_softmax=False), dice_loss(LOGITS, TARGETS), rtol=1e-5)
    under_jit = jax.jit(lambda p: dice_loss(p, TARGETS, apply_softmax=False))(p)
    np.testing.assert_allclose(under_jit, dice_loss(LOGITS, TARGETS), rtol=1e-5)
    with pytest.raises(
        ValueError, match="dice_loss: predictions has other values; expected probabilities that sum to 1"
    ):
        dice_loss(LOGITS, TARGETS, apply_softmax=False)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_probabilities_of_narrow_floats(dtype):
    p = jax.nn.softmax(LOGITS).astype(dtype)
    assert np.isfinite(np.float32(dice_loss(p, TARGETS, apply_softmax=False))).all()


def test_binary_probabilities():
    logits, targets = LOGITS[..., 0], TARGETS[..., 0]
    p = np.asarray(jax.nn.sigmoid(logits))
    np.testing.assert_allclose(
        binary_dice_loss(p, targets, apply_sigmoid=False), binary_dice_loss(logits, targets), rtol=1e-5
    )
    with pytest.raises(ValueError, match=r"expected probabilities in \[0, 1\]"):
        binary_dice_loss(2 * p, targets, apply_sigmoid=False)


def test_masked_samples_and_classes_of_the_loss():
    samples = np.array([True, False])
    losses = dice_loss(LOGITS, TARGETS, where=samples)
    np.testing.assert_array_equal(losses, np.where(samples, dice_loss(LOGITS, TARGETS), 0))
    of_classes = dice_loss(LOGITS, TARGETS, where=np.array([[True, True, True], [True, False, True]]), reduction="none")
    assert of_classes[1, 1] == 0
    assert (of_classes > 0).sum() == 5


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"targets": TARGETS[:, :3]}, "targets has shape"),
        ({"reduction": "median"}, "reduction has value 'median'"),
        ({"class_weights": jnp.ones(2)}, "class_weights has shape"),
        ({"axis": -1}, "axis has value"),
        ({"where": np.ones((2, 6), bool)}, "where has shape"),
    ],
)
def test_bad_arguments_are_refused(change, text):
    with pytest.raises(ValueError, match=f"dice_loss: {text}"):
        dice_loss(**{"predictions": LOGITS, "targets": TARGETS} | change)
