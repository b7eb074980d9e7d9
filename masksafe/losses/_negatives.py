r"""Sums over the negatives of a batch of pairs, without the matrix of all pairs in memory.

The logits of row :math:`i` and column :math:`j` are :math:`z_{ij} = s \, x_i \cdot y_j + b`, and a pair is a negative
if both are unmasked and their keys differ. Rows are taken in blocks, each with all columns: a block of logits is
computed, reduced along both axes, and dropped. The reverse pass computes it again,

.. math::
  \bar z_{ij} = e^{z_{ij} - r_i} \bar r_i + e^{z_{ij} - c_j} \bar c_j, \qquad
  \bar x_i = s \sum_j \bar z_{ij} y_j, \qquad
  \bar y_j = s \sum_i \bar z_{ij} x_i

for the logarithms of the sums of exponentials of rows, :math:`r`, and of columns, :math:`c`. The two directions share
the products of matrices. Over devices the columns go round in a ring, and what is summed over rows goes with them and
returns to its own device at the end.
"""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core import platforms, precision, sharding
from masksafe._core.derivatives import rule
from masksafe._core.exponentials import Exponentials, shift_of
from masksafe._core.tiles import even_size
from masksafe._core.typing import Array, Pytree, Tree
from masksafe.losses._rows._sources import matmul

Reduction = Literal["logsumexp", "softplus"]


class OfNegatives(NamedTuple):
    """What is computed of the negatives of rows, and how."""

    reduction: Reduction  # of the logits of a row: the logarithm of the sum of exponentials, or the sum of softplus
    of_columns: bool  # whether columns are reduced as well; logarithms only
    block_size: int | None  # rows of a block
    devices: sharding.Devices


class Side(NamedTuple):
    """The rows, or the columns, of the matrix of pairs."""

    vectors: Array  # [N, D], 0 where masked
    keys: Array  # [N]
    live: Array | None  # [N]


class Scaling(NamedTuple):
    scale: Array
    bias: Array | None


class PairSums(NamedTuple):
    """The reductions of each row, and of each column."""

    rows: Array
    columns: Array | None


# One block: all columns of some rows.


def _logits(scaling: Scaling, rows: Side, columns: Side) -> tuple[Array, Array]:
    """The logits of a block, -inf but for negatives; and which pairs these are."""
    z = matmul(rows.vectors, columns.vectors, 1, 1)
    z = z * scaling.scale.astype(z.dtype)
    z = z if scaling.bias is None else z + scaling.bias.astype(z.dtype)
    negative = rows.keys[:, None] != columns.keys[None]
    if rows.live is not None:
        negative &= rows.live[:, None]
    if columns.live is not None:
        negative &= columns.live[None]
    return jnp.where(negative, z, -jnp.inf), negative


def _d_logits(config: OfNegatives, z: Array, negative: Array, rows: Pytree, columns: Pytree) -> Array:
    """The cotangents of a block's logits, from the sums and their cotangents."""
    sums, d_sums = rows
    if config.reduction == "softplus":
        return jnp.where(negative, jax.nn.sigmoid(z) * d_sums[:, None], 0)

    def of(sums: Array, d_sums: Array) -> Array:  # the sum of nothing is -inf: the difference would be NaN
        return jnp.exp(z - shift_of(sums)) * d_sums

    d_z = of(sums[:, None], d_sums[:, None])
    return jnp.where(negative, d_z + of(*(x[None] for x in columns)) if config.of_columns else d_z, 0)


def _product(d_z: Array, vectors: Array, axis: int) -> Array:
    """The sum over an axis of the cotangents, times the vectors.

    It is a product in the dtype of the vectors; of float16 a wide one, in which cotangents of a mean do not vanish.
    """
    dtype = d_z.dtype if vectors.dtype == jnp.float16 else vectors.dtype
    return matmul(d_z.astype(dtype), vectors.astype(dtype), axis, 0)


# Rows in blocks, with the columns of one device.


def in_blocks(
    size: int | None,
    fn: Callable[[Pytree, Pytree, Pytree], tuple[Pytree, Pytree]],
    rows: Side,
    columns: Pytree,
    carry: Pytree,
    of_rows: Pytree,
) -> tuple[Pytree, Pytree]:
    """`fn(columns, carry, (rows, of_rows))` for blocks of at most so many rows; its second results are of rows.

    Where JAX differentiates it, each of several blocks is computed again.
    """
    of_block: Callable[[Pytree, Pytree], tuple[Pytree, Pytree]] = functools.partial(fn, columns)
    number = rows.keys.shape[0]
    if size is None or not isinstance(number, int) or size >= number:
        return of_block(carry, (rows, of_rows))
    size = even_size(number, size)
    blocks = -(-number // size)
    live = jnp.ones(number, bool) if rows.live is None else rows.live  # the last block is filled with dead rows

    def cut(x: Array) -> Array:
        padded = jnp.pad(x, [(0, blocks * size - number), *[(0, 0)] * (x.ndim - 1)])
        return padded.reshape(blocks, size, *x.shape[1:])

    of_block = jax.checkpoint(of_block, prevent_cse=False)
    carry, results = lax.scan(of_block, carry, jax.tree.map(cut, (rows._replace(live=live), of_rows)))
    return carry, jax.tree.map(lambda x: x.reshape(blocks * size, *x.shape[2:])[:number], results)


def with_block_size(fn: Callable[..., Tree], size: int | None, pairs: int, *args: Pytree) -> Tree:
    """`fn(size, *args)` with the rows of a block, of as many pairs each, that the platform wants, unless one is given.

    A loop may not go through the rows everywhere: then all are one block.
    """
    if not sharding.may_loop(args):
        return fn(None, *args)
    if size is not None:
        return fn(size, *args)
    of = platforms.choices()
    sizes = (of.pair_block_elements, of.pair_block_elements_elsewhere)
    on_cpu, elsewhere = (functools.partial(fn, max(of.fewest_rows_of_pairs, n // max(1, pairs))) for n in sizes)
    return platforms.on_cpu_or_elsewhere(on_cpu, elsewhere, *args)


# The columns of all devices.


def _go_round(
    devices: sharding.Devices, visit: Callable[[Pytree, Pytree, Pytree], tuple[Pytree, Pytree]], y: Pytree, sums: Pytree
) -> Pytree:
    """The sums of this device's columns and rows, after `visit(y, of_columns, of_rows)` with the `y` of each device."""
    if not devices.are_many:
        return visit(y, *sums)

    def step(carry: Pytree, _: None) -> tuple[Pytree, None]:
        y, of_columns, of_rows = carry
        of_columns, of_rows = visit(y, of_columns, of_rows)
        return (*devices.from_before((y,)), devices.from_before(of_columns), of_rows), None

    (y, *sums), _ = lax.scan(step, (y, *sums), length=max(0, devices.size - 1))
    of_columns, of_rows = visit(y, *sums)
    return devices.from_before(of_columns), of_rows


def _sums(config: OfNegatives, size: int | None, scaling: Scaling, x: Side, y: Side) -> PairSums:
    wide = precision.wide_dtype(x.vectors.dtype)
    nothing: Pytree = [jnp.zeros_like(keys, wide) for keys in (y.keys, x.keys)]
    if config.reduction == "logsumexp":
        nothing = [Exponentials(jnp.full_like(n, jnp.finfo(wide).min), n) for n in nothing]
    of_columns, of_rows = sharding.vary_with(nothing, (scaling, x, y))
    y = sharding.vary_with(y, (x, y)) if config.devices.are_many else y

    def block(y: Side, columns: Pytree, part: tuple[Side, Pytree]) -> tuple[Pytree, Pytree]:
        rows, of_rows = part
        z, _ = _logits(scaling, rows, y)
        if config.reduction == "softplus":
            return None, of_rows + jnp.sum(jax.nn.softplus(z), 1)
        if config.of_columns:
            columns = columns.plus(Exponentials(*map(jnp.ravel, Exponentials.of(z, 0))))
        return columns, of_rows.plus(Exponentials(*map(jnp.ravel, Exponentials.of(z, 1))))

    visit = functools.partial(in_blocks, size, block, x)
    of_columns, of_rows = _go_round(config.devices, visit, y, (of_columns if config.of_columns else None, of_rows))
    if config.reduction == "softplus":
        return PairSums(of_rows, None)
    return PairSums(of_rows.logarithm, of_columns.logarithm if config.of_columns else None)


def value_over_negatives(config: OfNegatives, scaling: Scaling, x: Side, y: Side) -> PairSums:
    """The value of `over_negatives`, by JAX's own rules."""
    return with_block_size(functools.partial(_sums, config), config.block_size, y.keys.shape[0], scaling, x, y)


def _forward(config: OfNegatives, scaling: Scaling, x: Side, y: Side) -> tuple[PairSums, Pytree]:
    sums = value_over_negatives(config, scaling, x, y)
    return sums, (scaling, x, y, sums)


def _cotangents(
    config: OfNegatives, size: int | None, scaling: Scaling, x: Side, y: Side, sums: PairSums, d_sums: PairSums
) -> tuple[Scaling, Side, Side]:
    wide = precision.wide_dtype(x.vectors.dtype)
    # By the vectors of columns and of rows, without the scale; and of each row the sum of the cotangents.
    d_columns = sharding.vary_with(jnp.zeros_like(y.vectors, wide), (x, d_sums))
    nothing = jnp.zeros_like(x.vectors, wide), jnp.zeros_like(x.keys, wide)
    start = d_columns, sharding.vary_with(nothing, (scaling, x, y, d_sums))
    # A row with no negative has no derivative, whatever its cotangent.
    with_cotangents = lambda s, d: None if s is None or d is None else (s, jnp.where(s == -jnp.inf, 0, d))  # noqa: E731
    of_rows, of_columns = map(with_cotangents, sums, d_sums)

    def block(moving: Pytree, d_columns: Array, part: tuple[Side, Pytree]) -> tuple[Array, Pytree]:
        (y, of_columns), (rows, (of_rows, d_rows, d_bias)) = moving, part
        z, negative = _logits(scaling, rows, y)
        d_z = _d_logits(config, z, negative, of_rows, of_columns)
        d_columns += _product(d_z, rows.vectors, 0)
        return d_columns, (d_rows + _product(d_z, y.vectors, 1), d_bias + jnp.sum(d_z, 1))

    def visit(moving: Pytree, d_columns: Array, d_rows: Pytree) -> tuple[Pytree, Pytree]:
        return in_blocks(size, block, x, moving, d_columns, (of_rows, *d_rows))

    d_columns, (d_rows, d_bias) = _go_round(config.devices, visit, (y, of_columns), start)
    d_scale = jnp.sum(x.vectors.astype(d_rows.dtype) * d_rows)
    d_bias = None if scaling.bias is None else jnp.sum(d_bias).astype(scaling.bias.dtype)
    d_scaling = Scaling(d_scale.astype(scaling.scale.dtype), d_bias)
    scale = scaling.scale.astype(d_rows.dtype)
    d_x, d_y = ((scale * d).astype(x.vectors.dtype) for d in (d_rows, d_columns))
    return d_scaling, Side(d_x, None, None), Side(d_y, None, None)  # type: ignore[arg-type]


def _reverse(config: OfNegatives, residuals: Pytree, d_sums: PairSums) -> tuple[Scaling, Side, Side]:
    columns = residuals[2].keys.shape[0]
    return with_block_size(functools.partial(_cotangents, config), config.block_size, columns, *residuals, d_sums)


# The reductions of the logits of each row of `x` with its negatives in `y`, and of each row of `y`.
over_negatives = rule(_forward, _reverse, value_over_negatives)
