"""The core of the benchmarks: what a case is, and how its candidates are timed so that nobody is favoured.

A case says what work it is, of what mask, dtype and shape, and which function of which library does it. Candidates take
turns in a new order each round, with a pause before each; the minimum and the median of the rounds are kept, for the
value alone and for the value with its gradient.
"""

import contextlib
import dataclasses
import datetime
import functools
import importlib.metadata
import importlib.util
import math
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import drawn
import jax
import jax.numpy as jnp
import numpy as np

import masksafe

PAUSE = 0.05  # seconds: threads spin for a while after a run, and slow down whoever comes next
SAMPLE = 0.002  # seconds that a timing lasts at least: a call that is shorter is repeated
WARM = 0.1  # seconds: a longer call does not notice what the candidate before it did to the caches
SLOW = 1  # second: a longer call is not run once more to estimate its time, and one that compiles is repeated
FEWEST_ROUNDS, ROUNDS_IF_SLOWER, MOST_ROUNDS = 2, 12, 50
VALUE, GRADIENT = PASSES = ("value", "value with gradient")
OPTIONAL = ("optax", "flax", "torch", "tokamax")  # peers, which need not be installed


# glibc keeps memory for the next call only after it was given back arrays of that size, as in a program that runs on.
np.ones(31 * 2**17)


# Cases


@dataclass(frozen=True)
class Candidate:
    """A call that returns when its work is done, and what is known of its program."""

    run: Callable[[], Any]
    temporary_bytes: int | None = None
    compile_seconds: float | None = None


@dataclass(frozen=True)
class Work:
    """What the candidates compute: `functions[library](*args)`, differentiated by the first `leaves` arguments.

    torch gets `torch_args` if they are given, for it has an axis order of its own.
    """

    functions: Mapping[str, Callable[..., Any]]
    args: tuple[Any, ...]
    leaves: int = 1
    torch_args: tuple[Any, ...] | None = None

    def candidate(self, name: str, *, gradient: bool, eager: bool) -> Candidate:
        fn = self.functions[name]
        if name == "torch":
            return in_torch(fn, self.torch_args or self.args, self.leaves, gradient=gradient)
        step, args = pulled_back(fn, self.args, self.leaves) if gradient else (fn, self.args)
        return in_jax(step, args, eager=eager)

    def without(self, name: str) -> "Work":
        return dataclasses.replace(self, functions={n: fn for n, fn in self.functions.items() if n != name})


@dataclass(frozen=True)
class Case:
    """One line of a benchmark. Its arrays are made by `prepare` when its turn comes, and are gone after it."""

    work: str
    mask: str
    dtype: str
    size: str  # "tiny" is what --quick measures
    shape: str
    prepare: Callable[[], Work]
    eager: bool = False
    passes: tuple[str, ...] = PASSES

    def __str__(self) -> str:
        return f"{self.work}, {self.mask}, {self.dtype}, {self.size}"


@dataclass(frozen=True)
class Benchmark:
    """Cases, and the pairs of candidates whose ratio is told: the time of the first in units of the second."""

    name: str
    title: str
    ratios: tuple[tuple[str, str], ...]
    cases: Sequence[Case]
    clear: float = 0.0  # of a ratio below it two rounds are enough
    budget: float = 0.7  # seconds of more rounds for each case


def by_x(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


Grid = list[tuple[str, str, str, str]]  # of work, mask, dtype and size


def cases_of(
    prepare: Callable[..., Work], sizes: Mapping[str, Any], grid: Grid, text: Callable[[Any], str] = by_x, **fields: Any
) -> list[Case]:
    """The cases of a grid; `prepare` gets work, mask, dtype, and the shape of the size."""
    return [Case(*of, text(sizes[of[3]]), functools.partial(prepare, *of[:3], sizes[of[3]]), **fields) for of in grid]


def grid_of(works: Iterable[str], masks: Iterable[str], dtypes: Mapping[str, Iterable[str]]) -> Grid:
    """All works with all masks, in the sizes of each dtype."""
    return [(w, m, dtype, size) for w in works for m in masks for dtype, sizes in dtypes.items() for size in sizes]


def sized_grid(works: Iterable[str], masks: Mapping[str, Mapping[str, Iterable[str]]]) -> Grid:
    """All works with the masks of each dtype and size."""
    return [(w, m, dtype, size) for w in works for dtype, of in masks.items() for size, ms in of.items() for m in ms]


def against(*peers: str) -> tuple[tuple[str, str], ...]:
    """The ratios of masksafe to those."""
    return tuple(("masksafe", peer) for peer in peers)


def eager_too(cases: Sequence[Case], works: Iterable[str] | None = None) -> list[Case]:
    """The cases, and the tiny ones (or those of such works) once more without `jax.jit`."""
    small = [case for case in cases if (case.size, case.dtype) == ("tiny", "float32")]
    chosen = [case for case in small if works is None or case.work in works]
    return [*cases, *(dataclasses.replace(case, size=f"{case.size}, eager", eager=True) for case in chosen)]


# Timing


def measure(
    candidates: Mapping[str, Callable[[], Any]], rounds: int, budget: float = 0, clear: float = 0
) -> dict[str, list[float]]:
    """The seconds of a call of each candidate, in `rounds` rounds, and in more of them until `budget` seconds are over.

    With `clear`, two rounds are enough if the first candidate's least time is below `clear` times that of each other,
    and there are more if it is above 1.1 times.
    """
    calls = {name: calls_for_a_sample(run) for name, run in candidates.items()}
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    order = random.Random(0)
    end = time.perf_counter() + budget
    done = 0
    while done < rounds or (done < MOST_ROUNDS and time.perf_counter() < end):
        for name in order.sample(list(candidates), len(candidates)):
            time.sleep(PAUSE)
            if calls[name]:
                candidates[name]()
            samples[name].append(seconds_a_call(candidates[name], calls[name] or 1))
        done += 1
        first, *others = map(min, samples.values())
        if clear and others and done == FEWEST_ROUNDS and first < clear * min(others):
            break
        if clear and others and FEWEST_ROUNDS < done == rounds and first > 1.1 * min(others):
            rounds = max(rounds, ROUNDS_IF_SLOWER)
    return samples


def calls_for_a_sample(run: Callable[[], Any]) -> int:
    """How many calls make a timing long enough; 0 for calls so long that they need no call before to warm up."""
    seconds = seconds_a_call(run, 1)
    if seconds < SLOW:
        seconds = seconds_a_call(run, 1)  # without what is compiled or allocated once
    return 0 if seconds > WARM else math.ceil(SAMPLE / max(seconds, 1e-6))


def seconds_a_call(run: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


# Rows


class Row(SimpleNamespace):
    """One line of a CSV: one candidate in one pass of one case."""


def row_of(benchmark: str, case: Case, what: str, candidate: str, **figures: Any) -> Row:
    columns = {name: getattr(case, name) for name in ("work", "mask", "dtype", "size", "shape", "eager")}
    return Row(benchmark=benchmark, **columns, what=what, candidate=candidate, **figures, **environment_now())


def measure_case(benchmark: str, case: Case, rounds: int, budget: float, clear: float = 0) -> Iterator[Row]:
    """The rows of a case. Candidates whose library is not installed have none."""
    work = case.prepare()
    for what in case.passes:
        names = [name for name in work.functions if is_installed(name)]
        found = {name: work.candidate(name, gradient=what == GRADIENT, eager=case.eager) for name in names}
        samples = measure({name: candidate.run for name, candidate in found.items()}, rounds, budget, clear)
        for name, candidate in found.items():
            program = {"temporary_bytes": candidate.temporary_bytes, "compile_s": candidate.compile_seconds}
            yield row_of(benchmark, case, what, name, **figures_of(samples[name]), **program)


def figures_of(seconds: Sequence[float]) -> dict[str, Any]:
    times = {"minimum_ms": min(seconds), "median_ms": statistics.median(seconds)}
    return {"rounds": len(seconds)} | {name: float(f"{1e3 * x:.4g}") for name, x in times.items()}


def is_installed(name: str) -> bool:
    package = name.partition(",")[0]
    return package not in OPTIONAL or importlib.util.find_spec(package) is not None


@functools.cache
def environment_now() -> dict[str, str]:
    """The day, the machine, and the versions."""
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    packages = [name for name in ("jax", "numpy", *OPTIONAL) if importlib.util.find_spec(name)]
    versions = {"masksafe": masksafe.__version__} | {name: importlib.metadata.version(name) for name in packages}
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{(models or [platform.machine()])[0]}, {os.cpu_count()} cores, {platform.system()}",
        "python": platform.python_version(),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }


# Candidates


def in_jax(
    step: Callable[..., Any], args: tuple[Any, ...], *, eager: bool = False, context: Any = contextlib.nullcontext
) -> Candidate:
    """A call of the function, jitted unless it is eager, within what `context` makes."""

    def called(fn: Callable[..., Any]) -> Callable[[], None]:
        def run() -> None:
            with context():
                jax.block_until_ready(fn(*args))

        return run

    if eager:
        return Candidate(called(step))
    seconds = []
    while not seconds or (seconds[-1] > SLOW and len(seconds) < 2):  # the machine may have paused: once more
        # A new function each time: JAX would find the program of an earlier case, and compiling it would take no time.
        jitted = jax.jit(lambda *args: step(*args))
        start = time.perf_counter()
        with context():
            program = jitted.lower(*args).compile()
        seconds.append(time.perf_counter() - start)
    return Candidate(called(jitted), program.memory_analysis().temp_size_in_bytes, round(min(seconds), 3))


def pulled_back(
    fn: Callable[..., Any], args: tuple[Any, ...], leaves: int
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The value and the gradient of its product with random numbers, as a function and its arguments."""
    shapes = jax.eval_shape(fn, *args)
    cotangents = jax.tree.map(lambda leaf: drawn.normal(leaf.shape, leaf.dtype, 1), shapes)
    return with_gradient(fn, leaves), (cotangents, *args)


def with_gradient(fn: Callable[..., Any], leaves: int) -> Callable[..., Any]:
    """The function of cotangents and arguments that returns the value and what the cotangents are pulled back to."""

    def step(cotangents: Any, *args: Any) -> Any:
        value, pull_back = jax.vjp(lambda *leaves_: fn(*leaves_, *args[leaves:]), *args[:leaves])
        return value, pull_back(cotangents)

    return step


def in_torch(fn: Callable[..., Any], args: tuple[Any, ...], leaves: int, *, gradient: bool) -> Candidate:
    """The same in torch, without its compiler. Labels are wide there."""
    import torch

    def as_tensor(x: Any) -> Any:
        dtype = getattr(torch, "int64" if jnp.issubdtype(x.dtype, jnp.integer) else str(x.dtype))
        return torch.from_numpy(np.array(x if x.dtype != jnp.bfloat16 else x.astype(jnp.float32))).to(dtype)

    tensors = [as_tensor(x).requires_grad_(gradient and i < leaves) for i, x in enumerate(args)]
    if not gradient:
        return Candidate(torch.inference_mode()(lambda: fn(*tensors)))
    cotangent = torch.randn_like(fn(*tensors).detach())
    return Candidate(lambda: torch.autograd.grad(fn(*tensors), tensors[:leaves], cotangent))


def functional() -> Any:
    """The functions of torch, which need not be installed, and take seconds to import."""
    import torch

    return torch.nn.functional
