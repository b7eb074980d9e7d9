"""How an axis is divided into blocks of one size, whatever its length."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from masksafe._core.typing import Array


class Tile(NamedTuple):
    """Neighbours on an axis: `size` of them from `start` on. Those in front of `first` are not its own."""

    start: Array | int
    size: int
    first: Array | int
    is_ragged: bool


class Tiles(NamedTuple):
    """A division of an axis of `length` into blocks of one size.

    Where the sizes do not divide, the last block is moved up to end with the last one; what it repeats
    belongs to the block before it.
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
        """How many of the last block belong to the one before."""
        return self.number * self.size - self.length

    def join(self, blocks: Array) -> Array:
        """Stacked blocks `[count, ..., size, n]` as `[..., length, n]`."""
        if self.number == 1:
            return blocks[0]
        body = jnp.moveaxis(blocks[:-1], 0, -3)
        body = body.reshape(*body.shape[:-3], -1, body.shape[-1])
        return jnp.concatenate([body, blocks[-1, ..., self.repeated :, :]], -2)


def divide(length: int, target: int) -> Tiles:
    """As few blocks as sizes up to `target` allow, as even as can be; a symbolic length is one block."""
    if not isinstance(length, int):
        return Tiles(length, length)
    return Tiles(length, -(-length // max(1, -(-length // target))))


def take(x: Array, axis: int, span: Tile) -> Array:
    """The part of `x` that belongs to a span."""
    if span.size == x.shape[axis]:
        return x
    return lax.dynamic_slice_in_dim(x, span.start, span.size, axis)
