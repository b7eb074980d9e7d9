"""Computing on the rows of an array in blocks that fit into a CPU's cache."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from masksafe._core import derivatives, linear, masks, per_device, platforms, precision, run_time, sharding, tiles
from masksafe._core.typing import Array, Arrays, Axes, DType, Pytree, Tree

_WithTotals = Callable[..., tuple[Pytree, Pytree]]  # the results of each row, and sums over the rows


def map_row_blocks(
    fn: Callable[..., Tree], *args: Pytree, leading: int | None = None, has_totals: bool = False
) -> Tree:
    """`fn(*args)`, computed block by block on a CPU if the rows are large, and in one pass on accelerators.

    XLA's CPU compiler writes an array that two reductions share, such as a masked array or a 16-bit array widened to
    float32, to memory as a whole (jax 0.12, cross-entropy of 2048x32768 bfloat16: 256 MiB); a block of it never leaves
    the cache. On a GPU the reductions are fused, and a loop would only slow them down. Many rows that the explicit axes
    of a mesh split are taken in blocks on each device. Other arrays that no loop may go through, as on an automatic
    mesh, are computed in one pass.

    Args:
      fn: a function that treats every row by itself, for any number of leading axes. It returns a pytree of arrays with
        the leading axes of the rows; with `has_totals` a tuple of it and a pytree of sums over the rows.
      *args: pytrees of arrays. The first array has all rows; the others have its rank, and their leading axes broadcast
        to its.
      leading: the number of leading axes, which number the rows; the other axes lie within a row. None: all but one.
      has_totals: whether `fn` returns such sums.
    """
    rows = jax.tree.leaves(args)[0]
    leading = rows.ndim - 1 if leading is None else leading
    if not sharding.are_whole(args):
        return _on_each_device(fn, leading, has_totals, args)
    count, elements = math.prod(rows.shape[:leading]), math.prod(rows.shape[leading:])
    if not sharding.may_loop(args) or count == 1 or rows.size <= platforms.choices().most_elements_in_one_pass:
        return fn(*args)
    size = tiles.divisor_near(count, max(1, platforms.choices().row_block_elements // elements))
    loop = _Loop(_with_totals(fn, has_totals), rows.shape[:leading], size)
    # What a loop carries varies over the devices over which any of its arguments does.
    in_one_pass = lambda *args: sharding.vary_with(loop.fn(*args), args)  # noqa: E731
    results = platforms.by_platform(in_one_pass, *args, cpu=functools.partial(_in_blocks, loop))
    return results if has_totals else results[0]


def _with_totals(fn: Callable[..., Pytree], has_totals: bool) -> _WithTotals:
    return fn if has_totals else lambda *args: (fn(*args), ())


def sums_over_rows(
    terms: Callable[..., Arrays], arrays: Sequence[Array], where: Array | None, axes: Axes, *others: Array
) -> Arrays:
    """The sums of the terms over the unmasked elements of each row; anything in a masked row. Axes keep size 1.

    The caller selects what it computes from the sums, once: XLA's compiler for CPUs makes one fusion of both (jax 0.12,
    `cosine_similarity` of 8192x1024: 8 ms, in blocks 19).

    Args:
      terms: a function of the arrays, wide and with 0 for the masked elements of unmasked rows, and of the others. Its
        results are added up.
      arrays: arrays of one shape.
      where: a mask of their rank.
      axes: those along which the elements of a row lie.
      *others: further arrays of that rank.
    """
    row_axes = axes_of_row(axes, arrays[0].ndim)

    def sums(arrays: Sequence[Array], where: Array | None, *others: Array) -> Arrays:
        wide = (precision.widened(masks.selected(x, where)) for x in arrays)
        return tuple(run_time.sum_of(term, row_axes, keepdims=True) for term in terms(*wide, *others))

    # XLA's library for CPUs makes fusions of this that write no array, but neither selects nor widens float16.
    if platforms.choices().has_fusion_library and not others and all(x.dtype != jnp.float16 for x in arrays):
        arrays, where = derivatives.without_mask_of_rows(where, axes, *arrays)
        if where is None:
            return _each_apart(sums, arrays)
    return map_row_blocks(sums, arrays, where, *others, leading=leading_axes(axes))


def _each_apart(sums: Callable[..., Arrays], arrays: Sequence[Array]) -> Arrays:
    """The sums, no two of which share an array that is widened: XLA's CPU compiler would write it to memory.

    It does so where they are kernels of their own: of few rows, and before a reverse pass (jax 0.12,
    `cosine_similarity` of 8192x1024 bfloat16 with gradient: 64 MiB, and five times the time). The reverse pass computes
    from the arrays themselves.
    """
    if all(x.dtype == precision.wide_dtype(x.dtype) for x in arrays):
        return sums(arrays, None)
    shared, apart, results = sums(arrays, None), [lax.stop_gradient(x) for x in arrays], []
    for i, total in enumerate(shared):
        apart = platforms.unfused(apart, on="cpu")  # of the last ones, since XLA shares equal barriers
        results.append(linear.with_tangent_of(total, sums(apart, None)[i]))
    return tuple(results)


def _on_each_device(fn: Callable[..., Pytree], leading: int, has_totals: bool, args: Pytree) -> Pytree:
    """Each device's rows in blocks, if a mesh splits no row and each device has many rows; else one pass."""
    rows = jax.tree.leaves(args)[0]
    row_names = PartitionSpec(*(f"rows {axis}" for axis in range(leading)))
    names = jax.tree.map(lambda _: row_names, args)
    specs = [jax.typeof(x).sharding.spec for x in jax.tree.leaves(args)]
    splits_a_row = any(axis is not None for spec in specs for axis in spec[leading:])
    split = None if splits_a_row else per_device.split_of(args, names)
    if split is None or rows.size // split.devices(*row_names) <= platforms.choices().most_elements_in_one_pass:
        return fn(*args)
    axes, with_totals = split.axes(*row_names), _with_totals(fn, has_totals)

    def on_device(*args: Pytree) -> tuple[Pytree, Pytree]:
        mapped, totals = map_row_blocks(with_totals, *args, leading=leading, has_totals=True)
        return mapped, jax.tree.map(lambda total: lax.psum(total, axes), totals)

    mapped, totals = jax.eval_shape(with_totals, *args)
    result_names = jax.tree.map(lambda _: row_names, mapped), jax.tree.map(lambda _: PartitionSpec(), totals)
    results = split.map(on_device, args, names, result_names)
    return results if has_totals else results[0]


def leading_axes(axes: Axes) -> int:
    """How many axes precede the first of `axes`: they number the rows."""
    return min(axes, default=0)


def axes_of_row(axes: Axes, ndim: int) -> Axes:
    """`axes` counted from the end, which stay valid when the leading axes change."""
    return tuple(a - ndim for a in axes)


class _Loop(NamedTuple):
    fn: _WithTotals
    leading: tuple[int, ...]
    block_rows: int


def _in_one_pass(loop: _Loop, *args: Pytree) -> Pytree:
    return loop.fn(*args)


@derivatives.with_derivatives_of(_in_one_pass)
def _in_blocks(loop: _Loop, *args: Pytree) -> Pytree:
    arrays, tree = jax.tree.flatten(args)
    flat = [as_bits(_flatten_rows(a, loop.leading)) for a in arrays]
    count = math.prod(loop.leading)
    whole, rest = divmod(count, loop.block_rows)

    def with_block(state: tuple[Pytree, Pytree], start: Array | int, size: int) -> tuple[Pytree, Pytree]:
        rows = [f if f.shape[0] == 1 else tiles.slice_at(f, {0: (start, size)}) for f in flat]
        block = [from_bits(f, a.dtype) for f, a in zip(rows, arrays, strict=True)]
        mapped, added = loop.fn(*jax.tree.unflatten(tree, block))
        # Results are written in place: to append those of the remainder would copy all of them.
        put = lambda x, rows: tiles.with_slice(x, as_bits(rows), {0: (start, size)})  # noqa: E731
        return jax.tree.map(put, state[0], mapped), jax.tree.map(jnp.add, state[1], added)

    outputs, totals = jax.eval_shape(loop.fn, *args)
    no_rows = jax.tree.map(lambda o: as_bits(jnp.zeros((count, *o.shape[len(loop.leading) :]), o.dtype)), outputs)
    no_totals = jax.tree.map(lambda t: jnp.zeros(t.shape, t.dtype), totals)
    state = sharding.vary_with((no_rows, no_totals), arrays)
    state = tiles.loop(0, whole, lambda i, state: with_block(state, i * loop.block_rows, loop.block_rows), state)
    mapped, totals = with_block(state, whole * loop.block_rows, rest) if rest else state
    return jax.tree.map(lambda like, x: from_bits(x, like.dtype).reshape(like.shape), outputs, mapped), totals


def _flatten_rows(a: Array, leading: tuple[int, ...]) -> Array:
    row = a.shape[len(leading) :]
    if math.prod(a.shape[: len(leading)]) == 1:
        return a.reshape(1, *row)
    return jnp.broadcast_to(a, (*leading, *row)).reshape(-1, *row)


# XLA's CPU compiler of jax 0.10 does not slice bfloat16: it widens the whole array to float32 before the loop, which is
# the copy that blocks are meant to avoid (cross-entropy of 8192x1024: 32 MiB, and twice the time). It slices integers
# of the same width as they are.


def as_bits(a: Array) -> Array:
    """`a` as an array that XLA slices without a copy; `from_bits` turns its blocks into blocks of `a`."""
    return lax.bitcast_convert_type(a, jnp.uint16) if _is_sliced_as_bits(a.dtype) else a


def from_bits(a: Array, dtype: DType) -> Array:
    return lax.bitcast_convert_type(a, dtype) if _is_sliced_as_bits(dtype) else a


def _is_sliced_as_bits(dtype: DType) -> bool:
    return dtype == jnp.bfloat16 and not platforms.choices().has_fusion_library
