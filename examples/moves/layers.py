"""What no move changes: layers in plain JAX, their parameters, and the lengths of padded rows."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

HEAD_WIDTH = 32

Arrays = dict[str, jax.Array]
Params = dict[str, Any]
Batch = dict[str, jax.Array]


def make_params(key: jax.Array, shapes: Mapping[str, Any]) -> Params:
    """Arrays in place of the shapes, in a tree like theirs: ones for vectors, and kernels by their number of rows."""
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(tree, [make_leaf(*of_leaf) for of_leaf in zip(keys, leaves, strict=True)])


def make_leaf(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    if len(shape) == 1:
        return jnp.ones(shape)
    return jax.random.normal(key, shape) / jnp.prod(jnp.array(shape[:-1])) ** 0.5


def layer_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    deviations = x - x.mean(-1, keepdims=True)
    return scale * deviations * jax.lax.rsqrt((deviations**2).mean(-1, keepdims=True) + 1e-6)


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return scale * x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def feed_forward(x: jax.Array, params: Arrays) -> jax.Array:
    return jax.nn.gelu(x @ params["up"]) @ params["down"]


def split_heads(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:-1], -1, min(HEAD_WIDTH, x.shape[-1] // 2))


def join_heads(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:-2], -1)


def of_feed_forward(width: int) -> dict[str, tuple[int, ...]]:
    return {"up": (width, 4 * width), "down": (4 * width, width)}


def is_real(key: jax.Array, rows: int, size: int) -> jax.Array:
    """Booleans `[rows, size]`, False in the padding: the first row is full, others from a quarter of it on."""
    lengths = jax.random.randint(key, (rows,), size // 4, size + 1).at[0].set(size)
    return jnp.arange(size) < lengths[:, None]
