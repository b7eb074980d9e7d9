"""The benchmarks: smoke runs of each program, that peers compute the same, and that the pages are those of the CSVs."""

import dataclasses
import importlib

import accuracy
import command
import compiled
import exchanges
import formulas
import gpu
import jax
import jax.numpy as jnp
import measure
import meshes
import moves
import numpy as np
import operations
import overview
import pytest
import results
import segments
import sweep
from comparisons import assert_close

pytestmark = pytest.mark.exhaustive
POWERS = {"masksafe": jnp.square, "optax": lambda x: x * x + 1, "torch": lambda x: x}
CASES = [
    measure.Case("power", "none", "float32", size, "3", lambda: measure.Work(POWERS, (np.ones(256, np.float32),)))
    for size in ("tiny", "large")
]
BENCHMARK = measure.Benchmark("powers", "Powers", (("masksafe", "optax"), ("masksafe", "torch")), CASES)
BENCHMARKS = [*importlib.import_module("all").BENCHMARKS, *meshes.BENCHMARKS]
OF_ALL = ("headlines", "libraries", "slower", "compiling", "programs")
EACH = [(what, name) for what in measure.PASSES for name in ("masksafe", "optax")]


@pytest.fixture(autouse=True)
def without_pauses_and_torch(monkeypatch):
    monkeypatch.setattr(measure.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(measure, "is_installed", lambda name: name != "torch")


def test_the_command_measures_draws_and_fills_and_tells_what_failed(tmp_path, monkeypatch):
    for name, places in {"docs/performance/page.md": ("powers", *OF_ALL), "README.md": ("facts",)}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("".join(f"<!-- table: {place} -->\nold\n<!-- end -->\n" for place in places))
    monkeypatch.setattr(results, "DOCS", tmp_path / "docs")
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr(command, "facts", lambda rows: "no facts")
    bad = dataclasses.replace(CASES[0], work="bad", prepare=lambda: 1 / 0)
    with pytest.raises(SystemExit, match="powers: bad, none, float32, tiny: ZeroDivisionError: division by zero"):
        command.main([dataclasses.replace(BENCHMARK, cases=[bad, *CASES])], ["--rounds", "2"])
    text = (tmp_path / "docs/performance/page.md").read_text()
    assert "old" not in text
    assert "masksafe / optax" in text
    assert results.picture_of("powers").stat().st_size > 5_000
    rows = results.read_csv(results.csv_of("powers"))
    assert [(row.size, row.what, row.candidate) for row in rows] == [(case.size, *of) for case in CASES for of in EACH]


@pytest.mark.parametrize(
    ("rows_of", "figure"),
    [
        (lambda case: compiled.rows_of("powers", case, "cpu"), "bytes_moved"),
        (lambda case: compiled.sizes_of("powers", case), "instructions"),
    ],
)
def test_every_candidate_has_figures(rows_of, figure):
    rows = list(rows_of(CASES[1]))
    assert [(row.what, row.candidate) for row in rows] == EACH
    assert all(getattr(row, figure) > 0 for row in rows)


def test_on_a_gpu_every_candidate_has_a_line_at_once(capsys, monkeypatch):
    monkeypatch.setattr(measure, "is_installed", lambda name: name != "optax")
    bad = dataclasses.replace(
        CASES[0], work="bad", prepare=lambda: measure.Work({"masksafe": lambda x: 1 / 0}, (np.ones(2),))
    )
    monkeypatch.setattr(gpu, "cases", lambda tiny: [*CASES[:1], bad])
    gpu.main(["--tiny"])
    *_, ours, peer, failed = capsys.readouterr().out.splitlines()
    assert float(ours.split("|")[5]) > 0
    assert "optax | not installed" in peer
    assert "masksafe | ZeroDivisionError: division by zero" in failed
    gpu.main(["--tiny", "--seconds", "1", "--only", "power"])
    assert capsys.readouterr().out.splitlines()[-1] == "| power | none | 3 | all | no time left |  |"


def test_the_figures_of_a_gpu_make_a_table_and_a_picture(tmp_path, monkeypatch):
    page = tmp_path / "performance/gpu.md"
    page.parent.mkdir()
    page.write_text("<!-- table: gpu -->\nold\n<!-- end -->\n")
    monkeypatch.setattr(results, "DOCS", tmp_path)
    gpu.publish()
    assert "There are no figures yet" in page.read_text()
    rows = []
    for candidate, ms in {"masksafe": 2.0, "formula": 4.0, "optax": None}.items():
        figures = {"minimum_ms": ms, "median_ms": ms, "copy": 0.5} if ms else {"failure": "not installed"}
        rows.append(gpu.row(CASES[1], candidate, figures))
    results.write_csv(results.csv_of("gpu"), rows)
    gpu.publish()
    line, _, mean = (line for line in page.read_text().splitlines() if "0.50" in line or "| geo" in line)
    assert [cell.strip() for cell in line.split("|")[1:-1]] == ["power", "none", "3", "2.00", "50%", "0.50 formula"]
    assert "masksafe / formula" in mean
    assert "Without a figure: optax (not installed): power." in page.read_text()
    assert results.picture_of("gpu").stat().st_size > 5_000


def test_the_csv_of_a_gpu_is_written_as_it_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "cases", lambda tiny: CASES[:1])
    gpu.main(["--tiny", "--csv", str(tmp_path / "gpu.csv")])
    rows = results.read_csv(tmp_path / "gpu.csv")
    assert [row.candidate for row in rows] == ["masksafe", "optax"]
    assert all(row.median_ms > 0 and row.copy > 0 and row.machine == jax.devices()[0].device_kind for row in rows)


TINY = {}
for case in gpu.cases(tiny=True):
    TINY.setdefault(case.work, []).append(case)


@pytest.mark.parametrize("work", [pytest.param(w, marks=[pytest.mark.slow] * (w != "cross-entropy")) for w in TINY])
def test_programs_of_a_gpu_are_lowered_for_it_and_the_formulas_agree(work):
    for case in TINY[work]:
        found = case.prepare()
        names = [name for name in found.functions if name in ("masksafe", "formula", "jax.nn", "jax.lax", "JAX")]
        step, args = measure.pulled_back(found.functions[names[0]], found.args, found.leaves)
        jax.export.export(jax.jit(step), platforms=["cuda"])(*args)
        values = [jax.jit(found.functions[name])(*found.args) for name in names]
        assert_close(values[1:], values[:1] * len(values[1:]), 4e-2)


@pytest.mark.slow
def test_programs_are_compiled_from_the_command_line(capsys, monkeypatch):
    monkeypatch.setattr(compiled, "benchmarks", lambda: {"powers": CASES})
    compiled.main(["--target", "cpu", "--quick"])
    assert "power" in capsys.readouterr().out


def test_operations_are_counted_before_xla_joins_those_that_are_equal_and_for_any_length():
    short, long = (jax.ShapeDtypeStruct((length,), "float32") for length in (8, 256))
    counts = [operations.operations(fn, long) for fn in (lambda x: x * x, lambda x: x * x + x * x)]
    assert counts[1] == counts[0] + 2
    assert operations.operations(jnp.var, long) == operations.operations(jnp.var, short)


def test_errors_of_both_are_a_few_epsilons():
    rows = list(accuracy.rows_of("accuracy", next(case for case in accuracy.cases() if case.work == "var")))
    assert {row.candidate for row in rows} == {"masksafe", "JAX"}
    assert 0.1 < max(row.error for row in rows) < 4


def test_what_is_exchanged_is_received(monkeypatch):
    monkeypatch.setitem(exchanges.NUMBERS, "cpu", 8)
    row = next(exchanges.rows_of("cpu", next(op for op in exchanges.OPS if op.manual)))
    assert row.received_bytes > 0
    assert "all-reduce" in row.collectives


OF_FORMULAS = [
    (segments.prepare, segments.FORMULAS, segments.MASKS, ((100, 2), 9)),
    (formulas.prepare_router, formulas.ROUTERS, formulas.OF_TOKENS, (50, 6, 2)),
    (formulas.prepare_pairs, formulas.PAIRS, formulas.OF_ROWS, (50, 6)),
]


@pytest.mark.parametrize(
    ("prepare", "name", "mask", "sizes"),
    [
        pytest.param(prepare, name, mask, sizes, marks=[pytest.mark.exhaustive] * (mask != masks[-1]))
        for prepare, names, masks, sizes in OF_FORMULAS
        for name in names
        for mask in masks
        if mask != "none, sorted ids" or name == "segment_softmax"  # an option that all hand on
    ]
    + [
        pytest.param(meshes.prepare_ring, "attention", mask, meshes.SIZES_OF_RING["tiny"], marks=pytest.mark.slow)
        for mask in ("none", "causal, zigzag")
    ],
)
def test_the_formulas_of_peers_compute_what_masksafe_does(prepare, name, mask, sizes):
    work = prepare(name, mask, "float32", sizes)
    programs = [measure.pulled_back(fn, work.args, 1) for fn in work.functions.values()]
    value, other = (jax.jit(step)(*args) for step, args in programs)
    # The variance of jraph's segment_standardize is at least epsilon, not larger by it.
    assert_close(value, other, 1e-3 if name == "segment_standardize" else 1e-5)


# What is committed


def test_every_line_of_the_summary_is_a_case():
    cases = {(of.name, case.work, case.mask, case.dtype, case.size) for of in BENCHMARKS for case in of.cases}
    assert {line[:5] for line in (*overview.HEADLINES, *overview.FACTS)} <= cases


def test_a_csv_is_written_as_it_is_read(tmp_path):
    for path in (results.DOCS / "benchmarks").rglob("*.csv"):
        results.write_csv(tmp_path / "copy.csv", results.read_csv(path))
        assert (tmp_path / "copy.csv").read_text() == path.read_text()


def contents():
    """What stands on the pages, made from the CSVs."""
    rows = {name: results.read_csv(results.csv_of(f"compiled/{name}")) for name in compiled.PLACES}
    found = {benchmark.name: results.section(benchmark) for benchmark in BENCHMARKS}
    found |= {"accuracy": accuracy.section(), "sweep": sweep.section(), "operations": operations.summary(rows["cpu"])}
    found |= {"gpu": gpu.section(results.read_csv(results.csv_of("gpu")))}
    found |= {compiled.PLACES[name]: compiled.summary(rows[name]) for name in ("h100", "v5e")}
    found |= {"exchanges": exchanges.table(results.read_csv(exchanges.TABLE))} | moves.contents()
    return found | overview.of_all(*map(command.all_rows, (results.NEWEST, results.OLDEST)), rows["cpu"])


def test_the_pages_are_those_of_the_csvs():
    pages = "".join(path.read_text() for path in results.pages())
    expected = contents()
    assert sorted(results.PLACE.findall(pages)) == sorted(expected)
    assert [name for name, text in expected.items() if f"\n{text}\n\n<!-- end -->" not in pages] == []
    readme = (results.ROOT / "README.md").read_text()
    assert results.fill(readme, "facts", overview.facts(command.all_rows(results.NEWEST))) == readme
