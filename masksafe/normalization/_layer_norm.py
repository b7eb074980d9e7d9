"""Normalisation over the unmasked elements, with a variance computed from squared deviations.

The public functions check their arguments and bring scale and bias to the order of the axes in memory; the core works
on any axes without transposing.
"""

from __future__ import annotations

import functools
import math
import numbers
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core import moments, platforms
from masksafe._core.arguments import (
    as_array,
    as_float_array,
    as_promoted_float_array,
    at_rank_of,
    canonical_axes,
    message,
)
from masksafe._core.derivatives import with_derivatives_of, with_reverse_rule
from masksafe._core.masks import as_mask_of, as_weights_of, masks_rows, selected, weighting_of
from masksafe._core.moments import Mean
from masksafe._core.precision import widened
from masksafe._core.public_op import public_op
from masksafe._core.row_blocks import axes_of_row, by_row_blocks
from masksafe._core.row_moments import RowConfig, or_one, row_moments
from masksafe._core.scaling import quotient
from masksafe._core.sharding import AxisName, as_axis_name, is_on_automatic_mesh
from masksafe._core.typing import Array, ArrayLike, Axes, Axis
from masksafe._core.unfolded import unknown
from masksafe.normalization._arguments import along_axes, as_epsilon, as_static_or_array_epsilon
from masksafe.normalization._statistics import (
    How,
    at_ordinary_scale,
    normalize,
    reciprocal_root,
    scaled_and_shifted,
)


@public_op
def layer_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    epsilon: float = 1e-6,
    weights: ArrayLike | None = None,
    axis_name: AxisName = None,
) -> Array:
    r"""Layer normalisation over the unmasked elements; 0 at the masked ones.

    .. math::
      y_i = \gamma_i \frac{x_i - \mu}{\sqrt{\sigma^2 + \varepsilon}} + \beta_i, \qquad
      \mu = \frac{1}{n} \sum_{i : \text{where}_i} x_i, \qquad
      \sigma^2 = \frac{1}{n} \sum_{i : \text{where}_i} (x_i - \mu)^2

    The variance is never computed as :math:`E[x^2] - E[x]^2`, the default of flax and of `jax.nn.standardize`, which
    cancels when the mean is large. Largest error against float64 (no correct result exceeds 3.84):

    ===========================  ===============================  ==========================  ========
    input                        flax, `jax.nn.standardize`       the variance in two passes  masksafe
    ===========================  ===============================  ==========================  ========
    N(0, 1) + 1e4 in float32     3872                             0.0016                      5e-7
    N(0, 1) + 1e3 in float16     0.45, NaN                                                    0.001
    nothing left under the mask  NaN                              NaN                         0
    ===========================  ===============================  ==========================  ========

    Args:
      x: floats `[...]`.
      scale: :math:`\gamma`, of the shape of the normalised axes in the order of `axis`; None means 1.
      bias: :math:`\beta`, of the same shape; None means 0.
      axis: the axis, or a tuple of axes in any order, over which mean and variance are taken; the elements along
        them form a row.
      where: booleans that broadcast to the shape of `x`, trailing axes first; False is masked, None masks nothing.
      epsilon: added to the variance, 0 or more.
      weights: non-negative numbers that broadcast to the shape of `x`, with which the elements enter the statistics;
        None means 1. A NaN or infinity of weight 0 is masked. A weight under the mask is gone.
      axis_name: inside `jax.shard_map`, the mesh axis, or a tuple of them, over which rows are split; or the named axis
        of a `jax.vmap`. The devices exchange their moments, as in `batch_norm`. `scale` and `bias` are
        those of the device's own elements.

    Returns:
      An array of the shape and dtype of `x`, whatever the dtypes of `scale` and `bias`; float16 and bfloat16 are
      computed in float32 and rounded once. Masked elements are 0 (`bias` is not added) and get a gradient of 0. A row
      with nothing left is 0; a row of one element or of equal elements is `bias`, even with an `epsilon` of 0, which
      makes its gradient 0. A NaN or infinity in an unmasked element makes the unmasked elements of its
      row NaN. Deviations whose squares overflow, in float32 those beyond about 1e19, come out as 0.

    Raises:
      TypeError: if `x`, `scale` or `bias` is not a float array, `where` is not boolean, `weights` are not real, or
        `epsilon` is traced.
      ValueError: if `scale` or `bias` has the wrong shape, `where` or `weights` do not broadcast to the shape of `x`,
        `axis` is out of range, `epsilon` is negative, or there is no axis of the name `axis_name`.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> x = jnp.array([[1.0, 3.0, jnp.nan], [jnp.nan, jnp.nan, jnp.nan]])
      >>> print(masksafe.layer_norm(x, jnp.full(3, 2.0), jnp.ones(3), where=~jnp.isnan(x), epsilon=0))
      [[-1.  3.  0.]
       [ 0.  0.  0.]]

    Coming from another library:
      * `flax.nnx.LayerNorm` and `flax.linen.LayerNorm` add the same `epsilon` in the same place. Unless
        `use_fast_variance=False`, their variance is :math:`E[x^2] - E[x]^2`, clipped at 0. With their `mask`, masked
        elements hold large numbers, and a row with nothing left is NaN. Their result has the dtype to which `x`,
        `scale` and `bias` promote. Their scale may extend over axes that are not normalised (`feature_axes`): multiply
        the result of `standardize` by it.
      * `equinox.nn.LayerNorm` and `torch.nn.LayerNorm` add an `epsilon` of 1e-5 in the same place and have the same
        variance. equinox's layer takes one sample and normalises all of its axes. torch's `normalized_shape` stands
        for that many last axes: `axis=(-2, -1)` for a shape of two. Neither has a mask.

    References:
      `Ba, Kiros, Hinton, Layer Normalization, 2016 <https://arxiv.org/abs/1607.06450>`_.
    """
    return _normalize("layer_norm", x, scale, bias, axis, where, epsilon, weights, axis_name, centred=True)


@public_op
def rms_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    *,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    epsilon: float = 1e-6,
    weights: ArrayLike | None = None,
    axis_name: AxisName = None,
) -> Array:
    r"""Root-mean-square normalisation over the unmasked elements; 0 at the masked ones.

    .. math::
      y_i = \gamma_i \frac{x_i}{\sqrt{\frac{1}{n} \sum_{j : \text{where}_j} x_j^2 + \varepsilon}}

    Args:
      x: floats `[...]`.
      scale: :math:`\gamma`, of the shape of the normalised axes in the order of `axis`; None means 1.
      axis: the axis, or a tuple of axes in any order, over which the mean is taken; the elements along them form a row.
      where: booleans that broadcast to the shape of `x`, trailing axes first; False is masked, None masks nothing.
      epsilon: added to the mean square, 0 or more.
      weights: as for `layer_norm`.
      axis_name: as for `layer_norm`.

    Returns:
      An array of the shape and dtype of `x`. It is 0 at masked elements, in a row with nothing left and in a row of
      zeros, even with an `epsilon` of 0. Otherwise see `layer_norm`.

    Raises:
      TypeError: if `x` or `scale` is not a float array, `where` is not boolean, `weights` are not real, or `epsilon` is
        traced.
      ValueError: if `scale` has the wrong shape, `where` or `weights` do not broadcast to the shape of `x`, `axis` is
        out of range, `epsilon` is negative, or there is no axis of the name `axis_name`.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> x = jnp.array([[1.0, 7.0, jnp.nan], [jnp.nan, jnp.nan, jnp.nan]])
      >>> print(masksafe.rms_norm(x, where=~jnp.isnan(x), epsilon=0))
      [[0.2 1.4 0. ]
       [0.  0.  0. ]]

    Coming from another library:
      `flax.nnx.RMSNorm` and `flax.linen.RMSNorm` add the same `epsilon` in the same place; that of `equinox.nn.RMSNorm`
      is 1e-5, that of `torch.nn.RMSNorm` the spacing of the dtype at 1 (1.2e-7 in float32). Only flax has a mask, with
      the same defects as in its layer norm.

    References:
      `Zhang, Sennrich, Root Mean Square Layer Normalization, 2019 <https://arxiv.org/abs/1910.07467>`_.
    """
    return _normalize("rms_norm", x, scale, None, axis, where, epsilon, weights, axis_name, centred=False)


@public_op
def standardize(
    x: ArrayLike,
    axis: Axis | None = -1,
    mean: ArrayLike | None = None,
    variance: ArrayLike | None = None,
    epsilon: ArrayLike = 1e-5,
    where: ArrayLike | None = None,
    *,
    algorithm: Literal["fast", "stable"] = "fast",
    weights: ArrayLike | None = None,
    axis_name: AxisName = None,
) -> Array:
    r"""Shifts and scales the unmasked elements to mean 0 and variance 1; 0 at the masked ones.

    .. math:: y_i = \frac{x_i - \mu}{\sqrt{\sigma^2 + \varepsilon}}

    This is `layer_norm` without scale and bias; see there for the mean, the variance and special cases.

    Args:
      x: floats `[...]`; integers become floats.
      axis: the axis, or a tuple of axes, over which mean and variance are taken; None means all of them.
      mean: :math:`\mu`, which broadcasts to the shape of `x`; by default the mean of the unmasked elements.
      variance: :math:`\sigma^2`, which broadcasts to the shape of `x`; by default that of the unmasked elements.
      epsilon: added to the variance, 0 or more; a number or a scalar array, which may be traced.
      where: booleans that broadcast to the shape of `x`, trailing axes first; False is masked, None masks nothing.
      algorithm: how the variance is defined if only `mean` is given: "fast" means :math:`E[x^2] - \mu^2`, and "stable"
        :math:`E[(x - \mu)^2]`. Without `mean` these are the same number. Both are computed without cancellation.
      weights: as for `layer_norm`.
      axis_name: as for `layer_norm`.

    Returns:
      An array of the shape of `x`, of the dtype to which `x`, `mean`, `variance` and `epsilon` promote.

    Raises:
      TypeError: if an argument is not an array of numbers or `where` is not boolean.
      ValueError: if `mean`, `variance` or `where` does not broadcast to the shape of `x`, `axis` is out of range,
        `epsilon` is a negative number or not a scalar, or `algorithm` is neither "fast" nor "stable".

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> x = jnp.array([1.0, 3.0, jnp.nan])
      >>> print(masksafe.standardize(x, where=~jnp.isnan(x), epsilon=0))
      [-1.  1.  0.]

    References:
      `jax.nn.standardize <https://docs.jax.dev/en/latest/_autosummary/jax.nn.standardize.html>`_, which it replaces
      with the same parameters in the same order and with the same defaults. That function computes
      :math:`E[x^2] - E[x]^2`, which cancels, and returns NaN where nothing is left.
    """
    op = "standardize"
    x = as_promoted_float_array(op, "x", x, of_any_width=True)
    if algorithm not in ("fast", "stable"):
        raise ValueError(message(op, "algorithm", f"value {algorithm!r}", "'fast' or 'stable'"))
    if mean is None and variance is None and isinstance(epsilon, numbers.Real):
        return _normalize(op, x, None, None, axis, where, epsilon, weights, axis_name, centred=True)
    axes, where = canonical_axes(op, axis, x.ndim), as_mask_of(op, where, x.shape)
    epsilon = _as_traced_epsilon(op, epsilon)
    weights, name = as_weights_of(op, weights, x.shape), as_axis_name(op, axis_name)
    mean, variance = (_as_statistic(op, name, s, x) for name, s in (("mean", mean), ("variance", variance)))
    y: Array = _standardize_with_given_statistics(axes, algorithm, name, x, mean, variance, epsilon, where, weights)
    return y


def _normalize(
    op: str,
    x: ArrayLike,
    scale: ArrayLike | None,
    bias: ArrayLike | None,
    axis: Axis | None,
    where: ArrayLike | None,
    epsilon: Any,
    weights: ArrayLike | None,
    axis_name: AxisName,
    centred: bool,
) -> Array:
    x = as_float_array(op, "x", x, of_any_width=True)
    axes = canonical_axes(op, axis, x.ndim)
    static, array = as_static_or_array_epsilon(op, epsilon, x)
    scale = along_axes(op, "scale", scale, x, axes)
    bias = along_axes(op, "bias", bias, x, axes)
    where, weights = as_mask_of(op, where, x.shape), as_weights_of(op, weights, x.shape)
    name = as_axis_name(op, axis_name)
    if weights is None and name is None:
        config = _Config(axes_of_row(axes, x.ndim), static, centred, bias is not None)
        scaled, _ = at_ordinary_scale(How(axes, static, None), x, where)
        y: Array = _norm(config, scaled, where, scale, bias, array)
        return y
    y, _ = normalize(How(axes, as_epsilon(op, epsilon), name, centred), x, where, weights, scale, bias)
    return y


def _as_traced_epsilon(op: str, epsilon: ArrayLike) -> Array:
    if isinstance(epsilon, numbers.Real):
        as_epsilon(op, epsilon)
    array = as_array(op, "epsilon", epsilon)
    if array.size != 1 or array.ndim:
        raise ValueError(message(op, "epsilon", f"shape {array.shape}", "a scalar"))
    return array


def _as_statistic(op: str, argument: str, value: ArrayLike | None, x: Array) -> Array | None:
    if value is None:
        return None
    return at_rank_of(op, argument, as_promoted_float_array(op, argument, value), x.shape, "x")


# The core. Scale and bias have the rank of x, with size 1 along the axes that are not normalised.


class _Config(NamedTuple):
    axes: Axes  # counted from the end
    epsilon: Any  # None where it is an array, which `with_epsilon` puts here within a traced function
    centred: bool
    has_bias: bool

    def with_epsilon(self, array: Array | None) -> _Config:
        return self if array is None else self._replace(epsilon=array)


class _Statistics(NamedTuple):
    """The statistics of each row; the normalised axes have size 1."""

    mean: Mean | None  # None for the root mean square
    reciprocal_std: Array


_Residuals = tuple[Array, Array | None, Array | None, Array | None, Array | None, _Statistics | None]


def _norm_forward(
    config: _Config, x: Array, where: Array | None, scale: Array | None, bias: Array | None, epsilon: Array | None
) -> tuple[Array, _Residuals]:
    y, statistics = _evaluate(config, x, where, scale, bias, epsilon)
    return y, (x, where, scale, bias, epsilon, statistics)


def _norm_reverse(
    config: _Config, residuals: _Residuals, d_y: Array
) -> tuple[Array, None, Array | None, Array | None, None]:
    d_x, d_scale, d_bias = _pull_back(config, *residuals, d_y)
    return d_x, None, d_scale, d_bias, None


@with_reverse_rule(_norm_forward, _norm_reverse, static_argnums=(0,))
def _norm(
    config: _Config, x: Array, where: Array | None, scale: Array | None, bias: Array | None, epsilon: Array | None
) -> Array:
    y: Array = _evaluate(config, x, where, scale, bias, epsilon)[0]
    return y


@functools.partial(jax.jit, static_argnums=0)
def _evaluate(
    config: _Config, x: Array, where: Array | None, scale: Array | None, bias: Array | None, epsilon: Array | None
) -> tuple[Array, _Statistics | None]:
    """The result, and the statistics if they cost nothing.

    If XLA fuses the pass, a second result would prevent that. Then the reverse pass computes the statistics again, on a
    CPU from blocks in the cache.
    """

    def on_cpu(*args: Any) -> tuple[Array, _Statistics | None]:
        if _is_fused(x, where):
            return _evaluate_rows(config, *(*args, epsilon))[0], None
        evaluate_rows = lambda *args: (_evaluate_rows(config, *(*args, epsilon)), ())  # noqa: E731
        (y, statistics), _ = by_row_blocks(evaluate_rows, _leading_axes(config, x), *args)
        return y, statistics

    def elsewhere(*args: Any) -> tuple[Array, _Statistics | None]:
        if not masks_rows(where, config.axes):
            return _evaluate_with_statistics(config, *(*args, epsilon))
        return _evaluate_alone(config, *(*args, epsilon)), None if _is_fused(x, where) else _zero_statistics(config, x)

    if not moments.may_save_passes(config.axes, x, where, scale, bias):
        return on_cpu(x, where, scale, bias)
    y, statistics = platforms.on_cpu_or_elsewhere(on_cpu, elsewhere, x, where, scale, bias)
    return y, statistics


@functools.partial(jax.jit, static_argnums=0)
def _pull_back(
    config: _Config,
    x: Array,
    where: Array | None,
    scale: Array | None,
    bias: Array | None,
    epsilon: Array | None,
    statistics: _Statistics | None,
    d_y: Array,
) -> tuple[Array, Array | None, Array | None]:
    def on_cpu(*args: Any) -> tuple[Array, tuple[Array | None, Array | None]]:
        def pull_back_rows(
            x: Array, d_y: Array, where: Array | None, scale: Array | None, statistics: _Statistics | None
        ) -> tuple[Array, tuple[Array | None, Array | None]]:
            d_y = widened(d_y)
            return _pull_back_rows(config, x, d_y * unknown(1, d_y.dtype), where, scale, statistics, epsilon)

        d_x, totals = by_row_blocks(pull_back_rows, _leading_axes(config, x), *args)
        return d_x, totals

    def elsewhere(
        x: Array, d_y: Array, where: Array | None, scale: Array | None, statistics: _Statistics | None
    ) -> tuple[Array, tuple[Array | None, Array | None]]:
        are_zeros = masks_rows(where, config.axes)
        return _pull_back_all_rows(config, x, d_y, where, scale, None if are_zeros else statistics, epsilon)

    args = x, d_y, where, scale, statistics
    if moments.may_save_passes(config.axes, x, d_y, where, scale):
        d_x, (d_scale, d_bias) = platforms.on_cpu_or_elsewhere(on_cpu, elsewhere, *args)
    else:
        d_x, (d_scale, d_bias) = on_cpu(*args)
    return d_x, _reshape_like(scale, d_scale), _reshape_like(bias, d_bias)


# Some rows, or all of them.


def _evaluate_rows(
    config: _Config, x: Array, where: Array | None, scale: Array | None, bias: Array | None, epsilon: Array | None
) -> tuple[Array, _Statistics]:
    wide = selected(widened(x), where)
    statistics = _compute_statistics(config.with_epsilon(epsilon), wide, where, x.dtype)
    return _apply(wide, statistics, where, scale, bias).astype(x.dtype), statistics


def _apply(wide: Array, statistics: _Statistics, where: Array | None, scale: Array | None, bias: Array | None) -> Array:
    return scaled_and_shifted(_standardize(wide, statistics, where), where, scale, bias)


def _pull_back_rows(
    config: _Config,
    x: Array,
    d_y: Array,
    where: Array | None,
    scale: Array | None,
    statistics: _Statistics | None,
    epsilon: Array | None,
) -> tuple[Array, tuple[Array | None, Array | None]]:
    wide = selected(widened(x), where)
    statistics = statistics or _compute_statistics(config.with_epsilon(epsilon), wide, where, x.dtype)
    normalized = _standardize(wide, statistics, where)
    d_y = selected(d_y.astype(wide.dtype), where)
    d_normalized = d_y if scale is None else selected(d_y * scale.astype(d_y.dtype), where)
    d_deviations = d_normalized - normalized * moments.average(d_normalized * normalized, config.axes, where)
    if config.centred:
        d_deviations -= moments.average(d_normalized, config.axes, where)
    d_x = selected(d_deviations * statistics.reciprocal_std, where).astype(x.dtype)
    row_ndim = x.ndim - _leading_axes(config, x)
    d_scale = None if scale is None else _sum_over_rows(d_y * normalized, config.axes, row_ndim)
    d_bias = _sum_over_rows(d_y, config.axes, row_ndim) if config.has_bias else None
    return d_x, (d_scale, d_bias)


def _leading_axes(config: _Config, x: Array) -> int:
    """How many axes precede the first one that is normalised."""
    return x.ndim + min(config.axes) if config.axes else 0


# All rows on an accelerator, in few passes over its memory. XLA writes an array that several sums share to memory if it
# is expensive to compute, such as a selected one, and one that is used before and after the sums. So masks of rows are
# applied to the sums, and a barrier hides what is computed twice.


def _with_rows_merged(config: _Config, x: Array, *arrays: Array | None) -> list[Any]:
    """The arrays with their last axes, those of a row of `x`, merged into one; XLA would split it again."""
    number = len(config.axes)

    def merged(a: Array) -> Array:
        leading, row = a.shape[:-number], a.shape[-number:]
        if math.prod(row) == 1:
            return a.reshape(*leading, 1)
        return jnp.broadcast_to(a, leading + x.shape[-number:]).reshape(*leading, -1)

    if number == 1:
        return list(arrays)
    return list(lax.optimization_barrier([None if a is None else merged(a) for a in arrays]))


def _evaluate_all_rows(
    config: _Config, x: Array, where: Array | None, scale: Array | None, bias: Array | None, epsilon: Array | None
) -> Array:
    return _evaluate_rows(config, x, where, scale, bias, epsilon)[0]


@with_derivatives_of(_evaluate_all_rows)
def _evaluate_alone(
    config: _Config, x: Array, where: Array | None, scale: Array | None, bias: Array | None, epsilon: Array | None
) -> Array:
    """The result without the statistics, under a mask of rows."""
    if not platforms.fits_into_a_kernel(config.axes, x.shape):
        return _evaluate_with_statistics(config, x, where, scale, bias, epsilon)[0]
    rows, where, scale, bias = _with_rows_merged(config, x, x, where, scale, bias)
    y, _ = _evaluate_rows(config._replace(axes=(-1,)), selected(rows, where), None, scale, bias, epsilon)
    return selected(y, where).reshape(x.shape)


@with_derivatives_of(_evaluate_rows)
def _evaluate_with_statistics(
    config: _Config, x: Array, where: Array | None, scale: Array | None, bias: Array | None, epsilon: Array | None
) -> tuple[Array, _Statistics]:
    config = config.with_epsilon(epsilon)
    if config.centred:
        n = _count(config, x, where)
        statistics = _statistics_of(config, x.dtype, *moments.mean_and_squares(x, config.axes, where), n)
    else:
        statistics = _compute_statistics(config, selected(widened(x), where), where, x.dtype)
    if not masks_rows(where, config.axes):
        x, where, scale, bias, statistics = lax.optimization_barrier((x, where, scale, bias, statistics))
    return _apply(selected(widened(x), where), statistics, where, scale, bias).astype(x.dtype), statistics


class _Averages(NamedTuple):
    """Averages over each row, for the reverse pass."""

    product: Array  # of the normalised elements with their cotangents
    d_normalized: Array | None  # of the cotangents; None for the root mean square


@with_derivatives_of(_pull_back_rows)
def _pull_back_all_rows(
    config: _Config,
    x: Array,
    d_y: Array,
    where: Array | None,
    scale: Array | None,
    statistics: _Statistics | None,
    epsilon: Array | None,
) -> tuple[Array, tuple[Array | None, Array | None]]:
    """The cotangents, from statistics unless the mask is one of rows."""
    config = config.with_epsilon(epsilon)
    if statistics is not None:
        averages = _averages(config, x, d_y, where, scale, statistics)
    elif scale is None and not config.has_bias and platforms.fits_into_a_kernel(config.axes, x.shape):
        rows, d_rows, where = _with_rows_merged(config, x, x, d_y, where)
        rows, d_rows = selected(rows, where), selected(d_rows, where)
        d_x, totals = _pull_back_rows(config._replace(axes=(-1,)), rows, d_rows, None, None, None, None)
        return selected(d_x, where).reshape(x.shape), totals
    else:
        statistics, averages = _statistics_and_averages(config, x, d_y, where, scale)
    x, d_y, where, scale, statistics, averages = lax.optimization_barrier((x, d_y, where, scale, statistics, averages))
    wide, d_y = selected(widened(x), where), selected(widened(d_y), where)
    deviations = _deviations(wide, statistics.mean, None)
    factor = statistics.reciprocal_std * averages.product
    d_deviations = _scaled(d_y, scale) - deviations * factor
    if averages.d_normalized is not None:
        d_deviations -= averages.d_normalized
    row_ndim = x.ndim - _leading_axes(config, x)
    d_scale = None if scale is None else d_y * (deviations * statistics.reciprocal_std)
    if not masks_rows(where, config.axes):  # the statistics of a row may be NaN
        d_scale = None if d_scale is None else selected(d_scale, where)
    d_x = selected(d_deviations * statistics.reciprocal_std, where).astype(x.dtype)
    totals = d_scale, d_y if config.has_bias else None
    return d_x, jax.tree.map(lambda a: _sum_over_rows(a, config.axes, row_ndim), totals)


def _averages(
    config: _Config, x: Array, d_y: Array, where: Array | None, scale: Array | None, statistics: _Statistics
) -> _Averages:
    d_normalized = _scaled(widened(d_y), scale)
    products = d_normalized * _standardize(widened(x), statistics, None)
    if not config.centred:
        return _Averages(moments.sums(config.axes, where, products)[0] / _count(config, x, where), None)
    product, total = moments.sums(config.axes, where, products, d_normalized)
    n = _count(config, x, where)
    return _Averages(product / n, total / n)


def _statistics_and_averages(
    config: _Config, x: Array, d_y: Array, where: Array | None, scale: Array | None
) -> tuple[_Statistics, _Averages]:
    """Both in one pass, under a mask of rows."""
    x = lax.optimization_barrier(x)  # else the forward pass shares a sum, and no longer stays in registers
    n = math.prod(x.shape[a] for a in config.axes)
    wide, d_normalized = widened(x), _scaled(widened(d_y), scale)
    if config.centred:
        shift = moments.near_mean(x, config.axes)
        shifted = wide - shift
        terms = shifted, shifted * shifted, d_normalized * shifted, d_normalized
        *about_shift, product, d_total = moments.sums(config.axes, None, *terms)
        statistics = _statistics_of(config, x.dtype, *moments.about_mean(shift, about_shift, n), n)
        product, cotangent = product - d_total * (about_shift[0] / n), d_total / n
    else:
        square_sum, product = moments.sums(config.axes, None, wide * wide, d_normalized * wide)
        statistics, cotangent = _Statistics(None, reciprocal_root(square_sum / n, None, config.epsilon)), None
    averages = _Averages(product * statistics.reciprocal_std / n, cotangent)
    statistics, averages = jax.tree.map(lambda a: selected(a, where), (statistics, averages))
    return statistics, averages


def _scaled(d_y: Array, scale: Array | None) -> Array:
    return d_y if scale is None else d_y * scale.astype(d_y.dtype)


def _count(config: _Config, x: Array, where: Array | None) -> Array | int:
    """The number of unmasked elements of each row in which there is one; else 1 or more."""
    if masks_rows(where, config.axes):
        return math.prod(x.shape[a] for a in config.axes)
    return jnp.maximum(moments.count(widened(x), config.axes, where), 1)


def _statistics_of(config: _Config, narrow: Any, mean: Mean, square_sum: Array, n: Array | int) -> _Statistics:
    if _has_one_part(narrow):
        mean = Mean(moments.total(mean), None)
    return _Statistics(mean, reciprocal_root(square_sum / n, mean, config.epsilon))


def _zero_statistics(config: _Config, x: Array) -> _Statistics:
    """Zeros where a CPU keeps statistics for the reverse pass."""
    zero = jnp.zeros_like(widened(moments.first_of_rows(x, config.axes)))
    mean = Mean(zero, None if _has_one_part(x.dtype) else zero) if config.centred else None
    return _Statistics(mean, zero)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _standardize_with_given_statistics(
    axes: Axes,
    algorithm: str,
    axis_name: AxisName,
    x: Array,
    mean: Array | None,
    variance: Array | None,
    epsilon: Array,
    where: Array | None,
    weights: Array | None,
) -> Array:
    """`standardize` with a given mean or variance, or a traced epsilon; JAX's own rules differentiate it."""
    dtype = jnp.result_type(*(a for a in (x, mean, variance, epsilon) if a is not None))
    wide = widened(selected(x.astype(dtype), where))
    weighting = weighting_of(x, where, weights)
    where = weighting.where
    weight, sample_mean, squares = row_moments(RowConfig(axes), axis_name, wide, weighting)
    deviations = moments.deviations(wide, sample_mean, where)
    sample_variance = (jnp.divide if weights is None else quotient)(squares, or_one(weight))
    if mean is None:
        is_constant = moments.is_rounding(sample_variance, sample_mean)
        deviations, sample_variance = (jnp.where(is_constant, 0, a) for a in (deviations, sample_variance))
    else:  # E[x^2] - m^2 = var + (E[x] - m) (E[x] + m), and E[(x - m)^2] = var + (E[x] - m)^2
        mean = _broadcast_statistic(wide, mean, where, 0)
        deviations = selected(wide - mean, where)
        gap = -moments.deviations(mean, sample_mean, where)
        sample_variance = jnp.maximum(sample_variance + gap * (gap if algorithm == "stable" else gap + 2 * mean), 0)
    variance = sample_variance if variance is None else _broadcast_statistic(wide, variance, where, 1)
    variance = variance + epsilon.astype(wide.dtype)
    is_zero = (variance == 0) & (deviations == 0)
    reciprocal_std = jnp.where(is_zero, 0, lax.rsqrt(jnp.where(is_zero, 1, variance)))
    return selected(deviations * reciprocal_std, where).astype(dtype)


def _broadcast_statistic(x: Array, statistic: Array, where: Array | None, masked: float) -> Array:
    return selected(jnp.broadcast_to(statistic, x.shape).astype(x.dtype), where, masked)


def _compute_statistics(config: _Config, x: Array, where: Array | None, narrow: Any) -> _Statistics:
    """The statistics of a wide array with 0 under the mask, which had the dtype `narrow`."""
    mean = moments.mean(x, config.axes, where, in_one_part=_has_one_part(narrow)) if config.centred else None
    square_sum = moments.squares(_deviations(x, mean, where), config.axes)
    variance = square_sum / jnp.maximum(moments.count(x, config.axes, where), 1)
    return _Statistics(mean, reciprocal_root(variance, mean, config.epsilon))


def _has_one_part(dtype: Any) -> bool:
    """Whether the mean of an array of `dtype` has no remainder.

    bfloat16 is 2**16 times coarser than float32: a remainder is pointless, and takes a fifth of the time.
    """
    return bool(dtype == jnp.bfloat16)


def _standardize(x: Array, statistics: _Statistics, where: Array | None) -> Array:
    return _deviations(x, statistics.mean, where) * statistics.reciprocal_std


def _deviations(x: Array, mean: Mean | None, where: Array | None) -> Array:
    return x if mean is None else moments.deviations(x, mean, where)


def _is_fused(x: Array, where: Array | None) -> bool:
    """Whether XLA's CPU compiler fuses a forward pass over the whole of `x`, which makes blocks pointless.

    It writes a mask and a widened float16 array to memory. On an automatic mesh rows may be split over devices, and to
    compute their statistics again would be to exchange them again.
    """
    return where is None and x.dtype != jnp.float16 and not is_on_automatic_mesh(x)


def _sum_over_rows(x: Array, axes: Axes, row_ndim: int) -> Array:
    """The sum over all axes that are not normalised; those within the last `row_ndim` axes keep size 1."""
    total = jnp.sum(x, tuple(a for a in range(-x.ndim, 0) if a not in axes), keepdims=True)
    return total.reshape(total.shape[total.ndim - row_ndim :])


def _reshape_like(parameter: Array | None, cotangent: Array | None) -> Array | None:
    if parameter is None or cotangent is None:
        return None
    return cotangent.reshape(parameter.shape).astype(parameter.dtype)
