"""Which elements of a step's operands influence which elements of its results.

For the spread of NaNs, `behind` goes from elements of a result to the elements of an operand that take part in them,
and `ahead` from elements of an operand to the elements of a result in which they take part. `behind_decision` and
`ahead_decision` do the same for the elements that decide a finite result: a selection is also decided by its predicate,
an `or` that is True by the operands that are True, a count other than 0 by the elements that were counted.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from masksafe._core.sharding import is_random_key
from masksafe.testing import _primitives
from masksafe.testing._devices import Exchange
from masksafe.testing._replay import Choice, Gathered, Part, Step, Value
from masksafe.testing._trees import is_float


def behind(step: Step, k: int, i: int, mask: np.ndarray) -> np.ndarray:
    """The elements of operand i that take part in the masked elements of output k."""
    return _spread(_Way(step, k, i, is_ahead=False), mask)


def ahead(step: Step, k: int, i: int, mask: np.ndarray) -> np.ndarray:
    """The elements of output k in which the masked elements of operand i take part."""
    return _spread(_Way(step, k, i, is_ahead=True), mask)


def behind_decision(step: Step, k: int, i: int, mask: np.ndarray) -> np.ndarray:
    """The elements of operand i that decided the masked elements of output k."""
    return _spread_decision(_Way(step, k, i, is_ahead=False), mask)


def ahead_decision(step: Step, k: int, i: int, mask: np.ndarray) -> np.ndarray:
    """The elements of output k that the masked elements of operand i decided."""
    return _spread_decision(_Way(step, k, i, is_ahead=True), mask)


def any_ahead(step: Step, k: int, masks: Sequence[np.ndarray], ahead: Callable[..., np.ndarray] = ahead) -> np.ndarray:
    """The elements of output k that are ahead of a masked element of any of the first operands."""
    found = np.zeros(step.outputs[k].bad.shape, bool)
    for i, mask in enumerate(masks):
        found = found | ahead(step, k, i, mask)
    return found


def is_selection(operation: Any) -> bool:
    """Whether the first operand selects the result from the others."""
    return isinstance(operation, Choice) or operation.name in _primitives.SELECTIONS


def is_move(operation: Any) -> bool:
    return isinstance(operation, (Part, Gathered)) or operation.name in _primitives.MOVES


class _Way(NamedTuple):
    """From operand i of a step ahead to its output k, or from the output back."""

    step: Step
    k: int
    i: int
    is_ahead: bool

    @property
    def operand(self) -> Value:
        return self.step.inputs[self.i]

    @property
    def result(self) -> Value:
        return self.step.outputs[self.k]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the end."""
        return (self.result if self.is_ahead else self.operand).bad.shape

    def broadcast(self, mask: np.ndarray) -> np.ndarray:
        """The mask at the shape of the end, if the operand was broadcast: back, True where any copy is True."""
        if self.is_ahead:
            return np.broadcast_to(mask, self.shape)
        kept = np.asarray(mask.any(tuple(range(mask.ndim - len(self.shape)))))
        return np.asarray(kept.any(tuple(a for a, n in enumerate(self.shape) if n == 1), keepdims=True))


def _spread(way: _Way, mask: np.ndarray) -> np.ndarray:
    """Where the elements are, at the end of the way, that take part in the masked ones or in which those take part."""
    step, k, i, is_ahead = way
    operation, shape = step.operation, way.shape
    if not mask.any() or (is_selection(operation) and i == 0):
        return np.zeros(shape, bool)
    if isinstance(operation, Choice):
        return mask
    if is_selection(operation):
        return way.broadcast(mask & (_array(step.inputs[0]).astype(int) == i - 1))
    if isinstance(operation, Part):
        return np.asarray(mask[operation.at]) if is_ahead else _placed(mask, operation.at, shape)
    if isinstance(operation, Gathered):
        at = operation.places[i]
        return _placed(mask, at, shape) if is_ahead else np.asarray(mask[at])
    if isinstance(operation, Exchange):
        return mask & operation.connects(i, k) if operation.is_elementwise else np.full(shape, True)
    if operation.name in _primitives.ELEMENTWISE:
        return way.broadcast(mask)
    if operation.name in _primitives.REDUCTIONS:
        if is_ahead:
            return np.broadcast_to(mask.any(_axes(operation)) if mask.ndim else mask, shape)
        return np.broadcast_to(np.expand_dims(mask, _axes(operation)) if shape else mask.any(), shape)
    if operation.name in _primitives.CUMULATIVE:
        return _accumulated(mask, operation.params["axis"], from_the_end=operation.params["reverse"] == is_ahead)
    if operation.name in _primitives.LINEAR:
        return _spread_linear(way, mask, _as_ones(step))
    return _spread_along_mixed_axes(operation, mask, shape)


def _spread_decision(way: _Way, mask: np.ndarray) -> np.ndarray:
    """As `_spread`, of elements that decide."""
    step, _, i, is_ahead = way
    name = step.operation.name
    if not mask.any():
        return np.zeros(way.shape, bool)
    if is_selection(step.operation) and i == 0:
        return way.broadcast(mask)
    if name in _primitives.LINEAR and not is_random_key(way.operand.array):
        # All elements decide a sum that is 0, and those other than 0 one that is not.
        counts, result = _array(way.operand) != 0, _array(way.result) != 0
        first, last = (counts, result) if is_ahead else (result, counts)
        in_sum = _spread_linear(way, mask & first, _as_floats(step)) & last
        first, last = (np.True_, ~result) if is_ahead else (~result, np.True_)
        return np.asarray(in_sum | (_spread_linear(way, mask & first, _as_ones(step)) & last))
    decides = _decides(way)
    if (name in _primitives.REDUCTIONS) == is_ahead:  # the way begins where the rank is the larger one
        return _spread(way, mask & decides)
    return np.asarray(_spread(way, mask) & decides)


def _decides(way: _Way) -> np.ndarray:
    """Where the operand took part in the decision about the result, at the rank of the larger of the two.

    An extreme is decided by the operands equal to it, a product of 0 by the operands that are 0, and a sum other than 0
    by the operands that are not 0.
    """
    operation = way.step.operation
    is_extreme, is_product = operation.name in _primitives.EXTREMES, operation.name in _primitives.PRODUCTS
    if not (is_extreme or is_product or operation.name == "reduce_sum"):
        return np.asarray(True)
    x, result = _array(way.operand), _array(way.result)
    if operation.name in _primitives.REDUCTIONS:
        result = np.expand_dims(result, _axes(operation))
    if is_extreme:
        return np.asarray(x == result)
    return np.asarray((x == 0) | (result != 0) if is_product else (x != 0) | (result == 0))


def _array(value: Value) -> Any:
    return np.asarray(value.array)


def _spread_linear(way: _Way, mask: np.ndarray, arrays: Sequence[Any]) -> np.ndarray:
    """As `_spread`, through a linear operation of `arrays`: where its derivative is not 0."""
    step, k, i, is_ahead = way
    name, params = step.operation.name, step.operation.params
    if not mask.any():
        return np.zeros(way.shape, bool)
    if _is_index(name, i) or is_random_key(way.operand.array):
        return np.full(way.shape, True)
    if name in _primitives.RESHAPES:
        return mask.reshape(way.shape)
    if name == "transpose":
        permutation = params["permutation"]
        return mask.transpose(permutation if is_ahead else np.argsort(permutation))
    if name == "broadcast_in_dim":
        added = tuple(a for a in range(len(params["shape"])) if a not in params["broadcast_dimensions"])
        return way.broadcast(np.expand_dims(mask, added) if is_ahead else np.asarray(mask.any(added)))
    start = (way.operand if is_ahead else way.result).array
    derivative = step.operation.derivative(k, i, is_ahead=is_ahead)
    return np.asarray(np.asarray(derivative(mask.astype(_float_dtype(start)), *arrays)) != 0)


def _is_index(name: str, i: int) -> bool:
    return i >= _primitives.FIRST_INDEX.get(name, i + 1)


def _as_floats(step: Step) -> list[Any]:
    """The operands with booleans and integers, which have no derivatives, as floats; indices stay as they are."""
    return [
        x if _is_index(step.operation.name, i) or is_random_key(x) else x.astype(_float_dtype(x))
        for i, x in enumerate(value.array for value in step.inputs)
    ]


def _as_ones(step: Step) -> list[Any]:
    """The operands with every float set to 1, where the derivative is positive for each element that takes part."""
    return [jnp.ones_like(x) if is_float(x) else x for x in _as_floats(step)]


def _float_dtype(array: Any) -> Any:
    return array.dtype if jnp.issubdtype(array.dtype, jnp.inexact) else jnp.float32


def _axes(operation: Any) -> tuple[int, ...]:
    return tuple(operation.params["dimensions" if operation.name == "reduce" else "axes"])


def _placed(mask: np.ndarray, at: Any, shape: tuple[int, ...]) -> np.ndarray:
    """The mask at a place of an array that is False elsewhere."""
    placed = np.zeros(shape, bool)
    placed[at] = mask
    return placed


def _accumulated(mask: np.ndarray, axis: int, from_the_end: bool) -> np.ndarray:
    """Where the mask is True at the same place or before it; with `from_the_end`, or after it."""
    if not from_the_end:
        return np.asarray(np.logical_or.accumulate(mask, axis))
    return np.flip(np.logical_or.accumulate(np.flip(mask, axis), axis), axis)


def _spread_along_mixed_axes(operation: Any, mask: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The masked elements, spread along all axes along which the operation mixes elements."""
    if operation.name in _primitives.MATRIX_OPS:
        batch = max(mask.ndim, len(shape)) - 2  # a matrix's counterpart may be a vector
        any_of_matrix = np.asarray(mask.any(tuple(range(batch, mask.ndim))))
        return np.broadcast_to(np.expand_dims(any_of_matrix, tuple(range(batch, len(shape)))), shape)
    if operation.name in _primitives.MIXED_AXES:
        mixed = _primitives.MIXED_AXES[operation.name](operation.params, mask.ndim)
        return np.broadcast_to(mask.any(mixed, keepdims=True), shape)
    return np.full(shape, mask.any())
