"""Rows of logits in blocks of tokens, whose rows are in memory as a whole.

On a CPU a block stays in the cache, or passes through it once; of its rows the sums are taken in tiles of the classes.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core import sharding
from masksafe._core.masks import selected
from masksafe._core.precision import wide_dtype
from masksafe._core.sharding import vary_with
from masksafe._core.typing import Array
from masksafe.losses._rows._formula import Classes, Formula
from masksafe.losses._rows._sources import Gradients, Linear, add_to_kernel, matmul
from masksafe.losses._rows._tokens import Block, Packed


class Sizes(NamedTuple):
    """How many tokens make a block, and how many classes a tile."""

    token_block: int
    class_tile: int


class SizesByMask(NamedTuple):
    """Smaller blocks let more of them be skipped."""

    unmasked: Sizes
    masked: Sizes

    def of(self, live: Array | None) -> Sizes:
        return self.unmasked if live is None else self.masked


class Config(NamedTuple):
    """The static arguments."""

    formula: Formula
    on_cpu: SizesByMask
    elsewhere: SizesByMask
    axis_name: sharding.AxisName  # the mesh axis over which the classes are split


class Inputs(NamedTuple):
    """What the rows are computed from. In the user's layout the N tokens are on any number of axes `[...]`."""

    layers: tuple[Linear, ...]
    data: Any  # what else is known of each token: labels `[N, 1]`, or `[...]`; targets `[N, k]`, or `[..., k]`
    class_weights: Array | None  # [V]
    live: Array | None  # which tokens are unmasked `[N]`, or `[...]`; None means all

    @property
    def sum_dtype(self) -> Any:
        """That of the sums: of all floats but the weights, at least float32."""
        floats = [x for x in jax.tree.leaves(self.data) if jnp.issubdtype(x.dtype, jnp.floating)]
        # Widened first, since only one side may be, and strict promotion refuses float32 with float16.
        return functools.reduce(
            jnp.promote_types, [x.sum_dtype for x in self.layers] + [wide_dtype(x.dtype) for x in floats]
        )

    def classes(self, config: Config) -> Classes:
        return Classes(self.layers[0].kernel.shape[1], config.axis_name, self.class_weights)


def sums_and_gradients(
    config: Config, sizes: Sizes, inputs: Inputs, sums: Any, d_outputs: tuple[Array, ...] | None
) -> tuple[Any, tuple[Gradients, ...]]:
    """The sums of each row `[N, 1]`, of use where unmasked, and the gradients; both in the dtype of sums.

    Sums that are known are not computed again; without cotangents of the outputs `[N, 1]` there are no gradients.
    """
    layers, data, _, live = inputs
    formula, classes, dtype = config.formula, inputs.classes(config), inputs.sum_dtype
    number = layers[0].features.shape[0]
    packed = Packed.of(number, live, sizes.token_block)

    def one_block(i: Any, state: tuple[Any, tuple[Gradients, ...]]) -> tuple[Any, tuple[Gradients, ...]]:
        all_sums, gradients = state
        block = packed.block(i)
        *features, known, d_rows, of_block = block.take((*(layer.features for layer in layers), data, d_outputs, sums))
        parts = [layer._replace(features=x) for layer, x in zip(layers, features, strict=True)]
        logits = tuple(layer.logits(dtype) for layer in parts)
        if sums is None:
            of_block = vary_with(formula.sums_of(logits, known, classes, sizes.class_tile), all_sums)
            all_sums = jax.tree.map(block.put, all_sums, of_block)
        if d_outputs is not None:
            d_logits = formula.cotangents(logits, known, classes, of_block, d_rows)
            of_layers = zip(gradients, parts, d_logits, strict=False)
            gradients = tuple(added(block, *of_layer) for of_layer in of_layers)
        return all_sums, gradients

    def added(block: Block, gradients: Gradients, layer: Linear, d_logits: Array) -> Gradients:
        # Not by zeros in the cotangents of the rows: the logits of a repeated token may be infinite.
        d_logits = selected(d_logits, block.live)
        d_bias = None if gradients.bias is None else gradients.bias + jnp.sum(d_logits, 0).astype(dtype)
        d_logits = d_logits.astype(layer.kernel.dtype)
        d_features = block.put(gradients.features, matmul(d_logits, layer.kernel, 1, 1).astype(dtype))
        d_kernel = add_to_kernel(gradients.kernel, layer.features, d_logits, sizes.class_tile)
        return Gradients(d_features, d_kernel, d_bias)

    def zeros(shape: tuple[int, ...]) -> Array:
        return jnp.zeros(shape, dtype)

    no_sums = formula.nothing(zeros((packed.length, 1))) if sums is None else ()
    no_gradients = tuple(
        Gradients(
            zeros((packed.length, layer.kernel.shape[0])),
            zeros(layer.kernel.shape),
            None if layer.bias is None else zeros(layer.bias.shape),
        )
        for layer in layers[: formula.gradients if d_outputs is not None else 0]
    )
    state = vary_with((no_sums, no_gradients), (inputs, sums, d_outputs))
    is_one = isinstance(packed.blocks, int) and packed.blocks == 1
    found, gradients = one_block(0, state) if is_one else lax.fori_loop(0, packed.blocks, one_block, state)
    if sums is None:
        sums = jax.tree.map(lambda x: packed.unpacked(x, number), found)
    where = None if live is None else live[:, None]
    of_tokens = [selected(packed.unpacked(d.features, number), where) for d in gradients]
    return sums, tuple(d._replace(features=x) for d, x in zip(gradients, of_tokens, strict=True))
