"""What all losses of a linear layer have in common beyond the contract's table: digits, what is bad, memory."""

import jax
import jax.numpy as jnp
import linear_cases as cases
import numpy as np
import pytest
from comparisons import assert_close
from linear_cases import BAD, CROSS_ENTROPY, DIVERGENCE, FEATURES, LABELS, LOG_PROBS, MASK, OPS, TOKENS, TOP_K
from tiers import parametrize

import masksafe
from masksafe import losses

pytestmark = pytest.mark.usefixtures("small_tiles")

COTANGENTS_OF_ZERO = [(LOG_PROBS, {}), (DIVERGENCE, {"reduction": "sum"})]


@cases.in_turn(("op", "options"), [("cpu", CROSS_ENTROPY, {"reduction": "none"})], COTANGENTS_OF_ZERO)
def test_second_derivatives_where_the_cotangents_are_zero(platform, op, options):
    """Those of half the squared distance from the outputs at the arguments themselves: J^T J, not 0."""
    floats, others = cases.split_call(op, where=True, **options)

    @jax.jit
    def all_of(floats):
        outputs = lambda floats: jnp.stack(cases.outputs_of(op, **others | floats))  # noqa: E731
        old, along = outputs(floats), jax.tree.map(jnp.cos, floats)
        distance = lambda floats: jnp.sum(jnp.square(outputs(floats) - old)) / 2  # noqa: E731
        with masksafe.forward_mode():
            desired = jax.vjp(outputs, floats)[1](jax.jvp(outputs, (floats,), (along,))[1])[0]
        return jax.grad(distance)(floats), cases.second_derivatives(distance, floats), (desired, desired)

    with jax.enable_x64(True):
        gradients, actual, desired = all_of(floats)
    assert_close(gradients, jax.tree.map(np.zeros_like, gradients), atol=1e-12)
    assert_close(actual, desired, rtol=1e-9, atol=1e-12)


@parametrize("op", [LOG_PROBS], exhaustive=[DIVERGENCE, CROSS_ENTROPY, TOP_K])
def test_any_batch_axes(op):
    shape, rows = (2, 4, 5), np.array([True, False])[:, None, None]
    given = {name: x.reshape(*shape, *x.shape[1:]) if len(x) == TOKENS else x for name, x in OPS[op].arguments.items()}
    options = {"reduction": "none"} if op != LOG_PROBS else {}
    run = jax.jit(lambda given, where: cases.outputs_of(op, where=where, **given, **options)[0])
    flat = run(OPS[op].arguments, np.broadcast_to(rows, shape).reshape(-1))
    np.testing.assert_allclose(run(given, rows), flat.reshape(shape), rtol=2e-5, atol=1e-6)


DIGITS = [(TOP_K, "float16"), (LOG_PROBS, "bfloat16"), (DIVERGENCE, "float16"), (CROSS_ENTROPY, "mixed")]


@cases.in_turn(("op", "dtype"), [("cpu", CROSS_ENTROPY, "bfloat16")], DIGITS)
def test_gradients_have_the_digits_of_their_dtypes(platform, op, dtype):
    """Mixed: those of features in bfloat16."""
    arrays = {k: v for k, v in cases.ARRAYS[op].items() if k not in ("weights", "class_weights")}
    more = {"with_entropy": True} if op == LOG_PROBS else {"direction": "reverse"} if op == DIVERGENCE else {}
    floats, others = cases.split_call(op, **arrays, **more)
    ours = cases.total_of(op, **others)
    dtypes = {k: dtype if dtype != "mixed" else "bfloat16" if k == "features" else "float32" for k in floats}
    floats = {k: x.astype(dtypes[k]) for k, x in floats.items()}
    value, gradients = jax.jit(jax.value_and_grad(ours))(floats)
    assert value.dtype == "float32"
    assert {k: d.dtype for k, d in gradients.items()} == dtypes
    with jax.enable_x64(True):
        desired = jax.jit(jax.value_and_grad(ours))(jax.tree.map(np.float64, floats))
    eps = float(jnp.finfo(dtypes["features"]).eps)
    np.testing.assert_allclose(value, desired[0], rtol=1e-5)  # in bfloat16 it would keep two digits
    assert_close(gradients, desired[1], rtol=4 * eps, atol=max(eps, 2e-6))


@parametrize("op", ["linear_softmax_cross_entropy"], exhaustive=OPS)
@parametrize(("tokens", "width"), [(0, cases.WIDTH)], exhaustive=[(3, 0)])
def test_no_tokens_and_no_features(tokens, width, op):
    cut = lambda x: x[:tokens] if len(x) == TOKENS else x  # noqa: E731
    floats, others = ({name: cut(x) for name, x in given.items()} for given in cases.split_call(op))
    floats |= {"features": floats["features"][:, :width], "kernel": floats["kernel"][:width]}
    ours = cases.total_of(op, **others)
    value, gradients = jax.jit(jax.value_and_grad(ours))(cases.singles(floats))
    of_zeros = {"features": np.zeros((tokens, 1)), "kernel": np.ones((1, cases.CLASSES))}
    np.testing.assert_allclose(value, jax.jit(ours)(cases.singles(floats | of_zeros)) if tokens else 0, rtol=1e-5)
    assert all(np.isfinite(x).all() for x in gradients.values())


def bad_calls(op):
    """The table's arrays with a NaN in row 3 and other things in row 5, each once."""
    floats, others = cases.split_call(op)
    floats["features"] = np.where(np.arange(TOKENS)[:, None] == 3, np.nan, floats["features"])
    if op in cases.OF_LABELS:
        for label in (-1, cases.CLASSES, -100, 2**31 - 1):
            yield floats, others | {"labels": np.where(BAD, label, LABELS)}
    elif op == DIVERGENCE:
        yield floats | {"target_features": np.where(BAD[:, None], np.nan, floats["target_features"])}, others
    else:
        first = BAD[:, None] & (np.arange(cases.TARGET_MASK.shape[1]) == 0)
        classes = others["target_classes"]
        for bad in (-1, cases.CLASSES, classes[5, 1]):
            yield floats, others | {"target_classes": np.where(first, bad, classes)}
        yield floats, others | {"target_log_probs": np.where(first, np.nan, others["target_log_probs"])}


OTHER_FORMS = [(TOP_K, {"rest": "drop"}), (DIVERGENCE, {"direction": "forward"}), (LOG_PROBS, {"with_entropy": True})]
OTHER_FORMS += [(DIVERGENCE, {"direction": "jensen_shannon"})]


@cases.in_turn(("op", "more"), [("cpu", CROSS_ENTROPY, {})], OTHER_FORMS)
def test_what_is_bad_stays_in_its_row_and_is_gone_if_it_is_replaced(platform, op, more):
    """In the mean too, and where `jnp.where` behind the loss leaves the rows out."""
    bad, reduced = np.isin(np.arange(TOKENS), [3, 5]), op != LOG_PROBS

    @jax.jit
    def all_of(floats, others):
        of = lambda floats, r: cases.outputs_of(op, **({"reduction": r} if reduced else {}), **more, **others | floats)  # noqa: E731
        mean = lambda floats: jnp.mean(of(floats, "mean")[0])  # noqa: E731
        kept = lambda floats: sum(jnp.sum(jnp.where(bad, 0, x)) for x in of(floats, "none"))  # noqa: E731
        gone = lambda floats, r: sum(jnp.sum(jnp.where(False, x, 0)) for x in of(floats, r))  # noqa: E731
        of_gone = [jax.grad(gone)(floats, r) for r in ("mean", "none")]
        return of(floats, "none")[0], jax.value_and_grad(mean)(floats), jax.grad(kept)(floats), of_gone

    for call in bad_calls(op):
        outputs, (mean, gradient), kept, gone = all_of(*cases.singles(call))
        assert np.isnan(mean)
        assert cases.bad_rows(outputs) == cases.bad_rows(gradient["features"]) == [3, 5]
        assert np.isnan(gradient["features"][bad]).all()
        assert np.isnan(gradient["kernel"]).all() or op == TOP_K
        assert all(np.isfinite(d).all() for d in kept.values())
        assert not kept["features"][bad].any()
        cases.assert_all_zero(gone)


@cases.in_turn(("op", "by"), [("cpu", CROSS_ENTROPY, "mask")], [(LOG_PROBS, "mask"), (CROSS_ENTROPY, "bias")])
def test_a_label_at_a_class_that_is_excluded_costs_infinity(platform, op, by):
    """Whatever its weight. What does not depend on the label is as for any other."""
    options = OPS[op].all_outputs | {"where": MASK}
    weights = {"class_weights": cases.CLASS_WEIGHTS} if op == CROSS_ENTROPY else {}
    if by == "mask":
        weights = {name: np.where(cases.CLASS_MASK, w, 0) for name, w in weights.items()}
        options |= {"class_mask": cases.CLASS_MASK, **weights}

    def of(labels, bias):
        return cases.outputs_of(op, bias=bias, **OPS[op].arguments | {"labels": labels}, **cases.singles(options))

    at = np.flatnonzero(MASK)[2]
    labels = np.where(np.arange(TOKENS) == at, np.flatnonzero(~cases.CLASS_MASK)[1], LABELS)
    bias, run = np.where(cases.CLASS_MASK | (by == "mask"), 0, -np.inf).astype("float32"), jax.jit(of)
    actual, desired = run(labels, bias), run(LABELS, bias)
    np.testing.assert_array_equal(np.isinf(actual[0]), np.arange(TOKENS) == at)
    np.testing.assert_array_equal(np.delete(actual[0], at), np.delete(desired[0], at))
    assert_close(actual[1:], desired[1:], rtol=1e-6)
    if by == "bias":
        assert np.isnan(run(LABELS, np.full_like(bias, -np.inf))[0][MASK]).all()
        return
    with masksafe.label_checks("raise"):
        jax.block_until_ready(run(np.where(MASK, LABELS, -100), bias))
        with pytest.raises(Exception, match=rf"{op}: 1 of {MASK.sum()} labels are at a masked class; first at \("):
            jax.block_until_ready(run(labels, bias))


@cases.in_turn(("op",), [("accelerator", CROSS_ENTROPY)], [(LOG_PROBS,), (CROSS_ENTROPY,)])
def test_dead_places_of_a_block_do_not_meet_an_infinite_weight(platform, op):
    """For negative features the infinite weight excludes class 0; 0 times infinity would be NaN."""
    more = {"with_entropy": True} if op == LOG_PROBS else {}
    floats = {"features": -np.abs(FEATURES[:, :1]), "kernel": np.array([[np.inf, 0.5, 0.3]])}
    loss = cases.total_of(op, labels=1 + LABELS % 2, where=MASK, block_size=9, **more)
    value, gradients = jax.jit(jax.value_and_grad(loss))(cases.singles(floats))
    assert np.isfinite(value)
    assert np.isfinite(gradients["kernel"]).all()
    assert gradients["kernel"][0, 0] == 0
    assert np.isfinite(np.asarray(gradients["features"])[~MASK]).all()


@cases.in_turn(("op",), [("accelerator", CROSS_ENTROPY)], [(DIVERGENCE,), (TOP_K,), (LOG_PROBS,)])
def test_a_vmap_over_samples_of_unlike_numbers_of_blocks(platform, op):
    floats, others = cases.split_call(op)

    def step(features, where):
        loss = cases.total_of(op, **others, where=where)
        return jax.value_and_grad(loss)(cases.singles(floats) | {"features": features})

    features = np.stack([x := floats["features"], x[::-1], np.cos(x)]).astype("float32")
    where, one = np.stack([MASK, ~MASK, np.zeros_like(MASK)]), jax.jit(step)
    each = [one(f, w) for f, w in zip(features, where, strict=True)]
    many = jax.jit(jax.vmap(step))(features, where)
    assert_close(many, jax.tree.map(lambda *x: np.stack(x), *each), rtol=1e-5, atol=1e-6)


@parametrize("op", [CROSS_ENTROPY], exhaustive=[LOG_PROBS, DIVERGENCE])
def test_memory_is_that_of_a_block_of_tokens(choose, op):
    choose(linear={"class_tile_elements": 2**20})
    tokens, width, classes = 4096, 64, 32768
    layer = ((tokens, width), "float32"), ((width, classes), "float32")
    shapes = *layer, *(layer if op == DIVERGENCE else [((tokens,), "int32")]), ((tokens,), "bool")
    loss = lambda *args: sum(jax.tree.leaves(jax.tree.map(jnp.sum, getattr(losses, op)(*args[:-1], where=args[-1]))))  # noqa: E731
    program = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*(jax.ShapeDtypeStruct(*s) for s in shapes)).compile()
    of_kernel, of_logits = 4 * width * classes, 4 * tokens * classes * (2 if op == DIVERGENCE else 1)
    assert program.memory_analysis().temp_size_in_bytes - of_kernel < of_logits / 8
