"""The ranking loss: what is reduced when lists are masked."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import masksafe
from masksafe.losses import ranking_softmax_loss

SCORES = np.float32([[2, 1, 0], [1, 0.5, 1.5], [3, 1, 2]])
LABELS = np.float32([[1, 0, 0], [0, 0, 2], [0, 1, 0]])
LISTS = np.array([[True], [False], [True]])


@pytest.mark.parametrize("reduce_fn", [jnp.mean, jnp.sum, jnp.max, None])
def test_masked_lists_are_not_counted(reduce_fn):
    if reduce_fn is jnp.max:
        reduce_fn = lambda x, where: jnp.max(x, where=where, initial=0)  # noqa: E731
    actual = ranking_softmax_loss(SCORES, LABELS, where=LISTS, reduce_fn=reduce_fn)
    losses = ranking_softmax_loss(SCORES, LABELS, reduce_fn=None)
    expected = jnp.where(LISTS[:, 0], losses, 0) if reduce_fn is None else reduce_fn(losses, where=LISTS[:, 0])
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_the_mean_of_no_list_is_zero():
    loss = lambda x: ranking_softmax_loss(x, LABELS, where=np.zeros((3, 3), bool))  # noqa: E731
    value, gradient = jax.jit(jax.value_and_grad(loss))(SCORES)
    assert value == 0
    np.testing.assert_array_equal(gradient, 0)
    assert ranking_softmax_loss(SCORES[:0], LABELS[:0]) == 0


def test_masked_weights_and_labels_are_gone():
    mask = np.array([[True, True, False]] * 3)
    dirty = [np.where(mask, x, np.float32(np.nan)) for x in (SCORES, LABELS, np.ones((3, 3), np.float32))]

    def loss(scores, labels, weights):
        return ranking_softmax_loss(scores, labels, weights=weights, where=mask)

    value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*dirty)
    np.testing.assert_allclose(value, ranking_softmax_loss(SCORES[:, :2], LABELS[:, :2]), rtol=1e-6)
    for gradient in gradients:
        np.testing.assert_array_equal(gradient[:, 2], 0)


def test_an_item_that_is_ruled_out_costs_nothing():
    scores = SCORES.copy()
    scores[0, 2] = -np.inf
    value, gradient = jax.jit(jax.value_and_grad(ranking_softmax_loss))(scores, LABELS)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


def test_mean_of_lists_over_devices_that_have_unlike_numbers_of_them():
    rng = np.random.default_rng(0)
    scores, labels = rng.normal(size=(16, 4)).astype(np.float32), rng.random((16, 4)).astype(np.float32)
    where = np.arange(16)[:, None] < np.array([5, 5, 3, 0])  # most devices have no list
    mean = functools.partial(masksafe.mean, axis_name="data")
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    loss = lambda *args: ranking_softmax_loss(*args[:2], where=args[2], reduce_fn=mean)  # noqa: E731
    over_devices = jax.shard_map(loss, mesh=mesh, in_specs=spec("data"), out_specs=spec())
    actual = jax.jit(over_devices)(scores, labels, where)
    np.testing.assert_allclose(actual, ranking_softmax_loss(scores, labels, where=where), rtol=1e-5)
