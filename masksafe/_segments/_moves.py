"""The two moves of which segment ops are made: from rows to their segments, and back.

XLA leaves out what a scatter would put out of range. So what is computed of a row whose id is masked may be anything on
the way to a segment, and is selected where it would become a result: XLA's CPU compiler takes twice as long for an
exponential next to a selection by rows. No second derivative gets through either: a rule takes its data
`with_live_derivatives`, and the way back from a segment has none in a row out of range. Negative ids are not counted
from the end, as in `jax.numpy`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core import masks, platforms, scaling, sharding, unfolded
from masksafe._core.moments import nonzero_divisor, weighted
from masksafe._core.precision import widened
from masksafe._core.typing import Array
from masksafe._segments._arguments import Rows, Segments


def combined(scatter: Callable[..., Array], segments: Segments, ids: Array, x: Array, start: Any) -> Array:
    """The rows of `x` combined by their ids, `[segments, ...]`, on this device."""
    dimensions = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(1, x.ndim)), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
    )
    of_nothing = jnp.broadcast_to(jnp.asarray(start, x.dtype), (segments.number, *x.shape[1:]))
    options = {"indices_are_sorted": segments.rows_are_sorted, "mode": lax.GatherScatterMode.FILL_OR_DROP}
    return scatter(of_nothing, ids[:, None], x, dimensions, **options)


def sums(segments: Segments, rows: Rows, x: Array) -> Array:
    """The sum of the unmasked elements of each segment, over all devices."""
    return segments.devices.sum(_sums_on_device(segments, rows.ids, masks.selected(x, rows.where)))


def _sums_on_device(segments: Segments, ids: Array, x: Array) -> Array:
    """The sum of the rows of each segment: one row after the other within a part of the rows, then of the parts."""
    parts, slots = _parts(ids, segments.number) if jnp.issubdtype(x.dtype, jnp.inexact) else (1, ids)
    if parts == 1:
        return combined(lax.scatter_add, segments, ids, x, 0)
    of_parts = combined(lax.scatter_add, segments._replace(number=parts * segments.number), slots, x, 0)
    return jnp.sum(of_parts.reshape(parts, segments.number, *x.shape[1:]), 0)


def _parts(ids: Array, number: int) -> tuple[int, Array]:
    """In how many parts many rows of few segments are added up, and for each row the segment of its part.

    A sum of a million rows, one after the other, has lost half of its digits. Sorted ids stay sorted, and an id out of
    range is out of the range of all parts.
    """
    choices, size = platforms.choices(), ids.shape[0]
    if not sharding.may_loop((ids,)) or not isinstance(number, int):
        return 1, ids
    if size < max(choices.fewest_rows_in_parts, choices.fewest_rows_of_segments_in_parts * number):
        return 1, ids
    parts = size // (choices.rows_of_part_by_segments * number)
    part = lax.div(lax.iota(ids.dtype, size), jnp.asarray(-(-size // parts), ids.dtype))
    slots = jnp.where(ids < number, ids + number * part, number * parts)
    return parts, jnp.where(ids < 0, -1, slots)


def weighted_sums(segments: Segments, rows: Rows, x: Array) -> Array:
    """The same of elements with weights; `x` is wide."""
    return sums(segments, rows, weighted(masks.selected(x, rows.where), rows.weights))


def total_weights(segments: Segments, rows: Rows, ndim: int) -> Array:
    """The sum of the weights of each segment; without weights, the number of its unmasked elements.

    It is `[segments, ...]` at this rank, where the other sizes are 1 or those of the mask or the weights.
    """
    if rows.weights is not None:
        return segments.devices.sum(_sums_on_device(segments, rows.ids, rows.weights))
    counted = jnp.ones((rows.ids.shape[0], *[1] * (ndim - 1)), bool) if rows.where is None else rows.where
    # XLA must not compute it while it compiles: a caller may have made ids and masks constant.
    start = unfolded.unknown(0, jnp.int32)
    return segments.devices.sum(combined(lax.scatter_add, segments, rows.ids, counted.astype(jnp.int32), start))


def mean_of(rows: Rows, total: Array, weight: Array) -> Array:
    """The weighted sum over the sum of the weights; 0 of nothing."""
    divide = jnp.divide if rows.weights is None else scaling.quotient
    average = divide(total, nonzero_divisor(weight).astype(jnp.finfo(total.dtype).dtype))
    # Of no weight: with a gradient of 0 by the weights.
    return average if rows.weights is None else jnp.where(weight == 0, 0, average)


def of_rows_once(ids: Array, values: Array) -> Array:
    """`of_rows` of values that are expensive to compute: XLA would compute them again for every row of the segment."""
    return of_rows(ids, platforms.unfused(values))


@jax.custom_jvp
def of_rows(ids: Array, values: Array) -> Array:
    """Of each row the value of its segment; that of some other one, but as a constant, for an id out of range."""
    return _gathered(ids, values, lax.GatherScatterMode.CLIP)


@of_rows.defjvp
def _derivative_of_rows(primals: tuple[Array, Array], tangents: tuple[Any, Array]) -> tuple[Array, Array]:
    return of_rows(*primals), _or_nothing(primals[0], tangents[1])


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def with_live_derivatives(segments: Segments, x: Array, rows: Rows) -> Array:
    """The data, for a rule: derivatives of the rule with respect to them, of any order, are 0 where masked."""
    return x


@with_live_derivatives.defjvp
def _live_derivatives(segments: Segments, primals: Any, tangents: Any) -> tuple[Array, Array]:
    x, rows = primals
    return with_live_derivatives(segments, x, rows), masks.selected(tangents[0], rows.live(segments, x.ndim))


def of_live_rows(rows: Rows, values: Array) -> Array:
    """The same with 0 where masked; its transpose adds up the rows of each segment, without a selection of rows."""
    return masks.selected(_or_nothing(rows.ids, values), rows.where)


def _or_nothing(ids: Array, values: Array) -> Array:
    """Of each row the value of its segment; 0 for an id out of range. Its transpose is `_sums_on_device`."""
    parts, slots = _parts(ids, values.shape[0])
    if parts > 1:
        values = jnp.tile(values, (parts, *[1] * (values.ndim - 1)))
    return _gathered(slots, values, lax.GatherScatterMode.FILL_OR_DROP)


def _gathered(ids: Array, values: Array, mode: lax.GatherScatterMode) -> Array:
    if values.shape[0] == 0:  # JAX does not index an array of nothing
        values = jnp.pad(values, [(0, 1), *[(0, 0)] * (values.ndim - 1)])
    dimensions = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(1, values.ndim)), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    return lax.gather(values, ids[:, None], dimensions, (1, *values.shape[1:]), mode=mode, fill_value=0)


def unmasked_element(segments: Segments, rows: Rows, x: Array) -> Array:
    """An unmasked element of each segment, in the wide dtype, and the average of these over devices.

    Of nothing it may be anything: no row is there to be compared with it.
    """
    number = jnp.arange(rows.ids.shape[0], dtype=jnp.int32).reshape(-1, *[1] * (x.ndim - 1))
    live = rows.live(segments, x.ndim)
    start = unfolded.unknown(-1, jnp.int32)  # as in `total_weights`
    last = combined(lax.scatter_max, segments, rows.ids, jnp.where(live, number, -1), start)
    if all(n == 1 for n in last.shape[1:]):
        found = widened(of_rows(last.reshape(-1), x))
    else:
        last = jnp.broadcast_to(last, (segments.number, *x.shape[1:]))
        found = widened(jnp.take_along_axis(x, jnp.maximum(last, 0), 0))
    if not segments.devices.are_many:
        return found
    has_one = (last >= 0).astype(found.dtype)
    share = has_one / jnp.maximum(segments.devices.sum(has_one), 1)  # before the sum, which might overflow
    return segments.devices.sum(masks.selected(found, last >= 0) * share)
