r"""Divergences between the softmax of a teacher's logits and that of a student's, row by row, and their cotangents.

With the probabilities :math:`p` of the teacher and :math:`q` of the student

.. math::
  \mathrm{KL}(p \| q) = \sum_c p_c (\log p_c - \log q_c), \qquad
  \mathrm{JS}_\beta(p, q) = \beta \mathrm{KL}(p \| m) + (1 - \beta) \mathrm{KL}(q \| m), \qquad
  m = \beta p + (1 - \beta) q.

With student logits :math:`x` and teacher logits :math:`t`

.. math::
  \frac{\partial \mathrm{KL}(p \| q)}{\partial x_c} = q_c - p_c, \qquad
  \frac{\partial \mathrm{KL}(q \| p)}{\partial x_c} = q_c \left( \log q_c - \log p_c - \mathrm{KL}(q \| p) \right),
  \qquad
  \frac{\partial \mathrm{JS}_\beta(p, q)}{\partial x_c} =
  (1 - \beta) q_c \left( \log q_c - \log m_c - \mathrm{KL}(q \| m) \right),

and the derivatives by :math:`t` are the same with both exchanged, and :math:`1 - \beta` for :math:`\beta`. A class of
probability 0 adds nothing, since :math:`0 \log 0 = 0`; a divergence is infinite where its other distribution is 0.

The teacher may give its k most probable classes alone. Then the student's logits at these classes remain, and maybe one
more, the logsumexp of all other classes: a divergence of k or k + 1 classes.
"""

import dataclasses
import functools
import math
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from masksafe._core.exponentials import Exponentials, over
from masksafe._core.labels import at_label, is_class, nan_unless
from masksafe._core.masks import selected
from masksafe._core.sharding import gathered_along, may_loop
from masksafe._core.switches import uses_plain_rules
from masksafe._core.typing import Array, Arrays, Pytree
from masksafe._core.unfolded import unknown
from masksafe.losses._labelled import elements_at
from masksafe.losses._rows._formula import Classes, Formula

Direction = Literal["forward", "reverse", "jensen_shannon"]
FORWARD, REVERSE, JENSEN_SHANNON = DIRECTIONS = get_args(Direction)


class TopK(NamedTuple):
    """The teacher's most probable classes and the logarithms of their probabilities, both `[..., k]`."""

    log_probs: Array
    classes: Array
    live: Array | None = None  # which of them count, None: all

    @property
    def distinct(self) -> Array:
        """The classes, with numbers of their own, below 0, in place of those that do not count."""
        index = -1 - jnp.arange(self.classes.shape[-1], dtype=self.classes.dtype)
        return self.classes if self.live is None else jnp.where(self.live, self.classes, index)


class DivergenceSums(NamedTuple):
    """The sums over the classes of each row `[..., 1]`."""

    teacher: Exponentials
    student: Exponentials
    divergences: Arrays  # KL(p || q), KL(q || p), or both of which JS consists
    rest: Exponentials | None = None  # of the student's classes that are not among the teacher's k, if they are a class
    valid: Any = None  # NaN if the teacher's k classes are not


@dataclasses.dataclass(frozen=True)
class Divergence(Formula):
    """The divergence of the student, the first source, from a teacher: the second source, or its top k classes."""

    of_labels = (False,)
    direction: str
    beta: float  # the teacher's part of the mixture
    temperature: float
    target_gradients: bool = False
    of_top_k: bool = False
    with_rest: bool = False  # whether classes that are not among the teacher's k make one class more

    @property
    def gradients(self) -> int:
        return 2 if self.target_gradients else 1

    @property
    def cotangent_exponent(self) -> int:
        # The cotangents are as large as the difference of the logits of both sides, divided by the temperature twice.
        return min(max(10 + 2 * round(math.log2(self.temperature)), -60), 60)

    def cleaned(self, data: Pytree, live: Array | None) -> Pytree:
        if live is None or not self.of_top_k:
            return super().cleaned(data, live)
        classes = jnp.arange(data.classes.shape[-1], dtype=data.classes.dtype)  # none is repeated
        harmless = TopK(jnp.zeros((), data.log_probs.dtype), classes, None if data.live is None else jnp.array(True))
        return jax.tree.map(functools.partial(jnp.where, live), data, harmless)

    def nothing(self, zero: Array) -> DivergenceSums:
        none = Exponentials(zero, zero)
        divergences = (zero,) * (2 if self.direction == JENSEN_SHANNON else 1)
        return DivergenceSums(
            none, none, divergences, none if self.with_rest else None, zero if self.of_top_k else None
        )

    def sums_of(self, logits: Arrays, data: Pytree, classes: Classes, tile_size: int) -> DivergenceSums:
        if self.of_top_k:
            x, targets, valid = self._top_k(logits[0], data)
            rest = None
            if self.with_rest:
                rest = Exponentials.of(_with_classes(x, targets, -jnp.inf), temperature=self.temperature)
            student, teacher = self._few_classes(x, targets, rest)
        else:
            (student, teacher), rest, valid = logits, None, None
        of_teacher = Exponentials.of(teacher, temperature=self._of_teacher)
        of_student = Exponentials.of(student, temperature=self.temperature)
        log_p, log_q = self._log_softmaxes(teacher, student, of_teacher, of_student)
        if self.direction == FORWARD:
            divergences = [_kl(log_p, log_q)]
        elif self.direction == REVERSE:
            divergences = [_kl(log_q, log_p)]
        else:
            log_m = self._log_mixture(log_p, log_q)
            divergences = [_kl(log_p, log_m), _kl(log_q, log_m)]
        return DivergenceSums(of_teacher, of_student, tuple(divergences), rest, valid)

    def outputs(self, sums: DivergenceSums, data: Pytree, classes: int) -> Arrays:
        divergence, *of_student = sums.divergences
        if of_student:
            divergence = self.beta * divergence + (1 - self.beta) * of_student[0]
        return (divergence if sums.valid is None else divergence * sums.valid,)

    def cotangents(
        self, logits: Arrays, data: Pytree, classes: Classes, sums: DivergenceSums, d_outputs: Arrays
    ) -> Arrays:
        d = over(d_outputs[0], self.temperature)
        if not self.of_top_k:
            student, teacher = logits
            slopes = self._slopes(student, teacher, sums)
            return tuple(slope * d for slope in slopes[: self.gradients])
        x, targets, _ = self._top_k(logits[0], data)
        d_student = self._slopes(*self._few_classes(x, targets, sums.rest), sums)[0] * (d * sums.valid)
        if sums.rest is None:
            return (_with_classes(jnp.zeros_like(x), targets, d_student),)
        d_student, d_rest = d_student[..., :-1], d_student[..., -1:]
        total = jnp.where(sums.rest.total > 0, sums.rest.total, 1)
        d_x = jnp.exp(over(x - sums.rest.largest, self.temperature)) * (d_rest / total)
        return (_with_classes(d_x, targets, d_student),)

    def _slopes(self, student: Array, teacher: Array, sums: DivergenceSums) -> tuple[Array, Array]:
        """The derivatives by the logits of the student, and by those of the teacher."""
        log_p, log_q = self._log_softmaxes(teacher, student, sums.teacher, sums.student)
        p, q, divergences = jnp.exp(log_p), jnp.exp(log_q), sums.divergences
        if self.direction == FORWARD:
            return q - p, _kl_slope(log_p, log_q, divergences[0])
        if self.direction == REVERSE:
            return _kl_slope(log_q, log_p, divergences[0]), p - q
        log_m = self._log_mixture(log_p, log_q)
        of_teacher, of_student = divergences
        return (1 - self.beta) * _kl_slope(log_q, log_m, of_student), self.beta * _kl_slope(log_p, log_m, of_teacher)

    def plain_outputs(self, logits: Arrays, data: Pytree, classes: Classes) -> Arrays:
        return self.outputs(self.sums_of(logits, data, classes, classes.here), data, classes.number)

    def _log_mixture(self, log_p: Array, log_q: Array) -> Array:
        """The logarithm of m; finite where neither side has a probability, for the sake of its derivatives."""
        least = float(jnp.finfo(log_p.dtype).min) / 2
        p_part, q_part = jnp.maximum(log_p, least), jnp.maximum(log_q, least)
        return jnp.logaddexp(p_part + math.log(self.beta), q_part + math.log1p(-self.beta))

    @property
    def _of_teacher(self) -> float:
        """The temperature of the teacher's logits: the logarithms of probabilities are taken as they are."""
        return 1.0 if self.of_top_k else self.temperature

    def _log_softmaxes(
        self, teacher: Array, student: Array, of_teacher: Exponentials, of_student: Exponentials
    ) -> tuple[Array, Array]:
        log_p = over(teacher - of_teacher.largest, self._of_teacher) - jnp.log(of_teacher.total)
        return log_p, over(student - of_student.largest, self.temperature) - jnp.log(of_student.total)

    def _top_k(self, logits: Array, targets: TopK) -> tuple[Array, TopK, Array]:
        """The student's rows, the targets with classes in range, and NaN for rows of which some is out or repeated.

        A target that does not count has no probability, and any class in range.
        """
        x = gathered_along(logits, -1)
        live, number = targets.live, x.shape[-1]
        has_class = is_class(targets.classes, number)
        has_class = has_class if live is None else has_class | ~live
        is_valid = jnp.all(has_class, -1) & ~jnp.any(is_repeated(targets.distinct), -1)
        log_probs = selected(targets.log_probs.astype(x.dtype), live, -jnp.inf)
        targets = TopK(log_probs, jnp.clip(targets.classes, 0, number - 1), live)
        return x, targets, nan_unless(is_valid, x.dtype)[..., None]  # a product makes the derivatives NaN as well

    def _few_classes(self, x: Array, targets: TopK, rest: Exponentials | None) -> tuple[Array, Array]:
        """The logits of the student and the teacher at the targets, and of all others if their normalizer is given."""
        student, teacher = selected(elements_at(x, targets.classes), targets.live, -jnp.inf), targets.log_probs
        if rest is None:
            return student, teacher
        is_any = rest.total > 0  # of the student's other classes
        logsumexp = rest.largest + self.temperature * jnp.log(jnp.where(is_any, rest.total, 1))
        of_others = jnp.where(is_any, logsumexp, -jnp.inf)
        # A sum of probabilities may be 1 but for its rounding, and a rest of 0 would be infinitely far from any other.
        least = float(jnp.finfo(x.dtype).eps)
        missing = jnp.maximum(1 - jnp.sum(jnp.exp(teacher), -1, keepdims=True), least)
        of_missing = jnp.where(is_any, jnp.log(missing), -jnp.inf)
        return jnp.concatenate([student, of_others], -1), jnp.concatenate([teacher, of_missing], -1)


def _kl(log_p: Array, log_q: Array) -> Array:
    p = jnp.exp(log_p)
    log_p, log_q = (jnp.where(p == 0, 0, x) for x in (log_p, log_q))  # both may be -inf
    return jnp.sum(p * (log_p - log_q), -1, keepdims=True)


def _kl_slope(log_p: Array, log_q: Array, kl: Array) -> Array:
    """The derivative of KL(p || q) by the logits of p."""
    p = jnp.exp(log_p)
    return p * jnp.where(p == 0, 0, log_p - log_q - kl)


# The few classes of a teacher that is known by them.


def is_repeated(classes: Array) -> Array:
    """Whether a class was in its row `[..., k]` before."""
    is_same = classes[..., :, None] == classes[..., None, :]
    return jnp.any(jnp.tril(is_same, -1), -1)


def _with_classes(x: Array, targets: TopK, values: Array | float) -> Array:
    """Rows `[..., V]` with other elements at the classes of the targets that count, none of which is repeated."""
    classes, live = targets.classes, targets.live
    values = jnp.broadcast_to(jnp.asarray(values, x.dtype), classes.shape)
    if uses_plain_rules() or not may_loop((x, classes)):  # symbolic sizes cannot be indices either
        is_at = selected(at_label(classes, x.shape[-1]), None if live is None else live[..., None])
        return jnp.where(jnp.any(is_at, -2), jnp.sum(jnp.where(is_at, values[..., None], 0), -2), x)
    if live is not None:  # the others repeat the first one that counts: a class past the end would alarm checkify
        first = jnp.argmax(unknown(live), -1, keepdims=True)
        place = jnp.where(live, jnp.arange(live.shape[-1], dtype=first.dtype), first)
        classes, values = (jnp.take_along_axis(a, place, -1) for a in (classes, values))
    return jnp.put_along_axis(x, classes, values, -1, inplace=False)
