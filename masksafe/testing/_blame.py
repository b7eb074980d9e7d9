"""Walks backwards through a replay, from the bad elements of the outputs to the steps that made them.

Masks mark the elements that led there: bad ones, and finite ones that bad ones decided.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from masksafe.testing._decisions import Masks, find_decided
from masksafe.testing._influence import ELEMENTWISE, ahead, behind, behind_decision, is_selection
from masksafe.testing._replay import Replay, Step, Value


class Blame(NamedTuple):
    """A step, the number of one of its outputs, and the elements that it made bad there."""

    step: Step
    k: int
    mask: np.ndarray
    is_constant: bool = False  # whether the step only took them from a constant of the program


@dataclasses.dataclass(frozen=True)
class Blamed:
    """The steps to blame, in the order of the program."""

    sources: list[Blame]
    from_infinities: list[Blame]
    reached: Masks  # what led to a bad output
    harmless: list[Blame]


def blame(replay: Replay) -> Blamed:
    """Finds the steps that made the outputs bad."""
    decisions = find_decided(replay)
    first = _Walk(replay, decisions)
    # An infinity that meets a NaN may be a second mistake, or just a mask: a second walk follows it.
    walks = [first, _Walk(replay, decisions, first.reached)] if first.has_left_infinities else [first]
    sources, from_infinities = (_join(getattr(walk, part) for walk in walks) for part in ("sources", "from_infinities"))
    reached = {value: mask for walk in reversed(walks) for value, mask in walk.reached.items()}
    # An infinity that the program writes is more often a mask than a mistake.
    sources = sources if sources or from_infinities else first.written
    return Blamed(sources, from_infinities, reached, list(_find_unreached(replay, reached)))


def _join(parts: Iterable[list[Blame]]) -> list[Blame]:
    """All parts in one list, with each step once."""
    by_step: dict[tuple[int, int], Blame] = {}
    for part in parts:
        for found in part:
            by_step.setdefault((id(found.step), found.k), found)
    return list(by_step.values())


def _find_unreached(replay: Replay, reached: Masks) -> Iterator[Blame]:
    """The steps that made bad elements from finite inputs without any of them leading to an output."""
    for step in replay.steps:
        for k, value in enumerate(step.outputs):
            if value.is_bad and value not in reached and not any(v.is_bad for v in step.inputs):
                yield Blame(step, k, value.bad)


class _Walk:
    """One walk back.

    A NaN is explained by the NaN that it came from. The first walk does not follow infinities beside such a NaN; the
    second one, which gets what the first has reached, does.
    """

    def __init__(self, replay: Replay, decisions: Masks, reached_before: Masks | None = None) -> None:
        self.reached: Masks = {}
        self.has_left_infinities = False
        self._decisions = decisions
        self._reached_before = reached_before
        self.sources: list[Blame] = []
        self.from_infinities: list[Blame] = []
        self.written: list[Blame] = []
        for value in replay.outputs:
            self._reach(value, value.bad)
        for step in reversed(replay.steps):
            for k, value in enumerate(step.outputs):
                if value in self.reached:
                    self._trace_back(step, k, self.reached[value])
        for part in (self.sources, self.from_infinities, self.written):
            part.reverse()

    def _decided(self, value: Value) -> np.ndarray:
        return self._decisions.get(value, np.asarray(False))

    def _reach(self, value: Value, mask: np.ndarray) -> None:
        if mask.any():
            self.reached[value] = self.reached[value] | mask if value in self.reached else mask

    def _trace_back(self, step: Step, k: int, mask: np.ndarray) -> None:
        """Goes from elements of output k to the elements that they came from."""
        value = step.outputs[k]
        bad = mask & value.bad
        nans = [v.nan & behind(step, k, i, bad & value.nan) if v.is_bad else v.bad for i, v in _operands(step)]
        unexplained = bad & ~_any_ahead(step, k, nans)
        bads = [v.bad & behind(step, k, i, unexplained) if v.is_bad else v.bad for i, v in _operands(step)]
        made = unexplained & ~_any_ahead(step, k, bads)
        nan_taken = bad & _any_ahead(step, k, _masks_of_constants(step, k, nans))
        if step.operation.name in ELEMENTWISE:  # in a sum, another element may be at fault as well
            nan_taken = nan_taken & ~_any_ahead(step, k, _masks_of_others(step, k, nans))
        infinity_taken = unexplained & _any_ahead(step, k, _masks_of_constants(step, k, bads)) & ~nan_taken
        # A NaN that the program wrote and computed with counts as chosen if a bad value chose it.
        nan_chosen = bad & self._decided(value) & _any_ahead(step, k, _masks_of_written_nans(step, nans))
        self._follow_bad(step, k, [x | y for x, y in zip(nans, bads, strict=True)], bad & ~unexplained, nan_chosen)

        taken = nan_taken | nan_chosen | (infinity_taken if self._counts_infinities(value) else False)
        by_decision = (mask & ~value.bad | made | taken) & self._decided(value)
        from_captured = self._follow_decisions(step, k, by_decision)

        undecided = _any_ahead(step, k, [m & ~self._decided(v) for m, v in zip(bads, step.inputs, strict=True)])
        _append_if_any(self.sources, Blame(step, k, made & ~by_decision | from_captured))
        _append_if_any(self.sources, Blame(step, k, nan_taken & ~by_decision, is_constant=True))
        _append_if_any(self.from_infinities, Blame(step, k, unexplained & undecided & value.nan))
        _append_if_any(self.written, Blame(step, k, infinity_taken & ~by_decision, is_constant=True))

    def _counts_infinities(self, value: Value) -> bool:
        """Whether to ask who chose an infinity that the program wrote; not beside a NaN."""
        return self._reached_before is None or value in self._reached_before

    def _follow_bad(
        self, step: Step, k: int, masks: list[np.ndarray], explained: np.ndarray, nan_chosen: np.ndarray
    ) -> None:
        for i, v in _operands(step):
            if not _is_end(step, k, v):
                leaves = nan_chosen.any() and v.is_written_nan
                self._reach(v, masks[i] & ~behind(step, k, i, nan_chosen) if leaves else masks[i])
                beside = v.bad & ~v.nan & ~masks[i]
                if v.is_bad and explained.any() and beside.any():
                    beside = beside & behind(step, k, i, explained)
                    if self._reached_before is not None:
                        self._reach(v, beside)
                    self.has_left_infinities |= bool(beside.any())

    def _follow_decisions(self, step: Step, k: int, mask: np.ndarray) -> np.ndarray:
        """Follows decisions, and returns the elements that an array from the function's closure decided."""
        from_captured = np.zeros(mask.shape, bool)
        if mask.any():
            for i, v in _operands(step):
                deciding = self._decided(v) if v.is_written_nan else v.bad | self._decided(v)
                if v.is_constant or not deciding.any():
                    continue
                deciding = deciding & behind_decision(step, k, i, mask)
                if v.is_captured:
                    from_captured = from_captured | (mask & deciding.any())
                else:
                    self._reach(v, deciding)
        return from_captured


def _operands(step: Step) -> Iterator[tuple[int, Value]]:
    return enumerate(step.inputs)


def _append_if_any(part: list[Blame], new: Blame) -> None:
    if new.mask.any():
        part.append(new)


def _is_end(step: Step, k: int, operand: Value) -> bool:
    """Whether the walk ends at an operand: one written in the program, or computed only from such."""
    return operand.is_written or (operand.is_constant and not step.outputs[k].is_constant)


def _masks_of_constants(step: Step, k: int, masks: list[np.ndarray]) -> list[np.ndarray]:
    return [mask & _is_end(step, k, v) for v, mask in zip(step.inputs, masks, strict=True)]


def _masks_of_written_nans(step: Step, masks: list[np.ndarray]) -> list[np.ndarray]:
    """The masks of the NaNs written in the program, if the step is a selection."""
    return [
        mask & (v.is_written_nan and is_selection(step.operation)) for v, mask in zip(step.inputs, masks, strict=True)
    ]


def _masks_of_others(step: Step, k: int, masks: list[np.ndarray]) -> list[np.ndarray]:
    return [mask & (not _is_end(step, k, v)) for v, mask in zip(step.inputs, masks, strict=True)]


def _any_ahead(step: Step, k: int, masks: list[np.ndarray]) -> np.ndarray:
    """The elements of output k that depend on a masked element of any operand."""
    found = np.zeros(step.outputs[k].bad.shape, bool)
    for i, mask in enumerate(masks):
        if mask.any():
            found = found | ahead(step, k, i, mask)
    return found
