"""The losses of a linear layer: how each is called, and what the tests share."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from comparisons import assert_close
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tiers import parametrize

from masksafe import losses

TOKENS, WIDTH, WIDTH_OF_TARGETS, CLASSES, K = 40, 8, 4, 24, 4
RNG = np.random.default_rng(0)
FEATURES, TARGET_FEATURES = RNG.normal(size=(TOKENS, WIDTH)), RNG.normal(size=(TOKENS, WIDTH_OF_TARGETS))
KERNEL, TARGET_KERNEL = RNG.normal(size=(WIDTH, CLASSES)), RNG.normal(size=(WIDTH_OF_TARGETS, CLASSES))
BIAS, TARGET_BIAS = RNG.normal(size=(2, CLASSES))
MASK, CLASS_MASK = RNG.random(TOKENS) < 0.6, np.arange(CLASSES) % 3 != 1
WEIGHTS, CLASS_WEIGHTS = RNG.uniform(0.2, 2, TOKENS), RNG.uniform(0.2, 2, CLASSES)
LABELS = RNG.choice(np.flatnonzero(CLASS_MASK), TOKENS)  # not at a masked class
TARGET_MASK = RNG.random((TOKENS, K)) < 0.6
TARGET_MASK[2], TARGET_MASK[3] = False, True
COTANGENTS = RNG.normal(size=(4, TOKENS))
BAD = np.arange(TOKENS) == 5
CAPPED = {"logit_soft_cap": 3.0}
OPTIONS = {**CAPPED, "label_smoothing": 0.1, "z_loss": 0.01}
DIRECTIONS = "forward", "reverse", "jensen_shannon"

singles = functools.partial(jax.tree.map, lambda x: np.float32(x) if np.asarray(x).dtype == np.float64 else x)


def top_k_targets(k=K, class_mask=CLASS_MASK):
    """The most probable classes of a teacher, among those that are not masked."""
    logits = np.where(class_mask, TARGET_FEATURES @ TARGET_KERNEL + TARGET_BIAS, -np.inf)
    classes = np.argsort(-logits)[:, :k]
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return {"target_log_probs": np.take_along_axis(log_probs, classes, -1), "target_classes": classes}


class Op(NamedTuple):
    arguments: dict[str, np.ndarray]  # of the ops, by name
    all_outputs: dict[str, Any]  # options with which it has as many outputs as it can
    fixed: dict[str, Any] = {}  # noqa: RUF012 - options of all tests


LAYER = {"features": FEATURES, "kernel": KERNEL}
LABELLED = {**LAYER, "labels": LABELS}
TARGETS = {"target_features": TARGET_FEATURES, "target_kernel": TARGET_KERNEL}
CROSS_ENTROPY, LOG_PROBS, DIVERGENCE = "linear_softmax_cross_entropy", "linear_log_probs", "linear_kl_divergence"
TOP_K = "linear_kl_divergence_with_top_k_targets"
OPS = {
    CROSS_ENTROPY: Op(LABELLED, {"with_components": True, "reduction": "none", **OPTIONS}),
    LOG_PROBS: Op(LABELLED, {"with_entropy": True, **CAPPED}),
    DIVERGENCE: Op({**LAYER, **TARGETS}, {"reduction": "none"}, {"target_gradients": True}),
    TOP_K: Op({**LAYER, **top_k_targets()}, {"reduction": "none"}),
}
OF_LABELS = CROSS_ENTROPY, LOG_PROBS
OPTIONAL = {  # arrays: an option that is True is replaced by them
    "bias": BIAS,
    "target_bias": TARGET_BIAS,
    "weights": WEIGHTS,
    "class_weights": CLASS_WEIGHTS,
    "where": MASK,
    "class_mask": CLASS_MASK,
}
ARRAYS = {  # all that may be given
    CROSS_ENTROPY: dict.fromkeys(("where", "bias", "weights", "class_weights"), True),
    LOG_PROBS: dict.fromkeys(("where", "bias"), True),
    DIVERGENCE: dict.fromkeys(("where", "bias", "target_bias"), True),
    TOP_K: {"where": TARGET_MASK, "bias": True},
}
WITH_GRADIENTS = "features", "kernel", "target_features", "target_kernel", "bias", "target_bias", "weights"


def split_call(op, **options):
    """The arrays of a call that have gradients, and all that is given besides."""
    given = {name: value for name, value in options.items() if value is not False or name not in OPTIONAL}
    others = OPS[op].arguments | {k: OPTIONAL[k] if v is True and k in OPTIONAL else v for k, v in given.items()}
    # JAX leaves an array that a function closes over as it was when it was traced with 64 bits.
    others = {name: x.copy() if isinstance(x, np.ndarray) else x for name, x in others.items()}
    return {name: others.pop(name) for name in WITH_GRADIENTS if name in others}, others


def outputs_of(op, **arguments):
    """All that an op gives."""
    return jax.tree.leaves(getattr(losses, op)(**OPS[op].fixed, **arguments))


def total_of(op, **others):
    """The sum of all outputs, with cotangents that are not all alike, as a function of the arrays with gradients."""

    def weighted(i, x):
        x = x.astype(jnp.result_type(x, "float32"))
        return jnp.sum(COTANGENTS[i, : x.size].reshape(x.shape).astype(x.dtype) * x) if x.ndim else (1.7 + i) * x

    return lambda floats: sum(weighted(i, x) for i, x in enumerate(outputs_of(op, **others | floats)))


# The forms, and what is asserted.


def use_platform(choose, name):
    """With blocks and tiles so small that there are several, the last one ragged or with classes that it repeats."""
    choose(linear={"class_tile_elements": 60})
    if name == "accelerator":  # which also runs on a CPU
        sizes = {"least_logits": 100, "most_logits": 100, "least_tokens_if_masked": 12, "most_tokens_of_one_block": 8}
        choose(form="accelerator", linear={"fewest_tokens": 12, "token_block_elements_on_accelerators": 0, **sizes})


def in_turn(names, placed, cases):
    """Parameters with a platform in front: those that have one, by default, and as exhaustive ones others in turn."""
    turns = [(("accelerator", "cpu")[i // 2 % 2], *case) for i, case in enumerate(cases)]
    return parametrize(("platform", *names), placed, exhaustive=turns, indirect=["platform"])


def assert_all_zero(tree):
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0), tree)


def bad_rows(x):
    return np.isnan(np.asarray(x).reshape(len(x), -1)).any(-1).nonzero()[0].tolist()


def second_derivatives(fn, args):
    """Along some directions, forward over reverse and reverse over reverse."""
    along, gradient = jax.tree.map(jnp.cos, args), jax.grad(fn)
    slope = lambda args: sum(jax.tree.leaves(jax.tree.map(lambda a, b: jnp.sum(a * b), gradient(args), along)))  # noqa: E731
    return jax.jvp(gradient, (args,), (along,))[1], jax.grad(slope)(args)


# Of the tokens, and of the kernel.
SPLITS = {"tokens": (P("x"), P()), "tokens and classes": (P("x"), P(None, "y")), "classes": (P(), P(None, ("x", "y")))}


def over_meshes(test):
    """Over explicit axes, and in a `jax.shard_map`."""
    by_kind = parametrize("kind", [AxisType.Explicit], exhaustive=[AxisType.Auto])
    return by_kind(parametrize("split", ["tokens and classes"], exhaustive=SPLITS)(test))


def assert_same_over_devices(split, kind, outputs_of, weighted, layer, others):
    """The outputs of a layer and arrays of the tokens, and the gradients of what `weighted` makes of them."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind,) * 2)
    tokens, classes = SPLITS[split]
    specs = {"features": tokens, "kernel": classes, "bias": P(*classes[1:])}, dict.fromkeys(others, tokens)

    def step(layer, others, outputs_of=outputs_of):
        fn = lambda layer: (lambda out: (weighted(out), out))(outputs_of(layer, others))  # noqa: E731
        return jax.value_and_grad(fn, has_aux=True)(layer)

    desired = jax.jit(step)(layer, others)
    if kind == AxisType.Explicit:
        put = lambda arrays, specs: {k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in arrays.items()}  # noqa: E731
        with jax.set_mesh(mesh):
            actual = jax.jit(step)(*map(put, (layer, others), specs))
    else:
        names = classes[1] if len(classes) > 1 else None
        local = functools.partial(outputs_of, axis_name=names)
        split_outputs = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=tokens)
        actual = jax.jit(functools.partial(step, outputs_of=split_outputs))(layer, others)
    assert_close(actual, desired, rtol=2e-5, atol=2e-6)
