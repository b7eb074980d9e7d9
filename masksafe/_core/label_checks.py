"""Validation of labels, switched on and off by `masksafe.label_checks`.

A loss calls one of these checks on its checked and broadcast arguments, outside its custom rule: inside the rule,
`checkify` would lose the check in a gradient. A check yields its findings, and `_report` tells the user about them, in
each mode.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import checkify

from masksafe._core import arguments, call_site, masks, precision, sharding, switches
from masksafe._core.labels import class_index, is_class, nan_unless
from masksafe._core.typing import Array, Axes, Pytree, jitted

# How far the sum of a row of a distribution may be from 1: about ten rounding errors of a probability near 1.
_TOLERANCE = {"float64": 1e-6, "float32": 1e-4, "float16": 1e-2, "bfloat16": 4e-2}

_P = ParamSpec("_P")


class Finding(NamedTuple):
    """Which labels are bad."""

    what: str  # what is wrong, such as "labels are outside [0, 5)"
    bad: Array
    checked: Array  # which labels were checked
    values: Array  # to show in an error
    axes: Axes = ()  # of the classes, along which the arrays lie


def _check(findings: Callable[Concatenate[str, _P], Iterator[Finding]]) -> Callable[Concatenate[str, _P], Array | None]:
    """Makes a check of a function that yields what is bad. It runs only if label checks are on.

    The check returns the bad rows, for `nan_where_bad`.
    """

    @functools.wraps(findings)
    def check(op: str, /, *args: _P.args, **kwargs: _P.kwargs) -> Array | None:
        return None if switches.label_check_mode() == "off" else _report(op, findings(op, *args, **kwargs))

    return check


@_check
def check_integer_labels(
    op: str, labels: Array, where: Array | None, axes: Axes, shape: tuple[int, ...], axis_name: sharding.AxisName
) -> Iterator[Finding]:
    """Reports unmasked labels outside [0, num_classes) and labels at a masked class.

    Args:
      op: the name of the loss.
      labels: integers of at least 32 bits, of the shape of the loss.
      where: booleans that broadcast to the logits, at their rank; or None.
      axes: the axes of the classes, in the order in which a label counts them.
      shape: the shape of the logits.
      axis_name: the mesh axis, or several, over which `jax.shard_map` splits the classes; or None.
    """
    devices = sharding.Devices(axis_name)
    any_class = lambda found: devices.any(jnp.any(found, axes))  # noqa: E731
    classes_here = math.prod(shape[a] for a in axes)
    num_classes = classes_here * devices.size
    in_range = is_class(labels, num_classes)
    unmasked = jnp.ones(labels.shape, bool) if where is None else jnp.broadcast_to(any_class(where), labels.shape)
    yield Finding(f"labels are outside [0, {num_classes})", unmasked & ~in_range, unmasked, labels)
    if where is not None and any(where.shape[a] > 1 for a in axes):
        local = devices.local(labels, classes_here)
        classes = class_index(shape, axes).astype(local.dtype)
        at_unmasked = any_class(where & (jnp.expand_dims(local, axes) == classes))
        yield Finding("labels are at a masked class", unmasked & in_range & ~at_unmasked, unmasked, labels)


@_check
def check_distributions(op: str, labels: Array, where: Array | None, axes: Axes) -> Iterator[Finding]:
    """Reports unmasked labels that are negative or not finite, and rows of labels that sum to neither 1 nor 0.

    Args:
      op: the name of the loss.
      labels: floats, of the shape of the logits.
      where: booleans that broadcast to that shape, at its rank; or None.
      axes: the axes of the classes.
    """
    unmasked, valid = _unmasked(where, labels.shape), (labels >= 0) & (labels < jnp.inf)
    yield Finding("labels are negative or not finite", unmasked & ~valid, unmasked, labels, axes)
    sums = jnp.sum(masks.selected(labels, unmasked & valid), axes, dtype=precision.wide_dtype(labels.dtype))
    is_valid_row = jnp.all(valid | ~unmasked, axes)
    # Each class may have been rounded to a multiple of the smallest float.
    rounding = float(jnp.finfo(labels.dtype).smallest_subnormal) * math.prod(labels.shape[a] for a in axes)
    tolerance = _TOLERANCE.get(labels.dtype.name, 0.1) + rounding
    has_wrong_sum = is_valid_row & (sums != 0) & (abs(sums - 1) > tolerance)
    yield Finding("rows of labels sum to neither 1 nor 0", has_wrong_sum, jnp.any(unmasked, axes), sums)


@_check
def check_elements(
    op: str,
    labels: Array,
    shape: tuple[int, ...],
    where: Array | None,
    is_valid: Callable[[Array], Array],
    otherwise: str,
    argument: str = "labels",
) -> Iterator[Finding]:
    """Reports unmasked labels that are not valid.

    Args:
      op: the name of the loss.
      labels: numbers, which broadcast to the shape of the loss.
      shape: that shape.
      where: booleans that broadcast to it, at its rank; or None.
      is_valid: a function that says which labels are valid.
      otherwise: what invalid labels are, such as "outside [0, 1]".
      argument: the name of the labels.
    """
    labels = jnp.broadcast_to(labels, shape)
    labels = labels.astype(jnp.int32) if labels.dtype == jnp.bool_ else labels  # is_valid compares with numbers
    unmasked = _unmasked(where, shape)
    yield Finding(f"{argument} are {otherwise}", unmasked & ~is_valid(labels), unmasked, labels)


@_check
def check_probabilities(op: str, predictions: Array, where: Array | None) -> Iterator[Finding]:
    """Reports unmasked predictions outside [0, 1], and rows of several classes, all unmasked, that do not sum to 1.

    Args:
      op: the name of the loss.
      predictions: floats `[..., num_classes]`.
      where: booleans of that shape, or None.
    """
    tolerance = max(1e-5, 4 * float(jnp.finfo(predictions.dtype).eps))
    valid, unmasked = (predictions >= 0) & (predictions <= 1 + tolerance), _unmasked(where, predictions.shape)
    what, bad = "predictions are outside [0, 1]", unmasked & ~valid
    if predictions.shape[-1] == 1:
        yield Finding(what, bad[..., 0], unmasked[..., 0], predictions[..., 0])
        return
    yield Finding(what, bad, unmasked, predictions, (-1,))
    sums, whole = jnp.sum(predictions, -1, dtype=precision.wide_dtype(predictions.dtype)), jnp.all(unmasked, -1)
    has_wrong_sum = whole & jnp.all(valid, -1) & ~(abs(sums - 1) <= tolerance)
    yield Finding("rows of predictions do not sum to 1", has_wrong_sum, whole, sums)


def _unmasked(where: Array | None, shape: tuple[int, ...]) -> Array:
    return jnp.broadcast_to(True if where is None else where, shape)


class Range(NamedTuple):
    """The numbers that an argument may hold."""

    contains: Callable[[Any], Any]
    text: str  # such as "in [0, 1]"


def check_numbers(
    op: str, argument: str, value: object, allowed: Range, shape: tuple[int, ...], where: Array | None
) -> Array | None:
    """Refuses a number that is not allowed; reports elements of an array that are not, like labels.

    Args:
      op: the name of the loss.
      argument: the name of the value.
      value: a number, or an array that broadcasts to the shape of the loss.
      allowed: the allowed numbers.
      shape: the shape of the loss.
      where: booleans that broadcast to it, at its rank; or None.

    Returns:
      The bad elements of an array, for `nan_where_bad`.
    """
    if not isinstance(value, jax.Array):
        if not allowed.contains(value):
            raise ValueError(arguments.message(op, argument, f"value {value}", f"a number {allowed.text}"))
        return None
    return check_elements(op, value, shape, where, allowed.contains, f"not {allowed.text}", argument)


def nan_where_bad(loss: Array, bad_rows: Array | None) -> Array:
    """The loss with NaN in the bad rows, and in their gradients.

    The NaN keeps bad rows out of training even where JAX loses the check itself.
    """
    return loss if bad_rows is None else nan_unless(~bad_rows, loss)


# The micro-batches of `value_and_grad_of_mean`.


@dataclasses.dataclass(eq=False)
class _MicroBatch:
    """The micro-batch that is being traced: every `number`-th element of the batch, from `index` on.

    It compares by identity, since it is part of JAX's cache key: a jitted function that was traced with another traced
    index must not be found again.
    """

    index: Array | None
    number: int
    size: int | None  # of a micro-batch, along the axis that is cut; None if no array is cut


_microbatch = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def in_microbatch(index: Array | None, number: int, size: int | None) -> Iterator[None]:
    """Context in which reports name the micro-batch, whose index may be traced, and labels by their index in the batch.

    The index in the batch is known if exactly one axis of the labels has the `size` of a micro-batch.
    """
    if switches.label_check_mode() == "off":
        yield
        return
    here = _MicroBatch(index, number, size)
    with _microbatch(here):
        yield
    here.index = None  # JAX's caches keep the key, and would keep the tracer with it


# Reporting to the user.


class _Text(NamedTuple):
    """The text of an error without its numbers, which are known only when the program runs."""

    op: str
    what: str
    call: str
    microbatches: int = 1  # the number of micro-batches
    size: int | None = None  # of each
    axis: int | None = None  # of the labels, along which the batch is cut into micro-batches, if known

    def for_shape(self, shape: tuple[int, ...]) -> "_Text":
        """The text for labels of this shape: the axis of the batch is the only one of the size of a micro-batch."""
        axes = [axis for axis, size in enumerate(shape) if size == self.size]
        return self._replace(axis=axes[0] if len(axes) == 1 else None)

    def filled(self, index: Any, bad: Any, checked: Any, value: Any, microbatch: Any, shard: Any) -> str:
        of_batch = " of" if self.axis is None else " of the batch, in"
        in_batch = "" if microbatch is None else f"{of_batch} micro-batch {microbatch} of {self.microbatches}"
        place = f"{index}{in_batch}" + ("" if shard is None else f" of shard {shard}")
        return f"{self.op}: {bad} of {checked} {self.what}; first at {place}: {value} (called {self.call})"


class _Found(NamedTuple):
    """The arrays of a finding."""

    bad: Array
    checked: Array
    values: Array
    microbatch: Array | None  # the number of the micro-batch that is being traced


class _Counts(NamedTuple):
    """The counts and other numbers of an error, in the order of `_Text.filled`."""

    place: Array  # the index of the first bad label, [rank]
    bad: Array  # how many
    checked: Array  # how many
    value: Array  # of the first
    microbatch: Array | None  # the number of its micro-batch, inside `in_microbatch`
    shard: Array | None = None  # the number of its shard, inside a `shard_map`


def _report(op: str, findings: Iterable[Finding]) -> Array | None:
    """Raises or stages an error for each finding, and returns the bad rows, for `nan_where_bad`."""
    mode, here, frame = switches.label_check_mode(), _microbatch.value, call_site.frame_of_user()
    call = f"at {frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"
    if mode == "checkify":
        _refuse_where_checkify_fails(op)
    bad_rows, failed = [], []
    for what, bad, checked, values, axes in findings:
        bad_rows.append(jnp.any(bad, axes))
        text = _Text(op, what, call, *((here.number, here.size) if here else ()))
        arrays = lax.stop_gradient(_Found(bad, checked, values, here and here.index))
        if mode == "checkify":
            _stage_check(text, arrays)
        elif isinstance(arrays.bad, jax.core.Tracer):
            failed.append(_staged_failure(text)(*arrays))
        else:
            _raise_now(text, arrays)
    is_bad = functools.reduce(jnp.logical_or, bad_rows)
    if mode == "checkify":
        return is_bad
    has_failed = functools.reduce(jnp.logical_or, failed, jnp.zeros_like(is_bad))
    return has_failed if isinstance(has_failed, jax.core.Tracer) else None


def _raise_now(text: _Text, arrays: _Found) -> None:
    """Raises the error in eager code."""
    arrays = arrays._replace(microbatch=None)  # labels that are known in a trace belong to no single micro-batch
    with jax.debug_nans(False):  # the bad value may be a NaN
        if jnp.any(arrays.bad):
            _raise_if_bad(text, _numbers(text, arrays))


def _numbers(text: _Text, arrays: _Found) -> _Counts:
    """The counts, and the value and the index of the first bad label."""
    bad, checked, values, microbatch = arrays
    first, is_first = masks.first_of(bad)
    value = jnp.sum(jnp.where(is_first, values, jnp.zeros((), values.dtype)))
    strides = [max(1, math.prod(bad.shape[axis + 1 :])) for axis in range(bad.ndim)]
    index = [first // stride % max(1, size) for stride, size in zip(strides, bad.shape, strict=True)]
    if microbatch is not None and text.axis is not None:
        index[text.axis] = microbatch + text.microbatches * index[text.axis]
    place = jnp.stack(index) if index else jnp.zeros(0, jnp.int32)
    return _Counts(place, jnp.sum(bad), jnp.sum(checked), value, microbatch)


def _raise_if_bad(text: _Text, numbers: _Counts) -> None:
    place, *scalars = numbers
    if numbers.bad:
        raise ValueError(text.filled(tuple(place.tolist()), *(None if x is None else x.item() for x in scalars)))


# Mode "checkify".


def _stage_check(text: _Text, arrays: _Found) -> None:
    """Stages a checkify check, which fills in the numbers of the text."""
    text = text.for_shape(arrays.bad.shape)
    place, *scalars = _numbers(text, arrays)
    named: dict[str, Any] = {name: x for name, x in zip(_Counts._fields[1:], scalars, strict=True) if x is not None}
    indices: dict[str, Any] = {f"i{axis}": place[axis] for axis in range(len(place))}
    index = ", ".join(f"{{{name}}}" for name in indices) + ("," if len(indices) == 1 else "")
    text = text._replace(what=_escape(text.what), call=_escape(text.call))
    template = text.filled(f"({index})", *(f"{{{name}}}" if name in named else None for name in _Counts._fields[1:]))
    checkify.check(named["bad"] == 0, template, **indices, **named)


def _escape(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _refuse_where_checkify_fails(op: str) -> None:
    """Refuses a check that checkify would have to lift out of a `shard_map` over the mesh of `jax.set_mesh`.

    JAX would trace the body a second time, in the wrong mesh (jax 0.12). checkify inside the body works.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes or not _mesh_is_set():
        return
    if call_site.innermost_of(checkify.checkify, jax.shard_map) is checkify.checkify:
        return
    found = 'mode "checkify" in a jax.shard_map over the mesh of jax.set_mesh'
    expected, hint = 'mode "raise", since JAX cannot lift a check out of it', "Or use checkify.checkify inside of it."
    raise ValueError(arguments.message(op, "label_checks", found, expected, hint))


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
def _staged_failure(text: _Text) -> Callable[..., Array]:
    """The function that makes a compiled program fail with the text; it takes `_Found`.

    It is cached by text, since JAX would compile every new function again. Under `vmap` it stays a single check, with
    the axis of the `vmap` at the front of the index.
    """

    @jax.custom_batching.custom_vmap
    def stage(bad: Array, checked: Array, values: Array, microbatch: Array | None) -> Array:
        return _fail_if_bad(text, _Found(bad, checked, values, microbatch))

    @stage.def_vmap
    def _(size: int, batched: Sequence[bool], *args: Pytree) -> tuple[Array, bool]:
        *arrays, microbatch = args
        alike = [x if b else jnp.broadcast_to(x, (size, *x.shape)) for x, b in zip(arrays, batched[:3], strict=True)]
        if isinstance(alike[0], jax.core.Tracer):
            return stage(*alike, microbatch), False
        _raise_now(text, _Found._make([*alike, microbatch]))
        return jnp.zeros((), bool), False

    return stage


@jitted(0)
def _fail_if_bad(text: _Text, arrays: _Found) -> Array:
    """Makes the compiled program fail with the text if a label is bad; the result exists so that it can be awaited.

    A `jax.debug.callback` that raises makes the program fail in jit, grad, scan and remat, on every platform; a
    `jax.pure_callback` would be removed, since nothing depends on it. Inside a `cond` it costs nothing while labels are
    good. Every device has to fail, or the others would wait for it in their next collective: hence `partitioned` and,
    under `shard_map`, the exchange of findings.
    """
    manual_axes = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    any_bad = jnp.any(arrays.bad)
    for axis in manual_axes:  # one by one, since the value may vary over one axis and not over another
        any_bad = lax.pmax(any_bad.astype(jnp.int32), axis) > 0

    text = text.for_shape(arrays.bad.shape)

    def fail(arrays: _Found) -> Array:
        numbers = _numbers(text, arrays)
        if manual_axes:
            numbers = _gather_shards(numbers, manual_axes)
        jax.debug.callback(functools.partial(_raise_if_bad, text), numbers, partitioned=True)
        return jnp.ones((), bool)

    return lax.cond(any_bad, fail, lambda _: jnp.zeros((), bool), arrays)


def _gather_shards(numbers: _Counts, axes: tuple[str, ...]) -> _Counts:
    """The numbers of the first shard with a bad label, with its number, and with counts summed over the shards."""
    stacked = jax.tree.map(lambda x: lax.all_gather(x, axes), numbers._replace(microbatch=None))
    first = jnp.argmax(stacked.bad > 0)
    one: _Counts = jax.tree.map(lambda x: x[first], stacked)
    counts = {"bad": jnp.sum(stacked.bad), "checked": jnp.sum(stacked.checked)}
    return one._replace(shard=first, microbatch=numbers.microbatch, **counts)
