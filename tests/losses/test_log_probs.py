"""Log-probabilities of labels and the entropy, from logits: what the contract's table does not prove."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from masksafe._core import platforms
from masksafe.losses import log_probs, softmax_cross_entropy_with_integer_labels

NAN, INF = jnp.nan, jnp.inf
RNG = np.random.default_rng(0)
LOGITS = np.float32(3 * RNG.normal(size=(4, 7)))
LABELS = np.array([0, 5, 6, 2])
ROWS = np.array([True, False, True, True])
CLASSES = np.array(
    [[1, 1, 1, 0, 0, 1, 0], [0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0]], dtype=bool
)
both = functools.partial(log_probs, with_entropy=True)
forms = functools.partial(pytest.param, marks=pytest.mark.forms)


def alone(*args, **kwargs):
    return (log_probs(*args, **kwargs),)


@pytest.fixture(params=["blocks", forms("one pass")], scope="module")
def blocks(request):
    sizes = {"row_block_elements": 8, "most_elements_in_one_pass": 16}
    with platforms.chosen(**sizes if request.param == "blocks" else {}):
        yield


def expand(where):
    return np.broadcast_to(where if where.ndim == 2 else where[:, None], (4, 7))


def reference(logits, labels, where=True, temperature=1.0):
    """In float64: log p, H, and their derivatives with respect to the logits; classes last."""
    x = np.where(where, np.asarray(logits, np.float64), -np.inf) / temperature
    largest = np.max(x, -1, keepdims=True)
    live = np.isfinite(largest)
    z = np.where(live, x - np.where(live, largest, 0), 0)
    e = np.where(where, np.exp(z), 0)
    others = e.copy()
    np.put_along_axis(others, np.argmax(z, -1)[..., None], 0, -1)  # 1 + s keeps the digits of s if 1 is added last
    s = others.sum(-1, keepdims=True)
    log_sum, p = np.where(live, np.log1p(s), 0), e / (1 + s)
    gaps = np.where(e > 0, -z, 0)
    mean_gap = np.sum(p * gaps, -1, keepdims=True)
    at_label = np.arange(x.shape[-1]) == np.asarray(labels)[..., None]
    log_p = np.where(live[..., 0], np.sum(np.where(at_label, z, 0), -1) - log_sum[..., 0], 0)
    of_log_p = np.where(at_label & where, -np.expm1(log_p)[..., None], -p)
    of_entropy = p * (gaps - mean_gap)
    return log_p, (log_sum + mean_gap)[..., 0], *(np.where(live, d, 0) / temperature for d in (of_log_p, of_entropy))


@functools.partial(jax.jit, static_argnums=0)
def results_and_gradients(fn, *args):
    results = fn(*args)
    gradient = lambda i: jax.grad(lambda x: fn(x, *args[1:])[i].astype(jnp.float32).sum())(args[0])  # noqa: E731
    return *results, *(gradient(i) for i in range(len(results)))


# Values, gradients and digits.


@pytest.mark.parametrize(
    ("dtype", "where", "temperature"),
    [
        ("bfloat16", CLASSES, 0.7),
        *(forms(*case) for case in (("bfloat16", None, 1.0), ("float32", ROWS, 1.0), ("float16", CLASSES, 3.0))),
        *itertools.starmap(forms, [("float32", None, 2.5), ("float32", None, 1e-4)]),
    ],
)
def test_results_and_gradients_are_those_of_float64(dtype, where, temperature, blocks):
    labels = LABELS if where is not CLASSES else CLASSES.argmax(-1)
    options = {"where": where, "temperature": temperature}
    of_each = [
        results_and_gradients(functools.partial(fn, **options), LOGITS.astype(dtype), labels) for fn in (both, alone)
    ]
    expected = reference(LOGITS.astype(dtype), labels, True if where is None else expand(where), temperature)
    for a, e in zip((*of_each[0], *of_each[1]), (*expected, expected[0], expected[2]), strict=True):
        assert a.dtype == ("float32" if a.ndim == 1 else dtype)
        np.testing.assert_allclose(np.asarray(a, float), e, rtol=0.6 * float(jnp.finfo(a.dtype).eps) + 3e-6, atol=1e-7)


@pytest.mark.parametrize(("offset", "scale"), [forms(0, 1), forms(0, 15), (1e4, 1)])
def test_the_error_is_at_most_twice_that_of_the_formula(offset, scale, blocks):
    """The log_prob and the entropy of distrax.Categorical."""
    rng = np.random.default_rng(0)
    logits = np.float32(offset + scale * rng.normal(size=(64, 50)))
    labels = rng.integers(0, 50, 64)

    def formula(x, labels):
        log_p = jax.nn.log_softmax(x)
        return jnp.take_along_axis(log_p, labels[:, None], -1)[:, 0], -jnp.sum(jnp.exp(log_p) * log_p, -1)

    with jax.enable_x64(True):
        exact = jax.tree.map(np.asarray, results_and_gradients(formula, jnp.asarray(logits, float), labels))
    ours, theirs = (results_and_gradients(fn, logits, labels) for fn in (both, formula))
    for a, b, e in zip(ours, theirs, exact, strict=True):
        few_ulp = 4 * np.finfo(np.float32).eps * max(1, np.abs(e).max())
        assert np.abs(a - e).max() <= max(2 * np.abs(b - e).max(), few_ulp)


def test_a_common_offset_cancels(blocks):
    expected = results_and_gradients(both, LOGITS.round(), LABELS)
    for offset in (1e5, -1e6):
        actual = results_and_gradients(both, LOGITS.round() + np.float32(offset), LABELS)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=1e-7), actual, expected)


def test_it_is_the_negative_cross_entropy(blocks):
    of = jax.jit(lambda x: (log_probs(x, LABELS), -softmax_cross_entropy_with_integer_labels(x, LABELS)))
    np.testing.assert_allclose(*of(LOGITS), rtol=1e-6)


@pytest.mark.parametrize("axis", [(2, 0), forms(1), forms((0, 1))])
def test_any_axes_and_labels_that_broadcast(axis):
    axes, rng = axis if isinstance(axis, tuple) else (axis,), np.random.default_rng(1)
    logits, where = np.float32(rng.normal(size=(3, 4, 5))), rng.random((3, 4, 5)) < 0.8
    moved, mask = (np.moveaxis(a, axes, range(-len(axes), 0)) for a in (logits, where))
    rows = moved.shape[: 3 - len(axes)]
    moved, mask = moved.reshape(*rows, -1), mask.reshape(*rows, -1)
    labels = np.zeros((1,) * len(rows), int)
    mask[..., 0] = True
    where = np.moveaxis(mask.reshape([*rows, *(logits.shape[a] for a in axes)]), range(-len(axes), 0), axes)
    actual = jax.jit(functools.partial(both, axis=axis))(logits, labels, where=where)
    for a, e in zip(actual, reference(moved, np.broadcast_to(labels, rows), mask), strict=False):
        np.testing.assert_allclose(a, e, rtol=1e-5)


# What is masked is gone; what is bad shows in its own row.


@pytest.mark.parametrize("shape", [(3, 0), *map(forms, [(0, 3), (1,), (2, 1)])])
def test_any_size_works(shape):
    for fn in (both, alone):
        for result in results_and_gradients(fn, np.ones(shape, np.float32), np.zeros(shape[:-1], int)):
            np.testing.assert_array_equal(result, 0)


def test_a_gradient_is_zero_where_masked_or_replaced_whatever_the_cotangent():
    kept = np.array([True, False, False, True])

    @jax.jit
    def all_of(x, labels, d):
        total = lambda x: sum(jnp.where(kept, result, 0).sum() for result in both(x, labels))  # noqa: E731
        return jax.vjp(lambda x: both(x, LABELS, where=CLASSES), x)[1]((d, d))[0], jax.grad(total)(x)

    bad = np.where(np.arange(28).reshape(4, 7) == 10, NAN, LOGITS), np.where(np.arange(4) == 2, -100, LABELS)
    for cotangent in (INF, NAN):
        masked, replaced = all_of(*bad, jnp.full(4, cotangent, jnp.float32))
        np.testing.assert_array_equal(masked[~CLASSES], 0)
        assert np.isfinite(replaced).all()
        np.testing.assert_array_equal(replaced[~kept], 0)


@pytest.mark.parametrize(
    ("bad", "label", "log_p"), [(NAN, 0, NAN), (NAN, 1, NAN), (INF, 0, NAN), (INF, 1, -INF), (-INF, 0, -INF)]
)
def test_a_bad_logit_shows_in_its_own_row_only(bad, label, log_p, blocks):
    logits, labels = LOGITS.copy(), LABELS.copy()
    logits[2, 0], labels[2] = bad, label
    results = results_and_gradients(both, logits, labels)
    np.testing.assert_array_equal(results[0][2], log_p)
    np.testing.assert_array_equal(results[0][2], jax.jit(log_probs)(logits, labels)[2])
    if bad == -INF:  # a class of probability 0
        np.testing.assert_allclose(results[1], reference(logits, labels)[1], rtol=1e-6)
        assert results[3][2, 0] == 0
        assert np.isfinite(results[2]).all()
        assert np.isfinite(results[3]).all()
    else:
        assert all(np.isnan(result[2]).all() for result in results[1:])
    rest = [0, 1, 3]
    for changed, same in zip(results, results_and_gradients(both, LOGITS, LABELS), strict=True):
        np.testing.assert_array_equal(np.asarray(changed)[rest], np.asarray(same)[rest])


def test_a_bad_label_makes_its_log_probability_nan_and_leaves_the_entropy(blocks):
    expected = reference(LOGITS, LABELS)
    for bad in (-1, 7, -100, 2**31 - 1):
        labels = np.where(np.arange(4) == 1, bad, LABELS)
        log_p, entropy, of_log_p, of_entropy = results_and_gradients(both, LOGITS, labels)
        np.testing.assert_array_equal(np.isnan(log_p), np.arange(4) == 1)
        np.testing.assert_array_equal(np.isnan(of_log_p), np.broadcast_to(np.arange(4)[:, None] == 1, (4, 7)))
        np.testing.assert_allclose(entropy, expected[1], rtol=1e-6)
        np.testing.assert_allclose(of_entropy, expected[3], rtol=1e-5, atol=1e-7)


# Derivatives, devices and programs.


@pytest.mark.forms
@pytest.mark.parametrize("masked", [False, True])
def test_value_and_gradient_lower_for_cuda_without_a_loop(masked):
    logits, labels = jax.ShapeDtypeStruct((4096, 512), "bfloat16"), jax.ShapeDtypeStruct((4096,), "int32")
    where = jax.ShapeDtypeStruct((4096, 512), bool) if masked else None
    total = lambda x, y, w: sum(r.astype(jnp.float32).mean() for r in both(x, y, where=w))  # noqa: E731
    exported = jax.export.export(jax.jit(jax.value_and_grad(total)), platforms=["cuda"])(logits, labels, where)
    assert "while" not in exported.mlir_module()


@pytest.mark.forms
@pytest.mark.parametrize("with_entropy", [True, forms(False)])
def test_no_temporary_of_the_logits_size(with_entropy, choose):
    choose(row_block_elements=2**18, most_elements_in_one_pass=2**19)
    logits, labels = jax.ShapeDtypeStruct((2048, 4096), "float32"), jax.ShapeDtypeStruct((2048,), "int32")
    fn = functools.partial(log_probs, with_entropy=with_entropy, temperature=0.7)
    total = lambda x, y: sum(r.mean() for r in jax.tree.leaves(fn(x, y)))  # noqa: E731
    compiled = jax.jit(jax.value_and_grad(total)).lower(logits, labels).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.2 * 2048 * 4096 * 4


@pytest.mark.forms
def test_no_false_alarm_of_debug_nans_and_checkify(blocks):
    logits, labels = jnp.where(CLASSES, LOGITS, NAN), np.where(CLASSES.any(-1), CLASSES.argmax(-1), -100)
    step = jax.value_and_grad(lambda x: sum(r.sum() for r in both(x, labels, where=CLASSES)))
    error, _ = jax.jit(checkify.checkify(step, errors=checkify.all_checks))(logits)
    error.throw()
    with jax.debug_nans(True):
        assert all(np.isfinite(x).all() for x in step(logits))


@pytest.mark.parametrize(
    ("error", "text", "args", "kwargs"),
    [
        (TypeError, "logits: got dtype int", (LABELS, LABELS), {}),
        (ValueError, "labels: got shape", (LOGITS, LABELS[0]), {}),
        (ValueError, "logits and labels: got shapes", (LOGITS, LABELS[:3]), {}),
        (TypeError, "axis: got type NoneType", (LOGITS, LABELS), {"axis": None}),
        (ValueError, "temperature: got value 0.0", (LOGITS, LABELS), {"temperature": 0}),
        (ValueError, "temperature: got value -1.0", (LOGITS, LABELS), {"temperature": -1}),
        (ValueError, "temperature: got value nan", (LOGITS, LABELS), {"temperature": np.nan}),
        (ValueError, "temperature: got value inf", (LOGITS, LABELS), {"temperature": np.inf}),
        (TypeError, "temperature: got type str", (LOGITS, LABELS), {"temperature": "1"}),
    ],
)
def test_bad_arguments_are_refused(error, text, args, kwargs):
    with pytest.raises(error, match=f"log_probs: {text}"):
        log_probs(*args, **kwargs)


def test_a_traced_temperature_is_refused():
    with pytest.raises(TypeError, match=r"log_probs: temperature: got a traced array; expected a number that is known"):
        jax.jit(lambda t: log_probs(LOGITS, LABELS, temperature=t))(1.0)
