"""The order of time in which causal attention is the same work for all devices."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from masksafe._core.arguments import as_array, as_size, canonical_axes, message
from masksafe._core.public_op import public_op
from masksafe._core.sharding import gathered_along
from masksafe._core.typing import Array, ArrayLike


@public_op
def zigzag(x: ArrayLike, shards: int, *, axis: int = 1) -> Array:
    """Time in zigzag order, in which each of its shards has as many causal pairs as any other.

    Time is cut into `2 * shards` chunks, of which shard i gets the chunks i and `2 * shards - 1 - i`: one from the
    beginning, whose queries see few keys, and one from the end, whose queries see many. In the usual order the last
    shard has nearly all the work, and the others wait for it.

    Args:
      x: an array whose size along `axis` is a multiple of `2 * shards`: tokens, labels, positions, segments.
      shards: the number of devices over which time is going to be split.
      axis: the axis of time.

    Returns:
      An array of the same shape and dtype, of NumPy for one of NumPy; `undo_zigzag` brings the order back. An array
      that an explicit mesh splits along `axis` is gathered.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> print(masksafe.zigzag(jnp.arange(8), 2, axis=0))
      [0 1 6 7 2 3 4 5]

      These are also the positions to pass to attention, split along time like the rest:

      >>> T = 16
      >>> query_positions = masksafe.zigzag(jnp.arange(T), 4, axis=0)
      >>> print(query_positions.reshape(4, -1))
      [[ 0  1 14 15]
       [ 2  3 12 13]
       [ 4  5 10 11]
       [ 6  7  8  9]]

    References:
      The context parallelism of `Dubey et al., The Llama 3 Herd of Models, 2024 <https://arxiv.org/abs/2407.21783>`_,
      section 3.3.2. `Brandon et al., Striped Attention, 2023 <https://arxiv.org/abs/2311.09431>`_, balance causal work
      with stripes instead of chunks.
    """
    return _reordered("zigzag", x, shards, axis, undo=False)


@public_op
def undo_zigzag(x: ArrayLike, shards: int, *, axis: int = 1) -> Array:
    """The inverse of `zigzag`.

    Args:
      x: an array whose size along `axis` is a multiple of `2 * shards`.
      shards: the number that `zigzag` got.
      axis: the axis of time.

    Returns:
      An array of the same shape and dtype, as from `zigzag`.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> print(masksafe.undo_zigzag(masksafe.zigzag(jnp.arange(8), 2, axis=0), 2, axis=0))
      [0 1 2 3 4 5 6 7]
    """
    return _reordered("undo_zigzag", x, shards, axis, undo=True)


def _reordered(op: str, x: ArrayLike, shards: int, axis: int, *, undo: bool) -> Array:
    # An array of NumPy stays on the host, so that JAX does not narrow its 64 bits.
    xp: Any = np if isinstance(x, np.ndarray) else jnp
    array: Any = x if isinstance(x, np.ndarray) else as_array(op, "x", x)
    (axis,) = canonical_axes(op, axis, array.ndim)
    shards, size = as_size(op, "shards", shards, 1), array.shape[axis]
    if size % (2 * shards):
        expected = f"a multiple of {2 * shards}, twice the number of shards, along axis {axis}"
        raise ValueError(message(op, "x", f"shape {array.shape}", expected, "Pad it, and mask the padding."))
    array = array if xp is np else gathered_along(array, axis)
    outer, inner, chunk = array.shape[:axis], array.shape[axis + 1 :], size // (2 * shards)
    numbers, halves_at = ((shards, 2), axis + 1) if undo else ((2, shards), axis)
    halves = xp.split(array.reshape(*outer, *numbers, chunk, *inner), 2, halves_at)
    early, late = (xp.squeeze(half, halves_at) for half in halves)
    both = [early, xp.flip(late, axis)]
    ordered: Array = xp.concatenate(both, axis) if undo else xp.stack(both, axis + 1)
    return ordered.reshape(array.shape)
