"""Divergences of tokens, and their sum, with their derivative rules and on meshes.

All functions here take the student, the targets and which tokens are unmasked, in the user's layout: a copy could show
a masked NaN to jax_debug_nans.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from masksafe._core import platforms, sharding
from masksafe._core.derivatives import explains_forward_mode, with_derivatives_of, with_reverse_rule
from masksafe._core.masks import both, selected
from masksafe._core.own_shard_map import Split, on_each_device, split_of
from masksafe._core.precision import wide_dtype, widened
from masksafe._core.sharding import has_symbolic_size, vary_with
from masksafe._core.typing import Array
from masksafe._core.unfolded import any_of
from masksafe.losses._linear._divergence_blocks import (
    Config,
    GradientsOfBoth,
    Linear,
    TopK,
    default_token_block_elsewhere,
    logits_of,
    losses_and_gradients,
    losses_of_logits,
    sum_dtype,
)
from masksafe.losses._linear._divergences import Divergence
from masksafe.losses._linear._layer import Gradients, Sizes, default_class_tile, default_token_block
from masksafe.losses._linear._rules import needs_one_pass, times

_Core = Callable[..., Array]
Targets = Linear | TopK


class Options(NamedTuple):
    """The static arguments as the user gives them."""

    divergence: Divergence
    temperature: float
    with_rest: bool
    target_gradients: bool
    block_size: int | None

    def config(self, student: Linear, targets: Targets) -> Config:
        """With the sizes of blocks for these arrays."""
        on_cpu = elsewhere = Sizes(1, 1)
        if not any(map(has_symbolic_size, jax.tree.leaves((student, targets)))):
            tokens, (width, classes) = max(1, math.prod(student.features.shape[:-1])), student.kernel.shape
            width = max(width, targets.kernel.shape[0]) if isinstance(targets, Linear) else width
            block = min(default_token_block(classes, rows=2) if self.block_size is None else self.block_size, tokens)
            on_cpu = Sizes(block, default_class_tile(width, block))
            block = default_token_block_elsewhere(classes) if self.block_size is None else self.block_size
            elsewhere = Sizes(min(block, tokens), classes)
        return Config(self.divergence, self.temperature, self.with_rest, self.target_gradients, on_cpu, elsewhere)


def token_losses(options: Options, student: Linear, targets: Targets, live: Array | None) -> Array:
    """The divergence of each token, 0 where masked."""
    return _evaluate(_token_losses, options, student, targets, live)


def summed_loss(options: Options, student: Linear, targets: Targets, live: Array | None) -> Array:
    return _evaluate(_summed_loss, options, student, targets, live)


# On a mesh with explicit axes, each device works on the tokens of its own.


def _evaluate(core: _Core, options: Options, *args: Any) -> Array:
    """The loss of a core, on each device by itself if the arrays are split."""
    split = split_of(args, _dimensions(*args))
    if split is not None:
        loss: Array = _evaluate_on_each_device(core, options, split, *args)
        return loss
    return core(options.config(*args[:2]), *args)


@explains_forward_mode
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _evaluate_on_each_device(core: _Core, options: Options, split: Split, *args: Any) -> Array:
    names = _dimensions(*args)
    of_tokens = PartitionSpec(*names[0].features[:-1])

    def on_device(*args: Any) -> Array:
        loss = core(options.config(*args[:2]), *args)
        return loss if loss.ndim else sharding.sum_over_devices(split.axes(*of_tokens) or None, loss)

    of_loss = of_tokens if core is _token_losses else PartitionSpec()
    return cast(Array, on_each_device(on_device, split, args, names, of_loss))


def _dimensions(student: Linear, targets: Targets, live: Array | None) -> tuple[Any, Any, Any]:
    """The names of the dimensions of each array: those of classes have none, for every device needs all of them."""
    tokens = [f"tokens {axis}" for axis in range(student.features.ndim - 1)]
    of_rows = PartitionSpec(*tokens, None)

    def of_layer(layer: Linear) -> Linear:
        names: Any = of_rows, PartitionSpec(None, None), None if layer.bias is None else PartitionSpec(None)
        return Linear(*names)

    names_of_rows: Any = (of_rows, of_rows)
    of_targets = of_layer(targets) if isinstance(targets, Linear) else TopK(*names_of_rows)
    return of_layer(student), of_targets, None if live is None else PartitionSpec(*tokens)


# The two forms of the loss: a sum, computed together with its gradients, and one loss for each token. Both take the
# arguments in the user's layout, since a copy could show a masked NaN to jax_debug_nans.


def _summed_loss_forward(config: Config, *args: Any) -> tuple[Array, Any]:
    losses, gradients = _losses_and_gradients(config, *args, None, _cotangents_of_sum(config, *args))
    return jnp.sum(losses), (args, gradients)


def _summed_loss_reverse(config: Config, residuals: Any, d_total: Array) -> tuple[Any, ...]:
    (student, targets, live), gradients = residuals
    d_total = d_total / _cotangent_scale(config, student, targets)
    live_tokens, any_live = (None, None) if live is None else (live[..., None], any_of(live))

    def multiplied(gradient: Array | None, like: Array, where: Array | None) -> Array | None:
        # Selected after the product, since the cotangent may be infinite, as for sqrt(0).
        return None if gradient is None else selected(times(d_total, gradient), where).astype(like.dtype)

    def of_layer(gradients: Gradients, layer: Linear) -> Linear:
        where = live_tokens, any_live, any_live
        return Linear(*map(multiplied, gradients, layer, where))  # type: ignore[arg-type]

    of_teacher = None if gradients.teacher is None else of_layer(gradients.teacher, targets)
    return of_layer(gradients.student, student), of_teacher, None


def _cotangent_scale(config: Config, student: Linear, targets: Targets) -> float:
    """The cotangent used for the gradients of a sum before the actual cotangent is known.

    Cotangents of the logits are rounded to the dtype of the kernel; this scale moves them into the range of float16.
    Without it they were as large as the difference of the logits of both sides, divided by the temperature twice.
    """
    if not _is_float16(student, targets):
        return 1.0
    exponent = 10 + 2 * round(math.log2(config.temperature))
    return 2.0 ** min(max(exponent, -60), 60)


def _is_float16(student: Linear, targets: Targets) -> bool:
    layers = (student, targets) if isinstance(targets, Linear) else (student,)
    return any(_dtype(layer) == jnp.float16 for layer in layers)


def _dtype(layer: Linear) -> Any:
    """That of the matrix products."""
    return jnp.promote_types(layer.features.dtype, layer.kernel.dtype)


def _cotangents_of_sum(config: Config, student: Linear, targets: Targets, live: Array | None) -> Array:
    return jnp.full(
        student.features.shape[:-1], _cotangent_scale(config, student, targets), sum_dtype(student, targets)
    )


@with_reverse_rule(_summed_loss_forward, _summed_loss_reverse, static_argnums=(0,))
def _summed_loss(config: Config, student: Linear, targets: Targets, live: Array | None) -> Array:
    return jnp.sum(_losses(config, student, targets, live))


def _token_losses_forward(config: Config, *args: Any) -> tuple[Array, Any]:
    losses = _losses(config, *args)
    return losses, (args, losses)


def _token_losses_reverse(config: Config, residuals: Any, d_losses: Array) -> tuple[Any, ...]:
    (student, targets, live), losses = residuals
    # A cotangent of 0 means that the user has replaced the loss, and with it any NaN. Other tokens stay, since the
    # gradients have derivatives with respect to the cotangents even there.
    is_wanted = d_losses != 0
    takes_part = is_wanted | jnp.isfinite(losses)
    live = both(takes_part, live)
    _, gradients = _losses_and_gradients(config, student, targets, live, is_wanted, selected(d_losses, live))
    of_teacher = None if gradients.teacher is None else _cast(gradients.teacher, targets)
    return _cast(gradients.student, student), of_teacher, None


def _cast(gradients: Gradients, layer: Linear) -> Linear:
    """Gradients in the dtypes of the arguments."""
    return Linear(*(None if g is None else g.astype(x.dtype) for g, x in zip(gradients, layer, strict=True)))  # type: ignore[arg-type, union-attr]


@with_reverse_rule(_token_losses_forward, _token_losses_reverse, static_argnums=(0,))
def _token_losses(config: Config, student: Linear, targets: Targets, live: Array | None) -> Array:
    return _losses(config, student, targets, live)


# The kernels in blocks, and the equivalent functions that JAX differentiates in their place.


def _flatten(student: Linear, targets: Targets, live: Array | None) -> tuple[Linear, Targets, Array | None]:
    """The tokens on one axis, with 0 for masked ones, and features and kernel in one dtype."""
    tokens = math.prod(student.features.shape[:-1])

    def rows(x: Array) -> Array:
        return selected(x, None if live is None else live[..., None]).reshape(tokens, x.shape[-1])

    def of_layer(layer: Linear) -> Linear:
        return Linear(rows(layer.features.astype(_dtype(layer))), layer.kernel.astype(_dtype(layer)), layer.bias)

    of_targets = of_layer(targets) if isinstance(targets, Linear) else TopK(*map(rows, targets))
    return of_layer(student), of_targets, None if live is None else live.reshape(-1)


def _differentiable_losses(config: Config, student: Linear, targets: Targets, live: Array | None) -> Array:
    """The losses in a form that JAX differentiates to any order, if possible in a fixed number of blocks."""
    args, wide = (student, targets, live), sum_dtype(student, targets)
    tokens, rows, live_rows = _flatten(*args)

    def losses_of_tokens(features: Array, rows_of_targets: Any, live: Array | None) -> Array:
        where = None if live is None else live[..., None]

        def logits(layer: Linear, features: Array) -> Array:
            return selected(logits_of(config, layer._replace(features=features), wide), where)

        x = logits(tokens, features)
        t = logits(rows, rows_of_targets) if isinstance(rows, Linear) else rows_of_targets
        losses, _ = losses_of_logits(config, x.shape[-1], x, t)
        return selected(losses, where)[..., 0]

    mapped = tokens.features, rows.features if isinstance(rows, Linear) else rows, live_rows
    if needs_one_pass(args):
        losses = losses_of_tokens(*mapped)
    else:
        blocks = jax.checkpoint(lambda block: losses_of_tokens(*block))
        losses = lax.map(blocks, mapped, batch_size=config.on_cpu.token_block)
    return cast(Array, vary_with(losses.reshape(student.features.shape[:-1]), args))


@with_derivatives_of(_differentiable_losses)
@functools.partial(jax.jit, static_argnums=0)
def _losses_in_blocks(config: Config, *args: Any) -> Array:
    def with_sizes(sizes: Sizes, *args: Any) -> Array:
        losses, _ = losses_and_gradients(config, sizes, *_flatten(*args), None)
        return cast(Array, vary_with(losses.reshape(args[0].features.shape[:-1]), args))

    return cast(Array, _with_sizes_of_platform(config, with_sizes, args))


def _with_sizes_of_platform(config: Config, fn: Callable[..., Any], args: Any) -> Any:
    on_cpu, elsewhere = (functools.partial(fn, sizes) for sizes in (config.on_cpu, config.elsewhere))
    return platforms.on_cpu_or_elsewhere(on_cpu, elsewhere, *args)


def _losses(config: Config, *args: Any) -> Array:
    return _differentiable_losses(config, *args) if needs_one_pass(args) else _losses_in_blocks(config, *args)


def _differentiable_losses_and_gradients(config: Config, *all_args: Any) -> tuple[Array, GradientsOfBoth]:
    student, targets, live, _, d_losses = all_args
    floats = (student, targets if config.target_gradients else None)
    if _is_float16(student, targets):  # the scaled cotangents would overflow in float16
        floats = jax.tree.map(widened, floats)

    def losses_of_floats(student: Linear, teacher: Linear | None) -> Array:
        return _differentiable_losses(config, student, targets if teacher is None else teacher, live)

    losses, reverse = jax.vjp(losses_of_floats, *floats)
    d_losses = d_losses.astype(losses.dtype) * jnp.ones_like(losses)  # splits them over devices like the losses

    def in_dtype_of_sums(gradients: Linear, layer: Linear) -> Gradients:  # as in blocks
        dtype = wide_dtype(_dtype(layer))
        return Gradients(*jax.tree.map(lambda x: x.astype(dtype), gradients))

    of_student, of_teacher = reverse(d_losses)
    of_teacher = None if of_teacher is None else in_dtype_of_sums(of_teacher, targets)
    gradients = GradientsOfBoth(in_dtype_of_sums(of_student, student), of_teacher)
    return cast(tuple[Array, GradientsOfBoth], vary_with((losses, gradients), all_args))


@with_derivatives_of(_differentiable_losses_and_gradients)
@functools.partial(jax.jit, static_argnums=0)
def _losses_and_gradients_in_blocks(config: Config, *all_args: Any) -> tuple[Array, GradientsOfBoth]:
    def with_sizes(sizes: Sizes, *args_and_d_losses: Any) -> tuple[Array, GradientsOfBoth]:
        *args, d_losses = args_and_d_losses
        losses, gradients = losses_and_gradients(config, sizes, *_flatten(*args), d_losses.reshape(-1))
        assert gradients is not None

        def shaped(gradients: Gradients, layer: Linear) -> Gradients:
            return gradients._replace(features=gradients.features.reshape(layer.features.shape))

        of_student, of_teacher = gradients
        of_teacher = None if of_teacher is None else shaped(of_teacher, args[1])
        gradients = GradientsOfBoth(shaped(of_student, args[0]), of_teacher)
        losses = losses.reshape(d_losses.shape)
        return cast(tuple[Array, GradientsOfBoth], vary_with((losses, gradients), args_and_d_losses))

    student, targets, live, wanted, d_losses = all_args
    live = both(live, wanted)  # other tokens cost no time
    args = student, targets, live, d_losses
    return cast(tuple[Array, GradientsOfBoth], _with_sizes_of_platform(config, with_sizes, args))


def _losses_and_gradients(config: Config, *all_args: Any) -> tuple[Array, GradientsOfBoth]:
    """The losses and the gradients of the sum of `losses * d_losses`.

    The arguments are followed by the tokens that have cotangents, None for all, and by the cotangents `d_losses`.
    """
    if needs_one_pass(all_args):
        return _differentiable_losses_and_gradients(config, *all_args)
    return _losses_and_gradients_in_blocks(config, *all_args)
