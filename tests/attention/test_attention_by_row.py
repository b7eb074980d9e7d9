"""The form of attention for an accelerator, run on the CPU, beyond what the contract's table tries of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import CASES, attention, by_rows, causal, exact, normals, random_inputs
from comparisons import assert_close
from tiers import few_of


@pytest.fixture(autouse=True, params=few_of(["tiles", "at once"], "tiles"))
def by_row(request, choose):
    """Tiles of few queries, one sample and head at a time, or all at once."""
    if request.param == "tiles":
        by_rows(choose)
    else:
        choose(form="elsewhere")


def test_keys_that_a_static_mask_hides_from_a_tile_are_left_out_and_no_others():
    arguments, live = CASES["window"]
    assert_close(attention(*random_inputs(), **arguments), exact(*random_inputs(), live)[0])


def test_small_weights_of_float16_keep_their_digits():
    keys = 4096
    value = normals(1, keys, 1, 2).astype(np.float16)
    out = attention(np.zeros((1, 1, 1, 2), np.float16), np.zeros((1, keys, 1, 2), np.float16), value)
    np.testing.assert_allclose(out[0, 0, 0], value.astype(np.float64).mean((0, 1, 2)), atol=2e-5)


@pytest.mark.forms
def test_symbolic_sizes():
    b, t = jax.export.symbolic_shape("b, t")
    fn = lambda q, k, v, ids: attention(q, k, v, is_causal=True, query_segment_ids=ids, key_value_segment_ids=ids)  # noqa: E731
    shapes = [jax.ShapeDtypeStruct((b, t, n, 4), jnp.float32) for n in (2, 1, 1)]
    exported = jax.export.export(jax.jit(fn))(*shapes, jax.ShapeDtypeStruct((b, t), jnp.int32))
    inputs, ids = random_inputs(T=6, S=6), np.array([[0, 0, 1, 1, 1, 1]] * 2)
    live = causal(6, 6) & (ids[:, None, :, None] == ids[:, None, None, :])
    assert_close(exported.call(*inputs, ids.astype(np.int32)), exact(*inputs, live)[0])
