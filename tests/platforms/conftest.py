"""Programs for a GPU that is not there."""

import jax
import pytest
from programs import TARGETS

H100 = TARGETS["h100"]


@pytest.fixture
def h100():
    """The name of the target; without the plugin that compiles for it, the test is skipped."""
    if not H100.is_installed:
        pytest.skip(f"{H100.module} is not installed: {H100.install}")
    return H100.name


@pytest.fixture(autouse=True)
def optimised():
    """The other tests switch XLA's optimisations off to save time; here they are what is tested."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
