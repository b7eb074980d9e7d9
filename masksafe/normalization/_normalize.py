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
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core import row_blocks, unfolded
from masksafe._core.derivatives import with_reverse_rule
from masksafe._core.masks import Weighting, both, selected
from masksafe._core.moments import Moments, Rows, moments, pull_back
from masksafe._core.precision import widened
from masksafe._core.typing import Array
from masksafe.normalization._arguments import TINIEST, Inputs

By = Literal["deviation", "mean square", "length"]


class Norm(NamedTuple):
    """What rows are divided by, and over what they extend."""

    rows: Rows
    epsilon: float | None  # None where it is an array, in the `Inputs`
    by: By = "deviation"

    def moments(self, inputs: Inputs) -> Moments:
        weighting = Weighting(inputs.where, inputs.weights)
        return moments(self.rows, inputs.x, weighting, about_zero=self.by != "deviation")

    def factor(self, inputs: Inputs, of_rows: Moments, variance: Array) -> Array:
        """The reciprocal of what rows are divided by; a constant 0 where that is 0."""
        is_zero = variance == 0
        if self.by == "length":
            square = jnp.where(is_zero, 1, variance) * self.rows.divisor(inputs.x, of_rows.weight)
            epsilon = self.epsilon or 0.0
            return jnp.where(is_zero | (square < epsilon**2), 1 / epsilon if epsilon else 0, lax.rsqrt(square))
        if self.epsilon is None:
            return lax.rsqrt(variance + inputs.epsilon)
        if self.epsilon >= TINIEST:
            return lax.rsqrt(variance + self.epsilon)
        return jnp.where(is_zero, 0, lax.rsqrt(jnp.where(is_zero, 1, variance)))


def normalized(norm: Norm, inputs: Inputs, of_rows: Moments | None = None) -> tuple[Array, Moments]:
    """The result, and the moments of rows if they are not given; JAX's own rules may differentiate both."""
    of_rows = of_rows or norm.moments(inputs)
    where, factor = _live(inputs, of_rows), norm.factor(inputs, of_rows, of_rows.variance)
    y = selected(of_rows.deviations(inputs.x, where) * factor, where)
    if inputs.scale is not None:  # selected before the product, whose derivative would be 0 * NaN
        y *= selected(inputs.scale.astype(y.dtype), where)
    if inputs.bias is not None:
        y += inputs.bias.astype(y.dtype)
    return selected(y, where).astype(inputs.x.dtype), of_rows


def _live(inputs: Inputs, of_rows: Moments) -> Array | None:
    """Which elements have a result: those of rows with weights of 0 alone have none."""
    if inputs.weights is None or of_rows.weight is None:
        return inputs.where
    return both(inputs.where, of_rows.weight != 0)


def _forward(norm: Norm, inputs: Inputs, of_rows: Moments | None) -> tuple[Array, tuple[Inputs, Moments]]:
    of_block = functools.partial(normalized, norm)
    y, of_rows = norm.rows.map(of_block, inputs, of_rows, is_masked=inputs.where is not None)
    return y, (inputs, of_rows)


def _reverse(norm: Norm, residuals: tuple[Inputs, Moments], d_y: Array) -> tuple[Inputs, None]:
    inputs, of_rows = residuals
    parameters = inputs.scale, inputs.bias
    leading = norm.rows.leading(d_y.ndim)
    if any(p is not None and math.prod(p.shape[:leading]) != 1 for p in parameters):
        leading = 0  # their cotangents are no sums over all rows
    slopes = functools.partial(_slopes, norm, d_y.ndim - leading)
    (d_x, d_weights), totals = row_blocks.map_row_blocks(slopes, inputs, of_rows, d_y, leading=leading, has_totals=True)
    d_scale, d_bias = (
        None if p is None else d.reshape(p.shape).astype(p.dtype) for p, d in zip(parameters, totals, strict=True)
    )
    return Inputs(d_x, weights=d_weights, scale=d_scale, bias=d_bias), None


def _slopes(norm: Norm, own: int, inputs: Inputs, of_rows: Moments, d_y: Array) -> tuple[Any, Any]:
    """The cotangents of the elements and of their weights, and those of scale and bias, with the last `own` axes."""
    x, where, weights, scale, bias, _ = inputs
    rows, live = norm.rows, _live(inputs, of_rows)
    deviations = of_rows.deviations(x, where)
    factor, of_factor = jax.vjp(functools.partial(norm.factor, inputs, of_rows), of_rows.variance)
    d_y = selected(widened(d_y) * unfolded.unknown(1, deviations.dtype), live)

    def times_scale(a: Array) -> Array:
        return a if scale is None else a * scale.astype(a.dtype)

    d_normalized = d_y if scale is None else selected(times_scale(d_y), live)
    if all(p is None or _is_constant_in_rows(p, factor) for p in (scale, bias)):  # two sums give all cotangents
        total, product = (jnp.sum(a, rows.axes, keepdims=True) for a in (d_y, d_y * deviations))
        d_scale, d_bias = product * factor, total
        has_some = None if live is None else unfolded.any_of(live, rows.axes, keepdims=True)
        total, product = (selected(times_scale(a), has_some) for a in (total, product))
    else:
        total, product = (jnp.sum(a, rows.axes, keepdims=True) for a in (d_normalized, d_normalized * deviations))
        d_scale, d_bias = selected(d_y * deviations * factor, live), d_y
    total, product = rows.add_up(total, product)
    (d_variance,) = of_factor(product)
    d_mean = None if of_rows.centre is None else -factor * total
    d_x, d_weights = pull_back(rows, deviations, weights, of_rows, d_mean, d_variance)
    d_x = selected(d_x + d_normalized * factor, live).astype(x.dtype)
    totals = (None if p is None else _sum_to(p, d, own) for p, d in ((scale, d_scale), (bias, d_bias)))
    return (d_x, None if d_weights is None else selected(d_weights, where)), tuple(totals)


normalize = with_reverse_rule(_forward, _reverse, static_argnums=(0,))(lambda *args: _forward(*args)[0])


def _is_constant_in_rows(parameter: Array, of_rows: Array) -> bool:
    return all(n == 1 or of_row != 1 for n, of_row in zip(parameter.shape, of_rows.shape, strict=True))


def _sum_to(parameter: Array, x: Array, own: int) -> Array:
    """The sum of `x` over the axes along which a parameter repeats, with the last `own` axes."""
    total = unfolded.sum_of(x, [a for a, n in enumerate(parameter.shape) if n == 1], keepdims=True)
    return total.reshape(total.shape[total.ndim - own :])
