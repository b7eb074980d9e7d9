"""How an op gets its hand-written reverse rule, and when JAX's own rules replace it.

A `jax.custom_vjp` function has no rule for pure forward mode (`jax.jvp`, `jax.linearize`, `jax.jacfwd`), so JAX refuses
it; and the gradient of such a function may be lost under checkify. The primal of every such op is itself safe to
differentiate, so in both cases it is called in place of the `custom_vjp` function.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from masksafe._core import platforms
from masksafe._core.sharding import Shardings, are_whole, vary_alike, zeros_of_types
from masksafe._core.switches import uses_plain_rules
from masksafe._core.typing import Array, Function


def with_reverse_rule(
    forward: Callable[..., tuple[Any, Any]], reverse: Callable[..., Any], *, static_argnums: tuple[int, ...] = ()
) -> Callable[[Function], Function]:
    """Decorates the primal of an op with its reverse rule.

    `forward` takes the primal's arguments and returns `(output, residuals)`; `reverse` takes the static
    arguments, the residuals and the cotangent of the output, and returns a tuple of cotangents, with None for
    an argument without one. The primal must be safe under `jax.jvp`.
    """

    def decorate(primal: Function) -> Function:
        def forward_with_types(*args: Any) -> tuple[Any, Any]:
            output, residuals = forward(*args)
            arrays = [arg for i, arg in enumerate(args) if i not in static_argnums]
            return output, (residuals, Shardings.of(arrays))

        def reverse_to_types(*args: Any) -> Any:
            *static, (residuals, shardings), d_output = args
            return shardings.apply(reverse(*static, residuals, d_output))

        primal_with_rule = jax.custom_vjp(primal, nondiff_argnums=static_argnums)
        primal_with_rule.defvjp(forward_with_types, reverse_to_types)

        @functools.partial(jax.jit, static_argnums=static_argnums)
        @functools.wraps(primal)
        def op(*args: Any) -> Any:
            if uses_plain_rules():
                return primal(*args)
            # Where JAX refuses forward mode later than in this call, all that it shows of masksafe is the next line.
            return primal_with_rule(*vary_alike(args))  # forward mode needs `with masksafe.forward_mode():`

        return op  # type: ignore[return-value]

    return decorate


def computed_once(cotangent: Array) -> Array:
    """The cotangent, which a program for a CPU writes to memory before anything uses it.

    Behind a product of matrices with several axes of rows, one of the two products of the reverse pass needs it
    transposed. XLA would compute it twice, once in either order, with all of the exponentials that it is made of.
    """
    return platforms.unfused_on_cpu(cotangent) if are_whole(cotangent) else cotangent


def rule(
    plain: Function,
    forward: Callable[..., tuple[Any, Any]],
    reverse: Callable[..., tuple[Any, ...]],
    in_reverse: Callable[..., tuple[Any, ...]],
    value: Callable[..., tuple[Any, Any]] | None = None,
) -> Function:
    """An op with a hand-written reverse rule, and with the derivatives of `plain` wherever JAX needs other ones.

    All take a static argument first. `plain` is the op as JAX may differentiate it, to any order and in both modes.
    `forward` returns the same output, and residuals. `in_reverse` and `reverse` take the arguments as a tuple, the
    residuals and the cotangent of the output. The former returns the arguments for the reverse pass, in which what the
    user has replaced after the op may be masked as well, and `reverse` their cotangents, with None for an array without
    one. `value`, if given, takes the place of `forward` where nothing is differentiated; its residuals are not used.
    """

    def plain_forward(config: Any, *args: Any) -> tuple[Any, Any]:
        residuals = jax.eval_shape(functools.partial(forward, config), *args)[1]
        return plain(config, *args), zeros_of_types(residuals, args)

    def plain_reverse(config: Any, args: tuple[Any, ...], residuals: Any, d_output: Any) -> tuple[Any, ...]:
        results = jax.eval_shape(functools.partial(reverse, config), args, residuals, d_output)
        leaves: list[Any]
        tree: Any
        leaves, tree = jax.tree.flatten(args)
        wanted = [i for i, d in enumerate(tree.flatten_up_to(results)) if d is not None]

        def of_wanted(*values: Array) -> Any:
            new = dict(zip(wanted, values, strict=True))
            return plain(config, *jax.tree.unflatten(tree, [new.get(i, x) for i, x in enumerate(leaves)]))

        found = jax.vjp(of_wanted, *(leaves[i] for i in wanted))[1](d_output)
        return jax.tree.unflatten(jax.tree.structure(results), found)  # type: ignore[no-any-return]

    evaluate, pull_back = with_derivatives_of(plain_forward)(forward), with_derivatives_of(plain_reverse)(reverse)

    def forward_with_types(config: Any, *args: Any) -> tuple[Any, Any]:
        output, residuals = evaluate(config, *args)
        return output, (args, residuals, Shardings.of(args))

    def reverse_to_types(config: Any, kept: tuple[Any, Any, Shardings], d_output: Any) -> Any:
        args, residuals, shardings = kept
        args = in_reverse(config, args, residuals, d_output)
        return shardings.apply(pull_back(config, args, residuals, d_output))

    with_rule = jax.custom_vjp(lambda config, *args: (value or evaluate)(config, *args)[0], nondiff_argnums=(0,))
    with_rule.defvjp(forward_with_types, reverse_to_types)

    @functools.partial(jax.jit, static_argnums=0)
    @functools.wraps(plain)
    def op(config: Any, *args: Any) -> Any:
        if uses_plain_rules():
            return plain(config, *args)
        # Where JAX refuses forward mode later than in this call, all that it shows of masksafe is the next line.
        return with_rule(config, *vary_alike(args))  # forward mode needs `with masksafe.forward_mode():`

    return op  # type: ignore[return-value]


def with_derivatives_of(plain: Function) -> Callable[[Function], Function]:
    """Decorates a kernel that JAX cannot differentiate with the derivatives of `plain`, an equivalent function.

    A loop whose length depends on values has no reverse mode. Where JAX has to differentiate the kernel, in forward
    mode or for a second derivative, it differentiates `plain` instead, to any order. The first argument of both
    functions is static.
    """

    def decorate(kernel: Function) -> Function:
        op = jax.custom_jvp(kernel, nondiff_argnums=(0,))

        @functools.partial(op.defjvp, symbolic_zeros=True)
        def rule(config: Any, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
            leaves, tree = jax.tree.flatten(primals)
            leaf_tangents = jax.tree.leaves(tangents, is_leaf=lambda t: isinstance(t, SymbolicZero))
            active = [i for i, t in enumerate(leaf_tangents) if not isinstance(t, SymbolicZero)]

            def plain_of_active(*values: Any) -> Any:
                new = dict(zip(active, values, strict=True))
                return plain(config, *jax.tree.unflatten(tree, [new.get(i, x) for i, x in enumerate(leaves)]))

            values, active_tangents = ([a[i] for i in active] for a in (leaves, leaf_tangents))
            return op(config, *primals), jax.jvp(plain_of_active, values, active_tangents)[1]

        return functools.wraps(kernel)(op)  # type: ignore[return-value]

    return decorate
