"""NT-Xent and triplets: batches without pairs, and samples that are taken out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from masksafe.losses import ntxent, triplet_margin_loss

EMBEDDINGS = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
LABELS = np.array([0, 0, 1, 1, 2, 0])
value_and_gradient = jax.jit(jax.value_and_grad(ntxent))


@pytest.mark.parametrize("labels", [np.arange(6), np.zeros(6, int)], ids=["no pair", "no other"])
def test_batches_without_pairs_or_others_have_loss_zero(labels):
    value, gradient = value_and_gradient(EMBEDDINGS, labels)
    assert value == 0
    np.testing.assert_array_equal(gradient, 0)


def test_masking_samples_is_taking_them_out():
    mask = np.array([True, True, False, True, True, True])
    dirty = np.where(mask[:, None], EMBEDDINGS, np.nan)
    both = jax.jit(lambda x, removed: (ntxent(x, LABELS, where=mask), ntxent(removed, LABELS[mask])))
    np.testing.assert_allclose(*both(dirty, EMBEDDINGS[mask]), rtol=1e-5)


def test_masking_elements_is_taking_them_out():
    mask = np.broadcast_to([True, False, True], EMBEDDINGS.shape)
    both = jax.jit(lambda x, removed: (ntxent(x, LABELS, where=mask), ntxent(removed, LABELS)))
    np.testing.assert_allclose(*both(EMBEDDINGS, EMBEDDINGS[:, ::2]), rtol=1e-5)


def test_a_zero_embedding_has_a_finite_gradient():
    assert np.isfinite(value_and_gradient(np.where(np.arange(6)[:, None] == 1, 0, EMBEDDINGS), LABELS)[1]).all()


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, np.float32])
@pytest.mark.parametrize("scale", [2.0**-10, 2.0**10])
def test_the_scale_of_embeddings_has_no_effect(dtype, scale):
    x = EMBEDDINGS.astype(dtype)
    losses = jax.jit(lambda x, scaled: (ntxent(x, LABELS), ntxent(scaled, LABELS)))(x, x * dtype(scale))
    np.testing.assert_allclose(*(np.asarray(loss, np.float32) for loss in losses), rtol=1e-6)


def test_masked_rows_need_no_eps():
    mask = np.array([True, False] * 3)

    def total(anchors, eps):
        return triplet_margin_loss(anchors, anchors + 1, anchors - 2, eps=eps, margin=9.0, where=mask).sum()

    with jax.debug_nans(True):
        for gradient in jax.grad(total, (0, 1))(jnp.asarray(EMBEDDINGS), 0.0):
            assert np.isfinite(gradient).all()


def test_equal_vectors_have_a_finite_gradient():
    step = jax.jit(jax.grad(lambda x: triplet_margin_loss(x, EMBEDDINGS, -EMBEDDINGS, margin=9.0).sum()))
    assert np.isfinite(step(EMBEDDINGS)).all()


@pytest.mark.parametrize(
    ("args", "text"),
    [((EMBEDDINGS[0], LABELS), "embeddings: got shape"), ((EMBEDDINGS, LABELS[:3]), "labels: got shape")],
)
def test_bad_arguments_are_refused(args, text):
    with pytest.raises(ValueError, match=f"ntxent: {text}"):
        ntxent(*args)
