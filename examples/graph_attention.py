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
import math
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

NODES, EDGES, GRAPHS = 320, 960, 24  # the sizes of a batch
SIDE = 5  # of a map
ATTENUATION = 2.0  # what a signal loses with the logarithm of the distance
WIDTH = 16

Params = dict[str, jax.Array]


# The data.


class Graph(NamedTuple):
    """Towns with their stations, and links in both directions."""

    positions: np.ndarray  # [towns, 2]
    power: np.ndarray  # [towns], from a level that differs from graph to graph
    station: np.ndarray  # [towns], 0: blue, 1: red
    senders: np.ndarray  # [links]
    receivers: np.ndarray
    distance: np.ndarray
    strongest: np.ndarray  # [links], whether this is the signal that the receiver hears

    @property
    def share(self) -> float:
        """The share of towns that hear red: each has one strongest neighbour."""
        return float(self.station[self.senders[self.strongest]].mean())


def draw_graph(generator: np.random.Generator) -> Graph:
    """A connected part of the grid, grown town by town."""
    cells, number = [(SIDE // 2, SIDE // 2)], generator.integers(6, 21)
    while len(cells) < number:
        x, y = cells[generator.integers(len(cells))]
        free = [c for c in ((x + 1, y), (x - 1, y), (x, y + 1), (x, y - 1)) if c not in cells]
        free = [c for c in free if min(c) >= 0 and max(c) < SIDE]
        cells += [free[generator.integers(len(free))]] if free else []
    grid = np.array(cells)
    are_linked = np.abs(grid[:, None] - grid).sum(-1) == 1
    senders, receivers = np.nonzero(are_linked)
    positions = grid + generator.uniform(-0.3, 0.3, grid.shape)
    power, station = generator.normal(generator.normal(0, 10), 1, number), generator.integers(2, size=number)
    distance = np.linalg.norm(positions[senders] - positions[receivers], axis=1)
    signal = power[senders] - ATTENUATION * np.log(distance)
    of_receiver = np.where(receivers == np.arange(number)[:, None], signal, -np.inf)
    strongest = signal == of_receiver.max(1)[receivers]
    return Graph(positions, power, station, senders, receivers, distance, strongest)


class Batch(NamedTuple):
    """Graphs as one padded graph. Ids of padding are out of range."""

    power: np.ndarray  # [NODES]
    station: np.ndarray
    graph_of_node: np.ndarray
    distance: np.ndarray  # [EDGES]
    senders: np.ndarray
    receivers: np.ndarray
    graph_of_edge: np.ndarray
    share: np.ndarray  # [GRAPHS]
    has_graph: np.ndarray


def pad(parts: list[Any], size: int, padding: float, dtype: Any) -> np.ndarray:
    together = np.concatenate(parts)
    return np.pad(together, (0, size - len(together)), constant_values=padding).astype(dtype)


def make_batch(graphs: list[Graph]) -> Batch:
    """With zeros in the padding, and the number of nodes or of graphs as its ids."""
    first = np.cumsum([0, *[len(g.power) for g in graphs]])
    rows = list(enumerate(graphs))
    return Batch(
        power=pad([g.power for g in graphs], NODES, 0, np.float32),
        station=pad([g.station for g in graphs], NODES, 0, np.int32),
        graph_of_node=pad([np.full(len(g.power), i) for i, g in rows], NODES, GRAPHS, np.int32),
        distance=pad([g.distance for g in graphs], EDGES, 0, np.float32),
        senders=pad([g.senders + first[i] for i, g in rows], EDGES, NODES, np.int32),
        receivers=pad([g.receivers + first[i] for i, g in rows], EDGES, NODES, np.int32),
        graph_of_edge=pad([np.full(len(g.senders), i) for i, g in rows], EDGES, GRAPHS, np.int32),
        share=pad([[g.share for g in graphs]], GRAPHS, 0, np.float32),
        has_graph=np.arange(GRAPHS) < len(graphs),
    )


def draw_batch(generator: np.random.Generator) -> Batch:
    """As many graphs as fit, so that their number differs; a node and a graph at least are padding."""
    graphs, nodes, edges = [], 0, 0
    while len(graphs) < GRAPHS - 1:
        graph = draw_graph(generator)
        nodes, edges = nodes + len(graph.power), edges + len(graph.senders)
        if nodes >= NODES or edges > EDGES:
            break
        graphs.append(graph)
    return make_batch(graphs)


# What stands in the padding.


class Padding(NamedTuple):
    numbers: list[float]
    ids: list[int] | None  # None: those of OWN


# The last node and the last graph are padding, to which all of it may belong, as in jraph.
OWN = {"senders": NODES - 1, "receivers": NODES - 1, "graph_of_node": GRAPHS - 1, "graph_of_edge": GRAPHS - 1}
OUT_OF_RANGE = [-1, -7, NODES, NODES + 1, np.iinfo(np.int32).max, np.iinfo(np.int32).min]
HARMLESS, ZEROS, GARBAGE = "ones, a graph of their own", "zeros, out of range", "NaN, inf, 1e38, out of range"
PADDINGS = {
    HARMLESS: Padding([1.0], None),
    "zeros, a graph of their own, which is not masked: log 0 is infinite": Padding([0.0], None),
    "ones, out of range": Padding([1.0], OUT_OF_RANGE),
    ZEROS: Padding([0.0], OUT_OF_RANGE),
    "1e38, out of range": Padding([1e38, -1e38], OUT_OF_RANGE),
    GARBAGE: Padding([np.nan, np.inf, -np.inf, 1e38, -1e38], OUT_OF_RANGE),
}


def fill(batch: Batch, padding: Padding, generator: np.random.Generator) -> Batch:
    """The batch with these numbers and ids in its padding."""

    def filled(name: str, is_real: np.ndarray) -> np.ndarray:
        x = getattr(batch, name)
        choices = padding.numbers if x.dtype == np.float32 else padding.ids or [OWN.get(name, 0)]
        return np.where(is_real, x, generator.choice(choices, x.shape)).astype(x.dtype)

    is_node, is_edge = batch.graph_of_node < GRAPHS, batch.graph_of_edge < GRAPHS
    fields = dict.fromkeys(("power", "station", "graph_of_node"), is_node)
    fields |= dict.fromkeys(("distance", "senders", "receivers", "graph_of_edge"), is_edge)
    fields["share"] = batch.has_graph
    return batch._replace(**{name: filled(name, is_real) for name, is_real in fields.items()})


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


@functools.partial(jax.jit, static_argnums=2)
def value_and_gradients(params: Params, batch: Batch, ops: Ops) -> tuple[jax.Array, Params]:
    return jax.value_and_grad(loss_of)(params, batch, ops)


# Training, and one step.

CLEAN, POLLUTED = "masksafe, zeros", "masksafe, garbage"
RUNS = {
    CLEAN: (MASKSAFE, ZEROS),
    POLLUTED: (MASKSAFE, GARBAGE),
    "usual formulas, harmless padding": (USUAL, HARMLESS),
    "usual formulas, zeros": (USUAL, ZEROS),
    "usual formulas, garbage": (USUAL, GARBAGE),
}
optimizer = optax.adam(0.02)


class Record(NamedTuple):
    """The losses of a run; it ends at the first NaN."""

    params: Params
    losses: list[float]

    @property
    def has_ended(self) -> bool:
        return math.isnan(self.losses[-1])


@jax.jit
def update(params: Params, state: Any, gradients: Params) -> tuple[Params, Any]:
    updates, state = optimizer.update(gradients, state)
    return optax.apply_updates(params, updates), state


def train(name: str, batches: list[Batch], console: Console) -> Record:
    ops, padding = RUNS[name]
    params, generator, losses = make_params(jax.random.key(0)), np.random.default_rng(1), []
    state = optimizer.init(params)
    with shared.progress(name, len(batches), console) as advance:
        for batch in batches:
            loss, gradients = value_and_gradients(params, fill(batch, PADDINGS[padding], generator), OPS[ops])
            losses.append(float(loss))
            advance(f"loss {losses[-1]:.3f}")
            if math.isnan(losses[-1]):
                break
            params, state = update(params, state, gradients)
    return Record(params, losses)


def effect(ops: str, padding: str, batch: Batch) -> str:
    """What becomes of the first step, next to the one with harmless padding, in words."""

    def step(padding: str) -> list[jax.Array]:
        filled = fill(batch, PADDINGS[padding], np.random.default_rng(1))
        return jax.tree.leaves(value_and_gradients(make_params(jax.random.key(0)), filled, OPS[ops]))

    loss, *gradients = step(padding)
    if number := sum(bool(jnp.isnan(gradient).any()) for gradient in gradients):
        return f"{'loss' if jnp.isnan(loss) else f'{number} of {len(gradients)} gradients'} NaN"
    return "the same bits" if shared.same_bits([loss, *gradients], step(HARMLESS)) else "other numbers"


def share_found(params: Params, graphs: list[Graph]) -> float:
    """The share of towns whose largest attention weight is that of the neighbour they hear."""
    found = []
    for graph in graphs:
        weights = attention_of(params, graph)
        largest = np.zeros(len(graph.power))
        np.maximum.at(largest, graph.receivers, weights)
        found.append((weights == largest[graph.receivers])[graph.strongest])
    return float(np.concatenate(found).mean())


@jax.jit
def masksafe_attention(params: Params, batch: Batch) -> jax.Array:
    return apply_model(params, batch, OPS[MASKSAFE])[1]


def attention_of(params: Params, graph: Graph) -> np.ndarray:
    return np.asarray(masksafe_attention(params, make_batch([graph])))[: len(graph.senders)]


# The picture.


def draw(records: dict[str, Record], graph: Graph, weights: np.ndarray, path: Path) -> None:
    with plt.rc_context({"font.size": 12}):
        figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.8), width_ratios=(5, 4), layout="constrained")
        draw_losses(left, records)
        draw_attention(right, graph, weights)
        shared.save(figure, path)


def draw_losses(axis: Any, records: dict[str, Record]) -> None:
    colors, sizes = ("deepskyblue", "midnightblue", "orange", "orange", "firebrick"), (7, 3.5, 1.2, 16, 9)
    window = max(1, max(len(record.losses) for record in records.values()) // 20)
    for (name, record), color, size in zip(records.items(), colors, sizes, strict=True):
        if record.has_ended:
            label = f"{name}: NaN at step {len(record.losses)}"
            axis.semilogy(len(record.losses), record.losses[0], "X", color=color, markersize=size, label=label)
        else:
            axis.semilogy(*shared.smooth(record.losses, window), color=color, linewidth=size, label=name)
    axis.set(xlabel="step", ylabel="mean squared error", title="Loss, by what the padding holds")
    axis.legend(fontsize=11)


def draw_attention(axis: Any, graph: Graph, weights: np.ndarray) -> None:
    for edge in np.argsort(weights):
        weight, ends = weights[edge], graph.positions[[graph.receivers[edge], graph.senders[edge]]]
        style = {
            "arrowstyle": "-|>",
            "connectionstyle": "arc3,rad=0.15",
            "color": "black" if graph.strongest[edge] else "darkgrey",
            "linewidth": 0.5 + 3.5 * weight,
            "mutation_scale": 6 + 12 * weight,
            "shrinkA": 9,
            "shrinkB": 9,
        }
        axis.annotate("", *ends, arrowprops=style)
    power = graph.power - graph.power.min()
    colors = np.where(graph.station == 1, "firebrick", "steelblue")
    axis.scatter(*graph.positions.T, s=60 + 240 * power / power.max(), c=colors, zorder=3)
    axis.set(title="Attention of a town to its neighbours", aspect="equal")
    axis.set_xticks([])
    axis.set_yticks([])
    axis.set_xlabel("thick: attended to; black: really heard;\nlarge: strong station")
    axis.spines[:].set_visible(False)


def main() -> None:
    arguments, console = shared.parser_of(__doc__, steps=400).parse_args(), Console(soft_wrap=True)
    generator = np.random.default_rng(0)
    batches = [draw_batch(generator) for _ in range(arguments.steps)]
    held_out = [draw_graph(generator) for _ in range(100)]
    rows = ([padding, *(effect(ops, padding, batches[0]) for ops in OPS)] for padding in PADDINGS)
    shared.show("The first step", ["the padding: numbers, ids", *OPS], rows, console)

    records = {name: train(name, batches, console) for name in RUNS}
    error = lambda record: "NaN" if record.has_ended else f"{np.mean(record.losses[-20:]) ** 0.5:.3f}"  # noqa: E731
    rows = ([name, str(len(record.losses)), error(record)] for name, record in records.items())
    shared.show("Training", ["", "steps", "error of the share"], rows, console)
    clean, same = records[CLEAN], shared.same_bits(records[CLEAN], records[POLLUTED])
    console.print(f"masksafe, with garbage in the padding: {'the' if same else 'NOT the'} same bits")
    guess = np.concatenate([batch.share[batch.has_graph] for batch in batches]).std()
    share = f"{share_found(clean.params, held_out):.0%} of towns attend most to the neighbour they hear."
    console.print(f"A constant guess is off by {guess:.3f}. {share}")

    picture, graph = arguments.output / "graph_attention.png", held_out[0]
    draw(records, graph, attention_of(clean.params, graph), picture)
    console.print(f"The losses, and the attention on a map that is held out, are in {picture}")


if __name__ == "__main__":
    main()
