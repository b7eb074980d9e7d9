"""What bad elements decide: comparisons of them, and whatever was counted, chosen or computed only from such decisions.

An op may find a NaN in its input and answer with a NaN of its own; the link between the two is a predicate, which is
finite.
"""

import functools
from collections.abc import Sequence

import numpy as np

from masksafe.testing import _primitives
from masksafe.testing._influence import ahead_decision, any_ahead, is_move, is_selection
from masksafe.testing._replay import Replay, Step, Value

Masks = dict[Value, np.ndarray]

NOTHING = np.asarray(False)


def find_decided(replay: Replay) -> Masks:
    """The elements of values, finite or not, that have their value because others are bad."""
    found: Masks = {}
    for step in replay.steps:
        # A constant of the program decides nothing.
        deciding = [NOTHING if v.is_constant else v.bad | found.get(v, NOTHING) for v in step.inputs]
        if any(mask.any() for mask in deciding):
            decided_before = [found.get(v, NOTHING) for v in step.inputs]
            for k, value in enumerate(step.outputs):
                mask = _decided_in_output(step, k, deciding, decided_before)
                if mask.any():
                    found[value] = mask
    return found


_union = functools.partial(any_ahead, ahead=ahead_decision)


def _decided_in_output(
    step: Step, k: int, deciding: Sequence[np.ndarray], decided_before: Sequence[np.ndarray]
) -> np.ndarray:
    value, operation = step.outputs[k], step.operation
    if value.is_discrete and not value.is_bad:
        return _union(step, k, deciding)
    if is_selection(operation):
        return _decided_in_selection(step, k, deciding[0], decided_before)
    if value.is_discrete:  # a bad element that comes from a bad one is not a decision
        return np.asarray(np.where(value.bad, _union(step, k, decided_before), _union(step, k, deciding)))
    if is_move(operation):
        return _union(step, k, decided_before)
    if operation.name in _primitives.ELEMENTWISE:
        return _decided_elementwise(step, k, decided_before)
    return np.zeros(value.bad.shape, bool)


def _decided_in_selection(
    step: Step, k: int, predicate: np.ndarray, decided_before: Sequence[np.ndarray]
) -> np.ndarray:
    """The elements that a decided predicate chose from discrete operands, or that were decided before."""
    simple = [np.full(v.bad.shape, v.is_discrete or v.is_constant or v.is_written_nan) for v in step.inputs[1:]]
    by_predicate = _union(step, k, [predicate]) & _union(step, k, [NOTHING, *simple])
    return np.asarray(by_predicate | _union(step, k, [NOTHING, *decided_before[1:]]))


def _decided_elementwise(step: Step, k: int, decided_before: Sequence[np.ndarray]) -> np.ndarray:
    """The elements whose operands are all decided or discrete; a division by 0 is decided by its divisor alone."""
    in_full = np.full(step.outputs[k].bad.shape, True)
    for i, (value, mask) in enumerate(zip(step.inputs, decided_before, strict=True)):
        if not (value.is_discrete or value.is_constant):
            in_full = in_full & ahead_decision(step, k, i, mask)
    if step.operation.name == "div":
        in_full = in_full | (np.asarray(step.inputs[1].array) == 0)
        decided_before = [NOTHING, decided_before[1]]
    return np.asarray(in_full & _union(step, k, decided_before))
