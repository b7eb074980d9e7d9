"""Which outputs see a bad value, and which values are seen by a bad cotangent; by column, without pairs x columns.

A bad value makes one column of an output NaN, and only that of the queries that see it. Where every query sees the keys
up to an end of its own, the first bad value of a column tells. For other masks, 32 columns at a time are the bits of a
word, and the words of all keys that a query sees are united.
"""

import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax

from masksafe._core import platforms
from masksafe._core.sharding import has_symbolic_size
from masksafe._core.tiles import Tile
from masksafe._core.typing import Array
from masksafe._core.unfolded import any_of
from masksafe.attention._heads import keys_by_problem, keys_by_user, queries_by_problem, queries_by_user
from masksafe.attention._mask import Pairs, unmasked


def see_bad_values(q: Array, v: Array, pairs: Pairs) -> Array:
    """Where an output sees a bad value, `[B, T, N, width of v]`, for arrays in the user's layout."""
    num_keys = v.shape[1]
    bad = keys_by_problem(~jnp.isfinite(v))
    like = queries_by_problem(jnp.zeros_like(q[..., :1], jnp.bool_), v.shape[2])  # [B, K, G, T, 1]
    if _all_see_up_to_an_end(pairs):
        if pairs.end_key is None:
            return queries_by_user(like | any_of(bad, 2)[:, :, None, None])
        index = lax.broadcasted_iota(jnp.int32, bad.shape, 2)
        first_bad = jnp.min(jnp.where(bad, index, num_keys), 2)
        return queries_by_user(like | (first_bad[:, :, None, None] < _ends(pairs, num_keys)))
    words = _as_words(bad)  # [B, K, words, S]
    none = words[:, :, :, None, :1] & like[:, :, None, ..., 0].astype(words.dtype)  # [B, K, words, G, T]

    def unite(united: Array) -> Array:
        mask = _of_all_pairs(pairs, q.shape[1], num_keys)
        return united | _united(jnp.where(mask, words[:, :, :, None, None], 0), (5,))

    return queries_by_user(_as_columns(_if_any(bad, unite, none, num_keys), bad.shape[-1]))


def seen_by_bad_cotangents(d_out: Array, v: Array, pairs: Pairs) -> Array:
    """Where a value is seen by a live query with a bad cotangent, `[B, S, K, width of v]`; arrays as the user's."""
    num_queries, num_keys = d_out.shape[1], v.shape[1]
    assert pairs.live_queries is not None
    bad = ~jnp.isfinite(queries_by_problem(d_out, v.shape[2])) & pairs.live_queries[..., None]
    like = keys_by_problem(jnp.zeros_like(v[..., :1], jnp.bool_))  # [B, K, S, 1]
    if _all_see_up_to_an_end(pairs):
        if pairs.end_key is None:
            return keys_by_user(like | any_of(bad, (2, 3))[:, :, None])
        last_end = jnp.max(jnp.where(bad, _ends(pairs, num_keys), 0), (2, 3))
        index = lax.broadcasted_iota(jnp.int32, like.shape, 2)
        return keys_by_user(like | (index < last_end[:, :, None]))
    words = _as_words(bad)  # [B, K, G, words, T]
    none = words[:, :, 0, :, :1] & like[:, :, None, :, 0].astype(words.dtype)  # [B, K, words, S]

    def unite(united: Array) -> Array:
        mask = _of_all_pairs(pairs, num_queries, num_keys)
        return united | _united(jnp.where(mask, jnp.swapaxes(words, 2, 3)[..., None], 0), (3, 4))

    return keys_by_user(_as_columns(_if_any(bad, unite, none, num_queries * words.shape[2]), bad.shape[-1]))


def _all_see_up_to_an_end(pairs: Pairs) -> bool:
    others = pairs.first_key, pairs.end_position, pairs.query_segments, pairs.allowed, pairs.bias, pairs.mask_mod
    return all(x is None for x in others)


def _ends(pairs: Pairs, num_keys: int) -> Array | int:
    """`[B, 1, 1, T, 1]`, or the same for all queries."""
    return num_keys if pairs.end_key is None else pairs.end_key[:, None, None, :, None]


def _of_all_pairs(pairs: Pairs, num_queries: int, num_keys: int) -> Array:
    """Where pairs are unmasked, `[B, K, 1, G, T, S]` up to broadcasting."""
    mask = unmasked(pairs, Tile(0, num_queries, 0, False), Tile(0, num_keys, 0, False))
    assert mask is not None  # else all keys are seen
    return mask[:, :, None]


def _if_any(bad: Array, unite: Callable[[Array], Array], none: Array, number: int) -> Array:
    """`unite(none)`, of `number` words per word of the result; maybe only if anything is bad."""
    if has_symbolic_size(none) or none.size * number <= platforms.UNCHECKED_LOOK_UPS:
        return unite(none)
    # Not a loop, as in `once_if`: under vmap the words are united always, as few are.
    marks: Array = lax.cond(any_of(bad), unite, lambda none: none, none)
    return marks


def _united(words: Array, axes: tuple[int, ...]) -> Array:
    united: Array = lax.reduce(words, np.uint32(0), lax.bitwise_or, axes)
    return united


_BITS = 32


def _as_words(bits: Array) -> Array:
    """Booleans `[..., n, columns]` as numbers `[..., words, n]` whose bits they are."""
    width = bits.shape[-1]
    number = math.ceil(width / _BITS)
    padded = jnp.pad(bits, [(0, 0)] * (bits.ndim - 1) + [(0, number * _BITS - width)])
    by_word = padded.reshape(*bits.shape[:-1], number, _BITS).astype(jnp.uint32)
    words = jnp.sum(by_word << _positions(by_word.ndim), -1, dtype=jnp.uint32)
    return jnp.moveaxis(words, -1, -2)


def _as_columns(words: Array, width: int) -> Array:
    """The inverse of `_as_words`: `[..., words, (G,) n]` as booleans `[..., (G,) n, width]`."""
    by_word = jnp.moveaxis(words, 2, -1)[..., None]
    bits = (by_word >> _positions(by_word.ndim)) & 1
    return bits.reshape(*bits.shape[:-2], -1)[..., :width] != 0


def _positions(rank: int) -> Array:
    return jnp.arange(_BITS, dtype=jnp.uint32).reshape(*[1] * (rank - 1), _BITS)
