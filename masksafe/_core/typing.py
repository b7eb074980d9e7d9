"""The names that signatures use: an array, what converts to one, an axis."""

from collections.abc import Sequence

from jax import Array as Array
from jax.typing import ArrayLike as ArrayLike

Axis = int | Sequence[int]
Axes = tuple[int, ...]
