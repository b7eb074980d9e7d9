"""Vectors of length 1."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from masksafe._core.arguments import as_float_array, canonical_axes
from masksafe._core.derivatives import with_reverse_rule
from masksafe._core.masks import as_mask_of, selected
from masksafe._core.precision import widened
from masksafe._core.row_blocks import axes_of_row, by_row_blocks
from masksafe._core.typing import Array, ArrayLike, Axes, Axis
from masksafe.normalization._arguments import as_epsilon

_OP = "l2_normalize"


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
    x = as_float_array(_OP, "x", x)
    axes = axes_of_row(canonical_axes(_OP, axis, x.ndim), x.ndim)
    y: Array = _normalize(_Config(axes, as_epsilon(_OP, epsilon)), x, as_mask_of(_OP, where, x.shape))
    return y


class _Config(NamedTuple):
    axes: Axes  # counted from the end
    epsilon: float


class _Divisor(NamedTuple):
    """Of each vector: it is multiplied by `unit`, a power of two, and by `inverse`."""

    unit: Array
    inverse: Array
    is_norm: Array  # otherwise it is epsilon


def _evaluate(config: _Config, x: Array, where: Array | None) -> tuple[Array, _Divisor]:
    def of_rows(x: Array, where: Array | None) -> tuple[tuple[Array, _Divisor], tuple[()]]:
        wide = selected(widened(x), where)
        divisor = _divisor(config, wide)
        return (_divided(wide, divisor, where).astype(x.dtype), divisor), ()

    (y, divisor), _ = by_row_blocks(of_rows, _leading_axes(config, x), x, where)
    return y, divisor


def _divisor(config: _Config, wide: Array) -> _Divisor:
    unit = _reciprocal_power_of_two(jnp.max(jnp.abs(wide), config.axes, keepdims=True, initial=0))
    squares = jnp.sum(jnp.square(wide * unit), config.axes, keepdims=True)
    relative_norm = jnp.sqrt(jnp.where(squares == 0, 1, squares))  # a root of 0 has no derivative
    is_norm = (squares != 0) & ~(relative_norm < config.epsilon * unit)
    of_epsilon = 1 / config.epsilon if config.epsilon > 0 else 0.0
    return _Divisor(jnp.where(is_norm, unit, 1), jnp.where(is_norm, 1 / relative_norm, of_epsilon), is_norm)


def _reciprocal_power_of_two(x: Array) -> Array:
    """A power of two close to 1 / x; NaN for an infinity, which makes the whole vector NaN."""
    _, exponent = jnp.frexp(lax.stop_gradient(x))
    most = jnp.finfo(x.dtype).maxexp - 3
    power = jnp.ldexp(jnp.ones_like(x), -jnp.clip(exponent, -most, most))
    return jnp.where(jnp.isinf(x), jnp.nan, power)


def _divided(wide: Array, divisor: _Divisor, where: Array | None) -> Array:
    return selected(wide * divisor.unit * divisor.inverse, where)


def _leading_axes(config: _Config, x: Array) -> int:
    return x.ndim + min(config.axes, default=0)


_Residuals = tuple[Array, Array | None, _Divisor]


def _forward(config: _Config, x: Array, where: Array | None) -> tuple[Array, _Residuals]:
    y, divisor = _evaluate(config, x, where)
    return y, (x, where, divisor)


def _reverse(config: _Config, residuals: _Residuals, d_y: Array) -> tuple[Array, None]:
    def of_rows(x: Array, d_y: Array, where: Array | None, divisor: _Divisor) -> tuple[Array, tuple[()]]:
        y, d_y = _divided(selected(widened(x), where), divisor, where), selected(widened(d_y), where)
        along = y * jnp.sum(d_y * y, config.axes, keepdims=True)
        d_x = (d_y - jnp.where(divisor.is_norm, along, 0)) * divisor.inverse * divisor.unit
        return selected(d_x, where).astype(x.dtype), ()

    x, where, divisor = residuals
    d_x, _ = by_row_blocks(of_rows, _leading_axes(config, x), x, d_y, where, divisor)
    return d_x, None


@with_reverse_rule(_forward, _reverse, static_argnums=(0,))
def _normalize(config: _Config, x: Array, where: Array | None) -> Array:
    return _evaluate(config, x, where)[0]
