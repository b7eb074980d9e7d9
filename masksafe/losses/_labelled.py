"""Logits and their labels, in the user's layout."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from masksafe._core import arguments, run_time, sharding, switches
from masksafe._core.labels import at_label, class_index, is_soft
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

    def rows_with_a_class(self, axes: Axes) -> tuple[Array, Array | None, Array | None]:
        """Logits, of no class one that is masked; a mask of classes at their shape, and the unmasked rows `[...]`."""
        x, _, where = self.rows(axes)
        rows = x.shape[:-1]
        if x.shape[-1] == 0:
            return jnp.zeros((*rows, 1), x.dtype), None, jnp.zeros(rows, bool)
        if where is None:
            return x, None, None
        of_classes = None if masks_rows(where, (-1,)) else jnp.broadcast_to(where, x.shape)
        return x, of_classes, jnp.broadcast_to(run_time.any_of(where, -1), rows)


def read_integer_labels(
    op: str,
    logits: ArrayLike,
    labels: ArrayLike,
    axis: Axis,
    where: ArrayLike | None,
    hint_for_distributions: str = "",
    may_be_several: bool = False,
) -> tuple[Labelled, Axes]:
    """Logits and labels that have been broadcast, and the axes of the classes; maybe several labels of a row."""
    logits, labels = arguments.as_float_array(op, "logits", logits), arguments.as_label_array(op, "labels", labels)
    if axis is None:
        raise TypeError(arguments.message(op, "axis", "type NoneType", "an int or a tuple of ints"))
    axes = arguments.canonical_axes(op, axis, logits.ndim)
    rank = logits.ndim - len(axes)
    is_several = may_be_several and labels.ndim == rank + 1
    if labels.ndim != rank and not is_several:
        expected = f"rank {rank}, that of logits {logits.shape} without axis {axis}"
        hint = hint_for_distributions if labels.ndim == logits.ndim else ""
        raise ValueError(arguments.message(op, "labels", f"shape {labels.shape}", expected, hint))
    rows = _layout.common_rows(op, labels.shape[:rank], axes, "logits", logits)
    shape = _layout.shape_with_classes(axes, rows, logits.shape)
    where = read_mask(op, where, shape, "logits and labels together", "classes or rows", axes, logits.ndim)
    logits, labels = _layout.broadcast_widened(logits, shape), jnp.broadcast_to(labels, rows + labels.shape[rank:])
    return Labelled(logits, labels, where), axes


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


def look_up(is_checkified: bool, x: Array, classes: Array) -> Array:
    """The elements `[..., k]` of rows `[..., V]` at classes in range."""
    classes = sharding.on_mesh_of(x, classes)
    is_explicit = sharding.is_sharded(x) or sharding.is_sharded(classes)
    if not (is_explicit or is_checkified):
        return jnp.take_along_axis(x, classes, -1, mode="promise_in_bounds")
    # With an index for every axis: the above takes no sharding, and checkify fails at its derivative (jax 0.12). Not
    # otherwise: on an automatic mesh XLA would gather the rows.
    rows = [class_index(classes.shape, (axis,)) for axis in range(x.ndim - 1)]
    at_classes = x.at[(*rows, classes)]
    out_sharding = jax.typeof(classes).sharding if is_explicit else None
    return at_classes.get(mode="promise_in_bounds", wrap_negative_indices=False, out_sharding=out_sharding)
