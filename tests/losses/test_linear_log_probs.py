"""Log-probabilities and entropies of a linear layer, against the formula with all logits in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
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
from masksafe.losses import linear_log_probs, linear_softmax_cross_entropy
from masksafe.testing import CONSISTENCY_MODES, assert_consistent, assert_mask_safe

TOKENS, WIDTH, CLASSES = 40, 6, 24
RNG = np.random.default_rng(0)
FEATURES, KERNEL, BIAS = (RNG.normal(size=shape) for shape in ((TOKENS, WIDTH), (WIDTH, CLASSES), (CLASSES,)))
LABELS = RNG.integers(0, CLASSES, TOKENS)
MASK = RNG.random(TOKENS) < 0.6
WEIGHTS = RNG.normal(size=(2, TOKENS))  # of log-probabilities and entropies
OPTIONS = {"logit_soft_cap": 3.0, "temperature": 0.7}
NOT_MASKED = np.ones(TOKENS, bool)
singles = functools.partial(jax.tree.map, np.float32)


@pytest.fixture(autouse=True)
def small_class_blocks(choose):
    use_small_class_tiles(choose)


@pytest.fixture(params=["cpu", "elsewhere"])
def platform(request, choose):
    if request.param == "elsewhere":
        use_form_for_accelerators(choose)


@pytest.fixture
def elsewhere(choose):
    use_form_for_accelerators(choose)


def dense(features, kernel, labels, *, bias=None, where=None, temperature=1.0, logit_soft_cap=None, with_entropy=False):
    logits = jnp.matmul(features, kernel) + (0 if bias is None else bias)
    logits = logit_soft_cap * jnp.tanh(logits / logit_soft_cap) if logit_soft_cap else logits
    log_probs = jax.nn.log_softmax(logits / temperature)
    of_label = jnp.take_along_axis(log_probs, labels[..., None], -1)[..., 0]
    entropies = -jnp.sum(jnp.exp(log_probs) * log_probs, -1)
    outputs = [x if where is None else jnp.where(where, x, 0) for x in (of_label, entropies)]
    return tuple(outputs) if with_entropy else outputs[0]


def scalar(fn, **kwargs):
    """A function of features, kernel and maybe bias, with cotangents that are not all alike."""

    def total(features, kernel, bias=None, labels=LABELS):
        outputs = jnp.stack(jax.tree.leaves(fn(features, kernel, labels, bias=bias, **kwargs)))
        return jnp.sum(outputs * jnp.asarray(WEIGHTS[: len(outputs)], outputs.dtype).reshape(outputs.shape))

    return total


# Against all logits.

# with_entropy, mask, bias, options, block size
CASES = [
    (True, MASK, True, OPTIONS, 9),
    (True, None, False, {}, None),
    slow(False, MASK, False, {"temperature": 2.0}, 9),
    slow(False, None, True, OPTIONS, 200),
    slow(True, MASK, True, {"logit_soft_cap": 3.0}, None),
    slow(True, None, True, {"temperature": 0.3}, 9),
    slow(True, MASK, False, {}, 200),
    slow(False, MASK, True, {}, None),
]


@pytest.mark.parametrize(("with_entropy", "where", "with_bias", "options", "block_size"), CASES)
def test_value_and_gradients_are_those_of_all_logits(platform, with_entropy, where, with_bias, options, block_size):
    args = (FEATURES, KERNEL, BIAS) if with_bias else (FEATURES, KERNEL)
    kwargs = {"where": where, "with_entropy": with_entropy, **options}

    @jax.jit
    def both(*args):
        numbers = tuple(range(len(args)))
        functions = scalar(linear_log_probs, block_size=block_size, **kwargs), scalar(dense, **kwargs)
        return [jax.value_and_grad(fn, numbers)(*args) for fn in functions]

    with jax.enable_x64(True):
        assert_trees_close(*both(*args), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("platform", ["cpu", slow("elsewhere")], indirect=True)
@pytest.mark.parametrize("with_entropy", [True, slow(False)])
def test_every_other_derivative(platform, with_entropy):
    kwargs = {"where": MASK, "with_entropy": with_entropy, **OPTIONS}
    ours, plain = scalar(linear_log_probs, block_size=9, **kwargs), scalar(dense, **kwargs)
    assert_every_other_derivative(ours, plain, (FEATURES, KERNEL, BIAS))


def test_is_jax_and_the_linear_cross_entropy():
    @jax.jit
    def all_of(features, kernel):
        alone = linear_log_probs(features, kernel, LABELS, where=MASK)
        log_probs, _ = linear_log_probs(features, kernel, LABELS, where=MASK, with_entropy=True)
        loss = linear_softmax_cross_entropy(features, kernel, LABELS, where=MASK, reduction="none")
        of_jax = jax.nn.log_softmax(features @ kernel)[jnp.arange(TOKENS), LABELS]
        return alone, log_probs, -loss, jnp.where(MASK, of_jax, 0)

    for actual in (outputs := all_of(*singles((FEATURES, KERNEL)))):
        np.testing.assert_allclose(actual, outputs[-1], rtol=2e-5, atol=1e-6)
    np.testing.assert_array_equal(outputs[0], outputs[2])


@pytest.mark.parametrize("platform", ["cpu", slow("elsewhere")], indirect=True)
def test_ties_have_the_right_hessian(platform):
    """All logits are equal: the largest is at every class."""

    def of_two(fn):
        def total(x):
            log_probs, entropies = fn(x, jnp.eye(3), labels, with_entropy=True)
            return jnp.sum(1.3 * log_probs + 0.7 * entropies)

        return jax.grad(total), jax.hessian(total)

    labels, x = np.array([0, 2]), np.zeros((2, 3))
    with jax.enable_x64(True):
        out = jax.jit(lambda x: [[f(x) for f in of_two(fn)] for fn in (linear_log_probs, dense)])(x)
    assert_trees_close(*out, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("platform", ["cpu", slow("elsewhere")], indirect=True)
@pytest.mark.parametrize("of", ["log_probs", slow("both")])
def test_second_derivatives_where_the_cotangents_are_zero(platform, of):
    """Half the squared distance from the values at the parameters themselves: its Hessian is J^T J, not 0."""

    def outputs(x):
        both = linear_log_probs(x, KERNEL, LABELS[:6], where=MASK[:6], with_entropy=of == "both")
        return jnp.stack(jax.tree.leaves(both))

    @jax.jit
    def all_of(x):
        old, direction = outputs(x), jnp.cos(x)
        distance = lambda x: jnp.sum(jnp.square(outputs(x) - old)) / 2  # noqa: E731
        jacobian = jax.jacrev(outputs)(x).reshape(-1, x.size)
        desired = (jacobian.T @ (jacobian @ direction.reshape(-1))).reshape(x.shape)
        gradient = jax.grad(distance)
        again = jax.grad(lambda x: jnp.vdot(gradient(x), direction))(x)
        return gradient(x), (jax.jvp(gradient, (x,), (direction,))[1], again), (desired, desired)

    with jax.enable_x64(True):
        gradient, actual, desired = all_of(FEATURES[:6])
    np.testing.assert_allclose(gradient, 0, atol=1e-12)
    assert_trees_close(actual, desired, rtol=1e-10, atol=1e-12)


# Digits.

LOGITS = np.array([[0, -17, -21], [-3, 40, 2], [7, 7, -30], [-60, -80, 0]], np.float32)


def exact(logits, label):
    """Log p, the entropy and their gradients, in formulas without a difference of nearly equal numbers."""
    x = np.float64(logits)
    top = x.argmax()
    below = x[top] - x
    exps = np.exp(-below)
    others = np.delete(exps, top).sum()
    mean = (exps * below).sum() / (1 + others)
    probs = exps / (1 + others)
    d_log_prob = -probs
    d_log_prob[label] = np.delete(probs, label).sum()
    return -below[label] - np.log1p(others), np.log1p(others) + mean, d_log_prob, probs * (below - mean)


@pytest.mark.parametrize("form", ["reverse", slow("forward mode")])
def test_digits_are_kept_where_a_token_is_nearly_certain(platform, form):
    rows, labels = np.repeat(LOGITS, 3, 0), np.tile(np.arange(3), len(LOGITS))

    @jax.jit
    def all_of(x):
        of = functools.partial(linear_log_probs, kernel=jnp.eye(3), labels=labels)
        log_probs, entropies = of(x, with_entropy=True)
        of_log_prob, of_entropy = (jax.grad(lambda x, k=k: jnp.sum(of(x, with_entropy=True)[k]))(x) for k in (0, 1))
        alone = of(x), jax.grad(lambda x: jnp.sum(of(x)))(x)
        return (log_probs, entropies, of_log_prob, of_entropy), (alone[0], entropies, alone[1], of_entropy)

    with masksafe.forward_mode() if form == "forward mode" else masksafe.label_checks("off"):
        outs = all_of(rows)
    desired = tuple(np.stack(x) for x in zip(*map(exact, rows, labels), strict=True))
    for actual in outs:  # in forward mode, JAX's own rules preserve the digits of the values
        assert_trees_close(actual[:2], desired[:2], rtol=5e-6)
        assert_trees_close(actual[2:], desired[2:], rtol=5e-6, atol=1e-6 if form == "forward mode" else 0)


@pytest.mark.parametrize("options", [{"temperature": 0.07}, slow({"logit_soft_cap": 97.0})], ids=str)
def test_digits_are_kept_where_logits_are_products(platform, options):
    """Compiled as a fused multiply-add, a difference from the largest is not 0 at the largest."""
    rows, labels = np.repeat(LOGITS / 10, 3, 0), np.tile(np.arange(3), len(LOGITS))

    @jax.jit
    def all_of(x):
        of = functools.partial(linear_log_probs, kernel=jnp.eye(3), labels=labels, with_entropy=True, **options)
        each = [jax.grad(lambda x, k=k: jnp.sum(of(x)[k]))(x) for k in (0, 1)]
        return (*of(x), *each)

    x, slope = np.float64(rows) / options.get("temperature", 1), 1 / options.get("temperature", 1)
    if cap := options.get("logit_soft_cap"):
        x = cap * np.tanh(x / cap)
        slope = 1 - (x / cap) ** 2
    desired = tuple(np.stack(x) for x in zip(*map(exact, x, labels), strict=True))
    desired = (*desired[:2], *(slope * d for d in desired[2:]))
    assert_trees_close(all_of(rows), desired, rtol=1e-4, atol=1e-37)


@pytest.mark.parametrize("platform", ["cpu", slow("elsewhere")], indirect=True)
def test_extreme_temperatures(platform):
    for temperature, certain in ((1e-38, True), (1e38, False)):
        of = functools.partial(linear_log_probs, kernel=np.float32(KERNEL), temperature=temperature, with_entropy=True)
        step = jax.value_and_grad(lambda x, of=of: jnp.sum(of(x, labels=LABELS)[1]))
        value, gradient = jax.jit(step)(np.float32(FEATURES) / 8)
        np.testing.assert_allclose(value, 0 if certain else TOKENS * np.log(CLASSES), rtol=1e-6)
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize("platform", ["cpu", slow("elsewhere")], indirect=True)
@pytest.mark.parametrize("dtype", ["bfloat16", slow("float16"), slow("float32")])
def test_dtypes(platform, dtype):
    args = tuple(a.astype(dtype) for a in (FEATURES, KERNEL, BIAS))
    kwargs = {"where": MASK, "with_entropy": True}
    step = lambda fn: jax.jit(jax.value_and_grad(scalar(fn, **kwargs), (0, 1, 2)))  # noqa: E731
    value, gradients = step(linear_log_probs)(*args)
    assert [x.dtype for x in (value, *gradients)] == ["float32", dtype, dtype, dtype]
    with jax.enable_x64(True):
        desired = step(dense)(*(a.astype("float64") for a in args))
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(value, desired[0], rtol=1e-5)
    assert_trees_close(gradients, desired[1], rtol=4 * eps, atol=max(eps, 2e-6))


@pytest.mark.parametrize("dtypes", [("bfloat16", "float64", "float32"), slow(("float64", "bfloat16", "float16"))])
def test_mixed_dtypes_and_second_derivatives_are_traced(dtypes):
    with jax.enable_x64(True):
        shapes = zip((FEATURES, KERNEL, BIAS), dtypes, strict=True)
        args = [jax.ShapeDtypeStruct(a.shape, d) for a, d in shapes]

        def total(features, kernel, bias):
            return sum(map(jnp.sum, linear_log_probs(features, kernel, LABELS, bias=bias, with_entropy=True)))

        assert jax.eval_shape(total, *args).dtype == "float64"
        rows = jax.eval_shape(jax.hessian(total, (0, 1, 2)), *args)
        assert [row[i].dtype for i, row in enumerate(rows)] == list(dtypes)


@pytest.mark.parametrize("platform", ["cpu", slow("elsewhere")], indirect=True)
@pytest.mark.parametrize("dtype", ["bfloat16", slow("float32")])
def test_strict_promotion(platform, dtype):
    args = [jnp.asarray(a, dtype) for a in (FEATURES, KERNEL, BIAS)]
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        gradient = jax.grad(scalar(linear_log_probs, where=MASK, with_entropy=True, **OPTIONS), (0, 1, 2))
        assert [x.dtype for x in jax.eval_shape(gradient, *args)] == [dtype] * 3
        jax.eval_shape(lambda *args: jax.jvp(gradient, args, args), *args)


# What is masked is gone, and nothing else.


@pytest.mark.parametrize("with_entropy", [True, slow(False)])
@pytest.mark.parametrize("platform", ["cpu", slow("elsewhere")], indirect=True)
def test_masked_tokens_are_gone(platform, with_entropy):
    def outputs(features, kernel, bias, labels, where):
        return linear_log_probs(
            features, kernel, labels, bias=bias, where=where, block_size=8, with_entropy=with_entropy
        )

    args = *singles((FEATURES, KERNEL, BIAS)), LABELS, MASK
    masked = {0: np.broadcast_to(~MASK[:, None], FEATURES.shape), 3: ~MASK}
    assert_mask_safe(outputs, *args, masked=masked, transforms=("jit",))


def test_taking_tokens_out_is_masking_them():
    of = functools.partial(linear_log_probs, kernel=KERNEL, with_entropy=True)
    masked, removed = jax.jit(lambda *a: (of(a[0], labels=a[1], where=MASK), of(a[2], labels=a[3])))(
        FEATURES, LABELS, FEATURES[MASK], LABELS[MASK]
    )
    for x, y in zip(masked, removed, strict=True):
        np.testing.assert_allclose(x[MASK], y, rtol=1e-5, atol=1e-6)
        assert not x[~MASK].any()


@pytest.mark.parametrize("tokens", [TOKENS, 0])
def test_nothing_unmasked_is_zero(platform, tokens):
    @jax.jit
    def all_of(features, kernel):
        outputs = lambda *args: jnp.stack(  # noqa: E731
            linear_log_probs(*args, np.full(tokens, -100), where=np.zeros(tokens, bool), with_entropy=True)
        )
        infinite_cotangent = lambda *args: jnp.sum(jnp.sqrt(outputs(*args)))  # noqa: E731
        return outputs(features, kernel), jax.grad(infinite_cotangent, (0, 1))(features, kernel)

    out = all_of(np.full((tokens, WIDTH), np.nan, np.float32), np.full_like(KERNEL, np.nan, np.float32))
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0), out)
    assert out[0].shape == (2, tokens)


@pytest.mark.parametrize("tokens", [0, slow(3)])
def test_no_tokens_and_no_features(tokens):
    step = jax.jit(jax.value_and_grad(lambda f: jnp.sum(linear_log_probs(f, jnp.ones((0, 4)), jnp.zeros(tokens, int)))))
    value, gradient = step(jnp.ones((tokens, 0)))
    np.testing.assert_allclose(value, -tokens * np.log(4), rtol=1e-6)
    assert gradient.shape == (tokens, 0)


@functools.partial(jax.jit, static_argnames="of")
def gradient_of(of, features, labels, kernel, bias):
    """Outputs, and the gradient of the log-probabilities (0) or the entropies (1), with respect to the features."""
    outputs = lambda f: linear_log_probs(f, kernel, labels, bias=bias, with_entropy=True)  # noqa: E731
    return outputs(features), jax.grad(lambda f: jnp.sum(outputs(f)[of]))(features)


def bad_rows(x):
    return np.isnan(np.asarray(x).reshape(TOKENS, -1)).any(-1).nonzero()[0].tolist()


@pytest.mark.parametrize("label", [-1, slow(CLASSES), slow(-100), slow(2**31 - 1)])
def test_a_label_out_of_range_is_nan_in_its_own_row_and_not_in_the_entropy(platform, label):
    gradient_of.clear_cache()
    labels = np.where(np.arange(TOKENS) == 5, label, LABELS)
    args = singles((KERNEL, BIAS))
    (log_probs, entropies), of_log_probs = gradient_of(0, np.float32(FEATURES), labels, *args)
    assert bad_rows(log_probs) == bad_rows(of_log_probs) == [5]
    assert np.isnan(of_log_probs[5]).all()
    _, of_entropies = gradient_of(1, np.float32(FEATURES), labels, *args)
    (_, desired), d_desired = gradient_of(1, np.float32(FEATURES), LABELS, *args)
    assert_trees_close((entropies, of_entropies), (desired, d_desired), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("platform", ["cpu", slow("elsewhere")], indirect=True)
def test_a_label_out_of_range_where_its_log_probability_is_replaced(platform):
    """For tokens that ask for the gradient of the entropy alone."""
    labels = np.where(np.arange(TOKENS) == 5, -100, LABELS)

    @jax.jit
    def step(features, kernel):
        log_probs, entropies = linear_log_probs(features, kernel, labels, with_entropy=True, block_size=9)
        return jnp.sum(jnp.where(labels >= 0, log_probs, 0) + 0.1 * entropies)

    def desired(features, kernel):
        log_probs, entropies = dense(features, kernel, LABELS, with_entropy=True)
        return jnp.sum(jnp.where(labels >= 0, log_probs, 0) + 0.1 * entropies)

    args = singles((FEATURES, KERNEL))
    assert_trees_close(jax.grad(step, (0, 1))(*args), jax.grad(desired, (0, 1))(*args), rtol=1e-4, atol=1e-5)


def test_a_label_out_of_range_in_one_pass():
    """Sizes are symbolic: there are no blocks, and JAX differentiates all logits."""
    labels = np.where(np.arange(TOKENS) == 5, -100, LABELS).astype("int32")
    t, d = jax.export.symbolic_shape("t, d")
    shapes = [jax.ShapeDtypeStruct(s, x) for s, x in (((t, d), "float32"), ((d, CLASSES), "float32"), ((t,), "int32"))]

    def step(features, kernel, labels):
        log_probs, entropies = linear_log_probs(features, kernel, labels, with_entropy=True)
        return jnp.sum(jnp.where(labels >= 0, log_probs, 0) + entropies)

    args = *singles((FEATURES, KERNEL)), labels
    step = jax.jit(jax.grad(step, (0, 1)))
    gradients = jax.export.export(step)(*shapes).call(*args)
    assert np.isfinite(gradients[0]).all()
    assert_trees_close(gradients, step(*args), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("form", "bad"), [("reverse", np.nan), ("forward mode", np.inf), slow("reverse", np.inf)])
def test_a_bad_logit_is_nan_in_its_own_row(platform, form, bad):
    """A NaN feature, or logits of which one is infinite."""
    gradient_of.clear_cache()
    features = np.float32(FEATURES)
    features[5] = bad if np.isnan(bad) else 0
    features[5, 0], features[:, 0] = (bad, features[:, 0]) if np.isnan(bad) else (1, np.arange(TOKENS) == 5)
    kernel = np.float32(KERNEL)
    if not np.isnan(bad):
        kernel[0] = np.where(np.arange(CLASSES) == 3, 3e38, 0)
        features[5, 0] = 3  # the logit at class 3 overflows
    context = masksafe.forward_mode() if form == "forward mode" else masksafe.label_checks("off")
    with context:
        for of in (0, 1):
            outputs, gradient = gradient_of(of, features, LABELS, kernel, np.float32(BIAS))
            assert [bad_rows(x) for x in (*outputs, gradient)] == [[5]] * 3


@pytest.mark.parametrize("with_entropy", [True, slow(False)])
def test_excluded_classes(platform, with_entropy):
    """A bias of -inf: the classes are as if they did not exist, and a label there has log p = -inf."""
    excluded = np.isin(np.arange(CLASSES), [LABELS[0], LABELS[0] ^ 1])
    bias = np.where(excluded, -np.inf, BIAS)
    kept = ~np.isin(LABELS, excluded.nonzero()[0])
    renumbered = np.where(kept, (np.cumsum(~excluded) - 1)[LABELS], 0)

    @jax.jit
    def all_of(features):
        of = functools.partial(linear_log_probs, features, with_entropy=with_entropy, temperature=0.7)
        given = jax.tree.leaves(of(KERNEL, LABELS, bias=bias))
        removed = jax.tree.leaves(of(KERNEL[:, ~excluded], renumbered, bias=BIAS[~excluded]))
        return given, removed

    def total(features, kernel, bias, where=kept):
        outputs = linear_log_probs(features, kernel, LABELS, bias=bias, with_entropy=with_entropy, where=where)
        return sum(map(jnp.sum, jax.tree.leaves(outputs)))

    given, removed = all_of(np.float32(FEATURES))
    assert (np.asarray(given[0])[~kept] == -np.inf).all()
    assert_trees_close(given[0][kept], removed[0][kept], rtol=1e-5, atol=1e-6)
    assert_trees_close(given[1:], removed[1:], rtol=1e-5, atol=1e-6)
    d_features, d_kernel, d_bias = jax.jit(jax.grad(total, (0, 1, 2)))(*singles((FEATURES, KERNEL, bias)))
    assert all(np.isfinite(g).all() for g in (d_features, d_kernel, d_bias))
    assert not d_bias[excluded].any()
    assert not d_kernel[:, excluded].any()


@pytest.mark.parametrize("platform", ["cpu", slow("elsewhere")], indirect=True)
def test_all_classes_excluded_is_nan(platform):
    features = np.float32(FEATURES)
    outputs = jax.jit(lambda b: linear_log_probs(features, KERNEL, LABELS, bias=b, with_entropy=True))
    assert np.isnan(outputs(np.full(CLASSES, -np.inf, np.float32))).all()


def test_outputs_that_are_selected_away_take_no_part(platform):
    bad = np.where(np.arange(TOKENS)[:, None] == 5, np.nan, FEATURES).astype("float32")

    def total(features, kernel, rows):
        log_probs, entropies = linear_log_probs(features, kernel, LABELS, with_entropy=True, block_size=9)
        return jnp.sum(jnp.where(rows, log_probs + entropies, 0))

    gradients = jax.jit(jax.grad(total, (0, 1)))
    for rows in (np.arange(TOKENS) != 5, np.zeros(TOKENS, bool)):
        d_features, d_kernel = gradients(bad, np.float32(KERNEL), rows)
        assert np.isfinite(d_kernel).all()
        assert np.isfinite(d_features).all()
        assert not d_features[~rows].any()


def test_dead_places_of_a_block_do_not_meet_an_infinite_weight(platform):
    """For negative features the infinite weight excludes class 0; 0 times infinity would be NaN."""
    features, kernel = -np.abs(np.float32(FEATURES[:, :1])), np.array([[np.inf, 0.5, 0.3]], np.float32)
    labels = 1 + LABELS % 2

    @jax.jit
    def step(kernel):
        outputs = linear_log_probs(features, kernel, labels, where=MASK, block_size=9, with_entropy=True)
        return sum(map(jnp.sum, outputs)) + linear_softmax_cross_entropy(
            features, kernel, labels, where=MASK, block_size=9
        )

    value, gradient = jax.value_and_grad(step)(kernel)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
    assert gradient[0, 0] == 0


def test_no_alarm_of_debug_nans():
    features = np.where(MASK[:, None], FEATURES, np.nan).astype("float32")
    labels = np.where(MASK, LABELS, -100)
    total = scalar(linear_log_probs, where=MASK, with_entropy=True)
    with jax.debug_nans(True):
        gradients = jax.grad(lambda *args: total(*args, labels=labels), (0, 1))(features, KERNEL)
    assert all(np.isfinite(g).all() for g in gradients)


def test_label_checks():
    labels = LABELS.copy()
    labels[5:7] = CLASSES, -1
    with (
        masksafe.label_checks("raise"),
        pytest.raises(ValueError, match=r"linear_log_probs: 2 of 40 labels .* \[0, 24\); first at \(5,\)"),
    ):
        linear_log_probs(FEATURES, KERNEL, labels)
    with masksafe.label_checks("checkify"):
        step = lambda k: sum(map(jnp.sum, linear_log_probs(FEATURES, k, labels, with_entropy=True)))  # noqa: E731
        error, (value, gradient) = jax.jit(checkify.checkify(jax.value_and_grad(step)))(KERNEL)
        assert "2 of 40 labels" in error.get()
        assert np.isnan(value)
        assert np.isnan(gradient).any()
    with masksafe.label_checks("raise"):
        linear_log_probs(FEATURES, KERNEL, labels, where=jnp.arange(TOKENS) > 6)


# One answer everywhere.


@pytest.mark.parametrize(
    "modes", [("jit", "vmap"), slow(set(CONSISTENCY_MODES) - {"devices", "disk", "strided"}, id="all")]
)
def test_one_answer(modes):
    def outputs(features, kernel, bias):
        kwargs = {"bias": bias, "where": MASK, "block_size": 9, "with_entropy": True, **OPTIONS}
        return linear_log_probs(features, kernel, LABELS, **kwargs)

    assert_consistent(outputs, *(jnp.asarray(a, jnp.float32) for a in (FEATURES, KERNEL, BIAS)), modes=modes)


def test_one_answer_in_a_vmap_elsewhere(elsewhere):
    def step(features, where):
        return jax.value_and_grad(scalar(linear_log_probs, where=where, with_entropy=True), (0, 1))(
            features, np.float32(KERNEL)
        )

    features = np.stack([FEATURES, np.cos(FEATURES)]).astype("float32")
    where = np.stack([MASK, np.zeros_like(MASK)])  # blocks differ in number
    each = [jax.jit(step)(f, w) for f, w in zip(features, where, strict=True)]
    many = jax.jit(jax.vmap(step))(features, where)
    assert_trees_close(many, jax.tree.map(lambda *x: np.stack(x), *each), rtol=1e-5, atol=1e-6)


def test_batch_axes():
    shape = (2, 4, 5)
    features, labels, where = FEATURES.reshape(*shape, WIDTH), LABELS.reshape(shape), MASK.reshape(shape)
    rows = np.array([True, False])[:, None, None]

    @jax.jit
    def all_of(features, flat):
        of = functools.partial(linear_log_probs, features, KERNEL, labels, with_entropy=True)
        desired = functools.partial(dense, flat, KERNEL, LABELS, with_entropy=True)
        shaped = lambda outputs: tuple(x.reshape(shape) for x in outputs)  # noqa: E731
        by_row = shaped(desired(where=np.arange(TOKENS) < 20))
        return (of(where=where), of(where=rows)), (shaped(desired(where=MASK)), by_row)

    assert_trees_close(*all_of(features, FEATURES), rtol=1e-5, atol=1e-6)


def test_lowers_for_cuda():
    fn = jax.value_and_grad(scalar(linear_log_probs, where=MASK, with_entropy=True), (0, 1))
    args = jnp.asarray(FEATURES), jnp.asarray(KERNEL)
    assert jax.export.export(jax.jit(fn), platforms=["cuda"])(*args).mlir_module()


def test_memory_is_that_of_a_block_of_tokens():
    shapes = ((4096, 64), jnp.float32), ((64, 32768), jnp.float32), ((4096,), jnp.int32), ((4096,), jnp.bool_)
    args = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    total = lambda f, k, y, m: sum(map(jnp.sum, linear_log_probs(f, k, y, where=m, with_entropy=True)))  # noqa: E731
    program = jax.jit(jax.value_and_grad(total, (0, 1))).lower(*args).compile()
    of_kernel, of_logits = 4 * 64 * 32768, 4 * 4096 * 32768
    assert program.memory_analysis().temp_size_in_bytes - of_kernel < of_logits / 8


# Devices.


@pytest.mark.parametrize(("with_entropy", "outside"), [(True, True), slow(True, False), slow(False, True)])
@pytest.mark.parametrize("platform", ["cpu", slow("elsewhere")], indirect=True)
def test_classes_split_in_a_shard_map(platform, with_entropy, outside):
    def local(features, kernel, bias, labels, where):
        kwargs = {"axis_name": "classes", "block_size": 4, "with_entropy": with_entropy, **OPTIONS}
        outputs = linear_log_probs(features, kernel, labels, bias=bias, where=where, **kwargs)
        return jax.lax.psum(sum(map(jnp.sum, jax.tree.leaves(outputs))), "tokens")

    mesh = jax.make_mesh((2, 4), ("tokens", "classes"), axis_types=(AxisType.Auto,) * 2)
    specs = (P("tokens"), P(None, "classes"), P("classes"), P("tokens"), P("tokens"))
    if outside:
        step = jax.value_and_grad(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P()), (0, 1, 2))
    else:
        step = jax.value_and_grad(local, (0, 1, 2))
        step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(P(), specs[:3]))
    args = tuple(jnp.asarray(a, jnp.float32) for a in (FEATURES, KERNEL, BIAS))

    def plain(features, kernel, bias):
        outputs = dense(features, kernel, LABELS, bias=bias, where=MASK, with_entropy=with_entropy, **OPTIONS)
        return sum(map(jnp.sum, jax.tree.leaves(outputs)))

    actual = jax.jit(step)(*args, jnp.asarray(LABELS), jnp.asarray(MASK))
    assert_trees_close(actual, jax.jit(jax.value_and_grad(plain, (0, 1, 2)))(*args), rtol=1e-4, atol=1e-5)


def split_classes(fn, **kwargs):
    """`fn(features, kernel)` with the classes split over four devices."""
    mesh = jax.make_mesh((4,), ("classes",), axis_types=(AxisType.Auto,))
    of = functools.partial(fn, axis_name="classes", **kwargs)
    return jax.shard_map(of, mesh=mesh, in_specs=(P(), P(None, "classes")), out_specs=P())


TIED = np.array(
    [
        [0, 0, 0, 0, 0, 0, 0, 0],  # ties between and within devices
        [1, 0, 0, 0, 1, 0, 1, 0],
        [0, 0, 0, 0, 0, 0, 0, 30],  # the largest on the last device, nearly certain
        [0, 25, 0, 0, 0, 0, 0, 0],
        [-np.inf, -np.inf, 0, 1, -np.inf, -np.inf, -np.inf, 2],  # nothing on some devices
        [2, -np.inf, 2, 1, 0, 0, 1, 2],
    ],
    np.float32,
)


def test_ties_between_devices(platform):
    labels = np.array([0, 6, 7, 0, 3, 7])
    bias = np.where(np.isinf(TIED), -np.inf, 0)
    logits = np.where(np.isinf(TIED), -1e4, TIED)

    def total(features, kernel, axis_name=None):
        outputs = linear_log_probs(features, kernel, labels, with_entropy=True, axis_name=axis_name)
        return jnp.stack(outputs), jnp.sum(outputs[0] * (1 + np.arange(6)) + outputs[1] * (2 + np.arange(6)))

    assert bias.shape == logits.shape
    split = split_classes(total)
    step = lambda fn: jax.jit(jax.value_and_grad(lambda *args: fn(*args)[::-1], (0, 1), has_aux=True))  # noqa: E731
    (_, actual), gradients = step(split)(logits, np.eye(8, dtype="float32"))
    desired = [exact(row, label) for row, label in zip(logits, labels, strict=True)]
    np.testing.assert_allclose(actual, np.stack([row[:2] for row in desired], 1), rtol=5e-6)
    of_logits = np.stack([(1 + i) * a + (2 + i) * b for i, (_, _, a, b) in enumerate(desired)])
    np.testing.assert_allclose(gradients[0], of_logits, rtol=1e-5, atol=1e-12)


@pytest.mark.slow
def test_second_derivatives_and_forward_mode_with_split_classes(platform):
    def derivatives(fn, *args):
        directions = jax.tree.map(jnp.cos, args)
        gradient = jax.grad(fn, (0, 1))
        along = lambda *args: sum(map(jnp.vdot, gradient(*args), directions))  # noqa: E731
        with masksafe.forward_mode():
            slope = jax.jvp(fn, args, directions)[1]
        return jax.jvp(gradient, args, directions)[1], jax.grad(along, (0, 1))(*args), slope

    split = lambda f, k, axis_name: scalar(linear_log_probs, with_entropy=True, axis_name=axis_name)(f, k)  # noqa: E731
    both = jax.jit(
        lambda *args: [derivatives(fn, *args) for fn in (split_classes(split), scalar(dense, with_entropy=True))]
    )
    assert_trees_close(*both(*singles((FEATURES, KERNEL))), rtol=1e-3, atol=1e-4)
    kernel = np.zeros_like(KERNEL)  # ties everywhere
    assert_trees_close(*both(*singles((FEATURES, kernel))), rtol=1e-3, atol=1e-4)


def test_a_bad_logit_with_split_classes(platform):
    def total(features, kernel, axis_name):
        outputs = linear_log_probs(features, kernel, LABELS, with_entropy=True, axis_name=axis_name)
        return sum(map(jnp.sum, outputs)), jnp.stack(outputs)

    bad = np.where(np.arange(TOKENS)[:, None] == 5, np.nan, FEATURES).astype("float32")
    gradient, outputs = jax.jit(jax.grad(split_classes(total), has_aux=True))(bad, np.float32(KERNEL))
    assert [bad_rows(x) for x in (*outputs, gradient)] == [[5]] * 3


SPLITS = {
    "tokens": (P("x"), P(), P(), P("x"), P("x")),
    "classes": (P(), P(None, "y"), P("y"), P(), P()),
    "tokens and classes": (P("x"), P(None, "y"), P("y"), P("x"), P("x")),
    "kernel by features": (P("x"), P("x", "y"), P(), P("x"), P("x")),
}


@pytest.mark.parametrize("kind", [AxisType.Explicit, slow(AxisType.Auto)])
@pytest.mark.parametrize("split", [s if s == "tokens and classes" else slow(s) for s in SPLITS])
def test_arrays_split_over_a_mesh(split, kind):
    @jax.jit
    def step(features, kernel, bias, labels, where):
        def total(*floats):
            outputs = linear_log_probs(
                *floats[:2], labels, bias=floats[2], where=where, with_entropy=True, block_size=4, **OPTIONS
            )
            return sum(jnp.sum(jnp.square(x)) for x in outputs)

        return jax.value_and_grad(total, (0, 1, 2))(features, kernel, bias)

    args = *singles((FEATURES, KERNEL, BIAS)), LABELS, MASK
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        arrays = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(args, SPLITS[split], strict=True)]
        actual = step(*arrays)
        log_probs, entropies = linear_log_probs(arrays[0], arrays[1], arrays[3], with_entropy=True)
    assert_trees_close(actual, step(*args), rtol=2e-5, atol=5e-6)
    if kind == AxisType.Explicit:
        assert jax.typeof(log_probs).sharding.spec == jax.typeof(entropies).sharding.spec == P(*SPLITS[split][3]) or (
            split == "classes"
        )


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
        ({"logit_soft_cap": 0.0}, ValueError, "logit_soft_cap: got value 0"),
        ({"temperature": 0}, ValueError, "temperature: got value 0"),
        ({"temperature": -1.0}, ValueError, "temperature: got value -1"),
        ({"temperature": np.nan}, ValueError, "temperature: got value nan"),
        ({"temperature": np.inf}, ValueError, "temperature: got value inf"),
        ({"temperature": "1"}, TypeError, "temperature: got type str"),
        ({"temperature": None}, TypeError, "temperature: got type NoneType"),
        ({"block_size": 0}, ValueError, "block_size: got value 0"),
        ({"axis_name": "classes"}, ValueError, "axis_name: got value 'classes'"),
    ],
)
def test_bad_input_is_refused(changed, error, text):
    arguments = {"features": FEATURES, "kernel": KERNEL, "labels": LABELS} | changed
    with pytest.raises(error, match=f"linear_log_probs: {text}|linear_log_probs: .*{text}"):
        linear_log_probs(**arguments)
