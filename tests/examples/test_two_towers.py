"""The example of two towers: it learns, and what stands in the padding changes no bit."""

import email
import os

import bags
import names
import numpy as np
import pytest
import shared
import two_towers as example
from rich.console import Console

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def data():
    """Functions to train on, and others to find."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared.sysconfig, "get_paths", lambda: {"stdlib": os.path.dirname(email.__file__)})
        functions = bags.select_functions(names.read_functions())
    pairs = bags.make_pairs(functions)
    return tuple(pairs.rows(part) for part in bags.hold_out(pairs, 40, np.random.default_rng(0)))


def test_nothing_like_the_functions_to_find_is_trained_on(data):
    for_training, for_tests = data
    assert not np.isin(for_training.ids, for_tests.ids).any()
    assert len(set(for_tests.ids)) == len(for_tests.ids) == 40


@pytest.mark.slow
def test_garbage_changes_no_bit_of_a_training_that_learns(data):
    clean, garbage = (example.train(name, *data, 30, QUIET) for name in (example.CLEAN, example.POLLUTED))
    assert shared.same_bits(clean, garbage)
    assert clean.scores[0][1] < 0.1
    assert clean.scores[-1][1] > 0.2


@pytest.mark.slow
def test_the_usual_formula_ends_at_the_first_step_with_garbage(data):
    steps = {name: len(example.train(name, *data, 1, QUIET).losses) for name in example.RUNS}
    whole, *_ = steps.values()
    assert whole > 1
    assert list(steps.values()) == [whole] * 4 + [1]


@pytest.mark.slow
def test_picture_and_costs(tmp_path, data):
    costs = example.measure(32, width=8, rounds=1)
    assert all(cost.seconds > 0 for cost in costs.values())
    records = {name: example.train(name, *data, 1, QUIET) for name in example.RUNS}
    example.draw(records, costs, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
