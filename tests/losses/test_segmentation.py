"""Dice losses of probabilities, and of pixels and classes that are masked."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import masksafe
from masksafe.losses import binary_dice_loss, dice_loss, multiclass_generalized_dice_loss

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(2, 6, 3)).astype(np.float32)
TARGETS = np.eye(3, dtype=np.float32)[RNG.integers(3, size=(2, 6))]
PIXELS = np.array([True, True, False, True, False, True])


@pytest.mark.parametrize("loss", [dice_loss, multiclass_generalized_dice_loss])
def test_masking_pixels_is_taking_them_out(loss):
    mask = np.broadcast_to(PIXELS[:, None], (2, 6, 1))
    both = jax.jit(lambda x, t, *removed: (loss(x, t, where=mask), loss(*removed)))
    actual, expected = both(LOGITS, TARGETS, LOGITS[:, PIXELS], TARGETS[:, PIXELS])
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


@pytest.mark.parametrize("loss", [dice_loss, multiclass_generalized_dice_loss])
def test_masking_a_class_is_taking_it_out(loss):
    targets = TARGETS.copy()
    targets[..., 1] = 0  # so that the others are all that is left
    mask = np.broadcast_to(np.array([True, False, True]), LOGITS.shape)
    both = jax.jit(lambda x, t, *removed: (loss(x, t, where=mask), loss(*removed)))
    actual, expected = both(LOGITS, targets, LOGITS[..., ::2], targets[..., ::2])
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


PROBABILITIES = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)


def test_probabilities():
    p = PROBABILITIES
    both = jax.jit(lambda p, x, t: (dice_loss(p, t, apply_softmax=False), dice_loss(x, t)))
    np.testing.assert_allclose(*both(p, LOGITS, TARGETS), rtol=1e-5)


BAD = PROBABILITIES.copy()
BAD[1, 2] = [0.5, 0.1, 0.1]
BAD[1, 4] = [1.5, -0.5, 0.0]
OUTSIDE = "2 of 36 predictions are outside [0, 1]; first at (1, 4, 0): 1.5"
SUMS = "1 of 12 rows of predictions do not sum to 1; first at (1, 2): 0.7"
BINARY = "2 of 12 predictions are outside [0, 1]; first at (1, 2): -0.5"


def of_probabilities(loss):
    """The loss of probabilities, and the name of the argument that says so."""
    argument = "apply_sigmoid" if loss is binary_dice_loss else "apply_softmax"
    return lambda p, t, **kwargs: loss(p, t, **{argument: False}, **kwargs)


BINARY_BAD = BAD[..., 0] - np.where(np.arange(6) == 2, 1, 0).astype(np.float32) * np.array([[0], [1]], np.float32)
WRONG = [
    (dice_loss, BAD, TARGETS, OUTSIDE),
    (dice_loss, np.where(BAD < 0, 0, np.minimum(BAD, 1)), TARGETS, SUMS),
    (multiclass_generalized_dice_loss, BAD, TARGETS, OUTSIDE),
    (binary_dice_loss, BINARY_BAD, TARGETS[..., 0], BINARY),
    (dice_loss, BINARY_BAD[..., None], TARGETS[..., :1], BINARY),
]


@pytest.mark.parametrize(("loss", "p", "targets", "text"), WRONG)
def test_wrong_probabilities_are_reported_in_every_mode(loss, p, targets, text):
    fn = of_probabilities(loss)
    text = f"^{re.escape(f'{loss.__name__}: {text}')}"
    with masksafe.label_checks("raise"):
        with pytest.raises(ValueError, match=text):
            fn(p, targets)
        with pytest.raises(jax.errors.JaxRuntimeError, match=text.removeprefix("^")):
            jax.block_until_ready(jax.jit(fn)(p, targets))
    with masksafe.label_checks("checkify"):
        error, value = jax.jit(checkify.checkify(fn))(p, targets)
        assert re.search(text, error.get())
        assert np.isnan(value).tolist() == (True if value.ndim == 0 else [False, True])


WITH_A_FORMULA = [wrong[:3] for wrong in WRONG if wrong[0] is not multiclass_generalized_dice_loss]


@pytest.mark.parametrize(("loss", "p", "targets"), WITH_A_FORMULA)
def test_wrong_probabilities_are_taken_as_they_are_while_checks_are_off(loss, p, targets):
    actual = jax.jit(of_probabilities(loss))(p, targets)
    by_formula = 1 - ((p * targets).sum(1) + 1) / ((p + targets).sum(1) / 2 + 1)
    np.testing.assert_allclose(actual, by_formula if by_formula.ndim == 1 else by_formula.mean(-1), rtol=1e-5)


@pytest.mark.parametrize(("loss", "p", "targets", "text"), WRONG)
def test_masked_probabilities_are_not_looked_at(loss, p, targets, text):
    mask = np.ones((2, 6, 1), bool)
    mask[1, [2, 4]] = False
    mask = mask[..., 0] if loss is binary_dice_loss else mask
    p = np.where(mask, p, np.nan)
    with masksafe.label_checks("raise"):
        assert np.isfinite(of_probabilities(loss)(p, targets, where=mask)).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_probabilities_of_narrow_floats(dtype):
    p = PROBABILITIES.astype(dtype)
    with masksafe.label_checks("raise"):
        assert np.isfinite(np.float32(dice_loss(p, TARGETS, apply_softmax=False))).all()


def test_binary_probabilities():
    logits, targets = LOGITS[..., 0], TARGETS[..., 0]
    p = np.asarray(jax.nn.sigmoid(logits))
    np.testing.assert_allclose(
        binary_dice_loss(p, targets, apply_sigmoid=False), binary_dice_loss(logits, targets), rtol=1e-5
    )


def test_a_binary_loss_names_itself_and_its_arguments():
    with pytest.raises(ValueError, match=r"^binary_dice_loss: targets: got shape \(2, 5, 1\)"):
        binary_dice_loss(LOGITS[..., :1], TARGETS[:, :5, 0])
    with pytest.raises(TypeError, match=r"^binary_dice_loss: predictions: got dtype int32"):
        binary_dice_loss(jnp.ones((2, 6), int), TARGETS[..., 0])
    with pytest.raises(ValueError, match=r"^binary_dice_loss: where: got shape \(3,\)"):
        binary_dice_loss(LOGITS[..., :1], TARGETS[..., :1], where=np.ones(3, bool))


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
        ({"targets": TARGETS[:, :3]}, "targets: got shape"),
        ({"reduction": "median"}, "reduction: got value 'median'"),
        ({"class_weights": jnp.ones(2)}, "class_weights: got shape"),
        ({"axis": -1}, "axis: got value"),
        ({"where": np.ones((2, 6), bool)}, "where: got shape"),
    ],
)
def test_bad_arguments_are_refused(change, text):
    with pytest.raises(ValueError, match=f"dice_loss: {text}"):
        dice_loss(**{"predictions": LOGITS, "targets": TARGETS} | change)


@pytest.mark.parametrize("loss", [dice_loss, multiclass_generalized_dice_loss, binary_dice_loss])
def test_without_a_mask_there_is_no_constant_one(loss):
    # XLA would reduce a constant of the input's size when it compiles, which takes it many seconds.
    x = np.ones((2, 3, 4), np.float32)
    assert not re.search(r"bool\[[\d,]*3[\d,]*\] = broadcast_in_dim", str(jax.make_jaxpr(loss)(x, x)))
