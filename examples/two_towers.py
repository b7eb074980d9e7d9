"""Finds a function of the standard library by its docstring: two towers, trained on batches that are padded.

One tower embeds docstrings, the other names, and each docstring has the names of the rest of its batch as negatives.
Batches have 64 to 256 functions, as behind a filter, in arrays of 256 rows: more than a third is padding. Functions
with the same name, or with the same docstring, are no negatives of each other.

    python examples/two_towers.py    # less than a minute on two cores

`masksafe.losses.info_nce_loss` is compared with CLIP's formula as it is usually written. That knows no mask: padded
rows are queries, and negatives of all others. If they hold zeros, little is lost but time at the beginning; if they
repeat the last row, the training takes several times as long, for much of the loss is that row's; if they hold what the
memory held, the gradient is NaN. With masksafe none of that changes a bit. The picture shows how many docstrings, of
functions that are not trained on, find their name among a thousand, and what memory the loss takes.
"""

import functools
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import shared
from rich.console import Console
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from train_names import read_functions, split_words

import masksafe

ROWS = 256  # of a batch, with padding
DOCSTRING, NAME = 64, 24  # the most features of a text
FEATURES, WIDTH = 2**14, 64
HELD_OUT = 1000  # functions
EVALUATE_EVERY = 10

Params = dict[str, jax.Array]


# The data: texts are bags of features, words and their trigrams, hashed.


class Texts(NamedTuple):
    features: np.ndarray  # [N, most], indices of the table
    weights: np.ndarray  # [N, most], rare features weigh more
    lengths: np.ndarray  # [N], how many there are; 0 is padding


class Pairs(NamedTuple):
    """Docstrings and names of the same functions."""

    docstrings: Texts
    names: Texts
    ids: np.ndarray  # [N], equal for functions with the same name, or the same docstring

    def rows(self, index: Any) -> "Pairs":
        return jax.tree.map(lambda x: x[index], self)


def split_name(name: str) -> list[str]:
    """The words of a name in snake case or camel case."""
    return re.findall(r"[a-z]+|[0-9]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower())


def features_of(words: list[str]) -> list[str]:
    return [f for w in words for f in (w, *(f"<{w}>"[i : i + 3] for i in range(len(w)) if len(w) > 2))]


def hashed(feature: str) -> int:
    return zlib.crc32(feature.encode()) % FEATURES


def make_texts(texts: list[list[str]], rarity: dict[str, float], most: int) -> Texts:
    features, weights = np.zeros((len(texts), most), np.int32), np.zeros((len(texts), most), np.float32)
    for i, text in enumerate(texts):
        features[i, : len(text)] = [hashed(f) for f in text[:most]]
        weights[i, : len(text)] = [rarity[f] for f in text[:most]]
    return Texts(features, weights, np.minimum([len(text) for text in texts], most).astype(np.int32))


def number_alike(functions: list[tuple[str, str]]) -> np.ndarray:
    """A number for each function, the same for those with equal names or equal docstrings."""
    columns = [np.unique(column, return_inverse=True)[1] for column in zip(*functions, strict=True)]
    ends = columns[0], columns[1] + max(columns[0]) + 1
    size = max(ends[1]) + 1
    return connected_components(coo_array((np.ones(len(functions)), ends), shape=(size, size)))[1][ends[0]]


def make_pairs(functions: list[tuple[str, str]]) -> Pairs:
    docstrings = [features_of([w for w in split_words(d) if w.isalnum()]) for d, _ in functions]
    names = [features_of(split_name(n)) for _, n in functions]
    counts = Counter(f for text in (*docstrings, *names) for f in set(text))
    rarity = {f: math.log(2 * len(functions) / n) for f, n in counts.items()}
    return Pairs(make_texts(docstrings, rarity, DOCSTRING), make_texts(names, rarity, NAME), number_alike(functions))


def select_functions(functions: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those with a docstring and a name that tell something, each once."""
    return sorted({(d, n) for d, n in functions if len(split_words(d)) > 2 and not n.startswith("__")})


def hold_out(pairs: Pairs, number: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The indices of the functions to train on, and of so many others, of which no two are alike."""
    ids, first = np.unique(pairs.ids, return_index=True)
    chosen = generator.permutation(len(ids))[:number]
    return np.flatnonzero(~np.isin(pairs.ids, ids[chosen])), first[chosen]


# Batches, and what stands in their padding.

ZEROS, LAST_ROW, GARBAGE = "zeros", "the last row again", "NaN, inf, 1e38"
GARBAGE_NUMBERS = [np.nan, np.inf, -np.inf, 1e38, -1e38]
GARBAGE_FEATURES = [-1, FEATURES, np.iinfo(np.int32).max, np.iinfo(np.int32).min]


class Batch(NamedTuple):
    pairs: Pairs
    where: np.ndarray  # [ROWS], False is padding


def draw_batches(pairs: Pairs, epochs: int, generator: np.random.Generator) -> Iterator[np.ndarray]:
    """The functions of each batch, from a quarter of the rows to all of them."""
    for _ in range(epochs):
        order, first = generator.permutation(len(pairs.ids)), 0
        while first < len(order):
            number = generator.integers(ROWS // 4, ROWS + 1)
            yield order[first : first + number]
            first += number


def pad_texts(texts: Texts, where: np.ndarray, padding: str, generator: np.random.Generator) -> Texts:
    """The texts with zeros or garbage behind the end of each, and in all of the rows of padding."""
    lengths = np.where(where, texts.lengths, 0)
    is_real = np.arange(texts.features.shape[1]) < lengths[:, None]
    numbers, features = (GARBAGE_NUMBERS, GARBAGE_FEATURES) if padding == GARBAGE else ([0.0], [0])
    return Texts(
        np.where(is_real, texts.features, generator.choice(features, is_real.shape)).astype(np.int32),
        np.where(is_real, texts.weights, generator.choice(numbers, is_real.shape)).astype(np.float32),
        lengths,
    )


def make_batch(pairs: Pairs, index: np.ndarray, padding: str, generator: np.random.Generator) -> Batch:
    where = np.arange(ROWS) < len(index)
    rows = pairs.rows(np.pad(index, (0, ROWS - len(index)), mode="edge"))
    if padding == LAST_ROW:
        return Batch(rows, where)
    docstrings, names = (pad_texts(texts, where, padding, generator) for texts in (rows.docstrings, rows.names))
    return Batch(Pairs(docstrings, names, np.where(where, rows.ids, 0)), where)


# The losses, of embeddings x and y [N, WIDTH] and the scale of their cosines.


def masksafe_loss(x: jax.Array, y: jax.Array, scale: jax.Array, where: jax.Array, ids: jax.Array) -> jax.Array:
    return masksafe.losses.info_nce_loss(x, y, scale=scale, where=where, ids=ids)


def clip_loss(x: jax.Array, y: jax.Array, scale: jax.Array, where: jax.Array, ids: jax.Array) -> jax.Array:
    """CLIP's formula as it is usually written."""
    logits, labels = scale * x @ y.T, jnp.arange(len(x))
    loss = optax.softmax_cross_entropy_with_integer_labels
    return (loss(logits, labels).mean() + loss(logits.T, labels).mean()) / 2


# The towers, with masksafe and with the usual formulas.


class Ops(NamedTuple):
    average: Callable[..., jax.Array]
    normalize: Callable[..., jax.Array]
    loss: Callable[..., jax.Array]


def masksafe_average(vectors: jax.Array, weights: jax.Array, lengths: jax.Array) -> jax.Array:
    mask = masksafe.length_mask(lengths, vectors.shape[1])
    return masksafe.mean(vectors, axis=1, where=mask[..., None], weights=weights[..., None])


def usual_average(vectors: jax.Array, weights: jax.Array, lengths: jax.Array) -> jax.Array:
    """It takes the weights of padding to be 0."""
    return jnp.sum(vectors * weights[..., None], 1) / jnp.maximum(jnp.sum(weights, 1), 1e-6)[:, None]


def usual_normalize(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.sum(x**2, 1, keepdims=True) + 1e-12)


MASKSAFE, CLIP = "masksafe", "CLIP's formula"
OPS = {
    MASKSAFE: Ops(masksafe_average, masksafe.l2_normalize, masksafe_loss),
    CLIP: Ops(usual_average, usual_normalize, clip_loss),
}


def make_params(key: jax.Array) -> Params:
    table, docstring, name = jax.random.split(key, 3)
    return {
        "table": jax.random.normal(table, (FEATURES, WIDTH)),
        "docstring": jax.random.normal(docstring, (WIDTH, WIDTH)) / WIDTH**0.5,
        "docstring bias": jnp.zeros(WIDTH),
        "name": jax.random.normal(name, (WIDTH, WIDTH)) / WIDTH**0.5,
        "name bias": jnp.zeros(WIDTH),
        "log scale": jnp.log(10.0),
    }


def embed(params: Params, pairs: Pairs, ops: Ops) -> tuple[jax.Array, jax.Array]:
    """The embeddings of docstrings and of names, both [N, WIDTH] and of length 1."""

    def tower(name: str, texts: Texts) -> jax.Array:
        mean = ops.average(params["table"][texts.features], texts.weights, texts.lengths)
        return ops.normalize(mean @ params[name] + params[f"{name} bias"])

    return tower("docstring", pairs.docstrings), tower("name", pairs.names)


def loss_of(params: Params, batch: Batch, ops: Ops) -> jax.Array:
    scale = jnp.exp(params["log scale"])
    return ops.loss(*embed(params, batch.pairs, ops), scale, batch.where, batch.pairs.ids)


# Training.

CLEAN, POLLUTED, REPEATED = "masksafe, zeros", "masksafe, garbage", "CLIP's formula, the last row again"
RUNS = {
    CLEAN: (MASKSAFE, ZEROS),
    POLLUTED: (MASKSAFE, GARBAGE),
    "CLIP's formula, zeros": (CLIP, ZEROS),
    REPEATED: (CLIP, LAST_ROW),
    "CLIP's formula, garbage": (CLIP, GARBAGE),
}
optimizer = optax.adam(0.003)


class Record(NamedTuple):
    """A run; it ends at the first NaN."""

    params: Params
    losses: list[float]
    recalls: list[float]  # every EVALUATE_EVERY steps, and at the end

    @property
    def has_ended(self) -> bool:
        return math.isnan(self.losses[-1])

    @property
    def steps(self) -> list[int]:
        """Those after which recall was measured."""
        return [*range(0, len(self.losses), EVALUATE_EVERY), len(self.losses)][: len(self.recalls)]


@functools.partial(jax.jit, static_argnums=3)
def train_step(params: Params, state: Any, batch: Batch, ops: Ops) -> tuple[Params, Any, jax.Array]:
    loss, gradients = jax.value_and_grad(loss_of)(params, batch, ops)
    updates, state = optimizer.update(gradients, state)
    return optax.apply_updates(params, updates), state, loss


@jax.jit
def cosines(params: Params, pairs: Pairs) -> jax.Array:
    """Of each docstring with each name."""
    docstrings, names = embed(params, pairs, OPS[MASKSAFE])
    return docstrings @ names.T


def recall(params: Params, pairs: Pairs, most: int = 1) -> float:
    """The share of docstrings whose name is among so many nearest ones."""
    similarity = np.asarray(cosines(params, pairs))
    return float(np.mean(np.sum(similarity > np.diag(similarity)[:, None], 1) < most))


def train(name: str, pairs: Pairs, held_out: Pairs, epochs: int, console: Console) -> Record:
    """All runs draw the same batches."""
    ops, padding = RUNS[name]
    params, of_padding = make_params(jax.random.key(0)), np.random.default_rng(2)
    state, losses, recalls = optimizer.init(params), [], []
    batches = list(draw_batches(pairs, epochs, np.random.default_rng(1)))
    with shared.progress(name, len(batches), console) as advance:
        for step, index in enumerate(batches):
            if step % EVALUATE_EVERY == 0:
                recalls.append(recall(params, held_out))
            params, state, loss = train_step(params, state, make_batch(pairs, index, padding, of_padding), OPS[ops])
            losses.append(float(loss))
            advance(f"loss {losses[-1]:.3f}")
            if math.isnan(losses[-1]):
                return Record(params, losses, recalls)
    return Record(params, losses, [*recalls, recall(params, held_out)])


# Costs, a table and the picture.


def measure(rows: int, width: int = 256, rounds: int = 5) -> dict[str, shared.Cost]:
    """The costs of the loss with its gradient, of pairs that resemble each other somewhat, without ids."""
    x, noise = np.random.default_rng(0).normal(size=(2, rows, width))
    pair = ((z / np.linalg.norm(z, axis=1, keepdims=True)).astype(np.float32) for z in (x, x + 2 * noise))
    where = np.arange(rows) < 5 * rows // 8
    losses = {
        MASKSAFE: lambda x, y, s: masksafe.losses.info_nce_loss(x, y, scale=s, where=where),
        CLIP: lambda x, y, s: clip_loss(x, y, s, where, where),
    }
    functions = {name: jax.value_and_grad(loss, (0, 1, 2)) for name, loss in losses.items()}
    return shared.costs_of(functions, jax.device_put((*pair, np.float32(20))), rounds)


def line_of(name: str, record: Record, held_out: Pairs) -> list[str]:
    middle, last = record.recalls[len(record.recalls) // 2], record.recalls[-1]
    cells = [f"{middle:.3f}", f"{last:.3f}", f"{recall(record.params, held_out, 5):.3f}"]
    return [name, str(len(record.losses)), *(["NaN"] * 3 if record.has_ended else cells)]


def draw(records: dict[str, Record], costs: dict[int, dict[str, shared.Cost]], path: Path) -> None:
    with plt.rc_context({"font.size": 13}):
        figure, (left, right) = plt.subplots(1, 2, figsize=(10, 6), width_ratios=(5, 2), layout="constrained")
        draw_recalls(left, records)
        draw_memory(right, *list(costs.items())[-1])
        shared.save(figure, path)


def draw_recalls(axis: Any, records: dict[str, Record]) -> None:
    colors, sizes = ("deepskyblue", "midnightblue", "orange", "firebrick", "black"), (8, 3, 3, 3, 12)
    for (name, record), color, size in zip(records.items(), colors, sizes, strict=True):
        percent = 100 * np.array(record.recalls)
        if record.has_ended:
            label = f"{name}: NaN at step {len(record.losses)}"
            axis.plot(len(record.losses), percent[-1], "X", color=color, markersize=size, label=label, zorder=3)
        else:
            axis.plot(record.steps, percent, color=color, linewidth=size, label=name)
    axis.set(xlabel="step", ylabel="recall@1 (%)", title="Docstrings that find their name")
    axis.set_ylim(bottom=-1)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), title="loss, and what the padding holds")


def draw_memory(axis: Any, rows: int, costs: dict[str, shared.Cost]) -> None:
    mebibytes = [cost.temporary_bytes / 2**20 for cost in costs.values()]
    bars = axis.bar([name.replace(" ", "\n") for name in costs], mebibytes, color=("deepskyblue", "lightgrey"))
    axis.bar_label(bars, fmt="%.0f")
    axis.set(title=f"MiB of a loss\nof {rows} rows", ylim=(0, 1.15 * max(mebibytes)))


def main() -> None:
    arguments, console = shared.parser_of(__doc__, epochs=10).parse_args(), Console(soft_wrap=True)
    functions = select_functions(read_functions())
    everything = make_pairs(functions)
    for_training, for_tests = hold_out(everything, HELD_OUT, np.random.default_rng(0))
    pairs, held_out = everything.rows(for_training), everything.rows(for_tests)
    console.print(f"{len(for_training)} functions to train on, {len(for_tests)} to find")
    records = {name: train(name, pairs, held_out, arguments.epochs, console) for name in RUNS}
    lines = (line_of(name, record, held_out) for name, record in records.items())
    header = ["", "steps", "recall@1 half-way", "recall@1", "recall@5"]
    shared.show("Docstrings that find their name", header, lines, console)
    clean, same = records[CLEAN], shared.same_bits(records[CLEAN], records[POLLUTED])
    console.print(f"masksafe, with garbage in the padding: {'the' if same else 'NOT the'} same bits")
    found = [functions[i] for i in for_tests]
    nearest = np.argsort(-np.asarray(cosines(clean.params, held_out)), 1)[:, :3]
    short = [i for i, (docstring, _) in enumerate(found) if len(docstring) < 60 and docstring.endswith(".")][:8]
    lines = ([*found[i], ", ".join(found[j][1] for j in nearest[i])] for i in short)
    shared.show("Functions that are not trained on", ["docstring", "name", "the nearest"], lines, console)

    costs = {rows: measure(rows) for rows in (1024, 4096)}
    of_rows = {f"{rows} rows": of for rows, of in costs.items()}
    shared.show_costs(of_rows, "The loss and its gradient, of 256 columns", console)
    picture = arguments.output / "two_towers.png"
    draw(records, costs, picture)
    console.print(f"recall and memory are in {picture}")


if __name__ == "__main__":
    main()
