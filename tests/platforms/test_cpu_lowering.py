"""What a program does is decided when it is lowered, by the platform that it is lowered for, and by nothing else."""

import compiled
import jax
import pytest
from measure import GRADIENT, Case

CASES = {case.work: case for of in compiled.benchmarks().values() for case in of if case.dtype == "float32"}
TWO_FORMS = ("integer", "one-hot", "layer norm")  # blocks of rows for the caches of a CPU, or one pass


def lowered(case: Case, platform: str) -> str:
    """The value with its gradient, as it is handed to XLA."""
    step, args = compiled.step_of(case, "masksafe", GRADIENT)
    return jax.jit(step).trace(*args).lower(lowering_platforms=(platform,)).as_text()


@pytest.fixture
def asking_fails(monkeypatch):
    def asked(*args, **kwargs):
        raise AssertionError("the platform of the process is no business of an op")

    for name in ("default_backend", "devices", "local_devices"):
        monkeypatch.setattr(jax, name, asked)


@pytest.mark.forms
@pytest.mark.parametrize("work", CASES)
def test_no_op_asks_for_the_platform_of_the_process(work, asking_fails):
    assert lowered(CASES[work], "cpu")  # no other test has these shapes, so JAX traces the op here


@pytest.mark.forms
@pytest.mark.parametrize("work", TWO_FORMS)
def test_a_cpu_gets_blocks_and_a_gpu_one_pass(work):
    assert "while" in lowered(CASES[work], "cpu")
    assert "while" not in lowered(CASES[work], "cuda")
