"""Which elements of the operands of a step have to do with which elements of its results.

Both ways: `behind` goes from elements of a result to those of an operand that take part in them, `ahead` from elements
of an operand to those of a result in which they take part. So much for how a NaN spreads. `behind_decision` and
`ahead_decision` tell of finite results who decided that they are what they are: a selection is decided by its predicate
as well, an `or` that is True by the operands that are True, a count that is not 0 by those that counted.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from masksafe.testing._devices import Exchange, Part
from masksafe.testing._replay import Choice, Gathered, Operation, Slice, Stack, Step, Value
from masksafe.testing._trees import is_float

# Each element of the result depends on the elements of the operands at the same place alone.
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
    """broadcast_in_dim concatenate dynamic_slice dynamic_update_slice expand_dims gather pad reshape rev scatter slice
    split squeeze stack tile transpose
    """.split()  # noqa: SIM905
)
# Each element of the result is a sum of elements of the operands, or of their products.
_LINEAR = _MOVES | {"conv_general_dilated", "dot_general", "ragged_dot", "reduce_window_sum", "scatter-add"}
_INDICES = {"gather": 1, "scatter": 1, "scatter-add": 1, "dynamic_slice": 1, "dynamic_update_slice": 2}  # the first one
_RESHAPES = frozenset(("expand_dims", "reshape", "squeeze"))
_REDUCTIONS = frozenset(
    "argmax argmin reduce reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor".split()  # noqa: SIM905
)
_CUMULATIVE = frozenset("cumlogsumexp cummax cummin cumprod cumsum".split())  # noqa: SIM905
_OF_MATRICES = frozenset(
    """cholesky eig eigh householder_product lu qr schur svd triangular_solve tridiagonal_solve""".split()  # noqa: SIM905
)
# The result is one of the operands, which all had to let it be that; or a product, which one of them can make 0; or a
# sum, to which those that are 0 add nothing.
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
        return _exchanged(operation, i, k, mask, shape)
    if operation.name in ELEMENTWISE:
        return _unbroadcast(mask, shape)
    if operation.name in _REDUCTIONS:
        return np.broadcast_to(_at_rank_of_operand(operation, mask) if shape else np.asarray(mask.any()), shape)
    if operation.name in _CUMULATIVE:
        return _accumulated(mask, operation.params["axis"], not operation.params["reverse"])
    if operation.name in _LINEAR:
        return _behind_linear(step, k, i, mask, _ones(step))
    return _over_mixed(operation, mask, shape)


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
        return _exchanged(operation, i, k, mask, shape)
    if operation.name in ELEMENTWISE:
        return np.broadcast_to(mask, shape)
    if operation.name in _REDUCTIONS:
        return np.asarray(mask.any(_axes(operation)) if mask.ndim else np.broadcast_to(mask, shape))
    if operation.name in _CUMULATIVE:
        return _accumulated(mask, operation.params["axis"], operation.params["reverse"])
    if operation.name in _LINEAR:
        return _ahead_linear(step, k, i, mask, _ones(step))
    return _over_mixed(operation, mask, shape)


def behind_decision(step: Step, k: int, i: int, mask: np.ndarray) -> np.ndarray:
    """The elements of operand i that decided that the masked elements of output k are what they are."""
    operation, shape = step.operation, step.inputs[i].bad.shape
    if is_selection(operation) and i == 0:
        return _unbroadcast(mask, shape)
    if operation.name in _LINEAR and not _is_key(step.inputs[i]):
        is_zero, counts = _is_zero(step.outputs[k]), ~_is_zero(step.inputs[i])
        added = _behind_linear(step, k, i, mask & ~is_zero, _floats(step)) & counts
        return np.asarray(added | _behind_linear(step, k, i, mask & is_zero, _ones(step)))
    if operation.name in _REDUCTIONS:
        return np.asarray(behind(step, k, i, mask) & _has_a_say(step, k, i))
    return behind(step, k, i, mask & _has_a_say(step, k, i))


def ahead_decision(step: Step, k: int, i: int, mask: np.ndarray) -> np.ndarray:
    """The elements of output k that the masked elements of operand i decided."""
    operation, shape = step.operation, step.outputs[k].bad.shape
    if is_selection(operation) and i == 0:
        return np.broadcast_to(mask, shape)
    if operation.name in _LINEAR and not _is_key(step.inputs[i]):
        is_zero, counts = _is_zero(step.outputs[k]), ~_is_zero(step.inputs[i])
        added = _ahead_linear(step, k, i, mask & counts, _floats(step)) & ~is_zero
        return np.asarray(added | (_ahead_linear(step, k, i, mask, _ones(step)) & is_zero))
    if operation.name in _REDUCTIONS:
        return ahead(step, k, i, mask & _has_a_say(step, k, i))
    return np.asarray(ahead(step, k, i, mask) & _has_a_say(step, k, i))


def is_selection(operation: Any) -> bool:
    """Whether the first operand says which of the others is the result."""
    return isinstance(operation, Choice) or operation.name == "select_n"


def is_move(operation: Any) -> bool:
    return isinstance(operation, (Slice, Part, Stack, Gathered)) or operation.name in _MOVES


def _has_a_say(step: Step, k: int, i: int) -> np.ndarray:
    """Whether an element of operand i could have made the result another one; at the rank of the larger of the two."""
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
    if not mask.any():
        return np.zeros(shape, bool)
    if _is_index(operation, i) or _is_key(step.inputs[i]):
        return np.full(shape, True)
    if operation.name in _RESHAPES:
        return mask.reshape(shape)
    if operation.name == "transpose":
        return mask.transpose(np.argsort(operation.params["permutation"]))
    if operation.name == "broadcast_in_dim":
        kept = operation.params["broadcast_dimensions"]
        return _unbroadcast(np.asarray(mask.any(tuple(a for a in range(mask.ndim) if a not in kept))), shape)
    weights = operation.pull_back(k, i)(mask.astype(_float_dtype(step.outputs[k].array)), *arrays)
    return np.asarray(np.asarray(weights) != 0)


def _ahead_linear(step: Step, k: int, i: int, mask: np.ndarray, arrays: list[Any]) -> np.ndarray:
    operation, shape = step.operation, step.outputs[k].bad.shape
    if not mask.any():
        return np.zeros(shape, bool)
    if _is_index(operation, i) or _is_key(step.inputs[i]):
        return np.full(shape, True)
    if operation.name in _RESHAPES:
        return mask.reshape(shape)
    if operation.name == "transpose":
        return mask.transpose(operation.params["permutation"])
    if operation.name == "broadcast_in_dim":
        kept = operation.params["broadcast_dimensions"]
        return np.broadcast_to(np.expand_dims(mask, [a for a in range(len(shape)) if a not in kept]), shape)
    tangent = operation.push_forward(k, i)(mask.astype(arrays[i].dtype), *arrays)
    return np.asarray(np.asarray(tangent) != 0)


def _is_index(operation: Any, i: int) -> bool:
    return i >= _INDICES.get(operation.name, i + 1)


def _is_key(value: Value) -> bool:
    return bool(jnp.issubdtype(value.array.dtype, jax.dtypes.extended))


def _floats(step: Step) -> list[Any]:
    """The operands with floats in place of booleans and integers, which have no derivatives; but for indices."""
    return [
        v.array if _is_index(step.operation, i) or _is_key(v) else v.array.astype(_float_dtype(v.array))
        for i, v in enumerate(step.inputs)
    ]


def _ones(step: Step) -> list[Any]:
    """The same with ones: there a derivative is positive for each element that takes part."""
    return [jnp.ones_like(x) if is_float(x) else x for x in _floats(step)]


def _float_dtype(array: Any) -> Any:
    return array.dtype if jnp.issubdtype(array.dtype, jnp.inexact) else jnp.float32


def _is_chosen(step: Step, i: int, shape: tuple[int, ...]) -> np.ndarray:
    """Where a selection takes its operand i, the first of which says so."""
    if isinstance(step.operation, Choice):
        return np.full(shape, True)
    return np.broadcast_to(_array(step.inputs[0]).astype(int) == i - 1, shape)


def _exchanged(operation: Exchange, i: int, k: int, mask: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Element by element if that fits, between devices that have to do with each other."""
    if not operation.is_elementwise:
        return np.full(shape, mask.any())
    return mask & operation.connects(i, k)


def _axes(operation: Any) -> tuple[int, ...]:
    return tuple(operation.params["dimensions" if operation.name == "reduce" else "axes"])


def _at_rank_of_operand(operation: Any, result: np.ndarray) -> np.ndarray:
    return np.expand_dims(result, _axes(operation))


def _unbroadcast(mask: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A mask of `shape`, True where any element is that it is broadcast to."""
    kept = np.asarray(mask.any(tuple(range(mask.ndim - len(shape)))))
    return np.asarray(kept.any(tuple(a for a, n in enumerate(shape) if n == 1), keepdims=True))


def _accumulated(mask: np.ndarray, axis: int, from_the_end: bool) -> np.ndarray:
    """Where there is a True at the same place or before it; or after it."""
    if not from_the_end:
        return np.asarray(np.logical_or.accumulate(mask, axis))
    return np.flip(np.logical_or.accumulate(np.flip(mask, axis), axis), axis)


def _over_mixed(operation: Operation, mask: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """All elements of `shape` that differ from a masked one at most in the axes along which the operation mixes."""
    if operation.name == "sort":
        mixed: tuple[int, ...] = (operation.params["dimension"],)
    elif operation.name == "top_k":
        mixed = (operation.params.get("axis", -1) % mask.ndim,)
    elif operation.name == "fft":
        mixed = tuple(range(mask.ndim - len(operation.params["fft_lengths"]), mask.ndim))
    elif operation.name in _OF_MATRICES:
        batch = max(mask.ndim, len(shape)) - 2  # of an operand or a result that is a vector for each of them as well
        any_of_matrix = np.asarray(mask.any(tuple(range(batch, mask.ndim))))
        return np.broadcast_to(np.expand_dims(any_of_matrix, tuple(range(batch, len(shape)))), shape)
    else:
        return np.full(shape, mask.any())
    return np.broadcast_to(mask.any(mixed, keepdims=True), shape)
