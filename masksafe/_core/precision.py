"""The wide dtypes, in which sums are accumulated, and the limits of a dtype."""

import jax
import jax.numpy as jnp

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


def with_wide_numbers(*arrays: ArrayLike) -> list[Array]:
    """The arrays; numbers of Python among them get the wide dtype of all, which may be less than float64."""
    with jax.numpy_dtype_promotion("standard"):
        wide = wide_dtype(float_dtype(jnp.result_type(*arrays)))
    return [jnp.asarray(x, wide if jax.typeof(x).weak_type else None) for x in arrays]


def limits(dtype: DType) -> tuple[float, float]:
    """The lowest and the highest number of a real dtype; infinite ones of floats."""
    if jnp.issubdtype(dtype, jnp.floating):
        return -jnp.inf, jnp.inf
    if dtype == jnp.bool_:
        return False, True
    return int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max)
