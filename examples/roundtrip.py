"""Trains a small convolutional network on digits, saves and loads it, and checks that its predictions are the same.

Between the convolution and the dense layer two axes are swapped, and the layer norm runs over an axis that is not the
last. In exactly this setting, a fused kernel of another framework once gave different numbers than the plain one, so a
network changed its predictions after it was loaded from disk.

    python examples/roundtrip.py
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.metrics import ConfusionMatrixDisplay, accuracy_score
from sklearn.model_selection import train_test_split

import masksafe

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Params = dict[str, jax.Array]

SIDE, PIXELS, CHANNELS, CLASSES = 8, 64, 16, 10
BATCH_SIZE, LEARNING_RATE = 64, 3e-3


# The data and the network.


def read_digits() -> list[np.ndarray]:
    """Images [samples, 8, 8, 1] in [0, 1] and labels, for training and held out: `x, x_test, y, y_test`."""
    digits = load_digits()
    images = (digits.images[..., None] / 16).astype(np.float32)
    split: list[np.ndarray] = train_test_split(images, digits.target.astype(np.int32), test_size=0.25, random_state=0)
    return split


def init(key: jax.Array) -> Params:
    convolution, dense = jax.random.split(key)
    return {
        "convolution": jax.random.normal(convolution, (3, 3, 1, CHANNELS)) / 3,
        "scale": jnp.ones(PIXELS),
        "bias": jnp.zeros(PIXELS),
        "dense": jax.random.normal(dense, (PIXELS * CHANNELS, CLASSES)) / 32,
        "dense_bias": jnp.zeros(CLASSES),
    }


def logits(params: Params, images: jax.Array) -> jax.Array:
    layout = ("NHWC", "HWIO", "NHWC")
    x = jax.lax.conv_general_dilated(images, params["convolution"], (1, 1), "SAME", dimension_numbers=layout)
    x = x.reshape(-1, PIXELS, CHANNELS)
    x = masksafe.layer_norm(x, params["scale"], params["bias"], axis=1)  # each channel over all pixels
    x = jnp.swapaxes(jax.nn.relu(x), 1, 2)
    return x.reshape(-1, CHANNELS * PIXELS) @ params["dense"] + params["dense_bias"]


def loss_and_logits(params: Params, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    predicted = logits(params, images)
    losses = masksafe.losses.softmax_cross_entropy_with_integer_labels(predicted, labels)
    return masksafe.mean(losses), predicted


def train(images: np.ndarray, labels: np.ndarray, epochs: int, console: Console) -> Params:
    optimiser = optax.adam(LEARNING_RATE)

    @jax.jit
    def step(params: Params, state: optax.OptState, x: jax.Array, y: jax.Array) -> tuple[Params, optax.OptState]:
        gradient, _ = jax.grad(loss_and_logits, has_aux=True)(params, x, y)
        updates, state = optimiser.update(gradient, state)
        return optax.apply_updates(params, updates), state

    params = init(jax.random.key(0))
    state = optimiser.init(params)
    rng = np.random.default_rng(0)
    for _ in track(range(epochs), "training", console=console):
        order = rng.permutation(len(images))
        for batch in np.array_split(order, len(images) // BATCH_SIZE):
            params, state = step(params, state, images[batch], labels[batch])
    return params


# The round trip.


def save_and_load(params: Params, path: Path) -> Params:
    np.savez(path, **params)
    with np.load(path) as saved:
        return {name: jnp.asarray(saved[name]) for name in saved}


def ways_to_predict(labels: np.ndarray) -> dict[str, Callable[[Params, np.ndarray], jax.Array]]:
    def eager(params: Params, images: np.ndarray) -> jax.Array:
        with jax.disable_jit():
            return logits(params, jnp.asarray(images))

    def primal(params: Params, images: np.ndarray) -> jax.Array:
        (_, predicted), _ = jax.jit(jax.value_and_grad(loss_and_logits, has_aux=True))(params, images, labels)
        return predicted

    return {"eager": eager, "jit": jax.jit(logits), "value_and_grad": primal}


def compare(
    saved: Params, loaded: Params, images: np.ndarray, labels: np.ndarray
) -> list[tuple[str, str, float, int, float]]:
    """Rows of parameters, way, largest difference of a logit, differing predictions (from the first row), accuracy."""
    ways = ways_to_predict(labels)
    expected = np.asarray(ways["eager"](saved, images))
    rows = []
    for name, params in (("in memory", saved), ("from disk", loaded)):
        for way, predict in ways.items():
            actual = np.asarray(predict(params, images))
            moved = int((actual.argmax(-1) != expected.argmax(-1)).sum())
            accuracy = float(accuracy_score(labels, actual.argmax(-1)))
            rows.append((name, way, float(np.abs(actual - expected).max()), moved, accuracy))
    return rows


def as_table(rows: list[tuple[str, str, float, int, float]]) -> Table:
    table = Table("parameters", "run by", "largest difference of a logit", "other predictions", "accuracy")
    for name, way, difference, moved, accuracy in rows:
        table.add_row(name, way, f"{difference:.1e}", str(moved), f"{accuracy:.1%}")
    return table


def draw(predicted: np.ndarray, labels: np.ndarray, path: Path) -> None:
    figure, axis = plt.subplots(figsize=(5, 5), layout="constrained")
    ConfusionMatrixDisplay.from_predictions(labels, predicted, ax=axis, cmap="Blues", colorbar=False)
    axis.set(title="Digits held out", xlabel="predicted", ylabel="true")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path("examples/output"), help="default: %(default)s")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)

    console = Console()
    images, test_images, labels, test_labels = read_digits()
    params = train(images, labels, arguments.epochs, console)
    loaded = save_and_load(params, arguments.output / "roundtrip.npz")
    console.print(as_table(compare(params, loaded, test_images, test_labels)))

    masksafe.testing.assert_consistent(logits, loaded, test_images[:32])
    console.print("One answer in every mode of masksafe.testing.assert_consistent, gradients included.")
    picture = arguments.output / "roundtrip.png"
    draw(np.asarray(logits(loaded, test_images)).argmax(-1), test_labels, picture)
    console.print(f"The confusion matrix is in {picture}.")


if __name__ == "__main__":
    main()
