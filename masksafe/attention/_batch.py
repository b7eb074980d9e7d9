"""From any number of batch dimensions to the single one of the core."""

import math

import jax
import jax.numpy as jnp

from masksafe._core.precision import wide_dtype
from masksafe._core.typing import Array
from masksafe.attention._derivatives import attention
from masksafe.attention._formulas import Adjustments, Config
from masksafe.attention._heads import grouped_heads
from masksafe.attention._mask import Pairs
from masksafe.attention._merge import with_sinks
from masksafe.attention._mods import Mods


def attend_over_batch(
    config: Config,
    q: Array,
    k: Array,
    v: Array,
    scale: Array | None,
    bias: Array | None,
    mask: Array | None,
    pairs: Pairs,
    mods: Mods = Mods(),  # noqa: B008
    sinks: Array | None = None,
) -> tuple[Array, Array]:
    """Output and logsumexp for arrays with any batch dimensions; `bias` and `mask` are `[*batch, N, T, S]`."""
    scaled = q if scale is None else scaled_queries(q, scale)
    mask = None if mask is None else grouped_heads(mask, k.shape[-2])
    out, lse = _attend_flattened(config, mods, scaled, k, v, bias, pairs._replace(allowed=mask))
    out = out if sinks is None else with_sinks(out, lse, sinks)
    return out.astype(q.dtype), lse


def scaled_queries(q: Array, scale: Array) -> Array:
    """The queries times the scale, in the wide dtype."""
    wide = q.astype(wide_dtype(q.dtype))
    is_finite = jnp.isfinite(wide)  # a NaN in a padded query must not reach the gradient of the scale
    return jnp.where(is_finite, jnp.where(is_finite, wide, 0) * scale.astype(wide.dtype), wide)


def _attend_flattened(
    config: Config, mods: Mods, q: Array, k: Array, v: Array, bias: Array | None, pairs: Pairs
) -> tuple[Array, Array]:
    batch = q.shape[:-3]
    if 0 in (*q.shape[:-1], *k.shape[:-1], v.shape[-1]):  # no query has a key, or there is no output
        dtype = wide_dtype(q.dtype)
        out_dtype = q.dtype if config.rounds else dtype
        return jnp.zeros((*q.shape[:-1], v.shape[-1]), out_dtype), jnp.full(q.shape[:-1], -jnp.inf, dtype)
    if q.shape[-1] == 0:  # all products are 0, as those of a column of zeros
        q, k = (jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 1)]) for x in (q, k))
    leaves, tree = jax.tree.flatten((bias, pairs))
    batch_shapes = [x.shape[: len(batch)] for x in leaves]
    if all(shape in (batch, (1,) * len(batch)) for shape in batch_shapes):
        size = math.prod(batch)

        def flatten(x: Array) -> Array:
            lead = x.shape[: len(batch)]
            return x if len(lead) == 1 else x.reshape(size if lead == batch else 1, *x.shape[len(lead) :])

        flat_bias, flat_pairs = jax.tree.unflatten(tree, map(flatten, leaves))
        adjustments = Adjustments(flat_bias, () if mods.score is None else mods.score.captured)
        flat_pairs = Adjustments().of(flat_pairs._replace(score_mod=mods.score, mask_mod=mods.mask))
        out, lse = attention(config, flatten(q), flatten(k), flatten(v), adjustments, flat_pairs)
        return out.reshape(*batch, *out.shape[1:]), lse.reshape(*batch, *lse.shape[1:])
    # An array that broadcasts over some but not all batch dimensions is not expanded: vmap one dimension at a time.
    axes = [0 if shape[0] == batch[0] else None for shape in batch_shapes]
    leaves = [x if axis == 0 else x[0] for x, axis in zip(leaves, axes, strict=True)]

    def attend_to_one(q: Array, k: Array, v: Array, leaves: list[Array]) -> tuple[Array, Array]:
        return _attend_flattened(config, mods, q, k, v, *jax.tree.unflatten(tree, leaves))

    return jax.vmap(attend_to_one, in_axes=(0, 0, 0, axes))(q, k, v, leaves)
