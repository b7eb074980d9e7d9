"""compiled.py: shapes in place of arrays, ratios, and what is written of them."""

import dataclasses
import types

import compiled
import jax
import jax.numpy as jnp
import measure
import numpy as np
import programs
import pytest
import results
from programs import TARGETS, compile_for

PAGE = "# Page\n<!-- table: compiled -->\nold\n<!-- end -->\n"
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
ROW = compiled.Compiled(
    "powers", "power", "none", "float32", "3", "value", "masksafe", 3000, 2, 2**20, "h100", "2026-11-01", "jax 1"
)


@pytest.fixture
def rows():
    peer = dataclasses.replace(ROW, candidate="optax", bytes_moved=2000, launches=1, temporary_bytes=0)
    both = [ROW, peer]
    fewer = [dataclasses.replace(row, dtype="bfloat16", bytes_moved=1000) for row in both]
    other = [dataclasses.replace(row, work="root", mask="rows", bytes_moved=4000 + row.bytes_moved) for row in both]
    return [*both, *fewer, *other, *(dataclasses.replace(row, what="value with gradient") for row in both)]


@pytest.mark.slow
def test_nothing_is_drawn_where_only_shapes_are_wanted(monkeypatch):
    lengths_only = types.SimpleNamespace(uniform=lambda low, high, shape: np.ones(shape))
    monkeypatch.setattr(np.random, "default_rng", lambda seed: lengths_only)
    for _, case in compiled.chosen(compiled.parse(["--quick"])):
        assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(compiled.shapes_of(case.prepare).args))


def test_each_op_and_dtype_has_cases():
    cases = [case for of in compiled.benchmarks().values() for case in of]
    for work in {case.work for case in cases} - {"attention by cuDNN", *compiled.FLOAT32_ONLY}:
        assert {case.dtype for case in cases if case.work == work} == set(compiled.DTYPES), work


def test_a_case_is_compiled_for_a_target():
    work = measure.Work({"masksafe": jnp.square, "optax": lambda x: x * x, "torch": None}, (jnp.ones(256),))
    case = measure.Case("power", "none", "float32", "large", "256", lambda: work)
    rows = list(compiled.rows_of("powers", case, "cpu"))
    assert [(row.what, row.candidate) for row in rows] == [
        (what, name) for what in measure.PASSES for name in ("masksafe", "optax")
    ]
    assert [row.bytes_moved for row in rows[:2]] == [2048, 2048]
    assert min(row.bytes_moved for row in rows[2:]) >= 4096
    assert {row.launches for row in rows[:2]} == {1}


def test_a_program_has_kernels_of_which_it_is_the_sum():
    program = compile_for("cpu", lambda x: jnp.sum(x) + x, jax.ShapeDtypeStruct((256,), "float32"))
    assert program.bytes_moved == sum(moved for *_, moved in program.kernels()) > 2048
    assert program.launches == len(list(program.kernels()))
    assert program.collectives == {}


def test_scatters_are_counted_inside_of_kernels_too():
    assert programs.Program(SCATTERS, 0).scatters == 2


def test_programs_can_be_kept(tmp_path, monkeypatch):
    monkeypatch.setenv(programs.KEPT, str(tmp_path / "kept"))
    compiled_ = [compile_for("cpu", lambda x, n=n: x + n, jax.ShapeDtypeStruct((256,), "float32")) for n in (1, 1, 2)]
    assert len(list((tmp_path / "kept").iterdir())) == 2
    monkeypatch.setattr(jax.stages.Lowered, "compile", None)
    again = compile_for("cpu", lambda x: x + 2, jax.ShapeDtypeStruct((256,), "float32"))
    assert again == compiled_[2] != compiled_[0] == compiled_[1]


def test_ops_are_in_the_order_of_their_mean_ratios(rows):
    found = compiled.pairs(rows)
    assert [pair.bytes_ratio for pair in found] == [1.5, 1.0, 7 / 6, 1.5]
    first, second, third = compiled.lines_of_ops(found)
    assert first == ["power", "optax", "value with gradient", "**1.50**", "**1.50**", "float32", "2 / 1", "1.00 / 0"]
    assert second[:6] == ["power", "optax", "value", "**1.22**", "**1.50**", "float32"]
    assert third[3:6] == ["**1.17**", "**1.17**", "rows, float32"]


def test_cycles_stand_in_place_of_launches(rows):
    rows = [dataclasses.replace(row, cycles=row.temporary_bytes + 100) for row in rows]
    found = compiled.pairs(rows)
    worst = f"**{(100 + 2**20) / 100:.0f}**"
    assert all(line[6:] == [worst, worst, "1.00 / 0"] for line in compiled.lines_of_ops(found))
    assert compiled.header_of(found)[6:] == [*compiled.CYCLES, compiled.HEADER[-1]]
    assert "3 move more than 1.1 times the bytes of the other library's, and 4 take more than" in compiled.summary(rows)


def test_page_and_picture_are_made_from_the_csv(rows, tmp_path):
    page = tmp_path / "performance" / "gpu.md"
    page.parent.mkdir()
    page.write_text(PAGE)
    results.write_csv(compiled.csv_of("h100", tmp_path), rows, compiled.Compiled)
    compiled.main(["--plot-only", "--docs", str(tmp_path)])
    text = page.read_text()
    assert "old" not in text
    assert "Compiled 2026-11-01, jax 1." in text
    assert "Of 4 programs 3 move more than 1.1 times" in text
    assert (tmp_path / "_static" / "benchmarks" / "compiled_h100.png").stat().st_size > 5_000
    assert results.read_csv(compiled.csv_of("h100", tmp_path), compiled.Compiled) == rows


def test_what_is_missing_is_told(monkeypatch):
    monkeypatch.setitem(TARGETS, "h100", dataclasses.replace(TARGETS["h100"], module="nothing_of_this_name"))
    with pytest.raises(
        SystemExit, match=r'h100: nothing_of_this_name is not installed: pip install "\.\[gpu-compile\]"'
    ):
        compiled.main([])
