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

RowReduction = Literal["logsumexp", "softplus"]


class NegativesConfig(NamedTuple):
    """The static arguments: what is computed from the negatives of rows, and how."""

    reduction: RowReduction  # of the logits of each row: their logsumexp, or the sum of their softplus
    with_columns: bool  # whether columns are reduced as well, for "logsumexp" only
    block_size: int | None  # rows of a block
    devices: sharding.Devices


class Side(NamedTuple):
    """The rows, or the columns, of the matrix of pairs."""

    vectors: Array  # [N, D], 0 where masked
    keys: Array  # [N]
    unmasked: Array | None  # [N]


class Scaling(NamedTuple):
    scale: Array
    bias: Array | None


class PairSums(NamedTuple):
    """The reductions of each row, and of each column."""

    rows: Array
    columns: Array | None


# One block: all columns of some rows.


def _logits(scaling: Scaling, rows: Side, columns: Side) -> tuple[Array, Array]:
    """The logits of a block, -inf except at negatives; and which pairs are negatives."""
    z = precision.matmul(rows.vectors, columns.vectors, 1, 1)
    z = z * scaling.scale.astype(z.dtype)
    z = z if scaling.bias is None else z + scaling.bias.astype(z.dtype)
    negative = rows.keys[:, None] != columns.keys[None]
    if rows.unmasked is not None:
        negative &= rows.unmasked[:, None]
    if columns.unmasked is not None:
        negative &= columns.unmasked[None]
    return jnp.where(negative, z, -jnp.inf), negative


def _d_logits(config: NegativesConfig, z: Array, negative: Array, rows: Pytree, columns: Pytree) -> Array:
    """The cotangents of a block's logits, from the sums and their cotangents."""
    sums, d_sums = rows
    if config.reduction == "softplus":
        return jnp.where(negative, jax.nn.sigmoid(z) * d_sums[:, None], 0)

    def slopes(sums: Array, d_sums: Array) -> Array:  # the logsumexp of an empty row is -inf: z minus it would be NaN
        return jnp.exp(z - shift_of(sums)) * d_sums

    d_z = slopes(sums[:, None], d_sums[:, None])
    return jnp.where(negative, d_z + slopes(*(x[None] for x in columns)) if config.with_columns else d_z, 0)


def _product(d_z: Array, vectors: Array, axis: int) -> Array:
    """The matrix product of the cotangents and the vectors, which sums over `axis` of the cotangents.

    It is in the dtype of the vectors; for float16 it is wide, so that cotangents of a mean do not vanish.
    """
    dtype = d_z.dtype if vectors.dtype == jnp.float16 else vectors.dtype
    return precision.matmul(d_z.astype(dtype), vectors.astype(dtype), axis, 0)


# Rows in blocks, with the columns of one device.

_Visit = Callable[[Pytree, Pytree, Pytree], tuple[Pytree, Pytree]]


def in_blocks(
    size: int | None, fn: _Visit, rows: Side, columns: Pytree, carry: Pytree, row_data: Pytree
) -> tuple[Pytree, Pytree]:
    """`fn(columns, carry, (rows, row_data))` for blocks of at most `size` rows; it returns a carry and results of rows.

    Where JAX differentiates it, each of several blocks is computed again.
    """
    on_block: Callable[[Pytree, Pytree], tuple[Pytree, Pytree]] = functools.partial(fn, columns)
    number = rows.keys.shape[0]
    if size is None or not isinstance(number, int) or size >= number:
        return on_block(carry, (rows, row_data))
    size = even_size(number, size)
    blocks = -(-number // size)
    # The last block is filled up with masked rows.
    unmasked = jnp.ones(number, bool) if rows.unmasked is None else rows.unmasked

    def cut(x: Array) -> Array:
        padded = jnp.pad(x, [(0, blocks * size - number), *[(0, 0)] * (x.ndim - 1)])
        return padded.reshape(blocks, size, *x.shape[1:])

    on_block = jax.checkpoint(on_block, prevent_cse=False)
    carry, results = lax.scan(on_block, carry, jax.tree.map(cut, (rows._replace(unmasked=unmasked), row_data)))
    return carry, jax.tree.map(lambda x: x.reshape(blocks * size, *x.shape[2:])[:number], results)


def with_block_size(fn: Callable[..., Tree], size: int | None, pairs: int, *args: Pytree) -> Tree:
    """`fn(size, *args)` with the size of a block of rows: the given one, or the best for the platform.

    A row has `pairs` pairs. Where no loop may go through the rows, all are one block.
    """
    if not sharding.may_loop(args):
        return fn(None, *args)
    if size is not None:
        return fn(size, *args)
    choices = platforms.choices()
    sizes = (choices.pair_block_elements, choices.pair_block_elements_on_accelerators)
    rows = [max(choices.fewest_rows_of_pairs, n // max(1, pairs)) for n in sizes]
    on_cpu, on_accelerator = (functools.partial(fn, n) for n in rows)
    return platforms.by_platform(on_accelerator, *args, cpu=on_cpu)


# The columns of all devices.


def _go_round(devices: sharding.Devices, visit: _Visit, y: Pytree, sums: Pytree) -> Pytree:
    """The sums of this device's columns and rows, after `visit(y, column_sums, row_sums)` with each device's `y`."""
    if not devices.are_many:
        return visit(y, *sums)

    def step(carry: Pytree, _: None) -> tuple[Pytree, None]:
        y, column_sums, row_sums = carry
        column_sums, row_sums = visit(y, column_sums, row_sums)
        return (*devices.from_before((y,)), devices.from_before(column_sums), row_sums), None

    (y, *sums), _ = lax.scan(step, (y, *sums), length=max(0, devices.size - 1))
    column_sums, row_sums = visit(y, *sums)
    return devices.from_before(column_sums), row_sums


def _sums(config: NegativesConfig, size: int | None, scaling: Scaling, x: Side, y: Side) -> PairSums:
    wide = precision.wide_dtype(x.vectors.dtype)
    empty: Pytree = [jnp.zeros_like(keys, wide) for keys in (y.keys, x.keys)]
    if config.reduction == "logsumexp":
        empty = [Exponentials(jnp.full_like(n, jnp.finfo(wide).min), n) for n in empty]
    column_sums, row_sums = sharding.vary_with(empty, (scaling, x, y))
    y = sharding.vary_with(y, (x, y)) if config.devices.are_many else y

    def sum_block(y: Side, columns: Pytree, part: tuple[Side, Pytree]) -> tuple[Pytree, Pytree]:
        rows, row_sums = part
        z, _ = _logits(scaling, rows, y)
        if config.reduction == "softplus":
            return None, row_sums + jnp.sum(jax.nn.softplus(z), 1)
        if config.with_columns:
            columns = columns.plus(Exponentials(*map(jnp.ravel, Exponentials.of(z, 0))))
        return columns, row_sums.plus(Exponentials(*map(jnp.ravel, Exponentials.of(z, 1))))

    visit = functools.partial(in_blocks, size, sum_block, x)
    start = column_sums if config.with_columns else None, row_sums
    column_sums, row_sums = _go_round(config.devices, visit, y, start)
    if config.reduction == "softplus":
        return PairSums(row_sums, None)
    return PairSums(row_sums.logarithm, column_sums.logarithm if config.with_columns else None)


def value_over_negatives(config: NegativesConfig, scaling: Scaling, x: Side, y: Side) -> PairSums:
    """The value of `over_negatives`, by JAX's own rules."""
    return with_block_size(functools.partial(_sums, config), config.block_size, y.keys.shape[0], scaling, x, y)


def _forward(config: NegativesConfig, scaling: Scaling, x: Side, y: Side) -> tuple[PairSums, Pytree]:
    sums = value_over_negatives(config, scaling, x, y)
    return sums, (scaling, x, y, sums)


def _cotangents(
    config: NegativesConfig, size: int | None, scaling: Scaling, x: Side, y: Side, sums: PairSums, d_sums: PairSums
) -> tuple[Scaling, Side, Side]:
    wide = precision.wide_dtype(x.vectors.dtype)
    # The cotangents of the vectors of columns and of rows, without the scale; and for each row that of the bias.
    d_columns = sharding.vary_with(jnp.zeros_like(y.vectors, wide), (x, d_sums))
    zeros = jnp.zeros_like(x.vectors, wide), jnp.zeros_like(x.keys, wide)
    start = d_columns, sharding.vary_with(zeros, (scaling, x, y, d_sums))
    row_cotangents, column_cotangents = zip(sums, d_sums, strict=True)

    def pull_back_block(moving: Pytree, d_columns: Array, part: tuple[Side, Pytree]) -> tuple[Array, Pytree]:
        (y, column_cotangents), (rows, (row_cotangents, d_rows, d_bias)) = moving, part
        z, negative = _logits(scaling, rows, y)
        d_z = _d_logits(config, z, negative, row_cotangents, column_cotangents)
        d_columns += _product(d_z, rows.vectors, 0)
        return d_columns, (d_rows + _product(d_z, y.vectors, 1), d_bias + jnp.sum(d_z, 1))

    def visit(moving: Pytree, d_columns: Array, d_rows: Pytree) -> tuple[Pytree, Pytree]:
        return in_blocks(size, pull_back_block, x, moving, d_columns, (row_cotangents, *d_rows))

    d_columns, (d_rows, d_bias) = _go_round(config.devices, visit, (y, column_cotangents), start)
    d_scale = jnp.sum(x.vectors.astype(d_rows.dtype) * d_rows)
    d_bias = None if scaling.bias is None else jnp.sum(d_bias).astype(scaling.bias.dtype)
    d_scaling = Scaling(d_scale.astype(scaling.scale.dtype), d_bias)
    scale = scaling.scale.astype(d_rows.dtype)
    d_x, d_y = ((scale * d).astype(x.vectors.dtype) for d in (d_rows, d_columns))
    return d_scaling, Side(d_x, None, None), Side(d_y, None, None)  # type: ignore[arg-type]


def _reverse(config: NegativesConfig, residuals: Pytree, d_sums: PairSums) -> tuple[Scaling, Side, Side]:
    columns = residuals[2].keys.shape[0]
    return with_block_size(functools.partial(_cotangents, config), config.block_size, columns, *residuals, d_sums)


# The reductions of the logits of each row of `x` with its negatives in `y`, and of each row of `y`.
over_negatives = rule(_forward, _reverse, value_over_negatives)
