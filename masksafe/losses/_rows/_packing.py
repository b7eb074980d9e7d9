"""Tokens in blocks: unmasked ones are moved to the front, and only blocks that contain any are computed."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core.tiles import divisor_near, even_size, part, with_part
from masksafe._core.typing import Array, Index, Tree
from masksafe._core.unfolded import unknown


class TokenBlock(NamedTuple):
    """Some places in a row, from `start` on."""

    start: Index
    size: int
    tokens: Array | None  # those at the places; None: those of the same numbers
    live: Array | None  # which of the places are no repetition, [size, 1]; None: all

    def take(self, tree: Tree) -> Tree:
        """The rows of arrays over tokens."""
        return self.cut(tree) if self.tokens is None else _rows(tree, self.tokens)

    def cut(self, tree: Tree) -> Tree:
        """The rows of arrays over places."""
        return jax.tree.map(lambda x: part(x, {0: (self.start, self.size)}), tree)

    def put(self, x: Array, rows: Array) -> Array:
        """An array over places with other rows."""
        return with_part(x, rows, {0: (self.start, self.size)})


class Packed(NamedTuple):
    """The order of tokens in `length` places, in blocks of `size`. A place that no token has left repeats one of them.

    It repeats an unmasked one, if there is any, rather than holds zeros: 0 times an infinite weight would be NaN.
    """

    order: Array | None  # the token at each place; None: they stay as they are
    place: Array | None  # where each of the tokens is, if unmasked; None: where it was
    live: Array | None  # which places are no repetition, [length, 1]; None: all
    blocks: Array | int  # how many contain an unmasked token
    size: int
    length: int

    @classmethod
    def of(cls, number: int, live: Array | None, size: int) -> "Packed":
        """Puts those of so many tokens first that are `live`; None takes all of them."""
        size = divisor_near(number, size) if live is None else even_size(number, size)
        length = -(-number // size) * size
        if length == number and live is None:
            return cls(None, None, None, length // size, size, length)
        index = jnp.arange(length, dtype=jnp.int32)
        if live is None:
            return cls(jnp.minimum(index, number - 1), None, index[:, None] < number, length // size, size, length)
        place = jnp.cumsum(unknown(live), dtype=jnp.int32)  # counted from 1
        places = jnp.where(live, place - 1, length)
        # A place of their own for dead tokens, since an index past the end would alarm checkify.
        order = jnp.zeros(length + 1, jnp.int32).at[places].set(index[:number], wrap_negative_indices=False)[:length]
        is_live, blocks = index < place[-1], lax.div(place[-1] + (size - 1), jnp.int32(size))
        place = jnp.maximum(place, 1) - 1
        return cls(jnp.where(is_live, order, order[0]), place, is_live[:, None], blocks, size, length)

    @classmethod
    def in_place(cls, live: Array, size: int) -> "Packed":
        """Tokens that stay where they are, with the first that is left in the place of each dead one."""
        size = even_size(live.size, size)
        length = -(-live.size // size) * size
        live = jnp.pad(live, (0, length - live.size))
        order = jnp.where(live, jnp.arange(length, dtype=jnp.int32), jnp.argmax(unknown(live)).astype(jnp.int32))
        return cls(order, None, live[:, None], length // size, size, length)

    @property
    def is_one_block(self) -> bool:
        return self.size == self.length

    def block(self, i: Index) -> TokenBlock:
        places = TokenBlock(i * self.size, self.size, None, None)
        return places._replace(tokens=places.cut(self.order), live=places.cut(self.live))

    def packed(self, tree: Tree) -> Tree:
        """Arrays over tokens as arrays over places."""
        return tree if self.order is None else _rows(tree, self.order)

    def unpacked(self, x: Array, number: int) -> Array:
        """The rows of the `number` tokens of an array over places; any for a masked token."""
        if self.place is not None:
            return _rows(x, self.place)
        return x if self.length == number else x[:number]


def _rows(tree: Tree, index: Array) -> Tree:
    at_index = lambda x: x.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)  # noqa: E731
    return jax.tree.map(at_index, tree)
