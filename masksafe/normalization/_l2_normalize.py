"""Vectors of length 1."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from masksafe._core import arguments, derivatives, platforms, row_blocks, scaling, sharding
from masksafe._core.masks import as_mask_of, selected
from masksafe._core.precision import widened
from masksafe._core.public_op import public_op
from masksafe._core.typing import Array, ArrayLike, Axes, Axis

_OP = "l2_normalize"


@public_op
def l2_normalize(x: ArrayLike, axis: Axis | None = -1, where: ArrayLike | None = None, epsilon: float = 0.0) -> Array:
    r"""Divides the unmasked elements by their Euclidean norm; 0 at the masked ones.

    .. math::
      y_i = \frac{x_i}{\max(\lVert x \rVert_2, \varepsilon)}, \qquad
      \lVert x \rVert_2 = \sqrt{\sum_{j : \text{where}_j} x_j^2}

    A vector of zeros stays a vector of zeros and has a gradient of 0, with an `epsilon` of 0 as well. The elements are
    divided by the largest of them before they are squared, so that no square overflows or vanishes.

    Args:
      x: floats `[...]`.
      axis: the axis, or a tuple of axes, of a vector; None means all of them.
      where: booleans that broadcast to the shape of `x`, trailing axes first; False is masked, None masks nothing.
      epsilon: the smallest divisor, 0 or more.

    Returns:
      An array of the shape and dtype of `x`; float16 and bfloat16 are computed in float32 and rounded once. A vector
      with nothing left is 0. A NaN or infinity in an unmasked element makes the unmasked elements of its vector NaN.

    Raises:
      TypeError: if `x` is not a float array, `where` is not boolean, or `epsilon` is traced.
      ValueError: if `where` does not broadcast to the shape of `x`, `axis` is out of range, or `epsilon` is negative.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> x = jnp.array([[3.0, 4.0, jnp.nan], [0.0, 0.0, 0.0]])
      >>> print(masksafe.l2_normalize(x, where=~jnp.isnan(x)))
      [[0.6 0.8 0. ]
       [0.  0.  0. ]]

    References:
      `torch.nn.functional.normalize <https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.normalize.html>`_,
      which has the same formula, and an `eps` of 1e-12.
    """
    x = arguments.as_float_array(_OP, "x", x)
    axes = row_blocks.axes_of_row(arguments.canonical_axes(_OP, axis, x.ndim), x.ndim)
    return _normalize(_Config(axes, arguments.as_epsilon(_OP, epsilon)), x, as_mask_of(_OP, where, x.shape))


class _Config(NamedTuple):
    axes: Axes  # counted from the end
    epsilon: float


def _evaluate(config: _Config, x: Array, where: Array | None) -> Array:
    def of_rows(x: Array, where: Array | None) -> Array:
        wide = selected(widened(x), where)
        return _divided(wide, _divisor(config, wide), where).astype(x.dtype)

    def of_ordinary_rows(x: Array, squares: Array) -> Array:
        return (widened(x) * lax.rsqrt(squares)).astype(x.dtype)

    return _by_rows(config, of_rows, of_ordinary_rows, x, where)


# The reverse pass computes the norms again: a second result would keep XLA from fusing the forward pass. On an
# automatic mesh, which may split the vectors, that would be two more exchanges.

_Residuals = tuple[Array, Array | None, "_Divisor | None"]


def _forward(config: _Config, x: Array, where: Array | None) -> tuple[Array, _Residuals]:
    if not sharding.is_on_automatic_mesh(x):
        return _evaluate(config, x, where), (x, where, None)
    wide = selected(widened(x), where)
    divisor = _divisor(config, wide)
    return _divided(wide, divisor, where).astype(x.dtype), (x, where, divisor)


def _reverse(config: _Config, residuals: _Residuals, d_y: Array) -> tuple[Array, None]:
    def of_rows(x: Array, d_y: Array, divisor: _Divisor | None, where: Array | None) -> Array:
        wide, d_y = selected(widened(x), where), selected(widened(d_y), where)
        divisor = divisor or _divisor(config, wide)
        y = _divided(wide, divisor, where)
        along = jnp.where(divisor.is_norm, jnp.sum(d_y * y, config.axes, keepdims=True), 0)
        d_x = (d_y - y * along) * (divisor.inverse * divisor.unit)
        return selected(d_x, where).astype(x.dtype)

    def of_ordinary_rows(x: Array, d_y: Array, _: None, squares: Array) -> Array:
        inverse, d_y = lax.rsqrt(squares), widened(d_y)
        y = widened(x) * inverse
        d_x = (d_y - y * jnp.sum(d_y * y, config.axes, keepdims=True)) * inverse
        return d_x.astype(x.dtype)

    x, where, divisor = residuals
    return _by_rows(config, of_rows, of_ordinary_rows, x, d_y, divisor, where), None


_normalize = derivatives.with_reverse_rule(_forward, _reverse, static_argnums=(0,))(_evaluate)


class _Divisor(NamedTuple):
    """Of each vector: it is multiplied by `unit`, a power of two, and by `inverse`."""

    unit: Array
    inverse: Array
    is_norm: Array  # otherwise it is epsilon


def _divisor(config: _Config, wide: Array) -> _Divisor:
    largest = jnp.max(jnp.abs(lax.stop_gradient(wide)), config.axes, keepdims=True, initial=0)
    unit = scaling.reciprocal_power_of_two(largest)
    unit = jnp.where(jnp.isinf(largest), jnp.nan, unit)  # which makes the whole vector NaN
    squares = jnp.sum(jnp.square(wide * unit), config.axes, keepdims=True)
    relative_norm = jnp.sqrt(jnp.where(squares == 0, 1, squares))  # a root of 0 has no derivative
    is_norm = (squares != 0) & ~(relative_norm < config.epsilon * unit)
    of_epsilon = 1 / config.epsilon if config.epsilon > 0 else 0.0
    return _Divisor(jnp.where(is_norm, unit, 1), jnp.where(is_norm, 1 / relative_norm, of_epsilon), is_norm)


def _divided(wide: Array, divisor: _Divisor, where: Array | None) -> Array:
    return selected(wide * divisor.unit * divisor.inverse, where)


def _by_rows(
    config: _Config, of_rows: Callable[..., Array], of_ordinary_rows: Callable[..., Array], x: Array, *others: Any
) -> Array:
    """`of_rows(x, *others)`, the last of which is the mask.

    On a CPU, without a mask, `of_ordinary_rows(x, *others, squares)` in one pass that XLA fuses, unless the sum of
    squares of some row is so small or large that digits are lost.
    """
    leading = row_blocks.leading_axes(tuple(a % x.ndim for a in config.axes))
    exactly = functools.partial(row_blocks.map_row_blocks, of_rows, leading=leading)

    def on_cpu(*args: Any) -> Array:
        squares = platforms.unfused(jnp.sum(jnp.square(widened(args[0])), config.axes, keepdims=True))
        in_one_pass = lambda *args: of_ordinary_rows(*args[:-1], squares)  # noqa: E731
        return lax.cond(_all_ordinary(config, squares), in_one_pass, exactly, *args)  # type: ignore[no-any-return]

    elements = math.prod(x.shape[a] for a in config.axes)
    if others[-1] is not None or not sharding.may_loop(x) or not platforms.computes_rows_in_cache(elements, x.dtype):
        return exactly(x, *others)
    return platforms.on_cpu_or_elsewhere(on_cpu, of_rows, x, *others)


def _all_ordinary(config: _Config, squares: Array) -> Array:
    limits = jnp.finfo(squares.dtype)
    least = max(float(limits.tiny) / float(limits.eps), config.epsilon**2)
    return jnp.all((squares > least) & (squares < float(limits.max)))
