"""`python -m masksafe`: what it finds, prints, writes and returns."""

import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import parametrize

import masksafe
from masksafe.__main__ import main
from masksafe._core import compiler_faults
from masksafe._report._cases import CASES, CLASSES, OPS
from masksafe._report._verdict import judge_case

X = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], np.float32)


@pytest.fixture(autouse=True)
def two_devices(monkeypatch):
    devices = jax.devices()[:2]  # of one kind
    monkeypatch.setattr(jax, "local_devices", lambda **_: devices)
    monkeypatch.setitem(sys.modules, "own_cases", sys.modules[__name__])  # where a user's functions are


CROSS_ENTROPY = "softmax_cross_entropy_with_integer_labels"
cross_entropy = getattr(masksafe.losses, CROSS_ENTROPY)


def with_labels_that_wrap(logits, labels, where):
    return cross_entropy(logits, labels % CLASSES, where=where)


@parametrize(
    ("op", "fn", "expected", "finding"),
    [("smooth_labels", lambda labels, alpha, where: labels, "leaks", "A masked element is not gone")],
    exhaustive=[
        ("smooth_labels", lambda labels, where: labels, "refused", "TypeError: "),
        ("smooth_labels", lambda labels, alpha, where: jnp.where(where, jnp.nan, 0), "wrong", "NaN: got"),
        ("smooth_labels", lambda labels, alpha, where: where.all() - 1.0, "wrong", "with everything masked: got"),
        (CROSS_ENTROPY, with_labels_that_wrap, "wrong", "NaN for label -1 of 5 classes: got"),
        (CROSS_ENTROPY, cross_entropy, "right", ""),
    ],
)
def test_verdicts(op, fn, expected, finding, monkeypatch):
    monkeypatch.setitem(OPS, op, fn)
    verdict, found = judge_case(next(case for case in CASES if case.op == op))
    assert verdict == expected
    assert finding in found
    assert bool(found) == bool(finding)


def test_every_public_op_is_in_a_case():
    ops = {case.op for case in CASES}
    assert set(masksafe.losses.__all__) - ops == {
        "RouterStatistics",  # the parts of a loss
        "make_fenchel_young_loss",  # makes a loss
        "convex_kl_divergence",  # other names
        "safe_softmax_cross_entropy",
        "ctc_loss_with_forward_probs",
    }


def test_report_of_masksafe_alone(capsys, tmp_path):
    assert main(["--only", "smooth_lab,nothing_else", "--json", str(tmp_path / "report.json")]) == 0
    out, progress = capsys.readouterr()
    assert not progress  # which is for a terminal
    assert "keeps its contract" in out
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["keeps_contract"] is True
    assert report["cases"] == [{"op": "smooth_labels", "verdicts": {str(jax.devices()[0]): "right"}}]
    assert not report["findings"]


def test_progress_and_faults_of_a_compiler_are_told(capsys, monkeypatch):
    monkeypatch.setattr(compiler_faults, "known", "computes wrong sums")
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["--only", "smooth_lab"]) == 0
    out, progress = capsys.readouterr()
    assert re.fullmatch(r"\S+: smooth_labels: right\n", progress)
    assert re.search(r"On CPUs jaxlib \S+ computes wrong sums, also without masksafe", out)


def test_an_unknown_op_is_refused(capsys):
    assert main(["--only", "nothing_of_the_kind"]) == 2
    assert "No op has any of nothing_of_the_kind in its name." in capsys.readouterr().err


def mean_of_rows():
    mask = jnp.array([[True, True, False], [False] * 3])
    return lambda x: masksafe.mean(x, -1, where=mask), (X,), {0: ~mask}


def mean_by_products():
    mask = jnp.array([[1.0, 1, 0], [1, 1, 1]])
    return lambda x: (x * mask).sum(-1) / mask.sum(-1), (X,), {0: mask == 0}


@parametrize(
    ("case", "status", "verdict"), [("mean_by_products", 1, "leaks")], exhaustive=[("mean_of_rows", 0, "right")]
)
def test_a_function_of_the_user_gets_a_verdict(case, status, verdict, capsys):
    assert main([f"own_cases:{case}"]) == status
    captured = capsys.readouterr()
    assert re.search(f"influence nothing +{verdict}", captured.out)
    assert ("A masked element is not gone" in captured.out) == bool(status)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("no_such_module:f", "no_such_module:f, expected MODULE:FUNCTION; No module named"),
        ("json:f", "json:f, expected MODULE:FUNCTION; json has no function f"),
        ("json", "json, expected MODULE:FUNCTION"),
        ("json.decoder:JSONDecoder", r"returned JSONDecoder, expected a function, a tuple of its arguments"),
    ],
)
def test_what_is_no_function_of_the_user_is_refused(case, message, capsys):
    with pytest.raises(SystemExit) as error:
        main([case])
    assert error.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_an_error_of_the_user_s_own_is_raised():
    with pytest.raises(TypeError, match="positional argument"):
        main(["own_cases:cross_entropy"])
