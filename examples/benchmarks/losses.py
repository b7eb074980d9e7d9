"""The losses against optax and torch: cross-entropies of integer and one-hot labels, and every other loss of optax.

torch takes part where it can: in the cross-entropies without a mask, and with rows of integer labels masked by its
`ignore_index`.
"""

import functools
from collections.abc import Callable
from typing import Any

import drawn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from measure import Benchmark, Work, against, cases_of, eager_too, functional, grid_of

import masksafe

# Cross-entropies

CROSS_ENTROPIES = {"integer": "softmax_cross_entropy_with_integer_labels", "one-hot": "softmax_cross_entropy"}
MASKS = ("none", "rows", "classes")
SIZES_OF_CROSS_ENTROPY = {"tiny": (8, 10), "narrow": (4096, 64), "middle": (4096, 1024), "large": (2048, 32768)}
DTYPES = {"float32": tuple(SIZES_OF_CROSS_ENTROPY), "bfloat16": ("middle", "large"), "float16": ("middle",)}
IGNORED = -100


def prepare_cross_entropy(kind: str, mask: str, dtype: str, shape: tuple[int, int]) -> Work:
    logits, labels = drawn.normal(shape, dtype), drawn.labels(shape[:1], shape[1])
    where = {"none": None, "rows": drawn.bits(shape[:1], 0.5), "classes": drawn.bits(shape, 0.5)}[mask]
    if mask == "classes":
        where |= labels[:, None] == jnp.arange(shape[1])
    in_torch = mask == "none" or (mask, kind) == ("rows", "integer")
    for_torch = jnp.where(where, labels, IGNORED) if mask == "rows" else labels
    if kind == "one-hot":
        labels = for_torch = jax.nn.one_hot(labels, shape[1], dtype=dtype)
    ours, peers = (getattr(library.losses, CROSS_ENTROPIES[kind]) for library in (masksafe, optax))

    def of_optax(logits: jax.Array, labels: jax.Array, where: jax.Array | None) -> jax.Array:
        """A mask of rows is applied as optax's users apply it: to the losses."""
        if where is None or where.ndim == logits.ndim:
            return peers(logits, labels, where=where)
        return jnp.where(where, peers(logits, labels), 0)

    functions = {"masksafe": lambda logits, labels, where: ours(logits, labels, where=where), "optax": of_optax}
    if in_torch:
        functions["torch"] = lambda *args: functional().cross_entropy(*args, ignore_index=IGNORED, reduction="none")
    return Work(functions, (logits, labels, where), torch_args=(logits, for_torch))


# Every other loss

SIZES = {"tiny": (8, 16), "middle": (1024, 256), "large": (8192, 1024)}  # rows, classes
CTC = {"tiny": (2, 16, 4), "middle": (8, 64, 16), "large": (16, 256, 48)}  # samples, frames, words
# optax's ntxent has an array of rows x rows x width, and its sparsemax a loop over rows.
MOST = {"ntxent": (512, 128), "multiclass_sparsemax_loss": (1024, 1 << 20)}
EAGER = ("squared_error", "sigmoid_binary_cross_entropy", "ctc_loss")
WITHOUT_MASK = {  # no loss for each row or element, or a mask that optax has not, since it changes the other elements
    *("ranking_softmax_loss", "multiclass_generalized_dice_loss", "ntxent", "smooth_labels"),
    *("ctc_loss_with_forward_probs", "safe_softmax_cross_entropy"),
}
FLOAT32_ONLY = {"multiclass_sparsemax_loss"}  # optax's gradient fails with 16-bit floats
Shape = tuple[int, ...]


def pixels(x: jax.Array, y: jax.Array, classes: int = 1) -> tuple[Any, ...]:
    x, y = (a.reshape(8, -1, classes) for a in (x, y))
    return x, jax.nn.one_hot(jnp.argmax(y, -1), classes) if classes > 1 else (y > 0).astype(jnp.float32)


def speech(x: jax.Array, _: jax.Array) -> tuple[Any, ...]:
    samples, frames, words = x.shape
    classes = 2 * words
    lengths = np.random.default_rng(0).uniform(0.5, 1, (samples, 1))
    padding = lambda n: jnp.asarray(np.arange(n) >= n * lengths, jnp.float32)  # noqa: E731
    labels = 1 + drawn.labels((samples, words), classes - 1)
    return drawn.normal((samples, frames, classes)), padding(frames), labels, padding(words)


def divergence(x: jax.Array, y: jax.Array) -> tuple[Any, ...]:
    return jax.nn.log_softmax(x), jnp.exp(jax.nn.log_softmax(y))


def labelled(x: jax.Array, _: jax.Array) -> tuple[Any, ...]:
    return x, drawn.labels(x.shape[:1], x.shape[1])


ARGUMENTS: dict[str, Callable[[jax.Array, jax.Array], tuple[Any, ...]]] = {  # made of two arrays of random numbers
    **dict.fromkeys(("squared_error", "l2_loss", "huber_loss", "log_cosh"), lambda x, y: (x, y)),
    **dict.fromkeys(("cosine_similarity", "cosine_distance"), lambda x, y: (x, y)),
    "sigmoid_binary_cross_entropy": lambda x, y: (x, (y > 0).astype(jnp.float32)),
    "sigmoid_focal_loss": lambda x, y: (x, (y > 0).astype(jnp.float32)),
    **dict.fromkeys(("hinge_loss", "perceptron_loss"), lambda x, y: (x, 2 * (y > 0).astype(jnp.float32) - 1)),
    **dict.fromkeys(("multiclass_hinge_loss", "multiclass_perceptron_loss", "multiclass_sparsemax_loss"), labelled),
    "sparsemax_loss": lambda x, y: (x, (y > 0).astype(jnp.int32)),
    "safe_softmax_cross_entropy": lambda x, y: (x, jax.nn.softmax(y)),
    "poly_loss_cross_entropy": lambda x, y: (x, jax.nn.softmax(y)),
    "ranking_softmax_loss": lambda x, y: (x, jax.nn.softmax(y)),
    **dict.fromkeys(("kl_divergence", "generalized_kl_divergence", "convex_kl_divergence"), divergence),
    "kl_divergence_with_log_targets": lambda x, y: (jax.nn.log_softmax(x), jax.nn.log_softmax(y)),
    "binary_dice_loss": pixels,
    **dict.fromkeys(("dice_loss", "multiclass_generalized_dice_loss"), functools.partial(pixels, classes=8)),
    **dict.fromkeys(("ctc_loss", "ctc_loss_with_forward_probs"), speech),
    "ntxent": lambda x, _: (x, drawn.labels(x.shape[:1], max(2, len(x) // 8))),
    "triplet_margin_loss": lambda x, y: (x, y, drawn.normal(x.shape, seed=2)),
    "smooth_labels": lambda x, _: (jax.nn.softmax(x), 0.1),
    "make_fenchel_young_loss": lambda x, y: (x, y),
}


def prepare(name: str, mask: str, dtype: str, shape: Shape) -> Work:
    """A mask is one of what is a loss of its own: an element or a row. optax's users select among the losses."""
    args = jax.tree.map(jnp.asarray, ARGUMENTS[name](*(drawn.normal(shape, seed=seed) for seed in range(2))))
    args = tuple(x.astype(dtype) if x.dtype == jnp.float32 else x for x in args)
    ours, peers = (getattr(library.losses, name) for library in (masksafe, optax))
    if name == "make_fenchel_young_loss":
        ours, peers = ours(jax.nn.logsumexp), peers(jax.nn.logsumexp)
    if mask == "none":
        return Work({"masksafe": ours, "optax": peers}, args)
    shape, dimensions = jax.eval_shape(ours, *args).shape, args[0].ndim
    rows_are_whole = len(shape) == dimensions or dimensions > 2
    functions = {
        "masksafe": lambda *args: ours(*args[:-1], where=args[-1]),
        "optax": lambda *args: jnp.where(args[-1].reshape(shape), peers(*args[:-1]), 0),
    }
    return Work(functions, (*args, drawn.bits(shape if rows_are_whole else (*shape, 1), 0.7)))


def shape_of(name: str, size: str) -> Shape:
    return CTC[size] if name.startswith("ctc") else at_most(name, SIZES[size])


def at_most(name: str, shape: Shape) -> Shape:
    """The shape, or as much of it as optax's loss can bear."""
    return tuple(map(min, shape, MOST.get(name, shape)))


OF_CROSS_ENTROPY = cases_of(prepare_cross_entropy, SIZES_OF_CROSS_ENTROPY, grid_of(CROSS_ENTROPIES, MASKS, DTYPES))
CASES = [
    case
    for name in ARGUMENTS
    for size in SIZES
    if (name, size) != ("ntxent", "large")  # it would be the middle one
    for case in cases_of(prepare, {size: shape_of(name, size)}, [(name, "none", "float32", size)])
]
BENCHMARKS = [
    Benchmark("cross_entropy", "Cross-entropy", against("optax", "torch"), eager_too(OF_CROSS_ENTROPY)),
    Benchmark("losses", "All losses", against("optax"), eager_too(CASES, EAGER)),
]
