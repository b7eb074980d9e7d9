"""The example of corrupted labels: what each mode tells of each batch."""

import importlib
import subprocess
import sys

import pytest

FIRST = "1 of 599 labels are outside [0, 10); first at (101,): 10"  # 700 in batches of 599
SECOND = "1 of 598 labels are outside [0, 10); first at (102,): -1"  # 1300; the masked one does not count


@pytest.fixture(scope="module")
def debug_labels():
    """It imports scikit-learn, which takes seconds."""
    return importlib.import_module("debug_labels")


def test_without_checks_the_loss_is_nan_and_stays_so(debug_labels):
    good, *bad = debug_labels.plain(debug_labels.read_batches())
    assert good == "loss 2.303"
    assert bad == ["loss nan"] * 2


@pytest.mark.slow
def test_checks_tell_which_label_is_bad(debug_labels):
    for run in (debug_labels.with_checkify, debug_labels.with_errors):
        good, first, second = run(debug_labels.read_batches())
        assert good == "loss 2.303"
        assert FIRST in first
        assert SECOND in second
        assert f"called at {debug_labels.__file__}:" in first


@pytest.mark.slow
def test_the_report_is_printed_and_jax_logs_what_failed(debug_labels):
    done = subprocess.run([sys.executable, debug_labels.__file__], capture_output=True, text=True, check=True)
    assert done.stdout.count(FIRST) == done.stdout.count(SECOND) == 2
    assert FIRST in done.stderr
    assert SECOND in done.stderr
