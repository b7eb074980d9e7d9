"""Programs for a GPU and a TPU that are not there."""

import pytest
from programs import TARGETS


def installed(name):
    """The name of a target; without the plugin that compiles for it, the test is skipped."""
    target = TARGETS[name]
    if not target.is_installed:
        pytest.skip(f"{target.module} is not installed: {target.install}")
    return name


@pytest.fixture
def h100():
    return installed("h100")


@pytest.fixture
def v5e():
    return installed("v5e")


@pytest.fixture(params=["h100", "v5e"])
def target(request):
    return installed(request.param)
