"""The two switches: pure forward mode, and the validation of labels.

The value of a JAX user context is part of JAX's compilation cache key: a jitted function is traced again when a switch
changes, and the earlier program is found again when it changes back.
"""

import contextlib
import functools
import inspect
import os
import warnings
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Literal, get_args

import jax

from masksafe._core import callback_errors
from masksafe._core.arguments import message
from masksafe._core.typing import Function

LabelChecks = Literal["off", "checkify", "raise"]
LABEL_CHECKS = get_args(LabelChecks)
_VARIABLE = "MASKSAFE_LABEL_CHECKS"
_WITHOUT_CHECKIFY = (
    'masksafe.label_checks("checkify") stages such checks: compile jax.jit(checkify.checkify(step)) rather than '
    'jax.jit(step). masksafe.label_checks("raise") needs no checkify.'
)


def _check_mode(op: str, argument: str, mode: str) -> str:
    if mode not in LABEL_CHECKS:
        raise ValueError(message(op, argument, f"value {mode!r}", f"one of {', '.join(map(repr, LABEL_CHECKS))}"))
    return mode


_forward_mode = jax.make_user_context(default_value=False)
_label_checks = jax.make_user_context(
    default_value=_check_mode("masksafe", f"the environment variable {_VARIABLE}", os.environ.get(_VARIABLE) or "off")
)


class SwitchContext(contextlib.AbstractContextManager[None]):
    """The context manager of a switch, and a decorator of functions that are to run inside of it.

    It warns when it is collected without having been either, since the call alone does nothing.
    """

    def __init__(self, call: str, way_out: str, context: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._call = call
        self._way_out = way_out
        self._context = context
        self._entered: list[contextlib.AbstractContextManager[None]] = []
        self._is_used = False

    def __enter__(self) -> None:
        self._is_used = True
        context = self._context()
        context.__enter__()
        self._entered.append(context)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return self._entered.pop().__exit__(kind, error, traceback)

    def __call__(self, fn: Function) -> Function:
        self._is_used = True
        if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
            found = f"{fn.__name__}, whose body runs after its call has returned"
            raise TypeError(message(self._call, "function", found, "a plain function", "Write `with` in its body."))

        @functools.wraps(fn)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with self._context():
                return fn(*args, **kwargs)

        return inside  # type: ignore[return-value]

    def __del__(self, warn: Callable[..., None] = warnings.warn) -> None:  # at exit, modules may be empty
        if not self._is_used:
            text = f"{self._call} had no effect: write `with {self._call}:`{self._way_out}."
            warn(text, RuntimeWarning, stacklevel=2)


def forward_mode() -> SwitchContext:
    """Context in which `jax.jvp`, `jax.linearize` and `jax.jacfwd` work through masksafe's ops.

    Outside the context most ops are `jax.custom_vjp` functions, which have the fastest reverse mode and `jax.hessian`
    (forward over reverse), but no pure forward mode. Inside, JAX's own rules provide both modes, with the same values
    and the same masks; reverse mode may use more memory. The mode is part of JAX's compilation cache key: jitted
    functions are traced again on entering.

    One guarantee holds outside the context only: a row with a bad label or a NaN whose loss is replaced afterwards
    (`jnp.where(labels >= 0, loss, 0)`) has a gradient of 0. Inside, mask the row with `where`.

    Returns:
      A context manager, which warns if it is never entered: the call alone does nothing.

    Example:
      >>> import jax, jax.numpy as jnp, masksafe
      >>> labels = jnp.array([0, -100])
      >>> def loss(logits):
      ...     return masksafe.losses.softmax_cross_entropy_with_integer_labels(logits, labels, where=labels != -100)
      >>> logits = jnp.array([[2.0, 0.0], [jnp.nan, 1.0]])
      >>> with masksafe.forward_mode():
      ...     value, tangent = jax.jvp(loss, (logits,), (jnp.ones_like(logits).at[0, 0].set(0.0),))
      >>> print(value.round(4), tangent.round(4))
      [0.1269 0.    ] [0.1192 0.    ]
    """
    return SwitchContext("masksafe.forward_mode()", "", lambda: _forward_mode(True))


def label_checks(mode: LabelChecks) -> SwitchContext:
    """Context in which labels are checked; it can be nested, and applies to the current thread.

    ==============  ==================================================================================================
    mode            effect of a bad label
    ==============  ==================================================================================================
    "off"           none: nothing is checked, at no cost. A label out of range gives NaN in its own row
    "checkify"      a `jax.experimental.checkify.check` fails. The function has to be transformed with
                    `checkify.checkify`; otherwise JAX raises a ValueError under `jax.jit`
    "raise"         ValueError, immediately in eager code. A compiled program (`jax.jit`, and in eager code `scan`,
                    `checkpoint`, `shard_map`) fails with `jax.errors.JaxRuntimeError` where its result is awaited
    ==============  ==================================================================================================

    Bad are an integer label outside [0, num_classes) or at a masked class; a label of a distribution that is negative
    or not finite, and a row of such labels that sums to neither 1 nor 0; a binary label that is neither of its two
    values, or outside [0, 1]; a target of a divergence that is negative or not finite; predictions passed to a Dice
    loss as probabilities that are not probabilities; paddings of `ctc_loss` with a live label on the right of a padded
    one; and an `alpha`, `gamma` or `delta` out of range that is an array (a number is refused in any mode). Masked
    labels are never reported. Of attention, lengths outside of 0 to the number of queries or keys are reported; ids of
    segments are not, since padding may have its own.

    The error names the op, the number of bad labels, the index and the value of the first one, the valid range, and
    the line that called the op. There is one error, however many devices there are. The index refers to the labels of
    that call, broadcast to the shape of the loss:

    * In mode "raise" the axis of a `jax.vmap` comes first in the index; in mode "checkify" the error describes one
      element of the `vmap`.
    * Under `jax.shard_map` the index is the one within the shard, whose number the error gives; the counts are totals
      of all shards.
    * In the body of a loop (`scan`, `map`, `fori_loop`) the counts and the index are those of one step, which the error
      does not identify.
    * In the micro-batches of `value_and_grad_of_mean` the error names the micro-batch. If exactly one axis of the
      labels has its size, the index along it is that in the whole batch; the counts are those of the micro-batch.

    The mode is part of JAX's compilation cache key: jitted functions are traced again on entering, and the earlier
    programs are used again on leaving. In mode "checkify" all ops are differentiated by JAX's own rules, as in
    `forward_mode`, because `jax.grad(checkify(f))` of a `jax.custom_vjp` function may be 0 without an error
    (jax 0.10.2).

    Limits of mode "checkify", all due to JAX; mode "raise" avoids them:

    * `checkify(jax.grad(f))` loses the checks in the bodies of loops in `f`. A row with a bad label still has a NaN
      loss and gradient, so training cannot continue unnoticed. A body that is itself transformed with checkify and
      returns its error keeps its checks.
    * In a `jax.shard_map` inside `checkify.checkify`, over the mesh of `jax.set_mesh`, a loss is refused with a
      ValueError: JAX would trace the body a second time in the wrong mesh (jax 0.12). Over an explicit mesh passed as
      an argument, JAX cannot read the resulting error value. Over an automatic mesh, checkify within the body works.
    * In the body of a loop in a `jax.shard_map`, JAX refuses the check while it traces ("Scan carry ... mismatched").
    * Of several processes, one that reads an error from a `jax.shard_map` alone waits for the others, unless the error
      is replicated: `jax.jit(checkify.checkify(f), out_shardings=(replicated, None))`.

    Limits of mode "raise":

    * It calls back to the host, which `jax.export` cannot store.
    * Under `jax.shard_map` all devices have to call the loss: they exchange their findings, as otherwise some would
      wait forever for one that has failed.
    * A `jax.lax.cond` under `vmap` runs both branches, and so the checks of both.
    * A program whose results are never read cannot raise its error. The error is logged in one line when the process
      ends, as is one that was caught within the context and may have been overlooked.

    Args:
      mode: "off", "checkify" or "raise".

    Returns:
      A context manager, which warns if it is never entered: the call alone does nothing.

    Raises:
      ValueError: for another mode; and on leaving, in place of JAX's error about a check that has not been
        functionalized, one that explains how to fix it.

    Example:
      >>> import jax, jax.numpy as jnp, masksafe
      >>> from jax.experimental import checkify
      >>> loss = masksafe.losses.softmax_cross_entropy_with_integer_labels
      >>> logits, labels = jnp.zeros((3, 5)), jnp.array([1, 5, -100])
      >>> with masksafe.label_checks("checkify"):
      ...     error, _ = checkify.checkify(jax.jit(loss))(logits, labels, where=labels != -100)
      >>> print(error.get().split(" (called")[0])
      softmax_cross_entropy_with_integer_labels: 1 of 2 labels are outside [0, 5); first at (1,): 5
      >>> with masksafe.label_checks("raise"):
      ...     loss(logits, labels, where=labels != -100)
      Traceback (most recent call last):
      ...
      ValueError: softmax_cross_entropy_with_integer_labels: 1 of 2 labels are outside [0, 5); first at (1,): 5 ...
    """
    _check_mode("label_checks", "mode", mode)
    way_out = f", or masksafe.set_label_checks({mode!r}) for the whole process"
    return SwitchContext(f"masksafe.label_checks({mode!r})", way_out, functools.partial(_checking, mode))


@contextlib.contextmanager
def _checking(mode: LabelChecks) -> Iterator[None]:
    with _label_checks(mode):
        try:
            yield
        except Exception as error:
            callback_errors.note_raised(error)
            if mode == "checkify" and isinstance(error, ValueError) and "not functionalized" in str(error):
                raise ValueError(f"{error} {_WITHOUT_CHECKIFY}") from error
            raise


def set_label_checks(mode: LabelChecks) -> None:
    """Sets the mode of `label_checks` for the whole process; a `label_checks` context takes precedence.

    The environment variable `MASKSAFE_LABEL_CHECKS` sets the mode when masksafe is imported; an empty value is ignored.

    Args:
      mode: "off", "checkify" or "raise".

    Raises:
      ValueError: for another mode.

    Example:
      >>> import masksafe
      >>> masksafe.set_label_checks("raise")
      >>> masksafe.set_label_checks("off")
    """
    context: Any = _label_checks
    setter = context if hasattr(context, "set_global") else context._obj  # jax 0.10.0 has it on the inner object only
    setter.set_global(_check_mode("set_label_checks", "mode", mode))


def label_check_mode() -> str:
    """The current mode of `label_checks`."""
    mode: str = _label_checks.value
    return mode


def uses_plain_rules() -> bool:
    """Whether ops are to be differentiated by JAX's own rules."""
    return bool(_forward_mode.value) or _label_checks.value == "checkify"
