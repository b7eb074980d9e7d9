"""The report on peers: their ops are those of cases, it tells what they do, and its verdicts are right."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from edge_cases import CASES, Case
from report import peers
from verdicts import Verdict, in_jax, judge

import masksafe

KNOWN = {case.op for case in CASES}


@pytest.mark.parametrize("peer", [peer for peer in peers.PEERS if peers.is_installed(peer)])
def test_ops_of_peers_are_those_of_cases(peer):
    ops = set(peers.ops_of(peer))
    assert ops <= KNOWN | {name for name in ops if hasattr(masksafe, name) or hasattr(masksafe.losses, name)}
    assert ops & KNOWN


@pytest.mark.slow
@pytest.mark.parametrize(("peer", "op"), [("optax", "kl_divergence_with"), ("flax", "layer_norm")])
def test_peers_get_the_same_cases(peer, op, capsys):
    peers.main([peer, "--only", op])
    out = capsys.readouterr().out
    assert re.search(r"masksafe: (\d+) of \1 right", out)
    assert re.search(rf"{peer}: \d+ of", out)
    assert "jax.nn" not in out


MASK = np.array([[True, True, False], [True, True, True]])
X = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], np.float32)
SUM = Case("sum", "garbage under the mask", {"x": X, "where": MASK}, {"x": ~MASK}, np.array([3.0, 15.0]))
BAD_LABEL = next(case for case in CASES if "label -1 of" in case.what)
cross_entropy = masksafe.losses.softmax_cross_entropy_with_integer_labels


@jax.custom_vjp
def zero_with_a_gradient(x):
    return jnp.zeros_like(x)


zero_with_a_gradient.defvjp(lambda x: (jnp.zeros_like(x), None), lambda _, d_zero: (d_zero,))


@pytest.mark.parametrize(
    ("case", "fn", "expected"),
    [
        (SUM, lambda x, where: masksafe.sum(x, -1, where), Verdict.RIGHT),
        (SUM, lambda x, where: 1.01 * masksafe.sum(x, -1, where), Verdict.WRONG),
        (SUM, lambda x, where: jnp.where(where, jnp.sqrt(jnp.abs(x)), 0).sum(-1), Verdict.NAN),
        (SUM, lambda x, where: jnp.sum(jnp.nan_to_num(x, posinf=9, neginf=7), -1), Verdict.LEAKS),
        (SUM, lambda x, where: jnp.where(where, x, jnp.isinf(x)).sum(-1), Verdict.LEAKS),
        (SUM, lambda x, where: jnp.where(where, x, x < -1e4).sum(-1), Verdict.LEAKS),
        (SUM, lambda x, where: jnp.where(where, x, zero_with_a_gradient(x)).sum(-1), Verdict.LEAKS),
        (SUM, lambda x: x, Verdict.REFUSED),
        (BAD_LABEL, cross_entropy, Verdict.RIGHT),
        (BAD_LABEL, lambda logits, labels: cross_entropy(logits, labels % 5), Verdict.WRONG),
        # NaN in the value alone
        (
            BAD_LABEL,
            lambda logits, labels: jnp.where(labels < 0, jnp.nan, cross_entropy(logits, abs(labels))),
            Verdict.WRONG,
        ),
    ],
)
def test_verdicts(case, fn, expected):
    assert judge(case, in_jax(fn)) == expected
