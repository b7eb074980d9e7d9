"""The verdict on a function of the user's, by the tools of `masksafe.testing`."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from masksafe import testing
from masksafe._report import _show
from masksafe._report._verdict import Verdict


class OwnFunction(NamedTuple):
    """A function, its arguments, and by the index of an argument booleans, True where it is masked."""

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    masked: Mapping[int, Any]


# What is looked at, by which tool, and the verdict if it fails.
_CHECKS: dict[str, tuple[Callable[[OwnFunction], None], Verdict]] = {
    "what is masked touches nothing": (
        lambda own: testing.assert_mask_safe(own.fn, *own.args, masked=own.masked),
        Verdict.LEAKS,
    ),
    "one answer, however it is run": (lambda own: testing.assert_consistent(own.fn, *own.args), Verdict.WRONG),
    "derivatives are those of the value": (lambda own: testing.assert_gradients(own.fn, *own.args), Verdict.WRONG),
}


class NotACaseError(Exception):
    """What was named is no function that returns a function, its arguments and masks."""


def load(name: str) -> OwnFunction:
    """What a function `module:name` returns; what it raises is raised.

    Raises:
      NotACaseError: if there is no such function, or it returns something else.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise NotACaseError(f"{name}, expected MODULE:FUNCTION")
    try:
        case = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        raise NotACaseError(f"{name}, expected MODULE:FUNCTION; {error}") from error
    if not callable(case):
        raise NotACaseError(f"{name}, expected MODULE:FUNCTION; {module} has no function {attribute}")
    made = case()
    if not (isinstance(made, tuple) and len(made) == 3 and callable(made[0]) and isinstance(made[2], Mapping)):
        expected = "a function, a tuple of its arguments, and a dict from the index of an argument to a mask"
        raise NotACaseError(f"{name}() returned {type(made).__name__}, expected {expected}")
    return OwnFunction(name, made[0], tuple(made[1]), made[2])


def judge(own: OwnFunction) -> bool:
    """Prints the verdicts, and what the tools found; True if all are right."""
    verdicts: dict[str, Verdict] = {}
    findings: dict[str, str] = {}
    for check, (tool, if_not) in _CHECKS.items():
        try:
            tool(own)
            verdicts[check] = Verdict.RIGHT
        except AssertionError as error:
            verdicts[check], findings[check] = if_not, str(error)
        except Exception as error:  # the function may raise any
            verdicts[check], findings[check] = Verdict.REFUSED, f"{type(error).__name__}: {error}"
        _show.progress(f"{own.name}: {check}: {verdicts[check]}")
    _show.table(own.name, ["", "verdict"], list(verdicts.items()))
    for check, finding in findings.items():
        print(f"{check}: {verdicts[check]}\n{finding}\n")
    return not findings
