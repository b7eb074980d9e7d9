"""Which pairs of a query and a key are masked, which blocks of pairs hold any that are not, and what a block needs.

The causal mask, the window and the lengths all mean the same: query `t` sees the keys of one interval,
[first_key[t], end_key[t]). If keys have positions of their own, the causal mask and the window are an interval of these
instead. Segments add a comparison of two numbers. So these structural masks are stored as arrays over queries and over
keys, and a mask of pairs exists only for the block in work.

Which weights dropout keeps is a hash of the pair, which depends on no block, form, device or platform. JAX's generator
draws two words for every query of every head, and the draw of a pair mixes these with the index of the key: all twenty
rounds of the generator for every pair would take longer than attention itself.
"""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry2x32_p

from masksafe._core.masks import both
from masksafe._core.tiles import Places, Tile, Tiles, add_to_part, part, whole
from masksafe._core.typing import Array
from masksafe._core.unfolded import any_of, unknown
from masksafe.attention._mods import Indices, Mod, mask_of


class Problems(NamedTuple):
    """The problems of some samples and key heads, from the given ones on."""

    sample: Array | int
    head: Array | int
    samples: int
    heads: int


class Pairs(NamedTuple):
    """What masks pairs, or belongs to them. None masks nothing.

    An array has the axes that `AXES` declares: b of samples, k of key heads, g of the query heads of each, t of queries
    and s of keys. Along b, and in arrays over pairs along all of them, it may have size 1, where it broadcasts.
    """

    first_key: Array | None = None  # None stands for 0
    end_key: Array | None = None  # None stands for the number of keys
    first_position: Array | None = None  # like the next one only if keys have positions of their own
    end_position: Array | None = None
    query_positions: Array | None = None  # for mods alone
    key_positions: Array | None = None
    query_segments: Array | None = None
    key_segments: Array | None = None
    allowed: Array | None = None
    bias: Array | None = None
    score_mod: Mod | None = None
    mask_mod: Mod | None = None
    samples: Array | None = None  # their indices, for mods
    heads: Array | None = None  # likewise
    query_words: Array | None = None  # random ones, for dropout
    live_queries: Array | None = None  # the others take no part in the reverse pass
    showing_queries: Array | None = None  # in whose logits a bad tangent shows; None stands for all
    problems: Problems | None = None  # those to which it is cut, but for arrays over pairs; None stands for all

    def only(self, problems: Problems) -> "Pairs":
        """The pairs of some problems. Arrays over pairs are never copied: they are left whole, and cut by block."""
        places = {"b": (problems.sample, problems.samples), "k": (problems.head, problems.heads)}
        return self._cut(lambda axes: {} if axes == OVER_PAIRS else places)._replace(problems=problems)

    def mask_any(self) -> bool:
        """Whether a pair may be masked other than by the end of the keys."""
        names = "first_key", "end_key", "end_position", "query_segments", "allowed", "bias", "mask_mod"
        return any(getattr(self, name) is not None for name in names)

    def _cut(self, places_of: Callable[[str], "PlacesByName"]) -> "Pairs":
        """With the parts of the arrays at the places for their axes."""
        arrays = {name: x for name in AXES if (x := getattr(self, name)) is not None}
        parts: Any = {name: cut(x, AXES[name], places_of(AXES[name])) for name, x in arrays.items()}
        return self._replace(**parts)


OVER_PAIRS = "bkgts"
AXES = {
    **dict.fromkeys(("first_key", "end_key", "first_position", "end_position"), "bt"),
    **dict.fromkeys(("query_positions", "query_segments"), "bt"),
    **dict.fromkeys(("key_positions", "key_segments"), "bs"),
    **dict.fromkeys(("allowed", "bias"), OVER_PAIRS),
    "samples": "b",
    "heads": "bkg",
    "query_words": "bkgtw",
    **dict.fromkeys(("live_queries", "showing_queries"), "bkgt"),
}

PlacesByName = dict[str, tuple[Any, int]]


def cut(x: Array, axes: str, places: PlacesByName) -> Array:
    """The part of `x` at the places; an axis of size 1 stays whole, as one that has no place."""
    return part(x, _of_array(x, axes, places))


def add_at(x: Array, addend: Array, places: PlacesByName) -> Array:
    """An array over pairs plus `addend` at the places, which is summed over the axes along which `x` broadcasts."""
    axes = [a for a in range(addend.ndim) if x.shape[a] == 1 < addend.shape[a]]
    summed = jnp.sum(addend, axes, keepdims=True) if axes else addend
    return add_to_part(x, summed, _of_array(x, OVER_PAIRS, places))


def _of_array(x: Array, axes: str, places: PlacesByName) -> Places:
    return {i: places[axis] for i, axis in enumerate(axes) if axis in places and x.shape[i] != 1}


def grouped_heads(x: Array | None, num_key_heads: int) -> Array | None:
    """An array over pairs, `[..., N or 1, T, S]` to `[..., K, G, T, S]` with size 1 where it broadcasts."""
    if x is None:
        return None
    heads = (1, 1) if x.shape[-3] == 1 else (num_key_heads, x.shape[-3] // num_key_heads)
    return x.reshape(*x.shape[:-3], *heads, *x.shape[-2:])


# The bounds of what a query sees.


def seen_positions(
    positions: Array, is_causal: bool, window: tuple[int, int] | None
) -> tuple[Array | None, Array | None]:
    """The positions `[first, end)` that queries at some positions see; None is no bound."""
    first, ends = None, []
    if is_causal:
        ends.append(positions + 1)
    if window is not None:
        first = positions - window[0]
        ends.append(positions + window[1] + 1)
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


# A block of pairs.


class Block(NamedTuple):
    """What the pairs of some queries and keys are. Arrays are `[B, K, G, queries, keys]` up to broadcasting."""

    mask: Array | None  # where they are unmasked; None means everywhere
    bias: Array | None
    kept: Array | None  # where dropout keeps a weight; None means everywhere
    shows: Array | None  # where a bad tangent shows; None means everywhere
    indices: Indices | None  # the arguments of a mod
    score_mod: Mod | None
    places: PlacesByName  # in arrays over pairs


def block_of(pairs: Pairs, queries: Tile, keys: Tile, dropout_rate: float = 0.0) -> Block:
    """The block of these queries and keys."""
    places: PlacesByName = {"t": (queries.start, queries.size), "s": (keys.start, keys.size)}
    if (problems := pairs.problems) is not None:
        places |= {"b": (problems.sample, problems.samples), "k": (problems.head, problems.heads)}
    in_problems = {axis: place for axis, place in places.items() if axis in "ts"}  # to which it is cut already
    own = pairs._cut(lambda axes: places if axes == OVER_PAIRS else in_problems)
    indices = _indices(own, queries, keys)
    kept = None if own.query_words is None else _kept(own.query_words, keys, dropout_rate)
    shows = None if own.showing_queries is None else own.showing_queries[..., None]
    return Block(_unmasked(own, queries, keys, indices), own.bias, kept, shows, indices, own.score_mod, places)


def _unmasked(own: Pairs, queries: Tile, keys: Tile, indices: Indices | None) -> Array | None:
    key_index = None if own.end_key is None else _index(keys, 4)  # there is no first key without an end
    of_queries = own.first_key, own.end_key, own.first_position, own.end_position, own.query_segments
    first_key, end_key, first_position, end_position, query_segments = jax.tree.map(
        lambda x: x[:, None, None, :, None], of_queries
    )
    # Without an end of positions, those of keys are there for mods alone.
    of_keys = (None if own.end_position is None else own.key_positions), own.key_segments
    key_positions, key_segments = jax.tree.map(lambda x: x[:, None, None, None, :], of_keys)
    conditions = [
        _compared(operator.ge, key_index, first_key),
        _compared(operator.lt, key_index, end_key),
        _compared(operator.ge, key_positions, first_position),
        _compared(operator.lt, key_positions, end_position),
        _compared(operator.eq, query_segments, key_segments),
        own.allowed,
        None if own.mask_mod is None or indices is None else mask_of(own.mask_mod, indices),
        None if own.bias is None else own.bias != -jnp.inf,  # True for a NaN, which must stay visible
        None if own.live_queries is None else own.live_queries[..., None],
        _index(keys, 4) >= keys.first if keys.is_ragged else None,
        _index(queries, 3) >= queries.first if queries.is_ragged else None,
    ]
    return functools.reduce(both, conditions, None)


def _compared(compare: Callable[[Any, Any], Any], a: Array | None, b: Array | None) -> Any:
    return None if a is None or b is None else compare(a, b)


def _index(tile: Tile, axis: int) -> Array:
    index = _iota(jnp.int32, axis, tile.size)
    return index if isinstance(tile.start, int) and tile.start == 0 else tile.start + index


def _iota(dtype: Any, axis: int, size: int) -> Array:
    """The numbers from 0 on along an axis of a block of pairs."""
    return lax.broadcasted_iota(dtype, [size if a == axis else 1 for a in range(len(OVER_PAIRS))], axis)


def _indices(own: Pairs, queries: Tile, keys: Tile) -> Indices | None:
    if own.samples is None or own.heads is None or own.query_positions is None or own.key_positions is None:
        return None
    number = own.samples.shape[0]
    query_positions = jnp.broadcast_to(own.query_positions, (number, queries.size))
    return own.samples, own.heads[0], query_positions, jnp.broadcast_to(own.key_positions, (number, keys.size))


# Blocks with nothing unmasked are skipped. For structural masks, bounds decide whether a block is live, and may call a
# dead block live; for arrays over pairs and mods, every pair is looked at.


def live_blocks(pairs: Pairs, queries: Tiles, keys: Tiles) -> Array | None:
    """Where a block is live, `[queries.number, keys.number]`; None means everywhere, or that there is but one."""
    return None if queries.number == keys.number == 1 else find_live_blocks(pairs, queries, keys)


def find_live_blocks(pairs: Pairs, queries: Tiles, keys: Tiles) -> Array | None:
    """The same, but also if there is only one block."""
    of_pairs = pairs._replace(**dict.fromkeys(_STRUCTURE), query_words=None)  # nor are weights drawn for it
    by_pairs = _live_by_pairs(of_pairs, queries, keys) if of_pairs.mask_any() else None
    return both(_live_by_structure(pairs, queries, keys), by_pairs)


_STRUCTURE = "first_key", "end_key", "first_position", "end_position", "query_segments", "key_segments", "live_queries"


def _live_by_structure(pairs: Pairs, queries: Tiles, keys: Tiles) -> Array | None:
    conditions = []  # [B, T, keys.number]
    starts = jnp.arange(keys.number, dtype=jnp.int32)[None, None] * keys.size
    if pairs.end_key is not None:
        first = starts if pairs.first_key is None else jnp.maximum(pairs.first_key[..., None], starts)
        conditions.append(first < jnp.minimum(pairs.end_key[..., None], starts + keys.size))
    if pairs.key_positions is not None and (pairs.first_position is not None or pairs.end_position is not None):
        lowest, highest = _range_of_tiles(pairs.key_positions, keys)
        if pairs.first_position is not None:
            conditions.append(pairs.first_position[..., None] <= highest)
        if pairs.end_position is not None:
            conditions.append(lowest < pairs.end_position[..., None])
    if pairs.query_segments is not None and pairs.key_segments is not None:
        lowest, highest = _range_of_tiles(pairs.key_segments, keys)
        query_ids = pairs.query_segments[..., None]
        conditions.append((lowest <= query_ids) & (query_ids <= highest))
    sees_tile = functools.reduce(both, conditions, None)
    return None if sees_tile is None else any_of(queries.by_tile(any_of(sees_tile, 0), 0), 1)


def _range_of_tiles(x: Array, keys: Tiles) -> tuple[Array, Array]:
    """The lowest and the highest number of each tile of an array over keys, `[B, 1, keys.number]`."""
    by_tile = keys.by_tile(unknown(x), 1)
    return by_tile.min(2)[:, None], by_tile.max(2)[:, None]


def _live_by_pairs(pairs: Pairs, queries: Tiles, keys: Tiles) -> Array:
    def of_queries(i: Array) -> Array:
        mask = block_of(pairs, queries.tile(i), whole(keys.length)).mask
        assert mask is not None  # there is an array or a mod
        by_key = any_of(mask, (0, 1, 2, 3))
        return any_of(keys.by_tile(by_key, 0), 1) if by_key.shape[0] > 1 else by_key

    arrays = [x for x in (pairs.allowed, pairs.bias) if x is not None]
    are_alike = pairs.mask_mod is None and all(x.shape[3] == 1 for x in arrays)
    live = of_queries(jnp.zeros((), jnp.int32))[None] if are_alike else queries.map(of_queries)
    return jnp.broadcast_to(live, (queries.number, keys.number))


# Dropout.


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def draw_words(
    key: Array, batch: tuple[int, ...], heads: tuple[int, int], num_queries: int, first_query: Array | None = None
) -> Array:
    """Two words `[*batch, K, G, T, 2]` for every query of every head, for `heads` (K, G).

    They depend on the random key and the indices of sample, head and query alone. `first_query` is the index of the
    first query, None for 0.
    """
    # Bits of a key of any kind make a key of Threefry, which may be counted up for a key of every head.
    of_samples, of_heads = jax.random.bits(key, (2,), jnp.uint32)
    sample = of_samples + _count(math.prod(batch)).reshape(*batch, 1, 1, 1)
    head = of_heads + _count(math.prod(heads)).reshape(*[1] * len(batch), *heads, 1)
    query = _count(num_queries)
    query = query if first_query is None else query + first_query.astype(query.dtype)
    (sample, head), query = jnp.broadcast_arrays(sample, head), jnp.broadcast_to(query, (*batch, *heads, num_queries))
    return jnp.stack(threefry2x32_p.bind(sample, head, query, query), -1)


def _count(number: int) -> Array:
    return jnp.arange(number, dtype=jnp.uint32)


def words_from_key(words: Array | None, first_key: Array) -> Array | None:
    """The words with which keys that begin with the given one draw as if they began with 0."""
    return None if words is None else words.at[..., 0].add(first_key.astype(words.dtype))


def _kept(words: Array, keys: Tile, rate: float) -> Array:
    """Which weights of the keys of a tile dropout keeps, from the words of its queries."""
    first, second = jnp.split(words, 2, axis=-1)
    key = jnp.asarray(keys.start, jnp.uint32) + _iota(jnp.uint32, 4, keys.size)
    # The hash lowbias32 (Wellons, "hash-prospector"), with the second word between its rounds, and without what follows
    # them, which leaves the upper bits as they are.
    mixed = first + key
    mixed = (mixed ^ (mixed >> 16)) * np.uint32(0x7FEB352D) ^ second
    mixed = (mixed ^ (mixed >> 15)) * np.uint32(0x846CA68B)
    return mixed >= np.uint32(min(round(rate * 2**32), 2**32 - 1))
