"""Softmax cross-entropy of integer labels and of distributions, with one common core."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core import arguments, label_checks, platforms, sharding
from masksafe._core.derivatives import computed_once, with_reverse_rule
from masksafe._core.labels import is_soft
from masksafe._core.masks import masks_rows
from masksafe._core.public_op import public_op
from masksafe._core.typing import Array, ArrayLike, Axes, Axis
from masksafe.losses._cross_entropy_rows import (
    Plan,
    Rows,
    evaluate_rows,
    gradient_of_exps,
    is_sound,
    missed_slopes,
    probs_minus_targets,
    takes_part,
    target_costs,
)
from masksafe.losses._labelled import Labelled, read_integer_labels
from masksafe.losses._layout import as_mask_of_classes_or_rows, broadcast_widened, from_rows

# The public functions: they check the arguments and call the core.


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
        NaN. The loss is NaN too, or +inf where all labels are on classes other than that of the logit +inf.
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
    return soft_cross_entropy("softmax_cross_entropy", logits, labels, axis, where)


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
    return soft_cross_entropy("safe_softmax_cross_entropy", logits, labels, -1, None)


@public_op
def softmax_cross_entropy_with_integer_labels(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    axis_name: str | None = None,
) -> Array:
    r"""Softmax cross-entropy between logits and integer labels.

    .. math::
      \ell = -\log p_y, \qquad p_j = \frac{e^{x_j}}{\sum_k e^{x_k}}

    with logits :math:`x`, label :math:`y` and the sum over the unmasked classes.

    Args:
      logits: unnormalised log probabilities, floats `[..., num_classes]`.
      labels: the class of every row, integers `[...]` of any width, in [0, num_classes). Axes of size 1
        broadcast against those of `logits` and vice versa.
      axis: the axis of the classes. With a tuple of axes, a label is the flat index into an array of those
        axes, in the order given.
      where: booleans; False is masked. A mask of the rank of `logits` masks classes and broadcasts to their
        shape. A mask of lower rank masks rows and broadcasts to the shape of the loss: for logits `[2, 2]`, a
        mask `(2,)` masks rows. For labels padded as for torch's `ignore_index` write `where=labels != -100`.
      axis_name: inside `jax.shard_map`, the mesh axis over which the classes of `logits`, and of a mask of
        classes, are split; if there are several axes of classes, the first one is split. Labels count the classes
        of all devices, and every device gets the same loss. Gradients are correct with `check_vma=True`, the
        default.

    Returns:
      The loss of every row, `[...]`, of the dtype of `logits`, computed in at least float32.

      * A row that is masked, or that has no unmasked class, has loss 0, whatever its label. Masked logits have
        gradients of exactly 0.
      * An unmasked label outside [0, num_classes) never wraps: its row has loss NaN and gradient NaN.
      * A label whose class is masked or has a logit of -inf has probability 0 and loss +inf. Logits of only -inf have
        no probabilities: the loss is NaN.
      * A NaN or +inf in an unmasked logit makes the gradient of its own row NaN. The loss is NaN too, or +inf
        where the logit +inf belongs to a class other than the label.
      * Where the cotangent of the loss is 0, a row with a NaN has a gradient of 0, so
        `jnp.where(labels >= 0, loss, 0)` trains as well. (For second derivatives in reverse over reverse, and
        inside `forward_mode`, this requires `where`.)

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> logits = jnp.array([[1.2, -0.8, -0.5], [0.9, -1.2, 1.1]])
      >>> labels = jnp.array([0, -100])  # the second row is padding
      >>> loss = masksafe.losses.softmax_cross_entropy_with_integer_labels
      >>> with jnp.printoptions(precision=4):
      ...     print(loss(logits, labels, where=labels != -100))
      [0.2761 0.    ]

      Without the mask, the same label is an error:

      >>> with jnp.printoptions(precision=4):
      ...     print(loss(logits, labels))
      [0.2761    nan]

    References:
      `optax.losses.softmax_cross_entropy_with_integer_labels
      <https://optax.readthedocs.io/en/latest/api/losses.html>`_, which this function replaces.
    """
    op, hint = (
        "softmax_cross_entropy_with_integer_labels",
        "For soft labels and one-hot rows use softmax_cross_entropy.",
    )
    axis_name = sharding.as_axis_name(op, axis_name)
    inputs, axes, bad_rows = read_integer_labels(op, logits, labels, axis, where, axis_name, hint)
    loss = _cross_entropy(_Config(axes, inputs.logits.dtype, axis_name), inputs, None)
    return label_checks.nan_where_bad(sharding.Devices(axis_name).shared(loss), bad_rows)


def weighted_cross_entropy(logits: Array, targets: Array, where: Array | None) -> Array:
    """The loss of targets that have the shape of the logits and need not be distributions; nothing is checked."""
    return _cross_entropy(_Config((logits.ndim - 1,), logits.dtype), Labelled(logits, targets, where), None)


def poly_loss(axes: Axes, dtype: Any, logits: Array, targets: Array, where: Array | None, epsilon: Array) -> Array:
    """The loss of targets that have the shape of the logits, for an epsilon of each row; nothing is checked."""
    return _cross_entropy(_Config(axes, dtype), Labelled(logits, targets, where), epsilon)


def soft_cross_entropy(
    op: str, logits: ArrayLike, labels: ArrayLike, axis: Axis | None, where: ArrayLike | None
) -> Array:
    """`softmax_cross_entropy`, with `op` as the name in errors."""
    logits, labels = arguments.as_float_array(op, "logits", logits), arguments.as_real_array(op, "labels", labels)
    are_integers = not is_soft(labels)
    hint = "For integer labels use softmax_cross_entropy_with_integer_labels." if are_integers else ""
    shape = arguments.broadcast_shapes(op, hint, logits=logits.shape, labels=labels.shape)
    dtype = jnp.result_type(logits.dtype, labels)
    labels = labels.astype(dtype) if are_integers else labels
    axes = arguments.canonical_axes(op, axis, len(shape))
    if not _has_classes(logits, axes, shape):
        expected = f"as many classes as labels {labels.shape}, on axis {axis}"
        raise ValueError(arguments.message(op, "logits", f"shape {logits.shape}", expected))
    if are_integers and not _has_classes(labels, axes, shape):  # broadcasting would repeat one number for every class
        expected = f"one-hot rows of the classes of logits {logits.shape} on axis {axis}"
        raise ValueError(arguments.message(op, "labels", f"shape {labels.shape}", expected, hint))
    where = as_mask_of_classes_or_rows(op, where, axes, shape, logits.ndim)
    labels = broadcast_widened(labels, shape)
    bad_rows = label_checks.check_distributions(op, labels, where, axes)
    inputs = Labelled(broadcast_widened(logits, shape), labels, where)
    return label_checks.nan_where_bad(_cross_entropy(_Config(axes, dtype), inputs, None), bad_rows)


def _has_classes(x: Array, axes: Axes, shape: tuple[int, ...]) -> bool:
    """Whether `x`, which broadcasts to `shape`, has its full size on the axes of the classes."""
    aligned = (1,) * (len(shape) - x.ndim) + x.shape
    return all(aligned[a] == shape[a] for a in axes)


# The core. It takes the arguments in the user's layout, which avoids copies among the residuals. It is jitted, which
# hides the NaN of masked elements even from jax_debug_nans.


class _Config(NamedTuple):
    """The static arguments."""

    axes: Axes  # of the classes
    dtype: Any  # of the loss
    axis_name: str | None = None  # the mesh axis over which the classes are split


def _forward(config: _Config, inputs: Labelled, epsilon: Array | None) -> tuple[Array, Any]:
    if _may_keep_exps(config, inputs):
        kept, rows = _evaluate_and_keep(config.axes, inputs)
    else:
        kept, rows = inputs.logits, _evaluate(config, False, inputs, epsilon)
    return _loss_of_rows(config, inputs.logits, rows), (inputs._replace(logits=kept), epsilon, rows)


def _reverse(config: _Config, residuals: Any, d_loss: Array) -> tuple[Labelled, Array | None]:
    d_loss = sharding.Devices(config.axis_name).sum(d_loss)
    pull_back = _pull_back_kept if _may_keep_exps(config, residuals[0]) else _pull_back
    return cast(tuple[Labelled, Array | None], pull_back(config.axes, *residuals, d_loss))


@with_reverse_rule(_forward, _reverse, static_argnums=(0,))
def _cross_entropy(config: _Config, inputs: Labelled, epsilon: Array | None) -> Array:
    return _loss_of_rows(config, inputs.logits, _evaluate(config, True, inputs, epsilon))


def _loss_of_rows(config: _Config, logits: Array, rows: Rows) -> Array:
    loss: Array = rows.loss.squeeze(-1).astype(config.dtype)
    return loss if config.axis_name is None else sharding.vary_with(loss, logits)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _evaluate(config: _Config, loss_alone: bool, inputs: Labelled, epsilon: Array | None) -> Rows:
    # In blocks, the devices would have to exchange sums once per block.
    plan = Plan(config.axis_name is None, loss_alone, config.axis_name)
    return evaluate_rows(plan, *inputs.rows(config.axes), _of_rows(epsilon))


def _of_rows(x: Array | None) -> Array | None:
    return None if x is None else x[..., None]


# With labels, a CPU keeps the exponentials in place of the logits, and the reverse pass multiplies them where they are:
# to compute them takes as long as all else. Those of 16-bit logits would be twice as large. A mask of classes would be
# applied once before the maximum and once after the exponentials, each time to an array in memory.


def _may_keep_exps(config: _Config, inputs: Labelled) -> bool:
    logits, labels, where = inputs
    may_loop = config.axis_name is None and sharding.may_loop(inputs)
    return may_loop and masks_rows(where, config.axes) and logits.dtype.itemsize >= 4 and not is_soft(labels)


@functools.partial(jax.jit, static_argnums=0)
def _evaluate_and_keep(axes: Axes, inputs: Labelled) -> tuple[Array, Rows]:
    """The exponentials on a CPU, elsewhere the logits; and the rows."""

    def on_cpu(inputs: Labelled) -> tuple[Array, Rows]:
        rows = evaluate_rows(Plan(in_blocks=False, keeps_exps=True), *inputs.rows(axes))
        return from_rows(axes, inputs.logits, cast(Array, rows.exps)), rows._replace(exps=None)

    def elsewhere(inputs: Labelled) -> tuple[Array, Rows]:
        return inputs.logits, evaluate_rows(Plan(in_blocks=False), *inputs.rows(axes))

    return platforms.on_cpu_or_elsewhere(on_cpu, elsewhere, inputs)


@functools.partial(jax.jit, static_argnums=0)
def _pull_back_kept(axes: Axes, kept: Labelled, _: None, rows: Rows, d_loss: Array) -> tuple[Labelled, None]:
    def on_cpu(kept: Labelled, rows: Rows, d_loss: Array) -> Array:
        exps, _, mask = kept.rows(axes)
        d_x = gradient_of_exps(rows._replace(exps=exps), mask, d_loss.astype(rows.loss.dtype)[..., None])
        return from_rows(axes, kept.logits, d_x)

    def elsewhere(kept: Labelled, rows: Rows, d_loss: Array) -> Array:
        d_inputs: Labelled = _pull_back(axes, kept, None, rows, d_loss)[0]
        return d_inputs.logits

    d_logits = platforms.on_cpu_or_elsewhere(on_cpu, elsewhere, kept, rows, d_loss)
    return Labelled(d_logits, None, None), None


@functools.partial(jax.jit, static_argnums=0)
def _pull_back(
    axes: Axes, inputs: Labelled, epsilon: Array | None, rows: Rows, d_loss: Array
) -> tuple[Labelled, Array | None]:
    (logits, labels, _), (x, t, mask), epsilon = inputs, inputs.rows(axes), _of_rows(epsilon)
    if sharding.are_whole(logits):
        # A CPU computes the exponentials again, else the forward pass would write them to memory for the reverse pass.
        rows, x, t = platforms.unfused_on_cpu((rows, x, t))
        if is_soft(t) and platforms.fits_into_a_kernel(axes, logits.shape):
            rows, x, t = platforms.on_cpu_or_elsewhere(_keep_rows, _evaluate_again, rows, x, t, mask, epsilon)
    d_loss = d_loss.astype(rows.loss.dtype)[..., None]
    live = takes_part(is_sound(rows), d_loss, mask)
    slopes = probs_minus_targets(x, t, mask, rows)
    costs = target_costs(x, t, mask, rows) if is_soft(t) else None
    d_epsilon = None
    if epsilon is not None:
        of_logits, of_targets = missed_slopes(x, t, mask, rows)
        slopes, costs = slopes + epsilon * of_logits, cast(Array, costs) + epsilon * of_targets
        d_epsilon = jnp.where(d_loss == 0, 0, cast(Array, rows.missed) * d_loss).squeeze(-1)
    # Selected after the product, since the cotangent of a masked row may be infinite, as for sqrt(0).
    d_logits = computed_once(from_rows(axes, logits, jnp.where(live, slopes * d_loss, 0)))
    if costs is None:
        return Labelled(d_logits, None, None), None
    live &= (jnp.abs(costs) < jnp.inf) | (d_loss != 0)
    d_labels = from_rows(axes, labels, jnp.where(live, costs * d_loss, 0))
    return Labelled(d_logits, d_labels, None), d_epsilon


def _keep_rows(rows: Rows, x: Array, t: Array, *_: Array | None) -> tuple[Rows, Array, Array]:
    return rows, x, t


def _evaluate_again(
    rows: Rows, x: Array, t: Array, mask: Array | None, epsilon: Array | None
) -> tuple[Rows, Array, Array]:
    # The kernel that writes the gradient reads the whole row anyway. Kept results of the forward pass would be computed
    # by a kernel of their own, with one more pass over the logits, since XLA's kernels for rows have only one result.
    x, t = lax.optimization_barrier((x, t))
    return evaluate_rows(Plan(in_blocks=False), x, t, mask, epsilon), x, t
