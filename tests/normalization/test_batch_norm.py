"""batch_norm, group_norm and l2_normalize."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import masksafe
from masksafe.testing import CONSISTENCY_MODES, assert_consistent, assert_gradients, assert_mask_safe

P = PartitionSpec
RNG = np.random.default_rng(0)
X = (RNG.normal(size=(8, 5, 6)) * [1, 2, 3, 4, 5, 6] + 3).astype(np.float32)
SCALE, BIAS = (RNG.normal(size=6).astype(np.float32) for _ in range(2))
WHERE = RNG.random(X.shape) < 0.6
WHERE[:2] = WHERE[..., 4] = False  # samples and a feature with nothing left
OPS = {
    "batch_norm": lambda x, scale, bias, where=None: masksafe.batch_norm(x, scale, bias, where=where),
    "group_norm": lambda x, scale, bias, where=None: masksafe.group_norm(x, 3, scale, bias, where=where),
    "l2_normalize": lambda x, scale, bias, where=None: masksafe.l2_normalize(x, (0, 2), where),
}


def reference(name, x, where=None):
    """The same by the definition, in float64."""
    where = np.broadcast_to(True if where is None else where, x.shape)
    x = np.where(where, np.asarray(x, np.float64), 0)
    if name == "l2_normalize":
        return np.where(where, x / np.sqrt((x**2).sum((0, 2), keepdims=True)), 0)
    axes, shape = ((0, 1), x.shape) if name == "batch_norm" else ((1, 3), (8, 5, 3, 2))
    x, live = x.reshape(shape), where.reshape(shape)
    n = np.maximum(live.sum(axes, keepdims=True), 1)
    mean = x.sum(axes, keepdims=True) / n
    var = (np.where(live, x - mean, 0) ** 2).sum(axes, keepdims=True) / n
    epsilon = 1e-5 if name == "batch_norm" else 1e-6
    y = ((x - mean) / np.sqrt(var + epsilon)).reshape(X.shape) * SCALE + BIAS
    y = np.where(where, y, 0)
    return (y, mean.reshape(-1), var.reshape(-1)) if name == "batch_norm" else y


def scalar(outputs):
    leaves = jax.tree.leaves(outputs)
    return sum(jnp.sum(y * jnp.cos(i + jnp.arange(y.size)).reshape(y.shape)) for i, y in enumerate(leaves))


def differentiated(fn):
    def total(*args):
        out = fn(*args)
        return scalar(out), out

    def both(*args):
        (_, out), gradients = jax.value_and_grad(total, (0, 1, 2), has_aux=True)(*args)
        return out, gradients

    return jax.jit(both)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("where", [None, WHERE, WHERE[:, :, :1]], ids=["no mask", "elements", "positions"])
def test_values_are_those_of_the_definition(name, where):
    chex.assert_trees_all_close(OPS[name](X, SCALE, BIAS, where), reference(name, X, where), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", OPS)
def test_gradients(name):
    assert_gradients(functools.partial(_small, name), X[:4, :3], SCALE, BIAS)


def _small(name, x, scale, bias):
    return OPS[name](x, scale, bias, WHERE[2:6, :3])


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("transform", ["jit", *(pytest.param(t, marks=pytest.mark.slow) for t in ("eager", "vmap"))])
def test_masked_elements_are_gone(name, transform):
    fn = lambda x, scale, bias: OPS[name](x, scale, bias, WHERE)  # noqa: E731
    assert_mask_safe(fn, X, SCALE, BIAS, masked={0: ~WHERE}, transforms=(transform,))


@pytest.mark.parametrize("name", OPS)
def test_nothing_left_is_0_with_its_gradients(name):
    fn = differentiated(lambda *args: OPS[name](*args, np.zeros(X.shape, bool)))
    jax.tree.map(lambda a: np.testing.assert_array_equal(a, 0), fn(np.full_like(X, np.nan), SCALE, BIAS))


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("modes", [("jit", "vmap", "scan"), pytest.param(CONSISTENCY_MODES, marks=pytest.mark.slow)])
def test_one_answer(name, modes):
    assert_consistent(lambda x, where: OPS[name](x, SCALE, BIAS, where), X, WHERE, modes=modes)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto], ids=str)
def test_sharded_batch_is_that_of_the_whole(name, axis_type):
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(axis_type,))
    expected = differentiated(lambda *args: OPS[name](*args, WHERE))(X, SCALE, BIAS)
    with jax.set_mesh(mesh):
        x, where = jax.device_put((X, WHERE), NamedSharding(mesh, P("batch")))
        actual = differentiated(lambda *args: OPS[name](*args, where))(x, SCALE, BIAS)
    chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", OPS)
def test_value_and_gradient_lower_for_cuda(name):
    fn = differentiated(lambda *args: OPS[name](*args, WHERE))
    assert jax.export.export(fn, platforms=["cuda"])(X, SCALE, BIAS).platforms == ("cuda",)


@pytest.mark.parametrize("name", OPS)
def test_no_false_alarm_of_debug_nans(name):
    x = np.where(WHERE, X, np.nan)
    with jax.debug_nans(True):
        out, pull_back = jax.vjp(lambda x: jax.tree.leaves(OPS[name](x, SCALE, BIAS, WHERE))[0], x)
        (gradient,) = pull_back(out)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("name", OPS)
def test_forward_mode(name):
    fn = lambda x: OPS[name](x, SCALE, BIAS, WHERE)  # noqa: E731
    v = jnp.cos(X)
    with masksafe.forward_mode():
        tangent = jax.jit(lambda x: jax.jvp(fn, (x,), (v,))[1])(X)
        slope = jax.jit(lambda x: jax.jvp(lambda x: scalar(fn(x)), (x,), (v,))[1])(X)
    assert np.isfinite(jax.tree.leaves(tangent)[0]).all()
    np.testing.assert_allclose(slope, jnp.vdot(jax.jit(jax.grad(lambda x: scalar(fn(x))))(X), v), rtol=1e-4)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_inputs_are_rounded_once(name, dtype):
    x = X.astype(jnp.dtype(dtype))
    y, expected = OPS[name](x, SCALE, BIAS, WHERE), reference(name, x, WHERE)
    y, expected = (y[0], expected[0]) if name == "batch_norm" else (y, expected)
    assert y.dtype == x.dtype
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=0.51 * eps, atol=1e-5)


@pytest.mark.parametrize("name", ["batch_norm", "group_norm"])
def test_unmasked_nan_shows_in_its_own_feature_or_group_only(name):
    x, where = X.copy(), WHERE.copy()
    x[3, 2, 1], where[3, 2, 1] = np.nan, True
    y = jax.tree.leaves(OPS[name](x, SCALE, BIAS, where))[0]
    group = np.s_[:, :, 1] if name == "batch_norm" else np.s_[3, :, :2]
    np.testing.assert_array_equal(np.isnan(y[group]), where[group])
    assert np.isnan(y).sum() == where[group].sum()


@pytest.mark.parametrize("name", ["batch_norm", "group_norm"])
@pytest.mark.parametrize("offset", [1e4, 1e6])
def test_digits_survive_a_large_mean_and_equal_elements(name, offset):
    x = RNG.normal(size=X.shape).astype(np.float32) + np.float32(offset)
    x[..., 2:4] = 3.3
    actual, expected = OPS[name](x, SCALE, BIAS), reference(name, x)
    if name == "batch_norm":
        (actual, mean, var), expected = actual, expected[0]
        assert var[2] == 0
        assert mean[2] == np.float32(3.3)
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(actual[..., 2], np.broadcast_to(BIAS[2], (8, 5)))


# Batch norm.


def on_devices(fn, mesh=None, **kwargs):
    mesh = mesh or jax.make_mesh((8,), ("batch",), axis_types=(AxisType.Auto,))
    split = P(mesh.axis_names)
    return jax.shard_map(fn, mesh=mesh, in_specs=(split, P(), P(), split), out_specs=(split, P(), P()), **kwargs)


@pytest.mark.parametrize("where", [None, WHERE], ids=["no mask", "mask"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_batch_norm_over_devices_is_that_of_the_whole(where, check_vma):
    given = np.ones(X.shape, bool) if where is None else where

    def of_part(x, scale, bias, part):
        return masksafe.batch_norm(x, scale, bias, where=None if where is None else part, axis_name="batch")

    fn = on_devices(of_part, check_vma=check_vma)
    actual = differentiated(lambda *args: fn(*args, given))(X, SCALE, BIAS)
    expected = differentiated(lambda *args: masksafe.batch_norm(*args, where=where))(X, SCALE, BIAS)
    chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_batch_norm_exchanges_once_in_either_pass():
    fn = on_devices(lambda *args: masksafe.batch_norm(*args[:3], where=args[3], axis_name="batch"))
    loss = lambda *args: jnp.sum(jnp.sin(fn(*args, WHERE)[0]))  # noqa: E731
    programs = [jax.jit(f).lower(X, SCALE, BIAS).compile() for f in (fn_value(fn), jax.grad(loss, (0, 1, 2)))]
    counts = [program.as_text().count(" all-reduce(") for program in programs]
    assert counts[0] == 1
    assert counts[1] <= 3  # the second pass exchanges what the gradients of scale and bias need as well


def fn_value(fn):
    return lambda *args: fn(*args, WHERE)


def test_batch_norm_over_devices_and_micro_batches_and_over_samples():
    """Over a mesh axis and a named axis of vmap at once, and as equinox has it, one sample at a time."""
    expected = differentiated(lambda *args: masksafe.batch_norm(*args, where=WHERE))(X, SCALE, BIAS)
    mesh = jax.make_mesh((4,), ("devices",), axis_types=(AxisType.Auto,))

    def of_device(x, scale, bias, where):
        of_part = lambda x, where: masksafe.batch_norm(  # noqa: E731
            x, scale, bias, where=where, axis_name=("devices", "parts")
        )
        return jax.vmap(of_part, axis_name="parts", out_axes=(0, None, None))(x, where)

    def over_samples(x, scale, bias):
        of_sample = lambda x, where: masksafe.batch_norm(x, scale, bias, where=where, axis_name="batch")  # noqa: E731
        return jax.vmap(of_sample, axis_name="batch", out_axes=(0, None, None))(x, WHERE)

    on_mesh = on_devices(of_device, mesh, check_vma=False)  # in which JAX allows a named axis of vmap
    for fn in (lambda *args: on_mesh(*args, WHERE), over_samples):
        chex.assert_trees_all_close(differentiated(fn)(X, SCALE, BIAS), expected, rtol=1e-4, atol=1e-4)


def test_batch_norm_with_given_statistics():
    _, mean, var = masksafe.batch_norm(X, where=WHERE)
    y, *statistics = masksafe.batch_norm(X, SCALE, BIAS, where=WHERE, mean=mean, var=var)
    np.testing.assert_allclose(y, masksafe.batch_norm(X, SCALE, BIAS, where=WHERE)[0], rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_equal(tuple(statistics), (mean, var))
    fn = lambda x, mean, var: masksafe.batch_norm(x, SCALE, BIAS, where=WHERE, mean=mean, var=var)[0]  # noqa: E731
    assert_gradients(fn, X, mean, var + 1)


@pytest.mark.parametrize("axis", [1, (2, 0), -1])
def test_batch_norm_over_any_axes(axis):
    axes = (axis,) if isinstance(axis, int) else axis
    shape = [X.shape[a] for a in axes]
    scale, bias = (np.cos(s + np.arange(np.prod(shape))).reshape(shape).astype(np.float32) for s in (0, 1))
    y, mean, var = masksafe.batch_norm(X, scale, bias, axis=axis, where=WHERE)
    moved = np.moveaxis(X, axes, range(3 - len(axes), 3)).reshape(-1, np.prod(shape))
    live = np.moveaxis(WHERE, axes, range(3 - len(axes), 3)).reshape(moved.shape)
    flat = masksafe.batch_norm(moved, scale.reshape(-1), bias.reshape(-1), where=live)
    chex.assert_trees_all_close((mean.reshape(-1), var.reshape(-1)), flat[1:], rtol=1e-5)
    actual = np.moveaxis(y, axes, range(3 - len(axes), 3)).reshape(moved.shape)
    np.testing.assert_allclose(actual, flat[0], rtol=1e-4, atol=1e-5)


def test_batch_norm_is_that_of_flax():
    layer = nn.BatchNorm(use_running_average=False, momentum=0.0, use_fast_variance=False)
    variables = {"params": {"scale": SCALE, "bias": BIAS}, "batch_stats": {"mean": np.zeros(6), "var": np.ones(6)}}
    y, updated = layer.apply(variables, X, mutable="batch_stats")
    actual = masksafe.batch_norm(X, SCALE, BIAS)
    expected = (y, updated["batch_stats"]["mean"], updated["batch_stats"]["var"])
    chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_groups_of_channels_that_a_mesh_splits():
    x = np.random.default_rng(0).normal(size=(3, 2, 8)).astype(np.float32)
    mesh = jax.make_mesh((4,), ("channels",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        split = jax.device_put(x, P(None, None, "channels"))
        actual = jax.jit(lambda x: masksafe.group_norm(x, 2))(split)
    np.testing.assert_allclose(actual, masksafe.group_norm(x, 2), rtol=1e-4, atol=1e-5)


def test_group_norm_is_that_of_flax_and_of_instances():
    layer = nn.GroupNorm(num_groups=3, epsilon=1e-6, use_fast_variance=False)
    expected = layer.apply({"params": {"scale": SCALE, "bias": BIAS}}, X)
    np.testing.assert_allclose(masksafe.group_norm(X, 3, SCALE, BIAS), expected, rtol=1e-4, atol=1e-5)
    of_channels = masksafe.group_norm(X, 6, where=WHERE)
    np.testing.assert_allclose(of_channels, masksafe.standardize(X, 1, None, None, 1e-6, WHERE), rtol=1e-4, atol=1e-5)
    channels_first = masksafe.group_norm(np.moveaxis(X, -1, 1), 3, SCALE, BIAS, axis=1)
    np.testing.assert_allclose(np.moveaxis(channels_first, 1, -1), expected, rtol=1e-4, atol=1e-5)
    of_one_sample = masksafe.group_norm(np.moveaxis(X[0], -1, 0), 3, SCALE, BIAS, axis=0)
    np.testing.assert_allclose(np.moveaxis(of_one_sample, 0, -1), expected[0], rtol=1e-4, atol=1e-5)


# Lengths.


@pytest.mark.parametrize("magnitude", [1e-40, 1e-30, 1.0, 1e30, 1e38])
def test_length_neither_overflows_nor_vanishes(magnitude):
    x = np.array([3.0, -4.0, 0.0], np.float32) / 4 * np.float32(magnitude)
    exact = x.astype(np.float64) / np.linalg.norm(x.astype(np.float64))
    np.testing.assert_allclose(masksafe.l2_normalize(x), exact, rtol=1e-6 if magnitude > 1e-38 else 1.0)


def test_length_of_zeros_and_below_epsilon():
    of_zeros = jax.jit(jax.grad(lambda x: jnp.sum(masksafe.l2_normalize(x))))(jnp.zeros(3))
    np.testing.assert_array_equal(of_zeros, 0)
    x = np.array([0.3, 0.4], np.float32)
    value, gradient = jax.value_and_grad(lambda x: jnp.sum(masksafe.l2_normalize(x, epsilon=2.0)))(x)
    np.testing.assert_allclose(value, 0.35, rtol=1e-6)
    np.testing.assert_allclose(gradient, 0.5, rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: masksafe.batch_norm(X, np.ones(5)), ValueError, "batch_norm: scale: got shape"),
        (lambda: masksafe.batch_norm(X, mean=np.ones(6)), ValueError, "batch_norm: var: got value None"),
        (lambda: masksafe.batch_norm(X, epsilon=-1), ValueError, "batch_norm: epsilon"),
        (lambda: masksafe.batch_norm(X, axis_name="data"), ValueError, "batch_norm: axis_name: got value 'data'"),
        (lambda: masksafe.group_norm(X, 4), ValueError, "group_norm: num_groups: got value 4; expected a divisor"),
        (lambda: masksafe.group_norm(X, 2.0), TypeError, "group_norm: num_groups: got type float"),
        (lambda: masksafe.l2_normalize(X, 3), ValueError, "l2_normalize: axis"),
        (lambda: masksafe.l2_normalize(np.arange(3)), TypeError, "l2_normalize: x: got dtype"),
        (lambda: masksafe.layer_norm(X, weights=np.ones(5)), ValueError, "layer_norm: weights: got shape"),
    ],
)
def test_bad_arguments_are_refused(call, error, match):
    with pytest.raises(error, match=match):
        call()
