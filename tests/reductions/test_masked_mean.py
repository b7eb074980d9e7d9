"""MaskedMean and value_and_grad_of_mean."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import masksafe
from masksafe import MaskedMean, losses, value_and_grad_of_mean

P = PartitionSpec
RNG = np.random.default_rng(0)
LENGTHS = np.array([6, 1, 0, 3, 0, 0, 5, 2, 0, 0, 0, 0, 6, 4, 1, 1])  # some parts of four, and pairs, have nothing left
FEATURES = RNG.normal(size=(16, 6, 3)).astype(np.float32)
LABELS = np.where(np.arange(6) < LENGTHS[:, None], RNG.integers(0, 5, (16, 6)), -100)
PARAMS = {"kernel": RNG.normal(size=(3, 5)).astype(np.float32), "bias": np.zeros(5, np.float32)}


def mean_loss(params, features, labels):
    mask = labels != -100
    logits = features @ params["kernel"] + params["bias"]
    per_token = losses.softmax_cross_entropy_with_integer_labels(logits, labels, where=mask)
    return MaskedMean.of(per_token, mask)


def of_the_whole(params, features=FEATURES, labels=LABELS):
    return jax.value_and_grad(lambda params: mean_loss(params, features, labels).value)(params)


# The mean.


def test_parts_add_up_to_the_whole():
    x, where = RNG.normal(size=(4, 5)), RNG.random((4, 5)) < 0.4
    weights = RNG.random((4, 5))
    for kwargs in ({}, {"weights": weights}):
        parts = [MaskedMean.of(x[i], where[i], **{name: w[i] for name, w in kwargs.items()}) for i in range(4)]
        whole = MaskedMean.of(x, where, **kwargs)
        np.testing.assert_allclose(sum(parts).value, whole.value, rtol=1e-6)
        np.testing.assert_allclose(whole.value, masksafe.mean(x, where=where, **kwargs), rtol=1e-6)
        by_row = MaskedMean.of(x, where, axis=1, **kwargs)
        np.testing.assert_allclose(by_row.value, masksafe.mean(x, 1, where, **kwargs), rtol=1e-6)


def test_nothing_is_0_and_counts_are_exact():
    nothing = MaskedMean.of(np.full(3, np.nan), np.zeros(3, bool))
    assert (nothing.value, nothing.total, nothing.count) == (0, 0, 0)
    assert jax.grad(lambda x: MaskedMean.of(x, x > 9).value)(1.0) == 0
    many = MaskedMean(jnp.array(2**24), jnp.array(2**24)) + MaskedMean.of(np.ones(1, bool))
    assert (many.count, many.total) == (2**24 + 1, 2**24 + 1)
    assert MaskedMean.of(np.array([True, False, True])).value == np.float32(2 / 3)


def test_is_a_pytree_for_scan_vmap_and_psum():
    where = RNG.random((8, 5)) < 0.4
    x = RNG.normal(size=(8, 5)).astype(np.float32)
    expected = masksafe.mean(x, where=where)
    of_rows = jax.vmap(MaskedMean.of)(x, where)
    np.testing.assert_allclose(jax.tree.map(jnp.sum, of_rows).value, expected, rtol=1e-6)
    zero = MaskedMean(jnp.zeros(()), jnp.zeros((), int))
    in_turn, _ = lax.scan(lambda total, part: (total + MaskedMean.of(*part), None), zero, (x, where))
    np.testing.assert_allclose(in_turn.value, expected, rtol=1e-6)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    over_devices = jax.shard_map(
        lambda *part: MaskedMean.of(*part).psum("data").value, mesh=mesh, in_specs=P("data"), out_specs=P()
    )
    np.testing.assert_allclose(jax.jit(over_devices)(x, where), expected, rtol=1e-6)


def test_strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        assert MaskedMean.of(jnp.ones(3), jnp.array([True, False, True])).value == 1


# Its gradient.


@pytest.mark.parametrize("microbatches", [1, 2, 8, 16])
def test_gradient_of_micro_batches_is_that_of_the_whole(microbatches):
    fn = jax.jit(value_and_grad_of_mean(mean_loss, microbatches=microbatches))
    chex.assert_trees_all_close(fn(PARAMS, FEATURES, LABELS), of_the_whole(PARAMS), rtol=1e-5, atol=1e-6)


def test_nothing_left_anywhere_is_0():
    fn = jax.jit(value_and_grad_of_mean(mean_loss, microbatches=4))
    value, gradients = fn(PARAMS, np.full_like(FEATURES, np.nan), np.full_like(LABELS, -100))
    jax.tree.map(lambda a: np.testing.assert_array_equal(a, 0), (value, gradients))


@pytest.mark.parametrize(("check_vma", "axes"), [(True, "a"), (False, "a"), (True, ("a", "b"))])
def test_gradient_over_devices_is_that_of_the_whole(check_vma, axes):
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    fn = value_and_grad_of_mean(mean_loss, microbatches=2, axis_name=axes)
    on_devices = jax.jit(
        jax.shard_map(fn, mesh=mesh, in_specs=(P(), P(axes), P(axes)), out_specs=(P(), P()), check_vma=check_vma)
    )
    actual = on_devices(PARAMS, FEATURES, LABELS)
    chex.assert_trees_all_close(actual, of_the_whole(PARAMS), rtol=1e-5, atol=1e-6)
    text = on_devices.lower(PARAMS, FEATURES, LABELS).compile().as_text()
    assert text.count(" all-reduce(") == 2  # of the sums of all micro-batches: floats, and the count


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_gradient_on_a_mesh_without_shard_map(axis_type):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(axis_type,))
    with jax.set_mesh(mesh):
        batch = jax.device_put((FEATURES, LABELS), NamedSharding(mesh, P("data")))
        actual = jax.jit(value_and_grad_of_mean(mean_loss, microbatches=4))(PARAMS, *batch)
    chex.assert_trees_all_close(actual, of_the_whole(PARAMS), rtol=1e-5, atol=1e-6)


def test_count_that_depends_on_the_parameters():
    """Weights that are learned: the derivative of the count is part of that of the mean."""

    def mean_of_weighted(params, x, where):
        return MaskedMean.of(jnp.sin(x * params), where, weights=jnp.exp(x * params))

    x, where = RNG.normal(size=(8, 3)).astype(np.float32), RNG.random((8, 3)) < 0.5
    expected = jax.value_and_grad(lambda p: mean_of_weighted(p, x, where).value)(0.7)
    for microbatches in (1, 4):
        actual = jax.jit(value_and_grad_of_mean(mean_of_weighted, microbatches=microbatches))(0.7, x, where)
        chex.assert_trees_all_close(actual, expected, rtol=1e-5)


def test_bfloat16_parameters_are_accumulated_in_float32():
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    value, gradients = jax.jit(value_and_grad_of_mean(mean_loss, microbatches=16))(params, FEATURES, LABELS)
    assert value.dtype == jnp.float32
    chex.assert_trees_all_equal_dtypes(gradients, params)
    ones = lambda p, x: MaskedMean.of(x * p)  # noqa: E731
    _, gradient = value_and_grad_of_mean(ones, microbatches=512)(jnp.bfloat16(1), jnp.ones(512, jnp.bfloat16))
    assert gradient == 1  # a sum in bfloat16 stands still at 256


def test_aux_keys_scalars_keywords_and_several_arguments():
    def fn(kernel, batch, bias, key, factor, *, labels):
        noise = jax.random.normal(key, batch.shape[:1])
        mean = mean_loss({"kernel": kernel, "bias": bias}, batch * factor, labels)
        return mean, {"noise": noise, "count": mean.count}

    args = PARAMS["kernel"], FEATURES, PARAMS["bias"], jax.random.key(0), 1.0
    wrapped = jax.jit(value_and_grad_of_mean(fn, (0, 2), has_aux=True, microbatches=4))
    (value, aux), (d_kernel, d_bias) = wrapped(*args, labels=LABELS)
    expected_value, expected = of_the_whole(PARAMS)
    chex.assert_trees_all_close(
        (value, d_kernel, d_bias), (expected_value, expected["kernel"], expected["bias"]), rtol=1e-5, atol=1e-6
    )
    assert aux["noise"].shape == (4, 4)
    assert len(np.unique(aux["noise"])) == 16
    np.testing.assert_array_equal(aux["count"], [np.sum(LABELS[i::4] != -100) for i in range(4)])


def test_remat_donated_parameters_and_second_derivatives():
    rematted = value_and_grad_of_mean(jax.checkpoint(mean_loss), microbatches=4)
    step = jax.jit(
        lambda params, *batch: jax.tree.map(lambda p, g: p - g, params, rematted(params, *batch)[1]), donate_argnums=0
    )
    _, gradients = of_the_whole(PARAMS)
    stepped = step(jax.tree.map(jnp.array, PARAMS), FEATURES, LABELS)
    chex.assert_trees_all_close(stepped, jax.tree.map(jnp.subtract, PARAMS, gradients), rtol=1e-5, atol=1e-6)
    along = lambda grad: jax.jit(lambda p: jax.jvp(lambda p: grad(p)[1], (p,), (PARAMS,))[1])(PARAMS)  # noqa: E731
    in_parts = along(lambda p: value_and_grad_of_mean(mean_loss, microbatches=4)(p, FEATURES, LABELS))
    chex.assert_trees_all_close(in_parts, along(of_the_whole), rtol=1e-4, atol=1e-5)


def test_label_checks_reach_every_part():
    labels = LABELS.copy()
    labels[7, 1] = 5
    fn = value_and_grad_of_mean(mean_loss, microbatches=4)
    with masksafe.label_checks("checkify"):
        error, _ = jax.jit(checkify.checkify(fn))(PARAMS, FEATURES, labels)
    with pytest.raises(checkify.JaxRuntimeError, match="softmax_cross_entropy_with_integer_labels"):
        error.throw()
    value, _ = jax.jit(fn)(PARAMS, FEATURES, labels)
    assert np.isnan(value)


@pytest.mark.parametrize("dtype", ["bool", "int8", "bfloat16"])
def test_counts_of_narrow_dtypes_neither_wrap_nor_stand_still(dtype):
    fn = lambda p, x: MaskedMean(jnp.sum(p * x), jnp.sum(x).astype(dtype))  # noqa: E731
    value, gradient = jax.jit(value_and_grad_of_mean(fn, microbatches=512))(1.0, np.ones(512, np.float32))
    assert (value, gradient) == (1, 1)
    parts = [MaskedMean(jnp.ones((), dtype), jnp.ones((), dtype)) for _ in range(300)]
    assert sum(parts).count == 300


def test_only_some_axes_manual():
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    fn = value_and_grad_of_mean(mean_loss, microbatches=2, axis_name="a")
    specs = (P(), P("a"), P("a"))
    on_devices = jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=P(), axis_names={"a"})
    actual = jax.jit(on_devices)(PARAMS, FEATURES, LABELS)
    chex.assert_trees_all_close(actual, of_the_whole(PARAMS), rtol=1e-5, atol=1e-6)


def test_a_mean_that_is_summed_already_is_refused():
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,))
    fn = value_and_grad_of_mean(lambda p, x: MaskedMean.of(p * x).psum("a"), axis_name="a")
    with pytest.raises(ValueError, match="fn: got a MaskedMean whose total is the same on all devices"):
        jax.shard_map(fn, mesh=mesh, in_specs=(P(), P("a")), out_specs=P())(jnp.ones(()), jnp.ones(8))


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: value_and_grad_of_mean(mean_loss, (0, 0))(PARAMS, FEATURES, LABELS), ValueError, "argnums"),
        (lambda: value_and_grad_of_mean(mean_loss, 1.5)(PARAMS, FEATURES, LABELS), ValueError, "argnums"),
        (lambda: value_and_grad_of_mean(mean_loss)(PARAMS, FEATURES, LABELS[:8]), ValueError, "leading axes 16 of"),
        (lambda: value_and_grad_of_mean(lambda p: MaskedMean(3, p))(1.0), TypeError, "total has dtype int32"),
        (lambda: value_and_grad_of_mean(mean_loss, microbatches=0), ValueError, "microbatches: got value 0"),
        (
            lambda: value_and_grad_of_mean(mean_loss, microbatches=3)(PARAMS, FEATURES, LABELS),
            ValueError, r"args\[1\]: got shape \(16, 6, 3\)",
        ),
        (lambda: value_and_grad_of_mean(lambda x: x)(1.0), TypeError, "fn: got a function that returns"),
        (lambda: value_and_grad_of_mean(lambda x: MaskedMean(x, x))(jnp.ones(2)), ValueError, "total has shape"),
        (lambda: value_and_grad_of_mean(mean_loss, argnums=3)(PARAMS, FEATURES, LABELS), ValueError, "argnums"),
        (lambda: value_and_grad_of_mean(lambda x: MaskedMean.of(x))(3), TypeError, "dtype int32; expected a float"),
        (lambda: value_and_grad_of_mean(mean_loss, axis_name="d")(PARAMS, FEATURES, LABELS), ValueError, "axis_name"),
        (lambda: MaskedMean(1, 1) + 3, TypeError, "unsupported operand"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(call, error, match):
    with pytest.raises(error, match=match):
        call()
