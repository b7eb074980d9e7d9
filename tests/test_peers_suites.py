"""The tests that optax has of its losses, run with those of masksafe in their place.

In that run this file is a plugin of pytest.
"""

import contextlib
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import masksafe

TESTS = Path(__file__).parent
FILES = ("classification", "fenchel_young", "ranking", "regression", "segmentation", "self_supervised", "smoothing")

# What fails and is meant to: the test, and why.
INTENDED = {
    "GeneralizedKLDivergenceTest::test_deprecated_alias": "the old name is kept without a warning",
    "DiceLossTest::test_probability_validation": "the label checks report such probabilities, and are off by default",
}
JVP = "it takes jax.jvp, which outside of forward_mode is refused"
INTENDED_OUTSIDE_OF_FORWARD_MODE = {
    "SoftmaxCrossEntropyTest::test_gradient": JVP,
    "SafeSoftmaxCrossEntropyTest::test_gradient": JVP,
    "SoftmaxCrossEntropyWithIntegerLabelsTest::test_gradient": JVP,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "files", "tests", "intended", "least"),
    [
        ("default", FILES, "test", INTENDED | INTENDED_OUTSIDE_OF_FORWARD_MODE, 150),
        ("forward", ["classification"], "test_gradient", {}, len(INTENDED_OUTSIDE_OF_FORWARD_MODE)),
    ],
)
def test_suite_of_optax(mode, files, tests, intended, least, tmp_path):
    pytest.importorskip("optax")
    result = tmp_path / "result.json"
    environment = os.environ | {
        "MASKSAFE_SUITE_MODE": mode,
        "MASKSAFE_SUITE_RESULT": str(result),
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]),
    }
    modules = [f"optax.losses._{file}_test" for file in files]
    options = ["-q", "-p", "test_peers_suites", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(tmp_path)]
    command = [sys.executable, "-m", "pytest", *options, "-k", tests, "--pyargs", *modules]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    outcome = json.loads(result.read_text())
    # Both ways: what no longer fails is to leave the list.
    assert set(outcome["failed"]) == set(intended), run.stdout[-4000:] + run.stderr[-2000:]
    assert outcome["passed"] >= least


# The hooks of the plugin.

OUTCOME = {"failed": [], "passed": 0}
CONTEXT = contextlib.ExitStack()  # kept: a context that nobody holds ends at once


def pytest_configure():
    for file in FILES:
        module = importlib.import_module(f"optax.losses._{file}")
        for name in vars(masksafe.losses):
            if name in vars(module) and not name.startswith("_"):
                setattr(module, name, getattr(masksafe.losses, name))
    if os.environ["MASKSAFE_SUITE_MODE"] == "forward":
        CONTEXT.enter_context(masksafe.forward_mode())


def pytest_runtest_logreport(report):
    if report.failed:
        OUTCOME["failed"].append("::".join(report.nodeid.split("::")[-2:]))
    elif report.when == "call" and report.passed:
        OUTCOME["passed"] += 1


def pytest_unconfigure():
    Path(os.environ["MASKSAFE_SUITE_RESULT"]).write_text(json.dumps(OUTCOME))
