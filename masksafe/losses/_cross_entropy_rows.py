r"""The mathematics of the softmax cross-entropies, row by row: the classes are the last axis.

The targets of a row are a distribution, or a label in place of a one-hot row. With logits :math:`x`,
targets :math:`t` and the sums over the unmasked classes,

.. math::
  \ell = \sum_j t_j (L - x_j), \qquad
  L = \log \sum_j e^{x_j}, \qquad
  p_j = e^{x_j - L}, \qquad
  \frac{\partial \ell}{\partial x_j} = T p_j - t_j, \qquad
  \frac{\partial \ell}{\partial t_j} = L - x_j, \qquad T = \sum_j t_j.

Two measures preserve all digits.

* :math:`L` is stored in two parts, the largest logit (`shift`) and :math:`\log \sum_j e^{x_j - \text{shift}}`
  (`log_sum`). An offset common to all logits cancels before anything is rounded.
* One class of each row, the anchor :math:`a`, is left out of the sum: the label, or the most likely class. With
  :math:`z = x - \text{shift}` and the others :math:`O = \sum_{j \ne a} e^{z_j}`, `log_sum` is
  :math:`\log(1 + (O + (e^{z_a} - 1)))`. This is tiny and exact where the anchor has nearly all of the probability,
  whereas adding :math:`O` to 1 would lose its digits. For the same reason :math:`p_a - 1` is computed as
  :math:`\operatorname{expm1}(\log p_a)`, not as a difference.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero, zero_from_primal

from masksafe._core import sharding
from masksafe._core.labels import class_index, is_class, is_soft, nan_unless
from masksafe._core.masks import selected
from masksafe._core.precision import wide_dtype
from masksafe._core.row_blocks import map_row_blocks
from masksafe._core.sharding import is_sharded
from masksafe._core.typing import Array


class Plan(NamedTuple):
    """How the rows are computed."""

    in_blocks: bool  # in blocks of rows rather than all at once
    axis_name: str | None = None  # the mesh axis over which the classes are split, for labels only


class Rows(NamedTuple):
    """The results of the forward pass for each row; every array is `[..., 1]`."""

    loss: Array
    shift: Array  # the largest unmasked logit
    log_sum: Array  # the log of the sum of exp(logits - shift)
    total: Array  # the sum of the targets
    anchor: Array  # the class left out of the sum; -1 for none
    anchor_log_prob: Array


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def evaluate_rows(plan: Plan, x: Array, labels: Array, where: Array | None) -> Rows:
    """The forward pass, differentiable to any order, and with it the reverse rule, which uses its results."""
    row_values = functools.partial(_row_values, plan.axis_name)
    return map_row_blocks(row_values, x, labels, where) if plan.in_blocks else row_values(x, labels, where)


@functools.partial(evaluate_rows.defjvp, symbolic_zeros=True)
def _evaluate_rows_jvp(plan: Plan, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Rows, Rows]:
    x, labels, where = primals
    x_dot, labels_dot, _ = tangents
    rows = evaluate_rows(plan, x, labels, where)
    x_dot = _instantiate(x_dot, x)
    x_dot = selected(x_dot.astype(rows.loss.dtype), where, 0)
    total = functools.partial(sharding.sum_over_devices, plan.axis_name)
    d_loss = total(_sum(probs_minus_targets(x, labels, where, rows) * x_dot))
    d_log_sum = total(_sum(jnp.exp(selected(x, where, -jnp.inf) - rows.shift - rows.log_sum) * x_dot))
    d_anchor_log_prob = _value_at_anchor(plan.axis_name, x_dot, rows.anchor) - d_log_sum
    d_total = jnp.zeros_like(rows.total)
    # Without a tangent of the labels their costs are not used: they may be infinite, and inf * 0 is NaN.
    if is_soft(labels) and not isinstance(labels_dot, SymbolicZero):
        labels_dot = selected(labels_dot.astype(rows.loss.dtype), where, 0)
        d_loss += _sum(target_costs(x, labels, where, rows) * labels_dot)
        d_total += _sum(labels_dot)
    no_shift, no_anchor = (zero_from_primal(a, symbolic_zeros=False) for a in (rows.shift, rows.anchor))
    return rows, Rows(d_loss, no_shift, d_log_sum, d_total, no_anchor, d_anchor_log_prob)


def _instantiate(tangent: Any, primal: Array) -> Array:
    if isinstance(tangent, SymbolicZero):
        tangent = zero_from_primal(primal, symbolic_zeros=False)
    dense: Array = tangent
    return dense


def _row_values(axis_name: str | None, x: Array, labels: Array, where: Array | None) -> Rows:
    dtype = _accumulation_dtype(x, labels)
    if x.shape[-1] == 0:
        zero = jnp.zeros((*x.shape[:-1], 1), dtype)
        return Rows(zero, zero, zero, zero, jnp.full(zero.shape, -1, jnp.int32), zero)
    x = selected(x, where, -jnp.inf)
    largest = sharding.max_over_devices(axis_name, jnp.max(x, -1, keepdims=True))
    anchor = _first_class(x == largest) if is_soft(labels) else _anchor_of_labels(axis_name, labels, x.shape[-1])
    # In a row with nothing left, give the anchor all of the probability, so all results are 0.
    live_rows = None if where is None else sharding.any_over_devices(axis_name, jnp.any(where, -1, keepdims=True))
    anchor = selected(anchor, live_rows, 0)
    shift = jnp.where(jnp.isfinite(largest), largest, 0).astype(dtype)
    anchor_z = selected(_value_at_anchor(axis_name, x, anchor).astype(dtype) - shift, live_rows, 0)
    others = sharding.sum_over_devices(axis_name, _sum(_exp_of_others(x, shift, anchor)))
    log_sum = jnp.log1p(others + jnp.expm1(anchor_z))

    rows = Rows(log_sum - anchor_z, shift, log_sum, jnp.ones_like(shift), anchor, anchor_z - log_sum)
    if not is_soft(labels):
        return rows
    t = selected(labels.astype(dtype), where, 0)
    costs = jnp.where(t == 0, 0, t * target_costs(x, t, where, rows))
    # Targets that are all 0 must not hide a NaN or infinite logit.
    loss = _sum(costs)
    loss = jnp.where(jnp.isfinite(log_sum) | (loss == jnp.inf), loss, jnp.nan)
    return rows._replace(loss=loss, total=_sum(t))


def probs_minus_targets(x: Array, labels: Array, where: Array | None, rows: Rows) -> Array:
    """The derivative of the loss with respect to the unmasked logits; NaN in a row for which `is_sound` is False."""
    x = selected(x, where, -jnp.inf)
    scale = jnp.where(is_sound(rows), rows.total * jnp.exp(-rows.log_sum), jnp.nan)
    errors = _exp_of_others(x, rows.shift, rows.anchor) * scale
    anchor_target: Array | float = 1.0
    if is_soft(labels):
        t = selected(labels.astype(rows.loss.dtype), where, 0)
        errors, anchor_target = errors - t, _pick(t, rows.anchor)
    anchor_error = rows.total * jnp.expm1(rows.anchor_log_prob) + (rows.total - anchor_target)
    anchor_error = jnp.where(is_sound(rows), anchor_error, jnp.nan)
    return jnp.where(class_index(x.shape) == rows.anchor, anchor_error, errors)


def target_costs(x: Array, t: Array, where: Array | None, rows: Rows) -> Array:
    """The derivative of the loss with respect to the targets: -log p, and 0 for an absent class.

    A class is absent where its logit is -inf and its target 0, by the convention 0 log 0 = 0.
    """
    x = selected(x.astype(rows.loss.dtype), where, -jnp.inf)
    t = selected(t, where, 0)
    absent = (t == 0) & (x == -jnp.inf)
    return jnp.where(absent, 0, rows.log_sum - (jnp.where(absent, 0, x) - rows.shift))


def is_sound(rows: Rows) -> Array:
    """False for a row that contains a NaN or +inf, contains only -inf, or has a label out of range."""
    return jnp.isfinite(rows.log_sum) & ~jnp.isnan(rows.loss)


def _exp_of_others(x: Array, shift: Array, anchor: Array) -> Array:
    """exp(x - shift) of every class but the anchor."""
    return jnp.where(class_index(x.shape) == anchor, 0, jnp.exp(x.astype(shift.dtype) - shift))


def _first_class(found: Array) -> Array:
    """The first class where `found` is True, -1 if there is none; on a CPU far faster than argmax."""
    num_classes = found.shape[-1]
    first = jnp.min(jnp.where(found, class_index(found.shape), num_classes), -1, keepdims=True)
    return jnp.where(first == num_classes, -1, first)


def _anchor_of_labels(axis_name: str | None, labels: Array, number: int) -> Array:
    """Labels as int32 classes of this device: -1 if outside [0, num_classes), `number` if on another device."""
    valid = is_class(labels, sharding.size_over_devices(axis_name, number))
    local = sharding.local_class(axis_name, jnp.where(valid, labels, 0).astype(jnp.int32), number)
    is_here = (local >= 0) & (local < number)
    return jnp.where(valid, jnp.where(is_here, local, number), -1)


def _value_at_anchor(axis_name: str | None, x: Array, anchor: Array) -> Array:
    """x[..., anchor], from the device that holds the anchor."""
    if axis_name is None:
        return _pick(x, anchor)
    last = x.shape[-1] - 1
    return sharding.sum_over_devices(axis_name, jnp.where(anchor <= last, _pick(x, jnp.minimum(anchor, last)), 0))


def _pick(x: Array, index: Array) -> Array:
    """x[..., index], NaN where the index is -1."""
    if is_sharded(x):  # JAX refuses to index along a sharded axis
        picked = _sum(jnp.where(class_index(x.shape) == index, x, 0))
    else:
        picked = jnp.take_along_axis(x, jnp.maximum(index, 0), -1, mode="promise_in_bounds")
    # A product, since selecting a constant NaN would make it a residual and trigger jax_debug_nans.
    return picked * nan_unless(index >= 0, x.dtype)


def _sum(x: Array) -> Array:
    return jnp.sum(x, -1, keepdims=True)


def _accumulation_dtype(x: Array, labels: Array) -> Any:
    return wide_dtype(jnp.promote_types(x.dtype, labels.dtype) if is_soft(labels) else x.dtype)
