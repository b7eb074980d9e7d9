"""The examples of attention: flax's layers with masksafe inside, and the empty context."""

import attention_in_flax
import empty_context
import numpy as np
import pytest
from flax import linen, nnx

pytestmark = pytest.mark.slow
X, CONTEXT = np.random.default_rng(0).normal(size=(2, 2, 4, 8)).astype(np.float32)
MASK = np.array([[1, 1, 0, 1], [0, 0, 0, 0]], bool)[:, None, None, :]


def nnx_layers():
    own = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
    return [lambda mask, layer=layer: layer(X, CONTEXT, mask=mask) for layer in (attention_in_flax.nnx_layer(), own)]


def linen_layers():
    layer, own = attention_in_flax.linen_layer(), linen.MultiHeadDotProductAttention(2)
    variables = own.init(nnx.Rngs(0).params(), X, CONTEXT)
    return [lambda mask, layer=layer: layer.apply(variables, X, CONTEXT, mask=mask) for layer in (layer, own)]


@pytest.mark.parametrize("layers", [nnx_layers, linen_layers])
def test_the_layer_is_flax_own_but_for_empty_contexts(layers):
    ours, theirs = layers()
    out, expected = ours(MASK), theirs(MASK)
    np.testing.assert_allclose(out[0], expected[0], rtol=1e-5, atol=1e-6)
    bias_of_the_projection = ours(MASK & False)[1]
    np.testing.assert_allclose(out[1], bias_of_the_projection, rtol=1e-5, atol=1e-6)
    assert not np.allclose(out[1], expected[1])


def test_padding_moves_nothing_but_the_empty_context_of_the_peer(tmp_path):
    ours, peer = (empty_context.LIBRARIES[name] for name in ("masksafe", "jax.nn"))
    for padding in (float("nan"), 1.0, 100.0):
        assert empty_context.largest_move(ours, padding) == ([0, 0, 0], 0)
    moved, _ = empty_context.largest_move(peer, 1.0)
    assert moved[2] != 0
    empty_context.draw(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
