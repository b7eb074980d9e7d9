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
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core import platforms, row_blocks, sharding, unfolded
from masksafe._core.derivatives import rule
from masksafe._core.masks import Weighting, both, masks_rows, selected
from masksafe._core.moments import Moments, Rows, moments, pull_back
from masksafe._core.precision import widened
from masksafe._core.typing import Array, Pytree
from masksafe.normalization._arguments import TINIEST, NormInputs

By = Literal["deviation", "mean square", "length"]


class Norm(NamedTuple):
    """What rows are divided by, and over what they extend."""

    rows: Rows
    epsilon: float | None  # None where it is an array, in the `NormInputs`
    by: By = "deviation"

    def moments(self, inputs: NormInputs) -> Moments:
        weighting = Weighting(inputs.where, inputs.weights)
        return moments(self.rows, inputs.x, weighting, about_zero=self.by != "deviation")

    def factor(self, inputs: NormInputs, of_rows: Moments, variance: Array) -> Array:
        """The reciprocal of what rows are divided by; a constant 0 where that is 0."""
        is_zero = variance == 0
        if self.by == "length":
            divisor = self.rows.divisor(inputs.x, of_rows.weight)  # infinite, of nothing
            square = jnp.where(is_zero, 1, variance) * jnp.where(is_zero, 1, divisor)
            epsilon = self.epsilon or 0.0
            return jnp.where(is_zero | (square < epsilon**2), 1 / epsilon if epsilon else 0, lax.rsqrt(square))
        if self.epsilon is None:
            return lax.rsqrt(variance + inputs.epsilon)
        if self.epsilon >= TINIEST:
            return lax.rsqrt(variance + self.epsilon)
        return jnp.where(is_zero, 0, lax.rsqrt(jnp.where(is_zero, 1, variance)))


def normalized(norm: Norm, inputs: NormInputs, of_rows: Moments | None = None) -> tuple[Array, Moments]:
    """The result, and the moments of rows if they are not given; JAX's own rules may differentiate both."""
    inputs, live_rows = _without_mask_of_rows(norm.rows, inputs)
    of_rows = norm.moments(inputs) if of_rows is None else of_rows
    where, factor = _live(inputs, of_rows), norm.factor(inputs, of_rows, of_rows.variance)
    y = selected(of_rows.deviations(inputs.x, where) * factor, where)
    if inputs.scale is not None:  # selected before the product, whose derivative would be 0 * NaN
        y *= selected(inputs.scale.astype(y.dtype), where)
    if inputs.bias is not None:
        y += selected(inputs.bias.astype(y.dtype), where)
    return selected(selected(y, where), live_rows).astype(inputs.x.dtype), of_rows


def _without_mask_of_rows(rows: Rows, inputs: NormInputs) -> tuple[NormInputs, Array | None]:
    """The inputs with zeros in masked rows, and which rows are not masked: within a row there is no mask then."""
    if inputs.weights is not None or rows.devices.are_many or not masks_rows(inputs.where, rows.all_axes):
        return inputs, None
    return inputs._replace(x=selected(inputs.x, inputs.where), where=None), inputs.where


def _live(inputs: NormInputs, of_rows: Moments) -> Array | None:
    """Which elements have a result: those of rows with weights of 0 alone have none."""
    if inputs.weights is None or of_rows.weight is None:
        return inputs.where
    return both(inputs.where, of_rows.weight != 0)


def _evaluate(norm: Norm, inputs: NormInputs, of_rows: Moments | None) -> Array:
    compute = functools.partial(normalized, norm)
    if not norm.rows.are_one_kernel(inputs.x, inputs.where):
        compute = functools.partial(row_blocks.map_row_blocks, compute, leading=norm.rows.leading(inputs.x.ndim))
    return compute(inputs, of_rows)[0]


def _forward(norm: Norm, inputs: NormInputs, of_rows: Moments | None) -> tuple[Array, tuple[NormInputs, Moments]]:
    leading = norm.rows.leading(inputs.x.ndim)
    if of_rows is None and norm.rows.are_one_kernel(inputs.x, inputs.where):
        of_rows = row_blocks.map_row_blocks(norm.moments, platforms.unfused_on_cpu(inputs), leading=leading)
        return normalized(norm, inputs)[0], (inputs, of_rows)  # moments as a second result would break the kernel up
    y, of_rows = row_blocks.map_row_blocks(functools.partial(normalized, norm), inputs, of_rows, leading=leading)
    return y, (inputs, of_rows)


def _reverse(norm: Norm, residuals: tuple[NormInputs, Moments], d_y: Array) -> tuple[NormInputs, None]:
    inputs, of_rows = residuals
    # For GPUs XLA would compute them again in each kernel, and write products with the deviations to memory. For TPUs
    # it computes result and gradient in one kernel, which has the deviations in common if the moments are.
    of_rows = platforms.unfused_on_gpu(of_rows)
    parameters = inputs.scale, inputs.bias
    leading = norm.rows.leading(d_y.ndim)
    if any(p is not None and math.prod(p.shape[:leading]) != 1 for p in parameters):
        leading = 0  # their cotangents are no sums over all rows
    slopes = functools.partial(_slopes, norm, d_y.ndim - leading)
    (d_x, d_weights), totals = row_blocks.map_row_blocks(slopes, inputs, of_rows, d_y, leading=leading, has_totals=True)
    d_scale, d_bias = (
        None if p is None else d.reshape(p.shape).astype(p.dtype) for p, d in zip(parameters, totals, strict=True)
    )
    return NormInputs(d_x, weights=d_weights, scale=d_scale, bias=d_bias), None


def _slopes(norm: Norm, own: int, inputs: NormInputs, of_rows: Moments, d_y: Array) -> tuple[Pytree, Pytree]:
    """The cotangents of the elements and of their weights, and those of scale and bias, with the last `own` axes."""
    inputs, live_rows = _without_mask_of_rows(norm.rows, inputs)
    x, scale, bias, where, weights, _ = inputs
    rows, live = norm.rows, _live(inputs, of_rows)
    deviations = of_rows.deviations(x, where)
    factor, of_factor = jax.vjp(functools.partial(norm.factor, inputs, of_rows), of_rows.variance)
    d_y = selected(widened(d_y) * unfolded.unknown(1, deviations.dtype), live if live_rows is None else live_rows)
    d_bias, d_scale = d_y, d_y * deviations  # the latter but for the factor
    if all(p is None or _is_constant_in_rows(p, factor) for p in (scale, bias)):  # two sums give all cotangents
        d_bias, d_scale = (jnp.sum(d, rows.axes, keepdims=True) for d in (d_bias, d_scale))
        has_some = None if live is None else unfolded.any_of(live, rows.axes, keepdims=True)
        total, product = (_scaled(d, scale, has_some) for d in (d_bias, d_scale))
        d_scale *= factor
    else:
        total, product = (jnp.sum(_scaled(d, scale, live), rows.axes, keepdims=True) for d in (d_bias, d_scale))
        d_scale = selected(d_scale * factor, live)
    total, product = rows.add_up(total, product)
    (d_variance,) = of_factor(sharding.vary_with(product, factor))
    d_x, d_weights = pull_back(rows, deviations, weights, of_rows, None, d_variance)
    d_normalized = _scaled(d_y, scale, live)
    if of_rows.centre is not None:
        # Subtracted before the product: the only element of a row has a gradient of exactly 0.
        n = rows.divisor(deviations, of_rows.weight)
        d_normalized -= total / n if weights is None else (weights.astype(total.dtype) / n) * total
        d_weights = None if d_weights is None else d_weights - factor * total * (deviations / n)
    d_x = selected(selected(d_normalized * factor + d_x, live), live_rows).astype(x.dtype)
    totals = (None if p is None else _sum_to(p, d, own) for p, d in ((scale, d_scale), (bias, d_bias)))
    return (d_x, None if d_weights is None else selected(d_weights, where)), tuple(totals)


normalize = rule(_forward, _reverse, _evaluate)


def _scaled(d_y: Array, scale: Array | None, where: Array | None) -> Array:
    return d_y if scale is None else selected(d_y * scale.astype(d_y.dtype), where)


def _is_constant_in_rows(parameter: Array, of_rows: Array) -> bool:
    return all(n == 1 or of_row != 1 for n, of_row in zip(parameter.shape, of_rows.shape, strict=True))


def _sum_to(parameter: Array, x: Array, own: int) -> Array:
    """The sum of `x` over the axes along which a parameter repeats, with the last `own` axes."""
    total = unfolded.sum_of(x, [a for a, n in enumerate(parameter.shape) if n == 1], keepdims=True)
    return total.reshape(total.shape[total.ndim - own :])
