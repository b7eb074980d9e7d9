"""The Kullback-Leibler divergences where logarithms are infinite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import masksafe
from masksafe.losses import generalized_kl_divergence, kl_divergence, kl_divergence_with_log_targets

TARGETS = np.float32([[0.25, 0.75, 0.0], [0.5, 0.5, 0.0]])
with np.errstate(divide="ignore"):
    LOG_TARGETS, LOG_PREDICTIONS = np.log(TARGETS), np.log(np.float32([[0.5, 0.5, 0.0], [0.25, 0.5, 0.25]]))
EXPECTED = np.array([0.25 * np.log(0.5) + 0.75 * np.log(1.5), 0.5 * np.log(2.0)])


def test_a_target_of_zero_adds_nothing():
    kl, generalized = jax.jit(lambda p, t: (kl_divergence(p, t), generalized_kl_divergence(p, t)))(
        LOG_PREDICTIONS, TARGETS
    )
    np.testing.assert_allclose(kl, EXPECTED, rtol=1e-6)
    np.testing.assert_allclose(generalized, EXPECTED + np.exp(LOG_PREDICTIONS).sum(1) - 1, rtol=1e-6)
    of_logs = jax.jit(kl_divergence_with_log_targets)(LOG_PREDICTIONS, LOG_TARGETS)
    np.testing.assert_allclose(of_logs, EXPECTED, rtol=1e-6)


@pytest.mark.parametrize("loss", [kl_divergence, generalized_kl_divergence])
def test_gradients_at_a_target_of_zero_are_finite(loss):
    d_log, d_target = jax.jit(jax.grad(lambda p, t: loss(p, t).sum(), (0, 1)))(LOG_PREDICTIONS, TARGETS)
    np.testing.assert_allclose(d_target[:, 2], -1.0 if loss is generalized_kl_divergence else 0.0)
    positive = np.log(TARGETS[:, :2]) - LOG_PREDICTIONS[:, :2]
    np.testing.assert_allclose(
        d_target[:, :2], positive + (0 if loss is generalized_kl_divergence else 1), rtol=1e-5, atol=1e-6
    )
    assert np.isfinite(d_log).all()


def test_gradients_at_a_log_target_of_minus_infinity_are_zero():
    step = jax.jit(jax.grad(lambda p, t: kl_divergence_with_log_targets(p, t).sum(), (0, 1)))
    d_log, d_target = step(LOG_PREDICTIONS, LOG_TARGETS)
    np.testing.assert_array_equal(d_log[:, 2], 0)
    np.testing.assert_array_equal(d_target[:, 2], 0)


def test_a_prediction_of_zero_where_the_target_is_not_costs_infinity():
    assert kl_divergence(jnp.array([-jnp.inf, 0.0]), jnp.array([0.5, 0.5])) == jnp.inf
    assert kl_divergence_with_log_targets(jnp.array([-jnp.inf, 0.0]), jnp.log(jnp.array([0.5, 0.5]))) == jnp.inf


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("loss", [kl_divergence, generalized_kl_divergence, kl_divergence_with_log_targets])
def test_a_bad_prediction_shows_where_the_target_is_zero(loss, bad):
    log_p, t = jnp.array([bad, -1.0]), jnp.array([0.0, 1.0])
    assert not np.isfinite(loss(log_p, jnp.log(t) if loss is kl_divergence_with_log_targets else t))


def test_a_mask_is_read_as_optax_reads_it():
    square = np.full((3, 3), 1 / 3, np.float32)
    classes = jax.jit(kl_divergence)(np.log(square / 2), square, where=np.array([True, False, True]))
    np.testing.assert_allclose(classes, np.full(3, 2 / 3 * np.log(2)), rtol=1e-6)
    with pytest.raises(ValueError, match="kl_divergence: where: got shape"):
        kl_divergence(LOG_PREDICTIONS, TARGETS, where=jnp.array([True, False]))


CHECKED = jax.jit(checkify.checkify(lambda *args: kl_divergence(*args)))


@pytest.mark.parametrize("bad", [-0.5, np.nan, np.inf])
def test_label_checks_tell_a_bad_target(bad):
    targets, mask = TARGETS.copy(), np.array([[True], [False]])
    targets[1, 0] = bad
    with masksafe.label_checks("raise"):
        kl_divergence(LOG_PREDICTIONS, targets, where=mask)
        with pytest.raises(
            ValueError, match=r"kl_divergence: 1 of 6 labels are negative or not finite; first at \(1, 0\)"
        ):
            kl_divergence(LOG_PREDICTIONS, targets)
    with masksafe.label_checks("checkify"):
        error, loss = CHECKED(LOG_PREDICTIONS, targets)
    assert "negative or not finite" in error.get()
    assert np.isnan(loss[1])
