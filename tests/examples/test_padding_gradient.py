"""The picture of the README: for a light and a dark page, and as the program draws it."""

import re
from pathlib import Path

import padding_gradient
import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("theme", padding_gradient.THEMES)
def test_the_committed_picture_is_what_the_program_draws(theme):
    assert padding_gradient.drawn(theme) == (ROOT / f"docs/_static/padding_{theme}.svg").read_text("utf8")


def test_the_readme_shows_both():
    shown = re.findall(r"docs/_static/padding_(\w+)\.svg", (ROOT / "README.md").read_text("utf8"))
    assert sorted(shown) == sorted(padding_gradient.THEMES)
