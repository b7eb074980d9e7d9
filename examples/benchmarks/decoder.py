"""A whole decoder: the loss of a training step, and its gradient, against flax, optax and jax.nn together.

    python examples/benchmarks/decoder.py [--quick] [--rounds N] [--plot-only]

A decoder of several layers with norms before attention and before a feed-forward network, in float32. Its candidates
differ in one line each: the norm, the attention, the loss. What they compile in is measured too: each layer is written
out, as models are. Of packed documents, eight to a row, attention stays within each, and 60 % of the tokens, those of
prompts, do not count in the loss.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import linear_cross_entropy
from attention import segments
from command import main
from measure import GRADIENT, Benchmark, Case, Work, by_x, random_bits, random_labels, random_normal
from normalization import EPSILON

import masksafe

Arrays = dict[str, jax.Array]
HEAD_WIDTH, PROMPTS = 64, 0.6


class Size(NamedTuple):
    """The sizes of the model and of a batch of its tokens."""

    layers: int
    samples: int
    length: int
    width: int
    classes: int


SIZES = {
    "tiny": Size(2, 2, 32, 64, 128),
    "middle": Size(2, 4, 512, 256, 16384),
    "large": Size(12, 2, 1024, 256, 16384),
}
MASKS = ("none", "packed")


class Batch(NamedTuple):
    """Arrays `[samples, length]`."""

    tokens: jax.Array
    labels: jax.Array
    counts: jax.Array  # whether a token counts in the loss
    segments: jax.Array | None  # documents


class Library(NamedTuple):
    """What the decoder is made of."""

    norm: Callable[[jax.Array, jax.Array], jax.Array]  # of the input and the scale
    masks: Callable[[Batch], dict[str, Any]]  # what the attention is told
    attention: Callable[..., jax.Array]
    loss: Callable[..., jax.Array]  # of features, kernel, labels and mask of tokens


def of_masksafe() -> Library:
    def masks(batch: Batch) -> dict[str, Any]:
        return {"query_segment_ids": batch.segments, "key_value_segment_ids": batch.segments}

    norm = functools.partial(masksafe.rms_norm, epsilon=EPSILON)
    return Library(norm, masks, masksafe.dot_product_attention, linear_cross_entropy.of_masksafe)


def of_flax() -> Library:
    import flax.linen as nn

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return nn.RMSNorm(EPSILON).apply({"params": {"scale": scale}}, x)

    def masks(batch: Batch) -> dict[str, Any]:
        ids = batch.segments
        return {} if ids is None else {"mask": (ids[:, :, None] == ids[:, None, :])[:, None]}

    return Library(norm, masks, jax.nn.dot_product_attention, linear_cross_entropy.of_optax)


def decoder(library: Library) -> Callable[[dict[str, Any], Batch], jax.Array]:
    """The mean loss of the tokens that count, as a function of parameters and batch."""

    def layer(x: jax.Array, params: Arrays, masks: dict[str, Any]) -> jax.Array:
        heads = library.norm(x, params["attention norm"]) @ params["query key value"]
        query, key, value = jnp.split(heads.reshape(*x.shape[:-1], -1, HEAD_WIDTH), 3, axis=-2)
        x += library.attention(query, key, value, is_causal=True, **masks).reshape(x.shape) @ params["out"]
        return x + jax.nn.gelu(library.norm(x, params["feed-forward norm"]) @ params["up"]) @ params["down"]

    def loss(params: dict[str, Any], batch: Batch) -> jax.Array:
        x, masks = params["embedding"][batch.tokens], library.masks(batch)
        for of_layer in params["layers"]:
            x = layer(x, of_layer, masks)
        features, kernel = library.norm(x, params["norm"]), params["kernel"]
        return library.loss(features.reshape(-1, x.shape[-1]), kernel, batch.labels.ravel(), batch.counts.ravel())

    return loss


def make_parameters(size: Size) -> dict[str, Any]:
    width, seeds = size.width, iter(range(2 + 4 * size.layers))

    def kernel(rows: int, columns: int) -> jax.Array:
        return random_normal((rows, columns), seed=next(seeds)) / rows**0.5

    def layer() -> Arrays:
        norms = {name: jnp.ones(width) for name in ("attention norm", "feed-forward norm")}
        products = {"query key value": kernel(width, 3 * width), "out": kernel(width, width)}
        return norms | products | {"up": kernel(width, 4 * width), "down": kernel(4 * width, width)}

    ends = {"embedding": kernel(size.classes, width), "kernel": kernel(width, size.classes)}
    return ends | {"norm": jnp.ones(width), "layers": [layer() for _ in range(size.layers)]}


def make_batch(mask: str, size: Size) -> Batch:
    shape = size.samples, size.length
    tokens, labels = (random_labels(shape, size.classes, seed) for seed in (0, 1))
    if mask == "none":
        return Batch(tokens, labels, jnp.ones(shape, bool), None)
    ids = jnp.broadcast_to(jnp.asarray(segments(size.length), jnp.int32), shape)
    return Batch(tokens, labels, random_bits(shape, 1 - PROMPTS), ids)


def prepare(mask: str, size: Size) -> Work:
    functions = {name: (lambda *args, of=of: decoder(of())(*args)) for name, of in LIBRARIES.items()}
    return Work(functions, (make_parameters(size), make_batch(mask, size)))


LIBRARIES = {"masksafe": of_masksafe, "flax": of_flax}
CASES = [
    Case("decoder", mask, "float32", name, by_x(size), functools.partial(prepare, mask, size), passes=(GRADIENT,))
    for name, size in SIZES.items()
    for mask in MASKS
]
BENCHMARK = Benchmark("decoder", "A decoder", (("masksafe", "flax"),), CASES)

if __name__ == "__main__":
    main([BENCHMARK])
