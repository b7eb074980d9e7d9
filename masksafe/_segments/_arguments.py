"""The arguments that all segment ops share, and how they are computed on several devices."""

import dataclasses
import functools
from collections.abc import Callable, Hashable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from masksafe._core import arguments, label_checks, masks, per_device, run_time, sharding, switches
from masksafe._core.groups import with_value_of_empty
from masksafe._core.typing import Array, jitted
from masksafe._segments._segments import Segments


def compute(
    op: str,
    formula: Callable[..., Array],
    data: Array,
    segment_ids: object,
    num_segments: object,
    where: object,
    indices_are_sorted: object,
    axis_name: object,
    weights: object = None,
    *,
    options: tuple[Hashable, ...] = (),
    is_like_data: bool = False,
    empty_value: Array | None = None,
) -> Array:
    """The result of a formula, `[num_segments, ...]`, or of the shape of the data."""
    if data.ndim == 0:
        raise ValueError(arguments.message(op, "data", "shape ()", "an array of rank 1 or more"))
    ids = arguments.as_index_array(op, "segment_ids", segment_ids)
    if ids.shape != data.shape[:1]:
        found, expected = f"shape {ids.shape}", f"shape {data.shape[:1]}, the first axis of data {data.shape}"
        raise ValueError(arguments.message(op, "segment_ids", found, expected))
    if where is not None:
        where = _fitting(op, "where", masks.as_mask(op, "where", where), data)
    if weights is not None:
        weights = _fitting(op, "weights", arguments.as_real_array(op, "weights", weights), data)
    number = _as_number(op, num_segments, ids, where)
    _check_ids(op, ids, where, number)
    devices = sharding.Devices(sharding.as_axis_name(op, axis_name))
    are_sorted = arguments.as_bool(op, "indices_are_sorted", indices_are_sorted)
    has_no_segment = number == 0
    if has_no_segment:  # JAX does not index an empty array
        ids, number = jnp.full_like(ids, -1), 1
    segments = Segments(ids, number, are_sorted, devices)
    result = _on_devices(formula, options, is_like_data, segments, data, where, weights, empty_value)
    return result[:0] if has_no_segment and not is_like_data else result


compute_for_rows = functools.partial(compute, is_like_data=True)


def _fitting(op: str, argument: str, value: Array, data: Array) -> Array:
    """The argument, given for rows or for elements."""
    if value.ndim == data.ndim:
        arguments.check_broadcasts_to(op, argument, value.shape, data.shape, "data")
    elif value.shape != data.shape[:1]:
        expected = f"shape {data.shape[:1]}, for rows, or one that broadcasts to {data.shape}, the shape of data"
        raise ValueError(arguments.message(op, argument, f"shape {value.shape}", expected))
    return value


def _at_rank(value: Array | None, data: Array) -> Array | None:
    """An array given for rows or for elements, as `[N, ...]` at the rank of the data."""
    if value is None:
        return None
    if value.ndim != data.ndim:
        value = jnp.expand_dims(value, range(1, data.ndim))
    return jnp.broadcast_to(value, (*data.shape[:1], *value.shape[1:]))


def _as_number(op: str, num_segments: object, ids: Array, where: Array | None) -> int:
    if num_segments is not None:
        return arguments.as_size(op, "num_segments", num_segments, 0)
    unmasked_ids = masks.selected(ids, _unmasked_rows(where), -1)
    if isinstance(unmasked_ids, jax.core.Tracer):
        found, hint = "None, where segment_ids is a traced array", "Pass the number of segments."
        raise TypeError(arguments.message(op, "num_segments", found, "an int", hint))
    return int(jnp.max(unmasked_ids, initial=-1)) + 1


def _check_ids(op: str, ids: Array, where: Array | None, number: int) -> None:
    """Reports ids out of range, except those of padding: -1, and the number of segments."""
    if switches.label_check_mode() == "off":  # in eager code the mask of rows takes time
        return
    is_valid = lambda ids: (ids >= -1) & (ids <= number)  # noqa: E731
    otherwise = f"outside [0, {number}), and neither -1 nor {number}"
    label_checks.check_elements(op, ids, ids.shape, _unmasked_rows(where), is_valid, otherwise, "segment_ids")


def _unmasked_rows(where: Array | None) -> Array | None:
    """Which rows have an unmasked element."""
    return None if where is None else run_time.any_of(where, tuple(range(1, where.ndim)))


@jitted(0, 1, 2)
def _on_devices(
    formula: Callable[..., Array],
    options: tuple[Hashable, ...],
    is_like_data: bool,
    segments: Segments,
    data: Array,
    where: Array | None,
    weights: Array | None,
    empty_value: Array | None,
) -> Array:
    """The result of the formula; each device computes its part, if explicit mesh axes split the data."""

    def result(
        devices: sharding.Devices,
        data: Array,
        ids: Array,
        where: Array | None,
        weights: Array | None,
        empty_value: Array | None,
    ) -> Array:
        here, elements = dataclasses.replace(segments, ids=ids, devices=devices), tuple(range(1, data.ndim))
        if switches.uses_plain_rules():  # checkify would report ids out of range and NaN
            where = here.unmasked(data, where)
            here = dataclasses.replace(here, ids=jnp.clip(ids, 0, here.number - 1))
        elif where is not None and weights is None and not here.are_sorted and masks.masks_rows(where, elements):
            # A masked row gets an id out of range, which spares the selection. Sorted ids have to stay sorted.
            here, where = dataclasses.replace(here, ids=jnp.where(where.reshape(-1), ids, here.number)), None
        unmasked = where if weights is None else here.unmasked(data, where)
        data, weighting = masks.weighting_of(data, unmasked, weights)
        if switches.uses_plain_rules():
            data = masks.selected(data, weighting.where)
        results = formula(*options, here, data, weighting)
        return with_value_of_empty(here, results, data, weighting.where, empty_value)

    data = masks.promoted_with(data, weights)
    optional = _at_rank(where, data), _at_rank(weights, data), empty_value
    columns = [str(axis) for axis in range(1, data.ndim)]
    names = PartitionSpec("rows", *columns)
    names_of = zip(optional, (names, names, PartitionSpec()), strict=True)
    names_of_args = names, PartitionSpec("rows"), *(None if x is None else given for x, given in names_of)
    names_of_result = names if is_like_data else PartitionSpec(None, *columns)
    args = data, segments.ids, *optional
    return per_device.along_devices(result, segments.devices, args, names_of_args, names_of_result, ("rows",))
