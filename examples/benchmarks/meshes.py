"""Arrays split over four devices: what the ops cost on explicit and automatic axes, and in a `jax.shard_map` by hand.

    python examples/benchmarks/meshes.py [--quick] [--rounds N] [--plot-only]

The devices are virtual ones of this machine's CPU and share its cores, so that a time is that of the work of all of
them; a process has them from its start on, for which reason this is no part of `all.py`. optax and jax.nn get
automatic axes.
"""

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

DEVICES = 4
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import linear_cross_entropy  # noqa: E402
import normalization  # noqa: E402
import optax  # noqa: E402
from command import main  # noqa: E402
from jax.sharding import AxisType, Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from measure import Benchmark, Candidate, Case, Work, by_x, in_jax, pulled_back, random_bits, random_labels  # noqa: E402
from measure import random_normal as normal  # noqa: E402

import masksafe  # noqa: E402

SIZES = {"tiny": (64, 16, 128), "large": (4096, 128, 8192)}  # tokens, width, classes
SHAPES = {"tiny": (4, 16, 4, 8), "large": (4, 1024, 8, 64)}  # batch, time, heads, width
UNMASKED = 0.25
AXIS = "devices"
LINEAR = {  # how features, kernel, labels and mask are split
    "tokens": (P(AXIS), P(), P(AXIS), P(AXIS)),
    "classes": (P(), P(None, AXIS), P(), P()),
}
BY_ROW = {"rows": (P(AXIS),)}
ROWS = {"tiny": (64, 128), "large": (4096, 1024)}  # rows, and classes or features
ATTENTION = {"batch": P(AXIS), "heads": P(None, None, AXIS)}
ON_EXPLICIT_AXES = ("masksafe", "shard_map")


@dataclass(frozen=True)
class OnMesh(Work):
    """One function of arrays that are split over the devices, in several ways."""

    specs: tuple[P, ...] = ()

    def candidate(self, name: str, *, gradient: bool, eager: bool) -> Candidate:
        mesh = mesh_of(AxisType.Explicit if name in ON_EXPLICIT_AXES else AxisType.Auto)
        fn = self.functions[name]
        args = put(mesh, self.args, self.specs)
        with jax.set_mesh(mesh):
            step, args = pulled_back(fn, args, self.leaves) if gradient else (fn, args)
            if gradient:
                args = put(mesh, args, (self.specs[0] if args[0].ndim else P(), *self.specs))
        return in_jax(step, args, eager=eager, context=functools.partial(jax.set_mesh, mesh))


def mesh_of(kind: AxisType) -> Mesh:
    return jax.make_mesh((DEVICES,), (AXIS,), axis_types=(kind,), devices=jax.devices()[:DEVICES])


def put(mesh: Mesh, args: Sequence[Any], specs: Sequence[P]) -> tuple[Any, ...]:
    return tuple(jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args, specs, strict=True))


def in_shard_map(fn: Callable[..., Any], specs: tuple[P, ...], out: P) -> Callable[..., Any]:
    return lambda *args: jax.shard_map(fn, in_specs=specs, out_specs=out)(*args)


def linear_of_tokens(features: jax.Array, kernel: jax.Array, labels: jax.Array, mask: jax.Array) -> jax.Array:
    loss = masksafe.losses.linear_softmax_cross_entropy(features, kernel, labels, where=mask, reduction="sum")
    total, count = jax.lax.psum((loss, jnp.sum(mask)), AXIS)
    return total / jnp.maximum(count, 1)


def linear_of_classes(features: jax.Array, kernel: jax.Array, labels: jax.Array, mask: jax.Array) -> jax.Array:
    return masksafe.losses.linear_softmax_cross_entropy(features, kernel, labels, where=mask, axis_name=AXIS)


def prepare_linear(split: str, size: str) -> Work:
    tokens, width, classes = SIZES[size]
    args = normal((tokens, width)), normal((width, classes), seed=1) / width**0.5
    args = *args, random_labels((tokens,), classes), random_bits((tokens,), UNMASKED)
    by_hand = linear_of_tokens if split == "tokens" else linear_of_classes
    functions = {
        "masksafe": linear_cross_entropy.of_masksafe,
        "shard_map": in_shard_map(by_hand, LINEAR[split], P()),
        "automatic": linear_cross_entropy.of_masksafe,
        "optax": linear_cross_entropy.of_optax,
    }
    return OnMesh(functions, args, leaves=2, specs=LINEAR[split])


def prepare_attention(split: str, size: str) -> Work:
    ours = functools.partial(masksafe.dot_product_attention, is_causal=True)
    specs = (ATTENTION[split],) * 3
    functions = {
        "masksafe": ours,
        "shard_map": in_shard_map(ours, specs, specs[0]),
        "automatic": ours,
        "jax.nn": functools.partial(jax.nn.dot_product_attention, is_causal=True),
    }
    return OnMesh(functions, tuple(normal(SHAPES[size], seed=i) for i in range(3)), leaves=3, specs=specs)


def prepare_cross_entropy(split: str, size: str) -> Work:
    logits = normal(ROWS[size])
    args = logits, jax.nn.softmax(normal(ROWS[size], seed=1))
    ours = masksafe.losses.softmax_cross_entropy
    functions = {"masksafe": ours, "automatic": ours, "optax": optax.losses.softmax_cross_entropy}
    return OnMesh(functions, args, leaves=1, specs=BY_ROW[split] * 2)


def prepare_layer_norm(split: str, size: str) -> Work:
    args = normal(ROWS[size]), *(normal(ROWS[size][1:], seed=seed) for seed in (1, 2))
    of_flax = normalization.of_flax("layer norm", -1)
    functions = {"masksafe": masksafe.layer_norm, "automatic": masksafe.layer_norm}
    functions["flax"] = lambda x, *params: of_flax(x, None, *params)
    return OnMesh(functions, args, leaves=3, specs=(*BY_ROW[split], P(), P()))


CASES = [
    Case(f"{work}, {split}", mask, "float32", size, by_x(shapes[size]), functools.partial(prepare, split, size))
    for work, mask, splits, shapes, prepare in (
        ("one-hot cross-entropy", "none", BY_ROW, ROWS, prepare_cross_entropy),
        ("layer norm", "none", BY_ROW, ROWS, prepare_layer_norm),
        ("linear", "75 % of tokens", LINEAR, SIZES, prepare_linear),
        ("attention", "causal", ATTENTION, SHAPES, prepare_attention),
    )
    for split in splits
    for size in shapes
]
PEERS = ("optax", "flax", "jax.nn")
PAIRS = [("masksafe", other) for other in ("shard_map", "automatic", *PEERS)] + [("automatic", peer) for peer in PEERS]
BENCHMARK = Benchmark("meshes", "Arrays split over devices", tuple(PAIRS), CASES)

if __name__ == "__main__":
    main([BENCHMARK])
