"""Segments, and the two steps of all their ops: rows are combined into segments, and gather the values of segments.

XLA's scatter ignores a row whose id is out of range. So what is computed for such a row may be anything until it would
become a result: it is selected there, since on a CPU an exponential next to a selection by rows takes longer (jax 0.12:
`segment_logsumexp` of 100000x16 1.9 times as long, jax 0.10: 1.3 times). Such a row has no derivative either: a
derivative rule takes its data `masked_in_derivatives`, and `gathered` has no derivative in a row out of range. A
negative id does not count from the end, as it would in `jax.numpy`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core import masks, platforms, run_time, sharding
from masksafe._core.extrema import as_ordered_integer, from_ordered_integer
from masksafe._core.masks import Weighting
from masksafe._core.moments import nonzero_divisor, weighted
from masksafe._core.precision import widened
from masksafe._core.typing import Array, Pytree


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("ids",), meta_fields=("number", "are_sorted", "devices")
)
@dataclasses.dataclass(frozen=True)
class Segments:
    """Rows that have the same number, wherever they lie.

    The methods take the mask of the data, or a `Weighting`, at the rank of the data. Its weights are wide, 0 where
    masked, and given for rows or for elements.
    """

    ids: Array  # [N], the segment of each row; a row with an id out of range is masked
    number: int
    are_sorted: bool
    devices: sharding.Devices  # each has some rows, and gets all segments

    def unmasked(self, x: Array, where: Array | None) -> Array:
        """Which elements of the data are unmasked, `[N, ...]` at their rank."""
        in_range = ((self.ids >= 0) & (self.ids < self.number)).reshape(-1, *[1] * (x.ndim - 1))
        return in_range if where is None else in_range & where

    def have_unmasked(self, x: Array, where: Array | None) -> Array:
        """Which segments have an unmasked element, over all devices."""
        return self.weight(x, Weighting(where, None)) > 0

    def combined(self, how: Literal["add", "max", "min"], x: Array, start: Array | float) -> Array:
        """The rows of `x` combined by their ids, `[segments, ...]`, on this device."""
        empty = jnp.broadcast_to(jnp.asarray(start, x.dtype), (self.number, *x.shape[1:]))
        combine = getattr(empty.at[self.ids], how)
        return combine(x, indices_are_sorted=self.are_sorted, mode="drop", wrap_negative_indices=False)

    def extremum(self, is_max: bool, x: Array, limit: Array | float) -> Array:
        """The largest, or the smallest, elements of each segment, on this device."""
        plain = lambda x: self.combined("max" if is_max else "min", x, limit)  # noqa: E731
        if x.dtype != jnp.bfloat16:
            return plain(x)
        by_order = functools.partial(self.extremum_by_order, is_max, limit=limit, is_wide=False)
        return platforms.by_platform(plain, x, cpu=by_order)

    def max(self, x: Array) -> Array:
        """The largest element of each segment, wide, over all devices; -inf for an empty one."""
        return self.devices.max(widened(self.extremum(True, x, -jnp.inf)))

    def extremum_by_order(self, is_max: bool, x: Array, limit: Array | float, *, is_wide: bool) -> Array:
        """The same by integers of that order; NaN where one is."""
        order, start = (as_ordered_integer(a, is_max, is_wide=is_wide) for a in (x, jnp.asarray(limit, x.dtype)))
        return from_ordered_integer(self.extremum(is_max, order, start), x.dtype)

    def sum(self, x: Array, where: Array | None = None) -> Array:
        """The sum of the unmasked elements of each segment, over all devices.

        A device adds up the rows of each chunk one after the other, and then the chunks.
        """
        x = masks.selected(x, where)
        chunks, chunk_segments = self._in_chunks() if jnp.issubdtype(x.dtype, jnp.inexact) else (1, self)
        sums = chunk_segments.combined("add", x, 0)
        if chunks > 1:
            sums = jnp.sum(sums.reshape(chunks, self.number, *x.shape[1:]), 0)
        return self.devices.sum(sums)

    def _in_chunks(self) -> tuple[int, Segments]:
        """Into how many chunks many rows of few segments are cut for a sum, and the segments of all chunks.

        A sum of a million rows, one after the other, loses half of its digits. Sorted ids stay sorted, and an id out of
        range stays out of range.
        """
        choices, ids, size = platforms.choices(), self.ids, self.ids.shape[0]
        if not sharding.may_loop((ids,)) or not isinstance(self.number, int):
            return 1, self
        if size < max(choices.fewest_rows_in_chunks, choices.fewest_rows_of_segments_in_chunks * self.number):
            return 1, self
        chunks = size // (choices.rows_of_chunk_by_segments * self.number)
        chunk = lax.div(lax.iota(ids.dtype, size), jnp.asarray(-(-size // chunks), ids.dtype))
        slots = jnp.where(ids < self.number, ids + self.number * chunk, self.number * chunks)
        return chunks, dataclasses.replace(self, ids=jnp.where(ids < 0, -1, slots), number=chunks * self.number)

    def weighted_sum(self, x: Array, weighting: Weighting) -> Array:
        """The sum of elements, which are wide, times their weights."""
        where, weights = weighting
        return self.sum(weighted(masks.selected(x, where), weights), where)

    def weight(self, x: Array, weighting: Weighting) -> Array:
        """The sum of the weights of each segment; without weights, the number of its unmasked elements.

        It is `[segments, ...]` at the rank of `x`, where the other sizes are 1 or those of the mask or the weights.
        """
        where, weights = weighting
        if weights is not None:
            return self.sum(weights)
        counted = jnp.ones((self.ids.shape[0], *[1] * (x.ndim - 1)), bool) if where is None else where
        counted = counted.astype(jnp.int32)
        # Unknown: XLA would add up a million constant ids or masks while it compiles, in 7 s (jax 0.12; 0.10: 12 s).
        return self.devices.sum(self.combined("add", counted, run_time.unknown(0, jnp.int32)))

    def gathered(self, values: Array) -> Array:
        """The value of its segment for each row; for a row out of range some other value, without a derivative."""
        return _gathered(self, values)

    def gathered_once(self, values: Array) -> Array:
        """`gathered`; XLA would compute expensive values again for every row (jax 0.12: 3 times as long).

        And it would keep the result for another use (H100, gradient of a maximum of 1000000x8: 10.6 MB for 3.6).
        """
        return _gathered(self, platforms.unfused(values))

    def gathered_to_unmasked(self, values: Array, x: Array, where: Array | None = None) -> Array:
        """`gathered`, but 0 where masked. Its transpose is `sum` on a device, without a selection of rows."""
        chunks, chunk_segments = self._in_chunks()
        if chunks > 1:
            values = jnp.tile(values, (chunks, *[1] * (values.ndim - 1)))
        found = values.at[chunk_segments.ids].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        return masks.selected(found, where)


def average(total: Array, weight: Array, weighting: Weighting) -> Array:
    """The weighted sum over the sum of the weights; 0 for an empty segment."""
    quotient = total / nonzero_divisor(weight).astype(jnp.finfo(total.dtype).dtype)
    # Where all weights are 0, they have a gradient of 0.
    return quotient if weighting.weights is None else jnp.where(weight == 0, 0, quotient)


@jax.custom_jvp
def _gathered(segments: Segments, values: Array) -> Array:
    return values.at[segments.ids].get(mode="clip", wrap_negative_indices=False)


@_gathered.defjvp
def _derivative_of_gathered(primals: tuple[Segments, Array], tangents: tuple[Pytree, Array]) -> tuple[Array, Array]:
    return _gathered(*primals), primals[0].gathered_to_unmasked(tangents[1], primals[0].ids)
