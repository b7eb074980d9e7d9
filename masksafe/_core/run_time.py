"""Reductions of what a caller may have made constant: masks, labels, lengths, cotangents of ones.

XLA computes a reduction of constants while it compiles, on one thread: it takes seconds, and prints a warning (the mean
of rows under a constant mask of 8192x2048: 4 s with jax 0.12, 82 s with jax 0.10). So the reductions here start from a
number that XLA does not know while it folds constants, since it comes through an optimization barrier. The barrier is
on that number alone: no array is stored, copied or read once more because of it.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core.typing import Array, ArrayLike, Axis, DType


def any_of(x: Array, axis: Axis | None = None, *, keepdims: bool = False) -> Array:
    """`jnp.any` of booleans."""
    return _reduce(lax.bitwise_or, unknown(False, jnp.bool_), x, axis, keepdims)


def number_of(x: Array, axis: Axis | None = None, *, keepdims: bool = False) -> Array:
    """`jnp.sum` of booleans: how many are True."""
    x = x.astype(jnp.result_type(int))
    return _reduce(lax.add, unknown(0, x.dtype), x, axis, keepdims)


def largest_of(x: Array, axis: Axis | None = None, *, keepdims: bool = False) -> Array:
    """`jnp.max` of non-negative numbers; 0 if there are none."""
    return _reduce(lax.max, unknown(0, x.dtype), x, axis, keepdims)


def sum_of(x: Array, axis: Axis | None = None, *, keepdims: bool = False) -> Array:
    """`jnp.sum` of numbers that are wide enough to be summed as they are."""

    @jax.custom_jvp
    def total(x: Array) -> Array:
        return _reduce(lax.add, unknown(0, x.dtype), x, axis, keepdims)

    @total.defjvp
    def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
        return total(*primals), jnp.sum(*tangents, axis, keepdims=keepdims)

    return total(x)


def unknown(x: ArrayLike, dtype: DType | None = None) -> Array:
    """An array of which XLA knows nothing while it folds constants; a small one, since it is stored."""
    return lax.optimization_barrier(jnp.asarray(x, dtype))


def _reduce(combine: Callable[..., Array], start: Array, x: Array, axis: Axis | None, keepdims: bool) -> Array:
    axes = range(x.ndim) if axis is None else (axis,) if isinstance(axis, int) else axis
    axes = [a % x.ndim for a in axes]
    reduced: Array = lax.reduce(x, start, combine, axes)
    return jnp.expand_dims(reduced, axes) if keepdims else reduced
