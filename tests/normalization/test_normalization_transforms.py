"""layer_norm, rms_norm, standardize under JAX's transforms, on sharded arrays, and as compiled programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from test_normalization import OPS, OTHER_OPS_SLOWLY, SHAPE, WHERE, X, apply, parameters, small_blocks, used  # noqa: F401

import masksafe
from masksafe._core import platforms
from masksafe.testing import CONSISTENCY_MODES, assert_consistent

# One answer.


@OTHER_OPS_SLOWLY
@pytest.mark.parametrize("axis", [-1, (2, 1)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_one_answer(op, axis, dtype):
    scale, bias = used(op, *parameters(SHAPE, axis))
    fn = lambda x, scale, bias, where: apply(op, x, scale, bias, axis, where)  # noqa: E731
    assert_consistent(fn, jnp.asarray(X + 100, dtype), scale, bias, WHERE)


@pytest.mark.usefixtures("small_blocks")
def test_one_answer_in_blocks():
    fn = lambda x, scale, bias, where: masksafe.layer_norm(x, scale, bias, where=where)  # noqa: E731
    modes = [m for m in CONSISTENCY_MODES if m != "devices"]
    assert_consistent(fn, X, *parameters(SHAPE, -1), WHERE, modes=modes)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=str)
@pytest.mark.parametrize("axis", [-1, 1, 0], ids=str)
@pytest.mark.usefixtures("small_blocks")
def test_sharded_arrays(kind, axis):
    rng = np.random.default_rng(0)
    x, where = rng.normal(size=(16, 4, 6)).astype(np.float32), rng.random((16, 4, 1)) < 0.7
    scale, bias = parameters(x.shape, axis)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))

    def loss(x, scale, bias, where):
        y = masksafe.layer_norm(x, scale, bias, axis=axis, where=where)
        return jnp.sum(y * jnp.cos(jnp.arange(6.0))), y

    step = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
    expected = step(x, scale, bias, where)
    with jax.set_mesh(mesh):
        batch = NamedSharding(mesh, PartitionSpec("data"))
        whole = NamedSharding(mesh, PartitionSpec())
        actual = step(*(jax.device_put(a, s) for a, s in ((x, batch), (scale, whole), (bias, whole), (where, batch))))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), actual, expected)


@pytest.mark.parametrize("blocks", [2, 2**18])
@pytest.mark.parametrize(
    ("of_x", "of_scale", "of_where"),
    [("d", "m", None), (None, "m", None), (None, None, "d"), ((None, None, "m"), None, None), ("d", None, (None, "m"))],
    ids=str,
)
def test_arguments_that_are_split_differently_over_an_explicit_mesh(of_x, of_scale, of_where, blocks, monkeypatch):
    monkeypatch.setattr(platforms, "ROW_BLOCK_ELEMENTS", blocks)
    jax.clear_caches()
    mesh = jax.make_mesh((2, 2), ("d", "m"), axis_types=(AxisType.Explicit,) * 2)
    rng = np.random.default_rng(0)
    x, where = rng.normal(size=(8, 6, 4)).astype(np.float32), rng.random((8, 6, 4)) < 0.7

    def losses(x, scale, where):
        norm = jnp.sum(masksafe.rms_norm(x, scale, where=where) * jnp.cos(jnp.arange(4.0)))
        return norm + jnp.sum(masksafe.var(x, -1, where))

    def split(array, names):
        spec = PartitionSpec(*(names if isinstance(names, tuple) else (names,)))
        return jax.device_put(array, NamedSharding(mesh, spec))

    args = (x, parameters(x.shape, -1)[0], where)
    expected = jax.value_and_grad(losses, (0, 1))(*args)
    with jax.set_mesh(mesh):
        actual = jax.jit(jax.value_and_grad(losses, (0, 1)))(*map(split, args, (of_x, of_scale, of_where)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), actual, expected)


@pytest.mark.usefixtures("small_blocks")
def test_inside_shard_map():
    rng = np.random.default_rng(0)
    x, where = rng.normal(size=(64, 6)).astype(np.float32), rng.random((64, 1)) < 0.7
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    split, whole = PartitionSpec("data"), PartitionSpec()

    def loss(x, scale, bias, where):
        return jnp.sum(masksafe.layer_norm(x, scale, bias, where=where) * jnp.cos(jnp.arange(6.0)), keepdims=True)

    mapped = jax.shard_map(loss, mesh=mesh, in_specs=(split, whole, whole, split), out_specs=split)
    args = (x, *parameters(x.shape, -1), where)
    actual = jax.jit(jax.grad(lambda *a: mapped(*a).sum(), (0, 1, 2)))(*args)
    expected = jax.grad(lambda *a: loss(*a).sum(), (0, 1, 2))(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), actual, expected)


def convolution_swap_norm_dense(x, parameters):
    """A layer norm over an axis that is not the last one, then swapped: where a fused back end once went astray."""
    x = jax.lax.conv_general_dilated(x, parameters["kernel"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
    x = masksafe.layer_norm(x, parameters["scale"], parameters["bias"], axis=1)
    x = jnp.swapaxes(x, 1, 2).reshape(x.shape[0], -1, 4)
    x = masksafe.layer_norm(x, axis=(1, 2))
    return x.reshape(x.shape[0], -1) @ parameters["dense"]


def test_norm_between_convolution_and_dense_gives_one_answer_also_from_disk(tmp_path):
    rng = np.random.default_rng(0)
    shapes = {"kernel": (3, 2, 6), "scale": (8,), "bias": (8,), "dense": (48, 3)}
    parameters = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    x = rng.normal(size=(8, 8, 2)).astype(np.float32)
    modes = [m for m in CONSISTENCY_MODES if m != "devices"]
    assert_consistent(convolution_swap_norm_dense, x, parameters, modes=modes)

    np.savez(tmp_path / "parameters.npz", **parameters)
    with np.load(tmp_path / "parameters.npz") as loaded:
        again = jax.jit(convolution_swap_norm_dense)(x, dict(loaded))
    np.testing.assert_array_equal(again, jax.jit(convolution_swap_norm_dense)(x, parameters))


# In a program.


@pytest.mark.parametrize("masked", [False, True])
def test_nothing_but_the_input_is_kept_for_the_reverse_pass(masked):
    x, scale, bias = jnp.ones((64, 32)), jnp.ones(32), jnp.ones(32)
    where = jnp.ones((64, 1), bool) if masked else None
    _, pull_back = jax.vjp(lambda x, s, b: masksafe.layer_norm(x, s, b, where=where), x, scale, bias)
    kept = [leaf for leaf in jax.tree.leaves(pull_back) if leaf.size >= x.size]
    assert len(kept) == 1
    np.testing.assert_array_equal(kept[0], x)
    _, pull_back = jax.vjp(lambda x: masksafe.var(x, -1, where), x)
    assert sum(leaf.size >= x.size for leaf in jax.tree.leaves(pull_back)) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(8192, 1024), (65536, 64), (64, 1024, 128)], ids=str)
def test_temporaries_are_small(dtype, shape):
    x, scale = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[1:2], jnp.float32)
    where = jax.ShapeDtypeStruct((*shape[:1], *(1 for _ in shape[1:])), jnp.bool_)

    def gradients(x, d_y, scale, where):
        fn = lambda x, scale, bias: masksafe.layer_norm(x, scale, bias, axis=1, where=where)  # noqa: E731
        return jax.vjp(fn, x, scale, scale)[1](d_y)

    compiled = jax.jit(gradients).lower(x, x, scale, where).compile()
    # XLA's CPU compiler can only slice bfloat16 as integers, which it copies: x and its cotangent.
    copies = 2 * x.size * x.dtype.itemsize if dtype == "bfloat16" else 0
    assert compiled.memory_analysis().temp_size_in_bytes < copies + 8 * 2**20


def test_no_false_alarm_of_debug_nans():
    x = jnp.array([[jnp.nan, jnp.inf, 1.0], [1.0, 2.0, 4.0]])
    where = jnp.array([[False], [True]])
    with jax.debug_nans(True):
        y, pull_back = jax.vjp(lambda x: masksafe.layer_norm(x, where=where), x)
        pull_back(y)
        masksafe.rms_norm(x, where=where, epsilon=0)
        masksafe.var_mean(x, -1, where)


def test_no_false_alarm_of_checkify():
    x = jnp.array([[jnp.nan, jnp.inf, 1.0], [1.0, 2.0, 4.0]])
    loss = lambda x: masksafe.layer_norm(x, where=jnp.array([[False], [True]])).sum()  # noqa: E731
    checked = checkify.checkify(jax.jit(jax.value_and_grad(loss)), checkify.all_checks)
    error, _ = checked(x)
    error.throw()


@OPS
def test_lowers_for_cuda(op):
    x = jax.ShapeDtypeStruct((8192, 1024), jnp.bfloat16)
    scale, bias = used(op, *parameters((1024,), 0))
    fn = lambda x: apply(op, x, scale, bias, -1).astype(jnp.float32).sum()  # noqa: E731
    exported = jax.export.export(jax.jit(jax.value_and_grad(fn)), platforms=["cuda"])(x)
    assert "stablehlo.while" not in exported.mlir_module()


def test_symbolic_batch_size():
    (batch,) = jax.export.symbolic_shape("b")
    fn = jax.jit(jax.vmap(lambda x: jax.grad(lambda x: masksafe.layer_norm(x).sum())(x)))
    exported = jax.export.export(fn)(jax.ShapeDtypeStruct((batch, 7), jnp.float32))
    assert exported.call(jnp.ones((3, 7))).shape == (3, 7)
