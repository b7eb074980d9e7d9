"""The positions that the mask of an attention layer of flax leaves. flax is not imported here."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from masksafe._core.masks import selected
from masksafe._core.typing import Array, jitted


class Cleared(NamedTuple):
    """The inputs of a layer, 0 at the positions that are in no unmasked pair, and which queries are in one."""

    queries: Any
    keys: Any
    values: Any
    sees: Array | None  # [..., time]; None: all do


def cleared_inputs(
    mask: Any, queries: Any, keys: Any, values: Any, *, is_causal: bool = False, has_cache: bool = False
) -> Cleared:
    """For the mask of a layer, which broadcasts to `[..., heads, time, keys]`, and its inputs `[..., time, features]`.

    Else a NaN there would reach the gradients of the projections, as 0 * NaN. With a cache, the keys of the mask are
    those of the cache, and only queries are cleared.
    """
    if keys is None and values is None:
        keys = queries
    time, number = jnp.shape(queries)[-2], jnp.shape(queries if keys is None else keys)[-2]
    if mask is None and not (is_causal and number > time):
        return Cleared(queries, keys, values, None)
    sees, seen = _positions(is_causal, time, number, jnp.ones((), bool) if mask is None else jnp.asarray(mask))
    of_keys = None if has_cache else seen
    return Cleared(cleared(queries, sees), cleared(keys, of_keys), cleared(values, of_keys), sees)


def cleared(x: Any, is_live: Array | None) -> Any:
    """`x` `[..., time, features]`, 0 at the positions that are not live. None stays None."""
    if x is None or is_live is None:
        return x
    if is_live.ndim >= jnp.ndim(x):  # a mask of a batch of one, for inputs without a batch
        is_live = is_live.reshape(is_live.shape[1 - jnp.ndim(x) :])
    return selected(jnp.asarray(x), is_live[..., None])


@jitted(0, 1, 2)  # one program: it does not write an array of all pairs
def _positions(is_causal: bool, time: int, number: int, mask: Array) -> tuple[Array, Array]:
    """Which queries see a key, and which keys are seen."""
    pairs = (mask != 0).reshape((1,) * (3 - mask.ndim) + mask.shape)
    if is_causal:
        pairs &= jnp.arange(time)[:, None] >= jnp.arange(number)
    return jnp.any(pairs, (-3, -1)), jnp.any(pairs, (-3, -2))
