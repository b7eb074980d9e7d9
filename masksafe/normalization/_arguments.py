"""The arguments that norms share."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from masksafe._core.arguments import as_float_array, as_number, as_static_or_array, message
from masksafe._core.typing import Array, ArrayLike, Axes


def as_epsilon(op: str, epsilon: Any) -> float:
    """A number that is known at trace time, 0 or more."""
    number = as_number(op, "epsilon", epsilon)
    if not number >= 0:
        raise ValueError(message(op, "epsilon", f"value {number}", "0 or more"))
    return number


def as_static_or_array_epsilon(op: str, epsilon: Any, x: Array) -> tuple[float | None, Any]:
    """The epsilon as a static number or as an array, by `as_static_or_array`; a program has to know of a tiny one."""
    number = as_epsilon(op, epsilon)
    return as_static_or_array(number, x) if number >= jnp.finfo(jnp.float32).tiny else (number, None)


def along_axes(op: str, argument: str, value: ArrayLike | None, x: Array, axes: Axes) -> Array | None:
    """A parameter of the shape of some axes of `x`, laid out to broadcast with `x`."""
    if value is None:
        return None
    parameter = as_float_array(op, argument, value, of_any_width=True)
    expected = tuple(x.shape[a] for a in axes)
    if parameter.shape != expected:
        expectation = f"shape {expected}, that of the axes {axes} of x"
        raise ValueError(message(op, argument, f"shape {parameter.shape}", expectation))
    in_memory_order = jnp.transpose(parameter, sorted(range(len(axes)), key=axes.__getitem__))
    return jnp.expand_dims(in_memory_order, [a for a in range(x.ndim) if a not in axes])
