"""What the linear losses of labels have of their own: weights, a z-loss, tiles, entropies, predictions."""

import functools

import jax
import jax.numpy as jnp
import linear_cases as cases
import numpy as np
import pytest
from comparisons import assert_close, in_float64
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from linear_cases import BAD, BIAS, CLASS_WEIGHTS, CLASSES, FEATURES, KERNEL, LABELS, MASK, TOKENS, WEIGHTS, WIDTH
from tiers import parametrize

from masksafe._core import platforms
from masksafe.losses import linear_log_probs, linear_softmax_cross_entropy
from masksafe.losses._rows._packing import Packed

pytestmark = pytest.mark.usefixtures("small_tiles")
total_of_cross_entropy = functools.partial(cases.total_of, cases.CROSS_ENTROPY)
log_probs_and_entropies = functools.partial(linear_log_probs, with_entropy=True)


def test_a_weight_of_0_and_weights_of_classes_have_no_gradient():
    def loss(weights, class_weights):
        options = {"labels": LABELS, "weights": weights, "class_weights": class_weights, **cases.OPTIONS}
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
        assert cases.bad_rows(gradient) == [5]
        assert np.isnan(gradient[5]).all()
        for (of_tokens, mean), rows in zip(of_each, (BAD, LABELS[5] == LABELS), strict=True):
            np.testing.assert_array_equal(np.isnan(of_tokens), rows)
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
        return [jax.value_and_grad(total_of_cross_entropy(bias=b, **options))(floats) for b in biases]

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


@cases.in_turn(("size", "reduction"), [("accelerator", 1e4, "mean")], [(1e-6, "sum"), (1e4, "none")])
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


@parametrize("dtype", ["a row"], exhaustive=["int32", "bool", "a number"])
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
        assert of(*cases.singles((FEATURES, KERNEL)), LABELS) == 0


def test_without_a_z_loss_its_component_is_zero():
    of = jax.jit(lambda x, c: linear_softmax_cross_entropy(x, KERNEL, LABELS, with_components=c), static_argnums=1)
    np.testing.assert_allclose(of(FEATURES, True), [of(FEATURES, False), 0], rtol=1e-6)


def test_gradient_of_the_kernel_is_accumulated_in_float32():
    """4000 tokens that each add less than a rounding of the sum in bfloat16."""
    features, labels = jnp.ones((4000, 1), "bfloat16"), jnp.zeros(4000, int)
    loss = lambda kernel: linear_softmax_cross_entropy(features, kernel, labels, reduction="sum")  # noqa: E731
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(jnp.zeros((1, 2), "bfloat16")), [[-2000, 2000]])


@parametrize("classes", [23], exhaustive=[1])
def test_a_last_tile_that_is_smaller(choose, classes):
    floats = {"features": FEATURES, "kernel": KERNEL[:, :classes], "bias": BIAS[:classes]}
    given = {"labels": LABELS % classes, "where": MASK}
    found = []
    with jax.enable_x64(True):
        for platform in ("cpu", "accelerator"):
            cases.use_platform(choose, platform)
            found.append(jax.jit(jax.value_and_grad(total_of_cross_entropy(**given)))(floats))
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


@parametrize(("temperature", "entropy"), [(1e-38, 0)], exhaustive=[(1e38, TOKENS * np.log(CLASSES))])
def test_extreme_temperatures(platform, temperature, entropy):
    of = functools.partial(log_probs_and_entropies, kernel=np.float32(KERNEL), labels=LABELS, temperature=temperature)
    value, gradient = jax.jit(jax.value_and_grad(lambda x: jnp.sum(of(x)[1])))(np.float32(FEATURES) / 8)
    np.testing.assert_allclose(value, entropy, rtol=1e-6)
    assert np.isfinite(gradient).all()


def test_what_is_bad_reaches_the_outputs_that_depend_on_it(platform):
    """A logit that overflows. That a bad label leaves the entropy is tested of logits, whose formula is the same."""

    @jax.jit
    def step(features, labels, kernel):
        outputs = lambda f: log_probs_and_entropies(f, kernel, labels, bias=np.float32(BIAS), block_size=9)  # noqa: E731
        kept = lambda f: jnp.sum(jnp.where(BAD, 0, sum(outputs(f))))  # noqa: E731
        of_each = [jax.grad(lambda f, k=k: jnp.sum(outputs(f)[k]))(features) for k in (0, 1)]
        return outputs(features), of_each, jax.grad(kept)(features)

    features, kernel = cases.singles((FEATURES, KERNEL))
    overflow = np.where(BAD[:, None] & (np.arange(WIDTH) == 0), 3, features * (np.arange(WIDTH) > 0))
    kernel = np.where(np.arange(WIDTH)[:, None] == 0, np.where(np.arange(CLASSES) == 3, 3e38, 0), kernel)
    outputs, gradients, kept = step(overflow, LABELS, np.float32(kernel))
    bad_log_probs = cases.bad_rows(np.where(np.isfinite(outputs[0]), 0, np.nan))  # -inf beside another logit of +inf
    assert [bad_log_probs, *map(cases.bad_rows, (outputs[1], *gradients))] == [[5]] * 4
    assert not np.isnan(kept).any()  # a weight of 3e38 gives infinite ones
    assert not kept[5].any()


TIED = np.float32(
    [
        [0, 0, 0, 0, 0, 0, 0, 0],  # ties between and within devices
        [1, 0, 0, 0, 1, 0, 1, 0],
        [0, 0, 0, 0, 0, 0, 0, 30],  # the largest on the last device, nearly certain
        [0, 25, 0, 0, 0, 0, 0, 0],
        [-1e4, -1e4, 0, 1, -1e4, -1e4, -1e4, 2],  # nothing on some devices
        [2, -1e4, 2, 1, 0, 0, 1, 2],
        [0, 1, 0, 0, np.nan, 0, 2, 0],
    ]
)


def test_ties_between_devices_and_a_bad_logit(platform):
    labels = np.array([0, 6, 7, 0, 3, 7, 1])

    def total(features, kernel, **axis_name):
        outputs = log_probs_and_entropies(features, kernel, labels, **axis_name)
        return jnp.sum(outputs[0] * (1 + np.arange(7)) + outputs[1] * (2 + np.arange(7))), jnp.stack(outputs)

    mesh = jax.make_mesh((4,), ("classes",), axis_types=(AxisType.Auto,))
    ours = functools.partial(total, axis_name="classes")
    split = jax.shard_map(ours, mesh=mesh, in_specs=(P(), P(None, "classes")), out_specs=P())
    gradient, actual = jax.jit(jax.grad(split, has_aux=True))(TIED, np.eye(8, dtype="float32"))
    d_exact, exact = in_float64(jax.jit(jax.grad(total, has_aux=True)), TIED, np.eye(8))
    np.testing.assert_allclose(actual[:, :-1], exact[:, :-1], rtol=5e-6, atol=2e-7)
    np.testing.assert_allclose(gradient[:-1], d_exact[:-1], rtol=1e-5, atol=2e-6)
    assert np.isnan(actual[:, -1]).all()
    assert np.isnan(gradient[-1]).all()


# The most probable classes, and the logsumexps.

ROUNDED = {"features": np.round(FEATURES), "kernel": np.round(KERNEL)}  # many classes have the largest logit


@parametrize("op", [cases.CROSS_ENTROPY], exhaustive=[cases.LOG_PROBS])
def test_ties_go_to_the_first_class_and_nothing_else_changes(platform, op):
    floats, others = cases.split_call(op, where=True, class_mask=True, block_size=9, **cases.OPS[op].all_outputs)

    @jax.jit
    def all_of(floats):
        def step(**more):
            def total(floats):
                outputs = cases.outputs_of(op, **others | floats, **more)
                return sum(map(jnp.sum, outputs[:2])), outputs

            return jax.value_and_grad(total, has_aux=True)(floats)

        x = jnp.where(cases.CLASS_MASK, 3 * jnp.tanh(jnp.matmul(floats["features"], floats["kernel"]) / 3), -jnp.inf)
        found = jnp.where(MASK, jnp.argmax(x, -1), -1), jnp.where(MASK, jax.nn.logsumexp(x, -1), 0)
        return step(), step(with_predictions=True), found

    without, with_predictions, (best, lse) = all_of(cases.singles(floats | ROUNDED))
    (value, [*same, predictions, logsumexps]), gradients = with_predictions
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
        return linear_softmax_cross_entropy(rows, jnp.eye(CLASSES), labels, **options)[1:]

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


@parametrize(
    "options", [{}], exhaustive=[{"z_loss": 0.1}, {"label_smoothing": 0.1}, {"with_components": True}], ids=str
)
def test_a_class_weight_of_0_masks_no_prediction(platform, options):
    """A NaN shows there, but neither in the loss, to which its token adds nothing, nor in the gradients of that."""
    rows, labels = np.float32([[3, 1, 0], [0, 2, 5], [1, 1, 0], [np.nan, 0, 0]]), np.array([0, 1, 2, 1])
    class_weights, is_plain = np.float32([1, 0, 1]), not {"z_loss", "label_smoothing"} & set(options)

    @jax.jit
    def step(rows, class_weights, kernel):
        def loss(rows, kernel):
            of = functools.partial(linear_softmax_cross_entropy, class_weights=class_weights)
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


@parametrize("dtype", ["float32"], exhaustive=["bfloat16"])
def test_the_largest_is_found_under_a_soft_cap_in_every_row(dtype, choose):
    """It is compared in another loop than the one that finds it."""
    rng = np.random.default_rng(1)
    features, kernel = (rng.normal(size=shape).astype(dtype) for shape in ((256, 16), (16, 3001)))
    of = functools.partial(linear_softmax_cross_entropy, logit_soft_cap=7.3, with_predictions=True)
    choose(linear={"class_tile_elements": platforms.Choices().linear.class_tile_elements})
    _, predictions, _ = jax.jit(of)(features, kernel, np.zeros(256, int))
    logits = jax.jit(lambda f, k: 7.3 * jnp.tanh(jnp.matmul(f, k, preferred_element_type="float32") / 7.3))
    np.testing.assert_array_equal(predictions, jnp.argmax(logits(features, kernel), -1))


def test_more_classes_than_the_dtype_of_sums_can_count_are_refused():
    shapes = [jax.ShapeDtypeStruct(s, d) for s, d in (((2, 1), "float32"), ((1, 2**24), "float32"), ((2,), "int32"))]
    for fn in (linear_softmax_cross_entropy, linear_log_probs):
        with pytest.raises(ValueError, match=f"^{fn.__name__}: with_predictions: got True for 16777216 classes"):
            jax.eval_shape(functools.partial(fn, with_predictions=True), *shapes)
