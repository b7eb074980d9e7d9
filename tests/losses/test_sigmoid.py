"""Losses of binary predictions: digits and infinite logits."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import in_float64
from tiers import parametrize

import masksafe
from masksafe.losses import sigmoid_binary_cross_entropy, sigmoid_focal_loss

WIDE = np.linspace(-100, 100, 401, dtype=np.float32)


def derivatives(loss):
    """A jitted function of logits, a label and gamma, all traced, that gives the loss and both derivatives."""
    first = jax.grad(loss)
    return jax.jit(lambda *args: [jax.vmap(f, (0, None, None))(*args) for f in (loss, first, jax.grad(first))])


FOCAL = derivatives(lambda x, t, gamma: sigmoid_focal_loss(x, t, gamma=gamma))
BINARY = derivatives(lambda x, t, _: sigmoid_binary_cross_entropy(x, t))


def test_derivatives_keep_their_digits():
    for label, gamma in itertools.product(np.float32([0, 1, 0.3, 0.5, 0.999]), (0.0, 0.5, 1.0, 2.0, 3.7)):
        # Where the second derivative of a soft label passes through 0, its terms of the size of p q cancel.
        terms = 0 if label in (0, 1) else 0.25 / np.cosh(np.float64(WIDE) / 2) ** 2
        for of_logits in [FOCAL, BINARY] if gamma == 0 else [FOCAL]:
            expected = in_float64(FOCAL, WIDE, label, np.float32(gamma))
            # A second derivative has a factor of 1 - sigmoid(x), which rounds to 0.
            for actual, exact, least in zip(of_logits(WIDE, label, gamma), expected, [5e-36, 5e-36, 1e-6], strict=True):
                allowed = 2e-5 * np.abs(exact) + 1e-6 * terms + least
                np.testing.assert_array_less(np.abs(actual - exact), allowed)


def test_an_infinite_logit_is_the_limit():
    infinite, large = np.full(401, -np.inf, np.float32), np.full(401, -1e4, np.float32)  # the shape of WIDE
    infinite[1], large[1] = np.inf, 1e4
    for label, gamma in itertools.product(np.float32([0, 1, 0.3]), (0.0, 0.5, 2.0)):
        for of_logits in (FOCAL, BINARY):
            (value, *actual), (of_large, *expected) = (of_logits(x, label, gamma) for x in (infinite, large))
            np.testing.assert_array_equal(value, np.where(of_large > 0, np.inf, 0))
            for a, e in zip(actual, expected, strict=True):
                np.testing.assert_allclose(a, e, rtol=1e-5)


def test_derivatives_of_certain_labels_by_all_arguments_are_finite():
    of_others = jax.jit(jax.grad(lambda x, t, g: sigmoid_focal_loss(x, t, gamma=g), (1, 2)))
    hessian = jax.jit(jax.hessian(lambda x, t, g: sigmoid_focal_loss(x, t, gamma=g), (0, 1, 2)))
    for gamma in (0.0, 0.5, 2.0):
        assert not any(np.isnan(of_others(-np.inf, label, gamma)).any() for label in (0.0, 1.0, 0.3))
        for logit in (-200.0, -95.0, -84.0, -60.0, 0.0, 60.0, 200.0):
            assert np.isfinite(jax.tree.leaves(hessian(logit, 0.0, gamma))).all()


@parametrize(("label", "gamma"), [(1, 2)], exhaustive=[(0, 0), (True, 1)])
def test_integer_labels_and_exponents(label, gamma):
    expected = in_float64(FOCAL, WIDE, float(label), float(gamma))[0]
    np.testing.assert_allclose(sigmoid_focal_loss(WIDE, label, gamma=gamma), expected, rtol=2e-5, atol=5e-36)


def test_the_cross_entropy_is_linear_in_its_labels():
    """At the ends of [0, 1] too."""
    logits, labels = np.float32([0.5, -2, 3]), np.float32([0, 1, 0.3])
    gradient = jax.grad(lambda t: sigmoid_binary_cross_entropy(logits, t).sum())(labels)
    np.testing.assert_allclose(gradient, -logits, rtol=1e-6)


def test_a_bad_label_is_told_as_it_is():
    """Not in the dtype of the logits, in which 257 is 256."""
    with masksafe.label_checks("raise"), pytest.raises(ValueError, match=r"first at \(1,\): 257 "):
        sigmoid_binary_cross_entropy(jnp.ones(2, jnp.bfloat16), np.array([0, 257]))
