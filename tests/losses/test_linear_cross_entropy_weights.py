"""Weights of tokens and of classes in the linear cross-entropy, and its components; against torch, and in float64."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
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
    assert_hessian_where_cotangents_are_zero,
    assert_same_function,
    assert_trees_close,
    bad_rows,
    forms,
    in_turn,
    singles,
)

import masksafe
from masksafe.losses import linear_softmax_cross_entropy

WEIGHTS, CLASS_WEIGHTS = RNG.uniform(0.2, 2, TOKENS), RNG.uniform(0.2, 2, CLASSES)
COTANGENTS = RNG.normal(size=TOKENS)
OPTIONS = {"logit_soft_cap": 3.0, "label_smoothing": 0.1, "z_loss": 0.01}
REDUCTIONS = "mean", "sum", "none"
BAD = np.arange(TOKENS) == 5
pytestmark = pytest.mark.usefixtures("small_tiles")


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

CASES = [  # reduction, class weights, mask, bias, options, with components, block size
    ("mean", CLASS_WEIGHTS, MASK, BIAS, OPTIONS, False, 9),
    ("none", CLASS_WEIGHTS, None, None, {"z_loss": 0.1}, True, None),
    ("mean", CLASS_WEIGHTS, MASK, BIAS, OPTIONS, True, 9),
    ("sum", None, MASK, BIAS, {}, False, None),
    ("mean", None, None, None, {"label_smoothing": 0.3}, False, 9),
    ("none", CLASS_WEIGHTS, MASK, BIAS, OPTIONS, False, 200),
    ("sum", CLASS_WEIGHTS, MASK, None, {"label_smoothing": 1.0}, False, 9),
    ("sum", CLASS_WEIGHTS, None, BIAS, {}, True, 9),
    ("mean", None, MASK, None, {"z_loss": 0.1}, True, 9),
]
NAMES = "reduction", "class_weights", "where", "bias", "options", "with_components", "block_size"


@in_turn(NAMES, [("cpu", *CASES[0])], CASES)
def test_value_and_gradients_are_those_of_the_formula(
    platform, reduction, class_weights, where, bias, options, with_components, block_size
):
    kwargs = {"class_weights": class_weights, "where": where, "bias": bias, "reduction": reduction, **options}
    kwargs |= {"with_components": with_components}
    ours = functools.partial(linear_softmax_cross_entropy, block_size=block_size)
    assert_same_function(*(scalar(fn, **kwargs) for fn in (ours, dense)), (FEATURES, KERNEL, WEIGHTS))


@in_turn(("reduction",), [], [("mean",), ("sum",), ("none",)])
def test_every_derivative(platform, reduction):
    kwargs = {"where": MASK, "reduction": reduction, "class_weights": CLASS_WEIGHTS, **OPTIONS}
    ours, plain = scalar(linear_softmax_cross_entropy, block_size=9, **kwargs), scalar(dense, **kwargs)
    assert_every_derivative(ours, plain, (FEATURES, KERNEL, WEIGHTS))


@pytest.mark.forms
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_derivatives_where_the_cotangents_are_zero(reduction):
    of = functools.partial(linear_softmax_cross_entropy, labels=LABELS[:6], where=MASK[:6], reduction=reduction)
    outputs = lambda *args: jnp.reshape(of(args[0], KERNEL, weights=args[1]), -1)  # noqa: E731
    assert_hessian_where_cotangents_are_zero(outputs, (FEATURES[:6], WEIGHTS[:6]))


@pytest.mark.parametrize("label_smoothing", [0.2, forms(0.0)])
def test_is_cross_entropy_of_torch(label_smoothing):
    torch = pytest.importorskip("torch")
    labels = np.where(MASK, LABELS, -100)
    options = {"label_smoothing": label_smoothing}

    @jax.jit
    def all_of(features):
        of = functools.partial(linear_softmax_cross_entropy, where=MASK, class_weights=CLASS_WEIGHTS, **options)
        values = [of(features, KERNEL, labels, reduction=reduction) for reduction in REDUCTIONS]
        total = lambda features, r: jnp.sum(of(features, KERNEL, labels, reduction=r))  # noqa: E731
        return values, [jax.grad(total)(features, r) for r in REDUCTIONS]

    with jax.enable_x64(True):
        values, gradients = all_of(FEATURES)
    for reduction, value, gradient in zip(REDUCTIONS, values, gradients, strict=True):
        features, weight = torch.tensor(FEATURES, requires_grad=True), torch.tensor(CLASS_WEIGHTS)
        of = functools.partial(torch.nn.functional.cross_entropy, weight=weight, ignore_index=-100, **options)
        desired = of(features @ torch.tensor(KERNEL), torch.tensor(labels), reduction=reduction)
        desired.sum().backward()
        np.testing.assert_allclose(value, desired.detach().numpy(), rtol=1e-11)
        np.testing.assert_allclose(gradient, features.grad.numpy(), rtol=1e-10, atol=1e-13)


# What has no weight is gone, and nothing else.


@pytest.mark.parametrize(
    ("reduction", "class_weights"),
    [("mean", CLASS_WEIGHTS), *itertools.starmap(forms, [("mean", None), ("none", None)])],
)
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
    nothing = step(features * np.nan, np.zeros_like(weights), labels, np.ones(TOKENS, bool))
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0), nothing)
    with masksafe.label_checks("raise"):
        jax.eval_shape(lambda: linear_softmax_cross_entropy(features, KERNEL, labels, weights=weights, **kwargs))


def test_negative_and_nan_weights_are_nan(platform):
    of_class = np.arange(CLASSES) == LABELS[5]

    @jax.jit
    def all_of(features, weights, class_weights):
        of = functools.partial(linear_softmax_cross_entropy, kernel=KERNEL, labels=LABELS)
        gradient = jax.grad(lambda f: of(f, weights=weights, reduction="none").sum())(features)
        each = {"weights": weights}, {"class_weights": class_weights}
        return gradient, [[of(features, reduction=r, **w) for r in ("none", "mean")] for w in each]

    for bad in (-0.5, np.nan):
        given = np.where(BAD, bad, WEIGHTS).astype("float32"), np.where(of_class, bad, 1.0).astype("float32")
        gradient, of_each = all_of(np.float32(FEATURES), *given)
        assert bad_rows(gradient) == [5]
        assert np.isnan(gradient[5]).all()
        for (losses, mean), rows in zip(of_each, (BAD, LABELS[5] == LABELS), strict=True):
            np.testing.assert_array_equal(np.isnan(losses), rows)
            assert np.isnan(mean)
    negative_zero = np.where(BAD, -0.0, 1).astype("float32"), np.where(of_class, -0.0, 1).astype("float32")
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(all_of(np.float32(FEATURES), *negative_zero)))


# (With smoothing a bias of -inf is another loss: a masked class is none of those that the smoothing counts.)
@pytest.mark.parametrize(("excluded", "label_smoothing"), [(True, 0.0), forms(False, 0.2)])
def test_a_class_of_weight_zero(platform, excluded, label_smoothing):
    """With a bias of -inf too: only the classes that have a weight cost anything."""
    unweighted = np.arange(CLASSES) == LABELS[0]
    class_weights = np.where(unweighted, 0, CLASS_WEIGHTS)
    kwargs = {"class_weights": class_weights, "label_smoothing": label_smoothing, "reduction": "sum"}
    bias, bias_of_dense = (np.where(unweighted, x if excluded else BIAS, BIAS) for x in (-np.inf, -1e4))
    fns = (linear_softmax_cross_entropy, bias), (dense, bias_of_dense)

    @jax.jit
    def all_of(*args):
        losses = [scalar(fn, bias=bias, **kwargs) for fn, bias in fns]
        return [jax.value_and_grad(loss, (0, 1, 2))(*args) for loss in losses]

    with jax.enable_x64(True):
        actual, desired = all_of(FEATURES, KERNEL, WEIGHTS)
    if not label_smoothing:  # the tokens of that class take no part: their weights have gradients of 0
        assert not actual[1][0][LABELS[0] == LABELS].any()
    assert_trees_close(actual, desired, rtol=1e-9, atol=1e-11)


def test_gradients_do_not_flow_to_class_weights():
    loss = lambda w: linear_softmax_cross_entropy(FEATURES, KERNEL, LABELS, class_weights=w, **OPTIONS)  # noqa: E731
    assert not jax.jit(jax.grad(loss))(CLASS_WEIGHTS).any()


def test_a_label_out_of_range_is_nan_with_any_weights(platform):
    labels = np.where(BAD, -100, LABELS)
    of = functools.partial(linear_softmax_cross_entropy, class_weights=np.zeros(CLASSES), reduction="none")
    np.testing.assert_array_equal(np.isnan(jax.jit(of)(FEATURES, KERNEL, labels)), BAD)


# Components.


@in_turn(("reduction",), [], [("mean",), ("sum",), ("none",)])
def test_components_add_up_and_each_has_gradients(platform, reduction):
    kwargs = {"class_weights": CLASS_WEIGHTS, "where": MASK, "reduction": reduction, **OPTIONS}

    @jax.jit
    def all_of(*args):
        component = lambda fn, k: lambda *a, **kw: fn(*a, with_components=True, **kw)[k]  # noqa: E731
        of = lambda fn: jax.value_and_grad(scalar(fn, **kwargs), (0, 1, 2))(*args)  # noqa: E731
        ours, plain = ([of(component(fn, k)) for k in (0, 1)] for fn in (linear_softmax_cross_entropy, dense))
        return ours, plain, of(linear_softmax_cross_entropy)

    with jax.enable_x64(True):
        ours, plain, whole = all_of(FEATURES, KERNEL, WEIGHTS)
    assert_trees_close(ours, plain, rtol=1e-10, atol=1e-12)
    assert_trees_close(jax.tree.map(jnp.add, *ours), whole, rtol=1e-10, atol=1e-12)


def test_without_a_z_loss_its_component_is_zero():
    of = jax.jit(lambda x, c: linear_softmax_cross_entropy(x, KERNEL, LABELS, with_components=c), static_argnums=1)
    np.testing.assert_allclose(of(FEATURES, True), [of(FEATURES, False), 0], rtol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", forms("none")])
def test_a_label_out_of_range_leaves_the_z_loss(platform, reduction):
    labels = np.where(BAD, -100, LABELS)
    options = {"z_loss": 0.1, "label_smoothing": 0.1, "with_components": True, "reduction": reduction}

    def z_loss(features, labels):
        parts = linear_softmax_cross_entropy(features, KERNEL, labels, **options)
        return jnp.sum(parts[1]), parts

    step = jax.jit(jax.value_and_grad(z_loss, has_aux=True))
    (_, (cross_entropy, actual)), gradient = step(np.float32(FEATURES), labels)
    (_, (_, desired)), desired_gradient = step(np.float32(FEATURES), LABELS)
    assert_trees_close((actual, gradient), (desired, desired_gradient), rtol=2e-5, atol=1e-6)
    np.testing.assert_array_equal(np.isnan(cross_entropy), BAD if reduction == "none" else True)
    with masksafe.label_checks("checkify"):
        error, (_, parts) = jax.jit(checkify.checkify(z_loss))(np.float32(FEATURES), labels)
    assert "1 of 40 labels" in error.get()
    assert [np.isnan(part).any() for part in parts] == [True, False]


# Numbers.


@in_turn(("size", "reduction"), [], [(1e4, "mean"), (1e-6, "sum"), (1e-6, "mean"), (1e4, "none")])
def test_float16_gradients_with_large_and_small_weights(platform, size, reduction):
    args = [jnp.asarray(a, "float16") for a in (FEATURES, KERNEL)]

    @jax.jit
    def gradients(features, kernel, weights):
        def loss(features, kernel):
            losses = linear_softmax_cross_entropy(features, kernel, LABELS, weights=weights, reduction=reduction)
            return jnp.sum(losses) * (1 if reduction == "mean" else 1 / (TOKENS * size))

        return jax.grad(loss, (0, 1))(features, kernel)

    desired = gradients(*(a.astype("float32") for a in args), size * np.float32(WEIGHTS))
    actual = gradients(*args, size * np.float32(WEIGHTS))
    assert_trees_close(actual, desired, rtol=1e-2, atol=2e-5)


@pytest.mark.forms
@pytest.mark.parametrize("dtypes", [["int32"], forms(["float16", "bool"])])
def test_weights_of_any_dtype_and_shape_that_broadcasts(dtypes):
    features, labels = np.float32(FEATURES.reshape(4, 10, WIDTH)), LABELS.reshape(4, 10)
    of = functools.partial(linear_softmax_cross_entropy, features, np.float32(KERNEL), labels)
    whole = np.abs(np.round(WEIGHTS)).reshape(4, 10)
    given = [whole.astype(d) for d in dtypes] + [WEIGHTS[:4, None], 3.0]
    same = [np.broadcast_to(np.float32(w), labels.shape) for w in given]
    actual, desired, gradients = jax.jit(
        lambda given, same: (
            [of(weights=w) for w in given],
            [of(weights=w) for w in same],
            [jax.grad(lambda w: of(weights=w, reduction="sum"))(w) for w in given[len(dtypes) :]],
        )
    )(given, same)
    assert {x.dtype for x in actual} == {np.dtype("float32")}
    np.testing.assert_allclose(actual, desired, rtol=1e-6)
    assert [g.shape for g in gradients] == [np.shape(w) for w in given[len(dtypes) :]]
    np.testing.assert_allclose(actual[-1], jax.jit(of)(), rtol=1e-6)


def test_weights_too_small_for_the_dtype_of_the_loss_are_zero():
    with jax.enable_x64(True):
        of = jax.jit(functools.partial(linear_softmax_cross_entropy, weights=np.full(TOKENS, 1e-60)))
        assert of(*singles((FEATURES, KERNEL)), LABELS) == 0


# Parts of a batch, and devices; those of an explicit mesh are in test_linear_cross_entropy_on_meshes.py.


@pytest.mark.forms
def test_a_masked_mean_of_parts_is_the_weighted_mean():
    """What is counted are the weights of the tokens times those of their labels' classes."""

    def mean_of(kernel, features, labels, weights):
        mask = labels != -100
        options = {"where": mask, "weights": weights, "class_weights": CLASS_WEIGHTS}
        total = linear_softmax_cross_entropy(features, kernel, labels, reduction="sum", **options)
        return masksafe.MaskedMean(total, masksafe.sum(weights * jnp.asarray(CLASS_WEIGHTS)[labels], where=mask))

    def mean(kernel, features, labels, weights):
        options = {"where": labels != -100, "weights": weights, "class_weights": CLASS_WEIGHTS}
        return linear_softmax_cross_entropy(features, kernel, labels, **options)

    labels = np.where(MASK & (np.arange(TOKENS) >= 10), LABELS, -100)  # nothing is left in the first part
    args = *singles((KERNEL, FEATURES)), labels, np.float32(WEIGHTS)
    of_parts, whole = masksafe.value_and_grad_of_mean(mean_of, microbatches=4), jax.value_and_grad(mean)
    assert_trees_close(*jax.jit(lambda *args: (of_parts(*args), whole(*args)))(*args), rtol=1e-5, atol=1e-6)


@pytest.mark.forms
@pytest.mark.parametrize("with_components", [True, forms(False)])
def test_classes_split_in_a_shard_map(platform, with_components):
    kwargs = {"reduction": "sum", "with_components": with_components, **OPTIONS}

    def local(features, kernel, class_weights, labels, where, weights):
        options = {"class_weights": class_weights, "weights": weights, "where": where, "axis_name": "classes"}
        losses = linear_softmax_cross_entropy(features, kernel, labels, **options, **kwargs)
        return jax.lax.psum(sum(jax.tree.leaves(losses)), "tokens")

    def plain(features, kernel, class_weights, labels, where, weights):
        options = {"class_weights": class_weights, "weights": weights, "where": where, "reduction": "sum", **OPTIONS}
        return dense(features, kernel, labels, **options)

    mesh = jax.make_mesh((2, 4), ("tokens", "classes"), axis_types=(AxisType.Auto,) * 2)
    specs = P("tokens"), P(None, "classes"), P("classes"), P("tokens"), P("tokens"), P("tokens")
    split = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())
    args = *singles((FEATURES, KERNEL, CLASS_WEIGHTS)), LABELS, MASK, np.float32(WEIGHTS)
    both = jax.jit(lambda *args: [jax.value_and_grad(fn, (0, 1, 5))(*args) for fn in (split, plain)])
    assert_trees_close(*both(*args), rtol=1e-4, atol=1e-5)
