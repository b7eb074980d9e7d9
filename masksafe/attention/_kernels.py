"""Kernels that compute attention of clean arrays, in which every query sees a key; and the contract around them."""

import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.extend.core import jaxpr_as_fun

from masksafe._core.linear import without_sign_of_zero
from masksafe._core.typing import Array
from masksafe.attention import _pairs
from masksafe.attention._contract import Cotangents, cleaned, cleaned_and_marked
from masksafe.attention._pairs import Pairs, by_key_head, by_query_head, with_bias
from masksafe.attention._plan import Operands, Plan


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


class InContract(NamedTuple):
    """The executor that a kernel becomes within the contract."""

    kernel: Kernel

    def value(self, plan: Plan, x: Operands, pairs: Pairs) -> tuple[Array, Array]:
        pairs = with_bias(x, pairs)
        sees_any = _pairs.sees_any(plan, pairs, x.q.shape[1], x.k.shape[1])
        run = _over_vmap(self.kernel)(functools.partial(self.kernel.run, plan))
        clean, sees_bad = _clean_and_marked(plan, x, pairs)
        return _marked(sees_bad, sees_any, run(self.kernel.prepare(plan, clean, pairs, sees_any)))

    def forward(self, plan: Plan, x: Operands, pairs: Pairs) -> tuple[tuple[Array, Array], Any]:
        pairs, kernel = with_bias(x, pairs), self.kernel
        sees_any = _pairs.sees_any(plan, pairs, x.q.shape[1], x.k.shape[1])

        @_traced
        @_over_vmap(kernel)
        def run(prepared: Any) -> Any:
            results, pull_back = jax.vjp(functools.partial(kernel.run, plan), prepared)
            return results, _split(pull_back, (prepared, results))[0]

        clean, sees_bad = _clean_and_marked(plan, x, pairs)
        results, saved = run(kernel.prepare(plan, clean, pairs, sees_any))
        is_empty = None if sees_any is None else ~by_query_head(sees_any)
        return _marked(sees_bad, sees_any, results), (results, saved, sees_bad, is_empty)

    def marks(self, residuals: Any) -> tuple[Array, Array]:
        _, _, sees_bad, is_empty = residuals
        return sees_bad, jnp.broadcast_to(False if is_empty is None else is_empty, sees_bad.shape)

    def reverse(self, plan: Plan, x: Operands, pairs: Pairs, residuals: Any, d: tuple[Array, Array]) -> Operands:
        kernel, (results, saved, sees_bad, is_empty) = self.kernel, residuals
        pairs, sizes = with_bias(x, pairs), (x.q.shape[1], x.k.shape[1])
        sees_any = _pairs.sees_any(plan, pairs, *sizes)
        clean = x._replace(q=cleaned(x.q, plan.scale), k=cleaned(x.k), v=cleaned(x.v))
        prepared, pull_back_prepared = jax.vjp(lambda x: kernel.prepare(plan, x, pairs, sees_any), clean)
        found = Cotangents.of(*d, sees_bad[..., None], None if is_empty is None else is_empty[..., None])

        @_over_vmap(kernel)
        def pull_back(prepared: Any, results: Any, saved: list[Array], cotangents: Any) -> Any:
            joins: list[Any] = []
            for_reverse: list[Any] = []

            def trace(prepared: Any, _: Any) -> None:
                results, pull_back = jax.vjp(functools.partial(kernel.run, plan), prepared)
                joins.append(_split(pull_back, (prepared, results))[1])
                run_for_reverse = functools.partial(kernel.run_for_reverse, plan)
                for_reverse.append(jax.tree.flatten(jax.vjp(run_for_reverse, prepared)[1]))

            jax.eval_shape(trace, prepared, results)
            joined = joins[0](saved, (prepared, results))
            leaves, (like, tree) = jax.tree.leaves(joined), for_reverse[0]
            if [(x.shape, x.dtype) for x in leaves] == [(x.shape, x.dtype) for x in like]:
                joined = jax.tree.unflatten(tree, leaves)
            return joined(cotangents)[0]

        cotangents = found.do.astype(results[0].dtype), found.dlse[..., 0]
        (dx,) = pull_back_prepared(pull_back(prepared, results, saved, cotangents))
        if 1 in (*sizes, x.q.shape[-1], x.v.shape[-1]):
            dx = dx._replace(**{name: without_sign_of_zero(getattr(dx, name)) for name in "qkv"})
        is_bad = found.needed & ~found.used
        by_problem = by_key_head(is_bad[..., 0], x.k.shape[2])
        seen = jnp.swapaxes(_pairs.seen_by(plan, pairs, *sizes, by_problem), 1, 2)[..., None]
        dq = jnp.where(is_bad, jnp.nan, jnp.where(found.used, dx.q, 0))
        dk, dv = (jnp.where(seen, jnp.nan, a) for a in (dx.k, dx.v))
        if (may_be_seen := _pairs.may_be_seen(plan, pairs, *sizes)) is not None:
            dk, dv = (jnp.where(may_be_seen[:, :, None, None], a, 0) for a in (dk, dv))
        d_bias = dx.bias
        if x.bias is not None:
            d_bias = _pairs.marked_bias(plan, pairs, *sizes, by_problem, d_bias)
        return dx._replace(q=dq, k=dk, v=dv, bias=d_bias)


def _clean_and_marked(plan: Plan, x: Operands, pairs: Pairs) -> tuple[Operands, Array]:
    """Clean operands, and which queries are bad or see something bad, `[B, T, N]`."""
    (q, k, v), bad_queries, bad_keys = cleaned_and_marked(*x[:3], plan.scale)
    bad_queries, bad_keys = by_key_head(bad_queries, x.k.shape[2]), jnp.swapaxes(bad_keys, 1, 2)
    return x._replace(q=q, k=k, v=v), by_query_head(_pairs.see_bad(plan, pairs, bad_queries, bad_keys))


def _marked(is_bad: Array, sees_any: Any, results: tuple[Array, Array]) -> tuple[Array, Array]:
    """The results, NaN for queries that see something bad, 0 and -inf for queries that see no key."""
    o, lse = results
    o, lse = jnp.where(is_bad[..., None], jnp.nan, o), jnp.where(is_bad, jnp.nan, lse)
    if sees_any is not None:
        sees_any = by_query_head(sees_any)
        o, lse = jnp.where(sees_any[..., None], o, 0), jnp.where(sees_any, lse, -jnp.inf)
    return o, lse


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
