"""The softmax cross-entropy of a linear layer, for vocabularies whose logits would be the largest array of all."""

from __future__ import annotations

import functools
import math
import numbers
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core import sharding
from masksafe._core.arguments import as_float_array, as_label_array, as_number, message
from masksafe._core.derivatives import with_derivatives_of, with_reverse_rule
from masksafe._core.label_checks import check_integer_labels, nan_where_bad
from masksafe._core.masks import as_mask_of, selected
from masksafe._core.precision import widened
from masksafe._core.sharding import has_symbolic_size, may_loop, vary_with
from masksafe._core.typing import Array, ArrayLike
from masksafe.losses._linear_cross_entropy_blocks import (
    Config,
    Gradients,
    Layer,
    Tokens,
    default_class_tile,
    default_token_block,
    losses_and_gradients,
    losses_of_logits,
)

_OP = "linear_softmax_cross_entropy"
_REDUCTIONS = ("mean", "sum", "none")


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

    The logits exist for a block of tokens at a time. Unmasked tokens are moved together first and only the blocks
    that hold any are computed, so that time follows the unmasked tokens. With "mean" and "sum" the gradients are
    computed together with the loss, three matrix products in all; with "none" the reverse pass computes the logits
    again, and leaves out tokens whose cotangent is 0.

    Args:
      features: `[..., D]`, of a float dtype; one row for each token.
      kernel: `[D, V]`, of a float dtype.
      labels: `[...]`, integers in [0, V).
      bias: `[V]`, or None.
      where: `[...]`, booleans; False masks a token. None masks nothing.
      reduction: "mean" over the unmasked tokens, "sum", or "none" for `[...]` with 0 at masked tokens.
      logit_soft_cap: :math:`\kappa`, positive; None caps nothing.
      label_smoothing: :math:`\varepsilon` in [0, 1], the part of the probability that all classes share.
      z_loss: :math:`\zeta`, the weight of the squared logsumexp.
      block_size: tokens at a time; None chooses. More is faster, and takes `block_size * V` floats.
      axis_name: inside `jax.shard_map`, the mesh axis over which the classes of `kernel` and `bias` are split. Labels
        count the classes of all devices. Gradients are right with `check_vma=True`, which is the default.

    Returns:
      The loss in the dtype of the features and the kernel together, but in float32 at least, since losses are summed;
      gradients have the dtypes of their arguments. Nothing unmasked: 0, with zero gradients.
      Sums are accumulated in float32 at least, and so is the gradient of the kernel. Masked tokens get the gradient 0
      and touch nothing, whatever they hold.

      A label out of range makes the loss NaN, and with it the gradients that the token takes part in; see
      `masksafe.label_checks`. A class may be forbidden by a bias of -inf; it costs +inf as a label. Where the
      cotangent of the loss is 0, so are the gradients, whatever the loss is.

      Where the tokens or the classes are split over the devices by an explicit mesh, and for symbolic sizes, all
      tokens are computed in one pass, logits and all; `jax.shard_map` keeps the blocks.

    Raises:
      TypeError: for wrong dtypes.
      ValueError: for wrong shapes, an unknown reduction, numbers out of range.

    Example:
      >>> import jax, jax.numpy as jnp, masksafe
      >>> features, labels = jnp.eye(3), jnp.array([1, 3, -100])
      >>> kernel = jnp.arange(12.0).reshape(3, 4)
      >>> def loss(features, kernel):
      ...     return masksafe.losses.linear_softmax_cross_entropy(features, kernel, labels, where=labels >= 0)
      >>> value, (d_features, d_kernel) = jax.value_and_grad(loss, (0, 1))(features, kernel)
      >>> print(f"{value:.4f}", d_features[2], d_kernel.shape)
      1.4402 [0. 0. 0.] (3, 4)

    Source:
      Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training", 2024, for gradients in the forward pass;
      Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024; the z-loss is that of Chowdhery et
      al., "PaLM", 2022, the soft cap that of Gemma Team, "Gemma 2", 2024, the smoothing that of Szegedy et al.,
      "Rethinking the Inception Architecture", 2016.
    """
    features, kernel, bias = _read_operands(features, kernel, bias)
    labels, where = _read_labels(features, labels, where)
    if reduction not in _REDUCTIONS:
        raise ValueError(message(_OP, "reduction", f"value {reduction!r}", f"one of {', '.join(_REDUCTIONS)}"))
    axis_name = sharding.as_axis_name(_OP, axis_name)
    config = _configure(features, kernel, logit_soft_cap, label_smoothing, z_loss, block_size, axis_name)

    mask = None if where is None else where[..., None]
    logits_shape = *labels.shape, kernel.shape[1]
    bad_rows = check_integer_labels(_OP, labels, mask, (labels.ndim,), logits_shape, axis_name)
    if reduction == "none":
        losses = sharding.same_on_all_devices(axis_name, _losses(config, features, labels, where, kernel, bias))
        return nan_where_bad(losses, bad_rows)
    total = sharding.same_on_all_devices(axis_name, _total(config, features, labels, where, kernel, bias))
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


def _configure(
    features: Array,
    kernel: Array,
    soft_cap: float | None,
    label_smoothing: float,
    z_loss: float,
    block_size: int | None,
    axis_name: str | None,
) -> Config:
    if soft_cap is not None:
        soft_cap, most = as_number(_OP, "logit_soft_cap", soft_cap), float(jnp.finfo(jnp.float32).max)
        if not 0 < soft_cap <= most:
            raise ValueError(message(_OP, "logit_soft_cap", f"value {soft_cap}", "a positive float32, or None"))
    label_smoothing = as_number(_OP, "label_smoothing", label_smoothing)
    if not 0 <= label_smoothing <= 1:
        raise ValueError(message(_OP, "label_smoothing", f"value {label_smoothing}", "a number in [0, 1]"))
    z_loss = as_number(_OP, "z_loss", z_loss)
    if not 0 <= z_loss < math.inf:
        raise ValueError(message(_OP, "z_loss", f"value {z_loss}", "a finite number, 0 or more"))
    if block_size is not None and (not isinstance(block_size, numbers.Integral) or block_size < 1):
        raise ValueError(message(_OP, "block_size", f"value {block_size!r}", "a positive int or None"))
    token_block = class_tile = 1
    if not (has_symbolic_size(features) or has_symbolic_size(kernel)):
        chosen = default_token_block(kernel.shape[1]) if block_size is None else int(block_size)
        token_block = max(1, min(chosen, math.prod(features.shape[:-1])))
        class_tile = default_class_tile(kernel.shape[0], token_block)
    return Config(soft_cap, label_smoothing, z_loss, token_block, class_tile, axis_name)


# The two forms of it: a sum, whose gradients are computed with it, and one loss for each token. They take the arguments
# as the user laid them out, so that a NaN under the mask shows in no array of ours, not even under jax_debug_nans.


def _total_forward(config: Config, *args: Any) -> tuple[Array, Any]:
    features, labels, live, kernel, bias = args
    d_losses = jnp.full(labels.shape, _cotangent_scale(features, kernel), _sum_dtype(features, kernel))
    losses, gradients = _evaluate_gradients(config, *args, d_losses)
    empty = [None if x is None else jnp.zeros(0, x.dtype) for x in (features, kernel, bias)]
    return jnp.sum(losses), (gradients, live, empty)


def _total_reverse(config: Config, residuals: Any, d_total: Array) -> tuple[Any, ...]:
    gradients, live, empty = residuals  # the empty arrays tell the dtypes of the arguments
    d_features, d_kernel, _ = empty
    d_total = sharding.whole_cotangent(config.axis_name, d_total) / _cotangent_scale(d_features, d_kernel)
    is_wanted = d_total != 0  # where it is 0, a NaN of the op has been selected away behind it

    def scaled(gradient: Array | None, like: Array | None, where: Array) -> Array | None:
        if gradient is None or like is None:
            return None
        # Selected behind the product: the cotangent may be infinite, as that of sqrt(0) is.
        return selected(gradient * d_total.astype(gradient.dtype), where).astype(like.dtype)

    of_each = is_wanted if live is None else is_wanted & live[..., None]
    of_any = is_wanted if live is None else is_wanted & jnp.any(live)
    d_features, d_kernel, d_bias = map(scaled, gradients, empty, (of_each, of_any, of_any))
    return d_features, None, None, d_kernel, d_bias


def _cotangent_scale(features: Array, kernel: Array) -> float:
    """The cotangent with which the gradients of a sum are computed, before the real one is known.

    Cotangents of the logits are rounded to the dtype of the kernel: those of float16 are to lie in its range.
    """
    return 2.0**10 if jnp.promote_types(features.dtype, kernel.dtype) == jnp.float16 else 1.0


@with_reverse_rule(_total_forward, _total_reverse, static_argnums=(0,))
def _total(
    config: Config, features: Array, labels: Array, live: Array | None, kernel: Array, bias: Array | None
) -> Array:
    return jnp.sum(_evaluate_losses(config, features, labels, live, kernel, bias))


def _losses_forward(config: Config, *args: Any) -> tuple[Array, Any]:
    return _evaluate_losses(config, *args), args


def _losses_reverse(config: Config, args: Any, d_losses: Array) -> tuple[Any, ...]:
    features, labels, live, kernel, bias = args
    d_losses = sharding.whole_cotangent(config.axis_name, d_losses)
    is_wanted = d_losses != 0  # where it is 0, a NaN of the op has been selected away behind it
    live = is_wanted if live is None else is_wanted & live
    args = (features, labels, live, kernel, bias)
    d_losses = jnp.where(live, d_losses, 0)
    _, gradients = _evaluate_gradients(config, *args, d_losses)
    d_bias = None if bias is None or gradients.bias is None else gradients.bias.astype(bias.dtype)
    return gradients.features.astype(features.dtype), None, None, gradients.kernel.astype(kernel.dtype), d_bias


@with_reverse_rule(_losses_forward, _losses_reverse, static_argnums=(0,))
def _losses(
    config: Config, features: Array, labels: Array, live: Array | None, kernel: Array, bias: Array | None
) -> Array:
    return _evaluate_losses(config, features, labels, live, kernel, bias)


# The kernels, and what they are differentiated as.


def _sum_dtype(features: Array, kernel: Array) -> Any:
    """The dtype of the sums."""
    return widened(jnp.zeros(0, jnp.promote_types(features.dtype, kernel.dtype))).dtype


def _flatten(
    features: Array, labels: Array, live: Array | None, kernel: Array, bias: Array | None
) -> tuple[Tokens, Layer]:
    """The tokens on one axis, and features and kernel of one dtype."""
    dtype = jnp.promote_types(features.dtype, kernel.dtype)
    features = selected(features, None if live is None else live[..., None])
    features = features.astype(dtype).reshape(math.prod(labels.shape), features.shape[-1])
    live = None if live is None else live.reshape(-1)
    return Tokens(features, labels.reshape(-1), live), Layer(kernel.astype(dtype), bias)


def _needs_one_pass(args: Any) -> bool:
    """Whether JAX refuses a loop over the tokens, or there are none."""
    return not may_loop(args) or any(x.size == 0 for x in jax.tree.leaves(args))


def _differentiable_losses(
    config: Config, features: Array, labels: Array, live: Array | None, kernel: Array, bias: Array | None
) -> Array:
    """The same losses in a form that JAX differentiates to any order, in blocks of fixed number if it can be."""
    args = features, labels, live, kernel, bias
    tokens, layer = _flatten(*args)

    def of_tokens(tokens: Tokens) -> Array:
        labels, live = tokens.labels[..., None], None if tokens.live is None else tokens.live[..., None]
        logits = jnp.matmul(tokens.features, layer.kernel, preferred_element_type=_sum_dtype(features, kernel))
        if layer.bias is not None:
            logits += jnp.expand_dims(layer.bias, range(logits.ndim - 1)).astype(logits.dtype)
        losses = losses_of_logits(config, layer, selected(logits, live), selected(labels, live))
        return selected(losses, live)[..., 0]

    if _needs_one_pass(args):
        losses = of_tokens(tokens)
    else:
        losses = lax.map(jax.checkpoint(of_tokens), tokens, batch_size=config.token_block)
    return cast(Array, vary_with(losses.reshape(labels.shape), args))


@with_derivatives_of(_differentiable_losses)
@functools.partial(jax.jit, static_argnums=0)
def _losses_in_blocks(config: Config, *args: Any) -> Array:
    return losses_and_gradients(config, *_flatten(*args), None)[0].reshape(args[1].shape)


def _evaluate_losses(config: Config, *args: Any) -> Array:
    return (_differentiable_losses if _needs_one_pass(args) else _losses_in_blocks)(config, *args)


def _differentiable_gradients(config: Config, *args_and_d_losses: Any) -> tuple[Array, Gradients]:
    features, labels, live, kernel, bias, d_losses = args_and_d_losses

    def of_floats(features: Array, kernel: Array, bias: Array | None) -> Array:
        return sharding.same_on_all_devices(
            config.axis_name, _differentiable_losses(config, features, labels, live, kernel, bias)
        )

    floats = features, kernel, bias
    if _cotangent_scale(features, kernel) != 1:  # cotangents of float16 would be float16, too narrow for such a unit
        floats = jax.tree.map(widened, floats)
    losses, reverse = jax.vjp(of_floats, *floats)
    d_losses = sharding.same_on_all_devices(config.axis_name, d_losses) * jnp.ones_like(
        losses
    )  # split over devices as the losses are
    dtype = _sum_dtype(features, kernel)  # that of the sums in blocks, whatever dtypes the arguments have
    gradients = jax.tree.map(lambda gradient: gradient.astype(dtype), Gradients(*reverse(d_losses)))
    return cast(tuple[Array, Gradients], vary_with((losses, gradients), args_and_d_losses))


@with_derivatives_of(_differentiable_gradients)
@functools.partial(jax.jit, static_argnums=0)
def _gradients_in_blocks(config: Config, *args_and_d_losses: Any) -> tuple[Array, Gradients]:
    *args, d_losses = args_and_d_losses
    losses, gradients = losses_and_gradients(config, *_flatten(*args), d_losses.reshape(-1))
    assert gradients is not None
    features, labels, *_ = args
    return losses.reshape(labels.shape), gradients._replace(features=gradients.features.reshape(features.shape))


def _evaluate_gradients(config: Config, *args_and_d_losses: Any) -> tuple[Array, Gradients]:
    """The losses, and the gradients of their sum with weights."""
    evaluate = _differentiable_gradients if _needs_one_pass(args_and_d_losses) else _gradients_in_blocks
    return evaluate(config, *args_and_d_losses)
