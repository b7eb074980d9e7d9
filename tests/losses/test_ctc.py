"""CTC against the sum over all alignments, and what padding must not do to it."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import masksafe
from masksafe.losses import ctc_loss

RNG = np.random.default_rng(0)
TIME, CLASSES = 5, 3
LOGITS = RNG.normal(size=(4, TIME, CLASSES)).astype(np.float32)
LABELS = np.array([[1, 2], [1, 1], [2, 0], [1, 2]])
FRAMES, COUNTS = np.array([5, 4, 3, 5]), np.array([2, 2, 1, 0])
FRAME_PADDING = (np.arange(TIME) >= FRAMES[:, None]).astype(np.float32)
LABEL_PADDING = (np.arange(2) >= COUNTS[:, None]).astype(np.float32)


def by_enumeration(logits, labels, blank=0):
    """The sum over all alignments, in float64."""
    log_p = np.float64(logits) - np.log(np.exp(np.float64(logits)).sum(-1, keepdims=True))
    total = 0.0
    for path in itertools.product(range(logits.shape[-1]), repeat=len(logits)):
        merged = [c for c, _ in itertools.groupby(path) if c != blank]
        if merged == list(labels):
            total += np.exp(sum(log_p[t, c] for t, c in enumerate(path)))
    return -np.log(total)


def loss(logits, labels=LABELS, frame_padding=FRAME_PADDING, label_padding=LABEL_PADDING, **kwargs):
    return ctc_loss(logits, frame_padding, labels, label_padding, **kwargs)


@jax.jit
def value_and_gradient(logits, labels=LABELS, where=None):
    return loss(logits, labels, where=where), jax.grad(lambda x: loss(x, labels, where=where).sum())(logits)


@pytest.mark.parametrize("log_epsilon", [-1e5, -np.inf])
def test_equals_the_sum_over_all_alignments(log_epsilon):
    expected = [by_enumeration(LOGITS[i, : FRAMES[i]], LABELS[i, : COUNTS[i]]) for i in range(4)]
    actual = jax.jit(lambda x: loss(x, log_epsilon=log_epsilon))(LOGITS)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 1e38])
def test_padded_frames_and_labels_are_gone(garbage):
    dirty = np.where(FRAME_PADDING[..., None] > 0, np.float32(garbage), LOGITS)
    for other in (-100, 1, 2, CLASSES):
        labels = np.where(LABEL_PADDING > 0, other, LABELS)
        actual, expected = value_and_gradient(dirty, labels), value_and_gradient(LOGITS, LABELS)
        chex.assert_trees_all_equal(actual, expected)
        np.testing.assert_array_equal(actual[1][FRAME_PADDING > 0], 0)


def test_forward_probabilities_of_padded_labels_do_not_depend_on_the_padding():
    ctc = jax.jit(masksafe.losses.ctc_loss_with_forward_probs)
    expected = ctc(LOGITS, FRAME_PADDING, np.where(LABEL_PADDING > 0, 0, LABELS), LABEL_PADDING)
    for other in (-100, 1, CLASSES):
        actual = ctc(LOGITS, FRAME_PADDING, np.where(LABEL_PADDING > 0, other, LABELS), LABEL_PADDING)
        for a, e in zip(actual, expected, strict=True):
            np.testing.assert_array_equal(a, e)


def test_a_sequence_of_nothing_but_padding_has_loss_zero():
    labels = np.array([[1, -100]])
    step = jax.jit(jax.value_and_grad(lambda x, padding: ctc_loss(x, np.ones((1, TIME)), labels, padding)[0]))
    for label_padding in (0.0, 1.0):
        out = step(np.full((1, TIME, CLASSES), np.nan, np.float32), np.full((1, 2), label_padding))
        jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0), out)
    assert ctc_loss(np.zeros((1, 0, CLASSES)), np.zeros((1, 0)), labels, np.ones((1, 2)))[0] == 0


@pytest.mark.parametrize("log_epsilon", [pytest.param(-1e5, marks=pytest.mark.slow), -np.inf])
def test_more_labels_than_frames(log_epsilon):
    padding, labels = (np.zeros((1, 2)), np.zeros((1, 4))), np.array([[1, 1, 2, 1]])

    @jax.jit
    def all_of(x):
        of = lambda x: ctc_loss(x, padding[0], labels, padding[1], log_epsilon=log_epsilon)[0]  # noqa: E731
        return of(x), *jax.jvp(jax.grad(of), (x,), (jnp.cos(x),))

    value, gradient, product = all_of(LOGITS[:1, :2])
    assert value >= 1e5
    assert np.isposinf(value) == np.isinf(log_epsilon)
    assert np.isfinite(gradient).all()
    assert np.isfinite(product).all()


@pytest.mark.parametrize("label", [-1, CLASSES])
def test_a_label_out_of_range_is_nan_in_its_sequence(label):
    labels = LABELS.copy()
    labels[1, 0] = label
    value, gradient = value_and_gradient(LOGITS, labels)
    np.testing.assert_array_equal(np.isnan(value), [False, True, False, False])
    np.testing.assert_array_equal(np.isnan(gradient).any((1, 2)), [False, True, False, False])
    with masksafe.label_checks("raise"):
        with pytest.raises(ValueError, match=r"ctc_loss: 1 of 5 labels are outside \[0, 3\); first at \(1, 0\)"):
            loss(LOGITS, labels)
        loss(LOGITS, labels, where=np.array([True, False, True, True]))


def test_masked_classes_are_taken_out():
    wide = np.insert(LOGITS, 2, np.nan, -1)
    labels = np.where(LABELS == 2, 3, LABELS)
    mask = np.broadcast_to(np.arange(4) != 2, wide.shape)
    value, gradient = value_and_gradient(wide, labels, mask)
    np.testing.assert_allclose(value, value_and_gradient(LOGITS, LABELS)[0], rtol=1e-6)
    np.testing.assert_array_equal(gradient[..., 2], 0)
    assert np.isfinite(gradient).all()


def test_a_label_whose_class_is_masked_in_all_frames_costs_infinity():
    mask = np.ones(LOGITS.shape, bool)
    mask[0, :, 2] = False  # the second label of the first sequence
    mask[1, :1, 1] = False  # the label of the second is left in other frames
    value, gradient = value_and_gradient(LOGITS, LABELS, mask)
    np.testing.assert_array_equal(value == np.inf, [True, False, False, False])
    assert np.isfinite(gradient).all()
    with masksafe.label_checks("raise"), pytest.raises(ValueError, match="ctc_loss: 1 of 5 labels are at a masked"):
        loss(LOGITS, where=mask)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"logits": np.zeros((4, TIME), np.float32)}, "logits: got shape"),
        ({"labels": np.zeros((3, 2), int)}, "labels: got shape"),
        ({"frame_padding": np.zeros((4, 3))}, "logit_paddings: got shape"),
        ({"label_padding": np.zeros((4, 3))}, "label_paddings: got shape"),
        ({"blank_id": 3}, "blank_id: got value 3"),
        ({"blank_id": 1.0}, "blank_id: got value 1.0"),
        ({"where": np.ones((4, TIME), bool)}, "where: got shape"),
    ],
)
def test_bad_arguments_are_refused(change, text):
    with pytest.raises(ValueError, match=f"ctc_loss: {text}"):
        loss(**{"logits": LOGITS} | change)


def test_paddings_the_wrong_way_round_are_reported_while_label_checks_are_on():
    logits, frames, labels = np.zeros((2, 4, 3), np.float32), np.zeros((2, 4)), np.ones((2, 3), np.int32)
    live = np.array([[1, 1, 0], [1, 1, 1]])
    text = r"ctc_loss: 1 of 6 label_paddings are 0 on the right of a padded label.*; first at \(0, 2\): 0"
    with masksafe.label_checks("raise"):
        ctc_loss(logits, frames, labels, 1 - live)
        with pytest.raises(ValueError, match=text):
            ctc_loss(logits, frames, labels, live)
        no_frame = np.array([[1], [0]])  # all of the first sequence is gone
        ctc_loss(logits, frames + no_frame, labels, live)
