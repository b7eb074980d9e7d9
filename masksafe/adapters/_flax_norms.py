"""What the norms of `flax.nnx` and `flax.linen` share: everything but their parameters.

A `layer` is a module of either library, whose options have the same names. flax is not imported here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp

from masksafe import _reductions
from masksafe._core import arguments, masks
from masksafe._core.typing import Array, Axes
from masksafe.normalization import batch_norm, group_norm


def axes_of(layer: Any, x: Array, axes: Any) -> Axes:
    """The axes of an option in the order of `x`, which is that of the parameters of flax."""
    axes = tuple(axes) if isinstance(axes, Iterable) else (axes,)
    return tuple(sorted(arguments.canonical_axes(_name(layer), axes, x.ndim)))


def dtype_of(layer: Any, x: Any, *parameters: Array | None) -> Any:
    """The dtype of the result, as in flax: that of the layer, or the one to which all arrays promote."""
    if layer.dtype is not None:
        return layer.dtype
    dtype = jnp.result_type(x, *(p for p in parameters if p is not None))
    return dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.promote_types(jnp.float32, dtype)


def apply_row_norm(
    layer: Any, op: Callable[..., Array], x: Array, scale: Array | None, bias: Array | None, mask: Any
) -> Array:
    """`op`, a norm of rows, whose parameters may lie along other axes than the normalised ones."""
    x, where, dtype = _read(layer, x, mask, scale, bias)
    rows, features = (axes_of(layer, x, axes) for axes in (layer.reduction_axes, layer.feature_axes))
    _check_features(layer, x, features, scale, bias)
    shape = [x.shape[a] for a in features]
    parameters = {name: p.reshape(shape) for name, p in (("scale", scale), ("bias", bias)) if p is not None}
    options = {"axis": rows, "where": where, "epsilon": layer.epsilon, "axis_name": layer.axis_name}
    if rows == features or not parameters:
        return op(x, **parameters, **options).astype(dtype)
    y = op(x.astype(jnp.promote_types(x.dtype, jnp.float32)), **options)
    others = [a for a in range(x.ndim) if a not in features]
    for name, parameter in parameters.items():
        parameter = jnp.expand_dims(parameter, others)
        y = y * parameter if name == "scale" else y + parameter
    return masks.selected(y, where).astype(dtype)


def apply_group_norm(
    layer: Any, x: Array, num_groups: int, scale: Array | None, bias: Array | None, mask: Any
) -> Array:
    """`group_norm`, where `reduction_axes` may leave any axes to the samples."""
    x, where, dtype = _read(layer, x, mask, scale, bias)
    _check_features(layer, x, (x.ndim - 1,), scale, bias)
    given = layer.reduction_axes
    rows = axes_of(layer, x, (*range(1, x.ndim - 1), -1) if given is None else given)
    if x.ndim - 1 not in rows:
        expected = "axes that include the last one, that of the features"
        raise ValueError(arguments.message(_name(layer), "reduction_axes", f"value {given}", expected))
    sample_axes = [a for a in range(x.ndim) if a not in rows]
    order = [*sample_axes, *rows]

    def samples_first(array: Array) -> Array:
        shape = [(x if a in sample_axes else array).shape[a] for a in range(x.ndim)]
        samples = math.prod(shape[a] for a in sample_axes)
        return jnp.broadcast_to(array, shape).transpose(order).reshape(samples, *(shape[a] for a in rows))

    where = None if where is None else samples_first(where)
    options = {"where": where, "epsilon": layer.epsilon, "axis_name": layer.axis_name}
    y = group_norm(samples_first(x), num_groups, scale, bias, **options)
    back = sorted(range(x.ndim), key=order.__getitem__)
    return y.reshape([x.shape[a] for a in order]).transpose(back).astype(dtype)


def apply_batch_norm(
    layer: Any,
    x: Array,
    scale: Array | None,
    bias: Array | None,
    mask: Any,
    *,
    mean: Array | None = None,
    var: Array | None = None,
    axis_name: Any = None,
) -> tuple[Array, Callable[[Array, Array], Array], Array, Array]:
    """`batch_norm`: its result, the step of a running average, and the statistics.

    The running average of a fully masked feature stays as it is.
    """
    x, where, dtype = _read(layer, x, mask, scale, bias)
    features = axes_of(layer, x, layer.axis)
    _check_features(layer, x, features, scale, bias, mean, var)
    options = {"axis": features, "where": where, "epsilon": layer.epsilon, "axis_name": axis_name}
    y, mean, var = batch_norm(x, scale, bias, mean=mean, var=var, **options)

    def step(average: Array, statistic: Array) -> Array:
        moved: Array = layer.momentum * average + (1 - layer.momentum) * statistic
        if where is None and x.size:
            return moved
        rest = tuple(a for a in range(x.ndim) if a not in features)
        count = _reductions.sum(jnp.ones(x.shape), rest, where, axis_name=axis_name)
        return jnp.where(count > 0, moved, average)

    return y.astype(dtype), step, mean, var


def _read(layer: Any, x: Any, mask: Any, *parameters: Array | None) -> tuple[Array, Array | None, Any]:
    """`x` in the dtype of the result or a wider one, the mask at its rank, and the dtype of the result."""
    name = _name(layer)
    if layer.axis_index_groups is not None:
        found, hint = f"value {layer.axis_index_groups}", "The statistics are those of all devices of axis_name."
        raise ValueError(arguments.message(name, "axis_index_groups", found, "None", hint))
    x, dtype = arguments.as_array(name, "x", x), dtype_of(layer, x, *parameters)
    x = arguments.as_float_array(name, "x", x.astype(jnp.promote_types(x.dtype, dtype)), any_width=True)
    if mask is None:
        return x, None, dtype
    where = arguments.as_array(name, "mask", mask).astype(bool)  # flax's masks may be numbers
    return x, arguments.at_rank_of(name, "mask", where, x.shape, "x"), dtype


def _check_features(layer: Any, x: Array, features: Axes, *parameters: Array | None) -> None:
    """Refuses an `x` with another number of features than the parameters."""
    number = math.prod(x.shape[a] for a in features)
    for parameter in parameters:
        if parameter is not None and parameter.size != number:
            expected = f"{parameter.size} features, the size of the parameters"
            raise ValueError(arguments.message(_name(layer), "x", f"{number} features in shape {x.shape}", expected))


def _name(layer: Any) -> str:
    return type(layer).__name__
