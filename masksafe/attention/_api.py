"""The public function: checks the arguments, brings them to one form and calls an implementation."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np

from masksafe._core import arguments, platforms, sharding
from masksafe._core.arguments import message
from masksafe._core.label_checks import check_elements, nan_where_bad
from masksafe._core.masks import as_mask, either
from masksafe._core.own_shard_map import is_checkified
from masksafe._core.precision import wide_dtype
from masksafe._core.public_op import public_op
from masksafe._core.sharding import AxisName
from masksafe._core.typing import Array, ArrayLike
from masksafe.attention import _cudnn
from masksafe.attention._attention import attend
from masksafe.attention._dropout import draw_words
from masksafe.attention._mods import Mod, trace
from masksafe.attention._pairs import Pairs
from masksafe.attention._plan import Kernels, Operands, Plan, Reach
from masksafe.attention._ring import ring_of
from masksafe.attention_masks import AttentionMask, as_window, check_samples

_OP = "dot_product_attention"

_HEADS_FIRST = (
    "Time comes before heads, [batch, time, heads, head_dim]: give arrays [batch, heads, time, head_dim] as "
    "jnp.swapaxes(x, -3, -2)."
)

_FARTHEST = 2**29  # lengths and offsets are clipped to this, windows to twice this, so that sums of them fit int32


class _Options(TypedDict, total=False):
    """The parameters that the overloads have in common, besides the arrays."""

    scale: ArrayLike | None
    is_causal: bool
    query_seq_lengths: ArrayLike | None
    key_value_seq_lengths: ArrayLike | None
    local_window_size: int | tuple[int, int] | None
    implementation: Literal["xla", "cudnn", "splash"] | None
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
    axis_name: str | None


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
    implementation: Literal["xla", "cudnn", "splash"] | None = None,
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
    axis_name: str | None = None,
) -> Array | tuple[Array, Array]:
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
        as `mask[:, None, None, :]`.
      scale: factor of the logits, a number or an array of one element, which gets a gradient; by default 1 / sqrt(H).
      is_causal: query t sees the keys up to t + `causal_offset`; with positions, those at its own position or before.
      query_seq_lengths: integers `[B]` in [0, T]; queries from this index on are masked. Lengths out of range are
        clipped, and reported by `masksafe.label_checks`, which also makes their sample NaN.
      key_value_seq_lengths: integers `[B]` in [0, S]; keys from this index on are masked.
      local_window_size: `(left, right)`, or one integer for both: query t sees the keys from
        t + `causal_offset` - left to t + `causal_offset` + right; with positions, as many before and after its own. One
        of the two may be negative, but not their sum: -1 is not a window without an end.
      implementation: "xla" is the form in blocks; "cudnn" is cuDNN's kernel, "splash" JAX's splash attention, or an
        error that says why it cannot run. None takes them in programs for CUDA or a TPU where they can run.
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
      key_positions: integers `[B, S]`; by default the index. Negative positions are numbers like others: mask padding
        by lengths, segments or a mask.
      score_mod: a function `(logit, batch, head, query_position, key_position) -> logit`, traced for one pair and
        applied to every logit, after the bias. Floats that it closes over get gradients. At a masked pair it has no
        effect and no derivative, whatever it returns there.
      mask_mod: a function `(batch, head, query_position, key_position) -> bool`; False is masked. Blocks in which it
        is False everywhere are skipped. `masksafe.attention_masks` has some, to be joined by `&`, `|` and `~`.
      axis_name: inside `jax.shard_map`, the mesh axis over which time is split, for ring attention: queries are
        `[B, T / n, N, H]`, keys `[B, S / n, K, H]`, `mask` and `bias` broadcast to `[B, N, T / n, S]`, and indices and
        lengths count over all devices. Without it a device sees its own keys only.

    Returns:
      The output `[B, T, N, width]` in the dtype of `query`; with `return_residual`, a tuple of it and the logsumexp
      `[B, T, N]` in float32 (float64 for float64), with an exact gradient. 16 bits are computed in float32 and rounded
      once; the weights may also be rounded before their product with the values, as they are on an accelerator.

      * The content of a masked key, value or bias changes nothing, and its gradient is exactly 0.
      * A NaN or infinity in a query, key or value makes the results of the queries of its unmasked pairs NaN, in all
        columns; so does an element beyond 2^62 / sqrt(width), 2^59 for a width of 64, with or
        without the scale. One in a cotangent does so to the gradients of the keys and values that its query sees.
      * A query with a NaN whose output gets no cotangent takes no part in the gradient. So padded queries need no mask
        here if the loss masks them.

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

      `Dao, FlashAttention-2, 2023 <https://arxiv.org/abs/2307.08691>`_; sinks: `Xiao et al., 2023
      <https://arxiv.org/abs/2309.17453>`_; functions of pairs: `Dong et al., Flex Attention, 2024
      <https://arxiv.org/abs/2412.05496>`_; the ring: `Liu et al., 2023 <https://arxiv.org/abs/2310.01889>`_.
    """
    is_causal = arguments.as_bool(_OP, "is_causal", is_causal)
    return_residual = arguments.as_bool(_OP, "return_residual", return_residual)
    soft_cap = arguments.if_given(
        arguments.as_number, _OP, "logit_soft_cap", logit_soft_cap, lambda cap: cap > 0, "a positive number or None"
    )
    dropout_rate = arguments.as_number(
        _OP, "dropout_rate", dropout_rate, lambda rate: 0 <= rate < 1, "a number in [0, 1)"
    )
    axis_name, window = sharding.as_axis_name(_OP, axis_name), _as_window(local_window_size)
    q, k, v = operands = _operands(query, key, value)
    num_queries, num_keys = (x.shape[-3] * sharding.Devices(axis_name).size for x in (q, k))
    knows_numbers = axis_name is not None or implementation == "splash" or arguments.is_staged(q, k, v)
    static_scale, scale = _as_scale(scale, q, knows_numbers)
    of_both = {"query_segment_ids": query_segment_ids, "key_value_segment_ids": key_value_segment_ids}
    arguments.check_both_or_none(_OP, "For self-attention give the same ids twice.", **of_both)
    if isinstance(mask_mod, AttentionMask):
        check_samples(_OP, "mask_mod", mask_mod, math.prod(q.shape[:-3]))
    arrays = _Arrays(
        *operands,
        scale=scale,
        bias=_if_given(_over_pairs, "bias", bias, _as_bias, q, k, num_keys),
        mask=_if_given(_over_pairs, "mask", mask, as_mask, q, k, num_keys),
        query_lengths=_if_given(_per_sample, "query_seq_lengths", query_seq_lengths, q),
        key_lengths=_if_given(_per_sample, "key_value_seq_lengths", key_value_seq_lengths, q),
        offset=_as_offset(causal_offset, query_positions, key_positions, q),
        query_positions=_if_given(_per_time, "query_positions", query_positions, q),
        key_positions=_if_given(_per_time, "key_positions", key_positions, k),
        query_segments=_if_given(_per_time, "query_segment_ids", query_segment_ids, q, arguments.as_integer_array),
        key_segments=_if_given(
            _per_time, "key_value_segment_ids", key_value_segment_ids, k, arguments.as_integer_array
        ),
        sinks=_if_given(_as_sinks, "sinks", sinks, q),
        dropout_key=_as_dropout_key(dropout_key, dropout_rate),
        score_mod=trace("score_mod", score_mod, wide_dtype(q.dtype)),
        mask_mod=trace("mask_mod", mask_mod),
    )
    bad_samples = either(
        _check_lengths("query_seq_lengths", arrays.query_lengths, num_queries, q),
        _check_lengths("key_value_seq_lengths", arrays.key_lengths, num_keys, q),
    )
    has_positions = query_positions is not None or key_positions is not None
    has_mods = score_mod is not None or mask_mod is not None  # which get the position with the offset
    is_known = not has_positions and (arrays.offset is None or (knows_numbers and not has_mods))
    reach, offset = _reach(is_causal, window), 0
    if is_known and isinstance(causal_offset, numbers.Integral):
        offset, arrays = max(-_FARTHEST, min(_FARTHEST, int(causal_offset))), arrays._replace(offset=None)
    if reach is not None:
        reach = (None if reach[0] is None else reach[0] - offset), reach[1] + offset
    is_static = is_known and arrays.offset is None
    ring = ring_of(axis_name, reach if is_static else None, q.shape[-3], k.shape[-3])
    sizes, rounds = platforms.choices().attention, sinks is None
    needs_lse = return_residual or arrays.sinks is not None
    plan = Plan(static_scale, soft_cap, dropout_rate, reach, sizes, rounds, ring, needs_lse=needs_lse)
    plan = plan._replace(shares_segments=query_segment_ids is key_value_segment_ids is not None)
    kernels = _choose_kernels(implementation, plan, arrays, return_residual)
    out, lse = _attend(plan, axis_name, kernels, is_checkified(), arrays)
    if bad_samples is not None:
        out = nan_where_bad(out, bad_samples[..., None, None, None])
        lse = None if lse is None else nan_where_bad(lse, bad_samples[..., None, None])
    return (out, lse) if return_residual else out


class _Arrays(NamedTuple):
    """The arrays, checked and as the user gave them, since an operation on them costs an eager call a program.

    Their ranks may be lower than those of the comments: they broadcast to these.
    """

    q: Array
    k: Array
    v: Array
    scale: Any  # []
    bias: Array | None  # [*batch, N, T, S]
    mask: Array | None  # [*batch, N, T, S]
    query_lengths: Array | None  # [*batch]
    key_lengths: Array | None  # [*batch]
    offset: Array | None  # [*batch]
    query_positions: Array | None  # [*batch, T]
    key_positions: Array | None  # [*batch, S]
    query_segments: Array | None  # [*batch, T]
    key_segments: Array | None  # [*batch, S]
    sinks: Array | None  # [N]
    dropout_key: Array | None
    score_mod: Mod | None
    mask_mod: Mod | None


def _choose_kernels(implementation: str | None, plan: Plan, arrays: _Arrays, return_residual: bool) -> Kernels:
    """Which kernels are named, or may be taken without."""
    if implementation not in (None, "xla", "cudnn", "splash"):
        expected = "'xla', 'cudnn', 'splash' or None"
        raise ValueError(message(_OP, "implementation", f"value {implementation!r}", expected))
    if implementation == "xla":
        return Kernels()
    if implementation == "splash":
        return Kernels(splash=True)
    is_named = implementation == "cudnn"
    given = {name: x for name, x in arrays._asdict().items() if x is not None}
    reason = _cudnn.reason_against(plan, given, is_named, return_residual)
    if reason is not None and is_named:
        raise ValueError(_cudnn.refusal(reason))
    return Kernels(cudnn=is_named if reason is None else None, splash=None if is_named else False)


# The program of a call: the arrays at their full rank, and which pairs count.


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _attend(
    plan: Plan, axis_name: AxisName, kernels: Kernels, is_checkified: bool, arrays: _Arrays
) -> tuple[Array, Array]:
    """The output and the logsumexp: one program for an eager call.

    What checkify traces is another program, which is not found in place of this.
    """
    q, k, v = (sharding.gathered_along(x, -3) for x in (arrays.q, arrays.k, arrays.v))
    over_pairs, by_sample = (arrays.bias, arrays.mask), ((arrays.query_lengths, arrays.key_lengths), arrays.offset)
    bias, mask = jax.tree.map(lambda x: sharding.gathered_along(_at_rank(x, q.ndim), -2, -1), over_pairs)
    lengths, offset = jax.tree.map(lambda x: _clipped(_at_rank(x, q.ndim - 3)), by_sample)
    wide = wide_dtype(q.dtype)
    if bias is not None and bias.dtype.itemsize > wide.itemsize:  # lower numbers than the lowest of the logits mask
        bias = bias.astype(wide)
    q = sharding.Devices(axis_name).varying(q)
    pairs = _pairs_of(axis_name, arrays._replace(q=q, k=k, offset=offset))
    pairs = pairs._replace(query_lengths=lengths[0], key_lengths=lengths[1], allowed=mask)
    return attend(plan, kernels, Operands(q, k, v, bias), pairs, arrays.scale, arrays.sinks)


def _pairs_of(axis_name: AxisName, arrays: _Arrays) -> Pairs:
    """The positions and segments, the mods, and the indices for these and dropout."""
    q, k, offset = arrays.q, arrays.k, arrays.offset
    batch, heads = q.shape[:-3], (k.shape[-2], q.shape[-2] // max(1, k.shape[-2]))
    first_query = sharding.Devices(axis_name).first(q.shape[-3])
    pairs = Pairs(
        query_positions=_over_time(arrays.query_positions, q, clipped=True),
        key_positions=_over_time(arrays.key_positions, k, clipped=True),
        query_segments=_over_time(arrays.query_segments, q),
        key_segments=_over_time(arrays.key_segments, k),
        score_mod=arrays.score_mod,
        mask_mod=arrays.mask_mod,
    )
    index = _index(q)
    if first_query is not None:
        index = index + first_query
        pairs = pairs._replace(query_index=index)
    if offset is not None:
        pairs = pairs._replace(query_positions=index + offset[..., None])
    if arrays.score_mod is not None or arrays.mask_mod is not None:
        samples = jnp.arange(math.prod(batch), dtype=jnp.int32).reshape(batch)
        heads_of_keys = jnp.arange(q.shape[-2], dtype=jnp.int32).reshape((1,) * len(batch) + heads)
        pairs = pairs._replace(samples=samples, heads=heads_of_keys)
    if arrays.dropout_key is not None:
        pairs = pairs._replace(words=draw_words(arrays.dropout_key, batch, heads, q.shape[-3], first_query))
    return pairs


def _index(x: Array) -> Any:
    """The indices `[1s, time]`, of NumPy if they are known."""
    arange = jnp.arange if sharding.has_symbolic_size(x) else np.arange
    return arange(x.shape[-3], dtype=np.int32).reshape((1,) * (x.ndim - 3) + (x.shape[-3],))


def _over_time(x: Array | None, operand: Array, *, clipped: bool = False) -> Array | None:
    """`[*batch or 1s, time]`, expanded along time so that it can be cut to a tile."""
    if x is None:
        return None
    x = sharding.gathered_along(_at_rank(x, operand.ndim - 2), -1)
    x = _clipped(x) if clipped else x
    return jnp.broadcast_to(x, (*x.shape[:-1], operand.shape[-3]))


def _at_rank(x: Array, rank: int) -> Array:
    """`x` with leading axes of size 1 added, or taken away: jax.nn takes a batch of 1 for queries without one."""
    return x.reshape((1,) * (rank - x.ndim) + x.shape[max(0, x.ndim - rank) :])


def _clipped(x: Array) -> Array:
    """Integers as int32, so that none wraps around."""
    return jnp.clip(x, -_FARTHEST, _FARTHEST).astype(jnp.int32)


def _reach(is_causal: bool, window: tuple[int, int] | None) -> Reach | None:
    """How far before and behind its own position a query may see keys."""
    left, right = window or (None, 0)
    return (left, min(right, 0) if is_causal else right) if is_causal or window else None


# Checks of the arguments.


def _if_given(check: Callable[..., Array], argument: str, x: ArrayLike | None, *others: Any) -> Array | None:
    return None if x is None else check(argument, x, *others)


def _operands(query: ArrayLike, key: ArrayLike, value: ArrayLike) -> tuple[Array, Array, Array]:
    q, k, v = (arguments.as_float_array(_OP, n, x) for n, x in (("query", query), ("key", key), ("value", value)))
    if q.ndim < 3:
        expected = "[batch, time, heads, head_dim] or [time, heads, head_dim]"
        raise ValueError(message(_OP, "query", f"shape {q.shape}", expected))
    if k.shape[:-3] != q.shape[:-3] or k.ndim != q.ndim or k.shape[-1] != q.shape[-1]:
        expected = f"[batch, keys, key_heads, head_dim], that of query {q.shape} in its batch and head_dim"
        raise ValueError(message(_OP, "key", f"shape {k.shape}", expected))
    if v.shape[:-1] != k.shape[:-1]:
        expected = f"({', '.join(map(str, k.shape[:-1]))}, width), that of key but for the width"
        raise ValueError(message(_OP, "value", f"shape {v.shape}", expected))
    if q.shape[-2] != 0 and (k.shape[-2] == 0 or q.shape[-2] % k.shape[-2]):
        expected = f"a multiple of the {k.shape[-2]} heads of key"
        hint = _HEADS_FIRST if k.shape[-3] and q.shape[-3] % k.shape[-3] == 0 else ""
        raise ValueError(message(_OP, "query", f"{q.shape[-2]} heads in shape {q.shape}", expected, hint))
    for name, x in (("key", k), ("value", v)):
        if x.dtype != q.dtype:
            raise TypeError(message(_OP, name, f"dtype {x.dtype}", f"{q.dtype}, that of query"))
    return q, k, v


def _as_scale(scale: ArrayLike | None, q: Array, knows_numbers: bool) -> tuple[float, Any]:
    """The factor of the logits if a program should know it, 1 otherwise; and the array by which to multiply queries."""
    if scale is None:
        return 1 / math.sqrt(max(1, q.shape[-1])), None
    if isinstance(scale, numbers.Real):
        number = arguments.as_number(_OP, "scale", scale)
        # Queries of 16 bits would be multiplied in float32, and so would their products with keys.
        is_static = knows_numbers or q.dtype.itemsize < 4
        return (number, None) if is_static else (1.0, np.asarray(number, q.dtype))
    scale = arguments.as_promoted_float_array(_OP, "scale", scale)
    return 1.0, arguments.as_one_element(_OP, "scale", scale)


def _over_pairs(
    argument: str, x: ArrayLike, as_typed: Callable[..., Array], q: Array, k: Array, num_keys: int
) -> Array:
    """An array that broadcasts to `[*batch, N, T, num_keys]`, of which `k` may have a part."""
    array, target = as_typed(_OP, argument, x), (*q.shape[:-3], q.shape[-2], q.shape[-3], num_keys)
    shape = _without_ones(array, target)
    hint = ""
    if len(shape) == 2 and q.ndim == 4 and shape == (q.shape[0], k.shape[-3]):
        hint = f"For a mask of the keys of every sample write {argument}[:, None, None, :]."
    elif shape[-1:] == k.shape[-3:-2] != (num_keys,):
        hint = f"With axis_name, {argument} is of this device's queries and the keys of all devices."
    elif len(shape) > 1 and shape[-2:] == (q.shape[-2], k.shape[-2]):
        hint = _HEADS_FIRST
    arguments.check_broadcasts_to(_OP, argument, shape, target, "the logits [batch, heads, queries, keys]", hint)
    return array


def _as_bias(op: str, argument: str, bias: ArrayLike) -> Array:
    array = arguments.as_array(op, argument, bias)
    if array.dtype == jnp.bool_:
        hint = "A mask is passed as mask=."
        raise TypeError(message(op, argument, "dtype bool", "numbers to add to the logits", hint))
    return arguments.as_promoted_float_array(op, argument, array)


def _without_ones(x: Array, target: Sequence[int]) -> tuple[int, ...]:
    """The shape without the leading 1s by which its rank is above that of the target, as `_at_rank` drops them."""
    extra = max(0, x.ndim - len(target))
    return x.shape[extra:] if x.shape[:extra] == (1,) * extra else x.shape


def _per_sample(argument: str, x: ArrayLike, q: Array) -> Array:
    """Integers that broadcast to the batch."""
    integers, batch = arguments.as_index_array(_OP, argument, x), q.shape[:-3]
    shape = integers.shape if batch else _without_ones(integers, batch)
    arguments.check_broadcasts_to(_OP, argument, shape, batch, "the batch")
    return integers


def _per_time(
    argument: str, x: ArrayLike, operand: Array, as_integers: Callable[..., Array] = arguments.as_index_array
) -> Array:
    """Integers that broadcast to `[*batch, time]`, of queries or keys."""
    integers = as_integers(_OP, argument, x)
    hint = _HEADS_FIRST if integers.shape[-1:] == operand.shape[-2:-1] else ""
    arguments.check_broadcasts_to(_OP, argument, integers.shape, operand.shape[:-2], "[batch, time]", hint)
    return integers


def _as_window(window: int | Sequence[int] | None) -> tuple[int, int] | None:
    if window is None:
        return None
    sides = tuple(window) if isinstance(window, Sequence) else (window, window)
    left, right = as_window(_OP, "local_window_size", sides)
    return max(-2 * _FARTHEST, min(2 * _FARTHEST, left)), max(-2 * _FARTHEST, min(2 * _FARTHEST, right))


def _as_offset(
    offset: ArrayLike, query_positions: ArrayLike | None, key_positions: ArrayLike | None, q: Array
) -> Array | None:
    """Integers that broadcast to the batch, or None for 0."""
    if isinstance(offset, numbers.Integral) and int(offset) == 0:
        return None
    if not (query_positions is None and key_positions is None):
        argument = "query_positions" if key_positions is None else "key_positions"
        hint = "Add it to the positions of the queries."
        raise ValueError(message(_OP, "causal_offset", f"an offset and {argument}", "one of them", hint))
    return _per_sample("causal_offset", offset, q)


def _check_lengths(argument: str, lengths: Array | None, size: int, q: Array) -> Array | None:
    """Reports lengths below 0 or above the size, if label checks are on; which samples have some, for `nan_where_bad`.

    Without checks they are what the interval [0, length) of the indices says. Ids of segments are not looked at: one
    side may have an id that the other one lacks, as padding has.
    """
    if lengths is None:
        return None
    otherwise = f"outside [0, {size}]"
    bad = check_elements(_OP, lengths, lengths.shape, None, lambda x: (x >= 0) & (x <= size), otherwise, argument)
    return None if bad is None else _at_rank(bad, q.ndim - 3)


def _as_sinks(argument: str, sinks: ArrayLike, q: Array) -> Array:
    array = arguments.as_promoted_float_array(_OP, argument, sinks)
    if array.shape != q.shape[-2:-1]:
        raise ValueError(message(_OP, argument, f"shape {array.shape}", f"{q.shape[-2:-1]}, one for each query head"))
    return array


def _as_dropout_key(key: Any, rate: float) -> Array | None:
    """The random key, if there is dropout."""
    if rate == 0:
        return None
    if key is None:
        raise ValueError(message(_OP, "dropout_key", "value None", "a random key, as dropout_rate is not 0"))
    hint = "Make one by jax.random.key(seed)."
    if not isinstance(key, (jax.Array, np.ndarray)):
        raise TypeError(message(_OP, "dropout_key", f"type {type(key).__name__}", "a random key", hint))
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not is_typed and key.dtype != np.uint32:
        raise TypeError(message(_OP, "dropout_key", f"dtype {key.dtype}", "a random key", hint))
    if key.ndim != (0 if is_typed else 1):
        raise ValueError(message(_OP, "dropout_key", f"shape {key.shape}", "one random key", hint))
    return jnp.asarray(key)
