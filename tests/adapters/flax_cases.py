"""Both libraries of flax behind the same functions, and what their tests share: options, a batch, comparisons."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from masksafe import adapters

CHANNELS, HEADS = 6, 2
# By NumPy: what JAX computes here, it compiles in each process.
X = jax.device_put(np.float32(np.random.default_rng(0).normal(1, 2, (3, 4, CHANNELS))))
MASK = np.ones((3, 4, 1), bool)
MASK[1, 2:] = MASK[2] = False  # padded positions, and an empty sample
VALID = MASK[..., 0]
PAIRS = np.float32(VALID[:, None, :, None] & VALID[:, None, None])  # as nnx.make_attention_mask makes them
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
MASKED = ("layer", "layer, positions and channels", "rms", "group", "batch")
OF_LINEN = {  # options that flax.nnx does not have
    "layer, features elsewhere": ("LayerNorm", {"reduction_axes": -1, "feature_axes": (2, 1)}),
    "layer, statistics in 16 bits": ("LayerNorm", {"force_float32_reductions": False, "param_dtype": jnp.float16}),
    "group of all": ("GroupNorm", {"num_groups": 2, "reduction_axes": (0, 1, 2)}),
    "batch, two axes": ("BatchNorm", {"use_running_average": False, "axis": (2, 1)}),
    "batch, statistics in 16 bits": (
        "BatchNorm",
        {"use_running_average": False, "force_float32_reductions": False, "param_dtype": jnp.bfloat16},
    ),
}
ALL_NORMS = NORMS | OF_LINEN
IN_BOTH = (
    "layer, parameters in bfloat16",
    "layer, positions and channels",
    "layer without parameters",
    "rms, positions",
)
IN_BOTH += ("rms without scale", "group by size", "batch, positions", "batch in bfloat16", "batch, running statistics")
NORMAL = jax.nn.initializers.normal(1.0)  # for parameters that are neither 0 nor 1


class NnxModel(nnx.Module):
    def __init__(self, layers, rngs):
        self.embed = nnx.Linear(6, 8, rngs=rngs)
        norms = [
            layers.LayerNorm(8, scale_metadata={"note": "kept"}, rngs=rngs),
            layers.RMSNorm(8, rngs=rngs),
            layers.GroupNorm(8, num_groups=2, rngs=rngs),
            layers.BatchNorm(8, momentum=0.5, rngs=rngs),
        ]
        self.norms = nnx.List(norms)
        self.attention = layers.MultiHeadAttention(2, 8, decode=False, normalize_qk=True, rngs=rngs)
        self.out = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x, mask=None, pairs=None):
        x = self.embed(x)
        for norm in self.norms:
            x = nnx.gelu(norm(x, mask=mask))
        return self.out(x + self.attention(x, mask=pairs))


class LinenModel(linen.Module):
    layers: Any

    @linen.compact
    def __call__(self, x, mask=None, pairs=None):
        x, layers = linen.Dense(8)(x), self.layers
        ones = linen.with_partitioning(linen.initializers.ones, (None,))
        norms = layers.LayerNorm(scale_init=ones), layers.RMSNorm(), layers.GroupNorm(2)
        for norm in (*norms, layers.BatchNorm(use_running_average=False)):
            x = linen.gelu(norm(x, mask=mask))
        x = x + layers.MultiHeadAttention(2, normalize_qk=True)(x, mask=pairs)
        x = x + layers.MultiHeadDotProductAttention(2)(x, mask=pairs)
        return linen.Dense(1)(x)


class Nnx:
    """Layers of flax.nnx."""

    own, ours, attention_layer = nnx, adapters.nnx, "MultiHeadAttention"
    step_options = {"decode": True, "is_causal": True}  # noqa: RUF012
    first_layer = "embed"

    @staticmethod
    def make(module, layer, x=X, **options):
        """A layer of flax's module or of ours."""
        features = (HEADS, CHANNELS) if layer == "MultiHeadAttention" else (x.shape[options.get("axis", -1)],)
        return getattr(module, layer)(*features, **options, rngs=nnx.Rngs(1))

    @classmethod
    def decoder(cls, x):
        layer = attention(cls, cls.ours)
        layer.init_cache(x.shape)
        return layer

    @staticmethod
    def model(module):
        return NnxModel(module, nnx.Rngs(0))

    @staticmethod
    def split(layer):
        """A hashable definition, the parameters, and the other state."""
        return nnx.split(layer, nnx.Param, ...)

    @staticmethod
    def apply(definition, params, rest, x, **arguments):
        """The output, and the state that is left."""
        layer = nnx.merge(definition, params, rest, copy=True)
        y = layer(x, **arguments)
        return y, nnx.to_pure_dict(nnx.state(layer, nnx.Not(nnx.RngState)))

    @staticmethod
    def state(model):
        """All parameters and statistics, as dictionaries of arrays."""
        return nnx.to_pure_dict(nnx.state(model))

    @staticmethod
    def metadata(model):
        return dict(model.norms[0].scale.get_metadata())

    @staticmethod
    def with_state(model, state):
        nnx.update(model, state)
        return model

    @classmethod
    def trained(cls, model, d_params, after):
        """The model after a step of gradient descent, with the statistics after it."""
        return cls.with_state(cls.with_state(model, after), descended(nnx.state(model, nnx.Param), d_params))


class Linen:
    """Layers of flax.linen, each bound to its variables, so that it is called as one of flax.nnx."""

    own, ours, attention_layer = linen, adapters.linen, "MultiHeadDotProductAttention"
    step_options = {}  # noqa: RUF012
    first_layer = "Dense_0"

    @staticmethod
    def make(module, layer, x=X, **options):
        options = {"num_heads": HEADS, **options} if "Attention" in layer else options
        return Linen.bound(getattr(module, layer)(**options), x)

    @staticmethod
    def bound(layer, x=X):
        variables = layer.init({"params": jax.random.key(1), "dropout": jax.random.key(2)}, x)
        return layer.bind(variables, rngs={"dropout": jax.random.key(3)}, mutable=["batch_stats", "cache"])

    @classmethod
    def decoder(cls, x):
        return attention(cls, cls.ours, decode=True, x=x)

    @classmethod
    def model(cls, module):
        return cls.bound(LinenModel(module))

    @staticmethod
    def split(layer):
        layer, variables = layer.unbind()
        return layer, variables.get("params", {}), {k: v for k, v in variables.items() if k != "params"}

    @staticmethod
    def apply(definition, params, rest, x, **arguments):
        return definition.apply({"params": params, **rest}, x, **arguments, mutable=["batch_stats", "cache"])

    @staticmethod
    def state(model):
        return linen.unbox(model.variables)

    @staticmethod
    def metadata(model):
        return jax.tree.structure(model.variables)  # with the boxes of partitioning

    @staticmethod
    def with_state(model, state):
        return model.unbind()[0].bind(state, mutable=["batch_stats"])

    @classmethod
    def trained(cls, model, d_params, after):
        return cls.with_state(model, {"params": descended(cls.state(model)["params"], linen.unbox(d_params)), **after})


def descended(params, d_params):
    return jax.tree.map(lambda p, d: p - 5e-4 * d, params, d_params)


def norm(library, module, name):
    layer, options = ALL_NORMS[name]
    initializers = {"scale_init": NORMAL} | ({} if layer == "RMSNorm" else {"bias_init": NORMAL})
    return library.make(module, layer, **initializers, **options)


def attention(library, module, **options):
    given = {"qkv_features": 8, "bias_init": NORMAL, "decode": False, **options}
    return library.make(module, library.attention_layer, **given)


def value_and_gradients(library, layer, x, counted=True, **arguments):
    """The output, the gradients of the sum of its sines by the parameters and the input, and the state that is left."""
    return _value_and_gradients(library.apply, *library.split(layer), x, counted, **arguments)


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames=("is_causal", "decode"))
def _value_and_gradients(apply, definition, params, rest, x, counted, **arguments):
    def total(params, x):
        y, after = apply(definition, params, rest, x, **arguments)
        return jnp.sum(jnp.sin(y.astype(jnp.float32)), where=counted), (y, after)

    (d_params, d_x), (y, after) = jax.grad(total, (0, 1), has_aux=True)(params, x)
    return y, d_params, d_x, after


def assert_close(ours, theirs, dtype=None):
    """Equal in structure, shapes and dtypes, and up to rounding in value."""
    chex.assert_trees_all_equal_shapes_and_dtypes(ours, theirs)
    tolerance = 6e-2 if dtype == jnp.bfloat16 else 2e-5
    chex.assert_trees_all_close(ours, theirs, rtol=tolerance, atol=tolerance)


def same_for_all_garbage(run):
    """What `run(value)` returns, finite and with the same bits for each kind of garbage."""
    first, *others = map(run, GARBAGE)
    chex.assert_tree_all_finite(first)
    for other in others:
        chex.assert_trees_all_equal(first, other)
    return first


def filled(value, x=X, mask=MASK):
    """`x` with a value under the mask."""
    return jnp.where(mask, x, value)


def assert_masked_are_zero(*arrays):
    for x in arrays:
        np.testing.assert_array_equal(np.where(MASK, 0, x), 0)
