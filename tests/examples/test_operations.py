"""operations.py: what is counted, and what is written of it."""

import dataclasses

import compiled
import jax
import jax.numpy as jnp
import measure
import operations
import pytest
import results

X = jax.ShapeDtypeStruct((8,), "float32")
PAGE = "# Page\n<!-- table: operations -->\nold\n<!-- end -->\n"
ROW = operations.Size(
    *("powers", "power", "none", "float32", "large", "3", "value", "masksafe"),
    *(30, 60, 0.5, "2026-11-01", "jax 1"),
)


@pytest.fixture
def rows():
    peer = dataclasses.replace(ROW, candidate="optax", operations=20, instructions=20, seconds=0.25)
    value = [ROW, peer]
    gradient = [dataclasses.replace(row, what="value with gradient") for row in value]
    masked = [dataclasses.replace(row, mask="rows", operations=row.operations**2) for row in gradient]
    short = [dataclasses.replace(row, work="root", size="short", operations=10) for row in gradient]
    return [*value, *short, *gradient, *masked]


def test_operations_are_counted_before_xla_joins_those_that_are_equal():
    counts = [operations.operations(fn, X) for fn in (lambda x: x * x, lambda x: x * x + x * x)]
    assert counts[1] == counts[0] + 2


def test_the_length_of_arrays_does_not_matter():
    counts = [operations.operations(jnp.var, jax.ShapeDtypeStruct((n,), "float32")) for n in (8, 4096)]
    assert counts[0] == counts[1]


@pytest.mark.slow
def test_a_case_is_measured_for_each_candidate_and_pass():
    work = measure.Work({"masksafe": jnp.square, "optax": lambda x: x * x + 1, "torch": None}, (jnp.ones(256),))
    case = measure.Case("power", "none", "float32", "large", "256", lambda: work)
    found = list(compiled.sizes_of("powers", case, "cpu"))
    assert [(row.what, row.candidate) for row in found] == [
        (what, name) for what in measure.PASSES for name in ("masksafe", "optax")
    ]
    assert found[0].operations < found[1].operations < found[3].operations
    assert all(row.instructions > 0 and row.seconds > 0 for row in found)


def test_the_worst_ratio_stands_first(rows):
    found = operations.size_ratios(rows)
    assert [ratio.operations for ratio in found] == [2.25, 1.5, 1.5, 1.0]
    power, root = operations.lines_of_sizes(found)
    assert power[:7] == ["power", "optax", "rows", "-", "-", "900 / 400", "**2.25**"]
    assert power[7:] == ["60 / 20", "**3.00**", "0.500 / 0.250", "**2.00**"]
    assert root[:7] == ["root, short", "optax", "none", "-", "-", "10 / 10", "1.00"]


def test_the_page_is_made_from_the_csv(rows, tmp_path):
    page = tmp_path / "performance" / "compiling.md"
    page.parent.mkdir()
    page.write_text(PAGE)
    results.write_csv(compiled.csv_of("cpu", tmp_path), rows, operations.Size)
    compiled.main(["--target", "cpu", "--plot-only", "--docs", str(tmp_path)])
    text = page.read_text()
    assert "old" not in text
    assert "Of 4 programs 1 have more than twice the operations" in text
    assert results.read_csv(compiled.csv_of("cpu", tmp_path), operations.Size) == rows
