r"""One block of pairs: its logits, its part of the outputs, and the reverse of both. `_blocks` has the loop.

With queries :math:`q_t`, keys :math:`k_s`, values :math:`v_s`, the logits :math:`x_{ts} = q_t \cdot k_s` (scaled,
capped, with their bias) and sums over unmasked pairs only,

.. math::
  \lambda_t = \log \sum_s e^{x_{ts}}, \qquad p_{ts} = e^{x_{ts} - \lambda_t}, \qquad o_t = \sum_s p_{ts} v_s

and with cotangents :math:`\dot o_t` of the output and :math:`\dot \lambda_t` of the logsumexp

.. math::
  \delta_t = o_t \cdot \dot o_t - \dot \lambda_t, \qquad \dot x_{ts} = p_{ts} (v_s \cdot \dot o_t - \delta_t), \qquad
  \dot q_t = \sum_s \dot x_{ts} k_s, \qquad \dot k_s = \sum_t \dot x_{ts} q_t, \qquad \dot v_s = \sum_t p_{ts} \dot o_t.

The reverse pass computes :math:`p` again (Dao, "FlashAttention-2", 2023).

Every product also contracts over masked pairs, with weight 0, and 0 times NaN is NaN. So the arrays here are clean,
with 0 for bad elements, and the block says which queries and keys are bad: the logits of their unmasked pairs are NaN,
and so is all that depends on these.

The plain form treats tangents in the same way: those that are not finite become 0, and make the tangents of the logits
NaN. But its logits are finite, so that a query without a cotangent has no part in any derivative. Which results are NaN
is known from the kernels, whose derivatives it computes.

Arrays are laid out by problem, the work of one key head of one sample: queries and outputs `[B, K, G, T, H]` for the G
query heads that share a key head, keys and values `[B, K, S, H]`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core.exponentials import shift_of
from masksafe._core.linear import finite_or_zero, with_finite_cotangent, without_sign_of_zero
from masksafe._core.precision import wide_dtype
from masksafe._core.run_time import any_of
from masksafe._core.soft_cap import soft_capped
from masksafe._core.tiles import once_if
from masksafe._core.typing import Array, Arrays
from masksafe.attention._merge import Partial
from masksafe.attention._mods import modified, modified_where
from masksafe.attention._pairs import Block
from masksafe.attention._plan import Plan

# Forward.


def attend(plan: Plan, q: Array, k: Array, v: Array, block: Block, before: Partial | None = None) -> Partial:
    """The outputs `[B, K, G, queries, width of v]` for the keys of the block, which are all keys.

    With `before`, the results for other keys, those for both: sums that are not divided yet.
    """
    if plan.is_plain:
        return _attend_plainly(plan, q, k, v, block)
    x = logits(plan, q, k, block)
    # A NaN has no part in what is computed: XLA for a CPU gives -inf as the maximum of NaN alone, and any number as the
    # exp of a NaN that it knows from a selection.
    is_nan = jnp.isnan(x)
    exps, m = exponentials(jnp.where(is_nan, 0, x), None if before is None else before.m)
    exps = jnp.where(is_nan, jnp.nan, exps)
    l = jnp.sum(exps, -1, keepdims=True)
    if before is not None:
        decay = jnp.exp(before.m - shift_of(m))
        return Partial(before.o * decay + dot_values(drop(plan, block, exps), v), m, before.l * decay + l)
    if plan.on_accelerator:  # divided before the product, which XLA knows as a softmax
        o = dot_values(drop(plan, block, exps / divisor_of_exponentials(l)), v)
        return Partial(o, m, jnp.where(l == 0, 1, l))
    return Partial(dot_values(drop(plan, block, exps), v), m, l).divided()


def _attend_plainly(plan: Plan, q: Array, k: Array, v: Array, block: Block) -> Partial:
    trace = trace_of(q) + (trace_of(k) + trace_of(v))[:, :, None, None, :, 0]
    q, k, v = map(finite_or_zero, (q, k, v))
    exps, m = exponentials(logits(plan, q, k, block, trace))
    o = dot_values(drop(plan, block, exps), v)
    if block.shows is not None:
        # The NaN shows in the tangents of the weights: in those of the cotangents it would reach masked keys.
        o = jnp.where(block.shows, with_finite_cotangent(o), o)
    # Divided after the product: the derivative at a masked value may overflow, but is in no sum over the row.
    return Partial(o, m, jnp.sum(exps, -1, keepdims=True)).divided()


def exponentials(x: Array, lowest: Array | None = None) -> tuple[Array, Array]:
    """exp(x - m) of logits, 0 in a row without keys, and the largest logit m of the row, at least `lowest`."""
    m = lax.stop_gradient(jnp.max(x, -1, keepdims=True))
    m = m if lowest is None else jnp.maximum(m, lowest)
    return jnp.exp(x - shift_of(m)), m


def divisor_of_exponentials(l: Array) -> Array:
    """A sum of exponentials as a divisor: it is at least 1, or 0 if the query sees no key."""
    return jnp.maximum(l, 0.5)


def logits(plan: Plan, q: Array, k: Array, block: Block, trace: Array | None = None) -> Array:
    """The logits `[B, K, G, queries, keys]`: -inf at masked pairs, NaN at the others of a bad query or key.

    In the plain form, which has no NaN of its own, they have the tangent of the trace.
    """
    captured = () if block.score_mod is None else block.score_mod.captured
    x = _adjusted(plan, times(dot_keys(q, k), plan.scales(q)[1]), block, block.bias, captured)
    if trace is None:
        return _masked(x, block)
    x = x if block.bias is None and block.score_mod is None else jnp.where(x < jnp.inf, x, 0)
    trace = trace.astype(x.dtype)
    x = x + (trace if block.shows is None else jnp.where(block.shows, trace, 0))
    return x if block.mask is None else jnp.where(block.mask, x, -jnp.inf)


def times(x: Array, factor: float) -> Array:
    return x if factor == 1 else x * factor


def trace_of(x: Array) -> Array:
    """0 `[..., 1]`, whose tangent is NaN where a tangent along the last axis of `x` is not finite."""
    return jnp.sum(0 * x, -1, keepdims=True)


def _adjusted(plan: Plan, x: Array, block: Block, bias: Array | None, captured: Arrays) -> Array:
    """The scaled products after the soft cap, with the bias, after `score_mod`."""
    if plan.is_plain and plan.soft_cap is not None and block.mask is not None:
        x = jnp.where(block.mask, x, 0)  # a tangent of the product may overflow, and the cap would multiply it by 0
    x = soft_capped(x, plan.soft_cap)
    x = x if bias is None else x + bias.astype(x.dtype)
    if block.score_mod is None or block.indices is None:
        return x
    if plan.is_plain and block.mask is not None:
        return modified_where(block.score_mod, captured, x, block.indices, block.mask)
    return modified(block.score_mod, captured, x, block.indices)


def _masked(x: Array, block: Block) -> Array:
    x = x if block.is_bad is None else jnp.where(block.is_bad, jnp.nan, x)
    return x if block.mask is None else jnp.where(block.mask, x, -jnp.inf)


def drop(plan: Plan, block: Block, p: Array) -> Array:
    return p if block.kept is None else jnp.where(block.kept, p / (1 - plan.dropout_rate), 0)


# Reverse.


class Rows(NamedTuple):
    """What the reverse pass needs of queries besides `q`; all but `do` are `[..., 1]`."""

    do: Array
    dlse: Array
    l: Array  # the sum of exponentials; NaN for a bad query
    # None if a block has all keys of its queries: then these follow from its logits, and a good query has an `l` of 1.
    m: Array | None = None  # inf for a query without good cotangents, which makes its weights 0 (or NaN, by `l`)
    delta: Array | None = None


class Gradients(NamedTuple):
    """Cotangents, wide, or parts of their sums; those of keys and values may be transposed, `[..., H, S]`."""

    q: Array
    k: Array
    v: Array
    bias: Array | None
    captured: Arrays


def pull_back(plan: Plan, q: Array, rows: Rows, k: Array, v: Array, block: Block, *, transposes: bool) -> Gradients:
    """The reverse of `attend`. With `transposes` the cotangents of keys and values are transposed, not the block."""
    query_factor, logit_factor = plan.scales(q)
    p, pull_back_adjustments = _weights(times(dots := dot_keys(q, k), logit_factor), plan, rows, block)
    weights = p
    if plan.on_accelerator:
        # The weights in the cotangents of the logits are computed again, so that XLA fuses them, rather than read those
        # for the product with `do`.
        p, pull_back_adjustments = _weights(times(lax.optimization_barrier(dots), logit_factor), plan, rows, block)
    dp = _selected(drop(plan, block, dot_keys(rows.do, v)), block)  # the product with a masked value may be very large
    dx = _selected(_slopes(rows, p, dp), block)
    ds, d_biased, d_captured = pull_back_adjustments(dx)
    ds = times(ds, logit_factor)
    weights = drop(plan, block, weights)
    dk, dv = (dot_queries(b, a) if transposes else dot_queries(a, b) for a, b in ((ds, q), (weights, rows.do)))
    return Gradients(times(dot_values(ds, k), query_factor), dk, dv, d_biased, d_captured)


def _selected(x: Array, block: Block) -> Array:
    return x if block.mask is None else jnp.where(block.mask, x, 0)


PullBack = Callable[[Array], tuple[Array, Array | None, Arrays]]


def _weights(x: Array, plan: Plan, rows: Rows, block: Block) -> tuple[Array, PullBack]:
    """The weights without dropout, 0 at masked pairs, and the reverse rule from logits to scaled products."""
    x, pull_back_adjustments = _adjusted_with_rule(plan, x, block)
    if not (block.bias is None and block.score_mod is None):
        x = jnp.where(x < jnp.inf, x, 0)  # only a bad query, or one without a cotangent, has a NaN or infinity
    if rows.m is not None:
        p = jnp.exp(x - rows.m) * (1 / rows.l)
    else:
        exps, _ = exponentials(_masked(x, block))
        p = exps / divisor_of_exponentials(jnp.sum(exps, -1, keepdims=True)) * rows.l
    return _selected(p, block), pull_back_adjustments


def _slopes(rows: Rows, p: Array, dp: Array) -> Array:
    """The cotangents of the logits from those of the weights."""
    if rows.delta is None:
        # This sum uses weights that are not rounded for a product: it is more exact than `delta` from outputs.
        return p * (dp - jnp.sum(p * dp, -1, keepdims=True) + rows.dlse)
    # A key with all of the weight gives the output its value: there dp - delta is dlse plus rounding errors.
    has_all = p > jnp.where(rows.l == 1, 0.5, jnp.inf)
    return jnp.where(has_all, rows.dlse, p * (dp - rows.delta))


def _adjusted_with_rule(plan: Plan, x: Array, block: Block) -> tuple[Array, PullBack]:
    """The logits before they are masked, and their reverse rule.

    The rule takes the cotangent of the logits, 0 under the mask. It returns those of the scaled products, of the logits
    before `score_mod`, and of the arrays that `score_mod` captured.
    """
    mod = block.score_mod
    if mod is None:
        if plan.soft_cap is None:
            return _adjusted(plan, x, block, block.bias, ()), lambda dx: (dx, dx, ())
        capped, pull_back_cap = jax.vjp(lambda x: _adjusted(plan, x, block, None, ()), x)
        biased = capped if block.bias is None else capped + block.bias.astype(x.dtype)
        return biased, lambda dx: (*pull_back_cap(dx), dx, ())
    assert block.indices is not None
    without = block._replace(score_mod=None)
    biased, pull_back_biased = _adjusted_with_rule(plan, x, without)
    mask, indices = block.mask, block.indices
    # A NaN under the mask would start the second pass of the rule, although no unmasked pair needs it.
    biased = biased if mask is None else jnp.where(mask, biased, 0)
    result, reverse = jax.vjp(lambda x, captured: modified(mod, captured, x, indices), biased, mod.captured)

    def pull_back_mod(dx: Array) -> tuple[Array, Array | None, Arrays]:
        d_biased, d_captured = reverse(dx)

        def leave_out_masked(_: Any) -> Any:
            assert mask is not None
            fn = lambda captured: modified_where(mod, captured, biased, indices, mask)  # noqa: E731
            return jax.vjp(fn, mod.captured)[1](dx)[0]

        # At a masked pair the derivative may be NaN; 0 times it would be in the sums for captured arrays.
        if d_captured and mask is not None:
            has_bad = functools.reduce(jnp.logical_or, (any_of(~jnp.isfinite(d)) for d in d_captured))
            d_captured = once_if(has_bad, leave_out_masked, d_captured)
        return (*pull_back_biased(_selected(d_biased, block))[:2], d_captured)

    return result, pull_back_mod


# The matrix products, accumulated in the wide dtype. The G query heads of a key head are rows of one matrix.


def dot_keys(q: Array, k: Array) -> Array:
    """`[B, K, G, T, H]` and `[B, K, S, H]` to `[B, K, G, T, S]`."""
    return _dot(_merge_heads(q), k, 3, 3).reshape(*q.shape[:4], k.shape[2])


def dot_values(p: Array, v: Array) -> Array:
    """`[B, K, G, T, S]` and `[B, K, S, H]` to `[B, K, G, T, H]`."""
    return _dot(_merge_heads(p), v, 3, 2).reshape(*p.shape[:4], v.shape[3])


def dot_queries(a: Array, b: Array) -> Array:
    """`[B, K, G, T, m]` and `[B, K, G, T, n]` to `[B, K, m, n]`."""
    narrow = min(a.dtype, b.dtype, key=lambda dtype: dtype.itemsize)
    return _dot(_merge_heads(a.astype(narrow)), _merge_heads(b.astype(narrow)), 2, 2)


def _merge_heads(x: Array) -> Array:
    return x.reshape(*x.shape[:2], -1, x.shape[4])


def _dot(a: Array, b: Array, axis_of_a: int, axis_of_b: int) -> Array:
    """A matrix product for every problem; `a` is rounded to the dtype of `b`."""
    dimensions = (((axis_of_a,), (axis_of_b,)), ((0, 1), (0, 1)))
    product = lax.dot_general(a.astype(b.dtype), b, dimensions, preferred_element_type=wide_dtype(b.dtype))
    return without_sign_of_zero(product) if 1 in (*a.shape[2:], *b.shape[2:]) else product
