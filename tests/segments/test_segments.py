"""Segments: what they have of their own beside the contract. Ids, masks of rows, digits, devices."""

import functools

import definitions
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import assert_close
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tiers import parametrize

import masksafe

N, S, COLUMNS = 24, 5, 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, COLUMNS)).astype(np.float32)
IDS = RNG.choice([0, 1, 2, 4], N).astype(np.int32)  # 3 is empty
ROWS = RNG.random(N) < 0.7
REDUCTIONS = "mean", "sum", "var", "max", "min", "logsumexp"
OF_ROWS = "softmax", "log_softmax", "standardize"
OPS = *REDUCTIONS, *OF_ROWS
NOTHING = {"max": -np.inf, "min": np.inf, "logsumexp": -np.inf, "log_softmax": -np.inf}


def segment(name):
    return getattr(masksafe, f"segment_{name}")


def finite(out):
    return masksafe.mask_where(jnp.isinf(out), out, 0)


each_op = parametrize("name", ["mean"], exhaustive=OPS)
# One of each kind: sums, two of them, integers by order, and results that have the rows of the data.
each_kind = parametrize("name", ["mean"], exhaustive=["var", "max", "logsumexp", "standardize"])


@functools.partial(jax.jit, static_argnames=("name", "number", "options"))
def step(name, x, ids, where=None, number=S, options=()):
    """The result, and the gradient of some function of what is finite of it."""

    def loss(x):
        out = segment(name)(x, ids, number, where=where, **dict(options))
        return jnp.sum(jnp.sin(finite(out))), out

    (_, out), gradient = jax.value_and_grad(loss, has_aux=True)(x)
    return out, gradient


@each_kind
def test_any_rank_is_as_columns(name):
    arrays = [RNG.normal(size=shape).astype(np.float32) for shape in ((N,), (N, 2, 2))]
    of_arrays = jax.jit(lambda arrays: [segment(name)(x, IDS, S) for x in arrays])(arrays)
    for x, out in zip(arrays, of_arrays, strict=True):
        assert out.shape[1:] == x.shape[1:]
        expected, _ = step(name, x.reshape(N, -1), IDS)
        np.testing.assert_allclose(out.reshape(expected.shape), expected, rtol=1e-6, atol=1e-7)


@parametrize("name", ["sum"], exhaustive=["max", "min"])
def test_jax_ops(name):
    peer = getattr(jax.ops, f"segment_{name}")
    for x in (X, np.arange(N, dtype=np.uint8), X > 0):
        out, expected = segment(name)(x, IDS, S), peer(x.astype(jnp.sum(x).dtype) if name == "sum" else x, IDS, S)
        assert out.dtype == expected.dtype
        np.testing.assert_allclose(np.float32(out), np.float32(expected), rtol=1e-6)


@each_op
def test_an_id_out_of_range_is_masked_as_a_row_is(name):
    garbage = np.where(ROWS[:, None], X, np.nan)
    expected = step(name, X, IDS, ROWS)
    ids = IDS.astype(np.int64)
    ids[~ROWS] = np.resize([-1, S, -5, S + 7, 2**31 - 1, 2**32], np.sum(~ROWS))
    for x, some_ids, where in ((garbage, ids, None), (garbage, IDS, ROWS), (X, ids, ROWS), (X, IDS, ROWS[:, None])):
        assert_close(step(name, x, np.clip(some_ids, -9, S + 9).astype(np.int32), where), expected, atol=0, rtol=0)
    np.testing.assert_array_equal(segment(name)(garbage, ids, S), expected[0])  # NumPy's 64 bits do not wrap


@each_kind
def test_sorted_ids(name):
    order = np.argsort(IDS, kind="stable")
    x, ids, rows = X[order], IDS[order], ROWS[order]
    ids[:2], ids[-2:], x[:2], x[-2:] = -1, S, np.nan, np.inf
    options = (("indices_are_sorted", True),)
    assert_close(step(name, x, ids, rows, options=options), step(name, x, ids, rows))
    assert_close(step(name, x, ids, options=options), step(name, x, ids))


@each_op
def test_a_nan_stays_in_its_segment(name):
    dirty = np.array(X)
    at = np.flatnonzero(IDS == 2)[0]
    dirty[at, 1] = np.nan
    clean, (out, gradient) = step(name, X, IDS), step(name, dirty, IDS)
    there = np.arange(S) == 2 if name in REDUCTIONS else IDS == 2
    assert np.isnan(out[there, 1]).all()
    assert np.isnan(gradient[IDS == 2, 1]).any()
    for dirty_array, clean_array, rows in ((out, clean[0], there), (gradient, clean[1], IDS == 2)):
        others = np.ones(clean_array.shape, bool)
        others[rows, 1] = False
        np.testing.assert_array_equal(np.asarray(dirty_array)[others], np.asarray(clean_array)[others])


def test_the_number_of_segments_is_that_of_unmasked_ids():
    ids = np.array([0, 3, 9, -1])
    assert masksafe.segment_sum(np.ones(4), ids).shape == (10,)
    assert masksafe.segment_sum(np.ones(4), ids, where=ids < 9).shape == (4,)
    of_elements = np.array([[1, 0], [0, 1], [0, 0], [1, 1]], bool)
    assert masksafe.segment_sum(np.ones((4, 2)), ids, where=of_elements).shape == (4, 2)
    with pytest.raises(TypeError, match=r"^segment_sum: num_segments: got None, where segment_ids is a traced array; "):
        jax.jit(masksafe.segment_sum)(np.ones(4), ids)


@each_op
def test_no_rows_no_elements_and_no_segments(name):
    for x, number, where in ((X[:0], S, np.ones((0, COLUMNS), bool)), (X, 0, None), (X[:, :0], S, np.ones(N, bool))):
        out, gradient = step(name, x, np.zeros(len(x), np.int32), where, number=number)
        shape = (number, *x.shape[1:]) if name in REDUCTIONS else x.shape
        np.testing.assert_array_equal(out, np.full(shape, NOTHING.get(name, 0)))
        np.testing.assert_array_equal(gradient, np.zeros_like(x))


@parametrize("offset", [0.0], exhaustive=[1e4])
def test_an_offset_costs_no_digits(offset):
    ids = np.arange(4095) % 3
    x = np.float32(RNG.normal(size=4095) + offset * (1 + ids))
    var, standard = masksafe.segment_var(x, ids, 3), masksafe.segment_standardize(x, ids, 3)
    for s, row in enumerate(np.float64([x[ids == s] for s in range(3)])):
        np.testing.assert_allclose(var[s], np.var(row), rtol=2e-6)
        np.testing.assert_allclose(standard[ids == s], definitions.standardize(row), rtol=2e-5, atol=2e-6)


def test_equal_elements_have_no_variance_and_one_that_overflows_is_infinite():
    x, ids = np.float32([0.1] * 7 + [1e4 + 0.3] * 7 + [3e38] * 7), np.repeat(np.arange(3), 7)
    np.testing.assert_array_equal(masksafe.segment_var(x, ids, 3), 0)
    out, pull_back = jax.vjp(lambda x: masksafe.segment_standardize(x, ids, 3, epsilon=0), x)
    np.testing.assert_array_equal([out, *pull_back(jnp.ones(21))], 0)
    np.testing.assert_array_equal(masksafe.segment_var(np.float32([1e38, -1e38, 1]), [0, 0, 1], 2), [np.inf, 0])


IN_CHUNKS = {"fewest_rows_in_chunks": 1, "fewest_rows_of_segments_in_chunks": 1, "rows_of_chunk_by_segments": 1}


@each_kind
def test_rows_in_chunks(name, choose):
    """Of large arrays sums are made of parts; four of these, one of which has no row of some segment."""
    order = np.argsort(IDS, kind="stable")
    ids = IDS.copy()
    ids[[0, 7, 23]] = -1, S, 2**31 - 1
    cases = [(X, ids, ROWS, ()), (X[:, 0], ids, X[:, 0] > 0, ())]
    in_order = np.append(np.full(7, -1), np.append(IDS[order][7:-7], np.full(7, S)))  # more than a part is masked
    cases.append((X, in_order, None, (("indices_are_sorted", True),)))
    expected = [step(name, x, ids, where, options=options) for x, ids, where, options in cases]
    choose(**IN_CHUNKS)
    assert f"f32[{4 * S},{COLUMNS}]" in str(jax.make_jaxpr(lambda x: masksafe.segment_sum(x, ids, S))(X))
    for (x, ids, where, options), of_case in zip(cases, expected, strict=True):
        x = np.where((ids < 0) | (ids >= S), np.nan, x.T).T.astype(np.float32)
        assert_close(step(name, x, ids, where, options=options), of_case)


@parametrize("name", ["var"], exhaustive=["mean"])
def test_weights_of_rows_in_chunks(name, choose):
    weights = RNG.uniform(0.5, 2, N).astype(np.float32)
    op = lambda x, w: jnp.sum(jnp.sin(segment(name)(x, IDS, S, weights=w)))  # noqa: E731
    expected = jax.jit(jax.value_and_grad(op, (0, 1)))(X, weights)
    choose(**IN_CHUNKS)
    assert_close(*map(jax.tree.leaves, (jax.jit(jax.value_and_grad(op, (0, 1)))(X, weights), expected)))


def test_16_bits_are_summed_in_float32_and_a_weighted_reduction_has_the_dtype_of_the_product():
    x, ids = jnp.full(8192, 8, jnp.float16), jnp.zeros(8192, jnp.int32)
    assert masksafe.segment_sum(x / 64, ids, 1) == 1024
    assert masksafe.segment_mean(x / 64, ids, 1) == 0.125
    for name, expected in (("sum", 69632), ("mean", 8)):
        result = segment(name)(x, ids, 1, weights=jnp.full(8192, 1.0625, jnp.float32))
        assert result.dtype == jnp.float32
        assert result == expected


@parametrize("name", ["sum"], exhaustive=["mean", "var"])
def test_a_negative_weight_shows_in_its_segment_and_weights_of_no_columns_are_none(name):
    weights = np.where(np.arange(N) == 0, -1, RNG.uniform(0.5, 2, N)).astype(np.float32)
    out = segment(name)(X, IDS, S, weights=weights)
    np.testing.assert_array_equal(np.isnan(out), np.broadcast_to(np.arange(S)[:, None] == IDS[0], (S, COLUMNS)))
    for of_nothing in (weights[:, None][:, :0], weights):
        assert segment(name)(X[:, :0], IDS, S, weights=of_nothing).shape == (S, 0)


@parametrize("name", ["max"], exhaustive=["min"])
def test_extrema_by_order(name, choose):
    """Elsewhere than on a CPU extrema are those of integers, to which a NaN of either sign is the last."""
    choose(form="accelerator")
    x = np.float32([-0.0, 0.0, np.nan, 1, -np.nan, 2, -np.inf, np.inf, -6e4, 6e-8, -7, -8])
    ids = np.repeat(np.arange(6), 2)
    expected = (np.maximum if name == "max" else np.minimum)(x[::2], x[1::2])
    for dtype in ("float32", "bfloat16", "float16"):
        out = jax.jit(segment(name), static_argnums=2)(jnp.asarray(x, dtype), ids, 7)
        assert out.dtype == dtype
        of_nothing = -np.inf if name == "max" else np.inf
        expected_here = np.append(expected, of_nothing).astype(out.dtype).astype(np.float32)
        np.testing.assert_array_equal(np.float32(out), expected_here)


@parametrize("name", ["max"], exhaustive=["min"])
def test_equal_extrema_of_16_bits_share_in_float32(name):
    x = jnp.ones(3000, jnp.float16)
    with jax.numpy_dtype_promotion("strict"):
        extremum = lambda x: segment(name)(x, np.zeros(3000, int), 1)  # noqa: E731
        assert jax.jvp(extremum, (x,), (x,))[1] == 1


def test_unsigned_ids():
    ids = np.append(IDS[1:], 2**32 - 1).astype(np.uint32)
    x, expected = np.append(X[1:], X[:1], 0), masksafe.segment_sum(X[1:], IDS[1:], S)
    np.testing.assert_array_equal(masksafe.segment_sum(x, ids, S), expected)
    with masksafe.label_checks("raise"):
        masksafe.segment_sum(x[:-1], ids[:-1], S)


def test_a_symbolic_number_of_segments():
    rows, nodes = jax.export.symbolic_shape("rows, nodes")
    args = [jax.ShapeDtypeStruct((rows,), d) for d in (jnp.float32, jnp.int32)]
    args.append(jax.ShapeDtypeStruct((nodes,), jnp.float32))
    program = jax.jit(lambda x, ids, nodes: masksafe.segment_softmax(x, ids, nodes.shape[0]))
    exported = jax.export.export(program)(*args)
    expected = masksafe.segment_softmax(X[:, 0], IDS, S)
    np.testing.assert_allclose(exported.call(X[:, 0], IDS, np.zeros(S, np.float32)), expected, rtol=1e-6)


def test_checks_report_ids_that_stand_for_no_padding():
    ids = np.array([0, -1, S, S + 1, -2])
    with masksafe.label_checks("raise"):
        masksafe.segment_sum(np.ones(5), ids, S, where=np.arange(5) < 3)
        text = rf"^segment_sum: 2 of 5 segment_ids are outside \[0, {S}\), and neither -1 nor {S}; first at \(3,\): 6"
        with pytest.raises(ValueError, match=text):
            masksafe.segment_sum(np.ones(5), ids, S)


@pytest.mark.parametrize(
    ("kind", "text", "call"),
    [
        (TypeError, "segment_ids: got dtype float32", {"segment_ids": np.zeros(N, np.float32)}),
        (ValueError, r"segment_ids: got shape \(3,\); expected shape \(24,\)", {"segment_ids": IDS[:3]}),
        (TypeError, "num_segments: got type float", {"num_segments": 2.5}),
        (ValueError, "num_segments: got value -1", {"num_segments": -1}),
        (ValueError, r"where: got shape \(3,\); expected shape \(24,\), for rows, or", {"where": ROWS[:3]}),
        (ValueError, r"data: got shape \(\)", {"data": 1.0}),
        (ValueError, "axis_name: got value 'x'", {"axis_name": "x"}),
    ],
)
def test_bad_arguments_are_refused(kind, text, call):
    with pytest.raises(kind, match=f"^segment_mean: {text}"):
        masksafe.segment_mean(**{"data": X, "segment_ids": IDS, "num_segments": S} | call)


# Several devices. The first of four has nothing left.

FOUR = np.arange(N) // (N // 4)
HERE = ROWS & (FOUR > 0)


@each_op
def test_rows_over_devices(name):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    rows = P("x")

    def on_each(x, ids, where):
        def loss(x):
            out = segment(name)(x, ids, S, where=where, axis_name="x")
            here = jnp.sum(jnp.sin(finite(out)))
            return here if name in REDUCTIONS else jax.lax.psum(here, "x"), out

        (_, out), gradient = jax.value_and_grad(loss, has_aux=True)(x)
        return out, gradient

    of_results = (P() if name in REDUCTIONS else rows), rows
    mapped = jax.shard_map(on_each, mesh=mesh, in_specs=(rows, rows, rows), out_specs=of_results)
    assert_close(jax.jit(mapped)(X, IDS, HERE), step(name, X, IDS, HERE))


@parametrize(
    ("name", "spec", "kind"),
    [("mean", P("x"), AxisType.Auto)],
    exhaustive=[
        ("var", P(None, "x"), AxisType.Auto),
        ("max", P("x", "y"), AxisType.Explicit),
        ("logsumexp", P(("y", "x")), AxisType.Auto),
        ("softmax", P(None, "x"), AxisType.Explicit),
        ("standardize", P("x"), AxisType.Explicit),
    ],
    ids=str,
)
def test_data_split_over_a_mesh(name, spec, kind):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind, kind))
    x = np.concatenate([X, X[:, :1]], 1)
    with jax.set_mesh(mesh):
        put = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, P(*spec)))  # noqa: E731
        ids, where = put(IDS, *spec[:1]), put(HERE, *spec[:1])
        program = step.lower(name, put(x, *spec), ids, where).compile()
        results = program(put(x, *spec), ids, where)
    assert "all-gather" not in program.as_text()
    assert_close(results, step(name, x, IDS, HERE))


def test_what_is_constant_is_not_counted_while_compiling():
    program = jax.make_jaxpr(lambda x: masksafe.segment_mean(x, IDS, S, where=ROWS))(X)
    assert "optimization_barrier" in str(program)
