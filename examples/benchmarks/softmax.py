"""Softmax and the reductions against jax.nn and jax.numpy, over the last axis.

python examples/benchmarks/softmax.py [--quick] [--rounds N] [--plot-only]
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from command import main
from measure import Benchmark, Case, Work, by_x, eager_too, random_bits, random_normal

import masksafe

SIZES = {"tiny": (8, 10), "middle": (4096, 256), "large": (8192, 2048)}
DTYPES = {"float32": tuple(SIZES), "bfloat16": ("large",)}
PEERS = dict.fromkeys(("softmax", "log_softmax", "logsumexp"), jax.nn) | dict.fromkeys(("mean", "sum", "var"), jnp)


def of(library: Any, name: str) -> Callable[..., jax.Array]:
    return lambda x, where: getattr(library, name)(x, axis=-1, where=where)


def prepare(name: str, mask: str, dtype: str, shape: tuple[int, int]) -> Work:
    where = random_bits(shape, 0.7).at[:, 0].set(True) if mask == "elements" else None
    return Work({"masksafe": of(masksafe, name), "JAX": of(PEERS[name], name)}, (random_normal(shape, dtype), where))


CASES = [
    Case(name, mask, dtype, size, by_x(SIZES[size]), functools.partial(prepare, name, mask, dtype, SIZES[size]))
    for name in PEERS
    for mask in ("none", "elements")
    for dtype, sizes in DTYPES.items()
    for size in sizes
]
BENCHMARK = Benchmark("softmax", "Softmax and reductions", (("masksafe", "JAX"),), list(eager_too(CASES)))

if __name__ == "__main__":
    main([BENCHMARK])
