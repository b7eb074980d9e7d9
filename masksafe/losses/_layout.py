"""Conversion between the shapes of a loss's arguments and those of its core.

The axes of the classes become one axis, the last.
"""

import math

import jax.numpy as jnp

from masksafe._core import arguments, precision, run_time
from masksafe._core.labels import is_soft
from masksafe._core.masks import selected
from masksafe._core.typing import Array, Axes


def common_rows(op: str, labels: tuple[int, ...], axes: Axes, name: str, x: Array) -> tuple[int, ...]:
    """The common shape of labels of this shape and of the scores `x` without `axes`, the axes of their classes."""
    rows = shape_without(axes, x.shape)
    try:
        return jnp.broadcast_shapes(rows, labels)
    except ValueError as error:
        found = f"shapes {x.shape} and {labels}"
        expected = f"labels that broadcast with the rows {rows} of {name}"
        raise ValueError(arguments.message(op, f"{name} and labels", found, expected)) from error


def shape_without(axes: Axes, shape: tuple[int, ...]) -> tuple[int, ...]:
    """`shape` without `axes`."""
    return tuple(n for i, n in enumerate(shape) if i not in axes)


def find_unmasked_rows(where: Array | None, axes: Axes) -> Array | None:
    """Which rows have an unmasked element; None: all."""
    return None if where is None else run_time.any_of(where, axes)


def wide_selected(x: Array, where: Array | None) -> Array:
    """`x` in its wide dtype, with 0 under the mask."""
    return precision.widened(selected(x, where))


def shape_with_classes(axes: Axes, rows: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """`shape` with its sizes on `axes`, the axes of the classes, and with the sizes `rows` on the other axes."""
    remaining = iter(rows)
    return tuple(n if i in axes else next(remaining) for i, n in enumerate(shape))


def broadcast_widened(x: Array, shape: tuple[int, ...]) -> Array:
    """`x` broadcast to `shape`; repeated floats are widened, so their gradient, a sum, is rounded only once."""
    if x.shape == shape:
        return x
    wide = precision.widened(x) if is_soft(x) else x
    return jnp.broadcast_to(wide, shape)


def move_classes_last(axes: Axes, x: Array) -> Array:
    """`x` with the axes of the classes as one axis, the last."""
    moved = jnp.moveaxis(x, axes, range(-len(axes), 0))
    rows, classes = moved.shape[: x.ndim - len(axes)], moved.shape[x.ndim - len(axes) :]
    return moved if len(axes) == 1 else moved.reshape(*rows, math.prod(classes))


def from_rows(axes: Axes, like: Array, x: Array) -> Array:
    """Rows of classes in the layout and the dtype of `like`, the user's array."""
    classes = tuple(like.shape[a] for a in axes)
    return jnp.moveaxis(x.reshape(*x.shape[:-1], *classes), range(-len(axes), 0), axes).astype(like.dtype)
