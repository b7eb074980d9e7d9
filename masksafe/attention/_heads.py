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
from masksafe._core.sharding import may_loop
from masksafe._core.typing import Array
from masksafe.attention._mask import Pairs, Problems, part

Arrays = tuple[Array, ...]
Results = tuple[Arrays, Arrays, Any]  # by query, by key, the carry
Kernel = Callable[[Arrays, Arrays, Pairs, Any], Results]


def run_on_cpu(
    kernel: Kernel, query_arrays: Arrays, key_arrays: Arrays, pairs: Pairs, carry: Any, most_logits: int | None = None
) -> Results:
    """Runs `kernel` on arrays in the user's layout and returns its results in that layout.

    Args:
      kernel: a function of arrays by query `[B, K, G, T, n]`, arrays by key `[B, K, S, n]`, pairs and a carry, which
        returns arrays by query, arrays by key and the carry. Problems solved in turn hand the carry on.
      query_arrays: arrays `[B, T, N, n]`.
      key_arrays: arrays `[B, S, K, n]`.
      pairs: what masks the pairs.
      carry: a pytree, for sums over problems.
      most_logits: how many logits samples that are worked on at once should have together; None means any number.
    """
    q, k = query_arrays[0], key_arrays[0]
    if not may_loop((query_arrays, key_arrays, pairs, carry)):
        return _run_at_once(kernel, query_arrays, key_arrays, pairs, carry)
    args = query_arrays, key_arrays, pairs, carry
    num_problems, logits = k.shape[0] * k.shape[2], _number_of_logits(q, k)
    if num_problems == 1 or logits < platforms.IN_TURN_LOGITS_OF_ALL:
        return _run_at_once(kernel, *args)
    if logits >= num_problems * platforms.IN_TURN_LOGITS_OF_ONE:
        return _run_in_turn(kernel, *args)
    if most_logits is None or logits <= most_logits:
        return _run_at_once(kernel, *args)
    samples = _largest_divisor(k.shape[0], k.shape[0] * most_logits // logits)
    return _run_in_turn(kernel, *args, samples=samples, heads=k.shape[2])


def run_elsewhere(
    kernel: Kernel, query_arrays: Arrays, key_arrays: Arrays, pairs: Pairs, carry: Any, most_logits: int
) -> Results:
    """As `run_on_cpu`, with as many problems at once as have `most_logits` logits together, or one."""
    args = query_arrays, key_arrays, pairs, carry
    if not may_loop(args):
        return _run_at_once(kernel, *args)
    q, k = query_arrays[0], key_arrays[0]
    batch, _, num_key_heads, _ = k.shape
    most = most_logits * batch * num_key_heads // max(1, _number_of_logits(q, k))
    samples = _largest_divisor(batch, most // num_key_heads)
    heads = num_key_heads if most >= num_key_heads else _largest_divisor(num_key_heads, most)
    if (samples, heads) == (batch, num_key_heads):
        return _run_at_once(kernel, *args)
    # Two steps in a body save launches; with more of them XLA would keep the logits of all.
    return _run_in_turn(kernel, *args, samples=samples, heads=heads, unroll=2)


def _number_of_logits(q: Array, k: Array) -> int:
    return math.prod(q.shape[:3]) * k.shape[1]


def _largest_divisor(n: int, most: int) -> int:
    """The largest divisor of `n` up to `most`, at least 1."""
    return max((d for d in range(1, min(n, most) + 1) if n % d == 0), default=1)


def _run_at_once(kernel: Kernel, query_arrays: Arrays, key_arrays: Arrays, pairs: Pairs, carry: Any) -> Results:
    num_key_heads = key_arrays[0].shape[2]
    by_query = tuple(queries_by_problem(x, num_key_heads) for x in query_arrays)
    by_key = tuple(keys_by_problem(x) for x in key_arrays)
    by_query, by_key, carry = kernel(by_query, by_key, pairs, carry)
    return tuple(map(queries_by_user, by_query)), tuple(map(keys_by_user, by_key)), carry


def _run_in_turn(
    kernel: Kernel,
    query_arrays: Arrays,
    key_arrays: Arrays,
    pairs: Pairs,
    carry: Any,
    *,
    samples: int = 1,
    heads: int = 1,
    unroll: int = 1,
) -> Results:
    """Solves the problems of so many samples and key heads at a time; `unroll` is that of `lax.scan`."""
    batch, _, num_key_heads, _ = key_arrays[0].shape
    group = query_arrays[0].shape[2] // num_key_heads
    steps_of_heads = num_key_heads // heads

    def cut_problems(x: Array, problems: Problems, group: int) -> Array:
        starts = (problems.sample, 0, problems.head * group, 0)
        return part(x, starts, (samples, x.shape[1], heads * group, x.shape[3]))

    def solve(carry: Any, n: Array) -> tuple[Any, tuple[Arrays, Arrays]]:
        problems = Problems(n // steps_of_heads * samples, n % steps_of_heads * heads, samples, heads)
        by_query = tuple(queries_by_problem(cut_problems(x, problems, group), heads) for x in query_arrays)
        by_key = tuple(keys_by_problem(cut_problems(x, problems, 1)) for x in key_arrays)
        by_query, by_key, carry = kernel(by_query, by_key, pairs.only(problems), carry)
        return carry, (by_query, by_key)

    def unstack(x: Array) -> Array:  # [steps, samples, heads, ...] to [B, K, ...], since either number is 1 or all
        return x.reshape(batch, num_key_heads, *x.shape[3:])

    numbers = jnp.arange(batch * num_key_heads // (samples * heads), dtype=jnp.int32)
    carry, results = lax.scan(solve, carry, numbers, unroll=unroll)
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
