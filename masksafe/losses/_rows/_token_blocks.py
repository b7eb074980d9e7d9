"""Rows of logits in blocks of tokens: the rows of a block are in memory as a whole.

On a CPU a block stays in the cache, or passes through it once; the sums over its rows are taken in tiles of classes.
"""

import jax
import jax.numpy as jnp

from masksafe._core.masks import selected
from masksafe._core.precision import matmul
from masksafe._core.sharding import vary_with
from masksafe._core.tiles import loop
from masksafe._core.typing import Array, Arrays, Index, Pytree
from masksafe.losses._rows._linear_layer import Linear, LinearInputs, add_to_kernel
from masksafe.losses._rows._linear_loss import LinearLoss, Sizes
from masksafe.losses._rows._packing import Packed, TokenBlock

_State = tuple[Pytree, tuple[Linear, ...]]


def sums_and_gradients(
    options: LinearLoss, sizes: Sizes, inputs: LinearInputs, sums: Pytree, d_outputs: Arrays | None
) -> _State:
    """The sums of each row `[N, 1]`, meaningful where unmasked, and the gradients; both in the dtype of sums.

    Given sums are not computed again. Without cotangents of the outputs `[N, 1]` there are no gradients. For features
    [4096, 512] and a kernel [512, 50257] in blocks of 256 tokens: sixteen times logits [256, 50257], sums [4096, 1].
    """
    layers, data, _, unmasked, _ = inputs
    formula, classes, dtype = options.formula, inputs.classes(options.axis_name), inputs.sum_dtype
    (number,) = inputs.tokens
    packed = Packed.of(number, unmasked, sizes.token_block)

    def one_block(i: Index, state: _State) -> _State:
        all_sums, gradients = state
        block = packed.block(i)
        all_rows: Pytree = [layer.features for layer in layers], data, d_outputs, sums
        features, known, d_rows, block_sums = block.take(all_rows)
        parts = [layer._replace(features=x) for layer, x in zip(layers, features, strict=True)]
        logits = tuple(layer.logits(dtype) for layer in parts)
        if sums is None:
            block_sums = vary_with(formula.sums_of(logits, known, classes, sizes.class_tile), all_sums)
            all_sums = jax.tree.map(block.put, all_sums, block_sums)
        if d_outputs is not None:
            d_logits = formula.cotangents(logits, known, classes, block_sums, d_rows)
            layer_cotangents = zip(gradients, parts, d_logits, strict=False)
            gradients = tuple(added(block, *cotangent) for cotangent in layer_cotangents)
        return all_sums, gradients

    def added(block: TokenBlock, gradients: Linear, layer: Linear, d_logits: Array) -> Linear:
        # Cotangents of 0 for repeated tokens would not do: their logits may be infinite.
        d_logits = selected(d_logits, block.valid)
        d_bias = None if gradients.bias is None else gradients.bias + jnp.sum(d_logits, 0).astype(dtype)
        d_logits = d_logits.astype(layer.kernel.dtype)
        d_features = block.put(gradients.features, matmul(d_logits, layer.kernel, 1, 1).astype(dtype))
        d_kernel = add_to_kernel(gradients.kernel, layer.features, d_logits, sizes.class_tile)
        return Linear(d_features, d_kernel, d_bias)

    no_sums = formula.empty_sums(jnp.zeros((packed.length, 1), dtype)) if sums is None else ()
    with_gradients = () if d_outputs is None else layers[: formula.gradients]
    no_gradients = tuple(layer.zeros(packed.length, Linear(dtype, dtype, dtype)) for layer in with_gradients)
    state = vary_with((no_sums, no_gradients), (inputs, sums, d_outputs))
    is_one = isinstance(packed.blocks, int) and packed.blocks == 1
    found, gradients = one_block(0, state) if is_one else loop(0, packed.blocks, one_block, state)
    if sums is None:
        sums = jax.tree.map(lambda x: packed.unpacked(x, number), found)
    where = None if unmasked is None else unmasked[:, None]
    by_token = [selected(packed.unpacked(d.features, number), where) for d in gradients]
    return sums, tuple(d._replace(features=x) for d, x in zip(gradients, by_token, strict=True))
