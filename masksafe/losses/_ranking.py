"""Losses of ranked lists of items, some of them relevant."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp

from masksafe._core import precision
from masksafe._core.arguments import as_float_array, as_real_array, broadcast_shapes
from masksafe._core.derivatives import elementwise
from masksafe._core.labels import is_soft
from masksafe._core.masks import read_mask, selected, weighting_of
from masksafe._core.moments import weighted
from masksafe._core.public_op import public_op
from masksafe._core.typing import Array, ArrayLike
from masksafe._reductions import mean
from masksafe.losses._labelled import Labelled
from masksafe.losses._layout import broadcast_widened, find_unmasked_rows
from masksafe.losses._rows._cross_entropy import TargetCrossEntropy
from masksafe.losses._rows._dense import RowLoss, outputs_of_rows


@public_op
def ranking_softmax_loss(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    where: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    reduce_fn: Callable[..., ArrayLike] | None = jnp.mean,
) -> Array:
    r"""The softmax cross-entropy between the relevances and the scores of the items of a list.

    .. math:: \ell = -\sum_i w_i y_i \log \frac{e^{s_i}}{\sum_j e^{s_j}}

    with scores :math:`s`, relevances :math:`y`, weights :math:`w` and the sums over the unmasked items.

    Args:
      logits: scores, floats `[..., list_size]`.
      labels: relevances that broadcast with `logits`; they need not sum to 1.
      where: booleans that broadcast to the common shape of both; False masks an item. A mask of
        lower rank is aligned with the last axes, as in NumPy: to mask rows write `where[..., None]`.
      weights: the weights of the relevances, non-negative numbers that broadcast with `labels`; None means 1. A
        relevance of weight 0 takes no part, even if it is NaN, but the score of its item does. A negative weight is
        NaN.
      reduce_fn: `jnp.mean`, `jnp.sum` or another function of the losses and of a keyword `where`, which is False for
        fully masked lists, or None if there is no mask. A `reduce_fn` of None returns one loss per list. With
        `functools.partial(masksafe.mean, axis_name="data")` it is the mean over all devices.

    Returns:
      The reduced loss, or the losses `[...]`, of the promoted dtype of `logits` and `weights`. Fully masked lists
      have loss 0 and are left out of the mean; the mean of no lists is 0. Masked elements, including labels and
      weights, have gradients of exactly 0.

    Raises:
      TypeError: if `logits` are not floats or `where` is not boolean.
      ValueError: if the shapes do not broadcast.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> scores = jnp.array([[2.0, 1.0, jnp.nan], [1.0, 0.5, 1.5]])
      >>> labels, where = jnp.array([[1, 0, 0], [0, 0, 1]]), ~jnp.isnan(scores)
      >>> print(f"{masksafe.losses.ranking_softmax_loss(scores, labels, where=where):.4f}")
      0.4968

    References:
      `optax.losses.ranking_softmax_loss
      <https://optax.readthedocs.io/en/latest/api/losses.html#optax.losses.ranking_softmax_loss>`_.
    """
    op = "ranking_softmax_loss"
    logits, labels = as_float_array(op, "logits", logits), as_real_array(op, "labels", labels)
    weights = None if weights is None else as_real_array(op, "weights", weights)
    shapes = {"logits": logits.shape, "labels": labels.shape}
    shape = broadcast_shapes(op, **shapes, **({} if weights is None else {"weights": weights.shape}))
    mask = read_mask(op, where, shape, "logits and labels together")
    dtype = logits.dtype if weights is None else precision.promoted(logits.dtype, weights)

    if not is_soft(labels):
        labels = labels.astype(precision.wide_dtype(logits.dtype))
    targets = broadcast_widened(labels, shape)
    if weights is not None:
        targets, weighting = weighting_of(targets, mask, jnp.broadcast_to(weights, shape))
        targets = elementwise(weighted)(precision.widened(selected(targets, weighting.where)), weighting.weights)
    inputs = Labelled(broadcast_widened(logits, shape), targets, mask)
    (losses,) = outputs_of_rows(RowLoss(TargetCrossEntropy(), (len(shape) - 1,)), inputs, None)
    unmasked_rows = find_unmasked_rows(mask, (len(shape) - 1,))
    unmasked_rows = None if unmasked_rows is None else jnp.broadcast_to(unmasked_rows, losses.shape)
    losses = losses.astype(dtype)
    if reduce_fn is None:
        return losses
    if reduce_fn is jnp.mean:
        return mean(losses, where=unmasked_rows)
    return jnp.asarray(reduce_fn(losses, where=unmasked_rows))
