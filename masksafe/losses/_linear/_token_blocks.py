"""Tokens in blocks: unmasked ones are moved to the front, and only blocks that contain any are computed."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
from jax import lax

from masksafe._core import platforms
from masksafe._core.masks import selected
from masksafe._core.typing import Array
from masksafe._core.unfolded import unknown

State = TypeVar("State")


class Block(NamedTuple):
    """Some tokens in packed order."""

    start: Array  # the place of the first
    tokens: Array  # which they are, [size]
    live: Array  # [size]

    def take(self, x: Array) -> Array:
        """The rows of `x` `[N, ...]` for these tokens, 0 where none is left."""
        return selected(x[self.tokens], self.live.reshape(-1, *[1] * (x.ndim - 1)))

    def put(self, packed: Array, part: Array) -> Array:
        """`packed`, an array in packed order, with `part` as the rows of these tokens."""
        return lax.dynamic_update_slice_in_dim(packed, part, self.start, 0)


class TokenBlocks(NamedTuple):
    """The order of the tokens with unmasked ones first, padded for the last block."""

    order: Array
    place: Array  # of each token in that order, if unmasked
    live: Array | None
    live_tokens: Array | int  # how many are unmasked
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, number: int, live: Array | None, size: int) -> "TokenBlocks":
        """`number` tokens in blocks of `size`."""
        sizes = _sizes(size)
        length = -(-number // size) * size + sizes[-1]
        if live is None:
            order = jnp.arange(number, dtype=jnp.int32)
            return cls(jnp.pad(order, (0, length - number)), order, None, number, sizes)
        live = unknown(live)
        order = jnp.argsort(~live, stable=True).astype(jnp.int32)
        place = jnp.maximum(jnp.cumsum(live, dtype=jnp.int32) - 1, 0)
        return cls(jnp.pad(order, (0, length - number)), place, live, jnp.sum(live, dtype=jnp.int32), sizes)

    @property
    def length(self) -> int:
        """That of an array in packed order."""
        return self.order.size

    def fold(self, body: Callable[[Block, State], State], state: State) -> State:
        """`state` after `body(block, state)` for each block that contains an unmasked token."""
        done: Any = 0
        for size in self.sizes:
            rest = self.live_tokens - done
            number, first = rest // size if size > self.sizes[-1] else -(-rest // size), done

            def step(i: Array, state: State, size: int = size, first: Any = first) -> State:
                return body(self._block(first + jnp.asarray(i, jnp.int32) * size, size), state)

            state = lax.fori_loop(0, number, step, state)
            done += number * size
        return state

    def _block(self, start: Array, size: int) -> Block:
        live = start + jnp.arange(size, dtype=jnp.int32) < self.live_tokens
        return Block(start, lax.dynamic_slice_in_dim(self.order, start, size), live)

    def put_back(self, packed: Array) -> Array:
        """The rows of an array in packed order, at their tokens again; 0 where masked."""
        rows = packed[self.place]
        return selected(rows, None if self.live is None else self.live.reshape(-1, *[1] * (rows.ndim - 1)))


def _sizes(size: int) -> tuple[int, ...]:
    """The size of most blocks, and a smaller one for the remaining tokens, which reduces padding."""
    small = -(-size // 4)
    return (size, small) if small >= platforms.FEWEST_TOKENS_OF_A_SMALL_BLOCK else (size,)
