"""Which pairs of a query and a key are masked, and which blocks of pairs hold any that are not.

The causal mask, the window and the lengths all mean the same: query `t` sees the keys of one interval,
[first_key[t], end_key[t]). If keys have positions of their own, the causal mask and the window are an interval of these
instead. Segments add a comparison of two numbers. So these structural masks are stored as arrays over queries and over
keys, and a mask of pairs exists only for the block in work.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core.tiles import Tile, Tiles, take
from masksafe._core.typing import Array
from masksafe._core.unfolded import any_of, unknown
from masksafe.attention._mods import Indices, Mod, mask_of


def part(x: Array, starts: Sequence[Array | int], sizes: Sequence[int]) -> Array:
    """The part of `x` of the given sizes, from `starts` on."""
    return lax.dynamic_slice(x, _as_int32(starts), sizes)


def _as_int32(starts: Sequence[Array | int]) -> list[Array]:
    return [jnp.asarray(start, jnp.int32) for start in starts]  # JAX refuses a mixture of integer types


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Problems:
    """The problems of some samples and key heads, from the given ones on."""

    sample: Array
    head: Array
    samples: int = dataclasses.field(default=1, metadata={"static": True})
    heads: int = dataclasses.field(default=1, metadata={"static": True})


class Pairs(NamedTuple):
    """What masks a pair of a query and a key, and its bias. None masks nothing.

    Arrays over queries and keys are `[B, T]` and `[B, S]`, with B = 1 if all samples are alike. Arrays over pairs are
    `[B, K, G, T, S]` with size 1 where they broadcast; they are never expanded, only cut to a block.
    """

    first_key: Array | None = None  # [B, T]; None stands for 0
    end_key: Array | None = None  # [B, T]; None stands for S
    first_position: Array | None = None  # [B, T], like the next one only if keys have positions of their own
    end_position: Array | None = None  # [B, T]
    query_positions: Array | None = None  # [B, T], for mods alone
    key_positions: Array | None = None  # [B, S]
    query_segments: Array | None = None  # [B, T]
    key_segments: Array | None = None  # [B, S]
    allowed: Array | None = None  # [B, K, G, T, S]
    bias: Array | None = None  # [B, K, G, T, S]
    score_mod: Mod | None = None
    mask_mod: Mod | None = None
    samples: Array | None = None  # [B], their indices, for mods
    heads: Array | None = None  # [1, K, G], likewise
    query_words: Array | None = None  # [B, K, G, T, 2], random ones, for dropout
    live_queries: Array | None = None  # [B, K, G, T]; the others take no part in the reverse pass
    problems: Problems | None = None  # None stands for all of them

    def only(self, problems: Problems) -> "Pairs":
        """The pairs of some problems. Arrays over pairs are left whole; `cut` cuts them."""

        def cut_samples(x: Array | None) -> Array | None:
            return x if x is None or x.shape[0] == 1 else lax.dynamic_slice_in_dim(x, problems.sample, problems.samples)

        def cut_heads(x: Array | None) -> Array | None:
            return x if x is None else lax.dynamic_slice_in_dim(x, problems.head, problems.heads, 1)

        def cut_problems(x: Array | None) -> Array | None:
            if x is None:
                return x
            starts: list[Array | int] = [problems.sample, problems.head, *[0] * (x.ndim - 2)]
            return part(x, starts, (problems.samples, problems.heads, *x.shape[2:]))

        return Pairs(
            first_key=cut_samples(self.first_key),
            end_key=cut_samples(self.end_key),
            first_position=cut_samples(self.first_position),
            end_position=cut_samples(self.end_position),
            query_positions=cut_samples(self.query_positions),
            key_positions=cut_samples(self.key_positions),
            query_segments=cut_samples(self.query_segments),
            key_segments=cut_samples(self.key_segments),
            allowed=self.allowed,
            bias=self.bias,
            score_mod=self.score_mod,
            mask_mod=self.mask_mod,
            samples=cut_samples(self.samples),
            heads=cut_heads(self.heads),
            query_words=cut_problems(self.query_words),
            live_queries=cut_problems(self.live_queries),
            problems=problems,
        )


def seen_positions(
    positions: Array, is_causal: bool, window: tuple[int, int] | None
) -> tuple[Array | None, Array | None]:
    """The positions `[first, end)` that queries at some positions see; None is no bound."""
    first, ends = None, []
    if is_causal:
        ends.append(positions + 1)
    if window is not None:
        left, right = window
        first = positions - left
        ends.append(positions + right + 1)
    return first, functools.reduce(jnp.minimum, ends) if ends else None


def seen_keys(
    num_queries: int,
    num_keys: int,
    first: Array | None,
    end: Array | None,
    query_lengths: Array | None,
    key_lengths: Array | None,
    first_query: Array | None = None,
) -> tuple[Array | None, Array | None]:
    """The keys `[first, end)` that a query sees, each `[*batch or 1s, T]`; None for the first and the last.

    Args:
      num_queries: T.
      num_keys: S.
      first: a bound of the index, `[*batch or 1s, T]`, or None.
      end: the same.
      query_lengths: `[*batch or 1s, 1]`, or None.
      key_lengths: `[*batch or 1s, 1]`, or None.
      first_query: the index of the first of these queries among all, None for 0.
    """
    bounds = [x for x in (end, key_lengths, query_lengths) if x is not None]
    if not bounds:  # there is no first without an end
        return None, None
    index = jnp.arange(num_queries, dtype=jnp.int32).reshape((1,) * (bounds[0].ndim - 1) + (num_queries,))
    index = index if first_query is None else index + first_query
    ends = [x for x in (end, key_lengths) if x is not None]
    end = functools.reduce(jnp.minimum, ends, jnp.full_like(index, num_keys))
    if query_lengths is not None:
        end = jnp.where(index < query_lengths, end, 0)
    if first is None:
        return None, end
    first, end = jnp.broadcast_arrays(jnp.maximum(0, first), end)
    return first, end


def cut(x: Array, problems: Problems | None, queries: Tile, keys: Tile) -> Array:
    """A block of an array over pairs; axes of size 1 stay so."""
    starts, sizes = _block_bounds(x, problems, queries, keys)
    return x if sizes == x.shape else part(x, starts, sizes)


def add_to_block(x: Array, block: Array, problems: Problems | None, queries: Tile, keys: Tile) -> Array:
    """`x` plus `block` `[B, K, G, queries, keys]`, which is summed over the axes along which `x` broadcasts."""
    starts, sizes = _block_bounds(x, problems, queries, keys)
    summed = jnp.sum(block, [a for a in range(5) if sizes[a] < block.shape[a]], keepdims=True)
    if sizes == x.shape:
        return x + summed
    return lax.dynamic_update_slice(x, part(x, starts, sizes) + summed, _as_int32(starts))


def _block_bounds(
    x: Array, problems: Problems | None, queries: Tile, keys: Tile
) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    sample, head = (0, 0) if problems is None else (problems.sample, problems.head)
    number = x.shape[:2] if problems is None else (problems.samples, problems.heads)
    starts = (sample, head, 0, queries.start, keys.start)
    sizes = (*number, x.shape[2], queries.size, keys.size)
    return (
        tuple(0 if n == 1 else start for n, start in zip(x.shape, starts, strict=True)),
        tuple(min(n, size) for n, size in zip(x.shape, sizes, strict=True)),
    )


def unmasked(pairs: Pairs, queries: Tile, keys: Tile) -> Array | None:
    """Where the pairs of a block are unmasked, `[B, K, G, queries, keys]` up to broadcasting; None means everywhere."""
    conditions = []
    key_index = keys.start + lax.broadcasted_iota(jnp.int32, (1, 1, 1, 1, keys.size), 4)
    if pairs.first_key is not None:
        conditions.append(key_index >= take(pairs.first_key, 1, queries)[:, None, None, :, None])
    if pairs.end_key is not None:
        conditions.append(key_index < take(pairs.end_key, 1, queries)[:, None, None, :, None])
    if pairs.key_positions is not None:
        position = take(pairs.key_positions, 1, keys)[:, None, None, None, :]
        if pairs.first_position is not None:
            conditions.append(position >= take(pairs.first_position, 1, queries)[:, None, None, :, None])
        if pairs.end_position is not None:
            conditions.append(position < take(pairs.end_position, 1, queries)[:, None, None, :, None])
    if pairs.query_segments is not None and pairs.key_segments is not None:
        query_ids = take(pairs.query_segments, 1, queries)[:, None, None, :, None]
        key_ids = take(pairs.key_segments, 1, keys)[:, None, None, None, :]
        conditions.append(query_ids == key_ids)
    if pairs.allowed is not None:
        conditions.append(cut(pairs.allowed, pairs.problems, queries, keys))
    if pairs.mask_mod is not None:
        conditions.append(mask_of(pairs.mask_mod, indices(pairs, queries, keys)))
    if pairs.bias is not None:
        conditions.append(_is_live_bias(cut(pairs.bias, pairs.problems, queries, keys)))
    if pairs.live_queries is not None:
        conditions.append(take(pairs.live_queries, 3, queries)[..., None])
    if keys.is_ragged:
        conditions.append(key_index >= keys.first)
    if queries.is_ragged:
        query_index = queries.start + lax.broadcasted_iota(jnp.int32, (1, 1, 1, queries.size, 1), 3)
        conditions.append(query_index >= queries.first)
    return _conjunction(conditions)


def indices(pairs: Pairs, queries: Tile, keys: Tile) -> Indices:
    """What a mod is told of the pairs of a block."""
    assert pairs.samples is not None
    assert pairs.heads is not None
    assert pairs.query_positions is not None
    assert pairs.key_positions is not None

    number = pairs.samples.shape[0]
    query_positions, key_positions = take(pairs.query_positions, 1, queries), take(pairs.key_positions, 1, keys)
    return (
        pairs.samples,
        pairs.heads[0],
        jnp.broadcast_to(query_positions, (number, queries.size)),
        jnp.broadcast_to(key_positions, (number, keys.size)),
    )


def _conjunction(conditions: list[Array]) -> Array | None:
    result = None
    for condition in conditions:
        result = condition if result is None else result & condition
    return result


# Blocks with nothing unmasked are skipped. For structural masks, bounds decide whether a block is live, and may call a
# dead block live; for arrays over pairs, every pair is looked at.


def live_blocks(pairs: Pairs, queries: Tiles, keys: Tiles) -> Array | None:
    """Where a block is live, `[queries.number, keys.number]`; None means everywhere, or that there is but one."""
    return None if queries.number == keys.number == 1 else _find_live_blocks(pairs, queries, keys)


def has_live_block(pairs: Pairs, queries: Tiles, keys: Tiles) -> Array | None:
    """Whether any block is live; None means that all are."""
    live = _find_live_blocks(pairs, queries, keys)
    return None if live is None else any_of(live)


def _find_live_blocks(pairs: Pairs, queries: Tiles, keys: Tiles) -> Array | None:
    conditions = [_live_by_structure(pairs, queries, keys)]
    for array, is_live in ((pairs.allowed, _identity), (pairs.bias, _is_live_bias)):
        if array is not None:
            of_queries = functools.partial(_cut_live, array, is_live, pairs.problems)
            conditions.append(_live_by_pairs(of_queries, array.shape[3:], queries, keys))
    if pairs.mask_mod is not None:
        sizes = queries.length, keys.length
        conditions.append(_live_by_pairs(functools.partial(_live_by_mod, pairs), sizes, queries, keys))
    return _conjunction([c for c in conditions if c is not None])


def _live_by_structure(pairs: Pairs, queries: Tiles, keys: Tiles) -> Array | None:
    conditions = []  # [B, T, keys.number]
    starts = jnp.arange(keys.number, dtype=jnp.int32)[None, None] * keys.size
    if pairs.end_key is not None:
        first = starts if pairs.first_key is None else jnp.maximum(pairs.first_key[..., None], starts)
        conditions.append(first < jnp.minimum(pairs.end_key[..., None], starts + keys.size))
    if pairs.key_positions is not None:
        lowest, highest = _range_of_tiles(pairs.key_positions, keys)
        if pairs.first_position is not None:
            conditions.append(pairs.first_position[..., None] <= highest)
        if pairs.end_position is not None:
            conditions.append(lowest < pairs.end_position[..., None])
    if pairs.query_segments is not None and pairs.key_segments is not None:
        lowest, highest = _range_of_tiles(pairs.key_segments, keys)
        query_ids = pairs.query_segments[..., None]
        conditions.append((lowest <= query_ids) & (query_ids <= highest))
    sees_tile = _conjunction(conditions)
    if sees_tile is None:
        return None
    return any_of(_by_tile(any_of(sees_tile, 0).T, queries), -1).T


def _range_of_tiles(x: Array, keys: Tiles) -> tuple[Array, Array]:
    """The lowest and the highest number of each tile of an array over keys, `[B, 1, keys.number]`."""
    by_tile = _by_tile(unknown(x), keys)
    return by_tile.min(-1)[:, None], by_tile.max(-1)[:, None]


def _by_tile(x: Array, tiles: Tiles) -> Array:
    """`[..., length]` as `[..., number, size]`; the last tile ends with the last element."""
    starts = jnp.minimum(jnp.arange(tiles.number) * tiles.size, tiles.length - tiles.size)
    return jnp.take(x, starts[:, None] + jnp.arange(tiles.size)[None], axis=-1)


def _live_by_pairs(live_of: Callable[[Tile, Tile], Array], shape: Sequence[int], queries: Tiles, keys: Tiles) -> Array:
    """Where a block has a live pair, from a function that says it of pairs `[B, K, G, T, S]`.

    `shape` is that of the last two axes for all queries and keys, 1 on one along which the pairs do not differ.
    """
    all_keys = Tiles(keys.length, keys.length).tile(0)

    def any_in_query_tile(i: Array) -> Array:
        return any_of(live_of(queries.tile(i), all_keys), (0, 1, 2, 3))

    count = 1 if shape[0] == 1 else queries.number
    by_key = (
        lax.map(any_in_query_tile, jnp.arange(count))
        if count > 1
        else any_in_query_tile(jnp.zeros((), jnp.int32))[None]
    )
    by_block = by_key if by_key.shape[-1] == 1 else any_of(_by_tile(by_key, keys), -1)
    return jnp.broadcast_to(by_block, (queries.number, keys.number))


def _cut_live(
    x: Array, is_live: Callable[[Array], Array], problems: Problems | None, queries: Tile, keys: Tile
) -> Array:
    return is_live(cut(x, problems, queries, keys))


def _live_by_mod(pairs: Pairs, queries: Tile, keys: Tile) -> Array:
    assert pairs.mask_mod is not None
    return mask_of(pairs.mask_mod, indices(pairs, queries, keys))


def _identity(allowed: Array) -> Array:
    return allowed


def _is_live_bias(bias: Array) -> Array:
    return bias != -jnp.inf  # True for a NaN, which must stay visible


def for_live_blocks(live: Array | None, count: int, body: Callable[[Any, Any], Any], state: Any) -> Any:
    """`state` after `body(block, state)` for every live block in turn; `live` is `[count]`, None means all."""
    if count == 1:
        return body(0, state)
    if live is None:
        return lax.fori_loop(0, count, body, state)
    # Loop over the live blocks only, sorted to the front in their order.
    order = jnp.argsort(jnp.where(live, 0, 1), stable=True)
    return lax.fori_loop(0, jnp.sum(live, dtype=jnp.int32), lambda n, state: body(order[n], state), state)


def once_if(condition: Array, fn: Callable[[Any], Any], state: Any) -> Any:
    """`fn(state)` if the condition holds, else `state`; a loop, since under vmap a `lax.cond` would always run `fn`."""

    def body(carry: tuple[Array, Any]) -> tuple[Array, Any]:
        return jnp.zeros_like(condition), fn(carry[1])

    return lax.while_loop(lambda carry: carry[0], body, (condition, state))[1]
