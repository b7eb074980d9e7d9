"""The most probable classes of a linear layer, and the logsumexps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import assert_close
from linear_cases import (
    CLASS_MASK,
    CLASSES,
    CROSS_ENTROPY,
    FEATURES,
    KERNEL,
    LOG_PROBS,
    MASK,
    OPS,
    outputs_of,
    singles,
    split_call,
)

from masksafe import losses

ROUNDED = {"features": np.round(FEATURES), "kernel": np.round(KERNEL)}  # many classes have the largest logit


@pytest.mark.parametrize("op", [CROSS_ENTROPY, LOG_PROBS])
def test_ties_go_to_the_first_class_and_nothing_else_changes(platform, op):
    floats, others = split_call(op, where=True, class_mask=True, block_size=9, **OPS[op].all_outputs)

    @jax.jit
    def all_of(floats):
        def step(**more):
            def total(floats):
                outputs = outputs_of(op, **others | floats, **more)
                return sum(map(jnp.sum, outputs[:2])), outputs

            return jax.value_and_grad(total, has_aux=True)(floats)

        x = jnp.where(CLASS_MASK, 3 * jnp.tanh(jnp.matmul(floats["features"], floats["kernel"]) / 3), -jnp.inf)
        found = jnp.where(MASK, jnp.argmax(x, -1), -1), jnp.where(MASK, jax.nn.logsumexp(x, -1), 0)
        return step(), step(with_predictions=True), found

    without, ((value, [*same, predictions, logsumexps]), gradients), (best, lse) = all_of(singles(floats | ROUNDED))
    assert [predictions.dtype, logsumexps.dtype] == [jnp.int32, jnp.float32]
    np.testing.assert_array_equal(predictions, best)
    assert_close(logsumexps, lse, rtol=1e-6, atol=1e-6)
    assert_close(((value, same), gradients), without, rtol=1e-6, atol=1e-6)


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


@pytest.mark.parametrize("options", [{}, {"z_loss": 0.1}, {"label_smoothing": 0.1}, {"with_components": True}], ids=str)
def test_a_class_weight_of_0_masks_no_prediction(platform, options):
    """A NaN shows there, but neither in the loss, to which its token adds nothing, nor in the gradients of that."""
    rows, labels = np.float32([[3, 1, 0], [0, 2, 5], [1, 1, 0], [np.nan, 0, 0]]), np.array([0, 1, 2, 1])
    class_weights, is_plain = np.float32([1, 0, 1]), not {"z_loss", "label_smoothing"} & set(options)

    @jax.jit
    def step(rows, class_weights, kernel):
        def loss(rows, kernel):
            of = functools.partial(losses.linear_softmax_cross_entropy, class_weights=class_weights)
            value, *_, predictions, logsumexps = of(rows, kernel, labels, with_predictions=True, **options)
            return value, (predictions, logsumexps, of(rows, kernel, labels, **options))

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(rows, kernel)

    kernel = np.eye(3, dtype=np.float32)
    (value, (*found, without)), gradients = step(rows, class_weights, kernel)
    (_, expected), _ = step(rows, np.ones(3, np.float32), kernel)
    assert_close(found, list(expected[:2]), rtol=1e-6)
    np.testing.assert_array_equal(found[0], [0, 2, 0, -1])
    np.testing.assert_array_equal(np.isnan(found[1]), np.isnan(rows[:, 0]))
    np.testing.assert_allclose(value, jax.tree.leaves(without)[0], rtol=1e-6)
    for x in (value, *gradients) if is_plain else ():
        assert np.isfinite(x).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
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
    for name in (CROSS_ENTROPY, LOG_PROBS):
        fn = getattr(losses, name)
        with pytest.raises(ValueError, match=f"^{name}: with_predictions: got True for 16777216 classes"):
            jax.eval_shape(functools.partial(fn, with_predictions=True), *shapes)
