r"""Logits with a soft cap, :math:`c \tanh(x / c)`; a cap of None changes nothing."""

import jax.numpy as jnp

from masksafe._core.typing import Array


def soft_capped(x: Array, cap: float | None) -> Array:
    """The logits after the cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)
