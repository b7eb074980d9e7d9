"""The report on peers: their ops are those of cases, and it tells what they do."""

import re

import pytest
from report import peers

import masksafe
from masksafe._report._cases import CASES

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
