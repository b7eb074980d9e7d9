"""The cross-entropy of a linear layer, against the unfused formula in float64."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from linear_cases import (
    assert_every_other_derivative,
    assert_trees_close,
    slow,
    use_form_for_accelerators,
    use_small_class_tiles,
)

import masksafe
from masksafe.losses import linear_softmax_cross_entropy
from masksafe.losses._rows._options import sizes_in_tiles
from masksafe.testing import CONSISTENCY_MODES, assert_consistent, assert_mask_safe

TOKENS, WIDTH, CLASSES = 40, 6, 24
RNG = np.random.default_rng(0)
FEATURES, KERNEL, BIAS = (RNG.normal(size=shape) for shape in ((TOKENS, WIDTH), (WIDTH, CLASSES), (CLASSES,)))
LABELS = RNG.integers(0, CLASSES, TOKENS)
MASK = RNG.random(TOKENS) < 0.6
WEIGHTS = RNG.normal(size=TOKENS)
REDUCTIONS = "mean", "sum", "none"
OPTIONS = {"logit_soft_cap": 3.0, "label_smoothing": 0.1, "z_loss": 0.01}


@pytest.fixture(autouse=True)
def small_class_blocks(choose):
    use_small_class_tiles(choose)


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


CASES = list(itertools.product(["mean", "sum", "none"], [None, MASK], [False, True], [{}, OPTIONS], [None, 9, 200]))
# Four quick ones, in which each choice occurs; others of the 72 in the slow run.
FIRST_CASES = [case if n % 22 == 0 else slow(*case) for n, case in enumerate(CASES) if n % 22 == 0 or n % 5 == 0]


def assert_equals_the_unfused_formula(args, block_size=None, **kwargs):
    @jax.jit
    def both(*args):
        numbers = tuple(range(len(args)))
        losses = scalar(linear_softmax_cross_entropy, block_size=block_size, **kwargs), scalar(unfused, **kwargs)
        return [jax.value_and_grad(loss, numbers)(*args) for loss in losses]

    with jax.enable_x64(True):
        assert_trees_close(*both(*args), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("reduction", "where", "with_bias", "options", "block_size"), FIRST_CASES)
def test_equals_the_unfused_formula(reduction, where, with_bias, options, block_size):
    args = (FEATURES, KERNEL, BIAS) if with_bias else (FEATURES, KERNEL)
    assert_equals_the_unfused_formula(args, block_size, where=where, reduction=reduction, **options)


@pytest.mark.parametrize("option", OPTIONS)
def test_each_option_alone(option):
    assert_equals_the_unfused_formula((FEATURES, KERNEL, BIAS), where=MASK, **{option: OPTIONS[option]})


@pytest.mark.parametrize("reduction", ["none", slow("mean")])
def test_every_other_derivative(reduction):
    kwargs = {"where": MASK, "reduction": reduction, **OPTIONS}
    fused, plain = scalar(linear_softmax_cross_entropy, block_size=9, **kwargs), scalar(unfused, **kwargs)
    assert_every_other_derivative(fused, plain, (FEATURES, KERNEL, BIAS))


def test_keeps_its_digits_where_the_model_is_sure():
    loss = lambda features: linear_softmax_cross_entropy(features, jnp.eye(2), jnp.array([0]))  # noqa: E731
    value, gradient = jax.jit(jax.value_and_grad(loss))(jnp.array([[15.0, 0.0]]))
    np.testing.assert_allclose(value, np.log1p(np.exp(-15.0)), rtol=1e-6)
    np.testing.assert_allclose(gradient, np.exp(-15.0) / (1 + np.exp(-15.0)) * np.array([[-1, 1]]), rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", slow("float16"), slow("float32")])
def test_dtypes(dtype):
    args = tuple(a.astype(dtype) for a in (FEATURES, KERNEL, BIAS))
    step = lambda fn: jax.jit(jax.value_and_grad(scalar(fn, where=MASK), (0, 1, 2)))  # noqa: E731
    value, gradients = step(linear_softmax_cross_entropy)(*args)
    assert [x.dtype for x in (value, *gradients)] == ["float32", dtype, dtype, dtype]
    with jax.enable_x64(True):
        desired = step(unfused)(*(a.astype("float64") for a in args))
    eps = float(jnp.finfo(dtype).eps)
    assert_trees_close(gradients, desired[1], rtol=4 * eps, atol=eps)


@pytest.mark.parametrize("dtype", ["bfloat16", slow("float16")])
def test_the_loss_is_float32_at_least(dtype):
    def losses(*args):
        return [linear_softmax_cross_entropy(*args, LABELS, where=MASK, reduction=r) for r in REDUCTIONS]

    args = [a.astype(dtype) for a in (FEATURES, KERNEL)]
    both = jax.jit(lambda *args: (losses(*args), losses(*(a.astype("float32") for a in args))))
    for narrow, wide in zip(*both(*args), strict=True):
        assert narrow.dtype == "float32"
        np.testing.assert_allclose(narrow, wide, rtol=1e-5)  # of bfloat16 it would keep two digits


OF_FEATURES_AND_KERNEL = itertools.product(["bfloat16", "float32", "float64"], repeat=2)


@pytest.mark.parametrize(
    ("features", "kernel", "bias"),
    [
        ("bfloat16", "float64", "float32"),
        *itertools.starmap(slow, ((f, k, b) for f, k in OF_FEATURES_AND_KERNEL for b in (None, "float64"))),
    ],
)
def test_mixed_dtypes_have_second_derivatives(features, kernel, bias):
    """With 64-bit types, an argument may be wider than the sums or narrower."""
    with jax.enable_x64(True):
        args = tuple(jax.ShapeDtypeStruct(a.shape, d) for a, d in ((FEATURES, features), (KERNEL, kernel)))
        args += () if bias is None else (jax.ShapeDtypeStruct(BIAS.shape, bias),)

        def loss(features, kernel, bias=None):
            return linear_softmax_cross_entropy(features, kernel, LABELS, bias=bias, reduction="none").sum()

        numbers = tuple(range(len(args)))
        for second in (jax.hessian, lambda f, n: jax.jacrev(jax.grad(f, n), n)):
            of_each = jax.eval_shape(second(loss, numbers), *args)
            assert [row[i].dtype for i, row in enumerate(of_each)] == [a.dtype for a in args]


def test_gradient_of_the_kernel_is_accumulated_in_float32():
    """4000 tokens that each add less than a rounding of the sum in bfloat16."""
    features, labels = jnp.ones((4000, 1), "bfloat16"), jnp.zeros(4000, int)
    loss = lambda kernel: linear_softmax_cross_entropy(features, kernel, labels, reduction="sum")  # noqa: E731
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(jnp.zeros((1, 2), "bfloat16")), [[-2000, 2000]])


# What is masked is gone.


@pytest.mark.parametrize("reduction", ["none", slow("mean"), slow("sum")])
def test_masked_tokens_are_gone(reduction):
    def loss(features, kernel, bias, labels, where):
        return linear_softmax_cross_entropy(
            features, kernel, labels, bias=bias, where=where, reduction=reduction, block_size=8
        )

    args = *(np.float32(a) for a in (FEATURES, KERNEL, BIAS)), LABELS, MASK
    masked = {0: np.broadcast_to(~MASK[:, None], FEATURES.shape), 3: ~MASK}
    assert_mask_safe(loss, *args, masked=masked, transforms=("jit",))


def test_taking_tokens_out_is_masking_them():
    of = functools.partial(linear_softmax_cross_entropy, kernel=KERNEL)
    masked, removed = jax.jit(lambda *a: (of(a[0], labels=a[1], where=MASK), of(a[2], labels=a[3])))(
        FEATURES, LABELS, FEATURES[MASK], LABELS[MASK]
    )
    np.testing.assert_allclose(masked, removed, rtol=1e-6)


def test_nothing_unmasked_is_zero():
    @jax.jit
    def all_of(features, kernel, labels):
        where = np.zeros(len(labels), bool)
        loss = lambda reduction, *args: jnp.sum(  # noqa: E731
            linear_softmax_cross_entropy(*args, labels, where=where, reduction=reduction)
        )
        return [jax.value_and_grad(functools.partial(loss, r), (0, 1))(features, kernel) for r in REDUCTIONS]

    for tokens in (TOKENS, 0):
        out = all_of(np.full((tokens, WIDTH), np.nan, np.float32), KERNEL.astype(np.float32), np.full(tokens, -100))
        jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0), out)
    step = jax.jit(jax.value_and_grad(lambda k: linear_softmax_cross_entropy(np.zeros((0, 6)), k, np.zeros(0, int))))
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0), step(jnp.ones((6, 3))))


@pytest.mark.parametrize("reduction", ["mean", "none", slow("sum")])
def test_infinite_cotangent_of_nothing(reduction):
    @jax.jit
    def gradients(features, kernel, where):
        loss = lambda *args: linear_softmax_cross_entropy(*args, LABELS, where=where, reduction=reduction)  # noqa: E731
        return jax.grad(lambda *args: jnp.sum(jnp.sqrt(loss(*args))), (0, 1))(features, kernel)

    assert not any(np.any(g) for g in gradients(FEATURES, KERNEL, np.zeros(TOKENS, bool)))
    gradient = gradients(FEATURES, KERNEL, MASK)[0]
    assert np.isfinite(gradient).all()
    assert not gradient[~MASK].any()


@pytest.mark.parametrize("dtype", ["int8", "uint32", slow("uint8"), slow("int16")])
def test_labels_of_a_narrow_dtype_and_many_classes(dtype):
    losses = linear_softmax_cross_entropy(jnp.zeros((3, 1)), jnp.zeros((1, 1000)), np.array([0, 1, 127], dtype))
    np.testing.assert_allclose(losses, np.log(1000), rtol=1e-6)


def test_label_out_of_range_is_nan_in_its_own_row():
    @jax.jit
    def all_of(features, labels):
        of = lambda f, reduction: linear_softmax_cross_entropy(f, KERNEL, labels, reduction=reduction)  # noqa: E731
        return of(features, "none"), jax.value_and_grad(lambda f: of(f, "mean"))(features)

    for label in (-1, CLASSES, -100, 2**31 - 1):
        losses, (mean, gradient) = all_of(FEATURES, np.where(np.arange(TOKENS) == 5, label, LABELS))
        assert np.isnan(losses).nonzero()[0].tolist() == [5]
        assert np.isnan(mean)
        assert np.isnan(gradient).all(-1).nonzero()[0].tolist() == [5]


def test_what_is_selected_away_behind_the_loss_takes_no_part():
    labels = np.where(np.arange(TOKENS) == 5, -100, LABELS)

    def loss(features, kernel):
        losses = linear_softmax_cross_entropy(features, kernel, labels, reduction="none")
        return jnp.sum(jnp.where(labels >= 0, losses, 0))

    value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(np.float32(FEATURES), np.float32(KERNEL))
    assert all(np.isfinite(x).all() for x in (value, *gradients))
    assert not gradients[0][5].any()


@pytest.mark.parametrize("reduction", ["none", slow("mean")])
def test_no_alarm_of_debug_nans(reduction):
    features = np.where(MASK[:, None], FEATURES, np.nan).astype("float32")
    labels = np.where(MASK, LABELS, -100)
    loss = scalar(linear_softmax_cross_entropy, where=MASK, reduction=reduction)
    with jax.debug_nans(True):
        gradients = jax.grad(lambda *args: loss(*args, labels=labels), (0, 1))(features, KERNEL)
    assert all(np.isfinite(g).all() for g in gradients)


def test_a_common_offset_of_the_logits_costs_no_digits():
    kwargs = {"reduction": "none", "label_smoothing": 0.1}
    step = lambda fn: jax.jit(jax.value_and_grad(scalar(fn, **kwargs), (0, 1, 2)))  # noqa: E731
    actual, exact = step(linear_softmax_cross_entropy), step(unfused)
    for kernel in (np.zeros_like(KERNEL), np.round(KERNEL) * 2):  # logits that are exact with the offset
        with jax.enable_x64(True):
            desired = exact(np.round(FEATURES), kernel, np.zeros(CLASSES))
        for offset in (1e3, 1e5, 1e7):
            out = actual(*(np.float32(a) for a in (np.round(FEATURES), kernel, np.full(CLASSES, offset))))
            assert_trees_close(out, desired, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("form", ["reverse", "forward mode", "explicit mesh"])
def test_a_bad_label_makes_the_gradient_of_its_token_nan(form):
    labels = np.where(np.arange(TOKENS) == 3, -1, LABELS)

    @jax.jit
    def gradient(features, labels):
        return jax.grad(scalar(linear_softmax_cross_entropy, reduction="none"))(features, KERNEL, labels=labels)

    features = np.float32(FEATURES)
    if form == "reverse":
        actual = gradient(features, labels)
    elif form == "forward mode":
        with masksafe.forward_mode():
            actual = gradient(features, labels)
    else:
        with jax.set_mesh(jax.make_mesh((8,), ("tokens",), axis_types=(AxisType.Explicit,))):
            args = [jax.device_put(a, PartitionSpec("tokens")) for a in (features, labels)]
            actual = np.asarray(gradient(*args))
    assert np.isnan(actual[3]).all()
    assert np.isfinite(np.delete(actual, 3, 0)).all()


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"label_smoothing": 1.0}], ids=str)
def test_a_label_at_a_forbidden_class_costs_infinity(options):
    bias = np.where(np.arange(CLASSES) == LABELS[0], -np.inf, BIAS)
    loss = jax.jit(functools.partial(linear_softmax_cross_entropy, reduction="none", **options))
    losses = np.asarray(loss(FEATURES, KERNEL, LABELS, bias=bias))
    assert losses[0] == jnp.inf
    if not options:
        np.testing.assert_array_equal(losses == jnp.inf, LABELS[0] == LABELS)
        assert np.isfinite(losses[LABELS[0] != LABELS]).all()


def test_float16_gradients_survive_a_scaled_loss():
    features, kernel, scale = np.array([[17.0, 0.0]], "float16"), np.eye(2, dtype="float16"), 4096

    def loss(features, reduction):
        total = linear_softmax_cross_entropy(features, kernel, np.array([0]), reduction=reduction)
        return jnp.sum(scale * total.astype("float32"))

    probability = scale / (1 + np.exp(17.0))
    for gradient in jax.jit(lambda x: [jax.grad(loss)(x, r) for r in REDUCTIONS])(features):
        np.testing.assert_allclose(np.float64(gradient)[0], [-probability, probability], rtol=2e-3)


def test_a_loss_that_is_selected_away_has_no_gradient():
    def loss(features, reduction):
        return jnp.sum(jnp.where(False, linear_softmax_cross_entropy(features, KERNEL, LABELS, reduction=reduction), 0))

    bad = np.where(np.arange(TOKENS)[:, None] == 0, np.nan, FEATURES)
    for gradient in jax.jit(lambda x: [jax.grad(loss)(x, r) for r in REDUCTIONS])(bad):
        np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize("dtype", ["bfloat16", slow("float32")])
def test_strict_promotion(dtype):
    args = [jnp.asarray(a, dtype) for a in (FEATURES, KERNEL, BIAS)]
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        for reduction in REDUCTIONS:
            loss = scalar(linear_softmax_cross_entropy, where=MASK, reduction=reduction, **OPTIONS)
            assert jax.make_jaxpr(jax.value_and_grad(loss, (0, 1, 2)))(*args).eqns


def test_symbolic_sizes_can_be_exported():
    t, d, v = jax.export.symbolic_shape("t, d, v")
    shapes = [jax.ShapeDtypeStruct(s, x) for s, x in (((t, d), "float32"), ((d, v), "float32"), ((t,), "int32"))]
    step = jax.jit(jax.value_and_grad(lambda f, k, y: linear_softmax_cross_entropy(f, k, y), (0, 1)))
    args = *(jnp.asarray(a, "float32") for a in (FEATURES, KERNEL)), jnp.asarray(LABELS, "int32")
    assert_trees_close(jax.export.export(step)(*shapes).call(*args), step(*args), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("hidden", ["kernel", "bias"])
def test_nothing_unmasked_has_gradients_of_zero_in_forward_mode_too(hidden):
    args = {"kernel": KERNEL, "bias": BIAS}
    args[hidden] = args[hidden] * np.nan

    def loss(args):
        return linear_softmax_cross_entropy(FEATURES, labels=LABELS, where=np.zeros(TOKENS, bool), **args)

    for context in (masksafe.forward_mode(), masksafe.label_checks("off")):
        with context:
            jax.tree.map(lambda g: np.testing.assert_array_equal(g, 0), jax.jit(jax.grad(loss))(args))


def test_mixed_dtypes():
    step = lambda fn: jax.jit(jax.value_and_grad(scalar(fn, where=MASK), (0, 1, 2)))  # noqa: E731
    args = FEATURES.astype("bfloat16"), KERNEL.astype("float32"), BIAS.astype("float32")
    value, gradients = step(linear_softmax_cross_entropy)(*args)
    assert value.dtype == "float32"
    assert [g.dtype for g in gradients] == ["bfloat16", "float32", "float32"]
    desired = step(unfused)(*(a.astype("float32") for a in args))
    assert_trees_close(gradients, desired[1], rtol=1e-2, atol=1e-4)


def test_label_checks():
    labels = LABELS.copy()
    labels[5:7] = CLASSES, -1
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
    "modes", [("jit", "vmap"), slow(set(CONSISTENCY_MODES) - {"devices", "disk", "strided"}, id="all")]
)
def test_one_answer(modes):
    def loss(features, kernel, bias):
        return linear_softmax_cross_entropy(features, kernel, LABELS, bias=bias, where=MASK, block_size=9, **OPTIONS)

    assert_consistent(loss, *(jnp.asarray(a, jnp.float32) for a in (FEATURES, KERNEL, BIAS)), modes=modes)


@pytest.mark.parametrize(
    ("axis_type", "reduction"),
    [
        (AxisType.Explicit, "none"),
        slow(AxisType.Auto, "mean"),
        slow(AxisType.Explicit, "mean"),
        slow(AxisType.Auto, "none"),
    ],
)
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
    assert_trees_close(actual, jax.jit(step)(*args), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("reduction", "outside"), [("none", True), ("sum", False), slow("sum", True), slow("none", False)]
)
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
    assert_trees_close(actual, jax.jit(jax.value_and_grad(plain, (0, 1, 2)))(*args), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_second_derivatives_and_forward_mode_with_split_classes(reduction, check_vma):
    def local(features, kernel, bias):
        kwargs = {"where": MASK, "reduction": reduction, "axis_name": "classes", "block_size": 9, **OPTIONS}
        return jnp.sum(linear_softmax_cross_entropy(features, kernel, LABELS, bias=bias, **kwargs))

    mesh = jax.make_mesh((4,), ("classes",), axis_types=(AxisType.Auto,))
    specs = PartitionSpec(), PartitionSpec(None, "classes"), PartitionSpec("classes")
    split = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=check_vma)

    def derivatives(fn, *args):
        directions = jax.tree.map(jnp.cos, args)
        gradient = jax.grad(fn, (0, 1, 2))
        forward_over_reverse = jax.jvp(gradient, args, directions)[1]
        along = lambda *args: sum(map(jnp.vdot, gradient(*args), directions))  # noqa: E731
        with masksafe.forward_mode():
            slope = jax.jvp(fn, args, directions)[1]
        return forward_over_reverse, jax.grad(along, (0, 1, 2))(*args), slope

    plain = lambda *args: unfused(*args[:2], LABELS, bias=args[2], where=MASK, reduction="sum", **OPTIONS)  # noqa: E731
    both = jax.jit(lambda *args: [derivatives(fn, *args) for fn in (split, plain)])
    assert_trees_close(*both(*map(np.float32, (FEATURES, KERNEL, BIAS))), rtol=1e-3, atol=1e-4)


def test_second_derivatives_with_split_classes_without_types_of_devices():
    """With check_vma=False JAX takes the loss on each device for a term of a sum over the devices."""
    by_class = PartitionSpec(None, "classes")

    def split(kernel):
        local = lambda kernel: linear_softmax_cross_entropy(FEATURES, kernel, LABELS, axis_name="classes")  # noqa: E731
        mesh = jax.make_mesh((4,), ("classes",), axis_types=(AxisType.Auto,))
        return jax.shard_map(local, mesh=mesh, in_specs=by_class, out_specs=PartitionSpec(), check_vma=False)(kernel)

    plain = lambda kernel: unfused(FEATURES, kernel, LABELS)  # noqa: E731
    kernel = jnp.asarray(KERNEL)
    along = lambda fn: jax.jvp(jax.grad(fn), (kernel,), (jnp.cos(kernel),))[1]  # noqa: E731
    assert_trees_close(*jax.jit(lambda: [along(split), along(plain)])(), rtol=1e-3, atol=1e-5)


def test_batch_axes():
    shape = (2, 4, 5)
    features, labels, where = FEATURES.reshape(*shape, WIDTH), LABELS.reshape(shape), MASK.reshape(shape)
    rows = np.array([True, False])[:, None, None]

    @jax.jit
    def all_of(features, flat):
        losses = linear_softmax_cross_entropy(features, KERNEL, labels, where=where, reduction="none")
        desired = unfused(flat, KERNEL, LABELS, where=MASK, reduction="none")
        by_row = linear_softmax_cross_entropy(features, KERNEL, labels, where=rows)
        return (losses, by_row), (desired.reshape(shape), unfused(flat, KERNEL, LABELS, where=np.arange(TOKENS) < 20))

    assert_trees_close(*all_of(features, FEATURES), rtol=1e-5, atol=1e-6)


def test_lowers_for_cuda():
    fn = jax.value_and_grad(scalar(linear_softmax_cross_entropy, where=MASK), (0, 1))
    args = jnp.asarray(FEATURES), jnp.asarray(KERNEL)
    assert jax.export.export(jax.jit(fn), platforms=["cuda"])(*args).mlir_module()


def test_memory_is_that_of_a_block_of_tokens():
    shapes = ((4096, 64), jnp.float32), ((64, 32768), jnp.float32), ((4096,), jnp.int32), ((4096,), jnp.bool_)
    args = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    loss = lambda f, k, y, m: linear_softmax_cross_entropy(f, k, y, where=m)  # noqa: E731
    program = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*args).compile()
    of_kernel, of_logits = 4 * 64 * 32768, 4 * 4096 * 32768
    assert program.memory_analysis().temp_size_in_bytes - of_kernel < of_logits / 8


# Elsewhere than on a CPU. The form for accelerators also runs on a CPU, with tiles so small that there are several.


@pytest.fixture
def elsewhere(choose):
    use_form_for_accelerators(choose)


def test_sizes_elsewhere(elsewhere):
    """Blocks and tiles that divide tokens and classes, and others."""
    of = functools.partial(sizes_in_tiles, TOKENS, WIDTH)
    assert [of(24, block, masked) for block in (None, 9) for masked in (False, True)] == [
        (14, 6),
        (10, 12),
        (9, 8),
        (9, 12),
    ]
    assert [of(23, block, masked=True) for block in (None, 200)] == [(10, 12), (40, 5)]


def test_sizes_of_large_problems():
    of = functools.partial(sizes_in_tiles, block_size=None)
    assert [of(4096, 1024, 32768, masked=masked) for masked in (False, True)] == [(4096, 8192), (2048, 32768)]
    assert [of(16384, 4096, 2**17, masked=masked) for masked in (False, True)] == [(16384, 8192), (8192, 32768)]
    assert of(4096, 1024, 50257, masked=False) == (4096, 7296)
    assert of(300, 64, 1000, masked=True) == (300, 1000)


@pytest.mark.parametrize(("reduction", "where", "with_bias", "options", "block_size"), FIRST_CASES)
def test_equals_the_unfused_formula_elsewhere(elsewhere, reduction, where, with_bias, options, block_size):
    args = (FEATURES, KERNEL, BIAS) if with_bias else (FEATURES, KERNEL)
    assert_equals_the_unfused_formula(args, block_size, where=where, reduction=reduction, **options)


@pytest.mark.parametrize("classes", [23, slow(1)])
def test_a_last_tile_that_is_smaller(elsewhere, classes):
    args, labels = (FEATURES, KERNEL[:, :classes], BIAS[:classes]), LABELS % classes
    losses = [scalar(fn, where=MASK, reduction="sum") for fn in (linear_softmax_cross_entropy, unfused)]
    both = jax.jit(lambda *args: [jax.value_and_grad(loss, (0, 1, 2))(*args, labels=labels) for loss in losses])
    with jax.enable_x64(True):
        assert_trees_close(*both(*args), rtol=1e-11, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["mean", slow("none")])
def test_every_other_derivative_elsewhere(elsewhere, reduction):
    test_every_other_derivative(reduction)


@pytest.mark.parametrize("reduction", ["sum", slow("none")])
def test_masked_tokens_are_gone_elsewhere(elsewhere, reduction):
    test_masked_tokens_are_gone(reduction)


@pytest.mark.parametrize("bad", ["features", slow("kernel"), "all"])
def test_nothing_unmasked_is_zero_elsewhere(elsewhere, bad):
    features, kernel = (
        x * np.nan if bad in (name, "all") else x for name, x in (("features", FEATURES), ("kernel", KERNEL))
    )

    @jax.jit
    def gradients(*args):
        where = jnp.zeros(TOKENS, bool)
        of = functools.partial(linear_softmax_cross_entropy, labels=LABELS, where=where)
        loss = lambda reduction, *args: jnp.sum(jnp.sqrt(of(*args, reduction=reduction)))  # noqa: E731
        return [jax.value_and_grad(functools.partial(loss, r), (0, 1))(*args) for r in ("sum", "none")]

    out = gradients(np.float32(features), np.float32(kernel))  # the cotangents of the losses are infinite
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0), out)


def test_dead_places_of_a_block_do_not_meet_an_infinite_weight(elsewhere):
    """For negative features the infinite weight excludes class 0; 0 times infinity would be NaN."""
    features, kernel = -np.abs(FEATURES[:, :1]), np.array([[np.inf, 0.5, 0.3]])
    labels = 1 + LABELS % 2
    step = jax.jit(jax.value_and_grad(lambda f, k, y, w: linear_softmax_cross_entropy(f, k, y, where=w), (0, 1)))
    value, (d_features, d_kernel) = step(features, kernel, labels, MASK)
    assert np.isfinite(value)
    np.testing.assert_array_equal(d_kernel[0, 0], 0)
    assert np.isfinite(d_kernel).all()
    assert np.isfinite(np.asarray(d_features)[~MASK]).all()


@pytest.mark.parametrize("dtype", ["float16", slow("bfloat16"), slow("float32")])
def test_dtypes_elsewhere(elsewhere, dtype):
    test_dtypes(dtype)


def test_digits_elsewhere(elsewhere):
    test_keeps_its_digits_where_the_model_is_sure()
    test_float16_gradients_survive_a_scaled_loss()
    test_a_loss_that_is_selected_away_has_no_gradient()


@pytest.mark.parametrize("offset", [1e5, slow(1e7)])
def test_a_common_offset_elsewhere(elsewhere, offset):
    step = jax.jit(
        jax.value_and_grad(scalar(linear_softmax_cross_entropy, reduction="none", label_smoothing=0.1), (0, 1, 2))
    )
    args = [np.float32(a) for a in (np.round(FEATURES), np.round(KERNEL) * 2)]  # logits that are exact with the offset
    outs = [step(*args, np.full(CLASSES, x, np.float32)) for x in (0, offset)]
    assert_trees_close(*outs, rtol=1e-4, atol=2e-5)


def test_bad_rows_elsewhere(elsewhere):
    test_label_out_of_range_is_nan_in_its_own_row()
    test_what_is_selected_away_behind_the_loss_takes_no_part()


def test_a_label_at_a_forbidden_class_elsewhere(elsewhere):
    for options in ({}, {"label_smoothing": 1.0}):
        test_a_label_at_a_forbidden_class_costs_infinity(options)


def test_a_nan_stays_in_its_own_row_elsewhere(elsewhere):
    features = np.where(np.arange(TOKENS)[:, None] == 5, np.nan, FEATURES)
    loss = lambda f: linear_softmax_cross_entropy(f, KERNEL, LABELS, reduction="none")  # noqa: E731
    losses, gradient = jax.jit(lambda f: (loss(f), jax.grad(lambda f: loss(f).sum())(f)))(features)
    assert np.isnan(losses).nonzero()[0].tolist() == [5]
    assert np.isnan(gradient).all(-1).nonzero()[0].tolist() == [5]
    assert np.isnan(gradient).any(-1).nonzero()[0].tolist() == [5]


def test_one_answer_elsewhere(elsewhere):
    def losses(features, where):
        of = functools.partial(linear_softmax_cross_entropy, labels=LABELS, where=where)
        return jax.value_and_grad(lambda *args: of(*args), (0, 1))(features, np.float32(KERNEL))

    features = np.stack([FEATURES, FEATURES[::-1], np.cos(FEATURES)]).astype("float32")
    where = np.stack([MASK, ~MASK, np.zeros_like(MASK)])  # blocks differ in number
    each = [jax.jit(losses)(f, w) for f, w in zip(features, where, strict=True)]
    assert_trees_close(
        jax.jit(jax.vmap(losses))(features, where), jax.tree.map(lambda *x: np.stack(x), *each), rtol=1e-5, atol=1e-6
    )


@pytest.mark.slow
def test_one_answer_without_jit_elsewhere(elsewhere):
    test_one_answer(("eager", "jit"))


@pytest.mark.parametrize(("reduction", "outside"), [("sum", True), slow("none", True), slow("none", False)])
def test_classes_split_in_a_shard_map_elsewhere(elsewhere, reduction, outside):
    test_classes_split_in_a_shard_map(reduction, outside)


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


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("op", ["linear_softmax_cross_entropy", "linear_log_probs", "linear_kl_divergence"])
def test_strict_promotion_with_64_bit_types(op, masked):
    """In several blocks of tokens and tiles of classes."""
    tokens, width, classes = 3000, 64, 50000
    fn = getattr(masksafe.losses, op)

    def total(features, kernel, labels, where):
        last = (features, kernel) if op == "linear_kl_divergence" else (labels,)
        return jnp.sum(fn(features, kernel, *last, where=where if masked else None))

    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        shapes = ((tokens, width), "float32"), ((width, classes), "float32"), ((tokens,), "int32"), ((tokens,), "bool")
        found = jax.eval_shape(jax.value_and_grad(total), *(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    assert all(x.dtype == jnp.float32 for x in found)
