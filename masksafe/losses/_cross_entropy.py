r"""Softmax cross-entropy: of integer labels, and of distributions.

One core serves all of it. With logits :math:`x`, targets :math:`t` (a distribution, or the one-hot row of a
label) and the sums over the unmasked classes,

.. math::
  \ell = \sum_j t_j (L - x_j), \qquad
  L = \log \sum_j e^{x_j}, \qquad
  p_j = e^{x_j - L}, \qquad
  \frac{\partial \ell}{\partial x_j} = T p_j - t_j, \qquad
  \frac{\partial \ell}{\partial t_j} = L - x_j, \qquad T = \sum_j t_j.

Two things are done to keep every digit.

* :math:`L` is kept in two parts, the largest logit (`shift`) and :math:`\log \sum_j e^{x_j - \text{shift}}`
  (`log_sum`), so that an offset that all logits share cancels before anything is rounded.
* One class of each row, the anchor :math:`a`, stays out of the sum: the label, or the most likely class. With
  :math:`z = x - \text{shift}` and the others :math:`O = \sum_{j \ne a} e^{z_j}`, `log_sum` is
  :math:`\log(1 + (O + (e^{z_a} - 1)))`: tiny and exact when the anchor has nearly all of the probability, where
  :math:`\log(1 + O)` would have lost :math:`O`. In the same way :math:`p_a - 1 = e^{\log p_a} - 1` is not
  computed as a difference.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from masksafe._blocks import is_sharded, map_row_blocks
from masksafe._errors import (
    as_array,
    as_float_array,
    as_label_array,
    as_mask,
    broadcast_shapes,
    canonical_axes,
    check_broadcasts_to,
    message,
)
from masksafe._rules import differentiable
from masksafe._typing import Array, ArrayLike, Axis

Axes = tuple[int, ...]


class _Rows(NamedTuple):
    """What is known of each row after the forward pass; every array is `[..., 1]`."""

    loss: Array
    shift: Array  # the largest unmasked logit
    log_sum: Array  # the log of the sum of exp(logits - shift)
    total: Array  # the sum of the targets
    anchor: Array  # the class that stays out of the sum; -1 for none
    anchor_log_prob: Array


# The public functions: check the arguments, call the core.


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
      labels: a distribution over the classes for every row, `[..., num_classes]`; floats, or the integers or
        booleans of one-hot rows. It broadcasts with `logits`.
      axis: the axis or axes of the classes; None is all of them.
      where: booleans, False is masked. Of the rank of `logits` they mask classes and broadcast to its shape;
        of a lower rank they mask rows and broadcast to the shape of the loss.

    Returns:
      The loss of every row, `[...]`, of the dtype to which JAX promotes `logits` and `labels`; it is computed
      in float32 at least.

      * A row with no unmasked class, or whose labels are all 0, has loss 0.
      * Logits and labels under the mask have a gradient of exactly 0. What a label has on a masked class is
        gone with the class: a one-hot row that points at one has loss 0.
      * A label on a class with a logit of -inf gives loss +inf.
      * A NaN or +inf in an unmasked logit, or a NaN in an unmasked label, makes the gradient of its own row
        NaN. The loss is NaN too, or +inf where all labels are on other classes than the logit of +inf. Where
        the cotangent of the loss is 0, the gradient is 0 even then.

    Raises:
      TypeError: if `logits` are not floats or `where` is not boolean.
      ValueError: if the shapes do not broadcast or `axis` is out of range.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> logits = jnp.array([[1.2, -0.8, -0.5], [0.9, -1.2, 1.1]])
      >>> labels = jnp.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
      >>> with jnp.printoptions(precision=4):
      ...     print(masksafe.losses.softmax_cross_entropy(logits, labels))
      [0.2761 2.9518]

      A padded row, whatever it holds:

      >>> logits, labels = logits.at[1].set(jnp.nan), labels.at[1].set(jnp.nan)
      >>> with jnp.printoptions(precision=4):
      ...     print(masksafe.losses.softmax_cross_entropy(logits, labels, where=jnp.array([True, False])))
      [0.2761 0.    ]

    References:
      `optax.losses.softmax_cross_entropy
      <https://optax.readthedocs.io/en/latest/api/losses.html#optax.losses.softmax_cross_entropy>`_, which it
      replaces.
    """
    return _soft("softmax_cross_entropy", logits, labels, axis, where)


def safe_softmax_cross_entropy(logits: ArrayLike, labels: ArrayLike) -> Array:
    r"""Softmax cross-entropy for logits that may be -inf; the same as `softmax_cross_entropy`.

    optax has both since its `softmax_cross_entropy` is NaN where a logit is -inf and its label 0. Here neither
    is, and this name is there so that an import can be changed without thought.

    Args:
      logits: unnormalised log probabilities, floats `[..., num_classes]`.
      labels: a distribution over the classes for every row; it broadcasts with `logits`.

    Returns:
      The loss of every row, `[...]`. It is +inf where a label with a logit of -inf is not 0. The gradient with
      respect to a label of 0 whose logit is -inf is 0: the class is absent.

    Raises:
      TypeError: if `logits` are not floats.
      ValueError: if the shapes do not broadcast.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> logits = jnp.array([-jnp.inf, 0.0, 0.0])
      >>> print(masksafe.losses.safe_softmax_cross_entropy(logits, jnp.array([0.0, 0.5, 0.5])))
      0.6931472

    References:
      `optax.losses.safe_softmax_cross_entropy
      <https://optax.readthedocs.io/en/latest/api/losses.html#optax.losses.safe_softmax_cross_entropy>`_.
    """
    return _soft("safe_softmax_cross_entropy", logits, labels, -1, None)


def softmax_cross_entropy_with_integer_labels(
    logits: ArrayLike, labels: ArrayLike, axis: Axis = -1, where: ArrayLike | None = None
) -> Array:
    r"""Softmax cross-entropy between logits and integer labels.

    .. math::
      \ell = -\log p_y, \qquad p_j = \frac{e^{x_j}}{\sum_k e^{x_k}}

    with logits :math:`x`, label :math:`y` and the sum over the unmasked classes.

    Args:
      logits: unnormalised log probabilities, floats `[..., num_classes]`.
      labels: the class of every row, integers `[...]` of any width, in [0, num_classes). Axes of size 1
        broadcast against those of `logits` and the other way round.
      axis: the axis of the classes. With a tuple of axes, a label is the flat index into an array of those
        axes, in the order given.
      where: booleans, False is masked. Of the rank of `logits` they mask classes and broadcast to its shape;
        of a lower rank they mask rows and broadcast to the shape of the loss. For labels padded in the way of
        torch's `ignore_index` write `where=labels != -100`.

    Returns:
      The loss of every row, `[...]`, of the dtype of `logits`; it is computed in float32 at least.

      * A row that is masked, or that has no unmasked class, has loss 0; logits under the mask have a gradient
        of exactly 0, and what label such a row has does not matter.
      * An unmasked label outside [0, num_classes) never wraps: its row has loss NaN and gradient NaN.
      * A label whose class is masked or has a logit of -inf has probability 0: loss +inf.
      * A NaN or +inf in an unmasked logit makes the gradient of its own row NaN. The loss is NaN too, or +inf
        where another class than the label has the logit +inf.
      * Where the cotangent of the loss is 0, a row with a NaN gets a gradient of 0, so that
        `jnp.where(labels >= 0, loss, 0)` trains as well.

    Raises:
      TypeError: if `logits` are not floats, `labels` not integers or `where` not boolean.
      ValueError: if the shapes do not fit or `axis` is out of range.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> logits = jnp.array([[1.2, -0.8, -0.5], [0.9, -1.2, 1.1]])
      >>> loss = masksafe.losses.softmax_cross_entropy_with_integer_labels
      >>> with jnp.printoptions(precision=4):
      ...     print(loss(logits, jnp.array([0, 1])))
      [0.2761 2.9518]

      The second row is padding:

      >>> labels = jnp.array([0, -100])
      >>> with jnp.printoptions(precision=4):
      ...     print(loss(logits, labels, where=labels != -100))
      [0.2761 0.    ]

      The same label by mistake:

      >>> with jnp.printoptions(precision=4):
      ...     print(loss(logits, labels))
      [0.2761    nan]

    References:
      `optax.losses.softmax_cross_entropy_with_integer_labels
      <https://optax.readthedocs.io/en/latest/api/losses.html>`_, which it replaces.
    """
    op = "softmax_cross_entropy_with_integer_labels"
    logits, labels = as_float_array(op, "logits", logits), as_label_array(op, "labels", labels)
    if axis is None:
        raise TypeError(message(op, "axis", "type NoneType", "an int or a tuple of ints"))
    axes = canonical_axes(op, axis, logits.ndim)
    if labels.ndim != logits.ndim - len(axes):
        expected = f"rank {logits.ndim - len(axes)}, that of logits {logits.shape} without axis {axis}"
        raise ValueError(message(op, "labels", f"shape {labels.shape}", expected))
    rows = broadcast_shapes(op, logits=_without(axes, logits.shape), labels=labels.shape)
    logits = _broadcast(logits, _with(axes, rows, logits.shape))
    where = _canonical_where(op, where, axes, logits.shape)
    return _cross_entropy(axes, logits.dtype, logits, _broadcast(labels, rows), where)


def _soft(op: str, logits: ArrayLike, labels: ArrayLike, axis: Axis | None, where: ArrayLike | None) -> Array:
    logits, labels = as_float_array(op, "logits", logits), as_array(op, "labels", labels)
    shape = broadcast_shapes(op, logits=logits.shape, labels=labels.shape)
    dtype = jnp.result_type(logits, labels)
    if not jnp.issubdtype(labels.dtype, jnp.floating):
        labels = labels.astype(dtype)
    axes = canonical_axes(op, axis, len(shape))
    if any(n != logits.shape[a - len(shape)] for a, n in enumerate(shape) if a in axes):
        expected = f"as many classes as labels {labels.shape}, on axis {axis}"
        raise ValueError(message(op, "logits", f"shape {logits.shape}", expected))
    where = _canonical_where(op, where, axes, shape)
    return _cross_entropy(axes, dtype, _broadcast(logits, shape), _broadcast(labels, shape), where)


def _canonical_where(op: str, where: ArrayLike | None, axes: Axes, shape: tuple[int, ...]) -> Array | None:
    """The mask at the logits' rank. Of that rank it masks classes, of a lower one whole rows (optax's rule)."""
    if where is None:
        return None
    where = as_mask(op, "where", where)
    if where.ndim == len(shape):
        check_broadcasts_to(op, "where", where.shape, shape, "logits")
        return where
    rows = _without(axes, shape)
    check_broadcasts_to(op, "where", where.shape, rows, "a mask of rows; a mask of classes has the rank of logits")
    return jnp.expand_dims(where.reshape((1,) * (len(rows) - where.ndim) + where.shape), axes)


def _without(axes: Axes, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n for i, n in enumerate(shape) if i not in axes)


def _with(axes: Axes, rows: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    remaining = iter(rows)
    return tuple(n if i in axes else next(remaining) for i, n in enumerate(shape))


def _broadcast(x: Array, shape: tuple[int, ...]) -> Array:
    return x if x.shape == shape else jnp.broadcast_to(x, shape)


# The core. It takes the arguments as the user laid them out, so that nothing is copied to be kept for the
# reverse pass, and it is jitted, so that its NaN under the mask never shows, not even under jax_debug_nans.

_Residuals = tuple[Array, Array, Array | None, _Rows]


def _forward(axes: Axes, dtype: Any, logits: Array, labels: Array, where: Array | None) -> tuple[Array, _Residuals]:
    # With nothing to widen or to select, XLA leaves the exponentials in the gradient's own buffer, where the
    # reverse pass finds them. Without a reverse pass the buffer would be a new one: then blocks are better.
    in_one_pass = where is None and not _is_soft(labels) and logits.dtype.itemsize >= 4
    rows = _evaluate(axes, not in_one_pass, logits, labels, where)
    return _finish(dtype, rows), (logits, labels, where, rows)


def _reverse(axes: Axes, dtype: Any, residuals: _Residuals, d_loss: Array) -> tuple[Array, Array | None, None]:
    return *_pull_back(axes, *residuals, d_loss), None


@differentiable(_forward, _reverse, static_argnums=(0, 1))
def _cross_entropy(axes: Axes, dtype: Any, logits: Array, labels: Array, where: Array | None) -> Array:
    return _finish(dtype, _evaluate(axes, True, logits, labels, where))


def _finish(dtype: Any, rows: _Rows) -> Array:
    return rows.loss.squeeze(-1).astype(dtype)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _evaluate(axes: Axes, in_blocks: bool, logits: Array, labels: Array, where: Array | None) -> _Rows:
    return _rows(in_blocks, *_as_rows(axes, logits, labels, where))


@functools.partial(jax.jit, static_argnums=0)
def _pull_back(
    axes: Axes, logits: Array, labels: Array, where: Array | None, rows: _Rows, d_loss: Array
) -> tuple[Array, Array | None]:
    x, t, live = _as_rows(axes, logits, labels, where)
    d_loss = d_loss.astype(rows.loss.dtype)[..., None]
    # The cotangent is 0 where the user has selected the loss away: then a NaN in the row is gone as well.
    used = _is_sound(rows) | (d_loss != 0)
    d_logits = jnp.where(used, _probs_minus_targets(x, t, live, rows) * d_loss, 0)
    if not _is_soft(labels):
        return _from_rows(axes, logits, d_logits), None
    d_labels = jnp.where(used, _costs(x, t, live, rows) * d_loss, 0)
    return _from_rows(axes, logits, d_logits), _from_rows(axes, labels, d_labels)


# The user's layout and the core's: the classes are one axis, the last one.


def _as_rows(axes: Axes, logits: Array, labels: Array, where: Array | None) -> tuple[Array, Array, Array | None]:
    """Logits `[..., classes]`, labels `[..., classes]` or `[..., 1]`, where `[... or 1, classes or 1]`."""
    labels = _classes_last(axes, labels) if _is_soft(labels) else labels[..., None]
    if where is not None:
        if any(where.shape[a] > 1 for a in axes):
            where = jnp.broadcast_to(where, _with(axes, _without(axes, where.shape), logits.shape))
        where = _classes_last(axes, where)
    return _classes_last(axes, logits), labels, where


def _classes_last(axes: Axes, x: Array) -> Array:
    moved = jnp.moveaxis(x, axes, range(-len(axes), 0))
    return moved if len(axes) == 1 else moved.reshape(*moved.shape[: x.ndim - len(axes)], -1)


def _from_rows(axes: Axes, like: Array, x: Array) -> Array:
    classes = tuple(like.shape[a] for a in axes)
    return jnp.moveaxis(x.reshape(*x.shape[:-1], *classes), range(-len(axes), 0), axes).astype(like.dtype)


def _is_soft(labels: Array) -> bool:
    return bool(jnp.issubdtype(labels.dtype, jnp.floating))


# The mathematics, row by row. Masked logits are -inf and masked targets 0 before anything is computed.


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _rows(in_blocks: bool, x: Array, labels: Array, where: Array | None) -> _Rows:
    """The forward pass, differentiable to any order: the reverse rule, which uses its results, is too."""
    return map_row_blocks(_row_values, x, labels, where) if in_blocks else _row_values(x, labels, where)


@_rows.defjvp
def _rows_jvp(in_blocks: bool, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[_Rows, _Rows]:
    x, labels, where = primals
    x_dot, labels_dot, _ = tangents
    rows = _rows(in_blocks, x, labels, where)
    x_dot = _selected(x_dot, where, 0)
    d_loss = _sum(_probs_minus_targets(x, labels, where, rows) * x_dot)
    d_log_sum = _sum(jnp.exp(_selected(x, where, -jnp.inf) - rows.shift - rows.log_sum) * x_dot)
    d_anchor_log_prob = _pick(x_dot, rows.anchor) - d_log_sum
    d_total = jnp.zeros_like(rows.total)
    if _is_soft(labels):
        labels_dot = _selected(labels_dot, where, 0)
        d_loss += _sum(_costs(x, labels, where, rows) * labels_dot)
        d_total += _sum(labels_dot)
    no_tangent = np.zeros(rows.anchor.shape, jax.dtypes.float0)
    no_shift = jnp.zeros_like(rows.shift)
    return rows, _Rows(d_loss, no_shift, d_log_sum, d_total, no_tangent, d_anchor_log_prob)  # type: ignore[arg-type]


def _row_values(x: Array, labels: Array, where: Array | None) -> _Rows:
    dtype = _accumulation_dtype(x, labels)
    if x.shape[-1] == 0:
        zero = jnp.zeros((*x.shape[:-1], 1), dtype)
        return _Rows(zero, zero, zero, zero, jnp.full(zero.shape, -1, jnp.int32), zero)
    x = _selected(x, where, -jnp.inf)
    largest = jnp.max(x, -1, keepdims=True)
    anchor = _first(x == largest) if _is_soft(labels) else _class_of(labels, x.shape[-1])
    shift = jnp.where(jnp.isfinite(largest), largest, 0).astype(dtype)
    anchor_z = _pick(x, anchor).astype(dtype) - shift
    log_sum = jnp.log1p(_sum(_others(x, shift, anchor)) + jnp.expm1(anchor_z))

    log_prob = anchor_z - log_sum
    rows = _Rows(-log_prob, shift, log_sum, jnp.ones_like(shift), anchor, log_prob)
    if _is_soft(labels):
        t = _selected(labels.astype(dtype), where, 0)
        costs = jnp.where(t == 0, 0, t * _costs(x, t, where, rows))
        rows = rows._replace(loss=_sum(costs), total=_sum(t))
    if where is None:
        return rows
    alive = jnp.any(where, -1, keepdims=True)
    loss, log_sum, log_prob = (jnp.where(alive, a, 0) for a in (rows.loss, log_sum, log_prob))
    return rows._replace(loss=loss, log_sum=log_sum, anchor_log_prob=log_prob)


def _probs_minus_targets(x: Array, labels: Array, where: Array | None, rows: _Rows) -> Array:
    """The derivative of the loss with respect to the logits; NaN in a row that is not sound."""
    x = _selected(x, where, -jnp.inf)
    scale = jnp.where(_is_sound(rows), rows.total * jnp.exp(-rows.log_sum), jnp.nan)
    errors = _others(x, rows.shift, rows.anchor) * scale
    anchor_target: Array | float = 1.0
    if _is_soft(labels):
        t = _selected(labels.astype(rows.loss.dtype), where, 0)
        errors, anchor_target = errors - t, _pick(t, rows.anchor)
    anchor_error = rows.total * jnp.expm1(rows.anchor_log_prob) + (rows.total - anchor_target)
    anchor_error = jnp.where(_is_sound(rows), anchor_error, jnp.nan)
    return _selected(jnp.where(_class_index(x) == rows.anchor, anchor_error, errors), where, 0)


def _costs(x: Array, t: Array, where: Array | None, rows: _Rows) -> Array:
    """The derivative of the loss with respect to the targets: -log p, and 0 for an absent class.

    A class is absent where its logit is -inf and its target 0, by the convention 0 log 0 = 0.
    """
    x = _selected(x.astype(rows.loss.dtype), where, -jnp.inf)
    t = _selected(t, where, 0)
    absent = (t == 0) & (x == -jnp.inf)
    return jnp.where(absent, 0, rows.log_sum - (jnp.where(absent, 0, x) - rows.shift))


def _is_sound(rows: _Rows) -> Array:
    """False for a row with a NaN or +inf in it, with nothing but -inf, or with a label out of range."""
    return jnp.isfinite(rows.log_sum) & ~jnp.isnan(rows.loss)


def _others(x: Array, shift: Array, anchor: Array) -> Array:
    """exp(x - shift) of every class but the anchor."""
    return jnp.where(_class_index(x) == anchor, 0, jnp.exp(x.astype(shift.dtype) - shift))


def _first(found: Array) -> Array:
    """The first class where `found` is True, -1 if there is none. On a CPU it is far faster than argmax."""
    num_classes = found.shape[-1]
    first = jnp.min(jnp.where(found, _class_index(found), num_classes), -1, keepdims=True)
    return jnp.where(first == num_classes, -1, first)


def _class_of(labels: Array, num_classes: int) -> Array:
    """Labels as int32, with -1 for those outside [0, num_classes)."""
    # The bound is compared in the labels' own dtype, in which num_classes itself may not exist.
    largest = min(num_classes - 1, int(jnp.iinfo(labels.dtype).max))
    valid = (labels >= 0) & (labels <= largest)
    return jnp.where(valid, labels, 0).astype(jnp.int32) - ~valid


def _pick(x: Array, index: Array) -> Array:
    """x[..., index], NaN where the index is -1."""
    if is_sharded(x):  # indexing along a sharded axis is refused
        picked = _sum(jnp.where(_class_index(x) == index, x, 0))
    else:
        picked = jnp.take_along_axis(x, jnp.maximum(index, 0), -1, mode="promise_in_bounds")
    return jnp.where(index < 0, jnp.nan, picked)


def _class_index(x: Array) -> Array:
    return lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)


def _selected(x: Array, where: Array | None, masked: float) -> Array:
    return x if where is None else jnp.where(where, x, jnp.asarray(masked, x.dtype))


def _sum(x: Array) -> Array:
    return jnp.sum(x, -1, keepdims=True)


def _accumulation_dtype(x: Array, labels: Array) -> Any:
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.promote_types(dtype, labels.dtype) if _is_soft(labels) else dtype
