"""What the tests of both flax's libraries share: options of norms, a padded batch, checkpoints and comparisons."""

import chex
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest

CHANNELS = 6
X = jax.random.normal(jax.random.key(0), (3, 4, CHANNELS)) * 2 + 1
MASK = np.ones((3, 4, 1), bool)
MASK[1, 2:] = MASK[2] = False  # padded positions, and an empty sample
GARBAGE = (jnp.nan, jnp.inf, -1e38, 5.0)

NORMS = {
    "layer": ("LayerNorm", {}),
    "layer in bfloat16": ("LayerNorm", {"dtype": jnp.bfloat16}),
    "layer, parameters in bfloat16": ("LayerNorm", {"param_dtype": jnp.bfloat16, "use_fast_variance": False}),
    "layer, positions and channels": ("LayerNorm", {"reduction_axes": (1, 2), "feature_axes": -1, "epsilon": 1e-2}),
    "layer, positions": ("LayerNorm", {"reduction_axes": 1}),
    "layer without parameters": ("LayerNorm", {"use_scale": False, "use_bias": False, "reduction_axes": (-2, -1)}),
    "rms": ("RMSNorm", {}),
    "rms, positions": ("RMSNorm", {"reduction_axes": (1,), "epsilon": 1e-3}),
    "rms without scale": ("RMSNorm", {"use_scale": False}),
    "group": ("GroupNorm", {"num_groups": 2}),
    "group by size": ("GroupNorm", {"num_groups": None, "group_size": 3, "use_bias": False}),
    "group of channels alone": ("GroupNorm", {"num_groups": 3, "reduction_axes": (0, 2)}),
    "batch": ("BatchNorm", {"use_running_average": False, "momentum": 0.9}),
    "batch, positions": ("BatchNorm", {"use_running_average": False, "axis": 1, "use_scale": False}),
    "batch in bfloat16": ("BatchNorm", {"use_running_average": False, "dtype": jnp.bfloat16}),
    "batch, running statistics": ("BatchNorm", {"use_running_average": True}),
}
MASKED = {name: NORMS[name] for name in ("layer", "layer, positions and channels", "rms", "group", "batch")}
BY_DEFAULT = [*MASKED, "layer, parameters in bfloat16", "batch, running statistics"]  # of what is compared to flax


def initializers():
    """Of parameters that are neither 0 nor 1."""
    normal = jax.nn.initializers.normal(1.0)
    return {"scale_init": normal, "bias_init": normal}


def options_of(layer, options):
    """The options, with initializers for the parameters that the layer has."""
    return {**{name: f for name, f in initializers().items() if (layer, name) != ("RMSNorm", "bias_init")}, **options}


def assert_close(ours, theirs, dtype=None):
    """Equal in structure, shapes and dtypes, and up to rounding in value."""
    chex.assert_trees_all_equal_shapes_and_dtypes(ours, theirs)
    tolerance = 6e-2 if dtype == jnp.bfloat16 else 2e-5
    chex.assert_trees_all_close(ours, theirs, rtol=tolerance, atol=tolerance)


def assert_same_bits(a, b):
    chex.assert_trees_all_equal(a, b)
    chex.assert_tree_all_finite(a)


def filled(value, x=X, mask=MASK):
    """`x` with a value under the mask."""
    return jnp.where(mask, x, value)


def through_msgpack(state, directory):
    return flax.serialization.from_bytes(state, flax.serialization.to_bytes(state))


def through_orbax(state, directory):
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory / "state", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(directory / "state", state)


CHECKPOINTS = [through_msgpack, pytest.param(through_orbax, marks=pytest.mark.forms)]
