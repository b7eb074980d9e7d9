"""An op for each device: in a `jax.shard_map` of its own, over the explicit axes that split its independent dimensions.

JAX refuses a loop over a dimension that is split over devices. Inside `jax.shard_map` each device has an ordinary
array, and the op may go through it in blocks.

The dimensions of an op have names. A `jax.sharding.PartitionSpec` of these names says which dimensions an array has:
`P("tokens", None)` for features, whose second dimension every device needs as a whole.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from masksafe._core import switches
from masksafe._core.sharding import Devices, has_symbolic_size, is_sharded
from masksafe._core.typing import Array, Pytree, Tree

MeshAxes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Split:
    """How the named dimensions of an op are split over the explicit axes of a mesh; the others are whole."""

    mesh: AbstractMesh
    manual: MeshAxes  # the axes of the shard_map
    named: tuple[tuple[str, MeshAxes], ...]

    def axes(self, *names: str) -> MeshAxes:
        """The axes that split any of the dimensions."""
        return tuple(axis for name, axes in self.named if name in names for axis in axes)

    def devices(self, *names: str) -> int:
        """Over how many devices these dimensions are split."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes(*names))

    def spec(self, shape: tuple[int, ...], names: PartitionSpec) -> PartitionSpec:
        """How an array with these dimensions is split; a dimension of size 1 broadcasts, and is whole."""
        padded = (*names, *[None] * (len(shape) - len(names)))
        return self.spec_of_named(PartitionSpec(*(None if n == 1 else m for n, m in zip(shape, padded, strict=True))))

    def spec_of_named(self, names: PartitionSpec) -> PartitionSpec:
        """How an array with these dimensions is split, if none of them broadcasts."""
        return PartitionSpec(*(None if name is None else self.axes(name) or None for name in names))

    def map(
        self, fn: Callable[..., Tree], args: Pytree, names: Pytree, names_of_results: Pytree, check_vma: bool = True
    ) -> Tree:
        """`fn(*args)` on the parts of each device; arrays that are split in another way are exchanged before.

        Has to be called under `jax.jit`: outside JAX exchanges arrays only over the mesh of `jax.set_mesh`. The results
        have to vary over no other axes than their named dimensions.
        """
        specs = jax.tree.map(lambda x, names: self.spec(x.shape, names), args, names)

        def resharded(x: Array, spec: PartitionSpec) -> Array:
            now, sharding = jax.typeof(x).sharding, NamedSharding(self.mesh, spec)
            is_there = now.mesh == self.mesh and now.spec == spec
            return x if is_there else jax.sharding.reshard(x, sharding)

        options: dict[str, Any] = {"mesh": self.mesh, "axis_names": set(self.manual), "check_vma": check_vma}
        out_specs = jax.tree.map(self.spec_of_named, names_of_results)
        mapped = jax.shard_map(fn, in_specs=tuple(specs), out_specs=out_specs, **options)
        return mapped(*jax.tree.map(resharded, args, specs))


def split_of(args: Pytree, names: Pytree) -> Split | None:
    """How the named dimensions of the arrays are split.

    A dimension is split as in the first array that splits it, and an axis splits only one dimension. A dimension that
    is too small to split in some array, such as two key heads over four devices, is whole, like one without a name.

    Args:
      args: a pytree of arrays.
      names: a pytree of the same structure with their dimensions.

    Returns:
      None if no array is split; or if the op has to stay outside of a `jax.shard_map`. Inside another one
      JAX has no gradient of it, and checkify cannot lift checks out of it (jax 0.12).
    """
    arrays = jax.tree.leaves(args)
    mesh = next((jax.typeof(x).sharding.mesh for x in arrays if is_sharded(x)), None)
    if mesh is None or jax.sharding.get_abstract_mesh().manual_axes or switches.is_checkified():
        return None
    if any(has_symbolic_size(x) or x.size == 0 for x in arrays):
        return None
    return Split(mesh, _manual_axes(mesh), tuple(_split_dimensions(mesh, arrays, jax.tree.leaves(names)).items()))


def _split_dimensions(mesh: AbstractMesh, arrays: list[Array], names: list[PartitionSpec]) -> dict[str, MeshAxes]:
    found: dict[str, MeshAxes] = {}
    sizes: dict[str, list[int]] = {}
    for x, dimensions in zip(arrays, names, strict=True):
        for name, size, spec in zip(dimensions, x.shape, tuple(jax.typeof(x).sharding.spec), strict=False):
            if name is None or size == 1:
                continue
            sizes.setdefault(name, []).append(size)
            axes = (spec,) if isinstance(spec, str) else tuple(spec or ())
            if axes and name not in found and not any(set(axes) & set(taken) for taken in found.values()):
                found[name] = axes
    numbers = {name: math.prod(mesh.shape[axis] for axis in axes) for name, axes in found.items()}
    return {name: axes for name, axes in found.items() if not any(size % numbers[name] for size in sizes[name])}


def _manual_axes(mesh: AbstractMesh) -> MeshAxes:
    """All explicit axes, also those that split no array: JAX has no second derivatives otherwise (jax 0.12).

    Axes over which an enclosing `jax.vmap` is split are left out: JAX refuses them, and only a try shows which they
    are.
    """

    def is_free(axis: str) -> bool:
        try:
            jax.eval_shape(jax.shard_map(lambda: (), mesh=mesh, in_specs=(), out_specs=(), axis_names={axis}))
        except ValueError:
            return False
        return True

    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(axis for axis, kind in kinds if kind == AxisType.Explicit and is_free(axis))


def along_devices(
    fn: Callable[..., Tree],
    devices: Devices,
    args: Pytree,
    names: Pytree,
    names_of_results: Pytree,
    along: tuple[str, ...] = (),
    *,
    check_vma: bool = True,
) -> Tree:
    """`fn(devices, *args)`, where `fn` exchanges data along the dimensions `along`, if any.

    If explicit axes of a mesh split the arrays, each device works on its part, and the `devices` of `fn` are those over
    which the dimensions `along` are split.
    """
    split = split_of(args, names)
    if split is None:
        return fn(devices, *args)
    on_device = functools.partial(fn, Devices(split.axes(*along) or None))
    return split.map(on_device, args, names, names_of_results, check_vma)
