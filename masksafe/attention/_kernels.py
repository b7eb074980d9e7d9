r"""The values of attention on a CPU as kernels of XLA's library: the textbook's softmax, with the contract around it.

XLA's CPU compiler makes one kernel of two products and the softmax between them, which writes only the output. It takes
no selection and no comparison into a kernel, and no NaN may enter one: so the operands are cleaned before, a mask is a
minimum with :math:`\pm\infty`, and what is bad or empty is put into the results.

Blocks serve where enough of them may be masked as a whole, since a kernel goes through all keys of its queries; and
where a reverse pass in blocks follows, which wants the largest logits and the sums of the forward pass.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core import platforms
from masksafe._core.linear import without_sign_of_zero
from masksafe._core.precision import wide_dtype, widened
from masksafe._core.sharding import may_loop, vary_with
from masksafe._core.soft_cap import soft_capped
from masksafe._core.tiles import Tile, once_if, take, whole
from masksafe._core.typing import Array
from masksafe._core.unfolded import any_of
from masksafe.attention import _block
from masksafe.attention._block import Plan
from masksafe.attention._blocks import is_one_block, tiles_of
from masksafe.attention._merge import Partial
from masksafe.attention._pairs import OVER_PAIRS, Block, Pairs, block_of, cut
from masksafe.attention._rows import joined, parts_with_keys

_MASKS_OF_VALUES = "query_segments", "end_position", "allowed", "bias"


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
    # Up to how many keys blocks, which may be skipped, are not faster.
    is_static = plan.band is not None and all(getattr(pairs, name) is None for name in _MASKS_OF_VALUES)
    if is_static and pairs.end_key is not None and pairs.end_key.shape[0] == 1:  # with lengths it has those of samples
        return num_keys <= sizes.most_keys_of_kernels
    return num_keys < sizes.key_tile or not pairs.mask_any()


def attend_in_kernels(plan: Plan, q: Array, k: Array, v: Array, pairs: Pairs) -> Partial:
    """The output `[B, T, N, width of v]`; if needed, the logsumexp `[B, T, N, 1]` as largest logit, with the sum 1."""
    (batch, num_queries, heads, _), (_, num_keys, key_heads, _) = q.shape, k.shape
    are_bounded = _block.are_bounded(q, plan.scale), _block.are_bounded(k), _block.are_bounded(v)
    are_sound = [jnp.all(x, -1, keepdims=True) for x in are_bounded]
    if not (q.dtype == jnp.bfloat16 and num_keys >= plan.sizes.fewest_keys_of_bfloat16):
        q, k, v = map(widened, (q, k, v))
    factor, factor_of_logits = _block.split_scale(plan, q)
    q, k, v = (jnp.where(is_bounded, x, x.dtype.type(0)) for is_bounded, x in zip(are_bounded, (q, k, v), strict=True))
    queries = _block.times(_block.queries_by_problem(q, key_heads), factor)
    keys, values = jnp.moveaxis(k, 1, 3), _block.keys_by_problem(v)
    block, limit, wide = block_of(pairs, whole(num_queries), whole(num_keys)), None, jnp.finfo(wide_dtype(q.dtype))
    if block.mask is not None:
        sees_any = any_of(block.mask, -1, keepdims=True)
        # A query that sees no key is computed as if it saw all.
        limit = jnp.where(block.mask | ~sees_any, wide.dtype.type(jnp.inf), wide.dtype.type(-jnp.inf))
    # All queries, or fewer if a static mask hides keys from a tile.
    least = max(plan.sizes.fewest_queries_of_kernels, -(-plan.sizes.fewest_rows_of_one_kernel // (batch * heads)))
    size = num_queries if plan.band is None else -(-num_queries // max(1, num_queries // least))

    def by_tile(of_logits: Callable[[Array, Tile], Array], queries: Array, keys: Array) -> Array:
        """What `of_logits` makes of the logits of each tile of queries and of the keys that it sees."""
        results = []
        for tile, seen in parts_with_keys(plan, num_queries, size, num_keys):
            places = {"t": (tile.start, tile.size), "s": (seen.start, seen.size)}
            x = _dot(take(queries, 3, tile), take(keys, 3, seen))
            x = soft_capped(_block.times(x, factor_of_logits), plan.soft_cap)
            if block.bias is not None:
                bias = cut(block.bias, OVER_PAIRS, places).astype(x.dtype)
                x = x + jnp.where(jnp.isfinite(bias), bias, 0)
                x = jnp.maximum(x, float(wide.min))  # -inf is masked
            results.append(of_logits(x if limit is None else jnp.minimum(x, cut(limit, OVER_PAIRS, places)), seen))
        return _block.queries_by_user(joined(results))

    is_query_sound = _block.queries_by_problem(are_sound[0], key_heads)
    is_bad = _block.queries_by_user(
        _sees_bad(block, is_query_sound, _block.keys_by_problem(are_sound[1] & are_sound[2]))
    )

    def with_bad_and_empty(x: Array, empty: float) -> Array:
        x = jnp.where(is_bad, x.dtype.type(jnp.nan), x)
        return x if block.mask is None else jnp.where(_block.queries_by_user(sees_any), x, x.dtype.type(empty))

    out = by_tile(lambda x, seen: _dot(jax.nn.softmax(x), take(values, 2, seen)), queries, keys)
    out = with_bad_and_empty(out, 0.0)
    lse = jnp.zeros_like(out[..., :1])
    if plan.needs_logsumexp:
        # XLA would else write the logits to memory, for both of their users.
        held = lax.optimization_barrier((queries, keys))
        lse = with_bad_and_empty(by_tile(lambda x, _: jax.nn.logsumexp(x, -1, keepdims=True), *held), -jnp.inf)
    return Partial(out, lse, jnp.ones_like(lse))


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
