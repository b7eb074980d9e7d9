"""Losses of independent binary predictions, given as logits."""

import jax
import jax.numpy as jnp

from masksafe._errors import as_array, as_float_array, broadcast_shapes
from masksafe._typing import Array, ArrayLike
from masksafe.checks import check_elements, spoiled
from masksafe.losses._where import elements_or_rows, of_elements


def sigmoid_binary_cross_entropy(logits: ArrayLike, labels: ArrayLike, *, where: ArrayLike | None = None) -> Array:
    r"""The cross-entropy of binary labels and the sigmoids of logits, element by element.

    .. math:: \ell = -t \log \sigma(x) - (1 - t) \log \sigma(-x)

    with logits :math:`x`, labels :math:`t`, and :math:`0 \log 0 = 0`.

    Args:
      logits: unnormalised log probabilities, floats `[...]`.
      labels: 0 or 1, or probabilities; they broadcast with `logits`.
      where: booleans of the rank of the loss; False masks an element. For labels padded with -100 write
        `where=labels != -100`.

    Returns:
      `[...]`, of the dtype of `logits`; 0 where masked. Masked elements have gradients of exactly 0, labels included.

    Raises:
      TypeError: if `logits` are not floats or `where` is not boolean.
      ValueError: if the shapes do not broadcast, or `where` is of another rank. While label checks are on, for an
        unmasked label outside [0, 1].

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> logits, labels = jnp.array([0.0, 2.0, 1.0]), jnp.array([1, 0, -100])
      >>> print(masksafe.losses.sigmoid_binary_cross_entropy(logits, labels, where=labels >= 0))
      [0.6931472 2.126928  0.       ]

    References:
      `optax.losses.sigmoid_binary_cross_entropy
      <https://optax.readthedocs.io/en/latest/api/losses.html#optax.losses.sigmoid_binary_cross_entropy>`_.
    """
    op = "sigmoid_binary_cross_entropy"
    logits, labels, bad = _operands(op, logits, labels, where)
    loss = of_elements(op, where, logits.dtype, _cross_entropy, logits=logits, labels=labels)
    return spoiled(loss, bad)


def sigmoid_focal_loss(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    alpha: ArrayLike | None = None,
    gamma: ArrayLike = 2.0,
    where: ArrayLike | None = None,
) -> Array:
    r"""The focal loss of binary labels: cross-entropy with less weight on what is predicted well.

    .. math::
      \ell = \alpha_t (1 - p_t)^\gamma \ell_{\text{CE}}, \qquad
      1 - p_t = (1 - t) \sigma(x) + t \sigma(-x), \qquad
      \alpha_t = \alpha t + (1 - \alpha) (1 - t)

    with logits :math:`x` and labels :math:`t`.

    Args:
      logits: unnormalised log probabilities, floats `[...]`.
      labels: 0 or 1, or probabilities; they broadcast with `logits`.
      alpha: the weight of label 1, less than 1; None weights nothing.
      gamma: the exponent.
      where: booleans of the rank of the loss; False masks an element.

    Returns:
      `[...]`, of the dtype of `logits`, or that to which JAX promotes it with `alpha` and `gamma`; 0 where masked.
      Masked elements have gradients of exactly 0, labels included.

    Raises:
      TypeError: if `logits` are not floats or `where` is not boolean.
      ValueError: if the shapes do not broadcast, or `where` is of another rank. While label checks are on, for an
        unmasked label outside [0, 1].

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> logits, labels = jnp.array([0.0, 2.0, 1.0]), jnp.array([1, 0, -100])
      >>> with jnp.printoptions(precision=4):
      ...     print(masksafe.losses.sigmoid_focal_loss(logits, labels, where=labels >= 0))
      [0.1733 1.6501 0.    ]

    References:
      `optax.losses.sigmoid_focal_loss
      <https://optax.readthedocs.io/en/latest/api/losses.html#optax.losses.sigmoid_focal_loss>`_; Lin et al., "Focal
      Loss for Dense Object Detection", 2017.
    """
    op = "sigmoid_focal_loss"
    logits, labels, bad = _operands(op, logits, labels, where)
    factors = {"gamma": as_array(op, "gamma", gamma)}
    if alpha is not None:
        factors["alpha"] = as_array(op, "alpha", alpha)

    def focal(x: Array, t: Array, gamma: Array, alpha: Array | None = None) -> Array:
        loss = _cross_entropy(x, t) * _power(_missed(x, t), gamma)
        return loss if alpha is None else loss * (alpha * t + (1 - alpha) * (1 - t))

    dtype = jnp.result_type(logits, *factors.values())
    return spoiled(of_elements(op, where, dtype, focal, logits=logits, labels=labels, **factors), bad)


def _operands(
    op: str, logits: ArrayLike, labels: ArrayLike, where: ArrayLike | None
) -> tuple[Array, Array, Array | None]:
    """Logits, labels, and which labels are bad while checks are on."""
    logits, labels = as_float_array(op, "logits", logits), as_array(op, "labels", labels)
    shape = broadcast_shapes(op, logits=logits.shape, labels=labels.shape)
    mask = elements_or_rows(op, where, shape, ())
    is_valid = lambda t: (t >= 0) & (t <= 1)  # noqa: E731
    return logits, labels, check_elements(op, jnp.broadcast_to(labels, shape), mask, is_valid, "outside [0, 1]")


def _cross_entropy(x: Array, t: Array) -> Array:
    """Of the logit of the less likely label and its probability: digits are kept where the model is right and sure."""
    z, u = _less_likely(x, t)
    is_certain = (u == 0) & jnp.isinf(z)  # 0 log 0 = 0
    return jax.nn.softplus(z) - u * jnp.where(is_certain, 0, z)


def _missed(x: Array, t: Array) -> Array:
    """1 - p_t, the probability of the other label."""
    z, u = _less_likely(x, t)
    return jax.nn.sigmoid(z) + u * (1 - 2 * jax.nn.sigmoid(z))


def _less_likely(x: Array, t: Array) -> tuple[Array, Array]:
    """The logit and the probability of that label, 1 or 0, which is the less likely by `t`."""
    return jnp.where(t > 0.5, -x, x), jnp.where(t > 0.5, 1 - t, t)


def _power(p: Array, gamma: Array) -> Array:
    """P to the power of gamma, with derivatives of 0 where p is."""
    is_zero = p == 0
    return jnp.where(is_zero, (gamma == 0).astype(p.dtype), jnp.exp(gamma * jnp.log(jnp.where(is_zero, 1, p))))
