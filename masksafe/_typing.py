"""The names that signatures use: an array, what converts to one, an axis."""

from jax import Array as Array
from jax.typing import ArrayLike as ArrayLike

Axis = int | tuple[int, ...]
Axes = tuple[int, ...]
