"""The arguments that all reductions share."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from masksafe._core import masks, sharding
from masksafe._core.arguments import as_array, as_bool, canonical_axes
from masksafe._core.typing import Array, Axes, Axis


class Reduction(NamedTuple):
    """What is reduced, and what remains. It is static."""

    op: str
    axes: Axes
    keepdims: bool
    devices: sharding.Devices

    def shaped(self, reduced: Array) -> Array:
        """A result whose reduced axes have size 1, with or without them."""
        return reduced if self.keepdims else jnp.squeeze(reduced, self.axes)


class Call(NamedTuple):
    """The arguments of a reduction that are static, not yet checked but for what could not be hashed."""

    op: str
    axis: Axis | None
    devices: sharding.Devices
    keepdims: bool

    def read(self, x: Array, where: Any, weights: Any) -> tuple[Reduction, Array, Array | None, Array | None]:
        """What is reduced: how, the elements in the dtype of the result, and their mask and weights at their rank."""
        how = Reduction(self.op, canonical_axes(self.op, self.axis, x.ndim), self.keepdims, self.devices)
        where, weights = masks.as_mask_of(self.op, where, x.shape), masks.as_weights_of(self.op, weights, x.shape)
        return how, masks.promoted_with(x, weights), where, weights


def prepared(
    op: str, x: Any, axis: Any, where: Any, weights: Any, axis_name: Any, keepdims: Any
) -> tuple[Call, Array, Array | None, Array | None]:
    """Arguments for a jitted function that reads them when it is traced: eagerly, checks cost more than a short sum."""
    x = as_array(op, "x", x)
    where = None if where is None else as_array(op, "where", where)
    weights = None if weights is None else as_array(op, "weights", weights)
    axis = axis if axis is None or type(axis) is int else canonical_axes(op, axis, x.ndim)
    devices = sharding.Devices(sharding.as_axis_name(op, axis_name))
    return Call(op, axis, devices, as_bool(op, "keepdims", keepdims)), x, where, weights
