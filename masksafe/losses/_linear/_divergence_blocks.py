"""Divergences of linear layers in blocks of tokens, without an array of all tokens times all classes.

A block has the whole rows of logits of both sides. Of the divergences and their cotangents by the logits follow the
gradients: with cotangents `d_x` of the student's logits, `d_x @ kernel.T` and `features.T @ d_x`.

Of a teacher that is known by its k most probable classes, the student's logits at these classes remain, and maybe one
more, the logsumexp of all other classes: a divergence of k or k + 1 classes.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from masksafe._core import platforms
from masksafe._core.labels import at_label, is_class, nan_unless
from masksafe._core.masks import selected
from masksafe._core.precision import wide_dtype
from masksafe._core.sharding import gathered_along, is_sharded, may_loop, varying_zero
from masksafe._core.typing import Array
from masksafe.losses._linear._divergences import (
    Divergence,
    divergence_sums,
    finite,
    normalizer,
    pair_of,
    student_cotangents,
    teacher_cotangents,
)
from masksafe.losses._linear._layer import Gradients, Sizes, add_gradients, matmul
from masksafe.losses._linear._token_blocks import Block, TokenBlocks


class Config(NamedTuple):
    """The static arguments."""

    divergence: Divergence
    temperature: float
    with_rest: bool  # whether classes that are not among the teacher's k make one class more
    target_gradients: bool
    on_cpu: Sizes
    elsewhere: Sizes


class Linear(NamedTuple):
    """Features `[N, D]`, kernel `[D, V]` and bias `[V]`."""

    features: Array
    kernel: Array
    bias: Array | None


class TopK(NamedTuple):
    """The teacher's most probable classes and the logarithms of their probabilities, both `[N, k]`."""

    log_probs: Array
    classes: Array


Side = TypeVar("Side", Linear, TopK, Linear | TopK)


class GradientsOfBoth(NamedTuple):
    """Those of the student, and of the teacher if they are wanted."""

    student: Gradients
    teacher: Gradients | None


def default_token_block_elsewhere(classes: int) -> int:
    return max(platforms.FEWEST_TOKENS, platforms.TOKEN_BLOCK_ELEMENTS_ELSEWHERE // classes)


# Rows of logits `[..., V]`.


Cotangents = Callable[[Array], tuple[Array, Array | None]]  # of the logits of both, from those of the losses [..., 1]


def losses_of_logits(config: Config, tile_size: int, logits: Array, targets: Array | TopK) -> tuple[Array, Cotangents]:
    """The losses `[..., 1]` of rows, and their cotangents; the losses are differentiable if there is one tile."""
    if isinstance(targets, TopK):
        return _losses_of_top_k(config, tile_size, logits, targets)
    rows, losses = divergence_sums(config.divergence, targets, logits, tile_size)

    def cotangents(d_losses: Array) -> tuple[Array, Array | None]:
        pair = pair_of(targets, logits, rows.teacher, rows.student)
        d_logits = student_cotangents(config.divergence, pair, rows.sums) * d_losses
        if not config.target_gradients:
            return d_logits, None
        return d_logits, teacher_cotangents(config.divergence, pair, rows.sums) * d_losses

    return losses, cotangents


def _losses_of_top_k(config: Config, tile_size: int, logits: Array, targets: TopK) -> tuple[Array, Cotangents]:
    """The same of a few classes. Classes out of range, or twice in a row, make it NaN."""
    logits = gathered_along(logits, -1)
    is_valid = jnp.all(is_class(targets.classes, logits.shape[-1]), -1) & ~jnp.any(is_repeated(targets.classes), -1)
    factor = nan_unless(is_valid, logits.dtype)[..., None]  # a product makes the derivatives NaN as well
    classes = jnp.clip(targets.classes, 0, logits.shape[-1] - 1)
    student, teacher = _at_classes(logits, classes), targets.log_probs.astype(logits.dtype)
    if config.with_rest:
        others = _with_classes(logits, classes, -jnp.inf)
        of_others = normalizer(others, tile_size)
        is_any = of_others.total > 0  # of the student's other classes
        total = jnp.where(is_any, of_others.total, 1)
        rest = jnp.where(is_any, of_others.largest + jnp.log(total), -jnp.inf)
        # A sum of probabilities may be 1 but for its rounding, and a rest of 0 would be infinitely far from any other.
        least = float(jnp.finfo(logits.dtype).eps)
        missing = jnp.maximum(1 - jnp.sum(jnp.exp(teacher), -1, keepdims=True), least)
        student = jnp.concatenate([student, rest], -1)
        teacher = jnp.concatenate([teacher, jnp.where(is_any, jnp.log(missing), -jnp.inf)], -1)
    rows, losses = divergence_sums(config.divergence, teacher, student, student.shape[-1])

    def cotangents(d_losses: Array) -> tuple[Array, None]:
        pair = pair_of(teacher, student, rows.teacher, rows.student)
        d_student = student_cotangents(config.divergence, pair, rows.sums) * (d_losses * factor)
        if not config.with_rest:
            return _with_classes(jnp.zeros_like(logits), classes, d_student), None
        d_student, d_rest = d_student[..., :-1], d_student[..., -1:]
        d_logits = jnp.exp(others - finite(of_others.largest)) * (d_rest / total)
        return _with_classes(d_logits, classes, d_student), None

    return losses * factor, cotangents


def is_repeated(classes: Array) -> Array:
    """Whether a class was in its row `[..., k]` before."""
    is_same = classes[..., :, None] == classes[..., None, :]
    return jnp.any(jnp.tril(is_same, -1), -1)


def _at_classes(x: Array, classes: Array) -> Array:
    """The elements `[..., k]` of rows `[..., V]` at some classes."""
    if is_sharded(x) or is_sharded(classes):  # JAX refuses indices then
        return jnp.sum(jnp.where(at_label(classes, x.shape[-1]), x[..., None, :], 0), -1)
    return jnp.take_along_axis(x, classes, -1)


def _with_classes(x: Array, classes: Array, values: Array | float) -> Array:
    """Rows `[..., V]` with other elements at some classes, none of which is repeated."""
    if not may_loop((x, classes)):  # symbolic sizes cannot be indices either
        is_at, values = at_label(classes, x.shape[-1]), jnp.broadcast_to(values, classes.shape)
        return jnp.where(jnp.any(is_at, -2), jnp.sum(jnp.where(is_at, values[..., None], 0), -2), x)
    return jnp.put_along_axis(x, classes, values, -1, inplace=False)


# All tokens, block by block.


def losses_and_gradients(
    config: Config, sizes: Sizes, student: Linear, targets: Linear | TopK, live: Array | None, d_losses: Array | None
) -> tuple[Array, GradientsOfBoth | None]:
    """The losses `[N]`, 0 where masked, and the gradients if the cotangents `[N]` are given."""
    blocks = TokenBlocks.of(student.features.shape[0], live, sizes.token_block)
    wide = sum_dtype(student, targets)

    def one_block(block: Block, state: _State) -> _State:
        of_student, of_targets = _rows_of(block, student), _rows_of(block, targets)
        logits = logits_of(config, of_student, wide)
        known = logits_of(config, of_targets, wide) if isinstance(of_targets, Linear) else of_targets
        losses, cotangents = losses_of_logits(config, sizes.class_tile, logits, known)
        losses = block.put(state.losses, selected(losses[:, 0].astype(wide), block.live))
        if d_losses is None or state.gradients is None:
            return _State(losses, None)
        d_logits, d_known = cotangents(block.take(d_losses.astype(wide))[:, None] / config.temperature)
        d_student, d_teacher = state.gradients
        d_student = added(d_student, of_student, d_logits, block)
        if d_teacher is not None and d_known is not None and isinstance(of_targets, Linear):
            d_teacher = added(d_teacher, of_targets, d_known, block)
        return _State(losses, GradientsOfBoth(d_student, d_teacher))

    def added(gradients: Gradients, layer: Linear, d_logits: Array, block: Block) -> Gradients:
        return add_gradients(gradients, layer.features, layer.kernel, d_logits, block, sizes.class_tile)

    def put_back(gradients: Gradients) -> Gradients:
        return gradients._replace(features=blocks.put_back(gradients.features))

    losses, gradients = blocks.fold(one_block, _initial_state(config, student, targets, d_losses, blocks.length))
    if gradients is not None:
        d_student, d_teacher = gradients
        gradients = GradientsOfBoth(put_back(d_student), None if d_teacher is None else put_back(d_teacher))
    return blocks.put_back(losses), gradients


def sum_dtype(student: Linear, targets: Linear | TopK) -> Any:
    """The dtype of the sums: that of all features and kernels, but at least float32."""
    others = (targets.features, targets.kernel) if isinstance(targets, Linear) else (targets.log_probs,)
    # Widened first, since only one side may be, and strict promotion refuses float32 with float16.
    dtypes = [wide_dtype(x.dtype) for x in (student.features, student.kernel, *others)]
    return functools.reduce(jnp.promote_types, dtypes)


def logits_of(config: Config, layer: Linear, dtype: Any) -> Array:
    """The logits `[..., V]` divided by the temperature."""
    logits = matmul(layer.features, layer.kernel, layer.features.ndim - 1, 0).astype(dtype)
    if layer.bias is not None:
        logits += jnp.expand_dims(layer.bias, range(logits.ndim - 1)).astype(dtype)
    return logits if config.temperature == 1 else logits / config.temperature


def _rows_of(block: Block, side: Side) -> Side:
    """The rows of a block: 0 where none is left."""
    if isinstance(side, Linear):
        return side._replace(features=block.take(side.features))
    return type(side)(*map(block.take, side))


class _State(NamedTuple):
    """The results after some blocks, with the tokens in packed order."""

    losses: Array
    gradients: GradientsOfBoth | None


def _initial_state(config: Config, student: Linear, targets: Any, d_losses: Array | None, length: int) -> _State:
    zero = varying_zero([x for x in jax.tree.leaves((student, targets, d_losses)) if isinstance(x, jax.Array)])

    def no_sum(shape: tuple[int, ...], dtype: Any) -> Array:
        return jnp.zeros(shape, dtype) + zero.astype(dtype)

    def no_gradients(layer: Linear) -> Gradients:
        dtype = wide_dtype(layer.kernel.dtype)
        d_bias = None if layer.bias is None else no_sum(layer.bias.shape, dtype)
        width, classes = layer.kernel.shape
        return Gradients(no_sum((length, width), dtype), no_sum((width, classes), dtype), d_bias)

    losses = no_sum((length,), sum_dtype(student, targets))
    if d_losses is None:
        return _State(losses, None)
    of_teacher = no_gradients(targets) if config.target_gradients else None
    return _State(losses, GradientsOfBoth(no_gradients(student), of_teacher))
