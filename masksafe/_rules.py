"""How an op gets its hand-written reverse rule, and how the switches step round it.

JAX refuses pure forward mode (`jax.jvp`, `jax.linearize`, `jax.jacfwd`) through a `jax.custom_vjp`
function, because such a function has no rule for it; and it may lose the gradient of one that checkify has
been through. The primal of every op here is itself safe to differentiate, so there the primal takes the place
of the `custom_vjp` function.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from masksafe._switches import uses_plain_rules

Primal = TypeVar("Primal", bound=Callable[..., Any])


def differentiable(
    forward: Callable[..., tuple[Any, Any]], reverse: Callable[..., Any], *, static_argnums: tuple[int, ...] = ()
) -> Callable[[Primal], Primal]:
    """Decorates the primal of an op with its reverse rule.

    `forward` takes the primal's arguments and returns `(output, residuals)`; `reverse` takes the static
    arguments, the residuals and the cotangent of the output, and returns a tuple of cotangents, None for
    an argument that has none. The primal must be safe under `jax.jvp`.
    """

    def decorate(primal: Primal) -> Primal:
        def forward_with_types(*args: Any) -> tuple[Any, Any]:
            output, residuals = forward(*args)
            arrays = [arg for i, arg in enumerate(args) if i not in static_argnums]
            return output, (residuals, _Shardings.of(arrays))

        def reverse_to_types(*args: Any) -> Any:
            *static, (residuals, shardings), d_output = args
            return shardings.apply(reverse(*static, residuals, d_output))

        with_reverse_rule = jax.custom_vjp(primal, nondiff_argnums=static_argnums)
        with_reverse_rule.defvjp(forward_with_types, reverse_to_types)

        @explains_forward_mode
        @functools.wraps(primal)
        def op(*args: Any) -> Any:
            if uses_plain_rules():
                return primal(*args)
            return with_reverse_rule(*_varying_alike(args))

        return op  # type: ignore[return-value]

    return decorate


def explains_forward_mode(fn: Primal) -> Primal:
    """Decorates a function that calls an op, so that JAX's refusal of forward mode tells the way out.

    JAX refuses when the op is run; in a compiled function that is later, and the refusal does not come past here.
    """

    @functools.wraps(fn)
    def explaining(*args: Any) -> Any:
        try:
            return fn(*args)
        except TypeError as error:
            if "custom_vjp" in str(error) and _FORWARD_MODE_NOTE not in getattr(error, "__notes__", ()):
                error.add_note(_FORWARD_MODE_NOTE)
            raise

    return explaining  # type: ignore[return-value]


_FORWARD_MODE_NOTE = (
    "masksafe's ops have forward mode (jax.jvp, jax.linearize, jax.jacfwd) inside `with masksafe.forward_mode():`."
)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Shardings:
    """How the arguments of an op are split over the explicit axes of a mesh.

    Their cotangents have to be split alike, and come out split as all of the arguments are together.
    """

    specs: tuple[Any, ...]
    tree: Any

    @classmethod
    def of(cls, args: Any) -> "_Shardings":
        leaves, tree = jax.tree.flatten(args)
        return cls(tuple(jax.typeof(leaf).sharding for leaf in leaves), tree)

    def apply(self, cotangents: Any) -> tuple[Any, ...]:
        def resharded(cotangent: Any, sharding: Any) -> Any:
            if cotangent is None or jax.typeof(cotangent).sharding.spec == sharding.spec:
                return cotangent
            return jax.sharding.reshard(cotangent, sharding)

        of_args = jax.tree.unflatten(self.tree, self.specs)
        is_none = lambda x: x is None  # noqa: E731
        return tuple(
            None if cotangent is None else jax.tree.map(resharded, cotangent, sharding, is_leaf=is_none)
            for cotangent, sharding in zip(cotangents, of_args, strict=True)
        )


def _varying_alike(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Inside `jax.shard_map`, the arguments with all floats varying over the same mesh axes.

    A reverse rule has to return cotangents that vary as its arguments do, and its results vary as all of them
    do together. JAX makes an array vary where it meets one that does, and sums its cotangent over the devices.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return args
    leaves, tree = jax.tree.flatten(args)
    zero = nothing_of([x for x in leaves if isinstance(x, jax.Array)])

    def moved(x: Any) -> Any:
        is_float = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)
        return x + jnp.asarray(zero, x.dtype) if is_float else x

    return cast(tuple[Any, ...], jax.tree.unflatten(tree, map(moved, leaves)))


def varying_with(tree: Any, others: Any) -> Any:
    """The arrays of `tree`, which inside `jax.shard_map` vary over all mesh axes over which one of `others` does."""
    zero = nothing_of([x for x in jax.tree.leaves(others) if isinstance(x, jax.Array)])
    return jax.tree.map(lambda x: x + zero.astype(x.dtype), tree)


def nothing_of(arrays: list[jax.Array]) -> jax.Array:
    """A zero, and nothing to XLA, that inside `jax.shard_map` varies over all mesh axes over which an array does."""
    plain = [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in arrays]
    return sum((jnp.sum(x[None][:0].astype(jnp.float32)) for x in plain), jnp.zeros(()))


def differentiated_as(plain: Primal) -> Callable[[Primal], Primal]:
    """Decorates a kernel that JAX cannot differentiate with the derivatives of `plain`, which computes the same.

    A loop whose length depends on values has no reverse mode. Where JAX is asked to differentiate the kernel,
    in forward mode or for a second derivative, it differentiates `plain` in its place, to any order. The first
    argument of both is static.
    """

    def decorate(kernel: Primal) -> Primal:
        op = jax.custom_jvp(kernel, nondiff_argnums=(0,))

        @functools.partial(op.defjvp, symbolic_zeros=True)
        def rule(config: Any, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
            leaves, tree = jax.tree.flatten(primals)
            directions = jax.tree.leaves(tangents, is_leaf=lambda t: isinstance(t, SymbolicZero))
            moving = [i for i, t in enumerate(directions) if not isinstance(t, SymbolicZero)]

            def of_moving(*values: Any) -> Any:
                new = dict(zip(moving, values, strict=True))
                return plain(config, *jax.tree.unflatten(tree, [new.get(i, x) for i, x in enumerate(leaves)]))

            values, velocities = ([a[i] for i in moving] for a in (leaves, directions))
            return op(config, *primals), jax.jvp(of_moving, values, velocities)[1]

        return functools.wraps(kernel)(op)  # type: ignore[return-value]

    return decorate
