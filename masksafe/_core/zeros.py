"""The sign of a 0.

A masked element has the weight 0, and its product with a negative number is -0. A sum that starts from 0 is never -0;
but XLA does not start from 0 where a sum has one term, nor, on a CPU, in the product of a matrix and a vector. There
the sign of what is masked would be that of the result.
"""

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from masksafe._core.typing import Array


def without_sign_of_zero(x: Array) -> Array:
    """`x` with 0 for -0.

    A linear function that is its own transpose, so that derivatives of every order lose the sign where values do.
    """
    return _without_sign_of_zero.bind(x)


def _selected(x: Array) -> Array:
    return jnp.where(x == 0, 0, x)


def _transposed(cotangent: Array, _: Array) -> list[Array]:
    return [without_sign_of_zero(cotangent)]


_without_sign_of_zero = Primitive("without_sign_of_zero")
_without_sign_of_zero.def_impl(jax.jit(_selected))
_without_sign_of_zero.def_abstract_eval(lambda x: x)
mlir.register_lowering(_without_sign_of_zero, mlir.lower_fun(_selected, multiple_results=False))
ad.deflinear2(_without_sign_of_zero, _transposed)
batching.primitive_batchers[_without_sign_of_zero] = lambda args, axes: (without_sign_of_zero(*args), axes[0])
