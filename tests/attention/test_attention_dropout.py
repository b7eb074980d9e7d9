"""Dropout of dot_product_attention: which weights are kept depends on the key and the indices of a pair alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import attention, below, causal, exact, normals, random_inputs, with_gradients
from comparisons import assert_close
from tiers import parametrize

import masksafe

RATE, KEY = 0.4, jax.random.key(3)


@functools.partial(jax.jit, static_argnames="rate")
def dropped(key, rate, *inputs):
    return attention(*inputs, dropout_rate=rate, dropout_key=key)


def weights(B=2, T=6, S=8, N=2, K=1, key=KEY, rate=RATE):
    """Those of equal logits, `[B, T, N, S]`: the values are those of the unit matrix."""
    value = jnp.broadcast_to(jnp.eye(S)[:, None], (B, S, K, S))
    return np.asarray(dropped(key, rate, jnp.zeros((B, T, N, 4)), jnp.zeros((B, S, K, 4)), value))


@pytest.fixture(scope="module")
def kept():
    """`[B, T, N, S]`, drawn before a test makes blocks small."""
    return weights() != 0


# Masks that leave pairs out, and those that do not. A program with a mask takes other forms than one without.
MASKS = {
    "lengths": (dict(key_value_seq_lengths=np.array([8, 5])), below([8, 5], 8)[:, None, None, :]),
    "nothing": ({}, np.ones((6, 8), bool)),
    "all True": (dict(mask=np.ones((2, 1, 6, 8), bool)), np.ones((6, 8), bool)),
    "causal": (dict(is_causal=True), causal(6, 8)),
}


@parametrize(
    ("name", "form"),
    [("lengths", "blocks of keys")],
    exhaustive=[
        *((name, "blocks of keys") for name in MASKS if name != "lengths"),
        *(("lengths", form) for form in ("many blocks", "one block", "weights kept")),
        *((("causal", "many blocks"), ("nothing", "rows"), ("causal", "rows"))),
    ],
    indirect=["form"],
)
def test_every_form_draws_alike(name, kept, form):
    """Values and gradients are those of one draw, also where JAX refuses to promote dtypes and ranks by itself."""
    arguments, live = MASKS[name]
    inputs, d_out = random_inputs(S=8), normals(2, 6, 2, 4, seed=6)
    fn = functools.partial(attention, dropout_rate=RATE, dropout_key=KEY, **arguments)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        out, gradients = with_gradients(fn)(inputs, d_out)
    factors = np.moveaxis(np.where(kept, 1 / (1 - RATE), 0), 2, 1)
    expected, of_all = exact(*inputs, live, factors=factors, d_out=d_out)
    assert_close(out, expected[0])
    assert_close(gradients, [of_all[name] for name in ("query", "key", "value")])


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", ["rows", "many blocks", "weights kept"], indirect=True)
def test_plain_form_draws_alike(kept, form):
    """Forward mode and second derivatives are those of the plain form."""
    inputs, d_out = random_inputs(S=8), normals(2, 6, 2, 4, seed=6)
    arguments, live = MASKS["lengths"]
    fn = functools.partial(attention, dropout_rate=RATE, dropout_key=KEY, **arguments)
    loss = lambda *args: jnp.sum(fn(*args) * d_out)  # noqa: E731
    along = normals(*inputs[2].shape, seed=5)
    factors = np.moveaxis(np.where(kept, 1 / (1 - RATE), 0), 2, 1)
    with masksafe.forward_mode():
        _, tangent = jax.jit(lambda *args: jax.jvp(lambda v: loss(*args[:2], v), (args[2],), (along,)))(*inputs)
    d_value = exact(*inputs, live, factors=factors, d_out=d_out)[1]["value"]
    np.testing.assert_allclose(tangent, np.sum(d_value * along), rtol=1e-4)
    # The second derivative by values is 0, and that by values and queries belongs to the first one by queries.
    mixed = jax.jit(jax.grad(lambda q, k, v: jnp.sum(jax.grad(loss, 2)(q, k, v) * along)))(*inputs)
    assert_close(mixed, exact(*inputs[:2], along, live, factors=factors, d_out=d_out)[1]["query"], 1e-4)


def test_a_raw_key_draws_as_a_typed_one(kept):
    assert ((weights(key=jax.random.PRNGKey(3)) != 0) == kept).all()


@parametrize("impl", ["threefry2x32"], exhaustive=["rbg", "unsafe_rbg"])
def test_any_kind_of_random_key(impl):
    key = jax.random.key(3, impl=impl)
    kept = weights(B=1, T=32, S=64, key=key) != 0
    assert abs(kept.mean() - (1 - RATE)) < 4 * (RATE * (1 - RATE) / kept.size) ** 0.5
    assert ((weights(B=1, T=3, S=6, K=2, key=key) != 0) == kept[:, :3, :, :6]).all()


@parametrize("rate", [0.1], exhaustive=[0.02, 0.5, 0.9])
def test_draws_are_independent(rate):
    """What is not, such as two rows alike or a column that many rows drop, would show in one of these sums."""
    of_keys = [weights(B=2, T=64, S=96, rate=rate, key=jax.random.key(seed)) for seed in range(4)]
    x = (np.stack(of_keys) != 0) * 1.0  # [random key, sample, query, head, key]
    x = (x - (1 - rate)) / (rate * (1 - rate)) ** 0.5  # of mean 0 and variance 1
    neighbors = [x, *(np.take(x, range(1, x.shape[a]), a) * np.take(x, range(x.shape[a] - 1), a) for a in range(5))]
    squares = x[:, :, 1:, :, 1:] * x[:, :, :-1, :, 1:] * x[:, :, 1:, :, :-1] * x[:, :, :-1, :, :-1]
    for products in (*neighbors, squares):
        assert abs(products.sum()) < 4.5 * products.size**0.5
    for axis in (2, 4):
        sums = x.sum(axis) / x.shape[axis] ** 0.5
        assert abs((sums**2).mean() - 1) < 0.1
