"""What checking labels costs: the time of a training step in each mode, against no checks.

    python examples/benchmarks/label_checks.py [--markdown FILE] [--rounds N] [--quick]

The step is that of a network with one hidden layer over a vocabulary; its loss alone is measured too, which is the
worst case for "raise". The block is a small Transformer block in which nearly everything is one of masksafe's ops, the
worst case for "checkify": there they are differentiated by JAX's own rules, as in `masksafe.forward_mode`, which is
measured alongside. Times are medians of alternating runs in one process; only their ratios mean anything on another
machine.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import checkify
from measure import make_parser, measure, show

import masksafe

TOKENS, WIDTH, CLASSES = 4096, 256, 4096
BATCH, TIME, HEADS, BLOCK_WIDTH, BLOCK_CLASSES = 16, 64, 4, 64, 256
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


def block_loss(params: dict[str, jax.Array], x: jax.Array, labels: jax.Array, where: jax.Array) -> jax.Array:
    heads = (*x.shape[:2], HEADS, -1)
    q, k, v = ((masksafe.layer_norm(x) @ params[name]).reshape(heads) for name in ("query", "key", "value"))
    attended = masksafe.dot_product_attention(q, k, v, mask=where[:, None, None], is_causal=True)
    x += attended.reshape(x.shape) @ params["out"]
    x += jax.nn.relu(masksafe.layer_norm(x) @ params["up"]) @ params["down"]
    return loss(masksafe.layer_norm(x) @ params["vocabulary"], labels, where)


def in_mode(mode: str, fn: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    step = jax.value_and_grad(fn)
    jitted = jax.jit(checkify.checkify(step) if mode == "checkify" else step)

    def run() -> None:
        with masksafe.forward_mode() if mode == "forward" else masksafe.label_checks(mode):
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
    return measure_modes(what, mask, ("off", "checkify", "raise"), rounds, *arguments)


def measure_block(rounds: int, *, quick: bool) -> list[list[str]]:
    batch, time = (2, 8) if quick else (BATCH, TIME)
    keys = iter(jax.random.split(jax.random.key(0), 12))
    shapes = dict.fromkeys(("query", "key", "value", "out"), (BLOCK_WIDTH, BLOCK_WIDTH))
    shapes |= {"up": (BLOCK_WIDTH, 4 * BLOCK_WIDTH), "down": (4 * BLOCK_WIDTH, BLOCK_WIDTH)}
    shapes["vocabulary"] = BLOCK_WIDTH, BLOCK_CLASSES
    params = {name: 0.1 * jax.random.normal(next(keys), shape) for name, shape in shapes.items()}
    x = jax.random.normal(next(keys), (batch, time, BLOCK_WIDTH))
    labels = jax.random.randint(next(keys), (batch, time), 0, BLOCK_CLASSES)
    where = jax.random.bernoulli(next(keys), 0.8, (batch, time))
    return measure_modes(
        "block", "rows", ("off", "forward", "checkify", "raise"), rounds, block_loss, params, x, labels, where
    )


def measure_modes(
    what: str, mask: str, modes: tuple[str, ...], rounds: int, fn: Callable[..., Any], *args: Any
) -> list[list[str]]:
    candidates = {mode: in_mode(mode, fn, *args) for mode in modes}
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
    rows += measure_block(arguments.rounds, quick=arguments.quick)
    show(HEADER, rows, arguments.markdown)


if __name__ == "__main__":
    main()
