"""The arguments that all reductions share."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from masksafe._core.arguments import as_array, as_bool, canonical_axes
from masksafe._core.masks import as_mask_of, as_weights_of
from masksafe._core.sharding import AxisName, as_axis_name
from masksafe._core.typing import Array, ArrayLike, Axes, Axis


class Reduction(NamedTuple):
    """What is reduced, and what remains. It is static."""

    axes: Axes
    keepdims: bool
    axis_name: AxisName

    def shaped(self, reduced: Array) -> Array:
        """A result whose reduced axes have size 1, with or without them."""
        return reduced if self.keepdims else jnp.squeeze(reduced, self.axes)


def read_arguments(
    op: str, x: ArrayLike, axis: Axis | None, where: Any, weights: Any, axis_name: Any, keepdims: bool
) -> tuple[Reduction, Array, Array | None, Array | None]:
    """What is reduced, the array, and its mask and weights at its rank."""
    x = as_array(op, "x", x)
    how = Reduction(canonical_axes(op, axis, x.ndim), as_bool(op, "keepdims", keepdims), as_axis_name(op, axis_name))
    return how, x, as_mask_of(op, where, x.shape), as_weights_of(op, weights, x.shape)
