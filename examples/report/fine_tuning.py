"""What fine-tuning averages: policy losses, divergences from a reference, advantages, and what padding does to them.

The cases get the verdicts of `peers.py`, written with masksafe, as trl and tunix write them, and some with
optax. The formulas of trl and tunix are written out in JAX, in this project's words; neither has to be installed. Both
compute everywhere and multiply by a mask of floats.

    python examples/report/fine_tuning.py    # 6 seconds

The exit status is 0 if masksafe is right everywhere, 1 if it is not. The guide "RL and preference tuning"
explains the rows.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from edge_cases import CASES, Case
from usual_formulas import CLIP, LIKE_TRL, LIKE_TUNIX, WITH_OPTAX
from verdicts import Verdict, in_jax, judge, print_verdicts

import masksafe
from masksafe._report._cases import Ops

RNG = np.random.default_rng(1)
LENGTHS = np.array([4, 2, 0, 3])
WHERE = np.arange(4) < LENGTHS[:, None]
NEW, OLD, REF, ADVANTAGES = (RNG.normal(size=(4, 4)).astype(np.float32) for _ in range(4))
EPSILON = 1e-4


def main() -> int:
    cases = all_cases()
    columns = {library: judge_cases(cases, ops) for library, ops in LIBRARIES.items()}
    print_verdicts("What fine-tuning averages", cases, columns)
    return 0 if set(columns["masksafe"]) == {Verdict.RIGHT} else 1


def judge_cases(cases: list[Case], ops: Ops) -> list[Verdict]:
    return [judge(case, in_jax(ops[case.op])) if case.op in ops else Verdict.ABSENT for case in cases]


def all_cases() -> list[Case]:
    """Those of recipes, and those of masksafe's own ops that stand in such a recipe."""
    return [*policy_cases(), *(case for case in CASES if case.op in OWN_OPS)]


def policy_cases() -> list[Case]:
    def garbage(op: str, **inputs: np.ndarray) -> Case:
        hidden = dict.fromkeys(inputs, ~WHERE)
        return Case(op, "garbage under the mask", inputs | {"where": WHERE}, hidden, None)

    rewards = np.array([[1, 0, 1, 0], [2, 1, 0, 0], [0, 0, 0, 0], [7, 7, 7, 7]], np.float32)
    sizes = np.arange(4) < np.array([4, 2, 0, 4])[:, None]
    groups = {"rewards": rewards, "where": sizes}
    forbidden = np.array([[1.0, 0.0, -np.inf]], np.float32)
    near = {"new": NEW, "ref": NEW + np.float32(2e-4)}
    one_is_empty = {"loss": NEW, "where": WHERE}
    return [
        Case("policy entropy", "a forbidden action", {"logits": forbidden}, {}, right_entropy(forbidden)),
        garbage("clipped policy loss", new=NEW, old=OLD, advantages=ADVANTAGES),
        garbage("k3 divergence", new=NEW, ref=REF),
        Case("k3 divergence", "a policy near its reference", near | {"where": WHERE}, {}, right_k3(**near)),
        garbage("mean of sequence means", loss=NEW),
        Case("mean of sequence means", "a sequence without tokens", one_is_empty, {}, right_mean_of_means(NEW)),
        garbage("whitened advantages", advantages=ADVANTAGES),
        Case("group-relative advantages", "garbage under the mask", groups, {"rewards": ~sizes}, None),
        Case("group-relative advantages", "empty, and equal rewards", groups, {}, right_advantages(rewards, sizes)),
    ]


# The right results, in float64.


def right_entropy(logits: np.ndarray) -> np.ndarray:
    p = np.exp(logits.astype(np.float64))
    p /= p.sum(-1, keepdims=True)
    return np.asarray(-(p * np.log(np.where(p == 0, 1, p))).sum(-1))


def right_k3(new: np.ndarray, ref: np.ndarray) -> np.ndarray:
    d = (ref.astype(np.float64) - new.astype(np.float64))[WHERE]
    return np.asarray((np.expm1(d) - d).mean())


def right_mean_of_means(loss: np.ndarray) -> np.ndarray:
    return np.asarray(np.mean([np.float64(row[:n]).mean() for row, n in zip(loss, LENGTHS, strict=True) if n]))


def right_advantages(rewards: np.ndarray, where: np.ndarray) -> np.ndarray:
    found = np.zeros(rewards.shape)
    for row, group, mask in zip(found, rewards.astype(np.float64), where, strict=True):
        if mask.any():
            row[mask] = (group[mask] - group[mask].mean()) / (group[mask].std(ddof=1) + EPSILON)
    return found


# With masksafe.


def clipped_loss(new: Any, old: Any, advantages: Any, where: Any) -> Any:
    ratio = jnp.exp(masksafe.keep(new - old, where=where))
    clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
    return masksafe.mean(-jnp.minimum(ratio * advantages, clipped * advantages), where=where)


def k3(new: Any, ref: Any, where: Any) -> Any:
    d = masksafe.keep(ref - new, where=where)
    return masksafe.mean(jnp.expm1(d) - d, where=where)


def mean_of_means(loss: Any, where: Any) -> Any:
    return masksafe.mean(masksafe.mean(loss, axis=1, where=where), where=where.any(1))


def whitened(advantages: Any, where: Any) -> Any:
    return masksafe.standardize(advantages, axis=None, where=where, epsilon=1e-8)


def group_relative(rewards: Any, where: Any) -> Any:
    variance = masksafe.var(rewards, axis=1, where=where, correction=1, keepdims=True)
    std = masksafe.apply_where(variance != 0, variance, jnp.sqrt, fill_value=0.0)
    centred = rewards - masksafe.mean(rewards, axis=1, where=where, keepdims=True)
    return jax.lax.stop_gradient(masksafe.keep(centred, where=where) / (std + EPSILON))


def entropy(logits: Any) -> Any:
    return masksafe.losses.log_probs(logits, jnp.zeros(logits.shape[:-1], jnp.int32), with_entropy=True)[1]


OWN_OPS: Ops = {name: getattr(masksafe.losses, name) for name in WITH_OPTAX}
WITH_MASKSAFE: Ops = OWN_OPS | {
    "policy entropy": entropy,
    "clipped policy loss": clipped_loss,
    "k3 divergence": k3,
    "mean of sequence means": mean_of_means,
    "whitened advantages": whitened,
    "group-relative advantages": group_relative,
}


LIBRARIES = {"masksafe": WITH_MASKSAFE, "optax": WITH_OPTAX, "trl-like": LIKE_TRL, "tunix-like": LIKE_TUNIX}


if __name__ == "__main__":
    sys.exit(main())
