"""The user's arguments: checked, and brought to the form in which attention computes.

The checks use types and shapes alone: in eager code an operation on an array would be a program of its own. Operations
are in `whole`, inside the program.
"""

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from masksafe._core import arguments, sharding
from masksafe._core.arguments import message
from masksafe._core.label_checks import check_elements
from masksafe._core.precision import wide_dtype
from masksafe._core.sharding import AxisName
from masksafe._core.typing import Array, ArrayLike
from masksafe.attention._dropout import draw_words
from masksafe.attention._mods import Mod
from masksafe.attention._pairs import Pairs, Side
from masksafe.attention._plan import Operands, Reach
from masksafe.attention_masks import as_window

OP = "dot_product_attention"

_HEADS_FIRST = (
    "Time comes before heads, [batch, time, heads, head_dim]: give arrays [batch, heads, time, head_dim] as "
    "jnp.swapaxes(x, -3, -2)."
)

_FARTHEST = 2**29  # lengths and offsets are clipped to this, windows to twice this, so that sums of them fit int32


class Arrays(NamedTuple):
    """The arrays, checked, and as the user gave them.

    Their ranks may be lower than in the comments: they broadcast to these shapes.
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


# Checks.


def operands(query: ArrayLike, key: ArrayLike, value: ArrayLike) -> tuple[Array, Array, Array]:
    q, k, v = (arguments.as_float_array(OP, n, x) for n, x in (("query", query), ("key", key), ("value", value)))
    if q.ndim < 3:
        expected = "[batch, time, heads, head_dim] or [time, heads, head_dim]"
        raise ValueError(message(OP, "query", f"shape {q.shape}", expected))
    if k.shape[:-3] != q.shape[:-3] or k.ndim != q.ndim or k.shape[-1] != q.shape[-1]:
        expected = f"[batch, keys, key_heads, head_dim], with the batch and the head_dim of query {q.shape}"
        raise ValueError(message(OP, "key", f"shape {k.shape}", expected))
    if v.shape[:-1] != k.shape[:-1]:
        expected = f"({', '.join(map(str, k.shape[:-1]))}, width), the shape of key except for the width"
        raise ValueError(message(OP, "value", f"shape {v.shape}", expected))
    if q.shape[-2] != 0 and (k.shape[-2] == 0 or q.shape[-2] % k.shape[-2]):
        expected = f"a multiple of the {k.shape[-2]} heads of key"
        hint = _HEADS_FIRST if k.shape[-3] and q.shape[-3] % k.shape[-3] == 0 else ""
        raise ValueError(message(OP, "query", f"{q.shape[-2]} heads in shape {q.shape}", expected, hint))
    for name, x in (("key", k), ("value", v)):
        if x.dtype != q.dtype:
            raise TypeError(message(OP, name, f"dtype {x.dtype}", f"{q.dtype}, that of query"))
    return q, k, v


def as_scale(scale: ArrayLike | None, q: Array, knows_numbers: bool) -> tuple[float, Any]:
    """The static factor of the logits, or 1; and the array by which queries are multiplied, if it is not static."""
    if scale is None:
        return 1 / math.sqrt(max(1, q.shape[-1])), None
    if isinstance(scale, numbers.Real):
        number = arguments.as_number(OP, "scale", scale)
        # Queries of 16 bits would be multiplied in float32, and so would their products with keys.
        is_static = knows_numbers or q.dtype.itemsize < 4
        return (number, None) if is_static else (1.0, np.asarray(number, q.dtype))
    scale = arguments.as_promoted_float_array(OP, "scale", scale)
    return 1.0, arguments.as_one_element(OP, "scale", scale)


def over_pairs(
    argument: str, x: ArrayLike | None, as_typed: Callable[..., Array], q: Array, k: Array, num_keys: int
) -> Array | None:
    """An array that broadcasts to `[*batch, N, T, num_keys]`; in a ring `k` has only some of the keys."""
    if x is None:
        return None
    array, target = as_typed(OP, argument, x), (*q.shape[:-3], q.shape[-2], q.shape[-3], num_keys)
    shape = _without_ones(array, target)
    hint = ""
    if len(shape) == 2 and q.ndim == 4 and shape == (q.shape[0], k.shape[-3]):
        hint = f"For a mask of the keys of every sample write {argument}[:, None, None, :]."
    elif len(shape) == 3 and q.ndim == 4 and shape == (q.shape[0], *target[-2:]):
        hint = f"For one of the queries and keys of every sample write {argument}[:, None]."
    elif shape[-1:] == k.shape[-3:-2] != (num_keys,):
        hint = f"With axis_name, {argument} is of this device's queries and the keys of all devices."
    elif len(shape) > 1 and shape[-2:] == (q.shape[-2], k.shape[-2]):
        hint = _HEADS_FIRST
    arguments.check_broadcasts_to(OP, argument, shape, target, "the logits [batch, heads, queries, keys]", hint)
    return array


def as_bias(op: str, argument: str, bias: ArrayLike) -> Array:
    array = arguments.as_array(op, argument, bias)
    if array.dtype == jnp.bool_:
        hint = "A mask is passed as mask=."
        raise TypeError(message(op, argument, "dtype bool", "numbers to add to the logits", hint))
    return arguments.as_promoted_float_array(op, argument, array)


def _without_ones(x: Array, target: Sequence[int]) -> tuple[int, ...]:
    """The shape without leading 1s beyond the rank of the target, as `_at_rank` drops them."""
    extra = max(0, x.ndim - len(target))
    return x.shape[extra:] if x.shape[:extra] == (1,) * extra else x.shape


def per_sample(argument: str, x: ArrayLike | None, q: Array) -> Array | None:
    """Integers that broadcast to the batch."""
    if x is None:
        return None
    integers, batch = arguments.as_index_array(OP, argument, x), q.shape[:-3]
    shape = integers.shape if batch else _without_ones(integers, batch)
    arguments.check_broadcasts_to(OP, argument, shape, batch, "the batch")
    return integers


def per_time(
    argument: str, x: ArrayLike | None, operand: Array, as_integers: Callable[..., Array] = arguments.as_index_array
) -> Array | None:
    """Integers that broadcast to `[*batch, time]`, of queries or keys."""
    if x is None:
        return None
    integers = as_integers(OP, argument, x)
    hint = _HEADS_FIRST if integers.shape[-1:] == operand.shape[-2:-1] else ""
    arguments.check_broadcasts_to(OP, argument, integers.shape, operand.shape[:-2], "[batch, time]", hint)
    return integers


def window_of(window: int | Sequence[int] | None) -> tuple[int, int] | None:
    if window is None:
        return None
    sides = tuple(window) if isinstance(window, Sequence) else (window, window)
    left, right = as_window(OP, "local_window_size", sides)
    return max(-2 * _FARTHEST, min(2 * _FARTHEST, left)), max(-2 * _FARTHEST, min(2 * _FARTHEST, right))


def as_offset(
    offset: ArrayLike, query_positions: ArrayLike | None, key_positions: ArrayLike | None, q: Array
) -> Array | None:
    """Integers that broadcast to the batch, or None for 0."""
    if isinstance(offset, numbers.Integral) and int(offset) == 0:
        return None
    if not (query_positions is None and key_positions is None):
        argument = "query_positions" if key_positions is None else "key_positions"
        hint = "Add it to the positions of the queries."
        raise ValueError(message(OP, "causal_offset", f"an offset and {argument}", "one of them", hint))
    return per_sample("causal_offset", offset, q)


def bad_lengths(argument: str, lengths: Array | None, size: int, q: Array) -> Array | None:
    """If label checks are on, reports lengths below 0 or above the size, and returns the bad samples.

    Without checks a length masks the indices outside [0, length). Segment ids are not checked: one side may have an id
    that the other lacks, as padding has.
    """
    if lengths is None:
        return None
    otherwise = f"outside [0, {size}]"
    bad = check_elements(OP, lengths, lengths.shape, None, lambda x: (x >= 0) & (x <= size), otherwise, argument)
    return None if bad is None else _at_rank(bad, q.ndim - 3)


def as_sinks(argument: str, sinks: ArrayLike | None, q: Array) -> Array | None:
    if sinks is None:
        return None
    array = arguments.as_promoted_float_array(OP, argument, sinks)
    if array.shape != q.shape[-2:-1]:
        raise ValueError(message(OP, argument, f"shape {array.shape}", f"{q.shape[-2:-1]}, one for each query head"))
    return array


def as_dropout_key(key: Any, rate: float) -> Array | None:
    """The random key, if there is dropout."""
    if rate == 0:
        return None
    if key is None:
        raise ValueError(message(OP, "dropout_key", "value None", "a random key, as dropout_rate is not 0"))
    hint = "Make one by jax.random.key(seed)."
    if not isinstance(key, (jax.Array, np.ndarray)):
        raise TypeError(message(OP, "dropout_key", f"type {type(key).__name__}", "a random key", hint))
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not is_typed and key.dtype != np.uint32:
        raise TypeError(message(OP, "dropout_key", f"dtype {key.dtype}", "a random key", hint))
    if key.ndim != (0 if is_typed else 1):
        raise ValueError(message(OP, "dropout_key", f"shape {key.shape}", "one random key", hint))
    return jnp.asarray(key)


def reach_of(is_causal: bool, window: tuple[int, int] | None, offset: ArrayLike) -> Reach | None:
    """How far before and behind its own position a query sees keys; of its index, if the offset is a number."""
    if window is None and not is_causal:
        return None
    left, right = window or (None, 0)
    offset = max(-_FARTHEST, min(_FARTHEST, int(offset))) if isinstance(offset, numbers.Integral) else 0
    return (None if left is None else left - offset), (min(right, 0) if is_causal else right) + offset


# Within the program.


def whole(axis_name: AxisName, arrays: Arrays) -> tuple[Operands, Pairs]:
    """The arrays at full rank, not split along time by an explicit mesh; and the masks of pairs."""
    q, k, v = (sharding.gathered_along(x, -3) for x in arrays[:3])
    pair_arrays, sample_arrays = (arrays.bias, arrays.mask), ((arrays.query_lengths, arrays.key_lengths), arrays.offset)
    bias, mask = jax.tree.map(lambda x: sharding.gathered_along(_at_rank(x, q.ndim), -2, -1), pair_arrays)
    lengths, offset = jax.tree.map(lambda x: _clipped(_at_rank(x, q.ndim - 3)), sample_arrays)
    wide = wide_dtype(q.dtype)
    if bias is not None and bias.dtype.itemsize > wide.itemsize:  # so that numbers below the lowest logit mask
        bias = bias.astype(wide)
    q = sharding.Devices(axis_name).varying(q)
    pairs = _pairs(axis_name, arrays._replace(q=q, k=k, offset=offset))
    queries, keys = pairs.queries._replace(length=lengths[0]), pairs.keys._replace(length=lengths[1])
    return Operands(q, k, v, bias), pairs._replace(queries=queries, keys=keys, allowed=mask)


def _pairs(axis_name: AxisName, arrays: Arrays) -> Pairs:
    """The positions and segments, the mods, and the indices for mods and dropout."""
    q, k, offset = arrays.q, arrays.k, arrays.offset
    batch, heads = q.shape[:-3], (k.shape[-2], q.shape[-2] // max(1, k.shape[-2]))
    first_query = sharding.Devices(axis_name).first(q.shape[-3])
    index, position = _index(q), _over_time(arrays.query_positions, q, clipped=True)
    if first_query is not None:
        index = index + first_query
    if offset is not None:
        position = index + offset[..., None]
    pairs = Pairs(
        Side(None if first_query is None else index, position, _over_time(arrays.query_segments, q)),
        Side(None, _over_time(arrays.key_positions, k, clipped=True), _over_time(arrays.key_segments, k)),
        score_mod=arrays.score_mod,
        mask_mod=arrays.mask_mod,
    )
    if arrays.score_mod is not None or arrays.mask_mod is not None:
        samples = jnp.arange(math.prod(batch), dtype=jnp.int32).reshape(batch)
        heads_of_keys = jnp.arange(q.shape[-2], dtype=jnp.int32).reshape((1,) * len(batch) + heads)
        pairs = pairs._replace(samples=samples, heads=heads_of_keys)
    if arrays.dropout_key is not None:
        pairs = pairs._replace(words=draw_words(arrays.dropout_key, batch, heads, q.shape[-3], first_query))
    return pairs


def _index(x: Array) -> Any:
    """The indices `[1s, time]`, as an array of NumPy if they are known."""
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
