"""Reductions and norms with weights, and over the devices of a mesh axis. The table has rows with weights."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import in_one_number, with_gradients
from jax.sharding import AxisType, PartitionSpec

import masksafe

P = PartitionSpec
RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 3)).astype(np.float32) + 100
WHERE = np.arange(16)[:, None] < np.array([16, 5, 0])  # uneven: some devices have nothing of a column, or of any
WEIGHTS = RNG.integers(0, 4, size=X.shape).astype(np.float32)
NORMS = ("standardize", "layer_norm", "rms_norm")


def of_name(name):
    """An op of that name, with axes and a mask in the same places."""
    op = getattr(masksafe, name)
    return lambda x, axis=0, where=None, **options: op(x, axis=axis, where=where, **options)


REDUCTIONS = {name: of_name(name) for name in ("var_mean", "sum", "mean", *NORMS)}
REDUCTIONS["var"] = functools.partial(of_name("var"), correction=1)
EXTREMA = {"max": masksafe.max, "min": masksafe.min}
every_reduction = pytest.mark.parametrize("name", REDUCTIONS)


def mesh_of(*sizes, axis_type=AxisType.Auto):
    return jax.make_mesh(sizes, ("a", "b")[: len(sizes)], axis_types=(axis_type,) * len(sizes))


def on_devices(fn, mesh, axes, is_elementwise, **kwargs):
    """`fn(x, weights, where)` inside shard_map, with the rows split over the mesh axes."""
    split = P(axes)
    return jax.shard_map(
        fn, mesh=mesh, in_specs=(split, split, split), out_specs=split if is_elementwise else P(), **kwargs
    )


@pytest.mark.parametrize("has_weights", [True, False], ids=["weights", "no weights"])
@every_reduction
def test_over_devices_is_that_of_the_whole_with_its_gradients(name, has_weights):
    reduce = REDUCTIONS[name]

    def of_part(x, weights, where):
        return reduce(x, 0, where, weights=weights if has_weights else None, axis_name=("a", "b"))

    fn = on_devices(of_part, mesh_of(2, 4), ("a", "b"), name in NORMS)
    actual = with_gradients(lambda x, w: fn(x, w, WHERE), (0, 1))(X, WEIGHTS)
    expected = with_gradients(lambda x, w: reduce(x, 0, WHERE, weights=w if has_weights else None), (0, 1))(X, WEIGHTS)
    chex.assert_trees_all_close(actual, expected, rtol=2e-5, atol=2e-5)


def test_variance_over_devices_survives_a_large_mean_and_equal_elements():
    fn = on_devices(lambda x, *_: masksafe.var(x, 0, axis_name="a"), mesh_of(8), "a", False)
    x = np.random.default_rng(1).normal(size=(64, 3)).astype(np.float32) + np.float32(1e4)
    x[:, 2] = 3.3
    actual = jax.jit(fn)(x, x, x)
    np.testing.assert_allclose(actual[:2], x.astype(np.float64).var(0)[:2], rtol=1e-5)
    assert actual[2] == 0


@pytest.mark.parametrize("name", EXTREMA)
def test_extremum_over_devices_is_that_of_the_whole_and_ties_share_the_gradient(name):
    reduce, x = EXTREMA[name], np.round(X - 100)  # with ties, on one device and on several
    fn = on_devices(lambda x, _, where: reduce(x, 0, where, axis_name="a"), mesh_of(8), "a", False)
    actual = with_gradients(lambda x, w: fn(x, w, WHERE), (0, 1))(x, WEIGHTS)
    expected = with_gradients(lambda x, _: reduce(x, 0, WHERE), (0, 1))(x, WEIGHTS)
    chex.assert_trees_all_close(actual, expected)
    assert np.all(np.isinf(actual[0]) == [False, False, True])


@pytest.mark.parametrize("how", ["checked", "not checked", "without shard_map"])
def test_without_types_of_variation_and_on_explicit_meshes(how):
    mesh = mesh_of(8, axis_type=AxisType.Explicit)
    of_part = lambda x, w, where: masksafe.var_mean(x, 0, where, weights=w, axis_name="a")  # noqa: E731
    fn = on_devices(of_part, mesh, "a", False, check_vma=how == "checked")
    if how == "without shard_map":
        fn = lambda x, w, where: masksafe.var_mean(x, 0, where, weights=w)  # noqa: E731
    split = functools.partial(jax.device_put, device=jax.NamedSharding(mesh, P("a")))
    with jax.set_mesh(mesh):
        actual = with_gradients(lambda x, w: fn(x, w, split(WHERE)), (0, 1))(split(X), split(WEIGHTS))
    expected = with_gradients(lambda x, w: masksafe.var_mean(x, 0, WHERE, weights=w), (0, 1))(X, WEIGHTS)
    chex.assert_trees_all_close(actual, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", [*EXTREMA, *REDUCTIONS])
def test_over_a_named_axis_of_vmap(name):
    reduce = {**REDUCTIONS, **EXTREMA}[name]
    of_one = lambda x, where: reduce(x, (), where, axis_name="batch")  # noqa: E731
    fn = lambda x: jax.vmap(of_one, axis_name="batch")(x, WHERE)  # noqa: E731
    whole = lambda x: jax.tree.map(lambda y: jnp.broadcast_to(y, x.shape), reduce(x, 0, WHERE))  # noqa: E731
    chex.assert_trees_all_close(*(with_gradients(f)(X) for f in (fn, whole)), rtol=1e-4, atol=2e-5)


def test_forward_mode_over_devices():
    with masksafe.forward_mode():
        of_part = lambda x, w, where: masksafe.var_mean(x, 0, where, weights=w, axis_name="a")  # noqa: E731
        fn = on_devices(of_part, mesh_of(8), "a", False)
        along = lambda f: jax.jit(lambda *args: jax.jvp(f, args, (jnp.cos(X), jnp.ones_like(X))))(X, WEIGHTS)  # noqa: E731
        whole = along(lambda x, w: masksafe.var_mean(x, 0, WHERE, weights=w))
        chex.assert_trees_all_close(along(lambda x, w: fn(x, w, WHERE)), whole, rtol=1e-4, atol=1e-4)


@every_reduction
def test_strict_flags_and_few_exchanges(name):
    reduce = lambda x, w, where: REDUCTIONS[name](x, 0, where, weights=w > 0, axis_name="a")  # noqa: E731
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        fn = on_devices(reduce, mesh_of(8), "a", is_elementwise=name in NORMS)
        text = jax.jit(fn).lower(X, WEIGHTS, WHERE).compile().as_text()
    exchanges = 2 if "var" in name else 1  # means before the deviations from them
    assert text.count(" all-reduce(") + text.count(" all-gather(") == exchanges or name in NORMS


# Gradients by a kernel of which each of two devices has a copy.

TOKENS = np.random.default_rng(2).normal(size=(2, 4, 3)).astype(np.float32)
KERNEL = np.random.default_rng(3).normal(size=(3, 5)).astype(np.float32)


def losses(kernel, tokens, keep):
    logits = masksafe.mask_where(~keep[..., None], tokens, 0) @ kernel
    return masksafe.losses.softmax_cross_entropy_with_integer_labels(logits, jnp.where(keep, 2, -100), where=keep)


def mean_loss(kernel, tokens, keep, axis_name="batch"):
    return masksafe.mean(losses(kernel, tokens, keep), where=keep, axis_name=axis_name)


def averaged(*args):
    value, gradient = jax.value_and_grad(mean_loss)(*args)
    return value, jax.lax.pmean(gradient, "batch")


STEPS = {"mean": jax.value_and_grad(mean_loss), "mean, then pmean": averaged}


def by_shard_map(step, check_vma):
    def of_device(kernel, tokens, keep):
        return jax.tree.map(lambda y: y[None], step(kernel, tokens[0], keep[0]))

    mesh = jax.make_mesh((2,), ("batch",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    specs = {"in_specs": (P(), P("batch"), P("batch")), "out_specs": P("batch")}
    return jax.jit(jax.shard_map(of_device, mesh=mesh, check_vma=check_vma, **specs))


def by_pmap(step, check_vma):
    return jax.pmap(step, axis_name="batch", in_axes=(None, 0, 0), devices=jax.devices()[:2])


@pytest.mark.parametrize(
    ("over_devices", "step", "check_vma"),
    [(by_shard_map, "mean", True), (by_shard_map, "mean, then pmean", False), (by_pmap, "mean, then pmean", False)],
)
def test_a_step_on_two_devices_is_that_of_the_whole_batch(over_devices, step, check_vma):
    on_two = over_devices(STEPS[step], check_vma)
    for keep in (np.array([[1, 1, 1, 0], [0, 1, 0, 0]], bool), np.array([[1, 1, 1, 0], [0, 0, 0, 0]], bool)):
        actual, other = (on_two(KERNEL, np.where(keep[..., None], TOKENS, x), keep) for x in (0, np.nan))
        chex.assert_trees_all_equal(actual, other)
        whole = jax.value_and_grad(mean_loss)(KERNEL, TOKENS.reshape(8, 3), keep.reshape(8), axis_name=None)
        expected = jax.tree.map(lambda y: jnp.stack([y, y]), whole)
        chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-6)


@every_reduction
def test_a_negative_weight_shows(name):
    bad = REDUCTIONS[name](np.ones(4, np.float32), 0, None, weights=np.array([1.0, -1.0, 1.0, 1.0], np.float32))
    assert all(np.isnan(y).any() for y in jax.tree.leaves(bad))


@pytest.mark.parametrize("name", [*REDUCTIONS, *EXTREMA])
def test_of_no_elements(name):
    fn = (REDUCTIONS | EXTREMA)[name]
    over_devices = jax.vmap(lambda x: fn(x, axis=0, where=None, axis_name="i"), axis_name="i")
    for x in X.reshape(4, 4, 3)[:, :, :0], X.reshape(4, 4, 3)[:, :0]:
        result, alone = over_devices(x), fn(x[0], axis=0, where=None)
        for all_alike, expected in zip(*map(jax.tree.leaves, (result, alone)), strict=True):
            np.testing.assert_array_equal(all_alike, np.broadcast_to(expected, all_alike.shape))


def test_weights_where_statistics_are_given():
    x, weights = jnp.array([1.0, 2.0, jnp.nan]), jnp.array([True, True, False])
    y = masksafe.standardize(x, weights=weights, epsilon=jnp.float32(1e-5), mean=1.5)
    np.testing.assert_allclose(y, [-1, 1, 0], rtol=1e-4)
    y, *_ = masksafe.batch_norm(x[:, None], weights=weights[:, None], mean=jnp.array([1.5]), var=jnp.array([0.25]))
    np.testing.assert_allclose(y[:, 0], [-1, 1, 0], rtol=1e-4)


@pytest.mark.parametrize("dtype", ["int32", "float16"])
def test_dtypes_are_those_without_weights(dtype):
    x = (X - 98).astype(jnp.dtype(dtype))
    for name in ("mean", "var_mean"):
        plain, weighted = (REDUCTIONS[name](x, 0, WHERE, **kw) for kw in ({}, {"weights": np.ones(X.shape, x.dtype)}))
        chex.assert_trees_all_equal_shapes_and_dtypes(plain, weighted)
        chex.assert_trees_all_close(*(jax.tree.map(np.float32, y) for y in (plain, weighted)), rtol=1e-2)


OF_WEIGHTS = {name: fn for name, fn in REDUCTIONS.items() if name != "sum"} | {
    "var": masksafe.var,
    "MaskedMean": lambda x, axis, where, weights: masksafe.MaskedMean.of(x, where, weights=weights, axis=axis).value,
    "batch_norm": lambda x, axis, where, weights: masksafe.batch_norm(x, where=where, weights=weights),
    "group_norm": lambda x, axis, where, weights: masksafe.group_norm(x, 1, where=where, weights=weights),
    "linear_softmax_cross_entropy": lambda x, axis, where, weights: masksafe.losses.linear_softmax_cross_entropy(
        x / 100, jnp.eye(3), jnp.arange(16) % 3, where=where[:, 0], weights=weights[:, 0]
    ),
}


@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_gradients_by_weights_times_a_constant(name):
    """With c times the weights, the gradients by them are those by the weights over c, in second derivatives too."""

    @jax.jit
    def gradients(weights):
        first = jax.grad(lambda w: in_one_number(OF_WEIGHTS[name](X, axis=0, where=WHERE, weights=w)))
        return first(weights), jax.jvp(first, (weights,), (jnp.cos(WEIGHTS) * weights,))[1]

    at_1 = gradients(WEIGHTS)
    for scale in (2.0**30, 2.0**-30):
        for a, b in zip(at_1, gradients(WEIGHTS * np.float32(scale)), strict=True):
            assert np.any(a)
            np.testing.assert_allclose(b * scale, a, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: masksafe.mean(X, weights=np.ones(5)), ValueError, "mean: weights: got shape"),
        (lambda: masksafe.mean(X, weights=1j), TypeError, "mean: weights: got dtype complex64"),
        (lambda: masksafe.var(X, axis_name="a"), ValueError, "var: axis_name: got value 'a'"),
        (lambda: masksafe.sum(X, axis_name=()), ValueError, "sum: axis_name"),
        (lambda: masksafe.sum(X, axis_name=5), TypeError, "sum: axis_name: got value 5"),
        (lambda: masksafe.sum(X, axis_name=("a", "a")), ValueError, "sum: axis_name"),
        (lambda: masksafe.max(X * 1j), TypeError, "max: x: got dtype complex64"),
        (lambda: masksafe.var(X * 1j, weights=1), TypeError, "var: x: got dtype complex64"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(call, error, match):
    with pytest.raises(error, match=match):
        call()
