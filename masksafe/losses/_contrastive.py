"""Contrastive losses of pairs of embeddings, whose negatives are the others of the batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from masksafe._core import arguments, masks, own_shard_map, precision, sharding
from masksafe._core.public_op import public_op
from masksafe._core.typing import Array, ArrayLike, jitted
from masksafe._reductions import mean
from masksafe.losses._negatives import Config, Scaling, Side, over_negatives
from masksafe.losses._rows import _reading


class _Batch(NamedTuple):
    """Checked arguments."""

    x: Array  # [N, D]
    y: Array
    scale: Array
    bias: Array | None
    where: Array | None  # [N]
    ids: Array | None  # [N]


class _Static(NamedTuple):
    """It is static."""

    config: Config
    reduction: str


@public_op
def info_nce_loss(
    x: ArrayLike,
    y: ArrayLike,
    *,
    scale: ArrayLike = 1.0,
    where: ArrayLike | None = None,
    ids: ArrayLike | None = None,
    symmetric: bool = True,
    reduction: str = "mean",
    axis_name: sharding.AxisName = None,
    block_size: int | None = None,
) -> Array:
    op = "info_nce_loss"
    batch = _read(op, x, y, scale, None, where, ids)
    of_columns = arguments.as_bool(op, "symmetric", symmetric)
    return _loss(_read_static(op, "logsumexp", of_columns, reduction, axis_name, block_size), batch)


@public_op
def sigmoid_contrastive_loss(
    x: ArrayLike,
    y: ArrayLike,
    *,
    scale: ArrayLike = 1.0,
    bias: ArrayLike = 0.0,
    where: ArrayLike | None = None,
    ids: ArrayLike | None = None,
    reduction: str = "mean",
    axis_name: sharding.AxisName = None,
    block_size: int | None = None,
) -> Array:
    op = "sigmoid_contrastive_loss"
    batch = _read(op, x, y, scale, bias, where, ids)
    return _loss(_read_static(op, "softplus", False, reduction, axis_name, block_size), batch)


def _read(op: str, x: Any, y: Any, scale: Any, bias: Any, where: Any, ids: Any) -> _Batch:
    x, y = arguments.as_float_array(op, "x", x), arguments.as_float_array(op, "y", y)
    if x.ndim != 2:
        raise ValueError(arguments.message(op, "x", f"shape {x.shape}", "[N, D]"))
    if y.shape != x.shape:
        raise ValueError(arguments.message(op, "y", f"shape {y.shape}", f"{x.shape}, that of x"))
    if ids is not None:
        ids = arguments.as_index_array(op, "ids", ids)
        if ids.shape != x.shape[:1]:
            raise ValueError(arguments.message(op, "ids", f"shape {ids.shape}", f"{x.shape[:1]}, the rows of x"))
    where = masks.as_mask_of(op, where, x.shape[:1], "the rows of x")
    where = None if where is None else jnp.broadcast_to(where, x.shape[:1])
    return _Batch(
        x, y, _as_scalar(op, "scale", scale), None if bias is None else _as_scalar(op, "bias", bias), where, ids
    )


def _as_scalar(op: str, argument: str, value: Any) -> Array:
    array = arguments.as_real_array(op, argument, value)
    if array.ndim:
        raise ValueError(arguments.message(op, argument, f"shape {array.shape}", "a number or a scalar"))
    return precision.widened(array)


def _read_static(op: str, of_rows: Any, of_columns: bool, reduction: Any, axis_name: Any, block_size: Any) -> _Static:
    _reading.read_choice(op, "reduction", reduction, _reading.REDUCTIONS)
    devices = sharding.Devices(sharding.as_axis_name(op, axis_name))
    return _Static(Config(of_rows, of_columns, _reading.read_block_size(op, block_size), devices), reduction)


@jitted(0)
def _loss(static: _Static, batch: _Batch) -> Array:
    def on_each(devices: sharding.Devices, *arrays: Any) -> Array:
        return _of_rows(static.config._replace(devices=devices), _Batch(*arrays))

    names = PartitionSpec("rows", None)
    row = PartitionSpec("rows")
    of_bias, of_where, of_ids = (
        None if array is None else spec
        for array, spec in ((batch.bias, PartitionSpec()), (batch.where, row), (batch.ids, row))
    )
    names_of_batch = names, names, PartitionSpec(), of_bias, of_where, of_ids
    devices = static.config.devices
    losses = own_shard_map.along_devices(on_each, devices, tuple(batch), names_of_batch, row, ("rows",))
    if static.reduction == "none":
        return losses
    if static.reduction == "mean":
        return mean(losses, where=batch.where, axis_name=devices.axis_name)
    return devices.sum(jnp.sum(losses))


def _of_rows(config: Config, batch: _Batch) -> Array:
    """The losses `[N]`, 0 where masked."""
    x, y, scale, bias, where, ids = batch
    number, of_vectors = x.shape[0], None if where is None else where[:, None]
    x, y = masks.selected(x, of_vectors), masks.selected(y, of_vectors)
    first = config.devices.first(number)
    keys = ids if ids is not None else jnp.arange(number) + (0 if first is None else first)
    sums = over_negatives(config, Scaling(scale, bias), Side(x, keys, where), Side(y, keys, where))
    of_pair = scale * jnp.sum(precision.widened(x) * precision.widened(y), 1)
    if config.reduction == "softplus":
        assert bias is not None
        return masks.selected(jax.nn.softplus(-(of_pair + bias)) + sums.rows, where)
    losses = jax.nn.softplus(sums.rows - of_pair)
    if sums.columns is not None:
        losses = (losses + jax.nn.softplus(sums.columns - of_pair)) / 2
    return masks.selected(losses, where)
