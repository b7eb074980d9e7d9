"""What bad elements decide: comparisons of them, and what was counted, chosen or computed from such alone.

A NaN that an op finds in its input and answers with a NaN of its own goes through a predicate, which is finite.
"""

import numpy as np

from masksafe.testing._influence import ELEMENTWISE, ahead_decision, is_move, is_selection
from masksafe.testing._replay import Replay, Step, Value

Masks = dict[Value, np.ndarray]


def decided(replay: Replay) -> Masks:
    """The elements of values, finite or not, that are what they are because others are bad."""
    found: Masks = {}
    for step in replay.steps:
        masks = [_deciding(v, found) for v in step.inputs]
        if any(mask is not None for mask in masks):
            for k, value in enumerate(step.outputs):
                mask = _of_output(step, k, masks, found)
                if mask.any():
                    found[value] = mask
    return found


def _deciding(value: Value, found: Masks) -> np.ndarray | None:
    """Elements that are bad or decided, or None; what the program has as a constant decides nothing."""
    if value.is_constant or not (value.is_bad or value in found):
        return None
    return value.bad | found[value] if value in found else value.bad


def _of_output(step: Step, k: int, masks: list[np.ndarray | None], found: Masks) -> np.ndarray:
    value = step.outputs[k]
    known = [found.get(v) for v in step.inputs]
    if value.is_discrete and not value.is_bad:
        return _union(step, k, masks)
    if is_selection(step.operation):
        return _of_selection(step, k, masks[0], found)
    if value.is_discrete:  # a bad element that comes from a bad one is no decision
        return np.asarray(np.where(value.bad, _union(step, k, known), _union(step, k, masks)))
    if is_move(step.operation) or step.operation.name not in ELEMENTWISE:
        return _union(step, k, known) if is_move(step.operation) else np.zeros(value.bad.shape, bool)
    return _of_elements(step, k, known)


def _of_selection(step: Step, k: int, predicate: np.ndarray | None, found: Masks) -> np.ndarray:
    """Chosen by a decided predicate from what is discrete, or decided itself."""
    is_simple = [v.is_discrete or v.is_constant or v.is_written_nan for v in step.inputs[1:]]
    chosen = [np.full(v.bad.shape, True) if s else None for v, s in zip(step.inputs[1:], is_simple, strict=True)]
    known = [found.get(v) for v in step.inputs[1:]]
    by_predicate = _union(step, k, [predicate]) & _union(step, k, [None, *chosen])
    return np.asarray(by_predicate | _union(step, k, [None, *known]))


def _of_elements(step: Step, k: int, known: list[np.ndarray | None]) -> np.ndarray:
    """Decided in full: nothing but discrete operands at the side. A division by 0 is decided by its divisor."""
    shape = step.outputs[k].bad.shape
    in_full = np.full(shape, True)
    for i, (value, mask) in enumerate(zip(step.inputs, known, strict=True)):
        if not (value.is_discrete or value.is_constant):
            in_full = in_full & (False if mask is None else ahead_decision(step, k, i, mask))
    if step.operation.name == "div":
        in_full = in_full | np.broadcast_to(np.asarray(step.inputs[1].array) == 0, shape)
        known = [None, known[1]]
    decided_in_full: np.ndarray = in_full & _union(step, k, known)
    return decided_in_full


def _union(step: Step, k: int, masks: list[np.ndarray | None]) -> np.ndarray:
    """The elements of output k that are decided by a masked one of any of the first operands."""
    union = np.zeros(step.outputs[k].bad.shape, bool)
    for i, mask in enumerate(masks):
        if mask is not None and mask.any():
            union = union | ahead_decision(step, k, i, mask)
    return union
