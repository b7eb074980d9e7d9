r"""The log-probability of a row's label, and the entropy of the row.

With the largest :math:`x`, :math:`m`, at one class :math:`c^*`,

.. math::
  s = \sum_{c \neq c^*} e^{x_c - m}, \qquad u = \sum_c e^{x_c - m} (m - x_c), \qquad
  \log p_y = -(m - x_y) - \log(1 + s), \qquad H = \log(1 + s) + \frac{u}{1 + s}

and with their cotangents

.. math::
  \dot x_c = \dot{(\log p_y)} \, ([c = y] - p_c) + \dot H \, p_c \left( m - x_c - \frac{u}{1 + s} \right), \qquad
  p_c = \frac{e^{x_c - m}}{1 + s}.

Within each of the two outputs all terms have one sign: nothing cancels, however certain the row.
"""

import dataclasses
import functools
from typing import Any, NamedTuple, cast

import jax.numpy as jnp
from jax import lax

from masksafe._core import platforms, sharding
from masksafe._core.labels import class_index, is_class, nan_unless
from masksafe._core.masks import selected
from masksafe._core.typing import Array
from masksafe.losses._rows._formula import LabelFormula, Part, finite_shift, nan_if_bad

_FAR = 1000.0  # below the largest: exp(-1000) is 0 in every dtype, and times 1000 still 0, unlike 0 times infinity


class Sums(NamedTuple):
    """Sums over the classes of each row `[..., 1]`."""

    largest: Array
    others: Array  # the sum of exp(x - largest) without one instance of the largest; -1 over no classes
    label: Array  # x at the label, 0 if the label is not among the classes
    spread: Array  # the sum of exp(x - largest) * (largest - x)


class RowCotangents(NamedTuple):
    """What the cotangents of a row's logits have in common `[..., 1]`."""

    shift: Array
    of_exp: Array  # times exp(x - shift)
    of_spread: Array  # times exp(x - shift) * (shift - x): with the former, the cotangent at classes but the label
    at_label: Array


@dataclasses.dataclass(frozen=True)
class LogProbAndEntropy(LabelFormula):
    """The outputs of a row: the log-probability of its label, and its entropy."""

    of_labels = True, False

    def nothing(self, zero: Array) -> Sums:
        return Sums(zero - jnp.inf, zero - 1, zero, zero)

    def sums(self, part: Part) -> Sums:
        x = selected(self.x(part.logits), part.live, -jnp.inf)
        largest = jnp.max(x, -1, keepdims=True)
        shift = finite_shift(largest)
        total = functools.partial(jnp.sum, axis=-1, keepdims=True)
        others = total(jnp.where(x < largest, jnp.exp(x - shift), 0)) + (total((x == largest).astype(x.dtype)) - 1)
        below = _below(shift, x)
        return Sums(largest, others, total(jnp.where(part.is_label, x, 0)), total(jnp.exp(-below) * below))

    def sums_of_each(self, part: Part) -> Sums:
        x = self.x(part.logits)
        zero = jnp.zeros_like(x)
        return Sums(x, zero, jnp.where(part.is_label, x, 0), zero)

    def add(self, a: Sums, b: Sums) -> Sums:
        is_a_larger = a.largest >= b.largest
        more, less = (
            Sums(*(jnp.where(which, of_a, of_b) for of_a, of_b in zip(a, b, strict=True)))
            for which in (is_a_larger, ~is_a_larger)
        )
        exp_total, spread = _rebased(more.largest, less)
        largest = jnp.maximum(a.largest, b.largest)  # NaN if one of them is
        return Sums(largest, more.others + exp_total, a.label + b.label, more.spread + spread)

    def add_devices(self, axis_name: Any, sums: Sums) -> Sums:
        if axis_name is None:
            return sums
        total = sharding.Devices(axis_name).sum
        largest = sharding.Devices(axis_name).max(sums.largest)
        has_largest = sums.largest == largest
        exp_total, spread = _rebased(largest, sums)
        others = total(jnp.where(has_largest, sums.others, exp_total))
        others += total(has_largest.astype(others.dtype)) - 1  # one instance of the largest is left out of all
        return Sums(largest, others, total(sums.label), total(spread))

    def outputs(self, sums: Sums, data: Array, classes: int) -> tuple[Array, ...]:
        others, shift = _others(sums), finite_shift(sums.largest)
        valid = nan_unless(is_class(data, classes), others.dtype)  # a product makes the derivatives NaN as well
        log_total = jnp.log1p(others)
        return -((shift - sums.label) + log_total) * valid, log_total + sums.spread / (1 + others)

    def outputs_of_part(self, axis_name: Any, part: Part, labels: Array, classes: int) -> tuple[Array, ...]:
        """As `outputs`, but with c* as a constant, and all of its logit's derivatives."""
        x = self.x(part.logits)
        is_top = _is_first_of_largest(lax.stop_gradient(x), axis_name)
        total = lambda terms: sharding.Devices(axis_name).sum(jnp.sum(terms, -1, keepdims=True))  # noqa: E731
        largest = total(jnp.where(is_top, x, 0))
        exps = jnp.where(is_top, 0, jnp.exp(jnp.where(is_top, 0, x - largest)))
        below = jnp.where(is_top, 0, jnp.minimum(largest - x, _FAR))  # with derivatives where another x is as large
        sums = Sums(largest, total(exps), total(jnp.where(part.is_label, x, 0)), total(exps * below))
        return self.outputs(sums, labels, classes)

    def row_cotangents(self, sums: Sums, labels: Array, classes: int, d_outputs: tuple[Array, ...]) -> RowCotangents:
        d_log_prob, d_entropy = d_outputs
        d_log_prob = nan_if_bad(d_log_prob, is_class(labels, classes))
        others, shift = _others(sums), finite_shift(sums.largest)
        exp_total = 1 + others
        of_spread, mean = d_entropy / exp_total, sums.spread / exp_total
        # 1 - p at the label, but not as a difference.
        at_label = d_log_prob * (others - jnp.expm1(sums.label - shift)) / exp_total
        below = _below(shift, sums.label)
        at_label += jnp.exp(-below) * of_spread * (below - mean)
        return RowCotangents(shift, -d_log_prob / exp_total - of_spread * mean, of_spread, at_label)

    def cotangents_of_x(self, x: Array, part: Part, rows: RowCotangents) -> Array:
        below = _below(rows.shift, x)
        return jnp.where(part.is_label, rows.at_label, jnp.exp(-below) * (rows.of_exp + rows.of_spread * below))


def _below(largest: Array, x: Array) -> Array:
    """How far x is below the largest; finite for an x of -inf.

    At the largest it is 0 by a comparison: where x is a product, the difference is compiled to a fused multiply-add,
    and is the rounding error of the product.
    """
    return jnp.where(x < largest, jnp.minimum(largest - x, _FAR), 0)


def _rebased(largest: Array, sums: Sums) -> tuple[Array, Array]:
    """The sum of all exponentials and the spread, relative to another largest x."""
    step = _below(finite_shift(largest), jnp.where(largest == -jnp.inf, 0, sums.largest))
    exp_total = jnp.exp(-step) * (1 + sums.others)
    return exp_total, jnp.exp(-step) * sums.spread + step * exp_total


def _others(sums: Sums) -> Array:
    """NaN, and with it the derivatives, in a row whose largest x is not finite: then no probability is known."""
    return sums.others * nan_unless(jnp.isfinite(sums.largest), sums.others.dtype)


def _is_first_of_largest(x: Array, axis_name: Any) -> Array:
    """True at one of the largest x of each row; over devices at that of the first device."""
    # Of an array that is computed only once, since a largest that no x equals would have no place. A search by argmax
    # would be gathered where a mesh splits the classes.
    x, index = platforms.unfused(x), class_index(x.shape)
    largest = jnp.max(x, -1, keepdims=True)
    is_top = index == jnp.min(jnp.where(x == largest, index, x.shape[-1]), -1, keepdims=True)
    if axis_name is None:
        return is_top
    has_largest = largest == sharding.Devices(axis_name).max(largest)
    device = lax.axis_index(axis_name)
    first = lax.pmin(jnp.where(has_largest, device, lax.axis_size(axis_name)), axis_name)
    return cast(Array, is_top & has_largest & (device == first))
