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
from linear_cases import assert_every_other_derivative, assert_trees_close, slow

import masksafe
from masksafe.losses import linear_kl_divergence, linear_kl_divergence_with_top_k_targets
from masksafe.losses._rows._divergence import is_repeated
from masksafe.testing import CONSISTENCY_MODES, assert_consistent, assert_mask_safe

TOKENS, WIDTH, WIDTH_OF_TARGETS, CLASSES, K = 40, 6, 5, 24, 4
RNG = np.random.default_rng(0)
SHAPES = (TOKENS, WIDTH), (WIDTH, CLASSES), (TOKENS, WIDTH_OF_TARGETS), (WIDTH_OF_TARGETS, CLASSES), CLASSES, CLASSES
ARGS = FEATURES, KERNEL, TARGET_FEATURES, TARGET_KERNEL, BIAS, TARGET_BIAS = [RNG.normal(size=s) for s in SHAPES]
MASK = RNG.random(TOKENS) < 0.6
CLASS_MASK = RNG.random(CLASSES) < 0.7
WEIGHTS = RNG.normal(size=TOKENS)
DIRECTIONS = "forward", "reverse", "jensen_shannon"
REDUCTIONS = "mean", "sum", "none"


@pytest.fixture(autouse=True)
def small_class_blocks(choose):
    """So that there are several, and the last one is ragged."""
    choose(linear={"class_tile_elements": 60})


@pytest.fixture
def elsewhere(choose):
    """The sizes for accelerators, on a CPU, with several blocks."""
    choose(form="elsewhere", linear={"fewest_tokens": 12, "token_block_elements_elsewhere": 0})


def divergence_of(log_p, log_q, direction="forward", beta=0.5):
    kl = lambda a, b: jnp.sum(jnp.exp(a) * (a - b), -1)  # noqa: E731
    if direction == "jensen_shannon":
        log_m = jnp.log(beta * jnp.exp(log_p) + (1 - beta) * jnp.exp(log_q))
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
        return jnp.sum(out * jnp.asarray(WEIGHTS[: out.size], out.dtype).reshape(out.shape)) if out.ndim else 1.7 * out

    return loss


CASES = list(
    itertools.product(REDUCTIONS, DIRECTIONS, [None, MASK], [None, CLASS_MASK], [False, True], [1.0, 2.5], [None, 9])
)
# Six quick ones, in which each choice occurs; others of the 288 in the slow run.
FIRST_CASES = [case if n % 55 == 0 else slow(*case) for n, case in enumerate(CASES) if n % 55 == 0 or n % 5 == 0]
NAMES = "reduction", "direction", "where", "class_mask", "with_bias", "temperature", "block_size"


def assert_equals_the_unfused_formula(args, block_size=None, **kwargs):
    @jax.jit
    def both(*args):
        numbers = tuple(range(len(args)))
        fused = functools.partial(linear_kl_divergence, target_gradients=True, block_size=block_size)
        return [jax.value_and_grad(scalar(fn, **kwargs), numbers)(*args) for fn in (fused, unfused)]

    with jax.enable_x64(True):
        assert_trees_close(*both(*args), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(NAMES, FIRST_CASES)
def test_equals_the_unfused_formula(reduction, direction, where, class_mask, with_bias, temperature, block_size):
    kwargs = {"reduction": reduction, "direction": direction, "beta": 0.3, "where": where, "temperature": temperature}
    args = ARGS if with_bias else ARGS[:4]
    assert_equals_the_unfused_formula(args, block_size, class_mask=class_mask, **kwargs)


@pytest.mark.parametrize(NAMES, FIRST_CASES[::3])
def test_equals_the_unfused_formula_elsewhere(
    elsewhere, reduction, direction, where, class_mask, with_bias, temperature, block_size
):
    test_equals_the_unfused_formula(reduction, direction, where, class_mask, with_bias, temperature, block_size)


def test_equals_optax():
    value = linear_kl_divergence(*ARGS[:4], where=MASK, reduction="none")
    log_q, p = jax.nn.log_softmax(FEATURES @ KERNEL), jax.nn.softmax(TARGET_FEATURES @ TARGET_KERNEL)
    np.testing.assert_allclose(value, np.where(MASK, optax.kl_divergence(log_q, p), 0), rtol=2e-5)


@pytest.mark.parametrize("direction", ["forward", slow("reverse"), slow("jensen_shannon")])
@pytest.mark.parametrize("reduction", ["mean", slow("none")])
def test_every_other_derivative(direction, reduction):
    kwargs = {"where": MASK, "reduction": reduction, "direction": direction, "temperature": 2.0, "class_mask": None}
    fused = scalar(functools.partial(linear_kl_divergence, target_gradients=True, block_size=9), **kwargs)
    plain = scalar(unfused, **kwargs)
    assert_every_other_derivative(fused, plain, ARGS)


@pytest.mark.parametrize("direction", [*DIRECTIONS[2:], *map(slow, DIRECTIONS[:2])])
def test_hessian_where_student_and_teacher_agree(direction):
    """The Fisher information; any kink of the formulas at 0 would show."""
    x = jnp.array([[0.3, -1.0, 0.7]])

    def loss(fn, x_of_student):
        return fn(x_of_student, jnp.eye(3), x, jnp.eye(3), direction=direction, reduction="sum")

    with jax.enable_x64(True):
        hessians = [
            jax.jit(jax.hessian(functools.partial(loss, fn)))(x.astype("float64"))
            for fn in (linear_kl_divergence, unfused)
        ]
        assert_trees_close(*hessians, rtol=1e-9, atol=1e-12)


def test_teacher_has_no_gradients_unless_asked():
    loss = lambda *args: linear_kl_divergence(*args[:4], bias=args[4], target_bias=args[5])  # noqa: E731
    gradients = jax.jit(jax.grad(loss, range(6)))(*ARGS)
    assert [bool(np.any(g)) for g in gradients] == [True, True, False, False, True, False]
    with masksafe.forward_mode():
        assert jax.jvp(lambda t: loss(*ARGS[:2], t, *ARGS[3:]), (TARGET_FEATURES,), (TARGET_FEATURES,))[1] == 0


# Digits.


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_keeps_its_digits_where_student_and_teacher_nearly_agree(direction):
    """The sum of p (log p - log q) in float32 has none of them."""
    logits = np.float32(RNG.normal(size=(3, 50)) * 3)
    near = np.float32(logits + np.array([[1e-2], [1e-3], [1e-4]]) * RNG.normal(size=logits.shape))

    def both(dtype):
        logits_of = np.eye(50, dtype=dtype)
        args = near.astype(dtype), logits_of, logits.astype(dtype), logits_of
        loss = lambda x: linear_kl_divergence(x, *args[1:], direction=direction, reduction="none")  # noqa: E731
        return jax.jit(lambda x: (loss(x), jax.grad(lambda x: loss(x).sum())(x)))(args[0])

    with jax.enable_x64(True):
        desired = jax.tree.map(np.asarray, both("float64"))
        formula = divergence_of(*(jax.nn.log_softmax(x.astype("float64")) for x in (logits, near)), direction)
        np.testing.assert_allclose(desired[0], formula, rtol=1e-6)
    losses, gradient = both("float32")
    np.testing.assert_allclose(losses, desired[0], rtol=1e-5)
    np.testing.assert_allclose(gradient, desired[1], rtol=2e-2, atol=1e-3 * abs(desired[1]).max())


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_equal_sides_have_no_divergence_and_far_ones_do_not_overflow(direction):
    of = jax.jit(functools.partial(linear_kl_divergence, direction=direction))
    assert of(FEATURES, KERNEL, FEATURES, KERNEL) < 1e-12
    far = np.float32([[300.0, 0.0, -300.0]])
    value, gradient = jax.value_and_grad(lambda x: of(x, np.eye(3), -far, np.eye(3)))(far)
    np.testing.assert_allclose(value, np.log(2) if direction == "jensen_shannon" else 600, rtol=1e-6)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_common_offset_of_the_logits_costs_no_digits(direction):
    args = [np.float32(np.round(x)) for x in ARGS[:4]]  # logits that are exact with the offset
    step = jax.jit(
        jax.value_and_grad(
            lambda f, k, offset: linear_kl_divergence(
                f, k, *args[2:], bias=offset, target_bias=-offset, direction=direction
            ),
            (0, 1),
        )
    )
    for offset in (1e3, 1e6):
        outs = [step(*args[:2], np.full(CLASSES, x, np.float32)) for x in (0, offset)]
        assert_trees_close(*outs, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", slow("float16"), slow("float32")])
def test_dtypes(dtype):
    args = tuple(a.astype(dtype) for a in ARGS)
    options = {"where": MASK, "direction": "reverse"}
    fused = functools.partial(linear_kl_divergence, target_gradients=True)
    value, gradients = jax.jit(jax.value_and_grad(scalar(fused, **options), range(6)))(*args)
    assert [x.dtype for x in (value, *gradients)] == ["float32", *[dtype] * 6]
    with jax.enable_x64(True):
        desired = jax.jit(jax.value_and_grad(scalar(unfused, **options), range(6)))(*(np.float64(a) for a in args))
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(value, desired[0], rtol=1e-5)
    assert_trees_close(gradients, desired[1], rtol=4 * eps, atol=eps)


@pytest.mark.parametrize(
    "dtypes",
    [
        ("bfloat16", "float64", "float32", "float16"),
        *map(slow, itertools.product(["bfloat16", "float32", "float64"], repeat=4)),
    ],
    ids=str,
)
def test_mixed_dtypes_have_second_derivatives(dtypes):
    with jax.enable_x64(True):
        args = [jax.ShapeDtypeStruct(a.shape, d) for a, d in zip(ARGS, dtypes, strict=False)]
        loss = lambda *args: linear_kl_divergence(*args, target_gradients=True, reduction="none").sum()  # noqa: E731
        gradients = jax.eval_shape(jax.grad(loss, range(4)), *args)
        of_each = jax.eval_shape(jax.hessian(loss, range(4)), *args)
    assert [g.dtype for g in gradients] == list(dtypes)
    assert [row[i].dtype for i, row in enumerate(of_each)] == list(dtypes)


def test_float16_gradients_survive_a_scaled_loss():
    near = np.float16([[1.0, 0.0]]), np.eye(2, dtype="float16"), np.float16([[1.02, 0.0]]), np.eye(2, dtype="float16")
    for reduction in ("sum", "none"):
        loss = lambda x, r=reduction: 4096 * jnp.sum(linear_kl_divergence(x, *near[1:], reduction=r))  # noqa: E731
        gradient = jax.jit(jax.grad(loss))(near[0])
        difference = np.diff([1 / (1 + np.exp(-float(x[0, 0]))) for x in (near[2], near[0])])
        np.testing.assert_allclose(gradient, 4096 * difference * np.array([[1, -1]]), rtol=5e-3)


@pytest.mark.parametrize("direction", ["reverse", slow("forward")])
def test_float16_gradients_of_a_sum_do_not_overflow_at_a_low_temperature(direction):
    near, far = np.float16([[1.0, 0.98, -1.0]]), np.float16([[-1.0, 0.5, 1.0]])
    eye = np.eye(3, dtype="float16")
    loss = functools.partial(linear_kl_divergence, direction=direction, temperature=0.01, reduction="sum")
    gradient = jax.jit(jax.grad(lambda x: loss(x, eye, far, eye)))(near)
    with jax.enable_x64(True):
        desired = jax.jit(jax.grad(lambda x: loss(x, *(np.float64(a) for a in (eye, far, eye)))))(np.float64(near))
    desired = np.asarray(desired)
    np.testing.assert_allclose(gradient, desired, rtol=4e-3, atol=1e-3 * abs(desired).max())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_strict_promotion_of_dtypes_and_ranks(dtype):
    args = tuple(a.astype(dtype) for a in ARGS)
    log_probs, classes = top_k_of()

    def loss(features, kernel, target_features, target_kernel, bias, target_bias):
        options = {"bias": bias, "where": MASK, "class_mask": CLASS_MASK, "temperature": 2.0, "reduction": "sum"}
        dense = linear_kl_divergence(
            features, kernel, target_features, target_kernel, target_bias=target_bias, target_gradients=True, **options
        )
        targets = log_probs.astype(dtype), classes
        return dense + linear_kl_divergence_with_top_k_targets(features, kernel, *targets, **options)

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        jax.eval_shape(jax.hessian(loss, range(6)), *args)


@pytest.mark.parametrize("beta", [1e-5, slow(0.5)])
def test_derivatives_of_the_mixture_keep_their_digits(beta):
    """Where classes of both sides are improbable, and where the mixture is nearly one of them."""
    rows = np.float32(RNG.normal(size=(2, 30)) * 4)
    rows[:, :3] -= 60

    @jax.jit
    def derivatives(student, teacher):
        zero, kernel = jnp.zeros((1, 1)), jnp.zeros((1, 30))

        def loss(*biases):
            options = dict(zip(("bias", "target_bias"), biases, strict=True), target_gradients=True, beta=beta)
            return linear_kl_divergence(zero, kernel, zero, kernel, direction="jensen_shannon", **options)

        return jax.jvp(jax.grad(loss, (0, 1)), (student, teacher), (jnp.cos(student), jnp.sin(teacher)))

    actual = derivatives(*rows)
    with jax.enable_x64(True):
        desired = jax.tree.map(np.asarray, derivatives(*np.float64(rows)))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(desired), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * abs(b).max())


# What is masked is gone.


@pytest.mark.parametrize("reduction", ["none", slow("mean"), slow("sum")])
@pytest.mark.parametrize("direction", ["forward", slow("reverse"), slow("jensen_shannon")])
def test_masked_tokens_and_classes_are_gone(direction, reduction):
    options = {"direction": direction, "reduction": reduction, "target_gradients": True, "block_size": 8}

    def loss(features, kernel, target_features, target_kernel, bias, target_bias, where, class_mask):
        masks = {"where": where, "class_mask": class_mask, "bias": bias, "target_bias": target_bias}
        return linear_kl_divergence(features, kernel, target_features, target_kernel, **masks, **options)

    args = *(np.float32(a) for a in ARGS), MASK, CLASS_MASK
    tokens, classes = ~MASK[:, None], ~CLASS_MASK
    masks = {0: tokens, 1: classes, 2: tokens, 3: classes, 4: classes, 5: classes}
    masked = {i: np.broadcast_to(mask, args[i].shape) for i, mask in masks.items()}
    assert_mask_safe(loss, *args, masked=masked, transforms=("jit",))


def test_taking_out_is_masking():
    masked = linear_kl_divergence(*ARGS[:4], where=MASK, class_mask=CLASS_MASK)
    kept = FEATURES[MASK], KERNEL[:, CLASS_MASK], TARGET_FEATURES[MASK], TARGET_KERNEL[:, CLASS_MASK]
    np.testing.assert_allclose(masked, linear_kl_divergence(*kept), rtol=1e-5)


@pytest.mark.parametrize("nothing", ["tokens", "classes", "rows"])
def test_nothing_unmasked_is_zero(nothing):
    tokens = 0 if nothing == "rows" else TOKENS
    where = np.full(tokens, nothing != "tokens")
    class_mask = np.full(CLASSES, nothing != "classes")

    @jax.jit
    def all_of(*args):
        of = functools.partial(
            linear_kl_divergence, where=where, class_mask=class_mask, target_gradients=True, direction="reverse"
        )
        loss = lambda reduction, *args: jnp.sum(jnp.sqrt(of(*args, reduction=reduction)))  # noqa: E731
        return [jax.value_and_grad(functools.partial(loss, r), range(4))(*args) for r in REDUCTIONS]

    args = [np.float32(a) for a in ARGS[:4]]
    args[0], args[2] = (np.full_like(a[:tokens], np.nan) for a in (args[0], args[2]))
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0), all_of(*args))


@pytest.mark.parametrize("side", ["features", "target_features"])
@pytest.mark.parametrize("direction", ["forward", slow("reverse"), slow("jensen_shannon")])
def test_a_nan_stays_in_its_own_row(direction, side):
    bad = np.arange(TOKENS)[:, None] == 5

    @jax.jit
    def all_of(features, target_features):
        of = lambda f, k: linear_kl_divergence(  # noqa: E731
            f, k, target_features, TARGET_KERNEL, direction=direction, reduction="none"
        )
        return of(features, KERNEL), jax.grad(lambda *args: of(*args).sum(), (0, 1))(features, KERNEL)

    args = FEATURES, TARGET_FEATURES
    args = [
        np.where(bad & (side == name), np.nan, x) for name, x in zip(("features", "target_features"), args, strict=True)
    ]
    losses, (d_features, d_kernel) = all_of(*args)
    assert np.isnan(losses).nonzero()[0].tolist() == [5]
    assert np.isnan(d_features).all(-1).nonzero()[0].tolist() == [5]
    assert np.isnan(d_features).any(-1).nonzero()[0].tolist() == [5]
    assert np.isnan(d_kernel).all()


@pytest.mark.parametrize("reduction", ["none", slow("mean")])
def test_what_is_selected_away_behind_the_loss_takes_no_part(reduction):
    features = np.where(np.arange(TOKENS)[:, None] == 5, np.nan, FEATURES)

    def loss(features, kernel):
        losses = linear_kl_divergence(features, kernel, *ARGS[2:4], reduction=reduction)
        return jnp.sum(jnp.where(jnp.isnan(losses), 0, losses))

    value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(np.float32(features), np.float32(KERNEL))
    assert all(np.isfinite(x).all() for x in (value, *gradients))
    assert not gradients[0][5].any()


@pytest.mark.parametrize("reduction", ["none", slow("mean")])
def test_no_alarm_of_debug_nans(reduction):
    args = [np.float32(a) for a in ARGS]
    args[0], args[2] = (np.where(MASK[:, None], a, np.float32(np.nan)) for a in (args[0], args[2]))
    args[1] = np.where(CLASS_MASK, args[1], np.float32(np.nan))
    loss = scalar(linear_kl_divergence, where=MASK, class_mask=CLASS_MASK, reduction=reduction)
    with jax.debug_nans(True):
        gradients = jax.grad(loss, (0, 1))(*args)
    assert all(np.isfinite(g).all() for g in gradients)


# Classes of probability 0.


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("who", ["both", "student", "teacher"])
def test_classes_of_probability_zero(direction, who):
    """0 log 0 = 0; what one side excludes and the other does not is infinitely far, for one of the directions."""
    excluded = np.where(np.arange(CLASSES) < 3, -np.inf, 0)
    biases = {
        "bias": excluded if who in ("both", "student") else None,
        "target_bias": excluded if who in ("both", "teacher") else None,
    }

    @jax.jit
    def step(features, kernel):
        of = lambda *args: linear_kl_divergence(*args, *ARGS[2:4], **biases, direction=direction)  # noqa: E731
        return jax.value_and_grad(of, (0, 1))(features, kernel)

    value, gradients = step(FEATURES, KERNEL)
    if (who, direction) in (("student", "forward"), ("teacher", "reverse")):
        assert value == np.inf
        return
    assert all(np.isfinite(g).all() for g in gradients)
    if who != "teacher":
        np.testing.assert_array_equal(gradients[1][:, :3], 0)
    log_q, log_p = (
        jax.nn.log_softmax(x + (0 if biases[b] is None else np.maximum(excluded, -1e4)))
        for x, b in ((FEATURES @ KERNEL, "bias"), (TARGET_FEATURES @ TARGET_KERNEL, "target_bias"))
    )
    log_m = jnp.logaddexp(log_p, log_q) - np.log(2)
    kl = lambda a, b: jnp.sum(jnp.exp(a) * (a - b), -1)  # noqa: E731
    desired = {
        "forward": kl(log_p, log_q),
        "reverse": kl(log_q, log_p),
        "jensen_shannon": (kl(log_p, log_m) + kl(log_q, log_m)) / 2,
    }[direction]
    np.testing.assert_allclose(value, desired.mean(), rtol=1e-5)


# Teachers of which only the most probable classes are known.


def top_k_of(k=K):
    log_probs = jax.nn.log_softmax(jnp.asarray(TARGET_FEATURES) @ TARGET_KERNEL + TARGET_BIAS)
    return tuple(map(np.asarray, jax.lax.top_k(log_probs, k)))


def unfused_top_k(features, kernel, log_probs, classes, *, bias=0, where=None, rest="bucket", reduction, **kwargs):
    log_q = jax.nn.log_softmax((features @ kernel + bias) / kwargs.pop("temperature", 1))
    student, teacher = jnp.take_along_axis(log_q, classes, -1), log_probs
    others = lambda x: jnp.log1p(-jnp.sum(jnp.exp(x), -1, keepdims=True))  # noqa: E731
    if rest == "bucket":
        student, teacher = (jnp.concatenate([x, others(x)], -1) for x in (student, teacher))
    else:
        student, teacher = jax.nn.log_softmax(student), jax.nn.log_softmax(teacher)
    return reduced(divergence_of(teacher, student, **kwargs), where, reduction)


@pytest.mark.parametrize(
    ("rest", "direction", "reduction"),
    [
        ("bucket", "forward", "mean"),
        slow("drop", "reverse", "none"),
        *itertools.starmap(slow, itertools.product(["bucket", "drop"], DIRECTIONS, REDUCTIONS)),
    ],
)
def test_top_k_targets_equal_the_unfused_formula(rest, direction, reduction):
    kwargs = {"rest": rest, "direction": direction, "reduction": reduction, "temperature": 1.5, "where": MASK}

    def loss(fn, features, kernel, bias, **options):
        out = fn(features, kernel, *targets, bias=bias, **kwargs, **options)
        return jnp.sum(out * WEIGHTS) if out.ndim else out

    with jax.enable_x64(True):
        targets = top_k_of()
        args = FEATURES, KERNEL, BIAS

        @jax.jit
        def all_of(*args):
            along = tuple(map(jnp.cos, args))
            fused = functools.partial(loss, linear_kl_divergence_with_top_k_targets, block_size=9)
            results = []
            for fn in (fused, functools.partial(loss, unfused_top_k)):
                gradient = jax.grad(fn, (0, 1, 2))
                results.append((jax.value_and_grad(fn, (0, 1, 2))(*args), jax.jvp(gradient, args, along)[1]))
            return results

        assert_trees_close(*all_of(*args), rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_all_classes_as_top_k_targets():
    """There is no rest, whatever the rounding of their sum."""
    log_probs, classes = top_k_of(CLASSES)
    for direction in DIRECTIONS:
        desired = linear_kl_divergence(*ARGS[:4], target_bias=TARGET_BIAS, direction=direction)
        for rest in ("bucket", "drop"):
            actual = linear_kl_divergence_with_top_k_targets(
                FEATURES, KERNEL, log_probs, classes, direction=direction, rest=rest
            )
            np.testing.assert_allclose(actual, desired, rtol=1e-5)


def test_a_sure_teacher_leaves_no_infinity():
    of = functools.partial(linear_kl_divergence_with_top_k_targets, np.eye(1), np.array([[1.0, 0.0, -1.0]]))
    for direction in DIRECTIONS:
        assert np.isfinite(of(np.array([[1e-6]]), np.array([[0]]), direction=direction))  # the sum is above 1


@pytest.mark.parametrize("rest", ["bucket", "drop"])
def test_bad_top_k_targets_are_nan_in_their_own_row(rest):
    log_probs, classes = (np.array(x) for x in top_k_of())
    classes[3, 1], classes[5, 0], classes[7, 2] = -1, CLASSES, classes[7, 0]
    log_probs[9, 0] = np.nan

    @jax.jit
    def all_of(features, kernel):
        of = lambda reduction, *args: linear_kl_divergence_with_top_k_targets(  # noqa: E731
            *args, log_probs, classes, rest=rest, reduction=reduction
        )
        losses = lambda *args: of("none", *args)  # noqa: E731
        return losses(features, kernel), jax.value_and_grad(functools.partial(of, "mean"))(features, kernel)

    losses, (mean, gradient) = all_of(np.float32(FEATURES), np.float32(KERNEL))
    assert np.isnan(losses).nonzero()[0].tolist() == [3, 5, 7, 9]
    assert np.isnan(mean)
    assert np.isnan(gradient).all(-1).nonzero()[0].tolist() == [3, 5, 7, 9]


def test_label_checks_of_top_k_targets():
    log_probs, classes = (np.array(x) for x in top_k_of())
    out_of_range, repeated, above = classes.copy(), classes.copy(), log_probs.copy()
    out_of_range[5, 1], repeated[4, 3], above[2, 0] = CLASSES, repeated[4, 0], 0.3
    of = functools.partial(linear_kl_divergence_with_top_k_targets, FEATURES, KERNEL)
    where = np.arange(TOKENS) > 5
    class_mask = np.arange(CLASSES) != classes[8, 0]
    with masksafe.label_checks("raise"):
        for bad, text in (
            ((log_probs, out_of_range), r"target_classes are outside \[0, 24\); first at \(5, 1\): 24"),
            ((log_probs, repeated), r"target_classes are repeated in their row; first at \(4, 3\)"),
            ((above, classes), r"target_log_probs are logarithms above 0 or NaN; first at \(2, 0\)"),
        ):
            with pytest.raises(ValueError, match=text):
                of(*bad)
            of(*bad, where=where)
        with pytest.raises(ValueError, match="target_classes are at a masked class"):
            of(log_probs, classes, class_mask=class_mask)
    with masksafe.label_checks("checkify"):
        step = lambda k: linear_kl_divergence_with_top_k_targets(FEATURES, k, log_probs, out_of_range)  # noqa: E731
        error, (value, _) = jax.jit(checkify.checkify(jax.value_and_grad(step)))(KERNEL)
        assert "outside [0, 24)" in error.get()
        assert np.isnan(value)


def test_a_target_at_a_masked_class_costs_infinity():
    log_probs, classes = top_k_of()
    class_mask = np.arange(CLASSES) != classes[8, 0]
    losses = linear_kl_divergence_with_top_k_targets(
        FEATURES, KERNEL, log_probs, classes, class_mask=class_mask, reduction="none"
    )
    np.testing.assert_array_equal(np.isinf(losses), (classes == classes[8, 0]).any(-1))


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["none", slow("mean")])
def test_masked_top_k_targets_are_gone(reduction):
    def loss(features, kernel, log_probs, classes, where):
        return linear_kl_divergence_with_top_k_targets(
            features, kernel, log_probs, classes, where=where, reduction=reduction, block_size=8
        )

    log_probs, classes = top_k_of()
    args = np.float32(FEATURES), np.float32(KERNEL), log_probs, classes, MASK
    masked = {i: np.broadcast_to(~MASK[:, None], args[i].shape) for i in (0, 2, 3)}
    assert_mask_safe(loss, *args, masked=masked, transforms=("jit",))


def test_repeated_classes():
    classes = jnp.array([[3, 1, 3, 3], [0, 1, 2, 3], [5, 5, 1, 1]])
    np.testing.assert_array_equal(is_repeated(classes), [[0, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 1]])


# One answer everywhere.


@pytest.mark.parametrize(
    "modes", [("jit", "vmap"), slow(set(CONSISTENCY_MODES) - {"devices", "disk", "strided"}, id="all")]
)
def test_one_answer(modes):
    def loss(features, kernel, target_features, target_kernel):
        options = {"where": MASK, "block_size": 9, "direction": "reverse", "target_gradients": True}
        return linear_kl_divergence(features, kernel, target_features, target_kernel, **options)

    assert_consistent(loss, *(jnp.asarray(a, jnp.float32) for a in ARGS[:4]), modes=modes)


@pytest.mark.slow
def test_one_answer_of_top_k_targets():
    log_probs, classes = top_k_of()

    def loss(features, kernel):
        return linear_kl_divergence_with_top_k_targets(features, kernel, log_probs, classes, where=MASK, block_size=9)

    modes = set(CONSISTENCY_MODES) - {"devices", "disk", "strided"}
    assert_consistent(loss, *(jnp.asarray(a, jnp.float32) for a in ARGS[:2]), modes=modes)


X = PartitionSpec("x")
SPLITS = {  # of features, kernel, target_features, target_kernel and the mask
    "tokens": (X, PartitionSpec(), X, PartitionSpec(), X),
    "tokens of one side": (PartitionSpec(), PartitionSpec(), X, PartitionSpec(), PartitionSpec()),
    "classes": (PartitionSpec(), PartitionSpec(None, "x"), PartitionSpec(), PartitionSpec(None, "x"), PartitionSpec()),
    "tokens and kernels": (X, PartitionSpec(None, "y"), X, PartitionSpec(None, "y"), X),
}


@pytest.mark.parametrize(
    ("split", "axis_type", "reduction"),
    [
        ("tokens and kernels", AxisType.Explicit, "mean"),
        *itertools.starmap(slow, itertools.product(SPLITS, [AxisType.Explicit], ["mean", "none"])),
        slow("tokens", AxisType.Auto, "mean"),
    ],
)
def test_split_over_a_mesh(split, axis_type, reduction):
    def step(features, kernel, target_features, target_kernel, where):
        loss = scalar(linear_kl_divergence, where=where, reduction=reduction, target_gradients=True, block_size=3)
        return jax.value_and_grad(loss, range(4))(features, kernel, target_features, target_kernel)

    args = *(np.float32(a) for a in ARGS[:4]), MASK
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    with jax.set_mesh(mesh):
        parts = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(args, SPLITS[split], strict=True)]
        actual = jax.jit(step)(*parts)
        if axis_type == AxisType.Explicit:
            for gradient, arg in zip(actual[1], parts[:4], strict=True):
                assert gradient.sharding.is_equivalent_to(arg.sharding, arg.ndim)
    assert_trees_close(actual, jax.jit(step)(*args), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_top_k_targets_and_other_derivatives_on_an_explicit_mesh():
    def step(features, kernel, log_probs, classes):
        of = functools.partial(linear_kl_divergence_with_top_k_targets, block_size=3)
        loss = lambda *args: of(*args, log_probs, classes)  # noqa: E731
        gradient = jax.grad(loss, (0, 1))
        along = tuple(map(jnp.cos, (features, kernel)))
        return gradient(features, kernel), jax.jvp(gradient, (features, kernel), along)[1]

    args = np.float32(FEATURES), np.float32(KERNEL), *top_k_of()
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        parts = [
            jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(args, (X, PartitionSpec(), X, X), strict=True)
        ]
        actual = jax.jit(step)(*parts)
    assert_trees_close(actual, jax.jit(step)(*args), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [False, True])
def test_checkify_on_an_explicit_mesh(top_k):
    targets = top_k_of() if top_k else [np.float32(a) for a in ARGS[2:4]]
    of = linear_kl_divergence_with_top_k_targets if top_k else linear_kl_divergence
    by_class = PartitionSpec(None, "y")
    specs = X, by_class, X, X if top_k else by_class
    args = np.float32(FEATURES), np.float32(KERNEL), *targets
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    step = jax.value_and_grad(of, (0, 1))
    with jax.set_mesh(mesh):
        parts = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(args, specs, strict=True)]
        with masksafe.label_checks("checkify"):
            error, actual = jax.jit(checkify.checkify(step))(*parts)
            error.throw()
    assert_trees_close(actual, jax.jit(step)(*args), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_tokens_split_in_a_shard_map():
    def local(features, kernel, target_features, target_kernel):
        loss = linear_kl_divergence(
            features, kernel, target_features, target_kernel, reduction="sum", target_gradients=True, block_size=3
        )
        return jax.lax.psum(loss, "x")

    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    over = jax.shard_map(local, mesh=mesh, in_specs=(X, PartitionSpec()) * 2, out_specs=PartitionSpec())
    args = [jnp.asarray(a, jnp.float32) for a in ARGS[:4]]
    desired = jax.jit(jax.value_and_grad(lambda *args: unfused(*args, reduction="sum"), range(4)))(*args)
    assert_trees_close(jax.jit(jax.value_and_grad(over, range(4)))(*args), desired, rtol=1e-4, atol=1e-5)


def test_batch_axes_and_a_symbolic_size():
    shape = (2, 4, 5)
    batched = FEATURES.reshape(*shape, WIDTH), KERNEL, TARGET_FEATURES.reshape(*shape, WIDTH_OF_TARGETS), TARGET_KERNEL
    rows = np.array([True, False])[:, None, None]
    losses = linear_kl_divergence(*batched, where=rows, reduction="none")
    flat = linear_kl_divergence(*ARGS[:4], where=np.arange(TOKENS) < 20, reduction="none")
    np.testing.assert_allclose(losses, flat.reshape(shape), rtol=1e-5)
    (n,) = jax.export.symbolic_shape("n")
    args = [jnp.asarray(a, jnp.float32) for a in ARGS[:4]]
    shapes = [jax.ShapeDtypeStruct((n if a.shape[0] == TOKENS else a.shape[0], a.shape[1]), a.dtype) for a in args]
    step = jax.jit(jax.value_and_grad(linear_kl_divergence))
    exported = jax.export.export(step)(*shapes)
    assert_trees_close(exported.call(*args), step(*args), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("top_k", [False, slow(True)])
def test_lowers_for_cuda(top_k):
    targets = top_k_of() if top_k else ARGS[2:4]
    of = linear_kl_divergence_with_top_k_targets if top_k else linear_kl_divergence
    fn = jax.value_and_grad(lambda *args: of(*args, *targets, where=MASK), (0, 1))
    args = jnp.asarray(FEATURES), jnp.asarray(KERNEL)
    assert jax.export.export(jax.jit(fn), platforms=["cuda"])(*args).mlir_module()


def test_memory_is_that_of_a_block_of_tokens():
    shapes = (4096, 64), (64, 32768), (4096, 96), (96, 32768)
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    mask = jax.ShapeDtypeStruct((4096,), jnp.bool_)
    step = jax.value_and_grad(lambda *args: linear_kl_divergence(*args[:4], where=args[4]), (0, 1))
    program = jax.jit(step).lower(*args, mask).compile()
    of_kernel, of_logits = 4 * 64 * 32768, 2 * 4 * 4096 * 32768
    assert program.memory_analysis().temp_size_in_bytes - of_kernel < of_logits / 8


# Bad input.


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"features": jnp.zeros(())}, ValueError, "features: got shape"),
        ({"features": jnp.zeros((TOKENS, WIDTH), int)}, TypeError, "features: got dtype int32"),
        ({"kernel": KERNEL.T}, ValueError, "kernel: got shape"),
        ({"target_kernel": TARGET_KERNEL.T}, ValueError, r"pass target_kernel\.T"),
        ({"target_kernel": TARGET_KERNEL[:, :3]}, ValueError, "target_kernel: got shape .* 24 classes"),
        ({"target_features": TARGET_FEATURES[:3]}, ValueError, "target_features: got shape"),
        ({"bias": np.ones(3)}, ValueError, r"bias: got shape \(3,\)"),
        ({"target_bias": np.ones(3)}, ValueError, r"target_bias: got shape \(3,\)"),
        ({"where": np.ones(TOKENS)}, TypeError, "where: got dtype"),
        ({"where": np.ones(3, bool)}, ValueError, "where: got shape"),
        ({"class_mask": np.ones((TOKENS, CLASSES), bool)}, ValueError, "class_mask: got shape"),
        ({"class_mask": np.ones(CLASSES)}, TypeError, "class_mask: got dtype"),
        ({"temperature": 0.0}, ValueError, "temperature: got value 0"),
        ({"temperature": "1"}, TypeError, "temperature: got type str"),
        ({"direction": "backward"}, ValueError, "direction: got value 'backward'"),
        ({"beta": 0.0}, ValueError, "beta: got value 0.0.*direction="),
        ({"beta": 1}, ValueError, "beta: got value 1"),
        ({"reduction": "median"}, ValueError, "reduction: got value 'median'"),
        ({"target_gradients": 1}, TypeError, "target_gradients: got value 1"),
        ({"block_size": 0}, ValueError, "block_size: got value 0"),
    ],
)
def test_bad_input_is_refused(changed, error, text):
    names = "features", "kernel", "target_features", "target_kernel"
    with pytest.raises(error, match=f"^linear_kl_divergence: .*{text}|^linear_kl_divergence: {text}"):
        linear_kl_divergence(**dict(zip(names, ARGS, strict=False)) | changed)


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"target_log_probs": np.zeros((TOKENS, K), int)}, TypeError, "target_log_probs: got dtype"),
        ({"target_log_probs": np.zeros((3, K))}, ValueError, "target_log_probs: got shape"),
        ({"target_log_probs": np.zeros((TOKENS, 0))}, ValueError, "at least one class"),
        ({"target_classes": np.zeros((TOKENS, K))}, TypeError, "target_classes: got dtype"),
        ({"target_classes": np.zeros((TOKENS, 1), int)}, ValueError, "target_classes: got shape"),
        ({"rest": "keep"}, ValueError, "rest: got value 'keep'"),
    ],
)
def test_bad_top_k_input_is_refused(changed, error, text):
    log_probs, classes = top_k_of()
    arguments = {"features": FEATURES, "kernel": KERNEL, "target_log_probs": log_probs, "target_classes": classes}
    with pytest.raises(error, match=f"linear_kl_divergence_with_top_k_targets: .*{text}"):
        linear_kl_divergence_with_top_k_targets(**arguments | changed)


@pytest.mark.parametrize("reduction", ["none", slow("sum")])
def test_second_derivatives_where_the_cotangent_is_0(reduction):
    """The Hessian of half the square of what is 0 there is the product of the gradient with itself."""

    def losses(kernel):
        return linear_kl_divergence(FEATURES[:3], kernel, TARGET_FEATURES[:3], TARGET_KERNEL, reduction=reduction)

    def half_square(kernel):
        return 0.5 * jnp.sum(jnp.square(losses(kernel) - jax.lax.stop_gradient(losses(kernel))))

    @jax.jit
    def second(direction):
        with masksafe.forward_mode():
            along = jax.jvp(losses, (KERNEL,), (direction,))[1]
        return jnp.vdot(jax.jvp(jax.grad(half_square), (KERNEL,), (direction,))[1], direction), jnp.sum(along**2)

    with jax.enable_x64(True):
        product, squared = second(np.cos(KERNEL))
        assert squared > 0.1
        np.testing.assert_allclose(product, squared, rtol=1e-9)
