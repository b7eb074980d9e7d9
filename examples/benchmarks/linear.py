"""The losses of a linear layer against all logits in memory: the cross-entropy, log-probabilities, and divergences.

All are means over the unmasked tokens; the gradients are those of features and kernel. Each peer takes the fastest of
its forms for a CPU. torch's `linear_cross_entropy` computes all logits: with `LinearCrossEntropyOptions`, in chunks, a
gradient takes it 1.9 to 6 times as long. tokamax has chunks of its own ("chunked_xla") where they are faster than its
"xla"; it has no mask and no entropies. The log-probabilities are those of a policy-gradient loss, advantage times
log-probability, without and with a bonus for entropy. The divergences are those of distillation.
"""

import dataclasses
import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
from measure import Benchmark, Work, cases_of, random_bits, random_labels, random_normal

import masksafe
from masksafe import losses

SIZES = {  # tokens, width, classes
    "tiny": (64, 16, 100),
    "middle": (512, 256, 4096),
    "large": (1024, 256, 16384),
    "vocabulary": (512, 256, 131072),
}
UNMASKED = {"none": 1.0, "60 % of tokens": 0.4, "75 % of tokens": 0.25, "95 % of tokens": 0.05}
ALL = ("none", "60 % of tokens", "95 % of tokens")
IN_FLOAT32 = dict.fromkeys(("tiny", "middle", "large"), ALL) | {"vocabulary": ("none", "95 % of tokens")}
IGNORED = -100
FEW_CLASSES = 4096  # up to which tokamax's chunks take longer than all logits
BONUS, BETA = 0.01, 0.5


def make_arrays(mask: str, dtype: str, sizes: tuple[int, int, int]) -> tuple[jax.Array, ...]:
    """Features, kernel, labels, and a mask of tokens."""
    tokens, width, classes = sizes
    kernel = random_normal((width, classes), dtype, 1) / width**0.5
    labels, where = random_labels((tokens,), classes), random_bits((tokens,), UNMASKED[mask])
    return random_normal((tokens, width), dtype), kernel, labels, where


def without_mask(work: Work, position: int = 3) -> Work:
    """As it is timed, but that masksafe is not given a mask of True, which is the argument at that position."""
    ours = work.functions["masksafe"]

    def unmasked(*args: Any) -> Any:
        return ours(*args[:position], None, *args[position + 1 :])

    return dataclasses.replace(work, functions={**work.functions, "masksafe": unmasked})


def mean_of_unmasked(losses: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(mask, losses, 0)) / jnp.maximum(jnp.sum(mask), 1)


def of_tokamax(features: jax.Array, kernel: jax.Array, labels: jax.Array, reduction: str, form: str) -> jax.Array:
    import tokamax
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # or tokamax would take this program's options for its own
    loss: Any = tokamax.linear_softmax_cross_entropy_loss
    return loss(features, labels, kernel, reduction=reduction, implementation=form).astype(jnp.float32)


# The cross-entropy


def of_masksafe(features: jax.Array, kernel: jax.Array, labels: jax.Array, mask: jax.Array) -> jax.Array:
    return losses.linear_softmax_cross_entropy(features, kernel, labels, where=mask)


def of_optax(features: jax.Array, kernel: jax.Array, labels: jax.Array, mask: jax.Array) -> jax.Array:
    import optax

    logits = jnp.matmul(features, kernel).astype(jnp.float32)
    return mean_of_unmasked(optax.softmax_cross_entropy_with_integer_labels(logits, labels), mask)


def cross_entropy_of_tokamax(features: jax.Array, kernel: jax.Array, labels: jax.Array, mask: jax.Array) -> jax.Array:
    has_chunks = sys.version_info >= (3, 12)  # the newest tokamax for Python 3.11 has none
    form = "chunked_xla" if has_chunks and kernel.shape[1] > FEW_CLASSES else "xla"
    return of_tokamax(features, kernel, labels, "mean", form)


def cross_entropy_of_torch(features: Any, kernel: Any, labels: Any) -> Any:
    import torch

    return torch.nn.functional.linear_cross_entropy(features, kernel.T, labels, ignore_index=IGNORED)


def prepare(work: str, mask: str, dtype: str, sizes: tuple[int, int, int]) -> Work:
    features, kernel, labels, where = args = make_arrays(mask, dtype, sizes)
    functions = {"masksafe": of_masksafe, "optax": of_optax, "torch": cross_entropy_of_torch}
    functions |= {"tokamax": cross_entropy_of_tokamax} if mask == "none" else {}
    return Work(functions, args, leaves=2, torch_args=(features, kernel, jnp.where(where, labels, IGNORED)))


# Log-probabilities and entropies

WITHOUT, WITH_ENTROPY = LOG_PROBS = ("log p", "log p, entropy")


def policy_loss(mask: Any, advantages: Any, log_probs: Any, entropies: Any = 0.0) -> Any:
    return masksafe.mean(-advantages * log_probs - BONUS * entropies, where=mask)


def log_probs_of_masksafe(work: str, *args: jax.Array) -> jax.Array:
    features, kernel, labels, mask, advantages = args
    with_entropy = work == WITH_ENTROPY
    found = losses.linear_log_probs(features, kernel, labels, where=mask, with_entropy=with_entropy)
    return policy_loss(mask, advantages, *(found if with_entropy else (found,)))


def log_probs_of_jax(work: str, features: jax.Array, kernel: jax.Array, labels: jax.Array, *rest: Any) -> jax.Array:
    log_p = jax.nn.log_softmax(jnp.matmul(features, kernel).astype(jnp.float32))
    log_probs = jnp.take_along_axis(log_p, labels[:, None], -1)[:, 0]
    return policy_loss(*rest, log_probs, -jnp.sum(jnp.exp(log_p) * log_p, -1) if work == WITH_ENTROPY else 0.0)


def log_probs_of_tokamax(features: jax.Array, kernel: jax.Array, labels: jax.Array, *rest: jax.Array) -> jax.Array:
    return policy_loss(*rest, -of_tokamax(features, kernel, labels, "none", "xla"))


def log_probs_of_torch(work: str, features: Any, kernel: Any, labels: Any, mask: Any, advantages: Any) -> Any:
    import torch

    log_p = torch.log_softmax((features @ kernel).float(), -1)
    log_probs = log_p.gather(-1, labels[:, None])[:, 0]
    entropies = -(log_p.exp() * log_p).sum(-1) if work == WITH_ENTROPY else 0.0
    terms = -advantages * log_probs - BONUS * entropies
    return torch.where(mask, terms, 0).sum() / mask.sum().clamp(min=1)


def prepare_log_probs(work: str, mask: str, dtype: str, sizes: tuple[int, int, int]) -> Work:
    of = {"masksafe": log_probs_of_masksafe, "jax.nn": log_probs_of_jax, "torch": log_probs_of_torch}
    functions = {name: functools.partial(fn, work) for name, fn in of.items()}
    functions |= {"tokamax": log_probs_of_tokamax} if (work, mask) == (WITHOUT, "none") else {}
    return Work(functions, (*make_arrays(mask, dtype, sizes), random_normal(sizes[:1], "float32", 2)), leaves=2)


# Divergences

SIZES_OF_DIVERGENCE = {  # tokens, the student's width, the teacher's, classes
    "tiny": (64, 16, 24, 100),
    "middle": (512, 256, 384, 4096),
    "large": (1024, 256, 512, 16384),
}
BOTH = ("none", "75 % of tokens")
DIVERGENCES = {  # the masks of each size, of each direction and dtype
    ("forward", "float32"): dict.fromkeys(SIZES_OF_DIVERGENCE, BOTH),
    ("reverse", "float32"): {"large": ("none",)},
    ("jensen-shannon", "float32"): {"large": ("none",)},
    ("forward", "bfloat16"): {"middle": BOTH},
}


def divergence_of_masksafe(direction: str, *args: jax.Array) -> jax.Array:
    *arrays, where = args
    direction = direction.replace("-", "_")
    return losses.linear_kl_divergence(*arrays, where=where, direction=direction, beta=BETA)


def divergence_of_optax(direction: str, *args: jax.Array) -> jax.Array:
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
    return mean_of_unmasked(losses, where)


def prepare_divergence(direction: str, mask: str, dtype: str, sizes: tuple[int, int, int, int]) -> Work:
    tokens, width, width_of_targets, classes = sizes
    shapes = (tokens, width), (width, classes), (tokens, width_of_targets), (width_of_targets, classes)
    arrays = [random_normal(shape, dtype, seed) for seed, shape in enumerate(shapes)]
    features, kernel, target_features, target_kernel = arrays
    args = features, kernel / width**0.5, target_features, target_kernel / width_of_targets**0.5
    functions = {"masksafe": divergence_of_masksafe, "optax": divergence_of_optax}
    functions = {name: functools.partial(fn, direction) for name, fn in functions.items()}
    return Work(functions, (*args, random_bits((tokens,), UNMASKED[mask])), leaves=2)


CROSS_ENTROPY_IN = {"float32": IN_FLOAT32, "bfloat16": {"middle": ALL, "large": ("none",)}}
LOG_PROBS_IN = {"float32": IN_FLOAT32, "bfloat16": {"large": ("none",)}}
CASES = {
    "linear_cross_entropy": cases_of(
        *(prepare, SIZES, [("linear", m, d, s) for d, of in CROSS_ENTROPY_IN.items() for s in of for m in of[s]])
    ),
    "linear_log_probs": cases_of(
        *(prepare_log_probs, SIZES),
        [(w, m, d, s) for w in LOG_PROBS for d, of in LOG_PROBS_IN.items() for s in of for m in of[s]],
    ),
    "linear_kl_divergence": cases_of(
        *(prepare_divergence, SIZES_OF_DIVERGENCE),
        [(w, m, d, s) for (w, d), of in DIVERGENCES.items() for s in of for m in of[s]],
    ),
}
TITLES = {
    "Cross-entropy of a linear layer": ("optax", "torch", "tokamax"),
    "Log-probabilities and entropies of a linear layer": ("jax.nn", "torch", "tokamax"),
    "Divergences of linear layers": ("optax",),
}
BENCHMARKS = [
    Benchmark(name, title, tuple(("masksafe", peer) for peer in peers), CASES[name])
    for name, (title, peers) in zip(CASES, TITLES.items(), strict=True)
]
