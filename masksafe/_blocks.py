"""Working through the rows of an array in blocks that stay in a CPU's cache."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._typing import Array

# 1 MiB of float32, about a core's second-level cache. Between 2**17 and 2**20 the time of the
# cross-entropy hardly changes; smaller blocks pay for their number, larger ones leave the cache.
BLOCK_ELEMENTS = 2**18


def map_row_blocks(fn: Callable[..., Any], rows: Array, *others: Array | None) -> Any:
    """`fn(rows, *others)`, computed block by block on the CPU and in one pass elsewhere.

    XLA's CPU compiler writes an array that two reductions share, such as a 16-bit array widened to
    float32 or a masked one, to memory whole; in blocks it never leaves the cache. On a GPU the same
    reductions are fused, and a loop would only be in the way.

    Args:
      fn: a function that treats every row by itself; it returns a pytree of arrays `[..., k]` whose
        leading axes are those of `rows`.
      rows: shape `[..., n]`.
      *others: arrays `[..., m]` whose leading axes are those of `rows`, or all 1; or None.

    A loop over a dimension that is sharded across devices is refused by JAX, or makes XLA gather the
    array, so arrays with an explicit sharding take the one pass.
    """
    if not all(isinstance(n, int) for n in rows.shape) or is_sharded(rows):  # jax.export has symbolic sizes
        return fn(rows, *others)
    block = max(1, BLOCK_ELEMENTS // max(1, rows.shape[-1]))
    if math.prod(rows.shape[:-1]) <= 2 * block:
        return fn(rows, *others)

    def in_blocks(*arrays: Array | None) -> Any:
        return _map_blocks(fn, block, arrays)

    return lax.platform_dependent(rows, *others, cpu=in_blocks, default=fn)


def is_sharded(x: Array) -> bool:
    """Whether the type of `x` says that one of its dimensions is split across devices."""
    return any(axis is not None for axis in jax.typeof(x).sharding.spec)


def _map_blocks(fn: Callable[..., Any], block: int, arrays: tuple[Array | None, ...]) -> Any:
    leading = arrays[0].shape[:-1]  # type: ignore[union-attr]
    count = math.prod(leading)
    flat = [a if a is None else _as_bits(_flat_rows(a, leading)) for a in arrays]
    dtypes = [a if a is None else a.dtype for a in arrays]

    def one_block(start: Array) -> Any:
        return fn(*(_from_bits(_rows_from(a, start, block), d) for a, d in zip(flat, dtypes, strict=True)))

    # The last block is moved up to end with the last row; rows that it repeats are dropped again.
    starts = jnp.minimum(jnp.arange(0, count, block), count - block)
    repeated = len(starts) * block - count

    def join(blocks: Array) -> Array:
        body = blocks[:-1].reshape(-1, blocks.shape[-1])
        return jnp.concatenate([body, blocks[-1, repeated:]]).reshape(*leading, -1)

    return jax.tree.map(join, lax.map(one_block, starts))


def _flat_rows(a: Array, leading: tuple[int, ...]) -> Array:
    if math.prod(a.shape[:-1]) == 1:
        return a.reshape(1, -1)
    return jnp.broadcast_to(a, (*leading, a.shape[-1])).reshape(-1, a.shape[-1])


def _rows_from(a: Array | None, start: Array, block: int) -> Array | None:
    return a if a is None or a.shape[0] == 1 else lax.dynamic_slice_in_dim(a, start, block)


# XLA's CPU compiler slices no bfloat16: it would widen the whole array to float32 in front of the loop, the
# very copy that the blocks are to avoid. Integers of the same width it slices as they are.


def _as_bits(a: Array) -> Array:
    return lax.bitcast_convert_type(a, jnp.uint16) if a.dtype == jnp.bfloat16 else a


def _from_bits(a: Array | None, dtype: Any) -> Array | None:
    return lax.bitcast_convert_type(a, dtype) if a is not None and dtype == jnp.bfloat16 else a
