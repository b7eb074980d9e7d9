"""Programs for a GPU that is not there."""

import pytest
from programs import TARGETS

H100 = TARGETS["h100"]


@pytest.fixture
def h100():
    """The name of the target; without the plugin that compiles for it, the test is skipped."""
    if not H100.is_installed:
        pytest.skip(f"{H100.module} is not installed: {H100.install}")
    return H100.name
