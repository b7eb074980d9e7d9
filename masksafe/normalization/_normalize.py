r"""The formula of all norms, and its reverse rule.

.. math::
  \hat{x}_i = s (x_i - \mu), \qquad s = \frac{1}{\sqrt{\sigma^2 + \varepsilon}}, \qquad
  y_i = \gamma_i \hat{x}_i + \beta_i

.. math::
  d\hat{x}_i = \gamma_i \, dy_i, \qquad
  dx_i = s \left( d\hat{x}_i - \overline{d\hat{x}} - \hat{x}_i \, \overline{\hat{x} \, d\hat{x}} \right), \qquad
  d\gamma_i = \sum \hat{x}_i \, dy_i, \qquad d\beta_i = \sum dy_i

where a bar is the average over a row. The first of the averages comes from :math:`\mu`, the second from
:math:`\sigma^2`, of which `moments` has the derivatives.
"""

import functools
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core import platforms, row_blocks, run_time, sharding
from masksafe._core.derivatives import rule
from masksafe._core.masks import Weighting, both, masks_rows, selected
from masksafe._core.moments import Moments, Rows, moments, pull_back
from masksafe._core.precision import widened
from masksafe._core.typing import Array, Pytree
from masksafe.normalization._arguments import TINIEST, NormInputs

By = Literal["deviation", "mean square", "length"]


class Norm(NamedTuple):
    """The rows, and what they are divided by."""

    rows: Rows
    epsilon: float | None  # None where it is an array, in the `NormInputs`
    by: By = "deviation"

    def moments(self, inputs: NormInputs) -> Moments:
        weighting = Weighting(inputs.where, inputs.weights)
        return moments(self.rows, inputs.x, weighting, about_zero=self.by != "deviation")

    def factor(self, inputs: NormInputs, row_moments: Moments, variance: Array) -> Array:
        """The reciprocal of the divisor of each row; 0, without a derivative, where the divisor is 0."""
        is_zero = variance == 0
        if self.by == "length":
            divisor = self.rows.divisor(inputs.x, row_moments.weight)  # infinite for an empty row
            square = jnp.where(is_zero, 1, variance) * jnp.where(is_zero, 1, divisor)
            epsilon = self.epsilon or 0.0
            return jnp.where(is_zero | (square < epsilon**2), 1 / epsilon if epsilon else 0, lax.rsqrt(square))
        if self.epsilon is None:
            return lax.rsqrt(variance + inputs.epsilon)
        if self.epsilon >= TINIEST:
            return lax.rsqrt(variance + self.epsilon)
        return jnp.where(is_zero, 0, lax.rsqrt(jnp.where(is_zero, 1, variance)))


def normalized(norm: Norm, inputs: NormInputs, row_moments: Moments | None = None) -> tuple[Array, Moments]:
    """The result, and the moments, computed unless they are given; JAX's own rules may differentiate both.

    For x [4, 512, 256] with rows along the last axis and a scale [1, 1, 256]: moments [4, 512, 1].
    """
    inputs, unmasked_rows = _without_mask_of_rows(norm.rows, inputs)
    row_moments = norm.moments(inputs) if row_moments is None else row_moments
    where, factor = _unmasked(inputs, row_moments), norm.factor(inputs, row_moments, row_moments.variance)
    y = selected(row_moments.deviations(inputs.x, where) * factor, where)
    if inputs.scale is not None:  # selected before the product, whose derivative would be 0 * NaN
        y *= selected(inputs.scale.astype(y.dtype), where)
    if inputs.bias is not None:
        y += selected(inputs.bias.astype(y.dtype), where)
    return selected(y, unmasked_rows).astype(inputs.x.dtype), row_moments


def _without_mask_of_rows(rows: Rows, inputs: NormInputs) -> tuple[NormInputs, Array | None]:
    """If the mask masks whole rows: the inputs with zeros in masked rows and without a mask, and the mask."""
    if inputs.weights is not None or rows.devices.are_many or not masks_rows(inputs.where, rows.all_axes):
        return inputs, None
    return inputs._replace(x=selected(inputs.x, inputs.where), where=None), inputs.where


def _unmasked(inputs: NormInputs, row_moments: Moments) -> Array | None:
    """Which elements are unmasked; none of a row whose weights are all 0."""
    if inputs.weights is None or row_moments.weight is None:
        return inputs.where
    return both(inputs.where, row_moments.weight != 0)


def _evaluate(norm: Norm, inputs: NormInputs, row_moments: Moments | None) -> Array:
    compute = functools.partial(normalized, norm)
    if not norm.rows.are_one_fusion(inputs.x, inputs.where):
        compute = functools.partial(row_blocks.map_row_blocks, compute, leading=norm.rows.leading(inputs.x.ndim))
    return compute(inputs, row_moments)[0]


def _forward(norm: Norm, inputs: NormInputs, row_moments: Moments | None) -> tuple[Array, tuple[NormInputs, Moments]]:
    leading = norm.rows.leading(inputs.x.ndim)
    if row_moments is None and norm.rows.are_one_fusion(inputs.x, inputs.where):
        row_moments = row_blocks.map_row_blocks(norm.moments, platforms.unfused(inputs, on="cpu"), leading=leading)
        # Moments as a second result would break the fusion up (jax 0.12, 1024x1024: 8.0 ms for 6.0; 2048x768 alike).
        return normalized(norm, inputs)[0], (inputs, row_moments)
    compute = functools.partial(normalized, norm)
    y, row_moments = row_blocks.map_row_blocks(compute, inputs, row_moments, leading=leading)
    return y, (inputs, row_moments)


def _reverse(norm: Norm, residuals: tuple[NormInputs, Moments], d_y: Array) -> tuple[NormInputs, None]:
    inputs, row_moments = residuals
    # For GPUs XLA would compute the moments again in each kernel, and write products with the deviations to memory (jax
    # 0.12, H100, layer norm of 8192x1024: 471 MB moved for 304). For TPUs it computes result and gradient in one
    # kernel, which shares the deviations if it shares the moments (v5e: 12 kernels, with the barrier 14).
    row_moments = platforms.unfused(row_moments, on="gpu")
    parameters = inputs.scale, inputs.bias
    leading = norm.rows.leading(d_y.ndim)
    if any(p is not None and math.prod(p.shape[:leading]) != 1 for p in parameters):
        leading = 0  # their cotangents are not sums over all rows
    slopes, args = functools.partial(_slopes, norm, d_y.ndim - leading), (inputs, row_moments, d_y)
    is_one_fusion = norm.rows.are_one_fusion(inputs.x, inputs.where)  # which has no symbolic size
    if leading and is_one_fusion and d_y.size <= platforms.choices().most_elements_in_one_pass:
        by_fusions = functools.partial(_slopes_by_fusions, norm, slopes)
        slopes = functools.partial(platforms.by_platform, slopes, cpu=by_fusions)
    (d_x, d_weights), totals = row_blocks.map_row_blocks(slopes, *args, leading=leading, has_totals=True)
    like = lambda p, d: None if p is None else d.reshape(p.shape).astype(p.dtype)  # noqa: E731
    d_scale, d_bias = map(like, parameters, totals)
    return NormInputs(d_x, weights=d_weights, scale=d_scale, bias=d_bias), None


def _slopes(norm: Norm, num_axes: int, inputs: NormInputs, row_moments: Moments, d_y: Array) -> tuple[Pytree, Pytree]:
    """The cotangents of elements and weights, and those of scale and bias, which have the last `num_axes` axes.

    For x and d_y [4, 512, 256], moments [4, 512, 1] and a scale [1, 1, 256]: [4, 512, 256], and for the scale [256].
    """
    inputs, unmasked_rows = _without_mask_of_rows(norm.rows, inputs)
    x, scale, bias, where, weights, _ = inputs
    rows, unmasked = norm.rows, _unmasked(inputs, row_moments)
    deviations = row_moments.deviations(x, where)
    factor, pull_back_factor = jax.vjp(functools.partial(norm.factor, inputs, row_moments), row_moments.variance)
    d_y = widened(d_y) * run_time.unknown(1, deviations.dtype)
    d_y = selected(d_y, unmasked if unmasked_rows is None else unmasked_rows)
    d_bias, d_scale = d_y, d_y * deviations  # d_scale still without the factor
    if all(p is None or _is_constant_in_rows(p, factor) for p in (scale, bias)):  # two sums give all cotangents
        d_bias, d_scale = (jnp.sum(d, rows.axes, keepdims=True) for d in (d_bias, d_scale))
        has_unmasked = None if unmasked is None else run_time.any_of(unmasked, rows.axes, keepdims=True)
        total, product = (_scaled(d, scale, has_unmasked) for d in (d_bias, d_scale))
        d_scale *= factor
    else:
        total, product = (jnp.sum(_scaled(d, scale, unmasked), rows.axes, keepdims=True) for d in (d_bias, d_scale))
        d_scale = selected(d_scale * factor, unmasked)
    total, product = rows.add_up(total, product)
    (d_variance,) = pull_back_factor(sharding.vary_with(product, factor))
    d_x, d_weights = pull_back(rows, deviations, weights, row_moments, None, d_variance)
    d_normalized = _scaled(d_y, scale, unmasked)
    if row_moments.centre is not None:
        # Subtracted before the product, so that the only element of a row has a gradient of exactly 0.
        n = rows.divisor(deviations, row_moments.weight)
        d_normalized -= total / n if weights is None else (weights.astype(total.dtype) / n) * total
        d_weights = None if d_weights is None else d_weights - factor * total * (deviations / n)
    d_x = selected(selected(d_normalized * factor + d_x, unmasked), unmasked_rows).astype(x.dtype)
    totals = (None if p is None else _sum_to(p, d, num_axes) for p, d in ((scale, d_scale), (bias, d_bias)))
    return (d_x, None if d_weights is None else selected(d_weights, where)), tuple(totals)


def _slopes_by_fusions(norm: Norm, slopes: Callable[..., Pytree], *args: Pytree) -> Pytree:
    """Each cotangent computes the moments again.

    XLA would compute what they share on one core (jax 0.12, float32 1024x2048, gradients of x, scale and bias: 73 ms
    for 26); for the gradient of x alone there is no gain.
    """

    def again() -> Pytree:
        inputs, _, d_y = platforms.unfused(args)
        return slopes(inputs, norm.moments(inputs), d_y)

    return again()[0], (again()[1][0], again()[1][1])


normalize = rule(_forward, _reverse, _evaluate)


def _scaled(d_y: Array, scale: Array | None, where: Array | None) -> Array:
    return d_y if scale is None else selected(d_y * scale.astype(d_y.dtype), where)


def _is_constant_in_rows(parameter: Array, factor: Array) -> bool:
    return all(n == 1 or size != 1 for n, size in zip(parameter.shape, factor.shape, strict=True))


def _sum_to(parameter: Array, x: Array, num_axes: int) -> Array:
    """The sum of `x` over the axes along which a parameter broadcasts, with the last `num_axes` axes."""
    total = run_time.sum_of(x, [a for a, n in enumerate(parameter.shape) if n == 1], keepdims=True)
    return total.reshape(total.shape[total.ndim - num_axes :])
