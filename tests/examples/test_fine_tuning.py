"""The report on what fine-tuning averages: masksafe is right in every case, and the formulas of others are not."""

import pytest
import usual_formulas
from report import fine_tuning
from verdicts import Verdict


@pytest.fixture(scope="module")
def verdicts():
    cases = fine_tuning.all_cases()
    names = [(case.op, case.what) for case in cases]
    columns = {name: fine_tuning.judge_cases(cases, ops) for name, ops in fine_tuning.LIBRARIES.items()}
    return {name: dict(zip(names, column, strict=True)) for name, column in columns.items()}


@pytest.mark.slow
def test_masksafe_is_right_in_every_case(verdicts):
    assert set(verdicts["masksafe"].values()) == {Verdict.RIGHT}
    assert {op for op, _ in verdicts["masksafe"]} == set(fine_tuning.WITH_MASKSAFE)


@pytest.mark.slow
@pytest.mark.parametrize("library", ["trl-like", "tunix-like"])
def test_formulas_that_multiply_by_a_mask_are_not(verdicts, library):
    wrong = {name: verdict for name, verdict in verdicts[library].items() if verdict != Verdict.RIGHT}
    assert set(wrong.values()) == {Verdict.NAN, Verdict.WRONG}
    assert wrong["clipped policy loss", "garbage under the mask"] == Verdict.NAN
    assert wrong["policy entropy", "a forbidden action"] == Verdict.NAN


def test_the_table_and_the_status(capsys, monkeypatch):
    cases = [case for case in fine_tuning.all_cases() if case.op == "policy entropy"]
    monkeypatch.setattr(fine_tuning, "all_cases", lambda: cases)
    assert fine_tuning.main() == 0
    assert "a forbidden action" in capsys.readouterr().out
    monkeypatch.setitem(fine_tuning.WITH_MASKSAFE, "policy entropy", usual_formulas.plain_entropy)
    assert fine_tuning.main() == 1
