"""Linear layers: their logits, and their gradients from the cotangents of the logits."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from masksafe._core import precision, run_time, sharding
from masksafe._core.masks import selected
from masksafe._core.tiles import add_to_slice, divide, loop, take
from masksafe._core.typing import Array, DType, Index, Pytree
from masksafe.losses._rows._formula import Classes


class Linear(NamedTuple):
    """Features `[..., D]`, kernel `[D, V]` and bias `[V]`; or the gradients of all three."""

    features: Array
    kernel: Array
    bias: Array | None

    @property
    def dtype(self) -> DType:
        """The dtype of the matrix products."""
        return jnp.promote_types(self.features.dtype, self.kernel.dtype)

    def logits(self, dtype: DType) -> Array:
        """The logits of features and a kernel of the same dtype."""
        logits = precision.matmul(self.features, self.kernel, self.features.ndim - 1, 0).astype(dtype)
        if self.kernel.shape[0] == 0:  # empty products are constants, whose sums XLA would compute while it compiles
            logits += run_time.unknown(0, dtype)
        if self.bias is None:
            return logits
        return logits + jnp.expand_dims(self.bias, range(logits.ndim - 1)).astype(dtype)

    def zeros(self, tokens: int, dtypes: "Linear") -> "Linear":
        """Gradients of 0 for this number of tokens, in the given dtypes."""
        d_features = jnp.zeros((tokens, self.kernel.shape[0]), dtypes.features)
        d_bias = None if self.bias is None else jnp.zeros(self.bias.shape, dtypes.bias)
        return Linear(d_features, jnp.zeros(self.kernel.shape, dtypes.kernel), d_bias)


class LinearInputs(NamedTuple):
    """What the rows are computed from. In the user's layout the N tokens are on any number of axes `[...]`."""

    layers: tuple[Linear, ...]
    data: Pytree  # further data of each token: labels `[N, 1]`, or `[...]`; targets `[N, k]`, or `[..., k]`
    class_weights: Array | None  # [V]
    unmasked: Array | None  # which tokens are unmasked `[N]`, or `[...]`; None means all
    used: Array | None = None  # which outputs `[outputs, ...]`, or sum `[1]`, the user has not replaced

    @property
    def tokens(self) -> tuple[int, ...]:
        """The shape of the axes of the tokens."""
        return self.layers[0].features.shape[:-1]

    def classes(self, axis_name: sharding.AxisName) -> Classes:
        """The classes, which are split over the axis of a mesh."""
        return Classes(self.layers[0].kernel.shape[1], axis_name, self.class_weights)

    def without_masked(self, class_mask: Array | None, axis_name: sharding.AxisName = None) -> "LinearInputs":
        """With a kernel of 0 and a bias of -inf at masked classes; if all are masked, no token is unmasked.

        The mask is that of this device's classes; None masks nothing.
        """
        if class_mask is None:
            return self

        def masked(layer: Linear) -> Linear:
            bias = jnp.zeros(class_mask.shape, layer.kernel.dtype) if layer.bias is None else layer.bias
            return layer._replace(kernel=selected(layer.kernel, class_mask), bias=selected(bias, class_mask, -math.inf))

        any_class = sharding.Devices(axis_name).any(run_time.any_of(class_mask))
        unmasked = jnp.broadcast_to(any_class, self.tokens) if self.unmasked is None else self.unmasked & any_class
        return self._replace(layers=tuple(map(masked, self.layers)), unmasked=unmasked)

    @property
    def sum_dtype(self) -> Any:
        """The dtype of the sums: that of all floats but the weights, at least float32."""
        floats = [x.dtype for x in jax.tree.leaves(self.data) if jnp.issubdtype(x.dtype, jnp.floating)]
        # Widened first, since only one side may be, and strict promotion refuses float32 with float16.
        return functools.reduce(jnp.promote_types, map(precision.wide_dtype, [x.dtype for x in self.layers] + floats))

    @property
    def flat(self) -> "LinearInputs":
        """The same with the tokens on one axis, and features and kernel of a layer in one dtype."""
        rows, unmasked = functools.partial(as_rows, leading=len(self.tokens)), self.unmasked
        layers = [Linear(rows(x.features).astype(x.dtype), x.kernel.astype(x.dtype), x.bias) for x in self.layers]
        unmasked = None if unmasked is None else unmasked.reshape(-1)
        return LinearInputs(tuple(layers), jax.tree.map(rows, self.data), self.class_weights, unmasked)


def as_rows(x: Array, leading: int) -> Array:
    """An array with its `leading` axes, those of the tokens, as one; `[N, 1]` if there is no other axis."""
    flat = x.reshape(math.prod(x.shape[:leading]), *x.shape[leading:])
    return flat[:, None] if flat.ndim == 1 else flat


def add_to_kernel(d_kernel: Array, features: Array, d_logits: Array, class_tile: int) -> Array:
    """`d_kernel + features.T @ d_logits`, in tiles of the classes."""
    classes = divide(d_logits.shape[-1], class_tile)
    if classes.number == 1:
        return d_kernel + precision.matmul(features, d_logits, 0, 0)

    def add(j: Index, d_kernel: Array) -> Array:
        tile = classes.tile(j)
        part = take(d_logits, 1, tile)
        if tile.is_ragged:
            part = jnp.where((tile.start + jnp.arange(tile.size, dtype=jnp.int32) >= tile.first)[None], part, 0)
        return add_to_slice(d_kernel, precision.matmul(features, part, 0, 0), {1: (tile.start, tile.size)})

    return loop(0, classes.number, add, d_kernel)
