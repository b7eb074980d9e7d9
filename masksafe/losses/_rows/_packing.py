"""Packing of tokens: unmasked ones are moved to the front, and only blocks that contain any are computed."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core.run_time import unknown
from masksafe._core.tiles import divisor_near, even_size, slice_at, with_slice
from masksafe._core.typing import Array, Index, Tree


class TokenBlock(NamedTuple):
    """A block of consecutive places, from `start` on."""

    start: Index
    size: int
    tokens: Array | None  # the token at each place; None: the one of the same index
    valid: Array | None  # which places do not repeat a token, [size, 1]; None: all

    def take(self, tree: Tree) -> Tree:
        """The rows of the block, from arrays over tokens."""
        return self.cut(tree) if self.tokens is None else _rows_at(tree, self.tokens)

    def cut(self, tree: Tree) -> Tree:
        """The rows of the block, from arrays over places."""
        return jax.tree.map(lambda x: slice_at(x, {0: (self.start, self.size)}), tree)

    def put(self, x: Array, rows: Array) -> Array:
        """An array over places, with new rows for the block."""
        return with_slice(x, rows, {0: (self.start, self.size)})


class Packed(NamedTuple):
    """The order of tokens in `length` places, in blocks of `size`. A place without a token of its own repeats a token.

    It repeats an unmasked token, if there is one, instead of zeros: 0 times an infinite weight would be NaN.
    """

    order: Array | None  # the token at each place; None: tokens stay where they are
    place: Array | None  # the place of each unmasked token; None: tokens stay where they are
    valid: Array | None  # which places do not repeat a token, [length, 1]; None: all
    blocks: Array | int  # how many blocks contain an unmasked token
    size: int
    length: int

    @classmethod
    def of(cls, number: int, unmasked: Array | None, size: int) -> "Packed":
        """Puts the unmasked ones of `number` tokens first; None: all are unmasked."""
        size = divisor_near(number, size) if unmasked is None else even_size(number, size)
        length = -(-number // size) * size
        if length == number and unmasked is None:
            return cls(None, None, None, length // size, size, length)
        index = jnp.arange(length, dtype=jnp.int32)
        if unmasked is None:
            return cls(jnp.minimum(index, number - 1), None, index[:, None] < number, length // size, size, length)
        place = jnp.cumsum(unknown(unmasked), dtype=jnp.int32)  # counted from 1
        places = jnp.where(unmasked, place - 1, length)
        # Masked tokens get a place of their own: checkify would report an index past the end.
        order = jnp.zeros(length + 1, jnp.int32).at[places].set(index[:number], wrap_negative_indices=False)[:length]
        valid, blocks = index < place[-1], lax.div(place[-1] + (size - 1), jnp.int32(size))
        place = jnp.maximum(place, 1) - 1
        return cls(jnp.where(valid, order, order[0]), place, valid[:, None], blocks, size, length)

    @classmethod
    def in_place(cls, unmasked: Array, size: int) -> "Packed":
        """Tokens that stay where they are; the first unmasked one replaces each masked one."""
        size = even_size(unmasked.size, size)
        length = -(-unmasked.size // size) * size
        unmasked = jnp.pad(unmasked, (0, length - unmasked.size))
        first = jnp.argmax(unknown(unmasked)).astype(jnp.int32)
        order = jnp.where(unmasked, jnp.arange(length, dtype=jnp.int32), first)
        return cls(order, None, unmasked[:, None], length // size, size, length)

    @property
    def is_one_block(self) -> bool:
        return self.size == self.length

    def block(self, i: Index) -> TokenBlock:
        places = TokenBlock(i * self.size, self.size, None, None)
        return places._replace(tokens=places.cut(self.order), valid=places.cut(self.valid))

    def packed(self, tree: Tree) -> Tree:
        """Arrays over tokens as arrays over places."""
        return tree if self.order is None else _rows_at(tree, self.order)

    def unpacked(self, x: Array, number: int) -> Array:
        """The rows of the `number` tokens, from an array over places; for a masked token any row."""
        if self.place is not None:
            return _rows_at(x, self.place)
        return x if self.length == number else x[:number]


def _rows_at(tree: Tree, index: Array) -> Tree:
    at_index = lambda x: jnp.asarray(x).at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)  # noqa: E731
    return jax.tree.map(at_index, tree)
