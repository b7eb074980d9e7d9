"""Rule 5. A NaN that is not masked shows in every output that depends on it, and in no other row."""

import numpy as np
import pytest
from program import assert_same_bits, each_op, run
from table import OPS


@each_op()
@pytest.mark.parametrize("bad", [np.nan])
def test_a_bad_element_shows_in_its_row_and_in_no_other(key, bad):
    op, clean = OPS[key], run(key)
    for i in op.floats:
        if op.kinds[i] not in ("row", "of row"):
            continue
        at = next(tuple(index) for index in np.argwhere(~op.hides(op.where)[i]))
        args = list(op.args)
        args[i] = np.array(args[i])
        args[i][at] = bad
        dirty = run(key, args=args)
        assert any(np.isnan(out[at[0]] if op.has_rows else out).any() for out in dirty.outputs)
        if op.has_rows:
            assert_same_bits(*([np.delete(out, at[0], 0) for out in r.outputs] for r in (dirty, clean)))
            of_rows = [k for k, number in enumerate(op.floats) if op.kinds[number] in ("row", "of row")]
            assert_same_bits(*([np.delete(r.gradients[k], at[0], 0) for k in of_rows] for r in (dirty, clean)))
