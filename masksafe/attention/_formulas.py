r"""The formulas of attention for a block of pairs, whichever loops go through the blocks.

With queries :math:`q_t`, keys :math:`k_s`, values :math:`v_s`, the logits :math:`x_{ts} = q_t \cdot k_s` (scaled,
capped, with their bias) and sums over unmasked pairs only,

.. math::
  \lambda_t = \log \sum_s e^{x_{ts}}, \qquad p_{ts} = e^{x_{ts} - \lambda_t}, \qquad o_t = \sum_s p_{ts} v_s

and with cotangents :math:`\dot o_t` of the output and :math:`\dot \lambda_t` of the logsumexp

.. math::
  \delta_t = o_t \cdot \dot o_t - \dot \lambda_t, \qquad \dot x_{ts} = p_{ts} (v_s \cdot \dot o_t - \delta_t), \qquad
  \dot q_t = \sum_s \dot x_{ts} k_s, \qquad \dot k_s = \sum_t \dot x_{ts} q_t, \qquad \dot v_s = \sum_t p_{ts} \dot o_t.

The reverse pass computes :math:`p` again (Dao, "FlashAttention-2", 2023).

Every product also contracts over masked pairs, with weight 0, and 0 times NaN is NaN. So bad elements are replaced by 0
before a product, and the few results that do depend on them are made NaN.

A problem is the work of one key head of one sample. Arrays are laid out by problem: queries and outputs
`[B, K, G, T, H]` for the G query heads that share a key head, keys and values `[B, K, S, H]`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core.sharding import vary_with
from masksafe._core.soft_cap import pulled_back, soft_capped
from masksafe._core.tiles import Tile
from masksafe._core.typing import Array
from masksafe._core.unfolded import any_of, largest_of
from masksafe.attention._mask import Pairs, add_to_block, cut, indices, once_if
from masksafe.attention._mods import KEYS_FIRST, QUERIES_FIRST, modified, modified_where
from masksafe.attention._products import keys_first, queries_first

Band = tuple[int | None, int]  # a query t sees no key before t - the first or after t + the second number


class Ring(NamedTuple):
    """Devices over which time is split, and on which keys and values go round."""

    axis_name: str | tuple[str, ...]
    size: int
    first: int  # in its first step a device works on the keys of the device so many places before it
    steps: int  # in each of the others on those of the next one before it
    band: Band | None  # as that of `Config`, but for indices among those of all devices; None if steps go past the ends


class Config(NamedTuple):
    """The static parameters."""

    scale: float
    soft_cap: float | None
    dropout_rate: float
    query_tile: int
    key_tile: int
    row_tile_logits: int  # elsewhere than on a CPU, of all keys of some queries
    band: Band | None  # what is known of the mask before the program runs
    skips: bool  # whether dead blocks are skipped, in loops whose length depends on values
    rounds: bool  # whether the output is rounded to the dtype of the queries
    ring: Ring | None = None  # None if all keys are here; else other devices have more of them


class Adjustments(NamedTuple):
    """The arrays that adjust logits and get gradients; or their cotangents, or partial sums of these."""

    bias: Array | None = None  # [B, K, G, T, S]
    captured: tuple[Array, ...] = ()  # by `score_mod`

    def of(self, pairs: Pairs) -> Pairs:
        """The pairs with these."""
        mod = pairs.score_mod
        return pairs._replace(bias=self.bias, score_mod=mod and dataclasses.replace(mod, captured=self.captured))


class Gradients(NamedTuple):
    """Cotangents of the inputs, or their partial sums."""

    query: Array
    key: Array
    value: Array
    adjustments: Adjustments


def logsumexp(largest: Array, total: Array) -> Array:
    """The logsumexp from the two parts in which it is stored."""
    return largest + jnp.log(total)


def capped_logits(config: Config, dots: Array, mask: Array | None) -> Array:
    """The products q k, scaled, after the soft cap, whose derivative must not see a bad product."""
    if config.soft_cap is None:
        return dots
    return soft_capped(dots if mask is None else jnp.where(mask, dots, 0), config.soft_cap)


def _as_it_is(x: Array) -> Array:
    return x


def adjusted(
    config: Config, capped: Array, mask: Array | None, pairs: Pairs, query_tile: Tile, key_tile: Tile
) -> Array:
    """The logits: the capped products with their bias, after `score_mod`."""
    x = _with_bias(capped, pairs, query_tile, key_tile)
    if pairs.score_mod is None:
        return x
    of_block, captured = indices(pairs, query_tile, key_tile), pairs.score_mod.captured
    if config.skips or mask is None:
        return modified(pairs.score_mod, captured, x, of_block)
    return modified_where(pairs.score_mod, captured, x, of_block, mask)  # JAX differentiates the plain form


PullBack = Callable[[Array], tuple[Array, tuple[Array, ...]]]


def adjusted_with_rule(
    capped: Array, mask: Array, pairs: Pairs, query_tile: Tile, key_tile: Tile, axes: str = QUERIES_FIRST
) -> tuple[Array, PullBack]:
    """The same, with its reverse rule, for a block in the order of `axes`.

    The rule takes the cotangent of the logits, 0 under the mask, and returns those of the capped products with their
    bias, and of what `score_mod` captured.
    """
    to_axes, to_queries_first = (keys_first, queries_first) if axes == KEYS_FIRST else (_as_it_is, _as_it_is)
    x = _with_bias(capped, pairs, query_tile, key_tile, to_axes)
    if pairs.score_mod is None:
        return x, lambda d_x: (d_x, ())
    x = jnp.where(mask, x, 0)  # garbage must not even decide whether the rule looks closer
    mod, of_block = pairs.score_mod, indices(pairs, query_tile, key_tile)
    result, reverse = jax.vjp(lambda x, captured: modified(mod, captured, x, of_block, axes), x, mod.captured)

    def pull_back(d_x: Array) -> tuple[Array, tuple[Array, ...]]:
        d_argument, d_captured = reverse(d_x)

        def leave_out_masked(_: Any) -> Any:
            block = to_queries_first(x), of_block, to_queries_first(jnp.broadcast_to(mask, x.shape))
            _, reverse = jax.vjp(lambda captured: modified_where(mod, captured, *block), mod.captured)
            return reverse(to_queries_first(d_x))[0]

        # At a masked pair the derivative may be NaN, and 0 times it, in the sums of what is captured.
        is_bad = functools.reduce(jnp.logical_or, map(has_bad, d_captured), jnp.zeros((), jnp.bool_))
        if d_captured:
            d_captured = once_if(is_bad, leave_out_masked, d_captured)
        return jnp.where(mask, d_argument, 0), d_captured

    return result, pull_back


def _with_bias(
    capped: Array, pairs: Pairs, query_tile: Tile, key_tile: Tile, to_axes: Callable[[Array], Array] = _as_it_is
) -> Array:
    if pairs.bias is None:
        return capped
    return capped + to_axes(cut(pairs.bias, pairs.problems, query_tile, key_tile).astype(capped.dtype))


def add_adjustments(
    sums: Adjustments, d_biased: Array, d_captured: tuple[Array, ...], pairs: Pairs, query_tile: Tile, key_tile: Tile
) -> Adjustments:
    """The sums plus the cotangents of a block, of its logits before `score_mod` `[B, K, G, queries, keys]`."""
    bias = sums.bias
    if bias is not None:
        bias = add_to_block(bias, d_biased, pairs.problems, query_tile, key_tile)
    return Adjustments(bias, tuple(s + d.astype(s.dtype) for s, d in zip(sums.captured, d_captured, strict=True)))


def pull_back_cap(config: Config, d_x: Array, mask: Array, capped: Array) -> Array:
    """The cotangent of the products q k from that of the logits."""
    if config.soft_cap is None:
        return d_x
    return jnp.where(mask, pulled_back(d_x, capped, config.soft_cap), 0)


def find_live_queries(out: Array, largest: Array, total: Array, d_out: Array, d_lse: Array) -> tuple[Array, Array]:
    """Which queries take part in the reverse pass, and delta; both `[B, T, N, 1]`.

    A query with no unmasked key takes no part, nor does one with a NaN whose cotangents are all 0: such a NaN has been
    selected away after the op, as a loss does with padded queries.
    """
    lse = logsumexp(largest, total)[..., None]
    wanted, delta = find_wanted_queries(out, d_out, d_lse)
    sound = jnp.isfinite(lse) & jnp.isfinite(delta)
    return (lse != -jnp.inf) & (sound | wanted), delta


def find_wanted_queries(out: Array, d_out: Array, d_lse: Array) -> tuple[Array, Array]:
    """Which queries have a cotangent that is not 0, and delta, NaN where it is infinite; both `[B, T, N, 1]`."""
    d_lse = d_lse[..., None]
    wide = jnp.promote_types(out.dtype, d_lse.dtype)
    # Columns with cotangent 0 do not count: they may hold a NaN.
    delta = jnp.sum(jnp.where(d_out == 0, 0, out.astype(wide) * d_out.astype(wide)), -1, keepdims=True) - d_lse
    return any_of(d_out != 0, -1, keepdims=True) | (d_lse != 0), delta + 0 * delta


# Scale and bad elements.


def split_scale(config: Config, q: Array) -> tuple[float, float]:
    """The factors of the queries and of the logits: the scale is applied to queries unless that would round them."""
    return (config.scale, 1.0) if q.dtype.itemsize >= 4 else (1.0, config.scale)


def finite_or_zero(x: Array, where: Array | bool = True) -> Array:
    return jnp.where(jnp.isfinite(x) & where, x, 0)


def has_bad(x: Array, axis: int | None = None) -> Array:
    """Whether any element is bad, along an axis or of all; by numbers, which a CPU reduces faster than booleans."""
    return largest_of((~jnp.isfinite(x)).astype(jnp.uint8), axis) > 0


def if_bad(x: Array, look: Callable[[], Array]) -> Array:
    """The booleans of `look()` if any element of `x` is bad, else all False."""
    # Not a loop, as in `once_if`, which XLA would give copies of all arrays: under vmap the pairs are looked at always.
    marks: Array = lax.cond(has_bad(x), look, lambda: zeros_of(look, x))
    return marks


def zeros_of(fn: Callable[[], Array], x: Array) -> Array:
    """Zeros like the result of `fn()`, which varies over the mesh axes over which `x` does."""
    like = jax.eval_shape(fn)
    if like.sharding is None and jax.sharding.get_abstract_mesh().manual_axes:  # zeros_like refuses what varies then
        zeros: Array = vary_with(jnp.zeros(like.shape, like.dtype), x)
        return zeros
    return jnp.zeros_like(like)


def is_bad(x: Array) -> Array:
    """Where any element along the last axis is bad, `[..., 1]`."""
    return any_of(~jnp.isfinite(x), -1, keepdims=True)


def nan_where(marks: Array, x: Array) -> Array:
    return x + jnp.where(marks, jnp.nan, jnp.zeros((), x.dtype))  # added, so that derivatives become NaN as well
