"""The arguments that losses of a linear layer have in common. Every function takes the name of the op first."""

import numbers
from typing import Any

import jax.numpy as jnp

from masksafe._core.arguments import as_float_array, as_label_array, as_number, check_is_known, message
from masksafe._core.masks import as_mask_of
from masksafe._core.typing import Array, ArrayLike


def read_layer(
    op: str, features: ArrayLike, kernel: ArrayLike, bias: ArrayLike | None, of: str = ""
) -> tuple[Array, Array, Array | None]:
    """Features `[..., D]`, kernel `[D, V]` and bias `[V]`, whose names begin with `of`."""
    features, kernel = as_float_array(op, f"{of}features", features), as_float_array(op, f"{of}kernel", kernel)
    if features.ndim == 0:
        raise ValueError(message(op, f"{of}features", "shape ()", "[..., D]"))
    width = features.shape[-1]
    if kernel.ndim != 2 or kernel.shape[0] != width or kernel.shape[1] == 0:
        expected = f"[D, V] with at least one class, D being the {width} of {of}features {features.shape}"
        is_transposed = kernel.ndim == 2 and kernel.shape[1] == width
        hint = f"For a kernel [V, D] pass {of}kernel.T." if is_transposed else ""
        raise ValueError(message(op, f"{of}kernel", f"shape {kernel.shape}", expected, hint))
    return features, kernel, None if bias is None else read_per_class(op, f"{of}bias", bias, kernel, of)


def read_per_class(op: str, argument: str, value: ArrayLike, kernel: Array, of: str = "") -> Array:
    """Floats `[V]`."""
    array = as_float_array(op, argument, value)
    if array.shape != kernel.shape[1:]:
        expected = f"{kernel.shape[1:]}, the classes of {of}kernel"
        raise ValueError(message(op, argument, f"shape {array.shape}", expected))
    return array


def read_labels(op: str, features: Array, labels: ArrayLike) -> Array:
    """Integers of the shape of the tokens."""
    labels, shape = as_label_array(op, "labels", labels), features.shape[:-1]
    if labels.shape != shape:
        expected = f"{shape}, that of features {features.shape} without its last axis"
        raise ValueError(message(op, "labels", f"shape {labels.shape}", expected))
    return labels


def read_where(op: str, where: ArrayLike | None, labels: Array) -> Array | None:
    """Booleans of the shape of the tokens, or None."""
    where = as_mask_of(op, where, labels.shape, "labels")
    return None if where is None else jnp.broadcast_to(where, labels.shape)


def read_soft_cap(op: str, soft_cap: float | None) -> float | None:
    if soft_cap is None:
        return None
    soft_cap, most = as_number(op, "logit_soft_cap", soft_cap), float(jnp.finfo(jnp.float32).max)
    if not 0 < soft_cap <= most:
        raise ValueError(message(op, "logit_soft_cap", f"value {soft_cap}", "a positive float32, or None"))
    return soft_cap


def read_temperature(op: str, temperature: float) -> float:
    temperature, most = as_number(op, "temperature", temperature), float(jnp.finfo(jnp.float32).max)
    if not 1 / most <= temperature <= most:
        raise ValueError(message(op, "temperature", f"value {temperature}", "a positive float32"))
    return temperature


def read_block_size(op: str, block_size: Any) -> int | None:
    if block_size is None:
        return None
    check_is_known(op, "block_size", block_size, "an int")
    if not isinstance(block_size, numbers.Integral) or block_size < 1:
        raise ValueError(message(op, "block_size", f"value {block_size!r}", "a positive int or None"))
    return int(block_size)
