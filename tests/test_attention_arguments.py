"""The arguments of dot_product_attention: integers of any width, and what is refused."""

import jax.numpy as jnp
import numpy as np
import pytest
from test_attention import attention, random_inputs

INTEGERS = {
    "int8 offset": (
        dict(is_causal=True, causal_offset=jnp.array([1, 2], jnp.int8)),
        dict(is_causal=True, causal_offset=jnp.array([1, 2])),
    ),
    "uint8 lengths": (
        dict(key_value_seq_lengths=jnp.array([3, 120], jnp.uint8)),
        dict(key_value_seq_lengths=jnp.array([3, 7])),
    ),
    "uint32 lengths": (dict(query_seq_lengths=jnp.full(2, 2**32 - 1, jnp.uint32)), {}),
    "64-bit lengths": (dict(key_value_seq_lengths=np.full(2, 2**40)), {}),
    "negative lengths": (
        dict(key_value_seq_lengths=jnp.array([-1, -(2**31)])),
        dict(key_value_seq_lengths=jnp.array([0, 0])),
    ),
    "64-bit offset": (dict(is_causal=True, causal_offset=2**40), {}),
    "offset and window": (dict(causal_offset=2**29, local_window_size=(2**40, 0)), {}),
    "int8 and uint32 segments": (
        dict(query_segment_ids=jnp.ones((2, 6), jnp.int8), key_value_segment_ids=jnp.ones((2, 7), jnp.uint32)),
        {},
    ),
    "a list for the window": (dict(local_window_size=[1, 2]), dict(local_window_size=(1, 2))),
    "integer bias": (dict(bias=jnp.arange(7)), dict(bias=jnp.arange(7.0))),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_no_integer_wraps(name):
    unusual, usual = INTEGERS[name]
    np.testing.assert_array_equal(attention(*random_inputs(), **unusual), attention(*random_inputs(), **usual))


# Bad arguments.


BAD_ARGUMENTS = {
    "query: a rank": (dict(query=jnp.ones((2, 3))), ValueError, "query has shape"),
    "key: a head_dim": (dict(key=jnp.ones((2, 7, 1, 5))), ValueError, "key has shape"),
    "key: a batch": (dict(key=jnp.ones((3, 7, 1, 4))), ValueError, "key has shape"),
    "value: a length": (dict(value=jnp.ones((2, 6, 1, 4))), ValueError, "value has shape"),
    "heads": (dict(key=jnp.ones((2, 7, 3, 4)), value=jnp.ones((2, 7, 3, 4))), ValueError, "multiple of the 3 heads"),
    "dtypes": (dict(key=jnp.ones((2, 7, 1, 4), jnp.bfloat16)), TypeError, "key has dtype bfloat16"),
    "integers": (dict(query=jnp.ones((2, 6, 2, 4), int)), TypeError, "query has dtype int32"),
    "mask: (batch, keys)": (dict(mask=jnp.ones((2, 7), bool)), ValueError, r"mask\[:, None, None, :\]"),
    "mask: a float": (dict(mask=jnp.ones((6, 7))), TypeError, "mask has dtype float32"),
    "mask: a shape": (dict(mask=jnp.ones((2, 3, 6, 7), bool)), ValueError, "mask has shape"),
    "bias: booleans": (dict(bias=jnp.ones((6, 7), bool)), TypeError, "A boolean mask goes to mask"),
    "bias: a shape": (dict(bias=jnp.ones((5, 7))), ValueError, "bias has shape"),
    "lengths: floats": (dict(key_value_seq_lengths=jnp.ones(2)), TypeError, "key_value_seq_lengths has dtype"),
    "lengths: a shape": (dict(query_seq_lengths=jnp.ones(3, int)), ValueError, "query_seq_lengths has shape"),
    "a window": (dict(local_window_size=(1, 2, 3)), TypeError, "local_window_size has value"),
    "one half of the segments": (
        dict(query_segment_ids=jnp.ones((2, 6), int)),
        ValueError,
        "key_value_segment_ids has value None",
    ),
    "segments: a shape": (
        dict(query_segment_ids=jnp.ones((2, 6), int), key_value_segment_ids=jnp.ones((2, 6), int)),
        ValueError,
        "key_value_segment_ids has shape",
    ),
    "an offset": (dict(causal_offset=1.5), TypeError, "causal_offset has dtype"),
    "a scale": (dict(scale=jnp.ones(2)), ValueError, "scale has shape"),
    "a soft cap": (dict(logit_soft_cap=0.0), ValueError, "logit_soft_cap has value 0.0"),
    "a dropout rate": (dict(dropout_rate=1.0), ValueError, "dropout_rate has value 1.0"),
    "no dropout key": (dict(dropout_rate=0.5), ValueError, "dropout_key has value None"),
    "an implementation": (dict(implementation="pallas"), ValueError, "implementation has value 'pallas'"),
    "no GPU": (dict(implementation="cudnn"), ValueError, "the default backend is cpu, not a GPU"),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_arguments_are_refused(name):
    changed, error, text = BAD_ARGUMENTS[name]
    query, key, value = random_inputs()
    with pytest.raises(error, match=f"^dot_product_attention: .*{text}"):
        attention(**(dict(query=query, key=key, value=value) | changed))
