"""What the examples share: the command line, a source of text, progress, costs, tables and pictures."""

import argparse
import ast
import contextlib
import math
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import matplotlib
import numpy as np
import optax
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SECONDS = 3  # between lines of progress, where there is no terminal


def parser_of(text: str | None, *, writes: bool = True, **numbers: int) -> argparse.ArgumentParser:
    """A command line with options of those names and defaults, and for the folder of what the example writes."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, number in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=number, help="default: %(default)s")
    if writes:
        parser.add_argument("--output", type=Path, default=Path("examples/output"), help="default: %(default)s")
    return parser


def library_sources() -> Iterator[tuple[ast.Module, bytes]]:
    """The modules of Python's own standard library, parsed, and their source."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        if not {"site-packages", "test", "tests", "idle_test"} & set(path.parts):
            source = path.read_bytes()
            with contextlib.suppress(SyntaxError):  # some tools of the library ship samples of bad source
                yield ast.parse(source), source


@contextlib.contextmanager
def progress(title: str, total: int, console: Console) -> Iterator[Callable[[str], None]]:
    """A function to be called after each step, with what to tell of it: a bar, or elsewhere a line now and then."""
    if console.is_terminal:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        with Progress(*columns, console=console) as bar:
            task = bar.add_task(title, total=total)
            yield lambda text: bar.update(task, advance=1, description=f"{title}: {text}")
        return
    done, told = 0, time.monotonic()

    def advance(text: str) -> None:
        nonlocal done, told
        done += 1
        if time.monotonic() - told > SECONDS:
            told = time.monotonic()
            console.print(f"{title}: {done} of {total}, {text}")

    yield advance


def same_bits(first: Any, second: Any) -> bool:
    """Whether all arrays of two trees are equal, bit for bit."""
    return all(np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (first, second)), strict=True))


class Record(NamedTuple):
    """A run, which ends at its first NaN."""

    params: Any
    losses: list[float]
    scores: list[tuple[int, float]]  # the number of steps before, and the score

    @property
    def has_ended(self) -> bool:
        return math.isnan(self.losses[-1])


State = tuple[Any, Any]  # parameters, and what the optimizer keeps


def make_step(
    loss: Callable[[Any, Any], jax.Array], optimizer: optax.GradientTransformation
) -> Callable[[State, Any], tuple[State, jax.Array]]:
    """A step of training with a batch, of a loss of parameters and batch: the new state, and the loss before."""

    @jax.jit
    def step(state: State, batch: Any) -> tuple[State, jax.Array]:
        params, of_optimizer = state
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, of_optimizer = optimizer.update(gradients, of_optimizer, params)
        return (optax.apply_updates(params, updates), of_optimizer), value

    return step


def train(
    title: str,
    state: State,
    step: Callable[[State, Any], tuple[State, jax.Array]],
    batches: Iterable[Any],
    number: int,
    console: Console,
    score: Callable[[Any], float] | None = None,
    every: int = 1,
) -> Record:
    """Takes so many steps, and scores the parameters now and then."""
    losses, scores = [], []
    with progress(title, number, console) as advance:
        for i, batch in zip(range(number), batches, strict=False):
            if score and i % every == 0:
                scores.append((i, score(state[0])))
            state, loss = step(state, batch)
            losses.append(float(loss))
            advance(f"loss {losses[-1]:.3f}")
            if math.isnan(losses[-1]):
                return Record(state[0], losses, scores)
    if score:
        scores.append((number, score(state[0])))
    return Record(state[0], losses, scores)


def tell_same(clean: Any, garbage: Any, console: Console) -> None:
    same = "the same bits" if same_bits(clean, garbage) else "NOT the same bits"
    console.print(f"masksafe, with garbage in the padding: {same}")


class Cost(NamedTuple):
    """The cost of a compiled function."""

    seconds: float
    temporary_bytes: int


def costs_of(functions: Mapping[str, Callable[..., Any]], args: Sequence[Any], rounds: int) -> dict[str, Cost]:
    """The functions take turns, each after a call that warms up; the median counts."""
    programs = {name: jax.jit(function).lower(*args).compile() for name, function in functions.items()}
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, program in programs.items():
            jax.block_until_ready(program(*args))
            start = time.perf_counter()
            jax.block_until_ready(program(*args))
            times[name].append(time.perf_counter() - start)
    return {n: Cost(statistics.median(times[n]), p.memory_analysis().temp_size_in_bytes) for n, p in programs.items()}


def show_costs(costs: Mapping[str, Mapping[str, Cost]], title: str, console: Console) -> None:
    """A line for each piece of work, a column for each function."""
    text = lambda cost: f"{1e3 * cost.seconds:.0f} ms, {cost.temporary_bytes / 2**20:.1f} MiB"  # noqa: E731
    header = ["", *next(iter(costs.values()))]
    show(title, header, ([name, *map(text, of.values())] for name, of in costs.items()), console)


def show(title: str, header: Sequence[str], rows: Iterable[Sequence[str]], console: Console) -> None:
    table = Table(*header, title=title)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def smooth(values: Sequence[float], window: int) -> tuple[np.ndarray, np.ndarray]:
    """Where windows of so many values end, and their means."""
    window = max(1, min(window, len(values)))
    means = np.convolve(values, np.ones(window) / window, "valid")
    return np.arange(len(means)) + window, means


def draw_run(
    axis: Any, name: str, steps: Sequence[int], values: Any, *, has_ended: bool, color: str, size: float
) -> None:
    """A curve, or a cross at the end of a run that has become NaN."""
    if has_ended:
        label = f"{name}: NaN at step {steps[-1]}"
        axis.plot(steps[-1], values[-1], "X", color=color, markersize=max(size, 9), label=label, zorder=3)
    else:
        axis.plot(steps, values, color=color, linewidth=size, label=name)


def save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
