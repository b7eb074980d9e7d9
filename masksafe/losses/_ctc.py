"""Connectionist temporal classification: the loss of a label sequence with unknown alignment to the frames."""

from __future__ import annotations

import numbers
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from masksafe._core import arguments, label_checks, precision
from masksafe._core.labels import at_label, is_class, nan_unless
from masksafe._core.masks import either, read_mask, selected
from masksafe._core.public_op import public_op
from masksafe._core.sharding import vary_with
from masksafe._core.typing import Array, ArrayLike, jitted
from masksafe._softmax import log_softmax
from masksafe.losses._labelled import elements_at
from masksafe.losses._layout import wide_selected


@public_op
def ctc_loss(
    logits: ArrayLike,
    logit_paddings: ArrayLike,
    labels: ArrayLike,
    label_paddings: ArrayLike,
    *,
    blank_id: int = 0,
    log_epsilon: ArrayLike = -1e5,
    where: ArrayLike | None = None,
) -> Array:
    r"""The CTC loss of each sequence.

    .. math:: \ell = -\log \sum_{\pi \in \mathcal{B}^{-1}(y)} \prod_t p_t(\pi_t)

    over the alignments :math:`\pi` that become the labels :math:`y` once repetitions are merged and blanks removed.

    Args:
      logits: floats `[batch, time, num_classes]`; one class is the blank.
      logit_paddings: `[batch, time]`, 1 for a padded frame and 0 for a real one.
      labels: integers `[batch, length]` in [0, num_classes).
      label_paddings: `[batch, length]`, 1 for a padded label and 0 for a real one; padding is on the right.
      blank_id: the class of the blank.
      log_epsilon: the value used for log 0. A sequence whose labels do not fit into its frames has a loss of about
        `-log_epsilon`, or +inf with `log_epsilon=-jnp.inf`; its gradient is finite either way.
      where: booleans; False is masked. A mask `[batch]` masks sequences, a mask of the rank of `logits` masks their
        elements; a frame without an unmasked class counts as padded.

    Returns:
      The losses `[batch]`, in at least float32, never below 0. A sequence without a real frame has loss 0. Padded or
      masked frames and labels have no influence and gradients of exactly 0. A real label out of range makes the loss
      and the gradient of its sequence NaN; one whose class is masked in all frames gives loss +inf.

    Raises:
      TypeError: if `logits` are not floats, `labels` not integers or `where` not boolean.
      ValueError: if the shapes do not fit or `blank_id` is not a class. While label checks are on, for a bad label, and
        for a real label on the right of a padded one.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> logits = jnp.zeros((2, 3, 4)).at[1].set(jnp.nan)
      >>> frames, labels = jnp.array([[0, 0, 1], [1, 1, 1]]), jnp.array([[2, -1], [-1, -1]])
      >>> with jnp.printoptions(precision=4):
      ...     print(masksafe.losses.ctc_loss(logits, frames, labels, labels < 0))
      [1.674 0.   ]

    References:
      `optax.losses.ctc_loss <https://optax.readthedocs.io/en/latest/api/losses.html#optax.losses.ctc_loss>`_.

      Graves et al., "Connectionist temporal classification", 2006.
    """
    return _ctc_loss("ctc_loss", (logits, logit_paddings, labels, label_paddings), blank_id, log_epsilon, where)[0]


@public_op
def ctc_loss_with_forward_probs(
    logits: ArrayLike,
    logit_paddings: ArrayLike,
    labels: ArrayLike,
    label_paddings: ArrayLike,
    *,
    blank_id: int = 0,
    log_epsilon: ArrayLike = -1e5,
    where: ArrayLike | None = None,
) -> tuple[Array, Array, Array]:
    r"""The CTC loss of each sequence, and the probabilities of the forward pass.

    .. math::
      \alpha_{\text{blank}}(t, n) = \sum p(\pi_t = \phi \mid \pi_{1:t-1}, y_{1:n-1}), \qquad
      \alpha_{\text{label}}(t, n) = \sum p(\pi_t = y_n \mid \pi_{1:t-1}, y_{1:n-1})

    Args:
      logits: `[batch, time, num_classes]`, as in `ctc_loss`, like all other arguments.
      logit_paddings: `[batch, time]`.
      labels: `[batch, length]`.
      label_paddings: `[batch, length]`.
      blank_id: the class of the blank.
      log_epsilon: the value used for log 0.
      where: booleans; False is masked.

    Returns:
      The loss `[batch]`, the logarithms of :math:`\alpha_{\text{blank}}` `[time, batch, length + 1]` and those of
      :math:`\alpha_{\text{label}}` `[time, batch, length]`. A padded frame repeats the values of the frame before it.
      Values after the last real label are not probabilities of the sequence: at a padded label they are computed for
      label 0, whatever the padding contains, whereas optax computes them for the padding.

    Raises:
      TypeError: if `logits` are not floats, `labels` not integers or `where` not boolean.
      ValueError: if the shapes do not fit or `blank_id` is not a class. While label checks are on, for a bad label.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> logits, labels = jnp.zeros((1, 2, 3)), jnp.array([[2]])
      >>> unpadded = jnp.zeros((1, 2))
      >>> ctc = masksafe.losses.ctc_loss_with_forward_probs
      >>> loss, log_alpha_blank, log_alpha_label = ctc(logits, unpadded, labels, labels < 0)
      >>> print(loss.shape, log_alpha_blank.shape, log_alpha_label.shape)
      (1,) (2, 1, 2) (2, 1, 1)

    References:
      `optax.losses.ctc_loss_with_forward_probs
      <https://optax.readthedocs.io/en/latest/api/losses.html#optax.losses.ctc_loss_with_forward_probs>`_.
    """
    arrays = logits, logit_paddings, labels, label_paddings
    return _ctc_loss("ctc_loss_with_forward_probs", arrays, blank_id, log_epsilon, where)


class _State(NamedTuple):
    """Log probabilities of all prefixes of the labels after some frames."""

    blank: Array  # [batch, length + 1], where the last frame is a blank
    label: Array  # [batch, length], where the last frame is the last label of the prefix


def _as_paddings(op: str, argument: str, paddings: ArrayLike) -> Array:
    array = arguments.as_real_array(op, argument, paddings)
    return array.astype(jnp.int32) if array.dtype == jnp.bool_ else array


def _are_on_the_right(paddings: Array) -> Array:
    """Whether each label is padding, or follows no padding."""
    padded = paddings != 0
    return padded | (jnp.cumsum(padded, 1) == 0)


def _ctc_loss(
    op: str, arrays: tuple[ArrayLike, ...], blank_id: int, log_epsilon: ArrayLike, where: ArrayLike | None
) -> tuple[Array, Array, Array]:
    logits, frame_paddings, labels, label_paddings = arrays
    logits, labels = arguments.as_float_array(op, "logits", logits), arguments.as_label_array(op, "labels", labels)
    frame_paddings = _as_paddings(op, "logit_paddings", frame_paddings)
    label_paddings = _as_paddings(op, "label_paddings", label_paddings)
    if logits.ndim != 3:
        raise ValueError(arguments.message(op, "logits", f"shape {logits.shape}", "[batch, time, num_classes]"))
    if labels.ndim != 2 or labels.shape[0] != logits.shape[0]:
        expected = f"[batch, length] with the batch size {logits.shape[0]} of logits {logits.shape}"
        raise ValueError(arguments.message(op, "labels", f"shape {labels.shape}", expected))
    arguments.check_shape(op, "logit_paddings", frame_paddings.shape, logits.shape[:2])
    arguments.check_shape(op, "label_paddings", label_paddings.shape, labels.shape)
    arguments.check_is_known(op, "blank_id", blank_id, "a class")
    if not isinstance(blank_id, numbers.Integral) or not -logits.shape[-1] <= blank_id < logits.shape[-1]:
        expected = f"a class of logits {logits.shape}"
        raise ValueError(arguments.message(op, "blank_id", f"value {blank_id!r}", expected))
    mask = read_mask(op, where, logits.shape, "the input", "elements or rows", (1, 2))

    unmasked = jnp.broadcast_to((frame_paddings == 0)[..., None], logits.shape)
    unmasked = unmasked if mask is None else unmasked & mask
    frames = frame_paddings == 0 if mask is None else jnp.any(unmasked, -1)
    unmasked_labels = (label_paddings == 0) & jnp.any(frames, 1)[:, None]
    allowed = unmasked_labels[..., None]
    allowed = allowed if mask is None else allowed & jnp.any(unmasked, 1, keepdims=True)
    bad_labels = label_checks.check_integer_labels(op, labels, allowed, (2,), (*labels.shape, logits.shape[-1]), None)
    text, checked = "0 on the right of a padded label (1 means padding)", jnp.any(frames, 1, keepdims=True)
    bad_paddings = label_checks.check_elements(
        op, label_paddings, labels.shape, checked, _are_on_the_right, text, argument="label_paddings"
    )

    log_probs = log_softmax(wide_selected(logits, unmasked), -1, unmasked)
    dtype = precision.default_or_wider(log_probs.dtype)
    log_probs = jnp.moveaxis(log_probs, 1, 0).astype(dtype)  # time first
    log_epsilon = jnp.asarray(log_epsilon, dtype)
    state, states = _scan_frames(log_probs, frames.T, labels, unmasked_labels, blank_id, log_epsilon)

    # The sequence may end in its last label or in a blank.
    last_blank = _merge_into_blank(state.blank, state.label)
    loss = -elements_at(last_blank, jnp.sum(unmasked_labels, 1, keepdims=True))[:, 0]
    loss += lax.stop_gradient(jnp.maximum(-loss, 0))  # a sum of probabilities that is rounded may exceed 1
    is_valid = is_class(labels, logits.shape[-1])
    loss = nan_unless(jnp.all(is_valid | ~unmasked_labels, 1), loss)
    if mask is not None:
        is_ruled_out = unmasked_labels & is_valid & ~jnp.any(at_label(labels, logits.shape[-1]) & allowed, -1)
        loss += jnp.where(jnp.any(is_ruled_out, 1), jnp.inf, 0).astype(dtype)
    bad = either(bad_labels, bad_paddings)
    loss = label_checks.nan_where_bad(selected(loss, jnp.any(frames, 1)), None if bad is None else jnp.any(bad, 1))
    return loss, jnp.concatenate([states.blank[:-1], last_blank[None]])[: log_probs.shape[0]], states.label


@jitted(4)
def _scan_frames(
    log_probs: Array, frames: Array, labels: Array, unmasked_labels: Array, blank_id: int, log_epsilon: Array
) -> tuple[_State, _State]:
    """The state after the last frame, and the states after every frame."""
    batch, length = labels.shape
    labels = jnp.where(unmasked_labels & is_class(labels, log_probs.shape[-1]), labels, 0)
    # Two equal labels in succession need a blank between them.
    repeats = (labels[:, :-1] == labels[:, 1:]) & unmasked_labels[:, 1:]
    repeats = jnp.pad(repeats, ((0, 0), (0, 1)))[:, :length]
    if_repeated, if_not = jnp.where(repeats, log_epsilon, 0), jnp.where(repeats, 0, log_epsilon)

    def step(state: _State, frame: tuple[Array, Array, Array]) -> tuple[_State, _State]:
        blank_log_prob, label_log_probs, is_unmasked = frame
        ready = _merge_into_blank(state.blank, state.label + if_repeated)
        label = _log_add(ready[:, :-1], state.label) + label_log_probs
        blank = _merge_into_blank(ready + blank_log_prob, state.label + blank_log_prob + if_not)
        is_unmasked = is_unmasked[:, None]
        new = _State(jnp.where(is_unmasked, blank, state.blank), jnp.where(is_unmasked, label, state.label))
        return new, new

    for_labels = elements_at(log_probs, jnp.broadcast_to(labels, (log_probs.shape[0], batch, length)))
    # Masked frames are not used, but their -inf would make derivatives NaN.
    for_labels, for_blank = (selected(x, frames[..., None]) for x in (for_labels, log_probs[..., blank_id, None]))
    log_zero = vary_with(jnp.zeros_like(log_probs[:1, :, :1]).sum(0) + log_epsilon, (labels, frames))
    first_blank = jnp.where(jnp.arange(length + 1) == 0, 0, jnp.broadcast_to(log_zero, (batch, length + 1)))
    first = _State(first_blank, jnp.broadcast_to(log_zero, (batch, length)))
    return lax.scan(step, first, (for_blank, for_labels, frames))


def _merge_into_blank(blank: Array, label: Array) -> Array:
    """The log probabilities of the blank, with those of the label before it added."""
    return jnp.concatenate([blank[:, :1], _log_add(blank[:, 1:], label)], -1)


def _log_add(a: Array, b: Array) -> Array:
    """log(e^a + e^b), whose derivatives are 0 where both are -inf."""
    are_zero = (a == -jnp.inf) & (b == -jnp.inf)
    return jnp.where(are_zero, -jnp.inf, jnp.logaddexp(jnp.where(are_zero, 0, a), jnp.where(are_zero, 0, b)))
