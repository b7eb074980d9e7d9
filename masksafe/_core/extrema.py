"""The rule of extrema: of the largest or the smallest unmasked elements of sets, which are rows or segments.

Sets tell which elements are `live`, `sum` the elements of each, and `spread` a value of each to its elements, or
`spread_once`, apart from other uses of what is spread. Over devices, extrema are those of integers of the same order.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core import masks, precision
from masksafe._core.sharding import Devices
from masksafe._core.typing import Array, DType, Pytree


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def extremum(reduce: Callable[..., Array], is_max: bool, sets: Pytree, x: Array, where: Array | None) -> Array:
    """The extrema, which `reduce` finds of elements without a mask; of nothing the limit of the dtype."""
    lowest, highest = precision.limits(x.dtype)
    of_nothing = lowest if is_max else highest
    return reduce(is_max, sets, masks.selected(x, where, of_nothing), of_nothing)


@extremum.defjvp
def _derivative(reduce: Callable[..., Array], is_max: bool, primals: Pytree, tangents: Pytree) -> tuple[Array, Array]:
    """The elements that are equal to the extremum share its derivative; if it is NaN, all do and are NaN."""
    sets, x, where = primals
    live, result = sets.live(x, where), extremum(reduce, is_max, *primals)
    is_within = jnp.less if is_max else jnp.greater
    takes_part = lambda spread: masks.selected(~is_within(x, spread), live)  # noqa: E731
    number = sets.sum(takes_part(sets.spread(result)).astype(jnp.int32))
    # Once: XLA would keep what is spread to the elements of segments, at the size of the data, for another use.
    moved = sets.sum(precision.widened(masks.selected(tangents[1], takes_part(sets.spread_once(result)))))
    share = jnp.where(jnp.isnan(result), jnp.nan, 1 / jnp.maximum(number, 1)).astype(moved.dtype)
    return result, (moved * share).astype(x.dtype)


def over_devices(is_max: bool, here: Array, devices: Devices) -> Array:
    """The extrema over the devices, from those on each; NaN where one is."""
    if not devices.are_many:
        return here
    reduce = lax.pmax if is_max else lax.pmin
    return of_order(reduce(order_of(here, is_max), devices.axis_name), here.dtype)


# Numbers as integers of the same order. GPUs find extrema of integers at once, and no order of a NaN is undefined.


def order_of(x: Array, nan_is_highest: bool) -> Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(jnp.int32) if x.dtype == jnp.bool_ else x
    bits = lax.bitcast_convert_type(precision.widened(x), jnp.int64 if x.dtype.itemsize == 8 else jnp.int32)
    limits = jnp.iinfo(bits.dtype)
    order = jnp.where(bits < 0, bits ^ limits.max, bits)
    return jnp.where(jnp.isnan(x), limits.max if nan_is_highest else limits.min, order)


def of_order(order: Array, dtype: DType) -> Array:
    """The number; both the highest and the lowest integer are the bits of a NaN."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return order.astype(dtype)
    bits = jnp.where(order < 0, order ^ jnp.iinfo(order.dtype).max, order)
    return lax.bitcast_convert_type(bits, precision.wide_dtype(dtype)).astype(dtype)
