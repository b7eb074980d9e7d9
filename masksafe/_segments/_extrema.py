"""The largest and the smallest of the unmasked rows of each segment."""

from __future__ import annotations

import functools

from masksafe._core import platforms
from masksafe._core.arguments import as_empty_value, as_real_array
from masksafe._core.extrema import extremum, over_devices
from masksafe._core.masks import Weighting
from masksafe._core.public_op import public_op
from masksafe._core.sharding import AxisName
from masksafe._core.typing import Array, ArrayLike
from masksafe._segments._arguments import compute
from masksafe._segments._segments import Segments


@public_op
def segment_max(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    *,
    where: ArrayLike | None = None,
    indices_are_sorted: bool = False,
    axis_name: AxisName = None,
    empty_value: ArrayLike | None = None,
) -> Array:
    r"""The largest unmasked element of each segment; -inf, or `empty_value`, for an empty one.

    .. math:: y_s = \max_{i : \text{id}_i = s, \; \text{where}_i} x_i

    Args:
      data: a real array `[N, ...]`.
      segment_ids: integers `[N]`, as for `segment_sum`.
      num_segments: the number of segments or None, as for `segment_sum`.
      where: booleans `[N]` or of the shape of `data`, as for `segment_sum`.
      indices_are_sorted: a bool, as for `segment_sum`.
      axis_name: a mesh axis or several, as for `segment_sum`.
      empty_value: the maximum of an empty segment, as for `masksafe.max`: inside a model 0.

    Returns:
      The maxima `[num_segments, ...]`, of the dtype of `data`; an empty segment's is `empty_value`, by default -inf, or
      the lowest integer. A NaN shows in its own segment alone. Equal largest elements share the gradient, which is
      exactly 0 at masked ones.

    Raises:
      TypeError, ValueError: as `segment_sum`; also if `data` is complex, or its dtype does not hold `empty_value`.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> x, ids = jnp.array([1.0, 2.0, 4.0, jnp.nan]), jnp.array([0, 2, 2, -1])
      >>> print(masksafe.segment_max(x, ids, 3))
      [  1. -inf   4.]

    References:
      `jax.ops.segment_max <https://docs.jax.dev/en/latest/_autosummary/jax.ops.segment_max.html>`_, which it replaces;
      `jraph.segment_max_or_constant <https://github.com/google-deepmind/jraph>`_, which has such a value.
    """
    data, op = as_real_array("segment_max", "data", data), "segment_max"
    empty = as_empty_value(op, empty_value, data.dtype)
    return compute(op, _max, data, segment_ids, num_segments, where, indices_are_sorted, axis_name, empty_value=empty)


@public_op
def segment_min(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    *,
    where: ArrayLike | None = None,
    indices_are_sorted: bool = False,
    axis_name: AxisName = None,
    empty_value: ArrayLike | None = None,
) -> Array:
    r"""The smallest unmasked element of each segment; +inf, or `empty_value`, for an empty one.

    .. math:: y_s = \min_{i : \text{id}_i = s, \; \text{where}_i} x_i

    Args:
      data: a real array `[N, ...]`.
      segment_ids: integers `[N]`, as for `segment_sum`.
      num_segments: the number of segments or None, as for `segment_sum`.
      where: booleans `[N]` or of the shape of `data`, as for `segment_sum`.
      indices_are_sorted: a bool, as for `segment_sum`.
      axis_name: a mesh axis or several, as for `segment_sum`.
      empty_value: the minimum of an empty segment, as for `masksafe.max`: inside a model 0.

    Returns:
      The minima `[num_segments, ...]`, of the dtype of `data`; an empty segment's is `empty_value`, by default +inf, or
      the highest integer. A NaN shows in its own segment alone. Equal smallest elements share the gradient, which is
      exactly 0 at masked ones.

    Raises:
      TypeError, ValueError: as `segment_sum`; also if `data` is complex, or its dtype does not hold `empty_value`.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> x, ids = jnp.array([1.0, 2.0, 4.0, jnp.nan]), jnp.array([0, 2, 2, -1])
      >>> print(masksafe.segment_min(x, ids, 3))
      [ 1. inf  2.]

    References:
      `jax.ops.segment_min <https://docs.jax.dev/en/latest/_autosummary/jax.ops.segment_min.html>`_, which it replaces.
    """
    data, op = as_real_array("segment_min", "data", data), "segment_min"
    empty = as_empty_value(op, empty_value, data.dtype)
    return compute(op, _min, data, segment_ids, num_segments, where, indices_are_sorted, axis_name, empty_value=empty)


def _max(segments: Segments, x: Array, weighting: Weighting) -> Array:
    return extremum(_reduce, True, segments, x, weighting.where)


def _min(segments: Segments, x: Array, weighting: Weighting) -> Array:
    return extremum(_reduce, False, segments, x, weighting.where)


def _reduce(is_max: bool, segments: Segments, x: Array, limit: Array | float) -> Array:
    """The extremum of each segment, over all devices; NaN if an unmasked element is NaN."""
    on_cpu = functools.partial(segments.extremum, is_max, limit=limit)
    on_accelerator = functools.partial(segments.extremum_by_order, is_max, limit=limit, is_wide=True)
    return over_devices(is_max, platforms.by_platform(on_accelerator, x, cpu=on_cpu), segments.devices)
