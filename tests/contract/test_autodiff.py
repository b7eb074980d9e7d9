"""Rule 9. Derivatives of both modes, and second ones, are those of the definition."""

import definitions
import numpy as np
import pytest
from program import (
    assert_is_nothing,
    assert_same_bits,
    assert_same_second_derivative,
    cotangents_of,
    direction,
    each_kind,
    each_op,
    polluted,
    run,
)
from table import OPS


@each_op(by_weights=True)
def test_derivatives_are_those_of_the_definition(key):
    op, results, cotangents = OPS[key], run(key), cotangents_of(key)
    directions = [direction(i, op.args[i]) for i in op.floats]
    gradients, slopes = definitions.derivatives(op, cotangents, directions)
    for actual, expected in zip(results.gradients, gradients, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-4)
    for actual, expected in zip(results.forward_over_reverse, slopes, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-2, atol=1e-3)
    finite = [np.isfinite(out) for out in results.outputs]
    along = sum(np.vdot(t[f], c[f]) for f, t, c in zip(finite, results.tangents, cotangents, strict=True))
    np.testing.assert_allclose(along, sum(map(np.vdot, gradients, directions)), rtol=1e-3, atol=1e-3)


@pytest.mark.forms
@each_kind()
def test_reverse_over_reverse_is_forward_over_reverse(key):
    """And keeps the rules for what is masked, for garbage and for nothing."""
    op = OPS[key]
    clean = run(key, all_modes=True)
    for forward, reverse in zip(clean.forward_over_reverse, clean.reverse_over_reverse, strict=True):
        assert_same_second_derivative(reverse, forward)
    for garbage in (np.nan, np.inf, np.finfo(np.float32).max):
        dirty = run(key, args=polluted(key, op.where, garbage), all_modes=True)
        assert_same_bits(dirty.reverse_over_reverse, clean.reverse_over_reverse)
    for i, derivative in zip(op.floats, clean.reverse_over_reverse, strict=True):
        assert_is_nothing(derivative[op.hides(op.where)[i]])
        assert np.isfinite(derivative).all()
    nothing = np.zeros_like(op.where)
    assert_is_nothing(run(key, nothing, polluted(key, nothing), all_modes=True).reverse_over_reverse)
