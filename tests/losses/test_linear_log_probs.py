"""Log-probabilities and entropies of a linear layer, against the formula with all logits in float64."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
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
    assert_memory_is_that_of_a_block,
    assert_same_function,
    assert_trees_close,
    bad_rows,
    forms,
    in_turn,
    singles,
)

import masksafe
from masksafe.losses import linear_log_probs, linear_softmax_cross_entropy

COTANGENTS = RNG.normal(size=(2, TOKENS))  # of log-probabilities and entropies
OPTIONS = {"logit_soft_cap": 3.0, "temperature": 0.7}
BAD = np.arange(TOKENS) == 5
both = functools.partial(linear_log_probs, with_entropy=True)
pytestmark = pytest.mark.usefixtures("small_tiles")


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
        return jnp.sum(outputs * jnp.asarray(COTANGENTS[: len(outputs)], outputs.dtype).reshape(outputs.shape))

    return total


# Against all logits.

CASES = [  # with_entropy, mask, bias, options, block size
    (True, None, False, {}, None),
    (True, MASK, True, OPTIONS, 9),
    (False, MASK, False, {"temperature": 2.0}, 9),
    (False, None, True, OPTIONS, 200),
    (True, MASK, True, {"logit_soft_cap": 3.0}, None),
    (True, None, True, {"temperature": 0.3}, 9),
    (True, MASK, False, {}, 200),
    (False, MASK, True, {}, None),
]


@in_turn(("with_entropy", "where", "with_bias", "options", "block_size"), [("elsewhere", *CASES[1])], CASES)
def test_value_and_gradients_are_those_of_all_logits(platform, with_entropy, where, with_bias, options, block_size):
    kwargs = {"where": where, "with_entropy": with_entropy, **options}
    ours = functools.partial(linear_log_probs, block_size=block_size)
    args = (FEATURES, KERNEL, BIAS) if with_bias else (FEATURES, KERNEL)
    assert_same_function(*(scalar(fn, **kwargs) for fn in (ours, dense)), args)


@pytest.mark.forms
@pytest.mark.parametrize(("platform", "with_entropy"), [("cpu", True), ("elsewhere", False)], indirect=["platform"])
def test_every_derivative(platform, with_entropy):
    kwargs = {"where": MASK, "with_entropy": with_entropy, **OPTIONS}
    ours, plain = scalar(linear_log_probs, block_size=9, **kwargs), scalar(dense, **kwargs)
    assert_every_derivative(ours, plain, (FEATURES, KERNEL, BIAS))


@pytest.mark.parametrize("with_entropy", [False, forms(True)])
def test_second_derivatives_where_the_cotangents_are_zero(platform, with_entropy):
    of = functools.partial(linear_log_probs, where=MASK[:6], with_entropy=with_entropy)
    outputs = lambda x: jnp.stack(jax.tree.leaves(of(x, KERNEL, LABELS[:6])))  # noqa: E731
    assert_hessian_where_cotangents_are_zero(outputs, (FEATURES[:6],))


def test_is_jax_and_the_linear_cross_entropy_with_any_batch_axes():
    shape, rows = (2, 4, 5), np.array([True, False])[:, None, None]

    @jax.jit
    def all_of(features, kernel):
        batch = features.reshape(*shape, WIDTH), kernel, LABELS.reshape(shape)
        alone, (log_probs, _) = linear_log_probs(*batch, where=rows), both(*batch, where=rows)
        loss = linear_softmax_cross_entropy(*batch, where=rows, reduction="none")
        of_jax = jax.nn.log_softmax(features @ kernel)[jnp.arange(TOKENS), LABELS]
        return alone, log_probs, -loss, jnp.where(rows, of_jax.reshape(shape), 0)

    outputs = all_of(*singles((FEATURES, KERNEL)))
    for actual in outputs:
        np.testing.assert_allclose(actual, outputs[-1], rtol=2e-5, atol=1e-6)
    np.testing.assert_array_equal(outputs[0], outputs[2])


@pytest.mark.forms
def test_ties_have_the_right_hessian(platform):
    """All logits are equal: the largest is at every class."""
    labels = np.array([0, 2])

    def of_two(fn, x):
        outputs = lambda x: jnp.stack(fn(x, jnp.eye(3), labels, with_entropy=True))  # noqa: E731
        total = lambda x: jnp.array([1.3, 0.7]) @ outputs(x).sum(1)  # noqa: E731
        return jax.grad(total)(x), jax.hessian(total)(x)

    with jax.enable_x64(True):
        of_each = jax.jit(lambda x: [of_two(fn, x) for fn in (linear_log_probs, dense)])
        assert_trees_close(*of_each(np.zeros((2, 3))), rtol=1e-12, atol=1e-14)


# Digits.

LOGITS = np.array([[0, -17, -21], [-3, 40, 2], [7, 7, -30], [-60, -80, 0]], np.float32)
ROWS, LABELS_OF_ROWS = np.repeat(LOGITS, 3, 0), np.tile(np.arange(3), len(LOGITS))


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


def exact_rows(rows, labels):
    return tuple(np.stack(x) for x in zip(*map(exact, rows, labels), strict=True))


@pytest.mark.forms
@pytest.mark.parametrize(("temperature", "entropy"), [(1e-38, 0), (1e38, TOKENS * np.log(CLASSES))])
def test_extreme_temperatures(platform, temperature, entropy):
    of = functools.partial(both, kernel=np.float32(KERNEL), labels=LABELS, temperature=temperature)
    value, gradient = jax.jit(jax.value_and_grad(lambda x: jnp.sum(of(x)[1])))(np.float32(FEATURES) / 8)
    np.testing.assert_allclose(value, entropy, rtol=1e-6)
    assert np.isfinite(gradient).all()


@pytest.mark.forms
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_gradients_have_the_digits_of_their_dtype(platform, dtype):
    args = tuple(a.astype(dtype) for a in (FEATURES, KERNEL, BIAS))
    step = lambda fn: jax.jit(jax.value_and_grad(scalar(fn, where=MASK, with_entropy=True), (0, 1, 2)))  # noqa: E731
    value, gradients = step(linear_log_probs)(*args)
    assert [x.dtype for x in (value, *gradients)] == ["float32", dtype, dtype, dtype]
    with jax.enable_x64(True):
        desired = step(dense)(*(a.astype("float64") for a in args))
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(value, desired[0], rtol=1e-5)
    assert_trees_close(gradients, desired[1], rtol=4 * eps, atol=max(eps, 2e-6))


@pytest.mark.forms
@pytest.mark.parametrize("dtypes", [("bfloat16", "float64", "float32"), ("float64", "bfloat16", "float16")])
def test_mixed_dtypes_and_second_derivatives_are_traced(dtypes):
    with jax.enable_x64(True):
        shapes = zip((FEATURES, KERNEL, BIAS), dtypes, strict=True)
        args = [jax.ShapeDtypeStruct(a.shape, d) for a, d in shapes]
        total = lambda f, k, bias: sum(map(jnp.sum, both(f, k, LABELS, bias=bias)))  # noqa: E731
        assert jax.eval_shape(total, *args).dtype == "float64"
        rows = jax.eval_shape(jax.hessian(total, (0, 1, 2)), *args)
        assert [row[i].dtype for i, row in enumerate(rows)] == list(dtypes)


# What is masked or replaced is gone, and nothing else.


@pytest.mark.forms
@pytest.mark.parametrize("tokens", [TOKENS, 0])
def test_nothing_unmasked_is_zero_whatever_the_kernel_and_the_cotangent(platform, tokens):
    @jax.jit
    def all_of(features, kernel):
        of = functools.partial(both, labels=np.full(tokens, -100), where=np.zeros(tokens, bool))
        infinite_cotangent = lambda *args: jnp.sum(jnp.sqrt(jnp.stack(of(*args))))  # noqa: E731
        return jnp.stack(of(features, kernel)), jax.grad(infinite_cotangent, (0, 1))(features, kernel)

    out = all_of(np.full((tokens, WIDTH), np.nan, np.float32), np.full_like(KERNEL, np.nan, np.float32))
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0), out)
    assert out[0].shape == (2, tokens)


@pytest.mark.parametrize("tokens", [0, forms(3)])
def test_no_tokens_and_no_features(tokens):
    step = jax.jit(jax.value_and_grad(lambda f: jnp.sum(linear_log_probs(f, jnp.ones((0, 4)), jnp.zeros(tokens, int)))))
    value, gradient = step(jnp.ones((tokens, 0)))
    np.testing.assert_allclose(value, -tokens * np.log(4), rtol=1e-6)
    assert gradient.shape == (tokens, 0)


def step_of(kernel=None, bias=None):
    """Outputs, and the gradients of the log-probabilities and of the entropies with respect to the features."""

    @jax.jit
    def step(features, labels, kernel=kernel, bias=bias):
        outputs = lambda f: both(f, kernel, labels, bias=bias, block_size=9)  # noqa: E731
        kept = lambda f: jnp.sum(jnp.where(BAD, 0, sum(outputs(f))))  # noqa: E731
        of_each = [jax.grad(lambda f, k=k: jnp.sum(outputs(f)[k]))(features) for k in (0, 1)]
        return outputs(features), of_each, jax.grad(kept)(features)

    return functools.partial(step, kernel=np.float32(KERNEL), bias=np.float32(BIAS))


@pytest.mark.parametrize("platform", [forms("cpu"), "elsewhere"], indirect=True)
def test_what_is_bad_stays_in_its_row_and_is_gone_if_it_is_replaced(platform):
    """A label out of range, which leaves the entropy; a NaN; and a logit that overflows."""
    step, features = step_of(), np.float32(FEATURES)
    (_, entropies), (_, of_entropies), _ = step(features, LABELS)
    for label in (-1, CLASSES, 2**31 - 1):
        (log_probs, actual), (of_log_probs, d_actual), kept = step(features, np.where(BAD, label, LABELS))
        assert bad_rows(log_probs) == bad_rows(of_log_probs) == [5]
        assert np.isnan(of_log_probs[5]).all()
        assert_trees_close((actual, d_actual), (entropies, of_entropies), rtol=1e-6, atol=1e-7)
        assert np.isfinite(kept).all()
        assert not kept[5].any()
    overflow = np.where(BAD[:, None] & (np.arange(WIDTH) == 0), 3, features * (np.arange(WIDTH) > 0))
    kernel = np.where(np.arange(WIDTH)[:, None] == 0, np.where(np.arange(CLASSES) == 3, 3e38, 0), KERNEL)
    for bad, of_kernel in ((np.where(BAD[:, None], np.nan, features), KERNEL), (overflow, kernel)):
        outputs, gradients, kept = step(bad.astype("float32"), LABELS, kernel=of_kernel.astype("float32"))
        bad_log_probs = bad_rows(np.where(np.isfinite(outputs[0]), 0, np.nan))  # -inf beside another logit of +inf
        assert [bad_log_probs, *map(bad_rows, (outputs[1], *gradients))] == [[5]] * 4
        assert not np.isnan(kept).any()  # a weight of 3e38 gives infinite ones
        assert not kept[5].any()


@pytest.mark.forms
def test_a_bad_logit_is_nan_in_its_own_row_in_forward_mode(platform):
    features = np.where(BAD[:, None], np.nan, FEATURES).astype("float32")
    with masksafe.forward_mode():
        outputs, gradients, _ = step_of()(features, LABELS)
    assert [bad_rows(x) for x in (*outputs, *gradients)] == [[5]] * 4


@pytest.mark.forms
def test_a_label_out_of_range_where_its_log_probability_is_replaced(platform):
    """For tokens that ask for the gradient of the entropy alone."""
    labels = np.where(BAD, -100, LABELS)

    def total(fn, labels_of_fn, features, kernel):
        log_probs, entropies = fn(features, kernel, labels_of_fn, with_entropy=True)
        return jnp.sum(jnp.where(labels >= 0, log_probs, 0) + 0.1 * entropies)

    fns = (functools.partial(linear_log_probs, block_size=9), labels), (dense, LABELS)
    of_each = jax.jit(lambda *args: [jax.grad(functools.partial(total, *fn), (0, 1))(*args) for fn in fns])
    assert_trees_close(*of_each(*singles((FEATURES, KERNEL))), rtol=1e-4, atol=1e-5)


@pytest.mark.forms
def test_symbolic_sizes_can_be_exported_with_a_bad_label_too():
    """There are no blocks, and JAX differentiates all logits."""
    labels = np.where(BAD, -100, LABELS).astype("int32")
    t, d = jax.export.symbolic_shape("t, d")
    shapes = [jax.ShapeDtypeStruct(s, x) for s, x in (((t, d), "float32"), ((d, CLASSES), "float32"), ((t,), "int32"))]

    def step(features, kernel, labels):
        log_probs, entropies = both(features, kernel, labels)
        return jnp.sum(jnp.where(labels >= 0, log_probs, 0) + entropies)

    args, step = (*singles((FEATURES, KERNEL)), labels), jax.jit(jax.grad(step, (0, 1)))
    gradients = jax.export.export(step)(*shapes).call(*args)
    assert np.isfinite(gradients[0]).all()
    assert_trees_close(gradients, step(*args), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_entropy", [True, forms(False)])
def test_excluded_classes(platform, with_entropy):
    """A bias of -inf: the classes are as if they did not exist, and a label there has log p = -inf."""
    excluded = np.isin(np.arange(CLASSES), [LABELS[0], LABELS[0] ^ 1])
    bias = np.where(excluded, -np.inf, BIAS)
    kept = ~np.isin(LABELS, excluded.nonzero()[0])
    renumbered = np.where(kept, (np.cumsum(~excluded) - 1)[LABELS], 0)

    @jax.jit
    def all_of(features, kernel, bias):
        of = functools.partial(linear_log_probs, with_entropy=with_entropy, temperature=0.7)
        removed = jax.tree.leaves(of(features, kernel[:, ~excluded], renumbered, bias=bias[~excluded]))
        total = lambda f, k, b: sum(map(jnp.sum, jax.tree.leaves(of(f, k, LABELS, bias=b, where=kept))))  # noqa: E731
        given = jax.tree.leaves(of(features, kernel, LABELS, bias=bias))
        nothing = jax.tree.leaves(of(features, kernel, LABELS, bias=jnp.full(CLASSES, -jnp.inf)))
        return given, removed, nothing, jax.grad(total, (0, 1, 2))(features, kernel, bias)

    given, removed, nothing, (d_features, d_kernel, d_bias) = all_of(*singles((FEATURES, KERNEL, bias)))
    assert (np.asarray(given[0])[~kept] == -np.inf).all()
    assert_trees_close(given[0][kept], removed[0][kept], rtol=1e-5, atol=1e-6)
    assert_trees_close(given[1:], removed[1:], rtol=1e-5, atol=1e-6)
    assert np.isnan(nothing).all()
    assert all(np.isfinite(g).all() for g in (d_features, d_kernel, d_bias))
    assert not d_bias[excluded].any()
    assert not d_kernel[:, excluded].any()


@pytest.mark.parametrize("loss", [linear_softmax_cross_entropy, forms(both)])
@pytest.mark.parametrize("platform", [forms("cpu"), "elsewhere"], indirect=True)
def test_dead_places_of_a_block_do_not_meet_an_infinite_weight(platform, loss):
    """For negative features the infinite weight excludes class 0; 0 times infinity would be NaN."""
    features, kernel = -np.abs(np.float32(FEATURES[:, :1])), np.array([[np.inf, 0.5, 0.3]], np.float32)
    labels = 1 + LABELS % 2
    total = lambda *args: sum(map(jnp.sum, jax.tree.leaves(loss(*args, labels, where=MASK, block_size=9))))  # noqa: E731
    value, (d_features, d_kernel) = jax.jit(jax.value_and_grad(total, (0, 1)))(features, kernel)
    assert np.isfinite(value)
    assert np.isfinite(d_kernel).all()
    assert d_kernel[0, 0] == 0
    assert np.isfinite(np.asarray(d_features)[~MASK]).all()


# One answer everywhere.


@pytest.mark.forms
def test_memory_is_that_of_a_block_of_tokens(choose):
    choose(linear={"class_tile_elements": 2**20})
    shapes = ((4096, 64), jnp.float32), ((64, 32768), jnp.float32), ((4096,), jnp.int32), ((4096,), jnp.bool_)
    assert_memory_is_that_of_a_block(lambda f, k, y, m: sum(map(jnp.sum, both(f, k, y, where=m))), *shapes)


@pytest.mark.forms
@pytest.mark.parametrize(("with_entropy", "outside"), [(True, True), (True, False), (False, True)])
def test_classes_split_in_a_shard_map(platform, with_entropy, outside):
    def local(features, kernel, bias, labels, where):
        kwargs = {"axis_name": "classes", "block_size": 4, "with_entropy": with_entropy, **OPTIONS}
        outputs = linear_log_probs(features, kernel, labels, bias=bias, where=where, **kwargs)
        return jax.lax.psum(sum(map(jnp.sum, jax.tree.leaves(outputs))), "tokens")

    def plain(features, kernel, bias):
        outputs = dense(features, kernel, LABELS, bias=bias, where=MASK, with_entropy=with_entropy, **OPTIONS)
        return sum(map(jnp.sum, jax.tree.leaves(outputs)))

    mesh = jax.make_mesh((2, 4), ("tokens", "classes"), axis_types=(AxisType.Auto,) * 2)
    specs = (P("tokens"), P(None, "classes"), P("classes"), P("tokens"), P("tokens"))
    if outside:
        step = jax.value_and_grad(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P()), (0, 1, 2))
    else:
        step = jax.value_and_grad(local, (0, 1, 2))
        step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(P(), specs[:3]))
    both_ways = jax.jit(lambda *args: (step(*args), jax.value_and_grad(plain, (0, 1, 2))(*args[:3])))
    assert_trees_close(*both_ways(*singles((FEATURES, KERNEL, BIAS)), LABELS, MASK), rtol=1e-4, atol=1e-5)


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
        [-1e4, -1e4, 0, 1, -1e4, -1e4, -1e4, 2],  # nothing on some devices
        [2, -1e4, 2, 1, 0, 0, 1, 2],
        [0, 1, 0, 0, np.nan, 0, 2, 0],
    ],
    np.float32,
)


def test_ties_between_devices_and_a_bad_logit(platform):
    labels = np.array([0, 6, 7, 0, 3, 7, 1])

    def total(features, kernel, axis_name=None):
        outputs = both(features, kernel, labels, axis_name=axis_name)
        return jnp.sum(outputs[0] * (1 + np.arange(7)) + outputs[1] * (2 + np.arange(7))), jnp.stack(outputs)

    step = jax.jit(jax.grad(split_classes(total), has_aux=True))
    gradient, actual = step(TIED, np.eye(8, dtype="float32"))
    desired = [exact(row, label) for row, label in zip(TIED[:-1], labels, strict=False)]
    np.testing.assert_allclose(actual[:, :-1], np.stack([row[:2] for row in desired], 1), rtol=5e-6, atol=2e-7)
    of_logits = np.stack([(1 + i) * a + (2 + i) * b for i, (_, _, a, b) in enumerate(desired)])
    np.testing.assert_allclose(gradient[:-1], of_logits, rtol=1e-5, atol=2e-6)
    assert np.isnan(actual[:, -1]).all()
    assert np.isnan(gradient[-1]).all()


@pytest.mark.forms
def test_other_derivatives_with_split_classes(platform):
    def derivatives(fn, *args):
        directions, gradient = jax.tree.map(jnp.cos, args), jax.grad(fn, (0, 1))
        along = lambda *args: sum(map(jnp.vdot, gradient(*args), directions))  # noqa: E731
        with masksafe.forward_mode():
            slope = jax.jvp(fn, args, directions)[1]
        return jax.jvp(gradient, args, directions)[1], jax.grad(along, (0, 1))(*args), slope

    split = lambda f, k, axis_name: scalar(both, axis_name=axis_name)(f, k)  # noqa: E731
    fns = split_classes(split), scalar(dense, with_entropy=True)
    of_each = jax.jit(lambda *args: [derivatives(fn, *args) for fn in fns])
    for kernel in (KERNEL, np.zeros_like(KERNEL)):  # ties everywhere
        assert_trees_close(*of_each(*singles((FEATURES, kernel))), rtol=1e-3, atol=1e-4)


SPLITS = {
    "tokens": (P("x"), P(), P(), P("x"), P("x")),
    "classes": (P(), P(None, "y"), P("y"), P(), P()),
    "tokens and classes": (P("x"), P(None, "y"), P("y"), P("x"), P("x")),
    "kernel by features": (P("x"), P("x", "y"), P(), P("x"), P("x")),
}
ON_MESHES = [*itertools.product(SPLITS, [AxisType.Explicit, AxisType.Auto])]


@pytest.mark.forms
@pytest.mark.parametrize(("split", "kind"), ON_MESHES)
def test_arrays_split_over_a_mesh(split, kind):
    @jax.jit
    def step(features, kernel, bias, labels, where):
        def total(f, k, b):
            outputs = both(f, k, labels, bias=b, where=where, block_size=4, **OPTIONS)
            return sum(jnp.sum(jnp.square(x)) for x in outputs), outputs

        return jax.value_and_grad(total, (0, 1, 2), has_aux=True)(features, kernel, bias)

    args = *singles((FEATURES, KERNEL, BIAS)), LABELS, MASK
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        arrays = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(args, SPLITS[split], strict=True)]
        actual = step(*arrays)
    assert_trees_close(actual, step(*args), rtol=2e-5, atol=5e-6)
    if kind == AxisType.Explicit:
        assert {jax.typeof(x).sharding.spec for x in actual[0][1]} == {P("x") if split != "classes" else P(None)}
