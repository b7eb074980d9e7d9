"""Selection between values, and of the elements that a function sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from masksafe._core.arguments import as_array, as_operand, broadcast_shapes, check_broadcasts_to, holds, message
from masksafe._core.masks import as_mask, first_of
from masksafe._core.precision import promoted
from masksafe._core.public_op import public_op
from masksafe._core.sharding import is_random_key
from masksafe._core.typing import Array, ArrayLike, Pytree, jitted


@public_op
def keep(x: ArrayLike, *, where: ArrayLike, value: ArrayLike = 0) -> Array:
    r"""Keeps the unmasked elements of an array, and replaces the masked ones, whatever they hold.

    .. math::
      \text{out}_i = \begin{cases} x_i & \text{where}_i \\ \text{value}_i & \text{otherwise} \end{cases}

    It is a selection, not arithmetic: a NaN under the mask reaches neither value nor gradient, and a NaN elsewhere
    stays. One such line where padding enters a model makes the rest of the model safe.

    Args:
      x: the array, of any dtype.
      where: booleans that broadcast to the shape of `x`; False is replaced.
      value: what stands there instead, a number or an array that broadcasts to the shape of `x`.

    Returns:
      An array of the shape of `x`, of the dtype to which JAX promotes `x` and `value`; the default value is False for
      booleans. The gradient with respect to `x` is exactly 0 where the mask is False, and that with respect to `value`
      where it is True.

    Raises:
      TypeError: if `where` is not boolean, or the result cannot hold `value`.
      ValueError: if `where` or `value` does not broadcast to the shape of `x`.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> x = jnp.array([1.0, jnp.nan, jnp.nan])
      >>> print(masksafe.keep(x, where=jnp.array([True, False, True])))
      [ 1.  0. nan]

    References:
      `jax.numpy.where <https://docs.jax.dev/en/latest/_autosummary/jax.numpy.where.html>`_.
    """
    op = "keep"
    x, value, mask = as_array(op, "x", x), as_operand(op, "value", value), as_mask(op, "where", where)
    _check_value(op, x, value)
    check_broadcasts_to(op, "where", mask.shape, x.shape, "x")
    check_broadcasts_to(op, "value", np.shape(value), x.shape, "x")
    return _select(mask, x, False if x.dtype == jnp.bool_ and type(value) is int and value == 0 else value)


def _check_value(op: str, x: Array, value: Any) -> None:
    """Refuses random keys beside other elements, and a number that the result cannot hold."""
    is_number = not isinstance(value, jax.Array)
    has_keys, is_of_keys = is_random_key(x), not is_number and is_random_key(value)
    if has_keys != is_of_keys:
        expected = "random keys, as x has" if has_keys else "a number or an array of numbers, as x is"
        raise TypeError(message(op, "value", f"value {value}" if is_number else f"dtype {value.dtype}", expected))
    if is_number and value and not holds(dtype := promoted(x, value), value):
        raise TypeError(message(op, "value", f"value {value}", f"a number that {dtype} holds"))


@public_op
def mask_where(mask: ArrayLike, x: ArrayLike, y: ArrayLike) -> Array:
    r"""Replaces the masked elements of an array, whatever they hold.

    .. math::
      \text{out}_i = \begin{cases} y_i & \text{mask}_i \\ x_i & \text{otherwise} \end{cases}

    This is a selection, not arithmetic: a NaN under the mask reaches neither value nor gradient, and a NaN elsewhere
    stays. The three arguments broadcast together. `keep` has the other polarity, that of `where` in every other op.

    Args:
      mask: booleans, True where `x` is to be replaced.
      x: the array, of any dtype.
      y: the replacement, an array or a scalar.

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

    References:
      `torch.Tensor.masked_fill <https://docs.pytorch.org/docs/stable/generated/torch.Tensor.masked_fill.html>`_.
    """
    op = "mask_where"
    mask, x, y = as_mask(op, "mask", mask), as_operand(op, "x", x), as_operand(op, "y", y)
    broadcast_shapes(op, mask=mask.shape, x=np.shape(x), y=np.shape(y))
    return _select(mask, y, x)


@public_op
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

    The usual `jnp.where(x > 0, jnp.log(x), 0)` has the right value but a NaN gradient, since `log` also sees the
    elements that are not selected. Here `f1` never sees an element where `cond` is False: it sees the first element
    where `cond` is True instead; likewise for `f2` with the roles swapped. This protects the value, the gradient with
    respect to `args`, and the gradient with respect to anything that `f1` closes over. If `cond` is False everywhere,
    `f1` sees 1 everywhere; if it is not defined at 1, gradients with respect to what it closes over can be NaN.

    Args:
      cond: booleans, broadcast with `args`.
      args: an array, or a tuple of arrays for a function of several arguments.
      f1: elementwise function of `args`, applied where `cond` is True.
      f2: elementwise function of `args`, applied where `cond` is False.
      fill_value: the result where `cond` is False, in place of `f2`.

    Returns:
      An array of the common shape of `cond` and `args`, of the dtype to which JAX promotes the two results.

    Raises:
      TypeError: if `cond` is not boolean, `f1` or `f2` is no function, or not exactly one of `f2` and `fill_value` is
        given.
      ValueError: if the shapes do not broadcast, or a function returns neither a number nor an array of the common
        shape, as one that is not elementwise does.

    Example:
      >>> import jax, jax.numpy as jnp, masksafe
      >>> x = jnp.array([4.0, 0.0, -1.0])
      >>> log = lambda x: masksafe.apply_where(x > 0, x, jnp.log, fill_value=0.0)
      >>> with jnp.printoptions(precision=4):
      ...     print(log(x), jax.grad(lambda x: log(x).sum())(x))
      [1.3863 0.     0.    ] [0.25 0.   0.  ]

    References:
      `array_api_extra.apply_where
      <https://data-apis.org/array-api-extra/generated/array_api_extra.apply_where.html>`_, whose signature it has.
    """
    op = "apply_where"
    if (f2 is None) == (fill_value is None):
        found = "neither" if f2 is None else "both"
        raise TypeError(message(op, "f2 or fill_value", found, "exactly one of them"))
    if not callable(f1):
        raise TypeError(message(op, "f1", f"type {type(f1).__name__}", "a function"))
    if f2 is not None and not callable(f2):
        hint = f"A constant is written fill_value={f2}." if jnp.ndim(f2) == 0 else "For an array use fill_value."
        raise TypeError(message(op, "f2", f"type {type(f2).__name__}", "a function", hint))
    cond = as_mask(op, "cond", cond)
    operands = [as_operand(op, "args", a) for a in (args if isinstance(args, tuple) else (args,))]
    shape = broadcast_shapes(op, cond=cond.shape, **{f"args[{i}]": np.shape(a) for i, a in enumerate(operands)})
    args_of_f1, args_of_f2 = _inputs(f2 is not None, cond, operands)
    if f2 is not None:
        other = _as_elementwise(op, "f2", f2(*args_of_f2), shape)
    else:
        other = as_operand(op, "fill_value", fill_value)
        check_broadcasts_to(op, "fill_value", np.shape(other), shape, "cond and args together")
    return _select(cond, _as_elementwise(op, "f1", f1(*args_of_f1), shape), other)


def _as_elementwise(op: str, name: str, result: Pytree, shape: tuple[int, ...]) -> Array:
    """The result of a function, which has to be a number or to have the shape of its arguments."""
    if not isinstance(result, jax.Array) and np.ndim(result) == 0:
        return jnp.broadcast_to(as_array(op, f"the result of {name}", result), shape)
    array = as_array(op, f"the result of {name}", result)
    if array.shape != shape:
        expected = f"{shape}, that of cond and args together, from an elementwise function"
        hint = f"A constant is written jnp.full_like(x, c){', or fill_value=c' if name == 'f2' else ''}."
        raise ValueError(message(op, name, f"a result of shape {array.shape}", expected, hint))
    return array


# In eager code each of these is one call, rather than one for each operation.


@jitted()
def _select(cond: Array, x: Pytree, y: Pytree) -> Array:
    return jnp.where(cond, x, y)


@jitted(0)
def _inputs(both: bool, cond: Array, operands: list[Array]) -> tuple[list[Array], list[Array]]:
    """The arguments of the first function and, if there are two, those of the second."""
    cond, *arrays = jnp.broadcast_arrays(cond, *operands)
    return _fill_where_false(cond, arrays), _fill_where_false(~cond, arrays) if both else []


def _fill_where_false(cond: Array, arrays: list[Array]) -> list[Array]:
    """`arrays` with a stand-in where `cond` is False: the element at the first True, or 1 if there is none."""
    first, is_first = first_of(cond)

    def fill(array: Array) -> Array:
        picked = jnp.where(is_first, lax.stop_gradient(array), jnp.zeros((), array.dtype))
        stand_in = jnp.where(first < cond.size, jnp.sum(picked, dtype=array.dtype), jnp.ones((), array.dtype))
        return jnp.where(cond, array, stand_in)

    return [fill(array) for array in arrays]
