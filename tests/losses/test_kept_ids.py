"""Log-probabilities over a kept set of classes of each token: of logits, and of a linear layer."""

import functools

import jax
import jax.numpy as jnp
import linear_cases as cases
import numpy as np
import pytest
from comparisons import assert_close, assert_same_bits
from jax.experimental import checkify
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from linear_cases import BIAS, CLASS_MASK, CLASSES, COTANGENTS, FEATURES, KERNEL, LABELS, MASK, TOKENS
from tiers import parametrize

import masksafe
from masksafe.losses import linear_log_probs, log_probs

RNG = np.random.default_rng(0)
IDS = np.where(RNG.random((TOKENS, 6)) < 0.7, RNG.integers(0, CLASSES, (TOKENS, 6)), -1)
IDS[:, 0] = LABELS
EMPTY, ONE, NOT_KEPT = np.flatnonzero(MASK)[:3]  # sets of nothing, of one class, and without the label
IDS[EMPTY], IDS[ONE], IDS[NOT_KEPT] = -1, LABELS[ONE], (LABELS[NOT_KEPT] + 1 + np.arange(6)) % CLASSES
IS_KEPT = (IDS[:, :, None] == np.arange(CLASSES)).any(1)
LAYER = {"features": FEATURES, "kernel": KERNEL, "bias": BIAS}
TEMPERED = {"logit_soft_cap": 3.0, "temperature": 0.7}
SINGLE = cases.singles(LAYER)

pytestmark = pytest.mark.usefixtures("small_tiles")
all_outputs = functools.partial(linear_log_probs, labels=LABELS, with_entropy=True, with_predictions=True)


def logits_of(layer):
    x = layer["features"] @ layer["kernel"] + layer["bias"]
    return 3 * jnp.tanh(x / 3) / 0.7


def expected(logits, counts, labels=LABELS):
    """The log-probabilities, entropies, predictions and logsumexps, row by row, of the classes that count."""
    rows = []
    for x, left, label in zip(np.asarray(logits, np.float64), counts, labels, strict=True):
        if not left.any():
            rows.append((0, 0, -1, 0))
            continue
        lse = np.log(np.exp(x[left]).sum())
        log_p = x[left] - lse
        at_label = x[label] - lse if left[label] else -np.inf
        rows.append((at_label, -(np.exp(log_p) * log_p).sum(), np.flatnonzero(left)[x[left].argmax()], lse))
    return [np.array(column) for column in zip(*rows, strict=True)]


def weighted(outputs):
    """A sum of the log-probabilities, but that of -inf, and the entropies, with cotangents of their own."""
    return sum(
        jnp.sum(jnp.where(jnp.isfinite(x), x, 0) * COTANGENTS[i].astype(x.dtype)) for i, x in enumerate(outputs[:2])
    )


def by_a_mask(layer, where, counts):
    """The same sum by the mask of all classes."""
    return weighted(log_probs(logits_of(layer), LABELS, where=counts & where[:, None], with_entropy=True))


def test_a_linear_layer(platform):
    """With all options and all masks."""
    options = {"kept_ids": IDS, "where": MASK, "class_mask": CLASS_MASK, "block_size": 9, **TEMPERED}
    counts = IS_KEPT & CLASS_MASK

    @jax.jit
    def run(layer):
        fn = lambda layer: (lambda out: (weighted(out), out))(all_outputs(**layer, **options))  # noqa: E731
        return jax.value_and_grad(fn, has_aux=True)(layer)

    (_, outputs), gradients = run(SINGLE)
    for actual, desired in zip(outputs, expected(logits_of(LAYER), counts & MASK[:, None]), strict=True):
        np.testing.assert_allclose(actual, desired, rtol=2e-5, atol=2e-6)
    with jax.enable_x64(True):
        exact = jax.jit(jax.grad(by_a_mask))(LAYER, MASK, counts)
    assert_close(gradients, exact, rtol=2e-5, atol=2e-6)
    assert outputs[2].dtype == jnp.int32
    is_never_kept = ~(counts & MASK[:, None]).any(0)
    assert not gradients["kernel"][:, is_never_kept].any()


def test_logits_whose_mask_and_set_must_both_hold():
    """The classes lie on two axes, in front of the tokens."""
    where, logits = RNG.random((TOKENS, CLASSES)) < 0.8, np.float32(logits_of(LAYER))
    counts = IS_KEPT & where
    in_front = lambda x: np.moveaxis(x.reshape(TOKENS, 4, 6), 0, -1)  # noqa: E731

    @jax.jit
    def run(x, where):
        fn = lambda x: (  # noqa: E731
            lambda out: (weighted(out), out)
        )(log_probs(x, LABELS, (0, 1), where, kept_ids=IDS, with_entropy=True, temperature=0.5))
        return jax.value_and_grad(fn, has_aux=True)(x)

    (_, outputs), gradient = run(in_front(logits), in_front(where))
    for actual, desired in zip(outputs, expected(logits / 0.5, counts)[:2], strict=True):
        np.testing.assert_allclose(actual, desired, rtol=2e-5, atol=2e-6)
    with jax.enable_x64(True):
        total = lambda x: weighted(log_probs(x / 0.5, LABELS, where=counts, with_entropy=True))  # noqa: E731
        exact = jax.jit(jax.grad(total))(np.float64(logits))
    np.testing.assert_allclose(gradient, in_front(np.asarray(exact)), rtol=2e-5, atol=2e-6)
    assert not gradient[~in_front(counts)].any()
    garbage = run(in_front(np.where(counts, logits, np.nan)), in_front(where))
    assert_same_bits(garbage, ((weighted(outputs), outputs), gradient))


@jax.jit
def with_gradients(layer, ids, labels, cotangents):
    """Of a linear layer and of its logits."""

    def of_logits(layer):
        return log_probs(layer["logits"], labels, kept_ids=ids, with_entropy=True)

    def of_layer(layer):
        return linear_log_probs(**layer, labels=labels, kept_ids=ids, with_entropy=True)

    layer, logits = {name: x for name, x in layer.items() if name != "logits"}, {"logits": layer["logits"]}
    results = [jax.vjp(fn, arrays) for fn, arrays in ((of_logits, logits), (of_layer, layer))]
    return [(outputs, pull_back(cotangents)[0]) for outputs, pull_back in results]


WITH_LOGITS = SINGLE | {"logits": np.float32(FEATURES @ KERNEL + BIAS)}
ONES = (np.ones(TOKENS, np.float32), np.arange(TOKENS, dtype=np.float32))
run = functools.partial(with_gradients, labels=LABELS, cotangents=ONES)


def test_a_set_has_no_order_and_no_repetition():
    ids = np.concatenate([IDS, np.full_like(IDS, -1)], 1)
    again = np.random.default_rng(1).permuted(np.concatenate([IDS, IDS], 1), axis=1)
    assert_same_bits(run(WITH_LOGITS, again), run(WITH_LOGITS, ids))


def test_a_class_has_no_influence_where_it_is_not_kept():
    """Some tokens keep the class whose column and logits are NaN."""
    column = int(IS_KEPT.sum(0).argmax())
    reached = IS_KEPT[:, column]
    dirty = {
        k: np.where(np.arange(x.shape[-1]) == column, np.nan, x) for k, x in WITH_LOGITS.items() if k != "features"
    }
    clean, dirty = (run(WITH_LOGITS | changed, IDS) for changed in ({}, dirty))
    for (outputs, gradients), (dirty_outputs, dirty_gradients) in zip(clean, dirty, strict=True):
        for x, y in zip(outputs, dirty_outputs, strict=True):
            assert_same_bits(x[~reached], y[~reached])
            assert np.isnan(y[reached]).all()
        for name in {"features", "logits"} & gradients.keys():
            assert_same_bits(gradients[name][~reached], dirty_gradients[name][~reached])
    never = WITH_LOGITS | {"logits": np.where(IS_KEPT, WITH_LOGITS["logits"], np.nan)}
    unused = ~IS_KEPT.any(0)
    unused[column] |= not unused.any()
    rows = ~IS_KEPT[:, unused].any(1)
    ids = np.where(rows[:, None], IDS, -1)
    never |= {name: np.where(unused, np.nan, WITH_LOGITS[name]) for name in ("kernel", "bias")}
    assert_same_bits(run(never, ids), run(WITH_LOGITS, ids))


def test_derivatives_of_a_class_that_nobody_keeps():
    """Of all orders, along NaN; it is the class whose logit stands where nothing is kept."""
    ids, labels = np.where(IDS == 0, -1, IDS), np.where(LABELS == 0, 1, LABELS)

    @jax.jit
    def run(layer, along):
        def outputs_of(layer):
            return linear_log_probs(**layer, labels=labels, kept_ids=ids, with_entropy=True)

        with masksafe.forward_mode():
            tangents = jax.jvp(outputs_of, (layer,), (along,))[1]
        return tangents, jax.jvp(jax.grad(lambda layer: weighted(outputs_of(layer))), (layer,), (along,))

    along = jax.tree.map(np.cos, SINGLE)
    at_0 = lambda x, number: np.where(np.arange(CLASSES) == 0, np.float32(number), x)  # noqa: E731
    filled = lambda tree, number: tree | {name: at_0(tree[name], number) for name in ("kernel", "bias")}  # noqa: E731
    clean = run(filled(SINGLE, 0), filled(along, 0))
    for number in (np.nan, np.inf):
        assert_same_bits(run(filled(SINGLE, number), filled(along, number)), clean)


@pytest.mark.parametrize("bad", [CLASSES, -2, 2**31 - 1])
def test_an_id_out_of_range_is_nan_in_its_row_and_gone_if_it_is_replaced(bad):
    at = NOT_KEPT + 1
    ids = np.where((np.arange(TOKENS)[:, None] == at) & (np.arange(6) == 2), bad, IDS)
    for outputs, gradients in run(WITH_LOGITS, ids):
        assert all(cases.bad_rows(x) == [at] for x in outputs)
        assert all(cases.bad_rows(gradients[name]) == [at] for name in {"features", "logits"} & gradients.keys())
    replaced = tuple(np.where(np.arange(TOKENS) == at, 0, x).astype(x.dtype) for x in ONES)
    gradients = [of[1] for of in with_gradients(WITH_LOGITS, ids, LABELS, replaced)]
    assert_same_bits(gradients, [of[1] for of in with_gradients(WITH_LOGITS, IDS, LABELS, replaced)])
    alone = np.where(np.arange(TOKENS)[:, None] == at, bad, IDS)  # nothing else in the set
    for outputs, gradients in run(WITH_LOGITS, alone):
        found = [*outputs, *(gradients[name] for name in {"features", "logits"} & gradients.keys())]
        assert all(cases.bad_rows(x) == [at] for x in found)


@pytest.mark.exhaustive
def test_second_derivatives_of_a_row_that_is_replaced():
    """Whose features and one of whose ids are bad."""
    at, bad = NOT_KEPT + 1, np.arange(TOKENS) == NOT_KEPT + 1
    ids = np.where(bad[:, None] & (np.arange(6) == 2), CLASSES, IDS)

    @jax.jit
    def run(layer, ids):
        def total(layer):
            outputs = linear_log_probs(**layer, labels=LABELS, kept_ids=ids, with_entropy=True)
            return weighted([jnp.where(bad, 0, x) for x in outputs])

        return jax.grad(total)(layer), jax.jvp(jax.grad(total), (layer,), (jax.tree.map(jnp.cos, layer),))[1]

    features = np.where(bad[:, None], np.nan, SINGLE["features"]).astype(np.float32)
    dirty, clean = run(SINGLE | {"features": features}, ids), run(SINGLE, np.where(bad[:, None], -1, IDS))
    assert not dirty[0]["features"][at].any()
    assert clean[1]["kernel"].any()
    for name in ("kernel", "bias"):
        assert_close([x[name] for x in dirty], [x[name] for x in clean], rtol=1e-5, atol=1e-6)


def test_labels():
    """One that is not kept has no probability; one out of range is NaN, but not in the entropy, nor in an empty set."""
    labels = np.where(np.isin(np.arange(TOKENS), [EMPTY, ONE]), -100, LABELS)
    for (log_p, entropies), _ in run(WITH_LOGITS, IDS, labels=labels):
        assert log_p[NOT_KEPT] == -np.inf
        assert log_p[EMPTY] == entropies[EMPTY] == entropies[ONE] == 0
        assert np.flatnonzero(np.isnan(log_p)).tolist() == [ONE]
        assert np.isfinite(entropies).all()


OPS = {
    "log_probs": lambda **given: log_probs(WITH_LOGITS["logits"], **given),
    "linear_log_probs": lambda **given: linear_log_probs(**SINGLE, **given),
}


@parametrize("op", ["linear_log_probs"], exhaustive=OPS)
def test_checks_report_bad_ids_and_labels_that_are_not_kept(op):
    where = np.arange(TOKENS) != NOT_KEPT
    ids = np.where(np.arange(6) == 3, np.where(np.arange(TOKENS) == ONE, 24, -2)[:, None], IDS)
    ids = np.where((np.arange(TOKENS) <= ONE)[:, None], ids, IDS)
    with masksafe.label_checks("raise"):
        OPS[op](labels=LABELS, where=where, kept_ids=IDS)
        text = rf"{op}: {ONE + 1} of 234 kept_ids are outside \[0, 24\) and not -1; first at \(0, 3\): "
        with pytest.raises(ValueError, match=text):
            OPS[op](labels=LABELS, where=where, kept_ids=ids)
        with pytest.raises(
            ValueError, match=rf"{op}: 1 of 39 labels are masked or not among kept_ids; first at \({NOT_KEPT},\)"
        ):
            OPS[op](labels=LABELS, kept_ids=IDS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["off", "checkify"])
def test_checks_of_indices_and_floats_find_nothing_masked(mode):
    """In values and gradients; without label checks, indices alone."""
    errors = checkify.index_checks if mode == "off" else checkify.all_checks
    ids = np.where(np.arange(TOKENS)[:, None] % 2, IDS, -1)
    # Not jitted: JAX would find a program that was traced without checkify, and fails at its look-ups (jax 0.12).
    step = lambda layer: with_gradients.__wrapped__(layer, ids, LABELS, ONES)  # noqa: E731
    dirty = WITH_LOGITS | {"features": np.where(np.arange(TOKENS)[:, None] % 2, SINGLE["features"], np.nan)}
    with masksafe.label_checks(mode):
        error, results = checkify.checkify(jax.jit(step), errors=errors)(cases.singles(dirty))
    assert error.get() is None
    assert_close(results, run(WITH_LOGITS, ids))


def test_rows_stay_on_their_devices_and_checkify_has_a_program_of_its_own():
    """On an automatic mesh; the look-up of one index for every axis would gather the logits, and checkify needs it."""
    step = lambda x: jnp.sum(log_probs(x, LABELS[:36], kept_ids=IDS[:36], where=MASK[:36]) * MASK[:36])  # noqa: E731
    gradient, logits = jax.jit(jax.value_and_grad(lambda x: jnp.tanh(step(x)))), WITH_LOGITS["logits"][:36]
    mesh = jax.make_mesh((4,), ("rows",), (AxisType.Auto,))
    split = jax.device_put(logits, NamedSharding(mesh, P("rows")))
    program = gradient.lower(split).compile().as_text()
    assert "all-reduce" in program
    assert not any(exchange in program for exchange in ("all-gather", "collective-permute", "all-to-all"))
    assert_close(gradient(split), gradient(logits))
    error, _ = checkify.checkify(jax.value_and_grad(step), errors=checkify.index_checks)(logits)
    assert error.get() is None


@pytest.mark.parametrize("op", OPS)
def test_refusals(op):
    with pytest.raises(ValueError, match=rf"{op}: kept_ids: got shape \(40,\); expected rank 2"):
        OPS[op](labels=LABELS, kept_ids=LABELS)
    with pytest.raises(ValueError, match=rf"{op}: kept_ids: got shape \(3, 6\); expected a shape that broadcasts"):
        OPS[op](labels=LABELS, kept_ids=IDS[:3])
    with pytest.raises(TypeError, match=rf"{op}: kept_ids: got dtype float"):
        OPS[op](labels=LABELS, kept_ids=IDS / 2)


@parametrize("op", ["linear_log_probs"], exhaustive=OPS)
def test_shapes_and_dtypes_of_ids(op):
    shared = OPS[op](labels=LABELS, kept_ids=np.arange(CLASSES)[None].astype(np.uint8))
    np.testing.assert_allclose(shared, OPS[op](labels=LABELS), rtol=2e-5, atol=2e-6)
    assert not OPS[op](labels=LABELS, kept_ids=IDS[:, :0]).any()
    large = np.where(np.arange(6) == 1, 2**32 + IDS, IDS)  # which 32 bits would turn into another class
    assert np.isnan(OPS[op](labels=LABELS, kept_ids=large)).all()


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_digits_of_16_bits(dtype):
    layer = {name: x.astype(dtype) for name, x in LAYER.items()}
    options = {"kept_ids": IDS, "where": MASK, "block_size": 9, **TEMPERED}
    total = jax.jit(jax.value_and_grad(lambda layer: weighted(all_outputs(**layer, **options))))
    value, gradients = total(layer)
    assert {name: d.dtype for name, d in gradients.items()} == dict.fromkeys(layer, dtype)
    with jax.enable_x64(True):
        exact = total(jax.tree.map(np.float64, layer))
    np.testing.assert_allclose(value, exact[0], rtol=1e-5)
    eps = float(jnp.finfo(dtype).eps)
    assert_close(gradients, exact[1], rtol=2 * eps, atol=eps)


@cases.over_meshes
def test_devices(split, kind):
    def outputs_of(layer, others, **axis_name):
        options = {"with_entropy": True, "with_predictions": True, **TEMPERED, **axis_name}
        return linear_log_probs(**layer, **others, **options)

    others = {"labels": LABELS, "kept_ids": IDS}
    cases.assert_same_over_devices(split, kind, outputs_of, weighted, SINGLE, others)


def test_no_array_has_all_classes_of_all_tokens():
    tokens, classes, width = 2048, 4096, 4
    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((tokens, width), (width, classes))]
    ids = [jax.ShapeDtypeStruct(s, "int32") for s in ((tokens,), (tokens, 8))]
    step = jax.value_and_grad(lambda f, k, y, ids: linear_log_probs(f, k, y, kept_ids=ids).sum(), (0, 1))
    program = jax.jit(step).lower(*shapes, *ids).compile()
    assert program.memory_analysis().temp_size_in_bytes < tokens * classes / 2
