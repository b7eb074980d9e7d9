"""What checking labels costs: the time of a training step in each mode, against no checks.

    python examples/benchmarks/label_checks.py [--markdown FILE] [--rounds N] [--quick]

The step is that of a network with one hidden layer over a vocabulary; its loss alone is measured too, which is the
worst case. Times are medians of alternating runs in one process; only their ratios mean anything on another machine.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import checkify
from measure import make_parser, measure, show

import masksafe

TOKENS, WIDTH, CLASSES = 4096, 256, 4096
QUICK = 64, 8, 16
HEADER = ["what", "mask", "mode", "ms", "time / off"]


def loss(logits: jax.Array, labels: jax.Array, where: jax.Array | None) -> jax.Array:
    losses = masksafe.losses.softmax_cross_entropy_with_integer_labels(logits, labels, where=where)
    return masksafe.mean(losses)


def network_loss(
    params: tuple[jax.Array, jax.Array], x: jax.Array, labels: jax.Array, where: jax.Array | None
) -> jax.Array:
    hidden, out = params
    return loss(jax.nn.relu(x @ hidden) @ out, labels, where)


def in_mode(mode: str, fn: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    step = jax.value_and_grad(fn)
    jitted = jax.jit(checkify.checkify(step) if mode == "checkify" else step)

    def run() -> None:
        with masksafe.label_checks(mode):
            jax.block_until_ready(jitted(*args))

    return run


def measure_case(what: str, mask: str, sizes: tuple[int, int, int], rounds: int) -> list[list[str]]:
    tokens, width, classes = sizes
    keys = jax.random.split(jax.random.key(0), 5)
    labels = jax.random.randint(keys[0], (tokens,), 0, classes)
    where = {
        "none": None,
        "rows": jax.random.bernoulli(keys[1], 0.5, (tokens,)),
        "classes": jax.random.bernoulli(keys[1], 0.9, (tokens, classes)) | (labels[:, None] == jnp.arange(classes)),
    }[mask]
    if what == "loss":
        arguments = loss, jax.random.normal(keys[2], (tokens, classes)), labels, where
    else:
        params = jax.random.normal(keys[2], (width, width)), jax.random.normal(keys[3], (width, classes))
        arguments = network_loss, params, jax.random.normal(keys[4], (tokens, width)), labels, where
    candidates = {mode: in_mode(mode, *arguments) for mode in ("off", "checkify", "raise")}
    for run in candidates.values():
        run()  # compiles
    seconds = measure(candidates, rounds)
    return [[what, mask, mode, f"{1e3 * t:.1f}", f"{t / seconds['off']:.2f}"] for mode, t in seconds.items()]


def main() -> None:
    parser = make_parser(__doc__, rounds=9)
    parser.add_argument("--quick", action="store_true", help="small arrays, to see that it runs")
    arguments = parser.parse_args()
    sizes = QUICK if arguments.quick else (TOKENS, WIDTH, CLASSES)
    rows = []
    for what in ("loss", "step"):
        for mask in ("none", "rows", "classes"):
            rows += measure_case(what, mask, sizes, arguments.rounds)
    show(HEADER, rows, arguments.markdown)


if __name__ == "__main__":
    main()
