r"""Counts, means and variances of unmasked elements.

The mean :math:`\mu` is stored in two parts. Its rounding error is up to :math:`2^{-24} |\mu|`, which can exceed the
deviations where the mean is large and the spread small. So the mean of the deviations from the rounded mean, the
remainder, is subtracted as well:

.. math::
  c = \frac{1}{n} \sum_i x_i, \qquad
  r = \frac{1}{n} \sum_i (x_i - c), \qquad
  \mu = c + r, \qquad
  \sum_i (x_i - \mu)^2 = \sum_i ((x_i - c) - r)^2.

A CPU makes these three passes over a block in its cache. An accelerator reads the array from memory in every pass, so
`mean_and_squares` makes one: with a shift :math:`c` close to the mean, which a sample gives,

.. math::
  r = \frac{1}{n} \sum_i (x_i - c), \qquad
  \sum_i (x_i - \mu)^2 = \sum_i (x_i - c)^2 - n r^2.

The difference cancels by a factor of :math:`1 + r^2 / \sigma^2`. If a fraction :math:`f` of the row is the sample, that
is at most :math:`1 + 1 / f`, since the squared distance of the sample from the mean is a part of the variance; it is
close to 1 unless the sample differs from the rest. The textbook's :math:`c = 0` has no such bound.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core import platforms, sharding, unfolded
from masksafe._core.masks import masks_rows, selected
from masksafe._core.precision import widened
from masksafe._core.typing import Array, Axes

Divide = Callable[[Array, Any], Array]  # by a sum of weights: `scaling.quotient`


class Mean(NamedTuple):
    """The mean of each row, in two parts; the reduced axes stay, with size 1."""

    centre: Array
    remainder: Array | None  # None where the rounding error of the centre does not matter


def count(x: Array, axes: Axes, where: Array | None) -> Array | float:
    """The number of unmasked elements of `x`, in its real dtype; the reduced axes stay. A float if it is known."""
    dtype = jnp.finfo(x.dtype).dtype
    if where is None:
        number = math.prod(x.shape[a] for a in axes)
        return float(number) if isinstance(number, int) else jnp.full([1] * x.ndim, number, dtype)
    # Counted before broadcasting: cheaper, and the integer cannot overflow for a huge array.
    repeats = math.prod(x.shape[a] for a in axes if where.shape[a] == 1)
    return unfolded.number_of(where, axes, keepdims=True).astype(dtype) * repeats


def average(x: Array, axes: Axes, where: Array | None) -> Array:
    """The mean of a wide array that is 0 under the mask; 0 if nothing is left. The reduced axes stay."""
    return jnp.sum(x, axes, keepdims=True) / count_or_one(x, axes, where)


def count_or_one(x: Array, axes: Axes, where: Array | None) -> Array | float:
    """As `count`, but 1 where nothing is left: a divisor."""
    n = count(x, axes, where)
    return max(n, 1.0) if isinstance(n, float) else jnp.maximum(n, 1)


def _positive_or_one(n: Array | float) -> Array | float:
    return (n if n > 0 else 1.0) if isinstance(n, float) else jnp.where(n > 0, n, 1)


def mean(x: Array, axes: Axes, where: Array | None, *, in_one_part: bool = False) -> Mean:
    """The mean, in two parts unless `in_one_part`, of a wide array that is 0 under the mask; 0 if nothing is left."""
    centre = average(x, axes, where)
    return Mean(centre, None if in_one_part else average(selected(x - centre, where), axes, where))


def total(mean: Mean) -> Array:
    """The mean in one part. An infinite mean stays infinite, although its remainder (inf - inf) is NaN."""
    if mean.remainder is None:
        return mean.centre
    return jnp.where(jnp.isfinite(mean.centre), mean.centre + mean.remainder, mean.centre)


def deviations(x: Array, mean: Mean, where: Array | None) -> Array:
    """The deviation of each element of a wide array from its mean; 0 under the mask."""
    centred = x - mean.centre
    return selected(centred if mean.remainder is None else centred - mean.remainder, where)


def squares(x: Array, axes: Axes) -> Array:
    """The sum of squared magnitudes; the reduced axes stay."""
    return jnp.sum(jnp.real(x * jnp.conj(x)), axes, keepdims=True)


def is_rounding(variance: Array, mean: Mean) -> Array:
    """Whether a variance is no more than the rounding error of the mean's last part, as for a constant row.

    The bound is far below the variance of a row in which one element differs by a single rounding step.
    """
    last = mean.centre if mean.remainder is None else mean.remainder
    bound = jnp.square(4 * jnp.finfo(variance.dtype).eps * jnp.abs(last))
    return (variance <= bound) & (variance < jnp.inf)  # both may overflow


def variance(correction: float, mean: Mean, square_sum: Array, n: Array | float, divide: Divide = jnp.divide) -> Array:
    """The variance of `n` elements with this sum of squared deviations; 0 where `n` does not exceed `correction`."""
    degrees_of_freedom = n - correction
    is_defined, divisor = degrees_of_freedom > 0, _positive_or_one(degrees_of_freedom)
    variance = divide(square_sum, divisor)
    # 0 * variance, not 0: a NaN or infinity in an unmasked element must stay visible.
    return jnp.where(is_defined & ~is_rounding(variance, mean), variance, 0 * variance)


# Few passes over an array, for accelerators.


def may_save_passes(axes: Axes, x: Array, *others: Array | None) -> bool:
    """Whether it is worth a program of its own for accelerators, and possible.

    Small arrays take no time there. Rows that are split over devices, or of symbolic size, cannot be sliced; on an
    automatic mesh a row that includes the leading axis probably is split.
    """
    if sharding.is_on_automatic_mesh(x) and -x.ndim in axes:
        return False
    if sharding.has_symbolic_size(x) or x.size < platforms.choices().fewest_elements_of_few_passes or not axes:
        return False
    spec = jax.typeof(x).sharding.spec
    return all(spec[a] is None for a in axes) and all(sharding.is_split_like(o, x) for o in others if o is not None)


def are_last(axes: Axes) -> bool:
    """Whether `axes`, counted from the end, are the last ones."""
    return sorted(axes) == list(range(-len(axes), 0))


def mean_and_squares(x: Array, axes: Axes, where: Array | None) -> tuple[Mean, Array]:
    """The mean, and the sum of squared deviations, of an array of real floats that may hold anything under the mask.

    `axes` are counted from the end. It takes one pass, but two under a mask of elements if `axes` are not the last ones
    or the floats are 64 bits wide: XLA's GPU compiler does not reduce several arrays together along other axes.
    """
    if masks_rows(where, axes):
        shift = near_mean(x, axes)
        shifted = widened(x) - shift
        n = math.prod(x.shape[a] for a in axes)
        mean, square_sum = about_mean(shift, sums(axes, None, shifted, shifted * shifted), n)
        # Selected last: a selection before two sums would be written to memory.
        return jax.tree.map(lambda a: selected(a, where), (mean, square_sum))  # type: ignore[no-any-return]
    assert where is not None
    wide = selected(widened(x), where)
    if wide.dtype == jnp.float32 and are_last(axes):
        return _merge_pairs(wide, axes, where)
    shift = average(wide, axes, where)
    shifted = widened(x) - shift
    return about_mean(shift, sums(axes, where, shifted, shifted * shifted), count_or_one(wide, axes, where))


def near_mean(x: Array, axes: Axes) -> Array:
    """A number close to the mean of each row, from a 64th of it; that of equal elements is their value exactly."""
    axis = max(axes, key=lambda a: x.shape[a])
    sample = lax.slice_in_dim(x, 0, -(-x.shape[axis] // 64), axis=axis)
    first = widened(first_of_rows(x, axes))
    return first + jnp.mean(widened(sample) - first, axes, keepdims=True)


def first_of_rows(x: Array, axes: Axes) -> Array:
    """The first element of each row; the reduced axes stay, with size 1."""
    for axis in axes:
        x = lax.slice_in_dim(x, 0, 1, axis=axis)
    return x


def sums(axes: Axes, where: Array | None, *arrays: Array) -> list[Array]:
    """The sum of the unmasked elements of each array, which XLA computes in one pass; the reduced axes stay."""
    return [jnp.sum(selected(a, where), axes, keepdims=True) for a in arrays]


def about_mean(
    shift: Array, sums_about_shift: list[Array], n: Array | float, divide: Divide = jnp.divide
) -> tuple[Mean, Array]:
    """The mean, and the sum of squares about it, from the sums of `x - shift` and of its square; `n` is not 0."""
    total, square_sum = sums_about_shift
    remainder = divide(total, n)
    excess = remainder * total
    centred = square_sum - excess
    centred = jnp.where(centred <= 8 * jnp.finfo(total.dtype).eps * excess, 0, centred)  # rounding, of equal elements
    return Mean(shift, remainder), jnp.where(square_sum == jnp.inf, square_sum, centred)  # inf - inf would be NaN


def _merge_pairs(x: Array, axes: Axes, where: Array) -> tuple[Mean, Array]:
    """Mean and squares of the unmasked elements in one pass, merged from those of parts, as Chan et al. do."""

    def merge(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
        (n_a, centre_a, remainder_a, squares_a), (n_b, centre_b, remainder_b, squares_b) = a, b
        weight = n_b / jnp.maximum(n_a + n_b, 1)
        distance = (centre_b - centre_a) + (remainder_b - remainder_a)
        centre, remainder = exact_sum(centre_a, remainder_a + distance * weight)
        squares = squares_a + squares_b + distance * (n_a * weight) * distance  # the square may overflow where n_a is 0
        nothing = n_a == 0
        return n_a + n_b, jnp.where(nothing, centre_b, centre), jnp.where(nothing, remainder_b, remainder), squares

    parts: Any = (jnp.broadcast_to(where, x.shape).astype(x.dtype), x, jnp.zeros_like(x), jnp.zeros_like(x))
    parts = sharding.vary_with(parts, (x, where))
    _, *merged = lax.reduce(parts, (jnp.zeros((), x.dtype),) * 4, merge, [a % x.ndim for a in axes])
    centre, remainder, square_sum = (jnp.expand_dims(m, axes) for m in merged)
    return Mean(centre, remainder), square_sum


def exact_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """The rounded sum and its rounding error, as Knuth computes them."""
    total = a + b
    rounded_b = total - a
    return total, (a - (total - rounded_b)) + (b - rounded_b)
