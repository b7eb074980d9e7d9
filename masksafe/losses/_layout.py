"""How the mask of a loss is read, and the pattern of the losses that need no rule of their own.

The pattern: what is masked is replaced by 0 ahead of the arithmetic, which therefore never sees it, the arithmetic is
done in float32 at least, and what came out of nothing is replaced by 0 behind it. JAX's own derivatives of that are
exact zeros for all that is masked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from masksafe._core.arguments import at_rank_of, at_the_front, broadcast_shapes, check_broadcasts_to, message
from masksafe._core.label_checks import check_elements, nan_where_bad
from masksafe._core.masks import as_mask, selected
from masksafe._core.precision import widened
from masksafe._core.sharding import is_sharded
from masksafe._core.typing import Array, ArrayLike, Axes
from masksafe.losses._cross_entropy_rows import is_soft


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
    hint = at_the_front("where", where.shape, shape)
    raise ValueError(message(op, "where", f"shape {where.shape}", expected, hint))


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
        return at_rank_of(op, "where", where, shape, "logits and labels together")
    of_rows = "the loss, for a mask of rows; a mask of classes has the rank of logits"
    return jnp.expand_dims(at_rank_of(op, "where", where, without(axes, shape), of_rows), axes)


def common_rows(op: str, labels: Array, axes: Axes, **scores: Array) -> tuple[int, ...]:
    """The common shape of the labels and of the rows of the scores, which have the classes on `axes` too."""
    ((name, x),) = scores.items()
    rows = without(axes, x.shape)
    try:
        return jnp.broadcast_shapes(rows, labels.shape)
    except ValueError as error:
        shapes, expected = (
            f"shapes {x.shape} and {labels.shape}",
            f"labels that broadcast with the rows {rows} of {name}",
        )
        raise ValueError(message(op, f"{name} and labels", shapes, expected)) from error


def without(axes: Axes, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n for i, n in enumerate(shape) if i not in axes)


def anything_left(where: Array | None, axes: Axes) -> Array | None:
    """Which rows have an unmasked element; None is all."""
    return None if where is None else jnp.any(where, axes)


def wide_selected(x: Array, where: Array | None) -> Array:
    """`x` with 0 under the mask, in a dtype in which it is safe to compute."""
    return widened(selected(x, where))


def of_elements(
    op: str,
    where: ArrayLike | None,
    types: Sequence[Any],
    loss: Callable[..., Array],
    *,
    bad: Array | None = None,
    **arguments: Array,
) -> Array:
    """`loss` of each element of the arguments, which broadcast together; 0 where masked, NaN where `bad`.

    It has the dtype to which JAX promotes `types`, arrays, numbers or dtypes.
    """
    shape = broadcast_shapes(op, **{name: x.shape for name, x in arguments.items()})
    mask = elements_or_rows(op, where, shape, ())
    arrays = (wide_selected(x, mask) for x in broadcast_alike(arguments.values(), shape))
    return promoted_as(types, nan_where_bad(selected(loss(*arrays), mask), bad))


def broadcast_alike(arrays: Iterable[Array], shape: tuple[int, ...]) -> list[Array]:
    """The arrays at one shape, and split over the explicit axes of a mesh as the first one is that is split."""
    whole = [jnp.broadcast_to(x, shape) for x in arrays]
    specs = [jax.typeof(x).sharding.spec for x in whole]
    spec = next((spec for spec, x in zip(specs, whole, strict=True) if is_sharded(x)), None)
    if spec is None:
        return whole
    return [x if own == spec else jax.sharding.reshard(x, spec) for own, x in zip(specs, whole, strict=True)]


def promoted_as(types: Sequence[Any], x: Array) -> Array:
    """`x` in the dtype to which JAX promotes `types`; weakly typed, as a Python number is, if that is."""
    dtype = jnp.result_type(*types)
    if not _is_weak(types, dtype):
        return x.astype(dtype)
    number = 0.0 if jnp.issubdtype(dtype, jnp.floating) else 0
    weak: Array = jnp.vectorize(lambda element: jax.lax.full_like(number, element))(x)
    return weak


def _is_weak(types: Sequence[Any], dtype: Any) -> bool:
    """Whether what `types` promote to, `dtype`, yields to a narrow one."""
    numbers = [x for x in types if isinstance(x, (int, float, jax.Array))]
    if not any(jax.typeof(x).weak_type for x in numbers):
        return False
    narrow = jnp.dtype(jnp.bfloat16 if jnp.issubdtype(dtype, jnp.floating) else jnp.int8)
    with jax.numpy_dtype_promotion("standard"):
        return bool(dtype != narrow and jnp.result_type(*types, narrow) == narrow)


def bad_elements(
    op: str, where: ArrayLike | None, is_valid: Callable[[Array], Array], otherwise: str, **arguments: Array
) -> Array | None:
    """Which of the labels, the last of the arguments, are not valid, while checks are on; see `check_elements`."""
    shape = broadcast_shapes(op, **{name: x.shape for name, x in arguments.items()})
    labels = jnp.broadcast_to(list(arguments.values())[-1], shape)
    return check_elements(op, labels, elements_or_rows(op, where, shape, ()), is_valid, otherwise)


def with_classes(axes: Axes, rows: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    remaining = iter(rows)
    return tuple(n if i in axes else next(remaining) for i, n in enumerate(shape))


def broadcast_widened(x: Array, shape: tuple[int, ...]) -> Array:
    if x.shape == shape:
        return x
    # Widened first: the gradient is a sum over what was broadcast, and is to be rounded once.
    wide = widened(x) if is_soft(x) else x
    return jnp.broadcast_to(wide, shape)


def as_rows(axes: Axes, logits: Array, labels: Array, where: Array | None) -> tuple[Array, Array, Array | None]:
    """Logits `[..., classes]`, labels `[..., classes]` or `[..., 1]`, where `[... or 1, classes or 1]`."""
    labels = _classes_last(axes, labels) if is_soft(labels) else labels[..., None]
    if where is not None:
        if any(where.shape[a] > 1 for a in axes):
            where = jnp.broadcast_to(where, with_classes(axes, without(axes, where.shape), logits.shape))
        where = _classes_last(axes, where)
    return _classes_last(axes, logits), labels, where


def _classes_last(axes: Axes, x: Array) -> Array:
    moved = jnp.moveaxis(x, axes, range(-len(axes), 0))
    rows, classes = moved.shape[: x.ndim - len(axes)], moved.shape[x.ndim - len(axes) :]
    return moved if len(axes) == 1 else moved.reshape(*rows, math.prod(classes))


def from_rows(axes: Axes, like: Array, x: Array) -> Array:
    classes = tuple(like.shape[a] for a in axes)
    return jnp.moveaxis(x.reshape(*x.shape[:-1], *classes), range(-len(axes), 0), axes).astype(like.dtype)
