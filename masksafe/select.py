"""Selection, and the reductions whose masked elements are gone and whose empty case is 0."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from masksafe import _moments as moments
from masksafe._blocks import axes_of_row, by_row_blocks, leading_axes
from masksafe._errors import (
    as_array,
    as_mask,
    as_mask_of,
    as_number,
    broadcast_shapes,
    canonical_axes,
    check_broadcasts_to,
    message,
)
from masksafe._moments import float_dtype, selected, widened
from masksafe._rules import differentiable
from masksafe._typing import Array, ArrayLike, Axis


def mask_where(mask: ArrayLike, x: ArrayLike, y: ArrayLike) -> Array:
    r"""Replaces the masked elements of an array, whatever they hold.

    .. math::
      \text{out}_i = \begin{cases} y_i & \text{mask}_i \\ x_i & \text{otherwise} \end{cases}

    It is a selection, not arithmetic: a NaN under the mask is gone from the value and from the
    gradient, and a NaN elsewhere stays.

    Args:
      mask: booleans, True where `x` is to be replaced.
      x: the array, of any dtype.
      y: what takes the place of the masked elements, an array or a scalar.

    The three broadcast together.

    Returns:
      An array of the common shape, of the dtype to which JAX promotes `x` and `y`. The gradient with
      respect to `x` is exactly 0 where the mask is True, and that with respect to `y` where it is False.

    Raises:
      TypeError: if `mask` is not boolean.
      ValueError: if the shapes do not broadcast.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> x = jnp.array([1.0, jnp.nan, jnp.nan])
      >>> print(masksafe.mask_where(jnp.array([False, True, False]), x, 0.0))
      [ 1.  0. nan]
    """
    op = "mask_where"
    mask, x, y = as_mask(op, "mask", mask), as_array(op, "x", x), as_array(op, "y", y)
    broadcast_shapes(op, mask=mask.shape, x=x.shape, y=y.shape)
    return jnp.where(mask, y, x)


def apply_where(
    cond: ArrayLike,
    args: ArrayLike | tuple[ArrayLike, ...],
    f1: Callable[..., Array],
    f2: Callable[..., Array] | None = None,
    *,
    fill_value: ArrayLike | None = None,
) -> Array:
    r"""Applies an elementwise function only where it is defined.

    .. math::
      \text{out}_i = \begin{cases} f_1(\text{args}_i) & \text{cond}_i \\
                                   f_2(\text{args}_i) \text{ or fill\_value} & \text{otherwise} \end{cases}

    The usual `jnp.where(x > 0, jnp.log(x), 0)` has the right value and a NaN gradient, since `log` saw
    the other elements too. Here `f1` never sees an element where `cond` is False: the first element
    where it is True stands in for those, and the same the other way round for `f2`. So neither the value,
    nor the gradient with respect to `args`, nor that with respect to anything that `f1` closes over can be
    poisoned. If `cond` is False everywhere, `f1` sees 1 everywhere; then only a gradient with respect to
    what `f1` closes over can be NaN, if `f1` is not defined at 1.

    Args:
      cond: booleans, broadcast with `args`.
      args: an array, or a tuple of arrays for a function of several arguments.
      f1: elementwise function of `args`, for where `cond` is True.
      f2: elementwise function of `args`, for where `cond` is False.
      fill_value: the result where `cond` is False, in place of `f2`.

    Returns:
      An array of the common shape of `cond` and `args`, of the dtype to which JAX promotes the two results.

    Raises:
      TypeError: if `cond` is not boolean, or unless exactly one of `f2` and `fill_value` is given.
      ValueError: if the shapes do not broadcast.

    Example:
      >>> import jax, jax.numpy as jnp, masksafe
      >>> x = jnp.array([4.0, 0.0, -1.0])
      >>> log = lambda x: masksafe.apply_where(x > 0, x, jnp.log, fill_value=0.0)
      >>> with jnp.printoptions(precision=4):
      ...     print(log(x), jax.grad(lambda x: log(x).sum())(x))
      [1.3863 0.     0.    ] [0.25 0.   0.  ]

    References:
      The signature is that of `array_api_extra.apply_where
      <https://data-apis.org/array-api-extra/generated/array_api_extra.apply_where.html>`_.
    """
    op = "apply_where"
    if (f2 is None) == (fill_value is None):
        found = "neither" if f2 is None else "both"
        raise TypeError(message(op, "f2 or fill_value", found, "exactly one of them"))
    if f2 is not None and not callable(f2):
        hint = f"A constant is written fill_value={f2}." if jnp.ndim(f2) == 0 else "An array goes to fill_value."
        raise TypeError(message(op, "f2", f"type {type(f2).__name__}", "a function", hint))
    cond = as_mask(op, "cond", cond)
    arrays = [as_array(op, "args", a) for a in (args if isinstance(args, tuple) else (args,))]
    shape = broadcast_shapes(op, cond=cond.shape, **{f"args[{i}]": a.shape for i, a in enumerate(arrays)})
    cond, *arrays = (jnp.broadcast_to(a, shape) for a in (cond, *arrays))
    if f2 is not None:
        other = f2(*_only_where(~cond, arrays))
    else:
        other = as_array(op, "fill_value", fill_value)
        check_broadcasts_to(op, "fill_value", other.shape, shape, "cond and args together")
    return jnp.where(cond, f1(*_only_where(cond, arrays)), other)


def _only_where(cond: Array, arrays: list[Array]) -> list[Array]:
    """`arrays` with their elements at the first True of `cond` in place of those where it is False."""
    first, is_first = moments.first_of(cond)

    def fill(array: Array) -> Array:
        picked = jnp.where(is_first, lax.stop_gradient(array), jnp.zeros((), array.dtype))
        stand_in = jnp.where(first < cond.size, jnp.sum(picked, dtype=array.dtype), jnp.ones((), array.dtype))
        return jnp.where(cond, array, stand_in)

    return [fill(array) for array in arrays]


def sum(x: ArrayLike, axis: Axis | None = None, where: ArrayLike | None = None, *, keepdims: bool = False) -> Array:  # noqa: A001
    r"""The sum of the unmasked elements; 0 if there are none.

    .. math:: \sum_{i : \text{where}_i} x_i

    Args:
      x: the array.
      axis: an axis, a tuple of axes, or None for all of them.
      where: booleans that broadcast to the shape of `x`; False is masked, None masks nothing.
      keepdims: keep the reduced axes, with size 1.

    Returns:
      The sum, of the dtype that `jnp.sum` gives; float16 and bfloat16 are accumulated in float32. The
      gradient with respect to a masked element is exactly 0.

    Raises:
      TypeError: if `where` is not boolean.
      ValueError: if `where` does not broadcast to the shape of `x`, or `axis` is out of range.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> x = jnp.array([1.0, 2.0, jnp.nan])
      >>> print(masksafe.sum(x, where=jnp.array([True, True, False])))
      3.0
    """
    x, axes, where = _reduction_arguments("sum", x, axis, where)
    return jnp.sum(selected(x, where), axes, keepdims=keepdims)


def mean(x: ArrayLike, axis: Axis | None = None, where: ArrayLike | None = None, *, keepdims: bool = False) -> Array:
    r"""The mean of the unmasked elements; 0 if there are none.

    .. math:: \frac{1}{n} \sum_{i : \text{where}_i} x_i, \qquad n = \max(1, |\{i : \text{where}_i\}|)

    It replaces `jnp.mean(x, where=mask)`, which is NaN for an empty mask, and `x.sum() / mask.sum()`,
    which is 0/0 there. For a loss over padded tokens write `masksafe.mean(loss, where=mask)`. Over an
    array sharded across devices it is the mean of the whole array, however uneven the masks are.

    Args:
      x: the array; integers and booleans are averaged as floats.
      axis: an axis, a tuple of axes, or None for all of them.
      where: booleans that broadcast to the shape of `x`; False is masked, None masks nothing.
      keepdims: keep the reduced axes, with size 1.

    Returns:
      The mean, of the dtype that `jnp.mean` gives; float16 and bfloat16 are accumulated in float32 and
      rounded once. The gradient with respect to a masked element is exactly 0.

    Raises:
      TypeError: if `where` is not boolean.
      ValueError: if `where` does not broadcast to the shape of `x`, or `axis` is out of range.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> loss = jnp.array([[1.0, 3.0, jnp.nan], [jnp.nan, jnp.nan, jnp.nan]])
      >>> mask = jnp.array([[True, True, False], [False, False, False]])
      >>> print(masksafe.mean(loss, axis=1, where=mask), masksafe.mean(loss, where=mask))
      [2. 0.] 2.0
    """
    x, axes, where = _reduction_arguments("mean", x, axis, where)
    average = moments.average(widened(selected(x, where)), axes, where)
    return (average if keepdims else jnp.squeeze(average, axes)).astype(float_dtype(x))


def var(
    x: ArrayLike,
    axis: Axis | None = None,
    where: ArrayLike | None = None,
    *,
    correction: float = 0,
    keepdims: bool = False,
) -> Array:
    r"""The variance of the unmasked elements; 0 if there are none. See `var_mean`.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> print(masksafe.var(jnp.array([1.0, 3.0, jnp.inf]), where=jnp.array([True, True, False])))
      1.0
    """
    return _var_mean("var", x, axis, where, correction, keepdims)[0]


def var_mean(
    x: ArrayLike,
    axis: Axis | None = None,
    where: ArrayLike | None = None,
    *,
    correction: float = 0,
    keepdims: bool = False,
) -> tuple[Array, Array]:
    r"""The variance and the mean of the unmasked elements; both 0 if there are none.

    .. math::
      \mu = \frac{1}{n} \sum_{i : \text{where}_i} x_i, \qquad
      \sigma^2 = \frac{1}{n - \text{correction}} \sum_{i : \text{where}_i} (x_i - \mu)^2,
      \qquad n = |\{i : \text{where}_i\}|

    The variance is the mean of squared deviations from the mean, never :math:`E[x^2] - E[x]^2`, which
    cancels when the mean is large.

    Args:
      x: the array; integers and booleans are taken as floats.
      axis: an axis, a tuple of axes, or None for all of them.
      where: booleans that broadcast to the shape of `x`; False is masked, None masks nothing.
      correction: what is subtracted from the count; 1 is the unbiased estimate. The variance is 0 where
        the count does not exceed it.
      keepdims: keep the reduced axes, with size 1.

    Returns:
      `(var, mean)`, of the dtypes that `jnp.var` and `jnp.mean` give; float16 and bfloat16 are
      accumulated in float32 and rounded once. Gradients with respect to masked elements are exactly 0.

    Raises:
      TypeError: if `where` is not boolean.
      ValueError: if `where` does not broadcast to the shape of `x`, or `axis` is out of range.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> x = jnp.array([[1.0, 3.0, jnp.nan], [jnp.nan, jnp.nan, jnp.nan]])
      >>> var, mean = masksafe.var_mean(x, axis=1, where=~jnp.isnan(x))
      >>> print(var, mean)
      [1. 0.] [2. 0.]
    """
    return _var_mean("var_mean", x, axis, where, correction, keepdims)


def _var_mean(
    op: str, x: ArrayLike, axis: Axis | None, where: ArrayLike | None, correction: float, keepdims: bool
) -> tuple[Array, Array]:
    x, axes, where = _reduction_arguments(op, x, axis, where)
    dtype = float_dtype(x)
    x = x if x.dtype == dtype else x.astype(dtype)  # even a conversion that changes nothing alarms jax_debug_nans
    variance, mean = _variance_and_mean((axes, as_number(op, "correction", correction)), x, where)
    if not keepdims:
        variance, mean = jnp.squeeze(variance, axes), jnp.squeeze(mean, axes)
    return variance.astype(jnp.finfo(dtype).dtype), mean.astype(dtype)


_AxesAndCorrection = tuple[tuple[int, ...], float]


def _variance_and_mean_forward(
    config: _AxesAndCorrection, x: Array, where: Array | None
) -> tuple[tuple[Array, Array], tuple[Array, Array | None, moments.Mean]]:
    variance, mean = _evaluate_variance_and_mean(config, x, where)
    return (variance, moments.total(mean)), (x, where, mean)


@functools.partial(jax.jit, static_argnums=0)
def _variance_and_mean_reverse(
    config: _AxesAndCorrection,
    residuals: tuple[Array, Array | None, moments.Mean],
    cotangents: tuple[Array, Array],
) -> tuple[Array, None]:
    (axes, correction), (x, where, mean), (d_variance, d_mean) = config, residuals, cotangents
    wide = selected(widened(x), where)
    n = moments.count(wide, axes, where)
    freedom = jnp.where(n > correction, n - correction, jnp.inf)
    slope = 2 * jnp.conj(moments.deviations(wide, mean, where))  # of the sum of squares
    d_x = slope * (d_variance / freedom) + d_mean / jnp.maximum(n, 1)
    return selected(d_x, where).astype(x.dtype), None


@differentiable(_variance_and_mean_forward, _variance_and_mean_reverse, static_argnums=(0,))
def _variance_and_mean(config: _AxesAndCorrection, x: Array, where: Array | None) -> tuple[Array, Array]:
    """Both with the reduced axes kept, in the dtype in which they are accumulated."""
    variance, mean = _evaluate_variance_and_mean(config, x, where)
    return variance, moments.total(mean)


@functools.partial(jax.jit, static_argnums=0)
def _evaluate_variance_and_mean(
    config: _AxesAndCorrection, x: Array, where: Array | None
) -> tuple[Array, moments.Mean]:
    axes, correction = config
    row_axes = axes_of_row(axes, x.ndim)

    def of_rows(x: Array, where: Array | None) -> tuple[tuple[Array, moments.Mean], tuple[()]]:
        wide = selected(widened(x), where)
        mean = moments.mean(wide, row_axes, where)
        squares = moments.squares(moments.deviations(wide, mean, where), row_axes)
        freedom = moments.count(wide, row_axes, where) - correction
        variance = squares / jnp.where(freedom > 0, freedom, 1)
        # The product is 0, or NaN where an unmasked element is NaN or infinite: that is not to be hidden.
        variance = jnp.where((freedom > 0) & ~moments.is_rounding(variance, mean), variance, 0 * variance)
        return (variance, mean), ()

    (variance, mean), _ = by_row_blocks(of_rows, leading_axes(axes), x, where)
    return variance, mean


def _reduction_arguments(
    op: str, x: ArrayLike, axis: Axis | None, where: ArrayLike | None
) -> tuple[Array, tuple[int, ...], Array | None]:
    """The array, its canonical axes, and the mask at the array's rank but not at its shape."""
    x = as_array(op, "x", x)
    return x, canonical_axes(op, axis, x.ndim), as_mask_of(op, where, x.shape)
