"""What bad elements decide: comparisons of them, and whatever was counted, chosen or computed only from such decisions.

An op may find a NaN in its input and answer with a NaN of its own; the link between the two is a predicate, which is
finite.
"""

import numpy as np

from masksafe.testing._influence import ELEMENTWISE, ahead_decision, is_move, is_selection
from masksafe.testing._replay import Replay, Step, Value

Masks = dict[Value, np.ndarray]


def find_decided(replay: Replay) -> Masks:
    """The elements of values, finite or not, that have their value because others are bad."""
    found: Masks = {}
    for step in replay.steps:
        masks = [_deciding_mask(v, found) for v in step.inputs]
        if any(mask is not None for mask in masks):
            for k, value in enumerate(step.outputs):
                mask = _decided_in_output(step, k, masks, found)
                if mask.any():
                    found[value] = mask
    return found


def _deciding_mask(value: Value, found: Masks) -> np.ndarray | None:
    """The elements that are bad or decided, or None; a constant of the program decides nothing."""
    if value.is_constant or not (value.is_bad or value in found):
        return None
    return value.bad | found[value] if value in found else value.bad


def _decided_in_output(step: Step, k: int, masks: list[np.ndarray | None], found: Masks) -> np.ndarray:
    value = step.outputs[k]
    decided_before = [found.get(v) for v in step.inputs]
    if value.is_discrete and not value.is_bad:
        return _union(step, k, masks)
    if is_selection(step.operation):
        return _decided_in_selection(step, k, masks[0], found)
    if value.is_discrete:  # a bad element that comes from a bad one is not a decision
        return np.asarray(np.where(value.bad, _union(step, k, decided_before), _union(step, k, masks)))
    if is_move(step.operation) or step.operation.name not in ELEMENTWISE:
        return _union(step, k, decided_before) if is_move(step.operation) else np.zeros(value.bad.shape, bool)
    return _decided_elementwise(step, k, decided_before)


def _decided_in_selection(step: Step, k: int, predicate: np.ndarray | None, found: Masks) -> np.ndarray:
    """The elements that a decided predicate chose from discrete operands, or that were decided before."""
    is_simple = [v.is_discrete or v.is_constant or v.is_written_nan for v in step.inputs[1:]]
    chosen = [np.full(v.bad.shape, True) if s else None for v, s in zip(step.inputs[1:], is_simple, strict=True)]
    decided_before = [found.get(v) for v in step.inputs[1:]]
    by_predicate = _union(step, k, [predicate]) & _union(step, k, [None, *chosen])
    return np.asarray(by_predicate | _union(step, k, [None, *decided_before]))


def _decided_elementwise(step: Step, k: int, decided_before: list[np.ndarray | None]) -> np.ndarray:
    """The elements whose operands are all decided or discrete; a division by 0 is decided by its divisor alone."""
    shape = step.outputs[k].bad.shape
    in_full = np.full(shape, True)
    for i, (value, mask) in enumerate(zip(step.inputs, decided_before, strict=True)):
        if not (value.is_discrete or value.is_constant):
            in_full = in_full & (False if mask is None else ahead_decision(step, k, i, mask))
    if step.operation.name == "div":
        in_full = in_full | np.broadcast_to(np.asarray(step.inputs[1].array) == 0, shape)
        decided_before = [None, decided_before[1]]
    decided_in_full: np.ndarray = in_full & _union(step, k, decided_before)
    return decided_in_full


def _union(step: Step, k: int, masks: list[np.ndarray | None]) -> np.ndarray:
    """The elements of output k that a masked element of one of the first operands decided."""
    union = np.zeros(step.outputs[k].bad.shape, bool)
    for i, mask in enumerate(masks):
        if mask is not None and mask.any():
            union = union | ahead_decision(step, k, i, mask)
    return union
