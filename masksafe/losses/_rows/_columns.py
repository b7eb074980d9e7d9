"""The logits of a few classes of each token, from the columns of the kernel that they need.

All logits of a token take 2 V D operations, those of K classes 2 K D. So nothing has V elements for each token; what is
copied is the kernel, transposed, so that a column is read as one piece, and in reverse its gradient, to which the
columns' parts are added one by one. Of 1024 tokens, D = 512 and V = 32768 on two cores (jax 0.12), K = 64: 0.16 s for
the logits and 0.3 s for their gradients; a product with the whole kernel, of which the logits are taken, takes 0.34 and
0.83 s. With K = 512 both take as long.

A column of NaN that a token does not keep may not reach it: its part is selected before it is added up.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from masksafe._core import per_device, platforms, run_time, sharding, switches
from masksafe._core.derivatives import rule_with_plain_form
from masksafe._core.labels import class_index, is_class
from masksafe._core.masks import selected
from masksafe._core.precision import wide_dtype
from masksafe._core.tiles import loop
from masksafe._core.typing import Array, DType, Index, Pytree, jitted
from masksafe.losses._rows._linear_layer import Linear, as_rows
from masksafe.losses._rows._packing import Packed

_Args = tuple[Linear, Array, Array]  # the layer, the classes and whether they are kept


class Columns(NamedTuple):
    """The static arguments of the op."""

    block_size: int | None  # the most tokens in a block, as the user gives it
    axis_name: sharding.AxisName = None  # the mesh axis over which the classes are split

    def tokens_of_block(self, layer: Linear, places: int, on_cpu: bool) -> int:
        """How many tokens have their columns in memory together."""
        limits, tokens = platforms.choices().linear, layer.features.shape[0]
        elements = limits.class_tile_elements if on_cpu else limits.token_block_elements_on_accelerators
        most = elements // max(1, places * layer.features.shape[1]) if self.block_size is None else self.block_size
        return max(1, min(most, tokens))


@jitted(0)
def logits_at(options: Columns, layer: Linear, classes: Array, is_kept: Array) -> Array:
    """The logits `[..., K]` of classes in [0, V), at least float32; 0 where they are not kept.

    The classes count those of all devices. If the explicit axes of a mesh split the arrays, each device works on its
    own tokens and columns. For features [8, 512, 256], a kernel [256, 50257] and classes [8, 512, 9]: [8, 512, 9].
    """
    tokens = tuple(f"tokens {axis}" for axis in range(layer.features.ndim - 1))
    by_class, of_tokens = PartitionSpec("classes"), PartitionSpec(*tokens, None)
    of_layer = Linear(of_tokens, PartitionSpec(None, "classes"), by_class)  # type: ignore[arg-type]
    args = layer, classes, is_kept
    names = jax.tree.map(lambda names, x: jax.tree.map(lambda _: names, x), (of_layer, of_tokens, of_tokens), args)
    split = None if options.axis_name is not None else per_device.split_of(args, names)
    if split is None:
        return _logits_on_device(options, *args)
    on_device = functools.partial(logits_at, options._replace(axis_name=split.axes("classes") or None))
    return split.map(on_device, args, names, of_tokens)


def _logits_on_device(options: Columns, layer: Linear, classes: Array, is_kept: Array) -> Array:
    devices, number = sharding.Devices(options.axis_name), layer.kernel.shape[1]
    if not devices.are_many:
        return _op(options, layer, classes, is_kept)
    local = devices.local(classes, number)
    is_here = is_kept & is_class(local, number)
    return devices.sum(_op(options, layer, jnp.where(is_here, local, 0), is_here))


def _forward(options: Columns, layer: Linear, classes: Array, is_kept: Array) -> tuple[Array, Array]:
    """The logits, twice: a reverse pass looks at them."""
    if not _may_loop(layer, classes):
        logits = _plain(options, layer, classes, is_kept)
        return logits, logits

    def in_blocks(on_cpu: bool, layer: Linear, classes: Array, is_kept: Array) -> Array:
        number, places = classes.shape
        packed = Packed.of(number, run_time.any_of(is_kept, -1), options.tokens_of_block(layer, places, on_cpu))

        def one_block(i: Index, logits: Array) -> Array:
            block = packed.block(i)
            features, *rows = block.take((layer.features, classes, is_kept))
            return block.put(logits, _logits(layer._replace(features=features), *rows))

        logits = jnp.zeros((packed.length, places), _wide(layer))
        logits = loop(0, packed.blocks, one_block, sharding.vary_with(logits, (layer, classes, is_kept)))
        return selected(packed.unpacked(logits, number), is_kept)

    on_cpu, on_accelerator = (functools.partial(in_blocks, on_cpu) for on_cpu in (True, False))
    args = _flat(layer), *(as_rows(x, x.ndim - 1) for x in (classes, is_kept))
    logits = platforms.by_platform(on_accelerator, *args, cpu=on_cpu).reshape(classes.shape)
    return logits, logits


def _may_loop(layer: Linear, classes: Array) -> bool:
    """Whether JAX allows a loop over the tokens, and no array is empty."""
    arrays = jax.tree.leaves((layer, classes))
    return sharding.may_loop(arrays) and all(x.size for x in arrays)


def _wide(layer: Linear) -> DType:
    return jnp.promote_types(*(wide_dtype(x.dtype) for x in (layer.features, layer.kernel)))


def _flat(layer: Linear) -> Linear:
    """The layer with tokens on one axis, and a column of the kernel as a row."""
    return layer._replace(features=as_rows(layer.features, layer.features.ndim - 1), kernel=layer.kernel.T)


def _logits(layer: Linear, classes: Array, is_kept: Array) -> Array:
    """The logits `[..., K]`, with a kernel `[V, D]`; 0 where not kept, with derivatives of 0."""
    dtype, where = _wide(layer), is_kept[..., None]
    features = selected(layer.features, run_time.any_of(is_kept, -1, keepdims=True)).astype(dtype)
    columns = selected(_at(layer.kernel, classes), where).astype(dtype)
    # No matrix product, which would have to have the columns in memory: each is used once.
    logits = jnp.sum(features[..., None, :] * columns, -1)
    return logits if layer.bias is None else logits + selected(_at(layer.bias, classes), is_kept).astype(dtype)


def _at(x: Array, classes: Array) -> Array:
    """The rows of `x` at classes in range."""
    spec = None
    if sharding.is_sharded(x) or sharding.is_sharded(classes):
        x = sharding.gathered_along(x, *range(x.ndim))
        spec = jax.typeof(classes).sharding
        spec = spec.update(spec=PartitionSpec(*spec.spec, *[None] * (x.ndim - 1)))
    return x.at[classes].get(mode="promise_in_bounds", wrap_negative_indices=False, out_sharding=spec)


def _plain(options: Columns, layer: Linear, classes: Array, is_kept: Array) -> Array:
    """The logits in a form that JAX differentiates to any order; if possible in a fixed number of blocks."""
    if not _may_loop(layer, classes):
        return _logits(layer._replace(kernel=layer.kernel.T), classes, is_kept)
    flat, rows = _flat(layer), [as_rows(x, x.ndim - 1) for x in (classes, is_kept)]

    def one_block(rows: Pytree) -> Array:
        features, *rows = rows
        return _logits(flat._replace(features=features), *rows)

    block = options.tokens_of_block(flat, classes.shape[-1], on_cpu=True)
    # checkify fails at a look-up inside of `jax.checkpoint` (jax 0.12).
    one_block = one_block if switches.is_checkified() else jax.checkpoint(one_block)
    logits = lax.map(one_block, (flat.features, *rows), batch_size=block)
    return sharding.vary_with(logits.reshape(classes.shape), (layer, classes, is_kept))


def _in_reverse(options: Columns, args: _Args, logits: Array, d_logits: Array) -> _Args:
    """Leaves out logits that are not finite and whose cotangents are 0: the user has replaced what depends on them."""
    layer, classes, is_kept = args
    return layer, classes, is_kept & (jnp.isfinite(logits) | (d_logits != 0))


def _reverse(options: Columns, args: _Args, _: Array, d_logits: Array) -> tuple[Linear, None, None]:
    layer, classes, is_kept = args
    if not _may_loop(layer, classes):
        logits_of = lambda layer: _plain(options, layer, classes, is_kept)  # noqa: E731
        return jax.vjp(logits_of, layer)[1](d_logits)[0], None, None
    flat, d_rows = _flat(layer), as_rows(selected(d_logits, is_kept), classes.ndim - 1)
    on_cpu, on_accelerator = (functools.partial(_gradients, options, on_cpu) for on_cpu in (True, False))
    d = platforms.by_platform(on_accelerator, flat, as_rows(classes, classes.ndim - 1), d_rows, cpu=on_cpu)
    d = d._replace(features=d.features.reshape(layer.features.shape), kernel=d.kernel.T)
    return jax.tree.map(lambda d, x: d.astype(x.dtype), d, layer), None, None


def _gradients(options: Columns, on_cpu: bool, layer: Linear, classes: Array, d_logits: Array) -> Linear:
    """The gradients, wide. A cotangent of 0 adds nothing: the class is masked, or the user has replaced the result."""
    (number, places), dtype = classes.shape, d_logits.dtype
    packed = Packed.of(number, run_time.any_of(d_logits != 0, -1), options.tokens_of_block(layer, places, on_cpu))

    def one_block(i: Index, state: Linear) -> Linear:
        block = packed.block(i)
        features, at, d = block.take((layer.features, classes, d_logits))
        d = selected(d, block.valid)
        takes_part = d != 0
        # The others add 0, each to another class: a GPU adds to one in turn. (An index past the end would add nothing,
        # but is an error to checkify.)
        at = jnp.where(takes_part, at, class_index(at.shape, (0, 1)) % len(layer.kernel))
        d, takes_part = d[..., None], takes_part[..., None]
        columns = selected(_at(layer.kernel, at), takes_part).astype(dtype)
        parts = selected(d * features[:, None].astype(dtype), takes_part)
        d_features = block.put(state.features, jnp.sum(d * columns, 1))
        d_bias = None if state.bias is None else _added_at(state.bias, at, d[..., 0])
        return Linear(d_features, _added_at(state.kernel, at, parts), d_bias)

    like = Linear(jnp.zeros((packed.length, layer.features.shape[1])), layer.kernel, layer.bias)
    state = sharding.vary_with(jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), like), (layer, classes, d_logits))
    state = loop(0, packed.blocks, one_block, state)
    takes_part = run_time.any_of(d_logits != 0, -1, keepdims=True)
    return state._replace(features=selected(packed.unpacked(state.features, number), takes_part))


def _added_at(x: Array, at: Array, parts: Array) -> Array:
    return x.at[at].add(parts, mode="promise_in_bounds", wrap_negative_indices=False)


_op = rule_with_plain_form(_forward, _reverse, _in_reverse, plain=_plain)
