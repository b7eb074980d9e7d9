"""Attention in tiles of queries, each with all of its keys: the form for an accelerator.

A row of logits is whole, so its softmax needs no running sums, and XLA makes one kernel of it that reads the row once.
The reverse pass computes the softmax again in the same way, and needs nothing of the forward pass but the output; more
only if other devices have more of the keys. No loop has a length that depends on values, since the host would have to
wait for them.

XLA for a GPU recognises a softmax by its form: between a reduction and the row that uses it there may be operations
with a constant, such as a maximum, but no selection.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core import platforms
from masksafe._core.tiles import Tile, Tiles, divide, take
from masksafe._core.typing import Array
from masksafe.attention._dropout import drop, kept
from masksafe.attention._formulas import (
    Adjustments,
    Config,
    Gradients,
    PullBack,
    add_adjustments,
    adjusted,
    adjusted_with_rule,
    capped_logits,
    finite_or_zero,
    is_bad,
    pull_back_cap,
    split_scale,
)
from masksafe.attention._mask import Pairs, unmasked
from masksafe.attention._products import dot_keys, dot_queries_of_rows, dot_values

_F16_WEIGHTS = 2.0**8  # Weights of float16 are products with this: a weight below 6e-5 would lose digits


def attend_by_row(config: Config, q: Array, k: Array, v: Array, pairs: Pairs) -> tuple[Array, Array, Array]:
    """As `_blockwise.attend`, but a bad value counts as 0."""
    of_queries, of_logits = split_scale(config, q)
    clean_q, clean_k, clean_v = finite_or_zero(q) * of_queries, finite_or_zero(k), finite_or_zero(v)
    bad_q, bad_k = is_bad(q), is_bad(k)
    factor = _F16_WEIGHTS if v.dtype == jnp.float16 else 1.0

    def one_tile(tile: _Tile) -> tuple[Array, Array, Array]:
        mask = unmasked(pairs, tile.queries, tile.keys)
        dots = dot_keys(take(clean_q, 3, tile.queries), take(clean_k, 2, tile.keys)) * of_logits
        x = adjusted(config, capped_logits(config, dots, mask), mask, pairs, tile.queries, tile.keys)
        x = _poisoned(x, mask, take(bad_q, 3, tile.queries), take(bad_k, 2, tile.keys))
        exps, largest, total = _exponentials(x)
        keep = kept(config, pairs, tile.queries, tile.keys)
        # Divided by the total before the product, which XLA knows as a softmax; but after it in the plain form, where a
        # derivative of the product with a masked value may overflow, and must not come into a sum over the row.
        before, after = (_divisor(total), 1.0) if config.skips else (1.0, _divisor(total))
        out = dot_values(drop(config, keep, exps / before) * factor, take(clean_v, 2, tile.keys)) / (factor * after)
        return out, largest, jnp.where(total == 0, 1, total)

    def one_part(part: _Part) -> Any:
        # JAX differentiates the plain form: checkpoint, so that it recomputes each tile instead of storing it.
        solve = lambda i: one_tile(part.tile(i))  # noqa: E731
        return _map_tiles(part.tiles, solve if config.skips else jax.checkpoint(solve))

    results = [one_part(part) for part in _parts(config, q, k)]
    return tuple(jnp.concatenate(x, 3) if len(x) > 1 else x[0] for x in zip(*results, strict=True))  # type: ignore


def pull_back_by_row(
    config: Config,
    by_query: tuple[Array, ...],
    by_key: tuple[Array, Array],
    pairs: Pairs,
    sums: Adjustments,
) -> Gradients:
    """As `_blockwise.pull_back`, but it takes nothing of the forward pass, and a bad cotangent counts as 0.

    Args:
      config: the static parameters.
      by_query: q, the cotangent of the output, and that of the logsumexp, NaN for queries that see a bad cotangent. If
        other devices have more of the keys, also the largest logit, the sum of exponentials, and delta, of all keys.
      by_key: k and v.
      pairs: what masks the pairs. Queries that are not live in it take no part.
      sums: the sums so far, over the problems solved before.
    """
    (q, d_out, d_lse, *of_all_keys), (k, v) = by_query, by_key
    before, after = split_scale(config, q)
    clean_k, clean_v, bad_k = finite_or_zero(k), finite_or_zero(v), is_bad(k)
    clean_queries = _Queries(finite_or_zero(q) * before, finite_or_zero(d_out), is_bad(q), d_lse, *of_all_keys)

    def one_tile(tile: _Tile, sums: Adjustments) -> Gradients:
        queries = jax.tree.map(lambda a: take(a, 3, tile.queries), clean_queries)
        k_j, v_j, bad_k_j = (take(a, 2, tile.keys) for a in (clean_k, clean_v, bad_k))
        p, d_dots, d_biased, d_captured = _differentiate_tile(config, queries, k_j, v_j, bad_k_j, pairs, tile)
        sums = add_adjustments(sums, d_biased, d_captured, pairs, tile.queries, tile.keys)
        d_k, d_v = dot_queries_of_rows(d_dots, queries.q), dot_queries_of_rows(p, queries.d_out)
        return Gradients(dot_values(d_dots, k_j), d_k, d_v, sums)

    d_q, d_k, d_v = [], [], []
    for part in _parts(config, q, k):
        no_d_k, no_d_v = (jnp.zeros_like(take(x, 2, part.keys), d_lse.dtype) for x in (k, v))
        of_part = _add_up_tiles(part, one_tile, no_d_k, no_d_v, sums)
        sums = of_part.adjustments
        d_q.append(of_part.query)
        d_k.append(_padded(of_part.key, part.keys, k.shape[2]))
        d_v.append(_padded(of_part.value, part.keys, k.shape[2]))
    return Gradients(
        (jnp.concatenate(d_q, 3) if len(d_q) > 1 else d_q[0]) * config.scale,
        functools.reduce(jnp.add, d_k) * after,
        functools.reduce(jnp.add, d_v),
        sums,
    )


class _Queries(NamedTuple):
    """The reverse pass's arrays over queries, with 0 for bad elements."""

    q: Array
    d_out: Array
    is_bad: Array
    d_lse: Array
    largest: Array | None = None  # like the next two only if other devices have more of the keys
    total: Array | None = None
    delta: Array | None = None


def _differentiate_tile(
    config: Config, by_query: _Queries, k: Array, v: Array, bad_k: Array, pairs: Pairs, tile: "_Tile"
) -> tuple[Array, Array, Array, tuple[Array, ...]]:
    """A tile's weights, the cotangents of its products q k and of these with the bias, and of what is captured."""
    mask = unmasked(pairs, tile.queries, tile.keys)
    assert mask is not None  # live_queries is an array
    dots = dot_keys(by_query.q, k) * split_scale(config, by_query.q)[1]

    def weights(dots: Array) -> tuple[Array, Array, PullBack]:
        capped = capped_logits(config, dots, mask)
        x, pull_back_adjustments = adjusted_with_rule(capped, mask, pairs, tile.queries, tile.keys)
        exps, _, total = _exponentials(_poisoned(x, mask, by_query.is_bad, bad_k), by_query.largest)
        total = total if by_query.total is None else by_query.total
        return jnp.where(mask, exps / _divisor(total), 0), capped, pull_back_adjustments

    # The weights for the product with d_out are another kernel than those in the cotangents of the logits, which is
    # kept from reading the first.
    weight, *_ = weights(dots)
    p, capped, pull_back_adjustments = weights(lax.optimization_barrier(dots))
    keep = kept(config, pairs, tile.queries, tile.keys)
    d_p = drop(config, keep, dot_keys(by_query.d_out, v))
    d_p = jnp.where(mask, d_p, 0)  # the product with a masked value may overflow
    d_x = jnp.where(mask, _slopes(by_query, p, d_p), 0)
    d_biased, d_captured = pull_back_adjustments(d_x)
    return drop(config, keep, weight), pull_back_cap(config, d_biased, mask, capped), d_biased, d_captured


def _slopes(by_query: _Queries, p: Array, d_p: Array) -> Array:
    """The cotangents of the logits from those of the weights."""
    if by_query.delta is None or by_query.total is None:
        # The sum, taken from the weights before they are rounded for a product, is closer than that of outputs.
        return p * (d_p - jnp.sum(p * d_p, -1, keepdims=True) + by_query.d_lse)
    # The output is the value of a key that has all of the weight: there d_p - delta is d_lse plus rounding errors.
    return jnp.where((by_query.total == 1) & (p > 0.5), by_query.d_lse, p * (d_p - by_query.delta))


def _poisoned(x: Array, mask: Array | None, bad_q: Array, bad_k: Array) -> Array:
    """The logits, -inf where they are masked and NaN where the query or the key is bad."""
    x = jnp.where(bad_q | bad_k[:, :, None, None, :, 0], jnp.nan, x)
    return x if mask is None else jnp.where(mask, x, -jnp.inf)


def _exponentials(x: Array, largest: Array | None = None) -> tuple[Array, Array, Array]:
    """exp(x - largest), 0 in a row without keys, and the largest logit and the sum of the exponentials of each row.

    The largest logit of all keys may be given.
    """
    largest = lax.stop_gradient(jnp.max(x, -1, keepdims=True)) if largest is None else largest
    exps = jnp.exp(x - jnp.maximum(largest, jnp.finfo(x.dtype).min))
    return exps, largest, jnp.sum(exps, -1, keepdims=True)


def _divisor(total: Array) -> Array:
    return jnp.maximum(total, 0.5)  # a sum of exponentials is 1 at least, or 0


# Parts and tiles. Part of the queries has the same keys, and is small enough for one tile or is gone through in a loop.


class _Tile(NamedTuple):
    """Some queries and all keys that they may see."""

    queries: Tile
    keys: Tile


class _Part(NamedTuple):
    """Queries from `start` on, in tiles, whose keys are the same."""

    start: int
    tiles: Tiles
    keys: Tile

    def tile(self, i: Any) -> _Tile:
        start, size, first, is_ragged = self.tiles.tile(i)
        return _Tile(Tile(self.start + start, size, self.start + first, is_ragged), self.keys)


def most_logits_at_once(config: Config) -> int:
    """How many logits of all problems together may be worked on, maybe in several parts."""
    return config.row_tile_logits * (1 if config.band is None else platforms.SKIPPING_ROW_TILES)


def _parts(config: Config, q: Array, k: Array) -> Iterator[_Part]:
    """The queries in parts: one for all, or several if a static mask hides some keys from all queries of a part."""
    length, num_keys = q.shape[3], k.shape[2]
    if not all(isinstance(n, int) for n in (*q.shape, num_keys)):
        yield _Part(0, Tiles(length, length), Tile(0, num_keys, 0, False))
        return
    logits = math.prod(q.shape[:4]) * num_keys
    most_queries = max(1, config.row_tile_logits * length // max(1, logits))
    number = 1
    if config.band is not None:
        number = max(1, min(platforms.SKIPPING_ROW_TILES, logits // platforms.SKIPPING_ROW_TILE_LOGITS))
    size = _multiple_above(-(-length // number))
    for start in range(0, length, size):
        tiles = divide(min(size, length - start), most_queries)
        yield _Part(start, tiles, _seen_keys(config, start, tiles.length, num_keys))


def _seen_keys(config: Config, start: int, length: int, num_keys: int) -> Tile:
    """The keys that some queries may see by the static mask; at least one."""
    if config.band is None:
        return Tile(0, num_keys, 0, False)
    left, right = config.band
    end = max(1, min(num_keys, _multiple_above(start + length + right)))
    first = 0 if left is None else max(0, start - left)
    first = min(first // _ALIGNMENT * _ALIGNMENT, end - 1)
    return Tile(first, end - first, first, False)


_ALIGNMENT = 64  # of the bounds of parts, which a GPU's matrix units like


def _multiple_above(n: int) -> int:
    return -(-n // _ALIGNMENT) * _ALIGNMENT


def _map_tiles(tiles: Tiles, one_tile: Callable[[Any], Any]) -> Any:
    """The results of all tiles `[..., size, n]`, joined."""
    if tiles.number == 1:
        return one_tile(0)
    return jax.tree.map(tiles.join, lax.map(one_tile, jnp.arange(tiles.number, dtype=jnp.int32)))


def _add_up_tiles(
    part: _Part,
    one_tile: Callable[[_Tile, Adjustments], Gradients],
    no_d_k: Array,
    no_d_v: Array,
    sums: Adjustments,
) -> Gradients:
    """The gradients of a part's queries, joined, and of its keys and the adjustments, summed over the tiles."""
    if part.tiles.number == 1:
        return one_tile(part.tile(0), sums)

    def add_tile(carry: Any, i: Array) -> tuple[Any, Array]:
        d_k, d_v, sums = carry
        of_tile = one_tile(part.tile(i), sums)
        return (d_k + of_tile.key, d_v + of_tile.value, of_tile.adjustments), of_tile.query

    numbers = jnp.arange(part.tiles.number, dtype=jnp.int32)
    (d_k, d_v, sums), d_q = lax.scan(add_tile, (no_d_k, no_d_v, sums), numbers)
    return Gradients(part.tiles.join(d_q), d_k, d_v, sums)


def _padded(x: Array, keys: Tile, num_keys: int) -> Array:
    """`x` of some keys as an array of all keys, 0 for the others."""
    if keys.size is num_keys or keys.size == num_keys:
        return x
    behind = num_keys - keys.start - keys.size
    return jnp.pad(x, ((0, 0), (0, 0), (keys.start, behind), (0, 0)))
