"""Random arrays of the benchmarks. Where only their shapes are wanted, in `jax.eval_shape`, nothing is drawn."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def normal(shape: Sequence[int], dtype: Any = jnp.float32, seed: int = 0) -> jax.Array:
    if is_traced():
        return jnp.zeros(shape, dtype)
    if jax.default_backend() == "gpu":  # in arrays of its size NumPy would take longer than all that is timed
        return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)
    return jnp.asarray(_standard_normal(tuple(shape), seed), dtype)


@functools.lru_cache(maxsize=2)  # the cotangents of all candidates are the same
def _standard_normal(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def bits(shape: Sequence[int], fraction: float, seed: int = 0) -> jax.Array:
    """Booleans, of which that fraction is True."""
    if is_traced():
        return jnp.zeros(shape, bool)
    if jax.default_backend() == "gpu":
        return jax.random.bernoulli(jax.random.key(seed), fraction, shape)
    return jnp.asarray(np.random.default_rng(seed).random(shape, np.float32) < fraction)


def labels(shape: Sequence[int], classes: int, seed: int = 0) -> jax.Array:
    if is_traced():
        return jnp.zeros(shape, jnp.int32)
    return jnp.asarray(np.random.default_rng(seed).integers(classes, size=shape), jnp.int32)


def is_traced() -> bool:
    return isinstance(jnp.zeros(()), jax.core.Tracer)
