"""MaskedMean and value_and_grad_of_mean."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tiers import parametrize

import masksafe
from masksafe import MaskedMean, losses, value_and_grad_of_mean

P = PartitionSpec
RNG = np.random.default_rng(0)
LENGTHS = np.array([6, 1, 0, 3, 0, 0, 5, 2, 0, 0, 0, 0, 6, 4, 1, 1])  # some parts of four, and pairs, have nothing left
FEATURES = RNG.normal(size=(16, 6, 3)).astype(np.float32)
LABELS = np.where(np.arange(6) < LENGTHS[:, None], RNG.integers(0, 5, (16, 6)), -100)
PARAMS = {"kernel": RNG.normal(size=(3, 5)).astype(np.float32), "bias": np.zeros(5, np.float32)}


def mean_loss(params, features, labels):
    mask = labels != -100
    logits = features @ params["kernel"] + params["bias"]
    per_token = losses.softmax_cross_entropy_with_integer_labels(logits, labels, where=mask)
    return MaskedMean.of(per_token, mask)


@functools.cache
def of_the_whole():
    return jax.jit(jax.value_and_grad(lambda params: mean_loss(params, FEATURES, LABELS).value))(PARAMS)


IN_PARTS = jax.jit(value_and_grad_of_mean(mean_loss, microbatches=4))


# By sequence and by segment.

X, IDS = RNG.normal(size=(8, 6)).astype(np.float32), RNG.integers(-2, 3, (8, 6)) * 10**6
WEIGHTS, TOKENS = RNG.random((8, 6)).astype(np.float32), RNG.random((8, 6)) < 0.6
TOKENS[1], TOKENS[4:6] = False, False
WAYS = {"sequence": {"by": "sequence"}, "segment": {"by": "segment", "segment_ids": IDS}}


@parametrize("by", ["sequence"], exhaustive=WAYS)
def test_micro_batches_and_devices_by_sequence_and_by_segment(by):
    """Of which some have nothing left."""

    def mean_of(scale, x, where, ids, weights):
        options = WAYS[by] | ({"segment_ids": ids} if by == "segment" else {})
        return MaskedMean.of(scale * masksafe.mask_where(~where, x, 0), where, weights=weights, **options)

    arrays = np.where(TOKENS, X, np.nan), TOKENS, np.where(TOKENS, IDS, 77), np.where(TOKENS, WEIGHTS, np.nan)
    whole = jax.jit(jax.value_and_grad(lambda scale: mean_of(scale, *arrays).value))(1.5)
    in_parts = value_and_grad_of_mean(mean_of, microbatches=4)
    chex.assert_trees_all_close(jax.jit(in_parts)(1.5, *arrays), whole, rtol=1e-5, atol=1e-6)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    split = [jax.device_put(a, NamedSharding(mesh, P("data"))) for a in arrays]
    with jax.set_mesh(mesh):
        step = jax.jit(jax.value_and_grad(lambda scale, *arrays: mean_of(scale, *arrays).value))
        chex.assert_trees_all_close(step(1.5, *split), whole, rtol=1e-5, atol=1e-6)
        of_device = value_and_grad_of_mean(mean_of, axis_name="data")
        mapped = jax.shard_map(of_device, in_specs=(P(), *[P("data")] * 4), out_specs=P())
        chex.assert_trees_all_close(jax.jit(mapped)(1.5, *split), whole, rtol=1e-5, atol=1e-6)


def test_the_order_of_tokens_and_what_ids_are_called_do_not_matter():
    of = jax.jit(lambda x, where, ids: MaskedMean.of(x, where, by="segment", segment_ids=ids).total)
    order = RNG.permutation(6)
    expected = of(X, TOKENS, IDS)
    np.testing.assert_allclose(of(X[:, order], TOKENS[:, order], IDS[:, order]), expected, rtol=1e-6)
    np.testing.assert_allclose(of(X, TOKENS, 5 - IDS), expected, rtol=1e-6)
    assert of(X, TOKENS, np.where(TOKENS, IDS, 2**31 - 1)) == expected


@parametrize("tokens", [8192], exhaustive=[2**20])
def test_many_weights_of_a_segment_lose_no_digits(tokens):
    """Of one document and of three that take turns; weights of one size, and of two."""
    rng = np.random.default_rng(0)
    mean = jax.jit(lambda *args: MaskedMean.of(args[0], by="segment", segment_ids=args[1], weights=args[2]).value)
    turns, steps = rng.integers(0, 3, (1, tokens)), np.where(np.arange(tokens) < tokens // 3, 0.1, 0.7)[None]
    for ids, weights in ((0 * turns, np.full((1, tokens), 0.1)), (turns, steps), (turns, rng.random((1, tokens)))):
        weights = weights.astype(np.float32)
        np.testing.assert_allclose(mean(np.ones((1, tokens), np.float32), ids, weights), 1, rtol=5e-7)
        x, means = rng.random((1, tokens)).astype(np.float32), []
        for of_segment in (ids == i for i in range(ids.max() + 1)):
            means.append(np.average(np.float64(x[of_segment]), weights=np.float64(weights[of_segment])))
        np.testing.assert_allclose(mean(x, ids, weights), np.mean(means), rtol=5e-7)


def test_shapes_of_sequences():
    mean = MaskedMean.of(X[0], by="segment", segment_ids=np.uint8([0, 0, 255, 255, 1, 0]))
    means = [X[0][[0, 1, 5]].mean(), X[0][2:4].mean(), X[0][4]]
    np.testing.assert_allclose([mean.value, mean.count], [np.mean(means), 3], rtol=1e-6)
    of = jax.jit(lambda *arrays: [MaskedMean.of(x, by="segment", segment_ids=i).total for x, i in arrays])
    np.testing.assert_allclose(*of((X.reshape(2, 4, 6), IDS.reshape(2, 4, 6)), (X, IDS)), rtol=1e-6)
    nothing = MaskedMean.of(X[:, :0], by="segment", segment_ids=IDS[:, :0])
    assert (nothing.total, nothing.count) == (0, 0)
    assert MaskedMean.of(X > 9, TOKENS[:, :1], by="sequence").count == TOKENS[:, 0].sum()
    by_row = MaskedMean.of(X, TOKENS, weights=WEIGHTS, axis=1)
    np.testing.assert_allclose(by_row.value, masksafe.mean(X, 1, TOKENS, weights=WEIGHTS), rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"by": "document"}, ValueError, "by: got value 'document'; expected one of 'token', 'sequence', 'segment'"),
        ({"by": "segment"}, ValueError, "segment_ids: got value None"),
        ({"segment_ids": IDS}, ValueError, "segment_ids: got an array and by='token'"),
        ({"by": "sequence", "segment_ids": IDS}, ValueError, "segment_ids: got an array and by='sequence'"),
        ({"by": "segment", "segment_ids": IDS[0]}, ValueError, r"segment_ids: got shape \(6,\); expected \(8, 6\)"),
        ({"by": "segment", "segment_ids": X}, TypeError, "segment_ids: got dtype float32"),
        ({"by": "sequence", "axis": -1}, ValueError, "axis: got value -1; expected None"),
        ({"by": "sequence", "x": 1.0}, ValueError, r"x: got shape \(\); expected \[..., time\]"),
    ],
)
def test_bad_ways_to_average_are_refused(options, error, match):
    with pytest.raises(error, match=f"MaskedMean.of: {match}"):
        MaskedMean.of(**{"x": X} | options)


def test_counts_are_floats_exact_up_to_2_to_the_24th():
    part = MaskedMean(1, 1)
    assert (MaskedMean(0, 2**24 - 1) + part).count == (MaskedMean(0, 2**24) + part).count == 2**24
    for count in (3_000_000_000, np.int64(3_000_000_000), np.full((), 3_000_000_000)):
        assert MaskedMean(6e9, count).value == 2
    x = jnp.broadcast_to(True, 2**24 + 10)  # counted as integers, rounded once
    assert (MaskedMean.of(x).total, MaskedMean.of(x).count) == (2**24 + 10, 2**24 + 10)


def test_a_mean_over_devices_is_a_tree_of_specs():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    counts = 2_000 + np.arange(8)
    for psum in (lambda mean: mean.psum("data"), lambda mean: lax.psum(mean + MaskedMean(0.0, 0), "data")):
        of_device = lambda count, psum=psum: psum(MaskedMean(2.0 * count[0], count[0]))  # noqa: E731
        specs = {"in_specs": P("data"), "out_specs": MaskedMean(P(), P())}
        mean = jax.jit(jax.shard_map(of_device, mesh=mesh, **specs))(counts)
        assert (mean.value, mean.count) == (2, 16_028)


def test_totals_of_floats_are_sums_in_float32():
    one, zero = MaskedMean(jnp.bfloat16(1), jnp.float16(1)), MaskedMean(jnp.float32(0), jnp.float32(0))
    many, _ = lax.scan(lambda total, _: (total + one, None), zero, length=10_000)
    assert (many.total, many.count, many.value) == (10_000, 10_000, 1)
    assert many.total.dtype == many.count.dtype == jnp.float32
    gradient = jax.grad(lambda x: (MaskedMean(x, 3) + MaskedMean(2 * x, 3)).value)(1e-3)
    np.testing.assert_allclose(gradient, 0.5, rtol=1e-6)


def test_numbers_of_any_kind():
    mean = MaskedMean(7, 2)
    assert (float(mean), f"{mean:.2f}", f"{mean}") == (3.5, "3.50", "MaskedMean(total=7.0, count=2.0)")
    with pytest.raises(TypeError, match="scalar"):
        float(MaskedMean([1.0, 2.0], 1))
    with jax.disable_jit():
        assert MaskedMean(jnp.array(14.0), 4).value == MaskedMean(14.0, 4).value == MaskedMean(14, 4.0).value == 3.5
        assert (MaskedMean(True, 1) + MaskedMean(6, np.int64(1))).value == 3.5
    assert MaskedMean(1.0, jnp.uint32(7)).count == 7
    assert MaskedMean.of(np.full(5, 2**30)).value == 2**30  # whose sum wraps
    assert (MaskedMean(1.0, jnp.uint32(7)) + MaskedMean(1.0, jnp.uint32(7))).count == 14
    np.testing.assert_array_equal(MaskedMean([1.0, 2.0], [1, 2]).value, [1, 1])
    x = jnp.arange(3.0) + 1j
    np.testing.assert_allclose((MaskedMean.of(x) + MaskedMean.of(x + 1j)).value, 1 + 1.5j)


@pytest.mark.parametrize("scaled", [lambda m: 0.1 * m, lambda m: m / 2, lambda m: jnp.float32(2) * m, lambda m: m * m])
def test_means_are_added_only(scaled):
    with pytest.raises(TypeError, match=r"MaskedMean: operator: got \* or /; .* Write factors={'z': 0.1} in value_and"):
        scaled(MaskedMean(3.0, 2))
    with pytest.raises(TypeError, match=r"MaskedMean.value: total: got type dict; .* Write a dict of means: \{"):
        MaskedMean({"a": 1.0}, 2).value  # noqa: B018


def test_sum_of_a_list():
    parts = [MaskedMean.of(x) for x in (np.ones(2), np.full(3, 6.0))]
    assert MaskedMean.sum(parts).value == MaskedMean.sum(iter(parts)).value == sum(parts).value == 4
    assert MaskedMean.sum([]).value == 0
    assert MaskedMean.sum(parts[:1]).value == 1
    with pytest.raises(TypeError, match="unsupported operand"):
        MaskedMean(1, 1) + 3
    metrics = MaskedMean.sum({"loss": part, "twice": part + part} for part in parts)
    assert (metrics["loss"].value, metrics["twice"].count) == (4, 10)


def test_trees_of_something_else():
    shapes = jax.eval_shape(lambda x: MaskedMean.of(x, axis=1), jnp.ones((3, 4)))
    assert (shapes.total.shape, shapes.total.dtype, shapes.count.dtype) == ((3,), jnp.float32, jnp.float32)
    specs = jax.tree.map(lambda _: P("a"), shapes)
    assert specs.total == specs.count == P("a")
    assert repr(specs).startswith("MaskedMean(total=P")
    mean = MaskedMean(jax.ShapeDtypeStruct((), "float32"), jax.ShapeDtypeStruct((), "int32"))
    assert jax.eval_shape(lambda mean: (mean + mean).value, mean).dtype == "float32"
    gradient = jax.grad(lambda mean: mean.value)(MaskedMean(jnp.float32(3), jnp.float32(2)))
    assert (gradient.total, gradient.count) == (0.5, -0.75)


@parametrize("microbatches", [4], exhaustive=[1, 16])
def test_gradient_of_micro_batches_is_that_of_the_whole(microbatches):
    fn = IN_PARTS if microbatches == 4 else jax.jit(value_and_grad_of_mean(mean_loss, microbatches=microbatches))
    chex.assert_trees_all_close(fn(PARAMS, FEATURES, LABELS), of_the_whole(), rtol=1e-5, atol=1e-6)


def test_eagerly_what_is_masked_fails_no_check():
    def loss(p, x, where):
        return MaskedMean.of(losses.squared_error(x, jnp.full_like(x, p), where=where), where)

    with jax.debug_nans(True):
        results = value_and_grad_of_mean(loss, microbatches=2)(3.0, np.float32([2, np.nan]), np.array([True, False]))
    assert results == (1, 2)


def test_nothing_left_anywhere_is_0():
    value, gradients = IN_PARTS(PARAMS, np.full_like(FEATURES, np.nan), np.full_like(LABELS, -100))
    jax.tree.map(lambda a: np.testing.assert_array_equal(a, 0), (value, gradients))


@parametrize(
    ("axes", "options"),
    [(("a", "b"), {})],
    exhaustive=[("a", {"check_vma": False}), ("a", {"axis_names": {"a"}})],
    ids=str,
)
def test_gradient_over_devices_is_that_of_the_whole(axes, options):
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    fn = value_and_grad_of_mean(mean_loss, microbatches=2, axis_name=axes)
    on_devices = jax.shard_map(fn, mesh=mesh, in_specs=(P(), P(axes), P(axes)), out_specs=P(), **options)
    program = jax.jit(on_devices).lower(PARAMS, FEATURES, LABELS).compile()
    actual = program(PARAMS, FEATURES, LABELS)
    chex.assert_trees_all_close(actual, of_the_whole(), rtol=1e-5, atol=1e-6)
    assert program.as_text().count(" all-reduce(") == 1  # of the sums of all micro-batches


@parametrize("axis_type", [AxisType.Explicit], exhaustive=[AxisType.Auto], ids=str)
def test_gradient_on_a_mesh_without_shard_map(axis_type):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(axis_type,))
    with jax.set_mesh(mesh):
        batch = jax.device_put((FEATURES, LABELS), NamedSharding(mesh, P("data")))
        actual = IN_PARTS(PARAMS, *batch)
    chex.assert_trees_all_close(actual, of_the_whole(), rtol=1e-5, atol=1e-6)


def test_count_that_depends_on_the_parameters():
    """Weights that are learned: the derivative of the count is part of that of the mean."""

    def mean_of_weighted(params, x, where):
        return MaskedMean.of(jnp.sin(x * params), where, weights=jnp.exp(x * params))

    x, where = RNG.normal(size=(8, 3)).astype(np.float32), RNG.random((8, 3)) < 0.5
    expected = jax.jit(jax.value_and_grad(lambda p: mean_of_weighted(p, x, where).value))(0.7)
    actual = jax.jit(value_and_grad_of_mean(mean_of_weighted, microbatches=4))(0.7, x, where)
    chex.assert_trees_all_close(actual, expected, rtol=1e-5)


def test_bfloat16_parameters_are_accumulated_in_float32():
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    value, gradients = jax.eval_shape(IN_PARTS, params, FEATURES, LABELS)
    assert value.dtype == jnp.float32
    chex.assert_trees_all_equal_dtypes(gradients, params)
    ones = lambda p, x: MaskedMean.of(x * p)  # noqa: E731
    _, gradient = value_and_grad_of_mean(ones, microbatches=512)(jnp.bfloat16(1), jnp.ones(512, jnp.bfloat16))
    assert gradient == 1  # a sum in bfloat16 stands still at 256


def test_aux_keys_scalars_keywords_and_several_arguments():
    def fn(kernel, batch, bias, key, factor, *, labels):
        noise = jax.random.normal(key, batch.shape[:1])
        mean = mean_loss({"kernel": kernel, "bias": bias}, batch * factor, labels)
        return mean, {"noise": noise, "count": mean.count}

    args = PARAMS["kernel"], FEATURES, PARAMS["bias"], jax.random.key(0), 1.0
    wrapped = jax.jit(value_and_grad_of_mean(fn, (0, 2), has_aux=True, microbatches=4))
    (value, aux), (d_kernel, d_bias) = wrapped(*args, labels=LABELS)
    results = value, {"kernel": d_kernel, "bias": d_bias}
    chex.assert_trees_all_close(results, of_the_whole(), rtol=1e-5, atol=1e-6)
    assert aux["noise"].shape == (4, 4)
    assert len(np.unique(aux["noise"])) == 16
    np.testing.assert_array_equal(aux["count"], [np.sum(LABELS[i::4] != -100) for i in range(4)])


@parametrize(
    "in_axes", [(None, {"policy": -2, "reference": 1}, None, {"tokens": 1, "none": None})], exhaustive=[1], ids=str
)
def test_in_axes_cuts_pairs_along_their_batch(in_axes):
    policy, reference = RNG.normal(size=(2, 2, 8, 5)).astype(np.float32)
    mask = np.arange(5) < RNG.integers(0, 6, (2, 8))[..., None]

    def dpo_loss(policy, reference, tokens_mask):
        """Of the policy's log-probabilities of chosen and rejected answers `[2, batch, time]`."""
        by_answer = masksafe.sum(policy - reference, axis=2, where=tokens_mask)
        return MaskedMean.of(-jax.nn.log_sigmoid(by_answer[0] - by_answer[1]))

    def loss(scale, pairs, scalar, masks):
        return dpo_loss(scale * pairs["policy"], pairs["reference"], masks["tokens"]), pairs["policy"]

    args = 1.5, {"policy": policy, "reference": reference}, 3.0, {"tokens": mask, "none": None}
    expected = jax.jit(jax.value_and_grad(lambda scale: dpo_loss(scale * policy, reference, mask).value))(1.5)
    fn = value_and_grad_of_mean(loss, has_aux=True, in_axes=in_axes, microbatches=4)
    (value, parts), gradient = jax.jit(fn)(*args)
    chex.assert_trees_all_close((value, gradient), expected, rtol=1e-5)
    np.testing.assert_array_equal(parts, [policy[:, i::4] for i in range(4)])


def test_in_axes_none_is_shared_and_keywords_are_cut_along_axis_0():
    def fn(scale, table, key, *, rows):
        shared = table.sum(), jax.random.key_data(key)
        return MaskedMean.of(scale * rows * table[0]), (rows, *shared)

    table, rows, key = np.arange(6.0).reshape(2, 3) + 1, np.arange(12.0).reshape(4, 3), jax.random.PRNGKey(0)
    wrapped = value_and_grad_of_mean(fn, has_aux=True, in_axes=None, microbatches=2)
    (value, (parts, total, keys)), _ = wrapped(2.0, table, jax.random.wrap_key_data(key), rows=rows)
    np.testing.assert_allclose(value, np.mean(2 * rows * table[0]), rtol=1e-6)
    np.testing.assert_array_equal(parts, [rows[::2], rows[1::2]])
    np.testing.assert_array_equal(total, [21, 21])
    np.testing.assert_array_equal(keys, [key, key])


def test_one_micro_batch_cuts_nothing():
    def loss(p, x, table, key):
        assert key.shape == (2,)
        return MaskedMean.of(p * x * jnp.sum(table))

    value, _ = value_and_grad_of_mean(loss)(1.0, jnp.ones(4), jnp.ones(7), jax.random.PRNGKey(0))
    assert value == 7


def test_mean_in_aux_is_that_of_all_parts_and_devices():
    def loss(params, features, labels):
        is_live = labels != -100
        is_two = MaskedMean.of(labels == 2, is_live)
        by_column = MaskedMean.of(features, is_live[..., None], axis=(0, 1))
        return mean_loss(params, features, labels), {"is 2": is_two, "columns": by_column, "rows": jnp.sum(is_live)}

    live = LABELS != -100
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,))
    fn = value_and_grad_of_mean(loss, has_aux=True, microbatches=2, axis_name="a")
    specs = ((P(), {"is 2": P(), "columns": P(), "rows": P("a")}), P())
    on_devices = jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=(P(), P("a"), P("a")), out_specs=specs))
    program = on_devices.lower(PARAMS, FEATURES, LABELS).compile()
    (_, aux), _ = program(PARAMS, FEATURES, LABELS)
    assert (aux["is 2"].total, aux["is 2"].count) == (np.sum(LABELS == 2), np.sum(live))
    np.testing.assert_allclose(aux["columns"].value, FEATURES[live].mean(0), rtol=1e-5)
    assert aux["rows"].shape == (8,)
    assert program.as_text().count(" all-reduce(") == 1


def test_second_derivatives():
    def of_whole(params):
        return jax.value_and_grad(lambda params: mean_loss(params, FEATURES, LABELS).value)(params)

    along = lambda grad: jax.jit(lambda p: jax.jvp(lambda p: grad(p)[1], (p,), (PARAMS,))[1])(PARAMS)  # noqa: E731
    in_parts = along(lambda p: value_and_grad_of_mean(mean_loss, microbatches=4)(p, FEATURES, LABELS))
    chex.assert_trees_all_close(in_parts, along(of_whole), rtol=1e-4, atol=1e-5)


PLACES = dict.fromkeys(("next tokens", "jitted"), "{} of the batch, in micro-batch {} of 4")
PLACES["flat"] = "{} of micro-batch {} of 4"


@parametrize("result", ["sum"], exhaustive=["mean"])
@parametrize("how", ["next tokens"], exhaustive=PLACES)
@parametrize("mode", ["raise"], exhaustive=["checkify"])
def test_label_reports_name_the_place_in_the_whole_batch(mode, how, result):
    """Also of a sum of means, whose first pass reports nothing."""

    def loss(params, features, labels):
        if how == "next tokens":
            features, labels = features[:, :-1], labels[:, 1:]
        if how == "flat":
            features, labels = features.reshape(-1, 3), labels.reshape(-1)
        mean = (jax.jit(mean_loss) if how == "jitted" else mean_loss)(params, features, labels)
        return mean if result == "mean" else {"loss": mean, "z": MaskedMean.of(features @ params["kernel"])}

    fn = value_and_grad_of_mean(loss, microbatches=4)
    fn = jax.jit(fn if mode == "raise" else checkify.checkify(fn))
    for row, column in ((6, 1), (11, 4)):
        labels = np.where(LABELS == -100, 0, LABELS)
        labels[row, column] = 5
        index = (row // 4 * 6 + column,) if how == "flat" else (row, column - (how == "next tokens"))
        expected = f"labels are outside [0, 5); first at {PLACES[how].format(index, row % 4)}: 5 "
        with masksafe.label_checks(mode):
            if mode == "checkify":
                assert expected in fn(PARAMS, FEATURES, labels)[0].get()
            else:
                with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(expected)):
                    jax.block_until_ready(fn(PARAMS, FEATURES, labels))


def test_label_reports_of_devices():
    labels = np.where(LABELS == -100, 0, LABELS)
    labels[14, 2] = 5
    fn = value_and_grad_of_mean(mean_loss, microbatches=2, axis_name="a")
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,))
    on_devices = jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=(P(), P("a"), P("a")), out_specs=P()))
    text = r"\(6, 2\) of the batch, in micro-batch 0 of 2 of shard 1: 5"
    with pytest.raises(jax.errors.JaxRuntimeError, match=text), masksafe.label_checks("raise"):
        jax.block_until_ready(on_devices(PARAMS, FEATURES, labels))


@parametrize("dtype", ["int8"], exhaustive=["bool", "bfloat16"])
def test_counts_of_narrow_dtypes_neither_wrap_nor_stand_still(dtype):
    fn = lambda p, x: MaskedMean(jnp.sum(p * x), jnp.sum(x).astype(dtype))  # noqa: E731
    value, gradient = jax.jit(value_and_grad_of_mean(fn, microbatches=512))(1.0, np.ones(512, np.float32))
    assert (value, gradient) == (1, 1)
    parts = [MaskedMean(jnp.ones((), dtype), jnp.ones((), dtype)) for _ in range(300)]
    assert sum(parts).count == 300


def test_a_mean_that_is_summed_already_is_refused():
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,))
    fn = value_and_grad_of_mean(lambda p, x: MaskedMean.of(p * x).psum("a"), axis_name="a")
    with pytest.raises(ValueError, match="fn: got a MaskedMean whose total is the same on all devices"):
        jax.eval_shape(jax.shard_map(fn, mesh=mesh, in_specs=(P(), P("a")), out_specs=P()), jnp.ones(()), jnp.ones(8))


# A sum of means.

FACTORS = {"z": np.float64(0.1), "by row": jnp.bfloat16(0.5), "penalty": 0.01}


def several_means(params, features, labels):
    """The loss, three means whose counts are other ones, and one that is empty."""
    mask, is_live = labels != -100, jnp.arange(6) < 5
    logits = features @ params["kernel"] + params["bias"]
    per_token = losses.softmax_cross_entropy_with_integer_labels(logits, labels, where=mask)
    return {
        "loss": MaskedMean.of(per_token, mask),
        "z": MaskedMean.of(jnp.square(masksafe.logsumexp(logits, -1)), is_live),
        "by row": MaskedMean.of(per_token, mask, by="sequence"),
        "penalty": MaskedMean(jnp.sum(jnp.square(params["kernel"])), 1),
        "none": MaskedMean.of(logits, False),
    }


def value_of_sum(means, factors=FACTORS):
    return sum(jnp.float32(factors.get(name, 1)) * mean.value for name, mean in means.items())


@functools.cache
def sum_of_the_whole():
    def of(params):
        means = several_means(params, FEATURES, LABELS)
        return value_of_sum(means), means

    (value, means), gradients = jax.jit(jax.value_and_grad(of, has_aux=True))(PARAMS)
    return value, {name: mean.value for name, mean in means.items()}, gradients


def check_sum(actual):
    (value, means), gradients = actual
    means = {name: mean.value for name, mean in means.items()}
    chex.assert_trees_all_close((value, means, gradients), sum_of_the_whole(), rtol=1e-5, atol=1e-6)


SUM_IN_PARTS = jax.jit(value_and_grad_of_mean(several_means, factors=FACTORS, microbatches=4))


@parametrize("microbatches", [1, 4], exhaustive=[2, 16])
def test_a_sum_of_means_of_micro_batches_is_that_of_the_whole(microbatches):
    fn = value_and_grad_of_mean(several_means, factors=FACTORS, microbatches=microbatches)
    check_sum((SUM_IN_PARTS if microbatches == 4 else jax.jit(fn))(PARAMS, FEATURES, LABELS))


@parametrize(("microbatches", "options"), [(2, {})], exhaustive=[(1, {}), (4, {}), (1, {"check_vma": False})], ids=str)
def test_a_sum_of_means_over_devices_is_that_of_the_whole(microbatches, options):
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    fn = value_and_grad_of_mean(several_means, factors=FACTORS, microbatches=microbatches, axis_name="a")
    on_devices = jax.shard_map(fn, mesh=mesh, in_specs=(P(), P("a"), P("a")), out_specs=P(), **options)
    program = jax.jit(on_devices).lower(PARAMS, FEATURES, LABELS).compile()
    check_sum(program(PARAMS, FEATURES, LABELS))
    assert program.as_text().count(" all-reduce(") == 2  # of the counts, and of all else


@parametrize("how", [AxisType.Explicit], exhaustive=[AxisType.Auto, "vmap", "eager"], ids=str)
def test_a_sum_of_means_elsewhere(how):
    """On a mesh without shard_map, over a named axis of vmap, and in eager code."""
    if how == "eager":
        check_sum(value_and_grad_of_mean(several_means, factors=FACTORS, microbatches=4)(PARAMS, FEATURES, LABELS))
    elif how == "vmap":
        fn = value_and_grad_of_mean(several_means, factors=FACTORS, microbatches=2, axis_name="a")
        batch = FEATURES.reshape(4, 4, 6, 3), LABELS.reshape(4, 4, 6)
        of_samples = jax.jit(jax.vmap(fn, (None, 0, 0), axis_name="a"))(PARAMS, *batch)
        for i in range(4):
            check_sum(jax.tree.map(lambda x, i=i: x[i], of_samples))
    else:
        mesh = jax.make_mesh((4,), ("data",), axis_types=(how,), devices=jax.devices()[:4])
        with jax.set_mesh(mesh):
            check_sum(SUM_IN_PARTS(PARAMS, *jax.device_put((FEATURES, LABELS), NamedSharding(mesh, P("data")))))


def test_a_sum_of_means_that_are_empty_is_0():
    def two_means(params, features, labels):
        means = several_means(params, features, labels)
        return {name: means[name] for name in ("loss", "none")}

    fn = jax.jit(value_and_grad_of_mean(two_means, microbatches=4))
    (value, means), gradients = fn(PARAMS, np.full_like(FEATURES, np.nan), np.full_like(LABELS, -100))
    values = [mean.value for mean in means.values()]
    jax.tree.map(lambda a: np.testing.assert_array_equal(a, 0), (value, values, gradients))


@parametrize("order", [0], exhaustive=[1])
def test_what_is_masked_has_no_influence_on_a_sum_of_means(order):
    def loss_and_z(params, features, labels, mask):
        means = several_means(params, masksafe.keep(features, where=mask[..., None]), jnp.where(mask, labels, -100))
        return {"loss": means["loss"], "z": MaskedMean.of(features, mask[:, ::-1, None] & mask[..., None])}

    fn = value_and_grad_of_mean(loss_and_z, factors={"z": 0.1}, microbatches=4)
    live = LABELS != -100
    garbage = {1: ~np.broadcast_to(live[..., None], FEATURES.shape), 2: ~live}
    args = PARAMS, FEATURES, LABELS, live
    masksafe.testing.assert_mask_safe(fn, *args, masked=garbage, order=order, transforms=["jit"])


def test_factors_are_numbers_or_arrays_without_a_gradient():
    def value(factor):
        factors = {"z": factor, "none": 3.0}
        return value_and_grad_of_mean(several_means, factors=factors, microbatches=4)(PARAMS, FEATURES, LABELS)

    of = jax.grad(lambda factor: value(factor)[0][0])
    assert jax.jit(of)(jnp.float32(2)) == of(2.0) == 0
    program = jax.jit(value)
    (actual, means), _ = program(2.0)
    np.testing.assert_allclose(actual, value_of_sum(means, {"z": 2.0}), rtol=1e-6)
    for factor in (np.nan, np.inf):
        (actual, _), gradients = program(factor)
        assert not np.isfinite(actual)
        assert not np.isfinite(gradients["kernel"]).any()


def test_numbers_are_factors_in_shard_map_over_an_explicit_mesh():
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):  # there JAX makes arrays of the mesh from numbers, and refuses to close over them
        fn = value_and_grad_of_mean(lambda p, x: {"x": MaskedMean.of(p * x)}, factors={"x": 0.5}, axis_name="a")
        on_devices = jax.jit(jax.shard_map(fn, in_specs=(P(), P("a")), out_specs=P()))
        (value, _), gradient = on_devices(2.0, jax.device_put(np.arange(8.0), NamedSharding(mesh, P("a"))))
    assert (value, gradient) == (3.5, 1.75)


def test_an_empty_mean_adds_0_whatever_its_factor():
    fn = lambda p, x: {"none": MaskedMean.of(p * x, False), "all": MaskedMean.of(p * x)}  # noqa: E731
    for factor in (np.nan, np.inf):
        (value, _), gradient = value_and_grad_of_mean(fn, factors={"none": factor})(2.0, np.ones(4))
        assert (value, gradient) == (2, 1)


def test_strict_promotion_adds_means_of_two_dtypes():
    fn = lambda p, x: {"narrow": MaskedMean.of(p * x), "wide": MaskedMean.of((p * x).astype(jnp.float64))}  # noqa: E731
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        (value, _), gradient = value_and_grad_of_mean(fn)(np.float32(2), np.ones(4, np.float32))
    assert (float(value), float(gradient)) == (4, 2)
    assert (value.dtype, gradient.dtype) == (np.float64, np.float32)


def test_a_factor_of_0_does_not_hide_a_nan():
    fn = lambda p, x: {"loss": MaskedMean.of(p * x), "z": MaskedMean.of(p * x / 0 * 0)}  # noqa: E731
    (value, means), gradient = jax.jit(value_and_grad_of_mean(fn, factors={"z": 0}, microbatches=2))(1.0, np.ones(4))
    assert means["loss"].value == 1
    assert np.isnan([value, gradient, means["z"].value]).all()


@pytest.mark.parametrize("microbatches", [1, 2])
def test_counts_of_a_sum_of_means_may_come_from_activations_but_have_no_derivative(microbatches):
    def fn(p, x, stop=lambda weights: weights):
        activations = jnp.sin(p * x)
        of_positive = MaskedMean.of(activations, activations > 0)
        return {"positive": of_positive, "weighted": MaskedMean.of(activations, weights=stop(jnp.exp(p * x)))}

    x = RNG.normal(size=8).astype(np.float32)
    with pytest.raises(ValueError, match="fn: got a MaskedMean 'weighted' whose count depends on the parameters"):
        value_and_grad_of_mean(fn, microbatches=microbatches)(0.7, x)
    stopped = functools.partial(fn, stop=lax.stop_gradient)
    (value, means), gradient = jax.jit(value_and_grad_of_mean(stopped, microbatches=microbatches))(0.7, x)
    expected = jax.jit(jax.value_and_grad(lambda p: value_of_sum(stopped(p, x), {})))(0.7)
    chex.assert_trees_all_close((value, gradient), expected, rtol=1e-5)
    assert means["positive"].count == np.sum(np.sin(np.float32(0.7) * x) > 0)


def test_derivatives_by_weights_around_the_gradient_of_a_sum_of_means():
    """In eager code they see the counts, which do not depend on the parameters all the same."""

    def fn(p, x, weights):
        return {"weighted": MaskedMean.of(jnp.sin(p * x), weights=weights), "all": MaskedMean.of(p * x)}

    x, weights = np.float32([0.5, 1, 2]), jnp.array([1.0, 0.5, 2])
    actual = jax.grad(lambda weights: value_and_grad_of_mean(fn)(0.7, x, weights)[1])(weights)
    of_whole = jax.grad(lambda p, weights: value_of_sum(fn(p, x, weights), {}))
    np.testing.assert_allclose(actual, jax.grad(of_whole, 1)(0.7, weights), rtol=1e-5)


def test_aux_dtypes_and_arguments_of_a_sum_of_means():
    def fn(features, params, *, labels):
        means = several_means(params, features.astype(jnp.bfloat16), labels)
        return means, {"is live": MaskedMean.of(labels != -100), "rows": labels[:, 0]}

    step = value_and_grad_of_mean(fn, (1,), has_aux=True, factors=FACTORS, microbatches=4)
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    (value, means, aux), (gradients,) = jax.jit(step)(FEATURES, params, labels=LABELS)
    np.testing.assert_array_equal(aux["rows"], [LABELS[i::4, 0] for i in range(4)])
    assert (aux["is live"].total, aux["is live"].count) == (np.sum(LABELS != -100), LABELS.size)
    assert value.dtype == means["z"].total.dtype == jnp.float32
    chex.assert_trees_all_equal_dtypes(gradients, params)
    np.testing.assert_allclose(value, value_of_sum(means), rtol=1e-6)
    chex.assert_trees_all_close(jax.tree.map(jnp.float32, gradients), sum_of_the_whole()[2], atol=0.02)


def test_a_sum_of_means_accumulates_bfloat16_in_float32():
    ones = lambda p, x: {"a": MaskedMean.of(x * p), "b": MaskedMean.of(x * p)}  # noqa: E731
    step = value_and_grad_of_mean(ones, factors={"b": 3}, microbatches=512)
    _, gradient = jax.jit(step)(jnp.bfloat16(1), jnp.ones(512, jnp.bfloat16))
    assert gradient == 4  # a sum in bfloat16 stands still at 256 of 512 parts


@pytest.mark.exhaustive
def test_second_derivatives_of_a_sum_of_means():
    def of_whole(params):
        return jax.grad(lambda params: value_of_sum(several_means(params, FEATURES, LABELS)))(params)

    along = lambda grad: jax.jit(lambda p: jax.jvp(grad, (p,), (PARAMS,))[1])(PARAMS)  # noqa: E731
    step = value_and_grad_of_mean(several_means, factors=FACTORS, microbatches=4)
    in_parts = along(lambda p: step(p, FEATURES, LABELS)[1])
    chex.assert_trees_all_close(in_parts, along(of_whole), rtol=1e-4, atol=1e-5)


def deep_means(params, features, labels, as_one=False, counts_activations=False):
    """Of layers in a scan, each computed again in the gradient, behind a while loop."""
    mask = labels != -100
    layer = jax.checkpoint(lambda x, kernel: (jnp.tanh(x @ kernel), None))
    features = lax.while_loop(lambda x: jnp.max(x) > 8, lambda x: x @ jnp.full((64, 64), 1e-3), features)
    logits = lax.scan(layer, features, params)[0]
    per_token = jax.jit(losses.softmax_cross_entropy_with_integer_labels)(logits, labels, where=mask)
    z = jnp.square(masksafe.logsumexp(logits, -1))
    if as_one:
        return MaskedMean.of(per_token + z, mask)
    return {
        "loss": MaskedMean.of(per_token, mask),
        "z": MaskedMean.of(z, logits[..., 0] > 0 if counts_activations else None),
    }


@pytest.mark.optimised
@parametrize("mode", ["off"], exhaustive=["raise"])
def test_the_pass_for_counts_is_pruned_to_the_masks(mode):
    """It has no product of matrices; one gradient is accumulated, as for a single mean."""
    args = np.ones((3, 64, 64), np.float32), np.ones((8, 6, 64), np.float32), np.zeros((8, 6), np.int32)

    def program_of(**options):
        fn = value_and_grad_of_mean(functools.partial(deep_means, **options), microbatches=4)
        with masksafe.label_checks(mode):
            return jax.jit(fn).lower(*args).compile()

    one, several, with_more = program_of(as_one=True), program_of(), program_of(counts_activations=True)
    products = [program.as_text().count(" dot(") for program in (one, several, with_more)]
    assert 0 < products[0] == products[1] < products[2]
    sizes = [program.memory_analysis().temp_size_in_bytes for program in (one, several)]
    assert sizes[1] < sizes[0] + args[0].nbytes / 2


BATCH, RAW_KEY = (PARAMS, FEATURES, LABELS), jax.random.PRNGKey(0)
SPLIT = "A key of jax.random.key is split"
# Options, arguments, the error, and a part of its text.
BAD_ARGUMENTS = [
    ({"argnums": (0, 0)}, BATCH, ValueError, "argnums"),
    ({"argnums": 1.5}, BATCH, ValueError, "argnums"),
    ({"argnums": 3}, BATCH, ValueError, "argnums"),
    ({"axis_name": "d"}, BATCH, ValueError, "axis_name"),
    ({"microbatches": 0}, BATCH, ValueError, "microbatches: got value 0"),
    ({"microbatches": 3}, BATCH, ValueError, r"args\[1\]: got shape \(16, 6, 3\)"),
    ({"microbatches": 2}, (*BATCH[:2], LABELS[:8]), ValueError, r"16 of args\[1\] and 8 of args\[2\]; .* is None.$"),
    ({"microbatches": 2}, (*BATCH[:2], RAW_KEY), ValueError, rf"2 of args\[2\]; .* in_axes is None. {SPLIT}"),
    ({"microbatches": 4}, (PARAMS, 1.0, RAW_KEY), ValueError, rf"\[2\]: got shape \(2,\); .* an axis 0 .* {SPLIT}"),
    ({"in_axes": (None, 0)}, BATCH, ValueError, "in_axes: got 2 of them; expected one for each of the 3"),
    ({"in_axes": (0, 0, 0)}, BATCH, ValueError, r"in_axes\[0\]: got value 0; expected None"),
    ({"in_axes": (None, {}, 0)}, BATCH, ValueError, r"in_axes\[1\]: got {} for an argument"),
    ({"in_axes": 0.5}, BATCH, TypeError, "in_axes: got value 0.5"),
    ({"in_axes": (None, "a", 0)}, BATCH, TypeError, "in_axes: got value 'a'"),
    ({"in_axes": 2}, BATCH, ValueError, r"args\[2\]: got shape \(16, 6\); expected an axis 2"),
    ({"fn": lambda p, x: p * x}, (1.0, 1.0), TypeError, r"an array of dtype float32 and .* MaskedMean.of\("),
    ({"fn": lambda x: x}, (1.0,), TypeError, "fn: got a function that returns"),
    ({"fn": lambda p: (MaskedMean(p, 1), p)}, (1.0,), TypeError, "Write has_aux=True"),
    ({"fn": lambda p: MaskedMean(1j, p)}, (1.0,), TypeError, "total has dtype complex64"),
    ({"fn": lambda x: MaskedMean(x, x)}, (jnp.ones(2),), ValueError, "total has shape"),
    ({"fn": lambda x: MaskedMean.of(x)}, (3,), TypeError, "dtype int32; expected a float"),
    ({"fn": lambda p: MaskedMean({"a": p}, 1)}, (1.0,), TypeError, "whose total is of type dict; .* {'loss': Masked"),
    ({"fn": lambda p: {}}, (1.0,), ValueError, "fn: got a function that returns an empty dict"),
    ({"fn": lambda p: {"z": {"a": MaskedMean(p, 1)}}}, (1.0,), TypeError, "fn: got a dict whose 'z' is of type dict"),
    (
        {"fn": lambda p: {"z": p * p}},
        (jnp.ones(()),),
        TypeError,
        r"fn: got a dict whose 'z' is an array of shape \(\); .* Write MaskedMean.of\(",
    ),
    ({"fn": lambda x: {"z": MaskedMean(x, 1)}}, (jnp.ones(2),), ValueError, r"a MaskedMean 'z' whose total has shape"),
    ({"fn": lambda p: ({"z": MaskedMean(p, 1)}, p)}, (1.0,), TypeError, "a dict and more; .* Write has_aux=True"),
    ({"fn": lambda p: {"z": MaskedMean(p, 1)}, "has_aux": True}, (1.0,), TypeError, "returns dict; .* and aux, as"),
    ({"factors": {"z": 0.1}}, BATCH, ValueError, r"factors: got names \['z'\]; expected None for a function"),
    (
        {"fn": several_means, "factors": {"y": 1}},
        BATCH,
        ValueError,
        r"factors: got the name 'y'; .* means: \['loss', 'z'",
    ),
    ({"fn": several_means, "factors": 0.1}, BATCH, TypeError, "factors: got type float; expected a dict"),
    ({"fn": several_means, "factors": {"z": "much"}}, BATCH, TypeError, r"factors\['z'\]: got"),
    ({"fn": several_means, "factors": {"z": 1j}}, BATCH, TypeError, r"factors\['z'\]: got dtype complex64"),
    ({"fn": several_means, "factors": {"z": jnp.ones(1)}}, BATCH, ValueError, r"factors\['z'\]: got shape \(1,\)"),
]


@pytest.mark.parametrize(("options", "args", "error", "match"), BAD_ARGUMENTS)
def test_bad_arguments_are_refused(options, args, error, match):
    with pytest.raises(error, match=match):
        value_and_grad_of_mean(**({"fn": mean_loss} | options))(*args)
