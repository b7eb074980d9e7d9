"""The arguments of dot_product_attention: integers of any width, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import attention, random_inputs
from jax.experimental import checkify

import masksafe
from masksafe import attention_masks

# Integers of any width.

SEGMENT = dict(query_segment_ids=np.ones((2, 6), int), key_value_segment_ids=np.ones((2, 7), int))
USUAL = dict(
    is_causal=True,
    causal_offset=np.int32([1, 2]),
    query_seq_lengths=np.int32([6, 6]),
    key_value_seq_lengths=np.int32([3, 7]),
    **SEGMENT,
    local_window_size=(4, 2),
    bias=np.arange(7, dtype=np.float32),
    scale=np.float32(2),
)
# Other numbers, and what they mean in place of the usual ones; all in one program.
ALIKE = [
    (dict(causal_offset=np.int8([1, 2])), {}),
    (dict(causal_offset=np.full(2, -(2**40))), dict(causal_offset=np.int32([-20, -20]))),
    (dict(query_seq_lengths=np.full(2, 2**32 - 1, np.uint32)), {}),
    (dict(key_value_seq_lengths=np.uint8([3, 120])), {}),
    (dict(key_value_seq_lengths=np.full(2, 2**40)), dict(key_value_seq_lengths=np.int32([7, 7]))),
    (dict(key_value_seq_lengths=np.int32([-1, -(2**31)])), dict(key_value_seq_lengths=np.int32([0, 0]))),
    ({name: x.astype("int8" if "query" in name else "uint32") for name, x in SEGMENT.items()}, {}),
    (dict(local_window_size=[4, 2], bias=np.arange(7, dtype=np.int32), scale=np.full((1, 1), 2)), {}),
]


def test_no_integer_wraps():
    run = lambda arguments: np.asarray(attention(*random_inputs(), **(USUAL | arguments)))  # noqa: E731
    for unusual, usual in ALIKE:
        np.testing.assert_array_equal(run(unusual), run(usual))


# Bad arguments.


def heads_first(**arguments):
    """Arrays that have heads in front of time."""
    return dict(zip(("query", "key", "value"), [np.ones((2, 2, 6, 4))] * 3, strict=True)) | arguments


HEADS_FIRST = {n: x.swapaxes(1, 2) for n, x in zip(("query", "key", "value"), random_inputs(), strict=True)}
SEGMENTS = dict(query_segment_ids=np.ones((2, 6), int), key_value_segment_ids=np.ones((2, 6), int))
OF_THREE = dict(zip(("query", "key", "value"), random_inputs(3), strict=True))
A_RANDOM_KEY = r"expected a random key. Make one by jax.random.key\(seed\)"
TWO_KEYS, MASK_OF_3 = np.zeros((2, 2), np.uint32), attention_masks.prefix(np.arange(3))


BAD_ARGUMENTS = [
    (dict(query=np.ones((2, 3))), ValueError, "query: got shape"),
    (dict(key=np.ones((2, 7, 1, 5))), ValueError, "key: got shape"),
    (dict(key=np.ones((3, 7, 1, 4))), ValueError, "key: got shape"),
    (dict(value=np.ones((2, 6, 1, 4))), ValueError, "value: got shape"),
    (dict(key=np.ones((2, 7, 3, 4)), value=np.ones((2, 7, 3, 4))), ValueError, "multiple of the 3 heads"),
    (dict(key=np.ones((2, 7, 1, 4), jnp.bfloat16)), TypeError, "key: got dtype bfloat16"),
    (dict(query=np.ones((2, 6, 2, 4), np.int32)), TypeError, "query: got dtype int32"),
    (dict(mask=np.ones((2, 7), bool)), ValueError, r"mask\[:, None, None, :\]"),
    (OF_THREE | dict(mask=np.ones((3, 6, 7), bool)), ValueError, r"queries and keys .* write mask\[:, None\]"),
    (OF_THREE | dict(bias=np.ones((3, 6, 7))), ValueError, r"write bias\[:, None\]"),
    (dict(bias=np.ones((6, 7), np.complex64)), TypeError, "bias: got dtype complex64"),
    (HEADS_FIRST, ValueError, r"Time comes before heads.* jnp.swapaxes\(x, -3, -2\)"),
    (heads_first(mask=np.ones((2, 1, 6, 6), bool)), ValueError, "mask: got shape .* Time comes before heads"),
    (heads_first(**SEGMENTS), ValueError, "query_segment_ids: got shape .* Time comes before heads"),
    (dict(bias=np.ones((5, 7))), ValueError, "bias: got shape"),
    (dict(key_value_seq_lengths=np.ones(2)), TypeError, "key_value_seq_lengths: got dtype"),
    (dict(query_seq_lengths=np.ones(3, int)), ValueError, "query_seq_lengths: got shape"),
    (dict(local_window_size=(1, 2, 3)), TypeError, "local_window_size: got value"),
    (dict(query_segment_ids=np.ones((2, 6), int)), ValueError, "key_value_segment_ids: got value None"),
    (SEGMENTS, ValueError, "key_value_segment_ids: got shape"),
    (dict(causal_offset=1.5), TypeError, "causal_offset: got dtype"),
    (dict(scale=np.ones(2)), ValueError, "scale: got shape"),
    (dict(scale=10**400), TypeError, "scale: got type int"),
    (dict(logit_soft_cap=0.0), ValueError, "logit_soft_cap: got value 0.0"),
    (dict(dropout_rate=1.0), ValueError, "dropout_rate: got value 1.0"),
    (dict(dropout_rate=0.5), ValueError, "dropout_key: got value None"),
    (dict(dropout_rate=0.5, dropout_key=0), TypeError, rf"dropout_key: got type int; {A_RANDOM_KEY}"),
    (dict(dropout_rate=0.5, dropout_key=np.ones(2)), TypeError, "dropout_key: got dtype"),
    (dict(dropout_rate=0.5, dropout_key=TWO_KEYS), ValueError, r"dropout_key: got shape \(2, 2\); expected one random"),
    (dict(bias=np.ones((6, 7), bool)), TypeError, "bias: got dtype bool; .* passed as mask="),
    (dict(local_window_size=(-1, 0)), ValueError, "local_window_size: .*-1 does not"),
    (dict(local_window_size=(2, -3)), ValueError, r"local_window_size: got value \(2, -3\)"),
    (dict(local_window_size=-1), ValueError, r"local_window_size: got value \(-1, -1\)"),
    (dict(local_window_size=True), TypeError, "local_window_size: got value"),
    (dict(is_causal=np.ones(2, bool)), TypeError, r"is_causal: got an array of shape \(2,\)"),
    (dict(mask_mod=attention_masks.causal | MASK_OF_3), ValueError, "mask_mod: got a prefix mask of 3 .* or 2.*vmap"),
    (dict(mask_mod=lambda b, h, q, k: k <= q and q > 1), TypeError, "mask_mod: got a function that asks .*Write &"),
    (dict(score_mod=lambda x, b, h, q, k: x if k > q else -x), TypeError, "score_mod: got a function .*jnp.where in"),
    (dict(score_mod=np.ones(3)), TypeError, "score_mod: got type ndarray"),
    (dict(score_mod=lambda x, b, h, q, k: jnp.ones(2)), ValueError, r"score_mod: got a result of shape \(2,\)"),
    (dict(score_mod=lambda x, b, h, q, k: k > q), TypeError, "score_mod: got a result of dtype bool"),
    (dict(mask_mod=lambda b, h, q, k: k - q), TypeError, "mask_mod: got a result of dtype int32"),
    (dict(score_mod=lambda x, b, h, q, k: k), TypeError, "score_mod: got .* int32; expected one float"),
    (dict(score_mod=lambda x, q, k: x), TypeError, r"score_mod: got a function of \(x, q, k\); expected .*\(logit, b"),
    (dict(mask_mod=lambda b, h, q, k: (k, q)), TypeError, "mask_mod: got a result of type tuple"),
    (dict(causal_offset=1, query_positions=np.arange(6)[None]), ValueError, "causal_offset: got an offset and query_p"),
    (dict(key_positions=np.ones((2, 7))), TypeError, "key_positions: got dtype float"),
    (dict(query_positions=np.ones((2, 5), int)), ValueError, "query_positions: got shape"),
    (dict(sinks=np.ones(3)), ValueError, r"sinks: got shape \(3,\); expected \(2,\)"),
    (dict(implementation="pallas"), ValueError, "implementation: got value 'pallas'"),
]


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_bad_arguments_are_refused(case):
    changed, error, text = case
    query, key, value = random_inputs()
    with pytest.raises(error, match=f"^dot_product_attention: .*{text}"):
        attention(**(dict(query=query, key=key, value=value) | changed))


TRACED = dict(is_causal=True, return_residual=True, logit_soft_cap=2.0, dropout_rate=0.5, local_window_size=3)


def test_what_a_program_is_made_for_is_refused_if_it_is_traced():
    for name, value in TRACED.items():
        text = rf"^dot_product_attention: {name}: got a traced array; expected .* Name its parameter in static_argnames"
        with pytest.raises(TypeError, match=text):
            jax.jit(lambda x: attention(*random_inputs(), **{name: x}))(value)  # noqa: B023


# Label checks.

REPORT = r"dot_product_attention: 1 of 2 {} are outside \[0, {}\]; first at \(1,\): (8|-1) \(called"


def of_key_lengths(*lengths):
    return attention(*random_inputs(), key_value_seq_lengths=jnp.array(lengths))


def test_lengths_out_of_range_are_reported():
    text = REPORT.format("key_value_seq_lengths", 7)
    with masksafe.label_checks("raise"):
        of_key_lengths(0, 7)
        for length in (8, -1):
            with pytest.raises(ValueError, match=text) as error:
                of_key_lengths(7, length)
            assert f"called at {__file__}:" in str(error.value)
        with pytest.raises(jax.errors.JaxRuntimeError, match=text):
            jax.block_until_ready(jax.jit(of_key_lengths)(7, 8))


def test_lengths_out_of_range_are_marked():
    fn = lambda lengths: attention(*random_inputs(), query_seq_lengths=lengths, return_residual=True)  # noqa: E731
    with masksafe.label_checks("checkify"):
        checked = jax.jit(checkify.checkify(fn))
        error, results = checked(jnp.array([6, 8]))
        checked(jnp.array([0, 6]))[0].throw()
    with pytest.raises(checkify.JaxRuntimeError, match=REPORT.format("query_seq_lengths", 6)):
        error.throw()
    for x in results:
        np.testing.assert_array_equal(np.isnan(x).reshape(2, -1).all(1), [False, True])
        assert np.isfinite(x[0]).all()
