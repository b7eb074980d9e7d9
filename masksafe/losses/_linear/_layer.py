"""A linear layer in blocks of tokens: its logits, and its gradients from the cotangents of the logits."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from masksafe._core import platforms
from masksafe._core.masks import selected
from masksafe._core.precision import wide_dtype
from masksafe._core.tiles import divide, take
from masksafe._core.typing import Array
from masksafe.losses._linear._token_blocks import Block


class Sizes(NamedTuple):
    """How many tokens make a block, and how many classes a tile."""

    token_block: int
    class_tile: int


class Gradients(NamedTuple):
    """Cotangents of features, kernel and bias."""

    features: Array
    kernel: Array
    bias: Array | None


def default_token_block(classes: int, rows: int = 1) -> int:
    """On a CPU, for blocks with so many rows of logits per token."""
    elements = platforms.TOKEN_BLOCK_ELEMENTS // rows
    return max(platforms.FEWEST_TOKENS, min(platforms.MOST_TOKENS, elements // max(1, classes)))


def default_class_tile(width: int, token_block: int) -> int:
    return max(1, platforms.CLASS_TILE_ELEMENTS // max(1, width, token_block))


def add_gradients(
    gradients: Gradients, features: Array, kernel: Array, d_logits: Array, block: Block, class_tile: int
) -> Gradients:
    """The gradients with those of a block, which has these features; features are in packed order."""
    d_logits = selected(d_logits, block.live[:, None])  # the logits of dead rows may be 0 times infinity
    classes, d_bias = divide(d_logits.shape[-1], class_tile), gradients.bias
    if d_bias is not None:
        d_bias += jnp.sum(d_logits, 0).astype(d_bias.dtype)
    d_logits = d_logits.astype(kernel.dtype)
    d_features = block.put(gradients.features, matmul(d_logits, kernel, 1, 1))
    if classes.number == 1:
        return Gradients(d_features, gradients.kernel + matmul(features, d_logits, 0, 0), d_bias)
    # Contracting the first axes of both takes a third longer. The barrier prevents XLA from undoing the transposition.
    features_by_column = lax.optimization_barrier(features.T)

    def add(j: Any, d_kernel: Array) -> Array:
        tile = classes.tile(j)
        part = take(d_logits, 1, tile)
        if tile.is_ragged:
            part = jnp.where((tile.start + jnp.arange(tile.size) >= tile.first)[None], part, 0)
        added = take(d_kernel, 1, tile) + matmul(features_by_column, part, 1, 0)
        return lax.dynamic_update_slice_in_dim(d_kernel, added, tile.start, 1)

    return Gradients(d_features, lax.fori_loop(0, classes.number, add, gradients.kernel), d_bias)


def matmul(a: Array, b: Array, axis_of_a: int, axis_of_b: int) -> Array:
    """A matrix product, accumulated in the wide dtype."""
    dimensions = (((axis_of_a,), (axis_of_b,)), ((), ()))
    return lax.dot_general(a, b, dimensions, preferred_element_type=wide_dtype(b.dtype))
