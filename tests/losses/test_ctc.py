"""CTC: parameters, paddings and labels that the contract's table does not try."""

import definitions
import jax
import jax.numpy as jnp
import numpy as np
from tiers import parametrize

import masksafe
from masksafe.losses import ctc_loss

RNG = np.random.default_rng(0)
TIME, CLASSES = 5, 3
LOGITS = RNG.normal(size=(4, TIME, CLASSES)).astype(np.float32)
LABELS = np.array([[1, 2], [1, 1], [2, 0], [1, 2]])
FRAMES, COUNTS = np.array([5, 4, 3, 5]), np.array([2, 2, 1, 0])
FRAME_PADDING = (np.arange(TIME) >= FRAMES[:, None]).astype(np.float32)
LABEL_PADDING = (np.arange(2) >= COUNTS[:, None]).astype(np.float32)
EVERY_CLASS = np.ones(LOGITS.shape, bool)


def loss(logits, labels=LABELS, frame_padding=FRAME_PADDING, label_padding=LABEL_PADDING, **kwargs):
    return ctc_loss(logits, frame_padding, labels, label_padding, **kwargs)


@jax.jit
def step(logits, labels, where, *paddings):
    fn = lambda x: loss(x, labels, *paddings, where=where)  # noqa: E731
    return fn(logits), jax.grad(lambda x: fn(x).sum())(logits)


def value_and_gradient(logits, labels, where, frame_padding=FRAME_PADDING, label_padding=LABEL_PADDING):
    return step(logits, labels, where, frame_padding, label_padding)  # one program for all of them


@parametrize("log_epsilon", [-np.inf], exhaustive=[-1e5])
def test_equals_the_sum_over_all_alignments(log_epsilon):
    expected = [definitions.ctc(np.float64(LOGITS[i, : FRAMES[i]]), LABELS[i, : COUNTS[i]]) for i in range(4)]
    actual = jax.jit(lambda x: loss(x, log_epsilon=log_epsilon))(LOGITS)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_a_confident_alignment_never_costs_less_than_nothing():
    classes = np.repeat([1, 2, 1, 2, 1], 4)
    peaks = np.float32(20 * (np.arange(3) == classes[:, None])) + RNG.normal(size=(32, 20, 3)).astype(np.float32)
    labels, padding = np.tile([1, 2, 1, 2, 1], (32, 1)), np.zeros((32, 20), np.float32)
    fn = lambda x: loss(x, labels, padding, padding[:, :5])  # noqa: E731
    values, gradient = jax.jit(lambda x: (fn(x), jax.grad(lambda x: fn(x).sum())(x)))(peaks)
    assert (values >= 0).all()
    assert (values == 0).any()
    assert np.abs(gradient).max((1, 2)).all()  # of a loss that is rounded to 0 too


def forward_probabilities(logits, labels, _):
    ctc = jax.jit(masksafe.losses.ctc_loss_with_forward_probs)
    return ctc(np.nan_to_num(logits, posinf=0), FRAME_PADDING, labels, LABEL_PADDING)


@parametrize("results", [value_and_gradient], exhaustive=[forward_probabilities])
def test_what_is_behind_the_last_frame_and_label_is_gone(results):
    clean = results(np.where(FRAME_PADDING[..., None] > 0, 0, LOGITS), LABELS, EVERY_CLASS)
    for garbage, other in ((np.nan, -100), (np.inf, 1), (1e38, CLASSES)):
        dirty = np.where(FRAME_PADDING[..., None] > 0, np.float32(garbage), LOGITS)
        labels = np.where(LABEL_PADDING > 0, other, LABELS)
        jax.tree.map(np.testing.assert_array_equal, results(dirty, labels, EVERY_CLASS), clean)


def test_a_sequence_of_nothing_but_padding_has_loss_zero():
    bad = np.full_like(LOGITS, np.nan), np.full_like(LABELS, -100)
    for label_padding in (np.zeros_like(LABEL_PADDING), np.ones_like(LABEL_PADDING)):
        out = value_and_gradient(*bad, EVERY_CLASS, np.ones_like(FRAME_PADDING), label_padding)
        jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0), out)
    no_frames = jax.jit(lambda: ctc_loss(np.zeros((1, 0, CLASSES)), np.zeros((1, 0)), LABELS[:1], np.ones((1, 2))))
    assert no_frames() == 0


@parametrize("log_epsilon", [-np.inf], exhaustive=[-1e5])
@parametrize("order", [1], exhaustive=[2])
def test_more_labels_than_frames(log_epsilon, order):
    padding, labels = (np.zeros((1, 2)), np.zeros((1, 4))), np.array([[1, 1, 2, 1]])

    @jax.jit
    def all_of(x):
        of = lambda x: ctc_loss(x, padding[0], labels, padding[1], log_epsilon=log_epsilon)[0]  # noqa: E731
        products = [jax.jvp(jax.grad(of), (x,), (jnp.cos(x),))[1]] if order == 2 else []
        return *jax.value_and_grad(of)(x), products

    value, gradient, products = all_of(LOGITS[:1, :2])
    assert value >= 1e5
    assert np.isposinf(value) == np.isinf(log_epsilon)
    assert np.isfinite(gradient).all()
    assert all(np.isfinite(product).all() for product in products)


def test_a_label_out_of_range_is_nan_in_its_sequence():
    for label in (-1, CLASSES):
        labels = LABELS.copy()
        labels[1, 0] = label
        value, gradient = value_and_gradient(LOGITS, labels, EVERY_CLASS)
        np.testing.assert_array_equal(np.isnan(value), [False, True, False, False])
        np.testing.assert_array_equal(np.isnan(gradient).any((1, 2)), [False, True, False, False])


def test_masked_classes_are_taken_out():
    labels = np.where(LABELS == 2, 1, LABELS)
    left = np.broadcast_to(np.arange(CLASSES) != 2, LOGITS.shape)
    masked, gradient = value_and_gradient(np.where(left, LOGITS, np.nan).astype("float32"), labels, left)
    expected = [definitions.ctc(np.float64(LOGITS[i, : FRAMES[i], :2]), labels[i, : COUNTS[i]]) for i in range(4)]
    np.testing.assert_allclose(masked, expected, rtol=1e-5)
    np.testing.assert_array_equal(gradient[..., 2], 0)
    assert np.isfinite(gradient).all()


def test_a_label_whose_class_is_masked_in_all_frames_costs_infinity():
    mask = EVERY_CLASS.copy()
    mask[0, :, 2] = False  # the second label of the first sequence
    mask[1, :1, 1] = False  # the label of the second is left in other frames
    value, gradient = value_and_gradient(LOGITS, LABELS, mask)
    np.testing.assert_array_equal(value == np.inf, [True, False, False, False])
    assert np.isfinite(gradient).all()
