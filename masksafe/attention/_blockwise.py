"""Attention in blocks of queries and keys, with no array over all pairs in either pass: the form for a CPU.

The forward pass goes through the keys with a running maximum (Milakov and Gimelshein, "Online normalizer
calculation for softmax", 2018). The reverse pass does not use the logsumexp, whose rounding error would enter every
weight, but its two parts: the largest logit and the sum of exp(x - largest).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core import platforms
from masksafe._core.masks import selected
from masksafe._core.precision import widened
from masksafe._core.soft_cap import soft_capped
from masksafe._core.tiles import Tile, Tiles, divide, take
from masksafe._core.typing import Array
from masksafe.attention._dense import attend_densely, pull_back_densely
from masksafe.attention._dropout import drop, kept
from masksafe.attention._formulas import (
    Adjustments,
    Config,
    Gradients,
    add_adjustments,
    adjusted,
    adjusted_with_rule,
    capped_logits,
    finite_or_zero,
    has_bad,
    is_bad,
    nan_where,
    pull_back_cap,
    split_scale,
)
from masksafe.attention._mask import Pairs, for_live_blocks, live_blocks, once_if, unmasked
from masksafe.attention._mods import KEYS_FIRST
from masksafe.attention._products import (
    dot_keys,
    dot_pairs_with_keys,
    dot_pairs_with_queries,
    dot_queries,
    dot_queries_as_forward,
    dot_values,
    keys_first,
    queries_first,
)

# Forward.


def attend(config: Config, q: Array, k: Array, v: Array, pairs: Pairs) -> tuple[Array, Array, Array]:
    """The output `[B, K, G, T, width of v]`, the largest logit and the sum of exponentials, `[B, K, G, T, 1]`.

    All three are wide. For a query that sees no key the largest logit is -inf and the sum 1.
    """
    queries, keys = divide(q.shape[3], config.query_tile), divide(k.shape[2], config.key_tile)
    if config.skips and queries.number == 1 and (keys.number == 1 or q.shape[2] * q.shape[3] <= platforms.FEW_QUERIES):
        return attend_densely(config, q, k, v, pairs)
    q, k, v = widened(q), widened(k), widened(v)
    live = live_blocks(pairs, queries, keys) if config.skips else None
    before, after = split_scale(config, q)
    clean_q, clean_k, clean_v = finite_or_zero(q) * before, finite_or_zero(k), finite_or_zero(v)
    is_nan = _mark_bad_queries(q, k, v, pairs, queries, keys, live)

    def one_tile(i: Any) -> tuple[Array, Array, Array]:
        query_tile = queries.tile(i)
        q_i = take(clean_q, 3, query_tile)

        def add_tile(j: Any, state: RunningState) -> RunningState:
            key_tile = keys.tile(j)
            mask = unmasked(pairs, query_tile, key_tile)
            x = capped_logits(config, dot_keys(q_i, take(clean_k, 2, key_tile)) * after, mask)
            x = adjusted(config, x, mask, pairs, query_tile, key_tile)
            keep = kept(config, pairs, query_tile, key_tile)
            return add_keys(config, state, x, mask, take(clean_v, 2, key_tile), keep)

        live_tiles = None if live is None else live[i]
        state = for_live_blocks(live_tiles, keys.number, add_tile, zero_state(q_i, clean_k, clean_v))
        return divide_by_total(state, take(is_nan, 3, query_tile))

    # JAX differentiates the plain form: checkpoint, so that it recomputes each block instead of storing it.
    results: tuple[Array, Array, Array] = _map_tiles(queries, one_tile if config.skips else jax.checkpoint(one_tile))
    return results


class RunningState(NamedTuple):
    """A query tile's partial results after some of the keys; the sums are of exp(x - largest)."""

    largest: Array  # [B, K, G, queries, 1]
    total: Array  # [B, K, G, queries, 1]
    weighted: Array  # [B, K, G, queries, width of v]


def zero_state(q: Array, k: Array, v: Array) -> RunningState:
    # Made from a product, so that it has the sharding of the results of the loop that carries it.
    zero = jnp.zeros_like(dot_keys(q, k[:, :, :1]))
    return RunningState(zero - jnp.inf, zero, jnp.zeros_like(zero * v[:, :, None, :1].astype(zero.dtype)))


def add_keys(
    config: Config, state: RunningState, x: Array, mask: Array | None, v: Array, keep: Array | None
) -> RunningState:
    x = x if mask is None else jnp.where(mask, x, -jnp.inf)
    largest = jnp.maximum(state.largest, lax.stop_gradient(jnp.max(x, -1, keepdims=True)))
    shift = jnp.where(largest == -jnp.inf, 0, largest)
    exps, decay = jnp.exp(x - shift), jnp.exp(state.largest - shift)
    total = state.total * decay + jnp.sum(exps, -1, keepdims=True)
    weighted = state.weighted * decay + dot_values(drop(config, keep, exps), v)
    return RunningState(largest, total, weighted)


def divide_by_total(state: RunningState, is_nan: Array) -> tuple[Array, Array, Array]:
    is_dead = state.total == 0
    total = jnp.where(is_dead, 1, nan_where(is_nan[..., -1:], state.total))
    weighted = nan_where(is_nan[..., :-1] & ~is_dead, state.weighted)
    return weighted / total, jnp.where(is_dead, -jnp.inf, state.largest), total


# Reverse. A block of pairs is transposed here, `[B, K, keys, G, queries]`: two of the three products over it then need
# no transpose.


def pull_back(
    config: Config,
    by_query: tuple[Array, ...],
    by_key: tuple[Array, Array],
    pairs: Pairs,
    sums: Adjustments,
) -> Gradients:
    """The cotangents of queries, keys and values, wide, and `sums` plus those of the adjustments.

    Args:
      config: the static parameters.
      by_query: q, the cotangent of the output, the largest logit, the sum of exponentials, delta, and the cotangent
        of the logsumexp.
      by_key: k and v.
      pairs: what masks the pairs. Queries that are not live in it take no part.
      sums: the sums so far, over the problems solved before.
    """
    (q, d_out, largest, total, delta, d_lse), (k, v) = by_query, by_key
    queries, keys = divide(q.shape[3], config.query_tile), divide(k.shape[2], config.key_tile)
    if config.skips and queries.number == keys.number == 1:
        return pull_back_densely(config, by_query, by_key, pairs, sums)
    q, d_out, k, v = widened(q), widened(d_out), widened(k), widened(v)
    assert pairs.live_queries is not None
    live_queries = pairs.live_queries[..., None]
    live = live_blocks(pairs, queries, keys) if config.skips else None
    before, after = split_scale(config, q)
    clean_k, clean_v = finite_or_zero(k), finite_or_zero(v)
    reciprocal = 1 / jnp.where(jnp.isnan(total), 1, total)
    # Dividing by the sum per query is cheaper than per pair, but would round a 16-bit d_out once more.
    per_query, per_pair = (reciprocal, None) if d_out.dtype.itemsize >= 4 else (1, reciprocal)
    clean_queries = _Queries(
        q=finite_or_zero(q, live_queries) * before,
        d_out=finite_or_zero(d_out, live_queries) * per_query,
        shift=largest + 0 * total,  # NaN for a query that sees a bad element
        delta=delta * per_query,
        reciprocal=per_pair,
        all_weight=jnp.where(total == 1, 0.5, jnp.inf),
        d_lse=d_lse + 0 * delta,
    )
    is_nan = _mark_keys_of_bad_queries(d_out, clean_queries.q, clean_k, pairs, queries, keys, live)

    def one_tile(carry: tuple[Array, Adjustments], j: Any) -> tuple[tuple[Array, Adjustments], tuple[Array, Array]]:
        key_tile = keys.tile(j)
        k_j, v_j = take(clean_k, 2, key_tile), take(clean_v, 2, key_tile)

        def add_queries(i: Any, state: Gradients) -> Gradients:
            query_tile = queries.tile(i)
            block_queries = jax.tree.map(lambda a: take(a, 3, query_tile), clean_queries)
            weights, d_dots, d_biased, d_captured = _differentiate_block(
                config, block_queries, k_j, v_j, pairs, query_tile, key_tile
            )
            d_v = state.value + dot_pairs_with_queries(weights, block_queries.d_out)
            d_k = state.key + dot_pairs_with_queries(d_dots, block_queries.q)
            d_q = _add_to_tile(state.query, 3, dot_pairs_with_keys(d_dots, k_j), query_tile)
            tiles = query_tile, key_tile
            added = add_adjustments(state.adjustments, queries_first(d_biased), d_captured, pairs, *tiles)
            return Gradients(d_q, d_k, d_v, added)

        live_tiles = None if live is None else live[:, j]
        no_d_k, no_d_v = (jnp.zeros_like(a, total.dtype) for a in (k_j, v_j))
        state = Gradients(carry[0], no_d_k, no_d_v, carry[1])
        state = for_live_blocks(live_tiles, queries.number, add_queries, state)
        return (state.query, state.adjustments), (state.key, state.value)

    initial = (jnp.zeros_like(clean_queries.q, total.dtype), sums)
    if keys.number == 1:
        (d_q, sums), (d_k, d_v) = one_tile(initial, 0)
    else:
        (d_q, sums), key_gradients = lax.scan(one_tile, initial, jnp.arange(keys.number, dtype=jnp.int32))
        d_k, d_v = map(keys.join, key_gradients)
    return Gradients(d_q * config.scale, d_k * after, nan_where(is_nan, d_v), sums)


class _Queries(NamedTuple):
    """The reverse pass's arrays over queries, with 0 for bad elements."""

    q: Array
    d_out: Array  # divided by the sum of exponentials if `reciprocal` is None
    shift: Array  # the largest logit
    delta: Array  # divided as d_out is
    reciprocal: Array | None  # 1 / the sum of exponentials
    all_weight: Array  # a key whose exponential exceeds this has all of the weight
    d_lse: Array


def _differentiate_block(
    config: Config,
    by_query: _Queries,
    k: Array,
    v: Array,
    pairs: Pairs,
    query_tile: Tile,
    key_tile: Tile,
) -> tuple[Array, Array, Array, tuple[Array, ...]]:
    """A block's weights, the cotangents of its products q k and of these with the bias, keys first, and of captures."""
    dots = dot_queries_as_forward(k, by_query.q) * split_scale(config, by_query.q)[1]
    capped = soft_capped(dots, config.soft_cap)
    mask = unmasked(pairs, query_tile, key_tile)
    assert mask is not None  # live_queries is an array
    mask = keys_first(mask)
    x, pull_back_adjustments = adjusted_with_rule(capped, mask, pairs, query_tile, key_tile, KEYS_FIRST)
    keep = kept(config, pairs, query_tile, key_tile)
    keep = None if keep is None else keys_first(keep)

    p = jnp.exp(jnp.where(mask, x - keys_first(by_query.shift), -jnp.inf))
    if by_query.reciprocal is not None:
        p = p * keys_first(by_query.reciprocal)
    d_p = drop(config, keep, dot_queries_as_forward(v, by_query.d_out))
    d_x = p * (d_p - keys_first(by_query.delta))
    # The output is the value of a key that has all of the weight: there d_p - delta is d_lse plus rounding errors.
    d_x = jnp.where(p > keys_first(by_query.all_weight), keys_first(by_query.d_lse), d_x)
    d_x = jnp.where(mask, d_x, 0)  # the product with a masked value may overflow
    d_biased, d_captured = pull_back_adjustments(d_x)
    return drop(config, keep, p), pull_back_cap(config, d_biased, mask, capped), d_biased, d_captured


# Each call checks once whether any element is bad; only then does it find the pairs that see one.


def _mark_bad_queries(
    q: Array, k: Array, v: Array, pairs: Pairs, queries: Tiles, keys: Tiles, live: Array | None
) -> Array:
    """Where a query is bad or sees a bad element, `[B, K, G, T, width of v + 1]`.

    The last column stands for its sum of weights, the others for those of its output. For queries that see no key the
    marks are arbitrary.
    """

    def mark(query_tile: Tile, key_tile: Tile, marks: Array) -> Array:
        q_i, k_j, v_j = take(q, 3, query_tile), take(k, 2, key_tile), take(v, 2, key_tile)
        ones = jnp.ones_like(dot_keys(jnp.zeros_like(q_i), jnp.zeros_like(k_j)))
        seen = selected(ones, unmasked(pairs, query_tile, key_tile))
        found = dot_values(seen, jnp.concatenate([~jnp.isfinite(v_j), is_bad(k_j)], -1)) > 0
        from_queries = jnp.concatenate([jnp.zeros_like(found[..., :-1]), found[..., -1:] | is_bad(q_i)], -1)
        return _add_to_tile(marks, 3, found | from_queries, query_tile)

    no_q, no_k, no_v = map(jnp.zeros_like, (q, k[:, :, :1], v[:, :, :1]))  # checkify would report a NaN in the product
    like = dot_values(dot_keys(no_q, no_k), jnp.concatenate([no_v, no_k[..., :1]], -1))
    return _mark_by_block(mark, queries, keys, live, has_bad(q) | has_bad(k) | has_bad(v), like)


def _mark_keys_of_bad_queries(
    d_out: Array, q: Array, k: Array, pairs: Pairs, queries: Tiles, keys: Tiles, live: Array | None
) -> Array:
    """Where a key is seen by a query whose cotangent is bad, by column, `[B, K, S, width of v]`."""

    def mark(query_tile: Tile, key_tile: Tile, marks: Array) -> Array:
        ones = jnp.ones_like(dot_queries(take(k, 2, key_tile), take(q, 3, query_tile)))
        mask = unmasked(pairs, query_tile, key_tile)
        seen = selected(ones, None if mask is None else keys_first(mask))
        bad = ~jnp.isfinite(take(d_out, 3, query_tile))  # queries that are not live are masked
        return _add_to_tile(marks, 2, dot_pairs_with_queries(seen, bad) > 0, key_tile)

    like = dot_pairs_with_queries(dot_queries(k, q[:, :, :, :1]), jnp.zeros_like(d_out[:, :, :, :1]))
    return _mark_by_block(mark, queries, keys, live, has_bad(d_out), like)


def _mark_by_block(
    mark: Callable[[Tile, Tile, Array], Array],
    queries: Tiles,
    keys: Tiles,
    live: Array | None,
    is_needed: Array,
    like: Array,
) -> Array:
    """Marks of the shape of `like` from all live blocks in turn if they are needed; else all False."""

    def mark_block(n: Any, marks: Array) -> Array:
        return mark(queries.tile(n // keys.number), keys.tile(n % keys.number), marks)

    def mark_all(marks: Array) -> Array:
        flat = None if live is None else live.reshape(-1)
        marked: Array = for_live_blocks(flat, queries.number * keys.number, mark_block, marks)
        return marked

    marks: Array = once_if(is_needed, mark_all, jnp.zeros_like(like, jnp.bool_))
    return marks


def _map_tiles(tiles: Tiles, one_tile: Callable[[Any], Any]) -> Any:
    """The results of all tiles `[..., size, n]`, joined."""
    if tiles.number == 1:
        return one_tile(0)
    return jax.tree.map(tiles.join, lax.map(one_tile, jnp.arange(tiles.number, dtype=jnp.int32)))


def _add_to_tile(x: Array, axis: int, block: Array, tile: Tile) -> Array:
    if tile.size == x.shape[axis]:
        return x + block
    return lax.dynamic_update_slice_in_dim(x, take(x, axis, tile) + block, tile.start, axis)
