"""The largest and the smallest of the unmasked elements."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from masksafe._core import arguments, run_time
from masksafe._core.arguments import as_empty_value
from masksafe._core.extrema import extremum, over_devices
from masksafe._core.groups import with_value_of_empty
from masksafe._core.moments import Rows
from masksafe._core.public_op import public_op
from masksafe._core.sharding import AxisName
from masksafe._core.typing import Array, ArrayLike, Axis, jitted
from masksafe._reductions._arguments import Reduction, prepared


@public_op
def max(  # noqa: A001
    x: ArrayLike,
    axis: Axis | None = None,
    where: ArrayLike | None = None,
    *,
    axis_name: AxisName = None,
    keepdims: bool = False,
    empty_value: ArrayLike | None = None,
) -> Array:
    r"""The largest unmasked element; -inf, or `empty_value`, if there are none.

    .. math:: \max_{i : \text{where}_i} x_i

    Args:
      x: an array of a real dtype.
      axis: an axis, a tuple of axes, or None for all of them.
      where: booleans that broadcast to the shape of `x`; False is masked, None masks nothing.
      axis_name: the mesh axis, or a tuple of them, over whose devices the reduction extends as well, inside
        `jax.shard_map`; or the named axis of a `jax.vmap`. All elements of a device may be masked.
      keepdims: keep the reduced axes, with size 1.
      empty_value: the maximum where all is masked, on all devices: a number, or an array of shape `()`, that the dtype
        of the result holds. It has no gradient. Inside a model write 0, since the kernel of the next layer would be
        multiplied by the infinity, and have a NaN gradient. (NumPy's `initial` takes part in every maximum.)

    Returns:
      The maximum, of the dtype of `x`. If all is masked, it is `empty_value`, by default -inf, the lowest integer, or
      False. It is NaN if an unmasked element is, and so are then the gradients of all unmasked elements. Equal largest
      elements share the gradient; it is exactly 0 at masked ones.

    Raises:
      TypeError: if `where` is not boolean, `x` is complex, or its dtype does not hold `empty_value`.
      ValueError: if `where` does not broadcast to the shape of `x`, `axis` is out of range, or there is no axis of the
        name `axis_name`.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> x = jnp.array([[1.0, 3.0, jnp.nan], [jnp.nan, jnp.nan, jnp.nan]])
      >>> print(masksafe.max(x, axis=1, where=~jnp.isnan(x)))
      [  3. -inf]

    References:
      `jax.numpy.max <https://docs.jax.dev/en/latest/_autosummary/jax.numpy.max.html>`_, which takes a `where` only
      together with an `initial` value.
    """
    how, x, where, _ = prepared("max", x, axis, where, None, axis_name, keepdims)
    return _extremum(True, how, x, where, as_empty_value("max", empty_value, x.dtype))


@public_op
def min(  # noqa: A001
    x: ArrayLike,
    axis: Axis | None = None,
    where: ArrayLike | None = None,
    *,
    axis_name: AxisName = None,
    keepdims: bool = False,
    empty_value: ArrayLike | None = None,
) -> Array:
    r"""The smallest unmasked element; +inf, or `empty_value`, if there are none.

    .. math:: \min_{i : \text{where}_i} x_i

    Args:
      x: an array of a real dtype.
      axis: an axis, a tuple of axes, or None for all of them.
      where: booleans that broadcast to the shape of `x`; False is masked, None masks nothing.
      axis_name: as for `max`.
      keepdims: keep the reduced axes, with size 1.
      empty_value: the minimum where all is masked, as for `max`.

    Returns:
      The minimum, of the dtype of `x`. If all is masked, it is `empty_value`, by default +inf, the highest integer, or
      True. See `max`.

    Raises:
      TypeError: if `where` is not boolean, `x` is complex, or its dtype does not hold `empty_value`.
      ValueError: if `where` does not broadcast to the shape of `x`, `axis` is out of range, or there is no axis of the
        name `axis_name`.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> x = jnp.array([[1.0, 3.0, jnp.nan], [jnp.nan, jnp.nan, jnp.nan]])
      >>> print(masksafe.min(x, axis=1, where=~jnp.isnan(x)))
      [ 1. inf]

    References:
      `jax.numpy.min <https://docs.jax.dev/en/latest/_autosummary/jax.numpy.min.html>`_.
    """
    how, x, where, _ = prepared("min", x, axis, where, None, axis_name, keepdims)
    return _extremum(False, how, x, where, as_empty_value("min", empty_value, x.dtype))


@jitted(0, 1)
def _extremum(is_max: bool, how: Reduction, x: Array, where: Array | None, empty_value: Array | None) -> Array:
    rows, x, (where, _) = how.read(arguments.as_real_array(how.op, "x", x), where, None)
    extrema = extremum(_reduce, is_max, rows, x, where)
    return how.shaped(rows, with_value_of_empty(rows, extrema, x, where, empty_value))


def _reduce(is_max: bool, rows: Rows, x: Array, empty: float) -> Array:
    reduce = jnp.max if is_max else jnp.min
    here = reduce(x, rows.axes, keepdims=True, initial=np.asarray(empty, x.dtype))  # an int may be beyond int32
    if jnp.issubdtype(x.dtype, jnp.floating):  # of 1024x1024 XLA loses a NaN on a CPU (jax 0.10 and 0.12)
        here = jnp.where(run_time.any_of(jnp.isnan(x), rows.axes, keepdims=True), jnp.nan, here)
    return over_devices(is_max, here, rows.devices)
