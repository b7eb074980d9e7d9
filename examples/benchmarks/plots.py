"""A picture for each benchmark: the ratios of its CSV on a logarithmic axis."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")  # Okabe, Ito; grey
MARKERS = "os^Dv<>P"  # one for each pair of candidates
WIDTH, SLOT, MARGIN = 10, 0.12, 1.6  # inches
FASTER = "ratio of the times (left of 1: faster)"
FEWEST_SLOTS = 2  # of a line, for its name needs room

Line = tuple[str, str, str]


def draw(benchmark: Benchmark, rows: Sequence[Row], path: Path) -> None:
    """A panel for each pass: a line for each kind of work, a colour for each size, a marker for each pair."""
    found = ratios(rows, benchmark.ratios)
    lines = {line: list(dict.fromkeys(map(series_of, group))) for line, group in grouped(found, line_of).items()}
    sizes = list(dict.fromkeys(ratio.row.size for ratio in found))
    pairs = list(dict.fromkeys(ratio.pair for ratio in found))
    edges = np.cumsum([0, *(max(len(series), FEWEST_SLOTS) + 1 for series in lines.values())])
    passes = [what for what in PASSES if any(ratio.row.what == what for ratio in found)]
    size = WIDTH, MARGIN + SLOT * edges[-1]
    figure, grid = plt.subplots(
        1, len(passes), sharex=True, sharey=True, squeeze=False, figsize=size, layout="constrained"
    )
    axes = dict(zip(passes, grid[0], strict=True))
    for ratio in found:
        ax = axes[ratio.row.what]
        series = lines[line_of(ratio)]
        i = list(lines).index(line_of(ratio))
        y = (edges[i] + edges[i + 1] - len(series)) / 2 + series.index(series_of(ratio)) + 0.5
        draw_ratio(ax, ratio, y, COLOURS[sizes.index(ratio.row.size)], MARKERS[pairs.index(ratio.pair)])
    dress_x(axes, [value for ratio in found for value in (ratio.median, ratio.minimum)])
    dress_y(list(axes.values()), names_of(list(lines)), edges)
    save(figure, legend(sizes, pairs), path)


def save(figure: Figure, marks: Sequence[Line2D], path: Path) -> None:
    figure.legend(handles=marks, loc="outside upper center", ncols=min(len(marks), 6), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, facecolor="white", metadata={"Software": None})
    plt.close(figure)


def draw_by_work(found: Sequence[Ratio], path: Path) -> None:
    """A dot for each ratio of minima, a line of dots for each kind of work, the worst mean at the top."""
    of_work = {work: [r.minimum for r in group] for work, group in grouped(found, lambda r: r.row.work).items()}
    means = {work: float(np.exp(np.mean(np.log(values)))) for work, values in of_work.items()}
    order = sorted(means, key=lambda work: -means[work])
    figure, ax = plt.subplots(figsize=(WIDTH, MARGIN + 2 * SLOT * len(order)), layout="constrained")
    for y, work in enumerate(order):
        ax.plot(of_work[work], [y] * len(of_work[work]), "o", color=COLOURS[0], markersize=4, alpha=0.5)
        ax.plot(means[work], y, "|", color=COLOURS[1], markersize=12, markeredgewidth=2)
    dress_ratios(ax, [ratio.minimum for ratio in found])
    ax.set(title="every case of the sweep, and the geometric mean", ylim=(len(order), -1))
    ax.set_yticks(range(len(order)), order)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, facecolor="white", metadata={"Software": None})
    plt.close(figure)


def draw_by_length(
    curves: Mapping[tuple[str, str], Sequence[tuple[int, float, float | None]]], machine: str, path: Path
) -> None:
    """Time and memory of attention over the length of a sequence: a colour for a library, a line style for a mask."""
    libraries, masks = ([*dict.fromkeys(names)] for names in zip(*curves, strict=True))
    lengths = sorted({point[0] for points in curves.values() for point in points})
    with plt.rc_context({"font.size": 12}):
        figure, axes = plt.subplots(1, 2, figsize=(7, 4.2), layout="constrained")
        for i, (ax, title) in enumerate(zip(axes, ("milliseconds", "MiB of temporary memory"), strict=True), start=1):
            for (library, mask), points in curves.items():
                known = [(point[0], point[i]) for point in points if point[i] is not None]
                if known:
                    number = libraries.index(library)
                    style = {"color": COLOURS[number], "marker": MARKERS[number], "linestyle": "-:"[masks.index(mask)]}
                    ax.loglog(*zip(*known, strict=True), **style, linewidth=2.5, label=f"{library}, {mask}")
            ax.set_xticks(lengths, map(str, lengths))
            ax.xaxis.set_minor_locator(NullLocator())
            ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
            ax.set(title=title, xlabel="length of the sequence")
            ax.grid(visible=True, alpha=0.3)
        figure.suptitle(f"Attention with its gradient, 8 heads of width 64, float32\n{machine}", fontsize=10.5)
        marks, names = axes[0].get_legend_handles_labels()
        figure.legend(marks, names, loc="outside lower center", ncols=len(masks), frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, facecolor="white", metadata={"Software": None})
        plt.close(figure)


def line_of(ratio: Ratio) -> Line:
    return ratio.row.work, ratio.row.mask, ratio.row.dtype


def series_of(ratio: Ratio) -> tuple[str, str]:
    return ratio.row.size, ratio.pair


def names_of(lines: Sequence[Line]) -> list[str]:
    """The names of the lines, without what they have in common."""
    differs = [len({line[i] for line in lines}) > 1 for i in range(3)]
    if not any(differs):
        return [", ".join(line) for line in lines]
    mask = lambda line: (line[0], f"mask: {line[1]}" if line[1] != "none" else "no mask", line[2])  # noqa: E731
    return [", ".join(text for text, told in zip(mask(line), differs, strict=True) if told) for line in lines]


def draw_ratio(ax: Axes, ratio: Ratio, y: float, colour: str, marker: str) -> None:
    """A marker at the ratio of the medians, and a line to that of the minima."""
    ax.plot([ratio.median, ratio.minimum], [y, y], color=colour, linewidth=1.2, alpha=0.6)
    ax.plot(ratio.minimum, y, marker="|", color=colour, markersize=5)
    ax.plot(ratio.median, y, marker=marker, color=colour, markersize=4.5)


def dress_x(axes: Mapping[str, Axes], values: Sequence[float], label: str = FASTER) -> None:
    """Of axes by the pass that they show."""
    for title, ax in axes.items():
        ax.set_title(title)
        dress_ratios(ax, values, label)


def dress_ratios(ax: Axes, values: Sequence[float], label: str = FASTER) -> None:
    low, high = min(*values, 0.5) / 1.2, max(*values, 2) * 1.2
    steps = (1, 2, 5) if high < 100 * low else (1,)
    ticks = [n * 10.0**e for e in range(-4, 5) for n in steps]
    ax.set_xscale("log")
    ax.set(xlim=(low, high), xlabel=label)
    ax.xaxis.set_major_locator(FixedLocator([t for t in ticks if low <= t <= high]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.axvspan(1, high, color="#d55e00", alpha=0.06, linewidth=0)
    ax.axvline(1, color="black", linewidth=1)
    ax.grid(axis="x", alpha=0.35)


def dress_y(axes: Sequence[Axes], names: Sequence[str], edges: np.ndarray) -> None:
    for ax in axes:
        ax.set_ylim(edges[-1], 0)
        ax.hlines(edges[1:-1], *ax.get_xlim(), color="black", linewidth=0.4, alpha=0.3)
        ax.tick_params(axis="y", length=0)
    axes[0].set_yticks((edges[:-1] + edges[1:]) / 2, names)


def legend(sizes: Sequence[str], pairs: Sequence[str]) -> list[Line2D]:
    marks = [Line2D([], [], color=COLOURS[i], linewidth=5, label=size) for i, size in enumerate(sizes)]
    marks += [
        Line2D([], [], color="grey", linestyle="", marker=MARKERS[i], label=f"{pair}, medians")
        for i, pair in enumerate(pairs)
    ]
    return [*marks, Line2D([], [], color="grey", marker="|", markersize=7, label="minima")]


def draw_programs(found: Sequence[Any], path: Path) -> None:
    """A panel for each pass: a line for each op, worst mean first; a marker for each case at its ratio of bytes."""
    of_op = grouped(found, lambda pair: (pair.row.work, pair.peer.candidate))
    order = sorted(of_op, key=lambda op: np.mean([np.log(pair.bytes_ratio) for pair in of_op[op]]), reverse=True)
    dtypes = list(dict.fromkeys(pair.row.dtype for pair in found))
    figure, axes = plt.subplots(
        1, 2, sharex=True, sharey=True, figsize=(WIDTH, MARGIN + 2 * SLOT * len(order)), layout="constrained"
    )
    for pair in found:
        y = order.index((pair.row.work, pair.peer.candidate)) + 0.35 + 0.3 * dtypes.index(pair.row.dtype)
        is_masked = pair.row.mask != "none"
        axes[PASSES.index(pair.row.what)].plot(
            pair.bytes_ratio,
            y,
            marker="o" if is_masked else "s",
            markersize=4.5,
            markerfacecolor="none" if is_masked else None,
            color=COLOURS[dtypes.index(pair.row.dtype)],
        )
    dress_x(
        dict(zip(PASSES, axes, strict=True)),
        [pair.bytes_ratio for pair in found],
        "ratio of the bytes moved (left of 1: fewer)",
    )
    dress_y(axes, [f"{work} / {peer}" for work, peer in order], np.arange(len(order) + 1))
    marks = [Line2D([], [], color=COLOURS[i], linewidth=5, label=dtype) for i, dtype in enumerate(dtypes)]
    for label, marker, fill in (("no mask", "s", "grey"), ("masked", "o", "none")):
        marks.append(Line2D([], [], color="grey", linestyle="", marker=marker, markerfacecolor=fill, label=label))
    save(figure, marks, path)
