"""Dividing an axis of any length into tiles of one size."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from masksafe._core.typing import Array


class Tile(NamedTuple):
    """Part of an axis: `size` consecutive positions from `start`; those before `first` belong to the tile before it."""

    start: Array | int
    size: int
    first: Array | int
    is_ragged: bool


class Tiles(NamedTuple):
    """A division of an axis of `length` into tiles of one size.

    If `size` does not divide `length`, the last tile is shifted to end where the axis ends. The positions that it
    repeats belong to the tile before it.
    """

    length: int
    size: int

    @property
    def number(self) -> int:
        return 1 if self.size == self.length else -(-self.length // self.size)

    def tile(self, i: Array | int) -> Tile:
        start = i * self.size
        if not self._is_ragged:
            return Tile(start, self.size, start, False)
        return Tile(jnp.minimum(start, self.length - self.size), self.size, start, True)

    @property
    def _is_ragged(self) -> bool:
        return self.size != self.length and self.length % self.size > 0

    @property
    def repeated(self) -> int:
        """How many positions of the last tile belong to the tile before it."""
        return self.number * self.size - self.length

    def join(self, tiles: Array) -> Array:
        """Stacked tiles `[number, ..., size, n]` as `[..., length, n]`."""
        if self.number == 1:
            return tiles[0]
        body = jnp.moveaxis(tiles[:-1], 0, -3)
        body = body.reshape(*body.shape[:-3], -1, body.shape[-1])
        return jnp.concatenate([body, tiles[-1, ..., self.repeated :, :]], -2)


def divide(length: int, target: int) -> Tiles:
    """As few tiles as possible of at most `target` positions, as even as possible; one tile for a symbolic length."""
    if not isinstance(length, int):
        return Tiles(length, length)
    return Tiles(length, -(-length // max(1, -(-length // target))))


def take(x: Array, axis: int, tile: Tile) -> Array:
    """The part of `x` within a tile of `axis`."""
    if tile.size == x.shape[axis]:
        return x
    return lax.dynamic_slice_in_dim(x, tile.start, tile.size, axis)
