"""Ops on rows that the explicit axes of a mesh split: in blocks on each device, with one device's answer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import assert_close
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tiers import parametrize

import masksafe
from masksafe import losses

SHAPE = 4, 8, 6
RNG = np.random.default_rng(0)
X, T = (RNG.normal(size=SHAPE).astype(np.float32) for _ in range(2))
LABELS, MASK = RNG.integers(0, 6, SHAPE[:2]), RNG.random(SHAPE) < 0.7
MASK[0] = False  # nothing is left on some devices
MASK[1:] |= np.arange(6) == LABELS[1:, :, None]
SCALE, BIAS = (RNG.normal(size=6).astype(np.float32) for _ in range(2))
ROWS, OTHERS = (X, LABELS, MASK), (X, T, MASK)
HIDING = ("integer", "variance")  # whose masked elements hold garbage

OPS = {
    "integer": (lambda x, y, m: losses.softmax_cross_entropy_with_integer_labels(x, y, where=m), ROWS),
    "softmax": (lambda x, y, m: masksafe.softmax(x, where=m), ROWS),
    "scale of a norm": (lambda s, x, m: masksafe.layer_norm(x, s, BIAS, where=m), (SCALE, X, MASK)),
    "variance": (lambda x, t, m: masksafe.var(x, axis=-1, where=m), OTHERS),
    "cosine": (lambda x, t, m: losses.cosine_similarity(x, t, where=m), OTHERS),
}


@pytest.fixture
def small_blocks(choose):
    choose(row_block_elements=6, most_elements_in_one_pass=12)


def put(args, spec):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    specs = [spec[: min(np.ndim(a), len(spec))] if np.ndim(a) > 1 else P() for a in args]
    return mesh, [jax.device_put(a, NamedSharding(mesh, P(*s))) for a, s in zip(args, specs, strict=True)]


def total(fn):
    return lambda *args: jnp.sum(jnp.sin(fn(*args)))


@parametrize(
    ("name", "spec"),
    [("integer", ("x",))],
    exhaustive=[
        ("integer", ("x", "y")),
        ("softmax", (None, ("x", "y"))),
        ("scale of a norm", ("x",)),
        ("variance", ("x", "y")),
        ("variance", ("x",)),
        ("cosine", (None, ("x", "y"))),
    ],
    ids=str,
)
def test_value_and_gradient_are_those_of_one_device_whatever_is_masked(name, spec, small_blocks):
    fn, args = OPS[name]
    step = jax.jit(jax.value_and_grad(total(fn)))

    def on_devices(args):
        mesh, sharded = put(args, spec)
        with jax.set_mesh(mesh):
            if spec == ("x",) and name != "softmax":
                assert "while" in step.lower(*sharded).as_text()
            return step(*sharded)

    results = on_devices(args)
    assert_close(results, step(*args))
    for garbage in (np.nan, np.inf, 1e38) if name in HIDING else ():
        dirty = on_devices([np.where(MASK, X, np.float32(garbage)), *args[1:]])
        jax.tree.map(np.testing.assert_array_equal, dirty, results)


@pytest.mark.exhaustive
def test_no_more_memory_than_in_a_shard_map():
    spec = P("d")
    mesh = jax.make_mesh((4,), ("d",))
    fn = lambda x, y, m: losses.softmax_cross_entropy_with_integer_labels(x, y, where=m)  # noqa: E731
    shapes = ((2048, 4096), jnp.float32), ((2048,), jnp.int32), ((2048, 4096), jnp.bool_)
    with jax.set_mesh(mesh):
        args = [jax.ShapeDtypeStruct(*shape, sharding=NamedSharding(mesh, spec)) for shape in shapes]
        by_hand = jax.shard_map(fn, in_specs=(spec,) * 3, out_specs=spec)
        programs = [jax.jit(jax.grad(total(f))).lower(*args).compile() for f in (fn, by_hand)]
    ours, theirs = (program.memory_analysis().temp_size_in_bytes for program in programs)
    assert ours <= 1.1 * theirs
    assert ours < 1.01 * 2048 * 4096  # bytes of a device's logits
    assert "all-" not in programs[0].as_text().replace("all-reduce-promotion", "")
