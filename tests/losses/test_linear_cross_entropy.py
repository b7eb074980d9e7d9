"""The cross-entropy of a linear layer, against the unfused formula in float64."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import AxisType, PartitionSpec
from linear_cases import (
    BIAS,
    CLASSES,
    FEATURES,
    KERNEL,
    LABELS,
    MASK,
    RNG,
    TOKENS,
    WIDTH,
    assert_every_derivative,
    assert_memory_is_that_of_a_block,
    assert_same_function,
    assert_trees_close,
    bad_rows,
    forms,
    singles,
    use_platform,
)
from tiers import pairs

import masksafe
from masksafe._core import platforms
from masksafe.losses import linear_softmax_cross_entropy
from masksafe.losses._rows._options import sizes_in_tiles
from masksafe.losses._rows._tokens import Packed

COTANGENTS = RNG.normal(size=TOKENS)
REDUCTIONS = "mean", "sum", "none"
OPTIONS = {"logit_soft_cap": 3.0, "label_smoothing": 0.1, "z_loss": 0.01}
pytestmark = pytest.mark.usefixtures("small_tiles")


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
        of_rows = jnp.asarray(COTANGENTS[: out.size], out.dtype)
        return jnp.sum(out * of_rows.reshape(out.shape)) if out.ndim else 1.7 * out

    return loss


# Values and derivatives. The rows of the contract's table have the other default forms.

OF_EACH = ["elsewhere", "cpu"], REDUCTIONS, [None, MASK], [False, True], [{}, OPTIONS], [None, 9, 200]
NAMES = "platform", "reduction", "where", "with_bias", "options", "block_size"


@pytest.mark.forms
@pytest.mark.parametrize(NAMES, pairs(*OF_EACH), indirect=["platform"])
def test_value_and_gradients_are_those_of_the_unfused_formula(
    platform, reduction, where, with_bias, options, block_size
):
    fused = functools.partial(linear_softmax_cross_entropy, block_size=block_size)
    losses = [scalar(fn, where=where, reduction=reduction, **options) for fn in (fused, unfused)]
    assert_same_function(*losses, (FEATURES, KERNEL, BIAS) if with_bias else (FEATURES, KERNEL))


@pytest.mark.forms
@pytest.mark.parametrize("option", OPTIONS)
def test_each_option_alone(option):
    losses = [scalar(fn, where=MASK, **{option: OPTIONS[option]}) for fn in (linear_softmax_cross_entropy, unfused)]
    assert_same_function(*losses, (FEATURES, KERNEL, BIAS))


@pytest.mark.parametrize("classes", [23, forms(1)])
def test_a_last_tile_that_is_smaller(choose, classes):
    use_platform(choose, "elsewhere")
    labels = LABELS % classes
    losses = [scalar(fn, where=MASK, reduction="sum") for fn in (linear_softmax_cross_entropy, unfused)]
    losses = [functools.partial(loss, labels=labels) for loss in losses]
    assert_same_function(*losses, (FEATURES, KERNEL[:, :classes], BIAS[:classes]))


@pytest.mark.forms
def test_every_derivative():
    kwargs = {"where": MASK, "reduction": "sum", **OPTIONS}
    fused = scalar(linear_softmax_cross_entropy, block_size=9, **kwargs)
    assert_every_derivative(fused, scalar(unfused, **kwargs), (FEATURES, KERNEL, BIAS))


# Digits and dtypes.


def test_scaled_losses_of_float16(platform):
    features, kernel, scale = np.array([[12.0, 0.0]], "float16"), np.eye(2, dtype="float16"), 4096

    def scaled(features, reduction):
        total = linear_softmax_cross_entropy(features, kernel, np.array([0]), reduction=reduction)
        return jnp.sum(scale * total.astype("float32"))

    probability = scale / (1 + np.exp(12.0))
    for gradient in jax.jit(lambda x: [jax.grad(scaled)(x, r) for r in REDUCTIONS])(features):
        np.testing.assert_allclose(np.float64(gradient)[0], [-probability, probability], rtol=2e-2)


@pytest.mark.forms
def test_a_common_offset_of_the_logits_costs_no_digits(platform):
    kwargs = {"reduction": "none", "label_smoothing": 0.1}
    step = lambda fn: jax.jit(jax.value_and_grad(scalar(fn, **kwargs), (0, 1, 2)))  # noqa: E731
    actual, exact = step(linear_softmax_cross_entropy), step(unfused)
    for kernel in (np.zeros_like(KERNEL), np.round(KERNEL) * 2):  # logits that are exact with the offset
        with jax.enable_x64(True):
            desired = exact(np.round(FEATURES), kernel, np.zeros(CLASSES))
        for offset in (1e3, 1e5, 1e7):
            out = actual(*singles((np.round(FEATURES), kernel, np.full(CLASSES, offset))))
            assert_trees_close(out, desired, rtol=1e-4, atol=2e-5)


MIXED = "bfloat16", "float32", "float32"


@pytest.mark.parametrize("dtypes", [("bfloat16",) * 3, *map(forms, [MIXED, ("float16",) * 3, ("float32",) * 3])])
def test_gradients_have_the_digits_of_their_dtypes(platform, dtypes):
    args = tuple(a.astype(d) for a, d in zip((FEATURES, KERNEL, BIAS), dtypes, strict=True))
    step = lambda fn: jax.jit(jax.value_and_grad(scalar(fn, where=MASK), (0, 1, 2)))  # noqa: E731
    value, gradients = step(linear_softmax_cross_entropy)(*args)
    assert [x.dtype for x in (value, *gradients)] == ["float32", *dtypes]
    with jax.enable_x64(True):
        desired = step(unfused)(*(a.astype("float64") for a in args))
    eps = float(jnp.finfo(dtypes[0]).eps)
    np.testing.assert_allclose(value, desired[0], rtol=1e-5)  # in bfloat16 it would keep two digits
    assert_trees_close(gradients, desired[1], rtol=4 * eps, atol=eps)


OF_FEATURES_AND_KERNEL = itertools.product(["bfloat16", "float32", "float64"], repeat=2)
OF_PAIRS = [(f, k, "float64" if i % 2 else None) for i, (f, k) in enumerate(OF_FEATURES_AND_KERNEL)]


@pytest.mark.forms
@pytest.mark.parametrize(("features", "kernel", "bias"), [("bfloat16", "float64", "float32"), *OF_PAIRS])
def test_mixed_dtypes_have_second_derivatives(features, kernel, bias):
    """With 64-bit types, an argument may be wider than the sums or narrower."""
    with jax.enable_x64(True):
        args = tuple(jax.ShapeDtypeStruct(a.shape, d) for a, d in ((FEATURES, features), (KERNEL, kernel)))
        args += () if bias is None else (jax.ShapeDtypeStruct(BIAS.shape, bias),)
        loss = scalar(linear_softmax_cross_entropy, reduction="none")
        numbers = tuple(range(len(args)))
        for second in (jax.hessian, lambda f, n: jax.jacrev(jax.grad(f, n), n)):
            of_each = jax.eval_shape(second(loss, numbers), *args)
            assert [row[i].dtype for i, row in enumerate(of_each)] == [a.dtype for a in args]


def test_gradient_of_the_kernel_is_accumulated_in_float32():
    """4000 tokens that each add less than a rounding of the sum in bfloat16."""
    features, labels = jnp.ones((4000, 1), "bfloat16"), jnp.zeros(4000, int)
    loss = lambda kernel: linear_softmax_cross_entropy(features, kernel, labels, reduction="sum")  # noqa: E731
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(jnp.zeros((1, 2), "bfloat16")), [[-2000, 2000]])


def test_labels_of_a_narrow_dtype_and_many_classes():
    losses = jax.jit(lambda x, k, *labels: [linear_softmax_cross_entropy(x, k, y, reduction="none") for y in labels])
    labels = [np.array([0, 1, 127], d) for d in ("int8", "uint8", "int16", "uint32")]
    np.testing.assert_allclose(losses(jnp.zeros((3, 1)), jnp.zeros((1, 1000)), *labels), np.log(1000), rtol=1e-6)


@pytest.mark.forms
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("op", ["linear_softmax_cross_entropy", "linear_log_probs", "linear_kl_divergence"])
def test_strict_promotion_with_64_bit_types(op, masked):
    """In several blocks of tokens and tiles of classes."""
    fn = getattr(masksafe.losses, op)

    def total(features, kernel, labels, where):
        last = (features, kernel) if op == "linear_kl_divergence" else (labels,)
        return jnp.sum(fn(features, kernel, *last, where=where if masked else None))

    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        shapes = ((3000, 64), "float32"), ((64, 50000), "float32"), ((3000,), "int32"), ((3000,), "bool")
        found = jax.eval_shape(jax.value_and_grad(total), *(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    assert all(x.dtype == jnp.float32 for x in found)


# What is masked or replaced is gone; what is bad stays in its own row.


@pytest.mark.parametrize("platform", [forms("cpu"), "elsewhere"], indirect=True)
def test_nothing_unmasked_is_zero_whatever_the_cotangent(platform):
    """The square root of a loss of 0 has one that is infinite."""

    @jax.jit
    def all_of(features, kernel, bias, where):
        of = functools.partial(linear_softmax_cross_entropy, labels=LABELS[: len(features)], where=where)
        loss = lambda r, f, k, b: jnp.sum(jnp.sqrt(of(f, k, bias=b, reduction=r)))  # noqa: E731
        step = lambda r: jax.value_and_grad(functools.partial(loss, r), (0, 1, 2))(features, kernel, bias)  # noqa: E731
        return [step(reduction) for reduction in ("mean", "none")]

    bad = [np.full_like(a, np.nan, "float32") for a in (FEATURES, KERNEL, BIAS)]
    nothing = np.zeros(TOKENS, bool)
    for hidden in ({0, 1, 2}, {0}, {1}, {2}):
        args = [bad[i] if i in hidden else a for i, a in enumerate(singles((FEATURES, KERNEL, BIAS)))]
        jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0), all_of(*args, nothing))
    (_, (d_features, _, _)), *_ = all_of(*singles((FEATURES, KERNEL, BIAS)), MASK)
    assert np.isfinite(d_features).all()
    assert not d_features[~MASK].any()


def test_no_tokens_are_zero():
    of = lambda x, k, r: jnp.sum(linear_softmax_cross_entropy(x, k, np.zeros(0, int), reduction=r))  # noqa: E731
    out = jax.jit(lambda *args: [jax.value_and_grad(of, 1)(*args, r) for r in REDUCTIONS])(
        jnp.zeros((0, WIDTH)), KERNEL
    )
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0), out)


@pytest.mark.forms
@pytest.mark.parametrize("hidden", ["kernel", "bias"])
def test_nothing_unmasked_has_gradients_of_zero_in_forward_mode_too(hidden):
    args = {"kernel": KERNEL, "bias": BIAS}
    args[hidden] = args[hidden] * np.nan
    loss = lambda args: linear_softmax_cross_entropy(  # noqa: E731
        FEATURES, labels=LABELS, where=np.zeros(TOKENS, bool), **args
    )
    with masksafe.forward_mode():
        jax.tree.map(lambda g: np.testing.assert_array_equal(g, 0), jax.jit(jax.grad(loss))(args))


def test_what_is_bad_stays_in_its_row_and_is_gone_if_it_is_replaced(platform):
    """A label out of range and a NaN, in the mean, and where `jnp.where` behind the loss leaves their rows out."""
    bad = np.isin(np.arange(TOKENS), [3, 5])

    @jax.jit
    def all_of(features, labels):
        of = functools.partial(linear_softmax_cross_entropy, labels=labels)
        kept = lambda f, k: jnp.sum(jnp.where(bad, 0, of(f, k, reduction="none")))  # noqa: E731
        gone = lambda f, k, r: jnp.sum(jnp.where(False, of(f, k, reduction=r), 0))  # noqa: E731
        args = features, np.float32(KERNEL)
        return (
            of(*args, reduction="none"),
            jax.value_and_grad(of)(*args),
            jax.grad(kept, (0, 1))(*args),
            [jax.grad(gone, (0, 1))(*args, r) for r in ("mean", "none")],
        )

    features = np.where(np.arange(TOKENS)[:, None] == 3, np.nan, FEATURES).astype("float32")
    for label in (-1, CLASSES, -100, 2**31 - 1):
        labels = np.where(np.arange(TOKENS) == 5, label, LABELS)
        losses, (mean, gradient), kept, gone = all_of(features, labels)
        assert np.isnan(mean)
        assert bad_rows(losses) == bad_rows(gradient) == [3, 5]
        assert np.isnan(gradient[bad]).all()
        assert all(np.isfinite(g).all() for g in kept)
        assert not kept[0][bad].any()
        jax.tree.map(lambda g: np.testing.assert_array_equal(g, 0), gone)


@pytest.mark.parametrize("form", ["forward mode", forms("reverse")])
def test_a_bad_label_makes_the_gradient_of_its_token_nan(form):
    labels = np.where(np.arange(TOKENS) == 3, -1, LABELS)
    loss = lambda f: jnp.sum(linear_softmax_cross_entropy(f, KERNEL, labels, reduction="none"))  # noqa: E731
    with masksafe.forward_mode() if form == "forward mode" else masksafe.label_checks("off"):
        gradient = jax.jit(jax.grad(loss))(np.float32(FEATURES))
    assert bad_rows(gradient) == [3]
    assert np.isnan(gradient[3]).all()


def test_a_label_at_a_forbidden_class_costs_infinity(platform):
    bias = np.where(np.arange(CLASSES) == LABELS[0], -np.inf, BIAS)
    of = functools.partial(linear_softmax_cross_entropy, bias=bias, reduction="none")
    smoothings = 0.0, 0.1
    plain, *smoothed = jax.jit(lambda x: [of(x, KERNEL, LABELS, label_smoothing=s) for s in smoothings])(FEATURES)
    np.testing.assert_array_equal(plain == jnp.inf, LABELS[0] == LABELS)
    assert np.isfinite(plain[LABELS[0] != LABELS]).all()
    assert all(losses[0] == jnp.inf for losses in smoothed)


@pytest.mark.forms
def test_checkify_tells_of_bad_labels_in_the_mean():
    labels = LABELS.copy()
    labels[5:7] = CLASSES, -1
    step = jax.value_and_grad(lambda k: linear_softmax_cross_entropy(FEATURES, k, labels))
    with masksafe.label_checks("checkify"):
        error, (value, gradient) = jax.jit(checkify.checkify(step))(KERNEL)
    assert "2 of 40 labels are outside [0, 24); first at (5,)" in error.get()
    assert np.isnan(value)
    assert np.isnan(gradient).any()


# One answer everywhere.


@pytest.mark.parametrize("platform", [forms("cpu"), "elsewhere"], indirect=True)
def test_a_vmap_over_samples_of_unlike_numbers_of_blocks(platform):
    def step(features, where):
        of = functools.partial(linear_softmax_cross_entropy, labels=LABELS, where=where)
        return jax.value_and_grad(of, (0, 1))(features, np.float32(KERNEL))

    features = np.stack([FEATURES, FEATURES[::-1], np.cos(FEATURES)]).astype("float32")
    where, one = np.stack([MASK, ~MASK, np.zeros_like(MASK)]), jax.jit(step)
    each = [one(f, w) for f, w in zip(features, where, strict=True)]
    many = jax.jit(jax.vmap(step))(features, where)
    assert_trees_close(many, jax.tree.map(lambda *x: np.stack(x), *each), rtol=1e-5, atol=1e-6)


@pytest.mark.forms
@pytest.mark.parametrize(
    ("reduction", "outside"),
    [*itertools.product(["none", "sum"], [True, False])],
)
def test_classes_split_in_a_shard_map(platform, reduction, outside):
    def local(features, kernel, bias, labels, where):
        kwargs = {"where": where, "reduction": reduction, "axis_name": "classes", "block_size": 4, **OPTIONS}
        losses = linear_softmax_cross_entropy(features, kernel, labels, bias=bias, **kwargs)
        return jax.lax.psum(jnp.sum(losses), "tokens")

    mesh = jax.make_mesh((2, 4), ("tokens", "classes"), axis_types=(AxisType.Auto,) * 2)
    by_token, by_class, whole = PartitionSpec("tokens"), PartitionSpec("classes"), PartitionSpec()
    specs = (by_token, PartitionSpec(None, "classes"), by_class, by_token, by_token)
    if outside:
        step = jax.value_and_grad(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=whole), (0, 1, 2))
    else:
        step = jax.value_and_grad(local, (0, 1, 2))
        step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(whole, specs[:3]))
    args = tuple(map(jnp.asarray, (FEATURES, KERNEL, BIAS)))
    plain = lambda *args: unfused(*args[:2], LABELS, bias=args[2], where=MASK, reduction="sum", **OPTIONS)  # noqa: E731
    both = jax.jit(lambda *args: (step(*args), jax.value_and_grad(plain, (0, 1, 2))(*args[:3])))
    assert_trees_close(*both(*args, jnp.asarray(LABELS), jnp.asarray(MASK)), rtol=1e-4, atol=1e-5)


@pytest.mark.forms
@pytest.mark.parametrize(("reduction", "check_vma"), [("mean", False), ("none", True), ("sum", True)])
def test_other_derivatives_with_split_classes(reduction, check_vma):
    """With check_vma=False JAX takes the loss on each device for a term of a sum over the devices."""
    mesh, by_class = jax.make_mesh((4,), ("classes",), axis_types=(AxisType.Auto,)), PartitionSpec(None, "classes")
    kwargs = {"where": MASK, "reduction": reduction, "axis_name": "classes", "block_size": 9, **OPTIONS}
    local = lambda kernel: jnp.sum(linear_softmax_cross_entropy(FEATURES, kernel, LABELS, **kwargs))  # noqa: E731
    split = jax.shard_map(local, mesh=mesh, in_specs=by_class, out_specs=PartitionSpec(), check_vma=check_vma)
    plain = lambda kernel: jnp.sum(unfused(FEATURES, kernel, LABELS, where=MASK, reduction=reduction, **OPTIONS))  # noqa: E731

    def derivatives(fn, kernel):
        along, gradient = jnp.cos(kernel), jax.grad(fn)
        with masksafe.forward_mode():
            slope = jax.jvp(fn, (kernel,), (along,))[1]
        return jax.jvp(gradient, (kernel,), (along,))[1], slope

    both = jax.jit(lambda kernel: [derivatives(fn, kernel) for fn in (split, plain)])
    assert_trees_close(*both(np.float32(KERNEL)), rtol=1e-3, atol=1e-5)


# Sizes.


def test_memory_is_that_of_a_block_of_tokens():
    shapes = ((4096, 64), jnp.float32), ((64, 32768), jnp.float32), ((4096,), jnp.int32), ((4096,), jnp.bool_)
    with platforms.chosen(linear={"class_tile_elements": 2**20}):
        assert_memory_is_that_of_a_block(lambda f, k, y, m: linear_softmax_cross_entropy(f, k, y, where=m), *shapes)


def test_sizes_elsewhere(choose):
    """Blocks and tiles that divide tokens and classes, and others."""
    of = functools.partial(sizes_in_tiles, block_size=None)
    assert [of(4096, 1024, 32768, masked=masked) for masked in (False, True)] == [(4096, 8192), (2048, 32768)]
    assert [of(16384, 4096, 2**17, masked=masked) for masked in (False, True)] == [(16384, 8192), (8192, 32768)]
    assert of(4096, 1024, 50257, masked=False) == (4096, 7296)
    assert of(300, 64, 1000, masked=True) == (300, 1000)
    use_platform(choose, "elsewhere")
    of = functools.partial(sizes_in_tiles, TOKENS, WIDTH)
    sizes = [of(24, block, masked) for block in (None, 9) for masked in (False, True)]
    assert sizes == [(14, 6), (10, 12), (9, 8), (9, 12)]
    assert [of(23, block, masked=True) for block in (None, 200)] == [(10, 12), (40, 5)]


def test_no_block_is_nearly_empty():
    """One token more than two blocks hold makes three that are even: a block costs the same however few it holds."""
    tokens, size = 1031, 515  # a prime number
    live = jnp.ones(tokens, bool)
    for packed in (
        Packed.of(tokens, None, size),
        Packed.of(tokens, live, size),
        Packed.in_place(live, size),
    ):
        assert tokens <= packed.length < tokens + 3
        assert packed.size <= size
    assert Packed.of(1030, None, size).order is None  # two blocks, with no token moved
