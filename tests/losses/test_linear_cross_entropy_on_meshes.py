"""The linear cross-entropy on meshes with explicit axes: one device's answer, at the cost of a `jax.shard_map`."""

import collections
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from linear_cases import forms

import masksafe
from masksafe.losses import linear_softmax_cross_entropy

SHAPE, WIDTH, CLASSES = (4, 16), 8, 24
RNG = np.random.default_rng(0)
FEATURES, KERNEL, BIAS = (
    RNG.normal(size=shape).astype(np.float32) for shape in ((*SHAPE, WIDTH), (WIDTH, CLASSES), CLASSES)
)
LABELS, MASK = RNG.integers(0, CLASSES, SHAPE), RNG.random(SHAPE) < 0.4
MASK[:2] = False  # nothing is left on half of the devices, if they split the first axis
WEIGHTS, CLASS_WEIGHTS = (RNG.uniform(0.2, 2, shape).astype(np.float32) for shape in (SHAPE, CLASSES))
ARGS = FEATURES, KERNEL, BIAS, WEIGHTS, CLASS_WEIGHTS, LABELS, MASK
OPTIONS = {"logit_soft_cap": 3.0, "label_smoothing": 0.1, "z_loss": 0.01, "block_size": 3}
EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto

# How features, kernel, bias, weights, class weights, labels and mask are split.
X, Y, XY = P("x"), P("y"), P(("x", "y"))
TOKENS = X, P(), P(), X, P(), X, X
CLASSES_TOO = X, P(None, "y"), Y, X, Y, X, X
SPLITS = {
    "tokens": TOKENS,
    "both axes of tokens": (P("x", "y"), P(), P(), P("x", "y"), P(), P("x", "y"), P("x", "y")),
    "tokens of the features": (P(None, ("x", "y")), P(), P(), P(None, ("x", "y")), P(), P(), P()),
    "classes": (P(), P(None, "y"), Y, P(), Y, P(), P()),
    "classes over two axes": (P(), P(None, ("x", "y")), XY, P(), XY, P(), P()),
    "classes, bias whole": (P(), P(None, "y"), P(), P(), P(), P(), P()),
    "tokens and classes": CLASSES_TOO,
    "kernel by features": (X, P("x", "y"), P(), X, P(), X, X),
    "tokens and classes over one axis": (X, P(None, "x"), X, X, X, X, X),
    "features": (P("x", None, "y"), P("y"), P(), X, P(), X, X),
    "features alone": (P(None, None, "y"), P("y"), P(), P(), P(), P(), P()),
    "weights alone": (P(), P(), P(), X, P(), P(), P()),
    "class weights alone": (P(), P(), P(), P(), X, P(), P()),
}


def mesh_of(kinds=(EXPLICIT, EXPLICIT)):
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=kinds)


def put(mesh, args, specs):
    return [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(args, specs, strict=True)]


def total(features, kernel, bias, weights, class_weights, labels, mask, reduction="none", **options):
    options |= {"bias": bias, "weights": weights, "class_weights": class_weights, "where": mask, **OPTIONS}
    losses = linear_softmax_cross_entropy(features, kernel, labels, reduction=reduction, **options)
    cotangents = jnp.cos(labels.astype("float32"))
    return sum(jnp.sum(x * cotangents) if x.ndim else 1.7 * x for x in jax.tree.leaves(losses))


@functools.cache
def step(reduction, **options):
    """One program for all values of arrays that are split alike."""
    return jax.jit(jax.value_and_grad(functools.partial(total, reduction=reduction, **options), (0, 1, 2, 3)))


def assert_close(actual, desired, rtol=2e-5, atol=2e-6):
    for a, d in zip(jax.tree.leaves(actual), jax.tree.leaves(desired), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(d), rtol=rtol, atol=atol)


QUICK = ("tokens and classes", "none", True, True)
# Every pair of a split, a reduction, components and a mesh that is set or not, though not every four of them.
PAIRS = itertools.product(enumerate(SPLITS), ("mean", "none"))
ALL = [(split, r, (i % 2 == 0) == (r == "none"), (i % 4 < 2) == (r == "none")) for (i, split), r in PAIRS]


@pytest.mark.parametrize(
    ("split", "reduction", "with_components", "mesh_is_set"), [QUICK, *(forms(*case) for case in ALL if case != QUICK)]
)
def test_value_and_gradients_are_those_of_one_device(split, reduction, with_components, mesh_is_set):
    mesh, run = mesh_of(), step(reduction, with_components=with_components)
    args = put(mesh, ARGS, SPLITS[split])
    if mesh_is_set:
        with jax.set_mesh(mesh):
            value, gradients = run(*args)
    else:
        value, gradients = run(*args)
    assert_close((value, gradients), run(*ARGS))
    for gradient, arg in zip(gradients, args[:4], strict=True):
        assert gradient.sharding.is_equivalent_to(arg.sharding, arg.ndim)


def test_losses_are_split_like_the_tokens_without_jit_too():
    features, kernel, *_, labels, _ = put(mesh_of(), ARGS, SPLITS["both axes of tokens"])
    losses = linear_softmax_cross_entropy(features, kernel, labels, reduction="none")
    assert jax.typeof(losses).sharding.spec == P("x", "y")
    assert_close(
        losses, jax.jit(lambda *args: linear_softmax_cross_entropy(*args, reduction="none"))(*ARGS[:2], LABELS)
    )


@pytest.mark.forms
def test_a_mask_that_is_split_along_another_axis_than_the_features():
    def loss(features, kernel, labels, mask):
        losses = linear_softmax_cross_entropy(features, kernel, labels, where=mask, reduction="none", **OPTIONS)
        return jnp.sum(jnp.sin(losses))

    args, run = (FEATURES, KERNEL, LABELS, MASK), jax.jit(jax.value_and_grad(loss, (0, 1)))
    with jax.set_mesh(mesh_of()):
        actual = run(*put(mesh_of(), args, (P(None, ("x", "y")), P(), P(), Y)))
    assert_close(actual, run(*args))


@pytest.mark.forms
@pytest.mark.parametrize(
    ("split", "reduction"), [("tokens and classes", "none"), ("tokens", "mean"), ("classes", "none")]
)
def test_every_other_derivative(split, reduction):
    *floats, class_weights, labels, mask = put(mesh_of(), ARGS, SPLITS[split])

    @jax.jit
    def derivatives(floats, *rest):
        fn = lambda *floats: total(*floats, *rest, reduction=reduction)  # noqa: E731
        along, numbers = tuple(map(jnp.cos, floats)), (0, 1, 2, 3)
        gradient = jax.grad(fn, numbers)
        forward_over_reverse = jax.jvp(gradient, tuple(floats), along)[1]
        slope = lambda *floats: sum(jnp.sum(g * a) for g, a in zip(gradient(*floats), along, strict=True))  # noqa: E731
        with masksafe.forward_mode():
            forward = jax.jvp(fn, tuple(floats), along)
        return forward, forward_over_reverse, jax.grad(slope, numbers)(*floats)

    with jax.set_mesh(mesh_of()):
        actual = derivatives(floats, class_weights, labels, mask)
    assert_close(actual, derivatives(ARGS[:4], *ARGS[4:]), 2e-4, 2e-5)


def test_masked_tokens_touch_nothing():
    """In the program of the split of tokens and classes; neither if they are all masked."""

    def outcome(mask, garbage, label):
        features = np.where(mask[..., None], FEATURES, np.float32(garbage))
        weights, labels = np.where(mask, WEIGHTS, np.float32(garbage)), np.where(mask, LABELS, label)
        args = features, KERNEL, BIAS, weights, CLASS_WEIGHTS, labels, mask
        with jax.set_mesh(mesh_of()):
            return step("none", with_components=True)(*put(mesh_of(), args, CLASSES_TOO))

    clean = outcome(MASK, 0, 0)
    assert not np.asarray(clean[1][0])[~MASK].any()
    for garbage, label in ((np.nan, -100), (np.inf, CLASSES), (1e38, 3)):
        jax.tree.map(np.testing.assert_array_equal, outcome(MASK, garbage, label), clean)
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0), outcome(np.zeros_like(MASK), np.nan, -1))


def test_a_bad_label_is_nan_in_its_own_row():
    labels = LABELS.copy()
    labels[1, 3], labels[3, 2] = -1, CLASSES
    with jax.set_mesh(mesh_of()):
        args = put(mesh_of(), (*ARGS[:5], labels, np.ones(SHAPE, bool)), CLASSES_TOO)
        value, (gradient, *_) = step("none", with_components=True)(*args)
    assert np.isnan(value)
    assert np.argwhere(np.isnan(gradient).all(-1)).tolist() == [[1, 3], [3, 2]]
    assert np.isnan(gradient).any(-1).sum() == 2


@pytest.mark.forms
def test_label_checks():
    labels = np.where(np.arange(64).reshape(SHAPE) == 50, CLASSES, LABELS)
    with jax.set_mesh(mesh_of()):
        args = put(mesh_of(), (*ARGS[:2], labels), (X, P(None, "y"), X))
        with masksafe.label_checks("raise"), pytest.raises(Exception, match=r"1 of 64 labels .* first at \(3, 2\): 24"):
            linear_softmax_cross_entropy(*args)
        with masksafe.label_checks("checkify"):
            error, (loss, _) = jax.jit(checkify.checkify(jax.value_and_grad(linear_softmax_cross_entropy)))(*args)
    assert "1 of 64 labels" in error.get()
    assert np.isnan(loss)


@pytest.mark.forms
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


@pytest.mark.forms
def test_a_vmap_over_an_axis_that_is_split():
    many = np.stack([FEATURES, np.cos(FEATURES)])

    @jax.jit
    def gradients(many, kernel, weights, labels, mask):
        of_one = lambda f, k: total(f, k, BIAS, weights, CLASS_WEIGHTS, labels, mask, "sum")  # noqa: E731
        losses = lambda many, k: jnp.sum(jax.vmap(lambda f: of_one(f, k))(many))  # noqa: E731
        return jax.grad(losses, (0, 1))(many, kernel)

    mesh, args = mesh_of(), (many, KERNEL, WEIGHTS, LABELS, MASK)
    with jax.set_mesh(mesh):
        specs = P("x", None, "y"), P(), P(None, "y"), P(None, "y"), P(None, "y")
        assert_close(gradients(*put(mesh, args, specs)), gradients(*args))


@pytest.mark.forms
@pytest.mark.parametrize("kinds", [(EXPLICIT, AUTO), (AUTO, EXPLICIT)], ids=str)
def test_a_mesh_with_automatic_axes_too(kinds):
    mesh = mesh_of(kinds)
    specs = TOKENS if kinds[0] == EXPLICIT else SPLITS["classes"]
    with jax.set_mesh(mesh):
        actual = step("mean")(*put(mesh, ARGS, specs))
    assert_close(actual, step("mean")(*ARGS))


@pytest.mark.forms
def test_axes_made_explicit_around_the_loss():
    """What the docs advise for automatic axes; without weights of classes, which would be gathered."""
    mesh, loss = mesh_of((AUTO, AUTO)), lambda *args: total(*args[:4], None, *args[4:], reduction="mean")
    given, specs = ([*of[:4], *of[5:]] for of in (ARGS, CLASSES_TOO))
    explicit = jax.value_and_grad(jax.sharding.explicit_axes(loss, in_sharding=tuple(specs)), (0, 1, 2, 3))
    with jax.set_mesh(mesh):
        args = put(mesh, given, specs)
        program = jax.jit(explicit).lower(*args).compile()
        actual = program(*args)
    assert_close(actual, jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(*given))
    assert set(collectives(program)) == {"all-reduce"}


@pytest.mark.forms
def test_inside_a_shard_map_over_another_axis():
    mesh = mesh_of()
    flat = [x.reshape(-1, *x.shape[2:]) if x.shape[:2] == SHAPE else x for x in ARGS]
    with jax.set_mesh(mesh):
        local = lambda *args: jax.lax.psum(total(*args), "x")  # noqa: E731
        split = jax.shard_map(local, in_specs=TOKENS, out_specs=P(), axis_names={"x"})
        args = put(mesh, flat, (XY, P(), P(), XY, P(), XY, XY))
        actual = jax.jit(jax.value_and_grad(split, (0, 1, 2, 3)))(*args)
    assert_close(actual, step("none")(*flat))


@pytest.mark.forms
def test_odd_settings():
    mesh, desired = mesh_of(), step("mean")(*ARGS)
    with jax.set_mesh(mesh), jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        assert_close(step("mean")(*put(mesh, ARGS, CLASSES_TOO)), desired)
    bad = put(mesh, (np.where(MASK[..., None], FEATURES, np.nan), *ARGS[1:]), CLASSES_TOO)
    with jax.set_mesh(mesh), jax.debug_nans(True):
        assert_close(step("mean")(*bad), desired)


@pytest.mark.forms
def test_float16_on_a_mesh():
    args = *(a.astype("float16") for a in ARGS[:2]), *ARGS[2:]
    with jax.set_mesh(mesh_of()):
        actual = step("mean", with_components=True)(*put(mesh_of(), args, CLASSES_TOO))
    assert_close(actual, step("mean", with_components=True)(*args), 1e-2, 5e-2)


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


@pytest.mark.forms
@pytest.mark.parametrize("split", ["tokens", "classes"])
def test_the_program_is_that_of_a_shard_map(split):
    mesh = jax.make_mesh((4,), ("d",))
    by_token = P("d") if split == "tokens" else P()
    specs = by_token, P() if split == "tokens" else P(None, "d"), by_token, by_token
    shapes = ((2048, 64), jnp.float32), ((64, 4096), jnp.float32), ((2048,), jnp.int32), ((2048,), jnp.bool_)
    ours = lambda features, kernel, y, mask: linear_softmax_cross_entropy(features, kernel, y, where=mask)  # noqa: E731
    with jax.set_mesh(mesh):
        args = [jax.ShapeDtypeStruct(*s, sharding=NamedSharding(mesh, p)) for s, p in zip(shapes, specs, strict=True)]
        by_hand = functools.partial(in_shard_map, axis_name=split == "classes")
        by_hand = jax.shard_map(by_hand, in_specs=specs, out_specs=P())
        a, b = (jax.jit(jax.value_and_grad(fn, (0, 1))).lower(*args).compile() for fn in (ours, by_hand))
    memory = [program.memory_analysis().temp_size_in_bytes for program in (a, b)]
    assert memory[0] <= 1.1 * memory[1]
    assert instructions(a) == instructions(b)
    assert set(collectives(a)) == {"all-reduce"}
