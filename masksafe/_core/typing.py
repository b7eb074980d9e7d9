"""The types that signatures use: arrays, values that convert to arrays, axes."""

from collections.abc import Sequence

from jax import Array as Array
from jax.typing import ArrayLike as ArrayLike

Axis = int | Sequence[int]
Axes = tuple[int, ...]
