"""equinox's layers, computed by masksafe: to move a model, change the import, or `convert` it.

Each class is a subclass of equinox's class of its name, with its constructor and its fields. So checkpoints of one load
into the other. equinox is imported here and nowhere else. A type checker sees each class as a dataclass of its
fields, so its constructor is declared.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import equinox
import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core.arguments import as_array, as_float_array, as_promoted_float_array, at_rank_of, message
from masksafe._core.masks import read_mask, selected
from masksafe._core.precision import widened
from masksafe._core.run_time import any_of
from masksafe._core.sharding import Devices
from masksafe._core.typing import Array, ArrayLike
from masksafe.adapters._conversion import Conversion, replacement
from masksafe.attention import dot_product_attention
from masksafe.normalization import batch_norm, group_norm, layer_norm, rms_norm

__all__ = ["BatchNorm", "GroupNorm", "LayerNorm", "MultiheadAttention", "RMSNorm", "convert"]

_NO_STATE: Any = ...
_M = TypeVar("_M")


class LayerNorm(equinox.nn.LayerNorm):  # type: ignore[misc]
    """`equinox.nn.LayerNorm` by `masksafe.layer_norm`, with `where` at the call.

    Masked elements are 0, without the bias, and a fully masked sample is 0. Floats only.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from masksafe.adapters.equinox import LayerNorm
      >>> x = jnp.array([[1.0, 3.0, jnp.nan], [jnp.nan, jnp.nan, jnp.nan]])
      >>> layer = LayerNorm(3, eps=0.0)
      >>> print(jax.vmap(lambda x: layer(x, where=~jnp.isnan(x)))(x))
      [[-1.  1.  0.]
       [ 0.  0.  0.]]
    """

    __init__ = equinox.nn.LayerNorm.__init__

    def __call__(self, x: Array, state: Any = _NO_STATE, *, key: Any = None, where: ArrayLike | None = None) -> Any:
        """As equinox's.

        Args:
          x: floats of the shape of the layer.
          state: returned as it is, beside the output, if it is given.
          key: without effect.
          where: booleans that broadcast to the shape of `x`; False is masked.
        """
        x = _as_sample("LayerNorm", x, self.shape)
        out = layer_norm(x, self.weight, self.bias, axis=tuple(range(x.ndim)), where=where, epsilon=self.eps)
        return _with_state(out, state)


class RMSNorm(equinox.nn.RMSNorm):  # type: ignore[misc]
    """`equinox.nn.RMSNorm` by `masksafe.rms_norm`, with `where` at the call.

    Masked elements are 0, without the bias, and a fully masked sample is 0. Floats only.

    Example:
      >>> import jax.numpy as jnp
      >>> from masksafe.adapters.equinox import RMSNorm
      >>> x = jnp.array([1.0, 7.0, jnp.nan])
      >>> print(RMSNorm(3, eps=0.0)(x, where=~jnp.isnan(x)))
      [0.2 1.4 0. ]
    """

    __init__ = equinox.nn.RMSNorm.__init__

    def __call__(self, x: Array, state: Any = _NO_STATE, *, key: Any = None, where: ArrayLike | None = None) -> Any:
        """As equinox's; the arguments are those of `LayerNorm`."""
        x = _as_sample("RMSNorm", x, self.shape)
        where = read_mask("RMSNorm", where, x.shape)
        wide = x if self.bias is None else widened(x)  # it is rounded once, after the bias
        out = rms_norm(wide, self.weight, axis=tuple(range(x.ndim)), where=where, epsilon=self.eps)
        if self.bias is not None:
            out = selected(out + self.bias.astype(out.dtype), where).astype(x.dtype)
        return _with_state(out, state)


class GroupNorm(equinox.nn.GroupNorm):  # type: ignore[misc]
    """`equinox.nn.GroupNorm` by `masksafe.group_norm`, with `where` at the call.

    Masked elements are 0, without the bias, and a fully masked group is 0. Floats only.

    Example:
      >>> import jax.numpy as jnp
      >>> from masksafe.adapters.equinox import GroupNorm
      >>> x = jnp.array([1.0, 3.0, 5.0, jnp.nan])
      >>> print(GroupNorm(2, 4, eps=0.0)(x, where=~jnp.isnan(x)))
      [-1.  1.  0.  0.]
    """

    __init__ = equinox.nn.GroupNorm.__init__

    def __call__(self, x: Array, state: Any = _NO_STATE, *, key: Any = None, where: ArrayLike | None = None) -> Any:
        """As equinox's.

        Args:
          x: floats `[channels, ...]`.
          state: returned as it is, beside the output, if it is given.
          key: without effect.
          where: booleans that broadcast to the shape of `x`, so a mask of positions needs no axis for the channels.
        """
        x = as_float_array("GroupNorm", "x", x, any_width=True)
        out = group_norm(x, self.groups, self.weight, self.bias, axis=0, where=where, epsilon=self.eps)
        return _with_state(out, state)


class BatchNorm(equinox.nn.BatchNorm):  # type: ignore[misc]
    """`equinox.nn.BatchNorm` by `masksafe.batch_norm`, with `where` at the call.

    Masked elements are 0, without the bias. The statistics are those of the unmasked elements of the whole batch. A
    fully masked channel keeps its running statistics, and a fully masked batch keeps the whole state. In mode "ema", a
    channel that is fully masked in the first batch starts from mean 0 and variance 1. No complex numbers.

    Example:
      >>> import equinox, jax, jax.numpy as jnp
      >>> from masksafe.adapters.equinox import BatchNorm
      >>> layer, state = equinox.nn.make_with_state(BatchNorm)(2, "batch", mode="batch", eps=0.0)
      >>> x = jnp.array([[1.0, 5.0], [3.0, jnp.nan], [jnp.nan, jnp.nan]])
      >>> def normalize(x, where):
      ...     return layer(x, state, where=where)
      >>> over_batch = jax.vmap(normalize, out_axes=(0, None), axis_name="batch")
      >>> out, state = over_batch(x, ~jnp.isnan(x))
      >>> print(out)
      [[-1.  0.]
       [ 1.  0.]
       [ 0.  0.]]
    """

    __init__ = equinox.nn.BatchNorm.__init__

    def __call__(
        self, x: Array, state: Any, *, key: Any = None, inference: bool | None = None, where: ArrayLike | None = None
    ) -> tuple[Array, Any]:
        """As equinox's.

        Args:
          x: floats `[channels, ...]`.
          state: the `equinox.nn.State` with the running statistics.
          key: without effect.
          inference: whether to normalise by the running statistics; by default as the layer says.
          where: booleans that broadcast to the shape of `x`; a scalar masks a whole sample.
        """
        where = read_mask("BatchNorm", where, x.shape)
        inference = self.inference if inference is None else inference
        is_ema = self.mode == "ema"
        running = state.get(self.ema_state_index if is_ema else self.batch_state_index)
        promoted = (running[0] if is_ema or inference else None, self.weight, self.bias)
        dtype = jnp.result_type(x, *(a for a in promoted if a is not None))
        x = as_promoted_float_array("BatchNorm", "x", x.astype(dtype), any_width=True)
        normalized = functools.partial(batch_norm, x, self.weight, self.bias, axis=0, where=where, epsilon=self.eps)
        if inference:
            divisor = 1 if is_ema else self._weight_of_past(state.get(self.batch_counter))
            mean, var = (statistic / divisor for statistic in running)
            return normalized(mean=mean, var=var)[0], state
        lax.psum(1, self.axis_name)  # equinox's NameError where there is no such axis
        y, *batch_statistics = normalized(axis_name=self.axis_name)
        has_unmasked = jnp.ones(1, bool) if where is None else _has_unmasked(where, self.axis_name)
        if not is_ema:
            return y, self._updated(state, batch_statistics, has_unmasked)
        state, (mean, var) = self._updated_ema(state, batch_statistics, has_unmasked)
        return normalized(mean=mean, var=var)[0], state

    def _updated(self, state: Any, batch_statistics: list[Array], has_unmasked: Array) -> Any:
        """The state of mode "batch" after a batch."""
        before = state.get(self.batch_counter)
        after = jnp.where(jnp.any(has_unmasked), before + 1, before)
        # A feature without unmasked elements keeps its statistics: equinox divides them by the new weight.
        rescaling = self._weight_of_past(after) / self._weight_of_past(before)

        def update(old: Array, new: Array) -> Array:
            wide = old.astype(new.dtype)
            blend = wide * self.momentum + new * (1 - self.momentum)
            return jnp.where(has_unmasked, blend, wide * rescaling.astype(new.dtype)).astype(old.dtype)

        updated = tuple(map(update, state.get(self.batch_state_index), batch_statistics))
        return state.set(self.batch_counter, after).set(self.batch_state_index, updated)

    def _weight_of_past(self, counter: Array) -> Array:
        """The divisor of the statistics of mode "batch" in equinox's inference."""
        return jnp.where(counter == 0, 1, 1 - self.momentum**counter)

    def _updated_ema(self, state: Any, batch_statistics: list[Array], has_unmasked: Array) -> tuple[Any, list[Array]]:
        """The state of mode "ema" after a batch, and the statistics in it before they are rounded to its dtype."""
        is_first = state.get(self.ema_first_time_index)

        def update(old: Array, new: Array, start: float) -> Array:
            wide = old.astype(new.dtype)
            blend = (1 - self.momentum) * new + self.momentum * wide
            unchanged = jnp.where(is_first & jnp.any(has_unmasked), start, wide)
            return jnp.where(has_unmasked, jnp.where(is_first, new, blend), unchanged)

        old = state.get(self.ema_state_index)
        updated = [update(*statistics) for statistics in zip(old, batch_statistics, (0.0, 1.0), strict=True)]
        state = state.set(self.ema_first_time_index, is_first & ~jnp.any(has_unmasked))
        rounded = tuple(new.astype(statistic.dtype) for new, statistic in zip(updated, old, strict=True))
        return state.set(self.ema_state_index, rounded), updated


class MultiheadAttention(equinox.nn.MultiheadAttention):  # type: ignore[misc]
    """`equinox.nn.MultiheadAttention` by `masksafe.dot_product_attention`.

    A query that sees no key in any head has output 0, without the bias of the projection. Such a query, and a key that
    no query sees, may hold anything: no output changes, and no gradient of the projections. Dropout draws other weights
    than equinox's from the same random key, and its rate is below 1. Floats only.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from masksafe.adapters.equinox import MultiheadAttention
      >>> layer = MultiheadAttention(2, 4, use_output_bias=True, key=jax.random.key(0))
      >>> x = jnp.ones((3, 4)).at[2].set(jnp.nan)
      >>> is_word = jnp.array([True, True, False])
      >>> out = layer(x, x, x, is_word[:, None] & is_word)
      >>> print(jnp.isfinite(out).all(), out[2])
      True [0. 0. 0. 0.]
    """

    __init__ = equinox.nn.MultiheadAttention.__init__

    def __call__(
        self,
        query: Array,
        key_: Array,
        value: Array,
        mask: ArrayLike | None = None,
        *,
        key: Any = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
        process_heads: Callable[..., Any] | None = None,
    ) -> Array:
        """As equinox's.

        Args:
          query: floats `[time, query_size]`.
          key_: floats `[keys, key_size]`.
          value: floats `[keys, value_size]`.
          mask: booleans or integers that broadcast to `[num_heads, time, keys]`; False and 0 are masked. Floats are
            refused: equinox would read 0 and -1e9, numbers to add to logits, the wrong way round.
          key: the random key for dropout.
          inference: whether to leave out dropout; by default as the layer says.
          deterministic: equinox's deprecated name of `inference`.
          process_heads: a function of the projected queries, keys and values `[..., num_heads, width]` that returns
            others of the same shapes.
        """
        name = "MultiheadAttention"
        if deterministic is not None:
            inference = deterministic
            warnings.warn(f"{name}: deterministic is deprecated in favour of inference.", stacklevel=2)
        for argument, x in (("query", query), ("key_", key_), ("value", value)):
            if x.ndim != 2:
                hint = "Write jax.vmap(layer) for a batch."
                raise ValueError(message(name, argument, f"shape {x.shape}", "an array of rank 2", hint))
        (time, _), (keys, _) = query.shape, key_.shape
        if value.shape[0] != keys:
            raise ValueError(message(name, "value", f"{value.shape[0]} rows", f"{keys}, as many as of key_"))
        sees_any = None
        if mask is not None:
            pairs = self.num_heads, time, keys
            mask = as_array(name, "mask", mask)
            if not (mask.dtype == jnp.bool_ or jnp.issubdtype(mask.dtype, jnp.integer)):
                hint = "Write mask != 0; for numbers to add to the logits, 0 and -1e9, mask == 0."
                raise TypeError(message(name, "mask", f"dtype {mask.dtype}", "booleans or integers", hint))
            mask = at_rank_of(name, "mask", mask.astype(bool), pairs, "heads, queries and keys")
            sees_any, is_seen = (jnp.expand_dims(any_of(mask, axes), 1) for axes in ((0, 2), (0, 1)))
            # Before the projections, in whose gradients a NaN of a masked row would meet a cotangent of 0. Rows of 1,
            # since process_heads may have no derivative at 0.
            query, key_, value = selected(query, sees_any, 1), selected(key_, is_seen, 1), selected(value, is_seen, 1)
        projections = (self.query_proj, query), (self.key_proj, key_), (self.value_proj, value)
        projected = [jax.vmap(project)(x) for project, x in projections]
        heads = [x.reshape(len(x), self.num_heads, x.shape[1] // self.num_heads) for x in projected]
        if process_heads is not None:
            shapes, heads = [x.shape for x in heads], list(process_heads(*heads))
            if (found := [x.shape for x in heads]) != shapes:
                raise ValueError(message(name, "process_heads", f"shapes {found}", f"shapes {shapes}"))
        q, k, v = (x.astype(jnp.result_type(*heads)) for x in heads)
        rate, dropout_key = self._dropout(key, inference)
        out = dot_product_attention(q, k, v, mask=mask, dropout_rate=rate, dropout_key=dropout_key)
        return selected(jax.vmap(self.output_proj)(out.reshape(time, math.prod(out.shape[1:]))), sees_any)

    def _dropout(self, key: Any, inference: bool | None) -> tuple[Any, Any]:
        """The rate and the random key of dropout."""
        rate = self.dropout.p
        is_without = isinstance(rate, int | float) and rate == 0
        if is_without or (self.dropout.inference if inference is None else inference):
            return 0.0, None
        if key is None:  # equinox's type of error
            hint = "Or write inference=True, which is without dropout."
            raise RuntimeError(message("MultiheadAttention", "key", "None", "a random key for dropout", hint))
        return rate, key


_OURS = {
    equinox.nn.LayerNorm: LayerNorm,
    equinox.nn.RMSNorm: RMSNorm,
    equinox.nn.GroupNorm: GroupNorm,
    equinox.nn.BatchNorm: BatchNorm,
    equinox.nn.MultiheadAttention: MultiheadAttention,
}
_OTHERS = {
    equinox.nn.SpectralNorm: "a norm of weights, not of what is masked",
    equinox.nn.WeightNorm: "a norm of weights, not of what is masked",
}


def convert(model: _M) -> tuple[_M, Conversion]:
    """A model with equinox's norms and attention layers replaced by those of this module.

    They keep their arrays and options. A `State` from before stays valid. The state of an optimizer has the classes of
    the model's layers in it: convert it too. Layers in static fields, and those of bound methods, are not seen.

    Norms get no mask by this. Where the model does not pass them one, a selection behind the look-ups keeps NaN out,
    `masksafe.keep(x, where=valid[..., None])`; but in norms over several positions, such as `BatchNorm`, its zeros
    count.

    Args:
      model: a module, or any pytree with modules. Layers of exactly equinox's classes are replaced.

    Returns:
      The converted copy, and the record of what was replaced, and what was left for which reason: subclasses, and what
      masksafe lacks.

    Raises:
      TypeError: if there is no module of equinox in `model`.

    Example:
      >>> import equinox, jax
      >>> from masksafe.adapters.equinox import convert
      >>> class Norm(equinox.nn.RMSNorm):
      ...     pass
      >>> model, record = convert(equinox.nn.Sequential([equinox.nn.LayerNorm(4), Norm(4)]))
      >>> print(record)
      layers.0  LayerNorm  replaced
      layers.1  Norm       left: a subclass of RMSNorm
    """
    if not any(map(_is_module, jax.tree.leaves(model, is_leaf=_is_module))):
        found = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(message("convert", "model", found, "a module of equinox, or a pytree with some"))
    record = Conversion()
    return _converted(model, (), record), record


def _converted(node: Any, path: tuple[Any, ...], record: Conversion) -> Any:
    """A copy of a module, or of a pytree, in which layers are replaced."""
    children, tree = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node and _is_module(x))
    leaves = [_converted(x, (*path, *keys), record) if _is_module(x) else x for keys, x in children]
    node = jax.tree.unflatten(tree, leaves)
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    ours = replacement(record, name, node, _OURS, _OTHERS, _what_ours_lacks)
    if ours is None:
        return node
    layer: Any = object.__new__(ours)
    vars(layer).update(vars(node))  # the fields are the same; __init__ would make other arrays
    return layer


def _is_module(x: object) -> bool:
    return isinstance(x, equinox.Module)


def _what_ours_lacks(layer: Any) -> str | None:
    """Why a layer of equinox cannot be replaced, or None; of one in an optimizer's state, what is no array is None."""
    dtypes = [x.dtype for x in jax.tree.leaves(layer) if hasattr(x, "dtype")]
    if any(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in dtypes):
        return "masksafe has no complex norms and attention"
    if isinstance(layer, equinox.nn.BatchNorm):
        names = layer.axis_name if isinstance(layer.axis_name, list | tuple) else [layer.axis_name]
        if not all(name is None or isinstance(name, str) for name in names):
            return "masksafe's names of axes are strings"
    if isinstance(layer, equinox.nn.MultiheadAttention):
        rate = layer.dropout.p
        if isinstance(rate, int | float) and rate >= 1:
            return "masksafe's dropout_rate is below 1"
    return None


def _as_sample(layer: str, x: Array, shape: tuple[int, ...]) -> Array:
    x = as_float_array(layer, "x", x, any_width=True)
    if x.shape != shape:
        hint = "Write jax.vmap(layer) for a batch."
        raise ValueError(message(layer, "x", f"shape {x.shape}", f"shape {shape}, that of the layer", hint))
    return x


def _with_state(out: Array, state: Any) -> Any:
    return out if state is _NO_STATE else (out, state)


def _has_unmasked(where: Array, axis_name: Any) -> Array:
    """Whether the batch has an unmasked element, for each channel or for all at once."""
    names = axis_name if isinstance(axis_name, str) else tuple(axis_name)
    return Devices(names).any(any_of(where, range(1, where.ndim)))
