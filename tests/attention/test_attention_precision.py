"""How many digits the gradients of dot_product_attention have, against float64 and against the plain formula."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_attention import attention, blocks, random_inputs  # noqa: F401

import masksafe

# Queries, keys, width, and the standard deviation of queries and keys.
SIZES = {
    "few keys": (256, 8, 64, 1.5),
    "few keys, large logits": (128, 8, 64, 4.0),
    "few keys, three": (128, 3, 64, 4.0),
    "large logits": (256, 256, 64, 4.0),
    "larger logits": (64, 64, 64, 8.0),
    "another width": (128, 128, 32, 4.0),
    "another length": (100, 128, 64, 4.0),
    "keys in two blocks": (64, 1100, 64, 4.0),
    "small logits": (128, 256, 64, 1.0),
}


def exact_gradients(query, key, value, weights):
    """Those of the sum of weighted outputs, in float64."""
    q, k, v, w = (np.asarray(x[0], np.float64) for x in (query, key, value, weights))
    scale = q.shape[-1] ** -0.5
    x = scale * np.einsum("tnh,snh->nts", q, k)
    exps = np.exp(x - x.max(-1, keepdims=True))
    p = exps / exps.sum(-1, keepdims=True)
    d_p = np.einsum("tnh,snh->nts", w, v)
    d_x = p * (d_p - (p * d_p).sum(-1, keepdims=True))
    products = ("nts,snh->tnh", scale * d_x, k), ("nts,tnh->snh", scale * d_x, q), ("nts,tnh->snh", p, w)
    return [np.einsum(*product) for product in products]


@functools.partial(jax.jit, static_argnums=0)
def gradients(fn, query, key, value, weights):
    return jax.grad(lambda *args: jnp.sum(fn(*args) * weights), (0, 1, 2))(query, key, value)


@pytest.mark.parametrize("name", SIZES)
def test_gradients_are_as_exact_as_those_of_the_plain_formula(name):
    T, S, H, deviation = SIZES[name]
    mean_squares = np.zeros((2, 3))
    for seed in range(4):
        query, key, value = random_inputs(1, T, S, 4, 4, H, seed=seed)
        query, key, weights = deviation * query, deviation * key, jax.random.normal(jax.random.key(9), query.shape)
        exact = exact_gradients(query, key, value, weights)
        for i, fn in enumerate((attention, jax.nn.dot_product_attention)):
            for j, gradient in enumerate(gradients(fn, query, key, value, weights)):
                mean_squares[i, j] += np.mean((np.asarray(gradient[0], np.float64) - exact[j]) ** 2)
    ours, plain = np.sqrt(mean_squares)
    # With few keys the errors are small, and depend on the order in which XLA sums over keys and queries.
    times = 2 if name.startswith("few keys") else 1.2
    assert (ours <= times * plain).all(), ours / plain


ONE_KEY = {
    "one key": (1, {}),
    "one that is not masked": (40, dict(mask=jnp.arange(40) == 30)),
    "one of each query": (6, dict(local_window_size=0)),
    "one of a length": (40, dict(key_value_seq_lengths=1)),
    "one that has all of the weight": (6, dict(bias=jnp.where(jnp.arange(6) == 2, 0, -200.0))),
}


@pytest.mark.parametrize("name", ONE_KEY)
def test_with_one_key_queries_and_keys_have_no_gradient(name, blocks):  # noqa: F811
    S, arguments = ONE_KEY[name]
    query, key, value = random_inputs(1, 6, S, H=64)
    fn = functools.partial(attention, **arguments)
    d_query, d_key, d_value = jax.grad(lambda *args: jnp.sum(fn(5 * args[0], *args[1:]) ** 2), (0, 1, 2))(
        query, 5 * key, value
    )
    assert (d_query == 0).all()
    assert (d_key == 0).all()
    assert (d_value != 0).any()


def test_with_one_key_the_gradient_of_the_logsumexp_is_that_of_the_logit(blocks):  # noqa: F811
    query, key, value = random_inputs(1, 6, 6)
    loss = lambda q, k, v: sum(map(jnp.sum, attention(q, k, v, local_window_size=0, return_residual=True)))  # noqa: E731
    d_query, d_key, _ = jax.grad(loss, (0, 1, 2))(query, key, value)
    np.testing.assert_allclose(d_query, jnp.broadcast_to(key / 2, query.shape), rtol=1e-6)
    np.testing.assert_allclose(d_key, query.sum(2, keepdims=True) / 2, rtol=1e-6)


def test_second_order_agrees_where_logits_are_large(blocks):  # noqa: F811
    query, key, value = random_inputs(1, 6, 7)
    loss = lambda fn: lambda q: jnp.sum(fn(5 * q, 5 * key, value) ** 2)  # noqa: E731
    expected = jax.hessian(loss(jax.nn.dot_product_attention))(query)
    limit = 1e-5 * float(jnp.abs(expected).max())
    np.testing.assert_allclose(jax.hessian(loss(attention))(query), expected, atol=limit)
    with masksafe.forward_mode():
        np.testing.assert_allclose(jax.jacfwd(jax.grad(loss(attention)))(query), expected, atol=limit)


def test_the_logsumexp_is_rounded_once():
    query, key, value = random_inputs(1, 64, 64, 1, 1, 64)
    _, lse = attention(20 * query, 20 * key, value, return_residual=True)
    x = np.einsum("btnh,bsnh->bnts", *(np.asarray(20 * a, np.float64) for a in (query, key))) / 8
    expected = np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1)) + x.max(-1)
    np.testing.assert_allclose(lse[..., 0], expected[:, 0], rtol=2e-6)
