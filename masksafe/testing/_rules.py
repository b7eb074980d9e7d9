"""Which elements of a step's operands influence which elements of its results: a rule for each kind of operation.

`Way.spread` follows NaNs: from elements of an operand ahead to the elements of a result in which they take part, or
from elements of a result back. `Way.spread_decision` does the same for the elements that decide a finite result: a
selection is also decided by its predicate, an `or` that is True by the operands that are True, a count other than 0 by
the elements that were counted.

JAX's primitives are known by their names. A test compares all names with the primitives of the installed JAX.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from masksafe._core.sharding import is_random_key
from masksafe.testing._trees import is_float

Mask = NDArray[np.bool_]


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NAMES = {
    # Each element of the result depends only on the elements of the operands at the same index.
    "elementwise": """
        abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp clz complex conj convert_element_type
        copy cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le
        le_to lgamma log log1p logistic lt lt_to max min mul ne neg nextafter not or population_count pow real
        reduce_precision rem round rsqrt shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
        stop_gradient sub tan tanh told_on_cpu without_sign_of_zero xor
    """,
    "selection": "select_n",
    # Each element of the result is an element of an operand.
    "move": """
        broadcast_in_dim concatenate dynamic_slice dynamic_update_slice gather pad reshape rev scatter slice split
        squeeze stack tile transpose
    """,
    # Each element of the result is a sum of elements of the operands, or of their products.
    "sum": "conv_general_dilated dot_general ragged_dot_general reduce_window_sum scatter-add",
    "reduction": "argmax argmin reduce reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor",
    "cumulative": "cumlogsumexp cummax cummin cumprod cumsum",
    "matrix": "cholesky eig eigh householder_product lu qr schur svd triangular_solve tridiagonal_solve",
    "along axes": "fft sort top_k",
}
KINDS = {name: kind for kind, text in _NAMES.items() for name in names(text)}
MOVES = frozenset({"move", "part", "gathered"})
SELECTIONS = frozenset({"selection", "choice"})
# Where among the operands the indices start.
FIRST_INDEX = {"gather": 1, "scatter": 1, "scatter-add": 1, "dynamic_slice": 1}
FIRST_INDEX |= {"dynamic_update_slice": 2, "ragged_dot_general": 2}
# The axes along which elements are mixed, from the parameters and the rank.
MIXED_AXES: dict[str, Callable[[Mapping[str, Any], int], tuple[int, ...]]] = {
    "sort": lambda params, ndim: (params["dimension"],),
    "top_k": lambda params, ndim: (params.get("axis", -1) % ndim,),
    "fft": lambda params, ndim: tuple(range(ndim - len(params["fft_lengths"]), ndim)),
}
# Where an operand x took part in the decision about the result y: an extreme is decided by the operands equal to it, a
# product of 0 by the operands that are 0, and a sum other than 0 by the operands that are not 0. Else all take part.
DECIDING: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(names("and max min or reduce_and reduce_max reduce_min reduce_or"), lambda x, y: x == y),
    **dict.fromkeys(("mul", "reduce_prod"), lambda x, y: (x == 0) | (y != 0)),
    "reduce_sum": lambda x, y: (x != 0) | (y == 0),
}


class Way(NamedTuple):
    """The way from operand i of an operation ahead to its result, or back; both are values of a replay."""

    result: Any
    i: int
    is_ahead: bool

    @property
    def operation(self) -> Any:
        return self.result.operation

    @property
    def operand(self) -> Any:
        return self.result.inputs[self.i]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the end."""
        return (self.result if self.is_ahead else self.operand).bad.shape

    def broadcast(self, mask: Mask) -> Mask:
        """The mask at the shape of the end, if the operand was broadcast: back, True where any copy is True."""
        if self.is_ahead:
            return np.broadcast_to(mask, self.shape)
        kept = np.asarray(mask.any(tuple(range(mask.ndim - len(self.shape)))))
        return np.asarray(kept.any(tuple(a for a, n in enumerate(self.shape) if n == 1), keepdims=True))

    def spread(self, mask: Mask) -> Mask:
        """Where the elements are, at the end, that take part in the masked ones or in which those take part."""
        return np.asarray(_RULES[self.operation.kind](self, mask)) if mask.any() else np.zeros(self.shape, bool)

    def spread_decision(self, mask: Mask) -> Mask:
        """As `spread`, of elements that decide."""
        kind, name = self.operation.kind, self.operation.name
        if not mask.any():
            return np.zeros(self.shape, bool)
        if kind in SELECTIONS and self.i == 0:
            return self.broadcast(mask)
        if kind == "sum":
            # All elements decide a sum that is 0, and those other than 0 one that is not.
            counts: Mask = np.asarray(self.operand.array) != 0
            is_other: Mask = np.asarray(self.result.array) != 0
            if self.is_ahead:
                return (_in_sum(self, mask & counts, _as_floats) & is_other) | (self.spread(mask) & ~is_other)
            return (_in_sum(self, mask & is_other, _as_floats) & counts) | self.spread(mask & ~is_other)
        if name not in DECIDING:
            return self.spread(mask)
        result = np.asarray(self.result.array)
        result = np.expand_dims(result, _axes(self)) if kind == "reduction" else result
        decides: Mask = DECIDING[name](np.asarray(self.operand.array), result)
        if (kind == "reduction") == self.is_ahead:  # the way begins where the rank is the larger one
            return self.spread(mask & decides)
        return self.spread(mask) & decides


def any_ahead(value: Any, masks: Sequence[Mask], spread: Callable[[Way, Mask], Mask] = Way.spread) -> Mask:
    """The elements of a value that are ahead of a masked element of any of its first operands."""
    found = np.zeros(value.bad.shape, bool)
    for i, mask in enumerate(masks):
        found = found | spread(Way(value, i, is_ahead=True), mask)
    return found


def behind(value: Any, i: int, mask: Mask) -> Mask:
    """The elements of operand i that take part in the masked elements of a value."""
    return Way(value, i, is_ahead=False).spread(mask)


# The rules.


def _selected(way: Way, mask: Mask) -> Mask:
    predicate = np.asarray(way.result.inputs[0].array).astype(int)
    return way.broadcast(mask & (predicate == way.i - 1)) if way.i else np.zeros(way.shape, bool)


def _reduced(way: Way, mask: Mask) -> Mask:
    if way.is_ahead:
        return np.broadcast_to(mask.any(_axes(way)) if mask.ndim else mask, way.shape)
    return np.broadcast_to(np.expand_dims(mask, _axes(way)) if way.shape else mask.any(), way.shape)


def _axes(way: Way) -> tuple[int, ...]:
    return tuple(way.operation.params["dimensions" if way.operation.name == "reduce" else "axes"])


def _accumulated(way: Way, mask: Mask) -> Mask:
    axis, is_from_the_end = way.operation.params["axis"], way.operation.params["reverse"] == way.is_ahead
    mask = np.flip(mask, axis) if is_from_the_end else mask
    found = np.logical_or.accumulate(mask, axis)
    return np.flip(found, axis) if is_from_the_end else found


def _in_matrix(way: Way, mask: Mask) -> Mask:
    batch = max(mask.ndim, len(way.shape)) - 2  # a matrix's counterpart may be a vector
    any_of_matrix = np.asarray(mask.any(tuple(range(batch, mask.ndim))))
    return np.broadcast_to(np.expand_dims(any_of_matrix, tuple(range(batch, len(way.shape)))), way.shape)


def _along_axes(way: Way, mask: Mask) -> Mask:
    axes = MIXED_AXES[way.operation.name](way.operation.params, mask.ndim)
    return np.broadcast_to(mask.any(axes, keepdims=True), way.shape)


def _exchanged(way: Way, mask: Mask) -> Any:
    exchange = way.operation
    return mask & exchange.connections[way.i, way.result.k] if exchange.is_elementwise else np.full(way.shape, True)


def _placed(mask: Mask, at: Any, shape: tuple[int, ...]) -> Mask:
    """The mask at a place of an array that is False elsewhere."""
    placed = np.zeros(shape, bool)
    placed[at] = mask
    return placed


def _taken(way: Way, mask: Mask) -> Mask:
    at = way.operation.at
    return np.asarray(mask[at]) if way.is_ahead else _placed(mask, at, way.shape)


def _gathered(way: Way, mask: Mask) -> Mask:
    at = way.operation.at[way.i]
    return _placed(mask, at, way.shape) if way.is_ahead else np.asarray(mask[at])


def _as_floats(x: Any) -> Any:
    """Booleans and integers, which have no derivatives, as floats."""
    return x.astype(x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.float32)


def _as_ones(x: Any) -> Any:
    """Ones in place of floats, where the derivative is positive for each element that takes part."""
    x = _as_floats(x)
    return jnp.ones_like(x) if is_float(x) else x


def _in_sum(way: Way, mask: Mask, changed: Callable[[Any], Any] = _as_ones) -> Mask:
    """Where the derivative of a linear operation of the changed operands is not 0."""
    if not mask.any():
        return np.zeros(way.shape, bool)
    operands = [value.array for value in way.result.inputs]
    first_index = FIRST_INDEX.get(way.operation.name, len(operands))
    if way.i >= first_index or is_random_key(way.operand.array):
        return np.full(way.shape, True)
    operands = [x if n >= first_index or is_random_key(x) else changed(x) for n, x in enumerate(operands)]
    start = _as_floats((way.operand if way.is_ahead else way.result).array)
    derivative = way.operation.derivative(way.result.k, way.i, is_ahead=way.is_ahead)
    return np.asarray(np.asarray(derivative(mask.astype(start.dtype), *operands)) != 0)


_RULES: dict[str, Callable[[Way, Mask], Any]] = {
    "elementwise": Way.broadcast,
    "selection": _selected,
    "move": _in_sum,
    "sum": _in_sum,
    "reduction": _reduced,
    "cumulative": _accumulated,
    "matrix": _in_matrix,
    "along axes": _along_axes,
    "other": lambda way, mask: np.full(way.shape, mask.any()),
    # What a replay does beside the equations.
    "choice": lambda way, mask: mask if way.i else np.zeros(way.shape, bool),
    "part": _taken,
    "gathered": _gathered,
    "exchange": _exchanged,
}
