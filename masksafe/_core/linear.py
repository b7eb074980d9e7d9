"""Elementwise functions that JAX takes for linear ones: what they do to values, they do to derivatives of every order.

A masked element has the weight 0. Its product with a negative number is -0, and with what is not finite NaN.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from masksafe._core.typing import Array


def without_sign_of_zero(x: Array) -> Array:
    """`x` with 0 for -0; its cotangent likewise.

    A sum that starts from 0 is never -0; but XLA does not start from 0 where a sum has one term, nor, on a CPU, in the
    product of a matrix and a vector. There the sign of what is masked would be that of the result.
    """
    return _without_sign_of_zero(x)


def finite_or_zero(x: Array) -> Array:
    """`x` with 0 for what is not finite; its cotangent as it is.

    So a tangent that is not finite is gone as a value is, but a cotangent shows.
    """
    return _finite_or_zero(x)


def with_finite_cotangent(x: Array) -> Array:
    """`x`; its cotangent with 0 for what is not finite."""
    return _with_finite_cotangent(x)


def nan_unless_zero(x: Array) -> Array:
    """NaN where `x` is not 0; its cotangent likewise."""
    return _nan_unless_zero(x)


def nan_unless_finite(x: Array) -> Array:
    """NaN where `x` is not finite, and 0 elsewhere; its cotangent is 0."""
    return _nan_unless_finite(x)


def _as_linear(
    name: str, of_value: Callable[[Array], Array], of_cotangent: Callable[[Array], Array] | None = None
) -> Callable[[Array], Array]:
    """The function with itself as derivative, and as transpose, unless another one is given."""
    primitive = Primitive(name)

    def bind(x: Array) -> Array:
        result: Array = primitive.bind(x)
        return result

    def transposed(cotangent: Array, _: Array) -> list[Array]:
        return [(of_cotangent or bind)(cotangent)]

    primitive.def_impl(jax.jit(of_value))
    primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(primitive, mlir.lower_fun(of_value, multiple_results=False))
    ad.deflinear2(primitive, transposed)
    batching.primitive_batchers[primitive] = lambda args, axes: (bind(*args), axes[0])
    return bind


_without_sign_of_zero = _as_linear("without_sign_of_zero", lambda x: jnp.where(x == 0, 0, x))
_finite_or_zero = _as_linear("finite_or_zero", lambda x: jnp.where(jnp.isfinite(x), x, 0), lambda cotangent: cotangent)
_with_finite_cotangent = _as_linear("with_finite_cotangent", lambda x: x, finite_or_zero)
_nan_unless_zero = _as_linear("nan_unless_zero", lambda x: jnp.where(x == 0, x, jnp.nan))
_nan_unless_finite = _as_linear(
    "nan_unless_finite", lambda x: jnp.where(jnp.isfinite(x), 0, jnp.asarray(jnp.nan, x.dtype)), jnp.zeros_like
)
