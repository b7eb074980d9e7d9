r"""Counts, means and variances of unmasked elements.

The mean :math:`\mu` is stored in two parts. Its rounding error is up to :math:`2^{-24} |\mu|`, which can exceed the
deviations where the mean is large and the spread small. So the mean of the deviations from the rounded mean, the
remainder, is subtracted as well:

.. math::
  c = \frac{1}{n} \sum_i x_i, \qquad
  r = \frac{1}{n} \sum_i (x_i - c), \qquad
  \mu = c + r, \qquad
  \sum_i (x_i - \mu)^2 = \sum_i ((x_i - c) - r)^2.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp

from masksafe._core.masks import selected
from masksafe._core.typing import Array, Axes


class Mean(NamedTuple):
    """The mean of each row, in two parts; the reduced axes stay, with size 1."""

    centre: Array
    remainder: Array | None  # None where the rounding error of the centre does not matter


def count(x: Array, axes: Axes, where: Array | None) -> Array:
    """The number of unmasked elements of `x`, in the real dtype of `x`; the reduced axes stay."""
    dtype = jnp.finfo(x.dtype).dtype
    if where is None:
        return jnp.full([1] * x.ndim, math.prod(x.shape[a] for a in axes), dtype)
    # Counted before broadcasting: cheaper, and the integer cannot overflow for a huge array.
    repeats = math.prod(x.shape[a] for a in axes if where.shape[a] == 1)
    return jnp.sum(where, axes, keepdims=True).astype(dtype) * repeats


def average(x: Array, axes: Axes, where: Array | None) -> Array:
    """The mean of a wide array that is 0 under the mask; 0 if nothing is left. The reduced axes stay."""
    return jnp.sum(x, axes, keepdims=True) / jnp.maximum(count(x, axes, where), 1)


def mean(x: Array, axes: Axes, where: Array | None, *, in_one_part: bool = False) -> Mean:
    """The mean, in two parts unless `in_one_part`, of a wide array that is 0 under the mask; 0 if nothing is left."""
    centre = average(x, axes, where)
    return Mean(centre, None if in_one_part else average(selected(x - centre, where), axes, where))


def total(mean: Mean) -> Array:
    """The mean in one part. An infinite mean stays infinite, although its remainder (inf - inf) is NaN."""
    if mean.remainder is None:
        return mean.centre
    return jnp.where(jnp.isfinite(mean.centre), mean.centre + mean.remainder, mean.centre)


def deviations(x: Array, mean: Mean, where: Array | None) -> Array:
    """The deviation of each element of a wide array from its mean; 0 under the mask."""
    centred = x - mean.centre
    return selected(centred if mean.remainder is None else centred - mean.remainder, where)


def squares(x: Array, axes: Axes) -> Array:
    """The sum of squared magnitudes; the reduced axes stay."""
    return jnp.sum(jnp.real(x * jnp.conj(x)), axes, keepdims=True)


def is_rounding(variance: Array, mean: Mean) -> Array:
    """Whether a variance is no more than the rounding error of the mean's last part, as for a constant row.

    The bound is far below the variance of a row in which one element differs by a single rounding step.
    """
    last = mean.centre if mean.remainder is None else mean.remainder
    return variance <= jnp.square(4 * jnp.finfo(variance.dtype).eps * jnp.abs(last))
