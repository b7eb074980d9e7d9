"""flax_attention beyond the layers of `masksafe.adapters`, whose tests have its values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_in_flax import make_modern_layer
from flax import linen, nnx

from masksafe.adapters import flax_attention

TIME, WIDTH, HEADS = 5, 8, 2
X = jax.random.normal(jax.random.key(0), (2, TIME, WIDTH))
CAUSAL = linen.make_causal_mask(X[..., 0])
HEAD = X[:, :, None]  # as query, key and value


def nnx_layer(**arguments):
    return nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=nnx.Rngs(0), **arguments)


def test_dropout_is_drawn_only_where_it_is_asked_for():
    def run(seed, deterministic, **arguments):
        layer = nnx_layer(dropout_rate=0.5, **arguments)
        return layer(X, mask=CAUSAL, deterministic=deterministic, rngs=nnx.Rngs(seed))

    ours = dict(attention_fn=flax_attention)
    np.testing.assert_allclose(run(0, True, **ours), run(0, True), rtol=1e-5, atol=1e-6)
    assert (run(0, False, **ours) != run(1, False, **ours)).any()
    without = flax_attention(HEAD, HEAD, HEAD)
    np.testing.assert_array_equal(flax_attention(HEAD, HEAD, HEAD, dropout_rate=0.9, deterministic=True), without)
    assert flax_attention(HEAD, HEAD, HEAD, dtype=jnp.bfloat16).dtype == jnp.bfloat16


def test_of_a_cache_a_causal_mask_hides_nothing():
    """Some versions of flax ask for one on top of their mask of the cache, by which a query saw the first key alone."""
    query, key, value = (jnp.ones((1, n, 2, 4)) * jnp.arange(n)[:, None, None] for n in (1, 3, 3))
    out = flax_attention(query, key, value, mask=jnp.ones((1, 1, 1, 3), bool), is_causal=True)
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
        flax_attention(HEAD, HEAD, HEAD, einsum=None)
    text = r"^flax_attention: dropout_rng: got None; expected a random key for dropout_rate"
    with pytest.raises(ValueError, match=text):
        flax_attention(HEAD, HEAD, HEAD, dropout_rate=0.9)
