"""The language model example: nothing of the text is lost, and both losses train the same model."""

import _collections_abc
import ast
import inspect

import bodies
import jax
import language_model
import numpy as np
import pytest
from rich.console import Console

CONFIG = language_model.Config(
    vocabulary=400, length=64, batch_size=2, width=16, heads=2, layers=1, steps=6, evaluate_every=3
)
SOURCE = inspect.getsource(_collections_abc)  # many short methods


@pytest.fixture(scope="module")
def functions():
    return list(bodies.functions_of(ast.parse(SOURCE), SOURCE.splitlines(keepends=True)))


@pytest.fixture(scope="module")
def vocabulary(functions):
    return bodies.Vocabulary(functions, CONFIG.vocabulary)


@pytest.fixture(scope="module")
def data(functions, vocabulary):
    return bodies.pack(functions, vocabulary, CONFIG.length)


@pytest.fixture(scope="module")
def trainer():
    return language_model.Trainer(CONFIG)


def test_a_function_is_a_prompt_and_a_body(functions):
    source = 'class A:\n    def f(x,\n          y):\n        """Adds."""\n        return x + y\n    def g(self): pass\n'
    (function,) = bodies.functions_of(ast.parse(source), source.splitlines(keepends=True))
    assert function == ('def f(x,\n      y):\n    """Adds."""', "\n    return x + y")
    assert {"def _check_methods", "def __ior__", "def popitem"} <= {f.prompt.split("(")[0] for f in functions}


def test_words_and_bytes_give_back_the_text(vocabulary, functions):
    for text in [*(f.prompt + f.body for f in functions), "naïve → 中文\t# unknown_word 1234\n\n  x"]:
        assert vocabulary.decode(vocabulary.encode(text)) == text
    assert max(map(max, (vocabulary.encode(f.body) for f in functions))) < CONFIG.vocabulary


def test_packed_rows_hold_every_function(functions, vocabulary, data):
    found = []
    for row in range(len(data.labels)):
        one = data[row]
        for segment in range(1, one.segments.max() + 1):
            own = one.segments == segment
            np.testing.assert_array_equal(one.positions[own], np.arange(own.sum()))
            found.append((one.inputs[own], one.labels[own]))
    for function, (inputs, labels) in zip(functions, found, strict=True):
        prompt, body = vocabulary.encode(function.prompt), vocabulary.encode(function.body)
        tokens = [*prompt, *body, bodies.END][: CONFIG.length + 1]
        assert inputs.tolist() == tokens[:-1]
        expected = [bodies.IGNORED] * (len(prompt) - 1) + tokens[len(prompt) :]
        assert labels.tolist() == expected[: len(inputs)]
    padding = data.segments == 0
    assert padding.any()
    assert (data.labels[padding] == bodies.IGNORED).all()


def test_segments_do_not_see_each_other(trainer, data):
    model = language_model.nnx.merge(trainer.graph, trainer.params)
    row = next(i for i in range(len(data.labels)) if data.segments[i].max() > 1)
    one = data[row : row + 1]
    other = one.segments == 2
    changed = one._replace(inputs=np.where(one.segments == 1, 5, one.inputs))
    run = jax.jit(model.within_segments)
    np.testing.assert_array_equal(run(one)[other], run(changed)[other])


@pytest.mark.slow
def test_both_losses_train_the_same_model(trainer, data):
    runs = [
        language_model.train(trainer, loss, data, data[:4], Console(quiet=True))
        for loss in language_model.LOSSES.values()
    ]
    np.testing.assert_allclose(runs[0].losses, runs[1].losses, rtol=1e-4)
    np.testing.assert_allclose(runs[0].scores, runs[1].scores, rtol=1e-4)
    assert runs[1].scores[-1][1] < runs[1].scores[0][1]
