"""Validation of labels, switched on and off by `masksafe.label_checks`.

A loss calls one function here, on its checked and broadcast arguments, outside of its custom rule: within one,
`checkify` would lose the check in a gradient.
"""

import math
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import checkify

from masksafe._errors import is_of_user
from masksafe._moments import first_of, selected
from masksafe._switches import label_check_mode
from masksafe._typing import Array, Axes

# How far from 1 a row of a distribution may sum: about ten roundings of a probability of 1.
_TOLERANCE = {"float64": 1e-6, "float32": 1e-4, "float16": 1e-2, "bfloat16": 4e-2}


class _Finding(NamedTuple):
    """Labels that are bad, out of those that count; `values` are what to show of them."""

    bad: Array
    checked: Array
    values: Array
    what: str


def check_integer_labels(op: str, labels: Array, where: Array | None, axes: Axes, shape: tuple[int, ...]) -> None:
    """Reports unmasked labels outside [0, num_classes), and labels at a masked class, as the switch says.

    Args:
      op: the name of the loss.
      labels: integers, of the shape of the loss.
      where: booleans that broadcast to the logits, at their rank; or None.
      axes: the axes of the classes, in the order in which a label counts them.
      shape: that of the logits.
    """
    if label_check_mode() == "off":
        return
    num_classes = math.prod(shape[a] for a in axes)
    largest = min(num_classes - 1, int(jnp.iinfo(labels.dtype).max))
    in_range = (labels >= 0) & (labels <= largest)
    alive = jnp.ones(labels.shape, bool) if where is None else jnp.broadcast_to(jnp.any(where, axes), labels.shape)
    _report(op, _Finding(alive & ~in_range, alive, labels, f"labels are outside [0, {num_classes})"))
    if where is not None and any(where.shape[a] > 1 for a in axes):
        at_unmasked = jnp.any(where & (jnp.expand_dims(labels, axes) == _class_index(axes, shape)), axes)
        _report(op, _Finding(alive & in_range & ~at_unmasked, alive, labels, "labels are at a masked class"))


def check_distributions(op: str, labels: Array, where: Array | None, axes: Axes) -> None:
    """Reports unmasked labels that are negative or not finite, and rows of them that sum to neither 1 nor 0.

    Args:
      op: the name of the loss.
      labels: floats, of the shape of the logits.
      where: booleans that broadcast to it, at its rank; or None.
      axes: the axes of the classes.
    """
    if label_check_mode() == "off":
        return
    unmasked = jnp.broadcast_to(True if where is None else where, labels.shape)
    valid = (labels >= 0) & (labels < jnp.inf)
    _report(op, _Finding(unmasked & ~valid, unmasked, labels, "labels are negative or not finite"))
    sums = jnp.sum(selected(labels, unmasked & valid), axes, dtype=jnp.promote_types(labels.dtype, jnp.float32))
    tolerance = _TOLERANCE.get(labels.dtype.name, 0.1)
    is_sound = jnp.all(valid | ~unmasked, axes)
    strange = is_sound & (sums != 0) & (abs(sums - 1) > tolerance)
    _report(op, _Finding(strange, jnp.any(unmasked, axes), sums, "rows of labels sum to neither 1 nor 0"))


def _class_index(axes: Axes, shape: tuple[int, ...]) -> Array:
    """The number of each class, at the rank of the logits."""
    sizes = [shape[a] for a in axes]
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    one = [1] * len(shape)
    index = jnp.zeros(one, jnp.int32)
    for axis, size, stride in zip(axes, sizes, strides, strict=True):
        index += stride * jnp.arange(size).reshape(*one[:axis], size, *one[axis + 1 :])
    return index


# Telling the user.


def _report(op: str, finding: _Finding) -> None:
    """Raises or stages the error, if anything is bad."""
    text = f"{op}: {{bad}} of {{checked}} {finding.what}; first at {_index_template(finding.bad.ndim)}: {{value}}"
    text += _escaped(f" (called {_place_of_call()})")
    details = _details(finding)
    any_bad = jnp.any(finding.bad)
    if label_check_mode() == "checkify":
        checkify.check(~any_bad, text, **details)
    elif isinstance(any_bad, jax.core.Tracer):
        _raise_when_run(any_bad, text, details)
    elif any_bad:
        raise ValueError(_filled(text, details))


def _index_template(ndim: int) -> str:
    """Such as "({i0}, {i1})", in the form of Python's tuples."""
    names = ", ".join(f"{{i{axis}}}" for axis in range(ndim))
    return f"({names},)" if ndim == 1 else f"({names})"


def _details(finding: _Finding) -> dict[str, Any]:
    """Counts, and index and value of the first bad one."""
    bad = finding.bad
    first, is_first = first_of(bad)
    value = jnp.sum(jnp.where(is_first, finding.values, jnp.zeros((), finding.values.dtype)))
    index = {
        f"i{axis}": first // math.prod(bad.shape[axis + 1 :]) % max(1, bad.shape[axis]) for axis in range(bad.ndim)
    }
    return {"bad": jnp.sum(bad), "checked": jnp.sum(finding.checked), "value": value, **index}


def _raise_when_run(any_bad: Array, text: str, details: dict[str, Any]) -> None:
    """Makes the compiled program fail with the text.

    A callback of `jax.debug.callback` that raises fails the program in jit, grad, vmap, scan and remat, on every
    platform, and is not removed although nothing depends on it, as one of `jax.pure_callback` would be. Behind a
    `cond` it costs nothing while labels are good; under `vmap`, where a `cond` runs both sides, it looks itself.
    """

    def fail(any_bad: Any, details: dict[str, Any]) -> None:
        if any_bad:
            raise ValueError(_filled(text, details))

    def call() -> None:
        jax.debug.callback(fail, any_bad, details)

    lax.cond(any_bad, call, lambda: None)


def _filled(text: str, details: dict[str, Any]) -> str:
    return text.format(**{name: value.item() for name, value in details.items()})


def _place_of_call() -> str:
    """The innermost line of the call stack that is neither masksafe's nor JAX's."""
    frame = sys._getframe()
    while frame.f_back is not None and not is_of_user(frame.f_code.co_filename):
        frame = frame.f_back
    return f"at {frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")
