r"""The values of attention on a CPU as kernels of XLA's library: the textbook's softmax, with the contract around it.

XLA's CPU compiler makes one kernel of two products and the softmax between them, which writes only the output. It takes
no selection and no comparison into a kernel, and no NaN may enter one: so the operands are cleaned before, a mask is a
minimum with :math:`\infty` or the lowest number, and what is bad or empty is put into the results.

Blocks serve where enough of them may be masked as a whole, since a kernel goes through all keys of its queries; and
where a reverse pass in blocks follows, which wants the largest logits and the sums of the forward pass.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core import platforms
from masksafe._core.precision import wide_dtype, widened
from masksafe._core.sharding import may_loop, vary_with
from masksafe._core.soft_cap import soft_capped
from masksafe._core.tiles import Tile, once_if, take
from masksafe._core.typing import Array
from masksafe._core.unfolded import any_of
from masksafe._core.zeros import without_sign_of_zero
from masksafe.attention._block import (
    Plan,
    are_finite,
    finite_or_zero,
    keys_by_problem,
    queries_by_problem,
    queries_by_user,
    split_scale,
    times,
)
from masksafe.attention._blocks import is_one_block, tiles_of
from masksafe.attention._merge import Partial
from masksafe.attention._pairs import Block, Pairs, block_of
from masksafe.attention._rows import joined, seen_keys_of


def has_kernels(plan: Plan, q: Array, k: Array, pairs: Pairs) -> bool:
    """Whether the values of these arrays, in the user's layout, are computed in this way."""
    if plan.ring is not None or not platforms.choices().has_kernel_library:
        return False
    if plan.is_differentiated and not is_one_block(tiles_of(plan, q, k, pairs)):
        return False
    if not may_loop((q, k, pairs)) or not all(x is None for x in (pairs.score_mod, pairs.mask_mod, pairs.query_words)):
        return False
    sizes, rows, num_keys = plan.sizes, math.prod(q.shape[:3]), k.shape[1]
    arrays_over_pairs = [x.size for x in (pairs.allowed, pairs.bias) if x is not None]
    if rows < sizes.fewest_rows_of_kernels or max(arrays_over_pairs, default=0) > 2 * q.size:
        return False
    if num_keys > sizes.key_tile and rows < sizes.fewest_rows_of_one_kernel:
        return False
    return num_keys <= _most_keys(plan, pairs)


def _most_keys(plan: Plan, pairs: Pairs) -> float:
    """Up to how many keys blocks, which may be skipped, are not faster."""
    if not pairs.mask_any():
        return math.inf
    others = pairs.query_segments, pairs.end_position, pairs.allowed, pairs.bias
    is_static = plan.band is not None and all(x is None for x in others)
    is_of_all_samples = pairs.end_key is not None and pairs.end_key.shape[0] == 1  # and so depends on no length
    return plan.sizes.most_keys_of_kernels if is_static and is_of_all_samples else plan.sizes.key_tile - 1


def attend_in_kernels(plan: Plan, q: Array, k: Array, v: Array, pairs: Pairs) -> Partial:
    """The output `[B, T, N, width of v]`, and the logsumexp `[B, T, N, 1]` as the largest logit with the sum 1."""
    key_heads = k.shape[2]
    is_query_sound = queries_by_problem(are_finite(q), key_heads)
    is_key_sound = keys_by_problem(are_finite(k, v))
    if not (q.dtype == jnp.bfloat16 and k.shape[1] >= plan.sizes.fewest_keys_of_bfloat16):
        q, k, v = map(widened, (q, k, v))
    factor, factor_of_logits = split_scale(plan, q)
    queries = _bounded(queries_by_problem(q, key_heads), factor)
    keys = jnp.moveaxis(_bounded(k), 1, 3)
    values = keys_by_problem(finite_or_zero(v))

    def logits(queries: Array, keys: Array, block: Block) -> Array:
        x = soft_capped(times(_dot(queries, keys), factor_of_logits), plan.soft_cap)
        if block.bias is not None:
            x = x + finite_or_zero(block.bias.astype(x.dtype))
        if block.mask is None:
            return x
        return jnp.minimum(x, jnp.where(block.mask, jnp.inf, float(jnp.finfo(x.dtype).min)).astype(x.dtype))

    def one_tile(start: int) -> tuple[Array, Array]:
        tile = Tile(start, min(size, q.shape[1] - start), start, False)
        seen = seen_keys_of(plan, start, tile.size, k.shape[1])
        block = block_of(pairs, tile, seen)
        x = logits(take(queries, 3, tile), take(keys, 3, seen), block)
        out = _dot(jax.nn.softmax(x), take(values, 2, seen))
        if plan.needs_logsumexp:
            # XLA would else write the logits to memory, for both of their users.
            held = lax.optimization_barrier((queries, keys))
            x = logits(take(held[0], 3, tile), take(held[1], 3, seen), block)
            lse = jax.nn.logsumexp(x, -1, keepdims=True)
        else:
            lse = jnp.zeros_like(out[..., :1])
        is_bad = _sees_bad(block, take(is_query_sound, 3, tile), take(is_key_sound, 2, seen))
        out, lse = (jnp.where(is_bad, jnp.nan, x) for x in (out, lse))
        if block.mask is None:
            return out, lse
        sees_any = any_of(block.mask, -1, keepdims=True)
        return jnp.where(sees_any, out, 0), jnp.where(sees_any, lse, -jnp.inf)

    size = _queries_of_tile(plan, q)
    tiles = map(one_tile, range(0, q.shape[1], size))
    out, lse = (queries_by_user(joined(parts)) for parts in zip(*tiles, strict=True))
    return Partial(out, lse, jnp.ones_like(lse))


def _queries_of_tile(plan: Plan, q: Array) -> int:
    """All, or fewer if a static mask hides keys from a tile."""
    batch, number, heads, _ = q.shape
    least = max(plan.sizes.fewest_queries_of_kernels, -(-plan.sizes.fewest_rows_of_one_kernel // (batch * heads)))
    return number if plan.band is None else -(-number // max(1, number // least))


def _bounded(x: Array, factor: float = 1.0) -> Array:
    """With 0 for bad elements, times the factor, and so small that a product of two rows is finite."""
    most = math.sqrt(float(jnp.finfo(wide_dtype(x.dtype)).max)) / (2 * math.sqrt(x.shape[-1]))
    return jnp.clip(times(finite_or_zero(x), factor), -most, most)


def _dot(a: Array, b: Array) -> Array:
    """The products `[B, K, G, T, n]` of arrays `[B, K, G, T, m]` with those of their key heads, `[B, K, m, n]`.

    A matrix with the rows of all query heads of a key head would be slower: the library then has to reshape logits.
    """
    of_query_heads = jnp.broadcast_to(b[:, :, None], (*a.shape[:3], *b.shape[2:]))
    dimensions, wide = (((4,), (3,)), ((0, 1, 2), (0, 1, 2))), wide_dtype(b.dtype)
    product = lax.dot_general(a.astype(b.dtype), of_query_heads, dimensions, preferred_element_type=wide)
    return without_sign_of_zero(product) if 1 in (*a.shape[3:], b.shape[3]) else product


def _sees_bad(block: Block, is_query_sound: Array, is_key_sound: Array) -> Array:
    """Which queries are bad, or see a bad key, value or bias `[B, K, G, T, 1]`; the pairs are looked at if any is."""
    is_bad_pair = ~is_key_sound[:, :, None, None, :, 0]
    if block.bias is not None:
        is_bad_pair = is_bad_pair | ~jnp.isfinite(block.bias)

    def add(is_bad: Array) -> Array:
        seen = is_bad_pair if block.mask is None else is_bad_pair & block.mask
        return is_bad | any_of(seen, -1, keepdims=True)

    is_bad = vary_with(~is_query_sound, (block, is_key_sound))
    return once_if(any_of(is_bad_pair), add, is_bad)
