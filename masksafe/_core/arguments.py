"""Argument checks. Every public op reads its arguments through these functions.

A check takes the name of the op and the name of the argument, so every refusal has the same form:
``softmax_cross_entropy: where: got dtype float32; expected bool. Write where != 0.``
Types and dtypes raise TypeError; ranks, shapes and axes raise ValueError.
"""

import functools
import numbers
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from masksafe._core.typing import Array, ArrayLike, Axis, DType, Tree


def message(op: str, argument: str, found: str, expected: str, hint: str = "") -> str:
    """An error text: the op, the argument, what was found, what was expected, and how to fix it."""
    return f"{op}: {argument}: got {found}; expected {expected}." + (f" {hint}" if hint else "")


def as_array(op: str, argument: str, value: object) -> Array:
    """`value` as a JAX array."""
    if isinstance(value, jax.Array):  # not converted: even a conversion without effect triggers jax_debug_nans
        return value
    try:
        with jax.debug_nans(False):  # reading a NaN is not an error yet
            return jnp.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(message(op, argument, _describe_type(value), "an array")) from error


def if_given(read: Callable[..., Tree], op: str, argument: str, value: object, *others: Any) -> Tree | None:
    """`read(op, argument, value, ...)`, or None."""
    return None if value is None else read(op, argument, value, *others)


def as_float_array(op: str, argument: str, value: object, *, any_width: bool = False) -> Array:
    """`value` as an array of floats, of at least 16 bits unless `any_width`."""
    array = as_array(op, argument, value)
    if not _is_of(jnp.floating, array.dtype) or (not any_width and _is_narrow_float(array)):
        expected = "a float dtype of at least 16 bits" if _is_narrow_float(array) else "a float dtype"
        raise TypeError(message(op, argument, f"dtype {array.dtype}", expected))
    return array


def as_promoted_float_array(op: str, argument: str, value: object, *, any_width: bool = False) -> Array:
    """`value` as an array of floats; integers and booleans are promoted as in `jax.nn`."""
    array = as_array(op, argument, value)
    if _is_of(jnp.integer, array.dtype) or array.dtype == jnp.bool_:
        array = array.astype(jnp.float64 if array.dtype.itemsize == 8 else jnp.float32)
    return as_float_array(op, argument, array, any_width=any_width)


def as_real_array(op: str, argument: str, value: object) -> Array:
    """`value` as an array of booleans, of integers, or of floats of at least 16 bits."""
    array = as_array(op, argument, value)
    if jnp.issubdtype(array.dtype, jnp.complexfloating) or _is_narrow_float(array):
        expected = "a real dtype, floats of at least 16 bits" if _is_narrow_float(array) else "a real dtype"
        raise TypeError(message(op, argument, f"dtype {array.dtype}", expected))
    return array


def as_operand(op: str, argument: str, value: object) -> Any:
    """Like `as_array`, but a Python number stays one, since a jitted function takes it faster than JAX converts it."""
    return value if _is_number(value) else as_array(op, argument, value)


def as_real_operand(op: str, argument: str, value: object) -> Any:
    """Like `as_real_array`, but a Python number stays a number."""
    return value if _is_number(value) else as_real_array(op, argument, value)


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < 2**31)


def _is_narrow_float(array: Array) -> bool:
    """Whether the dtype is a float of 8 bits or fewer, which JAX does not promote and hardly computes in."""
    return _is_of(jnp.floating, array.dtype) and jnp.finfo(array.dtype).bits < 16


@functools.cache
def _is_of(kind: type, dtype: DType) -> bool:
    """Whether `dtype` is of `kind`; cached, since in eager code the question takes longer than a short op."""
    return bool(jnp.issubdtype(dtype, kind))


def as_empty_value(op: str, value: object, dtype: DType) -> Any:
    """The argument `empty_value` of an op, a scalar in the dtype of its result, or None."""
    if value is None:
        return None
    # NumPy has Python's numbers as they are: JAX rounds them, and refuses those beyond 32 bits.
    given: Any = np.asarray(value) if isinstance(value, numbers.Number) else as_array(op, "empty_value", value)
    if given.ndim:
        raise ValueError(message(op, "empty_value", f"shape {given.shape}", "a number, or an array of shape ()"))
    is_float, found = _is_of(jnp.inexact, dtype), f"value {value}"
    is_refused = not (_is_of(jnp.number, given.dtype) or given.dtype == jnp.bool_)
    is_refused |= _is_of(jnp.complexfloating, given.dtype) and not _is_of(jnp.complexfloating, dtype)
    if isinstance(given, jax.core.Tracer):
        found = f"dtype {given.dtype}"
        with jax.numpy_dtype_promotion("standard"):
            is_refused |= not (is_refused or is_float) and jnp.promote_types(given.dtype, dtype) != dtype
    elif not is_refused:
        is_refused = not holds(dtype, given)
    if is_refused:
        raise TypeError(message(op, "empty_value", found, f"a number that {dtype} holds, the dtype of the result"))
    return given.astype(dtype)


def holds(dtype: DType, number: ArrayLike) -> bool:
    """Whether the dtype holds a number that is not traced: an integer exactly, a finite float as a finite one."""
    given = np.asarray(number)
    with np.errstate(all="ignore"):
        held = given.astype(dtype)
    return bool(np.isfinite(held) == np.isfinite(given) if _is_of(jnp.inexact, dtype) else held == given)


def as_integer_array(op: str, argument: str, value: object, hint: str = "") -> Array:
    """`value` as an array of integers."""
    array = as_array(op, argument, value)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(message(op, argument, f"dtype {array.dtype}", "an integer dtype", hint))
    return array


def as_label_array(op: str, argument: str, value: object) -> Array:
    """`value` as an array of class numbers; see `as_index_array`."""
    return as_index_array(op, argument, value, "For soft labels and one-hot rows use softmax_cross_entropy.")


def as_index_array(op: str, argument: str, value: object, hint: str = "") -> Array:
    """`value` as an array of signed integers of at least 32 bits, none of which has wrapped round.

    With 64-bit types disabled, JAX keeps the low half of a 64-bit integer, which would turn the label 2**32 into 0.
    NumPy labels, and numbers of Python, are therefore clipped to the 32-bit range first: an out-of-range label stays
    out of range.
    """
    if type(value) is int or (isinstance(value, (np.ndarray, np.generic)) and np.issubdtype(value.dtype, np.integer)):
        limits = np.iinfo(jax.dtypes.canonicalize_dtype(np.int64 if isinstance(value, int) else value.dtype))
        value = np.clip(value, limits.min, limits.max)
    array = as_integer_array(op, argument, value, hint)
    # Signed, since they are compared with -1; and a narrower dtype may be unable to hold the number of classes.
    signed = jnp.dtype(jnp.int64 if array.dtype.itemsize == 8 else jnp.int32)
    if jnp.issubdtype(array.dtype, jnp.unsignedinteger) and array.dtype.itemsize == signed.itemsize:
        array = jnp.minimum(array, jnp.asarray(jnp.iinfo(signed).max, array.dtype))
    return array if array.dtype == signed else array.astype(signed)


def as_number(
    op: str, argument: str, value: Any, is_allowed: Callable[[float], bool] | None = None, expected: str = ""
) -> float:
    """`value` as a number known at trace time; `is_allowed`, if given, says which numbers are allowed."""
    check_is_known(op, argument, value, "a number")
    if isinstance(value, str):
        raise TypeError(message(op, argument, "type str", "a number"))
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(message(op, argument, _describe_type(value), "a number")) from error
    if is_allowed is not None and not is_allowed(number):
        raise ValueError(message(op, argument, f"value {number}", expected))
    return number


def as_one_element(op: str, argument: str, array: Array) -> Array:
    """An array of one element, on any number of axes, as a scalar."""
    if array.size != 1:
        raise ValueError(message(op, argument, f"shape {array.shape}", "a scalar, or an array of one element"))
    return array if array.ndim == 0 else array.reshape(())


def as_epsilon(op: str, epsilon: object) -> float:
    """`epsilon` as a non-negative number known at trace time."""
    return as_number(op, "epsilon", epsilon, lambda number: number >= 0, "0 or more")


def as_size(op: str, argument: str, value: Any, least: int) -> int:
    """`value` as an int of at least `least`, known at trace time; or a symbolic size of `jax.export`."""
    check_is_known(op, argument, value, "an int")
    try:
        size: Any = value if export.is_symbolic_dim(value) else operator.index(value)
    except TypeError as error:
        raise TypeError(message(op, argument, _describe_type(value), "an int")) from error
    if size < least:
        raise ValueError(message(op, argument, f"value {size}", f"an int of at least {least}"))
    return size


def as_bool(op: str, argument: str, value: Any) -> bool:
    """`value` as True or False, known at trace time."""
    check_is_known(op, argument, value, "a bool")
    if np.ndim(value):
        raise TypeError(message(op, argument, f"an array of shape {np.shape(value)}", "True or False"))
    return bool(value)


def as_choice(op: str, argument: str, value: str, choices: Sequence[str]) -> str:
    """`value`, which has to be one of `choices`."""
    if value not in choices:
        raise ValueError(message(op, argument, f"value {value!r}", f"one of {', '.join(map(repr, choices))}"))
    return value


def check_both_or_none(op: str, hint: str = "", /, **pair: object) -> None:
    """Refuses one of two arrays without the other."""
    missing = [name for name, value in pair.items() if value is None]
    if len(missing) == 1:
        raise ValueError(message(op, missing[0], "value None", "an array, since its counterpart is given", hint))


def check_is_known(op: str, argument: str, value: object, expected: str) -> None:
    """Refuses a traced value where the program depends on a known one."""
    if isinstance(value, jax.core.Tracer):
        hint = "Name its parameter in static_argnames of jax.jit, or let the function close over it."
        raise TypeError(message(op, argument, "a traced array", f"{expected} that is known while tracing", hint))


def is_staged(*arrays: Array) -> bool:
    """Whether a call with these arrays is being traced for a compiled program, not run at once.

    In eager code, even under `jax.grad` or `jax.vmap`, each value of a static number makes a new program.
    """
    if not any(isinstance(x, jax.core.Tracer) for x in arrays):
        return False
    return bool(jax.sharding.get_abstract_mesh().manual_axes) or isinstance(jnp.asarray(0), jax.core.Tracer)


def as_static_or_array(value: float, *arrays: Array) -> tuple[float | None, Any]:
    """A number as a constant of the program that is being traced, or in eager code as an array.

    So eager calls with different numbers share one compiled program.
    """
    return (value, None) if is_staged(*arrays) else (None, np.float64(value))


def canonical_axes(op: str, axis: Axis | None, ndim: int) -> tuple[int, ...]:
    """`axis` as a tuple of distinct axes in [0, ndim), in the order given; None means every axis."""
    if axis is None:
        return tuple(range(ndim))
    axes = tuple(_canonical_axis(op, a, ndim) for a in (axis if isinstance(axis, tuple | list) else (axis,)))
    if len(set(axes)) < len(axes):
        raise ValueError(message(op, "axis", f"value {axis}", "distinct axes"))
    return axes


def _describe_type(value: object) -> str:
    return f"type {type(value).__name__}"


def _canonical_axis(op: str, axis: Any, ndim: int) -> int:
    if np.ndim(axis) == 0:
        check_is_known(op, "axis", axis, "an int or a tuple of ints")
    try:
        index = operator.index(axis)
    except TypeError as error:
        is_array = isinstance(axis, (jax.Array, np.ndarray))
        found, hint = ("an array", "Pass the mask by name: where=mask.") if is_array else (_describe_type(axis), "")
        raise TypeError(message(op, "axis", found, "an int or a tuple of ints", hint)) from error
    if not -ndim <= index < ndim:
        expected = f"a value in [{-ndim}, {ndim}), for an array of rank {ndim}"
        raise ValueError(message(op, "axis", f"value {index}", expected))
    return index % ndim


def check_shape(op: str, argument: str, shape: Sequence[int], expected: Sequence[int], which: str = "") -> None:
    """Refuses a `shape` other than the expected one; `which` says where that is from, as in "that of labels"."""
    if shape != expected:
        text = f"{expected}, {which}" if which else f"{expected}"
        raise ValueError(message(op, argument, f"shape {shape}", text))


def check_broadcasts_to(
    op: str, argument: str, shape: Sequence[int], target: Sequence[int], of: str, hint: str = ""
) -> None:
    """Refuses a `shape` that does not broadcast to `target`, the shape of `of`."""
    trailing = tuple(target)[len(target) - len(shape) :] if len(shape) <= len(target) else None
    if trailing is None or any(n not in (1, t) for n, t in zip(shape, trailing, strict=True)):
        expected = f"a shape that broadcasts to {tuple(target)}, the shape of {of}"
        hint = hint or leading_axes_hint(argument, shape, target)
        raise ValueError(message(op, argument, f"shape {tuple(shape)}", expected, hint))


def leading_axes_hint(argument: str, shape: Sequence[int], target: Sequence[int]) -> str:
    """How to write an argument that fits the leading axes of a target of higher rank; empty if it does not fit them."""
    missing = len(target) - len(shape)
    if missing < 1 or any(n not in (1, t) for n, t in zip(shape, target, strict=False)):
        return ""
    return f"To align it with the leading axes write {argument}[..., {', '.join(['None'] * missing)}]."


def at_rank_of(op: str, argument: str, mask: Array, target: Sequence[int], of: str) -> Array:
    """`mask` reshaped to the rank of `target`, the shape of `of`; it must broadcast to it but is not expanded."""
    check_broadcasts_to(op, argument, mask.shape, target, of)
    missing = len(target) - mask.ndim
    return mask.reshape((1,) * missing + mask.shape) if missing else mask  # eagerly a reshape is a program


def broadcast_shapes(op: str, hint: str = "", /, **shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The common shape of the named arguments."""
    different = set(shapes.values()) - {()}
    if len(different) <= 1:
        return next(iter(different), ())
    try:
        return jnp.broadcast_shapes(*shapes.values())
    except ValueError as error:
        found, expected = f"shapes {' and '.join(map(str, shapes.values()))}", "shapes that broadcast together"
        raise ValueError(message(op, " and ".join(shapes), found, expected, hint)) from error
