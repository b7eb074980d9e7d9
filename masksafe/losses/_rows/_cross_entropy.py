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
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core import sharding
from masksafe._core.labels import is_class, nan_unless
from masksafe._core.masks import selected
from masksafe._core.typing import Array
from masksafe.losses._rows._formula import LabelFormula, Part, largest_logit, nan_if_bad


class Sums(NamedTuple):
    """Sums over the classes of each row `[..., 1]`; the last two only for the mean over all classes."""

    largest: Array  # at least the lowest finite number
    others: Array  # the sum of exp(x - largest) without the label
    label: Array  # x at the label, 0 if the label is not among the classes
    weight: Any = None  # the sum of the classes' weights
    total: Any = None  # the weighted sum of x - largest


class RowCotangents(NamedTuple):
    """What the cotangents of a row's logits have in common `[..., 1]`."""

    shift: Array
    of_exp: Array  # times exp(x - shift): the cotangent at classes other than the label
    of_weights: Array | None  # times the weight of the class: subtracted from it
    at_label: Array


@dataclasses.dataclass(frozen=True)
class CrossEntropy(LabelFormula):
    """Which of the three a row has as its outputs, in this order."""

    of_label: bool = True
    of_all_classes: bool = False
    of_logsumexp: bool = False

    @property
    def of_labels(self) -> tuple[bool, ...]:
        return (True,) * (self.of_label + self.of_all_classes) + (False,) * self.of_logsumexp

    def nothing(self, zero: Array) -> Sums:
        sums = Sums(jnp.full_like(zero, jnp.finfo(zero.dtype).min), zero, zero)
        return sums._replace(weight=zero, total=zero) if self.of_all_classes else sums

    def sums(self, part: Part) -> Sums:
        x, live = self.x(part.logits), part.live
        largest = largest_logit(x, live)
        is_other = ~part.is_label if live is None else ~part.is_label & live
        others = jnp.sum(jnp.where(is_other, jnp.exp(x - largest), 0.0), -1, keepdims=True)
        label = jnp.sum(jnp.where(part.is_label, x, 0.0), -1, keepdims=True)
        if not self.of_all_classes:
            return Sums(largest, others, label)
        weights, terms = _weighted(jnp.ones_like(x), part.class_weights), _weighted(x - largest, part.class_weights)
        weight, total = (jnp.sum(selected(terms, live), -1, keepdims=True) for terms in (weights, terms))
        return Sums(largest, others, label, weight, total)

    def sums_of_each(self, part: Part) -> Sums:
        x = self.x(part.logits)
        largest = jnp.maximum(x, float(jnp.finfo(x.dtype).min))
        one = jnp.ones_like(x)
        sums = Sums(largest, jnp.where(part.is_label | (x < largest), 0.0, one), jnp.where(part.is_label, x, 0.0))
        if not self.of_all_classes:
            return sums
        weight, total = (_weighted(terms, part.class_weights) for terms in (one, x - largest))
        return sums._replace(weight=weight, total=total)

    def add(self, a: Sums, b: Sums) -> Sums:
        largest = jnp.maximum(a.largest, b.largest)
        total: Sums = jax.tree.map(jnp.add, _rebased(largest, a), _rebased(largest, b))
        return total._replace(largest=largest)

    def add_devices(self, axis_name: Any, sums: Sums) -> Sums:
        if axis_name is None:
            return sums
        largest = sharding.Devices(axis_name).max(lax.stop_gradient(sums.largest))
        total: Sums = jax.tree.map(sharding.Devices(axis_name).sum, _rebased(largest, sums))
        return total._replace(largest=largest)

    def outputs(self, sums: Sums, data: Array, classes: int) -> tuple[Array, ...]:
        label = sums.label - sums.largest
        logsumexp = jnp.log1p(sums.others + jnp.expm1(label))  # relative to the largest
        has_label = is_class(data, classes)
        valid = nan_unless(has_label, label.dtype)  # a product makes the derivatives NaN as well
        outputs = []
        if self.of_label:
            outputs += [(logsumexp - label) * valid]
        if self.of_all_classes:
            outputs += [(logsumexp * (sums.weight / classes) - sums.total / classes) * valid]
        if self.of_logsumexp:
            outputs += [jnp.square(_logsumexp(sums, has_label))]
        return tuple(outputs)

    def row_cotangents(self, sums: Sums, labels: Array, classes: int, d_outputs: tuple[Array, ...]) -> RowCotangents:
        d_rest = list(d_outputs)
        has_label = is_class(labels, classes)
        of_label = nan_if_bad(d_rest.pop(0), has_label) if self.of_label else None
        of_weights = nan_if_bad(d_rest.pop(0), has_label) / classes if self.of_all_classes else None
        of_logsumexp = None if of_weights is None else of_weights * sums.weight
        if self.of_logsumexp:
            of_logsumexp = _sum(of_logsumexp, 2 * _logsumexp(sums, has_label) * d_rest.pop(0))
        exp_label = _exp_label(sums, has_label)
        exp_total = sums.others + exp_label
        # The probability of the label minus 1 is computed as -others / total, not as a difference.
        of_total = None if of_logsumexp is None else of_logsumexp * exp_label
        at_label = _sum(of_total, None if of_label is None else -of_label * sums.others) / exp_total
        return RowCotangents(sums.largest, _sum(of_label, of_logsumexp) / exp_total, of_weights, at_label)

    def cotangents_of_x(self, x: Array, part: Part, rows: RowCotangents) -> Array:
        d_x: Array = jnp.where(part.is_label, rows.at_label, jnp.exp(x - rows.shift) * rows.of_exp)
        return d_x if rows.of_weights is None else d_x - _weighted(rows.of_weights, part.class_weights)


def _sum(a: Array | None, b: Array | None) -> Array:
    """The sum of what is given."""
    return cast(Array, b if a is None else a if b is None else a + b)


def _rebased(largest: Array, sums: Sums) -> Sums:
    """The same sums relative to another largest logit, but for that itself."""
    step = sums.largest - largest
    moved = Sums(None, sums.others * jnp.exp(step), sums.label)  # type: ignore[arg-type]
    if sums.weight is None:
        return moved
    step = jnp.maximum(step, float(jnp.finfo(step.dtype).min))  # it may overflow where the weight is 0
    return moved._replace(weight=sums.weight, total=sums.total + sums.weight * step)


def _logsumexp(sums: Sums, has_label: Array) -> Array:
    return sums.largest + jnp.log(sums.others + _exp_label(sums, has_label))


def _exp_label(sums: Sums, has_label: Array) -> Array:
    """The term of the label in the sum of exponentials; 0 if the label is out of range."""
    return jnp.where(has_label, jnp.exp(sums.label - sums.largest), 0.0)


def _weighted(x: Array, weights: Array | None) -> Array:
    """`x` times the weights of the classes; 0 for a weight of 0, even where `x` is infinite."""
    if weights is None:
        return x
    weights = jnp.expand_dims(weights, range(x.ndim - 1)).astype(x.dtype)
    return jnp.where(weights == 0, 0.0, x * weights)
