"""Ring attention against keys and values that are gathered, on eight devices that share the cores of one CPU.

    python examples/benchmarks/ring_attention.py [--quick] [--rounds N] [--plot-only]

Both split time over the devices inside `jax.shard_map`. The ring sends keys and values on, a part at a time; the other
gathers them, and tells attention the positions of its queries. Times are those of eight devices that take turns on the
cores, and count the work of all: a real ring waits for its slowest device, and shares no memory. `exchanges.py` says
what a device receives from the others.
"""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

DEVICES = 8
if "jax" not in sys.modules:  # which reads it once
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES} {os.environ.get('XLA_FLAGS', '')}"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from command import main  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402
from measure import Benchmark, Case, Work, by_x, random_normal  # noqa: E402

import masksafe  # noqa: E402

RING, GATHERED = CANDIDATES = ("ring", "gathered")
SIZES = {"tiny": (1, 256, 2, 64), "large": (1, 8192, 4, 64)}  # batch, time, heads, width
WINDOW = 512
MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "causal, zigzag": {"is_causal": True},
    f"window of {WINDOW}": {"is_causal": True, "local_window_size": (WINDOW, 0)},
}
IN_TIME = PartitionSpec(None, "time")
Arrays = tuple[jax.Array, ...]


def ring(query: jax.Array, key: jax.Array, value: jax.Array, positions: jax.Array | None, **mask: Any) -> jax.Array:
    both = {"query_positions": positions, "key_positions": positions}
    return masksafe.dot_product_attention(query, key, value, axis_name="time", **mask, **both)


def gathered(query: jax.Array, key: jax.Array, value: jax.Array, positions: jax.Array | None, **mask: Any) -> jax.Array:
    def all_of(x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(x, "time", axis=1, tiled=True)

    own = {"causal_offset": jax.lax.axis_index("time") * query.shape[1]}
    if positions is not None:
        own = {"query_positions": positions, "key_positions": all_of(positions)}
    elif not mask:
        own = {}
    return masksafe.dot_product_attention(query, all_of(key), all_of(value), **mask, **own)


def split(attention: Callable[..., jax.Array], mask: str) -> Callable[..., jax.Array]:
    """`attention` with time split over the devices, as a function of whole arrays."""

    def local(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        positions = None
        if "zigzag" in mask:
            order = masksafe.zigzag(jnp.arange(query.shape[1] * DEVICES, dtype=jnp.int32)[None], DEVICES)
            start = jax.lax.axis_index("time") * query.shape[1]
            positions = jax.lax.dynamic_slice_in_dim(order, start, query.shape[1], 1)
        return attention(query, key, value, positions, **MASKS[mask])

    return jax.shard_map(local, mesh=mesh(), in_specs=IN_TIME, out_specs=IN_TIME)


@functools.cache
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((DEVICES,), ("time",), axis_types=(AxisType.Auto,))


def prepare(mask: str, shape: tuple[int, ...]) -> Work:
    """The same arrays in each order of time: what they hold is random."""
    place = NamedSharding(mesh(), IN_TIME)
    args = tuple(jax.device_put(random_normal(shape, seed=seed), place) for seed in range(3))
    return Work({RING: split(ring, mask), GATHERED: split(gathered, mask)}, args, leaves=3)


CASES = [
    Case("attention", mask, "float32", name, by_x(shape), functools.partial(prepare, mask, shape))
    for name, shape in SIZES.items()
    for mask in MASKS
]
BENCHMARK = Benchmark("ring_attention", "Ring attention", ((RING, GATHERED),), CASES)


if __name__ == "__main__":
    main([BENCHMARK])
