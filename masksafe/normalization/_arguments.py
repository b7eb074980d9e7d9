"""The arguments that norms share."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from masksafe._core import arguments, masks
from masksafe._core.typing import Array, Axes

TINIEST = float(jnp.finfo(jnp.float32).tiny)


class Given(NamedTuple):
    """Arrays as the user gives them. A jitted function reads them: eagerly, that would cost more than a small norm."""

    x: Array
    scale: Array | None
    bias: Array | None
    where: Array | None
    weights: Array | None
    epsilon: Any  # None where the program knows it


class NormInputs(NamedTuple):
    """What a norm is computed from: arrays of one rank, whose size is 1 where they repeat."""

    x: Array
    where: Array | None = None
    weights: Array | None = None  # of the shape of `x`, as is then `where`
    scale: Array | None = None
    bias: Array | None = None
    epsilon: Any = None  # None where the program knows it


def given(
    op: str, x: object, scale: object, bias: object, where: object, weights: object, epsilon: object
) -> tuple[float | None, Given]:
    """The epsilon, if the program has to know it, and the arrays."""

    def as_array(argument: str, value: object) -> Array | None:
        return None if value is None else arguments.as_array(op, argument, value)

    x, number = arguments.as_array(op, "x", x), arguments.as_epsilon(op, epsilon)
    static, array = (number, None) if number < TINIEST else arguments.as_static_or_array(number, x)
    parameters = as_array("scale", scale), as_array("bias", bias)
    return static, Given(x, *parameters, as_array("where", where), as_array("weights", weights), array)


def read(op: str, given: Given, axes: Axes) -> NormInputs:
    """The inputs; `x` is one of floats, of which scale and bias have the shape of some axes."""
    x = arguments.as_float_array(op, "x", given.x, of_any_width=True)

    def parameter(argument: str, value: Array | None) -> Array | None:
        return None if value is None else along_axes(op, argument, value, x, axes)

    where, weights = masks.as_mask_of(op, given.where, x.shape), masks.as_weights_of(op, given.weights, x.shape)
    weighting = masks.weighting_of(x, where, weights)
    parameters = parameter("scale", given.scale), parameter("bias", given.bias)
    epsilon = None if given.epsilon is None else jnp.reshape(given.epsilon, (1,) * x.ndim)
    return NormInputs(x, weighting.where, weighting.weights, *parameters, epsilon)


def along_axes(op: str, argument: str, parameter: Array, x: Array, axes: Axes) -> Array:
    """A parameter of the shape of some axes of `x`, laid out to broadcast with `x`."""
    parameter = arguments.as_float_array(op, argument, parameter, of_any_width=True)
    expected = tuple(x.shape[a] for a in axes)
    if parameter.shape != expected:
        expectation = f"shape {expected}, that of the axes {axes} of x"
        raise ValueError(arguments.message(op, argument, f"shape {parameter.shape}", expectation))
    in_memory_order = jnp.transpose(parameter, sorted(range(len(axes)), key=axes.__getitem__))
    return jnp.expand_dims(in_memory_order, [a for a in range(x.ndim) if a not in axes])
