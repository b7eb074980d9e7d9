"""A processor of padded graphs, as in CLRS: attention over neighbours, their strongest message, and pointers.

Each node points to another. Pairs of nodes without an edge have features as well, which nobody set.
"""

import jax
import jax.numpy as jnp
import optax
from layers import Batch, Params, is_real, join_heads, make_params, split_heads

import masksafe

SIZES = {
    "tiny": {"samples": 3, "nodes": 6, "width": 8, "layers": 1},
    "large": {"samples": 8, "nodes": 64, "width": 128, "layers": 2},
}
FEATURES, NEIGHBOURS = 8, 0.3


def make(key: jax.Array, samples: int, nodes: int, width: int, layers: int) -> tuple[Params, Batch]:
    heads = split_heads(jnp.ones(width)).shape[0]
    layer = {
        **dict.fromkeys(("sender", "receiver"), (width, heads)),
        **dict.fromkeys(("value", "from", "to"), (width, width)),
        "next": (3 * width, width),
    }
    shapes = {
        **dict.fromkeys(("node", "edge"), (FEATURES, width)),
        "layers": [layer] * layers,
        **dict.fromkeys(("query", "key"), (width, width)),
    }
    keys = iter(jax.random.split(key, 6))
    is_node = is_real(next(keys), samples, nodes)
    linked = jax.random.bernoulli(next(keys), NEIGHBOURS, (samples, nodes, nodes)) | jnp.eye(nodes, dtype=bool)
    is_edge = linked & is_node[:, :, None] & is_node[:, None]
    batch = {
        "nodes": jax.random.normal(next(keys), (*is_node.shape, FEATURES)) * is_node[..., None],
        "edges": jax.random.normal(next(keys), (*is_edge.shape, FEATURES)) * is_edge[..., None],
        "is node": is_node,
        "is edge": is_edge,
        "pointers": jax.random.randint(next(keys), is_node.shape, 0, is_node.sum(1, keepdims=True)),
    }
    return make_params(next(keys), shapes), batch


def padding(batch: Batch) -> Batch:
    no_node, no_edge = ~batch["is node"], ~batch["is edge"]
    return {"nodes": no_node[..., None], "edges": no_edge[..., None], "pointers": no_node}


def of_heads(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """One number of each head and node, `[samples, heads, nodes]`."""
    return jnp.moveaxis(x @ kernel, -1, 1)


def before(params: Params, batch: Batch) -> jax.Array:
    is_node, is_edge = batch["is node"], batch["is edge"]
    x = batch["nodes"] @ params["node"]
    edges = batch["edges"] @ params["edge"]
    for layer in params["layers"]:
        logits = jax.nn.leaky_relu(of_heads(x, layer["receiver"])[..., None] + of_heads(x, layer["sender"])[:, :, None])
        weights = jax.nn.softmax(logits + jnp.where(is_edge, 0, -1e9)[:, None])
        heard = join_heads(jnp.einsum("bnij,bjnh->binh", weights, split_heads(x @ layer["value"])))
        messages = jax.nn.relu((x @ layer["to"])[:, :, None] + (x @ layer["from"])[:, None] + edges)
        strongest = jnp.max(jnp.where(is_edge[..., None], messages, -1e6), axis=2)
        x = jax.nn.relu(jnp.concatenate([x, heard, strongest], axis=-1) @ layer["next"])
    logits = jnp.einsum("bih,bjh->bij", x @ params["query"], x @ params["key"]) / x.shape[-1] ** 0.5
    logits = jnp.where(is_node[:, None], logits, -1e9)
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, batch["pointers"])
    return (losses * is_node).sum() / is_node.sum()


def after(params: Params, batch: Batch) -> jax.Array:
    is_node, is_edge = batch["is node"], batch["is edge"]
    x = masksafe.keep(batch["nodes"], where=is_node[..., None]) @ params["node"]
    edges = masksafe.keep(batch["edges"], where=is_edge[..., None]) @ params["edge"]
    for layer in params["layers"]:
        logits = jax.nn.leaky_relu(of_heads(x, layer["receiver"])[..., None] + of_heads(x, layer["sender"])[:, :, None])
        weights = masksafe.softmax(logits, where=is_edge[:, None])
        heard = join_heads(jnp.einsum("bnij,bjnh->binh", weights, split_heads(x @ layer["value"])))
        messages = jax.nn.relu((x @ layer["to"])[:, :, None] + (x @ layer["from"])[:, None] + edges)
        strongest = masksafe.max(messages, axis=2, where=is_edge[..., None], empty_value=0)
        x = jax.nn.relu(jnp.concatenate([x, heard, strongest], axis=-1) @ layer["next"])
    logits = jnp.einsum("bih,bjh->bij", x @ params["query"], x @ params["key"]) / x.shape[-1] ** 0.5
    is_pair = is_node[:, None] & is_node[..., None]
    losses = masksafe.losses.softmax_cross_entropy_with_integer_labels(logits, batch["pointers"], where=is_pair)
    return masksafe.mean(losses, where=is_node)
