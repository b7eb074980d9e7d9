"""A policy-gradient loss of a linear layer, against one whose logits are all in memory.

    python examples/benchmarks/linear_log_probs.py [--quick] [--rounds N] [--plot-only]

The mean over unmasked tokens of advantage times log-probability, without and with a bonus for entropy; the gradients
are those of features and kernel. The others select the unmasked tokens afterwards; tokamax, here with its XLA
implementation, has no entropies.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from command import main
from linear_cross_entropy import SIZES, UNMASKED
from measure import Benchmark, Case, Work, by_x, random_bits, random_labels, random_normal

import masksafe

WORKS = ("log p", "log p, entropy")
MASKS_OF = {
    "float32": dict.fromkeys(("tiny", "middle", "large"), tuple(UNMASKED)) | {"vocabulary": ("none", "95 % of tokens")},
    "bfloat16": {"large": ("none",)},
}
BONUS = 0.01


def policy_loss(mask: Any, advantages: Any, log_probs: Any, entropies: Any) -> Any:
    terms = -advantages * log_probs - BONUS * entropies
    return masksafe.mean(terms, where=mask)


def of_masksafe(work: str, features: jax.Array, kernel: jax.Array, labels: jax.Array, *rest: jax.Array) -> jax.Array:
    mask, advantages = rest
    of = functools.partial(masksafe.losses.linear_log_probs, features, kernel, labels, where=mask)
    log_probs, entropies = of(with_entropy=True) if work == "log p, entropy" else (of(), 0.0)
    return policy_loss(mask, advantages, log_probs, entropies)


def of_jax(work: str, features: jax.Array, kernel: jax.Array, labels: jax.Array, *rest: jax.Array) -> jax.Array:
    log_p = jax.nn.log_softmax(jnp.matmul(features, kernel).astype(jnp.float32))
    log_probs = jnp.take_along_axis(log_p, labels[:, None], -1)[:, 0]
    entropies = -jnp.sum(jnp.exp(log_p) * log_p, -1) if work == "log p, entropy" else 0.0
    return policy_loss(*rest, log_probs, entropies)


def of_tokamax(features: jax.Array, kernel: jax.Array, labels: jax.Array, *rest: jax.Array) -> jax.Array:
    import tokamax
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # or tokamax would take this program's options for its own
    losses = tokamax.linear_softmax_cross_entropy_loss(features, labels, kernel, reduction="none", implementation="xla")
    return policy_loss(*rest, -losses.astype(jnp.float32), 0.0)


def of_torch(work: str, features: Any, kernel: Any, labels: Any, mask: Any, advantages: Any) -> Any:
    import torch

    log_p = torch.log_softmax((features @ kernel).float(), -1)
    log_probs = log_p.gather(-1, labels[:, None])[:, 0]
    entropies = -(log_p.exp() * log_p).sum(-1) if work == "log p, entropy" else 0.0
    terms = -advantages * log_probs - BONUS * entropies
    return torch.where(mask, terms, 0).sum() / mask.sum().clamp(min=1)


def prepare(work: str, mask: str, dtype: str, sizes: tuple[int, int, int]) -> Work:
    tokens, width, classes = sizes
    features = random_normal((tokens, width), dtype)
    kernel = random_normal((width, classes), dtype, 1) / width**0.5
    labels, where = random_labels((tokens,), classes), random_bits((tokens,), UNMASKED[mask])
    functions = {
        name: functools.partial(fn, work)
        for name, fn in (("masksafe", of_masksafe), ("jax.nn", of_jax), ("torch", of_torch))
    }
    functions |= {"tokamax": of_tokamax} if work == "log p" and mask == "none" else {}
    return Work(functions, (features, kernel, labels, where, random_normal((tokens,), "float32", 2)), leaves=2)


CASES = [
    Case(work, mask, dtype, size, by_x(SIZES[size]), functools.partial(prepare, work, mask, dtype, SIZES[size]))
    for work in WORKS
    for dtype, masks_of in MASKS_OF.items()
    for size, masks in masks_of.items()
    for mask in masks
]
PEERS = ("jax.nn", "torch", "tokamax")
BENCHMARK = Benchmark(
    "linear_log_probs",
    "Log-probabilities and entropies of a linear layer",
    tuple(("masksafe", peer) for peer in PEERS),
    CASES,
)

if __name__ == "__main__":
    main([BENCHMARK])
