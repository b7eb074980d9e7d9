r"""The cross-entropy of a row with its label, its mean over all classes, and the square of the logsumexp.

With the label :math:`y` and weights :math:`w_c` of the classes, which are 1 if there are none,

.. math::
  \lambda = \log \sum_c e^{x_c}, \qquad
  \ell_1 = \lambda - x_y, \qquad
  \ell_2 = \frac{1}{V} \sum_c w_c (\lambda - x_c), \qquad
  \ell_3 = \lambda^2

and with their cotangents

.. math::
  \dot x_c = \left( \dot \ell_1 + \frac{\sum_j w_j}{V} \dot \ell_2 + 2 \lambda \dot \ell_3 \right) e^{x_c - \lambda} -
  [c = y] \dot \ell_1 - \frac{w_c}{V} \dot \ell_2.

Two measures preserve digits. The largest :math:`x`, :math:`m`, is subtracted from all :math:`x` of the row, which
removes a common offset. The sum of exponentials excludes the label, which matters where the model is certain: with
:math:`s = \sum_{c \neq y} e^{x_c - m}` and :math:`\tau = x_y - m`, :math:`\ell_1 = \log(s + e^\tau) - \tau`.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from masksafe._core import sharding
from masksafe._core.labels import is_class, nan_unless
from masksafe._core.masks import selected
from masksafe._core.typing import Array
from masksafe.losses._linear._formula import Formula, Part, finite_shift, nan_if_bad


class Sums(NamedTuple):
    """Sums over the classes of each row `[..., 1]`."""

    largest: Array
    others: Array  # the sum of exp(x - largest) without the label
    label: Array  # x at the label, 0 if the label is not among the classes
    weight: Array  # the sum of the classes' weights
    total: Array  # the weighted sum of x - largest


class RowCotangents(NamedTuple):
    """What the cotangents of a row's logits have in common `[..., 1]`."""

    shift: Array
    of_exp: Array  # times exp(x - shift): the cotangent at classes other than the label
    of_weights: Array | None  # times the weight of the class: subtracted from it
    at_label: Array


@dataclasses.dataclass(frozen=True)
class CrossEntropy(Formula):
    """Which of the three a row has as its outputs, in this order."""

    of_label: bool = True
    of_all_classes: bool = False
    of_logsumexp: bool = False

    @property
    def number(self) -> int:
        return self.of_label + self.of_all_classes + self.of_logsumexp

    @property
    def of_labels(self) -> tuple[bool, ...]:
        return (True,) * (self.of_label + self.of_all_classes) + (False,) * self.of_logsumexp

    @property
    def nothing(self) -> Sums:
        return Sums(*map(jnp.asarray, (-jnp.inf, 0.0, 0.0, 0.0, 0.0)))

    def sums(self, part: Part) -> Sums:
        x, live = self.x(part.logits), part.live
        largest = lax.stop_gradient(jnp.max(selected(x, live, -jnp.inf), -1, keepdims=True))
        shift = finite_shift(largest)
        is_other = ~part.is_label if live is None else ~part.is_label & live
        others = jnp.sum(jnp.where(is_other, jnp.exp(x - shift), 0), -1, keepdims=True)
        label = jnp.sum(jnp.where(part.is_label, x, 0), -1, keepdims=True)
        if not self.of_all_classes:
            return Sums(largest, others, label, jnp.zeros_like(largest), jnp.zeros_like(largest))
        weights, terms = _weighted(jnp.ones_like(x), part.class_weights), _weighted(x - shift, part.class_weights)
        weight, total = (jnp.sum(selected(terms, live), -1, keepdims=True) for terms in (weights, terms))
        return Sums(largest, others, label, weight, total)

    def sums_of_each(self, part: Part) -> Sums:
        x = self.x(part.logits)
        zero = jnp.zeros_like(x)
        weight = _weighted(zero + 1, part.class_weights) if self.of_all_classes else zero
        total = _weighted(x - finite_shift(x), part.class_weights) if self.of_all_classes else zero
        return Sums(x, jnp.where(part.is_label, 0, zero + 1), jnp.where(part.is_label, x, 0), weight, total)

    def add(self, a: Sums, b: Sums) -> Sums:
        largest = jnp.maximum(a.largest, b.largest)
        a, b = _rebased(largest, a), _rebased(largest, b)
        return Sums(largest, *(of_a + of_b for of_a, of_b in zip(a[1:], b[1:], strict=True)))

    def add_devices(self, axis_name: Any, sums: Sums) -> Sums:
        if axis_name is None:
            return sums
        total = functools.partial(sharding.sum_over_devices, axis_name)
        largest = sharding.max_over_devices(axis_name, lax.stop_gradient(sums.largest))
        return Sums(largest, *map(total, _rebased(largest, sums)[1:]))

    def outputs(self, sums: Sums, labels: Array, classes: int) -> tuple[Array, ...]:
        label = sums.label - finite_shift(sums.largest)
        logsumexp = jnp.log1p(sums.others + jnp.expm1(label))  # relative to the largest
        has_label = is_class(labels, classes)
        valid = nan_unless(has_label, label.dtype)  # a product makes the derivatives NaN as well
        outputs = []
        if self.of_label:
            outputs += [(logsumexp - label) * valid]
        if self.of_all_classes:
            outputs += [(logsumexp * (sums.weight / classes) - sums.total / classes) * valid]
        if self.of_logsumexp:
            outputs += [jnp.square(_logsumexp(sums, has_label))]
        return tuple(outputs)

    def outputs_of_logits(self, axis_name: Any, part: Part, labels: Array, classes: int) -> tuple[Array, ...]:
        return self.outputs(self.add_devices(axis_name, self.sums(part)), labels, classes)

    def row_cotangents(self, sums: Sums, labels: Array, classes: int, d_outputs: tuple[Array, ...]) -> RowCotangents:
        d_rest = list(d_outputs)
        has_label = is_class(labels, classes)
        of_label = nan_if_bad(d_rest.pop(0), has_label) if self.of_label else 0
        of_weights = nan_if_bad(d_rest.pop(0), has_label) / classes if self.of_all_classes else None
        of_logsumexp = 0 if of_weights is None else of_weights * sums.weight
        if self.of_logsumexp:
            of_logsumexp += 2 * _logsumexp(sums, has_label) * d_rest.pop(0)
        shift = finite_shift(sums.largest)
        exp_label = _exp_label(sums, has_label)
        exp_total = sums.others + exp_label
        # The probability of the label minus 1 is computed as -others / total, not as a difference.
        at_label = of_logsumexp * exp_label / exp_total - of_label * (sums.others / exp_total)
        return RowCotangents(shift, (of_label + of_logsumexp) / exp_total, of_weights, at_label)

    def cotangents_of_x(self, x: Array, part: Part, rows: RowCotangents) -> Array:
        d_x = jnp.where(part.is_label, rows.at_label, jnp.exp(x - rows.shift) * rows.of_exp)
        return d_x if rows.of_weights is None else d_x - _weighted(rows.of_weights, part.class_weights)


def _rebased(largest: Array, sums: Sums) -> Sums:
    """The same sums relative to another largest logit."""
    step = finite_shift(sums.largest) - finite_shift(largest)
    others = jnp.where(sums.largest == -jnp.inf, 0, sums.others * jnp.exp(step))
    return sums._replace(largest=largest, others=others, total=sums.total + sums.weight * step)


def _logsumexp(sums: Sums, has_label: Array) -> Array:
    return finite_shift(sums.largest) + jnp.log(sums.others + _exp_label(sums, has_label))


def _exp_label(sums: Sums, has_label: Array) -> Array:
    """The term of the label in the sum of exponentials; 0 if the label is out of range."""
    return jnp.where(has_label, jnp.exp(sums.label - finite_shift(sums.largest)), 0)


def _weighted(x: Array, weights: Array | None) -> Array:
    """`x` times the weights of the classes; 0 for a weight of 0, even where `x` is infinite."""
    if weights is None:
        return x
    weights = jnp.expand_dims(weights, range(x.ndim - 1)).astype(x.dtype)
    return jnp.where(weights == 0, 0, x * weights)
