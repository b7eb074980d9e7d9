"""The executor of a CPU: blocks of pairs in turn, which stay in the cache.

Taken: on a CPU, for what the executors before it leave.
Why: rows (`_rows`) take 2.9 to 3.8 times as long and 10 to 80 times the memory (2x1024x4x64 and 1x3072x4x64, causal and
with lengths, values and gradients; AMD EPYC, two cores, jax 0.12).
Left out: nothing.

Blocks that a static reach masks are not in the table. Where arrays tell what is masked, a step asks them whether any
pair of its block is unmasked, before it computes. The forward pass goes through the keys of a query with a running
maximum (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). The reverse pass does not use the
logsumexp, whose rounding error would enter every weight, but its two parts, `m` and `l`.
"""

from masksafe._core.sharding import may_loop
from masksafe._core.tiles import divide
from masksafe.attention._blocks import (
    Blocks,
    InBlocks,
    Table,
    can_see,
    is_decoding,
    largest_divisor,
    starts_of_problems,
    table_of,
)
from masksafe.attention._pairs import Pairs, masks_any, static_reach
from masksafe.attention._plan import Choice, Operands, Plan


def choose(choice: Choice) -> InBlocks:
    """The executor. If a problem is one block, the reverse pass needs no more of the values than which are bad."""
    plan, x, pairs = choice[:1] + choice[2:4]
    *_, queries, keys = _sizes(plan, x, pairs, in_reverse=True)
    is_one_block = plan.ring is None and (queries, keys) == (x.q.shape[1], x.k.shape[1])
    return InBlocks(table, recomputes=is_one_block, values=choice.values if is_one_block else None)


def table(plan: Plan, x: Operands, pairs: Pairs, *, in_reverse: bool = False) -> Table:
    """The blocks of a pass."""
    samples, heads, queries, keys = _sizes(plan, x, pairs, in_reverse=in_reverse)
    (_, T, _, _), (_, S, _, _) = x.q.shape, x.k.shape
    merges, reach = keys != S, static_reach(plan, pairs) if isinstance(T, int) and isinstance(S, int) else None
    tiles = [(t, s) for s in divide(S, keys).all for t in divide(T, queries).all if can_see(reach, t, s)]
    problems = starts_of_problems(x, samples, heads)
    # Without other keys a query of the last tile has the same results in the tile before it.
    own = (lambda t: t.first) if merges or in_reverse else (lambda t: t.start)
    starts = [(b, k, t.start, s.start, own(t), s.first) for b, k in problems for t, s in tiles]
    blocks = Blocks(samples, heads, queries, keys, table_of(starts))
    return Table([blocks], merges, skips=(queries, keys) != (T, S))


def _sizes(plan: Plan, x: Operands, pairs: Pairs, *, in_reverse: bool) -> tuple[int, int, int, int]:
    """How many samples, key heads, queries and keys a block has."""
    sizes, (batch, T, N, _), (_, S, K, width) = plan.sizes, x.q.shape, x.k.shape
    rows, has_masks, loops = T * N // max(1, K), masks_any(plan, pairs), may_loop((x, pairs))
    if not in_reverse and is_decoding(plan, x, pairs):
        return 1, K, T, divide(S, max(1, sizes.key_block_elements // max(1, K * width))).size
    queries = divide(T, max(sizes.fewest_queries, sizes.query_tile // max(1, N // max(1, K)))).size
    most = sizes.key_tile if has_masks else sizes.key_tile_if_nothing_is_skipped
    keys = S if not has_masks and isinstance(T, int) and rows <= sizes.few_queries else divide(S, most).size
    logits = batch * N * T * S
    if not loops or batch * K == 1 or logits < sizes.in_turn_logits_of_all:
        return batch, K, queries, keys
    if logits >= batch * K * sizes.in_turn_logits_of_one:
        return 1, 1, queries, keys
    if in_reverse and logits > sizes.reverse_at_once_logits:
        return largest_divisor(batch, batch * sizes.reverse_at_once_logits // logits), K, queries, keys
    return batch, K, queries, keys
