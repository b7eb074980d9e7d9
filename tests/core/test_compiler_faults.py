"""A program for a CPU warns once of a jaxlib whose compiler computes wrong sums or crashes there."""

import functools
import importlib
import inspect
import warnings

import jax
import jaxlib.version
import numpy as np
import pytest
from tiers import parametrize

import masksafe
from masksafe._core import compiler_faults

FLAG = "--xla_cpu_experimental_ynn_fusion_type="
X = np.array([1.0, np.nan, 3.0], np.float32)


def new_mean():
    """A function that JAX has not traced yet."""
    return functools.partial(masksafe.mean, where=np.array([True, False, True]))


@pytest.fixture
def install(monkeypatch):
    """A function that puts a version of jaxlib, and flags of XLA, in the place of this process's."""
    jax.devices()  # made with this process's own flags

    def stand_in(version, flags=""):
        monkeypatch.setattr(jaxlib.version, "__version__", version)
        monkeypatch.setenv("XLA_FLAGS", flags)
        importlib.reload(compiler_faults)

    yield stand_in
    monkeypatch.undo()
    importlib.reload(compiler_faults)


@parametrize(
    "run",
    [lambda: jax.jit(jax.grad(new_mean()))(X)],
    exhaustive=[
        lambda: new_mean()(X),
        lambda: jax.jit(new_mean()).lower(X),
        lambda: jax.jit(new_mean()).trace(X).lower(lowering_platforms=("cpu", "cuda")),
    ],
    ids=["grad", "without jit", "lower", "two platforms"],
)
@parametrize(
    ("version", "fault"),
    [("0.10.2", "silently computes wrong sums, and may crash")],
    exhaustive=[("0.11.0", "may crash on arrays of rank 7 and 8")],
)
def test_the_first_program_warns_and_no_other_one(install, version, fault, run):
    install(version)
    with pytest.warns(UserWarning, match=rf"jaxlib {version} {fault}.* another version .* XLA_FLAGS={FLAG} ") as found:
        run()
    assert [(warning.filename, warning.lineno) for warning in found] == [(__file__, inspect.getsourcelines(run)[1])]
    run()  # a warning is an error here


def test_a_program_for_another_platform_is_silent_and_one_for_a_cpu_still_warns_and_runs(install):
    expected = jax.value_and_grad(new_mean())(X)
    install("0.11.0")
    traced = jax.jit(jax.value_and_grad(new_mean())).trace(X)
    for platform in "cuda", "tpu":
        traced.lower(lowering_platforms=(platform,))
    with pytest.warns(UserWarning, match="On CPUs"):
        program = traced.lower(lowering_platforms=("cpu",))
    jax.tree.map(np.testing.assert_array_equal, program.compile()(X), expected)


def test_the_flag_that_helps(install):
    helps = {FLAG: True, f"--a=b  {FLAG}\n--c=d": True, f"{FLAG}-reduce": False, f"{FLAG} {FLAG}dot": False}
    for flags, is_enough in helps.items():
        install("0.11.0", flags)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            jax.jit(new_mean())(X)
        assert len(found) == (not is_enough), flags


def test_other_versions_have_no_trace_of_it(install):
    versions = {"0.10.1": False, "0.10.2": True, "0.11.0": True, "0.11.1": False, "0.12.0.1": False}
    for version, has_trace in versions.items():
        install(version)
        assert ("told_on_cpu" in str(jax.make_jaxpr(new_mean())(X))) == has_trace, version
