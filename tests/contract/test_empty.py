"""Rule 3. What has nothing left is exactly 0 (an extremum or logsumexp infinite), and so are its derivatives."""

import jax
import numpy as np
from program import assert_is_nothing, assert_nothing_left_is_nothing, each_op, function_of_floats, run
from table import OPS

from masksafe._core import platforms


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


# Without a mask these have a value for nothing, such as a distance of 1.
OF_NOTHING = "cosine_distance", "make_fenchel_young_loss", "triplet_margin_loss"


@each_op(lambda op: op.has_rows and op.has_axis and op.where.ndim == 2)
def test_rows_of_no_elements_are_nothing(key):
    op = OPS[key]
    cut = {"row": np.s_[:, :0], "along": np.s_[:0]}
    where, *args = (a[cut.get(kind, ...)] for kind, a in zip(("row", *op.kinds), (op.where, *op.args), strict=True))
    for mask in (where,) if op.classes or op.name in OF_NOTHING else (where, None):
        fn, floats = function_of_floats(op, mask, args)
        with platforms.chosen(row_block_elements=1, most_elements_in_one_pass=2):
            outputs, pull_back = jax.vjp(fn, *floats)
            assert [g.shape for g in pull_back(outputs)] == [x.shape for x in floats]
        for out, nothing in zip(outputs, op.nothing, strict=True):
            assert_is_nothing(out, nothing)
