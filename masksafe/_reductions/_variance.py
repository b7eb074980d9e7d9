"""The variance of the unmasked elements."""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
from jax import lax

from masksafe._core import arguments, moments, platforms, row_blocks, scaling, sharding
from masksafe._core.derivatives import with_derivatives_of, with_reverse_rule
from masksafe._core.masks import selected, weighting_of
from masksafe._core.precision import float_dtype, widened
from masksafe._core.public_op import public_op
from masksafe._core.row_moments import Rows, row_moments
from masksafe._core.typing import Array, ArrayLike, Axes, Axis, jitted
from masksafe._reductions._arguments import Call, prepared


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
        part, even if it is NaN; a negative weight is NaN. A weight under the mask is gone, and gets a gradient of 0.
      axis_name: the mesh axis, or a tuple of them, over whose devices the rows extend as well, inside
        `jax.shard_map`; or the named axis of a `jax.vmap`. A device may have nothing left.
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
    large. With `axis_name` the moments of the devices are exchanged and merged by their weights.

    Args:
      x: the array; integers and booleans are converted to floats.
      axis: an axis, a tuple of axes, or None for all of them.
      where: booleans that broadcast to the shape of `x`; False is masked, None masks nothing.
      weights: non-negative numbers that broadcast to the shape of `x`; None means 1. An element of weight 0 takes no
        part, even if it is NaN; a negative weight is NaN. A weight under the mask is gone, and gets a gradient of 0.
      axis_name: the mesh axis, or a tuple of them, over whose devices the rows extend as well, inside
        `jax.shard_map`; or the named axis of a `jax.vmap`. A device may have nothing left.
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


_AxesAndCorrection = tuple[Axes, float]


@jitted(0, 1)
def _reduce(correction: float, call: Call, x: Array, where: Array | None, weights: Array | None) -> tuple[Array, Array]:
    """Variance and mean in the dtypes of `x`, as floats."""
    how, x, where, weights = call.read(x, where, weights)
    x = x.astype(float_dtype(x.dtype))
    if jnp.iscomplexobj(x) and (weights is not None or how.devices.are_many):
        raise TypeError(arguments.message(how.op, "x", f"dtype {x.dtype}", "a real dtype, with weights or axis_name"))
    if weights is None and not how.devices.are_many:
        variance, mean = _variance_and_mean((how.axes, correction), x, where)
    else:
        of_rows = row_moments(Rows(how.axes, how.devices), x, weighting_of(x, where, weights))
        divide = jnp.divide if weights is None else scaling.quotient
        variance = moments.variance(correction, of_rows.mean, of_rows.squares, of_rows.weight, divide)
        mean = moments.total(of_rows.mean)
    return how.shaped(variance).astype(jnp.finfo(x.dtype).dtype), how.shaped(mean).astype(x.dtype)


def _variance_and_mean_forward(
    config: _AxesAndCorrection, x: Array, where: Array | None
) -> tuple[tuple[Array, Array], tuple[Array, Array | None, moments.Mean]]:
    variance, mean = _evaluate_variance_and_mean(config, x, where)
    return (variance, moments.total(mean)), (x, where, mean)


@jitted(0)
def _variance_and_mean_reverse(
    config: _AxesAndCorrection,
    residuals: tuple[Array, Array | None, moments.Mean],
    cotangents: tuple[Array, Array],
) -> tuple[Array, None]:
    (axes, correction), (x, where, mean), (d_variance, d_mean) = config, residuals, cotangents
    wide = selected(widened(x), where)
    n = moments.count(wide, axes, where)
    degrees_of_freedom = jnp.where(n > correction, n - correction, jnp.inf)
    slope = 2 * jnp.conj(moments.deviations(wide, mean, where))  # derivative of the sum of squares
    d_x = slope * (d_variance / degrees_of_freedom) + d_mean / jnp.maximum(n, 1)
    return selected(d_x, where).astype(x.dtype), None


@with_reverse_rule(_variance_and_mean_forward, _variance_and_mean_reverse, static_argnums=(0,))
def _variance_and_mean(config: _AxesAndCorrection, x: Array, where: Array | None) -> tuple[Array, Array]:
    """Variance and mean in the wide dtype, with the reduced axes kept."""
    variance, mean = _evaluate_variance_and_mean(config, x, where)
    return variance, moments.total(mean)


@jitted(0)
def _evaluate_variance_and_mean(
    config: _AxesAndCorrection, x: Array, where: Array | None
) -> tuple[Array, moments.Mean]:
    config = row_blocks.axes_of_row(config[0], x.ndim), config[1]
    if jnp.iscomplexobj(x) or not moments.may_save_passes(config[0], x, where):
        return _reduce_in_blocks(config, x, where)
    in_one_pass = where is None and sharding.may_loop(x) and _is_fused(config[0], x)
    on_cpu = functools.partial(_reduce_in_one_pass if in_one_pass else _reduce_in_blocks, config)
    return platforms.on_cpu_or_elsewhere(on_cpu, functools.partial(_reduce_all_rows, config), x, where)


def _is_fused(axes: Axes, x: Array) -> bool:
    """Whether XLA's CPU compiler computes the reductions of rows, along `axes`, in one pass."""
    if x.dtype.itemsize < 4:  # it would widen the whole array first
        return False
    elements = math.prod(x.shape[a] for a in axes)
    return moments.are_last(axes) and elements in range(platforms.choices().elements_of_row_in_cache.stop)


def _reduce_in_blocks(config: _AxesAndCorrection, x: Array, where: Array | None) -> tuple[Array, moments.Mean]:
    leading = row_blocks.leading_axes(tuple(a % x.ndim for a in config[0]))
    return row_blocks.map_row_blocks(functools.partial(_reduce_rows, config), x, where, leading=leading)


def _reduce_rows(config: _AxesAndCorrection, x: Array, where: Array | None) -> tuple[Array, moments.Mean]:
    axes, correction = config
    wide = selected(widened(x), where)
    mean = moments.mean(wide, axes, where)
    square_sum = moments.squares(moments.deviations(wide, mean, where), axes)
    return moments.variance(correction, mean, square_sum, moments.count(wide, axes, where)), mean


@with_derivatives_of(_reduce_rows)
def _reduce_in_one_pass(config: _AxesAndCorrection, x: Array, where: Array | None) -> tuple[Array, moments.Mean]:
    """As `_reduce_rows` without a mask, with the mean in one part where its rounding error does not matter."""
    axes, correction = config
    wide = widened(x)
    centre, n = moments.average(wide, axes, where), moments.count(wide, axes, where)
    centre, square_sum = platforms.unfused((centre, moments.squares(wide - centre, axes)))
    # Some rounding errors of the mean, squared, are a millionth of a variance above this.
    rounding = 2**13 * jnp.finfo(wide.dtype).eps * jnp.abs(centre)
    mean = moments.Mean(centre, jnp.zeros_like(centre))
    is_rounded = jnp.any(square_sum < n * jnp.square(rounding))
    exactly = functools.partial(_reduce_in_blocks, config, x, where)
    variance, mean = lax.cond(is_rounded, exactly, lambda: (moments.variance(correction, mean, square_sum, n), mean))
    return variance, mean


@with_derivatives_of(_reduce_rows)
def _reduce_all_rows(config: _AxesAndCorrection, x: Array, where: Array | None) -> tuple[Array, moments.Mean]:
    axes, correction = config
    mean, square_sum = moments.mean_and_squares(x, axes, where)
    return moments.variance(correction, mean, square_sum, moments.count(widened(x), axes, where)), mean
