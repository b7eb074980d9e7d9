"""The schedule: for each problem, its tiles of queries and of keys. No array over all pairs is in either pass.

A problem is the work of one key head of one sample. On a CPU, large problems are solved in turn: their blocks stay in
the cache, and each problem skips the tiles that its own masks exclude. The forward pass goes through the keys with a
running maximum (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). The reverse pass does not
use the logsumexp, whose rounding error would enter every weight, but its two parts, `m` and `l`.

An accelerator is fastest with all problems in one large product, and with tiles of queries that have all of their keys:
then a softmax reads its row once. No loop there has a length that depends on values, for which the host would wait. The
reverse pass computes the softmax again in the same way, and needs from the forward pass only which queries are bad.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from masksafe._core.precision import widened
from masksafe._core.row_blocks import as_bits, from_bits
from masksafe._core.sharding import may_loop
from masksafe._core.tiles import (
    Tile,
    Tiles,
    add_to_slice,
    divide,
    element,
    for_tiles,
    loop,
    slice_at,
    take,
    whole,
    with_slice,
)
from masksafe._core.typing import Array
from masksafe.attention import _block
from masksafe.attention._block import Gradients, Rows
from masksafe.attention._contract import bad_keys, cleaned
from masksafe.attention._merge import Partial
from masksafe.attention._pairs import Pairs, add_at, block_of, masks_any, static_reach, unmasked_tiles
from masksafe.attention._plan import Operands, Plan


class Schedule(NamedTuple):
    """The sizes of a block: how many samples, key heads, queries and keys it has."""

    samples: int
    heads: int
    queries: int
    keys: int
    parts: tuple[tuple[Tile, Tile], ...]  # queries, and the keys that some of them may see by a static mask
    cuts_keys: bool = (
        False  # whether tiles of keys are cut from the user's arrays: keys that no query sees are not read
    )
    unroll: int = 1  # of the loop over problems

    @property
    def is_one_block(self) -> bool:
        """Whether a problem has only one block."""
        queries, keys = self.parts[0]
        return len(self.parts) == 1 and (self.queries, self.keys) == (queries.size, keys.size)


def schedule_on_cpu(plan: Plan, x: Operands, pairs: Pairs, *, in_reverse: bool = False) -> Schedule:
    sizes, (batch, T, N, _), (_, S, K, width) = plan.sizes, x.q.shape, x.k.shape
    parts, rows, has_masks = ((whole(T), whole(S)),), T * N // max(1, K), masks_any(plan, pairs)
    loops = may_loop((x, pairs))
    is_one_product = batch == 1 and not has_masks  # which XLA splits between the cores
    may_decode = loops and not (plan.is_plain or in_reverse or is_one_product)
    if may_decode and rows <= sizes.few_queries and sizes.fewest_keys_of_few_queries <= S:
        keys = divide(S, max(1, sizes.key_block_elements // max(1, K * width))).size
        return Schedule(1, K, T, keys, parts, cuts_keys=True)
    queries = divide(T, max(sizes.fewest_queries, sizes.query_tile // max(1, N // max(1, K)))).size
    keys = sizes.key_tile if has_masks else sizes.key_tile_if_nothing_is_skipped
    if not has_masks and isinstance(T, int) and rows <= sizes.few_queries:
        keys = S
    schedule = Schedule(batch, K, queries, divide(S, keys).size, parts)
    logits = batch * N * T * S
    if not loops or batch * K == 1 or logits < sizes.in_turn_logits_of_all:
        return schedule
    if logits >= batch * K * sizes.in_turn_logits_of_one:
        return schedule._replace(samples=1, heads=1)
    if in_reverse and logits > sizes.reverse_at_once_logits:
        return schedule._replace(samples=_largest_divisor(batch, batch * sizes.reverse_at_once_logits // logits))
    return schedule


def schedule_elsewhere(plan: Plan, x: Operands, pairs: Pairs) -> Schedule:
    sizes, (batch, T, N, _), (_, S, K, _) = plan.sizes, x.q.shape, x.k.shape
    if not all(isinstance(n, int) for n in (batch, T, N, S)):
        return Schedule(batch, K, T, S, ((whole(T), whole(S)),))
    reach = static_reach(plan, pairs)
    most = sizes.row_tile_logits * (1 if reach is None else sizes.skipping_row_tiles)
    problems = most * batch * K // max(1, batch * N * T * S)
    samples, heads, unroll = batch, K, 1
    if may_loop((x, pairs)) and problems < batch * K:
        samples = _largest_divisor(batch, problems // K)
        heads = K if problems >= K else _largest_divisor(K, problems)
        unroll = 2  # two steps in a body save launches; of more steps XLA would keep all logits
    logits, number = samples * heads * (N // max(1, K)) * T * S, 1
    if reach is not None:
        number = max(1, min(sizes.skipping_row_tiles, logits // sizes.skipping_row_tile_logits))
    size = _multiple_above(-(-T // number), sizes.alignment)
    parts = tuple(parts_with_keys(reach, T, size, S, sizes.alignment))
    queries = max(1, sizes.row_tile_logits * T // max(1, logits))
    return Schedule(samples, heads, queries, S, parts, unroll=unroll)


def _largest_divisor(n: int, most: int) -> int:
    """The largest divisor of `n` up to `most`, at least 1."""
    return max((d for d in range(1, min(n, most) + 1) if n % d == 0), default=1)


def parts_with_keys(reach: Any, length: int, size: int, num_keys: int, alignment: int) -> Sequence[tuple[Tile, Tile]]:
    """Parts of `size` queries, each with the keys that some of them may see by the static mask, at least one."""
    left, right = reach or (None, num_keys)
    parts = []
    for start in range(0, length, size):
        stop = min(start + size, length)
        end = max(1, min(num_keys, _multiple_above(stop + right, alignment)))
        first = 0 if left is None else max(0, start - left)
        first = min(first // alignment * alignment, end - 1)
        parts.append((Tile(start, stop - start, start, False), Tile(first, end - first, first, False)))
    return parts


def _multiple_above(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment


# The layout by problem, `[B, K, G, T, n]` and `[B, K, S, n]`, and the user's.


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


Places = dict[str, Tile]


def _queries_at(plan: Plan, x: Array, places: Places, num_key_heads: int) -> Array:
    group, heads = x.shape[2] // num_key_heads, places["k"]
    first = heads.start if group == 1 else heads.start * group
    own = slice_at(x, {0: (places["b"].start, places["b"].size), 2: (first, heads.size * group)})
    return queries_by_problem(own if plan.on_accelerator else widened(own), heads.size)


def _scaled(plan: Plan, q: Array) -> Array:
    return _block.times(cleaned(q, plan.scale), plan.scales(q)[0])


def _keys_at(plan: Plan, x: Array, places: Places) -> Array:
    own = _part_of_keys(x, places)
    return keys_by_problem(cleaned(own if plan.on_accelerator else widened(own)))


def _part_of_keys(x: Array, places: Places) -> Array:
    axes = {"b": 0, "s": 1, "k": 2}
    return slice_at(x, {axis: (places[name].start, places[name].size) for name, axis in axes.items() if name in places})


def _by_problem(schedule: Schedule, x: Operands, solve: Callable[[Any, Places], Any], carry: Any) -> Any:
    """The last carry, and the results `[B, K, ...]` of `solve(carry, places)` for all problems."""
    batch, num_key_heads = x.k.shape[0], x.k.shape[2]
    samples, heads = schedule.samples, schedule.heads
    if (samples, heads) == (batch, num_key_heads):
        return solve(carry, {"b": whole(batch), "k": whole(num_key_heads)})

    def step(carry: Any, n: Array) -> Any:
        steps_of_sample = jnp.int32(num_key_heads // heads)  # lax takes one dtype, and a Python number may be int64
        has_all_heads = heads == num_key_heads
        sample, head = (n, 0) if has_all_heads else (lax.div(n, steps_of_sample), lax.rem(n, steps_of_sample))
        first_sample, first_head = sample if samples == 1 else sample * samples, head if heads == 1 else head * heads
        places = {
            "b": Tile(first_sample, samples, first_sample, False),
            "k": Tile(first_head, heads, first_head, False),
        }
        return solve(carry, places)

    numbers = jnp.arange(batch * num_key_heads // (samples * heads), dtype=jnp.int32)
    carry, results = lax.scan(step, carry, numbers, unroll=schedule.unroll)
    # [steps, samples, heads, ...] to [B, K, ...]: a step has one sample, or all heads
    return carry, jax.tree.map(lambda x: x.reshape(batch, num_key_heads, *x.shape[3:]), results)


def _tiles(schedule: Schedule, queries: Tile, keys: Tile) -> tuple[Tiles, Tiles]:
    return divide(queries.size, schedule.queries), divide(keys.size, schedule.keys)


def _tile(tiles: Tiles, i: Any, within: Tile) -> Tile:
    """Tile `i` of the part `within`."""
    tile, start = tiles.tile(i), within.start
    whole_axis = isinstance(start, int) and start == 0
    return tile if whole_axis else tile._replace(start=start + tile.start, first=start + tile.first)


def _table(plan: Plan, own: Pairs, queries: Tiles, keys: Tiles) -> Any:
    """Which tiles of queries have unmasked pairs with which of keys, `[queries.number, keys.number]`; None: all."""
    if plan.is_plain or plan.on_accelerator or queries.number == keys.number == 1:
        return None
    table = unmasked_tiles(plan, own, queries, keys)
    return None if table is None or (isinstance(table, np.ndarray) and table.all()) else jnp.asarray(table)


# The passes.


def attend(plan: Plan, schedule: Schedule, x: Operands, pairs: Pairs) -> Partial:
    """The wide output `[B, T, N, width of v]`, with `m` and `l` `[B, T, N, 1]`; a query that sees no key has `l` 1."""
    width, bits = x.v.shape[-1], (as_bits(x.k), as_bits(x.v))

    def solve(_: None, places: Places) -> tuple[None, Partial]:
        q = _scaled(plan, _queries_at(plan, x.q, places, x.k.shape[2]))
        whole_keys = () if schedule.cuts_keys else tuple(_keys_at(plan, a, places) for a in (x.k, x.v))
        results = [attend_part(q, whole_keys, places, *tiles) for tiles in schedule.parts]
        return None, results[0] if len(results) == 1 else jax.tree.map(lambda *r: jnp.concatenate(r, 3), *results)

    def attend_part(q: Array, whole_keys: tuple[Array, ...], places: Places, queries: Tile, keys: Tile) -> Partial:
        query_tiles, key_tiles = _tiles(schedule, queries, keys)
        table = _table(plan, pairs.at(places), query_tiles, key_tiles)
        has_all_keys = key_tiles.number == 1

        def on_tile(i: Any) -> Partial:
            at = places | {"t": _tile(query_tiles, i, queries)}
            q_i = take(q, 3, at["t"])

            def attend_block(j: Any) -> Partial:
                here = at | {"s": _tile(key_tiles, j, keys)}
                if schedule.cuts_keys:
                    k, v = (widened(from_bits(_part_of_keys(a, here), x.k.dtype)) for a in bits)
                    block = block_of(plan, pairs._replace(bad_keys=None), here).with_bad_keys(bad_keys(k, v))
                    k, v = (keys_by_problem(cleaned(a)) for a in (k, v))
                else:
                    (k, v), block = take(whole_keys, 2, here["s"]), block_of(plan, pairs, here)
                return _block.attend(plan, q_i, k, v, block, has_all_keys=has_all_keys)

            if has_all_keys:
                return attend_block(0)
            row, empty = None if table is None else element(table, i), Partial.empty(q_i[..., :1], width)
            state = for_tiles(row, key_tiles.number, lambda j, state: state.plus(attend_block(j)), empty)
            return state.divided()

        # JAX differentiates the plain form: checkpoint, so that it recomputes each tile instead of storing it.
        return query_tiles.join_map(jax.checkpoint(on_tile) if plan.is_plain else on_tile)

    _, results = _by_problem(schedule, x, solve, None)
    return Partial(*map(queries_by_user, results))


def pull_back(plan: Plan, schedule: Schedule, x: Operands, rows: Rows, pairs: Pairs) -> Operands:
    """The cotangents; those of the bias and of captured arrays are wide, and in a ring all are."""
    wide, num_key_heads, transposes = rows.dlse.dtype, x.k.shape[2], not schedule.is_one_block
    axis_of_keys = 3 if transposes else 2
    names = [name for name in Rows._fields[1:] if getattr(rows, name) is not None]
    numbers = jnp.concatenate([getattr(rows, name) for name in names], -1)

    def solve(sums: Any, places: Places) -> tuple[Any, tuple[Array, Array, Array]]:
        q, do, numbers_here = (_queries_at(plan, a, places, num_key_heads) for a in (x.q, rows.do, numbers))
        q = _scaled(plan, q)
        k, v = (_keys_at(plan, a, places) for a in (x.k, x.v))

        def pull_back_block(state: Gradients, t: Tile, s: Tile) -> Gradients:
            here = places | {"t": t, "s": s}
            q_t, do_t, numbers_t = (take(a, 3, t) for a in (q, do, numbers_here))
            rows_t = Rows(do_t, **{name: numbers_t[..., i : i + 1] for i, name in enumerate(names)})
            d = _block.pull_back(
                plan, q_t, rows_t, *take((k, v), 2, s), block_of(plan, pairs, here), transposes=transposes
            )
            bias = None if state.bias is None or d.bias is None else add_at(state.bias, d.bias, here)
            captured = tuple(a + b.astype(a.dtype) for a, b in zip(state.captured, d.captured, strict=True))
            dq = add_to_slice(state.q, d.q, {3: (t.start, t.size)})
            return Gradients(dq, state.k + d.k, state.v + d.v, bias, captured)

        no_dk, no_dv = (jnp.zeros_like(jnp.swapaxes(a, 2, axis_of_keys), wide) for a in (k, v))
        state = Gradients(jnp.zeros_like(q, wide), no_dk, no_dv, *sums)
        for queries, keys in schedule.parts:
            state = pull_back_part(state, pull_back_block, places, queries, keys)
        dk, dv = (jnp.swapaxes(a, 2, axis_of_keys) for a in (state.k, state.v))
        dtypes = [wide] * 3 if plan.ring else [a.dtype for a in x[:3]]
        dq, dk, dv = (a.astype(dtype) for a, dtype in zip((state.q, dk, dv), dtypes, strict=True))
        return (state.bias, state.captured), (dq, dk, dv)

    def pull_back_part(state: Gradients, pull_back_block: Any, places: Places, queries: Tile, keys: Tile) -> Gradients:
        query_tiles, key_tiles = _tiles(schedule, queries, keys)
        table = _table(plan, pairs.at(places), query_tiles, key_tiles)

        def on_keys(j: Any, state: Gradients) -> Gradients:
            s = _tile(key_tiles, j, keys)
            place = {axis_of_keys: (s.start, s.size)}
            column = None if table is None else element(table, j, 1)
            add = lambda i, own_keys: pull_back_block(own_keys, _tile(query_tiles, i, queries), s)  # noqa: E731
            own_keys = state._replace(k=slice_at(state.k, place), v=slice_at(state.v, place))
            own_keys = for_tiles(column, query_tiles.number, add, own_keys)
            return own_keys._replace(k=with_slice(state.k, own_keys.k, place), v=with_slice(state.v, own_keys.v, place))

        return on_keys(0, state) if key_tiles.number == 1 else loop(0, key_tiles.number, on_keys, state)

    def zeros(a: Array) -> Array:
        with jax.numpy_dtype_promotion("standard"):  # a bias may have 16 bits
            return jnp.zeros_like(a, jnp.promote_types(a.dtype, wide))

    sums, (dq, dk, dv) = _by_problem(schedule, x, solve, jax.tree.map(zeros, (pairs.bias, x.captured)))
    return Operands(queries_by_user(dq), keys_by_problem(dk), keys_by_problem(dv), *sums)
