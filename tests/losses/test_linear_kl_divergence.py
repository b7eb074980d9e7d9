"""Divergences of linear layers, against the unfused formulas in float64."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from linear_cases import (
    BIAS,
    CLASSES,
    FEATURES,
    KERNEL,
    MASK,
    RNG,
    TOKENS,
    WIDTH,
    assert_every_derivative,
    assert_hessian_where_cotangents_are_zero,
    assert_memory_is_that_of_a_block,
    assert_same_function,
    assert_trees_close,
    bad_rows,
    forms,
    singles,
)
from tiers import pairs

import masksafe
from masksafe.losses import linear_kl_divergence, linear_kl_divergence_with_top_k_targets
from masksafe.losses._rows._divergence import is_repeated

WIDTH_OF_TARGETS, K = 5, 4
SHAPES = (TOKENS, WIDTH_OF_TARGETS), (WIDTH_OF_TARGETS, CLASSES), CLASSES
TARGET_FEATURES, TARGET_KERNEL, TARGET_BIAS = (RNG.normal(size=shape) for shape in SHAPES)
ARGS = FEATURES, KERNEL, TARGET_FEATURES, TARGET_KERNEL, BIAS, TARGET_BIAS
CLASS_MASK = RNG.random(CLASSES) < 0.7
COTANGENTS = RNG.normal(size=TOKENS)
DIRECTIONS = "forward", "reverse", "jensen_shannon"
REDUCTIONS = "mean", "sum", "none"
BAD = np.arange(TOKENS) == 5
pytestmark = pytest.mark.usefixtures("small_tiles")


def divergence_of(log_p, log_q, direction="forward", beta=0.5):
    kl = lambda a, b: jnp.sum(jnp.exp(a) * (a - b), -1)  # noqa: E731
    if direction == "jensen_shannon":
        log_m = jnp.logaddexp(log_p + np.log(beta), log_q + np.log(1 - beta))
        return beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m)
    return kl(log_p, log_q) if direction == "forward" else kl(log_q, log_p)


def reduced(losses, where, reduction):
    losses = losses if where is None else jnp.where(where, losses, 0)
    count = losses.size if where is None else jnp.sum(where)
    return {"none": losses, "sum": jnp.sum(losses), "mean": jnp.sum(losses) / jnp.maximum(count, 1)}[reduction]


def unfused(features, kernel, target_features, target_kernel, **kwargs):
    options = {"bias": 0, "target_bias": 0, "where": None, "class_mask": None, "temperature": 1, "reduction": "mean"}
    bias, target_bias, where, class_mask, temperature, reduction = ({**options, **kwargs}[n] for n in options)
    log_q, log_p = (
        jax.nn.log_softmax((x if class_mask is None else x[:, class_mask]) / temperature)
        for x in (features @ kernel + bias, target_features @ target_kernel + target_bias)
    )
    options = {name: kwargs[name] for name in ("direction", "beta") if name in kwargs}
    return reduced(divergence_of(log_p, log_q, **options), where, reduction)


def scalar(fn, **kwargs):
    """A function of the floats, with cotangents that are not all alike."""

    def loss(features, kernel, target_features, target_kernel, bias=None, target_bias=None):
        biases = {} if bias is None else {"bias": bias, "target_bias": target_bias}
        out = fn(features, kernel, target_features, target_kernel, **biases, **kwargs)
        of_rows = jnp.asarray(COTANGENTS[: out.size], out.dtype)
        return jnp.sum(out * of_rows.reshape(out.shape)) if out.ndim else 1.7 * out

    return loss


fused = functools.partial(linear_kl_divergence, target_gradients=True)
OF_EACH = [
    ["elsewhere", "cpu"],
    REDUCTIONS,
    DIRECTIONS,
    [None, MASK],
    [None, CLASS_MASK],
    [False, True],
    [1.0, 2.5],
    [None, 9],
]
NAMES = "platform", "reduction", "direction", "where", "class_mask", "with_bias", "temperature", "block_size"
QUICK = "cpu", "none", "reverse", MASK, CLASS_MASK, True, 2.5, 9


@pytest.mark.parametrize(NAMES, [QUICK, *(forms(*case) for case in pairs(*OF_EACH))], indirect=["platform"])
def test_value_and_gradients_are_those_of_the_formula(
    platform, reduction, direction, where, class_mask, with_bias, temperature, block_size
):
    kwargs = {"reduction": reduction, "direction": direction, "beta": 0.3, "where": where, "class_mask": class_mask}
    ours = functools.partial(fused, block_size=block_size)
    losses = [scalar(fn, temperature=temperature, **kwargs) for fn in (ours, unfused)]
    assert_same_function(*losses, ARGS if with_bias else ARGS[:4])


@pytest.mark.forms
@pytest.mark.parametrize(("direction", "reduction"), [*zip(DIRECTIONS, REDUCTIONS, strict=True)])
def test_every_derivative(direction, reduction):
    kwargs = {"where": MASK, "reduction": reduction, "direction": direction, "temperature": 2.0}
    assert_every_derivative(*(scalar(fn, **kwargs) for fn in (functools.partial(fused, block_size=9), unfused)), ARGS)


@pytest.mark.forms
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_second_derivatives_where_the_cotangent_is_0(reduction):
    of = lambda k: linear_kl_divergence(FEATURES[:3], k, TARGET_FEATURES[:3], TARGET_KERNEL, reduction=reduction)  # noqa: E731
    assert_hessian_where_cotangents_are_zero(of, (KERNEL,))


@pytest.mark.forms
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_hessian_where_student_and_teacher_agree(direction):
    """The Fisher information; any kink of the formulas at 0 would show."""
    x = jnp.array([[0.3, -1.0, 0.7]])
    of = lambda fn: lambda y: fn(y, jnp.eye(3), x, jnp.eye(3), direction=direction, reduction="sum")  # noqa: E731
    with jax.enable_x64(True):
        both = jax.jit(lambda x: [jax.hessian(of(fn))(x) for fn in (linear_kl_divergence, unfused)])
        assert_trees_close(*both(x.astype("float64")), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("temperature", [1e-3, 1e-9, 1e-38])
@pytest.mark.parametrize("direction", ["reverse", "jensen_shannon"])
def test_a_low_temperature_costs_no_digits(direction, temperature):
    """The largest logit is subtracted first: the quotients alone would lose their difference, or overflow."""
    student, teacher = np.float32([[3.3, 3.3, -5, -7]]), np.float32([[3.3, 3.3, 3.3, -7]])
    q, p = np.array([1, 1, 0]) / 2, np.ones(3) / 3
    kernel = np.eye(4, dtype=np.float32)
    fn = functools.partial(linear_kl_divergence, temperature=temperature, direction=direction)
    value, gradient = jax.value_and_grad(fn)(student, kernel, teacher, kernel)
    kl = lambda a, b: np.sum(a * np.log(np.where(a > 0, a, b) / b))  # noqa: E731
    m = (p + q) / 2
    np.testing.assert_allclose(value, kl(q, p) if direction == "reverse" else (kl(p, m) + kl(q, m)) / 2, rtol=1e-6)
    assert not np.isnan(gradient).any()


def test_teacher_has_no_gradients_unless_asked():
    loss = lambda *args: linear_kl_divergence(*args[:4], bias=args[4], target_bias=args[5])  # noqa: E731
    gradients = jax.jit(jax.grad(loss, range(6)))(*ARGS)
    assert [bool(np.any(g)) for g in gradients] == [True, True, False, False, True, False]
    with masksafe.forward_mode():
        along = jax.jit(lambda t: jax.jvp(lambda t: loss(*ARGS[:2], t, *ARGS[3:]), (t,), (t,))[1])
        assert along(TARGET_FEATURES) == 0


def test_equals_optax_with_any_batch_axes():
    shape, rows = (2, 4, 5), np.array([True, False])[:, None, None]

    @jax.jit
    def both(features, target_features):
        batched = features.reshape(*shape, WIDTH), KERNEL, target_features.reshape(*shape, WIDTH_OF_TARGETS)
        of_optax = optax.kl_divergence(
            jax.nn.log_softmax(features @ KERNEL), jax.nn.softmax(target_features @ TARGET_KERNEL)
        )
        ours = linear_kl_divergence(*batched, TARGET_KERNEL, where=rows, reduction="none")
        return ours, jnp.where(rows, of_optax.reshape(shape), 0)

    assert_trees_close(*both(FEATURES, TARGET_FEATURES), rtol=2e-5)


# Digits.


def of_students(log_p, log_q, beta=0.3):
    """In float64: for each direction the divergences, and their gradients with respect to the student's logits."""
    p, q = np.exp(log_p), np.exp(log_q)
    log_m = np.log(beta * p + (1 - beta) * q)
    mean_of = lambda p, x: np.sum(p * x, -1, keepdims=True)  # noqa: E731
    reverse, of_mixture = mean_of(q, log_q - log_p), mean_of(q, log_q - log_m)
    return {
        "forward": (mean_of(p, log_p - log_q), q - p),
        "reverse": (reverse, q * (log_q - log_p - reverse)),
        "jensen_shannon": (
            beta * mean_of(p, log_p - log_m) + (1 - beta) * of_mixture,
            (1 - beta) * q * (log_q - log_m - of_mixture),
        ),
    }


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("noise", [forms(1.0), 1e-3])
def test_the_error_is_that_of_the_formula(direction, noise):
    """In float32, against float64: at most twice that of the unfused formula, or a few units in the last place of 1."""
    rng = np.random.default_rng(1)
    teacher = np.float32(rng.normal(size=(8, 50)) * 3)
    student = np.float32(teacher + noise * rng.normal(size=teacher.shape))

    @jax.jit
    def of_both(x, y):
        each = ((lambda x, fn=fn: fn(x, jnp.eye(50), y, jnp.eye(50), **options)) for fn in (fused, unfused))
        options = {"reduction": "none", "direction": direction, "beta": 0.3}
        return [(loss(x), jax.grad(lambda x, loss=loss: loss(x).sum())(x)) for loss in each]

    log_p, log_q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in map(np.float64, (teacher, student)))
    exact, d_exact = of_students(log_p, log_q)[direction]
    for ours, peers, desired in zip(*of_both(student, teacher), (exact[:, 0], d_exact), strict=True):
        of_ours, of_peers = (np.abs(x - desired).max() for x in (ours, peers))
        assert of_ours <= max(2 * of_peers, 4 * np.finfo(np.float32).eps * max(1, np.abs(desired).max()))


@pytest.mark.forms
@pytest.mark.parametrize("direction", ["forward", forms("reverse"), forms("jensen_shannon")])
def test_equal_sides_far_ones_and_common_offsets(direction):
    """No divergence, no overflow, and no digits lost."""
    args = singles([np.round(x) for x in ARGS[:4]])  # logits that are exact with the offset

    @jax.jit
    def all_of(far, offset):
        of = functools.partial(linear_kl_divergence, direction=direction)
        shifted = lambda f, k: of(f, k, *args[2:], bias=offset, target_bias=-offset)  # noqa: E731
        of_far = jax.value_and_grad(lambda x: of(x, jnp.eye(3), -far, jnp.eye(3)))(far)
        return of(*ARGS[:2], *ARGS[:2]), of_far, jax.value_and_grad(shifted, (0, 1))(*args[:2])

    far = np.float32([[300.0, 0.0, -300.0]])
    same, (value, gradient), desired = all_of(far, np.zeros(CLASSES, np.float32))
    assert abs(same) < 1e-6
    np.testing.assert_allclose(value, np.log(2) if direction == "jensen_shannon" else 600, rtol=1e-6)
    assert np.isfinite(gradient).all()
    for offset in (1e3, 1e6):
        assert_trees_close(all_of(far, np.full(CLASSES, offset, np.float32))[2], desired, rtol=1e-4, atol=2e-5)


@pytest.mark.forms
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_gradients_have_the_digits_of_their_dtype(dtype):
    rng = np.random.default_rng(0)
    args = [rng.normal(size=a.shape).astype(dtype) for a in ARGS]
    options = {"where": rng.random(TOKENS) < 0.6, "direction": "reverse"}
    value, gradients = jax.jit(jax.value_and_grad(scalar(fused, **options), range(6)))(*args)
    assert [x.dtype for x in (value, *gradients)] == ["float32", *[dtype] * 6]
    with jax.enable_x64(True):
        desired = jax.jit(jax.value_and_grad(scalar(unfused, **options), range(6)))(*(np.float64(a) for a in args))
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(value, desired[0], rtol=1e-5)
    assert_trees_close(gradients, desired[1], rtol=4 * eps, atol=4 * eps)


TYPES = "bfloat16", "float32", "float64"
EVERY_PAIR_OF_TYPES = [tuple(TYPES[n % 3] for n in (i, j, i + j, i + 2 * j)) for i in range(3) for j in range(3)]


@pytest.mark.forms
@pytest.mark.parametrize("dtypes", [("bfloat16", "float64", "float32", "float16"), *EVERY_PAIR_OF_TYPES], ids=str)
def test_mixed_dtypes_have_second_derivatives(dtypes):
    with jax.enable_x64(True):
        args = [jax.ShapeDtypeStruct(a.shape, d) for a, d in zip(ARGS, dtypes, strict=False)]
        loss = lambda *args: fused(*args, reduction="none").sum()  # noqa: E731
        gradients = jax.eval_shape(jax.grad(loss, range(4)), *args)
        of_each = jax.eval_shape(jax.hessian(loss, range(4)), *args)
    assert [g.dtype for g in gradients] == list(dtypes)
    assert [row[i].dtype for i, row in enumerate(of_each)] == list(dtypes)


@pytest.mark.parametrize("reduction", ["sum", forms("none")])
def test_float16_gradients_of_scaled_losses_survive(reduction):
    eye = np.eye(2, dtype="float16")
    near, teacher = np.float16([[1.0, 0.0]]), np.float16([[1.02, 0.0]])
    loss = lambda x: 4096 * jnp.sum(linear_kl_divergence(x, eye, teacher, eye, reduction=reduction))  # noqa: E731
    difference = np.diff([1 / (1 + np.exp(-float(x[0, 0]))) for x in (teacher, near)])
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(near), 4096 * difference * np.array([[1, -1]]), rtol=5e-3)


@pytest.mark.parametrize("direction", ["reverse", forms("forward")])
def test_float16_gradients_of_a_sum_do_not_overflow_at_a_low_temperature(direction):
    near, far = np.float16([[1.0, 0.98, -1.0]]), np.float16([[-1.0, 0.5, 1.0]])
    eye = np.eye(3, dtype="float16")
    loss = functools.partial(linear_kl_divergence, direction=direction, temperature=0.01, reduction="sum")
    gradient = jax.jit(jax.grad(lambda x: loss(x, eye, far, eye)))(near)
    log_p, log_q = (np.asarray(jax.nn.log_softmax(np.float32(x) / 0.01), np.float64) for x in (far, near))
    desired = of_students(log_p, log_q)[direction][1] / 0.01
    np.testing.assert_allclose(gradient, desired, rtol=4e-3, atol=1e-3 * abs(desired).max())


@pytest.mark.forms
def test_second_derivatives_of_a_mixture_of_improbable_classes():
    """The square of their probability is no float32."""
    rows = np.float32(np.random.default_rng(1).normal(size=(2, 30)) * 4)
    rows[:, :3] -= 60

    @jax.jit
    def derivatives(student, teacher):
        zero, kernel = jnp.zeros((1, 1)), jnp.zeros((1, 30))

        def loss(*biases):
            options = dict(zip(("bias", "target_bias"), biases, strict=True))
            return fused(zero, kernel, zero, kernel, direction="jensen_shannon", **options)

        return jax.jvp(jax.grad(loss, (0, 1)), (student, teacher), (jnp.cos(student), jnp.sin(teacher)))

    actual = derivatives(*rows)
    with jax.enable_x64(True):
        desired = jax.tree.map(np.asarray, derivatives(*np.float64(rows)))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(desired), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * abs(b).max())


# What is masked is gone. Masked tokens are in the contract's table, and so is a mask of classes.


@pytest.mark.parametrize("reduction", ["mean", forms("none")])
def test_masked_classes_are_gone_and_nothing_left_is_zero(reduction):
    """Even if the cotangent is infinite, that of a square root of 0."""

    @jax.jit
    def step(where, class_mask, *args):
        options = {"where": where, "class_mask": class_mask, "direction": "reverse", "reduction": reduction}
        of = lambda *args: fused(*args[:4], bias=args[4], target_bias=args[5], **options)  # noqa: E731
        return jax.value_and_grad(lambda *args: jnp.sum(jnp.sqrt(of(*args))), range(6))(*args)

    clean = step(MASK, CLASS_MASK, *singles(ARGS))
    for garbage in (np.nan, np.inf, -np.inf, 3e38):
        dirty = [np.where(CLASS_MASK, a, np.float32(garbage)) if a.shape[-1] == CLASSES else a for a in singles(ARGS)]
        jax.tree.map(np.testing.assert_array_equal, step(MASK, CLASS_MASK, *dirty), clean)
    for i in (1, 3, 4, 5):
        np.testing.assert_array_equal(clean[1][i][..., ~CLASS_MASK], 0)
    bad = [np.where(True if a.shape[0] == TOKENS else CLASS_MASK, np.nan, a) for a in ARGS]
    nothing = (np.zeros_like(MASK), CLASS_MASK), (MASK, np.zeros_like(CLASS_MASK))
    for masks in nothing:
        jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0), step(*masks, *singles(bad)))


def test_no_tokens_are_zero():
    args = FEATURES[:0], KERNEL, TARGET_FEATURES[:0], TARGET_KERNEL
    out = jax.jit(jax.value_and_grad(linear_kl_divergence, (0, 1)))(*singles(args))
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0), out)


@pytest.mark.parametrize("direction", ["forward", forms("reverse"), forms("jensen_shannon")])
@pytest.mark.parametrize("reductions", [["none"], forms(["none", "mean"])], ids=str)
def test_a_nan_stays_in_its_own_row_and_is_gone_if_it_is_replaced(direction, reductions):
    @jax.jit
    def all_of(features, target_features):
        of = lambda f, k, r: linear_kl_divergence(  # noqa: E731
            f, k, target_features, TARGET_KERNEL, direction=direction, reduction=r
        )
        kept = lambda *args: sum(jnp.sum(jnp.where(jnp.isnan(x := of(*args, r)), 0, x)) for r in reductions)  # noqa: E731
        of_all = jax.grad(lambda *args: of(*args, "none").sum(), (0, 1))
        return of(features, KERNEL, "none"), of_all(features, KERNEL), jax.grad(kept, (0, 1))(features, KERNEL)

    for of_student in (True, False):
        sides = [
            np.where(BAD[:, None] & at, np.nan, x)
            for x, at in ((FEATURES, of_student), (TARGET_FEATURES, not of_student))
        ]
        losses, (d_features, d_kernel), kept = all_of(*singles(sides))
        assert bad_rows(losses) == bad_rows(d_features) == [5]
        assert np.isnan(d_features[5]).all()
        assert np.isnan(d_kernel).all()
        assert all(np.isfinite(g).all() for g in kept)
        assert not kept[0][5].any()


@pytest.mark.parametrize("direction", ["reverse", forms("forward"), forms("jensen_shannon")])
def test_classes_of_probability_zero(direction):
    """0 log 0 = 0; what one side excludes and the other does not is infinitely far, for one of the directions."""
    excluded = np.where(np.arange(CLASSES) < 3, -np.inf, 0)

    @jax.jit
    def step(features, kernel, bias, target_bias):
        options = {"bias": bias, "target_bias": target_bias, "direction": direction}
        of = lambda *args: linear_kl_divergence(*args, *ARGS[2:4], **options)  # noqa: E731
        return jax.value_and_grad(of, (0, 1))(features, kernel)

    for who, biases in {"both": (1, 1), "student": (1, 0), "teacher": (0, 1)}.items():
        biases = [excluded if given else np.zeros(CLASSES) for given in biases]
        value, gradients = step(FEATURES, KERNEL, *biases)
        if (who, direction) in (("student", "forward"), ("teacher", "reverse")):
            assert value == np.inf
            continue
        assert all(np.isfinite(g).all() for g in gradients)
        if who != "teacher":
            np.testing.assert_array_equal(gradients[1][:, :3], 0)
        log_q, log_p = (
            jax.nn.log_softmax(x + np.maximum(bias, -1e4))
            for x, bias in zip((FEATURES @ KERNEL, TARGET_FEATURES @ TARGET_KERNEL), biases, strict=True)
        )
        np.testing.assert_allclose(value, divergence_of(log_p, log_q, direction).mean(), rtol=1e-5)


# Teachers of which only the most probable classes are known.


def top_k_of(k=K):
    log_probs = jax.nn.log_softmax(jnp.asarray(TARGET_FEATURES) @ TARGET_KERNEL + TARGET_BIAS)
    return tuple(map(np.array, jax.lax.top_k(log_probs, k)))


def unfused_top_k(features, kernel, log_probs, classes, *, bias=0, where=None, rest="bucket", reduction, **kwargs):
    log_q = jax.nn.log_softmax((features @ kernel + bias) / kwargs.pop("temperature", 1))
    student, teacher = jnp.take_along_axis(log_q, classes, -1), log_probs
    others = lambda x: jnp.log1p(-jnp.sum(jnp.exp(x), -1, keepdims=True))  # noqa: E731
    if rest == "bucket":
        student, teacher = (jnp.concatenate([x, others(x)], -1) for x in (student, teacher))
    else:
        student, teacher = jax.nn.log_softmax(student), jax.nn.log_softmax(teacher)
    return reduced(divergence_of(teacher, student, **kwargs), where, reduction)


def with_top_k(fn, targets, **kwargs):
    def loss(features, kernel, bias):
        out = fn(features, kernel, *targets, bias=bias, **kwargs)
        return jnp.sum(out * COTANGENTS) if out.ndim else out

    return loss


top_k = functools.partial(linear_kl_divergence_with_top_k_targets, block_size=9)
OF_TOP_K = pairs(["bucket", "drop"], DIRECTIONS, REDUCTIONS)


@pytest.mark.forms
@pytest.mark.parametrize(("rest", "direction", "reduction"), OF_TOP_K)
def test_top_k_targets_are_those_of_the_formula(rest, direction, reduction):
    kwargs = {"rest": rest, "direction": direction, "reduction": reduction, "temperature": 1.5, "where": MASK}
    with jax.enable_x64(True):
        targets = top_k_of()
    assert_same_function(
        *(with_top_k(fn, targets, **kwargs) for fn in (top_k, unfused_top_k)), (FEATURES, KERNEL, BIAS)
    )


@pytest.mark.forms
@pytest.mark.parametrize(
    ("rest", "direction", "reduction"), [("bucket", "forward", "sum"), ("drop", "jensen_shannon", "none")]
)
def test_every_derivative_of_top_k_targets(rest, direction, reduction):
    kwargs = {"rest": rest, "direction": direction, "reduction": reduction, "temperature": 1.5, "where": MASK}
    with jax.enable_x64(True):
        targets = top_k_of()
    losses = [with_top_k(fn, targets, **kwargs) for fn in (top_k, unfused_top_k)]
    assert_every_derivative(*losses, (FEATURES, KERNEL, BIAS))


@pytest.mark.forms
def test_all_classes_as_top_k_targets():
    """There is no rest, whatever the rounding of their sum."""
    targets = top_k_of(CLASSES)
    for direction, rest in itertools.product(DIRECTIONS, ("bucket", "drop")):
        desired = linear_kl_divergence(*ARGS[:4], target_bias=TARGET_BIAS, direction=direction)
        actual = top_k(FEATURES, KERNEL, *targets, direction=direction, rest=rest)
        np.testing.assert_allclose(actual, desired, rtol=1e-5)


def test_a_sure_teacher_leaves_no_infinity():
    @jax.jit
    def of_each(log_probs):
        of = functools.partial(top_k, jnp.eye(1), jnp.array([[1.0, 0.0, -1.0]]), log_probs, jnp.array([[0]]))
        return [of(direction=direction) for direction in DIRECTIONS]

    assert np.isfinite(of_each(np.array([[1e-6]]))).all()  # the sum is above 1


@pytest.mark.parametrize("rest", ["bucket", forms("drop")])
def test_bad_top_k_targets_are_nan_in_their_own_row_and_those_at_a_masked_class_cost_infinity(rest):
    log_probs, classes = top_k_of()
    classes[3, 1], classes[5, 0], classes[7, 2] = -1, CLASSES, classes[7, 0]
    log_probs[9, 0] = np.nan

    @jax.jit
    def all_of(features, kernel, log_probs, classes, class_mask):
        of = functools.partial(top_k, rest=rest, class_mask=class_mask)
        mean = lambda features: of(features, kernel, log_probs, classes)  # noqa: E731
        return of(features, kernel, log_probs, classes, reduction="none"), jax.value_and_grad(mean)(features)

    args = singles((FEATURES, KERNEL))
    losses, (mean, gradient) = all_of(*args, log_probs, classes, np.ones(CLASSES, bool))
    assert bad_rows(losses) == bad_rows(gradient) == [3, 5, 7, 9]
    assert np.isnan(mean)
    assert np.isnan(gradient[np.array([3, 5, 7, 9])]).all()

    log_probs, classes = top_k_of()
    losses, _ = all_of(*args, log_probs, classes, np.arange(CLASSES) != classes[8, 0])
    np.testing.assert_array_equal(np.isinf(losses), (classes == classes[8, 0]).any(-1))


@pytest.mark.parametrize("rest", ["bucket", "drop"])
@pytest.mark.parametrize("direction", [DIRECTIONS[0], *map(forms, DIRECTIONS[1:])])
def test_masked_targets_are_as_if_the_teacher_had_not_named_them(rest, direction):
    features, cotangents, log_probs, classes = (x[:6] for x in (FEATURES, COTANGENTS, *top_k_of()))
    live = np.random.default_rng(3).random(classes.shape) < 0.6
    live[2], live[3] = False, True
    garbage = np.where(live, log_probs, np.nan), np.where(live, classes, np.where(np.arange(K) % 2, 99, classes[:, :1]))
    options = {"rest": rest, "direction": direction, "reduction": "none"}

    @jax.jit
    def both(log_probs, classes, live):
        def losses(features, kernel):
            return top_k(features, kernel, log_probs, classes, bias=BIAS, where=live, **options)

        out, reverse = jax.vjp(losses, features, KERNEL)
        return out, *reverse(jnp.asarray(cotangents, out.dtype))

    with masksafe.label_checks("raise"):
        loss, d_features, d_kernel = both(*garbage, live)
    error, _ = jax.jit(checkify.checkify(both, errors=checkify.index_checks))(*garbage, live)
    assert error.get() is None
    for result, clean in zip(both(log_probs, classes, live), (loss, d_features, d_kernel), strict=True):
        np.testing.assert_array_equal(result, clean)
    assert loss[2] == 0
    assert not d_features[2].any()
    of_all = np.zeros(KERNEL.shape)
    for i in np.flatnonzero(live.any(-1)):
        one = functools.partial(top_k, target_log_probs=log_probs[i, live[i]], target_classes=classes[i, live[i]])
        of_one = lambda x, w, one=one: one(x, w, bias=BIAS, rest=rest, direction=direction)  # noqa: E731
        expected, (d_x, d_w) = jax.value_and_grad(of_one, (0, 1))(features[i], KERNEL)
        np.testing.assert_allclose(loss[i], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(d_features[i], d_x * cotangents[i], rtol=2e-4, atol=2e-6)
        of_all += np.asarray(d_w) * cotangents[i]
    np.testing.assert_allclose(d_kernel, of_all, rtol=2e-4, atol=1e-5)


def test_the_mean_is_that_of_the_tokens_with_a_target():
    log_probs, classes = top_k_of()
    live = np.ones(classes.shape, bool)
    live[:4] = False
    mean = top_k(FEATURES, KERNEL, log_probs, classes, where=live)
    np.testing.assert_allclose(mean, top_k(FEATURES[4:], KERNEL, log_probs[4:], classes[4:]), rtol=1e-5)


def test_label_checks_of_top_k_targets():
    log_probs, classes = top_k_of()
    out_of_range, repeated, above = classes.copy(), classes.copy(), log_probs.copy()
    out_of_range[5, 1], repeated[4, 3], above[2, 0] = CLASSES, repeated[4, 0], 0.3
    of = jax.jit(functools.partial(top_k, FEATURES, KERNEL))
    where, every_class = np.arange(TOKENS) > 5, np.ones(CLASSES, bool)
    with masksafe.label_checks("raise"):
        for bad, text in (
            ((log_probs, out_of_range), r"target_classes are outside \[0, 24\); first at \(5, 1\): 24"),
            ((log_probs, repeated), r"target_classes are repeated in their row; first at \(4, 3\)"),
            ((above, classes), r"target_log_probs are logarithms above 0 or NaN; first at \(2, 0\)"),
        ):
            with pytest.raises(Exception, match=text):
                jax.block_until_ready(of(*bad, where=where | True, class_mask=every_class))
            jax.block_until_ready(of(*bad, where=where, class_mask=every_class))
        masked = np.arange(CLASSES) != classes[8, 0]
        with pytest.raises(Exception, match="target_classes are at a masked class"):
            jax.block_until_ready(of(log_probs, classes, where=where, class_mask=masked))


def test_repeated_classes():
    classes = jnp.array([[3, 1, 3, 3], [0, 1, 2, 3], [5, 5, 1, 1]])
    np.testing.assert_array_equal(is_repeated(classes), [[0, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 1]])


# One answer everywhere.


X, WHOLE, BY_CLASS = PartitionSpec("x"), PartitionSpec(), PartitionSpec(None, "x")
SPLITS = {  # of features, kernel, target_features, target_kernel and the mask
    "tokens": (X, WHOLE, X, WHOLE, X),
    "tokens of one side": (WHOLE, WHOLE, X, WHOLE, WHOLE),
    "classes": (WHOLE, BY_CLASS, WHOLE, BY_CLASS, WHOLE),
    "tokens and kernels": (X, PartitionSpec(None, "y"), X, PartitionSpec(None, "y"), X),
}


def put(mesh, args, specs):
    return [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(args, specs, strict=True)]


@pytest.mark.forms
@pytest.mark.parametrize(
    ("split", "axis_type", "reduction"),
    [
        *itertools.starmap(forms, itertools.product(SPLITS, [AxisType.Explicit], ["mean", "none"])),
        forms("tokens", AxisType.Auto, "mean"),
    ],
)
def test_split_over_a_mesh(split, axis_type, reduction):
    @jax.jit
    def step(features, kernel, target_features, target_kernel, where):
        loss = scalar(fused, where=where, reduction=reduction, block_size=3)
        return jax.value_and_grad(loss, range(4))(features, kernel, target_features, target_kernel)

    args, mesh = (*singles(ARGS[:4]), MASK), jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    with jax.set_mesh(mesh):
        parts = put(mesh, args, SPLITS[split])
        actual = step(*parts)
        if axis_type == AxisType.Explicit:
            for gradient, arg in zip(actual[1], parts[:4], strict=True):
                assert gradient.sharding.is_equivalent_to(arg.sharding, arg.ndim)
    assert_trees_close(actual, step(*args), rtol=1e-4, atol=1e-6)


@pytest.mark.forms
@pytest.mark.parametrize("with_top_k", [False, True])
def test_second_derivatives_and_checkify_on_an_explicit_mesh(with_top_k):
    of = top_k if with_top_k else linear_kl_divergence
    targets, by_class = top_k_of() if with_top_k else singles(ARGS[2:4]), PartitionSpec(None, "y")
    specs = X, by_class, X, X if with_top_k else by_class

    def step(*args):
        gradient = jax.grad(lambda *floats: of(*floats, *args[2:]), (0, 1))
        return gradient(*args[:2]), jax.jvp(gradient, args[:2], tuple(map(jnp.cos, args[:2])))[1]

    args, mesh = (*singles(ARGS[:2]), *targets), jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        parts = put(mesh, args, specs)
        actual = jax.jit(step)(*parts)
        with masksafe.label_checks("checkify"):
            error, checked = jax.jit(checkify.checkify(jax.value_and_grad(of, (0, 1))))(*parts)
            error.throw()
    assert_trees_close(actual, jax.jit(step)(*args), rtol=1e-4, atol=1e-6)
    assert_trees_close(checked, jax.jit(jax.value_and_grad(of, (0, 1)))(*args), rtol=1e-4, atol=1e-6)


@pytest.mark.forms
def test_memory_is_that_of_a_block_of_tokens(choose):
    choose(linear={"class_tile_elements": 2**20})
    shapes = *((s, jnp.float32) for s in ((4096, 64), (64, 32768), (4096, 96), (96, 32768))), ((4096,), jnp.bool_)
    assert_memory_is_that_of_a_block(lambda *args: linear_kl_divergence(*args[:4], where=args[4]), *shapes, rows=2)
