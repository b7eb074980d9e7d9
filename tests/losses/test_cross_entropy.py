"""Cross-entropies and log-probabilities: what neither the contract's table nor the comparison with optax proves."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparisons import in_float64
from tiers import exhaustive_params, optimised_jit, parametrize

import masksafe
from masksafe._core import platforms
from masksafe.losses import log_probs, poly_loss_cross_entropy

integer = masksafe.losses.softmax_cross_entropy_with_integer_labels
soft = masksafe.losses.softmax_cross_entropy
with_entropy = functools.partial(log_probs, with_entropy=True)
SMOOTHED = {"label_smoothing": 0.1, "z_loss": 0.01}
BOTH = [(integer, optax.softmax_cross_entropy_with_integer_labels), (soft, optax.softmax_cross_entropy)]

NAN, INF = jnp.nan, jnp.inf
RNG = np.random.default_rng(0)
LOGITS = jax.device_put(np.float32(3 * RNG.normal(size=(4, 7))))
LABELS = jnp.array([0, 3, 6, 2])
TARGETS = jax.device_put(np.float32(RNG.dirichlet(np.ones(7), 4)))
ROWS = np.array([True, False, True, True])
CLASSES = np.array([[1, 1, 1, 0, 0, 1, 0], [0, 0, 0, 1, 1, 1, 1], [1] * 7, [0] * 7], bool)
SHARES = np.eye(7, dtype=np.float32)


@pytest.fixture(params=["blocks", *exhaustive_params(["one pass"])], scope="module")
def blocks(request):
    """Blocks so small that even these small arrays take several, and one pass."""
    sizes = {"row_block_elements": 8, "most_elements_in_one_pass": 16}
    with platforms.chosen(**sizes if request.param == "blocks" else {}):
        yield


def grad(fn, *args):
    return jax.grad(lambda *a: fn(*a).astype(jnp.float32).sum())(*args)


OPS = {
    "integer": lambda x, y, t: integer(x, y),
    "soft": lambda x, y, t: soft(x, t),
    "log_probs": lambda x, y, t: -log_probs(x, y),
    "log_probs with entropy": lambda x, y, t: -with_entropy(x, y)[0],
    "entropy": lambda x, y, t: with_entropy(x, y)[1],
}


@jax.jit
def of_each(logits, labels, targets):
    """The result of each op and its gradient, in one program for all arrays of the same shapes."""
    return {name: (op(logits, labels, targets), grad(op, logits, labels, targets)) for name, op in OPS.items()}


@parametrize("loss", [soft], exhaustive=[with_entropy])
def test_masked_gradients_are_zero_whatever_the_cotangents_of_their_rows(loss):
    """The square root of a masked loss has one that is infinite."""
    labels = TARGETS if loss is soft else CLASSES.argmax(-1)

    @jax.jit
    def gradient(x, d):
        out, pull_back = jax.vjp(lambda x: loss(x, labels, where=CLASSES), x)
        return pull_back(jax.tree.map(lambda _: d, out))[0]

    for cotangent in (INF, -INF, NAN):
        np.testing.assert_array_equal(gradient(LOGITS, jnp.full(4, cotangent))[~CLASSES], 0)


@parametrize("shape", [(3, 0)], exhaustive=[(0, 3), (1,), (2, 1)])
def test_where_there_is_no_other_class_or_no_row_all_is_zero(shape):
    for results in of_each(np.ones(shape, np.float32), np.zeros(shape[:-1], int), np.ones(shape, np.float32)).values():
        for result, of_shape in zip(results, (shape[:-1], shape), strict=True):
            np.testing.assert_array_equal(result, np.zeros(of_shape))
    shapes = jax.eval_shape(lambda x, y: (integer(x, y, (1, 2)), soft(x, x, (1, 2))), jnp.zeros((0, 3, 4)), LABELS[:0])
    assert [x.shape for x in shapes] == [(0,), (0,)]


@parametrize(
    ("axis", "masked"), [((2, 0), "classes")], exhaustive=[(1, "rows"), ((0, -1), "classes"), ((2, 1, 0), "rows")]
)
def test_any_axes_are_as_the_last_one(axis, masked):
    shape, rng = (3, 4, 5), np.random.default_rng(0)
    axes = tuple(a % 3 for a in (axis if isinstance(axis, tuple) else (axis,)))
    rows = tuple(n for i, n in enumerate(shape) if i not in axes)
    classes_last = lambda x: jnp.moveaxis(x, axes, range(-len(axes), 0)).reshape(*rows, -1)  # noqa: E731
    logits, targets = rng.normal(size=shape).astype(np.float32), rng.random(shape).astype(np.float32) + 0.05
    where = {"rows": rng.random(rows) < 0.5, "classes": rng.random(shape) < 0.7}[masked]
    mask = np.asarray(classes_last(where)) if masked == "classes" else where[..., None]
    labels = np.broadcast_to(mask, classes_last(logits).shape).argmax(-1)

    @jax.jit
    def all_of(logits):
        step = lambda fn, *a: jax.value_and_grad(lambda x: jnp.sum(jnp.cos(fn(x, *a[:-1], where=a[-1]))))(logits)  # noqa: E731
        last = lambda fn: lambda x, y, where: fn(classes_last(x), y, where=where)  # noqa: E731
        calls = (integer, labels, labels), (soft, targets, classes_last(targets)), (log_probs, labels, labels)
        return [(step(fn, y, axis, where), step(last(fn), z, mask)) for fn, y, z in calls]

    for actual, expected in all_of(logits):
        chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_masks_of_fewer_axes():
    """One of the logits' rank is of classes, also where labels have a higher one; of axes of rows it is the last."""
    where = np.array([True, True, False])
    both = jax.jit(lambda x, t: [fn(x, t, where=where) for fn in BOTH[1]])
    np.testing.assert_allclose(*both(jnp.arange(3.0), TARGETS[:3, :3]), rtol=1e-6)
    losses = integer(jnp.zeros((4, 3, 7)), jnp.zeros((4, 3), int), where=where)
    np.testing.assert_array_equal(losses > 0, jnp.broadcast_to(where, (4, 3)))


def test_a_bad_logit_has_a_bad_gradient_in_its_own_row_only(blocks):
    for bad in (NAN, INF):
        for _, gradient in jax.device_get(of_each(LOGITS.at[2, 0].set(bad), LABELS, SHARES[LABELS])).values():
            np.testing.assert_array_equal(np.isnan(gradient).all(1), np.arange(4) == 2)
            np.testing.assert_array_equal(np.isnan(gradient).any(1), np.arange(4) == 2)
    # A class of probability 0 is as if it were taken out.
    results = of_each(LOGITS.at[2, 0].set(-INF), LABELS, SHARES[LABELS])
    assert not any(gradient[2, 0] for _, gradient in results.values())
    found = jax.tree.map(lambda x: x[2:3, 1:] if x.ndim == 2 else x[2:3], results)
    expected = of_each(LOGITS[2:3, 1:], LABELS[2:3] - 1, SHARES[LABELS][2:3, 1:])
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)


@parametrize("loss", [integer], exhaustive=[with_entropy])
def test_row_whose_loss_is_selected_away_gets_no_gradient(loss):
    """The way people mask without `where`: jnp.where behind the loss, over padded labels. Nor is it in the Hessian."""
    labels, logits = np.array(LABELS), np.array(LOGITS)
    labels[1] = -100
    kept = labels >= 0

    @jax.jit
    def all_of(logits):
        total = lambda x: sum(jnp.where(kept, y, 0).sum() for y in jax.tree.leaves(loss(x, labels)))  # noqa: E731
        expected = jax.grad(lambda x: sum(map(jnp.sum, jax.tree.leaves(loss(x, labels, where=kept)))))(logits)
        return jax.grad(total)(logits), expected, jax.jvp(jax.grad(total), (logits,), (jnp.cos(LOGITS),))[1]

    for bad in (NAN, INF):
        logits[1, 3] = bad
        gradient, expected, product = all_of(logits)
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-7)
        assert np.isfinite(product).all()
        assert not gradient[1].any()
        assert not product[1].any()


def test_labels_and_the_epsilon_of_a_row_whose_loss_is_selected_away_get_no_gradient():
    total = lambda x, t, e: jnp.where(ROWS, soft(x, t) + poly_loss_cross_entropy(x, t, epsilon=e), 0).sum()  # noqa: E731
    step, logits = jax.jit(jax.grad(total, (1, 2))), LOGITS.at[1, 0].set(-INF)
    for bad in (0, NAN, INF):
        of_targets, of_epsilon = step(logits.at[1, 3].set(bad), TARGETS, jnp.ones(4))
        assert not of_targets[1].any()
        np.testing.assert_array_equal(of_epsilon == 0, ~ROWS)


@parametrize("x64", [False], exhaustive=[True])
@parametrize("dtype", ["int64"], exhaustive=["int8", "uint8", "uint32", "uint64"])
def test_label_out_of_range_gives_nan_in_its_row(dtype, x64):
    limits = np.iinfo(dtype)
    numbers = limits.min, -100, -1, 7, limits.max, 2**32, 2**32 + 3, -(2**32)
    bad = [v for v in numbers if limits.min <= v <= limits.max and not 0 <= v < 7]
    labels, expected = np.array([0, *bad, 6], dtype), np.array([False, *[True] * len(bad), False])
    logits = np.random.default_rng(0).normal(size=(len(labels), 7)).astype(np.float32)
    with jax.enable_x64(x64):
        losses, gradient = jax.jit(lambda x: (integer(x, labels), grad(lambda x: integer(x, labels), x)))(logits)
    np.testing.assert_array_equal(np.isnan(losses), expected)
    np.testing.assert_array_equal(np.isnan(gradient), np.broadcast_to(expected[:, None], gradient.shape))


def test_a_bad_label_shows_with_smoothing_and_leaves_the_entropy_and_the_z_loss(blocks):
    of = functools.partial(integer, **SMOOTHED)
    of_z = lambda x, y: of(x, y, with_components=True)[1]  # noqa: E731
    smoothed = jax.jit(lambda y: (of(LOGITS, y, with_components=True), grad(of, LOGITS, y), grad(of_z, LOGITS, y)))
    clean, expected = of_each(LOGITS, LABELS, TARGETS), np.arange(4) == 1
    for label in (7, -1, 2**31 - 1):
        labels = LABELS.at[1].set(label)
        results = of_each(LOGITS, labels, TARGETS)
        chex.assert_trees_all_equal(results["entropy"], clean["entropy"])
        (loss, z_loss), gradient, of_z_loss = smoothed(labels)
        assert np.isfinite(z_loss).all()
        assert np.isfinite(of_z_loss).all()
        for losses, gradients in ((loss, gradient), results["log_probs"], results["log_probs with entropy"]):
            np.testing.assert_array_equal(np.isnan(losses), expected)
            np.testing.assert_array_equal(np.isnan(gradients), np.broadcast_to(expected[:, None], (4, 7)))


def test_narrow_labels_of_more_classes_than_they_can_count():
    logits = np.random.default_rng(2).normal(size=(3, 1000)).astype(np.float32)
    labels = [np.array([0, 100, np.iinfo(dtype).max], dtype) for dtype in (np.int8, np.uint8)]
    for losses in jax.jit(lambda labels: [(integer(logits, y), integer(logits, y.astype(int))) for y in labels])(
        labels
    ):
        np.testing.assert_allclose(*losses, rtol=1e-6)


@parametrize(
    ("dtype", "where", "temperature", "blocks"),
    [("bfloat16", CLASSES, 0.7, "blocks")],
    exhaustive=[
        ("float32", ROWS, 1.0, "one pass"),
        ("float16", CLASSES, 3.0, "one pass"),
        ("float32", None, 1e-4, "blocks"),
    ],
    indirect=["blocks"],
)
def test_log_probs_and_their_gradients_are_those_of_float64(dtype, where, temperature, blocks):
    labels = LABELS if where is not CLASSES else CLASSES.argmax(-1)
    logits, options = LOGITS.astype(dtype), {"where": where, "temperature": temperature}

    @jax.jit
    def all_of(x):
        of_both = [lambda x, *y, i=i: with_entropy(x, *y, **options)[i] for i in (0, 1)]
        return [(fn(x, labels), -grad(fn, x, labels)) for fn in (functools.partial(log_probs, **options), *of_both)]

    for results, expected in zip(all_of(logits), in_float64(all_of, logits), strict=True):
        for a, e in zip(results, expected, strict=True):
            assert a.dtype == ("float32" if a.ndim == 1 else dtype)
            rtol = 0.6 * float(jnp.finfo(a.dtype).eps) + 3e-6
            np.testing.assert_allclose(np.asarray(a, float), e, rtol=rtol, atol=1e-7)


@parametrize(
    ("dtype", "number", "scale", "offset"),
    [("float16", 128256, 0.02, 0)],
    exhaustive=[("float16", 262144, 5, 0), ("bfloat16", 262144, 1, 100), ("bfloat16", 128, 5, 0)],
)
def test_16_bits_of_many_classes_are_rounded_once(dtype, number, scale, offset):
    rng, eps = np.random.default_rng(0), float(jnp.finfo(dtype).eps)
    logits = (scale * rng.normal(size=(4, number)) + offset).astype(dtype)
    labels = np.where(np.arange(4) % 2, logits.argmax(-1), rng.integers(number, size=4))  # likely ones too

    @jax.jit
    def all_of(x):
        fns = lambda x: integer(x, labels), lambda x: soft(x, jax.nn.one_hot(labels, number, dtype=dtype))
        return [(fn(x), *jax.vjp(fn, x)[:1], grad(fn, x)) for fn in fns]

    for (*values, gradient), (loss, _, of_loss) in zip(all_of(logits), in_float64(all_of, logits), strict=True):
        for value in values:
            np.testing.assert_allclose(np.asarray(value, float), loss, rtol=0.5 * eps + 1e-6)
        np.testing.assert_allclose(np.asarray(gradient, float), of_loss, rtol=eps, atol=6e-8)


def categorical(x, y):
    """The log_prob and the entropy of distrax.Categorical."""
    log_p = jax.nn.log_softmax(x)
    return jnp.take_along_axis(log_p, y[:, None], -1)[:, 0], -jnp.sum(jnp.exp(log_p) * log_p, -1)


PEERS = {
    "integer": lambda x, y, t: BOTH[0][1](x, y),
    "soft": lambda x, y, t: BOTH[1][1](x, t),
    "log_probs": lambda x, y, t: -categorical(x, y)[0],
    "entropy": lambda x, y, t: categorical(x, y)[1],
}


def test_the_error_is_at_most_twice_that_of_the_peer(blocks):
    rng = np.random.default_rng(0)
    of_peers = jax.jit(lambda *args: {name: (peer(*args), grad(peer, *args)) for name, peer in PEERS.items()})
    for offset, scale in ((1e4, 1), (0, 1), (0, 15)):
        logits, labels = np.float32(offset + scale * rng.normal(size=(64, 50))), rng.integers(0, 50, 64)
        args = logits, labels, np.eye(50, dtype=np.float32)[labels]
        ours, correct = of_each(*args), in_float64(of_each, *args)
        for name, theirs in of_peers(*args).items():
            for a, b, e in zip(ours[name], theirs, correct[name], strict=True):
                few_ulp = 4 * np.finfo(np.float32).eps * max(1, np.abs(e).max())
                assert np.abs(a - e).max() <= max(2 * np.abs(b - e).max(), few_ulp)


def test_all_logits_at_the_lowest_value_are_uniform():
    logits = [jnp.full((1, 4), jnp.finfo(dtype).min, dtype) for dtype in ("float16", "bfloat16", "float32")]
    where = np.array([[True, True, True, False]])
    of_all = jax.jit(lambda logits: [[integer(x, jnp.array([1]), where=w) for w in (None, where)] for x in logits])
    for losses in of_all(logits):
        np.testing.assert_allclose(np.asarray(losses, float)[:, 0], np.log([4, 3]), rtol=4e-3)


def test_gradient_of_broadcast_16_bit_logits_is_rounded_once():
    targets = np.eye(3, dtype=np.float32)[np.arange(10_000) % 3]
    step = jax.jit(jax.grad(lambda x: soft(x, targets).sum()))
    exact, gradient = (step(np.arange(3).astype(dtype)) for dtype in (np.float32, jnp.bfloat16))
    np.testing.assert_allclose(np.asarray(gradient, float), exact, rtol=2**-8)


@parametrize(
    ("loss", "masked", "blocks"),
    [(poly_loss_cross_entropy, True, "blocks")],
    exhaustive=[(poly_loss_cross_entropy, False, "one pass"), (soft, False, "blocks"), (soft, True, "one pass")],
    indirect=["blocks"],
)
def test_labels_of_0_need_no_probabilities(blocks, loss, masked):
    """Logits of only -inf have none: with labels of 0 the loss is 0, with others NaN."""
    logits = np.where(np.arange(4)[:, None] % 2 == 0, -INF, LOGITS).astype(np.float32)
    labels, directions = np.where(np.arange(4)[:, None] < 2, 0, TARGETS), jnp.cos(LOGITS)
    logits[3, 5], labels[3, 5] = -INF, 0  # a class that is absent and excluded
    loss = functools.partial(loss, where=jnp.asarray(np.arange(7) != 3)[None] if masked else None)

    @jax.jit
    def all_of(logits, labels):
        gradient = lambda x: jax.grad(lambda *a: loss(*a).sum(), (0, 1))(x, labels)  # noqa: E731
        with masksafe.forward_mode():
            value, along = jax.jvp(lambda x: loss(x, labels), (logits,), (directions,))
        return value, along, *gradient(logits), jax.jvp(gradient, (logits,), (directions,))[1][0]

    value, along, of_logits, of_labels, second = all_of(logits, labels)
    np.testing.assert_array_equal(value[:2], 0)
    np.testing.assert_array_equal(np.isnan(value), [False, False, True, False])
    for x in (along, of_logits, second):
        assert not np.asarray(x)[:2].any()
        np.testing.assert_array_equal(np.isfinite(x.reshape(4, -1)).all(1), [True, True, False, True])
    assert np.isfinite(of_labels[jnp.array([0, 1, 3])]).all()
    assert of_logits[3, 5] == 0
    assert of_labels[3, 5] == (2 if loss.func is poly_loss_cross_entropy else 0)  # 2 is the default of epsilon


def sum_and_gradient(loss, logits, labels, where):
    """Of all that the loss returns."""

    def total(x):
        return sum(out.astype(jnp.float32).mean() for out in jax.tree.leaves(loss(x, labels, where=where)))

    return jax.value_and_grad(total)(logits)


def shapes_of(loss, shape, dtype, where):
    """Those of logits, labels and a mask, of rows or of classes, if there is one."""
    logits, labels = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[:1], jnp.int32)
    mask_shape = {"rows": shape[:1], "classes": shape}.get(where)
    return logits, logits if loss is soft else labels, mask_shape and jax.ShapeDtypeStruct(mask_shape, bool)


@parametrize(
    ("loss", "dtype", "where"),
    [(integer, "float32", "classes")],
    exhaustive=[
        (functools.partial(integer, label_smoothing=0.1), "float32", "rows"),
        (integer, "bfloat16", None),
        (functools.partial(with_entropy, temperature=0.7), "float32", None),
    ],
)
def test_no_temporary_of_the_logits_size(loss, dtype, where):
    with platforms.chosen(row_block_elements=2**18, most_elements_in_one_pass=2**19):
        step = jax.jit(functools.partial(sum_and_gradient, loss))
        compiled = step.lower(*shapes_of(loss, (2048, 4096), dtype, where)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.2 * 2048 * 4096 * jnp.dtype(dtype).itemsize


@parametrize("where", [None], exhaustive=["rows"])
def test_the_exponentials_of_all_logits_are_computed_once(where):
    step = optimised_jit(functools.partial(sum_and_gradient, integer))
    text = step.lower(*shapes_of(integer, (512, 1000), "float32", where)).compile().as_text()
    assert len(re.findall(r"f32\[512,1000\]\S* exponential\(", text)) == 1


@parametrize(
    ("loss", "options"),
    [(soft, {"where": (np.arange(520) % 3 != 1)[:, None]})],
    exhaustive=[(poly_loss_cross_entropy, {}), (masksafe.losses.safe_softmax_cross_entropy, {})],
)
def test_the_value_alone_is_that_before_a_gradient_whatever_the_logits_are(loss, options):
    """In arrays so large that XLA's library for CPUs computes the value alone, whose maxima lose a NaN."""
    rng = np.random.default_rng(0)
    logits, targets = rng.normal(size=(520, 40)).astype(np.float32), rng.dirichlet(np.ones(40), 520).astype(np.float32)
    logits[:8, 5] = NAN, INF, -INF, -INF, -INF, 3e38, -3e38, 60
    targets[2:4, 5] = 0, 1e-30
    logits[8:10] = -INF
    targets[8] = targets[10] = 0
    targets[11, 3] = NAN
    value = functools.partial(loss, **options)
    before = optimised_jit(lambda x, t: jax.vjp(lambda x: value(x, t), x)[0])(logits, targets)
    np.testing.assert_allclose(optimised_jit(value)(logits, targets), before, rtol=2e-6, atol=1e-6)


@parametrize(("loss", "labels"), [(integer, LABELS)], exhaustive=[(soft, TARGETS)])
def test_residuals_are_the_arguments_and_row_values(loss, labels):
    _, pull_back = jax.vjp(lambda x: loss(x, labels, where=jnp.asarray(CLASSES)), LOGITS)
    large = [a for a in jax.tree.leaves(pull_back) if a.size >= LOGITS.size and a.dtype != jnp.bool_]
    assert len(large) <= (1 if loss is integer else 2)
    assert all(any(a is b or (np.asarray(a) == np.asarray(b)).all() for b in (LOGITS, TARGETS)) for a in large)


CLASS_WEIGHTS = np.array([2.0, 0.5, 1.0, 3.0, 0.0, 0.25, 1.5], np.float32)


def test_a_class_of_weight_0_stays_in_the_softmax_and_a_masked_one_does_not(blocks):
    labels, unweighted = jnp.array([4, 4, 7, 2]), np.arange(7) == 4
    logits = LOGITS.at[0, 4].set(NAN).at[1, 4].set(-INF)

    @jax.jit
    def step(where):
        of = lambda x, weights: integer(x, labels, where=where, class_weights=weights)  # noqa: E731
        loss, reverse = jax.vjp(of, logits, CLASS_WEIGHTS)
        return loss, *reverse(jnp.ones(4))

    loss, gradient, of_weights = step(np.ones((1, 7), bool))
    assert not of_weights.any()
    np.testing.assert_allclose(loss, [0, 0, NAN, integer(LOGITS[3], 2)], rtol=1e-6)
    assert not gradient[:2].any()
    assert jnp.isnan(gradient[2]).all()
    assert gradient[3, 4] > 0
    loss, gradient, _ = step(~unweighted[None])
    np.testing.assert_allclose(loss, [INF, INF, NAN, integer(LOGITS[3], 2, where=~unweighted)], rtol=1e-6)
    assert not gradient[jnp.array([0, 1, 3]), 4].any()


@parametrize("bad", [NAN], exhaustive=[-1.0, INF])
def test_a_bad_class_weight_shows_in_the_rows_whose_label_has_it_alone(bad):
    weights = np.where(np.arange(7) == 3, bad, CLASS_WEIGHTS).astype(np.float32)

    @jax.jit
    def results(where):
        of_logits = lambda x: integer(x, LABELS, where=where, class_weights=weights)  # noqa: E731
        return of_logits(LOGITS), grad(of_logits, LOGITS)

    for x in results(jnp.ones(4, bool)):
        np.testing.assert_array_equal(np.isfinite(x).all(tuple(range(1, x.ndim))), LABELS != 3)
    assert jax.tree.all(jax.tree.map(lambda x: np.isfinite(x).all(), results(LABELS != 3)))


def rows_of_every_kind():
    """Logits, targets and cotangents: NaN, infinities, absent classes and rows, whose results are used or replaced."""
    logits, targets = (np.tile(np.asarray(a), (8, 1))[:26] for a in (3 * LOGITS, TARGETS))
    logits[1, 3], logits[2, 4], logits[5, 6], logits[6, 2] = np.nan, np.inf, -np.inf, -np.inf
    logits[3:5] = -np.inf
    logits[8], logits[9] = 3e38, -3e38
    targets[4], targets[6, 2], targets[7], targets[10, 3] = 0, 0, 0, np.nan
    logits[13:], targets[13:] = logits[:13], targets[:13]
    return logits, targets, np.repeat(np.array([2.0, 0.0], np.float32), 13)


@parametrize(
    ("loss", "where"),
    [(soft, None)],
    exhaustive=[(soft, np.arange(26) % 13 != 11), (masksafe.losses.poly_loss_cross_entropy, None)],
)
def test_what_one_kernel_computes_is_repaired_in_bad_rows(loss, where, choose):
    """As in one pass over the rows, in which each has what is right selected."""
    logits, targets, d_loss = rows_of_every_kind()
    if where is not None:
        logits[~where] = np.nan

    def results(logits, targets):
        out, pull_back = jax.vjp(functools.partial(loss, where=where), logits, targets)
        return out, loss(logits, targets, where=where), *pull_back(d_loss)

    in_one_pass = jax.jit(results)(logits, targets)
    choose(most_elements_in_one_pass=0, fewest_elements_of_fusions=0)
    for actual, expected in zip(jax.jit(results)(logits, targets), in_one_pass, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=2e-6, atol=2e-6)


def test_the_epsilon_of_the_poly_loss_has_a_gradient_and_broadcasts():
    loss = lambda e: poly_loss_cross_entropy(LOGITS, TARGETS, epsilon=e)  # noqa: E731
    all_of = jax.jit(lambda *epsilons: (jax.grad(lambda e: loss(e).sum())(2.0), *map(loss, epsilons)))
    slope, of_rows, several, of_two, of_one = all_of(jnp.full(4, 2.0), jnp.array([[1.0], [2.0]]), 2.0, 1.0)
    missing = jnp.sum(TARGETS * (1 - jax.nn.softmax(LOGITS)), -1)
    np.testing.assert_allclose(slope, missing.sum(), rtol=1e-5)
    np.testing.assert_allclose(of_rows, of_two, rtol=1e-6)
    np.testing.assert_allclose(several, np.stack([of_one, of_two]), rtol=1e-5)
