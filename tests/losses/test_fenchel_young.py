"""Fenchel-Young losses: with the logsumexp they are the softmax cross-entropy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import masksafe

RNG = np.random.default_rng(0)
SCORES = RNG.normal(size=(2, 3, 4)).astype(np.float32)
TARGETS = RNG.random((2, 3, 4)).astype(np.float32)
TARGETS /= TARGETS.sum(-1, keepdims=True)
ELEMENTS = RNG.random((2, 3, 4)) < 0.6
ELEMENTS[0, 1] = False
ROWS = RNG.random((2, 3)) < 0.6
loss = masksafe.losses.make_fenchel_young_loss(masksafe.logsumexp)


def test_other_arguments_reach_the_maximum():
    ours = masksafe.losses.make_fenchel_young_loss(lambda s, scale, *, shift: jnp.max(s) * scale + shift)
    expected = 2 * SCORES.max(-1) + 5 - (SCORES * TARGETS).sum(-1)
    np.testing.assert_allclose(ours(SCORES, TARGETS, 2.0, shift=5.0), expected, rtol=1e-6)


def test_integers_are_computed_as_floats():
    np.testing.assert_allclose(loss(jnp.array([1.0, 2, 3]), jnp.array([0, 1, 0])), 1.4076059, rtol=1e-6)
    ours = masksafe.losses.make_fenchel_young_loss(jax.scipy.special.logsumexp)
    np.testing.assert_allclose(ours(jnp.array([1, 2, 3]), jnp.array([0, 1, 0])), 1.4076059, rtol=1e-6)


def test_vectors_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="fenchel_young_loss: targets: got shape"):
        loss(SCORES[..., :1], TARGETS)


def test_masked_elements_are_taken_out():
    masked = np.where(ELEMENTS, TARGETS, 0)
    masked = masked / np.maximum(masked.sum(-1, keepdims=True), 1e-9)
    of_both = jax.jit(lambda *a: [f(*a, where=ELEMENTS) for f in (loss, masksafe.losses.softmax_cross_entropy)])
    np.testing.assert_allclose(*of_both(SCORES, masked), rtol=1e-4, atol=1e-5)


def test_masked_rows_need_nothing_of_the_maximum():
    ours = masksafe.losses.make_fenchel_young_loss(lambda s: jnp.max(s))
    np.testing.assert_allclose(ours(SCORES, TARGETS, where=ROWS), np.where(ROWS, ours(SCORES, TARGETS), 0), rtol=1e-6)


def test_a_mask_of_another_rank_is_refused():
    with pytest.raises(ValueError, match="fenchel_young_loss: where: got shape"):
        loss(SCORES, TARGETS, where=np.ones(4, bool))


def test_scores_split_over_a_mesh_and_a_mask_that_is_not():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        split = jax.device_put(SCORES, jax.NamedSharding(mesh, jax.P("data")))
        found = jax.jit(loss)(split, TARGETS, where=ELEMENTS)
    np.testing.assert_allclose(found, loss(SCORES, TARGETS, where=ELEMENTS), rtol=1e-6)
