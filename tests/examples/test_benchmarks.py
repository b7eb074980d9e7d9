"""The core of the benchmarks: who is timed when, what a CSV keeps, and what is written between markers."""

import dataclasses
import importlib

import command
import contrastive
import jax
import jax.numpy as jnp
import measure
import numpy as np
import operations
import overview
import pages
import plots
import pytest
import results
import routers
import segments

WORK = measure.Work({"masksafe": jnp.square, "optax": jnp.exp, "torch": lambda x: x}, (jnp.ones(3),))
CASES = [measure.Case("power", "none", "float32", size, "3", lambda: WORK) for size in ("tiny", "large")]
BENCHMARK = measure.Benchmark("powers", "Powers", (("masksafe", "optax"), ("masksafe", "torch")), CASES)
PLACES = ("powers", "headlines", "libraries", "slower", "compiling", "programs")
PAGE = "# Page\n" + "".join(f"<!-- table: {name} -->\nold\n<!-- end -->\n" for name in PLACES)


@pytest.fixture
def without_pauses(monkeypatch):
    pauses = []
    monkeypatch.setattr(measure.time, "sleep", pauses.append)
    monkeypatch.setattr(measure, "is_installed", lambda name: name != "torch")
    return pauses


@pytest.fixture
def rows():
    row = measure.Row(
        "powers", "power", "none", "float32", "tiny", "3", False, "value", "masksafe", 5, 1.0, 2.0, 1024, 0.5,
        "2026-11-01", 'CPU "x", 2 cores', "3.13", "jax 1, optax 2",
    )  # fmt: skip
    peer = dataclasses.replace(row, candidate="optax", median_ms=1.6, temporary_bytes=None, compile_s=0.25)
    fast = dataclasses.replace(peer, what="value with gradient", median_ms=8.0)
    return [row, peer, dataclasses.replace(fast, candidate="masksafe"), dataclasses.replace(fast, median_ms=4000.0)]


def test_candidates_take_turns_in_a_new_order_with_pauses(without_pauses):
    turns = []
    candidates = {name: lambda name=name: turns.append(name) for name in "abc"}
    timings = measure.measure(candidates, 8)
    order = "".join(name for i, name in enumerate(turns) if i == 0 or turns[i - 1] != name)
    assert len(without_pauses) == 3 * 8
    assert min(without_pauses) >= 0.05
    assert {turns.count(name) > 8 for name in "abc"} == {True}  # short calls are repeated
    assert len({order[i : i + 2] for i in range(3, len(order))}) > 3
    assert {timing.rounds for timing in timings.values()} == {8}
    assert all(0 < timing.minimum <= timing.median for timing in timings.values())


def test_short_calls_have_more_rounds_until_the_budget_is_spent(without_pauses):
    assert measure.measure({"a": lambda: None}, 2, budget=60, most=4)["a"].rounds == 4


def test_value_and_gradient_of_installed_candidates_are_measured(without_pauses):
    found = measure.measure_case("powers", CASES[0], rounds=1, budget=0)
    assert [(row.what, row.candidate) for row in found] == [
        (what, name) for what in measure.PASSES for name in ("masksafe", "optax")
    ]
    assert all(row.temporary_bytes is not None and row.compile_s > 0 for row in found)


def test_gradients_are_pulled_back_from_random_numbers():
    x, y = jnp.array([1.0, 2.0]), jnp.array([3.0, 5.0])
    step, (cotangents, *args) = measure.pulled_back(jnp.multiply, (x, y), 1)
    value, gradients = step(cotangents, *args)
    np.testing.assert_array_equal(value, x * y)
    np.testing.assert_allclose(gradients[0], y * cotangents)
    assert len(gradients) == 1
    assert isinstance(cotangents, jax.Array)


def test_csv_round_trip(rows, tmp_path):
    results.write_csv(tmp_path / "new" / "powers.csv", rows)
    assert results.read_csv(tmp_path / "new" / "powers.csv") == rows


def test_table_has_both_passes_and_marks_what_is_slower(rows):
    header, _, line = results.table(BENCHMARK, rows).splitlines()
    assert [cell.strip() for cell in header.strip("|").split("|")] == ["ratio", "tiny (3)", "tiny: ms", "tiny: MiB"]
    assert "| **1.25**, 0.00 |" in line
    assert "2.00, 8.00" in line


def test_compile_times(rows):
    assert "| 0.500      | 0.250         | **2.00** |" in results.compiling(rows)


def test_environment_tells_all_that_occurs(rows):
    assert results.environment(rows) == '2026-11-01, CPU "x", 2 cores, Python 3.13, jax 1, optax 2'
    later = dataclasses.replace(rows[0], date="2026-11-03", machine="another", versions="jax 2, optax 2")
    found = results.environment([later, *rows], ["jax"])
    assert found == '2026-11-01 to 2026-11-03, another and CPU "x", 2 cores, jax 2 and jax 1'


@pytest.fixture
def older(rows):
    return [dataclasses.replace(row, versions="jax 0.10.2, optax 2", median_ms=3.0) for row in rows]


@pytest.fixture
def headline(monkeypatch):
    line = overview.Headline("powers", "power", "none", "float32", "tiny", "optax", "a power", is_compiled=True)
    monkeypatch.setattr(overview, "HEADLINES", [line])


def test_headlines_have_both_versions_and_what_was_measured_in_each(rows, older, headline):
    measured, table = overview.headlines(rows, older).split("\n\n")
    versions = "jax 1 (Python 3.13) and, in brackets, jax 0.10.2 (Python 3.13)"
    assert measured == f'Measured with {versions}: 2026-11-01, CPU "x", 2 cores, optax 2.'
    assert "| a power (3) | optax   | **1.25** (1.00) | 0.00 (1.00)   | -" in table
    assert "(" not in overview.headlines(rows, []).splitlines()[-1].replace("(3)", "")


def test_means_of_each_library_have_both_versions(rows, older):
    line = overview.libraries(rows, older).splitlines()[-1]
    assert [cell.strip() for cell in line.strip("|").split("|")] == [
        *("optax", "**1.25** (1.00)", "1 of 1 (0 of 1)", "0.002 (1.00)".replace("0.002", "0.00"), "0 of 1 (0 of 1)")
    ]


def test_only_what_is_slower_is_listed(rows, older):
    measured, text, table = overview.slower(rows, older).split("\n\n")
    assert measured.startswith("Measured with jax 1 (Python 3.13) and, in brackets, jax 0.10.2 (Python 3.13): ")
    assert text == "Of 2 ratios to other libraries 1 exceed 1.1 (0 in calls shorter than 0.1 ms)."
    (line,) = table.splitlines()[2:]
    assert line.startswith(
        "| powers    | power | value | optax   | **1.25** (1.00) | 1 of 1 (0 of 1) | 1.25 (+0.400 ms)"
    )
    usual = [dataclasses.replace(row, median_ms=1.0) for row in rows[2:]]
    assert overview.slower(usual, []).splitlines()[-1].startswith("| ---")


@pytest.mark.parametrize("change", [{"eager": True}, {"median_ms": 0.02}])
def test_short_and_eager_calls_stand_together(rows, change):
    peer = {key: 0.01 for key in change if key == "median_ms"}
    calls = [
        dataclasses.replace(row, work=work, **(peer if row.candidate == "optax" and peer else change))
        for work in ("power", "root")
        for row in rows[:2]
    ]
    (line,) = overview.slower(calls, []).splitlines()[-1:]
    assert line.startswith("| short or eager calls | all  | value | optax   | **")
    assert "| 2 of 2" in line


def test_tables_have_the_large_sizes_if_there_are_any(rows):
    large = [dataclasses.replace(row, size="large", shape="9") for row in rows]
    header, *_ = results.table(BENCHMARK, [*rows, *large]).splitlines()
    assert "tiny" not in header
    assert "large (9)" in header


def test_the_picture_of_lengths_has_a_curve_for_each_library_and_mask(rows, tmp_path):
    row = dataclasses.replace(
        rows[2], benchmark="attention", work="attention", mask="causal", shape="2x512x512", minimum_ms=3.0
    )
    torch = dataclasses.replace(row, candidate="torch", mask="8 segments", temporary_bytes=None)
    measured = [dataclasses.replace(row, shape="1x16x16"), row, dataclasses.replace(row, what="value"), torch]
    curves = overview.by_length([dataclasses.replace(r, temporary_bytes=r.temporary_bytes and 2**22) for r in measured])
    assert curves.keys() == {("masksafe", "causal"), ("torch", "8 packed documents")}
    assert curves["torch", "8 packed documents"] == [(512, 1.5, None)]
    plots.draw_by_length(curves, "a machine", tmp_path / "lengths.png")
    assert (tmp_path / "lengths.png").stat().st_size > 5_000


def test_programs_have_seconds_and_operations(rows, headline):
    compiled_too = [dataclasses.replace(row, compile_s=row.compile_s or 0.25) for row in rows]
    size = operations.Size(
        *("powers", "power", "none", "float32", "tiny", "3", "value with gradient", "masksafe"),
        *(30, 60, 0.5, "2026-11-01", "jax 1"),
    )
    sizes = [size, dataclasses.replace(size, candidate="optax", operations=20)]
    assert "| 0.25 / 0.25" in overview.programs(compiled_too, [], sizes)
    assert "| 30 / 20" in overview.programs(compiled_too, [], sizes)


def test_fill_replaces_what_is_between_the_markers():
    filled = results.fill(results.fill(PAGE, "powers", "new \\1"), "powers", "newer")
    assert filled == PAGE.replace("powers -->\nold\n", "powers -->\n\nnewer\n\n")
    with pytest.raises(ValueError, match="0 markers <!-- table: nobody -->"):
        results.fill(PAGE, "nobody", "")


@pytest.mark.slow
def test_the_command_measures_draws_and_fills(without_pauses, tmp_path, monkeypatch):
    (tmp_path / "docs" / "performance").mkdir(parents=True)
    (tmp_path / "docs" / "performance" / "page.md").write_text(PAGE)
    monkeypatch.setattr(pages, "DOCS", tmp_path / "docs")
    out = tmp_path / "out"
    command.main([BENCHMARK], ["--quick", "--docs", str(out)])
    text = (out / "performance" / "page.md").read_text()
    assert "old" not in text
    assert "masksafe / optax" in text
    assert (out / "_static" / "benchmarks" / "powers.png").stat().st_size > 5_000
    assert {row.size for row in results.read_csv(out / "benchmarks" / "powers.csv")} == {"tiny"}


@pytest.mark.slow
def test_a_case_that_fails_is_told_and_costs_no_other(without_pauses, tmp_path):
    bad = dataclasses.replace(CASES[0], work="bad", prepare=lambda: 1 / 0)
    options = command.parse([BENCHMARK], ["--quick", "--docs", str(tmp_path)])
    benchmark = dataclasses.replace(BENCHMARK, cases=[bad, *CASES])
    failures = command.measure_all([benchmark], options, command.Console(quiet=True))
    assert failures == ["powers: bad, none, float32, tiny: ZeroDivisionError: division by zero"]
    assert len(results.read_csv(tmp_path / "benchmarks" / "powers.csv")) == 4


def test_names_of_lines_leave_out_what_they_share():
    lines = [("loss", "none", "float32"), ("loss", "rows", "float32")]
    assert plots.names_of(lines) == ["no mask", "mask: rows"]
    assert plots.names_of(lines[:1]) == ["loss, none, float32"]


def as_numpy(work):
    """The value and the gradient of each candidate."""
    programs = {name: measure.pulled_back(fn, work.args, 1) for name, fn in work.functions.items()}
    return {name: jax.device_get(jax.jit(step)(*args)) for name, (step, args) in programs.items()}


FORMULAS = {segments: segments.FORMULAS, routers: routers.PEERS, contrastive: contrastive.LOSSES}
SIZES = {segments: ((100, 2), 9), routers: ((50, 6, 2),), contrastive: ((50, 6),)}


@pytest.mark.parametrize(
    ("module", "name", "mask"),
    [
        pytest.param(module, name, mask, marks=[pytest.mark.forms] * (mask != module.MASKS[-1]))
        for module, names in FORMULAS.items()
        for name in names
        for mask in module.MASKS
    ],
)
def test_the_formulas_of_peers_compute_what_masksafe_does(module, name, mask):
    value, other = as_numpy(module.prepare(name, mask, "float32", *SIZES[module])).values()
    rtol = 1e-3 if name == "segment_standardize" else 1e-5  # whose variance is at least epsilon, not larger by it
    atol = rtol if module is segments else 1e-6
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol, atol), value, other)


def test_figures_of_the_oldest_jax_are_kept_apart(rows, tmp_path, monkeypatch):
    results.write_csv(pages.csv_of("powers", tmp_path), rows)
    results.write_csv(pages.csv_of("powers", tmp_path, pages.OLDEST), rows[:2])
    assert pages.both("powers", tmp_path) == (rows, rows[:2])
    monkeypatch.setattr(jax, "__version__", "0.10.2")
    assert command.parse([BENCHMARK], ["--oldest"]).folder == pages.OLDEST
    monkeypatch.setattr(jax, "__version__", "0.12.0")
    with pytest.raises(SystemExit):
        command.parse([BENCHMARK], ["--oldest"])


def test_the_summary_of_the_oldest_jax_stands_below_the_table(rows, older):
    section = pages.section_of(
        BENCHMARK, rows, older, lambda rows: "table", lambda rows: results.summary(BENCHMARK, rows)
    )
    measured, picture, _, newest, oldest = section.split("\n\n")
    assert measured == 'Measured 2026-11-01, CPU "x", 2 cores, jax 1 and jax 0.10.2.'
    assert picture.endswith("(../_static/benchmarks/powers.png)")
    assert "2 ratios, geometric mean 0.05, 1 above 1.1. [CSV](../benchmarks/powers.csv)" in newest
    assert oldest.startswith("jax 0.10.2: masksafe / optax: 2 ratios, geometric mean 1.00, 0 above 1.1.")
    assert "(../benchmarks/jax-0.10/powers.csv)" in oldest


def test_every_table_has_one_place():
    names = {benchmark.name for benchmark in importlib.import_module("all").BENCHMARKS}
    names |= {"meshes", "ring_attention", "sweep", "compiled", "operations", "exchanges", *PLACES} - {"powers"}
    names.add("compiled for a TPU")
    texts = [path.read_text() for path in (pages.DOCS / pages.PAGES).glob("*.md")]
    assert sorted(name for text in texts for name in pages.PLACE.findall(text)) == sorted(names)


def test_every_benchmark_has_tiny_cases():
    for benchmark in importlib.import_module("all").BENCHMARKS:
        assert {"tiny", "large"} <= {case.size for case in benchmark.cases}


def test_every_line_of_the_summary_is_a_case():
    benchmarks = {benchmark.name: benchmark for benchmark in importlib.import_module("all").BENCHMARKS}
    for line in [*overview.HEADLINES, *(line for line, _ in overview.FACTS)]:
        benchmark = benchmarks[line.benchmark]
        cases = [(case.work, case.mask, case.dtype, case.size) for case in benchmark.cases]
        assert (line.work, line.mask, line.dtype, line.size) in cases, line
        assert ("masksafe", line.peer) in benchmark.ratios, line


def test_the_first_page_says_what_was_measured():
    page = (pages.ROOT / "README.md").read_text()
    rows = pages.all_rows(pages.DOCS, pages.NEWEST)
    assert results.fill(page, "facts", overview.facts(rows)) == page
