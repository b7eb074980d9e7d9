"""Time and memory of the cross-entropies: value and gradient, against optax, torch and a copy of the logits.

    python examples/benchmarks/cross_entropy.py [--markdown FILE] [--rounds N] [--quick]

Times are medians of alternating runs in one process; only their ratios mean anything on another machine. The
copy of the logits is the floor: a gradient is as large as the logits and has to be written.
"""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from measure import compiled, is_installed, make_parser, measure, show

import masksafe

SHAPES = [(2048, 32768), (16384, 1024), (131072, 128)]
QUICK_SHAPES = [(256, 4096), (4096, 64)]
DTYPES = ["float32", "bfloat16", "float16"]
LOSSES = {
    "integer labels": (
        masksafe.losses.softmax_cross_entropy_with_integer_labels,
        optax.softmax_cross_entropy_with_integer_labels,
    ),
    "one-hot labels": (masksafe.losses.softmax_cross_entropy, optax.softmax_cross_entropy),
}
MASKS = ["no mask", "rows masked", "classes masked"]
HEADER = ["labels", "mask", "dtype", "shape", "copy ms", "masksafe ms", "optax ms", "torch ms"]
HEADER += ["masksafe/optax", "masksafe/copy", "masksafe MiB", "optax MiB"]


def make_data(
    kind: str, mask: str, dtype: str, shape: tuple[int, int]
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    keys = jax.random.split(jax.random.key(0), 3)
    logits = jax.random.normal(keys[0], shape).astype(dtype)
    where = {
        "no mask": None,
        "rows masked": jax.random.bernoulli(keys[2], 0.5, shape[:1]),
        "classes masked": jax.random.bernoulli(keys[2], 0.5, shape).at[:, 0].set(True),
    }[mask]
    labels = jax.random.randint(keys[1], shape[:1], 0, shape[1])
    if mask == "classes masked":
        labels = jnp.where(where[jnp.arange(shape[0]), labels], labels, 0)
    return logits, labels if kind == "integer labels" else jax.nn.one_hot(labels, shape[1], dtype=dtype), where


def value_and_gradient(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    def step(logits: jax.Array, labels: jax.Array, where: jax.Array | None) -> Any:
        return jax.value_and_grad(lambda x: loss(x, labels, where=where).astype(jnp.float32).mean())(logits)

    return step


def torch_step(logits: jax.Array, labels: jax.Array, dtype: str) -> Callable[[], Any]:
    import torch

    x = torch.from_numpy(np.array(logits, np.float32)).to(getattr(torch, dtype)).requires_grad_()
    y = torch.from_numpy(np.array(labels, np.int64 if labels.ndim == 1 else np.float32))
    y = y if labels.ndim == 1 else y.to(x.dtype)

    def run() -> None:
        x.grad = None
        torch.nn.functional.cross_entropy(x, y).backward()

    return run


def measure_case(kind: str, mask: str, dtype: str, shape: tuple[int, int], rounds: int, with_torch: bool) -> list[str]:
    data = make_data(kind, mask, dtype, shape)
    ours, theirs = LOSSES[kind]
    # The number keeps the compiler from returning the input itself.
    candidates = {"copy": compiled(lambda x, *_: x + jnp.ones((), x.dtype), *data)[0]}
    candidates["masksafe"], our_bytes = compiled(value_and_gradient(ours), *data)
    candidates["optax"], their_bytes = compiled(value_and_gradient(theirs), *data)
    if with_torch and mask == "no mask":
        candidates["torch"] = torch_step(data[0], data[1], dtype)
    seconds = measure(candidates, rounds)
    times = [
        f"{1e3 * seconds[name]:.1f}" if name in seconds else "-" for name in ("copy", "masksafe", "optax", "torch")
    ]
    ratios = [f"{seconds['masksafe'] / seconds[name]:.2f}" for name in ("optax", "copy")]
    memory = [f"{size / 2**20:.1f}" for size in (our_bytes, their_bytes)]
    return [kind, mask, dtype, "x".join(map(str, shape)), *times, *ratios, *memory]


def main() -> None:
    parser = make_parser(__doc__, rounds=9)
    parser.add_argument("--quick", action="store_true", help="small arrays, to see that it runs")
    arguments = parser.parse_args()

    with_torch = is_installed("torch")
    rows = []
    for kind in LOSSES:
        for mask in MASKS:
            for dtype in DTYPES:
                for shape in QUICK_SHAPES if arguments.quick else SHAPES:
                    print(f"\033[Kmeasuring {kind}, {mask}, {dtype}, {shape}", end="\r", file=sys.stderr, flush=True)
                    rows.append(measure_case(kind, mask, dtype, shape, arguments.rounds, with_torch))
    show(HEADER, rows, arguments.markdown)
    if not with_torch:
        print("torch is not installed: its column is empty.")


if __name__ == "__main__":
    main()
