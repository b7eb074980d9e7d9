"""The example of attention over a padded graph: it learns, and what stands in the padding changes no bit."""

import graph_attention as example
import maps
import numpy as np
import pytest
import shared
from rich.console import Console

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def batches():
    generator = np.random.default_rng(0)
    return [maps.draw_batch(generator) for _ in range(100)]


def test_batches_are_full_of_graphs_of_different_sizes(batches):
    numbers = [batch.has_graph.sum() for batch in batches]
    assert len(set(numbers)) > 1
    assert max(numbers) < maps.GRAPHS
    sizes = np.bincount(batches[0].graph_of_node)[: numbers[0]]
    assert len(set(sizes)) > 3
    assert (batches[0].graph_of_node < maps.GRAPHS).sum() > 0.8 * maps.NODES


@pytest.mark.exhaustive
def test_garbage_changes_no_bit_of_a_training_that_learns(batches):
    clean, garbage = (example.train(name, batches, QUIET) for name in (example.CLEAN, example.POLLUTED))
    assert shared.same_bits(clean, garbage)
    assert np.mean(clean.losses[-10:]) < 0.3 * np.concatenate([b.share[b.has_graph] for b in batches]).var()


def test_garbage_changes_no_bit_and_ends_other_formulas_at_the_second_step(batches):
    records = {name: example.train(name, batches[:4], QUIET) for name in example.RUNS}
    assert [len(record.losses) for record in records.values()] == [4, 4, 4, 2, 2]
    assert shared.same_bits(records[example.CLEAN], records[example.POLLUTED])


@pytest.mark.slow
def test_picture(tmp_path, batches):
    graph = maps.draw_graph(np.random.default_rng(1))
    records = {name: example.train(name, batches[:3], QUIET) for name in example.RUNS}
    weights = example.attention_of(records[example.CLEAN].params, graph)
    totals = np.bincount(graph.receivers, weights)
    np.testing.assert_allclose(totals, np.ones(len(graph.power)), rtol=1e-6)
    example.draw(records, graph, weights, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
