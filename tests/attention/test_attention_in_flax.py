"""flax's attention layers with masksafe inside: causal masks, dropout, and decoding step by step with their caches."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_in_flax import make_modern_layer
from flax import linen, nnx
from tiers import few_of

from masksafe.adapters import flax_attention

TIME, WIDTH, HEADS = 5, 8, 2
X = jax.random.normal(jax.random.key(0), (2, TIME, WIDTH))
IS_WORD = jnp.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], bool)
CAUSAL = linen.make_causal_mask(IS_WORD)
PADDED = linen.combine_masks(CAUSAL, linen.make_attention_mask(IS_WORD, IS_WORD))


def linen_layers(**arguments):
    """With masksafe inside, and flax's own, and parameters for both."""
    layer = linen.MultiHeadDotProductAttention(HEADS, attention_fn=flax_attention, **arguments)
    own = linen.MultiHeadDotProductAttention(HEADS, **arguments)
    return layer, own, own.init(jax.random.key(1), X, deterministic=True)["params"]


def nnx_layer(**arguments):
    return nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=nnx.Rngs(0), **arguments)


MASKS = {"no mask": None, "causal": CAUSAL, "causal and padded": PADDED}


@pytest.mark.parametrize("name", few_of(MASKS, "causal and padded"))
def test_linen_value_and_gradient_are_flax_own(name):
    (layer, own, params), mask = linen_layers(), MASKS[name]
    words = IS_WORD[..., None]  # of flax's own, the rows without a key are averages over padding

    def total(layer):
        return lambda p: jnp.sum(jnp.sin(jnp.where(words, layer.apply({"params": p}, X, mask=mask), 0)))

    ours, theirs = jax.jit(lambda p: [jax.value_and_grad(total(x))(p) for x in (layer, own)])(params)
    chex.assert_trees_all_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.forms
@pytest.mark.parametrize("name", MASKS)
def test_nnx_is_flax_own(name):
    mask = MASKS[name]
    ours, theirs = nnx_layer(attention_fn=flax_attention)(X, mask=mask), nnx_layer()(X, mask=mask)
    words = np.asarray(IS_WORD)
    np.testing.assert_allclose(ours[words], theirs[words], rtol=1e-5, atol=1e-6)


@pytest.mark.forms
def test_linen_decodes_step_by_step_what_it_computes_at_once():
    layer, _, params = linen_layers()
    at_once = layer.apply({"params": params}, X, mask=CAUSAL)
    decoder = layer.clone(decode=True)
    cache = decoder.init(jax.random.key(0), X)["cache"]

    @jax.jit
    def step(cache, x):
        out, updated = decoder.apply({"params": params, "cache": cache}, x, mutable=["cache"])
        return out, updated["cache"]

    outs = []
    for t in range(TIME):
        out, cache = step(cache, X[:, t : t + 1])
        outs.append(out)
    np.testing.assert_allclose(jnp.concatenate(outs, 1), at_once, rtol=1e-5, atol=1e-6)


@pytest.mark.forms
def test_dropout_of_linen_is_drawn_only_where_it_is_asked_for():
    layer, own, params = linen_layers(dropout_rate=0.5)

    def run(layer, seed, deterministic):
        rngs = {"dropout": jax.random.key(seed)}
        return layer.apply({"params": params}, X, mask=CAUSAL, deterministic=deterministic, rngs=rngs)

    np.testing.assert_allclose(run(layer, 0, True), run(own, 0, True), rtol=1e-5, atol=1e-6)
    assert (run(layer, 0, False) != run(layer, 1, False)).any()


def test_dropout_of_nnx_is_drawn_only_where_it_is_asked_for():
    def run(seed, deterministic, **arguments):
        layer = nnx_layer(dropout_rate=0.5, **arguments)
        return layer(X, mask=CAUSAL, deterministic=deterministic, rngs=nnx.Rngs(seed))

    ours = dict(attention_fn=flax_attention)
    np.testing.assert_allclose(run(0, True, **ours), run(0, True), rtol=1e-5, atol=1e-6)
    assert (run(0, False, **ours) != run(1, False, **ours)).any()


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_mean_over_dropout_is_what_comes_without(dropout):
    layer, _, params = linen_layers(dropout_rate=dropout)

    def run(key):
        return layer.apply({"params": params}, X, mask=CAUSAL, deterministic=False, rngs={"dropout": key})

    draws = jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(0), 2000))
    expected = layer.apply({"params": params}, X, mask=CAUSAL, deterministic=True)
    standard_errors = draws.std(0) / len(draws) ** 0.5
    assert (abs(draws.mean(0) - expected) <= 5 * standard_errors + 1e-6).all()


@pytest.mark.parametrize("is_causal", few_of([False, True], True))
def test_nnx_decodes_step_by_step_what_it_computes_at_once(is_causal):
    """A causal mask hides nothing of the cache.

    Some versions of flax ask for one on top of their mask of the cache, by which a query saw the first key alone.
    """
    layer = nnx_layer(attention_fn=flax_attention)
    at_once = layer(X, mask=None if is_causal else CAUSAL, is_causal=is_causal)
    layer.init_cache(X.shape)
    steps = [layer(X[:, t : t + 1], decode=True, is_causal=is_causal) for t in range(TIME)]
    np.testing.assert_allclose(jnp.concatenate(steps, 1), at_once, rtol=1e-5, atol=1e-6)
    query, key, value = (jnp.ones((1, n, 2, 4)) * jnp.arange(n)[:, None, None] for n in (1, 3, 3))
    out = flax_attention(query, key, value, mask=jnp.ones((1, 1, 1, 3), bool), is_causal=is_causal)
    np.testing.assert_allclose(out, jnp.ones((1, 1, 2, 4)), rtol=1e-6)


@pytest.mark.forms
def test_sinks_score_mod_and_mask_mod_inside_of_a_layer():
    layer = make_modern_layer(nnx.Rngs(0))
    expected = layer(X)
    moved = layer(X.at[:, 2].add(1.0))  # the first key of the second chunk
    np.testing.assert_array_equal(moved[:, [0, 1, 4]], expected[:, [0, 1, 4]])
    assert (moved[:, 2:4] != expected[:, 2:4]).all()
    gradient = nnx.grad(lambda layer: jnp.sum(layer(X) ** 2))(layer)
    for name in ("sinks", "slopes"):
        assert (np.abs(gradient[name][...]) > 1e-6).all()


def test_what_flax_asks_for_in_vain_is_refused():
    with pytest.raises(ValueError, match=r"^flax_attention: module: got MultiHeadAttention; expected None"):
        nnx_layer(attention_fn=flax_attention)(X, sow_weights=True)
    with pytest.raises(TypeError, match="einsum"):
        flax_attention(X[:, :, None], X[:, :, None], X[:, :, None], einsum=None)
    head = X[:, :, None]
    with pytest.raises(
        ValueError, match=r"^flax_attention: dropout_rng: got None; expected a random key for dropout_rate"
    ):
        flax_attention(head, head, head, dropout_rate=0.9)
    without = flax_attention(head, head, head)
    np.testing.assert_array_equal(flax_attention(head, head, head, dropout_rate=0.9, deterministic=True), without)
    half = flax_attention(X[:, :, None], X[:, :, None], X[:, :, None], dtype=jnp.bfloat16)
    assert half.dtype == jnp.bfloat16
