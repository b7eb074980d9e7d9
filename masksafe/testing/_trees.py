"""Helpers of all assertions: the floats of pytrees, and random weights for them."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from masksafe._core.arguments import message
from masksafe._core.sharding import is_random_key

Tree = Any


def check_addressable(op: str, **arguments: Tree) -> None:
    """Refuses arrays of which other processes hold a part: nobody here could look at their elements.

    A program on such an array is one of all its processes, so a process that runs it alone would wait for the others.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(arguments):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and not leaf.is_fully_addressable:
            name = f"{path[0].key}{jax.tree_util.keystr(path[1:])}"
            devices: list[Any] = list(leaf.sharding.device_set)
            number = len({device.process_index for device in devices})
            found = f"{leaf.dtype}{list(leaf.shape)} on the devices of {number} processes"
            hint = "Run it in one process, or gather a copy: multihost_utils.process_allgather(x, tiled=True)."
            raise ValueError(message(op, name, found, "an array on devices of this process", hint))


def check_tolerances(op: str, **tolerances: float | None) -> None:
    """Refuses those with which everything or nothing would pass."""
    for name, value in tolerances.items():
        if value is not None and not 0 <= value < np.inf:
            raise ValueError(message(op, name, f"value {value}", "a finite number, 0 or more"))


def is_float(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def only_floats(arg: Tree) -> Tree:
    """The argument with None, which is not a leaf, in place of leaves that have no gradient."""
    return jax.tree.map(lambda leaf: leaf if is_float(leaf) else None, arg)


def replace_floats(arg: Tree, floats: Tree) -> Tree:
    return jax.tree.map(lambda leaf, new: leaf if new is None else new, arg, floats)


def replace_arguments(args: tuple[Any, ...], new: Mapping[int, Any]) -> tuple[Any, ...]:
    return tuple(new.get(i, arg) for i, arg in enumerate(args))


def is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and is_random_key(leaf)


def as_double(array: Any) -> np.ndarray:
    """The array in NumPy, in double precision."""
    return np.asarray(array, np.complex128 if np.iscomplexobj(array) else np.float64)


def generator(seed: int) -> np.random.Generator:
    """A generator that differs from a user's `default_rng(seed)`: weights that equal the data would hide bugs."""
    return np.random.default_rng((seed, 0x6D61736B))


def random_like(tree: Tree, rng: np.random.Generator) -> Tree:
    return jax.tree.map(lambda leaf: rng.normal(size=np.shape(leaf)), tree)


def weighted_sum(values: Tree, weights: Tree, kept: Tree | None = None) -> Any:
    """The sum of the float leaves times their weights, in float32 or float64, where they are `kept` if it is given."""
    kept = jax.tree.map(lambda _: True, values) if kept is None else kept
    is_wide = any(is_float(leaf) and leaf.dtype == jnp.float64 for leaf in jax.tree.leaves(values))
    dtype = jnp.float64 if is_wide else jnp.float32
    total = jnp.zeros((), dtype)
    for value, weight, keep in zip(*map(jax.tree.leaves, (values, weights, kept)), strict=True):
        if is_float(value):
            total = total + jnp.sum(jnp.where(keep, jnp.asarray(value, dtype) * jnp.asarray(weight, dtype), 0))
    return total


def first_index(wrong: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(wrong)[0])


def bits(array: np.ndarray) -> np.ndarray:
    """The bits of a float array as unsigned integers, the same for every NaN; other arrays as they are."""
    if not is_float(array):
        return array
    array = np.where(np.isnan(array), np.asarray(np.nan, array.dtype), array)
    return array.view(f"u{array.dtype.itemsize}")
