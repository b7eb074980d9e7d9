"""The losses of a linear layer: how each is called, its formula with all logits in memory, and what the tests share."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import assert_close

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
DIRECTIONS, REDUCTIONS = ("forward", "reverse", "jensen_shannon"), ("mean", "sum", "none")

singles = functools.partial(jax.tree.map, lambda x: np.float32(x) if np.asarray(x).dtype == np.float64 else x)


# The formulas, with all logits in memory.


def log_softmax(features, kernel, bias=0.0, temperature=1.0, logit_soft_cap=None):
    logits = jnp.matmul(features, kernel) + bias
    logits = logit_soft_cap * jnp.tanh(logits / logit_soft_cap) if logit_soft_cap else logits
    return jax.nn.log_softmax(logits / temperature), jax.nn.logsumexp(logits / temperature, -1)


def with_predictions_of(outputs, log_probs, lse, where, with_predictions):
    """Outputs, and maybe the most probable classes and the logsumexps."""
    best = jnp.argmax(log_probs, -1).astype("int32")
    return (*outputs, jnp.where(where, best, -1), jnp.where(where, lse, 0)) if with_predictions else tuple(outputs)


def cross_entropy(features, kernel, labels, reduction="mean", with_components=False, with_predictions=False, **options):
    smoothing, z_loss = (options.pop(name, 0.0) for name in ("label_smoothing", "z_loss"))
    v, w, where = options.pop("weights", 1.0), options.pop("class_weights", 1.0), options.pop("where", True)
    log_probs, lse = log_softmax(features, kernel, **options)
    v, w = jnp.where(where, v * jnp.ones(lse.shape), 0), w * jnp.ones(log_probs.shape[-1])
    of_label = w[labels] * -jnp.take_along_axis(log_probs, labels[..., None], -1)[..., 0]
    of_all = jnp.mean(w * -log_probs, -1)
    parts = v * ((1 - smoothing) * of_label + smoothing * of_all), v * z_loss * lse**2
    total = {"none": 1, "sum": 1, "mean": jnp.sum(v * w[labels])}[reduction]
    parts = tuple((x if reduction == "none" else jnp.sum(x)) / total for x in parts)
    return with_predictions_of(parts if with_components else [sum(parts)], log_probs, lse, where, with_predictions)


def log_probs_and_entropy(features, kernel, labels, where=True, with_entropy=False, with_predictions=False, **options):
    log_probs, lse = log_softmax(features, kernel, **options)
    of_label = jnp.take_along_axis(log_probs, labels[..., None], -1)[..., 0]
    outputs = [jnp.where(where, x, 0) for x in (of_label, -jnp.sum(jnp.exp(log_probs) * log_probs, -1))]
    return with_predictions_of(outputs if with_entropy else outputs[:1], log_probs, lse, where, with_predictions)


def divergence(log_p, log_q, where=True, reduction="mean", direction="forward", beta=0.5):
    kl = lambda a, b: jnp.sum(jnp.exp(a) * (a - b), -1)  # noqa: E731
    log_m = jnp.logaddexp(log_p + np.log(beta), log_q + np.log(1 - beta))
    losses = {
        "forward": lambda: kl(log_p, log_q),
        "reverse": lambda: kl(log_q, log_p),
        "jensen_shannon": lambda: beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m),
    }[direction]()
    losses = jnp.where(where, losses, 0)
    total = {"none": 1, "sum": 1, "mean": jnp.sum(jnp.broadcast_to(where, losses.shape))}[reduction]
    return (losses if reduction == "none" else jnp.sum(losses)) / total


def kl_divergence(features, kernel, target_features, target_kernel, bias=0.0, temperature=1.0, **options):
    log_q, _ = log_softmax(features, kernel, bias, temperature)
    log_p, _ = log_softmax(target_features, target_kernel, options.pop("target_bias", 0.0), temperature)
    return divergence(log_p, log_q, **options)


def top_k_divergence(
    features, kernel, target_log_probs, target_classes, where=True, bias=0.0, temperature=1.0, rest="bucket", **options
):
    log_q, _ = log_softmax(features, kernel, bias, temperature)
    sides = target_log_probs, jnp.take_along_axis(log_q, target_classes, -1)
    if np.ndim(where) > 1:  # a masked target has no probability
        sides, where = [jnp.where(where, x, -1e30) for x in sides], where.any(-1)
    of_others = lambda x: jnp.log1p(-jnp.sum(jnp.exp(x), -1, keepdims=True))  # noqa: E731
    with_rest = {"bucket": lambda x: jnp.concatenate([x, of_others(x)], -1), "drop": jax.nn.log_softmax}[rest]
    return divergence(*map(with_rest, sides), where, **options)


# The ops.


def top_k_targets(k=K, class_mask=CLASS_MASK):
    """The most probable classes of a teacher, among those that are not masked."""
    logits = np.where(class_mask, TARGET_FEATURES @ TARGET_KERNEL + TARGET_BIAS, -np.inf)
    classes = np.argsort(-logits)[:, :k]
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return {"target_log_probs": np.take_along_axis(log_probs, classes, -1), "target_classes": classes}


class Op(NamedTuple):
    formula: Callable[..., Any]
    arguments: dict[str, np.ndarray]  # of the ops, by name
    all_outputs: dict[str, Any]  # options with which it has as many outputs as it can
    fixed: dict[str, Any] = {}  # noqa: RUF012 - options of all tests


LAYER = {"features": FEATURES, "kernel": KERNEL}
LABELLED = {**LAYER, "labels": LABELS}
TARGETS = {"target_features": TARGET_FEATURES, "target_kernel": TARGET_KERNEL}
CROSS_ENTROPY, LOG_PROBS, DIVERGENCE, TOP_K = (
    "linear_softmax_cross_entropy",
    "linear_log_probs",
    "linear_kl_divergence",
    "linear_kl_divergence_with_top_k_targets",
)
OPS = {
    CROSS_ENTROPY: Op(cross_entropy, LABELLED, {"with_components": True, "reduction": "none", **OPTIONS}),
    LOG_PROBS: Op(log_probs_and_entropy, LABELLED, {"with_entropy": True, **CAPPED}),
    DIVERGENCE: Op(kl_divergence, {**LAYER, **TARGETS}, {"reduction": "none"}, {"target_gradients": True}),
    TOP_K: Op(top_k_divergence, {**LAYER, **top_k_targets()}, {"reduction": "none"}),
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
OF_CLASSES = "kernel", "bias", "target_kernel", "target_bias", "class_weights"
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


def formula_of(op, block_size=None, class_mask=None, **arguments):
    """The same of its formula, of arrays without the masked classes."""
    if class_mask is None:
        return jax.tree.leaves(OPS[op].formula(**arguments))
    kept, numbers = np.flatnonzero(class_mask), np.cumsum(class_mask) - 1
    arguments = {name: x[..., kept] if name in OF_CLASSES else x for name, x in arguments.items()}
    arguments |= {name: numbers[arguments[name]] for name in ("labels", "target_classes") if name in arguments}
    outputs = jax.tree.leaves(OPS[op].formula(**arguments))
    return [jnp.where(x < 0, x, jnp.asarray(kept)[x]) if x.dtype == jnp.int32 else x for x in outputs]


def total_of(fn, op, **others):
    """The sum of all outputs, with cotangents that are not all alike, as a function of the arrays with gradients."""

    def weighted(i, x):
        x = x.astype(jnp.result_type(x, "float32"))
        return jnp.sum(COTANGENTS[i, : x.size].reshape(x.shape).astype(x.dtype) * x) if x.ndim else (1.7 + i) * x

    return lambda floats: sum(weighted(i, x) for i, x in enumerate(fn(op, **others | floats)))


def ours_and_formula(op, class_mask=False, **options):
    """The totals of an op and of its formula, and their arrays; a class mask that is "bias" is one of -inf in it."""
    floats, others = split_call(op, **options)
    mask = {"class_mask": CLASS_MASK} if class_mask is not False else {}
    formula = total_of(formula_of, op, **mask, **others)
    if class_mask != "bias":
        return total_of(outputs_of, op, **mask, **others), formula, floats

    def by_bias(floats):
        bias = jnp.where(CLASS_MASK, floats.get("bias", 0.0), -jnp.inf)
        return total_of(outputs_of, op, **others)(floats | {"bias": bias})

    return by_bias, formula, floats


# The forms, and what is asserted.


def use_platform(choose, name):
    """With blocks and tiles so small that there are several, the last one ragged or with classes that it repeats."""
    choose(linear={"class_tile_elements": 60})
    if name == "elsewhere":  # which also runs on a CPU
        sizes = {"least_logits": 100, "most_logits": 100, "least_tokens_if_masked": 12, "most_tokens_of_one_block": 8}
        choose(form="elsewhere", linear={"fewest_tokens": 12, "token_block_elements_elsewhere": 0, **sizes})


def in_turn(names, placed, cases):
    """Parameters with a platform in front: those that have one, and others in turn of one and the other."""
    turns = [(("elsewhere", "cpu")[i // 2 % 2], *case) for i, case in enumerate(cases)]
    return pytest.mark.parametrize(("platform", *names), [*placed, *turns], indirect=["platform"])


def assert_same_function(fns, args, of=jax.value_and_grad, rtol=1e-11, atol=1e-12):
    """The value and the gradients of two functions, or other derivatives `of(fn)`, in float64."""
    with jax.enable_x64(True):
        assert_close(*jax.jit(lambda args: [of(fn)(args) for fn in fns])(args), rtol=rtol, atol=atol)


def assert_all_zero(tree):
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0), tree)


def bad_rows(x):
    return np.isnan(np.asarray(x).reshape(len(x), -1)).any(-1).nonzero()[0].tolist()


def second_derivatives(fn, args):
    """Along some directions, forward over reverse and reverse over reverse."""
    along, gradient = jax.tree.map(jnp.cos, args), jax.grad(fn)
    slope = lambda args: sum(jax.tree.leaves(jax.tree.map(lambda a, b: jnp.sum(a * b), gradient(args), along)))  # noqa: E731
    return jax.jvp(gradient, (args,), (along,))[1], jax.grad(slope)(args)
