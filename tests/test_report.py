"""`python -m masksafe`: what it finds, prints, writes and returns."""

import importlib.metadata
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import masksafe
from masksafe.__main__ import main
from masksafe._report import _probe, _show
from masksafe._report._cases import Case, all_cases
from masksafe._report._libraries import PEERS, _ops, is_installed, runner
from masksafe._report._verdict import Verdict, judge

X = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], np.float32)
MASK = np.array([[True, True, False], [True, True, True]])
SUM = Case("sum", "garbage under the mask", {"x": X, "where": MASK}, {"x": ~MASK}, None)


@pytest.fixture(autouse=True)
def two_devices(monkeypatch):
    devices = jax.devices()[:2]
    monkeypatch.setattr(jax, "local_devices", lambda **_: devices)


@pytest.fixture
def verdict_on(monkeypatch):
    """The verdict on a function that stands in for an op of masksafe."""

    def of(fn, case):
        monkeypatch.setitem(_ops("masksafe"), case.op, fn)
        return judge(case, runner("masksafe", case))

    return of


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x, where: masksafe.sum(x, -1, where), Verdict.RIGHT),
        (lambda x, where: jnp.where(where, jnp.sqrt(jnp.abs(x)), 0).sum(-1), Verdict.NAN),
        (lambda x, where: jnp.sum(jnp.nan_to_num(x, posinf=9, neginf=7), -1), Verdict.LEAKS),
        (lambda x, where: jnp.where(where, x, jnp.isinf(x)).sum(-1), Verdict.LEAKS),
        (lambda x, where: jnp.where(where, x, x < -1e4).sum(-1), Verdict.LEAKS),
        (lambda x, where: x.sum(-1), Verdict.NAN),
        (lambda x: x, Verdict.REFUSED),
    ],
)
def test_verdicts_on_garbage(verdict_on, fn, expected):
    assert verdict_on(fn, SUM) == expected


@jax.custom_vjp
def zero_with_a_gradient(x):
    return jnp.zeros_like(x)


zero_with_a_gradient.defvjp(lambda x: (jnp.zeros_like(x), None), lambda _, d_zero: (d_zero,))


def test_a_gradient_of_what_is_masked_is_a_leak(verdict_on):
    leak = lambda x, where: jnp.where(where, x, zero_with_a_gradient(x)).sum(-1)  # noqa: E731
    assert verdict_on(leak, SUM) == Verdict.LEAKS


def test_a_wrong_value_is_wrong(verdict_on):
    case = SUM._replace(expected=np.array([3.0, 15.0]))
    assert verdict_on(lambda x, where: masksafe.sum(x, -1, where), case) == Verdict.RIGHT
    assert verdict_on(lambda x, where: 1.01 * masksafe.sum(x, -1, where), case) == Verdict.WRONG


def test_a_bad_label_has_to_be_nan_in_value_and_gradient(verdict_on):
    case = next(case for case in all_cases() if "label -1 of" in case.what)
    ours = masksafe.losses.softmax_cross_entropy_with_integer_labels
    assert verdict_on(ours, case) == Verdict.RIGHT
    assert verdict_on(lambda logits, labels: ours(logits, labels % logits.shape[-1]), case) == Verdict.WRONG
    only_value = lambda logits, labels: jnp.where(labels < 0, jnp.nan, ours(logits, jnp.abs(labels)))  # noqa: E731
    assert verdict_on(only_value, case) == Verdict.WRONG


def test_every_public_op_is_in_a_case():
    ops = {case.op for case in all_cases()}
    missing = {name for name in dir(masksafe.losses) if not name.startswith("_")} - ops
    assert missing == {
        "RouterStatistics",  # the parts of a loss
        "make_fenchel_young_loss",  # makes a loss
        "convex_kl_divergence",  # other names
        "safe_softmax_cross_entropy",
        "ctc_loss_with_forward_probs",
    }


def test_report_of_masksafe_alone(capsys, tmp_path):
    assert main(["--peers", "none", "--only", "smooth_lab,nothing_else", "--json", str(tmp_path / "report.json")]) == 0
    out, progress = capsys.readouterr()
    assert re.fullmatch(r"(masksafe on \S+: smooth_labels: right(, right)*\n)+", progress)
    assert "smooth_labels" in out
    assert "jaxlib" in out
    assert "keeps its contract" in out
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["keeps_contract"] is True
    assert {row["op"] for row in report["cases"]} == {"smooth_labels"}
    assert report["versions"]["jax"]
    assert all(name.startswith("masksafe on") for name in report["cases"][0]["verdicts"])
    assert {verdict for row in report["cases"] for verdict in row["verdicts"].values()} <= {"right", "-"}


def test_status_is_one_if_the_contract_is_broken(capsys, monkeypatch):
    monkeypatch.setitem(_ops("masksafe"), "smooth_labels", lambda labels, alpha, where: labels)
    assert main(["--peers", "none", "--only", "smooth_labels"]) == 1
    assert "does NOT keep its contract" in capsys.readouterr().out


def test_a_jaxlib_that_computes_wrong_sums_is_named(capsys, monkeypatch):
    assert _probe.fault() is None
    monkeypatch.setattr(_probe, "mean", lambda losses: 0.99 * masksafe.mean(losses))
    assert main(["--peers", "none", "--only", "smooth_labels"]) == 1
    out = capsys.readouterr().out
    assert f"jaxlib {importlib.metadata.version('jaxlib')} computes wrong sums here" in out
    assert "keeps its contract" in out  # which is not to blame


@pytest.mark.slow
@pytest.mark.parametrize(("peer", "op"), [("optax", "kl_divergence_with"), ("flax", "layer_norm")])
def test_peers_get_the_same_cases(peer, op, capsys):
    assert main(["--peers", peer, "--only", op]) == 0
    out = capsys.readouterr().out
    assert re.search(rf"{peer}: \d+ of", out)
    assert "jax.nn" not in out


def test_unknown_peers_and_ops_are_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--peers", "numpy"])
    assert "numpy is none of" in capsys.readouterr().err
    assert main(["--only", "nothing_of_the_kind"]) == 2


def test_plain_text_without_rich(capsys, monkeypatch):
    monkeypatch.setattr(_show.importlib.util, "find_spec", lambda name: None)
    _show.table("title", ["op", "masksafe"], [["sum", "right"]])
    assert capsys.readouterr().out == "title\nop   masksafe\n---  --------\nsum  right\n\n"


@pytest.mark.parametrize("peer", [peer for peer in PEERS if is_installed(peer)])
def test_ops_of_peers_are_those_of_cases(peer):
    known = {case.op for case in all_cases()}
    public = {name for name in _ops(peer) if hasattr(masksafe, name) or hasattr(masksafe.losses, name)}
    assert set(_ops(peer)) <= public | known
    assert set(_ops(peer)) & known


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
    assert f"touches nothing: {verdict}" in captured.err
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
        main(["own_cases:runner"])
