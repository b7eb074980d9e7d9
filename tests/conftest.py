"""Eight virtual CPU devices for the tests of sharding, and XLA's optimisations for those marked `optimised`."""

import contextlib
import gc
import importlib.metadata
import os

FLAGS = ["--xla_force_host_platform_device_count=8"]
# Compiling is most of the time. Set it to 0 to test what XLA makes of all programs otherwise.
IS_FAST = os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1") != "0"
if IS_FAST:
    FLAGS.append("--xla_cpu_parallel_codegen_split_count=1")
    # It takes two thirds of the time. XLA does not start with a flag that it does not know: later ones have lost it.
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes may share a GPU
os.environ["XLA_FLAGS"] = " ".join([*FLAGS, os.environ.get("XLA_FLAGS", "")])

import jax  # noqa: E402
import pytest  # noqa: E402

from masksafe._core import platforms  # noqa: E402

# What JAX has traced is kept and makes up most objects: to search it for garbage as often as Python does is a fifth of
# the time.
gc.set_threshold(200_000, 20, 100)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """Tests have no doctests: to search them takes a tenth of the time of collecting."""
    return [collector for collector in (yield) if type(collector) is pytest.Module]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip(f"needs a GPU, and JAX's default device is {jax.devices()[0]}")
    jax.config.update("jax_disable_most_optimizations", IS_FAST and not item.get_closest_marker("optimised"))


@pytest.fixture
def choose():
    """A function that makes other choices of sizes and forms than a platform's for the rest of the test."""
    before = platforms.choices()
    with contextlib.ExitStack() as contexts:
        yield lambda **choices: contexts.enter_context(platforms.chosen(**choices))
    assert platforms.choices() == before, "another context of choices ended first, and its choices are back"


@pytest.fixture
def compilations():
    """The programs that are compiled, as a list to which each adds an element."""
    found = []

    def listen(event, *_, **__):
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


def pytest_sessionfinish():
    """Runs a side effect on each device: JAX keeps the last one, and tells once more at exit if a test made it fail."""
    succeed = jax.jit(lambda x: (jax.debug.callback(lambda: None), x)[1])
    for device in jax.local_devices():
        succeed(jax.device_put(0, device)).block_until_ready()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Which process runs a test: tests that share compiled programs run in one."""
    from xdist.scheduler import LoadScopeScheduling

    class ByProgram(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0]
            if file.startswith("tests/contract/"):  # the names end in the op
                return nodeid.rpartition("-")[2].rpartition("[")[2]
            return nodeid if file.startswith("tests/platforms/") else file

    return ByProgram(config, log)
