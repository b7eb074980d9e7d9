"""The arguments that norms share."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from masksafe._core import arguments, masks, precision
from masksafe._core.typing import Array, Axes

TINIEST = float(jnp.finfo(jnp.float32).tiny)


class NormInputs(NamedTuple):
    """The arrays of a norm, at one rank with size 1 where they broadcast; or as the user gives them."""

    x: Array
    scale: Array | None = None
    bias: Array | None = None
    where: Array | None = None
    weights: Array | None = None  # of the shape of `x`; then `where` has that shape too
    epsilon: Any = None  # None where the program knows it


def given(
    op: str, x: object, scale: object, bias: object, where: object, weights: object, epsilon: object
) -> tuple[float | None, NormInputs]:
    """The epsilon, if the program has to know it, and the arrays as the user gives them.

    `read` checks them, in a jitted function: eagerly that would take longer than a small norm.
    """
    x, number = arguments.as_array(op, "x", x), arguments.as_epsilon(op, epsilon)
    static, array = (number, None) if number < TINIEST else arguments.as_static_or_array(number, x)
    named = {"scale": scale, "bias": bias, "where": where, "weights": weights}
    arrays = {name: arguments.if_given(arguments.as_array, op, name, value) for name, value in named.items()}
    return static, NormInputs(x, epsilon=array, **arrays)


def read(op: str, given: NormInputs, axes: Axes) -> NormInputs:
    """The inputs, checked: `x` has floats, scale and bias broadcast with it, and epsilon is wide."""
    x = arguments.as_float_array(op, "x", given.x, any_width=True)
    x, weighting = masks.read_weighting(op, x, given.where, given.weights)
    scale = arguments.if_given(along_axes, op, "scale", given.scale, x, axes)
    bias = arguments.if_given(along_axes, op, "bias", given.bias, x, axes)
    epsilon = None if given.epsilon is None else jnp.full((1,) * x.ndim, given.epsilon, precision.wide_dtype(x.dtype))
    return NormInputs(x, scale, bias, *weighting, epsilon)


def along_axes(op: str, argument: str, parameter: Array, x: Array, axes: Axes) -> Array:
    """A parameter of the shape of some axes of `x`, laid out to broadcast with `x`."""
    parameter = arguments.as_float_array(op, argument, parameter, any_width=True)
    expected = tuple(x.shape[a] for a in axes)
    if parameter.shape != expected:
        expectation = f"shape {expected}, that of the axes {axes} of x"
        raise ValueError(arguments.message(op, argument, f"shape {parameter.shape}", expectation))
    in_memory_order = jnp.transpose(parameter, sorted(range(len(axes)), key=axes.__getitem__))
    return jnp.expand_dims(in_memory_order, [a for a in range(x.ndim) if a not in axes])
