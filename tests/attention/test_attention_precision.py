"""How many digits the gradients of dot_product_attention have, against float64 and against the plain formula."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    attention,
    by_formula,
    causal,
    exact,
    normals,
    other_derivatives,
    random_inputs,
    with_gradients,
)
from comparisons import assert_close
from tiers import parametrize

import masksafe

pytestmark = pytest.mark.optimised

# Queries, keys, width, and the standard deviation of queries and keys.
SIZES = {
    "larger logits": (64, 64, 64, 8.0),
    "few keys": (256, 8, 64, 1.5),
    "few keys, three": (128, 3, 64, 4.0),
    "another width and length": (100, 128, 32, 4.0),
    "keys in two blocks": (64, 1100, 64, 4.0),
    "small logits": (128, 256, 64, 1.0),
}


FEW_KEYS = [name for name in SIZES if name.startswith("few keys")]


@parametrize("name", ["larger logits"], exhaustive=SIZES)
def test_gradients_are_as_exact_as_those_of_the_plain_formula(name):
    T, S, H, deviation = SIZES[name]
    fns = with_gradients(attention), with_gradients(jax.nn.dot_product_attention)
    mean_squares = np.zeros((2, 3))
    for seed in range(4):
        query, key, value = random_inputs(1, T, S, 4, 4, H, seed=seed)
        inputs, d_out = (deviation * query, deviation * key, value), normals(*query.shape, seed=9)
        _, expected = exact(*inputs, d_out=d_out)
        for i, fn in enumerate(fns):
            for j, gradient in enumerate(fn(inputs, d_out)[1]):
                mean_squares[i, j] += np.mean((np.float64(gradient) - expected[("query", "key", "value")[j]]) ** 2)
    ours, plain = np.sqrt(mean_squares)
    # With few keys the errors of values depend on the order in which XLA sums over queries.
    times = np.array([1.2, 1.2, 2.5 if name in FEW_KEYS else 1.2])
    assert (ours <= times * plain).all(), ours / plain


# With one key all of its weight is rounding error away from 1, and the gradient of its logit exactly 0.

NO_MASKS = dict(mask=np.ones(40, bool), key_value_seq_lengths=40, bias=np.zeros(40, np.float32))
ONE_KEY = {
    "one that is not masked": dict(mask=np.arange(40) == 30),
    "one of a length": dict(key_value_seq_lengths=1),
    "one that has all of the weight": dict(bias=np.where(np.arange(40) == 2, np.float32(0), -1000)),
}


def test_with_one_key_queries_and_keys_have_no_gradient(form):
    run, (query, key, value) = with_gradients(attention), random_inputs(1, 6, 40, H=64)
    for arguments in ONE_KEY.values():
        d_out = normals(1, 6, 2, 64, seed=9)
        _, (d_query, d_key, d_value) = run((5 * query, 5 * key, value), d_out, NO_MASKS | arguments)
        assert (d_query == 0).all()
        assert (d_key == 0).all()
        assert (d_value != 0).any()


def hessian_of(fn, derivative=jax.hessian):
    return jax.jit(derivative(lambda q, k, v: jnp.sum(fn(q, k, v) ** 2)))


PLAIN_HESSIAN = hessian_of(jax.nn.dot_product_attention)  # one program for all forms


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", ["rows", "many blocks", "weights kept"], indirect=True)
def test_second_order_is_as_exact_as_that_of_the_plain_formula_where_logits_are_large(form):
    def forward_over_forward_mode(loss):
        return jax.jacfwd(jax.grad(loss))

    hessians = {"plain": PLAIN_HESSIAN, "ours": hessian_of(attention)}
    forward = hessian_of(attention, forward_over_forward_mode)
    mean_squares = dict.fromkeys(("plain", "ours", "ours, forward mode"), 0.0)
    for seed in range(3):
        query, key, value = random_inputs(1, 6, 7, seed=seed)
        inputs = 5 * query, 5 * key, value
        with jax.enable_x64(True):
            expected = np.asarray(hessians["plain"](*(np.float64(x) for x in inputs)))
        assert expected.dtype == np.float64
        found = {name: hessian(*inputs) for name, hessian in hessians.items()}
        with masksafe.forward_mode():
            found["ours, forward mode"] = forward(*inputs)
        for name, hessian in found.items():
            mean_squares[name] += np.mean((np.float64(hessian) - expected) ** 2)
    # All are wrong by rounding, amplified by the logits alike, and none by the same rounding.
    assert max(mean_squares.values()) <= 3**2 * mean_squares["plain"], mean_squares


def test_16_bit_gradients_are_as_good_as_those_of_jax_nn(form):
    query, key, value = random_inputs(1, 64, 64, 1, 1, 32)
    inputs = [x.astype(jnp.bfloat16) for x in (query, key + 3, value + 30)]
    d_out = normals(1, 64, 1, 32, seed=6).astype(jnp.bfloat16)
    _, expected = exact(*inputs, d_out=d_out)

    def errors(fn):
        _, gradients = with_gradients(fn)(inputs, d_out)
        differences = (np.asarray(g, np.float64) - expected[n] for g, n in zip(gradients, expected, strict=False))
        return np.array([np.sqrt(np.mean(difference**2)) for difference in differences])

    ours, theirs = errors(attention), errors(jax.nn.dot_product_attention)
    assert (ours <= 1.1 * theirs).all(), ours / theirs


def test_the_logsumexp_is_rounded_once():
    query, key, value = random_inputs(1, 64, 64, 1, 1, 64)
    _, lse = jax.jit(functools.partial(attention, return_residual=True))(20 * query, 20 * key, value)
    np.testing.assert_allclose(lse, exact(20 * query, 20 * key, value)[1], rtol=2e-6)


def test_small_weights_of_float16_keep_their_digits_on_accelerators(choose):
    choose(form="accelerator")
    zeros, value = np.zeros((1, 4096, 1, 2), np.float16), normals(1, 4096, 1, 2).astype(np.float16)
    out = attention(zeros[:, :1], zeros, value)
    np.testing.assert_allclose(out[0, 0, 0], value.astype(np.float64).mean((0, 1, 2)), atol=2e-5)


@pytest.mark.usefixtures("many_blocks")
def test_other_derivatives_of_16_bits():
    """Of slices of 16 bits, which some versions of XLA copy; tangents are rounded to 16 bits too."""
    inputs, along = ([x.astype(jnp.bfloat16) for x in random_inputs(seed=seed)] for seed in (0, 3))
    fn, definition = functools.partial(attention, is_causal=True), functools.partial(by_formula, causal(6, 7))
    found = jax.jit(functools.partial(other_derivatives, fn))(tuple(inputs), tuple(along))
    wide = [tuple(np.float32(x) for x in arrays) for arrays in (inputs, along)]
    assert_close(found, jax.jit(functools.partial(other_derivatives, definition))(*wide), 0.1)
