"""The sum and the mean of the unmasked rows of each segment."""

from __future__ import annotations

import jax.numpy as jnp

from masksafe._core.arguments import as_array
from masksafe._core.masks import Weighting
from masksafe._core.precision import float_dtype, widened
from masksafe._core.public_op import public_op
from masksafe._core.sharding import AxisName
from masksafe._core.typing import Array, ArrayLike
from masksafe._segments._arguments import compute
from masksafe._segments._segments import Segments, average


@public_op
def segment_sum(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    *,
    where: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    indices_are_sorted: bool = False,
    axis_name: AxisName = None,
) -> Array:
    r"""The sum of the unmasked rows of each segment; 0 for an empty one.

    .. math:: y_s = \sum_{i : \text{id}_i = s, \; \text{where}_i} w_i x_i

    Args:
      data: an array `[N, ...]`.
      segment_ids: integers `[N]`, the segment of each row. A row with an id outside [0, num_segments) is masked, like
        the padding of graphs. While label checks are on, ids out of range are reported, except -1 and `num_segments`.
      num_segments: the number of segments; None counts those up to the largest id of an unmasked row, which has to be
        known while tracing.
      where: booleans `[N]`, for rows, or of the shape of `data`, for elements; False is masked.
      weights: non-negative numbers `[N]` or of the shape of `data`; None means 1. An element of weight 0 takes no part,
        even if it is NaN; a negative weight is NaN.
      indices_are_sorted: whether the ids are in ascending order, which makes some devices faster. If they are not, the
        result is undefined.
      axis_name: the mesh axis, or a tuple of them, over whose devices the rows are split, inside `jax.shard_map`. Ids
        count the segments of all devices, and each gets all of them.

    Returns:
      The sums `[num_segments, ...]`, of the dtype that `jnp.sum` gives of the product of `data` and `weights`, but with
      weights always a float; float16 and bfloat16 are summed in float32 and rounded once. A NaN shows in its own
      segment alone. The gradient with respect to a masked element is exactly 0.

    Raises:
      TypeError: if `segment_ids` are not integers, `where` is not boolean, or `num_segments` is None and the ids
        are traced.
      ValueError: if the shapes do not fit, or there is no axis of the name `axis_name`. While label checks are on, for
        an id out of range.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> x, ids = jnp.array([1.0, 2.0, 4.0, jnp.nan]), jnp.array([0, 2, 2, -1])
      >>> print(masksafe.segment_sum(x, ids, 3))
      [1. 0. 6.]
      >>> print(masksafe.segment_sum(x, ids, 3, where=jnp.array([True, True, False, True])))
      [1. 0. 2.]

    References:
      `jax.ops.segment_sum <https://docs.jax.dev/en/latest/_autosummary/jax.ops.segment_sum.html>`_, which it replaces.
    """
    data, op = as_array("segment_sum", "data", data), "segment_sum"
    return compute(op, _sum, data, segment_ids, num_segments, where, indices_are_sorted, axis_name, weights)


@public_op
def segment_mean(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    *,
    where: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    indices_are_sorted: bool = False,
    axis_name: AxisName = None,
) -> Array:
    r"""The mean of the unmasked rows of each segment; 0 for an empty one.

    .. math::
      y_s = \frac{1}{W_s} \sum_{i : \text{id}_i = s, \; \text{where}_i} w_i x_i, \qquad
      W_s = \sum_{i : \text{id}_i = s, \; \text{where}_i} w_i

    Args:
      data: an array `[N, ...]`; integers and booleans are averaged as floats.
      segment_ids: integers `[N]`, as for `segment_sum`.
      num_segments: the number of segments or None, as for `segment_sum`.
      where: booleans `[N]` or of the shape of `data`, as for `segment_sum`.
      weights: numbers `[N]` or of the shape of `data`, as for `segment_sum`.
      indices_are_sorted: a bool, as for `segment_sum`.
      axis_name: a mesh axis or several, as for `segment_sum`.

    Returns:
      The means `[num_segments, ...]`, of the dtype of the product of `data` and `weights`; float16 and bfloat16
      are summed in float32 and rounded once. A NaN shows in its own segment alone. The gradient with respect to a
      masked element is exactly 0.

    Raises:
      TypeError, ValueError: as `segment_sum`.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> x, ids = jnp.array([1.0, 2.0, 4.0, jnp.nan]), jnp.array([0, 2, 2, -1])
      >>> print(masksafe.segment_mean(x, ids, 3))
      [1. 0. 3.]

    References:
      `jraph.segment_mean <https://github.com/google-deepmind/jraph>`_.
    """
    data, op = as_array("segment_mean", "data", data), "segment_mean"
    return compute(op, _mean, data, segment_ids, num_segments, where, indices_are_sorted, axis_name, weights)


def _sum(segments: Segments, x: Array, weighting: Weighting) -> Array:
    if weighting.weights is None and not jnp.issubdtype(x.dtype, jnp.inexact):
        return segments.sum(x.astype(jnp.sum(x[:0]).dtype), weighting.where)
    return segments.weighted_sum(widened(x), weighting).astype(float_dtype(x.dtype))


def _mean(segments: Segments, x: Array, weighting: Weighting) -> Array:
    total, weight = segments.weighted_sum(widened(x), weighting), segments.weight(x, weighting)
    return average(total, weight, weighting).astype(float_dtype(x.dtype))
