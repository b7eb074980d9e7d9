"""Labels are classes in [0, num_classes). A label out of range never wraps to another class; its results are NaN."""

import functools

import jax.numpy as jnp
from jax import lax

from masksafe._core.typing import Array, Axes, DType


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


def nan_unless(valid: Array, dtype: DType) -> Array:
    """1 where valid and NaN elsewhere: a factor, which makes the derivatives NaN as well."""
    return jnp.where(valid, 1, jnp.nan).astype(dtype)


def class_index(shape: tuple[int, ...], axes: Axes | None = None) -> Array:
    """The class number of each element of an array of `shape`, whose classes lie on `axes`, by default the last."""
    axes = (len(shape) - 1,) if axes is None else axes
    along = {axis: lax.broadcasted_iota(jnp.int32, shape, axis) for axis in axes}
    return functools.reduce(lambda index, axis: index * shape[axis] + along[axis], axes[1:], along[axes[0]])


def at_label(labels: Array, num_classes: int) -> Array:
    """`[..., num_classes]`, True at the label of each row; all False in a row whose label is out of range."""
    return class_index((*labels.shape, num_classes)).astype(labels.dtype) == labels[..., None]
