"""The form of attention for an accelerator, run on the CPU, beyond what the contract's table tries of it."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    CASES,
    assert_close,
    attention,
    by_rows,
    causal,
    exact,
    normals,
    random_inputs,
    replaced,
    with_gradients,
)
from tiers import few_of


@pytest.fixture(autouse=True, params=few_of(["tiles", "at once"], "tiles"))
def by_row(request, choose):
    """Tiles of few queries, one sample and head at a time, or all at once."""
    if request.param == "tiles":
        by_rows(choose)
    else:
        choose(form="elsewhere")


@pytest.mark.forms
@pytest.mark.parametrize(
    ("name", "by_row"), [*zip(CASES, itertools.cycle(("tiles", "at once")), strict=False)], indirect=["by_row"]
)
def test_a_bad_element_shows_where_it_is_seen_and_nowhere_else(name):
    arguments, live = CASES[name]
    inputs, d_out = random_inputs(width=40), normals(2, 6, 2, 40, seed=6)
    run = with_gradients(functools.partial(attention, **arguments))
    bad_value = [*inputs[:2], replaced(inputs[2], np.s_[0, 1, 0, 35], np.inf)]
    out, (d_query, _, _) = run(bad_value, d_out)
    sees = np.moveaxis(live[:, :, :, 1], 1, 2) & (np.arange(2) == 0)[:, None, None]
    assert (np.isnan(out) == sees[..., None]).all()
    assert (np.isnan(d_query) == sees[..., None]).all()
    bad_key = [inputs[0], replaced(inputs[1], np.s_[0, 1, 0, 2], -np.inf), inputs[2]]
    assert (np.isnan(run(bad_key, d_out)[0]) == sees[..., None]).all()
    _, (_, _, d_value) = run(inputs, replaced(d_out, np.s_[0, 3, 1, 37], np.nan))
    seen = live[:, 1, 3] & (np.arange(2) == 0)[:, None]
    assert (np.isnan(d_value) == seen[:, :, None, None]).all()


@pytest.mark.forms
@pytest.mark.parametrize("shape", [(1, 4, 6, 7), (2, 1, 6, 1)], ids=str)
def test_gradient_of_a_bias_over_all_pairs_or_fewer(shape):
    inputs, d_out, bias = random_inputs(B=2, N=4, K=2), normals(2, 6, 4, 4, seed=6), normals(*shape, seed=5)
    _, gradients = with_gradients(functools.partial(attention, is_causal=True))((*inputs, bias), d_out)
    _, of_all = exact(*inputs, causal(6, 7), bias, d_out=d_out)
    axes = tuple(i for i in range(4) if shape[i] == 1)
    of_all["bias"] = of_all["bias"].sum(axes, keepdims=True)
    assert_close(gradients, [of_all[name] for name in ("query", "key", "value", "bias")])


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
