"""The executors of attention: what may compute a call on a platform, and the choice among them.

The first executor of the table that serves a call computes it; one that computes values alone leaves gradients to the
next. The head of its file says when it is taken, why it exists, with the figure, and what it leaves out. To delete one,
delete its file and its line here.
"""

from collections.abc import Callable
from typing import NamedTuple

from masksafe._core import platforms
from masksafe.attention import _callable, _cudnn, _formula, _loop, _rows, _splash, _weights_kept
from masksafe.attention._plan import Choice, Executor


class Entry(NamedTuple):
    """A line of the table."""

    platform: str | None  # None: all
    choose: Callable[[Choice], Executor | None]  # None if it does not serve the call
    computes_gradients: bool = True


TABLE = {
    "a function of the user": Entry(None, _callable.choose),
    "cuDNN": Entry("cuda", _cudnn.choose),
    "splash attention": Entry("tpu", _splash.choose),
    "weights kept": Entry("cpu", _weights_kept.choose),
    "formula": Entry("cpu", _formula.choose, computes_gradients=False),
    "loop": Entry("cpu", _loop.choose),
    "rows": Entry(None, _rows.choose),  # the last resort
}


def executors_of(platform: str | None, choice: Choice) -> tuple[Executor, Executor]:
    """What computes values alone, and what gradients, in a program for a platform; None: for one not in the table."""
    for name, entry in TABLE.items():
        if entry.platform in (None, platform) and name not in platforms.choices().executors_left_out:
            executor = entry.choose(choice)
            choice = choice._replace(values=choice.values or executor)
            if executor is not None and choice.values is not None and entry.computes_gradients:
                return choice.values, executor
    raise AssertionError("the last executor serves every call")
