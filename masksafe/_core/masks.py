"""Selecting under a mask, and reading the argument `where`."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from masksafe._core.arguments import as_array, as_real_array, at_rank_of, leading_axes_hint, message
from masksafe._core.linear import finite_or_zero_both_ways, with_tangent_of
from masksafe._core.precision import widened
from masksafe._core.typing import Array, Axes


def selected(x: Array, where: Array | None, masked: float = 0) -> Array:
    """`x` with its masked elements replaced by `masked`, in the dtype of `x`; None masks nothing."""
    return x if where is None else jnp.where(where, x, jnp.asarray(masked, x.dtype))


def masks_rows(where: Array | None, axes: Axes) -> bool:
    """Whether a mask has one value for all elements of a row, which lie along `axes`; None masks no row."""
    return where is None or all(where.shape[a] == 1 for a in axes)


def both(a: Array | None, b: Array | None) -> Array | None:
    """`a & b`; None is all True."""
    return a if b is None else b if a is None else a & b


def either(a: Array | None, b: Array | None) -> Array | None:
    """`a | b`; None is all False."""
    return a if b is None else b if a is None else a | b


def first_of(found: Array) -> tuple[Array, Array]:
    """The flat index of the first True (the size if there is none), and an array that is True only there."""
    # A minimum of positions rather than argmax and indexing, which do not work on sharded arrays.
    position = jnp.arange(found.size).reshape(found.shape)
    first = jnp.min(jnp.where(found, position, found.size), initial=found.size)
    return first, position == first


def as_mask(op: str, argument: str, value: object) -> Array:
    """`value` as an array of booleans."""
    array = as_array(op, argument, value)
    if array.dtype != jnp.bool_:
        raise TypeError(message(op, argument, f"dtype {array.dtype}", "bool", f"Write {argument} != 0."))
    return array


MaskRule = Literal["elements", "tokens", "elements or rows", "classes or rows"]


def read_mask(
    op: str,
    where: object,
    shape: tuple[int, ...],
    of: str = "x",
    rule: MaskRule = "elements",
    axes: Axes = (),
    rank_of_classes: int | None = None,
) -> Array | None:
    """The argument `where` of an op, at the rank of `shape`, the shape of `of`, but not expanded; or None.

    The rules are those of the table "Masks of lower rank" in docs/getting_started.md. A mask of the rank of `shape`
    masks elements; one of lower rank is read

    * "elements": from the right, as NumPy broadcasts;
    * "tokens": likewise, and the mask is expanded to `shape`, which has no classes;
    * "elements or rows": as a mask of rows, which has all axes but `axes`. Any other rank is refused, even if the mask
      would broadcast, since two sizes may be equal by chance;
    * "classes or rows": as a mask of classes if it has the rank of the logits, which may broadcast to labels of higher
      rank, else as one of rows, from the right (optax's rule).
    """
    if where is None:
        return None
    where = as_mask(op, "where", where)
    if rule in ("elements", "tokens") or where.ndim in (len(shape), rank_of_classes):
        where = at_rank_of(op, "where", where, shape, of)
        return jnp.broadcast_to(where, shape) if rule == "tokens" else where
    rows = tuple(n for axis, n in enumerate(shape) if axis not in axes)
    if rule == "elements or rows" and where.ndim != len(rows):
        of_rows = f", or rank {len(rows)}, to mask rows of the loss {rows}" if axes else ""
        expected = f"rank {len(shape)}, to mask elements of {of} {shape}{of_rows}"
        hint = leading_axes_hint("where", where.shape, shape)
        raise ValueError(message(op, "where", f"shape {where.shape}", expected, hint))
    target = f"the loss, for a mask of rows; a mask of {rule.split()[0]} has the rank of {of}"
    return jnp.expand_dims(at_rank_of(op, "where", where, rows, target), axes)


def as_weights_of(op: str, weights: object, shape: Sequence[int], of: str) -> Array | None:
    """The argument `weights` of an op, at the rank of `shape`, the shape of `of`, but not expanded; or None."""
    return None if weights is None else at_rank_of(op, "weights", as_real_array(op, "weights", weights), shape, of)


def promoted_with(x: Array, weights: Array | None) -> Array:
    """`x` in the dtype of its product with the weights; None changes nothing."""
    if weights is None:
        return x
    # Weights may have a dtype of their own under a strict flag too, and what is masked may be NaN.
    with jax.numpy_dtype_promotion("standard"), jax.debug_nans(False):
        return x.astype(jnp.result_type(x, weights))


class Weighting(NamedTuple):
    """Which elements count, and with which weights."""

    where: Array | None  # at the rank of the elements, of their shape if there are weights; None: all are unmasked
    weights: Array | None  # of the shape of the elements, wide, 0 under the mask; None: all weights are 1


def read_weighting(op: str, x: Array, where: object, weights: object) -> tuple[Array, Weighting]:
    """The elements of `x` and their weighting, from the arguments of an op."""
    unmasked, weights = read_mask(op, where, x.shape), as_weights_of(op, weights, x.shape, "x")
    return weighting_of(x, unmasked, None if weights is None else jnp.broadcast_to(weights, x.shape))


def weighting_of(x: Array, where: Array | None, weights: Array | None) -> tuple[Array, Weighting]:
    """The elements of `x` and their weighting. A negative weight is NaN.

    A NaN or infinity of weight 0 takes no part, whether it is an element, its tangent or its cotangent. A product with
    the weight alone has the second derivative by the element and its weight, which is not 0.
    """
    if weights is None:
        return x, Weighting(where, None)
    wide = widened(weights)
    where = both(where, (wide != 0) | jnp.isfinite(x))
    wide = selected(wide, where)
    if jnp.issubdtype(x.dtype, jnp.inexact):
        has_no_weight = jnp.zeros_like(x, bool) | (wide == 0)  # split over devices like the elements
        searches = jax.config.jax_debug_nans  # type: ignore[attr-defined]
        with jax.debug_nans(False):  # a masked element may be NaN
            x = with_tangent_of(jnp.where(has_no_weight, finite_or_zero_both_ways(x), x), x)
            x = selected(x, where) if searches else x  # the reverse pass may keep the elements
    return x, Weighting(where, jnp.where(wide < 0, jnp.nan, wide))
