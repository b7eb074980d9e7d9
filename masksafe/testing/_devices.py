"""The devices of a `jax.shard_map`: which part of an array each holds, and what they exchange."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from masksafe.testing._rules import names

SUMS = names("psum psum_invariant")
# Here each element that a device receives comes from elements at the same index.
ELEMENTWISE = SUMS | names("pmax pmin ppermute")
EXCHANGES = ELEMENTWISE | names("""
    all_gather all_gather_invariant all_gather_reduced all_to_all axis_index reduce_scatter unreduced_psum
    unreduced_reduce_scatter
""")


class Device:
    """A device of a mesh, given by its place along the axes over which a shard_map splits."""

    def __init__(self, sizes: dict[str, int], number: int) -> None:
        self._sizes = sizes
        self.place = dict(zip(sizes, map(int, np.unravel_index(number, tuple(sizes.values()))), strict=True))

    def part(self, shape: tuple[int, ...], spec: Sequence[Any]) -> tuple[slice, ...]:
        """The slices of the device's part of an array of `shape` that is split according to `spec`."""
        slices = []
        for size, entry in zip(shape, (*spec, *(None,) * (len(shape) - len(spec))), strict=True):
            axes = [a for a in ((entry,) if isinstance(entry, str) else entry or ()) if a in self._sizes]
            number = functools.reduce(lambda n, a: n * self._sizes[a] + self.place[a], axes, 0)
            length = size // math.prod(self._sizes[a] for a in axes)
            slices.append(slice(number * length, (number + 1) * length))
        return tuple(slices)


def holder_of(array: Any, index: Sequence[int]) -> dict[str, int]:
    """Where, along the mesh axes that split an array, the device is that holds the element at `index`."""
    place: dict[str, int] = {}
    if isinstance(array.sharding, NamedSharding):
        for i, size, entry in zip(index, array.shape, array.sharding.spec, strict=False):
            axes = (entry,) if isinstance(entry, str) else entry or ()
            sizes = {axis: array.sharding.mesh.shape[axis] for axis in axes}
            place |= Device(sizes, i * math.prod(sizes.values()) // size).place if axes else {}
    return place


def mesh_axes(params: dict[str, Any]) -> dict[str, int]:
    """The sizes of the axes over which a shard_map splits."""
    manual = params["newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"]  # the latter in jax 0.10
    return {name: size for name, size in params["mesh"].shape.items() if name in manual}


class Exchange:
    """An equation with names of mesh axes: takes an operand from each device, and gives each device a result."""

    kind = "exchange"

    def __init__(self, equation: Any, sizes: dict[str, int]) -> None:
        self.name: str = equation.primitive.name
        self.is_elementwise = self.name in ELEMENTWISE
        self.num_devices = math.prod(sizes.values())
        self._primitive, self._params, self._sizes = equation.primitive, equation.params, sizes

    def __call__(self, *arrays: Any) -> list[Any]:
        shape = tuple(self._sizes.values())
        over_mesh = lambda x: self._on_a_device(x) if arrays else self._on_a_device()  # noqa: E731
        for name in reversed(self._sizes):
            over_mesh = jax.vmap(over_mesh, axis_name=name)
        stacked = jnp.stack(arrays).reshape(*shape, *arrays[0].shape) if arrays else jnp.zeros(shape)
        results = over_mesh(stacked)
        return list(results.reshape(-1, *results.shape[len(shape) :]))

    def _on_a_device(self, *operand: Any) -> Any:
        if self.name in SUMS:  # the primitive requires types that only arrays in a shard_map have
            return lax.psum(operand[0], self._params["axes"], axis_index_groups=self._params.get("axis_index_groups"))
        results = self._primitive.bind(*operand, **self._params)
        return results[0] if self._primitive.multiple_results else results

    @functools.cached_property
    def connections(self) -> np.ndarray:
        """Whether the elements that device k gets depend on those of device i at the same index, at `[i, k]`."""
        connected = np.zeros((self.num_devices, self.num_devices), bool)
        for base in (0.0, 1.0):  # 0 shows the connections of a maximum, 1 shows those of a minimum
            usual = np.full(self.num_devices, base, np.float32)
            for i in range(self.num_devices):
                changed = np.where(np.arange(self.num_devices) == i, 1 - usual, usual)
                connected[i] |= np.array(self(*changed)) != np.array(self(*usual))
        return connected
