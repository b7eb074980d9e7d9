"""Validation of labels, switched on and off by `masksafe.label_checks`.

A loss calls one of these functions on its checked and broadcast arguments, outside its custom rule: inside the rule,
`checkify` would lose the check in a gradient.
"""

import contextlib
import dataclasses
import functools
import inspect
import math
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import checkify

from masksafe._core import callback_errors, sharding
from masksafe._core.arguments import message
from masksafe._core.call_site import place_of_call
from masksafe._core.labels import class_index, is_class, nan_unless
from masksafe._core.masks import first_of, selected
from masksafe._core.precision import wide_dtype
from masksafe._core.switches import label_check_mode
from masksafe._core.typing import Array, Axes, jitted

# How far the sum of a row of a distribution may be from 1: about ten rounding errors of a probability near 1.
_TOLERANCE = {"float64": 1e-6, "float32": 1e-4, "float16": 1e-2, "bfloat16": 4e-2}


class _Finding(NamedTuple):
    """Which labels are bad, which were checked, and the values to show in an error."""

    bad: Array
    checked: Array
    values: Array
    part: Array | None = None  # the number of the micro-batch that is being traced


def check_integer_labels(
    op: str, labels: Array, where: Array | None, axes: Axes, shape: tuple[int, ...], axis_name: str | None
) -> Array | None:
    """Reports unmasked labels outside [0, num_classes) and labels at a masked class, if label checks are on.

    Args:
      op: the name of the loss.
      labels: integers of at least 32 bits, of the shape of the loss.
      where: booleans that broadcast to the logits, at their rank; or None.
      axes: the axes of the classes, in the order in which a label counts them.
      shape: the shape of the logits.
      axis_name: the mesh axis over which `jax.shard_map` splits the classes, or None.

    Returns:
      The bad rows, for `nan_where_bad`.
    """
    if label_check_mode() == "off":
        return None
    classes_here = math.prod(shape[a] for a in axes)
    num_classes = sharding.size_over_devices(axis_name, classes_here)
    in_range = is_class(labels, num_classes)
    any_class = functools.partial(_any_class, axis_name, axes)
    live = jnp.ones(labels.shape, bool) if where is None else jnp.broadcast_to(any_class(where), labels.shape)
    findings = {f"labels are outside [0, {num_classes})": _Finding(live & ~in_range, live, labels)}
    if where is not None and any(where.shape[a] > 1 for a in axes):
        local = sharding.local_class(axis_name, labels, classes_here)
        at_unmasked = any_class(where & (jnp.expand_dims(local, axes) == class_index(shape, axes)))
        findings["labels are at a masked class"] = _Finding(live & in_range & ~at_unmasked, live, labels)
    return _report(op, findings, [finding.bad for finding in findings.values()])


def _any_class(axis_name: str | None, axes: Axes, found: Array) -> Array:
    return sharding.any_over_devices(axis_name, jnp.any(found, axes))


def check_distributions(op: str, labels: Array, where: Array | None, axes: Axes) -> Array | None:
    """Reports unmasked labels that are negative or not finite, and rows of labels that sum to neither 1 nor 0.

    Args:
      op: the name of the loss.
      labels: floats, of the shape of the logits.
      where: booleans that broadcast to that shape, at its rank; or None.
      axes: the axes of the classes.

    Returns:
      The bad rows, for `nan_where_bad`.
    """
    if label_check_mode() == "off":
        return None
    unmasked = jnp.broadcast_to(True if where is None else where, labels.shape)
    valid = (labels >= 0) & (labels < jnp.inf)
    sums = jnp.sum(selected(labels, unmasked & valid), axes, dtype=wide_dtype(labels.dtype))
    is_sound = jnp.all(valid | ~unmasked, axes)
    has_wrong_sum = is_sound & (sums != 0) & (abs(sums - 1) > _tolerance(labels, axes))
    findings = {
        "labels are negative or not finite": _Finding(unmasked & ~valid, unmasked, labels),
        "rows of labels sum to neither 1 nor 0": _Finding(has_wrong_sum, jnp.any(unmasked, axes), sums),
    }
    return _report(op, findings, [~is_sound, has_wrong_sum])


def check_elements(
    op: str,
    labels: Array,
    shape: tuple[int, ...],
    where: Array | None,
    is_valid: Callable[[Array], Array],
    otherwise: str,
    argument: str = "labels",
) -> Array | None:
    """Reports unmasked labels that are not valid.

    Args:
      op: the name of the loss.
      labels: numbers, which broadcast to the shape of the loss.
      shape: that shape.
      where: booleans that broadcast to it, at its rank; or None.
      is_valid: a function that says which labels are valid.
      otherwise: a description of invalid labels, such as "outside [0, 1]".
      argument: the name of the labels.

    Returns:
      The bad elements, for `nan_where_bad`.
    """
    if label_check_mode() == "off":
        return None
    labels = jnp.broadcast_to(labels, shape)
    labels = labels.astype(jnp.int32) if labels.dtype == jnp.bool_ else labels  # is_valid compares with numbers
    unmasked = jnp.broadcast_to(True if where is None else where, labels.shape)
    bad = unmasked & ~is_valid(labels)
    return _report(op, {f"{argument} are {otherwise}": _Finding(bad, unmasked, labels)}, [bad])


class Range(NamedTuple):
    """The numbers that an argument may hold."""

    contains: Callable[[Any], Any]
    text: str  # such as "in [0, 1]"


def check_numbers(
    op: str, argument: str, value: Any, allowed: Range, shape: tuple[int, ...], where: Array | None, hint: str = ""
) -> Array | None:
    """Refuses a number that is not allowed. Unmasked elements of an array are reported like labels.

    Args:
      op: the name of the loss.
      argument: the name of the value.
      value: a number, or an array that broadcasts to the shape of the loss.
      allowed: what it may be.
      shape: the shape of the loss.
      where: booleans that broadcast to it, at its rank; or None.
      hint: what to do instead.

    Returns:
      The bad elements of an array, for `nan_where_bad`.
    """
    if not isinstance(value, jax.Array):
        if not allowed.contains(value):
            raise ValueError(message(op, argument, f"value {value}", f"a number {allowed.text}", hint))
        return None
    return check_elements(op, value, shape, where, allowed.contains, f"not {allowed.text}", argument)


def check_probabilities(op: str, predictions: Array, where: Array | None) -> Array | None:
    """Reports unmasked predictions outside [0, 1], and rows of several classes, all unmasked, that do not sum to 1.

    Args:
      op: the name of the loss.
      predictions: floats `[..., num_classes]`.
      where: booleans of that shape, or None.

    Returns:
      The bad rows `[...]`, for `nan_where_bad`.
    """
    if label_check_mode() == "off":
        return None
    tolerance = max(1e-5, 4 * float(jnp.finfo(predictions.dtype).eps))
    valid = (predictions >= 0) & (predictions <= 1 + tolerance)
    unmasked = jnp.ones(predictions.shape, bool) if where is None else where
    outside = _Finding(unmasked & ~valid, unmasked, predictions)
    if predictions.shape[-1] == 1:
        outside = _Finding(*(x[..., 0] for x in outside[:3]))
        return _report(op, {"predictions are outside [0, 1]": outside}, [outside.bad])
    sums = jnp.sum(predictions, -1, dtype=wide_dtype(predictions.dtype))
    whole = jnp.ones(sums.shape, bool) if where is None else jnp.all(where, -1)
    has_wrong_sum = whole & jnp.all(valid, -1) & ~(abs(sums - 1) <= tolerance)
    findings = {
        "predictions are outside [0, 1]": outside,
        "rows of predictions do not sum to 1": _Finding(has_wrong_sum, whole, sums),
    }
    return _report(op, findings, [jnp.any(outside.bad, -1), has_wrong_sum])


def nan_where_bad(loss: Array, bad_rows: Array | None) -> Array:
    """The loss with NaN in the bad rows, and in their gradients.

    The NaN keeps bad rows out of training even where JAX loses the check itself.
    """
    return loss if bad_rows is None else loss * nan_unless(~bad_rows, loss.dtype)


def _tolerance(labels: Array, axes: Axes) -> float:
    """How far a row's sum may be from 1, allowing each class to be rounded to a multiple of the smallest float."""
    num_classes = math.prod(labels.shape[a] for a in axes)
    smallest = float(jnp.finfo(labels.dtype).smallest_subnormal)
    return _TOLERANCE.get(labels.dtype.name, 0.1) + smallest * num_classes


# The micro-batches of `value_and_grad_of_mean`.


@dataclasses.dataclass(eq=False)
class _MicroBatch:
    """What is being traced: part `index` of a batch, which holds every `number`-th of its elements, from `index` on.

    It compares by identity, since it is part of JAX's cache key: a jitted function that was traced with another traced
    index must not be found again.
    """

    index: Array | None
    number: int
    size: int | None  # of a part, along the axis that is cut; None if no array is cut


_microbatch = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def in_microbatch(index: Array | None, number: int, size: int | None) -> Iterator[None]:
    """Context in which reports name the micro-batch, whose index may be traced, and labels by their index in the batch.

    The index in the batch is known if exactly one axis of the labels has the `size` of a micro-batch.
    """
    if label_check_mode() == "off":
        yield
        return
    here = _MicroBatch(index, number, size)
    with _microbatch(here):
        yield
    here.index = None  # JAX's caches keep the key, and would keep the tracer with it


# Reporting to the user.


class _Text(NamedTuple):
    """An error text in which the details are to be filled in. It is static."""

    template: str
    parts: int = 1  # the number of micro-batches
    size: int | None = None  # of each

    def axis_of_batch(self, shape: Sequence[int]) -> int | None:
        """The axis of labels of `shape` along which a micro-batch is cut from the batch, if one alone has its size."""
        axes = [axis for axis, size in enumerate(shape) if size == self.size]
        return axes[0] if len(axes) == 1 else None

    def at_place(self, finding: "_Finding", index: str = "{index}", shard: str = "{shard}") -> str:
        """The template, with what the place of a label is called that is at `index`."""
        part = "" if finding.part is None else f" of micro-batch {{part}} of {self.parts}"
        if part and self.axis_of_batch(finding.bad.shape) is not None:
            part = f" of the batch, in{part.removeprefix(' of')}"
        return self.template.replace("{place}", f"{index}{part}{shard}")


class _Details(NamedTuple):
    """The contents of an error: integers, except for the value."""

    bad: Array  # how many
    checked: Array  # how many
    value: Array  # of the first bad label
    place: Array  # its index, [rank]
    part: Array | None  # the number of its micro-batch, inside `in_microbatch`
    shard: Array | None = None  # the number of its shard, inside a `shard_map`


def _report(op: str, findings: dict[str, _Finding], bad_rows: Sequence[Array]) -> Array | None:
    """Raises or stages an error for the findings, and returns the bad rows, for `nan_where_bad`."""
    mode = label_check_mode()
    if mode == "checkify":
        _refuse_where_checkify_fails(op)
    is_bad = functools.reduce(jnp.logical_or, bad_rows)
    has_failed = jnp.zeros_like(is_bad)
    here = _microbatch.value
    for what, finding in findings.items():
        finding = _Finding(*map(lax.stop_gradient, finding[:3]))._replace(part=here and here.index)
        template = f"{op}: {{bad}} of {{checked}} {_escape(what)}; first at {{place}}: {{value}}"
        template += _escape(f" (called {place_of_call()})")
        text = _Text(template, here.number, here.size) if here else _Text(template)
        if mode == "checkify":
            _stage_check(text, finding)
        elif isinstance(finding.bad, jax.core.Tracer):
            has_failed |= _staged_check(text)(*finding)
        else:
            _raise_now(text, finding)
    if mode == "checkify":
        return is_bad
    return has_failed if isinstance(has_failed, jax.core.Tracer) else None


def _raise_now(text: _Text, finding: _Finding) -> None:
    """Raises the error in eager code."""
    finding = finding._replace(part=None)  # labels that are known while a micro-batch is traced are those of all
    with jax.debug_nans(False):  # the bad value may be a NaN
        if jnp.any(finding.bad):
            raise ValueError(_fill_in(text.at_place(finding), _details(text, finding)))


def _details(text: _Text, finding: _Finding) -> _Details:
    """The counts, and the value and the index of the first bad label."""
    bad = finding.bad
    first, is_first = first_of(bad)
    value = jnp.sum(jnp.where(is_first, finding.values, jnp.zeros((), finding.values.dtype)))
    strides = [max(1, math.prod(bad.shape[axis + 1 :])) for axis in range(bad.ndim)]
    index = [first // stride % max(1, size) for stride, size in zip(strides, bad.shape, strict=True)]
    axis = text.axis_of_batch(bad.shape)
    if finding.part is not None and axis is not None:
        index[axis] = finding.part + text.parts * index[axis]
    place = jnp.stack(index) if index else jnp.zeros(0, jnp.int32)
    return _Details(jnp.sum(bad), jnp.sum(finding.checked), value, place, finding.part)


# Mode "checkify".


def _stage_check(text: _Text, finding: _Finding) -> None:
    """Stages a checkify check, which fills in the numbers of the text."""
    details = _details(text, finding)
    numbers: dict[str, Any] = {f"i{axis}": details.place[axis] for axis in range(len(details.place))}
    names = ", ".join(f"{{{name}}}" for name in numbers)
    index = f"({names},)" if len(numbers) == 1 else f"({names})"
    numbers |= {"bad": details.bad, "checked": details.checked, "value": details.value}
    numbers |= {} if details.part is None else {"part": details.part}
    checkify.check(details.bad == 0, text.at_place(finding, index, shard=""), **numbers)


def _refuse_where_checkify_fails(op: str) -> None:
    """Refuses a check that checkify would have to lift out of a `shard_map` over the mesh of `jax.set_mesh`.

    JAX would trace the body a second time, in the wrong mesh (jax 0.12). checkify inside the body works.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes or not _mesh_is_set():
        return
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename not in (_CHECKIFY, _SHARD_MAP):
        frame = frame.f_back
    if frame is not None and frame.f_code.co_filename == _CHECKIFY:
        return
    found = 'mode "checkify" in a jax.shard_map over the mesh of jax.set_mesh'
    hint = "Or use checkify.checkify inside the shard_map."
    raise ValueError(message(op, "label_checks", found, 'mode "raise", since JAX cannot lift a check out of it', hint))


_CHECKIFY, _SHARD_MAP = (inspect.unwrap(fn).__code__.co_filename for fn in (checkify.checkify, jax.shard_map))


def _mesh_is_set() -> bool:
    """Whether `jax.set_mesh` has set a mesh: without one, JAX refuses a `PartitionSpec` as an output sharding."""
    try:
        with jax.ensure_compile_time_eval():
            jax.jit(lambda: 0, out_shardings=jax.sharding.PartitionSpec()).lower()
    except (RuntimeError, ValueError):
        return False
    return True


# Mode "raise".


@functools.lru_cache(maxsize=1024)
def _staged_check(text: _Text) -> Callable[..., Array]:
    """The function that makes a compiled program fail with the text; it takes the arrays of a finding.

    It is cached by text, since JAX would compile every new function again. Under `vmap` it stays a single check, with
    the axis of the `vmap` at the front of the index.
    """

    @jax.custom_batching.custom_vmap
    def stage(bad: Array, checked: Array, values: Array, part: Array | None) -> Array:
        failed: Array = _fail_if_bad(text, bad, checked, values, part)
        return failed

    @stage.def_vmap
    def _(size: int, batched: Sequence[bool], *args: Any) -> tuple[Array, bool]:
        *arrays, part = args
        alike = [x if b else jnp.broadcast_to(x, (size, *x.shape)) for x, b in zip(arrays, batched[:3], strict=True)]
        if isinstance(alike[0], jax.core.Tracer):
            return stage(*alike, part), False
        _raise_now(text, _Finding(*alike))
        return jnp.zeros((), bool), False

    return stage


@jitted(0)
def _fail_if_bad(text: _Text, bad: Array, checked: Array, values: Array, part: Array | None) -> Array:
    """Makes the compiled program fail with the text if a label is bad; the result exists so that it can be awaited.

    A `jax.debug.callback` that raises makes the program fail in jit, grad, scan and remat, on every platform; a
    `jax.pure_callback` would be removed, since nothing depends on it. Inside a `cond` it costs nothing while labels are
    good. Every device has to fail, or the others would wait for it in their next collective: hence `partitioned` and,
    under `shard_map`, the exchange of findings.
    """
    manual_axes = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    any_bad = jnp.any(bad)
    for axis in manual_axes:  # one by one, since the value may vary over one axis and not over another
        any_bad = lax.pmax(any_bad.astype(jnp.int32), axis) > 0

    def fail(finding: _Finding) -> Array:
        details = _details(text, finding)
        if manual_axes:
            details = _gather_shards(details, manual_axes)
        raise_failure = functools.partial(_raise_failure, text.at_place(finding))
        jax.debug.callback(raise_failure, details, partitioned=True)
        return jnp.ones((), bool)

    failed: Array = lax.cond(any_bad, fail, lambda _: jnp.zeros((), bool), _Finding(bad, checked, values, part))
    return failed


def _raise_failure(text: str, details: _Details) -> None:
    if details.bad:
        raise callback_errors.failure(_fill_in(text, details))


def _gather_shards(details: _Details, axes: tuple[str, ...]) -> _Details:
    """The details of the first shard with a bad label, with its number, and with counts summed over the shards."""
    stacked = jax.tree.map(lambda x: lax.all_gather(x, axes), details._replace(part=None))
    first = jnp.argmax(stacked.bad > 0)
    one: _Details = jax.tree.map(lambda x: x[first], stacked)
    return one._replace(shard=first, bad=jnp.sum(stacked.bad), checked=jnp.sum(stacked.checked), part=details.part)


def _fill_in(text: str, details: _Details) -> str:
    shard = "" if details.shard is None else f" of shard {details.shard.item()}"
    index = tuple(details.place.tolist())
    part = None if details.part is None else details.part.item()
    bad, checked, value = details.bad.item(), details.checked.item(), details.value.item()
    return text.format(bad=bad, checked=checked, index=index, part=part, shard=shard, value=value)


def _escape(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")
