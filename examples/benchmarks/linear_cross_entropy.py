"""The cross-entropy of a linear layer against all logits and optax, torch or tokamax: the mean over unmasked tokens.

    python examples/benchmarks/linear_cross_entropy.py [--quick] [--rounds N] [--plot-only]

The gradients are those of features and kernel. Each peer takes the fastest of its forms for a CPU. torch's
`linear_cross_entropy` computes all logits: with `LinearCrossEntropyOptions`, in chunks, a gradient takes it 1.9 to 6
times as long. tokamax has chunks of its own ("chunked_xla") where they are faster than its "xla"; it has no mask.
"""

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
from command import main
from measure import Benchmark, Case, Work, by_x, random_bits, random_labels, random_normal

import masksafe

SIZES = {  # tokens, width, classes
    "tiny": (64, 16, 100),
    "middle": (512, 256, 4096),
    "large": (1024, 256, 16384),
    "vocabulary": (512, 256, 131072),
}
UNMASKED = {"none": 1.0, "60 % of tokens": 0.4, "95 % of tokens": 0.05}
MASKS_OF = {  # the large ones take their time
    "float32": dict.fromkeys(("tiny", "middle", "large"), tuple(UNMASKED)) | {"vocabulary": ("none", "95 % of tokens")},
    "bfloat16": {"middle": tuple(UNMASKED), "large": ("none",)},
}
IGNORED = -100
FEW_CLASSES = 4096  # up to which tokamax's chunks take longer than all logits


def of_masksafe(features: jax.Array, kernel: jax.Array, labels: jax.Array, mask: jax.Array) -> jax.Array:
    return masksafe.losses.linear_softmax_cross_entropy(features, kernel, labels, where=mask)


def of_optax(features: jax.Array, kernel: jax.Array, labels: jax.Array, mask: jax.Array) -> jax.Array:
    import optax

    logits = jnp.matmul(features, kernel).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.sum(jnp.where(mask, losses, 0)) / jnp.maximum(jnp.sum(mask), 1)


def of_tokamax(features: jax.Array, kernel: jax.Array, labels: jax.Array, mask: jax.Array) -> jax.Array:
    import tokamax
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # or tokamax would take this program's options for its own
    has_chunks = sys.version_info >= (3, 12)  # the newest tokamax for Python 3.11 has none
    implementation: Any = "chunked_xla" if has_chunks and kernel.shape[1] > FEW_CLASSES else "xla"
    loss = tokamax.linear_softmax_cross_entropy_loss(
        features, labels, kernel, reduction="mean", implementation=implementation
    )
    return loss.astype(jnp.float32)


def of_torch(features: Any, kernel: Any, labels: Any) -> Any:
    import torch

    return torch.nn.functional.linear_cross_entropy(features, kernel.T, labels, ignore_index=IGNORED)


def prepare(mask: str, dtype: str, sizes: tuple[int, int, int]) -> Work:
    tokens, width, classes = sizes
    features = random_normal((tokens, width), dtype)
    kernel = random_normal((width, classes), dtype, 1) / width**0.5
    labels, where = random_labels((tokens,), classes), random_bits((tokens,), UNMASKED[mask])
    functions = {"masksafe": of_masksafe, "optax": of_optax, "torch": of_torch}
    functions |= {"tokamax": of_tokamax} if mask == "none" else {}
    torch_args = features, kernel, jnp.where(where, labels, IGNORED)
    return Work(functions, (features, kernel, labels, where), leaves=2, torch_args=torch_args)


CASES = [
    Case("linear", mask, dtype, size, by_x(SIZES[size]), functools.partial(prepare, mask, dtype, SIZES[size]))
    for dtype, masks_of in MASKS_OF.items()
    for size, masks in masks_of.items()
    for mask in masks
]
PEERS = ("optax", "torch", "tokamax")
BENCHMARK = Benchmark(
    "linear_cross_entropy", "Cross-entropy of a linear layer", tuple(("masksafe", peer) for peer in PEERS), CASES
)

if __name__ == "__main__":
    main([BENCHMARK])
