"""Layer norm, RMS norm and `standardize`: normalisation of rows, with a variance computed from squared deviations.

The public functions check their arguments and bring scale and bias to the order of the axes in memory. `normalize_rows`
works on any axes without transposing.
"""

from __future__ import annotations

import numbers
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import lax

from masksafe._core import arguments, masks, moments, precision, row_blocks
from masksafe._core.public_op import public_op
from masksafe._core.sharding import AxisName, Devices, as_axis_name
from masksafe._core.typing import Array, ArrayLike, Axis, jitted
from masksafe.normalization._arguments import NormInputs, given, read
from masksafe.normalization._normalize import By, Norm, normalize


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

    The variance is computed from squared deviations, never as :math:`E[x^2] - E[x]^2`, which cancels when the mean is
    large.

    Args:
      x: floats `[...]`.
      scale: :math:`\gamma`, of the shape of the normalised axes in the order of `axis`; None means 1.
      bias: :math:`\beta`, of the same shape; None means 0.
      axis: the axis, or a tuple of axes in any order, over which mean and variance are taken; the elements along
        them form a row.
      where: booleans that broadcast to the shape of `x`, trailing axes first; False is masked, None masks nothing.
      epsilon: added to the variance, 0 or more.
      weights: non-negative numbers that broadcast to the shape of `x`, with which the elements enter the statistics;
        None means 1. A NaN or infinity of weight 0 is masked. A masked weight has no influence.
      axis_name: inside `jax.shard_map`, the mesh axis, or a tuple of them, over which rows are split; or the named axis
        of a `jax.vmap`. `scale` and `bias` are those of the device's own elements.

    Returns:
      An array of the shape and dtype of `x`, whatever the dtypes of `scale` and `bias`; float16 and bfloat16 are
      computed in float32 and rounded once. Masked elements are 0 (`bias` is not added) and get a gradient of 0. A
      fully masked row is 0; a row of one element or of equal elements is `bias`, even with an `epsilon` of 0, which
      makes its gradient 0. A NaN or infinity in an unmasked element makes the unmasked elements of its
      row NaN. Squares of deviations may overflow, in float32 beyond about 1e19.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> x = jnp.array([[1.0, 3.0, jnp.nan], [jnp.nan, jnp.nan, jnp.nan]])
      >>> scale, bias = jnp.full(3, 2.0), jnp.ones(3)
      >>> print(masksafe.layer_norm(x, scale, bias, where=~jnp.isnan(x), epsilon=0))
      [[-1.  3.  0.]
       [ 0.  0.  0.]]

    Coming from another library:
      flax's layers have the same default `epsilon`, but the variance :math:`E[x^2] - E[x]^2` unless
      `use_fast_variance=False`, and the promoted dtype of `x`, `scale` and `bias`. For their `feature_axes` multiply
      the result of `standardize` by a scale. equinox and torch have an `epsilon` of 1e-5 and no mask; torch's
      `normalized_shape` stands for that many last axes: `axis=(-2, -1)` for a shape of two.

    References:
      `Ba, Kiros, Hinton, Layer Normalization, 2016 <https://arxiv.org/abs/1607.06450>`_.
    """
    static, arrays = given("layer_norm", x, scale, bias, where, weights, epsilon)
    return normalize_rows(Call.of("layer_norm", arrays.x, axis, axis_name, static), arrays)


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
      An array of the shape and dtype of `x`. It is 0 at masked elements, in a fully masked row and in a row of
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
    static, arrays = given("rms_norm", x, scale, None, where, weights, epsilon)
    return normalize_rows(Call.of("rms_norm", arrays.x, axis, axis_name, static, "mean square"), arrays)


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
      epsilon: added to the variance, 0 or more; a number or an array of one element, which may be traced.
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
      :math:`E[x^2] - E[x]^2`, which cancels, and returns NaN where all is masked.
    """
    op = "standardize"
    x = arguments.as_promoted_float_array(op, "x", x, any_width=True)
    arguments.as_choice(op, "algorithm", algorithm, ("fast", "stable"))
    is_number = isinstance(epsilon, numbers.Real)
    static, arrays = given(op, x, None, None, where, weights, epsilon if is_number else 0.0)
    if mean is None and variance is None and is_number:
        return normalize_rows(Call.of(op, x, axis, axis_name, static), arrays)
    epsilon = arguments.as_one_element(op, "epsilon", arguments.as_array(op, "epsilon", epsilon))
    mean = arguments.if_given(_as_statistic, op, "mean", mean, x)
    variance = arguments.if_given(_as_statistic, op, "variance", variance, x)
    rows = moments.Rows(arguments.canonical_axes(op, axis, x.ndim), Devices(as_axis_name(op, axis_name)))
    return _standardize_with_given_statistics(rows, algorithm, arrays._replace(epsilon=epsilon), mean, variance)


class Call(NamedTuple):
    """The static arguments of a norm of rows."""

    op: str
    axis: Axis | None
    devices: Devices
    epsilon: float | None
    by: By

    @classmethod
    def of(
        cls, op: str, x: Array, axis: Axis | None, axis_name: AxisName, epsilon: float | None, by: By = "deviation"
    ) -> Call:
        axis = axis if type(axis) is int else arguments.canonical_axes(op, axis, x.ndim)  # a list cannot be hashed
        return cls(op, axis, Devices(as_axis_name(op, axis_name)), epsilon, by)


@jitted(0)
def normalize_rows(call: Call, arrays: NormInputs) -> Array:
    """A norm of rows by their own moments; scale and bias have the shape of a row."""
    ndim = arrays.x.ndim
    axes = arguments.canonical_axes(call.op, call.axis, ndim)
    inputs = read(call.op, arrays, axes)
    rows, inputs = moments.Rows(row_blocks.axes_of_row(axes, ndim), call.devices).on_one_axis(inputs)
    return normalize(Norm(rows, call.epsilon, call.by), inputs, None).reshape(arrays.x.shape)


def _as_statistic(op: str, argument: str, value: ArrayLike, x: Array) -> Array:
    return arguments.at_rank_of(op, argument, arguments.as_promoted_float_array(op, argument, value), x.shape, "x")


@jitted(0, 1)
def _standardize_with_given_statistics(
    rows: moments.Rows, algorithm: str, arrays: NormInputs, mean: Array | None, variance: Array | None
) -> Array:
    """`standardize` with a given mean or variance, or a traced epsilon; JAX's own rules differentiate it."""
    x, epsilon = arrays.x, arrays.epsilon
    dtype = jnp.result_type(*(a for a in (x, mean, variance, epsilon) if a is not None))
    x, weighting = masks.read_weighting("standardize", x.astype(dtype), arrays.where, arrays.weights)
    wide = precision.widened(masks.selected(x, weighting.where))
    row_moments, where = moments.moments(rows, wide, weighting), weighting.where
    if mean is None:
        deviations = row_moments.deviations(wide, where)
    else:
        mean = _broadcast_statistic(wide, mean, where, 0)
        deviations = masks.selected(wide - mean, where)
    if variance is not None:
        variance = _broadcast_statistic(wide, variance, where, 1)
    elif mean is None:
        variance = row_moments.variance
    else:  # E[(x - m)^2] = var + (E[x] - m)^2, and E[x^2] - m^2 = var + (E[x] - m) (E[x] + m)
        gap = -row_moments.deviations(mean, where)
        variance = row_moments.variance + gap * (gap if algorithm == "stable" else gap + 2 * mean)
        variance = jnp.where(variance < 0, 0, variance)  # whose derivative at 0 is whole
    variance = variance + epsilon.astype(wide.dtype)
    is_zero = (variance == 0) & (deviations == 0)
    reciprocal_std = jnp.where(is_zero, 0, lax.rsqrt(jnp.where(is_zero, 1, variance)))
    return masks.selected(deviations * reciprocal_std, where).astype(dtype)


def _broadcast_statistic(x: Array, statistic: Array, where: Array | None, masked: float) -> Array:
    return masks.selected(jnp.broadcast_to(statistic, x.shape).astype(x.dtype), where, masked)
