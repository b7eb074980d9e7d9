"""Softmax, its logarithm, the logsumexp and the logmeanexp, over the unmasked elements.

The public functions check their arguments and call a core that works on any axes without transposing. The cores are
jitted, so that masked values stay hidden even from jax_debug_nans.
"""

from __future__ import annotations

from typing import Literal, overload

import jax.numpy as jnp
from jax import lax

from masksafe._core import platforms, softmaxes
from masksafe._core.arguments import (
    as_array,
    as_bool,
    as_empty_value,
    as_promoted_float_array,
    broadcast_shapes,
    canonical_axes,
)
from masksafe._core.groups import with_value_of_empty
from masksafe._core.masks import Weighting, both, read_mask, selected
from masksafe._core.moments import Rows, nonzero_divisor, total_weight
from masksafe._core.precision import widened
from masksafe._core.public_op import public_op
from masksafe._core.sharding import vary_alike
from masksafe._core.typing import Array, ArrayLike, Axes, Axis, jitted


@overload
def logsumexp(
    a: ArrayLike,
    axis: Axis | None = None,
    b: ArrayLike | None = None,
    keepdims: bool = False,
    return_sign: Literal[False] = False,
    where: ArrayLike | None = None,
    *,
    empty_value: ArrayLike | None = None,
) -> Array: ...


@overload
def logsumexp(
    a: ArrayLike,
    axis: Axis | None = None,
    b: ArrayLike | None = None,
    keepdims: bool = False,
    *,
    return_sign: Literal[True],
    where: ArrayLike | None = None,
    empty_value: ArrayLike | None = None,
) -> tuple[Array, Array]: ...


@overload
def logsumexp(
    a: ArrayLike,
    axis: Axis | None = None,
    b: ArrayLike | None = None,
    keepdims: bool = False,
    *,
    return_sign: bool,
    where: ArrayLike | None = None,
    empty_value: ArrayLike | None = None,
) -> Array | tuple[Array, Array]: ...


@public_op
def logsumexp(
    a: ArrayLike,
    axis: Axis | None = None,
    b: ArrayLike | None = None,
    keepdims: bool = False,
    return_sign: bool = False,
    where: ArrayLike | None = None,
    *,
    empty_value: ArrayLike | None = None,
) -> Array | tuple[Array, Array]:
    r"""The log of the sum of exponentials of the unmasked elements; -inf, or `empty_value`, if there are none.

    .. math:: \log \sum_{i : \text{where}_i} b_i \, e^{a_i}

    Args:
      a: floats or complex numbers; integers become floats.
      axis: an axis, a tuple of axes, or None (the default) for all of them.
      b: factors of the exponentials, which broadcast with `a`; 1 by default. An element whose factor is 0 is masked.
      keepdims: keep the reduced axes, with size 1.
      return_sign: return the logarithm of the sum's magnitude, and the sign as well.
      where: booleans that broadcast to the shape of `a` (and `b`), trailing axes first; False is masked, None masks
        nothing.
      empty_value: the result where all is masked, as for `masksafe.max`: inside a model 0.

    Returns:
      An array of the dtype of `a` (and `b`); float16 and bfloat16 are computed in float32 and rounded once. With
      `return_sign`, a tuple of it and the sign: 1, -1, or 0 where the sum is 0, whatever `empty_value` is; for a
      complex sum, the sum divided by its magnitude. Without `return_sign` a negative sum gives NaN. The gradient is the
      softmax; it is exactly 0 with respect to masked elements, and in a row that is fully masked or -inf throughout.

    Raises:
      TypeError: if `a` or `b` is not an array of numbers, `where` is not boolean, or the dtype of the result does not
        hold `empty_value`.
      ValueError: if the shapes do not broadcast, or `axis` is out of range.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> a = jnp.array([[0.0, 0.0, jnp.nan], [jnp.nan, jnp.nan, jnp.nan]])
      >>> with jnp.printoptions(precision=4):
      ...     print(masksafe.logsumexp(a, -1, where=~jnp.isnan(a)))
      [0.6931   -inf]

    References:
      `jax.nn.logsumexp <https://docs.jax.dev/en/latest/_autosummary/jax.nn.logsumexp.html>`_, which it replaces
      with the same parameters in the same order and with the same defaults.
    """
    op = "logsumexp"
    a, b = _as_numbers(op, "a", a), None if b is None else _as_numbers(op, "b", b)
    shape = a.shape if b is None else broadcast_shapes(op, a=a.shape, b=b.shape)
    axes, where = canonical_axes(op, axis, len(shape)), read_mask(op, where, shape, "a")
    keepdims, return_sign = as_bool(op, "keepdims", keepdims), as_bool(op, "return_sign", return_sign)
    dtype = a.dtype if b is None else jnp.result_type(a, b)
    empty = as_empty_value(op, empty_value, jnp.finfo(dtype).dtype if return_sign else dtype)
    return _reduce_exps(axes, keepdims, return_sign, a, b, where, empty)


@public_op
def logmeanexp(
    x: ArrayLike,
    axis: Axis | None = None,
    where: ArrayLike | None = None,
    keepdims: bool = False,
    *,
    empty_value: ArrayLike | None = None,
) -> Array:
    r"""The log of the mean of exponentials of the unmasked elements; -inf, or `empty_value`, if there are none.

    .. math:: \log \frac{1}{n} \sum_{i : \text{where}_i} e^{x_i}, \qquad n = |\{i : \text{where}_i\}|

    Args:
      x: floats or complex numbers; integers become floats.
      axis: an axis, a tuple of axes, or None (the default) for all of them.
      where: booleans that broadcast to the shape of `x`, trailing axes first; False is masked, None masks nothing.
      keepdims: keep the reduced axes, with size 1.
      empty_value: the result where all is masked, as for `masksafe.max`: inside a model 0.

    Returns:
      An array of the dtype of `x`; float16 and bfloat16 are computed in float32 and rounded once. The gradient is the
      softmax; it is exactly 0 with respect to masked elements, and in a row that is fully masked or -inf throughout.

    Raises:
      TypeError: if `x` is not an array of numbers, `where` is not boolean, or the dtype of the result does not hold
        `empty_value`.
      ValueError: if `where` does not broadcast to the shape of `x`, or `axis` is out of range.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> x = jnp.log(jnp.array([[1.0, 3.0, jnp.nan], [jnp.nan, jnp.nan, jnp.nan]]))
      >>> with jnp.printoptions(precision=4):
      ...     print(jnp.exp(masksafe.logmeanexp(x, -1, where=~jnp.isnan(x))))
      [2. 0.]

    References:
      `jax.nn.logmeanexp <https://docs.jax.dev/en/latest/_autosummary/jax.nn.logmeanexp.html>`_, which it replaces
      with the same parameters in the same order and with the same defaults.
    """
    op = "logmeanexp"
    x = _as_numbers(op, "x", x)
    axes, where = canonical_axes(op, axis, x.ndim), read_mask(op, where, x.shape)
    return _mean_exps(axes, as_bool(op, "keepdims", keepdims), x, where, as_empty_value(op, empty_value, x.dtype))


@public_op
def softmax(x: ArrayLike, axis: Axis | None = -1, where: ArrayLike | None = None) -> Array:
    r"""The softmax over the unmasked elements; 0 at the masked ones.

    .. math:: p_i = \frac{e^{x_i}}{\sum_{j : \text{where}_j} e^{x_j}}

    Args:
      x: floats; integers become floats.
      axis: the axis or axes over which the result sums to 1, and whose elements form a row; None means all.
      where: booleans that broadcast to the shape of `x`, trailing axes first; False is masked, None masks nothing.

    Returns:
      An array of the shape and dtype of `x`; float16 and bfloat16 are computed in float32 and rounded once. A fully
      masked row is 0, and so are its derivatives of any order. The unmasked elements of a row are NaN if one of them
      is NaN or +inf, or if all of them are -inf.

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
    x, axes, where = _check_arguments("softmax", x, axis, where)
    return _softmax(axes, x, where)


@public_op
def log_softmax(x: ArrayLike, axis: Axis | None = -1, where: ArrayLike | None = None) -> Array:
    r"""The logarithm of the softmax over the unmasked elements; -inf at the masked ones.

    .. math:: \log p_i = x_i - \log \sum_{j : \text{where}_j} e^{x_j}

    Args:
      x: floats; integers become floats.
      axis: the axis or axes over which the probabilities sum to 1, and whose elements form a row; None means all.
      where: booleans that broadcast to the shape of `x`, trailing axes first; False is masked, None masks nothing.

    Returns:
      An array of the shape and dtype of `x`; float16 and bfloat16 are computed in float32 and rounded once. The
      gradient with respect to a masked element is exactly 0, whatever its cotangent. A later product with a target of
      0 is 0 * -inf = NaN at a masked element: select before the product (`masksafe.keep`), or use
      `masksafe.losses`. The unmasked elements of a row are NaN if one of them is NaN or +inf, or if all of them are
      -inf.

    Raises:
      TypeError: if `x` is not a float array or `where` is not boolean.
      ValueError: if `where` does not broadcast to the shape of `x`, or `axis` is out of range.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> x = jnp.array([1.0, 1.0, jnp.nan])
      >>> with jnp.printoptions(precision=4):
      ...     print(masksafe.log_softmax(x, where=~jnp.isnan(x)))
      [-0.6931 -0.6931    -inf]

    References:
      `jax.nn.log_softmax <https://docs.jax.dev/en/latest/_autosummary/jax.nn.log_softmax.html>`_, which it
      replaces.
    """
    x, axes, where = _check_arguments("log_softmax", x, axis, where)
    return _log_softmax(axes, x, where)


def _check_arguments(
    op: str, x: ArrayLike, axis: Axis | None, where: ArrayLike | None
) -> tuple[Array, Axes, Array | None]:
    x = as_promoted_float_array(op, "x", x, any_width=True)
    return x, canonical_axes(op, axis, x.ndim), read_mask(op, where, x.shape)


def _as_numbers(op: str, argument: str, value: ArrayLike) -> Array:
    array = as_array(op, argument, value)
    return array if jnp.iscomplexobj(array) else as_promoted_float_array(op, argument, array, any_width=True)


# The cores. Reductions keep their axes.


@jitted(0, 1, 2)
def _reduce_exps(
    axes: Axes,
    keepdims: bool,
    return_sign: bool,
    a: Array,
    b: Array | None,
    where: Array | None,
    empty_value: Array | None,
) -> Array | tuple[Array, Array]:
    """The logsumexp over `axes`, which stay with `keepdims`, and with `return_sign` its sign."""
    if b is None and not jnp.iscomplexobj(a):
        result = wide_logsumexp(axes, a, where).astype(a.dtype)
        sign = jnp.where(jnp.isnan(result), result, (result > -jnp.inf).astype(result.dtype))
    else:
        if b is not None:
            a, b = jnp.broadcast_arrays(a, b)
            where = both(where, b != 0)
        result, sign = _signed_logsumexp(axes, return_sign, a, b, where)
    result = with_value_of_empty(Rows(axes), result, a, where, empty_value)
    if not keepdims:
        result, sign = jnp.squeeze(result, axes), jnp.squeeze(sign, axes)
    return (result, sign) if return_sign else result


@jitted(0, 1)
def _mean_exps(axes: Axes, keepdims: bool, x: Array, where: Array | None, empty_value: Array | None) -> Array:
    wide = _signed_logsumexp(axes, False, x, None, where)[0] if jnp.iscomplexobj(x) else wide_logsumexp(axes, x, where)
    number = total_weight(widened(x), axes, Weighting(where, None))
    result = (wide - jnp.log(nonzero_divisor(number)).astype(wide.dtype)).astype(x.dtype)
    result = with_value_of_empty(Rows(axes), result, x, where, empty_value)
    return result if keepdims else jnp.squeeze(result, axes)


def _signed_logsumexp(
    axes: Axes, return_sign: bool, a: Array, b: Array | None, where: Array | None
) -> tuple[Array, Array]:
    """The logarithm and sign of a sum that may be negative or complex; differentiated by JAX's own rules.

    A factor of 0 is masked.
    """
    dtype = a.dtype if b is None else jnp.result_type(a, b)
    unmasked = jnp.ones_like(a, bool) if where is None else jnp.broadcast_to(where, a.shape)
    factor = jnp.ones_like(unmasked, dtype) if b is None else b.astype(dtype)
    wide, factor = widened(selected(a.astype(dtype), unmasked)), widened(factor)

    largest = jnp.max(selected(lax.stop_gradient(wide.real), unmasked, -jnp.inf), axes, keepdims=True, initial=-jnp.inf)
    shift = jnp.where(jnp.isfinite(largest), largest, 0)
    factor = selected(factor, unmasked)
    terms = selected(factor * jnp.exp(selected(wide - shift.astype(wide.dtype), unmasked)), unmasked)
    total = jnp.sum(terms, axes, keepdims=True)
    sign = jnp.sign(total).astype(dtype)
    # Where terms cancel, the derivative is infinite. Without terms, or if all exponents are -inf, it is 0.
    is_empty = (total == 0) & (largest == -jnp.inf)
    total = jnp.where(is_empty, 1, total)
    is_complex = jnp.iscomplexobj(total)
    log = jnp.log(total) if is_complex and not return_sign else jnp.log(jnp.abs(total))
    if not is_complex and not return_sign:
        log = jnp.where(total < 0, jnp.nan, log)
    result = jnp.where(is_empty, -jnp.inf, log + shift.astype(log.dtype))
    return result.astype(dtype if jnp.iscomplexobj(result) else jnp.finfo(dtype).dtype), sign


@jitted(0)
def wide_logsumexp(axes: Axes, x: Array, where: Array | None) -> Array:
    """The logsumexp in the wide dtype; the axes stay, with size 1."""
    return platforms.computed_once(softmaxes.wide_logsumexp(Rows(axes), *vary_alike((x, where))))


@jitted(0)
def _softmax(axes: Axes, x: Array, where: Array | None) -> Array:
    return softmaxes.softmax(Rows(axes), *vary_alike((x, where)))


@jitted(0)
def _log_softmax(axes: Axes, x: Array, where: Array | None) -> Array:
    return softmaxes.wide_log_softmax(Rows(axes), *vary_alike((x, where))).astype(x.dtype)
