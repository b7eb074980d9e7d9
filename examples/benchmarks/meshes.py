"""Arrays split over devices: what the ops cost on explicit and automatic axes, and in a `jax.shard_map` by hand.

    python examples/benchmarks/meshes.py [--only ring_attention] [--quick] [--rounds N] [--plot-only]

The devices are virtual ones of this machine's CPU and share its cores, so that a time is that of the work of all of
them; a process has them from its start on, for which reason this is no part of `all.py`. Four of them split the arrays
of the first benchmark, where optax and jax.nn get automatic axes.

In ring attention all eight split time inside `jax.shard_map`. The ring sends keys and values on, a part at a time; the
other candidate gathers them, and tells attention the positions of its queries. A real ring waits for its slowest
device, and shares no memory. `exchanges.py` says what a device receives from the others.
"""

import functools
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

DEVICES, RING_DEVICES = 4, 8
if "jax" not in sys.modules:  # which reads it once
    number = f"--xla_force_host_platform_device_count={RING_DEVICES}"
    os.environ["XLA_FLAGS"] = f"{number} {os.environ.get('XLA_FLAGS', '')}"

import drawn  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import linear  # noqa: E402
import normalization  # noqa: E402
import optax  # noqa: E402
from command import main  # noqa: E402
from jax.sharding import AxisType, Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from measure import Benchmark, Candidate, Work, cases_of, grid_of, in_jax, pulled_back  # noqa: E402

import masksafe  # noqa: E402

SIZES = {"tiny": (64, 16, 128), "large": (4096, 128, 8192)}  # tokens, width, classes
SHAPES = {"tiny": (4, 16, 4, 8), "large": (4, 1024, 8, 64)}  # batch, time, heads, width
UNMASKED = 0.25
AXIS = "devices"
LINEAR = {  # how features, kernel, labels and mask are split
    "tokens": (P(AXIS), P(), P(AXIS), P(AXIS)),
    "classes": (P(), P(None, AXIS), P(), P()),
}
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


@functools.cache
def mesh_of(kind: AxisType, number: int = DEVICES, axis: str = AXIS) -> Mesh:
    return jax.make_mesh((number,), (axis,), axis_types=(kind,), devices=jax.devices()[:number])


def put(mesh: Mesh, args: Sequence[Any], specs: Sequence[P]) -> tuple[Any, ...]:
    return tuple(jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args, specs, strict=True))


def prepare_linear(work: str, mask: str, dtype: str, sizes: tuple[int, int, int]) -> Work:
    (tokens, width, classes), split = sizes, work.split(", ")[1]
    args = drawn.normal((tokens, width)), drawn.normal((width, classes), seed=1) / width**0.5
    args = *args, drawn.labels((tokens,), classes), drawn.bits((tokens,), UNMASKED)

    def by_hand(features: jax.Array, kernel: jax.Array, labels: jax.Array, mask: jax.Array) -> jax.Array:
        loss = functools.partial(masksafe.losses.linear_softmax_cross_entropy, features, kernel, labels, where=mask)
        if split == "classes":
            return loss(axis_name=AXIS)
        total, count = jax.lax.psum((loss(reduction="sum"), jnp.sum(mask)), AXIS)
        return total / jnp.maximum(count, 1)

    functions = {
        "masksafe": linear.of_masksafe,
        "shard_map": lambda *args: jax.shard_map(by_hand, in_specs=LINEAR[split], out_specs=P())(*args),
        "automatic": linear.of_masksafe,
        "optax": linear.of_optax,
    }
    return OnMesh(functions, args, leaves=2, specs=LINEAR[split])


def prepare_attention(work: str, mask: str, dtype: str, shape: tuple[int, ...]) -> Work:
    ours = functools.partial(masksafe.dot_product_attention, is_causal=True)
    specs = (ATTENTION[work.split(", ")[1]],) * 3
    functions = {
        "masksafe": ours,
        "shard_map": lambda *args: jax.shard_map(ours, in_specs=specs, out_specs=specs[0])(*args),
        "automatic": ours,
        "jax.nn": functools.partial(jax.nn.dot_product_attention, is_causal=True),
    }
    return OnMesh(functions, tuple(drawn.normal(shape, seed=i) for i in range(3)), leaves=3, specs=specs)


def prepare_cross_entropy(work: str, mask: str, dtype: str, shape: tuple[int, ...]) -> Work:
    args = drawn.normal(shape), jax.nn.softmax(drawn.normal(shape, seed=1))
    ours = masksafe.losses.softmax_cross_entropy
    functions = {"masksafe": ours, "automatic": ours, "optax": optax.losses.softmax_cross_entropy}
    return OnMesh(functions, args, leaves=1, specs=(P(AXIS), P(AXIS)))


def prepare_layer_norm(work: str, mask: str, dtype: str, shape: tuple[int, ...]) -> Work:
    args = drawn.normal(shape), *(drawn.normal(shape[1:], seed=seed) for seed in (1, 2))
    of_flax = normalization.of_flax("layer norm", -1)
    functions = {"masksafe": masksafe.layer_norm, "automatic": masksafe.layer_norm}
    functions["flax"] = lambda x, *params: of_flax(x, None, *params)
    return OnMesh(functions, args, leaves=3, specs=(P(AXIS), P(), P()))


# Ring attention

RING, GATHERED = ("ring", "gathered")
SIZES_OF_RING = {"tiny": (1, 256, 2, 64), "large": (1, 8192, 4, 64)}  # batch, time, heads, width
WINDOW = 512
MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "causal, zigzag": {"is_causal": True},
    f"window of {WINDOW}": {"is_causal": True, "local_window_size": (WINDOW, 0)},
}
IN_TIME = P(None, "time")


def prepare_ring(work: str, mask: str, dtype: str, shape: tuple[int, ...]) -> Work:
    """The same arrays in each order of time: what they hold is random."""
    mesh = mesh_of(AxisType.Auto, RING_DEVICES, "time")
    attention = functools.partial(masksafe.dot_product_attention, **MASKS[mask])

    def positions_of(query: jax.Array) -> jax.Array | None:
        if "zigzag" not in mask:
            return None
        order = masksafe.zigzag(jnp.arange(query.shape[1] * RING_DEVICES, dtype=jnp.int32)[None], RING_DEVICES)
        start = jax.lax.axis_index("time") * query.shape[1]
        return jax.lax.dynamic_slice_in_dim(order, start, query.shape[1], 1)

    def ring(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        positions = positions_of(query)
        both = {"query_positions": positions, "key_positions": positions}
        return attention(query, key, value, axis_name="time", **both)

    def gathered(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        all_of = functools.partial(jax.lax.all_gather, axis_name="time", axis=1, tiled=True)
        own, positions = {}, positions_of(query)
        if positions is not None:
            own = {"query_positions": positions, "key_positions": all_of(positions)}
        elif MASKS[mask]:
            own = {"causal_offset": jax.lax.axis_index("time") * query.shape[1]}
        return attention(query, all_of(key), all_of(value), **own)

    split = functools.partial(jax.shard_map, mesh=mesh, in_specs=IN_TIME, out_specs=IN_TIME)
    args = put(mesh, [drawn.normal(shape, seed=seed) for seed in range(3)], [IN_TIME] * 3)
    return Work({RING: split(ring), GATHERED: split(gathered)}, args, leaves=3)


CASES = [
    case
    for work, mask, splits, shapes, prepare in (
        ("one-hot cross-entropy", "none", ["rows"], ROWS, prepare_cross_entropy),
        ("layer norm", "none", ["rows"], ROWS, prepare_layer_norm),
        ("linear", "75 % of tokens", LINEAR, SIZES, prepare_linear),
        ("attention", "causal", ATTENTION, SHAPES, prepare_attention),
    )
    for case in cases_of(
        prepare, shapes, grid_of([f"{work}, {split}" for split in splits], [mask], {"float32": shapes})
    )
]
OF_RING = cases_of(prepare_ring, SIZES_OF_RING, [("attention", m, "float32", s) for s in SIZES_OF_RING for m in MASKS])
PEERS = ("optax", "flax", "jax.nn")
PAIRS = [("masksafe", other) for other in ("shard_map", "automatic", *PEERS)] + [("automatic", peer) for peer in PEERS]
BENCHMARKS = [
    Benchmark("meshes", "Arrays split over devices", tuple(PAIRS), CASES),
    Benchmark("ring_attention", "Ring attention", ((RING, GATHERED),), OF_RING),
]

if __name__ == "__main__":
    main(BENCHMARKS)
