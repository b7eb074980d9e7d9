"""batch_norm, group_norm and l2_normalize: batches over devices, axes, groups, digits, peers."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import with_gradients
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tiers import parametrize

import masksafe

P = PartitionSpec
RNG = np.random.default_rng(0)
X = (RNG.normal(size=(8, 5, 6)) * [1, 2, 3, 4, 5, 6] + 3).astype(np.float32)
SCALE, BIAS = (RNG.normal(size=6).astype(np.float32) for _ in range(2))
WHERE = RNG.random(X.shape) < 0.6
WHERE[:2] = WHERE[..., 4] = False  # samples and a feature with nothing left


def batch_norm(x, scale, bias, where=None, **options):
    return masksafe.batch_norm(x, scale, bias, where=where, **options)


# Batch norm.


@pytest.fixture(scope="module")
def of_the_whole():
    return with_gradients(lambda *args: batch_norm(*args, WHERE), (0, 1, 2))(X, SCALE, BIAS)


def on_devices(fn, mesh=None, **kwargs):
    mesh = mesh or jax.make_mesh((8,), ("batch",), axis_types=(AxisType.Auto,))
    split = P(mesh.axis_names)
    return jax.shard_map(fn, mesh=mesh, in_specs=(split, P(), P(), split), out_specs=(split, P(), P()), **kwargs)


@parametrize("axis_type", [AxisType.Explicit], exhaustive=[AxisType.Auto], ids=str)
def test_batch_norm_of_a_sharded_batch_is_that_of_the_whole(axis_type, of_the_whole):
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(axis_type,))
    with jax.set_mesh(mesh):
        x, where = jax.device_put((X, WHERE), NamedSharding(mesh, P("batch")))
        actual = with_gradients(lambda *args: batch_norm(*args, where), (0, 1, 2))(x, SCALE, BIAS)
    chex.assert_trees_all_close(actual, of_the_whole, rtol=1e-4, atol=1e-4)


def test_batch_norm_over_devices_exchanges_means_then_deviations(of_the_whole):
    fn = on_devices(lambda *args: batch_norm(*args, axis_name="batch"))
    of_value = jax.jit(lambda *args: fn(*args, WHERE)).lower(X, SCALE, BIAS).compile()
    of_gradients = with_gradients(lambda *args: fn(*args, WHERE), (0, 1, 2)).lower(X, SCALE, BIAS).compile()
    chex.assert_trees_all_close(of_gradients(X, SCALE, BIAS), of_the_whole, rtol=1e-4, atol=1e-4)
    assert of_value.as_text().count(" all-reduce(") == 2
    # The second pass exchanges what the gradients of scale and bias need as well.
    assert of_gradients.as_text().count(" all-reduce(") <= 4


@parametrize("how", ["samples"], exhaustive=["devices and micro-batches"])
def test_batch_norm_over_named_axes_of_vmap(how, of_the_whole):
    """As equinox has it, one sample at a time; and over a mesh axis and a named axis of vmap at once."""
    mesh = jax.make_mesh((4,), ("devices",), axis_types=(AxisType.Auto,))

    def over(axis_name, name):
        def mapped(x, scale, bias, where):
            one = lambda x, where: batch_norm(x, scale, bias, where, axis_name=axis_name)  # noqa: E731
            return jax.vmap(one, axis_name=name, out_axes=(0, None, None))(x, where)

        return mapped

    if how == "samples":
        fn = over("batch", "batch")
    else:
        fn = on_devices(over(("devices", "parts"), "parts"), mesh, check_vma=False)  # with which JAX allows it
    actual = with_gradients(lambda *args: fn(*args, WHERE), (0, 1, 2))(X, SCALE, BIAS)
    chex.assert_trees_all_close(actual, of_the_whole, rtol=1e-4, atol=1e-4)


def test_batch_norm_of_channels_on_several_axes():
    flat = lambda x: np.moveaxis(x, (2, 0), (1, 2)).reshape(5, 48)  # noqa: E731
    scale, bias = (np.cos(s + np.arange(48)).astype(np.float32) for s in (0, 1))
    parameters = scale.reshape(6, 8), bias.reshape(6, 8)
    y, *statistics = masksafe.batch_norm(X, *parameters, axis=(2, 0), where=WHERE)
    expected, *of_columns = masksafe.batch_norm(flat(X), scale, bias, where=flat(WHERE))
    chex.assert_trees_all_close(statistics, [s.reshape(6, 8) for s in of_columns], rtol=1e-5)
    np.testing.assert_allclose(flat(y), expected, rtol=1e-4, atol=1e-5)


# Group norm.


def test_groups_of_channels_that_a_mesh_splits():
    x = np.random.default_rng(0).normal(size=(3, 2, 8)).astype(np.float32)
    mesh = jax.make_mesh((4,), ("channels",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        split = jax.device_put(x, P(None, None, "channels"))
        actual = jax.jit(lambda x: masksafe.group_norm(x, 2))(split)
    np.testing.assert_allclose(actual, masksafe.group_norm(x, 2), rtol=1e-4, atol=1e-5)


def test_group_norm_of_no_elements():
    for shape in ((3, 0), (0, 3, 4), (3, 0, 4)):
        out, gradient = jax.value_and_grad(lambda x: jnp.sum(masksafe.group_norm(x, 2)))(jnp.ones(shape))
        assert out == 0
        assert gradient.shape == shape


def test_group_norm_of_one_sample_and_channels_first():
    expected = masksafe.group_norm(X, 3, SCALE, BIAS)
    of_one_sample = masksafe.group_norm(np.moveaxis(X[0], -1, 0), 3, SCALE, BIAS, axis=0)
    np.testing.assert_allclose(np.moveaxis(of_one_sample, 0, -1), expected[0], rtol=1e-4, atol=1e-5)
    channels_first = masksafe.group_norm(np.moveaxis(X, -1, 1), 3, SCALE, BIAS, axis=1)
    np.testing.assert_allclose(np.moveaxis(channels_first, 1, -1), expected, rtol=1e-4, atol=1e-5)


# Lengths.


def test_length_of_small_and_large_vectors():
    for magnitude in (1e-15, 1.0, 1e15):
        x = np.array([3.0, -4.0, 0.0], np.float32) / 4 * np.float32(magnitude)
        exact = x.astype(np.float64) / np.linalg.norm(x.astype(np.float64))
        np.testing.assert_allclose(masksafe.l2_normalize(x), exact, rtol=1e-6)


def test_length_of_zeros_and_below_epsilon():
    of_zeros = jax.jit(jax.grad(lambda x: jnp.sum(masksafe.l2_normalize(x))))(jnp.zeros(3))
    np.testing.assert_array_equal(of_zeros, 0)
    x = np.array([0.3, 0.4], np.float32)
    value, gradient = jax.value_and_grad(lambda x: jnp.sum(masksafe.l2_normalize(x, epsilon=2.0)))(x)
    np.testing.assert_allclose(value, 0.35, rtol=1e-6)
    np.testing.assert_allclose(gradient, 0.5, rtol=1e-6)


def test_length_along_several_axes():
    length = np.sqrt((np.where(WHERE, X, 0) ** 2).sum((0, 2), keepdims=True))
    expected = np.where(WHERE, X / np.maximum(length, 1e-9), 0)
    np.testing.assert_allclose(masksafe.l2_normalize(X, (0, 2), WHERE), expected, rtol=1e-5)
