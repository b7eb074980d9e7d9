"""masksafe's attention inside the layers of flax.

    python examples/attention_in_flax.py

Both flax.nnx and flax.linen take the attention function as an argument, and `masksafe.adapters.flax_attention` is one.
Sinks, the slopes of ALiBi and a chunked mask go through it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

import masksafe


def nnx_layer(**arguments: Any) -> Any:
    """`flax.nnx.MultiHeadAttention` with masksafe inside; without `attention_fn` it uses flax's own attention."""
    attention_fn = masksafe.adapters.flax_attention
    return nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0), attention_fn=attention_fn, **arguments)


def linen_layer(**arguments: Any) -> Any:
    """`flax.linen.MultiHeadDotProductAttention` with masksafe inside."""
    return linen.MultiHeadDotProductAttention(2, attention_fn=masksafe.adapters.flax_attention, **arguments)


def make_modern_layer(rngs: Any) -> Any:
    """An nnx layer whose attention is causal in chunks, weighs distances as ALiBi does, and has learned sinks."""

    class ModernAttention(nnx.Module):
        def __init__(self) -> None:
            self.layer = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
            self.sinks, self.slopes = nnx.Param(jnp.zeros(2)), nnx.Param(jnp.array([0.25, 0.0625]))

        def __call__(self, x: jax.Array) -> jax.Array:
            slopes = self.slopes[...]
            self.layer.attention_fn = functools.partial(
                masksafe.adapters.flax_attention,
                sinks=self.sinks[...],
                score_mod=lambda logit, batch, head, query, key: logit - slopes[head] * (query - key),
                mask_mod=masksafe.attention_masks.chunked(2),
            )
            return self.layer(x, is_causal=True)

    return ModernAttention()


def show(name: str, apply: Any, x: jax.Array, context: jax.Array) -> None:
    """Prints how far the outputs of a sample with words and of one without move when the padding changes."""
    moved = jnp.abs(apply(x, jnp.where(context == 0, 100.0, context)) - apply(x, context)).max(axis=(1, 2))
    print(f"{name:10} outputs move by {moved[0]:.3g} (three words), {moved[1]:.3g} (no words)")


def show_gradients(x: jax.Array) -> None:
    """Prints the gradients of the sinks and the slopes of a layer that has both."""
    layer = make_modern_layer(nnx.Rngs(0))
    gradient = nnx.grad(lambda layer: jnp.sum(layer(x) ** 2))(layer)
    for name in ("sinks", "slopes"):
        print(f"{name:10} gradients {gradient[name][...].round(3)}")


def main() -> None:
    x = jax.random.normal(jax.random.key(0), (2, 4, 8))
    is_word = masksafe.length_mask(jnp.array([3, 0]), 4)
    context = jnp.where(is_word[..., None], jax.random.normal(jax.random.key(1), (2, 4, 8)), 0)
    mask = is_word[:, None, None, :]
    show("nnx", functools.partial(nnx_layer(), mask=mask), x, context)
    layer = linen_layer()
    variables = layer.init(jax.random.key(0), x, context, mask=mask)
    show("linen", lambda x, context: layer.apply(variables, x, context, mask=mask), x, context)
    show_gradients(x)


if __name__ == "__main__":
    main()
