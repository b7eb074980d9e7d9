r"""The cross-entropy of a linear layer in blocks of tokens, without an array of all tokens times all classes.

With features :math:`f_t`, kernel :math:`W`, bias :math:`b`, soft cap :math:`\kappa`, label :math:`y_t`, smoothing
:math:`\varepsilon` and z-loss :math:`\zeta`

.. math::
  a_t = f_t W + b, \qquad x_t = \kappa \tanh(a_t / \kappa), \qquad \lambda_t = \log \sum_c e^{x_{tc}}, \qquad
  \ell_t = \lambda_t - (1 - \varepsilon) x_{t y_t} - \frac{\varepsilon}{V} \sum_c x_{tc} + \zeta \lambda_t^2

and with the cotangent :math:`\dot \ell_t`

.. math::
  \dot a_{tc} = \dot \ell_t \left( (1 + 2 \zeta \lambda_t) e^{x_{tc} - \lambda_t} - (1 - \varepsilon) [c = y_t] -
  \frac{\varepsilon}{V} \right) \left( 1 - \frac{x_{tc}^2}{\kappa^2} \right), \qquad
  \dot f_t = \dot a_t W^T, \qquad \dot W = \sum_t f_t \dot a_t, \qquad \dot b = \sum_t \dot a_t.

Two measures preserve digits. The largest logit :math:`m_t` is subtracted from all logits of the token, which removes a
common offset. The sum of exponentials excludes the label, which matters where the model is certain: with
:math:`s_t = \sum_{c \neq y_t} e^{x_{tc} - m_t}` and :math:`\tau_t = x_{t y_t} - m_t`,
:math:`\lambda_t - x_{t y_t} = \log(s_t + e^{\tau_t}) - \tau_t`.

Unmasked tokens are moved to the front, and only blocks that contain any are computed.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core import platforms, sharding
from masksafe._core.labels import class_index, is_class, nan_unless
from masksafe._core.masks import selected
from masksafe._core.precision import wide_dtype
from masksafe._core.sharding import varying_zero
from masksafe._core.soft_cap import pulled_back, soft_capped
from masksafe._core.tiles import Tile, divide, take
from masksafe._core.typing import Array
from masksafe.losses._linear._token_blocks import Block, TokenBlocks


class Sizes(NamedTuple):
    """How many tokens make a block, and how many classes a tile."""

    token_block: int
    class_tile: int


class Config(NamedTuple):
    """The static arguments."""

    soft_cap: float | None
    label_smoothing: float
    z_loss: float
    on_cpu: Sizes
    elsewhere: Sizes
    elsewhere_if_masked: Sizes
    axis_name: sharding.AxisName  # the mesh axis over which the classes are split


class Gradients(NamedTuple):
    """Cotangents of features, kernel and bias, in the wide dtype."""

    features: Array
    kernel: Array
    bias: Array | None


class Layer(NamedTuple):
    """The linear layer: kernel `[D, V]` and bias `[V]`."""

    kernel: Array
    bias: Array | None


class Tokens(NamedTuple):
    """Features `[N, D]`, labels `[N]`, and which tokens are unmasked `[N]`; None means all."""

    features: Array
    labels: Array
    live: Array | None


def default_token_block(classes: int) -> int:
    return max(platforms.FEWEST_TOKENS, min(platforms.MOST_TOKENS, platforms.TOKEN_BLOCK_ELEMENTS // max(1, classes)))


def default_class_tile(width: int, token_block: int) -> int:
    return max(1, platforms.CLASS_TILE_ELEMENTS // max(1, width, token_block))


# The losses of some tokens, given their logits `[..., V]`.


class RowSums(NamedTuple):
    """Sums over the classes of each row `[..., 1]`."""

    largest: Array
    others: Array  # the sum of exp(x - largest) without the label
    label: Array  # x at the label, 0 if the label is not among the classes
    number: Array  # the number of classes
    total: Array  # the sum of x - largest


def losses_of_logits(config: Config, layer: Layer, logits: Array, labels: Array) -> Array:
    """The losses `[..., 1]`, NaN with NaN derivatives for a label out of range; differentiable by JAX."""
    all_classes = divide(logits.shape[-1], logits.shape[-1]).tile(0)
    sums = combine_devices(config, _sums_of_tile(config, layer, logits, labels, all_classes))
    return row_losses(config, layer, sums, labels)


def _sums_of_tile(config: Config, layer: Layer, logits: Array, labels: Array, classes: Tile) -> RowSums:
    """The sums over a tile of the classes."""
    x = soft_capped(take(logits, logits.ndim - 1, classes), config.soft_cap)
    index = classes.start + class_index(x.shape)
    live = index >= classes.first if classes.is_ragged else None
    is_label = index == sharding.local_class(config.axis_name, labels, layer.kernel.shape[1])
    is_label = is_label if live is None else is_label & live
    largest = lax.stop_gradient(jnp.max(selected(x, live, -jnp.inf), -1, keepdims=True))
    shift = finite_shift(largest)
    is_other = ~is_label if live is None else ~is_label & live
    number = jnp.zeros_like(largest) + (
        x.shape[-1] if live is None else jnp.sum(live, -1, keepdims=True, dtype=x.dtype)
    )
    return RowSums(
        largest,
        jnp.sum(jnp.where(is_other, jnp.exp(x - shift), 0), -1, keepdims=True),
        jnp.sum(jnp.where(is_label, x, 0), -1, keepdims=True),
        number,
        jnp.sum(selected(x - shift, live), -1, keepdims=True) if config.label_smoothing else jnp.zeros_like(largest),
    )


def add_sums(a: RowSums, b: RowSums) -> RowSums:
    largest = jnp.maximum(a.largest, b.largest)
    a, b = _rebase_sums(largest, a), _rebase_sums(largest, b)
    return RowSums(largest, a.others + b.others, a.label + b.label, a.number + b.number, a.total + b.total)


def _rebase_sums(largest: Array, rows: RowSums) -> RowSums:
    """The same sums relative to another largest logit."""
    step = finite_shift(rows.largest) - finite_shift(largest)
    others = jnp.where(rows.largest == -jnp.inf, 0, rows.others * jnp.exp(step))
    return rows._replace(largest=largest, others=others, total=rows.total + rows.number * step)


def finite_shift(largest: Array) -> Array:
    """The amount subtracted from the logits: the largest logit, or 0 if that is -inf."""
    return jnp.where(largest == -jnp.inf, 0, largest)


def combine_devices(config: Config, rows: RowSums) -> RowSums:
    """The sums over the classes of all devices."""
    if config.axis_name is None:
        return rows
    total = functools.partial(sharding.sum_over_devices, config.axis_name)
    largest = sharding.max_over_devices(config.axis_name, lax.stop_gradient(rows.largest))
    rows = _rebase_sums(largest, rows)
    return RowSums(largest, total(rows.others), total(rows.label), total(rows.number), total(rows.total))


def _logsumexp(rows: RowSums) -> Array:
    shift = finite_shift(rows.largest)
    return shift + jnp.log(rows.others + jnp.exp(rows.label - shift))


def row_losses(config: Config, layer: Layer, rows: RowSums, labels: Array) -> Array:
    smoothing, classes = config.label_smoothing, sharding.size_over_devices(config.axis_name, layer.kernel.shape[1])
    label = rows.label - finite_shift(rows.largest)
    loss = jnp.log1p(rows.others + jnp.expm1(label))
    if smoothing < 1:
        loss -= (1 - smoothing) * label
    if smoothing:
        loss -= smoothing / classes * rows.total
    if config.z_loss:
        loss += config.z_loss * jnp.square(_logsumexp(rows))
    # A product makes the derivatives NaN as well.
    return loss * nan_unless(is_class(labels, classes), loss.dtype)


class RowCotangents(NamedTuple):
    """What the cotangents of a row's logits have in common `[..., 1]`."""

    shift: Array
    of_exp: Array  # times exp(x - shift): the cotangent at classes other than the label
    of_all: Array | None  # subtracted from it
    at_label: Array


def row_cotangents(config: Config, layer: Layer, rows: RowSums, labels: Array, d_loss: Array) -> RowCotangents:
    classes = sharding.size_over_devices(config.axis_name, layer.kernel.shape[1])
    shift = finite_shift(rows.largest)
    exp_label = jnp.exp(rows.label - shift)
    exp_total = rows.others + exp_label
    smoothing, z_term = config.label_smoothing, 2 * config.z_loss * _logsumexp(rows) if config.z_loss else 0
    # The probability of the label minus 1 is computed as -others / total, not as a difference.
    at_label = z_term * exp_label / exp_total - rows.others / exp_total + smoothing - smoothing / classes
    d_loss = d_loss * nan_unless(is_class(labels, classes), d_loss.dtype)
    of_all = smoothing / classes * d_loss if smoothing else None
    return RowCotangents(shift, (1 + z_term) / exp_total * d_loss, of_all, at_label * d_loss)


def logit_cotangents(config: Config, logits: Array, is_label: Array, rows: RowCotangents) -> Array:
    """The cotangents of some logits of some rows."""
    x = soft_capped(logits, config.soft_cap)
    d_x = jnp.exp(x - rows.shift) * rows.of_exp
    if rows.of_all is not None:
        d_x -= rows.of_all
    return pulled_back(jnp.where(is_label, rows.at_label, d_x), x, config.soft_cap)


# All tokens, block by block.


def losses_and_gradients(
    config: Config, tokens: Tokens, layer: Layer, d_losses: Array | None
) -> tuple[Array, Gradients | None]:
    """The losses `[N]`, 0 where masked, and the gradients if the cotangents `[N]` are given."""
    blocks = TokenBlocks.of(tokens.labels.size, tokens.live, config.on_cpu.token_block)

    def one_block(block: Block, state: _State) -> _State:
        features, labels = block.take(tokens.features), block.take(tokens.labels)[:, None]
        logits = matmul(features, layer.kernel, 1, 0)
        if layer.bias is not None:
            logits += layer.bias[None].astype(logits.dtype)
        rows = _sums_of_block(config, layer, logits, labels)
        losses = block.put(state.losses, selected(row_losses(config, layer, rows, labels)[:, 0], block.live))
        if d_losses is None or state.gradients is None:
            return _State(losses, None)
        d_loss = block.take(d_losses.astype(losses.dtype))[:, None]
        is_label = class_index(logits.shape) == sharding.local_class(config.axis_name, labels, logits.shape[1])
        d_logits = logit_cotangents(config, logits, is_label, row_cotangents(config, layer, rows, labels, d_loss))
        return _State(losses, _add_gradients(config, state.gradients, features, layer, d_logits, block))

    losses, gradients = blocks.fold(one_block, _initial_state(tokens, layer, d_losses, blocks.length))
    if gradients is not None:
        gradients = gradients._replace(features=blocks.put_back(gradients.features))
    return blocks.put_back(losses), gradients


class _State(NamedTuple):
    """The results after some blocks, with the tokens in packed order."""

    losses: Array
    gradients: Gradients | None


def _initial_state(tokens: Tokens, layer: Layer, d_losses: Array | None, length: int) -> _State:
    zero = varying_zero([x for x in jax.tree.leaves((tokens, layer, d_losses)) if isinstance(x, jax.Array)])
    wide = wide_dtype(tokens.features.dtype)

    def no_sum(shape: tuple[int, ...]) -> Array:
        return jnp.zeros(shape, wide) + zero.astype(wide)

    if d_losses is None:
        return _State(no_sum((length,)), None)
    d_features = no_sum((length, layer.kernel.shape[0]))
    d_bias = None if layer.bias is None else no_sum(layer.bias.shape)
    return _State(no_sum((length,)), Gradients(d_features, no_sum(layer.kernel.shape), d_bias))


def _sums_of_block(config: Config, layer: Layer, logits: Array, labels: Array) -> RowSums:
    classes = divide(logits.shape[-1], config.on_cpu.class_tile)
    zero = jnp.zeros_like(logits[:, :1])

    def add(j: Any, rows: RowSums) -> RowSums:
        return add_sums(rows, _sums_of_tile(config, layer, logits, labels, classes.tile(j)))

    return combine_devices(config, lax.fori_loop(0, classes.number, add, RowSums(zero - jnp.inf, *[zero] * 4)))


def _add_gradients(
    config: Config, gradients: Gradients, features: Array, layer: Layer, d_logits: Array, block: Block
) -> Gradients:
    classes = divide(d_logits.shape[-1], config.on_cpu.class_tile)
    d_bias = gradients.bias
    if d_bias is not None:
        d_bias += jnp.sum(d_logits, 0)
    d_logits = d_logits.astype(layer.kernel.dtype)
    d_features = matmul(d_logits, layer.kernel, 1, 1)
    # Contracting the first axes of both takes a third longer. The barrier prevents XLA from undoing the transposition.
    features_by_column = lax.optimization_barrier(features.T)

    def add(j: Any, d_kernel: Array) -> Array:
        tile = classes.tile(j)
        part = take(d_logits, 1, tile)
        if tile.is_ragged:
            part = jnp.where((tile.start + jnp.arange(tile.size) >= tile.first)[None], part, 0)
        added = take(d_kernel, 1, tile) + matmul(features_by_column, part, 1, 0)
        return lax.dynamic_update_slice_in_dim(d_kernel, added, tile.start, 1)

    return Gradients(
        block.put(gradients.features, d_features),
        lax.fori_loop(0, classes.number, add, gradients.kernel),
        d_bias,
    )


def matmul(a: Array, b: Array, axis_of_a: int, axis_of_b: int) -> Array:
    """A matrix product, accumulated in the wide dtype."""
    dimensions = (((axis_of_a,), (axis_of_b,)), ((), ()))
    return lax.dot_general(a, b, dimensions, preferred_element_type=wide_dtype(b.dtype))
