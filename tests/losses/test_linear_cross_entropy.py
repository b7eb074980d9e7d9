"""What the linear cross-entropy has of its own: weights of tokens and of classes, a z-loss, tiles."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import assert_close
from linear_cases import (
    BAD,
    BIAS,
    CLASS_WEIGHTS,
    CLASSES,
    CROSS_ENTROPY,
    FEATURES,
    KERNEL,
    LABELS,
    MASK,
    OPTIONS,
    REDUCTIONS,
    TOKENS,
    WEIGHTS,
    WIDTH,
    bad_rows,
    in_turn,
    outputs_of,
    singles,
    total_of,
    use_platform,
)

from masksafe.losses import linear_softmax_cross_entropy
from masksafe.losses._rows._packing import Packed

pytestmark = pytest.mark.usefixtures("small_tiles")


# Weights. What has no weight is gone, and nothing else.


def test_a_weight_of_0_and_weights_of_classes_have_no_gradient():
    def loss(weights, class_weights):
        options = {"labels": LABELS, "weights": weights, "class_weights": class_weights, **OPTIONS}
        return linear_softmax_cross_entropy(FEATURES, KERNEL, **options)

    of_tokens, of_classes = jax.jit(jax.grad(loss, (0, 1)))(np.where(MASK, WEIGHTS, 0), CLASS_WEIGHTS)
    np.testing.assert_array_equal(of_tokens == 0, ~MASK)
    assert not of_classes.any()


def test_an_infinite_cotangent_of_a_mean_is_not_in_the_gradients_of_masked_tokens(platform):
    loss = lambda features: np.inf * linear_softmax_cross_entropy(features, KERNEL, LABELS, where=MASK)  # noqa: E731
    gradient = jax.jit(jax.grad(loss))(np.float32(FEATURES))
    np.testing.assert_array_equal(gradient[~MASK], 0)


def test_negative_and_nan_weights_are_nan(platform):
    of_class = np.arange(CLASSES) == LABELS[5]

    @jax.jit
    def all_of(features, weights, class_weights):
        of = functools.partial(linear_softmax_cross_entropy, kernel=KERNEL, labels=LABELS)
        gradient = jax.grad(lambda f: of(f, weights=weights, reduction="none").sum())(features)
        each = {"weights": weights}, {"class_weights": class_weights}
        return gradient, [[of(features, reduction=r, **w) for r in ("none", "mean")] for w in each]

    for bad in (-0.5, np.nan):
        given = np.where(BAD, bad, WEIGHTS).astype("float32"), np.where(of_class, bad, 1.0).astype("float32")
        gradient, of_each = all_of(np.float32(FEATURES), *given)
        assert bad_rows(gradient) == [5]
        assert np.isnan(gradient[5]).all()
        for (losses, mean), rows in zip(of_each, (BAD, LABELS[5] == LABELS), strict=True):
            np.testing.assert_array_equal(np.isnan(losses), rows)
            assert np.isnan(mean)
    negative_zero = np.where(BAD, -0.0, 1).astype("float32"), np.where(of_class, -0.0, 1).astype("float32")
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(all_of(np.float32(FEATURES), *negative_zero)))


def test_a_class_of_weight_zero_and_a_bias_of_minus_infinity(platform):
    """Only the classes that have a weight cost anything."""
    unweighted = np.arange(CLASSES) == LABELS[0]
    options = {"reduction": "sum", "labels": LABELS, "class_weights": np.where(unweighted, 0, CLASS_WEIGHTS)}

    @jax.jit
    def both(floats):
        biases = [np.where(unweighted, x, BIAS) for x in (-np.inf, -1e4)]
        return [jax.value_and_grad(total_of(outputs_of, CROSS_ENTROPY, bias=b, **options))(floats) for b in biases]

    with jax.enable_x64(True):
        actual, desired = both({"features": FEATURES, "kernel": KERNEL, "weights": WEIGHTS})
    # The tokens of that class take no part: their weights have gradients of 0.
    assert not actual[1]["features"][LABELS[0] == LABELS].any()
    assert_close(actual, desired, rtol=1e-9, atol=1e-11)


def test_a_bias_that_is_infinite_in_the_dtype_of_the_logits_excludes_its_class_from_the_smoothing(platform):
    args = np.ones((2, 3), np.float32), np.eye(3, 4, dtype=np.float32), np.zeros(2, int)
    with jax.enable_x64(True):
        of = lambda bias: linear_softmax_cross_entropy(*args, bias=bias, label_smoothing=0.1)  # noqa: E731
        found = jax.jit(lambda biases: jax.lax.map(of, biases))(np.array([[0, -1e300, 0, 0], [0, -np.inf, 0, 0]]))
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found[0], found[1])


def test_a_label_out_of_range_is_nan_with_any_weights(platform):
    labels = np.where(BAD, -100, LABELS)
    of = functools.partial(linear_softmax_cross_entropy, class_weights=np.zeros(CLASSES), reduction="none")
    np.testing.assert_array_equal(np.isnan(jax.jit(of)(FEATURES, KERNEL, labels)), BAD)


@in_turn(("size", "reduction"), [], [(1e4, "mean"), (1e-6, "sum"), (1e4, "none")])
def test_float16_gradients_with_large_and_small_weights(platform, size, reduction):
    args = [jnp.asarray(a, "float16") for a in (FEATURES, KERNEL)]

    @jax.jit
    def gradients(features, kernel, weights):
        def loss(features, kernel):
            losses = linear_softmax_cross_entropy(features, kernel, LABELS, weights=weights, reduction=reduction)
            return jnp.sum(losses) * (1 if reduction == "mean" else 1 / (TOKENS * size))

        return jax.grad(loss, (0, 1))(features, kernel)

    desired = gradients(*(a.astype("float32") for a in args), size * np.float32(WEIGHTS))
    actual = gradients(*args, size * np.float32(WEIGHTS))
    assert_close(actual, desired, rtol=1e-2, atol=2e-5)


@pytest.mark.parametrize("dtype", ["a row", "int32", "bool", "a number"])
def test_weights_of_any_dtype_and_shape_that_broadcasts(dtype):
    whole, of_shape = np.abs(np.round(WEIGHTS)).reshape(4, 10), {"a row": WEIGHTS[:4, None], "a number": 3.0}
    weights = of_shape[dtype] if dtype in of_shape else whole.astype(dtype)
    features, labels = np.float32(FEATURES.reshape(4, 10, WIDTH)), LABELS.reshape(4, 10)
    of = lambda w: linear_softmax_cross_entropy(features, KERNEL, labels, weights=w, reduction="sum")  # noqa: E731
    actual, desired = jax.jit(lambda *both: list(map(of, both)))(weights, np.broadcast_to(np.float32(weights), (4, 10)))
    assert actual.dtype == "float32"
    np.testing.assert_allclose(actual, desired, rtol=1e-6)
    if dtype in of_shape:
        assert jax.jit(jax.grad(of))(weights).shape == np.shape(weights)


def test_weights_too_small_for_the_dtype_of_the_loss_are_zero():
    with jax.enable_x64(True):
        of = jax.jit(functools.partial(linear_softmax_cross_entropy, weights=np.full(TOKENS, 1e-60)))
        assert of(*singles((FEATURES, KERNEL)), LABELS) == 0


# The z-loss.


def test_without_a_z_loss_its_component_is_zero():
    of = jax.jit(lambda x, c: linear_softmax_cross_entropy(x, KERNEL, LABELS, with_components=c), static_argnums=1)
    np.testing.assert_allclose(of(FEATURES, True), [of(FEATURES, False), 0], rtol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_label_out_of_range_leaves_the_z_loss(platform, reduction):
    labels = np.where(BAD, -100, LABELS)
    options = {"z_loss": 0.1, "label_smoothing": 0.1, "with_components": True, "reduction": reduction}

    def z_loss(features, labels):
        parts = linear_softmax_cross_entropy(features, KERNEL, labels, **options)
        return jnp.sum(parts[1]), parts

    step = jax.jit(jax.value_and_grad(z_loss, has_aux=True))
    (_, (cross_entropy, actual)), gradient = step(np.float32(FEATURES), labels)
    (_, (_, desired)), desired_gradient = step(np.float32(FEATURES), LABELS)
    assert_close((actual, gradient), (desired, desired_gradient), rtol=2e-5, atol=1e-6)
    np.testing.assert_array_equal(np.isnan(cross_entropy), BAD if reduction == "none" else True)


# Numbers.


def test_scaled_losses_of_float16(platform):
    features, kernel, scale = np.array([[12.0, 0.0]], "float16"), np.eye(2, dtype="float16"), 4096

    def scaled(features, reduction):
        total = linear_softmax_cross_entropy(features, kernel, np.array([0]), reduction=reduction)
        return jnp.sum(scale * total.astype("float32"))

    probability = scale / (1 + np.exp(12.0))
    for gradient in jax.jit(lambda x: [jax.grad(scaled)(x, r) for r in REDUCTIONS])(features):
        np.testing.assert_allclose(np.float64(gradient)[0], [-probability, probability], rtol=2e-2)


def test_gradient_of_the_kernel_is_accumulated_in_float32():
    """4000 tokens that each add less than a rounding of the sum in bfloat16."""
    features, labels = jnp.ones((4000, 1), "bfloat16"), jnp.zeros(4000, int)
    loss = lambda kernel: linear_softmax_cross_entropy(features, kernel, labels, reduction="sum")  # noqa: E731
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(jnp.zeros((1, 2), "bfloat16")), [[-2000, 2000]])


def test_labels_of_a_narrow_dtype_and_many_classes():
    losses = jax.jit(lambda x, k, *labels: [linear_softmax_cross_entropy(x, k, y, reduction="none") for y in labels])
    labels = [np.array([0, 1, 127], d) for d in ("int8", "uint8", "int16", "uint32")]
    np.testing.assert_allclose(losses(jnp.zeros((3, 1)), jnp.zeros((1, 1000)), *labels), np.log(1000), rtol=1e-6)


# Sizes.


@pytest.mark.parametrize("classes", [23, 1])
def test_a_last_tile_that_is_smaller(choose, classes):
    floats = {"features": FEATURES, "kernel": KERNEL[:, :classes], "bias": BIAS[:classes]}
    given = {"labels": LABELS % classes, "where": MASK}
    found = []
    with jax.enable_x64(True):
        for platform in ("cpu", "elsewhere"):
            use_platform(choose, platform)
            found.append(jax.jit(jax.value_and_grad(total_of(outputs_of, CROSS_ENTROPY, **given)))(floats))
    assert_close(*found, rtol=1e-11, atol=1e-12)


def test_no_block_is_nearly_empty():
    """One token more than two blocks hold makes three that are even: a block costs the same however few it holds."""
    tokens, size = 1031, 515  # a prime number

    def check(live):
        for packed in (Packed.of(tokens, None, size), Packed.of(tokens, live, size), Packed.in_place(live, size)):
            assert tokens <= packed.length < tokens + 3
            assert packed.size <= size

    jax.eval_shape(check, jnp.ones(tokens, bool))
    assert Packed.of(1030, None, size).order is None  # two blocks, with no token moved
