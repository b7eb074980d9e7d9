"""Rule 4. The result is that of the arrays without the masked elements: of a definition that takes them out."""

import numpy as np
from program import each_op, of_definition, run
from table import OPS


@each_op(by_weights=True)
def test_outputs_are_those_of_what_is_left(key):
    op, rng = OPS[key], np.random.default_rng(1)
    some = op.where & (rng.random(op.where.shape) < 0.7)
    if op.classes and op.where.ndim > 1:  # labels stay
        at_labels = np.arange(len(some)), op.args[-1].T
        some[at_labels] = op.where[at_labels]
    for where in (op.where, some, np.ones_like(op.where)):
        for actual, expected in zip(run(key, where).outputs, of_definition(key, where), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-6)
