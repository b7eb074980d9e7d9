"""A mean that is not yet divided, so that parts of it can be added."""

from __future__ import annotations

import dataclasses
import functools
import numbers
import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from masksafe._core import arguments, masks, moments, per_device, run_time, sharding
from masksafe._core.precision import float_dtype, wide_dtype, widened
from masksafe._core.typing import Array, ArrayLike, Axis, Pytree, jitted
from masksafe._reductions._arguments import Reduction, prepared
from masksafe._segments._segments import Segments

_OP = "MaskedMean.of"
HINT_OF_ARRAYS = "Write MaskedMean.of(loss, where=mask) for an array of losses, not yet averaged."
HINT_OF_TREES = "Write a dict of means: {'loss': MaskedMean(total, count), ...}."
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
        cls,
        x: ArrayLike,
        where: ArrayLike | None = None,
        *,
        weights: ArrayLike | None = None,
        axis: Axis | None = None,
        by: Literal["token", "sequence", "segment"] = "token",
        segment_ids: ArrayLike | None = None,
    ) -> MaskedMean:
        r"""The total and the count of an array.

        By sequence or by segment, each one with an unmasked token counts once, however long it is; one without does
        not count:

        .. math:: \text{total} = \sum_s \frac{\sum_{i \in s} w_i x_i}{\sum_{i \in s} w_i}, \qquad
          \text{count} = |\{s : \sum_{i \in s} w_i \neq 0\}|

        over the unmasked tokens :math:`i`. Parts add up if each sequence is in one of them, as where the batch is cut
        into micro-batches or split over devices. Pieces of a sequence in two parts count as two.

        Args:
          x: the array; `[..., time]` by sequence or by segment.
          where: booleans that broadcast to the shape of `x`; False is masked, None masks nothing.
          weights: non-negative numbers that broadcast to the shape of `x`; None means 1.
          axis: an axis, a tuple of axes, or None for all of them; by token alone.
          by: what counts as one: each "token", or element; each "sequence" along the last axis; or each "segment", the
            tokens of a sequence with the same id, such as a packed document.
          segment_ids: integers of the shape of `x`, by segment alone. As in attention any numbers in any order; the
            same number in two sequences makes two segments.

        Returns:
          A total and a count in float32 at least. Without weights the count is that of an integer, and so is the total
          of booleans; both are then rounded.

        Raises:
          TypeError, ValueError: as `masksafe.sum`; and if `segment_ids` are not integers, have another shape, are
            missing or not needed, if `by` is none of the three, or if there is an `axis` by sequence or by segment.

        Example:
          >>> import jax.numpy as jnp, masksafe
          >>> loss = jnp.array([[1.0, 3.0, 8.0, jnp.nan], [2.0, jnp.nan, jnp.nan, jnp.nan]])
          >>> documents = jnp.array([[0, 0, 1, -1], [0, -1, -1, -1]])
          >>> def mean(**options):
          ...     return masksafe.MaskedMean.of(loss, documents >= 0, **options).value
          >>> print(mean(), mean(by="sequence"), mean(by="segment", segment_ids=documents))
          3.5 3.0 4.0
        """
        arguments.as_choice(_OP, "by", by, ("token", "sequence", "segment"))
        how, x, where, weights = prepared(_OP, x, axis, where, weights, None, False)
        if by != "token" and (axis is not None or x.ndim == 0):
            argument, found = ("x", "shape ()") if axis is None else ("axis", f"value {axis}")
            expected = "[..., time]" if axis is None else f"None, since by={by!r} is along the last axis"
            raise ValueError(arguments.message(_OP, argument, found, expected))
        if (segment_ids is None) == (by == "segment"):
            found, expected = ("value None", "integers") if segment_ids is None else (f"an array and by={by!r}", "None")
            raise ValueError(arguments.message(_OP, "segment_ids", found, expected, 'They go with by="segment".'))
        if segment_ids is not None:
            segment_ids = arguments.as_index_array(_OP, "segment_ids", segment_ids)
            arguments.check_shape(_OP, "segment_ids", segment_ids.shape, x.shape, "the shape of x")
        if by == "token":
            return cls(*_total_and_count(how, x, where, weights))
        return cls(*_total_and_count_of_parts(how, x, where, weights, segment_ids))

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

    if not TYPE_CHECKING:  # type checkers refuse the operators that are not there

        def __mul__(self, other: object) -> NoReturn:
            hint = (
                "Write factors={'z': 0.1} in value_and_grad_of_mean for a sum of means, 0.1 * mean.value for a number, "
                "MaskedMean(0.1 * mean.total, mean.count) for a mean of scaled elements."
            )
            expected = "+, the only operator of a MaskedMean"
            raise TypeError(arguments.message("MaskedMean", "operator", "* or /", expected, hint))

        __rmul__ = __truediv__ = __mul__

    def psum(self, axis_name: sharding.AxisName) -> MaskedMean:
        """The mean over the devices of a mesh axis, or of several, inside `jax.shard_map`."""
        name = sharding.as_axis_name("MaskedMean.psum", axis_name)
        return self if name is None else lax.psum(self, name)

    @property
    def value(self) -> Array:
        """The total over the count; 0 if the count is 0."""
        for name, x in {"total": self.total, "count": self.count}.items():
            if not jax.tree_util.all_leaves([x]):
                found = f"type {type(x).__name__}"
                raise TypeError(arguments.message("MaskedMean.value", name, found, "an array", HINT_OF_TREES))
        return _value(self.total, self.count)

    def __float__(self) -> float:
        return float(self.value)

    def __format__(self, spec: str) -> str:
        """The value in a format such as `.3f`; without one, the total and the count."""
        return format(self.value, spec) if spec else str(self)

    def __repr__(self) -> str:
        return f"MaskedMean(total={self.total}, count={self.count})"


def check_returned(op: str, mean: MaskedMean, which: str = "a MaskedMean") -> None:
    """Refuses a mean that `fn`, an argument of `op`, returns if it is not one of scalars with a total of floats."""
    for name, x in {"total": mean.total, "count": mean.count}.items():
        if not jax.tree_util.all_leaves([x]):
            found = f"{which} whose {name} is of type {type(x).__name__}"
            raise TypeError(arguments.message(op, "fn", found, "scalars", HINT_OF_TREES))
        if x.shape != ():
            raise ValueError(arguments.message(op, "fn", f"{which} whose {name} has shape {x.shape}", "scalars"))
    if not jnp.issubdtype(mean.total.dtype, jnp.floating):
        raise TypeError(
            arguments.message(op, "fn", f"{which} whose total has dtype {mean.total.dtype}", "a float dtype")
        )


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
        return total, run_time.sum_of(jnp.broadcast_to(weights, x.shape), rows.axes)
    return total, run_time.number_of(jnp.broadcast_to(True if where is None else where, x.shape), rows.axes)


@jitted(0)
def _total_and_count_of_parts(
    how: Reduction, x: Array, where: Array | None, weights: Array | None, ids: Array | None
) -> tuple[Array, Array]:
    """Of the means of sequences; with ids of the means of their segments."""
    _, x, weighting = how.read(x, where, weights)
    terms = moments.weighted(widened(masks.selected(x, weighting.where)), weighting.weights)
    if ids is None or x.size == 0:
        divisors = each = moments.total_weight(terms, (-1,), weighting)
    else:
        names = PartitionSpec(*(f"rows {axis}" for axis in range(x.ndim - 1)), None)
        args = ids, *weighting
        names_of_args = tuple(None if a is None else names for a in args)
        of_rows = _weights_of_segments
        divisors, each = per_device.along_devices(of_rows, sharding.Devices(), args, names_of_args, (names, names))
    # Where all weights are 0, they have a gradient of 0.
    terms = jnp.where(divisors == 0, 0, terms / moments.nonzero_divisor(divisors).astype(jnp.finfo(terms.dtype).dtype))
    return jnp.sum(terms), run_time.number_of(each != 0)


def _weights_of_segments(
    _devices: sharding.Devices, ids: Array, where: Array | None, weights: Array | None
) -> tuple[Array, Array]:
    """The weight of its segment for each token, and that of each segment, of which there are at most as many."""
    ids = run_time.unknown(masks.selected(ids, where))  # XLA would sort constants while it compiles
    # The segments of all rows are numbered in the order of row and id.
    token = lax.iota(jnp.int32, ids.size).reshape(ids.shape)
    ids, order = lax.sort((ids, token), num_keys=1)
    is_first = jnp.ones_like(ids, bool).at[..., 1:].set(ids[..., 1:] != ids[..., :-1])
    number, order = jnp.cumsum(is_first.ravel()) - 1, order.ravel()
    segments = Segments(jnp.zeros_like(number).at[order].set(number), ids.size, False, sharding.Devices())
    if weights is None:
        where = None if where is None else jnp.broadcast_to(where, ids.shape).ravel()
        weight = segments.weight(number, masks.Weighting(where, None))
    else:
        weight = _sums_in_pairs(segments, order, weights.ravel())
    return segments.gathered(weight).reshape(ids.shape), weight.reshape(ids.shape)


@jax.custom_jvp
def _sums_in_pairs(segments: Segments, order: Array, x: Array) -> Array:
    """`segments.sum`, of elements whose `order` is that of the segments.

    Added up one after the other, a million weights would lose half of their digits.
    """
    number, index = segments.ids[order], lax.iota(jnp.int32, x.size)

    def add(k: Array, sums: Array) -> Array:
        """The sums of the last 2^(k + 1) elements, as far as they are of one segment, from those of 2^k."""
        before = index - lax.shift_left(jnp.ones_like(k), k)
        is_same = (before >= 0) & (number[before] == number)
        return sums + jnp.where(is_same, sums[before], 0)

    sums = lax.fori_loop(jnp.int32(0), jnp.int32(x.size.bit_length()), add, x[order])
    is_last = jnp.append(number[1:] != number[:-1], True)
    return dataclasses.replace(segments, ids=number).sum(jnp.where(is_last, sums, 0))


@_sums_in_pairs.defjvp
def _(primals: tuple[Pytree, ...], tangents: tuple[Pytree, ...]) -> tuple[Array, Array]:
    return _sums_in_pairs(*primals), primals[0].sum(tangents[2])
