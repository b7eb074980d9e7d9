"""The losses of DETR with padded boxes: a matching of queries with boxes is given, and all that are left match padding.

A box is x and y of its middle, width and height. All layers of the decoder predict classes and boxes.
"""

import jax
import jax.numpy as jnp
import optax
from layers import Batch, Params, is_real, make_params

import masksafe

SIZES = {
    "tiny": {"layers": 2, "samples": 3, "queries": 8, "width": 8},
    "large": {"layers": 6, "samples": 16, "queries": 100, "width": 256},
}
CLASSES, NO_OBJECT, WEIGHT_OF_NONE = 92, 91, 0.1


def make(key: jax.Array, layers: int, samples: int, queries: int, width: int) -> tuple[Params, Batch]:
    shapes = {"classes": (width, CLASSES), "hidden": (width, width), "box": (width, 4)}
    keys = iter(jax.random.split(key, 6))
    is_object = is_real(next(keys), samples, queries // 2)
    is_object = jnp.pad(is_object, ((0, 0), (0, queries - is_object.shape[1])))
    numbers = jnp.broadcast_to(jnp.arange(queries), is_object.shape)
    batch = {
        "features": jax.random.normal(next(keys), (layers, samples, queries, width)),
        "labels": jax.random.randint(next(keys), is_object.shape, 0, NO_OBJECT),
        "boxes": jax.random.uniform(next(keys), (*is_object.shape, 4), minval=0.1) * is_object[..., None],
        "is object": is_object,
        "matching": jax.random.permutation(next(keys), numbers, axis=1, independent=True),
    }
    return make_params(next(keys), shapes), batch


def padding(batch: Batch) -> Batch:
    return {"labels": ~batch["is object"], "boxes": ~batch["is object"][..., None]}


def overlap(first: jax.Array, second: jax.Array) -> jax.Array:
    """The generalized intersection over union."""
    low, high = ([box[..., :2] + sign * box[..., 2:] / 2 for box in (first, second)] for sign in (-1, 1))
    common = jnp.maximum(jnp.minimum(*high) - jnp.maximum(*low), 0).prod(-1)
    union = first[..., 2:].prod(-1) + second[..., 2:].prod(-1) - common
    around = (jnp.maximum(*high) - jnp.minimum(*low)).prod(-1)
    return common / union - (around - union) / around


def before(params: Params, batch: Batch) -> jax.Array:
    features, matching = batch["features"], batch["matching"]
    labels, is_object = (jnp.take_along_axis(batch[name], matching, axis=1) for name in ("labels", "is object"))
    boxes = jnp.take_along_axis(batch["boxes"], matching[..., None], axis=1)
    labels = jnp.broadcast_to(jnp.where(is_object, labels, NO_OBJECT), features.shape[:-1])
    weights = jnp.where(labels == NO_OBJECT, WEIGHT_OF_NONE, 1.0)
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(features @ params["classes"], labels)
    of_classes = (losses * weights).sum() / weights.sum()
    found = jax.nn.sigmoid(jax.nn.relu(features @ params["hidden"]) @ params["box"])
    of_boxes = 5 * jnp.abs(found - boxes).sum(-1) + 2 * (1 - overlap(found, boxes))
    return of_classes + (of_boxes * is_object).sum() / jnp.maximum(len(features) * is_object.sum(), 1)


def after(params: Params, batch: Batch) -> jax.Array:
    features, matching = batch["features"], batch["matching"]
    labels, is_object = (jnp.take_along_axis(batch[name], matching, axis=1) for name in ("labels", "is object"))
    boxes = jnp.take_along_axis(batch["boxes"], matching[..., None], axis=1)
    boxes = masksafe.keep(boxes, where=is_object[..., None])
    labels = jnp.broadcast_to(jnp.where(is_object, labels, NO_OBJECT), features.shape[:-1])
    weights = jnp.where(jnp.arange(CLASSES) == NO_OBJECT, WEIGHT_OF_NONE, 1.0)
    of_classes = masksafe.losses.linear_softmax_cross_entropy(
        features, params["classes"], labels, class_weights=weights
    )
    found = jax.nn.sigmoid(jax.nn.relu(features @ params["hidden"]) @ params["box"])
    of_boxes = 5 * jnp.abs(found - boxes).sum(-1) + 2 * (1 - overlap(found, boxes))
    return of_classes + masksafe.mean(of_boxes, where=is_object)
