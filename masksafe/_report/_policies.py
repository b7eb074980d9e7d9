"""Cases of fine-tuning by reinforcement learning, and how it is written: with masksafe, and as trl and tunix write it.

The formulas of the two are written out here in JAX, in this project's words; neither has to be installed. Both compute
everywhere and multiply by a mask of floats.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import masksafe
from masksafe._report._case import Case, Ops

_RNG = np.random.default_rng(1)
_LENGTHS = np.array([4, 2, 0, 3])
_WHERE = np.arange(4) < _LENGTHS[:, None]
_NEW, _OLD, _REF, _ADVANTAGES = (_RNG.normal(size=(4, 4)).astype(np.float32) for _ in range(4))
_CLIP, _EPSILON = 0.2, 1e-4


def policy_cases() -> list[Case]:
    def garbage(op: str, **inputs: np.ndarray) -> Case:
        hidden = dict.fromkeys(inputs, ~_WHERE)
        return Case(op, "garbage under the mask", inputs | {"where": _WHERE}, hidden, None)

    pair = {"new": _NEW, "old": _OLD}
    groups = np.array([[1, 0, 1, 0], [2, 1, 0, 0], [0, 0, 0, 0], [7, 7, 7, 7]], np.float32)
    sizes = np.arange(4) < np.array([4, 2, 0, 4])[:, None]
    sure = np.array([[20.0, 0.0, 0.0]], np.float32)
    near = {"new": _NEW, "ref": _NEW + np.float32(2e-4)}
    return [
        Case("policy entropy", "a sure policy: logits 20, 0, 0", {"logits": sure}, {}, _entropy(sure)),
        garbage("clipped policy loss", **pair, advantages=_ADVANTAGES),
        garbage("k3 divergence", new=_NEW, ref=_REF),
        Case("k3 divergence", "a policy near its reference", near | {"where": _WHERE}, {}, _k3(**near)),
        garbage("mean of sequence means", loss=_NEW),
        Case("mean of sequence means", "a sequence without tokens", {"loss": _NEW, "where": _WHERE}, {}, _by_row(_NEW)),
        garbage("whitened advantages", advantages=_ADVANTAGES),
        Case("group-relative advantages", "garbage under the mask", _rewards(groups, sizes), {"rewards": ~sizes}, None),
        Case(
            "group-relative advantages",
            "empty, and equal rewards",
            _rewards(groups, sizes),
            {},
            _grouped(groups, sizes),
        ),
    ]


def _rewards(rewards: np.ndarray, where: np.ndarray) -> dict[str, np.ndarray]:
    return {"rewards": rewards, "where": where}


# The right results, in float64.


def _entropy(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    below = x.max(-1, keepdims=True) - x
    total = np.exp(-below).sum(-1)
    return np.asarray(np.log1p(total - 1) + (np.exp(-below) * below).sum(-1) / total)


def _k3(new: np.ndarray, ref: np.ndarray) -> np.ndarray:
    d = (ref.astype(np.float64) - new.astype(np.float64))[_WHERE]
    return np.asarray((np.expm1(d) - d).mean())


def _by_row(loss: np.ndarray) -> np.ndarray:
    return np.asarray(np.mean([np.float64(row[:n]).mean() for row, n in zip(loss, _LENGTHS, strict=True) if n]))


def _grouped(rewards: np.ndarray, where: np.ndarray) -> np.ndarray:
    found = np.zeros(rewards.shape)
    for row, group, mask in zip(found, rewards.astype(np.float64), where, strict=True):
        if mask.any():
            row[mask] = (group[mask] - group[mask].mean()) / (group[mask].std(ddof=1) + _EPSILON)
    return found


# With masksafe.


def masksafe_ops() -> Ops:
    mean = masksafe.mean

    def log_ratio(new: Any, old: Any, where: Any) -> Any:
        return masksafe.mask_where(~where, new - old, 0.0)

    def clipped_loss(new: Any, old: Any, advantages: Any, where: Any) -> Any:
        ratio = jnp.exp(log_ratio(new, old, where))
        clipped = jnp.clip(ratio, 1 - _CLIP, 1 + _CLIP)
        return mean(-jnp.minimum(ratio * advantages, clipped * advantages), where=where)

    def k3(new: Any, ref: Any, where: Any) -> Any:
        d = log_ratio(ref, new, where)
        return mean(jnp.expm1(d) - d, where=where)

    def group_relative(rewards: Any, where: Any) -> Any:
        centred = rewards - mean(rewards, axis=1, where=where, keepdims=True)
        std = jnp.sqrt(masksafe.var(rewards, axis=1, where=where, correction=1, keepdims=True))
        return jax.lax.stop_gradient(masksafe.mask_where(~where, centred / (std + _EPSILON), 0.0))

    return {
        "policy entropy": lambda logits: masksafe.losses.log_probs(logits, _first_class(logits), with_entropy=True)[1],
        "clipped policy loss": clipped_loss,
        "k3 divergence": k3,
        "mean of sequence means": lambda loss, where: mean(mean(loss, axis=1, where=where), where=where.any(1)),
        "whitened advantages": lambda advantages, where: masksafe.standardize(
            advantages, axis=None, where=where, epsilon=1e-8
        ),
        "group-relative advantages": group_relative,
    }


def _first_class(logits: Any) -> Any:
    return jnp.zeros(logits.shape[:-1], jnp.int32)


# As the peers write it.


def _mean(x: Any, where: Any, axis: int | None = None) -> Any:
    weights = where.astype(x.dtype)
    return jnp.sum(x * weights, axis) / jnp.maximum(jnp.sum(weights, axis), 1)


def _clipped_loss(most: float | None, new: Any, old: Any, advantages: Any, where: Any) -> Any:
    log_ratio = new - old
    ratio = jnp.exp(log_ratio if most is None else jnp.clip(log_ratio, -most, most))
    clipped = jnp.clip(ratio, 1 - _CLIP, 1 + _CLIP)
    return _mean(-jnp.minimum(ratio * advantages, clipped * advantages), where)


def _k3_by_exp(new: Any, ref: Any, where: Any) -> Any:
    d = ref - new
    return _mean(jnp.exp(d) - d - 1, where)


def _whiten(advantages: Any, where: Any) -> Any:
    centred = advantages - _mean(advantages, where)
    white = centred * jax.lax.rsqrt(_mean(centred**2, where) + 1e-8)
    return white * where.astype(white.dtype)


def _group_relative(epsilon: float, rewards: Any, where: Any) -> Any:
    centred = rewards - rewards.mean(1, keepdims=True)
    relative = centred / (rewards.std(1, ddof=1, keepdims=True) + epsilon)
    return jax.lax.stop_gradient(relative * where.astype(relative.dtype))


def _plain_entropy(logits: Any) -> Any:
    log_p = jax.nn.log_softmax(logits)
    return -jnp.sum(jnp.exp(log_p) * log_p, -1)


def _log_probs(logits: Any, labels: Any, where: Any = None) -> Any:
    taken = jnp.take_along_axis(logits, jnp.asarray(labels)[..., None], -1)[..., 0]
    return _selected(taken - jax.nn.logsumexp(logits, -1), where)


def _linear_log_probs(features: Any, kernel: Any, labels: Any, where: Any = None) -> Any:
    return _log_probs(features @ kernel, labels, where)


def _linear_divergence(features: Any, kernel: Any, target_features: Any, target_kernel: Any, where: Any = None) -> Any:
    log_q, log_p = jax.nn.log_softmax(features @ kernel), jax.nn.log_softmax(target_features @ target_kernel)
    losses = jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1)
    return losses.mean() if where is None else _mean(losses, where)


def _selected(x: Any, where: Any) -> Any:
    return x if where is None else jnp.where(where, x, 0)


def ops_like_trl() -> Ops:
    return _peer_ops() | {
        "clipped policy loss": functools.partial(_clipped_loss, None),
        "group-relative advantages": functools.partial(_group_relative, 1e-4),
    }


def ops_like_tunix() -> Ops:
    return _peer_ops() | {
        "clipped policy loss": functools.partial(_clipped_loss, 20.0),
        "group-relative advantages": functools.partial(_group_relative, 1e-6),
    }


def _peer_ops() -> Ops:
    return {
        "log_probs": _log_probs,
        "linear_log_probs": _linear_log_probs,
        "linear_kl_divergence": _linear_divergence,
        "policy entropy": _plain_entropy,
        "k3 divergence": _k3_by_exp,
        "mean of sequence means": lambda loss, where: jnp.mean(_mean(loss, where, 1)),
        "whitened advantages": _whiten,
    }
