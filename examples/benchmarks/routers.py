"""The losses of the routers of mixtures of experts against one-hot assignments and means.

    python examples/benchmarks/routers.py [--quick] [--rounds N] [--plot-only]

The z-loss is the mean over the unmasked tokens.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from command import main
from measure import Benchmark, Case, Work, by_x, eager_too, random_bits, random_labels, random_normal

import masksafe

SIZES = {"tiny": (4096, 8, 2), "middle": (8192, 64, 8), "large": (16384, 256, 8)}  # tokens, experts, experts of a token
DTYPES = {"float32": tuple(SIZES), "bfloat16": ("large",)}
MASKS = ("none", "60 % of tokens")
UNMASKED = 0.6

Loss = Callable[[jax.Array, jax.Array, jax.Array | None], jax.Array]  # of numbers and choices of experts, and a mask


def mean_of_tokens(x: jax.Array, where: jax.Array | None) -> jax.Array:
    """As it is written without masksafe."""
    if where is None:
        return jnp.mean(x, 0)
    weights = where.astype(x.dtype)
    return jnp.sum(x * weights.reshape(-1, *[1] * (x.ndim - 1)), 0) / jnp.sum(weights)


def balance(probs: jax.Array, indices: jax.Array, where: jax.Array | None) -> jax.Array:
    chosen = jnp.sum(jax.nn.one_hot(indices, probs.shape[-1]), -2) / indices.shape[-1]
    return probs.shape[-1] * jnp.sum(mean_of_tokens(chosen, where) * mean_of_tokens(probs, where))


def z_loss(logits: jax.Array, _: jax.Array, where: jax.Array | None) -> jax.Array:
    return mean_of_tokens(jnp.square(jax.nn.logsumexp(logits, -1)), where)


def of_masksafe(name: str) -> Loss:
    if name == "load_balancing_loss":
        return lambda probs, indices, where: masksafe.losses.load_balancing_loss(probs, indices, where=where)
    return lambda logits, _, where: masksafe.mean(masksafe.losses.router_z_loss(logits, where=where), where=where)


PEERS: dict[str, Loss] = {"load_balancing_loss": balance, "router_z_loss": z_loss}


def prepare(name: str, mask: str, dtype: str, sizes: tuple[int, int, int]) -> Work:
    tokens, experts, chosen = sizes
    logits, indices = random_normal((tokens, experts), dtype), random_labels((tokens, chosen), experts)
    where = random_bits((tokens,), UNMASKED) if mask != "none" else None
    numbers = jax.nn.softmax(logits) if name == "load_balancing_loss" else logits
    return Work({"masksafe": of_masksafe(name), "JAX": PEERS[name]}, (numbers, indices, where))


CASES = [
    Case(name, mask, dtype, size, by_x(SIZES[size]), functools.partial(prepare, name, mask, dtype, SIZES[size]))
    for name in PEERS
    for mask in MASKS
    for dtype, sizes in DTYPES.items()
    for size in sizes
]
BENCHMARK = Benchmark("routers", "Losses of routers", (("masksafe", "JAX"),), list(eager_too(CASES)))

if __name__ == "__main__":
    main([BENCHMARK])
