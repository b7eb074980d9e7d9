"""Which weights dropout keeps: a hash of the pair, which depends on no block, form, device or platform.

JAX's generator draws two words for every query of every head, and the draw of a pair mixes these with the index of the
key: all twenty rounds of the generator for every pair would take longer than attention itself. So the draws of a block
follow from its queries and keys, and the reverse pass repeats them instead of storing them.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry2x32_p

from masksafe._core.tiles import Tile, take
from masksafe._core.typing import Array
from masksafe.attention._formulas import Config
from masksafe.attention._mask import Pairs


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
    sample = of_samples + _indices(math.prod(batch)).reshape(*batch, 1, 1, 1)
    head = of_heads + _indices(math.prod(heads)).reshape(*[1] * len(batch), *heads, 1)
    query = _indices(num_queries)
    query = query if first_query is None else query + first_query.astype(query.dtype)
    (sample, head), query = jnp.broadcast_arrays(sample, head), jnp.broadcast_to(query, (*batch, *heads, num_queries))
    return jnp.stack(threefry2x32_p.bind(sample, head, query, query), -1)


def _indices(number: int) -> Array:
    return jnp.arange(number, dtype=jnp.uint32)


def from_key(words: Array | None, first_key: Array) -> Array | None:
    """The words with which keys that begin with the given one draw as if they began with 0."""
    return None if words is None else words.at[..., 0].add(first_key.astype(words.dtype))


def kept(config: Config, pairs: Pairs, queries: Tile, keys: Tile) -> Array | None:
    """Which weights of a block dropout keeps, `[B, K, G, queries, keys]`, or None."""
    if pairs.query_words is None:
        return None
    first, second = jnp.split(take(pairs.query_words, 3, queries), 2, axis=-1)
    key = jnp.asarray(keys.start, jnp.uint32) + lax.broadcasted_iota(jnp.uint32, (1, 1, 1, 1, keys.size), 4)
    # The hash lowbias32 (Wellons, "hash-prospector"), with the second word between its rounds, and without what follows
    # them, which leaves the upper bits as they are.
    mixed = first + key
    mixed = (mixed ^ (mixed >> 16)) * np.uint32(0x7FEB352D) ^ second
    mixed = (mixed ^ (mixed >> 15)) * np.uint32(0x846CA68B)
    return mixed >= np.uint32(min(round(config.dropout_rate * 2**32), 2**32 - 1))


def drop(config: Config, keep: Array | None, p: Array) -> Array:
    return p if keep is None else jnp.where(keep, p / (1 - config.dropout_rate), 0)
