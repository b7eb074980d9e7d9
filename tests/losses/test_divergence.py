"""The Kullback-Leibler divergences where logarithms are infinite."""

import jax
import jax.numpy as jnp
import numpy as np

from masksafe.losses import generalized_kl_divergence, kl_divergence, kl_divergence_with_log_targets

TARGETS = np.float32([[0.25, 0.75, 0.0], [0.5, 0.5, 0.0]])
with np.errstate(divide="ignore"):
    LOG_TARGETS, LOG_PREDICTIONS = np.log(TARGETS), np.log(np.float32([[0.5, 0.5, 0.0], [0.25, 0.5, 0.25]]))
EXPECTED = np.array([0.25 * np.log(0.5) + 0.75 * np.log(1.5), 0.5 * np.log(2.0)])


@jax.jit
def of_each(log_p, targets, log_targets):
    """The losses, and their gradients with respect to both arguments, of any arrays of these shapes."""
    arguments = [(kl_divergence, targets), (generalized_kl_divergence, targets)]
    arguments += [(kl_divergence_with_log_targets, log_targets)]
    step = lambda fn, t: (fn(log_p, t), jax.grad(lambda *a: fn(*a).sum(), (0, 1))(log_p, t))  # noqa: E731
    return [step(fn, t) for fn, t in arguments]


def test_a_target_of_zero_adds_nothing_and_has_finite_gradients():
    kl, generalized, of_logs = of_each(LOG_PREDICTIONS, TARGETS, LOG_TARGETS)
    positive = np.log(TARGETS[:, :2]) - LOG_PREDICTIONS[:, :2]
    shift = np.exp(LOG_PREDICTIONS).sum(1) - 1
    for (losses, (d_log, d_target)), more in ((kl, 0), (generalized, 1)):
        np.testing.assert_allclose(losses, EXPECTED + more * shift, rtol=1e-6)
        np.testing.assert_allclose(d_target[:, 2], -more)
        np.testing.assert_allclose(d_target[:, :2], positive + (1 - more), rtol=1e-5, atol=1e-6)
        assert np.isfinite(d_log).all()
    np.testing.assert_allclose(of_logs[0], EXPECTED, rtol=1e-6)
    for gradient in of_logs[1]:
        np.testing.assert_array_equal(gradient[:, 2], 0)


def test_a_prediction_of_zero_costs_infinity_and_a_bad_one_shows_where_the_target_is_zero():
    log_p = np.where(np.arange(3) == 0, -np.inf, LOG_PREDICTIONS).astype("float32")
    for losses, _ in of_each(log_p, TARGETS, LOG_TARGETS):
        np.testing.assert_array_equal(losses, np.inf)
    for bad in (np.nan, np.inf):
        log_p = np.where(np.arange(3) == 2, bad, LOG_PREDICTIONS).astype("float32")
        for losses, _ in of_each(log_p, TARGETS, LOG_TARGETS):
            assert not np.isfinite(losses).any()


def test_a_log_target_too_small_for_a_float_costs_nothing():
    log_p, log_t = jnp.array([0.0, -jnp.inf]), jnp.array([0.0, -200.0])
    assert jax.jit(kl_divergence_with_log_targets)(log_p, log_t) == 0
