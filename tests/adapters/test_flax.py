"""What the layers of flax.nnx and of flax.linen with masksafe inside have in common, against flax's own.

And `flax_attention`, with which they attend.
"""

import chex
import flax_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_in_flax import make_modern_layer
from flax import linen, nnx
from flax.serialization import from_bytes, to_bytes
from flax_cases import MASK, MASKED, PAIRS, VALID, Linen, Nnx, X, attention, filled, norm, value_and_gradients
from tiers import parametrize

from masksafe.adapters import flax_attention


def ids(value):
    return value.__name__.lower() if isinstance(value, type) else None


each_library = parametrize("flax", [Nnx], exhaustive=[Linen], ids=ids)

# The layers of both libraries call the same functions: of flax.linen a few options are enough, and its own.
COMPARED = [(Nnx, name) for name in cases.NORMS]
COMPARED += [(Linen, name) for name in (*cases.IN_BOTH, *cases.OF_LINEN)]


@parametrize(("flax", "name"), [(Nnx, "layer")], exhaustive=COMPARED, ids=ids)
def test_norms_have_the_state_values_and_gradients_of_flax(flax, name):
    layers = [norm(flax, module, name) for module in (flax.ours, flax.own)]
    (_, *state), (_, *expected) = map(flax.split, layers)
    chex.assert_trees_all_equal(state, expected)
    is_narrow = "16 bits" in name or cases.ALL_NORMS[name][1].get("dtype") == jnp.bfloat16
    results = [value_and_gradients(flax, layer, X) for layer in layers]
    cases.assert_close(*results, jnp.bfloat16 if is_narrow else None)


@parametrize("name", ["layer"], exhaustive=MASKED)
@each_library
def test_norms_do_not_see_what_is_masked(flax, name):
    layer, own = (norm(flax, module, name) for module in (flax.ours, flax.own))
    mask = jnp.array(MASK)
    y, _, d_x, after = cases.same_for_all_garbage(lambda x: value_and_gradients(flax, layer, filled(x), mask=mask))
    cases.assert_masked_are_zero(y, d_x)
    expected, own_after = flax.apply(*flax.split(own), X, mask=jnp.broadcast_to(mask, X.shape))
    cases.assert_close((y[VALID], after), (expected[VALID], own_after))


@each_library
def test_a_batch_over_devices_counts_elements_and_not_devices(flax):
    whole, part = (
        flax.split(flax.make(flax.ours, "BatchNorm", use_running_average=False, axis_name=name))
        for name in (None, "samples")
    )
    y, state = flax.apply(*whole, X, mask=MASK)
    of_samples, states = jax.vmap(lambda x, mask: flax.apply(*part, x, mask=mask), axis_name="samples")(X, MASK)
    np.testing.assert_allclose(of_samples, y, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(jax.tree.map(lambda s: s[2], states), state, rtol=1e-6)  # of the empty sample


@pytest.mark.parametrize(
    ("flax", "layer", "options", "x", "argument"),
    [
        (Nnx, "LayerNorm", {"axis_index_groups": ((0,),)}, X, "axis_index_groups"),
        (Nnx, "BatchNorm", {"dtype": jnp.complex64}, X, "x"),
        (Nnx, "RMSNorm", {}, np.ones(X.shape, np.complex64), "x"),
        (Nnx, "GroupNorm", {"num_groups": 2, "reduction_axes": (1,)}, X, "reduction_axes"),
        (Linen, "LayerNorm", {"axis_index_groups": ((0,),)}, X, "axis_index_groups"),
        (Linen, "BatchNorm", {"use_running_average": False}, np.ones(X.shape, np.complex64), "x"),
        (Linen, "GroupNorm", {"num_groups": 2, "reduction_axes": (1,)}, X, "reduction_axes"),
        (Linen, "GroupNorm", {"group_size": 2}, X, "num_groups and group_size"),
        (Linen, "GroupNorm", {"num_groups": None, "group_size": 4}, X, "group_size"),
        (Linen, "MultiHeadAttention", {"qk_attn_weights_einsum_cls": dict}, X, "qk_attn_weights_einsum_cls"),
    ],
    ids=ids,
)
def test_refusals_name_the_layer_and_the_argument(flax, layer, options, x, argument):
    with pytest.raises((TypeError, ValueError), match=f"^{layer}: {argument}: "):
        flax.make(flax.ours, layer, x, **options)(x)


# Attention.


@parametrize(
    ("flax", "options", "arguments"),
    [(Nnx, {"normalize_qk": True, "out_features": 3}, {"is_causal": True})],
    exhaustive=[
        (Nnx, {"num_kv_heads": 1, "use_bias": False, "dropout_rate": 0.5, "deterministic": True}, {"is_causal": True}),
        (Nnx, {"dtype": jnp.bfloat16}, {"is_causal": True}),
        (Linen, {"normalize_qk": True, "out_features": 3}, {"mask": np.tri(4)[None, None]}),
    ],
    ids=ids,
)
def test_attention_has_the_state_values_and_gradients_of_flax(flax, options, arguments):
    layers = [attention(flax, module, **options) for module in (flax.ours, flax.own)]
    (_, params, rest), (_, expected, expected_rest) = map(flax.split, layers)
    chex.assert_trees_all_equal(params, expected)
    chex.assert_trees_all_equal_structs(rest, expected_rest)
    results = [value_and_gradients(flax, layer, X, **arguments) for layer in layers]
    chex.assert_trees_all_equal_shapes_and_dtypes(*results)
    if "dtype" in options:  # where gradients cancel, those of 16 bits are rounding errors
        results = [y for y, *_ in results]
    cases.assert_close(*results, options.get("dtype"))


@each_library
def test_attention_does_not_see_what_is_masked(flax):
    layer, own = (attention(flax, module, normalize_qk=True) for module in (flax.ours, flax.own))
    y, _, d_x, _ = cases.same_for_all_garbage(lambda x: value_and_gradients(flax, layer, filled(x), mask=PAIRS))
    cases.assert_masked_are_zero(y, d_x)
    np.testing.assert_allclose(y[VALID], own(X, mask=PAIRS)[VALID], rtol=1e-5, atol=1e-5)


IN_CONTEXT = [(Nnx, ("inputs_k", "inputs_v")), (Linen, ("inputs_k", "inputs_v"))]
IN_CONTEXT += [(Nnx, ("inputs_k",)), (Linen, ("inputs_kv",))]


@parametrize(("flax", "keywords"), [(Nnx, ("inputs_k", "inputs_v"))], exhaustive=IN_CONTEXT, ids=ids)
@pytest.mark.filterwarnings("ignore:The inputs_kv arg:DeprecationWarning")
def test_attention_to_a_context_with_nothing_left(flax, keywords):
    layer, own = (attention(flax, module) for module in (flax.ours, flax.own))
    is_left, context = MASK[:, 1:], X[:, 1:]
    mask = is_left[:, None, None, :, 0]

    def attended(value):
        contexts = dict.fromkeys(keywords, filled(value, context, is_left))
        return value_and_gradients(flax, layer, X, mask=mask, **contexts)

    y, *_ = cases.same_for_all_garbage(attended)
    assert jnp.all(y[2] == 0)
    expected = own(X, **dict.fromkeys(keywords, context), mask=mask)
    np.testing.assert_allclose(y[:2], expected[:2], rtol=1e-5, atol=1e-5)


@each_library
def test_attention_decodes_step_by_step_what_it_computes_at_once(flax):
    at_once = attention(flax, flax.ours)(X, mask=jnp.tril(jnp.ones((4, 4))))
    decoder = flax.decoder(X)
    steps = [decoder(X[:, t : t + 1], **flax.step_options) for t in range(X.shape[1])]
    np.testing.assert_allclose(jnp.concatenate(steps, 1), at_once, rtol=1e-5, atol=1e-5)


@parametrize(("flax", "heads"), [(Nnx, cases.HEADS)], exhaustive=[(Linen, 1)], ids=ids)
def test_a_step_of_decoding_whose_query_sees_nothing_is_gone(flax, heads):
    layer, bad = flax.decoder(X[:1, :3]), jnp.full_like(X[:1, :1], jnp.nan)
    mask = jnp.broadcast_to(jnp.array([False, True, True]), (1, heads, 1, 3))  # the later columns are not written yet
    y, gradients, *_ = value_and_gradients(flax, layer, bad, mask=mask, **flax.step_options)
    for array in jax.tree.leaves((y, gradients)):
        assert jnp.all(array == 0)
    layer(bad, mask=mask, **flax.step_options)
    out = layer(X[:1, :1], mask=mask, **flax.step_options)
    np.testing.assert_allclose(out, attention(flax, flax.ours)(X[:1, :1]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("flax", "shapes", "mask", "argument"),
    [
        (Nnx, [(1, 3), (1, 3)], (5, 1, 3, 3), "mask"),
        (Nnx, [(2, 1), (2, 3)], (2, 1, 3, 3), "mask"),
        (Nnx, [(2, 3), (1, 3)], (2, 1, 3, 3), "inputs_k"),
        (Nnx, [(2, 3), (2, 3), (2, 1)], (2, 1, 3, 3), "inputs_v"),
        (Nnx, [(3,), (3,)], (2, 1, 3, 3), "mask"),
        (Linen, [(1, 4)], (3, 1, 4, 4), "mask"),
    ],
    ids=ids,
)
def test_attention_refuses_a_mask_that_would_enlarge_its_inputs(flax, shapes, mask, argument):
    inputs = [jnp.ones((*shape, cases.CHANNELS)) for shape in shapes]
    with pytest.raises(ValueError, match=f"{flax.attention_layer}: {argument}: got shape"):
        attention(flax, flax.ours)(*inputs, mask=jnp.ones(mask, bool))


@each_library
def test_attention_drops_weights_and_refuses_to_store_them(flax):
    layer = attention(flax, flax.ours, dropout_rate=0.5, deterministic=False)
    assert jnp.any(layer(X) != layer(X))
    with pytest.raises(ValueError, match=r"^flax_attention: module: got Multi\w+; expected None. Do not set sow_w"):
        layer(X, sow_weights=True)


def test_flax_attention_without_a_layer():
    head = X[:, :, None]  # as query, key and value
    without = flax_attention(head, head, head)
    np.testing.assert_array_equal(flax_attention(head, head, head, dropout_rate=0.9, deterministic=True), without)
    assert flax_attention(head, head, head, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    with pytest.raises(TypeError, match="einsum"):
        flax_attention(head, head, head, einsum=None)
    with pytest.raises(ValueError, match=r"^flax_attention: dropout_rng: got None; expected a random key for dropout"):
        flax_attention(head, head, head, dropout_rate=0.9)


def test_of_a_cache_a_causal_mask_hides_nothing():
    """Some versions of flax ask for one on top of their mask of the cache, by which a query saw the first key alone."""
    query, key, value = (jnp.ones((1, n, 2, 4)) * jnp.arange(n)[:, None, None] for n in (1, 3, 3))
    out = flax_attention(query, key, value, mask=jnp.ones((1, 1, 1, 3), bool), is_causal=True)
    np.testing.assert_allclose(out, jnp.ones((1, 1, 2, 4)), rtol=1e-6)


@pytest.mark.exhaustive
def test_sinks_score_mod_and_mask_mod_inside_of_a_layer():
    layer, x = make_modern_layer(nnx.Rngs(0)), jax.random.normal(jax.random.key(0), (2, 5, 8))
    expected, moved = layer(x), layer(x.at[:, 2].add(1.0))  # the first key of the second chunk
    np.testing.assert_array_equal(moved[:, [0, 1, 4]], expected[:, [0, 1, 4]])
    assert (moved[:, 2:4] != expected[:, 2:4]).all()
    gradient = nnx.grad(lambda layer: jnp.sum(layer(x) ** 2))(layer)
    for name in ("sinks", "slopes"):
        assert (np.abs(gradient[name][...]) > 1e-6).all()


# A whole model.


@each_library
def test_a_moved_model_does_not_see_padding(flax):
    model, arrays = flax.model(flax.ours), {"mask": jnp.array(MASK), "pairs": PAIRS}

    def gradients(value):
        _, of_params, *_ = value_and_gradients(flax, model, filled(value), jnp.array(MASK), **arrays)
        # The first layer is the caller's to mask: a product with a NaN has a gradient of NaN.
        return {name: gradient for name, gradient in of_params.items() if name != flax.first_layer}

    cases.same_for_all_garbage(gradients)


@each_library
def test_a_model_moves_by_one_import_with_its_checkpoint_and_back(flax):
    own, moved = (flax.model(module) for module in (flax.own, flax.ours))
    assert flax.metadata(moved) == flax.metadata(own)
    chex.assert_trees_all_equal(flax.state(moved), flax.state(own))

    def trained(model):
        _, d_params, _, after = value_and_gradients(flax, model, X)
        return flax.trained(model, d_params, after)

    def loaded(model, state):
        return flax.with_state(model, from_bytes(state, to_bytes(state)))

    own = trained(own)
    moved = trained(loaded(moved, flax.state(own)))
    own = trained(own)
    cases.assert_close(flax.state(moved), flax.state(own))
    back = loaded(own, flax.state(moved))
    chex.assert_trees_all_equal(flax.state(back), flax.state(moved))


# What flax.linen has of its own.


@pytest.mark.exhaustive
def test_attention_promotes_queries_and_context_as_flax_does():
    layers = (attention(Linen, module, param_dtype=jnp.bfloat16) for module in (Linen.ours, linen))
    cases.assert_close(*(layer(X.astype(jnp.bfloat16), X) for layer in layers), jnp.bfloat16)


def test_a_call_of_attention_is_recorded_once():
    layer, variables = attention(Linen, Linen.ours).unbind()
    out, state = layer.apply(variables, filled(jnp.nan), mask=PAIRS, capture_intermediates=True)
    (recorded,) = state["intermediates"]["__call__"]
    np.testing.assert_array_equal(recorded, out)


@parametrize("name", ["layer"], exhaustive=["rms", "group"])
def test_a_list_is_an_array(name):
    layer, _ = norm(Linen, Linen.ours, name).unbind()
    x, key = [[1.0, 2.0, 3.0, 4.0]], jax.random.key(0)
    np.testing.assert_array_equal(*(layer.init_with_output(key, a)[0] for a in (x, jnp.array(x))))
