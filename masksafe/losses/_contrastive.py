"""Contrastive losses of pairs of embeddings, whose negatives are the others of the batch."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from masksafe._core import arguments, masks, per_device, precision, sharding
from masksafe._core.public_op import public_op
from masksafe._core.typing import REDUCTIONS, Array, ArrayLike, LossReduction, Pytree, jitted
from masksafe._reductions import mean
from masksafe.losses._negatives import (
    NegativesConfig,
    RowReduction,
    Scaling,
    Side,
    over_negatives,
    value_over_negatives,
)
from masksafe.losses._rows import _arguments


class _Batch(NamedTuple):
    """Checked arguments."""

    x: Array  # [N, D]
    y: Array
    scale: Array
    bias: Array | None
    where: Array | None  # [N]
    ids: Array | None  # [N]


@public_op
def info_nce_loss(
    x: ArrayLike,
    y: ArrayLike,
    *,
    scale: ArrayLike = 1.0,
    where: ArrayLike | None = None,
    ids: ArrayLike | None = None,
    symmetric: bool = True,
    reduction: LossReduction = "mean",
    axis_name: sharding.AxisName = None,
    block_size: int | None = None,
) -> Array:
    r"""InfoNCE, the loss of CLIP: the cross-entropy of finding the partner of each row among all rows of the batch.

    .. math::
      \ell_i = \frac{r_i + c_i}{2}, \qquad
      r_i = -\log \frac{e^{z_{ii}}}{e^{z_{ii}} + \sum_{j \in N_i} e^{z_{ij}}}, \qquad
      c_i = -\log \frac{e^{z_{ii}}}{e^{z_{ii}} + \sum_{j \in N_i} e^{z_{ji}}}, \qquad
      z_{ij} = s \, x_i \cdot y_j

    where the negatives :math:`N_i` of a row are the other unmasked rows whose id differs from its own.

    The logits of all pairs are never in memory at once: they are computed in blocks of rows, and again for the
    gradient. With `axis_name` each device has its own rows, and those of the other side go round the devices in a ring.
    Embeddings are taken as they are; `masksafe.l2_normalize` gives them length 1.

    Args:
      x: embeddings, floats `[N, D]`.
      y: those of their partners, floats `[N, D]`; row i belongs to row i of `x`.
      scale: :math:`s`, a number or an array of one element, with a gradient: one divided by the temperature.
      where: booleans `[N]`; False masks a row of both sides, which is then neither a query nor a negative.
      ids: integers `[N]`; rows of equal ids, such as several captions of one image, are no negatives of each other.
      symmetric: whether both directions count. If False, :math:`\ell_i = r_i`: of each row of `x` among those of `y`.
      reduction: "mean" over the unmasked rows, "sum", or "none".
      axis_name: the mesh axis, or a tuple of them, over whose devices the rows are split, inside `jax.shard_map`. Ids
        are those of all devices.
      block_size: the most rows of a block; by default what suits the platform. On automatic axes of a mesh there
        is one block.

    Returns:
      A scalar, the same on all devices; or with "none" the losses `[N]`, of this device's rows. It has at least
      float32. The loss of a masked row, of one without negatives, and of no rows is 0. Masked rows have gradients of
      exactly 0.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> images = jnp.array([[1.0, 0.0], [0.6, 0.8], [jnp.nan, 0.0]])
      >>> texts = jnp.array([[1.0, 0.0], [0.0, 1.0], [0.7, 0.7]])
      >>> where = jnp.array([True, True, False])
      >>> loss = masksafe.losses.info_nce_loss(images, texts, scale=10.0, where=where)
      >>> print(f"{loss:.4f}")
      0.0364

    References:
      van den Oord et al., `"Representation Learning with Contrastive Predictive Coding"
      <https://arxiv.org/abs/1807.03748>`_, 2018.

      Radford et al., `"Learning Transferable Visual Models From Natural Language Supervision"
      <https://arxiv.org/abs/2103.00020>`_, 2021 (CLIP).
    """
    op = "info_nce_loss"
    batch = _read(op, x, y, _as_scalar(op, "scale", scale), None, where, ids)
    return _read_and_evaluate(
        op, batch, arguments.as_bool(op, "symmetric", symmetric), reduction, axis_name, block_size
    )


@public_op
def sigmoid_contrastive_loss(
    x: ArrayLike,
    y: ArrayLike,
    *,
    scale: ArrayLike = 1.0,
    bias: ArrayLike = 0.0,
    where: ArrayLike | None = None,
    ids: ArrayLike | None = None,
    reduction: LossReduction = "mean",
    axis_name: sharding.AxisName = None,
    block_size: int | None = None,
) -> Array:
    r"""The loss of SigLIP: each pair of rows by itself is one that belongs together, or not.

    .. math::
      \ell_i = -\log \sigma(z_{ii}) - \sum_{j \in N_i} \log \sigma(-z_{ij}), \qquad z_{ij} = s \, x_i \cdot y_j + b

    where the negatives :math:`N_i` of a row are the other unmasked rows whose id differs from its own.

    Memory, devices and the lengths of embeddings are as in `info_nce_loss`.

    Args:
      x: embeddings, floats `[N, D]`.
      y: those of their partners, floats `[N, D]`; row i belongs to row i of `x`.
      scale: :math:`s`, a number or an array of one element, with a gradient.
      bias: :math:`b`, the same. SigLIP starts from the scale 10 and the bias -10.
      where: booleans `[N]`; False masks a row of both sides, which is then in no pair.
      ids: integers `[N]`; different rows of equal ids are no pairs, neither negative nor positive.
      reduction: "mean", the sum over all pairs divided by the number of unmasked rows; "sum", or "none".
      axis_name: the mesh axis, or a tuple of them, over whose devices the rows are split, inside `jax.shard_map`. Ids
        are those of all devices.
      block_size: the most rows of a block; see `info_nce_loss`.

    Returns:
      A scalar, the same on all devices; or with "none" the losses `[N]`, of this device's rows. It has at least
      float32. The loss of a masked row, and of no rows, is 0. Masked rows have gradients of exactly 0.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> images = jnp.array([[1.0, 0.0], [0.6, 0.8], [jnp.nan, 0.0]])
      >>> texts = jnp.array([[1.0, 0.0], [0.0, 1.0], [0.7, 0.7]])
      >>> loss = masksafe.losses.sigmoid_contrastive_loss(
      ...     images, texts, scale=10.0, bias=-5.0, where=jnp.array([True, True, False]))
      >>> print(f"{loss:.4f}")
      0.6876

    References:
      Zhai et al., `"Sigmoid Loss for Language Image Pre-Training" <https://arxiv.org/abs/2303.15343>`_, 2023 (SigLIP).
    """
    op = "sigmoid_contrastive_loss"
    batch = _read(op, x, y, _as_scalar(op, "scale", scale), _as_scalar(op, "bias", bias), where, ids)
    return _read_and_evaluate(op, batch, False, reduction, axis_name, block_size)


def _read(op: str, x: object, y: object, scale: Array, bias: Array | None, where: object, ids: object) -> _Batch:
    x, y = arguments.as_float_array(op, "x", x), arguments.as_float_array(op, "y", y)
    if x.ndim != 2:
        raise ValueError(arguments.message(op, "x", f"shape {x.shape}", "[N, D]"))
    arguments.check_shape(op, "y", y.shape, x.shape, "that of x")
    if ids is not None:
        ids = _as_ids(op, ids)
        arguments.check_shape(op, "ids", ids.shape, x.shape[:1], "the rows of x")
    return _Batch(x, y, scale, bias, masks.read_mask(op, where, x.shape[:1], "the rows of x", "tokens"), ids)


def _as_scalar(op: str, argument: str, value: object) -> Array:
    return precision.widened(arguments.as_one_element(op, argument, arguments.as_real_array(op, argument, value)))


def _as_ids(op: str, ids: object) -> Array:
    """Ids, which are only compared for equality: NumPy ids too wide for JAX are replaced by indices."""
    if isinstance(ids, np.ndarray) and np.issubdtype(ids.dtype, np.integer) and ids.size:
        limits = np.iinfo(jax.dtypes.canonicalize_dtype(ids.dtype))
        if ids.min() < limits.min or ids.max() > limits.max:
            ids = np.unique(ids, return_inverse=True)[1].reshape(ids.shape)
    return arguments.as_index_array(op, "ids", ids)


def _read_and_evaluate(
    op: str, batch: _Batch, symmetric: bool, reduction: LossReduction, axis_name: object, block_size: object
) -> Array:
    arguments.as_choice(op, "reduction", reduction, REDUCTIONS)
    devices = sharding.Devices(sharding.as_axis_name(op, axis_name))
    row_reduction: RowReduction = "logsumexp" if batch.bias is None else "softplus"
    block_size = _arguments.read_block_size(op, block_size)
    return _loss(NegativesConfig(row_reduction, symmetric, block_size, devices), reduction, batch)


@jitted(0, 1)
def _loss(config: NegativesConfig, reduction: LossReduction, batch: _Batch) -> Array:
    vectors, number, row = PartitionSpec("rows", None), PartitionSpec(), PartitionSpec("rows")
    all_names = vectors, vectors, number, number, row, row
    names = tuple(None if x is None else name for x, name in zip(batch, all_names, strict=True))
    devices, on_device = config.devices, functools.partial(_row_losses, config)
    losses = per_device.along_devices(on_device, devices, tuple(batch), names, row, ("rows",))
    if reduction == "none":
        return losses
    if reduction == "mean":
        return mean(losses, where=batch.where, axis_name=devices.axis_name)
    return devices.sum(jnp.sum(losses))


def _row_losses(config: NegativesConfig, devices: sharding.Devices, *arrays: Pytree) -> Array:
    """The losses `[N]`, 0 where masked."""
    # Without `jax.shard_map`, as under checkify, explicit axes still split the arrays: each device gathers all rows.
    x, y, scale, bias, where, ids = jax.tree.map(lambda x: sharding.gathered_along(x, *range(x.ndim)), arrays)
    wide = jnp.promote_types(precision.wide_dtype(x.dtype), precision.wide_dtype(y.dtype))
    x, y = (x, y) if x.dtype == y.dtype else (x.astype(wide), y.astype(wide))
    scale, bias = jax.tree.map(lambda number: number.astype(wide), (scale, bias))
    number, column = x.shape[0], None if where is None else where[:, None]
    x, y = masks.selected(x, column), masks.selected(y, column)
    first = devices.first(number)
    keys = ids if ids is not None else jnp.arange(number, dtype=jnp.int32) + (0 if first is None else first)
    config = config._replace(devices=devices)
    evaluate = value_over_negatives if devices.are_samples else over_negatives
    sums = evaluate(config, Scaling(scale, bias), Side(x, keys, where), Side(y, keys, where))
    pair_logits = scale * jnp.sum(precision.widened(x) * precision.widened(y), 1)  # a row and its partner
    pair_logits = pair_logits if bias is None else pair_logits + bias
    pair_logits = masks.selected(pair_logits, where)  # a bad scale times 0 is NaN, which has a gradient of NaN
    if bias is not None:
        return masks.selected(jax.nn.softplus(-pair_logits) + sums.rows, where)
    # A softmax with an infinite logit is NaN.
    pair_logits = pair_logits + jnp.where(pair_logits == jnp.inf, jnp.nan, 0.0)
    losses = jax.nn.softplus(sums.rows - pair_logits)
    if sums.columns is not None:
        losses = (losses + jax.nn.softplus(sums.columns - pair_logits)) / 2
    return masks.selected(losses, where)
