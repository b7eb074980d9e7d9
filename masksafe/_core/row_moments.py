r"""Mean and variance of rows whose elements have weights, or lie on several devices.

Every device chooses a centre :math:`c_i` close to the mean of its own part and computes three sums,

.. math::
  W_i = \sum_j w_j, \qquad
  T_i = \sum_j w_j (x_j - c_i), \qquad
  Q_i = \sum_j w_j (x_j - c_i)^2

They are moved to a common centre :math:`c`, the weighted average of the centres, where they add up.
With :math:`d_i = c_i - c`,

.. math::
  T = \sum_i T_i + W_i d_i, \qquad
  Q = \sum_i Q_i + 2 d_i T_i + W_i d_i^2, \qquad
  \mu = c + \frac{T}{W}, \qquad
  \sum_j w_j (x_j - \mu)^2 = Q - \frac{T^2}{W}

which are the formulae of Chan, Golub and LeVeque for parts whose means are known but for a remainder. The remainders
:math:`T_i` are rounding errors, or on an accelerator the error of a sample's mean; see `moments`. A part in which
nothing is left has three sums of 0, and changes nothing. The centres are constants for derivatives.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core import derivatives, moments, platforms, scaling, sharding, unfolded
from masksafe._core.masks import Weighting, selected
from masksafe._core.precision import widened
from masksafe._core.typing import Array, Axes


class RowMoments(NamedTuple):
    """Of each row, in the wide dtype; the reduced axes stay, with size 1."""

    weight: Array  # of all unmasked elements together
    mean: moments.Mean
    squares: Array  # the sum of the weighted squared deviations


class Rows(NamedTuple):
    """It is static."""

    axes: Axes
    devices: sharding.Devices = sharding.Devices()  # over which they extend
    centred: bool = True  # otherwise the mean is taken for 0
    groups: "Groups | None" = None  # of rows, which are merged; each row gets the moments of its group


class Groups(NamedTuple):
    """Elements of an axis that follow each other."""

    axis: int
    number: int


def row_moments(rows: Rows, x: Array, weighting: Weighting) -> RowMoments:
    """The moments of each row, over all devices of the mesh axis."""
    sums = _local_sums(rows, x, weighting)
    divide = jnp.divide if weighting.weights is None else scaling.quotient
    if rows.groups is None:
        return _of_devices(rows, sums, divide)
    axis, number = rows.groups
    size = sums.weight.shape[axis] // number
    sums = _Sums(*(sharding.gathered_along(a, axis) for a in sums))  # a mesh may split the rows of a group
    shape = *sums.weight.shape[:axis], number, size, *sums.weight.shape[axis + 1 :]
    parts = _Sums(*(jnp.moveaxis(a.reshape(shape), axis + 1, 0) for a in sums))
    of_groups = _of_devices(rows, _merged(parts), divide)
    return jax.tree.map(lambda a: jnp.repeat(a, size, axis), of_groups)  # type: ignore[no-any-return]


def _of_devices(rows: Rows, sums: "_Sums", divide: moments.Divide) -> RowMoments:
    if not rows.centred:
        weight, squares = rows.devices.sums(sums.weight, sums.second)
        return _or_nothing(RowMoments(weight, moments.Mean(sums.centre, sums.first), squares))
    if rows.devices.are_many:
        numbers = sums.weight.size * len(sums) * rows.devices.size
        is_small = numbers <= platforms.choices().most_numbers_of_one_exchange
        sums = (_merged_in_one_exchange if is_small else _merged_in_two_exchanges)(rows.devices, sums)
    mean, squares = moments.about_mean(sums.centre, [sums.first, sums.second], nonzero_divisor(sums.weight), divide)
    return _or_nothing(RowMoments(sums.weight, mean, squares))


def _or_nothing(of_rows: RowMoments) -> RowMoments:
    """The moments; 0 in a row whose elements all have weight 0."""
    return jax.tree.map(lambda x: jnp.where(of_rows.weight == 0, 0, x), of_rows)  # type: ignore[no-any-return]


def total_weight(x: Array, axes: Axes, weighting: Weighting) -> Array:
    """The sum of the weights of the unmasked elements of each row; without weights, their number."""
    if weighting.weights is None:
        weight = moments.count(x, axes, weighting.where)
    else:
        weight = unfolded.sum_of(weighting.weights, axes, keepdims=True).astype(jnp.finfo(x.dtype).dtype)
    return jnp.broadcast_to(weight, [1 if a in axes else n for a, n in enumerate(x.shape)])


def weighted(x: Array, weights: Array | None) -> Array:
    return x if weights is None else x * weights.astype(jnp.finfo(x.dtype).dtype)


def nonzero_divisor(weight: Array) -> Array:
    """A divisor for what is 0 where nothing is left."""
    return jnp.where(weight == 0, 1, weight)


# The sums of one device.


class _Sums(NamedTuple):
    weight: Array
    centre: Array
    first: Array  # the sum of the deviations from the centre
    second: Array  # that of their squares


def _evaluate(rows: Rows, x: Array, weighting: Weighting) -> _Sums:
    where, weights = weighting
    wide = selected(widened(x), where)
    weight = total_weight(wide, rows.axes, weighting)
    if rows.centred:
        # Unfused: XLA may compute a sum twice, in another order, and the deviations would be those from another centre.
        centre = platforms.unfused(lax.stop_gradient(_centre(rows, x, weighting, weight)))
        wide = selected(wide - centre, where)
        first = jnp.sum(weighted(wide, weights), rows.axes, keepdims=True)
    else:
        centre = first = jnp.zeros_like(weight)
    # A square may overflow, and infinity times a weight of 0 would be NaN: so the weight goes first.
    return _Sums(weight, centre, first, jnp.sum(weighted(wide, weights) * wide, rows.axes, keepdims=True))


def _centre(rows: Rows, x: Array, weighting: Weighting, weight: Array) -> Array:
    where, weights = weighting
    axes = tuple(a - x.ndim for a in rows.axes)
    if where is None and weights is None and moments.may_save_passes(axes, x):
        average_of_all = lambda x: moments.average(widened(x), rows.axes, None)  # noqa: E731
        return platforms.on_cpu_or_elsewhere(average_of_all, lambda x: moments.near_mean(x, axes), x)
    wide = selected(widened(x), where)
    average = jnp.sum(weighted(wide, weights), rows.axes, keepdims=True) / nonzero_divisor(weight)
    if weights is None:
        return average
    # Elements of weight 0 need a centre close to them as well, for the derivative by their weights.
    return jnp.where(weight == 0, moments.average(wide, rows.axes, where), average)


_Residuals = tuple[Array, Weighting, Array]


def _forward(rows: Rows, x: Array, weighting: Weighting) -> tuple[_Sums, _Residuals]:
    sums = _evaluate(rows, x, weighting)
    return sums, (x, weighting, sums.centre)


def _reverse(rows: Rows, residuals: _Residuals, cotangents: _Sums) -> tuple[Array, Weighting]:
    (x, (where, weights), centre), (d_weight, _, d_first, d_second) = residuals, cotangents
    shifted = selected(selected(widened(x), where) - centre, where)
    d_first = d_first if rows.centred else jnp.zeros_like(d_first)
    d_x = weighted(jnp.broadcast_to(d_first, x.shape), weights) + 2 * weighted(shifted, weights) * d_second
    d_x = selected(d_x, where).astype(x.dtype)
    if weights is None:
        return d_x, Weighting(None, None)
    d_weights = d_weight + shifted * (d_first + shifted * d_second)
    return d_x, Weighting(None, selected(d_weights, where).astype(weights.dtype))


_local_sums = derivatives.with_reverse_rule(_forward, _reverse, static_argnums=(0,))(_evaluate)


# The sums of all devices. Either each gets the sums of every other and merges them; or, of many rows or devices, they
# first agree on the centre, and then add up: twice the way, but few numbers, however many the devices.


def _merged_in_one_exchange(devices: sharding.Devices, sums: _Sums) -> _Sums:
    return _merged(_Sums(*jnp.moveaxis(devices.gathered(jnp.stack(sums)), 1, 0)))


def _merged(parts: _Sums) -> _Sums:
    """The sums of all parts, which lie along the first axis."""
    weight = jnp.sum(parts.weight, 0, keepdims=True)
    centre = platforms.unfused(lax.stop_gradient(_average_of_centres(parts.centre, parts.weight, weight)))
    of_all = weight, centre, *(jnp.sum(x, 0, keepdims=True) for x in _about(centre, parts))
    return _Sums(*(x[0] for x in of_all))


def _merged_in_two_exchanges(devices: sharding.Devices, sums: _Sums) -> _Sums:
    weight, total = devices.sums(sums.weight, lax.stop_gradient(sums.weight * sums.centre))
    centre = platforms.unfused(lax.stop_gradient(total / nonzero_divisor(weight)))
    return _Sums(weight, centre, *devices.sums(*_about(centre, sums)))


def _about(centre: Array, parts: _Sums) -> tuple[Array, Array]:
    """The first and the second sum of each part about another centre."""
    distance = parts.centre - centre
    moved = parts.weight * distance
    return parts.first + moved, parts.second + distance * (2 * parts.first + moved)


def _average_of_centres(centres: Array, weights: Array, weight: Array) -> Array:
    """The weighted average; exactly the value of equal centres, so that a constant row has no deviations."""
    shares = weights / nonzero_divisor(weight)
    average = jnp.sum(shares * centres, 0, keepdims=True)
    some = jnp.take_along_axis(centres, jnp.argmax(unfolded.unknown(weights != 0), 0, keepdims=True), 0)
    difference = jnp.sum(shares * (centres - some), 0, keepdims=True)
    return jnp.where(jnp.isfinite(average), some + difference, average)
