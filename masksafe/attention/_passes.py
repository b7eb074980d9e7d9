"""The forward and the reverse pass for the keys that a device holds, in the form that the platform wants."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core import platforms
from masksafe._core.typing import Array
from masksafe.attention._bad_values import see_bad_values, seen_by_bad_cotangents
from masksafe.attention._blockwise import attend, pull_back
from masksafe.attention._few_queries import attend_with_few_queries, has_few_queries
from masksafe.attention._formulas import (
    Adjustments,
    Config,
    Gradients,
    find_live_queries,
    find_wanted_queries,
    nan_where,
)
from masksafe.attention._heads import Arrays, Results, queries_by_problem, run_elsewhere, run_on_cpu
from masksafe.attention._mask import Pairs
from masksafe.attention._rowwise import attend_by_row, most_logits_at_once, pull_back_by_row

Parts = tuple[Array, Array, Array]  # the output, and the logsumexp in two parts


def run_forward(config: Config, q: Array, k: Array, v: Array, adjustments: Adjustments, pairs: Pairs) -> Parts:
    """The wide output `[B, T, N, width of v]`, the largest logit and the sum of exponentials `[B, T, N]`."""

    def on_cpu(q: Array, k: Array, v: Array, pairs: Pairs) -> Parts:
        if config.skips and has_few_queries(q, k, pairs):
            return attend_with_few_queries(config, q, k, v, pairs)

        def kernel(by_query: Any, by_key: Any, pairs: Pairs, carry: None) -> Any:
            (q,), (k, v) = by_query, by_key
            return attend(config, q, k, v, pairs), (), carry

        (out, largest, total), _, _ = run_on_cpu(kernel, (q,), (k, v), pairs, None)
        return out, largest, total

    def elsewhere(q: Array, k: Array, v: Array, pairs: Pairs) -> Parts:
        def kernel(by_query: Any, by_key: Any, pairs: Pairs, carry: None) -> Any:
            (q,), (k, v) = by_query, by_key
            return attend_by_row(config, q, k, v, pairs), (), carry

        (out, largest, total), _, _ = run_elsewhere(kernel, (q,), (k, v), pairs, None, most_logits_at_once(config))
        return nan_where(see_bad_values(q, v, pairs), out), largest, total

    out, largest, total = platforms.on_cpu_or_elsewhere(on_cpu, elsewhere, q, k, v, adjustments.of(pairs))
    return out, largest[..., 0], total[..., 0]


def run_reverse(
    config: Config, q: Array, k: Array, v: Array, adjustments: Adjustments, pairs: Pairs, *results_and_cotangents: Array
) -> Gradients:
    """The cotangents of q, k and v, and those of the adjustments, which are wide.

    All are wide, and parts of sums, if other devices have more of the keys: then the results are those of all keys.
    """

    def on_cpu(q: Array, k: Array, v: Array, pairs: Pairs, *results_and_cotangents: Array) -> Results:
        _, largest, total, d_out, d_lse = results_and_cotangents
        live, delta = find_live_queries(*results_and_cotangents)

        def kernel(by_query: Any, by_key: Any, pairs: Pairs, sums: Adjustments) -> Results:
            return _as_results(config, q, k, v, pull_back(config, by_query, by_key, pairs, sums))

        by_query = q, d_out, largest[..., None], total[..., None], delta, d_lse[..., None]
        no_sums = zero_sums(adjustments, d_lse)
        pairs = mark_live_queries(pairs, live, k)
        return run_on_cpu(kernel, by_query, (k, v), pairs, no_sums, platforms.REVERSE_AT_ONCE_LOGITS)

    def elsewhere(q: Array, k: Array, v: Array, pairs: Pairs, *results_and_cotangents: Array) -> Results:
        # Else XLA would find that the forward pass computes the same logits, and keep them all from there on.
        q, k, v, pairs, results_and_cotangents = lax.optimization_barrier((q, k, v, pairs, results_and_cotangents))
        out, largest, total, d_out, d_lse = results_and_cotangents
        wanted, delta = find_wanted_queries(out, d_out, d_lse)
        pairs = mark_live_queries(pairs, wanted, k)

        def kernel(by_query: Any, by_key: Any, pairs: Pairs, sums: Adjustments) -> Results:
            return _as_results(config, q, k, v, pull_back_by_row(config, by_query, by_key, pairs, sums))

        # Of delta the kernel may take only whether it is bad, since an output is that has a cotangent.
        by_query: Arrays = (q, d_out, d_lse[..., None] + 0 * delta)
        if config.ring is not None:
            by_query = (*by_query, largest[..., None], total[..., None], delta)
        no_sums = zero_sums(adjustments, d_lse)
        d_q, (d_k, d_v), sums = run_elsewhere(kernel, by_query, (k, v), pairs, no_sums, most_logits_at_once(config))
        return d_q, (d_k, nan_where(seen_by_bad_cotangents(d_out, v, pairs), d_v)), sums

    arguments = q, k, v, adjustments.of(pairs), *results_and_cotangents
    (d_q,), (d_k, d_v), sums = platforms.on_cpu_or_elsewhere(on_cpu, elsewhere, *arguments)
    return Gradients(d_q, d_k, d_v, sums)


def _as_results(config: Config, q: Array, k: Array, v: Array, d: Gradients) -> Results:
    if config.ring is not None:
        return (d.query,), (d.key, d.value), d.adjustments
    return (d.query.astype(q.dtype),), (d.key.astype(k.dtype), d.value.astype(v.dtype)), d.adjustments


def mark_live_queries(pairs: Pairs, live: Array, k: Array) -> Pairs:
    """The pairs, of which only those of live queries, `[B, T, N, 1]`, are unmasked."""
    return pairs._replace(live_queries=queries_by_problem(live, k.shape[2])[..., 0])


def zero_sums(adjustments: Adjustments, d_lse: Array) -> Adjustments:
    """Where sums of the cotangents of the adjustments begin."""

    # Adds a 0 that depends on the cotangent: a loop in shard_map needs a carry that varies over the same axes as its
    # result.
    def zero(x: Array) -> Array:
        return jnp.zeros_like(x, jnp.promote_types(x.dtype, d_lse.dtype)) + jnp.sum(d_lse[..., :0])

    zeros: Adjustments = jax.tree.map(zero, adjustments)
    return zeros
