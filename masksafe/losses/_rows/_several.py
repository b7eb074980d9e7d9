r"""The log-probabilities of several labels of a row, which share its softmax.

With :math:`m` and :math:`s` of `_cross_entropy`, :math:`\log p_y = (x_y - m) / \tau - \log s` for each label. In
:math:`x_y / \tau` minus the logsumexp, a large logit would take the digits of a small result.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from masksafe._core import label_checks
from masksafe._core.labels import as_classes, is_class, nan_unless
from masksafe._core.masks import either, selected
from masksafe._core.typing import Array, Arrays, Axes, jitted
from masksafe.losses._labelled import Labelled, look_up
from masksafe.losses._rows._cross_entropy import CrossEntropy, Output
from masksafe.losses._rows._dense import RowLoss, outputs_of_rows

SUMS: tuple[Output, Output] = ("largest", "log_total")  # the outputs of a row that all its labels need


class AtLabels(NamedTuple):
    """What belongs to each of the labels `[..., L]`."""

    logits: Array  # 0 where the class does not count
    counts: Array  # whether the class is unmasked, in a row that is unmasked
    in_range: Array


def outputs_at(
    formula: CrossEntropy,
    axes: Axes,
    inputs: Labelled,
    at: AtLabels,
    unmasked: Array | None,
    temperature: Array | None = None,
) -> Arrays:
    """The log-probabilities `[..., L]`, and the outputs `[...]` of the formula that stand behind `SUMS`."""
    outputs = outputs_of_rows(RowLoss(formula, axes), inputs, temperature)
    return (log_probs_at(formula, at, unmasked, outputs[:2], temperature), *outputs[2:])


@jitted(0)
def log_probs_at(
    formula: CrossEntropy, at: AtLabels, unmasked: Array | None, sums: Arrays, temperature: Array | None = None
) -> Array:
    """The log-probabilities `[..., L]`, from the outputs `SUMS` of the rows `[...]`; 0 in masked rows."""
    formula, unmasked = formula.at(temperature), None if unmasked is None else unmasked[..., None]
    largest, log_total = lax.stop_gradient(sums[0])[..., None], sums[1][..., None]
    # A NaN is in the sums too, and -inf excludes a class. A soft cap would make a NaN of a cotangent of 0.
    is_number = at.counts & (at.logits > -jnp.inf)
    x = selected(formula.x(selected(at.logits, is_number)), is_number, -jnp.inf)
    # Computed in another way than the largest, it may exceed it by a rounding.
    excess = lax.stop_gradient(jnp.maximum(x - largest, 0))
    log_p = formula.log_prob(x - excess, largest, log_total)
    in_range = selected(at.in_range, unmasked, True)  # the reverse pass keeps the NaN of a slope
    return selected(nan_unless(in_range, log_p), unmasked)


def classes_of(labels: Array, number: int, unmasked: Array | None) -> tuple[Array, Array, Array]:
    """Labels `[..., L]` as classes in range; which are in range in an unmasked row `[...]`; and which are in range."""
    in_range = is_class(labels, number)
    counts = in_range if unmasked is None else in_range & unmasked[..., None]
    return jnp.where(counts, as_classes(labels, number), 0), counts, in_range


@jitted(0, 1)
def at_labels_of_rows(
    axes: Axes, is_checkified: bool, inputs: Labelled, labels: Array
) -> tuple[AtLabels, Array | None]:
    """Of logits that are an array; and which rows are unmasked `[...]`."""
    x, where, unmasked = inputs.rows_with_a_class(axes)
    classes, counts, in_range = classes_of(labels, x.shape[-1], unmasked)
    if where is not None:
        counts &= look_up(is_checkified, where, classes)
    return AtLabels(selected(look_up(is_checkified, x, classes), counts), counts, in_range), unmasked


def check(op: str, labels: Array, at: AtLabels, unmasked: Array | None, number: int, otherwise: str) -> Array | None:
    """If label checks are on, reports labels of unmasked rows that are out of range, or do not count.

    Labels are those of the user, `[..., L]`, or `[...]` if L is 1. Returns the bad ones `[..., L]`.
    """
    unmasked = jnp.broadcast_to(True if unmasked is None else unmasked[..., None], at.counts.shape)
    unmasked, in_range, counts = (x.reshape(labels.shape) for x in (unmasked, at.in_range, at.counts))
    find = functools.partial(label_checks.check_elements, op, labels, labels.shape)
    bad = either(
        find(unmasked, lambda _: in_range, f"outside [0, {number})"),
        find(unmasked & in_range, lambda _: counts, otherwise),
    )
    return None if bad is None else bad.reshape(at.counts.shape)
