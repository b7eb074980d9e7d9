"""Fenchel-Young losses: the function that they are given, and how masks and meshes reach it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import masksafe

RNG = np.random.default_rng(0)
SCORES = RNG.normal(size=(2, 3, 4)).astype(np.float32)
TARGETS = np.float32(RNG.dirichlet(np.ones(4), (2, 3)))
ROWS = RNG.random((2, 3)) < 0.6
loss = masksafe.losses.make_fenchel_young_loss(masksafe.logsumexp)


def test_other_arguments_reach_the_maximum_and_masked_rows_need_nothing_of_it():
    ours = masksafe.losses.make_fenchel_young_loss(lambda s, scale, *, shift: jnp.max(s) * scale + shift)
    expected = 2 * SCORES.max(-1) + 5 - (SCORES * TARGETS).sum(-1)
    both = jax.jit(lambda s: [ours(s, TARGETS, 2.0, shift=5.0, **w) for w in ({}, {"where": ROWS})])
    whole, masked = both(SCORES)
    np.testing.assert_allclose(whole, expected, rtol=1e-6)
    np.testing.assert_allclose(masked, np.where(ROWS, expected, 0), rtol=1e-6)


def test_integers_are_computed_as_floats():
    ours = masksafe.losses.make_fenchel_young_loss(jax.scipy.special.logsumexp)
    both = jax.jit(lambda s, t: (loss(s.astype(float), t), ours(s, t)))
    np.testing.assert_allclose(both(jnp.array([1, 2, 3]), jnp.array([0, 1, 0])), 1.4076059, rtol=1e-6)


def test_other_shapes_are_refused():
    with pytest.raises(ValueError, match="fenchel_young_loss: targets: got shape"):
        loss(SCORES[..., :1], TARGETS)
    with pytest.raises(ValueError, match="fenchel_young_loss: where: got shape"):
        loss(SCORES, TARGETS, where=np.ones(4, bool))
