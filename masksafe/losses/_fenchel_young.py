"""Fenchel-Young losses, defined by a maximum function."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp

from masksafe._core import arguments, precision, row_blocks
from masksafe._core.derivatives import product
from masksafe._core.masks import read_mask, selected
from masksafe._core.public_op import public_op
from masksafe._core.typing import Array, ArrayLike, Pytree, jitted
from masksafe.losses._elementwise import broadcast_alike
from masksafe.losses._layout import find_unmasked_rows


def make_fenchel_young_loss(max_fun: Callable[..., Pytree]) -> Callable[..., Array]:
    r"""Makes the Fenchel-Young loss of a maximum function.

    .. math:: \ell(s, t) = f(s) - \sum_j t_j s_j

    Args:
      max_fun: :math:`f`, a function from a vector `[dim]`, and possibly other arguments, to a scalar. To support masked
        elements it has to accept `where`, as `masksafe.logsumexp` does.

    Returns:
      A function `loss(scores, targets, *args, where=None, **kwargs)` of scores and targets `[..., dim]` that broadcast
      together; the other arguments are passed to `max_fun`. It returns the losses `[...]`, of the float dtype to which
      JAX promotes scores and targets. A boolean mask `where` of the rank of the input masks elements, one of the rank
      of the loss masks rows. The loss of a fully masked row is 0, and masked elements have gradients of exactly 0.
      An offset common to all scores of a row, with targets that add up to 1, cancels only after `max_fun` has rounded
      it: subtract it first where it is large beside the differences, or use `softmax_cross_entropy`, which does.

    Raises:
      TypeError: from the function, if scores or targets are complex or `where` is not boolean.
      ValueError: from the function, if the shapes do not fit.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> loss = masksafe.losses.make_fenchel_young_loss(masksafe.logsumexp)
      >>> scores = jnp.array([[1.0, 0.0, jnp.nan], [jnp.nan] * 3])
      >>> targets = jnp.array([[1.0, 0.0, 0.0]] * 2)
      >>> with jnp.printoptions(precision=4):
      ...     print(loss(scores, targets, where=~jnp.isnan(scores)))
      [0.3133 0.    ]

    References:
      `optax.losses.make_fenchel_young_loss
      <https://optax.readthedocs.io/en/latest/api/losses.html#optax.losses.make_fenchel_young_loss>`_.

      Blondel et al., "Learning with Fenchel-Young Losses", 2020.
    """

    @public_op
    def fenchel_young_loss(
        scores: ArrayLike, targets: ArrayLike, *args: Pytree, where: ArrayLike | None = None, **kwargs: Pytree
    ) -> Array:
        op = "fenchel_young_loss"
        scores, targets = arguments.as_real_array(op, "scores", scores), arguments.as_real_array(op, "targets", targets)
        shape = arguments.broadcast_shapes(op, scores=scores.shape, targets=targets.shape)
        if scores.shape[-1:] != targets.shape[-1:] or not shape:
            expected = f"[..., dim] with the last axis of scores {scores.shape}"
            raise ValueError(arguments.message(op, "targets", f"shape {targets.shape}", expected))
        axes = (len(shape) - 1,)
        mask = read_mask(op, where, shape, "the input", "elements or rows", axes)
        dtype = precision.float_dtype(precision.promoted(scores, targets))
        scores, targets = (jnp.broadcast_to(x, shape) for x in precision.with_wide_numbers(scores, targets))
        s = precision.widened(selected(scores, mask))

        if mask is None or mask.shape[-1] == 1:  # only whole rows are masked: max_fun need not take a mask
            largest = jnp.vectorize(lambda s: max_fun(s, *args, **kwargs), signature="(n)->()")(s)
        else:
            max_of_row = lambda s, w: max_fun(s, *args, where=w, **kwargs)  # noqa: E731
            largest = jnp.vectorize(max_of_row, signature="(n),(n)->()")(*broadcast_alike((s, mask), shape))
        loss = selected(largest - _products(scores, targets, mask), find_unmasked_rows(mask, axes))
        return jnp.broadcast_to(loss, shape[:-1]).astype(dtype)

    return fenchel_young_loss


@jitted()
def _products(scores: Array, targets: Array, mask: Array | None) -> Array:
    """The sum of the products over the unmasked elements of each row; 0 without any."""
    (products,) = row_blocks.sums_over_rows(lambda s, t: (product(s, t),), (scores, targets), mask, (scores.ndim - 1,))
    return selected(products.squeeze(-1), find_unmasked_rows(mask, (scores.ndim - 1,)))
