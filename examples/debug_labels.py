"""Finds the bad labels in a dataset: runs the same training step without checks, with checkify, and with errors.

Two labels of scikit-learn's digits are corrupted: one is 10, although there are ten classes, and one is -1. A third
label is -100, but its sample is masked, so it is harmless.

    python examples/debug_labels.py
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import checkify
from sklearn.datasets import load_digits

import masksafe

CLASSES, BATCH_SIZE = 10, 599
CORRUPTED = {700: 10, 1300: -1, 1500: -100}
IGNORED = -100
OPTIMISER = optax.sgd(0.5)

Params = tuple[jax.Array, jax.Array]
Batch = tuple[np.ndarray, np.ndarray]


def read_batches() -> list[Batch]:
    """Images [samples, 64] in [0, 1] and labels, three of them corrupted."""
    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    labels[list(CORRUPTED)] = list(CORRUPTED.values())
    return [(images[i : i + BATCH_SIZE], labels[i : i + BATCH_SIZE]) for i in range(0, len(labels), BATCH_SIZE)]


def init() -> Params:
    return jnp.zeros((64, CLASSES)), jnp.zeros(CLASSES)


def loss(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
    weights, bias = params
    mask = labels != IGNORED
    losses = masksafe.losses.softmax_cross_entropy_with_integer_labels(images @ weights + bias, labels, where=mask)
    return masksafe.mean(losses, where=mask)


def step(params: Params, images: jax.Array, labels: jax.Array) -> tuple[Params, jax.Array]:
    value, gradient = jax.value_and_grad(loss)(params, images, labels)
    updates, _ = OPTIMISER.update(gradient, OPTIMISER.init(params))
    return optax.apply_updates(params, updates), value


# One pass over the data in each mode; each returns a message for every batch.


def plain(batches: list[Batch]) -> list[str]:
    params, messages, run = init(), [], jax.jit(step)
    for batch in batches:
        params, value = run(params, *batch)
        messages.append(f"loss {value:.3f}")
    return messages


def with_checkify(batches: list[Batch]) -> list[str]:
    params, messages = init(), []
    with masksafe.label_checks("checkify"):
        run = jax.jit(checkify.checkify(step))
        for batch in batches:
            error, (new_params, value) = run(params, *batch)
            messages.append((error.get() or f"loss {value:.3f}").splitlines()[0])
            params = params if error.get() else new_params  # skip a bad batch
    return messages


def with_errors(batches: list[Batch]) -> list[str]:
    params, messages, run = init(), [], jax.jit(step)
    for batch in batches:
        try:
            with masksafe.label_checks("raise"):
                params, value = jax.block_until_ready(run(params, *batch))
            messages.append(f"loss {value:.3f}")
        except jax.errors.JaxRuntimeError as error:  # caught outside the context, which must see it
            messages.append(str(error).strip().splitlines()[-1])
    return messages


WAYS: dict[str, Callable[[list[Batch]], list[str]]] = {
    "plain: a NaN, and from then on only NaN": plain,
    'with label_checks("checkify"): the first bad label of each batch': with_checkify,
    'with label_checks("raise"): the same, as an error': with_errors,
}


def main() -> None:
    batches = read_batches()
    print(f"Corrupted labels: {CORRUPTED}, in batches of {BATCH_SIZE}. Sample 1500 is masked.")
    print("JAX logs a traceback for every error of the last way: they are meant, and the example goes on.", flush=True)
    for title, run in WAYS.items():
        print(f"\n{title}")
        for number, text in enumerate(run(batches)):
            print(f"  batch {number}: {text}")


if __name__ == "__main__":
    main()
