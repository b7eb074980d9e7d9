"""The example of gradient accumulation."""

import gradient_accumulation as example
import jax
import numpy as np
import pytest
from rich.console import Console


@pytest.fixture(scope="module")
def lines():
    return example.read_lines()


def test_micro_batches_differ_and_some_are_empty(lines):
    batch = example.draw_batch(lines, np.random.default_rng(0))
    characters = [(batch.labels[i :: example.MICROBATCHES] != example.IGNORED).sum() for i in range(8)]
    assert min(characters) == 0
    assert max(characters) > 100


@pytest.mark.slow
def test_only_the_mean_of_means_is_another_gradient(lines):
    records = {name: example.train(name, lines, 2, Console(quiet=True)) for name in (example.MEANS, example.MASKSAFE)}
    assert max(records[example.MASKSAFE].distances) < 1e-5
    assert min(records[example.MEANS].distances) > 0.1


def test_picture(tmp_path):
    records = {name: example.Record([3.0, 2.0], [0.1, 0.1]) for name in example.GRADIENTS}
    example.draw(records, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_model_sees_no_later_character(lines):
    params, batch = example.make_params(jax.random.key(0)), example.draw_batch(lines, np.random.default_rng(1))
    first_half = np.where(np.arange(example.LENGTH) < 32, batch.labels, example.IGNORED)
    changed = np.where(np.arange(example.LENGTH) < 32, batch.inputs, 65)
    losses = [example.mean_loss(params, inputs, first_half).total for inputs in (batch.inputs, changed)]
    np.testing.assert_allclose(*losses, rtol=1e-6)
