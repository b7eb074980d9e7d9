"""Sums of exponentials, shifted by the largest exponent, so that they neither overflow nor vanish."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from masksafe._core.precision import widened
from masksafe._core.typing import Array, Axis


def shift_of(largest: Array) -> Array:
    """The shift of a row's exponents: its maximum, but finite for an empty row, since -inf - -inf is NaN."""
    return jnp.maximum(largest, jnp.finfo(largest.dtype).min)


def largest_or_lowest(x: Array, axis: Axis = -1) -> Array:
    """The largest element of each row, wide; at least the lowest finite number."""
    return shift_of(widened(jnp.max(lax.stop_gradient(x), axis, keepdims=True, initial=-jnp.inf)))


def finite_largest(x: Array, axis: Axis = -1) -> Array:
    """The largest element of each row, wide and finite, so that differences from it are defined; or NaN."""
    largest = largest_or_lowest(x, axis)
    return jnp.minimum(largest, float(jnp.finfo(largest.dtype).max))


class Exponentials(NamedTuple):
    """The sum of exp(x / temperature) over each row: exp(largest / temperature) times the total. Axes keep size 1.

    The division follows the subtraction, which is exact: a low temperature would enlarge the error of a quotient.
    """

    largest: Array  # x, finite; or NaN
    total: Array  # the sum of exp((x - largest) / temperature)

    @classmethod
    def of(cls, x: Array, axis: Axis = -1, temperature: float = 1.0) -> "Exponentials":
        largest = finite_largest(x, axis)
        return cls(largest, jnp.sum(jnp.exp(over(widened(x) - largest, temperature)), axis, keepdims=True))

    def plus(self, other: "Exponentials") -> "Exponentials":
        """The sum over both rows, at temperature 1."""
        largest = jnp.maximum(self.largest, other.largest)
        total = self.total * jnp.exp(self.largest - largest) + other.total * jnp.exp(other.largest - largest)
        return Exponentials(largest, total)

    @property
    def logarithm(self) -> Array:
        """The logarithm of the sum at temperature 1; -inf for an empty row, with a derivative of 0."""
        is_empty = self.total == 0
        return jnp.where(is_empty, -jnp.inf, self.largest + jnp.log(jnp.where(is_empty, 1, self.total)))


def over(x: Array, temperature: float) -> Array:
    """`x / temperature` as a product: a CPU may treat a small temperature as 0."""
    return x if temperature == 1 else x * (1 / temperature)
