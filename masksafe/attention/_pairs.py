"""Which pairs of a query and a key are masked.

A query and a key have numbers: an index, a position and a segment. One function compares these, `_may_see`. It says
whether a pair is unmasked; and for a tile of queries and a tile of keys, whose numbers lie between two bounds, whether
any of their pairs may be unmasked. So structural masks are stored as arrays over queries and over keys, a mask of pairs
exists for one block at a time, and tiles without unmasked pairs are skipped. Arrays over pairs and functions are
evaluated pair by pair.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from masksafe._core.masks import both, either
from masksafe._core.run_time import any_of, largest_of, unknown
from masksafe._core.sharding import vary_with
from masksafe._core.tiles import Tile, Tiles, add_to_slice, once_if, slice_at, whole
from masksafe._core.typing import Array
from masksafe.attention import _dropout
from masksafe.attention._mods import Indices, Mod, mask_of
from masksafe.attention._plan import Plan, Reach


class Pairs(NamedTuple):
    """The masks of pairs, and other data of queries and keys. None masks nothing.

    An array has the axes that `AXES` declares: b of samples, k of key heads, g of the query heads of each, t of queries
    and s of keys. Along b, and in arrays over pairs along all of them, it may have size 1, where it broadcasts.
    """

    query_index: Array | None = None  # the global index; None on one device
    key_index: Array | None = None
    query_positions: Array | None = None  # None for the index
    key_positions: Array | None = None
    query_lengths: Array | None = None
    key_lengths: Array | None = None
    query_segments: Array | None = None
    key_segments: Array | None = None
    allowed: Array | None = None
    bias: Array | None = None
    score_mod: Mod | None = None
    mask_mod: Mod | None = None
    samples: Array | None = None  # their indices, for mods
    heads: Array | None = None  # likewise
    words: Array | None = None  # random ones, for dropout
    bad_queries: Array | None = None  # the logits of their unmasked pairs are NaN, as are those of bad keys
    bad_keys: Array | None = None
    unneeded: Array | None = None  # queries without a part in the reverse pass; in the plain form masked ones
    showing: Array | None = None  # queries in whose logits a bad tangent shows; None: all

    def at(self, places: dict[str, Tile]) -> "Pairs":
        """With the parts of the arrays at the places."""
        arrays = {name: x for name in AXES if (x := getattr(self, name)) is not None}
        parts: Any = {name: cut(x, AXES[name], places) for name, x in arrays.items()}
        return self._replace(**parts)

    def has_only(self, *names: str) -> bool:
        """Whether only the reach and these fields mask pairs."""
        return all(getattr(self, name) is None for name in _MASKS if name not in names)


OVER_PAIRS = "bkgts"
AXES = {
    **dict.fromkeys(("query_index", "query_positions", "query_segments"), "bt"),
    **dict.fromkeys(("key_index", "key_positions", "key_segments"), "bs"),
    **dict.fromkeys(("query_lengths", "key_lengths", "samples"), "b"),
    **dict.fromkeys(("allowed", "bias"), OVER_PAIRS),
    **dict.fromkeys(("bad_queries", "unneeded", "showing"), "bkgt"),
    "bad_keys": "bks",
    "heads": "bkg",
    "words": "bkgtw",
}
_MASKS = (
    *("query_index", "key_index", "query_positions", "key_positions", "query_lengths", "key_lengths"),
    *("query_segments", "allowed", "bias", "mask_mod"),
)


def cut(x: Array, axes: str, places: dict[str, Tile]) -> Array:
    """The part of `x` at the places; an axis of size 1, or without a place, stays whole."""
    return slice_at(x, _places_in(x, axes, places))


def add_at(x: Array, addend: Array, places: dict[str, Tile], names: str = OVER_PAIRS) -> Array:
    """`x`, an array over pairs, plus `addend` at the places, summed over the axes along which `x` broadcasts."""
    axes = [a for a in range(addend.ndim) if x.shape[a] == 1 < addend.shape[a]]
    summed = jnp.sum(addend, axes, keepdims=True) if axes else addend
    return add_to_slice(x, summed.astype(x.dtype), _places_in(x, names, places))


def _places_in(x: Array, axes: str, places: dict[str, Tile]) -> dict[int, tuple[Any, int]]:
    at = {i: places[axis] for i, axis in enumerate(axes) if axis in places and x.shape[i] != 1}
    return {i: (tile.start, tile.size) for i, tile in at.items()}


def by_heads(x: Array | None, num_key_heads: int) -> Array | None:
    """An array over pairs, `[..., N or 1, T, S]` to `[..., K, G, T, S]` with size 1 where it broadcasts."""
    if x is None:
        return None
    heads = (1, 1) if x.shape[-3] == 1 else (num_key_heads, x.shape[-3] // num_key_heads)
    return x.reshape(*x.shape[:-3], *heads, *x.shape[-2:])


def by_user(x: Array, num_key_heads: int, *sizes: int) -> Array:
    """`[B, K, G, T, S]` up to broadcasting to `[B, N or 1, T, S]`, the last three of which are `sizes`."""
    heads = (1, 1) if x.shape[1] * x.shape[2] == 1 else (num_key_heads, sizes[0] // num_key_heads)
    x = jnp.broadcast_to(x, (x.shape[0], *heads, *sizes[1:]))
    return x.reshape(x.shape[0], -1, *sizes[1:])


def by_key_head(x: Array, num_key_heads: int) -> Array:
    """`[..., T, N]` to `[..., K, G, T]`."""
    return jnp.moveaxis(x.reshape(*x.shape[:-1], num_key_heads, x.shape[-1] // num_key_heads), -3, -1)


def by_query_head(x: Array) -> Array:
    """`[B, K, G, T]` to `[B, T, N]`."""
    x = jnp.moveaxis(x, 3, 1)
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3])


# What is masked.


class _Numbers(NamedTuple):
    """The lowest and the highest of each number of a query or a key, or of a tile of them; None if it has none."""

    index: Any
    position: Any
    segment: Any
    length: Any  # of the sample


def _may_see(reach: Reach | None, q: _Numbers, k: _Numbers) -> Any:
    conditions = [numbers.index[0] < numbers.length for numbers in (q, k) if numbers.length is not None]
    if reach is not None:
        left, right = reach
        conditions.append(k.position[0] <= q.position[1] + right)
        if left is not None:
            conditions.append(k.position[1] >= q.position[0] - left)
    if q.segment is not None:
        is_pair = q.segment[0] is q.segment[1]
        same = (
            (q.segment[0] == k.segment[0],) if is_pair else (q.segment[0] <= k.segment[1], k.segment[0] <= q.segment[1])
        )
        conditions += same
    return functools.reduce(both, conditions, None)


def _numbers(
    plan: Plan,
    pairs: Pairs,
    index: Callable[[str], Any],
    bounds: Callable[[Array, str], Any],
    place: Callable[..., Any],
) -> tuple[_Numbers, _Numbers]:
    """The numbers of queries and of keys that matter: the bounds of each array, on the axis of queries or keys."""

    def numbers_of(side: str, axis: str) -> _Numbers:
        given = {name: getattr(pairs, f"{side}_{name}") for name in ("index", "positions", "segments", "lengths")}

        def at_place(found: tuple[Any, Any]) -> tuple[Any, Any]:
            lowest = place(found[0], axis)
            return lowest, lowest if found[1] is found[0] else place(found[1], axis)

        positions, segments, length = (given[name] for name in ("positions", "segments", "lengths"))
        own = None
        if length is not None or (plan.reach is not None and positions is None):
            own = at_place(index(axis) if given["index"] is None else bounds(given["index"], axis))
        return _Numbers(
            own,
            own if positions is None or plan.reach is None else at_place(bounds(positions, axis)),
            None if segments is None else at_place(bounds(segments, axis)),
            None if length is None else place(length[:, None], axis),
        )

    return numbers_of("query", "t"), numbers_of("key", "s")


def unmasked(plan: Plan, own: Pairs, places: dict[str, Tile]) -> Array | None:
    """Which pairs of some queries and keys are unmasked, up to broadcasting; None: all. `own` are these pairs."""

    def place(x: Array, axis: str) -> Array:
        return x[:, None, None, :, None] if axis == "t" else x[:, None, None, None, :]

    def same(x: Array, _: str) -> tuple[Array, Array]:
        return x, x

    def index(axis: str) -> tuple[Array, Array]:
        return same(_index(places[axis])[None], axis)

    queries, keys = _numbers(plan, own, index, same, place)
    conditions = [
        _may_see(plan.reach, queries, keys),
        own.allowed,
        None if own.mask_mod is None else mask_of(own.mask_mod, _indices(own, places)),
        None if own.bias is None else own.bias != -jnp.inf,  # True for a NaN, which must stay visible
        ~own.unneeded[..., None] if plan.is_plain and own.unneeded is not None else None,
        *(place((_index(t) >= t.first)[None], axis) for axis, t in places.items() if axis in "ts" and t.is_ragged),
    ]
    return functools.reduce(both, conditions, None)


def _index(tile: Tile) -> Array:
    index = lax.iota(jnp.int32, tile.size) if isinstance(tile.size, int) else jnp.arange(tile.size, dtype=jnp.int32)
    return index if isinstance(tile.start, int) and tile.start == 0 else tile.start + index


def _indices(own: Pairs, places: dict[str, Tile]) -> Indices:
    """The arguments of a mod."""
    assert own.samples is not None
    assert own.heads is not None
    number = own.samples.shape[0]

    def positions(side: str, tile: Tile) -> Array:
        given = [getattr(own, f"{side}_{name}") for name in ("positions", "index")]
        x = next((x for x in given if x is not None), None)
        return jnp.broadcast_to(_index(tile)[None] if x is None else x, (number, tile.size))

    return own.samples, own.heads[0], positions("query", places["t"]), positions("key", places["s"])


class Block(NamedTuple):
    """The data of the pairs of some queries and keys, `[B, K, G, queries, keys]` up to broadcasting."""

    mask: Array | None  # where pairs are unmasked; None: everywhere
    bias: Array | None
    is_bad: Array | None
    kept: Array | None  # where dropout keeps a weight; None: everywhere
    shows: Array | None  # where a bad tangent shows; None: everywhere
    indices: Indices | None  # the arguments of a mod
    score_mod: Mod | None
    places: dict[str, Tile]  # in arrays over pairs

    def with_bad_keys(self, bad_keys: Array) -> "Block":
        """The block, with these keys `[B, K, keys]` bad as well."""
        return self._replace(is_bad=either(self.is_bad, bad_keys[:, :, None, None]))


def block_of(plan: Plan, pairs: Pairs, places: dict[str, Tile]) -> Block:
    """The block at some places: tiles of queries (t) and of keys (s), of some samples (b) and key heads (k)."""
    own = pairs.at(places)
    is_bad = None if own.bad_queries is None else own.bad_queries[..., None]
    kept = None
    if own.words is not None:
        key_index = _index(places["s"])[None] if own.key_index is None else own.key_index
        kept = _dropout.kept(own.words, key_index[:, None, None, None], plan.dropout_rate)
    indices = None if own.samples is None else _indices(own, places)
    mask = unmasked(plan, own, places)
    shows = None if own.showing is None else own.showing[..., None]
    block = Block(mask, own.bias, is_bad, kept, shows, indices, own.score_mod, places)
    return block if own.bad_keys is None else block.with_bad_keys(own.bad_keys)


# Tiles without unmasked pairs are skipped. Where numbers are known while tracing, the table is an array of NumPy.


def masks_any(plan: Plan, pairs: Pairs) -> bool:
    """Whether a pair may be masked."""
    return plan.reach is not None or not pairs.has_only("query_index", "key_index", "query_positions", "key_positions")


def static_reach(plan: Plan, pairs: Pairs) -> Reach | None:
    """The reach, if it compares indices; else None."""
    arrays = pairs.query_index, pairs.key_index, pairs.query_positions, pairs.key_positions
    return plan.reach if all(x is None for x in arrays) else None


def unmasked_tiles(plan: Plan, pairs: Pairs, queries: Tiles, keys: Tiles) -> Any:
    """Which tiles of queries may see which tiles of keys, `[queries.number, keys.number]`; None: all."""
    tiles = {"t": queries, "s": keys}

    def bounds(x: Array, axis: str) -> tuple[Array, Array]:
        by_tile = tiles[axis].by_tile(unknown(x), 1)
        return by_tile.min(2), by_tile.max(2)

    def index(axis: str) -> tuple[Any, Any]:
        length, size = tiles[axis].length, tiles[axis].size
        starts = np.arange(tiles[axis].number, dtype=np.int32)[None] * size
        return starts, np.minimum(starts + size, length) - 1

    def place(x: Any, axis: str) -> Any:
        return x[:, :, None] if axis == "t" else x[:, None]

    table = _may_see(plan.reach, *_numbers(plan, pairs, index, bounds, place))
    if table is not None:
        table = table[0] if table.shape[0] == 1 else any_of(table, 0)
        table = (np if isinstance(table, np.ndarray) else jnp).broadcast_to(table, (queries.number, keys.number))
    if pairs.unneeded is not None:
        needed = any_of(queries.by_tile(any_of(~pairs.unneeded, (0, 1, 2)), 0), 1)[:, None]
        table = both(table, jnp.broadcast_to(needed, (queries.number, keys.number)))
    arrays = [x for x in (pairs.allowed, pairs.bias) if x is not None]
    if not arrays and pairs.mask_mod is None:
        return table
    by_pairs = Pairs(*(x if name in _BY_PAIRS else None for name, x in pairs._asdict().items()))

    def on_queries(i: Any) -> Array:
        mask = unmasked(plan._replace(reach=None), *_at(by_pairs, t=queries.tile(i), s=whole(keys.length)))
        assert mask is not None
        by_key = any_of(mask, (0, 1, 2, 3))
        return any_of(keys.by_tile(by_key, 0), 1) if by_key.shape[0] > 1 else by_key

    are_alike = pairs.mask_mod is None and all(x.shape[3] == 1 for x in arrays)
    found = on_queries(jnp.zeros((), jnp.int32))[None] if are_alike else queries.map(on_queries)
    return both(table, jnp.broadcast_to(found, (queries.number, keys.number)))


_BY_PAIRS = (
    *("allowed", "bias", "mask_mod", "samples", "heads"),
    *("query_positions", "key_positions", "query_index", "key_index"),
)


def _at(pairs: Pairs, **places: Tile) -> tuple[Pairs, dict[str, Tile]]:
    return pairs.at(places), places


# What queries see of all keys, for the contract around a kernel. Where only the reach and lengths mask, a query sees
# an interval of keys, and no array is as large as all pairs.


def all_unmasked(plan: Plan, pairs: Pairs, num_queries: Any, num_keys: Any) -> Array | None:
    """Which pairs are unmasked, `[B, K, G, T, S]` up to broadcasting; None for all."""
    return unmasked(plan, *_at(pairs, t=whole(num_queries), s=whole(num_keys)))


def are_intervals(pairs: Pairs) -> bool:
    """Whether each query sees an interval of keys."""
    return pairs.has_only("query_lengths", "key_lengths")


def sees_any(plan: Plan, pairs: Pairs, num_queries: int, num_keys: int) -> Any:
    """Which queries see any key, `[B, K, G, T]` up to broadcasting; None: all."""
    if not are_intervals(pairs):
        mask = all_unmasked(plan, pairs, num_queries, num_keys)
        return None if mask is None else any_of(jnp.broadcast_to(mask, (*mask.shape[:3], num_queries, num_keys)), -1)
    left, right = plan.reach or (None, num_keys)
    t = np.arange(num_queries, dtype=np.int32)[None]
    first: Any = np.zeros_like(t) if left is None else np.maximum(0, t - left)
    end: Any = np.minimum(num_keys, t + right + 1)
    if pairs.key_lengths is not None:
        end = jnp.minimum(end, pairs.key_lengths[:, None])
    sees = first < end
    if pairs.query_lengths is not None:
        sees = sees & (t < pairs.query_lengths[:, None])
    return None if isinstance(sees, np.ndarray) and sees.all() else jnp.asarray(sees)[:, None, None]


def may_be_seen(plan: Plan, pairs: Pairs, num_queries: int, num_keys: int) -> Any:
    """Which keys lie within the lengths and the reach of a query, `[B, S]`; None: all."""
    left, right = static_reach(plan, pairs) or (None, num_keys)
    s = np.arange(num_keys, dtype=np.int32)[None]
    found: Any = (s < num_queries + right) & (True if left is None else s >= -left)
    if pairs.key_lengths is not None:
        found = found & (s < pairs.key_lengths[:, None])
    return None if isinstance(found, np.ndarray) and found.all() else jnp.asarray(found)


def see_bad(plan: Plan, pairs: Pairs, num_queries: int, num_keys: int) -> Array:
    """Which queries are bad or see something bad, `[B, K, G, T]`. Pairs are compared only if anything is bad."""
    bad_queries, bad_keys = pairs.bad_queries, pairs.bad_keys
    assert bad_queries is not None
    assert bad_keys is not None
    if are_intervals(pairs):
        seen = may_be_seen(plan, pairs, num_queries, num_keys)
        bad_keys = bad_keys if seen is None else bad_keys & seen[:, None]
        left, right = plan.reach or (None, None)
        return bad_queries | _any_within(bad_keys, num_queries, left, right)[:, :, None]
    is_bad = bad_keys[:, :, None, None]
    if pairs.bias is not None:
        is_bad = is_bad | ~(jnp.isfinite(pairs.bias) | (pairs.bias == -jnp.inf))

    def add(found: Array) -> Array:
        mask = all_unmasked(plan, pairs, num_queries, num_keys)
        return found | any_of(is_bad if mask is None else is_bad & mask, -1)

    return once_if(any_of(is_bad), add, vary_with(bad_queries, (pairs, is_bad)))


def seen_by(plan: Plan, pairs: Pairs, num_queries: int, num_keys: int, queries: Array) -> Array:
    """Which keys some of these queries `[B, K, G, T]` see, `[B, K, S]`."""
    if are_intervals(pairs):
        left, right = plan.reach or (None, None)
        return _any_within(any_of(queries, 2), num_keys, right, left)

    def seen(_: Array) -> Array:
        mask = all_unmasked(plan, pairs, num_queries, num_keys)
        found = queries[..., None] if mask is None else queries[..., None] & mask
        return jnp.broadcast_to(any_of(found, (2, 3)), none.shape)

    none = jnp.broadcast_to(jnp.zeros_like(queries[:, :, 0, :1]), (*queries.shape[:2], num_keys))
    return once_if(any_of(queries), seen, vary_with(none, (pairs, queries)))


def marked_bias(plan: Plan, pairs: Pairs, num_queries: int, num_keys: int, bad: Array, d_bias: Array) -> Array:
    """The cotangent of a bias `[B, N, T, S]`, or 1s, NaN where a bad query `[B, K, G, T]` has an unmasked pair."""

    def marked(d_bias: Array) -> Array:
        mask = all_unmasked(plan, pairs, num_queries, num_keys)
        found = bad[..., None] if mask is None else bad[..., None] & mask
        found = jnp.broadcast_to(found, (*bad.shape, num_keys)).reshape(bad.shape[0], -1, num_queries, num_keys)
        shared = [axis for axis, size in enumerate(d_bias.shape) if size == 1]
        return jnp.where(any_of(found, shared, keepdims=True), jnp.nan, d_bias)

    return once_if(any_of(bad), marked, vary_with(d_bias, (pairs, bad)))


def _any_within(bad: Array, number: int, before: int | None, behind: int | None) -> Array:
    """For each of `number` places, whether a True is at most `before` before it and at most `behind` after it."""
    if before is None and behind is None:
        return any_of(bad, -1, keepdims=True)
    length, along_time = bad.shape[-1], (*(1,) * (bad.ndim - 1), -1)
    place, index = (np.arange(n, dtype=np.int32).reshape(along_time) for n in (number, length))
    first = np.maximum(place - (number if before is None else before), 0)
    end = np.minimum(place + (length if behind is None else behind), length - 1)
    if behind is None:
        return largest_of(jnp.where(bad, index + 1, 0), -1, keepdims=True) > first
    if before is None:
        return length - largest_of(jnp.where(bad, length - index, 0), -1, keepdims=True) <= end
    last = lax.cummax(jnp.where(bad, index, -1), axis=bad.ndim - 1)
    return (last[..., np.maximum(end, 0).ravel()] >= first) & (end >= 0)
