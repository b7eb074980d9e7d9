"""Layers of flax.nnx with masksafe inside, against flax's own."""

import functools

import chex
import flax_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax_cases import CHANNELS, GARBAGE, MASK, MASKED, NORMS, X, assert_close, assert_same_bits, filled
from tiers import few_of

from masksafe.adapters import nnx as ours

VALID = MASK[..., 0]
PAIRS = nnx.make_attention_mask(VALID, VALID)  # floats, as flax makes them
HEADS = 2


def norm(library, name):
    layer, options = NORMS[name]
    features = X.shape[options.get("axis", -1)]
    return getattr(library, layer)(features, **cases.options_of(layer, options), rngs=nnx.Rngs(1))


def attention(library, **options):
    normal = jax.nn.initializers.normal(1.0)
    return library.MultiHeadAttention(
        HEADS, CHANNELS, qkv_features=8, **{"decode": False, "bias_init": normal, "rngs": nnx.Rngs(1), **options}
    )


@functools.partial(nnx.jit, static_argnames="options")
def value_and_gradients(layer, x, options=(), **arrays):
    """Of the sum of sines: the output, the gradients of parameters and input, and the state that is left."""

    def total(layer, x):
        y = layer(x, **dict(options), **arrays)
        return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

    gradient = nnx.grad(total, argnums=(nnx.DiffState(0, nnx.Param), 1), has_aux=True)
    (d_layer, d_x), y = gradient(layer, x)
    return y, nnx.to_pure_dict(d_layer), d_x, nnx.to_pure_dict(nnx.state(layer, nnx.Not(nnx.RngState)))


@pytest.mark.parametrize("name", few_of(NORMS, *cases.BY_DEFAULT))
def test_norms_have_the_state_values_and_gradients_of_flax(name):
    own, layer = (norm(library, name) for library in (nnx, ours))
    chex.assert_trees_all_equal(nnx.to_pure_dict(nnx.state(layer)), nnx.to_pure_dict(nnx.state(own)))
    assert_close(value_and_gradients(layer, X), value_and_gradients(own, X), NORMS[name][1].get("dtype"))


@pytest.mark.parametrize("name", MASKED)
def test_norms_do_not_see_what_is_masked(name):
    results = [value_and_gradients(norm(ours, name), filled(value), mask=jnp.array(MASK)) for value in GARBAGE]
    for result in results[1:]:
        assert_same_bits(results[0], result)
    y, _, d_x, _ = results[0]
    np.testing.assert_array_equal(np.where(MASK, 0, y), 0)
    np.testing.assert_array_equal(np.where(MASK, 0, d_x), 0)


@pytest.mark.parametrize("name", few_of(MASKED, "layer", "batch"))
def test_norms_under_a_mask_are_those_of_flax_where_something_is_left(name):
    own, layer = norm(nnx, name), norm(ours, name)
    mask = np.broadcast_to(MASK, X.shape)[:2]
    np.testing.assert_allclose(
        layer(X[:2], mask=mask)[mask], own(X[:2], mask=jnp.array(mask))[mask], rtol=2e-5, atol=2e-5
    )


def test_masks_may_be_numbers_of_fewer_axes_and_broadcast_to_x():
    mask, layer = jnp.array([1, 1, 0, 1, 0, 1]), norm(ours, "layer")
    expected = layer(X, mask=jnp.broadcast_to(mask != 0, X.shape))
    np.testing.assert_allclose(layer(X, mask=mask), expected, rtol=1e-6)
    with pytest.raises(ValueError, match=r"LayerNorm: mask: got shape \(3, 4\); .*mask\[..., None\]"):
        layer(X, mask=VALID)


def test_running_statistics_are_those_of_what_is_unmasked():
    layer = ours.BatchNorm(2, momentum=0.75, use_running_average=None, rngs=nnx.Rngs(0))
    x = jnp.array([[1.0, jnp.nan], [5.0, jnp.nan], [jnp.nan, jnp.nan]])
    layer(x, use_running_average=False, mask=~jnp.isnan(x))
    np.testing.assert_allclose(layer.mean[...], [0.75, 0])  # the second feature has nothing left
    np.testing.assert_allclose(layer.var[...], [1.75, 1])
    y = layer(x, use_running_average=True, mask=~jnp.isnan(x))
    np.testing.assert_allclose(y, [[0.25 / 1.75**0.5, 0], [4.25 / 1.75**0.5, 0], [0, 0]], rtol=1e-5)
    layer(x[:0], use_running_average=False)
    np.testing.assert_allclose(layer.mean[...], [0.75, 0])
    with pytest.raises(ValueError, match="use_running_average"):
        layer(x)


@pytest.mark.forms
def test_a_batch_over_devices_counts_elements_and_not_devices():
    whole, part = (ours.BatchNorm(CHANNELS, axis_name=name, rngs=nnx.Rngs(0)) for name in (None, "samples"))
    y = whole(X, mask=MASK)
    state = nnx.state(part)

    def of_a_sample(x, mask):
        layer = nnx.merge(nnx.graphdef(part), state, copy=True)
        return layer(x, mask=mask), nnx.state(layer)

    of_samples, states = jax.vmap(of_a_sample, axis_name="samples")(X, jnp.array(MASK))
    np.testing.assert_allclose(of_samples, y, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(states["var"][...][2], whole.var[...], rtol=1e-6)


@pytest.mark.forms
def test_norms_work_in_vmap():
    layer = norm(ours, "layer")
    one_by_one = jax.vmap(lambda x, mask: layer(x, mask=mask))(X, jnp.array(MASK))
    np.testing.assert_allclose(one_by_one, layer(X, mask=MASK), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("layer", "options", "x", "argument"),
    [
        ("LayerNorm", {"axis_index_groups": [[0]]}, X, "axis_index_groups"),
        ("BatchNorm", {"dtype": jnp.complex64}, X, "x"),
        ("RMSNorm", {}, X.astype(jnp.complex64), "x"),
        ("GroupNorm", {"num_groups": 2, "reduction_axes": (1,)}, X, "reduction_axes"),
    ],
)
def test_refusals_name_the_layer_and_the_argument(layer, options, x, argument):
    with pytest.raises((TypeError, ValueError), match=f"^{layer}: {argument}: "):
        getattr(ours, layer)(CHANNELS, **options, rngs=nnx.Rngs(0))(x)


# Attention.


@pytest.mark.parametrize(
    "options",
    [
        {"normalize_qk": True, "out_features": 3},
        {"num_kv_heads": 1, "use_bias": False, "dropout_rate": 0.5, "deterministic": True},
        pytest.param({"dtype": jnp.bfloat16}, marks=pytest.mark.forms),
    ],
    ids=str,
)
def test_attention_has_the_state_values_and_gradients_of_flax(options):
    own, layer = (attention(library, **{**options, "rngs": nnx.Rngs(1)}) for library in (nnx, ours))
    chex.assert_trees_all_equal_structs(nnx.to_pure_dict(nnx.state(layer)), nnx.to_pure_dict(nnx.state(own)))
    chex.assert_trees_all_equal(
        nnx.to_pure_dict(nnx.state(layer, nnx.Param)), nnx.to_pure_dict(nnx.state(own, nnx.Param))
    )
    causal = (("is_causal", True),)
    results = [value_and_gradients(each, X, causal) for each in (layer, own)]
    chex.assert_trees_all_equal_shapes_and_dtypes(*results)
    if "dtype" in options:  # where gradients cancel, those of 16 bits are rounding errors
        results = [y for y, *_ in results]
    assert_close(*results, options.get("dtype"))


def test_attention_does_not_see_what_is_masked():
    layer = attention(ours, normalize_qk=True)
    results = [value_and_gradients(layer, filled(value), mask=PAIRS) for value in GARBAGE]
    for result in results[1:]:
        assert_same_bits(results[0], result)
    y, _, d_x, _ = results[0]
    np.testing.assert_array_equal(np.where(MASK, 0, y), 0)
    np.testing.assert_array_equal(np.where(MASK, 0, d_x), 0)
    own = attention(nnx, normalize_qk=True)(X, mask=PAIRS)
    np.testing.assert_allclose(y[VALID], own[VALID], rtol=1e-5, atol=1e-5)


def test_attention_to_a_context_with_nothing_left():
    layer, context = attention(ours), X[:, :3]
    mask = jnp.array([[1, 1, 0], [1, 0, 0], [0, 0, 0]], bool)[:, None, None]
    outs = [layer(X, jnp.where(mask[:, 0, 0, :, None], context, value), mask=mask) for value in GARBAGE]
    for out in outs[1:]:
        assert_same_bits(outs[0], out)
    assert jnp.all(outs[0][2] == 0)
    np.testing.assert_allclose(outs[0][:2], attention(nnx)(X, context, mask=mask)[:2], rtol=1e-5, atol=1e-5)


def test_what_a_causal_mask_and_padding_on_the_left_hide_together_is_gone():
    layer, valid = attention(ours), jnp.array([False, False, True, True])
    results = [
        value_and_gradients(layer, jnp.where(valid[:, None], X, value), (("is_causal", True),), mask=valid[None, None])
        for value in GARBAGE
    ]
    for result in results[1:]:
        assert_same_bits(results[0], result)
    assert jnp.all(results[0][0][:, :2] == 0)


@pytest.mark.forms
def test_a_single_causal_query_sees_the_first_key_alone():
    layer, mask = attention(ours), jnp.ones((1, 1, 1, 4), bool)
    out = layer(X[:, :1], X, mask=mask, is_causal=True)
    np.testing.assert_allclose(out, layer(X[:, :1], X[:, :1]), rtol=1e-5, atol=1e-6)


def test_attention_decodes_step_by_step_what_it_computes_at_once():
    layer = attention(ours)
    at_once = layer(X, is_causal=True)
    layer.init_cache(X.shape)
    steps = [layer(X[:, t : t + 1], decode=True, is_causal=True) for t in range(X.shape[1])]
    np.testing.assert_allclose(jnp.concatenate(steps, 1), at_once, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", few_of([1, HEADS], HEADS))
def test_a_step_of_decoding_whose_query_sees_nothing_is_gone(heads):
    layer, grads = attention(ours, decode=True), nnx.grad(lambda layer, x, mask: layer(x, mask=mask).sum())
    layer.init_cache((1, 3, CHANNELS))
    mask = jnp.broadcast_to(jnp.array([False, True, True]), (1, heads, 1, 3))  # the later columns are not written yet
    step = jnp.full((1, 1, CHANNELS), jnp.nan)
    for gradient in jax.tree.leaves(nnx.to_pure_dict(grads(layer, step, mask))):
        assert jnp.all(gradient == 0)
    layer.init_cache((1, 3, CHANNELS))
    assert jnp.all(layer(step, mask=mask) == 0)
    np.testing.assert_allclose(layer(X[:1, :1], mask=mask), attention(ours)(X[:1, :1]), rtol=1e-5, atol=1e-5)


@pytest.mark.forms
def test_a_later_step_may_see_a_key_that_its_own_query_does_not():
    layer, x = attention(ours, decode=True), X[:1]
    layer.init_cache((1, 4, CHANNELS))
    steps = [layer(x[:, t : t + 1], mask=(jnp.arange(4) < t)[None, None, None]) for t in range(4)]
    at_once = attention(ours)(x, mask=jnp.tri(4, k=-1)[None, None])
    np.testing.assert_allclose(jnp.concatenate(steps, 1), at_once, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("queries", "keys", "mask", "argument"),
    [
        ((1, 3), (1, 3), (5, 1, 3, 3), "mask"),
        ((2, 1), (2, 3), (2, 1, 3, 3), "mask"),
        ((2, 3), (1, 3), (2, 1, 3, 3), "inputs_k"),
        ((3,), (3,), (2, 1, 3, 3), "mask"),
    ],
)
def test_attention_refuses_a_mask_that_would_enlarge_its_inputs(queries, keys, mask, argument):
    q, k = (jnp.ones((*shape, CHANNELS)) for shape in (queries, keys))
    with pytest.raises(ValueError, match=f"MultiHeadAttention: {argument}: got shape"):
        attention(ours)(q, k, mask=jnp.ones(mask, bool))


def test_attention_refuses_values_that_a_mask_would_enlarge():
    with pytest.raises(ValueError, match="MultiHeadAttention: inputs_v: got shape"):
        attention(ours)(X, X, X[:, :1], mask=PAIRS)


def test_decoding_refuses_a_mask_of_more_than_its_query_and_leaves_the_cache():
    layer = attention(ours, decode=True)
    layer.init_cache((2, 3, CHANNELS))
    with pytest.raises(ValueError, match="MultiHeadAttention: mask: got shape"):
        layer(X[:2, :1], mask=jnp.ones((2, 1, 3, 3), bool))
    assert layer.cache_index[...] == 0


@pytest.mark.forms
@pytest.mark.parametrize("mask", [PAIRS, PAIRS.astype(bool)], ids=["floats", "booleans"])
def test_masks_need_no_promotion_of_dtypes_or_ranks(mask):
    layer, of_rows = attention(ours), ours.LayerNorm(CHANNELS, rngs=nnx.Rngs(1))
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        assert jnp.isfinite(layer(filled(jnp.nan), mask=mask, is_causal=True)).all()
        assert jnp.isfinite(layer(X[:, :1], X, mask=mask[:, :, :1], is_causal=True)).all()
        assert jnp.isfinite(of_rows(filled(jnp.nan), mask=jnp.array(MASK, mask.dtype))).all()


def test_a_nan_in_a_mask_keeps_as_any_other_nonzero_number():
    layer = ours.RMSNorm(CHANNELS, rngs=nnx.Rngs(1))
    np.testing.assert_allclose(layer(X, mask=jnp.full((1, 1, 1), jnp.nan)), layer(X), rtol=1e-6)


@pytest.mark.parametrize("name", MASKED)
def test_norms_refuse_another_number_of_features(name):
    layer = norm(ours, name)
    with pytest.raises(ValueError, match=rf"^{MASKED[name][0]}: x: got 4 features in shape .*; expected 6"):
        layer(X[..., :4])


def test_attention_drops_weights_and_refuses_to_store_them():
    layer = attention(ours, dropout_rate=0.5, deterministic=False)
    assert jnp.any(layer(X) != layer(X))
    with pytest.raises(ValueError, match="sow_weights"):
        layer(X, sow_weights=True)


@pytest.mark.forms
def test_attention_takes_inputs_without_a_batch_and_another_function():
    identity = lambda query, key, value, **options: value  # noqa: E731
    layer = attention(ours, attention_fn=identity)
    out = layer(X[1], mask=PAIRS[1:2])
    assert out.shape == X[1].shape
    np.testing.assert_allclose(out[:2], layer.out(layer.value(X[1]))[:2], rtol=1e-6)
    assert jnp.all(out[2:] == 0)


# A whole model.

SOURCE = """
from flax import nnx
from flax.nnx import BatchNorm, GroupNorm, LayerNorm, MultiHeadAttention, RMSNorm

class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Linear(6, 8, rngs=rngs)
        self.norms = nnx.List([
            LayerNorm(8, scale_metadata={"note": "kept"}, rngs=rngs),
            RMSNorm(8, rngs=rngs),
            GroupNorm(8, num_groups=2, rngs=rngs),
            BatchNorm(8, momentum=0.5, rngs=rngs),
        ])
        self.attention = MultiHeadAttention(2, 8, decode=False, normalize_qk=True, rngs=rngs)
        self.out = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x, mask=None, pairs=None):
        x = self.embed(x)
        for norm in self.norms:
            x = nnx.gelu(norm(x, mask=mask))
        x = x + self.attention(x, mask=pairs)
        return self.out(x)
"""


def model_of(import_line):
    theirs = "from flax.nnx import BatchNorm"
    assert theirs in SOURCE
    names = {}
    exec(SOURCE.replace(theirs, f"from {import_line} import BatchNorm"), names)
    return names["Model"](nnx.Rngs(0))


@nnx.jit
def train(model, optimizer, x):
    loss, gradient = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
    optimizer.update(model, gradient)
    return loss


def trained(model):
    optimizer = nnx.Optimizer(model, optax.sgd(0.01), wrt=nnx.Param)
    return [train(model, optimizer, X) for _ in range(2)]


@pytest.mark.parametrize("through", cases.CHECKPOINTS)
def test_a_model_moves_by_one_import_with_its_checkpoint_and_back(through, tmp_path):
    own, moved = (model_of(line) for line in ("flax.nnx", "masksafe.adapters.nnx"))
    assert type(moved.norms[0]) is ours.LayerNorm
    assert type(moved.attention) is ours.MultiHeadAttention
    metadata = [dict(model.norms[0].scale.get_metadata()) for model in (own, moved)]
    assert metadata[0] == metadata[1]
    trained(own)
    nnx.update(moved, through(nnx.to_pure_dict(nnx.state(own)), tmp_path))
    assert_close(trained(moved), trained(own))
    assert_close(nnx.to_pure_dict(nnx.state(moved)), nnx.to_pure_dict(nnx.state(own)))
    nnx.update(own, through(nnx.to_pure_dict(nnx.state(moved)), tmp_path / "back"))
    chex.assert_trees_all_equal(nnx.to_pure_dict(nnx.state(own)), nnx.to_pure_dict(nnx.state(moved)))


def test_a_moved_model_does_not_see_padding():
    model = model_of("masksafe.adapters.nnx")

    @nnx.jit
    def gradient(model, x):
        def loss(model):
            return jnp.sum(model(x, mask=jnp.array(MASK), pairs=PAIRS) ** 2, where=MASK)

        return nnx.to_pure_dict(nnx.grad(loss)(model))

    # The first layer is the caller's to mask: a product with a NaN has a gradient of NaN.
    gradients = [gradient(model, filled(value)) for value in GARBAGE]
    for each in gradients:
        each.pop("embed")
    for each in gradients[1:]:
        assert_same_bits(gradients[0], each)


# Metrics.


BATCHES = [(0, 3), (3, 4), (4, 4), (4, 9)]  # of nine rows, unequal and empty


def metrics(library):
    mean = ours.Mean("loss") if library is ours else nnx.metrics.Average("loss")
    accuracy = (library if library is ours else nnx.metrics).Accuracy
    return nnx.MultiMetric(loss=mean, accuracy=accuracy())


def rows_to_measure():
    generator = np.random.default_rng(0)
    logits, labels = generator.normal(size=(9, 5)).astype(np.float32), generator.integers(0, 5, 9)
    labels[:6] = logits[:6].argmax(-1)
    return {"logits": logits, "labels": labels.astype(np.int32), "loss": generator.normal(size=9).astype(np.float32)}


def test_metrics_are_those_of_flax_on_clean_arrays():
    arrays = jax.tree.map(jnp.asarray, rows_to_measure())
    own, result = metrics(nnx), metrics(ours)
    for each in (own, result):
        each.update(**arrays)
        each.update(**jax.tree.map(lambda x: x[:2], arrays))
    assert_close(result.compute(), own.compute())
    binary = [library.Accuracy(threshold=0.5) for library in (ours, nnx.metrics)]
    for each in binary:
        each.update(logits=arrays["loss"], labels=arrays["labels"] % 2)
    assert binary[0].compute() == binary[1].compute()
    result.reset()
    assert result.compute() == {"loss": 0, "accuracy": 0}


def test_metrics_of_batches_are_those_of_what_is_unmasked_of_all():
    arrays, mask = rows_to_measure(), np.array([1, 1, 0, 1, 0, 1, 1, 0, 1])
    whole = metrics(ours)
    whole.update(**{name: x[mask == 1] for name, x in arrays.items()})
    update = nnx.jit(lambda metrics, arrays: metrics.update(**arrays))
    for bad in GARBAGE:
        result = metrics(ours)
        for start, end in BATCHES:
            batch = {name: jnp.array(x[start:end]) for name, x in arrays.items()}
            is_masked = mask[start:end] == 0
            batch["loss"] = jnp.where(is_masked, bad, batch["loss"])
            batch["logits"] = jnp.where(is_masked[:, None], bad, batch["logits"])
            batch["labels"] = jnp.where(is_masked, -100, batch["labels"])
            update(result, batch | {"mask": jnp.array(mask[start:end])})
        assert_close(result.compute(), whole.compute())
        graph, state = nnx.split(result)
        assert nnx.merge(graph, state).compute() == result.compute()


def test_what_is_bad_is_no_hit():
    accuracy = ours.Accuracy()
    logits = jnp.eye(4).at[1, 2].set(jnp.nan)
    accuracy.update(logits=logits, labels=np.array([0, 2, -1, 2**32 + 3]))
    assert accuracy.compute() == 0.25
    accuracy = ours.Accuracy(threshold=0.0)
    accuracy.update(logits=jnp.array([jnp.nan, jnp.nan, 1.0]), labels=jnp.array([0, 1, 1]))
    np.testing.assert_allclose(accuracy.compute(), 1 / 3, rtol=1e-6)
    mean = ours.Mean()
    mean.update(values=jnp.array([1.0, jnp.nan]))
    assert jnp.isnan(mean.compute())


@pytest.mark.parametrize(
    ("metric", "arguments", "name"),
    [
        (ours.Mean("loss"), {"values": X}, "Mean: update"),
        (ours.Accuracy(), {"logits": X, "labels": jnp.zeros((2,), int)}, "Accuracy: labels"),
        (ours.Accuracy(0.5), {"logits": X, "labels": jnp.zeros(X.shape[:-1], int)}, "Accuracy: labels"),
        (ours.Accuracy(), {"logits": X, "labels": X[..., 0]}, "Accuracy: labels"),
    ],
)
def test_metrics_refuse_by_name(metric, arguments, name):
    with pytest.raises((TypeError, ValueError), match=f"^{name}: "):
        metric.update(**arguments)
