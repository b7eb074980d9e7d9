"""What fine-tuning averages as trl and tunix write it, and with optax, for `fine_tuning.py`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from masksafe._report._cases import Ops

CLIP = 0.2


# As trl and tunix write it.


def mean_of_products(x: Any, where: Any, axis: int | None = None) -> Any:
    weights = where.astype(x.dtype)
    return jnp.sum(x * weights, axis) / jnp.maximum(jnp.sum(weights, axis), 1)


def plain_clipped_loss(new: Any, old: Any, advantages: Any, where: Any, *, largest_log_ratio: float = np.inf) -> Any:
    ratio = jnp.exp(jnp.clip(new - old, -largest_log_ratio, largest_log_ratio))
    clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
    return mean_of_products(-jnp.minimum(ratio * advantages, clipped * advantages), where)


def k3_by_exp(new: Any, ref: Any, where: Any) -> Any:
    d = ref - new
    return mean_of_products(jnp.exp(d) - d - 1, where)


def plain_whitened(advantages: Any, where: Any) -> Any:
    centred = advantages - mean_of_products(advantages, where)
    white = centred * jax.lax.rsqrt(mean_of_products(centred**2, where) + 1e-8)
    return white * where.astype(white.dtype)


def plain_group_relative(rewards: Any, where: Any, *, epsilon: float) -> Any:
    centred = rewards - rewards.mean(1, keepdims=True)
    relative = centred / (rewards.std(1, ddof=1, keepdims=True) + epsilon)
    return jax.lax.stop_gradient(relative * where.astype(relative.dtype))


def plain_entropy(logits: Any) -> Any:
    log_p = jax.nn.log_softmax(logits)
    return -jnp.sum(jnp.exp(log_p) * log_p, -1)


def plain_log_probs(logits: Any, labels: Any, where: Any = None) -> Any:
    taken = jnp.take_along_axis(logits, jnp.asarray(labels)[..., None], -1)[..., 0]
    log_probs = taken - jax.nn.logsumexp(logits, -1)
    return log_probs if where is None else jnp.where(where, log_probs, 0)


def plain_divergence(features: Any, kernel: Any, target_features: Any, target_kernel: Any, where: Any = None) -> Any:
    log_q, log_p = jax.nn.log_softmax(features @ kernel), jax.nn.log_softmax(target_features @ target_kernel)
    losses = jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1)
    return losses.mean() if where is None else mean_of_products(losses, where)


LIKE_TRL: Ops = {
    "log_probs": plain_log_probs,
    "linear_log_probs": lambda features, kernel, labels, where=None: plain_log_probs(features @ kernel, labels, where),
    "linear_kl_divergence": plain_divergence,
    "policy entropy": plain_entropy,
    "clipped policy loss": plain_clipped_loss,
    "k3 divergence": k3_by_exp,
    "mean of sequence means": lambda loss, where: jnp.mean(mean_of_products(loss, where, 1)),
    "whitened advantages": plain_whitened,
    "group-relative advantages": functools.partial(plain_group_relative, epsilon=1e-4),
}
LIKE_TUNIX: Ops = LIKE_TRL | {
    "clipped policy loss": functools.partial(plain_clipped_loss, largest_log_ratio=20.0),
    "group-relative advantages": functools.partial(plain_group_relative, epsilon=1e-6),
}


# With optax.


def optax_log_probs(logits: Any, labels: Any, where: Any = None) -> Any:
    return -optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels, where=where)


def optax_divergence(features: Any, kernel: Any, target_features: Any, target_kernel: Any, where: Any = None) -> Any:
    log_q, p = jax.nn.log_softmax(features @ kernel), jax.nn.softmax(target_features @ target_kernel)
    losses = optax.losses.kl_divergence(log_q, p)
    return losses.mean() if where is None else jnp.where(where, losses, 0).sum() / jnp.maximum(where.sum(), 1)


WITH_OPTAX: Ops = {
    "log_probs": optax_log_probs,
    "linear_log_probs": lambda features, kernel, labels, where=None: optax_log_probs(features @ kernel, labels, where),
    "linear_kl_divergence": optax_divergence,
}
