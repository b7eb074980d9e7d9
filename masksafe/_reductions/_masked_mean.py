"""A mean that is not yet divided, so that parts of it can be added."""

from __future__ import annotations

import dataclasses
import functools
import numbers
import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from masksafe._core import masks, moments, scaling, sharding, unfolded
from masksafe._core.precision import float_dtype, wide_dtype, widened
from masksafe._core.typing import Array, ArrayLike, Axis, jitted
from masksafe._reductions._arguments import Reduction, prepared


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class MaskedMean:
    r"""A mean as its total and its count, which can be added up over parts before they are divided.

    .. math::
      \text{total} = \sum_{i : \text{where}_i} w_i x_i, \qquad
      \text{count} = \sum_{i : \text{where}_i} w_i, \qquad
      \text{value} = \frac{\text{total}}{\text{count}}

    The mean of the means of micro-batches, devices or batches is not the mean. Their totals and counts add up: `a + b`
    is the mean over both parts, `MaskedMean.sum(parts)` that over all of a list, `a.psum("data")` that over all
    devices. It is a pytree, so it goes through `jax.jit`, `jax.vmap`, `lax.scan` and `lax.psum`, and can be
    differentiated.

    It may grow over any number of parts. A sum of integers is exact up to 2**47, with 64-bit types disabled too; a sum
    of floats keeps what each addition rounds away. For this the pytree has two arrays for each of the two sums.

    Attributes:
      total: the weighted sum of the unmasked elements.
      count: their number, or the sum of their weights. As an integer that its dtype cannot hold, 2**31 - 1 in 32 bits;
        `value` divides by all of it.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> loss = jnp.array([[2.0, 2.0, 2.0], [8.0, jnp.nan, jnp.nan], [jnp.nan] * 3])
      >>> parts = [masksafe.MaskedMean.of(part, where=~jnp.isnan(part)) for part in loss]
      >>> print(masksafe.MaskedMean.sum(parts).value, parts[2].value)
      3.5 0.0

      A total that is already at hand, such as a loss with `reduction="sum"`:

      >>> print(masksafe.MaskedMean(jnp.array(14.0), jnp.array(4)).value)
      3.5

    References:
      Gradient accumulation over parts of unequal length, `huggingface/transformers#34191
      <https://github.com/huggingface/transformers/issues/34191>`_.
    """

    _total: Any  # each a _Sum, but for a tree of something else than numbers, such as the specs of a shard_map
    _count: Any

    def __init__(self, total: Any, count: Any):
        _set_sums(self, _as_sum(total), _as_sum(count))

    @classmethod
    def of(
        cls,
        x: ArrayLike,
        where: ArrayLike | None = None,
        *,
        weights: ArrayLike | None = None,
        axis: Axis | None = None,
    ) -> MaskedMean:
        """The total and the count of an array.

        Args:
          x: the array.
          where: booleans that broadcast to the shape of `x`; False is masked, None masks nothing.
          weights: non-negative numbers that broadcast to the shape of `x`; None means 1.
          axis: an axis, a tuple of axes, or None for all of them.

        Returns:
          A total in float32 at least, of integers too, but of booleans without weights an integer, their number; and a
          count, an integer, with weights a float32 at least.

        Raises:
          TypeError, ValueError: as `masksafe.sum`.
        """
        return _of_sums(*_total_and_count(*prepared("MaskedMean.of", x, axis, where, weights, None, False)))

    @staticmethod
    def sum(parts: Iterable[MaskedMean]) -> MaskedMean:
        """The mean over the elements of all parts; of no parts one whose value is 0."""
        first, *others = [*parts] or [MaskedMean(0.0, 0)]
        return functools.reduce(operator.add, others, first)

    def __add__(self, other: MaskedMean | int) -> MaskedMean:
        """The mean over the elements of both. Adding 0 changes nothing, so that `sum` works."""
        if isinstance(other, MaskedMean):
            return _of_sums(*_added((self._total, self._count), (other._total, other._count)))
        return self if isinstance(other, int) and other == 0 else NotImplemented

    __radd__ = __add__

    def psum(self, axis_name: sharding.AxisName) -> MaskedMean:
        """The mean over the devices of a mesh axis, or of several, inside `jax.shard_map`."""
        name = sharding.as_axis_name("MaskedMean.psum", axis_name)
        return self if name is None else lax.psum(normal(self), name)

    @property
    def total(self) -> Any:
        return _as_one(self._total)

    @property
    def count(self) -> Any:
        return _as_one(self._count)

    @property
    def value(self) -> Array:
        """The total over the count; 0 of nothing."""
        return _value(self._total, self._count)

    def __repr__(self) -> str:
        return f"MaskedMean(total={self.total}, count={self.count})"


def _set_sums(mean: MaskedMean, total: Any, count: Any) -> None:
    object.__setattr__(mean, "_total", total)
    object.__setattr__(mean, "_count", count)


def _of_sums(total: Any, count: Any) -> MaskedMean:
    mean = object.__new__(MaskedMean)
    _set_sums(mean, total, count)
    return mean


# The total and the count are one child each: a tree of the same form, such as `out_specs=MaskedMean(P(), P("data"))`,
# is a prefix.
jax.tree_util.register_pytree_with_keys(
    MaskedMean,
    lambda mean: (
        ((jax.tree_util.GetAttrKey("total"), mean._total), (jax.tree_util.GetAttrKey("count"), mean._count)),
        None,
    ),
    lambda _, sums: _of_sums(*sums),
    lambda mean: ((mean._total, mean._count), None),
)


# Sums that may grow.


class _Sum(NamedTuple):
    """`low + 2**16 * high`, whatever the dtypes: so it may be scaled, averaged and added up like a number.

    Of integers, `low` is below 2**17 after an addition, so that 2**14 of them can be added by whoever takes the arrays
    for numbers, as `jax.tree.map(jnp.sum, means)` does. Of floats, `high` is what additions have rounded
    away, over 2**16.
    """

    low: Any
    high: Any

    @property
    def dtype(self) -> Any:
        return self.low.dtype

    @property
    def shape(self) -> Any:
        return self.low.shape

    def rounded(self, dtype: Any) -> Array:
        """The sum as a float, whose derivative is that of `low`."""
        total: Array = self.low.astype(dtype) + _BASE * lax.stop_gradient(self.high).astype(dtype)
        return total


def sums_of(mean: MaskedMean) -> tuple[_Sum, _Sum]:
    """The total and the count, of arrays; what they depend on shows in `low` alone."""
    return mean._total, mean._count


_BITS = 16
_BASE = 2**_BITS


def normal(mean: MaskedMean) -> MaskedMean:
    """The same mean, of dtypes that can count, and of arrays 2**15 of which can be added."""
    return _of_sums(_normal(mean._total), _normal(mean._count))


def _as_sum(x: Any) -> Any:
    """A number or an array as a sum; anything else as it is."""
    if isinstance(x, jax.Array):
        return _Sum(x, _zeros_for(x))
    if isinstance(x, jax.ShapeDtypeStruct):
        return _Sum(x, x.update(dtype=_summand_dtype(x.dtype)))
    if isinstance(x, list | tuple) and x and all(isinstance(n, numbers.Number) for n in x):
        x = np.asarray(x)
    if isinstance(x, np.ndarray | np.generic):
        if x.dtype.kind in "iu":  # here 64 bits are at hand
            return _Sum(*(a.astype(_summand_dtype(x.dtype)) for a in _in_two(x.astype(np.int64))))
        return _Sum(x, np.zeros(x.shape, _summand_dtype(x.dtype)))
    if isinstance(x, numbers.Number):
        return _Sum(*_in_two(x)) if isinstance(x, int) else _Sum(x, 0.0)
    return x


@jitted()
def _zeros_for(x: Array) -> Array:
    zeros: Array = sharding.zeros_of_types(x, x).astype(_summand_dtype(x.dtype))
    return zeros


def _in_two(x: Any) -> tuple[Any, Any]:
    """The low part of integers, from 0 to 2**16, and the high one, negative for negative integers."""
    return x & (_BASE - 1), x >> _BITS


def _summand_dtype(dtype: Any) -> Any:
    """A dtype that can count: of floats and integers at least 32 bits, for booleans an integer."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return wide_dtype(dtype)
    return dtype if dtype.itemsize >= 4 else jnp.dtype(jnp.int32)


def _normal(x: _Sum) -> _Sum:
    low, high = (a.astype(_summand_dtype(a.dtype)) for a in map(jnp.asarray, x))
    if jnp.issubdtype(low.dtype, jnp.inexact):
        return _Sum(low, high)
    low, carry = _in_two(low)
    return _Sum(low, high + carry)


@jitted()
def _added(a: tuple[_Sum, _Sum], b: tuple[_Sum, _Sum]) -> tuple[_Sum, ...]:
    return tuple(map(_plus, a, b))


def _plus(a: _Sum, b: _Sum) -> _Sum:
    a, b = _normal(a), _normal(b)
    if jnp.issubdtype(a.dtype, jnp.inexact) != jnp.issubdtype(b.dtype, jnp.inexact):
        dtype = jnp.promote_types(*(wide_dtype(float_dtype(x.dtype)) for x in (a, b)))
        a, b = (_Sum(x.rounded(dtype), jnp.zeros_like(x.high, dtype)) for x in (a, b))
    total = _Sum(a.low + b.low, a.high + b.high)
    if not jnp.issubdtype(total.dtype, jnp.inexact):
        return total
    return total._replace(high=total.high + lax.stop_gradient(_rounded_away(a.low, b.low)) / _BASE)


def _rounded_away(a: Array, b: Array) -> Array:
    """What `a + b` loses by rounding, exactly; 0 if the sum is not finite."""
    is_finite, zero = jnp.isfinite(a + b), jnp.zeros_like(a)
    a, b = jnp.where(is_finite, a, zero), jnp.where(is_finite, b, zero)
    total = a + b
    rounded_b = total - a  # as Knuth computes it
    return (a - (total - rounded_b)) + (b - rounded_b)


def _as_one(x: Any) -> Any:
    """The sum as a number, or what stands for it in a tree of something else, such as shapes or specs."""
    if not isinstance(x, _Sum):
        return x
    return _number(x) if isinstance(x.low, jax.Array | np.ndarray | np.generic | numbers.Number) else x.low


@jitted()
def _number(x: _Sum) -> Array:
    """The sum as a number of its dtype; an integer out of its range as the nearest one in it."""
    low, high = _normal(x)
    if jnp.issubdtype(low.dtype, jnp.inexact):
        return _Sum(low, high).rounded(low.dtype)
    limits = jnp.iinfo(low.dtype)
    whole = (high << _BITS) + low
    least, most = (jnp.asarray(limit, low.dtype) for limit in (limits.min, limits.max))
    return jnp.where(high > limits.max >> _BITS, most, jnp.where(high < limits.min >> _BITS, least, whole))


@jitted()
def _value(total: _Sum, count: _Sum) -> Array:
    dtype = float_dtype(total.dtype)
    dividend, divisor = total.rounded(wide_dtype(dtype)), count.rounded(jnp.finfo(wide_dtype(dtype)).dtype)
    return jnp.where(divisor == 0, 0, scaling.quotient(dividend, moments.nonzero_divisor(divisor))).astype(dtype)


@jitted(0)
def _total_and_count(how: Reduction, x: Array, where: Array | None, weights: Array | None) -> tuple[_Sum, _Sum]:
    rows, x, (where, weights) = how.read(x, where, weights)
    x = masks.selected(x, where)
    elements = x if x.dtype == jnp.bool_ and weights is None else moments.weighted(widened(x), weights)
    total = jnp.sum(elements, rows.axes)
    if weights is not None:
        count = unfolded.sum_of(jnp.broadcast_to(weights, x.shape), rows.axes)
    else:
        count = unfolded.number_of(jnp.broadcast_to(True if where is None else where, x.shape), rows.axes)
    return _as_sum(total), _as_sum(count)
