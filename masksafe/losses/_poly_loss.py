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
from masksafe._core.typing import Array, ArrayLike, Axes, Axis
from masksafe.losses._layout import as_mask_of_classes_or_rows, as_rows, broadcast_widened, find_live_rows, from_rows


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
    cross_entropy, missing = _sums(axes, logits, labels, mask)
    loss = selected(cross_entropy + epsilon * missing, find_live_rows(mask, axes)).astype(dtype)
    return nan_where_bad(loss, bad)


# The two sums share one pass. With the cost c = -log p of a class they are sums of t c and t (1 - p), and 1 - p is
# -expm1(-c). For cotangents a and b of the sums, with w = t (a + b p) and W the sum of w,
#     d_x = p W - w        d_t = a c + b (1 - p).
# Where the largest logit has nearly all of the probability, its c is tiny; it keeps its digits because the largest
# logits are counted rather than added to the exponentials of the others, and so does p W - w, as W (p - 1) + (W - w).


class _Rows(NamedTuple):
    """The results of the forward pass for each row; every array is `[..., 1]`."""

    cross_entropy: Array
    missing: Array  # the sum of t (1 - p)
    shift: Array  # the largest unmasked logit
    log_sum: Array  # of exp(logits - shift)


_Residuals = tuple[Array, Array, Array | None, _Rows]


def _forward(axes: Axes, logits: Array, labels: Array, mask: Array | None) -> tuple[tuple[Array, Array], _Residuals]:
    rows = map_row_blocks(_row_values, *as_rows(axes, logits, labels, mask))
    return _sums_of(rows), (logits, labels, mask, rows)


def _reverse(axes: Axes, residuals: _Residuals, cotangents: tuple[Array, Array]) -> tuple[Array, Array, None]:
    logits, labels, mask, rows = residuals
    x, t, live = as_rows(axes, logits, labels, mask)
    d_rows = tuple(d[..., None] for d in cotangents)
    d_x, d_t = map_row_blocks(_pull_back, x, t, live, rows, d_rows)
    return from_rows(axes, logits, d_x), from_rows(axes, labels, d_t), None


@with_reverse_rule(_forward, _reverse, static_argnums=(0,))
def _sums(axes: Axes, logits: Array, labels: Array, mask: Array | None) -> tuple[Array, Array]:
    """The cross-entropy and the sum of t (1 - p) of every row, in the wide dtype."""
    return _sums_of(map_row_blocks(_row_values, *as_rows(axes, logits, labels, mask)))


def _sums_of(rows: _Rows) -> tuple[Array, Array]:
    return rows.cross_entropy.squeeze(-1), rows.missing.squeeze(-1)


def _row_values(x: Array, t: Array, mask: Array | None) -> _Rows:
    x, t = _wide(x, t, mask)
    largest = lax.stop_gradient(jnp.max(x, -1, keepdims=True, initial=-jnp.inf))
    shift = jnp.where(jnp.isfinite(largest), largest, 0)
    is_empty = x.shape[-1] == 0 if mask is None else ~jnp.any(mask, -1, keepdims=True)
    log_sum = _log_sum(x - shift, is_empty)
    costs = log_sum - (x - shift)
    return _Rows(
        _unless_hidden(_sum(_product(t, costs)), log_sum),
        _unless_hidden(_sum(_product(t, -jnp.expm1(-costs))), log_sum),
        shift,
        log_sum,
    )


def _pull_back(
    x: Array, t: Array, mask: Array | None, rows: _Rows, cotangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    (x, t), (a, b) = _wide(x, t, mask), cotangents
    z, is_sound = x - rows.shift, jnp.isfinite(rows.log_sum)
    costs = rows.log_sum - z
    p = jnp.exp(-costs)
    w = t * (a + b * p)
    total = _sum(w)
    d_x = jnp.where(z == 0, total * jnp.expm1(-costs) + (total - w), total * p - w)
    absent = (t == 0) & (x == -jnp.inf)
    d_t = a * jnp.where(absent, 0, costs) - b * jnp.expm1(-costs)
    # A cotangent of 0 means that the user has replaced the loss: then a NaN in the row has no effect either.
    is_used = (a != 0) | (b != 0)
    d_x = jnp.where(is_used, jnp.where(is_sound, d_x, jnp.nan), 0)
    return selected(d_x, mask), selected(jnp.where(is_used, d_t, 0), mask)


def _wide(x: Array, t: Array, mask: Array | None) -> tuple[Array, Array]:
    dtype = wide_dtype(jnp.promote_types(x.dtype, t.dtype))
    return selected(x.astype(dtype), mask, -jnp.inf), selected(t.astype(dtype), mask)


@jax.custom_jvp
def _log_sum(z: Array, is_empty: Array | bool) -> Array:
    """The logarithm of the sum of exp(z), the largest of which are 0; 0 for an empty row."""
    others = _sum(jnp.where(z == 0, 0, jnp.exp(z)))
    number = jnp.where(is_empty, 1, _sum(z == 0))
    return jnp.log1p(others + (number - 1).astype(z.dtype))


@_log_sum.defjvp
def _(primals: tuple[Array, Any], tangents: tuple[Array, Any]) -> tuple[Array, Array]:
    log_sum = _log_sum(*primals)
    return log_sum, _sum(jnp.exp(primals[0] - log_sum) * tangents[0])


@jax.custom_jvp
def _product(t: Array, costs: Array) -> Array:
    """The product, where 0 times infinity is 0."""
    return jnp.where(t == 0, 0, t * costs)


@_product.defjvp
def _(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (t, costs), (d_t, d_costs) = primals, tangents
    return _product(t, costs), jnp.where((t == 0) & (costs == jnp.inf), 0, costs) * d_t + t * d_costs


def _unless_hidden(total: Array, log_sum: Array) -> Array:
    """The total; NaN where targets of 0 hide a logit that is NaN or infinite."""
    return jnp.where(jnp.isfinite(log_sum) | (total == jnp.inf), total, jnp.nan)


def _sum(x: Array) -> Array:
    return jnp.sum(x, -1, keepdims=True)
