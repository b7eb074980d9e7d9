"""What checking labels costs: the time in each mode in units of that without checks.

    python examples/benchmarks/label_checks.py [--quick] [--rounds N] [--plot-only]

The loss alone is the worst case for "raise"; "network" has one hidden layer over a vocabulary. "block" is a small
Transformer block in which nearly everything is one of masksafe's ops, the worst case for "checkify": there they are
differentiated by JAX's own rules, as in `masksafe.forward_mode`, which is measured alongside.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from command import main
from jax.experimental import checkify
from measure import Benchmark, Candidate, Case, Work, by_x, in_jax, pulled_back, random_bits, random_labels
from measure import random_normal as normal

import masksafe

SIZES = {"tiny": (64, 8, 16), "middle": (512, 128, 1024), "large": (4096, 256, 4096)}  # tokens, width, classes
BLOCKS = {"tiny": (2, 8, 8), "middle": (4, 32, 64), "large": (16, 64, 64)}  # samples, length, width
HEADS, BLOCK_CLASSES = 4, 256
MASKS = ("none", "rows", "classes")


class Modes(Work):
    """One function in several modes."""

    def candidate(self, name: str, *, gradient: bool, eager: bool) -> Candidate:
        fn = self.functions[name]
        step, args = pulled_back(fn, self.args, self.leaves) if gradient else (fn, self.args)
        step = checkify.checkify(step) if name == "checkify" else step
        return in_jax(step, args, eager=eager, context=functools.partial(in_mode, name))


def in_mode(name: str) -> contextlib.AbstractContextManager[Any]:
    return masksafe.forward_mode() if name == "forward mode" else masksafe.label_checks(name)


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


def in_modes(fn: Callable[..., Any], args: tuple[Any, ...], leaves: int, *more: str) -> Work:
    return Modes(dict.fromkeys(("off", "checkify", "raise", *more), fn), args, leaves)


def prepare_loss(work: str, mask: str, size: str) -> Work:
    tokens, width, classes = SIZES[size]
    labels = random_labels((tokens,), classes)
    where = {"none": None, "rows": random_bits((tokens,), 0.5), "classes": random_bits((tokens, classes), 0.9)}[mask]
    if mask == "classes":
        where |= labels[:, None] == jnp.arange(classes)
    if work == "loss":
        return in_modes(loss, (normal((tokens, classes)), labels, where), 1)
    args = normal((width, width)), normal((width, classes)), normal((tokens, width)), labels, where
    return in_modes(network_loss, args, 2)


def prepare_block(size: str) -> Work:
    samples, length, width = BLOCKS[size]
    shapes = dict.fromkeys(("query", "key", "value", "out"), (width, width))
    shapes |= {"up": (width, 4 * width), "down": (4 * width, width), "vocabulary": (width, BLOCK_CLASSES)}
    params = {name: 0.1 * normal(shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    labels, where = random_labels((samples, length), BLOCK_CLASSES), random_bits((samples, length), 0.8)
    return in_modes(block_loss, (params, normal(BLOCKS[size]), labels, where), 1, "forward mode")


CASES = [
    Case(work, mask, "float32", size, by_x(SIZES[size]), functools.partial(prepare_loss, work, mask, size))
    for work in ("loss", "network")
    for mask in MASKS
    for size in SIZES
]
CASES += [
    Case("block", "rows", "float32", size, by_x(shape), functools.partial(prepare_block, size))
    for size, shape in BLOCKS.items()
]
MODES = ("checkify", "raise", "forward mode")
BENCHMARK = Benchmark("label_checks", "Label checks", tuple((mode, "off") for mode in MODES), CASES)

if __name__ == "__main__":
    main([BENCHMARK])
