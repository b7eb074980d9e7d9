"""What a program does is decided when it is lowered, by the platform that it is lowered for."""

import compiled
import jax
import pytest
from measure import GRADIENT, Case

CASES = {case.work: case for of in compiled.benchmarks().values() for case in of if case.dtype == "float32"}


def lowered(case: Case, platform: str) -> str:
    """The value with its gradient, as it is handed to XLA."""
    step, args = compiled.step_of(case, "masksafe", GRADIENT)
    return jax.jit(step).trace(*args).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("work", ["one-hot", pytest.param("layer norm", marks=pytest.mark.forms)])
def test_a_cpu_gets_blocks_for_its_caches_and_a_gpu_one_pass(work):
    assert "while" in lowered(CASES[work], "cpu")
    assert "while" not in lowered(CASES[work], "cuda")
