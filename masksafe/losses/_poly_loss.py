"""PolyLoss: the softmax cross-entropy with a different weight on the first term of its series."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core.arguments import as_float_array, as_real_array, broadcast_shapes, canonical_axes
from masksafe._core.derivatives import with_reverse_rule
from masksafe._core.label_checks import check_distributions, nan_where_bad
from masksafe._core.masks import selected
from masksafe._core.precision import wide_dtype
from masksafe._core.row_blocks import map_row_blocks
from masksafe._core.row_sums import log_sum_exp, product_or_zero, sum_of_row
from masksafe._core.typing import Array, ArrayLike, Axes, Axis
from masksafe.losses._layout import (
    as_mask_of_classes_or_rows,
    as_rows,
    broadcast_widened,
    find_live_rows,
    from_rows,
    shape_without,
)


def poly_loss_cross_entropy(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    epsilon: ArrayLike = 2.0,
    axis: Axis | None = -1,
    where: ArrayLike | None = None,
) -> Array:
    r"""The PolyLoss: softmax cross-entropy with a different coefficient of the first term of its series.

    .. math:: \ell = -\sum_j t_j \log p_j + \epsilon \sum_j t_j (1 - p_j)

    with labels :math:`t`, the softmax :math:`p` of the logits, and all sums over the unmasked classes.

    Args:
      logits: unnormalised log probabilities, floats `[..., num_classes]`.
      labels: a distribution over the classes for every row, floats that broadcast with `logits`.
      epsilon: the weight of the second sum.
      axis: the axis or axes of the classes; None means all axes.
      where: booleans; False is masked. A mask of the rank of `logits` masks classes and broadcasts to their shape. A
        mask of lower rank masks rows: for logits `[2, 2]`, a mask `(2,)` masks rows.

    Returns:
      The losses `[...]`, of the dtype to which JAX promotes `logits`, `labels` and `epsilon`; 0 for a row with nothing
      left. Masked elements have gradients of exactly 0. For infinite logits and bad labels see `softmax_cross_entropy`.

    Raises:
      TypeError: if `logits` or `labels` are not floats or `where` is not boolean.
      ValueError: if the shapes do not broadcast or `axis` is out of range. While label checks are on, for a bad label.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> logits, labels = jnp.array([[0.0, 0.0], [jnp.nan, 0.0]]), jnp.array([[1.0, 0.0], [0.0, 1.0]])
      >>> with jnp.printoptions(precision=4):
      ...     print(masksafe.losses.poly_loss_cross_entropy(logits, labels, where=jnp.array([True, False])))
      [1.6931 0.    ]

    References:
      `optax.losses.poly_loss_cross_entropy
      <https://optax.readthedocs.io/en/latest/api/losses.html#optax.losses.poly_loss_cross_entropy>`_.

      Leng et al., "PolyLoss: A Polynomial Expansion Perspective of Classification Loss Functions", 2022.
    """
    op = "poly_loss_cross_entropy"
    logits, labels = as_float_array(op, "logits", logits), as_float_array(op, "labels", labels)
    epsilon = as_real_array(op, "epsilon", epsilon)
    dtype = jnp.result_type(logits.dtype, labels, epsilon)
    shape = broadcast_shapes(op, logits=logits.shape, labels=labels.shape)
    axes = canonical_axes(op, axis, len(shape))
    mask = as_mask_of_classes_or_rows(op, where, axes, shape, logits.ndim)

    logits, labels = broadcast_widened(logits, shape), broadcast_widened(labels, shape)
    bad_rows = check_distributions(op, labels, mask, axes)
    loss: Array = _combine(axes, dtype, logits, labels, epsilon, mask, bad_rows)
    return loss


@functools.partial(jax.jit, static_argnums=(0, 1))
def _combine(
    axes: Axes, dtype: Any, logits: Array, labels: Array, epsilon: Array, mask: Array | None, bad: Array | None
) -> Array:
    rows, b = shape_without(axes, logits.shape), epsilon.astype(_wide_dtype(logits, labels))
    if jnp.broadcast_shapes(rows, b.shape) == rows:
        loss = _weighted_sum(_Config(axes, 1), logits, labels, jnp.broadcast_to(b, rows), mask)
    else:  # several weights for one row
        cross_entropy = _weighted_sum(_Config(axes, 1), logits, labels, jnp.zeros(rows, b.dtype), mask)
        missing = _weighted_sum(_Config(axes, 0), logits, labels, jnp.ones(rows, b.dtype), mask)
        loss = cross_entropy + b * missing
    return nan_where_bad(selected(loss, find_live_rows(mask, axes)).astype(dtype), bad)


# With the cost c = -log p of a class, and e and b for the weights of the two sums, the loss is the sum of
# t (e c - b expm1(-c)), so that one pass is enough for both. For a cotangent d, and W for the sum of w = t (e + b p),
#     d_x = d (p W - w)        d_t = d (e c - b expm1(-c))        d_b = d sum(t (1 - p)).
# Where the largest logit has nearly all of the probability, its c is tiny. It keeps its digits, since nothing is added
# to the exponential of the largest logit; and so does p W - w, computed as W (p - 1) + (W - w).


class _Config(NamedTuple):
    """The static arguments."""

    axes: Axes
    e: int  # the weight of the cross-entropy


class _Rows(NamedTuple):
    """The results of the forward pass for each row; every array is `[..., 1]`."""

    shift: Array  # the largest unmasked logit
    log_sum: Array  # of exp(logits - shift)
    total: Array  # W


_Residuals = tuple[Array, Array, Array, Array | None, _Rows]


def _forward(config: _Config, logits: Array, labels: Array, b: Array, mask: Array | None) -> tuple[Array, _Residuals]:
    # The residuals, which leave the compiled function, have no NaN for an empty row: it would trigger jax_debug_nans.
    losses, rows = _evaluate_rows(config, True, logits, labels, b, mask)
    assert rows is not None
    return losses.squeeze(-1), (logits, labels, b, mask, rows)


def _reverse(config: _Config, residuals: _Residuals, d_loss: Array) -> tuple[Array, Array, Array, None]:
    logits, labels, b, mask, rows = residuals
    x, t, live = as_rows(config.axes, logits, labels, mask)
    pull_back = functools.partial(_pull_back, config.e)
    d_x, d_t, d_b = map_row_blocks(pull_back, x, t, b[..., None], live, rows, d_loss[..., None])
    d_labels = from_rows(config.axes, labels, d_t)
    return from_rows(config.axes, logits, d_x), d_labels, d_b.squeeze(-1).astype(b.dtype), None


@with_reverse_rule(_forward, _reverse, static_argnums=(0,))
def _weighted_sum(config: _Config, logits: Array, labels: Array, b: Array, mask: Array | None) -> Array:
    """The loss of every row, in the wide dtype."""
    return _evaluate_rows(config, False, logits, labels, b, mask)[0].squeeze(-1)


def _evaluate_rows(
    config: _Config, with_rows: bool, logits: Array, labels: Array, b: Array, mask: Array | None
) -> tuple[Array, _Rows | None]:
    """The loss of every row `[..., 1]`, NaN if it is empty, and what the reverse pass needs, if it is wanted."""
    x, t, live = as_rows(config.axes, logits, labels, mask)
    # Several results are sums of the same terms: in one pass XLA's CPU compiler would write the terms to memory.
    by_selection, by_arithmetic = (functools.partial(_row_values, config.e, with_rows, form) for form in (False, True))
    arithmetic = by_arithmetic if live is None and not with_rows else None
    losses, rows = map_row_blocks(by_selection, x, t, b[..., None], live, arithmetic=arithmetic)
    return losses, rows


def _row_values(
    e: int, with_rows: bool, by_arithmetic: bool, x: Array, t: Array, b: Array, mask: Array | None
) -> tuple[Array, _Rows | None]:
    # No case is told apart row by row: on a GPU, XLA would then not fuse the row's sums into one kernel. A row that is
    # empty, or whose largest logit is infinite, gets a log_sum of -inf or NaN.
    x, t = _wide(x, t, mask)
    shift = jnp.maximum(lax.stop_gradient(jnp.max(x, -1, keepdims=True, initial=-jnp.inf)), jnp.finfo(x.dtype).min)
    log_sum = _log_sum(by_arithmetic, x - shift)
    costs = log_sum - (x - shift)
    missing = -b * jnp.expm1(-costs)
    loss = sum_of_row(_product(by_arithmetic, t, costs + missing if e else missing, log_sum))
    if not with_rows:
        return loss, None
    return loss, _Rows(shift, log_sum, sum_of_row(jnp.where(t == 0, 0, t * (e + b * jnp.exp(-costs)))))


def _pull_back(
    e: int, x: Array, t: Array, b: Array, mask: Array | None, rows: _Rows, d: Array
) -> tuple[Array, Array, Array]:
    (x, t), total = _wide(x, t, mask), rows.total
    z = x - rows.shift
    costs = rows.log_sum - z
    p, less_than_1 = jnp.exp(-costs), jnp.expm1(-costs)
    w = t * (e + b * p)
    d_x = d * jnp.where(z == 0, total * less_than_1 + (total - w), total * p - w)
    finite_costs = jnp.where((t == 0) & (costs == jnp.inf), 0, costs)
    d_t = d * (e * finite_costs - b * less_than_1)
    # A cotangent of 0 means that the user has replaced the loss: then a NaN in the row has no effect either.
    is_used = d != 0
    d_x = jnp.where(is_used, jnp.where(jnp.isfinite(rows.log_sum), d_x, jnp.nan), 0)
    d_b = jnp.where(is_used, -d * sum_of_row(t * less_than_1), 0)
    return selected(d_x, mask), selected(jnp.where(is_used, d_t, 0), mask), d_b


def _wide_dtype(x: Array, t: Array) -> Any:
    return wide_dtype(jnp.promote_types(x.dtype, t.dtype))


def _wide(x: Array, t: Array, mask: Array | None) -> tuple[Array, Array]:
    dtype = _wide_dtype(x, t)
    return selected(x.astype(dtype), mask, -jnp.inf), selected(t.astype(dtype), mask)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _log_sum(by_arithmetic: bool, z: Array) -> Array:
    """The logarithm of the sum of exp(z), the largest of which are 1."""
    return log_sum_exp(z, by_arithmetic=by_arithmetic)


@_log_sum.defjvp
def _(by_arithmetic: bool, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    log_sum = _log_sum(by_arithmetic, *primals)
    return log_sum, sum_of_row(jnp.exp(primals[0] - log_sum) * tangents[0])


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _product(by_arithmetic: bool, t: Array, costs: Array, log_sum: Array) -> Array:
    """The product of `t` and `costs`, where 0 times infinity is 0, unless the row has a NaN or an infinite logit."""
    if by_arithmetic:
        return product_or_zero(t, costs, by_arithmetic=True) + 0 * log_sum
    return jnp.where(t == 0, 0 * log_sum, t * costs)


@_product.defjvp
def _(by_arithmetic: bool, primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    (t, costs, _), (d_t, d_costs, _) = primals, tangents
    tangent = jnp.where((t == 0) & (costs == jnp.inf), 0, costs) * d_t + t * d_costs
    return _product(by_arithmetic, *primals), tangent
