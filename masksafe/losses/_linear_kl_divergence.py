"""Divergences of two linear layers' softmax, as in distillation, without the logits of either side in memory."""

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
from masksafe._core.label_checks import check_elements, nan_where_bad
from masksafe._core.labels import is_class
from masksafe._core.masks import as_mask, as_mask_of, selected
from masksafe._core.own_shard_map import Split, on_each_device, split_of
from masksafe._core.precision import wide_dtype, widened
from masksafe._core.sharding import has_symbolic_size, may_loop, vary_with
from masksafe._core.typing import Array, ArrayLike
from masksafe.losses._linear._divergence_blocks import (
    Config,
    Gradients,
    Linear,
    Sizes,
    TopK,
    default_class_tile,
    default_token_block,
    default_token_block_elsewhere,
    is_repeated,
    logits_of,
    losses_and_gradients,
    losses_of_logits,
    sum_dtype,
)
from masksafe.losses._linear._divergences import DIRECTIONS, JENSEN_SHANNON, Divergence

_OP, _OP_OF_TOP_K = "linear_kl_divergence", "linear_kl_divergence_with_top_k_targets"
_REDUCTIONS = ("mean", "sum", "none")
_RESTS = ("bucket", "drop")

_Core = Callable[..., Array]


def linear_kl_divergence(
    features: ArrayLike,
    kernel: ArrayLike,
    target_features: ArrayLike,
    target_kernel: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    target_bias: ArrayLike | None = None,
    where: ArrayLike | None = None,
    class_mask: ArrayLike | None = None,
    temperature: float = 1.0,
    direction: str = "forward",
    beta: float = 0.5,
    target_gradients: bool = False,
    reduction: str = "mean",
    block_size: int | None = None,
) -> Array:
    r"""Divergence of a student's softmax from a teacher's, each that of a linear layer, without logits in memory.

    .. math::
      q_t = \mathrm{softmax}\left( \frac{f_t W + b}{\tau} \right), \qquad
      p_t = \mathrm{softmax}\left( \frac{f'_t W' + b'}{\tau} \right)

    ==================  ==============================================================================================
    direction           divergence of the student's probabilities :math:`q` from the teacher's :math:`p`
    ==================  ==============================================================================================
    "forward"           :math:`\mathrm{KL}(p \| q) = \sum_c p_c \log (p_c / q_c)`, that of Hinton et al.
    "reverse"           :math:`\mathrm{KL}(q \| p)`
    "jensen_shannon"    :math:`\beta \mathrm{KL}(p \| m) + (1 - \beta) \mathrm{KL}(q \| m)` with
                        :math:`m = \beta p + (1 - \beta) q`, that of Agarwal et al., where :math:`p` is the teacher too
    ==================  ==============================================================================================

    The logits exist for one block of tokens at a time. The unmasked tokens are gathered first, and only blocks that
    contain any are computed: the time depends on the number of unmasked tokens, not on that of all tokens. The
    gradients of "mean" and "sum" are computed together with the divergence, in four matrix products in total; with
    "none" the reverse pass computes the logits again, and omits tokens whose cotangent is 0.

    The divergence is a sum of terms that are not negative, so it keeps its digits where student and teacher nearly
    agree. There is no factor of the temperature: for gradients of one size at every temperature (Hinton et al., section
    2) multiply the result by `temperature**2`.

    Args:
      features: the student's, floats `[..., D]`, one row for each token.
      kernel: floats `[D, V]`.
      target_features: the teacher's, floats `[..., E]`, for the same tokens.
      target_kernel: floats `[E, V]`.
      bias: `[V]`, or None.
      target_bias: `[V]`, or None.
      where: booleans `[...]`; False masks a token.
      class_mask: booleans `[V]`; False takes a class from both sides, as if neither kernel had it. Masking classes
        copies the kernels.
      temperature: :math:`\tau`, positive; both sides are divided by it.
      direction: "forward", "reverse" or "jensen_shannon".
      beta: :math:`\beta` in (0, 1), the teacher's part of the mixture, used by "jensen_shannon" alone. Towards 0 this
        divergence becomes :math:`\beta \mathrm{KL}(p \| q)`, towards 1 :math:`(1 - \beta) \mathrm{KL}(q \| p)`; where
        trl's GKD trainer has `beta=0` write `direction="forward"`, for `beta=1` "reverse".
      target_gradients: whether the teacher has gradients. If not, they are 0 and cost nothing, as behind
        `jax.lax.stop_gradient`.
      reduction: "mean" over the unmasked tokens, "sum", or "none" for the divergences `[...]`, 0 at masked tokens. For
        the mean over devices or micro-batches put the sum and the number of tokens into a `masksafe.MaskedMean`.
      block_size: the number of tokens in a block; None chooses it. Memory is needed for `block_size * V` floats of
        either side.

    Returns:
      The divergence, in the promoted dtype of features and kernels, but at least float32. It is 0, with gradients of 0,
      if no token or no class is left. Gradients have the dtypes of their arguments; sums are accumulated in at least
      float32. Masked tokens and classes have gradients of 0 and no influence.

      * A bias of -inf excludes a class from one side. A class of probability 0 adds nothing; the divergence is +inf
        where its first distribution has a class that the second lacks, and that of "jensen_shannon" always finite.
      * A NaN in an unmasked row of either side makes its divergence NaN, and the gradients to which it contributes.
      * Where the cotangent of the divergence is 0, the gradients are 0, even if the divergence is NaN.
      * If the explicit axes of a mesh split the tokens over devices, each device computes its own in blocks, in a
        `jax.shard_map` that the op makes. Kernels are gathered, split along whatever axis.
      * If a size is symbolic, and under `checkify` on an explicit mesh, all tokens are computed in one pass, with all
        logits in memory.

    Raises:
      TypeError: if a dtype is wrong.
      ValueError: if the shapes do not fit, `direction` or `reduction` is unknown or a number is out of range.

    Example:
      >>> import jax, jax.numpy as jnp, masksafe
      >>> features, kernel = jnp.eye(3, 2), jnp.arange(8.0).reshape(2, 4)
      >>> teacher = jnp.eye(3).at[2].set(jnp.nan), jnp.cos(jnp.arange(12.0).reshape(3, 4))
      >>> def loss(features, kernel):
      ...     where = jnp.array([True, True, False])
      ...     return masksafe.losses.linear_kl_divergence(features, kernel, *teacher, where=where)
      >>> value, (d_features, d_kernel) = jax.value_and_grad(loss, (0, 1))(features, kernel)
      >>> print(f"{value:.4f}", d_features[2], d_kernel.shape)
      0.8769 [0. 0.] (2, 4)

    References:
      Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network", 2015.

      Agarwal et al., "On-Policy Distillation of Language Models", 2024 (generalised Jensen-Shannon divergence).

      Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training", 2024 (gradients in the forward pass).
    """
    student = _read_layer(_OP, "features", features, "kernel", kernel, "bias", bias)
    teacher = _read_layer(
        _OP, "target_features", target_features, "target_kernel", target_kernel, "target_bias", target_bias
    )
    tokens, classes = student.features.shape[:-1], student.kernel.shape[1]
    if teacher.features.shape[:-1] != tokens:
        expected = f"{tokens} and a last axis, the tokens of features {student.features.shape}"
        raise ValueError(message(_OP, "target_features", f"shape {teacher.features.shape}", expected))
    if teacher.kernel.shape[1] != classes:
        expected = f"{classes} classes, those of kernel {student.kernel.shape}"
        raise ValueError(message(_OP, "target_kernel", f"shape {teacher.kernel.shape}", expected))
    live, class_mask = _read_masks(_OP, tokens, classes, where, class_mask)
    if not isinstance(target_gradients, bool):
        raise TypeError(message(_OP, "target_gradients", f"value {target_gradients!r}", "True or False"))
    options = _read_options(_OP, temperature, direction, beta, True, target_gradients, reduction, block_size)
    if not target_gradients:
        teacher = lax.stop_gradient(teacher)
    student, teacher = (_without_masked_classes(layer, class_mask) for layer in (student, teacher))
    return _reduced(options, reduction, student, teacher, live, _with_any_class(live, tokens, class_mask))


def linear_kl_divergence_with_top_k_targets(
    features: ArrayLike,
    kernel: ArrayLike,
    target_log_probs: ArrayLike,
    target_classes: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    where: ArrayLike | None = None,
    class_mask: ArrayLike | None = None,
    temperature: float = 1.0,
    direction: str = "forward",
    beta: float = 0.5,
    rest: str = "bucket",
    reduction: str = "mean",
    block_size: int | None = None,
) -> Array:
    r"""`linear_kl_divergence` from a teacher of which only the k most probable classes of each token are known.

    .. math:: q_t = \mathrm{softmax}\left( \frac{f_t W + b}{\tau} \right)

    With `rest="bucket"` all other classes are one class more, of the probabilities that remain on either side,

    .. math:: p_{\text{rest}} = 1 - \sum_{j=1}^k p_j, \qquad q_{\text{rest}} = \sum_{c \notin \{c_1 \dots c_k\}} q_c,

    and the divergence is that of these k + 1 classes. With `rest="drop"` the other classes are gone, as if masked: the
    divergence is that of both sides' probabilities of the k classes, each divided by their sum. The student is then
    free to give the other classes any probability.

    Args:
      features: the student's, floats `[..., D]`, one row for each token.
      kernel: floats `[D, V]`.
      target_log_probs: the logarithms of the teacher's probabilities, floats `[..., k]`, as from `jax.lax.top_k` of a
        log-softmax over all classes. With "bucket" their probabilities sum to 1 at most; with "drop" any common factor
        does not matter. They have no gradients.
      target_classes: the classes of these probabilities, integers `[..., k]` in [0, V), each once in a row.
      bias: `[V]`, or None.
      where: booleans `[...]`; False masks a token.
      class_mask: booleans `[V]`; False takes a class from the student. The teacher is not to name it.
      temperature: :math:`\tau`, positive; the student's logits are divided by it. The teacher's probabilities are
        taken as they are, so they have to be those at this temperature.
      direction: "forward", "reverse" or "jensen_shannon", as in `linear_kl_divergence`.
      beta: the teacher's part of the mixture, used by "jensen_shannon" alone.
      rest: "bucket" or "drop".
      reduction: "mean" over the unmasked tokens, "sum", or "none".
      block_size: the number of tokens in a block; None chooses it.

    Returns:
      The divergence, as from `linear_kl_divergence`.

      * Classes out of range, or twice in a row, make the divergence NaN, and with it the gradients to which the token
        contributes; see `masksafe.label_checks`. A target at a masked class is one that the student lacks: the forward
        divergence is +inf.
      * A remaining probability of the teacher is at least the rounding error of 1, lest the reverse divergence be
        infinite because of rounding. There is no rest if no other class is left.

    Raises:
      TypeError: if a dtype is wrong.
      ValueError: if the shapes do not fit, an option is unknown or a number is out of range. While label checks are on,
        for unmasked classes that are out of range, masked or repeated, and for log-probabilities above 0 or NaN.

    Example:
      >>> import jax, jax.numpy as jnp, masksafe
      >>> features, kernel = jnp.eye(2), jnp.arange(8.0).reshape(2, 4)
      >>> log_probs, classes = jax.lax.top_k(jax.nn.log_softmax(jnp.cos(kernel)), 2)
      >>> for rest in ("bucket", "drop"):
      ...     divergence = masksafe.losses.linear_kl_divergence_with_top_k_targets(
      ...         features, kernel, log_probs, classes, rest=rest)
      ...     print(f"{rest}: {divergence:.4f}")
      bucket: 0.8486
      drop: 0.2178

    References:
      Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network", 2015.

      Agarwal et al., "On-Policy Distillation of Language Models", 2024.
    """
    op = _OP_OF_TOP_K
    student = _read_layer(op, "features", features, "kernel", kernel, "bias", bias)
    tokens, classes = student.features.shape[:-1], student.kernel.shape[1]
    targets = _read_top_k(tokens, target_log_probs, target_classes)
    live, class_mask = _read_masks(op, tokens, classes, where, class_mask)
    if rest not in _RESTS:
        raise ValueError(message(op, "rest", f"value {rest!r}", f"one of {', '.join(_RESTS)}"))
    options = _read_options(op, temperature, direction, beta, rest == "bucket", False, reduction, block_size)
    bad_rows = _check_top_k(targets, live, classes, class_mask)
    student = _without_masked_classes(student, class_mask)
    losses = _reduced(options, reduction, student, targets, live, _with_any_class(live, tokens, class_mask))
    return nan_where_bad(losses, bad_rows if bad_rows is None or losses.ndim else jnp.any(bad_rows))


# The arguments.


def _read_layer(
    op: str, of_features: str, features: Any, of_kernel: str, kernel: Any, of_bias: str, bias: Any
) -> Linear:
    features, kernel = as_float_array(op, of_features, features), as_float_array(op, of_kernel, kernel)
    if features.ndim == 0:
        raise ValueError(message(op, of_features, "shape ()", "[..., D]"))
    if kernel.ndim != 2 or kernel.shape[0] != features.shape[-1] or kernel.shape[1] == 0:
        expected = f"[D, V] with at least one class, D being the {features.shape[-1]} of {of_features} {features.shape}"
        is_transposed = kernel.ndim == 2 and kernel.shape[1] == features.shape[-1]
        hint = f"For a kernel [V, D] pass {of_kernel}.T." if is_transposed else ""
        raise ValueError(message(op, of_kernel, f"shape {kernel.shape}", expected, hint))
    if bias is not None:
        bias = as_float_array(op, of_bias, bias)
        if bias.shape != kernel.shape[1:]:
            expected = f"{kernel.shape[1:]}, the classes of {of_kernel}"
            raise ValueError(message(op, of_bias, f"shape {bias.shape}", expected))
    return Linear(features, kernel, bias)


def _read_top_k(tokens: tuple[int, ...], log_probs: ArrayLike, classes: ArrayLike) -> TopK:
    op = _OP_OF_TOP_K
    log_probs = lax.stop_gradient(as_float_array(op, "target_log_probs", log_probs))
    classes = as_label_array(op, "target_classes", classes)
    if log_probs.shape[:-1] != tokens or log_probs.ndim != len(tokens) + 1 or log_probs.shape[-1] == 0:
        expected = f"{tokens} and a last axis of at least one class, the tokens of features"
        raise ValueError(message(op, "target_log_probs", f"shape {log_probs.shape}", expected))
    if classes.shape != log_probs.shape:
        expected = f"{log_probs.shape}, that of target_log_probs"
        raise ValueError(message(op, "target_classes", f"shape {classes.shape}", expected))
    return TopK(log_probs, classes)


def _read_masks(
    op: str, tokens: tuple[int, ...], classes: int, where: ArrayLike | None, class_mask: ArrayLike | None
) -> tuple[Array | None, Array | None]:
    where = as_mask_of(op, where, tokens, "the tokens")
    if class_mask is not None:
        class_mask = as_mask(op, "class_mask", class_mask)
        if class_mask.shape != (classes,):
            raise ValueError(message(op, "class_mask", f"shape {class_mask.shape}", f"{(classes,)}, the classes"))
    return None if where is None else jnp.broadcast_to(where, tokens), class_mask


def _read_options(
    op: str,
    temperature: float,
    direction: str,
    beta: float,
    with_rest: bool,
    target_gradients: bool,
    reduction: str,
    block_size: int | None,
) -> _Options:
    for name, value, values in (("direction", direction, DIRECTIONS), ("reduction", reduction, _REDUCTIONS)):
        if value not in values:
            raise ValueError(message(op, name, f"value {value!r}", f"one of {', '.join(values)}"))
    temperature, beta = as_number(op, "temperature", temperature), as_number(op, "beta", beta)
    if not 0 < temperature < math.inf:
        raise ValueError(message(op, "temperature", f"value {temperature}", "a positive finite number"))
    if not 0 < beta < 1:
        hint = 'For the limits pass direction="forward" or "reverse".'
        raise ValueError(message(op, "beta", f"value {beta}", "a number between 0 and 1, both excluded", hint))
    if block_size is not None and (not isinstance(block_size, numbers.Integral) or block_size < 1):
        raise ValueError(message(op, "block_size", f"value {block_size!r}", "a positive int or None"))
    divergence = Divergence(direction, beta if direction == JENSEN_SHANNON else 0.5)
    return _Options(divergence, temperature, with_rest, target_gradients, block_size and int(block_size))


class _Options(NamedTuple):
    """The static arguments as the user gives them."""

    divergence: Divergence
    temperature: float
    with_rest: bool
    target_gradients: bool
    block_size: int | None

    def config(self, student: Linear, targets: Linear | TopK) -> Config:
        """With the sizes of blocks for these arrays."""
        on_cpu = elsewhere = Sizes(1, 1)
        if not any(map(has_symbolic_size, jax.tree.leaves((student, targets)))):
            tokens, (width, classes) = max(1, math.prod(student.features.shape[:-1])), student.kernel.shape
            width = max(width, targets.kernel.shape[0]) if isinstance(targets, Linear) else width
            block = min(default_token_block(classes) if self.block_size is None else self.block_size, tokens)
            on_cpu = Sizes(block, default_class_tile(width, block))
            block = default_token_block_elsewhere(classes) if self.block_size is None else self.block_size
            elsewhere = Sizes(min(block, tokens), classes)
        return Config(self.divergence, self.temperature, self.with_rest, self.target_gradients, on_cpu, elsewhere)


def _without_masked_classes(layer: Linear, class_mask: Array | None) -> Linear:
    """The layer with a kernel of 0 and a bias of -inf at masked classes, which have no gradients."""
    if class_mask is None:
        return layer
    bias = jnp.zeros(class_mask.shape, layer.kernel.dtype) if layer.bias is None else layer.bias
    return layer._replace(kernel=selected(layer.kernel, class_mask), bias=selected(bias, class_mask, -math.inf))


def _with_any_class(live: Array | None, tokens: tuple[int, ...], class_mask: Array | None) -> Array | None:
    """Which tokens are unmasked: none if no class is."""
    if class_mask is None:
        return live
    any_class = jnp.any(class_mask)
    return jnp.broadcast_to(any_class, tokens) if live is None else live & any_class


def _check_top_k(targets: TopK, live: Array | None, num_classes: int, class_mask: Array | None) -> Array | None:
    """Reports bad targets, and returns the bad rows, if label checks are on."""
    where, shape = None if live is None else live[..., None], targets.classes.shape
    check = functools.partial(check_elements, _OP_OF_TOP_K, shape=shape, where=where)

    def is_unmasked(classes: Array) -> Array:
        return ~is_class(classes, num_classes) | cast(Array, class_mask)[jnp.clip(classes, 0, num_classes - 1)]

    def is_log_probability(x: Array) -> Array:
        return x <= 8 * float(jnp.finfo(x.dtype).eps)

    found = [
        check(targets.classes, is_valid=lambda x: is_class(x, num_classes), otherwise=f"outside [0, {num_classes})"),
        check(targets.classes, is_valid=lambda x: ~is_repeated(x), otherwise="repeated in their row"),
        check(targets.log_probs, is_valid=is_log_probability, otherwise="logarithms above 0 or NaN"),
    ]
    if class_mask is not None:
        found.append(check(targets.classes, is_valid=is_unmasked, otherwise="at a masked class"))
    bad = [jnp.any(x, -1) for x in found if x is not None]
    return functools.reduce(jnp.logical_or, bad) if bad else None


# On a mesh with explicit axes, each device works on the tokens of its own.


def _reduced(
    options: _Options,
    reduction: str,
    student: Linear,
    targets: Linear | TopK,
    where: Array | None,
    live: Array | None,
) -> Array:
    """The reduced losses of the tokens that are `live`, all of which are in `where`."""
    if reduction == "none":
        return _evaluate(_token_losses, options, student, targets, live)
    total = _evaluate(_summed_loss, options, student, targets, live)
    if reduction == "sum":
        return total
    count = jnp.asarray(math.prod(student.features.shape[:-1])) if where is None else jnp.sum(where)
    return total / jnp.maximum(count, 1).astype(total.dtype)


def _evaluate(core: _Core, options: _Options, *args: Any) -> Array:
    """The loss of a core, on each device by itself if the arrays are split."""
    split = split_of(args, _dimensions(*args))
    if split is not None:
        loss: Array = _evaluate_on_each_device(core, options, split, *args)
        return loss
    return core(options.config(*args[:2]), *args)


@explains_forward_mode
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _evaluate_on_each_device(core: _Core, options: _Options, split: Split, *args: Any) -> Array:
    names = _dimensions(*args)
    of_tokens = PartitionSpec(*names[0].features[:-1])

    def on_device(*args: Any) -> Array:
        loss = core(options.config(*args[:2]), *args)
        return loss if loss.ndim else sharding.sum_over_devices(split.axes(*of_tokens) or None, loss)

    of_loss = of_tokens if core is _token_losses else PartitionSpec()
    return cast(Array, on_each_device(on_device, split, args, names, of_loss))


def _dimensions(student: Linear, targets: Linear | TopK, live: Array | None) -> tuple[Any, Any, Any]:
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
    losses, gradients = _losses_and_gradients(config, *args, _cotangents_of_sum(*args))
    return jnp.sum(losses), (args, gradients)


def _summed_loss_reverse(config: Config, residuals: Any, d_total: Array) -> tuple[Any, ...]:
    (student, targets, live), gradients = residuals
    d_total = d_total / _cotangent_scale(student, targets)
    is_wanted = d_total != 0  # a cotangent of 0 means that the user has replaced the loss, and with it any NaN
    live_tokens = is_wanted if live is None else is_wanted & live[..., None]
    any_live = is_wanted if live is None else is_wanted & jnp.any(live)

    def multiplied(gradient: Array | None, like: Array, where: Array) -> Array | None:
        if gradient is None:
            return None
        # Selected after the product, since the cotangent may be infinite, as for sqrt(0).
        return selected(gradient * d_total.astype(gradient.dtype), where).astype(like.dtype)

    def of_layer(gradients: Linear, layer: Linear) -> Linear:
        where = live_tokens, any_live, any_live
        return Linear(*map(multiplied, gradients, layer, where))  # type: ignore[arg-type]

    of_teacher = None if gradients.teacher is None else of_layer(gradients.teacher, targets)
    return of_layer(gradients.student, student), of_teacher, None


def _cotangent_scale(student: Linear, targets: Linear | TopK) -> float:
    """The cotangent used for the gradients of a sum before the actual cotangent is known.

    Cotangents of the logits are rounded to the dtype of the kernel; this scale moves them into the range of float16.
    """
    layers = (student, targets) if isinstance(targets, Linear) else (student,)
    return 2.0**10 if any(_dtype(layer) == jnp.float16 for layer in layers) else 1.0


def _dtype(layer: Linear) -> Any:
    """That of the matrix products."""
    return jnp.promote_types(layer.features.dtype, layer.kernel.dtype)


def _cotangents_of_sum(student: Linear, targets: Linear | TopK, live: Array | None) -> Array:
    return jnp.full(student.features.shape[:-1], _cotangent_scale(student, targets), sum_dtype(student, targets))


@with_reverse_rule(_summed_loss_forward, _summed_loss_reverse, static_argnums=(0,))
def _summed_loss(config: Config, student: Linear, targets: Linear | TopK, live: Array | None) -> Array:
    return jnp.sum(_losses(config, student, targets, live))


def _token_losses_forward(config: Config, *args: Any) -> tuple[Array, Any]:
    return _losses(config, *args), args


def _token_losses_reverse(config: Config, args: Any, d_losses: Array) -> tuple[Any, ...]:
    student, targets, live = args
    is_wanted = d_losses != 0  # a cotangent of 0 means that the user has replaced the loss, and with it any NaN
    live = is_wanted if live is None else is_wanted & live
    _, gradients = _losses_and_gradients(config, student, targets, live, jnp.where(live, d_losses, 0))
    of_teacher = None if gradients.teacher is None else _cast(gradients.teacher, targets)
    return _cast(gradients.student, student), of_teacher, None


def _cast(gradients: Linear, layer: Linear) -> Linear:
    """Gradients in the dtypes of the arguments."""
    return Linear(*(None if g is None else g.astype(x.dtype) for g, x in zip(gradients, layer, strict=True)))  # type: ignore[arg-type, union-attr]


@with_reverse_rule(_token_losses_forward, _token_losses_reverse, static_argnums=(0,))
def _token_losses(config: Config, student: Linear, targets: Linear | TopK, live: Array | None) -> Array:
    return _losses(config, student, targets, live)


# The kernels in blocks, and the equivalent functions that JAX differentiates in their place.


def _needs_one_pass(args: Any) -> bool:
    """Whether JAX refuses a loop over the tokens, or an argument is empty."""
    return not may_loop(args) or any(x.size == 0 for x in jax.tree.leaves(args))


def _flatten(student: Linear, targets: Linear | TopK, live: Array | None) -> tuple[Linear, Linear | TopK, Array | None]:
    """The tokens on one axis, with 0 for masked ones, and features and kernel in one dtype."""
    tokens = math.prod(student.features.shape[:-1])

    def rows(x: Array) -> Array:
        return selected(x, None if live is None else live[..., None]).reshape(tokens, x.shape[-1])

    def of_layer(layer: Linear) -> Linear:
        return Linear(rows(layer.features.astype(_dtype(layer))), layer.kernel.astype(_dtype(layer)), layer.bias)

    of_targets = of_layer(targets) if isinstance(targets, Linear) else TopK(*map(rows, targets))
    return of_layer(student), of_targets, None if live is None else live.reshape(-1)


def _differentiable_losses(config: Config, student: Linear, targets: Linear | TopK, live: Array | None) -> Array:
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
    if _needs_one_pass(args):
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
    return _differentiable_losses(config, *args) if _needs_one_pass(args) else _losses_in_blocks(config, *args)


def _differentiable_losses_and_gradients(config: Config, *args_and_d_losses: Any) -> tuple[Array, Gradients]:
    student, targets, live, d_losses = args_and_d_losses
    floats = (student, targets if config.target_gradients else None)
    if _cotangent_scale(student, targets) != 1:  # the scaled cotangents would overflow in float16
        floats = jax.tree.map(widened, floats)

    def losses_of_floats(student: Linear, teacher: Linear | None) -> Array:
        return _differentiable_losses(config, student, targets if teacher is None else teacher, live)

    losses, reverse = jax.vjp(losses_of_floats, *floats)
    d_losses = d_losses.astype(losses.dtype) * jnp.ones_like(losses)  # splits them over devices like the losses

    def in_dtype_of_sums(gradients: Linear, layer: Linear) -> Linear:  # as in blocks
        dtype = wide_dtype(_dtype(layer))
        return cast(Linear, jax.tree.map(lambda x: x.astype(dtype), gradients))

    of_student, of_teacher = reverse(d_losses)
    of_teacher = None if of_teacher is None else in_dtype_of_sums(of_teacher, targets)
    gradients = Gradients(in_dtype_of_sums(of_student, student), of_teacher)
    return cast(tuple[Array, Gradients], vary_with((losses, gradients), args_and_d_losses))


@with_derivatives_of(_differentiable_losses_and_gradients)
@functools.partial(jax.jit, static_argnums=0)
def _losses_and_gradients_in_blocks(config: Config, *args_and_d_losses: Any) -> tuple[Array, Gradients]:
    def with_sizes(sizes: Sizes, *args_and_d_losses: Any) -> tuple[Array, Gradients]:
        *args, d_losses = args_and_d_losses
        losses, gradients = losses_and_gradients(config, sizes, *_flatten(*args), d_losses.reshape(-1))
        assert gradients is not None

        def shaped(gradients: Linear, layer: Linear) -> Linear:
            return gradients._replace(features=gradients.features.reshape(layer.features.shape))

        of_student, of_teacher = gradients
        of_teacher = None if of_teacher is None else shaped(of_teacher, args[1])
        gradients = Gradients(shaped(of_student, args[0]), of_teacher)
        losses = losses.reshape(d_losses.shape)
        return cast(tuple[Array, Gradients], vary_with((losses, gradients), args_and_d_losses))

    return cast(tuple[Array, Gradients], _with_sizes_of_platform(config, with_sizes, args_and_d_losses))


def _losses_and_gradients(config: Config, *args_and_d_losses: Any) -> tuple[Array, Gradients]:
    if _needs_one_pass(args_and_d_losses):
        return _differentiable_losses_and_gradients(config, *args_and_d_losses)
    return _losses_and_gradients_in_blocks(config, *args_and_d_losses)
