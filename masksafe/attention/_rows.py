"""Attention in tiles of queries, each with all of its keys: the schedule for an accelerator, and for small problems.

A row of logits is whole, so its softmax needs no running sums, and XLA makes one kernel of it that reads the row once.
The reverse pass computes the softmax again in the same way, and needs of the forward pass only delta and what is bad;
more only if other devices have more of the keys. No loop has a length that depends on values, since the host of an
accelerator would have to wait for them.

XLA for a GPU recognises a softmax by its form: between a reduction and the row that uses it there may be operations
with a constant, such as a maximum, but no selection.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core.tiles import Tile, Tiles, divide, take, whole
from masksafe._core.typing import Array
from masksafe.attention import _block
from masksafe.attention._block import Adjustments, Cotangents, Gradients, Keys, Plan, Queries
from masksafe.attention._merge import Partial
from masksafe.attention._pairs import Block, Pairs, block_of

_F16_WEIGHTS = 2.0**8  # Weights of float16 are products with this: a weight below 6e-5 would lose digits


def attend_by_rows(plan: Plan, queries: Queries, keys: Keys, pairs: Pairs) -> Partial:
    """The results of all keys; a query that sees no key has the sum 1."""

    def one_part(part: _Part) -> Any:
        def one_tile(i: Any) -> Partial:
            tile = part.tile(i)
            block = block_of(pairs, tile, part.keys, plan.dropout_rate)
            of_tile = plan, take(queries, 3, tile), take(keys, 2, part.keys), block
            if plan.on_accelerator and not plan.is_plain:
                return _attend_by_softmax(*of_tile)
            # Divided after the product: the derivative at a masked value may overflow, but is in no sum over the row.
            return _block.attend_to_block(*of_tile).divided()

        # JAX differentiates the plain form: checkpoint, so that it recomputes each tile instead of storing it.
        return part.tiles.join_map(jax.checkpoint(one_tile) if plan.is_plain else one_tile)

    parts = map(one_part, _parts(plan, queries.q, keys.k))
    return Partial(*map(joined, zip(*parts, strict=True)))


def _attend_by_softmax(plan: Plan, queries: Queries, keys: Keys, block: Block) -> Partial:
    """Divided before the product, which XLA knows as a softmax."""
    exps, largest, total = _block.exponentials(_block.logits(plan, queries, keys, block))
    factor = _F16_WEIGHTS if keys.v.dtype == jnp.float16 else 1.0
    p = _block.drop(plan, block, exps / _block.divisor_of_exponentials(total))
    out = _block.dot_values(p * factor, keys.v) / factor
    return Partial(out, largest, jnp.where(total == 0, 1, total))


def pull_back_by_rows(plan: Plan, queries: Cotangents, keys: Keys, pairs: Pairs, sums: Adjustments) -> Gradients:
    """The cotangents of queries, keys and values, wide, and `sums` plus those of the adjustments."""
    d_q, d_k, d_v = [], [], []
    for part in _parts(plan, queries.q, keys.k):
        of_part = _pull_back_part(plan, part, queries, keys, pairs, sums)
        sums = of_part.adjustments
        d_q.append(of_part.query)
        d_k.append(_padded(of_part.key, part.keys, keys.k.shape[2]))
        d_v.append(_padded(of_part.value, part.keys, keys.k.shape[2]))
    d_k_sum = _block.times(functools.reduce(jnp.add, d_k), _block.split_scale(plan, queries.q)[1])
    return Gradients(_block.times(joined(d_q), plan.scale), d_k_sum, functools.reduce(jnp.add, d_v), sums)


def _pull_back_part(
    plan: Plan, part: "_Part", queries: Cotangents, keys: Keys, pairs: Pairs, sums: Adjustments
) -> Gradients:
    """The gradients of a part's queries, joined, and of its keys and the adjustments, summed over the tiles."""
    part_keys = take(keys, 2, part.keys)

    def one_tile(i: Any, sums: Adjustments) -> Gradients:
        tile = part.tile(i)
        of_tile = take(queries, 3, tile)
        block = block_of(pairs, tile, part.keys, plan.dropout_rate)
        d = _block.pull_back_block(plan, of_tile, part_keys, block)
        d_k = _block.dot_queries_of_rows(d.d_dots, of_tile.q)
        d_v = _block.dot_queries_of_rows(d.weights, of_tile.d_out)
        sums = sums.plus(d.d_biased, d.d_captured, block.places)
        return Gradients(_block.dot_values(d.d_dots, part_keys.k), d_k, d_v, sums)

    if part.tiles.number == 1:
        return one_tile(0, sums)

    def add_tile(carry: Any, i: Array) -> tuple[Any, Array]:
        d_k, d_v, sums = carry
        d = one_tile(i, sums)
        return (d_k + d.key, d_v + d.value, d.adjustments), d.query

    no_d_k, no_d_v = (jnp.zeros_like(x, queries.d_lse.dtype) for x in (part_keys.k, part_keys.v))
    numbers = jnp.arange(part.tiles.number, dtype=jnp.int32)
    (d_k, d_v, sums), d_q = lax.scan(add_tile, (no_d_k, no_d_v, sums), numbers)
    return Gradients(part.tiles.join(d_q), d_k, d_v, sums)


def joined(parts: Sequence[Array]) -> Array:
    return jnp.concatenate(parts, 3) if len(parts) > 1 else parts[0]


def _padded(x: Array, keys: Tile, num_keys: int) -> Array:
    """`x` of some keys as an array of all keys, 0 for the others."""
    if keys.size is num_keys or keys.size == num_keys:
        return x
    behind = num_keys - keys.start - keys.size
    return jnp.pad(x, ((0, 0), (0, 0), (keys.start, behind), (0, 0)))


# Parts and tiles. Part of the queries has the same keys, and is small enough for one tile or is gone through in a loop.


class _Part(NamedTuple):
    """Queries from `start` on, in tiles, whose keys are the same."""

    start: Any
    tiles: Tiles
    keys: Tile

    def tile(self, i: Any) -> Tile:
        """A tile of its queries."""
        tile = self.tiles.tile(i)
        return tile._replace(start=self.start + tile.start, first=self.start + tile.first)


def most_logits_at_once(plan: Plan) -> int:
    """How many logits of all problems together may be worked on, maybe in several parts."""
    return plan.sizes.row_tile_logits * (1 if plan.band is None else plan.sizes.skipping_row_tiles)


def _parts(plan: Plan, q: Array, k: Array) -> Iterator[_Part]:
    """The queries in parts: one for all, or several if a static mask hides some keys from all queries of a part."""
    sizes, length, num_keys = plan.sizes, q.shape[3], k.shape[2]
    if not all(isinstance(n, int) for n in (*q.shape, num_keys)):
        yield _Part(0, Tiles(length, length), whole(num_keys))
        return
    logits = math.prod(q.shape[:4]) * num_keys
    most_queries = max(1, sizes.row_tile_logits * length // max(1, logits))
    number = 1
    if plan.band is not None:
        number = max(1, min(sizes.skipping_row_tiles, logits // sizes.skipping_row_tile_logits))
    size = _multiple_above(-(-length // number), sizes.alignment)
    for queries, keys in parts_with_keys(plan, length, size, num_keys):
        yield _Part(queries.start, divide(queries.size, most_queries), keys)


def parts_with_keys(plan: Plan, length: int, size: int, num_keys: int) -> Iterator[tuple[Tile, Tile]]:
    """Parts of so many queries, each with the keys that some of them may see by the static mask; at least one."""
    (left, right), alignment = plan.band or (None, num_keys), plan.sizes.alignment
    for start in range(0, length, size):
        stop = min(start + size, length)
        end = max(1, min(num_keys, _multiple_above(stop + right, alignment)))
        first = 0 if left is None else max(0, start - left)
        first = min(first // alignment * alignment, end - 1)
        yield Tile(start, stop - start, start, False), Tile(first, end - first, first, False)


def _multiple_above(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment
