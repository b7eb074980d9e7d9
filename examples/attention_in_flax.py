"""masksafe's attention inside the layers of flax and equinox.

    python examples/attention_in_flax.py

Both flax.nnx and flax.linen take the attention function as an argument, so a short adapter is enough. Equinox does not:
there the projections of its layer are called by hand.
"""

import functools
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp

import masksafe


def flax_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    is_causal: bool = False,
    **ignored: Any,  # dtype, precision, module; and broadcast_dropout: dropout draws every weight separately
) -> jax.Array:
    """Attention of masksafe with the signature that `flax.linen` and `flax.nnx` expect."""
    return masksafe.dot_product_attention(
        query,
        key,
        value,
        bias,
        None if mask is None else mask != 0,  # flax's own masks are floats
        is_causal=is_causal,
        dropout_rate=0.0 if deterministic or dropout_rng is None else dropout_rate,
        dropout_key=dropout_rng,
    )


def nnx_layer(**arguments: Any) -> Any:
    """`flax.nnx.MultiHeadAttention` with masksafe inside; without `attention_fn` it uses flax's own attention."""
    from flax import nnx

    return nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0), attention_fn=flax_attention, **arguments)


def linen_layer(**arguments: Any) -> Any:
    """`flax.linen.MultiHeadDotProductAttention` with masksafe inside."""
    from flax import linen

    return linen.MultiHeadDotProductAttention(2, attention_fn=flax_attention, **arguments)


def equinox_attention(layer: Any, x: jax.Array, context: jax.Array, **masks: Any) -> jax.Array:
    """The output of `equinox.nn.MultiheadAttention` for x [time, width], computed with masksafe."""
    project = lambda linear, y: jax.vmap(linear)(y).reshape(len(y), layer.num_heads, -1)  # noqa: E731
    query, key, value = (
        project(layer.query_proj, x),
        project(layer.key_proj, context),
        project(layer.value_proj, context),
    )
    out = masksafe.dot_product_attention(query, key, value, **masks)
    return jax.vmap(layer.output_proj)(out.reshape(len(x), -1))


def show(name: str, apply: Any, x: jax.Array, context: jax.Array) -> None:
    """Prints how far the outputs of a sample with words and of one without move when the padding changes."""
    moved = jnp.abs(apply(x, jnp.where(context == 0, 100.0, context)) - apply(x, context)).max(axis=(1, 2))
    print(f"{name:10} outputs move by {moved[0]:.3g} (three words), {moved[1]:.3g} (no words)")


def main() -> None:
    x = jax.random.normal(jax.random.key(0), (2, 4, 8))
    is_word = jnp.array([[1, 1, 1, 0], [0, 0, 0, 0]], bool)
    context = jnp.where(is_word[..., None], jax.random.normal(jax.random.key(1), (2, 4, 8)), 0)
    mask = is_word[:, None, None, :]
    if importlib.util.find_spec("flax") is None:
        print("flax is not installed.")
    else:
        nnx = nnx_layer()
        show("nnx", functools.partial(nnx, mask=mask), x, context)
        linen = linen_layer()
        variables = linen.init(jax.random.key(0), x, context, mask=mask)
        show("linen", lambda x, context: linen.apply(variables, x, context, mask=mask), x, context)
    if importlib.util.find_spec("equinox") is None:
        print("equinox is not installed.")
    else:
        import equinox

        layer = equinox.nn.MultiheadAttention(2, 8, key=jax.random.key(0))
        apply = jax.vmap(lambda x, context, keys: equinox_attention(layer, x, context, mask=keys))
        show("equinox", lambda x, context: apply(x, context, is_word), x, context)


if __name__ == "__main__":
    main()
