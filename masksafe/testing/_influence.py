"""Which elements of the operands of a step have to do with which elements of its results.

Both ways: `behind` goes from elements of a result to those of an operand that take part in them, `ahead` from elements
of an operand to those of a result in which they take part.
"""

import jax.numpy as jnp
import numpy as np

from masksafe.testing._replay import Operation, Slice, Stack, Step
from masksafe.testing._trees import is_float

# Each element of the result depends on the elements of the operands at the same place alone.
ELEMENTWISE = frozenset(
    """abs acos acosh add add_any asin asinh atan atan2 atanh cbrt ceil clamp complex conj convert_element_type copy cos
    cosh digamma div erf erf_inv erfc exp exp2 expm1 floor imag integer_pow lgamma log log1p logistic max min mul neg
    nextafter pow real reduce_precision rem round rsqrt sign sin sinh sqrt square stop_gradient sub tan tanh
    """.split()  # noqa: SIM905
)
# Each element of the result is a sum of elements of the operands, or of their products.
_LINEAR = frozenset(
    """broadcast_in_dim concatenate conv_general_dilated dot_general dynamic_slice dynamic_update_slice expand_dims
    gather pad ragged_dot reduce_window_sum reshape rev scatter scatter-add slice split squeeze stack tile transpose
    """.split()  # noqa: SIM905
)
_REDUCTIONS = frozenset("argmax argmin reduce reduce_max reduce_min reduce_prod reduce_sum".split())  # noqa: SIM905
_CUMULATIVE = frozenset("cumlogsumexp cummax cummin cumprod cumsum".split())  # noqa: SIM905
_OF_MATRICES = frozenset(
    """cholesky eig eigh householder_product lu qr schur svd triangular_solve tridiagonal_solve""".split()  # noqa: SIM905
)


def behind(step: Step, k: int, i: int, mask: np.ndarray) -> np.ndarray:
    """The elements of operand i that take part in the masked elements of output k."""
    operation, shape = step.operation, step.inputs[i].bad.shape
    if isinstance(operation, Slice):
        taken = np.zeros(shape, bool)
        taken[operation.at] = mask
        return taken
    if isinstance(operation, Stack):
        return np.asarray(mask[i])
    if operation.name == "select_n":
        return _unbroadcast(mask & _is_chosen(step, i, mask.shape), shape) if i else np.zeros(shape, bool)
    if operation.name in ELEMENTWISE:
        return _unbroadcast(mask, shape)
    if operation.name in _REDUCTIONS:
        return np.broadcast_to(np.expand_dims(mask, _axes(operation)) if shape else np.asarray(mask.any()), shape)
    if operation.name in _CUMULATIVE:
        return _accumulated(mask, operation.params["axis"], not operation.params["reverse"])
    if operation.name in _LINEAR:
        weights = operation.pull_back(k, i)(jnp.asarray(mask, step.outputs[k].array.dtype), *_ones(step))
        return np.asarray(np.asarray(weights) != 0)
    return _over_mixed(operation, mask, shape)


def ahead(step: Step, k: int, i: int, mask: np.ndarray) -> np.ndarray:
    """The elements of output k in which the masked elements of operand i take part."""
    operation, shape = step.operation, step.outputs[k].bad.shape
    if isinstance(operation, Slice):
        return np.asarray(mask[operation.at])
    if isinstance(operation, Stack):
        stacked = np.zeros(shape, bool)
        stacked[i] = mask
        return stacked
    if operation.name == "select_n":
        return np.broadcast_to(mask, shape) & _is_chosen(step, i, shape) if i else np.zeros(shape, bool)
    if operation.name in ELEMENTWISE:
        return np.broadcast_to(mask, shape)
    if operation.name in _REDUCTIONS:
        return np.asarray(mask.any(_axes(operation)) if mask.ndim else np.broadcast_to(mask, shape))
    if operation.name in _CUMULATIVE:
        return _accumulated(mask, operation.params["axis"], operation.params["reverse"])
    if operation.name in _LINEAR:
        tangent = operation.push_forward(k, i)(jnp.asarray(mask, step.inputs[i].array.dtype), *_ones(step))
        return np.asarray(np.asarray(tangent) != 0)
    return _over_mixed(operation, mask, shape)


def _ones(step: Step) -> list[object]:
    """The operands with ones in place of floats: there a derivative is positive for each element that takes part."""
    return [jnp.ones_like(v.array) if is_float(v.array) else v.array for v in step.inputs]


def _is_chosen(step: Step, i: int, shape: tuple[int, ...]) -> np.ndarray:
    """Where a selection takes its operand i, the first of which says so."""
    return np.broadcast_to(np.asarray(step.inputs[0].array).astype(int) == i - 1, shape)


def _axes(operation: Operation) -> tuple[int, ...]:
    return tuple(operation.params["dimensions" if operation.name == "reduce" else "axes"])


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
