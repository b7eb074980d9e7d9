"""The contrastive losses of pairs against the plain formulas, which have the matrix of all pairs in memory.

    python examples/benchmarks/contrastive.py [--quick] [--rounds N] [--plot-only]

Shapes are rows x width, twice; the gradients are those of both sides, the scale and the bias.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from command import main
from measure import Benchmark, Case, Work, by_x, eager_too, random_bits, random_normal

import masksafe

SIZES = {"tiny": (64, 32), "middle": (1024, 256), "large": (8192, 512)}  # rows, width
DTYPES = {"float32": tuple(SIZES), "bfloat16": ("large",)}
MASKS = ("none", "60 % of rows")
UNMASKED = 0.6
SCALE, BIAS = 10.0, -10.0  # where SigLIP begins

Loss = Callable[..., jax.Array]  # of both sides, scale, bias, and a mask


def wide_logits(x: jax.Array, y: jax.Array, scale: jax.Array) -> jax.Array:
    return scale * jnp.matmul(x, y.T, preferred_element_type=jnp.float32)


def mean_of_rows(losses: jax.Array, where: jax.Array | None) -> jax.Array:
    if where is None:
        return jnp.mean(losses)
    return jnp.sum(losses * where) / jnp.sum(where)


def clip(x: jax.Array, y: jax.Array, scale: jax.Array, _: jax.Array, where: jax.Array | None) -> jax.Array:
    """As it is written without masksafe: masked columns are put out of sight, masked rows are not averaged."""
    z = wide_logits(x, y, scale)
    seen = z if where is None else jnp.where(where[None], z, -jnp.inf)
    seen_of_columns = z if where is None else jnp.where(where[:, None], z, -jnp.inf)
    both = jax.nn.logsumexp(seen, 1) + jax.nn.logsumexp(seen_of_columns, 0)
    return mean_of_rows(both / 2 - jnp.diag(z), where)


def siglip(x: jax.Array, y: jax.Array, scale: jax.Array, bias: jax.Array, where: jax.Array | None) -> jax.Array:
    z = wide_logits(x, y, scale) + bias
    losses = -jax.nn.log_sigmoid(z * (2 * jnp.eye(len(x)) - 1))
    return mean_of_rows(jnp.sum(losses if where is None else losses * where[None], 1), where)


def info_nce_loss(x: jax.Array, y: jax.Array, scale: jax.Array, _: jax.Array, where: jax.Array | None) -> jax.Array:
    return masksafe.losses.info_nce_loss(x, y, scale=scale, where=where)


def sigmoid_loss(x: jax.Array, y: jax.Array, scale: jax.Array, bias: jax.Array, where: jax.Array | None) -> jax.Array:
    return masksafe.losses.sigmoid_contrastive_loss(x, y, scale=scale, bias=bias, where=where)


LOSSES: dict[str, dict[str, Loss]] = {
    "info_nce_loss": {"masksafe": info_nce_loss, "JAX": clip},
    "sigmoid_contrastive_loss": {"masksafe": sigmoid_loss, "JAX": siglip},
}


def prepare(name: str, mask: str, dtype: str, shape: tuple[int, int]) -> Work:
    x, y = (masksafe.l2_normalize(random_normal(shape, dtype, seed), axis=-1) for seed in range(2))
    where = random_bits(shape[:1], UNMASKED) if mask != "none" else None
    return Work(LOSSES[name], (x, y, jnp.float32(SCALE), jnp.float32(BIAS), where), leaves=4)


CASES = [
    Case(name, mask, dtype, size, by_x(SIZES[size]), functools.partial(prepare, name, mask, dtype, SIZES[size]))
    for name in LOSSES
    for mask in MASKS
    for dtype, sizes in DTYPES.items()
    for size in sizes
]
BENCHMARK = Benchmark("contrastive", "Contrastive losses", (("masksafe", "JAX"),), list(eager_too(CASES)))

if __name__ == "__main__":
    main([BENCHMARK])
