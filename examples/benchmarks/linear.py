"""The losses of a linear layer against all logits in memory: the cross-entropy, log-probabilities, and divergences.

All are means over the unmasked tokens; the gradients are those of features and kernel. Each peer takes the fastest of
its forms for a CPU. torch's `linear_cross_entropy` computes all logits: with `LinearCrossEntropyOptions`, in chunks, a
gradient takes it 1.9 to 6 times as long. tokamax has chunks of its own ("chunked_xla") where they are faster than its
"xla"; it has no mask and no entropies. The log-probabilities are those of a policy-gradient loss, advantage times
log-probability, without and with a bonus for entropy. The divergences are those of distillation.
"""

import sys
from typing import Any

import drawn
import jax
import jax.numpy as jnp
from measure import Benchmark, Work, against, cases_of, functional, sized_grid

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
    kernel = drawn.normal((width, classes), dtype, 1) / width**0.5
    labels, where = drawn.labels((tokens,), classes), drawn.bits((tokens,), UNMASKED[mask])
    return drawn.normal((tokens, width), dtype), kernel, labels, where


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
    import optax  # which need not be installed

    logits = jnp.matmul(features, kernel).astype(jnp.float32)
    return mean_of_unmasked(optax.softmax_cross_entropy_with_integer_labels(logits, labels), mask)


def prepare(work: str, mask: str, dtype: str, sizes: tuple[int, int, int]) -> Work:
    features, kernel, labels, where = args = make_arrays(mask, dtype, sizes)
    has_chunks = sys.version_info >= (3, 12)  # the newest tokamax for Python 3.11 has none
    form = "chunked_xla" if has_chunks and sizes[-1] > FEW_CLASSES else "xla"
    functions = {
        "masksafe": of_masksafe,
        "optax": of_optax,
        "torch": lambda x, kernel, labels: functional().linear_cross_entropy(x, kernel.T, labels, ignore_index=IGNORED),
        "tokamax": lambda features, kernel, labels, _: of_tokamax(features, kernel, labels, "mean", form),
    }
    if mask != "none":
        del functions["tokamax"]
    return Work(functions, args, leaves=2, torch_args=(features, kernel, jnp.where(where, labels, IGNORED)))


# Log-probabilities and entropies

WITHOUT, WITH_ENTROPY = LOG_PROBS = ("log p", "log p, entropy")


def prepare_log_probs(work: str, mask: str, dtype: str, sizes: tuple[int, int, int]) -> Work:
    with_entropy = work == WITH_ENTROPY

    def loss(mask: Any, advantages: Any, log_probs: Any, entropies: Any = 0.0) -> Any:
        return masksafe.mean(-advantages * log_probs - BONUS * entropies, where=mask)

    def of_masksafe(features: jax.Array, kernel: jax.Array, labels: jax.Array, *rest: jax.Array) -> jax.Array:
        found = losses.linear_log_probs(features, kernel, labels, where=rest[0], with_entropy=with_entropy)
        return loss(*rest, *(found if with_entropy else (found,)))

    def of_jax(features: jax.Array, kernel: jax.Array, labels: jax.Array, *rest: jax.Array) -> jax.Array:
        log_p = jax.nn.log_softmax(jnp.matmul(features, kernel).astype(jnp.float32))
        log_probs = jnp.take_along_axis(log_p, labels[:, None], -1)[:, 0]
        return loss(*rest, log_probs, -jnp.sum(jnp.exp(log_p) * log_p, -1) if with_entropy else 0.0)

    def of_torch(features: Any, kernel: Any, labels: Any, mask: Any, advantages: Any) -> Any:
        log_p = functional().log_softmax((features @ kernel).float(), -1)
        log_probs = log_p.gather(-1, labels[:, None])[:, 0]
        entropies = -(log_p.exp() * log_p).sum(-1) if with_entropy else 0.0
        terms = -advantages * log_probs - BONUS * entropies
        return terms.where(mask, 0).sum() / mask.sum().clamp(min=1)

    functions = {
        "masksafe": of_masksafe,
        "jax.nn": of_jax,
        "torch": of_torch,
        "tokamax": lambda x, kernel, labels, *rest: loss(*rest, -of_tokamax(x, kernel, labels, "none", "xla")),
    }
    if (work, mask) != (WITHOUT, "none"):
        del functions["tokamax"]
    return Work(functions, (*make_arrays(mask, dtype, sizes), drawn.normal(sizes[:1], "float32", 2)), leaves=2)


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


def prepare_divergence(direction: str, mask: str, dtype: str, sizes: tuple[int, int, int, int]) -> Work:
    tokens, width, width_of_targets, classes = sizes
    shapes = (tokens, width), (width, classes), (tokens, width_of_targets), (width_of_targets, classes)
    arrays = [drawn.normal(shape, dtype, seed) for seed, shape in enumerate(shapes)]
    features, kernel, target_features, target_kernel = arrays
    args = features, kernel / width**0.5, target_features, target_kernel / width_of_targets**0.5

    def of_masksafe(*args: jax.Array) -> jax.Array:
        of = {"where": args[-1], "direction": direction.replace("-", "_"), "beta": BETA}
        return losses.linear_kl_divergence(*args[:-1], **of)

    def of_optax(*args: jax.Array) -> jax.Array:
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

    functions = {"masksafe": of_masksafe, "optax": of_optax}
    return Work(functions, (*args, drawn.bits((tokens,), UNMASKED[mask])), leaves=2)


IN_CROSS_ENTROPY = {"float32": IN_FLOAT32, "bfloat16": {"middle": ALL, "large": ("none",)}}
IN_LOG_PROBS = {"float32": IN_FLOAT32, "bfloat16": {"large": ("none",)}}
OF_CROSS_ENTROPY = cases_of(prepare, SIZES, sized_grid(["linear"], IN_CROSS_ENTROPY))
OF_LOG_PROBS = cases_of(prepare_log_probs, SIZES, sized_grid(LOG_PROBS, IN_LOG_PROBS))
OF_DIVERGENCES = [
    case
    for (direction, dtype), masks in DIVERGENCES.items()
    for case in cases_of(prepare_divergence, SIZES_OF_DIVERGENCE, sized_grid([direction], {dtype: masks}))
]
TITLES = "Cross-entropy of a linear layer", "Log-probabilities and entropies of a linear layer"
BENCHMARKS = [
    Benchmark("linear_cross_entropy", TITLES[0], against("optax", "torch", "tokamax"), OF_CROSS_ENTROPY),
    Benchmark("linear_log_probs", TITLES[1], against("jax.nn", "torch", "tokamax"), OF_LOG_PROBS),
    Benchmark("linear_kl_divergence", "Divergences of linear layers", against("optax"), OF_DIVERGENCES),
]
