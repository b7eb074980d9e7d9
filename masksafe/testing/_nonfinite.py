"""Where a NaN or an infinity came from.

The program of a function is replayed equation by equation, and every value is kept. Then it is walked backwards from
the bad elements of the outputs: which elements of which inputs made them bad? An equation whose bad elements come from
finite inputs is a source.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from masksafe._errors import is_of_user
from masksafe.testing._trees import first_index, is_float, only_floats, with_floats

# Each element of the result depends on the elements of the operands at the same place alone.
_ELEMENTWISE = frozenset(
    """abs acos acosh add add_any asin asinh atan atan2 atanh cbrt ceil clamp complex conj convert_element_type copy cos
    cosh digamma div erf erf_inv erfc exp exp2 expm1 floor imag integer_pow lgamma log log1p logistic max min mul neg
    nextafter pow real reduce_precision rem round rsqrt sign sin sinh sqrt square stop_gradient sub tan tanh""".split()  # noqa: SIM905
)
# Each element of the result is a sum of elements of the operands, or of their products.
_LINEAR = frozenset(
    """broadcast_in_dim concatenate conv_general_dilated cumsum dot_general dynamic_slice dynamic_update_slice
    expand_dims gather pad ragged_dot reduce_sum reduce_window_sum reshape rev scatter scatter-add slice split squeeze
    stack transpose""".split()  # noqa: SIM905
)
_SHOWN = 5  # entries in a part of the printed report
_UNKNOWN = "an unknown line"
_MOVE = "move"  # of elements between a loop and its steps
_INLINED = ("jaxpr", "call_jaxpr")  # the parameters in which calls keep what they call


@dataclasses.dataclass(frozen=True)
class NonfiniteSource:
    """An equation that made elements bad."""

    primitive: str
    place: str  # the user's line
    result: str  # dtype and shape
    count: int  # of the bad elements
    index: tuple[int, ...]  # of the first one
    value: float
    inputs: tuple[float, ...]  # there, for an elementwise equation

    def __str__(self) -> str:
        values = f" from {', '.join(f'{v:g}' for v in self.inputs)}" if self.inputs else ""
        return (
            f"{self.primitive} gives {self.value:g}{values}, at {self.place}\n"
            f"    {self.count} bad of {self.result}, the first at index {self.index}"
        )


@dataclasses.dataclass(frozen=True)
class NonfiniteReport:
    """What `nonfinite_report` found; it is False if every output is finite, and prints as a short text."""

    outputs: tuple[str, ...]  # those that are not finite
    sources: tuple[NonfiniteSource, ...]  # equations that made bad elements from finite ones, in their order
    from_infinities: tuple[NonfiniteSource, ...]  # equations that made NaN from infinities, such as inf - inf
    arguments: tuple[str, ...]  # that had bad elements already, and handed them on to an output
    harmless: tuple[NonfiniteSource, ...]  # equations whose bad elements reach no output

    @property
    def first(self) -> NonfiniteSource | None:
        """The first source; without one, the first equation that made NaN from infinities."""
        return next(iter(self.sources + self.from_infinities), None)

    def __bool__(self) -> bool:
        return bool(self.outputs)

    def __str__(self) -> str:
        parts = {
            "Not finite": self.outputs,
            "Made by": self.sources,
            "NaN made from infinities by": self.from_infinities,
            "Not finite from the start": self.arguments,
            "Harmless, for it reaches no output": self.harmless,
        }
        lines = [line for title, part in parts.items() if part for line in (f"{title}:", *_listed(part))]
        return "\n".join(lines) or "Everything is finite."


def _listed(part: Sequence[Any]) -> list[str]:
    """The first lines of a part: a loop makes the same bad element in every step."""
    rest = len(part) - _SHOWN
    return [f"  {entry}" for entry in part[:_SHOWN]] + ([f"  and {rest} more"] if rest > 0 else [])


def nonfinite_report(fn: Callable[..., Any], *args: Any, grad: bool = False) -> NonfiniteReport:
    """Tells which equation of a function made the NaN or the infinity in its outputs.

    The function is traced and replayed equation by equation, also inside of `jax.jit`, `jax.checkpoint`, custom
    derivatives, `scan`, `while` and `cond`; this is slow, and keeps every intermediate value. A bad element that a
    selection or a mask keeps from the outputs is harmless, and listed apart: `jax_debug_nans` stops at it.

    Args:
      fn: any JAX function of `args` that returns an array or a pytree of arrays.
      *args: arrays or pytrees of arrays.
      grad: look at the gradient of the sum of the real outputs with respect to the floats of `args` instead.

    Returns:
      A `NonfiniteReport`. Its `first` has the primitive, the user's line, shape and number of the bad elements, the
      index and value of the first one, and the values of the inputs there. Print the report for a short text.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from masksafe.testing import nonfinite_report
      >>> def entropy(p):
      ...     return -jnp.sum(p * jnp.log(p))
      >>> report = nonfinite_report(entropy, jnp.array([0.5, 0.5, 0.0]))
      >>> print(report.first.primitive, report.first.index, report.first.inputs)
      log (2,) (0.0,)

      The right value, and a gradient that is NaN:

      >>> def safe_entropy(p):
      ...     return -jnp.sum(jnp.where(p > 0, p * jnp.log(p), 0))
      >>> print(nonfinite_report(safe_entropy, jnp.array([0.5, 0.5, 0.0])).outputs)
      ()
      >>> print(nonfinite_report(safe_entropy, jnp.array([0.5, 0.5, 0.0]), grad=True).first.primitive)
      log
    """
    if grad:
        fn, args = _gradient(fn, args), (only_floats(args),)
    program, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    arguments = [_Value(jnp.asarray(leaf)) for leaf in jax.tree.leaves(args)]
    steps: list[_Step] = []
    outputs = _replay(program.jaxpr, [_Value(c) for c in program.consts], arguments, steps)
    blamed = _blame(steps, outputs)
    names = [_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(shapes)]
    return NonfiniteReport(
        tuple(
            _described(f"output{name}", value) for name, value in zip(names, outputs, strict=True) if value.bad.any()
        ),
        tuple(_source(step, k, mask) for step, k, mask in blamed.sources),
        tuple(_source(step, k, mask) for step, k, mask in blamed.from_infinities),
        tuple(
            _described(f"argument {_name(path)}", value)
            for (path, _), value in zip(jax.tree_util.tree_leaves_with_path(args), arguments, strict=True)
            if value in blamed.reached
        ),
        tuple(_source(step, k, mask) for step, k, mask in _unused_sources(steps, blamed)),
    )


def _gradient(fn: Callable[..., Any], args: tuple[Any, ...]) -> Callable[[Any], Any]:
    def total(floats: Any) -> Any:
        outputs = jax.tree.leaves(fn(*with_floats(args, floats)))
        return sum(jnp.sum(out) for out in outputs if is_float(out))

    return jax.grad(total)


# Replaying.


class _Value:
    """An array that the program computes; it is told apart from equal ones."""

    def __init__(self, array: Any, is_constant: bool = False) -> None:
        self.array = array
        self.is_constant = is_constant
        inexact = jnp.issubdtype(array.dtype, jnp.inexact)
        self.bad = ~np.asarray(jnp.isfinite(array)) if inexact else np.zeros(array.shape, bool)


class _Step(NamedTuple):
    """An equation that was run; moves of data between a scan and its steps have no primitive to bind."""

    name: str
    place: str
    inputs: list[_Value]
    outputs: list[_Value]
    bind: Callable[..., Any]


def _replay(jaxpr: Any, consts: list[_Value], arguments: list[_Value], steps: list[_Step]) -> list[_Value]:
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))

    def read(atom: Any) -> _Value:
        if isinstance(atom, core.Literal):
            return _Value(jnp.asarray(atom.val, getattr(atom.aval, "dtype", None)), is_constant=True)
        value: _Value = values[atom]
        return value

    for equation in jaxpr.eqns:
        outputs = _run(equation, [read(atom) for atom in equation.invars], steps)
        values |= dict(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _run(equation: Any, inputs: list[_Value], steps: list[_Step]) -> list[_Value]:
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return _run_scan(equation, inputs, steps)
    if name == "while":
        return _run_while(params, inputs, steps)
    if name == "cond":
        branch = params["branches"][int(inputs[0].array)]
        return _call(branch, inputs[1:], steps, _place(equation))
    called = next((params[key] for key in _INLINED if key in params), None)
    if called is not None and name != "shard_map":
        return _call(called, inputs, steps, _place(equation))
    return _bind(equation, inputs, steps)


def _call(called: Any, inputs: list[_Value], steps: list[_Step], place: str = _UNKNOWN) -> list[_Value]:
    """Replays a part of the program; what has no line of the user's has the place where it is called."""
    before = len(steps)
    if isinstance(called, core.ClosedJaxpr):
        consts = [_Value(jnp.asarray(c)) for c in called.consts]
        outputs = _replay(called.jaxpr, consts, inputs, steps)
    else:
        outputs = _replay(called, [], inputs, steps)
    steps[before:] = [s._replace(place=place) if s.place == _UNKNOWN else s for s in steps[before:]]
    return outputs


def _bind(equation: Any, inputs: list[_Value], steps: list[_Step]) -> list[_Value]:
    params = equation.primitive.get_bind_params(equation.params)

    def bind(*arrays: Any) -> list[Any]:
        results = equation.primitive.bind(*arrays, **params)
        return list(results) if equation.primitive.multiple_results else [results]

    outputs = [_Value(array) for array in bind(*(value.array for value in inputs))]
    steps.append(_Step(equation.primitive.name, _place(equation), inputs, outputs, bind))
    return outputs


def _move(fn: Callable[..., Any], inputs: list[_Value], steps: list[_Step]) -> _Value:
    """The result of a function that only moves elements about."""
    output = _Value(fn(*(value.array for value in inputs)))
    steps.append(_Step(_MOVE, "", inputs, [output], lambda *arrays: [fn(*arrays)]))
    return output


def _run_scan(equation: Any, inputs: list[_Value], steps: list[_Step]) -> list[_Value]:
    params, body = equation.params, equation.params["jaxpr"].jaxpr
    # Only what is stacked over the steps has another rank outside than inside: the last inputs and the last outputs.
    num_xs = sum(outer.aval.ndim != inner.aval.ndim for outer, inner in zip(equation.invars, body.invars, strict=True))
    num_ys = sum(
        outer.aval.ndim != inner.aval.ndim for outer, inner in zip(equation.outvars, body.outvars, strict=True)
    )
    num_carry = len(equation.outvars) - num_ys
    num_consts = len(inputs) - num_xs - num_carry
    consts, carry, xs = (
        inputs[:num_consts],
        inputs[num_consts : num_consts + num_carry],
        inputs[num_consts + num_carry :],
    )
    ys: list[list[_Value]] = []
    order = range(params["length"])
    for i in reversed(order) if params["reverse"] else order:
        slices = [_move(lambda x, i=i: x[i], [x], steps) for x in xs]
        results = _call(params["jaxpr"], [*consts, *carry, *slices], steps)
        carry, y = results[:num_carry], results[num_carry:]
        ys.append(y)
    if params["reverse"]:
        ys.reverse()
    empty = [_Value(jnp.zeros(var.aval.shape, var.aval.dtype)) for var in equation.outvars[num_carry:]]
    columns = zip(*ys, strict=True) if ys else None
    stacked = empty if columns is None else [_move(lambda *a: jnp.stack(a), list(c), steps) for c in columns]
    return [*carry, *stacked]


def _run_while(params: dict[str, Any], inputs: list[_Value], steps: list[_Step]) -> list[_Value]:
    of_condition, of_body = params["cond_nconsts"], params["body_nconsts"]
    condition_consts, body_consts = inputs[:of_condition], inputs[of_condition : of_condition + of_body]
    carry = inputs[of_condition + of_body :]
    condition = core.jaxpr_as_fun(params["cond_jaxpr"])
    while bool(condition(*(value.array for value in condition_consts + carry))[0]):
        carry = _call(params["body_jaxpr"], [*body_consts, *carry], steps)
    return carry


def _place(equation: Any) -> str:
    """The innermost line of the equation's traceback that is neither masksafe's nor JAX's."""
    traceback = equation.source_info.traceback
    frames = [] if traceback is None else traceback.frames
    for frame in frames:
        if is_of_user(frame.file_name):
            return f"{frame.file_name}:{frame.line_num}, in {frame.function_name}"
    return _UNKNOWN


# Walking backwards. A mask says which bad elements of a value reach an output.

_Blame = tuple[_Step, int, np.ndarray]  # a step, which of its outputs, and the elements that it made bad


class _Blamed(NamedTuple):
    sources: list[_Blame]
    from_infinities: list[_Blame]
    reached: dict[_Value, np.ndarray]


def _blame(steps: Sequence[_Step], outputs: Sequence[_Value]) -> _Blamed:
    reached: dict[_Value, np.ndarray] = {}
    blamed = _Blamed([], [], reached)

    def reach(value: _Value, mask: np.ndarray) -> None:
        if mask.any():
            reached[value] = reached.get(value, False) | mask

    for value in outputs:
        reach(value, value.bad)
    for step in reversed(steps):
        for k, value in enumerate(step.outputs):
            if value not in reached:
                continue
            masks = _elements_behind(step, k, reached[value])
            for operand, mask in zip(step.inputs, masks, strict=True):
                reach(operand, mask)
            made = reached[value] & ~_spread(step, masks, value.bad.shape)
            if any(
                v.is_constant and np.isnan(np.asarray(v.array))[mask].any()
                for v, mask in zip(step.inputs, masks, strict=True)
            ):
                made = reached[value]  # a NaN that is written in the program
            if made.any():
                blamed.sources.insert(0, (step, k, made))
            made_nan = reached[value] & ~made & np.isnan(np.asarray(value.array)) & ~_has_nan(step, value.bad.shape)
            if made_nan.any() and step.name in _ELEMENTWISE:
                blamed.from_infinities.insert(0, (step, k, made_nan))
    return blamed


def _elements_behind(step: _Step, k: int, mask: np.ndarray) -> list[np.ndarray]:
    """For each input, its bad elements on which the masked elements of output k depend."""
    if step.name == "select_n":
        which, *cases = step.inputs
        chosen = np.broadcast_to(np.asarray(which.array).astype(int), mask.shape)
        return [
            which.bad,
            *(case.bad & _unbroadcast(mask & (chosen == i), case.bad.shape) for i, case in enumerate(cases)),
        ]
    if step.name in _ELEMENTWISE:
        return [v.bad & _unbroadcast(mask, v.bad.shape) for v in step.inputs]
    return [_touched(step, k, i, mask) if v.bad.any() else v.bad for i, v in enumerate(step.inputs)]


def _unbroadcast(mask: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A mask of `shape`, True where any element is that it is broadcast to."""
    kept = np.asarray(mask.any(tuple(range(mask.ndim - len(shape)))))
    return np.asarray(kept.any(tuple(a for a, n in enumerate(shape) if n == 1), keepdims=True))


def _touched(step: _Step, k: int, i: int, mask: np.ndarray) -> np.ndarray:
    """The bad elements of input i that take part in the masked elements of output k."""
    bad = step.inputs[i].bad
    if step.name not in _LINEAR and step.name != _MOVE:
        return bad
    # The derivative is positive for each element that takes part, since every operand is replaced by ones.
    ones = [jnp.ones_like(v.array) if is_float(v.array) else v.array for v in step.inputs]
    output, pull_back = jax.vjp(lambda x: step.bind(*ones[:i], x, *ones[i + 1 :])[k], ones[i])
    (weights,) = pull_back(jnp.asarray(mask, output.dtype))
    return np.asarray(bad & (np.asarray(weights) != 0))


def _spread(step: _Step, masks: list[np.ndarray], shape: tuple[int, ...]) -> Any:
    """Which elements of the output have a bad element behind them."""
    if step.name == "select_n" or step.name in _ELEMENTWISE:
        return np.logical_or.reduce([np.broadcast_to(mask, shape) for mask in masks])
    return np.broadcast_to(any(mask.any() for mask in masks), shape)


def _has_nan(step: _Step, shape: tuple[int, ...]) -> Any:
    if step.name not in _ELEMENTWISE:
        return np.ones(shape, bool)
    floats = [np.asarray(v.array) for v in step.inputs if is_float(v.array)]
    return np.logical_or.reduce([np.broadcast_to(np.isnan(a), shape) for a in floats])


def _unused_sources(steps: Sequence[_Step], blamed: _Blamed) -> Iterator[_Blame]:
    """What made bad elements out of finite inputs, none of which reach an output."""
    for step in steps:
        for k, value in enumerate(step.outputs):
            if (
                step.name
                and value not in blamed.reached
                and value.bad.any()
                and not any(v.bad.any() for v in step.inputs)
            ):
                yield step, k, value.bad


# Telling the user.


def _source(step: _Step, k: int, mask: np.ndarray) -> NonfiniteSource:
    result = step.outputs[k].array
    index = first_index(mask)
    is_elementwise = step.name in _ELEMENTWISE
    inputs = [np.asarray(v.array) for v in step.inputs] if is_elementwise else []
    values = tuple(float(np.broadcast_to(a, result.shape)[index]) for a in inputs)
    value = float(np.asarray(result)[index])
    return NonfiniteSource(
        step.name, step.place, f"{result.dtype}{list(result.shape)}", int(mask.sum()), index, value, values
    )


def _described(name: str, value: _Value) -> str:
    index = first_index(value.bad)
    kind = f"{value.array.dtype}{list(value.array.shape)}"
    return f"{name}, {kind}: {value.bad.sum()} of {value.bad.size} elements, the first at index {index}"


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path)
