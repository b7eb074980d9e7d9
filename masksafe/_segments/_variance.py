"""The variance of the unmasked rows of each segment, and rows made standard by it.

A mean has two parts: an element of the segment, and the mean of the deviations from it. So a
common offset costs no digits, and a segment of equal elements has a variance of exactly 0. Rows have other moments
(`_core/moments.py`): their centre is the average, and XLA needs barriers at other places.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from masksafe._core import platforms, run_time
from masksafe._core.arguments import as_epsilon, as_promoted_float_array, as_real_array
from masksafe._core.derivatives import masked_in_derivatives
from masksafe._core.masks import Weighting, both, selected
from masksafe._core.moments import weighted
from masksafe._core.precision import float_dtype, widened
from masksafe._core.public_op import public_op
from masksafe._core.sharding import AxisName
from masksafe._core.typing import Array, ArrayLike, Pytree
from masksafe._segments._arguments import compute, compute_for_rows
from masksafe._segments._segments import Segments, average


@public_op
def segment_var(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    *,
    where: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    indices_are_sorted: bool = False,
    axis_name: AxisName = None,
) -> Array:
    r"""The variance of the unmasked rows of each segment; 0 for an empty one.

    .. math::
      y_s = \frac{1}{W_s} \sum_{i : \text{id}_i = s, \; \text{where}_i} w_i (x_i - \mu_s)^2

    with :math:`W_s` and the mean :math:`\mu_s` as for `segment_mean`.

    Args:
      data: a real array `[N, ...]`; integers and booleans count as floats.
      segment_ids: integers `[N]`, as for `segment_sum`.
      num_segments: the number of segments or None, as for `segment_sum`.
      where: booleans `[N]` or of the shape of `data`, as for `segment_sum`.
      weights: numbers `[N]` or of the shape of `data`, as for `segment_sum`.
      indices_are_sorted: a bool, as for `segment_sum`.
      axis_name: a mesh axis or several, as for `segment_sum`.

    Returns:
      The variances `[num_segments, ...]`, of the dtype of the product of `data` and `weights`; float16 and bfloat16 are
      computed in float32 and rounded once. A large offset costs no digits, and equal elements have a variance of
      exactly 0. A NaN shows in its own segment alone. The gradient with respect to a masked element is exactly 0.

    Raises:
      TypeError, ValueError: as `segment_sum`; also if `data` is complex.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> x, ids = jnp.array([1.0, 20002.0, 20004.0, jnp.nan]), jnp.array([0, 2, 2, -1])
      >>> print(masksafe.segment_var(x, ids, 3))
      [0. 0. 1.]

    References:
      `jraph.segment_variance <https://github.com/google-deepmind/jraph>`_.
    """
    data, op = as_real_array("segment_var", "data", data), "segment_var"
    return compute(op, _var, data, segment_ids, num_segments, where, indices_are_sorted, axis_name, weights)


@public_op
def segment_standardize(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    *,
    where: ArrayLike | None = None,
    indices_are_sorted: bool = False,
    epsilon: float = 1e-5,
    axis_name: AxisName = None,
) -> Array:
    r"""Each unmasked element less the mean of its segment, over its standard deviation; 0 where masked.

    .. math:: y_i = \frac{x_i - \mu_{\text{id}_i}}{\sqrt{\sigma^2_{\text{id}_i} + \epsilon}}

    with the mean :math:`\mu` of `segment_mean` and the variance :math:`\sigma^2` of `segment_var`. With groups of
    answers to a question as segments and rewards as data these are the advantages of GRPO.

    Args:
      data: floats `[N, ...]`; integers become floats.
      segment_ids: integers `[N]`, as for `segment_sum`.
      num_segments: the number of segments or None, as for `segment_sum`.
      where: booleans `[N]` or of the shape of `data`, as for `segment_sum`.
      indices_are_sorted: a bool, as for `segment_sum`.
      epsilon: added to the variance; 0 or more.
      axis_name: a mesh axis or several, as for `segment_sum`, but each device gets the results of its own rows.

    Returns:
      An array of the shape and dtype of `data`; float16 and bfloat16 are computed in float32 and rounded once. A large
      offset costs no digits, and equal elements become exactly 0. A NaN shows in its own segment alone. The gradient
      with respect to a masked element is exactly 0.

    Raises:
      TypeError, ValueError: as `segment_sum`; also if `data` is complex.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> rewards = jnp.array([1.0, 0.0, 7.0, 9.0, jnp.nan])
      >>> ids = jnp.array([0, 0, 1, 1, -1])
      >>> print(masksafe.segment_standardize(rewards, ids, 2).round(3))
      [ 1. -1. -1.  1.  0.]

    References:
      `jraph.segment_normalize <https://github.com/google-deepmind/jraph>`_; `DeepSeekMath
      <https://arxiv.org/abs/2402.03300>`_, for groups of rewards.
    """
    op = "segment_standardize"
    data, options = as_promoted_float_array(op, "data", data), (as_epsilon(op, epsilon),)
    args = data, segment_ids, num_segments, where, indices_are_sorted, axis_name
    return compute_for_rows(op, _standardize, *args, options=options)


class _Mean(NamedTuple):
    """The mean of each segment in two parts: one of its elements, and the mean of the deviations from it."""

    centre: Array
    remainder: Array


def _moments(segments: Segments, x: Array, weighting: Weighting) -> tuple[_Mean, Array, Array]:
    """The mean, the variance and the weight of each segment."""
    where, weights = weighting
    counted = where if weights is None else both(where, weights != 0)  # an element of weight 0 may be far from the mean
    centre, weight = lax.stop_gradient(_unmasked_element(segments, x, counted)), segments.weight(x, weighting)
    centre = centre if weights is None else jnp.where(weight == 0, 0, centre)
    mean_of = lambda d: average(segments.sum(d, where), weight, weighting)  # noqa: E731
    from_centre = selected(widened(x) - segments.gathered(centre), where)
    # Unfused twice, so that XLA does not see one mean: on a CPU it would keep the deviations from it, which have the
    # size of the data, for the next use (jax 0.12, 100000x16 in 20000 segments: 13.5 MiB of temporaries for 3.7).
    mean = platforms.unfused(_Mean(centre, mean_of(weighted(from_centre, weights))), on="cpu")
    deviations = _deviations(segments, x, where, mean)
    # The weight comes before the square, which may overflow: infinity times 0 is NaN.
    variance = mean_of(weighted(deviations, weights) * deviations)
    # For equal elements it is a rounding error of the remainder, far below one rounding step of an element.
    rounding = jnp.square(4 * jnp.finfo(variance.dtype).eps * mean.remainder)
    is_rounding = (variance <= rounding) & (variance < jnp.inf)  # both may overflow
    variance -= lax.stop_gradient(jnp.where(is_rounding, variance, 0))  # the derivatives stay
    return platforms.unfused(mean, on="cpu"), variance, weight


def _unmasked_element(segments: Segments, x: Array, where: Array | None) -> Array:
    """An unmasked element of each segment, wide; over devices, the average of their elements.

    For an empty segment it may be anything, since no row is compared with it.
    """
    number = jnp.arange(x.shape[0], dtype=jnp.int32).reshape(-1, *[1] * (x.ndim - 1))
    # Unknown: XLA would compute it of a million constant ids while it compiles, in 12 s (jax 0.12; jax 0.10: 24 s).
    start = run_time.unknown(-1, jnp.int32)
    last = segments.combined("max", jnp.where(segments.unmasked(x, where), number, -1), start)
    if all(n == 1 for n in last.shape[1:]):
        elements = widened(dataclasses.replace(segments, ids=jnp.maximum(last, 0).reshape(-1)).gathered(x))
    else:
        last = jnp.broadcast_to(last, (segments.number, *x.shape[1:]))
        elements = widened(jnp.take_along_axis(x, jnp.maximum(last, 0), 0))
    if not segments.devices.are_many:
        return elements
    has_element = (last >= 0).astype(elements.dtype)
    share = has_element / jnp.maximum(segments.devices.sum(has_element), 1)  # before the sum, which might overflow
    return segments.devices.sum(selected(elements, last >= 0) * share)


def _deviations(segments: Segments, x: Array, where: Array | None, mean: _Mean) -> Array:
    """The deviation of each element from the mean of its segment; masked rows may hold anything."""
    return selected(widened(x) - segments.gathered(mean.centre) - segments.gathered(mean.remainder), where)


@jax.custom_jvp
def _var(segments: Segments, x: Array, weighting: Weighting) -> Array:
    return _moments(segments, x, weighting)[1].astype(float_dtype(x.dtype))


@functools.partial(_var.defjvp, symbolic_zeros=True)
def _derivative_of_variance(primals: Pytree, tangents: Pytree) -> tuple[Array, Array]:
    """The derivative of the mean drops out, since the deviations sum to 0."""
    (segments, x, weighting), (_, d_x, (_, d_weights)) = primals, tangents
    unmasked = segments.unmasked(x, weighting.where)
    x = masked_in_derivatives(x, unmasked)
    mean, variance, weight = _moments(segments, x, weighting)
    deviations = selected(_deviations(segments, x, weighting.where, mean), unmasked)
    tangent = jnp.zeros_like(variance)
    if not isinstance(d_x, SymbolicZero):
        terms = 2 * weighted(deviations, weighting.weights) * widened(d_x)
        tangent += average(segments.sum(terms, weighting.where), weight, weighting)
    if not isinstance(d_weights, SymbolicZero | None):
        d_weights = d_weights.astype(deviations.dtype)
        terms = d_weights * deviations * deviations - d_weights * segments.gathered(variance)
        tangent += average(segments.sum(terms, weighting.where), weight, weighting)
    return variance.astype(float_dtype(x.dtype)), tangent.astype(float_dtype(x.dtype))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _standardize(epsilon: float, segments: Segments, x: Array, weighting: Weighting) -> Array:
    return _standard(epsilon, segments, x, weighting)[0].astype(x.dtype)


def _standard(epsilon: float, segments: Segments, x: Array, weighting: Weighting) -> tuple[Array, Array, Array]:
    """The standardized elements, the factor of each segment, and the number of its elements."""
    mean, variance, number = _moments(segments, x, weighting)
    unmasked, deviation = segments.unmasked(x, weighting.where), _root(variance + epsilon)
    # XLA treats a quotient as expensive, so that later uses read it rather than compute it again (jax 0.12, a CPU, the
    # gradient of 100000x16: 6.2 MiB of temporaries for 7.4; with jax 0.10 7.4 for 6.2; for an H100 alike).
    deviations = selected(_deviations(segments, x, weighting.where, mean), unmasked)
    return deviations / selected(segments.gathered_once(deviation), unmasked, 1), 1 / deviation, number


def _root(variance: Array) -> Array:
    """The square root as a divisor: infinity for 0, so that 0 divided by it is 0, with a derivative of 0."""
    is_zero = variance == 0
    return jnp.where(is_zero, jnp.inf, jnp.sqrt(jnp.where(is_zero, 1, variance)))


@_standardize.defjvp
def _derivative_of_standard(epsilon: float, primals: Pytree, tangents: Pytree) -> tuple[Array, Array]:
    segments, x, weighting = primals
    where = weighting.where
    unmasked = segments.unmasked(x, where)
    x = masked_in_derivatives(x, unmasked)
    y, factor, number = _standard(epsilon, segments, x, weighting)
    y = platforms.unfused(y)
    d_x = widened(selected(tangents[1], unmasked))
    # The factor and its sign come last: so the transpose sums the cotangents as they are, without a copy.
    mean_of = lambda d: average(segments.sum(d, where), number, weighting)  # noqa: E731
    gathered_mean = lambda d: segments.gathered_to_unmasked(-factor * mean_of(d), d, where)  # noqa: E731
    d_y = selected(segments.gathered_once(-factor) * -d_x, unmasked) + gathered_mean(d_x) + y * gathered_mean(d_x * y)
    return y.astype(x.dtype), d_y.astype(x.dtype)
