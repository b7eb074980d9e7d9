"""Vectors of length 1."""

from __future__ import annotations

from masksafe._core import arguments
from masksafe._core.public_op import public_op
from masksafe._core.typing import Array, ArrayLike, Axis
from masksafe.normalization._arguments import NormInputs
from masksafe.normalization._layer_norm import Call, normalize_rows

_OP = "l2_normalize"


@public_op
def l2_normalize(x: ArrayLike, axis: Axis | None = -1, where: ArrayLike | None = None, epsilon: float = 0.0) -> Array:
    r"""Divides the unmasked elements by their Euclidean norm; 0 at the masked ones.

    .. math::
      y_i = \frac{x_i}{\max(\lVert x \rVert_2, \varepsilon)}, \qquad
      \lVert x \rVert_2 = \sqrt{\sum_{j : \text{where}_j} x_j^2}

    A vector of zeros stays a vector of zeros and has a gradient of 0, with an `epsilon` of 0 as well. Squares may
    overflow or vanish, in float32 beyond about 1e19 and below about 1e-19.

    Args:
      x: floats `[...]`.
      axis: the axis, or a tuple of axes, of a vector; None means all of them.
      where: booleans that broadcast to the shape of `x`, trailing axes first; False is masked, None masks nothing.
      epsilon: the smallest divisor, 0 or more.

    Returns:
      An array of the shape and dtype of `x`; float16 and bfloat16 are computed in float32 and rounded once. A fully
      masked vector is 0. A NaN or infinity in an unmasked element makes the unmasked elements of its vector NaN.

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
    where = arguments.if_given(arguments.as_array, _OP, "where", where)
    call = Call.of(_OP, x, axis, None, arguments.as_epsilon(_OP, epsilon), "length")
    return normalize_rows(call, NormInputs(x, where=where))
