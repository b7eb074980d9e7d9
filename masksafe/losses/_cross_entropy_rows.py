r"""The mathematics of the softmax cross-entropies, row by row: the classes are the last axis.

The targets of a row are a distribution, or a label in place of a one-hot row. With logits :math:`x`,
targets :math:`t` and the sums over the unmasked classes,

.. math::
  \ell = \sum_j t_j (L - x_j), \qquad
  L = \log \sum_j e^{x_j}, \qquad
  p_j = e^{x_j - L}, \qquad
  \frac{\partial \ell}{\partial x_j} = T p_j - t_j, \qquad
  \frac{\partial \ell}{\partial t_j} = L - x_j, \qquad T = \sum_j t_j.

PolyLoss adds :math:`\epsilon M`, where :math:`M` is the part of the targets that the probabilities miss,

.. math::
  M = \sum_j t_j (1 - p_j), \qquad
  \frac{\partial M}{\partial x_j} = p_j \bigl((T - t_j) - M\bigr), \qquad
  \frac{\partial M}{\partial t_j} = 1 - p_j.

Two measures preserve all digits.

* :math:`L` is stored in two parts, the largest logit (`shift`) and :math:`\log \sum_j e^{x_j - \text{shift}}`
  (`log_sum`). An offset common to all logits cancels before anything is rounded.
* Classes of which one may have nearly all of the probability are left out of the sum, so that it does not lose its
  digits by being added to 1. With :math:`z = x - \text{shift}` and a label :math:`a`, `log_sum` is
  :math:`\log(1 + (O + (e^{z_a} - 1)))`, where :math:`O` is the sum of the others. With targets it is
  :math:`\log(1 + (O + (n - 1)))`, where the :math:`n` largest logits, whose :math:`e^z` is 1, are counted: to look for
  the number of one of them would take a further pass over the logits. For the same reason :math:`p - 1` is computed
  as :math:`\operatorname{expm1}(\log p)`, not as a difference.
"""

import functools
import math
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero, zero_from_primal

from masksafe._core import precision, row_blocks, sharding, unfolded
from masksafe._core.labels import class_index, is_class, is_soft, nan_unless
from masksafe._core.masks import both, lowest_under_mask, selected
from masksafe._core.row_sums import exps_of_others, log_sum_exp, product_or_zero, sum_of_row
from masksafe._core.typing import Array


class Plan(NamedTuple):
    """How the rows are computed."""

    in_blocks: bool  # in blocks of rows rather than all at once
    loss_alone: bool = False  # the other results are None
    axis_name: str | None = None  # the mesh axis over which the classes are split, for labels only
    keeps_exps: bool = False  # for labels only, all rows at once, under no mask but one of rows


class Rows(NamedTuple):
    """The results of the forward pass for each row; every array is `[..., 1]`."""

    loss: Array
    shift: Any = None  # the largest unmasked logit
    log_sum: Any = None  # the log of the sum of exp(logits - shift); 0 in a row with nothing left
    total: Any = None  # the sum of the targets; NaN for a label out of range
    label: Array | None = None  # as a class of this device, or outside [0, num_classes); None for targets
    missed: Array | None = None  # the sum of targets times 1 - p; None unless it is a term of the loss
    exps: Array | None = None  # exp(logits - shift), but 0 at the label, `[..., num_classes]`; or None


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def evaluate_rows(plan: Plan, x: Array, labels: Array, where: Array | None, epsilon: Array | None = None) -> Rows:
    """The forward pass, differentiable to any order, and with it the reverse rule, which uses its results."""

    def row_values(by_arithmetic: bool, *arrays: Any) -> Rows:
        rows = _row_values(plan, by_arithmetic, *arrays)
        return Rows(rows.loss) if plan.loss_alone else rows

    by_selection, by_arithmetic = (functools.partial(row_values, form) for form in (False, True))
    if not plan.in_blocks:
        return by_selection(x, labels, where, epsilon)
    # Several results are sums of the same terms: in one pass XLA's CPU compiler would write the terms to memory.
    in_one_pass = where is None and (plan.loss_alone or not is_soft(labels))
    arithmetic = by_arithmetic if in_one_pass else None
    return row_blocks.map_row_blocks(by_selection, x, labels, where, epsilon, arithmetic=arithmetic)


@functools.partial(evaluate_rows.defjvp, symbolic_zeros=True)
def _evaluate_rows_jvp(plan: Plan, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Rows, Rows]:
    x, labels, where, epsilon = primals
    x_dot, labels_dot, _, epsilon_dot = tangents
    rows = evaluate_rows(plan._replace(loss_alone=False), x, labels, where, epsilon)
    x_dot = _instantiate(x_dot, x)
    x_dot = selected(x_dot.astype(rows.loss.dtype), where, 0)
    total = sharding.Devices(plan.axis_name).sum
    d_loss = total(sum_of_row(probs_minus_targets(x, labels, where, rows) * x_dot))
    d_log_sum = total(sum_of_row(jnp.exp(selected(x, where, -jnp.inf) - rows.shift - rows.log_sum) * x_dot))
    d_total, d_missed = jnp.zeros_like(rows.total), None
    # Without a tangent of the labels their costs are not used: they may be infinite, and inf * 0 is NaN.
    if is_soft(labels) and not isinstance(labels_dot, SymbolicZero):
        labels_dot = selected(labels_dot.astype(rows.loss.dtype), where, 0)
        d_loss += sum_of_row(target_costs(x, labels, where, rows) * labels_dot)
        d_total += sum_of_row(labels_dot)
    else:
        labels_dot = None
    if epsilon is not None:
        of_logits, of_targets = missed_slopes(x, labels, where, rows)
        d_missed = sum_of_row(of_logits * x_dot)
        d_missed += 0 if labels_dot is None else sum_of_row(of_targets * labels_dot)
        d_loss += epsilon * d_missed + _instantiate(epsilon_dot, epsilon) * cast(Array, rows.missed)
    if plan.loss_alone:
        return Rows(rows.loss), Rows(d_loss)
    no_shift, no_label = (
        None if a is None else zero_from_primal(a, symbolic_zeros=False) for a in (rows.shift, rows.label)
    )
    d_exps = None if rows.exps is None else rows.exps * x_dot
    return rows, Rows(d_loss, no_shift, d_log_sum, d_total, no_label, d_missed, d_exps)


def _instantiate(tangent: Any, primal: Array) -> Array:
    is_zero = isinstance(tangent, SymbolicZero)
    return cast(Array, zero_from_primal(primal, symbolic_zeros=False) if is_zero else tangent)


def _row_values(
    plan: Plan, by_arithmetic: bool, x: Array, labels: Array, where: Array | None, epsilon: Array | None
) -> Rows:
    dtype = _accumulation_dtype(x, labels)
    if x.shape[-1] == 0:
        zero = jnp.zeros((*x.shape[:-1], 1), dtype)
        label = None if is_soft(labels) else jnp.full(zero.shape, -1, jnp.int32)
        return Rows(zero, zero, zero, zero, label, None if epsilon is None else zero, x if plan.keeps_exps else None)
    if is_soft(labels):
        return _rows_of_targets(dtype, by_arithmetic, x, labels, where, epsilon)
    return _rows_of_labels(plan, x, labels, where)


def _rows_of_labels(plan: Plan, x: Array, labels: Array, where: Array | None) -> Rows:
    axis_name = plan.axis_name
    dtype, label = precision.wide_dtype(x.dtype), label_here(axis_name, labels, x.shape[-1])
    live_rows = None if where is None else sharding.Devices(axis_name).any(unfolded.any_of(where, -1))
    label_x = value_at_label(axis_name, x, where, label).astype(dtype)
    valid = is_class(labels, x.shape[-1] * sharding.Devices(axis_name).size)

    if plan.keeps_exps:
        # Whole rows are masked: the maximum is selected, not what it is taken of.
        shift = selected(below_infinity(jnp.max(x, -1, keepdims=True)), where)
        exps = _with_label(jnp.exp(selected(x, where, -jnp.inf) - shift), label, 0.0)
    else:
        x = lowest_under_mask(x, where)
        shift = below_infinity(sharding.Devices(axis_name).max(jnp.max(x, -1, keepdims=True)).astype(dtype))
        exps = selected(exps_of_others(x.astype(dtype) - shift, label), where)
    # Without the axis of the classes: XLA's CPU compiler takes twice as long for many short rows that keep it.
    others, label_z = sharding.Devices(axis_name).sum(jnp.sum(exps, -1)), (label_x - shift).squeeze(-1)
    log_sum = jnp.log1p(others + jnp.expm1(label_z))
    # In a row with nothing left the label does not matter: it is given all of the probability.
    label_z, log_sum, shift = (selected(a, live_rows) for a in (label_z, log_sum, shift.squeeze(-1)))
    total = selected(nan_unless(valid.squeeze(-1), dtype), live_rows, 1)
    loss, shift, log_sum, total = (a[..., None] for a in (total * (log_sum - label_z), shift, log_sum, total))
    return Rows(loss, shift, log_sum, total, label, None, exps if plan.keeps_exps else None)


def _rows_of_targets(
    dtype: Any, by_arithmetic: bool, x: Array, targets: Array, where: Array | None, epsilon: Array | None
) -> Rows:
    x = lowest_under_mask(x, where)
    shift = below_infinity(jnp.max(x, -1, keepdims=True, initial=jnp.finfo(x.dtype).min).astype(dtype))
    z = x.astype(dtype) - shift
    t = selected(targets.astype(dtype), where)
    log_sum, total = log_sum_exp(z, where, by_arithmetic=by_arithmetic), unfolded.sum_of(t, -1, keepdims=True)
    # It is -inf in a row of only -inf, which has no probabilities; labels of 0 need none.
    log_sum = jnp.where(total == 0, jnp.maximum(log_sum, 0), log_sum)
    products = product_or_zero(t, z, by_arithmetic=by_arithmetic)
    loss = total * log_sum - sum_of_row(products)
    if epsilon is None:
        return Rows(loss, shift, log_sum, total)
    missed = -sum_of_row(t * jnp.expm1(z - log_sum))
    return Rows(loss + epsilon * missed, shift, log_sum, total, None, missed)


def below_infinity(largest: Array) -> Array:
    """The shift, by which a logit of +inf becomes +inf again, not NaN."""
    return jnp.minimum(largest, jnp.finfo(largest.dtype).max)


def probs_minus_targets(x: Array, labels: Array, where: Array | None, rows: Rows) -> Array:
    """The derivative of the loss with respect to the unmasked logits; NaN in a row for which `is_sound` is False."""
    sound = is_sound(rows)
    scale = jnp.where(sound, rows.total * jnp.exp(-rows.log_sum), jnp.nan)
    if rows.label is not None:
        label_error = jnp.where(sound, jnp.expm1(-rows.loss), jnp.nan)
        exps = jnp.exp(selected(x, where, -jnp.inf).astype(rows.shift.dtype) - rows.shift)
        return jnp.where(class_index(x.shape) == rows.label, label_error, exps * scale)
    t = selected(labels.astype(rows.loss.dtype), where, 0)
    # Of a largest logit, whose exponential is 1, the error is total (p - 1) + (total - t). Factors of `exps` make the
    # derivatives right as well.
    scale_of_largest = jnp.where(sound, rows.total * jnp.expm1(-rows.log_sum), jnp.nan)
    z, exps = _relative_exps(x, where, rows.shift)
    is_largest = z == 0
    return exps * jnp.where(is_largest, scale_of_largest, scale) + (jnp.where(is_largest, exps * rows.total, 0) - t)


def gradient_of_exps(rows: Rows, where: Array | None, d_loss: Array) -> Array:
    """The cotangents of the logits from the exponentials that were kept, in place of `probs_minus_targets`."""
    assert rows.exps is not None
    assert rows.label is not None
    sound = is_sound(rows)
    live = takes_part(sound, d_loss, where)
    of_exps, of_label = (jnp.where(sound, x, jnp.nan) * d_loss for x in (jnp.exp(-rows.log_sum), jnp.expm1(-rows.loss)))
    return _with_label(selected(rows.exps * of_exps, live), rows.label, selected(of_label, live))


def target_costs(x: Array, t: Array, where: Array | None, rows: Rows) -> Array:
    """The derivative of the loss with respect to the targets: -log p, and 0 for an absent class.

    A class is absent where its logit is -inf and its target 0, by the convention 0 log 0 = 0.
    """
    x = selected(x.astype(rows.loss.dtype), where, -jnp.inf)
    t = selected(t, where, 0)
    absent = (t == 0) & (x == -jnp.inf)
    return jnp.where(absent, 0, rows.log_sum - (jnp.where(absent, 0, x) - rows.shift))


def missed_slopes(x: Array, t: Array, where: Array | None, rows: Rows) -> tuple[Array, Array]:
    """The derivatives of M with respect to the unmasked logits and targets."""
    z, exps = _relative_exps(x, where, rows.shift)
    t = selected(t.astype(rows.loss.dtype), where)
    return exps * jnp.exp(-rows.log_sum) * ((rows.total - t) - rows.missed), -jnp.expm1(z - rows.log_sum)


def is_sound(rows: Rows) -> Array:
    """False for a row that contains a NaN or +inf, has labels but only logits of -inf, or a label out of range."""
    # Comparisons, since XLA's compiler for GPUs cannot fuse `isfinite` with a reduction.
    return (jnp.abs(rows.log_sum) < jnp.inf) & (jnp.abs(rows.total) < jnp.inf)


def takes_part(sound: Array, d: Array, where: Array | None) -> Array:
    """Where cotangents of rows give a gradient: neither under the mask, nor in an unsound row whose cotangent is 0.

    A cotangent of 0 means that the user has replaced the result: then a NaN in the row has no effect either.
    """
    return cast(Array, both(sound | (d != 0), where))


def _relative_exps(x: Array, where: Array | None, shift: Array) -> tuple[Array, Array]:
    """The logits minus the shift, and their exponentials, which are 0 under the mask."""
    z = lowest_under_mask(x, where).astype(shift.dtype) - shift
    return z, selected(jnp.exp(z), where, 0)


def label_here(axis_name: str | None, labels: Array, number: int) -> Array:
    """Labels as int32 classes of this device: -1 if outside [0, num_classes), `number` if on another device."""
    valid = is_class(labels, number * sharding.Devices(axis_name).size)
    local = sharding.Devices(axis_name).local(jnp.where(valid, labels, 0).astype(jnp.int32), number)
    is_here = (local >= 0) & (local < number)
    return jnp.where(valid, jnp.where(is_here, local, number), -1)


def value_at_label(axis_name: str | None, x: Array, where: Array | None, label: Array) -> Array:
    """x[..., label], -inf at a masked class, from the device that holds the label; any number for an invalid label."""
    index = _index_of(label, x.shape[-1])
    # The mask is looked up as well, not applied before: a look-up in a masked copy would need the whole of it.
    live = where if where is None or where.shape[-1] == 1 else _pick(where, index)
    value = selected(_pick(x, index), live, -jnp.inf)
    if axis_name is None:
        return value
    return sharding.Devices(axis_name).sum(jnp.where(label < x.shape[-1], value, 0))


def _index_of(label: Array, number: int) -> Array:
    """A class of this device for every label, any for one that is none."""
    return jnp.clip(label, 0, number - 1)


def _with_label(x: Array, label: Array, value: Array | float) -> Array:
    """`x` with other elements at the labels, written in place if XLA can; at any class for one that is none."""
    number = math.prod(x.shape[:-1])
    rows, index = x.reshape(number, x.shape[-1]), _index_of(label, x.shape[-1])
    places = jnp.arange(number), index.reshape(number)
    values = value.reshape(number) if isinstance(value, jax.Array) else value
    how: Any = {"mode": "promise_in_bounds", "wrap_negative_indices": False}
    changed = rows.at[places].set(values, indices_are_sorted=True, unique_indices=True, **how)
    return changed.reshape(x.shape)


def _pick(x: Array, index: Array) -> Array:
    """x[..., index]."""
    if sharding.is_sharded(x) or sharding.is_sharded(index):  # JAX refuses to index along a sharded axis
        shape = jnp.broadcast_shapes(x.shape, (*index.shape[:-1], 1))
        picked = jnp.where(class_index(shape) == index, x, jnp.zeros((), x.dtype))
        return jnp.any(picked, -1, keepdims=True) if x.dtype == bool else sum_of_row(picked)
    return jnp.take_along_axis(x, index, -1, mode="promise_in_bounds")


def _accumulation_dtype(x: Array, labels: Array) -> Any:
    return precision.wide_dtype(jnp.promote_types(x.dtype, labels.dtype) if is_soft(labels) else x.dtype)
