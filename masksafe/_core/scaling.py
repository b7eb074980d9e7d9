"""Scaling by powers of two, which is exact, so that no square overflows or vanishes."""

import jax.numpy as jnp
from jax import lax

from masksafe._core.typing import Array


def reciprocal_power_of_two(size: Array) -> Array:
    """A constant power of two close to 1 / size, for floats from 0 to infinity; finite and normal for every size."""
    limits = jnp.finfo(size.dtype)
    unsigned = {16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint64}[limits.bits]
    bits, of_exponent = (lax.bitcast_convert_type(x, unsigned) for x in (size, jnp.full_like(size, jnp.inf)))
    power = lax.bitcast_convert_type(lax.stop_gradient(bits & of_exponent), size.dtype)
    return 1 / jnp.clip(power, float(limits.tiny), 1 / float(limits.tiny))


def quotient(x: Array, y: Array) -> Array:
    """The ratio of x and y > 0, whose derivatives are finite even where the square of y overflows or vanishes.

    For a y that has derivatives, such as a sum of weights; a number of elements has none.
    """
    unit = reciprocal_power_of_two(y)
    return (x * unit) / (y * unit)
