"""Layers of `flax.linen` in which masked means gone: one changed import moves a model. This module imports flax.

Each class is a subclass of flax's of the same name, with the same attributes and variables, so that checkpoints load
both ways. Only the call is new. `use_fast_variance` has no effect: the variance never cancels.
`force_float32_reductions=False` changes dtypes, and no reduction: they are in float32. `axis_index_groups` is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import linen

from masksafe._core.arguments import message
from masksafe._core.typing import Array, ArrayLike, Axes, Function
from masksafe.adapters import _flax_norms
from masksafe.adapters._flax_attention import flax_attention
from masksafe.adapters._flax_masks import Cache, cleared, cleared_inputs
from masksafe.normalization import layer_norm, rms_norm

__all__ = ["BatchNorm", "GroupNorm", "LayerNorm", "MultiHeadAttention", "MultiHeadDotProductAttention", "RMSNorm"]

_compact: Callable[[Function], Function] = linen.compact


class LayerNorm(linen.LayerNorm):  # type: ignore[misc]
    """`flax.linen.LayerNorm`, computed by `masksafe.layer_norm`.

    The call takes flax's `mask`, which broadcasts to `x`; True or nonzero keeps. Masked elements are 0, and so is a
    fully masked row.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from masksafe.adapters.linen import LayerNorm
      >>> x = jnp.array([[1.0, 3.0, jnp.nan], [jnp.nan, jnp.nan, jnp.nan]])
      >>> y, _ = LayerNorm().init_with_output(jax.random.key(0), x, mask=~jnp.isnan(x))
      >>> print(y.round(3))
      [[-1.  1.  0.]
       [ 0.  0.  0.]]
    """

    @_compact
    def __call__(self, x: ArrayLike, *, mask: ArrayLike | None = None) -> Array:
        x = jnp.asarray(x)
        scale, bias = _parameters(self, x, _flax_norms.axes_of(self, x, self.feature_axes))
        return _flax_norms.apply_row_norm(self, layer_norm, x, scale, bias, mask)


class RMSNorm(linen.RMSNorm):  # type: ignore[misc]
    """`flax.linen.RMSNorm`, computed by `masksafe.rms_norm`, with the masks of `LayerNorm`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from masksafe.adapters.linen import RMSNorm
      >>> x = jnp.array([[2.0, -2.0, jnp.nan], [jnp.nan, jnp.nan, jnp.nan]])
      >>> y, _ = RMSNorm().init_with_output(jax.random.key(0), x, mask=~jnp.isnan(x))
      >>> print(y.round(3))
      [[ 1. -1.  0.]
       [ 0.  0.  0.]]
    """

    @_compact
    def __call__(self, x: ArrayLike, *, mask: ArrayLike | None = None) -> Array:
        x = jnp.asarray(x)
        scale, _ = _parameters(self, x, _flax_norms.axes_of(self, x, self.feature_axes))
        return _flax_norms.apply_row_norm(self, rms_norm, x, scale, None, mask)


class GroupNorm(linen.GroupNorm):  # type: ignore[misc]
    """`flax.linen.GroupNorm`, computed by `masksafe.group_norm`, with the masks of `LayerNorm`.

    A fully masked group is 0.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from masksafe.adapters.linen import GroupNorm
      >>> x = jnp.array([[1.0, 3.0, jnp.nan, jnp.nan]])
      >>> y, _ = GroupNorm(num_groups=2).init_with_output(jax.random.key(0), x, mask=~jnp.isnan(x))
      >>> print(y.round(3))
      [[-1.  1.  0.  0.]]
    """

    @_compact
    def __call__(self, x: ArrayLike, *, mask: ArrayLike | None = None) -> Array:
        x = jnp.asarray(x)
        if (self.num_groups is None) == (self.group_size is None):
            found, hint = f"values {self.num_groups} and {self.group_size}", "The default of num_groups is 32."
            raise ValueError(message("GroupNorm", "num_groups and group_size", found, "None for one of them", hint))
        num_groups, channels = self.num_groups, x.shape[-1]
        if num_groups is None:
            if channels % self.group_size:
                expected = f"a divisor of the {channels} channels"
                raise ValueError(message("GroupNorm", "group_size", f"value {self.group_size}", expected))
            num_groups = channels // self.group_size
        scale, bias = _parameters(self, x, (x.ndim - 1,))
        return _flax_norms.apply_group_norm(self, x, num_groups, scale, bias, mask)


class BatchNorm(linen.BatchNorm):  # type: ignore[misc]
    """`flax.linen.BatchNorm`, computed by `masksafe.batch_norm`, with the masks of `LayerNorm`.

    The running statistics are those of the unmasked elements; with `axis_name`, of all devices. They stay as they are
    where a feature is fully masked. The mask holds with running statistics too: masked elements are 0.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from masksafe.adapters.linen import BatchNorm
      >>> x = jnp.array([[1.0, jnp.nan], [3.0, jnp.nan], [jnp.nan, jnp.nan]])
      >>> layer = BatchNorm(use_running_average=False, momentum=0.5)
      >>> variables = layer.init(jax.random.key(0), x)
      >>> y, state = layer.apply(variables, x, mask=~jnp.isnan(x), mutable="batch_stats")
      >>> print(y.round(3))
      [[-1.  0.]
       [ 1.  0.]
       [ 0.  0.]]
      >>> print(state["batch_stats"]["mean"], state["batch_stats"]["var"])
      [1. 0.] [1. 1.]
    """

    @_compact
    def __call__(
        self, x: ArrayLike, use_running_average: bool | None = None, *, mask: ArrayLike | None = None
    ) -> Array:
        x = jnp.asarray(x)
        uses_average = linen.merge_param("use_running_average", self.use_running_average, use_running_average)
        features = _flax_norms.axes_of(self, x, self.axis)
        shape = [x.shape[a] for a in features]
        average_dtype = jnp.float32 if self.force_float32_reductions else self.param_dtype
        mean_average = self.variable("batch_stats", "mean", jnp.zeros, shape, average_dtype)
        var_average = self.variable("batch_stats", "var", jnp.ones, shape, average_dtype)
        scale, bias = _parameters(self, x, features)
        if uses_average:
            mean, var = mean_average.value, var_average.value
            return _flax_norms.apply_batch_norm(self, x, scale, bias, mask, mean=mean, var=var)[0]
        axis_name = None if self.is_initializing() else self.axis_name
        y, step, mean, var = _flax_norms.apply_batch_norm(self, x, scale, bias, mask, axis_name=axis_name)
        if not self.is_initializing():
            statistic_dtype = _flax_norms.dtype_of(self, x)
            if self.force_float32_reductions:
                statistic_dtype = jnp.promote_types(statistic_dtype, jnp.float32)
            for average, statistic in ((mean_average, mean), (var_average, var)):
                average.value = step(average.value, statistic.astype(statistic_dtype))
        return y


class MultiHeadDotProductAttention(linen.MultiHeadDotProductAttention):  # type: ignore[misc]
    """`flax.linen.MultiHeadDotProductAttention`, whose `attention_fn` is `masksafe.adapters.flax_attention`.

    A position is masked if `mask` masks all of its pairs. Such a query has output 0, without the bias of the
    projection; such a query, key or value has no influence on any output or gradient. Masks of another `attention_fn`
    hold in the attention, but not in the projections. A step of decoding sees the cache up to its own key. A later
    query may see a key that its own query does not: such a key and value stay in the cache, with 0 for NaN and infinity
    in their inputs.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import linen
      >>> from masksafe.adapters.linen import MultiHeadDotProductAttention
      >>> valid = jnp.array([[True, True, False], [False, False, False]])
      >>> x = jnp.where(valid[..., None], jnp.ones((2, 3, 4)), jnp.nan)
      >>> layer, mask = MultiHeadDotProductAttention(num_heads=2), linen.make_attention_mask(valid, valid)
      >>> out, _ = layer.init_with_output(jax.random.key(0), x, mask=mask)
      >>> print((out != 0).any(axis=-1))
      [[ True  True False]
       [False False False]]
    """

    attention_fn: Callable[..., Array] = flax_attention

    @_compact
    def __call__(
        self,
        inputs_q: ArrayLike,
        inputs_k: ArrayLike | None = None,
        inputs_v: ArrayLike | None = None,
        *,
        inputs_kv: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        **options: Any,
    ) -> Array:
        for name in ("qk_attn_weights_einsum_cls", "attn_weights_value_einsum_cls"):
            if getattr(self, name) is not None:
                hint = "The attention is computed in blocks, without flax's einsums."
                raise ValueError(message(type(self).__name__, name, "a function", "None", hint))
        keys = inputs_k if inputs_kv is None else inputs_kv
        cache = None
        if self.decode and self.has_variable("cache", "cached_key"):
            length = self.get_variable("cache", "cached_key").shape[-3]
            cache = Cache(length, self.get_variable("cache", "cache_index"))
        queries, keys, values, sees = cleared_inputs(self, mask, inputs_q, keys, inputs_v, cache=cache)
        given = {"inputs_k": keys} if inputs_kv is None else {"inputs_k": inputs_k, "inputs_kv": keys}
        # Not the method that flax has wrapped, which would record a second call of this layer.
        attend = linen.MultiHeadDotProductAttention.__call__.__wrapped__
        out = attend(self, queries, inputs_v=values, mask=mask, **given, **options)
        return cleared(out, sees)


class MultiHeadAttention(MultiHeadDotProductAttention):
    """`MultiHeadDotProductAttention` under flax's other name, which is part of the names of its parameters."""


def _parameters(layer: Any, x: Array, features: Axes) -> tuple[Array | None, Array | None]:
    """Scale and bias, made in the order of flax: each draws from the random stream."""
    shape = [x.shape[a] for a in features]

    def parameter(name: str) -> Array | None:
        if not getattr(layer, f"use_{name}", False):
            return None
        value = layer.param(name, getattr(layer, f"{name}_init"), shape, layer.param_dtype)
        return value if layer.force_float32_reductions else jnp.asarray(value, layer.param_dtype)

    return parameter("scale"), parameter("bias")
