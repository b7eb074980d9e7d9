"""Rule 2. The gradient with respect to a masked element is exactly 0."""

import numpy as np
from program import assert_is_nothing, each_op, polluted, run
from table import OPS


@each_op(by_weights=True)
def test_derivatives_by_what_is_masked_are_0(key):
    op = OPS[key]
    results = run(key, args=polluted(key, op.where))
    hidden = [op.hides(op.where)[i] for i in op.floats]
    for by_args in (results.gradients, results.forward_over_reverse):
        for of_arg, mask in zip(by_args, hidden, strict=True):
            assert_is_nothing(of_arg[mask])
            assert np.isfinite(of_arg).all()
