"""Rule 3. What has nothing left is exactly 0 (an extremum or logsumexp infinite), and so are its derivatives."""

from program import assert_is_nothing, assert_nothing_left_is_nothing, each_op, run
from table import OPS


@each_op(by_weights=True)
def test_nothing_left_is_nothing(key):
    assert_nothing_left_is_nothing(key)


@each_op(lambda op: op.has_rows)
def test_a_row_with_nothing_left_is_nothing(key):
    op = OPS[key]
    empty = ~op.where.any(tuple(range(1, op.where.ndim)))
    assert empty.any()
    for out, nothing in zip(run(key).outputs, op.nothing, strict=True):
        assert_is_nothing(out[empty], nothing)
