"""BERT with padded texts: a norm behind the embedding, additive biases, and labels of -100.

The text that a bucket of one length pads may hold any ids there. flax's embedding gives NaN for those out of range.
"""

import jax
import jax.numpy as jnp
import optax
from layers import (
    Batch,
    Params,
    feed_forward,
    is_real,
    join_heads,
    layer_norm,
    make_params,
    of_feed_forward,
    split_heads,
)

import masksafe

SIZES = {
    "tiny": {"samples": 3, "length": 12, "width": 16, "vocabulary": 40, "layers": 1},
    "large": {"samples": 8, "length": 256, "width": 256, "vocabulary": 16384, "layers": 4},
}
IGNORED, PREDICTED = -100, 0.15


def make(key: jax.Array, samples: int, length: int, width: int, vocabulary: int, layers: int) -> tuple[Params, Batch]:
    kernels = {"query key value": (width, 3 * width), "out": (width, width), **of_feed_forward(width)}
    shapes = {
        "tokens": (vocabulary, width),
        "positions": (length, width),
        "norm": (width,),
        "layers": [kernels | {"attention norm": (width,), "norm": (width,)}] * layers,
        "head": (width, width),
    }
    keys = jax.random.split(key, 4)
    mask = is_real(keys[0], samples, length)
    ids = jax.random.randint(keys[1], mask.shape, 0, vocabulary)
    is_label = mask & jax.random.bernoulli(keys[2], PREDICTED, mask.shape)
    batch = {"ids": jnp.where(mask, ids, 0), "mask": mask, "labels": jnp.where(is_label, ids, IGNORED)}
    return make_params(keys[3], shapes), batch


def padding(batch: Batch) -> Batch:
    return {"ids": ~batch["mask"]}


def before(params: Params, batch: Batch) -> jax.Array:
    mask, labels = batch["mask"], batch["labels"]
    x = jnp.take(params["tokens"], batch["ids"], axis=0) + params["positions"]
    x = layer_norm(x, params["norm"])
    bias = jnp.where(mask, 0, -1e9)[:, None, None]
    for layer in params["layers"]:
        query, key, value = map(split_heads, jnp.split(x @ layer["query key value"], 3, axis=-1))
        logits = jnp.einsum("btnh,bsnh->bnts", query, key) / query.shape[-1] ** 0.5
        out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits + bias), value)
        x = layer_norm(x + join_heads(out) @ layer["out"], layer["attention norm"])
        x = layer_norm(x + feed_forward(x, layer), layer["norm"])
    features = jax.nn.gelu(x @ params["head"])
    is_label = labels != IGNORED
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(
        features @ params["tokens"].T, jnp.where(is_label, labels, 0)
    )
    return (losses * is_label).sum() / is_label.sum()


def after(params: Params, batch: Batch) -> jax.Array:
    mask, labels = batch["mask"], batch["labels"]
    x = jnp.take(params["tokens"], batch["ids"], axis=0) + params["positions"]
    x = layer_norm(masksafe.keep(x, where=mask[..., None]), params["norm"])
    for layer in params["layers"]:
        query, key, value = map(split_heads, jnp.split(x @ layer["query key value"], 3, axis=-1))
        out = masksafe.dot_product_attention(query, key, value, mask=mask[:, None, None])
        x = layer_norm(x + join_heads(out) @ layer["out"], layer["attention norm"])
        x = layer_norm(x + feed_forward(x, layer), layer["norm"])
    features = jax.nn.gelu(x @ params["head"])
    is_label = labels != IGNORED
    return masksafe.losses.linear_softmax_cross_entropy(features, params["tokens"].T, labels, where=is_label)
