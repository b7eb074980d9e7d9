"""The static arguments of a loss of a linear layer, and the sizes of its blocks of tokens and tiles of classes."""

import math
from typing import NamedTuple

from masksafe._core import platforms, sharding
from masksafe.losses._rows._cross_entropy import CrossEntropy
from masksafe.losses._rows._divergence import Divergence
from masksafe.losses._rows._linear_layer import LinearInputs


class Sizes(NamedTuple):
    """How many tokens make a block, and how many classes a tile."""

    token_block: int
    class_tile: int


class LinearLoss(NamedTuple):
    """The static arguments of the op."""

    formula: CrossEntropy | Divergence
    block_size: int | None  # as the user gives it
    axis_name: sharding.AxisName = None  # the mesh axis over which the classes are split

    def sizes(self, inputs: LinearInputs, on_cpu: bool, *, is_masked: bool) -> Sizes:
        """The sizes for these arrays; under a mask blocks are smaller, so that more can be skipped."""
        layers, in_tiles = inputs.layers, isinstance(self.formula, CrossEntropy)
        tokens, classes = max(1, math.prod(inputs.tokens)), layers[0].kernel.shape[1]
        width = max(layer.kernel.shape[0] for layer in layers)
        if in_tiles and not on_cpu:
            return sizes_in_tiles(tokens, width, classes, self.block_size, is_masked)
        limits, rows_per_token = platforms.choices().linear, 1 if in_tiles else 2
        if on_cpu:
            most = min(limits.most_tokens, limits.token_block_elements // rows_per_token // classes)
            most = max(limits.fewest_tokens, most)
            if is_masked:
                most = min(most, max(limits.fewest_tokens_if_masked, min(limits.most_tokens_if_masked, tokens // 4)))
        else:
            most = max(limits.fewest_tokens, limits.token_block_elements_on_accelerators // classes)
        block = min(most if self.block_size is None else self.block_size, tokens)
        return Sizes(block, max(1, limits.class_tile_elements // max(1, width, block)) if on_cpu else classes)


def sizes_in_tiles(tokens: int, width: int, classes: int, block_size: int | None, masked: bool) -> Sizes:
    """The sizes for `_class_tiles`; `width` is the number of features, and a block size of the user's stays."""
    limits = platforms.choices().linear
    logits = max(limits.least_logits, min(limits.logits_per_feature * tokens * width, tokens * classes // 4))
    logits = min(logits, limits.most_logits) * (2 if masked else 1)
    most = max(limits.least_tokens_if_masked, 2 * width) if masked else math.isqrt(2 * logits)
    blocks = max(2 if masked and tokens > limits.most_tokens_of_one_block else 1, -(-tokens // most))
    block = -(-tokens // blocks) if block_size is None else min(block_size, tokens)
    tiles = -(-classes * block // logits)
    even = -(-classes // tiles)
    aligned = even if classes % even == 0 or even < 128 else -(-even // 128) * 128
    return Sizes(block, min(classes, aligned))
