"""masksafe's attention with the signature that flax's layers expect. flax is not imported here."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from masksafe._core.arguments import message
from masksafe._core.typing import Array
from masksafe.attention import dot_product_attention


def flax_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    is_causal: bool = False,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    broadcast_dropout: bool = True,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    **arguments: Any,
) -> Array:
    """`dot_product_attention` as the `attention_fn` of `flax.nnx.MultiHeadAttention` and of flax.linen's layers.

    Args:
      query: floats `[..., time, heads, width]`.
      key: floats `[..., keys, heads, width]`.
      value: floats `[..., keys, heads, width]`.
      bias: floats that broadcast to `[..., heads, time, keys]`.
      mask: booleans, or as flax makes them floats, that broadcast to the same; 0 is masked.
      is_causal: query t sees the keys up to t. Give it to the call of the layer: flax passes its own value, which
        overrides that of a partial function. A single query with a mask is taken for decoding, where flax's mask says
        what it sees of the cache; some versions ask for a causal mask on top, which would hide all keys but the first.
      dropout_rng: the random key for dropout; without one, dropout is refused as by flax.
      dropout_rate: probability that a weight becomes 0.
      deterministic: no dropout.
      broadcast_dropout: without effect: dropout draws every weight by itself.
      dtype: the dtype in which flax asks to compute; None is the one to which the inputs promote.
      precision: without effect; `jax.default_matmul_precision` has one.
      module: the layer in which flax asks to store the weights. They never exist as a whole, so it is refused.
      **arguments: further ones of `dot_product_attention`, set by `functools.partial`: sinks, segments, `score_mod`...

    Returns:
      The output `[..., time, heads, width]`. A query that sees no key has output 0.

    Raises:
      TypeError: for an argument that neither knows.
      ValueError: if flax asks to store the weights (`sow_weights`), or for dropout without a key; or as
        `dot_product_attention` does.

    Example:
      >>> import functools, jax, jax.numpy as jnp, masksafe
      >>> from flax import linen
      >>> attention_fn = functools.partial(
      ...     masksafe.adapters.flax_attention,
      ...     mask_mod=masksafe.attention_masks.chunked(2))
      >>> layer = linen.MultiHeadDotProductAttention(2, attention_fn=attention_fn)
      >>> out, _ = layer.init_with_output(jax.random.key(0), jnp.ones((1, 4, 8)))
      >>> print(out.shape)
      (1, 4, 8)

    References:
      `flax.nnx.MultiHeadAttention
      <https://flax.readthedocs.io/en/latest/api_reference/flax.nnx/nn/attention.html>`_.
    """
    if module is not None:
        hint = "Do not set sow_weights."
        raise ValueError(message("flax_attention", "module", type(module).__name__, "None", hint))
    dtype = jnp.result_type(query, key, value) if dtype is None else dtype
    query, key, value = (x.astype(dtype) for x in (query, key, value))
    has_dropout = dropout_rate != 0 and not deterministic
    if has_dropout and dropout_rng is None:
        hint = "Or deterministic=True, which is without dropout."
        raise ValueError(message("flax_attention", "dropout_rng", "None", "a random key for dropout_rate", hint))
    rate, rng = (dropout_rate, dropout_rng) if has_dropout else (0.0, None)
    mask = None if mask is None else jnp.asarray(mask).astype(bool)
    is_causal = is_causal and not (mask is not None and query.shape[-3] == 1)
    return dot_product_attention(
        query, key, value, bias, mask, is_causal=is_causal, dropout_rate=rate, dropout_key=rng, **arguments
    )
