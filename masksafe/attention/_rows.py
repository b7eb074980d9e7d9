"""The executor of last resort, in XLA's own form: tiles of queries that have all of their keys.

Taken: on an accelerator where no library's kernel runs; and on every platform for derivatives that JAX computes itself.
Why: XLA fuses a softmax that reads each row once. The loop of a CPU moves twice its bytes, in 440 times as many kernels
(values, 2x4096x8x64, causal, float32, compiled for an H100, jax 0.12; 1.6 and 280 times with the gradient).
Left out: nothing; but pairs that only arrays mask are computed.

An accelerator is fastest with all problems in one large product. The reverse pass computes the softmax again in the
same way, and needs from the forward pass only which queries are bad.
"""

from masksafe._core.sharding import may_loop
from masksafe._core.tiles import divide
from masksafe.attention._blocks import (
    Blocks,
    InBlocks,
    Table,
    largest_divisor,
    starts_of_problems,
    table_of,
    tiles_with_keys,
)
from masksafe.attention._pairs import Pairs, static_reach
from masksafe.attention._plan import Choice, Operands, Plan


def choose(choice: Choice) -> InBlocks:
    """The executor."""
    return InBlocks(table, recomputes=choice.plan.ring is None)


def table(plan: Plan, x: Operands, pairs: Pairs, *, in_reverse: bool = False) -> Table:
    """The blocks of a pass."""
    sizes, (batch, T, N, _), (_, S, K, _) = plan.sizes, x.q.shape, x.k.shape
    if not all(isinstance(n, int) for n in (batch, T, N, S)):
        return Table([Blocks(batch, K, T, S, table_of([(0,) * 6]))], merges=False)
    reach = static_reach(plan, pairs)
    most = sizes.row_tile_logits if plan.on_accelerator else sizes.row_tile_logits_of_derivatives
    problems = most * (1 if reach is None else sizes.skipping_row_tiles) * batch * K // max(1, batch * N * T * S)
    samples, heads, unroll = batch, K, 1
    if may_loop((x, pairs)) and problems < batch * K:
        samples = largest_divisor(batch, problems // K)
        heads = K if problems >= K else largest_divisor(K, problems)
        unroll = 2  # two steps in a body save launches; of more steps XLA would keep all logits
    logits, number = samples * heads * (N // max(1, K)) * T * S, 1
    if reach is not None:
        number = max(1, min(sizes.skipping_row_tiles, logits // sizes.skipping_row_tile_logits))
    size = -(-T // number // sizes.alignment) * sizes.alignment
    most_queries = max(1, most * T // max(1, logits))
    blocks = []
    for part, keys in tiles_with_keys(reach, T, size, S, sizes.alignment):
        tiles = [
            t._replace(start=part.start + t.start, first=part.start + t.first)
            for t in divide(part.size, most_queries).all
        ]
        starts = [
            (*problem, t.start, keys.start, t.first if in_reverse else t.start, keys.start)
            for problem in starts_of_problems(x, samples, heads)
            for t in tiles
        ]
        blocks.append(Blocks(samples, heads, tiles[0].size, keys.size, table_of(starts)))
    return Table(blocks, merges=False, unroll=unroll)
