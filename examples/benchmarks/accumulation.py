"""Gradient accumulation: masksafe's exact mean against optax.MultiSteps, which averages means, and the whole batch.

    python examples/benchmarks/accumulation.py [--quick] [--rounds N] [--plot-only]

The model is that of `examples/gradient_accumulation.py`. What is timed is the gradient of a batch of ragged lines; the
temporary memory of the whole batch at once is what accumulation saves.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import gradient_accumulation as example
import jax
import numpy as np
from command import main
from measure import VALUE, Benchmark, Case, Work, by_x

SIZES = {"tiny": 8, "large": 256}  # lines


def loss_of(gradient: Callable[..., example.Params]) -> Callable[..., jax.Array]:
    """The length of the gradient, since a benchmark's function returns one array."""
    import optax

    return lambda *args: optax.tree.norm(gradient(args[0], example.Batch(*args[1:])))


def prepare(lines: int) -> Work:
    every = np.resize(example.read_lines(), (lines, example.LENGTH + 1))
    labels = np.where(every[:, 1:] > 0, every[:, 1:], example.IGNORED)
    args = example.make_params(jax.random.key(0)), every[:, :-1], labels
    functions = {
        "masksafe": loss_of(example.of_masksafe),
        "optax": loss_of(example.of_means),
        "at once": loss_of(example.of_whole_batch),
    }
    return Work(functions, args)


CASES = [
    Case("gradient", "ragged", "float32", size, by_x((lines, 64)), functools.partial(prepare, lines), passes=(VALUE,))
    for size, lines in SIZES.items()
]
BENCHMARK = Benchmark("accumulation", "Gradient accumulation", (("masksafe", "optax"), ("masksafe", "at once")), CASES)

if __name__ == "__main__":
    main([BENCHMARK])
