"""What XLA makes of a function for a device that need not be there: bytes moved, kernels launched, temporary memory.

XLA compiles for an NVIDIA GPU on a machine without one, given the device's facts (`devices/*.txtpb`) and JAX's CUDA
plugin (`pip install "masksafe[gpu-compile]"`). The optimised program says how many kernels it launches and which arrays
each of them reads and writes. Caches are not modelled, so the bytes are an upper estimate: good for the ratio of two
programs for the same work, not for times.
"""

import functools
import importlib.util
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

MIB = 2**20
UNKNOWN_TRIPS = 4  # of a loop whose length depends on values


@dataclass(frozen=True)
class Target:
    """A platform, and what has to be installed to compile for it."""

    name: str
    platform: str
    module: str | None  # the plugin's
    install: str

    @property
    def is_installed(self) -> bool:
        return self.module is None or importlib.util.find_spec(self.module) is not None


_CUDA = ("cuda", "jax_cuda12_plugin", 'pip install "masksafe[gpu-compile]"')
TARGETS = {
    target.name: target
    for target in (
        Target("h100", *_CUDA),
        Target("h200", *_CUDA),
        Target("a100", *_CUDA),
        Target("v5e", "tpu", "libtpu", "pip install libtpu"),
        Target("cpu", "cpu", None, ""),
    )
}


@functools.cache
def devices(target: str, number: int = 1) -> tuple[Any, ...]:
    """The devices of a topology that need not be there."""
    if target == "cpu":
        return tuple(jax.devices("cpu")[:number])
    if target == "v5e":
        topology = topologies.get_topology_desc("v5e:2x2" if number <= 4 else "v5e:2x4", platform="tpu")
    else:
        facts = (Path(__file__).parent / "devices" / f"{target}.txtpb").read_text()
        topology = topologies.get_topology_desc(target, platform="cuda", topology=f"1x1x{number}", target_config=facts)
    return tuple(topology.devices[:number])


def compile_for(target: str, fn: Callable[..., Any], *args: Any, shardings: Any = None) -> "Program":
    """`fn` compiled for one device of `target`, or for the devices of `shardings`, those of the arguments.

    Args:
      target: a key of `TARGETS`.
      fn: a function; it is not run.
      *args: arrays, or trees of `jax.ShapeDtypeStruct`.
      shardings: of each argument, over a mesh of `devices(target, number)`.
    """
    if shardings is None:
        one = jax.sharding.SingleDeviceSharding(devices(target)[0])
        jitted = jax.jit(fn, in_shardings=one, out_shardings=one)
    else:
        jitted = jax.jit(fn, in_shardings=shardings)
    compiled = jitted.trace(*args).lower(lowering_platforms=(TARGETS[target].platform,)).compile()
    return Program(compiled.as_text(), compiled.memory_analysis().temp_size_in_bytes)


@dataclass(frozen=True)
class Program:
    """A compiled program: its text, and the bytes of its temporary arrays."""

    text: str
    temporary_bytes: int

    @functools.cached_property
    def _cost(self) -> "_Cost":
        computations = _parse(self.text)
        return _cost(computations, next(name for name, c in computations.items() if c.is_entry))

    @property
    def bytes_moved(self) -> float:
        return self._cost.bytes_moved

    @property
    def launches(self) -> int:
        return self._cost.launches

    @property
    def collectives(self) -> dict[str, int]:
        """How often each kind of exchange between devices stands in the program."""
        kinds = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
        counts = {kind: len(re.findall(rf" {kind}(?:-start)?\(", self.text)) for kind in kinds}
        return {kind: count for kind, count in counts.items() if count}

    def kernels(self) -> Iterator[tuple[str, str, float]]:
        """Name, type of the result and bytes moved of every kernel of the program, for a look at what costs most."""
        for name, computation in _parse(self.text).items():
            if computation.is_called_by_fusion:
                continue
            for instruction in computation.instructions.values():
                if instruction.op not in _FREE and instruction.op not in _CONTROL:
                    yield f"{name}/{instruction.name}", instruction.type, _bytes_of_kernel(computation, instruction)


# Reading the text of an optimised program.

_SIZES = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2}  # bytes; of other types the width is in the name
_FREE = {"parameter", "get-tuple-element", "tuple", "constant", "bitcast", "after-all", "iota", "partition-id"}
_CONTROL = {"while", "call", "conditional"}


@dataclass
class _Instruction:
    name: str
    type: str
    op: str
    args: list[str]
    rest: str
    is_root: bool


@dataclass
class _Computation:
    is_entry: bool
    is_called_by_fusion: bool
    instructions: dict[str, _Instruction]
    all: "dict[str, _Computation]"

    @property
    def root(self) -> _Instruction:
        return next(i for i in self.instructions.values() if i.is_root)


@dataclass(frozen=True)
class _Cost:
    bytes_moved: float = 0
    launches: int = 0

    def __add__(self, other: "_Cost") -> "_Cost":
        return _Cost(self.bytes_moved + other.bytes_moved, self.launches + other.launches)

    def times(self, n: int) -> "_Cost":
        return _Cost(self.bytes_moved * n, self.launches * n)


def _parse(text: str) -> dict[str, _Computation]:
    computations: dict[str, _Computation] = {}
    current = None
    for line in text.splitlines():
        if head := re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line):
            current = _Computation(bool(head[1]), False, {}, computations)
            computations[head[2]] = current
        elif line.startswith("}"):
            current = None
        elif current is not None and (
            found := re.match(r"^\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$", line)
        ):
            root, name, type_, op, rest = found.groups()
            args = re.findall(r"%([\w.\-]+)", rest.split("), ")[0])
            current.instructions[name] = _Instruction(name, type_, op, args, rest, bool(root))
    for computation in list(computations.values()):
        for instruction in computation.instructions.values():
            for called in _called(instruction, "calls", "to_apply"):
                if instruction.op != "call":
                    computations[called].is_called_by_fusion = True
    return computations


def _called(instruction: _Instruction, *attributes: str) -> list[str]:
    pattern = rf"(?:{'|'.join(attributes)})=\{{?((?:%[\w.\-]+(?:, )?)+)"
    return [name for group in re.findall(pattern, instruction.rest) for name in re.findall(r"%([\w.\-]+)", group)]


def _bytes_of_type(type_: str) -> float:
    total = 0.0
    for dtype, shape in re.findall(r"\b(pred|bf16|[sufc]\d+\w*)\[([\d,]*)\]", type_):
        width = _SIZES.get(dtype) or int(re.findall(r"\d+", dtype)[0]) / 8
        total += width * math.prod(int(n) for n in shape.split(",") if n)
    return total


def _cost(computations: dict[str, _Computation], name: str) -> _Cost:
    computation = computations[name]
    total = _Cost()
    for instruction in computation.instructions.values():
        if instruction.op in _FREE or instruction.op.endswith("-done"):
            continue
        if instruction.op == "while":
            known = re.search(r'known_trip_count":\{"n":"(\d+)"', instruction.rest)
            trips = int(known[1]) if known else UNKNOWN_TRIPS
            body = sum((_cost(computations, c) for c in _called(instruction, "body", "condition")), _Cost())
            total += body.times(trips)
        elif instruction.op == "call":
            total += _cost(computations, *_called(instruction, "to_apply"))
        elif instruction.op == "conditional":
            branches = _called(instruction, "branch_computations", "true_computation", "false_computation")
            costs = [_cost(computations, branch) for branch in branches]
            total += max(costs, key=lambda cost: cost.bytes_moved)
        else:
            total += _Cost(_bytes_of_kernel(computation, instruction), 1)
    return total


def _bytes_of_kernel(computation: _Computation, kernel: _Instruction) -> float:
    """What a kernel reads and writes; of an array that it slices or updates in place, the part that it touches."""
    known = computation.instructions
    reads = [_bytes_of_type(known[a].type) if a in known else 0 for a in kernel.args]
    writes = _bytes_of_type(kernel.type)
    if kernel.op == "dynamic-update-slice":
        return 2 * reads[1]
    if kernel.op in ("dynamic-slice", "slice", "gather"):
        return 2 * writes + sum(reads[1:])
    if kernel.op != "fusion":
        return writes + sum(reads)
    (called,) = _called(kernel, "calls")
    fused = computation.all[called].instructions
    users_of: dict[str, list[_Instruction]] = {}
    for instruction in fused.values():
        for arg in dict.fromkeys(instruction.args):
            users_of.setdefault(arg, []).append(instruction)
    root = computation.all[called].root
    roots = [fused[a] for a in root.args] if root.op == "tuple" else [root]
    for parameter in (i for i in fused.values() if i.op == "parameter"):
        number = int(parameter.rest.split(")")[0])
        users = _through_bitcasts(users_of, parameter)
        if users and all(u.op in ("dynamic-slice", "gather", "slice") for u in users):
            reads[number] = min(reads[number], sum(_bytes_of_type(u.type) for u in users))
        elif users and all(u.op == "dynamic-update-slice" for u in users) and any(u in roots for u in users):
            reads[number] = 0
    for root in roots:
        if root.op == "dynamic-update-slice":
            writes += _bytes_of_type(fused[root.args[1]].type) - _bytes_of_type(root.type)
    return writes + sum(reads)


def _through_bitcasts(users_of: dict[str, list[_Instruction]], value: _Instruction) -> list[_Instruction]:
    users = []
    for user in users_of.get(value.name, []):
        users += _through_bitcasts(users_of, user) if user.op == "bitcast" else [user]
    return users
