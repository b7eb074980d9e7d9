"""The ops of segments against jraph's formulas.

The formulas are written here, so that jraph need not be installed; jraph has no logarithms, which are written in the
same way. It has no masks either: its users put masked rows into a segment of their own, and so does the benchmark.
(With ids out of range, the gradients of its softmax are NaN in those rows.)
"""

import functools
from collections.abc import Callable
from typing import Any

import drawn
import jax
import jax.numpy as jnp
from jax.ops import segment_max, segment_min, segment_sum
from measure import Benchmark, Work, against, by_x, cases_of, eager_too, grid_of

import masksafe

PEER = "jraph's formula"
EPSILON = 1e-5
UNMASKED = 0.7
SIZES = {  # the data, and the number of segments
    "tiny": ((2000, 8), 200),
    "middle": ((100_000, 8), 10_000),
    "scalars": ((1_000_000,), 50_000),
    "large": ((100_000, 64), 10_000),
}
DTYPES = {"float32": tuple(SIZES), "bfloat16": ("large",)}
MASKS = ("none", "none, sorted ids", "rows")

Formula = Callable[..., jax.Array]  # of data, ids, and as keywords the number of segments, and whether ids are sorted


def segment_mean(data: jax.Array, ids: jax.Array, **of: Any) -> jax.Array:
    return segment_sum(data, ids, **of) / number_of_rows(data, ids, **of)


def number_of_rows(data: jax.Array, ids: jax.Array, **of: Any) -> jax.Array:
    return jnp.maximum(segment_sum(jnp.ones_like(data), ids, **of), 1)


def segment_variance(data: jax.Array, ids: jax.Array, **of: Any) -> jax.Array:
    deviations = data - segment_mean(data, ids, **of)[ids]
    return segment_sum(jnp.square(deviations), ids, **of) / number_of_rows(data, ids, **of)


def segment_normalize(data: jax.Array, ids: jax.Array, **of: Any) -> jax.Array:
    deviations = data - segment_mean(data, ids, **of)[ids]
    return deviations * jax.lax.rsqrt(jnp.maximum(segment_variance(data, ids, **of)[ids], EPSILON))


def segment_softmax(data: jax.Array, ids: jax.Array, **of: Any) -> jax.Array:
    exps = jnp.exp(data - segment_max(data, ids, **of)[ids])
    return exps / segment_sum(exps, ids, **of)[ids]


def segment_logsumexp(data: jax.Array, ids: jax.Array, **of: Any) -> jax.Array:
    largest = segment_max(data, ids, **of)
    return largest + jnp.log(segment_sum(jnp.exp(data - largest[ids]), ids, **of))


def segment_log_softmax(data: jax.Array, ids: jax.Array, **of: Any) -> jax.Array:
    below = data - segment_max(data, ids, **of)[ids]
    return below - jnp.log(segment_sum(jnp.exp(below), ids, **of))[ids]


FORMULAS: dict[str, Formula] = {
    "segment_sum": segment_sum,
    "segment_mean": segment_mean,
    "segment_var": segment_variance,
    "segment_max": segment_max,
    "segment_min": segment_min,
    "segment_logsumexp": segment_logsumexp,
    "segment_softmax": segment_softmax,
    "segment_log_softmax": segment_log_softmax,
    "segment_standardize": segment_normalize,
}

# What masked rows of a result become that has the rows of the data.
OF_MASKED_ROWS = {"segment_softmax": 0.0, "segment_log_softmax": -jnp.inf, "segment_standardize": 0.0}


def prepare(name: str, mask: str, dtype: str, sizes: tuple[tuple[int, ...], int]) -> Work:
    (shape, number), are_sorted = sizes, "sorted" in mask
    op, formula = (
        functools.partial(fn, indices_are_sorted=are_sorted) for fn in (getattr(masksafe, name), FORMULAS[name])
    )

    def of_jraph(data: jax.Array, ids: jax.Array, where: jax.Array | None) -> jax.Array:
        if where is None:
            return formula(data, ids, num_segments=number)
        result = formula(data, jnp.where(where, ids, number), num_segments=number + 1)
        if name not in OF_MASKED_ROWS:
            return result[:number]
        return jnp.where(where.reshape(-1, *[1] * (data.ndim - 1)), result, OF_MASKED_ROWS[name])

    ids = drawn.labels(shape[:1], number)
    where = drawn.bits(shape[:1], UNMASKED) if mask == "rows" else None
    functions = {"masksafe": lambda data, ids, where: op(data, ids, number, where=where), PEER: of_jraph}
    return Work(functions, (drawn.normal(shape, dtype), jnp.sort(ids) if are_sorted else ids, where))


CASES = cases_of(prepare, SIZES, grid_of(FORMULAS, MASKS, DTYPES), lambda sizes: f"{by_x(sizes[0])} in {sizes[1]}")
BENCHMARKS = [Benchmark("segments", "Segments", against(PEER), eager_too(CASES))]
