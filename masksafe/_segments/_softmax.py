"""The softmax over the unmasked rows of each segment, its logarithm, and the logarithm of its sum."""

from __future__ import annotations

from masksafe._core import softmaxes
from masksafe._core.arguments import as_empty_value, as_promoted_float_array
from masksafe._core.masks import Weighting
from masksafe._core.public_op import public_op
from masksafe._core.sharding import AxisName
from masksafe._core.typing import Array, ArrayLike
from masksafe._segments._arguments import compute, compute_for_rows
from masksafe._segments._segments import Segments


@public_op
def segment_logsumexp(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    *,
    where: ArrayLike | None = None,
    indices_are_sorted: bool = False,
    axis_name: AxisName = None,
    empty_value: ArrayLike | None = None,
) -> Array:
    r"""The logarithm of the sum of the exponentials of each segment; -inf, or `empty_value`, for an empty one.

    .. math:: y_s = \log \sum_{i : \text{id}_i = s, \; \text{where}_i} e^{x_i}

    Args:
      data: floats `[N, ...]`; integers become floats.
      segment_ids: integers `[N]`, as for `segment_sum`.
      num_segments: the number of segments or None, as for `segment_sum`.
      where: booleans `[N]` or of the shape of `data`, as for `segment_sum`.
      indices_are_sorted: a bool, as for `segment_sum`.
      axis_name: a mesh axis or several, as for `segment_sum`.
      empty_value: the result of an empty segment, as for `masksafe.max`: inside a model 0.

    Returns:
      The logarithms `[num_segments, ...]`, of the dtype of `data`; float16 and bfloat16 are computed in float32 and
      rounded once. A NaN shows in its own segment alone. The gradient with respect to a masked element is exactly 0.

    Raises:
      TypeError, ValueError: as `segment_sum`; also if `data` is complex, or its dtype does not hold `empty_value`.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> x, ids = jnp.array([1.0, 2.0, 2.0, jnp.nan]), jnp.array([0, 2, 2, -1])
      >>> print(masksafe.segment_logsumexp(x, ids, 3).round(4))
      [1.       -inf 2.6931]

    References:
      `jax.nn.logsumexp <https://docs.jax.dev/en/latest/_autosummary/jax.nn.logsumexp.html>`_, for rows.
    """
    op = "segment_logsumexp"
    data = as_promoted_float_array(op, "data", data)
    empty = as_empty_value(op, empty_value, data.dtype)
    return compute(
        op, _logsumexp, data, segment_ids, num_segments, where, indices_are_sorted, axis_name, empty_value=empty
    )


@public_op
def segment_softmax(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    *,
    where: ArrayLike | None = None,
    indices_are_sorted: bool = False,
    axis_name: AxisName = None,
) -> Array:
    r"""The softmax over the unmasked rows of each segment; 0 at the masked ones.

    .. math:: p_i = \frac{e^{x_i}}{\sum_{j : \text{id}_j = \text{id}_i, \; \text{where}_j} e^{x_j}}

    Args:
      data: floats `[N, ...]`, such as the logits `[edges, heads]` of an attention over a graph; integers become floats.
      segment_ids: integers `[N]`, as for `segment_sum`.
      num_segments: the number of segments or None, as for `segment_sum`.
      where: booleans `[N]` or of the shape of `data`, as for `segment_sum`.
      indices_are_sorted: a bool, as for `segment_sum`.
      axis_name: a mesh axis or several, as for `segment_sum`, but each device gets the results of its own rows.

    Returns:
      An array of the shape and dtype of `data`; float16 and bfloat16 are computed in float32 and rounded once. The
      unmasked elements of a segment are NaN if one of them is NaN or +inf, or if all of them are -inf; no other segment
      is. The gradient with respect to a masked element is exactly 0.

    Raises:
      TypeError, ValueError: as `segment_sum`; also if `data` is complex.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> x, ids = jnp.array([1.0, 2.0, 2.0, jnp.nan]), jnp.array([0, 2, 2, -1])
      >>> print(masksafe.segment_softmax(x, ids, 3))
      [1.  0.5 0.5 0. ]

    References:
      `jraph.segment_softmax <https://github.com/google-deepmind/jraph>`_, which it replaces.
    """
    op = "segment_softmax"
    data = as_promoted_float_array(op, "data", data)
    return compute_for_rows(op, _softmax, data, segment_ids, num_segments, where, indices_are_sorted, axis_name)


@public_op
def segment_log_softmax(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    *,
    where: ArrayLike | None = None,
    indices_are_sorted: bool = False,
    axis_name: AxisName = None,
) -> Array:
    r"""The logarithm of the softmax over the unmasked rows of each segment; -inf at the masked ones.

    .. math:: \log p_i = x_i - \log \sum_{j : \text{id}_j = \text{id}_i, \; \text{where}_j} e^{x_j}

    Args:
      data: floats `[N, ...]`; integers become floats.
      segment_ids: integers `[N]`, as for `segment_sum`.
      num_segments: the number of segments or None, as for `segment_sum`.
      where: booleans `[N]` or of the shape of `data`, as for `segment_sum`.
      indices_are_sorted: a bool, as for `segment_sum`.
      axis_name: a mesh axis or several, as for `segment_sum`, but each device gets the results of its own rows.

    Returns:
      An array of the shape and dtype of `data`; float16 and bfloat16 are computed in float32 and rounded once. The
      unmasked elements of a segment are NaN if one of them is NaN or +inf, or if all of them are -inf; no other segment
      is. The gradient with respect to a masked element is exactly 0.

    Raises:
      TypeError, ValueError: as `segment_sum`; also if `data` is complex.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> x, ids = jnp.array([1.0, 2.0, 2.0, jnp.nan]), jnp.array([0, 2, 2, -1])
      >>> print(masksafe.segment_log_softmax(x, ids, 3).round(4))
      [ 0.     -0.6931 -0.6931    -inf]

    References:
      `jax.nn.log_softmax <https://docs.jax.dev/en/latest/_autosummary/jax.nn.log_softmax.html>`_, for rows.
    """
    op = "segment_log_softmax"
    data = as_promoted_float_array(op, "data", data)
    return compute_for_rows(op, _log_softmax, data, segment_ids, num_segments, where, indices_are_sorted, axis_name)


def _logsumexp(segments: Segments, x: Array, weighting: Weighting) -> Array:
    return softmaxes.wide_logsumexp(segments, x, weighting.where).astype(x.dtype)


def _softmax(segments: Segments, x: Array, weighting: Weighting) -> Array:
    return softmaxes.softmax(segments, x, weighting.where)


def _log_softmax(segments: Segments, x: Array, weighting: Weighting) -> Array:
    return softmaxes.wide_log_softmax(segments, x, weighting.where).astype(x.dtype)
