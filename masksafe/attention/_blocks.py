"""Blocks of pairs, and the loop over them that each pass is.

A block is some samples, key heads, queries and keys. Which ones a pass visits is a table of NumPy, which an executor
makes while tracing. A step of the loop cuts its block from the user's arrays, cleans it, computes (`_block`), and puts
the results into arrays in the user's layout, in place. So no array is padded, stacked or joined, and none is as large
as all pairs.

For example causal attention of q, k, v `[2, 1024, 4, 64]` in blocks of one sample, one key head, 512 queries and 512
keys is 24 steps: for each of 8 problems the blocks (0, 0), (512, 0) and (512, 512). A step has q, k, v `[1, 512, 1,
64]` and logits `[1, 1, 1, 512, 512]`, and changes 512 queries of o `[2, 1024, 4, 64]`, m and l `[2, 1024, 4, 1]`.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from masksafe._core import platforms
from masksafe._core.linear import with_tangent_of
from masksafe._core.masks import both
from masksafe._core.precision import widened
from masksafe._core.row_blocks import as_bits, from_bits
from masksafe._core.sharding import may_loop
from masksafe._core.tiles import Tile, if_any
from masksafe._core.typing import Array, Arrays
from masksafe.attention import _block
from masksafe.attention._block import Rows
from masksafe.attention._contract import Cotangents, any_takes_part, cleaned, cleaned_and_marked
from masksafe.attention._merge import Partial
from masksafe.attention._pairs import OVER_PAIRS, Pairs, add_at, block_of, cut, masks_any, may_see, put, with_bias
from masksafe.attention._plan import Executor, Operands, Plan, Reach
from masksafe.attention._ring import run_forward, run_reverse

Places = dict[str, Tile]
_State = TypeVar("_State")


class Blocks(NamedTuple):
    """Blocks of one size, which are visited in turn."""

    samples: int
    heads: int  # of keys
    queries: int
    keys: int
    # [blocks, 6]: the first sample, key head, query and key; and the first query and key that are in no block before.
    # The last block of an axis whose length is no multiple of the size begins before these.
    starts: np.ndarray

    @property
    def overlap(self) -> bool:
        """Whether a query or a key is in two blocks, in only one of which it counts."""
        return bool((self.starts[:, 2:4] != self.starts[:, 4:]).any())

    @property
    def varying(self) -> dict[int, np.ndarray]:
        """The columns of the starts that differ from block to block."""
        return {i: column for i, column in enumerate(self.starts.T) if (column != column[0]).any()}

    def places(self, start: Mapping[int, Any]) -> Places:
        """Where the block is whose varying starts these are; what all blocks share is a Python integer."""

        def tile(axis: str, size: int, column: int) -> Tile:
            first = start.get(column, int(self.starts[0, column]))
            own = column + 2 if axis in "ts" else column
            is_ragged = bool((self.starts[:, column] != self.starts[:, own]).any())
            return Tile(first, size, start.get(own, int(self.starts[0, own])) if is_ragged else first, is_ragged)

        return {
            axis: tile(axis, size, column) for column, (axis, size) in enumerate(zip("bkts", self[:4], strict=True))
        }


class Table(NamedTuple):
    """The blocks of a pass."""

    blocks: Sequence[Blocks]
    merges: bool  # whether the keys of a query are in several blocks
    skips: bool = False  # whether a block is skipped if the arrays mask all of its pairs
    unroll: int = 1  # how many steps are the body of a loop

    def is_whole(self, x: Operands) -> bool:
        """Whether one block has all pairs."""
        (first, *others), sizes = self.blocks, (x.k.shape[0], x.k.shape[2], x.q.shape[1], x.k.shape[1])
        return not others and len(first.starts) == 1 and first[:4] == sizes


def is_decoding(plan: Plan, x: Operands, pairs: Pairs) -> bool:
    """Whether few queries see many keys, through which a sample goes in small blocks."""
    (batch, T, N, _), (_, S, K, _) = x.q.shape, x.k.shape
    if not may_loop((x, pairs)) or T * N // max(1, K) > plan.sizes.few_queries:
        return False
    # XLA splits one product between the cores.
    return plan.sizes.fewest_keys_of_few_queries <= S and (batch > 1 or masks_any(plan, pairs))


def largest_divisor(n: int, most: int) -> int:
    """The largest divisor of `n` up to `most`, at least 1."""
    return max((d for d in range(1, min(n, most) + 1) if n % d == 0), default=1)


def starts_of_problems(x: Operands, samples: int, heads: int) -> Iterator[tuple[int, int]]:
    """The first sample and key head of every group of problems; a problem is one key head of one sample."""
    firsts = [
        range(0, number, size) if isinstance(number, int) else (0,)
        for number, size in ((x.k.shape[0], samples), (x.k.shape[2], heads))
    ]
    return ((b, k) for b in firsts[0] for k in firsts[1])


def table_of(starts: Sequence[tuple[Any, ...]]) -> np.ndarray:
    """The starts as an array, of any number of blocks."""
    return np.asarray(starts, np.int32).reshape(-1, 6)


def can_see(reach: Reach | None, queries: Tile, keys: Tile) -> bool:
    """Whether a query of a tile sees a key of another by a reach that compares indices."""
    if reach is None:
        return True
    (left, right), last_query, last_key = reach, queries.start + queries.size - 1, keys.start + keys.size - 1
    return bool(keys.start <= last_query + right and (left is None or last_key >= queries.start - left))


def tiles_with_keys(reach: Reach | None, length: int, size: int, num_keys: int, alignment: int) -> list[Any]:
    """Tiles of `size` queries, each with the keys that some of them may see by the reach, at least one."""
    left, right = reach or (None, num_keys)
    tiles = []
    for start in range(0, length, size):
        stop = min(start + size, length)
        end = max(1, min(num_keys, -(-(stop + right) // alignment) * alignment))
        first = 0 if left is None else max(0, start - left)
        first = min(first // alignment * alignment, end - 1)
        tiles.append((Tile(start, stop - start, start, False), Tile(first, end - first, first, False)))
    return tiles


def _for_blocks(table: Table, visit: Callable[[_State, Places], _State], state: _State) -> _State:
    """`state` after `visit(state, places)` for every block; one loop goes through blocks of several sizes together."""
    for number, group in itertools.groupby(table.blocks, lambda blocks: len(blocks.starts)):
        sizes = list(group)

        def step(state: _State, starts: Sequence[Mapping[int, Any]]) -> tuple[_State, None]:
            for blocks, start in zip(sizes, starts, strict=True):  # noqa: B023
                state = visit(state, blocks.places(start))
            return state, None

        if number == 1:
            state, _ = step(state, [{}] * len(sizes))
        elif number:
            state, _ = lax.scan(step, state, [blocks.varying for blocks in sizes], unroll=table.unroll)
    return state


class InBlocks(NamedTuple):
    """An executor in blocks."""

    table: Callable[..., Table]
    recomputes: bool  # whether the reverse pass computes the softmax again, of blocks that have all keys
    values: Executor | None = None  # then: what computes the values, if not the blocks

    def value(self, plan: Plan, x: Operands, pairs: Pairs) -> Arrays:
        return results(self.table, plan, x, pairs).results(plan.needs_max)

    def forward(self, plan: Plan, x: Operands, pairs: Pairs) -> tuple[Arrays, Partial]:
        if self.values is not None:
            o, lse = self.values.value(plan, x, pairs)
            return (o, lse), Partial(o[..., :1], lse[..., None], lse[..., None])
        found = results(self.table, plan, x, pairs)
        # The output as a residual is not rounded, since delta depends on it.
        residuals = found._replace(o=found.o[..., :1]) if self.recomputes else found
        return found.results(plan.needs_max), residuals

    def reverse(self, plan: Plan, x: Operands, pairs: Pairs, results: Partial, d: tuple[Array, Array]) -> Operands:
        # In a softmax that is computed again a query that sees no key has no weights.
        marks = (~jnp.isfinite(results.o), None) if self.recomputes else (None, results.m == -jnp.inf, results.o)
        found = Cotangents.of(*d, *marks)
        l = jnp.where(found.used, 1 if self.recomputes else results.l, jnp.where(found.needed, jnp.nan, 1))
        rows = Rows(found.do, found.dlse, l)
        if not self.recomputes:
            # A bad element makes all columns of an output NaN, and a query without cotangents has weights of 0.
            rows = rows._replace(m=jnp.where(found.used, results.m, jnp.inf), delta=found.delta)
        return (
            run_reverse(self._pull_back, plan, x, rows, pairs) if plan.ring else self._pull_back(plan, x, rows, pairs)
        )

    def _pull_back(self, plan: Plan, x: Operands, rows: Rows, pairs: Pairs) -> Operands:
        if plan.on_accelerator:
            # Otherwise XLA would see that the forward pass computes the same logits, and keep all of them.
            x, rows, pairs = platforms.unfused((x, rows, pairs))
        pairs = with_bias(x, pairs)
        return pull_back(plan, self.table(plan, x, pairs, in_reverse=True), x, rows, pairs)

    def marks(self, results: Partial) -> tuple[Array, Array]:
        return ~jnp.isfinite(results.o[..., 0]), results.m[..., 0] == -jnp.inf


# The layouts: the user's, and by problem, `[B, K, G, T, n]` and `[B, K, S, n]`.

_QUERIES, _KEYS = "btnh", "bskh"  # the axes of the user's arrays: n are query heads, k key heads


def queries_by_problem(x: Array, num_key_heads: int) -> Array:
    """`[B, T, N, n]` to `[B, K, G, T, n]`."""
    return jnp.moveaxis(x.reshape(*x.shape[:2], num_key_heads, x.shape[2] // num_key_heads, x.shape[3]), 1, 3)


def queries_by_user(x: Array) -> Array:
    """`[B, K, G, T, n]` to `[B, T, N, n]`."""
    x = jnp.moveaxis(x, 3, 1)
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], x.shape[4])


def keys_by_problem(x: Array) -> Array:
    """`[B, S, K, n]` to `[B, K, S, n]`, or back."""
    return jnp.swapaxes(x, 1, 2)


def _slicer(plan: Plan, x: Array, axes: str) -> Callable[[Places], Array]:
    """A function that cuts slices of an array; wide on a CPU, whose products of 16 bits are slow."""
    wide_enough = (lambda part: part) if plan.on_accelerator else widened
    if plan.is_plain:  # bits have no derivative
        return lambda places: wide_enough(cut(x, axes, places))
    bits = as_bits(x)
    return lambda places: wide_enough(from_bits(cut(bits, axes, places), x.dtype))


def _with_query_heads(x: Operands, places: Places) -> Places:
    """The places, with the query heads (n) of the key heads."""
    k, group = places["k"], x.q.shape[2] // x.k.shape[2]
    start = k.start if group == 1 else k.start * group
    return places | {"n": Tile(start, k.size * group, start, False)}


# The passes.


def results(make_table: Callable[..., Table], plan: Plan, x: Operands, pairs: Pairs) -> Partial:
    """The wide output `[B, T, N, width of v]`, with `m` and `l` `[B, T, N, 1]`; a query that sees no key has `l` 1."""
    attend = functools.partial(_attend, make_table)
    return run_forward(attend, plan, x, pairs) if plan.ring else attend(plan, x, pairs)


def _attend(make_table: Callable[..., Table], plan: Plan, x: Operands, pairs: Pairs) -> Partial:
    """The same, for the keys of one device."""
    pairs = with_bias(x, pairs)
    table = make_table(plan, x, pairs)
    is_whole = table.is_whole(x)
    # Blocks of several sizes would each clean the same keys; others do it in the cache, or in one kernel.
    has_sizes = len(table.blocks) > 1 and not plan.is_plain
    at_once = cleaned_and_marked(*x[:3], plan.scale, jointly=False) if has_sizes else None
    arrays = zip(at_once[0] if at_once else x[:3], (_QUERIES, _KEYS, _KEYS), strict=True)
    slicers = [_slicer(plan, a, axes) for a, axes in arrays]

    def visit(state: Any, places: Places) -> Any:
        at, num_key_heads, own = _with_query_heads(x, places), places["k"].size, pairs.at(places)

        def compute(before: Partial | None) -> Partial:
            q, k, v = (slice_at(at) for slice_at in slicers)
            if at_once:
                clean, bad_queries, bad_keys = (q, k, v), cut(at_once[1], "btn", at), cut(at_once[2], "bsk", at)
            else:
                clean, bad_queries, bad_keys = cleaned_and_marked(q, k, v, plan.scale)
            if plan.is_plain:  # JAX differentiates it; which results are NaN is known from the executor
                q, k, v = map(with_tangent_of, (q, k, v), clean)
                is_bad = None
            else:
                q, k, v = clean
                bad_queries = queries_by_problem(bad_queries[..., None], num_key_heads)
                is_bad = bad_queries | jnp.swapaxes(bad_keys, 1, 2)[:, :, None, None]
            q = queries_by_problem(_block.times(q, plan.scales(q)[0]), num_key_heads)
            k, v = keys_by_problem(k), keys_by_problem(v)
            return _block.attend(plan, q, k, v, block_of(plan, own, places, is_bad), before)

        def step(state: Any) -> Any:
            if not table.merges:
                # Checkpoint, so that JAX recomputes each block of the plain form, and stores none.
                new = (jax.checkpoint(compute) if plan.is_plain else compute)(None)
            else:
                before = Partial(*(queries_by_problem(cut(a, _QUERIES, at), num_key_heads) for a in state))
                # Otherwise XLA would copy all of m in each step.
                new = compute(before._replace(m=platforms.unfused(before.m)))
            by_user = Partial(*map(queries_by_user, new))
            if is_whole:
                return by_user
            return Partial(*(put(a, b, _QUERIES, at) for a, b in zip(state, by_user, strict=True)))

        condition = may_see(plan, own, places) if table.skips else None
        return step(state) if condition is None else if_any(condition, step, state)

    if is_whole:
        return visit(None, table.blocks[0].places({}))
    empty = Partial.empty(x.q[..., :1], x.v.shape[-1])
    return _for_blocks(table, visit, empty).divided() if table.merges else _for_blocks(table, visit, empty.divided())


def pull_back(plan: Plan, table: Table, x: Operands, rows: Rows, pairs: Pairs) -> Operands:
    """The cotangents; those of the bias and of captured arrays are wide, and in a ring all are."""
    is_whole, wide = table.is_whole(x), rows.dlse.dtype
    names = [name for name in Rows._fields[1:] if getattr(rows, name) is not None]
    numbers = jnp.concatenate([getattr(rows, name) for name in names], -1)
    of_queries = [_slicer(plan, a, _QUERIES) for a in (x.q, rows.do)]
    of_keys = [_slicer(plan, a, _KEYS) for a in (x.k, x.v)]
    # Whether several blocks add to the same slice.
    adds_queries = table.merges or any(blocks.overlap for blocks in table.blocks)
    adds_keys = table.merges or any(blocks.queries != x.q.shape[1] for blocks in table.blocks)

    def visit(sums: Operands, places: Places) -> Operands:
        at, num_key_heads, own = _with_query_heads(x, places), places["k"].size, pairs.at(places)

        def step(sums: Operands) -> Operands:
            q, do = (slice_at(at) for slice_at in of_queries)
            q = _block.times(cleaned(q, plan.scale), plan.scales(q)[0])
            q, do, own_numbers = (queries_by_problem(a, num_key_heads) for a in (q, do, cut(numbers, _QUERIES, at)))
            own_rows = Rows(do, **{name: own_numbers[..., i : i + 1] for i, name in enumerate(names)})
            k, v = (keys_by_problem(cleaned(slice_at(at))) for slice_at in of_keys)
            d = _block.pull_back(plan, q, own_rows, k, v, block_of(plan, own, places), transposes=not is_whole)
            dk, dv = (keys_by_problem(a if is_whole else jnp.swapaxes(a, 2, 3)) for a in (d.k, d.v))
            dq = queries_by_user(d.q)
            if not is_whole:
                dq = (add_at if adds_queries else put)(sums.q, dq, _QUERIES, at)
                dk, dv = ((add_at if adds_keys else put)(a, b, _KEYS, at) for a, b in ((sums.k, dk), (sums.v, dv)))
            bias = None if sums.bias is None or d.bias is None else add_at(sums.bias, d.bias, OVER_PAIRS, at)
            captured = tuple(a + b.astype(a.dtype) for a, b in zip(sums.captured, d.captured, strict=True))
            return Operands(dq, dk, dv, bias, captured)

        condition = may_see(plan, own, places) if table.skips else None
        if table.skips and rows.m is not None:  # a loss masks padded queries, behind which a causal mask needs no other
            condition = both(condition, any_takes_part(*(cut(a, _QUERIES, at) for a in (rows.m, rows.l))))
        return step(sums) if condition is None else if_any(condition, step, sums)

    def zeros(a: Array) -> Array:
        with jax.numpy_dtype_promotion("standard"):  # a bias may have 16 bits
            return jnp.zeros_like(a, jnp.promote_types(a.dtype, wide))

    sums = jax.tree.map(zeros, x._replace(bias=pairs.bias))
    sums = visit(sums, table.blocks[0].places({})) if is_whole else _for_blocks(table, visit, sums)
    dtypes = [wide] * 3 if plan.ring else [a.dtype for a in x[:3]]
    return sums._replace(**{n: getattr(sums, n).astype(d) for n, d in zip("qkv", dtypes, strict=True)})
