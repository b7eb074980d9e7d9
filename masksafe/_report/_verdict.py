"""The verdict on a function in a case."""

import enum
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from masksafe._report._case import Case, Inputs


class Verdict(enum.StrEnum):
    """Verdicts in the order in which they are checked, the worst first."""

    REFUSED = "refused"  # an error
    NAN = "NaN"  # in the output or a gradient, where none belongs
    LEAKS = "leaks"  # a masked value changes a result, or has a gradient
    WRONG = "wrong"
    RIGHT = "right"
    ABSENT = "-"  # the library has no such function


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    return min(verdicts, key=list(Verdict).index)


class Result(NamedTuple):
    """The output of a call and its gradients with respect to the float inputs."""

    output: np.ndarray
    gradients: dict[str, np.ndarray]


Run = Callable[[Inputs], Result]

_GARBAGE = {"f": (np.nan, np.inf, -3e4), "i": (-100, 2**31 - 1, -100), "b": (True, True, True)}
_TOLERANCE = 2e-3


def judge(case: Case, run: Run) -> Verdict:
    """Runs a case with harmless values and with garbage under the mask, and judges the results."""
    try:
        clean, *dirty = [run(inputs) for inputs in _filled(case)]
    except Exception:  # a peer may refuse with any error
        return Verdict.REFUSED
    # The harmless result may be infinite, as a logsumexp of nothing is, but not NaN.
    expected = np.where(np.isnan(clean.output), 0, clean.output) if case.expected is None else case.expected
    if any(_has_stray_nan(result, expected) for result in (clean, *dirty)):
        return Verdict.NAN
    if any(_differ(clean, other) for other in dirty) or any(_has_hidden_gradient(case, r) for r in (clean, *dirty)):
        return Verdict.LEAKS
    return Verdict.RIGHT if _is_right(clean, expected) else Verdict.WRONG


def _filled(case: Case) -> list[Inputs]:
    """The inputs with 0 under the mask, and with each kind of garbage."""
    fillings = [dict(case.inputs) for _ in range(4 if case.hidden else 1)]
    for name, hidden in case.hidden.items():
        x = case.inputs[name]
        for inputs, value in zip(fillings, (0, *_GARBAGE[x.dtype.kind]), strict=True):
            inputs[name] = np.where(hidden, np.asarray(value, x.dtype), x)
    return fillings


def _has_stray_nan(result: Result, expected: np.ndarray) -> bool:
    """A NaN or infinity where the output should be finite, or a NaN in a gradient if no output should be NaN."""
    finite = np.isfinite(expected)
    if not np.isfinite(result.output[finite] if result.output.shape == expected.shape else result.output).all():
        return True
    return not np.isnan(expected).any() and any(np.isnan(g).any() for g in result.gradients.values())


def _differ(a: Result, b: Result) -> bool:
    pairs = [(a.output, b.output), *((a.gradients[name], b.gradients[name]) for name in a.gradients)]
    return any(not np.array_equal(x, y, equal_nan=True) for x, y in pairs)


def _has_hidden_gradient(case: Case, result: Result) -> bool:
    return any(result.gradients[name][hidden].any() for name, hidden in case.hidden.items() if name in result.gradients)


def _is_right(result: Result, expected: np.ndarray) -> bool:
    """Whether the values are right and, if a bad label makes some NaN, the gradient is NaN in those rows only."""
    if result.output.shape != expected.shape:
        return False
    finite = np.abs(expected[np.isfinite(expected)])
    error = _TOLERANCE * np.max(finite, initial=0) + np.finfo(np.float32).tiny
    if not np.allclose(result.output, expected, rtol=0, atol=error, equal_nan=True):
        return False
    if not np.isnan(expected).any():
        return True
    gradient = next(iter(result.gradients.values()))
    return np.array_equal(np.isnan(gradient).any(-1), np.isnan(expected))
