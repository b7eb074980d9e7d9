"""The training example: the swap of the loss changes nothing but the failures."""

import chex
import jax
import names
import numpy as np
import pytest
import train_names
from rich.console import Console

CONFIG = names.Config(width=32, decoder_layers=1, batch_size=16, steps=12, evaluate_every=6)
FUNCTIONS = [
    ("Return the name of the file.", "get_name"),
    ("", "__init__"),
    ("Close the file, and with it the descriptor.", "close"),
    ("Set the value.", "set_value"),
    ("", "run"),
] * 8


@pytest.fixture(scope="module")
def data():
    return names.tokenise(FUNCTIONS, names.count_words(FUNCTIONS), CONFIG)


def test_names_survive_tokenisation(data):
    assert [names.read(row) for row in data.labels[:5]] == [name for _, name in FUNCTIONS[:5]]
    assert (data.docstrings[1] == names.PAD).all()


@pytest.mark.slow
def test_it_learns(data):
    history = train_names.train(data, data, CONFIG, Console(quiet=True))
    assert history.scores[-1][1] < 0.9 * history.scores[0][1]


@pytest.mark.slow
def test_the_model_ignores_the_padding_of_its_batch(data):
    """Whatever tokens stand behind the end of a name, its loss and gradients stay the same."""
    shapes, rng = jax.eval_shape(lambda: names.init_params(CONFIG)), np.random.default_rng(0)
    params = jax.tree.map(lambda x: (0.2 * rng.normal(size=x.shape)).astype(x.dtype), shapes)

    @jax.jit
    def gradient(inputs):
        def loss(params):
            return train_names.loss_of(params, data._replace(inputs=inputs), CONFIG.heads)

        return jax.value_and_grad(loss)(params)

    changed = np.where(data.labels == names.IGNORED, 17, data.inputs)
    chex.assert_trees_all_equal(gradient(changed), gradient(data.inputs))
