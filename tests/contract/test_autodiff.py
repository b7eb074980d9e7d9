"""Rule 9. Derivatives of both modes, and second ones, are those of the definition."""

import definitions
import numpy as np
from program import assert_same_second_derivative, cotangents_of, direction, each_op, run
from table import OPS


@each_op()
def test_derivatives_are_those_of_the_definition(key):
    op, results, cotangents = OPS[key], run(key), cotangents_of(key)
    directions = [direction(i, op.args[i]) for i in op.floats]
    gradients, slopes = definitions.derivatives(op, cotangents, directions)
    for actual, expected in zip(results.gradients, gradients, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-4)
    for second in (results.forward_over_reverse, results.reverse_over_reverse):
        for actual, expected in zip(second, slopes, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-2, atol=1e-3)
    for forward, reverse in zip(results.forward_over_reverse, results.reverse_over_reverse, strict=True):
        assert_same_second_derivative(forward, reverse)
    finite = [np.isfinite(out) for out in results.outputs]
    along = sum(np.vdot(t[f], c[f]) for f, t, c in zip(finite, results.tangents, cotangents, strict=True))
    np.testing.assert_allclose(along, sum(map(np.vdot, gradients, directions)), rtol=1e-3, atol=1e-3)
