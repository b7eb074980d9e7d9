"""The two switches: pure forward mode, and the validation of labels.

JAX keeps the value of a user context in the key of its compilation cache: a jitted function is traced again when a
switch changes, and the older program is found again when it changes back.
"""

import contextlib
import os
from collections.abc import Iterator

import jax

from masksafe._core import callback_errors
from masksafe._core.arguments import message

LABEL_CHECKS = ("off", "checkify", "raise")
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


@contextlib.contextmanager
def forward_mode() -> Iterator[None]:
    """Context in which `jax.jvp`, `jax.linearize` and `jax.jacfwd` work through masksafe's ops.

    Outside of it an op is a `jax.custom_vjp` function: the fastest reverse mode, and `jax.hessian`
    (forward over reverse), but no pure forward mode. Inside, both modes work by JAX's own rules with
    the same values and the same masks; reverse mode may keep more memory alive.
    The mode is part of JAX's compilation cache key: jitted functions are traced again on entering.

    One thing is promised outside only: that a row whose bad label or NaN the user selects away behind the
    loss (`jnp.where(labels >= 0, loss, 0)`) has a gradient of 0. Inside, say it with `where`.

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
    with _forward_mode(True):
        yield


@contextlib.contextmanager
def label_checks(mode: str) -> Iterator[None]:
    """Context in which labels are checked; it can be nested, and belongs to its thread.

    ==============  ==================================================================================================
    mode            what a bad label does
    ==============  ==================================================================================================
    "off"           nothing is checked and nothing is paid: a label out of range gives NaN in its own row
    "checkify"      a `jax.experimental.checkify.check` fails. The function that is run has to go through
                    `checkify.checkify`; one that does not gets a ValueError from JAX under `jax.jit`
    "raise"         ValueError, at once in eager code. A compiled program (`jax.jit`, and in eager code `scan`,
                    `checkpoint`, `shard_map`) fails with `jax.errors.JaxRuntimeError` where its result is awaited
    ==============  ==================================================================================================

    The error names the op, tells how many labels are bad, the index and the value of the first of them, the valid
    range, and where the op was called. Masked labels are never reported.

    The index is that in the labels which the op was called with, broadcast to the shape of the loss. In mode "raise"
    the axis of a `jax.vmap` stands in front of it; under `jax.shard_map` the index is that in the shard, whose number
    the error tells, while the counts are those of all shards. In the body of a loop (`scan`, `map`, `fori_loop`) counts
    and index are those of one step, and the error does not tell which. checkify tells of one element of a `vmap`.
    However many devices there are, the error is one.

    What is bad: an integer label outside [0, num_classes) or at a masked class; a label of a distribution that is
    negative or not finite, and a row of them that sums to neither 1 nor 0; and the predictions of a Dice loss that are
    said to be probabilities and are none.

    The mode is part of JAX's compilation cache key: jitted functions are traced again on entering, and found again on
    leaving. In mode "checkify" all ops are differentiated by JAX's own rules, as in `forward_mode`, since
    `jax.grad(checkify(f))` of a `jax.custom_vjp` function may be 0 without an error (jax 0.10.2).

    One hole is JAX's: `checkify(jax.grad(f))` loses the checks in the bodies of loops in `f` (`scan`, `map`,
    `fori_loop`). In mode "checkify" a row with a bad label has a NaN loss and gradient, so that nothing trains on. The
    ways out are mode "raise", and a body that goes through checkify itself and hands its error on.

    Another one is a `jax.shard_map` inside of `checkify.checkify`, over the mesh of `jax.set_mesh`: JAX traces its body
    a second time in the wrong mesh (jax 0.12), so that a loss in it is refused with a ValueError. Over an explicit mesh
    that is not set but an argument, JAX cannot read the error value that comes out. The ways out are the same: mode
    "raise", or, over an automatic mesh, checkify within the body.

    Mode "raise" calls back to the host, which `jax.export` cannot store. Under `jax.shard_map` the devices tell each
    other what they found, or some would wait for ever for one that has failed: all of them have to call the loss. A
    `jax.lax.cond` under `vmap` runs both branches, and so the checks of both. A program whose results nobody reads
    has nowhere to raise its error: when the process ends, that is logged in one line, as is one that was caught within
    the context and may have been overlooked.

    Args:
      mode: "off", "checkify" or "raise".

    Raises:
      ValueError: for another mode; and on leaving, in place of JAX's complaint about a check that has not been
        functionalized, one that tells the ways out.

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
    with _label_checks(_check_mode("label_checks", "mode", mode)):
        try:
            yield
        except Exception as error:
            callback_errors.note_raised(error)
            if mode == "checkify" and isinstance(error, ValueError) and "not functionalized" in str(error):
                raise ValueError(f"{error} {_WITHOUT_CHECKIFY}") from error
            raise


def set_label_checks(mode: str) -> None:
    """Sets the mode of `label_checks` for the whole process, outside of any such context.

    The environment variable `MASKSAFE_LABEL_CHECKS` does the same when masksafe is imported; empty is unset.

    Args:
      mode: "off", "checkify" or "raise".

    Raises:
      ValueError: for another mode.

    Example:
      >>> import masksafe
      >>> masksafe.set_label_checks("raise")
      >>> masksafe.set_label_checks("off")
    """
    _label_checks.set_global(_check_mode("set_label_checks", "mode", mode))


def label_check_mode() -> str:
    """The mode in which labels are checked here and now."""
    mode: str = _label_checks.value
    return mode


def uses_plain_rules() -> bool:
    """Whether ops are to be differentiated by JAX's own rules."""
    return bool(_forward_mode.value) or _label_checks.value == "checkify"
