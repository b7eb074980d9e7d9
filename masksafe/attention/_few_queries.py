"""Attention of few queries to many keys, as in decoding: the form for a CPU.

Each key and value is used so rarely that reading it is the work. So one sample after another goes through its own live
blocks of keys, of which each is cut from the user's arrays and cleaned when its turn comes: what no query of a sample
sees is not even read, as the unused part of a cache of keys.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core import platforms
from masksafe._core.precision import widened
from masksafe._core.row_blocks import as_bits, from_bits
from masksafe._core.sharding import has_symbolic_size, may_loop
from masksafe._core.tiles import Tile, divide
from masksafe._core.typing import Array
from masksafe.attention._blockwise import RunningState, add_keys, divide_by_total, zero_state
from masksafe.attention._dropout import kept
from masksafe.attention._formulas import (
    Config,
    adjusted,
    capped_logits,
    finite_or_zero,
    if_bad,
    is_bad,
)
from masksafe.attention._heads import keys_by_problem, queries_by_problem, queries_by_user
from masksafe.attention._mask import Pairs, Problems, for_live_blocks, live_blocks, part, unmasked
from masksafe.attention._products import dot_keys, dot_values


def has_few_queries(q: Array, k: Array, pairs: Pairs) -> bool:
    """Whether this form is the best one on a CPU, for arrays in the user's layout."""
    if not may_loop((q, k, pairs)) or has_symbolic_size(q) or has_symbolic_size(k):
        return False
    if k.shape[0] == 1 and not jax.tree.leaves(pairs):  # both cores are faster on one block
        return False
    rows = q.shape[1] * q.shape[2] // k.shape[2]
    return rows <= platforms.FEW_QUERIES and k.shape[1] >= platforms.FEWEST_KEYS_OF_FEW_QUERIES


def attend_with_few_queries(config: Config, q: Array, k: Array, v: Array, pairs: Pairs) -> tuple[Array, Array, Array]:
    """The wide output, and the largest logit and the sum of exponentials `[B, T, N, 1]`, for arrays as the user's."""
    num_key_heads = k.shape[2]
    queries = divide(q.shape[1], q.shape[1])
    keys = divide(k.shape[1], max(1, platforms.KEY_BLOCK_ELEMENTS // max(1, num_key_heads * k.shape[3])))
    all_queries = queries.tile(0)
    key_bits, value_bits = as_bits(k), as_bits(v)

    def block(bits: Array, i: Array, tile: Tile) -> Array:
        """The keys or values `[1, K, size, n]` of a tile, wide."""
        x = part(bits, (i, tile.start, 0, 0), (1, tile.size, *bits.shape[2:]))
        return widened(keys_by_problem(from_bits(x, k.dtype)))

    def one_sample(i: Array) -> tuple[Array, Array, Array]:
        own = pairs.only(Problems(i, jnp.zeros_like(i), 1, num_key_heads))
        live = live_blocks(own, queries, keys)
        q_i = queries_by_problem(widened(lax.dynamic_slice_in_dim(q, i, 1)), num_key_heads)
        clean_q, bad_q = finite_or_zero(q_i) * config.scale, is_bad(q_i)

        def add_block(j: Any, carry: tuple[RunningState, Array]) -> tuple[RunningState, Array]:
            state, marks = carry
            tile = keys.tile(j)
            k_j, v_j = (block(bits, i, tile) for bits in (key_bits, value_bits))
            mask = unmasked(own, all_queries, tile)
            x = capped_logits(config, dot_keys(clean_q, finite_or_zero(k_j)), mask)
            x = adjusted(config, x, mask, own, all_queries, tile)
            x = jnp.where(bad_q | is_bad(k_j)[:, :, None, None, :, 0], jnp.nan, x)
            keep = kept(config, own, all_queries, tile)
            state = add_keys(config, state, x, mask, finite_or_zero(v_j), keep)
            return state, marks | _see_bad_values(x, mask, v_j)

        zero = zero_state(clean_q, *(jnp.zeros_like(block(bits, i, keys.tile(0))) for bits in (key_bits, value_bits)))
        nothing = jnp.zeros_like(zero.weighted, jnp.bool_)
        state, marks = for_live_blocks(None if live is None else live[0], keys.number, add_block, (zero, nothing))
        is_nan = jnp.concatenate([marks, jnp.zeros_like(marks[..., :1])], -1)
        return jax.tree.map(lambda x: x[0], divide_by_total(state, is_nan))  # type: ignore[no-any-return]

    out, largest, total = lax.map(one_sample, jnp.arange(k.shape[0], dtype=jnp.int32))
    return queries_by_user(out), queries_by_user(largest), queries_by_user(total)


def _see_bad_values(like: Array, mask: Array | None, v: Array) -> Array:
    """Where an output sees a bad value, `[B, K, G, T, width of v]`."""
    seen = jnp.ones_like(like) if mask is None else jnp.where(mask, jnp.ones_like(like), 0)
    return if_bad(v, lambda: dot_values(seen, ~jnp.isfinite(v)) > 0)
