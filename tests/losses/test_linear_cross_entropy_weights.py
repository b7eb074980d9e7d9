"""Weights of tokens and of classes in the linear cross-entropy, and its components; against torch, and in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from linear_cases import (
    assert_every_other_derivative,
    assert_trees_close,
    slow,
    use_form_for_accelerators,
    use_small_class_tiles,
)

import masksafe
from masksafe.losses import linear_softmax_cross_entropy
from masksafe.testing import assert_mask_safe

TOKENS, WIDTH, CLASSES = 40, 6, 24
RNG = np.random.default_rng(0)
FEATURES, KERNEL, BIAS = (RNG.normal(size=shape) for shape in ((TOKENS, WIDTH), (WIDTH, CLASSES), (CLASSES,)))
LABELS = RNG.integers(0, CLASSES, TOKENS)
MASK = RNG.random(TOKENS) < 0.6
WEIGHTS, CLASS_WEIGHTS = RNG.uniform(0.2, 2, TOKENS), RNG.uniform(0.2, 2, CLASSES)
COTANGENTS = RNG.normal(size=TOKENS)
OPTIONS = {"logit_soft_cap": 3.0, "label_smoothing": 0.1, "z_loss": 0.01}
REDUCTIONS = "mean", "sum", "none"
singles = functools.partial(jax.tree.map, np.float32)


@pytest.fixture(autouse=True)
def small_class_blocks(choose):
    use_small_class_tiles(choose)


@pytest.fixture(params=["cpu", slow("elsewhere")])
def platform(request, choose):
    if request.param == "elsewhere":
        use_form_for_accelerators(choose)


def dense(
    features,
    kernel,
    labels,
    *,
    bias=None,
    where=None,
    reduction="mean",
    logit_soft_cap=None,
    label_smoothing=0.0,
    z_loss=0.0,
    class_weights=None,
    weights=None,
    with_components=False,
):
    """The formula of the docstring, with all logits in memory."""
    logits = jnp.matmul(features, kernel) + (0 if bias is None else bias)
    logits = logit_soft_cap * jnp.tanh(logits / logit_soft_cap) if logit_soft_cap else logits
    lse = jax.nn.logsumexp(logits, -1)
    costs = lse[:, None] - logits
    w = jnp.ones(logits.shape[-1]) if class_weights is None else jnp.asarray(class_weights)
    v = jnp.ones(labels.shape) if weights is None else jnp.asarray(weights)
    v = v if where is None else jnp.where(where, v, 0)
    of_label = w[labels] * jnp.take_along_axis(costs, labels[:, None], -1)[:, 0]
    of_all = jnp.sum(w * costs, -1) / logits.shape[-1]
    parts = v * ((1 - label_smoothing) * of_label + label_smoothing * of_all), v * z_loss * lse**2
    total = {"none": 1, "sum": 1, "mean": jnp.sum(v * w[labels])}[reduction]
    parts = tuple((x if reduction == "none" else jnp.sum(x)) / total for x in parts)
    return parts if with_components else sum(parts)


def scalar(fn, labels=LABELS, **kwargs):
    """A function of features, kernel and the weights of the tokens, with cotangents that are not all alike."""

    def total(features, kernel, weights):
        outputs = jax.tree.leaves(fn(features, kernel, labels, weights=weights, **kwargs))
        of = lambda x: jnp.asarray(COTANGENTS, x.dtype) if x.ndim else 1.7  # noqa: E731
        return sum(jnp.sum(of(x) * x) * (1 + i) for i, x in enumerate(outputs))

    return total


# Against the formula, and torch.

# reduction, class weights, mask, bias, options, with components, block size
CASES = [
    ("mean", CLASS_WEIGHTS, MASK, BIAS, OPTIONS, False, 9),
    ("none", CLASS_WEIGHTS, None, None, {"z_loss": 0.1}, True, None),
    slow("sum", None, MASK, BIAS, {}, False, None),
    slow("mean", None, None, None, {"label_smoothing": 0.3}, False, 9),
    slow("mean", CLASS_WEIGHTS, MASK, BIAS, OPTIONS, True, 9),
    slow("none", CLASS_WEIGHTS, MASK, BIAS, OPTIONS, False, 200),
    slow("sum", CLASS_WEIGHTS, MASK, None, {"label_smoothing": 1.0}, False, 9),
    slow("sum", CLASS_WEIGHTS, None, BIAS, {}, True, 9),
    slow("mean", None, MASK, None, {"z_loss": 0.1}, True, 9),
]


@pytest.mark.parametrize(
    ("reduction", "class_weights", "where", "bias", "options", "with_components", "block_size"), CASES
)
def test_value_and_gradients_are_those_of_the_formula(
    platform, reduction, class_weights, where, bias, options, with_components, block_size
):
    kwargs = {"class_weights": class_weights, "where": where, "bias": bias, "reduction": reduction, **options}
    kwargs |= {"with_components": with_components}

    @jax.jit
    def both(*args):
        ours = functools.partial(linear_softmax_cross_entropy, block_size=block_size)
        return [jax.value_and_grad(scalar(fn, **kwargs), (0, 1, 2))(*args) for fn in (ours, dense)]

    with jax.enable_x64(True):
        assert_trees_close(*both(FEATURES, KERNEL, WEIGHTS), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("platform", ["cpu", slow("elsewhere")], indirect=True)
@pytest.mark.parametrize("reduction", ["mean", slow("none"), slow("sum")])
def test_every_other_derivative(platform, reduction):
    kwargs = {"where": MASK, "reduction": reduction, "class_weights": CLASS_WEIGHTS, **OPTIONS}
    ours, plain = scalar(linear_softmax_cross_entropy, block_size=9, **kwargs), scalar(dense, **kwargs)
    assert_every_other_derivative(ours, plain, (FEATURES, KERNEL, WEIGHTS))


@pytest.mark.parametrize("platform", ["cpu", slow("elsewhere")], indirect=True)
@pytest.mark.parametrize("reduction", ["mean", slow("none")])
def test_second_derivatives_where_the_cotangents_are_zero(platform, reduction):
    """Half the squared distance from the loss at the parameters themselves: its Hessian is J^T J, not 0."""
    of = functools.partial(linear_softmax_cross_entropy, labels=LABELS[:6], where=MASK[:6], reduction=reduction)

    @jax.jit
    def all_of(*args):
        loss = lambda *args: jnp.reshape(of(args[0], KERNEL, weights=args[1]), -1)  # noqa: E731
        old, directions = loss(*args), tuple(map(jnp.cos, args))
        distance = lambda *args: jnp.sum(jnp.square(loss(*args) - old)) / 2  # noqa: E731
        _, reverse = jax.vjp(loss, *args)
        with masksafe.forward_mode():
            desired = reverse(jax.jvp(loss, args, directions)[1])
        gradient = jax.grad(distance, (0, 1))
        again = jax.grad(lambda *args: sum(map(jnp.vdot, gradient(*args), directions)), (0, 1))(*args)
        return gradient(*args), (jax.jvp(gradient, args, directions)[1], again), (desired, desired)

    with jax.enable_x64(True):
        gradients, actual, desired = all_of(FEATURES[:6], WEIGHTS[:6])
    assert_trees_close(gradients, jax.tree.map(np.zeros_like, gradients), atol=1e-12)
    assert_trees_close(actual, desired, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_is_cross_entropy_of_torch(label_smoothing):
    torch = pytest.importorskip("torch")
    labels = np.where(MASK, LABELS, -100)
    options = {"label_smoothing": label_smoothing}

    @jax.jit
    def all_of(features):
        loss = lambda features, reduction: linear_softmax_cross_entropy(  # noqa: E731
            features, KERNEL, labels, where=MASK, class_weights=CLASS_WEIGHTS, reduction=reduction, **options
        )
        values = [loss(features, reduction) for reduction in REDUCTIONS]
        return values, [jax.grad(lambda f, r=r: jnp.sum(loss(f, r)))(features) for r in REDUCTIONS]

    with jax.enable_x64(True):
        values, gradients = all_of(FEATURES)
    for reduction, value, gradient in zip(REDUCTIONS, values, gradients, strict=True):
        features = torch.tensor(FEATURES, requires_grad=True)
        desired = torch.nn.functional.cross_entropy(
            features @ torch.tensor(KERNEL),
            torch.tensor(labels),
            weight=torch.tensor(CLASS_WEIGHTS),
            ignore_index=-100,
            reduction=reduction,
            **options,
        )
        desired.sum().backward()
        np.testing.assert_allclose(value, desired.detach().numpy(), rtol=1e-11)
        np.testing.assert_allclose(gradient, features.grad.numpy(), rtol=1e-10, atol=1e-13)


# What has no weight is gone, and nothing else.


@pytest.mark.parametrize("reduction", ["mean", slow("none")])
def test_masked_tokens_are_gone_and_so_are_their_weights(platform, reduction):
    def loss(features, kernel, weights, labels, where):
        kwargs = {"class_weights": CLASS_WEIGHTS, "weights": weights, "reduction": reduction, "block_size": 8}
        return linear_softmax_cross_entropy(features, kernel, labels, where=where, **kwargs, **OPTIONS)

    args = *singles((FEATURES, KERNEL, WEIGHTS)), LABELS, MASK
    masked = {0: np.broadcast_to(~MASK[:, None], FEATURES.shape), 2: ~MASK, 3: ~MASK}
    assert_mask_safe(loss, *args, masked=masked, transforms=("jit",))


@pytest.mark.parametrize("class_weights", [None, slow(CLASS_WEIGHTS, id="class weights")])
@pytest.mark.parametrize("reduction", ["mean", slow("none")])
def test_a_weight_of_zero_is_a_mask(platform, reduction, class_weights):
    """Even with a NaN and a label out of range; its weight has a gradient of 0."""
    kwargs = {"reduction": reduction, "class_weights": class_weights, **OPTIONS}

    @jax.jit
    def step(features, weights, labels, where):
        loss = scalar(linear_softmax_cross_entropy, labels, where=where, **kwargs)
        return jax.value_and_grad(loss, (0, 1, 2))(features, np.float32(KERNEL), weights)

    features = np.where(MASK[:, None], FEATURES, np.nan).astype("float32")
    weights, labels = np.where(MASK, WEIGHTS, 0).astype("float32"), np.where(MASK, LABELS, -100)
    actual = step(features, weights, labels, np.ones(TOKENS, bool))
    assert_trees_close(actual, step(*singles((FEATURES, WEIGHTS)), LABELS, MASK), rtol=1e-5, atol=1e-6)
    assert not actual[1][0][~MASK].any()
    assert not actual[1][2][~MASK].any()
    with masksafe.label_checks("raise"):
        linear_softmax_cross_entropy(features, KERNEL, labels, weights=weights, **kwargs)


@pytest.mark.parametrize("platform", ["cpu", slow("elsewhere")], indirect=True)
def test_no_weight_at_all_is_zero(platform):
    @jax.jit
    def all_of(features, kernel, weights):
        of = functools.partial(linear_softmax_cross_entropy, labels=np.full(TOKENS, -100), z_loss=0.1)
        losses = [
            lambda *args, r=r, c=c: jnp.sum(
                jnp.stack(jax.tree.leaves(of(*args[:2], weights=args[2], reduction=r, with_components=c)))
            )
            for r, c in (("mean", False), ("none", True))
        ]
        return [jax.value_and_grad(loss, (0, 1, 2))(features, kernel, weights) for loss in losses]

    args = np.full_like(FEATURES, np.nan, "float32"), np.float32(KERNEL), np.zeros(TOKENS, "float32")
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0), all_of(*args))


@pytest.mark.parametrize("of", ["weights", "class_weights"])
def test_negative_and_nan_weights_are_nan(of):
    at = np.arange(TOKENS) == 5 if of == "weights" else np.arange(CLASSES) == LABELS[5]
    rows = at if of == "weights" else LABELS[5] == LABELS
    loss = jax.jit(
        lambda r, w: linear_softmax_cross_entropy(FEATURES, KERNEL, LABELS, reduction=r, **{of: w}), static_argnums=0
    )
    for bad in (-0.5, np.nan):
        weights = np.where(at, bad, 1.0)
        np.testing.assert_array_equal(np.isnan(loss("none", weights)), rows)
        assert np.isnan(loss("mean", weights))
    assert np.isfinite(loss("none", np.where(at, -0.0, 1))).all()


def test_an_unmasked_nan_weight_makes_the_gradient_of_its_token_nan(platform):
    def losses(features, weights):
        return linear_softmax_cross_entropy(features, KERNEL, LABELS, weights=weights, reduction="none")

    for bad in (np.nan, -1):
        weights = np.where(np.arange(TOKENS) == 5, bad, WEIGHTS).astype("float32")
        gradient = jax.jit(jax.grad(lambda *args: losses(*args).sum()))(np.float32(FEATURES), weights)
        assert np.isnan(gradient).all(-1).nonzero()[0].tolist() == [5]
        assert np.isnan(gradient).any(-1).nonzero()[0].tolist() == [5]


def test_no_alarm_of_debug_nans():
    weights = np.where(MASK, WEIGHTS, np.nan).astype("float32")
    features = np.where(MASK[:, None], FEATURES, np.nan).astype("float32")
    loss = scalar(linear_softmax_cross_entropy, np.where(MASK, LABELS, -100), where=MASK, class_weights=CLASS_WEIGHTS)
    on_device = jnp.asarray(weights)
    with jax.debug_nans(True):
        gradients = jax.grad(loss, (0, 1, 2))(features, KERNEL, weights)
        gradients += jax.grad(loss, (0, 1, 2))(features, KERNEL, on_device)
    assert all(np.isfinite(g).all() for g in gradients)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_a_class_of_weight_zero(platform, label_smoothing):
    """With a bias of -inf too: only the classes that have a weight cost anything."""
    unweighted = np.arange(CLASSES) == LABELS[0]
    class_weights = np.where(unweighted, 0, CLASS_WEIGHTS)
    bias = np.where(unweighted, -np.inf, BIAS)
    kwargs = {"class_weights": class_weights, "label_smoothing": label_smoothing, "reduction": "sum"}

    @jax.jit
    def all_of(features, kernel, weights):
        excluded = scalar(linear_softmax_cross_entropy, bias=bias, **kwargs)
        finite = scalar(linear_softmax_cross_entropy, bias=BIAS, **kwargs)
        plain = scalar(dense, bias=np.where(unweighted, -1e4, BIAS), **kwargs)
        plain_finite = scalar(dense, bias=BIAS, **kwargs)
        steps = [jax.value_and_grad(fn, (0, 1, 2)) for fn in (excluded, finite, plain, plain_finite)]
        return [step(features, kernel, weights) for step in steps]

    with jax.enable_x64(True):
        *actual, of_excluded, of_finite = all_of(FEATURES, KERNEL, WEIGHTS)
    if not label_smoothing:  # the tokens of that class take no part: their weights have gradients of 0
        assert not actual[0][1][0][LABELS[0] == LABELS].any()
    assert_trees_close(actual, [of_excluded, of_finite], rtol=1e-9, atol=1e-11)


def test_gradients_do_not_flow_to_class_weights():
    loss = lambda w: linear_softmax_cross_entropy(FEATURES, KERNEL, LABELS, class_weights=w, **OPTIONS)  # noqa: E731
    assert not jax.jit(jax.grad(loss))(CLASS_WEIGHTS).any()


@pytest.mark.parametrize("platform", ["cpu", slow("elsewhere")], indirect=True)
def test_a_label_out_of_range_is_nan_with_any_weights(platform):
    labels = np.where(np.arange(TOKENS) == 5, -100, LABELS)
    loss = functools.partial(linear_softmax_cross_entropy, class_weights=np.zeros(CLASSES), reduction="none")
    np.testing.assert_array_equal(np.isnan(loss(FEATURES, KERNEL, labels)), labels < 0)


# Components.


@pytest.mark.parametrize("platform", ["cpu", slow("elsewhere")], indirect=True)
@pytest.mark.parametrize("reduction", ["mean", slow("sum"), slow("none")])
def test_components_add_up_and_each_has_gradients(platform, reduction):
    kwargs = {"class_weights": CLASS_WEIGHTS, "where": MASK, "reduction": reduction, **OPTIONS}

    @jax.jit
    def all_of(*args):
        of = lambda fn, k: jax.value_and_grad(  # noqa: E731
            scalar(lambda *a, **kw: fn(*a, with_components=True, **kw)[k], **kwargs), (0, 1, 2)
        )(*args)
        ours = [of(linear_softmax_cross_entropy, k) for k in (0, 1)]
        whole = jax.value_and_grad(scalar(linear_softmax_cross_entropy, **kwargs), (0, 1, 2))(*args)
        return ours, [of(dense, k) for k in (0, 1)], whole

    with jax.enable_x64(True):
        ours, plain, whole = all_of(FEATURES, KERNEL, WEIGHTS)
    assert_trees_close(ours, plain, rtol=1e-10, atol=1e-12)
    assert_trees_close(jax.tree.map(jnp.add, *ours), whole, rtol=1e-10, atol=1e-12)


def test_without_a_z_loss_its_component_is_zero():
    parts = linear_softmax_cross_entropy(FEATURES, KERNEL, LABELS, with_components=True)
    np.testing.assert_allclose(parts, [linear_softmax_cross_entropy(FEATURES, KERNEL, LABELS), 0], rtol=1e-6)


def test_a_label_out_of_range_leaves_the_z_loss(platform):
    labels = np.where(np.arange(TOKENS) == 5, -100, LABELS)

    @functools.partial(jax.jit, static_argnums=2)
    def step(features, labels, reduction):
        def z_loss(features):
            options = {"z_loss": 0.1, "label_smoothing": 0.1, "with_components": True, "reduction": reduction}
            parts = linear_softmax_cross_entropy(features, KERNEL, labels, **options)
            return jnp.sum(parts[1]), parts

        return jax.value_and_grad(z_loss, has_aux=True)(features)

    for reduction in ("none", "mean"):
        (_, (cross_entropy, z_loss)), gradient = step(np.float32(FEATURES), labels, reduction)
        (_, (_, desired)), desired_gradient = step(np.float32(FEATURES), LABELS, reduction)
        assert_trees_close((z_loss, gradient), (desired, desired_gradient), rtol=2e-5, atol=1e-6)
        np.testing.assert_array_equal(np.isnan(cross_entropy), labels < 0 if reduction == "none" else True)


def test_label_checks_leave_the_z_loss():
    labels = np.where(np.arange(TOKENS) == 5, -100, LABELS)
    of = functools.partial(linear_softmax_cross_entropy, FEATURES, KERNEL, labels, z_loss=0.1, with_components=True)
    with masksafe.label_checks("raise"), pytest.raises(ValueError, match="1 of 40 labels"):
        of()
    with masksafe.label_checks("checkify"):
        error, parts = jax.experimental.checkify.checkify(of)()
    assert "1 of 40 labels" in error.get()
    assert np.isnan(parts).tolist() == [True, False]


# Numbers.


@pytest.mark.parametrize("size", [1e4, slow(1e-6)])
def test_float16_gradients_with_large_and_small_weights(platform, size):
    args = [jnp.asarray(a, "float16") for a in (FEATURES, KERNEL)]

    @jax.jit
    def gradients(features, kernel, weights):
        def loss(features, kernel, reduction):
            losses = linear_softmax_cross_entropy(features, kernel, LABELS, weights=weights, reduction=reduction)
            return jnp.sum(losses) * (1 if reduction == "mean" else 1 / (TOKENS * size))

        return [jax.grad(loss, (0, 1))(features, kernel, r) for r in REDUCTIONS]

    desired = gradients(*(a.astype("float32") for a in args), size * np.float32(WEIGHTS))
    actual = gradients(*args, size * np.float32(WEIGHTS))
    for a, d in zip(actual, desired, strict=True):
        assert_trees_close(a, d, rtol=1e-2, atol=2e-5)


@pytest.mark.parametrize("dtype", ["float16", "int32", "bool"])
def test_dtypes_of_weights(dtype):
    weights = np.abs(np.round(WEIGHTS)).astype(dtype)
    loss = functools.partial(linear_softmax_cross_entropy, *singles((FEATURES, KERNEL)), LABELS)
    assert loss(weights=weights).dtype == "float32"
    np.testing.assert_allclose(loss(weights=weights), loss(weights=np.float32(weights)), rtol=1e-6)


def test_weights_that_broadcast():
    features, labels = FEATURES.reshape(4, 10, WIDTH), LABELS.reshape(4, 10)
    loss = functools.partial(linear_softmax_cross_entropy, features, KERNEL, labels)
    for weights in (WEIGHTS[:10], WEIGHTS[:4, None], 3.0):
        actual, desired = (loss(weights=w) for w in (weights, np.broadcast_to(weights, labels.shape)))
        np.testing.assert_allclose(actual, desired, rtol=1e-6)
        gradient = jax.grad(lambda w: loss(weights=w, reduction="sum"))(jnp.asarray(weights))
        assert gradient.shape == np.shape(weights)
    np.testing.assert_allclose(loss(weights=3.0), loss(), rtol=1e-6)


def test_weights_too_small_for_the_dtype_of_the_loss_are_zero():
    with jax.enable_x64(True):
        loss = linear_softmax_cross_entropy(*singles((FEATURES, KERNEL)), LABELS, weights=np.full(TOKENS, 1e-60))
    assert loss == 0


@pytest.mark.parametrize("platform", ["cpu", slow("elsewhere")], indirect=True)
@pytest.mark.parametrize("dtype", ["bfloat16", slow("float32")])
def test_strict_promotion(platform, dtype):
    args = [jnp.asarray(a, d) for a, d in ((FEATURES, dtype), (KERNEL, dtype), (WEIGHTS, "bfloat16"))]
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        for reduction, with_components in (("mean", False), ("none", True)):

            def total(features, kernel, weights, reduction=reduction, with_components=with_components):
                kwargs = {"class_weights": jnp.asarray(CLASS_WEIGHTS, "float16"), "weights": weights, "where": MASK}
                kwargs |= {"reduction": reduction, "with_components": with_components, **OPTIONS}
                return sum(
                    map(jnp.sum, jax.tree.leaves(linear_softmax_cross_entropy(features, kernel, LABELS, **kwargs)))
                )

            gradients = jax.eval_shape(jax.grad(total, (0, 1, 2)), *args)
            assert [g.dtype for g in gradients] == [dtype, dtype, "bfloat16"]


# Parts of a batch, and devices.


def test_a_masked_mean_of_parts_is_the_weighted_mean():
    """What is counted are the weights of the tokens times those of their labels' classes."""

    def mean_of(kernel, features, labels, weights):
        mask = labels != -100
        options = {"where": mask, "weights": weights, "class_weights": CLASS_WEIGHTS, **OPTIONS}
        total = linear_softmax_cross_entropy(features, kernel, labels, reduction="sum", **options)
        return masksafe.MaskedMean(total, masksafe.sum(weights * jnp.asarray(CLASS_WEIGHTS)[labels], where=mask))

    def mean(kernel, features, labels, weights):
        options = {"where": labels != -100, "weights": weights, "class_weights": CLASS_WEIGHTS, **OPTIONS}
        return linear_softmax_cross_entropy(features, kernel, labels, **options)

    labels = np.where(MASK & (np.arange(TOKENS) >= 10), LABELS, -100)  # nothing is left in the first part
    args = *singles((KERNEL, FEATURES)), labels, np.float32(WEIGHTS)
    actual = jax.jit(masksafe.value_and_grad_of_mean(mean_of, microbatches=4))(*args)
    assert_trees_close(actual, jax.jit(jax.value_and_grad(mean))(*args), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("with_components", [False, slow(True)])
def test_classes_split_in_a_shard_map(platform, with_components):
    kwargs = {"reduction": "sum", "with_components": with_components, **OPTIONS}

    def local(features, kernel, class_weights, labels, where, weights):
        options = {"class_weights": class_weights, "weights": weights, "where": where, "axis_name": "classes"}
        losses = linear_softmax_cross_entropy(features, kernel, labels, **options, **kwargs)
        return jax.lax.psum(sum(jax.tree.leaves(losses)), "tokens")

    mesh = jax.make_mesh((2, 4), ("tokens", "classes"), axis_types=(AxisType.Auto,) * 2)
    specs = P("tokens"), P(None, "classes"), P("classes"), P("tokens"), P("tokens"), P("tokens")
    split = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())
    floats = singles((FEATURES, KERNEL, CLASS_WEIGHTS))
    args = *map(jnp.asarray, floats), jnp.asarray(LABELS), jnp.asarray(MASK), jnp.asarray(WEIGHTS, "float32")

    def plain(features, kernel, class_weights, labels, where, weights):
        kwargs = {"class_weights": class_weights, "weights": weights, "where": where, "reduction": "sum", **OPTIONS}
        return dense(features, kernel, labels, **kwargs)

    numbers = 0, 1, 5
    actual, desired = (jax.jit(jax.value_and_grad(fn, numbers))(*args) for fn in (split, plain))
    assert_trees_close(actual, desired, rtol=1e-4, atol=1e-5)


SPLITS = {
    "tokens": (P("x"), P(), P(), P("x"), P("x"), P("x")),
    "classes": (P(), P(None, "y"), P("y"), P(), P(), P()),
    "tokens and classes": (P("x"), P(None, "y"), P("y"), P("x"), P("x"), P("x")),
    "weights alone": (P(), P(), P(), P(), P(), P("x")),
    "class weights alone": (P(), P(), P("x"), P(), P(), P()),
}


@pytest.mark.parametrize("dtype", ["float32", slow("float16")])
@pytest.mark.parametrize(
    ("reduction", "with_components"), [("mean", False), slow("none", True), slow("mean", True), slow("sum", False)]
)
@pytest.mark.parametrize("split", [s if s == "tokens and classes" else slow(s) for s in SPLITS])
def test_arrays_split_over_an_explicit_mesh(split, reduction, with_components, dtype):
    @jax.jit
    def step(features, kernel, class_weights, labels, where, weights):
        def total(features, kernel, weights):
            options = {"class_weights": class_weights, "weights": weights, "where": where, "block_size": 3}
            options |= {"reduction": reduction, "with_components": with_components, **OPTIONS}
            losses = linear_softmax_cross_entropy(features, kernel, labels, **options)
            return sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(losses))

        return jax.value_and_grad(total, (0, 1, 2))(features, kernel, weights)

    args = *(a.astype(dtype) for a in (FEATURES, KERNEL)), np.float32(CLASS_WEIGHTS), LABELS, MASK, np.float32(WEIGHTS)
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        arrays = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(args, SPLITS[split], strict=True)]
        value, gradients = step(*arrays)
    tolerances = {"rtol": 2e-5, "atol": 2e-6} if dtype == "float32" else {"rtol": 1e-2, "atol": 5e-2}
    assert_trees_close((value, gradients), step(*args), **tolerances)
    for gradient, array in zip(gradients, (arrays[0], arrays[1], arrays[5]), strict=True):
        assert gradient.sharding.is_equivalent_to(array.sharding, array.ndim)


# Bad input.


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"weights": np.ones(3)}, ValueError, r"weights: got shape \(3,\)"),
        ({"weights": np.ones((2, TOKENS))}, ValueError, r"weights: got shape \(2, 40\)"),
        ({"weights": np.ones(TOKENS, complex)}, TypeError, "weights: got dtype complex64"),
        ({"weights": "1"}, TypeError, "weights: got type str"),
        ({"class_weights": np.ones(3)}, ValueError, r"class_weights: got shape \(3,\)"),
        ({"class_weights": np.ones(CLASSES, int)}, TypeError, "class_weights: got dtype int32"),
        ({"class_weights": 1.0}, ValueError, r"class_weights: got shape \(\)"),
    ],
)
def test_bad_input_is_refused(changed, error, text):
    with pytest.raises(error, match=f"linear_softmax_cross_entropy: {text}"):
        linear_softmax_cross_entropy(FEATURES, KERNEL, LABELS, **changed)
