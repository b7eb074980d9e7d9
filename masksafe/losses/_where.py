"""How the mask of a loss is read, and the pattern of the losses that need no rule of their own.

The pattern: what is masked is replaced by 0 ahead of the arithmetic, which therefore never sees it, the arithmetic is
done in float32 at least, and what came out of nothing is replaced by 0 behind it. JAX's own derivatives of that are
exact zeros for all that is masked.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from masksafe._errors import as_mask, at_rank_of, broadcast_shapes, check_broadcasts_to, message
from masksafe._moments import selected, widened
from masksafe._typing import Array, ArrayLike, Axes


def elements_or_rows(op: str, where: ArrayLike | None, shape: tuple[int, ...], axes: Axes) -> Array | None:
    """A mask of elements, of the rank of the input `shape`, or of rows, of its rank without `axes`; at the former rank.

    Any other rank is refused, also where it would broadcast: two sizes may be equal by chance.
    """
    if where is None:
        return None
    where, rows = as_mask(op, "where", where), without(axes, shape)
    if where.ndim == len(shape):
        check_broadcasts_to(op, "where", where.shape, shape, "the input")
        return where
    if where.ndim == len(rows):
        check_broadcasts_to(op, "where", where.shape, rows, "the loss")
        return jnp.expand_dims(where, axes)
    expected = f"rank {len(shape)}, to mask elements of the input {shape}"
    if axes:
        expected += f", or rank {len(rows)}, to mask rows of the loss {rows}"
    raise ValueError(message(op, "where", f"shape {where.shape}", expected))


def classes_or_rows(
    op: str, where: ArrayLike | None, axes: Axes, shape: tuple[int, ...], logits_ndim: int
) -> Array | None:
    """The mask at the rank of `shape`. Of the logits' rank it masks classes, else whole rows (optax's rule).

    Where the logits broadcast to labels of a higher rank, a mask of that rank masks classes as well.
    """
    if where is None:
        return None
    where = as_mask(op, "where", where)
    if where.ndim in (logits_ndim, len(shape)):
        return at_rank_of(op, "where", where, shape, "logits")
    of_rows = "a mask of rows; a mask of classes has the rank of logits"
    return jnp.expand_dims(at_rank_of(op, "where", where, without(axes, shape), of_rows), axes)


def without(axes: Axes, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n for i, n in enumerate(shape) if i not in axes)


def anything_left(where: Array | None, axes: Axes) -> Array | None:
    """Which rows have an unmasked element; None is all."""
    return None if where is None else jnp.any(where, axes)


def wide_selected(x: Array, where: Array | None) -> Array:
    """`x` with 0 under the mask, in a dtype in which it is safe to compute."""
    return widened(selected(x, where))


def of_elements(op: str, where: ArrayLike | None, dtype: Any, loss: Callable[..., Array], **arguments: Array) -> Array:
    """`loss` of each element of the arguments, which broadcast together; 0 where masked."""
    shape = broadcast_shapes(op, **{name: x.shape for name, x in arguments.items()})
    mask = elements_or_rows(op, where, shape, ())
    arrays = (wide_selected(jnp.broadcast_to(x, shape), mask) for x in arguments.values())
    return selected(loss(*arrays), mask).astype(dtype)
