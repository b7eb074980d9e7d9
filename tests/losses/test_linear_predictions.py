"""The most probable classes of a linear layer, and the logsumexps: `jnp.argmax` and `logsumexp` of all logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
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
    assert_trees_close,
    forms,
    singles,
)

from masksafe import losses

OPTIONS = {"logit_soft_cap": 3.0, "block_size": 9}
OPS = {
    "components": functools.partial(
        losses.linear_softmax_cross_entropy, label_smoothing=0.1, z_loss=0.01, with_components=True
    ),
    "mean": losses.linear_softmax_cross_entropy,
    "log_probs": functools.partial(losses.linear_log_probs, temperature=0.7),
    "entropy": functools.partial(losses.linear_log_probs, temperature=0.7, with_entropy=True),
}
EACH = pytest.mark.parametrize("op", ["components", *map(forms, ["mean", "log_probs", "entropy"])])
CLASS_MASK = np.arange(CLASSES) != 3
TIED = np.round(KERNEL)  # of features that are rounded too: many classes have the largest logit


def expected(op, features, kernel, bias=0, where=MASK):
    logits = 3 * jnp.tanh((features @ kernel + bias) / 3)
    logits = jnp.where(CLASS_MASK, logits, -jnp.inf) / (0.7 if op in ("log_probs", "entropy") else 1)
    best, logsumexps = jnp.argmax(logits, -1), jax.nn.logsumexp(logits, -1)
    return jnp.where(where, best, -1), jnp.where(where, logsumexps, 0)


@EACH
def test_they_are_those_of_all_logits_and_change_nothing_else(platform, op):
    fn = functools.partial(OPS[op], where=MASK, class_mask=CLASS_MASK, **OPTIONS)

    def total(features, kernel, bias, cotangents, **options):
        outputs = jax.tree.leaves(fn(features, kernel, LABELS, bias=bias, **options))
        return sum(jnp.sum(c * x) for c, x in zip(cotangents, outputs, strict=True)), outputs

    @jax.jit
    def both(*args):
        gradient = functools.partial(jax.value_and_grad(total, (0, 1, 2), has_aux=True), *args)
        others = jax.tree.leaves(jax.eval_shape(fn, *args[:2], LABELS))
        ones, number = [1.0] * len(others), [0.0, 0.0]
        of_lse = lambda *args: jnp.vdot(jnp.cos(jnp.arange(TOKENS)), expected(op, *args)[1])  # noqa: E731
        of_ours = gradient([0.0] * len(others) + [0.0, jnp.cos(jnp.arange(TOKENS))], with_predictions=True)[1]
        return (
            gradient(ones),
            gradient(ones + number, with_predictions=True),
            (of_ours, jax.grad(of_lse, (0, 1, 2))(*args)),
            expected(op, *args),
        )

    for args in (singles((FEATURES, KERNEL, BIAS)), singles((np.round(FEATURES), TIED, np.zeros(CLASSES)))):
        ((value, outputs), gradients), ((again, with_more), gradients_again), of_lse, (best, lse) = both(*args)
        *same, predictions, logsumexps = with_more
        assert predictions.dtype == jnp.int32
        assert logsumexps.dtype == jnp.float32
        np.testing.assert_array_equal(predictions, best)
        assert_trees_close(logsumexps, lse, rtol=1e-6, atol=1e-6)
        assert_trees_close((again, same, gradients_again), (value, outputs, gradients), rtol=1e-6, atol=1e-6)
        assert_trees_close(*of_lse, rtol=1e-4, atol=1e-5)


def test_what_is_bad_or_excluded(platform):
    """A label out of range, a NaN, a masked token, a weight of 0; excluded classes, all of them too; garbage."""
    row = np.isin(np.arange(CLASSES), [2, 5]).astype("float32")
    rows = np.stack([row, row, np.where(np.arange(CLASSES) == 9, np.nan, row), row, row]).astype("float32")
    labels, where, weights = np.array([1, -1, 1, 1, 1]), np.arange(5) != 3, np.float32([1, 1, 1, 1, 0])

    @jax.jit
    def of(rows, bias):
        options = {"bias": bias, "where": where, "weights": weights, "with_predictions": True}
        return losses.linear_softmax_cross_entropy(rows, jnp.eye(CLASSES), labels, **options)[1:]

    number = CLASSES - 2
    for bias, best, total in ((0, 2, number + 2 * np.e), (2, 5, number - 0 + np.e), (None, -1, 0)):
        excluded = np.arange(CLASSES) == 2 if bias else np.full(CLASSES, bias is None)
        with np.errstate(divide="ignore"):
            predictions, logsumexps = of(rows, np.where(excluded, -np.inf, 0).astype("float32"))
            np.testing.assert_allclose(logsumexps[:2], np.log([total] * 2), rtol=1e-6)
        np.testing.assert_array_equal(predictions, [best, best, -1, -1, -1])
        assert np.isnan(logsumexps[2])
        np.testing.assert_array_equal(logsumexps[3:], 0)
    clean, bias = of(rows, np.zeros(CLASSES, "float32")), np.zeros(CLASSES, "float32")
    for garbage in (np.nan, np.inf, -np.inf):
        dirty = of(np.where(where[:, None], rows, np.float32(garbage)), bias)
        jax.tree.map(np.testing.assert_array_equal, dirty, clean)


@pytest.mark.forms
@EACH
def test_every_derivative(platform, op):
    def total(fn, *args):
        *_, logsumexps = fn(*args)
        return jnp.sum(jnp.sin(logsumexps))

    def ours(features, kernel, bias):
        options = {"bias": bias, "where": MASK, "class_mask": CLASS_MASK, "with_predictions": True, **OPTIONS}
        return OPS[op](features, kernel, LABELS, **options)

    plain = functools.partial(total, functools.partial(expected, op))
    assert_every_derivative(functools.partial(total, ours), plain, (FEATURES, KERNEL, BIAS))


@pytest.mark.parametrize("kind", ["shard_map", forms("explicit")])
def test_classes_split_over_devices(platform, kind):
    """Ties between devices too."""
    types = (AxisType.Auto if kind == "shard_map" else AxisType.Explicit,) * 2
    mesh, specs = jax.make_mesh((2, 4), ("x", "y"), axis_types=types), (P("x"), P(None, "y"), P("x"), P("x"), P("y"))

    def step(features, kernel, labels, where, class_mask, axis_name=None):
        def loss(f, k):
            options = {"where": where, "class_mask": class_mask, "axis_name": axis_name, "with_predictions": True}
            *_, predictions, logsumexps = losses.linear_softmax_cross_entropy(f, k, labels, **OPTIONS, **options)
            total = jnp.sum(jnp.square(logsumexps))
            return jax.lax.psum(total, "x") if axis_name else total, (predictions, logsumexps)

        return jax.grad(loss, (0, 1), has_aux=True)(features, kernel)

    local = functools.partial(step, axis_name="y")
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(specs[:2], (P("x"), P("x")))))
    run, plain = run if kind == "shard_map" else jax.jit(step), jax.jit(step)
    for args in (singles((FEATURES, KERNEL)), singles((np.round(FEATURES), TIED))):
        arrays = *args, LABELS, MASK, CLASS_MASK
        with jax.set_mesh(mesh):
            actual = run(*(jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs, strict=True)))
        desired = plain(*arrays)
        np.testing.assert_array_equal(actual[1][0], desired[1][0])
        np.testing.assert_array_equal(actual[1][0], expected("mean", *args)[0])
        assert_trees_close(actual, desired, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", forms("bfloat16")])
def test_the_largest_is_found_under_a_soft_cap_in_every_row(dtype):
    """It is compared in another loop than the one that finds it."""
    rng = np.random.default_rng(1)
    features, kernel = (rng.normal(size=shape).astype(dtype) for shape in ((256, 16), (16, 3001)))
    of = functools.partial(losses.linear_softmax_cross_entropy, logit_soft_cap=7.3, with_predictions=True)
    _, predictions, _ = jax.jit(of)(features, kernel, np.zeros(256, int))
    logits = jax.jit(lambda f, k: 7.3 * jnp.tanh(jnp.matmul(f, k, preferred_element_type="float32") / 7.3))
    np.testing.assert_array_equal(predictions, jnp.argmax(logits(features, kernel), -1))


def test_more_classes_than_the_dtype_of_sums_can_count_are_refused():
    shapes = [jax.ShapeDtypeStruct(s, d) for s, d in (((2, 1), "float32"), ((1, 2**24), "float32"), ((2,), "int32"))]
    for fn, name in ((OPS["mean"], "linear_softmax_cross_entropy"), (OPS["entropy"], "linear_log_probs")):
        with pytest.raises(ValueError, match=f"^{name}: with_predictions: got True for 16777216 classes"):
            jax.eval_shape(functools.partial(fn, with_predictions=True), *shapes)
