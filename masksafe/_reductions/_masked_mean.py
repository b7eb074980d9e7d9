"""A mean that is not yet divided, so that parts of it can be added."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core.masks import selected, weighting_of
from masksafe._core.precision import float_dtype, widened
from masksafe._core.row_moments import or_one, weighted
from masksafe._core.scaling import quotient
from masksafe._core.sharding import AxisName, as_axis_name
from masksafe._core.typing import Array, ArrayLike, Axis
from masksafe._reductions._arguments import Reduction, read_arguments


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MaskedMean:
    r"""A mean as its total and its count, which can be added up over parts before they are divided.

    .. math::
      \text{total} = \sum_{i : \text{where}_i} w_i x_i, \qquad
      \text{count} = \sum_{i : \text{where}_i} w_i, \qquad
      \text{value} = \frac{\text{total}}{\text{count}}

    The mean of the means of micro-batches, devices or batches is not the mean. Their totals and counts add up: `a + b`
    is the mean over both parts, `a.psum("data")` that over all devices. It is a pytree of two arrays, so it goes
    through `jax.jit`, `jax.vmap`, `lax.scan` and `lax.psum`, and can be differentiated.

    Attributes:
      total: the weighted sum of the unmasked elements.
      count: their number, or the sum of their weights.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> loss = jnp.array([[2.0, 2.0, 2.0], [8.0, jnp.nan, jnp.nan], [jnp.nan, jnp.nan, jnp.nan]])
      >>> parts = [masksafe.MaskedMean.of(part, where=~jnp.isnan(part)) for part in loss]
      >>> print(sum(parts).value, parts[2].value)
      3.5 0.0

      A total that is already at hand, such as a loss with `reduction="sum"`:

      >>> print(masksafe.MaskedMean(jnp.array(14.0), jnp.array(4)).value)
      3.5

    References:
      Gradient accumulation over parts of unequal length, `huggingface/transformers#34191
      <https://github.com/huggingface/transformers/issues/34191>`_.
    """

    total: Any
    count: Any

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
          A total in float32 at least, but of booleans and integers in the dtype of `jnp.sum`; and a count, an integer,
          with weights a float32 at least.

        Raises:
          TypeError, ValueError: as `masksafe.sum`.
        """
        how, x, mask, w = read_arguments("MaskedMean.of", x, axis, where, weights, None, keepdims=False)
        total, count = _total_and_count(how, x, mask, w)
        return cls(total, count)

    def __add__(self, other: MaskedMean | int) -> MaskedMean:
        """The mean over the elements of both. Adding 0 changes nothing, so that `sum` works."""
        if isinstance(other, int) and other == 0:
            return self
        if not isinstance(other, MaskedMean):
            return NotImplemented
        pairs = (self.total, other.total), (self.count, other.count)
        return MaskedMean(*(as_summand(a) + as_summand(b) for a, b in pairs))

    __radd__ = __add__

    def psum(self, axis_name: AxisName) -> MaskedMean:
        """The mean over the devices of a mesh axis, or of several, inside `jax.shard_map`."""
        name = as_axis_name("MaskedMean.psum", axis_name)
        return self if name is None else jax.tree.map(lambda x: lax.psum(as_summand(x), name), self)

    @property
    def value(self) -> Array:
        """The total over the count; 0 of nothing."""
        total, count = jnp.asarray(self.total), jnp.asarray(self.count)
        dtype = float_dtype(total.dtype)
        return jnp.where(count == 0, 0, quotient(total.astype(dtype), or_one(count).astype(dtype)))


def as_summand(x: ArrayLike) -> Array:
    """An array of a dtype that can count: floats and integers of at least 32 bits, booleans as integers."""
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return widened(x)
    return x if x.dtype.itemsize >= 4 else x.astype(jnp.int32)


@functools.partial(jax.jit, static_argnums=0)
def _total_and_count(how: Reduction, x: Array, where: Array | None, weights: Array | None) -> tuple[Array, Array]:
    where, weights = weighting_of(x, where, weights)
    is_float = weights is not None or jnp.issubdtype(x.dtype, jnp.inexact)
    total = jnp.sum(weighted(widened(selected(x, where)), weights) if is_float else selected(x, where), how.axes)
    of_each = where if weights is None else weights
    return total, jnp.sum(jnp.broadcast_to(True if of_each is None else of_each, x.shape), how.axes)
