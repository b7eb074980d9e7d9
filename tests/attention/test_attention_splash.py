"""Splash attention under the contract, and where it is taken.

Its kernels are interpreted on a CPU, which shows numbers; `tests/platforms/test_splash_for_tpu.py` compiles them for a
TPU. No test runs them on one.
"""

import functools
import itertools
import operator

import attention_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    attention,
    below,
    causal,
    exact,
    hidden_by,
    normals,
    poisoned,
    random_inputs,
    replaced,
    with_gradients,
)
from comparisons import assert_close, assert_same_bits
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tiers import parametrize

from masksafe._core import platforms
from masksafe.attention import _splash
from masksafe.attention._pairs import Pairs, Side
from masksafe.attention._plan import Operands, Plan

T, S = 256, 384  # one block of queries, three of keys
SIZES = dict(B=2, T=T, S=S, N=2, K=1, H=16)
LENGTHS = dict(query_seq_lengths=np.array([200, 256]), key_value_seq_lengths=np.array([130, 0]))
IN_LENGTHS = below([200, 256], T)[:, None, :, None] & below([130, 0], S)[:, None, None]
IDS = (
    np.stack([np.arange(T) // 60, np.arange(T) // 100 + 5]),
    np.stack([np.arange(S) // 100, np.arange(S) // 90]),  # of the second sample few are in both
)
SEGMENTS = dict(query_segment_ids=IDS[0], key_value_segment_ids=IDS[1])
SAME_SEGMENT = IDS[0][:, None, :, None] == IDS[1][:, None, None]
CASES = {
    "all": (
        dict(local_window_size=(90, 60), causal_offset=40, **LENGTHS, **SEGMENTS),
        cases.window(T, S, 50, 100) & IN_LENGTHS & SAME_SEGMENT,
    ),
    "plain": ({}, True),
    "causal": (dict(is_causal=True), causal(T, S)),
    "queries before all keys": (dict(is_causal=True, causal_offset=-100), causal(T, S, -100)),
    "key lengths": (dict(key_value_seq_lengths=np.array([0, 300])), below([0, 300], S)[:, None, None]),
    "segments": (SEGMENTS, SAME_SEGMENT),
}
CASES = {name: (arguments, np.broadcast_to(live, (2, 2, T, S))) for name, (arguments, live) in CASES.items()}
GARBAGE = [np.nan, np.inf, -np.inf, 1e38, -3e38]
INPUTS = "query", "key", "value"
D_OUT, D_LSE = normals(2, T, 2, 16, seed=6), normals(2, T, 2, seed=7)
splash = functools.partial(attention, implementation="splash")


@pytest.fixture(autouse=True)
def for_tpu():
    """Programs seem to be lowered for a TPU, whose kernels are interpreted."""
    with platforms.chosen(form="tpu", interprets=True):
        yield


def inputs_of(dtype=np.float32, **sizes):
    return random_inputs(**(SIZES | sizes), dtype=dtype)


@functools.cache
def program(name):
    """The program of a case for inputs and cotangents of the output and the logsumexp: one for many tests."""
    return with_gradients(functools.partial(splash, return_residual=True, **CASES[name][0]))


@functools.cache
def clean_results(name):
    return program(name)(inputs_of(), cotangents_of(CASES[name][1]))


def cotangents_of(live, dtype=np.float32):
    """Those of empty queries are garbage as well."""
    is_empty = ~live.any(3).transpose(0, 2, 1)
    return np.where(is_empty[..., None], np.nan, D_OUT).astype(dtype), np.where(is_empty, np.inf, D_LSE)


@parametrize(
    ("name", "dtype"),
    [("all", np.float32)],
    exhaustive=[
        ("all", jnp.bfloat16),
        *((n, np.float32) for n in ("plain", "causal", "queries before all keys", "key lengths", "segments")),
    ],
)
def test_values_and_gradients(name, dtype):
    """Empty queries are 0 and have logsumexp -inf, gradients of what is masked are 0, and garbage changes no bit."""
    inputs, live = inputs_of(dtype), CASES[name][1]
    clean = (out, _), gradients = program(name)(inputs, cotangents_of(live, dtype))
    assert out.dtype == dtype
    d_out, d_lse = (np.where(np.isfinite(d), d, 0) for d in cotangents_of(live))
    expected, of_all = exact(*inputs, live, d_out=d_out, d_lse=d_lse)
    assert_close(clean, (expected, tuple(of_all[n] for n in INPUTS)), 2e-5 if dtype == np.float32 else 4e-2)
    for x, hidden in zip((out, *gradients), (hidden_by(live)[0], *hidden_by(live)), strict=True):
        assert (np.where(hidden, x, 0) == 0).all()
    for garbage in GARBAGE:
        assert_same_bits(program(name)(poisoned(inputs, live, garbage), cotangents_of(live, dtype)), clean)


FORMS = {
    "sizes that are no multiples": (dict(is_causal=True), dict(T=200, S=333), causal(200, 333), {}),
    "two key heads": (dict(is_causal=True), dict(N=4, K=2), causal(T, S), {}),
    "scale, soft cap, as many key heads, another width of values": (
        dict(scale=0.7, logit_soft_cap=1.5, local_window_size=(20, 150)),
        dict(K=2, width=24),
        cases.window(T, S, 20, 150),
        dict(scale=0.7, soft_cap=1.5),
    ),
}


@parametrize(
    "name",
    ["sizes that are no multiples"],
    exhaustive=["two key heads", "scale, soft cap, as many key heads, another width of values"],
)
def test_forms(name):
    arguments, sizes, live, options = FORMS[name]
    inputs = inputs_of(**sizes)
    fn = with_gradients(functools.partial(splash, return_residual=True, **arguments))
    shape = (*inputs[0].shape[:3], inputs[2].shape[3])
    d_out, d_lse = normals(*shape, seed=6), normals(*shape[:3], seed=7)
    expected, of_all = exact(*inputs, live, d_out=d_out, d_lse=d_lse, **options)
    assert_close(fn(inputs, (d_out, d_lse)), (expected, tuple(of_all[n] for n in INPUTS)))


@parametrize("name", ["packed"], exhaustive=["causal", "key lengths", "packed, before"])
def test_values_alone(name):
    """Without a gradient, and without the logsumexp if no query may be empty, as in one array of segments."""
    arguments, live = CASES.get(name, (None, None))
    inputs = inputs_of() if arguments else inputs_of(S=T)
    if not arguments:
        offset = -70 if "before" in name else 0
        arguments = dict(query_segment_ids=IDS[0], key_value_segment_ids=IDS[0], is_causal=True, causal_offset=offset)
        live = causal(T, T, offset) & (IDS[0][:, None, :, None] == IDS[0][:, None, None])
    out = jax.jit(lambda *x: splash(*x, **arguments))(*inputs)
    assert_close(out, exact(*inputs, live)[0])
    assert (np.asarray(out)[~live.any(3).transpose(0, 2, 1).repeat(3 - live.shape[1], 2)] == 0).all()


@pytest.mark.exhaustive
def test_in_memory_of_nan(monkeypatch):
    """Uninitialised memory is NaN, and reads out of bounds and races are errors.

    This interpreter has no place within an op, and takes a kernel for one sample.
    """

    def one_by_one(fn):
        def run(*args):
            results = [fn(*jax.tree.map(operator.itemgetter(n), args)) for n in range(2)]
            return jax.tree.map(lambda *x: jnp.stack(x), *results)

        return run

    monkeypatch.setattr(jax, "vmap", one_by_one)
    sides = (
        Side(segment=jnp.asarray(ids), length=jnp.asarray(n)) for ids, n in zip(IDS, LENGTHS.values(), strict=True)
    )
    pairs, plan = Pairs(*sides), Plan(0.25, None, 0.0, (50, 100), platforms.choices().attention)
    interprets, x = pltpu.InterpretParams(detect_races=True), Operands(*map(jnp.asarray, inputs_of()))
    results = jax.jit(functools.partial(_splash._run, plan, interprets, True))(x, pairs)
    pull_back = functools.partial(_splash._pull_back, plan, interprets)
    dx = jax.jit(pull_back)(x, pairs, results, cotangents_of(CASES["all"][1]))
    assert_close((results, dx[:3]), clean_results("all"))


# Nothing is hidden.

BAD = [(0, 0, 70, 1, 3), (1, 0, 70, 0, 5), (2, 0, 20, 0, 2), (2, 0, 120, 0, 0)]


@parametrize("name", ["all"], exhaustive=["causal"])
def test_bad_elements_show_where_they_are_seen(name):
    inputs, live = inputs_of(), CASES[name][1]
    xla = with_gradients(functools.partial(attention, return_residual=True, implementation="xla", **CASES[name][0]))
    shown = set()
    for bad, (operand, *index) in itertools.product([np.nan, np.inf, -1e30], BAD):
        changed = list(inputs)
        changed[operand] = replaced(inputs[operand], tuple(index), bad)
        found = program(name)(tuple(changed), cotangents_of(live))
        with platforms.chosen(form="cpu"):
            expected = xla(tuple(changed), cotangents_of(live))
        cases.assert_alike_where_finite(found, expected)
        sees = np.isnan(found[0][1])
        shown.add(bool(sees.any()))
        assert_same_bits(np.asarray(found[0][0])[~sees], np.asarray(clean_results(name)[0][0])[~sees])
    assert True in shown


def test_bad_cotangents_show_in_what_their_query_sees():
    d_outs = [(replaced(D_OUT, (0, 70, 1, 3), bad), D_LSE) for bad in (np.nan, np.inf, 1e30)]
    sees, of_query = CASES["all"][1][0, 1, 70], np.zeros((2, T, 2), bool)
    of_query[0, 70, 1] = True
    for d in (*d_outs, *((D_OUT, replaced(D_LSE, (0, 70, 1), bad)) for bad in (np.nan, np.inf))):
        _, (dq, dk, dv) = program("all")(inputs_of(), d)
        np.testing.assert_array_equal(np.isnan(dq).all(-1), of_query)
        for x in (dk, dv):
            np.testing.assert_array_equal(np.isnan(x).all(-1)[..., 0], [sees, np.zeros(S, bool)])
    assert sees.any()


def test_bad_queries_without_a_cotangent_take_no_part():
    assert CASES["all"][1][0, 0, 100].any()
    d = replaced(D_OUT, (0, slice(100, None)), 0), replaced(D_LSE, (0, slice(100, None)), 0)
    query, *others = inputs_of()
    bad = replaced(query, (0, slice(100, None)), np.nan)
    assert_same_bits(program("all")((bad, *others), d)[1], program("all")((query, *others), d)[1])


def test_huge_finite_numbers():
    """Up to the limit they count, and if masked their products never do."""
    query, key, value = inputs_of()
    limit, see = 2.0**60, slice(60, 120)  # for a width of 16
    for factor, is_bad in ((1, False), (2, True)):
        huge = replaced(np.abs(key), (0, 110), limit * factor)
        (out, lse), gradients = program("all")((np.abs(query), huge, value), (D_OUT, D_LSE))
        assert np.isnan(out[0, see]).all() == is_bad
        assert np.isfinite(out[0, :60]).all()
        assert np.isfinite(lse[0, see]).all() != is_bad
        assert np.isnan(gradients[0][0, see]).any() == is_bad


# Derivatives and transformations.


@pytest.mark.exhaustive
def test_other_derivatives():
    (arguments, live), inputs, along = CASES["all"], inputs_of(), inputs_of(seed=3)
    by_splash = jax.jit(functools.partial(cases.other_derivatives, functools.partial(splash, **arguments)))
    expected = jax.jit(functools.partial(cases.other_derivatives, functools.partial(cases.by_formula, live)))
    clean = by_splash(inputs, along)
    assert_close(clean, expected(inputs, along), 1e-4)
    assert_same_bits(by_splash(poisoned(inputs, live, np.nan), along), clean)
    assert_same_bits(by_splash(inputs, poisoned(along, live, np.nan)), clean)


def mesh_of(kind):
    return jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind,) * 2, devices=jax.devices()[:4])


# Where it is taken.

X = jax.ShapeDtypeStruct((4, T, 4, 16), np.float32)
PAIRS = np.ones((T, T), bool)
REFUSED = [
    (dict(dtype=jnp.float16), {}, "the dtype is float16, not bfloat16 or float32"),
    ({}, dict(mask=PAIRS), "it has no array over pairs as mask"),
    ({}, dict(bias=np.zeros((1, T))), "it has no bias"),
    ({}, dict(score_mod=lambda x, *_: 2 * x), "it has no score_mod"),
    ({}, dict(mask_mod=lambda b, h, q, k: q >= k), "it has no mask_mod"),
    ({}, dict(dropout_rate=0.1, dropout_key=jax.random.key(0)), "it has no dropout"),
    ({}, dict(sinks=np.zeros(4, np.float32)), "its output is rounded before sinks could count"),
    ({}, dict(scale=np.ones(1, np.float32)), "the scale is not a number"),
    ({}, dict(is_causal=True, query_positions=np.arange(T)), "there are positions"),
    ({}, dict(is_causal=True, causal_offset=np.arange(4)), "an offset that is not a number"),
    (dict(shape=(4, 127, 4, 16)), {}, "there are 127 queries, fewer than 128"),
    ({}, dict(is_causal=True, causal_offset=-T), "no query sees a key"),
]


def lowered(fn, *args, platform="tpu"):
    return jax.jit(lambda *args: fn(*args)).trace(*args).lower(lowering_platforms=(platform,)).as_text()


@pytest.fixture
def for_users():
    """The choice of a user's program."""
    with platforms.chosen(form=None, interprets=False):
        yield


def test_refusals(for_users):
    """Asked for by name it is an error with the reason."""
    for types, arguments, reason in REFUSED:
        x = jax.ShapeDtypeStruct(types.get("shape", X.shape), types.get("dtype", X.dtype))
        with pytest.raises(ValueError, match=f"implementation: got value 'splash'.*For splash attention, .*{reason}"):
            jax.eval_shape(functools.partial(splash, **arguments), x, x, x)


def test_float64_and_symbolic_sizes_are_refused(for_users):
    with jax.enable_x64(True), pytest.raises(ValueError, match="the dtype is float64"):
        splash(*3 * (np.ones((1, T, 1, 8)),))
    (size,) = jax.export.symbolic_shape("b")
    x = jax.ShapeDtypeStruct((size, T, 1, 8), np.float32)
    with pytest.raises(ValueError, match="a size is symbolic"):
        jax.export.export(jax.jit(splash), platforms=["tpu"])(x, x, x)
    assert "tpu_custom_call" not in jax.export.export(jax.jit(attention), platforms=["tpu"])(x, x, x).mlir_module()


def gradients(*inputs, **arguments):
    return jax.grad(lambda *x: attention(*x, **arguments).sum(), (0, 1, 2))(*inputs)


def test_programs_for_a_tpu(for_users):
    """The kernel forward, and one for dq, one for dk and dv; none on another platform."""
    assert lowered(attention, X, X, X).count("tpu_custom_call") == 1
    with jax.enable_x64(True):
        assert lowered(gradients, X, X, X).count("tpu_custom_call") == 3
    assert "tpu_custom_call" not in lowered(functools.partial(attention, implementation="xla"), X, X, X)
    assert "tpu_custom_call" not in lowered(functools.partial(attention, mask=PAIRS), X, X, X)
    assert "tpu_custom_call" not in lowered(gradients, X, X, X, platform="cpu")
    several = jax.export.export(jax.jit(attention), platforms=["cpu", "cuda", "tpu"])(X, X, X)
    assert several.mlir_module().count("tpu_custom_call") == 1


@parametrize("kind", [AxisType.Explicit], exhaustive=[AxisType.Auto])
def test_programs_for_many_tpus(kind, for_users):
    mesh, spec = mesh_of(kind), PartitionSpec("x", None, "y")
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(mesh, spec))
    of_devices = 3 if kind == AxisType.Explicit else 0
    assert lowered(gradients, x, x, x).count("tpu_custom_call") == of_devices
    split = jax.shard_map(gradients, mesh=mesh, in_specs=spec, out_specs=spec)
    assert lowered(split, x, x, x).count("tpu_custom_call") == 3


def test_programs_for_meshes_that_are_not_known(for_users):
    """How arrays of automatic meshes are split need not be known while tracing, nor all axes of `jax.shard_map`."""
    mesh, half = mesh_of(AxisType.Auto), PartitionSpec("x")
    spread = jax.jit(attention, in_shardings=NamedSharding(mesh, half))
    assert "tpu_custom_call" not in spread.trace(X, X, X).lower(lowering_platforms=("tpu",)).as_text()
    some = jax.shard_map(gradients, mesh=mesh, in_specs=half, out_specs=half, axis_names={"x"})
    assert "tpu_custom_call" not in lowered(some, X, X, X)


def test_named_where_it_cannot_run_it_is_refused(for_users):
    """Numbers of an eager call are static: as arrays they would be the reason."""
    x = jnp.zeros((1, T, 1, 8))
    for call in (
        lambda: jax.jit(splash).lower(X, X, X),
        lambda: splash(x, x, x, scale=0.3, is_causal=True, causal_offset=3),
    ):
        with pytest.raises(ValueError, match="lowered for another platform than a TPU"):
            call()
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(mesh_of(AxisType.Auto), PartitionSpec("x")))
    with pytest.raises(ValueError, match="the compiler splits the arrays over devices"):
        lowered(splash, x, x, x)


@pytest.fixture
def of_another_jax(for_users, monkeypatch):
    """Splash attention seems to have other parameters than are passed."""
    assert _splash.has_functions()
    monkeypatch.setattr(_splash, "_PARAMETERS", _splash._PARAMETERS | {"bwd_dq": "q k v"})
    caches = _splash.has_functions.cache_clear, _splash._warn.cache_clear
    for clear in caches:
        clear()
    yield
    monkeypatch.undo()
    for clear in caches:
        clear()


def test_a_jax_with_other_kernels_has_blocks_and_a_program_for_a_tpu_warns_of_it_once(of_another_jax):
    x = jax.ShapeDtypeStruct((3, *X.shape[1:]), X.dtype)  # JAX keeps what it has lowered for X
    export = lambda fn, platform: jax.export.export(jax.jit(fn), platforms=[platform])(x, x, x)  # noqa: E731
    export(gradients, "cpu")  # a warning is an error here
    with pytest.warns(UserWarning, match="other kernels of splash attention.*Install a newer masksafe") as found:
        program = export(gradients, "tpu")
    assert [warning.filename for warning in found] == [__file__]
    assert "tpu_custom_call" not in program.mlir_module()
    export(lambda q, k, v: 2 * gradients(q, k, v)[0], "tpu")
    with pytest.raises(ValueError, match="this version of JAX has other kernels"):
        jax.eval_shape(splash, x, x, x)
