"""Norms and var as compiled programs: split arguments, memory, rows along several axes."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from test_normalization import parameters
from tiers import parametrize

import masksafe


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


@parametrize("blocks", [2], exhaustive=[2**18])
@parametrize(
    ("of_x", "of_scale", "of_where"),
    [("d", None, (None, "m"))],
    exhaustive=[("d", "m", None), ((None, None, "m"), None, "d")],
    ids=str,
)
def test_arguments_that_are_split_differently_over_an_explicit_mesh(of_x, of_scale, of_where, blocks, choose):
    args, expected = inputs_and_results()
    choose(row_block_elements=blocks, most_elements_in_one_pass=2 * blocks)
    mesh = jax.make_mesh((2, 2), ("d", "m"), axis_types=(AxisType.Explicit,) * 2)

    def split(array, names):
        spec = PartitionSpec(*(names if isinstance(names, tuple) else (names,)))
        return jax.device_put(array, NamedSharding(mesh, spec))

    with jax.set_mesh(mesh):
        sharded = map(split, args, (of_x, of_scale, of_where))
        actual = jax.jit(jax.value_and_grad(normed_and_variance, (0, 1)))(*sharded)
    chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-5)


# Memory.


@parametrize("masked", [True], exhaustive=[False])
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


@parametrize(
    ("shape", "dtype"),
    [((8192, 1024), "float32")],
    exhaustive=[((65536, 64), "bfloat16"), ((64, 1024, 128), "float32")],
    ids=str,
)
def test_temporaries_are_small(shape, dtype):
    x, scale = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[1:2], jnp.float32)
    where = jax.ShapeDtypeStruct((*shape[:1], *(1 for _ in shape[1:])), jnp.bool_)

    def gradients(x, d_y, scale, where):
        fn = lambda x, scale, bias: masksafe.layer_norm(x, scale, bias, axis=1, where=where)  # noqa: E731
        return jax.vjp(fn, x, scale, scale)[1](d_y)

    compiled = jax.jit(gradients).lower(x, x, scale, where).compile()
    # XLA's CPU compiler can only slice bfloat16 as integers, which it copies: x and its cotangent.
    copies = 2 * x.size * x.dtype.itemsize if dtype == "bfloat16" else 0
    assert compiled.memory_analysis().temp_size_in_bytes < copies + 8 * 2**20


@parametrize("op", [masksafe.layer_norm], exhaustive=[masksafe.l2_normalize])
def test_a_number_of_rows_that_no_block_divides_costs_no_copy(op):
    x, where = (jax.ShapeDtypeStruct((4099, 1000), dtype) for dtype in ("float32", bool))  # a prime number
    compiled = jax.jit(lambda x, where: op(x, where=where)).lower(x, where).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < x.size * 4 / 2


# Rows along several neighbouring axes: of one axis where XLA has no library for CPUs.

SHAPE = 3, 4, 5, 6
RNG = np.random.default_rng(0)
X = RNG.normal(size=SHAPE).astype(np.float32)
OPS = {
    "layer norm": (functools.partial(masksafe.layer_norm, axis=(1, 2, 3), epsilon=1e-5), (1, 2, 3)),
    "standardize, axes in another order": (functools.partial(masksafe.standardize, axis=(2, 0, 1)), (0, 1, 2)),
    "standardize, axes apart": (functools.partial(masksafe.standardize, axis=(0, 2)), (0, 2)),
    "batch norm": (lambda x, where: masksafe.batch_norm(x, where=where)[0], (0, 1, 2)),
    "batch norm of channels on axis 0": (lambda x, where: masksafe.batch_norm(x, where=where, axis=0)[0], (1, 2, 3)),
    "instance norm": (functools.partial(masksafe.group_norm, num_groups=6, epsilon=1e-5), (1, 2)),
    "instance norm of channels on axis 1": (
        functools.partial(masksafe.group_norm, num_groups=4, axis=1, epsilon=1e-5),
        (2, 3),
    ),
}
MASKS = [SHAPE, (1, 4, 1, 1), (3, 1, 5, 1), (3, 1, 1, 6), (3, 1, 1, 1), None]


@parametrize("has_library", [False], exhaustive=[True])
@parametrize("name", ["layer norm"], exhaustive=OPS)
def test_masks_that_repeat_along_some_of_the_axes(name, has_library, choose):
    choose(has_fusion_library=has_library)
    op, axes = OPS[name]
    wheres = [None if shape is None else RNG.random(shape) < 0.7 for shape in MASKS]
    actual = jax.jit(lambda x: [op(x, where=where) for where in wheres])(X)
    for y, where in zip(actual, wheres, strict=True):
        left = np.ma.array(X.astype(np.float64), mask=~np.broadcast_to(True if where is None else where, SHAPE))
        deviations = left - left.mean(axes, keepdims=True)
        expected = deviations / np.sqrt((deviations**2).mean(axes, keepdims=True) + 1e-5)
        np.testing.assert_allclose(y, expected.filled(0), rtol=1e-5, atol=1e-5)


def test_no_sum_goes_along_several_axes(choose):
    """On a CPU it would take several times as long with some versions of XLA."""
    choose(has_fusion_library=False)
    step = jax.value_and_grad(lambda x, where: (masksafe.batch_norm(x, where=where)[0] ** 2 * X).sum())
    text = jax.jit(step).lower(X, X > 0).as_text()
    assert "across dimensions = [0]" in text
    assert "across dimensions = [0, 1, 2]" not in text
