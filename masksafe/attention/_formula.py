r"""The executor of values on a CPU: the textbook's formula, :math:`\mathrm{softmax}(x) v`, for XLA's CPU compiler.

Taken: for values on a CPU, with up to 1,024 keys under a static mask and 511 under another one, any number without one;
also as the forward pass of a gradient whose problems are one block each.
Why: the loop takes 1.07 to 1.27 times as long (2x1024x4x64, 24x96x6x64, 8x512x8x64, causal; AMD EPYC, jax 0.12).
Left out: dropout, functions of pairs, positions, a ring, the largest logit; and jax 0.10, whose XLA lacks the library.

XLA makes one kernel of two products and the softmax between them, which writes only the output. A kernel contains no
selection and no comparison, and no NaN may enter it: so a mask is a minimum with :math:`\pm\infty`, and the contract is
kept around the kernel. Blocks are used where enough of them may be masked as a whole, since a kernel goes through all
keys of its queries.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core import platforms
from masksafe._core.linear import with_tangent_of, without_sign_of_zero
from masksafe._core.precision import wide_dtype, widened
from masksafe._core.sharding import may_loop
from masksafe._core.soft_cap import soft_capped
from masksafe._core.tiles import Tile, take
from masksafe._core.typing import Array
from masksafe.attention._block import times
from masksafe.attention._blocks import (
    is_decoding,
    keys_by_problem,
    queries_by_problem,
    queries_by_user,
    tiles_with_keys,
)
from masksafe.attention._kernels import InContract, Kernel
from masksafe.attention._pairs import OVER_PAIRS, Pairs, all_unmasked, cut, masks_any, static_reach
from masksafe.attention._plan import Choice, Operands, Plan, Reach


def choose(choice: Choice) -> InContract | None:
    """The executor for values, or None where blocks are faster."""
    plan, x, pairs = choice.plan, choice.x, choice.pairs
    sizes, rows, num_keys = plan.sizes, math.prod(x.q.shape[:3]), x.k.shape[1]
    if not platforms.choices().has_fusion_library or not serves(choice) or is_decoding(plan, x, pairs):
        return None
    if rows < (sizes.fewest_rows_of_kernels if num_keys <= sizes.key_tile else sizes.fewest_rows_of_one_kernel):
        return None
    if max((a.size for a in (pairs.allowed, pairs.bias) if a is not None), default=0) > 2 * x.q.size:
        return None
    # Up to this many keys blocks, some of which may be skipped, are not faster.
    most = sizes.most_keys_of_kernels if pairs.have_no_arrays else sizes.key_tile - 1
    return InContract(Formula(plan.reach)) if num_keys <= most or not masks_any(plan, pairs) else None


def serves(choice: Choice) -> bool:
    """Whether the kernel can compute the call."""
    plan, pairs = choice.plan, choice.pairs
    has_static_reach = plan.reach is None or static_reach(plan, pairs) is not None
    others = pairs.score_mod, pairs.mask_mod, pairs.words, plan.ring
    return has_static_reach and not plan.needs_max and may_loop((choice.x, pairs)) and all(a is None for a in others)


@dataclasses.dataclass(frozen=True)
class Formula(Kernel):
    """The kernel for a static reach."""

    reach: Reach | None

    def prepare(self, plan: Plan, x: Operands, pairs: Pairs, sees_any: Any) -> Any:
        """Queries `[B, K, G, T, H]`, scaled, keys `[B, K, H, S]`, values `[B, K, S, width]`, bias and limit."""
        q, k, v = x[:3]
        if not (q.dtype == jnp.bfloat16 and k.shape[1] >= plan.sizes.fewest_keys_of_bfloat16):
            q, k, v = map(widened, (q, k, v))
        wide = jnp.finfo(wide_dtype(q.dtype))
        q = times(q, plan.scales(q)[0])
        bias, limit = pairs.bias, None
        if bias is not None:
            bias = jnp.where(jnp.isfinite(bias), bias, 0).astype(wide.dtype)
        mask = all_unmasked(plan, pairs, q.shape[1], k.shape[1])
        if mask is not None:
            # A query without a key is computed as if it saw all keys.
            mask = mask if sees_any is None else mask | ~sees_any[..., None]
            limit = jnp.where(mask, wide.dtype.type(jnp.inf), wide.dtype.type(-jnp.inf))
        return queries_by_problem(q, k.shape[2]), jnp.moveaxis(k, 1, 3), keys_by_problem(v), bias, limit

    def run(self, plan: Plan, prepared: Any) -> tuple[Array, Array]:
        """The output `[B, T, N, width]`, wide, and the logsumexp `[B, T, N]`."""
        queries, keys, values, bias, limit = prepared
        batch, num_key_heads, group, num_queries, _ = queries.shape
        lowest = float(jnp.finfo(wide_dtype(queries.dtype)).min)
        # All queries, or fewer if a static mask hides keys from a tile.
        rows = batch * num_key_heads * group
        least = max(plan.sizes.fewest_queries_of_kernels, -(-plan.sizes.fewest_rows_of_one_kernel // rows))
        size = num_queries if self.reach is None else -(-num_queries // max(1, num_queries // least))
        parts = tiles_with_keys(self.reach, num_queries, size, keys.shape[3], plan.sizes.alignment)

        def logits(tile: Tile, seen: Tile, queries: Array, keys: Array) -> Array:
            x = _dot(take(queries, 3, tile), take(keys, 3, seen))
            x = soft_capped(times(x, plan.scales(queries)[1]), plan.soft_cap)
            if bias is not None:
                x = jnp.maximum(x + cut(bias, OVER_PAIRS, {"t": tile, "s": seen}), lowest)  # -inf is masked
            if limit is None:
                return x
            # With the derivative of x: the softmax already gives masked logits none.
            return with_tangent_of(x, jnp.minimum(x, cut(limit, OVER_PAIRS, {"t": tile, "s": seen})))

        def joined(results: list[Array]) -> Array:
            return queries_by_user(jnp.concatenate(results, 3) if len(results) > 1 else results[0])

        o = joined([_dot(jax.nn.softmax(logits(t, s, queries, keys)), take(values, 2, s)) for t, s in parts])
        if not plan.needs_lse:
            return o, jnp.zeros_like(o[..., 0])
        # Otherwise XLA would write the logits to memory, for both uses.
        held = lax.optimization_barrier((queries, keys))
        return o, joined([jax.nn.logsumexp(logits(t, s, *held), -1, keepdims=True) for t, s in parts])[..., 0]


def _dot(a: Array, b: Array) -> Array:
    """The products `[B, K, G, T, n]` of `a` `[B, K, G, T, m]` with `b` `[B, K, m, n]`.

    One matrix with the rows of all query heads of a key head would be slower: the library would reshape the logits.
    """
    repeated = jnp.broadcast_to(b[:, :, None], (*a.shape[:3], *b.shape[2:]))
    dimensions, wide = (((4,), (3,)), ((0, 1, 2), (0, 1, 2))), wide_dtype(b.dtype)
    product = lax.dot_general(a.astype(b.dtype), repeated, dimensions, preferred_element_type=wide)
    return without_sign_of_zero(product) if 1 in (*a.shape[3:], b.shape[3]) else product
