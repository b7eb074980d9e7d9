"""Replays a JAX program equation by equation, and stores every value.

Programs that it calls are replayed as well: jit, checkpoint, custom derivatives, the branch of a cond, every step of a
scan or a while, the solver of a custom_linear_solve, every device of a shard_map. All other equations are run whole.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from masksafe._core import programs
from masksafe._core.call_site import is_of_user
from masksafe._core.sharding import is_random_key
from masksafe.testing._decisions import NOTHING, find_decided
from masksafe.testing._devices import EXCHANGES, Device, Exchange, mesh_axes
from masksafe.testing._rules import KINDS, names

# Primitives that only run a program, and the names of the parameter that has it.
CALLS = names("call closed_call custom_jvp_call custom_vjp_call custom_vmap_call jit remat2")
_PROGRAMS = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")
# Beginnings of the names of primitives whose program only combines two numbers.
_COMBINING = ("reduce", "scatter", "select_and_")
# Those that only change the mesh axes over which an array in a shard_map is said to vary.
RETYPINGS = names("pbroadcast pvary reduced_vary_cast vary_unreduced_cast")
# Those that move an array between devices.
PLACEMENTS = names("device_put reshard sharding_constraint")
# What these compute from a NaN that the program wrote counts as such a NaN, too.
ARITHMETIC = names("add div mul sub")


Callers = tuple[Any, ...]  # an equation and those that called it, the innermost first


class Value:
    """An array of a program, compared by identity: an argument, a constant, or result `k` of an operation."""

    is_constant: bool  # a number in the program, or computed only from such numbers
    is_discrete: bool  # not of floats, or computed only from discrete values

    def __init__(
        self, array: Any, operation: Any = None, inputs: Any = (), callers: Any = (), k: int = 0, written: bool = False
    ) -> None:
        self.array, self.operation, self.callers, self.k = array, operation, callers, k
        self.inputs: Sequence[Value] = inputs
        # Where the device is along the axes of the shard_map, and of those around it, in which the value is computed.
        self.device: dict[str, int] = next((v.device for v in inputs if v.device), {})
        self.is_written = written
        self.is_captured = written and array.ndim > 0  # an array from the function's closure
        is_inexact, is_number = jnp.issubdtype(array.dtype, jnp.inexact), written and array.ndim == 0
        self.bad = ~np.asarray(jnp.isfinite(array)) if is_inexact else np.zeros(array.shape, bool)
        self.is_bad = bool(is_inexact and self.bad.any())
        from_constants = operation is not None and operation.kind != "exchange" and all(v.is_constant for v in inputs)
        from_discrete = operation is not None and all(v.is_discrete for v in inputs)
        self.is_constant = is_number or (from_constants and not self._is_made_bad())
        self.is_discrete = not is_inexact or is_number or from_discrete
        self.is_written_nan = self.is_bad and self._is_written_nan()
        # Which elements have their value because others are bad.
        self.decided = NOTHING if operation is None else find_decided(self)

    @functools.cached_property
    def nan(self) -> np.ndarray:
        return np.asarray(jnp.isnan(self.array)) if self.is_bad else self.bad

    def _is_made_bad(self) -> bool:
        if self.nan.any():
            return not any(v.nan.any() for v in self.inputs)
        return self.is_bad and not any(v.is_bad for v in self.inputs)

    def _is_written_nan(self) -> bool:
        """Whether the program writes a NaN in place of the whole value, or computes it from such a NaN."""
        if self.operation is None:
            return self.is_constant and bool(self.nan.all())
        if len(self.inputs) > 1 and self.operation.name in ARITHMETIC:
            return any(v.is_written_nan for v in self.inputs)
        return len(self.inputs) == 1 and self.inputs[0].is_written_nan and bool(self.nan.all())


class Operation:
    """The operation of an equation, which all of its runs share."""

    def __init__(self, equation: Any, in_shard_map: bool) -> None:
        self.name: str = equation.primitive.name
        self.kind = KINDS.get(self.name, "other")
        # The types of arrays in a shard_map name a mesh that a replay does not have.
        left_out = (jax.sharding.Sharding,) if in_shard_map else ()
        self.params = {name: None if isinstance(p, left_out) else p for name, p in equation.params.items()}
        self._primitive = equation.primitive

    def __call__(self, *arrays: Any) -> list[Any]:
        return _bound(self._primitive, arrays, self.params)

    @property
    def hides_a_program(self) -> bool:
        """Whether the equation runs a program that is not replayed."""
        return any(True for _ in core.jaxprs_in_params(self.params)) and not self.name.startswith(_COMBINING)

    def derivative(self, k: int, i: int, *, is_ahead: bool) -> Callable[..., Any]:
        """The function from a tangent of operand i to the tangent of output k; back, the same of cotangents."""
        params = self.params
        if not jnp.issubdtype(params.get("preferred_element_type") or jnp.float32, jnp.inexact):
            params = params | {"preferred_element_type": None}  # for operands that are floats instead of integers
        return _derivative(self._primitive, tuple(params.items()), k, i, is_ahead)


@functools.lru_cache(maxsize=1024)  # the same operation in each layer is compiled once
def _derivative(
    primitive: Any, params: tuple[tuple[str, Any], ...], k: int, i: int, is_ahead: bool
) -> Callable[..., Any]:
    def derivative(along: Any, *arrays: Any) -> Any:
        fn = lambda x: _bound(primitive, [*arrays[:i], x, *arrays[i + 1 :]], dict(params))[k]  # noqa: E731
        if is_ahead:
            return jax.jvp(fn, (arrays[i],), (along,))[1]
        return jax.vjp(fn, arrays[i])[1](along)[0]

    return jax.jit(derivative)


def _bound(primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    results = primitive.bind(*operands, **primitive.get_bind_params(params))
    return list(results) if primitive.multiple_results else [results]


class Structure(NamedTuple):
    """What a replay does beside equations, with whole arrays or parts of them, by kind.

    "part": taking the part `at` of an array, such as the slice of a step of a scan, or what a device of a shard_map
    holds; "gathered": putting parts together, each at one of the places `at`; "choice": choosing a value because of the
    first operand, as a cond chooses a branch, and a while its end.
    """

    name: str
    kind: str
    at: Any = None


def frames_of(callers: Callers) -> Iterator[Any]:
    """The lines of code that led to an equation and its callers, the innermost first."""
    for equation in callers:
        traceback = equation.source_info.traceback
        yield from () if traceback is None else traceback.frames


def place_of(callers: Callers) -> str:
    """The innermost line of code that is neither masksafe's nor JAX's."""
    for frame in frames_of(callers):
        if is_of_user(frame.file_name):
            return f"{frame.file_name}:{frame.line_num}, in {frame.function_name}"
    return "an unknown line"


def is_in_reverse_pass(callers: Callers) -> bool:
    """Whether JAX made the equation, or one that called it, by transposing."""
    return any("transpose(" in str(equation.source_info.name_stack) for equation in callers)


def _shard_map_of(callers: Callers) -> Any:
    """The equation of the shard_map in which the innermost caller is, or None."""
    return next((caller for caller in callers[1:] if caller.primitive.name == "shard_map"), None)


Values = list[Value]


class Replay:
    """The values of a program in the order in which they are computed, and its outputs.

    In a shard_map an equation is run for all devices at once, elsewhere for one. Inputs and outputs are lists, with the
    values of each device.
    """

    def __init__(self, program: Any, arguments: Sequence[Value]) -> None:
        self.values: list[Value] = []
        self._operations: dict[int, Any] = {}
        (self.outputs,) = self._program(program, [[*arguments]], ())

    def _program(self, program: Any, arguments: list[Values], callers: Callers) -> list[Values]:
        jaxpr, consts = programs.open_program(program)
        captured = [Value(jnp.asarray(c), written=True) for c in consts]
        variables = [*jaxpr.constvars, *jaxpr.invars]
        known = [dict(zip(variables, [*captured, *values], strict=True)) for values in arguments]

        def read(values: dict[Any, Value], atom: Any) -> Value:
            if isinstance(atom, core.Literal):
                return Value(jnp.asarray(atom.val, getattr(atom.aval, "dtype", None)), written=True)
            return values[atom]

        for equation in jaxpr.eqns:
            inputs = [[read(values, atom) for atom in equation.invars] for values in known]
            outputs = self._equation(equation, inputs, (equation, *callers))
            for values, results in zip(known, outputs, strict=True):
                values |= dict(zip(equation.outvars, results, strict=True))
        return [[read(values, atom) for atom in jaxpr.outvars] for values in known]

    def _equation(self, equation: Any, inputs: list[Values], callers: Callers) -> list[Values]:
        name, params = equation.primitive.name, equation.params
        if name == "shard_map":
            return [self._shard_map(equation, values, callers) for values in inputs]
        if name in _STRUCTURES:
            return _STRUCTURES[name](self, equation, inputs, callers)
        if name in CALLS:
            return self._program(next(params[key] for key in _PROGRAMS if key in params), inputs, callers)
        if name in RETYPINGS or (name in PLACEMENTS and _shard_map_of(callers)):
            return inputs
        if name in EXCHANGES:
            return self._exchange(equation, inputs, callers)
        operation = self._operation(equation, callers)
        return [self._run(operation, values, callers) for values in inputs]

    def _operation(self, equation: Any, callers: Callers) -> Operation:
        if id(equation) not in self._operations:
            if any("Ref" in type(atom.aval).__name__ for atom in [*equation.invars, *equation.outvars]):
                name, place = equation.primitive.name, place_of(callers)
                raise NotImplementedError(
                    f"nonfinite_report: fn uses a mutable reference ({name}, at {place}); "
                    "expected a function without them, which can be replayed."
                )
            self._operations[id(equation)] = Operation(equation, _shard_map_of(callers) is not None)
        return self._operations[id(equation)]

    def _run(self, operation: Any, inputs: Values, callers: Callers) -> Values:
        return self._note(operation, inputs, operation(*(value.array for value in inputs)), callers)

    def _note(self, operation: Any, inputs: Values, results: Sequence[Any], callers: Callers) -> Values:
        outputs = [Value(array, operation, inputs, callers, k) for k, array in enumerate(results)]
        self.values += outputs
        return outputs

    def _choices(self, name: str, predicate: Value, values: Values, callers: Callers) -> Values:
        choice = Structure(name, "choice")
        return [self._note(choice, [predicate, value], [value.array], callers)[0] for value in values]

    def _cond(self, equation: Any, inputs: list[Values], callers: Callers) -> list[Values]:
        outputs: dict[int, Values] = {}
        for number, branch in enumerate(equation.params["branches"]):
            there = [n for n, (index, *_) in enumerate(inputs) if int(index.array) == number]
            results = self._program(branch, [inputs[n][1:] for n in there], callers) if there else []
            outputs |= dict(zip(there, results, strict=True))
        return [self._choices("cond", index, outputs[n], callers) for n, (index, *_) in enumerate(inputs)]

    def _while(self, equation: Any, inputs: list[Values], callers: Callers) -> list[Values]:
        params = equation.params
        first_body_const = params["cond_nconsts"]
        first_carry = first_body_const + params["body_nconsts"]
        carries = {n: values[first_carry:] for n, values in enumerate(inputs)}
        outputs: dict[int, Values] = {}
        while carries:
            arguments = [inputs[n][:first_body_const] + carry for n, carry in carries.items()]
            conditions = self._program(params["cond_jaxpr"], arguments, callers)
            for n, (goes_on,) in zip([*carries], conditions, strict=True):
                if not bool(goes_on.array):
                    outputs[n] = self._choices("while", goes_on, carries.pop(n), callers)
            if carries:
                arguments = [inputs[n][first_body_const:first_carry] + carry for n, carry in carries.items()]
                carries = dict(zip(carries, self._program(params["body_jaxpr"], arguments, callers), strict=True))
        return [outputs[n] for n in range(len(inputs))]

    def _scan(self, equation: Any, inputs: list[Values], callers: Callers) -> list[Values]:
        program, length, is_reversed = (equation.params[name] for name in ("jaxpr", "length", "reverse"))
        # The last inputs and outputs are stacked over the steps. They are counted by their ranks, one more outside than
        # inside, since the names of the parameters that count them differ between versions of JAX.
        step, _ = programs.open_program(program)
        num_carry = len(equation.outvars) - _count_stacked(equation.outvars, step.outvars)
        first_x = len(equation.invars) - _count_stacked(equation.invars, step.invars)
        consts = [values[: first_x - num_carry] for values in inputs]
        carries = [values[first_x - num_carry : first_x] for values in inputs]
        ys: list[list[Values]] = []  # by step and device
        for at in reversed(range(length)) if is_reversed else range(length):
            part = Structure("scan", "part", at)
            xs = [[self._note(part, [x], [x.array[at]], callers)[0] for x in values[first_x:]] for values in inputs]
            arguments = [[*c, *carry, *x] for c, carry, x in zip(consts, carries, xs, strict=True)]
            results = self._program(program, arguments, callers)
            carries = [values[:num_carry] for values in results]
            ys.append([values[num_carry:] for values in results])
        ys, gathered = ys[::-1] if is_reversed else ys, Structure("scan", "gathered", range(length))
        outputs = []
        for n, carry in enumerate(carries):
            stacked = [Value(jnp.zeros(var.aval.shape, var.aval.dtype)) for var in equation.outvars[num_carry:]]
            for i, column in enumerate(zip(*(y[n] for y in ys), strict=True)):
                array = jnp.stack([value.array for value in column])
                (stacked[i],) = self._note(gathered, [*column], [array], callers)
            outputs.append(carry + stacked)
        return outputs

    def _linear_solve(self, equation: Any, inputs: list[Values], callers: Callers) -> list[Values]:
        lengths = equation.params["const_lengths"]
        first = lengths.matvec + lengths.vecmat
        last = first + lengths.solve
        operands = [values[first:last] + values[last + lengths.transpose_solve :] for values in inputs]
        return self._program(equation.params["jaxprs"].solve, operands, callers)

    def _shard_map(self, equation: Any, inputs: Values, callers: Callers) -> Values:
        """Replays the program on all devices, or runs the equation whole if an exchange is not supported."""
        params, operation, before = equation.params, self._operation(equation, callers), len(self.values)
        arrays = operation(*(value.array for value in inputs))
        sizes = mesh_axes(params)
        devices = [Device(sizes, number) for number in range(math.prod(sizes.values()))]
        try:
            pairs = [*zip(inputs, params["in_specs"], strict=True)]
            operands = [[self._part(value, device, spec, callers) for value, spec in pairs] for device in devices]
            outputs = self._program(params["jaxpr"], operands, callers)
        except (NameError, NotImplementedError, TypeError, ValueError):
            del self.values[before:]
            return self._run(operation, inputs, callers)
        gathered = []
        for array, spec, parts in zip(arrays, params["out_specs"], zip(*outputs, strict=True), strict=True):
            places = [device.part(array.shape, spec) for device in devices]
            gathered += self._note(Structure("shard_map", "gathered", places), [*parts], [array], callers)
            gathered[-1].device = next((v.device for v in inputs if v.device), {})
        return gathered

    def _part(self, value: Value, device: Device, spec: Any, callers: Callers) -> Value:
        """The part of a value that a device of a shard_map holds."""
        array, at = value.array, device.part(value.array.shape, spec)
        if is_random_key(array):  # NumPy does not know them
            part = jax.device_put(array, min(array.devices(), key=lambda device: device.id))[at]
        else:
            part = jnp.asarray(np.asarray(array)[at])
        (held,) = self._note(Structure("shard_map", "part", at), [value], [part], callers)
        held.device = value.device | device.place
        return held

    def _exchange(self, equation: Any, inputs: list[Values], callers: Callers) -> list[Values]:
        """What each device receives."""
        shard_map = _shard_map_of(callers)
        if shard_map is None:
            raise NotImplementedError("nonfinite_report: got an exchange between devices outside of jax.shard_map.")
        sizes = mesh_axes(shard_map.params)
        exchange = self._operations.setdefault(id(equation), Exchange(equation, sizes))
        if len(inputs) < exchange.num_devices:
            raise NotImplementedError("Some devices are at another place of the program.")
        operands = [[*values] for values in zip(*inputs, strict=True)] if equation.invars else [[]]
        received = [self._run(exchange, values, callers) for values in operands]
        for number, value in itertools.chain(*map(enumerate, received)):
            value.device = value.device | Device(sizes, number).place
        return [[*values] for values in zip(*received, strict=True)]


# Primitives whose programs need more than a call.
_STRUCTURES: dict[str, Callable[..., list[Values]]] = {
    "cond": Replay._cond,
    "custom_linear_solve": Replay._linear_solve,
    "scan": Replay._scan,
    "while": Replay._while,
}


def _count_stacked(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    return sum(outer.aval.ndim != inner.aval.ndim for outer, inner in zip(outside, inside, strict=True))
