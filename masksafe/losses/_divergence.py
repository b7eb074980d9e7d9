"""Kullback-Leibler divergences between distributions."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._core import label_checks, row_blocks, run_time
from masksafe._core.arguments import as_float_array, broadcast_shapes, canonical_axes
from masksafe._core.derivatives import elementwise
from masksafe._core.masks import read_mask, selected
from masksafe._core.public_op import public_op
from masksafe._core.typing import Array, ArrayLike, Axes, Axis, jitted
from masksafe.losses._elementwise import Check, broadcast_alike
from masksafe.losses._layout import wide_selected

Terms = Callable[[Array, Array], Array]  # from log predictions and targets to the terms of a divergence


@public_op
def kl_divergence(
    log_predictions: ArrayLike, targets: ArrayLike, axis: Axis | None = -1, where: ArrayLike | None = None
) -> Array:
    r"""The Kullback-Leibler divergence of predictions from targets.

    .. math:: \ell = \sum_j t_j (\log t_j - \log p_j)

    with :math:`0 \log 0 = 0`: a class whose target is 0 adds nothing, whatever its prediction is.

    Args:
      log_predictions: logarithms of probabilities, floats `[..., dim]`.
      targets: probabilities, floats that broadcast with `log_predictions`.
      axis: the axis or axes of the classes; None means all axes.
      where: booleans that broadcast to the common shape of both; False masks a class. A mask of
        lower rank is aligned with the last axes, as in NumPy: to mask rows write `where[..., None]`.

    Returns:
      The divergences `[...]`, of the dtype to which JAX promotes both; 0 where all is masked. Masked elements have
      gradients of exactly 0, and so do targets of 0, where the divergence has no derivative. Where the cotangent of a
      divergence is 0, the gradients are 0, whatever its row holds.

    Raises:
      TypeError: if the arguments are not floats or `where` is not boolean.
      ValueError: if the shapes do not broadcast or `axis` is out of range. While label checks are on, for an unmasked
        target that is negative or not finite.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> log_p, t = jnp.log(jnp.array([0.5, 0.5, 0.0])), jnp.array([0.25, 0.75, 0.0])
      >>> print(f"{masksafe.losses.kl_divergence(log_p, t):.4f}")
      0.1308

    References:
      `optax.losses.kl_divergence
      <https://optax.readthedocs.io/en/latest/api/losses.html#optax.losses.kl_divergence>`_.

      Kullback and Leibler, "On Information and Sufficiency", 1951.
    """
    return _divergence("kl_divergence", _kl_terms, _POSITIVE, log_predictions, targets, axis, where)


@public_op
def generalized_kl_divergence(
    log_predictions: ArrayLike, targets: ArrayLike, axis: Axis | None = -1, where: ArrayLike | None = None
) -> Array:
    r"""The Kullback-Leibler divergence of positive vectors that need not sum to 1.

    .. math:: \ell = \sum_j \bigl( t_j (\log t_j - \log p_j) + p_j - t_j \bigr)

    Args:
      log_predictions: logarithms of positive numbers, floats `[..., dim]`.
      targets: non-negative floats that broadcast with `log_predictions`.
      axis: the axis or axes of the classes; None means all axes.
      where: booleans that broadcast to the common shape of both; False masks a class. A mask of
        lower rank is aligned with the last axes, as in NumPy: to mask rows write `where[..., None]`.

    Returns:
      The divergences `[...]`, of the dtype to which JAX promotes both; 0 where all is masked. Masked elements have
      gradients of exactly 0.

    Raises:
      TypeError: if the arguments are not floats or `where` is not boolean.
      ValueError: if the shapes do not broadcast or `axis` is out of range. While label checks are on, for an unmasked
        target that is negative or not finite.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> log_p, t = jnp.log(jnp.array([1.0, 2.0, 4.0])), jnp.array([1.0, 4.0, jnp.nan])
      >>> where = jnp.array([True, True, False])
      >>> loss = masksafe.losses.generalized_kl_divergence(log_p, t, where=where)
      >>> print(f"{loss:.4f}")
      0.7726

    References:
      `optax.losses.generalized_kl_divergence
      <https://optax.readthedocs.io/en/latest/api/losses.html#optax.losses.generalized_kl_divergence>`_.

      Bregman, "The relaxation method of finding the common point of convex sets", 1967.
    """
    op = "generalized_kl_divergence"
    return _divergence(op, _generalized_kl_terms, _POSITIVE, log_predictions, targets, axis, where)


@public_op
def convex_kl_divergence(
    log_predictions: ArrayLike, targets: ArrayLike, axis: Axis | None = -1, where: ArrayLike | None = None
) -> Array:
    r"""The Kullback-Leibler divergence of positive vectors: the former name of `generalized_kl_divergence`.

    .. math:: \ell = \sum_j \bigl( t_j (\log t_j - \log p_j) + p_j - t_j \bigr)

    Args:
      log_predictions: logarithms of positive numbers, floats `[..., dim]`.
      targets: non-negative floats that broadcast with `log_predictions`.
      axis: the axis or axes of the classes; None means all axes.
      where: booleans that broadcast to the common shape of both; False masks a class.

    Returns:
      The divergences `[...]`, as from `generalized_kl_divergence`.

    Raises:
      TypeError: if the arguments are not floats or `where` is not boolean.
      ValueError: if the shapes do not broadcast or `axis` is out of range. While label checks are on, for an unmasked
        target that is negative or not finite.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> log_p, t = jnp.log(jnp.array([1.0, 2.0])), jnp.array([1.0, 4.0])
      >>> print(f"{masksafe.losses.convex_kl_divergence(log_p, t):.4f}")
      0.7726

    References:
      `optax.losses.convex_kl_divergence
      <https://optax.readthedocs.io/en/latest/api/losses.html#optax.losses.convex_kl_divergence>`_.
    """
    return _divergence("convex_kl_divergence", _generalized_kl_terms, _POSITIVE, log_predictions, targets, axis, where)


@public_op
def kl_divergence_with_log_targets(
    log_predictions: ArrayLike, log_targets: ArrayLike, axis: Axis | None = -1, where: ArrayLike | None = None
) -> Array:
    r"""The Kullback-Leibler divergence of predictions from targets, both given as logarithms.

    .. math:: \ell = \sum_j t_j (\log t_j - \log p_j)

    with :math:`0 \log 0 = 0`: a class whose log target is -inf adds nothing, whatever its prediction is.

    Args:
      log_predictions: logarithms of probabilities, floats `[..., dim]`.
      log_targets: logarithms of probabilities, floats that broadcast with `log_predictions`.
      axis: the axis or axes of the classes; None means all axes.
      where: booleans that broadcast to the common shape of both; False masks a class. A mask of
        lower rank is aligned with the last axes, as in NumPy: to mask rows write `where[..., None]`.

    Returns:
      The divergences `[...]`, of the dtype to which JAX promotes both; 0 where all is masked. Masked elements have
      gradients of exactly 0, and so do log targets of -inf.

    Raises:
      TypeError: if the arguments are not floats or `where` is not boolean.
      ValueError: if the shapes do not broadcast or `axis` is out of range. While label checks are on, for an unmasked
        log target that is NaN or +inf.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> log_p = jnp.log(jnp.array([0.5, 0.5, 0.0]))
      >>> log_t = jnp.log(jnp.array([0.25, 0.75, 0.0]))
      >>> print(f"{masksafe.losses.kl_divergence_with_log_targets(log_p, log_t):.4f}")
      0.1308

    References:
      `optax.losses.kl_divergence_with_log_targets
      <https://optax.readthedocs.io/en/latest/api/losses.html#optax.losses.kl_divergence_with_log_targets>`_.
    """
    op = "kl_divergence_with_log_targets"
    return _divergence(op, _kl_terms_of_logs, _LOGARITHMS, log_predictions, log_targets, axis, where)


_POSITIVE = Check("targets", lambda t: (t >= 0) & (t < jnp.inf), "negative or not finite")
_LOGARITHMS = Check("log_targets", lambda t: t < jnp.inf, "NaN or +inf as logarithms")


def _divergence(
    op: str, terms: Terms, check: Check, log_p: ArrayLike, t: ArrayLike, axis: Axis | None, where: ArrayLike | None
) -> Array:
    """The sum of the unmasked `terms(log_predictions, targets)`, which are called with 0 for masked elements."""
    name = check.argument
    log_p, t = as_float_array(op, "log_predictions", log_p), as_float_array(op, name, t)
    shape = broadcast_shapes(op, **{"log_predictions": log_p.shape, name: t.shape})
    mask = read_mask(op, where, shape, f"log_predictions and {name} together")
    bad = label_checks.check_elements(op, t, shape, mask, check.is_valid, check.otherwise)
    return _evaluate(terms, canonical_axes(op, axis, len(shape)), shape, log_p, t, mask, bad)


@jitted(0, 1, 2)
def _evaluate(
    terms_of: Terms, axes: Axes, shape: tuple[int, ...], log_p: Array, t: Array, mask: Array | None, bad: Array | None
) -> Array:
    dtype, row_axes = jnp.result_type(log_p, t), row_blocks.axes_of_row(axes, len(shape))

    def loss_of_rows(log_p: Array, t: Array, mask: Array | None) -> Array:
        terms = elementwise(terms_of)(wide_selected(log_p, mask), wide_selected(t, mask))
        return jnp.sum(selected(terms, mask), row_axes)

    log_p, t = broadcast_alike((log_p, t), shape)
    loss = row_blocks.map_row_blocks(loss_of_rows, log_p, t, mask, leading=row_blocks.leading_axes(axes))
    return label_checks.nan_where_bad(loss.astype(dtype), None if bad is None else run_time.any_of(bad, axes))


def _kl_terms(log_p: Array, t: Array) -> Array:
    is_zero = t == 0
    positive = jnp.where(is_zero, 1, t)
    return jnp.where(is_zero, _zero_times_log(log_p), positive * (jnp.log(positive) - jnp.where(is_zero, 0, log_p)))


@jax.custom_jvp
def _kl_terms_of_logs(log_p: Array, log_t: Array) -> Array:
    # Where t is too small for a float, it is 0. This is decided from log t, since XLA would compute the exponential in
    # a kernel of its own on a GPU (jax 0.12, H100, both gradients, bfloat16, 8192x2048: 235 MB moved for 151).
    is_zero = log_t < math.log(jnp.finfo(log_t.dtype).tiny)
    return jnp.where(is_zero, _zero_times_log(log_p), jnp.exp(log_t) * (log_t - log_p))


@_kl_terms_of_logs.defjvp
def _(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (_, log_t), (d_log_p, d_log_t) = primals, tangents
    terms, t = _kl_terms_of_logs(*primals), jnp.exp(log_t)
    # Without products of an infinite logarithm and 0, which JAX's own rules make.
    return terms, (terms + t) * d_log_t - t * d_log_p


def _zero_times_log(log_p: Array) -> Array:
    """0 * log p, where 0 log 0 = 0; NaN if log p is NaN or +inf, which is not the logarithm of a probability."""
    return lax.stop_gradient(jnp.where(log_p == -jnp.inf, 0, 0 * log_p))  # the derivative is 0: fewer operations


def _generalized_kl_terms(log_p: Array, t: Array) -> Array:
    return _kl_terms(log_p, t) + jnp.exp(log_p) - t
