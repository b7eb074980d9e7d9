"""The rule of extrema: of the largest or the smallest unmasked elements of sets, which are rows or segments.

Sets tell which elements are `live`, `sum` the elements of each, and `spread` a value of each to its elements, or
`spread_once`, apart from other uses of what is spread.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from masksafe._core import masks, precision
from masksafe._core.typing import Array, Pytree


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
