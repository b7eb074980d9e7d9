"""The cross-entropy of a linear layer, against the unfused formula in float64."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import masksafe
from masksafe.losses import _linear_cross_entropy, linear_softmax_cross_entropy
from masksafe.testing import CONSISTENCY_MODES, assert_consistent, assert_mask_safe

TOKENS, WIDTH, CLASSES = 40, 6, 24
RNG = np.random.default_rng(0)
FEATURES, KERNEL, BIAS = (RNG.normal(size=shape) for shape in ((TOKENS, WIDTH), (WIDTH, CLASSES), (CLASSES,)))
LABELS = RNG.integers(0, CLASSES, TOKENS)
MASK = RNG.random(TOKENS) < 0.6
WEIGHTS = RNG.normal(size=TOKENS)
OPTIONS = {"logit_soft_cap": 3.0, "label_smoothing": 0.1, "z_loss": 0.01}


@pytest.fixture(autouse=True)
def small_class_blocks(monkeypatch):
    """So that there are several, and the last one is ragged."""
    monkeypatch.setattr(_linear_cross_entropy, "default_class_tile", lambda *_: 7)


def unfused(features, kernel, labels, *, bias=None, where=None, reduction="mean", **options):
    cap, smoothing, z_loss = (options.get(name) for name in ("logit_soft_cap", "label_smoothing", "z_loss"))
    logits = jnp.matmul(features, kernel) + (0 if bias is None else bias)
    logits = cap * jnp.tanh(logits / cap) if cap else logits
    lse = jax.nn.logsumexp(logits, -1)
    targets = jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype)
    targets = targets * (1 - (smoothing or 0)) + (smoothing or 0) / logits.shape[-1]
    losses = lse - jnp.sum(targets * logits, -1) + (z_loss or 0) * lse**2
    if where is not None:
        losses = jnp.where(where, losses, 0)
    count = losses.size if where is None else jnp.sum(where)
    return {"none": losses, "sum": jnp.sum(losses), "mean": jnp.sum(losses) / jnp.maximum(count, 1)}[reduction]


def scalar(fn, **kwargs):
    """A function of features, kernel and maybe bias, with cotangents that are not all alike."""

    def loss(features, kernel, bias=None, labels=LABELS):
        out = fn(features, kernel, labels, bias=bias, **kwargs)
        return jnp.sum(out * jnp.asarray(WEIGHTS[: out.size], out.dtype).reshape(out.shape)) if out.ndim else 1.7 * out

    return loss


def assert_trees_close(actual, desired, **tolerances):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.float64(a), np.float64(b), **tolerances), actual, desired)


CASES = list(itertools.product(["mean", "sum", "none"], [None, MASK], [False, True], [{}, OPTIONS], [None, 9, 200]))
FIRST_CASES = [case if n % 5 == 0 else pytest.param(*case, marks=pytest.mark.slow) for n, case in enumerate(CASES)]


@pytest.mark.parametrize(("reduction", "where", "with_bias", "options", "block_size"), FIRST_CASES)
def test_equals_the_unfused_formula(reduction, where, with_bias, options, block_size):
    with jax.enable_x64(True):
        args = (FEATURES, KERNEL, BIAS) if with_bias else (FEATURES, KERNEL)
        kwargs = {"where": where, "reduction": reduction, **options}
        numbers = range(len(args))
        fused = scalar(linear_softmax_cross_entropy, block_size=block_size, **kwargs)
        actual = jax.value_and_grad(fused, tuple(numbers))(*map(jnp.asarray, args))
        desired = jax.value_and_grad(scalar(unfused, **kwargs), tuple(numbers))(*map(jnp.asarray, args))
        assert_trees_close(actual, desired, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("option", OPTIONS)
def test_each_option_alone(option):
    with jax.enable_x64(True):
        kwargs = {option: OPTIONS[option], "where": MASK}
        args = tuple(map(jnp.asarray, (FEATURES, KERNEL, BIAS)))
        actual = jax.value_and_grad(scalar(linear_softmax_cross_entropy, **kwargs), (0, 1, 2))(*args)
        desired = jax.value_and_grad(scalar(unfused, **kwargs), (0, 1, 2))(*args)
        assert_trees_close(actual, desired, rtol=1e-11, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_every_other_derivative(reduction):
    with jax.enable_x64(True):
        kwargs = {"where": MASK, "reduction": reduction, **OPTIONS}
        features, kernel = jnp.asarray(FEATURES), jnp.asarray(KERNEL)
        fused, plain = (
            lambda kernel, fn=fn, more=more: scalar(fn, **kwargs, **more)(features, kernel)
            for fn, more in ((linear_softmax_cross_entropy, {"block_size": 9}), (unfused, {}))
        )
        hessian = jax.hessian(plain)(kernel)
        np.testing.assert_allclose(jax.hessian(fused)(kernel), hessian, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(jax.jacrev(jax.grad(fused))(kernel), hessian, rtol=1e-9, atol=1e-12)
        with masksafe.forward_mode():
            actual = jax.jvp(fused, (kernel,), (kernel,)), jax.grad(fused)(kernel)
        assert_trees_close(actual, (jax.jvp(plain, (kernel,), (kernel,)), jax.grad(plain)(kernel)), rtol=1e-10)


def test_keeps_its_digits_where_the_model_is_sure():
    loss = lambda features: linear_softmax_cross_entropy(features, jnp.eye(2), jnp.array([0]))  # noqa: E731
    value, gradient = jax.value_and_grad(loss)(jnp.array([[15.0, 0.0]]))
    np.testing.assert_allclose(value, np.log1p(np.exp(-15.0)), rtol=1e-6)
    np.testing.assert_allclose(gradient, np.exp(-15.0) / (1 + np.exp(-15.0)) * np.array([[-1, 1]]), rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtypes(dtype):
    args = tuple(jnp.asarray(a, dtype) for a in (FEATURES, KERNEL, BIAS))
    value, gradients = jax.value_and_grad(scalar(linear_softmax_cross_entropy, where=MASK), (0, 1, 2))(*args)
    assert [x.dtype for x in (value, *gradients)] == ["float32", dtype, dtype, dtype]
    with jax.enable_x64(True):
        wide = tuple(jnp.asarray(a, "float64") for a in args)
        desired = jax.value_and_grad(scalar(unfused, where=MASK), (0, 1, 2))(*wide)
    eps = float(jnp.finfo(dtype).eps)
    assert_trees_close(gradients, desired[1], rtol=4 * eps, atol=eps)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_loss_is_float32_at_least(dtype, reduction):
    args = tuple(jnp.asarray(a, dtype) for a in (FEATURES, KERNEL))
    loss = linear_softmax_cross_entropy(*args, LABELS, where=MASK, reduction=reduction)
    assert loss.dtype == "float32"
    wide = linear_softmax_cross_entropy(*(a.astype("float32") for a in args), LABELS, where=MASK, reduction=reduction)
    np.testing.assert_allclose(loss, wide, rtol=1e-5)  # of bfloat16 it would keep two digits


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("bias", [None, "float32", "float64"])
@pytest.mark.parametrize(("features", "kernel"), list(itertools.product(["bfloat16", "float32", "float64"], repeat=2)))
def test_mixed_dtypes_have_second_derivatives(features, kernel, bias, reduction):
    """With 64-bit types, an argument may be wider than the sums or narrower."""
    with jax.enable_x64(True):
        args = jnp.asarray(FEATURES, features), jnp.asarray(KERNEL, kernel)
        args += () if bias is None else (jnp.asarray(BIAS, bias),)

        def loss(features, kernel, bias=None):
            return linear_softmax_cross_entropy(features, kernel, LABELS, bias=bias, reduction=reduction).sum()

        numbers = tuple(range(len(args)))
        for second in (jax.hessian, lambda f, n: jax.jacrev(jax.grad(f, n), n)):
            of_each = jax.eval_shape(second(loss, numbers), *args)
            assert [row[i].dtype for i, row in enumerate(of_each)] == [a.dtype for a in args]


def test_gradient_of_the_kernel_is_accumulated_in_float32():
    """4000 tokens that each add less than a rounding of the sum in bfloat16."""
    features, labels = jnp.ones((4000, 1), "bfloat16"), jnp.zeros(4000, int)
    loss = lambda kernel: linear_softmax_cross_entropy(features, kernel, labels, reduction="sum")  # noqa: E731
    np.testing.assert_allclose(jax.grad(loss)(jnp.zeros((1, 2), "bfloat16")), [[-2000, 2000]])


# What is masked is gone.


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "thoroughly",
    [
        {"order": 1, "transforms": ["jit"], "garbage": [np.nan, -np.inf, 3e38, -100]},
        pytest.param({}, marks=pytest.mark.slow, id="in full"),
    ],
)
def test_masked_tokens_are_gone(reduction, thoroughly):
    def loss(features, kernel, bias, labels, where):
        return linear_softmax_cross_entropy(
            features, kernel, labels, bias=bias, where=where, reduction=reduction, block_size=8
        )

    args = *(jnp.asarray(a, jnp.float32) for a in (FEATURES, KERNEL, BIAS)), jnp.asarray(LABELS), jnp.asarray(MASK)
    masked = {0: ~jnp.broadcast_to(args[4][:, None], FEATURES.shape), 3: ~args[4]}
    assert_mask_safe(loss, *args, masked=masked, output_mask=~args[4] if reduction == "none" else None, **thoroughly)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_nothing_unmasked_is_zero(reduction):
    def loss(features, kernel):
        labels, where = jnp.full(TOKENS, -100), jnp.zeros(TOKENS, bool)
        return jnp.sum(linear_softmax_cross_entropy(features, kernel, labels, where=where, reduction=reduction))

    value, gradients = jax.value_and_grad(loss, (0, 1))(jnp.full(FEATURES.shape, jnp.nan), jnp.asarray(KERNEL))
    assert value == 0
    assert not any(np.any(g) for g in gradients)
    assert linear_softmax_cross_entropy(jnp.zeros((0, 6)), KERNEL, jnp.zeros(0, int)) == 0
    empty = jax.grad(lambda k: linear_softmax_cross_entropy(jnp.zeros((0, 6)), k, jnp.zeros(0, int)))(jnp.ones((6, 3)))
    assert not empty.any()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_infinite_cotangent_of_nothing(reduction):
    def loss(features, kernel, where):
        return jnp.sum(
            jnp.sqrt(linear_softmax_cross_entropy(features, kernel, LABELS, where=where, reduction=reduction))
        )

    args = jnp.asarray(FEATURES), jnp.asarray(KERNEL)
    gradients = jax.grad(loss, (0, 1))(*args, jnp.zeros(TOKENS, bool))
    assert not any(np.any(g) for g in gradients)
    gradient = jax.grad(loss)(*args, jnp.asarray(MASK))
    assert np.isfinite(gradient).all()
    assert not gradient[~MASK].any()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32"])
def test_labels_of_a_narrow_dtype_and_many_classes(dtype):
    losses = linear_softmax_cross_entropy(jnp.zeros((3, 1)), jnp.zeros((1, 1000)), np.array([0, 1, 127], dtype))
    np.testing.assert_allclose(losses, np.log(1000), rtol=1e-6)


@pytest.mark.parametrize("label", [-1, CLASSES, -100, 2**31 - 1])
def test_label_out_of_range_is_nan_in_its_own_row(label):
    labels = jnp.asarray(LABELS).at[5].set(label)
    losses = linear_softmax_cross_entropy(FEATURES, KERNEL, labels, reduction="none")
    assert np.isnan(losses).nonzero()[0].tolist() == [5]
    assert np.isnan(linear_softmax_cross_entropy(FEATURES, KERNEL, labels))
    gradient = jax.grad(lambda f: linear_softmax_cross_entropy(f, KERNEL, labels))(jnp.asarray(FEATURES))
    assert np.isnan(gradient).all(-1).nonzero()[0].tolist() == [5]


def test_what_is_selected_away_behind_the_loss_takes_no_part():
    labels = jnp.asarray(LABELS).at[5].set(-100)

    def loss(features, kernel):
        losses = linear_softmax_cross_entropy(features, kernel, labels, reduction="none")
        return jnp.sum(jnp.where(labels >= 0, losses, 0))

    args = jnp.asarray(FEATURES, jnp.float32), jnp.asarray(KERNEL, jnp.float32)
    value, gradients = jax.value_and_grad(loss, (0, 1))(*args)
    assert all(np.isfinite(x).all() for x in (value, *gradients))
    assert not gradients[0][5].any()


def test_no_alarm_of_debug_nans():
    features = np.where(MASK[:, None], FEATURES, np.nan).astype("float32")
    labels = np.where(MASK, LABELS, -100)
    for reduction in ("mean", "none"):
        loss = scalar(linear_softmax_cross_entropy, where=MASK, reduction=reduction)
        with jax.debug_nans(True):
            gradients = jax.grad(lambda *args, loss=loss: loss(*args, labels=labels), (0, 1))(features, KERNEL)
        assert all(np.isfinite(g).all() for g in gradients)


@pytest.mark.parametrize("offset", [1e3, 1e5, 1e7])
def test_a_common_offset_of_the_logits_costs_no_digits(offset):
    bias, smoothing = jnp.full(CLASSES, offset, jnp.float32), 0.1
    for kernel in (np.zeros_like(KERNEL), np.round(KERNEL) * 2):  # logits that are exact with the offset
        features = np.round(FEATURES)

        def gradients(loss, bias, features=features, kernel=kernel):
            return jax.value_and_grad(loss, (0, 1, 2))(*(jnp.asarray(a, bias.dtype) for a in (features, kernel, bias)))

        actual = gradients(scalar(linear_softmax_cross_entropy, reduction="none", label_smoothing=smoothing), bias)
        with jax.enable_x64(True):
            exact = scalar(unfused, reduction="none", label_smoothing=smoothing)
            desired = gradients(exact, jnp.zeros(CLASSES, "float64"))
        assert_trees_close(actual, desired, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("form", ["reverse", "forward mode", "explicit mesh"])
def test_a_bad_label_makes_the_gradient_of_its_token_nan(form):
    labels = jnp.asarray(LABELS).at[3].set(-1)

    def gradient(features, labels):
        return jax.grad(scalar(linear_softmax_cross_entropy, reduction="none"))(features, KERNEL, labels=labels)

    features = jnp.asarray(FEATURES)
    if form == "reverse":
        actual = gradient(features, labels)
    elif form == "forward mode":
        with masksafe.forward_mode():
            actual = gradient(features, labels)
    else:
        with jax.set_mesh(jax.make_mesh((8,), ("tokens",), axis_types=(AxisType.Explicit,))):
            args = [jax.device_put(a, PartitionSpec("tokens")) for a in (features, labels)]
            actual = np.asarray(jax.jit(gradient)(*args))
    assert np.isnan(actual[3]).all()
    assert np.isfinite(np.delete(actual, 3, 0)).all()


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"label_smoothing": 1.0}], ids=str)
def test_a_label_at_a_forbidden_class_costs_infinity(options):
    bias = jnp.asarray(BIAS).at[LABELS[0]].set(-jnp.inf)
    losses = linear_softmax_cross_entropy(FEATURES, KERNEL, LABELS, bias=bias, reduction="none", **options)
    assert losses[0] == jnp.inf
    if not options:
        np.testing.assert_array_equal(losses == jnp.inf, LABELS[0] == LABELS)
        assert np.isfinite(losses[LABELS[0] != LABELS]).all()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_float16_gradients_survive_a_scaled_loss(reduction):
    features, kernel, scale = jnp.array([[17.0, 0.0]], "float16"), jnp.eye(2, dtype="float16"), 4096

    def loss(features):
        total = linear_softmax_cross_entropy(features, kernel, jnp.array([0]), reduction=reduction)
        return jnp.sum(scale * total.astype("float32"))

    probability = scale / (1 + np.exp(17.0))
    np.testing.assert_allclose(np.float64(jax.grad(loss)(features))[0], [-probability, probability], rtol=2e-3)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_loss_that_is_selected_away_has_no_gradient(reduction):
    features = jnp.asarray(FEATURES).at[0].set(jnp.nan)

    def loss(features):
        return jnp.sum(jnp.where(False, linear_softmax_cross_entropy(features, KERNEL, LABELS, reduction=reduction), 0))

    np.testing.assert_array_equal(jax.grad(loss)(features), 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_strict_promotion(dtype):
    args = [jnp.asarray(a, dtype) for a in (FEATURES, KERNEL, BIAS)]
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        for reduction in ("mean", "sum", "none"):
            loss = scalar(linear_softmax_cross_entropy, where=MASK, reduction=reduction, **OPTIONS)
            assert np.isfinite(np.float32(jax.grad(lambda f, k, b, loss=loss: loss(f, k, b).sum())(*args))).all()


def test_symbolic_sizes_can_be_exported():
    t, d, v = jax.export.symbolic_shape("t, d, v")
    shapes = [jax.ShapeDtypeStruct(s, x) for s, x in (((t, d), "float32"), ((d, v), "float32"), ((t,), "int32"))]
    step = jax.jit(jax.value_and_grad(lambda f, k, y: linear_softmax_cross_entropy(f, k, y), (0, 1)))
    args = *(jnp.asarray(a, "float32") for a in (FEATURES, KERNEL)), jnp.asarray(LABELS, "int32")
    assert_trees_close(jax.export.export(step)(*shapes).call(*args), step(*args), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("hidden", ["kernel", "bias"])
def test_nothing_unmasked_has_gradients_of_zero_in_forward_mode_too(hidden):
    args = {"kernel": jnp.asarray(KERNEL), "bias": jnp.asarray(BIAS)}
    args[hidden] = args[hidden] * jnp.nan

    def loss(args):
        return linear_softmax_cross_entropy(FEATURES, labels=LABELS, where=np.zeros(TOKENS, bool), **args)

    for context in (masksafe.forward_mode(), masksafe.label_checks("off")):
        with context:
            jax.tree.map(lambda g: np.testing.assert_array_equal(g, 0), jax.grad(loss)(args))


def test_mixed_dtypes():
    loss = scalar(linear_softmax_cross_entropy, where=MASK)
    args = jnp.asarray(FEATURES, "bfloat16"), jnp.asarray(KERNEL, "float32"), jnp.asarray(BIAS, "float32")
    value, gradients = jax.value_and_grad(loss, (0, 1, 2))(*args)
    assert value.dtype == "float32"
    assert [g.dtype for g in gradients] == ["bfloat16", "float32", "float32"]
    desired = jax.grad(scalar(unfused, where=MASK), (0, 1, 2))(*(a.astype("float32") for a in args))
    assert_trees_close(gradients, desired, rtol=1e-2, atol=1e-4)


def test_label_checks():
    labels = jnp.asarray(LABELS).at[5].set(CLASSES).at[6].set(-1)
    with (
        masksafe.label_checks("raise"),
        pytest.raises(ValueError, match=r"2 of 40 labels .* \[0, 24\); first at \(5,\)"),
    ):
        linear_softmax_cross_entropy(FEATURES, KERNEL, labels)
    with masksafe.label_checks("checkify"):
        step = jax.value_and_grad(lambda k: linear_softmax_cross_entropy(FEATURES, k, labels))
        error, (value, gradient) = jax.jit(checkify.checkify(step))(KERNEL)
        assert "2 of 40 labels" in error.get()
        assert np.isnan(value)
        assert np.isnan(gradient).any()
    with masksafe.label_checks("raise"):
        linear_softmax_cross_entropy(FEATURES, KERNEL, labels, where=jnp.arange(TOKENS) > 6)


# One answer everywhere.


@pytest.mark.parametrize(
    "modes", [["eager", "jit", "vmap", "scan"], pytest.param(CONSISTENCY_MODES, marks=pytest.mark.slow, id="all")]
)
def test_one_answer(modes):
    def loss(features, kernel, bias):
        return linear_softmax_cross_entropy(features, kernel, LABELS, bias=bias, where=MASK, block_size=9, **OPTIONS)

    assert_consistent(loss, *(jnp.asarray(a, jnp.float32) for a in (FEATURES, KERNEL, BIAS)), modes=modes)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_tokens_split_over_a_mesh(axis_type, reduction):
    def step(features, kernel, labels, where):
        loss = scalar(linear_softmax_cross_entropy, where=where, reduction=reduction, **OPTIONS)
        return jax.value_and_grad(lambda f, k: loss(f, k, labels=labels), (0, 1))(features, kernel)

    args = jnp.asarray(FEATURES), jnp.asarray(KERNEL), jnp.asarray(LABELS), jnp.asarray(MASK)
    mesh = jax.make_mesh((8,), ("tokens",), axis_types=(axis_type,))
    specs = (PartitionSpec("tokens"), PartitionSpec(), PartitionSpec("tokens"), PartitionSpec("tokens"))
    with jax.set_mesh(mesh):
        split = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(args, specs, strict=True)]
        actual = jax.jit(step)(*split)
    assert_trees_close(actual, step(*args), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("outside", [True, False], ids=["gradient outside", "gradient inside"])
def test_classes_split_in_a_shard_map(reduction, outside):
    def local(features, kernel, bias, labels, where):
        kwargs = {"where": where, "reduction": reduction, "axis_name": "classes", "block_size": 4, **OPTIONS}
        losses = linear_softmax_cross_entropy(features, kernel, labels, bias=bias, **kwargs)
        return jax.lax.psum(jnp.sum(losses), "tokens")

    mesh = jax.make_mesh((2, 4), ("tokens", "classes"), axis_types=(AxisType.Auto,) * 2)
    by_token, by_class = PartitionSpec("tokens"), PartitionSpec("classes")
    specs = (by_token, PartitionSpec(None, "classes"), by_class, by_token, by_token)
    if outside:
        step = jax.value_and_grad(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec()), (0, 1, 2))
    else:
        step = jax.value_and_grad(local, (0, 1, 2))
        step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(PartitionSpec(), specs[:3]))
    args = tuple(map(jnp.asarray, (FEATURES, KERNEL, BIAS)))
    actual = jax.jit(step)(*args, jnp.asarray(LABELS), jnp.asarray(MASK))
    plain = lambda *args: unfused(*args[:2], LABELS, bias=args[2], where=MASK, reduction="sum", **OPTIONS)  # noqa: E731
    assert_trees_close(actual, jax.value_and_grad(plain, (0, 1, 2))(*args), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_second_derivatives_and_forward_mode_with_split_classes(reduction):
    def local(features, kernel, bias):
        kwargs = {"where": MASK, "reduction": reduction, "axis_name": "classes", "block_size": 9, **OPTIONS}
        return jnp.sum(linear_softmax_cross_entropy(features, kernel, LABELS, bias=bias, **kwargs))

    mesh = jax.make_mesh((4,), ("classes",), axis_types=(AxisType.Auto,))
    specs = PartitionSpec(), PartitionSpec(None, "classes"), PartitionSpec("classes")
    split = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())

    def derivatives(fn):
        args = tuple(jnp.asarray(a, jnp.float32) for a in (FEATURES, KERNEL, BIAS))
        directions = jax.tree.map(jnp.cos, args)
        gradient = jax.grad(fn, (0, 1, 2))
        forward_over_reverse = jax.jvp(gradient, args, directions)[1]
        along = lambda *args: sum(map(jnp.vdot, gradient(*args), directions))  # noqa: E731
        with masksafe.forward_mode():
            slope = jax.jvp(fn, args, directions)[1]
        return forward_over_reverse, jax.grad(along, (0, 1, 2))(*args), slope

    plain = lambda *args: unfused(*args[:2], LABELS, bias=args[2], where=MASK, reduction="sum", **OPTIONS)  # noqa: E731
    assert_trees_close(jax.jit(lambda: derivatives(split))(), derivatives(plain), rtol=1e-3, atol=1e-4)


def test_batch_axes():
    shape = (2, 4, 5)
    losses = linear_softmax_cross_entropy(
        FEATURES.reshape(*shape, WIDTH), KERNEL, LABELS.reshape(shape), where=MASK.reshape(shape), reduction="none"
    )
    desired = unfused(FEATURES, KERNEL, LABELS, where=MASK, reduction="none").reshape(shape)
    np.testing.assert_allclose(losses, desired, rtol=1e-5, atol=1e-6)
    by_row = linear_softmax_cross_entropy(
        FEATURES.reshape(*shape, WIDTH), KERNEL, LABELS.reshape(shape), where=jnp.array([True, False])[:, None, None]
    )
    np.testing.assert_allclose(by_row, unfused(FEATURES, KERNEL, LABELS, where=np.arange(TOKENS) < 20), rtol=1e-5)


@pytest.mark.parametrize("gradient", [False, True])
def test_lowers_for_cuda(gradient):
    loss = scalar(linear_softmax_cross_entropy, where=MASK)
    fn = jax.grad(loss, (0, 1)) if gradient else loss
    args = jnp.asarray(FEATURES), jnp.asarray(KERNEL)
    assert jax.export.export(jax.jit(fn), platforms=["cuda"])(*args).mlir_module()


def test_memory_is_that_of_a_block_of_tokens():
    shapes = ((4096, 64), jnp.float32), ((64, 32768), jnp.float32), ((4096,), jnp.int32), ((4096,), jnp.bool_)
    args = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    loss = lambda f, k, y, m: linear_softmax_cross_entropy(f, k, y, where=m)  # noqa: E731
    program = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*args).compile()
    of_kernel, of_logits = 4 * 64 * 32768, 4 * 4096 * 32768
    assert program.memory_analysis().temp_size_in_bytes - of_kernel < of_logits / 8


# Bad input.


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"features": jnp.zeros(())}, ValueError, "features: got shape"),
        ({"features": jnp.zeros((TOKENS, WIDTH), int)}, TypeError, "features: got dtype int32"),
        ({"kernel": KERNEL.T}, ValueError, "kernel: got shape"),
        ({"kernel": np.zeros((WIDTH, 0))}, ValueError, "at least one class"),
        ({"labels": LABELS[:3]}, ValueError, r"labels: got shape \(3,\)"),
        ({"labels": np.ones(TOKENS)}, TypeError, "labels: got dtype"),
        ({"bias": np.ones(3)}, ValueError, r"bias: got shape \(3,\)"),
        ({"where": np.ones(TOKENS)}, TypeError, "where: got dtype"),
        ({"where": np.ones(3, bool)}, ValueError, "where: got shape"),
        ({"reduction": "median"}, ValueError, "reduction: got value 'median'"),
        ({"logit_soft_cap": 0.0}, ValueError, "logit_soft_cap: got value 0"),
        ({"logit_soft_cap": np.inf}, ValueError, "logit_soft_cap: got value inf"),
        ({"z_loss": "0.1"}, TypeError, "z_loss: got type str"),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing: got value 1.5"),
        ({"z_loss": -1.0}, ValueError, "z_loss: got value -1"),
        ({"block_size": 0}, ValueError, "block_size: got value 0"),
        ({"axis_name": "classes"}, ValueError, "axis_name: got value 'classes'"),
    ],
)
def test_bad_input_is_refused(changed, error, text):
    arguments = {"features": FEATURES, "kernel": KERNEL, "labels": LABELS} | changed
    with pytest.raises(error, match=f"linear_softmax_cross_entropy: .*{text}|linear_softmax_cross_entropy: {text}"):
        linear_softmax_cross_entropy(**arguments)
