"""The layers of flax.nnx and equinox around batch norm."""

import batch_norm_in_flax as example
import jax
import numpy as np
import pytest

X, WHERE = example.make_batch()
LIVE = np.asarray(X)[np.asarray(WHERE[..., 0])]


@pytest.mark.slow
def test_nnx_over_devices():
    pytest.importorskip("flax.nnx", reason="flax is not installed")
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    mean, var = example.over_devices(mesh, example.nnx_layer(momentum=0.0, axis_name="batch"), X, WHERE)
    np.testing.assert_allclose(mean, LIVE.mean(0), rtol=1e-5)
    np.testing.assert_allclose(var, LIVE.var(0), rtol=1e-5)


def test_nnx_keeps_a_running_average_and_uses_it():
    pytest.importorskip("flax.nnx", reason="flax is not installed")
    layer = example.nnx_layer()
    layer(X, WHERE)
    np.testing.assert_allclose(layer.mean[...], 0.1 * LIVE.mean(0), rtol=1e-5)
    y = layer(X, WHERE, train=False)
    normalized = (LIVE - layer.mean[...]) / np.sqrt(layer.var[...] + 1e-5)
    np.testing.assert_allclose(np.asarray(y)[np.asarray(WHERE[..., 0])], normalized, rtol=1e-4, atol=1e-5)


def test_equinox_over_samples():
    pytest.importorskip("equinox", reason="equinox is not installed")
    layer, state = example.equinox_layer(momentum=0.0)
    y, state = jax.vmap(layer, in_axes=(0, None, 0), out_axes=(0, None), axis_name="batch")(X, state, WHERE)
    np.testing.assert_allclose(state.get(layer.state_index)[0], LIVE.mean(0), rtol=1e-5)
    assert np.isfinite(y).all()
