"""Sums over the elements of a row that keep all of their digits, whatever is infinite or dominates.

Some have two forms. Arithmetic alone is what XLA's CPU compiler fuses with a sum, while it writes the result of a
comparison or a selection to memory; for a GPU, XLA makes one kernel of the form that selects, and several of the other.
"""

import functools
from typing import Any

import jax.numpy as jnp

from masksafe._core import labels, masks, unfolded
from masksafe._core.typing import Array, Axes

_CLASSES_AS_FLOATS = 2**24  # float32 tells so many integers apart


def sum_of_row(x: Array) -> Array:
    return jnp.sum(x, -1, keepdims=True)


def log_sum_exp(z: Array, where: Array | None = None, *, axes: Axes = (-1,), by_arithmetic: bool = False) -> Array:
    """The logarithm of the sum of the unmasked exp(z), for z of which the largest are 0.

    These, whose exponential is 1, are counted rather than added to the others, which would lose their digits. In the
    form by arithmetic masked z have to be -inf.
    """
    total = functools.partial(jnp.sum, axis=axes, keepdims=True)
    if by_arithmetic:
        others, number = map(total, exps_apart(z))
    else:
        others = total(jnp.where(z == 0, 0, masks.selected(jnp.exp(z), where)))
        number = total(masks.selected(z == 0, where, False)).astype(z.dtype)
    # None is largest in a row with nothing left, whose sum is to be 1, and among z of -inf, whose sum is to be 0.
    fewest = -1 if where is None else -unfolded.any_of(where, axes, keepdims=True).astype(z.dtype)
    return jnp.log1p(others + jnp.maximum(number - 1, fewest))


def exps_apart(z: Array) -> tuple[Array, Array]:
    """exp(z) but 0 where z is 0, the largest; and 1 where it is, 0 elsewhere. By arithmetic alone."""
    # They have nothing in common, not even a constant: XLA's CPU compiler would write it to memory at the size of z.
    large = _reciprocal_of_tiniest(z.dtype)
    return jnp.minimum(jnp.exp(z), jnp.abs(z) * large), jnp.maximum(1 - z * -large, 0)


def exps_of_others(z: Array, label: Array) -> Array:
    """exp(z) of every class but the label, `[..., 1]`, where it is 0."""
    index = labels.class_index(z.shape)
    if isinstance(z.shape[-1], int) and z.shape[-1] <= _CLASSES_AS_FLOATS:
        return jnp.exp(z) * jnp.minimum(jnp.abs(index.astype(z.dtype) - label.astype(z.dtype)), 1)
    return jnp.where(index == label, 0, jnp.exp(z))


def product_or_zero(t: Array, x: Array, *, by_arithmetic: bool = False) -> Array:
    """The product t x, and 0 where t is 0, even if x is infinite."""
    if not by_arithmetic:
        return jnp.where(t == 0, 0, t * x)
    # Infinite unless t is 0, and then finite. Between two products by numbers stands the minimum: of `t * a * b` XLA
    # makes `t * (a * b)`, where a * b is infinite.
    largest = float(jnp.finfo(t.dtype).max)
    bound = jnp.minimum(jnp.abs(t) * _reciprocal_of_tiniest(t.dtype), 1) * largest + largest
    return t * jnp.minimum(jnp.maximum(x, -bound), bound)


def _reciprocal_of_tiniest(dtype: Any) -> float:
    """By which any number but 0 becomes at least 1 in size: those below the tiniest normal one are flushed to 0."""
    return 1 / float(jnp.finfo(dtype).tiny)
