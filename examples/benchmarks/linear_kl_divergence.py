"""Divergences of two linear layers against all logits and optax, as in distillation: the mean over unmasked tokens.

    python examples/benchmarks/linear_kl_divergence.py [--quick] [--rounds N] [--plot-only]

The gradients are those of the student's features and kernel.
"""

import functools

import jax
import jax.numpy as jnp
from command import main
from measure import Benchmark, Case, Work, by_x, random_bits, random_normal

import masksafe

SIZES = {  # tokens, the student's width, the teacher's, classes
    "tiny": (64, 16, 24, 100),
    "middle": (512, 256, 384, 4096),
    "large": (1024, 256, 512, 16384),
}
UNMASKED = {"none": 1.0, "75 % of tokens": 0.25}
MASKS_OF = {  # of each direction and dtype
    ("forward", "float32"): dict.fromkeys(SIZES, tuple(UNMASKED)),
    ("reverse", "float32"): {"large": ("none",)},
    ("jensen_shannon", "float32"): {"large": ("none",)},
    ("forward", "bfloat16"): {"middle": tuple(UNMASKED)},
}
BETA = 0.5


def of_masksafe(direction: str, *args: jax.Array) -> jax.Array:
    features, kernel, target_features, target_kernel, where = args
    return masksafe.losses.linear_kl_divergence(
        features, kernel, target_features, target_kernel, where=where, direction=direction, beta=BETA
    )


def of_optax(direction: str, *args: jax.Array) -> jax.Array:
    import optax

    features, kernel, target_features, target_kernel, where = args
    logits = features @ kernel, target_features @ target_kernel
    log_q, log_p = (jax.nn.log_softmax(x.astype(jnp.float32)) for x in logits)
    if direction == "forward":
        losses = optax.kl_divergence(log_q, jnp.exp(log_p))
    elif direction == "reverse":
        losses = optax.kl_divergence(log_p, jnp.exp(log_q))
    else:
        p, q = jnp.exp(log_p), jnp.exp(log_q)
        log_m = jnp.log(BETA * p + (1 - BETA) * q)
        losses = BETA * optax.kl_divergence(log_m, p) + (1 - BETA) * optax.kl_divergence(log_m, q)
    return jnp.sum(jnp.where(where, losses, 0)) / jnp.maximum(jnp.sum(where), 1)


def prepare(direction: str, mask: str, dtype: str, sizes: tuple[int, int, int, int]) -> Work:
    tokens, width, width_of_targets, classes = sizes
    shapes = (tokens, width), (width, classes), (tokens, width_of_targets), (width_of_targets, classes)
    arrays = [random_normal(shape, dtype, seed) for seed, shape in enumerate(shapes)]
    features, kernel, target_features, target_kernel = arrays
    args = features, kernel / width**0.5, target_features, target_kernel / width_of_targets**0.5
    functions = {"masksafe": of_masksafe, "optax": of_optax}
    functions = {name: functools.partial(fn, direction) for name, fn in functions.items()}
    return Work(functions, (*args, random_bits((tokens,), UNMASKED[mask])), leaves=2)


CASES = [
    Case(
        direction.replace("_", "-"),
        mask,
        dtype,
        size,
        by_x(SIZES[size]),
        functools.partial(prepare, direction, mask, dtype, SIZES[size]),
    )
    for (direction, dtype), masks_of in MASKS_OF.items()
    for size, masks in masks_of.items()
    for mask in masks
]
BENCHMARK = Benchmark("linear_kl_divergence", "Divergences of linear layers", (("masksafe", "optax"),), CASES)

if __name__ == "__main__":
    main([BENCHMARK])
