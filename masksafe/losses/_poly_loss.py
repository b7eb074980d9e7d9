"""PolyLoss: the softmax cross-entropy with a different weight on the first term of its series."""

from __future__ import annotations

import jax.numpy as jnp

from masksafe._core import arguments, label_checks, precision
from masksafe._core.masks import read_mask, selected
from masksafe._core.public_op import public_op
from masksafe._core.typing import Array, ArrayLike, Axes, Axis, DType, jitted
from masksafe.losses import _layout
from masksafe.losses._labelled import Labelled
from masksafe.losses._rows._cross_entropy import TargetCrossEntropy
from masksafe.losses._rows._dense import RowLoss, outputs_of_rows


@public_op
def poly_loss_cross_entropy(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    epsilon: ArrayLike = 2.0,
    axis: Axis | None = -1,
    where: ArrayLike | None = None,
) -> Array:
    r"""The PolyLoss: softmax cross-entropy with a different coefficient of the first term of its series.

    .. math:: \ell = -\sum_j t_j \log p_j + \epsilon \sum_j t_j (1 - p_j)

    with labels :math:`t`, the softmax :math:`p` of the logits, and all sums over the unmasked classes.

    Args:
      logits: unnormalised log probabilities, floats `[..., num_classes]`.
      labels: a distribution over the classes for every row, floats that broadcast with `logits`.
      epsilon: the weight of the second sum.
      axis: the axis or axes of the classes; None means all axes.
      where: booleans; False is masked. A mask of the rank of `logits` masks classes and broadcasts to their shape. A
        mask of lower rank masks rows: for logits `[2, 2]`, a mask `(2,)` masks rows.

    Returns:
      The losses `[...]`, of the dtype to which JAX promotes `logits`, `labels` and `epsilon`; 0 for a fully masked
      row. Masked elements have gradients of exactly 0. For infinite logits and bad labels see `softmax_cross_entropy`.

    Raises:
      TypeError: if `logits` or `labels` are not floats or `where` is not boolean.
      ValueError: if the shapes do not broadcast or `axis` is out of range. While label checks are on, for a bad label.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> logits, labels = jnp.array([[0.0, 0.0], [jnp.nan, 0.0]]), jnp.eye(2)
      >>> where = jnp.array([True, False])
      >>> with jnp.printoptions(precision=4):
      ...     print(masksafe.losses.poly_loss_cross_entropy(logits, labels, where=where))
      [1.6931 0.    ]

    References:
      `optax.losses.poly_loss_cross_entropy
      <https://optax.readthedocs.io/en/latest/api/losses.html#optax.losses.poly_loss_cross_entropy>`_.

      Leng et al., "PolyLoss: A Polynomial Expansion Perspective of Classification Loss Functions", 2022.
    """
    op = "poly_loss_cross_entropy"
    logits, labels = arguments.as_float_array(op, "logits", logits), arguments.as_float_array(op, "labels", labels)
    epsilon = arguments.as_real_array(op, "epsilon", epsilon)
    dtype = precision.promoted(logits.dtype, labels, epsilon)
    shape = arguments.broadcast_shapes(op, logits=logits.shape, labels=labels.shape)
    axes = arguments.canonical_axes(op, axis, len(shape))
    mask = read_mask(op, where, shape, "logits and labels together", "classes or rows", axes, logits.ndim)
    bad_rows = label_checks.check_distributions(op, _layout.broadcast_widened(labels, shape), mask, axes)
    return _evaluate(axes, dtype, logits, labels, epsilon, mask, bad_rows)


@jitted(0, 1)
def _evaluate(
    axes: Axes, dtype: DType, logits: Array, labels: Array, epsilon: Array, mask: Array | None, bad_rows: Array | None
) -> Array:
    shape = jnp.broadcast_shapes(logits.shape, labels.shape)
    rows = _layout.shape_without(axes, shape)
    # An epsilon of more axes than the rows has several values for each of them.
    more = max(0, epsilon.ndim - len(rows))
    axes, rows = tuple(a + more for a in axes), jnp.broadcast_shapes(rows, epsilon.shape)
    shape = _layout.shape_with_classes(axes, rows, (1,) * more + shape)
    logits, labels = _layout.broadcast_widened(logits, shape), _layout.broadcast_widened(labels, shape)
    mask = None if mask is None else jnp.expand_dims(mask, range(more))
    epsilon = epsilon.astype(precision.wide_dtype(jnp.promote_types(logits.dtype, labels.dtype)))
    # Selected for the sake of checkify, which would report a NaN on its way to a masked loss.
    epsilon = selected(jnp.broadcast_to(epsilon, rows), _layout.find_unmasked_rows(mask, axes))
    config = RowLoss(TargetCrossEntropy(), axes)
    (losses,) = outputs_of_rows(config, Labelled(logits, labels, mask), epsilon.reshape(*rows, 1))
    return label_checks.nan_where_bad(losses.astype(dtype), bad_rows)
