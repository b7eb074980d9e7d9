"""What a program does is decided when it is lowered, by the platform that it is lowered for."""

import compiled
import jax
import pytest
from measure import GRADIENT, Case

pytestmark = pytest.mark.optimised

CASES = {case.work: case for of in compiled.benchmarks().values() for case in of if case.dtype == "float32"}


def lowered(case: Case, platform: str) -> str:
    """The value with its gradient, as it is handed to XLA."""
    step, args = compiled.step_of(case, "masksafe", GRADIENT)
    return jax.jit(step).trace(*args).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("work", ["one-hot", pytest.param("layer norm", marks=pytest.mark.exhaustive)])
def test_a_cpu_gets_blocks_for_its_caches_and_a_gpu_and_a_tpu_one_pass(work):
    assert "while" in lowered(CASES[work], "cpu")
    assert "while" not in lowered(CASES[work], "cuda") + lowered(CASES[work], "tpu")


def test_only_on_a_gpu_moments_are_computed_apart_from_a_gradient():
    barriers = {name: lowered(CASES["layer norm"], name).count("optimization_barrier") for name in ("cuda", "tpu")}
    assert barriers["cuda"] > barriers["tpu"]
