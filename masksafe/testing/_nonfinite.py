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

from masksafe._errors import as_array, message
from masksafe.testing._influence import ELEMENTWISE, ahead, behind
from masksafe.testing._replay import Replay, Step, Value
from masksafe.testing._trees import first_index, is_float, only_floats, with_floats

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
    derivatives, `scan`, `while` and `cond`; this is slow, and keeps every intermediate value. A bad element that a
    selection or a mask keeps from the outputs is harmless, and listed apart: `jax_debug_nans` stops at it.

    Args:
      fn: any JAX function of `args` that returns an array or a pytree of arrays.
      *args: arrays or pytrees of arrays; close over anything else.
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
    names = iter(_names(args))
    args = jax.tree.map(lambda leaf: as_array("nonfinite_report", f"args{next(names)}", leaf), args)
    if grad:
        fn, args = _gradient(fn, args), (only_floats(args),)
    program, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    arguments = [Value(jnp.asarray(leaf)) for leaf in jax.tree.leaves(args)]
    replay = Replay(program, arguments)
    blamed = _blame(replay)
    sources = blamed.sources if blamed.sources or blamed.from_infinities else blamed.written
    outputs = zip(_names(shapes), replay.outputs, strict=True)
    named_arguments = zip(_names(args), arguments, strict=True)
    return NonfiniteReport(
        tuple(_described(f"output{name}", value) for name, value in outputs if value.bad.any()),
        tuple(_source(*blame) for blame in sources),
        tuple(_source(*blame) for blame in blamed.from_infinities),
        tuple(_described(f"argument {name}", value) for name, value in named_arguments if value in blamed.reached),
        tuple(_source(*blame) for blame in _unused_sources(replay, blamed)),
    )


def _gradient(fn: Callable[..., Any], args: tuple[Any, ...]) -> Callable[[Any], Any]:
    def total(floats: Any) -> Any:
        outputs = [out for out in jax.tree.leaves(fn(*with_floats(args, floats))) if is_float(out)]
        if not outputs:
            raise TypeError(message("nonfinite_report", "fn", "no float output", "one, whose gradient is looked at"))
        return sum(map(jnp.sum, outputs))

    return jax.grad(total)


# Walking backwards. A mask says which bad elements of a value reach an output.

_Blame = tuple[Step, int, np.ndarray]  # a step, which of its outputs, and the elements that it made bad


class _Blamed(NamedTuple):
    sources: list[_Blame]
    from_infinities: list[_Blame]
    written: list[_Blame]  # infinities that the program has as constants
    reached: dict[Value, np.ndarray]


def _blame(replay: Replay) -> _Blamed:
    reached: dict[Value, np.ndarray] = {}
    blamed = _Blamed([], [], [], reached)

    def reach(value: Value, mask: np.ndarray) -> None:
        if mask.any():
            reached[value] = reached[value] | mask if value in reached else mask

    for value in replay.outputs:
        reach(value, value.bad)
    for step in reversed(replay.steps):
        for k, value in enumerate(step.outputs):
            if value not in reached:
                continue
            masks = [
                v.bad & behind(step, k, i, reached[value]) if v.bad.any() else v.bad for i, v in enumerate(step.inputs)
            ]
            for operand, mask in zip(step.inputs, masks, strict=True):
                reach(operand, mask)
            _blame_step(blamed, step, k, masks)
    for part in blamed[:3]:
        part.reverse()
    return blamed


def _blame_step(blamed: _Blamed, step: Step, k: int, masks: list[np.ndarray]) -> None:
    """What the step itself is to be blamed for, of the bad elements of output k; `masks` are those behind them."""
    value = step.outputs[k]
    bad = blamed.reached[value]
    nans = [mask & _is_nan(v) for v, mask in zip(step.inputs, masks, strict=True)]
    from_bad, from_nan = (_any_ahead(step, k, marked) for marked in (masks, nans))
    parts = {
        "sources": bad & ~from_bad | bad & _any_ahead(step, k, _of_constants(step, nans)),
        "from_infinities": bad & from_bad & _is_nan(value) & ~from_nan,
        "written": bad & _any_ahead(step, k, _of_constants(step, masks)),
    }
    for name, mask in parts.items():
        if mask.any():
            getattr(blamed, name).append((step, k, mask))


def _any_ahead(step: Step, k: int, masks: list[np.ndarray]) -> np.ndarray:
    """The elements of output k that have a masked element of any operand behind them."""
    found = np.zeros(step.outputs[k].bad.shape, bool)
    for i, mask in enumerate(masks):
        if mask.any():
            found = found | ahead(step, k, i, mask)
    return found


def _of_constants(step: Step, masks: list[np.ndarray]) -> list[np.ndarray]:
    return [mask & v.is_constant for v, mask in zip(step.inputs, masks, strict=True)]


def _is_nan(value: Value) -> np.ndarray:
    if not value.bad.any():
        return value.bad
    return np.asarray(jnp.isnan(value.array))


def _unused_sources(replay: Replay, blamed: _Blamed) -> Iterator[_Blame]:
    """What made bad elements out of finite inputs, none of which reach an output."""
    for step in replay.steps:
        for k, value in enumerate(step.outputs):
            if value not in blamed.reached and value.bad.any() and not any(v.bad.any() for v in step.inputs):
                yield step, k, value.bad


# Telling the user.


def _source(step: Step, k: int, mask: np.ndarray) -> NonfiniteSource:
    result = step.outputs[k].array
    index = first_index(mask)
    is_elementwise = step.operation.name in ELEMENTWISE
    inputs = [jnp.broadcast_to(v.array, result.shape)[index].item() for v in step.inputs if is_elementwise]
    kind = f"{result.dtype}{list(result.shape)}"
    return NonfiniteSource(
        step.operation.name, step.place, kind, int(mask.sum()), index, result[index].item(), tuple(inputs)
    )


def _described(name: str, value: Value) -> str:
    index = first_index(value.bad)
    kind = f"{value.array.dtype}{list(value.array.shape)}"
    return f"{name}, {kind}: {value.bad.sum()} of {value.bad.size} elements, the first at index {index}"


def _names(tree: Any) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
