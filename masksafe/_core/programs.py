"""Programs that JAX has traced. Older versions of JAX have a type `ClosedJaxpr` for one with its constants."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from jax.extend import core

from masksafe._core.typing import Pytree

Program: TypeAlias = Any  # the types of jax 0.12 have no ClosedJaxpr
_core: Program = core


def is_program(x: object) -> bool:
    """Whether `x` is a program, with its constants or without."""
    return isinstance(x, (_core.ClosedJaxpr, core.Jaxpr))


def open_program(program: Program) -> tuple[Program, Sequence[Pytree]]:
    """A program without its constants, and the constants that it held."""
    return getattr(program, "jaxpr", program), getattr(program, "consts", ())


def as_function(program: Program, constants: Sequence[Pytree]) -> Callable[..., Sequence[Pytree]]:
    """The function of the inputs that a program with these constants computes."""
    return core.jaxpr_as_fun(_core.ClosedJaxpr(program, constants))
