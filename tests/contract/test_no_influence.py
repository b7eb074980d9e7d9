"""Rule 1. What a masked element holds changes no bit of any output or derivative."""

import numpy as np
from program import assert_same_bits, cotangents_of, each_op, filled, run
from table import OPS

GARBAGE = {
    "f": [np.nan, np.inf, -np.inf, np.finfo(np.float32).max, np.finfo(np.float32).min, 1e-38],
    "i": [-1, -100, 2**31 - 1, -(2**31), 7, 0],
}


@each_op()
def test_garbage_changes_no_bit(key):
    op = OPS[key]
    clean = run(key)
    hiding = [i for i, hidden in enumerate(op.hides(op.where)) if hidden.any()]
    for k in range(len(GARBAGE["f"])):
        for only in (None, *hiding) if len(hiding) > 1 else (None,):
            args = filled(key, op.where, lambda a: GARBAGE[a.dtype.kind][k], only)  # noqa: B023
            assert_same_bits(run(key, args=args), clean)
    assert_same_bits(run(key, args=filled(key, op.where, np.max)), clean)  # ties with what is not masked


@each_op()
def test_random_garbage_changes_no_bit_whatever_is_masked(key):
    op, rng = OPS[key], np.random.default_rng(0)
    for density in (0.1, 0.5, 0.9):
        where = op.where & (rng.random(op.where.shape) < density)
        drawn = [filled(key, where, lambda a: rng.choice(GARBAGE[a.dtype.kind], a.shape)) for _ in range(3)]
        results = [run(key, where, args) for args in drawn]
        for other in results[1:]:
            assert_same_bits(other, results[0])


@each_op()
def test_the_cotangent_of_what_is_masked_changes_no_bit(key):
    op = OPS[key]
    cotangents = cotangents_of(key)
    results = [run(key, cotangents=tuple(_at_masked(op, c, x) for c in cotangents)) for x in (0, np.nan, np.inf)]
    for other in results[1:]:
        assert_same_bits(other.gradients, results[0].gradients)


def _at_masked(op, cotangent, value):
    """A cotangent with another value where an output has no element left."""
    if not op.has_rows:
        return np.full_like(cotangent, value) if not op.where.any() else cotangent
    left = op.where if cotangent.shape == op.where.shape else op.where.any(tuple(range(1, op.where.ndim)))
    if cotangent.shape[: left.ndim] != left.shape:
        return cotangent
    left = left.reshape(*left.shape, *[1] * (cotangent.ndim - left.ndim))
    return np.where(left, cotangent, np.float32(value))
