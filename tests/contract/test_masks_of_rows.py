"""Ops that compute masked rows and drop them: nothing of them shows, in second derivatives and under flags either."""

import jax
import jax.numpy as jnp
import numpy as np
from tiers import parametrize

from masksafe import losses

ROWS = np.array([True, False, True])
X, Y, Z = (np.random.default_rng(seed).normal(size=(3, 4)).astype(np.float32) for seed in range(3))
PIXELS = np.eye(4, dtype=np.float32)[[[0, 1], [2, 3], [1, 1]]]
young = losses.make_fenchel_young_loss(jax.nn.logsumexp)

OPS = {
    "cosine_similarity": (lambda x, y, rows: losses.cosine_similarity(x, y, where=rows[:, None]), X, Y),
    "cosine_distance": (lambda x, y, rows: losses.cosine_distance(x, y, where=rows[:, None]), X, Y),
    "triplet_margin_loss": (lambda x, y, rows: losses.triplet_margin_loss(x, y, Z, where=rows), X, Y),
    "router_z_loss": (lambda x, y, rows: losses.router_z_loss(x, where=rows), X, Y),
    "fenchel_young_loss": (lambda x, y, rows: young(x, y, where=rows), X, Y),
    "dice_loss": (lambda x, y, rows: losses.dice_loss(x, y, reduction="none", where=rows[:, None]), PIXELS * 2, PIXELS),
    "binary_dice_loss": (lambda x, y, rows: losses.binary_dice_loss(x, y, where=rows), X, (Y > 0).astype(np.float32)),
}


@parametrize("name", ["cosine_similarity"], exhaustive=OPS)
def test_reverse_over_reverse(name):
    op, *arrays = OPS[name]

    @jax.jit
    def second(x, y, factor):
        def product(x, y, factor):
            inner = jax.grad(lambda x, factor: jnp.sum(factor * op(x, y, ROWS) ** 2), (0, 1))
            return sum(jnp.sum(g**2) for g in inner(x, factor))

        return jax.grad(product, (0, 1, 2))(x, y, factor)

    clean, *dirty = (
        second(*(np.where(ROWS.reshape(-1, *[1] * (a.ndim - 1)), a, np.float32(value)) for a in arrays), 2.0)
        for value in (0, np.nan, np.inf, -3e38)
    )
    assert clean[0].any()
    assert not clean[0][1].any()
    for found in dirty:
        jax.tree.map(np.testing.assert_array_equal, clean, found)


@parametrize(
    "name", ["cosine_similarity"], exhaustive=[name for name in OPS if "dice" not in name]
)  # in eager code an operand is reshaped
def test_debug_nans_in_eager_code(name):
    op, x, y = OPS[name]
    x, y = (jnp.where(ROWS[:, None], a, np.nan) for a in (x, y))
    with jax.debug_nans(False):  # whose programs must not be found again
        jax.grad(lambda x: op(x, Y, ROWS).sum())(x)
    with jax.debug_nans(True):
        for argnum in (0, 1):
            assert not jax.grad(lambda *a: op(*a, ROWS).sum(), argnum)(x, y)[1].any()


def test_a_vector_whose_square_vanishes_has_one_cosine():
    tiny, one = np.float32([[1e-20, 0]]), np.float32([[1, 0]])
    value = losses.cosine_similarity(tiny, one)[0]
    assert jax.value_and_grad(lambda x: losses.cosine_similarity(x, one).sum())(tiny)[0] == value
