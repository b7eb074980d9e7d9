"""gpu.py: where there is no GPU it says so; what is timed, and what is written of it, on a CPU."""

import dataclasses
import time

import gpu
import jax
import jax.numpy as jnp
import measure
import pytest
import results
import softmax
from command import Console

WORK = measure.Work({"masksafe": jnp.square, "optax": jnp.exp, "torch": None}, (jnp.ones(256),))
CASE = measure.Case("power", "none", "bfloat16", "large", "256", lambda: WORK)
ROW = gpu.Timed(
    *("powers", "power", "none", "bfloat16", "3", "value", "masksafe"),
    *(1.0, 2.0, 100, 1.0, "a GPU", "2026-11-01", "jax 1"),
)
PEER = dataclasses.replace(ROW, candidate="optax", median_ms=1.25)


@pytest.fixture(autouse=True)
def in_short(monkeypatch):
    monkeypatch.setattr(measure.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(gpu, "SECONDS", 1e-4)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_without_a_gpu_it_says_what_it_needs():
    with pytest.raises(SystemExit, match=r"gpu\.py needs a GPU, and JAX's default device is "):
        gpu.main([])


def test_each_op_has_cases_the_first_of_all_of_them_first():
    works = [case.work for _, case in gpu.cases()]
    assert len(set(works[: len(set(works))])) == len(set(works))
    assert {case.work for of in gpu.benchmarks().values() for case in of} == set(works)
    chosen = gpu.chosen(gpu.parse(["--only", "softmax", "--quick"]))
    assert sorted(case.work for _, case in chosen) == sorted(softmax.PEERS)


@pytest.mark.forms
def test_candidates_are_timed_and_what_fails_or_has_no_time_is_named(tmp_path):
    bad = dataclasses.replace(CASE, work="bad", prepare=lambda: 1 / 0)
    cases, console = [("powers", bad), ("powers", CASE)], Console(quiet=True)
    rows, failures = gpu.time_all(cases, 1e9, time.monotonic() + 60, console)
    assert failures == ["bad, none, bfloat16: ZeroDivisionError: division by zero"]
    assert [(row.what, row.candidate) for row in rows] == [
        (what, name) for what in measure.PASSES for name in ("masksafe", "optax")
    ]
    assert [row.bytes for row in rows] == [2048, 2048, 4096, 4096]
    assert all(0 < row.minimum_ms <= row.median_ms for row in rows)
    results.write_csv(gpu.csv_of(tmp_path), rows, gpu.Timed)
    assert results.read_csv(gpu.csv_of(tmp_path), gpu.Timed) == rows
    _, failures = gpu.time_all(cases[1:], 1e9, time.monotonic() - 1, console)
    assert failures == ["power, none, bfloat16: no time was left"]


def test_short_calls_are_queued_and_a_copy_has_a_bandwidth():
    calls = gpu.Queued(jnp.square, (jnp.ones(4),)).calls
    assert 1 <= calls <= gpu.MOST_CALLS
    assert gpu.bytes_per_second(2**20) > 0


def test_shares_are_those_of_a_copy_and_of_cudnn():
    assert gpu.lines_of([ROW, PEER]) == [["power", "none", "value", "optax", "2.00 / 1.25", "**1.60**", "50 %", "80 %"]]
    ours = dataclasses.replace(ROW, benchmark="attention", work="attention")
    theirs = dataclasses.replace(ours, candidate="jax.nn", median_ms=4.0)
    assert gpu.lines_of([ours, theirs])[0][-2:] == ["-", "-"]
    by_cudnn = dataclasses.replace(theirs, work=gpu.BY_CUDNN, median_ms=1.0)
    assert gpu.lines_of([ours, theirs, by_cudnn])[0][-2:] == ["50 %", "25 %"]
