"""Denoising of padded sets of points, as in diffusion models of molecules: centres, attention, a pooled context."""

import jax
import jax.numpy as jnp
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
    "tiny": {"samples": 3, "points": 6, "width": 8, "layers": 1},
    "large": {"samples": 32, "points": 128, "width": 128, "layers": 3},
}
AXES = 3


def make(key: jax.Array, samples: int, points: int, width: int, layers: int) -> tuple[Params, Batch]:
    layer = {
        "norm": (width,),
        "query key value": (width, 3 * width),
        "out": (width, width),
        "context": (width, width),
        "feed-forward norm": (width,),
        **of_feed_forward(width),
    }
    shapes = {
        "in": (AXES, width),
        "time": (2, width),
        "layers": [layer] * layers,
        "norm": (width,),
        "out": (width, AXES),
    }
    keys = iter(jax.random.split(key, 5))
    is_point = is_real(next(keys), samples, points)
    batch = {
        "points": jax.random.normal(next(keys), (*is_point.shape, AXES)) * is_point[..., None],
        "noise": jax.random.normal(next(keys), (*is_point.shape, AXES)),
        "times": jax.random.uniform(next(keys), (samples,)),
        "is point": is_point,
    }
    return make_params(next(keys), shapes), batch


def padding(batch: Batch) -> Batch:
    return dict.fromkeys(("points", "noise"), ~batch["is point"][..., None])


def before(params: Params, batch: Batch) -> jax.Array:
    is_point = batch["is point"]
    points, noise = batch["points"], batch["noise"]
    mask = is_point[..., None].astype(jnp.float32)
    count = mask.sum(1, keepdims=True)
    points -= (points * mask).sum(1, keepdims=True) / count
    angle = jnp.pi / 2 * batch["times"][:, None, None]
    noised = jnp.cos(angle) * points + jnp.sin(angle) * noise
    x = noised @ params["in"] + jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1) @ params["time"]
    for layer in params["layers"]:
        y = layer_norm(x, layer["norm"])
        query, key, value = map(split_heads, jnp.split(y @ layer["query key value"], 3, axis=-1))
        logits = jnp.einsum("btnh,bsnh->bnts", query, key) / query.shape[-1] ** 0.5
        weights = jax.nn.softmax(jnp.where(is_point[:, None, None], logits, -1e9))
        out = jnp.einsum("bnts,bsnh->btnh", weights, value)
        x += join_heads(out) @ layer["out"] + (y * mask).sum(1, keepdims=True) / count @ layer["context"]
        x += feed_forward(layer_norm(x, layer["feed-forward norm"]), layer)
    errors = (layer_norm(x, params["norm"]) @ params["out"] - noise) ** 2
    return (errors * mask).sum() / (AXES * count.sum())


def after(params: Params, batch: Batch) -> jax.Array:
    is_point = batch["is point"]
    mask = is_point[..., None]
    points, noise = (masksafe.keep(batch[name], where=mask) for name in ("points", "noise"))
    points -= masksafe.mean(points, axis=1, keepdims=True, where=mask)
    angle = jnp.pi / 2 * batch["times"][:, None, None]
    noised = jnp.cos(angle) * points + jnp.sin(angle) * noise
    x = noised @ params["in"] + jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1) @ params["time"]
    for layer in params["layers"]:
        y = layer_norm(x, layer["norm"])
        query, key, value = map(split_heads, jnp.split(y @ layer["query key value"], 3, axis=-1))
        out = masksafe.dot_product_attention(query, key, value, mask=is_point[:, None, None])
        x += join_heads(out) @ layer["out"] + masksafe.mean(y, axis=1, keepdims=True, where=mask) @ layer["context"]
        x += feed_forward(layer_norm(x, layer["feed-forward norm"]), layer)
    errors = masksafe.losses.squared_error(layer_norm(x, params["norm"]) @ params["out"], noise, where=mask)
    return masksafe.mean(errors, where=mask)
