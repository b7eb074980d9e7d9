"""What the contract requires of attention, whatever computes it: which elements are bad, and which cotangents count.

A product contracts over masked pairs too, with weight 0, and 0 times NaN is NaN. So bad elements are replaced by 0
before any product, and marked in the results: the output of a query that sees something bad is NaN, and that of a query
that sees no key is 0. An element is bad if it is not finite, or so large that a product of two rows may overflow.
"""

import functools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from masksafe._core.linear import finite_or_zero
from masksafe._core.precision import wide_dtype
from masksafe._core.run_time import any_of, unknown
from masksafe._core.typing import Array, DType
from masksafe.attention._pairs import Pairs, by_key_head
from masksafe.attention._plan import Operands


def largest(dtype: DType, width: int, factor: float = 1.0) -> float:
    """How large an element of a row of this width may be, also times a factor: 2^62 / sqrt(width) in float32.

    It is rounded down to a power of two, which is a number of every dtype. The logits of two such rows are at most
    2^124, so that a kernel may add -2^126 to those that are masked.
    """
    exponent = (jnp.finfo(wide_dtype(dtype)).maxexp - 4) / 2 - math.log2(max(1, width)) / 2
    exponent = math.floor(exponent - math.log2(max(1.0, abs(factor))))
    return min(float(jnp.finfo(dtype).max), 2.0**exponent)


def is_good(x: Array, factor: float = 1.0) -> Array:
    """Which elements are good."""
    return jnp.abs(x) <= x.dtype.type(largest(x.dtype, x.shape[-1], factor))


def cleaned(x: Array, factor: float = 1.0) -> Array:
    """`x` with 0 for bad elements; not differentiated."""
    return lax.select(is_good(x, factor), x, jnp.zeros_like(x))


def cleaned_and_marked(
    q: Array, k: Array, v: Array, factor: float, *, jointly: bool = True
) -> tuple[tuple[Array, Array, Array], Array, Array]:
    """Clean queries, keys and values; which queries are bad, and which keys are or have a bad value, without last axis.

    The arrays are to be in the user's layout: of another one XLA would make a copy for each use. One by one in place of
    jointly, a program for a GPU moves up to a hundredth fewer bytes where these results are arrays in memory.
    """
    good = is_good(q, factor), is_good(k), is_good(v)
    clean_q, clean_k, clean_v = (lax.select(g, x, jnp.zeros_like(x)) for g, x in zip(good, (q, k, v), strict=True))
    flags = [~g for g in good]
    if not jointly:
        bad_queries, *bad_keys = (any_of(flag, -1) for flag in flags)
    elif q.shape == k.shape == v.shape:
        bad_queries, *bad_keys = _reduced(*flags)
    else:
        bad_queries, *bad_keys = (any_in_row(flag) for flag in flags)
    return (clean_q, clean_k, clean_v), bad_queries, bad_keys[0] | bad_keys[1]


def any_in_row(flags: Array) -> Array:
    """Whether any along the last axis is True; not by a maximum, in which XLA's library for CPUs loses a NaN."""
    return functools.reduce(jnp.logical_or, _reduced(flags, flags))


def any_takes_part(m: Array, l: Array) -> Array:
    """Whether any of these queries takes part in the reverse pass; of `Rows`, whose `m` is inf for others."""
    return functools.reduce(jnp.logical_or, _reduced(m < jnp.inf, l != 1, axes=range(m.ndim)))


def _reduced(*arrays: Array, axes: Iterable[int] = (-1,)) -> tuple[Array, ...]:
    """Whether any is True of each array of booleans along the axes, and the sums of the others.

    At least two arrays: XLA for CPUs makes one kernel of their joint reduction, and three of a reduction of one (jax
    0.12, 2x1024x4x64: 0.09 ms for three arrays, 0.28 one by one).
    """
    combine = [lax.bitwise_or if x.dtype == jnp.bool_ else lax.add for x in arrays]
    never = unknown(False)
    starts = tuple(never if x.dtype == jnp.bool_ else jnp.zeros((), x.dtype) for x in arrays)

    def step(a: Any, b: Any) -> Any:
        return tuple(fn(x, y) for fn, x, y in zip(combine, a, b, strict=True))

    return tuple(lax.reduce(arrays, starts, step, [axis % arrays[0].ndim for axis in axes]))


class Cotangents(NamedTuple):
    """The cotangents of a pass, clean, and which queries they are for; all but `do` are `[B, T, N, 1]`.

    A query without cotangents takes no part in the reverse pass: if it has a NaN, this was selected away after the op,
    as a loss does with padded queries.
    """

    do: Array
    dlse: Array
    delta: Array | None  # the products of `do` with the output, less `dlse`
    needed: Array  # whether the query sees a key and has a cotangent that is not 0
    used: Array  # whether this is good as well, and the output; the cotangents of other queries are 0 here

    @classmethod
    def of(
        cls, do: Array, dlse: Array, is_bad: Array | None, is_empty: Array | None, o: Array | None = None
    ) -> "Cotangents":
        """Of queries that are bad or see something bad, and that see no key; with delta if the output is given.

        An output may say what is bad by itself, since a bad element makes all of its columns NaN.
        """
        dlse = dlse[..., None]
        sums = [] if o is None else [o.astype(dlse.dtype) * do.astype(dlse.dtype)]
        needed, bad, *sums = (a[..., None] for a in _reduced(do != 0, ~is_good(do), *sums))
        delta, needed = sums[0] - dlse if sums else None, needed | (dlse != 0)
        needed = needed if is_empty is None else needed & ~is_empty
        used = needed & ~bad & jnp.isfinite(dlse if delta is None else delta)
        used = used if is_bad is None else used & ~is_bad
        delta = None if delta is None else jnp.where(used, delta, 0)
        return cls(jnp.where(used, do, 0), jnp.where(used, dlse, 0), delta, needed, used)


def in_plain_reverse(args: tuple[Operands, Pairs], d: tuple[Array, Array], is_bad: Array, is_empty: Array) -> Any:
    """The arguments and the cotangents for derivatives of the reverse pass, given bad and empty queries `[B, T, N]`.

    A good query without a cotangent may have one in a derivative; but derivatives of its logits have no effect.
    """
    (x, pairs), (do, dlse) = args, d
    needed = (any_in_row(lax.stop_gradient(do) != 0) | (lax.stop_gradient(dlse) != 0))[..., None]
    used = (~is_empty & (needed[..., 0] | ~is_bad))[..., None]
    do, dlse = jnp.where(used, do, 0), jnp.where(used[..., 0], dlse, 0)
    shows = jnp.where(needed, jnp.sum(0 * do, -1, keepdims=True), 0)
    x = x._replace(q=x.q + shows.astype(x.q.dtype))
    do = jnp.where(needed, finite_or_zero(do), do)
    unneeded, showing = (by_key_head(a[..., 0], x.k.shape[2]) for a in (~used, needed))
    return (x, pairs._replace(unneeded=unneeded, showing=showing)), (do, dlse)
