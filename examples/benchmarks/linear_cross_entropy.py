"""Time and memory of the cross-entropy of a linear layer, with its gradients, against optax, torch and tokamax.

    python examples/benchmarks/linear_cross_entropy.py [--markdown FILE] [--plot FILE] [--vocabularies 16384] [...]

Some of the tokens are unmasked; the loss is the mean over them, the gradients are those of features and kernel. The
peers compute all logits (optax behind a matmul) and mask the losses; tokamax, here with its XLA implementation, has
no mask. Times are medians of alternating runs in one process; only their ratios mean anything on another machine. A
vocabulary of 131072 takes the peers 4 GiB and half a minute a run.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from measure import compiled, is_installed, make_parser, measure, show

import masksafe

CANDIDATES = ["masksafe", "optax", "torch", "tokamax"]
OPTIONAL = CANDIDATES[2:]
IN_JAX = ["masksafe", "optax", "tokamax"]
HEADER = ["D", "V", "dtype", "unmasked", *(f"{name} ms" for name in CANDIDATES)]
HEADER += [*(f"masksafe/{peer}" for peer in CANDIDATES[1:]), *(f"{name} MiB" for name in IN_JAX), "logits MiB"]

Args = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def ours(features: jax.Array, kernel: jax.Array, labels: jax.Array, mask: jax.Array) -> jax.Array:
    return masksafe.losses.linear_softmax_cross_entropy(features, kernel, labels, where=mask)


def with_optax(features: jax.Array, kernel: jax.Array, labels: jax.Array, mask: jax.Array) -> jax.Array:
    logits = jnp.matmul(features, kernel).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.sum(jnp.where(mask, losses, 0)) / jnp.maximum(jnp.sum(mask), 1)


def with_torch(features: jax.Array, kernel: jax.Array, labels: jax.Array, mask: jax.Array) -> Callable[[], Any]:
    import torch

    def converted(x: jax.Array) -> Any:
        tensor = torch.from_numpy(np.array(x, np.float32)).to(getattr(torch, str(x.dtype)))
        return tensor.requires_grad_(True)

    f, w = converted(features), converted(kernel)
    y = torch.from_numpy(np.where(mask, labels, -100).astype(np.int64))

    def run() -> None:
        loss = torch.nn.functional.cross_entropy((f @ w).float(), y, ignore_index=-100)
        torch.autograd.grad(loss, (f, w))

    return run


def with_tokamax(features: jax.Array, kernel: jax.Array, labels: jax.Array, mask: jax.Array) -> jax.Array:
    """All tokens count: it has no mask."""
    import tokamax
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # or tokamax would take this program's options for its own
    loss = tokamax.linear_softmax_cross_entropy_loss(features, labels, kernel, reduction="mean", implementation="xla")
    return loss.astype(jnp.float32)


def inputs(tokens: int, width: int, vocabulary: int, dtype: str, fraction: float) -> Args:
    keys = jax.random.split(jax.random.key(0), 3)
    features = jax.random.normal(keys[0], (tokens, width)).astype(dtype)
    kernel = (jax.random.normal(keys[1], (width, vocabulary)) / width**0.5).astype(dtype)
    labels = jax.random.randint(keys[2], (tokens,), 0, vocabulary)
    mask = np.random.default_rng(0).permutation(tokens) < round(fraction * tokens)
    return features, kernel, labels, jnp.asarray(mask)


def measure_case(tokens: int, width: int, vocabulary: int, dtype: str, fraction: float, rounds: int) -> dict[str, Any]:
    args = inputs(tokens, width, vocabulary, dtype, fraction)
    candidates, memory = {}, {}
    losses = {"masksafe": ours, "optax": with_optax} | ({"tokamax": with_tokamax} if is_installed("tokamax") else {})
    for name, loss in losses.items():
        candidates[name], memory[name] = compiled(jax.value_and_grad(loss, (0, 1)), *args)
    if is_installed("torch"):
        candidates["torch"] = with_torch(*args)
    seconds = measure(candidates, rounds)
    case = {"D": width, "V": vocabulary, "dtype": dtype, "unmasked": fraction, "seconds": seconds}
    return case | {"memory": memory, "logits": 4 * tokens * vocabulary}


def as_row(case: dict[str, Any]) -> list[str]:
    seconds, memory = case["seconds"], case["memory"]
    row = [str(case["D"]), str(case["V"]), case["dtype"], f"{case['unmasked']:.0%}"]
    row += [f"{1e3 * seconds[name]:.0f}" if name in seconds else "-" for name in CANDIDATES]
    row += [f"{seconds['masksafe'] / seconds[p]:.2f}" if p in seconds else "-" for p in CANDIDATES[1:]]
    row += [f"{memory[name] / 2**20:.0f}" if name in memory else "-" for name in IN_JAX]
    return [*row, f"{case['logits'] / 2**20:.0f}"]


def plot(cases: list[dict[str, Any]], path: Path) -> None:
    """Time over the unmasked fraction, one panel for each size."""
    sizes = list(dict.fromkeys((case["D"], case["V"], case["dtype"]) for case in cases))
    figure, axes = plt.subplots(1, len(sizes), figsize=(4 * len(sizes), 3.5), squeeze=False, layout="constrained")
    for ax, size in zip(axes[0], sizes, strict=True):
        chosen = [case for case in cases if (case["D"], case["V"], case["dtype"]) == size]
        for name in chosen[0]["seconds"]:
            points = sorted((100 * case["unmasked"], case["seconds"][name]) for case in chosen)
            ax.plot(*zip(*points, strict=True), marker="o", label=name)
        ax.set(title="D {}, V {}, {}".format(*size), xlabel="unmasked tokens (%)", ylabel="seconds", ylim=0)
        ax.grid(alpha=0.3)
    axes[0, 0].legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = make_parser(__doc__, rounds=3)
    parser.add_argument("--plot", type=Path, help="draw time over the unmasked fraction to this PNG")
    parser.add_argument("--tokens", type=int, default=4096, help="default: %(default)s")
    parser.add_argument("--widths", default="256,1024", help="default: %(default)s")
    parser.add_argument("--vocabularies", default="16384,131072", help="default: %(default)s")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="default: %(default)s")
    parser.add_argument("--fractions", default="1,0.5,0.4,0.25,0.05", help="default: %(default)s")
    arguments = parser.parse_args()

    split = lambda text, as_type: [as_type(part) for part in text.split(",")]  # noqa: E731
    cases = []
    for vocabulary in split(arguments.vocabularies, int):
        for width in split(arguments.widths, int):
            for dtype in split(arguments.dtypes, str):
                for fraction in split(arguments.fractions, float):
                    print(
                        f"\033[K{width}, {vocabulary}, {dtype}, {fraction:.0%}", end="\r", file=sys.stderr, flush=True
                    )
                    size = arguments.tokens, width, vocabulary, dtype, fraction
                    cases.append(measure_case(*size, arguments.rounds))
    show(HEADER, [as_row(case) for case in cases], arguments.markdown)
    for peer in OPTIONAL:
        if not is_installed(peer):
            print(f"{peer} is not installed: its columns are empty.")
    if arguments.plot:
        plot(cases, arguments.plot)


if __name__ == "__main__":
    main()
