"""The losses of a linear layer over devices: one device's answer, at the cost of a `jax.shard_map` written by hand."""

import collections
import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import linear_cases as cases
import numpy as np
import pytest
from comparisons import assert_close
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from linear_cases import CROSS_ENTROPY, DIVERGENCE, KERNEL, LOG_PROBS, MASK, OPS, TOKENS, TOP_K
from tiers import parametrize

import masksafe
from masksafe.losses import linear_softmax_cross_entropy

EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
close = functools.partial(assert_close, rtol=2e-5, atol=2e-6)


@pytest.fixture(autouse=True)
def sizes(choose):
    cases.use_platform(choose, "cpu")


def sum_of(op, others, floats):
    return sum((1 + i) * jnp.sum(x) for i, x in enumerate(cases.outputs_of(op, **others | floats)))


COMPONENTS, ENTROPY = (OPS[op].all_outputs | {"with_predictions": True} for op in (CROSS_ENTROPY, LOG_PROBS))
BIAS_AND_MASK = {"where": True, "bias": True}


def assert_gradients(op, options, of_the_shard_map):
    """Whose cotangents are parts of a sum over devices; or gradients within it. There are ties."""
    floats, others = cases.singles(cases.split_call(op, **options))
    floats |= {name: np.round(floats[name]) for name in ("features", "kernel")}
    arrays = {name: x for name, x in others.items() if isinstance(x, np.ndarray)}
    static = others | {"axis_name": "y", "block_size": 4}

    def local(floats, arrays):
        return jax.lax.psum(sum_of(op, static | arrays, floats), "x")

    specs = tuple(specs_of(SPLITS["tokens and classes"], of) for of in (floats, arrays))
    split = functools.partial(jax.shard_map, mesh=mesh_of((AUTO, AUTO)), in_specs=specs)
    if of_the_shard_map:
        step = jax.value_and_grad(split(local, out_specs=P()))
    else:
        step = split(jax.value_and_grad(local), out_specs=(P(), specs[0]))
    step, whole = jax.jit(step), jax.jit(jax.value_and_grad(lambda floats: sum_of(op, others, floats)))
    assert_close(step(floats, arrays), whole(floats), rtol=1e-4, atol=1e-5)
    if "class_mask" in arrays:
        cases.assert_all_zero(step(floats, arrays | {"class_mask": np.zeros_like(cases.CLASS_MASK)})[1])


def assert_other_derivatives(op, options):
    """Where the loss on each device is, to JAX, a term of a sum over the devices, or not."""
    floats, others = cases.split_call(op, **options)
    specs = ({name: P(None, "classes") if name == "kernel" else P() for name in floats},)
    ours = cases.total_of(op, axis_name="classes", block_size=9, **others)
    mesh, check_vma = jax.make_mesh((4,), ("classes",), axis_types=(AUTO,)), options.get("reduction") != "mean"
    split = jax.shard_map(ours, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)

    whole = cases.total_of(op, **others)

    @jax.jit
    def both(floats):
        along = lambda fn: jax.jvp(fn, (floats,), (jax.tree.map(jnp.cos, floats),))  # noqa: E731
        with masksafe.forward_mode():
            slopes = along(split), along(whole)
        second = along(jax.grad(whole))[1]
        return (slopes[0], cases.second_derivatives(split, floats)), (slopes[1], (second, second))

    for kernel in (KERNEL, np.zeros_like(KERNEL))[: 1 + (op == LOG_PROBS)]:  # ties everywhere
        assert_close(*both(cases.singles(floats | {"kernel": kernel})), rtol=1e-3, atol=1e-4)


COMPONENTS_IN_SHARD_MAP = CROSS_ENTROPY, {**cases.ARRAYS[CROSS_ENTROPY], **COMPONENTS, "class_mask": True}, True
IN_SHARD_MAPS = [
    (CROSS_ENTROPY, {**BIAS_AND_MASK, **cases.OPTIONS, "reduction": "sum"}, True),  # whose gradients are kept
    (CROSS_ENTROPY, {**BIAS_AND_MASK, **cases.OPTIONS, "reduction": "none"}, False),
    (LOG_PROBS, {**BIAS_AND_MASK, **ENTROPY, "temperature": 0.7, "class_mask": True}, True),
    (LOG_PROBS, {**BIAS_AND_MASK, **ENTROPY}, False),
    (LOG_PROBS, {"with_entropy": True}, None),
    (CROSS_ENTROPY, {**cases.OPTIONS, "where": True, "reduction": "mean"}, None),
]


@cases.in_turn(("op", "options", "of_the_shard_map"), [("cpu", *COMPONENTS_IN_SHARD_MAP)], IN_SHARD_MAPS)
def test_classes_split_in_a_shard_map(platform, op, options, of_the_shard_map):
    if of_the_shard_map is None:
        assert_other_derivatives(op, options)
    else:
        assert_gradients(op, options, of_the_shard_map)


# Meshes with explicit axes. How the arguments are split, by their role or name.

SHAPE = 10, 4
X, Y, XY = P("x"), P("y"), P(("x", "y"))
BY_Y = P(None, "y")
SPLITS = {
    "tokens": {"tokens": X},
    "both axes of tokens": {"tokens": P("x", "y")},
    "tokens of the features": {"features": BY_Y, "weights": BY_Y},
    "tokens of the targets": {"target_features": X},
    "classes": {"kernel": BY_Y, "classes": Y},
    "classes over two axes": {"kernel": P(None, ("x", "y")), "classes": XY},
    "classes, bias and mask whole": {"kernel": BY_Y, "class_weights": Y},
    "tokens and classes": {"tokens": X, "kernel": BY_Y, "classes": Y},
    "kernel by features": {"tokens": X, "kernel": P("x", "y")},
    "tokens and classes over one axis": {"tokens": X, "kernel": P(None, "x"), "classes": X},
    "features": {"tokens": X, "features": P("x", None, "y"), "kernel": Y},
    "features alone": {"features": P(None, None, "y"), "kernel": Y},
    "weights alone": {"weights": X},
    "class weights alone": {"class_weights": X},
    "mask along another axis": {"features": BY_Y, "where": X},
}
KERNELS = "kernel", "target_kernel"
OF_CLASSES = "bias", "target_bias", "class_weights", "class_mask"


def specs_of(split, arrays):
    def spec(name):
        role = "kernel" if name in KERNELS else "classes" if name in OF_CLASSES else "tokens"
        role = "features" if name.endswith("features") and "features" in split else role
        return split.get(name, split.get(role, P()))

    return {name: spec(name) for name in arrays}


def mesh_of(kinds=(EXPLICIT, EXPLICIT)):
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=kinds)


def put(mesh, args, split):
    """Arrays by name on a mesh, all in one dict or in several."""
    of = SPLITS[split] if isinstance(split, str) else split
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    return tuple(jax.tree.map(place, given, specs_of(of, given)) for given in args)


HALF = MASK & (np.arange(TOKENS) >= TOKENS // 2)  # nothing is left on half of the devices, if they split the first axis


@functools.cache
def call_of(op, class_mask=False):
    """The arrays of a call of tokens on two axes, with gradients and without."""
    given = cases.split_call(op, **cases.ARRAYS[op] | {"where": HALF, "class_mask": class_mask})
    shaped = lambda x: x.reshape(*SHAPE, *x.shape[1:]) if len(x) == TOKENS else x  # noqa: E731
    return tuple({name: shaped(x) for name, x in cases.singles(of).items()} for of in given)


def with_garbage(args):
    """The arrays with NaN in masked tokens, or -100 for labels."""

    def hide(x):
        is_masked = ~HALF.reshape(*SHAPE, *[1] * (x.ndim - 2))
        return np.where(is_masked, np.array(np.nan if x.dtype.kind == "f" else -100, x.dtype), x)

    of_tokens = lambda x: x.shape[:2] == SHAPE and x.dtype != bool  # noqa: E731
    return tuple({name: hide(x) if of_tokens(x) else x for name, x in given.items()} for given in args)


def loss_of(op, **options):
    options = OPS[op].all_outputs | {"block_size": 3} | options
    return lambda floats, others: cases.total_of(op, **options, **others)(floats)


@functools.cache
def step(op, **options):
    """One program for all values of arrays that are split alike."""
    return jax.jit(jax.value_and_grad(loss_of(op, **options)))


BY_OTHER_OPS = [
    (LOG_PROBS, "tokens", None, True),
    (LOG_PROBS, "classes", None, True),
    (DIVERGENCE, "tokens of the targets", "none", True),
    (DIVERGENCE, "kernel by features", "none", True),
    (TOP_K, "tokens and classes", "mean", False),
]
OF_CROSS_ENTROPY = [split for split in SPLITS if split not in [row[1] for row in BY_OTHER_OPS[:3]]]
WAYS = [("none", True), ("mean", False)]  # few, because each is one more program on one device


@parametrize(
    ("op", "split", "reduction", "with_mask"),
    [(CROSS_ENTROPY, "tokens and classes", "none", True)],
    exhaustive=[*((CROSS_ENTROPY, split, *WAYS[i % 2]) for i, split in enumerate(OF_CROSS_ENTROPY)), *BY_OTHER_OPS],
)
def test_value_and_gradients_are_those_of_one_device(op, split, reduction, with_mask):
    """With garbage in masked tokens; with a mask of classes also components, predictions and a mesh that is set."""
    options = {"reduction": reduction} if reduction else {}
    options |= {"with_predictions": with_mask} if op in cases.OF_LABELS else {}
    options |= {"with_components": with_mask} if op == CROSS_ENTROPY else {}
    mesh, run, args = mesh_of(), step(op, **options), call_of(op, with_mask)
    parts = put(mesh, with_garbage(args), split)
    with jax.set_mesh(mesh) if with_mask else contextlib.nullcontext():
        value, gradients = run(*parts)
    close((value, gradients), run(*args))
    for name, gradient in gradients.items():
        assert gradient.sharding.is_equivalent_to(parts[0][name].sharding, gradient.ndim)


def test_losses_are_split_like_the_tokens_without_jit_too():
    floats, others = call_of(CROSS_ENTROPY)
    args = {name: (floats | others)[name] for name in ("features", "kernel", "labels")}
    losses = linear_softmax_cross_entropy(**put(mesh_of(), [args], "both axes of tokens")[0], reduction="none")
    assert jax.typeof(losses).sharding.spec == P("x", "y")
    close(losses, jax.jit(functools.partial(linear_softmax_cross_entropy, reduction="none"))(**args))


def test_a_bad_label_is_nan_in_its_own_row():
    floats, others = call_of(CROSS_ENTROPY, True)
    labels = others["labels"].copy()
    labels[1, 3], labels[3, 2] = -1, cases.CLASSES
    mesh, others = mesh_of(), others | {"labels": labels, "where": np.ones(SHAPE, bool)}
    args, run = put(mesh, (floats, others), "tokens and classes"), loss_of(CROSS_ENTROPY, reduction="none")
    with jax.set_mesh(mesh):
        value, gradients = step(CROSS_ENTROPY, reduction="none", with_predictions=True, with_components=True)(*args)
        with masksafe.label_checks("raise"), pytest.raises(Exception, match=r"2 of 40 labels .* first at \(1, 3\): -1"):
            run(*args)
    assert np.isnan(value)
    assert np.argwhere(np.isnan(gradients["features"]).all(-1)).tolist() == [[1, 3], [3, 2]]
    assert np.isnan(gradients["features"]).any(-1).sum() == 2


# The cost is that of a `jax.shard_map` written by hand.


def instructions(program):
    return collections.Counter(re.findall(r"= \S+ ([a-z-]+)\(", program.as_text()))


def in_shard_map(features, kernel, labels, mask, axis_name):
    loss = functools.partial(linear_softmax_cross_entropy, features, kernel, labels, where=mask)
    if axis_name:
        return loss(axis_name="d")
    return jax.lax.psum(loss(reduction="sum"), "d") / jnp.maximum(jax.lax.psum(jnp.sum(mask), "d"), 1)


@parametrize("split", ["classes"], exhaustive=["tokens"])
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
    assert not re.search(r"all-gather|reduce-scatter|all-to-all|collective-permute", a.as_text())
