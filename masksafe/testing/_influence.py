"""Which elements of a step's operands influence which elements of its results.

For the spread of NaNs, `behind` goes from elements of a result to the elements of an operand that take part in them,
and `ahead` from elements of an operand to the elements of a result in which they take part. `behind_decision` and
`ahead_decision` do the same for the elements that decide a finite result: a selection is also decided by its predicate,
an `or` that is True by the operands that are True, a count other than 0 by the elements that were counted.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from masksafe.testing._devices import Exchange, Part
from masksafe.testing._replay import Choice, Gathered, Operation, Slice, Stack, Step, Value
from masksafe.testing._trees import is_float

# Each element of the result depends only on the elements of the operands at the same index.
ELEMENTWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp clz complex conj convert_element_type
    copy cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le le_to
    lgamma log log1p logistic lt lt_to max min mul ne neg nextafter not or population_count pow real reduce_precision
    rem round rsqrt shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub
    tan tanh xor
    """.split()  # noqa: SIM905
)
# Each element of the result is an element of an operand.
_MOVES = frozenset(
    """broadcast_in_dim concatenate dynamic_slice dynamic_update_slice gather pad reshape rev scatter slice
    split squeeze stack tile transpose
    """.split()  # noqa: SIM905
)
# Each element of the result is a sum of elements of the operands, or of their products.
_LINEAR = _MOVES | {"conv_general_dilated", "dot_general", "ragged_dot_general", "reduce_window_sum", "scatter-add"}
# Where among the operands the indices start.
_INDICES = {
    "gather": 1,
    "scatter": 1,
    "scatter-add": 1,
    "dynamic_slice": 1,
    "dynamic_update_slice": 2,
    "ragged_dot_general": 2,
}
_RESHAPES = frozenset(("reshape", "squeeze"))
_REDUCTIONS = frozenset(
    "argmax argmin reduce reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor".split()  # noqa: SIM905
)
_CUMULATIVE = frozenset("cumlogsumexp cummax cummin cumprod cumsum".split())  # noqa: SIM905
_MATRIX_OPS = frozenset(
    """cholesky eig eigh householder_product lu qr schur svd triangular_solve tridiagonal_solve""".split()  # noqa: SIM905
)
# Operations in which not every operand decides: an extreme is decided by the operands equal to it, a product of 0 by
# the operands that are 0, and a sum other than 0 by the operands that are not 0.
_EXTREMES = frozenset("and max min or reduce_and reduce_max reduce_min reduce_or".split())  # noqa: SIM905
_PRODUCTS = frozenset(("mul", "reduce_prod"))


def behind(step: Step, k: int, i: int, mask: np.ndarray) -> np.ndarray:
    """The elements of operand i that take part in the masked elements of output k."""
    operation, shape = step.operation, step.inputs[i].bad.shape
    if is_selection(operation):
        return _unbroadcast(mask & _is_chosen(step, i, mask.shape), shape) if i else np.zeros(shape, bool)
    if isinstance(operation, (Slice, Part)):
        taken = np.zeros(shape, bool)
        taken[operation.at] = mask
        return taken
    if isinstance(operation, Stack):
        return np.asarray(mask[i])
    if isinstance(operation, Gathered):
        return np.asarray(mask[operation.places[i]])
    if isinstance(operation, Exchange):
        return _mask_across_devices(operation, i, k, mask, shape)
    if operation.name in ELEMENTWISE:
        return _unbroadcast(mask, shape)
    if operation.name in _REDUCTIONS:
        return np.broadcast_to(_at_rank_of_operand(operation, mask) if shape else np.asarray(mask.any()), shape)
    if operation.name in _CUMULATIVE:
        return _accumulated(mask, operation.params["axis"], not operation.params["reverse"])
    if operation.name in _LINEAR:
        return _behind_linear(step, k, i, mask, _as_ones(step))
    return _spread_along_mixed_axes(operation, mask, shape)


def ahead(step: Step, k: int, i: int, mask: np.ndarray) -> np.ndarray:
    """The elements of output k in which the masked elements of operand i take part."""
    operation, shape = step.operation, step.outputs[k].bad.shape
    if is_selection(operation):
        return np.broadcast_to(mask, shape) & _is_chosen(step, i, shape) if i else np.zeros(shape, bool)
    if isinstance(operation, (Slice, Part)):
        return np.asarray(mask[operation.at])
    if isinstance(operation, Stack):
        stacked = np.zeros(shape, bool)
        stacked[i] = mask
        return stacked
    if isinstance(operation, Gathered):
        gathered = np.zeros(shape, bool)
        gathered[operation.places[i]] = mask
        return gathered
    if isinstance(operation, Exchange):
        return _mask_across_devices(operation, i, k, mask, shape)
    if operation.name in ELEMENTWISE:
        return np.broadcast_to(mask, shape)
    if operation.name in _REDUCTIONS:
        return np.asarray(mask.any(_axes(operation)) if mask.ndim else np.broadcast_to(mask, shape))
    if operation.name in _CUMULATIVE:
        return _accumulated(mask, operation.params["axis"], operation.params["reverse"])
    if operation.name in _LINEAR:
        return _ahead_linear(step, k, i, mask, _as_ones(step))
    return _spread_along_mixed_axes(operation, mask, shape)


def behind_decision(step: Step, k: int, i: int, mask: np.ndarray) -> np.ndarray:
    """The elements of operand i that decided the masked elements of output k."""
    operation, shape = step.operation, step.inputs[i].bad.shape
    if is_selection(operation) and i == 0:
        return _unbroadcast(mask, shape)
    if operation.name in _LINEAR and not _is_key(step.inputs[i]):
        is_zero, counts = _is_zero(step.outputs[k]), ~_is_zero(step.inputs[i])
        added = _behind_linear(step, k, i, mask & ~is_zero, _as_floats(step)) & counts
        return np.asarray(added | _behind_linear(step, k, i, mask & is_zero, _as_ones(step)))
    if operation.name in _REDUCTIONS:
        return np.asarray(behind(step, k, i, mask) & _takes_part_in_decision(step, k, i))
    return behind(step, k, i, mask & _takes_part_in_decision(step, k, i))


def ahead_decision(step: Step, k: int, i: int, mask: np.ndarray) -> np.ndarray:
    """The elements of output k that the masked elements of operand i decided."""
    operation, shape = step.operation, step.outputs[k].bad.shape
    if is_selection(operation) and i == 0:
        return np.broadcast_to(mask, shape)
    if operation.name in _LINEAR and not _is_key(step.inputs[i]):
        is_zero, counts = _is_zero(step.outputs[k]), ~_is_zero(step.inputs[i])
        added = _ahead_linear(step, k, i, mask & counts, _as_floats(step)) & ~is_zero
        return np.asarray(added | (_ahead_linear(step, k, i, mask, _as_ones(step)) & is_zero))
    if operation.name in _REDUCTIONS:
        return ahead(step, k, i, mask & _takes_part_in_decision(step, k, i))
    return np.asarray(ahead(step, k, i, mask) & _takes_part_in_decision(step, k, i))


def is_selection(operation: Any) -> bool:
    """Whether the first operand selects the result from the others."""
    return isinstance(operation, Choice) or operation.name == "select_n"


def is_move(operation: Any) -> bool:
    return isinstance(operation, (Slice, Part, Stack, Gathered)) or operation.name in _MOVES


def _takes_part_in_decision(step: Step, k: int, i: int) -> np.ndarray:
    """Where operand i took part in the decision about output k, at the rank of the larger of the two."""
    name = step.operation.name
    if name not in _EXTREMES | _PRODUCTS | {"reduce_sum"}:
        return np.asarray(True)
    x, result = _array(step.inputs[i]), _array(step.outputs[k])
    if name in _REDUCTIONS:
        result = _at_rank_of_operand(step.operation, result)
    if name in _EXTREMES:
        return np.asarray(x == result)
    return np.asarray((x == 0) | (result != 0) if name in _PRODUCTS else (x != 0) | (result == 0))


def _array(value: Value) -> Any:
    return np.asarray(value.array)


def _is_zero(value: Value) -> np.ndarray:
    return np.asarray(_array(value) == 0)


def _behind_linear(step: Step, k: int, i: int, mask: np.ndarray, arrays: list[Any]) -> np.ndarray:
    operation, shape = step.operation, step.inputs[i].bad.shape
    known = _same_both_ways(step, i, mask, shape)
    if known is not None:
        return known
    if operation.name == "transpose":
        return mask.transpose(np.argsort(operation.params["permutation"]))
    if operation.name == "broadcast_in_dim":
        kept = operation.params["broadcast_dimensions"]
        return _unbroadcast(np.asarray(mask.any(tuple(a for a in range(mask.ndim) if a not in kept))), shape)
    weights = operation.pull_back(k, i)(mask.astype(_float_dtype(step.outputs[k].array)), *arrays)
    return np.asarray(np.asarray(weights) != 0)


def _ahead_linear(step: Step, k: int, i: int, mask: np.ndarray, arrays: list[Any]) -> np.ndarray:
    operation, shape = step.operation, step.outputs[k].bad.shape
    known = _same_both_ways(step, i, mask, shape)
    if known is not None:
        return known
    if operation.name == "transpose":
        return mask.transpose(operation.params["permutation"])
    if operation.name == "broadcast_in_dim":
        kept = operation.params["broadcast_dimensions"]
        return np.broadcast_to(np.expand_dims(mask, [a for a in range(len(shape)) if a not in kept]), shape)
    tangent = operation.push_forward(k, i)(mask.astype(arrays[i].dtype), *arrays)
    return np.asarray(np.asarray(tangent) != 0)


def _same_both_ways(step: Step, i: int, mask: np.ndarray, shape: tuple[int, ...]) -> np.ndarray | None:
    """The result, of `shape`, of both `_behind_linear` and `_ahead_linear`, or None if the direction matters."""
    if not mask.any():
        return np.zeros(shape, bool)
    if _is_index(step.operation, i) or _is_key(step.inputs[i]):
        return np.full(shape, True)
    return mask.reshape(shape) if step.operation.name in _RESHAPES else None


def _is_index(operation: Any, i: int) -> bool:
    return i >= _INDICES.get(operation.name, i + 1)


def _is_key(value: Value) -> bool:
    return bool(jnp.issubdtype(value.array.dtype, jax.dtypes.extended))


def _as_floats(step: Step) -> list[Any]:
    """The operands with booleans and integers, which have no derivatives, as floats; indices stay as they are."""
    return [
        v.array if _is_index(step.operation, i) or _is_key(v) else v.array.astype(_float_dtype(v.array))
        for i, v in enumerate(step.inputs)
    ]


def _as_ones(step: Step) -> list[Any]:
    """The operands with every float set to 1, where the derivative is positive for each element that takes part."""
    return [jnp.ones_like(x) if is_float(x) else x for x in _as_floats(step)]


def _float_dtype(array: Any) -> Any:
    return array.dtype if jnp.issubdtype(array.dtype, jnp.inexact) else jnp.float32


def _is_chosen(step: Step, i: int, shape: tuple[int, ...]) -> np.ndarray:
    """Where a selection takes its operand i."""
    if isinstance(step.operation, Choice):
        return np.full(shape, True)
    return np.broadcast_to(_array(step.inputs[0]).astype(int) == i - 1, shape)


def _mask_across_devices(operation: Exchange, i: int, k: int, mask: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The mask at the other end of an exchange: by element if the exchange is elementwise, else all or nothing."""
    if not operation.is_elementwise:
        return np.full(shape, mask.any())
    return mask & operation.connects(i, k)


def _axes(operation: Any) -> tuple[int, ...]:
    return tuple(operation.params["dimensions" if operation.name == "reduce" else "axes"])


def _at_rank_of_operand(operation: Any, result: np.ndarray) -> np.ndarray:
    return np.expand_dims(result, _axes(operation))


def _unbroadcast(mask: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The mask reduced to `shape`, which broadcasts to it: True where any copy is True."""
    kept = np.asarray(mask.any(tuple(range(mask.ndim - len(shape)))))
    return np.asarray(kept.any(tuple(a for a, n in enumerate(shape) if n == 1), keepdims=True))


def _accumulated(mask: np.ndarray, axis: int, from_the_end: bool) -> np.ndarray:
    """Where the mask is True at the same place or before it; with `from_the_end`, or after it."""
    if not from_the_end:
        return np.asarray(np.logical_or.accumulate(mask, axis))
    return np.flip(np.logical_or.accumulate(np.flip(mask, axis), axis), axis)


def _spread_along_mixed_axes(operation: Operation, mask: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The masked elements, spread along all axes along which the operation mixes elements."""
    if operation.name == "sort":
        mixed: tuple[int, ...] = (operation.params["dimension"],)
    elif operation.name == "top_k":
        mixed = (operation.params.get("axis", -1) % mask.ndim,)
    elif operation.name == "fft":
        mixed = tuple(range(mask.ndim - len(operation.params["fft_lengths"]), mask.ndim))
    elif operation.name in _MATRIX_OPS:
        batch = max(mask.ndim, len(shape)) - 2  # a matrix's counterpart may be a vector
        any_of_matrix = np.asarray(mask.any(tuple(range(batch, mask.ndim))))
        return np.broadcast_to(np.expand_dims(any_of_matrix, tuple(range(batch, len(shape)))), shape)
    else:
        return np.full(shape, mask.any())
    return np.broadcast_to(mask.any(mixed, keepdims=True), shape)
