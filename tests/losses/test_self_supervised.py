"""NT-Xent and triplets: batches without pairs, masked elements, and vectors without a direction."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from masksafe.losses import ntxent, triplet_margin_loss

EMBEDDINGS = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
LABELS = np.array([0, 0, 1, 1, 2, 0])
value_and_gradient = jax.jit(jax.value_and_grad(ntxent))


def test_batches_without_pairs_or_others_have_loss_zero():
    for labels in (np.arange(6), np.zeros(6, int)):
        jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0), value_and_gradient(EMBEDDINGS, labels))


def test_a_zero_embedding_has_a_finite_gradient():
    assert np.isfinite(value_and_gradient(np.where(np.arange(6)[:, None] == 1, 0, EMBEDDINGS), LABELS)[1]).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_scale_of_embeddings_has_no_effect(dtype):
    x, of = jnp.asarray(EMBEDDINGS, dtype), jax.jit(ntxent)
    for scale in (2.0**-10, 2.0**10):
        losses = of(x, LABELS), of(x * jnp.asarray(scale, dtype), LABELS)
        np.testing.assert_allclose(*(np.asarray(loss, np.float32) for loss in losses), rtol=1e-6)


def test_masked_rows_need_no_eps_and_equal_vectors_have_finite_gradients():
    mask = np.array([True, False] * 3)

    @jax.jit
    def gradients(anchors, eps):
        masked = lambda a, eps: triplet_margin_loss(a, a + 1, a - 2, eps=eps, margin=9.0, where=mask).sum()  # noqa: E731
        equal = lambda a: triplet_margin_loss(a, anchors, -anchors, margin=9.0).sum()  # noqa: E731
        return *jax.grad(masked, (0, 1))(anchors, eps), jax.grad(equal)(anchors)

    with jax.debug_nans(True):
        assert all(np.isfinite(gradient).all() for gradient in gradients(EMBEDDINGS, 0.0))
