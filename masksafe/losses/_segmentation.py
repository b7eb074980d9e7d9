"""Dice losses: the overlap between predicted and true segments."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from masksafe._core import label_checks, precision, run_time
from masksafe._core.arguments import as_array, as_bool, as_choice, as_float_array, canonical_axes, check_shape, message
from masksafe._core.derivatives import elementwise, product, without_mask_of_rows
from masksafe._core.masks import read_mask, selected
from masksafe._core.public_op import public_op
from masksafe._core.typing import REDUCTIONS, Array, ArrayLike, Axes, Axis, DType, LossReduction, jitted
from masksafe._reductions import mean
from masksafe._softmax import softmax
from masksafe.losses._layout import wide_selected


@public_op
def dice_loss(
    predictions: ArrayLike,
    targets: ArrayLike,
    *,
    class_weights: ArrayLike | None = None,
    smooth: ArrayLike = 1.0,
    alpha: ArrayLike = 0.5,
    beta: ArrayLike = 0.5,
    apply_softmax: bool = True,
    reduction: LossReduction = "mean",
    ignore_background: bool = False,
    axis: Axis | None = None,
    where: ArrayLike | None = None,
) -> Array:
    r"""The Dice loss of a segmentation, or the Tversky loss if `alpha` and `beta` are not 0.5.

    .. math::
      \ell_c = w_c \Bigl( 1 - \frac{I_c + \sigma}{I_c + \alpha (P_c - I_c) + \beta (T_c - I_c) + \sigma} \Bigr), \qquad
      I_c = \sum_i p_{ic} t_{ic}, \quad P_c = \sum_i p_{ic}, \quad T_c = \sum_i t_{ic}

    with probabilities :math:`p`, targets :math:`t`, class weights :math:`w` and the sums over the unmasked pixels.

    Args:
      predictions: logits, floats `[batch, ..., num_classes]`; with one class, or without the axis of the classes, the
        segmentation is binary.
      targets: one-hot or binary, of the same shape; the axis of a single class may be omitted from either argument.
      class_weights: `[num_classes]`, or None for no weights.
      smooth: :math:`\sigma`.
      alpha: the weight of false positives.
      beta: the weight of false negatives.
      apply_softmax: False if `predictions` are probabilities, which sum to 1 for each pixel, or lie in [0, 1] if there
        is one class. They are used unchanged; `masksafe.label_checks` reports invalid ones.
      reduction: "mean", "sum" or "none", over the classes.
      ignore_background: omit class 0, unless it is the only one.
      axis: the axes of the pixels; None means all but the first and the last.
      where: booleans; False is masked. A mask of the rank of `predictions` masks elements; with shape `[batch, ..., 1]`
        it masks pixels with all their classes. A mask of the rank of the loss masks samples, or their classes.

    Returns:
      The losses of the samples `[batch]`, or with "none" of their classes `[batch, num_classes]`, of the dtype to which
      JAX promotes predictions, targets and weights. A fully masked class has loss 0 and is left out of the mean.
      Masked elements have gradients of exactly 0.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> logits = jnp.array([[4.0, -4.0, jnp.nan]])[..., None]
      >>> targets = jnp.array([[1.0, 0.0, 0.0]])[..., None]
      >>> loss = masksafe.losses.dice_loss(logits, targets, where=~jnp.isnan(logits))
      >>> with jnp.printoptions(precision=4):
      ...     print(loss)
      [0.009]

    References:
      `optax.losses.dice_loss <https://optax.readthedocs.io/en/latest/api/losses.html#optax.losses.dice_loss>`_.

      Milletari et al., "V-Net", 2016.

      Salehi et al., "Tversky loss function for image segmentation", 2017.
    """
    op = "dice_loss"
    p, t = _read_operands(op, predictions, targets)
    class_weights = None if class_weights is None else as_array(op, "class_weights", class_weights)
    promoted = [p.dtype, _float_dtype(t, p.dtype), smooth, alpha, beta]
    dtype = precision.promoted(*promoted, *([] if class_weights is None else [class_weights]))
    if p.ndim == 0:
        raise ValueError(message(op, "predictions", "shape ()", "[batch, ..., num_classes]"))
    axes = tuple(range(1, p.ndim - 1)) if axis is None else canonical_axes(op, axis, p.ndim)
    if p.ndim - 1 in axes:
        raise ValueError(message(op, "axis", f"value {axis}", "axes of pixels, without that of the classes"))
    as_choice(op, "reduction", reduction, REDUCTIONS)
    reduced_axes = axes if reduction == "none" else (*axes, p.ndim - 1)
    mask = read_mask(op, where, p.shape, "the input", "elements or rows", reduced_axes)
    apply_softmax, weights = as_bool(op, "apply_softmax", apply_softmax), (smooth, alpha, beta)
    losses, unmasked_rows = _class_losses(op, p, t, mask, axes, weights, apply_softmax)

    if class_weights is not None:
        check_shape(op, "class_weights", class_weights.shape, p.shape[-1:])
        losses = _weight_losses(losses, class_weights, unmasked_rows)
    if as_bool(op, "ignore_background", ignore_background):
        losses, unmasked_rows = _drop_background(losses, unmasked_rows)
    if reduction != "none":
        losses = mean(losses, -1, unmasked_rows) if reduction == "mean" else jnp.sum(losses, -1)
    return losses.astype(dtype)


@public_op
def multiclass_generalized_dice_loss(
    predictions: ArrayLike,
    targets: ArrayLike,
    *,
    smooth: ArrayLike = 1.0,
    apply_softmax: bool = True,
    ignore_background: bool = False,
    where: ArrayLike | None = None,
) -> Array:
    r"""The mean Dice loss of classes weighted by the inverse squares of their frequencies.

    .. math:: w_c = \frac{C v_c}{\sum_k v_k}, \qquad v_c = \frac{1}{\bigl(\sum_i t_{ic}\bigr)^2 + 10^{-7}}

    with the sums over all unmasked pixels of the batch and over the :math:`C` classes with unmasked elements.

    Args:
      predictions: logits, floats `[batch, ..., num_classes]`.
      targets: :math:`t`, one-hot, of the same shape.
      smooth: as in `dice_loss`.
      apply_softmax: as in `dice_loss`.
      ignore_background: omit class 0 from the mean, unless it is the only one; it still takes part in the weights.
      where: booleans of the rank of `predictions`; False masks an element, and with shape `[batch, ..., 1]` a pixel. A
        scalar masks everything or nothing.

    Returns:
      A scalar of the dtype to which JAX promotes both; 0 if all is masked. Masked elements have gradients of
      exactly 0.

    Raises:
      TypeError: if `predictions` are not floats or `where` is not boolean.
      ValueError: if the shapes differ. While label checks are on, for invalid probabilities.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> targets = jnp.array([[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]])
      >>> mask = jnp.array([[[True], [True], [False]]])
      >>> loss = masksafe.losses.multiclass_generalized_dice_loss(
      ...     8 * targets, targets, where=mask)
      >>> print(loss.round(5))
      0.00034

    References:
      `optax.losses.multiclass_generalized_dice_loss
      <https://optax.readthedocs.io/en/latest/api/losses.html#optax.losses.multiclass_generalized_dice_loss>`_.

      Sudre et al., "Generalised Dice overlap as a deep learning loss function for highly unbalanced segmentations",
      2017.
    """
    op = "multiclass_generalized_dice_loss"
    p, t = as_float_array(op, "predictions", predictions), as_array(op, "targets", targets)
    if p.shape != t.shape or p.ndim == 0:
        raise ValueError(message(op, "targets", f"shape {t.shape}", f"that of predictions {p.shape}, not ()"))
    dtype = precision.promoted(p.dtype, _float_dtype(t, jnp.float32), smooth)
    mask = read_mask(op, where, p.shape, "the input", "elements or rows", tuple(range(p.ndim)))
    apply_softmax, axes = as_bool(op, "apply_softmax", apply_softmax), tuple(range(1, p.ndim - 1))
    losses, unmasked_rows = _class_losses(op, p, t, mask, axes, (smooth, 0.5, 0.5), apply_softmax)

    frequencies = run_time.sum_of(wide_selected(precision.with_wide_numbers(p, t)[1], mask), range(p.ndim - 1))
    is_present = run_time.any_of(unmasked_rows, range(unmasked_rows.ndim - 1))
    weights = selected(1 / (jnp.square(frequencies) + 1e-7), is_present)
    number = run_time.number_of(is_present).astype(weights.dtype)
    weights *= number / jnp.maximum(jnp.sum(weights), jnp.finfo(weights.dtype).tiny)
    losses = _weight_losses(losses, weights, unmasked_rows)
    if as_bool(op, "ignore_background", ignore_background):
        losses, unmasked_rows = _drop_background(losses, unmasked_rows)
    return mean(losses, where=unmasked_rows).astype(dtype)


@public_op
def binary_dice_loss(
    predictions: ArrayLike,
    targets: ArrayLike,
    *,
    smooth: ArrayLike = 1.0,
    apply_sigmoid: bool = True,
    where: ArrayLike | None = None,
) -> Array:
    r"""The Dice loss of a binary segmentation: `dice_loss` of one class.

    .. math::
      \ell = 1 - \frac{2 I + 2 \sigma}{P + T + 2 \sigma}, \qquad
      I = \sum_i p_i t_i, \quad P = \sum_i p_i, \quad T = \sum_i t_i

    with probabilities :math:`p`, targets :math:`t` and the sums over the unmasked pixels.

    Args:
      predictions: logits, floats `[batch, ...]` or `[batch, ..., 1]`.
      targets: 0 or 1, of the same shape.
      smooth: :math:`\sigma`.
      apply_sigmoid: False if `predictions` are probabilities. They are used unchanged; `masksafe.label_checks` reports
        those outside [0, 1]. (optax 0.2.8 refuses all probabilities but 1, and cannot be traced.)
      where: booleans; False is masked. A mask of the rank of `predictions` masks pixels, a mask of the rank of the loss
        masks samples.

    Returns:
      The losses `[batch]`, of the dtype to which JAX promotes both; 0 for a fully masked sample. Masked elements
      have gradients of exactly 0.

    Raises:
      TypeError: if `predictions` are not floats or `where` is not boolean.
      ValueError: if the shapes do not fit. While label checks are on, for a probability outside [0, 1].

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> logits, targets = jnp.array([[4.0, -4.0, jnp.nan]]), jnp.array([[1.0, 0.0, 0.0]])
      >>> with jnp.printoptions(precision=4):
      ...     print(masksafe.losses.binary_dice_loss(
      ...         logits, targets, where=~jnp.isnan(logits)))
      [0.009]

    References:
      `optax.losses.binary_dice_loss
      <https://optax.readthedocs.io/en/latest/api/losses.html#optax.losses.binary_dice_loss>`_.
    """
    op = "binary_dice_loss"
    p, t = as_float_array(op, "predictions", predictions), as_array(op, "targets", targets)
    if p.shape == t.shape and p.shape[-1:] != (1,):
        mask = read_mask(op, where, p.shape, "the input", "elements or rows", tuple(range(1, p.ndim)))
        p, t = (selected(x, mask)[..., None] for x in (p, t))
        where = None if mask is None else mask[..., None]
    p, t = _read_operands(op, p, t)
    axes = tuple(range(1, p.ndim - 1))
    mask = read_mask(op, where, p.shape, "the input", "elements or rows", (*axes, p.ndim - 1))
    losses, _ = _class_losses(op, p, t, mask, axes, (smooth, 0.5, 0.5), as_bool(op, "apply_sigmoid", apply_sigmoid))
    return losses[..., 0].astype(precision.promoted(p.dtype, _float_dtype(t, p.dtype), smooth))


def _read_operands(op: str, predictions: ArrayLike, targets: ArrayLike) -> tuple[Array, Array]:
    """Predictions and targets, both with an axis of the classes."""
    p, t = as_float_array(op, "predictions", predictions), as_array(op, "targets", targets)
    if p.ndim == t.ndim - 1:
        p = p[..., None]
    if t.ndim == p.ndim - 1:
        t = t[..., None]
    check_shape(op, "targets", t.shape, p.shape, "that of predictions")
    return p, t


def _float_dtype(targets: Array, otherwise: DType) -> DType:
    """The dtype of the targets for promotion, the other one for integers and booleans."""
    return targets.dtype if jnp.issubdtype(targets.dtype, jnp.floating) else otherwise


# The smoothing number, and the weights of false positives and of false negatives.
_Weights = tuple[ArrayLike, ArrayLike, ArrayLike]


def _class_losses(
    op: str, p: Array, t: Array, mask: Array | None, axes: Axes, weights: _Weights, apply_softmax: bool
) -> tuple[Array, Array]:
    """The losses `[batch, num_classes]`, 0 where all is masked, and which of them have an unmasked element."""
    unmasked = None if mask is None else jnp.broadcast_to(mask, p.shape)
    bad_pixels = None if apply_softmax else label_checks.check_probabilities(op, p, unmasked)
    losses, unmasked_rows = _evaluate(axes, apply_softmax, p, t, mask, weights)
    bad = None if bad_pixels is None else run_time.any_of(bad_pixels, axes)[..., None]
    return selected(label_checks.nan_where_bad(losses, bad), unmasked_rows), unmasked_rows


@jitted(0, 1)
def _evaluate(
    axes: Axes, apply_softmax: bool, p: Array, t: Array, mask: Array | None, weights: _Weights
) -> tuple[Array, Array]:
    # The mask is reduced before it is broadcast. XLA reduces no constant by `any_of` (jax 0.12: compiled in 0.3 s).
    unmasked_rows = jnp.ones((), bool) if mask is None else run_time.any_of(mask, axes)
    (p, t), pixel_mask = without_mask_of_rows(mask, (*axes, -1), *precision.with_wide_numbers(p, t))
    p, t = wide_selected(p, pixel_mask), wide_selected(t, pixel_mask)
    if apply_softmax:
        p = jax.nn.sigmoid(p) if p.shape[-1] == 1 else softmax(p, -1, pixel_mask)
    p = selected(p, pixel_mask)
    overlap, sum_p, sum_t = (run_time.sum_of(x, axes) for x in (product(p, t), p, t))
    if pixel_mask is not mask:
        overlap, sum_p, sum_t = (jnp.where(unmasked_rows, x, 0) for x in (overlap, sum_p, sum_t))
    unmasked_rows = jnp.broadcast_to(unmasked_rows, overlap.shape)
    return elementwise(_of_sums)(overlap, sum_p, sum_t, unmasked_rows, *weights), unmasked_rows


def _of_sums(
    overlap: Array, sum_p: Array, sum_t: Array, unmasked: Array, smooth: Array, alpha: Array, beta: Array
) -> Array:
    union = overlap + alpha * (sum_p - overlap) + beta * (sum_t - overlap) + smooth
    return 1 - (overlap + smooth) / jnp.where(unmasked, union, 1)


def _weight_losses(losses: Array, weights: Array, unmasked_rows: Array) -> Array:
    """The losses `[..., num_classes]` times the weights `[num_classes]`."""
    weights = jnp.expand_dims(precision.with_wide_numbers(losses, weights)[1], range(losses.ndim - 1))
    return losses * selected(weights, unmasked_rows)


def _drop_background(losses: Array, unmasked_rows: Array) -> tuple[Array, Array]:
    """Leaves class 0 out of both, unless it is the only one."""
    return (losses[..., 1:], unmasked_rows[..., 1:]) if losses.shape[-1] > 1 else (losses, unmasked_rows)
