"""The wide dtypes, in which sums are accumulated, and the limits of a dtype."""

from typing import Any

import jax.numpy as jnp

from masksafe._core.typing import Array


def wide_dtype(dtype: Any) -> Any:
    """The dtype in which to accumulate floats of `dtype`: at least float32."""
    # Under strict promotion, jnp.promote_types refuses 16-bit dtypes.
    return jnp.dtype(jnp.float32 if jnp.finfo(dtype).bits < 32 else dtype)


def widened(x: Array) -> Array:
    """`x` in its wide dtype; integers and booleans become floats."""
    return x.astype(wide_dtype(float_dtype(x.dtype)))


def float_dtype(dtype: Any) -> Any:
    """`dtype` if it is inexact, and JAX's default float for integers and booleans."""
    return dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.result_type(float)


def limits(dtype: Any) -> tuple[Any, Any]:
    """The lowest and the highest number of a real dtype; infinite ones of floats."""
    if jnp.issubdtype(dtype, jnp.floating):
        return -jnp.inf, jnp.inf
    if dtype == jnp.bool_:
        return False, True
    return int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max)
