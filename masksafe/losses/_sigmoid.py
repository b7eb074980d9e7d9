"""Losses of independent binary predictions, given as logits."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from masksafe._core.arguments import as_float_array, as_real_array, as_real_operand
from masksafe._core.label_checks import Range
from masksafe._core.public_op import public_op
from masksafe._core.typing import Array, ArrayLike
from masksafe.losses._elementwise import Check, elementwise_loss


@public_op
def sigmoid_binary_cross_entropy(logits: ArrayLike, labels: ArrayLike, *, where: ArrayLike | None = None) -> Array:
    r"""The cross-entropy between binary labels and the sigmoids of logits, element by element.

    .. math:: \ell = -t \log \sigma(x) - (1 - t) \log \sigma(-x)

    with logits :math:`x`, labels :math:`t`, and :math:`0 \log 0 = 0`.

    Args:
      logits: unnormalised log probabilities, floats `[...]`.
      labels: 0 or 1, or probabilities; they broadcast with `logits`.
      where: booleans of the rank of the loss; False masks an element. A mask of lower rank is refused:
        to mask rows write `where[..., None]`. For labels padded with -100 write `where=labels != -100`.

    Returns:
      The losses `[...]`, of the dtype of `logits`; 0 where masked. Masked elements, including labels, have gradients of
      exactly 0.

    Raises:
      TypeError: if `logits` are not floats or `where` is not boolean.
      ValueError: if the shapes do not broadcast, or `where` is of another rank. While label checks are on, for an
        unmasked label outside [0, 1].

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> logits, labels = jnp.array([0.0, 2.0, 1.0]), jnp.array([1, 0, -100])
      >>> loss = masksafe.losses.sigmoid_binary_cross_entropy
      >>> with jnp.printoptions(precision=4):
      ...     print(loss(logits, labels, where=labels >= 0))
      [0.6931 2.1269 0.    ]

    References:
      `optax.losses.sigmoid_binary_cross_entropy
      <https://optax.readthedocs.io/en/latest/api/losses.html#optax.losses.sigmoid_binary_cross_entropy>`_.
    """
    op = "sigmoid_binary_cross_entropy"
    arrays = _read_operands(op, logits, labels)
    types = (arrays["logits"].dtype,)
    return elementwise_loss(op, where, types, _binary_cross_entropy, check=_PROBABILITY, **arrays)


@public_op
def sigmoid_focal_loss(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    alpha: ArrayLike | None = None,
    gamma: ArrayLike = 2.0,
    where: ArrayLike | None = None,
) -> Array:
    r"""The focal loss of binary labels: cross-entropy with less weight on well-predicted elements.

    .. math::
      \ell = \alpha_t (1 - p_t)^\gamma \ell_{\text{CE}}, \qquad
      1 - p_t = (1 - t) \sigma(x) + t \sigma(-x), \qquad
      \alpha_t = \alpha t + (1 - \alpha) (1 - t)

    with logits :math:`x` and labels :math:`t`.

    Args:
      logits: unnormalised log probabilities, floats `[...]`.
      labels: 0 or 1, or probabilities; they broadcast with `logits`.
      alpha: the weight of label 1, in [0, 1], or None for no weights.
      gamma: the exponent, at least 0.
      where: booleans of the rank of the loss; False masks an element. A mask of lower rank is refused:
        to mask rows write `where[..., None]`.

    Returns:
      The losses `[...]`, of the dtype to which JAX promotes `logits`, `alpha` and `gamma`; 0 where masked. Masked
      elements, including labels, have gradients of exactly 0.

    Raises:
      TypeError: if `logits` are not floats or `where` is not boolean.
      ValueError: if the shapes do not broadcast, `where` is of another rank, or the number `alpha` or `gamma` is out of
        range. While label checks are on, for an unmasked label outside [0, 1], and such an element of an array `alpha`
        or `gamma`.

    Example:
      >>> import jax.numpy as jnp, masksafe
      >>> logits, labels = jnp.array([0.0, 2.0, 1.0]), jnp.array([1, 0, -100])
      >>> with jnp.printoptions(precision=4):
      ...     print(masksafe.losses.sigmoid_focal_loss(logits, labels, where=labels >= 0))
      [0.1733 1.6501 0.    ]

    References:
      `optax.losses.sigmoid_focal_loss
      <https://optax.readthedocs.io/en/latest/api/losses.html#optax.losses.sigmoid_focal_loss>`_.

      Lin et al., "Focal Loss for Dense Object Detection", 2017.
    """
    op = "sigmoid_focal_loss"
    arrays, factors = _read_operands(op, logits, labels), {"gamma": as_real_operand(op, "gamma", gamma)}
    if alpha is not None:
        factors["alpha"] = as_real_operand(op, "alpha", alpha)

    types, ranges = (arrays["logits"].dtype, *factors), {name: _FACTORS[name] for name in factors}
    arguments = {**arrays, **factors}
    return elementwise_loss(op, where, types, _weighted_focal, check=_PROBABILITY, ranges=ranges, **arguments)


_FACTORS = {
    "gamma": Range(lambda g: (g >= 0) & (g < math.inf), "of at least 0, and finite"),
    "alpha": Range(lambda a: (a >= 0) & (a <= 1), "in [0, 1]"),
}
_PROBABILITY = Check("labels", lambda t: (t >= 0) & (t <= 1), "outside [0, 1]")


def _read_operands(op: str, logits: ArrayLike, labels: ArrayLike) -> dict[str, Array]:
    return {"logits": as_float_array(op, "logits", logits), "labels": as_real_array(op, "labels", labels)}


def _binary_cross_entropy(logits: Array, labels: Array) -> Array:
    return _cross_entropy(*_less_likely_label(logits, labels))


def _weighted_focal(logits: Array, labels: Array, gamma: Array, alpha: Array | None = None) -> Array:
    loss, labels = _focal(logits, labels, gamma), labels.astype(logits.dtype)
    return loss if alpha is None else loss * (alpha * labels + (1 - alpha) * (1 - labels))


def _less_likely_label(x: Array, t: Array) -> tuple[Array, Array]:
    """The logit and the probability of the label, 0 or 1, that is less likely according to `t`; of one dtype."""
    return jnp.where(t > 0.5, -x, x), jnp.where(t > 0.5, 1 - t, t).astype(x.dtype)


def _focal(x: Array, t: Array, gamma: Array) -> Array:
    z, u = _less_likely_label(x, t)
    # The part of infinite logits is added after the product: inside it, derivatives would be infinity times 0.
    finite = jnp.clip(z, -_largest_factor(z), _largest_factor(z))
    weight = jnp.exp(gamma * _log_miss(finite, u))
    infinite = jnp.where(jnp.isinf(z), _linear_part(z, u) * jax.lax.stop_gradient(weight), 0)
    return _cross_entropy(finite, u) * weight + infinite


def _linear_part(z: Array, u: Array) -> Array:
    """The piecewise linear part of the cross-entropy; the rest is at most log 2."""
    return jnp.where(z > 0, 1 - u, -u) * _logit_unless_certain(z, u)


def _logit_unless_certain(z: Array, u: Array) -> Array:
    """The logit; 0 where the label and the model are certain, since 0 log 0 = 0."""
    return jnp.where((u == 0) & (z <= -_largest_factor(z)), 0, z)


def _largest_factor(z: Array) -> float:
    """The value used for infinity in a product."""
    return math.sqrt(jnp.finfo(z.dtype).max)


# Functions of the logit z of the less likely label and of its probability u. Their custom rules consist of sigmoids,
# and no factor of them is infinite.


@jax.custom_jvp
def _cross_entropy(z: Array, u: Array) -> Array:
    return _linear_part(z, u) + jnp.log1p(_exp_minus_abs(z))


@_cross_entropy.defjvp
def _(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (z, u), (d_z, d_u) = primals, tangents
    return _cross_entropy(z, u), (jax.nn.sigmoid(z) - u) * d_z - _logit_unless_certain(z, u) * d_u


@jax.custom_jvp
def _log_miss(z: Array, u: Array) -> Array:
    """log(1 - p_t), the log probability that the model gives to the wrong label."""
    return jnp.where(_is_certain_and_right(z, u), z, jnp.log(_scaled_miss(z, u))) - jnp.log1p(_exp_minus_abs(z))


@_log_miss.defjvp
def _(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (z, u), (d_z, d_u) = primals, tangents
    log_miss = _log_miss(z, u)
    # Both the inverse and its square, the size of its derivative, are bounded: they are multiplied with the loss, which
    # is 0 there, and infinity times 0 would be NaN.
    most = 0.9 * math.log(jnp.finfo(z.dtype).max)
    inverse = jnp.exp(jnp.minimum(-log_miss, most))
    inverse = jnp.where(log_miss < -most / 2, jax.lax.stop_gradient(inverse), inverse)
    share = jnp.where(_is_certain_and_right(z, u), 1, jnp.where(z < 0, _exp_minus_abs(z), 1) / _scaled_miss(z, u))
    by_logit = (1 - 2 * u) * jax.nn.sigmoid(-z) * share
    return log_miss, by_logit * d_z + (jax.nn.sigmoid(-z) - jax.nn.sigmoid(z)) * inverse * d_u


def _is_certain_and_right(z: Array, u: Array) -> Array:
    """Whether the label is certain and the model favours it."""
    return (u == 0) & (z < 0)


def _scaled_miss(z: Array, u: Array) -> Array:
    """1 - p_t divided by the larger of sigmoid(z) and sigmoid(-z); 1 where the label is certain and predicted."""
    a = _exp_minus_abs(z)
    return jnp.where(_is_certain_and_right(z, u), 1, jnp.where(z < 0, (1 - u) * a + u, (1 - u) + u * a))


def _exp_minus_abs(z: Array) -> Array:
    """exp(-|z|), whose derivative at 0 is the one from above."""
    return jnp.exp(jnp.where(z < 0, z, -z))
