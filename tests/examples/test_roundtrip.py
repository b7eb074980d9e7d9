"""The round-trip example: a network loaded from disk predicts what the trained one does."""

import numpy as np
import pytest
import roundtrip
from rich.console import Console

pytestmark = pytest.mark.slow  # what it shows, one answer however it is run, other tests show in less time


@pytest.fixture(scope="module")
def trained():
    images, test_images, labels, test_labels = roundtrip.read_digits()
    return roundtrip.train(images, labels, 3, Console(quiet=True)), test_images, test_labels


def test_network_learns_and_predicts_the_same_from_disk(trained, tmp_path):
    params, images, labels = trained
    loaded = roundtrip.save_and_load(params, tmp_path / "roundtrip.npz")
    rows = roundtrip.compare(params, loaded, images, labels)
    assert len(rows) == 6
    assert all(difference < 1e-4 and moved == 0 for _, _, difference, moved, _ in rows)
    assert all(accuracy > 0.8 for *_, accuracy in rows)


def test_comparison_shows_parameters_that_were_not_saved_right(trained):
    params, images, labels = trained
    shifted = {**params, "scale": np.roll(params["scale"], 1)}
    rows = roundtrip.compare(params, shifted, images, labels)
    assert [difference > 1e-2 for _, _, difference, _, _ in rows] == [False] * 3 + [True] * 3
