"""Rule 1. What a masked element holds changes no bit of any output or derivative."""

import numpy as np
from program import (
    PLANS,
    assert_is_nothing,
    assert_same_bits,
    cotangents_of,
    directions_of,
    each_kind,
    each_op,
    filled,
    gradients_of_a_jvp,
    run,
)
from table import OPS

from masksafe._core import platforms

GARBAGE = {
    "f": [np.nan, np.inf, -np.inf, np.finfo(np.float32).max, np.finfo(np.float32).min, 1e-38],
    "i": [-1, -100, 2**31 - 1, -(2**31), 7, 0],
}


@each_op(by_weights=True)
def test_garbage_changes_no_bit(key):
    op = OPS[key]
    clean = run(key)
    hiding = [i for i, hidden in enumerate(op.hides(op.where)) if hidden.any()]
    for k in range(len(GARBAGE["f"])):
        for only in (None, *hiding) if len(hiding) > 1 else (None,):
            args = filled(key, op.where, lambda a: GARBAGE[a.dtype.kind][k], only)  # noqa: B023
            assert_same_bits(run(key, args=args), clean)
    assert_same_bits(run(key, args=filled(key, op.where, np.max)), clean)  # ties with what is not masked


@each_op(by_weights=True)
def test_random_garbage_changes_no_bit_whatever_is_masked(key):
    op, rng = OPS[key], np.random.default_rng(0)
    for density in (0.1, 0.5, 0.9):
        where = op.where & (rng.random(op.where.shape) < density)
        drawn = [filled(key, where, lambda a: rng.choice(GARBAGE[a.dtype.kind], a.shape)) for _ in range(3)]
        results = [run(key, where, args) for args in drawn]
        for other in results[1:]:
            assert_same_bits(other, results[0])


@each_op(by_weights=True)
def test_the_cotangent_of_what_is_masked_changes_no_bit(key):
    results = [run(key, cotangents=cotangents_of(key, x)) for x in (0, np.nan, np.inf)]
    for other in results[1:]:
        assert_same_bits(other.gradients, results[0].gradients)
        assert_same_bits(other.forward_over_reverse, results[0].forward_over_reverse)


@each_op(by_weights=True)
def test_the_tangent_of_what_is_masked_changes_no_bit(key):
    """Of a distance of 0 between two paddings the value is finite and the derivative NaN."""
    clean = run(key)
    for directions in _bad_directions(key):
        dirty = run(key, directions=directions)
        assert_same_bits(dirty.tangents, clean.tangents)
        assert_same_bits(dirty.forward_over_reverse, clean.forward_over_reverse)


@each_kind()
def test_the_tangent_of_what_is_masked_is_in_no_gradient(key):
    """Of a function of outputs and tangents, as consistency models have it."""
    op, cotangents = OPS[key], cotangents_of(key)
    with platforms.chosen(**PLANS["blocks"]):
        clean = gradients_of_a_jvp(key)(op.where, op.args, cotangents, directions_of(key))
        for directions in _bad_directions(key):
            dirty = gradients_of_a_jvp(key)(op.where, op.args, cotangents, directions)
            assert_same_bits(dirty, clean)
        cotangents = cotangents_of(key, np.nan)
        assert_same_bits(gradients_of_a_jvp(key)(op.where, op.args, cotangents, directions_of(key)), clean)
    for of_floats in clean:
        for i, gradient in zip(op.floats, of_floats, strict=True):
            assert_is_nothing(gradient[op.hides(op.where)[i]])
            assert np.isfinite(gradient).all()


def _bad_directions(key):
    """Directions with garbage where something is masked, in all arguments, and in one of them."""
    op, clean = OPS[key], directions_of(key)
    hidden = [op.hides(op.where)[i] for i in op.floats]
    hiding = [n for n, h in enumerate(hidden) if h.any()]
    for garbage in GARBAGE["f"]:
        for only in (None, *hiding) if len(hiding) > 1 else (None,):
            yield tuple(
                np.where(h, np.float32(garbage), d) if only in (None, n) else d
                for n, (d, h) in enumerate(zip(clean, hidden, strict=True))
            )
