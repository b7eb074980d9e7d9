"""The rows of a linear layer's logits on a CPU: in blocks of tokens, whose rows are in memory as a whole.

A block stays in the cache, or passes through it once; of its rows the sums are taken in tiles of the classes.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core import sharding
from masksafe._core.labels import class_index
from masksafe._core.masks import selected
from masksafe._core.precision import wide_dtype
from masksafe._core.sharding import varying_zero
from masksafe._core.tiles import Tile, divide, take
from masksafe._core.typing import Array
from masksafe.losses._linear._formula import Formula, Layer, Part, Tokens
from masksafe.losses._linear._layer import Gradients, Sizes, add_gradients, matmul
from masksafe.losses._linear._token_blocks import Block, TokenBlocks


class Config(NamedTuple):
    """The static arguments."""

    formula: Formula
    on_cpu: Sizes
    elsewhere: Sizes
    elsewhere_if_masked: Sizes
    axis_name: sharding.AxisName  # the mesh axis over which the classes are split

    def classes(self, layer: Layer) -> int:
        """The number of classes on all devices."""
        return sharding.size_over_devices(self.axis_name, layer.kernel.shape[1])

    def local_labels(self, layer: Layer, labels: Array) -> Array:
        """Labels counted from the first class of this device."""
        return sharding.local_class(self.axis_name, labels, layer.kernel.shape[1])


def outputs_and_gradients(
    config: Config, tokens: Tokens, layer: Layer, d_outputs: tuple[Array, ...] | None
) -> tuple[tuple[Array, ...], Gradients | None]:
    """The outputs `[N]`, 0 where masked, and the gradients if the cotangents `[N]` are given; all of them wide."""
    formula, blocks = config.formula, TokenBlocks.of(tokens.labels.size, tokens.live, config.on_cpu.token_block)

    def one_block(block: Block, state: _State) -> _State:
        features, labels = block.take(tokens.features), block.take(tokens.labels)[:, None]
        logits = logits_of(features, layer)
        rows = _sums_of_block(config, layer, logits, config.local_labels(layer, labels))
        new = formula.outputs(rows, labels, config.classes(layer))
        outputs = tuple(
            block.put(old, selected(x[:, 0], block.live)) for old, x in zip(state.outputs, new, strict=True)
        )
        if d_outputs is None or state.gradients is None:
            return _State(outputs, None)
        d_new = tuple(block.take(d.astype(x.dtype))[:, None] for d, x in zip(d_outputs, new, strict=True))
        row_cotangents = formula.row_cotangents(rows, labels, config.classes(layer), d_new)
        is_label = class_index(logits.shape) == config.local_labels(layer, labels)
        d_logits = formula.logit_cotangents(Part(logits, is_label, None, layer.class_weights), row_cotangents)
        tile = config.on_cpu.class_tile
        return _State(outputs, add_gradients(state.gradients, features, layer.kernel, d_logits, block, tile))

    outputs, gradients = blocks.fold(one_block, _initial_state(config, tokens, layer, d_outputs, blocks.length))
    if gradients is not None:
        gradients = gradients._replace(features=blocks.put_back(gradients.features))
    return tuple(map(blocks.put_back, outputs)), gradients


class _State(NamedTuple):
    """The results after some blocks, with the tokens in packed order."""

    outputs: tuple[Array, ...]
    gradients: Gradients | None


def _initial_state(
    config: Config, tokens: Tokens, layer: Layer, d_outputs: tuple[Array, ...] | None, length: int
) -> _State:
    zero = varying_zero([x for x in jax.tree.leaves((tokens, layer, d_outputs)) if isinstance(x, jax.Array)])
    wide = wide_dtype(tokens.features.dtype)

    def no_sum(shape: tuple[int, ...]) -> Array:
        return jnp.zeros(shape, wide) + zero.astype(wide)

    outputs = tuple(no_sum((length,)) for _ in range(config.formula.number))
    if d_outputs is None:
        return _State(outputs, None)
    d_features = no_sum((length, layer.kernel.shape[0]))
    d_bias = None if layer.bias is None else no_sum(layer.bias.shape)
    return _State(outputs, Gradients(d_features, no_sum(layer.kernel.shape), d_bias))


def _sums_of_block(config: Config, layer: Layer, logits: Array, labels: Array) -> Any:
    formula, classes = config.formula, divide(logits.shape[-1], config.on_cpu.class_tile)
    zero = jnp.zeros_like(logits[:, :1])

    def add(j: Any, rows: Any) -> Any:
        return formula.add(rows, formula.sums(_part(layer, logits, labels, classes.tile(j))))

    nothing = jax.tree.map(lambda x: zero + x.astype(zero.dtype), formula.nothing)
    return formula.add_devices(config.axis_name, lax.fori_loop(0, classes.number, add, nothing))


def _part(layer: Layer, logits: Array, labels: Array, classes: Tile) -> Part:
    """A tile of the classes."""
    weights = None if layer.class_weights is None else take(layer.class_weights, 0, classes)
    logits = take(logits, 1, classes)
    index = jnp.asarray(classes.start, jnp.int32) + class_index(logits.shape)
    if not classes.is_ragged:
        return Part(logits, index == labels, None, weights)
    live = index >= classes.first
    return Part(logits, (index == labels) & live, live, weights)


def logits_of(features: Array, layer: Layer) -> Array:
    logits = matmul(features, layer.kernel, 1, 0)
    return logits if layer.bias is None else logits + layer.bias[None].astype(logits.dtype)
