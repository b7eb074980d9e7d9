"""Ops against the plain formula that one writes without them: softmax, reductions, losses of routers and of pairs.

Softmax and the reductions go over the last axis. The z-loss of routers is the mean over the unmasked tokens. The plain
formulas of contrastive losses have the matrix of all pairs in memory; their shapes are rows x width, twice, and their
gradients those of both sides, the scale and the bias.
"""

from collections.abc import Callable
from typing import Any

import drawn
import jax
import jax.numpy as jnp
from measure import Benchmark, Work, against, cases_of, eager_too, grid_of

import masksafe
from masksafe import losses

Formula = Callable[..., Any]
UNMASKED, UNMASKED_ROWS = 0.7, 0.6
IN_BOTH = {"float32": ("tiny", "middle", "large"), "bfloat16": ("large",)}

# Softmax and the reductions; and ops that are compiled, but not timed

SIZES = {"tiny": (8, 10), "middle": (4096, 256), "large": (8192, 2048)}
SOFTMAX = dict.fromkeys(("softmax", "log_softmax", "logsumexp"), jax.nn) | dict.fromkeys(("mean", "sum", "var"), jnp)
MORE: dict[str, dict[str, Formula]] = {
    "keep": {
        "masksafe": lambda x, where: masksafe.keep(x, where=where),
        "JAX": lambda x, where: jnp.where(where, x, 0),
    },
    "mask_where": {
        "masksafe": lambda x, y, mask: masksafe.mask_where(mask, x, y),
        "JAX": lambda x, y, mask: jnp.where(mask, y, x),
    },
    "apply_where": {
        "masksafe": lambda x, where: masksafe.apply_where(where, x, jnp.log, fill_value=0),
        "JAX": lambda x, where: jnp.where(where, jnp.log(jnp.where(where, x, 1)), 0),
    },
    "standardize": {
        "masksafe": lambda x, where: masksafe.standardize(x, where=where),
        "JAX": lambda x, where: jax.nn.standardize(x, where=where),
    },
    "var_mean": {
        "masksafe": lambda x, where: masksafe.var_mean(x, axis=-1, where=where),
        "JAX": lambda x, where: (jnp.var(x, -1, where=where), jnp.mean(x, -1, where=where)),
    },
}
ALWAYS_MASKED = ("keep", "mask_where", "apply_where")


def prepare(name: str, mask: str, dtype: str, shape: tuple[int, int]) -> Work:
    of = lambda library: lambda x, where: getattr(library, name)(x, axis=-1, where=where)  # noqa: E731
    where = drawn.bits(shape, UNMASKED).at[:, 0].set(True) if mask == "elements" else None
    return Work({"masksafe": of(masksafe), "JAX": of(SOFTMAX[name])}, (drawn.normal(shape, dtype), where))


def prepare_more(name: str, mask: str, dtype: str, shape: tuple[int, int]) -> Work:
    arrays = [drawn.normal(shape, dtype, seed) for seed in range(2 if name == "mask_where" else 1)]
    where = drawn.bits(shape, UNMASKED) if mask == "elements" else None
    return Work(MORE[name], (*arrays, where), leaves=len(arrays))


# Losses of routers, of the numbers and the choices of experts

SIZES_OF_ROUTERS = {"tiny": (4096, 8, 2), "middle": (8192, 64, 8), "large": (16384, 256, 8)}  # tokens, experts, chosen
OF_TOKENS = ("none", "60 % of tokens")


def mean_over(x: jax.Array, where: jax.Array | None) -> jax.Array:
    """Over tokens or rows, as it is written without masksafe."""
    if where is None:
        return jnp.mean(x, 0)
    weights = where.astype(x.dtype)
    return jnp.sum(x * weights.reshape(-1, *[1] * (x.ndim - 1)), 0) / jnp.sum(weights)


def balance(probs: jax.Array, indices: jax.Array, where: jax.Array | None) -> jax.Array:
    chosen = jnp.sum(jax.nn.one_hot(indices, probs.shape[-1]), -2) / indices.shape[-1]
    return probs.shape[-1] * jnp.sum(mean_over(chosen, where) * mean_over(probs, where))


ROUTERS: dict[str, dict[str, Formula]] = {
    "load_balancing_loss": {
        "masksafe": lambda probs, indices, where: losses.load_balancing_loss(probs, indices, where=where),
        "JAX": balance,
    },
    "router_z_loss": {
        "masksafe": lambda logits, _, where: masksafe.mean(losses.router_z_loss(logits, where=where), where=where),
        "JAX": lambda logits, _, where: mean_over(jnp.square(jax.nn.logsumexp(logits, -1)), where),
    },
}


def prepare_router(name: str, mask: str, dtype: str, sizes: tuple[int, int, int]) -> Work:
    tokens, experts, chosen = sizes
    logits, indices = drawn.normal((tokens, experts), dtype), drawn.labels((tokens, chosen), experts)
    where = drawn.bits((tokens,), UNMASKED_ROWS) if mask != "none" else None
    numbers = jax.nn.softmax(logits) if name == "load_balancing_loss" else logits
    return Work(ROUTERS[name], (numbers, indices, where))


# Losses of pairs, of both sides, scale, bias and mask

SIZES_OF_PAIRS = {"tiny": (64, 32), "middle": (1024, 256), "large": (8192, 512)}  # rows, width
OF_ROWS = ("none", "60 % of rows")
SCALE, BIAS = 10.0, -10.0  # where SigLIP begins


def wide_logits(x: jax.Array, y: jax.Array, scale: jax.Array) -> jax.Array:
    return scale * jnp.matmul(x, y.T, preferred_element_type=jnp.float32)


def mean_of_rows(losses: jax.Array, where: jax.Array | None) -> jax.Array:
    return jnp.mean(losses) if where is None else jnp.sum(losses * where) / jnp.sum(where)


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


PAIRS: dict[str, dict[str, Formula]] = {
    "info_nce_loss": {
        "masksafe": lambda x, y, scale, _, where: losses.info_nce_loss(x, y, scale=scale, where=where),
        "JAX": clip,
    },
    "sigmoid_contrastive_loss": {
        "masksafe": lambda x, y, scale, bias, where: losses.sigmoid_contrastive_loss(
            x, y, scale=scale, bias=bias, where=where
        ),
        "JAX": siglip,
    },
}


def prepare_pairs(name: str, mask: str, dtype: str, shape: tuple[int, int]) -> Work:
    x, y = (masksafe.l2_normalize(drawn.normal(shape, dtype, seed), axis=-1) for seed in range(2))
    where = drawn.bits(shape[:1], UNMASKED_ROWS) if mask != "none" else None
    return Work(PAIRS[name], (x, y, jnp.float32(SCALE), jnp.float32(BIAS), where), leaves=4)


CASES = {
    "softmax": cases_of(prepare, SIZES, grid_of(SOFTMAX, ("none", "elements"), IN_BOTH)),
    "routers": cases_of(prepare_router, SIZES_OF_ROUTERS, grid_of(ROUTERS, OF_TOKENS, IN_BOTH)),
    "contrastive": cases_of(prepare_pairs, SIZES_OF_PAIRS, grid_of(PAIRS, OF_ROWS, IN_BOTH)),
}
TITLES = ("Softmax and reductions", "Losses of routers", "Contrastive losses")
BENCHMARKS = [
    Benchmark(name, title, against("JAX"), eager_too(CASES[name])) for name, title in zip(CASES, TITLES, strict=True)
]
