"""The contract around cuDNN's kernel, for which a stand-in with its faults is called here, and the choice of it.

No test runs cuDNN itself. The last ones compile for a GPU that need not be there and look at the program.
"""

import functools
import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path

import comparisons
import cudnn_stand_in
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    assert_alike_where_finite,
    attention,
    below,
    causal,
    exact,
    hidden_by,
    loss,
    normals,
    poisoned,
    random_inputs,
    replaced,
    window,
    with_gradients,
)
from comparisons import assert_same_bits
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tiers import few_of

from masksafe._core import platforms
from masksafe.attention import _cudnn

forms = functools.partial(pytest.param, marks=pytest.mark.forms)
assert_close = functools.partial(comparisons.assert_close, rtol=2e-2)
T, S = 6, 8
SIZES = dict(B=2, T=T, S=S, N=4, K=2, H=8)
KEYS = np.array([[1, 1, 0, 1, 0, 0, 0, 1], [0] * S], bool)[:, None, None]
PAIRS = replaced(np.random.default_rng(0).random((2, 4, T, S)) < 0.4, (0, 1, 2), False)
LENGTHS = dict(query_seq_lengths=np.array([2, 6]), key_value_seq_lengths=np.array([5, 3]))
IN_LENGTHS = below([2, 6], T)[:, None, :, None] & below([5, 3], S)[:, None, None]
IDS = np.array([[0, 0, 1, 1, 1, 7], [3, 3, 3, 2, 2, 2]]), np.array([[0, 1, 1, 1, 2, 2, 2, 0], [2, 2, 3, 2, 2, 2, 2, 3]])
SEGMENTS = dict(query_segment_ids=IDS[0], key_value_segment_ids=IDS[1])
SAME_SEGMENT = IDS[0][:, None, :, None] == IDS[1][:, None, None]
OFFSETS = np.stack([causal(T, S, 1), causal(T, S, -2)])[:, None]
POSITIONS = (
    np.array([[5, 0, 3, 3, -2, 9], [0, 1, 2, 3, 4, 5]]),
    np.array([[3, 7, -5, 0, 0, 4, 2, 9], [7, 6, 5, 4, 3, 2, 1, 0]]),
)
IN_POSITION = POSITIONS[0][:, None, :, None] >= POSITIONS[1][:, None, None]
CASES = {
    "plain": ({}, True),
    "causal": (dict(is_causal=True), causal(T, S)),
    "window": (dict(local_window_size=(2, 0)), window(T, S, 2, 0)),
    "causal window": (dict(is_causal=True, local_window_size=1), window(T, S, 1, 0)),
    "key lengths": (dict(key_value_seq_lengths=np.array([5, 0])), below([5, 0], S)[:, None, None]),
    "query lengths": (dict(query_seq_lengths=np.array([2, 9])), below([2, 9], T)[:, None, :, None]),
    "causal, lengths": (dict(is_causal=True, **LENGTHS), causal(T, S) & IN_LENGTHS),
    "mask of keys": (dict(mask=KEYS), KEYS),
    "mask of pairs": (dict(mask=PAIRS), PAIRS),
    "mask, causal, lengths": (dict(mask=KEYS[:1], is_causal=True, **LENGTHS), KEYS[:1] & causal(T, S) & IN_LENGTHS),
    "everything masked": (dict(mask=np.zeros((1, 1, 1, 1), bool)), False),
    "segments": (SEGMENTS, SAME_SEGMENT),
    "causal, segments, lengths": (
        dict(is_causal=True, **SEGMENTS, **LENGTHS),
        causal(T, S) & SAME_SEGMENT & IN_LENGTHS,
    ),
    "causal, offset": (dict(is_causal=True, causal_offset=2), causal(T, S, 2)),
    "offset of each sample": (dict(is_causal=True, causal_offset=np.array([1, -2])), OFFSETS),
    "positions": (dict(is_causal=True, query_positions=POSITIONS[0], key_positions=POSITIONS[1]), IN_POSITION),
    "two sides": (dict(local_window_size=(2, 1)), window(T, S, 2, 1)),
    "a window and a mask": (dict(local_window_size=(1, 0), mask=KEYS), window(T, S, 1, 0) & KEYS),
    "mod": (dict(mask_mod=lambda b, h, q, k: (q + k) % 2 == 0), (np.arange(T)[:, None] + np.arange(S)) % 2 == 0),
}
CASES = {name: (arguments, np.broadcast_to(live, (2, 4, T, S))) for name, (arguments, live) in CASES.items()}
GARBAGE = [np.nan, np.inf, -np.inf, 1e38, -1e38]


@pytest.fixture(scope="module", autouse=True)
def stand_in():
    """CuDNN seems to be there, and every program to be lowered for CUDA."""
    with pytest.MonkeyPatch.context() as patch, platforms.chosen(form="cuda"):
        patch.setattr(jax.nn, "dot_product_attention", cudnn_stand_in.dot_product_attention)
        patch.setattr(_cudnn, "_refusal_of_jax", lambda *_: None)
        patch.setattr(_cudnn, "_has_old_gpu", lambda: False)
        yield


INPUTS = "query", "key", "value"
D_OUT, NO_BIAS = normals(2, T, 4, 8, seed=6).astype(jnp.bfloat16), np.zeros((1, 4, T, S), jnp.bfloat16)


def inputs_of(dtype=jnp.bfloat16, **sizes):
    return random_inputs(**(SIZES | sizes), dtype=dtype)


def wide(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("causal, lengths", jnp.bfloat16),
        *(forms(name, jnp.bfloat16) for name in CASES if name != "causal, lengths"),
        forms("causal, lengths", jnp.float16),
    ],
)
def test_value_and_gradients(name, dtype):
    arguments, live = CASES[name]
    inputs, d_out = inputs_of(dtype), normals(2, T, 4, 8, seed=6).astype(dtype)
    run = with_gradients(functools.partial(attention, **arguments))
    out, gradients = clean = run(inputs, d_out)
    assert out.dtype == dtype
    (expected, _), of_all = exact(*inputs, live, d_out=d_out)
    assert_close((out, gradients), (expected, tuple(of_all[n] for n in ("query", "key", "value"))))
    for x, hidden in zip((out, *gradients), (hidden_by(live, 2)[0], *hidden_by(live, 2)), strict=True):
        assert (np.where(hidden, x, 0) == 0).all()
    for garbage in GARBAGE:
        garbage = np.clip(garbage, -6e4, 6e4) if dtype == jnp.float16 and np.isfinite(garbage) else garbage
        assert_same_bits(run(poisoned(inputs, live, garbage), d_out), clean)
        dead = poisoned((d_out, *inputs[1:]), live, garbage)[0]  # a cotangent of a query that sees nothing
        assert_same_bits(run(inputs, dead), clean)


# By cuDNN and by the other form, with a mask of pairs and a bias: two programs for many tests.


@pytest.fixture(scope="module")
def both(stand_in):
    """The results of both, for arrays in place of the usual ones."""
    runs = [with_gradients(functools.partial(attention, implementation=i)) for i in ("cudnn", "xla")]

    def results(mask=PAIRS, d_out=D_OUT, bias=NO_BIAS, **inputs):
        args = *(dict(zip(INPUTS, inputs_of(), strict=True)) | inputs).values(), bias
        return [run(args, d_out, dict(mask=np.broadcast_to(mask, (2, 4, T, S)))) for run in runs]

    return results


@pytest.mark.parametrize("shape", few_of([(2, 4), (1, 4), (2, 1), (1, 1)], (1, 4)))
def test_a_bias_of_minus_infinity_masks(shape, both):
    """Whatever the other arrays hold there; the bias has a gradient."""
    live = np.broadcast_to(replaced(causal(T, S, -1), (3, 2), False), (2, 4, T, S))
    number = normals(*shape, T, S, seed=5).astype(jnp.bfloat16)
    bias = np.where(live[: shape[0], : shape[1]], number, -np.inf).astype(jnp.bfloat16)
    inputs, everything = inputs_of(), np.ones((T, S), bool)
    clean, _ = both(everything, bias=bias)
    (expected, _), of_all = exact(*inputs, live, np.float64(np.where(live, number, 0)), d_out=D_OUT)
    of_all["bias"] = of_all["bias"].sum(tuple(axis for axis in (0, 1) if shape[axis] == 1), keepdims=True)
    assert_close(clean, (expected, [of_all[n] for n in (*INPUTS, "bias")]), rtol=4e-2)
    assert (np.asarray(clean[1][3])[bias == -np.inf] == 0).all()
    for garbage in GARBAGE:
        dirty = dict(zip(INPUTS, poisoned(inputs, live, garbage), strict=True))
        assert_same_bits(both(everything, bias=bias, **dirty)[0], clean)


def test_what_a_bias_is_at_masked_pairs_does_not_matter(both):
    number = normals(1, 4, T, S, seed=5).astype(jnp.bfloat16)
    mask = np.broadcast_to(causal(T, S, -1) & replaced(KEYS, (1, 0, 0, 2), True), (2, 4, T, S))
    shown = mask.any(0, keepdims=True)
    clean, expected = both(mask, bias=np.where(shown, number, 0).astype(jnp.bfloat16))
    assert_close(clean, expected, rtol=4e-2)
    for garbage in GARBAGE:
        assert_same_bits(both(mask, bias=np.where(shown, number, garbage).astype(jnp.bfloat16))[0], clean)


def test_a_low_finite_bias_does_not_mask(both):
    """If all keys of a query have one, the masked ones get no weight, and its weights are those without a bias."""
    (expected, _), _ = both(causal(T, S))
    for value in (-3e38, -3e12, 3e38):
        bias = np.broadcast_to(replaced(np.zeros((T, S)), 2, value), (1, 4, T, S)).astype(jnp.bfloat16)
        (out, gradients), _ = both(causal(T, S), bias=bias)
        assert_close(out, expected)
        assert np.isfinite(wide(gradients[3])).all()


def test_huge_keys_that_some_queries_see(both):
    """Their logits exceed what `jax.nn` adds to masked ones, for the queries that do not see them as well.

    Those beyond the limit, 3.3e18 for a head of width 8, are bad.
    """
    query, key, _ = inputs_of()
    (cudnn, xla), (clean, _) = (
        both(causal(T, S), query=np.abs(query), key=replaced(key, (slice(None), 4), x)) for x in (1e18, 0)
    )
    assert np.isfinite(wide(cudnn[0])).all()
    assert_close(cudnn[0], xla[0])
    assert_close(cudnn[0][:, :4], clean[0][:, :4])


def test_what_is_too_large_for_a_product_is_bad_whatever_it_is_multiplied_by(both):
    small = dict(zip(INPUTS, (x * x.dtype.type(1e-19) for x in inputs_of()), strict=True))
    for name, large in itertools.product(INPUTS, (1.1e18, 1.2e18, 1e30)):
        actual, expected = both(True, **small | {name: replaced(small[name], (0, 2, 1, 3), large)})
        assert np.isnan(wide(actual[0])).any() == (large > 1.15e18)
        assert_alike_where_finite(actual, expected, 2e-2)


# Derivatives and transformations.


IN_AXES = (0, 0, 0), (1, 0, 0), (0, None, None), (None, 2, 1), (4, 4, 4)


@pytest.mark.forms
@pytest.mark.parametrize(
    ("name", "in_axes"), [*zip(itertools.cycle(("causal, lengths", "causal", "mask of keys")), IN_AXES, strict=False)]
)
def test_vmap(name, in_axes):
    arguments, live = CASES[name]
    inputs = inputs_of()
    batched = tuple(
        x if axis is None else np.stack([x, 2 * x, np.where(hidden, np.asarray(np.nan, x.dtype), x)], axis)
        for x, axis, hidden in zip(inputs, in_axes, hidden_by(live, 2), strict=True)
    )
    d_out = normals(3, 2, T, 4, 8, seed=6).astype(jnp.bfloat16)

    def value_and_gradients(d_out, *inputs):
        out, reverse = jax.vjp(functools.partial(attention, **arguments), *inputs)
        return out, reverse(d_out)

    together = jax.jit(jax.vmap(value_and_gradients, (0, *in_axes)))(d_out, *batched)
    for n in range(3):
        each = [x if axis is None else np.take(x, n, axis) for x, axis in zip(batched, in_axes, strict=True)]
        assert_close(
            [x[n] for x in jax.tree.leaves(together)], jax.jit(value_and_gradients)(d_out[n], *each), rtol=1e-2
        )


MASKS_AND_LENGTHS = dict(mask=np.stack([PAIRS, ~PAIRS]), key_value_seq_lengths=np.array([[1, 5], [0, 7], [8, 8]]))


@pytest.mark.parametrize("name", few_of(MASKS_AND_LENGTHS, "mask"))
def test_vmap_over_masks_and_lengths(name):
    fn = jax.jit(lambda x: attention(*inputs_of(), **{name: x}))
    together = jax.vmap(fn)(MASKS_AND_LENGTHS[name])
    assert_same_bits(together, np.stack([fn(x) for x in MASKS_AND_LENGTHS[name]]))


# Which implementation is taken.

REFUSED = {
    "float32": (dict(dtype=np.float32), {}, "the dtype is float32, not float16 or bfloat16"),
    "a width": (dict(H=12), {}, "the width 12 is not a multiple of 8"),
    "widths": (dict(width=16), {}, "the value's width is not the query's"),
    "an odd number": (dict(S=7), {}, "the number of queries or of keys is odd"),
    "no keys": (dict(S=0), {}, "an array is empty"),
    "an array as the scale": ({}, dict(scale=jnp.array(0.5)), "the scale is not a number"),
    "a soft cap": ({}, dict(logit_soft_cap=2.0), "it has no logit_soft_cap"),
    "dropout": ({}, dict(dropout_rate=0.1, dropout_key=jax.random.key(0)), "its dropout takes no key"),
    "the logsumexp": ({}, dict(return_residual=True), "its logsumexp is rounded to 16 bits and has no gradient"),
    "a mod of logits": ({}, dict(score_mod=lambda x, *_: x), "it has no score_mod"),
    "float16, masked by an array": (dict(dtype=jnp.float16), dict(mask=KEYS), "no number of float16 is low enough"),
    "a bias in float32": ({}, dict(bias=np.zeros((T, S), np.float32)), "the bias has another dtype than the query"),
    "a bias of keys": ({}, dict(bias=jnp.zeros((1, S), jnp.bfloat16)), "the bias is not one for all queries and keys"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cudnn_lacks_is_refused_by_name_and_taken_over_otherwise(name):
    sizes, arguments, reason = REFUSED[name]
    inputs = random_inputs(**(SIZES | dict(dtype=jnp.bfloat16) | sizes))
    with pytest.raises(ValueError, match=f"^dot_product_attention: implementation: got value 'cudnn'.*{reason}"):
        attention(*inputs, implementation="cudnn", **arguments)
    chosen, xla = (jax.make_jaxpr(lambda: attention(*inputs, implementation=i, **arguments))() for i in (None, "xla"))  # noqa: B023
    assert str(chosen) == str(xla)


def test_more_batch_dimensions_are_refused():
    inputs = [x[None] for x in inputs_of()]
    with pytest.raises(ValueError, match="there are 2 batch dimensions, not at most one"):
        attention(*inputs, implementation="cudnn")
    assert attention(*inputs).shape == inputs[0].shape


@pytest.mark.parametrize("kind", few_of([AxisType.Auto, AxisType.Explicit], AxisType.Explicit))
def test_arrays_that_a_mesh_splits(kind):
    mesh = jax.make_mesh((2,), ("batch",), axis_types=(kind,), devices=jax.devices()[:2])
    inputs = [jax.device_put(x, NamedSharding(mesh, PartitionSpec("batch"))) for x in inputs_of()]
    chosen, xla = (str(jax.make_jaxpr(lambda *x: attention(*x, implementation=i))(*inputs)) for i in (None, "xla"))  # noqa: B023
    assert (chosen == xla) == (kind == AxisType.Auto)  # where the compiler may split them in any way
    assert_close(attention(*inputs, implementation="cudnn"), attention(*inputs_of(), implementation="cudnn"))


def test_an_old_gpu_takes_the_other_form(monkeypatch):
    monkeypatch.setattr(_cudnn, "_has_old_gpu", lambda: True)
    with pytest.raises(ValueError, match="a GPU here is older than compute capability"):
        attention(*inputs_of(), implementation="cudnn")
    assert attention(*inputs_of()).shape == (2, T, 4, 8)


def test_by_name_it_is_refused_where_the_program_is_lowered_for_another_platform(choose):
    choose(form=None)
    inputs, text = inputs_of(), "^dot_product_attention: implementation: got value 'cudnn'.*another platform than CUDA"
    named = functools.partial(attention, implementation="cudnn")
    for fn in (named, jax.jit(named), jax.vmap(named), jax.grad(functools.partial(loss, named))):
        with pytest.raises(ValueError, match=text):
            fn(*inputs)
    assert_same_bits(attention(*inputs), attention(*inputs, implementation="xla"))
    lowered = jax.jit(lambda q: attention(q, *inputs[1:])).trace(inputs[0]).lower(lowering_platforms=("cpu",))
    assert "while" in lowered.as_text() or "dot_general" in lowered.as_text()


# With jax.nn's own cuDNN, in a process without the stand-in.

WITHOUT_CUDNN = """
import jax, jax.numpy as jnp, masksafe
from masksafe.attention import _cudnn
x = jnp.ones((2, 6, 2, 8), jnp.bfloat16)
traced = lambda i: str(jax.make_jaxpr(lambda x: masksafe.dot_product_attention(x, x, x, implementation=i))(x))
reason = _cudnn._refusal_of_jax(8, x.dtype)
if reason is None:
    print("installed")
else:
    assert traced(None) == traced("xla")
    try:
        traced("cudnn")
    except ValueError as error:
        assert "implementation: got value 'cudnn'" in str(error) and "JAX reports: cuDNN is not" in str(error), error
        print("refused")
"""


COMPILED = """
import sys
sys.path.insert(0, sys.argv[1])
import jax, jax.numpy as jnp, masksafe
from programs import TARGETS, compile_for

def both(fn, **arguments):
    def run(d_out, *inputs):
        out, reverse = jax.vjp(lambda *x: fn(*x, **arguments), *inputs)
        return out, reverse(d_out)
    return run

def cudnn(*args, **arguments):
    return jax.nn.dot_product_attention(*args, implementation="cudnn", **arguments)

x = jax.ShapeDtypeStruct((2, 1024, 8, 64), jnp.bfloat16)
k = jax.ShapeDtypeStruct((2, 1024, 2, 64), jnp.bfloat16)
for args in ((x, x, x), (x, k, k)):
    for wrap, passes in ((lambda fn, **arguments: lambda *x: fn(*x, **arguments), 1), (both, 2)):
        given = args if passes == 1 else (x, *args)
        ours, peer = (
            compile_for("h100", wrap(fn, is_causal=True), *given, unknown_trips=0)
            for fn in (masksafe.dot_product_attention, cudnn)
        )
        assert ours.text.count("__cudnn$fmhaSoftmax") > 0
        print(ours.bytes_moved / peer.bytes_moved, (ours.launches - peer.launches) / passes)
"""


LOWERED = """
import functools
import jax, jax.numpy as jnp, masksafe
from jax.sharding import AxisType, PartitionSpec

attention = functools.partial(masksafe.dot_product_attention, implementation="cudnn")
x = jnp.ones((2, 64, 4, 64), jnp.bfloat16)
two, lengths, mask = jnp.stack([x, x]), jnp.array([3, 0]), jnp.ones((2, 1, 1, 64), bool)
bias = jnp.zeros((1, 4, 64, 64), x.dtype)
mesh = jax.make_mesh((2,), ("batch",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

def both(**arguments):
    def run(q, k, *bias):
        out, reverse = jax.vjp(lambda q, k, *bias: attention(q, k, k, *bias, **arguments), q, k, *bias)
        return out, reverse(out)
    return run

def hessian(q, k):
    return jax.jvp(jax.grad(lambda q: attention(q, k, k).astype(jnp.float32).sum()), (q,), (q,))

split = PartitionSpec("batch")
for fn, args in (
    (both(query_seq_lengths=lengths, is_causal=True), (x, x[:, :, :2])),
    (both(mask=mask), (x, x, bias)),
    (both(local_window_size=(5, 0)), (x.astype(jnp.float16), x.astype(jnp.float16))),
    (both(), (x[0], x[0])),
    (jax.vmap(both(key_value_seq_lengths=lengths), (1, None)), (jnp.moveaxis(two, 0, 1), x)),
    (jax.vmap(both(), (0, 0, None)), (two, two, bias)),
    (hessian, (x, x)),
    (jax.shard_map(both(), mesh=mesh, in_specs=split, out_specs=split), (x, x)),
):
    text = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmha" in text
"""

needs_plugin = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None, reason="JAX's CUDA plugin is not installed"
)


def run_apart(code, *arguments):
    """The lines that a program prints, in a process without the stand-in."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
    command = [sys.executable, "-c", code, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.forms
def test_an_installation_without_cudnn_does_not_notice():
    assert run_apart(WITHOUT_CUDNN) in (["refused"], ["installed"])


@needs_plugin
@pytest.mark.forms
def test_lowers_for_cuda():
    """What `jax.nn` and its cuDNN take, in all the transformations."""
    run_apart(LOWERED)


@needs_plugin
@pytest.mark.forms
def test_programs_for_a_gpu():
    """The kernel is in them; the contract cleans and marks in six launches a pass, which a layer fuses with its own."""
    programs = Path(__file__).parents[2] / "examples" / "benchmarks"
    for line in run_apart(COMPILED, str(programs)):
        bytes_moved, more_launches = map(float, line.split())
        assert bytes_moved < 3.1  # the forward pass: 3.0
        assert more_launches <= 6
