"""The training example: the swap of the loss changes nothing but the failures."""

import dataclasses
import json
import os

import chex
import jax
import numpy as np
import pytest
import shared
import train_names
from jax.experimental import checkify
from rich.console import Console

CONFIG = train_names.Config(width=32, decoder_layers=1, batch_size=16, steps=12, evaluate_every=6)
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


def train(data, config=CONFIG):
    return train_names.train(data, data, config, Console(quiet=True))


@pytest.fixture(scope="module")
def params():
    shapes = jax.eval_shape(lambda: train_names.init_params(CONFIG))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: (0.2 * rng.normal(size=x.shape)).astype(x.dtype), shapes)


@pytest.fixture(scope="module")
def history(data):
    return train(data)


def test_names_survive_tokenisation(data):
    assert [train_names.read(row) for row in data.labels[:5]] == [name for _, name in FUNCTIONS[:5]]
    assert (data.docstrings[1] == train_names.PAD).all()


def test_a_step_of_training_keeps_the_types_of_parameters(data):
    optimizer = train_names.make_optimizer(CONFIG)
    params = jax.eval_shape(lambda: train_names.init_params(CONFIG))
    state = jax.eval_shape(optimizer.init, params)
    step = train_names.make_train_step(optimizer, CONFIG)
    *after, loss = jax.eval_shape(step, params, state, data.rows(slice(16)))
    chex.assert_trees_all_equal_shapes_and_dtypes(after, [params, state])
    chex.assert_shape(loss, ())


@pytest.mark.slow
def test_it_learns(history):
    assert history.held_out[-1][1] < 0.9 * history.held_out[0][1]


def test_checkpoint_gives_the_same_model(params, tmp_path, monkeypatch):
    monkeypatch.setattr(train_names, "init_params", lambda config: jax.tree.map(np.zeros_like, params))
    train_names.save(params, tmp_path / "params.npz")
    loaded = train_names.load(tmp_path / "params.npz", CONFIG)
    chex.assert_trees_all_equal(loaded, params)


@pytest.mark.slow
def test_the_model_ignores_the_padding_of_its_batch(params, data):
    """Whatever tokens stand behind the end of a name, its loss and gradients stay the same."""
    is_padding = data.labels == train_names.IGNORED

    @jax.jit
    def gradient(inputs):
        def loss(params):
            features = train_names.features_of(params, data.docstrings, inputs, CONFIG.heads)
            return train_names.loss_of(features, params["logits"], data)

        return jax.value_and_grad(loss)(params)

    clean = gradient(data.inputs)
    other = gradient(np.where(is_padding, 17, data.inputs))
    chex.assert_trees_all_equal(other, clean)


def test_functions_are_read_from_the_standard_library(monkeypatch):
    monkeypatch.setattr(shared.sysconfig, "get_paths", lambda: {"stdlib": os.path.dirname(json.__file__)})
    functions = {name: docstring for docstring, name in train_names.read_functions()}
    assert functions["loads"].startswith("Deserialize ``s``")
    assert "" in functions.values()


@pytest.mark.slow
def test_the_corpus_is_there_and_has_functions_without_a_docstring():
    functions = train_names.read_functions()
    assert len(functions) > 5000
    assert 0.2 < np.mean([not docstring for docstring, _ in functions]) < 0.9


@pytest.mark.slow
@pytest.mark.parametrize("checks", ["checkify", "raise"])
def test_bad_label_ends_the_training_when_labels_are_checked(data, checks):
    config = dataclasses.replace(CONFIG, steps=2, checks=checks)
    assert np.isfinite(train(data, config).losses).all()
    bad = data._replace(labels=np.where(data.labels == train_names.END, train_names.CHARACTERS, data.labels))
    with pytest.raises((checkify.JaxRuntimeError, jax.errors.JaxRuntimeError), match=r"labels are outside .0, 99."):
        train(bad, config)
