"""Losses of real-valued predictions, and the cosine of the angle between vectors."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from masksafe._core import arguments, label_checks, platforms, row_blocks, run_time
from masksafe._core.derivatives import elementwise, product
from masksafe._core.masks import read_mask, selected
from masksafe._core.precision import promoted
from masksafe._core.public_op import public_op
from masksafe._core.typing import Array, ArrayLike, Arrays, Axes, Axis, Pytree, jitted
from masksafe.losses._elementwise import broadcast_alike, elementwise_loss


@public_op
def squared_error(predictions: ArrayLike, targets: ArrayLike | None = None, *, where: ArrayLike | None = None) -> Array:
    r"""The squared error of each prediction.

    .. math:: \ell = (p - t)^2

    Args:
      predictions: floats `[...]`.
      targets: of the same shape; None is 0 everywhere.
      where: booleans of the rank of `predictions`; False masks an element. A mask of lower rank is refused:
        to mask rows write `where[..., None]`.

    Returns:
      The losses `[...]`, of the dtype to which JAX promotes both; 0 where masked, with gradients of exactly 0.

    Raises:
      TypeError: if `predictions` are not floats or `where` is not boolean.
      ValueError: if the shapes differ, or `where` is of another rank.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> predictions, mask = jnp.array([3.0, jnp.nan]), jnp.array([True, False])
      >>> print(masksafe.losses.squared_error(predictions, jnp.ones(2), where=mask))
      [4. 0.]

    References:
      `optax.losses.squared_error
      <https://optax.readthedocs.io/en/latest/api/losses.html#optax.losses.squared_error>`_.
    """
    return _error_loss("squared_error", predictions, targets, where, _squared_error, same_shape=True)


@public_op
def l2_loss(predictions: ArrayLike, targets: ArrayLike | None = None, *, where: ArrayLike | None = None) -> Array:
    r"""Half of the squared error of each prediction.

    .. math:: \ell = \frac{1}{2} (p - t)^2

    Args:
      predictions: floats `[...]`.
      targets: of the same shape; None is 0 everywhere.
      where: booleans of the rank of `predictions`; False masks an element. A mask of lower rank is refused:
        to mask rows write `where[..., None]`.

    Returns:
      The losses `[...]`, of the dtype to which JAX promotes both; 0 where masked, with gradients of exactly 0.

    Raises:
      TypeError: if `predictions` are not floats or `where` is not boolean.
      ValueError: if the shapes differ, or `where` is of another rank.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> errors, where = jnp.array([3.0, jnp.nan]), jnp.array([True, False])
      >>> print(masksafe.losses.l2_loss(errors, where=where))
      [4.5 0. ]

    References:
      `optax.losses.l2_loss <https://optax.readthedocs.io/en/latest/api/losses.html#optax.losses.l2_loss>`_.
    """
    return _error_loss("l2_loss", predictions, targets, where, _l2, same_shape=True)


@public_op
def huber_loss(
    predictions: ArrayLike, targets: ArrayLike | None = None, *, delta: ArrayLike = 1.0, where: ArrayLike | None = None
) -> Array:
    r"""The Huber loss of each prediction: quadratic for small errors, linear for large ones.

    .. math::
      \ell = \begin{cases} e^2 / 2 & |e| \le \delta \\ \delta (|e| - \delta / 2) & \text{otherwise} \end{cases},
      \qquad e = p - t

    Args:
      predictions: floats `[...]`.
      targets: they broadcast with `predictions`; None is 0 everywhere.
      delta: the error at which the linear part begins, above 0 and finite; a number, or an array that broadcasts with
        `predictions`.
      where: booleans of the rank of the loss; False masks an element. A mask of lower rank is refused:
        to mask rows write `where[..., None]`.

    Returns:
      The losses `[...]`, of the dtype to which JAX promotes all three; 0 where masked, with gradients of exactly 0.

    Raises:
      TypeError: if `predictions` are not floats or `where` is not boolean.
      ValueError: if the shapes do not broadcast, `where` is of another rank, or the number `delta` is not above 0 and
        finite; for an unmasked element of an array `delta`, while label checks are on.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> errors, where = jnp.array([0.5, 3.0, jnp.nan]), jnp.array([True, True, False])
      >>> print(masksafe.losses.huber_loss(errors, where=where))
      [0.125 2.5   0.   ]

    References:
      `optax.losses.huber_loss <https://optax.readthedocs.io/en/latest/api/losses.html#optax.losses.huber_loss>`_.
    """
    return _error_loss("huber_loss", predictions, targets, where, _huber, delta=delta)


@public_op
def log_cosh(predictions: ArrayLike, targets: ArrayLike | None = None, *, where: ArrayLike | None = None) -> Array:
    r"""The logarithm of the hyperbolic cosine of each error: about :math:`e^2/2`, and :math:`|e| - \log 2` if large.

    .. math:: \ell = \log \cosh (p - t)

    Args:
      predictions: floats `[...]`.
      targets: they broadcast with `predictions`; None is 0 everywhere.
      where: booleans of the rank of the loss; False masks an element. A mask of lower rank is refused:
        to mask rows write `where[..., None]`.

    Returns:
      The losses `[...]`, of the dtype to which JAX promotes both; 0 where masked, with gradients of exactly 0.

    Raises:
      TypeError: if `predictions` are not floats or `where` is not boolean.
      ValueError: if the shapes do not broadcast, or `where` is of another rank.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> errors, where = jnp.array([1.0, jnp.nan]), jnp.array([True, False])
      >>> with jnp.printoptions(precision=4):
      ...     print(masksafe.losses.log_cosh(errors, where=where))
      [0.4338 0.    ]

    References:
      `optax.losses.log_cosh <https://optax.readthedocs.io/en/latest/api/losses.html#optax.losses.log_cosh>`_.

      Chen et al., "Log Hyperbolic Cosine Loss Improves Variational Auto-Encoder", 2019.
    """
    loss = _error_loss("log_cosh", predictions, targets, where, _log_cosh)
    return loss.astype(loss.dtype)  # never weakly typed, as in optax


@public_op
def cosine_similarity(
    predictions: ArrayLike,
    targets: ArrayLike,
    *,
    epsilon: ArrayLike = 0.0,
    axis: Axis | None = -1,
    where: ArrayLike | None = None,
) -> Array:
    r"""The cosine of the angle between two vectors.

    .. math:: \cos = \sum_i \frac{p_i}{\lVert p \rVert} \frac{t_i}{\lVert t \rVert}, \qquad
      \lVert x \rVert = \sqrt{\max(\textstyle\sum_i x_i^2, \epsilon)}

    Args:
      predictions: floats `[..., dim]`.
      targets: floats that broadcast with `predictions`.
      epsilon: the least squared norm. With 0, the scale of the vectors has no effect, as long as their
        squares neither overflow nor vanish.
      axis: the axis or axes of the vectors; None means all axes.
      where: booleans that broadcast to the common shape of both; False masks an element. A mask of
        lower rank is aligned with the last axes, as in NumPy: to mask rows write `where[..., None]`.

    Returns:
      The cosines `[...]`, of the dtype to which JAX promotes both. They are 0 where all is masked, and for a vector
      of zeros, which has no direction; its gradient is 0 if `epsilon` is 0. Masked elements have gradients of exactly
      0.

    Raises:
      TypeError: if the vectors are not floats or `where` is not boolean.
      ValueError: if the shapes do not broadcast or `axis` is out of range.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> a, b = jnp.array([[3.0, 4.0], [0.0, 0.0]]), jnp.array([[4.0, 3.0], [1.0, 0.0]])
      >>> with jnp.printoptions(precision=4):
      ...     print(masksafe.losses.cosine_similarity(a, b))
      [0.96 0.  ]

    References:
      `optax.losses.cosine_similarity
      <https://optax.readthedocs.io/en/latest/api/losses.html#optax.losses.cosine_similarity>`_.
    """
    return _cosine("cosine_similarity", predictions, targets, epsilon, axis, where)


@public_op
def cosine_distance(
    predictions: ArrayLike,
    targets: ArrayLike,
    *,
    epsilon: ArrayLike = 0.0,
    axis: Axis | None = -1,
    where: ArrayLike | None = None,
) -> Array:
    r"""One minus the cosine of the angle between two vectors.

    .. math:: \ell = 1 - \cos(p, t)

    Args:
      predictions: floats `[..., dim]`.
      targets: floats that broadcast with `predictions`.
      epsilon: the least squared norm. With 0, the scale of the vectors has no effect, as long as their
        squares neither overflow nor vanish.
      axis: the axis or axes of the vectors; None means all axes.
      where: booleans that broadcast to the common shape of both; False masks an element. A mask of
        lower rank is aligned with the last axes, as in NumPy: to mask rows write `where[..., None]`.

    Returns:
      The distances `[...]`, of the dtype to which JAX promotes both; 0 where all is masked, and 1 for a vector of
      zeros. Masked elements have gradients of exactly 0.

    Raises:
      TypeError: if the vectors are not floats or `where` is not boolean.
      ValueError: if the shapes do not broadcast or `axis` is out of range.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> a = jnp.array([[3.0, 4.0], [jnp.nan, 0.0]])
      >>> b = jnp.array([[-4.0, 3.0], [1.0, 0.0]])
      >>> where = jnp.array([[True], [False]])
      >>> print(masksafe.losses.cosine_distance(a, b, where=where).round(4))
      [1. 0.]

    References:
      `optax.losses.cosine_distance
      <https://optax.readthedocs.io/en/latest/api/losses.html#optax.losses.cosine_distance>`_.
    """
    return _cosine("cosine_distance", predictions, targets, epsilon, axis, where)


def _error_loss(
    op: str,
    predictions: ArrayLike,
    targets: ArrayLike | None,
    where: ArrayLike | None,
    loss: Callable[..., Array],
    *,
    same_shape: bool = False,
    **positive: ArrayLike,
) -> Array:
    """`loss` of each prediction, of its target if there are targets, and of other arguments, which must be positive."""
    arrays: dict[str, Pytree] = {"predictions": arguments.as_float_array(op, "predictions", predictions)}
    shape = arrays["predictions"].shape
    if targets is not None:
        arrays["targets"] = arguments.as_real_array(op, "targets", targets)
        if same_shape:
            arguments.check_shape(op, "targets", arrays["targets"].shape, shape, "that of predictions")
    arrays |= {name: arguments.as_real_operand(op, name, x) for name, x in positive.items()}
    return elementwise_loss(op, where, tuple(arrays), loss, ranges=dict.fromkeys(positive, _POSITIVE), **arrays)


_POSITIVE = label_checks.Range(lambda x: (x > 0) & (x < math.inf), "above 0 and finite")


def _error(predictions: Array, targets: Array | None) -> Array:
    return predictions if targets is None else predictions - targets


def _squared_error(predictions: Array, targets: Array | None = None) -> Array:
    return jnp.square(_error(predictions, targets))


def _l2(predictions: Array, targets: Array | None = None) -> Array:
    return 0.5 * _squared_error(predictions, targets)


def _huber(predictions: Array, targets: Array | None = None, *, delta: Array) -> Array:
    size = jnp.abs(_error(predictions, targets))
    quadratic = jnp.minimum(size, delta)
    return 0.5 * jnp.square(quadratic) + delta * (size - quadratic)


def _log_cosh(predictions: Array, targets: Array | None = None) -> Array:
    error = _error(predictions, targets)
    return jnp.logaddexp(error, -error) - math.log(2)


def _cosine(
    op: str, predictions: ArrayLike, targets: ArrayLike, epsilon: ArrayLike, axis: Axis | None, where: ArrayLike | None
) -> Array:
    a, b = arguments.as_float_array(op, "predictions", predictions), arguments.as_float_array(op, "targets", targets)
    shape = arguments.broadcast_shapes(op, predictions=a.shape, targets=b.shape)
    axes = arguments.canonical_axes(op, axis, len(shape))
    where = read_mask(op, where, shape, "predictions and targets together")
    return _evaluate_cosine(op == "cosine_distance", axes, a, b, epsilon, where)


@jitted(0, 1)
def _evaluate_cosine(
    as_distance: bool, axes: Axes, a: Array, b: Array, epsilon: ArrayLike, where: Array | None
) -> Array:
    shape, dtype = jnp.broadcast_shapes(a.shape, b.shape), promoted(a.dtype, b.dtype, epsilon)
    square = elementwise(jnp.square)
    terms = lambda a, b: (product(a, b), square(a), square(b))  # noqa: E731
    dot, square_a, square_b = row_blocks.sums_over_rows(terms, broadcast_alike((a, b), shape), where, axes)
    unmasked_rows = None if where is None else run_time.any_of(where, axes, keepdims=True)
    # In an empty row epsilon must have no effect either.
    epsilon = selected(jnp.asarray(epsilon, dot.dtype), unmasked_rows, 1)
    similarity = platforms.computed_once(elementwise(_over_norms)(dot, square_a, square_b, epsilon))
    result = selected(1 - similarity if as_distance else similarity, unmasked_rows)
    return jnp.squeeze(result, axes).astype(dtype)


def _over_norms(dot: Array, square_a: Array, square_b: Array, epsilon: Array) -> Array:
    return _over_norm(_over_norm(dot, square_a, epsilon), square_b, epsilon)


def unit_vector(x: Array, axes: Axes) -> Array:
    """`x` divided by its norm; 0, with a gradient of 0, where the norm is 0."""
    return _over_norm(x, jnp.sum(jnp.square(x), axes, keepdims=True), 0)


@jax.custom_jvp
def _over_norm(x: Array, square: Array, epsilon: Array | float) -> Array:
    """`x` over the root of a square that is at least `epsilon`; 0, with a derivative of 0, where both are 0."""
    # There `x` is 0, or so small that its square is. XLA's library for CPUs does not select (jax 0.12: 11 ms for 5).
    return x / jnp.sqrt(jnp.maximum(jnp.maximum(square, epsilon), float(jnp.finfo(square.dtype).tiny)))


@_over_norm.defjvp
def _(primals: Arrays, tangents: Arrays) -> tuple[Array, Array]:
    def quotient(x: Array, square: Array, epsilon: Array | float) -> Array:
        square = jnp.maximum(square, epsilon)
        is_zero = square < float(jnp.finfo(square.dtype).tiny)
        return jnp.where(is_zero, 0, x / jnp.sqrt(jnp.where(is_zero, 1, square)))

    return _over_norm(*primals), jax.jvp(quotient, primals, tangents)[1]
