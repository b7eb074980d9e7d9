"""The ranking loss: what is reduced when lists are masked."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from masksafe.losses import ranking_softmax_loss

SCORES = np.float32([[2, 1, 0], [1, 0.5, 1.5], [3, 1, 2]])
LABELS = np.float32([[1, 0, 0], [0, 0, 2], [0, 1, 0]])
LISTS = np.array([[True], [False], [True]])


def test_masked_lists_are_not_counted():
    reductions = jnp.mean, jnp.sum, functools.partial(jnp.max, initial=0), lambda x, where: jnp.where(where, x, 0)

    @jax.jit
    def all_of(scores):
        losses = ranking_softmax_loss(scores, LABELS, reduce_fn=None)
        expected = [reduce_fn(losses, where=LISTS[:, 0]) for reduce_fn in reductions]
        of = functools.partial(ranking_softmax_loss, scores, LABELS, where=LISTS)
        return [*(of(reduce_fn=reduce_fn) for reduce_fn in reductions[:3]), of(reduce_fn=None)], expected

    for actual, expected in zip(*all_of(SCORES), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_the_mean_of_no_list_is_zero():
    step = jax.jit(jax.value_and_grad(lambda x, where: ranking_softmax_loss(x, LABELS, where=where)))
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0), step(SCORES, np.zeros((3, 3), bool)))
    assert jax.jit(ranking_softmax_loss)(SCORES[:0], LABELS[:0]) == 0


def test_an_item_that_is_ruled_out_costs_nothing():
    scores = SCORES.copy()
    scores[0, 2] = -np.inf
    value, gradient = jax.jit(jax.value_and_grad(ranking_softmax_loss))(scores, LABELS)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


def test_a_relevance_of_weight_0_takes_no_part_and_a_negative_weight_is_nan():
    labels, weights = LABELS.copy(), np.ones((3, 3), np.float32)
    labels[0, 2], weights[0, 2], weights[1, 0] = np.nan, 0, -1
    step = jax.jit(jax.value_and_grad(lambda *args: ranking_softmax_loss(*args[:2], weights=args[2]), (0, 1, 2)))
    of_first = step(SCORES[:1], labels[:1], weights[:1])
    expected = step(SCORES[:1], LABELS[:1], np.ones((1, 3), np.float32))
    np.testing.assert_allclose(of_first[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(of_first[1][0], expected[1][0], rtol=1e-6)
    assert of_first[1][1][0, 2] == of_first[1][2][0, 2] == 0
    losses = ranking_softmax_loss(SCORES, labels, weights=weights, reduce_fn=None)
    np.testing.assert_array_equal(np.isnan(losses), [False, True, False])


def test_logits_of_16_bits_are_not_widened_as_a_whole():
    """XLA's CPU compiler would write the wide copies to memory, which takes most of the time."""
    x = jax.ShapeDtypeStruct((4096, 1024), "bfloat16")
    program = jax.jit(lambda x, t: ranking_softmax_loss(x, t, reduce_fn=None)).lower(x, x).compile()
    assert program.memory_analysis().temp_size_in_bytes < 2**23
