"""Reductions: axes, dtypes, digits, peers; and with norms: weights, devices. The table has the contract."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import in_one_number, with_gradients
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from tiers import parametrize

import masksafe

# What holds for var_mean holds for var, which is its first result.
OPS = {"sum": masksafe.sum, "mean": masksafe.mean, "var_mean": masksafe.var_mean}
X = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float32)
DEAD = np.random.default_rng(1).random(X.shape) < 0.6  # with slices that have nothing left
DEAD[1] = DEAD[2, 3] = DEAD[:, 2] = False


@functools.cache
def values_and_gradients(axis=None, keepdims=False):
    """Each op, with its gradient."""
    of = lambda op: with_gradients(lambda x, where: op(x, axis, where, keepdims=keepdims))  # noqa: E731
    return jax.jit(lambda x, where=None: {name: of(op)(x, where) for name, op in OPS.items()})


@parametrize(
    ("axis", "where", "keepdims"),
    [((2, 0), DEAD[:, :, :1], True)],
    exhaustive=[(None, DEAD[:, :, :1], False), ((0, 2), DEAD[0], False), (1, None, False)],
    ids=["rows", "rows of all", "columns", "middle"],
)
def test_any_axes_and_masks_that_broadcast_are_as_the_last_axis_and_a_whole_mask(axis, where, keepdims):
    axes = tuple(range(3)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    others = [n for i, n in enumerate(X.shape) if i not in axes]
    by_rows = lambda a: np.moveaxis(a, sorted(axes), range(-len(axes), 0)).reshape(*others, -1)  # noqa: E731
    actual = values_and_gradients(axis, keepdims)(X, where)
    whole = np.broadcast_to(True if where is None else where, X.shape)
    expected = values_and_gradients(-1)(by_rows(X), by_rows(whole))
    for name, (out, gradient) in actual.items():
        of_rows, gradient_of_rows = expected[name]
        for a, e in zip(*map(jax.tree.leaves, (out, of_rows)), strict=True):
            assert a.ndim == (3 if keepdims else len(others))
            np.testing.assert_allclose(a.reshape(e.shape), e, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(by_rows(gradient), gradient_of_rows, rtol=1e-5, atol=1e-6)


PEERS = {"sum": jnp.sum, "mean": jnp.mean, "var": jnp.var}
ON_AXES = ({}, {"axis": (1,), "keepdims": True})


@parametrize("dtype", ["int8"], exhaustive=["complex64", "bool", "bfloat16"])
def test_reductions_without_mask_are_those_of_jax(dtype):
    ops = [(getattr(masksafe, name), theirs) for name, theirs in PEERS.items()]
    both = jax.jit(lambda x: [[op(x, **options) for op in pair] for pair in ops for options in ON_AXES])
    x = (10 * np.random.default_rng(0).normal(size=(5, 7))).astype(jnp.dtype(dtype))
    for ours, theirs in both(x):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        rounding = 4 * float(jnp.finfo(ours.dtype).eps) if jnp.issubdtype(ours.dtype, jnp.inexact) else 0
        np.testing.assert_allclose(np.asarray(ours, complex), np.asarray(theirs, complex), rtol=rounding)


@parametrize(
    ("of_x", "of_weights"),
    [("float16", "float32")],
    exhaustive=[("bfloat16", "float16"), ("float32", "bfloat16"), (int, "float16")],
)
@parametrize("promotion", ["standard"], exhaustive=["strict"])
def test_a_weighted_reduction_has_the_dtype_of_the_product(of_x, of_weights, promotion):
    x, weights = jnp.full(8192, 8, of_x), jnp.full(8192, 1.0625, of_weights)
    product = x * weights
    with jax.numpy_dtype_promotion(promotion):
        total, (var, mean) = masksafe.sum(x, weights=weights), masksafe.var_mean(x, weights=weights)
    assert total.dtype == var.dtype == mean.dtype == product.dtype
    assert (total, var, mean) == (jnp.float32(69632).astype(product.dtype), 0, 8)  # in float16 it is infinite


def test_variance_with_correction_is_0_where_no_freedom_is_left():
    x = np.array([1.0, 2.0, 4.0, np.nan], np.float32)
    where = ~np.isnan(x)
    var = lambda x, correction: masksafe.var(x, where=where, correction=correction)  # noqa: E731
    corrections = (0, 1, 2, 3, 4)
    values, gradients = zip(*jax.jit(lambda x: [jax.value_and_grad(var)(x, c) for c in corrections])(x), strict=True)
    deviations = np.array([-4, -1, 5, 0]) / 3
    np.testing.assert_allclose(values, [14 / 9, 7 / 3, 14 / 3, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(gradients, [2 * deviations / f for f in (3, 2, 1, np.inf, np.inf)], rtol=1e-6)
    assert np.isnan(masksafe.var(np.full(1, np.nan, np.float32), correction=1))


def test_variance_of_many_long_rows_keeps_its_digits():
    # Rows that a CPU computes in one pass, unless the rounding error of the mean matters in some of them.
    def results(x):
        moments, pull_back = jax.vjp(lambda x: masksafe.var_mean(x, 1), x)
        return *moments, pull_back((jnp.ones(256), jnp.zeros(256)))[0]

    fn = jax.jit(results)
    for offset in (0.0, 1.0, 1e4):
        x = np.random.default_rng(0).normal(size=(256, 300)).astype(np.float32) + np.float32(offset)
        x[1], x[2], x[3, 5] = 0, 3.3, np.nan
        value, mean, gradient = fn(x)
        exact = x.astype(np.float64)
        np.testing.assert_allclose(value, exact.var(1), rtol=2e-6)
        np.testing.assert_allclose(mean, exact.mean(1), rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(gradient, 2 / 300 * (exact - exact.mean(1, keepdims=True)), rtol=1e-5, atol=3e-9)


@parametrize(
    ("dtype", "least", "most"), [("uint32", 0, 2**32 - 1)], exhaustive=[("int8", -128, 127), ("bool", False, True)]
)
def test_extrema_of_no_integers(dtype, least, most):
    nothing = np.zeros((0,), dtype)
    assert (int(masksafe.max(nothing)), int(masksafe.min(nothing))) == (least, most)
    assert masksafe.max(nothing).dtype == dtype


def test_equal_elements_share_the_gradient_but_not_with_a_masked_one():
    x, where = np.array([1, 3, 3, 3], np.float32), np.array([True, True, True, False])
    gradients = jax.jit(lambda x: (jax.grad(masksafe.max)(x, where=where), jax.grad(masksafe.min)(-x, where=where)))(x)
    np.testing.assert_array_equal(gradients, [[0, 0.5, 0.5, 0]] * 2)


@parametrize("name", ["max"], exhaustive=["min"])
def test_gradient_of_infinite_and_bad_extrema(name):
    reduce, least = getattr(masksafe, name), -jnp.inf if name == "max" else jnp.inf

    @jax.jit
    def gradients(x, where):
        of_one = lambda x, where: reduce(x, (), where, axis_name="n")  # noqa: E731
        over_samples = lambda x: jax.vmap(of_one, axis_name="n")(x, where)[0]  # noqa: E731
        return jax.grad(lambda x: reduce(x, where=where))(x), jax.grad(over_samples)(x)

    alone = np.array([False, True])
    of_two = [1.0, np.nan], np.ones(2, bool), [np.nan, np.nan]
    cases = ([0.0, least], alone, [0, 1]), ([np.nan, least], alone, [0, 1]), of_two
    for x, where, expected in cases:
        for gradient in gradients(np.array(x, np.float32), where):
            np.testing.assert_array_equal(gradient, expected)


# With weights, and over the devices of a mesh axis.

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(16, 3)).astype(np.float32) + 100
WHERE = np.arange(16)[:, None] < np.array([16, 5, 0])  # uneven: some devices have nothing of a column, or of any
WEIGHTS = RNG.integers(0, 4, size=ROWS.shape).astype(np.float32)
NORMS = ("standardize", "layer_norm", "rms_norm")


def of_name(name):
    """An op of that name, with axes and a mask in the same places."""
    op = getattr(masksafe, name)
    return lambda x, axis=0, where=None, **options: op(x, axis=axis, where=where, **options)


REDUCTIONS = {name: of_name(name) for name in ("var_mean", "sum", "mean", *NORMS)}
REDUCTIONS["var"] = functools.partial(of_name("var"), correction=1)
EXTREMA = {"max": masksafe.max, "min": masksafe.min}
every_reduction = parametrize("name", ["var_mean"], exhaustive=REDUCTIONS)


def mesh_of(*sizes, axis_type=AxisType.Auto):
    return jax.make_mesh(sizes, ("a", "b")[: len(sizes)], axis_types=(axis_type,) * len(sizes))


def of_columns(name, has_weights=True, **axis_name):
    """A function of elements, weights and a mask."""
    reduce = (REDUCTIONS | EXTREMA)[name]
    return lambda x, w, where: reduce(x, 0, where, **({"weights": w} if has_weights else {}), **axis_name)


def on_devices(name, mesh, has_weights=True, **kwargs):
    """The same inside `jax.shard_map`, with the rows split over all axes of the mesh."""
    fn, split = of_columns(name, has_weights, axis_name=mesh.axis_names), P(mesh.axis_names)
    return jax.shard_map(fn, mesh=mesh, in_specs=split, out_specs=split if name in NORMS else P(), **kwargs)


def assert_same_with_gradients(*fns, x=ROWS):
    results = (with_gradients(lambda x, w: fn(x, w, WHERE), (0, 1))(x, WEIGHTS) for fn in fns)  # noqa: B023
    chex.assert_trees_all_close(*results, rtol=2e-5, atol=2e-5)


@parametrize(
    ("name", "has_weights"),
    [("var_mean", True)],
    exhaustive=[("var_mean", False), *((name, i % 2 == 0) for i, name in enumerate(REDUCTIONS) if name != "var_mean")],
)
def test_over_devices_is_that_of_the_whole_with_its_gradients(name, has_weights):
    assert_same_with_gradients(on_devices(name, mesh_of(2, 4), has_weights), of_columns(name, has_weights))


@parametrize("name", ["max"], exhaustive=EXTREMA)
def test_ties_of_extrema_over_devices_share_the_gradient(name):
    """Ties on one device and on several."""
    assert_same_with_gradients(on_devices(name, mesh_of(8), False), of_columns(name, False), x=np.round(ROWS - 100))


def test_variance_over_devices_survives_a_large_mean_and_equal_elements():
    x = np.random.default_rng(1).normal(size=(64, 3)).astype(np.float32) + np.float32(1e4)
    x[:, 2] = 3.3
    var, _ = jax.jit(on_devices("var_mean", mesh_of(8), False))(x, x, np.ones_like(x, bool))
    np.testing.assert_allclose(var[:2], x.astype(np.float64).var(0)[:2], rtol=1e-5)
    assert var[2] == 0


@parametrize("how", ["checked"], exhaustive=["not checked", "without shard_map"])
def test_without_types_of_variation_and_on_explicit_meshes(how):
    mesh, whole = mesh_of(8, axis_type=AxisType.Explicit), of_columns("var_mean")
    fn = whole if how == "without shard_map" else on_devices("var_mean", mesh, check_vma=how == "checked")
    split = functools.partial(jax.device_put, device=jax.NamedSharding(mesh, P("a")))
    with jax.set_mesh(mesh):
        actual = with_gradients(lambda x, w: fn(x, w, split(WHERE)), (0, 1))(split(ROWS), split(WEIGHTS))
    expected = with_gradients(lambda x, w: whole(x, w, WHERE), (0, 1))(ROWS, WEIGHTS)
    chex.assert_trees_all_close(actual, expected, rtol=2e-5, atol=2e-5)


@parametrize("name", ["max"], exhaustive=[*EXTREMA, *REDUCTIONS])
def test_over_a_named_axis_of_vmap(name):
    reduce = {**REDUCTIONS, **EXTREMA}[name]
    of_one = lambda x, where: reduce(x, (), where, axis_name="batch")  # noqa: E731
    fn = lambda x: jax.vmap(of_one, axis_name="batch")(x, WHERE)  # noqa: E731
    whole = lambda x: jax.tree.map(lambda y: jnp.broadcast_to(y, x.shape), reduce(x, 0, WHERE))  # noqa: E731
    chex.assert_trees_all_close(*(with_gradients(f)(ROWS) for f in (fn, whole)), rtol=1e-4, atol=2e-5)


def test_forward_mode_over_devices():
    tangents = jnp.cos(ROWS), jnp.ones_like(ROWS)
    with masksafe.forward_mode():
        fns = on_devices("var_mean", mesh_of(8)), of_columns("var_mean")
        along = (jax.jit(lambda *args: jax.jvp(lambda *a: fn(*a, WHERE), args, tangents)) for fn in fns)  # noqa: B023
        chex.assert_trees_all_close(*(f(ROWS, WEIGHTS) for f in along), rtol=1e-4, atol=1e-4)


@every_reduction
def test_strict_flags_and_few_exchanges(name):
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        text = jax.jit(on_devices(name, mesh_of(8))).lower(ROWS, WEIGHTS > 0, WHERE).compile().as_text()
    exchanges = 2 if "var" in name else 1  # means before the deviations from them
    assert text.count(" all-reduce(") + text.count(" all-gather(") == exchanges or name in NORMS


# Gradients by a kernel of which each of two devices has a copy.

TOKENS = np.random.default_rng(2).normal(size=(2, 4, 3)).astype(np.float32)
KERNEL = np.random.default_rng(3).normal(size=(3, 5)).astype(np.float32)


def mean_loss(kernel, tokens, keep, axis_name="batch"):
    logits = masksafe.mask_where(~keep[..., None], tokens, 0) @ kernel
    loss = functools.partial(masksafe.losses.softmax_cross_entropy_with_integer_labels, where=keep)
    return masksafe.mean(loss(logits, jnp.where(keep, 2, -100)), where=keep, axis_name=axis_name)


step_of_mean = jax.value_and_grad(mean_loss)


def averaged(*args):
    value, gradient = step_of_mean(*args)
    return value, jax.lax.pmean(gradient, "batch")


def by_shard_map(step, check_vma):
    def of_device(kernel, tokens, keep):
        return jax.tree.map(lambda y: y[None], step(kernel, tokens[0], keep[0]))

    mesh = jax.make_mesh((2,), ("batch",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    specs = {"in_specs": (P(), P("batch"), P("batch")), "out_specs": P("batch")}
    return jax.jit(jax.shard_map(of_device, mesh=mesh, check_vma=check_vma, **specs))


def by_pmap(step, check_vma):
    return jax.pmap(step, axis_name="batch", in_axes=(None, 0, 0), devices=jax.devices()[:2])


@parametrize(
    ("over_devices", "step", "check_vma"),
    [(by_shard_map, step_of_mean, True)],
    exhaustive=[(by_shard_map, averaged, False), (by_pmap, averaged, False)],
)
def test_a_step_on_two_devices_is_that_of_the_whole_batch(over_devices, step, check_vma):
    on_two = over_devices(step, check_vma)
    for keep in (np.array([[1, 1, 1, 0], [0, 1, 0, 0]], bool), np.array([[1, 1, 1, 0], [0, 0, 0, 0]], bool)):
        actual, other = (on_two(KERNEL, np.where(keep[..., None], TOKENS, x), keep) for x in (0, np.nan))
        chex.assert_trees_all_equal(actual, other)
        whole = step_of_mean(KERNEL, TOKENS.reshape(8, 3), keep.reshape(8), axis_name=None)
        expected = jax.tree.map(lambda y: jnp.stack([y, y]), whole)
        chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-6)


@every_reduction
def test_a_negative_weight_shows(name):
    bad = REDUCTIONS[name](np.ones(4, np.float32), 0, None, weights=np.array([1.0, -1.0, 1.0, 1.0], np.float32))
    assert all(np.isnan(y).any() for y in jax.tree.leaves(bad))


@parametrize("name", ["var_mean"], exhaustive=[*REDUCTIONS, *EXTREMA])
def test_of_no_elements(name):
    fn = (REDUCTIONS | EXTREMA)[name]
    over_devices = jax.vmap(lambda x: fn(x, axis=0, where=None, axis_name="i"), axis_name="i")
    for x in ROWS.reshape(4, 4, 3)[:, :, :0], ROWS.reshape(4, 4, 3)[:, :0]:
        result, alone = over_devices(x), fn(x[0], axis=0, where=None)
        for all_alike, expected in zip(*map(jax.tree.leaves, (result, alone)), strict=True):
            np.testing.assert_array_equal(all_alike, np.broadcast_to(expected, all_alike.shape))


def test_weights_where_statistics_are_given():
    x, weights = jnp.array([1.0, 2.0, jnp.nan]), jnp.array([True, True, False])
    y = masksafe.standardize(x, weights=weights, epsilon=jnp.float32(1e-5), mean=1.5)
    np.testing.assert_allclose(y, [-1, 1, 0], rtol=1e-4)
    y, *_ = masksafe.batch_norm(x[:, None], weights=weights[:, None], mean=jnp.array([1.5]), var=jnp.array([0.25]))
    np.testing.assert_allclose(y[:, 0], [-1, 1, 0], rtol=1e-4)


@parametrize("dtype", ["int32"], exhaustive=["float16"])
def test_dtypes_are_those_without_weights(dtype):
    x = (ROWS - 98).astype(jnp.dtype(dtype))
    for name in ("mean", "var_mean"):
        plain, weighted = (of_columns(name, has_weights)(x, np.ones_like(x), WHERE) for has_weights in (False, True))
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


@parametrize("name", ["var_mean"], exhaustive=OF_WEIGHTS)
def test_gradients_by_weights_times_a_constant(name):
    """With c times the weights, the gradients by them are those by the weights over c, in second derivatives too."""

    @jax.jit
    def gradients(weights):
        first = jax.grad(lambda w: in_one_number(OF_WEIGHTS[name](ROWS, axis=0, where=WHERE, weights=w)))
        return first(weights), jax.jvp(first, (weights,), (jnp.cos(WEIGHTS) * weights,))[1]

    at_1 = gradients(WEIGHTS)
    for scale in (2.0**30, 2.0**-30):
        for a, b in zip(at_1, gradients(WEIGHTS * np.float32(scale)), strict=True):
            assert np.any(a)
            np.testing.assert_allclose(b * scale, a, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: masksafe.mean(ROWS, weights=np.ones(5)), ValueError, "mean: weights: got shape"),
        (lambda: masksafe.mean(ROWS, weights=1j), TypeError, "mean: weights: got dtype complex64"),
        (lambda: masksafe.var(ROWS, axis_name="a"), ValueError, "var: axis_name: got value 'a'"),
        (lambda: masksafe.sum(ROWS, axis_name=()), ValueError, "sum: axis_name"),
        (lambda: masksafe.sum(ROWS, axis_name=5), TypeError, "sum: axis_name: got value 5"),
        (lambda: masksafe.sum(ROWS, axis_name=("a", "a")), ValueError, "sum: axis_name"),
        (lambda: masksafe.max(ROWS * 1j), TypeError, "max: x: got dtype complex64"),
        (lambda: masksafe.var(ROWS * 1j, weights=1), TypeError, "var: x: got dtype complex64"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(call, error, match):
    with pytest.raises(error, match=match):
        call()
