"""The ops that cost most, on the GPU that is there: each against plain formulas, and libraries if they are installed.

    python examples/benchmarks/gpu.py [--seconds 300] [--only OP] [--tiny] [--csv FILE]

Nothing but jax and masksafe has to be installed, and nothing is loaded from a network. Each figure is printed at once,
the most important first: the milliseconds of the value with its gradient, and the time in which the GPU copies the
bytes of the arguments and the results in units of it, which for a product of matrices is no bound. What the seconds are
not enough for has a line that says so. `--tiny` is a smoke run that any device can make.

A run of all ops on a GPU writes `docs/benchmarks/gpu.csv`, of which `all.py --plot-only` makes a page and a picture.
"""

import argparse
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attention
import drawn
import formulas
import jax
import jax.numpy as jnp
import linear
import measure
import normalization
import results
from measure import Benchmark, Case, Row, Work, cases_of, grid_of
from results import Pair, csv_of, grouped

import masksafe
from masksafe import losses

COPIED_BYTES = 2**30
SECONDS_OF_A_TIMING = 0.02  # that its calls take, so that they hide what it costs to launch them
MOST_CALLS = 200
ROUNDS = 3
LONGEST = 20  # seconds that compiling and timing a candidate may take: with less left none is begun
TOKENS = ("none", "60 % of tokens")
WITHOUT_A_GPU = ("torch", "tokamax")  # which are timed on a CPU
PEERS = ("jax.nn, cuDNN", "masksafe, blocks", "jax.nn", "formula", "optax", "flax", "jax.lax", "JAX")
BENCHMARK = Benchmark("gpu", "On a GPU", measure.against(*PEERS), [])
NO_FIGURES = """\
**There are no figures yet:** nobody has run this benchmark on a GPU. On yours it takes five minutes, and writes the CSV
from which the second command makes the table and the picture of this page:

```sh
.venv/bin/pip install . "jax[cuda12]" && .venv/bin/python examples/benchmarks/gpu.py
.venv/bin/pip install ".[examples]" && .venv/bin/python examples/benchmarks/all.py --plot-only
```"""


# Cases: their sizes on a GPU, and tiny ones


def cross_entropy(work: str, mask: str, dtype: str, shape: tuple[int, int]) -> Work:
    logits, labels = drawn.normal(shape, dtype), drawn.labels(shape[:1], shape[1])
    where = None if mask == "none" else drawn.bits(shape[:1], 0.4)

    def of(loss: Callable[..., Any]) -> Callable[..., Any]:
        mean = lambda x, where: jnp.mean(x) if where is None else linear.mean_of_unmasked(x, where)  # noqa: E731
        return lambda logits, labels, where: mean(loss(logits, labels), where)

    def of_optax(logits: jax.Array, labels: jax.Array) -> jax.Array:
        import optax  # which need not be installed

        return optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)

    ours = losses.softmax_cross_entropy_with_integer_labels
    functions = {
        "masksafe": lambda *args: masksafe.mean(ours(*args[:2], where=args[2]), where=args[2]),
        "formula": of(plain_cross_entropy),
        "optax": of(of_optax),
    }
    return Work(functions, (logits, labels, where))


def plain_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    logits = logits.astype(jnp.float32)
    return jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]


def of_linear(work: str, mask: str, dtype: str, sizes: tuple[int, int, int]) -> Work:
    if work != "linear":
        return linear.prepare_log_probs(work, mask, dtype, sizes)
    found = linear.prepare(work, mask, dtype, sizes)

    def formula(features: jax.Array, kernel: jax.Array, labels: jax.Array, where: jax.Array) -> jax.Array:
        logits = jnp.matmul(features, kernel, preferred_element_type=jnp.float32)
        return linear.mean_of_unmasked(plain_cross_entropy(logits, labels), where)

    return Work({**found.functions, "formula": formula}, found.args, leaves=2)


def of_attention(work: str, mask: str, dtype: str, sizes: tuple[int, int, int]) -> Work:
    """By the kernel that is chosen, in blocks, and by `jax.nn`, alone and with cuDNN."""
    found = attention.prepare(work, mask, dtype, sizes) if mask != "pairs" else of_pairs(dtype, sizes)
    ours, peer = (found.functions[name] for name in ("masksafe", "jax.nn"))
    functions = {"masksafe": ours, "jax.nn, cuDNN": functools.partial(peer, implementation="cudnn")}
    functions |= {"masksafe, blocks": functools.partial(ours, implementation="xla"), "jax.nn": peer}
    return Work(functions, found.args, leaves=3)


def of_pairs(dtype: str, sizes: tuple[int, int, int]) -> Work:
    """Random pairs are unmasked; with 64 more keys than a multiple of 128 masksafe gives cuDNN 64 more of them."""
    found = attention.prepare("attention", "none", dtype, sizes)
    arrays = {name: {"mask": drawn.bits((1, 1, *sizes[1:]), 0.7)} for name in found.functions}
    return Work(found.functions, (*found.args[:3], arrays), leaves=3)


def norm(work: str, mask: str, dtype: str, shape: tuple[int, int]) -> Work:
    found = normalization.prepare(work, mask, dtype, (shape, -1))

    def formula(x: jax.Array, scale: jax.Array, *rest: jax.Array) -> jax.Array:
        wide, (*biases, where) = x.astype(jnp.float32), rest
        wide = wide - jnp.mean(wide, -1, keepdims=True) if work == "layer norm" else wide
        variance = jnp.mean(wide * wide, -1, keepdims=True)
        y = sum(biases, wide * jax.lax.rsqrt(variance + normalization.EPSILON) * scale)
        return (y if where is None else jnp.where(where, y, 0)).astype(x.dtype)

    return Work({**found.functions, "formula": formula}, found.args, found.leaves)


def experts(work: str, mask: str, dtype: str, sizes: tuple[int, int, int, int]) -> Work:
    rows, width, out, groups = sizes
    arrays = drawn.normal((rows, width), dtype), drawn.normal((groups, width, out), dtype, 1)
    group_sizes = jnp.full(groups, rows // groups // (1 if mask == "none" else 2), jnp.int32)
    return Work({"masksafe": masksafe.ragged_dot, "jax.lax": jax.lax.ragged_dot}, (*arrays, group_sizes), leaves=2)


def cases(tiny: bool) -> list[Case]:
    def of(prepare: Callable[..., Work], large: Any, small: Any, works: Any, masks: Any) -> list[Case]:
        grid = grid_of(works, masks, {"bfloat16": ("large",)})
        return cases_of(prepare, {"large": small if tiny else large}, grid)

    return [
        *of(of_attention, (2, 4160, 4160), (1, 64, 64), ["attention"], ["pairs"]),
        *of(cross_entropy, (8192, 131072), (8, 100), ["cross-entropy"], TOKENS),
        *of(of_linear, (8192, 4096, 131072), (64, 16, 100), ["linear", "log p", "log p, entropy"], TOKENS),
        *of(
            of_attention, (2, 4096, 4096), (1, 16, 16), ["attention"], ["none", "causal", "half padding", "8 segments"]
        ),
        *of(norm, (8192, 4096), (8, 64), ["layer norm", "RMS norm"], ["none", "rows"]),
        *of(experts, (8192, 4096, 4096, 8), (16, 8, 8, 2), ["ragged_dot"], ["none", "half padding"]),
        *of(formulas.prepare, (8192, 32768), (8, 10), ["softmax"], ["none", "elements"]),
    ]


# Timing


class Queued:
    """A compiled program, called so often that launching costs nothing: the device works while the host queues."""

    def __init__(self, step: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.program, self.args = jax.jit(lambda *args: step(*args)).lower(*args).compile(), args
        out = jax.block_until_ready(self.program(*args))
        self.bytes = sum(x.nbytes for x in jax.tree.leaves((args, out)))
        start = time.perf_counter()
        jax.block_until_ready(self.program(*args))
        self.calls = max(1, min(MOST_CALLS, round(SECONDS_OF_A_TIMING / (time.perf_counter() - start))))

    def __call__(self) -> None:
        out = None
        for _ in range(self.calls):
            out = self.program(*self.args)
        jax.block_until_ready(out)

    def figures(self) -> dict[str, Any]:
        (seconds,) = measure.measure({"": self}, ROUNDS).values()
        return measure.figures_of([x / self.calls for x in seconds])


def bytes_per_second(copied: int = COPIED_BYTES) -> float:
    """What the device reads and writes while it copies an array, to which it adds 1."""
    return 2e3 * copied / Queued(lambda x: x + 1, (jnp.zeros(copied // 4, jnp.int32),)).figures()["median_ms"]


def rows_of(case: Case, bandwidth: float, end: float) -> Iterator[Row]:
    """What is known of each candidate, as soon as it is known."""
    if time.monotonic() > end - LONGEST:
        yield row(case, "all", {"failure": "no time left"})
        return
    work = case.prepare()
    for name in (name for name in work.functions if name not in WITHOUT_A_GPU):
        yield row(case, name, timed(name, work, bandwidth, end))
        jax.clear_caches()


def row(case: Case, candidate: str, figures: dict[str, Any]) -> Row:
    columns = dict.fromkeys(("rounds", "minimum_ms", "median_ms", "copy", "failure")) | figures
    made = measure.row_of(BENCHMARK.name, case, measure.GRADIENT, candidate, **columns)
    return Row(**vars(made) | {"machine": jax.devices()[0].device_kind})


def timed(name: str, work: Work, bandwidth: float, end: float) -> dict[str, Any]:
    if not measure.is_installed(name):
        return {"failure": "not installed"}
    if time.monotonic() > end - LONGEST:
        return {"failure": "no time left"}
    try:
        queued = Queued(*measure.pulled_back(work.functions[name], work.args, work.leaves))
        figures = queued.figures()
    except Exception as error:  # out of memory, or a kernel that is not there
        return {"failure": f"{type(error).__name__}: {str(error).partition(chr(10))[0][:80]}"}
    return {**figures, "copy": round(1e3 * queued.bytes / bandwidth / figures["median_ms"], 3)}


def line_of(row: Row) -> str:
    told = [f"{row.median_ms:.4g}", f"{row.copy:.0%}"] if row.median_ms else [row.failure, ""]
    return f"| {' | '.join([row.work, row.mask, row.shape, row.candidate, *told])} |"


# The page


def section(rows: Sequence[Row]) -> str:
    """What stands on the page: a picture and a table, or that nothing was measured."""
    known = [row for row in rows if row.median_ms]
    if not known:
        return NO_FIGURES
    failed = grouped((row for row in rows if row.failure), lambda row: (row.candidate, row.failure))
    told = lambda of: ", ".join(dict.fromkeys(row.work for row in of))  # noqa: E731
    failures = [f"{name} ({why}): {told(of)}" for (name, why), of in failed.items()]
    parts = [
        f"![{BENCHMARK.title}: ratios of times](../{results.PICTURES.as_posix()}/{BENCHMARK.name}.png)",
        table(results.pairs(known, BENCHMARK.ratios)),
        results.summary(BENCHMARK, {f"[{results.jax_of(known)}](../benchmarks/{BENCHMARK.name}.csv)": known}),
        f"Without a figure: {'; '.join(failures)}." if failures else "",
    ]
    return "\n\n".join(filter(None, parts))


def table(pairs: Sequence[Pair]) -> str:
    """A line for each case: of masksafe milliseconds and what a copy takes of them, and its ratio to each other."""
    lines = []
    for about, of_case in grouped(pairs, lambda pair: (pair.row.work, pair.row.mask, pair.row.shape)).items():
        ours, ratios = of_case[0].row, [f"{results.ratio_text(pair.median)} {pair.peer.candidate}" for pair in of_case]
        lines.append([*about, results.number(ours.median_ms), f"{ours.copy:.0%}", "; ".join(ratios)])
    return results.as_markdown(["work", "mask", "shape", "ms", "a copy takes", "masksafe / the other"], lines)


def publish() -> None:
    rows = results.read_csv(csv_of(BENCHMARK.name))
    if known := [row for row in rows if row.median_ms]:
        from plots import draw  # whose libraries need not be installed beside the GPU

        draw(BENCHMARK, known, results.picture_of(BENCHMARK.name))
    results.fill_pages({BENCHMARK.name: section(rows)})


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300, help="at most; default: %(default)s")
    parser.add_argument("--only", action="append", help="an op; may be given again; default: all")
    parser.add_argument("--tiny", action="store_true", help="a smoke run of tiny shapes")
    parser.add_argument("--csv", type=Path, help="written after each figure; default: that of the docs, if all ops run")
    options = parser.parse_args(arguments)
    is_whole = not options.tiny and not options.only and jax.default_backend() == "gpu"
    path = options.csv or (csv_of(BENCHMARK.name) if is_whole else None)
    end = time.monotonic() + options.seconds
    bandwidth = bytes_per_second(2**16 if options.tiny else COPIED_BYTES)
    say = functools.partial(print, flush=True)
    say(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, masksafe {masksafe.__version__}:", end=" ")
    say(f"{bandwidth / 1e9:.0f} GB/s in a copy\n\n| op | mask | shape | candidate | ms | copy |\n|{'---|' * 6}")
    rows: list[Row] = []
    for case in cases(options.tiny):
        for row in rows_of(case, bandwidth, end) if case.work in (options.only or [case.work]) else ():
            say(line_of(row))
            rows.append(row)
            if path:
                results.write_csv(path, rows)


if __name__ == "__main__":
    main()
