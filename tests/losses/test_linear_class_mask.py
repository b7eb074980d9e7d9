"""Masked classes of a linear layer, as of a padded vocabulary: the losses of all logits under a mask of elements."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from linear_cases import (
    BIAS,
    CLASSES,
    FEATURES,
    KERNEL,
    LABELS,
    MASK,
    TOKENS,
    assert_every_derivative,
    assert_same_function,
    assert_trees_close,
    forms,
    singles,
    use_platform,
)

import masksafe
from masksafe import losses

CLASS_MASK = np.arange(CLASSES) % 3 != 1
LABELS = np.flatnonzero(CLASS_MASK)[LABELS % CLASS_MASK.sum()]
CLASS_WEIGHTS = np.linspace(0.3, 2, CLASSES)
CAP, SMOOTHING, Z_LOSS = 3.0, 0.1, 0.01
COTANGENTS = np.cos(np.arange(TOKENS))
OPS = "linear_softmax_cross_entropy", "linear_log_probs"


def outputs(op, features, kernel, labels=LABELS, class_weights=None, **options):
    """All outputs of an op, with a soft cap."""
    options = {"logit_soft_cap": CAP, "block_size": 9, **options}
    if op == "linear_log_probs":
        return losses.linear_log_probs(features, kernel, labels, with_entropy=True, temperature=0.7, **options)
    options |= {"label_smoothing": SMOOTHING, "z_loss": Z_LOSS, "with_components": True, "reduction": "none"}
    return losses.linear_softmax_cross_entropy(features, kernel, labels, class_weights=class_weights, **options)


def dense(op, features, kernel, bias, labels=LABELS, where=MASK):
    """The same of all logits, under a mask of elements."""
    logits, where = CAP * jnp.tanh((features @ kernel + bias) / CAP), where[:, None] & CLASS_MASK
    if op == "linear_log_probs":
        return losses.log_probs(logits, labels, where=where, with_entropy=True, temperature=0.7)
    options = {"label_smoothing": SMOOTHING, "z_loss": Z_LOSS, "with_components": True}
    return losses.softmax_cross_entropy_with_integer_labels(logits, labels, where=where, **options)


def total(of_outputs):
    return sum(jnp.vdot(COTANGENTS[: x.size].astype(x.dtype) + i, x) for i, x in enumerate(of_outputs))


def excluded(bias, by):
    """The options that exclude the classes."""
    return {"bias": bias, "class_mask": CLASS_MASK} if by == "mask" else {"bias": jnp.where(CLASS_MASK, bias, -jnp.inf)}


@pytest.mark.parametrize("platform", [forms("cpu"), "elsewhere"], indirect=True)
@pytest.mark.parametrize("by", ["mask", "bias"])
@pytest.mark.parametrize("op", OPS)
def test_value_and_gradients_are_those_of_all_logits(platform, op, by):
    of_layer = lambda f, k, b: total(outputs(op, f, k, where=MASK, **excluded(b, by)))  # noqa: E731
    of_logits = lambda f, k, b: total(dense(op, f, k, b))  # noqa: E731
    assert_same_function(of_layer, of_logits, (FEATURES, KERNEL, BIAS))


@pytest.mark.forms
@pytest.mark.parametrize("by", ["mask", "bias"])
@pytest.mark.parametrize("op", OPS)
def test_every_derivative(platform, op, by):
    of_layer = lambda f, k, b: total(outputs(op, f, k, where=MASK, **excluded(b, by)))  # noqa: E731

    def of_logits(features, kernel, bias):
        with masksafe.forward_mode():
            return total(dense(op, features, kernel, bias))

    assert_every_derivative(of_layer, of_logits, (FEATURES, KERNEL, BIAS))


@functools.cache
def step(op, platform):
    """Outputs and gradients of each reduction, one program for all arrays; of a form that `platform` names."""

    def of(features, kernel, bias, class_weights, labels, class_mask, cotangents):
        options = {"where": MASK, "bias": bias, "class_mask": class_mask}
        if op == "linear_softmax_cross_entropy":
            options |= {"class_weights": class_weights}

        def both(f, k, b):
            out = outputs(op, f, k, labels, **options | {"bias": b})
            if op == "linear_log_probs":
                return out
            of_mean = options | {"bias": b, "label_smoothing": SMOOTHING, "logit_soft_cap": CAP, "block_size": 9}
            return *out, losses.linear_softmax_cross_entropy(f, k, labels, **of_mean)

        found, reverse = jax.vjp(both, features, kernel, bias)
        return found, reverse(tuple(cotangents * jnp.ones_like(x) for x in found))

    return jax.jit(of)


@pytest.mark.parametrize("platform", [forms("cpu"), "elsewhere"], indirect=True)
@pytest.mark.parametrize("op", OPS)
def test_masked_classes_touch_nothing_and_nothing_left_is_zero(platform, op):
    def outcome(garbage, class_mask, label=None, cotangent=1.0):
        kernel, bias, weights = (np.where(CLASS_MASK, x, garbage) for x in (KERNEL, BIAS, CLASS_WEIGHTS))
        labels = LABELS if label is None else np.full_like(LABELS, label)
        return step(op, platform)(
            *singles((FEATURES, kernel, bias, weights)), labels, class_mask, np.float32(cotangent)
        )

    clean = outcome(0, CLASS_MASK)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(clean))
    for garbage in (np.nan, np.inf, -np.inf, 1e38):
        jax.tree.map(np.testing.assert_array_equal, outcome(garbage, CLASS_MASK), clean)
    _, (_, d_kernel, d_bias) = clean
    assert not d_kernel[:, ~CLASS_MASK].any()
    assert not d_bias[~CLASS_MASK].any()
    nothing = outcome(np.nan, np.zeros_like(CLASS_MASK), label=-1, cotangent=np.inf)
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0), nothing)


def test_weights_of_the_classes_that_are_left(small_tiles):
    """Removal of the others, and of their weights; and a label at a masked class is seen whatever its weight."""
    renumbered = (np.cumsum(CLASS_MASK) - 1)[LABELS]

    @jax.jit
    def both(kernel, bias, weights, labels):
        fn = functools.partial(outputs, OPS[0], where=MASK)
        removed = fn(FEATURES, kernel[:, CLASS_MASK], renumbered, weights[CLASS_MASK], bias=bias[CLASS_MASK])
        return fn(FEATURES, kernel, labels, weights, bias=bias, class_mask=CLASS_MASK), removed

    args, weights = singles((KERNEL, BIAS)), np.where(CLASS_MASK, CLASS_WEIGHTS, 0).astype("float32")
    assert_trees_close(*both(*args, weights, LABELS), rtol=2e-6, atol=1e-6)
    masked = np.where(np.arange(TOKENS) % 2, LABELS, np.flatnonzero(~CLASS_MASK)[0])
    np.testing.assert_array_equal(np.isinf(both(*args, weights, masked)[0][0]), MASK & (masked != LABELS))


@pytest.mark.parametrize("op", OPS)
def test_a_label_at_a_masked_class(op):
    labels = np.where(np.arange(TOKENS) == np.flatnonzero(MASK)[2], np.flatnonzero(~CLASS_MASK)[1], LABELS)
    of = jax.jit(lambda f, k, y: outputs(op, f, k, y, where=MASK, class_mask=CLASS_MASK))
    args = *singles((FEATURES, KERNEL)), labels
    with jax.numpy_dtype_promotion("strict"):
        found, of_dense = of(*args), jax.jit(functools.partial(dense, op, bias=np.float32(0)))(*args[:2], labels=labels)
    np.testing.assert_array_equal(np.isinf(found[0]), MASK & (labels != LABELS))
    assert_trees_close(found, of_dense, rtol=1e-5, atol=1e-5)
    with masksafe.label_checks("raise"):
        jax.block_until_ready(of(*args[:2], np.where(MASK, LABELS, -100)))
        with pytest.raises(Exception, match=rf"{op}: 1 of {MASK.sum()} labels are at a masked class; first at \("):
            jax.block_until_ready(of(*args))
    with masksafe.label_checks("checkify"):
        error, _ = jax.jit(checkify.checkify(lambda *args: outputs(op, *args, where=MASK, class_mask=CLASS_MASK)))(
            *args
        )
    assert "at a masked class" in error.get()


SPECS = P("x"), P(None, "y"), P("y"), P("x"), P("x")


@pytest.mark.parametrize("op", [OPS[0], forms(OPS[1])])
@pytest.mark.parametrize("kind", ["shard_map", *map(forms, ["explicit", "explicit, mask whole"])])
def test_classes_split_over_devices(op, kind, choose):
    use_platform(choose, "cpu")
    mesh = jax.make_mesh(
        (2, 4), ("x", "y"), axis_types=(AxisType.Auto if kind == "shard_map" else AxisType.Explicit,) * 2
    )

    def step(features, kernel, bias, labels, where, class_mask, axis_name=None):
        def loss(f, k, b):
            found = outputs(op, f, k, labels, bias=b, where=where, class_mask=class_mask, axis_name=axis_name)
            of_tokens = sum((1 + i) * jnp.sum(x) for i, x in enumerate(found))
            return jax.lax.psum(of_tokens, "x") if axis_name else of_tokens

        return jax.value_and_grad(loss, (0, 1, 2))(features, kernel, bias)

    args = *singles((FEATURES, KERNEL, BIAS)), LABELS, MASK
    desired = jax.jit(step)(*args, CLASS_MASK)
    with jax.set_mesh(mesh):
        specs = *SPECS, P() if kind == "explicit, mask whole" else P("y")
        arrays = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip((*args, CLASS_MASK), specs, strict=True)]
        if kind == "shard_map":
            local = functools.partial(step, axis_name="y")
            run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(P(), SPECS[:3])))
        else:
            run = jax.jit(step)
        actual = run(*arrays)
        nothing = run(*arrays[:-1], jax.device_put(np.zeros_like(CLASS_MASK), arrays[-1].sharding))
    assert_trees_close(actual, desired, rtol=1e-4, atol=1e-5)
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0), nothing)


@pytest.mark.parametrize(
    ("class_mask", "error", "text"),
    [
        (np.ones((TOKENS, CLASSES), bool), ValueError, r"class_mask: got shape \(40, 24\)"),
        (np.ones(CLASSES), TypeError, "class_mask: got dtype"),
    ],
)
@pytest.mark.parametrize("op", OPS)
def test_bad_input_is_refused(op, class_mask, error, text):
    with pytest.raises(error, match=f"^{op}: {text}"):
        outputs(op, FEATURES, KERNEL, class_mask=class_mask)
