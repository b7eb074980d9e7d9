"""The data of `graph_attention.py`: maps of towns as graphs, and as many as fit in one padded graph of fixed sizes."""

from typing import Any, NamedTuple

import numpy as np

NODES, EDGES, GRAPHS = 320, 960, 24  # the sizes of a batch
SIDE = 5  # of a map
ATTENUATION = 2.0  # what a signal loses with the logarithm of the distance


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


# What stands in the padding. The last node and the last graph are padding, to which all of it may belong, as in jraph.

OWN = {"senders": NODES - 1, "receivers": NODES - 1, "graph_of_node": GRAPHS - 1, "graph_of_edge": GRAPHS - 1}
OUT_OF_RANGE = [-1, -7, NODES, NODES + 1, np.iinfo(np.int32).max, np.iinfo(np.int32).min]
HARMLESS, ZEROS, GARBAGE = "harmless padding", "zeros", "garbage"
NUMBERS = {HARMLESS: [1.0], ZEROS: [0.0], GARBAGE: [np.nan, np.inf, -np.inf, 1e38, -1e38]}


def fill(batch: Batch, padding: str, generator: np.random.Generator) -> Batch:
    """The batch with such numbers in its padding, and ids out of range, or those of a graph of its own if harmless."""

    def filled(name: str, is_real: np.ndarray) -> np.ndarray:
        x = getattr(batch, name)
        ids = [OWN.get(name, 0)] if padding == HARMLESS else OUT_OF_RANGE
        choices = NUMBERS[padding] if x.dtype == np.float32 else ids
        return np.where(is_real, x, generator.choice(choices, x.shape)).astype(x.dtype)

    is_node, is_edge = batch.graph_of_node < GRAPHS, batch.graph_of_edge < GRAPHS
    fields = dict.fromkeys(("power", "station", "graph_of_node"), is_node)
    fields |= dict.fromkeys(("distance", "senders", "receivers", "graph_of_edge"), is_edge)
    fields["share"] = batch.has_graph
    return batch._replace(**{name: filled(name, is_real) for name, is_real in fields.items()})


def draw(axis: Any, graph: Graph, weights: np.ndarray) -> None:
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
