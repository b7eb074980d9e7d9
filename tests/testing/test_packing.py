"""assert_packing_safe finds what people have packed wrongly, and only that."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import parametrize

import masksafe
from masksafe.testing import assert_packing_safe
from masksafe.testing._packing import _layouts, _Program

VOCABULARY, WIDTH, LONGEST = 7, 4, 24
NUMBERS = np.random.default_rng(0).normal(size=(VOCABULARY + LONGEST, WIDTH)).astype(np.float32)
PARAMS = {"embed": NUMBERS[:VOCABULARY], "place": NUMBERS[VOCABULARY:]}
SEQUENCES = [[3, 1, 4], [1, 5, 2, 6, 5], [3, 5]]
TWO = SEQUENCES[:2]  # which compile fewer programs


# A small model. What may be replaced in it are the pairs that attention sees, and the labels.


def of_a_document(ids):
    return (ids[:, :, None] == ids[:, None, :]) & np.tri(ids.shape[1], dtype=bool)


def following(x):
    return jnp.pad(x[:, 1:], ((0, 0), (0, 1)))


def labels_of_a_document(tokens, ids):
    return following(tokens), (ids > 0) & (ids == following(ids))


def features(params, tokens, ids, positions, pairs=of_a_document):
    """An embedding behind attention without a softmax."""
    x = params["embed"][tokens] + params["place"][positions]
    return x + jnp.where(pairs(ids), x @ jnp.swapaxes(x, 1, 2), 0) @ x


def loss(*batch, pairs=of_a_document, labels=labels_of_a_document):
    params, tokens, ids, _ = batch
    label, mask = labels(tokens, ids)
    return jnp.where(mask, jnp.sum((features(*batch, pairs) - params["embed"][label]) ** 2, -1), 0), mask


def per_token(*batch, **options):
    return loss(*batch, **options)[0]


def mean(*batch, **options):
    values, mask = loss(*batch, **options)
    return masksafe.MaskedMean(jnp.sum(values), jnp.sum(mask))


# What is right passes.


def weighted_mean(params, tokens, ids, positions):
    """Whose count has a gradient."""
    values, mask = loss(params, tokens, ids, positions)
    weights = jnp.where(mask, jnp.exp(params["embed"][tokens, 0]), 0)
    return masksafe.MaskedMean(jnp.sum(weights * values), jnp.sum(weights))


def mean_of_documents(*batch):
    return masksafe.MaskedMean.of(*loss(*batch), by="segment", segment_ids=batch[2])


def transformer(params, tokens, ids, positions):
    """With the ops of the package, which take longer to compile."""
    x = (params["embed"][tokens] + params["place"][positions])[:, :, None]
    seen = masksafe.dot_product_attention(x, x, x, is_causal=True, query_segment_ids=ids, key_value_segment_ids=ids)
    labels, mask = masksafe.next_tokens(tokens, ids, where=ids > 0)
    logits = masksafe.rms_norm((x + seen)[:, :, 0]) @ params["embed"].T
    values = masksafe.losses.softmax_cross_entropy_with_integer_labels(logits, labels, where=mask)
    return masksafe.MaskedMean.of(values, mask)


def with_a_gradient_that_cancels(params, tokens, ids, positions):
    """What is added to all scores changes no average."""
    x = params["embed"][tokens, 0]
    scores = x[:, None] * x[:, :, None] + params["place"][0, :1]
    pairs = ids[:, :, None] == ids[:, None, :]
    return jnp.sum(jax.nn.softmax(jnp.where(pairs, scores, -1e9)) * x[:, None], -1)


def with_values_that_cancel(params, tokens, ids, positions):
    """A difference of two large numbers, one of which a long row rounds to the next float."""
    large = jax.lax.stop_gradient(params["large"])
    rounded = large * np.float32(1 + np.finfo(np.float32).eps * (tokens.shape[1] > 5))
    return rounded - large + 0.01 * params["embed"][tokens, 0]


def with_nan_in_padding(*batch):
    return jnp.where(batch[2] > 0, per_token(*batch), jnp.nan)


def of_all_kinds_of_leaves(params, tokens, *_):
    drawn = jax.random.uniform(params["key"], (), "float32")
    return params["function"](params["table"][tokens] + params["number"] * drawn * params["float"])


LEAVES = {"key": jax.random.key(0), "number": 2, "table": np.arange(7), "function": jnp.sin, "float": np.float32(0.3)}
PASSING = {
    "values per token": (per_token, PARAMS, {}),
    "a mean": (mean, PARAMS, {}),
    "a mean with weights": (weighted_mean, PARAMS, {}),
    "a mean of documents": (mean_of_documents, PARAMS, {}),
    "values of more axes": (features, PARAMS, {}),
    "a transformer": (transformer, PARAMS, {}),
    "a transformer that does not pack": (transformer, PARAMS, {"packs": False}),
    "a gradient that cancels": (with_a_gradient_that_cancels, PARAMS, {}),
    "values that cancel": (with_values_that_cancel, PARAMS | {"large": np.float32(1000)}, {}),
    "NaN in padding": (with_nan_in_padding, PARAMS, {}),
    "leaves of all kinds": (of_all_kinds_of_leaves, LEAVES, {}),
    "no floats": (lambda params, tokens, *_: jnp.sqrt(params["table"][tokens]), {"table": np.arange(7)}, {}),
    "longer rows": (per_token, PARAMS, {"max_length": 20}),
    "a row without padding": (per_token, PARAMS, {"max_length": 10}),
}
SMALL = "a gradient that cancels", "values that cancel", "leaves of all kinds", "no floats"


@parametrize("name", SMALL, exhaustive=PASSING)
def test_what_is_right_passes(name):
    fn, params, options = PASSING[name]
    assert_packing_safe(fn, params, SEQUENCES, **options)


@pytest.mark.parametrize("name", ["values per token", "a mean with weights", "NaN in padding"])
def test_what_is_right_passes_operation_by_operation(name):
    """So tests share the programs of single operations."""
    with jax.disable_jit():
        assert_packing_safe(PASSING[name][0], PARAMS, TWO)


@pytest.mark.exhaustive
@pytest.mark.parametrize("fn", [mean, per_token])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_to_16_bits_passes_and_attention_across_documents_does_not(dtype, fn):
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), PARAMS)
    assert_packing_safe(fn, params, TWO)
    with pytest.raises(AssertionError, match=r"layout: *packed in one row"):
        assert_packing_safe(functools.partial(fn, pairs=across_documents), params, TWO)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_transformer_of_16_bits_passes(dtype):
    assert_packing_safe(transformer, jax.tree.map(lambda x: jnp.asarray(x, dtype), PARAMS), SEQUENCES)


@pytest.mark.exhaustive
def test_float64_is_compared_in_its_own_digits():
    with jax.enable_x64(True):
        params = jax.tree.map(np.float64, PARAMS)
        assert_packing_safe(per_token, params, TWO)
        assert_packing_safe(weighted_mean, params, TWO)
        with pytest.raises(AssertionError):
            assert_packing_safe(lambda *batch: per_token(*batch) + 1e-6 * (batch[2] == 2), params, TWO)


@pytest.mark.exhaustive
def test_parameters_of_flax_and_equinox():
    nnx, eqx = pytest.importorskip("flax.nnx"), pytest.importorskip("equinox")
    graph, state = nnx.split(nnx.Embed(VOCABULARY, WIDTH, rngs=nnx.Rngs(0)))
    assert_packing_safe(lambda state, tokens, *_: nnx.merge(graph, state)(tokens), state, TWO)
    module = eqx.nn.Embedding(VOCABULARY, WIDTH, key=jax.random.key(0))
    assert_packing_safe(lambda module, tokens, *_: jax.vmap(jax.vmap(module))(tokens), module, TWO)


def test_layouts_hold_each_sequence_once_and_its_tokens_in_padding():
    vectors = [np.array(sequence) for sequence in SEQUENCES]
    layouts = {layout.name: layout for layout in _layouts(vectors, 12, True, np.random.default_rng(0))}
    for layout in layouts.values():
        for n, vector in enumerate(vectors):
            is_own = layout.owners == n
            np.testing.assert_array_equal(layout.tokens[is_own], vector)
            np.testing.assert_array_equal(layout.positions[is_own], np.arange(vector.size))
        is_padding = layout.segment_ids == 0
        np.testing.assert_array_equal(is_padding, layout.owners == -1)
        assert not layout.positions[is_padding].any()
        assert np.isin(layout.tokens, np.concatenate(vectors)).all()
        assert np.unique(layout.tokens[is_padding]).size > 1
    ids = {name: [[*map(int, row[np.r_[:12]])] for row in layout.segment_ids] for name, layout in layouts.items()}
    assert ids == {
        "padded right": [[1] * n + [0] * (12 - n) for n in (3, 5, 2)],
        "padded left": [[0] * (12 - n) + [1] * n for n in (3, 5, 2)],
        "packed in one row": [[1] * 3 + [2] * 5 + [3] * 2 + [0] * 2],
        "packed in two rows": [[1] * 3 + [2] * 5 + [0] * 4, [1] * 2 + [0] * 10],
        "packed in another order": [[1] * 2 + [2] * 5 + [3] * 3 + [0] * 2],
    }
    assert [*layouts["packed in another order"].owners[0]] == [2] * 2 + [1] * 5 + [0] * 3 + [-1] * 2


# What people have packed wrongly.


def across_documents(ids):
    return (ids > 0)[:, None, :] & np.tri(ids.shape[1], dtype=bool)


def causal_alone(ids):
    """Right as long as padding is on the right."""
    return np.tri(ids.shape[1], dtype=bool)


def and_padding(ids):
    return (ids[:, :, None] == ids[:, None, :]) | (ids == 0)[:, None, :]


def labels_across_documents(tokens, ids):
    return following(tokens), (ids > 0) & (following(ids) > 0)


def with_positions(positions):
    return lambda params, tokens, ids, _: per_token(params, tokens, ids, positions(ids))


def averaged_in_rows(*batch):
    """The mean of each row, and then that of the rows."""
    values, mask = loss(*batch)
    of_rows = jnp.sum(values, 1) / jnp.maximum(jnp.sum(mask, 1), 1)
    return masksafe.MaskedMean(jnp.sum(of_rows), jnp.sum(jnp.any(mask, 1)))


def averaged_in_batches(*batch):
    """A mean that counts as one, however many tokens it is of."""
    values, mask = loss(*batch)
    return masksafe.MaskedMean(jnp.sum(values) / jnp.maximum(jnp.sum(mask), 1), 1)


def averaged_over_padding(*batch):
    values, _ = loss(*batch)
    return masksafe.MaskedMean(jnp.sum(values), values.size)


def state_that_runs_on(params, tokens, ids, positions):
    """A recurrence that no document sets back."""
    return jnp.cumsum(jnp.where(ids > 0, params["embed"][tokens, 0], 0), 1)


def convolution(params, tokens, ids, positions):
    x = params["embed"][tokens, 0]
    return x + jnp.pad(x, ((0, 0), (1, 0)))[:, :-1]


def statistics_of_the_batch(params, tokens, ids, positions):
    """As of a batch norm."""
    x = params["embed"][tokens, 0]
    return x - jnp.sum(jnp.where(ids > 0, x, 0)) / jnp.sum(ids > 0)


def statistics_with_padding(params, tokens, ids, positions):
    x = params["embed"][tokens, 0]
    return x - jnp.mean(x)


def segments_of_all_rows(params, tokens, ids, positions):
    """The ids of each row begin at 1, but here two documents with one id are one."""
    x = params["embed"][tokens, 0]
    return jnp.zeros(ids.size + 1).at[ids].add(x)[ids]


@jax.custom_vjp
def running_on_in_reverse(x):
    return x


running_on_in_reverse.defvjp(lambda x: (x, None), lambda _, d_x: (jnp.cumsum(d_x, 1),))


def gradient_that_runs_on(params, tokens, ids, positions):
    return running_on_in_reverse(params["embed"][tokens, 0])


def gradient_of_nan(params, tokens, ids, positions):
    """Padding is divided by 0 before it is replaced: that repairs the value alone."""
    return jnp.where(ids > 0, params["embed"][tokens, 0] / ids, 0) * ids


FIRST, SECOND, WHOLE = "0, of 3 tokens", "1, of 5 tokens", "all, as one mean"
RIGHT, LEFT, PACKED = (
    "padded right, 2 rows of 16 tokens",
    "padded left, 2 rows of 16 tokens",
    "packed in one row, 1 row of 16 tokens",
)
GRADIENT = "gradient of the sum of its values with respect to params['embed']"
BY_PADDING, BY_OTHERS = "What padding holds changes it.", "Tokens of other sequences change it."
BY_PLACE = "No other token changes it: look at positions, and at the shape of the batch."
BY_SOME = "The count is that of the sequences alone. Values per token would tell which of them differs."
BY_NAN = "It is NaN, whatever padding holds: masksafe.testing.nonfinite_report says where that begins."
BY_COUNT = "The count is {} alone, added up, and {} in this layout."
PADDED = "padded right, padded left"
# The function, and what the error says: the layout, the sequence, what differs, the first index, the cause, and the
# layouts that agree.
WRONG = {
    "positions of a row": (
        with_positions(lambda ids: jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)),
        (LEFT, FIRST, "value", "(0,)", BY_PLACE, "padded right"),
    ),
    "positions of a row without padding": (
        with_positions(lambda ids: jnp.cumsum(ids > 0, 1) - (ids > 0)),
        (PACKED, SECOND, "value", "(0,)", BY_PLACE, PADDED),
    ),
    "attention across documents": (
        functools.partial(per_token, pairs=across_documents),
        (PACKED, SECOND, "value", "(0,)", BY_OTHERS, PADDED),
    ),
    "attention to padding on the left": (
        functools.partial(per_token, pairs=causal_alone),
        (LEFT, FIRST, "value", "(0,)", BY_PADDING, "padded right"),
    ),
    "attention to padding": (
        functools.partial(per_token, pairs=and_padding),
        (RIGHT, FIRST, "value", "(0,)", BY_PADDING, "none"),
    ),
    "labels across documents": (
        functools.partial(per_token, labels=labels_across_documents),
        (PACKED, FIRST, "value", "(2,)", BY_OTHERS, PADDED),
    ),
    "labels across documents in a mean": (
        functools.partial(mean, labels=labels_across_documents),
        (PACKED, WHOLE, "value", "()", BY_COUNT.format(6, 7), PADDED),
    ),
    "attention across documents in a mean": (
        functools.partial(mean, pairs=across_documents),
        (PACKED, WHOLE, "value", "()", BY_SOME, PADDED),
    ),
    "attention to padding in a mean": (
        functools.partial(mean, pairs=causal_alone),
        (LEFT, WHOLE, "value", "()", BY_PADDING, "padded right"),
    ),
    "averaged in rows": (averaged_in_rows, (PACKED, WHOLE, "value", "()", BY_COUNT.format(2, 1), PADDED)),
    "averaged in batches": (averaged_in_batches, (RIGHT, WHOLE, "value", "()", BY_COUNT.format(2, 1), "none")),
    "averaged over padding": (averaged_over_padding, (RIGHT, WHOLE, "value", "()", BY_COUNT.format(8, 32), "none")),
    "a state that runs on": (state_that_runs_on, (PACKED, SECOND, "value", "(0,)", BY_OTHERS, PADDED)),
    "a convolution": (convolution, (LEFT, FIRST, "value", "(0,)", BY_PADDING, "padded right")),
    "statistics of the batch": (statistics_of_the_batch, (RIGHT, FIRST, "value", "(0,)", BY_OTHERS, "none")),
    "statistics with padding": (
        statistics_with_padding,
        (RIGHT, FIRST, "value", "(0,)", f"{BY_PADDING} {BY_OTHERS}", "none"),
    ),
    "segments of all rows": (
        segments_of_all_rows,
        (RIGHT, FIRST, "value", "(0,)", BY_OTHERS, "packed in one row, packed in another order"),
    ),
    "a gradient to padding": (
        gradient_that_runs_on,
        (RIGHT, FIRST, GRADIENT, "(1, 0)", BY_PADDING, "padded left"),
    ),
    "a gradient of NaN": (gradient_of_nan, (RIGHT, FIRST, GRADIENT, "(1, 0)", BY_NAN, "none")),
}


BY_DEFAULT = [
    "positions of a row",
    "attention across documents",
    "attention to padding in a mean",
    "labels across documents in a mean",
    "averaged in rows",
    "a state that runs on",
    "statistics with padding",
    "segments of all rows",
    "a gradient to padding",
    "a gradient of NaN",
]


@parametrize("name", BY_DEFAULT, exhaustive=WRONG)
def test_what_people_have_packed_wrongly_is_found(name):
    fn, (layout, sequence, what, index, cause, agreeing) = WRONG[name]
    with jax.disable_jit(), pytest.raises(AssertionError) as report:
        assert_packing_safe(fn, PARAMS, TWO)
    title, *lines, elements, numbers, reason, others = str(report.value).splitlines()
    assert title == "A layout changes the result."
    assert lines == [f"  layout:   {layout}", f"  sequence: {sequence}", f"  differs:  {what}"]
    assert elements.endswith(f" elements differ, the first at index {index}:")
    assert re.fullmatch(r"    \S+ alone, \S+ in this layout", numbers)
    assert [reason, others] == [f"  {cause}", f"  Layouts that agree: {agreeing}."]


def test_the_error_has_both_numbers_and_the_number_of_elements():
    weights = {"a": np.float32([1, 2, 4])}
    with pytest.raises(AssertionError, match=r"1 of 2 elements differ, .* \(1,\):\n    4.0 alone, 5.0 in this layout"):
        assert_packing_safe(lambda p, t, ids, x: p["a"][t] + (x == 1) * (ids == 2), weights, [[0, 1], [1, 2]])


def test_a_count_that_differs_is_found_where_the_mean_does_not():
    """Of sequences of one length the mean of means is the mean, but it does not add up with other batches."""
    with (
        jax.disable_jit(),
        pytest.raises(AssertionError, match=r"one row(.*\n)+  differs:  count\n(.*\n)    3.0 alone, 1.0 in"),
    ):
        assert_packing_safe(averaged_in_rows, PARAMS, [[3, 1], [4, 1], [5, 2]])


def test_the_gradient_of_a_mean_is_that_of_its_value():
    """In one layout and in several, with a count that has a gradient."""
    vectors = [np.array(sequence) for sequence in TWO]
    one, *_, packed = _layouts(vectors, 8, True, np.random.default_rng(0))
    parts = lambda params: [weighted_mean(params, *layout.batch) for layout in (one, packed)]  # noqa: E731
    with jax.disable_jit():
        results = _Program.of(weighted_mean, PARAMS, one).results([one, packed])
        expected = jax.grad(lambda params: masksafe.MaskedMean.sum(parts(params)).value)(PARAMS)
    ((_, found),) = results.items()
    for name, gradient in expected.items():
        np.testing.assert_allclose(found[f"gradient with respect to params['{name}']"], gradient, rtol=1e-4, atol=1e-2)


def test_three_sequences_are_packed_in_two_rows():
    wrong = lambda p, t, ids, x: p["embed"][t, 0] + (ids.shape[0] == 2)  # noqa: E731
    with jax.disable_jit(), pytest.raises(AssertionError, match=r"layout: *packed in two rows, 2 rows of 16 tokens"):
        assert_packing_safe(wrong, PARAMS, SEQUENCES)


def test_a_function_that_does_not_pack_is_not_asked_to():
    check = functools.partial(assert_packing_safe, params=PARAMS, sequences=TWO, packs=False, max_length=16)
    with jax.disable_jit():
        check(functools.partial(per_token, pairs=across_documents))
        with pytest.raises(AssertionError, match=r"layout: *padded left"):
            check(functools.partial(per_token, pairs=causal_alone))


def test_what_no_token_changes_is_no_test():
    constant = lambda p, t, ids, x: jnp.sum(p["embed"]) * jnp.ones(t.shape)  # noqa: E731
    with jax.disable_jit():
        with pytest.raises(AssertionError, match="Changing one token changes nothing, so nothing is tested"):
            assert_packing_safe(constant, PARAMS, TWO)
        with pytest.raises(AssertionError, match="less than the tolerances allow"):
            assert_packing_safe(lambda p, t, *_: p["embed"][t, 0], PARAMS, TWO, atol=100)


def test_sequences_may_have_one_token_only():
    with jax.disable_jit():
        assert_packing_safe(lambda p, t, *_: p["embed"][t, 0], PARAMS, [[2, 2, 2], [2] * 5])


def test_it_is_enough_if_the_last_token_of_the_longest_sequence_matters():
    with jax.disable_jit():
        assert_packing_safe(lambda p, t, ids, x: jnp.where(x == 4, p["embed"][t, 0], 0), PARAMS, TWO)


def test_nan_alone_is_said():
    bad = lambda p, t, ids, x: jnp.where(x > 3, jnp.nan, p["embed"][t, 0])  # noqa: E731
    with jax.disable_jit(), pytest.raises(AssertionError) as report:
        assert_packing_safe(bad, PARAMS, TWO)
    assert str(report.value) == (
        "Without padding and packing the result is NaN already.\n  sequence: 1, of 5 tokens\n  NaN in:   value"
    )


def test_tolerances_can_be_chosen():
    inexact = lambda p, t, ids, x: p["embed"][t, 0] * (1 + 1e-3 * (ids == 2))  # noqa: E731
    check = functools.partial(assert_packing_safe, inexact, PARAMS, TWO)
    with jax.disable_jit():
        for tolerances in ({}, {"rtol": 9e-4, "atol": 0}):
            with pytest.raises(AssertionError, match="A layout changes"):
                check(**tolerances)
        for tolerances in ({"rtol": 1.1e-3, "atol": 0}, {"rtol": 0, "atol": 1e-2}):
            check(**tolerances)


def test_each_shape_is_compiled_once():
    shapes = []

    def fn(params, tokens, ids, positions):
        shapes.append(tokens.shape)
        return masksafe.MaskedMean(jnp.sum(params[tokens]), tokens.size)

    with pytest.raises(AssertionError):  # since padding counts
        assert_packing_safe(fn, np.arange(7.0), SEQUENCES)
    asked, *traced = shapes
    assert asked == (1, 3)
    assert sorted(traced) == [(1, 2), (1, 3), (1, 5), (1, 16), (2, 16), (3, 16)]


@pytest.mark.parametrize(
    ("fn", "options", "error", "text"),
    [
        (lambda *_: None, {}, TypeError, "fn: got a function that returns NoneType; expected floats per token, or a "),
        (lambda p, t, *_: (p[t], p), {}, TypeError, "fn: got a function that returns tuple"),
        (lambda p, t, *_: t, {}, TypeError, "fn: got a function that returns dtype int32"),
        (lambda p, t, *_: jnp.mean(p[t]), {}, ValueError, r"shape \(\) for tokens \(1, 3\); .* Write MaskedMean.of\("),
        (lambda p, t, *_: jnp.mean(p[t], 1), {}, ValueError, r"returns shape \(1,\) for tokens \(1, 3\)"),
        (lambda p, t, *_: p[t][..., None] * t, {}, ValueError, r"\(1, 5, 5\) .* expected \(1, 5, 3\), as of a seq"),
        (lambda p, t, *_: masksafe.MaskedMean(p[t], 1), {}, ValueError, r"total has shape \(1, 3\); expected scalars"),
        (None, {"sequences": [[1, 2]]}, ValueError, "sequences: got 1; expected two or more"),
        (None, {"sequences": [[1, 2], []]}, ValueError, r"sequences\[1\]: got shape \(0,\); expected a vector"),
        (None, {"sequences": [[1, 2], [[1]]]}, ValueError, r"sequences\[1\]: got shape \(1, 1\)"),
        (None, {"sequences": [[1.0, 2.0], [1]]}, TypeError, r"sequences\[0\]: got dtype float32; expected an int"),
        (None, {"max_length": 7}, ValueError, "max_length: got value 7; expected 8 or more, so that all sequences fit"),
        (None, {"max_length": 4, "packs": False}, ValueError, "expected 5 or more, as the longest has"),
        (None, {"rtol": np.nan}, ValueError, "rtol: got value nan"),
        (None, {"atol": -1.0}, ValueError, "atol: got value -1.0"),
    ],
)
def test_what_makes_no_sense_is_refused(fn, options, error, text):
    with pytest.raises(error, match=f"^assert_packing_safe: .*{text}"):
        assert_packing_safe(fn, np.arange(7.0), options.pop("sequences", TWO), **options)
