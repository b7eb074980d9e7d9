"""Attention against jax.nn and torch: self-attention of one sequence and of many, and a step of decoding.

Eight heads of width 64. A length of 4096 takes jax.nn 2 GiB for the gradient.
"""

import functools
from collections.abc import Callable
from typing import Any

import drawn
import jax
import jax.numpy as jnp
import numpy as np
from measure import VALUE, Benchmark, Work, against, cases_of, eager_too, functional, grid_of, sized_grid

import masksafe

HEADS, WIDTH, SEGMENTS = 8, 64, 8
SIZES = {  # samples, queries, keys
    "tiny": (2, 16, 16),
    "many short": (96, 48, 48),
    "short": (32, 128, 128),
    "middle": (2, 512, 512),
    "decoding": (8, 1, 4096),
    "large": (1, 2048, 2048),
    "long": (1, 4096, 4096),
}
ALL = ("none", "causal", "half padding", "8 segments", "window")
MASKS = {
    "float32": {
        "tiny": ("none", "causal", "half padding"),
        "many short": ("none", "causal", "half padding"),
        "short": ALL,
        "middle": ALL,
        "decoding": ("none", "half padding"),
        "large": ALL,
        "long": ("causal", "8 segments"),
    },
    "bfloat16": {"many short": ("causal",), "short": ALL, "middle": ALL, "large": ("causal", "8 segments")},
}


def segments(length: int) -> np.ndarray:
    return np.arange(length) * SEGMENTS // length


def pairs(mask: str, keys: int) -> np.ndarray | None:
    """The mask as booleans, for a library that has nothing better; None of one for which each has a parameter."""
    query, key = np.arange(keys)[:, None], np.arange(keys)
    masks = {
        "half padding": key[None] < keys // 2,
        "8 segments": segments(keys)[:, None] == segments(keys),
        "window": abs(query - key) <= keys // 32,
    }
    return masks.get(mask)


def options(library: Any, mask: str, samples: int, keys: int) -> tuple[dict[str, Any], dict[str, jax.Array]]:
    """What the library is told of the mask: constants, and arrays, which the compiler must not fold."""
    if mask == "8 segments" and library is jax.nn:
        return {}, {"mask": jnp.asarray(pairs(mask, keys))}
    ids = jnp.broadcast_to(jnp.asarray(segments(keys)), (samples, keys))
    return {
        "none": ({}, {}),
        "causal": ({"is_causal": True}, {}),
        "half padding": ({}, {"key_value_seq_lengths": jnp.full(samples, keys // 2, jnp.int32)}),
        "8 segments": ({}, {"query_segment_ids": ids, "key_value_segment_ids": ids}),
        "window": ({"local_window_size": keys // 32}, {}),
    }[mask]


def of_jax(library: Any, constants: dict[str, Any]) -> Callable[..., jax.Array]:
    """A function of query, key, value, and what each library is told in arrays."""
    attention = functools.partial(library.dot_product_attention, **constants)
    return lambda q, k, v, arrays, **more: attention(q, k, v, **arrays[library.__name__], **more)


def prepare(work: str, mask: str, dtype: str, sizes: tuple[int, int, int], heads: int = HEADS) -> Work:
    samples, queries, keys = sizes
    lengths = (queries, keys, keys)
    qkv = [drawn.normal((samples, length, heads, WIDTH), dtype, i) for i, length in enumerate(lengths)]
    functions, arrays = {}, {}
    for library in (masksafe, jax.nn):
        constants, arrays[library.__name__] = options(library, mask, samples, keys)
        functions[library.__name__] = of_jax(library, constants)
    is_causal, allowed = mask == "causal", pairs(mask, keys)
    functions["torch"] = lambda *args: functional().scaled_dot_product_attention(*args, is_causal=is_causal)
    torch_args = [x.swapaxes(1, 2) for x in qkv] + ([] if allowed is None else [allowed])
    return Work(functions, (*qkv, arrays), leaves=3, torch_args=tuple(torch_args))


# Causal attention of today's models, with what is learned as a fourth argument. For jax.nn it has to be a bias or a
# mask of all pairs, or to follow by hand.

BUCKETS = 32


def bucket(distance: jax.Array) -> jax.Array:
    """T5's: each distance below 16 its own, then logarithmically up to 128."""
    near = jnp.maximum(distance, 0)
    far = 16 + (jnp.log(jnp.maximum(near, 1) / 16) / jnp.log(8) * 16).astype(jnp.int32)
    return jnp.where(near < 16, near, jnp.minimum(far, BUCKETS - 1))


def with_score_mod(mod: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    attention = functools.partial(masksafe.dot_product_attention, is_causal=True)
    return lambda q, k, v, learned: attention(q, k, v, score_mod=functools.partial(mod, learned))


def with_bias(bias_of: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def attention(q: jax.Array, k: jax.Array, v: jax.Array, learned: jax.Array) -> jax.Array:
        distance = jnp.arange(q.shape[1])[:, None] - jnp.arange(q.shape[1])
        bias = bias_of(learned, distance).astype(q.dtype)
        return jax.nn.dot_product_attention(q, k, v, bias[None], is_causal=True)

    return attention


def chunked(q: jax.Array, k: jax.Array, v: jax.Array, _: jax.Array) -> jax.Array:
    chunks = masksafe.attention_masks.chunked(q.shape[1] // SEGMENTS)
    return masksafe.dot_product_attention(q, k, v, is_causal=True, mask_mod=chunks)


def chunked_in_jax(q: jax.Array, k: jax.Array, v: jax.Array, _: jax.Array) -> jax.Array:
    chunk = jnp.arange(q.shape[1]) // (q.shape[1] // SEGMENTS)
    return jax.nn.dot_product_attention(q, k, v, mask=(chunk[:, None] == chunk)[None, None], is_causal=True)


def with_sinks_in_jax(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> jax.Array:
    out, logsumexp = jax.nn.dot_product_attention(q, k, v, is_causal=True, return_residual=True)
    return out * jax.nn.sigmoid(logsumexp - sinks)[..., None]


SLOPES = 2.0 ** -np.arange(1, HEADS + 1, dtype=np.float32)
ADJUSTED: dict[str, tuple[np.ndarray, Callable[..., jax.Array], Callable[..., jax.Array]]] = {
    "ALiBi": (
        SLOPES,
        with_score_mod(lambda slopes, x, batch, head, query, key: x - slopes[head] * (query - key)),
        with_bias(lambda slopes, distance: -slopes[:, None, None] * distance),
    ),
    "T5 bias": (
        np.zeros((HEADS, BUCKETS), np.float32),
        with_score_mod(lambda table, x, batch, head, query, key: x + table[head, bucket(query - key)]),
        with_bias(lambda table, distance: table[:, bucket(distance)]),
    ),
    "chunked": (SLOPES, chunked, chunked_in_jax),
    "sinks": (
        SLOPES,
        lambda q, k, v, sinks: masksafe.dot_product_attention(q, k, v, is_causal=True, sinks=sinks),
        with_sinks_in_jax,
    ),
}


def prepare_adjusted(work: str, mask: str, dtype: str, sizes: tuple[int, int, int]) -> Work:
    samples, queries, keys = sizes
    qkv = [drawn.normal((samples, length, HEADS, WIDTH), seed=i) for i, length in enumerate((queries, keys, keys))]
    learned, ours, theirs = ADJUSTED[mask.removeprefix("causal, ")]
    return Work({"masksafe": ours, "jax.nn": theirs}, (*qkv, jnp.asarray(learned)), leaves=4)


IN_ADJUSTED = ("tiny", "short", "large", "long")
GRID = sized_grid(["attention"], MASKS)
CASES = cases_of(prepare, SIZES, [of for of in GRID if of[3] != "decoding"])
CASES += cases_of(prepare, SIZES, [of for of in GRID if of[3] == "decoding"], passes=(VALUE,))
CASES += cases_of(
    prepare_adjusted, SIZES, grid_of(["attention"], [f"causal, {name}" for name in ADJUSTED], {"float32": IN_ADJUSTED})
)
BENCHMARKS = [Benchmark("attention", "Attention", against("jax.nn", "torch"), eager_too(CASES))]
