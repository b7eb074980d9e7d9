"""The variance of the unmasked elements."""

from __future__ import annotations

import functools

import jax.numpy as jnp

from masksafe._core import arguments, row_blocks, sharding
from masksafe._core.derivatives import rule
from masksafe._core.masks import Weighting, selected
from masksafe._core.moments import Moments, Rows, moments, pull_back
from masksafe._core.precision import float_dtype
from masksafe._core.public_op import public_op
from masksafe._core.typing import Array, ArrayLike, Axis, jitted
from masksafe._reductions._arguments import Reduction, prepared


@public_op
def var(
    x: ArrayLike,
    axis: Axis | None = None,
    where: ArrayLike | None = None,
    *,
    weights: ArrayLike | None = None,
    axis_name: sharding.AxisName = None,
    correction: float = 0,
    keepdims: bool = False,
) -> Array:
    r"""The variance of the unmasked elements; 0 if there are none.

    .. math::
      \sigma^2 = \frac{1}{W - \text{correction}} \sum_{i : \text{where}_i} w_i (x_i - \mu)^2,
      \qquad W = \sum_{i : \text{where}_i} w_i

    It is computed without cancellation, as in `var_mean`, which also returns the mean.

    Args:
      x: the array; integers and booleans are converted to floats.
      axis: an axis, a tuple of axes, or None for all of them.
      where: booleans that broadcast to the shape of `x`; False is masked, None masks nothing.
      weights: non-negative numbers that broadcast to the shape of `x`; None means 1. An element of weight 0 takes no
        part, even if it is NaN; a negative weight is NaN. A masked weight has no influence, and gets a gradient of 0.
      axis_name: the mesh axis, or a tuple of them, over whose devices the rows extend as well, inside
        `jax.shard_map`; or the named axis of a `jax.vmap`. All elements of a device may be masked.
      correction: subtracted from the weight; 1 gives the unbiased estimate for weights that count repetitions. The
        variance is 0 where the weight does not exceed it.
      keepdims: keep the reduced axes, with size 1.

    Returns:
      The variance, of the dtype that `jnp.var` gives of the product of `x` and `weights`; float16 and bfloat16 are
      accumulated in float32 and rounded once. The gradient with respect to a masked element is exactly 0.

    Raises:
      TypeError: if `where` is not boolean, `weights` are not real, or `correction` is not a number; or if `x` is
        complex and there are weights or an `axis_name`.
      ValueError: if `where` or `weights` do not broadcast to the shape of `x`, `axis` is out of range, or there is no
        axis of the name `axis_name`.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> x = jnp.array([1.0, 3.0, jnp.inf])
      >>> print(masksafe.var(x, where=jnp.isfinite(x)))
      1.0

    References:
      `jax.numpy.var <https://docs.jax.dev/en/latest/_autosummary/jax.numpy.var.html>`_.
    """
    correction = arguments.as_number("var", "correction", correction)
    return _reduce(correction, *prepared("var", x, axis, where, weights, axis_name, keepdims))[0]


@public_op
def var_mean(
    x: ArrayLike,
    axis: Axis | None = None,
    where: ArrayLike | None = None,
    *,
    weights: ArrayLike | None = None,
    axis_name: sharding.AxisName = None,
    correction: float = 0,
    keepdims: bool = False,
) -> tuple[Array, Array]:
    r"""The variance and the mean of the unmasked elements; both 0 if there are none.

    .. math::
      \mu = \frac{1}{W} \sum_{i : \text{where}_i} w_i x_i, \qquad
      \sigma^2 = \frac{1}{W - \text{correction}} \sum_{i : \text{where}_i} w_i (x_i - \mu)^2,
      \qquad W = \sum_{i : \text{where}_i} w_i

    The variance is computed from squared deviations, never as :math:`E[x^2] - E[x]^2`, which cancels when the mean is
    large. With `axis_name` the devices exchange the sums for the mean, and then the sums of squared deviations from it.

    Args:
      x: the array; integers and booleans are converted to floats.
      axis: an axis, a tuple of axes, or None for all of them.
      where: booleans that broadcast to the shape of `x`; False is masked, None masks nothing.
      weights: non-negative numbers that broadcast to the shape of `x`; None means 1. An element of weight 0 takes no
        part, even if it is NaN; a negative weight is NaN. A masked weight has no influence, and gets a gradient of 0.
      axis_name: the mesh axis, or a tuple of them, over whose devices the rows extend as well, inside
        `jax.shard_map`; or the named axis of a `jax.vmap`. All elements of a device may be masked.
      correction: subtracted from the weight; 1 gives the unbiased estimate for weights that count repetitions. The
        variance is 0 where the weight does not exceed it.
      keepdims: keep the reduced axes, with size 1.

    Returns:
      `(var, mean)`, of the dtypes that `jnp.var` and `jnp.mean` give of the product of `x` and `weights`; float16 and
      bfloat16 are accumulated in float32 and rounded once. Gradients with respect to masked elements are exactly 0.

    Raises:
      TypeError: also if `x` is complex and there are weights or an `axis_name`.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> x = jnp.array([[1.0, 3.0, jnp.nan], [jnp.nan, jnp.nan, jnp.nan]])
      >>> var, mean = masksafe.var_mean(x, axis=1, where=~jnp.isnan(x))
      >>> print(var, mean)
      [1. 0.] [2. 0.]

    References:
      Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979.

      `torch.var_mean <https://docs.pytorch.org/docs/stable/generated/torch.var_mean.html>`_.
    """
    correction = arguments.as_number("var_mean", "correction", correction)
    return _reduce(correction, *prepared("var_mean", x, axis, where, weights, axis_name, keepdims))


@jitted(0, 1)
def _reduce(
    correction: float, how: Reduction, x: Array, where: Array | None, weights: Array | None
) -> tuple[Array, Array]:
    """Variance and mean in the dtypes of `x`, as floats."""
    rows, x, weighting = how.read(x, where, weights)
    x = x.astype(float_dtype(x.dtype))
    if jnp.iscomplexobj(x) and (weights is not None or rows.devices.are_many):
        raise TypeError(arguments.message(how.op, "x", f"dtype {x.dtype}", "a real dtype, with weights or axis_name"))
    # Over devices by JAX's own rules: they know whether each device has all of a result's cotangent, or a part.
    found = moments(rows, x, weighting) if rows.devices.are_many else _moments(rows, x, weighting)
    variance = found.variance
    if correction:
        n = rows.divisor(x, found.weight)
        variance = variance / jnp.where(n > correction, 1 - correction / n, jnp.inf)  # a NaN stays visible
    return how.shaped(rows, variance).astype(jnp.finfo(x.dtype).dtype), how.shaped(rows, found.mean).astype(x.dtype)


def _forward(rows: Rows, x: Array, weighting: Weighting) -> tuple[Moments, tuple[Array, Weighting, Moments]]:
    moments_of = functools.partial(moments, rows)
    if not rows.are_one_fusion(x, weighting.where):
        moments_of = functools.partial(row_blocks.map_row_blocks, moments_of, leading=rows.leading(x.ndim))
    found = moments_of(x, weighting)
    return found, (x, weighting, found)


def _reverse(rows: Rows, residuals: tuple[Array, Weighting, Moments], cotangents: Moments) -> tuple[Array, Weighting]:
    x, (where, weights), found = residuals
    deviations = found.deviations(x, where)
    d_x, d_weights = pull_back(rows, deviations, weights, found, cotangents.error, cotangents.variance)
    if d_weights is not None and cotangents.weight is not None:
        d_weights = selected(d_weights + cotangents.weight, where)
    return selected(d_x, where).astype(x.dtype), Weighting(None, d_weights)


_moments = rule(_forward, _reverse)
