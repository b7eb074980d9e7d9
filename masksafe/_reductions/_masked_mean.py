"""A mean that is not yet divided, so that parts of it can be added."""

from __future__ import annotations

import dataclasses
import functools
import numbers
import operator
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from masksafe._core import masks, moments, sharding, unfolded
from masksafe._core.precision import float_dtype, wide_dtype, widened
from masksafe._core.typing import Array, ArrayLike, Axis, DType, Pytree, jitted
from masksafe._reductions._arguments import Reduction, prepared

_Sum: TypeAlias = Pytree  # of integers a _Long; else what was given: an array, or the spec of a shard_map


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

    A sum of integers, such as a count, is exact up to 2**47, with 64-bit types disabled too: the pytree has two arrays
    for it. One of floats is rounded with each part that is added, and no longer grows once it is 2**24 times a part.

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

    _total: _Sum
    _count: _Sum

    def __init__(self, total: Pytree, count: Pytree):
        self.__dict__.update(_total=_as_sum(total), _count=_as_sum(count))

    @classmethod
    def of(
        cls, x: ArrayLike, where: ArrayLike | None = None, *, weights: ArrayLike | None = None, axis: Axis | None = None
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
    def total(self) -> Pytree:
        return _as_one(self._total)

    @property
    def count(self) -> Pytree:
        return _as_one(self._count)

    @property
    def value(self) -> Array:
        """The total over the count; 0 if the count is 0."""
        return _value(self._total, self._count)

    def __repr__(self) -> str:
        return f"MaskedMean(total={self.total}, count={self.count})"


def _of_sums(total: _Sum, count: _Sum) -> MaskedMean:
    mean = object.__new__(MaskedMean)
    mean.__dict__.update(_total=total, _count=count)
    return mean


# The total and the count are one child each: a tree of the same form, such as `out_specs=MaskedMean(P(), P("data"))`,
# is a prefix.
_KEYS = [jax.tree_util.GetAttrKey(name) for name in ("total", "count")]
jax.tree_util.register_pytree_with_keys(
    MaskedMean,
    lambda mean: ([*zip(_KEYS, (mean._total, mean._count), strict=True)], None),
    lambda _, sums: _of_sums(*sums),
)


# Integers of more than 32 bits.


class _Long(NamedTuple):
    """`low + 2**16 * high`, whatever the dtypes: so it may be scaled, averaged and added up like a number.

    `low` is below 2**17 after an addition, so that 2**14 of them can be added by whoever takes the arrays for numbers,
    as `jax.tree.map(jnp.sum, means)` does.
    """

    low: Pytree
    high: Pytree


_BITS = 16
_BASE = 2**_BITS


def _as_sum(x: _Sum) -> _Sum:
    """Integers and booleans as a `_Long`; anything else as it is."""
    if isinstance(x, list | tuple) and x and all(isinstance(n, numbers.Number) for n in x):
        x = np.asarray(x)
    if isinstance(x, int):
        return _in_two(x)
    if not hasattr(x, "dtype") or not _is_integral(x.dtype):
        return x
    dtype = _summand_dtype(x.dtype)
    if isinstance(x, jax.ShapeDtypeStruct):
        return _Long(x.update(dtype=dtype), x.update(dtype=dtype))
    low, high = _in_two(x.astype(dtype if isinstance(x, jax.Array) else np.int64))  # of NumPy's, 64 bits are at hand
    return _Long(low.astype(dtype), high.astype(dtype))


def _in_two(x: _Sum) -> _Long:
    """Integers, with a low part from 0 to 2**16, and a high one that is negative for negative integers."""
    return _Long(x & (_BASE - 1), x >> _BITS)


def _is_integral(dtype: DType) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_)


def _summand_dtype(dtype: DType) -> DType:
    """A dtype of at least 32 bits in which to add up; for booleans an integer."""
    if not _is_integral(dtype):
        return wide_dtype(dtype)
    return dtype if dtype.itemsize >= 4 else jnp.dtype(jnp.int32)


def normal(mean: MaskedMean) -> MaskedMean:
    """The same mean, of dtypes that can count, and of arrays 2**15 of which can be added."""
    return _of_sums(_normal(mean._total), _normal(mean._count))


def _normal(x: _Sum) -> _Sum:
    if not isinstance(x, _Long):
        x = jnp.asarray(x)
        return x.astype(_summand_dtype(x.dtype))
    low, high = map(_normal, x)
    if not _is_integral(low.dtype):  # an average of integers
        return low + _BASE * high
    low, carry = _in_two(low)
    return _Long(low, high + carry)


def _as_float(x: _Sum, dtype: DType) -> Array:
    whole = x.low if isinstance(x, _Long) else x
    number: Array = jnp.asarray(whole).astype(dtype)
    return number + _BASE * _as_float(x.high, dtype) if isinstance(x, _Long) else number


def count_as_float(mean: MaskedMean, dtype: DType) -> Array:
    """The count, to rounding."""
    return _as_float(mean._count, dtype)


@jitted()
def _added(a: tuple[Pytree, Pytree], b: tuple[Pytree, Pytree]) -> tuple[Pytree, ...]:
    return tuple(map(_plus, a, b))


def _plus(a: _Sum, b: _Sum) -> _Sum:
    a, b = _normal(a), _normal(b)
    if isinstance(a, _Long) and isinstance(b, _Long):
        return _Long(a.low + b.low, a.high + b.high)
    dtype = jnp.promote_types(wide_dtype(_float_dtype(a)), wide_dtype(_float_dtype(b)))
    return _as_float(a, dtype) + _as_float(b, dtype)


def _float_dtype(x: _Sum) -> DType:
    """The dtype of the sum, as a float."""
    return float_dtype(jnp.result_type(x.low if isinstance(x, _Long) else x))


def _as_one(x: _Sum) -> _Sum:
    """The sum as a number, or what stands for it in a tree of something else, such as shapes or specs."""
    if not isinstance(x, _Long):
        return x
    return _number(x) if isinstance(x.low, jax.Array | np.ndarray | np.generic | numbers.Number) else x.low


@jitted()
def _number(x: _Long) -> Array:
    """The sum as a number of its dtype; an integer out of its range as the nearest one in it."""
    whole: Array | _Long = _normal(x)
    if not isinstance(whole, _Long):
        return whole
    low, high = whole
    limits = jnp.iinfo(low.dtype)
    least, most = (jnp.asarray(limit, low.dtype) for limit in (limits.min, limits.max))
    in_range = jnp.where(high < limits.min >> _BITS, least, (high << _BITS) + low)
    return jnp.where(high > limits.max >> _BITS, most, in_range)


@jitted()
def _value(total: _Sum, count: _Sum) -> Array:
    dtype = _float_dtype(total)
    wide = wide_dtype(dtype)
    dividend, divisor = _as_float(total, wide), _as_float(count, jnp.finfo(wide).dtype)
    return jnp.where(divisor == 0, 0, dividend / moments.nonzero_divisor(divisor)).astype(dtype)


@jitted(0)
def _total_and_count(how: Reduction, x: Array, where: Array | None, weights: Array | None) -> tuple[Pytree, Pytree]:
    rows, x, (where, weights) = how.read(x, where, weights)
    x = masks.selected(x, where)
    elements = x if x.dtype == jnp.bool_ and weights is None else moments.weighted(widened(x), weights)
    total = jnp.sum(elements, rows.axes)
    if weights is not None:
        count = unfolded.sum_of(jnp.broadcast_to(weights, x.shape), rows.axes)
    else:
        count = unfolded.number_of(jnp.broadcast_to(True if where is None else where, x.shape), rows.axes)
    return _as_sum(total), _as_sum(count)
