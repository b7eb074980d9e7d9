"""Layers of flax.linen with masksafe inside, against flax's own."""

import functools

import chex
import flax_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from flax_cases import GARBAGE, MASK, MASKED, NORMS, X, assert_close, assert_same_bits, filled
from tiers import few_of

from masksafe.adapters import linen as ours

VALID = MASK[..., 0]
PAIRS = linen.make_attention_mask(VALID, VALID)  # floats, as flax makes them
OWN = {  # options that flax.nnx does not have
    "layer, features elsewhere": ("LayerNorm", {"reduction_axes": -1, "feature_axes": (2, 1)}),
    "layer, statistics in 16 bits": ("LayerNorm", {"force_float32_reductions": False, "param_dtype": jnp.float16}),
    "group of all": ("GroupNorm", {"num_groups": 2, "reduction_axes": (0, 1, 2)}),
    "batch, two axes": ("BatchNorm", {"use_running_average": False, "axis": (2, 1)}),
    "batch, statistics in 16 bits": (
        "BatchNorm",
        {"use_running_average": False, "force_float32_reductions": False, "param_dtype": jnp.bfloat16},
    ),
}
ALL = NORMS | OWN


def norm(library, name):
    layer, options = ALL[name]
    return getattr(library, layer)(**cases.options_of(layer, options))


def attention(library, **options):
    normal = jax.nn.initializers.normal(1.0)
    return library.MultiHeadDotProductAttention(2, qkv_features=8, bias_init=normal, **options)


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(layer, variables, x, **arrays):
    """Of the sum of sines: the gradients of parameters and input, the output, and the statistics that are left."""
    params, rest = variables.get("params", {}), {k: v for k, v in variables.items() if k != "params"}

    def total(params, x):
        y, state = layer.apply({"params": params, **rest}, x, **arrays, mutable=["batch_stats"])
        return jnp.sum(jnp.sin(y.astype(jnp.float32))), (y, state)

    return jax.grad(total, (0, 1), has_aux=True)(params, x)


def initialized(layer):
    return layer.init(jax.random.key(1), X)


@pytest.mark.parametrize("name", few_of(ALL, "rms", "batch", "layer, features elsewhere"))
def test_norms_have_the_variables_values_and_gradients_of_flax(name):
    own, layer = (norm(library, name) for library in (linen, ours))
    variables = initialized(own)
    chex.assert_trees_all_equal(initialized(layer), variables)
    results = (value_and_gradients(each, variables, X) for each in (layer, own))
    is_narrow = "16 bits" in name or ALL[name][1].get("dtype") == jnp.bfloat16
    assert_close(*results, jnp.bfloat16 if is_narrow else None)


@pytest.mark.parametrize("name", MASKED)
def test_norms_do_not_see_what_is_masked(name):
    layer = norm(ours, name)
    results = [value_and_gradients(layer, initialized(layer), filled(value), mask=MASK) for value in GARBAGE]
    for result in results[1:]:
        assert_same_bits(results[0], result)
    (_, d_x), (y, _) = results[0]
    np.testing.assert_array_equal(np.where(MASK, 0, y), 0)
    np.testing.assert_array_equal(np.where(MASK, 0, d_x), 0)


def test_running_statistics_are_those_of_what_is_unmasked():
    layer = ours.BatchNorm(momentum=0.75, use_bias=False, use_scale=False)
    x = jnp.array([[1.0, jnp.nan], [5.0, jnp.nan], [jnp.nan, jnp.nan]])
    mask = (~jnp.isnan(x)).astype(jnp.float32)
    variables = layer.init(jax.random.key(0), x, use_running_average=False)
    _, variables = layer.apply(variables, x, use_running_average=False, mask=mask, mutable="batch_stats")
    np.testing.assert_allclose(variables["batch_stats"]["mean"], [0.75, 0])  # the second feature has nothing left
    np.testing.assert_allclose(variables["batch_stats"]["var"], [1.75, 1])
    y = layer.apply(variables, x, use_running_average=True, mask=mask)
    np.testing.assert_allclose(y, [[0.25 / 1.75**0.5, 0], [4.25 / 1.75**0.5, 0], [0, 0]], rtol=1e-5)


def test_a_batch_over_devices_counts_elements_and_not_devices():
    whole, part = (ours.BatchNorm(use_running_average=False, axis_name=name) for name in (None, "samples"))
    variables = initialized(part)  # there is no axis yet
    run = lambda layer, x, mask: layer.apply(variables, x, mask=mask, mutable="batch_stats")  # noqa: E731
    expected, expected_state = run(whole, X, MASK)
    y, state = jax.vmap(functools.partial(run, part), axis_name="samples")(X, jnp.array(MASK))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    state = jax.tree.map(lambda s: s[2], state)  # of the empty sample
    chex.assert_trees_all_close(state, expected_state, rtol=1e-6)


@pytest.mark.parametrize(
    ("layer", "options", "x", "argument"),
    [
        ("LayerNorm", {"axis_index_groups": ((0,),)}, X, "axis_index_groups"),
        ("BatchNorm", {"use_running_average": False}, X.astype(jnp.complex64), "x"),
        ("GroupNorm", {"reduction_axes": (1,), "num_groups": 2}, X, "reduction_axes"),
        ("GroupNorm", {"group_size": 2}, X, "num_groups and group_size"),
        ("GroupNorm", {"num_groups": None, "group_size": 4}, X, "group_size"),
        ("MultiHeadAttention", {"num_heads": 2, "qk_attn_weights_einsum_cls": dict}, X, "qk_attn_weights_einsum_cls"),
    ],
)
def test_refusals_name_the_layer_and_the_argument(layer, options, x, argument):
    with pytest.raises((TypeError, ValueError), match=f"^{layer}: {argument}: "):
        getattr(ours, layer)(**options).init(jax.random.key(0), x)


# Attention.


@pytest.mark.parametrize(
    "options",
    [{"normalize_qk": True, "out_features": 3}, pytest.param({"dtype": jnp.bfloat16}, marks=pytest.mark.forms)],
    ids=str,
)
def test_attention_has_the_variables_values_and_gradients_of_flax(options):
    own, layer = (attention(library, **options) for library in (linen, ours))
    variables = initialized(own)
    chex.assert_trees_all_equal(initialized(layer), variables)
    mask = linen.make_causal_mask(VALID)
    results = [value_and_gradients(each, variables, X, mask=mask) for each in (layer, own)]
    chex.assert_trees_all_equal_shapes_and_dtypes(*results)
    if "dtype" in options:  # where gradients cancel, those of 16 bits are rounding errors
        results = [y for _, (y, _) in results]
    assert_close(*results, options.get("dtype"))


def test_attention_does_not_see_what_is_masked():
    layer = attention(ours, normalize_qk=True)
    variables = initialized(layer)
    results = [value_and_gradients(layer, variables, filled(value), mask=PAIRS) for value in GARBAGE]
    for result in results[1:]:
        assert_same_bits(results[0], result)
    (_, d_x), (y, _) = results[0]
    np.testing.assert_array_equal(np.where(MASK, 0, y), 0)
    np.testing.assert_array_equal(np.where(MASK, 0, d_x), 0)
    own = attention(linen, normalize_qk=True).apply(variables, X, mask=PAIRS)
    np.testing.assert_allclose(y[VALID], own[VALID], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("keyword", few_of(["inputs_k", "inputs_kv"], "inputs_k"))
@pytest.mark.filterwarnings("ignore:The inputs_kv arg:DeprecationWarning")
def test_attention_to_a_context_with_nothing_left(keyword):
    layer, own = attention(ours), attention(linen)
    variables, mask = initialized(layer), VALID[:, None, None]
    outs = [layer.apply(variables, X, **{keyword: filled(value)}, mask=mask) for value in GARBAGE]
    for out in outs[1:]:
        assert_same_bits(outs[0], out)
    assert jnp.all(outs[0][2] == 0)
    expected = own.apply(variables, X, **{keyword: X}, mask=mask)
    np.testing.assert_allclose(outs[0][:2], expected[:2], rtol=1e-5, atol=1e-5)


@pytest.mark.forms
def test_attention_promotes_queries_and_context_as_flax_does():
    own, layer = (attention(library, param_dtype=jnp.bfloat16) for library in (linen, ours))
    variables = initialized(own)
    outs = [each.apply(variables, X.astype(jnp.bfloat16), X) for each in (layer, own)]
    assert_close(*outs, jnp.bfloat16)


@pytest.mark.forms
def test_attention_decodes_step_by_step_what_it_computes_at_once():
    layer = attention(ours)
    variables = initialized(layer)
    at_once = layer.apply(variables, X, mask=linen.make_causal_mask(VALID))
    decoder, steps = layer.clone(decode=True), []
    cache = decoder.init(jax.random.key(1), X)["cache"]
    for t in range(X.shape[1]):
        out, updated = decoder.apply({**variables, "cache": cache}, X[:, t : t + 1], mutable="cache")
        cache = updated["cache"]
        steps.append(out)
    np.testing.assert_allclose(jnp.concatenate(steps, 1), at_once, rtol=1e-5, atol=1e-5)


@pytest.mark.forms
def test_a_step_of_decoding_whose_query_sees_nothing_is_gone():
    layer, mask = attention(ours, decode=True), jnp.array([False, True, True])[None, None, None]
    variables = layer.init(jax.random.key(1), X[:1, :3])

    def step(params):
        x = jnp.full_like(X[:1, :1], jnp.nan)
        out, _ = layer.apply({**variables, "params": params}, x, mask=mask, mutable="cache")
        return out.sum(), out

    gradient, out = jax.grad(step, has_aux=True)(variables["params"])
    for array in jax.tree.leaves((gradient, out)):
        assert jnp.all(array == 0)


def test_attention_refuses_a_mask_that_would_enlarge_its_inputs():
    with pytest.raises(ValueError, match="MultiHeadDotProductAttention: mask: got shape"):
        attention(ours).init(jax.random.key(1), X[:1], mask=PAIRS)


def test_a_call_of_attention_is_recorded_once():
    layer = attention(ours)
    out, state = layer.apply(initialized(layer), filled(jnp.nan), mask=PAIRS, capture_intermediates=True)
    (recorded,) = state["intermediates"]["__call__"]
    np.testing.assert_array_equal(recorded, out)


def test_attention_drops_weights_and_refuses_to_store_them():
    layer = attention(ours, dropout_rate=0.5)
    variables = layer.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X, deterministic=True)
    drop = lambda seed: layer.apply(variables, X, deterministic=False, rngs={"dropout": jax.random.key(seed)})  # noqa: E731
    assert jnp.any(drop(1) != drop(2))
    with pytest.raises(ValueError, match="sow_weights"):
        layer.apply(variables, X, deterministic=True, sow_weights=True)


# A whole model.

SOURCE = """
from flax import linen
from flax.linen import BatchNorm, GroupNorm, LayerNorm, MultiHeadAttention, MultiHeadDotProductAttention, RMSNorm

class Model(linen.Module):
    @linen.compact
    def __call__(self, x, mask=None, pairs=None):
        x = linen.Dense(8)(x)
        ones = linen.with_partitioning(linen.initializers.ones, (None,))
        for norm in (LayerNorm(scale_init=ones), RMSNorm(), GroupNorm(2), BatchNorm(use_running_average=False)):
            x = linen.gelu(norm(x, mask=mask))
        x = x + MultiHeadAttention(2, normalize_qk=True)(x, mask=pairs)
        x = x + MultiHeadDotProductAttention(2)(x, mask=pairs)
        return linen.Dense(1)(x)
"""


def model_of(module):
    theirs = "from flax.linen import BatchNorm"
    assert theirs in SOURCE
    names = {}
    exec(SOURCE.replace(theirs, f"from {module} import BatchNorm"), names)
    return names["Model"]()


@functools.partial(jax.jit, static_argnums=0)
def trained(model, variables):
    def loss(params):
        y, state = model.apply({**variables, "params": params}, X, mutable="batch_stats")
        return jnp.mean(y**2), state

    (value, state), gradient = jax.value_and_grad(loss, has_aux=True)(variables["params"])
    return value, {"params": jax.tree.map(lambda p, d: p - 0.01 * d, variables["params"], gradient), **state}


@pytest.mark.parametrize("through", cases.CHECKPOINTS)
def test_a_model_moves_by_one_import_with_its_checkpoint_and_back(through, tmp_path):
    own, moved = (model_of(module) for module in ("flax.linen", "masksafe.adapters.linen"))
    variables = own.init(jax.random.key(0), X)
    chex.assert_trees_all_equal(moved.init(jax.random.key(0), X), variables)  # boxes of partitioning too
    _, variables = trained(own, linen.unbox(variables))
    theirs_after = trained(own, variables)
    ours_after = trained(moved, through(variables, tmp_path / "there"))
    assert_close(ours_after, theirs_after)
    back = through(ours_after[1], tmp_path / "back")
    assert_close(trained(own, back), trained(moved, back))


def test_a_moved_model_does_not_see_padding():
    model = model_of("masksafe.adapters.linen")
    variables = linen.unbox(model.init(jax.random.key(0), X))

    @jax.jit
    def gradient(x):
        def loss(params):
            y, _ = model.apply({**variables, "params": params}, x, mask=MASK, pairs=PAIRS, mutable="batch_stats")
            return jnp.sum(y**2, where=MASK)

        return jax.grad(loss)(variables["params"])

    # The first layer is the caller's to mask: a product with a NaN has a gradient of NaN.
    gradients = [{k: v for k, v in gradient(filled(value)).items() if k != "Dense_0"} for value in GARBAGE]
    for each in gradients[1:]:
        assert_same_bits(gradients[0], each)
