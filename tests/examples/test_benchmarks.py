"""The benchmarks: a smoke run of the command, and that the pages are those of the CSVs."""

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
    candidates = {name: lambda name=name: turns.append(name) for name in ("a", "b", "torch")}
    samples = measure.measure(candidates, 8)
    order = "".join(name[0] for i, name in enumerate(turns) if i == 0 or turns[i - 1] != name)
    assert pauses == [0.05] * 3 * 8
    assert len({order[i : i + 2] for i in range(3, len(order))}) > 3
    assert all(len(seconds) == 8 and min(seconds) > 0 for seconds in samples.values())


@pytest.mark.parametrize(("clear", "rounds"), [(0.8, 2), (0.2, 5), (0, 5)])
def test_two_rounds_are_enough_where_the_first_is_clearly_faster(pauses, monkeypatch, clear, rounds):
    monkeypatch.setattr(measure, "seconds_a_call", lambda run, calls: run())
    monkeypatch.setattr(measure, "calls_for_a_sample", lambda run: 1)
    samples = measure.measure({"masksafe": lambda: 1.0, "optax": lambda: 3.0, "jax.nn": lambda: 2.0}, 5, clear=clear)
    assert {len(seconds) for seconds in samples.values()} == {rounds}


def test_the_command_measures_draws_and_fills_and_tells_what_failed(pauses, tmp_path, monkeypatch):
    for name in ("docs/performance/page.md", "README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(PAGE.replace("powers", "facts" if name == "README.md" else "powers"))
    monkeypatch.setattr(results, "DOCS", tmp_path / "docs")
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr(command, "facts", lambda rows: "no facts")
    bad = dataclasses.replace(CASES[0], work="bad", prepare=lambda: 1 / 0)
    benchmarks = [dataclasses.replace(BENCHMARK, cases=[bad, *CASES])]
    for options in (["--quick"], ["--rounds", "2"]):
        written = (tmp_path / "docs" / "benchmarks" / "powers.csv").exists()
        assert not written
        with pytest.raises(SystemExit, match="powers: bad, none, float32, tiny: ZeroDivisionError: division by zero"):
            command.main(benchmarks, options)
    text = (tmp_path / "docs" / "performance" / "page.md").read_text()
    assert "old" not in text
    assert "masksafe / optax" in text
    assert (tmp_path / "docs" / "_static" / "benchmarks" / "powers.png").stat().st_size > 5_000
    rows = results.read_csv(results.csv_of("powers"))
    assert [(row.what, row.candidate, row.size) for row in rows] == [
        (what, name, size) for size in ("tiny", "large") for what in measure.PASSES for name in ("masksafe", "optax")
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


def test_errors_of_both_are_a_few_epsilons():
    case = next(case for case in accuracy.cases() if case.work == "var")
    rows = list(accuracy.rows_of("accuracy", case))
    assert {row.candidate for row in rows} == {"masksafe", "JAX"}
    assert {row.dtype for row in rows} == {"float32", "bfloat16", "float16"}
    assert 0 < max(row.error for row in rows) < 4
    assert accuracy.largest_error(np.float32([np.nan, 1]), np.ones(2)) == np.inf


# What is committed


CSVS = sorted((results.DOCS / "benchmarks").rglob("*.csv"))


@pytest.mark.parametrize("path", CSVS, ids=lambda path: "-".join(path.parts[-2:]))
def test_a_csv_is_written_as_it_is_read(path, tmp_path):
    results.write_csv(tmp_path / "copy.csv", results.read_csv(path))
    assert (tmp_path / "copy.csv").read_text() == path.read_text()


def test_every_table_has_one_place():
    texts = [path.read_text() for path in (results.DOCS / results.PAGES).glob("*.md")]
    found = [name for text in texts for name in results.PLACE.findall(text)]
    assert sorted(found) == sorted({*BENCHMARKS, *OTHERS, *OF_ALL})


def contents():
    """What stands on the pages, made from the CSVs; of the sweep and of programs too."""
    meshes, compiled, sweep = map(importlib.import_module, ("meshes", "compiled", "sweep"))
    found = {benchmark.name: results.section(benchmark) for benchmark in (*BENCHMARKS.values(), *meshes.BENCHMARKS)}
    found |= {"accuracy": accuracy.section(), "sweep": sweep.section()}
    sizes = results.read_csv(results.csv_of("compiled/cpu"))
    found |= {"operations": compiled.operations.summary(sizes)}
    found["exchanges"] = exchanges.table(results.read_csv(exchanges.TABLE))
    found["compiled"] = compiled.summary(results.read_csv(results.csv_of("compiled/h100")))
    return found | overview.of_all(*map(command.all_rows, (results.NEWEST, results.OLDEST)), sizes)


def test_the_pages_are_those_of_the_csvs():
    pages = "".join(path.read_text() for path in (results.DOCS / results.PAGES).glob("*.md"))
    assert [name for name, text in contents().items() if f"\n{text}\n\n<!-- end -->" not in pages] == []
    readme = (results.ROOT / "README.md").read_text()
    assert results.fill(readme, "facts", overview.facts(command.all_rows(results.NEWEST))) == readme


def test_every_line_of_the_summary_is_a_case():
    assert all({"tiny", "large"} <= {case.size for case in of.cases} for of in BENCHMARKS.values())
    for line in [*overview.HEADLINES, *overview.FACTS]:
        cases = {(case.work, case.mask, case.dtype, case.size) for case in BENCHMARKS[line.benchmark].cases}
        assert line[1:5] in cases, line
        assert ("masksafe", line.peer) in BENCHMARKS[line.benchmark].ratios, line


def test_every_op_of_exchanges_is_in_the_csv_for_every_target(monkeypatch):
    rows = results.read_csv(exchanges.TABLE)
    expected = {(op.work, op.split, t, what) for op in exchanges.OPS for t in exchanges.NUMBERS for what in op.passes}
    assert {(row.op, row.split, row.target, row.what) for row in rows} == expected
    monkeypatch.setitem(exchanges.NUMBERS, "cpu", 8)
    row = next(exchanges.rows_of("cpu", next(op for op in exchanges.OPS if op.manual)))
    assert row.received_bytes > 0
    assert "all-reduce" in row.collectives
