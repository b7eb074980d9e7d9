"""Where a NaN or an infinity came from.

The program of a function is replayed equation by equation, and every value is kept. Then it is walked backwards from
the bad elements of the outputs: which elements of which inputs made them bad? An equation whose bad elements come from
finite inputs is a source.
"""

import contextlib
import dataclasses
import inspect
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import masksafe
from masksafe._core.arguments import as_array, message
from masksafe._core.call_site import is_of_user
from masksafe.testing._blame import Blame, blame
from masksafe.testing._influence import ELEMENTWISE
from masksafe.testing._replay import Operation, Replay, Step, Value, frames_of, place_of
from masksafe.testing._trees import first_index, is_float, only_floats, with_floats

_MASKSAFE = f"{Path(masksafe.__file__).parent}{os.sep}"
_SHOWN = 5  # entries in a part of the printed report


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
    note: str = ""  # what else there is to know

    def __str__(self) -> str:
        values = f" from {', '.join(f'{v:g}' for v in self.inputs)}" if self.inputs else ""
        return (
            f"{self.primitive} gives {self.value:g}{values}, at {self.place}\n"
            f"    {self.count} bad of {self.result}, the first at index {self.index}"
        ) + (f"\n    {self.note}" if self.note else "")


@dataclasses.dataclass(frozen=True)
class NonfiniteReport:
    """What `nonfinite_report` found; it is False if every output is finite, and prints as a short text."""

    outputs: tuple[str, ...]  # those that are not finite
    sources: tuple[NonfiniteSource, ...]  # equations that made bad elements from finite ones
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
            "Harmless, for it makes no output bad": self.harmless,
        }
        lines = [line for title, part in parts.items() if part for line in (f"{title}:", *_listed(part))]
        return "\n".join(lines) or "Everything is finite."


def _listed(part: Sequence[Any]) -> list[str]:
    """The first lines of a part. What a loop makes in each of its steps is told once."""
    groups: dict[Any, list[Any]] = {}
    for entry in part:
        key = (entry.primitive, entry.place) if isinstance(entry, NonfiniteSource) else entry
        groups.setdefault(key, []).append(entry)
    lines = [f"  {first}" + (f"\n    and {len(more)} more times" if more else "") for first, *more in groups.values()]
    rest = len(lines) - _SHOWN
    return lines[:_SHOWN] + ([f"  and {rest} more"] if rest > 0 else [])


def nonfinite_report(fn: Callable[..., Any], *args: Any, grad: bool = False) -> NonfiniteReport:
    """Tells which equation of a function made the NaN or the infinity in its outputs.

    The function is traced and replayed equation by equation, also inside of `jax.jit`, `jax.checkpoint`, custom
    derivatives, `scan`, `while`, `cond`, `custom_linear_solve`, and on every device of a `jax.shard_map`; this is slow,
    and keeps every intermediate value. An equation whose inside could not be looked into says so in its `note`.

    A bad element that a selection or a mask keeps from the outputs is harmless, and listed apart: `jax_debug_nans`
    stops at it. One that is found, and answered with a NaN of its own (`jnp.where(jnp.isfinite(x).all(), y, jnp.nan)`),
    is followed through the predicate to what made it. A NaN that is chosen for the sake of finite values is a source
    itself. If it is masksafe that writes it, for a bad label, the `note` names the op and `masksafe.label_checks`.

    Args:
      fn: any JAX function of `args` that returns an array or a pytree of arrays.
      *args: arrays or pytrees of arrays; close over anything else.
      grad: look at the gradient of the sum of the real outputs with respect to the floats of `args` instead.

    Returns:
      A `NonfiniteReport`. Its `first` has the primitive, the user's line, shape and number of the bad elements, the
      index and value of the first one, the values of the inputs there, and a `note`. Print the report for a short text.

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
    names = iter(_names(args))
    args = jax.tree.map(lambda leaf: as_array("nonfinite_report", f"args{next(names)}", leaf), args)
    if grad:
        fn, args = _gradient(fn, args), (only_floats(args),)
    program, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    arguments = [Value(jnp.asarray(leaf)) for leaf in jax.tree.leaves(args)]
    with _mesh_of(arguments):
        replay = Replay(program, arguments)
        blamed = blame(replay)
    outputs = zip(_names(shapes), replay.outputs, strict=True)
    named_arguments = zip(_names(args), arguments, strict=True)
    return NonfiniteReport(
        tuple(_described(f"output{name}", value) for name, value in outputs if value.is_bad),
        tuple(map(_source, blamed.sources)),
        tuple(map(_source, blamed.from_infinities)),
        tuple(_described(f"argument {name}", value) for name, value in named_arguments if value in blamed.reached),
        tuple(map(_source, blamed.harmless)),
    )


def _mesh_of(arguments: Sequence[Value]) -> contextlib.AbstractContextManager[Any]:
    """The mesh of which the arguments' types speak; single equations have to be told it."""
    for value in arguments:
        mesh = getattr(value.array.sharding, "mesh", None)
        if mesh is not None and mesh.explicit_axes and jax.sharding.get_abstract_mesh().empty:
            context: contextlib.AbstractContextManager[Any] = jax.set_mesh(mesh)
            return context
    return contextlib.nullcontext()


def _gradient(fn: Callable[..., Any], args: tuple[Any, ...]) -> Callable[[Any], Any]:
    def total(floats: Any) -> Any:
        outputs = [out for out in jax.tree.leaves(fn(*with_floats(args, floats))) if is_float(out)]
        if not outputs:
            raise TypeError(message("nonfinite_report", "fn", "no output of floats", "one to differentiate"))
        return sum(map(jnp.sum, outputs))

    return jax.grad(total)


# Telling the user.


def _source(found: Blame) -> NonfiniteSource:
    step, result = found.step, np.asarray(found.step.outputs[found.k].array)
    index = first_index(found.mask)
    is_elementwise = step.operation.name in ELEMENTWISE
    inputs = [np.broadcast_to(v.array, result.shape)[index].item() for v in step.inputs if is_elementwise]
    kind = f"{result.dtype}{list(result.shape)}"
    value, count = result[index].item(), int(found.mask.sum())
    return NonfiniteSource(
        step.operation.name, place_of(step.callers), kind, count, index, value, tuple(inputs), _note(found)
    )


def _note(found: Blame) -> str:
    if isinstance(found.step.operation, Operation) and found.step.operation.hides_a_program:
        return "what is inside of it was not looked into"
    is_written = found.is_constant and any(v.is_constant and v.is_bad for v in found.step.inputs)
    op = _op_of(found.step) if is_written else None
    if op is None:
        return ""
    checks_labels = hasattr(inspect.getmodule(op), "check_integer_labels")
    if not checks_labels or "labels" not in inspect.signature(op).parameters:
        return f"{op.__name__} writes it on purpose"
    return (
        f"{op.__name__} writes it on purpose, for a label out of range or at a masked class: "
        'masksafe.label_checks("raise") tells which'
    )


def _op_of(step: Step) -> Callable[..., Any] | None:
    """The public op of masksafe whose own line, and no user's, is the innermost one behind the step."""
    op = None
    for frame in frames_of(step.callers):
        if is_of_user(frame.file_name):
            break
        name = frame.function_name.partition(".")[0]
        if frame.file_name.startswith(_MASKSAFE):
            op = getattr(masksafe.losses, name, getattr(masksafe, name, op))
    return op if callable(op) else None


def _described(name: str, value: Value) -> str:
    index = first_index(value.bad)
    kind = f"{value.array.dtype}{list(value.array.shape)}"
    return f"{name}, {kind}: {value.bad.sum()} of {value.bad.size} elements, the first at index {index}"


def _names(tree: Any) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
