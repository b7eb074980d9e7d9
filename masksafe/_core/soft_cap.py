r"""Logits with a soft cap, :math:`c \tanh(x / c)`, and its derivative; a cap of None changes nothing."""

import jax.numpy as jnp

from masksafe._core.typing import Array


def soft_capped(x: Array, cap: float | None) -> Array:
    """The logits after the cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def pulled_back(d_capped: Array, capped: Array, cap: float | None) -> Array:
    """The cotangent of the logits, from that of the capped logits."""
    return d_capped if cap is None else d_capped * (1 - jnp.square(capped / cap))
