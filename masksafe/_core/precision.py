"""The dtype in which a dtype is summed."""

from typing import Any

import jax.numpy as jnp

from masksafe._core.typing import Array


def wide_dtype(dtype: Any) -> Any:
    """The dtype in which it is safe to accumulate `dtype`, a float: float32 at least."""
    # jnp.promote_types would refuse a dtype of 16 bits under strict promotion.
    return jnp.dtype(jnp.float32 if jnp.finfo(dtype).bits < 32 else dtype)


def widened(x: Array) -> Array:
    """`x` in a dtype in which it is safe to accumulate."""
    return x.astype(wide_dtype(float_dtype(x)))


def float_dtype(x: Array) -> Any:
    return x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.result_type(float)
