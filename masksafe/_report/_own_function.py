"""The verdict on a function of the user's, by the tools of `masksafe.testing`."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from masksafe._report import _show
from masksafe._report._verdict import Verdict
from masksafe.testing import assert_consistent, assert_gradients, assert_mask_safe


class OwnFunction(NamedTuple):
    """A function, its arguments, and by the index of an argument booleans, True where it is masked."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    masked: Mapping[int, Any]


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
    return OwnFunction(*made)


def judge(name: str, own: OwnFunction) -> bool:
    """Prints the verdicts, and what the tools found; True if all are right."""
    fn, args, masked = own
    checks: dict[str, tuple[Callable[[], None], Verdict]] = {  # the tool, and the verdict if it fails
        "what is masked touches nothing": (lambda: assert_mask_safe(fn, *args, masked=masked), Verdict.LEAKS),
        "one answer, however it is run": (lambda: assert_consistent(fn, *args), Verdict.WRONG),
        "derivatives are those of the value": (lambda: assert_gradients(fn, *args), Verdict.WRONG),
    }
    verdicts, findings = dict.fromkeys(checks, Verdict.RIGHT), {}
    for check, (tool, if_not) in checks.items():
        try:
            tool()
        except Exception as error:  # the function may raise any
            is_found = isinstance(error, AssertionError)
            verdicts[check] = if_not if is_found else Verdict.REFUSED
            findings[check] = str(error) if is_found else f"{type(error).__name__}: {error}"
        _show.progress(f"{name}: {check}: {verdicts[check]}")
    _show.table(name, ["", "verdict"], list(verdicts.items()))
    for check, finding in findings.items():
        print(f"{check}: {verdicts[check]}\n{finding}\n")
    return not findings
