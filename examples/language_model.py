"""Learns to write the body of a Python function from its signature and docstring, on the standard library's source.

A small decoder in flax with masksafe's attention, norms and loss. Signature and docstring are the prompt: the model
reads them, but only the tokens of the body count in the loss. Several functions are packed into a row, each as a
segment, and the rest of the row is padding. With a vocabulary of 16384 tokens, the logits would usually be by far the
largest array of the training step; masksafe's linear cross-entropy never stores them, and computes nothing for the
tokens of prompts and padding.

    python examples/language_model.py    # about three minutes on two cores

The time and memory of a training step with matmul and optax instead are compared first.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import shared
from bodies import IGNORED, Rows, prepare_data
from flax import nnx
from rich.console import Console

import masksafe


@dataclasses.dataclass(frozen=True)
class Config:
    """The model and its training."""

    vocabulary: int = 16384
    length: int = 512
    batch_size: int = 4
    width: int = 256
    heads: int = 4
    layers: int = 2
    steps: int = 200
    learning_rate: float = 3e-3
    evaluate_every: int = 50
    seed: int = 0


def batches(data: Rows, config: Config) -> Iterator[Rows]:
    rng = np.random.default_rng(config.seed)
    while True:
        yield data[rng.integers(len(data.labels), size=config.batch_size)]


Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # of queries, keys and values


def within(segments: jax.Array) -> Attend:
    """Causal attention within each segment."""
    masks = {"is_causal": True, "query_segment_ids": segments, "key_value_segment_ids": segments}
    return functools.partial(masksafe.dot_product_attention, **masks)


class Layer(nnx.Module):
    """Attention, and a feed-forward network."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        dense = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.heads, width = config.heads, config.width
        self.attention_scale, self.feed_forward_scale = nnx.Param(jnp.ones(width)), nnx.Param(jnp.ones(width))
        self.query_key_value, self.attention_out = dense(width, 3 * width), dense(width, width)
        self.up, self.down = dense(width, 4 * width), dense(4 * width, width)

    def __call__(self, x: jax.Array, attend: Attend) -> jax.Array:
        heads = self.query_key_value(masksafe.rms_norm(x, self.attention_scale[...]))
        query, key, value = jnp.split(heads.reshape(*x.shape[:-1], 3 * self.heads, -1), 3, axis=-2)
        x += self.attention_out(attend(query, key, value).reshape(x.shape))
        return x + self.down(jax.nn.gelu(self.up(masksafe.rms_norm(x, self.feed_forward_scale[...]))))


class Decoder(nnx.Module):
    """From tokens to the features that the output layer gets, with the kernel of that layer."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        small = nnx.initializers.normal(0.02)
        self.embed = nnx.Embed(config.vocabulary, config.width, embedding_init=small, rngs=rngs)
        self.place = nnx.Embed(config.length, config.width, embedding_init=small, rngs=rngs)
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config.layers)])
        self.scale = nnx.Param(jnp.ones(config.width))
        self.kernel = nnx.Param(small(rngs.params(), (config.width, config.vocabulary)))

    def __call__(self, tokens: jax.Array, positions: jax.Array, attends: Iterable[Attend]) -> jax.Array:
        """Takes an attention for each layer."""
        x = self.embed(tokens) + self.place(positions)
        for layer, attend in zip(self.layers, attends, strict=True):
            x = layer(x, attend)
        return masksafe.rms_norm(x, self.scale[...])

    def within_segments(self, batch: Rows) -> jax.Array:
        return self(batch.inputs, batch.positions, [within(batch.segments)] * len(self.layers))


# The losses, of features [batch, length, width], the kernel of the output layer, and labels [batch, length].

Loss = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def masksafe_loss(features: jax.Array, kernel: jax.Array, labels: jax.Array) -> jax.Array:
    return masksafe.losses.linear_softmax_cross_entropy(features, kernel, labels, where=labels != IGNORED)


def optax_loss(features: jax.Array, kernel: jax.Array, labels: jax.Array) -> jax.Array:
    """As it must be written: a valid label for the bad one, a selection after the loss, no division by 0."""
    mask = labels != IGNORED
    losses = optax.softmax_cross_entropy_with_integer_labels(features @ kernel, jnp.where(mask, labels, 0))
    return jnp.where(mask, losses, 0).sum() / jnp.maximum(mask.sum(), 1)


LOSSES: dict[str, Loss] = {"optax": optax_loss, "masksafe": masksafe_loss}


class Trainer:
    """The model, its optimiser, and the compiled functions of both."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.graph, self.params = nnx.split(Decoder(config, nnx.Rngs(config.seed)))
        warmup = min(30, config.steps // 2)
        schedule = optax.warmup_cosine_decay_schedule(0.0, config.learning_rate, warmup, config.steps)
        self.optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
        self.evaluate = jax.jit(functools.partial(self.loss_of, masksafe_loss))

    def initial_state(self) -> shared.State:
        return self.params, self.optimizer.init(self.params)

    def loss_of(self, loss: Loss, params: Any, batch: Rows) -> jax.Array:
        model = nnx.merge(self.graph, params)
        return loss(model.within_segments(batch), model.kernel[...], batch.labels)

    def make_step(self, loss: Loss) -> Callable[[shared.State, Rows], tuple[shared.State, jax.Array]]:
        return shared.make_step(functools.partial(self.loss_of, loss), self.optimizer)


def train(trainer: Trainer, loss: Loss, data: Rows, held_out: Rows, console: Console) -> shared.Record:
    """The scores are held-out losses."""
    config = trainer.config

    def score(params: Any) -> float:
        parts = [held_out[i : i + config.batch_size] for i in range(0, len(held_out.labels), config.batch_size)]
        values, counts = zip(*((float(trainer.evaluate(params, p)), unmasked(p)) for p in parts), strict=True)
        mean = float(np.average(values, weights=counts))
        console.print(f"held-out loss {mean:.4f}")
        return mean

    start, step = trainer.initial_state(), trainer.make_step(loss)
    drawn = batches(data, config)
    return shared.train("training", start, step, drawn, config.steps, console, score, config.evaluate_every)


def unmasked(rows: Rows) -> int:
    return int(np.sum(rows.labels != IGNORED))


def compare(
    trainer: Trainer, data: Rows, rounds: int = 5, losses: Mapping[str, Callable[..., jax.Array]] = LOSSES
) -> dict[str, shared.Cost]:
    """The costs of a step with each loss, from the same state."""
    steps = {name: trainer.make_step(loss) for name, loss in losses.items()}
    return shared.costs_of(steps, (trainer.initial_state(), data[: trainer.config.batch_size]), rounds)


def main() -> None:
    arguments, console = shared.parser_of(__doc__, writes=False, steps=Config.steps).parse_args(), Console()
    config = Config(steps=arguments.steps)
    data, held_out, *_ = prepare_data(config)
    console.print(f"{data.labels.size} tokens; {unmasked(data) / data.labels.size:.0%} of these are not masked")

    trainer = Trainer(config)
    shared.show_costs({"a training step": compare(trainer, data)}, "With each loss", console)
    train(trainer, masksafe_loss, data, held_out, console)


if __name__ == "__main__":
    main()
