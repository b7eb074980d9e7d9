"""The examples of attention: flax's layers with masksafe inside, and the empty context."""

import attention_in_flax
import empty_context
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

X, CONTEXT = jax.random.normal(jax.random.key(0), (2, 2, 4, 8))
MASK = jnp.array([[1, 1, 0, 1], [0, 0, 0, 0]], bool)[:, None, None, :]


def assert_the_layer_is_flax_own_but_for_empty_contexts(ours, theirs):
    out, expected = ours(MASK), theirs(MASK)
    np.testing.assert_allclose(out[0], expected[0], rtol=1e-5, atol=1e-6)
    bias_of_the_projection = ours(MASK & False)[1]
    np.testing.assert_allclose(out[1], bias_of_the_projection, rtol=1e-5, atol=1e-6)
    assert not np.allclose(out[1], expected[1])


@pytest.mark.slow
def test_nnx():
    layer = attention_in_flax.nnx_layer()
    own = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
    call = lambda layer: lambda mask: layer(X, CONTEXT, mask=mask)  # noqa: E731
    assert_the_layer_is_flax_own_but_for_empty_contexts(call(layer), call(own))


@pytest.mark.slow
def test_linen():
    layer, own = attention_in_flax.linen_layer(), linen.MultiHeadDotProductAttention(2)
    variables = own.init(jax.random.key(0), X, CONTEXT)
    call = lambda layer: lambda mask: layer.apply(variables, X, CONTEXT, mask=mask)  # noqa: E731
    assert_the_layer_is_flax_own_but_for_empty_contexts(call(layer), call(own))


@pytest.mark.slow
@pytest.mark.parametrize("padding", [float("nan"), 1.0, 100.0])
def test_padding_moves_nothing_in_an_empty_context(padding):
    moved, gradient = empty_context.largest_move(empty_context.LIBRARIES["masksafe"], padding)
    assert moved == [0, 0, 0]
    assert gradient == 0


@pytest.mark.slow
def test_padding_moves_the_empty_context_of_the_peer():
    moved, _ = empty_context.largest_move(empty_context.LIBRARIES["jax.nn"], 1.0)
    assert moved[2] != 0


@pytest.mark.slow
def test_picture_of_an_empty_context(tmp_path):
    empty_context.draw(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
