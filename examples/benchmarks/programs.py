"""What XLA makes of a function for a device that need not be there: bytes moved, kernels launched, temporary memory.

XLA compiles for an NVIDIA GPU on a machine without one, given the device's facts (`devices/*.txtpb`) and JAX's CUDA
plugin (`pip install ".[gpu-compile]"`), and for a TPU with `pip install ".[tpu-compile]"`. The optimised program says
how many kernels it launches and which arrays each of them reads and writes, and for a TPU the compiler's estimate of
their cycles. Caches are not modelled, so the bytes are an upper estimate: good for the ratio of two programs for the
same work, not for times.
"""

import functools
import gzip
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import hlo
import jax
from jax.experimental import topologies

KEPT = "COMPILED_PROGRAMS"  # the environment variable of a folder in which programs are kept: compiling takes a second
COMPILERS = ("jaxlib", "jax-cuda", "nvidia-", "libtpu")  # packages


class Target(NamedTuple):
    """A platform, and what has to be installed to compile for it: a plugin."""

    platform: str
    module: str | None
    install: str

    @property
    def is_installed(self) -> bool:
        return self.module is None or importlib.util.find_spec(self.module) is not None


TARGETS = {
    **dict.fromkeys(("h100", "h200", "a100"), Target("cuda", "jax_cuda12_plugin", 'pip install ".[gpu-compile]"')),
    "v5e": Target("tpu", "libtpu", 'pip install ".[tpu-compile]"'),
    "cpu": Target("cpu", None, ""),
}


def check(target: str) -> None:
    """Ends the program if what compiles for the target is not there."""
    if not TARGETS[target].is_installed:
        sys.exit(f"{target}: {TARGETS[target].module} is not installed: {TARGETS[target].install}")


@functools.cache
def devices(target: str, number: int = 1) -> tuple[Any, ...]:
    """The devices of a topology that need not be there."""
    if target == "cpu":
        return tuple(jax.devices("cpu")[:number])
    if target == "v5e":
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # or libtpu asks a server that tells TPUs what they are
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # or a second process that loads it aborts
        shape = next(s for s in ("2x2", "2x4", "4x4", "8x8", "16x16") if math.prod(map(int, s.split("x"))) >= number)
        topology = topologies.get_topology_desc(f"v5e:{shape}", platform="tpu")
    else:
        of = {"topology": f"1x1x{number}", "target_config": _facts(target)}
        topology = topologies.get_topology_desc(target, platform="cuda", **of)
    return tuple(topology.devices[:number])


def _facts(target: str) -> str:
    """What the compiler has to know of a GPU."""
    path = Path(__file__).parent / "devices" / f"{target}.txtpb"
    return path.read_text() if path.exists() else ""


def compile_for(target: str, fn: Callable[..., Any], *args: Any, unknown_trips: int = hlo.UNKNOWN_TRIPS) -> "Program":
    """`fn` compiled for one device of `target`, or for the devices over which its arguments are split; it is not run.

    The arguments are arrays, or trees of `jax.ShapeDtypeStruct`, whose `sharding` may be over a mesh of
    `devices(target, number)`. A loop whose length depends on values is taken to run `unknown_trips` times.
    """
    if any(isinstance(getattr(x, "sharding", None), jax.sharding.NamedSharding) for x in jax.tree.leaves(args)):
        jitted = jax.jit(fn)
    else:
        one = jax.sharding.SingleDeviceSharding(devices(target)[0])
        jitted = jax.jit(fn, in_shardings=one, out_shardings=one)
    lowered = jitted.trace(*args).lower(lowering_platforms=(TARGETS[target].platform,))
    return Program(*_compiled(target, lowered), unknown_trips)


def _compiled(target: str, lowered: Any) -> tuple[str, int]:
    """The text and the bytes of temporaries, from the folder of kept programs if it is there."""
    kept = os.environ.get(KEPT) and Path(os.environ[KEPT]) / f"{_key(target, lowered.as_text())}.json.gz"
    if kept and kept.exists():
        text, temporary_bytes = json.loads(gzip.decompress(kept.read_bytes()))
        return text, temporary_bytes
    program = lowered.compile()
    found = program.as_text(), program.memory_analysis().temp_size_in_bytes
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        unfinished = kept.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(gzip.compress(json.dumps(found).encode()))
        unfinished.rename(kept)
    return found


def _key(target: str, text: str) -> str:
    """What a compiled program depends on: the program, the device, the compiler and its options."""
    packages = {d.name: d.version for d in importlib.metadata.distributions() if d.name.startswith(COMPILERS)}
    flags = os.environ.get("XLA_FLAGS", "").split()
    flags = [flag for flag in flags if target == "cpu" or not flag.startswith(("--xla_cpu_", "--xla_force_host_"))]
    options = flags, jax.config.read("jax_disable_most_optimizations")
    parts = target, _facts(target), text, repr(sorted(packages.items())), repr(options)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@dataclass(frozen=True)
class Program:
    """A compiled program: its text, and the bytes of its temporary arrays."""

    text: str
    temporary_bytes: int
    unknown_trips: int = hlo.UNKNOWN_TRIPS

    @functools.cached_property
    def kernels(self) -> list[hlo.Kernel]:
        return hlo.kernels(self.text, self.unknown_trips)

    @property
    def bytes_moved(self) -> float:
        return hlo.bytes_of(self.kernels)

    @property
    def cycles(self) -> int:
        """What the compiler for a TPU takes all kernels for, but those of Pallas; 0 on another platform."""
        return sum(kernel.cycles * kernel.times for kernel in self.kernels)

    @property
    def launches(self) -> int:
        return sum(kernel.times for kernel in self.kernels)

    @functools.cached_property
    def scatters(self) -> int:
        """The number of scatters, in kernels and outside of them; a GPU makes an atomic update of each element."""
        instructions = (i for computation in hlo.parse(self.text).values() for i in computation.values())
        return sum(instruction.op == "scatter" for instruction in instructions)

    @property
    def exchanges(self) -> list[tuple[str, str, int]]:
        """Kind, type of result and number of the exchanges between devices."""
        return list(hlo.exchanges(self.kernels))

    @property
    def collectives(self) -> dict[str, int]:
        """How often the program makes each kind of exchange between devices."""
        counts: Counter[str] = Counter()
        for kind, _, times in self.exchanges:
            counts[kind] += times
        return dict(counts)
