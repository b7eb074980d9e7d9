"""Where a NaN or an infinity came from.

The program of a function is replayed equation by equation, with every value stored. A walk backwards from the bad
elements of the outputs then finds the elements that made them bad. An equation with bad results from finite inputs is a
source.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import masksafe
from masksafe._core.arguments import as_array, message
from masksafe._core.call_site import is_of_user
from masksafe.testing._blame import Blame, blame
from masksafe.testing._devices import holder_of
from masksafe.testing._replay import Operation, Replay, Value, frames_of, is_in_reverse_pass, place_of
from masksafe.testing._rules import names
from masksafe.testing._trees import check_addressable, first_index, is_float, only_floats, replace_floats

_MASKSAFE = f"{Path(masksafe.__file__).parent}{os.sep}"
_SHOWN = 5  # entries in a part of the printed report


@dataclasses.dataclass(frozen=True)
class NonfiniteSource:
    """An equation that made elements bad.

    Attributes:
      primitive: the name of the JAX primitive.
      place: the user's line of code.
      result: dtype and shape of the result.
      count: the number of bad elements.
      index: the index of the first bad element.
      value: the first bad element.
      inputs: the values of the inputs at that index, for an elementwise equation.
      note: a remark, or "".
      inside_of: the op of masksafe that has the equation, such as "masksafe.softmax"; "" for the user's own equations.
      in_reverse_pass: whether the equation is in the reverse pass of a gradient.
      device: the place, along the mesh axes, of the device that has the first bad element.
    """

    primitive: str
    place: str
    result: str
    count: int
    index: tuple[int, ...]
    value: float
    inputs: tuple[float, ...]
    note: str = ""
    inside_of: str = ""
    in_reverse_pass: bool = False
    device: Mapping[str, int] = dataclasses.field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        values = f" from {', '.join(f'{v:g}' for v in self.inputs)}" if self.inputs else ""
        inside = f" inside of {self.inside_of}" if self.inside_of else ""
        reverse = " in the reverse pass" if self.in_reverse_pass else ""
        device = f" on the device {', '.join(f'{axis}={i}' for axis, i in self.device.items())}" if self.device else ""
        return (
            f"{self.primitive}{inside} gives {self.value:g}{values}{reverse}, at {self.place}\n"
            f"    {self.count} bad of {self.result}, the first at index {self.index}{device}"
        ) + (f"\n    {self.note}" if self.note else "")


@dataclasses.dataclass(frozen=True)
class NonfiniteReport:
    """The result of `nonfinite_report`: false if every output is finite, and printed as a short text.

    Attributes:
      outputs: the outputs that are not finite, each as a line of text.
      sources: the equations that made bad elements from finite ones.
      from_infinities: the equations that made NaN from infinities, such as inf - inf.
      arguments: the arguments that had bad elements from the start and passed them on to an output.
      harmless: the equations whose bad elements reach no output.

    An equation has the fields `primitive`, `place` (the user's line of code), `result` (dtype and shape), `count` (of
    the bad elements), `index` and `value` (of the first one), `inputs` (their values at that index, for an elementwise
    equation), `note`, `inside_of` (the op of masksafe that has the equation, or "" if it is the user's own),
    `in_reverse_pass`, and `device`: where the device that has the first bad element is along the mesh axes, such as
    `{"data": 2}`. In a `jax.shard_map` each device has an entry of its own, with shapes and indices of its part;
    elsewhere they are those of the whole array.

    Example:
      >>> import jax.numpy as jnp
      >>> from masksafe.testing import nonfinite_report
      >>> report = nonfinite_report(jnp.log, jnp.array([1.0, -1.0]))
      >>> print(bool(report), report.sources[0].primitive, report.sources[0].inputs)
      True log (-1.0,)
    """

    outputs: tuple[str, ...]
    sources: tuple[NonfiniteSource, ...]
    from_infinities: tuple[NonfiniteSource, ...]
    arguments: tuple[str, ...]
    harmless: tuple[NonfiniteSource, ...]

    @property
    def first(self) -> NonfiniteSource | None:
        """The first source or, without one, the first equation that made NaN from infinities."""
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
        lines = [line for title, part in parts.items() if part for line in (f"{title}:", *_list_entries(part))]
        return "\n".join(lines) or "Everything is finite."


def _list_entries(part: Sequence[Any]) -> list[str]:
    """The first entries of a part as lines; entries from the steps of one loop share a line."""
    groups: dict[Any, list[Any]] = {}
    for entry in part:
        key = (entry.primitive, entry.inside_of, entry.place) if isinstance(entry, NonfiniteSource) else entry
        groups.setdefault(key, []).append(entry)
    lines = [f"  {first}" + (f"\n    and {len(more)} more times" if more else "") for first, *more in groups.values()]
    rest = len(lines) - _SHOWN
    return lines[:_SHOWN] + ([f"  and {rest} more"] if rest > 0 else [])


def nonfinite_report(fn: Callable[..., Any], *args: Any, grad: bool = False) -> NonfiniteReport:
    """Finds the equation of a function that made the NaN or the infinity in its outputs.

    The function is traced and replayed equation by equation, also inside `jax.jit`, `jax.checkpoint`, custom
    derivatives, `scan`, `while`, `cond`, `custom_linear_solve`, and on every device of a `jax.shard_map`. This is slow,
    and stores every intermediate value. If an equation runs a program that cannot be replayed, its `note` says so.

    A bad element that a selection or a mask keeps away from the outputs is harmless, and listed separately. Some code
    detects a bad element and answers with a NaN of its own, as `jnp.where(jnp.isfinite(x).all(), y, jnp.nan)` does.
    Then the report goes back to the equation that made the bad element. A NaN chosen because of finite values is itself
    a source. If masksafe wrote it because of a bad label, the `note` names the op and `masksafe.label_checks`.

    What JAX computes for a gradient during the forward pass, such as the factor 1 / (2 sqrt(x)), counts as forward, and
    what `jax.checkpoint` computes again as reverse. A `jax.shard_map` that cannot be replayed is run whole, and its
    entries name no equation within it; arrays whose sharding only XLA knows have no `device`.

    Args:
      fn: any JAX function of `args` that returns an array or a pytree of arrays.
      *args: arrays or pytrees of arrays; close over anything else. If other processes share an array, pass a gathered
        copy.
      grad: examine the gradient of the sum of the real outputs with respect to the floats of `args` instead.

    Returns:
      A `NonfiniteReport`, which prints as a short text. Its `first` is the equation to look at.

    Raises:
      TypeError: if an argument is not an array, or `grad` is given and no output is a float array.
      ValueError: if other processes hold a part of an argument.
      NotImplementedError: if `fn` uses a mutable reference, or exchanges data between devices outside `jax.shard_map`.

    Example:
      The value is right, and the gradient is NaN:

      >>> import jax.numpy as jnp
      >>> from masksafe.testing import nonfinite_report
      >>> def entropy(p):
      ...     return -jnp.sum(jnp.where(p > 0, p * jnp.log(p), 0))
      >>> p = jnp.array([0.5, 0.5, 0.0])
      >>> print(nonfinite_report(entropy, p).outputs)
      ()
      >>> report = nonfinite_report(entropy, p, grad=True)
      >>> print(report.first.primitive, report.first.index, report.first.inputs)
      log (2,) (0.0,)

    References:
      `jax_debug_nans <https://docs.jax.dev/en/latest/debugging/flags.html>`_, which stops at the first NaN of any
      primitive.
    """
    check_addressable("nonfinite_report", args=args)
    args = jax.tree_util.tree_map_with_path(
        lambda path, leaf: as_array("nonfinite_report", f"args{jax.tree_util.keystr(path)}", leaf), args
    )
    if grad:
        fn, args = _gradient(fn, args), (only_floats(args),)
    program, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    arguments = [Value(jnp.asarray(leaf)) for leaf in jax.tree.leaves(args)]
    with _mesh_context(arguments):
        replay = Replay(program, arguments)
        blamed = blame(replay)
    outputs = zip(_names(shapes), replay.outputs, strict=True)
    named_arguments = zip(_names(args), arguments, strict=True)
    return NonfiniteReport(
        outputs=tuple(_describe_bad(f"output{name}", x) for name, x in outputs if x.is_bad),
        sources=tuple(map(_describe_source, blamed.sources)),
        from_infinities=tuple(map(_describe_source, blamed.from_infinities)),
        arguments=tuple(_describe_bad(f"argument {name}", x) for name, x in named_arguments if x in blamed.reached),
        harmless=tuple(map(_describe_source, blamed.harmless)),
    )


def _mesh_context(arguments: Sequence[Value]) -> contextlib.AbstractContextManager[Any]:
    """A context with the mesh named in the arguments' types, which single equations need."""
    for value in arguments:
        mesh = getattr(value.array.sharding, "mesh", None)
        if mesh is not None and mesh.explicit_axes and jax.sharding.get_abstract_mesh().empty:
            return jax.set_mesh(mesh)
    return contextlib.nullcontext()


def _gradient(fn: Callable[..., Any], args: tuple[Any, ...]) -> Callable[[Any], Any]:
    def total(floats: Any) -> Any:
        outputs = [out for out in jax.tree.leaves(fn(*replace_floats(args, floats))) if is_float(out)]
        if not outputs:
            raise TypeError(message("nonfinite_report", "fn", "no output of floats", "one to differentiate"))
        return sum(map(jnp.sum, outputs))

    return jax.grad(total)


# The entries of the report.


def _describe_source(found: Blame) -> NonfiniteSource:
    value, result = found.value, np.asarray(found.value.array)
    index, op = first_index(found.mask), _op_of(value)
    is_elementwise = value.operation.kind == "elementwise"
    return NonfiniteSource(
        primitive=value.operation.name,
        place=place_of(value.callers),
        result=_kind(result),
        count=int(found.mask.sum()),
        index=index,
        value=result[index].item(),
        inputs=tuple(np.broadcast_to(v.array, result.shape)[index].item() for v in value.inputs if is_elementwise),
        note=_note(found, op),
        inside_of=f"masksafe.{'losses.' if hasattr(masksafe.losses, op.__name__) else ''}{op.__name__}" if op else "",
        in_reverse_pass=is_in_reverse_pass(value.callers),
        device=value.device or holder_of(value.array, index),
    )


def _note(found: Blame, op: Callable[..., Any] | None) -> str:
    if isinstance(found.value.operation, Operation) and found.value.operation.hides_a_program:
        return "what is inside of it was not looked into"
    is_written = found.is_constant and any(v.is_constant and v.is_bad for v in found.value.inputs)
    if op is None or not is_written:
        return ""
    written = f"{op.__name__} writes it on purpose"
    if op.__name__ not in OF_LABELS:
        return written
    return f'{written}, for a label out of range or at a masked class: masksafe.label_checks("raise") tells which'


# The losses whose labels are numbers of classes.
OF_LABELS = names("""
    ctc_loss ctc_loss_with_forward_probs linear_log_probs linear_softmax_cross_entropy log_probs multiclass_hinge_loss
    multiclass_perceptron_loss multiclass_sparsemax_loss softmax_cross_entropy_with_integer_labels
""")


def _op_of(value: Value) -> Callable[..., Any] | None:
    """The public op of masksafe that made the value, or None if the user's own code made it."""
    op = None
    for frame in frames_of(value.callers):
        if is_of_user(frame.file_name):
            break
        name = frame.function_name.partition(".")[0]
        if frame.file_name.startswith(_MASKSAFE):
            op = getattr(masksafe.losses, name, getattr(masksafe, name, op))
    return op if callable(op) else None


def _describe_bad(name: str, value: Value) -> str:
    index = first_index(value.bad)
    return f"{name}, {_kind(value.array)}: {value.bad.sum()} of {value.bad.size} elements, the first at index {index}"


def _kind(array: Any) -> str:
    return f"{array.dtype}{list(array.shape)}"


def _names(tree: Any) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
