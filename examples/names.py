"""The data and the model of `train_names.py` and `policy_gradient.py`: names of functions, written from docstrings.

The data is full of padding: docstrings and names have different lengths, and most functions have no docstring at all,
so their context is only padding. The model is a small encoder-decoder in plain JAX, with masksafe's attention.
"""

import ast
import collections
import dataclasses
import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import shared

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
    decoder_layers: int = 2
    batch_size: int = 64
    steps: int = 900
    learning_rate: float = 3e-3
    evaluate_every: int = 100
    seed: int = 0


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


# The model.


def init_params(config: Config) -> Params:
    keys = iter(jax.random.split(jax.random.key(config.seed), 1000))
    width = config.width

    def dense(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * shape[0] ** -0.5

    def attention_params() -> Params:
        return {name: dense(width, width) for name in ("query", "key", "value", "out")}

    def layer(*kinds: str) -> Params:
        of_kinds = {kind: attention_params() for kind in kinds}
        return of_kinds | {"up": dense(width, 4 * width), "down": dense(4 * width, width)}

    return {
        "words": 0.1 * WORDS**0.5 * dense(WORDS, width),
        "characters": 0.1 * CHARACTERS**0.5 * dense(CHARACTERS, width),
        "word_positions": 0.1 * dense(config.docstring_length, width),
        "character_positions": 0.1 * dense(config.name_length, width),
        "encoder": layer("self"),
        "decoder": [layer("self", "cross") for _ in range(config.decoder_layers)],
        "logits": 0.1 * dense(width, CHARACTERS),
    }


def normalise(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def keys_and_values(params: Params, context: jax.Array, heads: int) -> tuple[jax.Array, jax.Array]:
    """Of context [batch, keys, width], both [batch, keys, heads, width / heads]."""
    shape = *context.shape[:-1], heads, -1
    return (context @ params["key"]).reshape(shape), (context @ params["value"]).reshape(shape)


def attend(params: Params, x: jax.Array, keys: jax.Array, values: jax.Array, **masks: Any) -> jax.Array:
    """Multi-head attention of x [batch, time, width]. A sample whose context is only padding gets 0."""
    query = (x @ params["query"]).reshape(*x.shape[:-1], *keys.shape[-2:])
    return masksafe.dot_product_attention(query, keys, values, **masks).reshape(x.shape) @ params["out"]


def feed_forward(params: Params, x: jax.Array) -> jax.Array:
    return jax.nn.gelu(normalise(x) @ params["up"]) @ params["down"]


def encode(params: Params, docstrings: jax.Array, heads: int) -> tuple[jax.Array, jax.Array]:
    """The words of the docstrings in context [batch, docstring_length, width], and how many there are [batch]."""
    lengths, layer = jnp.sum(docstrings != PAD, -1), params["encoder"]
    x = params["words"][docstrings] + params["word_positions"]
    normal = normalise(x)
    own = keys_and_values(layer["self"], normal, heads)
    x += attend(layer["self"], normal, *own, key_value_seq_lengths=lengths)
    x += feed_forward(layer, x)
    return normalise(x), lengths


def features_of(params: Params, docstrings: jax.Array, inputs: jax.Array, heads: int) -> jax.Array:
    """The features that the output layer gets for each character, [batch, name_length, width]."""
    context, lengths = encode(params, docstrings, heads)
    x = params["characters"][inputs] + params["character_positions"]
    for layer in params["decoder"]:
        normal = normalise(x)
        x += attend(layer["self"], normal, *keys_and_values(layer["self"], normal, heads), is_causal=True)
        cross = keys_and_values(layer["cross"], context, heads)
        x += attend(layer["cross"], normalise(x), *cross, key_value_seq_lengths=lengths)
        x += feed_forward(layer, x)
    return normalise(x)


@functools.partial(jax.jit, static_argnames=("heads", "temperature"))
def sample(params: Params, docstrings: jax.Array, key: jax.Array, heads: int, temperature: float) -> jax.Array:
    """Names [rows, name_length], a character at a time from a cache of keys and values; IGNORED behind END."""
    context, lengths = encode(params, docstrings, heads)
    layers = params["decoder"]
    crossed = [keys_and_values(layer["cross"], context, heads) for layer in layers]
    rows, (length, width) = len(docstrings), params["character_positions"].shape
    # No query sees a place that is not yet written, so it may hold anything.
    places = jnp.full((rows, length, heads, width // heads), jnp.nan)

    def step(state: Any, at: jax.Array) -> Any:
        caches, character, is_done = state
        x = (params["characters"][character] + params["character_positions"][at])[:, None]
        written = []
        for layer, cache, cross in zip(layers, caches, crossed, strict=True):
            normal = normalise(x)
            new = keys_and_values(layer["self"], normal, heads)
            cache = tuple(old.at[:, at].set(x[:, 0]) for old, x in zip(cache, new, strict=True))
            x += attend(layer["self"], normal, *cache, key_value_seq_lengths=jnp.full(rows, at + 1))
            x += attend(layer["cross"], normalise(x), *cross, key_value_seq_lengths=lengths)
            x += feed_forward(layer, x)
            written.append(cache)
        logits = normalise(x)[:, 0] @ params["logits"]
        character = jax.random.categorical(jax.random.fold_in(key, at), logits / temperature)
        return (written, character, is_done | (character == END)), jnp.where(is_done, IGNORED, character)

    start = [(places, places)] * len(layers), jnp.full(rows, START), jnp.zeros(rows, bool)
    return jax.lax.scan(step, start, jnp.arange(length))[1].T
