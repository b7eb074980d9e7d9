"""What formulas over groups need of them, which are the rows of an array or its segments."""

from typing import Protocol

import jax.numpy as jnp
from jax import lax

from masksafe._core.typing import Array


class Groups(Protocol):
    """Elements that are reduced together: the rows of an array, or its segments."""

    def unmasked(self, x: Array, where: Array | None) -> Array | None:
        """Which elements are unmasked; None: all."""

    def have_unmasked(self, x: Array, where: Array | None) -> Array | None:
        """Which groups have an unmasked element, on any device; None: all."""

    def sum(self, x: Array) -> Array:
        """The sum of each group, over all devices."""

    def max(self, x: Array) -> Array:
        """The largest element of each group, wide, over all devices; -inf for an empty one."""

    def gathered(self, values: Array) -> Array:
        """The value of its group for each element."""

    def gathered_once(self, values: Array) -> Array:
        """`gathered`, where XLA neither keeps the result for another use nor computes the values for every element."""

    def gathered_to_unmasked(self, values: Array, x: Array, where: Array | None) -> Array:
        """The value of its group for each element of `x`; 0 where masked. Linear, with a sum as its transpose."""


def with_value_of_empty(groups: Groups, results: Array, x: Array, where: Array | None, value: Array | None) -> Array:
    """The result of each group, but a value without a derivative for an empty one; None: as they are.

    The mask tells, not the result: an unmasked infinity stays.
    """
    if value is None or (have_unmasked := groups.have_unmasked(x, where)) is None:
        return results
    return jnp.where(have_unmasked, results, lax.stop_gradient(value))
