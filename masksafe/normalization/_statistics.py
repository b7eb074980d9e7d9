r"""Normalisation by statistics that more than the elements of a row in one array have a part in.

That is, by those of a batch, of a group of channels, of weighted elements, or of rows split over devices:

.. math:: y_i = \gamma_i \frac{x_i - \mu}{\sqrt{\sigma^2 + \varepsilon}} + \beta_i

The statistics and what follows from them have a reverse rule each. In between, the statistics are two small arrays: the
mean, and the reciprocal of the root. In the reverse pass their cotangents are summed over devices, once.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core import derivatives, moments, precision, scaling, sharding, unfolded
from masksafe._core.masks import selected, weighting_of
from masksafe._core.row_moments import Rows, nonzero_divisor, row_moments
from masksafe._core.typing import Array, jitted
from masksafe.normalization._arguments import Inputs


class Statistics(NamedTuple):
    """Of each row; the normalised axes have size 1."""

    mean: moments.Mean
    variance: Array


def normalize(rows: Rows, epsilon: float | None, inputs: Inputs) -> tuple[Array, Statistics]:
    """The result and the statistics. An epsilon of None is an array, in the inputs."""
    weighting = weighting_of(inputs.x, inputs.where, inputs.weights)
    x, unit = at_ordinary_scale(rows, epsilon, inputs.x, weighting.where)
    of_rows = row_moments(rows, x, weighting)
    variance = (jnp.divide if inputs.weights is None else scaling.quotient)(
        of_rows.squares, nonzero_divisor(of_rows.weight)
    )
    root = reciprocal_root(variance, of_rows.mean if rows.centred else None, epsilon, inputs.epsilon)
    live = weighting.where
    if live is not None and inputs.weights is not None:
        live &= of_rows.weight != 0
    y = normalize_by(rows.devices, inputs._replace(x=x, where=live), of_rows.mean, root)
    if unit is None:
        return y, Statistics(of_rows.mean, variance)
    mean: moments.Mean = jax.tree.map(lambda part: part / unit, of_rows.mean)
    return y, Statistics(mean, variance / unit / unit)


def at_ordinary_scale(rows: Rows, epsilon: float | None, x: Array, where: Array | None) -> tuple[Array, Array | None]:
    """`x` with each row multiplied by a power of two, and those powers, where the scale has no effect.

    That is without an epsilon: then no square overflows or vanishes. Those of narrow floats do not in float32. An
    epsilon that is an array is not tiny.
    """
    has_epsilon = epsilon is None or epsilon >= jnp.finfo(x.dtype).tiny
    return (x, None) if has_epsilon or jnp.finfo(x.dtype).maxexp < 64 else _at_ordinary_scale(rows, x, where)


@jitted(0)  # which hides masked NaN from jax_debug_nans
def _at_ordinary_scale(rows: Rows, x: Array, where: Array | None) -> tuple[Array, Array]:
    x = selected(x, where)
    largest = jnp.max(jnp.abs(lax.stop_gradient(x)), rows.axes, keepdims=True, initial=0)
    if rows.groups is not None:
        axis, number = rows.groups
        of_rows = sharding.gathered_along(largest, axis)
        shape = *of_rows.shape[:axis], number, of_rows.shape[axis] // number, *of_rows.shape[axis + 1 :]
        largest = jnp.repeat(jnp.max(of_rows.reshape(shape), axis + 1), shape[axis + 1], axis)
    unit = scaling.reciprocal_power_of_two(rows.devices.max(largest))
    return x * unit, unit.astype(precision.wide_dtype(x.dtype))


def normalize_by(devices: sharding.Devices, inputs: Inputs, mean: moments.Mean, root: Array) -> Array:
    """The result for given statistics, which are the same on all devices."""
    assert mean.remainder is not None
    remainder, root = devices.varying(jnp.stack([mean.remainder, root]))
    return _apply(inputs._replace(weights=None, epsilon=None), moments.Mean(mean.centre, remainder), root)


def reciprocal_root(
    variance: Array, mean: moments.Mean | None, epsilon: float | None, array: Array | None = None
) -> Array:
    """1 / sqrt(variance + epsilon), and a constant 0 where both are 0; without an epsilon it is an array, not tiny."""
    if epsilon is None:
        assert array is not None
        return lax.rsqrt(variance + array.astype(variance.dtype))
    if epsilon >= jnp.finfo(variance.dtype).tiny:  # no selection: it would keep XLA from fusing the forward pass
        return lax.rsqrt(variance + epsilon)
    is_zero = variance == 0 if mean is None else moments.is_rounding(variance, mean)
    return jnp.where(is_zero, 0, lax.rsqrt(jnp.where(is_zero, 1, variance)))


def scaled_and_shifted(y: Array, inputs: Inputs) -> Array:
    """The normalised elements times the scale plus the bias, in the dtype of `x`; 0 under the mask."""
    if inputs.scale is not None:  # selected before the product, whose derivative would be 0 * NaN
        y *= selected(inputs.scale.astype(y.dtype), inputs.where)
    if inputs.bias is not None:
        y += inputs.bias.astype(y.dtype)
    return selected(y, inputs.where).astype(inputs.x.dtype)


# From the statistics to the result.


def _deviations(inputs: Inputs, mean: moments.Mean) -> Array:
    return moments.deviations(selected(precision.widened(inputs.x), inputs.where), mean, inputs.where)


def _forward(*args: Any) -> tuple[Array, tuple[Any, ...]]:
    return _evaluate(*args), args


def _reverse(residuals: tuple[Inputs, moments.Mean, Array], d_y: Array) -> tuple[Any, ...]:
    inputs, mean, root = residuals
    x, where, _, scale, bias, _ = inputs
    deviations = _deviations(inputs, mean)
    d_y = selected(d_y.astype(deviations.dtype), where)
    d_normalized = d_y if scale is None else selected(d_y * scale.astype(d_y.dtype), where)
    d_deviations = selected(d_normalized * root, where)
    if all(p is None or _is_the_same_within_rows(p, root) for p in (scale, bias)):
        # Two sums over rows give four cotangents.
        total, product = _sum_to(root, d_y), _sum_to(root, d_y * deviations)
        factor = 1 if scale is None else scale.astype(d_y.dtype)
        d_remainder, d_root = -total * factor * root, product * factor
        terms = product * root, total
    else:
        d_remainder, d_root = -_sum_to(root, d_deviations), _sum_to(root, d_normalized * deviations)
        terms = selected(d_y * deviations * root, where), d_y
    parameters = zip((scale, bias), terms, strict=True)
    d_scale, d_bias = (None if p is None else _sum_to(p, term).astype(p.dtype) for p, term in parameters)
    d_mean = moments.Mean(None, d_remainder)  # type: ignore[arg-type]  # the centre is a constant
    return Inputs(d_deviations.astype(x.dtype), scale=d_scale, bias=d_bias), d_mean, d_root


def _evaluate(inputs: Inputs, mean: moments.Mean, root: Array) -> Array:
    return scaled_and_shifted(selected(_deviations(inputs, mean) * root, inputs.where), inputs)


_apply = derivatives.with_reverse_rule(_forward, _reverse)(_evaluate)


def _is_the_same_within_rows(parameter: Array, root: Array) -> bool:
    return all(n == 1 or of_rows != 1 for n, of_rows in zip(parameter.shape, root.shape, strict=True))


def _sum_to(like: Array, x: Array) -> Array:
    """The sum of `x` over the axes along which `like` repeats."""
    return unfolded.sum_of(x, [a for a in range(x.ndim) if like.shape[a] == 1 and x.shape[a] != 1], keepdims=True)
