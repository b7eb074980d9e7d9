"""The ops that cost most, on the GPU that is there: each against plain formulas, and libraries if they are installed.

    python examples/benchmarks/gpu.py [--seconds 300] [--only OP] [--tiny]

Nothing but jax and masksafe has to be installed, and nothing is loaded from a network. Each figure is printed at once,
the most important first: the milliseconds of the value with its gradient, and the time in which the GPU copies the
bytes of the arguments and the results in units of it, which for a product of matrices is no bound. What the seconds are
not enough for has a line that says so. `--tiny` is a smoke run that any device can make.
"""

import argparse
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import attention
import drawn
import formulas
import jax
import jax.numpy as jnp
import linear
import normalization
from measure import Case, Work, cases_of, figures_of, grid_of, is_installed, measure, pulled_back

import masksafe
from masksafe import losses

COPIED_BYTES = 2**30
SECONDS_OF_A_TIMING = 0.02  # that its calls take, so that they hide what it costs to launch them
MOST_CALLS = 200
ROUNDS = 3
LONGEST = 20  # seconds that compiling and timing a candidate may take: with less left none is begun
TOKENS = ("none", "60 % of tokens")
WITHOUT_A_GPU = ("torch", "tokamax")  # which are timed on a CPU


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

    def milliseconds(self) -> float:
        (seconds,) = measure({"": self}, ROUNDS).values()
        return figures_of([x / self.calls for x in seconds])["median_ms"]


def bytes_per_second(copied: int = COPIED_BYTES) -> float:
    """What the device reads and writes while it copies an array, to which it adds 1."""
    return 2e3 * copied / Queued(lambda x: x + 1, (jnp.zeros(copied // 4, jnp.int32),)).milliseconds()


def lines_of(case: Case, bandwidth: float, end: float) -> Iterator[tuple[str, ...]]:
    """What is told of each candidate, as soon as it is known."""
    about = case.work, case.mask, case.shape
    if time.monotonic() > end - LONGEST:
        yield *about, "all", "no time left", ""
        return
    work = case.prepare()
    for name in (name for name in work.functions if name not in WITHOUT_A_GPU):
        yield *about, name, *told(name, work, bandwidth, end)
        jax.clear_caches()


def told(name: str, work: Work, bandwidth: float, end: float) -> tuple[str, str]:
    if not is_installed(name):
        return "not installed", ""
    if time.monotonic() > end - LONGEST:
        return "no time left", ""
    try:
        queued = Queued(*pulled_back(work.functions[name], work.args, work.leaves))
        milliseconds = queued.milliseconds()
    except Exception as error:  # out of memory, or a kernel that is not there
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:80]}", ""
    return f"{milliseconds:.4g}", f"{1e5 * queued.bytes / bandwidth / milliseconds:.0f} %"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300, help="at most; default: %(default)s")
    parser.add_argument("--only", action="append", help="an op; may be given again; default: all")
    parser.add_argument("--tiny", action="store_true", help="a smoke run of tiny shapes")
    options = parser.parse_args(arguments)
    end = time.monotonic() + options.seconds
    bandwidth = bytes_per_second(2**16 if options.tiny else COPIED_BYTES)
    say = functools.partial(print, flush=True)
    say(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, masksafe {masksafe.__version__}:", end=" ")
    say(f"{bandwidth / 1e9:.0f} GB/s in a copy\n\n| op | mask | shape | candidate | ms | copy |\n|{'---|' * 6}")
    for case in cases(options.tiny):
        if case.work in (options.only or [case.work]):
            for line in lines_of(case, bandwidth, end):
                say("|", " | ".join(line), "|")


if __name__ == "__main__":
    main()
