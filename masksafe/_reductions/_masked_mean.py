"""A mean that is not yet divided, so that parts of it can be added."""

from __future__ import annotations

import dataclasses
import functools
import numbers
import operator
from collections.abc import Iterable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from masksafe._core import masks, moments, sharding, unfolded
from masksafe._core.precision import float_dtype, wide_dtype, widened
from masksafe._core.typing import Array, ArrayLike, Axis, Pytree, jitted
from masksafe._reductions._arguments import Reduction, prepared

_Means = TypeVar("_Means", "MaskedMean", "dict[str, MaskedMean]")


@dataclasses.dataclass(frozen=True, repr=False)
class MaskedMean:
    r"""A mean as its total and its count, which can be added up over parts before they are divided.

    .. math::
      \text{total} = \sum_{i : \text{where}_i} w_i x_i, \qquad
      \text{count} = \sum_{i : \text{where}_i} w_i, \qquad
      \text{value} = \frac{\text{total}}{\text{count}}

    The mean of the means of micro-batches, devices or batches is not the mean. Their totals and counts add up: `a + b`
    is the mean over both parts, `MaskedMean.sum(parts)` the mean over all of a list, `a.psum("data")` over all
    devices. It is a pytree, so it goes through `jax.jit`, `jax.vmap`, `lax.scan` and `lax.psum`, and can be
    differentiated.

    Both are float32, or wider if what is summed is: float64 with 64-bit types enabled. Integers become floats. So a
    count is exact up to 2**24, about 16.8 million; beyond, each sum is rounded, to a part in 2**24. A sum no longer
    grows by parts that are less than a part in 2**24 of it: over such numbers add up batches, not single elements.

    Attributes:
      total: the weighted sum of the unmasked elements.
      count: their number, or the sum of their weights.

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

    total: Pytree
    count: Pytree

    def __post_init__(self) -> None:
        self.__dict__.update(total=_as_float(self.total), count=_as_float(self.count))

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
          A total and a count in float32 at least. Without weights, unmasked elements, and of booleans those that are
          True, are counted as integers, and the counts are then rounded.

        Raises:
          TypeError, ValueError: as `masksafe.sum`.
        """
        return cls(*_total_and_count(*prepared("MaskedMean.of", x, axis, where, weights, None, False)))

    @staticmethod
    def sum(parts: Iterable[_Means]) -> _Means:
        """The mean over the elements of all parts; without parts, a mean whose value is 0.

        Parts may be dicts of means, such as metrics by name: the result is a dict of their sums.
        """
        empty: Pytree = MaskedMean(0.0, 0)
        first, *others = [*parts] or [empty]
        is_mean = lambda x: isinstance(x, MaskedMean)  # noqa: E731
        return jax.tree.map(lambda *means: functools.reduce(operator.add, means), first, *others, is_leaf=is_mean)

    def __add__(self, other: MaskedMean | int) -> MaskedMean:
        """The mean over the elements of both. Adding 0 changes nothing, so that `sum` works."""
        if isinstance(other, MaskedMean):
            return jax.tree.map(operator.add, self, other)
        return self if isinstance(other, int) and other == 0 else NotImplemented

    __radd__ = __add__

    def psum(self, axis_name: sharding.AxisName) -> MaskedMean:
        """The mean over the devices of a mesh axis, or of several, inside `jax.shard_map`."""
        name = sharding.as_axis_name("MaskedMean.psum", axis_name)
        return self if name is None else lax.psum(self, name)

    @property
    def value(self) -> Array:
        """The total over the count; 0 if the count is 0."""
        return _value(self.total, self.count)

    def __float__(self) -> float:
        return float(self.value)

    def __format__(self, spec: str) -> str:
        """The value in a format such as `.3f`; without one, the total and the count."""
        return format(self.value, spec) if spec else str(self)

    def __repr__(self) -> str:
        return f"MaskedMean(total={self.total}, count={self.count})"


def _from_leaves(_: None, leaves: Iterable[Pytree]) -> MaskedMean:
    """A tree of anything, such as shapes, axes or specs."""
    mean = object.__new__(MaskedMean)
    mean.__dict__.update(zip(("total", "count"), leaves, strict=True))
    return mean


_KEYS = [jax.tree_util.GetAttrKey(name) for name in ("total", "count")]
jax.tree_util.register_pytree_with_keys(
    MaskedMean, lambda mean: ([*zip(_KEYS, (mean.total, mean.count), strict=True)], None), _from_leaves
)


def _as_float(x: Pytree) -> Pytree:
    """Numbers in their wide dtype; anything else, such as the spec of a `shard_map`, as it is."""
    if not isinstance(x, jax.Array | np.ndarray | np.generic | numbers.Number | list):
        return x
    x = x if isinstance(x, jax.Array) else np.asarray(x)  # whose integers have 64 bits
    return jnp.asarray(x, wide_dtype(float_dtype(jax.dtypes.canonicalize_dtype(x.dtype))))


@jitted()
def _value(total: Pytree, count: Pytree) -> Array:
    total = _as_float(total)
    count = _as_float(count).astype(jnp.finfo(total.dtype).dtype)
    return jnp.where(count == 0, 0, total / moments.nonzero_divisor(count))


@jitted(0)
def _total_and_count(how: Reduction, x: Array, where: Array | None, weights: Array | None) -> tuple[Array, Array]:
    rows, x, (where, weights) = how.read(x, where, weights)
    x = masks.selected(x, where)
    elements = x if x.dtype == jnp.bool_ and weights is None else moments.weighted(widened(x), weights)
    total = jnp.sum(elements, rows.axes)
    if weights is not None:
        count = unfolded.sum_of(jnp.broadcast_to(weights, x.shape), rows.axes)
    else:
        count = unfolded.number_of(jnp.broadcast_to(True if where is None else where, x.shape), rows.axes)
    return total, count
