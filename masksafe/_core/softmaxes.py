"""The softmax, its logarithm and the logsumexp over groups of elements, which are rows or segments.

Masked elements are -inf before anything is computed, so that no derivative reaches them. The derivative rules select
tangents before a product, and its result after it: so does the reverse pass with cotangents, which may be infinite, and
0 * inf is NaN. A masked row of segments may hold anything until the end, where it is selected.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core import platforms
from masksafe._core.exponentials import shift_of
from masksafe._core.groups import Groups
from masksafe._core.masks import selected
from masksafe._core.moments import Rows
from masksafe._core.precision import widened
from masksafe._core.run_time import unknown
from masksafe._core.switches import uses_plain_rules
from masksafe._core.typing import Array, Arrays, Function, Pytree


def _recomputed(groups: Groups) -> Callable[[Function], Function]:
    """Decorates a function of which a reverse pass keeps the arguments alone: a result, or `x` and sums, and the mask.

    Otherwise it would keep two wide arrays. Not of segments: JAX fails to check the indices of a look-up inside of
    `jax.checkpoint` (jax 0.12).
    """
    if isinstance(groups, Rows):
        return functools.partial(jax.checkpoint, prevent_cse=False)  # type: ignore[return-value]
    return lambda fn: fn


def wide_logsumexp(groups: Groups, x: Array, where: Array | None) -> Array:
    """The logsumexp of each group in the wide dtype; -inf for an empty one."""
    largest = groups.max(selected(lax.stop_gradient(x), where, -jnp.inf))
    limit = float(jnp.finfo(largest.dtype).max)
    shift = jnp.clip(largest, -limit, limit)  # an infinite one would make the group NaN

    @_recomputed(groups)
    def total_of(groups: Groups, x: Array, where: Array | None, shift: Array) -> Array:
        return groups.sum(_exp(_minus(groups.gathered, x, where, (shift,)), groups.unmasked(x, where)))

    total = total_of(groups, x, where, shift)
    # 1 in place of 0; the largest adds 1 to any other total. Compared with 0, XLA for GPUs would keep the zeros from
    # which the sums of segments start, and read them again (jax 0.12, H100, 1000000x8 in 50000 segments: 167 MB for
    # 160, 8 kernels for 6). A selection would cost as much in the reverse pass.
    total += lax.stop_gradient(total < 1).astype(total.dtype)
    return largest + jnp.log(total)


@jax.custom_jvp
def _exp(x: Array, unmasked: Array | None) -> Array:
    """The exponentials; only their derivatives are 0 where masked, since there they may be infinite."""
    return jnp.exp(x)


@_exp.defjvp
def _(primals: Pytree, tangents: Pytree) -> tuple[Array, Array]:
    exps = _exp(*primals)
    return exps, selected(exps, primals[1]) * tangents[0]


@jax.custom_jvp
def softmax(groups: Groups, x: Array, where: Array | None) -> Array:
    """The softmax over each group; 0 where masked."""
    exps = jnp.exp(_minus(groups.gathered, x, where, (_largest(groups, x, where),)))
    total = _unless_empty(groups.sum(exps), groups, x, where)
    return selected(exps / groups.gathered(total), groups.unmasked(x, where)).astype(x.dtype)


@softmax.defjvp
def _(primals: Pytree, tangents: Pytree) -> tuple[Array, Array]:
    (groups, _, where), probs = primals, softmax(*primals)

    @_recomputed(groups)
    def d_probs(groups: Groups, probs: Array, where: Array | None, d_x: Array) -> Array:
        p, unmasked = widened(probs), groups.unmasked(probs, where)
        terms = p * selected(widened(d_x), unmasked)
        sums = groups.gathered_to_unmasked(-groups.sum(terms), terms, None)
        return selected(terms + p * sums, unmasked).astype(probs.dtype)

    return probs, d_probs(groups, probs, where, tangents[1])


@jax.custom_jvp
def wide_log_softmax(groups: Groups, x: Array, where: Array | None) -> Array:
    """The logarithm of the softmax over each group, in the wide dtype; -inf where masked."""
    log_probs = _minus(groups.gathered_once, x, where, _shifts(groups, x, where))
    return selected(log_probs, groups.unmasked(x, where), -jnp.inf)


@wide_log_softmax.defjvp
def _(primals: Pytree, tangents: Pytree) -> tuple[Array, Array]:
    (groups, x, where), log_probs, d_x = primals, wide_log_softmax(*primals), tangents[1]
    kept = log_probs
    shifts: Arrays = ()
    if isinstance(groups, Rows):
        d_x = platforms.computed_once(d_x)
        if x.dtype != log_probs.dtype:  # 16 bits are kept in place of 32
            kept, shifts = x, _shifts(groups, x, where)
    else:  # a CPU would keep another array (jax 0.12, a gradient of 100000x64)
        log_probs = kept = platforms.unfused(log_probs, on="cpu")

    @_recomputed(groups)
    def d_log_probs(groups: Groups, kept: Array, where: Array | None, shifts: Arrays, d_x: Array) -> Array:
        d_x = selected(widened(d_x), groups.unmasked(kept, where))
        mean = groups.sum(jnp.exp(_minus(groups.gathered_once, kept, where, shifts)) * d_x)
        # The sign comes last: so the transpose sums the cotangents as they are, without a copy.
        return d_x + groups.gathered_to_unmasked(-mean, d_x, where)

    return log_probs, d_log_probs(groups, kept, where, shifts, d_x)


def _shifts(groups: Groups, x: Array, where: Array | None) -> Arrays:
    """The two terms of the logsumexp of each group, which are subtracted in turn: their sum would lose digits."""
    largest = _largest(groups, x, where)
    total = groups.sum(jnp.exp(_minus(groups.gathered, x, where, (largest,))))
    return largest, jnp.log(_unless_empty(total, groups, x, where))


def _largest(groups: Groups, x: Array, where: Array | None) -> Array:
    """The largest unmasked element of each group, wide, without a derivative; at least the lowest finite number."""
    return shift_of(groups.max(selected(lax.stop_gradient(x), where, -jnp.inf)))


def _minus(gathered: Callable[[Array], Array], x: Array, where: Array | None, shifts: Arrays) -> Array:
    """`x` minus the shifts of its group, one after the other."""
    return functools.reduce(jnp.subtract, map(gathered, shifts), widened(selected(x, where, -jnp.inf)))


def _unless_empty(total: Array, groups: Groups, x: Array, where: Array | None) -> Array:
    """The total of exponentials, or 1 where nothing is unmasked, if JAX looks for NaN on the way to the result."""
    if where is None or not uses_plain_rules():
        return total
    unmasked = jnp.broadcast_to(where, x.shape) & unknown(True, jnp.bool_)
    return jnp.where(groups.sum(unmasked.astype(jnp.int32)) == 0, 1, total)
