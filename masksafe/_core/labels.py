"""Labels are classes in [0, num_classes). A label out of range never wraps to another class; its results are NaN."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core import sharding
from masksafe._core.linear import times
from masksafe._core.typing import Array, Arrays, Axes


def is_soft(labels: Array) -> bool:
    """Whether the labels are distributions over the classes rather than class numbers."""
    return bool(jnp.issubdtype(labels.dtype, jnp.floating))


def is_class(labels: Array, num_classes: int) -> Array:
    """Whether each label is in [0, num_classes)."""
    return (labels >= 0) & (labels < num_classes)


def as_classes(labels: Array, num_classes: int) -> Array:
    """Labels as int32; out-of-range labels stay out of range."""
    if labels.dtype.itemsize > 4:
        labels = jnp.where(is_class(labels, num_classes), labels, -1)
    return labels.astype(jnp.int32)


@jax.custom_jvp
def nan_unless(valid: Array, x: Array) -> Array:
    """`x` where valid and NaN elsewhere, in derivatives as well, unless the user has replaced the NaN."""
    return jnp.where(valid, x, jnp.nan)


@nan_unless.defjvp
def _(primals: Arrays, tangents: Arrays) -> tuple[Array, Array]:
    valid, x = primals
    slope = nan_unless(valid, sharding.broadcast_like(jnp.ones((), x.dtype), x))
    return nan_unless(valid, x), times(slope, tangents[1])


def class_index(shape: tuple[int, ...], axes: Axes | None = None) -> Array:
    """The class number of each element of an array of `shape`, whose classes lie on `axes`, by default the last."""
    axes = (len(shape) - 1,) if axes is None else axes
    along = {axis: lax.broadcasted_iota(jnp.int32, shape, axis) for axis in axes}
    return functools.reduce(lambda index, axis: index * shape[axis] + along[axis], axes[1:], along[axes[0]])


def at_label(labels: Array, num_classes: int) -> Array:
    """`[..., num_classes]`, True at the label of each row; all False in a row whose label is out of range."""
    return class_index((*labels.shape, num_classes)).astype(labels.dtype) == labels[..., None]


def at_labels(
    values: Array, labels: Array, axis_name: sharding.AxisName, look_up: Callable[[Array, Array], Array] | None = None
) -> Array:
    """The number of the class of each label, from those `[..., V]` of this device's classes; 0 out of range.

    `look_up(values, index)` finds the numbers of rows; by default all rows share the values `[V]`.
    """
    devices, number = sharding.Devices(axis_name), values.shape[-1]
    here = devices.local(labels, number)
    is_here = is_class(here, number)
    found = (look_up or _shared_at)(values, jnp.where(is_here, here, 0))
    return devices.sum(jnp.where(is_here, found, 0))


def _shared_at(values: Array, index: Array) -> Array:
    out_sharding = jax.typeof(index).sharding if sharding.is_sharded(index) else None
    at_index = sharding.gathered_along(values, 0).at[index]
    return at_index.get(mode="promise_in_bounds", out_sharding=out_sharding)
