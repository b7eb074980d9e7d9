"""Where logits come from: a linear layer, its logits, and its gradients from the cotangents of the logits."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from masksafe._core.precision import wide_dtype
from masksafe._core.tiles import add_to_part, divide, take
from masksafe._core.typing import Array


class Linear(NamedTuple):
    """Features `[..., D]`, kernel `[D, V]` and bias `[V]`."""

    features: Array
    kernel: Array
    bias: Array | None

    @property
    def dtype(self) -> Any:
        """That of the matrix products."""
        return jnp.promote_types(self.features.dtype, self.kernel.dtype)

    @property
    def sum_dtype(self) -> Any:
        """That of sums."""
        return wide_dtype(self.dtype)

    def logits(self, dtype: Any) -> Array:
        """Of features and a kernel of the same dtype."""
        logits = matmul(self.features, self.kernel, self.features.ndim - 1, 0).astype(dtype)
        if self.bias is None:
            return logits
        return logits + jnp.expand_dims(self.bias, range(logits.ndim - 1)).astype(dtype)


class Gradients(NamedTuple):
    """Cotangents of features, kernel and bias."""

    features: Array
    kernel: Array
    bias: Array | None


def add_to_kernel(d_kernel: Array, features: Array, d_logits: Array, class_tile: int) -> Array:
    """`d_kernel + features.T @ d_logits`, in tiles of the classes."""
    classes = divide(d_logits.shape[-1], class_tile)
    if classes.number == 1:
        return d_kernel + matmul(features, d_logits, 0, 0)
    # Contracting the first axes of both takes a third longer. The barrier prevents XLA from undoing the transposition.
    features_by_column = lax.optimization_barrier(features.T)

    def add(j: Any, d_kernel: Array) -> Array:
        tile = classes.tile(j)
        part = take(d_logits, 1, tile)
        if tile.is_ragged:
            part = jnp.where((tile.start + jnp.arange(tile.size) >= tile.first)[None], part, 0)
        return add_to_part(d_kernel, matmul(features_by_column, part, 1, 0), {1: (tile.start, tile.size)})

    total: Array = lax.fori_loop(0, classes.number, add, d_kernel)
    return total


def matmul(a: Array, b: Array, axis_of_a: int, axis_of_b: int) -> Array:
    """A matrix product, accumulated in the wide dtype."""
    dimensions = (((axis_of_a,), (axis_of_b,)), ((), ()))
    return lax.dot_general(a, b, dimensions, preferred_element_type=wide_dtype(b.dtype))
