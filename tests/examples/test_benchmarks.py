"""The benchmarks: who is timed when, what a CSV keeps, and that the pages are those of the CSVs."""

import dataclasses
import importlib

import accuracy
import command
import exchanges
import formulas
import jax
import jax.numpy as jnp
import measure
import numpy as np
import overview
import plots
import pytest
import results
import segments

WORK = measure.Work({"masksafe": jnp.square, "optax": jnp.exp, "torch": lambda x: x}, (jnp.ones(3),))
CASES = [measure.Case("power", "none", "float32", size, "3", lambda: WORK) for size in ("tiny", "large")]
BENCHMARK = measure.Benchmark("powers", "Powers", (("masksafe", "optax"), ("masksafe", "torch")), CASES)
BENCHMARKS = {benchmark.name: benchmark for benchmark in importlib.import_module("all").BENCHMARKS}
OTHERS = {"accuracy", "meshes", "ring_attention", "sweep", "compiled", "compiled for a TPU", "operations", "exchanges"}
OF_ALL = ("headlines", "libraries", "slower", "compiling", "programs")
PAGE = "# Page\n" + "".join(f"<!-- table: {name} -->\nold\n<!-- end -->\n" for name in ("powers", *OF_ALL))


@pytest.fixture
def pauses(monkeypatch):
    found = []
    monkeypatch.setattr(measure.time, "sleep", found.append)
    monkeypatch.setattr(measure, "is_installed", lambda name: name != "torch")
    return found


def test_candidates_take_turns_in_a_new_order_with_pauses(pauses):
    turns = []
    candidates = {name: lambda name=name: turns.append(name) for name in "abc"}
    timings = measure.measure(candidates, 8)
    order = "".join(name for i, name in enumerate(turns) if i == 0 or turns[i - 1] != name)
    assert len(pauses) == 3 * 8
    assert min(pauses) >= 0.05
    assert min(turns.count(name) for name in "abc") > 8  # short calls are repeated
    assert len({order[i : i + 2] for i in range(3, len(order))}) > 3
    assert all(0 < timing.minimum <= timing.median for timing in timings.values())
    assert measure.measure({"a": lambda: None}, 2, budget=60, most=4)["a"].rounds == 4


def test_gradients_are_pulled_back_from_random_numbers():
    x, y = jnp.array([1.0, 2.0]), jnp.array([3.0, 5.0])
    step, (cotangents, *args) = measure.pulled_back(jnp.multiply, (x, y), 1)
    value, gradients = step(cotangents, *args)
    np.testing.assert_array_equal(value, x * y)
    np.testing.assert_allclose(*gradients, y * cotangents)


def test_the_command_measures_draws_and_fills_and_tells_what_failed(pauses, tmp_path, monkeypatch):
    (tmp_path / "docs" / "performance").mkdir(parents=True)
    (tmp_path / "docs" / "performance" / "page.md").write_text(PAGE)
    monkeypatch.setattr(command, "DOCS", tmp_path / "docs")
    out, bad = tmp_path / "out", dataclasses.replace(CASES[0], work="bad", prepare=lambda: 1 / 0)
    with pytest.raises(SystemExit, match="powers: bad, none, float32, tiny: ZeroDivisionError: division by zero"):
        command.main([dataclasses.replace(BENCHMARK, cases=[bad, *CASES])], ["--quick", "--docs", str(out)])
    text = (out / "performance" / "page.md").read_text()
    assert "old" not in text
    assert "masksafe / optax" in text
    assert (out / "_static" / "benchmarks" / "powers.png").stat().st_size > 5_000
    rows = results.read_csv(out / "benchmarks" / "powers.csv")
    assert [(row.what, row.candidate, row.size) for row in rows] == [
        (what, name, "tiny") for what in measure.PASSES for name in ("masksafe", "optax")
    ]
    assert all(row.temporary_bytes is not None and row.compile_s > 0 for row in rows)


def test_figures_of_the_oldest_jax_are_measured_with_it(monkeypatch):
    monkeypatch.setattr(jax, "__version__", "0.10.2")
    assert command.parse([BENCHMARK], ["--oldest"]).folder == results.OLDEST
    monkeypatch.setattr(jax, "__version__", "0.12.0")
    with pytest.raises(SystemExit):
        command.parse([BENCHMARK], ["--oldest"])


def as_numpy(work):
    """The value and the gradient of each candidate."""
    programs = {name: measure.pulled_back(fn, work.args, 1) for name, fn in work.functions.items()}
    return {name: jax.device_get(jax.jit(step)(*args)) for name, (step, args) in programs.items()}


OF_FORMULAS = [
    (segments.prepare, segments.FORMULAS, segments.MASKS, ((100, 2), 9)),
    (formulas.prepare_router, formulas.ROUTERS, formulas.OF_TOKENS, (50, 6, 2)),
    (formulas.prepare_pairs, formulas.PAIRS, formulas.OF_ROWS, (50, 6)),
]


@pytest.mark.parametrize(
    ("prepare", "name", "mask", "sizes"),
    [
        pytest.param(prepare, name, mask, sizes, marks=[pytest.mark.forms] * (mask != masks[-1]))
        for prepare, names, masks, sizes in OF_FORMULAS
        for name in names
        for mask in masks
    ],
)
def test_the_formulas_of_peers_compute_what_masksafe_does(prepare, name, mask, sizes):
    value, other = as_numpy(prepare(name, mask, "float32", sizes)).values()
    rtol = 1e-3 if name == "segment_standardize" else 1e-5  # whose variance is at least epsilon, not larger by it
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol, rtol), value, other)


@pytest.mark.slow
def test_a_ring_computes_what_gathered_keys_do():
    meshes = importlib.import_module("meshes")
    for mask in ("none", "causal, zigzag"):
        work = meshes.prepare_ring("attention", mask, "float32", meshes.SIZES_OF_RING["tiny"])
        np.testing.assert_allclose(*(fn(*work.args) for fn in work.functions.values()), rtol=1e-5, atol=1e-5)


def test_an_error_is_the_largest_of_an_array_in_units_of_its_scale():
    assert accuracy.largest_error((np.float32([8, 3]), np.float32(1)), (np.array([8.0, 4.0]), np.array(1.0))) == 1 / 8
    assert accuracy.largest_error(np.float32([np.nan, 1]), np.ones(2)) == np.inf


def test_errors_of_both_are_a_few_epsilons():
    case = next(case for case in accuracy.cases() if case.work == "var")
    rows = list(accuracy.rows_of("accuracy", case))
    assert {row.candidate for row in rows} == {"masksafe", "JAX"}
    assert {row.dtype for row in rows} == {"float32", "bfloat16", "float16"}
    assert 0 < max(row.error for row in rows) < 4
    assert accuracy.table(rows).count("\n") == 3


def test_an_error_that_exceeds_the_peers_is_bold():
    ours, theirs = (measure.Row(error=error) for error in (2.5, 1.2))
    assert accuracy.of_both(results.Pair(ours, theirs)) == "**2.5** / 1.2"
    assert accuracy.of_both(results.Pair(theirs, ours)) == "1.2 / 2.5"


# What is committed


CSVS = sorted((results.DOCS / "benchmarks").rglob("*.csv"))


@pytest.mark.parametrize("path", CSVS, ids=lambda path: "-".join(path.parts[-2:]))
def test_a_csv_is_written_as_it_is_read(path, tmp_path):
    rows = results.read_csv(path)
    results.write_csv(tmp_path / "copy.csv", rows)
    assert (tmp_path / "copy.csv").read_text() == path.read_text()
    assert {type(row.what) for row in rows} == {str}


def test_every_table_has_one_place():
    texts = [path.read_text() for path in (results.DOCS / results.PAGES).glob("*.md")]
    found = [name for text in texts for name in results.PLACE.findall(text)]
    assert sorted(found) == sorted({*BENCHMARKS, *OTHERS, *OF_ALL})


def contents():
    """What stands on the pages, made from the CSVs; of the sweep and of programs too."""
    meshes, compiled, sweep = map(importlib.import_module, ("meshes", "compiled", "sweep"))
    found = {"accuracy": accuracy.section(results.DOCS)}
    found |= {name: results.section(benchmark, results.DOCS) for name, benchmark in BENCHMARKS.items()}
    found |= {benchmark.name: results.section(benchmark, results.DOCS) for benchmark in meshes.BENCHMARKS}
    found["exchanges"] = exchanges.table(results.read_csv(exchanges.TABLE))
    found["operations"] = compiled.operations.summary(results.read_csv(compiled.csv_of("cpu", results.DOCS)))
    describe = lambda _, rows: sweep.by_work(sweep.compared(rows))  # noqa: E731
    found["sweep"] = results.section(sweep.BENCHMARK, results.DOCS, describe, sweep.summary)
    found["compiled"] = compiled.summary(results.read_csv(compiled.csv_of("h100", results.DOCS)))
    rows, older = (command.all_rows(results.DOCS, folder) for folder in (results.NEWEST, results.OLDEST))
    return found | overview.of_all(rows, older, results.read_csv(compiled.csv_of("cpu", results.DOCS)))


def test_the_pages_are_those_of_the_csvs():
    pages = "".join(path.read_text() for path in (results.DOCS / results.PAGES).glob("*.md"))
    assert [name for name, text in contents().items() if f"\n{text}\n\n<!-- end -->" not in pages] == []
    readme = (results.ROOT / "README.md").read_text()
    assert results.fill(readme, "facts", overview.facts(command.all_rows(results.DOCS, results.NEWEST))) == readme


def test_fill_replaces_what_is_between_the_markers():
    filled = results.fill(results.fill(PAGE, "powers", "new \\1"), "powers", "newer")
    assert filled == PAGE.replace("powers -->\nold\n", "powers -->\n\nnewer\n\n")
    with pytest.raises(ValueError, match="0 markers <!-- table: nobody -->"):
        results.fill(PAGE, "nobody", "")


def test_every_benchmark_has_tiny_and_large_cases():
    assert all({"tiny", "large"} <= {case.size for case in of.cases} for of in BENCHMARKS.values())


def test_every_line_of_the_summary_is_a_case():
    for line in [*overview.HEADLINES, *overview.FACTS]:
        cases = {(case.work, case.mask, case.dtype, case.size) for case in BENCHMARKS[line.benchmark].cases}
        assert line[1:5] in cases, line
        assert ("masksafe", line.peer) in BENCHMARKS[line.benchmark].ratios, line


def test_pictures(tmp_path):
    rows = command.all_rows(results.DOCS, results.NEWEST)
    curves = overview.by_length(rows)
    assert {("masksafe", "causal"), ("torch", "8 packed documents")} <= curves.keys()
    plots.draw_by_length(curves, "a machine", tmp_path / "lengths.png")
    plots.draw(BENCHMARKS["decoder"], [row for row in rows if row.benchmark == "decoder"], tmp_path / "decoder.png")
    assert min(path.stat().st_size for path in tmp_path.iterdir()) > 5_000
    lines = [("loss", "none", "float32"), ("loss", "rows", "float32")]
    assert plots.names_of(lines) == ["no mask", "mask: rows"]


def test_every_op_of_exchanges_is_in_the_csv_for_every_target():
    rows = results.read_csv(exchanges.TABLE)
    expected = {(op.name, op.split, t, what) for op in exchanges.OPS for t in exchanges.NUMBERS for what in op.passes}
    assert {(row.op, row.split, row.target, row.what) for row in rows} == expected
    manual = next(op for op in exchanges.OPS if op.manual)
    row = next(exchanges.rows_of(manual, "cpu", 8))
    assert row.received_bytes > 0
    assert "all-reduce" in row.collectives
