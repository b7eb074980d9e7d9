"""The verdict on a function of the user's, by the tools of `masksafe.testing`."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from masksafe._report._verdict import judge, print_progress, print_table
from masksafe.testing import assert_consistent, assert_gradients, assert_mask_safe

OwnFunction = tuple[Callable[..., Any], tuple[Any, ...], Mapping[int, Any]]


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
    is_case = isinstance(made, tuple) and len(made) == 3 and isinstance(made[1], tuple)
    if not (is_case and callable(made[0]) and isinstance(made[2], Mapping)):
        expected = "a function, a tuple of its arguments, and a dict from the index of an argument to a mask"
        raise NotACaseError(f"{name}() returned {type(made).__name__}, expected {expected}")
    return made


def is_right(name: str, own: OwnFunction) -> bool:
    """Prints the verdicts, and what the tools found; True if all are right."""
    fn, args, masked = own
    checks: dict[str, tuple[Callable[[], None], str]] = {  # the tool, and the verdict if it fails
        "masked elements influence nothing": (lambda: assert_mask_safe(fn, *args, masked=masked), "leaks"),
        "one answer, however it is run": (lambda: assert_consistent(fn, *args), "wrong"),
        "derivatives are those of the value": (lambda: assert_gradients(fn, *args), "wrong"),
    }
    found = {}
    for check, tool in checks.items():
        found[check] = judge([tool])
        print_progress(f"{name}: {check}: {found[check][0]}")
    print_table(name, ["", "verdict"], [(check, verdict) for check, (verdict, _) in found.items()])
    for check, (verdict, finding) in found.items():
        if verdict != "right":
            print(f"{check}: {verdict}\n{finding}\n")
    return all(verdict == "right" for verdict, _ in found.values())
