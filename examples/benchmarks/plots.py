"""A picture for each benchmark: the ratios of its CSV on a logarithmic axis."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from measure import PASSES, Benchmark, Row
from results import Ratio, grouped, ratios

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # Okabe and Ito's
MARKERS = "os^D"
WIDTH, ROW_HEIGHT, MARGIN = 10, 0.36, 2.1  # inches


def draw(benchmark: Benchmark, rows: Sequence[Row], path: Path) -> None:
    """A panel for each pass: a line for each kind of work, a colour for each size, a marker for each pair."""
    found = ratios(rows, benchmark.ratios)
    lines = line_names(found)
    figure, axes = plt.subplots(
        1, 2, sharex=True, sharey=True, figsize=(WIDTH, MARGIN + ROW_HEIGHT * len(lines)), layout="constrained"
    )
    series = list(dict.fromkeys((ratio.row.size, ratio.pair) for ratio in found))
    sizes, pairs = (list(dict.fromkeys(names)) for names in zip(*series, strict=True))
    for ax, what in zip(axes, PASSES, strict=True):
        for ratio in found:
            if ratio.row.what == what:
                # Points of one line lie beneath each other, in the order of the legend.
                shift = (series.index((ratio.row.size, ratio.pair)) + 0.5) / len(series) - 0.5
                y = lines.index(line_name(ratio)) + 0.8 * shift
                draw_ratio(ax, ratio, y, COLOURS[sizes.index(ratio.row.size)], MARKERS[pairs.index(ratio.pair)])
        ax.set_title(what)
    dress(axes, lines, [value for ratio in found for value in (ratio.median, ratio.minimum)])
    add_legend(figure, sizes, pairs)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, facecolor="white", metadata={"Software": None})
    plt.close(figure)


def line_name(ratio: Ratio) -> tuple[str, str, str]:
    return ratio.row.work, ratio.row.mask, ratio.row.dtype


def line_names(found: Sequence[Ratio]) -> list[tuple[str, str, str]]:
    return list(grouped(found, line_name))


def draw_ratio(ax: Axes, ratio: Ratio, y: float, colour: str, marker: str) -> None:
    """A marker at the ratio of the medians, and a line to that of the minima."""
    ax.plot([ratio.median, ratio.minimum], [y, y], color=colour, linewidth=1.2, alpha=0.6)
    ax.plot(ratio.minimum, y, marker="|", color=colour, markersize=5)
    ax.plot(ratio.median, y, marker=marker, color=colour, markersize=4.5)


def dress(axes: Sequence[Axes], lines: Sequence[tuple[str, ...]], values: Sequence[float]) -> None:
    low, high = min(*values, 0.5) / 1.2, max(*values, 2) * 1.2
    steps = (1, 2, 5) if high < 100 * low else (1,)
    ticks = [n * 10.0**e for e in range(-4, 5) for n in steps]
    for ax in axes:
        ax.set_xscale("log")
        ax.set(xlim=(low, high), ylim=(len(lines) - 0.4, -0.6), xlabel="ratio of the times (left of 1: faster)")
        ax.xaxis.set_major_locator(FixedLocator([t for t in ticks if low <= t <= high]))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.axvspan(1, high, color="#d55e00", alpha=0.06, linewidth=0)
        ax.axvline(1, color="black", linewidth=1)
        ax.grid(axis="x", alpha=0.35)
        ax.hlines(np.arange(len(lines) - 1) + 0.5, low, high, color="black", linewidth=0.4, alpha=0.3)
        ax.tick_params(axis="y", length=0)
    constant = [len({line[i] for line in lines}) == 1 for i in range(3)]
    texts = [", ".join(text for text, same in zip(line, constant, strict=True) if not same) for line in lines]
    axes[0].set_yticks(range(len(lines)), texts if len(lines) > 1 else [", ".join(lines[0])])


def add_legend(figure: Figure, sizes: Sequence[str], pairs: Sequence[str]) -> None:
    marks = [Line2D([], [], color=COLOURS[i], linewidth=5, label=size) for i, size in enumerate(sizes)]
    marks += [
        Line2D([], [], color="grey", linestyle="", marker=MARKERS[i], label=f"{pair}, medians")
        for i, pair in enumerate(pairs)
    ]
    marks.append(Line2D([], [], color="grey", marker="|", markersize=7, label="minima"))
    figure.legend(handles=marks, loc="outside upper center", ncols=min(len(marks), 6), frameon=False)
