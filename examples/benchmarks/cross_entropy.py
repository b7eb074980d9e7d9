"""The cross-entropies of integer and one-hot labels against optax and torch.

    python examples/benchmarks/cross_entropy.py [--quick] [--rounds N] [--plot-only]

torch takes part where it can: without a mask, and with rows of integer labels masked by its `ignore_index`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from command import main
from measure import Benchmark, Case, Work, by_x, eager_too, random_bits, random_labels, random_normal

import masksafe

SIZES = {"tiny": (8, 10), "narrow": (4096, 64), "middle": (4096, 1024), "large": (2048, 32768)}
DTYPES = {"float32": tuple(SIZES), "bfloat16": ("middle", "large"), "float16": ("middle",)}
LOSSES = {"integer": "softmax_cross_entropy_with_integer_labels", "one-hot": "softmax_cross_entropy"}
MASKS = ["none", "rows", "classes"]
IGNORED = -100


def of_masksafe(name: str) -> Callable[..., jax.Array]:
    return lambda logits, labels, where: getattr(masksafe.losses, name)(logits, labels, where=where)


def of_optax(name: str) -> Callable[..., jax.Array]:
    """A mask of rows is applied as optax's users apply it: to the losses."""

    def loss(logits: jax.Array, labels: jax.Array, where: jax.Array | None) -> jax.Array:
        import optax

        fn = getattr(optax, name)
        if where is None or where.ndim == logits.ndim:
            return fn(logits, labels, where=where)
        return jnp.where(where, fn(logits, labels), 0)

    return loss


def of_torch(logits: Any, labels: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")


def prepare(kind: str, mask: str, dtype: str, shape: tuple[int, int]) -> Work:
    logits, labels = random_normal(shape, dtype), random_labels(shape[:1], shape[1])
    where = {"none": None, "rows": random_bits(shape[:1], 0.5), "classes": random_bits(shape, 0.5)}[mask]
    if mask == "classes":
        where |= labels[:, None] == jnp.arange(shape[1])
    functions = {"masksafe": of_masksafe(LOSSES[kind]), "optax": of_optax(LOSSES[kind])}
    in_torch = mask == "none" or (mask, kind) == ("rows", "integer")
    for_torch = jnp.where(where, labels, IGNORED) if mask == "rows" else labels
    if kind == "one-hot":
        labels = for_torch = jax.nn.one_hot(labels, shape[1], dtype=dtype)
    functions |= {"torch": of_torch} if in_torch else {}
    return Work(functions, (logits, labels, where), torch_args=(logits, for_torch))


CASES = [
    Case(kind, mask, dtype, size, by_x(SIZES[size]), functools.partial(prepare, kind, mask, dtype, SIZES[size]))
    for kind in LOSSES
    for mask in MASKS
    for dtype, sizes in DTYPES.items()
    for size in sizes
]
BENCHMARK = Benchmark(
    "cross_entropy", "Cross-entropy", (("masksafe", "optax"), ("masksafe", "torch")), list(eager_too(CASES))
)

if __name__ == "__main__":
    main([BENCHMARK])
