"""Gradient accumulation on ragged text, three ways: the whole batch, means of micro-batches, and masksafe's.

A small language model reads lines of Python's own standard library, which have up to 64 characters. A batch of lines is
cut into micro-batches with different numbers of characters; some hold nothing but empty lines. What is minimised is the
mean loss per character of the whole batch.

    python examples/gradient_accumulation.py    # about a minute on two cores

`optax.MultiSteps` averages the gradients of the micro-batches' means, and so does every loop that divides a sum of mean
losses: that is the gradient of another loss, in which a character counts for more in a micro-batch of short lines.
`masksafe.value_and_grad_of_mean` adds totals and counts, and divides once. The same model is trained in all three ways,
on the same batches; the picture shows the losses, and how far each gradient is from that of the whole batch.
"""

import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import shared
from rich.console import Console

import masksafe

Params = dict[str, Any]
LENGTH, WIDTH, HEADS, CHARACTERS = 64, 64, 4, 128
LINES, MICROBATCHES = 32, 8
IGNORED = -100  # the label of padding
WHOLE, MEANS, MASKSAFE = "the whole batch", "optax.MultiSteps on means", "masksafe"


class Batch(NamedTuple):
    """Lines `[lines, length]`: what the model reads, and what follows each character."""

    inputs: np.ndarray
    labels: np.ndarray


def read_lines() -> np.ndarray:
    """The lines of the standard library `[lines, length + 1]`, as ASCII codes with zeros behind; a third are empty."""
    library = Path(sysconfig.get_paths()["stdlib"])
    text = "\n".join(path.read_text("utf8") for path in sorted(library.glob("*.py")))
    lines = [line.strip()[:LENGTH].encode("ascii", "replace") for line in text.splitlines()]
    codes = np.zeros((len(lines), LENGTH + 1), np.int32)
    for row, line in zip(codes, lines, strict=True):
        row[1 : len(line) + 1] = np.frombuffer(line, np.uint8)  # behind a zero, which starts the line
    return codes


def draw_batch(lines: np.ndarray, generator: np.random.Generator) -> Batch:
    rows = lines[generator.integers(len(lines), size=LINES)]
    # As many loaders do it: lines of like length next to each other, to waste less padding. Part i of the batch is
    # every eighth line from i on.
    by_length = rows[np.argsort((rows > 0).sum(axis=1), kind="stable")]
    parts = by_length.reshape(MICROBATCHES, -1, LENGTH + 1).swapaxes(0, 1).reshape(LINES, LENGTH + 1)
    return Batch(parts[:, :-1], np.where(parts[:, 1:] > 0, parts[:, 1:], IGNORED))


# The model: one layer of causal attention.


def make_params(key: jax.Array) -> Params:
    shapes = {
        "embedding": (CHARACTERS, WIDTH),
        "position": (LENGTH, WIDTH),
        "qkv": (WIDTH, 3 * WIDTH),
        "out": (WIDTH, WIDTH),
        "up": (WIDTH, 4 * WIDTH),
        "down": (4 * WIDTH, WIDTH),
    }
    keys = jax.random.split(key, len(shapes))
    return {name: 0.1 * jax.random.normal(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}


def features_of(params: Params, inputs: jax.Array, positions: jax.Array, axis_name: str | None = None) -> jax.Array:
    """Of each character; `axis_name` is the axis of devices that share the characters of a line, if any."""
    x = params["embedding"][inputs] + params["position"][positions]
    heads = (masksafe.rms_norm(x) @ params["qkv"]).reshape(*x.shape[:2], 3 * HEADS, WIDTH // HEADS)
    attended = masksafe.dot_product_attention(*jnp.split(heads, 3, axis=2), is_causal=True, axis_name=axis_name)
    x += attended.reshape(x.shape) @ params["out"]
    x += jax.nn.gelu(masksafe.rms_norm(x) @ params["up"]) @ params["down"]
    return masksafe.rms_norm(x)


def mean_loss(params: Params, inputs: jax.Array, labels: jax.Array) -> masksafe.MaskedMean:
    """The mean loss per character, not yet divided."""
    is_live = labels != IGNORED
    logits = features_of(params, inputs, jnp.arange(LENGTH)) @ params["embedding"].T
    losses = masksafe.losses.softmax_cross_entropy_with_integer_labels(logits, labels, where=is_live)
    return masksafe.MaskedMean.of(losses, is_live)


# The three gradients of a batch.


def of_whole_batch(params: Params, batch: Batch) -> Params:
    return jax.grad(lambda params: mean_loss(params, *batch).value)(params)


def of_means(params: Params, batch: Batch) -> Params:
    """What MultiSteps hands to the optimizer: the average of the gradients of the micro-batches' means."""
    accumulator = optax.MultiSteps(optax.identity(), every_k_schedule=MICROBATCHES)
    parts = jax.tree.map(lambda x: x.reshape(-1, MICROBATCHES, LENGTH).swapaxes(0, 1), batch)

    def step(state: Any, part: Batch) -> tuple[Any, Params]:
        updates, state = accumulator.update(of_whole_batch(params, part), state, params)
        return state, updates

    _, updates = jax.lax.scan(step, accumulator.init(params), parts)
    return jax.tree.map(lambda x: x[-1], updates)


def of_masksafe(params: Params, batch: Batch) -> Params:
    _, gradient = masksafe.value_and_grad_of_mean(mean_loss, microbatches=MICROBATCHES)(params, *batch)
    return gradient


GRADIENTS: dict[str, Callable[[Params, Batch], Params]] = {
    WHOLE: of_whole_batch,
    MEANS: of_means,
    MASKSAFE: of_masksafe,
}


class Record(NamedTuple):
    """Of each step."""

    losses: list[float]  # of the batch, before the step
    distances: list[float]  # of the gradient from that of the whole batch, relative to its length


def train(name: str, lines: np.ndarray, steps: int, console: Console) -> Record:
    optimizer = optax.adam(3e-3)

    @jax.jit
    def step(params: Params, state: Any, batch: Batch) -> tuple[Params, Any, jax.Array, jax.Array]:
        gradient, exact = GRADIENTS[name](params, batch), of_whole_batch(params, batch)
        difference = jax.tree.map(jnp.subtract, gradient, exact)
        updates, state = optimizer.update(gradient, state)
        distance = optax.tree.norm(difference) / optax.tree.norm(exact)
        return optax.apply_updates(params, updates), state, mean_loss(params, *batch).value, distance

    params, generator, record = make_params(jax.random.key(0)), np.random.default_rng(0), Record([], [])
    state = optimizer.init(params)
    with shared.progress(name, steps, console) as advance:
        for _ in range(steps):
            params, state, loss, distance = step(params, state, draw_batch(lines, generator))
            record.losses.append(float(loss))
            record.distances.append(float(distance))
            advance(f"loss {record.losses[-1]:.3f}")
    return record


def draw(records: dict[str, Record], path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    styles = {WHOLE: ("black", "-", 3.0), MEANS: ("firebrick", "-", 1.2), MASKSAFE: ("deepskyblue", "--", 1.6)}
    for name, record in records.items():
        color, line, width = styles[name]
        smooth = shared.smooth(record.losses, len(record.losses) // 30)
        left.plot(*smooth, line, color=color, linewidth=width, label=name)
        if name != WHOLE:
            right.semilogy(record.distances, line, color=color, linewidth=1, label=name)
    left.set(xlabel="step", ylabel="loss per character of the whole batch", title="One loss, two trainings")
    right.set(xlabel="step", ylabel="relative distance", title="From the gradient of the whole batch", ylim=(1e-8, 10))
    left.legend()
    right.legend()
    shared.save(figure, path)


def main() -> None:
    arguments, console, lines = shared.parser_of(__doc__, steps=300).parse_args(), Console(), read_lines()
    records = {name: train(name, lines, arguments.steps, console) for name in GRADIENTS}
    for name, record in records.items():
        loss = np.mean(record.losses[-max(1, arguments.steps // 5) :])
        distance = max(record.distances)
        print(f"{name:26} loss {loss:.3f} at the end; gradient at most {distance:.2g} from that of the whole batch")
    picture = arguments.output / "gradient_accumulation.png"
    draw(records, picture)
    print(f"The losses and the distances are in {picture}.")


if __name__ == "__main__":
    main()
