"""The softmax over a kept set of classes of each row, which are given by their numbers.

A row over V classes becomes one over the K + 1 places of its set, and the losses of rows do the rest: what is not kept
is masked. The places are in the order of their classes, so that neither the order of the numbers nor their repetition
changes a bit.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from masksafe._core import arguments, label_checks, run_time, sharding
from masksafe._core.labels import as_classes, class_index, is_class
from masksafe._core.masks import both, either, selected
from masksafe._core.typing import Array, ArrayLike, Arrays, Axes, jitted
from masksafe.losses._labelled import Labelled, look_up
from masksafe.losses._rows import _several
from masksafe.losses._rows._cross_entropy import CrossEntropy
from masksafe.losses._rows._several import AtLabels


class Kept(NamedTuple):
    """The kept set of each row. The first place has no class: it stands for a label that is not kept."""

    classes: Array  # in [0, V), of each place `[..., K + 1]`; any where no class is kept
    is_kept: Array  # whether a place has a class that counts, `[..., K + 1]`
    labels: Array  # the place of each label `[..., L]`, -1 for a label out of range
    bad_rows: Array  # unmasked rows with an id out of range `[...]`

    @property
    def rows(self) -> Array:
        """The rows that keep a class `[...]`."""
        return run_time.any_of(self.is_kept, -1)

    def at_labels(self, is_checkified: bool, logits: Array) -> AtLabels:
        """What belongs to the labels, from the logits of each place."""
        at_labels = look_up(is_checkified, logits, jnp.maximum(self.labels, 0))
        return AtLabels(selected(at_labels, self.labels > 0), self.labels > 0, self.labels >= 0)


def read_kept_ids(op: str, kept_ids: ArrayLike, rows: tuple[int, ...], of: str) -> Array:
    """Integers `[..., K]`, in which -1 is no class, for rows of this shape, those of the argument `of`."""
    ids = arguments.as_index_array(op, "kept_ids", kept_ids)
    shape = (*rows, ids.shape[-1] if ids.ndim else 0)
    if ids.ndim != len(shape):
        expected = f"rank {len(shape)}, the rows {rows} of {of} and one axis more, of the classes that each keeps"
        raise ValueError(arguments.message(op, "kept_ids", f"shape {ids.shape}", expected))
    arguments.check_broadcasts_to(op, "kept_ids", ids.shape, shape, f"the rows of {of} and the ids of each")
    return jnp.broadcast_to(ids, shape)


def kept_of(
    ids: Array, labels: Array, number: int, unmasked: Array | None, unmasked_at: Callable[[Array], Array | None]
) -> Kept:
    """The sets of rows with labels `[..., L]` among this number of classes.

    `unmasked` are the unmasked rows `[...]`, and `unmasked_at` tells which classes `[..., K + 1]` of them are unmasked.
    """
    bad_rows = run_time.any_of((ids < -1) | (ids >= number), -1)
    # An id out of range keeps a class: without one the row would have no gradient, whereas it is NaN.
    ids = jnp.where(ids == -1, ids, jnp.clip(ids, 0, number - 1)).astype(jnp.int32)
    in_front = [(0, 0)] * (ids.ndim - 1) + [(1, 0)]
    ids = jnp.sort(jnp.pad(sharding.gathered_along(ids, -1), in_front, constant_values=-1), -1)
    is_repeated = jnp.pad(ids[..., 1:] == ids[..., :-1], in_front)
    classes, is_kept = jnp.maximum(ids, 0), ~is_repeated & (ids >= 0)
    is_kept = selected(is_kept, both(unmasked_at(classes), None if unmasked is None else unmasked[..., None]))
    is_at_label = is_kept[..., None, :] & (ids[..., None, :] == as_classes(labels, number)[..., None])
    places = jnp.sum(jnp.where(is_at_label, class_index(is_at_label.shape), 0), -1)
    places = jnp.where(is_class(labels, number), places, -1)
    return Kept(classes, is_kept, places, bad_rows if unmasked is None else bad_rows & unmasked)


def check(
    op: str, ids: Array, labels: Array, kept: Kept, at: AtLabels, number: int, unmasked: Array | None
) -> Array | None:
    """If label checks are on, reports ids of unmasked rows that are out of range, and labels that are not kept.

    Returns the bad labels `[..., L]`: all of them in a row with a bad id.
    """
    in_rows = None if unmasked is None else unmasked[..., None]
    is_valid = lambda ids: (ids == -1) | is_class(ids, number)  # noqa: E731
    bad_ids = label_checks.check_elements(
        op, ids, ids.shape, in_rows, is_valid, f"outside [0, {number}) and not -1", "kept_ids"
    )
    bad_ids = None if bad_ids is None else run_time.any_of(bad_ids, -1, keepdims=True)
    return either(bad_ids, _several.check(op, labels, at, kept.rows, number, "masked or not among kept_ids"))


def outputs_of_kept(
    formula: CrossEntropy, at: AtLabels, logits: Array, kept: Kept, temperature: Array | None = None
) -> Arrays:
    """The outputs as of `_several.outputs_at`, from the logits of each place; NaN in bad rows."""
    inputs = Labelled(logits, jnp.zeros(logits.shape[:-1], jnp.int32), kept.is_kept)
    log_p, *others = _several.outputs_at(formula, (logits.ndim - 1,), inputs, at, kept.rows, temperature)
    log_p = label_checks.nan_where_bad(log_p, kept.bad_rows[..., None])
    return (log_p, *(label_checks.nan_where_bad(x, kept.bad_rows) for x in others))


@jitted(0)
def prediction(formula: CrossEntropy, logits: Array, kept: Kept) -> Array:
    """The kept class with the largest logit, the lowest of several; -1 where there is none, or a NaN."""
    x = formula.x(lax.stop_gradient(logits), kept.is_kept)
    is_best = (x >= jnp.max(x, -1, keepdims=True)) & (x > -jnp.inf) & ~kept.bad_rows[..., None]
    most = jnp.iinfo(jnp.int32).max
    best = jnp.min(jnp.where(is_best, kept.classes, most), -1)
    return jnp.where(best == most, -1, best)


@jitted(0, 1)
def kept_of_rows(
    axes: Axes, is_checkified: bool, inputs: Labelled, labels: Array, ids: Array
) -> tuple[Array, Kept, Array | None]:
    """Of logits that are an array: those of each place, 0 where not kept; the sets; and the unmasked rows `[...]`."""
    x, where, unmasked = inputs.rows_with_a_class(axes)

    unmasked_at = lambda classes: None if where is None else look_up(is_checkified, where, classes)  # noqa: E731
    kept = kept_of(ids, labels, x.shape[-1], unmasked, unmasked_at)
    return selected(look_up(is_checkified, x, kept.classes), kept.is_kept), kept, unmasked
