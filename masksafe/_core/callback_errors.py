"""What is left of an error that a compiled program has reported: it is told once.

A callback that raises fails its program, and JAX tells of it up to three times: it logs the traceback at once, raises
where a result is awaited, and when the process ends it finds the failure again in the program's side effects. The
error that is raised says everything. So nothing is logged, and at the end of the process an error that has been raised
is forgotten; one that nobody may have seen is logged in one line.
"""

import atexit
import collections
import logging
import sys

import jax

_texts: collections.deque[str] = collections.deque(maxlen=100)  # of errors that programs have reported
_raised: collections.deque[str] = collections.deque(maxlen=100)  # of those that are known to have been raised


def failure(text: str) -> ValueError:
    """The error with which a callback fails its program."""
    _texts.append(text)
    return ValueError(text)


def note_raised(error: BaseException | None) -> None:
    """Takes note of an error that the user gets to see."""
    while error is not None:
        _raised.extend(_own_texts(error))
        error = error.__cause__ or error.__context__


def _own_texts(error: BaseException) -> list[str]:
    """The texts in an error that are masksafe's."""
    told = str(error)
    return [text for text in _texts if text in told]


def _is_foreign(record: logging.LogRecord) -> bool:
    return not (record.exc_info and record.exc_info[1] is not None and str(record.exc_info[1]) in _texts)


logging.getLogger(jax.debug.callback.__module__).addFilter(_is_foreign)


@atexit.register  # later than JAX, and so called before it
def _settle_failures() -> None:
    """Clears the failures that JAX would find when the process ends, and logs those nobody may have seen."""
    texts = _pending_texts()
    note_raised(getattr(sys, "last_value", None))
    for device in jax.local_devices() if texts else ():
        for text in texts:
            if text not in _raised:
                logging.getLogger("masksafe").error("A program failed, which may have gone unseen: %s", text)
                _raised.append(text)
        _forget_failure(device)
        texts = _pending_texts()
        if not texts:
            return


def _pending_texts() -> list[str]:
    """The texts of the error, if it is masksafe's, that waits in JAX for the end of the process."""
    try:
        jax.effects_barrier()
    except Exception as error:
        return _own_texts(error)
    return []


def _forget_failure(device: jax.Device) -> None:
    """Runs a program with a side effect: of each device JAX keeps what became of the last one."""
    jax.block_until_ready(_run_side_effect(jax.device_put(0, device)))


@jax.jit
def _run_side_effect(x: jax.Array) -> jax.Array:
    jax.debug.callback(lambda: None)
    return x
