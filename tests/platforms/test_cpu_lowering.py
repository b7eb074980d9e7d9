"""What a program does is decided when it is lowered, by the platform that it is lowered for, and by nothing else."""

import compiled
import jax
import pytest
from measure import GRADIENT, Case

CASES = {case.work: case for of in compiled.benchmarks().values() for case in of if case.dtype == "float32"}
TWO_FORMS = ("integer", "one-hot", "linear", "attention", "layer norm")  # blocks for the caches of a CPU, or one pass


def lowered(case: Case, platform: str) -> str:
    """The value with its gradient, as it is handed to XLA."""
    jax.clear_caches()
    step, args = compiled.step_of(case, "masksafe", GRADIENT)
    return jax.jit(step).trace(*args).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("work", CASES)
def test_the_platform_of_the_process_does_not_matter(work, monkeypatch):
    from_cpu = lowered(CASES[work], "cpu")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert lowered(CASES[work], "cpu") == from_cpu


@pytest.mark.parametrize("work", TWO_FORMS)
def test_a_gpu_gets_another_form(work):
    assert "while" in lowered(CASES[work], "cpu")
    assert "while" not in lowered(CASES[work], "cuda")
