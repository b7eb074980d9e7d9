"""merge_attention: attention over the union of disjoint sets of keys."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import attention, causal, exact, normals, random_inputs, replaced, with_gradients
from comparisons import assert_close, assert_same_bits
from tiers import parametrize

import masksafe

with_residual = functools.partial(attention, return_residual=True)
D_OUT = normals(2, 5, 4, seed=3)


def in_parts(query, key, value, ends=(2, 5), **arguments):
    """Causal attention of six queries to seven keys, in sets of keys up to those ends."""
    bounds = [0, *ends, key.shape[1]]
    parts = []
    for start, end in itertools.pairwise(bounds):
        keys = slice(start, end)
        parts.append(with_residual(query, key[:, keys], value[:, keys], is_causal=True, causal_offset=-start))
    return masksafe.merge_attention(*zip(*parts, strict=True))


def test_parts_give_what_all_keys_give_with_exact_gradients():
    """Padded queries, which a loss masks, take no part, as in attention: they may be full of NaN."""
    (query, *rest), cotangents = random_inputs(), (normals(2, 6, 2, 4, seed=6), normals(2, 6, 2, seed=7))
    run = with_gradients(in_parts)
    outputs, gradients = run((query, *rest), cotangents)
    expected, of_all = exact(query, *rest, causal(6, 7), d_out=cotangents[0], d_lse=cotangents[1])
    assert_close(outputs, expected)
    assert_close(gradients, [of_all[name] for name in ("query", "key", "value")])
    masked = tuple(np.where(np.arange(6).reshape(6, *[1] * (x.ndim - 2)) < 4, x, 0) for x in cotangents)
    _, clean = run((query, *rest), masked)
    _, dirty = run((replaced(query, np.s_[:, 4:], np.nan), *rest), masked)
    assert_same_bits(dirty[1:], clean[1:])


def random_parts(number=3):
    return normals(number, 2, 5, 4, seed=1), normals(number, 2, 5, seed=2) * 5


def test_rows_that_the_user_replaces_are_in_no_second_derivative():
    """Reverse over reverse, in which JAX differentiates the first pass as well."""
    parts = random_parts(2)

    def loss(outs, lses):
        out, lse = masksafe.merge_attention(outs, lses)
        return jnp.sum(jnp.sin(out.at[:, 3:].set(0))) + jnp.sum(jnp.sin(lse.at[:, 3:].set(0)))

    second = jax.jit(lambda parts: jax.vjp(jax.grad(loss, (0, 1)), *parts)[1](random_parts(2)))
    clean = second(parts)
    for bad in (np.nan, np.inf):
        dirty = second(tuple(replaced(x, np.s_[:, :, 3:], bad) for x in parts))
        for found, expected in zip(dirty, clean, strict=True):
            assert_same_bits(found[:, :, :3], expected[:, :, :3])
            assert (found[:, :, 3:] == 0).all()


def test_beside_a_part_with_nearly_all_weight_the_other_keeps_its_digits():
    outs, lses = random_parts(2)[0], np.stack([np.full((2, 5), 30.0), np.full((2, 5), 10.0)]).astype(np.float32)
    d_out = D_OUT
    _, (_, d_lses) = with_gradients(lambda *args: masksafe.merge_attention(*args)[0])((outs, lses), d_out)
    weight = 1 / (1 + np.exp(20.0))
    slope = weight * (1 - weight) * np.sum((np.float64(outs[0]) - outs[1]) * d_out, -1)
    np.testing.assert_allclose(d_lses[0], slope, rtol=1e-5, atol=1e-6)  # that of a difference of equal numbers
    np.testing.assert_allclose(d_lses[1], -slope, rtol=1e-5)


@parametrize("number", [3], exhaustive=[2])
def test_parts_of_one_weight(number):
    """Of weights that were computed apart and rounded, two might exceed a half."""
    run, outs, d_out = with_gradients(lambda *args: masksafe.merge_attention(*args)[0]), random_parts(number)[0], D_OUT
    for size in (1, 7, 28, 35, 1000):
        _, (_, d_lses) = run((outs, np.full((number, 2, 5), np.log(size), np.float32)), d_out)
        slopes = np.sum((outs - outs.mean(0)) * d_out, -1) / number
        np.testing.assert_allclose(d_lses, slopes, rtol=1e-4, atol=1e-6)


def test_results_have_the_dtypes_to_which_jax_promotes_the_arguments_even_where_it_refuses():
    shapes = [jax.ShapeDtypeStruct((3, 4), dtype) for dtype in ("bfloat16", "float32", "float16")]
    lse = jax.ShapeDtypeStruct((3,), "float32")
    with jax.numpy_dtype_promotion("strict"):
        for outs, dtype in ((shapes[:2], "float32"), (shapes[:1] * 2, "bfloat16"), (shapes[2:] * 2, "float16")):
            results = jax.eval_shape(masksafe.merge_attention, outs, [lse] * 2)
            assert [x.dtype for x in results] == [dtype, "float32"]


BAD_ARGUMENTS = [
    (([], []), ValueError, "outs: got no array"),
    ((np.ones((2, 3, 4)), np.ones((1, 3))), ValueError, "logsumexps: got 1 arrays; expected 2"),
    ((3, 4), TypeError, "outs: got type int; expected a sequence"),
    ((np.ones((1, 3, 4), int), np.ones((1, 3))), TypeError, r"outs\[0\]: got dtype int"),
    (([np.ones((3, 4)), np.ones((2, 4))], np.ones((2, 3))), ValueError, r"outs\[1\]: got shape"),
    (([np.ones((3, 4))], [np.ones((3, 4))]), ValueError, r"logsumexps\[0\]: got shape \(3, 4\)"),
]


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_bad_arguments_are_refused(case):
    arguments, error, text = case
    with pytest.raises(error, match=f"^merge_attention: {text}"):
        masksafe.merge_attention(*arguments)
