"""Fair timings on a noisy machine: the candidates take turns, and what counts is the ratio of their medians."""

import argparse
import importlib.util
import random
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax


def measure(candidates: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each candidate, a function that returns when its work is done.

    In every round each candidate runs twice and its second run counts: the first one pays for what the
    candidate before it did to the caches and to the memory allocator. The order changes from round to round,
    since some libraries' threads still spin, on another candidate's core, when their work is done.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(candidates), len(candidates)):
            run = candidates[name]
            run()
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def compiled(fn: Callable[..., Any], *args: Any) -> tuple[Callable[[], Any], int]:
    """A jitted call as a candidate, and the bytes of its temporaries."""
    program = jax.jit(fn).lower(*args).compile()
    return lambda: jax.block_until_ready(program(*args)), program.memory_analysis().temp_size_in_bytes


def as_markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table whose columns are aligned in plain text as well."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return "\n".join([line(header), line(["-" * width for width in widths]), *map(line, rows)])


def make_parser(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", type=Path, help="write the table to this file as well")
    parser.add_argument("--rounds", type=int, default=rounds, help="timed runs of each candidate; default: %(default)s")
    return parser


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def show(header: list[str], rows: list[list[str]], markdown: Path | None) -> None:
    """Prints the table, and writes it to the file if there is one."""
    table = as_markdown(header, rows)
    print(table)
    if markdown:
        markdown.write_text(table + "\n")
