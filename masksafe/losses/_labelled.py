"""Logits and their labels, in the user's layout."""

import functools
from typing import NamedTuple

import jax.numpy as jnp

from masksafe._core import arguments, label_checks, sharding, switches
from masksafe._core.labels import at_label, is_soft
from masksafe._core.masks import masks_rows, read_mask, selected
from masksafe._core.typing import Array, ArrayLike, Axes, Axis, Pytree
from masksafe.losses import _layout


class Labelled(NamedTuple):
    """Logits, and of each row the label or the distribution; or the cotangents of both."""

    logits: Array
    labels: Pytree  # an array; None where it has no cotangent or is no longer needed
    where: Array | None  # at the rank of the logits
    class_weights: Array | None = None  # one for each class of this device, if a formula needs them

    def rows(self, axes: Axes) -> tuple[Array, Array, Array | None]:
        """Logits `[..., classes]`, labels `[..., classes]` or `[..., 1]`, where `[... or 1, classes or 1]`."""
        logits, labels, where, _ = self
        last = functools.partial(_layout.move_classes_last, axes)
        if where is not None and not masks_rows(where, axes):
            rows = _layout.shape_without(axes, where.shape)
            where = jnp.broadcast_to(where, _layout.shape_with_classes(axes, rows, logits.shape))
        where = None if where is None else last(where)
        return last(logits), last(labels) if is_soft(labels) else labels[..., None], where


def read_integer_labels(
    op: str,
    logits: ArrayLike,
    labels: ArrayLike,
    axis: Axis,
    where: ArrayLike | None,
    axis_name: str | None = None,
    hint_for_distributions: str = "",
) -> tuple[Labelled, Axes, Array | None]:
    """Logits and labels that have been checked and broadcast, the axes of the classes, and the bad rows."""
    logits, labels = arguments.as_float_array(op, "logits", logits), arguments.as_label_array(op, "labels", labels)
    if axis is None:
        raise TypeError(arguments.message(op, "axis", "type NoneType", "an int or a tuple of ints"))
    axes = arguments.canonical_axes(op, axis, logits.ndim)
    if labels.ndim != logits.ndim - len(axes):
        expected = f"rank {logits.ndim - len(axes)}, that of logits {logits.shape} without axis {axis}"
        hint = hint_for_distributions if labels.ndim == logits.ndim else ""
        raise ValueError(arguments.message(op, "labels", f"shape {labels.shape}", expected, hint))
    rows = _layout.common_rows(op, labels, axes, "logits", logits)
    shape = _layout.shape_with_classes(axes, rows, logits.shape)
    where = read_mask(op, where, shape, "logits and labels together", "classes or rows", axes, logits.ndim)
    labels = _layout.broadcast_widened(labels, rows)
    bad_rows = label_checks.check_integer_labels(op, labels, where, axes, shape, axis_name)
    return Labelled(_layout.broadcast_widened(logits, shape), labels, where), axes, bad_rows


def element_at(x: Array, where: Array | None, label: Array) -> Array:
    """x[..., label] for labels `[..., 1]`: -inf at a masked class, and the element of any class out of range."""
    index = jnp.maximum(jnp.minimum(label, x.shape[-1] - 1), 0).astype(jnp.int32)
    if switches.uses_plain_rules():  # then `elements_at` sums over all classes
        x = selected(x, where)
    # The mask is looked up as well: a look-up in a masked `x` would need a copy of all of `x`.
    unmasked = where if where is None or where.shape[-1] == 1 else elements_at(where, index)
    return selected(elements_at(x, index), unmasked, -jnp.inf)


def elements_at(x: Array, index: Array) -> Array:
    """The elements `[..., k]` of rows `[..., V]` at indices in range."""
    # JAX refuses to index arrays that are split, and checkify fails at the derivative of a look-up.
    if x.shape[-1] == 0 or sharding.is_sharded(x) or sharding.is_sharded(index) or switches.uses_plain_rules():
        picked = jnp.where(at_label(index, x.shape[-1]), x[..., None, :], jnp.zeros((), x.dtype))
        return jnp.any(picked, -1) if x.dtype == bool else jnp.sum(picked, -1)
    return jnp.take_along_axis(x, index, -1, mode="promise_in_bounds")
