"""The arguments of dot_product_attention: integers of any width, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import attention, random_inputs, shrink_blocks
from jax.experimental import checkify

import masksafe

# Against the same masks in usual integers: what differs is compiled once for both.
INTEGERS = {
    "int8 offset": (
        dict(is_causal=True, causal_offset=jnp.array([1, 2], jnp.int8)),
        dict(is_causal=True, causal_offset=jnp.array([1, 2])),
    ),
    "uint8 lengths": (
        dict(key_value_seq_lengths=jnp.array([3, 120], jnp.uint8)),
        dict(key_value_seq_lengths=jnp.array([3, 7])),
    ),
    "uint32 lengths": (
        dict(query_seq_lengths=jnp.full(2, 2**32 - 1, jnp.uint32)),
        dict(query_seq_lengths=jnp.array([6, 6])),
    ),
    "64-bit lengths": (dict(key_value_seq_lengths=np.full(2, 2**40)), dict(key_value_seq_lengths=jnp.array([7, 7]))),
    "negative lengths": (
        dict(key_value_seq_lengths=jnp.array([-1, -(2**31)])),
        dict(key_value_seq_lengths=jnp.array([0, 0])),
    ),
    "64-bit offset": (dict(is_causal=True, causal_offset=2**40), dict(is_causal=True, causal_offset=6)),
    "offset and window": (
        dict(causal_offset=2**29, local_window_size=(2**40, 0)),
        dict(causal_offset=6, local_window_size=(12, 0)),
    ),
    "int8 and uint32 segments": (
        dict(query_segment_ids=jnp.ones((2, 6), jnp.int8), key_value_segment_ids=jnp.ones((2, 7), jnp.uint32)),
        dict(query_segment_ids=jnp.ones((2, 6), int), key_value_segment_ids=jnp.ones((2, 7), int)),
    ),
    "a list for the window": (dict(local_window_size=[1, 2]), dict(local_window_size=(1, 2))),
    "integer bias": (dict(bias=jnp.arange(7)), dict(bias=jnp.arange(7.0))),
    "integer scale": (dict(scale=jnp.array(2)), dict(scale=jnp.array(2.0))),
    "scale of one element": (dict(scale=jnp.full((1, 1), 0.5)), dict(scale=jnp.array(0.5))),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_no_integer_wraps(name):
    unusual, usual = INTEGERS[name]
    np.testing.assert_array_equal(attention(*random_inputs(), **unusual), attention(*random_inputs(), **usual))


# Bad arguments.


def heads_first(x):
    return jnp.swapaxes(x, -3, -2)


BAD_ARGUMENTS = {
    "query: a rank": (dict(query=jnp.ones((2, 3))), ValueError, "query: got shape"),
    "key: a head_dim": (dict(key=jnp.ones((2, 7, 1, 5))), ValueError, "key: got shape"),
    "key: a batch": (dict(key=jnp.ones((3, 7, 1, 4))), ValueError, "key: got shape"),
    "value: a length": (dict(value=jnp.ones((2, 6, 1, 4))), ValueError, "value: got shape"),
    "heads": (dict(key=jnp.ones((2, 7, 3, 4)), value=jnp.ones((2, 7, 3, 4))), ValueError, "multiple of the 3 heads"),
    "dtypes": (dict(key=jnp.ones((2, 7, 1, 4), jnp.bfloat16)), TypeError, "key: got dtype bfloat16"),
    "integers": (dict(query=jnp.ones((2, 6, 2, 4), int)), TypeError, "query: got dtype int32"),
    "mask: (batch, keys)": (dict(mask=jnp.ones((2, 7), bool)), ValueError, r"mask\[:, None, None, :\]"),
    "mask: a float": (dict(mask=jnp.ones((6, 7))), TypeError, "mask: got dtype float32"),
    "mask: a shape": (dict(mask=jnp.ones((2, 3, 6, 7), bool)), ValueError, "mask: got shape"),
    "bias: complex numbers": (dict(bias=jnp.ones((6, 7), complex)), TypeError, "bias: got dtype complex64"),
    "heads in front of time": (
        dict(zip(("query", "key", "value"), map(heads_first, random_inputs()), strict=True)),
        ValueError,
        r"Time comes before heads.* jnp.swapaxes\(x, -3, -2\)",
    ),
    "heads in front of time, a mask": (
        dict(zip(("query", "key", "value"), [jnp.ones((2, 2, 6, 4))] * 3, strict=True))
        | dict(mask=jnp.ones((2, 1, 6, 6), bool)),
        ValueError,
        "mask: got shape .* Time comes before heads",
    ),
    "heads in front of time, segments": (
        dict(zip(("query", "key", "value"), [jnp.ones((2, 2, 6, 4))] * 3, strict=True))
        | dict(query_segment_ids=jnp.ones((2, 6), int), key_value_segment_ids=jnp.ones((2, 6), int)),
        ValueError,
        "query_segment_ids: got shape .* Time comes before heads",
    ),
    "bias: a shape": (dict(bias=jnp.ones((5, 7))), ValueError, "bias: got shape"),
    "lengths: floats": (dict(key_value_seq_lengths=jnp.ones(2)), TypeError, "key_value_seq_lengths: got dtype"),
    "lengths: a shape": (dict(query_seq_lengths=jnp.ones(3, int)), ValueError, "query_seq_lengths: got shape"),
    "a window": (dict(local_window_size=(1, 2, 3)), TypeError, "local_window_size: got value"),
    "one half of the segments": (
        dict(query_segment_ids=jnp.ones((2, 6), int)),
        ValueError,
        "key_value_segment_ids: got value None",
    ),
    "segments: a shape": (
        dict(query_segment_ids=jnp.ones((2, 6), int), key_value_segment_ids=jnp.ones((2, 6), int)),
        ValueError,
        "key_value_segment_ids: got shape",
    ),
    "an offset": (dict(causal_offset=1.5), TypeError, "causal_offset: got dtype"),
    "a scale": (dict(scale=jnp.ones(2)), ValueError, "scale: got shape"),
    "a scale beyond floats": (dict(scale=10**400), TypeError, "scale: got type int"),
    "a soft cap": (dict(logit_soft_cap=0.0), ValueError, "logit_soft_cap: got value 0.0"),
    "a dropout rate": (dict(dropout_rate=1.0), ValueError, "dropout_rate: got value 1.0"),
    "no dropout key": (dict(dropout_rate=0.5), ValueError, "dropout_key: got value None"),
    "a number for a dropout key": (
        dict(dropout_rate=0.5, dropout_key=0),
        TypeError,
        r"dropout_key: got type int; expected a random key. Make one by jax.random.key\(seed\)",
    ),
    "floats for a dropout key": (dict(dropout_rate=0.5, dropout_key=jnp.ones(2)), TypeError, "dropout_key: got dtype"),
    "two dropout keys": (
        dict(dropout_rate=0.5, dropout_key=jax.random.split(jax.random.key(0))),
        ValueError,
        r"dropout_key: got shape \(2,\); expected one random key",
    ),
    "bias: a mask": (dict(bias=jnp.ones((6, 7), bool)), TypeError, "bias: got dtype bool; .* passed as mask="),
    "a window of FlashAttention": (
        dict(local_window_size=(-1, 0)),
        ValueError,
        "local_window_size: .*-1 does not",
    ),
    "a window of no key": (dict(local_window_size=(2, -3)), ValueError, r"local_window_size: got value \(2, -3\)"),
    "a negative window": (dict(local_window_size=-1), ValueError, r"local_window_size: got value \(-1, -1\)"),
    "a boolean window": (dict(local_window_size=True), TypeError, "local_window_size: got value"),
    "is_causal: an array": (dict(is_causal=np.ones(2, bool)), TypeError, r"is_causal: got an array of shape \(2,\)"),
    "prefixes of another batch": (
        dict(mask_mod=masksafe.attention_masks.causal | masksafe.attention_masks.prefix(jnp.arange(3))),
        ValueError,
        r"mask_mod: got a prefix mask of lengths \(3,\); expected one length, or \(2,\) of them.*vmap",
    ),
    "a function with and": (
        dict(mask_mod=lambda b, h, q, k: k <= q and q > 1),
        TypeError,
        "mask_mod: got a function that asks whether a traced value is true, as and.* Write &",
    ),
    "a function with if": (
        dict(score_mod=lambda x, b, h, q, k: x if k > q else -x),
        TypeError,
        "score_mod: got a function that asks .*jnp.where in place of if",
    ),
    "an implementation": (dict(implementation="pallas"), ValueError, "implementation: got value 'pallas'"),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_arguments_are_refused(name):
    changed, error, text = BAD_ARGUMENTS[name]
    query, key, value = random_inputs()
    with pytest.raises(error, match=f"^dot_product_attention: .*{text}"):
        attention(**(dict(query=query, key=key, value=value) | changed))


TRACED = {
    "is_causal": True,
    "return_residual": True,
    "logit_soft_cap": 2.0,
    "dropout_rate": 0.5,
    "local_window_size": 3,
}


@pytest.mark.parametrize("argument", TRACED)
def test_what_a_program_is_made_for_cannot_be_traced(argument):
    text = rf"^dot_product_attention: {argument}: got a traced array; expected .* Name its parameter in static_argnames"
    with pytest.raises(TypeError, match=text):
        jax.jit(lambda x: attention(*random_inputs(), **{argument: x}))(TRACED[argument])


@pytest.mark.parametrize("key", [jax.random.PRNGKey(3), jax.random.key(3)], ids=["raw", "typed"])
def test_both_kinds_of_random_keys_are_taken(key):
    out = attention(*random_inputs(), dropout_rate=0.5, dropout_key=key)
    expected = attention(*random_inputs(), dropout_rate=0.5, dropout_key=jax.random.key(3))
    np.testing.assert_array_equal(out, expected)


# Label checks.

REPORT = r"dot_product_attention: 1 of 2 key_value_seq_lengths are outside \[0, 7\]; first at \(1,\): (8|-1) \(called"


@pytest.mark.parametrize("length", [8, -1])
def test_lengths_out_of_range_are_reported(length):
    lengths = jnp.array([7, length])
    fn = lambda lengths: attention(*random_inputs(), key_value_seq_lengths=lengths)  # noqa: E731
    with masksafe.label_checks("raise"):
        fn(jnp.array([0, 7]))
        with pytest.raises(ValueError, match=REPORT) as error:
            fn(lengths)
        assert f"called at {__file__}:" in str(error.value)
        with pytest.raises(jax.errors.JaxRuntimeError, match=REPORT):
            jax.jit(fn)(lengths).block_until_ready()
    with masksafe.label_checks("checkify"):
        checked = jax.jit(checkify.checkify(fn))
        error, out = checked(lengths)
        with pytest.raises(checkify.JaxRuntimeError, match=REPORT):
            error.throw()
        assert np.isnan(out[1]).all()
        assert np.isfinite(out[0]).all()
        checked(jnp.array([0, 7]))[0].throw()


def test_lengths_of_queries_are_reported_and_the_logsumexp_is_marked():
    fn = lambda lengths: attention(*random_inputs(), query_seq_lengths=lengths, return_residual=True)  # noqa: E731
    with masksafe.label_checks("checkify"):
        error, (out, lse) = checkify.checkify(fn)(jnp.array([7, 6]))
    assert "1 of 2 query_seq_lengths are outside [0, 6]; first at (0,): 7" in error.get()
    assert np.isnan(out[0]).all()
    assert np.isnan(lse[0]).all()
    assert np.isfinite(lse[1]).all()


def test_without_label_checks_a_program_has_no_part_of_them():
    fn = lambda lengths: attention(*random_inputs(), key_value_seq_lengths=lengths)  # noqa: E731
    lower = lambda: jax.jit(fn).lower(jnp.array([7, 8])).as_text()  # noqa: E731
    without = lower()
    with masksafe.label_checks("raise"):
        assert lower() != without
    assert lower() == without
    np.testing.assert_array_equal(fn(jnp.array([7, 8])), fn(jnp.array([7, 7])))


# Where JAX refuses to promote ranks and dtypes by itself.

SEGMENTS = dict(query_segment_ids=jnp.ones((2, 6), int), key_value_segment_ids=jnp.ones(7, int))
STRICT = {
    "plain": {},
    "causal": dict(is_causal=True),
    "causal with an offset": dict(is_causal=True, causal_offset=jnp.array([1, 2])),
    "window": dict(local_window_size=(2, 1)),
    "lengths": dict(query_seq_lengths=jnp.array([3, 6]), key_value_seq_lengths=jnp.array([0, 7])),
    "mask and bias": dict(mask=jnp.ones((6, 7), bool), bias=jnp.ones((1, 1, 7))),
    "segments": SEGMENTS | dict(is_causal=True),
    "scale and soft cap": dict(scale=jnp.ones(1), logit_soft_cap=3.0, is_causal=True),
    "dropout": dict(dropout_rate=0.5, dropout_key=jax.random.key(0)),
}
TOGETHER = functools.reduce(dict.__or__, STRICT.values())


@pytest.fixture
def strict():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


@pytest.mark.parametrize(
    ("size", "dtype"), [(512, jnp.bfloat16), (4, jnp.float32)], ids=["one block of bfloat16", "many blocks of float32"]
)
@pytest.mark.parametrize(
    "arguments",
    [TOGETHER, *(pytest.param(arguments, marks=pytest.mark.slow) for arguments in STRICT.values())],
    ids=["together", *STRICT],
)
def test_nothing_is_promoted_by_itself(arguments, size, dtype, strict, choose):
    if size == 4:
        shrink_blocks(choose)
    query, key, value = (jnp.asarray(x, dtype) for x in random_inputs())

    def total(query):
        out, lse = attention(query, key, value, return_residual=True, **arguments)
        return jnp.sum(out.astype(jnp.float32)) + jnp.sum(lse)

    # Forward over reverse takes the gradient on its way. That of the reverse of many blocks takes seconds to trace.
    jax.make_jaxpr(lambda q: jax.jvp(jax.grad(total), (q,), (q,)))(query)
    if size == 512:
        jax.make_jaxpr(jax.grad(lambda q: jnp.sum(jax.grad(total)(q))))(query)
    with masksafe.forward_mode():
        jax.make_jaxpr(lambda q: jax.jvp(total, (q,), (q,)))(query)


def test_integers_are_not_promoted_by_themselves(strict):
    arguments = dict(scale=jnp.array(2), bias=jnp.ones((6, 7), int))
    jax.eval_shape(lambda *args: attention(*args, **arguments), *random_inputs())
