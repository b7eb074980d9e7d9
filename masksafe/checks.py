"""Validation of labels, switched on and off by `masksafe.label_checks`.

A loss calls one function here, on its checked and broadcast arguments, outside of its custom rule: within one,
`checkify` would lose the check in a gradient.
"""

import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import checkify

from masksafe import _shards
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


def check_integer_labels(
    op: str, labels: Array, where: Array | None, axes: Axes, shape: tuple[int, ...], axis_name: str | None
) -> Array | None:
    """Reports unmasked labels outside [0, num_classes), and labels at a masked class, as the switch says.

    Args:
      op: the name of the loss.
      labels: integers of 32 bits at least, of the shape of the loss.
      where: booleans that broadcast to the logits, at their rank; or None.
      axes: the axes of the classes, in the order in which a label counts them.
      shape: that of the logits.
      axis_name: the mesh axis over which `jax.shard_map` splits the classes, or None.

    Returns:
      The rows to be spoiled, for `spoiled`.
    """
    if label_check_mode() == "off":
        return None
    classes_here = math.prod(shape[a] for a in axes)
    num_classes = _shards.of_all(axis_name, classes_here)
    in_range = (labels >= 0) & (labels < num_classes)
    any_class = functools.partial(_any_class, axis_name, axes)
    alive = jnp.ones(labels.shape, bool) if where is None else jnp.broadcast_to(any_class(where), labels.shape)
    findings = [_Finding(alive & ~in_range, alive, labels, f"labels are outside [0, {num_classes})")]
    if where is not None and any(where.shape[a] > 1 for a in axes):
        own = _shards.local_class(axis_name, labels, classes_here)
        at_unmasked = any_class(where & (jnp.expand_dims(own, axes) == _class_index(axes, shape)))
        findings.append(_Finding(alive & in_range & ~at_unmasked, alive, labels, "labels are at a masked class"))
    return _report(op, findings, [finding.bad for finding in findings])


def _any_class(axis_name: str | None, axes: Axes, found: Array) -> Array:
    return _shards.any_of(axis_name, jnp.any(found, axes))


def check_distributions(op: str, labels: Array, where: Array | None, axes: Axes) -> Array | None:
    """Reports unmasked labels that are negative or not finite, and rows of them that sum to neither 1 nor 0.

    Args:
      op: the name of the loss.
      labels: floats, of the shape of the logits.
      where: booleans that broadcast to it, at its rank; or None.
      axes: the axes of the classes.

    Returns:
      The rows to be spoiled, for `spoiled`.
    """
    if label_check_mode() == "off":
        return None
    unmasked = jnp.broadcast_to(True if where is None else where, labels.shape)
    valid = (labels >= 0) & (labels < jnp.inf)
    sums = jnp.sum(selected(labels, unmasked & valid), axes, dtype=jnp.promote_types(labels.dtype, jnp.float32))
    is_sound = jnp.all(valid | ~unmasked, axes)
    strange = is_sound & (sums != 0) & (abs(sums - 1) > _tolerance(labels, axes))
    findings = [
        _Finding(unmasked & ~valid, unmasked, labels, "labels are negative or not finite"),
        _Finding(strange, jnp.any(unmasked, axes), sums, "rows of labels sum to neither 1 nor 0"),
    ]
    return _report(op, findings, [~is_sound, strange])


def check_elements(
    op: str, labels: Array, where: Array | None, is_valid: Callable[[Array], Array], otherwise: str
) -> Array | None:
    """Reports unmasked labels that are not valid.

    Args:
      op: the name of the loss.
      labels: numbers of the shape of the loss.
      where: booleans that broadcast to it, at its rank; or None.
      is_valid: tells of each label whether it is.
      otherwise: what labels are that are not, such as "outside [0, 1]".

    Returns:
      The elements to be spoiled, for `spoiled`.
    """
    if label_check_mode() == "off":
        return None
    unmasked = jnp.broadcast_to(True if where is None else where, labels.shape)
    bad = unmasked & ~is_valid(labels)
    return _report(op, [_Finding(bad, unmasked, labels, f"labels are {otherwise}")], [bad])


def spoiled(loss: Array, bad_rows: Array | None) -> Array:
    """The loss with NaN in the bad rows, also in its gradient.

    Nothing trains on them then, not even where JAX loses the check itself.
    """
    return loss if bad_rows is None else loss * jnp.where(bad_rows, jnp.nan, jnp.ones((), loss.dtype))


def _tolerance(labels: Array, axes: Axes) -> float:
    """How far from 1 a row may sum; where there are many classes, each may be rounded to a multiple of the smallest."""
    num_classes = math.prod(labels.shape[a] for a in axes)
    smallest = float(jnp.finfo(labels.dtype).smallest_subnormal)
    return _TOLERANCE.get(labels.dtype.name, 0.1) + smallest * num_classes


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


class _Details(NamedTuple):
    """What an error tells: integers but for the value."""

    bad: Array
    checked: Array
    value: Array  # the first bad one
    place: Array  # and its index, [rank]
    shard: Array | None = None  # and the device that has it, of those that a `shard_map` runs on


def _report(op: str, findings: Sequence[_Finding], bad_rows: Sequence[Array]) -> Array | None:
    """Raises or stages an error for what was found, and returns which rows are bad where it may get lost."""
    mode = label_check_mode()
    for finding in findings:
        text = f"{op}: {{bad}} of {{checked}} {finding.what}; first at {{index}}{{shard}}: {{value}}"
        text += _escaped(f" (called {_place_of_call()})")
        any_bad = jnp.any(finding.bad)
        if mode == "checkify":
            _stage_check(any_bad, text, _details(finding))
        elif isinstance(any_bad, jax.core.Tracer):
            _raise_when_run(text, _details(finding))
        elif any_bad:
            with jax.debug_nans(False):  # the value may be one
                raise ValueError(_filled(text, _details(finding)))
    return functools.reduce(jnp.logical_or, bad_rows) if mode == "checkify" else None


def _details(finding: _Finding) -> _Details:
    """Counts, and index and value of the first bad one."""
    bad = finding.bad
    first, is_first = first_of(bad)
    value = jnp.sum(jnp.where(is_first, finding.values, jnp.zeros((), finding.values.dtype)))
    strides = [max(1, math.prod(bad.shape[axis + 1 :])) for axis in range(bad.ndim)]
    index = [first // stride % max(1, size) for stride, size in zip(strides, bad.shape, strict=True)]
    return _Details(
        jnp.sum(bad), jnp.sum(finding.checked), value, jnp.stack(index) if index else jnp.zeros(0, jnp.int32)
    )


def _stage_check(any_bad: Array, text: str, details: _Details) -> None:
    """A check of checkify, which fills the text with numbers."""
    numbers: dict[str, Any] = {f"i{axis}": details.place[axis] for axis in range(len(details.place))}
    names = ", ".join(f"{{{name}}}" for name in numbers)
    index = f"({names},)" if len(numbers) == 1 else f"({names})"
    text = text.replace("{index}", index).replace("{shard}", "")
    checkify.check(~any_bad, text, bad=details.bad, checked=details.checked, value=details.value, **numbers)


def _raise_when_run(text: str, details: _Details) -> None:
    """Makes the compiled program fail with the text.

    A callback of `jax.debug.callback` that raises fails the program in jit, grad, scan and remat, on every platform,
    and is not removed although nothing depends on it, as one of `jax.pure_callback` would be. Behind a `cond` it costs
    nothing while labels are good. Every device has to fail, or the others would wait for it in their next collective:
    hence `partitioned`, and under `shard_map` the exchange of what was found. `vmap` would call once for each element.
    """

    def fail(details: _Details) -> None:
        if details.bad:
            raise ValueError(_filled(text, details))

    @jax.custom_batching.custom_vmap
    def stage(details: _Details) -> tuple[()]:
        call = functools.partial(jax.debug.callback, fail, partitioned=True)
        lax.cond(details.bad > 0, lambda details: call(details), lambda _: None, details)
        return ()

    @stage.def_vmap
    def _(size: int, batched: Sequence[_Details], details: _Details) -> tuple[tuple[()], tuple[()]]:
        def stacked(x: Array, is_batched: bool) -> Array:
            return x if is_batched else jnp.broadcast_to(x, (size, *jnp.shape(x)))

        first, details = _first_bad(jax.tree.map(stacked, details, batched[0]))
        stage(details._replace(place=jnp.concatenate([first[None], details.place])))
        return (), ()

    details = jax.tree.map(lax.stop_gradient, details)
    manual_axes = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    if manual_axes:
        shard, details = _first_bad(jax.tree.map(lambda x: lax.all_gather(x, manual_axes), details))
        details = details._replace(shard=shard)
    stage(details)


def _first_bad(stacked: _Details) -> tuple[Array, _Details]:
    """Which of the details is the first with anything bad, and it, with the counts of all."""
    first = jnp.argmax(stacked.bad > 0)
    one: _Details = jax.tree.map(lambda x: x[first], stacked)
    return first.astype(jnp.int32), one._replace(bad=jnp.sum(stacked.bad), checked=jnp.sum(stacked.checked))


def _filled(text: str, details: _Details) -> str:
    shard = "" if details.shard is None else f" of shard {details.shard.item()}"
    index = tuple(details.place.tolist())
    return text.format(
        bad=details.bad.item(), checked=details.checked.item(), index=index, shard=shard, value=details.value.item()
    )


def _place_of_call() -> str:
    """The innermost line of the call stack that is neither masksafe's nor JAX's."""
    frame = sys._getframe()
    while frame.f_back is not None and not is_of_user(frame.f_code.co_filename):
        frame = frame.f_back
    return f"at {frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")
