"""Every loss that has no benchmark of its own against optax's, without a mask.

python examples/benchmarks/losses.py [--quick] [--rounds N] [--plot-only]
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from command import main
from measure import Benchmark, Case, Work, by_x, eager_too, random_labels, random_normal

import masksafe

SIZES = {"tiny": (8, 16), "middle": (1024, 256), "large": (8192, 1024)}  # rows, classes
CTC = {"tiny": (2, 16, 4), "middle": (8, 64, 16), "large": (16, 256, 48)}  # samples, frames, words
# optax's ntxent has an array of rows x rows x width, and its sparsemax a loop over rows.
MOST = {"ntxent": (512, 128), "multiclass_sparsemax_loss": (1024, 1 << 20)}
EAGER = ("squared_error", "sigmoid_binary_cross_entropy", "ctc_loss")
Shape = tuple[int, ...]


def pair(shape: Shape) -> tuple[jax.Array, jax.Array]:
    return random_normal(shape), random_normal(shape, seed=1)


def with_targets(of_targets: Callable[[jax.Array], Any], shape: Shape) -> tuple[Any, ...]:
    x, y = pair(shape)
    return x, of_targets(y)


def with_labels(shape: Shape) -> tuple[Any, ...]:
    rows, classes = shape
    return random_normal(shape), random_labels((rows,), classes)


def distributions(logarithms: bool, shape: Shape) -> tuple[Any, ...]:
    x, y = (jax.nn.log_softmax(a) for a in pair(shape))
    return x, y if logarithms else jnp.exp(y)


def pixels(classes: int, shape: Shape) -> tuple[Any, ...]:
    x, y = (a.reshape(8, -1, classes) for a in pair(shape))
    truth = jax.nn.one_hot(jnp.argmax(y, -1), classes) if classes > 1 else (y > 0).astype(jnp.float32)
    return x, truth


def speech(shape: Shape) -> tuple[Any, ...]:
    samples, frames, words = shape
    classes = 2 * words
    lengths = np.random.default_rng(0).uniform(0.5, 1, (samples, 1))
    padding = lambda n: jnp.asarray(np.arange(n) >= n * lengths, jnp.float32)  # noqa: E731
    labels = 1 + random_labels((samples, words), classes - 1)
    return random_normal((samples, frames, classes)), padding(frames), labels, padding(words)


def embeddings(shape: Shape) -> tuple[Any, ...]:
    rows, _ = shape
    return random_normal(shape), random_labels((rows,), max(2, rows // 8))


def triplets(shape: Shape) -> tuple[Any, ...]:
    return (*pair(shape), random_normal(shape, seed=2))


def as_bits(y: jax.Array) -> jax.Array:
    return (y > 0).astype(jnp.float32)


TARGETS = functools.partial(with_targets, lambda y: y)
BITS = functools.partial(with_targets, as_bits)
SIGNS = functools.partial(with_targets, lambda y: 2 * as_bits(y) - 1)
SHARES = functools.partial(with_targets, jax.nn.softmax)
SHARES_OF, LOGARITHMS_OF = functools.partial(distributions, False), functools.partial(distributions, True)
ARGUMENTS: dict[str, Callable[[Shape], tuple[Any, ...]]] = {
    **dict.fromkeys(("squared_error", "l2_loss", "huber_loss", "log_cosh"), TARGETS),
    **dict.fromkeys(("cosine_similarity", "cosine_distance"), TARGETS),
    **dict.fromkeys(("sigmoid_binary_cross_entropy", "sigmoid_focal_loss"), BITS),
    **dict.fromkeys(("hinge_loss", "perceptron_loss"), SIGNS),
    **dict.fromkeys(("multiclass_hinge_loss", "multiclass_perceptron_loss", "multiclass_sparsemax_loss"), with_labels),
    "sparsemax_loss": functools.partial(with_targets, lambda y: (y > 0).astype(jnp.int32)),
    **dict.fromkeys(("safe_softmax_cross_entropy", "poly_loss_cross_entropy", "ranking_softmax_loss"), SHARES),
    **dict.fromkeys(("kl_divergence", "generalized_kl_divergence", "convex_kl_divergence"), SHARES_OF),
    "kl_divergence_with_log_targets": LOGARITHMS_OF,
    "binary_dice_loss": functools.partial(pixels, 1),
    **dict.fromkeys(("dice_loss", "multiclass_generalized_dice_loss"), functools.partial(pixels, 8)),
    **dict.fromkeys(("ctc_loss", "ctc_loss_with_forward_probs"), speech),
    "ntxent": embeddings,
    "triplet_margin_loss": triplets,
    "smooth_labels": lambda shape: (jax.nn.softmax(pair(shape)[0]), 0.1),
    "make_fenchel_young_loss": TARGETS,
}


def of_masksafe(name: str) -> Callable[..., Any]:
    return loss_of(masksafe.losses, name)


def of_optax(name: str) -> Callable[..., Any]:
    def loss(*args: Any) -> Any:
        import optax

        return loss_of(optax.losses, name)(*args)

    return loss


def loss_of(library: Any, name: str) -> Callable[..., Any]:
    fn = getattr(library, name)
    return fn(jax.nn.logsumexp) if name == "make_fenchel_young_loss" else fn


def prepare(name: str, size: str) -> Work:
    return Work({"masksafe": of_masksafe(name), "optax": of_optax(name)}, ARGUMENTS[name](shape_of(name, size)))


def shape_of(name: str, size: str) -> Shape:
    return CTC[size] if name.startswith("ctc") else at_most(name, SIZES[size])


def at_most(name: str, shape: Shape) -> Shape:
    """The shape, or as much of it as optax's loss can bear."""
    return tuple(map(min, shape, MOST.get(name, shape)))


CASES = [
    Case(name, "none", "float32", size, by_x(shape_of(name, size)), functools.partial(prepare, name, size))
    for name in ARGUMENTS
    for size in SIZES
    if (name, size) != ("ntxent", "large")  # it would be the middle one
]
EAGER_CASES = [case for case in eager_too(CASES) if case.eager and case.work in EAGER]
BENCHMARK = Benchmark("losses", "All losses", (("masksafe", "optax"),), CASES + EAGER_CASES)

if __name__ == "__main__":
    main([BENCHMARK])
