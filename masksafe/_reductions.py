"""Sums, means and variances over the unmasked elements; 0 where there are none."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core import moments, platforms
from masksafe._core.arguments import as_array, as_number, canonical_axes
from masksafe._core.derivatives import explains_forward_mode, with_derivatives_of, with_reverse_rule
from masksafe._core.masks import as_mask_of, selected
from masksafe._core.precision import float_dtype, widened
from masksafe._core.row_blocks import axes_of_row, by_row_blocks, leading_axes
from masksafe._core.sharding import may_loop
from masksafe._core.typing import Array, ArrayLike, Axes, Axis


def sum(x: ArrayLike, axis: Axis | None = None, where: ArrayLike | None = None, *, keepdims: bool = False) -> Array:  # noqa: A001
    r"""The sum of the unmasked elements; 0 if there are none.

    .. math:: \sum_{i : \text{where}_i} x_i

    Args:
      x: the array.
      axis: an axis, a tuple of axes, or None for all of them.
      where: booleans that broadcast to the shape of `x`; False is masked, None masks nothing.
      keepdims: keep the reduced axes, with size 1.

    Returns:
      The sum, of the dtype that `jnp.sum` gives; float16 and bfloat16 are accumulated in float32. The
      gradient with respect to a masked element is exactly 0.

    Raises:
      TypeError: if `where` is not boolean.
      ValueError: if `where` does not broadcast to the shape of `x`, or `axis` is out of range.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> x = jnp.array([1.0, 2.0, jnp.nan])
      >>> print(masksafe.sum(x, where=jnp.array([True, True, False])))
      3.0

    References:
      `jax.numpy.sum <https://docs.jax.dev/en/latest/_autosummary/jax.numpy.sum.html>`_.
    """
    x, axes, where = _check_arguments("sum", x, axis, where)
    return jnp.sum(selected(x, where), axes, keepdims=keepdims)


def mean(x: ArrayLike, axis: Axis | None = None, where: ArrayLike | None = None, *, keepdims: bool = False) -> Array:
    r"""The mean of the unmasked elements; 0 if there are none.

    .. math:: \frac{1}{n} \sum_{i : \text{where}_i} x_i, \qquad n = \max(1, |\{i : \text{where}_i\}|)

    It replaces `jnp.mean(x, where=mask)`, which is NaN for an empty mask, and `x.sum() / mask.sum()`, which is then
    0/0. For a loss over padded tokens write `masksafe.mean(loss, where=mask)`. The mean of an array sharded across
    devices is that of the whole array, however unevenly the mask is distributed.

    Args:
      x: the array; integers and booleans are averaged as floats.
      axis: an axis, a tuple of axes, or None for all of them.
      where: booleans that broadcast to the shape of `x`; False is masked, None masks nothing.
      keepdims: keep the reduced axes, with size 1.

    Returns:
      The mean, of the dtype that `jnp.mean` gives; float16 and bfloat16 are accumulated in float32 and
      rounded once. The gradient with respect to a masked element is exactly 0.

    Raises:
      TypeError: if `where` is not boolean.
      ValueError: if `where` does not broadcast to the shape of `x`, or `axis` is out of range.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> loss = jnp.array([[1.0, 3.0, jnp.nan], [jnp.nan, jnp.nan, jnp.nan]])
      >>> mask = jnp.array([[True, True, False], [False, False, False]])
      >>> print(masksafe.mean(loss, axis=1, where=mask), masksafe.mean(loss, where=mask))
      [2. 0.] 2.0

    References:
      `jax.numpy.mean <https://docs.jax.dev/en/latest/_autosummary/jax.numpy.mean.html>`_.
    """
    x, axes, where = _check_arguments("mean", x, axis, where)
    average: Array = _mean(axes, keepdims, x, where)
    return average


@functools.partial(jax.jit, static_argnums=(0, 1))
def _mean(axes: Axes, keepdims: bool, x: Array, where: Array | None) -> Array:
    average = moments.average(widened(selected(x, where)), axes, where)
    return (average if keepdims else jnp.squeeze(average, axes)).astype(float_dtype(x.dtype))


def var(
    x: ArrayLike,
    axis: Axis | None = None,
    where: ArrayLike | None = None,
    *,
    correction: float = 0,
    keepdims: bool = False,
) -> Array:
    r"""The variance of the unmasked elements; 0 if there are none.

    .. math::
      \sigma^2 = \frac{1}{n - \text{correction}} \sum_{i : \text{where}_i} (x_i - \mu)^2,
      \qquad n = |\{i : \text{where}_i\}|

    It is computed without cancellation, as in `var_mean`, which also returns the mean.

    Args:
      x: the array; integers and booleans are converted to floats.
      axis: an axis, a tuple of axes, or None for all of them.
      where: booleans that broadcast to the shape of `x`; False is masked, None masks nothing.
      correction: subtracted from the count; 1 gives the unbiased estimate. The variance is 0 where the count does
        not exceed it.
      keepdims: keep the reduced axes, with size 1.

    Returns:
      The variance, of the dtype that `jnp.var` gives; float16 and bfloat16 are accumulated in float32 and rounded
      once. The gradient with respect to a masked element is exactly 0.

    Raises:
      TypeError: if `where` is not boolean, or `correction` is not a number.
      ValueError: if `where` does not broadcast to the shape of `x`, or `axis` is out of range.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> print(masksafe.var(jnp.array([1.0, 3.0, jnp.inf]), where=jnp.array([True, True, False])))
      1.0

    References:
      `jax.numpy.var <https://docs.jax.dev/en/latest/_autosummary/jax.numpy.var.html>`_.
    """
    return _check_and_reduce("var", x, axis, where, correction, keepdims)[0]


def var_mean(
    x: ArrayLike,
    axis: Axis | None = None,
    where: ArrayLike | None = None,
    *,
    correction: float = 0,
    keepdims: bool = False,
) -> tuple[Array, Array]:
    r"""The variance and the mean of the unmasked elements; both 0 if there are none.

    .. math::
      \mu = \frac{1}{n} \sum_{i : \text{where}_i} x_i, \qquad
      \sigma^2 = \frac{1}{n - \text{correction}} \sum_{i : \text{where}_i} (x_i - \mu)^2,
      \qquad n = |\{i : \text{where}_i\}|

    The variance is computed from squared deviations, never as :math:`E[x^2] - E[x]^2`, which cancels when the mean is
    large.

    Args:
      x: the array; integers and booleans are converted to floats.
      axis: an axis, a tuple of axes, or None for all of them.
      where: booleans that broadcast to the shape of `x`; False is masked, None masks nothing.
      correction: subtracted from the count; 1 gives the unbiased estimate. The variance is 0 where the count does
        not exceed it.
      keepdims: keep the reduced axes, with size 1.

    Returns:
      `(var, mean)`, of the dtypes that `jnp.var` and `jnp.mean` give; float16 and bfloat16 are
      accumulated in float32 and rounded once. Gradients with respect to masked elements are exactly 0.

    Raises:
      TypeError: if `where` is not boolean, or `correction` is not a number.
      ValueError: if `where` does not broadcast to the shape of `x`, or `axis` is out of range.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> x = jnp.array([[1.0, 3.0, jnp.nan], [jnp.nan, jnp.nan, jnp.nan]])
      >>> var, mean = masksafe.var_mean(x, axis=1, where=~jnp.isnan(x))
      >>> print(var, mean)
      [1. 0.] [2. 0.]

    References:
      `torch.var_mean <https://docs.pytorch.org/docs/stable/generated/torch.var_mean.html>`_.
    """
    return _check_and_reduce("var_mean", x, axis, where, correction, keepdims)


def _check_and_reduce(
    op: str, x: ArrayLike, axis: Axis | None, where: ArrayLike | None, correction: float, keepdims: bool
) -> tuple[Array, Array]:
    x, axes, where = _check_arguments(op, x, axis, where)
    dtype = float_dtype(x.dtype)
    x = x if x.dtype == dtype else x.astype(dtype)  # jax_debug_nans checks even a conversion to the same dtype
    variance, mean = _reduce((axes, as_number(op, "correction", correction)), keepdims, x, where)
    return variance, mean


_AxesAndCorrection = tuple[Axes, float]


@explains_forward_mode
@functools.partial(jax.jit, static_argnums=(0, 1))
def _reduce(config: _AxesAndCorrection, keepdims: bool, x: Array, where: Array | None) -> tuple[Array, Array]:
    """Variance and mean in the dtypes of `x`."""
    variance, mean = _variance_and_mean(config, x, where)
    if not keepdims:
        variance, mean = jnp.squeeze(variance, config[0]), jnp.squeeze(mean, config[0])
    return variance.astype(jnp.finfo(x.dtype).dtype), mean.astype(x.dtype)


def _variance_and_mean_forward(
    config: _AxesAndCorrection, x: Array, where: Array | None
) -> tuple[tuple[Array, Array], tuple[Array, Array | None, moments.Mean]]:
    variance, mean = _evaluate_variance_and_mean(config, x, where)
    return (variance, moments.total(mean)), (x, where, mean)


@functools.partial(jax.jit, static_argnums=0)
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


@functools.partial(jax.jit, static_argnums=0)
def _evaluate_variance_and_mean(
    config: _AxesAndCorrection, x: Array, where: Array | None
) -> tuple[Array, moments.Mean]:
    config = axes_of_row(config[0], x.ndim), config[1]
    if jnp.iscomplexobj(x) or not moments.may_save_passes(config[0], x, where):
        return _reduce_in_blocks(config, x, where)
    in_one_pass = where is None and may_loop(x) and _is_fused(config[0], x)
    on_cpu = functools.partial(_reduce_in_one_pass if in_one_pass else _reduce_in_blocks, config)
    variance, mean = platforms.on_cpu_or_elsewhere(on_cpu, functools.partial(_reduce_all_rows, config), x, where)
    return variance, mean


def _is_fused(axes: Axes, x: Array) -> bool:
    """Whether XLA's CPU compiler computes the reductions of rows, along `axes`, in one pass."""
    if x.dtype.itemsize < 4:  # it would widen the whole array first
        return False
    elements = math.prod(x.shape[a] for a in axes)
    return moments.are_last(axes) and platforms.computes_rows_in_cache(elements, x.dtype)


def _reduce_in_blocks(config: _AxesAndCorrection, x: Array, where: Array | None) -> tuple[Array, moments.Mean]:
    leading = leading_axes(tuple(a % x.ndim for a in config[0]))
    (variance, mean), _ = by_row_blocks(lambda *args: (_reduce_rows(config, *args), ()), leading, x, where)
    return variance, mean


def _reduce_rows(config: _AxesAndCorrection, x: Array, where: Array | None) -> tuple[Array, moments.Mean]:
    axes, _ = config
    wide = selected(widened(x), where)
    mean = moments.mean(wide, axes, where)
    square_sum = moments.squares(moments.deviations(wide, mean, where), axes)
    return _variance(config, mean, square_sum, moments.count(wide, axes, where)), mean


@with_derivatives_of(_reduce_rows)
def _reduce_in_one_pass(config: _AxesAndCorrection, x: Array, where: Array | None) -> tuple[Array, moments.Mean]:
    """As `_reduce_rows` without a mask, with the mean in one part where its rounding error does not matter."""
    axes, _ = config
    wide = widened(x)
    centre, n = moments.average(wide, axes, where), moments.count(wide, axes, where)
    centre, square_sum = platforms.apart((centre, moments.squares(wide - centre, axes)))
    # Some rounding errors of the mean, squared, are a millionth of a variance above this.
    rounding = 2**13 * jnp.finfo(wide.dtype).eps * jnp.abs(centre)
    mean = moments.Mean(centre, jnp.zeros_like(centre))
    is_rounded = jnp.any(square_sum < n * jnp.square(rounding))
    exactly = functools.partial(_reduce_in_blocks, config, x, where)
    variance, mean = lax.cond(is_rounded, exactly, lambda: (_variance(config, mean, square_sum, n), mean))
    return variance, mean


@with_derivatives_of(_reduce_rows)
def _reduce_all_rows(config: _AxesAndCorrection, x: Array, where: Array | None) -> tuple[Array, moments.Mean]:
    axes, _ = config
    mean, square_sum = moments.mean_and_squares(x, axes, where)
    return _variance(config, mean, square_sum, moments.count(widened(x), axes, where)), mean


def _variance(config: _AxesAndCorrection, mean: moments.Mean, square_sum: Array, n: Array) -> Array:
    degrees_of_freedom = n - config[1]
    variance = square_sum / jnp.where(degrees_of_freedom > 0, degrees_of_freedom, 1)
    # 0 * variance, not 0: a NaN or infinity in an unmasked element must stay visible.
    return jnp.where((degrees_of_freedom > 0) & ~moments.is_rounding(variance, mean), variance, 0 * variance)


def _check_arguments(
    op: str, x: ArrayLike, axis: Axis | None, where: ArrayLike | None
) -> tuple[Array, Axes, Array | None]:
    """The array, its canonical axes, and the mask at the array's rank, not broadcast to its shape."""
    x = as_array(op, "x", x)
    return x, canonical_axes(op, axis, x.ndim), as_mask_of(op, where, x.shape)
