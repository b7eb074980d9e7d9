"""What bad elements decide: comparisons of them, and whatever was counted, chosen or computed only from such decisions.

An op may find a NaN in its input and answer with a NaN of its own; the link between the two is a predicate, which is
finite.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from masksafe.testing._rules import MOVES, SELECTIONS, Mask, Way, any_ahead

NOTHING = np.asarray(False)

_union = functools.partial(any_ahead, spread=Way.spread_decision)


def find_decided(step: Any, k: int) -> Mask:
    """The elements of output k, finite or not, that have their value because others are bad."""
    value, kind = step.outputs[k], step.operation.kind
    before = [v.decided for v in step.inputs]
    # A constant of the program decides nothing.
    deciding = [NOTHING if v.is_constant else v.bad | v.decided for v in step.inputs]
    if not any(mask.any() for mask in deciding):
        return NOTHING
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
    return _decided_elementwise(step, k, before) if kind == "elementwise" else NOTHING


def _decided_elementwise(step: Any, k: int, before: Sequence[Mask]) -> Mask:
    """The elements whose operands are all decided or discrete; a division by 0 is decided by its divisor alone."""
    in_full = np.full(step.outputs[k].bad.shape, True)
    for i, (value, mask) in enumerate(zip(step.inputs, before, strict=True)):
        if not (value.is_discrete or value.is_constant):
            in_full = in_full & Way(step, k, i, is_ahead=True).spread_decision(mask)
    if step.operation.name == "div":
        in_full = in_full | (np.asarray(step.inputs[1].array) == 0)
        before = [NOTHING, before[1]]
    return in_full & _union(step, k, before)
