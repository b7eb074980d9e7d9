r"""Divergences between the softmax of a teacher's logits and that of a student's, row by row.

With the probabilities :math:`p` of the teacher and :math:`q` of the student

.. math::
  \mathrm{KL}(p \| q) = \sum_c p_c (\log p_c - \log q_c), \qquad
  \mathrm{JS}_\beta(p, q) = \beta \mathrm{KL}(p \| m) + (1 - \beta) \mathrm{KL}(q \| m), \qquad
  m = \beta p + (1 - \beta) q.

A class of probability 0 adds nothing, since :math:`0 \log 0 = 0`; a divergence is infinite where its other
distribution is 0.

The teacher may give its k most probable classes alone. Then the student's logits at these classes remain, and maybe one
more, the logsumexp of all other classes: a divergence of k or k + 1 classes.
"""

import dataclasses
import functools
import math
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core.exponentials import Exponentials, over
from masksafe._core.labels import at_label, is_class, nan_unless
from masksafe._core.masks import selected
from masksafe._core.run_time import unknown
from masksafe._core.sharding import gathered_along, may_loop, vary_with
from masksafe._core.switches import uses_plain_rules
from masksafe._core.typing import Array, Arrays, Pytree
from masksafe.losses._labelled import elements_at
from masksafe.losses._rows._formula import Classes

Direction = Literal["forward", "reverse", "jensen_shannon"]
FORWARD, REVERSE, JENSEN_SHANNON = DIRECTIONS = get_args(Direction)


class TopK(NamedTuple):
    """The teacher's most probable classes and the logarithms of their probabilities, both `[..., k]`."""

    log_probs: Array
    classes: Array
    unmasked: Array | None = None  # None: all

    @property
    def distinct(self) -> Array:
        """The classes, with a different negative number for each masked one."""
        index = -1 - jnp.arange(self.classes.shape[-1], dtype=self.classes.dtype)
        return self.classes if self.unmasked is None else jnp.where(self.unmasked, self.classes, index)


class DivergenceSums(NamedTuple):
    """The sums over the classes of each row `[..., 1]`."""

    divergence: Array


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The divergence of the student, the first layer, from a teacher: the second layer, or its top k classes."""

    names = ("divergence",)
    label_outputs = 0
    direction: str
    beta: float  # the weight of the teacher in the mixture
    temperature: float
    target_gradients: bool = False
    has_top_k: bool = False
    with_rest: bool = False  # whether the classes that are not among the teacher's k count as one more class

    @property
    def gradients(self) -> int:
        return 2 if self.target_gradients else 1

    @property
    def cotangent_exponent(self) -> int:
        # The cotangents are as large as the difference of the logits of both sides, divided by the temperature twice.
        return min(max(10 + 2 * round(math.log2(self.temperature)), -60), 60)

    def cleaned(self, data: Pytree, unmasked: Array | None) -> Pytree:
        if unmasked is None or not self.has_top_k:
            return jax.tree.map(lambda x: selected(x, unmasked), data)
        classes = jnp.arange(data.classes.shape[-1], dtype=data.classes.dtype)  # none is repeated
        all_unmasked = None if data.unmasked is None else jnp.array(True)
        harmless = TopK(jnp.zeros((), data.log_probs.dtype), classes, all_unmasked)
        return jax.tree.map(functools.partial(jnp.where, unmasked), data, harmless)

    def empty_sums(self, zero: Array) -> DivergenceSums:
        return DivergenceSums(zero)

    def sums_of(self, logits: Arrays, data: Pytree, classes: Classes, tile_size: int) -> DivergenceSums:
        """The divergences [256, 1] for logits [256, 50257] of both sides, or of one and a `TopK` of [256, 20]."""
        if self.has_top_k:
            x, targets, valid = self._top_k(logits[0], data)
            rest = None
            if self.with_rest:
                rest = Exponentials.of(_with_classes(x, targets, -jnp.inf), temperature=self.temperature)
            student, teacher = self._few_classes(x, targets, rest)
        else:
            (student, teacher), valid = logits, None
        log_p, log_q = (_log_softmax(teacher, self._teacher_temperature), _log_softmax(student, self.temperature))
        if self.direction == FORWARD:
            divergence = _kl(log_p, log_q)
        elif self.direction == REVERSE:
            divergence = _kl(log_q, log_p)
        else:
            log_m = self._log_mixture(log_p, log_q)
            divergence = self.beta * _kl(log_p, log_m) + (1 - self.beta) * _kl(log_q, log_m)
        return DivergenceSums(divergence if valid is None else divergence * valid)

    def outputs(self, sums: DivergenceSums, classes: int) -> Arrays:
        return (sums.divergence,)

    def cotangents(
        self, logits: Arrays, data: Pytree, classes: Classes, _: DivergenceSums, d_outputs: Arrays
    ) -> Arrays:
        others = logits[self.gradients :]
        outputs = lambda *logits: self.plain_outputs((*logits, *others), data, classes)  # noqa: E731
        found, pull_back = jax.vjp(outputs, *logits[: self.gradients])
        return pull_back(tuple(map(vary_with, d_outputs, found)))

    def plain_outputs(self, logits: Arrays, data: Pytree, classes: Classes) -> Arrays:
        return self.outputs(self.sums_of(logits, data, classes, classes.here), classes.number)

    def _log_mixture(self, log_p: Array, log_q: Array) -> Array:
        """The logarithm of m; finite where neither side has a probability, for finite derivatives."""
        least = float(jnp.finfo(log_p.dtype).min) / 2
        p_part, q_part = jnp.maximum(log_p, least), jnp.maximum(log_q, least)
        largest = lax.stop_gradient(jnp.maximum(p_part, q_part))
        # The logarithm of a weight added to each part would be rounded in the same direction in all classes.
        m = self.beta * jnp.exp(p_part - largest) + (1 - self.beta) * jnp.exp(q_part - largest)
        return largest + jnp.log(m)

    @property
    def _teacher_temperature(self) -> float:
        """The temperature of the teacher's logits; logarithms of probabilities are not divided."""
        return 1.0 if self.has_top_k else self.temperature

    def _top_k(self, logits: Array, targets: TopK) -> tuple[Array, TopK, Array]:
        """The student's rows, the targets with classes in range, and NaN for rows with a bad or repeated class.

        A masked target has probability 0, and any class in range.
        """
        x = gathered_along(logits, -1)
        unmasked, number = targets.unmasked, x.shape[-1]
        has_class = is_class(targets.classes, number)
        has_class = has_class if unmasked is None else has_class | ~unmasked
        is_valid = jnp.all(has_class, -1) & ~jnp.any(is_repeated(targets.distinct), -1)
        log_probs = selected(targets.log_probs.astype(x.dtype), unmasked, -jnp.inf)
        targets = TopK(log_probs, jnp.clip(targets.classes, 0, number - 1), unmasked)
        return x, targets, nan_unless(is_valid, jnp.ones(is_valid.shape, x.dtype))[..., None]

    def _few_classes(self, x: Array, targets: TopK, rest: Exponentials | None) -> tuple[Array, Array]:
        """The logits of student and teacher at the targets; with `rest` also those of all other classes, as one."""
        student, teacher = selected(elements_at(x, targets.classes), targets.unmasked, -jnp.inf), targets.log_probs
        if rest is None:
            return student, teacher
        is_any = rest.total > 0  # of the student's other classes
        logsumexp = rest.largest + self.temperature * jnp.log(jnp.where(is_any, rest.total, 1))
        other_logit = jnp.where(is_any, logsumexp, -jnp.inf)
        # Rounding may make a sum of probabilities 1, and a rest of 0 would be infinitely far from any other.
        least = float(jnp.finfo(x.dtype).eps)
        missing = jnp.maximum(1 - jnp.sum(jnp.exp(teacher), -1, keepdims=True), least)
        missing_logit = jnp.where(is_any, jnp.log(missing), -jnp.inf)
        return jnp.concatenate([student, other_logit], -1), jnp.concatenate([teacher, missing_logit], -1)


def _log_softmax(x: Array, temperature: float) -> Array:
    sums = Exponentials.of(x, temperature=temperature)
    return over(x - sums.largest, temperature) - jnp.log(sums.total)


def _kl(log_p: Array, log_q: Array) -> Array:
    p = jnp.exp(log_p)
    is_0 = p == 0  # both logarithms may be -inf, whose difference is NaN
    return jnp.sum(p * jnp.where(is_0, 0, log_p - jnp.where(is_0, 0, log_q)), -1, keepdims=True)


# The few classes of a teacher.


def is_repeated(classes: Array) -> Array:
    """Whether a class was in its row `[..., k]` before."""
    is_same = classes[..., :, None] == classes[..., None, :]
    return jnp.any(jnp.tril(is_same, -1), -1)


def _with_classes(x: Array, targets: TopK, values: Array | float) -> Array:
    """Rows `[..., V]` with `values` at the classes of the unmasked targets, none of which is repeated."""
    classes, unmasked = targets.classes, targets.unmasked
    values = jnp.broadcast_to(jnp.asarray(values, x.dtype), classes.shape)
    if uses_plain_rules() or not may_loop((x, classes)):  # symbolic sizes cannot be indices either
        is_at = selected(at_label(classes, x.shape[-1]), None if unmasked is None else unmasked[..., None])
        return jnp.where(jnp.any(is_at, -2), jnp.sum(jnp.where(is_at, values[..., None], 0), -2), x)
    if unmasked is not None:  # masked targets repeat the first unmasked one: checkify would report a class past the end
        first = jnp.argmax(unknown(unmasked), -1, keepdims=True)
        place = jnp.where(unmasked, jnp.arange(unmasked.shape[-1], dtype=first.dtype), first)
        classes, values = (jnp.take_along_axis(a, place, -1) for a in (classes, values))
    return jnp.put_along_axis(x, classes, values, -1, inplace=False)
