"""Selection, and the reductions whose masked elements are gone and whose empty case is 0."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from masksafe._core.arguments import as_array, broadcast_shapes, check_broadcasts_to, message
from masksafe._core.masks import as_mask, first_of
from masksafe._core.typing import Array, ArrayLike


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
    first, is_first = first_of(cond)

    def fill(array: Array) -> Array:
        picked = jnp.where(is_first, lax.stop_gradient(array), jnp.zeros((), array.dtype))
        stand_in = jnp.where(first < cond.size, jnp.sum(picked, dtype=array.dtype), jnp.ones((), array.dtype))
        return jnp.where(cond, array, stand_in)

    return [fill(array) for array in arrays]
