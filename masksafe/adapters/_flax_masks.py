"""The positions that the mask of an attention layer of flax leaves unmasked. flax is not imported here."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from masksafe._core.arguments import as_array, at_rank_of, message
from masksafe._core.masks import selected
from masksafe._core.typing import Array, jitted


class Cache(NamedTuple):
    """The cache of a layer that decodes, before the step."""

    length: int
    position: Array  # where the step writes its key


def cleared_inputs(
    layer: Any, mask: Any, queries: Any, keys: Any, values: Any, *, is_causal: bool = False, cache: Cache | None = None
) -> tuple[Any, Any, Any, Array | None]:
    """The inputs, 0 at positions without an unmasked pair; and which queries `[..., time]` have one.

    The mask of a layer broadcasts to `[..., heads, time, keys]`, its inputs are `[..., time, features]`. Without this,
    a NaN at such a position would reach the gradients of the projections, as 0 * NaN. With a cache, the keys of the
    mask are those of the cache. A later query may see a key that its own query does not: there finite numbers stay, and
    only NaN and infinity become 0.
    """
    if keys is None and values is None:
        keys = queries
    *batch, time, _ = jnp.shape(queries)
    num_keys = jnp.shape(queries if keys is None else keys)[-2]
    num_columns = num_keys if cache is None else cache.length
    if mask is None and not (is_causal and num_columns > time):
        return queries, keys, values, None
    name, pairs = type(layer).__name__, (*batch, layer.num_heads, time, num_columns)
    for argument, x in (("inputs_k", keys), ("inputs_v", values)):  # the mask would enlarge inputs of another batch
        if x is not None and jnp.shape(x)[:-1] != (*batch, num_keys):
            expected = f"{(*batch, num_keys)} before the features, the batch of inputs_q and the number of keys"
            raise ValueError(message(name, argument, f"shape {jnp.shape(x)}", expected))
    mask = jnp.ones((), bool) if mask is None else as_array(name, "mask", mask)
    while mask.ndim > len(pairs) and mask.shape[0] == 1:  # a mask of a batch of one, for inputs without a batch
        mask = mask[0]
    mask = at_rank_of(name, "mask", mask, pairs, "batch, heads, queries and keys")
    sees_any, is_seen = _positions(is_causal, time, num_columns, mask, None if cache is None else cache.position)
    clear = cleared if cache is None else _without_nan
    return cleared(queries, sees_any), clear(keys, is_seen), clear(values, is_seen), sees_any


def cleared(x: Any, unmasked: Array | None) -> Any:
    """`x` `[..., time, features]` with 0 at masked positions. None stays None."""
    return x if x is None or unmasked is None else selected(jnp.asarray(x), unmasked[..., None])


def _without_nan(x: Any, unmasked: Array) -> Any:
    """Like `cleared`, but only NaN and infinity become 0."""
    return None if x is None else selected(jnp.asarray(x), unmasked[..., None] | jnp.isfinite(x))


@jitted(0, 1, 2)  # one program: it does not write an array of all pairs
def _positions(is_causal: bool, time: int, num_columns: int, mask: Array, index: Array | None) -> tuple[Array, Array]:
    """Which queries see a key, and which keys are seen; with a cache, whether the key at its index is seen."""
    pairs = mask.astype(bool)
    rows, columns = ((1,) * (mask.ndim - 2) + shape for shape in ((time, 1), (1, num_columns)))
    if index is not None:
        column = jnp.arange(num_columns, dtype=index.dtype).reshape(columns)
        pairs &= column <= index
        is_own = column == jnp.minimum(index, num_columns - 1)  # flax writes a key beyond the end into the last column
        return jnp.any(pairs, (-3, -1)), jnp.any(pairs & is_own, (-3, -1))
    if is_causal:
        pairs &= jnp.arange(time).reshape(rows) >= jnp.arange(num_columns).reshape(columns)
    return jnp.any(pairs, (-3, -1)), jnp.any(pairs, (-3, -2))
