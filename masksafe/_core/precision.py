"""The wide dtypes, in which sums are accumulated, and the limits of a dtype."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core.typing import Array, ArrayLike, DType


def wide_dtype(dtype: DType) -> DType:
    """The dtype in which to accumulate floats of `dtype`: at least float32."""
    # Under strict promotion, jnp.promote_types refuses 16-bit dtypes.
    return jnp.dtype(jnp.float32 if jnp.finfo(dtype).bits < 32 else dtype)


def widened(x: Array) -> Array:
    """`x` in its wide dtype; integers and booleans become floats."""
    return x.astype(wide_dtype(float_dtype(x.dtype)))


def float_dtype(dtype: DType) -> DType:
    """`dtype` if it is inexact, and JAX's default float for integers and booleans."""
    return dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.result_type(float)


def default_or_wider(dtype: DType) -> DType:
    """`dtype`, or JAX's default float if that is wider."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(dtype, jnp.result_type(float))


def promoted(*types: Any) -> DType:
    """The dtype to which JAX promotes arrays, numbers or dtypes; integers beside floats under strict promotion too."""
    floats = [t for t in types if _is_float(t)]
    if floats:
        jnp.result_type(*floats)  # strict promotion refuses two of them
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*types)


def with_wide_numbers(*arrays: ArrayLike) -> list[Array]:
    """The arrays; numbers of Python, integers and booleans among them get the wide dtype of all."""
    with jax.numpy_dtype_promotion("standard"):
        wide = wide_dtype(float_dtype(jnp.result_type(*arrays)))
    with jax.debug_nans(False):  # what is masked may be NaN before an op
        return [jnp.asarray(x, None if _is_float(x) and not jax.typeof(x).weak_type else wide) for x in arrays]


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.inexact))


def limits(dtype: DType) -> tuple[float, float]:
    """The lowest and the highest number of a real dtype; infinite ones of floats."""
    if jnp.issubdtype(dtype, jnp.floating):
        return -jnp.inf, jnp.inf
    if dtype == jnp.bool_:
        return False, True
    return int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max)


def matmul(a: Array, b: Array, axis_of_a: int, axis_of_b: int) -> Array:
    """A matrix product, accumulated in the wide dtype."""
    dimensions = (((axis_of_a,), (axis_of_b,)), ((), ()))
    return lax.dot_general(a, b, dimensions, preferred_element_type=wide_dtype(b.dtype))
