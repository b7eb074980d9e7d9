r"""Mean and variance of the unmasked elements of rows.

.. math::
  W = \sum_i w_i, \qquad
  c = \frac{1}{W} \sum_i w_i x_i, \qquad
  r = \frac{1}{W} \sum_i w_i (x_i - c), \qquad
  \mu = c + r, \qquad
  \sigma^2 = \frac{1}{W} \sum_i w_i (x_i - c)^2 - r^2

The mean deviation :math:`r` is the rounding error of the average :math:`c`. With it, equal elements have their value as
mean and a variance of 0. All of these are sums: they add up over the devices along which a row extends, and over the
channels of a group.

.. math::
  \bar x_i = \frac{w_i}{W} \left( \bar\mu + 2 (x_i - \mu) \, \bar\sigma^2 \right), \qquad
  \bar w_i = \frac{1}{W} \left( (x_i - \mu) \, \bar\mu + \left( (x_i - \mu)^2 - \sigma^2 \right) \bar\sigma^2 \right)

where a bar is a cotangent.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core import platforms, run_time, sharding
from masksafe._core.linear import with_tangent_of
from masksafe._core.masks import Weighting, selected
from masksafe._core.precision import widened
from masksafe._core.typing import Array, Arrays, Axes, Tree


class ChannelGroups(NamedTuple):
    """Groups of consecutive channels, which lie on an axis."""

    axis: int  # counted from the end
    number: int

    def sum(self, channel_sums: Array) -> Array:
        """The sum over each group, for each of its channels."""
        axis = channel_sums.ndim + self.axis
        channel_sums = sharding.gathered_along(channel_sums, axis)  # a mesh may split a group
        size, shape = self.size(channel_sums), channel_sums.shape
        group_sums = channel_sums.reshape(*shape[:axis], self.number, size, *shape[axis + 1 :])
        return jnp.repeat(jnp.sum(group_sums, axis + 1), size, axis)

    def size(self, x: Array) -> int:
        """The number of channels of a group."""
        return x.shape[self.axis] // self.number


class Rows(NamedTuple):
    """What makes a row: the elements along some axes, on all of some devices, and in all channels of a group."""

    axes: Axes  # counted from the end
    devices: sharding.Devices = sharding.Devices()
    groups: ChannelGroups | None = None

    @property
    def all_axes(self) -> Axes:
        """The axes, with that of the channels."""
        return self.axes if self.groups is None else (*self.axes, self.groups.axis)

    def leading(self, ndim: int) -> int:
        """How many axes number the rows that one device has as a whole: those before the first axis of a row."""
        return 0 if self.devices.are_many else ndim + min(self.all_axes, default=-ndim)

    def on_one_axis(self, arrays: Tree) -> tuple["Rows", Tree]:
        """The rows and the arrays, the first of which has all elements, with neighbouring axes of rows merged into one.

        Without its library XLA's CPU compiler takes up to seven times as long for a sum of products along several axes
        (jax 0.10; the gradient of a batch norm of 32x32x32x64: 1.8 times as long).
        """
        x, axes = jax.tree.leaves(arrays)[0], sorted(self.axes)
        are_neighbours = len(axes) > 1 and axes[-1] - axes[0] < len(axes)
        if platforms.choices().has_fusion_library or not are_neighbours or not sharding.may_loop(arrays):
            return self, arrays
        first, end = x.ndim + axes[0], x.ndim + axes[-1] + 1

        def merged(a: Array) -> Array:
            along = a.shape[first:end]
            if any(n != 1 for n in along):
                along = x.shape[first:end]
                a = jnp.broadcast_to(a, (*a.shape[:first], *along, *a.shape[end:]))
            return a.reshape(*a.shape[:first], math.prod(along), *a.shape[end:])

        groups = self.groups
        if groups is not None and groups.axis < axes[0]:
            groups = groups._replace(axis=groups.axis + len(axes) - 1)
        return self._replace(axes=(axes[-1],), groups=groups), jax.tree.map(merged, arrays)

    def are_one_fusion(self, x: Array, where: Array | None) -> bool:
        """Whether XLA's library for CPUs makes one fusion of sums over rows and of a result computed from them.

        Then many rows need no blocks. The library neither selects nor widens float16.
        """
        if sharding.has_symbolic_size(x) or x.size <= 2 * platforms.choices().row_block_elements:
            return False
        is_arithmetic = where is None and x.dtype != jnp.float16 and platforms.choices().has_fusion_library
        return is_arithmetic and not self.devices.are_many and not sharding.is_on_automatic_mesh(x)

    def sums(self, *terms: Array) -> Arrays:
        """The sum of each array over whole rows; the reduced axes stay, with size 1."""
        return self.add_up(*(jnp.sum(term, self.axes, keepdims=True) for term in terms))

    def add_up(self, *sums: Array) -> Arrays:
        """The sums over whole rows, from those of each device and channel, in one exchange."""
        return self.devices.sums(*(sums if self.groups is None else map(self.groups.sum, sums)))

    # The rows as groups.

    def unmasked(self, x: Array, where: Array | None) -> Array | None:
        return where

    def have_unmasked(self, x: Array, where: Array | None) -> Array | None:
        sizes = [x.shape[a] for a in self.axes]
        if where is None and all(isinstance(n, int) and n > 0 for n in sizes):
            return None
        unmasked = jnp.ones_like(x, bool) if where is None else jnp.broadcast_to(where, x.shape)
        return self.devices.any(run_time.any_of(unmasked, self.axes, keepdims=True))

    def sum(self, x: Array) -> Array:
        return self.sums(x)[0]

    def max(self, x: Array) -> Array:
        return self.devices.max(widened(jnp.max(x, self.axes, keepdims=True, initial=-jnp.inf)))

    def gathered(self, values: Array) -> Array:
        return values

    def gathered_once(self, values: Array) -> Array:
        return values

    def gathered_to_unmasked(self, values: Array, x: Array, where: Array | None) -> Array:
        # Times an unknown 1: XLA would add up constant cotangents while it compiles (jax 0.10, 4096x1024: 24 s).
        return selected(sharding.broadcast_like(values, x) * run_time.unknown(1, values.dtype), where)

    def average(self, terms: Array, weighting: Weighting) -> tuple[Array | None, Array]:
        """The weight of each row, as in `Moments`, and the sum of weighted terms divided by it."""
        if weighting.where is None and not self.devices.are_many:  # JAX may not know their number in the reverse pass
            return None, self.sums(terms)[0] / self.divisor(terms, None)
        total = jnp.sum(terms, self.axes, keepdims=True)
        weight, total = self.add_up(total_weight(terms, self.axes, weighting).astype(total.dtype), total)
        weight = jnp.real(weight)
        return weight, _unless_empty(total / self.divisor(terms, weight), weight, weighting.weights)

    def divisor(self, x: Array, weight: Array | None) -> Array | float:
        """The weight; infinity for an empty row, so that quotients and their derivatives are 0."""
        if weight is not None:
            return jnp.where(weight == 0, jnp.inf, weight)
        group_size = 1 if self.groups is None else self.groups.size(x)
        number = math.prod(x.shape[a] for a in self.axes) * group_size * self.devices.size
        return float(number or math.inf) if isinstance(number, int) else jnp.asarray(number, x.dtype)


jax.tree_util.register_static(Rows)  # otherwise its axes would be leaves


class Moments(NamedTuple):
    """The moments of each row, in the wide dtype; the reduced axes stay, with size 1."""

    weight: Array | None  # None where it is the number of all elements
    centre: Array | None  # the mean, up to its rounding error; None for moments about 0
    error: Array | None  # the mean less the centre; None where that is exact
    variance: Array

    @property
    def mean(self) -> Array:
        assert self.centre is not None
        return self.centre if self.error is None else self.centre + self.error

    def deviations(self, x: Array, where: Array | None) -> Array:
        """The deviation of each element from its mean, wide; 0 under the mask."""
        deviations = selected(widened(x), where)
        for term in (self.centre, self.error):
            deviations = deviations if term is None else deviations - term
        return selected(deviations, where)


def moments(rows: Rows, x: Array, weighting: Weighting, *, about_zero: bool = False) -> Moments:
    """The moments of the unmasked elements; JAX's own rules may differentiate them."""
    where, weights = weighting
    wide = selected(widened(x), where)
    terms = weighted(wide, weights)
    if about_zero:
        weight, square = rows.average(terms * wide, weighting)
        return Moments(weight, None, None, square)
    weight, centre = rows.average(terms, weighting)
    centre = lax.stop_gradient(centre)
    n = rows.divisor(wide, weight)
    deviations = wide - centre
    # In groups XLA for GPUs would write deviations that both sums and a norm use to memory: one sum has its own (jax
    # 0.12, H100, group norm of 32x32x32x64: 50 MB moved for 34). Without groups that would double the bytes.
    is_shared = rows.groups is None or weighting != (None, None)
    own = deviations if is_shared else wide - platforms.unfused(centre, on="gpu")
    # A product, since XLA's compilers write a selection that two sums share to memory (jax 0.10, a CPU, 2048x768: `var`
    # takes 1.1 times as long; with jax 0.12 both are alike). The weight comes before the square, which may overflow:
    # infinity times 0 is NaN.
    own, terms = (weighted(d, where if weights is None else weights) for d in (own, deviations))
    sums = rows.sums(own, _product(terms, deviations))
    error, square = (_unless_empty(total / n, weight, weights) for total in sums)
    rounding = 8 * float(jnp.finfo(wide.dtype).eps)  # of sums of equal elements
    variance = square - (1 + rounding) * _product(error, error)
    nothing = 0 * jnp.real(error)  # NaN for a NaN, which XLA's maximum may lose on a CPU (jax 0.12: in its library)
    # 0 in place of a negative rounding error; the derivative is whole, also where the variance is 0.
    return Moments(weight, centre, error, with_tangent_of(variance, jnp.maximum(variance, nothing)))


def pull_back(
    rows: Rows, deviations: Array, weights: Array | None, row_moments: Moments, d_mean: Array | None, d_variance: Array
) -> tuple[Array, Array | None]:
    """The cotangents of the elements and of their weights; under the mask they may be anything."""
    n = rows.divisor(deviations, row_moments.weight)
    if weights is None:
        d_x = 2 * (d_variance / n) * jnp.conj(deviations)
        return (d_x if d_mean is None else d_x + d_mean / n), None
    d_mean = jnp.zeros_like(d_variance) if d_mean is None else d_mean
    d_mean, d_variance = (_unless_empty(d, row_moments.weight, weights) for d in (d_mean, d_variance))
    share = weights.astype(deviations.dtype) / n  # exactly 1 for the only element of a row
    # The share first: a share of 0 stays 0, while the product may overflow.
    d_x = share * d_mean + 2 * d_variance * (share * deviations)
    return d_x, (d_mean * deviations + d_variance * (deviations * deviations - row_moments.variance)) / n


def _unless_empty(values: Array, weight: Array | None, weights: Array | None) -> Array:
    """`values`, with 0 for rows whose weights are all 0. Masks are applied to the elements instead."""
    return values if weights is None or weight is None else jnp.where(weight == 0, 0, values)


def _product(x: Array, y: Array) -> Array:
    """The product; if complex, of two numbers with the same argument, so that it is real."""
    return jnp.real(x * jnp.conj(y))


def weighted(x: Array, weights: Array | None) -> Array:
    """The elements times their weights."""
    return x if weights is None else x * weights.astype(jnp.finfo(x.dtype).dtype)


def total_weight(x: Array, axes: Axes, weighting: Weighting) -> Array:
    """The sum of the weights of the unmasked elements along some axes; without weights, their number.

    It has the real dtype of a wide `x`, and its shape with size 1 on the reduced axes.
    """
    where, weights = weighting
    if weights is not None:
        total = run_time.sum_of(weights, axes, keepdims=True)
    elif where is None:
        total = jnp.asarray(math.prod(x.shape[a] for a in axes))
    else:
        # Counted before broadcasting: cheaper, and the integer cannot overflow for a huge array.
        repeats = math.prod(x.shape[a] for a in axes if where.shape[a] == 1)
        total = run_time.number_of(where, axes, keepdims=True).astype(jnp.finfo(x.dtype).dtype) * repeats
    reduced = [a % x.ndim for a in axes]
    shape = [1 if a in reduced else n for a, n in enumerate(x.shape)]
    return jnp.broadcast_to(total.astype(jnp.finfo(x.dtype).dtype), shape)


def nonzero_divisor(weight: Array) -> Array:
    """The weight, or 1 where it is 0: a divisor of sums that are 0 there."""
    return jnp.where(weight == 0, 1, weight)
