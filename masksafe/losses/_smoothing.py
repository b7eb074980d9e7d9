"""Label smoothing."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from masksafe._core import arguments, label_checks
from masksafe._core.masks import Weighting, read_mask, selected
from masksafe._core.moments import total_weight
from masksafe._core.precision import widened, with_wide_numbers
from masksafe._core.public_op import public_op
from masksafe._core.typing import Array, ArrayLike, Axes, Axis, Pytree, jitted
from masksafe.losses._elementwise import as_promoted
from masksafe.losses._layout import wide_selected


@public_op
def smooth_labels(
    labels: ArrayLike, alpha: ArrayLike, *, axis: Axis | None = -1, where: ArrayLike | None = None
) -> Array:
    r"""Label smoothing: a part of each distribution is spread evenly over the unmasked classes.

    .. math:: s_j = (1 - \alpha) t_j + \frac{\alpha}{n}, \qquad n = |\{j : \text{where}_j\}|

    Args:
      labels: :math:`t`, one-hot rows or distributions, floats `[..., num_classes]`.
      alpha: the part that is spread, in [0, 1].
      axis: the axis or axes of the classes; None means all axes.
      where: booleans that broadcast to the shape of `labels`; False masks a class. A mask of
        lower rank is aligned with the last axes, as in NumPy: to mask rows write `where[..., None]`.

    Returns:
      The smoothed labels, of the common shape of `labels` and `alpha` and the dtype to which JAX promotes both; 0 at
      masked classes. A distribution over the unmasked classes stays a distribution. Masked elements have gradients of
      exactly 0.

    Raises:
      TypeError: if `labels` are not floats or `where` is not boolean.
      ValueError: if `where` does not broadcast to the shape of `labels`, `axis` is out of range, or the number `alpha`
        is outside [0, 1]; for an unmasked element of an array `alpha`, while label checks are on.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> labels, mask = jnp.array([1.0, 0.0, jnp.nan]), jnp.array([True, True, False])
      >>> with jnp.printoptions(precision=4):
      ...     print(masksafe.losses.smooth_labels(labels, 0.1, where=mask))
      [0.95 0.05 0.  ]

    References:
      `optax.losses.smooth_labels
      <https://optax.readthedocs.io/en/latest/api/losses.html#optax.losses.smooth_labels>`_.

      Müller et al., "When does label smoothing help?", 2019.
    """
    op = "smooth_labels"
    labels, alpha = arguments.as_float_array(op, "labels", labels), arguments.as_real_operand(op, "alpha", alpha)
    axes = arguments.canonical_axes(op, axis, labels.ndim)
    mask = read_mask(op, where, labels.shape, "labels")
    shape = arguments.broadcast_shapes(op, labels=labels.shape, alpha=np.shape(alpha))
    bad = label_checks.check_numbers(op, "alpha", alpha, _FROM_0_TO_1, shape, mask)
    return _smooth(axes, labels, alpha, mask, bad)


_FROM_0_TO_1 = label_checks.Range(lambda x: (x >= 0) & (x <= 1), "in [0, 1]")


@jitted(0)
def _smooth(axes: Axes, labels: Array, alpha: Pytree, mask: Array | None, bad: Array | None) -> Array:
    wide, wide_alpha = wide_selected(labels, mask), widened(with_wide_numbers(labels, alpha)[1])
    size = math.prod(labels.shape[a] for a in axes)
    number = size if mask is None else total_weight(wide, axes, Weighting(mask, None))
    smoothed = (1 - wide_alpha) * wide + wide_alpha / jnp.maximum(jnp.asarray(number, wide.dtype), 1)
    return as_promoted([labels, alpha / 1], label_checks.nan_where_bad(selected(smoothed, mask), bad))
