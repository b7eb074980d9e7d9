"""Losses that are 0 beyond a margin: hinge, perceptron and sparsemax, binary and multiclass."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import zero_from_primal

from masksafe._core import label_checks, precision, row_blocks, run_time
from masksafe._core.arguments import as_float_array, as_label_array, as_real_array, check_shape, message
from masksafe._core.labels import class_index, is_class, nan_unless
from masksafe._core.linear import nan_unless_zero, times
from masksafe._core.masks import read_mask, selected
from masksafe._core.public_op import public_op
from masksafe._core.typing import Array, ArrayLike, DType, Pytree, jitted
from masksafe.losses._elementwise import Check, elementwise_loss
from masksafe.losses._labelled import element_at
from masksafe.losses._layout import broadcast_widened, common_rows, wide_selected

# Losses of binary targets, element by element.


@public_op
def hinge_loss(predictor_outputs: ArrayLike, targets: ArrayLike, *, where: ArrayLike | None = None) -> Array:
    r"""The hinge loss of binary targets, element by element.

    .. math:: \ell = \max(0, 1 - s t)

    Args:
      predictor_outputs: scores :math:`s` `[...]`.
      targets: :math:`t`, -1 or 1; they broadcast with the scores.
      where: booleans of the rank of the loss; False masks an element. A mask of lower rank is refused:
        to mask rows write `where[..., None]`.

    Returns:
      The losses `[...]`, of the dtype to which JAX promotes both; 0 where masked, with gradients of exactly 0.

    Raises:
      TypeError: if `where` is not boolean.
      ValueError: if the shapes do not broadcast, or `where` is of another rank. While label checks are on, for an
        unmasked target that is neither -1 nor 1.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> scores, targets = jnp.array([0.5, 2.0, jnp.nan]), jnp.array([1, -1, 0])
      >>> print(masksafe.losses.hinge_loss(scores, targets, where=targets != 0))
      [0.5 3.  0. ]

    References:
      `optax.losses.hinge_loss <https://optax.readthedocs.io/en/latest/api/losses.html#optax.losses.hinge_loss>`_.
    """
    return _binary_margin_loss("hinge_loss", predictor_outputs, targets, where, 1)


@public_op
def perceptron_loss(predictor_outputs: ArrayLike, targets: ArrayLike, *, where: ArrayLike | None = None) -> Array:
    r"""The perceptron loss of binary targets, element by element.

    .. math:: \ell = \max(0, -s t)

    Args:
      predictor_outputs: scores :math:`s` `[...]`.
      targets: :math:`t`, -1 or 1, of the same shape.
      where: booleans of the rank of the loss; False masks an element. A mask of lower rank is refused:
        to mask rows write `where[..., None]`.

    Returns:
      The losses `[...]`, of the dtype to which JAX promotes both; 0 where masked, with gradients of exactly 0.

    Raises:
      TypeError: if `where` is not boolean.
      ValueError: if the shapes differ, or `where` is of another rank. While label checks are on, for an unmasked
        target that is neither -1 nor 1.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> scores, targets = jnp.array([0.5, 2.0, jnp.nan]), jnp.array([1, -1, 0])
      >>> print(masksafe.losses.perceptron_loss(scores, targets, where=targets != 0))
      [0. 2. 0.]

    References:
      `optax.losses.perceptron_loss
      <https://optax.readthedocs.io/en/latest/api/losses.html#optax.losses.perceptron_loss>`_.
    """
    return _binary_margin_loss("perceptron_loss", predictor_outputs, targets, where, 0)


@public_op
def sparsemax_loss(logits: ArrayLike, labels: ArrayLike, *, where: ArrayLike | None = None) -> Array:
    r"""The binary sparsemax loss, element by element.

    .. math::
      \ell = f(x (1 - 2 y)), \qquad
      f(z) = \begin{cases} 0 & z \le -1 \\ (z + 1)^2 / 4 & -1 < z < 1 \\ z & z \ge 1 \end{cases}

    Args:
      logits: scores :math:`x`, floats `[...]`.
      labels: :math:`y`, 0 or 1; they broadcast with the logits.
      where: booleans of the rank of the loss; False masks an element. A mask of lower rank is refused:
        to mask rows write `where[..., None]`.

    Returns:
      The losses `[...]`, of the dtype of `logits`; 0 where masked, with gradients of exactly 0.

    Raises:
      TypeError: if `logits` are not floats or `where` is not boolean.
      ValueError: if the shapes do not broadcast, or `where` is of another rank. While label checks are on, for an
        unmasked label that is neither 0 nor 1.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> logits, labels = jnp.array([0.0, 2.0, jnp.nan]), jnp.array([1, 0, -100])
      >>> print(masksafe.losses.sparsemax_loss(logits, labels, where=labels >= 0))
      [0.25 2.   0.  ]

    References:
      `optax.losses.sparsemax_loss
      <https://optax.readthedocs.io/en/latest/api/losses.html#optax.losses.sparsemax_loss>`_.

      Blondel et al., "Learning with Fenchel-Young Losses", 2020, section 4.4.
    """
    op = "sparsemax_loss"
    arrays = {"logits": as_float_array(op, "logits", logits), "labels": as_real_array(op, "labels", labels)}
    check = _is_one_of("labels", 0, 1)
    return elementwise_loss(op, where, ("logits",), _sparsemax_plus, check=check, **arrays)


def _binary_margin_loss(op: str, scores: ArrayLike, targets: ArrayLike, where: ArrayLike | None, margin: int) -> Array:
    """The hinge loss for a margin of 1, the perceptron loss for 0."""
    scores, targets = as_real_array(op, "predictor_outputs", scores), as_real_array(op, "targets", targets)
    if not margin:  # in optax's hinge loss they broadcast
        check_shape(op, "targets", targets.shape, scores.shape, "that of predictor_outputs")
    arrays = {"predictor_outputs": scores, "targets": targets}
    loss, check = _hinge if margin else _perceptron, _is_one_of("targets", -1, 1)
    return elementwise_loss(op, where, (*arrays, margin), loss, check=check, **arrays)


def _hinge(predictor_outputs: Array, targets: Array) -> Array:
    return jnp.maximum(0, 1 - predictor_outputs * targets)


def _perceptron(predictor_outputs: Array, targets: Array) -> Array:
    return jnp.maximum(0, -predictor_outputs * targets)


def _sparsemax_plus(logits: Array, labels: Array) -> Array:
    signed = jnp.where(labels != 0, -logits, logits)
    return jax.nn.sparse_plus(nan_unless(~jnp.isnan(labels), signed))


def _is_one_of(argument: str, one: int, other: int) -> Check:
    return Check(argument, lambda t: (t == one) | (t == other), f"neither {one} nor {other}")


# Losses of integer labels, row by row.


@public_op
def multiclass_hinge_loss(scores: ArrayLike, labels: ArrayLike, *, where: ArrayLike | None = None) -> Array:
    r"""The hinge loss of integer labels.

    .. math:: \ell = \max_j (s_j + [j \ne y]) - s_y

    with scores :math:`s`, label :math:`y` and the maximum over the unmasked classes.

    Args:
      scores: floats `[..., num_classes]`.
      labels: integers `[...]` in [0, num_classes).
      where: booleans; False is masked. A mask of the rank of `scores` masks classes, a mask of the rank of the loss
        masks rows.

    Returns:
      The losses `[...]`, of the dtype to which JAX promotes `scores` and a float; 0 for a fully masked row. A
      label out of range makes the loss and the gradient of its row NaN; one at a masked class gives loss +inf. Masked
      elements have gradients of exactly 0.

    Raises:
      TypeError: if `scores` are not floats, `labels` not integers or `where` not boolean.
      ValueError: if the shapes do not fit. While label checks are on, for a bad label.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> scores = jnp.array([[1.0, 2.0, 0.0], [0.0, 1.0, 0.0]])
      >>> labels = jnp.array([0, -100])
      >>> print(masksafe.losses.multiclass_hinge_loss(scores, labels, where=labels >= 0))
      [2. 0.]

    References:
      `optax.losses.multiclass_hinge_loss
      <https://optax.readthedocs.io/en/latest/api/losses.html#optax.losses.multiclass_hinge_loss>`_.
    """
    return _multiclass_loss("multiclass_hinge_loss", scores, labels, where, 1)


@public_op
def multiclass_perceptron_loss(scores: ArrayLike, labels: ArrayLike, *, where: ArrayLike | None = None) -> Array:
    r"""The perceptron loss of integer labels.

    .. math:: \ell = \max_j s_j - s_y

    with scores :math:`s`, label :math:`y` and the maximum over the unmasked classes.

    Args:
      scores: floats `[..., num_classes]`.
      labels: integers `[...]` in [0, num_classes).
      where: booleans; False is masked. A mask of the rank of `scores` masks classes, a mask of the rank of the loss
        masks rows.

    Returns:
      The losses `[...]`, of the dtype to which JAX promotes `scores` and a float; 0 for a fully masked row. A
      label out of range makes the loss and the gradient of its row NaN; one at a masked class gives loss +inf. Masked
      elements have gradients of exactly 0.

    Raises:
      TypeError: if `scores` are not floats, `labels` not integers or `where` not boolean.
      ValueError: if the shapes do not fit. While label checks are on, for a bad label.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> scores = jnp.array([[1.0, 2.0, 0.0], [0.0, 1.0, 0.0]])
      >>> labels = jnp.array([0, -100])
      >>> loss = masksafe.losses.multiclass_perceptron_loss
      >>> print(loss(scores, labels, where=labels >= 0))
      [1. 0.]

    References:
      `optax.losses.multiclass_perceptron_loss
      <https://optax.readthedocs.io/en/latest/api/losses.html#optax.losses.multiclass_perceptron_loss>`_.

      Collins, "Discriminative training methods for Hidden Markov Models", 2002.
    """
    return _multiclass_loss("multiclass_perceptron_loss", scores, labels, where, 0)


@public_op
def multiclass_sparsemax_loss(scores: ArrayLike, labels: ArrayLike, *, where: ArrayLike | None = None) -> Array:
    r"""The sparsemax loss of integer labels.

    .. math::
      \ell = \sum_j p_j (s_j - s_y) + \frac{1}{2} \Bigl(1 - \sum_j p_j^2\Bigr), \qquad
      p_j = \max(s_j - \tau, 0), \qquad \sum_j p_j = 1

    with scores :math:`s`, label :math:`y` and the sums over the unmasked classes; :math:`p` is the sparsemax, the point
    of the simplex nearest to the scores.

    Args:
      scores: floats `[..., num_classes]`.
      labels: integers `[...]` in [0, num_classes).
      where: booleans; False is masked. A mask of the rank of `scores` masks classes, a mask of the rank of the loss
        masks rows.

    Returns:
      The losses `[...]`, of the dtype to which JAX promotes `scores` and a float; 0 for a fully masked row. A
      label out of range makes the loss and the gradient of its row NaN; one at a masked class gives loss +inf. Masked
      elements have gradients of exactly 0.

    Raises:
      TypeError: if `scores` are not floats, `labels` not integers or `where` not boolean.
      ValueError: if the shapes do not fit. While label checks are on, for a bad label.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> scores = jnp.array([[0.5, 0.0, -2.0], [0.0, 1.0, 0.0]])
      >>> labels = jnp.array([0, -100])
      >>> loss = masksafe.losses.multiclass_sparsemax_loss
      >>> print(loss(scores, labels, where=labels >= 0))
      [0.0625 0.    ]

    References:
      `optax.losses.multiclass_sparsemax_loss
      <https://optax.readthedocs.io/en/latest/api/losses.html#optax.losses.multiclass_sparsemax_loss>`_.

      Martins and Astudillo, "From Softmax to Sparsemax", 2016.
    """
    return _multiclass_loss("multiclass_sparsemax_loss", scores, labels, where, None)


def _multiclass_loss(
    op: str, scores: ArrayLike, labels: ArrayLike, where: ArrayLike | None, margin: int | None
) -> Array:
    """The hinge loss for a margin of 1, the perceptron loss for 0, the sparsemax loss for None."""
    scores, labels = as_float_array(op, "scores", scores), as_label_array(op, "labels", labels)
    if scores.ndim == 0 or scores.shape[-1] == 0:
        raise ValueError(message(op, "scores", f"shape {scores.shape}", "[..., num_classes] with at least one class"))
    rows = common_rows(op, labels.shape, (scores.ndim - 1,), "scores", scores)
    shape, axes = (*rows, scores.shape[-1]), (len(rows),)
    labels, dtype = jnp.broadcast_to(labels, rows), precision.default_or_wider(scores.dtype)
    mask = read_mask(op, where, shape, "the input", "elements or rows", axes)
    bad_rows = label_checks.check_integer_labels(op, labels, mask, axes, shape, None)
    return _evaluate(margin, dtype, broadcast_widened(scores, shape), labels, mask, bad_rows)


@jitted(0, 1)
def _evaluate(
    margin: int | None, dtype: DType, scores: Array, labels: Array, mask: Array | None, bad: Array | None
) -> Array:
    rows = scores, labels[..., None], mask  # the labels, like the losses, as `[..., 1]`
    losses = _sparsemax_losses(*rows) if margin is None else _evaluate_rows(margin, *rows).loss
    return label_checks.nan_where_bad(losses.squeeze(-1).astype(dtype), bad)


class _RowLosses(NamedTuple):
    """The hinge or perceptron loss of each row, and what its derivative needs; every array is `[..., 1]`."""

    loss: Array
    largest: Array  # the largest score, with the margin of its class
    is_valid: Array


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _evaluate_rows(margin: int, scores: Array, labels: Array, mask: Array | None) -> _RowLosses:
    return row_blocks.map_row_blocks(functools.partial(_row_values, margin), scores, labels, mask)


@_evaluate_rows.defjvp
def _(margin: int, primals: tuple[Pytree, ...], tangents: tuple[Pytree, ...]) -> tuple[_RowLosses, _RowLosses]:
    scores, labels, mask = primals
    rows = _evaluate_rows(margin, scores, labels, mask)
    x, is_label = wide_selected(scores, mask), _is_label(scores, labels)
    is_largest = (_with_margin(margin, x, is_label, mask) == rows.largest).astype(x.dtype)
    share = is_largest / jnp.maximum(_sum(is_largest), 1)
    slope = jnp.where(rows.is_valid, share - (is_label & (x != -jnp.inf)).astype(x.dtype), jnp.nan)
    d_loss = _sum(times(slope, wide_selected(tangents[0], mask)))
    zeros = (zero_from_primal(x, symbolic_zeros=False) for x in rows[1:])
    return rows, _RowLosses(d_loss, *zeros)


def _row_values(margin: int, scores: Array, labels: Array, mask: Array | None) -> _RowLosses:
    x, is_label, is_valid = wide_selected(scores, mask), _is_label(scores, labels), _is_valid(scores, labels, mask)
    margins = _with_margin(margin, x, is_label, mask)
    largest = jnp.max(margins, -1, keepdims=True)
    return _RowLosses(_less_label_score(largest, scores, labels, mask, is_valid), largest, is_valid)


def _with_margin(margin: int, x: Array, is_label: Array, mask: Array | None) -> Array:
    """The scores plus the margin, except for the label; -inf under the mask."""
    return selected(x + margin * (~is_label).astype(x.dtype) if margin else x, mask, -jnp.inf)


def _is_label(scores: Array, labels: Array) -> Array:
    return class_index(scores.shape).astype(labels.dtype) == labels


def _is_valid(scores: Array, labels: Array, mask: Array | None) -> Array:
    """Whether a row is empty, or has a label in range and no NaN, which XLA's maximum may lose (jax 0.10 and 0.12)."""
    has_nan = jnp.any(selected(jnp.isnan(scores), mask), -1, keepdims=True)
    is_valid = is_class(labels, scores.shape[-1]) & ~has_nan
    return is_valid if mask is None else is_valid | ~run_time.any_of(mask, -1, keepdims=True)


def _less_label_score(highest: Array, scores: Array, labels: Array, mask: Array | None, is_valid: Array) -> Array:
    """`highest` minus the score of the label: +inf if that is -inf or masked, and 0 for a fully masked row."""
    has_unmasked = None if mask is None else run_time.any_of(mask, -1, keepdims=True)
    score = precision.widened(element_at(scores, mask, labels))
    is_ruled_out = score == -jnp.inf
    # Infinity is added as a constant, which leaves the derivatives to the other scores.
    losses = selected(highest, has_unmasked) - jnp.where(is_ruled_out, 0, score)
    losses += jnp.where(is_ruled_out, jnp.inf, 0).astype(score.dtype)
    return selected(nan_unless(is_valid, losses), has_unmasked)


def _sparsemax_losses(scores: Array, labels: Array, mask: Array | None) -> Array:
    is_valid = _is_valid(scores, labels, mask)
    of_all = wide_selected(scores, mask)
    x = selected(of_all, is_valid)
    # The loss is invariant under this shift, which preserves digits.
    descending = precision.widened(-jnp.sort(selected(-lax.stop_gradient(scores), mask, jnp.inf), -1))
    shift = jnp.where(jnp.isfinite(descending[..., :1]), descending[..., :1], 0)
    x -= shift
    losses = _less_label_score(_regularized_max(x, descending - shift, mask), x, labels, mask, is_valid)
    return losses + _sum(nan_unless_zero(selected(of_all, ~is_valid)))  # all gradients of a bad row are NaN as well


def _regularized_max(x: Array, descending: Array, unmasked: Array | None) -> Array:
    """The maximum over the points p of the simplex of p x + (1 - p p) / 2; its gradient is the maximizing p.

    This is the point nearest to `x` on the simplex of the unmasked classes; `descending` are the elements of `x`,
    sorted.
    """
    count = 1 + lax.broadcasted_iota(x.dtype, x.shape, x.ndim - 1)
    is_finite = descending > -jnp.inf
    above = is_finite & (1 + count * descending > jnp.cumsum(jnp.where(is_finite, descending, 0), -1))
    size = jnp.maximum(_sum(above), 1)
    least = jnp.take_along_axis(descending, size - 1, -1)
    # The threshold, computed again without a sort from the classes above it, so that it has derivatives.
    support = ~(x < least)  # includes a NaN, which must not be hidden
    support = support if unmasked is None else support & unmasked
    number, x = jnp.maximum(_sum(support), 1).astype(x.dtype), jnp.where(support, x, 0)
    threshold = (_sum(x) - 1) / number
    return 0.5 * (_sum(jnp.square(x)) - number * jnp.square(threshold) + 1)


def _sum(x: Array) -> Array:
    return jnp.sum(x, -1, keepdims=True)
