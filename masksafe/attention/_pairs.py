"""Which pairs of a query and a key are masked.

A query and a key have numbers: an index, a position and a segment. One function compares these, `_may_see`. It says
whether a pair is unmasked; and for a tile of queries and a tile of keys, whose numbers lie between two bounds, whether
any of their pairs may be unmasked. So structural masks are stored as arrays over queries and over keys, a mask of pairs
exists for one block at a time, and tiles without unmasked pairs are skipped. Arrays over pairs and functions are
evaluated pair by pair.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from masksafe._core.masks import both
from masksafe._core.run_time import any_of, largest_of
from masksafe._core.sharding import vary_with
from masksafe._core.tiles import Tile, add_to_slice, once_if, slice_at, whole, with_slice
from masksafe._core.typing import Array
from masksafe.attention import _dropout
from masksafe.attention._mods import Indices, Mod, mask_of
from masksafe.attention._plan import Operands, Plan, Reach


class Side(NamedTuple):
    """The numbers of queries or of keys, `[B or 1, time]`, and the lengths, `[B or 1]`; None for what is not given.

    Or, in their place, what belongs to them: the lowest and the highest of each in a tile, or the names of axes.
    """

    index: Any = None  # the global index; None on one device
    position: Any = None  # None for the index
    segment: Any = None
    length: Any = None


class Pairs(NamedTuple):
    """The masks of pairs, and other data of queries and keys. None masks nothing.

    An array has the axes that `AXES` declares: b of samples, k of key heads, g of the query heads of each, t of queries
    and s of keys. Along b, and in arrays over pairs along all of them, it may have size 1, where it broadcasts.
    """

    queries: Side = Side()
    keys: Side = Side()
    allowed: Any = None
    bias: Any = None
    score_mod: Mod | None = None
    mask_mod: Mod | None = None
    samples: Any = None  # their indices, for mods
    heads: Any = None  # likewise
    words: Any = None  # random ones, for dropout
    unneeded: Any = None  # in the plain form: queries that are masked
    showing: Any = None  # in the plain form: queries in whose logits a bad tangent shows; None: all

    def at(self, places: dict[str, Tile]) -> "Pairs":
        """With the slices of the arrays at the places."""

        def own(x: Any, axes: str | None) -> Any:
            return x if x is None or axes is None else cut(x, axes, places)

        return jax.tree.map(own, self, AXES, is_leaf=lambda x: x is None or isinstance(x, Mod))

    @property
    def have_bounds_alone(self) -> bool:
        """Whether no mask has to be evaluated pair by pair: the bounds of two tiles tell what is masked."""
        return self.allowed is None and self.bias is None and self.mask_mod is None

    @property
    def mask_nothing(self) -> bool:
        """Whether at most the reach masks pairs."""
        lengths = self.queries.length, self.keys.length
        return self.have_bounds_alone and self.queries.segment is None and all(x is None for x in lengths)

    @property
    def compare_indices(self) -> bool:
        """Whether the reach compares the indices in the arrays."""
        return all(x is None for side in (self.queries, self.keys) for x in side[:2])

    @property
    def are_intervals(self) -> bool:
        """Whether each query sees an interval of keys: the reach compares indices, and else there are lengths alone."""
        return self.have_bounds_alone and self.compare_indices and self.queries.segment is None

    @property
    def have_no_arrays(self) -> bool:
        """Whether the reach alone, which compares indices, masks pairs."""
        return self.mask_nothing and self.compare_indices


OVER_PAIRS = "bkgts"
AXES = Pairs(
    queries=Side("bt", "bt", "bt", "b"),
    keys=Side("bs", "bs", "bs", "b"),
    allowed=OVER_PAIRS,
    bias=OVER_PAIRS,
    samples="b",
    heads="bkg",
    words="bkgtw",
    unneeded="bkgt",
    showing="bkgt",
)


def cut(x: Array, axes: str, places: dict[str, Tile]) -> Array:
    """The part of `x` at the places; an axis of size 1, or without a place, stays whole."""
    return slice_at(x, _places_in(x, axes, places))


def put(x: Array, new: Array, axes: str, places: dict[str, Tile]) -> Array:
    """`x` with `new`, in its dtype, as the slice at the places."""
    return with_slice(x, new.astype(x.dtype), _places_in(x, axes, places))


def add_at(x: Array, addend: Array, names: str, places: dict[str, Tile]) -> Array:
    """`x` plus `addend` at the places, summed over the axes along which `x` broadcasts."""
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


def with_bias(x: Operands, pairs: Pairs) -> Pairs:
    """The pairs with the bias in the layout of the blocks, and with the arrays that `score_mod` captured.

    An executor does this itself, so that the residual is the user's own array: a new array with a NaN under the mask
    would be an error with `jax_debug_nans`.
    """
    mod = None if pairs.score_mod is None else pairs.score_mod.with_captured(x.captured)
    return pairs._replace(bias=by_heads(x.bias, x.k.shape[2]), score_mod=mod)


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


def _may_see(reach: Reach | None, q: Side, k: Side) -> Any:
    """Whether a query may see a key, of numbers that lie between two bounds; None: it does."""
    conditions = [side.index[0] < side.length for side in (q, k) if side.length is not None]
    if reach is not None:
        left, right = reach
        conditions.append(k.position[0] <= (q.position[1] + right if right else q.position[1]))
        if left is not None:
            conditions.append(k.position[1] >= (q.position[0] - left if left else q.position[0]))
    if q.segment is not None:
        conditions.append(q.segment[0] <= k.segment[1])
        conditions.append(k.segment[0] <= q.segment[1])
    return functools.reduce(both, conditions, None)


def unmasked(plan: Plan, own: Pairs, places: dict[str, Tile]) -> Array | None:
    """Which pairs of some queries and keys are unmasked, up to broadcasting; None: all. `own` are these pairs."""

    def along_time(x: Array, axis: str) -> Array:
        return x[:, None, None, :, None] if axis == "t" else x[:, None, None, None, :]

    def numbers(side: Side, axis: str) -> Side:
        index = None
        if side.length is not None or (plan.reach is not None and side.position is None):
            index = _index(places[axis])[None] if side.index is None else side.index
        position = index if side.position is None else side.position
        index, position = (None if x is None else (along_time(x, axis),) * 2 for x in (index, position))
        return Side(index, position, length=None if side.length is None else along_time(side.length[:, None], axis))

    queries, keys = numbers(own.queries, "t"), numbers(own.keys, "s")
    same = None
    if own.queries.segment is not None:
        same = along_time(own.queries.segment, "t") == along_time(own.keys.segment, "s")
    conditions = [
        _may_see(plan.reach, queries, keys),
        same,
        own.allowed,
        None if own.mask_mod is None else mask_of(own.mask_mod, _indices(own, places)),
        None if own.bias is None else own.bias != -jnp.inf,  # True for a NaN, which must stay visible
        None if own.unneeded is None else ~own.unneeded[..., None],
        *(along_time((_index(t) >= t.first)[None], axis) for axis, t in places.items() if axis in "ts" and t.is_ragged),
    ]
    return functools.reduce(both, conditions, None)


def may_see(plan: Plan, own: Pairs, places: dict[str, Tile]) -> Array | None:
    """Whether any query of a tile may see any key of one; None: it may, as far as the reach alone tells."""
    if own.have_no_arrays:
        return None

    def bounds(side: Side, axis: str) -> Side:
        def of(x: Array | None) -> Any:
            return None if x is None else (x.min(1), x.max(1))

        first = jnp.asarray(places[axis].start, jnp.int32)[None]
        index = (first, first + (places[axis].size - 1)) if side.index is None else of(side.index)
        position = index if side.position is None else of(side.position)
        return Side(index, position, of(side.segment), side.length)

    found = _may_see(plan.reach, bounds(own.queries, "t"), bounds(own.keys, "s"))
    found = None if found is None else any_of(found)
    if own.have_bounds_alone:
        return found
    no_bounds = {"length": None, "segment": None}
    pair_by_pair = own._replace(queries=own.queries._replace(**no_bounds), keys=own.keys._replace(**no_bounds))
    mask = unmasked(plan._replace(reach=None), pair_by_pair, places)
    return both(found, None if mask is None else any_of(mask))


def _index(tile: Tile) -> Array:
    index = lax.iota(jnp.int32, tile.size) if isinstance(tile.size, int) else jnp.arange(tile.size, dtype=jnp.int32)
    return index if isinstance(tile.start, int) and tile.start == 0 else tile.start + index


def _indices(own: Pairs, places: dict[str, Tile]) -> Indices:
    """The arguments of a mod."""
    assert own.samples is not None
    assert own.heads is not None
    number = own.samples.shape[0]

    def positions(side: Side, tile: Tile) -> Array:
        x = side.index if side.position is None else side.position
        return jnp.broadcast_to(_index(tile)[None] if x is None else x, (number, tile.size))

    return own.samples, own.heads[0], positions(own.queries, places["t"]), positions(own.keys, places["s"])


class Block(NamedTuple):
    """The data of the pairs of some queries and keys, `[B, K, G, queries, keys]` up to broadcasting."""

    mask: Array | None  # where pairs are unmasked; None: everywhere
    bias: Array | None
    is_bad: Array | None
    kept: Array | None  # where dropout keeps a weight; None: everywhere
    shows: Array | None  # where a bad tangent shows; None: everywhere
    indices: Indices | None  # the arguments of a mod
    score_mod: Mod | None


def block_of(plan: Plan, own: Pairs, places: dict[str, Tile], is_bad: Array | None = None) -> Block:
    """The block at some places: tiles of queries (t) and of keys (s), of some samples (b) and key heads (k).

    `own` are the pairs at these places.
    """
    kept = None
    if own.words is not None:
        key_index = _index(places["s"])[None] if own.keys.index is None else own.keys.index
        kept = _dropout.kept(own.words, key_index[:, None, None, None], plan.dropout_rate)
    indices = None if own.samples is None else _indices(own, places)
    shows = None if own.showing is None else own.showing[..., None]
    return Block(unmasked(plan, own, places), own.bias, is_bad, kept, shows, indices, own.score_mod)


def masks_any(plan: Plan, pairs: Pairs) -> bool:
    """Whether a pair may be masked."""
    return plan.reach is not None or not pairs.mask_nothing


def static_reach(plan: Plan, pairs: Pairs) -> Reach | None:
    """The reach, if it compares indices; else None."""
    return plan.reach if pairs.compare_indices else None


# What queries see of all keys, for the contract around a kernel. Where only the reach and lengths mask, a query sees
# an interval of keys, and no array is as large as all pairs.


def all_unmasked(plan: Plan, pairs: Pairs, num_queries: Any, num_keys: Any) -> Array | None:
    """Which pairs are unmasked, `[B, K, G, T, S]` up to broadcasting; None for all."""
    return unmasked(plan, pairs, {"t": whole(num_queries), "s": whole(num_keys)})


def sees_any(plan: Plan, pairs: Pairs, num_queries: int, num_keys: int) -> Any:
    """Which queries see any key, `[B, K, G, T]` up to broadcasting; None: all."""
    if not pairs.are_intervals:
        mask = all_unmasked(plan, pairs, num_queries, num_keys)
        return None if mask is None else any_of(jnp.broadcast_to(mask, (*mask.shape[:3], num_queries, num_keys)), -1)
    left, right = plan.reach or (None, num_keys)
    t = np.arange(num_queries, dtype=np.int32)[None]
    first: Any = np.zeros_like(t) if left is None else np.maximum(0, t - left)
    end: Any = np.minimum(num_keys, t + right + 1)
    if pairs.keys.length is not None:
        end = jnp.minimum(end, pairs.keys.length[:, None])
    sees = first < end
    if pairs.queries.length is not None:
        sees = sees & (t < pairs.queries.length[:, None])
    return None if isinstance(sees, np.ndarray) and sees.all() else jnp.asarray(sees)[:, None, None]


def may_be_seen(plan: Plan, pairs: Pairs, num_queries: int, num_keys: int) -> Any:
    """Which keys lie within the lengths and the reach of a query, `[B, S]`; None: all."""
    left, right = static_reach(plan, pairs) or (None, num_keys)
    s = np.arange(num_keys, dtype=np.int32)[None]
    found: Any = (s < num_queries + right) & (True if left is None else s >= -left)
    if pairs.keys.length is not None:
        found = found & (s < pairs.keys.length[:, None])
    return None if isinstance(found, np.ndarray) and found.all() else jnp.asarray(found)


def see_bad(plan: Plan, pairs: Pairs, bad_queries: Array, bad_keys: Array) -> Array:
    """Which queries `[B, K, G, T]` are bad or see a bad key `[B, K, S]` or bias.

    Pairs are compared only if anything is bad.
    """
    num_queries, num_keys = bad_queries.shape[3], bad_keys.shape[2]
    if pairs.are_intervals:
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
    if pairs.are_intervals:
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
