"""Losses of binary predictions where logits are infinite or labels are bad."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import masksafe
from masksafe.losses import sigmoid_binary_cross_entropy, sigmoid_focal_loss

LOGITS = jnp.array([-jnp.inf, jnp.inf, -jnp.inf, jnp.inf, 0.0])
LABELS = jnp.array([0.0, 1.0, 1.0, 0.0, 1.0])


def test_an_infinite_logit_is_certain():
    expected = np.array([0.0, 0.0, np.inf, np.inf, np.log(2.0)], np.float32)
    np.testing.assert_allclose(sigmoid_binary_cross_entropy(LOGITS, LABELS), expected, rtol=1e-6)
    gradient = jax.grad(lambda x: sigmoid_binary_cross_entropy(x, LABELS).sum())(LOGITS)
    np.testing.assert_allclose(gradient, [0.0, 0.0, -1.0, 1.0, -0.5])


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_a_certain_and_right_prediction_has_no_focal_loss(gamma):
    value, gradient = jax.value_and_grad(lambda x: sigmoid_focal_loss(x, LABELS[:2], gamma=gamma).sum())(LOGITS[:2])
    assert value == 0
    np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize("labels", [0.0, 1.0, 0.3, 0.8])
def test_digits_are_kept(labels):
    logits = np.array([-80.0, -30.0, -5.0, -0.1, 0.0, 0.1, 5.0, 30.0, 80.0])
    log_p, log_q = -np.logaddexp(0, -logits), -np.logaddexp(0, logits)
    expected = -labels * log_p - (1 - labels) * log_q
    np.testing.assert_allclose(sigmoid_binary_cross_entropy(np.float32(logits), labels), expected, rtol=2e-6)
    missed = (1 - labels) * np.exp(log_p) + labels * np.exp(log_q)
    actual = sigmoid_focal_loss(np.float32(logits), labels, gamma=0.5)
    np.testing.assert_allclose(actual, expected * missed**0.5, rtol=1e-5, atol=1e-37)


def sigmoid(z):
    small = np.exp(-np.abs(z))
    return np.where(z < 0, small, 1) / (1 + small)


def focal_and_derivatives(logits, label, gamma):
    """The focal loss and its first and second derivative with respect to the logits, in float64."""
    x, t, g = np.float64(logits), np.float64(label), np.float64(gamma)
    p, q = sigmoid(x), sigmoid(-x)
    c, c1, c2 = t * np.logaddexp(0, -x) + (1 - t) * np.logaddexp(0, x), (1 - t) * p - t * q, p * q
    m, m1, m2 = (1 - t) * p + t * q, (1 - 2 * t) * p * q, (1 - 2 * t) * p * q * (q - p)
    loss, first = c * m**g, c1 * m**g + g * c * m ** (g - 1) * m1
    second = c2 * m**g + 2 * g * c1 * m ** (g - 1) * m1
    return loss, first, second + g * c * m ** (g - 1) * (m2 + (g - 1) * m1**2 / m)


def derivatives(loss):
    """Jitted functions of one logit and the other arguments, all traced."""
    first = jax.grad(loss)
    return [jax.jit(jax.vmap(f, (0, None, None))) for f in (loss, first, jax.grad(first))]


FOCAL = derivatives(lambda x, t, gamma: sigmoid_focal_loss(x, t, gamma=gamma))
BINARY = derivatives(lambda x, t, _: sigmoid_binary_cross_entropy(x, t))
WIDE = np.linspace(-100, 100, 401, dtype=np.float32)


@pytest.mark.parametrize("label", [0.0, 1.0, 0.3, 0.5, 0.999])
@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0, 3.7])
def test_derivatives_keep_their_digits(label, gamma):
    label = np.float32(label)
    # Where the second derivative of a soft label passes through 0, its terms of the size of p q cancel.
    terms = 0 if label in (0, 1) else sigmoid(np.float64(WIDE)) * sigmoid(-np.float64(WIDE))
    for of_logits in [FOCAL, BINARY] if gamma == 0 else [FOCAL]:
        for actual, expected in zip(of_logits, focal_and_derivatives(WIDE, label, np.float32(gamma)), strict=True):
            allowed = 2e-5 * np.abs(expected) + 1e-6 * terms + 5e-36
            np.testing.assert_array_less(np.abs(actual(WIDE, label, gamma) - expected), allowed)


@pytest.mark.parametrize("label", [0, 1, True])
@pytest.mark.parametrize("gamma", [0, 1, 2])
def test_integer_labels_and_exponents(label, gamma):
    expected = focal_and_derivatives(WIDE, label, gamma)[0]
    np.testing.assert_allclose(sigmoid_focal_loss(WIDE, label, gamma=gamma), expected, rtol=2e-5, atol=5e-36)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_logits_are_rounded_once(dtype):
    x = jnp.asarray(WIDE[::10], dtype)
    expected = focal_and_derivatives(x, 1.0, 0.5)
    eps, tiny = float(jnp.finfo(dtype).eps), float(jnp.finfo(dtype).tiny)
    for of_focal, e in zip(FOCAL, expected, strict=True):
        actual = of_focal(x, 1.0, 0.5)
        assert actual.dtype == dtype
        np.testing.assert_allclose(np.float64(actual), e, rtol=eps, atol=max(tiny, 5e-36))


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("label", [0.0, 1.0, 0.3])
def test_an_infinite_logit_is_the_limit(label, gamma):
    infinite, large = jnp.array([-jnp.inf, jnp.inf]), jnp.array([-1e4, 1e4])
    for of_focal in FOCAL[1:]:
        np.testing.assert_allclose(of_focal(infinite, label, gamma), of_focal(large, label, gamma), rtol=1e-5)
    value = FOCAL[0](infinite, label, gamma)
    np.testing.assert_array_equal(value, np.where(FOCAL[0](large, label, gamma) > 0, np.inf, 0))
    of_others = jax.jit(jax.grad(lambda x, t, g: sigmoid_focal_loss(x, t, gamma=g), (1, 2)))
    assert not np.isnan(of_others(infinite[0], label, gamma)).any()


def test_second_derivatives_of_certain_labels_are_finite():
    hessian = jax.jit(jax.hessian(lambda x, t, g: sigmoid_focal_loss(x, t, gamma=g), (0, 1, 2)))
    for logit in (-200.0, -95.0, -84.0, -60.0, 0.0, 60.0, 200.0):
        for gamma in (0.0, 0.5, 2.0):
            assert np.isfinite(jax.tree.leaves(hessian(logit, 0.0, gamma))).all()


@pytest.mark.parametrize("loss", [sigmoid_binary_cross_entropy, sigmoid_focal_loss])
def test_gradient_of_soft_labels(loss):
    logits, labels = jnp.array([0.5, -2.0, 3.0]), jnp.array([0.0, 1.0, 0.3])
    step = 1e-3
    numeric = (loss(logits, labels + step) - loss(logits, labels - step)) / (2 * step)
    if loss is sigmoid_binary_cross_entropy:  # at the ends of [0, 1] too
        np.testing.assert_allclose(jax.grad(lambda t: loss(logits, t).sum())(labels), numeric, rtol=1e-2)
    else:
        np.testing.assert_allclose(jax.grad(lambda t: loss(logits, t).sum())(labels)[2], numeric[2], rtol=1e-2)


@pytest.mark.parametrize("loss", [sigmoid_binary_cross_entropy, sigmoid_focal_loss])
def test_label_checks(loss):
    logits, labels = jnp.zeros((2, 2)), jnp.array([[0, 1], [-100, 1]])
    with masksafe.label_checks("raise"):
        loss(logits, labels, where=labels != -100)
        with pytest.raises(
            ValueError, match=rf"{loss.__name__}: 1 of 4 labels are outside \[0, 1\]; first at \(1, 0\): -100"
        ):
            loss(logits, labels)


@pytest.mark.parametrize("factor", [{"alpha": -1}, {"alpha": 1.5}, {"gamma": -0.5}, {"gamma": float("nan")}])
def test_factors_of_the_focal_loss_out_of_range_are_refused(factor):
    ((name, _),) = factor.items()
    with pytest.raises(ValueError, match=rf"^sigmoid_focal_loss: {name}: got value .*; expected a number"):
        sigmoid_focal_loss(np.zeros(2, np.float32), np.ones(2, np.float32), **factor)
