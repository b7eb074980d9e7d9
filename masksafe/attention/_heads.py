"""From arrays in the user's layout to the problems that a kernel solves, all at once or in turn.

A problem is the work of one key head of one sample. An accelerator wants all problems in one large product. On a CPU,
large problems are solved in turn: their blocks stay in the cache, and each problem skips the blocks that its own mask
excludes, not only those that the masks of all problems exclude.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core import platforms
from masksafe._core.precision import widened
from masksafe._core.sharding import may_loop
from masksafe._core.typing import Array
from masksafe.attention._mask import Pairs, part

Arrays = tuple[Array, ...]
Results = tuple[Arrays, Arrays, Any]  # by query, by key, the carry
Kernel = Callable[[Arrays, Arrays, Pairs, Any], Results]


def run_by_problem(kernel: Kernel, query_arrays: Arrays, key_arrays: Arrays, pairs: Pairs, carry: Any) -> Results:
    """Runs `kernel` on arrays in the user's layout and returns its results in that layout.

    Args:
      kernel: a function of arrays by query `[B, K, G, T, n]`, arrays by key `[B, K, S, n]`, pairs and a carry, which
        returns arrays by query, arrays by key and the carry. Problems solved in turn hand the carry on.
      query_arrays: arrays `[B, T, N, n]`.
      key_arrays: arrays `[B, S, K, n]`.
      pairs: what masks the pairs.
      carry: a pytree, for sums over problems.
    """
    q, k = query_arrays[0], key_arrays[0]
    args = query_arrays, key_arrays, pairs, carry

    def at_once(*args: Any) -> Results:
        return _run_at_once(kernel, *args)

    def at_once_widened(query_arrays: Arrays, key_arrays: Arrays, *rest: Any) -> Results:
        return at_once(_widen(query_arrays), _widen(key_arrays), *rest)

    def in_turn(*args: Any) -> Results:
        return _run_in_turn(kernel, *args)

    if not may_loop(args):
        return at_once(*args)
    num_problems, logits = k.shape[0] * k.shape[2], math.prod(q.shape[:3]) * k.shape[1]
    is_large = num_problems > 1 and logits >= max(
        platforms.IN_TURN_LOGITS_OF_ALL, num_problems * platforms.IN_TURN_LOGITS_OF_ONE
    )
    if not is_large and q.dtype.itemsize >= 4:
        return at_once(*args)
    on_cpu = in_turn if is_large else at_once_widened
    results: Results = platforms.on_cpu_or_elsewhere(on_cpu, at_once, *args)
    return results


def _run_at_once(kernel: Kernel, query_arrays: Arrays, key_arrays: Arrays, pairs: Pairs, carry: Any) -> Results:
    num_key_heads = key_arrays[0].shape[2]
    by_query = tuple(queries_by_problem(x, num_key_heads) for x in query_arrays)
    by_key = tuple(keys_by_problem(x) for x in key_arrays)
    by_query, by_key, carry = kernel(by_query, by_key, pairs, carry)
    return tuple(map(queries_by_user, by_query)), tuple(map(keys_by_user, by_key)), carry


def _run_in_turn(kernel: Kernel, query_arrays: Arrays, key_arrays: Arrays, pairs: Pairs, carry: Any) -> Results:
    batch, _, num_key_heads, _ = key_arrays[0].shape
    group = query_arrays[0].shape[2] // num_key_heads

    def cut_heads(x: Array, sample: Array, head: Array, heads: int) -> Array:
        return part(x, (sample, 0, head * heads, 0), (1, x.shape[1], heads, x.shape[3]))

    def solve(carry: Any, n: Array) -> tuple[Any, tuple[Arrays, Arrays]]:
        sample, head = n // num_key_heads, n % num_key_heads
        by_query = tuple(queries_by_problem(cut_heads(x, sample, head, group), 1) for x in query_arrays)
        by_key = tuple(keys_by_problem(cut_heads(x, sample, head, 1)) for x in key_arrays)
        by_query, by_key, carry = kernel(_widen(by_query), _widen(by_key), pairs.only(sample, head), carry)
        return carry, (by_query, by_key)

    def unstack(x: Array) -> Array:  # [problems, 1, 1, ...] to [B, K, ...]
        return x.reshape(batch, num_key_heads, *x.shape[3:])

    carry, results = lax.scan(solve, carry, jnp.arange(batch * num_key_heads, dtype=jnp.int32))
    by_query, by_key = jax.tree.map(unstack, results)
    return tuple(map(queries_by_user, by_query)), tuple(map(keys_by_user, by_key)), carry


def queries_by_problem(x: Array, num_key_heads: int) -> Array:
    """`[B, T, N, n]` to `[B, K, G, T, n]`."""
    return jnp.moveaxis(x.reshape(*x.shape[:2], num_key_heads, x.shape[2] // num_key_heads, x.shape[3]), 1, 3)


def queries_by_user(x: Array) -> Array:
    """`[B, K, G, T, n]` to `[B, T, N, n]`."""
    x = jnp.moveaxis(x, 3, 1)
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], x.shape[4])


def grouped_heads(x: Array, num_key_heads: int) -> Array:
    """An array over pairs, `[..., N or 1, T, S]` to `[..., K, G, T, S]` with size 1 where it broadcasts."""
    heads = (1, 1) if x.shape[-3] == 1 else (num_key_heads, x.shape[-3] // num_key_heads)
    return x.reshape(*x.shape[:-3], *heads, *x.shape[-2:])


def keys_by_problem(x: Array) -> Array:
    """`[B, S, K, n]` to `[B, K, S, n]`."""
    return jnp.moveaxis(x, 1, 2)


def keys_by_user(x: Array) -> Array:
    """`[B, K, S, n]` to `[B, S, K, n]`."""
    return jnp.moveaxis(x, 2, 1)


def _widen(arrays: Arrays) -> Arrays:
    return tuple(map(widened, arrays))
