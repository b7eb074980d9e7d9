"""The rows of a linear layer's logits on GPUs and TPUs: large tiles, each a few matrix products and reductions.

A GPU reads and writes main memory for everything that its matrix products and reductions exchange, so what counts is
how often the logits, the kernel and its gradient pass through it:

* The forward pass keeps the sums of each row. The reverse pass computes the logits again, tile by tile, with the actual
  cotangent of the loss. A tile of the kernel's gradient is then complete at once, and no float32 array of the size of
  the kernel is needed.
* One reduction finds the largest logit and the sum of exponentials together, and reads the logits once.
* XLA computes the cotangents of a tile of logits inside the matrix product that gives the logits (jax 0.12).

Unmasked tokens are moved to the front, and only blocks that contain any are computed. The first block is always
computed, outside of the loop over the others: most calls have no other, and the first has no sum to add to.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core import run_time, sharding
from masksafe._core.labels import class_index
from masksafe._core.masks import both, selected
from masksafe._core.precision import matmul
from masksafe._core.tiles import loop
from masksafe._core.typing import Array, Arrays, DType, Index, Pytree, Tree
from masksafe.losses._rows._cross_entropy import CrossEntropy
from masksafe.losses._rows._formula import LogitTile
from masksafe.losses._rows._linear_layer import Linear, LinearInputs
from masksafe.losses._rows._linear_loss import LinearLoss, Sizes
from masksafe.losses._rows._packing import Packed


class _ClassTile(NamedTuple):
    """A layer at a tile of the classes, which start at `start`."""

    start: Index
    kernel: Array
    bias: Array | None
    class_weights: Array | None

    def logit_tile(self, features: Array, dtype: DType, labels: Array, is_label: Array | None = None) -> LogitTile:
        """The logits of some tokens, and which are at labels, unless that is given."""
        logits = Linear(features, self.kernel, self.bias).logits(dtype)
        is_label = _is_label(logits.shape, labels, self.start) if is_label is None else is_label
        return LogitTile(logits, is_label, None, self.class_weights, first=self.start)


def sums(
    options: LinearLoss, sizes: Sizes, inputs: LinearInputs, _: None, d_outputs: Arrays | None
) -> tuple[Pytree, tuple[Linear, ...]]:
    """The sums of each row `[N, 1]`, meaningful where unmasked; and gradients of 0 if there are cotangents.

    Each logit alone has sums, which one reduction adds up. For features [4096, 512] and a kernel [512, 50257] in tiles
    of 16384 classes: four tiles, of which three have logits [4096, 16384], and sums [4096, 1].
    """
    formula, classes = options.formula, inputs.classes(options.axis_name)
    assert isinstance(formula, CrossEntropy)
    dtype, number = inputs.sum_dtype, inputs.data.size
    packed = Packed.of(number, inputs.unmasked, sizes.token_block)
    features, labels = packed.packed((inputs.layers[0].features, classes.local(inputs.data)))

    def on_tile(tile: _ClassTile, rows: Pytree, _: None = None) -> Pytree:
        def on_block(i: Index, rows: Pytree) -> Pytree:
            block = packed.block(i)
            terms = formula.sums_of_each(tile.logit_tile(block.cut(features), dtype, block.cut(labels)))
            new = lax.reduce(terms, formula.empty_sums(jnp.zeros((), dtype)), formula.add, (1,))
            new = jax.tree.map(lambda x: x[:, None], new)
            return jax.tree.map(block.put, rows, formula.add(block.cut(rows), new))

        rows = on_block(0, rows)
        return rows if packed.is_one_block else loop(1, packed.blocks, on_block, rows)

    empty = sharding.vary_with(formula.empty_sums(jnp.zeros((packed.length, 1), dtype)), inputs)
    rows = formula.add_devices(classes, _over_tiles(inputs, sizes.class_tile, on_tile, empty))
    gradients = () if d_outputs is None else (inputs.layers[0].zeros(number, Linear(dtype, dtype, dtype)),)
    return sharding.vary_with((jax.tree.map(lambda x: packed.unpacked(x, number), rows), gradients), inputs)


def gradients(
    options: LinearLoss,
    sizes: Sizes,
    inputs: LinearInputs,
    rows: Pytree,
    d_outputs: Arrays,
    factor: Array,
    dtypes: Linear,
    needed: Array | None,
) -> Linear:
    """The gradients of the sum of `outputs * d_outputs * factor`, in the given dtypes; 0 where masked or `factor` is 0.

    The cotangents of the logits are rounded before they are multiplied by the factor. Tokens that are not `needed`
    `[N]` have cotangents of 0. Without a mask they stay where they are: most often there are none, and moving the
    others costs more than it saves. For features [4096, 512] and a kernel [512, 50257] in tiles of 16384 classes:
    `rows` and `d_outputs` are [4096, 1], and a tile completes [512, 16384] of the kernel's gradient.
    """
    formula, classes = options.formula, inputs.classes(options.axis_name)
    assert isinstance(formula, CrossEntropy)
    (layer,), number, dtype = inputs.layers, inputs.data.size, inputs.sum_dtype
    unmasked = both(inputs.unmasked, needed)
    if needed is not None and inputs.unmasked is None:
        packed = Packed.in_place(needed, sizes.token_block)
    else:
        packed = Packed.of(number, unmasked, sizes.token_block)
    d_sums = formula.d_sums(rows, inputs.data, classes.number, d_outputs)
    features, labels, d_sums = packed.packed((layer.features, classes.local(inputs.data), d_sums))
    # 0 at repeated tokens, except for the largest x: relative to another one an exponential may be infinite.
    valid = jax.tree.map(lambda x: selected(x, packed.valid), d_sums)._replace(largest=d_sums.largest)
    operands = features, labels, valid
    first = packed.block(0).cut(operands)  # outside of the loop over the tiles, since it is the same for all
    any_unmasked = factor != 0 if unmasked is None else (factor != 0) & run_time.any_of(unmasked)

    def on_tile(tile: _ClassTile, state: Linear, is_label: Array | None = None) -> Linear:
        def on_block(i: Index, sums: Linear) -> Linear:
            is_first = sums.kernel is None
            block = packed.block(i)
            features, labels, d_rows = first if is_first else block.cut(operands)
            logits = tile.logit_tile(features, dtype, labels, is_label if is_first else None)
            d_logits, _ = formula.d_tile(logits, d_rows)
            d_bias = None if tile.bias is None else _added(sums.bias, jnp.sum(d_logits, 0))
            d_logits = d_logits.astype(layer.kernel.dtype)
            d_features = block.cut(sums.features) + matmul(d_logits, tile.kernel, 1, 1)
            d_kernel = _added(sums.kernel, matmul(features, d_logits, 0, 0))
            return Linear(block.put(sums.features, d_features), d_kernel, d_bias)

        def put(whole: Array, part: Array) -> Array:
            part = selected((part * factor.astype(part.dtype)).astype(whole.dtype), any_unmasked)
            if whole.shape == part.shape:
                return part
            return lax.dynamic_update_slice_in_dim(whole, part, tile.start, whole.ndim - 1)

        sums = on_block(0, Linear(state.features, None, None))  # type: ignore[arg-type]  # before the first there is none
        d_features, *d_by_class = sums if packed.is_one_block else loop(1, packed.blocks, on_block, sums)
        return Linear(d_features, *jax.tree.map(put, list(state[1:]), d_by_class))

    def labels_of_first_block(start: Index) -> Array:
        return _is_label((packed.size, sizes.class_tile), first[1], start)

    state = layer.zeros(packed.length, dtypes._replace(features=dtype))  # features in packed order
    state = sharding.vary_with(state, (inputs, rows, d_outputs, factor))
    state = _over_tiles(inputs, sizes.class_tile, on_tile, state, labels_of_first_block)
    d_features = packed.unpacked(state.features, number) * factor.astype(dtype)
    has_gradient = factor != 0 if unmasked is None else (factor != 0) & unmasked[:, None]
    return Linear(selected(d_features.astype(dtypes.features), has_gradient), state.kernel, state.bias)


def _added(a: Array | None, b: Array) -> Array:
    return b if a is None else a + b


def _is_label(shape: tuple[int, ...], labels: Array, start: Index) -> Array:
    return jnp.equal((jnp.asarray(start, jnp.int32) + class_index(shape)).astype(labels.dtype), labels)


def _over_tiles(
    inputs: LinearInputs,
    size: int,
    body: Callable[..., Tree],
    state: Tree,
    prepare: Callable[[Index], Pytree] = lambda _: None,
) -> Tree:
    """`body(tile, state)` for each tile of the classes, the last of which may be smaller.

    In the loop, `body` also gets the result of `prepare(start)`, which is computed a step ahead and carried along: XLA
    computes the cotangents of logits inside the matrix product only if the other operands are in memory (jax 0.12,
    H100, 4096x1024x32768, bfloat16: 3,970 MB moved for 3,198).
    """
    by_class = inputs.layers[0].kernel, inputs.layers[0].bias, inputs.class_weights
    whole, rest = divmod(inputs.layers[0].kernel.shape[1], size)

    def tile(start: Index, size: int) -> _ClassTile:
        return _ClassTile(
            start, *jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size, x.ndim - 1), by_class)
        )

    def step(j: Index, carry: tuple[Tree, Pytree]) -> tuple[Tree, Pytree]:
        state, prepared = carry
        start = j * size
        return body(tile(start, size), state, prepared), prepare(start + size)

    if whole == 1:
        state = body(tile(0, size), state)
    else:
        state, _ = loop(0, whole, step, (state, prepare(0)))
    return state if rest == 0 else body(tile(whole * size, rest), state)
