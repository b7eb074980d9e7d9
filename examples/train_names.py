"""Learns to write a function's name from its docstring, on the source of Python's own standard library.

A small encoder-decoder in plain JAX, with masksafe's attention and loss. The data is full of padding: docstrings and
names have different lengths, and most functions have no docstring at all, so their context is only padding.

    python examples/train_names.py                    # under three minutes on two cores
    python examples/train_names.py --checks checkify  # every label is checked; or --checks raise
"""

import ast
import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import shared
from jax.experimental import checkify
from rich.console import Console

import masksafe

Params = dict[str, Any]

# A docstring is read word by word, a name is written character by character (printable ASCII).
PAD, START, END, UNKNOWN = 0, 1, 2, 3
FIRST = 4
CHARACTERS = FIRST + 95
WORDS = 4096
IGNORED = -100  # the label of padding


@dataclasses.dataclass(frozen=True)
class Config:
    """The model and its training."""

    docstring_length: int = 24
    name_length: int = 24
    width: int = 128
    heads: int = 4
    encoder_layers: int = 1
    decoder_layers: int = 2
    batch_size: int = 64
    steps: int = 900
    learning_rate: float = 3e-3
    evaluate_every: int = 100
    seed: int = 0
    checks: str = "off"  # label checks: "off", "checkify" or "raise"


# The data: every function of the standard library.


class Functions(NamedTuple):
    """Docstrings, names as the decoder reads them, and names as it must predict them."""

    docstrings: np.ndarray  # [functions, docstring_length], words, then PAD
    inputs: np.ndarray  # [functions, name_length], START, then all but the last character
    labels: np.ndarray  # [functions, name_length], the characters, END, then IGNORED

    def rows(self, index: Any) -> "Functions":
        return Functions(*(array[index] for array in self))


def read_functions() -> list[tuple[str, str]]:
    """The first paragraph of the docstring, which may be empty, and the name of every function."""
    found = []
    for tree, _ in shared.library_sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                paragraph = (ast.get_docstring(node) or "").split("\n\n")[0]
                found.append((" ".join(paragraph.split()), node.name))
    return found


def split_words(text: str) -> list[str]:
    return re.findall(r"[a-z]+|[0-9]+|[^\sa-z0-9]", text.lower())


def count_words(functions: list[tuple[str, str]]) -> dict[str, int]:
    """The token of each of the most frequent words of the docstrings."""
    counts = collections.Counter(word for docstring, _ in functions for word in split_words(docstring))
    return {word: FIRST + i for i, (word, _) in enumerate(counts.most_common(WORDS - FIRST))}


def read(tokens: np.ndarray) -> str:
    text = tokens[: list(tokens).index(END)] if END in tokens else tokens
    return "".join(chr(t - FIRST + 32) for t in text if t >= FIRST)


def tokenise(functions: list[tuple[str, str]], words: dict[str, int], config: Config) -> Functions:
    shape = len(functions), config.name_length
    docstrings = np.full((len(functions), config.docstring_length), PAD)
    inputs, labels = np.full(shape, PAD), np.full(shape, IGNORED)
    for i, (docstring, name) in enumerate(functions):
        text = [words.get(word, UNKNOWN) for word in split_words(docstring)][: config.docstring_length]
        target = [*(FIRST + ord(c) - 32 if 32 <= ord(c) < 127 else UNKNOWN for c in name), END][: config.name_length]
        docstrings[i, : len(text)] = text
        inputs[i, : len(target)] = [START, *target[:-1]]
        labels[i, : len(target)] = target
    return Functions(docstrings, inputs, labels)


def batches(data: Functions, config: Config) -> Iterator[Functions]:
    rng = np.random.default_rng(config.seed)
    while True:
        yield data.rows(rng.integers(len(data.labels), size=config.batch_size))


# The model.


def init_params(config: Config) -> Params:
    keys = iter(jax.random.split(jax.random.key(config.seed), 1000))
    width = config.width

    def dense(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * shape[0] ** -0.5

    def attention_params() -> Params:
        return {name: dense(width, width) for name in ("query", "key", "value", "out")}

    def layer(kinds: tuple[str, ...]) -> Params:
        return {kind: attention_params() for kind in kinds} | {
            "up": dense(width, 4 * width),
            "down": dense(4 * width, width),
        }

    return {
        "words": 0.1 * WORDS**0.5 * dense(WORDS, width),
        "characters": 0.1 * CHARACTERS**0.5 * dense(CHARACTERS, width),
        "word_positions": 0.1 * dense(config.docstring_length, width),
        "character_positions": 0.1 * dense(config.name_length, width),
        "encoder": [layer(("self",)) for _ in range(config.encoder_layers)],
        "decoder": [layer(("self", "cross")) for _ in range(config.decoder_layers)],
        "logits": 0.1 * dense(width, CHARACTERS),
    }


def normalise(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def keys_and_values(params: Params, context: jax.Array, heads: int) -> tuple[jax.Array, jax.Array]:
    """Of context [batch, keys, width], both [batch, keys, heads, width / heads]."""
    key, value = context @ params["key"], context @ params["value"]
    return split_heads(key, heads), split_heads(value, heads)


def split_heads(x: jax.Array, heads: int) -> jax.Array:
    return x.reshape(*x.shape[:-1], heads, -1)


def attend(params: Params, x: jax.Array, keys: jax.Array, values: jax.Array, **masks: Any) -> jax.Array:
    """Multi-head attention of x [batch, time, width].

    A sample whose context is only padding gets 0.
    """
    query = split_heads(x @ params["query"], keys.shape[-2])
    return masksafe.dot_product_attention(query, keys, values, **masks).reshape(x.shape) @ params["out"]


def attention(params: Params, x: jax.Array, context: jax.Array, heads: int, **masks: Any) -> jax.Array:
    return attend(params, x, *keys_and_values(params, context, heads), **masks)


def feed_forward(params: Params, x: jax.Array) -> jax.Array:
    return jax.nn.gelu(normalise(x) @ params["up"]) @ params["down"]


def encode(params: Params, docstrings: jax.Array, heads: int) -> tuple[jax.Array, jax.Array]:
    """The words of the docstrings in context [batch, docstring_length, width], and how many there are [batch]."""
    lengths = jnp.sum(docstrings != PAD, -1)
    x = params["words"][docstrings] + params["word_positions"]
    for layer in params["encoder"]:
        normal = normalise(x)
        x += attention(layer["self"], normal, normal, heads, key_value_seq_lengths=lengths)
        x += feed_forward(layer, x)
    return normalise(x), lengths


def features_of(params: Params, docstrings: jax.Array, inputs: jax.Array, heads: int) -> jax.Array:
    """The features that the output layer gets for each character, [batch, name_length, width]."""
    context, lengths = encode(params, docstrings, heads)
    x = params["characters"][inputs] + params["character_positions"]
    for layer in params["decoder"]:
        normal = normalise(x)
        x += attention(layer["self"], normal, normal, heads, is_causal=True)
        x += attention(layer["cross"], normalise(x), context, heads, key_value_seq_lengths=lengths)
        x += feed_forward(layer, x)
    return normalise(x)


def apply_model(params: Params, docstrings: jax.Array, inputs: jax.Array, heads: int) -> jax.Array:
    """Logits [batch, name_length, CHARACTERS] of the next character."""
    return features_of(params, docstrings, inputs, heads) @ params["logits"]


# The loss, of features [batch, time, width] and the kernel of the output layer [width, CHARACTERS].


def loss_of(features: jax.Array, kernel: jax.Array, batch: Functions) -> jax.Array:
    """The output layer and its loss in one op, for the unmasked characters only."""
    mask = batch.labels != IGNORED
    return masksafe.losses.linear_softmax_cross_entropy(features, kernel, batch.labels, where=mask)


# Training.


def make_optimizer(config: Config) -> optax.GradientTransformation:
    warmup = min(50, config.steps // 2)
    schedule = optax.warmup_cosine_decay_schedule(0.0, config.learning_rate, warmup, config.steps)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))


def make_train_step(optimizer: optax.GradientTransformation, config: Config) -> Callable[..., Any]:
    @jax.jit
    def train_step(params: Params, state: Any, batch: Functions) -> tuple[Params, Any, jax.Array]:
        def batch_loss(params: Params) -> jax.Array:
            features = features_of(params, batch.docstrings, batch.inputs, config.heads)
            return loss_of(features, params["logits"], batch)

        value, gradient = jax.value_and_grad(batch_loss)(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    return train_step


@functools.partial(jax.jit, static_argnames="heads")
def evaluate(params: Params, data: Functions, heads: int) -> tuple[jax.Array, jax.Array]:
    """The held-out loss, and the share of characters predicted correctly."""
    features, kernel = features_of(params, data.docstrings, data.inputs, heads), params["logits"]
    right = jnp.argmax(features @ kernel, -1) == data.labels
    return loss_of(features, kernel, data), masksafe.mean(right, where=data.labels != IGNORED)


class History(NamedTuple):
    """The results of a training run."""

    params: Params
    losses: list[float]
    held_out: list[tuple[int, float, float]]  # step, loss, accuracy


def train(data: Functions, held_out: Functions, config: Config, console: Console) -> History:
    optimizer = make_optimizer(config)
    train_step = with_label_checks(make_train_step(optimizer, config), config.checks)
    params = init_params(config)
    state = optimizer.init(params)
    losses, scores = [], []

    def report(step: int) -> None:
        value, accuracy = map(float, evaluate(params, held_out, config.heads))
        scores.append((step, value, accuracy))
        console.print(f"step {step:4d}  held-out loss {value:.4f}  accuracy {accuracy:.1%}")

    report(0)
    with shared.progress("training", config.steps, console) as advance:
        for step, batch in zip(range(1, config.steps + 1), batches(data, config), strict=False):
            params, state, value = train_step(params, state, batch)
            losses.append(float(value))
            advance(f"loss {losses[-1]:.3f}")
            if step % config.evaluate_every == 0 or step == config.steps:
                report(step)
    return History(params, losses, scores)


def with_label_checks(step: Callable[..., Any], mode: str) -> Callable[..., Any]:
    """The step under label checks; a bad label ends the training."""
    checked = jax.jit(checkify.checkify(step))

    def run(*args: Any) -> Any:
        with masksafe.label_checks(mode):
            if mode != "checkify":
                return step(*args)
            error, result = checked(*args)
        error.throw()
        return result

    return run


# Using the result.


def save(params: Params, path: Path) -> None:
    np.savez(path, *jax.tree.leaves(params))


def load(path: Path, config: Config) -> Params:
    with np.load(path) as file:
        leaves = [file[name] for name in file.files]
    return jax.tree.unflatten(jax.tree.structure(init_params(config)), leaves)


def predict(params: Params, docstrings: np.ndarray, config: Config, temperature: float = 0.3) -> list[str]:
    """Samples names character by character; a low temperature prefers likely ones."""
    model = jax.jit(apply_model, static_argnums=3)
    names = jnp.full((len(docstrings), config.name_length + 1), PAD).at[:, 0].set(START)
    for i, key in enumerate(jax.random.split(jax.random.key(config.seed), config.name_length)):
        logits = model(params, docstrings, names[:, :-1], config.heads)[:, i]
        names = names.at[:, i + 1].set(jax.random.categorical(key, logits / temperature))
    return [read(name[1:]) for name in np.asarray(names)]


def plot(history: History, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    steps, values, _ = zip(*history.held_out, strict=True)
    (line,) = axes.plot(steps, values, "o-", label="held out")
    axes.plot(history.losses, color=line.get_color(), alpha=0.3, linewidth=1, label="training")
    axes.set(xlabel="step", ylabel="cross-entropy per character (nats)", title="A function's name from its docstring")
    axes.set_ylim(bottom=0)
    axes.legend()
    shared.save(figure, path)


def main() -> None:
    parser = shared.parser_of(__doc__, steps=Config.steps, seed=Config.seed)
    text = "label checks; default: %(default)s"
    parser.add_argument("--checks", choices=["off", "checkify", "raise"], default="off", help=text)
    arguments, console = parser.parse_args(), Console()
    config = Config(steps=arguments.steps, seed=arguments.seed, checks=arguments.checks)

    functions = read_functions()
    np.random.default_rng(config.seed).shuffle(functions)
    held_out_functions, training_functions = functions[:1024], functions[1024:]
    words = count_words(training_functions)
    data, held_out = (tokenise(part, words, config) for part in (training_functions, held_out_functions))
    empty = np.mean([not docstring for docstring, _ in functions])
    console.print(f"{len(functions)} functions, {empty:.0%} of them without a docstring")

    history = train(data, held_out, config, console)
    arguments.output.mkdir(parents=True, exist_ok=True)
    checkpoint = arguments.output / "train_names.npz"
    save(history.params, checkpoint)
    params = load(checkpoint, config)
    value, accuracy = map(float, evaluate(params, held_out, config.heads))
    console.print(f"loaded {checkpoint}: held-out loss {value:.4f}, accuracy {accuracy:.1%}")
    shown = [f for f in held_out_functions if 20 < len(f[0]) < 80][:9] + [f for f in held_out_functions if not f[0]][:3]
    names = predict(params, tokenise(shown, words, config).docstrings, config)
    rows = ((d or "[dim](none: all padding)[/dim]", name, found) for (d, name), found in zip(shown, names, strict=True))
    shared.show("Held-out functions", ["docstring", "name", "prediction"], rows, console)

    picture = arguments.output / "train_names.png"
    plot(history, picture)
    console.print(f"the loss curve is in {picture}")


if __name__ == "__main__":
    main()
