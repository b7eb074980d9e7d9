"""Values of attention in kernels of XLA's CPU library, chosen for arrays that are too small for them otherwise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import CASES, attention, causal, exact, normals, random_inputs, with_gradients
from comparisons import assert_close, assert_same_bits
from tiers import parametrize

from masksafe._core import platforms
from masksafe.attention._formula import Formula

pytestmark = pytest.mark.optimised

GARBAGE = [np.nan, np.inf, -np.inf, 1e38]


@pytest.fixture
def in_kernels(choose, monkeypatch):
    """Of few rows, in tiles of two queries under a static mask. The test fails if no call has them."""
    sizes = dict(fewest_rows_of_kernels=1, fewest_rows_of_one_kernel=1, fewest_queries_of_kernels=2)
    sizes |= dict(fewest_keys_of_bfloat16=1, alignment=1)
    choose(form="cpu", has_fusion_library=True, attention=sizes)
    jax.clear_caches()  # so that every call is traced
    calls, original = [], Formula.run
    monkeypatch.setattr(Formula, "run", lambda *args: calls.append(args) or original(*args))
    yield
    assert calls


def values(arguments, **others):
    return jax.jit(functools.partial(attention, return_residual=True, **arguments, **others))


@pytest.mark.usefixtures("in_kernels")
@parametrize(
    "name",
    ["bias of -inf"],
    exhaustive=[
        *("causal", "causal, dead rows", "window, behind the keys for the last queries", "key lengths", "pairs"),
        "causal, segments, lengths",
    ],
)
def test_values_and_garbage(name):
    arguments, live = CASES[name]
    inputs, bias = random_inputs(), arguments.get("bias", 0.0)
    run = values(arguments)
    out, lse = jax.device_get(run(*inputs))
    expected = exact(*inputs, live, np.where(np.isneginf(bias), 0, bias))
    assert_close((out, lse), expected)
    assert (np.where(live.any(-1), 0, np.moveaxis(out, 2, 1).any(-1)) == 0).all()
    for bad in GARBAGE:
        for operand in range(3):
            for place in (1, 5):
                changed = [x.copy() for x in inputs]
                changed[operand][0, place, 0, 2] = bad
                sees = live[0, :, :, place]
                if operand == 0:  # a query of one head
                    sees = live[0].any(-1) & (np.arange(6) == place) & (np.arange(2) == 0)[:, None]
                sees = np.moveaxis(np.stack([sees, np.zeros_like(sees)]), 1, 2)
                new_out, new_lse = jax.device_get(run(*changed))
                assert_same_bits((new_out[~sees], new_lse[~sees]), (out[~sees], lse[~sees]))
                assert np.isnan(new_out[sees]).all()
                assert np.isnan(new_lse[sees]).all()


@pytest.mark.usefixtures("in_kernels")
@parametrize(
    "name",
    ["causal, dead rows"],
    exhaustive=["bias of -inf", "window, behind the keys for the last queries", "pairs", "causal, segments, lengths"],
)
def test_gradients_and_garbage(name):
    """Of problems of one block, whose reverse pass wants no more of the forward pass."""
    arguments, live = CASES[name]
    inputs, d_out, bias = random_inputs(), normals(2, 6, 2, 4, seed=7), arguments.get("bias", 0.0)
    run = with_gradients(functools.partial(attention, **arguments))
    (out, _), expected = exact(*inputs, live, np.where(np.isneginf(bias), 0, bias), d_out=d_out)
    results = run(inputs, d_out)
    assert_close(results, (out, tuple(expected[x] for x in ("query", "key", "value"))))
    of_queries, of_keys = live.any((0, 1, 3)), live.any((0, 1, 2))
    seen = (of_queries, of_keys, of_keys)
    for bad in (np.nan, 3e38):  # the product of the second with a cotangent may overflow
        garbage = [np.where(s[:, None, None], x, bad).astype(x.dtype) for x, s in zip(inputs, seen, strict=True)]
        assert_same_bits(run(garbage, d_out), results)


@pytest.mark.usefixtures("in_kernels")
def test_keys_whose_bias_is_the_lowest_number_outweigh_masked_ones():
    """As in a batch padded on the left: the first queries see no others, and logits of masked keys are no higher."""
    inputs, lowest = random_inputs(S=6), np.finfo(np.float32).min
    bias = np.where(np.arange(6) < 3, lowest, np.float32(0))
    run = values(dict(is_causal=True))
    out, lse = run(*inputs, bias=bias)
    means = np.cumsum(inputs[2], 1)[:, :3] / np.arange(1, 4)[:, None, None]  # the logits are lost in such a bias
    assert_close(out[:, :3], np.broadcast_to(means, out[:, :3].shape))
    assert (lse[:, :3] == lowest).all()
    assert_close(out[:, 3:], exact(*inputs, causal(6, 6) & (bias == 0))[0][:, 3:])
    garbage = [np.where(np.arange(6)[:, None, None] < 4, x, np.float32(1e38)) for x in inputs[1:]]
    assert_same_bits(run(inputs[0], *garbage, bias=bias)[0][:, :4], out[:, :4])


@pytest.mark.usefixtures("in_kernels")
def test_a_bias_of_64_bits_below_all_logits_masks():
    inputs, bias = random_inputs(), np.where(np.arange(7) < 3, np.finfo(np.float64).min, 0)
    with jax.enable_x64(True):
        results = values(dict(is_causal=True))(*inputs, bias=bias)
    assert_close(results, exact(*inputs, causal(6, 7) & (bias == 0)))


@pytest.mark.usefixtures("in_kernels")
@parametrize("dtype", [jnp.bfloat16], exhaustive=[jnp.float16])
def test_options_and_narrow_dtypes(dtype):
    inputs = [jnp.asarray(x, dtype) for x in random_inputs(N=4, K=2)]
    out, lse = values(dict(is_causal=True, logit_soft_cap=2.0, scale=0.7))(*inputs)
    expected = exact(*inputs, causal(6, 7), scale=0.7, soft_cap=2.0)
    assert out.dtype == dtype
    assert_close((np.asarray(out, np.float32), lse), expected, float(jnp.finfo(dtype).eps))


@pytest.mark.skipif(not platforms.Choices().has_fusion_library, reason="this JAX has no kernels of the library")
def test_no_array_over_all_pairs():
    shape = jax.ShapeDtypeStruct((2, 512, 8, 16), np.float32)
    program = jax.jit(functools.partial(attention, is_causal=True)).lower(shape, shape, shape).compile()
    assert program.memory_analysis().temp_size_in_bytes < 2 * 512 * 512 * 8 * 4 / 2


@pytest.mark.skipif(not platforms.Choices().has_fusion_library, reason="this JAX has no kernels of the library")
def test_gradients_of_short_sequences_take_the_memory_of_one_array_over_all_pairs():
    shape = jax.ShapeDtypeStruct((32, 128, 8, 32), np.float32)
    program = with_gradients(functools.partial(attention, is_causal=True)).lower([shape] * 3, shape).compile()
    assert program.memory_analysis().temp_size_in_bytes < 1.5 * 32 * 128 * 128 * 8 * 4
