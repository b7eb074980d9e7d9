"""How the user's own kernel is called, and what is refused; its results are in test_attention_kernels.py."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import CASES, attention, exact, positions_and_mods, random_inputs
from comparisons import assert_close, assert_same_bits
from jax.experimental import pallas
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

CASES = CASES | positions_and_mods(7)
LENGTHS = dict(key_value_seq_lengths=np.array([5, 0]), query_seq_lengths=np.array([6, 3]))
WINDOW, OF_PAIRS, OF_SAMPLES = dict(local_window_size=(2, 1)), dict(mask=(1, 1, 6, 7)), dict(mask=(2, 1, 6, 7))
# By the names of cases: what a kernel that takes all keywords gets besides the scale.
KEYWORDS = {
    "causal": dict(is_causal=True),
    "causal, aligned at the end": OF_PAIRS,
    "window": WINDOW,
    "window, behind the keys for the last queries": OF_PAIRS,
    "key lengths": dict(key_value_seq_lengths=(2,)),
    "query lengths": dict(query_seq_lengths=(2,)),
    "keys of every sample": OF_SAMPLES,
    "pairs": dict(mask=(2, 2, 6, 7)),
    "segments": OF_SAMPLES,
    "bias of -inf": dict(bias=(1, 1, 6, 7)) | OF_PAIRS,
    "causal and left padding": dict(is_causal=True) | OF_SAMPLES,
    "positions": OF_SAMPLES,
    "mod, chunked": OF_SAMPLES,
    "causal, lengths": dict(is_causal=True, key_value_seq_lengths=(2,), query_seq_lengths=(2,)),
}
# The arguments of a call, the parameters that the kernel has, and those that it gets.
CALLS = [
    *((CASES[name][0], None, keywords) for name, keywords in KEYWORDS.items()),
    ({}, None, {}),
    (dict(is_causal=True, local_window_size=2), None, dict(is_causal=True, local_window_size=(2, 0))),
    (WINDOW | LENGTHS, None, WINDOW | dict(query_seq_lengths=(2,)) | OF_SAMPLES),
    (dict(is_causal=True, **LENGTHS), ("mask",), OF_SAMPLES),
    (dict(is_causal=True, local_window_size=3), ("is_causal", "mask"), dict(is_causal=True) | OF_PAIRS),
    (dict(query_seq_lengths=np.array([6, 0])), (), {}),  # which are not needed
]


def test_a_kernel_gets_the_keywords_that_it_has_and_for_the_rest_a_mask():
    for arguments, parameters, expected in CALLS:
        found = []

        def kernel(query, key, value, found=found, **keywords):
            found.append({name: getattr(x, "shape", x) for name, x in keywords.items()})
            return query

        if parameters is not None:
            of_name = functools.partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
            kernel.__signature__ = inspect.Signature([of_name(n) for n in ("scale", *parameters)])
        jax.eval_shape(lambda: attention(*random_inputs(), **arguments, implementation=kernel))  # noqa: B023
        assert found == [dict(scale=0.5) | expected]


def test_a_kernel_of_pallas_on_a_mesh():
    """`jax.shard_map` would refuse it if it looked at the types of its results."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])

    def kernel(query, key, value, scale):
        def add(x, y, out):
            out[...] = x[...] + y[...]

        return pallas.pallas_call(add, jax.ShapeDtypeStruct(query.shape, query.dtype), interpret=True)(query, value)

    inputs = random_inputs(S=6, K=2)
    split = [jax.device_put(x, NamedSharding(mesh, P("x"))) for x in inputs]
    with jax.set_mesh(mesh):
        assert_same_bits(attention(*split, implementation=kernel), inputs[0] + inputs[2])


def test_a_program_is_found_again():
    traced = []

    def kernel(size, query, key, value, scale, **_):
        traced.append(size)
        return query

    x = random_inputs(K=2)[0]

    def calls(*kernels):
        traced.clear()
        for kernel in kernels:
            jax.eval_shape(functools.partial(attention, implementation=kernel), x, x, x)
        return traced

    once = functools.partial(kernel, 1)
    assert calls(once, once, functools.partial(kernel, 1)) == [1]
    of_array = functools.partial(kernel, np.arange(2))
    assert len(calls(of_array, of_array)) == 1
    assert calls(*(functools.partial(kernel, size) for size in (2, True, 2.0))) == [2, True, 2.0]
    assert calls(*(lambda *args, **keywords: kernel(3, *args, **keywords) for _ in range(2))) == [3, 3]


# What is refused.


def of(query, key, value, *, scale):
    return query


def of_anything(query, key, value, **_):
    return query


class Unhashable:
    __hash__ = None

    def __call__(self, *_, **__): ...


BESIDE = r"got the function of_anything, beside {}; expected 'xla' or None\. A function of yours is not called with {}"
WITH_LSE = dict(return_residual=True)
REFUSED = {
    "sinks": (ValueError, BESIDE, dict(sinks=np.ones(2, np.float32))),
    "score_mod": (ValueError, BESIDE, dict(score_mod=lambda x, *_: x)),
    "dropout": (ValueError, BESIDE, dict(dropout_rate=0.1, dropout_key=np.zeros(2, np.uint32))),
    "logit_soft_cap": (ValueError, BESIDE, dict(logit_soft_cap=2.0)),
    "an array as scale": (ValueError, BESIDE, dict(scale=np.ones(1, np.float32))),
    "bias": (TypeError, "got the function of, which takes no keyword {}", dict(bias=np.ones(7), implementation=of)),
    "mask": (TypeError, "takes no keyword {}; expected one that takes {}", dict(is_causal=True, implementation=of)),
    "scale": (TypeError, "which takes no keyword {}", dict(implementation=lambda q, k, v: q)),
    "no logsumexp": (ValueError, "of, which returns no logsumexp", dict(implementation=of, **WITH_LSE)),
    "no hash": (TypeError, "got the function Unhashable, which has no hash", dict(implementation=Unhashable())),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_function_cannot_do_is_refused(name):
    error, text, arguments = REFUSED[name]
    with pytest.raises(error, match="^dot_product_attention: implementation: .*" + text.format(name, name)):
        attention(*random_inputs(), **dict(implementation=of_anything) | arguments)


# What a function returns for a query.
RESULTS = [
    (lambda q: q.swapaxes(1, 2), ValueError, r"output has shape \(2, 2, 6, 4\) .* expected shape \(2, 6, 2, 4\) and"),
    (lambda q: q.astype(jnp.bfloat16), TypeError, "output has shape .* bfloat16; expected shape .* and dtype float32"),
    (lambda q: None, TypeError, "output has type NoneType; expected shape"),
    (lambda q: (q, q, q), TypeError, "output has type tuple"),
    (lambda q: (q, q[..., 0].swapaxes(1, 2)), ValueError, r"logsumexp has shape \(2, 2, 6\) .* shape \(2, 6, 2\) and"),
    (lambda q: (q, jnp.ones((2, 6, 2), "float16")), TypeError, "logsumexp has shape .* float16; expected .* float32"),
]


@pytest.mark.parametrize(("result", "error", "text"), RESULTS)
def test_a_result_of_another_shape_or_dtype_is_refused(result, error, text):
    options = WITH_LSE if "logsumexp" in text else {}
    with pytest.raises(error, match="^dot_product_attention: implementation: .* whose " + text):
        attention(*random_inputs(), implementation=lambda query, key, value, scale: result(query), **options)


def test_a_ring_is_refused():
    mesh = jax.make_mesh((2,), ("time",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    fn = functools.partial(attention, implementation=of_anything, axis_name="time")
    with pytest.raises(ValueError, match=BESIDE.format("axis_name", "axis_name")):
        jax.shard_map(fn, mesh=mesh, in_specs=P(None, "time"), out_specs=P(None, "time"))(*random_inputs(S=6))


def test_a_function_that_cannot_be_asked_gets_all_keywords():
    """One that is not written in Python: its own TypeError says what it lacks."""
    with pytest.raises(TypeError, match="keyword argument"):
        attention(*random_inputs(), is_causal=True, implementation=max)


def test_sizes_of_16_bits_and_a_scale():
    """The output may be wide: it is rounded once."""
    inputs = random_inputs(dtype=jnp.bfloat16)
    found = []

    def wide(query, key, value, scale):
        found.append(scale)
        return jax.nn.dot_product_attention(
            *(x.astype(jnp.float32) for x in (query, key, value)), scale=scale, return_residual=True
        )

    out, lse = attention(*inputs, scale=0.25, implementation=wide, return_residual=True)
    assert found == [0.25]
    assert out.dtype == jnp.bfloat16
    expected = exact(*inputs, scale=0.25)
    assert_close((out.astype(jnp.float32), lse), expected, 1e-2)


def test_without_keys_no_kernel_is_called():
    out, lse = attention(*random_inputs(S=0), implementation=Unhashable.__call__, return_residual=True)
    assert (out == 0).all()
    assert (lse == -jnp.inf).all()
