"""NT-Xent and triplets: batches without pairs, and samples that are taken out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from masksafe.losses import ntxent, triplet_margin_loss

EMBEDDINGS = jnp.asarray(np.random.default_rng(0).normal(size=(6, 3)), jnp.float32)
LABELS = np.array([0, 0, 1, 1, 2, 0])


@pytest.mark.parametrize("labels", [np.arange(6), np.zeros(6, int)], ids=["no pair", "no other"])
def test_batches_without_pairs_or_others_have_loss_zero(labels):
    value, gradient = jax.value_and_grad(lambda x: ntxent(x, labels))(EMBEDDINGS)
    assert value == 0
    np.testing.assert_array_equal(gradient, 0)


def test_masking_samples_is_taking_them_out():
    mask = np.array([True, True, False, True, True, True])
    dirty = jnp.where(mask[:, None], EMBEDDINGS, jnp.nan)
    np.testing.assert_allclose(ntxent(dirty, LABELS, where=mask), ntxent(EMBEDDINGS[mask], LABELS[mask]), rtol=1e-5)


def test_masking_elements_is_taking_them_out():
    mask = np.broadcast_to([True, False, True], EMBEDDINGS.shape)
    np.testing.assert_allclose(ntxent(EMBEDDINGS, LABELS, where=mask), ntxent(EMBEDDINGS[:, ::2], LABELS), rtol=1e-5)


def test_a_zero_embedding_has_a_finite_gradient():
    assert np.isfinite(jax.grad(lambda x: ntxent(x, LABELS))(EMBEDDINGS.at[1].set(0))).all()


def test_masked_rows_need_no_eps():
    mask = np.array([True, False] * 3)

    def total(anchors, eps):
        return triplet_margin_loss(anchors, anchors + 1, anchors - 2, eps=eps, margin=9.0, where=mask).sum()

    with jax.debug_nans(True):
        for gradient in jax.grad(total, (0, 1))(EMBEDDINGS, 0.0):
            assert np.isfinite(gradient).all()


def test_equal_vectors_have_a_finite_gradient():
    gradient = jax.grad(lambda x: triplet_margin_loss(x, EMBEDDINGS, -EMBEDDINGS, margin=9.0).sum())(EMBEDDINGS)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize(
    ("args", "text"),
    [((EMBEDDINGS[0], LABELS), "embeddings: got shape"), ((EMBEDDINGS, LABELS[:3]), "labels: got shape")],
)
def test_bad_arguments_are_refused(args, text):
    with pytest.raises(ValueError, match=f"ntxent: {text}"):
        ntxent(*args)
