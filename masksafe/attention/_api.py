"""The public function: it checks the arguments, brings them to one form, and calls an implementation."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable
from typing import Any, Literal, TypedDict, Unpack, overload

import jax.numpy as jnp

from masksafe._core import arguments, platforms, sharding
from masksafe._core.arguments import message
from masksafe._core.label_checks import nan_where_bad
from masksafe._core.masks import as_mask, either
from masksafe._core.precision import wide_dtype
from masksafe._core.public_op import public_op
from masksafe._core.switches import is_checkified
from masksafe._core.typing import Array, ArrayLike
from masksafe.attention import _arguments as check
from masksafe.attention import _callable, _cudnn, _splash
from masksafe.attention._arguments import OP, Arrays
from masksafe.attention._attention import attend
from masksafe.attention._mods import trace
from masksafe.attention._plan import Kernels, Plan
from masksafe.attention._ring import ring_of
from masksafe.attention_masks import AttentionMask, check_samples


class _Options(TypedDict, total=False):
    """The parameters that the overloads have in common, besides the arrays."""

    scale: ArrayLike | None
    is_causal: bool
    query_seq_lengths: ArrayLike | None
    key_value_seq_lengths: ArrayLike | None
    local_window_size: int | tuple[int, int] | None
    implementation: Literal["xla", "cudnn", "splash"] | Callable[..., Any] | None
    query_segment_ids: ArrayLike | None
    key_value_segment_ids: ArrayLike | None
    causal_offset: ArrayLike
    logit_soft_cap: float | None
    dropout_rate: float
    dropout_key: Array | None
    sinks: ArrayLike | None
    query_positions: ArrayLike | None
    key_positions: ArrayLike | None
    score_mod: Callable[..., Any] | None
    mask_mod: Callable[..., Any] | None
    axis_name: sharding.AxisName


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: Literal[False] = False,
    **options: Unpack[_Options],
) -> Array: ...


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Array, Array]: ...


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: bool,
    **options: Unpack[_Options],
) -> Array | tuple[Array, Array]: ...


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: bool = ...,
    return_max_logit: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Array, ...]: ...


@public_op
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn", "splash"] | Callable[..., Any] | None = None,
    return_residual: bool = False,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    causal_offset: ArrayLike = 0,
    logit_soft_cap: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    sinks: ArrayLike | None = None,
    query_positions: ArrayLike | None = None,
    key_positions: ArrayLike | None = None,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    axis_name: sharding.AxisName = None,
    return_max_logit: bool = False,
) -> Array | tuple[Array, ...]:
    r"""Scaled dot-product attention, in blocks: no array of size T x S, and no work on masked blocks.

    For every head, with sums over the unmasked keys of each query,

    .. math::
      x_{ts} = \mathrm{mod}\bigl(\mathrm{cap}(\mathrm{scale} \; q_t \cdot k_s) + b_{ts}\bigr), \qquad
      o_t = \sum_s p_{ts} v_s, \qquad p_{ts} = e^{x_{ts} - \lambda_t}, \qquad \lambda_t = \log \sum_s e^{x_{ts}}

    A pair of a query and a key is masked where `mask` or `mask_mod` is False, where `bias` is -inf, or where
    `is_causal`, `local_window_size`, the lengths or the segments exclude it. A query with no unmasked key has output 0
    and logsumexp -inf.

    In shapes, B is the batch size, T the number of queries, S of keys, N of query heads, K of key heads, and H the
    width of a head. B stands for any number of batch dimensions, including none.

    Args:
      query: floats `[B, T, N, H]`.
      key: floats `[B, S, K, H]`. N is a multiple of K; each group of N / K consecutive query heads shares a key head.
      value: floats `[B, S, K, width]`; the width may differ from H.
      bias: floats that broadcast to `[B, N, T, S]`, added to the logits. -inf masks; a large negative number does not.
        Integers become floats; booleans are refused: pass them as `mask`.
      mask: booleans that broadcast to `[B, N, T, S]`; False is masked. Write a mask of each sample's keys, `[B, S]`,
        as `mask[:, None, None, :]`, and one of its queries and keys, `[B, T, S]`, as `mask[:, None]`.
      scale: factor of the logits, a number or an array of one element, which gets a gradient; by default 1 / sqrt(H).
      is_causal: query t sees the keys up to t + `causal_offset`; with positions, those at its own position or before.
      query_seq_lengths: integers `[B]` in [0, T]; queries from this index on are masked. Lengths out of range are
        clipped, and reported by `masksafe.label_checks`, which makes their sample NaN.
      key_value_seq_lengths: integers `[B]` in [0, S]; keys from this index on are masked.
      local_window_size: `(left, right)`, or one integer for both: query t sees the keys from
        t + `causal_offset` - left to t + `causal_offset` + right; with positions, as many before and after its own. One
        of the two may be negative, but not their sum: -1 is not a window without an end.
      implementation: "xla" computes in blocks, "cudnn" and "splash" by the kernels for CUDA and TPUs, or raise if these
        cannot run; None takes them where they can. A function with `jax.nn`'s keywords is your own kernel.
      return_residual: also return the logsumexp.
      query_segment_ids: integers `[B, T]`, with `key_value_segment_ids`.
      key_value_segment_ids: integers `[B, S]`. A query sees only the keys of its own segment.
      causal_offset: the position of the first query among the keys, an integer or integers `[B]`. 0 aligns the first
        query with the first key; S - T aligns the last with the last, as decoding needs.
      logit_soft_cap: the c of cap(x) = c tanh(x / c), applied before the bias; None means no cap.
      dropout_rate: probability that a weight becomes 0; the others are divided by 1 - rate.
      dropout_key: the random key. The weights that become 0 depend on it and the indices of the pair alone, which in a
        `jax.shard_map` over the batch repeat: pass `jax.random.fold_in(key, jax.lax.axis_index(name))` there.
      sinks: floats `[N]`, for each query head the logit of one more key without a value. The output is multiplied by
        sigmoid(logsumexp - sink); the logsumexp stays that of the keys. Sinks get gradients.
      query_positions: integers `[B, T]`, which causal masks and windows compare with those of keys; by default the
        index plus `causal_offset`, which cannot be given with them. They need not be sorted, and are clipped to 2^29.
      key_positions: integers `[B, S]`; by default the index. Negative positions are numbers like others.
      score_mod: a function `(logit, batch, head, query_position, key_position) -> logit`, traced for one pair and
        applied to every logit, after the bias. Floats that it closes over get gradients. Masked pairs ignore it.
      mask_mod: a function `(batch, head, query_position, key_position) -> bool`; False is masked. Blocks in which it
        is False everywhere are skipped. `masksafe.attention_masks` has some, to be joined by `&`, `|` and `~`.
      axis_name: inside `jax.shard_map`, the mesh axis, or a tuple of them, over which time is split, for ring
        attention: queries are `[B, T / n, N, H]`, keys `[B, S / n, K, H]`, `mask` and `bias` broadcast to
        `[B, N, T / n, S]`, and indices and lengths are global. Without it a device sees its own keys only.
      return_max_logit: also return the largest logit of each head.

    Returns:
      The output `[B, T, N, width]` in the dtype of `query`; with `return_residual`, a tuple of it and the logsumexp
      `[B, T, N]` in float32 (float64 for float64), with an exact gradient. 16 bits are computed in float32 and rounded
      once; the weights may also be rounded before their product with the values, as they are on an accelerator.
      With `return_max_logit` the largest :math:`x_{ts}` of each query head in the batch, `[N]`, comes last, in the same
      dtype: -inf without an unmasked pair, NaN where a logsumexp is. It is of this device alone, without a gradient.

      * The content of a masked key, value or bias changes nothing, and its gradient is exactly 0.
      * A NaN or infinity in a query, key or value makes the results of the queries of its unmasked pairs NaN, in all
        columns; so does an element beyond 2^62 / sqrt(width), also times the scale: 2^59 for a width of 64.
        One in a cotangent makes the gradients of the keys and values that its query sees NaN.
      * A query with a NaN and without a cotangent has no part in the gradient: it needs no mask if the loss has one.

    Raises:
      TypeError: also if an argument that a program is made for, such as `is_causal`, is traced.
      ValueError: also if "cudnn" or "splash" cannot run: at once, or where the program is lowered for other devices.

    Example:
      >>> import jax, jax.numpy as jnp, masksafe
      >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 4, 1, 8))
      >>> lengths = jnp.array([4, 0])  # the second sample has no context at all
      >>> out, logsumexp = masksafe.dot_product_attention(
      ...     query, key, value, key_value_seq_lengths=lengths, return_residual=True)
      >>> print(jnp.abs(out).max(axis=(1, 2, 3)) > 0, logsumexp[1, :, 0])
      [ True False] [-inf -inf -inf -inf]

    References:
      `jax.nn.dot_product_attention
      <https://docs.jax.dev/en/latest/_autosummary/jax.nn.dot_product_attention.html>`_, which it replaces:
      the arguments up to `return_residual` and their defaults are the same.

      `FlashAttention-2 <https://arxiv.org/abs/2307.08691>`_; sinks: `Xiao et al. <https://arxiv.org/abs/2309.17453>`_;
      functions of pairs: `Flex Attention <https://arxiv.org/abs/2412.05496>`_; the ring: `Liu et al.
      <https://arxiv.org/abs/2310.01889>`_.
    """
    is_causal = arguments.as_bool(OP, "is_causal", is_causal)
    return_residual = arguments.as_bool(OP, "return_residual", return_residual)
    return_max_logit = arguments.as_bool(OP, "return_max_logit", return_max_logit)
    soft_cap = arguments.if_given(
        arguments.as_number, OP, "logit_soft_cap", logit_soft_cap, lambda cap: cap > 0, "a positive number or None"
    )
    dropout_rate = arguments.as_number(
        OP, "dropout_rate", dropout_rate, lambda rate: 0 <= rate < 1, "a number in [0, 1)"
    )
    axis_name, window = sharding.as_axis_name(OP, axis_name), check.window_of(local_window_size)
    q, k, v = operands = check.operands(query, key, value)
    num_queries, num_keys = (x.shape[-3] * sharding.Devices(axis_name).size for x in (q, k))
    is_named = implementation == "splash" or callable(implementation)
    knows_numbers = axis_name is not None or is_named or arguments.is_staged(q, k, v)
    static_scale, scale = check.as_scale(scale, q, knows_numbers)
    segment_ids = {"query_segment_ids": query_segment_ids, "key_value_segment_ids": key_value_segment_ids}
    arguments.check_both_or_none(OP, "For self-attention give the same ids twice.", **segment_ids)
    if isinstance(mask_mod, AttentionMask):
        check_samples(OP, "mask_mod", mask_mod, math.prod(q.shape[:-3]))
    arrays = Arrays(
        *operands,
        scale=scale,
        bias=check.over_pairs("bias", bias, check.as_bias, q, k, num_keys),
        mask=check.over_pairs("mask", mask, as_mask, q, k, num_keys),
        query_lengths=check.per_sample("query_seq_lengths", query_seq_lengths, q),
        key_lengths=check.per_sample("key_value_seq_lengths", key_value_seq_lengths, q),
        offset=check.as_offset(causal_offset, query_positions, key_positions, q),
        query_positions=check.per_time("query_positions", query_positions, q),
        key_positions=check.per_time("key_positions", key_positions, k),
        query_segments=check.per_time("query_segment_ids", query_segment_ids, q, arguments.as_integer_array),
        key_segments=check.per_time("key_value_segment_ids", key_value_segment_ids, k, arguments.as_integer_array),
        sinks=check.as_sinks("sinks", sinks, q),
        dropout_key=check.as_dropout_key(dropout_key, dropout_rate),
        score_mod=trace("score_mod", score_mod, wide_dtype(q.dtype)),
        mask_mod=trace("mask_mod", mask_mod),
    )
    bad_samples = either(
        check.bad_lengths("query_seq_lengths", arrays.query_lengths, num_queries, q),
        check.bad_lengths("key_value_seq_lengths", arrays.key_lengths, num_keys, q),
    )
    has_positions = query_positions is not None or key_positions is not None
    has_mods = score_mod is not None or mask_mod is not None  # they get the position with the offset
    is_known = not has_positions and (arrays.offset is None or (knows_numbers and not has_mods))
    is_static = is_known and isinstance(causal_offset, numbers.Integral)
    arrays = arrays._replace(offset=None) if is_static else arrays
    reach = check.reach_of(is_causal, window, causal_offset if is_static else 0)
    ring = ring_of(axis_name, reach if is_static else None, q.shape[-3], k.shape[-3])
    sizes, rounds = platforms.choices().attention, sinks is None
    needs_lse = return_residual or arrays.sinks is not None
    plan = Plan(
        *(static_scale, soft_cap, dropout_rate, reach, sizes, rounds, ring),
        needs_lse=needs_lse,
        needs_max=return_max_logit,
        shares_segments=query_segment_ids is key_value_segment_ids is not None,
        function=_callable.Function.of(implementation) if callable(implementation) else None,
    )
    kernels = _choose_kernels(implementation, plan, arrays, return_residual)
    out, lse, max_logit = attend(plan, axis_name, kernels, is_checkified(), arrays)
    if bad_samples is not None:
        out = nan_where_bad(out, bad_samples[..., None, None, None])
        lse = nan_where_bad(lse, bad_samples[..., None, None])
        max_logit = None if max_logit is None else nan_where_bad(max_logit, jnp.any(bad_samples))
    others = *((lse,) if return_residual else ()), *(() if max_logit is None else (max_logit,))
    return (out, *others) if others else out


def _choose_kernels(implementation: object, plan: Plan, arrays: Arrays, return_residual: bool) -> Kernels:
    """Which kernels of other libraries are named, or may be taken."""
    given = {name: x for name, x in arrays._asdict().items() if x is not None}
    if plan.function is not None:
        _callable.check(plan, given)
        return Kernels()
    if implementation not in (None, "xla", "cudnn", "splash"):
        expected = "'xla', 'cudnn', 'splash', a function or None"
        raise ValueError(message(OP, "implementation", f"value {implementation!r}", expected))
    against_cudnn = functools.partial(_cudnn.reason_against, plan, given, return_residual=return_residual)
    against_splash = functools.partial(_splash.reason_against, plan, given)
    if implementation is None:
        against = against_cudnn(is_named=False), against_splash(is_named=False)
        return Kernels(*(False if reason is None else None for reason in against))
    if implementation == "cudnn" and (reason := against_cudnn(is_named=True)) is not None:
        raise ValueError(_cudnn.refusal(reason))
    if implementation == "splash" and (reason := against_splash(is_named=True)) is not None:
        raise ValueError(_splash.refusal(reason))
    return Kernels(*(True if implementation == name else None for name in Kernels._fields))
