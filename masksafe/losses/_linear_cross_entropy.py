"""The softmax cross-entropy of a linear layer, for vocabularies whose logits would be the largest array in memory."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from masksafe._core import platforms, sharding
from masksafe._core.arguments import as_float_array, as_label_array, as_number, message
from masksafe._core.derivatives import explains_forward_mode, with_derivatives_of, with_reverse_rule
from masksafe._core.label_checks import check_integer_labels, nan_where_bad
from masksafe._core.masks import as_mask_of, selected
from masksafe._core.own_shard_map import Split, on_each_device, split_of
from masksafe._core.precision import wide_dtype, widened
from masksafe._core.sharding import has_symbolic_size, may_loop, vary_with
from masksafe._core.typing import Array, ArrayLike
from masksafe.losses._linear_cross_entropy_blocks import (
    Config,
    Gradients,
    Layer,
    RowSums,
    Sizes,
    Tokens,
    default_class_tile,
    default_token_block,
    losses_and_gradients,
    losses_of_logits,
)
from masksafe.losses._linear_cross_entropy_tiles import default_sizes, losses_and_sums
from masksafe.losses._linear_cross_entropy_tiles import gradients as gradients_in_tiles

_OP = "linear_softmax_cross_entropy"
_REDUCTIONS = ("mean", "sum", "none")

_Core = Callable[..., Array]


def linear_softmax_cross_entropy(
    features: ArrayLike,
    kernel: ArrayLike,
    labels: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    where: ArrayLike | None = None,
    reduction: str = "mean",
    logit_soft_cap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    block_size: int | None = None,
    axis_name: str | None = None,
) -> Array:
    r"""Softmax cross-entropy of `features @ kernel + bias` and integer labels, without the logits in memory.

    .. math::
      a_t = f_t W + b, \qquad x_t = \kappa \tanh(a_t / \kappa), \qquad \lambda_t = \log \sum_c e^{x_{tc}}

      \ell_t = \lambda_t - (1 - \varepsilon) x_{t y_t} - \frac{\varepsilon}{V} \sum_c x_{tc} + \zeta \lambda_t^2

    The logits exist for one block of tokens at a time. The unmasked tokens are gathered first, and only blocks that
    contain any are computed: the time depends on the number of unmasked tokens, not on that of all tokens. On a CPU the
    gradients of "mean" and "sum" are computed together with the loss, in three matrix products in total. Elsewhere, and
    with "none", the reverse pass computes the logits again, in four products; if they fit into one tile, XLA keeps
    them. With "none" it omits tokens whose cotangent is 0.

    Args:
      features: floats `[..., D]`, one row for each token.
      kernel: floats `[D, V]`.
      labels: integers `[...]` in [0, V).
      bias: `[V]`, or None.
      where: booleans `[...]`; False masks a token.
      reduction: "mean" over the unmasked tokens, "sum", or "none" for the losses `[...]`, 0 at masked tokens. For the
        mean over devices or micro-batches put the sum and the number of tokens into a `masksafe.MaskedMean`.
      logit_soft_cap: :math:`\kappa`, positive, or None for no cap.
      label_smoothing: :math:`\varepsilon` in [0, 1], the part of the probability shared by all classes.
      z_loss: :math:`\zeta`, the weight of the squared logsumexp.
      block_size: the number of tokens in a block; None chooses it. Larger blocks are faster, and on a CPU need memory
        for `block_size * V` floats. Elsewhere the classes are divided too, into tiles of 128 MiB of logits or more.
      axis_name: inside `jax.shard_map`, the mesh axis over which the classes of `kernel` and `bias` are split. Labels
        count the classes of all devices. Gradients are correct with `check_vma=True`, the default.

    Returns:
      The loss, in the promoted dtype of features and kernel, but at least float32. It is 0, with gradients of 0, if
      nothing is left. Gradients have the dtypes of their arguments; sums, including the gradient of the kernel, are
      accumulated in at least float32. Masked tokens have gradients of 0 and no influence.

      * A label out of range makes the loss NaN, and with it the gradients to which the token contributes; see
        `masksafe.label_checks`.
      * A bias of -inf excludes a class; a label at such a class gives loss +inf.
      * Where the cotangent of the loss is 0, the gradients are 0, even if the loss is NaN.
      * If the explicit axes of a mesh split the tokens or the classes over devices, each device computes its own in
        blocks, in a `jax.shard_map` that the op makes; the sizes of blocks are those for the part of a device. A kernel
        split along D, as in fully sharded training, is gathered, and so are features; and classes that are split over
        an axis that splits tokens as well. On automatic axes the compiler splits the blocks, at several times the cost:
        `jax.sharding.explicit_axes` around the loss, or a `jax.shard_map`, avoids that.
      * If a size is symbolic, and under `checkify` on an explicit mesh, all tokens are computed in one pass, with all
        logits in memory.

    Raises:
      TypeError: if a dtype is wrong.
      ValueError: if the shapes do not fit, `reduction` is unknown or a number is out of range. While label checks are
        on, for a bad label.

    Example:
      >>> import jax, jax.numpy as jnp, masksafe
      >>> features, labels = jnp.eye(3), jnp.array([1, 3, -100])
      >>> kernel = jnp.arange(12.0).reshape(3, 4)
      >>> def loss(features, kernel):
      ...     return masksafe.losses.linear_softmax_cross_entropy(features, kernel, labels, where=labels >= 0)
      >>> value, (d_features, d_kernel) = jax.value_and_grad(loss, (0, 1))(features, kernel)
      >>> print(f"{value:.4f}", d_features[2], d_kernel.shape)
      1.4402 [0. 0. 0.] (3, 4)

    References:
      Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training", 2024 (gradients in the forward pass).

      Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024.

      Chowdhery et al., "PaLM", 2022 (z-loss).

      Gemma Team, "Gemma 2", 2024 (soft cap).

      Szegedy et al., "Rethinking the Inception Architecture", 2016 (label smoothing).
    """
    features, kernel, bias = _read_operands(features, kernel, bias)
    labels, where = _read_labels(features, labels, where)
    if reduction not in _REDUCTIONS:
        raise ValueError(message(_OP, "reduction", f"value {reduction!r}", f"one of {', '.join(_REDUCTIONS)}"))
    axis_name = sharding.as_axis_name(_OP, axis_name)
    options = _read_options(logit_soft_cap, label_smoothing, z_loss, block_size, axis_name)

    mask = None if where is None else where[..., None]
    logits_shape = *labels.shape, kernel.shape[1]
    bad_rows = check_integer_labels(_OP, labels, mask, (labels.ndim,), logits_shape, axis_name)
    args = features, labels, where, kernel, bias
    if reduction == "none":
        return nan_where_bad(_evaluate(_token_losses, options, *args), bad_rows)
    total = _evaluate(_summed_loss, options, *args)
    if reduction == "mean":
        count = jnp.asarray(labels.size) if where is None else jnp.sum(where)
        total = total / jnp.maximum(count, 1).astype(total.dtype)
    return nan_where_bad(total, None if bad_rows is None else jnp.any(bad_rows))


# The arguments.


def _read_operands(features: ArrayLike, kernel: ArrayLike, bias: ArrayLike | None) -> tuple[Array, Array, Array | None]:
    features, kernel = as_float_array(_OP, "features", features), as_float_array(_OP, "kernel", kernel)
    if features.ndim == 0:
        raise ValueError(message(_OP, "features", "shape ()", "[..., D]"))
    if kernel.ndim != 2 or kernel.shape[0] != features.shape[-1] or kernel.shape[1] == 0:
        expected = f"[D, V] with at least one class, D being the {features.shape[-1]} of features {features.shape}"
        is_transposed = kernel.ndim == 2 and kernel.shape[1] == features.shape[-1]
        hint = "For a kernel [V, D] pass kernel.T." if is_transposed else ""
        raise ValueError(message(_OP, "kernel", f"shape {kernel.shape}", expected, hint))
    if bias is not None:
        bias = as_float_array(_OP, "bias", bias)
        if bias.shape != kernel.shape[1:]:
            raise ValueError(message(_OP, "bias", f"shape {bias.shape}", f"{kernel.shape[1:]}, the classes of kernel"))
    return features, kernel, bias


def _read_labels(features: Array, labels: ArrayLike, where: ArrayLike | None) -> tuple[Array, Array | None]:
    labels, shape = as_label_array(_OP, "labels", labels), features.shape[:-1]
    if labels.shape != shape:
        expected = f"{shape}, that of features {features.shape} without its last axis"
        raise ValueError(message(_OP, "labels", f"shape {labels.shape}", expected))
    where = as_mask_of(_OP, where, shape, "labels")
    return labels, None if where is None else jnp.broadcast_to(where, shape)


def _read_options(
    soft_cap: float | None,
    label_smoothing: float,
    z_loss: float,
    block_size: int | None,
    axis_name: str | None,
) -> _Options:
    if soft_cap is not None:
        soft_cap, most = as_number(_OP, "logit_soft_cap", soft_cap), float(jnp.finfo(jnp.float32).max)
        if not 0 < soft_cap <= most:
            raise ValueError(message(_OP, "logit_soft_cap", f"value {soft_cap}", "a positive float32, or None"))
    label_smoothing = as_number(_OP, "label_smoothing", label_smoothing)
    if not 0 <= label_smoothing <= 1:
        raise ValueError(message(_OP, "label_smoothing", f"value {label_smoothing}", "a number in [0, 1]"))
    z_loss = as_number(_OP, "z_loss", z_loss)
    if not 0 <= z_loss < math.inf:
        raise ValueError(message(_OP, "z_loss", f"value {z_loss}", "a finite non-negative number"))
    if block_size is not None and (not isinstance(block_size, numbers.Integral) or block_size < 1):
        raise ValueError(message(_OP, "block_size", f"value {block_size!r}", "a positive int or None"))
    return _Options(soft_cap, label_smoothing, z_loss, None if block_size is None else int(block_size), axis_name)


class _Options(NamedTuple):
    """The static arguments as the user gives them."""

    soft_cap: float | None
    label_smoothing: float
    z_loss: float
    block_size: int | None
    axis_name: sharding.AxisName

    def config(self, features: Array, kernel: Array) -> Config:
        """With the sizes of blocks for these arrays."""
        sizes = Sizes(1, 1), Sizes(1, 1), Sizes(1, 1)
        if not (has_symbolic_size(features) or has_symbolic_size(kernel)):
            sizes = _choose_sizes(math.prod(features.shape[:-1]), kernel.shape, self.block_size)
        return Config(self.soft_cap, self.label_smoothing, self.z_loss, *sizes, self.axis_name)


def _choose_sizes(tokens: int, of_kernel: tuple[int, ...], block_size: int | None) -> tuple[Sizes, Sizes, Sizes]:
    """On a CPU, elsewhere, and elsewhere with a mask."""
    tokens, (width, classes) = max(1, tokens), of_kernel
    block = min(default_token_block(classes) if block_size is None else block_size, tokens)
    elsewhere, if_masked = (default_sizes(tokens, width, classes, block_size, m) for m in (False, True))
    return Sizes(block, default_class_tile(width, block)), elsewhere, if_masked


# On a mesh with explicit axes, each device works on the tokens and classes of its own.


def _evaluate(core: _Core, options: _Options, *args: Any) -> Array:
    """The loss of a core, on each device by itself if the arrays are split."""
    features, _, _, kernel, _ = args
    split = split_of(args, _dimensions(*args))
    if split is not None:
        loss: Array = _evaluate_on_each_device(core, options, split, *args)
        return loss
    return sharding.same_on_all_devices(options.axis_name, core(options.config(features, kernel), *args))


@explains_forward_mode
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _evaluate_on_each_device(core: _Core, options: _Options, split: Split, *args: Any) -> Array:
    names = _dimensions(*args)
    of_tokens = PartitionSpec(*names[0][:-1])
    over_tokens = split.axes(*of_tokens) or None
    options = options._replace(axis_name=split.axes("classes") or None)

    def on_device(*args: Any) -> Array:
        features, _, _, kernel, _ = args
        loss = sharding.same_on_all_devices(options.axis_name, core(options.config(features, kernel), *args))
        return loss if loss.ndim else sharding.sum_over_devices(over_tokens, loss)

    of_loss = of_tokens if core is _token_losses else PartitionSpec()
    return cast(Array, on_each_device(on_device, split, args, names, of_loss))


def _dimensions(
    features: Array, labels: Array, live: Array | None, kernel: Array, bias: Array | None
) -> tuple[PartitionSpec, PartitionSpec, PartitionSpec | None, PartitionSpec, PartitionSpec | None]:
    """The names of the dimensions of each array."""
    tokens = [f"tokens {axis}" for axis in range(labels.ndim)]
    of_tokens, of_classes = PartitionSpec(*tokens), PartitionSpec("classes")
    return (
        PartitionSpec(*tokens, None),
        of_tokens,
        None if live is None else of_tokens,
        PartitionSpec(None, "classes"),
        None if bias is None else of_classes,
    )


# The two forms of the loss: a sum, computed together with its gradients, and one loss for each token. Both take the
# arguments in the user's layout, since a copy could show a masked NaN to jax_debug_nans.


class _Saved(NamedTuple):
    """What the forward pass of a sum keeps: on a CPU the gradients, elsewhere the sums of the rows; the other is 0."""

    gradients: Gradients
    sums: RowSums | None  # None in one pass, on any platform


def _summed_loss_forward(config: Config, *args: Any) -> tuple[Array, Any]:
    if _needs_one_pass(args):
        losses, gradients = _differentiable_gradients(config, *args, _cotangents_of_sum(*args))
        saved = _Saved(gradients, None)
    else:
        losses, saved = _losses_and_saved(config, *args)
    return jnp.sum(losses), (args, saved)


def _summed_loss_reverse(config: Config, residuals: Any, d_total: Array) -> tuple[Any, ...]:
    args, saved = residuals
    d_total = sharding.whole_cotangent(config.axis_name, d_total)
    if saved.sums is None:
        d_features, d_kernel, d_bias = _multiplied(config, args, saved, d_total)
    else:
        d_features, d_kernel, d_bias = _multiplied_or_computed(config, *args, saved, d_total)
    return d_features, None, None, d_kernel, d_bias


def _cotangent_scale(features: Array, kernel: Array) -> float:
    """The cotangent used for the gradients of a sum before the actual cotangent is known.

    Cotangents of the logits are rounded to the dtype of the kernel; this scale moves them into the range of float16.
    """
    return 2.0**10 if jnp.promote_types(features.dtype, kernel.dtype) == jnp.float16 else 1.0


def _cotangents_of_sum(features: Array, labels: Array, live: Array | None, kernel: Array, bias: Array | None) -> Array:
    return jnp.full(labels.shape, _cotangent_scale(features, kernel), _sum_dtype(features, kernel))


@with_reverse_rule(_summed_loss_forward, _summed_loss_reverse, static_argnums=(0,))
def _summed_loss(
    config: Config, features: Array, labels: Array, live: Array | None, kernel: Array, bias: Array | None
) -> Array:
    return jnp.sum(_evaluate_losses(config, features, labels, live, kernel, bias))


def _token_losses_forward(config: Config, *args: Any) -> tuple[Array, Any]:
    if _needs_one_pass(args):
        return _differentiable_losses(config, *args), (args, None)
    losses, sums = _losses_and_sums(config, *args)
    return losses, (args, sums)


def _token_losses_reverse(config: Config, residuals: Any, d_losses: Array) -> tuple[Any, ...]:
    (features, labels, live, kernel, bias), sums = residuals
    d_losses = sharding.whole_cotangent(config.axis_name, d_losses)
    is_wanted = d_losses != 0  # a cotangent of 0 means that the user has replaced the loss, and with it any NaN
    live = is_wanted if live is None else is_wanted & live
    gradients = _gradients_of_one_pass if sums is None else _gradients
    d_features, d_kernel, d_bias = gradients(
        config, features, labels, live, kernel, bias, sums, jnp.where(live, d_losses, 0)
    )
    return d_features, None, None, d_kernel, d_bias


@with_reverse_rule(_token_losses_forward, _token_losses_reverse, static_argnums=(0,))
def _token_losses(
    config: Config, features: Array, labels: Array, live: Array | None, kernel: Array, bias: Array | None
) -> Array:
    return _evaluate_losses(config, features, labels, live, kernel, bias)


# The kernels in blocks, and the equivalent functions that JAX differentiates in their place.


def _sum_dtype(features: Array, kernel: Array) -> Any:
    """The dtype of the sums."""
    return wide_dtype(jnp.promote_types(features.dtype, kernel.dtype))


def _flatten(
    features: Array, labels: Array, live: Array | None, kernel: Array, bias: Array | None
) -> tuple[Tokens, Layer]:
    """The tokens on one axis, and features and kernel in one dtype."""
    dtype = jnp.promote_types(features.dtype, kernel.dtype)
    features = selected(features, None if live is None else live[..., None])
    features = features.astype(dtype).reshape(math.prod(labels.shape), features.shape[-1])
    live = None if live is None else live.reshape(-1)
    return Tokens(features, labels.reshape(-1), live), Layer(kernel.astype(dtype), bias)


def _needs_one_pass(args: Any) -> bool:
    """Whether JAX refuses a loop over the tokens, or an argument is empty."""
    return not may_loop(args) or any(x.size == 0 for x in jax.tree.leaves(args))


def _differentiable_losses(
    config: Config, features: Array, labels: Array, live: Array | None, kernel: Array, bias: Array | None
) -> Array:
    """The losses in a form that JAX differentiates to any order, if possible in a fixed number of blocks."""
    args = features, labels, live, kernel, bias
    tokens, layer = _flatten(*args)

    def losses_of_tokens(tokens: Tokens) -> Array:
        labels, live = tokens.labels[..., None], None if tokens.live is None else tokens.live[..., None]
        logits = jnp.matmul(tokens.features, layer.kernel, preferred_element_type=_sum_dtype(features, kernel))
        if layer.bias is not None:
            logits += jnp.expand_dims(layer.bias, range(logits.ndim - 1)).astype(logits.dtype)
        losses = losses_of_logits(config, layer, selected(logits, live), selected(labels, live))
        return selected(losses, live)[..., 0]

    if _needs_one_pass(args):
        losses = losses_of_tokens(tokens)
    else:
        losses = lax.map(jax.checkpoint(losses_of_tokens), tokens, batch_size=config.on_cpu.token_block)
    return cast(Array, vary_with(losses.reshape(labels.shape), args))


def _differentiable_losses_and_sums(config: Config, *args: Any) -> tuple[Array, RowSums]:
    return _differentiable_losses(config, *args), _no_sums(*args)


@with_derivatives_of(_differentiable_losses_and_sums)
@functools.partial(jax.jit, static_argnums=0)
def _losses_and_sums(config: Config, *args: Any) -> tuple[Array, RowSums]:
    """The losses, and what their reverse pass wants to know of the rows."""

    def on_cpu(*args: Any) -> tuple[Array, RowSums]:
        return losses_and_gradients(config, *_flatten(*args), None)[0].reshape(args[1].shape), _no_sums(*args)

    def elsewhere(*args: Any) -> tuple[Array, RowSums]:
        losses, sums = losses_and_sums(config, *_flatten(*args))
        return cast(tuple[Array, RowSums], vary_with((losses.reshape(args[1].shape), sums), args))

    return cast(tuple[Array, RowSums], platforms.on_cpu_or_elsewhere(on_cpu, elsewhere, *args))


def _no_sums(*args: Any) -> RowSums:
    features, labels, _, kernel, _ = args
    zero = jnp.zeros((labels.size, 1), _sum_dtype(features, kernel))
    return cast(RowSums, vary_with(RowSums(*[zero] * 5), args))


def _evaluate_losses(config: Config, *args: Any) -> Array:
    return _differentiable_losses(config, *args) if _needs_one_pass(args) else _losses_and_sums(config, *args)[0]


def _differentiable_gradients(config: Config, *args_and_d_losses: Any) -> tuple[Array, Gradients]:
    features, labels, live, kernel, bias, d_losses = args_and_d_losses

    def losses_of_floats(features: Array, kernel: Array, bias: Array | None) -> Array:
        return sharding.same_on_all_devices(
            config.axis_name, _differentiable_losses(config, features, labels, live, kernel, bias)
        )

    floats = features, kernel, bias
    if _cotangent_scale(features, kernel) != 1:  # the scaled cotangents would overflow in float16
        floats = jax.tree.map(widened, floats)
    losses, reverse = jax.vjp(losses_of_floats, *floats)
    d_losses = sharding.part_of_cotangent(config.axis_name, d_losses)
    d_losses *= jnp.ones_like(losses)  # splits them over devices like the losses
    dtype = _sum_dtype(features, kernel)  # as in blocks, whatever dtypes the arguments have
    gradients = jax.tree.map(lambda gradient: gradient.astype(dtype), Gradients(*reverse(d_losses)))
    return cast(tuple[Array, Gradients], vary_with((losses, gradients), args_and_d_losses))


def _gradients_of_one_pass(config: Config, *args_sums_and_d_losses: Any) -> Gradients:
    *args, _, d_losses = args_sums_and_d_losses
    return _cast(_differentiable_gradients(config, *args, d_losses)[1], args)


def _cast(gradients: Gradients, args: Any) -> Gradients:
    """Gradients in the dtypes of the arguments."""
    features, _, _, kernel, bias = args
    d_bias = None if bias is None or gradients.bias is None else gradients.bias.astype(bias.dtype)
    return Gradients(gradients.features.astype(features.dtype), gradients.kernel.astype(kernel.dtype), d_bias)


@with_derivatives_of(_gradients_of_one_pass)
@functools.partial(jax.jit, static_argnums=0)
def _gradients(config: Config, *args_sums_and_d_losses: Any) -> Gradients:
    """The gradients of the sum of the losses weighted with `d_losses`, in the dtypes of the arguments."""

    def on_cpu(args: Any, _: Any, d_losses: Array) -> Gradients:
        return _cast(_gradients_in_blocks(config, args, d_losses)[1], args)

    def elsewhere(args: Any, sums: RowSums, d_losses: Array) -> Gradients:
        return _gradients_in_tiles(config, args, sums, d_losses, jnp.ones((), d_losses.dtype))

    *args, sums, d_losses = args_sums_and_d_losses
    return cast(Gradients, platforms.on_cpu_or_elsewhere(on_cpu, elsewhere, args, sums, d_losses))


def _gradients_in_blocks(config: Config, args: Any, d_losses: Array) -> tuple[Array, Gradients]:
    features, labels, *_ = args
    losses, gradients = losses_and_gradients(config, *_flatten(*args), d_losses.reshape(-1))
    assert gradients is not None
    return losses.reshape(labels.shape), gradients._replace(features=gradients.features.reshape(features.shape))


def _gradients_in_tiles(config: Config, args: Any, sums: RowSums, d_losses: Array, factor: Array) -> Gradients:
    features, _, _, kernel, bias = args
    dtypes = Gradients(features.dtype, kernel.dtype, None if bias is None else bias.dtype)
    gradients = gradients_in_tiles(config, *_flatten(*args), sums, d_losses.reshape(-1), factor, dtypes)
    return gradients._replace(features=gradients.features.reshape(features.shape))


# The gradients of a sum. On a CPU the forward pass computes them, and the reverse pass multiplies them by the cotangent
# of the loss; elsewhere the reverse pass computes them.


def _differentiable_losses_and_saved(config: Config, *args: Any) -> tuple[Array, _Saved]:
    return _differentiable_losses(config, *args), _Saved(_no_gradients(*args), _no_sums(*args))


@with_derivatives_of(_differentiable_losses_and_saved)
@functools.partial(jax.jit, static_argnums=0)
def _losses_and_saved(config: Config, *args: Any) -> tuple[Array, _Saved]:
    def on_cpu(*args: Any) -> tuple[Array, _Saved]:
        losses, gradients = _gradients_in_blocks(config, args, _cotangents_of_sum(*args))
        return losses, _Saved(gradients, _no_sums(*args))

    def elsewhere(*args: Any) -> tuple[Array, _Saved]:
        losses, sums = losses_and_sums(config, *_flatten(*args))
        losses, sums = vary_with((losses.reshape(args[1].shape), sums), args)
        return losses, _Saved(_no_gradients(*args), sums)

    return cast(tuple[Array, _Saved], platforms.on_cpu_or_elsewhere(on_cpu, elsewhere, *args))


def _no_gradients(*args: Any) -> Gradients:
    features, _, _, kernel, bias = args
    dtype = _sum_dtype(features, kernel)
    d_bias = None if bias is None else jnp.zeros(bias.shape, dtype)
    zeros = Gradients(jnp.zeros(features.shape, dtype), jnp.zeros(kernel.shape, dtype), d_bias)
    return cast(Gradients, vary_with(zeros, args))


def _multiplied(config: Config, args: Any, saved: _Saved, d_total: Array) -> Gradients:
    """The gradients of the forward pass times the actual cotangent of the sum."""
    features, _, live, kernel, bias = args
    d_total = d_total / _cotangent_scale(features, kernel)
    is_wanted = d_total != 0  # a cotangent of 0 means that the user has replaced the loss, and with it any NaN

    def multiplied(gradient: Array, like: Array, where: Array) -> Array:
        # Selected after the product, since the cotangent may be infinite, as for sqrt(0).
        return selected(gradient * d_total.astype(gradient.dtype), where).astype(like.dtype)

    live_tokens = is_wanted if live is None else is_wanted & live[..., None]
    any_live = is_wanted if live is None else is_wanted & jnp.any(live)
    of_features, of_kernel, of_bias = saved.gradients
    return Gradients(
        multiplied(of_features, features, live_tokens),
        multiplied(of_kernel, kernel, any_live),
        None if of_bias is None or bias is None else multiplied(of_bias, bias, any_live),
    )


def _differentiable_multiplied(config: Config, *args_saved_and_d_total: Any) -> Gradients:
    *args, _, d_total = args_saved_and_d_total
    _, gradients = _differentiable_gradients(config, *args, _cotangents_of_sum(*args))
    return _multiplied(config, args, _Saved(gradients, None), d_total)


@with_derivatives_of(_differentiable_multiplied)
@functools.partial(jax.jit, static_argnums=0)
def _multiplied_or_computed(config: Config, *args_saved_and_d_total: Any) -> Gradients:
    def elsewhere(args: Any, saved: _Saved, d_total: Array) -> Gradients:
        assert saved.sums is not None
        d_losses = _cotangents_of_sum(*args)
        factor = d_total.astype(d_losses.dtype) / _cotangent_scale(args[0], args[3])
        return _gradients_in_tiles(config, args, saved.sums, d_losses, factor)

    *args, saved, d_total = args_saved_and_d_total
    on_cpu = functools.partial(_multiplied, config)
    return cast(Gradients, platforms.on_cpu_or_elsewhere(on_cpu, elsewhere, args, saved, d_total))
