"""Pictures of the benchmarks: ratios of a CSV on a logarithmic axis, and attention over the length of a sequence."""

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
from results import Pair, grouped, mean, pairs

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")  # Okabe, Ito; grey
MARKERS = "os^Dv<>P"  # one for each pair of candidates
WIDTH, SLOT, MARGIN = 10, 0.12, 1.6  # inches
FASTER = "ratio of the times (left of 1: faster)"
FEWEST_SLOTS = 2  # of a line, for its name needs room
MOST_COLUMNS = 6  # of a legend


def draw(benchmark: Benchmark, rows: Sequence[Row], path: Path) -> None:
    """A panel for each pass: a line for each kind of work, a colour for each size, a marker for each pair."""
    found = pairs(rows, benchmark.ratios)
    line_of = lambda pair: (pair.row.work, pair.row.mask, pair.row.dtype)  # noqa: E731
    series_of = lambda pair: (pair.row.size, pair.both("candidate"))  # noqa: E731
    lines = {line: list(dict.fromkeys(map(series_of, group))) for line, group in grouped(found, line_of).items()}
    sizes, names = (list(dict.fromkeys(column)) for column in zip(*map(series_of, found), strict=True))
    edges = np.cumsum([0, *(max(len(series), FEWEST_SLOTS) + 1 for series in lines.values())])
    figure, axes = panels([what for what in PASSES if any(pair.row.what == what for pair in found)], SLOT * edges[-1])
    for pair in found:
        series, i = lines[line_of(pair)], list(lines).index(line_of(pair))
        y = (edges[i] + edges[i + 1] - len(series)) / 2 + series.index(series_of(pair)) + 0.5
        colour, marker = COLOURS[sizes.index(pair.row.size)], MARKERS[names.index(pair.both("candidate"))]
        ax = axes[pair.row.what]
        ax.plot([pair.median, pair.minimum], [y, y], color=colour, linewidth=1.2, alpha=0.6)
        ax.plot(pair.minimum, y, marker="|", color=colour, markersize=5)
        ax.plot(pair.median, y, marker=marker, color=colour, markersize=4.5)
    dress(axes, [value for pair in found for value in (pair.median, pair.minimum)], FASTER)
    name_lines(list(axes.values()), names_of(list(lines)), edges)
    marks = [*colours(sizes), *(shape(f"{name}, medians", MARKERS[i]) for i, name in enumerate(names))]
    save(figure, path, [*marks, Line2D([], [], color="grey", marker="|", markersize=7, label="minima")])


def draw_programs(found: Sequence[Pair], path: Path) -> None:
    """A panel for each pass: a line for each op, worst mean first; a marker for each case at its ratio of bytes."""
    of_op = grouped(found, lambda pair: (pair.row.work, pair.peer.candidate))
    order = sorted(of_op, key=lambda op: np.mean([np.log(pair.of("bytes_moved")) for pair in of_op[op]]), reverse=True)
    dtypes = list(dict.fromkeys(pair.row.dtype for pair in found))
    figure, axes = panels(PASSES, 2 * SLOT * len(order))
    for pair in found:
        y = order.index((pair.row.work, pair.peer.candidate)) + 0.35 + 0.3 * dtypes.index(pair.row.dtype)
        is_masked, colour = pair.row.mask != "none", COLOURS[dtypes.index(pair.row.dtype)]
        style = {"marker": "o", "markerfacecolor": "none"} if is_masked else {"marker": "s"}
        axes[pair.row.what].plot(pair.of("bytes_moved"), y, markersize=4.5, color=colour, **style)
    dress(axes, [pair.of("bytes_moved") for pair in found], "ratio of the bytes moved (left of 1: fewer)")
    name_lines(list(axes.values()), [f"{work} / {peer}" for work, peer in order], np.arange(len(order) + 1))
    shapes = shape("no mask", "s", markerfacecolor="grey"), shape("masked", "o", markerfacecolor="none")
    save(figure, path, [*colours(dtypes), *shapes])


def draw_by_work(found: Sequence[Pair], path: Path) -> None:
    """A dot for each ratio of minima, a line of dots for each kind of work, the worst mean at the top."""
    of_work = {work: [p.minimum for p in group] for work, group in grouped(found, lambda pair: pair.row.work).items()}
    means = {work: mean(values) for work, values in of_work.items()}
    order = sorted(means, key=lambda work: -means[work])
    figure, ax = plt.subplots(figsize=(WIDTH, MARGIN + 2 * SLOT * len(order)), layout="constrained")
    for y, work in enumerate(order):
        ax.plot(of_work[work], [y] * len(of_work[work]), "o", color=COLOURS[0], markersize=4, alpha=0.5)
        ax.plot(means[work], y, "|", color=COLOURS[1], markersize=12, markeredgewidth=2)
    dress({"every case of the sweep, and the geometric mean": ax}, [pair.minimum for pair in found], FASTER)
    ax.set(ylim=(len(order), -1))
    ax.set_yticks(range(len(order)), order)
    save(figure, path)


def draw_by_length(curves: Mapping[tuple[str, str], Sequence[tuple[Any, ...]]], machine: str, path: Path) -> None:
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
        save(figure, path, dpi=150)


def save(figure: Figure, path: Path, marks: Sequence[Line2D] = (), dpi: int = 120) -> None:
    for columns in range(min(len(marks), MOST_COLUMNS), 0, -1):
        legend = figure.legend(handles=marks, loc="outside upper center", ncols=columns, frameon=False)
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            break
        legend.remove()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi, facecolor="white", metadata={"Software": None})
    plt.close(figure)


def panels(passes: Sequence[str], height: float) -> tuple[Figure, dict[str, Axes]]:
    shared = {"sharex": True, "sharey": True, "squeeze": False, "layout": "constrained"}
    figure, grid = plt.subplots(1, len(passes), figsize=(WIDTH, MARGIN + height), **shared)
    return figure, dict(zip(passes, grid[0], strict=True))


def names_of(lines: Sequence[tuple[str, str, str]]) -> list[str]:
    """The names of the lines, without what they have in common."""
    differs = [len({line[i] for line in lines}) > 1 for i in range(3)]
    if any(differs):
        lines = [(work, f"mask: {mask}" if mask != "none" else "no mask", dtype) for work, mask, dtype in lines]
        lines = [[text for text, told in zip(line, differs, strict=True) if told] for line in lines]
    return [", ".join(line) for line in lines]


def dress(axes: Mapping[str, Axes], values: Sequence[float], label: str) -> None:
    """Titles, and an axis of ratios."""
    low, high = min(*values, 0.5) / 1.2, max(*values, 2) * 1.2
    steps = (1, 2, 5) if high < 100 * low else (1,)
    ticks = [n * 10.0**e for e in range(-4, 5) for n in steps]
    for title, ax in axes.items():
        ax.set_title(title)
        ax.set_xscale("log")
        ax.set(xlim=(low, high), xlabel=label)
        ax.xaxis.set_major_locator(FixedLocator([t for t in ticks if low <= t <= high]))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.axvspan(1, high, color="#d55e00", alpha=0.06, linewidth=0)
        ax.axvline(1, color="black", linewidth=1)
        ax.grid(axis="x", alpha=0.35)


def name_lines(axes: Sequence[Axes], names: Sequence[str], edges: np.ndarray) -> None:
    for ax in axes:
        ax.set_ylim(edges[-1], 0)
        ax.hlines(edges[1:-1], *ax.get_xlim(), color="black", linewidth=0.4, alpha=0.3)
        ax.tick_params(axis="y", length=0)
    axes[0].set_yticks((edges[:-1] + edges[1:]) / 2, names)


def colours(names: Sequence[str]) -> list[Line2D]:
    return [Line2D([], [], color=COLOURS[i], linewidth=5, label=name) for i, name in enumerate(names)]


def shape(label: str, marker: str, **style: Any) -> Line2D:
    return Line2D([], [], color="grey", linestyle="", marker=marker, label=label, **style)
