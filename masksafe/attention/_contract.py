"""What the contract requires of attention, whatever computes it.

A kernel contracts over masked pairs too, with weight 0, and 0 times NaN is NaN. So bad elements are replaced by 0
before any product, and marked in the results: the output of a query that sees something bad is NaN, and that of a query
that sees no key is 0. An element is bad if it is not finite, or so large that a product of two rows may overflow.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.extend.core import jaxpr_as_fun

from masksafe._core.derivatives import rule_with_plain_form
from masksafe._core.linear import finite_or_zero, with_tangent_of, without_sign_of_zero
from masksafe._core.precision import wide_dtype
from masksafe._core.run_time import any_of
from masksafe._core.typing import Array, DType
from masksafe.attention import _pairs
from masksafe.attention._merge import Partial
from masksafe.attention._pairs import Pairs, by_heads, by_key_head, by_query_head
from masksafe.attention._plan import Operands, Plan


def largest(dtype: DType, width: int, factor: float = 1.0) -> float:
    """How large an element of a row of this width may be, also times a factor: 2^62 / sqrt(width) in float32.

    It is rounded down to a power of two, which is a number of every dtype. The logits of two such rows are at most
    2^124, so that a kernel may add -2^126 to those that are masked.
    """
    exponent = (jnp.finfo(wide_dtype(dtype)).maxexp - 4) / 2 - math.log2(max(1, width)) / 2
    exponent = math.floor(exponent - math.log2(max(1.0, abs(factor))))
    return min(float(jnp.finfo(dtype).max), 2.0**exponent)


def are_good(x: Array, factor: float = 1.0) -> Array:
    """Where all elements along the last axis are good, `[...]`.

    Not by a maximum, in which XLA's library for CPUs loses a NaN. The array is to be in the user's layout: of another
    one XLA would make a copy for each use.
    """
    return jnp.all(is_good(x, factor), -1)


def are_cotangents_good(do: Array, dlse: Array) -> Array:
    """Which queries have good cotangents, `[B, T, N]`; the caller may have made these constant."""
    return ~any_of(~is_good(do), -1) & jnp.isfinite(dlse)


def bad_keys(k: Array, v: Array) -> Array:
    """Which keys are bad or have a bad value, `[B, K, S]`."""
    return jnp.swapaxes(~(are_good(k) & are_good(v)), 1, 2)


def is_good(x: Array, factor: float = 1.0) -> Array:
    """Which elements are good."""
    return jnp.abs(x) <= x.dtype.type(largest(x.dtype, x.shape[-1], factor))


def cleaned(x: Array, factor: float = 1.0) -> Array:
    """`x` with 0 for bad elements; the derivative is the identity."""
    return with_tangent_of(x, jnp.where(is_good(x, factor), x, x.dtype.type(0)))


def are_needed(do: Array, dlse: Array) -> Array:
    """Which queries have a cotangent that is not 0 `[B, T, N, 1]`.

    A query without cotangents takes no part in the reverse pass: if it has a NaN, this was selected away after the op,
    as a loss does with padded queries.
    """
    return any_of(do != 0, -1, keepdims=True) | (dlse != 0)[..., None]


# Around a kernel.


class Kernel(Protocol):
    """What computes attention of clean arrays, in which every query sees a key."""

    merges_batches: ClassVar[bool] = False  # whether `jax.vmap` makes one batch of both dimensions

    def prepare(self, plan: Plan, x: Operands, pairs: Pairs, sees_any: Any) -> Any:
        """The kernel's arguments, all `[B, ...]`; a query without a key, where `sees_any` is False, sees some here."""

    def run(self, plan: Plan, prepared: Any) -> tuple[Array, Array]:
        """Output and logsumexp, which JAX can differentiate once; a logsumexp that is not needed may be anything."""

    def run_for_reverse(self, plan: Plan, prepared: Any) -> tuple[Array, Array]:
        """The same; its pull-back may leave out gradients that are not needed, if it takes the same arrays."""
        return self.run(plan, prepared)


class Config(NamedTuple):
    """The static parameters."""

    kernel: Kernel
    plain: Callable[..., Any]  # gives the derivatives that JAX cannot compute here
    plan: Plan


def attend(kernel: Kernel, plain: Callable[..., Any], plan: Plan, x: Operands, pairs: Pairs) -> tuple[Array, Array]:
    """The output `[B, T, N, width of v]` and the logsumexp `[B, T, N]`."""
    return _attend(Config(kernel, plain, plan), _clean(plan, x), pairs)


def value(kernel: Kernel, plan: Plan, x: Operands, pairs: Pairs) -> Partial:
    """The same, wide, as a `Partial` of all keys; not differentiated."""
    x = _clean(plan, x)
    sees_any = _pairs.sees_any(plan, pairs, x.q.shape[1], x.k.shape[1])
    run = _over_vmap(kernel)(functools.partial(kernel.run, plan))
    results = run(kernel.prepare(plan, x, pairs, sees_any))
    is_bad = by_query_head(_pairs.see_bad(plan, pairs, x.q.shape[1], x.k.shape[1]))
    o, lse = _marked(is_bad, sees_any, results)
    return Partial(o, lse[..., None], jnp.ones_like(lse[..., None]))


def _clean(plan: Plan, x: Operands) -> Operands:
    return x._replace(q=cleaned(x.q, plan.scale), k=cleaned(x.k), v=cleaned(x.v))


def _with_bias(x: Operands, pairs: Pairs) -> Pairs:
    return pairs._replace(bias=by_heads(x.bias, x.k.shape[2]))


def _marked(is_bad: Array, sees_any: Any, results: tuple[Array, Array]) -> tuple[Array, Array]:
    """The results, NaN for queries that see something bad, 0 and -inf for queries that see no key."""
    o, lse = results
    o, lse = jnp.where(is_bad[..., None], jnp.nan, o), jnp.where(is_bad, jnp.nan, lse)
    if sees_any is not None:
        sees_any = by_query_head(sees_any)
        o, lse = jnp.where(sees_any[..., None], o, 0), jnp.where(sees_any, lse, -jnp.inf)
    return o, lse


def _forward(config: Config, x: Operands, pairs: Pairs) -> tuple[tuple[Array, Array], Any]:
    kernel, _, plan = config
    pairs = _with_bias(x, pairs)
    sees_any = _pairs.sees_any(plan, pairs, x.q.shape[1], x.k.shape[1])

    @_traced
    @_over_vmap(kernel)
    def run(prepared: Any) -> Any:
        results, pull_back = jax.vjp(functools.partial(kernel.run, plan), prepared)
        return results, _split(pull_back, (prepared, results))[0]

    results, saved = run(kernel.prepare(plan, x, pairs, sees_any))
    is_bad = by_query_head(_pairs.see_bad(plan, pairs, x.q.shape[1], x.k.shape[1]))
    o, lse = _marked(is_bad, sees_any, results)
    return (o.astype(x.q.dtype) if plan.rounds else o, lse), (results, saved, is_bad)


def _value(config: Config, x: Operands, pairs: Pairs) -> tuple[Array, Array]:
    o, m, _ = value(config.kernel, config.plan, x, _with_bias(x, pairs))
    return o.astype(x.q.dtype) if config.plan.rounds else o, m[..., 0]


def _reverse(config: Config, args: tuple[Operands, Pairs], residuals: Any, d: tuple[Array, Array]) -> Any:
    kernel, _, plan = config
    (x, pairs), (results, saved, sees_bad), (do, dlse) = args, residuals, d
    pairs, sizes = _with_bias(x, pairs), (x.q.shape[1], x.k.shape[1])
    sees_any = _pairs.sees_any(plan, pairs, *sizes)
    prepared, pull_back_prepared = jax.vjp(lambda x: kernel.prepare(plan, x, pairs, sees_any), x)
    needed = are_needed(do, dlse)[..., 0]
    needed = needed if sees_any is None else needed & by_query_head(sees_any)
    is_bad = sees_bad | ~are_cotangents_good(do, dlse)
    used, is_bad = needed & ~is_bad, needed & is_bad
    cotangents = jnp.where(used[..., None], do, 0).astype(results[0].dtype), jnp.where(used, dlse, 0)

    @_over_vmap(kernel)
    def pull_back(prepared: Any, results: Any, saved: list[Array], cotangents: Any) -> Any:
        joins: list[Any] = []
        for_reverse: list[Any] = []

        def trace(prepared: Any, _: Any) -> None:
            results, pull_back = jax.vjp(functools.partial(kernel.run, plan), prepared)
            joins.append(_split(pull_back, (prepared, results))[1])
            for_reverse.append(jax.tree.flatten(jax.vjp(functools.partial(kernel.run_for_reverse, plan), prepared)[1]))

        jax.eval_shape(trace, prepared, results)
        joined = joins[0](saved, (prepared, results))
        leaves, (like, tree) = jax.tree.leaves(joined), for_reverse[0]
        if [(x.shape, x.dtype) for x in leaves] == [(x.shape, x.dtype) for x in like]:
            joined = jax.tree.unflatten(tree, leaves)
        return joined(cotangents)[0]

    (dx,) = pull_back_prepared(pull_back(prepared, results, saved, cotangents))
    if 1 in (*sizes, x.q.shape[-1], x.v.shape[-1]):
        dx = dx._replace(**{name: without_sign_of_zero(getattr(dx, name)) for name in "qkv"})
    by_problem = by_key_head(is_bad, x.k.shape[2])
    seen = jnp.swapaxes(_pairs.seen_by(plan, pairs, *sizes, by_problem), 1, 2)[..., None]
    dq = jnp.where(is_bad[..., None], jnp.nan, jnp.where(used[..., None], dx.q, 0))
    dk, dv = (jnp.where(seen, jnp.nan, a) for a in (dx.k, dx.v))
    if (may_be_seen := _pairs.may_be_seen(plan, pairs, *sizes)) is not None:
        dk, dv = (jnp.where(may_be_seen[:, :, None, None], a, 0) for a in (dk, dv))
    d_bias = dx.bias
    if x.bias is not None:
        d_bias = _pairs.marked_bias(plan, pairs, *sizes, by_problem, d_bias)
    return dx._replace(q=dq, k=dk, v=dv, bias=d_bias), jax.tree.map(lambda _: None, args[1])


def _plain(config: Config, x: Operands, pairs: Pairs) -> tuple[Array, Array]:
    return config.plain(config.plan, x, pairs)


def _in_plain_reverse(
    config: Config, args: tuple[Operands, Pairs], residuals: Any, d: tuple[Array, Array]
) -> tuple[Any, Any]:
    x, pairs = args
    sees_any = _pairs.sees_any(config.plan, _with_bias(x, pairs), x.q.shape[1], x.k.shape[1])
    is_empty = jnp.zeros_like(residuals[2]) if sees_any is None else ~by_query_head(sees_any)
    return in_plain_reverse(args, d, residuals[2], jnp.broadcast_to(is_empty, residuals[2].shape))


def in_plain_reverse(args: tuple[Operands, Pairs], d: tuple[Array, Array], is_bad: Array, is_empty: Array) -> Any:
    """The arguments and the cotangents for derivatives of the reverse pass, given bad and empty queries `[B, T, N]`.

    A good query without a cotangent may have one in a derivative; but derivatives of its logits have no effect.
    """
    (x, pairs), (do, dlse) = args, d
    needed = are_needed(*map(lax.stop_gradient, d))
    used = (~is_empty & (needed[..., 0] | ~is_bad))[..., None]
    do, dlse = jnp.where(used, do, 0), jnp.where(used[..., 0], dlse, 0)
    shows = jnp.where(needed, jnp.sum(0 * do, -1, keepdims=True), 0)
    x = x._replace(q=x.q + shows.astype(x.q.dtype))
    do = jnp.where(needed, finite_or_zero(do), do)
    unneeded, showing = (by_key_head(a[..., 0], x.k.shape[2]) for a in (~used, needed))
    return (x, pairs._replace(unneeded=unneeded, showing=showing)), (do, dlse)


_attend = rule_with_plain_form(_forward, _reverse, None, _value, _plain, _in_plain_reverse)


_T = TypeVar("_T")


def _split(pull_back: Any, known: Any) -> tuple[list[Array], Callable[[list[Array], Any], Any]]:
    """The arrays that a pull-back holds besides those of `known`, and a function that puts it together again."""
    leaves, tree = jax.tree.flatten(pull_back)
    places = [next((n for n, x in enumerate(jax.tree.leaves(known)) if x is leaf), None) for leaf in leaves]
    empty = {n: (leaf.shape, leaf.dtype) for n, leaf in enumerate(leaves) if leaf.size == 0}
    saved = [leaf for n, leaf in enumerate(leaves) if places[n] is None and n not in empty]

    def join(saved: list[Array], known: Any) -> Any:
        rest, known = iter(saved), jax.tree.leaves(known)
        leaves = [
            jnp.zeros(*empty[n]) if n in empty else next(rest) if place is None else known[place]
            for n, place in enumerate(places)
        ]
        return jax.tree.unflatten(tree, leaves)

    return saved, join


def _traced(fn: Callable[..., _T]) -> Callable[..., _T]:
    """The function, traced under `jax.disable_jit` as well: otherwise its pull-back would hold other arrays."""

    def traced(*args: Any) -> _T:
        if not jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return fn(*args)
        program, types = jax.make_jaxpr(fn, return_shape=True)(*args)
        return jax.tree.unflatten(jax.tree.structure(types), jaxpr_as_fun(program)(*jax.tree.leaves(args)))

    return traced


def _over_vmap(kernel: Kernel) -> Callable[[Callable[..., _T]], Callable[..., _T]]:
    """A function of arrays `[B, ...]`; under `jax.vmap` of one batch of both dimensions, if the kernel merges them."""
    return over_merged_batch if kernel.merges_batches else lambda fn: fn


def over_merged_batch(fn: Callable[..., _T]) -> Callable[..., _T]:
    """A function of arrays `[B, ...]`; under `jax.vmap` of one batch of both dimensions."""
    op = custom_vmap(fn)

    @op.def_vmap
    def over_batch(number: int, is_batched: Any, *args: Any) -> Any:
        flags = jax.tree.leaves(tuple(is_batched))
        batch = max(x.shape[1 if flag else 0] for x, flag in zip(jax.tree.leaves(args), flags, strict=True))

        def merged(x: Array, flag: bool) -> Array:
            x = x if flag else x[None]
            return jnp.broadcast_to(x, (number, batch, *x.shape[2:])).reshape(number * batch, *x.shape[2:])

        results = op(*jax.tree.map(merged, args, tuple(is_batched)))
        results = jax.tree.map(lambda x: x.reshape(number, batch, *x.shape[1:]), results)
        return results, jax.tree.map(lambda _: True, results)

    return op
