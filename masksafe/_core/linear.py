"""Elementwise functions that JAX treats as linear: they do to derivatives of every order what they do to values.

A masked element has weight 0. Times a negative number this is -0; times NaN or infinity it is NaN.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

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
# sum has one term, nor, on a CPU, in the product of a matrix and a vector. There a masked term would give the result
# its sign.
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
