"""Speech recognition with padded frames, as in wav2vec2: norms over time, convolutions, and the CTC loss."""

import jax
import jax.numpy as jnp
import optax
from layers import Batch, Params, feed_forward, is_real, layer_norm, make_params, of_feed_forward

import masksafe

SIZES = {
    "tiny": {"samples": 3, "frames": 12, "width": 8, "layers": 1},
    "large": {"samples": 8, "frames": 400, "width": 256, "layers": 3},
}
FEATURES, CLASSES, REACH, FRAMES_OF_LABEL = 40, 32, 3, 5


def make(key: jax.Array, samples: int, frames: int, width: int, layers: int) -> tuple[Params, Batch]:
    layer = {"convolution": (REACH, width, width), "norm": (width,), **of_feed_forward(width)}
    shapes = {"in": (FEATURES, width), "layers": [layer] * layers, "norm": (width,), "classes": (width, CLASSES)}
    keys = iter(jax.random.split(key, 4))
    is_frame = is_real(next(keys), samples, frames)
    most = frames // FRAMES_OF_LABEL
    is_label = jnp.arange(most) < is_frame.sum(1, keepdims=True) // FRAMES_OF_LABEL
    batch = {
        "frames": jax.random.normal(next(keys), (*is_frame.shape, FEATURES)) * is_frame[..., None],
        "is frame": is_frame,
        "labels": jax.random.randint(next(keys), is_label.shape, 1, CLASSES) * is_label,
        "is label": is_label,
    }
    return make_params(next(keys), shapes), batch


def padding(batch: Batch) -> Batch:
    return {"frames": ~batch["is frame"][..., None], "labels": ~batch["is label"]}


def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))


def before(params: Params, batch: Batch) -> jax.Array:
    is_frame, is_label = batch["is frame"], batch["is label"]
    mask = is_frame[..., None].astype(jnp.float32)
    x = batch["frames"] @ params["in"]
    for layer in params["layers"]:
        mean = (x * mask).sum(1, keepdims=True) / mask.sum(1, keepdims=True)
        variance = ((x - mean) ** 2 * mask).sum(1, keepdims=True) / mask.sum(1, keepdims=True)
        y = (x - mean) * jax.lax.rsqrt(variance + 1e-5) * mask
        x += jax.nn.gelu(convolve(y, layer["convolution"]))
        x += feed_forward(layer_norm(x, layer["norm"]), layer)
    logits = layer_norm(x, params["norm"]) @ params["classes"]
    losses = optax.losses.ctc_loss(logits, 1 - mask[..., 0], batch["labels"], ~is_label)
    return losses.sum() / is_label.sum()


def after(params: Params, batch: Batch) -> jax.Array:
    is_frame, is_label = batch["is frame"], batch["is label"]
    x = masksafe.keep(batch["frames"], where=is_frame[..., None]) @ params["in"]
    for layer in params["layers"]:
        y = masksafe.standardize(x, axis=1, where=is_frame[..., None])
        x += jax.nn.gelu(convolve(y, layer["convolution"]))
        x += feed_forward(layer_norm(x, layer["norm"]), layer)
    logits = layer_norm(x, params["norm"]) @ params["classes"]
    losses = masksafe.losses.ctc_loss(logits, ~is_frame, batch["labels"], ~is_label)
    return losses.sum() / is_label.sum()
