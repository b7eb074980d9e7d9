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


def find_decided(value: Any) -> Mask:
    """The elements of a value, finite or not, that have their value because others are bad."""
    kind = value.operation.kind
    before = [v.decided for v in value.inputs]
    # A constant of the program decides nothing.
    deciding = [NOTHING if v.is_constant else v.bad | v.decided for v in value.inputs]
    if not any(mask.any() for mask in deciding):
        return NOTHING
    if value.is_discrete and not value.is_bad:
        return _union(value, deciding)
    if kind in SELECTIONS:
        # A decided predicate chose from discrete operands, or what it chose was decided before.
        simple = [np.full(v.bad.shape, v.is_discrete or v.is_constant or v.is_written_nan) for v in value.inputs[1:]]
        by_predicate = _union(value, deciding[:1]) & _union(value, [NOTHING, *simple])
        return by_predicate | _union(value, [NOTHING, *before[1:]])
    if value.is_discrete:  # a bad element that comes from a bad one is not a decision
        return np.where(value.bad, _union(value, before), _union(value, deciding))
    if kind in MOVES:
        return _union(value, before)
    return _decided_elementwise(value, before) if kind == "elementwise" else NOTHING


def _decided_elementwise(value: Any, before: Sequence[Mask]) -> Mask:
    """The elements whose operands are all decided or discrete; a division by 0 is decided by its divisor alone."""
    in_full = np.full(value.bad.shape, True)
    for i, (operand, mask) in enumerate(zip(value.inputs, before, strict=True)):
        if not (operand.is_discrete or operand.is_constant):
            in_full = in_full & Way(value, i, is_ahead=True).spread_decision(mask)
    if value.operation.name == "div":
        in_full = in_full | (np.asarray(value.inputs[1].array) == 0)
        before = [NOTHING, before[1]]
    return in_full & _union(value, before)
