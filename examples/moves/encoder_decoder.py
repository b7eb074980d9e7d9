"""An encoder and a decoder over packed sentences, as in T5X: segments from 1 on, 0 is padding, and biases of -1e10."""

import jax
import jax.numpy as jnp
import optax
from layers import Arrays, Batch, Params, feed_forward, join_heads, make_params, of_feed_forward, rms_norm, split_heads

import masksafe

SIZES = {
    "tiny": {"samples": 2, "length": 12, "width": 16, "vocabulary": 40, "layers": 1},
    "large": {"samples": 4, "length": 512, "width": 256, "vocabulary": 16384, "layers": 2},
}
SENTENCES = 4  # of a row
SIDES = "sources", "targets"


def make(key: jax.Array, samples: int, length: int, width: int, vocabulary: int, layers: int) -> tuple[Params, Batch]:
    attention = dict.fromkeys(("query", "key", "value", "out"), (width, width))
    encoder = {"self": attention, "norm": (width,), "feed-forward norm": (width,), **of_feed_forward(width)}
    decoder = encoder | {"cross": attention, "cross norm": (width,)}
    shapes = {
        "tokens": (vocabulary, width),
        "encoder": [encoder] * layers,
        "decoder": [decoder] * layers,
        "norms": [(width,), (width,)],
        "kernel": (width, vocabulary),
    }
    of_params, *keys = jax.random.split(key, 4)
    ids = {name: jax.random.randint(k, (samples, length), 1, vocabulary) for name, k in zip(SIDES, keys, strict=False)}
    labels = {"labels": jax.random.randint(keys[2], (samples, length), 1, vocabulary)}
    segments = {f"{name} segments": pack(samples, length, offset) for offset, name in enumerate(SIDES)}
    return make_params(of_params, shapes), ids | labels | segments


def pack(samples: int, length: int, offset: int) -> jax.Array:
    """Segments of a row, longer the later they come; the rest of the row, more in later rows, is padding."""
    ends = length * (jnp.arange(SENTENCES) + 1) ** 2 // (SENTENCES**2 + 2 + offset)
    numbers = 1 + jnp.searchsorted(ends, jnp.arange(length), side="right")
    is_padding = jnp.arange(length) >= ends[-1] - jnp.arange(samples)[:, None]
    return jnp.where(is_padding, 0, numbers)


def padding(batch: Batch) -> Batch:
    of_side = {name: batch[f"{name} segments"] == 0 for name in SIDES}
    return of_side | {"labels": of_side["targets"]}


def before(params: Params, batch: Batch) -> jax.Array:
    sources, targets = batch["sources segments"], batch["targets segments"]

    def attend(layer: Arrays, x: jax.Array, y: jax.Array, bias: jax.Array) -> jax.Array:
        query, key, value = (split_heads(z @ layer[name]) for z, name in ((x, "query"), (y, "key"), (y, "value")))
        logits = jnp.einsum("btnh,bsnh->bnts", query, key) / query.shape[-1] ** 0.5 + bias
        out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits), value)
        return join_heads(out) @ layer["out"]

    def bias_of(queries: jax.Array, keys: jax.Array) -> jax.Array:
        same = (queries[:, :, None] == keys[:, None]) & (queries > 0)[:, :, None]
        return jnp.where(same, 0, -1e10)[:, None]

    x = jnp.take(params["tokens"], batch["sources"], axis=0)
    bias = bias_of(sources, sources)
    for layer in params["encoder"]:
        y = rms_norm(x, layer["norm"])
        x += attend(layer["self"], y, y, bias)
        x += feed_forward(rms_norm(x, layer["feed-forward norm"]), layer)
    encoded = rms_norm(x, params["norms"][0])
    x = jnp.take(params["tokens"], batch["targets"], axis=0)
    causal = jnp.where(jnp.tri(x.shape[1], dtype=bool), bias_of(targets, targets), -1e10)
    bias = bias_of(targets, sources)
    for layer in params["decoder"]:
        y = rms_norm(x, layer["norm"])
        x += attend(layer["self"], y, y, causal)
        x += attend(layer["cross"], rms_norm(x, layer["cross norm"]), encoded, bias)
        x += feed_forward(rms_norm(x, layer["feed-forward norm"]), layer)
    logits = rms_norm(x, params["norms"][1]) @ params["kernel"]
    weights = targets > 0
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return (losses * weights).sum() / weights.sum()


def after(params: Params, batch: Batch) -> jax.Array:
    sources, targets = batch["sources segments"], batch["targets segments"]

    def attend(
        layer: Arrays, x: jax.Array, y: jax.Array, queries: jax.Array, keys: jax.Array, is_causal: bool = False
    ) -> jax.Array:
        query, key, value = (split_heads(z @ layer[name]) for z, name in ((x, "query"), (y, "key"), (y, "value")))
        out = masksafe.dot_product_attention(
            query, key, value, is_causal=is_causal, query_segment_ids=queries, key_value_segment_ids=keys
        )
        return join_heads(out) @ layer["out"]

    x = masksafe.keep(jnp.take(params["tokens"], batch["sources"], axis=0), where=(sources > 0)[..., None])
    for layer in params["encoder"]:
        y = rms_norm(x, layer["norm"])
        x += attend(layer["self"], y, y, sources, sources)
        x += feed_forward(rms_norm(x, layer["feed-forward norm"]), layer)
    encoded = rms_norm(x, params["norms"][0])
    x = masksafe.keep(jnp.take(params["tokens"], batch["targets"], axis=0), where=(targets > 0)[..., None])
    for layer in params["decoder"]:
        y = rms_norm(x, layer["norm"])
        x += attend(layer["self"], y, y, targets, targets, is_causal=True)
        x += attend(layer["cross"], rms_norm(x, layer["cross norm"]), encoded, targets, sources)
        x += feed_forward(rms_norm(x, layer["feed-forward norm"]), layer)
    features = rms_norm(x, params["norms"][1])
    return masksafe.losses.linear_softmax_cross_entropy(features, params["kernel"], batch["labels"], where=targets > 0)
