"""The positions that the mask of an attention layer of flax leaves. flax is not imported here."""

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
    """The inputs, 0 at the positions that are in no unmasked pair, and which queries `[..., time]` are in one.

    The mask of a layer broadcasts to `[..., heads, time, keys]`, its inputs are `[..., time, features]`. Else a NaN
    there would reach the gradients of the projections, as 0 * NaN. With a cache, the keys of the mask are those of the
    cache. A key that its own query does not see may be seen by a later one, so its finite numbers stay, and only NaN
    and infinity become 0.
    """
    if keys is None and values is None:
        keys = queries
    *batch, time, _ = jnp.shape(queries)
    number_given = jnp.shape(queries if keys is None else keys)[-2]
    number = number_given if cache is None else cache.length
    if mask is None and not (is_causal and number > time):
        return queries, keys, values, None
    name, pairs = type(layer).__name__, (*batch, layer.num_heads, time, number)
    for argument, x in (("inputs_k", keys), ("inputs_v", values)):  # of another batch, the mask would enlarge them
        if x is not None and jnp.shape(x)[:-1] != (*batch, number_given):
            expected = f"{(*batch, number_given)} before the features, the batch of inputs_q and the number of keys"
            raise ValueError(message(name, argument, f"shape {jnp.shape(x)}", expected))
    mask = jnp.ones((), bool) if mask is None else as_array(name, "mask", mask)
    while mask.ndim > len(pairs) and mask.shape[0] == 1:  # a mask of a batch of one, for inputs without a batch
        mask = mask[0]
    mask = at_rank_of(name, "mask", mask, pairs, "batch, heads, queries and keys")
    sees, seen = _positions(is_causal, time, number, mask, None if cache is None else cache.position)
    clear = cleared if cache is None else _without_nan
    return cleared(queries, sees), clear(keys, seen), clear(values, seen), sees


def cleared(x: Any, is_live: Array | None) -> Any:
    """`x` `[..., time, features]`, 0 at the positions that are not live. None stays None."""
    return x if x is None or is_live is None else selected(jnp.asarray(x), is_live[..., None])


def _without_nan(x: Any, is_live: Array) -> Any:
    """As `cleared`, but only NaN and infinity become 0."""
    return None if x is None else selected(jnp.asarray(x), is_live[..., None] | jnp.isfinite(x))


@jitted(0, 1, 2)  # one program: it does not write an array of all pairs
def _positions(is_causal: bool, time: int, number: int, mask: Array, index: Array | None) -> tuple[Array, Array]:
    """Which queries see a key, and which keys are seen; with an index of a cache, whether the key there is."""
    pairs = mask.astype(bool)
    rows, columns = ((1,) * (mask.ndim - 2) + shape for shape in ((time, 1), (1, number)))
    if index is not None:
        column = jnp.arange(number, dtype=index.dtype).reshape(columns)
        pairs &= column <= index
        is_own = column == jnp.minimum(index, number - 1)  # flax writes a key beyond the end into the last column
        return jnp.any(pairs, (-3, -1)), jnp.any(pairs & is_own, (-3, -1))
    if is_causal:
        pairs &= jnp.arange(time).reshape(rows) >= jnp.arange(number).reshape(columns)
    return jnp.any(pairs, (-3, -1)), jnp.any(pairs, (-3, -2))
