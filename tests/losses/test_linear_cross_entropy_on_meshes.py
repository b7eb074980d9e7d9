"""The linear cross-entropy on meshes with explicit axes: one device's answer, at the cost of a `jax.shard_map`."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import masksafe
from masksafe.losses import linear_softmax_cross_entropy

SHAPE, WIDTH, CLASSES = (4, 16), 8, 24
RNG = np.random.default_rng(0)
FEATURES, KERNEL, BIAS = (
    RNG.normal(size=shape).astype(np.float32) for shape in ((*SHAPE, WIDTH), (WIDTH, CLASSES), CLASSES)
)
LABELS, MASK = RNG.integers(0, CLASSES, SHAPE), RNG.random(SHAPE) < 0.4
MASK[:2] = False  # nothing is left on half of the devices, if they split the first axis
WEIGHTS = RNG.normal(size=SHAPE).astype(np.float32)
ARGS = FEATURES, KERNEL, BIAS, LABELS, MASK, WEIGHTS
OPTIONS = {"logit_soft_cap": 3.0, "label_smoothing": 0.1, "z_loss": 0.01, "block_size": 3}
EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
slow = functools.partial(pytest.param, marks=pytest.mark.slow)

# How features, kernel, bias, labels, mask and weights are split.
X, Y, XY = P("x"), P("y"), P(("x", "y"))
TOKENS = X, P(), P(), X, X, X
CLASSES_TOO = X, P(None, "y"), Y, X, X, X
SPLITS = {
    "tokens": TOKENS,
    "both axes of tokens": (P("x", "y"), P(), P(), P("x", "y"), P("x", "y"), P("x", "y")),
    "tokens of the features": (P(None, ("x", "y")), P(), P(), P(), Y, P(None, ("x", "y"))),
    "classes": (P(), P(None, "y"), Y, P(), P(), P()),
    "classes over two axes": (P(), P(None, ("x", "y")), XY, P(), P(), P()),
    "classes, bias whole": (P(), P(None, "y"), P(), P(), P(), P()),
    "tokens and classes": CLASSES_TOO,
    "kernel by features": (X, P("x", "y"), P(), X, X, X),
    "tokens and classes over one axis": (X, P(None, "x"), X, X, X, X),
    "features": (P("x", None, "y"), P("y"), P(), X, X, X),
    "features alone": (P(None, None, "y"), P("y"), P(), P(), P(), P()),
}
QUICK = "tokens", "tokens and classes", "kernel by features"


def mesh_of(kinds=(EXPLICIT, EXPLICIT)):
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=kinds)


def put(mesh, args, specs):
    return [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(args, specs, strict=True)]


def total(features, kernel, bias, labels, mask, weights, reduction="none", **options):
    losses = linear_softmax_cross_entropy(
        features, kernel, labels, bias=bias, where=mask, reduction=reduction, **{**OPTIONS, **options}
    )
    return jnp.sum(losses * weights) if losses.ndim else 1.7 * losses


def step(reduction):
    return jax.jit(jax.value_and_grad(functools.partial(total, reduction=reduction), (0, 1, 2)))


def assert_close(actual, desired, rtol=2e-5, atol=2e-6):
    for a, d in zip(jax.tree.leaves(actual), jax.tree.leaves(desired), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(d), rtol=rtol, atol=atol)


@pytest.mark.parametrize("mesh_is_set", [True, slow(False)])
@pytest.mark.parametrize("reduction", ["mean", "none", slow("sum")])
@pytest.mark.parametrize("split", [name if name in QUICK else slow(name) for name in SPLITS])
def test_value_and_gradients_are_those_of_one_device(split, reduction, mesh_is_set):
    mesh = mesh_of()
    args = put(mesh, ARGS, SPLITS[split])
    if mesh_is_set:
        with jax.set_mesh(mesh):
            value, gradients = step(reduction)(*args)
    else:
        value, gradients = step(reduction)(*args)
    assert_close((value, gradients), step(reduction)(*ARGS))
    for gradient, arg in zip(gradients, args[:3], strict=True):
        assert gradient.sharding.is_equivalent_to(arg.sharding, arg.ndim)


@pytest.mark.parametrize("split", ["tokens", slow("tokens and classes")])
def test_without_jit_and_without_a_mesh_that_is_set(split):
    args = put(mesh_of(), ARGS, SPLITS[split])
    assert_close(linear_softmax_cross_entropy(*args[:2], args[3]), linear_softmax_cross_entropy(*ARGS[:2], ARGS[3]))


def test_losses_are_split_like_the_tokens():
    mesh = mesh_of()
    features, kernel, _, labels, *_ = put(mesh, ARGS, SPLITS["both axes of tokens"])
    losses = linear_softmax_cross_entropy(features, kernel, labels, reduction="none")
    assert jax.typeof(losses).sharding.spec == P("x", "y")


@pytest.mark.slow
@pytest.mark.parametrize("split", ["tokens and classes", slow("tokens"), slow("classes")])
@pytest.mark.parametrize("reduction", ["mean", slow("none")])
def test_every_other_derivative(split, reduction):
    *floats, labels, mask, weights = put(mesh_of(), ARGS, SPLITS[split])

    @jax.jit
    def derivatives(floats, labels, mask, weights):
        fn = lambda *floats: total(*floats, labels, mask, weights, reduction=reduction)  # noqa: E731
        along = tuple(map(jnp.cos, floats))
        gradient = jax.grad(fn, (0, 1, 2))
        forward_over_reverse = jax.jvp(gradient, tuple(floats), along)[1]
        slope = lambda *floats: sum(jnp.sum(g * a) for g, a in zip(gradient(*floats), along, strict=True))  # noqa: E731
        with masksafe.forward_mode():
            forward = jax.jvp(fn, tuple(floats), along)
        return forward, forward_over_reverse, jax.grad(slope, (0, 1, 2))(*floats)

    with jax.set_mesh(mesh_of()):
        actual = derivatives(floats, labels, mask, weights)
    assert_close(actual, derivatives(ARGS[:3], *ARGS[3:]), 2e-4, 2e-5)


@pytest.mark.parametrize("reduction", ["mean", slow("none")])
def test_masked_tokens_touch_nothing(reduction):
    mesh = mesh_of()

    def outcome(garbage, label):
        features = np.where(MASK[..., None], FEATURES, np.float32(garbage))
        args = features, KERNEL, BIAS, np.where(MASK, LABELS, label), MASK, WEIGHTS
        with jax.set_mesh(mesh):
            return step(reduction)(*put(mesh, args, CLASSES_TOO))

    clean = outcome(0, 0)
    assert not np.asarray(clean[1][0])[~MASK].any()
    for garbage, label in ((np.nan, -100), (np.inf, CLASSES), (1e38, 3)):
        jax.tree.map(np.testing.assert_array_equal, outcome(garbage, label), clean)


def test_nothing_left_on_any_device_is_zero():
    args = put(mesh_of(), (FEATURES * np.nan, *ARGS[1:4], np.zeros(SHAPE, bool), WEIGHTS), CLASSES_TOO)
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0), step("mean")(*args))


def test_a_bad_label_is_nan_in_its_own_row():
    labels = LABELS.copy()
    labels[1, 3], labels[3, 2] = -1, CLASSES
    with jax.set_mesh(mesh_of()):
        args = put(mesh_of(), (*ARGS[:3], labels, np.ones(SHAPE, bool), WEIGHTS), CLASSES_TOO)
        value, (gradient, *_) = step("none")(*args)
    assert np.isnan(value)
    assert np.argwhere(np.isnan(gradient).all(-1)).tolist() == [[1, 3], [3, 2]]
    assert np.isnan(gradient).any(-1).sum() == 2


def test_label_checks():
    labels = LABELS.copy()
    labels[3, 2] = CLASSES
    with jax.set_mesh(mesh_of()):
        features, kernel, _, labels, *_ = put(mesh_of(), (*ARGS[:3], labels, *ARGS[4:]), CLASSES_TOO)
        with masksafe.label_checks("raise"), pytest.raises(Exception, match=r"1 of 64 labels .* first at \(3, 2\): 24"):
            linear_softmax_cross_entropy(features, kernel, labels)
        with masksafe.label_checks("checkify"):
            error, _ = jax.jit(checkify.checkify(jax.grad(linear_softmax_cross_entropy)))(features, kernel, labels)
        assert "1 of 64 labels" in error.get()
        _, loss = jax.jit(checkify.checkify(linear_softmax_cross_entropy, errors=checkify.nan_checks))(
            features, kernel, labels
        )
        assert np.isnan(loss)


def test_vmap_scan_and_remat():
    many = np.stack([FEATURES, np.cos(FEATURES)])
    loss = jax.checkpoint(functools.partial(total, reduction="mean"))

    @jax.jit
    def gradients(many, features, kernel, *args):
        of_many = lambda many, kernel: jnp.sum(jax.vmap(lambda f: loss(f, kernel, *args))(many))  # noqa: E731
        again = lambda f, k: jax.lax.scan(lambda c, _: (c + loss(f, k, *args), None), 0.0, None, 2)[0]  # noqa: E731
        return jax.grad(of_many, (0, 1))(many, kernel), jax.grad(again, (0, 1))(features, kernel)

    mesh = mesh_of()
    with jax.set_mesh(mesh):
        actual = gradients(*put(mesh, (many, *ARGS), (P(None, "x"), *TOKENS)))
    assert_close(actual, gradients(many, *ARGS))


@pytest.mark.slow
def test_a_vmap_over_an_axis_that_is_split():
    many = np.stack([FEATURES, np.cos(FEATURES)])

    @jax.jit
    def gradients(many, kernel, labels, mask):
        losses = lambda *floats: jax.vmap(lambda f: total(f, floats[1], BIAS, labels, mask, WEIGHTS, "sum"))(floats[0])  # noqa: E731
        return jax.grad(lambda *floats: jnp.sum(losses(*floats)), (0, 1))(many, kernel)

    mesh = mesh_of()
    with jax.set_mesh(mesh):
        args = put(mesh, (many, KERNEL, LABELS, MASK), (P("x", None, "y"), P(), P(None, "y"), P(None, "y")))
        assert_close(gradients(*args), gradients(many, KERNEL, LABELS, MASK))


@pytest.mark.parametrize("kinds", [(EXPLICIT, AUTO), slow((AUTO, EXPLICIT))], ids=str)
def test_a_mesh_with_automatic_axes_too(kinds):
    mesh = mesh_of(kinds)
    specs = TOKENS if kinds[0] == EXPLICIT else SPLITS["classes"]
    with jax.set_mesh(mesh):
        actual = step("mean")(*put(mesh, ARGS, specs))
    assert_close(actual, step("mean")(*ARGS))


def test_axes_made_explicit_around_the_loss():
    """What the docs advise for automatic axes."""
    mesh = mesh_of((AUTO, AUTO))
    explicit = jax.sharding.explicit_axes(functools.partial(total, reduction="mean"), in_sharding=CLASSES_TOO)
    with jax.set_mesh(mesh):
        program = jax.jit(jax.value_and_grad(explicit, (0, 1, 2))).lower(*put(mesh, ARGS, CLASSES_TOO)).compile()
        actual = program(*put(mesh, ARGS, CLASSES_TOO))
    assert_close(actual, step("mean")(*ARGS))
    assert set(collectives(program)) == {"all-reduce"}


def test_inside_a_shard_map_over_another_axis():
    mesh = mesh_of()

    def local(features, kernel, bias, labels, mask, weights):
        losses = linear_softmax_cross_entropy(
            features, kernel, labels, bias=bias, where=mask, reduction="none", **OPTIONS
        )
        return jax.lax.psum(jnp.sum(losses * weights), "x")

    flat = [x.reshape(-1, *x.shape[2:]) if x.shape[:2] == SHAPE else x for x in ARGS]
    with jax.set_mesh(mesh):
        split = jax.shard_map(local, in_specs=TOKENS, out_specs=P(), axis_names={"x"})
        args = put(mesh, flat, (XY, P(), P(), XY, XY, XY))
        actual = jax.jit(jax.value_and_grad(split, (0, 1, 2)))(*args)
    assert_close(actual, step("none")(*flat))


def test_odd_settings():
    mesh = mesh_of()
    args = put(mesh, ARGS, CLASSES_TOO)
    desired = step("mean")(*ARGS)
    with jax.set_mesh(mesh), jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        assert_close(step("mean")(*args), desired)
    bad = put(mesh, (np.where(MASK[..., None], FEATURES, np.nan), *ARGS[1:]), CLASSES_TOO)
    with jax.set_mesh(mesh), jax.debug_nans(True):
        assert_close(step("mean")(*bad), desired)


# The cost is that of a `jax.shard_map` written by hand.


def collectives(program):
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    return sorted(re.findall(rf" ({kinds})(?:-start)?\(", program.as_text()))


def instructions(program):
    return collections.Counter(re.findall(r"= \S+ ([a-z-]+)\(", program.as_text()))


def in_shard_map(features, kernel, labels, mask, axis_name):
    loss = functools.partial(linear_softmax_cross_entropy, features, kernel, labels, where=mask)
    if axis_name:
        return loss(axis_name="d")
    return jax.lax.psum(loss(reduction="sum"), "d") / jnp.maximum(jax.lax.psum(jnp.sum(mask), "d"), 1)


@pytest.mark.parametrize("split", ["tokens", "classes"])
def test_the_program_is_that_of_a_shard_map(split):
    mesh = jax.make_mesh((4,), ("d",))
    by_token = P("d") if split == "tokens" else P()
    specs = by_token, P() if split == "tokens" else P(None, "d"), by_token, by_token
    shapes = ((2048, 64), jnp.float32), ((64, 4096), jnp.float32), ((2048,), jnp.int32), ((2048,), jnp.bool_)

    def ours(features, kernel, labels, mask):
        return linear_softmax_cross_entropy(features, kernel, labels, where=mask)

    with jax.set_mesh(mesh):
        args = [jax.ShapeDtypeStruct(*s, sharding=NamedSharding(mesh, p)) for s, p in zip(shapes, specs, strict=True)]
        by_hand = functools.partial(in_shard_map, axis_name=split == "classes")
        by_hand = jax.shard_map(by_hand, in_specs=specs, out_specs=P())
        a, b = (jax.jit(jax.value_and_grad(fn, (0, 1))).lower(*args).compile() for fn in (ours, by_hand))
    memory = [program.memory_analysis().temp_size_in_bytes for program in (a, b)]
    assert memory[0] <= 1.1 * memory[1]
    assert instructions(a) == instructions(b)
    assert set(collectives(a)) == {"all-reduce"}
