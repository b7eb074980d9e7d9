"""Walks backwards through a replay, from the bad elements of the outputs to the steps that made them.

Masks mark the elements that led there: bad ones, and finite ones that bad ones decided.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from masksafe.testing._decisions import NOTHING
from masksafe.testing._replay import Replay, Value
from masksafe.testing._rules import SELECTIONS, Way, any_ahead, behind

Masks = dict[Value, np.ndarray]


class Blame(NamedTuple):
    """A value, and the elements that its operation made bad."""

    value: Value
    mask: np.ndarray
    is_constant: bool = False  # whether the operation only took them from a constant of the program


class Blamed(NamedTuple):
    """The steps to blame, in the order of the program."""

    sources: list[Blame]
    from_infinities: list[Blame]
    reached: Masks  # what led to a bad output
    harmless: list[Blame]


def blame(replay: Replay) -> Blamed:
    """Finds the steps that made the outputs bad."""
    first = _Walk(replay)
    # An infinity that meets a NaN may be a second mistake, or just a mask: a second walk follows it.
    walks = [first, _Walk(replay, first.reached)] if first.has_left_infinities else [first]
    sources, from_infinities = (_join(getattr(walk, part) for walk in walks) for part in ("sources", "from_infinities"))
    reached = {value: mask for walk in reversed(walks) for value, mask in walk.reached.items()}
    # An infinity that the program writes is more often a mask than a mistake.
    sources = sources if sources or from_infinities else first.written
    # The steps that made bad elements from finite inputs without any of them leading to an output.
    unreached = (value for value in replay.values if value.is_bad and value not in reached)
    harmless = [Blame(value, value.bad) for value in unreached if not any(v.is_bad for v in value.inputs)]
    return Blamed(sources, from_infinities, reached, harmless)


def _join(parts: Iterable[list[Blame]]) -> list[Blame]:
    """All parts in one list, with each value once."""
    by_value: dict[Value, Blame] = {}
    for found in itertools.chain(*parts):
        by_value.setdefault(found.value, found)
    return list(by_value.values())


class _Walk:
    """One walk back.

    A NaN is explained by the NaN that it came from. The first walk does not follow infinities beside such a NaN. The
    second walk, which knows what the first has reached, does.
    """

    def __init__(self, replay: Replay, reached_before: Masks | None = None) -> None:
        self.reached: Masks = {}
        self.has_left_infinities = False
        self._reached_before = reached_before
        self.sources: list[Blame] = []
        self.from_infinities: list[Blame] = []
        self.written: list[Blame] = []
        for value in replay.outputs:
            self._reach(value, value.bad)
        for value in reversed(replay.values):
            if value in self.reached:
                self._trace_back(value, self.reached[value])
        for part in (self.sources, self.from_infinities, self.written):
            part.reverse()

    def _reach(self, value: Value, mask: np.ndarray) -> None:
        if mask.any():
            self.reached[value] = self.reached.get(value, NOTHING) | mask

    def _trace_back(self, value: Value, mask: np.ndarray) -> None:
        """Goes from elements of a value to the elements that they came from."""
        inputs = value.inputs
        bad, decided = mask & value.bad, value.decided
        nans = [v.nan & behind(value, i, bad & value.nan) if v.is_bad else v.bad for i, v in enumerate(inputs)]
        unexplained = bad & ~any_ahead(value, nans)
        bads = [v.bad & behind(value, i, unexplained) if v.is_bad else v.bad for i, v in enumerate(inputs)]
        made = unexplained & ~any_ahead(value, bads)
        ends = [_is_end(value, v) for v in inputs]
        nan_taken = bad & _ahead_of(ends, value, nans)
        if value.operation.kind == "elementwise":  # in a sum, another element may be at fault as well
            nan_taken = nan_taken & ~_ahead_of([not is_end for is_end in ends], value, nans)
        infinity_taken = unexplained & _ahead_of(ends, value, bads) & ~nan_taken
        # A NaN that the program wrote and selected counts as chosen if a bad value chose it.
        written_nans = [v.is_written_nan and value.operation.kind in SELECTIONS for v in inputs]
        nan_chosen = bad & decided & _ahead_of(written_nans, value, nans)
        self._follow_bad(value, [x | y for x, y in zip(nans, bads, strict=True)], bad & ~unexplained, nan_chosen)

        # Who chose an infinity that the program wrote does not count beside a NaN.
        counts_infinities = self._reached_before is None or value in self._reached_before
        taken = nan_taken | nan_chosen | (infinity_taken & counts_infinities)
        by_decision = (mask & ~value.bad | made | taken) & decided
        from_captured = self._follow_decisions(value, by_decision)

        undecided = any_ahead(value, [m & ~v.decided for m, v in zip(bads, inputs, strict=True)])
        for part, elements, is_constant in (
            (self.sources, made & ~by_decision | from_captured, False),
            (self.sources, nan_taken & ~by_decision, True),
            (self.from_infinities, unexplained & undecided & value.nan, False),
            (self.written, infinity_taken & ~by_decision, True),
        ):
            if elements.any():
                part.append(Blame(value, elements, is_constant))

    def _follow_bad(
        self, value: Value, masks: Sequence[np.ndarray], explained: np.ndarray, nan_chosen: np.ndarray
    ) -> None:
        for i, v in enumerate(value.inputs):
            if _is_end(value, v):
                continue
            leaves = v.is_written_nan and nan_chosen.any()
            self._reach(v, masks[i] & ~behind(value, i, nan_chosen) if leaves else masks[i])
            infinite = v.bad & ~v.nan & ~masks[i]
            if infinite.any() and explained.any():
                beside = infinite & behind(value, i, explained)
                if self._reached_before is not None:
                    self._reach(v, beside)
                self.has_left_infinities |= bool(beside.any())

    def _follow_decisions(self, value: Value, mask: np.ndarray) -> np.ndarray:
        """Follows decisions, and returns the elements that an array from the function's closure decided."""
        from_captured = np.zeros(mask.shape, bool)
        for i, v in enumerate(value.inputs):
            deciding = v.decided if v.is_written_nan else v.bad | v.decided
            if v.is_constant or not (mask.any() and deciding.any()):
                continue
            deciding = deciding & Way(value, i, is_ahead=False).spread_decision(mask)
            if v.is_captured:
                from_captured = from_captured | (mask & deciding.any())
            else:
                self._reach(v, deciding)
        return from_captured


def _is_end(value: Value, operand: Value) -> bool:
    """Whether the walk ends at an operand: one written in the program, or computed only from such."""
    return operand.is_written or (operand.is_constant and not value.is_constant)


def _ahead_of(counts: Sequence[bool], value: Value, masks: Sequence[np.ndarray]) -> np.ndarray:
    """The elements of a value that are ahead of a masked element of one of the operands that count."""
    return any_ahead(value, [mask & count for mask, count in zip(masks, counts, strict=True)])
