"""What layers of flax.nnx with masksafe inside have of their own, and metrics; the rest is in test_flax.py."""

import flax_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_cases import CHANNELS, GARBAGE, MASKED, NORMS, PAIRS, VALID, Nnx, X, attention, filled, norm

from masksafe.adapters import nnx as ours


def test_masks_may_be_numbers_of_fewer_axes_and_broadcast_to_x():
    mask, layer = jnp.array([1, 1, 0, 1, 0, 1]), norm(Nnx, ours, "layer")
    expected = layer(X, mask=jnp.broadcast_to(mask != 0, X.shape))
    for numbers in (mask, jnp.where(mask == 1, jnp.nan, 0)):
        np.testing.assert_allclose(layer(X, mask=numbers), expected, rtol=1e-6)
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


@pytest.mark.parametrize("name", MASKED)
def test_norms_refuse_another_number_of_features(name):
    layer = norm(Nnx, ours, name)
    with pytest.raises(ValueError, match=rf"^{NORMS[name][0]}: x: got 4 features in shape .*; expected 6"):
        layer(X[..., :4])


# Attention.


def test_what_a_causal_mask_and_padding_on_the_left_hide_together_is_gone():
    layer, valid = attention(Nnx, ours), jnp.array([False, False, True, True])
    options = {"is_causal": True, "mask": valid[None, None]}
    y, *_ = cases.same_for_all_garbage(
        lambda x: cases.value_and_gradients(Nnx, layer, filled(x, mask=valid[:, None]), **options)
    )
    assert jnp.all(y[:, :2] == 0)


@pytest.mark.exhaustive
def test_a_single_causal_query_sees_the_first_key_alone():
    layer, mask = attention(Nnx, ours), jnp.ones((1, 1, 1, 4), bool)
    out = layer(X[:, :1], X, mask=mask, is_causal=True)
    np.testing.assert_allclose(out, layer(X[:, :1], X[:, :1]), rtol=1e-5, atol=1e-6)


@pytest.mark.exhaustive
def test_a_later_step_may_see_a_key_that_its_own_query_does_not():
    layer, x = attention(Nnx, ours, decode=True), X[:1]
    layer.init_cache((1, 4, CHANNELS))
    steps = [layer(x[:, t : t + 1], mask=(jnp.arange(4) < t)[None, None, None]) for t in range(4)]
    at_once = attention(Nnx, ours)(x, mask=jnp.tri(4, k=-1)[None, None])
    np.testing.assert_allclose(jnp.concatenate(steps, 1), at_once, rtol=1e-5, atol=1e-5)


def test_decoding_refuses_a_mask_of_more_than_its_query_and_leaves_the_cache():
    layer = attention(Nnx, ours, decode=True)
    layer.init_cache((2, 3, CHANNELS))
    with pytest.raises(ValueError, match="MultiHeadAttention: mask: got shape"):
        layer(X[:2, :1], mask=jnp.ones((2, 1, 3, 3), bool))
    assert layer.cache_index[...] == 0


@pytest.mark.exhaustive
def test_attention_takes_inputs_without_a_batch_and_another_function():
    identity = lambda query, key, value, **options: value  # noqa: E731
    layer = attention(Nnx, ours, attention_fn=identity)
    out = layer(X[1], mask=PAIRS[1:2])
    assert out.shape == X[1].shape
    np.testing.assert_allclose(out[:2], layer.out(layer.value(X[1]))[:2], rtol=1e-6)
    assert jnp.all(out[2:] == 0)


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
    cases.assert_close(result.compute(), own.compute())
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
        cases.assert_close(result.compute(), whole.compute())
        graph, state = nnx.split(result)
        assert nnx.merge(graph, state).compute() == result.compute()


def test_what_is_bad_is_no_hit():
    accuracy = ours.Accuracy()
    logits = jnp.eye(4).at[1, 2].set(jnp.nan)
    accuracy.update(logits=logits, labels=np.array([0, 2, -1, 2**32 + 3]))
    assert accuracy.compute() == 0.25
    with jax.enable_x64(True):  # labels of 64 bits, the last of which would be class 3 if it were cut
        accuracy = ours.Accuracy()
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
        (ours.Accuracy(), {"logits": X, "labels": np.zeros(2, int)}, "Accuracy: labels"),
        (ours.Accuracy(0.5), {"logits": X, "labels": np.zeros(X.shape[:-1], int)}, "Accuracy: labels"),
        (ours.Accuracy(), {"logits": X, "labels": np.ones(X.shape[:-1])}, "Accuracy: labels"),
    ],
)
def test_metrics_refuse_by_name(metric, arguments, name):
    with pytest.raises((TypeError, ValueError), match=f"^{name}: "):
        metric.update(**arguments)
