"""Learns to write the body of a Python function from its signature and docstring, on the standard library's source.

A small decoder in flax with masksafe's attention, norms and loss. Signature and docstring are the prompt: the model
reads them, but only the tokens of the body count in the loss. Several functions are packed into a row, each as a
segment, and the rest of the row is padding. With a vocabulary of 16384 tokens, the logits would usually be by far the
largest array of the training step; masksafe's linear cross-entropy never stores them, and computes nothing for the
tokens of prompts and padding.

    python examples/language_model.py               # about three minutes on two cores
    python examples/language_model.py --loss optax  # trains with matmul + optax instead

Either way, the time and memory of a training step with each loss are compared first.
"""

import ast
import collections
import contextlib
import dataclasses
import functools
import re
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import shared
from flax import nnx
from rich.console import Console
from rich.syntax import Syntax

import masksafe

IGNORED = -100  # the label of a masked token
END, FIRST_BYTE, FIRST_WORD = 0, 1, 257  # a word that is not in the vocabulary is spelled in bytes


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


# The data: every function of the standard library, as a prompt and a body to write.


class Function(NamedTuple):
    """Signature and docstring, and the body that follows."""

    prompt: str
    body: str


def read_functions() -> list[Function]:
    found: list[Function] = []
    for tree, source in shared.library_sources():
        with contextlib.suppress(UnicodeDecodeError):
            found += functions_of(tree, source.decode("utf-8").splitlines(keepends=True))
    return found


def functions_of(tree: ast.AST, lines: list[str]) -> Iterator[Function]:
    """The functions of a module and the methods of its classes, without those nested in functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            has_docstring = ast.get_docstring(node) is not None
            statements = node.body[1:] if has_docstring else node.body
            if statements and statements[0].lineno > node.lineno:
                start, middle, end = node.lineno - 1, statements[0].lineno - 1, node.end_lineno
                text = textwrap.dedent("".join(lines[start:end])).splitlines()
                prompt, body = text[: middle - start], text[middle - start :]
                yield Function("\n".join(prompt), "".join(f"\n{line}" for line in body))
        else:
            yield from functions_of(node, lines)


def split_words(text: str) -> list[str]:
    """Splits into words of names with a leading space or underscores, digits, signs, and line ends with indentation."""
    return re.findall(r"\n *| ?_*[A-Z]?[a-z]+| ?_*[A-Z]+| ?\d| ?[^\w\s]|\w|\s", text)


class Vocabulary:
    """The most frequent words; all others are spelled in bytes, so nothing is unknown."""

    def __init__(self, functions: Iterable[Function], size: int) -> None:
        counts = collections.Counter(word for f in functions for word in split_words(f.prompt + f.body))
        self.words = [word for word, _ in counts.most_common(size - FIRST_WORD)]
        self.tokens = {word: FIRST_WORD + i for i, word in enumerate(self.words)}

    def encode(self, text: str) -> list[int]:
        def tokens_of(word: str) -> list[int]:
            return [self.tokens[word]] if word in self.tokens else [FIRST_BYTE + b for b in word.encode()]

        return [token for word in split_words(text) for token in tokens_of(word)]

    def decode(self, tokens: Iterable[int]) -> str:
        def bytes_of(token: int) -> bytes:
            if token < FIRST_WORD:
                return bytes([token - FIRST_BYTE]) if token != END else b""
            return self.words[token - FIRST_WORD].encode()

        return b"".join(bytes_of(int(token)) for token in tokens).decode(errors="replace")


class Rows(NamedTuple):
    """Packed rows, every array `[rows, length]`."""

    inputs: np.ndarray
    labels: np.ndarray  # the next token; IGNORED in prompts and padding
    segments: np.ndarray  # which function a token belongs to, from 1; 0 is padding
    positions: np.ndarray  # within the function

    def __getitem__(self, index: Any) -> "Rows":  # type: ignore[override]
        return Rows(*(array[index] for array in tuple(self)))


def pack(functions: Iterable[Function], vocabulary: Vocabulary, length: int) -> Rows:
    """Packs functions one after another, and starts a new row if one does not fit. Long ones are cut."""
    rows: list[tuple[np.ndarray, ...]] = []
    used, segment = length, 0
    for function in functions:
        prompt, body = vocabulary.encode(function.prompt), vocabulary.encode(function.body)
        tokens = np.array([*prompt, *body, END][: length + 1])
        number = len(tokens) - 1
        if used + number > length:
            rows.append((np.full(length, END), np.full(length, IGNORED), np.zeros(length, int), np.zeros(length, int)))
            used, segment = 0, 0
        inputs, labels, segments, positions = (array[used : used + number] for array in rows[-1])
        used, segment = used + number, segment + 1
        inputs[:], segments[:], positions[:] = tokens[:-1], segment, np.arange(number)
        labels[len(prompt) - 1 :] = tokens[len(prompt) :]
    return Rows(*map(np.stack, zip(*rows, strict=True)))


def prepare_data(config: Config) -> tuple[Rows, Rows, list[Function], Vocabulary]:
    """Rows for training, rows held out, the functions of these, and the vocabulary."""
    functions = read_functions()
    np.random.default_rng(config.seed).shuffle(functions)
    held_out, training = functions[:256], functions[256:]
    vocabulary = Vocabulary(training, config.vocabulary)
    return pack(training, vocabulary, config.length), pack(held_out, vocabulary, config.length), held_out, vocabulary


def batches(data: Rows, config: Config) -> Iterator[Rows]:
    rng = np.random.default_rng(config.seed)
    while True:
        yield data[rng.integers(len(data.labels), size=config.batch_size)]


# The model.


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


# Training.


class State(NamedTuple):
    """The state that a step updates."""

    params: Any
    optimizer: Any


class Trainer:
    """The model, its optimiser, and the compiled functions of both."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.graph, self.params = nnx.split(Decoder(config, nnx.Rngs(config.seed)))
        warmup = min(30, config.steps // 2)
        schedule = optax.warmup_cosine_decay_schedule(0.0, config.learning_rate, warmup, config.steps)
        self.optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
        self.evaluate = jax.jit(functools.partial(self.loss_of, masksafe_loss))

    def initial_state(self) -> State:
        return State(self.params, self.optimizer.init(self.params))

    def loss_of(self, loss: Loss, params: Any, batch: Rows) -> jax.Array:
        model = nnx.merge(self.graph, params)
        return loss(model.within_segments(batch), model.kernel[...], batch.labels)

    def make_step(self, loss: Loss) -> Callable[[State, Rows], tuple[State, jax.Array]]:
        @jax.jit
        def step(state: State, batch: Rows) -> tuple[State, jax.Array]:
            value, gradient = jax.value_and_grad(functools.partial(self.loss_of, loss))(state.params, batch)
            updates, optimizer = self.optimizer.update(gradient, state.optimizer, state.params)
            return State(optax.apply_updates(state.params, updates), optimizer), value

        return step

    def complete(self, params: Any, prompt: list[int], number: int, temperature: float = 0.6) -> list[int]:
        """The prompt, continued by the model with up to `number` tokens."""
        length = self.config.length
        tokens = prompt[: length - number]

        @jax.jit
        def next_token(inputs: jax.Array, at: jax.Array, key: jax.Array) -> jax.Array:
            ones = jnp.ones((1, length), int)
            model = nnx.merge(self.graph, params)
            features = model.within_segments(Rows(inputs[None], ones, ones, jnp.arange(length)[None]))[0, at]
            return jax.random.categorical(key, features @ model.kernel[...] / temperature)

        for key in jax.random.split(jax.random.key(self.config.seed), number):
            inputs = np.full(length, END)
            inputs[: len(tokens)] = tokens
            tokens = [*tokens, int(next_token(inputs, len(tokens) - 1, key))]
            if tokens[-1] == END:
                break
        return tokens


class History(NamedTuple):
    """The results of a training run."""

    params: Any
    losses: list[float]
    held_out: list[tuple[int, float]]  # step, loss


def train(trainer: Trainer, loss: Loss, data: Rows, held_out: Rows, console: Console) -> History:
    config, state = trainer.config, trainer.initial_state()
    step = trainer.make_step(loss)
    jax.block_until_ready(step(state, data[: config.batch_size]))  # compiles: the tokens in a second are without it
    losses, scores, tokens, seconds = [], [], 0, 0.0

    def report(number: int) -> None:
        parts = [held_out[i : i + config.batch_size] for i in range(0, len(held_out.labels), config.batch_size)]
        values, counts = zip(*((float(trainer.evaluate(state.params, p)), unmasked(p)) for p in parts), strict=True)
        scores.append((number, float(np.average(values, weights=counts))))
        console.print(f"step {number:4d}  held-out loss {scores[-1][1]:.4f}")

    report(0)
    with shared.progress("training", config.steps, console) as advance:
        for number, batch in zip(range(1, config.steps + 1), batches(data, config), strict=False):
            start = time.perf_counter()
            state, value = step(state, batch)
            losses.append(float(value))
            seconds, tokens = seconds + time.perf_counter() - start, tokens + unmasked(batch)
            advance(f"loss {losses[-1]:.3f}, {tokens / seconds:5.0f} tokens/s")
            if number % config.evaluate_every == 0 or number == config.steps:
                report(number)
    console.print(f"{tokens} unmasked tokens, {tokens / seconds:.0f} in a second")
    return History(state.params, losses, scores)


def unmasked(rows: Rows) -> int:
    return int(np.sum(rows.labels != IGNORED))


def compare(
    trainer: Trainer, data: Rows, rounds: int = 5, losses: Mapping[str, Callable[..., jax.Array]] = LOSSES
) -> dict[str, shared.Cost]:
    """The costs of a step with each loss, from the same state."""
    steps = {name: trainer.make_step(loss) for name, loss in losses.items()}
    return shared.costs_of(steps, (trainer.initial_state(), data[: trainer.config.batch_size]), rounds)


def plot(history: History, name: str, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(range(1, len(history.losses) + 1), history.losses, alpha=0.4, linewidth=1, label="training")
    axes.plot(*zip(*history.held_out, strict=True), "o-", label="held out")
    title = f"Bodies of functions from their signatures and docstrings ({name})"
    axes.set(xlabel="step", ylabel="cross-entropy per unmasked token (nats)", title=title)
    axes.set_ylim(bottom=0)
    axes.legend()
    shared.save(figure, path)


def main() -> None:
    parser = shared.parser_of(__doc__, steps=Config.steps, seed=Config.seed)
    parser.add_argument("--loss", choices=LOSSES, default="masksafe", help="to train with; default: %(default)s")
    arguments, console = parser.parse_args(), Console()
    config = Config(steps=arguments.steps, seed=arguments.seed)
    data, held_out, functions, vocabulary = prepare_data(config)
    console.print(f"{data.labels.size} tokens; {unmasked(data) / data.labels.size:.0%} of these are not masked")

    trainer = Trainer(config)
    shared.show_costs({"a training step": compare(trainer, data)}, "With each loss", console)
    history = train(trainer, LOSSES[arguments.loss], data, held_out, console)
    for function in [f for f in functions if '"""' in f.prompt and len(f.prompt) < 200][:3]:
        console.rule("a held-out prompt and what the model makes of it")
        text = vocabulary.decode(trainer.complete(history.params, vocabulary.encode(function.prompt), 60))
        console.print(Syntax(text, "python"))
    picture = arguments.output / "language_model.png"
    plot(history, arguments.loss, picture)
    console.print(f"the loss curve is in {picture}")


if __name__ == "__main__":
    main()
