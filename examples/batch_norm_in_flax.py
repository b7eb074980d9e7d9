"""Layers of flax.nnx and equinox around masksafe's batch norm, which knows masks and many devices.

    python examples/batch_norm_in_flax.py    # eight virtual devices

`masksafe.batch_norm` returns the statistics; the layers keep the running average. A batch of sequences of ragged length
is split over eight devices, and some devices have nothing but padding. The statistics of masksafe's layers are those of
the whole batch. Flax's own layer averages the devices' means, and the mean of a device that has nothing is NaN.
"""

import importlib.util
import os
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import masksafe

FEATURES = 3
LENGTHS = np.array([6, 1, 0, 3, 0, 0, 5, 2, 0, 0, 0, 0, 6, 4, 1, 1])  # of 16 sequences, two on each device


def nnx_layer(**arguments: Any) -> Any:
    """A `flax.nnx` module with running statistics."""
    from flax import nnx

    class BatchNorm(nnx.Module):
        def __init__(self, features: int, momentum: float = 0.9, axis_name: str | None = None) -> None:
            self.scale, self.bias = nnx.Param(jnp.ones(features)), nnx.Param(jnp.zeros(features))
            self.mean, self.var = nnx.BatchStat(jnp.zeros(features)), nnx.BatchStat(jnp.ones(features))
            self.momentum, self.axis_name = momentum, axis_name

        def __call__(self, x: jax.Array, where: jax.Array | None = None, *, train: bool = True) -> jax.Array:
            of_past = {} if train else {"mean": self.mean[...], "var": self.var[...]}
            y, mean, var = masksafe.batch_norm(
                x, self.scale[...], self.bias[...], where=where, axis_name=self.axis_name, **of_past
            )
            if train:
                self.mean[...] += (1 - self.momentum) * (mean - self.mean[...])
                self.var[...] += (1 - self.momentum) * (var - self.var[...])
            return y

    return BatchNorm(FEATURES, **arguments)


def equinox_layer(**arguments: Any) -> Any:
    """An equinox module for one sample, in `jax.vmap(..., axis_name="batch")`; its state is handed on."""
    import equinox

    class BatchNorm(equinox.Module):
        scale: jax.Array
        bias: jax.Array
        state_index: Any
        momentum: float

        def __init__(self, features: int, momentum: float = 0.9) -> None:
            self.scale, self.bias, self.momentum = jnp.ones(features), jnp.zeros(features), momentum
            self.state_index = equinox.nn.StateIndex((jnp.zeros(features), jnp.ones(features)))

        def __call__(self, x: jax.Array, state: Any, where: jax.Array | None = None) -> tuple[jax.Array, Any]:
            y, *new = masksafe.batch_norm(x, self.scale, self.bias, where=where, axis_name="batch")
            average = lambda old, new: old + (1 - self.momentum) * (new - old)  # noqa: E731
            return y, state.set(self.state_index, jax.tree.map(average, state.get(self.state_index), tuple(new)))

    return equinox.nn.make_with_state(BatchNorm)(FEATURES, **arguments)


# What the layers make of a ragged batch on eight devices.


def make_batch() -> tuple[jax.Array, jax.Array]:
    """Sequences `[16, 6, features]`, each with a mean of its own, and where they are not padding."""
    is_live = masksafe.length_mask(LENGTHS, 6)
    noise = jax.random.normal(jax.random.key(0), (16, 6, FEATURES))
    return jnp.where(is_live[..., None], noise + jnp.arange(16)[:, None, None], jnp.nan), is_live[..., None]


def over_devices(mesh: Mesh, layer: Any, x: jax.Array, where: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The running mean and variance of a layer without momentum, after one step on all devices."""
    from flax import nnx

    graph, state = nnx.split(layer)

    def step(state: Any, x: jax.Array, where: jax.Array) -> tuple[jax.Array, jax.Array]:
        layer = nnx.merge(graph, state)
        layer(x, where)
        return layer.mean[...], layer.var[...]

    split = P("batch")
    sharded = jax.shard_map(step, mesh=mesh, in_specs=(P(), split, split), out_specs=P(), check_vma=False)
    return sharded(state, x, where)


def flax_layer() -> Any:
    """Flax's own, which takes the mask by name."""
    from flax import nnx

    class Masked(nnx.BatchNorm):
        def __call__(self, x: jax.Array, where: jax.Array) -> jax.Array:  # type: ignore[override]
            return super().__call__(x, mask=jnp.broadcast_to(where, x.shape))

    return Masked(FEATURES, momentum=0.0, axis_name="batch", use_running_average=False, rngs=nnx.Rngs(0))


def main() -> None:
    mesh = jax.make_mesh((jax.device_count(),), ("batch",), axis_types=(AxisType.Auto,))
    x, where = make_batch()
    live = np.asarray(x)[np.asarray(where[..., 0])]
    print(f"{'':18} mean {live.mean(0).round(3)}, variance {live.var(0).round(3)} of all that is not padding")
    if importlib.util.find_spec("flax") is None:
        print("flax is not installed.")
    else:
        for name, layer in {
            "masksafe in nnx": nnx_layer(momentum=0.0, axis_name="batch"),
            "flax": flax_layer(),
        }.items():
            mean, var = over_devices(mesh, layer, x, where)
            print(f"{name:18} mean {np.round(mean, 3)}, variance {np.round(var, 3)}")
    if importlib.util.find_spec("equinox") is None:
        print("equinox is not installed.")
    else:
        layer, state = equinox_layer(momentum=0.0)
        _, state = jax.vmap(layer, in_axes=(0, None, 0), out_axes=(0, None), axis_name="batch")(x, state, where)
        mean, var = state.get(layer.state_index)
        print(f"{'masksafe, equinox':18} mean {np.round(mean, 3)}, variance {np.round(var, 3)}")


if __name__ == "__main__":
    main()
