"""Generates the bodies of functions from a cache of keys and values: ragged prompts in one batch, replaced when done.

The decoder of `language_model.py` is trained for a short while, and then continues held-out prompts greedily. Every
place of the cache knows the position of its key. So prompts of unequal length, a cache that is written
in turn for an attention with a window, and rows that are taken over by the next prompt are one and the same: a query
sees the keys whose positions its mask allows, and a place without a key lies in the future. At first the cache is full
of NaN, which changes no bit.

    python examples/generate.py                # a minute and a half on two cores
    python examples/generate.py --window 64    # attention with a window, and a cache of 95 places

Options are the steps of the training, the prompts, the most tokens for each, the rows of the batch, the places of the
cache, and how many tokens of a prompt are read at a time, a chunk.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import language_model
import numpy as np
import shared
from bodies import END, Rows, prepare_data
from flax import nnx
from language_model import Attend, Decoder, Trainer
from rich.console import Console
from rich.syntax import Syntax

import masksafe

FUTURE = 2**29  # the position of a place without a key, and of padding: no query sees it


class Cache(NamedTuple):
    """Keys and values `[layers, rows, places, heads, width]`, and the position of the key in each place."""

    keys: jax.Array
    values: jax.Array
    positions: jax.Array  # [rows, places]


def empty_cache(config: language_model.Config, rows: int, places: int, garbage: float = np.nan) -> Cache:
    shape = config.layers, rows, places, config.heads, config.width // config.heads
    keys, values = (jnp.full(shape, garbage, jnp.float32) for _ in range(2))
    return Cache(keys, values, jnp.full((rows, places), FUTURE, jnp.int32))


class Generator:
    """The decoder with a cache, compiled twice: for chunks of prompts, and for single tokens."""

    def __init__(self, graph: Any, params: Any, window: int | None = None) -> None:
        self.graph, self.params = graph, params
        self.masks = {"is_causal": True, "local_window_size": window and (window - 1, 0)}
        self.advance = jax.jit(self._advance, donate_argnums=1)

    def _advance(self, params: Any, cache: Cache, tokens: jax.Array, positions: jax.Array) -> tuple[Cache, jax.Array]:
        """The cache after tokens `[rows, n]` at positions, FUTURE for padding, and the logits of the tokens after them.

        These are `[rows, classes]`, each of its row's last token.
        """
        model: Decoder = nnx.merge(self.graph, params)
        is_real = positions < FUTURE
        # Padding is written to a place that is not there, and so is dropped.
        places = jnp.where(is_real, positions % cache.positions.shape[1], cache.positions.shape[1])
        write = lambda array, x: array.at[jnp.arange(len(tokens))[:, None], places].set(x, mode="drop")  # noqa: E731
        cache = cache._replace(positions=write(cache.positions, positions))
        keys, values = [], []

        def attend_in(layer: int) -> Attend:
            def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
                keys.append(write(cache.keys[layer], key))
                values.append(write(cache.values[layer], value))
                masks = self.masks | {"query_positions": positions, "key_positions": cache.positions}
                return masksafe.dot_product_attention(query, keys[-1], values[-1], **masks)

            return attend

        features = model(tokens, jnp.where(is_real, positions, 0), map(attend_in, range(len(model.layers))))
        last = jnp.argmax(jnp.where(is_real, positions, -1), 1)
        cache = cache._replace(keys=jnp.stack(keys), values=jnp.stack(values))
        return cache, features[jnp.arange(len(last)), last] @ model.kernel[...]


def prefill(generator: Generator, cache: Cache, prompts: Sequence[Sequence[int]], chunk: int) -> tuple[Cache, Any]:
    """The cache after the prompts, a chunk of all of them at a time, and the next token of each row.

    An empty prompt leaves its row as it is.
    """
    length = -(-max(map(len, prompts)) // chunk) * chunk
    tokens, positions = np.full((len(prompts), length), END), np.full((len(prompts), length), FUTURE)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
        positions[row, : len(prompt)] = np.arange(len(prompt))
    following = np.full(len(prompts), END)
    for start in range(0, length, chunk):
        part = slice(start, start + chunk)
        cache, logits = generator.advance(generator.params, cache, tokens[:, part], positions[:, part])
        has_any = (positions[:, part] < FUTURE).any(1)
        following = np.where(has_any, np.asarray(logits).argmax(-1), following)
    return cache, following


def free_rows(cache: Cache, rows: np.ndarray) -> Cache:
    """The cache with those rows forgotten; what they hold stays, and is masked."""
    return cache._replace(positions=jnp.where(jnp.asarray(rows)[:, None], FUTURE, cache.positions))


class Text(NamedTuple):
    """A prompt and what was generated from it."""

    number: int
    tokens: list[int]
    generated: list[int]


def generate(
    generator: Generator, cache: Cache, prompts: Sequence[Sequence[int]], most: int, chunk: int
) -> tuple[list[Text], int]:
    """Continues all prompts by up to `most` tokens, as many at a time as the cache has rows; and how many it made.

    A row that is done is taken over by the next prompt.
    """
    waiting = [Text(i, list(prompt), []) for i, prompt in enumerate(prompts)][::-1]
    number = cache.positions.shape[0]
    running: list[Text | None] = [None] * number
    following: np.ndarray = np.full(number, END)
    done, made = [], 0
    while waiting or any(running):
        free = np.array([text is None for text in running])
        if waiting and free.any():
            new: list[Text | None] = [waiting.pop() if is_free and waiting else None for is_free in free]
            cache = free_rows(cache, free)
            cache, first = prefill(generator, cache, [text.tokens if text else [] for text in new], chunk)
            running = [text or old for text, old in zip(new, running, strict=True)]
            following = np.where([text is not None for text in new], first, following)
        for row, text in enumerate(running):
            if text is not None:
                text.generated.append(int(following[row]))
                made += 1
                if following[row] == END or len(text.generated) == most:
                    done.append(text)
                    running[row] = None
        positions = [len(t.tokens) + len(t.generated) - 1 if t else FUTURE for t in running]
        if any(running):
            step = following[:, None], np.array(positions)[:, None]
            cache, logits = generator.advance(generator.params, cache, *step)
            following = np.asarray(logits).argmax(-1)
    return sorted(done), made


def generate_without_cache(trainer: Trainer, params: Any, prompt: Sequence[int], most: int, length: int) -> list[int]:
    """The same for one prompt, by the full forward pass over a row of fixed length for every token."""

    @jax.jit
    def next_token(params: Any, tokens: jax.Array, at: jax.Array) -> jax.Array:
        model = nnx.merge(trainer.graph, params)
        ones, index = jnp.ones((1, length), int), jnp.arange(length)[None]
        features = model.within_segments(Rows(tokens, None, ones, index))
        return jnp.argmax(features[0, at] @ model.kernel[...])

    generated: list[int] = []
    while len(generated) < most and END not in generated:
        text = [*prompt, *generated]
        tokens = np.array([text + [END] * (length - len(text))])
        generated.append(int(next_token(params, tokens, len(text) - 1)))
    return generated


def main() -> None:
    parser = shared.parser_of(__doc__, writes=False, steps=120, rows=4, prompts=12, tokens=48, chunk=32, places=512)
    parser.add_argument("--window", type=int, help="keys that a query sees, itself included; default: all")
    options, console = parser.parse_args(), Console()
    config = language_model.Config(steps=options.steps, evaluate_every=options.steps)
    data, held_out, functions, vocabulary = prepare_data(config)
    trainer = Trainer(config)
    params = language_model.train(trainer, language_model.masksafe_loss, data, held_out, console).params
    most = config.length - options.tokens
    prompts = [vocabulary.encode(f.prompt)[:most] for f in functions if f.prompt.count('"""') == 2][: options.prompts]

    generator = Generator(trainer.graph, params, options.window)
    places = options.places if options.window is None else options.window + options.chunk - 1
    for _ in range(2):  # the second run is without compiling
        start, cache = time.perf_counter(), empty_cache(config, options.rows, places)
        texts, made = generate(generator, cache, prompts, options.tokens, options.chunk)
        seconds = time.perf_counter() - start
    console.print(f"{made / seconds:.0f} tokens a second")
    if options.window is None:
        full = [generate_without_cache(trainer, params, p, options.tokens, config.length) for p in prompts[:3]]
        same = [text.generated for text in texts[:3]] == full
        console.print(f"The tokens are {'' if same else 'NOT '}those of the full forward pass.")
    for text in texts[:2]:
        console.rule("a prompt and its continuation")
        console.print(Syntax(vocabulary.decode([*text.tokens, *text.generated]), "python"))


if __name__ == "__main__":
    main()
