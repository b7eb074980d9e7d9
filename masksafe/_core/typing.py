"""The types of signatures, and a `jax.jit` that keeps the types of the function."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import jax
import numpy as np
from jax import Array as Array
from jax.typing import ArrayLike as ArrayLike

Pytree: TypeAlias = Any  # arrays, or tuples, dictionaries and others of them, which JAX's functions take and return
Arrays: TypeAlias = tuple[Array, ...]
DType: TypeAlias = np.dtype[Any]
Index: TypeAlias = Array | int
Axis = int | Sequence[int]
Axes = tuple[int, ...]
LossReduction = Literal["mean", "sum", "none"]
REDUCTIONS = get_args(LossReduction)
Function = TypeVar("Function", bound=Callable[..., Pytree])
Tree = TypeVar("Tree")


def jitted(*static_argnums: int) -> Callable[[Function], Function]:
    """`jax.jit` as a decorator. Type checkers see the function as it is."""
    return functools.partial(jax.jit, static_argnums=static_argnums)  # type: ignore[return-value]
