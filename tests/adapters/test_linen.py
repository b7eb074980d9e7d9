"""What layers of flax.linen with masksafe inside have of their own; what those of flax.nnx share is in test_flax.py."""

import functools

import chex
import flax_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from flax_cases import PAIRS, Linen, X, attention, filled

from masksafe.adapters import linen as ours


@pytest.mark.forms
def test_attention_promotes_queries_and_context_as_flax_does():
    layers = (attention(Linen, module, param_dtype=jnp.bfloat16) for module in (ours, linen))
    cases.assert_close(*(layer(X.astype(jnp.bfloat16), X) for layer in layers), jnp.bfloat16)


def test_a_call_of_attention_is_recorded_once():
    layer, variables = attention(Linen, ours).unbind()
    out, state = layer.apply(variables, filled(jnp.nan), mask=PAIRS, capture_intermediates=True)
    (recorded,) = state["intermediates"]["__call__"]
    np.testing.assert_array_equal(recorded, out)


@pytest.mark.parametrize("layer", [ours.LayerNorm(), ours.RMSNorm(), ours.GroupNorm(num_groups=2)])
def test_a_list_is_an_array(layer):
    x, key = [[1.0, 2.0, 3.0, 4.0]], jax.random.key(0)
    np.testing.assert_array_equal(*(layer.init_with_output(key, a)[0] for a in (x, jnp.array(x))))


# A whole model.


@functools.partial(jax.jit, static_argnums=0)
def trained(model, variables):
    def loss(params):
        y, state = model.apply({**variables, "params": params}, X, mutable="batch_stats")
        return jnp.mean(y**2), state

    (value, state), gradient = jax.value_and_grad(loss, has_aux=True)(variables["params"])
    return value, {"params": jax.tree.map(lambda p, d: p - 0.01 * d, variables["params"], gradient), **state}


@pytest.mark.forms  # by default that of nnx
@pytest.mark.parametrize("through", cases.CHECKPOINTS)
def test_a_model_moves_by_one_import_with_its_checkpoint_and_back(through, tmp_path):
    (own, variables), (moved, of_moved) = (Linen.model(module.__name__).unbind() for module in (linen, ours))
    chex.assert_trees_all_equal(of_moved, variables)  # boxes of partitioning too
    _, variables = trained(own, linen.unbox(variables))
    after = trained(moved, through(variables, tmp_path / "there"))
    cases.assert_close(after, trained(own, variables))
    back = through(after[1], tmp_path / "back")
    cases.assert_close(trained(own, back), trained(moved, back))
