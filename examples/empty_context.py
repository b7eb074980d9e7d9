"""Attention to an empty context, one that holds only padding: jax.nn and masksafe side by side.

Three samples attend to contexts of 6, 3 and 0 words; the rest of each context is padding, which is masked. Changing the
content of the padding must change nothing.

    python examples/empty_context.py

It prints how far the outputs and the gradients move, and draws the attention weights of both libraries.
"""

import math
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import shared

import masksafe

KEYS, WIDTH = 6, 8
LENGTHS = jnp.array([6, 3, 0])
LIBRARIES = {"jax.nn": jax.nn.dot_product_attention, "masksafe": masksafe.dot_product_attention}

Attention = Callable[..., jax.Array]


def make_inputs(padding: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [samples, queries, 1, width], keys and values whose padding holds the given number."""
    query, key, value = jax.random.normal(jax.random.key(0), (3, len(LENGTHS), KEYS, 1, WIDTH))
    is_padding = ~masksafe.length_mask(LENGTHS, KEYS)[..., None, None]
    return query, jnp.where(is_padding, padding, key), jnp.where(is_padding, padding, value)


def attend(attention: Attention, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return attention(query, key, value, key_value_seq_lengths=LENGTHS)


def gradients(attention: Attention, *inputs: jax.Array) -> tuple[jax.Array, ...]:
    return jax.grad(lambda *inputs: jnp.sum(attend(attention, *inputs) ** 2), argnums=(0, 1, 2))(*inputs)


def largest_move(attention: Attention, padding: float) -> tuple[list[float], float]:
    """How far each sample's output moves when its padding changes from 0, and the largest gradient of the padding."""
    before, after = make_inputs(0.0), make_inputs(padding)
    moved = jnp.abs(attend(attention, *after) - attend(attention, *before)).max(axis=(1, 2, 3))
    padding_gradients = jnp.stack(gradients(attention, *after)[1:])[:, ~masksafe.length_mask(LENGTHS, KEYS)]
    return moved.tolist(), float(jnp.abs(padding_gradients).max())


def weights(attention: Attention) -> jax.Array:
    """The attention weights [samples, queries, keys]: the outputs if the values are unit vectors."""
    query, key, _ = make_inputs(0.0)
    units = jnp.broadcast_to(jnp.eye(KEYS, WIDTH)[:, None], key.shape)
    return attend(attention, query, key, units)[:, :, 0, :KEYS]


def is_right(sample: jax.Array, length: int) -> bool:
    """Whether the weights [queries, keys] are 0 on the padding, and sum to 1 if there is a word to attend to."""
    return bool(jnp.all(sample[:, length:] == 0) & jnp.allclose(sample.sum(1), length > 0))


def draw(path: Path) -> None:
    figure, axes = plt.subplots(len(LIBRARIES), len(LENGTHS), figsize=(7.5, 5.2), layout="constrained", sharey=True)
    figure.suptitle("Without a word to attend to, jax.nn averages the padding; masksafe gives 0", fontweight="bold")
    for row, (name, attention) in zip(axes, LIBRARIES.items(), strict=True):
        for axis, length, sample in zip(row, LENGTHS.tolist(), weights(attention), strict=True):
            image = axis.imshow(sample, vmin=0, vmax=1, cmap="Blues")
            axis.axvspan(length - 0.5, KEYS - 0.5, fill=False, hatch="///", edgecolor="lightgrey", linewidth=0)
            axis.set(xticks=range(KEYS), yticks=range(KEYS))
            axis.set_title(f"{name}: {length} words", fontsize=10)
            if not is_right(sample, length):
                axis.set_title(f"{name}: {length} words, wrong", fontsize=10, color="firebrick")
                axis.spines[:].set(edgecolor="firebrick", linewidth=3)
        row[0].set_ylabel("query")
    for axis in axes[-1]:
        axis.set_xlabel("key (hatched: padding)")
    figure.get_layout_engine().set(h_pad=0.08)
    figure.colorbar(image, ax=axes, label="attention weight")
    shared.save(figure, path)


def main() -> None:
    arguments = shared.parser_of(__doc__).parse_args()
    for padding in (1.0, 100.0, float("nan")):
        print(f"The padding holds {'NaN' if math.isnan(padding) else padding} in place of 0.")
        for name, attention in LIBRARIES.items():
            moved, gradient = largest_move(attention, padding)
            by_sample = ", ".join(f"{m:.3g}" for m in moved)
            report = f"outputs move by {by_sample}; largest gradient of the padding: {gradient:.3g}"
            print(f"  {name:8}  {report.replace('nan', 'NaN')}")
    picture = arguments.output / "empty_context.png"
    draw(picture)
    print(f"The attention weights are in {picture}: without a word, jax.nn attends to all of the padding alike.")


if __name__ == "__main__":
    main()
