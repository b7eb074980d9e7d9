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
from masksafe._core.sharding import Shardings, are_whole, vary_alike
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

        @explains_forward_mode
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


def explains_forward_mode(fn: Function) -> Function:
    """Decorates a function that calls an op: adds the way out to JAX's refusal of forward mode.

    JAX refuses when it runs the op. Inside a compiled function that happens later, and the message is JAX's alone.
    """

    @functools.wraps(fn)
    def explaining(*args: Any) -> Any:
        try:
            return fn(*args)
        except TypeError as error:
            text = str(error)
            if "custom_vjp" in text and _FORWARD_MODE_HINT not in text:
                error.args = (f"{text} {_FORWARD_MODE_HINT}",)
            raise

    return explaining  # type: ignore[return-value]


_FORWARD_MODE_HINT = (
    "masksafe's ops have forward mode (jax.jvp, jax.linearize, jax.jacfwd) inside `with masksafe.forward_mode():`."
)


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
