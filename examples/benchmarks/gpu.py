"""Every op against its peer on the GPU that is there: times, and how much of the hardware they use.

    python examples/benchmarks/gpu.py [--only NAME] [--minutes 8] [--quick] [--plot-only]

The cases are those that `compiled.py` compiles, in bfloat16, with and without a mask. Of each the table has the time,
and its share of what is possible: for attention cuDNN's time by jax.nn in units of it, for all others the time in which
the GPU copies as many bytes as there are in the arguments and the results. For a matrix product, as in a loss of a
linear layer, that is no bound, and the ratio to the peer says more.

It takes at most `--minutes`: cases that are left over then are named. It loads nothing from a network.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from command import console, parser_of, run
from compiled import benchmarks, compiled_candidates, of_both
from measure import GRADIENT, Case, Row, Timing, measure, milliseconds, pulled_back, row_of
from results import NOTHING, as_markdown, csv_of, grouped, number, pairs, ratio_text

COPIED_BYTES = 2**30
SECONDS = 0.02  # that the calls of one timing take, so that they hide what it costs to launch them
MOST_CALLS = 200
ROUNDS = 3
BY_CUDNN = "attention by cuDNN"


def cases() -> list[tuple[str, Case]]:
    """Those of each op in turn, so that a run that is cut short has seen all of them."""
    found = [
        (name, case)
        for name, of_name in benchmarks().items()
        for case in of_name
        if case.dtype == "bfloat16" or "bfloat16" not in {c.dtype for c in of_name if c.work == case.work}
    ]
    of_work = grouped(found, lambda pair: pair[1].work).values()
    return [of[i] for i in range(max(map(len, of_work))) for of in of_work if i < len(of)]


class Queued:
    """A compiled program, called so often that launching costs nothing: the device works while the host queues."""

    def __init__(self, step: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.program, self.args = jax.jit(lambda *args: step(*args)).lower(*args).compile(), args
        out = jax.block_until_ready(self.program(*args))
        self.bytes = sum(x.nbytes for x in jax.tree.leaves((args, out)))
        start = time.perf_counter()
        jax.block_until_ready(self.program(*args))
        self.calls = max(1, min(MOST_CALLS, round(SECONDS / (time.perf_counter() - start))))

    def __call__(self) -> None:
        out = None
        for _ in range(self.calls):
            out = self.program(*self.args)
        jax.block_until_ready(out)


def times_of(candidates: dict[str, Queued]) -> dict[str, Timing]:
    """The times of one call."""
    calls = {name: queued.calls for name, queued in candidates.items()}
    return {
        name: Timing(found.minimum / calls[name], found.median / calls[name], found.rounds)
        for name, found in measure(candidates, ROUNDS).items()
    }


def bytes_per_second(copied: int = COPIED_BYTES) -> float:
    """What the device reads and writes while it copies an array, to which it adds 1."""
    x = jnp.zeros(copied // 4, jnp.int32)
    return 2 * copied / times_of({"copy": Queued(lambda x: x + 1, (x,))})["copy"].minimum


def rows_of(benchmark: str, case: Case, bandwidth: float, end: float) -> Iterator[Row]:
    if time.monotonic() > end:
        raise TimeoutError("no time was left")
    work = case.prepare()
    for what in case.passes:
        candidates = {}
        for name in compiled_candidates(work):
            fn, args = work.functions[name], work.args
            candidates[name] = Queued(*(pulled_back(fn, args, work.leaves) if what == GRADIENT else (fn, args)))
        for name, timing in times_of(candidates).items():
            moved = candidates[name].bytes
            figures = {"bytes": moved, "copy_ms": float(f"{1e3 * moved / bandwidth:.4g}")}
            device = jax.devices()[0].device_kind
            yield row_of(benchmark, case, what, name, **milliseconds(timing), **figures, device=device)


def share(row: Row, rows: Sequence[Row]) -> str:
    """Of what is possible: the time of cuDNN, if it is attention and cuDNN was timed, or that of a copy."""
    possible: float | None = row.copy_ms
    if row.benchmark == "attention":
        case = lambda r: (r.mask, r.dtype, r.shape, r.what)  # noqa: E731
        by_cudnn = [r.median_ms for r in rows if (r.work, r.candidate) == (BY_CUDNN, "jax.nn") and case(r) == case(row)]
        possible = next(iter(by_cudnn), None)
    return NOTHING if possible is None else f"{100 * possible / row.median_ms:.0f} %"


HEADER = ["op", "mask", "what", "against", "ms", "ratio", "share", "peer's share"]


def lines_of(rows: Sequence[Row]) -> list[list[str]]:
    """A line for each case, pass and peer, the slowest in units of its peer first."""
    return [
        [p.row.work, p.row.mask, p.row.what, p.peer.candidate, of_both(p, "median_ms", number), ratio_text(p.median)]
        + [share(row, rows) for row in (p.row, p.peer)]
        for p in sorted(pairs(rows), key=lambda pair: -pair.median)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of()
    parser.add_argument("--minutes", type=float, default=8, help="at most; default: %(default)s")
    options, device, bandwidth = parser.parse_args(arguments), jax.devices()[0], 0.0
    end = time.monotonic() + 60 * options.minutes
    if not options.plot_only:
        if device.platform not in ("gpu", "cuda", "rocm"):
            sys.exit(
                f"gpu.py needs a GPU, and JAX's default device is {device}: install jax[cuda12], or see compiled.py"
            )
        bandwidth = bytes_per_second()
        console.print(f"{device.device_kind}: {bandwidth / 1e9:.0f} GB/s in a copy")
    timed = lambda name, case: rows_of(name, case, bandwidth, end)  # noqa: E731
    table = lambda rows: as_markdown(HEADER, lines_of(rows))  # noqa: E731
    without = ("size", "eager", "rounds", "machine", "python")
    run(options, "Timing", cases(), timed, table, csv_of("gpu"), without=without)


if __name__ == "__main__":
    main()
