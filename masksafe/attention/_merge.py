"""Attention over the union of disjoint sets of keys, from the results for each set."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from masksafe._core.arguments import as_float_array, message
from masksafe._core.derivatives import nan_in_derivatives, product, rule
from masksafe._core.exponentials import shift_of
from masksafe._core.masks import selected
from masksafe._core.precision import wide_dtype, widened
from masksafe._core.public_op import public_op
from masksafe._core.run_time import any_of
from masksafe._core.typing import Array, ArrayLike, Arrays

_OP = "merge_attention"


class Partial(NamedTuple):
    """Results for some of the keys; the sums are of exp(x - m), for the logits x."""

    o: Array  # [..., width of v], the sum weighted by the exponentials; or the output, if it is divided by l
    m: Array  # [..., 1], the largest logit, -inf for a query that sees no key
    l: Array  # [..., 1]

    @classmethod
    def empty(cls, like: Array, width: int) -> Partial:
        """The results for no key, of queries `[..., 1]`; they vary over devices as `like` does."""
        zero = jnp.zeros_like(like, wide_dtype(like.dtype))
        return cls(jnp.broadcast_to(zero, (*zero.shape[:-1], width)), jnp.full_like(zero, -jnp.inf), zero)

    def plus(self, other: Partial) -> Partial:
        """The results for the keys of both."""
        before, after = lax.stop_gradient((self.m, other.m))
        m = jnp.maximum(before, after)
        shift = shift_of(m)
        decay, growth = jnp.exp(before - shift), jnp.exp(after - shift)
        return Partial(self.o * decay + other.o * growth, m, self.l * decay + other.l * growth)

    def divided(self) -> Partial:
        """With the output in place of the sum, and an `l` of 1 for a query that sees no key."""
        l = jnp.where(self.l == 0, 1, self.l)
        return Partial(self.o / l, self.m, l)

    def multiplied(self) -> Partial:
        """The inverse of `divided`, except for a query that sees no key, which `plus` ignores."""
        return Partial(self.o * self.l, self.m, self.l)

    @property
    def lse(self) -> Array:
        """The logsumexp `[...]`."""
        return (self.m + jnp.log(self.l))[..., 0]

    def results(self, with_max: bool) -> Arrays:
        """What attention returns, the output if it is divided and the logsumexp; and the largest logits."""
        return (self.o, self.lse, self.m[..., 0]) if with_max else (self.o, self.lse)


Outs = tuple[Array | None, ...]
_Result = tuple[Array, Array]
_Residuals = tuple[Outs, Arrays, Array]


@public_op
def merge_attention(outs: Sequence[ArrayLike] | Array, logsumexps: Sequence[ArrayLike] | Array) -> tuple[Array, Array]:
    r"""Attention over the union of disjoint sets of keys, from the output and the logsumexp for each set.

    For every query and head, with outputs :math:`o_i` and logsumexps :math:`\lambda_i` of the sets :math:`i`,

    .. math::
      \lambda = \log \sum_i e^{\lambda_i}, \qquad o = \sum_i e^{\lambda_i - \lambda} o_i

    which is what one call for all keys gives: a cache and a new chunk, a prefix that several samples share, the shards
    of a long sequence. Merging is associative: merged results can be merged again.

    Args:
      outs: the outputs, arrays `[..., width]` of one shape, as `dot_product_attention` returns them; or one array whose
        first axis is that of the sets. Outputs in float32 lose no digits between the parts.
      logsumexps: as many logsumexps `[...]`, those of `return_residual=True`.

    Returns:
      The output `[..., width]`, of the dtype to which JAX promotes `outs`, and the logsumexp `[...]`, of that of
      `logsumexps`. Both have exact gradients.

      * A set of which a query saw nothing, with logsumexp -inf, changes nothing for this query, even if its output is
        NaN, and gets gradients of exactly 0. A query that saw nothing at all has output 0 and logsumexp -inf.
      * With sinks, merge without them, and apply them once, at the end: multiply the merged output by
        `sigmoid(logsumexp - sinks)`.

    Example:
      >>> import functools, jax, jax.numpy as jnp, masksafe
      >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 6, 2, 8))
      >>> attention = functools.partial(
      ...     masksafe.dot_product_attention, return_residual=True)
      >>> old = attention(query, key[:, :4], value[:, :4])
      >>> new = attention(query, key[:, 4:], value[:, 4:])
      >>> out, logsumexp = masksafe.merge_attention(*zip(old, new))
      >>> print(jnp.allclose(out, attention(query, key, value)[0], atol=1e-6))
      True

    References:
      Milakov and Gimelshein, `Online normalizer calculation for softmax, 2018 <https://arxiv.org/abs/1805.02867>`_.

      Ye et al., `FlashInfer, 2025 <https://arxiv.org/abs/2501.01005>`_, section 2.2.
    """
    for argument, arrays in (("outs", outs), ("logsumexps", logsumexps)):
        is_array = isinstance(arrays, (jax.Array, np.ndarray)) and arrays.ndim > 0
        if not is_array and not isinstance(arrays, Sequence):
            expected = "a sequence of arrays, or an array whose first axis is that of the sets"
            raise TypeError(message(_OP, argument, f"type {type(arrays).__name__}", expected))
    parts = [as_float_array(_OP, f"outs[{i}]", x) for i, x in enumerate(outs)]
    lses = [as_float_array(_OP, f"logsumexps[{i}]", x) for i, x in enumerate(logsumexps)]
    if not parts:
        raise ValueError(message(_OP, "outs", "no array", "at least one"))
    if len(lses) != len(parts):
        raise ValueError(message(_OP, "logsumexps", f"{len(lses)} arrays", f"{len(parts)}, as many as outs"))
    for i, (part, lse) in enumerate(zip(parts, lses, strict=True)):
        if part.ndim == 0 or part.shape != parts[0].shape:
            expected = f"{parts[0].shape}, that of outs[0]" if parts[0].ndim else "[..., width]"
            raise ValueError(message(_OP, f"outs[{i}]", f"shape {part.shape}", expected))
        if lse.shape != part.shape[:-1]:
            expected = f"{part.shape[:-1]}, that of outs[{i}] without its last axis"
            raise ValueError(message(_OP, f"logsumexps[{i}]", f"shape {lse.shape}", expected))
    with jax.numpy_dtype_promotion("standard"):  # as the docstring says
        out, lse = _merge_widened(tuple(parts), tuple(lses))
        return out.astype(jnp.result_type(*parts)), lse.astype(jnp.result_type(*lses))


@jax.jit
def _merge_widened(outs: Arrays, lses: Arrays) -> _Result:
    dtype = functools.reduce(jnp.promote_types, (wide_dtype(x.dtype) for x in (*outs, *lses)))
    return merge_parts(tuple(x.astype(dtype) for x in outs), tuple(x.astype(dtype) for x in lses))


def with_sinks(out: Array, lse: Array, sinks: Array) -> Array:
    """The wide output `[..., N, width]` with one more key for each query head, of the sink `[N]` as logit and value 0.

    A query that sees no key sees no sink either.
    """
    largest = float(jnp.finfo(lse.dtype).max)  # a sink of inf takes all weight; inf - inf would be NaN
    wide = jnp.broadcast_to(jnp.minimum(widened(sinks).astype(lse.dtype), largest), lse.shape)
    return merge_parts((out, None), (lse, jnp.where(lse == -jnp.inf, -jnp.inf, wide)))[0]


def _forward(outs: Outs, lses: Arrays) -> tuple[_Result, _Residuals]:
    # In a second derivative a row with a cotangent of 0 takes no part, though it be full of NaN: see `_reverse`.
    are_bad = [jnp.isnan(lse) | (lse == jnp.inf) for lse in lses]
    is_bad = functools.reduce(jnp.logical_or, are_bad)
    largest, weights, total = _softmax(tuple(selected(lse, ~bad) for lse, bad in zip(lses, are_bad, strict=True)))
    weighted = [
        product(jnp.where((lse == -jnp.inf)[..., None], 0, part), jnp.broadcast_to(weight[..., None], part.shape))
        for part, lse, weight in zip(outs, lses, weights, strict=True)
        if part is not None
    ]
    lse = jnp.where(largest == -jnp.inf, -jnp.inf, largest + jnp.log(total))
    out = functools.reduce(jnp.add, weighted)
    out, lse = nan_in_derivatives((jnp.where(is_bad[..., None], jnp.nan, out), jnp.where(is_bad, jnp.nan, lse)))
    return (out, lse), (outs, lses, out)


def _reverse(residuals: _Residuals, cotangents: _Result) -> tuple[Outs, Arrays]:
    (outs, lses, out), (d_out, d_lse) = residuals, cotangents
    # A query without cotangents takes no part, as in attention: it may be full of NaN.
    is_needed = any_of(d_out != 0, -1) | (d_lse != 0)
    needed_lses = tuple(jnp.where(is_needed, lse, -jnp.inf) for lse in lses)
    _, weights, _ = _softmax(needed_lses)

    def pull_back(part: Array | None, weight: Array, lse: Array) -> tuple[Array | None, Array]:
        sees_any = (lse != -jnp.inf)[..., None]
        difference = jnp.where(sees_any, (0 if part is None else part) - out, 0)
        slope = jnp.sum(jnp.where(d_out == 0, 0, difference * d_out), -1)
        d_part = None if part is None else jnp.where(sees_any, weight[..., None] * d_out, 0)
        return d_part, jnp.where(sees_any[..., 0], weight * (slope + d_lse), 0)

    d_outs, d_lses = zip(*map(pull_back, outs, weights, needed_lses), strict=True)
    return d_outs, d_lses


# The merged output and logsumexp, for wide arrays of one dtype; an output of None is 0 everywhere.
merge_parts = rule(_forward, _reverse, static_argnums=())


def _softmax(lses: Arrays) -> tuple[Array, Arrays, Array]:
    """The largest logsumexp, the weights of the parts, which are 0 for a query without keys, and their divisor."""
    largest = lax.stop_gradient(functools.reduce(jnp.maximum, lses))
    sees_any = largest != -jnp.inf  # True for a NaN, which must stay visible
    shift = jnp.where(sees_any, largest, 0)
    exps = [jnp.where(lse == -jnp.inf, 0, jnp.exp(lse - shift)) for lse in lses]
    total = jnp.where(sees_any, functools.reduce(jnp.add, exps), 1)
    return largest, tuple(exp / total for exp in exps), total
