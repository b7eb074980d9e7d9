"""The softmax cross-entropies, beyond what the contract's table and the comparison of all losses with optax prove.

Every test that takes `blocks` runs with blocks so small that even these small arrays take several, and with `-m forms`
with the rows in one pass too.
"""

import contextlib
import functools
import itertools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from tiers import optimised_jit

import masksafe
from masksafe._core import platforms
from masksafe.losses import poly_loss_cross_entropy, ranking_softmax_loss

integer = masksafe.losses.softmax_cross_entropy_with_integer_labels
soft = masksafe.losses.softmax_cross_entropy
BOTH = [(integer, optax.softmax_cross_entropy_with_integer_labels), (soft, optax.softmax_cross_entropy)]

NAN, INF = jnp.nan, jnp.inf
RNG = np.random.default_rng(0)
LOGITS = jnp.asarray(3 * RNG.normal(size=(4, 7)), jnp.float32)
LABELS = jnp.array([0, 3, 6, 2])
TARGETS = jnp.asarray(RNG.dirichlet(np.ones(7), 4), jnp.float32)
ROWS = np.array([True, False, True, True])
CLASSES = np.array(
    [[1, 1, 1, 0, 0, 1, 0], [0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0]], dtype=bool
)
SHARES = np.eye(7, dtype=np.float32)
forms = functools.partial(pytest.param, marks=pytest.mark.forms)


@pytest.fixture(params=["blocks", forms("one pass")], scope="module")
def blocks(request):
    sizes = {"row_block_elements": 8, "most_elements_in_one_pass": 16}
    with platforms.chosen(**sizes if request.param == "blocks" else {}):
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


@jax.jit
def of_both(logits, labels, targets):
    """Losses and gradients of both, in one program for all arrays of the same shapes."""
    return [(loss(logits, y), grad(loss, logits, y)) for loss, y in ((integer, labels), (soft, targets))]


# Shapes and masks.


def test_masked_gradient_is_zero_whatever_the_cotangent_of_its_row():
    """The square root of a masked loss has one that is infinite."""
    labels = CLASSES.argmax(-1)

    @jax.jit
    def gradients(x, t, where, cotangent):
        of_integer = jax.vjp(lambda x: integer(x, labels, where=where), x)[1](cotangent)
        return *of_integer, *jax.vjp(lambda *a: soft(*a, where=where), x, t)[1](cotangent)

    for cotangent, where in itertools.product((INF, -INF, NAN), (CLASSES, np.broadcast_to(ROWS[:, None], (4, 7)))):
        for gradient in gradients(LOGITS, TARGETS, where, jnp.full(4, cotangent)):
            np.testing.assert_array_equal(gradient[~where], 0)


def test_any_size_works():
    for shape in [(3, 0)]:
        labels, targets = np.zeros(shape[:-1], int), np.ones(shape, np.float32) / max(1, shape[-1])
        for losses, gradient in of_both(np.ones(shape, np.float32), labels, targets):
            np.testing.assert_array_equal(losses, np.zeros(shape[:-1]))
            assert gradient.shape == shape
    shapes = jax.eval_shape(lambda x, y: (integer(x, y, (1, 2)), soft(x, x, (1, 2))), jnp.zeros((0, 3, 4)), LABELS[:0])
    assert [x.shape for x in shapes] == [(0,), (0,)]
    assert masksafe.mean(integer(jnp.zeros((0, 3)), jnp.zeros(0, int))) == 0


@pytest.mark.parametrize("axis", [(2, 0), *map(forms, (0, 1, 2, (0, 2), (-1, 1), (2, 1, 0)))])
@pytest.mark.parametrize("masked", ["classes", forms("rows")])
def test_any_axes_are_those_of_optax(axis, masked):
    shape = (3, 4, 5)
    axes = tuple(a % 3 for a in (axis if isinstance(axis, tuple) else (axis,)))
    rows = tuple(n for i, n in enumerate(shape) if i not in axes)
    rng = np.random.default_rng(0)
    logits, targets = rng.normal(size=shape).astype(np.float32), rng.random(shape).astype(np.float32) + 0.05
    where = {"rows": rng.random(rows) < 0.5, "classes": rng.random(shape) < 0.7}[masked]
    if masked == "classes":  # a label on a masked class, where optax is wrong
        labels = np.moveaxis(where, axes, range(-len(axes), 0)).reshape(*rows, -1).argmax(-1)
    else:
        labels = rng.integers(np.prod([shape[a] for a in axes]), size=rows)

    @jax.jit
    def all_of(logits):
        step = lambda fn, y: (fn(logits, y, axis, where), grad(lambda x: fn(x, y, axis, where), logits))  # noqa: E731
        return [(step(f, y), step(g, y)) for (f, g), y in zip(BOTH, (labels, targets), strict=True)]

    for ours, theirs in all_of(logits):
        chex.assert_trees_all_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.forms
def test_axis_none_is_all_axes_and_labels_broadcast_as_in_optax():
    rng = np.random.default_rng(0)
    shapes = ((7,), (4, 7)), ((4, 1, 7), (3, 7))
    pairs = [[np.abs(rng.normal(size=shape)).astype(np.float32) for shape in pair] for pair in shapes]
    labels = [(np.float32(rng.normal(size=x)), np.zeros(y, int)) for x, y in (((2, 1, 7), (1, 3)), ((1, 7), (4,)))]

    @jax.jit
    def all_of(pairs, labels):
        step = lambda fn, x, y: (fn(x, y), jax.grad(lambda x, y: fn(x, y).sum(), (0, 1))(x, y))  # noqa: E731
        of = lambda integer, soft: (  # noqa: E731
            soft(LOGITS, TARGETS, None),
            [integer(*both) for both in labels],
            [step(soft, *pair) for pair in pairs],
        )
        return [of(*losses) for losses in zip(*BOTH, strict=True)]

    chex.assert_trees_all_close(*all_of(pairs, labels), rtol=1e-4, atol=1e-6)


def test_a_mask_of_the_logits_rank_masks_classes_where_labels_have_a_higher_one():
    where = np.array([True, True, False])
    both = jax.jit(lambda x, t: [fn(x, t, where=where) for fn in BOTH[1]])
    np.testing.assert_allclose(*both(jnp.arange(3.0), TARGETS[:3, :3]), rtol=1e-6)


# Nothing is hidden, and what is replaced is gone.


@pytest.mark.parametrize(
    ("bad", "label", "loss"), [(NAN, 0, NAN), (NAN, 1, NAN), (INF, 0, NAN), (INF, 1, INF), (-INF, 0, INF)]
)
def test_bad_logit_shows_in_its_own_row_only(bad, label, loss, blocks):
    logits, labels = np.array(LOGITS), np.array(LABELS)
    logits[2, 0], labels[2] = bad, label
    rest, args = [0, 1, 3], (labels, SHARES[labels])
    for (losses, gradient), clean in zip(of_both(logits, *args), of_both(LOGITS, *args), strict=True):
        assert np.isnan(losses[2]) or losses[2] == INF
        assert np.isnan(losses[2]) == np.isnan(loss) or bad == INF
        if bad == -INF:  # the limit of the gradient is that of probability 0
            probabilities = np.exp(logits[2]) / np.exp(logits[2]).sum()
            np.testing.assert_allclose(gradient[2], probabilities - SHARES[label], rtol=1e-5)
        else:
            assert np.isnan(gradient[2]).all()
        for changed, same in zip((losses, gradient), clean, strict=True):
            np.testing.assert_array_equal(np.asarray(changed)[rest], np.asarray(same)[rest])


def test_row_whose_loss_is_selected_away_gets_no_gradient():
    """The way people mask without `where`: jnp.where behind the loss, over padded labels. Nor is it in the Hessian."""
    labels, logits, targets = (np.array(x) for x in (LABELS, LOGITS, TARGETS))
    labels[1], targets[1] = -100, 0.5
    kept = labels >= 0
    total = lambda fn, x, y: jnp.where(kept, fn(x, y), 0).sum()  # noqa: E731

    @jax.jit
    def all_of(logits, targets):
        of_integer = jax.grad(lambda x: total(integer, x, labels))
        expected = grad(lambda x: integer(x, labels, where=kept), logits)
        products = jax.jvp(of_integer, (logits,), (jnp.cos(LOGITS),))[1]
        ruled_out = jnp.where(jnp.arange(28).reshape(4, 7) == 7, -INF, logits)
        return of_integer(logits), expected, products, jax.grad(lambda t: total(soft, ruled_out, t))(targets)

    for bad in (NAN, INF):
        logits[1, 3] = bad
        gradient, expected, products, of_targets = all_of(logits, targets)
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-7)
        for row in (gradient[1], products[1], of_targets[1]):
            np.testing.assert_array_equal(row, 0)
        assert np.isfinite(products).all()


def out_of_range(dtype):
    """The labels of a dtype that are none of seven classes, of those that are worth a look."""
    limits = np.iinfo(dtype)
    values = sorted({limits.min, -100, -1, 7, limits.max, 2**32, 2**32 + 3, -(2**32)})
    return [v for v in values if limits.min <= v <= limits.max and not 0 <= v < 7]


INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint32", "uint64"]
QUICK = [("int8", False)]


@pytest.mark.parametrize(
    ("dtype", "x64"),
    [case if case in QUICK else forms(*case) for case in itertools.product(INTEGERS, (False, True))],
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


def test_narrow_labels_of_more_classes_than_they_can_count():
    logits = np.random.default_rng(2).normal(size=(3, 1000)).astype(np.float32)
    labels = [np.array([0, 100, np.iinfo(dtype).max], dtype) for dtype in (np.int8, np.uint8)]
    of_each = jax.jit(lambda *labels: [integer(logits, y) for y in labels])
    for y, losses in zip(labels, of_each(*labels), strict=True):
        np.testing.assert_allclose(losses, reference(logits, y.astype(int)), rtol=1e-6)


# Digits and dtypes.


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
        *itertools.starmap(forms, [("float16", "bfloat16"), ("float32", "bool"), ("float32", "float32")]),
        *itertools.starmap(forms, [("bfloat16", "int32"), ("float32", "float16")]),
    ],
)
def test_dtypes_and_values_are_those_of_optax(logits_dtype, labels_dtype, blocks):
    logits = LOGITS.astype(logits_dtype)
    labels = (SHARES[LABELS] if labels_dtype in ("int32", "bool") else np.asarray(TARGETS)).astype(labels_dtype)
    of_each = jax.jit(lambda x, *ys: [[fn(x, y) for fn in both] for both, y in zip(BOTH, ys, strict=True)])
    of_integer, (out, expected) = of_each(logits, LABELS, labels)
    assert_as_optax(*of_integer, reference(logits, LABELS), logits_dtype)
    coarsest = min(logits_dtype, out.dtype.name, key=lambda dtype: -float(jnp.finfo(dtype).eps))
    assert_as_optax(out, expected, reference(logits, np.asarray(labels, float)), coarsest)


def half_ulp(exact, dtype):
    info = jnp.finfo(dtype)
    exponent = np.floor(np.log2(np.maximum(np.abs(exact), float(info.tiny))))
    return 0.5 * float(info.eps) * 2.0**exponent


@pytest.mark.forms
@pytest.mark.parametrize(
    ("dtype", "num_classes", "scale", "offset"),
    [
        ("bfloat16", 4096, 5, 0),
        *(forms(d, n, *how) for d in ("float16", "bfloat16") for n in (128, 262144) for how in ((5, 0), (1, 100))),
    ],
)
def test_16_bit_error_is_that_of_rounding_the_output(dtype, num_classes, scale, offset):
    rows, rng = max(4, 2**14 // num_classes), np.random.default_rng(0)
    logits = (scale * rng.normal(size=(rows, num_classes)) + offset).astype(dtype)
    labels = np.where(np.arange(rows) % 2, logits.argmax(-1), rng.integers(num_classes, size=rows))  # likely ones too
    targets = (np.arange(num_classes) == labels[:, None]).astype(dtype)
    exact = reference(logits, labels)

    @jax.jit
    def all_of(x, y, t):
        fns = functools.partial(integer, labels=y), functools.partial(soft, labels=t)
        return [way(fn) for fn in fns for way in (lambda fn: fn(x), lambda fn: jax.vjp(fn, x)[0])]

    for losses in all_of(logits, labels, targets):
        error = np.abs(np.asarray(losses, np.float64) - exact)
        assert (error <= half_ulp(exact, dtype) + 1e-6 * np.abs(exact)).all()


@pytest.mark.parametrize(("offset", "scale"), [forms(0, 1), forms(0, 15), (1e4, 1)])
def test_the_error_is_at_most_twice_that_of_optax(offset, scale, blocks):
    rng = np.random.default_rng(0)
    logits = np.float32(offset + scale * rng.normal(size=(64, 50)))
    labels = rng.integers(0, 50, 64)
    targets = np.eye(50, dtype=np.float32)[labels]
    with jax.enable_x64(True):
        exact = reference(logits, labels), np.asarray(jax.nn.softmax(jnp.asarray(logits, float), -1)) - targets
    peers = jax.jit(
        lambda x: [
            (jax.vjp(fn, x)[0], grad(fn, x))
            for fn in (
                lambda x: optax.losses.softmax_cross_entropy_with_integer_labels(x, labels),
                lambda x: optax.losses.softmax_cross_entropy(x, targets),
            )
        ]
    )(logits)
    for ours, theirs in zip(of_both(logits, labels, targets), peers, strict=True):
        for a, b, e in zip(ours, theirs, exact, strict=True):
            few_ulp = 4 * np.finfo(np.float32).eps * max(1, np.abs(e).max())
            assert np.abs(a - e).max() <= max(2 * np.abs(b - e).max(), few_ulp)


def test_common_offset_cancels(blocks):
    logits, args = np.float32([[1, 2, 3]]), (np.array([2]), np.float32([[0, 0, 1]]))
    expected = of_both(logits, *args)
    for offset in (0, 1e5, -1e5, 1e7):
        for (losses, gradient), (_, same) in zip(of_both(logits + np.float32(offset), *args), expected, strict=True):
            np.testing.assert_allclose(losses, [0.40760596], rtol=1e-6)
            np.testing.assert_allclose(gradient, same, rtol=1e-6)


def test_all_logits_at_the_lowest_value_are_uniform():
    logits = [jnp.full((1, 4), jnp.finfo(dtype).min, dtype) for dtype in ("float16", "bfloat16", "float32")]
    where = np.array([[True, True, True, False]])
    of_each = jax.jit(lambda logits: [[integer(x, jnp.array([1]), where=w) for w in (None, where)] for x in logits])
    for losses in of_each(logits):
        np.testing.assert_allclose(np.asarray(losses, float)[:, 0], np.log([4, 3]), rtol=4e-3)


def test_float16_gradient_of_many_classes_does_not_vanish():
    """optax: loss inf or NaN, and a gradient of 0 for every other class."""
    logits = (0.02 * np.random.default_rng(0).normal(size=(2, 128256))).astype(np.float16)
    labels = np.array([5, 7])
    losses, gradient = jax.jit(lambda x: (integer(x, labels), grad(lambda x: integer(x, labels), x)))(logits)
    np.testing.assert_allclose(np.asarray(losses, float), reference(logits, labels), rtol=1e-3)
    expected = np.exp(np.float64(logits))
    expected /= expected.sum(-1, keepdims=True)
    expected[[0, 1], labels] -= 1
    np.testing.assert_allclose(np.asarray(gradient, float), expected, rtol=1e-3, atol=6e-8)


@pytest.mark.forms
def test_gradient_of_broadcast_16_bit_logits_is_rounded_once():
    targets = np.eye(3, dtype=np.float32)[np.arange(10_000) % 3]
    step = jax.jit(jax.grad(lambda x: soft(x, targets).sum()))
    exact, gradient = (step(np.arange(3).astype(dtype)) for dtype in (np.float32, jnp.bfloat16))
    np.testing.assert_allclose(np.asarray(gradient, float), exact, rtol=2**-8)


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


@pytest.mark.parametrize("masked", [forms(False), True])
def test_labels_of_0_need_no_probabilities(blocks, masked):
    """Logits of only -inf have none: with labels of 0 the loss is 0, with others NaN."""
    logits = np.where(np.arange(4)[:, None] % 2 == 0, -INF, LOGITS).astype(np.float32)
    labels = np.where(np.arange(4)[:, None] < 2, 0, TARGETS)
    where = jnp.asarray(np.arange(7) != 3) if masked else None
    losses = {
        "soft": lambda x, t: soft(x, t, where=None if where is None else where[None]),
        "poly": lambda x, t: poly_loss_cross_entropy(x, t, where=None if where is None else where[None]),
        "ranking": lambda x, t: ranking_softmax_loss(x, t, where=where, reduce_fn=None),
    }

    @jax.jit
    def all_of(logits, labels):
        def derivatives(loss):
            gradient = lambda x: jax.grad(lambda *a: loss(*a).sum(), (0, 1))(x, labels)  # noqa: E731
            with masksafe.forward_mode():
                value, along = jax.jvp(lambda x: loss(x, labels), (logits,), (jnp.cos(LOGITS),))
            return value, along, *gradient(logits), jax.jvp(gradient, (logits,), (jnp.cos(LOGITS),))[1][0]

        return jax.tree.map(derivatives, losses)

    for value, *derivatives, of_labels, second in all_of(logits, labels).values():
        np.testing.assert_array_equal(value[:2], 0)
        np.testing.assert_array_equal(np.isnan(value), [False, False, True, False])
        for x in (*derivatives, second):
            assert not np.asarray(x)[:2].any()
            np.testing.assert_array_equal(np.isnan(x.reshape(4, -1)).any(1), [False, False, True, False])
        assert np.isfinite(of_labels[:2]).all()


# Derivatives.


@pytest.mark.forms
def test_forward_mode_of_a_label_at_minus_infinity_and_of_a_bad_one():
    logits, label, bad = jnp.array([-INF, 0.0, 1.0]), jnp.array([1.0, 0.0, 0.0]), LABELS.at[1].set(7)
    of = lambda x: soft(x, label)  # noqa: E731

    @jax.jit
    def all_of(logits):
        with masksafe.forward_mode():
            tangent = jax.jvp(lambda x: integer(x, bad), (LOGITS,), (jnp.ones_like(LOGITS),))[1]
            return jax.jacfwd(of)(logits), tangent

    tangents, of_bad = all_of(logits)
    np.testing.assert_allclose(tangents, jax.jit(jax.grad(of))(logits), rtol=1e-6)
    np.testing.assert_array_equal(np.isnan(of_bad), [False, True, False, False])


@pytest.mark.forms
@pytest.mark.parametrize(
    ("loss", "axis_type"),
    [(integer, AxisType.Explicit), *itertools.starmap(forms, [(soft, AxisType.Explicit), (integer, AxisType.Auto)])],
)
def test_all_derivatives_work_in_shard_map(loss, axis_type, blocks):
    logits = np.random.default_rng(0).normal(size=(8, 7)).astype(np.float32)
    labels = np.arange(8) % 7 if loss is integer else np.full((8, 7), 1 / 7, np.float32)

    def derivatives(total, x, y):
        gradient = jax.grad(lambda x: total(x, y))
        with masksafe.forward_mode():
            slope = jax.jvp(lambda x: total(x, y), (x,), (x,))[1]
        return gradient(x), jax.jvp(gradient, (x,), (x,))[1], slope

    expected = jax.jit(functools.partial(derivatives, lambda x, y: loss(x, y).sum()))(logits, labels)
    with jax.set_mesh(jax.make_mesh((8,), ("batch",), axis_types=(axis_type,))):
        local = lambda x, y: jax.lax.psum(loss(x, y).sum(), "batch")  # noqa: E731
        total = jax.shard_map(local, in_specs=P("batch"), out_specs=P())
        sharded = [jax.device_put(a, P("batch")) for a in (logits, labels)]
        actual = jax.jit(functools.partial(derivatives, total))(*sharded)
    chex.assert_trees_all_close(jax.device_get(actual), jax.device_get(expected), rtol=1e-4, atol=1e-6)


# Programs.


def sum_and_gradient(loss, logits, labels, where):
    return jax.value_and_grad(lambda x: loss(x, labels, where=where).astype(jnp.float32).mean())(logits)


@pytest.mark.parametrize(
    ("loss", "dtype", "where"),
    [
        forms(integer, "bfloat16", (4096, 512)),
        *itertools.starmap(forms, itertools.product([integer, soft], ["float32", "bfloat16"], [None, (4096,)])),
    ],
)
def test_value_and_gradient_lower_for_cuda_without_a_loop(loss, dtype, where):
    shape = jax.ShapeDtypeStruct((4096, 512), dtype)
    labels = jax.ShapeDtypeStruct((4096,), jnp.int32) if loss is integer else shape
    where = None if where is None else jax.ShapeDtypeStruct(where, bool)
    step = jax.jit(functools.partial(sum_and_gradient, loss))
    assert "while" not in jax.export.export(step, platforms=["cuda"])(shape, labels, where).mlir_module()


@pytest.mark.forms
@pytest.mark.parametrize("where", [CLASSES, ROWS])
@pytest.mark.parametrize("loss", [integer, soft])
def test_checkify_gives_no_false_alarm_and_finds_a_bad_label(loss, where, blocks):
    live = np.broadcast_to(where if where.ndim == 2 else where[:, None], (4, 7))
    logits = jnp.where(live, LOGITS, NAN)
    labels = jnp.where(live.any(-1), live.argmax(-1), -100) if loss is integer else jnp.where(live, TARGETS, NAN)
    step = functools.partial(sum_and_gradient, loss, where=where)
    # Without the switch, integer labels have masked rows computed, and their results dropped.
    with masksafe.forward_mode() if loss is integer and where is ROWS else contextlib.nullcontext():
        jax.jit(checkify.checkify(step, errors=checkify.all_checks))(logits, labels)[0].throw()
    if loss is integer:
        checked = jax.jit(checkify.checkify(step, errors=checkify.nan_checks))
        assert "nan" in checked(LOGITS, np.array([7, 3, 6, 2]))[0].get()


@pytest.mark.parametrize(
    ("dtype", "where", "options"),
    [
        ("float32", (2048, 4096), {}),
        ("float32", (2048,), {"label_smoothing": 0.1}),
        *itertools.starmap(forms, [("bfloat16", None, {}), ("float16", (2048,), {}), ("float32", None, {})]),
    ],
)
def test_no_temporary_of_the_logits_size(dtype, where, options):
    logits, labels = jax.ShapeDtypeStruct((2048, 4096), dtype), jax.ShapeDtypeStruct((2048,), jnp.int32)
    where = None if where is None else jax.ShapeDtypeStruct(where, bool)
    with platforms.chosen(row_block_elements=2**18, most_elements_in_one_pass=2**19):
        step = functools.partial(sum_and_gradient, functools.partial(integer, **options))
        compiled = jax.jit(step).lower(logits, labels, where).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.2 * 2048 * 4096 * jnp.dtype(dtype).itemsize


@pytest.mark.parametrize("where", [None, (512,)])
def test_the_exponentials_of_all_logits_are_computed_once(where):
    logits, labels = jax.ShapeDtypeStruct((512, 1000), "float32"), jax.ShapeDtypeStruct((512,), jnp.int32)
    where = None if where is None else jax.ShapeDtypeStruct(where, bool)
    step = optimised_jit(functools.partial(sum_and_gradient, integer))
    assert (
        len(re.findall(r"f32\[512,1000\]\S* exponential\(", step.lower(logits, labels, where).compile().as_text())) == 1
    )


@pytest.mark.parametrize(
    "loss", [soft, *map(forms, (poly_loss_cross_entropy, masksafe.losses.safe_softmax_cross_entropy))]
)
@pytest.mark.parametrize("where", [forms(None), (np.arange(520) % 3 != 1)[:, None]])
def test_the_value_alone_is_that_before_a_gradient_whatever_the_logits_are(loss, where):
    """In arrays so large that XLA's library for CPUs computes the value alone, whose maxima lose a NaN."""
    rng = np.random.default_rng(0)
    logits, targets = rng.normal(size=(520, 40)).astype(np.float32), rng.dirichlet(np.ones(40), 520).astype(np.float32)
    logits[:8, 5] = NAN, INF, -INF, -INF, -INF, 3e38, -3e38, 60
    targets[2:4, 5] = 0, 1e-30
    logits[8:10] = -INF
    targets[8] = targets[10] = 0
    targets[11, 3] = NAN
    options = {} if loss is masksafe.losses.safe_softmax_cross_entropy else {"where": where}
    value = functools.partial(loss, **options)
    before = optimised_jit(lambda x, t: jax.vjp(lambda x: value(x, t), x)[0])(logits, targets)
    np.testing.assert_allclose(optimised_jit(value)(logits, targets), before, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(("loss", "labels"), [(integer, LABELS), (soft, TARGETS)])
def test_residuals_are_the_arguments_and_row_values(loss, labels):
    _, pull_back = jax.vjp(lambda x: loss(x, labels, where=jnp.asarray(CLASSES)), LOGITS)
    large = [a for a in jax.tree.leaves(pull_back) if a.size >= LOGITS.size and a.dtype != jnp.bool_]
    assert len(large) <= (1 if loss is integer else 2)
    assert all(any(a is b or (np.asarray(a) == np.asarray(b)).all() for b in (LOGITS, TARGETS)) for a in large)


# Smoothed labels and the z-loss.

SMOOTHED = {"label_smoothing": 0.1, "z_loss": 0.01}


def smoothed_by_hand(logits, labels, where=True):
    """In float64, from the definition, of the classes that are left."""
    x = np.where(where, np.asarray(logits, np.float64), -np.inf)
    lse = np.log(np.sum(np.exp(x), -1))
    at_label = lse - np.take_along_axis(x, np.asarray(labels)[..., None], -1)[..., 0]
    of_all = np.mean(lse[..., None] - x, -1, where=np.broadcast_to(where, x.shape))
    return 0.9 * at_label + 0.1 * of_all, 0.01 * lse**2


@pytest.mark.parametrize("axis", [-1, forms(0)])
def test_smoothing_and_z_loss(axis, blocks):
    where = CLASSES | SHARES[np.asarray(LABELS)].astype(bool)
    expected = smoothed_by_hand(LOGITS, LABELS, where)
    logits, mask = np.moveaxis(LOGITS, -1, axis), np.moveaxis(where, -1, axis)
    components = integer(logits, LABELS, axis, mask, with_components=True, **SMOOTHED)
    chex.assert_trees_all_close(components, expected, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(integer(logits, LABELS, axis, mask, **SMOOTHED), sum(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [SMOOTHED, forms({"label_smoothing": 1.0}), forms({"z_loss": 0.5})], ids=str)
def test_options_mean_the_same_as_for_a_linear_layer(options, blocks):
    linear = functools.partial(masksafe.losses.linear_softmax_cross_entropy, kernel=np.eye(7, dtype=np.float32))
    of_layer = lambda x: linear(x, labels=LABELS, where=ROWS, reduction="sum", **options)  # noqa: E731
    of_logits = lambda x: jnp.sum(integer(x, LABELS, where=ROWS, **options))  # noqa: E731
    results = (jax.jit(jax.value_and_grad(fn))(LOGITS) for fn in (of_logits, of_layer))
    chex.assert_trees_all_close(*results, rtol=2e-5, atol=1e-6)


def test_a_bad_label_shows_with_smoothing_and_not_in_the_z_loss(blocks):
    for label in (7, -1):
        labels = LABELS.at[1].set(label)
        cross_entropy, z_loss = integer(LOGITS, labels, with_components=True, **SMOOTHED)
        np.testing.assert_array_equal(np.isnan(cross_entropy), np.arange(4) == 1)
        assert np.isfinite(z_loss).all()
        gradient = jax.grad(lambda x, labels=labels: integer(x, labels, **SMOOTHED).sum())(LOGITS)
        np.testing.assert_array_equal(np.isnan(gradient).any(-1), np.arange(4) == 1)


def test_without_a_z_loss_its_component_is_0():
    cross_entropy, z_loss = integer(LOGITS.astype(jnp.bfloat16), LABELS, with_components=True)
    assert cross_entropy.dtype == z_loss.dtype == jnp.bfloat16
    assert not z_loss.any()


@pytest.mark.parametrize(
    ("options", "argument"),
    [({"label_smoothing": -0.1}, "label_smoothing"), ({"z_loss": NAN}, "z_loss")],
)
def test_options_are_refused_by_name(options, argument):
    with pytest.raises((TypeError, ValueError), match=f"^softmax_cross_entropy_with_integer_labels: {argument}"):
        integer(LOGITS, LABELS, **options)
