r"""The notebook of the guides: its cells run in order, and print what its committed outputs say.

They run without Jupyter. To write its outputs anew, after `pip install nbconvert ipykernel`:

    python -m nbconvert --to notebook --execute --inplace --ExecutePreprocessor.record_timing=False \
        docs/guides/padded_classifier.ipynb
"""

import contextlib
import io
import itertools
import json
import re
from pathlib import Path

import matplotlib
import pytest

matplotlib.use("Agg")
import matplotlib.pyplot as plt

NOTEBOOK = Path(__file__).parents[2] / "docs/guides/padded_classifier.ipynb"
NUMBER = re.compile(r"(?<![\w.])-?\d+\.\d+(?![\w.])")  # of the counts and names none may change


@pytest.fixture(scope="module")
def cells():
    return [cell for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]


def run(cell, namespace):
    """What the cell prints, and how many figures it draws."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}, {cell['id']}", "exec"), namespace)
    pictures = len(plt.get_fignums())
    plt.close("all")
    return printed.getvalue(), pictures


def assert_same_text(printed, committed):
    """Words and counts are equal; fractions, which depend on the version of XLA, are close."""
    assert NUMBER.sub("#", printed) == NUMBER.sub("#", committed)
    expected = [float(number) for number in NUMBER.findall(committed)]
    assert [float(number) for number in NUMBER.findall(printed)] == pytest.approx(expected, abs=0.04)


@pytest.mark.slow  # half a minute
def test_the_notebook_prints_what_its_outputs_say(cells, monkeypatch):
    monkeypatch.setattr(plt, "show", lambda: None)  # there is no window
    namespace = {"__name__": "__main__"}
    for cell in cells:
        printed, pictures = run(cell, namespace)
        texts = [output["text"] for output in cell["outputs"] if output["output_type"] == "stream"]
        assert_same_text(printed, "".join(itertools.chain(*texts)))
        assert pictures == sum(output["output_type"] == "display_data" for output in cell["outputs"])


def test_the_committed_outputs_are_of_one_run_from_top_to_bottom(cells):
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    shown = {(output["output_type"], output.get("name")) for cell in cells for output in cell["outputs"]}
    assert shown == {("stream", "stdout"), ("display_data", None)}
