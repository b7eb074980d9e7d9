"""Layers and metrics of `flax.nnx` in which masked means gone: one changed import moves a model. It imports flax.

Or `convert` moves it. Each layer is a subclass of flax's with the same constructor, parameters, statistics and
metadata, so that checkpoints load both ways. Only the call is new. `use_fast_variance` has no effect: the variance
never cancels. `axis_index_groups` is refused.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from flax.nnx.module import first_from

from masksafe._core.arguments import as_float_array, as_label_array, check_shape, message
from masksafe._core.labels import as_classes
from masksafe._core.typing import Array, ArrayLike
from masksafe._reductions import MaskedMean
from masksafe.adapters import _flax_norms
from masksafe.adapters._conversion import Conversion, replacement
from masksafe.adapters._flax_attention import flax_attention
from masksafe.adapters._flax_masks import Cache, cleared, cleared_inputs
from masksafe.normalization import layer_norm, rms_norm

__all__ = ["Accuracy", "BatchNorm", "GroupNorm", "LayerNorm", "Mean", "MultiHeadAttention", "RMSNorm", "convert"]


class LayerNorm(nnx.LayerNorm):  # type: ignore[misc]
    """`flax.nnx.LayerNorm`, computed by `masksafe.layer_norm`.

    The call takes flax's `mask`, which broadcasts to `x`; True or nonzero keeps. Masked elements are 0, and so is a
    fully masked row.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from masksafe.adapters.nnx import LayerNorm
      >>> x = jnp.array([[1.0, 3.0, jnp.nan], [jnp.nan, jnp.nan, jnp.nan]])
      >>> print(LayerNorm(3, rngs=nnx.Rngs(0))(x, mask=~jnp.isnan(x)).round(3))
      [[-1.  1.  0.]
       [ 0.  0.  0.]]
    """

    def __call__(self, x: ArrayLike, *, mask: ArrayLike | None = None) -> Array:
        promoted, scale, bias = _promoted(self, x, self.scale, self.bias)
        return _flax_norms.apply_row_norm(self, layer_norm, promoted, scale, bias, mask)


class RMSNorm(nnx.RMSNorm):  # type: ignore[misc]
    """`flax.nnx.RMSNorm`, computed by `masksafe.rms_norm`, with the masks of `LayerNorm`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from masksafe.adapters.nnx import RMSNorm
      >>> x = jnp.array([[2.0, -2.0, jnp.nan], [jnp.nan, jnp.nan, jnp.nan]])
      >>> print(RMSNorm(3, rngs=nnx.Rngs(0))(x, mask=~jnp.isnan(x)).round(3))
      [[ 1. -1.  0.]
       [ 0.  0.  0.]]
    """

    def __call__(self, x: ArrayLike, mask: ArrayLike | None = None) -> Array:
        promoted, scale = _promoted(self, x, self.scale)
        return _flax_norms.apply_row_norm(self, rms_norm, promoted, scale, None, mask)


class GroupNorm(nnx.GroupNorm):  # type: ignore[misc]
    """`flax.nnx.GroupNorm`, computed by `masksafe.group_norm`, with the masks of `LayerNorm`.

    A fully masked group is 0.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from masksafe.adapters.nnx import GroupNorm
      >>> x = jnp.array([[1.0, 3.0, jnp.nan, jnp.nan]])
      >>> print(GroupNorm(4, num_groups=2, rngs=nnx.Rngs(0))(x, mask=~jnp.isnan(x)).round(3))
      [[-1.  1.  0.  0.]]
    """

    def __call__(self, x: ArrayLike, *, mask: ArrayLike | None = None) -> Array:
        promoted, scale, bias = _promoted(self, x, self.scale, self.bias)
        return _flax_norms.apply_group_norm(self, promoted, self.num_groups, scale, bias, mask)


class BatchNorm(nnx.BatchNorm):  # type: ignore[misc]
    """`flax.nnx.BatchNorm`, computed by `masksafe.batch_norm`, with the masks of `LayerNorm`.

    The running statistics are those of the unmasked elements; with `axis_name`, of all devices. They stay as they are
    where a feature is fully masked. The mask holds with running statistics too: masked elements are 0.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from masksafe.adapters.nnx import BatchNorm
      >>> x = jnp.array([[1.0, jnp.nan], [3.0, jnp.nan], [jnp.nan, jnp.nan]])
      >>> layer = BatchNorm(2, momentum=0.5, rngs=nnx.Rngs(0))
      >>> print(layer(x, mask=~jnp.isnan(x)).round(3))
      [[-1.  0.]
       [ 1.  0.]
       [ 0.  0.]]
      >>> print(layer.mean[...], layer.var[...])
      [1. 0.] [1. 1.]
    """

    def __call__(
        self, x: ArrayLike, use_running_average: bool | None = None, *, mask: ArrayLike | None = None
    ) -> Array:
        error = "No `use_running_average` was given, neither to BatchNorm nor to its call."
        uses_average = first_from(use_running_average, self.use_running_average, error_msg=error)
        promoted, mean, var, scale, bias = _promoted(self, x, self.mean, self.var, self.scale, self.bias)
        if uses_average:
            return _flax_norms.apply_batch_norm(self, promoted, scale, bias, mask, mean=mean, var=var)[0]
        y, step, mean, var = _flax_norms.apply_batch_norm(self, promoted, scale, bias, mask, axis_name=self.axis_name)
        for average, statistic in ((self.mean, mean), (self.var, var)):
            average[...] = jax.lax.stop_gradient(step(average[...], statistic))
        return y


class MultiHeadAttention(nnx.MultiHeadAttention):  # type: ignore[misc]
    """`flax.nnx.MultiHeadAttention`, whose `attention_fn` is by default `masksafe.adapters.flax_attention`.

    A position is masked if `mask` and `is_causal` mask all of its pairs. Such a query has output 0, without the bias of
    the projection; such a query, key or value has no influence on any output or gradient. Other masks of an
    `attention_fn` hold in the attention, but not in the projections. A step of decoding sees the cache up to its own
    key. A later query may see a key that its own query does not: such a key and value stay in the cache, with 0 for NaN
    and infinity in their inputs.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from masksafe.adapters.nnx import MultiHeadAttention
      >>> valid = jnp.array([[True, True, False], [False, False, False]])
      >>> x = jnp.where(valid[..., None], jnp.ones((2, 3, 4)), jnp.nan)
      >>> layer = MultiHeadAttention(2, 4, decode=False, rngs=nnx.Rngs(0))
      >>> out = layer(x, mask=nnx.make_attention_mask(valid, valid))
      >>> print((out != 0).any(axis=-1))
      [[ True  True False]
       [False False False]]
    """

    __init__ = functools.partialmethod(nnx.MultiHeadAttention.__init__, attention_fn=flax_attention)

    def __call__(
        self,
        inputs_q: ArrayLike,
        inputs_k: ArrayLike | None = None,
        inputs_v: ArrayLike | None = None,
        *,
        mask: ArrayLike | None = None,
        decode: bool | None = None,
        is_causal: bool = False,
        **options: Any,
    ) -> Array:
        has_cache = bool(self.decode if decode is None else decode)
        is_causal = is_causal and not has_cache  # the mask of the cache is causal
        cache = None
        if has_cache and self.cached_key is not None:
            cache = Cache(self.cached_key.shape[-3], self.cache_index[...])
        *inputs, sees = cleared_inputs(self, mask, inputs_q, inputs_k, inputs_v, is_causal=is_causal, cache=cache)
        if is_causal and mask is not None and jnp.shape(inputs_q)[-2] == 1:  # to `flax_attention` it is decoding
            mask = jnp.asarray(mask).astype(bool)
            is_first = jnp.arange(jnp.shape(inputs[1])[-2]) == 0
            mask, is_causal = mask & is_first.reshape((1,) * (mask.ndim - 1) + is_first.shape), False
        out = super().__call__(*inputs, mask=mask, decode=decode, is_causal=is_causal, **options)
        return cleared(out, sees)


class Mean(nnx.Metric):  # type: ignore[misc]
    """The mean of the unmasked elements of all batches, as a `masksafe.MaskedMean`: `flax.nnx.metrics.Average`.

    Batches count by their unmasked elements, and what a masked element holds changes nothing (flax multiplies by the
    mask, and 0 times NaN is NaN). The number of elements is a float32. Before the first element the mean is 0.

    Args:
      argname: the name of the argument of `update` that holds the array. The mask broadcasts to its shape; True or
        nonzero keeps.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from masksafe.adapters.nnx import Accuracy, Mean
      >>> metrics = nnx.MultiMetric(loss=Mean("loss"), accuracy=Accuracy())
      >>> for labels in (jnp.array([0, 1, -100]), jnp.array([1, -100, -100])):
      ...     loss, logits = jnp.where(labels < 0, jnp.nan, 1.0 + labels), jnp.eye(3)
      ...     metrics.update(loss=loss, logits=logits, labels=labels, mask=labels >= 0)
      >>> print({name: f"{x:.4f}" for name, x in metrics.compute().items()})
      {'loss': '1.6667', 'accuracy': '0.6667'}
    """

    def __init__(self, argname: str = "values"):
        self.argname = argname
        self.mean = nnx.metrics.MetricState(MaskedMean(0.0, 0))

    def reset(self) -> None:
        """Forgets all batches."""
        self.mean.set_value(jax.tree.map(jnp.zeros_like, self.mean.get_value()))

    def update(self, *, mask: ArrayLike | None = None, **arrays: Any) -> None:
        """Adds the elements of a batch."""
        if self.argname not in arrays:
            raise TypeError(message("Mean", "update", f"the arguments {sorted(arrays)}", f"one named {self.argname!r}"))
        self._add(arrays[self.argname], mask)

    def compute(self) -> Array:
        """The mean so far."""
        return self.mean.get_value().value

    def _add(self, x: ArrayLike, mask: ArrayLike | None) -> None:
        where = None if mask is None else jnp.asarray(mask).astype(bool)
        self.mean.set_value(self.mean.get_value() + MaskedMean.of(x, where))


class Accuracy(Mean):
    """The share of the unmasked labels of all batches that are predicted: `flax.nnx.metrics.Accuracy`.

    The prediction is the class of the largest logit, the lowest of several; with a threshold, whether the logit reaches
    it, and labels above 0 are positive. A NaN predicts nothing, and no label out of range is predicted.

    Args:
      threshold: a number for binary labels, whose logits have their shape; None for classes, on the last axis of the
        logits.
    """

    def __init__(self, threshold: float | None = None):
        super().__init__()
        self.threshold = threshold

    def update(self, *, logits: ArrayLike, labels: ArrayLike, mask: ArrayLike | None = None, **_: Any) -> None:  # type: ignore[override]
        """Adds the labels of a batch."""
        logits, labels = as_float_array("Accuracy", "logits", logits), as_label_array("Accuracy", "labels", labels)
        shape = logits.shape[:-1] if self.threshold is None else logits.shape
        check_shape("Accuracy", "labels", labels.shape, shape, f"from logits {logits.shape}")
        is_nan = jnp.isnan(logits)
        if self.threshold is None:
            is_right = jnp.argmax(logits, -1) == as_classes(labels, logits.shape[-1])
            is_nan = jnp.any(is_nan, -1)
        else:
            is_right = (logits >= self.threshold) == (labels > 0)
        self._add(is_right & ~is_nan, mask)


_OURS = {
    nnx.LayerNorm: LayerNorm,
    nnx.RMSNorm: RMSNorm,
    nnx.GroupNorm: GroupNorm,
    nnx.BatchNorm: BatchNorm,
    nnx.MultiHeadAttention: MultiHeadAttention,
}
_OTHERS = {
    nnx.InstanceNorm: "masksafe has no InstanceNorm",
    nnx.SpectralNorm: "a norm of weights, not of what is masked",
    nnx.WeightNorm: "a norm of weights, not of what is masked",
    nnx.bridge.ToNNX: "a module of flax.linen is a definition: change its import",
}


def convert(model: nnx.Module) -> Conversion:
    """Replaces flax's norms and attention layers in a model by those of this module, in place.

    They keep their parameters, statistics and options, a layer in several places stays one, and optimizers and
    checkpoints stay valid. What was split off or bound before (a `GraphDef`, `nnx.cached_partial`) has flax's layers.
    Call it outside of `nnx.jit`.

    Norms get no mask by this. Where the model does not pass them one, a selection behind the look-ups keeps NaN out,
    `masksafe.keep(x, where=valid[..., None])`; but in norms over several positions, such as `BatchNorm`, its zeros
    count.

    Args:
      model: a module, changed in place. Layers of exactly flax's classes are replaced, an `attention_fn` if it is
        flax's default.

    Returns:
      What was replaced, and what was left for which reason: subclasses, another `attention_fn`, what masksafe lacks.

    Raises:
      TypeError: if `model` is no module of flax.nnx.

    Example:
      >>> from flax import nnx
      >>> from masksafe.adapters.nnx import convert
      >>> rngs = nnx.Rngs(0)
      >>> model = nnx.Sequential(nnx.LayerNorm(4, rngs=rngs), nnx.InstanceNorm(4, rngs=rngs))
      >>> print(convert(model))
      layers.0  LayerNorm     replaced
      layers.1  InstanceNorm  left: masksafe has no InstanceNorm
      >>> print(type(model.layers[0]).__module__)
      masksafe.adapters.nnx
    """
    if not isinstance(model, nnx.Module):
        found = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        hint = "A module of flax.linen is a definition: change its import." if isinstance(model, linen.Module) else ""
        raise TypeError(message("convert", "model", found, "a module of flax.nnx", hint))
    record = Conversion()
    for path, layer in list(nnx.iter_modules(model)):
        ours = replacement(record, ".".join(map(str, path)), layer, _OURS, _OTHERS, _what_ours_lacks)
        if ours is None:
            continue
        if isinstance(layer, nnx.MultiHeadAttention) and layer.attention_fn is nnx.dot_product_attention:
            layer.attention_fn = flax_attention
        object.__setattr__(layer, "__class__", ours)  # flax's __setattr__ would note it as one more attribute
    return record


def _what_ours_lacks(layer: Any) -> str | None:
    """Why a layer of flax cannot be replaced, or None."""
    if getattr(layer, "axis_index_groups", None) is not None:
        return "masksafe has no axis_index_groups"
    if any(d is not None and jnp.issubdtype(d, jnp.complexfloating) for d in (layer.dtype, layer.param_dtype)):
        return "masksafe has no complex norms and attention"
    if not isinstance(layer, nnx.MultiHeadAttention):
        return None
    function = layer.attention_fn
    while isinstance(function, functools.partial):
        function = function.func
    if layer.attention_fn is not nnx.dot_product_attention and function is not flax_attention:
        return "its attention_fn is not flax's default"
    return "masksafe's dropout_rate is below 1" if layer.dropout_rate >= 1 else None


def _promoted(layer: Any, x: ArrayLike, *variables: Any) -> Any:
    """`x` and the values of variables, None among them, in the dtype to which flax promotes them."""
    return layer.promote_dtype((x, *(None if v is None else v[...] for v in variables)), dtype=layer.dtype)
