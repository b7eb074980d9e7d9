"""Attention in blocks of queries and keys, with no array over all pairs in either pass: the schedule for a CPU.

The forward pass goes through the keys with a running maximum (Milakov and Gimelshein, "Online normalizer
calculation for softmax", 2018). The reverse pass does not use the logsumexp, whose rounding error would enter every
weight, but its two parts: the largest logit and the sum of exp(x - largest).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core.tiles import Tile, Tiles, add_to_part, divide, element, for_live_tiles, take
from masksafe._core.typing import Array
from masksafe.attention import _block
from masksafe.attention._block import Adjustments, Cotangents, Gradients, Keys, Plan, Queries
from masksafe.attention._merge import Partial
from masksafe.attention._pairs import Pairs, block_of, live_blocks


def tiles_of(plan: Plan, q: Array, k: Array, pairs: Pairs) -> tuple[Tiles, Tiles]:
    """The tiles of the queries `[B, T, N, H]` and of the keys `[B, S, K, H]`."""
    sizes, (_, num_queries, heads, _), (_, num_keys, key_heads, _) = plan.sizes, q.shape, k.shape
    group = heads // key_heads
    of_queries = divide(num_queries, max(sizes.fewest_queries, sizes.query_tile // max(1, group)))
    if pairs.mask_any():
        return of_queries, divide(num_keys, sizes.key_tile)
    if isinstance(num_queries, int) and group * num_queries <= sizes.few_queries:
        return of_queries, divide(num_keys, num_keys)
    return of_queries, divide(num_keys, sizes.key_tile_if_nothing_is_skipped)


def is_one_block(tiles: tuple[Tiles, Tiles]) -> bool:
    return tiles[0].number == tiles[1].number == 1


def attend_in_blocks(
    plan: Plan, queries: Queries, keys_of: Callable[[Tile], Keys], pairs: Pairs, width: int, tiles: tuple[Tiles, Tiles]
) -> Partial:
    """The results of all keys, of which `keys_of` gives those of a tile; a query that sees no key has the sum 1."""
    of_queries, of_keys = tiles
    live = None if plan.is_plain else live_blocks(pairs, of_queries, of_keys)

    def one_tile(i: Any) -> Partial:
        query_tile = of_queries.tile(i)
        tile_queries = take(queries, 3, query_tile)

        def add_keys(j: Any, state: Partial) -> Partial:
            key_tile = of_keys.tile(j)
            block = block_of(pairs, query_tile, key_tile, plan.dropout_rate)
            return state.plus(_block.attend_to_block(plan, tile_queries, keys_of(key_tile), block))

        nothing = Partial.nothing(tile_queries.q[..., :1], width)
        live_tiles = None if live is None else element(live, i)
        return Partial(*for_live_tiles(live_tiles, of_keys.number, add_keys, nothing)).divided()

    # JAX differentiates the plain form: checkpoint, so that it recomputes each block instead of storing it.
    return Partial(*of_queries.join_map(jax.checkpoint(one_tile) if plan.is_plain else one_tile))


def pull_back_in_blocks(
    plan: Plan, queries: Cotangents, keys: Keys, pairs: Pairs, sums: Adjustments, tiles: tuple[Tiles, Tiles]
) -> Gradients:
    """The cotangents of queries, keys and values, wide, and `sums` plus those of the adjustments."""
    of_queries, of_keys = tiles
    live = None if plan.is_plain else live_blocks(pairs, of_queries, of_keys)

    def one_tile(carry: tuple[Array, Adjustments], j: Any) -> tuple[tuple[Array, Adjustments], tuple[Array, Array]]:
        key_tile = of_keys.tile(j)
        tile_keys = take(keys, 2, key_tile)

        def add_queries(i: Any, state: Gradients) -> Gradients:
            query_tile = of_queries.tile(i)
            block, part = block_of(pairs, query_tile, key_tile, plan.dropout_rate), take(queries, 3, query_tile)
            d = _block.pull_back_block(plan, part, tile_keys, block)
            d_q = _block.dot_values(d.d_dots, tile_keys.k)
            # Transposed, `[B, K, H, keys]`: else the blocks of pairs would be transposed for the products.
            return Gradients(
                add_to_part(state.query, d_q, {3: (query_tile.start, query_tile.size)}),
                state.key + _block.dot_queries_of_rows(part.q, d.d_dots),
                state.value + _block.dot_queries_of_rows(part.d_out, d.weights),
                state.adjustments.plus(d.d_biased, d.d_captured, block.places),
            )

        transposed = jnp.swapaxes(tile_keys.k, 2, 3), jnp.swapaxes(tile_keys.v, 2, 3)
        no_d_k, no_d_v = (jnp.zeros_like(x, queries.d_lse.dtype) for x in transposed)
        state = Gradients(carry[0], no_d_k, no_d_v, carry[1])
        state = for_live_tiles(None if live is None else element(live, j, 1), of_queries.number, add_queries, state)
        return (state.query, state.adjustments), (jnp.swapaxes(state.key, 2, 3), jnp.swapaxes(state.value, 2, 3))

    carry = jnp.zeros_like(queries.q, queries.d_lse.dtype), sums
    if of_keys.number == 1:
        (d_q, sums), (d_k, d_v) = one_tile(carry, 0)
    else:
        (d_q, sums), of_tiles = lax.scan(one_tile, carry, jnp.arange(of_keys.number, dtype=jnp.int32))
        d_k, d_v = map(of_keys.join, of_tiles)
    d_k = _block.times(d_k, _block.split_scale(plan, queries.q)[1])
    return Gradients(_block.times(d_q, plan.scale), d_k, d_v, sums)
