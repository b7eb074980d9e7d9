"""What the page about scale is made of."""

import exchanges
import pytest
import results


@pytest.mark.parametrize(
    "op", [op for op in exchanges.OPS if op.split in ("elements", "batch") and op.manual], ids=lambda op: op.split
)
def test_table_has_what_a_program_exchanges(op):
    row = next(iter(exchanges.rows_of(op, "cpu", 8)))
    assert row.received_bytes > 0
    assert "all-reduce" in row.collectives


def test_csv_and_page_agree(tmp_path):
    rows = results.read_csv(exchanges.TABLE, exchanges.Row)
    results.write_csv(tmp_path / "copy.csv", rows, exchanges.Row)
    assert (tmp_path / "copy.csv").read_text() == exchanges.TABLE.read_text()
    assert exchanges.table(rows) in exchanges.PAGE.read_text()


def test_every_op_is_in_the_csv_for_every_target():
    rows = results.read_csv(exchanges.TABLE, exchanges.Row)
    expected = {(op.name, op.split, t, what) for op in exchanges.OPS for t in exchanges.NUMBERS for what in op.passes}
    assert {(row.op, row.split, row.target, row.what) for row in rows} == expected
