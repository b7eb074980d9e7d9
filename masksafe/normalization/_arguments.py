"""The arguments that norms share."""

from __future__ import annotations

from typing import Any, NamedTuple, TypedDict, Unpack

import jax.numpy as jnp

from masksafe._core import arguments, masks
from masksafe._core.typing import Array, ArrayLike, Axes

_TINIEST = float(jnp.finfo(jnp.float32).tiny)


class Arguments(TypedDict, total=False):
    """As the user gives them."""

    scale: ArrayLike | None
    bias: ArrayLike | None
    where: ArrayLike | None
    weights: ArrayLike | None
    epsilon: Any


class Inputs(NamedTuple):
    """What a norm is computed from: arrays of one rank, whose size is 1 where they repeat, and a scalar epsilon."""

    x: Array
    where: Array | None = None
    weights: Array | None = None
    scale: Array | None = None
    bias: Array | None = None
    epsilon: Any = None  # None where the program knows it


def read_arguments(op: str, x: Array, axes: Axes, **given: Unpack[Arguments]) -> tuple[float | None, Inputs]:
    """The epsilon, if the program has to know it, and the arrays. Scale and bias have the shape of some axes of `x`."""
    epsilon = arguments.as_epsilon(op, given["epsilon"])
    static, array = (epsilon, None) if epsilon < _TINIEST else arguments.as_static_or_array(epsilon, x)
    return static, Inputs(
        x,
        masks.as_mask_of(op, given.get("where"), x.shape),
        masks.as_weights_of(op, given.get("weights"), x.shape),
        along_axes(op, "scale", given.get("scale"), x, axes),
        along_axes(op, "bias", given.get("bias"), x, axes),
        array,
    )


def along_axes(op: str, argument: str, value: ArrayLike | None, x: Array, axes: Axes) -> Array | None:
    """A parameter of the shape of some axes of `x`, laid out to broadcast with `x`."""
    if value is None:
        return None
    parameter = arguments.as_float_array(op, argument, value, of_any_width=True)
    expected = tuple(x.shape[a] for a in axes)
    if parameter.shape != expected:
        expectation = f"shape {expected}, that of the axes {axes} of x"
        raise ValueError(arguments.message(op, argument, f"shape {parameter.shape}", expectation))
    in_memory_order = jnp.transpose(parameter, sorted(range(len(axes)), key=axes.__getitem__))
    return jnp.expand_dims(in_memory_order, [a for a in range(x.ndim) if a not in axes])
