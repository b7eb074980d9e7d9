"""PolyLoss: one reading of the mask in both of its sums."""

import jax
import jax.numpy as jnp
import numpy as np

import masksafe
from masksafe.losses import poly_loss_cross_entropy, softmax_cross_entropy

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(4, 4)).astype(np.float32)
LABELS = np.float32(RNG.dirichlet(np.ones(4), size=4))


def test_both_sums_know_of_masked_classes():
    mask = np.broadcast_to([True, True, False, True], (4, 4))
    both = jax.jit(lambda *args: [f(*args, where=mask) for f in (poly_loss_cross_entropy, softmax_cross_entropy)])
    actual, expected = both(LOGITS, LABELS)
    p = np.where(mask, np.exp(LOGITS), 0)
    missed = LABELS * (1 - p / p.sum(-1, keepdims=True))
    np.testing.assert_allclose(actual, expected + 2 * np.where(mask, missed, 0).sum(-1), rtol=1e-5)


def test_the_epsilon_of_a_masked_row_is_gone_and_its_cotangent_is_too():
    logits, labels = np.float32([[1, 2], [0, 1]]), np.float32([[1, 0], [0.5, 0.5]])

    def total(epsilon, where):
        return jnp.sqrt(poly_loss_cross_entropy(logits, labels, epsilon=epsilon, where=where)).sum()  # sqrt(0) of row 1

    expected, gradient = jax.value_and_grad(total)(jnp.float32(1), jnp.array([True, False]))
    assert np.isfinite(gradient)
    assert expected == jnp.sqrt(poly_loss_cross_entropy(logits[0], labels[0], epsilon=1.0))
    for where in (jnp.array([True, False]), jnp.array([[True, True], [False, False]])):
        for bad in (jnp.nan, jnp.inf):
            value, gradients = jax.value_and_grad(total)(jnp.array([1.0, bad]), where)
            np.testing.assert_array_equal([value, *gradients], [expected, gradient, 0])
    with masksafe.forward_mode():
        loss_of = lambda epsilon: poly_loss_cross_entropy(logits, labels, epsilon=epsilon, where=where)  # noqa: E731
        losses, changes = jax.jvp(loss_of, (jnp.array([1.0, jnp.nan]),), (jnp.array([1.0, jnp.inf]),))
    assert losses[1] == changes[1] == 0
    assert np.isfinite([losses[0], changes[0]]).all()
