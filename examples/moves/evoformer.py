"""The Evoformer block of AlphaFold over a padded protein: attention with a bias of pairs, and products of masks.

An alignment has padded sequences and padded residues. The input features of both may hold anything.
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
    "tiny": {"sequences": 4, "residues": 6, "width": 8, "blocks": 1},
    "large": {"sequences": 64, "residues": 160, "width": 128, "blocks": 2},
}
FEATURES, CLASSES, OUTER = 24, 23, 16
PREDICTED = 0.15


def make(key: jax.Array, sequences: int, residues: int, width: int, blocks: int) -> tuple[Params, Batch]:
    heads, pairs = split_heads(jnp.ones(width)).shape[0], width // 2
    block = {
        "norm": (width,),
        "query key value": (width, 3 * width),
        "pair norm": (pairs,),
        "bias": (pairs, heads),
        **dict.fromkeys(("gate", "out"), (width, width)),
        "feed-forward norm": (width,),
        **of_feed_forward(width),
        "outer norm": (width,),
        **dict.fromkeys(("outer left", "outer right"), (width, OUTER)),
        "outer": (OUTER**2, pairs),
        "triangle norms": [(pairs,), (pairs,)],
        **dict.fromkeys(("left", "right", "triangle"), (pairs, pairs)),
    }
    shapes = {
        "msa": (FEATURES, width),
        "pair": (FEATURES, pairs),
        "blocks": [block] * blocks,
        "norm": (width,),
        "classes": (width, CLASSES),
        "distance": (pairs, 1),
    }
    keys = iter(jax.random.split(key, 7))
    is_residue = jnp.arange(residues) < residues * 4 // 5
    msa_mask = is_real(next(keys), sequences, residues) & is_residue & (jnp.arange(sequences) < sequences - 1)[:, None]
    pair_mask = is_residue[:, None] & is_residue
    batch = {
        "msa": jax.random.normal(next(keys), (*msa_mask.shape, FEATURES)) * msa_mask[..., None],
        "pair": jax.random.normal(next(keys), (*pair_mask.shape, FEATURES)) * pair_mask[..., None],
        "msa mask": msa_mask,
        "pair mask": pair_mask,
        "labels": jax.random.randint(next(keys), msa_mask.shape, 0, CLASSES),
        "is label": msa_mask & jax.random.bernoulli(next(keys), PREDICTED, msa_mask.shape).at[0, 0].set(True),
        "distances": jax.random.normal(next(keys), pair_mask.shape) * pair_mask,
    }
    return make_params(next(keys), shapes), batch


def padding(batch: Batch) -> Batch:
    of_pairs = ~batch["pair mask"]
    of_inputs = {"msa": ~batch["msa mask"][..., None], "pair": of_pairs[..., None]}
    return of_inputs | {"labels": ~batch["is label"], "distances": of_pairs}


def before(params: Params, batch: Batch) -> jax.Array:
    is_residue, is_pair, is_label = (batch[name] for name in ("msa mask", "pair mask", "is label"))
    msa_mask, pair_mask = is_residue.astype(jnp.float32), is_pair.astype(jnp.float32)
    msa = batch["msa"] @ params["msa"]
    pair = batch["pair"] @ params["pair"]
    for block in params["blocks"]:
        x = layer_norm(msa, block["norm"])
        query, key, value = map(split_heads, jnp.split(x @ block["query key value"], 3, axis=-1))
        bias = jnp.moveaxis(layer_norm(pair, block["pair norm"]) @ block["bias"], -1, 0)
        logits = jnp.einsum("btnh,bsnh->bnts", query, key) / query.shape[-1] ** 0.5 + bias
        logits += 1e9 * (msa_mask - 1)[:, None, None]
        out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits), value)
        msa += (jax.nn.sigmoid(x @ block["gate"]) * join_heads(out)) @ block["out"]
        msa += feed_forward(layer_norm(msa, block["feed-forward norm"]), block)
        x = layer_norm(msa, block["outer norm"])
        left, right = (msa_mask[..., None] * (x @ block[name]) for name in ("outer left", "outer right"))
        outer = jnp.einsum("sic,sjd->ijcd", left, right) / (1e-3 + msa_mask.T @ msa_mask)[..., None, None]
        pair += join_heads(outer) @ block["outer"]
        x = layer_norm(pair, block["triangle norms"][0])
        left, right = (pair_mask[..., None] * (x @ block[name]) for name in ("left", "right"))
        triangles = jnp.einsum("ikc,jkc->ijc", left, right)
        pair += layer_norm(triangles, block["triangle norms"][1]) @ block["triangle"]
    logits = layer_norm(msa, params["norm"]) @ params["classes"]
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    errors = ((pair @ params["distance"])[..., 0] - batch["distances"]) ** 2
    of_labels = (losses * is_label).sum() / (1e-8 + is_label.sum())
    return of_labels + (errors * pair_mask).sum() / (1e-8 + pair_mask.sum())


def after(params: Params, batch: Batch) -> jax.Array:
    is_residue, is_pair, is_label = (batch[name] for name in ("msa mask", "pair mask", "is label"))
    msa_mask, pair_mask = is_residue.astype(jnp.float32), is_pair.astype(jnp.float32)
    msa = masksafe.keep(batch["msa"], where=is_residue[..., None]) @ params["msa"]
    pair = masksafe.keep(batch["pair"], where=is_pair[..., None]) @ params["pair"]
    for block in params["blocks"]:
        x = layer_norm(msa, block["norm"])
        query, key, value = map(split_heads, jnp.split(x @ block["query key value"], 3, axis=-1))
        bias = jnp.moveaxis(layer_norm(pair, block["pair norm"]) @ block["bias"], -1, 0)
        out = masksafe.dot_product_attention(query, key, value, bias, is_residue[:, None, None])
        msa += (jax.nn.sigmoid(x @ block["gate"]) * join_heads(out)) @ block["out"]
        msa += feed_forward(layer_norm(msa, block["feed-forward norm"]), block)
        x = layer_norm(msa, block["outer norm"])
        left, right = (msa_mask[..., None] * (x @ block[name]) for name in ("outer left", "outer right"))
        outer = jnp.einsum("sic,sjd->ijcd", left, right) / (1e-3 + msa_mask.T @ msa_mask)[..., None, None]
        pair += join_heads(outer) @ block["outer"]
        x = layer_norm(pair, block["triangle norms"][0])
        left, right = (pair_mask[..., None] * (x @ block[name]) for name in ("left", "right"))
        triangles = jnp.einsum("ikc,jkc->ijc", left, right)
        pair += layer_norm(triangles, block["triangle norms"][1]) @ block["triangle"]
    logits = layer_norm(msa, params["norm"]) @ params["classes"]
    losses = masksafe.losses.softmax_cross_entropy_with_integer_labels(logits, batch["labels"], where=is_label)
    errors = masksafe.losses.squared_error((pair @ params["distance"])[..., 0], batch["distances"], where=is_pair)
    return masksafe.mean(losses, where=is_label) + masksafe.mean(errors, where=is_pair)
