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
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import bags
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import shared
from bags import FEATURES, GARBAGE, LAST_ROW, ZEROS, Batch, Pairs, Texts
from names import read_functions
from rich.console import Console

import masksafe

WIDTH = 64
HELD_OUT = 1000  # functions
EVALUATE_EVERY = 10
MEASURED = 4096  # rows

Params = dict[str, jax.Array]


def masksafe_loss(x: jax.Array, y: jax.Array, scale: jax.Array, where: jax.Array, ids: Any) -> jax.Array:
    return masksafe.losses.info_nce_loss(x, y, scale=scale, where=where, ids=ids)


def clip_loss(x: jax.Array, y: jax.Array, scale: jax.Array, where: jax.Array, ids: Any) -> jax.Array:
    """CLIP's formula as it is usually written."""
    logits, labels = scale * x @ y.T, jnp.arange(len(x))
    loss = optax.softmax_cross_entropy_with_integer_labels
    return (loss(logits, labels).mean() + loss(logits.T, labels).mean()) / 2


class Ops(NamedTuple):
    """What both towers and the loss, of embeddings [N, WIDTH] and the scale of their cosines, are made of."""

    average: Callable[..., jax.Array]
    normalize: Callable[..., jax.Array]
    loss: Callable[..., jax.Array]


def masksafe_average(vectors: jax.Array, weights: jax.Array, lengths: jax.Array) -> jax.Array:
    mask = masksafe.length_mask(lengths, vectors.shape[1])
    return masksafe.mean(vectors, axis=1, where=mask[..., None], weights=weights[..., None])


def usual_average(vectors: jax.Array, weights: jax.Array, lengths: jax.Array) -> jax.Array:
    """It takes the weights of padding to be 0."""
    return jnp.sum(vectors * weights[..., None], 1) / jnp.maximum(jnp.sum(weights, 1), 1e-6)[:, None]


MASKSAFE, CLIP = "masksafe", "CLIP's formula"
OPS = {
    MASKSAFE: Ops(masksafe_average, masksafe.l2_normalize, masksafe_loss),
    CLIP: Ops(usual_average, lambda x: x * jax.lax.rsqrt(jnp.sum(x**2, 1, keepdims=True) + 1e-12), clip_loss),
}


def make_params(key: jax.Array) -> Params:
    table, *towers = jax.random.split(key, 3)
    kernels = {
        name: jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5
        for name, key in zip(("docstring", "name"), towers, strict=True)
    }
    biases = {f"{name} bias": jnp.zeros(WIDTH) for name in kernels}
    return kernels | biases | {"table": jax.random.normal(table, (FEATURES, WIDTH)), "log scale": jnp.log(10.0)}


def embed(params: Params, pairs: Pairs, ops: Ops) -> tuple[jax.Array, jax.Array]:
    """The embeddings of docstrings and of names, both [N, WIDTH] and of length 1."""

    def tower(name: str, texts: Texts) -> jax.Array:
        mean = ops.average(params["table"][texts.features], texts.weights, texts.lengths)
        return ops.normalize(mean @ params[name] + params[f"{name} bias"])

    return tower("docstring", pairs.docstrings), tower("name", pairs.names)


def loss_of(params: Params, batch: Batch, ops: Ops) -> jax.Array:
    scale = jnp.exp(params["log scale"])
    return ops.loss(*embed(params, batch.pairs, ops), scale, batch.where, batch.pairs.ids)


CLEAN, POLLUTED, REPEATED = "masksafe, zeros", "masksafe, garbage", "CLIP's formula, the last row again"
RUNS = {
    CLEAN: (MASKSAFE, ZEROS),
    POLLUTED: (MASKSAFE, GARBAGE),
    "CLIP's formula, zeros": (CLIP, ZEROS),
    REPEATED: (CLIP, LAST_ROW),
    "CLIP's formula, garbage": (CLIP, GARBAGE),
}
optimizer = optax.adam(0.003)
STEPS = {name: shared.make_step(functools.partial(loss_of, ops=ops), optimizer) for name, ops in OPS.items()}


@jax.jit
def cosines(params: Params, pairs: Pairs) -> jax.Array:
    """Of each docstring with each name."""
    docstrings, names = embed(params, pairs, OPS[MASKSAFE])
    return docstrings @ names.T


def recall(params: Params, pairs: Pairs) -> float:
    """The share of docstrings whose name is the nearest."""
    similarity = np.asarray(cosines(params, pairs))
    return float(np.mean(similarity.max(1) == np.diag(similarity)))


def train(name: str, pairs: Pairs, held_out: Pairs, epochs: int, console: Console) -> shared.Record:
    """All runs draw the same batches."""
    ops, padding = RUNS[name]
    params, of_padding = make_params(jax.random.key(0)), np.random.default_rng(2)
    drawn = list(bags.draw_batches(pairs, epochs, np.random.default_rng(1)))
    batches = (bags.make_batch(pairs, index, padding, of_padding) for index in drawn)
    start, score = (params, optimizer.init(params)), functools.partial(recall, pairs=held_out)
    return shared.train(name, start, STEPS[ops], batches, len(drawn), console, score, EVALUATE_EVERY)


def measure(rows: int, width: int = 256, rounds: int = 5) -> dict[str, shared.Cost]:
    """The costs of the loss with its gradient, of pairs that resemble each other somewhat, without ids."""
    x, noise = np.random.default_rng(0).normal(size=(2, rows, width))
    pair = ((z / np.linalg.norm(z, axis=1, keepdims=True)).astype(np.float32) for z in (x, x + 2 * noise))
    where = np.arange(rows) < 5 * rows // 8
    of = lambda ops: jax.value_and_grad(lambda x, y, scale: ops.loss(x, y, scale, where, None), (0, 1, 2))  # noqa: E731
    functions = {name: of(ops) for name, ops in OPS.items()}
    return shared.costs_of(functions, jax.device_put((*pair, np.float32(20))), rounds)


def draw(records: dict[str, shared.Record], costs: dict[str, shared.Cost], path: Path) -> None:
    with plt.rc_context({"font.size": 13}):
        figure, (left, right) = plt.subplots(1, 2, figsize=(10, 6), width_ratios=(5, 2), layout="constrained")
        colors, sizes = ("deepskyblue", "midnightblue", "orange", "firebrick", "black"), (8, 3, 3, 3, 12)
        for (name, record), color, size in zip(records.items(), colors, sizes, strict=True):
            last = [(len(record.losses), record.scores[-1][1])]
            steps, recalls = zip(*(last if record.has_ended else record.scores), strict=True)
            shared.draw_run(
                left, name, steps, 100 * np.array(recalls), has_ended=record.has_ended, color=color, size=size
            )
        left.set(xlabel="step", ylabel="recall@1 (%)", title="Docstrings that find their name", ylim=(-1, None))
        left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), title="loss, and what the padding holds")
        mebibytes = [cost.temporary_bytes / 2**20 for cost in costs.values()]
        bars = right.bar([name.replace(" ", "\n") for name in costs], mebibytes, color=("deepskyblue", "lightgrey"))
        right.bar_label(bars, fmt="%.0f")
        right.set(title=f"MiB of a loss\nof {MEASURED} rows", ylim=(0, 1.15 * max(mebibytes)))
        shared.save(figure, path)


def main() -> None:
    arguments, console = shared.parser_of(__doc__, epochs=10).parse_args(), Console(soft_wrap=True)
    everything = bags.make_pairs(functions := bags.select_functions(read_functions()))
    for_training, for_tests = bags.hold_out(everything, HELD_OUT, np.random.default_rng(0))
    pairs, held_out = map(everything.rows, (for_training, for_tests))
    console.print(f"{len(for_training)} functions to train on, {len(for_tests)} to find")
    records = {name: train(name, pairs, held_out, arguments.epochs, console) for name in RUNS}
    found = lambda record: "NaN" if record.has_ended else f"{record.scores[-1][1]:.3f}"  # noqa: E731
    lines = ([name, str(len(record.losses)), found(record)] for name, record in records.items())
    shared.show("Docstrings that find their name", ["", "steps", "recall@1"], lines, console)
    shared.tell_same(records[CLEAN], records[POLLUTED], console)
    functions = [functions[i] for i in for_tests]
    nearest = np.argsort(-np.asarray(cosines(records[CLEAN].params, held_out)), 1)[:, :3]
    short = [i for i, (docstring, _) in enumerate(functions) if len(docstring) < 60 and docstring.endswith(".")][:8]
    lines = ([*functions[i], ", ".join(functions[j][1] for j in nearest[i])] for i in short)
    shared.show("Functions that are not trained on", ["docstring", "name", "the nearest"], lines, console)

    costs = measure(MEASURED)
    shared.show_costs({f"{MEASURED} rows": costs}, "The loss and its gradient, of 256 columns", console)
    draw(records, costs, arguments.output / "two_towers.png")
    console.print(f"recall and memory are in {arguments.output}")


if __name__ == "__main__":
    main()
