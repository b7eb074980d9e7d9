"""The softmax cross-entropies, rule by rule of the contract.

Every test that takes `blocks` runs with blocks so small that even these small arrays take several, and in the slow
run with the rows in one pass too. (The comparison of all losses with optax has them in one pass.)
"""

import functools
import itertools

import chex
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

import masksafe
from masksafe._core import platforms
from masksafe.testing import assert_consistent, assert_mask_safe

integer = masksafe.losses.softmax_cross_entropy_with_integer_labels
soft = masksafe.losses.softmax_cross_entropy
safe = masksafe.losses.safe_softmax_cross_entropy

NAN, INF = jnp.nan, jnp.inf
RNG = np.random.default_rng(0)
LOGITS = jnp.asarray(3 * RNG.normal(size=(4, 7)), jnp.float32)
LABELS = jnp.array([0, 3, 6, 2])
TARGETS = RNG.random((4, 7)) + 0.05
TARGETS = jnp.asarray(TARGETS / TARGETS.sum(-1, keepdims=True), jnp.float32)
ROWS = np.array([True, False, True, True])
CLASSES = np.array(
    [[1, 1, 1, 0, 0, 1, 0], [0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0]], dtype=bool
)


slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.fixture(params=["blocks", slow("one pass")], scope="module")
def blocks(request):
    with platforms.chosen(row_block_elements=8 if request.param == "blocks" else 2**18):
        yield


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


@functools.partial(jax.jit, static_argnums=0)
def loss_and_gradient(fn, *args):
    """One program for all arrays of the same shapes."""
    return fn(*args), grad(fn, *args)


def distributions(*shape, axis=-1, seed=0):
    x = np.random.default_rng(seed).random(shape) + 0.05
    return (x / x.sum(axis, keepdims=True)).astype(np.float32)


# Rules 1 to 3: no influence, exact zero, empty is zero.


@pytest.mark.parametrize("where", [CLASSES, slow(ROWS), slow(ROWS[:, None]), slow(CLASSES[:1])])
@pytest.mark.parametrize("loss", [integer, soft])
def test_masked_elements_are_gone(loss, where, blocks):
    live = np.broadcast_to(where if where.ndim == 2 else where[:, None], (4, 7))
    labels = jnp.asarray(live.argmax(-1)) if loss is integer else TARGETS
    fn = functools.partial(loss, where=where)
    masked = {0: ~live, 1: ~live.any(-1) if loss is integer else ~live}
    assert_mask_safe(fn, LOGITS, labels, masked=masked, transforms=("jit",))


@pytest.mark.slow
@pytest.mark.parametrize("transform", ["eager", "vmap"])
@pytest.mark.parametrize("loss", [integer, soft])
def test_masked_elements_are_gone_under_every_transform(loss, transform, blocks):
    labels = jnp.asarray(CLASSES.argmax(-1)) if loss is integer else TARGETS
    fn = functools.partial(loss, where=CLASSES)
    masked = {0: ~CLASSES, 1: ~CLASSES.any(-1) if loss is integer else ~CLASSES}
    assert_mask_safe(fn, LOGITS, labels, masked=masked, transforms=(transform,))


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
    logits = np.asarray(3 * rng.normal(size=shape)).astype(dtype)
    labels = rng.random(shape) + 0.1
    return axis - draw(st.sampled_from([0, len(shape)])), logits, labels / labels.sum(axis, keepdims=True), where


def expand(where, axis, shape):
    return np.broadcast_to(where if where.ndim == len(shape) else np.expand_dims(where, axis), shape)


@pytest.mark.slow
@hypothesis.given(problem=problems())
def test_any_shape_axis_dtype_and_mask_keeps_the_contract(problem):
    axis, logits, targets, where = problem
    live = expand(where, axis, logits.shape)
    hypothesis.assume(not live.all())
    labels = live.argmax(axis).astype(np.int8)
    fn = functools.partial(integer, axis=axis, where=where)
    assert_mask_safe(fn, logits, labels, masked={0: ~live, 1: ~live.any(axis)}, transforms=("jit",))
    fn = functools.partial(soft, axis=axis, where=where)
    assert_mask_safe(fn, logits, targets.astype(logits.dtype), masked={0: ~live, 1: ~live}, transforms=("jit",))


@hypothesis.settings(max_examples=5)
@hypothesis.given(problem=problems())
def test_removal_equals_masking(problem):
    axis, logits, targets, where = problem
    live = np.moveaxis(expand(where, axis, logits.shape), axis, -1)
    x, t = (np.moveaxis(np.asarray(a, np.float32), axis, -1) for a in (logits, targets))
    step = jax.jit(functools.partial(soft, axis=axis, where=where))
    losses = np.asarray(step(logits.astype(np.float32), targets.astype(np.float32)))
    for row in np.ndindex(losses.shape):
        kept = live[row]
        expected = reference(x[row][kept], t[row][kept]) if kept.any() else 0.0
        np.testing.assert_allclose(losses[row], expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("loss", [integer, soft])
def test_masked_gradient_is_zero_whatever_the_cotangent(loss):
    """The square root of a masked loss has one that is infinite."""
    labels = CLASSES.argmax(-1) if loss is integer else TARGETS

    @jax.jit
    def gradients(cotangent):
        pull_back = lambda where: jax.vjp(lambda *a: loss(*a, where=where), LOGITS, labels)[1](cotangent)  # noqa: E731
        return [(where, pull_back(where)[: 1 if loss is integer else 2]) for where in (ROWS, CLASSES)]

    for cotangent in (INF, -INF, NAN):
        for where, of_arguments in gradients(jnp.full(4, cotangent)):
            gone = ~np.broadcast_to(where if where.ndim == 2 else where[:, None], (4, 7))
            for gradient in of_arguments:
                np.testing.assert_array_equal(gradient[gone], 0)


def test_empty_row_is_zero_even_with_a_bad_label():
    fn = functools.partial(integer, where=np.zeros(2, bool))
    value, gradient = loss_and_gradient(fn, jnp.full((2, 3), NAN), jnp.array([-1, 9]))
    np.testing.assert_array_equal(value, 0)
    np.testing.assert_array_equal(gradient, np.zeros((2, 3)))


def test_mean_of_no_loss_is_zero():
    assert masksafe.mean(integer(jnp.zeros((0, 3)), jnp.zeros(0, int))) == 0
    assert masksafe.mean(integer(LOGITS, LABELS, where=jnp.zeros(4, bool)), where=jnp.zeros(4, bool)) == 0


def test_zero_batch_with_a_tuple_of_axes():
    assert integer(jnp.zeros((0, 3, 4)), jnp.zeros(0, int), axis=(1, 2)).shape == (0,)
    assert soft(jnp.zeros((0, 3, 4)), jnp.zeros((0, 3, 4)), axis=(1, 2)).shape == (0,)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1,), *map(slow, [(2, 1), (5,), (0,), (0, 0), (2, 0, 3)])])
def test_any_size_works(shape, blocks):
    logits, labels = np.ones(shape, np.float32), np.zeros(shape[:-1], int)
    expected = 0.0 if shape[-1] == 0 else np.log(shape[-1])
    targets = np.ones(shape, np.float32) / max(1, shape[-1])
    for loss, argument in [(integer, labels), (soft, targets)]:
        losses, gradient = loss_and_gradient(loss, logits, argument)
        np.testing.assert_allclose(losses, np.full(shape[:-1], expected), rtol=1e-6, atol=1e-7)
        assert gradient.shape == shape


# Rule 5: nothing is hidden.


@pytest.mark.parametrize(
    ("bad", "label", "loss"),
    [(NAN, 0, NAN), (NAN, 1, NAN), (INF, 0, NAN), (INF, 1, INF), (-INF, 0, INF)],
)
def test_bad_logit_shows_in_its_own_row_only(bad, label, loss, blocks):
    logits, labels = np.array(LOGITS), np.array(LABELS)
    logits[2, 0], labels[2] = bad, label
    rest = [0, 1, 3]
    for fn, argument in [(integer, labels), (soft, np.eye(7, dtype=np.float32)[labels])]:
        losses, gradient = loss_and_gradient(fn, logits, argument)
        np.testing.assert_array_equal(losses[2], loss)
        if bad == -INF:  # the limit of the gradient is that of probability 0
            probabilities = np.exp(logits[2]) / np.exp(logits[2]).sum()
            np.testing.assert_allclose(gradient[2], probabilities - np.eye(7)[label], rtol=1e-5)
        else:
            assert np.isnan(gradient[2]).all()
        for changed, same in zip((losses, gradient), loss_and_gradient(fn, LOGITS, argument), strict=True):
            np.testing.assert_array_equal(np.asarray(changed)[rest], np.asarray(same)[rest])


def test_nan_in_an_unmasked_soft_label_shows(blocks):
    losses, gradient = loss_and_gradient(soft, LOGITS, np.where(np.arange(28).reshape(4, 7) == 9, NAN, TARGETS))
    np.testing.assert_array_equal(np.isnan(losses), [False, True, False, False])
    np.testing.assert_array_equal(np.isnan(gradient).all(-1), [False, True, False, False])


@pytest.mark.parametrize("bad", [NAN, INF])
def test_row_whose_loss_is_selected_away_gets_no_gradient(bad):
    """The way people mask without `where`: jnp.where behind the loss, over padded labels."""
    labels, logits, targets = (np.array(x) for x in (LABELS, LOGITS, TARGETS))
    labels[1], logits[1, 3], targets[1] = -100, bad, 0.5
    selected = lambda fn: lambda x, y: jnp.where(labels >= 0, fn(x, y), 0)  # noqa: E731
    gradient = loss_and_gradient(selected(integer), logits, labels)[1]
    expected = loss_and_gradient(functools.partial(integer, where=labels >= 0), logits, labels)[1]  # another program
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(gradient[1], 0)
    ruled_out = np.where(np.arange(28).reshape(4, 7) == 7, -INF, logits)
    gradient = loss_and_gradient(lambda t, x: selected(soft)(x, t), targets, ruled_out)[1]
    np.testing.assert_array_equal(gradient[1], 0)


def test_row_with_a_bad_label_selected_away_is_gone_from_the_hessian():
    labels = np.array([0, -100, 6, 2])
    hessian = jax.jit(jax.hessian(lambda x: jnp.where(labels >= 0, integer(x, labels), 0).sum()))(LOGITS)
    assert np.isfinite(hessian).all()
    np.testing.assert_array_equal(hessian[1], 0)


# Rule 6: labels never wrap.


def out_of_range(dtype):
    """The labels of a dtype that are none of seven classes, of those that are worth a look."""
    limits = np.iinfo(dtype)
    values = sorted({limits.min, -100, -1, 7, limits.max, 2**32, 2**32 + 3, -(2**32)})
    return [v for v in values if limits.min <= v <= limits.max and not 0 <= v < 7]


INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint32", "uint64"]


@pytest.mark.parametrize(
    ("dtype", "x64"), [*((d, False) for d in INTEGERS), *(slow(d, True) for d in INTEGERS[:-1]), ("uint64", True)]
)
def test_label_out_of_range_gives_nan_in_its_row(dtype, x64):
    bad = out_of_range(dtype)
    labels = np.array([0, *bad, 6, 2], dtype)
    expected = np.array([False, *[True] * len(bad), False, False])
    logits = np.random.default_rng(0).normal(size=(len(labels), 7)).astype(np.float32)
    of = lambda x, where=None: integer(x, labels, where=where)  # noqa: E731
    with jax.enable_x64(x64):
        losses, gradient, masked = jax.jit(lambda x: (of(x), grad(of, x), of(x, ~expected)))(logits)
    np.testing.assert_array_equal(np.isnan(losses), expected)
    np.testing.assert_array_equal(np.isnan(gradient), np.broadcast_to(expected[:, None], gradient.shape))
    np.testing.assert_array_equal(masked, np.where(expected, 0, losses))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_narrow_labels_of_more_classes_than_they_can_count(dtype):
    logits = np.random.default_rng(2).normal(size=(3, 1000)).astype(np.float32)
    labels = np.array([0, 100, np.iinfo(dtype).max], dtype)
    np.testing.assert_allclose(integer(logits, labels), reference(logits, labels.astype(int)), rtol=1e-6)


def test_label_of_a_masked_class_is_infinitely_costly(blocks):
    fn = functools.partial(integer, where=np.array([[False, True, True]]))
    value, gradient = loss_and_gradient(fn, jnp.array([[9.0, 1.0, 2.0]]), jnp.array([0]))
    assert value == INF
    np.testing.assert_allclose(gradient, [[0.0, 1 / (1 + np.e), np.e / (1 + np.e)]], rtol=1e-6)


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


@pytest.mark.parametrize(
    ("logits_dtype", "labels_dtype"),
    [
        ("bfloat16", "float32"),
        ("float16", "bfloat16"),
        ("float32", "bool"),
        *itertools.starmap(slow, [("float32", "float32"), ("bfloat16", "int32"), ("float32", "float16")]),
    ],
)
def test_soft_dtype_and_value_are_those_of_optax(logits_dtype, labels_dtype, blocks):
    logits = LOGITS.astype(logits_dtype)
    labels = (np.eye(7)[LABELS] if labels_dtype in ("int32", "bool") else np.asarray(TARGETS)).astype(labels_dtype)
    out, expected = jax.jit(lambda *args: (soft(*args), optax.softmax_cross_entropy(*args)))(logits, labels)
    coarsest = min(logits_dtype, out.dtype.name, key=lambda dtype: -float(jnp.finfo(dtype).eps))
    assert_as_optax(out, expected, reference(logits, np.asarray(labels, float)), coarsest)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", slow("float32")])
def test_integer_dtype_and_value_are_those_of_optax(dtype, blocks):
    logits, theirs = LOGITS.astype(dtype), optax.softmax_cross_entropy_with_integer_labels
    out, expected = jax.jit(lambda *args: (integer(*args), theirs(*args)))(logits, LABELS)
    assert_as_optax(out, expected, reference(logits, LABELS), dtype)


AXES = [(2, 0), *map(slow, (0, 1, 2, (0, 2), (-1, 1), (2, 1, 0)))]


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("masked", ["classes", slow("rows"), slow(None)])
def test_any_axes_are_those_of_optax(axis, masked):
    shape = (3, 4, 5)
    axes = tuple(a % 3 for a in (axis if isinstance(axis, tuple) else (axis,)))
    rows = tuple(n for i, n in enumerate(shape) if i not in axes)
    rng = np.random.default_rng(0)
    logits, targets = rng.normal(size=shape).astype(np.float32), distributions(*shape, axis=axes)
    where = {None: None, "rows": rng.random(rows) < 0.5, "classes": rng.random(shape) < 0.7}[masked]
    if masked == "classes":  # a label on a masked class, where optax is wrong
        labels = np.moveaxis(where, axes, range(-len(axes), 0)).reshape(*rows, -1).argmax(-1)
    else:
        labels = rng.integers(np.prod([shape[a] for a in axes]), size=rows)

    @jax.jit
    def all_of(logits):
        step = lambda fn, y: (fn(logits, y, axis, where), grad(lambda x: fn(x, y, axis, where), logits))  # noqa: E731
        pairs = [(soft, optax.softmax_cross_entropy), (integer, optax.softmax_cross_entropy_with_integer_labels)]
        return [(step(f, y), step(g, y)) for (f, g), y in zip(pairs, (targets, labels), strict=True)]

    for ours, theirs in all_of(logits):
        chex.assert_trees_all_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_axis_none_is_all_axes():
    actual, expected = jax.jit(lambda *a: (soft(*a, None), optax.softmax_cross_entropy(*a, None)))(LOGITS, TARGETS)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


@pytest.mark.parametrize(("logits", "labels"), [((2, 1, 7), (1, 3)), slow((1, 7), (4,)), slow((4, 7), (1,))])
def test_integer_labels_broadcast_as_in_optax(logits, labels):
    x, y = np.broadcast_to(LOGITS[:1], logits), np.broadcast_to(LABELS[:1], labels)
    theirs = optax.softmax_cross_entropy_with_integer_labels
    actual, expected = jax.jit(lambda *args: (integer(*args), theirs(*args)))(x, y)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("logits", "labels"),
    [((7,), (4, 7)), ((4, 1, 7), (3, 7)), *itertools.starmap(slow, [((4, 7), (7,)), ((4, 7), ()), ((4, 7), (4, 1))])],
)
def test_soft_labels_broadcast_as_in_optax(logits, labels):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=logits).astype(np.float32), np.abs(rng.normal(size=labels)).astype(np.float32)
    step = lambda fn, x, y: jax.value_and_grad(lambda x, y: fn(x, y).sum(), (0, 1))(x, y)  # noqa: E731
    actual, expected = jax.jit(lambda x, y: [step(fn, x, y) for fn in (soft, optax.softmax_cross_entropy)])(x, y)
    chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-6)
    assert soft(x, y).shape == np.broadcast_shapes(logits, labels)[:-1]


def test_mask_of_the_logits_rank_masks_classes_where_labels_have_a_higher_one():
    where = np.array([True, True, False])
    expected = optax.softmax_cross_entropy(jnp.arange(3.0), TARGETS[:3, :3], where=where)
    np.testing.assert_allclose(soft(jnp.arange(3.0), TARGETS[:3, :3], where=where), expected, rtol=1e-6)


def test_gradient_of_broadcast_16_bit_logits_is_rounded_once():
    targets = np.eye(3, dtype=np.float32)[np.arange(10_000) % 3]
    step = jax.jit(jax.grad(lambda x: soft(x, targets).sum()))
    exact, gradient = (step(np.arange(3).astype(dtype)) for dtype in (np.float32, jnp.bfloat16))
    np.testing.assert_allclose(np.asarray(gradient, float), exact, rtol=2**-8)


# Rule 8 and the numerics.


def half_ulp(exact, dtype):
    info = jnp.finfo(dtype)
    exponent = np.floor(np.log2(np.maximum(np.abs(exact), float(info.tiny))))
    return 0.5 * float(info.eps) * 2.0**exponent


@pytest.mark.parametrize(
    ("dtype", "num_classes", "scale", "offset"),
    [
        ("bfloat16", 4096, 5, 0),
        *(slow(d, n, *how) for d in ("float16", "bfloat16") for n in (128, 262144) for how in ((5, 0), (1, 100))),
    ],
)
def test_16_bit_error_is_that_of_rounding_the_output(dtype, num_classes, scale, offset):
    rows, rng = max(4, 2**14 // num_classes), np.random.default_rng(0)
    logits = (scale * rng.normal(size=(rows, num_classes)) + offset).astype(dtype)
    labels = np.where(np.arange(rows) % 2, logits.argmax(-1), rng.integers(num_classes, size=rows))  # likely ones too
    exact = reference(logits, labels)
    for fn, argument in [(integer, labels), (soft, (np.arange(num_classes) == labels[:, None]).astype(dtype))]:
        for run in (fn, jax.jit(fn), jax.jit(lambda x, y, fn=fn: jax.vjp(lambda x: fn(x, y), x)[0])):
            error = np.abs(np.asarray(run(logits, argument), np.float64) - exact)
            assert (error <= half_ulp(exact, dtype) + 1e-6 * np.abs(exact)).all()


@pytest.mark.parametrize("fn", [integer, soft])
def test_confident_row_keeps_every_digit(fn, blocks):
    """optax: loss 0, gradient 17 % off."""
    logits, labels = jnp.array([[15.0, 0.0], [0.0, 15.0], [40.0, 0.0]]), np.array([0, 1, 0])
    targets = np.eye(2, dtype=np.float32)[labels]
    exact = reference(logits, labels)
    losses, gradient = loss_and_gradient(fn, logits, labels if fn is integer else targets)
    np.testing.assert_allclose(losses, exact, rtol=1e-6)
    np.testing.assert_allclose(gradient, -np.expm1(-exact)[:, None] * (1 - 2 * targets), rtol=1e-6)


@pytest.mark.parametrize("fn", [integer, soft])
def test_common_offset_cancels(fn, blocks):
    logits, argument = np.float32([[1, 2, 3]]), np.array([2]) if fn is integer else np.float32([[0, 0, 1]])
    _, expected = loss_and_gradient(fn, logits, argument)
    for offset in (0, 1e5, -1e5, 1e7):
        losses, gradient = loss_and_gradient(fn, logits + np.float32(offset), argument)
        np.testing.assert_allclose(losses, [0.40760596], rtol=1e-6)
        np.testing.assert_allclose(gradient, expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_all_logits_at_the_lowest_value_are_uniform(dtype):
    logits = jnp.full((1, 4), jnp.finfo(dtype).min, dtype)
    np.testing.assert_allclose(np.asarray(integer(logits, jnp.array([1])), float), np.log(4), rtol=4e-3)


def test_float16_gradient_of_many_classes_does_not_vanish():
    """optax: loss inf or NaN, and a gradient of 0 for every other class."""
    logits = (0.02 * np.random.default_rng(0).normal(size=(2, 128256))).astype(np.float16)
    labels = np.array([5, 7])
    losses, gradient = loss_and_gradient(integer, logits, labels)
    np.testing.assert_allclose(np.asarray(losses, float), reference(logits, labels), rtol=1e-3)
    expected = np.exp(np.float64(logits))
    expected /= expected.sum(-1, keepdims=True)
    expected[[0, 1], labels] -= 1
    np.testing.assert_allclose(np.asarray(gradient, float), expected, rtol=1e-3, atol=6e-8)


def test_absent_class_with_a_logit_of_minus_infinity_is_fine(blocks):
    logits, labels = jnp.array([[-INF, 1.0, 2.0]]), jnp.array([[0.0, 0.4, 0.6]])

    @jax.jit
    def all_of(logits, labels):
        with masksafe.forward_mode():
            tangent = jax.jvp(soft, (logits, labels), (jnp.ones((1, 3)), jnp.ones((1, 3))))[1]
        return soft(logits, labels), jax.grad(lambda *a: soft(*a).sum(), (0, 1))(logits, labels), tangent

    losses, gradients, tangent = all_of(logits, labels)
    np.testing.assert_allclose(losses, reference(logits[:, 1:], labels[:, 1:]), rtol=1e-6)
    assert all(np.isfinite(x).all() for x in (*gradients, tangent))
    assert all(x[0, 0] == 0 for x in gradients)


def test_gradient_agrees_with_float64(blocks):
    with jax.enable_x64(True):
        gradient = jax.jit(jax.grad(lambda *a: optax.softmax_cross_entropy(*a).sum(), (0, 1)))
        exact = gradient(*(np.asarray(x, np.float64) for x in (LOGITS, TARGETS)))
    actual = jax.jit(jax.grad(lambda *a: soft(*a).sum(), (0, 1)))(LOGITS, TARGETS)
    for a, e in zip(actual, exact, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-7)


def test_float64_stays_float64():
    with jax.enable_x64(True):
        logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 7)))
        out = integer(logits, LABELS)
        assert out.dtype == jnp.float64
        np.testing.assert_allclose(out, reference(logits, LABELS), rtol=1e-14)
        assert soft(LOGITS, TARGETS.astype(jnp.float64)).dtype == jnp.float64


# Rule 7: one answer.


MODES = "jit", "vmap", "vmap, last axis", "scan", "value_and_grad", "jvp", "checkpoint", "transposed", "sharded"


@pytest.mark.parametrize(
    ("dtype", "modes"), [("float32", ("jit", "scan", "jvp")), slow("float32", MODES), slow("bfloat16", MODES)]
)
@pytest.mark.parametrize("loss", [integer, soft])
def test_one_answer(loss, dtype, modes, blocks):
    assert_consistent(loss, LOGITS.astype(dtype), LABELS if loss is integer else TARGETS, modes=modes)


@pytest.mark.parametrize(
    ("axis_type", "kind", "dtype"),
    [
        (AxisType.Explicit, "classes", "float32"),
        (AxisType.Auto, "soft", "bfloat16"),
        *(slow(a, k, "float32") for a in (AxisType.Explicit, AxisType.Auto) for k in ("integer", "soft")),
    ],
)
def test_sharded_batch_agrees_with_one_device(axis_type, dtype, kind, blocks):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(16, 6, 10)).astype(dtype)
    where = rng.random((16, 6, 10) if kind == "classes" else (16, 6)) < 0.5
    labels = distributions(16, 6, 10) if kind == "soft" else rng.integers(10, size=(16, 6))
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


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, slow(AxisType.Auto)])
def test_shard_map_agrees_with_one_device(axis_type, blocks):
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(16, 10)).astype(np.float32), rng.integers(10, size=16)
    where = rng.random(16) < 0.5
    expected = jax.jit(functools.partial(grad, lambda x: integer(x, labels, where=where)))(logits)
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(axis_type,))

    def local_sum(x, y, w):
        return jax.lax.psum(integer(x, y, where=w).sum(), "batch")

    with jax.set_mesh(mesh):
        total = jax.shard_map(local_sum, mesh=mesh, in_specs=P("batch"), out_specs=P())
        sharded = [jax.device_put(a, NamedSharding(mesh, P("batch"))) for a in (logits, labels, where)]
        actual = jax.jit(jax.grad(total))(*sharded)
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("loss", [integer, slow(soft)])
def test_second_derivatives_and_forward_mode_work_in_shard_map(loss, blocks):
    logits = np.random.default_rng(0).normal(size=(8, 7)).astype(np.float32)
    labels = np.arange(8) % 7 if loss is integer else np.full((8, 7), 1 / 7, np.float32)

    def product(x, y, total):
        return jax.jvp(jax.grad(lambda x: total(x, y)), (x,), (x,))[1]

    plain = jax.jit(lambda x, y: (product(x, y, lambda x, y: loss(x, y).sum()), grad(loss, x, y)))
    expected, gradient = plain(logits, labels)
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
    np.testing.assert_allclose(slope, (gradient * logits).sum(), rtol=1e-5)


def test_symbolic_batch_sizes_can_be_exported():
    (batch,) = jax.export.symbolic_shape("batch")
    shapes = jax.ShapeDtypeStruct((batch, 7), jnp.float32), jax.ShapeDtypeStruct((batch,), jnp.int32)
    exported = jax.export.export(jax.jit(jax.value_and_grad(lambda x, y: integer(x, y).mean())))(*shapes)
    expected = jax.jit(jax.value_and_grad(lambda x: integer(x, LABELS).mean()))(LOGITS)
    for actual, e in zip(exported.call(LOGITS, LABELS), expected, strict=True):
        np.testing.assert_allclose(actual, e, rtol=1e-6)


def test_sharded_classes_work_as_well():
    logits, labels = np.asarray(LOGITS)[:, :6], np.array([0, 3, 5, 2])
    expected = jax.jit(jax.value_and_grad(lambda x: integer(x, labels).sum()))(logits)
    with jax.set_mesh(jax.make_mesh((2, 2), ("batch", "vocab"))):
        sharded = jax.device_put(logits, P("batch", "vocab"))
        actual = jax.jit(jax.value_and_grad(lambda x, y: integer(x, y).sum()))(
            sharded, jax.device_put(labels, P("batch"))
        )
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(np.asarray(a), e, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", [integer, soft])
@pytest.mark.parametrize(
    ("dtype", "where"),
    [("float32", None), ("bfloat16", "classes"), slow("bfloat16", "rows"), slow("float32", "classes")],
)
def test_value_and_gradient_lower_for_cuda(loss, dtype, where):
    shape = jax.ShapeDtypeStruct((4096, 512), dtype)
    labels = jax.ShapeDtypeStruct((4096,), jnp.int32) if loss is integer else shape
    mask = {None: None, "rows": jax.ShapeDtypeStruct((4096,), bool), "classes": jax.ShapeDtypeStruct((4096, 512), bool)}

    def step(x, y, w):
        return jax.value_and_grad(lambda x: loss(x, y, where=w).astype(jnp.float32).mean())(x)

    exported = jax.export.export(jax.jit(step), platforms=["cuda"])(shape, labels, mask[where])
    assert exported.platforms == ("cuda",)
    assert "while" not in exported.mlir_module()  # one fused pass there, no blocks


@pytest.mark.parametrize(("where", "axis"), [(CLASSES, -1), slow(ROWS, -1), slow(ROWS, 0), slow(CLASSES, 0)])
def test_no_false_alarm_of_debug_nans(where, axis):
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
            value, gradient = step(logits)
            assert np.isfinite(value)
            assert np.isfinite(gradient).all()


@pytest.mark.parametrize(
    ("loss", "where"), [(integer, CLASSES), slow(soft, ROWS), slow(integer, ROWS), slow(soft, CLASSES)]
)
def test_no_false_alarm_of_checkify(loss, where, blocks):
    live = np.broadcast_to(where if where.ndim == 2 else where[:, None], (4, 7))
    logits = jnp.where(live, LOGITS, NAN)
    labels = jnp.where(live.any(-1), live.argmax(-1), -100) if loss is integer else jnp.where(live, TARGETS, NAN)
    step = jax.value_and_grad(lambda x, y: loss(x, y, where=where).sum())
    error, _ = jax.jit(checkify.checkify(step, errors=checkify.all_checks))(logits, labels)
    error.throw()


def test_checkify_finds_a_bad_label():
    step = jax.jit(checkify.checkify(lambda x, y: loss_and_gradient(integer, x, y), errors=checkify.nan_checks))
    for label in (-1, 7):
        assert "nan" in step(LOGITS, np.array([0, label, 6, 2]))[0].get()


@pytest.mark.slow
def test_no_alarm_of_debug_nans_on_clean_input():
    with jax.debug_nans(True):
        assert np.isfinite(jax.grad(lambda x: jax.grad(lambda x: integer(x, LABELS).sum())(x)[0, 0])(LOGITS)).all()
        with masksafe.forward_mode():
            assert np.isfinite(jax.grad(lambda x: integer(x, LABELS).sum())(LOGITS)).all()


# Rule 9: both modes, all orders.


def second_derivatives(fn, x, direction):
    """Of the sum of a loss along a direction, in all pairs of the two modes."""
    total = lambda x: fn(*x).sum()  # noqa: E731
    slope = lambda x: jax.jvp(total, (x,), (direction,))[1]  # noqa: E731
    along = lambda x: sum(map(jnp.vdot, jax.grad(total)(x), direction))  # noqa: E731
    forward_over_reverse, reverse_over_reverse = jax.jvp(jax.grad(total), (x,), (direction,))[1], jax.grad(along)(x)
    with masksafe.forward_mode():
        forward_over_forward, reverse_over_forward = jax.jvp(slope, (x,), (direction,))[1], jax.grad(slope)(x)
    return [forward_over_reverse, reverse_over_reverse, reverse_over_forward], forward_over_forward


@pytest.mark.parametrize("where", [CLASSES, slow(ROWS), slow(None)])
@pytest.mark.parametrize("loss", [integer, soft])
def test_second_derivatives_are_those_of_optax_in_all_modes(loss, where, blocks):
    theirs = optax.softmax_cross_entropy if loss is soft else optax.softmax_cross_entropy_with_integer_labels
    labels = CLASSES.argmax(-1)

    @jax.jit
    def ours_and_theirs(x):
        direction = jax.tree.map(jnp.cos, x)
        fix = lambda fn: lambda *x: fn(*x, *(() if loss is soft else (labels,)), where=where)  # noqa: E731
        along = lambda x: sum(map(jnp.vdot, jax.grad(lambda x: fix(theirs)(*x).sum())(x), direction))  # noqa: E731
        return second_derivatives(fix(loss), x, direction), jax.grad(along)(x), direction

    (products, curvature), expected, direction = ours_and_theirs((LOGITS, TARGETS) if loss is soft else (LOGITS,))
    for product in products:
        chex.assert_trees_all_close(product, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(curvature, sum(map(np.vdot, expected, direction)), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
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
        tangents = jax.jit(jax.jacfwd(lambda x: soft(x, labels)))(logits)
    np.testing.assert_allclose(tangents, loss_and_gradient(soft, logits, labels)[1], rtol=1e-6)


def test_forward_mode_shows_a_bad_label():
    with masksafe.forward_mode():
        tangent = jax.jvp(lambda x: integer(x, LABELS.at[1].set(7)), (LOGITS,), (jnp.ones_like(LOGITS),))[1]
    np.testing.assert_array_equal(np.isnan(tangent), [False, True, False, False])


# Memory.

WHERE_SHAPES = {None: None, "rows": (2048,), "classes": (2048, 4096)}


def value_and_gradient(loss):
    return lambda x, *rest: jax.value_and_grad(lambda x: loss(x, *rest).astype(jnp.float32).mean())(x)


@pytest.mark.parametrize(
    ("dtype", "masked"),
    [
        ("float32", "classes"),
        ("bfloat16", None),
        slow("float16", "rows"),
        slow("float32", None),
        slow("bfloat16", "classes"),
    ],
)
def test_no_temporary_of_the_logits_size(dtype, masked, choose):
    choose(row_block_elements=2**18)
    logits, labels = jax.ShapeDtypeStruct((2048, 4096), dtype), jax.ShapeDtypeStruct((2048,), jnp.int32)
    where = None if masked is None else jax.ShapeDtypeStruct(WHERE_SHAPES[masked], bool)
    step = value_and_gradient(lambda x, y, w: integer(x, y, where=w))
    compiled = jax.jit(step).lower(logits, labels, where).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.2 * 2048 * 4096 * jnp.dtype(dtype).itemsize


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_a_mask_one_array_of_the_logits_size_is_kept(dtype):
    logits = jnp.asarray(LOGITS, dtype)
    _, pull_back = jax.vjp(lambda x: integer(x, LABELS), logits)
    (kept,) = [a for a in jax.tree.leaves(pull_back) if a.size >= logits.size]
    assert kept.dtype == logits.dtype
    assert (np.asarray(kept) == np.asarray(logits)).all() == (dtype == "bfloat16")  # else the exponentials


@pytest.mark.parametrize("loss", ["integer", "soft"])
def test_residuals_are_the_arguments_and_row_values(loss):
    labels = LABELS if loss == "integer" else TARGETS
    where = jnp.asarray(CLASSES)
    _, pull_back = jax.vjp(lambda x: (integer if loss == "integer" else soft)(x, labels, where=where), LOGITS)
    large = [a for a in jax.tree.leaves(pull_back) if a.size >= LOGITS.size and a.dtype != jnp.bool_]
    assert len(large) <= (1 if loss == "integer" else 2)
    assert all(any(a is b or (np.asarray(a) == np.asarray(b)).all() for b in (LOGITS, TARGETS)) for a in large)
