"""Divergences of two linear layers' softmax, as in distillation, without the logits of either side in memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Literal, cast

import jax.numpy as jnp
from jax import lax

from masksafe._core import label_checks
from masksafe._core.arguments import as_choice, as_float_array, as_label_array, check_is_known, check_shape, message
from masksafe._core.labels import is_class
from masksafe._core.masks import either, read_mask
from masksafe._core.public_op import public_op
from masksafe._core.run_time import any_of, number_of
from masksafe._core.typing import REDUCTIONS, Array, ArrayLike, LossReduction
from masksafe.losses._rows import _arguments
from masksafe.losses._rows._divergence import DIRECTIONS, Direction, Divergence, TopK, is_repeated
from masksafe.losses._rows._linear_layer import LinearInputs
from masksafe.losses._rows._linear_loss import LinearLoss
from masksafe.losses._rows._linear_op import evaluate

_OP, _OP_OF_TOP_K = "linear_kl_divergence", "linear_kl_divergence_with_top_k_targets"


@public_op
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
    direction: Direction = "forward",
    beta: float = 0.5,
    target_gradients: bool = False,
    reduction: LossReduction = "mean",
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

    The logits exist for one block of tokens at a time, and only blocks with unmasked tokens are computed. There is no
    factor of the temperature: for gradients of one size at every temperature multiply the result by `temperature**2`.

    Args:
      features: the student's, floats `[..., D]`, one row for each token.
      kernel: floats `[D, V]`.
      target_features: the teacher's, floats `[..., E]`, for the same tokens.
      target_kernel: floats `[E, V]`.
      bias: `[V]`, or None.
      target_bias: `[V]`, or None.
      where: booleans `[...]`; False masks a token.
      class_mask: booleans `[V]`; False takes a class from both sides.
      temperature: :math:`\tau`, positive; both sides are divided by it.
      direction: "forward", "reverse" or "jensen_shannon".
      beta: :math:`\beta` in (0, 1), the teacher's part of the mixture, used by "jensen_shannon" alone. For trl's
        `beta=0` write `direction="forward"`, for `beta=1` "reverse".
      target_gradients: whether the teacher has gradients. If not, they are 0 and cost nothing.
      reduction: "mean" over the unmasked tokens, "sum", or "none" for the divergences `[...]`, 0 at masked tokens. For
        the mean over devices or micro-batches put the sum and the number of tokens into a `masksafe.MaskedMean`.
      block_size: the most tokens in a block; None chooses it.

    Returns:
      The divergence, in the promoted dtype of features and kernels, but at least float32. It is 0, with gradients of 0,
      if all tokens or all classes are masked. Masked tokens and classes have gradients of 0 and no influence.

      * A bias of -inf excludes a class from one side; if it excludes all of them, the divergence is NaN. A class of
        probability 0 adds nothing; the divergence is +inf where its first distribution has a class that the second
        lacks, and that of "jensen_shannon" always finite.
      * A NaN in an unmasked row of either side makes its divergence NaN, and the gradients to which it contributes.
      * Where the cotangent of the divergence is 0, the gradients are 0, even if the divergence is NaN.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> features, kernel = jnp.eye(3, 2), jnp.arange(8.0).reshape(2, 4)
      >>> teacher = jnp.eye(3).at[2].set(jnp.nan), jnp.cos(jnp.arange(12.0).reshape(3, 4))
      >>> value = masksafe.losses.linear_kl_divergence(
      ...     features, kernel, *teacher, where=jnp.array([True, True, False]))
      >>> print(f"{value:.4f}")
      0.8769

    References:
      Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network", 2015; Agarwal et al., "On-Policy
      Distillation of Language Models", 2024; Hsu et al., "Liger Kernel", 2024.
    """
    student = _arguments.read_layer(_OP, features, kernel, bias)
    teacher = _arguments.read_layer(_OP, target_features, target_kernel, target_bias, prefix="target_")
    tokens, classes = student.features.shape[:-1], student.kernel.shape[1]
    if teacher.features.shape[:-1] != tokens:
        expected = f"{tokens} and a last axis, the tokens of features {student.features.shape}"
        raise ValueError(message(_OP, "target_features", f"shape {teacher.features.shape}", expected))
    if teacher.kernel.shape[1] != classes:
        expected = f"{classes} classes, those of kernel {student.kernel.shape}"
        raise ValueError(message(_OP, "target_kernel", f"shape {teacher.kernel.shape}", expected))
    unmasked = read_mask(_OP, where, tokens, "the tokens", "tokens")
    class_mask = _arguments.read_class_mask(_OP, class_mask, student.kernel)
    check_is_known(_OP, "target_gradients", target_gradients, "a bool")
    if not isinstance(target_gradients, bool):
        raise TypeError(message(_OP, "target_gradients", f"value {target_gradients!r}", "True or False"))
    options = _read_options(_OP, temperature, direction, beta, reduction, block_size, target_gradients=target_gradients)
    if not target_gradients:
        teacher = lax.stop_gradient(teacher)
    inputs = LinearInputs((student, teacher), None, None, unmasked).without_masked(class_mask)
    return _reduced(options, reduction, inputs, unmasked)


@public_op
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
    direction: Direction = "forward",
    beta: float = 0.5,
    rest: Literal["bucket", "drop"] = "bucket",
    reduction: LossReduction = "mean",
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
      where: booleans; False is masked. Of shape `[...]` it masks tokens; of one axis more, which broadcasts to
        `[..., k]`, targets, for a teacher that knows fewer classes of some tokens. A token without a target is masked.
      class_mask: booleans `[V]`; False takes a class from the student. The teacher is not to name it.
      temperature: :math:`\tau`, positive; the student's logits are divided by it. The teacher's probabilities are
        taken as they are, so they have to be those at this temperature.
      direction: "forward", "reverse" or "jensen_shannon", as in `linear_kl_divergence`.
      beta: the teacher's part of the mixture, used by "jensen_shannon" alone.
      rest: "bucket" or "drop".
      reduction: "mean" over the unmasked tokens, "sum", or "none".
      block_size: the most tokens in a block; None chooses it.

    Returns:
      The divergence, as from `linear_kl_divergence`.

      * Classes out of range, or twice in a row, make the divergence NaN, and with it the gradients to which the token
        contributes; see `masksafe.label_checks`. A target at a masked class is one that the student lacks: the forward
        divergence is +inf.
      * A remaining probability of the teacher is at least the rounding error of 1, so that rounding cannot make the
        reverse divergence infinite. There is no rest if all other classes are masked.

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
      Those of `linear_kl_divergence`.
    """
    op = _OP_OF_TOP_K
    student = _arguments.read_layer(op, features, kernel, bias)
    tokens, classes = student.features.shape[:-1], student.kernel.shape[1]
    log_probs = lax.stop_gradient(as_float_array(op, "target_log_probs", target_log_probs))
    labels = as_label_array(op, "target_classes", target_classes)
    if log_probs.shape[:-1] != tokens or log_probs.ndim != len(tokens) + 1 or log_probs.shape[-1] == 0:
        expected = f"{tokens} and a last axis of at least one class, the tokens of features"
        raise ValueError(message(op, "target_log_probs", f"shape {log_probs.shape}", expected))
    check_shape(op, "target_classes", labels.shape, log_probs.shape, "that of target_log_probs")
    targets = TopK(log_probs, labels)
    if where is not None and jnp.ndim(where) == len(tokens) + 1:
        target_mask = cast(Array, read_mask(op, where, targets.classes.shape, "target_classes", "tokens"))
        targets, where = targets._replace(unmasked=target_mask), any_of(target_mask, -1)
    unmasked = read_mask(op, where, tokens, "the tokens", "tokens")
    class_mask = _arguments.read_class_mask(op, class_mask, student.kernel)
    with_rest = as_choice(op, "rest", rest, ("bucket", "drop")) == "bucket"
    flags = {"has_top_k": True, "with_rest": with_rest}
    options = _read_options(op, temperature, direction, beta, reduction, block_size, **flags)
    bad_rows = _check_top_k(targets, unmasked, classes, class_mask)
    inputs = LinearInputs((student,), targets, None, unmasked).without_masked(class_mask)
    losses = _reduced(options, reduction, inputs, unmasked)
    return label_checks.nan_where_bad(losses, bad_rows if bad_rows is None or losses.ndim else any_of(bad_rows))


# The arguments.


def _read_options(
    op: str, temperature: float, direction: str, beta: float, reduction: str, block_size: int | None, **flags: bool
) -> LinearLoss:
    as_choice(op, "direction", direction, DIRECTIONS)
    as_choice(op, "reduction", reduction, REDUCTIONS)
    temperature = _arguments.read_number(op, "temperature", temperature)
    hint = 'For the limits pass direction="forward" or "reverse".'
    beta = _arguments.read_number(op, "beta", beta, hint)
    return LinearLoss(Divergence(direction, beta, temperature, **flags), _arguments.read_block_size(op, block_size))


def _check_top_k(targets: TopK, unmasked: Array | None, num_classes: int, class_mask: Array | None) -> Array | None:
    """Reports bad targets, and returns the bad rows, if label checks are on."""
    where, shape = None if unmasked is None else unmasked[..., None], targets.classes.shape
    where = where if targets.unmasked is None else targets.unmasked

    def check(argument: str, x: Array, is_valid: Callable[[Array], Array], otherwise: str) -> Array | None:
        bad = label_checks.check_elements(_OP_OF_TOP_K, x, shape, where, is_valid, otherwise, argument)
        return None if bad is None else any_of(bad, -1)

    def is_unmasked(classes: Array) -> Array:
        return ~is_class(classes, num_classes) | cast(Array, class_mask)[jnp.clip(classes, 0, num_classes - 1)]

    check_classes = functools.partial(check, "target_classes", targets.classes)
    most = 8 * float(jnp.finfo(targets.log_probs.dtype).eps)
    found = [
        check_classes(lambda x: is_class(x, num_classes), f"outside [0, {num_classes})"),
        check_classes(lambda _: ~is_repeated(targets.distinct), "repeated in their row"),
        check("target_log_probs", targets.log_probs, lambda x: x <= most, "logarithms above 0 or NaN"),
        None if class_mask is None else check_classes(is_unmasked, "at a masked class"),
    ]
    return functools.reduce(either, found)


def _reduced(options: LinearLoss, reduction: str, inputs: LinearInputs, where: Array | None) -> Array:
    """The reduced losses; a mean is over the tokens in `where`, some of which `inputs` may mask."""
    if reduction == "none":
        return evaluate(options, inputs)[0]
    total: Array = evaluate(options, inputs, (jnp.ones((), inputs.sum_dtype),))
    if reduction == "sum":
        return total
    count = jnp.asarray(math.prod(inputs.tokens)) if where is None else number_of(where)
    return total / jnp.maximum(count, 1).astype(total.dtype)
