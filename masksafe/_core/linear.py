"""Elementwise functions that JAX treats as linear: they do to derivatives of every order what they do to values.

A masked element has weight 0. Times a negative number this is -0; times NaN or infinity it is NaN.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from masksafe._core import sharding
from masksafe._core.typing import Array

_Function = Callable[[Array], Array]


def _as_linear(name: str, fn: _Function, transpose: tuple[str, _Function] | None = None) -> tuple[_Function, _Function]:
    """`fn` as a linear function, and its transpose: `fn` too, unless another is given.

    Each is its own derivative, and the transpose of the other: so what they do survives reverse over reverse.
    """
    function = _primitive(name, fn)
    transposed = function if transpose is None else _primitive(*transpose)
    for one, other in ((function, transposed), (transposed, function)):
        ad.deflinear2(one, lambda cotangent, _, other=other: [other.bind(cotangent)])
    return function.bind, transposed.bind


def _primitive(name: str, fn: _Function) -> Any:
    primitive = Primitive(name)
    primitive.def_impl(jax.jit(fn))
    primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(primitive, mlir.lower_fun(fn, multiple_results=False))
    batching.primitive_batchers[primitive] = lambda args, axes: (primitive.bind(*args), axes[0])
    return primitive


# `x` with 0 for -0; its cotangent likewise. A sum that starts from 0 is never -0; but XLA does not start from 0 where a
# sum has one term, nor, on a CPU, in the product of a matrix and a vector (jax 0.10 and 0.12). There a masked term
# would give the result its sign.
without_sign_of_zero, _ = _as_linear("without_sign_of_zero", lambda x: jnp.where(x == 0, 0, x))

# `x` with 0 for NaN and infinity; its cotangent is unchanged. So a tangent that is not finite is removed like a value,
# but a cotangent stays visible. And `x`; its cotangent with 0 for NaN and infinity.
finite_or_zero, with_finite_cotangent = _as_linear(
    "finite_or_zero", lambda x: jnp.where(jnp.isfinite(x), x, 0), ("with_finite_cotangent", lambda x: x)
)

# `x` with 0 for NaN, infinity and -0; its cotangent likewise.
finite_or_zero_both_ways, _ = _as_linear(
    "finite_or_zero_both_ways", lambda x: jnp.where(jnp.isfinite(x) & (x != 0), x, 0)
)

# NaN where `x` is not 0; its cotangent likewise.
nan_unless_zero, _ = _as_linear("nan_unless_zero", lambda x: jnp.where(x == 0, x, jnp.nan))

# NaN where `x` is not finite, and 0 elsewhere; its cotangent is 0.
nan_unless_finite, _ = _as_linear(
    "nan_unless_finite",
    lambda x: jnp.where(jnp.isfinite(x), 0, jnp.asarray(jnp.nan, x.dtype)),
    ("zero_with_nan_in_cotangent", jnp.zeros_like),
)


# Linear in one of two arguments.


def with_tangent_of(other: Array, value: Array) -> Array:
    """`value`, with the tangent of another array, and so with all of its derivatives."""
    return _with_tangent_of(*sharding.vary_alike((other, value)))


@jax.custom_jvp
def _with_tangent_of(other: Array, value: Array) -> Array:
    return value


@_with_tangent_of.defjvp
def _tangent_of_other(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    return _with_tangent_of(*primals), tangents[0]


# Linear in each of two arguments.


def times(slope: Array, d: Array) -> Array:
    """The product of a slope and a tangent or cotangent; 0 where that is 0, even if the slope is NaN or infinite.

    So a result whose cotangent is 0, which the user has replaced, has no part in a gradient. Inside `jax.shard_map` the
    slope varies over all devices over which `d` does.
    """
    product: Array = _times.bind(slope, sharding.vary_with(d, slope))
    return product


def _product(slope: Array, d: Array) -> Array:
    return lax.select(d == 0, d, slope * d)


def _batched_times(args: Sequence[Array], axes: Sequence[int | None]) -> tuple[Array, int]:
    size = next(x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None)
    return times(*(batching.bdim_at_front(x, axis, size) for x, axis in zip(args, axes, strict=True))), 0


_times = Primitive("times")
_times.def_impl(jax.jit(_product))
_times.def_abstract_eval(lambda slope, _: slope)
mlir.register_lowering(_times, mlir.lower_fun(_product, multiple_results=False))
ad.defbilinear(_times, lambda cotangent, _, d: times(cotangent, d), lambda cotangent, slope, _: times(slope, cotangent))
batching.primitive_batchers[_times] = _batched_times
