"""The cost of an optimised program, read from its text: which kernels it launches, how often, and the bytes of each.

A kernel reads its operands and writes its result. Of an operand it reads what it needs: of a slice the slice, and of an
array that it updates in place nothing but the part that is new. An element that several parts of a kernel need is read
once. Caches are not modelled: what one kernel writes, the next one reads from memory. On a TPU, arrays that the
compiler keeps on the chip are free, and copying them there costs what it reads.
"""

import functools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

UNKNOWN_TRIPS = 4  # of a loop whose length depends on values

# What needs no kernel. `AllocateBuffer` and the two others are what XLA for TPUs calls so.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "add-dependency", "opt-barrier",
    "partition-id", "replica-id",
}  # fmt: skip
_FREE_CALLS = ("AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound")
_SAME_VALUE = ("bitcast", "reshape", "copy")  # inside a kernel
_OF_A_PART = ("slice", "dynamic-slice", "gather")
_IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}  # and which operand is what it writes
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")


@dataclass(frozen=True)
class Kernel:
    """A launch of the program, or `times` of them in a loop, each of which moves `bytes_moved`."""

    name: str
    op: str
    type: str
    bytes_moved: float
    times: int = 1
    cycles: int = 0  # the estimate of a TPU's compiler


def bytes_of(found: Sequence[Kernel]) -> float:
    return sum(kernel.bytes_moved * kernel.times for kernel in found)


def exchanges(found: Sequence[Kernel]) -> Iterator[tuple[str, str, int]]:
    """Kind, type of result and number of the exchanges between devices."""
    for kernel in found:
        kind = kernel.op.removesuffix("-start")
        if kind in _COLLECTIVES:
            yield kind, kernel.type, kernel.times


def received_bytes(found: Iterable[tuple[str, str, int]], devices: int) -> float:
    """What a device receives in exchanges between so many: of an array that is gathered all parts but its own."""
    total = 0.0
    for kind, type_, times in found:
        size = bytes_of_type(re.sub(r"\{[^}]*\}", "", type_)) * times  # wherever the result is put
        if kind == "collective-permute":
            total += size
        elif kind == "reduce-scatter":  # whose result is one of the parts
            total += size * (devices - 1)
        else:  # of an all-reduce twice: parts are summed, and sums are gathered
            total += size * (devices - 1) / devices * (2 if kind == "all-reduce" else 1)
    return total


# Reading the text


@dataclass(frozen=True)
class Instruction:
    """One line: `name = type op(args), attributes`."""

    name: str
    type: str
    op: str
    args: tuple[str, ...]
    inside: str  # between the parentheses
    attributes: str
    is_root: bool

    @functools.cached_property
    def called(self) -> dict[str, list[str]]:
        """The computations that it calls, by the attribute that names them."""
        pattern = r"(\w+)=(?:\{((?:%[\w.\-]+(?:, )?)+)\}|(%[\w.\-]+))"
        return {
            name: re.findall(r"%([\w.\-]+)", many or one) for name, many, one in re.findall(pattern, self.attributes)
        }

    @property
    def cycles(self) -> int:
        found = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
        return int(found[1]) if found else 0


class Computation(dict[str, Instruction]):
    """Instructions by name."""

    is_entry = False

    @property
    def root(self) -> Instruction:
        return next(instruction for instruction in self.values() if instruction.is_root)


def parse(text: str) -> dict[str, Computation]:
    """The computations of a program by name."""
    computations: dict[str, Computation] = {}
    current = Computation()  # what stands before the first computation is lost
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line):
            computations[head[2]] = current = Computation()
            current.is_entry = bool(head[1])
        elif instruction := _instruction(line):
            current[instruction.name] = instruction
    return computations


def _instruction(line: str) -> Instruction | None:
    head = re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line)
    if not head:
        return None
    rest = line[head.end() :]
    end = _closing(rest, 0) if rest.startswith("(") else rest.index(" ")
    call = re.match(r" ([\w\-]+)\(", rest[end:])
    if not call:
        return None
    inside = rest[end + call.end() :]
    end_of_args = _closing(f"({inside}", 0) - 2
    args, attributes = inside[:end_of_args], re.sub(r", metadata=\{[^}]*\}", "", inside[end_of_args + 1 :])
    return Instruction(
        head[2], rest[:end], call[1], tuple(re.findall(r"%([\w.\-]+)", args)), args, attributes, bool(head[1])
    )


def _closing(text: str, start: int) -> int:
    """The place after the parenthesis that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i + 1
    return len(text)


_ARRAY = re.compile(r"\b(pred|bf16|[sufc]\d+\w*)\[([\d,]*)\](\{[^}]*\})?")


def elements(type_: str) -> int:
    """The number of elements of an array; of a tuple, that of its first array."""
    found = _ARRAY.search(type_)
    return math.prod(int(n) for n in found[2].split(",") if n) if found else 0


def bytes_of_type(type_: str) -> float:
    """The bytes of an array or a tuple in the memory of the device; those on a TPU's chip are none."""
    total = 0.0
    for dtype, shape, layout in _ARRAY.findall(type_):
        if "T(" in layout and "S(" in layout:
            continue
        width = {"pred": 1, "bf16": 2}.get(dtype) or int(re.findall(r"\d+", dtype)[0]) / 8
        total += width * math.prod(int(n) for n in shape.split(",") if n)
    return total


# The program


def kernels(text: str, unknown_trips: int = UNKNOWN_TRIPS) -> list[Kernel]:
    """What an optimised program launches, `compiled.as_text()`; of a conditional the dearest branch.

    A loop whose length depends on values is taken to run `unknown_trips` times.
    """
    computations = parse(text)

    def walk(name: str, times: int) -> Iterator[Kernel]:
        computation = computations[name]
        for instruction in computation.values():
            op, called = instruction.op, instruction.called
            if op in _FREE or op.endswith("-done"):
                continue
            if op == "custom-call" and any(f'"{free}"' in instruction.attributes for free in _FREE_CALLS):
                continue
            if op == "while":
                yield from walk_loop(name, instruction, times)
            elif op == "conditional":
                branches = [list(walk(branch, times)) for names in called.values() for branch in names]
                yield Kernel(f"{name}/{instruction.name}: the predicate to the host", "copy", "pred[]", 1, times)
                yield from max(branches, key=bytes_of)
            elif op in ("call", "async-start", "call-start"):
                yield from walk((called.get("calls") or called["to_apply"])[0], times)
            else:
                moved = _bytes_of_kernel(computations, computation, instruction)
                result, cycles = _result_of(computation, instruction), instruction.cycles
                yield Kernel(f"{name}/{instruction.name}", op, result, moved, times, cycles)

    def walk_loop(name: str, loop: Instruction, times: int) -> Iterator[Kernel]:
        (body,), (condition,) = loop.called["body"], loop.called["condition"]
        trips = _trips(loop, computations[condition], computations)
        if trips is None:  # the host asks the device each time whether to go on
            trips = unknown_trips
            yield from walk(condition, times * trips)
            yield Kernel(f"{name}/{loop.name}: the predicate to the host", "copy", "pred[]", 1, times * trips)
        yield from walk(body, times * trips)

    (entry,) = (name for name, computation in computations.items() if computation.is_entry)
    return list(walk(entry, 1))


def _trips(loop: Instruction, condition: Computation, computations: dict[str, Computation]) -> int | None:
    """How often a loop runs: XLA knows, or its condition compares a counter with a constant, as those of a scan do."""
    if known := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes):
        return int(known[1])
    if condition.root.op == "fusion":
        arguments = [condition[name] for name in condition.root.args]
        condition = computations[condition.root.called["calls"][0]]
        limits = {p.name: arguments[int(p.inside)] for p in condition.values() if p.op == "parameter"}
    else:
        limits = {}
    if condition.root.op != "compare" or "direction=LT" not in condition.root.attributes:
        return None
    counter, limit = (limits.get(name, condition[name]) for name in condition.root.args)
    return int(limit.inside) if limit.op == "constant" and counter.op == "get-tuple-element" else None


# A kernel


def _result_of(computation: Computation, instruction: Instruction) -> str:
    """The type of what it computes; that of an asynchronous one has its operands as well, so its end is asked."""
    if instruction.op.endswith("-start"):
        ends = [i.type for i in computation.values() if i.op.endswith("-done") and instruction.name in i.args]
        return ends[0] if ends else instruction.type
    return instruction.type


def _bytes_of_kernel(computations: dict[str, Computation], computation: Computation, kernel: Instruction) -> float:
    operands = [computation[name].type if name in computation else "" for name in kernel.args]
    result = _result_of(computation, kernel)
    op = kernel.op.removesuffix("-start")
    if op == "fusion":
        (called,) = kernel.called["calls"]
        return _bytes_of_fusion(computations[called], operands)
    if op in _IN_PLACE:
        new = bytes_of_type(operands[_IN_PLACE[op]])
        return sum(map(bytes_of_type, operands[1:])) + (2 if op == "scatter" else 1) * new
    if op in _OF_A_PART:
        return (
            _bytes_of_as_many(operands[0], elements(result))
            + bytes_of_type(result)
            + sum(map(bytes_of_type, operands[1:]))
        )
    if op == "custom-call":
        result = _without_scratch(computation, kernel)
    read = set(zip(kernel.args, operands, strict=True))
    return bytes_of_type(result) + sum(bytes_of_type(type_) for _, type_ in read)


def _without_scratch(computation: Computation, call: Instruction) -> str:
    """The type of the result without what nobody reads, the scratch space of the library that is called."""
    if call.is_root or not call.type.startswith("("):
        return call.type
    takers = [i for i in computation.values() if call.name in i.args]
    if any(taker.op != "get-tuple-element" for taker in takers):
        return call.type
    return " ".join(taker.type for taker in takers)


def _bytes_of_as_many(type_: str, number: float) -> float:
    """The bytes of that many elements of an array."""
    return bytes_of_type(type_) * min(1, number / max(elements(type_), 1))


def _bytes_of_fusion(fused: Computation, operands: Sequence[str]) -> float:
    needed: dict[str, float] = {}
    written = 0.0
    root = fused.root
    for result in [fused[name] for name in root.args] if root.op == "tuple" else [root]:
        written += _write(fused, result, needed)
    for instruction in reversed(fused.values()):  # users stand after what they use
        _spread(fused, instruction, needed)
    reads = (
        _bytes_of_as_many(operands[int(p.inside)], needed.get(p.name, 0)) for p in fused.values() if p.op == "parameter"
    )
    return written + sum(reads)


def _write(fused: Computation, result: Instruction, needed: dict[str, float]) -> float:
    """The bytes written for a result, all of which is needed then; of an update in place, the part that is new."""
    update = _through(fused, result)
    if update.op not in _IN_PLACE or _through(fused, fused[update.args[0]]).op != "parameter":
        needed[result.name] = elements(result.type)
        return bytes_of_type(result.type)
    for name in update.args[1:]:
        needed[name] = elements(fused[name].type)
    new = fused[update.args[_IN_PLACE[update.op]]]
    again = update.op == "scatter"  # it adds to what is there
    return _bytes_of_as_many(result.type, elements(new.type)) * (2 if again else 1)


def _through(fused: Computation, value: Instruction) -> Instruction:
    while value.op in _SAME_VALUE:
        value = fused[value.args[0]]
    return value


def _spread(fused: Computation, user: Instruction, needed: dict[str, float]) -> None:
    """Adds how many elements of each operand are needed for those that are needed of `user`."""
    number, whole = needed.get(user.name, 0), elements(user.type)
    if not number:
        return
    for i, name in enumerate(user.args):
        size = elements(fused[name].type)
        is_alike = (user.op in _OF_A_PART and i == 0) or size == whole or user.op == "broadcast"
        share = number if is_alike else number * size / whole
        if user.op in ("dot", "convolution", "fusion", "custom-call", "sort"):
            share = size
        needed[name] = min(needed.get(name, 0) + share, size)
