"""The arguments that losses of a linear layer share; some functions read those of losses of logits, too."""

import functools
import math
import numbers
from collections.abc import Iterable
from typing import Literal, TypedDict

import jax.numpy as jnp
from jax import lax

from masksafe._core.arguments import (
    as_bool,
    as_float_array,
    as_label_array,
    as_number,
    check_is_known,
    check_shape,
    message,
)
from masksafe._core.derivatives import product
from masksafe._core.label_checks import Range, check_elements, check_integer_labels
from masksafe._core.labels import at_labels, is_class
from masksafe._core.masks import as_mask, either
from masksafe._core.precision import widened
from masksafe._core.sharding import AxisName, Devices
from masksafe._core.typing import Array, ArrayLike, Arrays
from masksafe.losses._rows._cross_entropy import Output
from masksafe.losses._rows._linear_layer import Linear, LinearInputs

Yes = Literal[True]  # of an argument that decides what is returned
No = Literal[False]


class LabelOptions(TypedDict, total=False):
    """The parameters that losses of a layer and labels have in common, besides the arrays."""

    bias: ArrayLike | None
    where: ArrayLike | None
    logit_soft_cap: float | None
    block_size: int | None
    axis_name: AxisName
    class_mask: ArrayLike | None


def read_layer(op: str, features: ArrayLike, kernel: ArrayLike, bias: ArrayLike | None, prefix: str = "") -> Linear:
    """Features `[..., D]`, kernel `[D, V]` and bias `[V]`, whose names begin with `prefix`."""
    features, kernel = as_float_array(op, f"{prefix}features", features), as_float_array(op, f"{prefix}kernel", kernel)
    if features.ndim == 0:
        raise ValueError(message(op, f"{prefix}features", "shape ()", "[..., D]"))
    width = features.shape[-1]
    if kernel.ndim != 2 or kernel.shape[0] != width or kernel.shape[1] == 0:
        expected = f"[D, V] with the D = {width} of {prefix}features {features.shape}, and at least one class"
        is_transposed = kernel.ndim == 2 and kernel.shape[1] == width
        hint = f"For a kernel [V, D] pass {prefix}kernel.T." if is_transposed else ""
        raise ValueError(message(op, f"{prefix}kernel", f"shape {kernel.shape}", expected, hint))
    if bias is not None:
        bias = read_per_class(op, f"{prefix}bias", bias, kernel.shape[1], f"{prefix}kernel")
    return Linear(features, kernel, bias)


def read_per_class(op: str, argument: str, value: ArrayLike, number: int, of: str) -> Array:
    """Floats `[V]`."""
    array = as_float_array(op, argument, value)
    check_shape(op, argument, array.shape, (number,), f"the classes of {of}")
    return array


def cleaned_class_weights(class_weights: Array) -> Array:
    """The weights, wide, NaN where negative; they have no gradient."""
    return not_negative(widened(lax.stop_gradient(class_weights)))


def not_negative(weights: Array) -> Array:
    return jnp.where(weights < 0, jnp.nan, weights)


def weights_of_labels(class_weights: Array, labels: Array, unmasked: Array | None, axis_name: AxisName) -> Array:
    """The weight of the class of each label; 1 for a masked label, or one out of range: its loss must show."""
    has_weight = is_class(labels, class_weights.size * Devices(axis_name).size)
    has_weight = has_weight if unmasked is None else has_weight & unmasked
    return jnp.where(has_weight, at_labels(class_weights, labels, axis_name), 1)


def weighted_losses(losses: Array, weights: Array) -> Array:
    """The product; with an array of weights 0 for a weight of 0, even where the loss is not finite."""
    return losses * weights if weights.ndim == 0 else jnp.where(weights == 0, 0, product(losses, weights))


def read_labels(op: str, features: Array, labels: ArrayLike, *, may_be_several: bool = False) -> Array:
    """Integers of the shape of the tokens; maybe with one axis more, of several labels of a token."""
    labels, shape = as_label_array(op, "labels", labels), features.shape[:-1]
    if may_be_several and labels.ndim == len(shape) + 1:
        shape = (*shape, labels.shape[-1])
    check_shape(op, "labels", labels.shape, shape, f"that of features {features.shape} without its last axis")
    return labels


def read_class_mask(op: str, class_mask: ArrayLike | None, kernel: Array) -> Array | None:
    """Booleans `[V]`, or None."""
    if class_mask is None:
        return None
    mask = as_mask(op, "class_mask", class_mask)
    check_shape(op, "class_mask", mask.shape, kernel.shape[1:], "the classes")
    return mask


def check_labels(op: str, inputs: LinearInputs, class_mask: Array | None, axis_name: AxisName) -> Array | None:
    """If label checks are on, reports bad labels of unmasked tokens, and returns which tokens have one."""
    labels, unmasked, number = inputs.data, inputs.unmasked, inputs.layers[0].kernel.shape[1]
    where = None if unmasked is None else unmasked[..., None]
    bad = check_integer_labels(op, labels, where, (labels.ndim,), (*labels.shape, number), axis_name)
    if class_mask is None:
        return bad
    is_unmasked = lambda labels: at_labels((~class_mask).astype(jnp.int32), labels, axis_name) == 0  # noqa: E731
    return either(bad, check_elements(op, labels, labels.shape, unmasked, is_unmasked, "at a masked class"))


_MOST = float(jnp.finfo(jnp.float32).max)
_RANGES = {
    "beta": Range(lambda x: 0 < x < 1, "a number between 0 and 1, both excluded"),
    "label_smoothing": Range(lambda x: 0 <= x <= 1, "a number in [0, 1]"),
    "logit_soft_cap": Range(lambda x: 0 < x <= _MOST, "a positive float32, or None"),
    "temperature": Range(lambda x: 1 / _MOST <= x <= _MOST, "a positive float32"),
    "z_loss": Range(lambda x: 0 <= x < math.inf, "a finite non-negative number"),
}


def read_number(op: str, argument: str, value: float, hint: str = "") -> float:
    value, allowed = as_number(op, argument, value), _RANGES[argument]
    if not allowed.contains(value):
        raise ValueError(message(op, argument, f"value {value}", allowed.text, hint))
    return value


def read_optional_number(op: str, argument: str, value: float | None) -> float | None:
    return None if value is None else read_number(op, argument, value)


def read_factors(op: str, label_smoothing: float, z_loss: float, mean: Output) -> dict[Output, float]:
    """The outputs that a loss adds up, and their factors."""
    smoothing = read_number(op, "label_smoothing", label_smoothing)
    z_loss = read_number(op, "z_loss", z_loss)
    factors: dict[Output, float] = {"cross_entropy": 1 - smoothing, mean: smoothing, "square": z_loss}
    return {name: factor for name, factor in factors.items() if factor > 0}


def components(names: Iterable[Output], losses: Arrays) -> tuple[Array, Array]:
    """The cross-entropy and the z-loss, from the outputs times their factors."""
    others = losses[:-1] if "square" in names else losses
    cross_entropy = functools.reduce(jnp.add, others)
    return cross_entropy, losses[-1] if "square" in names else jnp.zeros_like(cross_entropy)


def read_block_size(op: str, block_size: object) -> int | None:
    if block_size is None:
        return None
    check_is_known(op, "block_size", block_size, "an int")
    if not isinstance(block_size, numbers.Integral) or block_size < 1:
        raise ValueError(message(op, "block_size", f"value {block_size!r}", "a positive int or None"))
    return int(block_size)


def read_with_predictions(op: str, with_predictions: object, inputs: LinearInputs, axis_name: AxisName) -> bool:
    needed = as_bool(op, "with_predictions", with_predictions)
    number, most = inputs.classes(axis_name).number, 2 ** (jnp.finfo(inputs.sum_dtype).nmant + 1)
    if needed and number >= most:  # the formula counts classes in the dtype of the sums
        raise ValueError(message(op, "with_predictions", f"True for {number} classes", f"fewer than {most} classes"))
    return needed


def predictions(logsumexps: Array, places: Array) -> tuple[Array, Array]:
    """The predicted classes, -1 for none, from the formula's, which count from 1; and the logsumexps."""
    return jnp.where(places > 0, places - 1, -1).astype(jnp.int32), logsumexps
