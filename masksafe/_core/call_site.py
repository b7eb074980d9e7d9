"""The line of user code that an error refers to."""

import os
import sys
from pathlib import Path

import jax

_PACKAGES = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], Path(jax.__file__).parent))


def is_of_user(file_name: str) -> bool:
    """Whether a file belongs to neither masksafe nor JAX."""
    return not file_name.startswith(_PACKAGES)


def place_of_call() -> str:
    """The innermost line of the call stack that belongs to neither masksafe nor JAX."""
    frame = sys._getframe()
    while frame.f_back is not None and not is_of_user(frame.f_code.co_filename):
        frame = frame.f_back
    return f"at {frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"
