"""Learns to write a function's name from its docstring, on the source of Python's own standard library.

A small encoder-decoder in plain JAX, with masksafe's attention and loss. The data is full of padding: docstrings and
names have different lengths, and most functions have no docstring at all, so their context is only padding.

    python examples/train_names.py    # under three minutes on two cores
"""

import functools
from collections.abc import Iterator

import jax
import names
import numpy as np
import optax
import shared
from names import Config, Functions, Params
from rich.console import Console

import masksafe


def loss_of(params: Params, batch: Functions, heads: int) -> jax.Array:
    """The output layer and its loss in one op, for the unmasked characters only."""
    features = names.features_of(params, batch.docstrings, batch.inputs, heads)
    mask = batch.labels != names.IGNORED
    return masksafe.losses.linear_softmax_cross_entropy(features, params["logits"], batch.labels, where=mask)


def batches(data: Functions, config: Config) -> Iterator[Functions]:
    rng = np.random.default_rng(config.seed)
    for _ in range(config.steps):
        yield data.rows(rng.integers(len(data.labels), size=config.batch_size))


def train(data: Functions, held_out: Functions, config: Config, console: Console) -> shared.Record:
    """The scores are held-out losses."""
    warmup = min(50, config.steps // 2)
    schedule = optax.warmup_cosine_decay_schedule(0.0, config.learning_rate, warmup, config.steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    loss = functools.partial(loss_of, heads=config.heads)
    evaluate, step = jax.jit(loss), shared.make_step(loss, optimizer)

    def score(params: Params) -> float:
        held_out_loss = float(evaluate(params, held_out))
        console.print(f"held-out loss {held_out_loss:.4f}")
        return held_out_loss

    params, drawn = names.init_params(config), batches(data, config)
    start = params, optimizer.init(params)
    return shared.train("training", start, step, drawn, config.steps, console, score, config.evaluate_every)


def main() -> None:
    arguments, console = shared.parser_of(__doc__, writes=False, steps=Config.steps).parse_args(), Console()
    config = Config(steps=arguments.steps)
    functions = names.read_functions()
    np.random.default_rng(config.seed).shuffle(functions)
    held_out_functions, training_functions = functions[:1024], functions[1024:]
    words = names.count_words(training_functions)
    data, held_out = (names.tokenise(part, words, config) for part in (training_functions, held_out_functions))
    empty = np.mean([not docstring for docstring, _ in functions])
    console.print(f"{len(functions)} functions, {empty:.0%} of them without a docstring")

    history = train(data, held_out, config, console)
    shown = [f for f in held_out_functions if 20 < len(f[0]) < 80][:9] + [f for f in held_out_functions if not f[0]][:3]
    docstrings = names.tokenise(shown, words, config).docstrings
    drawn = names.sample(history.params, docstrings, jax.random.key(config.seed), config.heads, temperature=0.3)
    rows = (
        (docstring or "[dim](none: all padding)[/dim]", name, names.read(found))
        for (docstring, name), found in zip(shown, np.asarray(drawn), strict=True)
    )
    shared.show("Held-out functions", ["docstring", "name", "prediction"], rows, console)


if __name__ == "__main__":
    main()
