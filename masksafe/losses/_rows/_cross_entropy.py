r"""The mathematics of softmax cross-entropies, row by row: of a label or of a distribution, with related outputs.

With the largest :math:`x`, :math:`m`, the temperature :math:`\tau`, the label :math:`y`, and weights :math:`w_c` of the
:math:`V` classes, which are 1 if there are none,

.. math::
  z_c = (x_c - m) / \tau, \qquad s = \sum_c e^{z_c}, \qquad p_c = e^{z_c} / s, \qquad
  \ell_1 = \log s - z_y, \qquad
  \ell_2 = \frac{1}{V} \sum_c w_c (\log s - z_c), \qquad
  \ell_3 = (m / \tau + \log s)^2, \qquad
  H = \log s - u, \qquad u = \frac{1}{s} \sum_c e^{z_c} z_c

are the cross-entropy, its mean over all classes, the square of the logsumexp, and the entropy. With their cotangents

.. math::
  \tau \dot x_c = p_c \left( \dot \ell_1 + \frac{\sum_j w_j}{V} \dot \ell_2 + 2 (m / \tau + \log s) \dot \ell_3 +
  \dot H (u - z_c) \right) - [c = y] \dot \ell_1 - \frac{w_c}{V} \dot \ell_2.

With targets :math:`t` in place of a label, :math:`T = \sum_c t_c`, and the part :math:`M` of them that the
probabilities miss, which PolyLoss adds :math:`\epsilon` times,

.. math::
  \ell = T \log s - \sum_c t_c z_c + \epsilon M, \qquad M = \sum_c t_c (1 - p_c), \qquad
  \dot x_c = \dot \ell \left( T p_c - t_c + \epsilon p_c (T - t_c - M) \right), \qquad
  \dot t_c = \dot \ell \left( \log s - z_c + \epsilon (1 - p_c) \right).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core import platforms, sharding, unfolded
from masksafe._core.exponentials import Exponentials, finite_largest, over
from masksafe._core.labels import as_classes, class_index, is_class, nan_unless
from masksafe._core.masks import selected
from masksafe._core.precision import widened
from masksafe._core.soft_cap import pulled_back, soft_capped
from masksafe._core.tiles import Tile, divide, loop, take
from masksafe._core.typing import Array, Arrays, Index, Pytree
from masksafe.losses._labelled import element_at
from masksafe.losses._rows._formula import Classes, FormulaByParts, LogitPart, nan_if_bad

Join = Callable[..., Array]

_NOWHERE = 2**30  # stands for no class
_FAR = -1000.0  # exp(-1000) is 0 in every dtype, and times -1000 still 0, unlike 0 times -infinity


# The outputs of a row: the cross-entropy, or its negative; its mean over all classes as the label, or over the unmasked
# ones; the square of the logsumexp; the entropy; the logsumexp; and the class of the largest x, which counts from 1,
# since a masked row has 0, and is NaN if there is none.
Output = Literal["cross_entropy", "log_prob", "mean", "unmasked_mean", "square", "entropy", "logsumexp", "prediction"]
PREDICTIONS: tuple[Output, Output] = ("logsumexp", "prediction")


class LabelSums(NamedTuple):
    """The sums over the classes of each row `[..., 1]`; None where a formula does not need one."""

    largest: Array  # m, finite
    total: Array  # s
    label: Array  # x at the label, 0 if the label is not among the classes
    weight: Any = None  # the sum of w
    weighted: Any = None  # the sum of w z
    spread: Any = None  # the sum of exp(z) z
    best: Any = None  # the lowest class whose x is m
    number: Any = None  # V, if the weights do not give it


class Slopes(NamedTuple):
    """What the cotangents of a row's logits have in common `[..., 1]`."""

    shift: Array  # m
    exp_factor: Array  # the factor of exp(z)
    spread_factor: Array | None  # the factor of exp(z) z
    weight_factor: Array | None  # the factor of the weight of the class, subtracted
    at_label: Array | None  # the terms of exp(z) and of the label itself, at the label


@dataclasses.dataclass(frozen=True)
class CrossEntropy(FormulaByParts):
    r"""Outputs of a row with a label, from :math:`x = \kappa \tanh(a / \kappa)`, where :math:`a` are its logits."""

    names: tuple[Output, ...]  # those that depend on the label first, predictions last
    soft_cap: float | None = None
    temperature: Any = 1.0  # a number, or an array while a function is traced

    @property
    def label_outputs(self) -> int:
        return sum(name in ("cross_entropy", "log_prob", "mean", "unmasked_mean") for name in self.names)

    @property
    def has_mean(self) -> bool:
        return "mean" in self.names or "unmasked_mean" in self.names

    @property
    def has_other_sums(self) -> bool:
        """Whether other sums than that of exponentials need the differences from the largest: XLA would store these."""
        return self.has_mean or "entropy" in self.names

    def at(self, temperature: Array | None) -> "CrossEntropy":
        """The same for another temperature, unless it is None."""
        return self if temperature is None else dataclasses.replace(self, temperature=temperature)

    def x(self, logits: Array, unmasked: Array | None = None) -> Array:
        """The x of some logits: -inf where masked, and where the logit is -inf, as at an excluded class."""
        x = widened(selected(logits, unmasked, -jnp.inf))
        return x if self.soft_cap is None else jnp.where(x == -jnp.inf, x, soft_capped(x, self.soft_cap))

    def _over_temperature(self, x: Array) -> Array:
        if isinstance(self.temperature, float):
            return over(x, self.temperature)
        return x / self.temperature.astype(x.dtype)

    # The sums.

    def empty_sums(self, zero: Array) -> LabelSums:
        none = dict.fromkeys(self._terms(zero, None), zero)
        if "prediction" in self.names:
            none["best"] = jnp.full_like(zero, _NOWHERE, jnp.int32)
        return LabelSums(jnp.full_like(zero, jnp.finfo(zero.dtype).min), zero, zero, **none)

    def sums(self, part: LogitPart) -> LabelSums:
        total = lambda terms: jnp.sum(terms, -1, keepdims=True)  # noqa: E731
        x = self.x(part.logits, part.unmasked)
        largest = selected(finite_largest(x), part.unmasked_rows)
        # Divided after the subtraction, as in `Exponentials`.
        z = self._over_temperature(x - largest)
        terms = self._terms(z, part.class_weights, part.unmasked)
        others = {name: total(selected(term, part.unmasked)) for name, term in terms.items()}
        if "prediction" in self.names:
            others["best"] = jnp.full_like(largest, part.first, jnp.int32)  # `_with_best` looks within the part
        return LabelSums(largest, total(jnp.exp(z)), self._at_label(x, part), **others)

    def _at_label(self, x: Array, part: LogitPart) -> Array:
        if part.label is None:
            return jnp.sum(jnp.where(part.is_label, x, 0), -1, keepdims=True)
        return self.x(element_at(part.logits, part.unmasked, part.label))

    def sums_of_each(self, part: LogitPart) -> LabelSums:
        x = self.x(part.logits)
        most = float(jnp.finfo(x.dtype).max)
        largest = jnp.clip(x, -most, most)
        z = self._over_temperature(x - largest)
        label = jnp.where(part.is_label, x, 0.0)
        best = _classes_where(x >= largest, part.first) if "prediction" in self.names else None
        return LabelSums(largest, jnp.exp(z), label, **self._terms(z, part.class_weights), best=best)

    def _terms(self, z: Array, class_weights: Array | None, unmasked: Array | None = None) -> dict[str, Array]:
        """The terms of the other sums, by name."""
        terms = {}
        if self.has_mean:
            terms["weight"], terms["weighted"] = (_weighted(x, class_weights, unmasked) for x in (jnp.ones_like(z), z))
            if "unmasked_mean" in self.names and class_weights is not None:
                terms["number"] = jnp.ones_like(z)
        if "entropy" in self.names:
            terms["spread"] = _spread(z)
        return terms

    def add(self, a: LabelSums, b: LabelSums) -> LabelSums:
        return self._joined((a, b), jnp.maximum(a.largest, b.largest), jnp.add, jnp.minimum)

    def add_devices(self, classes: Classes, sums: LabelSums) -> LabelSums:
        devices = sharding.Devices(classes.axis_name)
        if not devices.are_many:
            return sums
        if "prediction" in self.names:
            sums = sums._replace(best=sums.best + devices.first(classes.here))
        largest = devices.max(lax.stop_gradient(sums.largest))
        return self._joined((sums,), largest, devices.sum, lambda best: lax.pmin(best, classes.axis_name))

    def _joined(self, parts: tuple[LabelSums, ...], largest: Array, add: Join, lowest: Join) -> LabelSums:
        """The sums of parts, relative to the largest x of all; `add` adds them up, and `lowest` joins their classes."""
        total: LabelSums = jax.tree.map(add, *(self._rebased(largest, part) for part in parts))
        if "prediction" in self.names:
            total = total._replace(best=lowest(*(jnp.where(p.largest == largest, p.best, _NOWHERE) for p in parts)))
        return total._replace(largest=largest)

    def _rebased(self, largest: Array, sums: LabelSums) -> LabelSums:
        """The sums relative to another largest x, which is not filled in."""
        step = self._over_temperature(sums.largest - largest)
        factor = jnp.exp(step)
        moved = sums._replace(largest=None, total=sums.total * factor, best=None)  # type: ignore[arg-type]
        if sums.weight is not None:
            step = jnp.maximum(step, float(jnp.finfo(step.dtype).min))  # it may overflow where the weight is 0
            moved = moved._replace(weighted=sums.weighted + sums.weight * step)
        if sums.spread is not None:
            moved = moved._replace(spread=factor * (sums.spread + sums.total * jnp.maximum(step, _FAR)))
        return moved

    # The outputs, and the slopes.

    def outputs(self, sums: LabelSums, data: Array, classes: int) -> Arrays:
        log_total = jnp.log(sums.total)
        if_valid = functools.partial(nan_unless, is_class(data, classes))

        def output(name: Output) -> Array:
            match name:
                case "cross_entropy" | "log_prob":
                    z = self._over_temperature(sums.label - sums.largest)
                    return if_valid(log_total - z if name == "cross_entropy" else z - log_total)
                case "mean" | "unmasked_mean":
                    number = self._number_of_mean(sums, classes)
                    return if_valid(log_total * (sums.weight / number) - sums.weighted / number)
                case "square":
                    return jnp.square(self._logsumexp(sums))
                case "entropy":
                    return log_total - sums.spread / sums.total
                case "logsumexp":
                    return self._logsumexp(sums)
                case "prediction":
                    has_best = (sums.best < classes) & ~jnp.isnan(sums.total)
                    return jnp.where(has_best, (sums.best + 1).astype(log_total.dtype), jnp.nan)

        return tuple(map(output, self.names))

    def _number_of_mean(self, sums: LabelSums, classes: int) -> Array | int:
        if "unmasked_mean" not in self.names:
            return classes
        return jnp.maximum(sums.weight if sums.number is None else sums.number, 1)

    def _logsumexp(self, sums: LabelSums) -> Array:
        return self._over_temperature(sums.largest) + jnp.log(sums.total)

    def slopes(self, sums: LabelSums, labels: Array, classes: int, d_outputs: Arrays) -> Slopes:
        has_label, rate = is_class(labels, classes), jnp.where(has_probabilities(sums), 1 / sums.total, jnp.nan)
        exp_factor, d_label, weight_factor, spread_factor = jnp.zeros_like(sums.total), None, None, None
        for name, d in zip(self.names, d_outputs, strict=True):
            match name:
                case "cross_entropy" | "log_prob":
                    d_label = nan_if_bad(d, has_label)
                    d_label = -d_label if name == "log_prob" else d_label
                    exp_factor += d_label
                case "mean" | "unmasked_mean":
                    weight_factor = nan_if_bad(d, has_label) / self._number_of_mean(sums, classes)
                    exp_factor += weight_factor * sums.weight
                case "square":
                    exp_factor += 2 * self._logsumexp(sums) * d
                case "entropy":
                    exp_factor += d * (sums.spread * rate)
                    spread_factor = -d * rate
                case "logsumexp":
                    exp_factor += d
        slopes = Slopes(sums.largest, exp_factor * rate, spread_factor, weight_factor, None)
        return slopes if d_label is None else slopes._replace(at_label=self._exp_terms(sums.label, slopes) - d_label)

    def logit_cotangents(self, part: LogitPart, slopes: Slopes, *, computed_again: bool = True) -> Array:
        x = self.x(part.logits, part.unmasked)
        # Logits that are computed again may exceed the largest by a rounding. Those of an array are the same as before,
        # and XLA computes their exponentials once.
        d_x = self._exp_terms(jnp.minimum(x, slopes.shift) if computed_again else x, slopes)
        if slopes.at_label is not None:
            # Selected: for a difference XLA's compiler for GPUs would write the cotangents to memory once more.
            d_x = jnp.where(part.is_label, slopes.at_label, d_x)
        if slopes.weight_factor is not None:
            d_x -= _weighted(slopes.weight_factor, part.class_weights, part.unmasked)
        d_x = self._over_temperature(d_x)
        capped = d_x if self.soft_cap is None else soft_capped(widened(part.logits), self.soft_cap)
        return pulled_back(d_x, capped, self.soft_cap)

    def _exp_terms(self, x: Array, slopes: Slopes) -> Array:
        z = self._over_temperature(x - slopes.shift)
        d_x = jnp.exp(z) * slopes.exp_factor
        return d_x if slopes.spread_factor is None else d_x + _spread(z) * slopes.spread_factor

    # For linear layers.

    def sums_of(self, logits: Arrays, data: Array, classes: Classes, tile_size: int) -> Pytree:
        (x,), tiles = logits, divide(classes.here, tile_size)
        if tiles.number == 1:
            sums = self.sums(logit_part(x, data, classes, tiles.tile(0)))
        else:
            empty = self.empty_sums(jnp.zeros_like(x[..., :1]))
            tile_sums = lambda j: self.sums(logit_part(x, data, classes, tiles.tile(j)))  # noqa: E731
            sums = loop(0, tiles.number, lambda j, sums: self.add(sums, tile_sums(j)), empty)
        return self.add_devices(classes, self._with_best(x, sums, tiles.size))

    def _with_best(self, logits: Array, sums: LabelSums, size: int) -> LabelSums:
        """The sums with the class of the largest x, which is searched for in one tile of this size.

        `sums.best` is the first class of that tile. A search in all tiles takes as long as a sum over the logits.
        """
        if sums.best is None:
            return sums
        if size < logits.shape[-1]:
            first = jnp.minimum(sums.best, logits.shape[-1] - size)
            logits = jax.vmap(lambda row, start: lax.dynamic_slice_in_dim(row, start, size))(logits, first[:, 0])
        # Unfused: an x that XLA computes again may differ from the largest by a rounding.
        x = platforms.unfused(self.x(lax.stop_gradient(logits)))
        found = (x >= jnp.max(x, -1, keepdims=True)) & (sums.total != 0)
        return sums._replace(best=jnp.min(_classes_where(found, sums.best), -1, keepdims=True))

    def cotangents(self, logits: Arrays, data: Array, classes: Classes, sums: Pytree, d_outputs: Arrays) -> Arrays:
        slopes = self.slopes(sums, data, classes.number, d_outputs)
        return (self.logit_cotangents(logit_part(logits[0], data, classes), slopes),)

    def plain_outputs(self, logits: Arrays, data: Array, classes: Classes) -> Arrays:
        sums = self._with_best(logits[0], self.sums(logit_part(logits[0], data, classes)), classes.here)
        sums = self.add_devices(classes, sums)
        return self.outputs(sums, data, classes.number)


def has_probabilities(sums: "LabelSums | TargetSums | Exponentials") -> Array:
    """Whether rows have probabilities: not one with a NaN or +inf, nor one of only -inf."""
    # Comparisons, since XLA's compiler for GPUs cannot fuse `isfinite` with a reduction.
    return (sums.total > 0) & (sums.total < jnp.inf)


def _spread(z: Array) -> Array:
    """exp(z) z, and 0 for a z of -inf."""
    return jnp.exp(z) * jnp.maximum(z, _FAR)


def logit_part(logits: Array, labels: Array, classes: Classes, tile: Tile | None = None) -> LogitPart:
    """The logits at a tile of the classes of this device, or at all of them."""
    labels = classes.local(as_classes(labels, classes.number))
    if tile is None or tile.size == classes.here:
        return LogitPart(logits, class_index(logits.shape) == labels, None, classes.weights)
    logits = take(logits, logits.ndim - 1, tile)
    index = jnp.asarray(tile.start, jnp.int32) + class_index(logits.shape)
    weights = None if classes.weights is None else take(classes.weights, 0, tile)
    if not tile.is_ragged:
        return LogitPart(logits, index == labels, None, weights, first=tile.start)
    unmasked = index >= tile.first
    return LogitPart(logits, (index == labels) & unmasked, unmasked, weights, first=tile.start)


def _classes_where(found: Array, first: Index) -> Array:
    return jnp.where(found, jnp.asarray(first, jnp.int32) + class_index(found.shape), _NOWHERE)


def _weighted(x: Array, weights: Array | None, unmasked: Array | None) -> Array:
    """`x` times the weights of the unmasked classes; 0 for a weight of 0, even where `x` is infinite."""
    if weights is None:
        return x
    weights = selected(jnp.expand_dims(weights, range(x.ndim - 1)).astype(x.dtype), unmasked)
    return jnp.where(weights == 0, 0.0, x) * weights


# Of targets.


class TargetSums(NamedTuple):
    """The sums over the classes of each row `[..., 1]`."""

    largest: Array  # m, finite
    total: Array  # s
    weight: Array  # T
    product: Array  # the sum of t z
    caught: Any = None  # the sum of t p, for PolyLoss


class TargetCrossEntropy(NamedTuple):
    """The cross-entropy of a row with targets."""

    epsilon: Array | None = None  # of PolyLoss `[..., 1]`

    def sums(self, x: Array, t: Array, where: Array | None) -> TargetSums:
        largest = finite_largest(selected(x, where, -jnp.inf))
        z, t = _relative(x, t, where, largest)
        exps = jnp.exp(z)
        total, weight = jnp.sum(exps, -1, keepdims=True), unfolded.sum_of(t, -1, keepdims=True)
        total = jnp.where((total == 0) & (weight == 0), 1, total)  # no class has a probability or a target
        product = jnp.sum(t * jnp.where(_is_absent(z, t), 0, z), -1, keepdims=True)
        caught = None if self.epsilon is None else jnp.sum(t * exps, -1, keepdims=True) / total
        return TargetSums(largest, total, weight, product, caught)

    def loss(self, sums: TargetSums) -> Array:
        loss: Array = sums.weight * jnp.log(sums.total) - sums.product
        return loss if self.epsilon is None else loss + self.epsilon * (sums.weight - sums.caught)

    def slopes(self, x: Array, t: Array, where: Array | None, sums: TargetSums) -> tuple[Array, Array]:
        """The derivatives of the loss by the logits and by the targets; NaN in a row without probabilities."""
        z, t = _relative(x, t, where, sums.largest)
        p = jnp.exp(z) * jnp.where(has_probabilities(sums), 1 / sums.total, jnp.nan)
        costs = jnp.log(sums.total) - z
        costs = jnp.where(_is_absent(z, t), 0, costs)
        slopes = sums.weight * p - t
        if self.epsilon is None:
            return slopes, costs
        slopes += self.epsilon * p * (sums.weight - t - (sums.weight - sums.caught))
        return slopes, costs + self.epsilon * (1 - p)

    def has_slopes(self, sums: TargetSums | Exponentials, weight: Array) -> Array:
        """Whether the slopes of rows are finite: logits have probabilities, and neither targets nor epsilon are bad."""
        weight = weight if self.epsilon is None else weight * self.epsilon
        return has_probabilities(sums) & (abs(weight) < jnp.inf)

    # The textbook's form, without a selection.

    def textbook_loss(self, x: Array, t: Array) -> Array:
        """The loss, right where it is finite: a logit of -inf without a target makes it NaN."""
        z = x - jnp.minimum(jnp.max(x, -1, keepdims=True), float(jnp.finfo(x.dtype).max))
        exps = jnp.exp(z)
        total = jnp.sum(exps, -1, keepdims=True)
        terms = t * (jnp.log(total) - z)
        if self.epsilon is not None:
            terms += self.epsilon * (t * (1 - exps / total))
        return jnp.sum(terms, -1, keepdims=True)

    def textbook_logit_slopes(self, x: Array, t: Array) -> Array:
        """The derivatives of the loss by the logits; NaN in a row without probabilities."""
        wide = jnp.finfo(x.dtype)
        most = float(wide.max)
        # Both limits behind the maximum would be a clamp, which the library does not have.
        exps = jnp.exp(x - jnp.minimum(jnp.max(jnp.maximum(x, -most), -1, keepdims=True), most))
        total, weight = (jnp.sum(a, -1, keepdims=True) for a in (exps, t))
        p = exps / (total + float(wide.tiny))  # the total is 1 or more, or 0 if all logits are -inf
        slopes = weight * p - t
        if self.epsilon is not None:
            slopes += self.epsilon * (p * (jnp.sum(t * p, -1, keepdims=True) - t))
        # 1 or less; infinite if all logits are -inf and a class has a target. 0 times what is not finite is NaN.
        missing = jnp.exp(jnp.sum(t * jnp.minimum(-jnp.log(total), most / 2**10), -1, keepdims=True))
        return slopes + 0 * (missing + total)


def _is_absent(z: Array, t: Array) -> Array:
    """Where a class has no probability and no target: it adds nothing, by the convention 0 log 0 = 0."""
    return (t == 0) & (z == -jnp.inf)


def _relative(x: Array, t: Array, where: Array | None, largest: Array) -> tuple[Array, Array]:
    """The z and t, in the dtype of the sums; -inf and 0 under the mask."""
    dtype = jnp.promote_types(largest.dtype, widened(t).dtype)
    return selected(x, where, -jnp.inf).astype(dtype) - largest.astype(dtype), selected(t, where).astype(dtype)
