"""layer_norm, rms_norm, standardize under JAX's transforms, on sharded arrays, and as compiled programs."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from test_normalization import (
    DEAD,
    OPS,
    OTHER_OPS_SLOWLY,
    SHAPE,
    WHERE,
    X,
    apply,
    assert_close,
    parameters,
    reference,
    slow,
    small_blocks,  # noqa: F401
    used,
    value_and_gradients,
    weights_of,
)

import masksafe
from masksafe.testing import CONSISTENCY_MODES, assert_consistent

# One answer.

COMPILED = [m for m in CONSISTENCY_MODES if m not in ("op by op", "eager", "devices")]


@OTHER_OPS_SLOWLY
def test_one_answer(op):
    scale, bias = used(op, *parameters(SHAPE, -1))
    fn = lambda x, scale, bias, where: apply(op, x, scale, bias, -1, where)  # noqa: E731
    assert_consistent(fn, X + 100, scale, bias, WHERE, modes=("jit", "vmap", "scan"))


@pytest.mark.slow
@pytest.mark.parametrize(("axis", "dtype"), [(-1, "float32"), ((2, 1), "bfloat16")], ids=str)
def test_one_answer_in_every_mode(axis, dtype):
    fn = lambda x, scale, bias, where: masksafe.layer_norm(x, scale, bias, axis=axis, where=where)  # noqa: E731
    assert_consistent(fn, (X + 100).astype(jnp.dtype(dtype)), *parameters(SHAPE, axis), WHERE)


@pytest.mark.parametrize("modes", [("jit", "vmap"), slow(COMPILED)], ids=len)
@pytest.mark.usefixtures("small_blocks")
def test_one_answer_in_blocks(modes):
    fn = lambda x, scale, bias, where: masksafe.layer_norm(x, scale, bias, where=where)  # noqa: E731
    assert_consistent(fn, X, *parameters(SHAPE, -1), WHERE, modes=modes)


@OTHER_OPS_SLOWLY
def test_no_false_alarm_of_debug_nans(op):
    scale, bias = used(op, *parameters(SHAPE, -1))
    with jax.debug_nans(True):
        y, pull_back = jax.vjp(lambda x: apply(op, x, scale, bias, -1, DEAD), np.where(DEAD, X, np.nan))
        (gradient,) = pull_back(y)
    np.testing.assert_array_equal(np.asarray(gradient)[~DEAD], 0)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=str)
@pytest.mark.parametrize("axis", [-1, 0, slow(1)], ids=str)
@pytest.mark.usefixtures("small_blocks")
def test_sharded_arrays(kind, axis):
    rng = np.random.default_rng(0)
    x, where = rng.normal(size=(16, 2, 6)).astype(np.float32), rng.random((16, 2, 1)) < 0.7
    scale, bias = parameters(x.shape, axis)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        batch, whole = (NamedSharding(mesh, PartitionSpec(*names)) for names in (["data"], []))
        args = jax.device_put((x, scale, bias, where), (batch, whole, whole, batch))
        actual = value_and_gradients("layer_norm", axis)(*args)
    assert_close(actual, reference("layer_norm", x, scale, bias, axis, where), rtol=1e-4, atol=1e-5)


def normed_and_variance(x, scale, where):
    norm = jnp.sum(masksafe.rms_norm(x, scale, where=where) * np.cos(np.arange(4, dtype=np.float32)))
    return norm + jnp.sum(masksafe.var(x, -1, where))


@functools.cache
def inputs_and_results():
    """The arguments of that, and its value and gradients on one device."""
    rng = np.random.default_rng(0)
    x, where = rng.normal(size=(8, 6, 4)).astype(np.float32), rng.random((8, 6, 4)) < 0.7
    args = x, parameters(x.shape, -1)[0], where
    return args, jax.device_get(jax.jit(jax.value_and_grad(normed_and_variance, (0, 1)))(*args))


@pytest.mark.parametrize("blocks", [2, slow(2**18)])
@pytest.mark.parametrize(
    ("of_x", "of_scale", "of_where"),
    [
        ("d", "m", None),
        ((None, None, "m"), None, None),
        ("d", None, (None, "m")),
        slow(None, "m", None),
        slow(None, None, "d"),
    ],
    ids=str,
)
def test_arguments_that_are_split_differently_over_an_explicit_mesh(of_x, of_scale, of_where, blocks, choose):
    args, expected = inputs_and_results()
    choose(row_block_elements=blocks)
    mesh = jax.make_mesh((2, 2), ("d", "m"), axis_types=(AxisType.Explicit,) * 2)

    def split(array, names):
        spec = PartitionSpec(*(names if isinstance(names, tuple) else (names,)))
        return jax.device_put(array, NamedSharding(mesh, spec))

    with jax.set_mesh(mesh):
        sharded = map(split, args, (of_x, of_scale, of_where))
        actual = jax.jit(jax.value_and_grad(normed_and_variance, (0, 1)))(*sharded)
    chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("small_blocks")
def test_inside_shard_map():
    rng = np.random.default_rng(0)
    x, where = rng.normal(size=(64, 6)).astype(np.float32), rng.random((64, 1)) < 0.7
    args = x, *parameters(x.shape, -1), where
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    split, whole = PartitionSpec("data"), PartitionSpec()
    layer_norm = lambda x, scale, bias, where: masksafe.layer_norm(x, scale, bias, where=where)  # noqa: E731
    mapped = jax.shard_map(layer_norm, mesh=mesh, in_specs=(split, whole, whole, split), out_specs=split)

    @jax.jit
    def value_and_gradients(*args):
        y, pull_back = jax.vjp(lambda *moving: mapped(*moving, args[-1]), *args[:-1])
        return y, pull_back(weights_of(y.shape))

    expected = reference("layer_norm", *args[:-1], -1, where)
    assert_close(value_and_gradients(*args), expected, rtol=1e-4, atol=1e-5)


def convolution_swap_norm_dense(x, parameters):
    """A layer norm over an axis that is not the last one, then swapped: where a fused back end once went astray."""
    x = jax.lax.conv_general_dilated(x, parameters["kernel"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
    x = masksafe.layer_norm(x, parameters["scale"], parameters["bias"], axis=1)
    x = jnp.swapaxes(x, 1, 2).reshape(x.shape[0], -1, 4)
    x = masksafe.layer_norm(x, axis=(1, 2))
    return x.reshape(x.shape[0], -1) @ parameters["dense"]


@pytest.mark.parametrize("modes", [("jit", "transposed"), slow(("jit", "strided", "disk"))], ids=len)
def test_norm_between_convolution_and_dense_gives_one_answer(modes):
    rng = np.random.default_rng(0)
    shapes = {"kernel": (3, 2, 6), "scale": (8,), "bias": (8,), "dense": (48, 3)}
    parameters = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    x = rng.normal(size=(8, 8, 2)).astype(np.float32)
    assert_consistent(convolution_swap_norm_dense, x, parameters, modes=modes)


# In a program.


@pytest.mark.parametrize("masked", [False, True])
def test_nothing_but_the_input_is_kept_for_the_reverse_pass(masked):
    x, row = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32), np.ones(32, np.float32)
    where = np.ones((64, 1), bool) if masked else None

    @jax.jit
    def residuals(x):
        norm = lambda x, scale, bias: masksafe.layer_norm(x, scale, bias, where=where)  # noqa: E731
        return jax.vjp(norm, x, row, row)[1], jax.vjp(lambda x: masksafe.var(x, -1, where), x)[1]

    for pull_back in residuals(x):
        (kept,) = [leaf for leaf in jax.tree.leaves(pull_back) if leaf.size >= x.size]
        np.testing.assert_array_equal(kept, x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(8192, 1024), slow((65536, 64)), slow((64, 1024, 128))], ids=str)
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


def test_no_false_alarm_of_checkify():
    x = np.array([[np.nan, np.inf, 1.0], [1.0, 2.0, 4.0]], np.float32)
    loss = lambda x: masksafe.layer_norm(x, where=np.array([[False], [True]])).sum()  # noqa: E731
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
