"""Time and memory of the losses that have no benchmark of their own against optax's, value and gradient.

    python examples/benchmarks/losses.py [--markdown FILE] [--rounds 7] [--losses ctc,kl]

Times are medians of alternating runs in one process; only their ratios mean anything on another machine.
"""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from measure import compiled, make_parser, measure, show

import masksafe

HEADER = ["loss", "masksafe ms", "optax ms", "masksafe/optax", "masksafe MiB", "optax MiB"]
ROWS, CLASSES = 8192, 1024


def inputs() -> dict[str, tuple[Any, ...]]:
    """The arguments of each loss, of which the first is differentiated."""
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.normal(size=(ROWS, CLASSES)), jnp.float32) for _ in range(2))
    p, bits = jax.nn.softmax(y), (y > 0).astype(jnp.float32)
    labels = jnp.asarray(rng.integers(CLASSES, size=ROWS))
    frames = jnp.asarray(np.arange(256) >= rng.integers(128, 256, 16)[:, None], jnp.float32)
    words = jnp.asarray(np.arange(48) >= rng.integers(16, 48, 16)[:, None], jnp.float32)
    ctc = jnp.asarray(rng.normal(size=(16, 256, 128)), jnp.float32), frames, labels[: 16 * 48].reshape(16, 48) % 127 + 1
    pixels, truth = x.reshape(8, -1, 8), jax.nn.one_hot(jnp.argmax(y.reshape(8, -1, 8), -1), 8)
    two = dict.fromkeys(("squared_error", "huber_loss", "log_cosh", "cosine_similarity"), (x, y))
    binary = dict.fromkeys(("sigmoid_binary_cross_entropy", "sigmoid_focal_loss"), (x, bits))
    signs = dict.fromkeys(("hinge_loss", "perceptron_loss"), (x, 2 * bits - 1))
    of_labels = dict.fromkeys(("multiclass_hinge_loss", "multiclass_perceptron_loss"), (x, labels))
    of_labels["multiclass_sparsemax_loss"] = (x[:1024], labels[:1024])
    soft = dict.fromkeys(("poly_loss_cross_entropy", "ranking_softmax_loss"), (x, p))
    divergences = dict.fromkeys(("kl_divergence", "generalized_kl_divergence"), (jax.nn.log_softmax(x), p))
    divergences["kl_divergence_with_log_targets"] = (jax.nn.log_softmax(x), jnp.log(p))
    dice = dict.fromkeys(("dice_loss", "multiclass_generalized_dice_loss"), (pixels, truth))
    others = {
        "sparsemax_loss": (x, bits.astype(jnp.int32)),
        "ctc_loss": (*ctc, words),
        "smooth_labels": (p, 0.1),
        "ntxent": (x[:512, :128], labels[:512] % 64),
        "triplet_margin_loss": (x, y, p),
    }
    return two | binary | signs | of_labels | soft | divergences | dice | others


def measure_loss(name: str, args: tuple[Any, ...], rounds: int) -> list[str]:
    def step(library: Any) -> Callable[..., Any]:
        loss = getattr(library.losses, name)
        return jax.value_and_grad(lambda *args: jnp.sum(loss(*args)))

    candidates, memory = {}, {}
    for library in (masksafe, optax):
        candidates[library.__name__], memory[library.__name__] = compiled(step(library), *args)
    seconds = measure(candidates, rounds)
    ours, theirs = seconds["masksafe"], seconds["optax"]
    times = [f"{1e3 * ours:.1f}", f"{1e3 * theirs:.1f}", f"{ours / theirs:.2f}"]
    return [name, *times, *(f"{n / 2**20:.0f}" for n in memory.values())]


def main() -> None:
    parser = make_parser(__doc__, rounds=7)
    parser.add_argument("--losses", default="", help="parts of the names of those to measure; default: all")
    arguments = parser.parse_args()
    rows = []
    for name, args in inputs().items():
        if any(part in name for part in arguments.losses.split(",")):
            print(f"\033[K{name}", end="\r", file=sys.stderr, flush=True)
            rows.append(measure_loss(name, args, arguments.rounds))
    show(HEADER, rows, arguments.markdown)


if __name__ == "__main__":
    main()
