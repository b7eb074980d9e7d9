"""Softmax cross-entropy of integer labels and of distributions."""

from __future__ import annotations

import functools
import math
from typing import Literal, TypedDict, Unpack, overload

import jax.numpy as jnp

from masksafe._core import arguments, label_checks, sharding
from masksafe._core.labels import at_labels, is_soft
from masksafe._core.masks import masks_rows, read_mask
from masksafe._core.precision import promoted
from masksafe._core.public_op import public_op
from masksafe._core.typing import Array, ArrayLike, Axes, Axis, DType, jitted
from masksafe.losses._labelled import Labelled, elements_at, read_integer_labels
from masksafe.losses._layout import broadcast_widened
from masksafe.losses._rows import _arguments
from masksafe.losses._rows._cross_entropy import CrossEntropy, TargetCrossEntropy
from masksafe.losses._rows._dense import RowLoss, outputs_of_rows


@public_op
def softmax_cross_entropy(
    logits: ArrayLike, labels: ArrayLike, axis: Axis | None = -1, where: ArrayLike | None = None
) -> Array:
    r"""Softmax cross-entropy between logits and a distribution over the classes.

    .. math::
      \ell = -\sum_j t_j \log p_j, \qquad p_j = \frac{e^{x_j}}{\sum_k e^{x_k}}

    with logits :math:`x`, labels :math:`t` and both sums over the unmasked classes; a class with
    :math:`t_j = 0` and :math:`x_j = -\infty` adds nothing, by the convention :math:`0 \log 0 = 0`.

    Args:
      logits: unnormalised log probabilities, floats `[..., num_classes]`.
      labels: a distribution over the classes for every row, `[..., num_classes]`; floats, or integers or
        booleans for one-hot rows. They broadcast with `logits`.
      axis: the axis or axes of the classes; None means all axes.
      where: booleans; False is masked. A mask of the rank of `logits` masks classes and broadcasts to their
        shape. A mask of lower rank masks rows and broadcasts to the shape of the loss: for logits `[2, 2]`, a
        mask `(2,)` masks rows.

    Returns:
      The loss of every row, `[...]`, of the dtype to which JAX promotes `logits` and `labels`, computed in at
      least float32.

      * A row with no unmasked class, or whose labels are all 0, has loss 0.
      * Masked logits and labels have gradients of exactly 0. The part of a label on a masked class is removed
        with the class: a one-hot row at a masked class has loss 0.
      * A label on a class with a logit of -inf gives loss +inf. Logits of only -inf have no probabilities: the loss
        is NaN.
      * A NaN or +inf in an unmasked logit, or a NaN in an unmasked label, makes the gradient of its own row
        NaN. The loss is NaN too, or +inf because of a logit of +inf.
        Where the cotangent of the loss is 0, the gradient is 0 even then.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> logits = jnp.array([[1.2, -0.8, -0.5], [jnp.nan] * 3])  # the second is padding
      >>> labels = jnp.array([[1.0, 0.0, 0.0], [jnp.nan] * 3])
      >>> mask = jnp.array([True, False])
      >>> with jnp.printoptions(precision=4):
      ...     print(masksafe.losses.softmax_cross_entropy(logits, labels, where=mask))
      [0.2761 0.    ]

    References:
      `optax.losses.softmax_cross_entropy
      <https://optax.readthedocs.io/en/latest/api/losses.html#optax.losses.softmax_cross_entropy>`_, which this
      function replaces.
    """
    inputs, axes, dtype, bad_rows = _read_distributions("softmax_cross_entropy", logits, labels, axis, where)
    (loss,) = outputs_of_rows(RowLoss(TargetCrossEntropy(), axes), inputs, None)
    return label_checks.nan_where_bad(loss.astype(dtype), bad_rows)


@public_op
def safe_softmax_cross_entropy(logits: ArrayLike, labels: ArrayLike) -> Array:
    r"""Softmax cross-entropy for logits that may be -inf; the same as `softmax_cross_entropy`.

    .. math::
      \ell = -\sum_j t_j \log p_j, \qquad p_j = \frac{e^{x_j}}{\sum_k e^{x_k}}

    with logits :math:`x` and labels :math:`t`. optax has both functions because its `softmax_cross_entropy` is NaN
    where a logit is -inf and its label 0. Here neither is NaN; the name exists for compatibility.

    Args:
      logits: unnormalised log probabilities, floats `[..., num_classes]`.
      labels: a distribution over the classes for every row; they broadcast with `logits`.

    Returns:
      The loss of every row, `[...]`. It is +inf where a label with a logit of -inf is not 0. The gradient with
      respect to a label of 0 whose logit is -inf is 0, since the class is absent.

    Raises:
      TypeError: if `logits` are not floats.
      ValueError: if the shapes do not broadcast. While label checks are on, for a bad label.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> logits, labels = jnp.array([-jnp.inf, 0.0, 0.0]), jnp.array([0.0, 0.5, 0.5])
      >>> print(f"{masksafe.losses.safe_softmax_cross_entropy(logits, labels):.4f}")
      0.6931

    References:
      `optax.losses.safe_softmax_cross_entropy
      <https://optax.readthedocs.io/en/latest/api/losses.html#optax.losses.safe_softmax_cross_entropy>`_.
    """
    inputs, axes, dtype, bad_rows = _read_distributions("safe_softmax_cross_entropy", logits, labels, -1, None)
    (loss,) = outputs_of_rows(RowLoss(TargetCrossEntropy(), axes), inputs, None)
    return label_checks.nan_where_bad(loss.astype(dtype), bad_rows)


class _Keywords(TypedDict, total=False):
    """The parameters that the overloads have in common, besides the arrays."""

    axis_name: sharding.AxisName
    label_smoothing: float
    z_loss: float
    class_weights: ArrayLike | None


@overload
def softmax_cross_entropy_with_integer_labels(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    with_components: Literal[False] = False,
    **options: Unpack[_Keywords],
) -> Array: ...


@overload
def softmax_cross_entropy_with_integer_labels(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    with_components: Literal[True],
    **options: Unpack[_Keywords],
) -> tuple[Array, Array]: ...


@overload
def softmax_cross_entropy_with_integer_labels(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    with_components: bool,
    **options: Unpack[_Keywords],
) -> Array | tuple[Array, Array]: ...


@public_op
def softmax_cross_entropy_with_integer_labels(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    axis_name: sharding.AxisName = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    with_components: bool = False,
    class_weights: ArrayLike | None = None,
) -> Array | tuple[Array, Array]:
    r"""Softmax cross-entropy between logits and integer labels.

    .. math::
      \ell = (1 - \varepsilon) w_y (\lambda - x_y) + \frac{\varepsilon}{V} \sum_j w_j (\lambda - x_j) +
      \zeta \lambda^2, \qquad \lambda = \log \sum_j e^{x_j}

    with logits :math:`x`, label :math:`y` and sums over the :math:`V` unmasked classes; by default
    :math:`\lambda - x_y = -\log p_y`, the logarithm of the label's probability, and :math:`w = 1`.

    Args:
      logits: unnormalised log probabilities, floats `[..., num_classes]`.
      labels: the class of every row, integers `[...]` of any width, in [0, num_classes). Axes of size 1
        broadcast against those of `logits` and vice versa.
      axis: the axis of the classes. With a tuple of axes, a label is the flat index into them, in the order given.
      where: booleans; False is masked. A mask of the rank of `logits` masks classes and broadcasts to their
        shape. A mask of lower rank masks rows and broadcasts to the shape of the loss: for logits `[2, 2]`, a
        mask `(2,)` masks rows. For labels padded as for torch's `ignore_index` write `where=labels != -100`.
      axis_name: inside `jax.shard_map`, the mesh axis, or a tuple of them, over which the classes of `logits` and of a
        mask of classes are split; of several axes of classes, the first is. Labels count the classes of all devices,
        and every device gets the same loss. Gradients are correct with `check_vma=True`, the default.
      label_smoothing: :math:`\varepsilon` in [0, 1], the part of the probability shared by all unmasked classes.
      z_loss: :math:`\zeta`, the weight of the squared logsumexp.
      with_components: whether to return the z-loss apart.
      class_weights: :math:`w`, non-negative floats `[num_classes]`, split like the classes; None means 1. They have no
        gradient. A label of weight 0 costs 0, even where that is NaN; its class still counts in the softmax. A masked
        class does not, and a label at it costs +inf. A mean divides by the sum of the labels' weights, as below.

    Returns:
      The loss of every row, `[...]`, of the dtype of `logits`, computed in at least float32; with `with_components` a
      pair of the cross-entropy and the term with :math:`\zeta`, which add up to the loss.

      * A row that is masked, or has no unmasked class, has loss 0, whatever its label. Masked logits have gradient 0.
      * An unmasked label out of range, or of negative weight, makes loss and gradient of its row NaN, not its z-loss.
        With label smoothing a negative weight of any unmasked class does so in every row.
      * A label whose class is masked or has a logit of -inf has loss +inf. Logits of only -inf have loss NaN.
      * A NaN or +inf in an unmasked logit makes the gradient of its own row NaN. The loss is NaN too, or +inf
        where the logit +inf belongs to a class other than the label.
      * Where the cotangent of the loss is 0, a row with a NaN has a gradient of 0, so `jnp.where(labels >= 0, loss, 0)`
        trains as well. (Second derivatives in reverse over reverse, and `forward_mode`, require `where`.)

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> loss = masksafe.losses.softmax_cross_entropy_with_integer_labels
      >>> logits = jnp.array([[1.2, -0.8, -0.5], [0.9, -1.2, 1.1]])
      >>> labels = jnp.array([0, -100])  # the second row is padding, else an error
      >>> mask, w = labels != -100, jnp.array([2.0, 0.5, 1.0])
      >>> with jnp.printoptions(precision=4):
      ...     print(loss(logits, labels, where=mask), loss(logits, labels))
      [0.2761 0.    ] [0.2761    nan]

      >>> # The mean with class weights, as torch defines it:
      >>> total = loss(logits, labels, where=mask, class_weights=w).sum()
      >>> mean = masksafe.MaskedMean(total, masksafe.sum(w[labels], where=mask))
      >>> print(f"{mean:.4f}")
      0.2761

    References:
      `optax.losses.softmax_cross_entropy_with_integer_labels
      <https://optax.readthedocs.io/en/latest/api/losses.html>`_, which this function replaces. Szegedy et al.,
      "Rethinking the Inception Architecture", 2016 (label smoothing); Chowdhery et al., "PaLM", 2022 (z-loss).
    """
    op = "softmax_cross_entropy_with_integer_labels"
    hint = "For soft labels and one-hot rows use softmax_cross_entropy."
    axis_name = sharding.as_axis_name(op, axis_name)
    factors = _arguments.read_factors(op, label_smoothing, z_loss, "unmasked_mean")
    inputs, axes = read_integer_labels(op, logits, labels, axis, where, hint)
    shape = inputs.logits.shape
    bad_rows = label_checks.check_integer_labels(op, inputs.labels, inputs.where, axes, shape, axis_name)
    formula = CrossEntropy(tuple(factors))
    if class_weights is not None:
        number = math.prod(inputs.logits.shape[a] for a in axes)
        class_weights = _arguments.read_per_class(op, "class_weights", class_weights, number, "logits")
    inputs = inputs._replace(class_weights=class_weights if formula.has_mean else None)
    outputs = outputs_of_rows(RowLoss(formula, axes, axis_name), inputs, None)
    # JAX indexes no empty array.
    if class_weights is not None and class_weights.size > 0 and "cross_entropy" in factors:
        weighted = _weighted_by_labels(axes, axis_name, outputs[0], inputs, class_weights)
        outputs = weighted, *outputs[1:]
    losses = tuple(x if n == 1 else x * n for x, n in zip(outputs, factors.values(), strict=True))
    as_shared = lambda x: sharding.Devices(axis_name).shared(x.astype(inputs.logits.dtype))  # noqa: E731
    if not arguments.as_bool(op, "with_components", with_components):
        return label_checks.nan_where_bad(as_shared(functools.reduce(jnp.add, losses)), bad_rows)
    cross_entropy, z_losses = map(as_shared, _arguments.components(factors, losses))
    return label_checks.nan_where_bad(cross_entropy, bad_rows), z_losses


@jitted(0, 1)
def _weighted_by_labels(
    axes: Axes, axis_name: sharding.AxisName, losses: Array, inputs: Labelled, class_weights: Array
) -> Array:
    """The losses `[...]` times the weights of their labels' classes; those at a masked class stay as they are."""
    _, labels, unmasked = inputs.rows(axes)
    if unmasked is not None and not masks_rows(unmasked, (-1,)):
        is_at = lambda unmasked, index: elements_at(unmasked, index).astype(jnp.int32)  # noqa: E731
        unmasked = at_labels(unmasked, labels, axis_name, is_at) != 0
    unmasked = None if unmasked is None else unmasked.squeeze(-1)
    class_weights = _arguments.cleaned_class_weights(class_weights)
    weights = _arguments.weights_of_labels(class_weights, inputs.labels, unmasked, axis_name)
    return _arguments.weighted_losses(losses, weights.astype(losses.dtype))


def _read_distributions(
    op: str, logits: ArrayLike, labels: ArrayLike, axis: Axis | None, where: ArrayLike | None
) -> tuple[Labelled, Axes, DType, Array | None]:
    """Logits and labels that have been checked and broadcast, the axes of the classes, the dtype, and the bad rows."""
    logits, labels = arguments.as_float_array(op, "logits", logits), arguments.as_real_array(op, "labels", labels)
    are_integers = not is_soft(labels)
    hint = "For integer labels use softmax_cross_entropy_with_integer_labels." if are_integers else ""
    shape = arguments.broadcast_shapes(op, hint, logits=logits.shape, labels=labels.shape)
    dtype = promoted(logits.dtype, labels)
    labels = labels.astype(dtype) if are_integers else labels
    axes = arguments.canonical_axes(op, axis, len(shape))
    if not _has_classes(logits, axes, shape):
        expected = f"as many classes as labels {labels.shape}, on axis {axis}"
        raise ValueError(arguments.message(op, "logits", f"shape {logits.shape}", expected))
    if are_integers and not _has_classes(labels, axes, shape):  # broadcasting would repeat one number for every class
        expected = f"one-hot rows of the classes of logits {logits.shape} on axis {axis}"
        raise ValueError(arguments.message(op, "labels", f"shape {labels.shape}", expected, hint))
    where = read_mask(op, where, shape, "logits and labels together", "classes or rows", axes, logits.ndim)
    labels = broadcast_widened(labels, shape)
    bad_rows = label_checks.check_distributions(op, labels, where, axes)
    return Labelled(broadcast_widened(logits, shape), labels, where), axes, dtype, bad_rows


def _has_classes(x: Array, axes: Axes, shape: tuple[int, ...]) -> bool:
    """Whether `x`, which broadcasts to `shape`, has its full size on the axes of the classes."""
    aligned = (1,) * (len(shape) - x.ndim) + x.shape
    return all(aligned[a] == shape[a] for a in axes)
