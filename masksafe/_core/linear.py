"""Elementwise functions that JAX treats as linear: they do to derivatives of every order what they do to values.

A masked element has weight 0. Times a negative number this is -0; times NaN or infinity it is NaN.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from masksafe._core import sharding
from masksafe._core.typing import Array


def _as_linear(
    name: str, fn: Callable[[Array], Array], transpose: Callable[[Array], Array] | None = None
) -> Callable[[Array], Array]:
    """`fn` as a linear function: it is its own derivative, and its own transpose unless another is given."""
    primitive = Primitive(name)

    def bind(x: Array) -> Array:
        result: Array = primitive.bind(x)
        return result

    def transposed(cotangent: Array, _: Array) -> list[Array]:
        return [(transpose or bind)(cotangent)]

    primitive.def_impl(jax.jit(fn))
    primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(primitive, mlir.lower_fun(fn, multiple_results=False))
    ad.deflinear2(primitive, transposed)
    batching.primitive_batchers[primitive] = lambda args, axes: (bind(*args), axes[0])
    return bind


# `x` with 0 for -0; its cotangent likewise. A sum that starts from 0 is never -0; but XLA does not start from 0 where a
# sum has one term, nor, on a CPU, in the product of a matrix and a vector. There a masked term would give the result
# its sign.
without_sign_of_zero = _as_linear("without_sign_of_zero", lambda x: jnp.where(x == 0, 0, x))

# `x` with 0 for NaN and infinity; its cotangent is unchanged. So a tangent that is not finite is removed like a value,
# but a cotangent stays visible.
finite_or_zero = _as_linear("finite_or_zero", lambda x: jnp.where(jnp.isfinite(x), x, 0), lambda cotangent: cotangent)

# `x`; its cotangent with 0 for NaN and infinity.
with_finite_cotangent = _as_linear("with_finite_cotangent", lambda x: x, finite_or_zero)

# NaN where `x` is not 0; its cotangent likewise.
nan_unless_zero = _as_linear("nan_unless_zero", lambda x: jnp.where(x == 0, x, jnp.nan))

# NaN where `x` is not finite, and 0 elsewhere; its cotangent is 0.
nan_unless_finite = _as_linear(
    "nan_unless_finite", lambda x: jnp.where(jnp.isfinite(x), 0, jnp.asarray(jnp.nan, x.dtype)), jnp.zeros_like
)


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
