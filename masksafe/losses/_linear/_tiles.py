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
from masksafe._core.precision import wide_dtype
from masksafe._core.sharding import varying_zero
from masksafe._core.typing import Array
from masksafe._core.unfolded import any_of, unknown
from masksafe.losses._linear._blocks import Config, logits_of
from masksafe.losses._linear._formula import Formula, Layer, Part, Tokens
from masksafe.losses._linear._layer import Gradients, Sizes, matmul

State = TypeVar("State")
Tree = TypeVar("Tree")


def default_sizes(tokens: int, width: int, classes: int, block_size: int | None, masked: bool) -> Sizes:
    """The sizes for so many tokens of so many features; a block size given by the user is kept."""
    logits = max(platforms.LEAST_LOGITS, min(platforms.LOGITS_PER_FEATURE * tokens * width, tokens * classes // 4))
    logits = min(logits, platforms.MOST_LOGITS) * (2 if masked else 1)
    most = max(platforms.LEAST_TOKENS_IF_MASKED, 2 * width) if masked else math.isqrt(2 * logits)
    blocks = max(2 if masked and tokens > platforms.MOST_TOKENS_OF_ONE_BLOCK else 1, -(-tokens // most))
    block = -(-tokens // blocks) if block_size is None else min(block_size, tokens)
    tiles = -(-classes * block // logits)
    even = -(-classes // tiles)
    aligned = even if classes % even == 0 or even < 128 else -(-even // 128) * 128
    return Sizes(block, min(classes, aligned))


def outputs_and_sums(config: Config, tokens: Tokens, layer: Layer) -> tuple[tuple[Array, ...], Any]:
    """The outputs `[N]`, 0 where masked, and the sums of each row `[N, 1]`, of use where unmasked."""
    formula, sizes = config.formula, _sizes(config, tokens)
    packed = _Packed.of(tokens, sizes.token_block)
    labels = packed.take(config.local_labels(layer, tokens.labels[:, None]))
    features = packed.take(tokens.features)
    zero = _zeros((packed.length, 1), wide_dtype(layer.kernel.dtype), (tokens, layer))

    def of_tile(start: Any, tile: Layer, rows: Any) -> Any:
        def of_block(i: Any, rows: Any) -> Any:
            logits = logits_of(packed.block(features, i), tile)
            is_label = _is_label(logits.shape, packed.block(labels, i), start)
            new = _sums_in_one_pass(formula, Part(logits, is_label, None, tile.class_weights))
            added = formula.add(packed.block(rows, i), new)
            return jax.tree.map(lambda x, part: packed.with_block(x, i, part), rows, added)

        return packed.over_blocks(of_block, rows)

    nothing = jax.tree.map(lambda x: zero + x.astype(zero.dtype), formula.nothing)
    rows = _over_tiles(layer, sizes.class_tile, of_tile, nothing)
    rows = jax.tree.map(lambda x: packed.put_back(x, tokens.labels.size), formula.add_devices(config.axis_name, rows))
    outputs = formula.outputs(rows, tokens.labels[:, None], config.classes(layer))
    return tuple(selected(x[:, 0], tokens.live) for x in outputs), rows


def gradients(
    config: Config,
    tokens: Tokens,
    layer: Layer,
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
    formula, sizes = config.formula, _sizes(config, tokens)
    if wanted is not None and tokens.live is None:
        packed = _Packed.in_place(wanted, sizes.token_block)
    else:
        packed = _Packed.of(tokens._replace(live=both(tokens.live, wanted)), sizes.token_block)
    live = both(tokens.live, wanted)
    labels = packed.take(config.local_labels(layer, tokens.labels[:, None]))
    features = packed.take(tokens.features)
    d_rows = tuple(d[:, None] for d in d_outputs)
    rows_of_all = formula.row_cotangents(rows, tokens.labels[:, None], config.classes(layer), d_rows)
    operands = features, labels, _without_dead(jax.tree.map(packed.take, rows_of_all), packed.live)
    first = packed.block(operands, 0)  # outside of the loop over the tiles, since they are the same for each
    any_live = factor != 0 if live is None else (factor != 0) & any_of(live)

    def finished(gradient: Array, dtype: Any) -> Array:
        return selected((gradient * factor.astype(gradient.dtype)).astype(dtype), any_live)

    def of_tile(start: Any, tile: Layer, state: _State, is_label: Array | None = None) -> _State:
        def of_block(i: Any, sums: _Sums) -> _Sums:
            is_first = sums.kernel is None
            block, labels, rows = first if is_first else packed.block(operands, i)
            logits = logits_of(block, tile)
            known = is_label if is_first else None
            at = _is_label(logits.shape, labels, start) if known is None else known
            d_logits = formula.logit_cotangents(Part(logits, at, None, tile.class_weights), rows)
            d_bias = None if tile.bias is None else _added(sums.bias, jnp.sum(d_logits, 0))
            d_logits = d_logits.astype(layer.kernel.dtype)
            d_features = packed.block(sums.features, i) + matmul(d_logits, tile.kernel, 1, 1)
            d_kernel = _added(sums.kernel, matmul(block, d_logits, 0, 0))
            return _Sums(packed.with_block(sums.features, i, d_features), d_kernel, d_bias)

        sums = packed.over_blocks(of_block, _Sums(state.features, None, None))
        assert sums.kernel is not None
        d_kernel = _put_tile(state.kernel, start, finished(sums.kernel, dtypes.kernel))
        d_bias = None
        if state.bias is not None and sums.bias is not None:
            d_bias = _put_tile(state.bias, start, finished(sums.bias, dtypes.bias))
        return _State(sums.features, d_kernel, d_bias)

    def labels_of_first_block(start: Any) -> Array:
        return _is_label((packed.size, sizes.class_tile), first[1], start)

    every = tokens, layer, rows, d_outputs, factor
    d_features = _zeros((packed.length, layer.kernel.shape[0]), wide_dtype(layer.kernel.dtype), every)
    d_kernel = _zeros(layer.kernel.shape, dtypes.kernel, every)
    d_bias = None if layer.bias is None else _zeros(layer.bias.shape, dtypes.bias, every)
    state = _over_tiles(layer, sizes.class_tile, of_tile, _State(d_features, d_kernel, d_bias), labels_of_first_block)
    d_features = packed.put_back(state.features, tokens.labels.size) * factor.astype(d_features.dtype)
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


def _zeros(shape: tuple[int, ...], dtype: Any, others: Any) -> Array:
    """Zeros that inside `jax.shard_map` vary like the others."""
    zero = varying_zero([x for x in jax.tree.leaves(others) if isinstance(x, jax.Array)])
    return jnp.zeros(shape, dtype) + zero.astype(dtype)


def _sizes(config: Config, tokens: Tokens) -> Sizes:
    return config.elsewhere if tokens.live is None else config.elsewhere_if_masked


# A tile of logits.


def _is_label(shape: tuple[int, ...], labels: Array, start: Any) -> Array:
    return jnp.equal(jnp.asarray(start, jnp.int32) + class_index(shape), labels)


def _sums_in_one_pass(formula: Formula, part: Part) -> Any:
    """The sums of each row: every logit is a sum of its own, and these are added."""
    nothing = jax.tree.map(lambda x: x.astype(part.logits.dtype), formula.nothing)
    sums = lax.reduce(formula.sums_of_each(part), nothing, formula.add, (1,))
    return jax.tree.map(lambda x: x[:, None], sums)


# Tokens in blocks, unmasked ones first, and classes in tiles.


class _Packed(NamedTuple):
    """The order of `length` tokens in blocks of `size`, or None if they stay as they are."""

    order: Array | None
    place: Array | None  # where each of the tokens is, if unmasked; None: where it was
    live: Array | None  # [length, 1]
    blocks: Array | int  # how many to compute
    size: int
    length: int

    @classmethod
    def of(cls, tokens: Tokens, size: int) -> "_Packed":
        number = tokens.labels.size
        length = -(-number // size) * size
        position = jnp.arange(length, dtype=jnp.int32)
        if tokens.live is None:
            order = None if length == number else jnp.minimum(position, number - 1)
            live = None if length == number else position[:, None] < number
            return cls(order, None, live, length // size, size, length)
        place = jnp.cumsum(unknown(tokens.live), dtype=jnp.int32) - 1
        count = place[-1] + 1
        order = (
            jnp.zeros(length, jnp.int32).at[jnp.where(tokens.live, place, length)].set(position[:number], mode="drop")
        )
        # Dead places repeat an unmasked token rather than hold zeros: 0 times an infinite weight would be NaN.
        live = position < count
        return cls(jnp.where(live, order, order[0]), place, live[:, None], -(-count // size), size, length)

    @classmethod
    def in_place(cls, live: Array, size: int) -> "_Packed":
        """Tokens that stay where they are, with the first that is left in the place of each dead one."""
        length = -(-live.size // size) * size
        live = jnp.pad(live, (0, length - live.size))
        order = jnp.where(live, jnp.arange(length, dtype=jnp.int32), jnp.argmax(unknown(live)).astype(jnp.int32))
        return cls(order, None, live[:, None], length // size, size, length)

    def take(self, x: Array) -> Array:
        return x if self.order is None else x[self.order]

    def put_back(self, x: Array, number: int) -> Array:
        """The rows of the `number` tokens."""
        return x[:number] if self.place is None else x[jnp.maximum(self.place, 0)]

    def block(self, tree: Tree, i: Any) -> Tree:
        if self.size == self.length:
            return tree
        part: Tree = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, i * self.size, self.size, 0), tree)
        return part

    def with_block(self, x: Array, i: Any, part: Array) -> Array:
        return part if self.size == self.length else lax.dynamic_update_slice_in_dim(x, part, i * self.size, 0)

    def over_blocks(self, body: Callable[[Any, State], State], state: State) -> State:
        state = body(0, state)
        return state if self.size == self.length else lax.fori_loop(1, self.blocks, body, state)


def _without_dead(rows: Any, live: Array | None) -> Any:
    """The cotangents of rows, 0 where dead. The shift stays: relative to another an exponential may be infinite."""
    return jax.tree.map(lambda x: selected(x, live), rows)._replace(shift=rows.shift)


def _over_tiles(
    layer: Layer,
    size: int,
    body: Callable[..., State],
    state: State,
    prepare: Callable[[Any], Array] | None = None,
) -> State:
    """`body(start, tile, state)` for each tile of the classes, the last of which may be smaller.

    In the loop, `body` also gets what `prepare(start)` returns. It is computed a step ahead and carried along: XLA
    computes the cotangents of logits inside the matrix product only if the other operands are in memory.
    """
    whole, rest = divmod(layer.kernel.shape[1], size)

    def tile(start: Any, size: int) -> Layer:
        part: Layer = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size, x.ndim - 1), layer)
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
