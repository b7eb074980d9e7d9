"""A complete language model in flax nnx: packed documents, several devices, and a debug run that checks the labels.

It learns the source of Python's standard library byte by byte. A class or a function is a document.

    python examples/packed_documents.py  # about two minutes on two cores
    XLA_FLAGS=--xla_force_host_platform_device_count=2 python examples/packed_documents.py  # on two devices
"""

import dataclasses
import functools
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import checkify

import masksafe


@dataclasses.dataclass(frozen=True)
class Config:
    vocabulary: int = 256  # the bytes
    length: int = 512
    rows: int = 8
    width: int = 128
    heads: int = 4
    layers: int = 2
    steps: int = 201


class Batch(NamedTuple):
    """Packed rows, `[rows, length]` each; segment 0 is padding."""

    tokens: Any
    segments: Any
    positions: Any


def read_documents() -> list[bytes]:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return [document for file in files for document in file.read_bytes().split(b"\n\n\n") if document]


def pack(documents: Iterable[bytes], length: int) -> Batch:
    """Puts each document behind the one before, if it fits, else into a new row. Long ones are cut."""
    rows: list[Batch] = []
    used = length
    for document in documents:
        tokens = np.frombuffer(document[:length], np.uint8)
        if used + len(tokens) > length:
            rows.append(Batch(*np.zeros((3, length), np.int32)))
            used, segment = 0, 0
        here, segment = slice(used, used + len(tokens)), segment + 1
        for row, values in zip(rows[-1], (tokens, segment, np.arange(len(tokens))), strict=True):
            row[here] = values
        used += len(tokens)
    return Batch(*map(np.stack, zip(*rows, strict=True)))


class Layer(nnx.Module):
    """Causal attention within each document, and a feed-forward network."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        width = config.width
        self.heads = config.heads
        self.norms = nnx.List([masksafe.adapters.nnx.RMSNorm(width, rngs=rngs) for _ in range(2)])
        self.query_key_value = nnx.Linear(width, 3 * width, rngs=rngs)
        self.out = nnx.Linear(width, width, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array, segments: jax.Array) -> jax.Array:
        heads = self.query_key_value(self.norms[0](x)).reshape(*x.shape[:-1], 3 * self.heads, -1)
        seen = masksafe.dot_product_attention(
            *jnp.split(heads, 3, axis=-2), is_causal=True, query_segment_ids=segments, key_value_segment_ids=segments
        )
        x += self.out(seen.reshape(x.shape))
        return x + self.down(jax.nn.gelu(self.up(self.norms[1](x))))


class Decoder(nnx.Module):
    """The features of each token, and the kernel of the layer that would make them logits."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(config.vocabulary, config.width, rngs=rngs)
        self.place = nnx.Embed(config.length, config.width, rngs=rngs)
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config.layers)])
        self.norm = masksafe.adapters.nnx.RMSNorm(config.width, rngs=rngs)
        self.kernel = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (config.width, config.vocabulary)))

    def __call__(self, batch: Batch) -> jax.Array:
        x = self.embed(batch.tokens) + self.place(batch.positions)
        for layer in self.layers:
            x = layer(x, batch.segments)
        return self.norm(x)


def loss_of(graph: Any, params: Any, batch: Batch) -> masksafe.MaskedMean:
    """The sum over the tokens that have a next one in their document, and their number."""
    model = nnx.merge(graph, params)
    labels, mask = masksafe.next_tokens(batch.tokens, batch.segments, where=batch.segments > 0)
    cross_entropy = masksafe.losses.linear_softmax_cross_entropy
    total = cross_entropy(model(batch), model.kernel[...], labels, where=mask, reduction="sum")
    return masksafe.MaskedMean(total, mask.sum())


def check_labels(loss: Callable[..., Any], params: Any, batch: Batch) -> None:
    """A debug run of one batch: an error names the first label out of range."""
    with masksafe.label_checks("checkify"):
        error, _ = jax.jit(checkify.checkify(loss))(params, batch)
    error.throw()


def train(config: Config, data: Batch) -> Iterator[float]:
    """The loss of each step: the mean over the tokens of all devices, however many each of them has."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    everywhere, split = jax.P(), jax.P("data")
    graph, params = nnx.split(Decoder(config, nnx.Rngs(0)))
    loss, optimizer = functools.partial(loss_of, graph), optax.adam(3e-3)
    value_and_grad = masksafe.value_and_grad_of_mean(loss, axis_name="data")
    on_devices = jax.shard_map(value_and_grad, mesh=mesh, in_specs=(everywhere, split), out_specs=everywhere)

    @jax.jit
    def step(params: Any, state: Any, batch: Batch) -> tuple[Any, Any, jax.Array]:
        value, gradients = on_devices(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    check_labels(loss, params, Batch(*(array[: config.rows] for array in data)))
    params, state = jax.device_put((params, optimizer.init(params)), jax.NamedSharding(mesh, everywhere))
    rng = np.random.default_rng(0)
    for _ in range(config.steps):
        chosen = rng.integers(len(data.tokens), size=config.rows)
        batch = jax.device_put(Batch(*(array[chosen] for array in data)), jax.NamedSharding(mesh, split))
        params, state, value = step(params, state, batch)
        yield float(value)


if __name__ == "__main__":
    data = pack(read_documents(), Config.length)
    print(
        f"devices: {jax.device_count()}, tokens: {data.tokens.size}, padding: {np.mean(data.segments == 0):.0%}",
        flush=True,
    )
    for number, value in enumerate(train(Config(), data)):
        if number % 5 == 0:
            print(f"step {number:3d}  loss {value:.3f}", flush=True)
