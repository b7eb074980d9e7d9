"""Log-probabilities of several labels of a row, which share its softmax: of logits, of a linear layer, of kept sets."""

import functools

import jax
import jax.numpy as jnp
import linear_cases as cases
import numpy as np
import pytest
from comparisons import assert_close, assert_same_bits
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from linear_cases import BIAS, CLASS_MASK, CLASSES, FEATURES, KERNEL, MASK, TOKENS
from tiers import parametrize

import masksafe
from masksafe.losses import linear_log_probs, log_probs

RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, CLASSES, (TOKENS, 3))
LABELS[:, 2] = LABELS[:, 0]  # twice the same
IDS = np.concatenate([LABELS[:, :2], RNG.integers(-1, CLASSES, (TOKENS, 4))], 1)
LAYER = cases.singles({"features": FEATURES, "kernel": KERNEL, "bias": BIAS})
LOGITS = {"logits": np.float32(FEATURES @ KERNEL + BIAS)}
COTANGENTS = np.float32(RNG.normal(size=(TOKENS, 4)))

CASES = {
    "log_probs": (log_probs, LOGITS, {"where": MASK[:, None] & CLASS_MASK, "temperature": 0.7}),
    "log_probs, kept ids": (log_probs, LOGITS, {"where": MASK, "kept_ids": IDS}),
    "linear_log_probs": (
        linear_log_probs,
        LAYER,
        {"where": MASK, "class_mask": CLASS_MASK, "temperature": 0.7, "logit_soft_cap": 3.0, "block_size": 9},
    ),
    "linear_log_probs, kept ids": (
        linear_log_probs,
        LAYER,
        {"kept_ids": IDS, "class_mask": CLASS_MASK, "logit_soft_cap": 3.0},
    ),
}

pytestmark = pytest.mark.usefixtures("small_tiles")


def rows_of(arrays):
    """The name of the array that has a row for each output."""
    return "logits" if "logits" in arrays else "features"


def weighted(outputs):
    """A sum with cotangents of their own of the log-probabilities but those of -inf, and of the entropies."""
    log_p, entropies = outputs[:2]
    total = jnp.sum(jnp.where(jnp.isfinite(log_p), log_p, 0) * COTANGENTS[:, :3])
    return total + jnp.sum(entropies * COTANGENTS[:, 3])


def one_by_one(op, labels, **options):
    each = [op(labels=labels[..., k], with_entropy=True, **options) for k in range(labels.shape[-1])]
    return jnp.stack([log_p for log_p, _ in each], -1), each[0][1]


@pytest.mark.parametrize("case", CASES)
def test_each_is_that_of_a_call_of_its_own(case, platform):
    op, arrays, options = CASES[case]

    @jax.jit
    def run(arrays):
        calls = functools.partial(op, with_entropy=True), functools.partial(one_by_one, op)
        step = lambda call, arrays: (lambda out: (weighted(out), out))(call(labels=LABELS, **arrays, **options))  # noqa: E731
        return [jax.value_and_grad(functools.partial(step, call), has_aux=True)(arrays) for call in calls]

    actual, desired = run(arrays)
    assert np.isinf(actual[0][1][0]).any() == ("class_mask" in options or options["where"].ndim > 1)
    assert_close(actual, desired, rtol=2e-5, atol=2e-6)
    assert_same_bits(actual[0][1][0][:, 0], actual[0][1][0][:, 2])


def test_large_logits_take_no_digits():
    """Of which the logsumexp would keep three."""
    logits = np.float32([[3e4, 3e4 - 8, 3e4 - 9, -3e4]])
    np.testing.assert_allclose(
        log_probs(logits, np.array([[0, 1, 2, 3]])),
        [-np.log1p(np.exp(-8) + np.exp(-9)) - np.array([0, 8, 9, 6e4])],
        rtol=1e-6,
        atol=1e-7,
    )


def test_a_label_computed_in_another_way_is_never_more_probable_than_certain():
    """The logit of the label comes from a sum, that of the softmax from a matrix product."""
    features = np.float32(RNG.normal(size=(200, 300)))
    kernel = np.float32(np.stack([features[0] * 0.3, -features[0]], 1)) + np.float32(1e-3) * features[1:3].T
    log_p = linear_log_probs(features, kernel, np.tile([0, 1], (200, 1)))
    assert log_p.max() <= 0


@parametrize("case", ["log_probs", "linear_log_probs, kept ids"], exhaustive=CASES)
def test_bad_labels(case):
    """Each is NaN, also in the gradient of its row, until it is replaced; and an error if labels are checked."""
    op, arrays, options = CASES[case]
    row = int(np.flatnonzero(MASK)[2])
    bad = LABELS.copy()
    bad[row, 1] = -1
    bad[~MASK] = -100
    options = options | {"where": options.get("where", MASK)}

    @jax.jit
    def run(arrays, labels, keeps):
        def total(arrays):
            log_p = op(labels=labels, **arrays, **options)
            return jnp.sum(
                jnp.where(jnp.isfinite(log_p) | jnp.isnan(log_p), masksafe.keep(log_p, where=keeps), 0)
            ), log_p

        return jax.value_and_grad(total, has_aux=True)(arrays)

    everything, first = np.ones_like(bad, bool), rows_of(arrays)
    (_, log_p), gradients = run(arrays, bad, everything)
    assert np.argwhere(np.isnan(log_p)).tolist() == [[row, 1]]
    assert cases.bad_rows(gradients[first]) == [row]
    keeps = bad >= 0
    assert_same_bits(run(arrays, bad, keeps)[1], run(arrays, np.where(keeps, bad, LABELS), keeps)[1])
    text = rf"{op.__name__}: 1 of \d+ labels are outside \[0, {CLASSES}\); first at \({row}, 1\): -1 "
    with masksafe.label_checks("raise"), pytest.raises(ValueError, match=text):
        op(labels=bad, **arrays, **options)


def test_checks_report_labels_at_masked_classes():
    masked_class = int(np.flatnonzero(~CLASS_MASK)[0])
    labels = np.where(np.arange(3) == 1, masked_class, int(np.flatnonzero(CLASS_MASK)[0])) * np.ones_like(LABELS)
    for case in ("log_probs", "linear_log_probs"):
        op, arrays, options = CASES[case]
        with masksafe.label_checks("raise"), pytest.raises(ValueError, match="labels are at a masked class; first at"):
            op(labels=labels, **arrays, **options)
    op, arrays, options = CASES["linear_log_probs, kept ids"]
    with masksafe.label_checks("raise"), pytest.raises(ValueError, match="labels are masked or not among kept_ids"):
        op(labels=labels, **arrays, **options)


@parametrize("case", ["log_probs", "linear_log_probs, kept ids"], exhaustive=CASES)
def test_a_nan_stays_in_its_row(case):
    op, arrays, options = CASES[case]
    first, row = rows_of(arrays), int(np.flatnonzero(MASK)[3])
    dirty = arrays | {first: np.where(np.arange(TOKENS)[:, None] == row, np.nan, arrays[first]).astype(np.float32)}

    @jax.jit
    def run(arrays, cotangents):
        out, pull_back = jax.vjp(lambda x: op(labels=LABELS, **x, **options), arrays)
        return out, pull_back(cotangents)[0]

    replaced = np.where(np.arange(TOKENS)[:, None] == row, 0, COTANGENTS[:, :3])
    (out, gradients), clean = (run(x, replaced) for x in (dirty, arrays))
    assert np.isnan(out[row]).all()
    assert_same_bits(np.delete(out, row, 0), np.delete(clean[0], row, 0))
    assert not gradients[first][row].any()
    assert_close(gradients, clean[1], rtol=0, atol=0)


@parametrize("case", ["log_probs, kept ids"], exhaustive=CASES)
def test_nothing_masked_is_an_alarm_of_eager_code(case):
    """To the searches for NaN and, of logits, for infinities, which look at what the reverse pass keeps."""
    op, arrays, options = CASES[case]
    options, labels = options | {"where": options.get("where", MASK)}, np.where(MASK[:, None], LABELS, -100)
    finite = np.isfinite(op(labels=labels, **arrays, **options))
    total = lambda x: jnp.sum(masksafe.keep(op(labels=labels, **x, **options), where=finite))  # noqa: E731
    with jax.debug_nans(True), jax.debug_infs(op is log_probs and finite.all()):
        gradients = jax.grad(total)(arrays)
    assert np.any(gradients[rows_of(arrays)])


def test_shapes():
    labels = LABELS[:1].astype(np.uint8)  # which broadcasts to the rows of logits
    assert_close(log_probs(**LOGITS, labels=labels), log_probs(**LOGITS, labels=np.tile(labels, (TOKENS, 1))))
    last = np.moveaxis(LOGITS["logits"].reshape(TOKENS, 4, 6), 0, -1)
    assert_close(log_probs(last, LABELS, (0, 1)), log_probs(**LOGITS, labels=LABELS))
    assert linear_log_probs(**LAYER, labels=LABELS[:, :0]).shape == (TOKENS, 0)
    assert not log_probs(np.zeros((2, 0), np.float32), np.zeros((2, 3), int)).any()
    assert linear_log_probs(LAYER["features"][0], KERNEL, LABELS[0]).shape == (3,)
    with pytest.raises(ValueError, match=r"log_probs: labels: got shape \(40, 3, 1\); expected rank 1"):
        log_probs(**LOGITS, labels=LABELS[..., None])
    with pytest.raises(ValueError, match=r"linear_log_probs: labels: got shape \(2, 3\)"):
        linear_log_probs(**LAYER, labels=LABELS[:2])


@cases.over_meshes
def test_devices(split, kind):
    def outputs_of(layer, others, **axis_name):
        return linear_log_probs(**layer, **others, with_entropy=True, temperature=0.7, **axis_name)

    cases.assert_same_over_devices(split, kind, outputs_of, weighted, LAYER, {"labels": LABELS})


@pytest.mark.parametrize("kept", [False, True])
def test_logits_on_an_explicit_mesh(kept):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    rows, options = slice(0, TOKENS // 2 * 2), {"kept_ids": IDS[: TOKENS // 2 * 2]} if kept else {}
    step = jax.jit(jax.value_and_grad(lambda x, labels: log_probs(x, labels, **options).mean(where=MASK[rows, None])))
    x, labels = LOGITS["logits"][rows], LABELS[rows, :2]
    desired = step(x, labels)
    with jax.set_mesh(mesh):
        actual = step(*(jax.device_put(a, NamedSharding(mesh, P("x"))) for a in (x, labels)))
    assert_close(actual, desired)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_digits_of_16_bits(case, dtype):
    op, arrays, options = CASES[case]
    arrays = {name: x.astype(dtype) for name, x in arrays.items()}
    step = jax.jit(jax.value_and_grad(lambda x: weighted(op(labels=LABELS, with_entropy=True, **x, **options))))
    value, gradients = step(arrays)
    assert {name: d.dtype for name, d in gradients.items()} == dict.fromkeys(arrays, dtype)
    with jax.enable_x64(True):
        exact = step(jax.tree.map(np.float64, arrays))
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(value, exact[0], rtol=1e-5)
    assert_close(gradients, exact[1], rtol=4 * eps, atol=4 * eps)
