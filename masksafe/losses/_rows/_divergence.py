r"""Divergences between the softmax of a teacher's logits and that of a student's, row by row, and their cotangents.

With the probabilities :math:`p` of the teacher and :math:`q` of the student, and with :math:`d = \log (p / q)`,

.. math::
  \mathrm{KL}(p \| q) = \sum_c p_c d_c = \sum_c p_c \left( e^{-d_c} - 1 + d_c \right), \qquad
  \mathrm{JS}_\beta(p, q) = \beta \mathrm{KL}(p \| m) + (1 - \beta) \mathrm{KL}(q \| m), \qquad
  m = \beta p + (1 - \beta) q.

The second form of the sum is used: its terms are not negative, so that none is lost where student and teacher nearly
agree and all of them are small. There :math:`e^{-d} - 1 + d` is a polynomial; elsewhere :math:`q - p + p d` is the same
term and does not overflow. Where all of a row are small, an error common to them counts by its square alone.

With student logits :math:`x` and teacher logits :math:`t`

.. math::
  \frac{\partial \mathrm{KL}(p \| q)}{\partial x_c} = q_c - p_c, \qquad
  \frac{\partial \mathrm{KL}(q \| p)}{\partial x_c} = q_c \left( \log \frac{q_c}{p_c} - \mathrm{KL}(q \| p) \right),
  \qquad
  \frac{\partial \mathrm{JS}_\beta(p, q)}{\partial x_c} =
  (1 - \beta) q_c \left( \log \frac{q_c}{m_c} - \mathrm{KL}(q \| m) \right),

and the derivatives by :math:`t` are the same with both exchanged, and :math:`1 - \beta` for :math:`\beta`. A class of
probability 0 adds nothing, since :math:`0 \log 0 = 0`; a divergence is infinite where its other distribution is 0.

Of a teacher that is known by its k most probable classes, the student's logits at these classes remain, and maybe one
more, the logsumexp of all other classes: a divergence of k or k + 1 classes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import jax.numpy as jnp

from masksafe._core.labels import at_label, is_class, nan_unless
from masksafe._core.masks import selected
from masksafe._core.sharding import gathered_along, is_sharded, may_loop
from masksafe._core.tiles import Tile, divide, loop, take
from masksafe._core.typing import Array
from masksafe.losses._rows._formula import Classes, Formula, largest_logit

Sums = TypeVar("Sums")

Direction = Literal["forward", "reverse", "jensen_shannon"]
FORWARD, REVERSE, JENSEN_SHANNON = DIRECTIONS = get_args(Direction)


class TopK(NamedTuple):
    """The teacher's most probable classes and the logarithms of their probabilities, both `[..., k]`."""

    log_probs: Array
    classes: Array


class Kind(NamedTuple):
    """Which divergence; `beta` is the teacher's part of the mixture."""

    direction: str
    beta: float

    def exchanged(self) -> "Kind":
        """The same divergence with student and teacher exchanged."""
        other = {FORWARD: REVERSE, REVERSE: FORWARD, JENSEN_SHANNON: JENSEN_SHANNON}
        return Kind(other[self.direction], 1 - self.beta)


@dataclasses.dataclass(frozen=True)
class Divergence(Formula):
    """That of the student, the first source, from a teacher: the second source, or its top k classes."""

    of_labels = (False,)
    kind: Kind
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

    def nothing(self, zero: Array) -> "Rows":
        none = Normalizer(zero, zero)
        rest = none if self.with_rest else None
        sums = (zero,) * _number_of_sums(self.kind)
        return Rows(none, none, sums, rest, zero if self.of_top_k else None)

    def sums_of(self, logits: tuple[Array, ...], data: Any, classes: Classes, tile_size: int) -> "Rows":
        if not self.of_top_k:
            student, teacher = map(self._scaled, logits)
            return divergence_sums(self.kind, teacher, student, tile_size)
        x, targets, valid = self._top_k(logits[0], data)
        rest = None
        if self.with_rest:
            (rest,) = normalizers(tile_size, _with_classes(x, targets.classes, -jnp.inf))
        teacher, student = _few_classes(x, targets, rest)
        return divergence_sums(self.kind, teacher, student, student.shape[-1])._replace(rest=rest, valid=valid)

    def outputs(self, sums: "Rows", data: Any, classes: int) -> tuple[Array, ...]:
        divergence = _divergence_of(self.kind, sums.sums)
        return (divergence if sums.valid is None else divergence * sums.valid,)

    def cotangents(
        self, logits: tuple[Array, ...], data: Any, classes: Classes, sums: "Rows", d_outputs: tuple[Array, ...]
    ) -> tuple[Array, ...]:
        d = d_outputs[0] / self.temperature
        if not self.of_top_k:
            student, teacher = map(self._scaled, logits)
            pair = pair_of(teacher, student, sums.teacher, sums.student)
            d_student = student_cotangents(self.kind, pair, sums.sums) * d
            if not self.target_gradients:
                return (d_student,)
            return d_student, teacher_cotangents(self.kind, pair, sums.sums) * d
        x, targets, _ = self._top_k(logits[0], data)
        teacher, student = _few_classes(x, targets, sums.rest)
        pair = pair_of(teacher, student, sums.teacher, sums.student)
        d_student = student_cotangents(self.kind, pair, sums.sums) * (d * sums.valid)
        if sums.rest is None:
            return (_with_classes(jnp.zeros_like(x), targets.classes, d_student),)
        d_student, d_rest = d_student[..., :-1], d_student[..., -1:]
        others = _with_classes(x, targets.classes, -jnp.inf)
        total = jnp.where(sums.rest.total > 0, sums.rest.total, 1)
        d_x = jnp.exp(others - sums.rest.largest) * (d_rest / total)
        return (_with_classes(d_x, targets.classes, d_student),)

    def plain_outputs(self, logits: tuple[Array, ...], data: Any, classes: Classes) -> tuple[Array, ...]:
        return self.outputs(self.sums_of(logits, data, classes, classes.here), data, classes.number)

    def _scaled(self, logits: Array) -> Array:
        return logits if self.temperature == 1 else logits / self.temperature

    def _top_k(self, logits: Array, targets: TopK) -> tuple[Array, TopK, Array]:
        """The student's rows, the targets with classes in range, and NaN for rows of which some is out or repeated."""
        x = gathered_along(self._scaled(logits), -1)
        is_valid = jnp.all(is_class(targets.classes, x.shape[-1]), -1) & ~jnp.any(is_repeated(targets.classes), -1)
        classes = jnp.clip(targets.classes, 0, x.shape[-1] - 1)
        targets = TopK(targets.log_probs.astype(x.dtype), classes)
        return x, targets, nan_unless(is_valid, x.dtype)[..., None]  # a product makes the derivatives NaN as well


# Logits as probabilities.


class Normalizer(NamedTuple):
    """The logsumexp of each row `[..., 1]` in two parts: the largest logit, and the sum of exp(x - largest)."""

    largest: Array  # at least the lowest finite number
    total: Array


Normalizers = tuple[Normalizer, ...]


def normalizers(tile_size: int, *logits: Array) -> Normalizers:
    """Those of several sources, computed from tiles of the classes."""

    def nothing(zero: Array) -> Normalizers:
        return (Normalizer(jnp.full_like(zero, jnp.finfo(zero.dtype).min), zero),) * len(logits)

    def of_tiles(*tiles: Array) -> Normalizers:
        return tuple(map(_normalizer, tiles))

    def add(a: Normalizers, b: Normalizers) -> Normalizers:
        return tuple(map(_added, a, b))

    return _over_tiles(of_tiles, add, nothing, tile_size, *logits)


def _normalizer(x: Array) -> Normalizer:
    largest = largest_logit(x)
    return Normalizer(largest, jnp.sum(jnp.exp(x - largest), -1, keepdims=True))


def _added(a: Normalizer, b: Normalizer) -> Normalizer:
    largest = jnp.maximum(a.largest, b.largest)
    return Normalizer(largest, a.total * jnp.exp(a.largest - largest) + b.total * jnp.exp(b.largest - largest))


class Pair(NamedTuple):
    """Probabilities of some classes, `[..., classes]`, and their logarithms."""

    teacher: Array
    student: Array
    log_teacher: Array
    log_student: Array
    log_ratio: Array  # log(teacher / student), with the digits that the difference of the two lacks

    def exchanged(self) -> "Pair":
        return Pair(self.student, self.teacher, self.log_student, self.log_teacher, -self.log_ratio)


def pair_of(teacher: Array, student: Array, of_teacher: Normalizer, of_student: Normalizer) -> Pair:
    """The probabilities of logits, with the digits of their ratio.

    Differences between the sides are taken first: they are exact if both nearly agree, and then remove common offsets.
    """
    log_ratio = (teacher - student) - (of_teacher.largest - of_student.largest)
    log_ratio -= _log_ratio(of_teacher.total, of_student.total)
    log_p, log_q = _log_probabilities(teacher, of_teacher), _log_probabilities(student, of_student)
    return Pair(jnp.exp(log_p), jnp.exp(log_q), log_p, log_q, log_ratio)


def _log_probabilities(logits: Array, rows: Normalizer) -> Array:
    return (logits - rows.largest) - jnp.log(rows.total)


def _log_ratio(a: Array, b: Array) -> Array:
    """log(a / b), with its digits also where both are nearly equal."""
    near = abs(a - b) < b / 2
    return jnp.where(near, jnp.log1p(jnp.where(near, a - b, 0) / b), jnp.log(a) - jnp.log(b))


# The few classes of a teacher that is known by them.


def _few_classes(x: Array, targets: TopK, rest: Normalizer | None) -> tuple[Array, Array]:
    """The logits of the teacher and the student at the targets, and of all others together if their normalizer is."""
    student, teacher = _at_classes(x, targets.classes), targets.log_probs
    if rest is None:
        return teacher, student
    is_any = rest.total > 0  # of the student's other classes
    of_others = jnp.where(is_any, rest.largest + jnp.log(jnp.where(is_any, rest.total, 1)), -jnp.inf)
    # A sum of probabilities may be 1 but for its rounding, and a rest of 0 would be infinitely far from any other.
    least = float(jnp.finfo(x.dtype).eps)
    missing = jnp.maximum(1 - jnp.sum(jnp.exp(teacher), -1, keepdims=True), least)
    of_missing = jnp.where(is_any, jnp.log(missing), -jnp.inf)
    return jnp.concatenate([teacher, of_missing], -1), jnp.concatenate([student, of_others], -1)


def is_repeated(classes: Array) -> Array:
    """Whether a class was in its row `[..., k]` before."""
    is_same = classes[..., :, None] == classes[..., None, :]
    return jnp.any(jnp.tril(is_same, -1), -1)


def _at_classes(x: Array, classes: Array) -> Array:
    """The elements `[..., k]` of rows `[..., V]` at some classes."""
    if is_sharded(x) or is_sharded(classes):  # JAX refuses indices then
        return jnp.sum(jnp.where(at_label(classes, x.shape[-1]), x[..., None, :], 0), -1)
    return jnp.take_along_axis(x, classes, -1)


def _with_classes(x: Array, classes: Array, values: Array | float) -> Array:
    """Rows `[..., V]` with other elements at some classes, none of which is repeated."""
    if not may_loop((x, classes)):  # symbolic sizes cannot be indices either
        is_at, values = at_label(classes, x.shape[-1]), jnp.broadcast_to(values, classes.shape)
        return jnp.where(jnp.any(is_at, -2), jnp.sum(jnp.where(is_at, values[..., None], 0), -2), x)
    return jnp.put_along_axis(x, classes, values, -1, inplace=False)


# Divergences as sums over the classes.


def divergence_sums(kind: Kind, teacher: Array, student: Array, tile_size: int) -> "Rows":
    """What the divergences and their cotangents want to know of each row."""
    of_teacher, of_student = normalizers(tile_size, teacher, student)

    def of_tile(teacher: Array, student: Array) -> tuple[Array, ...]:
        terms = _terms(kind, pair_of(teacher, student, of_teacher, of_student))
        return tuple(jnp.sum(x, -1, keepdims=True) for x in terms)

    add = lambda a, b: tuple(map(jnp.add, a, b))  # noqa: E731
    nothing = lambda zero: (zero,) * _number_of_sums(kind)  # noqa: E731
    return Rows(of_teacher, of_student, _over_tiles(of_tile, add, nothing, tile_size, teacher, student))


class Rows(NamedTuple):
    """What is known of each row `[..., 1]`."""

    teacher: Normalizer
    student: Normalizer
    sums: tuple[Array, ...]  # the Kullback-Leibler divergences of which its own consists
    rest: Normalizer | None = None  # of the student's classes that are not among the teacher's k, if they are a class
    valid: Any = None  # NaN if the teacher's k classes are not


def _number_of_sums(kind: Kind) -> int:
    return 2 if kind.direction == JENSEN_SHANNON else 1


def _terms(kind: Kind, pair: Pair) -> tuple[Array, ...]:
    p, q, *_, d = pair
    if kind.direction == FORWARD:
        return (_kl_terms(p, q, d),)
    if kind.direction == REVERSE:
        return (_kl_terms(q, p, -d),)
    mixture, of_teacher, of_student = _mixture(kind.beta, pair)
    return _kl_terms(p, mixture, of_teacher), _kl_terms(q, mixture, of_student)


def _divergence_of(kind: Kind, sums: tuple[Array, ...]) -> Array:
    if kind.direction != JENSEN_SHANNON:
        return sums[0]
    of_teacher, of_student = sums
    return kind.beta * of_teacher + (1 - kind.beta) * of_student


_NEAR = 0.5  # above, e^-d - 1 + d loses at most two bits in the plain form


def _kl_terms(p: Array, q: Array, d: Array) -> Array:
    """The terms `p (e^-d - 1 + d)` of KL(p || q), with d = log(p / q)."""
    near = abs(d) < _NEAR
    d_far = jnp.where(near | (p == 0), 0, d)
    return jnp.where(near, p * _excess(jnp.where(near, d, 0)), q - p + p * d_far)


def _excess(d: Array) -> Array:
    """The function e^-d - 1 + d, for small d."""
    degree = 9 if jnp.finfo(d.dtype).bits <= 32 else 16
    return d * d * _polynomial(d, [(-1) ** n / math.factorial(n) for n in range(2, degree + 1)])


def _polynomial(x: Array, coefficients: Sequence[float]) -> Array:
    """With the coefficient of x^0 first."""
    *others, highest = coefficients
    return functools.reduce(lambda total, c: total * x + c, reversed(others), jnp.full_like(x, highest))


def _difference(pair: Pair) -> Array:
    """The difference q - p, with its digits."""
    p, q, *_, d = pair
    near = abs(d) < _NEAR
    d_near = jnp.where(near, d, 0)
    return jnp.where(near, p * (_excess(d_near) - d_near), q - p)


def _mixture(beta: float, pair: Pair) -> tuple[Array, Array, Array]:
    """The mixture m = beta p + (1 - beta) q, log(p / m) and log(q / m)."""
    p, q, *_, d = pair
    d = jnp.where((p == 0) & (q == 0), 0, d)  # else it may be NaN, although the class adds nothing
    # Without log(m), for m may be so small that the second derivative is infinite.
    small = jnp.exp(-abs(d))
    log_to_larger = jnp.log(jnp.where(d > 0, beta + (1 - beta) * small, 1 - beta + beta * small))
    to_teacher = _log_of_mixture(1 - beta, -d, log_to_larger + jnp.maximum(-d, 0))
    to_student = _log_of_mixture(beta, d, log_to_larger + jnp.maximum(d, 0))
    return beta * p + (1 - beta) * q, -to_teacher, -to_student


_SMALL_PART = 1 / 16  # of a mixture: below, the plain logarithm loses four bits and more


def _log_of_mixture(part: float, z: Array, plain: Array) -> Array:
    """The function log(1 - part + part e^z), which is `plain`, with the digits that this lacks where it is small."""
    near = abs(z) < _NEAR
    if part < _SMALL_PART:
        close = (z < math.log1p(1 / part)) & ~near
        plain = jnp.where(close, jnp.log1p(part * jnp.expm1(jnp.where(close, z, 0))), plain)
    return jnp.where(near, _log_of_mixture_near(part, jnp.where(near, z, 0)), plain)


def _log_of_mixture_near(part: float, z: Array) -> Array:
    """The function log(1 - part + part e^z), for small z, as a polynomial.

    Its coefficients times n! are the cumulants of a Bernoulli variable.
    """
    degree = 9 if jnp.finfo(z.dtype).bits <= 32 else 20
    argument = [part / math.factorial(n) for n in range(degree + 1)]
    coefficients = [0.0]
    for n in range(1, degree + 1):
        coefficients.append(argument[n] - sum(k * coefficients[k] * argument[n - k] for k in range(1, n)) / n)
    return z * _polynomial(z, coefficients[1:])


# Cotangents of the logits.


def student_cotangents(kind: Kind, pair: Pair, sums: tuple[Array, ...]) -> Array:
    """The derivatives of the divergences by the student's logits."""
    _, q, *_, d = pair
    if kind.direction == FORWARD:
        return _difference(pair)
    if kind.direction == REVERSE:
        return jnp.where(q == 0, 0, q * (-d - sums[0]))
    *_, of_student = _mixture(kind.beta, pair)
    return jnp.where(q == 0, 0, (1 - kind.beta) * q * (of_student - sums[1]))


def teacher_cotangents(kind: Kind, pair: Pair, sums: tuple[Array, ...]) -> Array:
    """The derivatives of the divergences by the teacher's logits."""
    return student_cotangents(kind.exchanged(), pair.exchanged(), sums[::-1])


# Classes in tiles.


def _over_tiles(
    of_tile: Callable[..., Sums],
    add: Callable[[Sums, Sums], Sums],
    nothing: Callable[[Array], Sums],
    tile_size: int,
    *logits: Array,
) -> Sums:
    """The sum of `of_tile(*tiles)` over tiles of the classes, which stay in the cache meanwhile."""
    classes = divide(logits[0].shape[-1], tile_size)
    if classes.number == 1:
        return of_tile(*logits)

    def step(j: Array, total: Sums) -> Sums:
        tile = classes.tile(j)
        return add(total, of_tile(*(_taken(x, tile) for x in logits)))

    zero = functools.reduce(jnp.add, (jnp.zeros_like(x[..., :1]) for x in logits))
    return loop(0, classes.number, step, nothing(zero))


def _taken(x: Array, tile: Tile) -> Array:
    """The logits of a tile, -inf for those of the tile before."""
    part = take(x, x.ndim - 1, tile)
    if not tile.is_ragged:
        return part
    return selected(part, tile.start + jnp.arange(tile.size, dtype=jnp.int32) >= tile.first, -jnp.inf)
