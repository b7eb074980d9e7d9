"""Attention over a padded batch of graphs: with masksafe's segment ops, and with the usual formulas.

Each town on a map has a radio station, which is red or blue, and links to the towns next to it. It listens to the
neighbour whose signal arrives strongest: the power of the sender, less what is lost on the way. Of a whole map only the
share of towns that hear red is told. A network with a layer of graph attention learns it, and has to find out by itself
whom each town listens to.

    python examples/graph_attention.py    # less than half a minute on two cores

As many maps as fit make one padded graph of fixed sizes. The padding is known by its ids, which are out of range. It
holds zeros, or whatever the memory held: with masksafe that changes no bit of a run. The usual formulas compute from
the padding, and leave it out of sums. The gradient of their first step is NaN, for 0 * NaN is NaN; with zeros too, of
which the model takes the logarithm. They train if the padding is a graph of its own, with numbers that do no harm.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import maps
import matplotlib.pyplot as plt
import numpy as np
import optax
import shared
from maps import GARBAGE, GRAPHS, HARMLESS, NODES, ZEROS, Batch, Graph, draw_batch, draw_graph, fill, make_batch
from rich.console import Console

import masksafe

WIDTH = 16

Params = dict[str, jax.Array]


# The segment ops, twice.


class Ops(NamedTuple):
    """Functions of data, ids and the number of segments."""

    sum: Callable[..., jax.Array]
    mean: Callable[..., jax.Array]
    softmax: Callable[..., jax.Array]
    standardize: Callable[..., jax.Array]


def usual_mean(data: jax.Array, ids: jax.Array, number: int) -> jax.Array:
    count = jax.ops.segment_sum(jnp.ones_like(data), ids, number)
    return jax.ops.segment_sum(data, ids, number) / jnp.maximum(count, 1)


def usual_softmax(data: jax.Array, ids: jax.Array, number: int) -> jax.Array:
    """As jraph has it."""
    exps = jnp.exp(data - jax.ops.segment_max(data, ids, number)[ids])
    return exps / jax.ops.segment_sum(exps, ids, number)[ids]


def usual_standardize(data: jax.Array, ids: jax.Array, number: int) -> jax.Array:
    deviations = data - usual_mean(data, ids, number)[ids]
    return deviations * jax.lax.rsqrt(usual_mean(deviations**2, ids, number)[ids] + 1e-5)


MASKSAFE, USUAL = "masksafe", "usual formulas"
OPS = {
    MASKSAFE: Ops(masksafe.segment_sum, masksafe.segment_mean, masksafe.segment_softmax, masksafe.segment_standardize),
    USUAL: Ops(jax.ops.segment_sum, usual_mean, usual_softmax, usual_standardize),
}


# The model.


def make_params(key: jax.Array) -> Params:
    shapes = {
        "station": (2, WIDTH),
        "power": (WIDTH,),
        "distance": (),
        "sender": (WIDTH,),
        "receiver": (WIDTH,),
        "message": (WIDTH, WIDTH),
        "hidden": (2 * WIDTH, WIDTH),
        "share": (WIDTH,),
    }
    keys = jax.random.split(key, len(shapes))
    return {name: 0.3 * jax.random.normal(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}


def apply_model(params: Params, batch: Batch, ops: Ops) -> tuple[jax.Array, jax.Array]:
    """The shares of the graphs, and the attention weights of the edges."""
    power = ops.standardize(batch.power, batch.graph_of_node, GRAPHS)
    distance = ops.standardize(jnp.log(batch.distance), batch.graph_of_edge, GRAPHS)
    x = params["station"][batch.station] + power[:, None] * params["power"]
    logits = (x @ params["sender"])[batch.senders] + (x @ params["receiver"])[batch.receivers]
    logits = jax.nn.leaky_relu(logits + distance * params["distance"], 0.2)
    attention = ops.softmax(logits, batch.receivers, NODES)
    messages = attention[:, None] * (x @ params["message"])[batch.senders]
    heard = ops.sum(messages, batch.receivers, NODES)
    hidden = jax.nn.gelu(jnp.concatenate([x, heard], axis=1) @ params["hidden"])
    return ops.mean(hidden, batch.graph_of_node, GRAPHS) @ params["share"], attention


def loss_of(params: Params, batch: Batch, ops: Ops) -> jax.Array:
    """The mean squared error of the graphs that there are, by masksafe for all: what is compared are segment ops."""
    errors = masksafe.losses.squared_error(apply_model(params, batch, ops)[0], batch.share, where=batch.has_graph)
    return masksafe.mean(errors, where=batch.has_graph)


# Training.

CLEAN, POLLUTED = "masksafe, zeros", "masksafe, garbage"
RUNS = {
    CLEAN: (MASKSAFE, ZEROS),
    POLLUTED: (MASKSAFE, GARBAGE),
    "usual formulas, harmless padding": (USUAL, HARMLESS),
    "usual formulas, zeros": (USUAL, ZEROS),
    "usual formulas, garbage": (USUAL, GARBAGE),
}
optimizer = optax.adam(0.02)
STEPS = {name: shared.make_step(functools.partial(loss_of, ops=ops), optimizer) for name, ops in OPS.items()}


def train(name: str, batches: list[Batch], console: Console) -> shared.Record:
    ops, padding = RUNS[name]
    params, generator = make_params(jax.random.key(0)), np.random.default_rng(1)
    filled = (fill(batch, padding, generator) for batch in batches)
    return shared.train(name, (params, optimizer.init(params)), STEPS[ops], filled, len(batches), console)


@jax.jit
def masksafe_attention(params: Params, batch: Batch) -> jax.Array:
    return apply_model(params, batch, OPS[MASKSAFE])[1]


def attention_of(params: Params, graph: Graph) -> np.ndarray:
    return np.asarray(masksafe_attention(params, make_batch([graph])))[: len(graph.senders)]


# The picture.


def draw(records: dict[str, shared.Record], graph: Graph, weights: np.ndarray, path: Path) -> None:
    with plt.rc_context({"font.size": 12}):
        figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.8), width_ratios=(5, 4), layout="constrained")
        draw_losses(left, records)
        maps.draw(right, graph, weights)
        shared.save(figure, path)


def draw_losses(axis: Any, records: dict[str, shared.Record]) -> None:
    colors, sizes = ("deepskyblue", "midnightblue", "orange", "orange", "firebrick"), (7, 3.5, 1.2, 16, 9)
    window = max(1, max(len(record.losses) for record in records.values()) // 20)
    for (name, record), color, size in zip(records.items(), colors, sizes, strict=True):
        steps, losses = (len(record.losses),), record.losses[:1]  # of a run that ends at its first NaN
        if not record.has_ended:
            steps, losses = shared.smooth(record.losses, window)
        shared.draw_run(axis, name, steps, losses, has_ended=record.has_ended, color=color, size=size)
    axis.set(xlabel="step", ylabel="mean squared error", title="Loss, by what the padding holds", yscale="log")
    axis.legend(fontsize=11)


def main() -> None:
    arguments, console = shared.parser_of(__doc__, steps=400).parse_args(), Console(soft_wrap=True)
    generator = np.random.default_rng(0)
    batches = [draw_batch(generator) for _ in range(arguments.steps)]
    held_out = draw_graph(generator)
    records = {name: train(name, batches, console) for name in RUNS}
    error = lambda record: "NaN" if record.has_ended else f"{np.mean(record.losses[-20:]) ** 0.5:.3f}"  # noqa: E731
    rows = ([name, str(len(record.losses)), error(record)] for name, record in records.items())
    shared.show("Training, which ends at the first NaN", ["", "steps", "error of the share"], rows, console)
    console.print(
        "The usual formulas multiply padding by 0, and 0 times NaN is NaN; of zeros the logarithm is infinite."
    )
    shared.tell_same(records[CLEAN], records[POLLUTED], console)
    guess = np.concatenate([batch.share[batch.has_graph] for batch in batches]).std()
    console.print(f"A constant guess is off by {guess:.3f}.")

    picture = arguments.output / "graph_attention.png"
    draw(records, held_out, attention_of(records[CLEAN].params, held_out), picture)
    console.print(f"The losses, and the attention on a map that is held out, are in {picture}")


if __name__ == "__main__":
    main()
