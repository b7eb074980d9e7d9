"""ragged_dot: what its sizes mean, and what JAX's own op leaves open."""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from tiers import parametrize

import masksafe

RNG = np.random.default_rng(0)
ROWS, WIDTH, OUT = 12, 4, 3
SIZES = np.array([3, 0, 4, 2, 0])  # three rows of padding
X, W = (RNG.normal(size=shape).astype(np.float32) for shape in ((ROWS, WIDTH), (len(SIZES), WIDTH, OUT)))
D_OUT = RNG.normal(size=(ROWS, OUT)).astype(np.float32)
GROUPS = np.repeat(np.arange(len(SIZES)), SIZES)
POLLUTED = np.where(np.arange(ROWS)[:, None] < SIZES.sum(), X, np.nan)
WITH_BAD_EMPTY = np.where(SIZES[:, None, None] > 0, W, np.inf)


def gradients(x, w, sizes=SIZES, d_out=D_OUT):
    return jax.jit(jax.grad(lambda x, w: jnp.sum(masksafe.ragged_dot(x, w, sizes) * d_out), (0, 1)))(x, w)


def test_padding_and_empty_groups_show_in_no_product_and_have_gradients_of_0():
    expected = np.einsum("mk,mkn->mn", X[: len(GROUPS)], W[GROUPS])
    out = masksafe.ragged_dot(POLLUTED, WITH_BAD_EMPTY, SIZES)
    np.testing.assert_allclose(out[: len(GROUPS)], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(out[len(GROUPS) :], 0)
    clean, dirty = gradients(X, W), gradients(POLLUTED, WITH_BAD_EMPTY)
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)
    assert not clean[0][len(GROUPS) :].any()
    assert not clean[1][SIZES == 0].any()


def test_what_is_bad_in_a_row_shows_in_the_matrix_of_its_group_unless_a_loss_masks_the_row():
    x = X.copy()
    x[4, 1] = np.nan
    _, d_w = gradients(x, W)
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(d_w).any((1, 2))), [2])
    d_out = np.where(np.arange(ROWS)[:, None] == 4, 0, D_OUT)
    assert all(np.isfinite(d).all() for d in gradients(x, W, d_out=d_out))


def test_what_is_bad_in_a_matrix_shows_in_its_column_of_its_rows():
    w = W.copy()
    w[2, 1, 1] = np.inf
    out = np.asarray(masksafe.ragged_dot(X, w, SIZES))
    np.testing.assert_array_equal(np.argwhere(~np.isfinite(out)), [[3, 1], [4, 1], [5, 1], [6, 1]])
    d_x, d_w = gradients(X, w)
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(d_x).any(1)), [3, 4, 5, 6])
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(d_w).any((1, 2))), [2])


@parametrize(
    ("sizes", "first_bad_row"),
    [([3, 0, 4, 9, 0], 7)],
    exhaustive=[
        ([3, -1, 4, 2, 0], 3),
        ([13, 0, 0, 0, 0], 0),
        ([2**31 - 1] * 5, 0),
        ([3, 9, 0, 0, 0], ROWS),
        ([0] * 5, ROWS),
    ],
)
def test_sizes_that_do_not_fit_are_nan_from_their_group_on(sizes, first_bad_row):
    sizes = np.array(sizes)
    is_bad = np.arange(ROWS) >= first_bad_row
    np.testing.assert_array_equal(np.isnan(masksafe.ragged_dot(X, W, sizes)), np.broadcast_to(is_bad[:, None], (12, 3)))
    d_x, d_w = gradients(X, W, sizes)
    np.testing.assert_array_equal(np.isnan(d_x).all(1), is_bad)
    assert np.isfinite(d_w).all()
    text = "group_sizes are negative, or reach beyond the 12 rows of lhs"
    refused = pytest.raises(ValueError, match=text) if is_bad.any() else contextlib.nullcontext()
    with masksafe.label_checks("raise"), refused:
        masksafe.ragged_dot(X, W, sizes)


def dense(x, w, sizes):
    """Each row times the matrix of its group; 0 in the padding."""
    ends = jnp.cumsum(sizes)
    row = jnp.arange(x.shape[0])[:, None]
    group = jnp.minimum(jnp.sum(row >= ends, 1), len(ends) - 1)
    is_row = row < ends[-1]
    return jnp.where(is_row, jnp.einsum("mk,mkn->mn", jnp.where(is_row, x, 0), w[group]), 0)


def total(op, x, w, sizes):
    return jnp.sum(jnp.sin(op(x, w, sizes)))


def assert_are_those_of_the_definition(results_of, clean, *dirty):
    """The results of one program for garbage as well."""
    program = jax.jit(functools.partial(results_of, masksafe.ragged_dot))
    results, expected = program(*clean), jax.jit(functools.partial(results_of, dense))(*clean)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    jax.tree.map(close, results, expected)
    for args in dirty:
        jax.tree.map(np.testing.assert_array_equal, program(*args), results)


def derivatives(op, x, w, sizes):
    loss, both = functools.partial(total, op), (0, 1)
    first = jax.grad(loss, both)(x, w, sizes), jax.jacrev(op, both)(x, w, sizes)
    second = jax.hessian(loss, both)(x, w, sizes), jax.jacrev(jax.jacrev(loss, both), both)(x, w, sizes)
    with masksafe.forward_mode():
        forward = jax.jacfwd(op, both)(x, w, sizes)
        return first, second, forward, jax.jvp(lambda x, w: op(x, w, sizes), (x, w), (x * 2, w + 1))


def test_derivatives_of_every_kind():
    assert_are_those_of_the_definition(derivatives, (X, W, SIZES), (POLLUTED, WITH_BAD_EMPTY, SIZES))


# Samples: each has three rows of padding.
MANY_SIZES = np.stack([SIZES, [0, 1, 1, 7, 0], [2, 2, 2, 2, 1]])
MANY_X, MANY_W = (RNG.normal(size=(3, *a.shape)).astype(np.float32) for a in (X, W))
MANY_POLLUTED = np.where(np.arange(ROWS)[:, None] < SIZES.sum(), MANY_X, np.nan)
AXES = [axes for axes in itertools.product((0, None), repeat=3) if any(axis == 0 for axis in axes)]


def in_a_vmap(op, x, w, sizes):
    """Of some arguments, with gradients inside and around it; second derivatives of shared sizes."""
    found = []
    for axes in AXES:
        args = [a if axis == 0 else a[0] for a, axis in zip((x, w, sizes), axes, strict=True)]
        of_all = lambda *args: jnp.sum(jnp.sin(jax.vmap(op, axes)(*args)))  # noqa: B023, E731
        gradients = jax.grad(of_all, (0, 1))
        inside = jax.vmap(jax.grad(functools.partial(total, op), (0, 1)), axes)(*args)
        found.append((jax.vmap(op, axes)(*args), inside, gradients(*args)))
        if axes[2] is None:
            found.append(jax.jvp(lambda x, w: gradients(x, w, args[2]), args[:2], args[:2]))  # noqa: B023
    return found


def test_a_vmap_of_some_arguments():
    args = MANY_X, MANY_W, MANY_SIZES
    assert_are_those_of_the_definition(in_a_vmap, args, (MANY_POLLUTED, *args[1:]))


def test_a_vmap_of_a_vmap():
    def results(op, x, w, sizes):
        gradients = jax.grad(functools.partial(total, op), (0, 1))
        of_rows = jax.vmap(jax.vmap(gradients, (0, None, None)), (0, 0, 0))
        of_matrices = jax.vmap(jax.vmap(gradients, (None, 0, None)), (0, None, None))
        of_each = jax.vmap(jax.vmap(gradients), (None, 0, None))
        x_of_each, w_of_each = (jnp.stack([a, a[::-1], a]) for a in (x, w))
        return (
            of_rows(x_of_each, w, sizes),
            of_matrices(x, w, sizes[0]),
            of_each(x, w_of_each, sizes),
        )

    assert_are_those_of_the_definition(results, (MANY_X, MANY_W, MANY_SIZES), (MANY_POLLUTED, MANY_W, MANY_SIZES))


@parametrize("platform", ["tpu"], exhaustive=["cuda"])
def test_a_vmap_stays_one_product_of_an_accelerator(platform):
    def of_rows(x, w, sizes):
        gradients = jax.grad(functools.partial(total, masksafe.ragged_dot), (0, 1))
        return jax.vmap(masksafe.ragged_dot, (0, None, None))(x, w, sizes), gradients(x[0], w, sizes)

    rows = jax.export.symbolic_shape("rows")
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((3, *rows, WIDTH), W.shape)]
    args.append(jax.ShapeDtypeStruct(SIZES.shape, jnp.int32))
    text = jax.export.export(jax.jit(of_rows), platforms=[platform])(*args).mlir_module()
    assert text.count('composite "chlo.ragged_dot"') == 4  # of all samples; of one the value and both gradients


def test_a_vmap_of_nothing():
    assert jax.vmap(masksafe.ragged_dot, (0, None, None))(MANY_X[:0], W, SIZES).shape == (0, ROWS, OUT)
    out = jax.vmap(masksafe.ragged_dot, (0, None, None))(MANY_X[..., :0], W[:, :0], SIZES)
    np.testing.assert_array_equal(out, np.zeros((3, ROWS, OUT)))


@parametrize("place", ["arguments"], exhaustive=["samples"])
def test_whole_arrays_and_samples_on_an_explicit_mesh(place):
    mesh = jax.make_mesh((3,), ("data",), axis_types=(AxisType.Explicit,))
    on_mesh = lambda a, spec: jax.device_put(a, jax.NamedSharding(mesh, spec))  # noqa: E731
    is_whole = place == "arguments"
    args, axes = (X, W, SIZES) if is_whole else (MANY_X, W, MANY_SIZES), (0, None, 0)

    def results(op, *args):
        mapped = op if is_whole else jax.vmap(op, axes)
        value = mapped(*args)
        loss = functools.partial(total, mapped)
        return value, jax.grad(loss, (0, 1))(*args), (jax.hessian if is_whole else jax.grad)(loss)(*args)

    expected = jax.jit(functools.partial(results, dense))(*args)
    with jax.set_mesh(mesh):
        specs = [PartitionSpec(*["data"][: axis == 0 and not is_whole]) for axis in axes]
        found = jax.jit(functools.partial(results, masksafe.ragged_dot))(*map(on_mesh, args, specs))
    if not is_whole:
        assert jax.typeof(found[0]).sharding.spec[0] == "data"
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), found, expected)


def test_no_rows_no_width_and_no_groups():
    assert masksafe.ragged_dot(X[:0], W, 0 * SIZES).shape == (0, OUT)
    for out in (masksafe.ragged_dot(X[:, :0], W[:, :0], SIZES), masksafe.ragged_dot(X, W[:0], SIZES[:0])):
        np.testing.assert_array_equal(out, np.zeros((ROWS, OUT)))


def test_rows_of_an_explicit_mesh_are_refused_and_those_of_shard_map_are_not():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    rows, of_device = PartitionSpec("data"), np.array([[3, 1, 2, 0, 0], [0, 5, 0, 1, 0]])
    with jax.set_mesh(mesh):
        x, sizes = jax.device_put((X, np.concatenate(of_device)), jax.NamedSharding(mesh, rows))
        with pytest.raises(ValueError, match=r"split over a mesh; expected whole arrays. Call it inside jax.shard_map"):
            masksafe.ragged_dot(x, W, SIZES)
        w = jax.device_put(W, jax.NamedSharding(mesh, PartitionSpec()))
        on_devices = jax.shard_map(masksafe.ragged_dot, in_specs=(rows, PartitionSpec(), rows), out_specs=rows)
        d_w = jax.jit(jax.grad(lambda w: jnp.sum(on_devices(x, w, sizes))))(w)
        out = jax.jit(on_devices)(x, w, sizes)
    expected = np.concatenate([masksafe.ragged_dot(x, W, s) for x, s in zip((X[:6], X[6:]), of_device, strict=True)])
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    assert np.isfinite(d_w).all()


@pytest.mark.parametrize(
    ("args", "error", "match"),
    [
        ((X[0], W, SIZES), ValueError, r"ragged_dot: lhs: got shape \(4,\); expected \[M, K\]"),
        ((X, W[0], SIZES), ValueError, r"ragged_dot: rhs: got shape \(4, 3\); expected \[G, K, N\] with K = 4"),
        ((X, W[:, 1:], SIZES), ValueError, "ragged_dot: rhs: got shape"),
        ((X, W, SIZES[1:]), ValueError, r"ragged_dot: group_sizes: got shape \(4,\); expected shape \(5,\)"),
        ((X, W, np.float32(SIZES)), TypeError, "ragged_dot: group_sizes: got dtype float32"),
        ((np.int32(X), W, SIZES), TypeError, "ragged_dot: lhs: got dtype int32"),
    ],
)
def test_bad_arguments_are_refused(args, error, match):
    with pytest.raises(error, match=match):
        masksafe.ragged_dot(*args)
