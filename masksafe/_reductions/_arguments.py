"""The arguments that all reductions share."""

from typing import NamedTuple

import jax.numpy as jnp

from masksafe._core import masks, sharding
from masksafe._core.arguments import as_array, as_bool, canonical_axes, if_given
from masksafe._core.masks import Weighting
from masksafe._core.moments import Rows
from masksafe._core.row_blocks import axes_of_row
from masksafe._core.typing import Array, Axis


class Reduction(NamedTuple):
    """The static arguments of a reduction; only those that might not be hashable are checked already."""

    op: str
    axis: Axis | None
    devices: sharding.Devices
    keepdims: bool

    def read(self, x: Array, where: Array | None, weights: Array | None) -> tuple[Rows, Array, Weighting]:
        """The rows, their elements in the dtype of the result, and which of them take part, and how much."""
        rows = Rows(axes_of_row(canonical_axes(self.op, self.axis, x.ndim), x.ndim), self.devices)
        return rows, *masks.read_weighting(self.op, masks.promoted_with(x, weights), where, weights)

    def shaped(self, rows: Rows, reduced: Array) -> Array:
        """A result whose reduced axes have size 1, with or without them."""
        return reduced if self.keepdims else jnp.squeeze(reduced, rows.axes)


def prepared(
    op: str, x: object, axis: Axis | None, where: object, weights: object, axis_name: object, keepdims: object
) -> tuple[Reduction, Array, Array | None, Array | None]:
    """Arguments for a jitted function that reads them when it is traced: eagerly, checks cost more than a short sum."""
    x = as_array(op, "x", x)
    arrays = if_given(as_array, op, "where", where), if_given(as_array, op, "weights", weights)
    axis = axis if axis is None or type(axis) is int else canonical_axes(op, axis, x.ndim)
    devices = sharding.Devices(sharding.as_axis_name(op, axis_name))
    return Reduction(op, axis, devices, as_bool(op, "keepdims", keepdims)), x, *arrays
