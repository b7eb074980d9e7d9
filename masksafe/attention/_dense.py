"""Attention of small problems, whose pairs are one block: the form for a CPU where blocks have nothing to save.

Short sequences spend their time in passes over queries, keys and values rather than in products. Where no mask could
hide a bad element, none is looked for but among the keys: an infinite key may have a logit of -inf, and vanish. All
logits of a bad query are NaN or infinite, and so are the sums of its exponentials, or 0.
"""

import jax.numpy as jnp

from masksafe._core.precision import widened
from masksafe._core.tiles import Tile
from masksafe._core.typing import Array
from masksafe.attention._dropout import drop, kept
from masksafe.attention._formulas import (
    Adjustments,
    Config,
    Gradients,
    add_adjustments,
    adjusted,
    adjusted_with_rule,
    capped_logits,
    finite_or_zero,
    has_bad,
    if_bad,
    nan_where,
    pull_back_cap,
)
from masksafe.attention._heads import keys_by_problem, keys_by_user, queries_by_problem, queries_by_user
from masksafe.attention._mask import Pairs, unmasked
from masksafe.attention._products import dot_keys, dot_queries_of_rows, dot_values


def attend_densely(config: Config, q: Array, k: Array, v: Array, pairs: Pairs) -> tuple[Array, Array, Array]:
    """As `_blockwise.attend`."""
    mask = _mask_of(config, q, k, pairs)
    x = adjusted(config, _capped_products(config, q, k, mask), mask, pairs, *_all_of(q, k))
    exps, largest = _exponentials(x, q, k, mask)
    total = jnp.sum(exps, -1, keepdims=True)
    weights = drop(config, kept(config, pairs, *_all_of(q, k)), exps)
    if mask is None:
        weighted = dot_values(weights, widened(v))
        weighted = weighted + (weighted - weighted)  # NaN for an infinite value
        total = nan_where(jnp.any(_bad_keys(k), -1, keepdims=True) | (total == 0), total)
    else:
        weighted = nan_where(_see_bad_values(mask, exps, v), dot_values(weights, finite_or_zero(widened(v))))
        total = jnp.where(total == 0, 1, total)
    return weighted / total, largest, total


def pull_back_densely(
    config: Config,
    by_query: tuple[Array, ...],
    by_key: tuple[Array, Array],
    pairs: Pairs,
    sums: Adjustments,
) -> Gradients:
    """As `_blockwise.pull_back`."""
    (q, d_out, largest, total, delta, d_lse), (k, v) = by_query, by_key
    assert pairs.live_queries is not None
    live, pairs = pairs.live_queries[..., None], pairs._replace(live_queries=None)
    mask = _mask_of(config, q, k, pairs)
    capped = _capped_products(config, q, k, mask)
    is_live = live if mask is None else live & mask
    x, pull_back_adjustments = adjusted_with_rule(capped, is_live, pairs, *_all_of(q, k))
    exps, _ = _exponentials(x, q, k, mask, None if config.ring is None else largest)
    keep = kept(config, pairs, *_all_of(q, k))
    k, v = finite_or_zero(widened(k)), finite_or_zero(widened(v))
    clean_d_out = widened(d_out) if mask is None else finite_or_zero(widened(d_out), live)

    p = jnp.where(is_live, exps * (1 / total), 0)  # a bad query has NaN at masked keys, too
    d_p = drop(config, keep, dot_keys(clean_d_out, v))
    d_p = jnp.where(is_live, d_p, 0)  # the product with a masked value may overflow
    if config.ring is None:
        # The sum has the errors of the terms from which it is subtracted, and is closer than that of outputs.
        d_x = p * (d_p - jnp.sum(p * d_p, -1, keepdims=True) + (d_lse + (delta - delta)))
    else:
        # The output is the value of a key that has all of the weight: there d_p - delta is d_lse plus rounding errors.
        d_x = jnp.where((total == 1) & (p > 0.5), d_lse + (delta - delta), p * (d_p - delta))
    d_x = jnp.where(is_live, d_x, 0)
    d_biased, d_captured = pull_back_adjustments(d_x)
    d_dots = pull_back_cap(config, d_biased, is_live, capped)
    d_v = dot_queries_of_rows(drop(config, keep, p), clean_d_out)
    d_v = d_v + (d_v - d_v) if mask is None else nan_where(_seen_by_bad_cotangents(is_live, exps, d_out, live), d_v)
    sums = add_adjustments(sums, d_biased, d_captured, pairs, *_all_of(q, k))
    d_q, d_k = dot_values(d_dots, k), dot_queries_of_rows(d_dots, finite_or_zero(widened(q), live))
    return Gradients(d_q * config.scale, d_k * config.scale, d_v, sums)


def _all_of(q: Array, k: Array) -> tuple[Tile, Tile]:
    return Tile(0, q.shape[3], 0, False), Tile(0, k.shape[2], 0, False)


def _mask_of(config: Config, q: Array, k: Array, pairs: Pairs) -> Array | None:
    mask = unmasked(pairs, *_all_of(q, k))
    # A `score_mod` may forget that a logit is NaN: so bad queries and keys are looked for, as under a mask. So they are
    # in a ring: if all logits of a query overflow to -inf here, that does not make it bad, as it sees other keys, too.
    is_looked_for = pairs.score_mod is not None or config.ring is not None
    return jnp.ones((1,) * 5, jnp.bool_) if mask is None and is_looked_for else mask


def _capped_products(config: Config, q: Array, k: Array, mask: Array | None) -> Array:
    if mask is not None:
        q, k = finite_or_zero(q), finite_or_zero(k)
    return capped_logits(config, dot_keys(q, k) * config.scale, mask)


def _exponentials(
    x: Array, q: Array, k: Array, mask: Array | None, largest: Array | None = None
) -> tuple[Array, Array]:
    """exp(x - largest) of the logits x, and the largest, -inf if no key is seen; that of all keys may be given."""
    if mask is not None:
        x = jnp.where(mask, jnp.where(_bad_queries(q) | _bad_keys(k), jnp.nan, x), -jnp.inf)
    largest = jnp.max(x, -1, keepdims=True) if largest is None else largest
    return jnp.exp(x - jnp.maximum(largest, jnp.finfo(x.dtype).min)), largest


# Bad elements are looked for in the user's layout: a reduction, and a `cond` that looks closer, would have copies made
# of arrays in another.


def _bad_queries(q: Array) -> Array:
    """Which queries are bad, `[B, K, G, T, 1]`."""
    return queries_by_problem(has_bad(queries_by_user(q), -1)[..., None], q.shape[1])


def _bad_keys(k: Array) -> Array:
    """Which keys are bad, `[B, K, 1, 1, S]`."""
    return jnp.moveaxis(has_bad(keys_by_user(k), -1), 1, 2)[:, :, None, None]


def _see_bad_values(mask: Array, like: Array, v: Array) -> Array:
    """Where an output sees a bad value, `[B, K, G, T, width of v]`."""
    v = keys_by_user(v)

    def look() -> Array:
        return dot_values(jnp.where(mask, jnp.ones_like(like), 0), keys_by_problem(~jnp.isfinite(v))) > 0

    return if_bad(v, look)


def _seen_by_bad_cotangents(mask: Array, like: Array, d_out: Array, live: Array) -> Array:
    """Where a value is seen by a live query with a bad cotangent, by column, `[B, K, S, width of v]`."""
    d_out, num_key_heads = queries_by_user(d_out), d_out.shape[1]

    def look() -> Array:
        bad = queries_by_problem(~jnp.isfinite(d_out), num_key_heads) & live
        return dot_queries_of_rows(jnp.where(mask, jnp.ones_like(like), 0), bad) > 0

    return if_bad(d_out, look)
