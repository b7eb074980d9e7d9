"""A JAX program replayed equation by equation, with every value kept.

What a program calls is replayed as well: jit, checkpoint, custom derivatives, the branch of a cond, every step of a
scan or a while. All other equations are run as they are.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from masksafe._errors import is_of_user

UNKNOWN_PLACE = "an unknown line"
# Primitives that do nothing but run the program in one of their parameters.
_CALLS = frozenset(
    """call checkpoint closed_call core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr custom_vmap_call jit
    pjit remat remat2""".split()  # noqa: SIM905
)
_PROGRAMS = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")


class Value:
    """An array that the program computes; it is told apart from equal ones."""

    def __init__(self, array: Any, is_constant: bool = False) -> None:
        self.array = array
        self.is_constant = is_constant  # and so written in the program
        inexact = jnp.issubdtype(array.dtype, jnp.inexact)
        self.bad = ~np.asarray(jnp.isfinite(array)) if inexact else np.zeros(array.shape, bool)


class Operation:
    """What an equation does, however often it is run."""

    def __init__(self, equation: Any) -> None:
        self.name: str = equation.primitive.name
        self.params: dict[str, Any] = equation.params
        self.place = _place(equation)
        self._primitive = equation.primitive
        self._pull_backs: dict[tuple[int, int], Callable[..., Any]] = {}
        self._push_forwards: dict[tuple[int, int], Callable[..., Any]] = {}

    def __call__(self, *arrays: Any) -> list[Any]:
        results = self._primitive.bind(*arrays, **self._primitive.get_bind_params(self.params))
        return list(results) if self._primitive.multiple_results else [results]

    def pull_back(self, k: int, i: int) -> Callable[..., Any]:
        """The cotangent of operand i at `arrays`, of one of output k."""

        def cotangent(d_out: Any, *arrays: Any) -> Any:
            return jax.vjp(self._of_one(k, i, arrays), arrays[i])[1](d_out)[0]

        return self._pull_backs.setdefault((k, i), jax.jit(cotangent))

    def push_forward(self, k: int, i: int) -> Callable[..., Any]:
        """The tangent of output k at `arrays`, of one of operand i."""

        def tangent(d_in: Any, *arrays: Any) -> Any:
            return jax.jvp(self._of_one(k, i, arrays), (arrays[i],), (d_in,))[1]

        return self._push_forwards.setdefault((k, i), jax.jit(tangent))

    def _of_one(self, k: int, i: int, arrays: Sequence[Any]) -> Callable[[Any], Any]:
        return lambda x: self(*arrays[:i], x, *arrays[i + 1 :])[k]


class Slice:
    """Taking element `at` of the first axis, as a scan does with what it goes through."""

    name = "scan"

    def __init__(self, at: int) -> None:
        self.at = at

    def __call__(self, array: Any) -> list[Any]:
        return [array[self.at]]


class Stack:
    """Stacking on a new first axis, as a scan does with what its steps return."""

    name = "scan"

    def __call__(self, *arrays: Any) -> list[Any]:
        return [jnp.stack(arrays)]


class Step:
    """An operation that was run."""

    def __init__(self, operation: Operation | Slice | Stack, place: str, inputs: list[Value]) -> None:
        self.operation = operation
        self.place = place
        self.inputs = inputs
        self.outputs = [Value(array) for array in operation(*(value.array for value in inputs))]


class Replay:
    """The steps of a program with their values, and its outputs."""

    def __init__(self, program: core.ClosedJaxpr, arguments: Sequence[Value]) -> None:
        self.steps: list[Step] = []
        self._operations: dict[int, Operation] = {}
        self.outputs = self._program(program, arguments)

    def _program(self, program: Any, arguments: Sequence[Value]) -> list[Value]:
        consts = [Value(jnp.asarray(c), is_constant=True) for c in getattr(program, "consts", ())]
        jaxpr = getattr(program, "jaxpr", program)
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))

        def read(atom: Any) -> Value:
            if isinstance(atom, core.Literal):
                return Value(jnp.asarray(atom.val, getattr(atom.aval, "dtype", None)), is_constant=True)
            value: Value = values[atom]
            return value

        for equation in jaxpr.eqns:
            outputs = self._equation(equation, [read(atom) for atom in equation.invars])
            values |= dict(zip(equation.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, equation: Any, inputs: list[Value]) -> list[Value]:
        name, params = equation.primitive.name, equation.params
        if name == "scan":
            return self._scan(equation, inputs)
        if name == "while":
            return self._while(params, inputs)
        if name == "cond":
            return self._called(params["branches"][int(inputs[0].array)], inputs[1:], _place(equation))
        if name in _CALLS:
            program = next(params[key] for key in _PROGRAMS if key in params)
            return self._called(program, inputs, _place(equation))
        if any("Ref" in type(atom.aval).__name__ for atom in [*equation.invars, *equation.outvars]):
            raise NotImplementedError(
                f"nonfinite_report: fn uses a mutable reference ({name}, at {_place(equation)}); "
                "expected a function without them, which can be replayed."
            )
        operation = self._operations.setdefault(id(equation), Operation(equation))
        return self._run(operation, inputs, operation.place)

    def _run(self, operation: Operation | Slice | Stack, inputs: list[Value], place: str = "") -> list[Value]:
        self.steps.append(Step(operation, place, inputs))
        return self.steps[-1].outputs

    def _called(self, program: Any, inputs: list[Value], place: str) -> list[Value]:
        """What has no line of the user's gets the place where it is called."""
        before = len(self.steps)
        outputs = self._program(program, inputs)
        for step in self.steps[before:]:
            step.place = place if step.place == UNKNOWN_PLACE else step.place
        return outputs

    def _scan(self, equation: Any, inputs: list[Value]) -> list[Value]:
        program, length, is_reversed = (equation.params[name] for name in ("jaxpr", "length", "reverse"))
        # Counted by their ranks, since the names of the other parameters change from version to version of JAX: what is
        # stacked over the steps has one axis more outside than inside. It is last among the inputs and the outputs.
        num_xs = _number_stacked(equation.invars, program.jaxpr.invars)
        num_ys = _number_stacked(equation.outvars, program.jaxpr.outvars)
        num_carry = len(equation.outvars) - num_ys
        first_carry = len(inputs) - num_xs - num_carry
        consts, carry, xs = inputs[:first_carry], inputs[first_carry : -num_xs or None], inputs[len(inputs) - num_xs :]
        ys: list[list[Value]] = [[] for _ in range(num_ys)]
        for at in reversed(range(length)) if is_reversed else range(length):
            slices = [self._run(Slice(at), [x])[0] for x in xs]
            results = self._called(program, [*consts, *carry, *slices], _place(equation))
            carry = results[:num_carry]
            for column, y in zip(ys, results[num_carry:], strict=True):
                column.insert(0, y) if is_reversed else column.append(y)
        if length == 0:
            stacked = [Value(jnp.zeros(var.aval.shape, var.aval.dtype)) for var in equation.outvars[num_carry:]]
        else:
            stacked = [self._run(Stack(), column)[0] for column in ys]
        return [*carry, *stacked]

    def _while(self, params: dict[str, Any], inputs: list[Value]) -> list[Value]:
        of_condition, of_body = params["cond_nconsts"], params["body_nconsts"]
        condition_consts, body_consts = inputs[:of_condition], inputs[of_condition : of_condition + of_body]
        carry = inputs[of_condition + of_body :]
        condition = core.jaxpr_as_fun(params["cond_jaxpr"])
        while bool(condition(*(value.array for value in condition_consts + carry))[0]):
            carry = self._called(params["body_jaxpr"], [*body_consts, *carry], UNKNOWN_PLACE)
        return carry


def _number_stacked(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    return sum(outer.aval.ndim != inner.aval.ndim for outer, inner in zip(outside, inside, strict=True))


def _place(equation: Any) -> str:
    """The innermost line of the equation's traceback that is neither masksafe's nor JAX's."""
    traceback = equation.source_info.traceback
    frames = [] if traceback is None else traceback.frames
    for frame in frames:
        if is_of_user(frame.file_name):
            return f"{frame.file_name}:{frame.line_num}, in {frame.function_name}"
    return UNKNOWN_PLACE
