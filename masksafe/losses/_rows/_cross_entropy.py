r"""The mathematics of softmax cross-entropies, row by row: of a label or of a distribution, with related outputs.

With the largest :math:`x`, :math:`m`, the temperature :math:`\tau`, the label :math:`y`, and weights :math:`w_c` of the
:math:`V` classes, which are 1 if there are none,

.. math::
  z_c = (x_c - m) / \tau, \qquad s = \sum_c e^{z_c}, \qquad p_c = e^{z_c} / s, \qquad
  \ell_1 = \log s - z_y, \qquad
  \ell_2 = \frac{1}{V} \sum_c w_c (\log s - z_c), \qquad
  \ell_3 = (m / \tau + \log s)^2, \qquad
  H = \log s - u, \qquad u = \frac{1}{s} \sum_c e^{z_c} z_c

are the cross-entropy, its mean over all classes, the square of the logsumexp, and the entropy. With targets :math:`t`
in place of a label, and :math:`\epsilon` of PolyLoss,

.. math::
  \ell = T \log s - \sum_c t_c z_c + \epsilon \Big( T - \frac{1}{s} \sum_c t_c e^{z_c} \Big), \qquad T = \sum_c t_c.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core import platforms, run_time, sharding
from masksafe._core.exponentials import over
from masksafe._core.labels import as_classes, class_index
from masksafe._core.masks import selected
from masksafe._core.precision import widened
from masksafe._core.soft_cap import soft_capped
from masksafe._core.tiles import Tile, divide, loop, take
from masksafe._core.typing import Array, Arrays, Index, Pytree
from masksafe.losses._labelled import element_at
from masksafe.losses._rows._formula import Classes, LogitTile, RowFormula, has_probabilities, nan_if_bad

_NOWHERE = 2**30  # stands for no class
_FAR = -1000.0  # exp(-1000) is 0 in every dtype, and times -1000 still 0, unlike 0 times -infinity


# The outputs of a row: the cross-entropy, or its negative; its mean over all classes as the label, or over the unmasked
# ones; m, without a derivative, and NaN where log s is not finite; log s; the square of the logsumexp; the entropy; the
# logsumexp; and the class of the largest x, which counts from 1, since a masked row has 0, and is NaN if there is none.
Output = Literal[
    "cross_entropy",
    "log_prob",
    "mean",
    "unmasked_mean",
    "largest",
    "log_total",
    "square",
    "entropy",
    "logsumexp",
    "prediction",
]
PREDICTIONS: tuple[Output, Output] = ("logsumexp", "prediction")


class LabelSums(NamedTuple):
    """The sums over the classes of each row `[..., 1]`; None where a formula does not need one."""

    largest: Any  # m, finite
    total: Array  # s
    label: Any  # x at the label, 0 if the label is not among the classes
    weight: Any = None  # the sum of w
    weighted: Any = None  # the sum of w z
    moment: Any = None  # the sum of exp(z) z
    best: Any = None  # the lowest class whose x is m
    number: Any = None  # V, if the weights do not give it


@dataclasses.dataclass(frozen=True)
class CrossEntropy(RowFormula):
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
        """Whether more sums need differences from the largest, which XLA would store (jax 0.12, 24576x1000: 94 MiB)."""
        return self.has_mean or "entropy" in self.names

    def at(self, temperature: Array | None) -> "CrossEntropy":
        """The same for another temperature, unless it is None."""
        return self if temperature is None else dataclasses.replace(self, temperature=temperature)

    def x(self, logits: Array, unmasked: Array | None = None) -> Array:
        """The x of some logits: -inf where masked, and where the logit is -inf, as at an excluded class."""
        x = super().x(logits, unmasked)
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

    def terms(self, tile: LogitTile, shift: Array, x: Array, _: None) -> LabelSums:
        z = self._over_temperature(x - shift)  # divided after the subtraction, as in `Exponentials`
        others = self._terms(z, tile.class_weights, tile.unmasked)
        return LabelSums(None, jnp.exp(z), None, **{name: selected(a, tile.unmasked) for name, a in others.items()})

    def completed(self, sums: LabelSums, tile: LogitTile, x: Array) -> LabelSums:
        if not self.label_outputs:  # any label: at a masked class it would keep an infinity for the reverse pass
            sums = sums._replace(label=jnp.zeros_like(sums.largest))
        elif tile.label is None:
            sums = sums._replace(label=jnp.sum(jnp.where(tile.is_label, x, 0), -1, keepdims=True))
        else:
            sums = sums._replace(label=self.x(element_at(tile.logits, tile.unmasked, tile.label)))
        if "prediction" in self.names:  # `_with_best` looks within the tile
            sums = sums._replace(best=jnp.full_like(sums.largest, tile.first, jnp.int32))
        return sums

    def sums_of_each(self, tile: LogitTile) -> LabelSums:
        """The sums over each logit alone."""
        x = self.x(tile.logits)
        most = float(jnp.finfo(x.dtype).max)
        largest = jnp.clip(x, -most, most)
        label = jnp.where(tile.is_label, x, 0.0)
        best = _classes_where(x >= largest, tile.first) if "prediction" in self.names else None
        return self.terms(tile, largest, x, None)._replace(largest=largest, label=label, best=best)

    def _terms(self, z: Array, class_weights: Array | None, unmasked: Array | None = None) -> dict[str, Array]:
        """The terms of the other sums, by name."""
        terms = {}
        if self.has_mean:
            terms["weight"], terms["weighted"] = (_weighted(x, class_weights, unmasked) for x in (jnp.ones_like(z), z))
            if "unmasked_mean" in self.names and class_weights is not None:
                terms["number"] = jnp.ones_like(z)
        if "entropy" in self.names:
            # 0 for a z of -inf.
            at_most = jnp.maximum(lax.stop_gradient(z) if self.has_one_derivative else z, _FAR)
            terms["moment"] = jnp.exp(z) * at_most
        return terms

    def add(self, a: LabelSums, b: LabelSums) -> LabelSums:
        """The sums over two tiles of the classes together."""
        largest = jnp.maximum(a.largest, b.largest)
        total: LabelSums = jax.tree.map(jnp.add, self._rebased(largest, a), self._rebased(largest, b))
        if "prediction" in self.names:
            total = total._replace(best=jnp.minimum(_best_if(a, largest), _best_if(b, largest)))
        return total._replace(largest=largest)

    def add_devices(self, classes: Classes, sums: LabelSums) -> LabelSums:
        """The sums over the classes of all devices."""
        devices = sharding.Devices(classes.axis_name)
        if not devices.are_many:
            return sums
        largest = devices.max(lax.stop_gradient(sums.largest))
        total: LabelSums = jax.tree.map(devices.sum, self._rebased(largest, sums))
        if "prediction" in self.names:
            sums = sums._replace(best=sums.best + devices.first(classes.here))
            total = total._replace(best=lax.pmin(_best_if(sums, largest), classes.axis_name))
        return total._replace(largest=largest)

    def _rebased(self, largest: Array, sums: LabelSums) -> LabelSums:
        """The sums relative to another largest x, which is not filled in."""
        step = self._over_temperature(sums.largest - largest)
        factor = jnp.exp(step)
        moved = sums._replace(largest=None, total=sums.total * factor, best=None)
        if sums.weight is not None:
            step = jnp.maximum(step, float(jnp.finfo(step.dtype).min))  # it may overflow where the weight is 0
            moved = moved._replace(weighted=sums.weighted + sums.weight * step)
        if sums.moment is not None:
            moved = moved._replace(moment=factor * (sums.moment + sums.total * jnp.maximum(step, _FAR)))
        return moved

    # The outputs.

    def outputs(self, sums: LabelSums, classes: int) -> Arrays:
        log_total = jnp.log(sums.total)

        def output(name: Output) -> Array:
            match name:
                case "cross_entropy":
                    return log_total - self._over_temperature(sums.label - sums.largest)
                case "log_prob":
                    return self.log_prob(sums.label, sums.largest, log_total)
                case "mean" | "unmasked_mean":
                    number = self._number_of_mean(sums, classes)
                    return log_total * (sums.weight / number) - sums.weighted / number
                case "largest":
                    return jnp.where(jnp.isfinite(log_total), lax.stop_gradient(sums.largest), jnp.nan)
                case "log_total":
                    return log_total
                case "square":
                    return jnp.square(self._logsumexp(sums))
                case "entropy":
                    # Along log p it has no derivative, since the probabilities add up to 1. A sum of the derivatives
                    # of both terms would lose all digits where a logit is 20 above the others.
                    constant = lax.stop_gradient(log_total) if self.has_one_derivative else log_total
                    return constant - sums.moment / sums.total
                case "logsumexp":
                    return self._logsumexp(sums)
                case "prediction":
                    has_best = (sums.best < classes) & ~jnp.isnan(sums.total)
                    return jnp.where(has_best, (sums.best + 1).astype(log_total.dtype), jnp.nan)

        return tuple(map(output, self.names))

    def log_prob(self, x: Array, largest: Array, log_total: Array) -> Array:
        """The logarithm of p, from x, m and log s."""
        return self._over_temperature(x - largest) - log_total

    def _number_of_mean(self, sums: LabelSums, classes: int) -> Array | int:
        if "unmasked_mean" not in self.names:
            return classes
        return jnp.maximum(sums.weight if sums.number is None else sums.number, 1)

    def _logsumexp(self, sums: LabelSums) -> Array:
        return self._over_temperature(sums.largest) + jnp.log(sums.total)

    # Their derivatives.

    def of_terms(self, sums: LabelSums) -> LabelSums:
        return sums._replace(largest=None, label=None)

    def d_sums(self, sums: LabelSums, labels: Array, classes: int, d_outputs: Arrays) -> LabelSums:
        """As in `RowFormula`; that of `label` is the whole cotangent of the x at the label, except by class weights."""
        d_sums = super().d_sums(sums, labels, classes, d_outputs)
        if not {"cross_entropy", "log_prob"}.intersection(self.names):
            return d_sums._replace(label=None)
        without_weights = d_sums._replace(weighted=jax.tree.map(jnp.zeros_like, d_sums.weighted), number=None)
        d_label, _ = self.d_terms(LogitTile(sums.label), sums.label, without_weights)
        return d_sums._replace(label=d_sums.label + d_label)

    def with_label(self, d_x: Array, tile: LogitTile, d_sums: LabelSums) -> Array:
        if d_sums.label is None:
            return d_x
        d_label = d_sums.label
        if d_sums.weighted is not None:
            d_label += self._over_temperature(_weighted(d_sums.weighted, tile.class_weights, tile.unmasked))
        # Selected: in a sum, XLA's compiler for GPUs cannot compute it within a matrix product, and writes it to memory
        # once more (jax 0.12, linear cross-entropy: 1.34 times the bytes).
        return jnp.where(tile.is_label, d_label, d_x)

    # For linear layers.

    gradients = 1  # how many of the layers have gradients: the first ones
    cotangent_exponent = 10  # the power of two that brings the cotangents of the logits into the range of float16

    def cleaned(self, labels: Array, unmasked: Array | None) -> Array:
        """The labels, with harmless ones in masked rows."""
        return selected(labels, unmasked)

    def sums_of(self, logits: Arrays, data: Array, classes: Classes, tile_size: int) -> Pytree:
        (x,), tiles = logits, divide(classes.here, tile_size)
        if tiles.number == 1:
            sums = self.sums(logit_tile(x, data, classes, tiles.tile(0)))
        else:
            empty = self.empty_sums(jnp.zeros_like(x[..., :1]))
            tile_sums = lambda j: self.sums(logit_tile(x, data, classes, tiles.tile(j)))  # noqa: E731
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
        # Unfused: an x that XLA computes again may differ by a rounding (jax 0.12, a soft cap: 1 of 512 predictions).
        x = platforms.unfused(self.x(lax.stop_gradient(logits)))
        found = (x >= jnp.max(x, -1, keepdims=True)) & (sums.total != 0)
        return sums._replace(best=jnp.min(_classes_where(found, sums.best), -1, keepdims=True))

    def cotangents(self, logits: Arrays, data: Array, classes: Classes, sums: Pytree, d_outputs: Arrays) -> Arrays:
        d_sums = self.d_sums(sums, data, classes.number, d_outputs)
        return self.d_tile(logit_tile(logits[0], data, classes), d_sums)[:1]

    def plain_outputs(self, logits: Arrays, data: Array, classes: Classes) -> Arrays:
        sums = self._with_best(logits[0], self.sums(logit_tile(logits[0], data, classes)), classes.here)
        sums = self.add_devices(classes, sums)
        return nan_if_bad(self, self.outputs(sums, classes.number), data, classes.number)


def logit_tile(logits: Array, labels: Array, classes: Classes, tile: Tile | None = None) -> LogitTile:
    """The logits at a tile of the classes of this device, or at all of them."""
    labels = classes.local(as_classes(labels, classes.number))
    if tile is None or tile.size == classes.here:
        return LogitTile(logits, class_index(logits.shape) == labels, None, classes.weights)
    logits = take(logits, logits.ndim - 1, tile)
    index = jnp.asarray(tile.start, jnp.int32) + class_index(logits.shape)
    weights = None if classes.weights is None else take(classes.weights, 0, tile)
    if not tile.is_ragged:
        return LogitTile(logits, index == labels, None, weights, first=tile.start)
    unmasked = index >= tile.first
    return LogitTile(logits, (index == labels) & unmasked, unmasked, weights, first=tile.start)


def _best_if(sums: LabelSums, largest: Array) -> Array:
    """The best class where its x is the largest of all tiles."""
    return jnp.where(sums.largest == largest, sums.best, _NOWHERE)


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

    largest: Any  # m, finite
    total: Array  # s
    weight: Array  # T
    product: Array  # the sum of t z
    caught: Any = None  # the sum of t exp(z), for PolyLoss
    catchable: Any = None  # T, with a derivative at each class


@dataclasses.dataclass(frozen=True)
class TargetCrossEntropy(RowFormula):
    """The cross-entropy of a row with targets."""

    epsilon: Array | None = None  # of PolyLoss `[..., 1]`

    has_other_sums = True

    def at(self, epsilon: Array | None) -> "TargetCrossEntropy":
        return TargetCrossEntropy(epsilon)

    def terms(self, tile: LogitTile, shift: Array, x: Array, targets: Array) -> TargetSums:
        t = widened(selected(targets, tile.unmasked))
        dtype = jnp.promote_types(x.dtype, t.dtype)
        # Times an unknown 1: XLA would add up constant targets while it compiles.
        z, t = x.astype(dtype) - shift.astype(dtype), t.astype(dtype) * run_time.unknown(1, dtype)
        is_absent = (t == 0) & (z == -jnp.inf)  # it adds nothing, by the convention 0 log 0 = 0
        exps, product = jnp.exp(z), t * jnp.where(is_absent, 0, z)
        weight = jnp.where(is_absent, 0, t) if self.has_one_derivative else t  # equal, except in its derivative by t
        return TargetSums(None, exps, weight, product, *(() if self.epsilon is None else (t * exps, t)))

    def completed(self, sums: TargetSums, tile: LogitTile, x: Array) -> TargetSums:
        is_nothing = (sums.total == 0) & (sums.weight == 0)  # no class has a probability or a target
        return sums._replace(total=jnp.where(is_nothing, 1, sums.total))

    def outputs(self, sums: TargetSums, classes: int) -> Arrays:
        loss = sums.weight * jnp.log(sums.total) - sums.product
        return (loss if self.epsilon is None else loss + self.epsilon * (sums.catchable - sums.caught / sums.total),)

    def has_derivatives(self, sums: TargetSums) -> Array:
        weight = sums.weight if self.epsilon is None else sums.weight * self.epsilon
        return has_probabilities(sums) & (abs(weight) < jnp.inf)

    def textbook_loss(self, x: Array, t: Array) -> Array:
        """The loss without a selection, right where it is finite: a logit of -inf without a target makes it NaN."""
        z = x - jnp.minimum(jnp.max(x, -1, keepdims=True), float(jnp.finfo(x.dtype).max))
        exps = jnp.exp(z)
        total = jnp.sum(exps, -1, keepdims=True)
        terms = t * (jnp.log(total) - z)
        if self.epsilon is not None:
            terms += self.epsilon * (t * (1 - exps / total))
        return jnp.sum(terms, -1, keepdims=True)
