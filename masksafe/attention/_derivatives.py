"""Attention and its derivatives, for arrays in the user's layout.

Values and first derivatives in reverse mode come from the kernels, which skip dead blocks. Every other derivative,
forward mode and all second derivatives, is that of the plain form: the same blocks in loops of fixed length. JAX can
differentiate it to any order, and it holds no array over all pairs either.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core.derivatives import with_derivatives_of, with_reverse_rule
from masksafe._core.typing import Array
from masksafe.attention._formulas import Adjustments, Config, Gradients, find_live_queries, logsumexp
from masksafe.attention._heads import grouped_heads
from masksafe.attention._mask import Pairs
from masksafe.attention._passes import Parts, mark_live_queries, run_forward, run_reverse
from masksafe.attention._ring import run_forward_in_ring, run_reverse_in_ring

_Result = tuple[Array, Array]
_Residuals = tuple[Array, Array, Array, Adjustments, Pairs, Array, Array, Array]


def _forward(
    config: Config, q: Array, k: Array, v: Array, adjustments: Adjustments, pairs: Pairs
) -> tuple[_Result, _Residuals]:
    out, largest, total = _evaluate_in_blocks(config, q, k, v, _grouped(adjustments, k), pairs)
    # The output is kept unrounded, since delta depends on it.
    return _rounded(config, q, out, largest, total), (q, k, v, adjustments, pairs, out, largest, total)


def _reverse(config: Config, residuals: _Residuals, cotangents: _Result) -> tuple[Any, ...]:
    q, k, v, adjustments, pairs, *results = residuals
    d = _pull_back_in_blocks(config, q, k, v, _grouped(adjustments, k), pairs, *results, *cotangents)
    d_adjustments = jax.tree.map(lambda d, x: d.reshape(x.shape), d.adjustments, adjustments)
    return d.query, d.key, d.value, d_adjustments, None


@with_reverse_rule(_forward, _reverse, static_argnums=(0,))
def attention(config: Config, q: Array, k: Array, v: Array, adjustments: Adjustments, pairs: Pairs) -> _Result:
    """Output `[B, T, N, width of v]` and logsumexp `[B, T, N]`, wide, but the output if it is rounded.

    `q` is `[B, T, N, H]`, `k` `[B, S, K, H]`, `v` `[B, S, K, width]`, the bias `[B, N, T, S]` with size 1 where it
    broadcasts. `pairs` comes without the adjustments.
    """
    return _rounded(config, q, *_evaluate_in_blocks(config, q, k, v, _grouped(adjustments, k), pairs))


def _grouped(adjustments: Adjustments, k: Array) -> Adjustments:
    """With the bias as the kernels take it.

    It is brought to that form within the rule, which so keeps the user's own array for the reverse pass: a new one with
    a NaN under the mask would set off `jax_debug_nans`.
    """
    bias = adjustments.bias
    return adjustments if bias is None else adjustments._replace(bias=grouped_heads(bias, k.shape[2]))


def _rounded(config: Config, q: Array, out: Array, largest: Array, total: Array) -> _Result:
    return out.astype(q.dtype) if config.rounds else out, logsumexp(largest, total)


def _evaluate_plainly(config: Config, q: Array, k: Array, v: Array, adjustments: Adjustments, pairs: Pairs) -> Parts:
    return _run_forward(config._replace(skips=False), q, k, v, adjustments, pairs)


@with_derivatives_of(_evaluate_plainly)
def _evaluate_in_blocks(config: Config, q: Array, k: Array, v: Array, adjustments: Adjustments, pairs: Pairs) -> Parts:
    return _run_forward(config, q, k, v, adjustments, pairs)


def _run_forward(config: Config, *args: Any) -> Parts:
    return (run_forward if config.ring is None else run_forward_in_ring)(config, *args)


def _pull_back_plainly(
    config: Config, q: Array, k: Array, v: Array, adjustments: Adjustments, pairs: Pairs, *results_and_cotangents: Array
) -> Gradients:
    _, _, _, d_out, d_lse = results_and_cotangents
    live, _ = find_live_queries(*map(lax.stop_gradient, results_and_cotangents))
    pairs = mark_live_queries(pairs, live, k)

    def plain(q: Array, k: Array, v: Array, adjustments: Adjustments) -> _Result:
        out, largest, total = _evaluate_plainly(config, q, k, v, adjustments, pairs)
        return out, logsumexp(largest, total)

    _, reverse = jax.vjp(plain, q, k, v, adjustments)
    d_out = jnp.where(live, d_out, 0).astype(d_lse.dtype)
    return Gradients(*reverse((d_out, jnp.where(live[..., 0], d_lse, 0))))


@with_derivatives_of(_pull_back_plainly)
def _pull_back_in_blocks(
    config: Config, q: Array, k: Array, v: Array, adjustments: Adjustments, pairs: Pairs, *results_and_cotangents: Array
) -> Gradients:
    run = run_reverse if config.ring is None else run_reverse_in_ring
    d = run(config, q, k, v, adjustments, pairs, *results_and_cotangents)
    return d._replace(adjustments=jax.tree.map(lambda d, x: d.astype(x.dtype), d.adjustments, adjustments))
