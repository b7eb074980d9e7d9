"""Whether this jaxlib computes what a program says."""

import importlib.metadata

import jax
import jax.numpy as jnp

from masksafe._reductions import mean
from masksafe.losses import l2_loss


def fault() -> str | None:
    """What is wrong, or None. On CPUs, jaxlib 0.10.2 loses rows of a product behind a vmap (jax#39103)."""
    x = jnp.arange(32_769.0)
    rows = jnp.stack([x, jnp.zeros_like(x), jnp.zeros_like(x)], -1)
    loss_of_row = lambda row: mean(l2_loss(jnp.eye(3) @ row))  # noqa: E731
    if jnp.allclose(jax.jit(jax.vmap(loss_of_row))(rows), jnp.square(x) / 6):
        return None
    jaxlib = importlib.metadata.version("jaxlib")
    return f"jaxlib {jaxlib} computes wrong sums here, also without masksafe (jax#39103). Install another version."
