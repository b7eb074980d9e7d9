"""Reporting an error of a compiled program once rather than three times.

A callback that raises makes its program fail, and JAX may report the failure three times: it logs the traceback at
once, raises where a result is awaited, and finds the failure again among the program's side effects when the process
ends. The raised error contains all the information, so the log entry is suppressed. At exit, an error that has been
raised is cleared, and one that the user may not have seen is logged in one line.

JAX logs in a private module. Should an error come that JAX has not logged there, a warning says so, once.
"""

import atexit
import collections
import functools
import logging
import sys

import jax

from masksafe._core.typing import Array, jitted

_texts: collections.deque[str] = collections.deque(maxlen=100)  # of the errors reported by programs
_raised: collections.deque[str] = collections.deque(maxlen=100)  # of the errors known to have been raised
_suppressed: collections.deque[str] = collections.deque(maxlen=100)  # of the errors that JAX's log lacks
_log_of_jax = logging.getLogger(jax.debug.callback.__module__)


def failure(text: str) -> ValueError:
    """The error that a callback raises to make its program fail."""
    _texts.append(text)
    return ValueError(text)


def note_raised(error: BaseException | None) -> None:
    """Records an error that the user will see."""
    while error is not None:
        _raised.extend(_own_texts(error))
        error = error.__cause__ or error.__context__


def _own_texts(error: BaseException) -> list[str]:
    """The texts of masksafe that an error contains."""
    full_text = str(error)
    texts = [text for text in _texts if text in full_text]
    logs = _log_of_jax.isEnabledFor(logging.ERROR) and not _log_of_jax.disabled
    if logs and any(text not in _suppressed for text in texts):
        _warn_that_jax_logs_elsewhere()
    return texts


@functools.cache  # once
def _warn_that_jax_logs_elsewhere() -> None:
    logging.getLogger("masksafe").warning(
        "jax %s does not log the error of a callback in %s, as masksafe expects: it may be told more than once.",
        jax.__version__,
        _log_of_jax.name,
    )


def _is_foreign(record: logging.LogRecord) -> bool:
    text = str(record.exc_info[1]) if record.exc_info else ""
    if text not in _texts:
        return True
    _suppressed.append(text)
    return False


_log_of_jax.addFilter(_is_foreign)


@atexit.register  # registered after JAX's handler, hence called before it
def _settle_failures() -> None:
    """Clears the failures that JAX would report at exit, and logs those that the user may not have seen."""
    texts = _pending_texts()
    note_raised(getattr(sys, "last_value", None))
    for device in jax.local_devices() if texts else ():
        for text in texts:
            if text not in _raised:
                logging.getLogger("masksafe").error("A program failed, possibly unnoticed: %s", text)
                _raised.append(text)
        _forget_failure(device)
        texts = _pending_texts()
        if not texts:
            return


def _pending_texts() -> list[str]:
    """The texts of the error that JAX would report at exit, if it comes from masksafe."""
    try:
        jax.effects_barrier()
    except Exception as error:
        return _own_texts(error)
    return []


def _forget_failure(device: jax.Device) -> None:
    """Runs a program with a side effect, whose result replaces the failure: JAX keeps only the last one per device."""
    jax.block_until_ready(_run_side_effect(jax.device_put(0, device)))


@jitted()
def _run_side_effect(x: Array) -> Array:
    jax.debug.callback(lambda: None)
    return x
