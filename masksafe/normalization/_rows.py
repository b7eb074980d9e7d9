r"""Normalisation of rows by their own statistics.

.. math::
  \hat{x}_i = s (x_i - \mu), \qquad s = \frac{1}{\sqrt{\sigma^2 + \varepsilon}}, \qquad
  y_i = \gamma_i \hat{x}_i + \beta_i

.. math::
  d\hat{x}_i = \gamma_i \, dy_i, \qquad
  dx_i = s \left( d\hat{x}_i - \overline{d\hat{x}} - \hat{x}_i \, \overline{\hat{x} \, d\hat{x}} \right), \qquad
  d\gamma_i = \sum \hat{x}_i \, dy_i, \qquad d\beta_i = \sum dy_i

where a bar is the average over the unmasked elements of a row. The root mean square has no :math:`\mu`, hence no
:math:`\overline{d\hat{x}}`. Both passes are computed in one of three ways:

* in blocks of rows, on a CPU. This is the plain form as well: the others have its derivatives.
* in few passes over the memory of an accelerator.
* a row in one kernel of an accelerator, which keeps it in registers: short rows, under no mask but one of rows.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core import moments, platforms, row_blocks, sharding, unfolded
from masksafe._core.derivatives import with_derivatives_of, with_reverse_rule
from masksafe._core.masks import masks_rows, selected
from masksafe._core.precision import widened
from masksafe._core.typing import Array, Tree, jitted
from masksafe.normalization._arguments import Inputs
from masksafe.normalization._statistics import reciprocal_root, scaled_and_shifted


class Config(NamedTuple):
    """It is static."""

    axes: tuple[int, ...]  # of a row, counted from the end
    epsilon: float | None  # None where it is an array, in the `Inputs`
    centred: bool  # otherwise by the root mean square
    has_bias: bool

    def leading(self, x: Array) -> int:
        """How many axes precede the first of a row."""
        return x.ndim + min(self.axes, default=-x.ndim)


class Statistics(NamedTuple):
    """Of each row; the normalised axes have size 1."""

    mean: moments.Mean | None  # None for the root mean square
    reciprocal_std: Array

    @classmethod
    def of(
        cls, config: Config, inputs: Inputs, mean: moments.Mean | None, square_sum: Array, n: Array | float
    ) -> "Statistics":
        """From the mean of `n` elements and the sum of their squared deviations from it."""
        if mean is not None and _has_one_part(inputs.x.dtype):
            mean = moments.Mean(moments.total(mean), None)
        return cls(mean, reciprocal_root(square_sum / n, mean, config.epsilon, inputs.epsilon))


_ScaleAndBias = tuple[Array | None, Array | None]  # their cotangents


def _forward(config: Config, inputs: Inputs) -> tuple[Array, tuple[Inputs, Statistics | None]]:
    y, statistics = _normalize(config, inputs)
    return y, (inputs, statistics)


def _reverse(config: Config, residuals: tuple[Inputs, Statistics | None], d_y: Array) -> tuple[Inputs]:
    return (_pull_back(config, *residuals, d_y),)


@with_reverse_rule(_forward, _reverse, static_argnums=(0,))
def normalize_rows(config: Config, inputs: Inputs) -> Array:
    return _normalize(config, inputs)[0]


@jitted(0)
def _normalize(config: Config, inputs: Inputs) -> tuple[Array, Statistics | None]:
    """The result, and the statistics if they cost nothing.

    If XLA fuses the pass, a second result would prevent that. Then the reverse pass computes the statistics again, on a
    CPU from blocks in the cache.
    """
    inputs = _with_epsilon_in_blocks(inputs)
    x, where, _, scale, bias, _ = inputs
    is_fused = _is_fused(x, where)
    in_blocks = functools.partial(_normalize_block, config)

    def on_cpu(inputs: Inputs) -> tuple[Array, Statistics | None]:
        if is_fused:
            return in_blocks(inputs)[0], None
        return row_blocks.map_row_blocks(in_blocks, inputs, leading=config.leading(x))

    def elsewhere(inputs: Inputs) -> tuple[Array, Statistics | None]:
        if not masks_rows(where, config.axes):
            return _normalize_in_few_passes(config, inputs)
        if platforms.fits_into_a_kernel(config.axes, x.shape):
            y = _normalize_in_one_kernel(config, inputs)
        else:
            y, _ = _normalize_in_few_passes(config, inputs)
        return y, None if is_fused else _zero_statistics(config, x)

    if not moments.may_save_passes(config.axes, x, where, scale, bias):
        return on_cpu(inputs)
    return platforms.on_cpu_or_elsewhere(on_cpu, elsewhere, inputs)


@jitted(0)
def _pull_back(config: Config, inputs: Inputs, statistics: Statistics | None, d_y: Array) -> Inputs:
    """The cotangents."""
    x, where, _, scale, bias, _ = inputs

    def on_cpu(*args: Any) -> tuple[Array, _ScaleAndBias]:
        def of_block(inputs: Inputs, statistics: Statistics | None, d_y: Array) -> tuple[Array, _ScaleAndBias]:
            d_y = widened(d_y)
            return _pull_back_block(config, inputs, statistics, d_y * unfolded.unknown(1, d_y.dtype))

        return row_blocks.map_row_blocks(of_block, *args, leading=config.leading(x), has_totals=True)

    def elsewhere(inputs: Inputs, statistics: Statistics | None, d_y: Array) -> tuple[Array, _ScaleAndBias]:
        if not masks_rows(where, config.axes):
            return _pull_back_in_few_passes(config, inputs, statistics, d_y)
        has_parameters = scale is not None or config.has_bias
        in_one_kernel = not has_parameters and platforms.fits_into_a_kernel(config.axes, x.shape)
        pull_back = _pull_back_in_one_kernel if in_one_kernel else _pull_back_in_few_passes
        return pull_back(config, inputs, None, d_y)  # not from the zeros

    args = _with_epsilon_in_blocks(inputs)._replace(bias=None), statistics, d_y
    if moments.may_save_passes(config.axes, x, d_y, where, scale):
        d_x, (d_scale, d_bias) = platforms.on_cpu_or_elsewhere(on_cpu, elsewhere, *args)
    else:
        d_x, (d_scale, d_bias) = on_cpu(*args)
    return Inputs(d_x, scale=_reshape_like(scale, d_scale), bias=_reshape_like(bias, d_bias))


def _with_epsilon_in_blocks(inputs: Inputs) -> Inputs:
    """The inputs with an epsilon of the rank of `x`, of which a block can be cut."""
    epsilon = None if inputs.epsilon is None else jnp.reshape(inputs.epsilon, (1,) * inputs.x.ndim)
    return inputs._replace(epsilon=epsilon)


def _is_fused(x: Array, where: Array | None) -> bool:
    """Whether XLA's CPU compiler fuses a forward pass over the whole of `x`, which makes blocks pointless.

    It writes a mask and a widened float16 array to memory. On an automatic mesh rows may be split over devices, and to
    compute their statistics again would be to exchange them again.
    """
    return where is None and x.dtype != jnp.float16 and not sharding.is_on_automatic_mesh(x)


def _zero_statistics(config: Config, x: Array) -> Statistics:
    """Zeros where a CPU keeps statistics for the reverse pass."""
    zero = jnp.zeros_like(widened(moments.first_of_rows(x, config.axes)))
    mean = moments.Mean(zero, None if _has_one_part(x.dtype) else zero) if config.centred else None
    return Statistics(mean, zero)


def _reshape_like(parameter: Array | None, cotangent: Array | None) -> Array | None:
    if parameter is None or cotangent is None:
        return None
    return cotangent.reshape(parameter.shape).astype(parameter.dtype)


# In blocks.


def _normalize_block(config: Config, inputs: Inputs) -> tuple[Array, Statistics]:
    wide = selected(widened(inputs.x), inputs.where)
    statistics = _statistics_of_block(config, inputs, wide)
    return scaled_and_shifted(_standardize(wide, statistics, inputs.where), inputs), statistics


def _pull_back_block(
    config: Config, inputs: Inputs, statistics: Statistics | None, d_y: Array
) -> tuple[Array, _ScaleAndBias]:
    x, where, _, scale, *_ = inputs
    wide = selected(widened(x), where)
    statistics = statistics or _statistics_of_block(config, inputs, wide)
    normalized = _standardize(wide, statistics, where)
    d_y = selected(d_y.astype(wide.dtype), where)
    d_normalized = d_y if scale is None else selected(_scaled(d_y, scale), where)
    d_deviations = d_normalized - normalized * moments.average(d_normalized * normalized, config.axes, where)
    if config.centred:
        d_deviations -= moments.average(d_normalized, config.axes, where)
    d_x = selected(d_deviations * statistics.reciprocal_std, where).astype(x.dtype)
    d_scale = None if scale is None else selected(d_y * normalized, where)  # the statistics of a row may be NaN
    return d_x, _sums_over_rows(config, x, d_scale, d_y if config.has_bias else None)


def _statistics_of_block(config: Config, inputs: Inputs, wide: Array) -> Statistics:
    """The statistics of the widened array with 0 under the mask."""
    axes, where, in_one_part = config.axes, inputs.where, _has_one_part(inputs.x.dtype)
    mean = moments.mean(wide, axes, where, in_one_part=in_one_part) if config.centred else None
    square_sum = moments.squares(_deviations(wide, mean, where), axes)
    return Statistics.of(config, inputs, mean, square_sum, moments.count_or_one(wide, axes, where))


def _has_one_part(dtype: Any) -> bool:
    """Whether the mean of an array of `dtype` has no remainder.

    bfloat16 is 2**16 times coarser than float32: a remainder is pointless, and takes a fifth of the time.
    """
    return bool(dtype == jnp.bfloat16)


def _standardize(x: Array, statistics: Statistics, where: Array | None) -> Array:
    return _deviations(x, statistics.mean, where) * statistics.reciprocal_std


def _deviations(x: Array, mean: moments.Mean | None, where: Array | None) -> Array:
    return x if mean is None else moments.deviations(x, mean, where)


def _scaled(d_y: Array, scale: Array | None) -> Array:
    return d_y if scale is None else d_y * scale.astype(d_y.dtype)


def _sums_over_rows(config: Config, x: Array, d_scale: Array | None, d_bias: Array | None) -> _ScaleAndBias:
    """The sums over all axes that are not normalised; those between the axes of a row keep size 1."""

    def total(a: Array) -> Array:
        sums = jnp.sum(a, tuple(axis for axis in range(-x.ndim, 0) if axis not in config.axes), keepdims=True)
        return sums.reshape(sums.shape[config.leading(x) :])

    return jax.tree.map(total, (d_scale, d_bias))  # type: ignore[no-any-return]


# In few passes. XLA writes an array that several sums share to memory if it is expensive to compute, such as a selected
# one, and one that is used before and after the sums. So masks of rows are applied to the sums, and a barrier hides
# what is computed twice.


@with_derivatives_of(_normalize_block)
def _normalize_in_few_passes(config: Config, inputs: Inputs) -> tuple[Array, Statistics]:
    x, where = inputs.x, inputs.where
    if config.centred:
        mean, square_sum = moments.mean_and_squares(x, config.axes, where)
        statistics = Statistics.of(config, inputs, mean, square_sum, _number(config, inputs))
    else:
        statistics = _statistics_of_block(config, inputs, selected(widened(x), where))
    if not masks_rows(where, config.axes):
        inputs, statistics = lax.optimization_barrier((inputs, statistics))
    wide = selected(widened(inputs.x), inputs.where)
    return scaled_and_shifted(_standardize(wide, statistics, inputs.where), inputs), statistics


class _Averages(NamedTuple):
    """Averages over each row, for the reverse pass."""

    product: Array  # of the normalised elements with their cotangents
    d_normalized: Array | None  # of the cotangents; None for the root mean square


@with_derivatives_of(_pull_back_block)
def _pull_back_in_few_passes(
    config: Config, inputs: Inputs, statistics: Statistics | None, d_y: Array
) -> tuple[Array, _ScaleAndBias]:
    """The cotangents, from statistics unless the mask is one of rows."""
    if statistics is None:
        statistics, averages = _statistics_and_averages(config, inputs, d_y)
    else:
        averages = _averages(config, inputs, statistics, d_y)
    inputs, d_y, statistics, averages = lax.optimization_barrier((inputs, d_y, statistics, averages))
    x, where, _, scale, *_ = inputs
    wide, d_y = selected(widened(x), where), selected(widened(d_y), where)
    deviations = _deviations(wide, statistics.mean, None)
    factor = statistics.reciprocal_std * averages.product
    d_deviations = _scaled(d_y, scale) - deviations * factor
    if averages.d_normalized is not None:
        d_deviations -= averages.d_normalized
    d_scale = None if scale is None else d_y * (deviations * statistics.reciprocal_std)
    if d_scale is not None and not masks_rows(where, config.axes):  # the statistics of a row may be NaN
        d_scale = selected(d_scale, where)
    d_x = selected(d_deviations * statistics.reciprocal_std, where).astype(x.dtype)
    return d_x, _sums_over_rows(config, x, d_scale, d_y if config.has_bias else None)


def _number(config: Config, inputs: Inputs) -> Array | float:
    """The number of unmasked elements of each row in which there is one; else 1 or more."""
    where = None if masks_rows(inputs.where, config.axes) else inputs.where
    return moments.count_or_one(widened(inputs.x), config.axes, where)


def _averages(config: Config, inputs: Inputs, statistics: Statistics, d_y: Array) -> _Averages:
    d_normalized = _scaled(widened(d_y), inputs.scale)
    products = d_normalized * _standardize(widened(inputs.x), statistics, None)
    terms = (products, d_normalized) if config.centred else (products,)
    n = _number(config, inputs)
    product, *total = (a / n for a in moments.sums(config.axes, inputs.where, *terms))
    return _Averages(product, total[0] if total else None)


def _statistics_and_averages(config: Config, inputs: Inputs, d_y: Array) -> tuple[Statistics, _Averages]:
    """Both in one pass, under a mask of rows."""
    x = lax.optimization_barrier(inputs.x)  # else the forward pass shares a sum, and no longer stays in registers
    n = math.prod(x.shape[a] for a in config.axes)
    wide, d_normalized = widened(x), _scaled(widened(d_y), inputs.scale)
    if config.centred:
        shift = moments.near_mean(x, config.axes)
        shifted = wide - shift
        terms = shifted, shifted * shifted, d_normalized * shifted, d_normalized
        *about_shift, product, d_total = moments.sums(config.axes, None, *terms)
        statistics = Statistics.of(config, inputs, *moments.about_mean(shift, about_shift, n), n)
        product, cotangent = product - d_total * (about_shift[0] / n), d_total / n
    else:
        square_sum, product = moments.sums(config.axes, None, wide * wide, d_normalized * wide)
        statistics, cotangent = Statistics.of(config, inputs, None, square_sum, n), None
    averages = _Averages(product * statistics.reciprocal_std / n, cotangent)
    return jax.tree.map(lambda a: selected(a, inputs.where), (statistics, averages))  # type: ignore[no-any-return]


# A row in one kernel.


@with_derivatives_of(lambda config, inputs: _normalize_block(config, inputs)[0])
def _normalize_in_one_kernel(config: Config, inputs: Inputs) -> Array:
    rows = _with_axes_merged(config, inputs)
    x, where = selected(rows.x, rows.where), rows.where
    y, _ = _normalize_block(config._replace(axes=(-1,)), rows._replace(x=x, where=None))
    return selected(y, where).reshape(inputs.x.shape)


@with_derivatives_of(_pull_back_block)
def _pull_back_in_one_kernel(
    config: Config, inputs: Inputs, statistics: Statistics | None, d_y: Array
) -> tuple[Array, _ScaleAndBias]:
    rows, d_y = _with_axes_merged(config, (inputs, d_y))
    x, where = selected(rows.x, rows.where), rows.where
    rows = rows._replace(x=x, where=None)
    d_x, totals = _pull_back_block(config._replace(axes=(-1,)), rows, None, selected(d_y, where))
    return selected(d_x, where).reshape(inputs.x.shape), totals


def _with_axes_merged(config: Config, tree: Tree) -> Tree:
    """The arrays, of which the first is whole, with the axes of a row merged into one; XLA would split it again."""
    number = len(config.axes)
    if number == 1:
        return tree
    row = jax.tree.leaves(tree)[0].shape[-number:]

    def merged(a: Array) -> Array:
        leading, own = a.shape[:-number], a.shape[-number:]
        if math.prod(own) == 1:
            return a.reshape(*leading, 1)
        return jnp.broadcast_to(a, leading + row).reshape(*leading, -1)

    return lax.optimization_barrier(jax.tree.map(merged, tree))  # type: ignore[no-any-return]
