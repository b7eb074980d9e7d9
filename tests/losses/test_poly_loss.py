"""PolyLoss: the weight of its second sum."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np

import masksafe
from masksafe.losses import poly_loss_cross_entropy

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(4, 5)).astype(np.float32)
LABELS = np.float32(RNG.dirichlet(np.ones(5), size=4))
loss = functools.partial(poly_loss_cross_entropy, LOGITS, LABELS)


def test_the_epsilon_has_a_gradient_and_broadcasts():
    @jax.jit
    def all_of(number, of_rows, several):
        slope = jax.grad(lambda e: loss(epsilon=e).sum())(number)
        return slope, loss(epsilon=of_rows), loss(epsilon=several), loss(), loss(epsilon=1.0)

    slope, of_rows, several, of_two, of_one = all_of(2.0, jnp.full(4, 2.0), jnp.array([[1.0], [2.0]]))
    missing = jnp.sum(LABELS * (1 - jax.nn.softmax(LOGITS)), -1)
    np.testing.assert_allclose(slope, missing.sum(), rtol=1e-5)
    np.testing.assert_allclose(of_rows, of_two, rtol=1e-6)
    np.testing.assert_allclose(several, np.stack([of_one, of_two]), rtol=1e-5)


def test_the_epsilon_of_a_masked_row_is_gone_and_its_cotangent_is_too():
    rows = np.arange(4) != 1

    @jax.jit
    def all_of(epsilon, where):
        masked = lambda epsilon: loss(epsilon=epsilon, where=where)  # noqa: E731
        with masksafe.forward_mode():
            results = jax.jvp(masked, (epsilon,), (jnp.where(rows, 1.0, jnp.inf),))
        return results, jax.grad(lambda e: jnp.sqrt(masked(e)).sum())(epsilon)  # sqrt(0) of row 1

    where = np.broadcast_to(rows[:, None], (4, 5))
    clean = all_of(jnp.ones(4), where)
    for result in jax.tree.leaves(clean):
        assert np.isfinite(result).all()
        assert result[1] == 0
    for bad in (jnp.nan, jnp.inf):
        chex.assert_trees_all_equal(all_of(jnp.where(rows, 1.0, bad), where), clean)


def test_the_epsilon_of_a_bad_row_whose_loss_is_replaced_has_a_gradient_of_0():
    logits, rows = np.where(np.arange(4)[:, None] == 1, np.nan, LOGITS), np.arange(4) != 1
    of_epsilon = lambda e: jnp.where(rows, poly_loss_cross_entropy(logits, LABELS, epsilon=e), 0).sum()  # noqa: E731
    np.testing.assert_array_equal(jax.jit(jax.grad(of_epsilon))(jnp.ones(4)) == 0, ~rows)
