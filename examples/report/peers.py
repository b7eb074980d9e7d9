"""What other libraries do with the cases of `python -m masksafe`: optax, jax.nn, flax, equinox, jraph and torch.

    python examples/report/peers.py [--only OPS] [PEER ...]    # 15 seconds

Each library that is installed has a table from the name of an op to a function of the case's inputs, written as its
users would write it. If its op takes no mask, the output is selected afterwards, `jnp.where(mask, loss, 0)`, which is
what its users do.
"""

import argparse
import functools
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from edge_cases import CASES
from verdicts import Result, Run, Verdict, in_jax, judge, print_verdicts

from masksafe._report._cases import OPS, SEGMENTS, Inputs, Ops, along_rows
from masksafe._report._verdict import print_progress


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"some of {', '.join(PEERS)}; by default all")
    parser.add_argument("--only", metavar="OPS", default="", help="parts of names: run only ops that match one")
    options = parser.parse_args(arguments)
    unknown = set(options.peers) - set(PEERS)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))} is none of {', '.join(PEERS)}")
    cases = [case for case in CASES if any(part in case.op for part in options.only.split(","))]
    columns = {}
    for library in ("masksafe", *(peer for peer in options.peers or PEERS if is_installed(peer))):
        print_progress(library)
        runs = [runner(library, case.op) for case in cases]
        verdicts = (Verdict.ABSENT if run is None else judge(case, run) for case, run in zip(cases, runs, strict=True))
        columns[library] = list(verdicts)
    print_verdicts("Masked means gone", cases, columns)
    for name, column in columns.items():
        print(f"{name}: {column.count(Verdict.RIGHT)} of {len(column) - column.count(Verdict.ABSENT)} right")


def is_installed(library: str) -> bool:
    return importlib.util.find_spec(library.partition(".")[0]) is not None


@functools.cache
def ops_of(library: str) -> Ops:
    return OPS if library == "masksafe" else PEERS[library]()


@functools.cache
def runner(library: str, name: str) -> Run | None:
    """The function that runs the cases of an op with the library, or None if the library has no such op."""
    op = ops_of(library).get(name)
    if op is None:
        return None
    return functools.partial(run_torch, op) if library == "torch" else in_jax(op)


def jax_ops() -> Ops:
    ops: Ops = {name: getattr(jax.nn, name) for name in ("softmax", "log_softmax", "dot_product_attention")}
    ops["standardize"] = functools.partial(jax.nn.standardize, epsilon=1e-6)
    reductions: Ops = {
        "logsumexp": jax.nn.logsumexp,
        "sum": jnp.sum,
        "mean": jnp.mean,
        "var": jnp.var,
        "max": functools.partial(jnp.max, initial=-jnp.inf),
        "min": functools.partial(jnp.min, initial=jnp.inf),
    }
    segment_ops = {name: in_segments(getattr(jax.ops, name)) for name in ("segment_sum", "segment_max", "segment_min")}
    return ops | segment_ops | {name: along_rows(fn) for name, fn in reductions.items()}


def in_segments(fn: Callable[..., Any], is_like_data: bool = False) -> Callable[..., Any]:
    """An op that takes no mask. Masked rows get a segment of their own, as padding of graphs has."""

    def call(data: Any, segment_ids: Any, where: Any = None) -> Any:
        if where is None:
            return fn(data, segment_ids, SEGMENTS)
        out = fn(data, jnp.where(where, segment_ids, SEGMENTS), SEGMENTS + 1)
        return jnp.where(where[:, None], out, 0) if is_like_data else out[:SEGMENTS]

    return call


def selected_after(op: Callable[..., Any], select: Callable[..., Any] = jnp.where) -> Callable[..., Any]:
    """An op that takes no mask, with a selection of its output."""

    def call(*, where: Any = None, **inputs: Any) -> Any:
        out = op(**inputs)
        return out if where is None else select(where, out, 0)

    return call


def optax_ops() -> Ops:
    import optax

    losses = {name: getattr(optax.losses, name) for name in dir(optax.losses) if not name.startswith("_")}
    return {
        name: loss if "where" in inspect.signature(loss).parameters else selected_after(loss)
        for name, loss in losses.items()
        if callable(loss)
    }


def flax_ops() -> Ops:
    from flax import linen, nnx

    def normalize(layer_type: Any, x: Any, where: Any = None) -> Any:
        layer = layer_type(x.shape[-1], rngs=nnx.Rngs(0), epsilon=1e-6)
        return layer(x, mask=None if where is None else jnp.broadcast_to(where, x.shape))

    def batch_norm(x: Any, where: Any = None) -> Any:
        layer = nnx.BatchNorm(x.shape[-1], use_running_average=False, epsilon=1e-5, rngs=nnx.Rngs(0))
        return layer(x, mask=where)

    def group_norm(x: Any, where: Any = None) -> Any:
        return nnx.GroupNorm(x.shape[-1], num_groups=1, rngs=nnx.Rngs(0))(x, mask=where)

    return {
        "batch_norm": batch_norm,
        "group_norm": group_norm,
        "layer_norm": functools.partial(normalize, nnx.LayerNorm),
        "rms_norm": functools.partial(normalize, nnx.RMSNorm),
        "dot_product_attention": linen.dot_product_attention,
    }


def equinox_ops() -> Ops:
    import equinox

    def layer_norm(x: Any) -> Any:
        return jax.vmap(equinox.nn.LayerNorm(x.shape[-1], eps=1e-6))(x)

    def attention(query: Any, key: Any, value: Any, mask: Any) -> Any:
        width = query.shape[-1]
        layer = equinox.nn.MultiheadAttention(1, width, key=jax.random.key(0))
        parts = ("query_proj", "key_proj", "value_proj", "output_proj")
        weights = lambda layer: [getattr(layer, part).weight for part in parts]  # noqa: E731
        layer = equinox.tree_at(weights, layer, [jnp.eye(width)] * len(parts))
        return layer(query[0, :, 0], key[0, :, 0], value[0, :, 0], mask=jnp.asarray(mask)[0, 0])[None, :, None]

    return {"layer_norm": selected_after(layer_norm), "dot_product_attention": attention}


def jraph_ops() -> Ops:
    import jraph

    names = {"sum": "sum", "mean": "mean", "variance": "var", "max": "max", "min": "min"}
    ops = {f"segment_{ours}": in_segments(getattr(jraph, f"segment_{theirs}")) for theirs, ours in names.items()}
    ops["segment_softmax"] = in_segments(jraph.segment_softmax, is_like_data=True)
    ops["segment_standardize"] = in_segments(jraph.segment_normalize, is_like_data=True)
    return ops


def run_torch(op: Callable[..., Any], inputs: Inputs) -> Result:
    import torch

    tensors = {name: torch.tensor(np.asarray(x)) for name, x in inputs.items()}
    floats = {name: x.requires_grad_(True) for name, x in tensors.items() if x.is_floating_point()}
    output = op(**tensors)
    weights = torch.cos(torch.arange(output.numel(), dtype=output.dtype)).reshape(output.shape)
    gradients = torch.autograd.grad(output, list(floats.values()), weights, allow_unused=True)
    found = zip(floats.items(), gradients, strict=True)
    zeros = {name: np.zeros(x.shape) if g is None else g.double().numpy() for (name, x), g in found}
    return Result(output.detach().double().numpy(), zeros)


def torch_ops() -> Ops:
    import torch
    from torch.nn import functional

    selected = functools.partial(selected_after, select=torch.where)

    def unreduced(loss: Callable[..., Any]) -> Callable[..., Any]:
        """A loss of two arguments, which the inputs of its cases are, in this order."""
        return selected(lambda **inputs: loss(*inputs.values(), reduction="none"))

    def cross_entropy(logits: Any, labels: Any, where: Any = None) -> Any:
        if where is not None and where.ndim == logits.ndim:
            logits, where = logits.masked_fill(~where, -torch.inf), None
        labels = labels if where is None else torch.where(where, labels, -100)  # the index that it ignores
        return functional.cross_entropy(logits, labels, reduction="none")

    def attention(query: Any, key: Any, value: Any, mask: Any) -> Any:
        heads_first = (x.transpose(1, 2) for x in (query, key, value))
        return functional.scaled_dot_product_attention(*heads_first, attn_mask=mask).transpose(1, 2)

    def filled(fn: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, where=None: fn(x if where is None else x.masked_fill(~where, -torch.inf), -1)

    def ctc(logits: Any, logit_paddings: Any, labels: Any, label_paddings: Any) -> Any:
        log_probs = functional.log_softmax(logits, -1).transpose(0, 1)
        lengths = (~logit_paddings).sum(1), (~label_paddings).sum(1)
        return functional.ctc_loss(log_probs, labels, *lengths, reduction="none")

    divergence_terms = unreduced(functional.kl_div)
    return {
        "squared_error": unreduced(functional.mse_loss),
        "huber_loss": unreduced(functional.huber_loss),
        "sigmoid_binary_cross_entropy": unreduced(functional.binary_cross_entropy_with_logits),
        "softmax_cross_entropy_with_integer_labels": cross_entropy,
        "softmax_cross_entropy": cross_entropy,
        "kl_divergence": lambda **inputs: divergence_terms(**inputs).sum(-1),
        "ctc_loss": ctc,
        "dot_product_attention": attention,
        "batch_norm": selected(lambda x: functional.batch_norm(x, None, None, training=True)),
        "group_norm": selected(lambda x: functional.group_norm(x, 1)),
        "l2_normalize": selected(lambda x: functional.normalize(x, dim=-1)),
        "softmax": filled(torch.softmax),
        "log_softmax": filled(torch.log_softmax),
        "logsumexp": filled(torch.logsumexp),
        "layer_norm": selected(lambda x: functional.layer_norm(x, x.shape[-1:], eps=1e-6)),
        "rms_norm": selected(lambda x: functional.rms_norm(x, x.shape[-1:], eps=1e-6)),
    }


PEERS: dict[str, Callable[[], Ops]] = {
    "optax": optax_ops,
    "jax.nn": jax_ops,
    "flax": flax_ops,
    "equinox": equinox_ops,
    "jraph": jraph_ops,
    "torch": torch_ops,
}

if __name__ == "__main__":
    main()
