"""Replays a JAX program equation by equation, and stores every value.

Programs that it calls are replayed as well: jit, checkpoint, custom derivatives, the branch of a cond, every step of a
scan or a while, the solver of a custom_linear_solve, every device of a shard_map. All other equations are run whole.
"""

import functools
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from masksafe._core import programs
from masksafe._core.call_site import is_of_user
from masksafe._core.sharding import is_random_key
from masksafe.testing._devices import EXCHANGES, Device, Exchange, mesh_axes
from masksafe.testing._rules import KINDS, names

# Primitives that only run the program in one of their parameters, and the names of that parameter.
CALLS = names("call closed_call custom_jvp_call custom_vjp_call custom_vmap_call jit remat2")
_PROGRAMS = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")
# Those whose program only combines two numbers: beginnings of names.
_COMBINING = ("reduce", "scatter", "select_and_")
# Those that only change the mesh axes over which an array in a shard_map is said to vary.
RETYPINGS = names("pbroadcast pvary reduced_vary_cast vary_unreduced_cast")
# Those that move an array between devices.
PLACEMENTS = names("device_put reshard sharding_constraint")
# They pass on a NaN that the program wrote as one that it wrote.
ARITHMETIC = names("add div mul sub")


class Value:
    """An array that the program computes, compared by identity."""

    def __init__(self, array: Any, is_written: bool = False) -> None:
        self.array = array
        self.is_captured = is_written and array.ndim > 0  # an array from the function's closure
        self.is_written = is_written
        self.is_constant = is_written and array.ndim == 0  # or computed only from constants
        inexact = jnp.issubdtype(array.dtype, jnp.inexact)
        self.is_discrete = not inexact or self.is_constant  # or computed only from discrete values
        self.bad = ~np.asarray(jnp.isfinite(array)) if inexact else np.zeros(array.shape, bool)
        self.is_bad = bool(inexact and self.bad.any())
        # Whether the program writes a NaN in place of the whole value, or computes it from such a NaN.
        self.is_written_nan = self.is_constant and self.is_bad and bool(self.nan)

    @functools.cached_property
    def nan(self) -> np.ndarray:
        return np.asarray(jnp.isnan(self.array)) if self.is_bad else self.bad


class Operation:
    """The operation of an equation, shared by all of its runs."""

    def __init__(self, equation: Any, in_shard_map: bool) -> None:
        self.name: str = equation.primitive.name
        self.kind = KINDS.get(self.name, "other")
        # The types of arrays in a shard_map name a mesh that a replay does not have.
        left_out = (jax.sharding.Sharding,) if in_shard_map else ()
        self.params = {name: None if isinstance(p, left_out) else p for name, p in equation.params.items()}
        self._primitive = equation.primitive
        self._derivatives: dict[tuple[int, int, bool], Callable[..., Any]] = {}

    def __call__(self, *arrays: Any, **params: Any) -> list[Any]:
        results = self._primitive.bind(*arrays, **self._primitive.get_bind_params(self.params | params))
        return list(results) if self._primitive.multiple_results else [results]

    @property
    def hides_a_program(self) -> bool:
        """Whether the equation runs a program that is not replayed."""
        return any(True for _ in core.jaxprs_in_params(self.params)) and not self.name.startswith(_COMBINING)

    def derivative(self, k: int, i: int, *, is_ahead: bool) -> Callable[..., Any]:
        """The function from a tangent of operand i to that of output k, at `arrays`; back, of a cotangent."""
        # The operands may be floats instead of integers.
        of_integers = not jnp.issubdtype(self.params.get("preferred_element_type") or jnp.float32, jnp.inexact)
        params = {"preferred_element_type": None} if of_integers else {}

        def derivative(along: Any, *arrays: Any) -> Any:
            fn = lambda x: self(*arrays[:i], x, *arrays[i + 1 :], **params)[k]  # noqa: E731
            if is_ahead:
                return jax.jvp(fn, (arrays[i],), (along,))[1]
            return jax.vjp(fn, arrays[i])[1](along)[0]

        return self._derivatives.setdefault((k, i, is_ahead), jax.jit(derivative))


class Structure(NamedTuple):
    """What a replay does beside equations, with whole arrays or parts of them, by kind.

    "part": taking the part `at` of an array, such as the slice of a step of a scan, or what a device of a shard_map
    holds; "gathered": putting parts together, each at one of the places `at`; "choice": choosing a value because of the
    first operand, as a cond chooses a branch, and a while its end.
    """

    name: str
    kind: str
    at: Any = None


class Step:
    """One run of an operation; `callers` are its equation and those that called it, the innermost first."""

    def __init__(self, operation: Any, inputs: list[Value], results: Sequence[Any], callers: tuple[Any, ...]) -> None:
        self.operation = operation
        self.inputs = inputs
        self.callers = callers
        self.outputs = [Value(array) for array in results]
        is_constant = operation.kind != "exchange" and all(v.is_constant for v in inputs)
        is_discrete = all(v.is_discrete for v in inputs)
        for value in self.outputs:
            value.is_constant = is_constant and not self._makes_bad(value)
            value.is_discrete = value.is_discrete or is_discrete
            value.is_written_nan = value.is_bad and self._is_written_nan(value)

    def _makes_bad(self, value: Value) -> bool:
        if value.nan.any():
            return not any(v.nan.any() for v in self.inputs)
        return value.is_bad and not any(v.is_bad for v in self.inputs)

    def _is_written_nan(self, value: Value) -> bool:
        if len(self.inputs) > 1 and self.operation.name in ARITHMETIC:
            return any(v.is_written_nan for v in self.inputs)
        return len(self.inputs) == 1 and self.inputs[0].is_written_nan and bool(value.nan.all())


def frames_of(callers: tuple[Any, ...]) -> Iterator[Any]:
    """The lines of code that led to an equation and its callers, the innermost first."""
    for equation in callers:
        traceback = equation.source_info.traceback
        yield from () if traceback is None else traceback.frames


def place_of(callers: tuple[Any, ...]) -> str:
    """The innermost of these lines that is neither masksafe's nor JAX's."""
    for frame in frames_of(callers):
        if is_of_user(frame.file_name):
            return f"{frame.file_name}:{frame.line_num}, in {frame.function_name}"
    return "an unknown line"


def _is_in_shard_map(callers: tuple[Any, ...]) -> bool:
    return any(caller.primitive.name == "shard_map" for caller in callers[1:])


# The replay of a program yields what its device sends to others (the equation, its callers and its operands), and gets
# what the device receives.
_Sent = tuple[Any, tuple[Any, ...], list[Value]]
_Exchanging = Generator[_Sent, list[Value], list[Value]]


class Replay:
    """The steps of a program with their values, and its outputs."""

    def __init__(self, program: Any, arguments: Sequence[Value]) -> None:
        self.steps: list[Step] = []
        self._operations: dict[int, Operation] = {}
        self._exchanges: dict[int, Exchange] = {}
        self.outputs = _run_to_end(self._replay_program(program, arguments, ()))

    def _replay_program(self, program: Any, arguments: Sequence[Value], callers: tuple[Any, ...]) -> _Exchanging:
        jaxpr, consts = programs.open_program(program)
        captured = [Value(jnp.asarray(c), is_written=True) for c in consts]
        values: dict[Any, Value] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*captured, *arguments], strict=True))

        def read(atom: Any) -> Value:
            if isinstance(atom, core.Literal):
                return Value(jnp.asarray(atom.val, getattr(atom.aval, "dtype", None)), is_written=True)
            return values[atom]

        for equation in jaxpr.eqns:
            inputs = [read(atom) for atom in equation.invars]
            outputs = yield from self._replay_equation(equation, inputs, (equation, *callers))
            values |= dict(zip(equation.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _replay_equation(self, equation: Any, inputs: list[Value], callers: tuple[Any, ...]) -> _Exchanging:
        name, params = equation.primitive.name, equation.params
        if name in _STRUCTURES:
            return (yield from _STRUCTURES[name](self, equation, inputs, callers))
        if name in CALLS:
            program = next(params[key] for key in _PROGRAMS if key in params)
            return (yield from self._replay_program(program, inputs, callers))
        if name in RETYPINGS or (name in PLACEMENTS and _is_in_shard_map(callers)):
            return inputs
        if name in EXCHANGES:
            return (yield equation, callers, inputs)
        return self._run(self._operation(equation, callers), inputs, callers)

    def _operation(self, equation: Any, callers: tuple[Any, ...]) -> Operation:
        if id(equation) not in self._operations:
            if any("Ref" in type(atom.aval).__name__ for atom in [*equation.invars, *equation.outvars]):
                name, place = equation.primitive.name, place_of(callers)
                raise NotImplementedError(
                    f"nonfinite_report: fn uses a mutable reference ({name}, at {place}); "
                    "expected a function without them, which can be replayed."
                )
            self._operations[id(equation)] = Operation(equation, _is_in_shard_map(callers))
        return self._operations[id(equation)]

    def _run(self, operation: Any, inputs: list[Value], callers: tuple[Any, ...]) -> list[Value]:
        return self._note(operation, inputs, operation(*(value.array for value in inputs)), callers)

    def _note(
        self, operation: Any, inputs: list[Value], results: Sequence[Any], callers: tuple[Any, ...]
    ) -> list[Value]:
        self.steps.append(Step(operation, inputs, results, callers))
        return self.steps[-1].outputs

    def _cond(self, equation: Any, inputs: list[Value], callers: tuple[Any, ...]) -> _Exchanging:
        index, *operands = inputs
        outputs = yield from self._replay_program(equation.params["branches"][int(index.array)], operands, callers)
        return self._run_choices("cond", index, outputs, callers)

    def _run_choices(self, name: str, index: Value, values: list[Value], callers: tuple[Any, ...]) -> list[Value]:
        choice = Structure(name, "choice")
        return [self._note(choice, [index, value], [value.array], callers)[0] for value in values]

    def _while(self, equation: Any, inputs: list[Value], callers: tuple[Any, ...]) -> _Exchanging:
        params = equation.params
        first_body_const = params["cond_nconsts"]
        first_carry = first_body_const + params["body_nconsts"]
        condition_consts, body_consts = inputs[:first_body_const], inputs[first_body_const:first_carry]
        carry = inputs[first_carry:]
        while True:
            (goes_on,) = yield from self._replay_program(params["cond_jaxpr"], condition_consts + carry, callers)
            if not bool(goes_on.array):
                return self._run_choices("while", goes_on, carry, callers)
            carry = yield from self._replay_program(params["body_jaxpr"], [*body_consts, *carry], callers)

    def _scan(self, equation: Any, inputs: list[Value], callers: tuple[Any, ...]) -> _Exchanging:
        program, length, is_reversed = (equation.params[name] for name in ("jaxpr", "length", "reverse"))
        # The last inputs and outputs are stacked over the steps. They are counted by their ranks, one more outside than
        # inside, since the names of the parameters that count them differ between versions of JAX.
        step, _ = programs.open_program(program)
        num_xs = _count_stacked(equation.invars, step.invars)
        num_ys = _count_stacked(equation.outvars, step.outvars)
        num_carry = len(equation.outvars) - num_ys
        first_carry = len(inputs) - num_xs - num_carry
        consts, carry, xs = inputs[:first_carry], inputs[first_carry : -num_xs or None], inputs[len(inputs) - num_xs :]
        ys: list[list[Value]] = []
        for at in reversed(range(length)) if is_reversed else range(length):
            part = Structure("scan", "part", at)
            slices = [self._note(part, [x], [x.array[at]], callers)[0] for x in xs]
            results = yield from self._replay_program(program, [*consts, *carry, *slices], callers)
            carry = results[:num_carry]
            ys.append(results[num_carry:])
        stacked = []
        for n, var in enumerate(equation.outvars[num_carry:]):
            column = [y[n] for y in (reversed(ys) if is_reversed else ys)]
            if column:
                array = jnp.stack([value.array for value in column])
                stacked += self._note(Structure("scan", "gathered", range(length)), column, [array], callers)
            else:
                stacked.append(Value(jnp.zeros(var.aval.shape, var.aval.dtype)))
        return [*carry, *stacked]

    def _linear_solve(self, equation: Any, inputs: list[Value], callers: tuple[Any, ...]) -> _Exchanging:
        lengths = equation.params["const_lengths"]
        first = lengths.matvec + lengths.vecmat
        solver_consts, rest = inputs[first : first + lengths.solve], inputs[first + lengths.solve :]
        operands = [*solver_consts, *rest[lengths.transpose_solve :]]
        return (yield from self._replay_program(equation.params["jaxprs"].solve, operands, callers))

    def _shard_map(self, equation: Any, inputs: list[Value], callers: tuple[Any, ...]) -> _Exchanging:
        """Replays the program of each device, or runs the equation whole if an exchange is not supported."""
        yield from ()
        operation, before = self._operation(equation, callers), len(self.steps)
        arrays = operation(*(value.array for value in inputs))
        sizes = mesh_axes(equation.params)
        devices = [Device(sizes, number) for number in range(math.prod(sizes.values()))]
        try:
            outputs = self._run_devices(equation, devices, inputs, callers)
        except (NameError, NotImplementedError, TypeError, ValueError):
            del self.steps[before:]
            return self._run(operation, inputs, callers)
        gathered = []
        for array, spec, parts in zip(arrays, equation.params["out_specs"], zip(*outputs, strict=True), strict=True):
            places = [device.part(array.shape, spec) for device in devices]
            gathered += self._note(Structure("shard_map", "gathered", places), list(parts), [array], callers)
        return gathered

    def _run_devices(
        self, equation: Any, devices: Sequence[Device], inputs: list[Value], callers: tuple[Any, ...]
    ) -> list[list[Value]]:
        """The outputs of each device, all of which are replayed in step from exchange to exchange."""
        running = []
        for device in devices:
            operands: list[Value] = []
            for value, spec in zip(inputs, equation.params["in_specs"], strict=True):
                at = device.part(value.array.shape, spec)
                operands += self._note(Structure("shard_map", "part", at), [value], [_part(value.array, at)], callers)
            running.append(self._replay_program(equation.params["jaxpr"], operands, callers))
        outputs: list[list[Value]] = []
        received: list[Any] = [None] * len(devices)
        while not outputs:
            sent = []
            for program, values in zip(running, received, strict=True):
                try:
                    sent.append(program.send(values))
                except StopIteration as finished:
                    outputs.append(finished.value)
            if not outputs:
                received = self._exchange(sent, mesh_axes(equation.params))
        if len(outputs) < len(devices):
            raise NotImplementedError("Some devices wait for others that are at the end.")
        return outputs

    def _exchange(self, sent: Sequence[_Sent], sizes: dict[str, int]) -> list[list[Value]]:
        """What each device receives after each has sent something."""
        equation, callers, _ = sent[0]
        if any(other is not equation for other, _, _ in sent):
            raise NotImplementedError("Devices are at different places of the program.")
        operation = self._exchanges.setdefault(id(equation), Exchange(equation, sizes))
        operands = list(zip(*(values for _, _, values in sent), strict=True)) if equation.invars else [()]
        received = [self._run(operation, list(values), callers) for values in operands]
        return [list(by_device) for by_device in zip(*received, strict=True)]


# Primitives whose programs need more than a call.
_STRUCTURES: dict[str, Callable[..., _Exchanging]] = {
    "cond": Replay._cond,
    "custom_linear_solve": Replay._linear_solve,
    "scan": Replay._scan,
    "shard_map": Replay._shard_map,
    "while": Replay._while,
}


def _run_to_end(program: _Exchanging) -> list[Value]:
    try:
        next(program)
    except StopIteration as finished:
        outputs: list[Value] = finished.value
        return outputs
    raise NotImplementedError("nonfinite_report: got an exchange between devices outside of jax.shard_map.")


def _part(array: Any, at: tuple[slice, ...]) -> Any:
    """A part of an array, on one device."""
    if is_random_key(array):  # NumPy does not know them
        return jax.device_put(array, min(array.devices(), key=lambda device: device.id))[at]
    return jnp.asarray(np.asarray(array)[at])


def _count_stacked(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    return sum(outer.aval.ndim != inner.aval.ndim for outer, inner in zip(outside, inside, strict=True))
