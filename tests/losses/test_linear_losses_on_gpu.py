"""Losses of linear layers, and the checks of labels, on the default GPU, in sizes that have several tiles there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linear_cases import CROSS_ENTROPY, DIVERGENCE, LOG_PROBS, outputs_of

import masksafe
from masksafe import losses

pytestmark = pytest.mark.gpu

TOKENS, WIDTH, CLASSES = 1024, 64, 8192
RNG = np.random.default_rng(0)
FEATURES, TARGET_FEATURES = RNG.normal(size=(2, TOKENS, WIDTH)).astype(np.float32)
KERNEL, TARGET_KERNEL = RNG.normal(size=(2, WIDTH, CLASSES)).astype(np.float32) / 8
LABELS = RNG.integers(0, CLASSES, TOKENS).astype(np.int32)
MASK = RNG.random(TOKENS) < 0.6
SMALL_TILES = {"least_logits": 2**20, "most_logits": 2**20, "token_block_elements_on_accelerators": 2**20}
OTHERS = {
    CROSS_ENTROPY: {"labels": LABELS, "reduction": "none"},
    LOG_PROBS: {"labels": LABELS},
    DIVERGENCE: {"target_features": TARGET_FEATURES, "target_kernel": TARGET_KERNEL, "reduction": "none"},
}


def results(op, features):
    """The losses, and the gradients by the features and the kernel."""

    @jax.jit
    def step(features, kernel, mask):
        of = lambda x, k: outputs_of(op, features=x, kernel=k, where=mask, **OTHERS[op])[0]  # noqa: E731
        out, reverse = jax.vjp(of, features, kernel)
        return out, *reverse(jnp.cos(jnp.arange(TOKENS, dtype=out.dtype)))

    with jax.default_matmul_precision("highest"):
        return jax.device_get(step(features, KERNEL, MASK))


@pytest.mark.parametrize("op", OTHERS)
def test_results_in_tiles_are_those_in_one_and_garbage_changes_no_bit(op, choose):
    """Those in one tile are, in arrays of the contract, the definition's."""
    expected = results(op, FEATURES)
    choose(linear=SMALL_TILES)
    clean = results(op, FEATURES)
    for actual, of_one_tile in zip(clean, expected, strict=True):
        np.testing.assert_allclose(actual, of_one_tile, rtol=1e-4, atol=1e-4)
    assert (clean[0][~MASK] == 0).all()
    assert (clean[1][~MASK] == 0).all()
    for bad in (np.nan, np.inf, -np.inf, np.finfo(np.float32).max):
        for new, old in zip(results(op, np.where(MASK[:, None], FEATURES, bad)), clean, strict=True):
            np.testing.assert_array_equal(new, old)


@pytest.mark.parametrize("name", ["dense", "linear"])
def test_checks_report_what_is_bad_and_not_what_is_masked(name):
    @jax.jit
    def loss(labels):
        if name == "linear":
            return losses.linear_softmax_cross_entropy(FEATURES, KERNEL, labels, where=MASK)
        return losses.softmax_cross_entropy_with_integer_labels(FEATURES @ KERNEL, labels, where=MASK)

    with masksafe.label_checks("raise"):
        jax.block_until_ready(loss(np.where(MASK, LABELS, -100)))
        labels = LABELS.copy()
        labels[MASK.argmax()] = CLASSES
        with pytest.raises(Exception, match=rf"1 of \d+ labels are outside \[0, {CLASSES}\)"):
            jax.block_until_ready(loss(labels))
