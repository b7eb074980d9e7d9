"""cuDNN's attention kernel, reached through `jax.nn`, with the contract kept around it.

cuDNN turns a mask into a finite bias: a query with no unmasked key gets an average over masked keys, and a NaN under
the mask reaches everything. So keys that no query sees are set to 0 before the kernel, the outputs of queries that see
no key to 0 after it, and the outputs of queries that see a NaN to NaN.
"""

import jax
import jax.numpy as jnp

from masksafe._core.tiles import Tiles
from masksafe._core.typing import Array
from masksafe.attention._heads import grouped_heads, keys_by_problem, keys_by_user, queries_by_user
from masksafe.attention._mask import Pairs, unmasked


def reason_against(
    q: Array, k: Array, v: Array, pairs: Pairs, *, has_offset: bool, soft_cap: float | None, return_residual: bool
) -> str | None:
    """Why cuDNN cannot run here with these arguments, or None. It checks the shapes itself."""
    reasons = {
        f"the default backend is {_backend()}, not a GPU": _backend() != "gpu",
        f"the dtype is {q.dtype}, not float16 or bfloat16": q.dtype not in (jnp.float16, jnp.bfloat16),
        "the value's width is not the query's": v.shape[-1] != q.shape[-1],
        f"there are {q.ndim - 3} batch dimensions, not one": q.ndim != 4,
        "an array is empty": 0 in q.shape + k.shape,
        "it has no segments": pairs.query_segments is not None,
        "it has no causal_offset": has_offset,
        "it has no logit_soft_cap": soft_cap is not None,
        "its dropout takes no key": pairs.head_keys is not None,
        "its logsumexp has no gradient": return_residual,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _backend() -> str:
    return jax.default_backend()


def attention(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None,
    mask: Array | None,
    pairs: Pairs,
    *,
    scale: float,
    is_causal: bool,
    window: tuple[int, int] | None,
    query_lengths: Array | None,
    key_lengths: Array | None,
) -> Array:
    """The output `[B, T, N, H]` for arguments that the public function has checked.

    A NaN or infinity in an unmasked value makes all columns of the outputs that see it NaN.
    """
    grouped_bias, allowed = (None if x is None else grouped_heads(x, k.shape[2]) for x in (bias, mask))
    live = _live_pairs(q, k, pairs._replace(bias=grouped_bias, allowed=allowed))
    sees_any = queries_by_user(jnp.any(live, -1)[..., None])
    is_seen = keys_by_user(jnp.any(live, (2, 3))[..., None])

    bad_key = jnp.any(~jnp.isfinite(k) | ~jnp.isfinite(v), -1, keepdims=True)
    bad_pair = keys_by_problem(bad_key)[:, :, None, None, :, 0]
    if grouped_bias is not None:
        bad_pair = bad_pair | ~jnp.isfinite(grouped_bias)
    sees_bad = queries_by_user(jnp.any(live & bad_pair, -1)[..., None])
    sees_bad |= jnp.any(~jnp.isfinite(q), -1, keepdims=True)

    out = jax.nn.dot_product_attention(
        jnp.where(sees_any & jnp.isfinite(q), q, 0),
        jnp.where(is_seen & jnp.isfinite(k), k, 0),
        jnp.where(is_seen & jnp.isfinite(v), v, 0),
        None if bias is None else _finite_bias(bias),
        mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=_at_batch_size(query_lengths, q),
        key_value_seq_lengths=_at_batch_size(key_lengths, q),
        local_window_size=window,
        implementation="cudnn",
    )
    return jnp.where(sees_any, jnp.where(sees_bad, jnp.nan, out), 0)


def _live_pairs(q: Array, k: Array, pairs: Pairs) -> Array:
    """The unmasked pairs, `[B, K, G, T, S]`; XLA fuses this into the reductions over it."""
    all_queries, all_keys = (Tiles(x.shape[1], x.shape[1]).tile(0) for x in (q, k))
    live = unmasked(pairs, all_queries, all_keys)
    shape = (q.shape[0], k.shape[2], q.shape[2] // k.shape[2], q.shape[1], k.shape[1])
    return jnp.broadcast_to(True if live is None else live, shape)


def _finite_bias(bias: Array) -> Array:
    """The bias with a very low number for -inf, which still gives probability 0, and 0 for other bad values."""
    lowest = 0.7 * jnp.finfo(bias.dtype).min
    return jnp.where(bias == -jnp.inf, lowest.astype(bias.dtype), jnp.where(jnp.isfinite(bias), bias, 0))


def _at_batch_size(lengths: Array | None, q: Array) -> Array | None:
    return None if lengths is None else jnp.broadcast_to(lengths[:, 0], q.shape[:1]).astype(jnp.int32)
