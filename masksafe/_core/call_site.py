"""The call stack: the line of user code that an error refers to, and which function of JAX is tracing."""

import inspect
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import jax

_Function = TypeVar("_Function", bound=Callable[..., object])
_PACKAGES = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], Path(jax.__file__).parent))


def is_of_user(file_name: str) -> bool:
    """Whether a file belongs to neither masksafe nor JAX."""
    return not file_name.startswith(_PACKAGES)


def frame_of_user() -> types.FrameType:
    """The innermost frame of the call stack that belongs to neither masksafe nor JAX."""
    frame = sys._getframe()
    while frame.f_back is not None and not is_of_user(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def innermost_of(*functions: _Function) -> _Function | None:
    """Which of these functions of JAX is innermost in the call stack, by its file; None if none is there."""
    files = {inspect.unwrap(fn).__code__.co_filename: fn for fn in functions}
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename not in files:
        frame = frame.f_back
    return None if frame is None else files[frame.f_code.co_filename]
