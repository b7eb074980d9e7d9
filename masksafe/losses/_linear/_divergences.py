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
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax.numpy as jnp
from jax import lax

from masksafe._core.masks import selected
from masksafe._core.tiles import Tile, divide, take
from masksafe._core.typing import Array

Sums = TypeVar("Sums")

FORWARD, REVERSE, JENSEN_SHANNON = DIRECTIONS = ("forward", "reverse", "jensen_shannon")


class Divergence(NamedTuple):
    """Which one; `beta` is the teacher's part of the mixture."""

    direction: str
    beta: float

    def exchanged(self) -> "Divergence":
        """The same divergence with student and teacher exchanged."""
        other = {FORWARD: REVERSE, REVERSE: FORWARD, JENSEN_SHANNON: JENSEN_SHANNON}
        return Divergence(other[self.direction], 1 - self.beta)


# Logits as probabilities.


class Normalizer(NamedTuple):
    """The logsumexp of each row `[..., 1]`, in two parts: the largest logit, and the sum of exp(x - largest)."""

    largest: Array
    total: Array


def normalizer(logits: Array, tile_size: int) -> Normalizer:
    """The normalizer of rows of logits, computed from tiles of the classes."""
    return _over_tiles(
        _normalizer_of_tile, _add_normalizers, lambda zero: Normalizer(zero - jnp.inf, zero), tile_size, logits
    )


def _normalizer_of_tile(x: Array) -> Normalizer:
    largest = lax.stop_gradient(jnp.max(x, -1, keepdims=True))
    return Normalizer(largest, jnp.sum(jnp.exp(x - finite(largest)), -1, keepdims=True))


def _add_normalizers(a: Normalizer, b: Normalizer) -> Normalizer:
    largest = jnp.maximum(a.largest, b.largest)
    parts = (jnp.where(x.largest == -jnp.inf, 0, x.total * jnp.exp(x.largest - largest)) for x in (a, b))
    return Normalizer(largest, sum(parts, jnp.zeros_like(largest)))


def finite(largest: Array) -> Array:
    """The largest logit, or 0 if that is -inf."""
    return jnp.where(largest == -jnp.inf, 0, largest)


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


# Divergences as sums over the classes.


def divergence_sums(divergence: Divergence, teacher: Array, student: Array, tile_size: int) -> tuple["Rows", Array]:
    """What the cotangents want to know of each row, and the divergences `[..., 1]`."""
    of_teacher, of_student = normalizer(teacher, tile_size), normalizer(student, tile_size)

    def of_tile(teacher: Array, student: Array) -> tuple[Array, ...]:
        terms = _terms(divergence, pair_of(teacher, student, of_teacher, of_student))
        return tuple(jnp.sum(x, -1, keepdims=True) for x in terms)

    def add(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(map(jnp.add, a, b))

    number = 2 if divergence.direction == JENSEN_SHANNON else 1
    sums = _over_tiles(of_tile, add, lambda zero: (zero,) * number, tile_size, teacher, student)
    return Rows(of_teacher, of_student, sums), _divergence_of(divergence, sums)


class Rows(NamedTuple):
    """Of each row `[..., 1]`: both normalizers, and the Kullback-Leibler divergences of which its own consists."""

    teacher: Normalizer
    student: Normalizer
    sums: tuple[Array, ...]


def _terms(divergence: Divergence, pair: Pair) -> tuple[Array, ...]:
    p, q, *_, d = pair
    if divergence.direction == FORWARD:
        return (_kl_terms(p, q, d),)
    if divergence.direction == REVERSE:
        return (_kl_terms(q, p, -d),)
    mixture, of_teacher, of_student = _mixture(divergence.beta, pair)
    return _kl_terms(p, mixture, of_teacher), _kl_terms(q, mixture, of_student)


def _divergence_of(divergence: Divergence, sums: tuple[Array, ...]) -> Array:
    if divergence.direction != JENSEN_SHANNON:
        return sums[0]
    of_teacher, of_student = sums
    return divergence.beta * of_teacher + (1 - divergence.beta) * of_student


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
    d = jnp.where((p == 0) & (q == 0), 0, d)  # may be NaN, which counts for nothing
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


def student_cotangents(divergence: Divergence, pair: Pair, sums: tuple[Array, ...]) -> Array:
    """The derivatives of the divergences by the student's logits."""
    _, q, *_, d = pair
    if divergence.direction == FORWARD:
        return _difference(pair)
    if divergence.direction == REVERSE:
        return jnp.where(q == 0, 0, q * (-d - sums[0]))
    *_, of_student = _mixture(divergence.beta, pair)
    return jnp.where(q == 0, 0, (1 - divergence.beta) * q * (of_student - sums[1]))


def teacher_cotangents(divergence: Divergence, pair: Pair, sums: tuple[Array, ...]) -> Array:
    """The derivatives of the divergences by the teacher's logits."""
    return student_cotangents(divergence.exchanged(), pair.exchanged(), sums[::-1])


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
    total: Sums = lax.fori_loop(0, classes.number, step, nothing(zero))
    return total


def _taken(x: Array, tile: Tile) -> Array:
    """The logits of a tile, -inf for those of the tile before."""
    part = take(x, x.ndim - 1, tile)
    return selected(part, tile.start + jnp.arange(tile.size) >= tile.first, -jnp.inf) if tile.is_ragged else part
