"""The benchmarks of programs: shapes in place of arrays, what is counted, and what is timed on a GPU."""

import dataclasses
import functools
import time
import types

import command
import compiled
import formulas
import gpu
import jax
import jax.numpy as jnp
import losses
import measure
import numpy as np
import operations
import programs
import pytest
import results
from measure import PASSES
from programs import TARGETS, compile_for

SCATTERS = """
%fused (p.0: f32[4], p.1: s32[8,1], p.2: f32[8]) -> f32[4] {
  %exp = f32[8]{0} exponential(%p.2)
  ROOT %scatter.1 = f32[4]{0} scatter(%p.0, %p.1, %exp), to_apply=%add
}

ENTRY %main (x: f32[4], ids: s32[8,1], y: f32[8]) -> f32[4] {
  %scatter_fusion = f32[4]{0} fusion(%x, %ids, %y), kind=kInput, calls=%fused
  ROOT %scatter.2 = f32[4]{0} scatter(%scatter_fusion, %ids, %y), to_apply=%add
}
"""
X = jax.ShapeDtypeStruct((256,), "float32")
WORK = measure.Work({"masksafe": jnp.square, "optax": lambda x: x * x + 1, "torch": None}, (np.ones(256, np.float32),))
CASE = measure.Case("power", "none", "float32", "large", "256", lambda: WORK)
EACH = [(what, name) for what in PASSES for name in ("masksafe", "optax")]


@pytest.mark.slow
def test_nothing_is_drawn_where_only_shapes_are_wanted(monkeypatch):
    lengths_only = types.SimpleNamespace(uniform=lambda low, high, shape: np.ones(shape))
    monkeypatch.setattr(np.random, "default_rng", lambda seed: lengths_only)
    for case in {case.work: case for of in compiled.benchmarks().values() for case in of}.values():
        assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(compiled.shapes_of(case.prepare).args))


def test_each_op_and_dtype_has_cases():
    cases = [case for of in compiled.benchmarks().values() for case in of]
    for work in {case.work for case in cases} - {"attention by cuDNN", *losses.FLOAT32_ONLY}:
        assert {case.dtype for case in cases if case.work == work} == set(compiled.DTYPES), work
    works = [case.work for _, case in gpu.cases()]
    assert len(set(works[: len(set(works))])) == len(set(works))  # each op once before any twice
    assert {case.work for case in cases} == set(works)


def test_a_case_is_compiled_for_a_target():
    rows = list(compiled.rows_of("powers", CASE, "cpu"))
    assert [(row.what, row.candidate) for row in rows] == EACH
    assert [row.bytes_moved for row in rows[:2]] == [2048, 2048]
    assert min(row.bytes_moved for row in rows[2:]) >= 4096
    assert {row.launches for row in rows[:2]} == {1}


@pytest.mark.slow
def test_a_case_is_measured_for_each_candidate_and_pass():
    found = list(compiled.sizes_of("powers", CASE))
    assert [(row.what, row.candidate) for row in found] == EACH
    assert found[0].operations < found[1].operations < found[3].operations
    assert all(row.instructions > 0 and row.seconds > 0 for row in found)


def test_operations_are_counted_before_xla_joins_those_that_are_equal_and_for_any_length():
    counts = [operations.operations(fn, X) for fn in (lambda x: x * x, lambda x: x * x + x * x)]
    assert counts[1] == counts[0] + 2
    assert operations.operations(jnp.var, X) == operations.operations(jnp.var, jax.ShapeDtypeStruct((8,), "float32"))


def test_a_program_has_kernels_of_which_it_is_the_sum():
    program = compile_for("cpu", lambda x: jnp.sum(x) + x, X)
    assert program.bytes_moved == sum(kernel.bytes_moved for kernel in program.kernels) > 2048
    assert program.launches == len(program.kernels)
    assert program.collectives == {}
    assert programs.Program(SCATTERS, 0).scatters == 2  # inside of kernels too


def test_programs_can_be_kept(tmp_path, monkeypatch):
    monkeypatch.setenv(programs.KEPT, str(tmp_path / "kept"))
    found = [compile_for("cpu", lambda x, n=n: x + n, X) for n in (1, 1, 2)]
    assert len(list((tmp_path / "kept").iterdir())) == 2
    monkeypatch.setattr(jax.stages.Lowered, "compile", None)
    assert compile_for("cpu", lambda x: x + 2, X) == found[2] != found[0] == found[1]


def test_what_is_missing_is_told(monkeypatch):
    monkeypatch.setitem(TARGETS, "h100", TARGETS["h100"]._replace(module="nothing_of_this_name"))
    text = r'h100: nothing_of_this_name is not installed: pip install "\.\[gpu-compile\]"'
    with pytest.raises(SystemExit, match=text):
        compiled.main([])


# On a GPU


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_without_a_gpu_it_says_what_it_needs():
    with pytest.raises(SystemExit, match=r"gpu\.py needs a GPU, and JAX's default device is "):
        gpu.main([])


@pytest.mark.forms
def test_candidates_are_timed_and_what_fails_or_has_no_time_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(measure.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(gpu, "SECONDS", 1e-4)
    assert gpu.bytes_per_second(2**20) > 0
    bad, end = dataclasses.replace(CASE, work="bad", prepare=lambda: 1 / 0), time.monotonic() + 60
    timed = functools.partial(gpu.rows_of, bandwidth=1e9, end=end)
    cases, path = [("powers", bad), ("powers", CASE)], tmp_path / "powers.csv"
    failures = command.run(command.parser_of().parse_args([]), "", cases, timed, gpu.table, path)
    rows = results.read_csv(path)
    assert failures == ["powers: bad, none, float32, large: ZeroDivisionError: division by zero"]
    assert [(row.what, row.candidate, row.bytes) for row in rows] == [
        (*each, size) for each, size in zip(EACH, (2048, 2048, 4096, 4096), strict=True)
    ]
    assert all(0 < row.minimum_ms <= row.median_ms for row in rows)
    with pytest.raises(TimeoutError, match="no time was left"):
        list(gpu.rows_of("powers", CASE, 1e9, time.monotonic() - 1))


@pytest.mark.slow
def test_a_smoke_run_compiles_a_case_and_prints_its_table(capsys, monkeypatch):
    monkeypatch.setattr(compiled, "benchmarks", lambda: {"powers": [CASE]})
    compiled.main(["--target", "cpu", "--quick"])
    assert "power" in capsys.readouterr().out
    options = command.parser_of().parse_args(["--only", "softmax", "--quick"])
    assert sorted(case.work for _, case in command.choose(gpu.cases(), options)) == sorted(formulas.SOFTMAX)


def test_the_tables_of_programs_are_made_from_the_csvs():
    of_h100, of_cpu = (results.read_csv(results.csv_of(f"compiled/{target}")) for target in ("h100", "cpu"))
    assert compiled.table_of_ops(results.pairs(of_h100)).count("\n") > 50
    assert operations.table(of_cpu).count("\n") > 50
