"""Arrays split over devices: over the explicit axes of a mesh, inside `jax.shard_map`, and over a named axis."""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core.arguments import message
from masksafe._core.typing import Array

# Over the explicit axes of a mesh. The type of an array says how it is split.


def is_sharded(x: Array) -> bool:
    """Whether the type of `x` says that one of its dimensions is split over devices."""
    return any(axis is not None for axis in jax.typeof(x).sharding.spec)


def is_split_like(x: Array, other: Array) -> bool:
    """Whether every dimension of `x` is whole, or split over devices like that of `other`, which has the same rank."""
    pairs = zip(jax.typeof(x).sharding.spec, jax.typeof(other).sharding.spec, strict=True)
    return all(axis is None or axis == axis_of_other for axis, axis_of_other in pairs)


def is_on_automatic_mesh(x: Array) -> bool:
    """Whether the compiler may split `x` over the devices of a mesh, in a way that is not known while tracing."""
    meshes = jax.typeof(x).sharding.mesh, jax.sharding.get_abstract_mesh()
    kinds = [zip(mesh.axis_types, mesh.axis_sizes, strict=True) for mesh in meshes if not mesh.empty]
    return any(kind == jax.sharding.AxisType.Auto and size > 1 for axes in kinds for kind, size in axes)


def may_loop(tree: Any) -> bool:
    """Whether a loop may go through the arrays of `tree` in blocks.

    JAX refuses a loop over a dimension that is split over devices, or gathers the array first; and a dimension of
    symbolic size, as in `jax.export`, cannot be divided into blocks.
    """
    return not any(is_sharded(x) or has_symbolic_size(x) for x in jax.tree.leaves(tree))


def has_symbolic_size(x: Array) -> bool:
    """Whether `x` has a dimension of symbolic size, as in `jax.export`."""
    return not all(isinstance(n, int) for n in x.shape)


def gathered_along(x: Array, *axes: int) -> Array:
    """`x` with `axes` gathered if they are split over devices, for a loop over blocks of them."""
    sharding = jax.typeof(x).sharding
    if all(sharding.spec[axis] is None for axis in axes):
        return x
    gathered = [axis % x.ndim for axis in axes]
    spec = [None if axis in gathered else name for axis, name in enumerate(sharding.spec)]
    whole: Array = jax.sharding.reshard(x, jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*spec)))
    return whole


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Shardings:
    """How the arguments of an op are split over the explicit axes of a mesh.

    A cotangent has to be split like its argument, but comes out split like all arguments combined.
    """

    specs: tuple[Any, ...]
    tree: Any

    @classmethod
    def of(cls, args: Any) -> "Shardings":
        leaves, tree = jax.tree.flatten(args)
        return cls(tuple(jax.typeof(leaf).sharding for leaf in leaves), tree)

    def apply(self, cotangents: Any) -> tuple[Any, ...]:
        def resharded(cotangent: Any, sharding: Any) -> Any:
            own = None if cotangent is None else jax.typeof(cotangent).sharding
            if own is None or own.spec == sharding.spec:
                return cotangent
            mesh = own.mesh if sharding.mesh.empty else sharding.mesh  # an argument may be on no mesh
            return jax.sharding.reshard(cotangent, jax.sharding.NamedSharding(mesh, sharding.spec))

        shardings = jax.tree.unflatten(self.tree, self.specs)
        is_none = lambda x: x is None  # noqa: E731
        return tuple(
            None if cotangent is None else jax.tree.map(resharded, cotangent, sharding, is_leaf=is_none)
            for cotangent, sharding in zip(cotangents, shardings, strict=True)
        )


# Inside `jax.shard_map`. The type of an array says over which axes of the mesh it varies, and types have to agree.


def vary_alike(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments; inside `jax.shard_map` with all floats varying over the same mesh axes.

    A reverse rule has to return cotangents that vary like its arguments, but its results vary like all arguments
    combined. Adding a varying zero makes an array vary, and makes JAX sum its cotangent over the devices.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return args
    leaves, tree = jax.tree.flatten(args)
    zero = varying_zero([x for x in leaves if isinstance(x, jax.Array)])

    def moved(x: Any) -> Any:
        is_float = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)
        return x + jnp.asarray(zero, x.dtype) if is_float else x

    return cast(tuple[Any, ...], jax.tree.unflatten(tree, map(moved, leaves)))


def vary_with(tree: Any, others: Any) -> Any:
    """The arrays of `tree`, made to vary over all mesh axes over which an array of `others` varies."""
    zero = varying_zero([x for x in jax.tree.leaves(others) if isinstance(x, jax.Array)])
    return jax.tree.map(lambda x: x + zero.astype(x.dtype), tree)


def varying_zero(arrays: list[jax.Array]) -> jax.Array:
    """A zero that inside `jax.shard_map` varies over all mesh axes over which one of the arrays does.

    It is a sum over empty slices, which XLA removes.
    """
    plain = [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in arrays]
    return sum((jnp.sum(x[None][:0].astype(jnp.float32)) for x in plain), jnp.zeros(()))


# Over a named axis of the mesh, inside `jax.shard_map`. Every function takes the name first; with None the arrays are
# not split, and nothing is exchanged.

AxisName = str | None
AxisNames = str | tuple[str, ...] | None  # several axes of the mesh count like one, the last of them fastest


def as_axis_name(op: str, axis_name: AxisName) -> AxisName:
    """The name of an existing mesh axis, or None."""
    if axis_name is None:
        return None
    try:
        lax.axis_size(axis_name)
    except NameError:
        expected = "an axis of the mesh of the jax.shard_map around the call, or None"
        raise ValueError(message(op, "axis_name", f"value {axis_name!r}", expected)) from None
    return axis_name


def size_over_devices(axis_name: AxisNames, number: int) -> int:
    """The number of classes on all devices, each of which has `number`."""
    return number if axis_name is None else number * lax.axis_size(axis_name)


def local_class(axis_name: AxisNames, labels: Array, number: int) -> Array:
    """Labels, which count the classes of all devices, as classes of this device; elsewhere if not in [0, number)."""
    return labels if axis_name is None else labels - lax.axis_index(axis_name) * number


def sum_over_devices(axis_name: AxisNames, x: Array) -> Array:
    """The sum over the devices, the same on each."""
    return x if axis_name is None else lax.psum(x, axis_name)


def max_over_devices(axis_name: AxisNames, x: Array) -> Array:
    """The maximum over the devices, the same on each; +inf for a NaN, whose order is undefined."""
    return x if axis_name is None else lax.pmax(jnp.where(jnp.isnan(x), jnp.inf, x), axis_name)


def any_over_devices(axis_name: AxisNames, x: Array) -> Array:
    """Whether `x` is True on any device, the same on each."""
    return x if axis_name is None else lax.pmax(x.astype(jnp.int32), axis_name) > 0


# Every device computes the whole loss, but JAX assumes that the result of a custom rule varies over the devices. Taking
# the mean over the devices after the rule shows JAX that the losses are equal. Its derivative gives each device a part
# of the cotangent, and the reverse rule sums the parts again.


def same_on_all_devices(axis_name: AxisNames, loss: Array) -> Array:
    """The loss, with a type that says it is the same on all devices."""
    return loss if axis_name is None else lax.pmean(loss, axis_name)


def whole_cotangent(axis_name: AxisNames, d_loss: Array) -> Array:
    """The cotangent of the loss, summed from the parts on the devices."""
    return sum_over_devices(axis_name, d_loss)
