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


def test_an_unknown_peer_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        peers.main(["numpy"])
    assert "numpy is none of" in capsys.readouterr().err


X = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], np.float32)
MASK = np.array([[True, True, False], [True, True, True]])
SUM = Case("sum", "garbage under the mask", {"x": X, "where": MASK}, {"x": ~MASK}, None)


@jax.custom_vjp
def zero_with_a_gradient(x):
    return jnp.zeros_like(x)


zero_with_a_gradient.defvjp(lambda x: (jnp.zeros_like(x), None), lambda _, d_zero: (d_zero,))


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x, where: masksafe.sum(x, -1, where), Verdict.RIGHT),
        (lambda x, where: jnp.where(where, jnp.sqrt(jnp.abs(x)), 0).sum(-1), Verdict.NAN),
        (lambda x, where: jnp.sum(jnp.nan_to_num(x, posinf=9, neginf=7), -1), Verdict.LEAKS),
        (lambda x, where: jnp.where(where, x, jnp.isinf(x)).sum(-1), Verdict.LEAKS),
        (lambda x, where: jnp.where(where, x, x < -1e4).sum(-1), Verdict.LEAKS),
        (lambda x, where: jnp.where(where, x, zero_with_a_gradient(x)).sum(-1), Verdict.LEAKS),
        (lambda x, where: x.sum(-1), Verdict.NAN),
        (lambda x: x, Verdict.REFUSED),
    ],
)
def test_verdicts_on_garbage(fn, expected):
    assert judge(SUM, in_jax(fn)) == expected


def test_a_wrong_value_is_wrong():
    case = SUM._replace(expected=np.array([3.0, 15.0]))
    assert judge(case, in_jax(lambda x, where: masksafe.sum(x, -1, where))) == Verdict.RIGHT
    assert judge(case, in_jax(lambda x, where: 1.01 * masksafe.sum(x, -1, where))) == Verdict.WRONG


def cross_entropy(logits, labels):
    return masksafe.losses.softmax_cross_entropy_with_integer_labels(logits, labels)


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (cross_entropy, Verdict.RIGHT),
        (lambda logits, labels: cross_entropy(logits, labels % 5), Verdict.WRONG),
        (lambda logits, labels: jnp.where(labels < 0, jnp.nan, cross_entropy(logits, abs(labels))), Verdict.WRONG),
    ],
    ids=["right", "wraps", "NaN in the value alone"],
)
def test_a_bad_label_has_to_be_nan_in_value_and_gradient(fn, expected):
    case = next(case for case in CASES if "label -1 of" in case.what)
    assert judge(case, in_jax(fn)) == expected
