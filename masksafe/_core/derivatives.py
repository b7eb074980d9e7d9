"""How an op gets its hand-written reverse rule, and when JAX's own rules replace it.

A `jax.custom_vjp` function has no rule for pure forward mode (`jax.jvp`, `jax.linearize`, `jax.jacfwd`), so JAX refuses
it; and the gradient of such a function may be lost under checkify. In both cases a plain form of the op is called in
its place, which JAX differentiates to any order and in both modes.
"""

import functools
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from masksafe._core.linear import nan_unless_zero, times, with_tangent_of
from masksafe._core.masks import masks_rows, selected
from masksafe._core.sharding import Shardings, vary_alike, vary_with, zeros_of_types
from masksafe._core.switches import may_compute_masked_rows, uses_plain_rules
from masksafe._core.typing import Array, Arrays, Axes, Function, Pytree, Tree, jitted

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")
_Cotangents = tuple[Pytree, ...]  # of the arguments; None for one without


def rule(
    forward: Callable[_Args, tuple[_Result, Pytree]],
    reverse: Callable[..., _Cotangents],
    value: Callable[..., _Result] | None = None,
    plain: Callable[..., _Result] | None = None,
    *,
    static_argnums: tuple[int, ...] = (0,),
) -> Callable[_Args, _Result]:
    """An op with a hand-written reverse rule, both of whose passes JAX may differentiate once more.

    `forward` returns the output and the residuals; `reverse` takes the static arguments, the residuals and the
    cotangent of the output. `value` replaces `forward` where nothing is differentiated; by default it is the output of
    `forward`. `plain` replaces it where JAX's own rules are to be used; by default it is `value`.
    """
    run: Callable[..., tuple[_Result, Pytree]] = forward
    value_of = value or (lambda *args: run(*args)[0])

    def forward_with_types(*args: Pytree) -> tuple[_Result, Pytree]:
        output, residuals = run(*args)
        return output, (residuals, Shardings.of([arg for i, arg in enumerate(args) if i not in static_argnums]))

    def reverse_to_types(*args: Pytree) -> _Cotangents:
        *static, (residuals, shardings), d_output = args
        return shardings.apply(reverse(*static, residuals, d_output))

    with_rule = jax.custom_vjp(value_of, nondiff_argnums=static_argnums)
    with_rule.defvjp(forward_with_types, reverse_to_types)

    @jitted(*static_argnums)
    @functools.wraps(forward)
    def op(*args: Pytree) -> _Result:
        args = vary_alike(args)
        if uses_plain_rules():
            return (plain or value_of)(*args)
        # If JAX refuses forward mode after this call, its traceback shows only the next line of masksafe.
        return with_rule(*args)  # forward mode needs `with masksafe.forward_mode():`

    return op  # type: ignore[return-value]


def rule_with_plain_form(
    forward: Callable[_Args, tuple[_Result, Pytree]],
    reverse: Callable[..., _Cotangents],
    in_reverse: Callable[..., tuple[Pytree, ...]] | None = None,
    value: Callable[..., _Result] | None = None,
    plain: Callable[..., _Result] | None = None,
    in_plain_reverse: Callable[..., tuple[Pytree, Pytree]] | None = None,
) -> Callable[_Args, _Result]:
    """An op with a hand-written reverse rule, whose passes JAX need not be able to differentiate.

    ==============================  ========================================================
    what a program computes         function called
    ==============================  ========================================================
    the value alone                 `value`, by default the output of `forward`
    the gradient                    `forward`; then `reverse` of what `in_reverse` returns
    derivatives of these passes     `plain`, by default the output of `forward`
    pure forward mode, checkify     `plain`
    ==============================  ========================================================

    All functions take a static argument first. `in_reverse` and `reverse` take the other arguments as a tuple, the
    residuals and the cotangent of the output. `in_reverse` returns the arguments for the reverse pass, by default
    unchanged, and may mask in them what the user has replaced after the op. `in_plain_reverse` returns these arguments
    and the cotangent, for the derivatives of the reverse pass alone. If it is given, the plain form has no NaN of its
    own: its derivatives are NaN where the results or the cotangents are.
    """
    run: Callable[..., tuple[_Result, Pytree]] = forward
    op: Callable[..., _Result] = plain or (lambda *args: run(*args)[0])
    marked: Callable[[Pytree], Pytree] = nan_in_derivatives if in_plain_reverse else (lambda results: results)

    def plain_forward(config: Pytree, *args: Pytree) -> tuple[_Result, Pytree]:
        residuals = jax.eval_shape(functools.partial(run, config), *args)[1]
        return op(config, *args), zeros_of_types(residuals, args)

    def plain_reverse(config: Pytree, args: Pytree, residuals: Pytree, d_output: Pytree) -> _Cotangents:
        results = jax.eval_shape(functools.partial(reverse, config), args, residuals, d_output)
        if in_plain_reverse is not None:
            args, d_output = in_plain_reverse(config, args, residuals, d_output)
        tree: Pytree = jax.tree.structure(args)
        leaves = jax.tree.leaves(args)
        needed = [i for i, d in enumerate(tree.flatten_up_to(results)) if d is not None]

        def op_of_needed(*values: Array) -> _Result:
            new = dict(zip(needed, values, strict=True))
            return op(config, *jax.tree.unflatten(tree, [new.get(i, x) for i, x in enumerate(leaves)]))

        found = jax.vjp(op_of_needed, *(leaves[i] for i in needed))[1](d_output)
        return jax.tree.unflatten(jax.tree.structure(results), found)

    evaluate, pull_back = with_derivatives_of(plain_forward)(run), with_derivatives_of(plain_reverse)(reverse)

    @functools.wraps(forward)
    def forward_with_args(config: Pytree, *args: Pytree) -> tuple[_Result, Pytree]:
        output, residuals = evaluate(config, *args)
        return marked(output), (args, residuals)

    def reverse_with_args(config: Pytree, saved: Pytree, d_output: Pytree) -> _Cotangents:
        args, residuals = saved
        args = args if in_reverse is None else in_reverse(config, args, residuals, d_output)
        return marked(pull_back(config, args, residuals, d_output))

    only_value = value or (lambda *args: evaluate(*args)[0])
    in_forward_mode = (lambda *args: marked(evaluate(*args)[0])) if in_plain_reverse else op
    return rule(forward_with_args, reverse_with_args, only_value, in_forward_mode)  # type: ignore[arg-type]


def with_derivatives_of(plain: Function) -> Callable[[Function], Function]:
    """Decorates a function that JAX cannot differentiate with the derivatives of `plain`, an equivalent function.

    A loop whose length depends on values has no reverse mode. Where JAX has to differentiate the function, in forward
    mode or for a second derivative, it differentiates `plain` instead, to any order. The first argument of both
    functions is static.
    """

    def decorate(fn: Function) -> Function:
        op = jax.custom_jvp(fn, nondiff_argnums=(0,))

        @functools.partial(op.defjvp, symbolic_zeros=True)
        def jvp(config: Pytree, primals: tuple[Pytree, ...], tangents: tuple[Pytree, ...]) -> Pytree:
            leaves, tree = jax.tree.flatten(primals)
            leaf_tangents = jax.tree.leaves(tangents, is_leaf=lambda t: isinstance(t, SymbolicZero))
            active = [i for i, t in enumerate(leaf_tangents) if not isinstance(t, SymbolicZero)]
            results = op(config, *primals)

            def plain_of_active(*values: Array) -> Pytree:
                new = dict(zip(active, values, strict=True))
                found = plain(config, *jax.tree.unflatten(tree, [new.get(i, x) for i, x in enumerate(leaves)]))
                return jax.tree.map(vary_with, found, results)  # as tangents have to

            values, active_tangents = ([a[i] for i in active] for a in (leaves, leaf_tangents))
            return results, jax.jvp(plain_of_active, values, active_tangents)[1]

        return functools.wraps(fn)(op)  # type: ignore[return-value]

    return decorate


def nan_in_derivatives(results: Tree) -> Tree:
    """The results; where one is NaN, its tangent or cotangent is NaN as well, unless that is 0.

    For ops whose plain form has no NaN. A NaN that the user replaces after the op has no part in a gradient.
    """
    return jax.tree.map(_nan_in_derivatives, results)  # one by one: else all would be computed if one is needed


@jax.custom_jvp
def _nan_in_derivatives(x: Array) -> Array:
    return x


@_nan_in_derivatives.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (d_x,) = primals, tangents
    return x, jnp.where(jnp.isnan(x), nan_unless_zero(d_x), d_x)


def elementwise(fn: Callable[..., Array]) -> Callable[..., Array]:
    """Decorates a function of each element of some arrays: where its cotangent is 0, so are those of its arguments.

    Otherwise the slope of an element that the user has replaced, a NaN or infinite one, would meet its cotangent of 0.
    """
    op = jax.custom_jvp(fn)

    def plain(active: tuple[int, ...], *args: Array) -> tuple[Array, Arrays]:
        """The value, and its slopes by some of the arguments."""

        def of_active(*values: Array) -> Array:
            new = dict(zip(active, values, strict=True))
            return fn(*(new.get(i, x) for i, x in enumerate(args)))

        value, pull_back = jax.vjp(of_active, *(args[i] for i in active))
        return value, pull_back(jnp.ones_like(value))

    with_slopes = jax.custom_jvp(plain, nondiff_argnums=(0,))

    @with_slopes.defjvp
    def _(active: tuple[int, ...], primals: Arrays, tangents: Arrays) -> Pytree:
        d_slopes = jax.jvp(functools.partial(plain, active), primals, tangents)[1][1]
        return with_slopes(active, *primals), (jax.jvp(op, primals, tangents)[1], d_slopes)

    @functools.partial(op.defjvp, symbolic_zeros=True)
    def _(primals: Arrays, tangents: tuple[Pytree, ...]) -> tuple[Array, Array]:
        active = {i: d for i, d in enumerate(tangents) if not isinstance(d, SymbolicZero)}
        value, slopes = with_slopes(tuple(active), *primals)
        return value, functools.reduce(jnp.add, map(times, slopes, active.values()))

    return functools.wraps(fn)(lambda *args: op(*vary_alike(tuple(jnp.broadcast_arrays(*args)))))


# A product of factors either of which may be garbage.
product = elementwise(jnp.multiply)


def without_mask_of_rows(where: Array | None, axes: Axes, *arrays: Array) -> tuple[Sequence[Array], Array | None]:
    """The arrays, and the mask by which to select their elements; a mask of rows, which lie along `axes`, needs none.

    The caller selects the results of masked rows. To select the elements as well would be one more pass.
    """
    if where is None or not masks_rows(where, axes) or not may_compute_masked_rows():
        return arrays, where
    return [masked_in_derivatives(x, where) for x in arrays], None


def masked_in_derivatives(x: Array, where: Array) -> Array:
    """`x` unchanged; only its derivatives, of any order, are replaced by 0 at masked elements."""
    return with_tangent_of(selected(x, where), x)
