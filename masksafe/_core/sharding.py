"""Arrays split over devices, in three ways.

Over the explicit axes of a mesh: the type of an array says how it is split. Inside `jax.shard_map`: the type says over
which axes the array varies. Over a named axis: `Devices` are the devices along it, which exchange what they need.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from masksafe._core.arguments import message
from masksafe._core.typing import Array, Arrays, Pytree, Tree

# Over the explicit axes of a mesh. The type of an array says how it is split.


def is_sharded(x: Array) -> bool:
    """Whether the type of `x` says that one of its dimensions is split over devices."""
    return any(axis is not None for axis in jax.typeof(x).sharding.spec)


def is_on_automatic_mesh(x: Array) -> bool:
    """Whether the compiler may split `x` over the devices of a mesh, in a way that is not known while tracing."""
    meshes = jax.typeof(x).sharding.mesh, jax.sharding.get_abstract_mesh()
    kinds = [zip(mesh.axis_types, mesh.axis_sizes, strict=True) for mesh in meshes if not mesh.empty]
    return any(kind == AxisType.Auto and size > 1 for axes in kinds for kind, size in axes)


def may_loop(tree: Pytree) -> bool:
    """Whether a loop may go through the arrays of `tree` in blocks.

    JAX refuses a loop over a dimension that is split over devices, or gathers the array first; XLA gathers what it has
    split on an automatic mesh; and a dimension of symbolic size, as in `jax.export`, cannot be divided into blocks.
    """
    return are_whole(tree) and not any(map(is_on_automatic_mesh, jax.tree.leaves(tree)))


def are_whole(tree: Pytree) -> bool:
    """Whether no array of `tree` has a type that splits it over devices, or a symbolic size."""
    return not any(is_sharded(x) or has_symbolic_size(x) for x in jax.tree.leaves(tree))


def has_symbolic_size(x: Array) -> bool:
    """Whether `x` has a dimension of symbolic size, as in `jax.export`."""
    return not all(isinstance(n, int) for n in x.shape)


def gathered_along(x: Array, *axes: int) -> Array:
    """`x` with `axes` gathered if they are split over devices, for a loop over blocks of them."""
    sharding, gathered = jax.typeof(x).sharding, [axis % x.ndim for axis in axes]
    if all(sharding.spec[axis] is None for axis in axes):
        return x
    spec = [None if axis in gathered else name for axis, name in enumerate(sharding.spec)]
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*spec)))


def on_mesh_of(rows: Array, ids: Array) -> Array:
    """Ids `[..., k]` of rows `[..., V]`; if the rows are split and the ids are on no mesh, split like the rows."""
    sharding = jax.typeof(rows).sharding
    if not is_sharded(rows) or not jax.typeof(ids).sharding.mesh.empty:
        return ids
    return jax.sharding.reshard(ids, NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:-1], None)))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Shardings:
    """How the arguments of an op are split over the explicit axes of a mesh.

    A cotangent has to be split like its argument, but comes out split like all arguments combined.
    """

    specs: tuple[Pytree, ...]
    tree: Pytree

    @classmethod
    def of(cls, args: Pytree) -> "Shardings":
        leaves, tree = jax.tree.flatten(args)
        return cls(tuple(jax.typeof(leaf).sharding for leaf in leaves), tree)

    def apply(self, cotangents: Pytree) -> tuple[Pytree, ...]:
        def resharded(cotangent: Pytree, sharding: NamedSharding) -> Pytree:
            own = None if cotangent is None else jax.typeof(cotangent).sharding
            if own is None or own.spec == sharding.spec:
                return cotangent
            mesh = own.mesh if sharding.mesh.empty else sharding.mesh  # an argument may be on no mesh
            return jax.sharding.reshard(cotangent, NamedSharding(mesh, sharding.spec))

        shardings = tuple(jax.tree.unflatten(self.tree, self.specs))
        return jax.tree.map(resharded, tuple(cotangents), shardings, is_leaf=lambda x: x is None)


# Inside `jax.shard_map`. The type of an array says over which axes of the mesh it varies, and types have to agree.


def vary_alike(args: tuple[Pytree, ...]) -> tuple[Pytree, ...]:
    """The arguments; inside `jax.shard_map` with all floats varying over the same mesh axes.

    A reverse rule has to return cotangents that vary like its arguments, but its results vary like all arguments
    combined. Adding a varying zero makes an array vary, and makes JAX sum its cotangent over the devices.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return args
    zero = varying_zero([x for x in jax.tree.leaves(args) if isinstance(x, jax.Array)])
    zero = jnp.where(zero == 0, 0.0, 0.0)  # of no dtype of its own, so that a number keeps none

    def moved(x: Pytree) -> Pytree:
        is_float = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)
        return x + zero if is_float else x

    return jax.tree.map(moved, args)


def vary_with(tree: Tree, others: Pytree) -> Tree:
    """The arrays of `tree`, made to vary over all mesh axes over which an array of `others` varies."""
    arrays = [x for x in jax.tree.leaves(others) if isinstance(x, jax.Array)]
    if jax.sharding.get_abstract_mesh().empty and all(jax.typeof(x).sharding.mesh.empty for x in arrays):
        return tree  # types say nothing of devices
    zero = varying_zero(arrays)

    def moved(x: jax.Array) -> jax.Array:
        if not is_random_key(x):
            return x + zero.astype(x.dtype)
        data = jax.random.key_data(x)
        return jax.random.wrap_key_data(data + zero.astype(data.dtype), impl=jax.random.key_impl(x))

    return jax.tree.map(moved, tree)


def broadcast_like(x: Array, like: Array) -> Array:
    """`x` in the shape of `like`, split over devices and varying over them alike."""
    if not is_sharded(like):
        return vary_with(jnp.broadcast_to(x, like.shape), like)
    ones, sharding = jnp.ones_like(like), jax.typeof(like).sharding
    if jax.typeof(ones).sharding != sharding:  # outside of `jax.set_mesh` they are on no mesh (jax 0.12)
        ones = jax.sharding.reshard(ones, sharding)
    return vary_with(x * ones, like)


def zeros_of_types(shapes: Pytree, others: Pytree) -> Pytree:
    """Zeros of the types that `jax.eval_shape` returned for a function of the arrays of `others`."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes or AxisType.Auto not in mesh.axis_types:
        return jax.tree.map(jnp.zeros_like, shapes)
    # JAX refuses to make zeros that vary over some axes where others are automatic.
    return vary_with(jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes), others)


def varying_zero(arrays: list[jax.Array]) -> jax.Array:
    """A zero that inside `jax.shard_map` varies over all mesh axes over which one of the arrays does.

    It is a sum over empty slices, which XLA removes.
    """
    plain = [jax.random.key_data(x) if is_random_key(x) else x for x in arrays]
    return sum((jnp.sum(x[None][:0].astype(jnp.float32)) for x in plain), jnp.zeros((), jnp.float32))


def is_random_key(x: jax.Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


# Over a named axis.

AxisName = str | tuple[str, ...] | None  # several axes count as one, the first of them being the slowest


def as_axis_name(op: str, axis_name: object) -> AxisName:
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


class Devices(NamedTuple):
    """The devices along a named axis of the mesh, inside `jax.shard_map`, or the samples along one of `jax.vmap`.

    Without a name it is one device: nothing is exchanged.
    """

    axis_name: AxisName = None

    @property
    def are_many(self) -> bool:
        return self.axis_name is not None

    @property
    def size(self) -> int:
        return lax.axis_size(self.axis_name) if self.are_many else 1

    def first(self, number: int) -> Array | None:
        """The global index of this device's first element, if every device has `number` of them; None stands for 0."""
        return lax.axis_index(self.axis_name) * number if self.are_many else None

    def local(self, labels: Array, number: int) -> Array:
        """Global labels as local ones: a label in [0, number) is a class of this device."""
        return labels - (lax.axis_index(self.axis_name) * number).astype(labels.dtype) if self.are_many else labels

    def sum(self, tree: Tree) -> Tree:
        """The sums over the devices, the same on each."""
        return lax.psum(tree, self.axis_name) if self.are_many else tree

    def sums(self, *arrays: Array) -> Arrays:
        """The sums of several arrays of one shape and dtype, in one exchange."""
        return tuple(lax.psum(jnp.stack(arrays), self.axis_name)) if self.are_many else arrays

    def max(self, x: Array) -> Array:
        """The maximum over the devices, the same on each; +inf for a NaN, whose order is undefined."""
        return lax.pmax(jnp.where(jnp.isnan(x), jnp.inf, x), self.axis_name) if self.are_many else x

    def any(self, x: Array) -> Array:
        """Whether `x` is True on any device, the same on each."""
        return lax.pmax(x.astype(jnp.int32), self.axis_name) > 0 if self.are_many else x

    def from_before(self, tree: Tree, places: int = 1) -> Tree:
        """The arrays of the device that is `places` before this one, in the ring of all devices."""
        if self.size == 0 or places % self.size == 0:
            return tree
        # `lax.ppermute` takes the names in the mesh's order; the others are of `jax.vmap`.
        mesh_names = [name for name in jax.sharding.get_abstract_mesh().axis_names if name in self._names]
        names = [*mesh_names, *(name for name in self._names if name not in mesh_names)]
        numbers = np.arange(self.size).reshape([lax.axis_size(name) for name in names])
        number = numbers.transpose([names.index(name) for name in self._names]).ravel().tolist()
        way = [(number[n], number[(n + places) % self.size]) for n in range(self.size)]
        return lax.ppermute(tree, tuple(names), way)

    @property
    def _names(self) -> tuple[str, ...]:
        return (self.axis_name,) if isinstance(self.axis_name, str) else self.axis_name or ()

    # What the type of an array says about the devices.

    @property
    def _mesh_names(self) -> tuple[str, ...]:
        """The names that are axes of the mesh; the others are axes of `jax.vmap`."""
        manual = jax.sharding.get_abstract_mesh().manual_axes
        return tuple(name for name in self._names if name in manual)

    @property
    def are_samples(self) -> bool:
        """Whether an axis is one of `jax.vmap`, whose name JAX does not know in a hand-written reverse rule."""
        return len(self._mesh_names) < len(self._names)

    def varying(self, tree: Tree) -> Tree:
        """The arrays, made to vary over the devices: so each device keeps its own cotangent, and none is summed."""
        mesh_names = self._mesh_names
        return vary_with(tree, lax.pcast(jnp.zeros(()), mesh_names, to="varying")) if mesh_names else tree

    def share(self, x: Array) -> bool:
        """Whether the type of `x` says that it is the same on all devices of one of the axes, as a sum over them is.

        Types say nothing with `check_vma=False`, nor over an axis of `jax.vmap`.
        """
        mesh_names, varying = self._mesh_names, self.varying(jnp.zeros(()))
        have_types = any(_varies(varying, name) for name in mesh_names)
        return have_types and not all(_varies(x, name) for name in mesh_names)

    # Every device computes the whole loss, but JAX assumes that the result of a custom rule varies over the devices.
    # Taking the mean over the devices after the rule shows JAX that the losses are equal. Its derivative gives each
    # device a part of the cotangent, and the reverse rule sums the parts again.

    def shared(self, loss: Array) -> Array:
        """The loss, which is the same on all devices, with a type that says so."""
        return lax.pmean(loss, self.axis_name) if self.are_many else loss


def _varies(x: Array, name: str) -> bool:
    try:
        lax.pcast(x, name, to="varying")
    except ValueError:  # it does already
        return True
    return False
