"""Dice losses of probabilities, and of classes and samples that are masked."""

import functools
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
PROBABILITIES = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)
forms = functools.partial(pytest.param, marks=pytest.mark.forms)


def test_masking_classes_or_samples_is_taking_them_out():
    targets, samples = TARGETS.copy(), np.array([True, False])
    targets[..., 1] = 0  # so that the others are all that is left
    classes = np.broadcast_to(np.array([True, False, True]), LOGITS.shape)
    of_samples = np.array([[True, True, True], [True, False, True]])

    @jax.jit
    def all_of(x, t, removed, removed_targets):
        of_each = [
            (loss(x, t, where=classes), loss(removed, removed_targets))
            for loss in (dice_loss, multiclass_generalized_dice_loss)
        ]
        of_classes = dice_loss(x, TARGETS, where=of_samples, reduction="none")
        return of_each, dice_loss(x, TARGETS, where=samples), dice_loss(x, TARGETS), of_classes

    of_each, masked, whole, of_classes = all_of(LOGITS, targets, LOGITS[..., ::2], targets[..., ::2])
    for actual, expected in of_each:
        np.testing.assert_allclose(actual, expected, rtol=1e-6)
    np.testing.assert_array_equal(masked, np.where(samples, whole, 0))
    assert of_classes[1, 1] == 0
    assert (of_classes > 0).sum() == 5


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


BAD = PROBABILITIES.copy()
BAD[1, 2] = [0.5, 0.1, 0.1]
BAD[1, 4] = [1.5, -0.5, 0.0]
OUTSIDE = "2 of 36 predictions are outside [0, 1]; first at (1, 4, 0): 1.5"
SUMS = "1 of 12 rows of predictions do not sum to 1; first at (1, 2): 0.7"
BINARY = "2 of 12 predictions are outside [0, 1]; first at (1, 2): -0.5"
BINARY_BAD = BAD[..., 0] - np.where(np.arange(6) == 2, 1, 0).astype(np.float32) * np.array([[0], [1]], np.float32)
WRONG = [
    (dice_loss, np.where(BAD < 0, 0, np.minimum(BAD, 1)), TARGETS, SUMS),
    (binary_dice_loss, BINARY_BAD, TARGETS[..., 0], BINARY),
    forms(dice_loss, BAD, TARGETS, OUTSIDE),
    forms(multiclass_generalized_dice_loss, BAD, TARGETS, OUTSIDE),
    forms(dice_loss, BINARY_BAD[..., None], TARGETS[..., :1], BINARY),
]


def of_probabilities(loss):
    """The loss of probabilities, and the name of the argument that says so."""
    argument = "apply_sigmoid" if loss is binary_dice_loss else "apply_softmax"
    return lambda p, t, where=None: loss(p, t, **{argument: False}, where=where)


@pytest.mark.parametrize(("loss", "p", "targets", "text"), WRONG)
def test_wrong_probabilities_are_reported_unless_they_are_masked(loss, p, targets, text):
    """While checks are off they are taken as they are."""
    fn = jax.jit(of_probabilities(loss))
    text = re.escape(f"{loss.__name__}: {text}")
    mask = np.ones((2, 6, 1), bool)
    mask[1, [2, 4]] = False
    mask = mask[..., 0] if loss is binary_dice_loss else mask
    with masksafe.label_checks("raise"):
        with pytest.raises(jax.errors.JaxRuntimeError, match=text):
            jax.block_until_ready(fn(p, targets, np.ones_like(mask)))
        assert np.isfinite(fn(np.where(mask, p, np.nan).astype("float32"), targets, mask)).all()
    if loss is not multiclass_generalized_dice_loss:
        actual = fn(p, targets, np.ones_like(mask))
        by_formula = 1 - ((p * targets).sum(1) + 1) / ((p + targets).sum(1) / 2 + 1)
        np.testing.assert_allclose(actual, by_formula if by_formula.ndim == 1 else by_formula.mean(-1), rtol=1e-5)


@pytest.mark.forms
@pytest.mark.parametrize(("loss", "p", "targets", "text"), WRONG)
def test_wrong_probabilities_are_reported_eagerly_and_by_checkify(loss, p, targets, text):
    fn, text = of_probabilities(loss), f"^{re.escape(f'{loss.__name__}: {text}')}"
    with masksafe.label_checks("raise"), pytest.raises(ValueError, match=text):
        fn(p, targets)
    with masksafe.label_checks("checkify"):
        error, value = jax.jit(checkify.checkify(fn))(p, targets)
    assert re.search(text, error.get())
    assert np.isnan(value).tolist() == (True if value.ndim == 0 else [False, True])


def test_a_binary_loss_names_itself_and_its_arguments():
    with pytest.raises(ValueError, match=r"^binary_dice_loss: targets: got shape \(2, 5, 1\)"):
        binary_dice_loss(LOGITS[..., :1], TARGETS[:, :5, 0])
    with pytest.raises(TypeError, match=r"^binary_dice_loss: predictions: got dtype int32"):
        binary_dice_loss(jnp.ones((2, 6), int), TARGETS[..., 0])


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
