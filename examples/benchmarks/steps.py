"""Whole training steps: of a decoder, with label checks, and in micro-batches.

The decoder has several layers with norms before attention and before a feed-forward network, in float32. Its candidates
differ in one line each: the norm, the attention, the loss. What they compile in is measured too: each layer is written
out, as models are. Of packed documents, eight to a row, attention stays within each, and 60 % of the tokens, those of
prompts, do not count in the loss.

Of label checks the time in each mode is told in units of that without checks. The loss alone is the worst case for
"raise"; "network" has one hidden layer over a vocabulary. "block" is a small Transformer block in which nearly
everything is one of masksafe's ops, the worst case for "checkify": there they are differentiated by JAX's own rules, as
in `masksafe.forward_mode`, which is measured alongside.

Gradient accumulation is masksafe's exact mean against optax.MultiSteps, which averages means, and the whole batch, for
the model and the ragged lines of `examples/gradient_accumulation.py`.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1]))

import drawn
import flax.linen as nn
import gradient_accumulation as example
import jax
import jax.numpy as jnp
import linear
import numpy as np
import optax
from attention import segments
from jax.experimental import checkify
from measure import GRADIENT, VALUE, Benchmark, Candidate, Work, against, cases_of, grid_of, in_jax, pulled_back
from normalization import EPSILON

import masksafe

# The decoder

Arrays = dict[str, jax.Array]
HEAD_WIDTH, PROMPTS = 64, 0.6


SIZES_OF_DECODER = {  # layers, samples, length, width, classes
    "tiny": (2, 2, 32, 64, 128),
    "middle": (2, 4, 512, 256, 16384),
    "large": (12, 2, 1024, 256, 16384),
}


class Batch(NamedTuple):
    """Arrays `[samples, length]`."""

    tokens: jax.Array
    labels: jax.Array
    counts: jax.Array  # whether a token counts in the loss
    segments: jax.Array | None  # documents


class Library(NamedTuple):
    """What the decoder is made of."""

    norm: Callable[[jax.Array, jax.Array], jax.Array]  # of the input and the scale
    masks: Callable[[jax.Array], dict[str, Any]]  # what the attention is told of documents
    attention: Callable[..., jax.Array]
    loss: Callable[..., jax.Array]  # of features, kernel, labels and mask of tokens


LIBRARIES = {
    "masksafe": Library(
        functools.partial(masksafe.rms_norm, epsilon=EPSILON),
        lambda ids: {"query_segment_ids": ids, "key_value_segment_ids": ids},
        masksafe.dot_product_attention,
        linear.of_masksafe,
    ),
    "flax": Library(
        lambda x, scale: nn.RMSNorm(EPSILON).apply({"params": {"scale": scale}}, x),
        lambda ids: {"mask": (ids[:, :, None] == ids[:, None, :])[:, None]},
        jax.nn.dot_product_attention,
        linear.of_optax,
    ),
}


def decoder(library: Library) -> Callable[[dict[str, Any], Batch], jax.Array]:
    """The mean loss of the tokens that count, as a function of parameters and batch."""

    def layer(x: jax.Array, params: Arrays, masks: dict[str, Any]) -> jax.Array:
        heads = library.norm(x, params["attention norm"]) @ params["query key value"]
        query, key, value = jnp.split(heads.reshape(*x.shape[:-1], -1, HEAD_WIDTH), 3, axis=-2)
        x += library.attention(query, key, value, is_causal=True, **masks).reshape(x.shape) @ params["out"]
        return x + jax.nn.gelu(library.norm(x, params["feed-forward norm"]) @ params["up"]) @ params["down"]

    def loss(params: dict[str, Any], batch: Batch) -> jax.Array:
        x = params["embedding"][batch.tokens]
        masks = {} if batch.segments is None else library.masks(batch.segments)
        for of_layer in params["layers"]:
            x = layer(x, of_layer, masks)
        features, kernel = library.norm(x, params["norm"]), params["kernel"]
        return library.loss(features.reshape(-1, x.shape[-1]), kernel, batch.labels.ravel(), batch.counts.ravel())

    return loss


def make_parameters(layers: int, width: int, classes: int) -> dict[str, Any]:
    seeds = iter(range(2 + 4 * layers))

    def kernel(rows: int, columns: int) -> jax.Array:
        return drawn.normal((rows, columns), seed=next(seeds)) / rows**0.5

    def layer() -> Arrays:
        norms = {name: jnp.ones(width) for name in ("attention norm", "feed-forward norm")}
        products = {"query key value": kernel(width, 3 * width), "out": kernel(width, width)}
        return norms | products | {"up": kernel(width, 4 * width), "down": kernel(4 * width, width)}

    ends = {"embedding": kernel(classes, width), "kernel": kernel(width, classes)}
    return ends | {"norm": jnp.ones(width), "layers": [layer() for _ in range(layers)]}


def make_batch(mask: str, shape: tuple[int, int], classes: int) -> Batch:
    tokens, labels = (drawn.labels(shape, classes, seed) for seed in (0, 1))
    if mask == "none":
        return Batch(tokens, labels, jnp.ones(shape, bool), None)
    ids = jnp.broadcast_to(jnp.asarray(segments(shape[1]), jnp.int32), shape)
    return Batch(tokens, labels, drawn.bits(shape, 1 - PROMPTS), ids)


def prepare_decoder(work: str, mask: str, dtype: str, sizes: tuple[int, ...]) -> Work:
    layers, samples, length, width, classes = sizes
    functions = {name: decoder(library) for name, library in LIBRARIES.items()}
    return Work(functions, (make_parameters(layers, width, classes), make_batch(mask, (samples, length), classes)))


# Label checks

SIZES = {"tiny": (64, 8, 16), "middle": (512, 128, 1024), "large": (4096, 256, 4096)}  # tokens, width, classes
BLOCKS = {"tiny": (2, 8, 8), "middle": (4, 32, 64), "large": (16, 64, 64)}  # samples, length, width
HEADS, BLOCK_CLASSES = 4, 256
MODES = ("off", "checkify", "raise")


class Modes(Work):
    """One function in several modes."""

    def candidate(self, name: str, *, gradient: bool, eager: bool) -> Candidate:
        fn = self.functions[name]
        step, args = pulled_back(fn, self.args, self.leaves) if gradient else (fn, self.args)
        step = checkify.checkify(step) if name == "checkify" else step
        mode = masksafe.forward_mode if name == "forward mode" else functools.partial(masksafe.label_checks, name)
        return in_jax(step, args, eager=eager, context=mode)


def loss(logits: jax.Array, labels: jax.Array, where: jax.Array | None) -> jax.Array:
    losses = masksafe.losses.softmax_cross_entropy_with_integer_labels(logits, labels, where=where)
    return masksafe.mean(losses)


def network_loss(hidden: jax.Array, out: jax.Array, x: jax.Array, *labels: Any) -> jax.Array:
    return loss(jax.nn.relu(x @ hidden) @ out, *labels)


def block_loss(params: dict[str, jax.Array], x: jax.Array, labels: jax.Array, where: jax.Array) -> jax.Array:
    heads = (*x.shape[:2], HEADS, -1)
    q, k, v = ((masksafe.layer_norm(x) @ params[name]).reshape(heads) for name in ("query", "key", "value"))
    attended = masksafe.dot_product_attention(q, k, v, mask=where[:, None, None], is_causal=True)
    x += attended.reshape(x.shape) @ params["out"]
    x += jax.nn.relu(masksafe.layer_norm(x) @ params["up"]) @ params["down"]
    return loss(masksafe.layer_norm(x) @ params["vocabulary"], labels, where)


def prepare_loss(work: str, mask: str, dtype: str, sizes: tuple[int, int, int]) -> Work:
    tokens, width, classes = sizes
    labels = drawn.labels((tokens,), classes)
    where = {"none": None, "rows": drawn.bits((tokens,), 0.5), "classes": drawn.bits((tokens, classes), 0.9)}[mask]
    if mask == "classes":
        where |= labels[:, None] == jnp.arange(classes)
    if work == "loss":
        return Modes(dict.fromkeys(MODES, loss), (drawn.normal((tokens, classes)), labels, where))
    args = drawn.normal((width, width)), drawn.normal((width, classes)), drawn.normal((tokens, width)), labels, where
    return Modes(dict.fromkeys(MODES, network_loss), args, leaves=2)


def prepare_block(work: str, mask: str, dtype: str, sizes: tuple[int, int, int]) -> Work:
    samples, length, width = sizes
    shapes = dict.fromkeys(("query", "key", "value", "out"), (width, width))
    shapes |= {"up": (width, 4 * width), "down": (4 * width, width), "vocabulary": (width, BLOCK_CLASSES)}
    params = {name: 0.1 * drawn.normal(shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    labels, where = drawn.labels((samples, length), BLOCK_CLASSES), drawn.bits((samples, length), 0.8)
    return Modes(dict.fromkeys((*MODES, "forward mode"), block_loss), (params, drawn.normal(sizes), labels, where))


# Accumulation


def prepare_accumulation(work: str, mask: str, dtype: str, shape: tuple[int, int]) -> Work:
    """The lengths of the gradients, since a benchmark's function returns one array."""
    lines = np.resize(example.read_lines(), (shape[0], example.LENGTH + 1))
    labels = np.where(lines[:, 1:] > 0, lines[:, 1:], example.IGNORED)
    of = {"masksafe": example.of_masksafe, "optax": example.of_means, "at once": example.of_whole_batch}
    functions = {
        name: lambda params, *batch, of=gradient: optax.tree.norm(of(params, example.Batch(*batch)))
        for name, gradient in of.items()
    }
    return Work(functions, (example.make_params(jax.random.key(0)), lines[:, :-1], labels))


IN_ALL = {"float32": tuple(SIZES)}
DECODERS = grid_of(["decoder"], ("none", "packed"), IN_ALL)
OF_DECODER = cases_of(prepare_decoder, SIZES_OF_DECODER, DECODERS, passes=(GRADIENT,))
OF_CHECKS = cases_of(prepare_loss, SIZES, grid_of(("loss", "network"), ("none", "rows", "classes"), IN_ALL))
OF_CHECKS += cases_of(prepare_block, BLOCKS, grid_of(["block"], ["rows"], IN_ALL))
OF_ACCUMULATION = cases_of(
    prepare_accumulation,
    {"tiny": (8, example.LENGTH), "large": (256, example.LENGTH)},  # lines, characters
    grid_of(["gradient"], ["ragged"], {"float32": ("tiny", "large")}),
    passes=(VALUE,),
)
WITHOUT_CHECKS = tuple((mode, "off") for mode in ("checkify", "raise", "forward mode"))
BENCHMARKS = [
    Benchmark("label_checks", "Label checks", WITHOUT_CHECKS, OF_CHECKS),
    Benchmark("decoder", "A decoder", against("flax"), OF_DECODER),
    Benchmark("accumulation", "Gradient accumulation", against("optax", "at once"), OF_ACCUMULATION),
]
