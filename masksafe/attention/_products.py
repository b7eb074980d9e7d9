"""The matrix products of attention, accumulated in the wide dtype.

The G query heads of a key head are rows of one matrix.
"""

import jax.numpy as jnp
from jax import lax

from masksafe._core.precision import wide_dtype
from masksafe._core.typing import Array


def dot_keys(q: Array, k: Array) -> Array:
    """`[B, K, G, T, H]` and `[B, K, S, H]` to `[B, K, G, T, S]`."""
    return _dot(_merge_heads(q), k, 3, 3).reshape(*q.shape[:4], k.shape[2])


def dot_values(p: Array, v: Array) -> Array:
    """`[B, K, G, T, S]` and `[B, K, S, H]` to `[B, K, G, T, H]`."""
    return _dot(_merge_heads(p), v, 3, 2).reshape(*p.shape[:4], v.shape[3])


def dot_queries(k: Array, q: Array) -> Array:
    """`[B, K, S, H]` and `[B, K, G, T, H]` to `[B, K, S, G, T]`."""
    return _dot(k, _merge_heads(q), 3, 3).reshape(*k.shape[:3], *q.shape[2:4])


def dot_queries_as_forward(k: Array, q: Array) -> Array:
    """The products of `dot_keys`, transposed, with the same rounding errors.

    The sum of the weights comes from the forward pass, so different errors here would be errors of the weights. A CPU
    rounds a product and its transpose alike only if the sizes are multiples of 64.
    """
    rounds_alike = k.shape[2] % 64 == 0 and q.shape[2] * q.shape[3] % 64 == 0
    return dot_queries(k, q) if rounds_alike else keys_first(dot_keys(q, k))


def dot_pairs_with_queries(p: Array, q: Array) -> Array:
    """`[B, K, S, G, T]` and `[B, K, G, T, H]` to `[B, K, S, H]`."""
    return _dot(p.reshape(*p.shape[:3], -1), _merge_heads(q), 3, 2)


def dot_pairs_with_keys(p: Array, k: Array) -> Array:
    """`[B, K, S, G, T]` and `[B, K, S, H]` to `[B, K, G, T, H]`."""
    return _dot(p.reshape(*p.shape[:3], -1), k, 2, 2).reshape(*p.shape[:2], *p.shape[3:], k.shape[3])


def dot_queries_of_rows(p: Array, q: Array) -> Array:
    """`[B, K, G, T, S]` and `[B, K, G, T, H]` to `[B, K, S, H]`."""
    return _dot(_merge_heads(p), _merge_heads(q), 2, 2)


def _merge_heads(x: Array) -> Array:
    return x.reshape(*x.shape[:2], -1, x.shape[4])


def _dot(a: Array, b: Array, axis_of_a: int, axis_of_b: int) -> Array:
    """A matrix product for every problem; weights are rounded to the dtype of the array that they multiply."""
    dimensions = (((axis_of_a,), (axis_of_b,)), ((0, 1), (0, 1)))
    if b.dtype == jnp.bool_:
        b = b.astype(a.dtype)
    return lax.dot_general(a.astype(b.dtype), b, dimensions, preferred_element_type=wide_dtype(b.dtype))


def keys_first(x: Array) -> Array:
    """A block of pairs transposed, `[B, K, G, T, S]` to `[B, K, S, G, T]`."""
    return jnp.moveaxis(x, -1, 2)


def queries_first(x: Array) -> Array:
    """The inverse of `keys_first`."""
    return jnp.moveaxis(x, 2, -1)
