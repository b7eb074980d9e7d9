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
from edge_cases import CASES
from in_torch import run_torch, selected_after, torch_ops
from verdicts import Run, Verdict, in_jax, judge, print_verdicts

from masksafe._report._cases import OPS, SEGMENTS, Ops, along_rows
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
        "logmeanexp": jax.nn.logmeanexp,
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
