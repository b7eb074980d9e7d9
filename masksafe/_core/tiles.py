"""Dividing an axis of any length into tiles of one size; slices, loops, and what runs under a condition."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from masksafe._core.typing import Array, Index, Pytree, Tree


class Tile(NamedTuple):
    """`size` consecutive positions of an axis, from `start`; those before `first` belong to the tile before it."""

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
        first, is_ragged = i * self.size, self.size != self.length and self.length % self.size > 0
        least = min if isinstance(i, int) else jnp.minimum
        return Tile(least(first, self.length - self.size) if is_ragged else first, self.size, first, is_ragged)

    @property
    def all(self) -> list[Tile]:
        """The tiles of an axis of known length, with Python integers."""
        return [self.tile(i) for i in range(self.number)]


def divide(length: int, target: int) -> Tiles:
    """As few tiles as possible of at most `target` positions, as even as possible; one tile for a symbolic length."""
    return Tiles(length, even_size(length, target) if isinstance(length, int) else length)


def even_size(count: int, most: int) -> int:
    """The block size that splits `count` into the fewest blocks of at most `most`, of nearly equal sizes."""
    return -(-count // max(1, -(-count // most)))


def divisor_near(count: int, size: int) -> int:
    """A divisor of `count` in (`size / 2`, `size`], so that no remainder is left; if there is none, an even size."""
    return next((n for n in range(size, size // 2, -1) if count % n == 0), even_size(count, size))


def whole(length: int) -> Tile:
    """The whole axis."""
    return Tile(0, length, 0, False)


def take(tree: Tree, axis: int, tile: Tile) -> Tree:
    """The slices of the arrays in a tile of `axis`."""
    return jax.tree.map(lambda x: slice_at(x, {axis: (tile.start, tile.size)}), tree)


Places = Mapping[int, tuple[Index, int]]  # for each cut axis, the start and the size of the slice


def slice_at(x: Array, places: Places) -> Array:
    """The slice of `x` at the places; an axis without a place is whole."""
    starts, sizes = _bounds(x, places)
    if sizes == x.shape:
        return x
    if all(isinstance(start, np.integer) for start in starts):
        return lax.slice(x, starts, [start + size for start, size in zip(starts, sizes, strict=True)])
    return lax.dynamic_slice(x, starts, sizes, allow_negative_indices=False)


def with_slice(x: Array, new: Array, places: Places) -> Array:
    """`x` with `new` as the slice at the places."""
    starts, sizes = _bounds(x, places)
    return new if sizes == x.shape else lax.dynamic_update_slice(x, new, starts, allow_negative_indices=False)


def add_to_slice(x: Array, addend: Array, places: Places) -> Array:
    """`x` with `addend` added to the slice at the places."""
    return with_slice(x, slice_at(x, places) + addend, places)


def _bounds(x: Array, places: Places) -> tuple[list[Pytree], tuple[int, ...]]:
    found = [places.get(axis, (0, n)) for axis, n in enumerate(x.shape)]
    starts = [np.int32(start) if isinstance(start, int) else start.astype(jnp.int32) for start, _ in found]
    return starts, tuple(size for _, size in found)  # JAX refuses starts of several integer types


def loop(start: int, stop: Array | int, body: Callable[[Index, Tree], Tree], state: Tree) -> Tree:
    """`lax.fori_loop` whose index is int32, as are all indices, under `jax_enable_x64` as well."""
    return lax.fori_loop(np.int32(start), stop, body, state)


def once_if(condition: Array, fn: Callable[[Tree], Tree], state: Tree) -> Tree:
    """`fn(state)` if the condition holds, under vmap for any example, else `state`.

    A loop, since under vmap a `lax.cond` may always run `fn`.
    """
    condition = _for_any_example(condition)

    def body(carry: tuple[Array, Tree]) -> tuple[Array, Tree]:
        return jnp.zeros_like(condition), fn(carry[1])

    return lax.while_loop(lambda carry: carry[0], body, (condition, state))[1]


def if_any(condition: Array, fn: Callable[[Tree], Tree], state: Tree) -> Tree:
    """`fn(state)` if the condition holds, under vmap for any example, else `state`; not differentiated."""
    return lax.cond(_for_any_example(condition), fn, lambda state: state, state)


@custom_vmap
def _for_any_example(condition: Array) -> Array:
    """A condition that is the same for all examples of a batch."""
    # Otherwise XLA computes what depends on no example (jax 0.12, soft labels 16x2048x256: 7 times as long on a CPU).
    return condition


@_for_any_example.def_vmap
def _(_: int, __: Sequence[bool], conditions: Array) -> tuple[Array, bool]:
    return _for_any_example(jnp.any(conditions)), False
