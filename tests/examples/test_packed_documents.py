"""The complete language model: what is packed, and that neither devices nor padding change its loss."""

import dataclasses
import functools

import jax
import numpy as np
import packed_documents
import pytest
from flax import nnx
from jax.experimental import checkify

CONFIG = packed_documents.Config(length=32, width=16, heads=2, layers=1, steps=4)
DOCUMENTS = [bytes([97 + i]) * length for i, length in enumerate((10, 12, 8, 80, 5, 1, 5, 15, 30))]


@pytest.fixture(scope="module")
def data():
    data = packed_documents.pack(DOCUMENTS * 4, CONFIG.length)
    assert len(data.tokens) >= CONFIG.rows
    return data


@pytest.fixture(scope="module")
def model():
    return nnx.split(packed_documents.Decoder(CONFIG, nnx.Rngs(0)))


def test_packed_rows_hold_every_document(data):
    found = []
    for tokens, segments, positions in zip(*data, strict=True):
        for number in range(1, segments.max() + 1):
            here = segments == number
            found.append(bytes(tokens[here].astype(np.uint8)))
            np.testing.assert_array_equal(positions[here], np.arange(here.sum()))
    assert found == [document[: CONFIG.length] for document in DOCUMENTS * 4]


@pytest.fixture(scope="module")
def step(model):
    """Value and gradient on one device."""
    graph, params = model
    loss = jax.jit(jax.value_and_grad(lambda params, batch: packed_documents.loss_of(graph, params, batch).value))
    return functools.partial(loss, params)


@pytest.mark.exhaustive
def test_the_loss_on_several_devices_is_that_of_one_and_falls(data, step):
    assert jax.device_count() > 1
    losses = list(packed_documents.train(CONFIG, data))
    chosen = np.random.default_rng(0).integers(len(data.tokens), size=CONFIG.rows)
    alone, _ = step(packed_documents.Batch(*(array[chosen] for array in data)))
    np.testing.assert_allclose(losses[0], alone, rtol=1e-5)
    assert losses[-1] < losses[0]


def test_what_padding_holds_changes_no_bit(data, step):
    batch = packed_documents.Batch(*(array[: CONFIG.rows] for array in data))
    assert (batch.segments == 0).any()
    other = batch._replace(tokens=np.where(batch.segments == 0, 77, batch.tokens))
    for ours, theirs in zip(*(jax.tree.leaves(step(rows)) for rows in (batch, other)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_debug_run_names_a_bad_label(data):
    small = dataclasses.replace(CONFIG, vocabulary=100)
    graph, params = nnx.split(packed_documents.Decoder(small, nnx.Rngs(0)))
    with pytest.raises(checkify.JaxRuntimeError, match=r"labels are outside \[0, 100\)"):
        packed_documents.check_labels(functools.partial(packed_documents.loss_of, graph), params, data)
