"""Which weights dropout keeps: a hash of the pair, which depends on no block, form, device or platform.

JAX's generator draws two words for every query of every head, and the draw of a pair mixes these with the index of the
key: all twenty rounds of the generator for every pair would take longer than attention itself.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p

from masksafe._core.typing import Array


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def draw_words(
    key: Array, batch: tuple[int, ...], heads: tuple[int, int], num_queries: int, first_query: Array | None = None
) -> Array:
    """Two words `[*batch, K, G, T, 2]` for every query of every head, for `heads` (K, G).

    They depend on the random key and the indices of sample, head and query alone. `first_query` is the index of the
    first query, None for 0.
    """
    # Bits of a key of any kind make a key of Threefry; counting up makes a key for every head.
    for_samples, for_heads = jax.random.bits(key, (2,), jnp.uint32)
    sample = for_samples + _count(math.prod(batch)).reshape(*batch, 1, 1, 1)
    head = for_heads + _count(math.prod(heads)).reshape(*[1] * len(batch), *heads, 1)
    query = _count(num_queries)
    query = query if first_query is None else query + first_query.astype(query.dtype)
    (sample, head), query = jnp.broadcast_arrays(sample, head), jnp.broadcast_to(query, (*batch, *heads, num_queries))
    return jnp.stack(threefry2x32_p.bind(sample, head, query, query), -1)


def _count(number: int) -> Array:
    return jnp.arange(number, dtype=jnp.uint32)


def kept(words: Array, key_index: Array, rate: float) -> Array:
    """Which weights dropout keeps, from the words of the queries `[..., 2]` and the indices of the keys."""
    first, second = jnp.split(words, 2, axis=-1)
    # The hash lowbias32 (Wellons, "hash-prospector"), with the second word between its rounds, and without its last
    # step, which does not change the upper bits.
    mixed = first + key_index.astype(jnp.uint32)
    mixed = (mixed ^ (mixed >> 16)) * np.uint32(0x7FEB352D) ^ second
    mixed = (mixed ^ (mixed >> 15)) * np.uint32(0x846CA68B)
    return mixed >= np.uint32(min(round(rate * 2**32), 2**32 - 1))
