"""Rule 9. Derivatives of both modes, and second ones, are those of the definition."""

import numpy as np
import pytest
from program import (
    assert_is_nothing,
    assert_is_of_definition,
    assert_same_bits,
    directions_of,
    each_kind,
    each_op,
    polluted,
    run,
)
from table import OPS


@each_op(by_weights=True)
def test_derivatives_are_those_of_the_definition(key):
    assert_is_of_definition(key, run(key))


@pytest.mark.exhaustive
@each_kind()
def test_reverse_over_reverse_is_forward_over_reverse(key):
    """And keeps the rules for what is masked, for garbage and for nothing."""
    op, clean = OPS[key], run(key, all_modes=True)
    hidden = op.hides(op.where)
    assert_is_of_definition(key, clean)
    for garbage in (np.nan, np.inf, np.finfo(np.float32).max):
        dirty = run(key, args=polluted(key, op.where, garbage), all_modes=True)
        assert_same_bits(dirty.reverse_over_reverse, clean.reverse_over_reverse)
        cotangents = zip(op.floats, directions_of(key), strict=True)  # of the gradients
        cotangents = tuple(np.where(hidden[i], np.float32(garbage), d) for i, d in cotangents)
        dirty = run(key, directions=cotangents, all_modes=True)
        assert_same_bits(dirty.reverse_over_reverse, clean.reverse_over_reverse)
    for i, derivative in zip(op.floats, clean.reverse_over_reverse, strict=True):
        assert_is_nothing(derivative[hidden[i]])
        assert np.isfinite(derivative).all()
    nothing = np.zeros_like(op.where)
    assert_is_nothing(run(key, nothing, polluted(key, nothing), all_modes=True).reverse_over_reverse)
