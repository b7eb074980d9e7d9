r"""Attention in blocks of queries and keys: no array over all pairs, neither forward nor in reverse.

With queries :math:`q_t`, keys :math:`k_s`, values :math:`v_s`, the logits :math:`x_{ts} = q_t \cdot k_s` (scaled,
capped, with their bias) and sums over unmasked pairs only,

.. math::
  \lambda_t = \log \sum_s e^{x_{ts}}, \qquad p_{ts} = e^{x_{ts} - \lambda_t}, \qquad o_t = \sum_s p_{ts} v_s

and with cotangents :math:`\dot o_t` of the output and :math:`\dot \lambda_t` of the logsumexp

.. math::
  \delta_t = o_t \cdot \dot o_t - \dot \lambda_t, \qquad \dot x_{ts} = p_{ts} (v_s \cdot \dot o_t - \delta_t), \qquad
  \dot q_t = \sum_s \dot x_{ts} k_s, \qquad \dot k_s = \sum_t \dot x_{ts} q_t, \qquad \dot v_s = \sum_t p_{ts} \dot o_t.

The forward pass goes through the keys with a running maximum (Milakov and Gimelshein, "Online normalizer
calculation for softmax", 2018); the reverse pass computes :math:`p` again (Dao, "FlashAttention-2", 2023). Not from
:math:`\lambda`, whose rounding error would be one of every :math:`p`, but from its two parts, the largest logit and the
sum of :math:`e^{x_{ts} - \max_s x_{ts}}`.

Every product contracts over masked pairs too, with weight 0, and 0 times NaN is NaN. So what is not finite is
replaced by 0 in all that is contracted, and the few results that do depend on it are made NaN afterwards.

Arrays are laid out by problem, which is what one key head of one sample has to do: queries and outputs
`[B, K, G, T, H]` for the G query heads that share a key head, keys and values `[B, K, S, H]`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core.masks import selected
from masksafe._core.soft_cap import pulled_back, soft_capped
from masksafe._core.tiles import Tile, Tiles, divide, take
from masksafe._core.typing import Array
from masksafe.attention._mask import Pairs, add_to_block, cut, for_live_blocks, live_blocks, once_if, unmasked
from masksafe.attention._products import (
    dot_keys,
    dot_pairs_with_keys,
    dot_pairs_with_queries,
    dot_queries,
    dot_queries_as_forward,
    dot_values,
    keys_first,
)


class Config(NamedTuple):
    """What is known when the program is traced."""

    scale: float
    soft_cap: float | None
    dropout_rate: float
    query_tile: int
    key_tile: int
    skips: bool  # blocks with nothing unmasked, at the price of loops whose length depends on values


class Gradients(NamedTuple):
    """Cotangents of the inputs, or the part of them that is known so far."""

    query: Array
    key: Array
    value: Array
    bias: Array | None


# Forward.


def attend(config: Config, q: Array, k: Array, v: Array, pairs: Pairs) -> tuple[Array, Array, Array]:
    """The output `[B, K, G, T, width of v]`, the largest logit and the sum of exponentials, `[B, K, G, T, 1]`.

    All of them are widened. A query that sees no key has the largest logit -inf and the sum 1.
    """
    queries, keys = divide(q.shape[3], config.query_tile), divide(k.shape[2], config.key_tile)
    live = live_blocks(pairs, queries, keys) if config.skips else None
    before, after = _scales(config, q)
    clean_q, clean_k, clean_v = _finite(q) * before, _finite(k), _finite(v)
    is_nan = _nans_of_queries(q, k, v, pairs, queries, keys, live)

    def one_block(i: Any) -> tuple[Array, Array, Array]:
        rows = queries.tile(i)
        q_i = take(clean_q, 3, rows)

        def add_keys(j: Any, state: _Running) -> _Running:
            columns = keys.tile(j)
            mask = unmasked(pairs, rows, columns)
            x = dot_keys(q_i, take(clean_k, 2, columns)) * after
            if config.soft_cap is not None:  # whose derivative must not see a product that is not finite
                x = soft_capped(x if mask is None else jnp.where(mask, x, 0), config.soft_cap)
            if pairs.bias is not None:
                x += cut(pairs.bias, pairs.problem, rows, columns).astype(x.dtype)
            keep = _kept_by_dropout(config, pairs, i, j, x.shape)
            return _add_keys(config, state, x, mask, take(clean_v, 2, columns), keep)

        live_tiles = None if live is None else live[i]
        state = for_live_blocks(live_tiles, keys.number, add_keys, _nothing_yet(q_i, clean_k, clean_v))
        return _finish(state, take(is_nan, 3, rows))

    # The plain form is differentiated block by block: what a block holds is computed again, not kept.
    results: tuple[Array, Array, Array] = _each_block(queries, one_block if config.skips else jax.checkpoint(one_block))
    return results


class _Running(NamedTuple):
    """What is known of a block's queries after some of the keys; sums are of exp(x - largest)."""

    largest: Array  # [B, K, G, queries, 1]
    total: Array  # [B, K, G, queries, 1]
    weighted: Array  # [B, K, G, queries, width of v]


def _nothing_yet(q: Array, k: Array, v: Array) -> _Running:
    # Made out of a product, so that the loop that carries it finds the sharding of its own results.
    zero = jnp.zeros_like(dot_keys(q, k[:, :, :1]))
    return _Running(zero - jnp.inf, zero, jnp.zeros_like(zero * v[:, :, None, :1].astype(zero.dtype)))


def _add_keys(config: Config, state: _Running, x: Array, mask: Array | None, v: Array, keep: Array | None) -> _Running:
    x = x if mask is None else jnp.where(mask, x, -jnp.inf)
    largest = jnp.maximum(state.largest, lax.stop_gradient(jnp.max(x, -1, keepdims=True)))
    shift = jnp.where(largest == -jnp.inf, 0, largest)
    exps, decay = jnp.exp(x - shift), jnp.exp(state.largest - shift)
    total = state.total * decay + jnp.sum(exps, -1, keepdims=True)
    weighted = state.weighted * decay + dot_values(_dropped(config, keep, exps), v)
    return _Running(largest, total, weighted)


def _finish(state: _Running, is_nan: Array) -> tuple[Array, Array, Array]:
    is_dead = state.total == 0
    total = jnp.where(is_dead, 1, _nan_where(is_nan[..., -1:], state.total))
    weighted = _nan_where(is_nan[..., :-1] & ~is_dead, state.weighted)
    return weighted / total, jnp.where(is_dead, -jnp.inf, state.largest), total


def logsumexp(largest: Array, total: Array) -> Array:
    """The logsumexp of the two parts in which it is kept."""
    return largest + jnp.log(total)


# Reverse. A block of pairs is transposed here, `[B, K, keys, G, queries]`: two of the three products that contract
# over it then take it as it lies.


def pull_back(
    config: Config,
    of_queries: tuple[Array, ...],
    of_keys: tuple[Array, Array],
    pairs: Pairs,
    d_bias: Array | None,
) -> Gradients:
    """The cotangents of queries, keys and values, widened, and `d_bias` with that of the bias added.

    Of the queries there are q, the cotangent of the output, the largest logit and the sum of exponentials, delta and
    the cotangent of the logsumexp, of the keys k and v. Queries that `pairs` does not call live take no part.
    """
    (q, d_out, largest, total, delta, d_lse), (k, v) = of_queries, of_keys
    assert pairs.live_queries is not None
    live_queries = pairs.live_queries[..., None]
    queries, keys = divide(q.shape[3], config.query_tile), divide(k.shape[2], config.key_tile)
    live = live_blocks(pairs, queries, keys) if config.skips else None
    before, after = _scales(config, q)
    clean_k, clean_v = _finite(k), _finite(v)
    reciprocal = 1 / jnp.where(jnp.isnan(total), 1, total)
    # Divided by the sum once for each query rather than for each pair; 16 bits would be rounded once more by that.
    of_query, of_pair = (reciprocal, None) if d_out.dtype.itemsize >= 4 else (1, reciprocal)
    clean_queries = _Queries(
        q=_finite(q, live_queries) * before,
        d_out=_finite(d_out, live_queries) * of_query,
        shift=largest + 0 * total,  # NaN for a query that sees what is not finite
        delta=delta * of_query,
        reciprocal=of_pair,
        all_weight=jnp.where(total == 1, 0.5, jnp.inf),
        d_lse=d_lse + 0 * delta,
    )
    is_nan = _nans_of_keys(d_out, clean_queries.q, clean_k, pairs, queries, keys, live)

    def one_block(carry: tuple[Array, Array | None], j: Any) -> tuple[tuple[Array, Array | None], tuple[Array, Array]]:
        columns = keys.tile(j)
        k_j, v_j = take(clean_k, 2, columns), take(clean_v, 2, columns)

        def add_queries(i: Any, state: Gradients) -> Gradients:
            rows = queries.tile(i)
            of_block = jax.tree.map(lambda a: take(a, 3, rows), clean_queries)
            weights, d_dots, d_x = _differentiate_block(config, of_block, k_j, v_j, pairs, (i, rows), (j, columns))
            d_v = state.value + dot_pairs_with_queries(weights, of_block.d_out)
            d_k = state.key + dot_pairs_with_queries(d_dots, of_block.q)
            d_q = _add_to_part(state.query, 3, dot_pairs_with_keys(d_dots, k_j), rows)
            if state.bias is None:
                return Gradients(d_q, d_k, d_v, None)
            d_bias = add_to_block(state.bias, jnp.moveaxis(d_x, 2, -1), pairs.problem, rows, columns)
            return Gradients(d_q, d_k, d_v, d_bias)

        live_tiles = None if live is None else live[:, j]
        no_d_k, no_d_v = (jnp.zeros_like(a, total.dtype) for a in (k_j, v_j))
        state = Gradients(carry[0], no_d_k, no_d_v, carry[1])
        state = for_live_blocks(live_tiles, queries.number, add_queries, state)
        return (state.query, state.bias), (state.key, state.value)

    nothing = (jnp.zeros_like(clean_queries.q, total.dtype), d_bias)
    if keys.number == 1:
        (d_q, d_bias), (d_k, d_v) = one_block(nothing, 0)
    else:
        (d_q, d_bias), by_key = lax.scan(one_block, nothing, jnp.arange(keys.number, dtype=jnp.int32))
        d_k, d_v = map(keys.join, by_key)
    return Gradients(d_q * config.scale, d_k * after, _nan_where(is_nan, d_v), d_bias)


class _Queries(NamedTuple):
    """What the reverse pass knows of each query, without what is not finite."""

    q: Array
    d_out: Array  # divided by the sum of exponentials, unless there is a reciprocal
    shift: Array  # the largest logit
    delta: Array  # divided as d_out is
    reciprocal: Array | None  # of the sum of exponentials
    all_weight: Array  # an exponential above this is that of a key that has all of the weight
    d_lse: Array


def _differentiate_block(
    config: Config,
    of_queries: _Queries,
    k: Array,
    v: Array,
    pairs: Pairs,
    row: tuple[Any, Tile],
    column: tuple[Any, Tile],
) -> tuple[Array, Array, Array]:
    """The weights and the cotangents of the products q k and of the logits of a block, keys first."""
    (i, rows), (j, columns) = row, column
    dots = dot_queries_as_forward(k, of_queries.q) * _scales(config, of_queries.q)[1]
    capped = soft_capped(dots, config.soft_cap)
    x = (
        capped
        if pairs.bias is None
        else capped + keys_first(cut(pairs.bias, pairs.problem, rows, columns).astype(capped.dtype))
    )
    mask = unmasked(pairs, rows, columns)
    assert mask is not None  # for not all queries are live
    mask = keys_first(mask)
    keep = _kept_by_dropout(config, pairs, i, j, (*of_queries.q.shape[:4], columns.size))
    keep = None if keep is None else keys_first(keep)

    p = jnp.exp(jnp.where(mask, x - keys_first(of_queries.shift), -jnp.inf))
    if of_queries.reciprocal is not None:
        p = p * keys_first(of_queries.reciprocal)
    d_p = _dropped(config, keep, dot_queries_as_forward(v, of_queries.d_out))
    # Selected, for a masked value may be finite and yet so large that its product is not.
    d_x = p * (d_p - keys_first(of_queries.delta))
    # A key that has all of the weight is the output: what is left of d_p - delta there is rounding.
    d_x = jnp.where(p > keys_first(of_queries.all_weight), keys_first(of_queries.d_lse), d_x)
    d_x = jnp.where(mask, d_x, 0)
    d_dots = d_x
    if config.soft_cap is not None:
        d_dots = jnp.where(mask, pulled_back(d_x, capped, config.soft_cap), 0)
    return _dropped(config, keep, p), d_dots, d_x


def find_live_queries(out: Array, largest: Array, total: Array, d_out: Array, d_lse: Array) -> tuple[Array, Array]:
    """Which queries take part in the reverse pass, and delta; both `[B, T, N, 1]`.

    A query with no key takes no part, nor does one with a NaN whose cotangents are all 0: such a NaN has been
    selected away behind the op, as the padding of queries is by the loss.
    """
    lse, d_lse = logsumexp(largest, total)[..., None], d_lse[..., None]
    wide = jnp.promote_types(out.dtype, lse.dtype)
    # Only what has a cotangent counts: a NaN in another column is none of it.
    delta = jnp.sum(jnp.where(d_out == 0, 0, out.astype(wide) * d_out.astype(wide)), -1, keepdims=True) - d_lse
    sound = jnp.isfinite(lse) & jnp.isfinite(delta)
    wanted = (jnp.max(jnp.abs(d_out), -1, keepdims=True) != 0) | (d_lse != 0)
    return (lse != -jnp.inf) & (sound | wanted), delta + 0 * delta  # NaN where it is infinite


# What is not finite is looked for once in a call, and who sees it only if there is any.


def _nans_of_queries(
    q: Array, k: Array, v: Array, pairs: Pairs, queries: Tiles, keys: Tiles, live: Array | None
) -> Array:
    """Where a query is not finite or sees what is not: the columns of its output, then its sum of weights.

    `[B, K, G, T, width of v + 1]`. For queries that see no key it says nothing.
    """

    def mark(rows: Tile, columns: Tile, marks: Array) -> Array:
        q_i, k_j, v_j = take(q, 3, rows), take(k, 2, columns), take(v, 2, columns)
        ones = jnp.ones_like(dot_keys(jnp.zeros_like(q_i), jnp.zeros_like(k_j)))
        seen = selected(ones, unmasked(pairs, rows, columns))
        found = dot_values(seen, jnp.concatenate([~jnp.isfinite(v_j), _is_bad(k_j)], -1)) > 0
        of_queries = jnp.concatenate([jnp.zeros_like(found[..., :-1]), found[..., -1:] | _is_bad(q_i)], -1)
        return _add_to_part(marks, 3, found | of_queries, rows)

    no_q, no_k, no_v = map(jnp.zeros_like, (q, k[:, :, :1], v[:, :, :1]))  # a NaN in the product would alarm checkify
    like = dot_values(dot_keys(no_q, no_k), jnp.concatenate([no_v, no_k[..., :1]], -1))
    return _mark_by_block(mark, queries, keys, live, _has_bad(q) | _has_bad(k) | _has_bad(v), like)


def _nans_of_keys(
    d_out: Array, q: Array, k: Array, pairs: Pairs, queries: Tiles, keys: Tiles, live: Array | None
) -> Array:
    """Where a key is seen by a query whose cotangent is not finite, by column, `[B, K, S, width of v]`."""

    def mark(rows: Tile, columns: Tile, marks: Array) -> Array:
        ones = jnp.ones_like(dot_queries(take(k, 2, columns), take(q, 3, rows)))
        mask = unmasked(pairs, rows, columns)
        seen = selected(ones, None if mask is None else keys_first(mask))
        bad = ~jnp.isfinite(take(d_out, 3, rows))  # those of other queries are masked
        return _add_to_part(marks, 2, dot_pairs_with_queries(seen, bad) > 0, columns)

    like = dot_pairs_with_queries(dot_queries(k, q[:, :, :, :1]), jnp.zeros_like(d_out[:, :, :, :1]))
    return _mark_by_block(mark, queries, keys, live, _has_bad(d_out), like)


def _mark_by_block(
    mark: Callable[[Tile, Tile, Array], Array],
    queries: Tiles,
    keys: Tiles,
    live: Array | None,
    is_needed: Array,
    like: Array,
) -> Array:
    """Marks of the shape of `like` from all live blocks, one after the other, if they are needed; else all False."""

    def mark_block(n: Any, marks: Array) -> Array:
        return mark(queries.tile(n // keys.number), keys.tile(n % keys.number), marks)

    def mark_all(marks: Array) -> Array:
        flat = None if live is None else live.reshape(-1)
        marked: Array = for_live_blocks(flat, queries.number * keys.number, mark_block, marks)
        return marked

    marks: Array = once_if(is_needed, mark_all, jnp.zeros_like(like, jnp.bool_))
    return marks


def _nan_where(marks: Array, x: Array) -> Array:
    return x + jnp.where(marks, jnp.nan, jnp.zeros((), x.dtype))  # added, so that derivatives know of it as well


def _each_block(blocks: Tiles, of_block: Callable[[Any], Any]) -> Any:
    """The results of all blocks `[..., size, n]`, joined."""
    if blocks.number == 1:
        return of_block(0)
    return jax.tree.map(blocks.join, lax.map(of_block, jnp.arange(blocks.number, dtype=jnp.int32)))


def _add_to_part(x: Array, axis: int, block: Array, tile: Tile) -> Array:
    if tile.size == x.shape[axis]:
        return x + block
    return lax.dynamic_update_slice_in_dim(x, take(x, axis, tile) + block, tile.start, axis)


# Small pieces.


def _scales(config: Config, q: Array) -> tuple[float, float]:
    """The factors of the queries and of the logits: the scale is folded into queries that it does not round."""
    return (config.scale, 1.0) if q.dtype.itemsize >= 4 else (1.0, config.scale)


def _finite(x: Array, where: Array | bool = True) -> Array:
    return jnp.where(jnp.isfinite(x) & where, x, 0)


def _has_bad(x: Array) -> Array:
    """Whether anything is not finite; as a sum of floats, which a CPU is three times as fast at as at booleans."""
    return jnp.sum(jnp.where(jnp.isfinite(x), 0.0, 1.0)) > 0


def _is_bad(x: Array) -> Array:
    """`[..., 1]`: where anything in `[..., n]` is not finite."""
    return jnp.any(~jnp.isfinite(x), -1, keepdims=True)


def _kept_by_dropout(config: Config, pairs: Pairs, i: Any, j: Any, shape: tuple[int, ...]) -> Array | None:
    """Drawn from the key and the block's number alone, so that the reverse pass draws the same."""
    if pairs.head_keys is None:
        return None

    def of_head(key: Array) -> Array:
        block_key = jax.random.fold_in(jax.random.fold_in(key, i), j)
        return jax.random.bernoulli(block_key, 1 - config.dropout_rate, shape[2:])

    return jax.vmap(jax.vmap(of_head))(pairs.head_keys)


def _dropped(config: Config, keep: Array | None, p: Array) -> Array:
    return p if keep is None else jnp.where(keep, p / (1 - config.dropout_rate), 0)
