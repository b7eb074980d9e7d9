"""Arrays split over devices: over the explicit axes of a mesh, inside `jax.shard_map`, and over a named axis."""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core.arguments import message
from masksafe._core.typing import Array, Tree

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

    JAX refuses a loop over a dimension that is split over devices, or gathers the array first; XLA gathers what it has
    split on an automatic mesh; and a dimension of symbolic size, as in `jax.export`, cannot be divided into blocks.
    """
    return are_whole(tree) and not any(map(is_on_automatic_mesh, jax.tree.leaves(tree)))


def are_whole(tree: Any) -> bool:
    """Whether no array of `tree` has a type that splits it over devices, or a symbolic size."""
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


def vary_with(tree: Tree, others: Any) -> Tree:
    """The arrays of `tree`, made to vary over all mesh axes over which an array of `others` varies."""
    arrays = [x for x in jax.tree.leaves(others) if isinstance(x, jax.Array)]
    if _are_on_no_mesh(arrays):
        return tree
    zero = varying_zero(arrays)

    def moved(x: jax.Array) -> jax.Array:
        if not is_random_key(x):
            return x + zero.astype(x.dtype)
        data = jax.random.key_data(x)
        key: jax.Array = jax.random.wrap_key_data(data + zero.astype(data.dtype), impl=jax.random.key_impl(x))
        return key

    return jax.tree.map(moved, tree)  # type: ignore[no-any-return]


def zeros_of_types(shapes: Any, others: Any) -> Any:
    """Zeros of the types that `jax.eval_shape` told, those of what is computed from the arrays of `others`."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes or jax.sharding.AxisType.Auto not in mesh.axis_types:
        return jax.tree.map(jnp.zeros_like, shapes)
    # JAX refuses to make zeros that vary over some axes where others are automatic.
    return vary_with(jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes), others)


def varying_zero(arrays: list[jax.Array]) -> jax.Array:
    """A zero that inside `jax.shard_map` varies over all mesh axes over which one of the arrays does.

    It is a sum over empty slices, which XLA removes.
    """
    plain = [jax.random.key_data(x) if is_random_key(x) else x for x in arrays]
    return sum((jnp.sum(x[None][:0].astype(jnp.float32)) for x in plain), jnp.zeros((), jnp.float32))


def _are_on_no_mesh(arrays: list[jax.Array]) -> bool:
    """Whether the types of the arrays can say nothing of devices."""
    return jax.sharding.get_abstract_mesh().empty and all(jax.typeof(x).sharding.mesh.empty for x in arrays)


def is_random_key(x: jax.Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


# Over a named axis of the mesh, inside `jax.shard_map`. Every function takes the name first; with None the arrays are
# not split, and nothing is exchanged.

AxisName = str | tuple[str, ...] | None  # several axes count as one, the first of them being the slowest


def as_axis_name(op: str, axis_name: Any) -> Any:
    """The name of an existing mesh axis, the names of several, or None."""
    if axis_name is None:
        return None
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    expected = "an axis of the mesh of the jax.shard_map around the call, a tuple of them, or None"
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        raise TypeError(message(op, "axis_name", f"value {axis_name!r}", expected))
    if len(set(names)) != max(1, len(names)):
        raise ValueError(message(op, "axis_name", f"value {axis_name!r}", expected))
    for name in names:
        try:
            lax.axis_size(name)
        except NameError:
            raise ValueError(message(op, "axis_name", f"value {name!r}", expected)) from None
    return axis_name if isinstance(axis_name, str) else tuple(names)


def size_over_devices(axis_name: AxisName, number: int) -> int:
    """The number of elements on all devices, each of which has `number`."""
    return number if axis_name is None else number * lax.axis_size(axis_name)


def first_index(axis_name: AxisName, number: int) -> Array | None:
    """The index of this device's first element among those of all devices, each of which has `number`; None for 0."""
    return None if axis_name is None else lax.axis_index(axis_name) * number


def local_class(axis_name: AxisName, labels: Array, number: int) -> Array:
    """Labels, which count the classes of all devices, as classes of this device; elsewhere if not in [0, number)."""
    return labels if axis_name is None else labels - lax.axis_index(axis_name) * number


def sum_over_devices(axis_name: AxisName, x: Array) -> Array:
    """The sum over the devices, the same on each."""
    return x if axis_name is None else lax.psum(x, axis_name)


def sums_over_devices(axis_name: AxisName, *arrays: Array) -> tuple[Array, ...]:
    """The sums of several arrays of one shape and dtype over the devices, in one exchange."""
    return arrays if axis_name is None else tuple(lax.psum(jnp.stack(arrays), axis_name))


def of_all_devices(axis_name: AxisName, x: Array) -> Array:
    """The arrays of all devices along a new axis, the first; the same on each device."""
    of_mesh, of_vmap = _names_of_mesh_and_vmap(axis_name)
    if not of_mesh:
        return _of_all_samples(of_vmap, x)
    # A gathered array would vary over the devices by its type. The sum of arrays with one part each does not.
    here = _of_all_samples(of_vmap, x)
    parts = jnp.zeros((lax.axis_size(of_mesh), *here.shape), x.dtype)
    placed: Array = lax.dynamic_update_index_in_dim(parts, here, lax.axis_index(of_mesh), 0)
    return jnp.reshape(lax.psum(placed, of_mesh), (-1, *x.shape))


def _of_all_samples(names: tuple[str, ...], x: Array) -> Array:
    """The arrays along a new axis, the first, for named axes of `jax.vmap`."""
    gathered: Array = lax.all_gather(x, names) if names else x[None]
    return jnp.reshape(gathered, (-1, *x.shape))


def _names_of_mesh_and_vmap(axis_name: AxisName) -> tuple[tuple[str, ...], tuple[str, ...]]:
    names = () if axis_name is None else (axis_name,) if isinstance(axis_name, str) else axis_name
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(n for n in names if n in manual), tuple(n for n in names if n not in manual)


def varying_over(axis_name: AxisName, tree: Tree) -> Tree:
    """The arrays of `tree`, made to vary over the devices: their cotangents are each device's own, not yet summed."""
    of_mesh, _ = _names_of_mesh_and_vmap(axis_name)
    return vary_with(tree, lax.pcast(jnp.zeros(()), of_mesh, to="varying")) if of_mesh else tree


def is_same_on_devices(axis_name: AxisName, x: Array) -> bool:
    """Whether the type of `x` says that it is the same on all devices of one of the axes, as a sum over them is."""
    of_mesh, _ = _names_of_mesh_and_vmap(axis_name)
    return has_types_of_devices(axis_name) and any(_can_begin_to_vary(x, name) for name in of_mesh)


def has_types_of_devices(axis_name: AxisName) -> bool:
    """Whether types say what varies over the devices: not with `check_vma=False`, nor over an axis of `jax.vmap`."""
    of_mesh, _ = _names_of_mesh_and_vmap(axis_name)
    varying = varying_over(of_mesh, jnp.zeros(()))
    return any(not _can_begin_to_vary(varying, name) for name in of_mesh)


def _can_begin_to_vary(x: Array, name: str) -> bool:
    try:
        lax.pcast(x, name, to="varying")
    except ValueError:  # it varies already
        return False
    return True


def max_over_devices(axis_name: AxisName, x: Array) -> Array:
    """The maximum over the devices, the same on each; +inf for a NaN, whose order is undefined."""
    return x if axis_name is None else lax.pmax(jnp.where(jnp.isnan(x), jnp.inf, x), axis_name)


def any_over_devices(axis_name: AxisName, x: Array) -> Array:
    """Whether `x` is True on any device, the same on each."""
    return x if axis_name is None else lax.pmax(x.astype(jnp.int32), axis_name) > 0


# Every device computes the whole loss, but JAX assumes that the result of a custom rule varies over the devices. Taking
# the mean over the devices after the rule shows JAX that the losses are equal. Its derivative gives each device a part
# of the cotangent, and the reverse rule sums the parts again.


def same_on_all_devices(axis_name: AxisName, loss: Array) -> Array:
    """The loss, with a type that says it is the same on all devices."""
    return loss if axis_name is None else lax.pmean(loss, axis_name)


def part_of_cotangent(axis_name: AxisName, d_loss: Array) -> Array:
    """The cotangent of a loss that is the same on all devices, from the whole one, for JAX's own rules.

    Without types JAX takes the loss on each device for a term of a sum over the devices.
    """
    if axis_name is None or has_types_of_devices(axis_name):
        return same_on_all_devices(axis_name, d_loss)
    return d_loss / lax.axis_size(axis_name)


def whole_cotangent(axis_name: AxisName, d_loss: Array) -> Array:
    """The cotangent of the loss, summed from the parts on the devices."""
    return sum_over_devices(axis_name, d_loss)
