"""The two switches: pure forward mode, and the validation of labels.

The value of a JAX user context is part of JAX's compilation cache key: a jitted function is traced again when a switch
changes, and the earlier program is found again when it changes back.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Literal, get_args

import jax
from jax.experimental import checkify

from masksafe._core import call_site
from masksafe._core.arguments import as_choice

LabelChecks = Literal["off", "checkify", "raise"]
LABEL_CHECKS = get_args(LabelChecks)
_VARIABLE = "MASKSAFE_LABEL_CHECKS"
_WITHOUT_CHECKIFY = (
    'masksafe.label_checks("checkify") stages such checks: compile jax.jit(checkify.checkify(step)) rather than '
    'jax.jit(step). masksafe.label_checks("raise") needs no checkify.'
)


_forward_mode = jax.make_user_context(default_value=False)
_finds_nans = jax.make_user_context(default_value=False)
_from_start = os.environ.get(_VARIABLE) or "off"
as_choice("masksafe", f"the environment variable {_VARIABLE}", _from_start, LABEL_CHECKS)
_label_checks = jax.make_user_context(default_value=_from_start)


@contextlib.contextmanager
def forward_mode() -> Iterator[None]:
    """Context in which `jax.jvp`, `jax.linearize` and `jax.jacfwd` work through masksafe's ops.

    Outside the context most ops are `jax.custom_vjp` functions, which have the fastest reverse mode and `jax.hessian`
    (forward over reverse), but no pure forward mode; softmaxes, logsumexps and segment ops have it. Inside, JAX's own
    rules provide both modes, with the same values and the same masks; reverse mode may use more memory. Jitted
    functions are traced again on entering.

    One guarantee holds outside the context only: a row with a bad label or a NaN whose loss is replaced afterwards
    (`jnp.where(labels >= 0, loss, 0)`) has a gradient of 0. Inside, mask the row with `where`.

    Returns:
      A context manager, which also decorates a function. The call alone does nothing.

    Example:
      >>> import jax, jax.numpy as jnp, masksafe
      >>> labels = jnp.array([0, -100])
      >>> def loss(logits):
      ...     per_row = masksafe.losses.softmax_cross_entropy_with_integer_labels
      ...     return per_row(logits, labels, where=labels != -100)
      >>> logits = jnp.array([[2.0, 0.0], [jnp.nan, 1.0]])
      >>> tangent = jnp.array([[0.0, 1.0], [1.0, 1.0]])
      >>> with masksafe.forward_mode():
      ...     value, derivative = jax.jvp(loss, (logits,), (tangent,))
      >>> print(value.round(4), derivative.round(4))
      [0.1269 0.    ] [0.1192 0.    ]
    """
    with _forward_mode(True):
        yield


@contextlib.contextmanager
def label_checks(mode: LabelChecks) -> Iterator[None]:
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

    Masked labels are never reported. Bad are

    * an integer label outside [0, num_classes), at a masked class or not among `kept_ids`; one of these out of range;
    * a class of top-k targets that is named twice, and a log-probability of theirs that is NaN or above 0;
    * a label of a distribution, or a target of a divergence, that is negative or not finite; a row of labels of a
      distribution that sums to neither 1 nor 0;
    * a binary label that is neither of its two values, or outside [0, 1];
    * predictions passed to a Dice loss as probabilities that are not probabilities;
    * paddings of `ctc_loss` with a real label to the right of a padded one;
    * an `alpha`, `gamma` or `delta` out of range that is an array (a number is refused in any mode);
    * lengths of attention below 0, or above the number of queries or keys.

    The error names the op, the number of bad labels, the index and the value of the first one, the valid range, and
    the line that called the op. The index refers to the labels of that call, broadcast to the shape of the loss.

    Jitted functions are traced again when the mode changes, and earlier programs are found again when it changes back.
    In mode "checkify" all ops are differentiated by JAX's own rules, as in `forward_mode`. Nothing masked fails the
    float and index checks of checkify, except in attention. Programs of mode "raise" call back to the host, so
    `jax.export` cannot store them.

    Args:
      mode: "off", "checkify" or "raise".

    Returns:
      A context manager, which also decorates a function. The call alone does nothing.

    Raises:
      ValueError: for another mode; and on leaving, in place of JAX's error about a check that has not been
        functionalized, one that explains how to fix it.

    Example:
      >>> import jax, jax.numpy as jnp, masksafe
      >>> from jax.experimental import checkify
      >>> loss = masksafe.losses.softmax_cross_entropy_with_integer_labels
      >>> logits, labels = jnp.zeros((3, 5)), jnp.array([1, 5, -100])
      >>> mask = labels != -100
      >>> with masksafe.label_checks("checkify"):
      ...     error, _ = checkify.checkify(jax.jit(loss))(logits, labels, where=mask)
      >>> print(error.get().split(": ")[1].split(" (called")[0])
      1 of 2 labels are outside [0, 5); first at (1,)
      >>> with masksafe.label_checks("raise"):
      ...     loss(logits, labels, where=mask)
      Traceback (most recent call last):
      ...
      ValueError: softmax_cross_entropy_with_integer_labels: 1 of 2 labels are outside ...
    """
    as_choice("label_checks", "mode", mode, LABEL_CHECKS)
    with _label_checks(mode):
        try:
            yield
        except Exception as error:
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
    _label_checks.set_global(as_choice("set_label_checks", "mode", mode, LABEL_CHECKS))


def label_check_mode() -> str:
    """The current mode of `label_checks`."""
    return _label_checks.value


def uses_plain_rules() -> bool:
    """Whether ops are to be differentiated by JAX's own rules."""
    return bool(_forward_mode.value) or _label_checks.value == "checkify"


def finding_nans() -> contextlib.AbstractContextManager[None]:
    """Context of a call under `jax_debug_nans`, which is no part of JAX's cache key by itself."""
    return _finds_nans(True) if jax.config.jax_debug_nans else contextlib.nullcontext()  # type: ignore[attr-defined]


def finds_nans() -> bool:
    """Whether JAX searches the results of programs for NaN."""
    return bool(_finds_nans.value)


def may_compute_masked_rows() -> bool:
    """Whether masked rows may be computed and dropped: JAX must not look at their NaN on the way."""
    return not (uses_plain_rules() or finds_nans())


def is_checkified() -> bool:
    """Whether `checkify.checkify` is tracing the call."""
    return label_check_mode() == "checkify" or call_site.innermost_of(checkify.checkify) is not None
