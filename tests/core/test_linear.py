"""Functions that JAX treats as linear."""

import jax
import numpy as np
from comparisons import assert_same_bits

from masksafe._core import linear

FUNCTIONS = linear.without_sign_of_zero, linear.finite_or_zero, linear.with_finite_cotangent, linear.nan_unless_zero
FUNCTIONS += (linear.nan_unless_finite,)
X = np.float32([np.nan, np.inf, -np.inf, -0.0, 0, 2])


def transpose(fn):
    return lambda x: jax.linear_transpose(fn, x)(x)[0]


def test_each_is_its_own_derivative_and_the_transpose_of_its_transpose():
    """Otherwise reverse over reverse would differ from forward over reverse."""
    for fn in FUNCTIONS:
        twice = transpose(transpose(fn))
        for other in (twice, jax.vmap(twice), lambda x: jax.jvp(fn, (x,), (x,))[1]):  # noqa: B023
            assert_same_bits(other(X), fn(X))
