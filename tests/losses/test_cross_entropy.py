"""The softmax cross-entropies, rule by rule of the contract.

Every test that takes `blocks` runs twice: with the rows in one pass, and with blocks so small that even these
small arrays take several.
"""

import functools
import unittest

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.losses import _classification_test as optax_suite

import masksafe
from masksafe._core import platforms
from masksafe.testing import assert_mask_safe

integer = masksafe.losses.softmax_cross_entropy_with_integer_labels
soft = masksafe.losses.softmax_cross_entropy
safe = masksafe.losses.safe_softmax_cross_entropy

NAN, INF = jnp.nan, jnp.inf
LOGITS = 3 * jax.random.normal(jax.random.key(0), (4, 7))
LABELS = jnp.array([0, 3, 6, 2])
TARGETS = jax.nn.softmax(jax.random.normal(jax.random.key(1), (4, 7)))
ROWS = np.array([True, False, True, True])
CLASSES = np.array(
    [[1, 1, 1, 0, 0, 1, 0], [0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0]], dtype=bool
)


@pytest.fixture(params=["one pass", "blocks"], scope="module")
def blocks(request):
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "blocks":
            patch.setattr(platforms, "ROW_BLOCK_ELEMENTS", 8)
        jax.clear_caches()
        yield
    jax.clear_caches()


def reference(logits, targets, where=True):
    """Loss in float64: integer labels or distributions on the last axis, `where` at the rank of logits."""
    logits = np.asarray(logits, np.float64)
    where = np.broadcast_to(where, logits.shape)
    if np.issubdtype(np.asarray(targets).dtype, np.integer):
        targets = np.arange(logits.shape[-1]) == np.asarray(targets)[..., None]
    x = np.where(where, logits, -np.inf)
    shift = np.max(x, -1, keepdims=True, initial=-np.inf)
    z = x - np.where(np.isfinite(shift), shift, 0)
    # The largest class stays out of the sum, so that log1p is exact where it has nearly all of the probability.
    e = np.exp(z)
    np.put_along_axis(e, np.argmax(z, -1)[..., None], 0, -1)
    log_sum = np.where(np.isfinite(shift), np.log1p(e.sum(-1, keepdims=True)), 0)
    costs = np.where(np.asarray(targets) == 0, 0, log_sum - z)
    return np.sum(np.where(where, np.asarray(targets, np.float64) * costs, 0), -1)


def grad(fn, *args):
    return jax.grad(lambda *a: fn(*a).astype(jnp.float32).sum())(*args)


# Rules 1 to 3: no influence, exact zero, empty is zero.

MASKS = [
    ROWS,
    CLASSES,
    np.zeros(4, bool),
    *(pytest.param(m, marks=pytest.mark.slow) for m in (ROWS[:, None], CLASSES[:1])),
]


@pytest.mark.parametrize("where", MASKS)
def test_integer_labels_are_mask_safe(where, blocks):
    expanded = np.broadcast_to(where if where.ndim == 2 else where[:, None], (4, 7))
    labels = jnp.asarray(np.where(expanded.any(-1), expanded.argmax(-1), 0))
    assert_mask_safe(
        lambda logits, labels: integer(logits, labels, where=where),
        *(LOGITS, labels),
        masked={0: ~expanded, 1: ~expanded.any(-1)},
    )


@pytest.mark.parametrize("where", MASKS)
def test_soft_labels_are_mask_safe(where, blocks):
    expanded = np.broadcast_to(where if where.ndim == 2 else where[:, None], (4, 7))
    assert_mask_safe(
        lambda logits, labels: soft(logits, labels, where=where),
        *(LOGITS, TARGETS),
        masked={0: ~expanded, 1: ~expanded},
        empty=(jnp.full((4, 7), NAN), TARGETS) if not where.any() else None,
    )


@st.composite
def problems(draw):
    """Logits with the classes on any axis, labels, and a mask of rows or classes from empty to full."""
    rows = draw(st.lists(st.integers(0, 3), max_size=2))
    num_classes = draw(st.integers(1, 6))
    axis = draw(st.integers(0, len(rows)))
    shape = (*rows[:axis], num_classes, *rows[axis:])
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    of_rows, density = draw(st.booleans()), draw(st.sampled_from([0.0, 0.4, 0.8, 1.0]))
    where = rng.random(tuple(rows) if of_rows else shape) < density
    dtype = draw(st.sampled_from(["float32", "bfloat16", "float16"]))
    logits = jnp.asarray(3 * rng.normal(size=shape), dtype)
    labels = rng.random(shape) + 0.1
    return axis - draw(st.sampled_from([0, len(shape)])), logits, labels / labels.sum(axis, keepdims=True), where


def expand(where, axis, shape):
    return np.broadcast_to(where if where.ndim == len(shape) else np.expand_dims(where, axis), shape)


@hypothesis.given(problem=problems())
def test_any_shape_axis_dtype_and_mask_keeps_the_contract(problem):
    assert_contract(problem, ["jit"])


@pytest.mark.slow
@hypothesis.settings(max_examples=100)
@hypothesis.given(problem=problems())
def test_many_shapes_keep_the_contract_under_every_transform(problem):
    assert_contract(problem, ["eager", "jit", "vmap"])


def assert_contract(problem, transforms):
    axis, logits, targets, where = problem
    live = expand(where, axis, logits.shape)
    hypothesis.assume(not live.all())
    labels = live.argmax(axis).astype(np.int8)
    assert_mask_safe(
        lambda logits, labels: integer(logits, labels, axis, where=where),
        *(logits, labels),
        masked={0: ~live, 1: ~live.any(axis)},
        transforms=transforms,
    )
    assert_mask_safe(
        lambda logits, labels: soft(logits, labels, axis, where=where),
        *(logits, jnp.asarray(targets, logits.dtype)),
        masked={0: ~live, 1: ~live},
        transforms=transforms,
    )


@hypothesis.given(problem=problems())
def test_removal_equals_masking(problem):
    axis, logits, targets, where = problem
    live = np.moveaxis(expand(where, axis, logits.shape), axis, -1)
    x, t = (np.moveaxis(np.asarray(a, np.float32), axis, -1) for a in (logits, targets))
    losses = np.asarray(soft(logits.astype(jnp.float32), jnp.asarray(targets, jnp.float32), axis, where=where))
    for row in np.ndindex(losses.shape):
        kept = live[row]
        expected = soft(x[row][kept], t[row][kept]) if kept.any() else 0.0
        np.testing.assert_allclose(losses[row], expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("cotangent", [INF, -INF, NAN])
@pytest.mark.parametrize("loss", [integer, soft])
def test_masked_gradient_is_zero_whatever_the_cotangent(loss, cotangent):
    """The square root of a masked loss has one that is infinite."""
    labels = CLASSES.argmax(-1) if loss is integer else TARGETS
    for where in (ROWS, CLASSES):
        gone = ~np.broadcast_to(where if where.ndim == 2 else where[:, None], (4, 7))
        _, pull_back = jax.vjp(lambda x, w=where: loss(x, labels, where=w), LOGITS)
        assert (np.asarray(pull_back(jnp.full(4, cotangent))[0])[gone] == 0).all()
    _, pull_back = jax.vjp(lambda t: soft(LOGITS, t, where=CLASSES), TARGETS)
    assert (np.asarray(pull_back(jnp.full(4, cotangent))[0])[~CLASSES] == 0).all()


def test_empty_row_is_zero_even_with_a_bad_label():
    value, gradient = jax.value_and_grad(lambda x: integer(x, jnp.array([-1, 9]), where=jnp.zeros(2, bool)).sum())(
        jnp.full((2, 3), NAN)
    )
    assert value == 0
    np.testing.assert_array_equal(gradient, np.zeros((2, 3)))


def test_mean_of_no_loss_is_zero():
    assert masksafe.mean(integer(jnp.zeros((0, 3)), jnp.zeros(0, int))) == 0
    assert masksafe.mean(integer(LOGITS, LABELS, where=jnp.zeros(4, bool)), where=jnp.zeros(4, bool)) == 0


def test_zero_batch_with_a_tuple_of_axes():
    assert integer(jnp.zeros((0, 3, 4)), jnp.zeros(0, int), axis=(1, 2)).shape == (0,)
    assert soft(jnp.zeros((0, 3, 4)), jnp.zeros((0, 3, 4)), axis=(1, 2)).shape == (0,)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 1), (5,), (1,), (0,), (0, 0), (2, 0, 3)])
def test_any_size_works(shape, blocks):
    logits, labels = jnp.ones(shape), jnp.zeros(shape[:-1], int)
    expected = 0.0 if shape[-1] == 0 else np.log(shape[-1])
    targets = jnp.ones(shape) / max(1, shape[-1])
    for loss, argument in [(integer, labels), (soft, targets), (safe, targets)]:
        np.testing.assert_allclose(loss(logits, argument), np.full(shape[:-1], expected), rtol=1e-6, atol=1e-7)
        assert grad(loss, logits, argument).shape == shape


# Rule 5: nothing is hidden.


@pytest.mark.parametrize(
    ("bad", "label", "loss"),
    [(NAN, 0, NAN), (NAN, 1, NAN), (INF, 0, NAN), (INF, 1, INF), (-INF, 0, INF)],
)
def test_bad_logit_shows_in_its_own_row_only(bad, label, loss, blocks):
    logits, labels = LOGITS.at[2, 0].set(bad), LABELS.at[2].set(label)
    for fn, argument in [(integer, labels), (soft, jax.nn.one_hot(labels, 7))]:
        np.testing.assert_array_equal(fn(logits, argument)[2], loss)
        gradient = grad(fn, logits, argument)
        if bad == -INF:  # the limit of the gradient is that of probability 0
            expected = jax.nn.softmax(logits[2]) - jax.nn.one_hot(label, 7)
            np.testing.assert_allclose(gradient[2], expected, rtol=1e-5)
        else:
            assert np.isnan(gradient[2]).all()
        rest = np.delete(np.arange(4), 2)
        np.testing.assert_array_equal(np.asarray(fn(logits, argument))[rest], np.asarray(fn(LOGITS, argument))[rest])
        np.testing.assert_array_equal(gradient[rest], grad(fn, LOGITS, argument)[rest])


def test_nan_in_an_unmasked_soft_label_shows(blocks):
    labels = TARGETS.at[1, 2].set(NAN)
    np.testing.assert_array_equal(np.isnan(soft(LOGITS, labels)), [False, True, False, False])
    np.testing.assert_array_equal(np.isnan(grad(soft, LOGITS, labels)).all(-1), [False, True, False, False])


@pytest.mark.parametrize("bad", [NAN, INF])
def test_row_whose_loss_is_selected_away_gets_no_gradient(bad):
    """The way people mask without `where`: jnp.where behind the loss, over padded labels."""
    labels, logits = LABELS.at[1].set(-100), LOGITS.at[1, 3].set(bad)
    gradient = jax.grad(lambda x: jnp.where(labels >= 0, integer(x, labels), 0).sum())(logits)
    expected = grad(lambda x: integer(x, labels, where=labels >= 0), logits)  # another program
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-7)
    assert (gradient[1] == 0).all()
    targets = TARGETS.at[1].set(0.5)
    gradient = jax.grad(lambda t: jnp.where(labels >= 0, soft(logits.at[1, 0].set(-INF), t), 0).sum())(targets)
    assert (gradient[1] == 0).all()


def test_row_with_a_bad_label_selected_away_is_gone_from_the_hessian():
    labels = LABELS.at[1].set(-100)
    hessian = jax.hessian(lambda x: jnp.where(labels >= 0, integer(x, labels), 0).sum())(LOGITS)
    assert np.isfinite(hessian).all()
    assert (hessian[1] == 0).all()


# Rule 6: labels never wrap.


def out_of_range(dtype):
    """The labels of a dtype that are none of seven classes, of those that are worth a look."""
    limits = np.iinfo(dtype)
    values = sorted({limits.min, -100, -1, 7, limits.max, 2**32, 2**32 + 3, -(2**32)})
    return [v for v in values if limits.min <= v <= limits.max and not 0 <= v < 7]


INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint32", "uint64"]


@pytest.mark.parametrize(("dtype", "value"), [(dtype, v) for dtype in INTEGERS for v in out_of_range(dtype)])
@pytest.mark.parametrize("x64", [False, True])
def test_label_out_of_range_gives_nan_in_its_row(dtype, value, x64):
    labels = np.array([0, value, 6, 2], dtype)
    with jax.enable_x64(x64):
        np.testing.assert_array_equal(np.isnan(integer(LOGITS, labels)), [False, True, False, False])
        gradient = grad(lambda x: integer(x, labels), LOGITS)
        np.testing.assert_array_equal(np.isnan(gradient).all(-1), [False, True, False, False])
        masked = integer(LOGITS, labels, where=ROWS)
    np.testing.assert_allclose(masked, np.where(ROWS, integer(LOGITS, jnp.array([0, 0, 6, 2])), 0), rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_narrow_labels_of_more_classes_than_they_can_count(dtype):
    logits = jax.random.normal(jax.random.key(2), (3, 1000))
    labels = np.array([0, 100, np.iinfo(dtype).max], dtype)
    np.testing.assert_allclose(integer(logits, labels), reference(logits, labels.astype(int)), rtol=1e-6)


def test_label_of_a_masked_class_is_infinitely_costly(blocks):
    where = jnp.array([[False, True, True]])
    logits = jnp.array([[9.0, 1.0, 2.0]])
    value, gradient = jax.value_and_grad(lambda x: integer(x, jnp.array([0]), where=where).sum())(logits)
    assert value == INF
    np.testing.assert_allclose(gradient, [[0.0, *jax.nn.softmax(logits[0, 1:])]], rtol=1e-6)


def test_soft_label_on_a_masked_class_is_gone_with_it():
    where = jnp.array([[False, True, True]])
    assert soft(jnp.array([[9.0, 1.0, 2.0]]), jnp.array([[1.0, 0.0, 0.0]]), where=where) == 0


# Values: as optax where optax is right.


def assert_as_optax(out, expected, exact, coarsest):
    """Of optax's dtype, within that dtype's rounding of the truth, and as near to optax as optax is to it."""
    assert out.dtype == expected.dtype
    rounding = 0.5 * float(jnp.finfo(out.dtype).eps)
    np.testing.assert_allclose(np.asarray(out, float), exact, rtol=rounding + 1e-6)
    eps = float(jnp.finfo(coarsest).eps)
    np.testing.assert_allclose(np.asarray(out, float), np.asarray(expected, float), rtol=2 * eps, atol=4 * eps)


@pytest.mark.parametrize("name", ["softmax_cross_entropy", "safe_softmax_cross_entropy"])
@pytest.mark.parametrize(
    ("logits_dtype", "labels_dtype"),
    [
        ("float32", "float32"),
        ("bfloat16", "float32"),
        ("float16", "bfloat16"),
        ("bfloat16", "int32"),
        ("float32", "bool"),
        ("float32", "float16"),
    ],
)
def test_soft_dtype_and_value_are_those_of_optax(name, logits_dtype, labels_dtype, blocks):
    logits = LOGITS.astype(logits_dtype)
    labels = (jax.nn.one_hot(LABELS, 7) if labels_dtype in ("int32", "bool") else TARGETS).astype(labels_dtype)
    out, expected = getattr(masksafe.losses, name)(logits, labels), getattr(optax, name)(logits, labels)
    coarsest = min(logits_dtype, out.dtype.name, key=lambda dtype: -float(jnp.finfo(dtype).eps))
    assert_as_optax(out, expected, reference(logits, np.asarray(labels, float)), coarsest)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_integer_dtype_and_value_are_those_of_optax(dtype, blocks):
    logits = LOGITS.astype(dtype)
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, LABELS)
    assert_as_optax(integer(logits, LABELS), expected, reference(logits, LABELS), dtype)


@pytest.mark.parametrize(
    "axis",
    [
        0,
        -1,
        (2, 0),
        *(pytest.param(a, marks=pytest.mark.slow) for a in (1, 2, -3, (1,), (0, 2), (-1, 1), (2, 1, 0), (0, 1, 2))),
    ],
)
@pytest.mark.parametrize("masked", [None, "rows", "classes"])
def test_any_axes_are_those_of_optax(axis, masked):
    shape = (3, 4, 5)
    logits = jax.random.normal(jax.random.key(3), shape)
    axes = tuple(a % 3 for a in (axis if isinstance(axis, tuple) else (axis,)))
    rows = tuple(n for i, n in enumerate(shape) if i not in axes)
    rng = np.random.default_rng(0)
    where = {None: None, "rows": rng.random(rows) < 0.5, "classes": rng.random(shape) < 0.7}[masked]
    targets = jax.nn.softmax(jax.random.normal(jax.random.key(4), shape), axes)

    def agree(ours, theirs, labels):
        np.testing.assert_allclose(ours(logits, labels, axis, where), theirs(logits, labels, axis, where), rtol=1e-5)
        ours, theirs = (grad(lambda x, f=f: f(x, labels, axis, where), logits) for f in (ours, theirs))
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)

    agree(soft, optax.softmax_cross_entropy, targets)
    if masked == "classes":  # a label on a masked class, where optax is wrong
        live = np.moveaxis(where, axes, range(-len(axes), 0)).reshape(*rows, -1)
        labels = live.argmax(-1)
    else:
        labels = rng.integers(np.prod([shape[a] for a in axes]), size=rows)
    agree(integer, optax.softmax_cross_entropy_with_integer_labels, labels)


def test_axis_none_is_all_axes():
    np.testing.assert_allclose(
        soft(LOGITS, TARGETS, None), optax.softmax_cross_entropy(LOGITS, TARGETS, None), rtol=1e-6
    )


@pytest.mark.parametrize(("logits", "labels"), [((1, 7), (4,)), ((4, 7), (1,)), ((2, 1, 7), (1, 3))])
def test_integer_labels_broadcast_as_in_optax(logits, labels):
    x, y = jnp.broadcast_to(LOGITS[:1], logits), jnp.broadcast_to(LABELS[:1], labels)
    expected = optax.softmax_cross_entropy_with_integer_labels(x, y)
    np.testing.assert_allclose(integer(x, y), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("logits", "labels"), [((7,), (4, 7)), ((4, 7), (7,)), ((4, 1, 7), (3, 7)), ((4, 7), ()), ((4, 7), (4, 1))]
)
def test_soft_labels_broadcast_as_in_optax(logits, labels):
    x = jax.random.normal(jax.random.key(0), logits)
    y = jnp.abs(jax.random.normal(jax.random.key(1), labels))
    np.testing.assert_allclose(soft(x, y), optax.softmax_cross_entropy(x, y), rtol=1e-5)
    for argnum in (0, 1):
        ours, theirs = (
            jax.grad(lambda x, y, f=f: f(x, y).sum(), argnum)(x, y) for f in (soft, optax.softmax_cross_entropy)
        )
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_mask_of_the_logits_rank_masks_classes_where_labels_have_a_higher_one():
    where = np.array([True, True, False])
    expected = optax.softmax_cross_entropy(jnp.arange(3.0), TARGETS[:3, :3], where=where)
    np.testing.assert_allclose(soft(jnp.arange(3.0), TARGETS[:3, :3], where=where), expected, rtol=1e-6)


def test_gradient_of_broadcast_16_bit_logits_is_rounded_once():
    logits = jnp.array([0.0, 1.0, 2.0], jnp.bfloat16)
    targets = jax.nn.one_hot(jnp.arange(10_000) % 3, 3)
    exact = jax.grad(lambda x: soft(x, targets).sum())(logits.astype(jnp.float32))
    gradient = jax.grad(lambda x: soft(x, targets).sum())(logits)
    np.testing.assert_allclose(np.asarray(gradient, float), exact, rtol=2**-8)


SUITES = [
    optax_suite.SoftmaxCrossEntropyTest,
    optax_suite.SafeSoftmaxCrossEntropyTest,
    optax_suite.SoftmaxCrossEntropyWithIntegerLabelsTest,
]
OPTAX_TESTS = [(suite, name) for suite in SUITES for name in unittest.defaultTestLoader.getTestCaseNames(suite)]


@pytest.mark.parametrize(("suite", "name"), OPTAX_TESTS)
@pytest.mark.parametrize("forward_mode", [False, True])
def test_optax_own_tests_pass(suite, name, forward_mode, monkeypatch):
    monkeypatch.setattr(optax_suite, "_classification", masksafe.losses)
    if forward_mode:
        with masksafe.forward_mode():
            suite(name).debug()
    elif name == "test_gradient":  # checks jvp too, which JAX refuses outside of forward_mode
        with pytest.raises(TypeError, match="custom_vjp"):
            suite(name).debug()
    else:
        suite(name).debug()


# Rule 8 and the numerics.


def half_ulp(exact, dtype):
    info = jnp.finfo(dtype)
    exponent = np.floor(np.log2(np.maximum(np.abs(exact), float(info.tiny))))
    return 0.5 * float(info.eps) * 2.0**exponent


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("num_classes", [128, 32768, 262144])
@pytest.mark.parametrize(("scale", "offset"), [(1, 0), (5, 0), (1, 100)])
@pytest.mark.parametrize("likely", [False, True])
def test_16_bit_error_is_that_of_rounding_the_output(dtype, num_classes, scale, offset, likely):
    rows = max(4, 2**16 // num_classes)
    logits = (scale * jax.random.normal(jax.random.key(0), (rows, num_classes)) + offset).astype(dtype)
    labels = jax.random.randint(jax.random.key(1), (rows,), 0, num_classes)
    labels = jnp.argmax(logits, -1) if likely else labels
    for fn, argument in [(integer, labels), (soft, jax.nn.one_hot(labels, num_classes, dtype=dtype))]:
        exact = reference(logits, labels)
        for run in (fn, jax.jit(fn), lambda x, y, fn=fn: jax.vjp(lambda x: fn(x, y), x)[0]):
            error = np.abs(np.asarray(run(logits, argument), np.float64) - exact)
            assert (error <= half_ulp(exact, dtype) + 1e-6 * np.abs(exact)).all()


@pytest.mark.parametrize("fn", [integer, soft])
def test_confident_row_keeps_every_digit(fn, blocks):
    """optax: loss 0, gradient 17 % off."""
    logits = jnp.array([[15.0, 0.0], [0.0, 15.0], [40.0, 0.0]])
    labels = jnp.array([0, 1, 0])
    argument = labels if fn is integer else jax.nn.one_hot(labels, 2)
    exact = reference(logits, labels)
    np.testing.assert_allclose(fn(logits, argument), exact, rtol=1e-6)
    signs = 1 - 2 * jax.nn.one_hot(labels, 2)
    np.testing.assert_allclose(grad(fn, logits, argument), -np.expm1(-exact)[:, None] * signs, rtol=1e-6)


@pytest.mark.parametrize("fn", [integer, soft])
@pytest.mark.parametrize("offset", [0, 1e5, -1e5, 1e7])
def test_common_offset_cancels(fn, offset, blocks):
    logits = jnp.array([[1.0, 2.0, 3.0]])
    argument = jnp.array([2]) if fn is integer else jnp.array([[0.0, 0.0, 1.0]])
    np.testing.assert_allclose(fn(logits + offset, argument), [0.40760596], rtol=1e-6)
    np.testing.assert_allclose(grad(fn, logits + offset, argument), grad(fn, logits, argument), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_all_logits_at_the_lowest_value_are_uniform(dtype):
    logits = jnp.full((1, 4), jnp.finfo(dtype).min, dtype)
    np.testing.assert_allclose(np.asarray(integer(logits, jnp.array([1])), float), np.log(4), rtol=4e-3)


def test_float16_gradient_of_many_classes_does_not_vanish():
    """optax: loss inf or NaN, and a gradient of 0 for every other class."""
    logits = (0.02 * jax.random.normal(jax.random.key(0), (2, 128256))).astype(jnp.float16)
    labels = jnp.array([5, 7])
    np.testing.assert_allclose(np.asarray(integer(logits, labels), float), reference(logits, labels), rtol=1e-3)
    gradient = np.asarray(grad(integer, logits, labels), float)
    probs = np.asarray(jax.nn.softmax(logits.astype(jnp.float32)), float)
    np.testing.assert_allclose(gradient, probs - np.asarray(jax.nn.one_hot(labels, 128256)), rtol=1e-3, atol=6e-8)


def test_absent_class_with_a_logit_of_minus_infinity_is_fine(blocks):
    logits, labels = jnp.array([[-INF, 1.0, 2.0]]), jnp.array([[0.0, 0.4, 0.6]])
    for fn in (soft, safe):
        np.testing.assert_allclose(fn(logits, labels), soft(logits[:, 1:], labels[:, 1:]), rtol=1e-6)
        for argnum in (0, 1):
            gradient = jax.grad(lambda *a, fn=fn: fn(*a).sum(), argnum)(logits, labels)
            assert gradient[0, 0] == 0
            assert np.isfinite(gradient).all()
        with masksafe.forward_mode():
            assert np.isfinite(jax.jvp(fn, (logits, labels), (jnp.ones((1, 3)), jnp.ones((1, 3))))[1]).all()


@pytest.mark.parametrize("argnum", [0, 1])
def test_gradient_agrees_with_float64(argnum, blocks):
    with jax.enable_x64(True):
        exact = jax.grad(lambda *a: optax.softmax_cross_entropy(*a).sum(), argnum)(
            LOGITS.astype(jnp.float64), TARGETS.astype(jnp.float64)
        )
    np.testing.assert_allclose(
        jax.grad(lambda *a: soft(*a).sum(), argnum)(LOGITS, TARGETS), exact, rtol=1e-4, atol=1e-7
    )


def test_float64_stays_float64():
    with jax.enable_x64(True):
        logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 7)))
        out = integer(logits, LABELS)
        assert out.dtype == jnp.float64
        np.testing.assert_allclose(out, reference(logits, LABELS), rtol=1e-14)
        assert soft(LOGITS, TARGETS.astype(jnp.float64)).dtype == jnp.float64


# Rule 7: one answer.


def ways_to_run(fn):
    """A function of logits and labels, run in every way that should not matter."""
    batched = lambda x, y: jax.vmap(fn)(x, y)  # noqa: E731
    return {
        "jit": jax.jit(fn),
        "vmap": batched,
        "vmap of jit": jax.vmap(jax.jit(fn)),
        "scan": lambda x, y: jax.lax.scan(lambda c, xy: (c, fn(*xy)), None, (x, y))[1],
        "remat": jax.checkpoint(fn),
        "primal of grad": lambda x, y: jax.vjp(fn, x, y)[0],
        "donated": lambda x, y: jax.jit(fn, donate_argnums=0)(jnp.array(x, copy=True), y),
        "transposed in memory": lambda x, y: jax.jit(lambda xt: fn(jnp.moveaxis(xt, 0, -1), y))(jnp.moveaxis(x, -1, 0)),
        "strided": lambda x, y: fn(np.asarray(jnp.repeat(x, 2, -1))[..., ::2], y),
        "forward mode": lambda x, y: _in_forward_mode(fn, x, y),
        "no jit": lambda x, y: _disable_jit(fn, x, y),
    }


def _in_forward_mode(fn, *args):
    with masksafe.forward_mode():
        return fn(*args)


def _disable_jit(fn, *args):
    with jax.disable_jit():
        return fn(*args)


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("way", ways_to_run(integer))
@pytest.mark.parametrize("kind", ["integer", "soft", "gradient"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_answer_however_it_is_run(way, kind, dtype, blocks):
    logits = LOGITS.astype(dtype)
    fn = {
        "integer": integer,
        "soft": soft,
        "gradient": lambda x, y: jax.vjp(lambda x: integer(x, y), x)[1](jnp.ones(x.shape[:-1], x.dtype))[0],
    }[kind]
    if kind == "gradient" and way == "primal of grad":
        fn = functools.partial(jax.jit, inline=True)(fn)
    labels = TARGETS if kind == "soft" else LABELS
    expected = fn(logits, labels)
    actual = ways_to_run(fn)[way](logits, labels)
    eps = float(jnp.finfo(expected.dtype).eps)
    np.testing.assert_allclose(np.asarray(actual, float), np.asarray(expected, float), rtol=4 * eps, atol=eps)


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["integer", "soft", "classes"])
def test_sharded_batch_agrees_with_one_device(axis_type, dtype, kind, blocks):
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(16, 6, 10)), dtype)
    where = rng.random((16, 6, 10) if kind == "classes" else (16, 6)) < 0.5
    labels = (
        np.asarray(jax.nn.softmax(rng.normal(size=(16, 6, 10)))) if kind == "soft" else rng.integers(10, size=(16, 6))
    )
    if kind == "classes":
        labels = where.argmax(-1)
    used = np.arange(16)[:, None] % 5 < np.arange(6)

    def step(logits, labels, where, used):
        def mean_loss(logits):
            return masksafe.mean((soft if kind == "soft" else integer)(logits, labels, where=where), where=used)

        return jax.value_and_grad(mean_loss)(logits)

    expected = jax.jit(step)(logits, labels, where, used)
    with jax.set_mesh(jax.make_mesh((8,), ("batch",), axis_types=(axis_type,))):
        sharded = [jax.device_put(a, P("batch")) for a in (logits, labels, where, used)]
        actual = jax.jit(step)(*sharded)
        assert actual[1].sharding.spec[0] == "batch"
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(
            np.asarray(a, float), np.asarray(e, float), rtol=1e-2 if dtype == "bfloat16" else 1e-6, atol=1e-6
        )


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
def test_shard_map_agrees_with_one_device(axis_type, blocks):
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(16, 10)).astype(np.float32), rng.integers(10, size=16)
    where = rng.random(16) < 0.5
    expected = grad(lambda x: integer(x, labels, where=where), jnp.asarray(logits))
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(axis_type,))

    def local_sum(x, y, w):
        return jax.lax.psum(integer(x, y, where=w).sum(), "batch")

    with jax.set_mesh(mesh):
        total = jax.shard_map(local_sum, mesh=mesh, in_specs=P("batch"), out_specs=P())
        sharded = [jax.device_put(a, NamedSharding(mesh, P("batch"))) for a in (logits, labels, where)]
        actual = jax.jit(jax.grad(total))(*sharded)
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("loss", [integer, soft])
def test_second_derivatives_and_forward_mode_work_in_shard_map(loss, blocks):
    logits = np.random.default_rng(0).normal(size=(8, 7)).astype(np.float32)
    labels = np.arange(8) % 7 if loss is integer else np.full((8, 7), 1 / 7, np.float32)

    def product(x, y, total):
        return jax.jvp(jax.grad(lambda x: total(x, y)), (x,), (x,))[1]

    expected = product(jnp.asarray(logits), labels, lambda x, y: loss(x, y).sum())
    mesh = jax.make_mesh((8,), ("batch",))
    with jax.set_mesh(mesh):
        total = jax.shard_map(
            lambda x, y: jax.lax.psum(loss(x, y).sum(), "batch"), mesh=mesh, in_specs=P("batch"), out_specs=P()
        )
        sharded = [jax.device_put(a, P("batch")) for a in (logits, labels)]
        actual = jax.jit(lambda x, y: product(x, y, total))(*sharded)
        with masksafe.forward_mode():
            slope = jax.jit(lambda x, y: jax.jvp(lambda x: total(x, y), (x,), (x,))[1])(*sharded)
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(slope, (grad(loss, jnp.asarray(logits), labels) * logits).sum(), rtol=1e-5)


def test_symbolic_batch_sizes_can_be_exported():
    (batch,) = jax.export.symbolic_shape("batch")
    shapes = jax.ShapeDtypeStruct((batch, 7), jnp.float32), jax.ShapeDtypeStruct((batch,), jnp.int32)
    exported = jax.export.export(jax.jit(jax.value_and_grad(lambda x, y: integer(x, y).mean())))(*shapes)
    expected = jax.value_and_grad(lambda x: integer(x, LABELS).mean())(LOGITS)
    for actual, e in zip(exported.call(LOGITS, LABELS), expected, strict=True):
        np.testing.assert_allclose(actual, e, rtol=1e-6)


def test_sharded_classes_work_as_well():
    logits, labels = np.asarray(LOGITS)[:, :6], np.array([0, 3, 5, 2])
    expected = jax.value_and_grad(lambda x: integer(x, labels).sum())(logits)
    with jax.set_mesh(jax.make_mesh((2, 2), ("batch", "vocab"))):
        sharded = jax.device_put(logits, P("batch", "vocab"))
        actual = jax.jit(jax.value_and_grad(lambda x, y: integer(x, y).sum()))(
            sharded, jax.device_put(labels, P("batch"))
        )
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(np.asarray(a), e, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", [integer, soft])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("where", [None, "rows", "classes"])
def test_value_and_gradient_lower_for_cuda(loss, dtype, where):
    shape = jax.ShapeDtypeStruct((4096, 512), dtype)
    labels = jax.ShapeDtypeStruct((4096,), jnp.int32) if loss is integer else shape
    mask = {None: None, "rows": jax.ShapeDtypeStruct((4096,), bool), "classes": jax.ShapeDtypeStruct((4096, 512), bool)}

    def step(x, y, w):
        return jax.value_and_grad(lambda x: loss(x, y, where=w).astype(jnp.float32).mean())(x)

    exported = jax.export.export(jax.jit(step), platforms=["cuda"])(shape, labels, mask[where])
    assert exported.platforms == ("cuda",)
    assert "while" not in exported.mlir_module()  # one fused pass there, no blocks


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("where", [ROWS, CLASSES])
@pytest.mark.parametrize("axis", [-1, 0])
def test_no_false_alarm_of_debug_nans(jit, where, axis):
    live = np.broadcast_to(where if where.ndim == 2 else where[:, None], (4, 7))
    logits, targets = (jnp.asarray(np.moveaxis(np.where(live, a, NAN), -1, axis)) for a in (LOGITS, TARGETS))
    labels = jnp.asarray(np.where(live.any(-1), live.argmax(-1), -100))
    where = np.moveaxis(where, -1, axis) if where.ndim == 2 else where
    steps = [
        jax.value_and_grad(lambda x: integer(x, labels, axis, where=where).sum()),
        jax.value_and_grad(lambda x: soft(x, targets, axis, where=where).sum()),
        jax.value_and_grad(lambda t: soft(logits, t, axis, where=where).sum()),
    ]
    with jax.debug_nans(True):
        for step in steps:
            value, gradient = (jax.jit(step) if jit else step)(logits)
            assert np.isfinite(value)
            assert np.isfinite(gradient).all()


@pytest.mark.parametrize("where", [ROWS, CLASSES])
@pytest.mark.parametrize("loss", [integer, soft])
def test_no_false_alarm_of_checkify(loss, where, blocks):
    live = np.broadcast_to(where if where.ndim == 2 else where[:, None], (4, 7))
    logits = jnp.where(live, LOGITS, NAN)
    labels = jnp.where(live.any(-1), live.argmax(-1), -100) if loss is integer else jnp.where(live, TARGETS, NAN)
    step = jax.value_and_grad(lambda x, y: loss(x, y, where=where).sum())
    error, _ = jax.jit(checkify.checkify(step, errors=checkify.all_checks))(logits, labels)
    error.throw()


@pytest.mark.parametrize("label", [-1, 7])
def test_checkify_finds_a_bad_label(label):
    step = checkify.checkify(jax.value_and_grad(lambda x, y: integer(x, y).sum()), errors=checkify.nan_checks)
    error, _ = jax.jit(step)(LOGITS, LABELS.at[1].set(label))
    assert "nan" in error.get()


def test_no_alarm_of_debug_nans_on_clean_input():
    with jax.debug_nans(True):
        assert np.isfinite(jax.grad(lambda x: jax.grad(lambda x: integer(x, LABELS).sum())(x)[0, 0])(LOGITS)).all()
        with masksafe.forward_mode():
            assert np.isfinite(jax.grad(lambda x: integer(x, LABELS).sum())(LOGITS)).all()


# Rule 9: both modes, all orders.


@pytest.mark.parametrize("where", [None, ROWS, CLASSES])
@pytest.mark.parametrize("argnums", [(0, 0), (0, 1), (1, 0)])
def test_second_derivatives_agree_with_optax_and_between_the_modes(where, argnums, blocks):
    def second(fn, outer, inner):
        first = inner(lambda x, t: fn(x, t, where=where).sum(), argnums[0])
        return jax.jit(outer(first, argnums[1]))(LOGITS, TARGETS)

    expected = second(optax.softmax_cross_entropy, jax.jacfwd, jax.jacrev)
    for outer in (jax.jacfwd, jax.jacrev):
        np.testing.assert_allclose(second(soft, outer, jax.jacrev), expected, rtol=1e-4, atol=1e-6)
    with masksafe.forward_mode():
        for outer in (jax.jacfwd, jax.jacrev):
            np.testing.assert_allclose(second(soft, outer, jax.jacfwd), expected, rtol=1e-4, atol=1e-6)


def test_hessian_of_integer_labels_is_that_of_optax(blocks):
    expected = jax.hessian(lambda x: optax.softmax_cross_entropy_with_integer_labels(x, LABELS).sum())(LOGITS)
    np.testing.assert_allclose(jax.hessian(lambda x: integer(x, LABELS).sum())(LOGITS), expected, rtol=1e-4, atol=1e-6)
    with masksafe.forward_mode():
        actual = jax.jacfwd(jax.jacfwd(lambda x: integer(x, LABELS).sum()))(LOGITS)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("where", [ROWS, CLASSES])
def test_forward_mode_is_mask_safe(where):
    live = np.broadcast_to(where if where.ndim == 2 else where[:, None], (4, 7))

    def tangent(x, t, x_dot, t_dot):
        with masksafe.forward_mode():
            return jax.jvp(lambda x, t: soft(x, t, where=where), (x, t), (x_dot, t_dot))[1]

    assert_mask_safe(
        tangent, *(LOGITS, TARGETS, TARGETS, LOGITS), masked=dict.fromkeys(range(4), ~live), transforms=["eager", "jit"]
    )


def test_forward_mode_with_a_label_on_a_logit_of_minus_infinity():
    logits, labels = jnp.array([-INF, 0.0, 1.0]), jnp.array([1.0, 0.0, 0.0])
    with masksafe.forward_mode():
        tangents = jax.jacfwd(lambda x: soft(x, labels))(logits)
    np.testing.assert_allclose(tangents, grad(soft, logits, labels), rtol=1e-6)


def test_forward_mode_shows_a_bad_label():
    with masksafe.forward_mode():
        tangent = jax.jvp(lambda x: integer(x, LABELS.at[1].set(7)), (LOGITS,), (jnp.ones_like(LOGITS),))[1]
    np.testing.assert_array_equal(np.isnan(tangent), [False, True, False, False])


# Memory.

WHERE_SHAPES = {None: None, "rows": (2048,), "classes": (2048, 4096)}


def value_and_gradient(loss):
    return lambda x, *rest: jax.value_and_grad(lambda x: loss(x, *rest).astype(jnp.float32).mean())(x)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("masked", WHERE_SHAPES)
def test_no_temporary_of_the_logits_size(dtype, masked, monkeypatch):
    monkeypatch.setattr(platforms, "ROW_BLOCK_ELEMENTS", 2**18)
    logits, labels = jax.ShapeDtypeStruct((2048, 4096), dtype), jax.ShapeDtypeStruct((2048,), jnp.int32)
    where = None if masked is None else jax.ShapeDtypeStruct(WHERE_SHAPES[masked], bool)
    step = value_and_gradient(lambda x, y, w: integer(x, y, where=w))
    compiled = jax.jit(step).lower(logits, labels, where).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.2 * 2048 * 4096 * jnp.dtype(dtype).itemsize


@pytest.mark.parametrize("loss", ["integer", "soft"])
def test_residuals_are_the_arguments_and_row_values(loss):
    labels = LABELS if loss == "integer" else TARGETS
    where = jnp.asarray(CLASSES)
    _, pull_back = jax.vjp(lambda x: (integer if loss == "integer" else soft)(x, labels, where=where), LOGITS)
    large = [a for a in jax.tree.leaves(pull_back) if a.size >= LOGITS.size and a.dtype != jnp.bool_]
    assert len(large) <= (1 if loss == "integer" else 2)
    assert all(any(a is b or (np.asarray(a) == np.asarray(b)).all() for b in (LOGITS, TARGETS)) for a in large)
