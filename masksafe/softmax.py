"""Softmax, its logarithm and the logsumexp, over the unmasked elements.

The public functions check their arguments and call a core that works on any axes of an array as it lies; the
cores are jitted, so that what is under the mask never shows, not even under jax_debug_nans.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from masksafe._errors import as_float_array, as_mask_of, canonical_axes
from masksafe._moments import selected, widened
from masksafe._rules import differentiable
from masksafe._typing import Array, ArrayLike, Axes, Axis


def logsumexp(x: ArrayLike, axis: Axis | None = -1, where: ArrayLike | None = None, *, keepdims: bool = False) -> Array:
    r"""The logarithm of the sum of exponentials of the unmasked elements; -inf if there are none.

    .. math:: \log \sum_{i : \text{where}_i} e^{x_i}

    Args:
      x: floats.
      axis: an axis, a tuple of axes, or None for all of them. (`jax.nn.logsumexp` takes all by default.)
      where: booleans that broadcast to the shape of `x`; False is masked, None masks nothing.
      keepdims: keep the reduced axes, with size 1.

    Returns:
      An array of the dtype of `x`; float16 and bfloat16 are computed in float32 and rounded once. The gradient
      is the softmax: exactly 0 with respect to a masked element, and for a slice with nothing left.

    Raises:
      TypeError: if `x` is not a float array or `where` is not boolean.
      ValueError: if `where` does not broadcast to the shape of `x`, or `axis` is out of range.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> x = jnp.array([[0.0, 0.0, jnp.nan], [jnp.nan, jnp.nan, jnp.nan]])
      >>> print(masksafe.logsumexp(x, where=~jnp.isnan(x)))
      [0.6931472      -inf]

    References:
      `jax.nn.logsumexp <https://docs.jax.dev/en/latest/_autosummary/jax.nn.logsumexp.html>`_.
    """
    x, axes, where = _arguments("logsumexp", x, axis, where)
    result = _logsumexp(axes, x, where)
    return result if keepdims else jnp.squeeze(result, axes)


def softmax(x: ArrayLike, axis: Axis | None = -1, where: ArrayLike | None = None) -> Array:
    r"""The softmax over the unmasked elements; 0 at the masked ones.

    .. math:: p_i = \frac{e^{x_i}}{\sum_{j : \text{where}_j} e^{x_j}}

    Args:
      x: floats.
      axis: the axis or axes over which the result sums to 1; None is all of them.
      where: booleans that broadcast to the shape of `x`; False is masked, None masks nothing.

    Returns:
      An array of the shape and dtype of `x`; float16 and bfloat16 are computed in float32 and rounded once. A
      slice with nothing left is 0 everywhere, and so are its derivatives of any order. A NaN or +inf in an
      unmasked element makes the unmasked elements of its slice NaN, as does a slice of nothing but -inf.

    Raises:
      TypeError: if `x` is not a float array or `where` is not boolean.
      ValueError: if `where` does not broadcast to the shape of `x`, or `axis` is out of range.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> x = jnp.array([[1.0, 1.0, jnp.nan], [jnp.nan, jnp.nan, jnp.nan]])
      >>> print(masksafe.softmax(x, where=~jnp.isnan(x)))
      [[0.5 0.5 0. ]
       [0.  0.  0. ]]

    References:
      `jax.nn.softmax <https://docs.jax.dev/en/latest/_autosummary/jax.nn.softmax.html>`_, which it replaces.
    """
    x, axes, where = _arguments("softmax", x, axis, where)
    return _softmax(axes, x, where)


def log_softmax(x: ArrayLike, axis: Axis | None = -1, where: ArrayLike | None = None) -> Array:
    r"""The logarithm of the softmax over the unmasked elements; -inf at the masked ones.

    .. math:: \log p_i = x_i - \log \sum_{j : \text{where}_j} e^{x_j}

    Args:
      x: floats.
      axis: the axis or axes over which the probabilities sum to 1; None is all of them.
      where: booleans that broadcast to the shape of `x`; False is masked, None masks nothing.

    Returns:
      An array of the shape and dtype of `x`; float16 and bfloat16 are computed in float32 and rounded once. The
      gradient with respect to a masked element is exactly 0, and its cotangent does not matter: a later
      product with a target of 0 is 0 * -inf, so select in front of it (`masksafe.mask_where`), or use
      `masksafe.losses`. A NaN or +inf in an unmasked element makes the unmasked elements of its slice NaN, as
      does a slice of nothing but -inf.

    Raises:
      TypeError: if `x` is not a float array or `where` is not boolean.
      ValueError: if `where` does not broadcast to the shape of `x`, or `axis` is out of range.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> x = jnp.array([1.0, 1.0, jnp.nan])
      >>> print(masksafe.log_softmax(x, where=~jnp.isnan(x)))
      [-0.6931472 -0.6931472       -inf]

    References:
      `jax.nn.log_softmax <https://docs.jax.dev/en/latest/_autosummary/jax.nn.log_softmax.html>`_, which it
      replaces.
    """
    x, axes, where = _arguments("log_softmax", x, axis, where)
    return _log_softmax(axes, x, where)


def _arguments(op: str, x: ArrayLike, axis: Axis | None, where: ArrayLike | None) -> tuple[Array, Axes, Array | None]:
    x = as_float_array(op, "x", x)
    return x, canonical_axes(op, axis, x.ndim), as_mask_of(op, where, x)


# The cores. The reductions keep their axes. Cotangents of masked elements are selected away, and products with
# the others' are selected behind the product, since a cotangent may be infinite.


def _logsumexp_forward(axes: Axes, x: Array, where: Array | None) -> tuple[Array, tuple[Array, Array | None, Array]]:
    wide = _evaluate_logsumexp(axes, x, where)
    return wide.astype(x.dtype), (x, where, wide)


@functools.partial(jax.jit, static_argnums=0)
def _logsumexp_reverse(axes: Axes, residuals: tuple[Array, Array | None, Array], d_result: Array) -> tuple[Array, None]:
    x, where, result = residuals
    probs = jnp.exp(selected(x.astype(result.dtype), where, -jnp.inf) - _where_alive(axes, where, result, 0.0))
    return selected(probs * d_result, where, 0).astype(x.dtype), None


@differentiable(_logsumexp_forward, _logsumexp_reverse, static_argnums=(0,))
def _logsumexp(axes: Axes, x: Array, where: Array | None) -> Array:
    result: Array = _evaluate_logsumexp(axes, x, where)
    return result.astype(x.dtype)


@functools.partial(jax.jit, static_argnums=0)
def _evaluate_logsumexp(axes: Axes, x: Array, where: Array | None) -> Array:
    z, shift = _shifted(axes, x, where)
    is_infinite = shift == jnp.inf  # then so is the sum, but inf - inf is NaN
    z, shift = jnp.where(is_infinite, selected(widened(x), where, -jnp.inf), z), jnp.where(is_infinite, 0, shift)
    # A row of nothing has the sum 0, whose logarithm would have an infinite derivative.
    total = _where_alive(axes, where, jnp.sum(jnp.exp(z), axes, keepdims=True), 1.0)
    return _where_alive(axes, where, shift + jnp.log(total), -jnp.inf)


def _softmax_forward(axes: Axes, x: Array, where: Array | None) -> tuple[Array, tuple[Array, Array | None]]:
    probs: Array = _evaluate_softmax(axes, x, where)
    return probs, (probs, where)


@functools.partial(jax.jit, static_argnums=0)
def _softmax_reverse(axes: Axes, residuals: tuple[Array, Array | None], d_probs: Array) -> tuple[Array, None]:
    probs, where = residuals
    dtype = probs.dtype
    probs, d_probs = widened(probs), selected(widened(d_probs), where, 0)
    d_x = probs * (d_probs - jnp.sum(probs * d_probs, axes, keepdims=True))
    return selected(d_x, where, 0).astype(dtype), None


@differentiable(_softmax_forward, _softmax_reverse, static_argnums=(0,))
def _softmax(axes: Axes, x: Array, where: Array | None) -> Array:
    result: Array = _evaluate_softmax(axes, x, where)
    return result


@functools.partial(jax.jit, static_argnums=0)
def _evaluate_softmax(axes: Axes, x: Array, where: Array | None) -> Array:
    z, _ = _shifted(axes, x, where)
    exps = jnp.exp(z)
    total = _where_alive(axes, where, jnp.sum(exps, axes, keepdims=True), 1.0)
    return selected(exps / total, where, 0).astype(x.dtype)


def _log_softmax_forward(axes: Axes, x: Array, where: Array | None) -> tuple[Array, tuple[Array, Array | None]]:
    log_probs = _evaluate_log_softmax(axes, x, where)
    return log_probs, (log_probs, where)


@functools.partial(jax.jit, static_argnums=0)
def _log_softmax_reverse(axes: Axes, residuals: tuple[Array, Array | None], d_log_probs: Array) -> tuple[Array, None]:
    log_probs, where = residuals
    probs, d_wide = jnp.exp(widened(log_probs)), selected(widened(d_log_probs), where, 0)
    d_x = d_wide - probs * jnp.sum(d_wide, axes, keepdims=True)
    return selected(d_x, where, 0).astype(log_probs.dtype), None


@differentiable(_log_softmax_forward, _log_softmax_reverse, static_argnums=(0,))
def _log_softmax(axes: Axes, x: Array, where: Array | None) -> Array:
    result: Array = _evaluate_log_softmax(axes, x, where)
    return result


@functools.partial(jax.jit, static_argnums=0)
def _evaluate_log_softmax(axes: Axes, x: Array, where: Array | None) -> Array:
    z, _ = _shifted(axes, x, where)
    total = _where_alive(axes, where, jnp.sum(jnp.exp(z), axes, keepdims=True), 1.0)
    return selected(z - jnp.log(total), where, -jnp.inf).astype(x.dtype)


def _shifted(axes: Axes, x: Array, where: Array | None) -> tuple[Array, Array]:
    """Widened x minus its largest unmasked element, with -inf under the mask; and that element, or 0 for -inf."""
    x = selected(x, where, -jnp.inf)
    largest = jnp.max(lax.stop_gradient(x), axes, keepdims=True, initial=-jnp.inf)
    shift = widened(jnp.where(largest == -jnp.inf, jnp.zeros((), x.dtype), largest))
    return widened(x) - shift, shift


def _where_alive(axes: Axes, where: Array | None, reduced: Array, dead: float) -> Array:
    """`reduced` for slices with an unmasked element, `dead` for the others."""
    if where is None:
        return reduced
    return jnp.where(jnp.any(where, axes, keepdims=True), reduced, jnp.asarray(dead, reduced.dtype))
