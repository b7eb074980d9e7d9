"""The training example: the swap of the loss changes nothing but the failures."""

import dataclasses

import jax
import numpy as np
import pytest
import train_names
from jax.experimental import checkify
from rich.console import Console

CONFIG = train_names.Config(width=32, batch_size=16, steps=12, evaluate_every=6)
FUNCTIONS = [
    ("Return the name of the file.", "get_name"),
    ("", "__init__"),
    ("Close the file, and with it the descriptor.", "close"),
    ("Set the value.", "set_value"),
    ("", "run"),
] * 8


@pytest.fixture(scope="module")
def data():
    return train_names.tokenise(FUNCTIONS, train_names.count_words(FUNCTIONS), CONFIG)


@pytest.fixture(scope="module")
def train(data):
    return lambda loss: train_names.train(loss, data, data, CONFIG, Console(quiet=True))


def test_names_survive_tokenisation(data):
    assert [train_names.read(row) for row in data.labels[:5]] == [name for _, name in FUNCTIONS[:5]]
    assert (data.docstrings[1] == train_names.PAD).all()


def test_the_same_curve_as_optax_handled_with_care(train):
    ours, theirs = train(train_names.masksafe_loss), train(train_names.careful_optax_loss)
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=1e-4)
    np.testing.assert_allclose(ours.held_out, theirs.held_out, rtol=1e-4)
    assert ours.held_out[-1][1] < 0.9 * ours.held_out[0][1]


def test_optax_as_it_is_often_written_shows_nan(train):
    assert np.isnan(train(train_names.optax_loss).losses).all()


def test_checkpoint_gives_the_same_model(train, data, tmp_path):
    params = train(train_names.masksafe_loss).params
    train_names.save(params, tmp_path / "params.npz")
    loaded = train_names.load(tmp_path / "params.npz", CONFIG)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(loaded), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_model_ignores_the_padding_of_its_batch(data):
    """Whatever tokens stand behind the end of a name, its loss and gradients stay the same."""
    params = train_names.init_params(CONFIG)
    is_padding = data.labels == train_names.IGNORED

    def gradient(inputs):
        def loss(params):
            features = train_names.features_of(params, data.docstrings, inputs, CONFIG.heads)
            return train_names.masksafe_loss(features, params["logits"], data)

        return jax.value_and_grad(loss)(params)

    clean = gradient(data.inputs)
    other = gradient(np.where(is_padding, 17, data.inputs))
    jax.tree.map(np.testing.assert_array_equal, clean, other)


def test_the_corpus_is_there_and_has_functions_without_a_docstring():
    functions = train_names.read_functions()
    assert len(functions) > 5000
    assert 0.2 < np.mean([not docstring for docstring, _ in functions]) < 0.9


@pytest.mark.parametrize("checks", ["checkify", "raise"])
def test_bad_label_ends_the_training_when_labels_are_checked(data, checks):
    config = dataclasses.replace(CONFIG, steps=2, checks=checks)
    train = lambda data: train_names.train(train_names.masksafe_loss, data, data, config, Console(quiet=True))  # noqa: E731
    assert np.isfinite(train(data).losses).all()
    bad = data._replace(labels=np.where(data.labels == train_names.END, train_names.CHARACTERS, data.labels))
    with pytest.raises((checkify.JaxRuntimeError, jax.errors.JaxRuntimeError), match=r"labels are outside .0, 99."):
        train(bad)
