"""How `distributed.py` lays arrays out over the devices of all processes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from gradient_accumulation import Params
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("data", "vocabulary", "time")


class Batch(NamedTuple):
    """Lines, every array `[rows, length]`. Every process can make it, and hands JAX the part of its own devices."""

    inputs: np.ndarray
    labels: np.ndarray  # the next character; IGNORED in padding
    positions: np.ndarray


class State(NamedTuple):
    """The state that a step updates."""

    params: Params
    optimizer: Any


def make_mesh(layout: Sequence[int]) -> Mesh:
    return jax.make_mesh(tuple(layout), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def layouts() -> dict[str, tuple[int, int, int]]:
    """The sizes of the axes; the last layouts cross processes along the data only."""
    devices, number = jax.device_count(), jax.process_count()
    if devices == 1:
        return {"one device": (1, 1, 1)}
    return {
        "data": (devices, 1, 1),
        "vocabulary": (1, devices, 1),
        "time": (1, 1, devices),
        "data and time": (number, 1, devices // number),
        "data and vocabulary": (number, devices // number, 1),
    }


def specs_of(state: Any) -> Any:
    """The kernel of the output layer is split, and what the optimizer keeps for it; the rest is on every device."""

    def spec(path: Any, _: Any) -> P:
        return P(None, "vocabulary") if jax.tree_util.keystr(path).endswith("['kernel']") else P()

    return jax.tree.map_with_path(spec, state)


def place(mesh: Mesh, tree: Any, specs: Any) -> Any:
    """Global arrays, of which every process hands over the parts of its own devices."""

    def placed(x: np.ndarray, spec: P) -> jax.Array:
        return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])

    return jax.tree.map(placed, tree, specs)


def place_state(mesh: Mesh, state: State) -> State:
    return place(mesh, state, specs_of(state))


def place_batch(mesh: Mesh, batch: Batch) -> Batch:
    return place(mesh, batch, Batch(*[P("data", "time")] * 3))
