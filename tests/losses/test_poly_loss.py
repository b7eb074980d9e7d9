"""PolyLoss: the weight of its second sum."""

import jax
import jax.numpy as jnp
import numpy as np

import masksafe
from masksafe.losses import poly_loss_cross_entropy

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(4, 5)).astype(np.float32)
LABELS = np.float32(RNG.dirichlet(np.ones(5), size=4))


def test_the_epsilon_has_a_gradient_and_broadcasts():
    @jax.jit
    def all_of(number, of_rows, several):
        loss = lambda epsilon: poly_loss_cross_entropy(LOGITS, LABELS, epsilon=epsilon)  # noqa: E731
        return jax.grad(lambda e: loss(e).sum())(number), loss(2), loss(of_rows), loss(several), loss(1.0)

    slope, of_two, of_rows, several, of_one = all_of(2.0, jnp.full(4, 2.0), jnp.array([[1.0], [2.0]]))
    missing = jnp.sum(LABELS * (1 - jax.nn.softmax(LOGITS)), -1)
    np.testing.assert_allclose(slope, missing.sum(), rtol=1e-5)
    np.testing.assert_allclose(of_rows, of_two, rtol=1e-6)
    np.testing.assert_allclose(several, np.stack([of_one, of_two]), rtol=1e-5)


def test_the_epsilon_of_a_masked_row_is_gone_and_its_cotangent_is_too():
    logits, labels = np.float32([[1, 2], [0, 1]]), np.float32([[1, 0], [0.5, 0.5]])

    @jax.jit
    def all_of(epsilon, where):
        loss = lambda epsilon: poly_loss_cross_entropy(logits, labels, epsilon=epsilon, where=where)  # noqa: E731
        with masksafe.forward_mode():
            losses, changes = jax.jvp(loss, (epsilon,), (jnp.array([1.0, jnp.inf]),))
        return jax.value_and_grad(lambda e: jnp.sqrt(loss(e)).sum())(epsilon), losses, changes  # sqrt(0) of row 1

    for where in (np.array([True, False]), np.array([[True, True], [False, False]])):
        (expected, gradient), *_ = all_of(jnp.array([1.0, 1.0]), where)
        assert np.isfinite(gradient).all()
        for bad in (jnp.nan, jnp.inf):
            (value, gradients), losses, changes = all_of(jnp.array([1.0, bad]), where)
            np.testing.assert_array_equal([value, *gradients], [expected, gradient[0], 0])
            assert losses[1] == changes[1] == 0
            assert np.isfinite([losses[0], changes[0]]).all()
