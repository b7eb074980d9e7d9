"""Programs that JAX has traced. Older versions have a type of its own, `ClosedJaxpr`, for one with its constants."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core

_core: Any = core  # the types of jax 0.12 have no ClosedJaxpr


def is_program(x: Any) -> bool:
    """Whether `x` is a program, with its constants or without."""
    return isinstance(x, (_core.ClosedJaxpr, core.Jaxpr))


def open_program(program: Any) -> tuple[Any, Sequence[Any]]:
    """A program, and its constants if it has them with it."""
    return getattr(program, "jaxpr", program), getattr(program, "consts", ())


def as_function(program: Any, constants: Sequence[Any]) -> Callable[..., Sequence[Any]]:
    """The function of the inputs that a program with these constants computes."""
    function: Callable[..., Sequence[Any]] = core.jaxpr_as_fun(_core.ClosedJaxpr(program, constants))
    return function
