"""The sum and the mean of the unmasked elements."""

from __future__ import annotations

import jax.numpy as jnp

from masksafe._core import sharding
from masksafe._core.masks import selected
from masksafe._core.moments import weighted
from masksafe._core.precision import float_dtype, widened
from masksafe._core.public_op import public_op
from masksafe._core.typing import Array, ArrayLike, Axis, jitted
from masksafe._reductions._arguments import Reduction, prepared


@public_op
def sum(  # noqa: A001
    x: ArrayLike,
    axis: Axis | None = None,
    where: ArrayLike | None = None,
    *,
    weights: ArrayLike | None = None,
    axis_name: sharding.AxisName = None,
    keepdims: bool = False,
) -> Array:
    r"""The sum of the unmasked elements; 0 if there are none.

    .. math:: \sum_{i : \text{where}_i} w_i x_i

    Args:
      x: the array.
      axis: an axis, a tuple of axes, or None for all of them.
      where: booleans that broadcast to the shape of `x`; False is masked, None masks nothing.
      weights: non-negative numbers that broadcast to the shape of `x`; None means 1. An element of weight 0 takes no
        part, even if it is NaN; a negative weight is NaN. A masked weight has no influence, and gets a gradient of 0.
      axis_name: the mesh axis, or a tuple of them, over whose devices the reduction extends as well, inside
        `jax.shard_map`; or the named axis of a `jax.vmap`. All elements of a device may be masked.
      keepdims: keep the reduced axes, with size 1.

    Returns:
      The sum, of the dtype that `jnp.sum` gives of the product of `x` and `weights`, but with weights always a float;
      float16 and bfloat16 are accumulated in float32. The gradient with respect to a masked element is exactly 0.

    Raises:
      TypeError: if `where` is not boolean, or `weights` are not real.
      ValueError: if `where` or `weights` do not broadcast to the shape of `x`, `axis` is out of range, or there is no
        axis of the name `axis_name`.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> x = jnp.array([1.0, 2.0, jnp.nan])
      >>> print(masksafe.sum(x, where=jnp.array([True, True, False])))
      3.0

    References:
      `jax.numpy.sum <https://docs.jax.dev/en/latest/_autosummary/jax.numpy.sum.html>`_.
    """
    return _sum(*prepared("sum", x, axis, where, weights, axis_name, keepdims))


@jitted(0)
def _sum(how: Reduction, x: Array, where: Array | None, weights: Array | None) -> Array:
    rows, x, (where, weights) = how.read(x, where, weights)
    x, dtype = selected(x, where), x.dtype
    keeps_integers = weights is None and not jnp.issubdtype(dtype, jnp.inexact)
    total = jnp.sum(x if keeps_integers else weighted(widened(x), weights), rows.axes, keepdims=how.keepdims)
    total = rows.devices.sum(total)
    return total if keeps_integers else total.astype(float_dtype(dtype))


@public_op
def mean(
    x: ArrayLike,
    axis: Axis | None = None,
    where: ArrayLike | None = None,
    *,
    weights: ArrayLike | None = None,
    axis_name: sharding.AxisName = None,
    keepdims: bool = False,
) -> Array:
    r"""The mean of the unmasked elements; 0 if there are none.

    .. math:: \frac{1}{W} \sum_{i : \text{where}_i} w_i x_i, \qquad W = \sum_{i : \text{where}_i} w_i

    It replaces `jnp.mean(x, where=mask)`, which is NaN for an empty mask, and `x.sum() / mask.sum()`, which is then
    0/0. For a loss over padded tokens write `masksafe.mean(loss, where=mask)`. If the array is sharded across
    devices, this is the mean of the whole array, however unevenly the mask is distributed. Inside `jax.shard_map` that
    needs `axis_name`: the devices exchange their sums and weights, once.

    Args:
      x: the array; integers and booleans are averaged as floats.
      axis: an axis, a tuple of axes, or None for all of them.
      where: booleans that broadcast to the shape of `x`; False is masked, None masks nothing.
      weights: non-negative numbers that broadcast to the shape of `x`; None means 1. An element of weight 0 takes no
        part, even if it is NaN; a negative weight is NaN. A masked weight has no influence, and gets a gradient of 0.
      axis_name: the mesh axis, or a tuple of them, over whose devices the reduction extends as well, inside
        `jax.shard_map`; or the named axis of a `jax.vmap`. All elements of a device may be masked.
      keepdims: keep the reduced axes, with size 1.

    Returns:
      The mean, of the dtype that `jnp.mean` gives of the product of `x` and `weights`; float16 and bfloat16 are
      accumulated in float32 and rounded once. The gradient with respect to a masked element is exactly 0.

    Raises:
      TypeError: if `where` is not boolean, or `weights` are not real.
      ValueError: if `where` or `weights` do not broadcast to the shape of `x`, `axis` is out of range, or there is no
        axis of the name `axis_name`.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> loss = jnp.array([[1.0, 3.0, jnp.nan], [jnp.nan, jnp.nan, jnp.nan]])
      >>> mask = jnp.array([[True, True, False], [False, False, False]])
      >>> print(masksafe.mean(loss, axis=1, where=mask), masksafe.mean(loss, where=mask))
      [2. 0.] 2.0

    References:
      `jax.numpy.mean <https://docs.jax.dev/en/latest/_autosummary/jax.numpy.mean.html>`_.
    """
    return _mean(*prepared("mean", x, axis, where, weights, axis_name, keepdims))


@jitted(0)
def _mean(how: Reduction, x: Array, where: Array | None, weights: Array | None) -> Array:
    rows, x, weighting = how.read(x, where, weights)
    terms = weighted(widened(selected(x, weighting.where)), weighting.weights)
    _, average = rows.average(terms, weighting)
    return how.shaped(rows, average).astype(float_dtype(x.dtype))
