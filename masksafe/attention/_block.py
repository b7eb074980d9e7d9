r"""One block of pairs: its logits, its part of the outputs, and the reverse of both; schedules are loops over these.

With queries :math:`q_t`, keys :math:`k_s`, values :math:`v_s`, the logits :math:`x_{ts} = q_t \cdot k_s` (scaled,
capped, with their bias) and sums over unmasked pairs only,

.. math::
  \lambda_t = \log \sum_s e^{x_{ts}}, \qquad p_{ts} = e^{x_{ts} - \lambda_t}, \qquad o_t = \sum_s p_{ts} v_s

and with cotangents :math:`\dot o_t` of the output and :math:`\dot \lambda_t` of the logsumexp

.. math::
  \delta_t = o_t \cdot \dot o_t - \dot \lambda_t, \qquad \dot x_{ts} = p_{ts} (v_s \cdot \dot o_t - \delta_t), \qquad
  \dot q_t = \sum_s \dot x_{ts} k_s, \qquad \dot k_s = \sum_t \dot x_{ts} q_t, \qquad \dot v_s = \sum_t p_{ts} \dot o_t.

The reverse pass computes :math:`p` again (Dao, "FlashAttention-2", 2023).

Every product also contracts over masked pairs, with weight 0, and 0 times NaN is NaN. So elements that are not finite
are replaced by 0 before a product, and their query or key is called bad: the logits of its unmasked pairs are NaN, and
make NaN what depends on them.

Arrays are laid out by problem, the work of one key head of one sample: queries and outputs `[B, K, G, T, H]` for the G
query heads that share a key head, keys and values `[B, K, S, H]`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core.exponentials import shift_of
from masksafe._core.platforms import AttentionSizes
from masksafe._core.precision import wide_dtype
from masksafe._core.soft_cap import pulled_back, soft_capped
from masksafe._core.tiles import once_if
from masksafe._core.typing import Array, Arrays
from masksafe._core.unfolded import any_of
from masksafe._core.zeros import without_sign_of_zero
from masksafe.attention._merge import Partial
from masksafe.attention._mods import modified, modified_where
from masksafe.attention._pairs import Block, Pairs, PlacesByName, add_at

Band = tuple[int | None, int]  # a query t sees no key before t - the first or after t + the second number


class Ring(NamedTuple):
    """Devices over which time is split, and on which keys and values go round."""

    axis_name: str | tuple[str, ...]
    size: int
    first: int  # in its first step a device works on the keys of the device so many places before it
    steps: int  # in each of the others on those of the next one before it
    band: Band | None  # as that of `Plan`, but for indices among those of all devices; None if steps go past the ends


class Plan(NamedTuple):
    """The static parameters."""

    scale: float
    soft_cap: float | None
    dropout_rate: float
    is_causal: bool
    window: tuple[int, int] | None
    sizes: AttentionSizes
    band: Band | None  # what is known of the mask before the program runs
    rounds: bool  # whether the output is rounded to the dtype of the queries
    ring: Ring | None = None  # None if all keys are here; else other devices have more of them
    on_accelerator: bool = False
    is_plain: bool = False  # whether JAX differentiates the program: then no loop has a length that depends on values
    needs_logsumexp: bool = True  # whether anything depends on it
    is_differentiated: bool = True  # whether a reverse pass follows: in blocks it wants the largest logits and the sums


class Adjustments(NamedTuple):
    """The arrays that adjust logits and get gradients; or their cotangents, or partial sums of these."""

    bias: Array | None = None  # [B, K, G, T, S]
    captured: Arrays = ()  # by `score_mod`

    def of(self, pairs: Pairs) -> Pairs:
        """The pairs with these."""
        mod = pairs.score_mod
        return pairs._replace(bias=self.bias, score_mod=mod and dataclasses.replace(mod, captured=self.captured))

    def plus(self, d_bias: Array | None, d_captured: Arrays, places: PlacesByName) -> "Adjustments":
        """These sums plus the cotangents of the part of the bias at the places, and of what `score_mod` captured."""
        bias = None if self.bias is None or d_bias is None else add_at(self.bias, d_bias, places)
        return Adjustments(bias, tuple(s + d.astype(s.dtype) for s, d in zip(self.captured, d_captured, strict=True)))


class Inputs(NamedTuple):
    """What attention is a function of, in the user's layout but for one batch dimension."""

    q: Array  # [B, T, N, H]
    k: Array  # [B, S, K, H]
    v: Array  # [B, S, K, width]
    adjustments: Adjustments
    pairs: Pairs  # without the adjustments


class Gradients(NamedTuple):
    """Cotangents of the inputs, or their partial sums."""

    query: Array
    key: Array
    value: Array
    adjustments: Adjustments


class Keys(NamedTuple):
    """Keys and values, with 0 for bad elements."""

    k: Array
    v: Array
    is_sound: Array | None = None  # which keys are not bad, `[B, K, S, 1]`; None in the reverse pass: queries tell

    @classmethod
    def of(cls, k: Array, v: Array, is_sound: Array | None = None) -> "Keys":
        return cls(finite_or_zero(k), finite_or_zero(v), is_sound)


class Queries(NamedTuple):
    """Queries, with 0 for bad elements."""

    q: Array  # with the first factor of `split_scale`
    is_sound: Array  # which queries are not bad, `[B, K, G, T, 1]`

    @classmethod
    def of(cls, plan: Plan, q: Array, is_sound: Array) -> "Queries":
        return cls(_cleaned_queries(plan, q), is_sound)


class Cotangents(NamedTuple):
    """Queries as the reverse pass needs them, with their cotangents.

    Those whose results or cotangents are not finite have NaN for the cotangent and the largest logit. The last three
    are None if a block has all keys of its queries: then they follow from its logits.
    """

    q: Array
    d_out: Array
    d_lse: Array  # `[B, K, G, T, 1]`, as the next ones
    largest: Array | None = None
    total: Array | None = None
    delta: Array | None = None

    def cleaned(self, plan: Plan) -> "Cotangents":
        """With 0 for bad elements of the first two, and queries as in `Queries`."""
        return self._replace(q=_cleaned_queries(plan, self.q), d_out=finite_or_zero(self.d_out))


def split_scale(plan: Plan, q: Array) -> tuple[float, float]:
    """The factors of the queries and of the logits: the scale is applied to queries unless that would round them."""
    return (plan.scale, 1.0) if q.dtype.itemsize >= 4 else (1.0, plan.scale)


def _cleaned_queries(plan: Plan, q: Array) -> Array:
    return times(finite_or_zero(q), split_scale(plan, q)[0])


def finite_or_zero(x: Array) -> Array:
    return jnp.where(jnp.isfinite(x), x, x.dtype.type(0))


def are_finite(*arrays: Array) -> Array:
    """Where all elements along the last axis are finite, `[..., 1]`.

    Not by a maximum, in which XLA's library for CPUs loses a NaN. For arrays in the user's layout: of others, XLA would
    have to make a copy for each use.
    """
    return functools.reduce(jnp.logical_and, (jnp.all(jnp.isfinite(x), -1, keepdims=True) for x in arrays))


def times(x: Array, factor: float) -> Array:
    return x if factor == 1 else x * factor


# The layout by problem, and that of the user.


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


# Forward.


def attend_to_block(plan: Plan, queries: Queries, keys: Keys, block: Block) -> Partial:
    """The block's part of the outputs `[B, K, G, queries, width of v]`."""
    exps, largest, total = exponentials(logits(plan, queries, keys, block))
    return Partial(dot_values(drop(plan, block, exps), keys.v), largest, total)


def exponentials(x: Array) -> tuple[Array, Array, Array]:
    """exp(x - largest) of logits, 0 in a row without keys; and the largest and the sum of the exponentials of a row."""
    largest = lax.stop_gradient(jnp.max(x, -1, keepdims=True))
    exps = jnp.exp(x - shift_of(largest))
    return exps, largest, jnp.sum(exps, -1, keepdims=True)


def logits(plan: Plan, queries: Queries, keys: Keys, block: Block) -> Array:
    """The logits `[B, K, G, queries, keys]`: -inf at masked pairs, NaN at the others of a bad query or key."""
    x = _capped(plan, times(dot_keys(queries.q, keys.k), split_scale(plan, queries.q)[1]), block.mask)
    x = _with_bias(x, block)
    if (mod := block.score_mod) is not None and block.indices is not None:
        if plan.is_plain and block.mask is not None:
            x = modified_where(mod, mod.captured, x, block.indices, block.mask)
        else:
            x = modified(mod, mod.captured, x, block.indices)
    assert keys.is_sound is not None
    return _poisoned(x, queries.is_sound & keys.is_sound[:, :, None, None, :, 0], block.mask)


def _capped(plan: Plan, dots: Array, mask: Array | None) -> Array:
    """The scaled products after the soft cap, whose derivative must not see a bad product."""
    if plan.soft_cap is None:
        return dots
    return soft_capped(dots if mask is None else jnp.where(mask, dots, 0), plan.soft_cap)


def _with_bias(x: Array, block: Block) -> Array:
    return x if block.bias is None else x + block.bias.astype(x.dtype)


def _poisoned(x: Array, is_sound: Array, mask: Array | None) -> Array:
    x = jnp.where(is_sound, x, jnp.nan)
    return x if mask is None else jnp.where(mask, x, -jnp.inf)


def drop(plan: Plan, block: Block, p: Array) -> Array:
    return p if block.kept is None else jnp.where(block.kept, p / (1 - plan.dropout_rate), 0)


# Reverse.


class Reversed(NamedTuple):
    """Of a block: what the gradients are products and sums of."""

    weights: Array  # with dropout
    d_dots: Array  # the cotangents of the products q k, but for the scale
    d_biased: Array  # those of the logits before `score_mod`
    d_captured: Arrays  # those of what it captured


def pull_back_block(plan: Plan, queries: Cotangents, keys: Keys, block: Block) -> Reversed:
    """The reverse of `attend_to_block`; `block` has a mask."""
    mask = block.mask
    assert mask is not None
    dots = times(dot_keys(queries.q, keys.k), split_scale(plan, queries.q)[1])
    p, capped, pull_back_adjustments = _weights(plan, queries, block, dots, mask)
    weights = p
    if plan.on_accelerator:
        # The weights for the product with d_out are another kernel than those in the cotangents of the logits, which is
        # kept from reading the first.
        held = lax.optimization_barrier(dots)
        p, capped, pull_back_adjustments = _weights(plan, queries, block, held, mask)
    d_p = drop(plan, block, dot_keys(queries.d_out, keys.v))
    d_p = jnp.where(mask, d_p, 0)  # the product with a masked value may overflow
    d_x = jnp.where(mask, _slopes(queries, p, d_p), 0)
    d_biased, d_captured = pull_back_adjustments(d_x)
    d_dots = d_biased
    if plan.soft_cap is not None:
        d_dots = jnp.where(mask, pulled_back(d_biased, capped, plan.soft_cap), 0)
    return Reversed(drop(plan, block, weights), d_dots, d_biased, d_captured)


PullBack = Callable[[Array], tuple[Array, Arrays]]


def _weights(plan: Plan, queries: Cotangents, block: Block, dots: Array, mask: Array) -> tuple[Array, Array, PullBack]:
    """The weights without dropout, 0 at masked pairs; the capped products; and the rule of what comes after these."""
    capped = _capped(plan, dots, mask)
    x, pull_back_adjustments = _adjusted_with_rule(capped, mask, block)
    if queries.largest is None or queries.total is None:
        exps, _, total = exponentials(_poisoned(x, jnp.isfinite(queries.d_lse), mask))
        p = jnp.where(mask, exps / divisor_of_exponentials(total), 0)
    else:
        p = jnp.exp(jnp.where(mask, x - queries.largest, -jnp.inf)) * (1 / queries.total)
    return p, capped, pull_back_adjustments


def divisor_of_exponentials(total: Array) -> Array:
    """A sum of exponentials as a divisor: it is 1 at least, or 0, if no key is seen."""
    return jnp.maximum(total, 0.5)


def _slopes(queries: Cotangents, p: Array, d_p: Array) -> Array:
    """The cotangents of the logits from those of the weights."""
    if queries.delta is None or queries.total is None:
        # The sum, taken from the weights before they are rounded for a product, is closer than that of outputs.
        return p * (d_p - jnp.sum(p * d_p, -1, keepdims=True) + queries.d_lse)
    # The output is the value of a key that has all of the weight: there d_p - delta is d_lse plus rounding errors.
    has_all = p > jnp.where(queries.total == 1, 0.5, jnp.inf)
    return jnp.where(has_all, queries.d_lse, p * (d_p - queries.delta))


def _adjusted_with_rule(capped: Array, mask: Array, block: Block) -> tuple[Array, PullBack]:
    """The logits, the capped products with their bias after `score_mod`, and their reverse rule.

    The rule takes the cotangent of the logits, 0 under the mask, and returns those of the capped products with their
    bias, and of what `score_mod` captured.
    """
    x, mod, indices = _with_bias(capped, block), block.score_mod, block.indices
    if mod is None or indices is None:
        return x, lambda d_x: (d_x, ())
    x = jnp.where(mask, x, 0)  # a NaN here would make the rule look closer, although no unmasked pair needs it
    result, reverse = jax.vjp(lambda x, captured: modified(mod, captured, x, indices), x, mod.captured)

    def pull_back(d_x: Array) -> tuple[Array, Arrays]:
        d_argument, d_captured = reverse(d_x)

        def leave_out_masked(_: Any) -> Any:
            fn = lambda captured: modified_where(mod, captured, x, indices, mask)  # noqa: E731
            return jax.vjp(fn, mod.captured)[1](d_x)[0]

        # At a masked pair the derivative may be NaN, and 0 times it, in the sums of what is captured.
        has_bad = [any_of(~jnp.isfinite(d)) for d in d_captured]
        if d_captured:
            d_captured = once_if(functools.reduce(jnp.logical_or, has_bad), leave_out_masked, d_captured)
        return jnp.where(mask, d_argument, 0), d_captured

    return result, pull_back


# The matrix products, accumulated in the wide dtype. The G query heads of a key head are rows of one matrix.


def dot_keys(q: Array, k: Array) -> Array:
    """`[B, K, G, T, H]` and `[B, K, S, H]` to `[B, K, G, T, S]`."""
    return _dot(_merge_heads(q), k, 3, 3).reshape(*q.shape[:4], k.shape[2])


def dot_values(p: Array, v: Array) -> Array:
    """`[B, K, G, T, S]` and `[B, K, S, H]` to `[B, K, G, T, H]`."""
    return _dot(_merge_heads(p), v, 3, 2).reshape(*p.shape[:4], v.shape[3])


def dot_queries_of_rows(p: Array, q: Array) -> Array:
    """`[B, K, G, T, S]` and `[B, K, G, T, H]` to `[B, K, S, H]`."""
    return _dot(_merge_heads(p), _merge_heads(q), 2, 2)


def _merge_heads(x: Array) -> Array:
    return x.reshape(*x.shape[:2], -1, x.shape[4])


def _dot(a: Array, b: Array, axis_of_a: int, axis_of_b: int) -> Array:
    """A matrix product for every problem; weights are rounded to the dtype of the array that they multiply."""
    dimensions = (((axis_of_a,), (axis_of_b,)), ((0, 1), (0, 1)))
    product = lax.dot_general(a.astype(b.dtype), b, dimensions, preferred_element_type=wide_dtype(b.dtype))
    return without_sign_of_zero(product) if 1 in (*a.shape[2:], *b.shape[2:]) else product
