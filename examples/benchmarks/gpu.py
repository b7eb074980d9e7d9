"""Every op against its peer on the GPU that is there: times, and how much of the hardware they use.

    python examples/benchmarks/gpu.py [--only NAME] [--minutes 8] [--quick] [--plot-only]

The cases are those that `compiled.py` compiles, in bfloat16, with and without a mask. Of each the table has the time,
and its share of what is possible: for attention cuDNN's time by jax.nn in units of it, for all others the time in which
the GPU copies as many bytes as there are in the arguments and the results. For a matrix product, as in a loss of a
linear layer, that is no bound, and the ratio to the peer says more.

It takes at most `--minutes`: cases that are left over then are named. It loads nothing from a network.
"""

import collections
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from command import console, parser_of, run, tell
from compiled import benchmarks, compiled_candidates
from measure import GRADIENT, Case, Row, figures_of, measure, pulled_back, row_of
from results import NOTHING, as_markdown, csv_of, number, pairs, ratio_text

COPIED_BYTES = 2**30
SECONDS = 0.02  # that the calls of one timing take, so that they hide what it costs to launch them
MOST_CALLS = 200
ROUNDS = 3
BY_CUDNN = "attention by cuDNN"


def cases() -> list[tuple[str, Case]]:
    """Those of each op in turn, so that a run that is cut short has seen all of them."""
    found, turns = [], collections.Counter()
    for name, of_name in benchmarks().items():
        in_bfloat16 = {case.work for case in of_name if case.dtype == "bfloat16"}
        for case in of_name:
            if case.dtype == "bfloat16" or case.work not in in_bfloat16:
                found.append((turns[case.work], name, case))
                turns[case.work] += 1
    return [(name, case) for _, name, case in sorted(found, key=lambda of: of[0])]


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


def seconds_of(candidates: dict[str, Queued]) -> dict[str, list[float]]:
    """The seconds of one call, in each round."""
    found = measure(candidates, ROUNDS)
    return {name: [x / queued.calls for x in found[name]] for name, queued in candidates.items()}


def bytes_per_second(copied: int = COPIED_BYTES) -> float:
    """What the device reads and writes while it copies an array, to which it adds 1."""
    x = jnp.zeros(copied // 4, jnp.int32)
    return 2 * copied / min(seconds_of({"copy": Queued(lambda x: x + 1, (x,))})["copy"])


def rows_of(benchmark: str, case: Case, bandwidth: float, end: float) -> Iterator[Row]:
    if time.monotonic() > end:
        raise TimeoutError("no time was left")
    work = case.prepare()
    for what in case.passes:
        candidates = {}
        for name in compiled_candidates(work):
            fn, args = work.functions[name], work.args
            candidates[name] = Queued(*(pulled_back(fn, args, work.leaves) if what == GRADIENT else (fn, args)))
        for name, seconds in seconds_of(candidates).items():
            moved = candidates[name].bytes
            figures = {"bytes": moved, "copy_ms": float(f"{1e3 * moved / bandwidth:.4g}")}
            device = jax.devices()[0].device_kind
            yield row_of(benchmark, case, what, name, **figures_of(seconds), **figures, device=device)
    jax.clear_caches()


def share(row: Row, rows: Sequence[Row]) -> str:
    """Of what is possible: the time of cuDNN, if it is attention and cuDNN was timed, or that of a copy."""
    possible: float | None = row.copy_ms
    if row.benchmark == "attention":
        case = lambda r: (r.mask, r.dtype, r.shape, r.what)  # noqa: E731
        by_cudnn = [r.median_ms for r in rows if (r.work, r.candidate) == (BY_CUDNN, "jax.nn") and case(r) == case(row)]
        possible = next(iter(by_cudnn), None)
    return NOTHING if possible is None else f"{100 * possible / row.median_ms:.0f} %"


def table(rows: Sequence[Row]) -> str:
    """A line for each case, pass and peer, the slowest in units of its peer first."""
    lines = []
    for pair in sorted(pairs(rows), key=lambda pair: -pair.median):
        shares = [share(row, rows) for row in pair]
        case = pair.row.work, pair.row.mask, pair.row.what, pair.peer.candidate
        lines.append([*case, pair.both("median_ms", number), ratio_text(pair.median), *shares])
    return as_markdown(["op", "mask", "what", "against", "ms", "ratio", "share", "peer's share"], lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of()
    parser.add_argument("--minutes", type=float, default=8, help="at most; default: %(default)s")
    options, device, bandwidth = parser.parse_args(arguments), jax.devices()[0], 0.0
    end = time.monotonic() + 60 * options.minutes
    if not options.plot_only:
        if device.platform not in ("gpu", "cuda", "rocm"):
            needs = "install jax[cuda12], or see compiled.py"
            sys.exit(f"gpu.py needs a GPU, and JAX's default device is {device}: {needs}")
        bandwidth = bytes_per_second()
        console.print(f"{device.device_kind}: {bandwidth / 1e9:.0f} GB/s in a copy")
    timed = functools.partial(rows_of, bandwidth=bandwidth, end=end)
    without = ("size", "eager", "rounds", "machine", "python")
    tell(run(options, "Timing", cases(), timed, table, csv_of("gpu"), without=without))


if __name__ == "__main__":
    main()
