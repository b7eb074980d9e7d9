"""`python -m masksafe`: what it finds, prints, writes and returns."""

import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import masksafe
from masksafe.__main__ import main
from masksafe._core import compiler_faults
from masksafe._report._cases import CASES, Case
from masksafe._report._ops import OPS
from masksafe._report._verdict import Verdict, in_jax, judge

X = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], np.float32)
MASK = np.array([[True, True, False], [True, True, True]])
SUM = Case("sum", "garbage under the mask", {"x": X, "where": MASK}, {"x": ~MASK}, None)


@pytest.fixture(autouse=True)
def two_devices(monkeypatch):
    devices = jax.devices()[:2]
    monkeypatch.setattr(jax, "local_devices", lambda **_: devices)


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


def test_every_public_op_is_in_a_case():
    ops = {case.op for case in CASES}
    missing = {name for name in dir(masksafe.losses) if not name.startswith("_")} - ops
    assert missing == {
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
    assert "smooth_labels" in out
    assert "jaxlib" in out
    assert "keeps its contract" in out
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["keeps_contract"] is True
    assert {row["op"] for row in report["cases"]} == {"smooth_labels"}
    assert report["versions"]["jax"]
    assert all(name.startswith("masksafe on") for name in report["cases"][0]["verdicts"])
    assert {verdict for row in report["cases"] for verdict in row["verdicts"].values()} <= {"right", "-"}


def test_progress_and_faults_of_a_compiler_are_told(capsys, monkeypatch):
    monkeypatch.setattr(compiler_faults, "known", "computes wrong sums")
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["--only", "smooth_lab"]) == 0
    out, progress = capsys.readouterr()
    assert re.fullmatch(r"(masksafe on \S+: smooth_labels: right(, right)*\n)+", progress)
    assert re.search(r"On CPUs jaxlib \S+ computes wrong sums, also without masksafe", out)


def test_status_is_one_if_the_contract_is_broken(capsys, monkeypatch):
    monkeypatch.setitem(OPS, "smooth_labels", lambda labels, alpha, where: labels)
    assert main(["--only", "smooth_labels"]) == 1
    assert "does NOT keep its contract" in capsys.readouterr().out


def test_an_unknown_op_is_refused(capsys):
    assert main(["--only", "nothing_of_the_kind"]) == 2
    assert "No op has any of nothing_of_the_kind in its name." in capsys.readouterr().err


def mean_of_rows():
    live = jnp.array([[True, True, False], [False] * 3])
    return lambda x: masksafe.mean(x, -1, where=live), (X,), {0: ~live}


def mean_by_products():
    live = jnp.array([[1.0, 1, 0], [1, 1, 1]])
    return lambda x: (x * live).sum(-1) / live.sum(-1), (X,), {0: live == 0}


@pytest.mark.forms
@pytest.mark.parametrize(
    ("case", "status", "verdict"), [("mean_of_rows", 0, "right"), ("mean_by_products", 1, "leaks")]
)
def test_a_function_of_the_user_gets_a_verdict(case, status, verdict, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "own_cases", sys.modules[__name__])
    assert main([f"own_cases:{case}"]) == status
    captured = capsys.readouterr()
    assert re.search(f"touches nothing +{verdict}", captured.out)
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
def test_what_is_no_function_of_the_user_is_an_error(case, message, capsys):
    with pytest.raises(SystemExit) as error:
        main([case])
    assert error.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_an_error_of_the_user_s_own_is_raised(monkeypatch):
    monkeypatch.setitem(sys.modules, "own_cases", sys.modules[__name__])
    with pytest.raises(TypeError, match="positional argument"):
        main(["own_cases:judge"])
