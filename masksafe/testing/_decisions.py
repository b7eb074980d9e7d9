"""What bad elements decide: comparisons of them, and whatever was counted, chosen or computed only from such decisions.

An op may find a NaN in its input and answer with a NaN of its own; the link between the two is a predicate, which is
finite.
"""

import functools
from collections.abc import Sequence

import numpy as np

from masksafe.testing._replay import Replay, Step, Value
from masksafe.testing._rules import MOVES, SELECTIONS, Mask, Way, any_ahead

Masks = dict[Value, Mask]

NOTHING = np.asarray(False)

_union = functools.partial(any_ahead, spread=Way.spread_decision)


def find_decided(replay: Replay) -> Masks:
    """The elements of values, finite or not, that have their value because others are bad."""
    found: Masks = {}
    for step in replay.steps:
        before = [found.get(v, NOTHING) for v in step.inputs]
        # A constant of the program decides nothing.
        deciding = [NOTHING if v.is_constant else v.bad | mask for v, mask in zip(step.inputs, before, strict=True)]
        if any(mask.any() for mask in deciding):
            for k, value in enumerate(step.outputs):
                mask = _decided_in_output(step, k, deciding, before)
                if mask.any():
                    found[value] = mask
    return found


def _decided_in_output(step: Step, k: int, deciding: Sequence[Mask], before: Sequence[Mask]) -> Mask:
    value, kind = step.outputs[k], step.operation.kind
    if value.is_discrete and not value.is_bad:
        return _union(step, k, deciding)
    if kind in SELECTIONS:
        # A decided predicate chose from discrete operands, or what it chose was decided before.
        simple = [np.full(v.bad.shape, v.is_discrete or v.is_constant or v.is_written_nan) for v in step.inputs[1:]]
        by_predicate = _union(step, k, deciding[:1]) & _union(step, k, [NOTHING, *simple])
        return by_predicate | _union(step, k, [NOTHING, *before[1:]])
    if value.is_discrete:  # a bad element that comes from a bad one is not a decision
        return np.where(value.bad, _union(step, k, before), _union(step, k, deciding))
    if kind in MOVES:
        return _union(step, k, before)
    if kind == "elementwise":
        return _decided_elementwise(step, k, before)
    return np.zeros(value.bad.shape, bool)


def _decided_elementwise(step: Step, k: int, before: Sequence[Mask]) -> Mask:
    """The elements whose operands are all decided or discrete; a division by 0 is decided by its divisor alone."""
    in_full = np.full(step.outputs[k].bad.shape, True)
    for i, (value, mask) in enumerate(zip(step.inputs, before, strict=True)):
        if not (value.is_discrete or value.is_constant):
            in_full = in_full & Way(step, k, i, is_ahead=True).spread_decision(mask)
    if step.operation.name == "div":
        in_full = in_full | (np.asarray(step.inputs[1].array) == 0)
        before = [NOTHING, before[1]]
    return in_full & _union(step, k, before)
