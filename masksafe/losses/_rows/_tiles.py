"""The rows of a linear layer's logits elsewhere than on a CPU: large tiles, each a few matrix products and reductions.

A GPU reads and writes main memory for everything that its matrix products and reductions exchange, so what counts is
how often the logits, the kernel and its gradient pass through it:

* The forward pass keeps the sums of each row. The reverse pass computes the logits again, tile by tile, with the actual
  cotangent of the loss. A tile of the kernel's gradient is then complete at once, and no float32 array of the size of
  the kernel is needed.
* One reduction finds the largest logit and the sum of exponentials together, and reads the logits once.
* XLA computes the cotangents of a tile of logits inside the matrix product that gives the logits.

Unmasked tokens are moved to the front, and only blocks that contain any are computed. The first is always computed, and
outside of the loop over the others: most calls have no other, and for the first there is no sum to add to.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core import platforms
from masksafe._core.labels import class_index
from masksafe._core.masks import both, selected
from masksafe._core.sharding import vary_with
from masksafe._core.typing import Array
from masksafe._core.unfolded import any_of
from masksafe.losses._rows._blocks import Config, Inputs, Sizes
from masksafe.losses._rows._formula import LabelFormula, Part
from masksafe.losses._rows._sources import Gradients, Linear, matmul
from masksafe.losses._rows._tokens import Packed

State = TypeVar("State")


class _Layer(NamedTuple):
    """A tile of the classes."""

    kernel: Array
    bias: Array | None
    class_weights: Array | None

    def logits(self, features: Array, dtype: Any) -> Array:
        return Linear(features, self.kernel, self.bias).logits(dtype)


def default_sizes(tokens: int, width: int, classes: int, block_size: int | None, masked: bool) -> Sizes:
    """The sizes for so many tokens of so many features; a block size given by the user is kept."""
    of = platforms.choices().linear
    logits = max(of.least_logits, min(of.logits_per_feature * tokens * width, tokens * classes // 4))
    logits = min(logits, of.most_logits) * (2 if masked else 1)
    most = max(of.least_tokens_if_masked, 2 * width) if masked else math.isqrt(2 * logits)
    blocks = max(2 if masked and tokens > of.most_tokens_of_one_block else 1, -(-tokens // most))
    block = -(-tokens // blocks) if block_size is None else min(block_size, tokens)
    tiles = -(-classes * block // logits)
    even = -(-classes // tiles)
    aligned = even if classes % even == 0 or even < 128 else -(-even // 128) * 128
    return Sizes(block, min(classes, aligned))


def sums(config: Config, formula: LabelFormula, inputs: Inputs) -> Any:
    """The sums of each row `[N, 1]`, of use where unmasked."""
    sizes, classes, dtype = config.elsewhere.of(inputs.live), inputs.classes(config), inputs.sum_dtype
    packed = Packed.of(inputs.data.size, inputs.live, sizes.token_block)
    features, labels = packed.packed((inputs.layers[0].features, classes.local(inputs.data)))

    def of_tile(start: Any, tile: _Layer, rows: Any) -> Any:
        def of_block(i: Any, rows: Any) -> Any:
            block = packed.block(i)
            logits = tile.logits(block.cut(features), dtype)
            is_label = _is_label(logits.shape, block.cut(labels), start)
            new = _sums_in_one_pass(formula, Part(logits, is_label, None, tile.class_weights))
            return jax.tree.map(block.put, rows, formula.add(block.cut(rows), new))

        return _over_blocks(packed, of_block, rows)

    nothing = vary_with(formula.nothing(jnp.zeros((packed.length, 1), dtype)), inputs)
    rows = formula.add_devices(config.axis_name, _over_tiles(inputs, sizes.class_tile, of_tile, nothing))
    return jax.tree.map(lambda x: packed.unpacked(x, inputs.data.size), rows)


def gradients(
    config: Config,
    formula: LabelFormula,
    inputs: Inputs,
    rows: Any,
    d_outputs: tuple[Array, ...],
    factor: Array,
    dtypes: Gradients,
    wanted: Array | None = None,
) -> Gradients:
    """The gradients of the sum of `outputs * d_outputs * factor`, in the given dtypes; 0 where masked or `factor` is 0.

    The cotangents of the logits are rounded before they are multiplied by the factor. Unmasked tokens that are not
    wanted `[N]` have cotangents of 0. Without a mask they stay where they are: to move the others costs more than what
    they save, since most often there are none.
    """
    sizes, classes, dtype = config.elsewhere.of(inputs.live), inputs.classes(config), inputs.sum_dtype
    (layer,), number = inputs.layers, inputs.data.size
    live = both(inputs.live, wanted)
    if wanted is not None and inputs.live is None:
        packed = Packed.in_place(wanted, sizes.token_block)
    else:
        packed = Packed.of(number, live, sizes.token_block)
    rows_of_all = formula.row_cotangents(rows, inputs.data, classes.number, d_outputs)
    features, labels, of_rows = packed.packed((layer.features, classes.local(inputs.data), rows_of_all))
    operands = features, labels, _without_dead(of_rows, packed.live)
    first = packed.block(0).cut(operands)  # outside of the loop over the tiles, since they are the same for each
    any_live = factor != 0 if live is None else (factor != 0) & any_of(live)

    def finished(gradient: Array, dtype: Any) -> Array:
        return selected((gradient * factor.astype(gradient.dtype)).astype(dtype), any_live)

    def of_tile(start: Any, tile: _Layer, state: _State, is_label: Array | None = None) -> _State:
        def of_block(i: Any, sums: _Sums) -> _Sums:
            is_first = sums.kernel is None
            block = packed.block(i)
            features, labels, rows = first if is_first else block.cut(operands)
            logits = tile.logits(features, dtype)
            known = is_label if is_first else None
            at = _is_label(logits.shape, labels, start) if known is None else known
            d_logits = formula.logit_cotangents(Part(logits, at, None, tile.class_weights), rows)
            d_bias = None if tile.bias is None else _added(sums.bias, jnp.sum(d_logits, 0))
            d_logits = d_logits.astype(layer.kernel.dtype)
            d_features = block.cut(sums.features) + matmul(d_logits, tile.kernel, 1, 1)
            d_kernel = _added(sums.kernel, matmul(features, d_logits, 0, 0))
            return _Sums(block.put(sums.features, d_features), d_kernel, d_bias)

        sums = _over_blocks(packed, of_block, _Sums(state.features, None, None))
        assert sums.kernel is not None
        d_kernel = _put_tile(state.kernel, start, finished(sums.kernel, dtypes.kernel))
        d_bias = None
        if state.bias is not None and sums.bias is not None:
            d_bias = _put_tile(state.bias, start, finished(sums.bias, dtypes.bias))
        return _State(sums.features, d_kernel, d_bias)

    def labels_of_first_block(start: Any) -> Array:
        return _is_label((packed.size, sizes.class_tile), first[1], start)

    d_features = jnp.zeros((packed.length, layer.kernel.shape[0]), dtype)
    d_bias = None if layer.bias is None else jnp.zeros(layer.bias.shape, dtypes.bias)
    state = _State(d_features, jnp.zeros(layer.kernel.shape, dtypes.kernel), d_bias)
    state = vary_with(state, (inputs, rows, d_outputs, factor))
    state = _over_tiles(inputs, sizes.class_tile, of_tile, state, labels_of_first_block)
    d_features = packed.unpacked(state.features, number) * factor.astype(dtype)
    has_gradient = factor != 0 if live is None else (factor != 0) & live[:, None]
    return Gradients(selected(d_features.astype(dtypes.features), has_gradient), state.kernel, state.bias)


class _State(NamedTuple):
    """Gradients after some tiles: of the features in packed order, and of the classes of these tiles."""

    features: Array
    kernel: Array
    bias: Array | None


class _Sums(NamedTuple):
    """Gradients after some blocks of one tile; None before the first."""

    features: Array
    kernel: Array | None
    bias: Array | None


def _added(a: Array | None, b: Array) -> Array:
    return b if a is None else a + b


def _put_tile(whole: Array, start: Any, tile: Array) -> Array:
    if whole.shape == tile.shape:
        return tile
    return lax.dynamic_update_slice_in_dim(whole, tile, start, whole.ndim - 1)


# A tile of logits.


def _is_label(shape: tuple[int, ...], labels: Array, start: Any) -> Array:
    return jnp.equal(jnp.asarray(start, jnp.int32) + class_index(shape), labels)


def _sums_in_one_pass(formula: LabelFormula, part: Part) -> Any:
    """The sums of each row: every logit is a sum of its own, and these are added."""
    nothing = formula.nothing(jnp.zeros((), part.logits.dtype))
    sums = lax.reduce(formula.sums_of_each(part), nothing, formula.add, (1,))
    return jax.tree.map(lambda x: x[:, None], sums)


# Tokens in blocks, and classes in tiles.


def _over_blocks(packed: Packed, body: Callable[[Any, State], State], state: State) -> State:
    state = body(0, state)
    return state if packed.size == packed.length else lax.fori_loop(1, packed.blocks, body, state)


def _without_dead(rows: Any, live: Array | None) -> Any:
    """The cotangents of rows, 0 where dead. The shift stays: relative to another an exponential may be infinite."""
    return jax.tree.map(lambda x: selected(x, live), rows)._replace(shift=rows.shift)


def _over_tiles(
    inputs: Inputs, size: int, body: Callable[..., State], state: State, prepare: Callable[[Any], Array] | None = None
) -> State:
    """`body(start, tile, state)` for each tile of the classes, the last of which may be smaller.

    In the loop, `body` also gets what `prepare(start)` returns. It is computed a step ahead and carried along: XLA
    computes the cotangents of logits inside the matrix product only if the other operands are in memory.
    """
    layer = _Layer(inputs.layers[0].kernel, inputs.layers[0].bias, inputs.class_weights)
    whole, rest = divmod(layer.kernel.shape[1], size)

    def tile(start: Any, size: int) -> _Layer:
        part: _Layer = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size, x.ndim - 1), layer)
        return part

    def step(j: Any, carry: tuple[State, Any]) -> tuple[State, Any]:
        state, prepared = carry
        start = j * size
        if prepare is None:
            return body(start, tile(start, size), state), None
        return body(start, tile(start, size), state, prepared), prepare(start + size)

    if whole == 1:
        state = body(0, tile(0, size), state)
    else:
        state, _ = lax.fori_loop(0, whole, step, (state, None if prepare is None else prepare(0)))
    return state if rest == 0 else body(whole * size, tile(whole * size, rest), state)
